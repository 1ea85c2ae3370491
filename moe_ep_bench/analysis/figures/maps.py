"""The figures of a sweep: ``map``, speedup over a swept key and the capacity factor, and ``sweep``, the same as lines.

A map has a cell for every value of the key and every capacity factor of one policy family, and above them, as
references, what has no capacity factor: perfect balance and, where it was measured, replication of experts. Where a
config sweeps several keys, the one with most numbers is the axis and each combination of the others has maps of its
own.

Shapes: G = capacity factors, V = values of the swept key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, withStroke
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.marks import cost_values, floor_row, mark, speedup_values, table
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    GAMMA,
    INK,
    MUTED,
    NOISE_FILL,
    Drawing,
    Legend,
    Look,
    panel_title,
    sheet,
    wrap,
)
from moe_ep_bench.analysis.sweep import Sweep, key_words, sweeps_along, swept_keys
from moe_ep_bench.analysis.words import NONE, OVERSUBSCRIBED, footer_lines, pairs_words, percent

Looks = dict[str, Look]

SLOWER, FASTER = "#D55E00", "#0072B2"
_SPEEDS = LinearSegmentedColormap.from_list("speeds", [SLOWER, "#FFFFFF", FASTER])
# From the smallest capacity factor to the largest.
_FACTORS = LinearSegmentedColormap.from_list("factors", ["#D55E00", "#E69F00", "#009E73", "#0072B2"])
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_REPLICATION_LINES = ((0, (1, 1.2)), (0, (3, 1, 1, 1)), (0, (4, 1.5)))
# Colours are full at this speedup, or at the farthest of the sheet where that is farther.
_FULL_COLOUR = 1.3
_WITHIN_FLOOR, _UNDECIDED = "////", ".."
# Inches: width of a cell under a number and under words, its height; what stands left of the cells.
_CELL_WIDTH, _WORDS_WIDTH, _CELL_HEIGHT, _LABELS = 0.78, 1.2, 0.5, 1.5
_GAP = 0.3  # between capacity factors and references, in cells
_MAX_COLUMNS = 2
_BALANCE = "perfect balance"


@dataclass(frozen=True, eq=False)
class _Panel:
    """One policy family along one sweep; ``cells_GV`` lacks cases that were not measured."""

    family: str
    sweep: Sweep
    factors: tuple[float, ...]
    cells_GV: list[list[CaseResult | None]]

    @property
    def references(self) -> list[tuple[str, list[CaseResult | None]]]:
        """What has no capacity factor, by label: a case for each value of the key."""
        ceilings = [comparison.of_role("ceiling") for comparison in self.sweep.comparisons]
        found: dict[str, list[CaseResult | None]] = {_BALANCE: ceilings} if any(ceilings) else {}
        for label in dict.fromkeys(r.case.label for c in self.sweep.comparisons for r in c.replications):
            found[label] = [_labelled(comparison.replications, label) for comparison in self.sweep.comparisons]
        return list(found.items())

    @property
    def medians(self) -> NDArray[np.float64]:
        """Speedups [G, V]; NaN where there is none."""
        return np.array([[_median(cell) for cell in row] for row in self.cells_GV])


def map_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Speedup by swept key and capacity factor, with the line on which a policy stops paying."""
    panels = _panels(comparisons)
    if not panels:
        return None
    cells_wide = max(len(panel.sweep.values) * _cell_width(panel.sweep) for panel in panels)
    width = _LABELS + cells_wide + 0.3
    columns = min(_MAX_COLUMNS, len(panels))
    rows = list(_rows(panels, columns))
    heights = [max(_num_cells_high(panel) for panel in row) * _CELL_HEIGHT + 1.1 for row in rows]
    total_width = max(8.5, columns * width + 0.3)
    figure = sheet(
        "Where a policy pays: layer speedup over native Megatron-Core",
        f"In the cells: speedup (native = 1), {pairs_words(_facts(panels))}, and below it the share of top-k pairs "
        f"that is dropped. Rows: capacity factor {GAMMA}; above them what has none. Perfect balance: native on "
        "balanced scores, the ceiling of balancing.",
        _footer(run, panels),
        _map_legend(panels),
        width=total_width,
        body=sum(heights),
    )
    shown = [cell for panel in panels for cell in _all_cells(panel)]
    farthest = max([abs(np.log(cell.speedup.median)) for cell in shown if cell.speedup], default=0.0)
    limit = max(float(farthest), float(np.log(_FULL_COLOUR)))
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(number, columns)])
        _draw_map(axes, panel, limit, _title(panel, looks), total_width / columns - _LABELS - 0.2)
    return Drawing(figure, table(_marks(run, panels, with_floors=False)))


