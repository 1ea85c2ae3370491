"""The figures of a sweep: ``map``, speedup over a swept key and the capacity factor, and ``sweep``, the same as lines.

A map has a cell for every value of the key and every capacity factor of one policy family, and above them, as
references, what has no capacity factor: perfect balance and, where it was measured, replication of experts. Where a
config sweeps several keys, the one with most numbers is the axis and each combination of the others has maps of its
own.

Shapes: G = capacity factors, V = values of the swept key.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, withStroke
from numpy.typing import NDArray

from moe_ep_bench.analysis.figures.panels import (
    COST,
    SPEEDUP,
    case_rows,
    csv,
    draw_along,
    footer,
    name_values,
    reference_legend,
    run_looks,
    sheet_of_panels,
)
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    GAMMA,
    INK,
    MARKERS,
    MUTED,
    Drawing,
    Legend,
    fit_label,
    panel_title,
)
from moe_ep_bench.analysis.sweep import key_words, sweeps_along, swept_keys, value_words
from moe_ep_bench.analysis.words import NONE
from moe_ep_bench.timing.statistics import BELOW_MODEL

_SPEEDS = LinearSegmentedColormap.from_list("speeds", ["#D55E00", "#FFFFFF", "#0072B2"])  # slower, native, faster
# From the smallest capacity factor to the largest.
_FACTORS = LinearSegmentedColormap.from_list("factors", ["#D55E00", "#E69F00", "#009E73", "#0072B2"])
_REPLICATION_LINES = ((0, (1, 1.2)), (0, (3, 1, 1, 1)), (0, (4, 1.5)))
# Colours are full at this speedup, or at the farthest of the sheet where that is farther.
_FULL_COLOUR = 1.3
# Verdict: hatch, words.
_HATCHES = {
    "no difference": ("////", "inside the noise floor"),
    BELOW_MODEL: ("////", BELOW_MODEL),
    "inconclusive": ("..", "inconclusive"),
}
_GAP = 0.3  # between capacity factors and references, in cells
_BALANCE = "perfect balance"
_CSV = ("panel", "swept_key", "swept_value", "other_keys", *SPEEDUP, "verdict", "status", *COST)


def map_figure(run: Run) -> Drawing | None:
    """Speedup by swept key and capacity factor, with the line on which a policy stops paying."""
    rows = swept_rows(run)
    if rows is None:
        return None
    rows = rows[~rows["is_floor"]]
    panels = [own for _, own in rows.groupby(["panel", "other_keys"], sort=False, dropna=False)]
    header = (
        "Where a policy pays: layer speedup over native Megatron-Core",
        f"In the cells the speedup and the share of top-k pairs that is dropped, by capacity factor {GAMMA}; above "
        "them what has none.",
        footer(run, rows),
        _map_legend(rows),
    )
    height = (max(own["line"].nunique() for own in panels) + _GAP) * 0.48 + 1.1
    figure, axes = sheet_of_panels(header, [own["title"].iloc[0] for own in panels], (1,), height, left=1.8)
    limit = max(rows["speedup"].map(np.log).abs().max(), np.log(_FULL_COLOUR))
    for (one,), own in zip(axes, panels, strict=True):
        _draw_map(one, own, limit, figure.get_figwidth() / min(2, len(panels)) - 2.2)
    return Drawing(figure, csv(rows, *_CSV))


def sweep_figure(run: Run) -> Drawing | None:
    """Speedup along the swept key, a line for each capacity factor; below it what the same cases drop."""
    rows = swept_rows(run)
    if rows is None:
        return None
    panels = [own for _, own in rows.groupby(["panel", "other_keys"], sort=False, dropna=False)]
    lines = list(rows["line"].dropna().unique())
    factors = sorted(line for line in lines if isinstance(line, float))
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    looks = {
        factor: {"color": _FACTORS(at / (len(factors) - 1)), "marker": MARKERS[at % len(MARKERS)], **edge}
        for at, factor in enumerate(factors)
    }
    replications = [line for line in lines if isinstance(line, str) and line != _BALANCE]
    references = {_BALANCE: CEILING_LINE} if _BALANCE in lines else {}
    references |= {
        label: {"color": "#CC79A7", "linestyle": _REPLICATION_LINES[at % 3], "linewidth": 2}
        for at, label in enumerate(replications)
    }
    named = [(f"{GAMMA} = {factor:g}", Line2D([], [], **look)) for factor, look in looks.items()]
    header = (
        "Layer speedup along the sweep",
        "Slowest rank's time of one MoE layer, native over policy, median with its spread; below it the top-k pairs "
        "that the policy drops.",
        footer(run, rows),
        [*named, *reference_legend(rows[rows["is_floor"]]), *((n, Line2D([], [], **k)) for n, k in references.items())],
    )
    figure, axes = sheet_of_panels(header, [own["title"].iloc[0] for own in panels], (3.2, 1.2), 4.4)
    for (above, below), own in zip(axes, panels, strict=True):
        values = own.sort_values("at").drop_duplicates("at")
        is_numeric = values["swept_value"].map(lambda value: isinstance(value, float)).all()
        own = own.assign(value=own["swept_value"].astype(float) if is_numeric else own["at"].astype(float))
        draw_along(above, own, {**looks, **references}, "line")
        for factor, look in looks.items():
            dropped = own[own["line"] == factor].sort_values("value")
            below.plot(dropped["value"], dropped["dropped_percent"], **look)
        places = sorted(own["value"].unique())
        name_values(above, below, places, [value_words(one) for one in values["swept_value"]], _key_of(own))
        below.set_ylim(bottom=min(0.0, below.get_ylim()[0]))
        below.set_ylabel("dropped (%)")
    return Drawing(figure, csv(rows, *_CSV))


def swept_rows(run: Run) -> pd.DataFrame | None:
    """Families with several capacity factors along the first of the swept keys; None where there are none.

    Columns: those of ``case_rows``; ``panel``, the family, and ``title``; ``line``, the capacity factor, or a
    reference's label; ``at``, the place of the swept value. Cases that failed have no numbers but a ``status``.
    """
    comparisons, rows, looks = analyse(run), case_rows(run), run_looks(run)
    ids = {id(result): name for name, result in zip(run.comparisons, comparisons, strict=True)}
    keys, panels = swept_keys(comparisons), []
    for sweep in sweeps_along(keys[0], comparisons) if keys else []:
        places = {ids[id(one)]: place for place, one in enumerate(sweep.comparisons)}
        own = rows[rows["comparison_id"].isin(places)]
        at = own["comparison_id"].map(places)
        own = own.assign(
            at=at,
            swept_key=sweep.key,
            swept_value=at.map(dict(enumerate(sweep.values))).astype(object),
            other_keys=sweep.others or None,
            verdict=own["verdict"].where(own["speedup"].notna()),
        )
        own = own[(own["status"] == "ok") | (own["role"] == "policy") | own["is_floor"]]
        known = own[own["speedup"].notna() & own["family"].notna()]
        for family, factors in known.groupby("family", sort=False)["capacity_factor"]:
            if factors.nunique() > 1:
                line = own["capacity_factor"].where(own["family"] == family).astype(object)
                line = line.where(line.notna(), None)
                line = line.mask(own["role"] == "ceiling", _BALANCE).mask(own["role"] == "replication", own["policy"])
                title = looks[family].label + (f", {sweep.others}" if sweep.others else "")
                panel = own.assign(line=line, panel=family, title=title)
                known_lines = {*factors.dropna().unique(), *line[own["family"].isna()].dropna()}
                panels.append(panel[panel["line"].isin(list(known_lines)) | panel["is_floor"]])
    return pd.concat(panels, ignore_index=True) if panels else None


def _key_of(rows: pd.DataFrame) -> str:
    return key_words(rows["swept_key"].iloc[0])


# ---- maps --------------------------------------------------------------------------------------------------------


def _draw_map(axes: Axes, rows: pd.DataFrame, limit: float, inches: float) -> None:
    factors = sorted(line for line in rows["line"].unique() if isinstance(line, float))
    named = sorted((line for line in rows["line"].unique() if isinstance(line, str)), key=lambda line: line != _BALANCE)
    lines = [*factors, *named]
    heights = {line: at + (_GAP if at >= len(factors) else 0) for at, line in enumerate(lines)}
    values = rows.sort_values("at").drop_duplicates("at")["swept_value"]
    for height in heights.values():
        for place in range(len(values)):
            axes.add_patch(Rectangle((place - 0.5, height - 0.5), 1, 1, facecolor="#F3F3F3", edgecolor="white"))
    for cell in rows.itertuples():
        _draw_cell(axes, cell.at, heights[cell.line], cell, limit)
    speedups = rows[rows["line"].isin(factors)].pivot_table(index="line", columns="at", values="speedup", dropna=False)
    speedups_GV = speedups.reindex(index=factors, columns=range(len(values))).to_numpy(dtype=float)
    _draw_break_even(axes, speedups_GV)
    panel_title(axes, rows["title"].iloc[0] + _everywhere_words(speedups_GV), inches)
    names = [f"{line:g}" if isinstance(line, float) else fit_label(line, 1.2) for line in lines]
    axes.set_yticks(list(heights.values()), names)
    axes.set_xticks(range(len(values)), [fit_label(value_words(value), 1.1) for value in values])
    axes.set_xlabel(_key_of(rows))
    axes.set_ylabel(f"capacity factor {GAMMA}", y=len(factors) / (len(heights) + _GAP) / 2)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_ylim(-0.5, max(heights.values()) + 0.5)
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_cell(axes: Axes, place: int, height: float, cell, limit: float) -> None:
    """A cell's speedup as colour and number, and what it is paid with."""
    if np.isnan(cell.speedup):
        text = NONE if cell.status == "ok" else cell.status
        axes.text(place, height, text, ha="center", va="center", fontsize="small", color=MUTED)
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
