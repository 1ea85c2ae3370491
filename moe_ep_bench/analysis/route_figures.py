"""The figures of a route directory. ``ROUTE_FIGURES`` is the table of all of them.

Each shows what one figure of the papers shows, of the rows at hand. One whose rows are missing is not drawn, and
the caller is told which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

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
from moe_ep_bench.analysis.style import FORMATS, house_style, save, settle_layout

ROUTE_FIGURES: dict[str, Callable[[RouteRun], Figure | None]] = {
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
    run: RouteRun, directory: Path, formats: Sequence[str] = tuple(FORMATS), names: Iterable[str] = tuple(ROUTE_FIGURES)
) -> tuple[list[Path], list[str]]:
    """Draw figures into a directory, ``<name>.<format>``.

    Args:
        formats: some of ``FORMATS``.
        names: some of ``ROUTE_FIGURES``.

    Returns:
        The files written, and the names of the figures for which the rows hold nothing.
    """
    written, lacking = [], []
    with house_style():
        for name in names:
            figure = ROUTE_FIGURES[name](run)
            if figure is None:
                lacking.append(name)
                continue
            settle_layout(figure)
            for file_format in formats:
                path = directory / f"{name}.{file_format}"
                save(figure, path, file_format)
                written.append(path)
    return written, lacking