def sweep_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Speedup along the swept key, a line for each capacity factor; below it what the same cases drop."""
    panels = _panels(comparisons)
    if not panels:
        return None
    lines = _factor_lines(panels)
    columns = min(_MAX_COLUMNS, len(panels))
    rows = len(list(_rows(panels, columns)))
    figure = sheet(
        "Layer speedup along the sweep",
        f"Slowest rank's time of one MoE layer, native over policy: {pairs_words(_facts(panels))}, with the 95 % "
        "interval (smallest and largest pair where batches are too few). Perfect balance: native on balanced scores. "
        "Dropped: top-k pairs not computed.",
        _footer(run, panels),
        _sweep_legend(panels, lines),
        width=8.5 if columns == 1 else 12.5,
        body=4.6 * rows,
    )
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3.2, 1.2] * rows)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        above = figure.add_subplot(grid[2 * row, column])
        below = figure.add_subplot(grid[2 * row + 1, column], sharex=above)
        panel_title(above, _title(panel, looks), 6.6 if columns == 1 else 4.9)
        _draw_lines(above, below, panel, lines)
    return Drawing(figure, table(_marks(run, panels, with_floors=True)))


# ---- what is drawn -----------------------------------------------------------------------------------------------


def _panels(comparisons: list[ComparisonResult]) -> list[_Panel]:
    """Families with several capacity factors along the first of the swept keys; sweep by sweep."""
    keys = swept_keys(comparisons)
    panels = []
    for sweep in sweeps_along(keys[0], comparisons) if keys else []:
        families: dict[str, set[float]] = {}
        for result in (r for comparison in sweep.comparisons for r in comparison.policies):
            if result.capacity_factor is not None and result.speedup is not None:
                families.setdefault(result.family, set()).add(result.capacity_factor)
        for family, factors in families.items():
            if len(factors) > 1:
                ascending = tuple(sorted(factors))
                cells_GV = [[_cell(c, family, factor) for c in sweep.comparisons] for factor in ascending]
                panels.append(_Panel(family, sweep, ascending, cells_GV))
    return panels


def _marks(run: Run, panels: list[_Panel], *, with_floors: bool) -> Iterator[dict]:
    """A row per cell; a case that several panels show as their reference has one in each."""
    for panel in panels:
        for place, (comparison, value) in enumerate(zip(panel.sweep.comparisons, panel.sweep.values, strict=True)):
            where = {"panel": panel.family, "swept_key": panel.sweep.key, "swept_value": value}
            where |= {"other_keys": panel.sweep.others or None}
            for cells in (*panel.cells_GV, *(cells for _, cells in panel.references)):
                cell = cells[place]
                if cell is not None:
                    judged = {"verdict": cell.verdict if cell.speedup else None, "status": cell.case.status}
                    values = {**speedup_values(cell.speedup), **judged, **cost_values(cell)}
                    yield mark(run, comparison, cell, **where, **values)
            yield from floor_row(run, comparison, **where) if with_floors else ()


def _cell(comparison: ComparisonResult, family: str, factor: float) -> CaseResult | None:
    return next((r for r in comparison.results if (r.family, r.capacity_factor) == (family, factor)), None)


def _labelled(results: Sequence[CaseResult], label: str) -> CaseResult | None:
    return next((result for result in results if result.case.label == label), None)


def _median(result: CaseResult | None) -> float:
    return result.speedup.median if result is not None and result.speedup is not None else np.nan


def _rows(panels: list[_Panel], columns: int) -> Iterator[list[_Panel]]:
    return (panels[start : start + columns] for start in range(0, len(panels), columns))


def _all_cells(panel: _Panel) -> list[CaseResult]:
    rows = [*panel.cells_GV, *(cells for _, cells in panel.references)]
    return [cell for row in rows for cell in row if cell is not None]


def _title(panel: _Panel, looks: Looks) -> str:
    others = f", {panel.sweep.others}" if panel.sweep.others else ""
    return f"{looks[panel.family].label}{others}"


def _axis_label(panel: _Panel) -> str:
    return key_words(panel.sweep.key)


def _facts(panels: list[_Panel]) -> list[Comparison]:
    return [comparison.comparison for panel in panels for comparison in panel.sweep.comparisons]


def _footer(run: Run, panels: list[_Panel]) -> list[str]:
    """As under every figure, but of the workloads only what the ends of the sweep have; then what a break-even is."""
    facts = _facts(panels)
    warnings = [OVERSUBSCRIBED] if any(fact.oversubscribed for fact in facts) else []
    workloads = list(dict.fromkeys(fact.workload.description for fact in facts))
    if len(workloads) > 2:
        ends = facts[0].workload, facts[-1].workload
        facts = [fact.model_copy(update={"workload": ends[place > 0]}) for place, fact in enumerate(facts)]
        warnings.append(f"of {len(workloads)} workloads the first and the last are named.")
    return footer_lines(run, facts, warnings)


# ---- maps --------------------------------------------------------------------------------------------------------


def _cell_width(sweep: Sweep) -> float:
    return _CELL_WIDTH if sweep.is_numeric else _WORDS_WIDTH


def _num_cells_high(panel: _Panel) -> float:
    return len(panel.factors) + len(panel.references) + _GAP


def _draw_map(axes: Axes, panel: _Panel, limit: float, title: str, inches: float) -> None:
    num_factors, num_values = len(panel.factors), len(panel.sweep.values)
    heights = [*range(num_factors), *(num_factors + _GAP + place for place in range(len(panel.references)))]
    rows = [*panel.cells_GV, *(cells for _, cells in panel.references)]
    for height, cells in zip(heights, rows, strict=True):
        for place, cell in enumerate(cells):
            _draw_cell(axes, place, height, cell, limit)
    _draw_break_even(axes, panel.medians)
    panel_title(axes, f"{title}{_everywhere_words(panel.medians)}", inches)
    labels = [f"{factor:g}" for factor in panel.factors]
    axes.set_yticks(heights, [*labels, *(wrap(label, _LABELS - 0.35, 9) for label, _ in panel.references)])
    axes.set_xticks(
        range(num_values), [wrap(label, _cell_width(panel.sweep) - 0.05, 9) for label in panel.sweep.labels]
    )
    axes.set_xlabel(_axis_label(panel))
    axes.set_ylabel(f"capacity factor {GAMMA}", y=num_factors / _num_cells_high(panel) / 2)
    axes.set_xlim(-0.5, num_values - 0.5)
    axes.set_ylim(-0.5, heights[-1] + 0.5)
    axes.grid(False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_cell(axes: Axes, place: int, height: float, cell: CaseResult | None, limit: float) -> None:
    corner = (place - 0.5, height - 0.5)
    if cell is None or cell.speedup is None:
        axes.add_patch(Rectangle(corner, 1, 1, facecolor="#F3F3F3", edgecolor="white"))
        words = NONE if cell is None or cell.case.is_ok else cell.case.status
        axes.text(place, height, words, ha="center", va="center", fontsize=8, color=MUTED)
        return
    colour = _SPEEDS(0.5 + np.log(cell.speedup.median) / limit / 2)
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
    hatch = {"no difference": _WITHIN_FLOOR, "cannot say": _UNDECIDED}.get(cell.verdict)
    ink = "white" if _luminance(colour) < 0.5 else INK
    if hatch:
        pale = "#B5B5B5" if ink == INK else "#DDDDDD"
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, hatch=hatch, edgecolor=pale, linewidth=0))
    halo = [withStroke(linewidth=3, foreground=colour), Normal()] if hatch else []  # clear of the hatch
    text = {"ha": "center", "color": ink, "path_effects": halo, "zorder": 4}
    cost = _cost_words(cell)
    if cost:
        axes.text(place, height + 0.02, f"{cell.speedup.median:.2f}", va="bottom", fontsize=9.5, **text)
        axes.text(place, height - 0.08, cost, va="top", fontsize=7, **text)
    else:
        axes.text(place, height, f"{cell.speedup.median:.2f}", va="center", fontsize=9.5, **text)


def _cost_words(cell: CaseResult) -> str:
    """What a cell's speedup is paid with."""
    if cell.case.role == "ceiling" or cell.fidelity is None:
        return ""
    return f"{percent(cell.fidelity.dropped_share)} %"


