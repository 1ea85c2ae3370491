"""The figures of layers and of whole models; ``plot.figures_of`` adds those of routing and quality.

A figure is a function of a run's frames (``panels.case_rows``, joined with samples where it needs them); it is None
where they do not hold what it needs. It is added by that function and one row of ``FIGURES``. Each is one sheet with a
panel, or a group of panels, per comparison. Beside the pictures lies the frame that they show, as CSV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moe_ep_bench.analysis.choice import Choice
from moe_ep_bench.analysis.figures.costs import memory_figure, pareto_figure
from moe_ep_bench.analysis.figures.decode import activated_figure, graphs_figure
from moe_ep_bench.analysis.figures.maps import map_figure, sweep_figure
from moe_ep_bench.analysis.figures.panels import case_rows, of_policies
from moe_ep_bench.analysis.figures.policies import dropped_figure, load_figure, phases_figure, speedup_figure
from moe_ep_bench.analysis.figures.ranks import latency_figure, timeline_figure
from moe_ep_bench.analysis.figures.scaling import scaling_figure
from moe_ep_bench.analysis.figures.whole import whole_figure
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.style import DEFAULT_FORMATS, Drawing, house_style, save


@dataclass(frozen=True)
class Figure:
    """A row of the registry.

    Attributes:
        draw: the figure of a run.
        needs: columns of ``case_rows`` in which some measured policy must have values.
        of_one_case: it shows the case that a ``Choice`` names.
    """

    draw: Callable[..., Drawing | None]
    needs: tuple[str, ...] = ()
    of_one_case: bool = False

    def __call__(self, run: Run, choice: Choice | None = None) -> Drawing | None:
        if self.needs and of_policies(case_rows(run))[list(self.needs)].dropna().empty:
            return None
        return self.draw(run, choice) if self.of_one_case else self.draw(run)


FIGURES = {
    "speedup": Figure(speedup_figure, ("speedup",)),
    "phases": Figure(phases_figure),
    "load": Figure(load_figure, ("fullest_expert",)),
    "dropped": Figure(dropped_figure, ("dropped_percent",)),
    "map": Figure(map_figure, ("speedup", "capacity_factor")),
    "sweep": Figure(sweep_figure, ("speedup", "capacity_factor")),
    "activated": Figure(activated_figure),
    "graphs": Figure(graphs_figure),
    "timeline": Figure(timeline_figure, of_one_case=True),
    "pareto": Figure(pareto_figure, ("speedup", "retained_mass_percent")),
    "memory": Figure(memory_figure, ("speedup", "retained_mass_percent")),
    "scaling": Figure(scaling_figure),
    "latency": Figure(latency_figure, of_one_case=True),
}
WHOLE_FIGURES = {"whole": Figure(whole_figure, ("speedup", "moe_ms")), "graphs": FIGURES["graphs"]}


def draw_figures(
    run: Run,
    directory: Path,
    formats: Sequence[str] = DEFAULT_FORMATS,
    names: Iterable[str] | None = None,
    *,
    size: str = "page",
    choice: Choice | None = None,
) -> tuple[list[Path], list[str]]:
    """Draw figures of a run into a directory: for each a file per format, and its numbers in ``<name>.csv``.

    Args:
        names: None = all for which the run has rows.
        choice: the case and iteration of figures that show one. ValueError, before anything is written, where there is
            no such one.

    Returns:
        The files written, and the names for which the run lacks the rows.
    """
    figures = WHOLE_FIGURES if run.scope == "model" else FIGURES
    table = {name: partial(figure, choice=choice) for name, figure in figures.items()}
    return draw_named(table, run, directory, formats, figures if names is None else names, size)


def draw_named(
    table: Mapping[str, Callable[[Any], Drawing | None]],
    rows: Any,
    directory: Path,
    formats: Sequence[str],
    names: Iterable[str],
    size: str,
) -> tuple[list[Path], list[str]]:
    """Draw figures of a table into a directory; the files, and the names of those for which there is nothing."""
    files = []
    with house_style(size):
        # All are drawn before any is written, for one may refuse a choice.
        drawings = {name: table[name](rows) for name in names}
        for name, drawing in drawings.items():
            if drawing is not None:
                for file_format in formats:
                    files.append(directory / f"{name}.{file_format}")
                    save(drawing.figure, files[-1], file_format)
                files.append(directory / f"{name}.csv")
                drawing.write_rows(files[-1])
    return files, [name for name, drawing in drawings.items() if drawing is None]
