"""The figures of a quality directory: what answers cost, over what the cost buys. ``QUALITY_FIGURES`` is the table.

- ``quality_capacity``: cross-entropy added over the capacity factor (arXiv 2503.05066, Figure 12, has accuracy there).
- ``quality_fronts``: cross-entropy added over what a step or a batch waits for: activated experts in decode, whose
  weights it reads (arXiv 2511.02237, Figures 2, 3 and 8), and in prefill the pairs of the fullest rank. A line joins
  the cases of a policy that none of its others beats in both: its Pareto front.

One panel for each comparison (point of a sweep), and phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.figures import draw_named
from moe_ep_bench.analysis.quality_report import LEAST_SEQUENCES, JudgedCase, JudgedComparison, added_cross_entropy
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    DEFAULT_FORMATS,
    GAMMA,
    Drawing,
    Look,
    looks_of,
    panel_title,
    sheet,
)
from moe_ep_bench.policies import make_policy

_WIDTH, _BODY, _COLUMNS = 10.0, 3.3, 2


class Point(NamedTuple):
    x: float
    added: float
    half: float | None


class _Panel(NamedTuple):
    """One set of axes: points of every family."""

    title: str
    x_label: str
    points: dict[str, list[Point]]


def capacity_figure(comparisons: Sequence[JudgedComparison]) -> Drawing | None:
    """None where no policy has two capacity factors."""
    panels = []
    for one in comparisons:
        points: dict[str, list[Point]] = {}
        for case in one.cases:
            gamma = case.params.get("capacity_factor")
            if gamma is not None:
                points.setdefault(_family(case, "capacity_factor"), []).append(
                    Point(float(gamma), *added_cross_entropy(case, one.native))
                )
        points = {family: sorted(several) for family, several in points.items() if len(several) > 1}
        if points:
            panels.append(_Panel(one.facts["title"], f"capacity factor {GAMMA}", points))
    return _draw("What a capacity costs the answers", panels, lambda points: points)


def fronts_figure(comparisons: Sequence[JudgedComparison]) -> Drawing | None:
    """None where there is no policy."""
    panels = []
    for one in comparisons:
        for phase, x_label, x_of in (
            ("decode", "activated experts of a step, mean over layers", _activated),
            ("prefill", "pairs of the fullest rank over a rank's mean without a policy", _fullest),
        ):
            points: dict[str, list[Point]] = {}
            for case in one.cases:
                if case.phase == phase and case.policy != "topk":
                    points.setdefault(case.policy, []).append(
                        Point(x_of(case, one), *added_cross_entropy(case, one.native))
                    )
            if points:
                panels.append(_Panel(f"{phase}: {one.facts['title']}", x_label, points))
    return _draw("What answers cost over what it buys", panels, front)


QUALITY_FIGURES: dict[str, Callable[[Sequence[JudgedComparison]], Drawing | None]] = {
    "quality_capacity": capacity_figure,
    "quality_fronts": fronts_figure,
}


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both: ascending in x, descending in cost."""
    kept: list[Point] = []
    for point in sorted(points):
        if not kept or point.added < kept[-1].added:
            kept.append(point)
    return kept


def draw_quality_figures(
    comparisons: Sequence[JudgedComparison],
    directory: Path,
    formats: Sequence[str] = DEFAULT_FORMATS,
    names: Iterable[str] = tuple(QUALITY_FIGURES),
    *,
    size: str = "page",
) -> tuple[list[Path], list[str]]:
    """Draw figures into a directory, each with its numbers as CSV.

    Returns:
        The files written, and the names of the figures for which there is nothing.
    """
    return draw_named(QUALITY_FIGURES, comparisons, directory, formats, names, size)


def _family(case: JudgedCase, key: str) -> str:
    """A case's label without one of its fields."""
    value = f"{key}={case.params[key]}"
    label = make_policy({"name": case.policy, **case.params}).label
    return " ".join(word for word in label.split(" ") if word != value)


def _activated(case: JudgedCase, _: JudgedComparison) -> float:
    return case.mean("activated_experts")


def _fullest(case: JudgedCase, one: JudgedComparison) -> float:
    native = one.native.routing.query("phase == 'prefill'").groupby("layer")["num_pairs"].mean()
    share = case.routing.groupby("layer")["num_pairs"].mean() / native
    return float((case.routing.groupby("layer")["rank_peak_load"].mean() * share).mean())


def _draw(title: str, panels: Sequence[_Panel], joined: Callable[[list[Point]], list[Point]]) -> Drawing | None:
    if not panels:
        return None
    looks = looks_of({family: family for panel in panels for family in panel.points})
    legend = [
        (look.label, Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.line))
        for look in looks.values()
    ]
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = sheet(
        title,
        "Cross-entropy added to the unpatched model's on the same sequences, nats per token",
        [_footer(panels)],
        legend,
        width=_WIDTH,
        body=_BODY * rows,
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, panel, looks, joined)
        panel_title(axes, panel.title, _WIDTH / columns - 0.8)
    return Drawing(figure, _rows(panels, joined))


def _footer(panels: Sequence[_Panel]) -> str:
    """Intervals are promised where there are some."""
    has_interval = {p.half is not None for panel in panels for points in panel.points.values() for p in points}
    intervals = "whiskers: 95 % interval, Student's t over sequences" if True in has_interval else ""
    few = f"fewer than {LEAST_SEQUENCES} sequences give no interval" if False in has_interval else ""
    said = "; ".join(["Costs are of this model on this text", *filter(None, (intervals, few))])
    return f"{said}. Routing is that of virtual ranks; nothing was timed."


def _rows(panels: Sequence[_Panel], joined: Callable[[list[Point]], list[Point]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "comparison": panel.title,
            "policy": family,
            "quantity": panel.x_label,
            "value": point.x,
            "cross_entropy_added_nats": point.added,
            "half_width_nats": point.half,
            "on_line": point in joined(points),
        }
        for panel in panels
        for family, points in panel.points.items()
        for point in points
    )


def _panel(axes: Axes, panel: _Panel, looks: dict[str, Look], joined: Callable[[list[Point]], list[Point]]) -> None:
    axes.axhline(0, **CEILING_LINE)
    for family, points in panel.points.items():
        look = looks[family]
        for point in points:
            axes.errorbar(point.x, point.added, yerr=point.half, color=look.colour, marker=look.marker, capsize=2)
        line = joined(points)
        axes.plot([point.x for point in line], [point.added for point in line], color=look.colour, linestyle=look.line)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel("cross-entropy added, nats")
