"""The figures of a sweep: ``map``, speedup over a swept key and the capacity factor, and ``sweep``, the same as lines.

A map has a cell for every value of the key and every capacity factor of one policy family, and above them, as
references, what has no capacity factor: perfect balance and, where it was measured, replication of experts. Where a
config sweeps several keys, the one with most numbers is the axis and each combination of the others has maps of its
own.

Shapes: G = capacity factors, V = values of the swept key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, withStroke
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from moe_ep_bench.analysis.figures.panels import (
    SPEEDUP_LABEL,
    num_rows,
    pairs_of_axes,
    reference_legend,
    speedup_limits,
    warnings_of,
)
from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.marks import COST, SPEEDUP, as_csv, cases
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    GAMMA,
    INK,
    MARKERS,
    MUTED,
    NATIVE_LINE,
    NOISE_FILL,
    Drawing,
    Legend,
    Looks,
    fit_label,
    num_columns,
    panel_title,
    sheet,
)
from moe_ep_bench.analysis.sweep import Sweep, key_words, sweeps_along, swept_keys
from moe_ep_bench.analysis.words import NONE, footer_lines, pairs_words

_SPEEDS = LinearSegmentedColormap.from_list("speeds", ["#D55E00", "#FFFFFF", "#0072B2"])  # slower, native, faster
# From the smallest capacity factor to the largest.
_FACTORS = LinearSegmentedColormap.from_list("factors", ["#D55E00", "#E69F00", "#009E73", "#0072B2"])
_REPLICATION_LINES = ((0, (1, 1.2)), (0, (3, 1, 1, 1)), (0, (4, 1.5)))
# Colours are full at this speedup, or at the farthest of the sheet where that is farther.
_FULL_COLOUR = 1.3
# Verdict: hatch, words.
_HATCHES = {"no difference": ("////", "inside the noise floor"), "inconclusive": ("..", "inconclusive")}
# Inches: width of a cell under a number and under words, its height; what stands left of the cells.
_CELL_WIDTH, _WORDS_WIDTH, _CELL_HEIGHT, _LABELS = 0.78, 1.2, 0.5, 1.5
_GAP = 0.3  # between capacity factors and references, in cells
_BALANCE = "perfect balance"


@dataclass(frozen=True, eq=False)
class _Panel:
    """One policy family along one sweep.

    Attributes:
        rows: of ``marks.cases``, with ``line``: the capacity factor, or a reference's label; ``at``: place of the
            value. Cases that failed have no numbers but a ``status``. Noise floors come last in each value.
        factors: capacity factors, ascending; ``references`` labels of what has none.
    """

    family: str
    sweep: Sweep
    rows: pd.DataFrame
    factors: list[float]
    references: list[str]

    @property
    def lines(self) -> list[float | str]:
        return [*self.factors, *self.references]

    def along(self, line: float | str, column: str) -> list:
        """A column by value of the key; NaN where there is no such case."""
        own = self.rows[self.rows["line"] == line].set_index("at")[column]
        return list(own.reindex(range(len(self.sweep.values))))

    def title(self, looks: Looks) -> str:
        return looks[self.family].label + (f", {self.sweep.others}" if self.sweep.others else "")


def map_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Speedup by swept key and capacity factor, with the line on which a policy stops paying."""
    panels = _panels(run, comparisons)
    if not panels:
        return None
    columns = num_columns(len(panels))
    width = _LABELS + max(len(panel.sweep.values) * _cell_width(panel) for panel in panels) + 0.3
    total_width = max(8.5, columns * width + 0.3)
    high = [(len(panel.lines) + _GAP) * _CELL_HEIGHT + 1.1 for panel in panels]
    heights = [max(high[at : at + columns]) for at in range(0, len(high), columns)]
    rows = pd.concat([panel.rows[panel.rows["line"].notna()] for panel in panels], ignore_index=True)
    figure = sheet(
        "Where a policy pays: layer speedup over native Megatron-Core",
        f"In the cells: speedup (native = 1), {pairs_words(_facts(panels))}, and below it the share of top-k pairs "
        f"that is dropped. Rows: capacity factor {GAMMA}; above them what has none. Perfect balance: native on "
        "balanced scores, the ceiling of balancing.",
        _footer(run, panels),
        _map_legend(rows),
        width=total_width,
        body=sum(heights),
    )
    limit = np.log(max(np.exp(np.log(rows["speedup"]).abs().max()), _FULL_COLOUR))
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(number, columns)])
        _draw_map(axes, panel, limit, panel.title(looks), total_width / columns - _LABELS - 0.2)
    return Drawing(figure, _csv(rows))