def _luminance(colour: Sequence[float]) -> float:
    return float(np.dot(colour[:3], (0.2126, 0.7152, 0.0722)))


def _everywhere_words(speedups_GV: NDArray[np.float64]) -> str:
    """What there is to say where no break-even can be drawn."""
    measured = speedups_GV[~np.isnan(speedups_GV)]
    if not (measured > 1).any():
        return ": nowhere faster than native"
    return ": faster than native in every cell" if (measured > 1).all() else ""


def _draw_break_even(axes: Axes, speedups_GV: NDArray[np.float64]) -> None:
    """A line along the edges between cells that pay and cells that do not, above all that stands in cells."""
    lines = list(_edges(speedups_GV > 1, ~np.isnan(speedups_GV)))
    for zorder, look in ((4.5, {"color": "white", "linewidth": 4.4}), (5, {"color": INK, "linewidth": 2.4})):
        for line in lines:
            axes.plot(*zip(*line, strict=True), solid_capstyle="projecting", zorder=zorder, **look)
    axes.set_autoscale_on(False)


def _edges(pays_GV: NDArray[np.bool_], known_GV: NDArray[np.bool_]) -> Iterator[list[tuple[float, float]]]:
    """Edges between neighbouring cells of which one pays and the other does not."""
    for (row, column), pays in np.ndenumerate(pays_GV):
        for next_row, next_column in ((row + 1, column), (row, column + 1)):
            if next_row < pays_GV.shape[0] and next_column < pays_GV.shape[1]:
                there = (next_row, next_column)
                if known_GV[row, column] and known_GV[there] and pays != pays_GV[there]:
                    if next_row > row:
                        yield [(column - 0.5, row + 0.5), (column + 0.5, row + 0.5)]
                    else:
                        yield [(column + 0.5, row - 0.5), (column + 0.5, row + 0.5)]


