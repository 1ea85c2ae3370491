"""The figures of a route directory. ``ROUTE_FIGURES`` is the table of all of them.

Each shows what one figure of the papers shows, of the rows at hand; it is None where these hold nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moe_ep_bench.analysis.figures import draw_named
from moe_ep_bench.analysis.route.load import RouteRun
from moe_ep_bench.analysis.route.loads import (
    dropped_figure,
    expanded_figure,
    heatmap_figure,
    imbalance_figure,
    modality_figure,
    traffic_figure,
    violation_figure,
)
from moe_ep_bench.analysis.route.scores import decay_figure, overlap_figure, scores_figure
from moe_ep_bench.analysis.route.steps import activated_figure, budgets_figure, mass_figure, ranks_figure
from moe_ep_bench.analysis.style import Drawing

ROUTE_FIGURES: dict[str, Callable[[RouteRun], Drawing | None]] = {
    "heatmap": heatmap_figure,
    "violation": violation_figure,
    "imbalance": imbalance_figure,
    "decay": decay_figure,
    "scores": scores_figure,
    "overlap": overlap_figure,
    "dropped": dropped_figure,
    "expanded": expanded_figure,
    "modality": modality_figure,
    "activated": activated_figure,
    "mass": mass_figure,
    "budgets": budgets_figure,
    "ranks": ranks_figure,
    "traffic": traffic_figure,
}
draw_route_figures = partial(draw_named, ROUTE_FIGURES)