def sweep_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Speedup along the swept key, a line for each capacity factor; below it what the same cases drop."""
    panels = _panels(run, comparisons)
    if not panels:
        return None
    rows = pd.concat([panel.rows for panel in panels], ignore_index=True)
    factors = sorted({factor for panel in panels for factor in panel.factors})
    lines = {
        factor: {"color": _FACTORS(at / (len(factors) - 1)), "marker": MARKERS[at % len(MARKERS)]}
        | {"markeredgecolor": "white", "markeredgewidth": 0.6}
        for at, factor in enumerate(factors)
    }
    legend: list = [(f"{GAMMA} = {factor:g}", Line2D([], [], **look)) for factor, look in lines.items()]
    legend += reference_legend(rows[rows["role"] != "ceiling"])
    references = {
        label: Line2D([], [], **_reference_look(panel, label)) for panel in panels for label in panel.references
    }
    figure = sheet(
        "Layer speedup along the sweep",
        f"Slowest rank's time of one MoE layer, native over policy: {pairs_words(_facts(panels))}, with the 95 % "
        "interval (smallest and largest pair where batches are too few). Perfect balance: native on balanced scores. "
        "Dropped: top-k pairs not computed.",
        _footer(run, panels),
        [*legend, *references.items()],
        width=8.5 if len(panels) == 1 else 12.5,
        body=4.6 * num_rows(len(panels)),
    )
    pairs = pairs_of_axes(figure, [panel.title(looks) for panel in panels], (3.2, 1.2))
    for (above, below), panel in zip(pairs, panels, strict=True):
        _draw_lines(above, below, panel, lines)
    return Drawing(figure, _csv(rows))


def _panels(run: Run, comparisons: list[ComparisonResult]) -> list[_Panel]:
    """Families with several capacity factors along the first of the swept keys; sweep by sweep."""
    keys = swept_keys(comparisons)
    panels = []
    for sweep in sweeps_along(keys[0], comparisons) if keys else []:
        rows = cases(run, sweep.comparisons, failed=True)
        known = rows[(rows["role"] == "policy") & rows["speedup"].notna() & rows["capacity_factor"].notna()]
        for family, own in known.groupby("family", sort=False):
            factors = sorted(own["capacity_factor"].unique())
            if len(factors) > 1:
                panels.append(_panel(sweep, str(family), factors, rows))
    return panels


def _panel(sweep: Sweep, family: str, factors: list[float], rows: pd.DataFrame) -> _Panel:
    """The rows of a family: its factors, perfect balance and replications value by value, then the noise floor."""
    rows = rows[(rows["status"] == "ok") | (rows["role"] == "policy") | rows["result"].isna()]
    line = rows["capacity_factor"].where(rows["family"] == family).astype(object)
    line = line.mask(rows["role"] == "ceiling", _BALANCE).mask(rows["role"] == "replication", rows["policy"])
    labels = list(dict.fromkeys(rows.loc[rows["role"] == "replication", "policy"]))
    references = [*([_BALANCE] if (rows["role"] == "ceiling").any() else []), *labels]
    order = {name: at for at, name in enumerate([*factors, *references])}
    about = {"panel": family, "swept_key": sweep.key, "other_keys": sweep.others or None}
    rows = rows.assign(
        line=line, at=rows["place"], swept_value=rows["place"].map(dict(enumerate(sweep.values))), **about
    )
    rows = rows[rows["line"].isin(list(order)) | rows["result"].isna()]
    rows = rows.iloc[np.lexsort((rows["line"].map(order).fillna(len(order)), rows["at"]))]
    verdicts = rows["verdict"].where(rows["speedup"].notna())
    return _Panel(family, sweep, rows.assign(verdict=verdicts), factors, references)


def _csv(rows: pd.DataFrame) -> pd.DataFrame:
    where = ("panel", "swept_key", "swept_value", "other_keys")
    return as_csv(rows, *where, *SPEEDUP, "verdict", "status", *COST)


def _facts(panels: list[_Panel]) -> list[Comparison]:
    return [comparison.comparison for panel in panels for comparison in panel.sweep.comparisons]


def _footer(run: Run, panels: list[_Panel]) -> list[str]:
    """As under every figure, but of the workloads only what the ends of the sweep have."""
    facts = _facts(panels)
    warnings = warnings_of(facts)
    workloads = {fact.workload.description for fact in facts}
    if len(workloads) > 2:
        ends = facts[0].workload, facts[-1].workload
        facts = [fact.model_copy(update={"workload": ends[place > 0]}) for place, fact in enumerate(facts)]
        warnings.append(f"of {len(workloads)} workloads the first and the last are named.")
    return footer_lines(run, facts, warnings)


# ---- maps --------------------------------------------------------------------------------------------------------


def _cell_width(panel: _Panel) -> float:
    return _CELL_WIDTH if panel.sweep.is_numeric else _WORDS_WIDTH


def _draw_map(axes: Axes, panel: _Panel, limit: float, title: str, inches: float) -> None:
    num_factors, num_values = len(panel.factors), len(panel.sweep.values)
    heights = [at + (_GAP if at >= num_factors else 0) for at in range(len(panel.lines))]
    for place in range(num_values):
        for height in heights:
            axes.add_patch(Rectangle((place - 0.5, height - 0.5), 1, 1, facecolor="#F3F3F3", edgecolor="white"))
    for cell in panel.rows[panel.rows["line"].notna()].itertuples():
        _draw_cell(axes, cell.at, heights[panel.lines.index(cell.line)], cell, limit)
    speedups_GV = np.array([panel.along(factor, "speedup") for factor in panel.factors], dtype=float)
    _draw_break_even(axes, speedups_GV)
    panel_title(axes, f"{title}{_everywhere_words(speedups_GV)}", inches)
    names = [f"{line:g}" if isinstance(line, float) else fit_label(line, _LABELS - 0.35) for line in panel.lines]
    axes.set_yticks(heights, names)
    axes.set_xticks(range(num_values), [fit_label(label, _cell_width(panel) - 0.05) for label in panel.sweep.labels])
    axes.set_xlabel(key_words(panel.sweep.key))
    axes.set_ylabel(f"capacity factor {GAMMA}", y=num_factors / (len(heights) + _GAP) / 2)
    axes.set_xlim(-0.5, num_values - 0.5)
    axes.set_ylim(-0.5, heights[-1] + 0.5)
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_cell(axes: Axes, place: int, height: float, cell, limit: float) -> None:
    """A cell's speedup as colour and number, and what it is paid with."""
    if np.isnan(cell.speedup):
        words = NONE if cell.status == "ok" else cell.status
        axes.text(place, height, words, ha="center", va="center", fontsize="small", color=MUTED)
        return
    corner = (place - 0.5, height - 0.5)
    colour = _SPEEDS(0.5 + np.log(cell.speedup) / limit / 2)
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
    is_dark = np.dot(colour[:3], (0.2126, 0.7152, 0.0722)) < 0.5
    hatch, _ = _HATCHES.get(cell.verdict, ("", ""))
    if hatch:
        pale = "#DDDDDD" if is_dark else "#B5B5B5"
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, hatch=hatch, edgecolor=pale, linewidth=0))
    halo = [withStroke(linewidth=3, foreground=colour), Normal()] if hatch else []  # clear of the hatch
    text = {"ha": "center", "color": "white" if is_dark else INK, "path_effects": halo, "zorder": 4}
    has_cost = not np.isnan(cell.dropped_percent)
    axes.text(place, height + 0.02 * has_cost, f"{cell.speedup:.2f}", va="bottom" if has_cost else "center", **text)
    if has_cost:
        axes.text(place, height - 0.08, f"{cell.dropped_percent:.1f} %", va="top", fontsize="x-small", **text)