def _map_legend(panels: list[_Panel]) -> Legend:
    cells = [cell for panel in panels for cell in _all_cells(panel) if cell.speedup is not None]
    legend: list = [
        ("faster", Patch(facecolor=_SPEEDS(0.85))),
        ("slower", Patch(facecolor=_SPEEDS(0.15))),
        ("break-even: speedup 1", Line2D([], [], color=INK, linewidth=2.2)),
    ]
    for verdict, hatch, words in (
        ("no difference", 2 * _WITHIN_FLOOR, "inside the noise floor"),
        ("cannot say", 2 * _UNDECIDED, "cannot say"),
    ):
        if any(cell.verdict == verdict for cell in cells):
            legend.append((words, Patch(facecolor="white", edgecolor="#8A8A8A", hatch=hatch, linewidth=0.5)))
    return legend


# ---- lines -------------------------------------------------------------------------------------------------------


def _draw_lines(above: Axes, below: Axes, panel: _Panel, lines: dict[float, dict]) -> None:
    places = _places(panel.sweep)
    heights = [1.0]
    above.axhline(1, color=INK, linewidth=1.2, zorder=1)
    heights += _draw_floor(above, panel, places)
    for number, (label, cells) in enumerate(panel.references):
        medians = [_median(cell) for cell in cells]
        heights += medians
        look = CEILING_LINE if label == _BALANCE else _replication_look(panel, label)
        above.plot(places, medians, zorder=2 + number / 10, **look)
    for number, (factor, cells) in enumerate(zip(panel.factors, panel.cells_GV, strict=True)):
        look = lines[factor]
        shift = ScaledTranslation(0.05 * (number - (len(panel.factors) - 1) / 2), 0, above.figure.dpi_scale_trans)
        above.plot(places, [_median(cell) for cell in cells], transform=above.transData + shift, zorder=3, **look)
        for place, cell in zip(places, cells, strict=True):
            if cell is not None and cell.speedup is not None:
                ends = [cell.speedup.low, cell.speedup.high]
                heights += ends
                above.vlines(place, *ends, color=look["color"], linewidth=1.2, transform=above.transData + shift)
        below.plot(places, [100 * c.fidelity.dropped_share if c and c.fidelity else np.nan for c in cells], **look)
    _ticks(above, panel.sweep, places)
    low, high = np.nanmin(heights), np.nanmax(heights)
    pad = 0.07 * max(high - low, 0.1)
    above.set_ylim(low - pad, high + pad)
    above.set_ylabel("speedup (native = 1)")
    above.tick_params(labelbottom=False)
    below.set_ylim(bottom=min(0.0, below.get_ylim()[0]))
    below.set_ylabel("dropped (%)")
    below.set_xlabel(_axis_label(panel))


