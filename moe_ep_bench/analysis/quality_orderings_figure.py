"""The figure ``quality_orderings``: which of the papers' orderings hold, a row for each pair of cases.

Costs differ a thousandfold between orderings, and so do their intervals. What one pair's second case costs more than
its first is therefore drawn in halves of its own 95 % interval: beyond 1 the ordering holds, beyond -1 it does not, and
between them nobody can say. The numbers themselves stand beside the rows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from moe_ep_bench.analysis.quality_orderings import (
    Found,
    Several,
    by_checkpoint,
    find_over_checkpoints,
    title_of,
)
from moe_ep_bench.analysis.quality_report import JudgedComparison
from moe_ep_bench.analysis.style import (
    FONT_SIZES,
    GAMMA,
    MUTED,
    NOISE_FILL,
    RULE,
    Drawing,
    fit_label,
    is_narrow,
    panel_title,
    sheet,
    wrap,
)

# Inches.
_WIDTH, _ROW, _LINE, _EXTRA = 11.0, 0.24, 0.16, 0.9
_LABEL, _STACKED_LABEL = 4.8, 1.1
_POINTS = float(FONT_SIZES["ytick.labelsize"])
_LOOKS: dict[str, dict[str, Any]] = {
    "holds": {"color": "#009E73", "marker": "o"},
    "does not hold": {"color": "#D55E00", "marker": "X"},
    "cannot say": {"color": MUTED, "marker": "o", "markerfacecolor": "white"},
}
_OF_ONE = {"color": "#B0B0B0", "marker": "|", "markersize": 7, "linestyle": "none"}
_FAR = 100.0
_TICKS = (-30, -10, -3, -1, 0, 1, 3, 10, 30, 100)


def orderings_figure(comparisons: Sequence[JudgedComparison]) -> Drawing | None:
    """None where no ordering can be looked at.

    Args:
        comparisons: those that differ in the checkpoint alone share a panel.
    """
    panels = [(alike, find_over_checkpoints(alike)) for alike in by_checkpoint(comparisons)]
    panels = [(alike, several) for alike, several in panels if several]
    if not panels:
        return None
    has_several = any(len(alike) > 1 for alike, _ in panels)
    shown = {one.shown.verdict for _, several in panels for one in several}
    legend: list[tuple[str, Any]] = [
        (verdict, Line2D([], [], linestyle="none", **look)) for verdict, look in _LOOKS.items() if verdict in shown
    ]
    if has_several:
        legend.append(("each checkpoint", Line2D([], [], **_OF_ONE)))
    legend.append(("too close to say", Patch(facecolor=NOISE_FILL)))
    lines = [max(_label(one.shown).count("\n") for one in several) for _, several in panels]
    heights = [(_ROW + _LINE * more) * len(several) + _EXTRA for more, (_, several) in zip(lines, panels, strict=True)]
    over = "over checkpoints where there are several, else over sequences" if has_several else "over sequences"
    figure = sheet(
        "Which of the papers' orderings hold",
        "What the second of a row costs more than the first, in halves of its 95 % interval"
        + ("" if is_narrow() else "; on the right in nats per token, or in what the row speaks of"),
        [
            f"Intervals: Student's t {over} (of loads: over batches). Costs are of this model on this text; routing is "
            "that of virtual ranks, and nothing was timed. A to B: read off between these two, at as many activated "
            "experts as the second has. The orderings in full and their sources stand in the table beside this figure."
        ],
        legend,
        width=_WIDTH,
        body=sum(heights),
    )
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, (alike, several) in zip(grid.flat, panels, strict=True):
        _panel(axes, several)
        panel_title(axes, title_of(alike), 0.6 * _WIDTH)
    return Drawing(figure, _rows(panels))


def _panel(axes: Axes, several: Sequence[Several]) -> None:
    axes.axvspan(-1, 1, color=NOISE_FILL, linewidth=0, zorder=0)
    axes.axvline(0, color=MUTED, linewidth=1.0)
    for row, one in enumerate(several):
        found = one.shown
        if len(one.each) > 1 and found.half > 0:
            ones = [in_halves(replace(each, half=found.half)) for each in one.each.values()]
            axes.plot(ones, [row] * len(ones), **_OF_ONE)
        axes.plot(in_halves(found), row, linestyle="none", **_LOOKS[found.verdict])
        if not is_narrow():
            number = f"{found.more:+.4f} \N{PLUS-MINUS SIGN} {found.half:.4f}".replace("-", "\N{MINUS SIGN}")
            axes.text(1.01, row, number, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=MUTED)
    groups = [len(list(pairs)) for _, pairs in itertools.groupby(several, lambda one: one.overall.ordering)]
    for end in list(itertools.accumulate(groups))[:-1]:
        axes.axhline(end - 0.5, color=RULE, linewidth=0.9)
    axes.set_yticks(range(len(several)), [_label(one.shown) for one in several])
    axes.set_ylim(len(several) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xscale("symlog", linthresh=1, linscale=0.8)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -1.5), max(1.1 * high, 1.5))
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in _TICKS if low <= tick <= high])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(fit_label("what the second costs more, in halves of its 95 % interval", 6.0))


def in_halves(found: Found) -> float:
    """The difference over half its interval, at most ``_FAR``; 0 where two cases never differ."""
    if not found.more:
        return 0.0
    return max(-_FAR, min(_FAR, found.more / found.half)) if found.half else math.copysign(_FAR, found.more)


def _label(found: Found) -> str:
    ordering = found.ordering
    worse = found.worse if ordering.share == 1 else f"{ordering.share:g} of {found.worse}"
    label = re.sub(r"capacity_factor=", f"{GAMMA} ", f"{found.better} < {worse}")
    if ordering.of == "peak_load":
        label = f"fullest expert: {label}"
    elif ordering.at_equal == "dropped":
        label = f"per pair dropped: {label}"
    return wrap(label, *((_STACKED_LABEL, 6.5) if is_narrow() else (_LABEL, _POINTS)))


def _rows(panels: Sequence[tuple[Sequence[JudgedComparison], Sequence[Several]]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "comparison": title_of(alike),
            "checkpoint": checkpoint or (next(iter(one.each)) if len(one.each) == 1 else "all"),
            "ordering": found.ordering.words,
            "source": found.ordering.source,
            "better": found.better,
            "worse": found.worse,
            "unit": found.ordering.unit,
            "worse_costs_more": found.more,
            "half_width": found.half,
            "verdict": found.verdict,
        }
        for alike, several in panels
        for one in several
        for checkpoint, found in (("", one.shown), *(one.each.items() if len(one.each) > 1 else ()))
    )