def _everywhere_words(speedups_GV: NDArray[np.float64]) -> str:
    """What there is to say where no break-even can be drawn."""
    measured = speedups_GV[~np.isnan(speedups_GV)]
    if not (measured > 1).any():
        return ": nowhere faster than native"
    return ": faster than native in every cell" if (measured > 1).all() else ""


def _draw_break_even(axes: Axes, speedups_GV: NDArray[np.float64]) -> None:
    """A line along the edges between cells that pay and cells that do not, above all that stands in cells."""
    lines = list(_edges(speedups_GV))
    for zorder, look in ((4.5, {"color": "white", "linewidth": 4.4}), (5, {"color": INK, "linewidth": 2.4})):
        for line in lines:
            axes.plot(*zip(*line, strict=True), solid_capstyle="projecting", zorder=zorder, **look)
    axes.set_autoscale_on(False)


def _edges(speedups_GV: NDArray[np.float64]) -> Iterator[list[tuple[float, float]]]:
    """Edges between neighbouring cells of which one pays and the other does not."""
    for (row, column), speedup in np.ndenumerate(speedups_GV):
        for above, right in ((1, 0), (0, 1)):
            if row + above < speedups_GV.shape[0] and column + right < speedups_GV.shape[1]:
                other = speedups_GV[row + above, column + right]
                if not np.isnan(speedup + other) and (speedup > 1) != (other > 1):
                    begin = (column + right - 0.5, row + above - 0.5)
                    yield [begin, (column + 0.5, row + 0.5)]