def _places(sweep: Sweep) -> list[float]:
    if not sweep.is_numeric:
        return [float(place) for place in range(len(sweep.values))]
    return [float(value) for value in sweep.values]


def _ticks(axes: Axes, sweep: Sweep, places: list[float]) -> None:
    """At the values; numbers that span much stand on a logarithmic axis."""
    if sweep.is_numeric and places[0] > 0 and places[-1] / places[0] >= 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, sweep.labels)
    axes.minorticks_off()
    axes.grid(False, axis="x")


def _draw_floor(axes: Axes, panel: _Panel, places: list[float]) -> list[float]:
    floors = [comparison.floor for comparison in panel.sweep.comparisons]
    ends = [(floor.low, floor.high) if floor else (np.nan, np.nan) for floor in floors]
    low, high = np.array(ends).T
    axes.fill_between(places, low, high, color=NOISE_FILL, linewidth=0, zorder=0.5)
    return [value for value in (*low, *high) if not np.isnan(value)]


def _factor_lines(panels: list[_Panel]) -> dict[float, dict]:
    """How the line of each capacity factor is drawn, the same in all panels."""
    factors = sorted({factor for panel in panels for factor in panel.factors})
    return {
        factor: {
            "color": _FACTORS(number / (len(factors) - 1)),
            "marker": _MARKERS[number % len(_MARKERS)],
            "markeredgecolor": "white",
            "markeredgewidth": 0.6,
        }
        for number, factor in enumerate(factors)
    }


def _replication_look(panel: _Panel, label: str) -> dict:
    labels = [name for name, _ in panel.references if name != _BALANCE]
    line = _REPLICATION_LINES[labels.index(label) % len(_REPLICATION_LINES)]
    return {"color": "#CC79A7", "linestyle": line, "linewidth": 2}


def _sweep_legend(panels: list[_Panel], lines: dict[float, dict]) -> Legend:
    legend: list = [(f"{GAMMA} = {factor:g}", Line2D([], [], **look)) for factor, look in lines.items()]
    legend.append(("native", Line2D([], [], color=INK, linewidth=1.2)))
    floors = [comparison.floor for panel in panels for comparison in panel.sweep.comparisons]
    if any(floor.low < floor.high for floor in floors if floor is not None):
        legend.append(("noise floor", Patch(facecolor=NOISE_FILL)))
    references: dict[str, Line2D] = {}
    for panel in panels:
        for label, _ in panel.references:
            look = CEILING_LINE if label == _BALANCE else _replication_look(panel, label)
            references.setdefault(label, Line2D([], [], **look))
    legend += references.items()
    return legend
