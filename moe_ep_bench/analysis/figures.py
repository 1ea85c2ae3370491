"""The figures of a run: ``FIGURES`` of every run, ``SWEEP_FIGURES`` of a sweep, ``DECODE_FIGURES`` of decode steps,
``GRAPH_FIGURES`` of layers that were run eagerly and replayed from CUDA graphs.

Each is one sheet with a panel, or a row of panels, per comparison. It is drawn only when the rows
hold what it needs. A speed is never drawn without its fidelity, and every footer says how, on what
and with which workload the numbers came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from moe_ep_bench.analysis.activated import activated_figure, decode_steps
from moe_ep_bench.analysis.bars import load_figure, phases_figure
from moe_ep_bench.analysis.graphs import graph_pairs, graphs_figure
from moe_ep_bench.analysis.lines import dropped_figure, speedup_figure
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.maps import map_figure, sweep_figure
from moe_ep_bench.analysis.speedups import ComparisonResult, analyse, family_labels
from moe_ep_bench.analysis.style import FORMATS, Look, house_style, looks_of, save

# A figure takes the run, its comparisons and the look of each policy family; None when the rows do not hold what it
# needs.
Draw = Callable[[Run, list[ComparisonResult], dict[str, Look]], Figure | None]

FIGURES: dict[str, Draw] = {
    "speedup": speedup_figure,
    "phases": phases_figure,
    "load": load_figure,
    "dropped": dropped_figure,
}
SWEEP_FIGURES: dict[str, Draw] = {
    "map": map_figure,
    "sweep": sweep_figure,
}
DECODE_FIGURES: dict[str, Draw] = {
    "activated": activated_figure,
}
GRAPH_FIGURES: dict[str, Draw] = {
    "graphs": graphs_figure,
}
ALL_FIGURES = {**FIGURES, **SWEEP_FIGURES, **DECODE_FIGURES, **GRAPH_FIGURES}


def figure_names(run: Run, comparisons: Sequence[ComparisonResult] | None = None) -> list[str]:
    """The figures to expect of a run.

    Of a sweep where it has one, of decode where steps leave experts idle, of CUDA graphs where layers ran both ways.
    """
    results = analyse(run) if comparisons is None else comparisons
    has_sweep = any(facts.point for facts in run.comparisons.values())
    names = [*FIGURES, *(SWEEP_FIGURES if has_sweep else ())]
    names += DECODE_FIGURES if decode_steps(run, results) else ()
    names += GRAPH_FIGURES if graph_pairs(results) else ()
    return names


def draw_figures(
    run: Run, directory: Path, formats: Sequence[str] = tuple(FORMATS), names: Iterable[str] | None = None
) -> tuple[list[Path], list[str]]:
    """Draw figures into a directory, one file per figure and format.

    Args:
        formats: some of ``FORMATS``.
        names: some of ``ALL_FIGURES``; None = those to expect (``figure_names``).

    Returns:
        The files written, and the names of the figures for which the run lacks the rows.
    """
    comparisons = analyse(run)
    looks = looks_of(family_labels(comparisons))
    written, lacking = [], []
    with house_style():
        for name in figure_names(run, comparisons) if names is None else names:
            figure = ALL_FIGURES[name](run, comparisons, looks)
            if figure is None:
                lacking.append(name)
                continue
            for file_format in formats:
                path = directory / f"{name}.{file_format}"
                save(figure, path, file_format)
                written.append(path)
    return written, lacking