def _map_legend(rows: pd.DataFrame) -> Legend:
    legend: list = [
        ("faster", Patch(facecolor=_SPEEDS(0.85))),
        ("slower", Patch(facecolor=_SPEEDS(0.15))),
        ("break-even: speedup 1", Line2D([], [], color=INK, linewidth=2.2)),
    ]
    for verdict, (hatch, words) in _HATCHES.items():
        if (rows["verdict"] == verdict).any():
            legend.append((words, Patch(facecolor="white", edgecolor="#8A8A8A", hatch=2 * hatch, linewidth=0.5)))
    return legend


# ---- lines -------------------------------------------------------------------------------------------------------


def _draw_lines(above: Axes, below: Axes, panel: _Panel, lines: dict[float, dict]) -> None:
    sweep = panel.sweep
    places = [float(value) for value in (sweep.values if sweep.is_numeric else range(len(sweep.values)))]
    floors = panel.rows[panel.rows["result"].isna()].set_index("at").reindex(range(len(places)))
    band = floors["speedup_low"].astype(float), floors["speedup_high"].astype(float)
    above.fill_between(places, *band, color=NOISE_FILL, linewidth=0, zorder=0.5)
    above.axhline(1, **NATIVE_LINE)
    for number, label in enumerate(panel.references):
        above.plot(places, panel.along(label, "speedup"), zorder=2 + number / 10, **_reference_look(panel, label))
    for number, factor in enumerate(panel.factors):
        look = lines[factor]
        shift = ScaledTranslation(0.05 * (number - (len(panel.factors) - 1) / 2), 0, above.figure.dpi_scale_trans)
        beside = {"transform": above.transData + shift}
        above.plot(places, panel.along(factor, "speedup"), zorder=3, **beside, **look)
        ends = panel.along(factor, "speedup_low"), panel.along(factor, "speedup_high")
        above.vlines(places, *ends, color=look["color"], linewidth=1.2, **beside)
        below.plot(places, panel.along(factor, "dropped_percent"), **look)
    if sweep.is_numeric and places[0] > 0 and places[-1] / places[0] >= 8:
        above.set_xscale("log", base=2)
    above.set_xticks(places, sweep.labels)
    above.minorticks_off()
    above.grid(False, axis="x")
    above.set_ylim(speedup_limits(panel.rows))
    above.set_ylabel(SPEEDUP_LABEL)
    below.set_ylim(bottom=min(0.0, below.get_ylim()[0]))
    below.set_ylabel("dropped (%)")
    below.set_xlabel(key_words(sweep.key))


def _reference_look(panel: _Panel, label: str) -> dict:
    if label == _BALANCE:
        return CEILING_LINE
    number = [name for name in panel.references if name != _BALANCE].index(label)
    return {"color": "#CC79A7", "linestyle": _REPLICATION_LINES[number % len(_REPLICATION_LINES)], "linewidth": 2}
