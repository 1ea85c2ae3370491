"""The figures of a route directory. ``ROUTE_FIGURES`` is the table of all of them.

Each shows what one figure of the papers shows, of the rows at hand. One whose rows are missing is not drawn, and
the caller is told which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from moe_ep_bench.analysis.figures import draw_named
from moe_ep_bench.analysis.route_batches import activated_figure, budgets_figure, mass_figure, ranks_figure
from moe_ep_bench.analysis.route_load import RouteRun
from moe_ep_bench.analysis.route_loads import (
    dropped_figure,
    expanded_figure,
    heatmap_figure,
    imbalance_figure,
    modality_figure,
    violation_figure,
)
from moe_ep_bench.analysis.route_scores import decay_figure, overlap_figure, scores_figure
from moe_ep_bench.analysis.style import DEFAULT_FORMATS, Drawing

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
}


def draw_route_figures(
    run: RouteRun,
    directory: Path,
    formats: Sequence[str] = DEFAULT_FORMATS,
    names: Iterable[str] = tuple(ROUTE_FIGURES),
    *,
    size: str = "page",
) -> tuple[list[Path], list[str]]:
    """Draw figures into a directory: for each a file per format, and its numbers in ``<name>.csv``.

    Args:
        formats: some of ``style.FORMATS``.
        names: some of ``ROUTE_FIGURES``.
        size: one of ``style.SIZES``.

    Returns:
        The files written, and the names of the figures for which the rows hold nothing.
    """
    return draw_named(ROUTE_FIGURES, run, directory, formats, names, size)
