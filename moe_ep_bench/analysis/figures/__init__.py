"""The figures of layers and of whole models; ``plot.figures_of`` adds those of routing and quality.

A figure is a function of rows; it is None where they do not hold what it needs. Each is one sheet with a panel, or a
row of panels, per comparison. A speed is never drawn without its fidelity, and every footer says how, on what and with
which workload the numbers came about. Beside the pictures lie the numbers, as CSV (``marks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moe_ep_bench.analysis.choice import Choice
from moe_ep_bench.analysis.figures.bars import load_figure, phases_figure
from moe_ep_bench.analysis.figures.decode import activated_figure, graphs_figure
from moe_ep_bench.analysis.figures.latency import latency_figure
from moe_ep_bench.analysis.figures.lines import dropped_figure, speedup_figure
from moe_ep_bench.analysis.figures.maps import map_figure, sweep_figure
from moe_ep_bench.analysis.figures.pareto import pareto_figure
from moe_ep_bench.analysis.figures.scaling import scaling_figure
from moe_ep_bench.analysis.figures.timeline import timeline_figure
from moe_ep_bench.analysis.figures.whole import whole_figure, whole_graphs_figure
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import write_rows
from moe_ep_bench.analysis.speedups import analyse, family_labels
from moe_ep_bench.analysis.style import DEFAULT_FORMATS, Drawing, house_style, looks_of, save

# Of layers: functions of the run, its comparisons and the look of each policy family.
FIGURES: dict[str, Callable[..., Drawing | None]] = {
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
# Of whole models: functions of the run.
WHOLE_FIGURES: dict[str, Callable[[Run], Drawing | None]] = {"whole": whole_figure, "graphs": whole_graphs_figure}
# These show one case, which a ``Choice`` names.
_OF_ONE_CASE = ("timeline", "latency")
# What a reader misses: of every run of layers, and of every sweep. Other kinds of directories have all, but for some.
_OF_ALL_RUNS = ("speedup", "phases", "load", "dropped")
_OF_ALL_SWEEPS = ("map", "sweep")
OF_SOME = ("graphs",)


def expected_figures(run: Run) -> list[str]:
    """The figures of layers that a reader will miss where they cannot be drawn."""
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
    """Draw figures of layers into a directory: for each a file per format, and its numbers in ``<name>.csv``.

    Args:
        formats: some of ``style.FORMATS``.
        names: some of ``FIGURES``; None = all for which the run has rows.
        size: one of ``style.SIZES``.
        choice: the case and iteration of figures that show one; None = the default.

    Returns:
        The files written, and of the figures asked for (of those to expect, where none are named) those for which the
        run lacks the rows.
    """
    comparisons = analyse(run)
    looks = looks_of(family_labels(comparisons))
    missed = expected_figures(run) if names is None else list(names)
    wanted = list(FIGURES) if names is None else missed

    def draw(name: str) -> Drawing | None:
        more = (choice,) if name in _OF_ONE_CASE else ()
        return FIGURES[name](run, comparisons, looks, *more)

    with house_style(size):
        # First, so that a choice that there is not is said before anything is written.
        chosen = {name: draw(name) for name in _OF_ONE_CASE if name in wanted}
        drawn = {name: partial(chosen.get, name) if name in chosen else partial(draw, name) for name in wanted}
        written, lacking = _write(drawn, directory, formats)
    return written, [name for name in lacking if name in missed]


def draw_named(
    table: Mapping[str, Callable[[Any], Drawing | None]],
    rows: Any,
    directory: Path,
    formats: Sequence[str],
    names: Iterable[str],
    size: str,
) -> tuple[list[Path], list[str]]:
    """Draw figures of a table into a directory; the files, and the names of those for which there is nothing."""
    with house_style(size):
        return _write({name: partial(table[name], rows) for name in names}, directory, formats)


def _write(
    drawn: Mapping[str, Callable[[], Drawing | None]], directory: Path, formats: Sequence[str]
) -> tuple[list[Path], list[str]]:
    """Write figures one by one in every format, and their numbers; the files, and the names of those that are None."""
    files, lacking = [], []
    for name, draw in drawn.items():
        drawing = draw()
        if drawing is None:
            lacking.append(name)
            continue
        for file_format in formats:
            files.append(directory / f"{name}.{file_format}")
            save(drawing.figure, files[-1], file_format)
        files.append(directory / f"{name}.csv")
        write_rows(drawing.rows, files[-1])
    return files, lacking
