"""The figures of a quality directory: what answers cost, over what the cost buys. ``QUALITY_FIGURES`` is the table.

- ``quality_capacity``: cross-entropy added over the capacity factor (arXiv 2503.05066, Figure 12, has accuracy there).
- ``quality_fronts``: cross-entropy added over what a step or a batch waits for: activated experts in decode, whose
  weights it reads (arXiv 2511.02237, Figures 2, 3 and 8), and in prefill the pairs of the fullest rank. A line joins
  the cases of a policy that none of its others beats in both: its Pareto front.
- ``quality_orderings``: which of the papers' orderings hold (``quality_orderings_figure``).

One panel for each comparison (point of a sweep), and phase; comparisons that differ in the checkpoint alone are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.figures import draw_named
from moe_ep_bench.analysis.quality_orderings import by_checkpoint, title_of
from moe_ep_bench.analysis.quality_orderings_figure import orderings_figure
from moe_ep_bench.analysis.quality_report import (
    LEAST_SEQUENCES,
    JudgedCase,
    JudgedComparison,
    added_cross_entropy,
    half_interval,
)
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

_WIDTH, _NARROW, _BODY, _COLUMNS = 10.0, 6.5, 3.3, 2
_SUBTITLE = "Cross-entropy added to the unpatched model's on the same sequences, nats per token"


class Point(NamedTuple):
    x: float
    added: float
    half: float | None
    case: str = ""


class _Panel(NamedTuple):
    """One set of axes: points of every family."""

    title: str
    x_label: str
    points: dict[str, list[Point]]
    num_checkpoints: int


def capacity_figure(comparisons: Sequence[JudgedComparison]) -> Drawing | None:
    """None where no policy has two capacity factors."""
    panels = []
    for alike in by_checkpoint(comparisons):
        points: dict[str, list[Point]] = {}
        for cases in _in_all(alike):
            gamma = cases[0].params.get("capacity_factor")
            if gamma is not None:
                family = _family(cases[0], "capacity_factor")
                points.setdefault(family, []).append(_point(alike, cases, _capacity_factor))
        points = {family: sorted(several) for family, several in points.items() if len(several) > 1}
        if points:
            panels.append(_Panel(title_of(alike), f"capacity factor {GAMMA}", points, len(alike)))
    return _draw("What a capacity costs the answers", panels, lambda points: points)


def fronts_figure(comparisons: Sequence[JudgedComparison]) -> Drawing | None:
    """None where there is no policy."""
    panels = []
    for alike in by_checkpoint(comparisons):
        for phase, x_label, x_of in (
            ("decode", "activated experts of a step, mean over layers", _activated),
            ("prefill", "pairs of the fullest rank over a rank's mean without a policy", _fullest),
        ):
            points: dict[str, list[Point]] = {}
            for cases in _in_all(alike):
                if cases[0].phase == phase and cases[0].policy != "topk":
                    points.setdefault(cases[0].policy, []).append(_point(alike, cases, x_of))
            if points:
                panels.append(_Panel(f"{phase}: {title_of(alike)}", x_label, points, len(alike)))
    return _draw("What answers cost over what it buys", panels, front)


QUALITY_FIGURES: dict[str, Callable[[Sequence[JudgedComparison]], Drawing | None]] = {
    "quality_orderings": orderings_figure,
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


def _in_all(alike: Sequence[JudgedComparison]) -> list[list[JudgedCase]]:
    """The cases that all of several checkpoints' comparisons have, each as one per checkpoint."""
    of_each = [{(case.label, case.phase): case for case in one.cases} for one in alike]
    return [[cases[key] for cases in of_each] for key in of_each[0] if all(key in cases for cases in of_each)]


def _point(
    alike: Sequence[JudgedComparison],
    cases: Sequence[JudgedCase],
    x_of: Callable[[JudgedCase, JudgedComparison], float],
) -> Point:
    """Of several checkpoints their mean, its interval over them; of one its own, over sequences."""
    x = float(np.mean([x_of(case, one) for case, one in zip(cases, alike, strict=True)]))
    added = [added_cross_entropy(case, one.native) for case, one in zip(cases, alike, strict=True)]
    if len(added) == 1:
        return Point(x, *added[0], cases[0].label)
    means = np.array([mean for mean, _ in added])
    return Point(x, float(means.mean()), half_interval(means), cases[0].label)


def _family(case: JudgedCase, key: str) -> str:
    """A case's label without one of its fields."""
    value = f"{key}={case.params[key]}"
    label = make_policy({"name": case.policy, **case.params}).label
    return " ".join(word for word in label.split(" ") if word != value)


def _capacity_factor(case: JudgedCase, _: JudgedComparison) -> float:
    return float(case.params["capacity_factor"])


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
    width = _WIDTH if columns > 1 else _NARROW
    rows = -(-len(panels) // columns)
    figure = sheet(
        title,
        _SUBTITLE + ("; the mean over checkpoints" if any(panel.num_checkpoints > 1 for panel in panels) else ""),
        [_footer(panels)],
        legend,
        width=width,
        body=_BODY * rows,
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, panel, looks, joined)
        panel_title(axes, panel.title, width / columns - 0.8)
    return Drawing(figure, _rows(panels, joined))


def _footer(panels: Sequence[_Panel]) -> str:
    """Intervals are promised where there are some."""
    of_one = [panel for panel in panels if panel.num_checkpoints == 1]
    has_interval = {p.half is not None for panel in of_one for points in panel.points.values() for p in points}
    over = [
        *(["over sequences"] if True in has_interval else []),
        *(["over checkpoints where there are several"] if len(of_one) < len(panels) else []),
    ]
    intervals = f"whiskers: 95 % interval, Student's t {' and '.join(over)}" if over else ""
    few = f"fewer than {LEAST_SEQUENCES} sequences give no interval" if False in has_interval else ""
    said = "; ".join(["Costs are of this model on this text", *filter(None, (intervals, few))])
    return f"{said}. Routing is that of virtual ranks; nothing was timed."


def _rows(panels: Sequence[_Panel], joined: Callable[[list[Point]], list[Point]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "comparison": panel.title,
            "checkpoints": panel.num_checkpoints,
            "policy": family,
            "case": point.case,
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
