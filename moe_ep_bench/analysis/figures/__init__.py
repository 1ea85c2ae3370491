"""The figures of a run. ``FIGURES`` is the table of all of them.

Each is one sheet with a panel, or a row of panels, per comparison. It is drawn only when the rows
hold what it needs. A speed is never drawn without its fidelity, and every footer says how, on what
and with which workload the numbers came about. Beside the pictures lie the numbers, as CSV (``marks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from moe_ep_bench.analysis.activated import activated_figure
from moe_ep_bench.analysis.choice import Choice
from moe_ep_bench.analysis.figures.bars import load_figure, phases_figure
from moe_ep_bench.analysis.figures.latency import latency_figure
from moe_ep_bench.analysis.figures.lines import dropped_figure, speedup_figure
from moe_ep_bench.analysis.figures.maps import map_figure, sweep_figure
from moe_ep_bench.analysis.figures.pareto import pareto_figure
from moe_ep_bench.analysis.figures.scaling import scaling_figure
from moe_ep_bench.analysis.figures.timeline import timeline_figure
from moe_ep_bench.analysis.graphs import graphs_figure
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import write_rows
from moe_ep_bench.analysis.speedups import ComparisonResult, analyse, family_labels
from moe_ep_bench.analysis.style import DEFAULT_FORMATS, Drawing, Look, house_style, looks_of, save

_Rows = TypeVar("_Rows")

# A figure takes the run, its comparisons and the look of each policy family; None when the rows do not hold what it
# needs.
Draw = Callable[[Run, list[ComparisonResult], dict[str, Look]], Drawing | None]

FIGURES: dict[str, Draw] = {
    "speedup": speedup_figure,
    "phases": phases_figure,
    "load": load_figure,
    "dropped": dropped_figure,
    "map": map_figure,
    "sweep": sweep_figure,
    "activated": activated_figure,
    "graphs": graphs_figure,
    "timeline": timeline_figure,
    "pareto": pareto_figure,
    "scaling": scaling_figure,
    "latency": latency_figure,
}
# These show one case, which a ``Choice`` names.
_OF_ONE_CASE: dict[str, Callable[..., Drawing | None]] = {"timeline": timeline_figure, "latency": latency_figure}
# Their rows are in every run, and in every sweep; the other figures are of some runs, and not missed in others.
_OF_ALL_RUNS = ("speedup", "phases", "load", "dropped")
_OF_ALL_SWEEPS = ("map", "sweep")


def expected_figures(run: Run) -> list[str]:
    """The figures that a reader will miss where they cannot be drawn."""
    has_sweep = any(facts.point for facts in run.comparisons.values())
    return [*_OF_ALL_RUNS, *(_OF_ALL_SWEEPS if has_sweep else ())]


def draw_figures(
    run: Run,
    directory: Path,
    formats: Sequence[str] = DEFAULT_FORMATS,
    names: Iterable[str] | None = None,
    *,
    size: str = "page",
    choice: Choice | None = None,
) -> tuple[list[Path], list[str]]:
    """Draw figures into a directory: for each a file per format, and its numbers in ``<name>.csv``.

    Args:
        formats: some of ``style.FORMATS``.
        names: some of ``FIGURES``; None = all for which the run has rows.
        size: one of ``sizes.SIZES``.
        choice: the case and iteration of figures that show one; None = the default.

    Returns:
        The files written, and of the figures asked for (of those to expect, where none are named) those for which the
        run lacks the rows.
    """
    comparisons = analyse(run)
    looks = looks_of(family_labels(comparisons))
    missed = expected_figures(run) if names is None else list(names)
    written, lacking = [], []
    wanted = list(FIGURES) if names is None else missed
    with house_style(size):
        # First, so that a choice that there is not is said before anything is written.
        chosen = {name: draw(run, comparisons, looks, choice) for name, draw in _OF_ONE_CASE.items() if name in wanted}
        for name in wanted:
            drawing = chosen[name] if name in chosen else FIGURES[name](run, comparisons, looks)
            if drawing is not None:
                written += write_drawing(drawing, directory / name, formats)
            elif name in missed:
                lacking.append(name)
    return written, lacking


def draw_named(
    table: Mapping[str, Callable[[_Rows], Drawing | None]],
    rows: _Rows,
    directory: Path,
    formats: Sequence[str],
    names: Iterable[str],
    size: str,
) -> tuple[list[Path], list[str]]:
    """Draw figures of a table into a directory; the files, and the names of those for which there is nothing."""
    written, lacking = [], []
    with house_style(size):
        for name in names:
            drawing = table[name](rows)
            if drawing is None:
                lacking.append(name)
            else:
                written += write_drawing(drawing, directory / name, formats)
    return written, lacking


def write_drawing(drawing: Drawing, path: Path, formats: Sequence[str]) -> list[Path]:
    """Write a figure in every format, and its numbers: ``path`` with the suffix of each."""
    files = [path.with_name(f"{path.name}.{file_format}") for file_format in formats]
    for file, file_format in zip(files, formats, strict=True):
        save(drawing.figure, file, file_format)
    rows = path.with_name(f"{path.name}.csv")
    write_rows(drawing.rows, rows)
    return [*files, rows]
