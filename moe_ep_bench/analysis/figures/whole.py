"""The figure ``whole``: what faster MoE layers come to in a whole model, and what a pass consists of.

Per comparison a row of panels, in each of them a row per case. On the left two speedups: that of the pass, measured
from end to end, and that of its MoE layers alone; where Amdahl's law puts the pass is a mark at the same height, so
that law and measurement are read against each other. In the middle a pass in parts. Where only the first layers were
built a third panel extrapolates to all of them: hatched, for nothing of it was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.figures import draw_named
from moe_ep_bench.analysis.figures.bars import bar_label, name_label
from moe_ep_bench.analysis.figures.panels import in_panels
from moe_ep_bench.analysis.figures.policy_axis import marks
from moe_ep_bench.analysis.graphs import graphs_figure
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import cost_values, floor_row, mark, reference, speedup_values, table
from moe_ep_bench.analysis.sizes import current_size
from moe_ep_bench.analysis.speedups import ComparisonResult, family_labels
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    DEFAULT_FORMATS,
    EXTRAPOLATED_LOOK,
    INK,
    MUTED,
    NOISE_FILL,
    Drawing,
    Legend,
    Look,
    Sheet,
    looks_of,
    phase_look,
    row_title,
    sheet,
)
from moe_ep_bench.analysis.whole import PASS_PARTS, WholeComparison, WholeResult, analyse_whole
from moe_ep_bench.analysis.words import OVERSUBSCRIBED, footer_lines, interval_words, is_modelled_phase, milliseconds
from moe_ep_bench.timing.statistics import Estimate

Looks = dict[str, Look]

# Of a row: where the pass and where the MoE layers stand, from its middle.
_PASS, _LAYERS = -0.15, 0.17
_LAYERS_LOOK = {"color": MUTED, "marker": "o", "markersize": 4.5, "linewidth": 1.0}
# Of the line from a policy's layers to its pass.
_LOST = "#BBBBBB"
_AMDAHL_LOOK = {"color": INK, "marker": "|", "markersize": 13, "markeredgewidth": 1.8, "linestyle": "none"}
# The most that any policy could gain is drawn unless it would take more of the panel than all marks.
_MOST_STRETCH = 2.0


def whole_figure(run: Run) -> Drawing | None:
    """Speedup from end to end beside that of the MoE layers, and the parts of a pass; None without both."""
    comparisons = [one for one in analyse_whole(run) if _shown(one)]
    if not comparisons:
        return None
    looks = looks_of(family_labels([one.comparison for one in comparisons]))
    panels = in_panels([one.comparison for one in comparisons])
    rows = [_Row(run, one, _shown(one)) for one in comparisons if one.comparison in panels.shown]
    facts = [row.one.comparison.comparison for row in rows]
    has_cut = any(row.is_cut for row in rows)
    lines = max(bar_label(each.result, looks).count("\n") + 1 for row in rows for each in row.results)
    heights = [1.0 + max(0.5, 0.17 * lines + 0.1) * len(row.results) for row in rows]
    figure = sheet(
        "What faster MoE layers come to in a whole model",
        _subtitle(rows),
        footer_lines(run, facts, [*_notes(rows), *panels.note]),
        _legend(rows),
        width=14.0 if has_cut else 12.0,
        body=sum(heights),
    )
    widths = (1.25, 1.6, 0.8) if has_cut else (1.2, 1.6)
    grid = figure.add_gridspec(len(rows), len(widths), width_ratios=widths, height_ratios=heights)
    for number, row in enumerate(rows):
        _draw_row(figure, [grid[number, column] for column in range(2 + row.is_cut)], row, looks)
    return Drawing(figure, table(line for one in comparisons for line in _rows_of(run, _Row(run, one, _shown(one)))))


def whole_graphs_figure(run: Run) -> Drawing | None:
    """``graphs_figure`` of whole models; None where no comparison was measured both eagerly and replayed."""
    comparisons = [one.comparison for one in analyse_whole(run)]
    return graphs_figure(run, comparisons, looks_of(family_labels(comparisons)))


WHOLE_FIGURES: dict[str, Callable[[Run], Drawing | None]] = {"whole": whole_figure, "graphs": whole_graphs_figure}
# Their rows are in some sweeps, and not missed in others.
OF_SOME_SWEEPS = ("graphs",)


def draw_whole_figures(
    run: Run,
    directory: Path,
    formats: Sequence[str] = DEFAULT_FORMATS,
    names: Iterable[str] = tuple(WHOLE_FIGURES),
    *,
    size: str = "page",
) -> tuple[list[Path], list[str]]:
    """Draw figures of whole models into a directory: for each a file per format, and its numbers in ``<name>.csv``.

    Args:
        formats: some of ``style.FORMATS``.
        names: some of ``WHOLE_FIGURES``.
        size: one of ``sizes.SIZES``.

    Returns:
        The files written, and the names of the figures for which the rows hold nothing.
    """
    return draw_named(WHOLE_FIGURES, run, directory, formats, names, size)


@dataclass(frozen=True, eq=False)
class _Row:
    """A comparison, and those of its cases that are drawn."""

    run: Run
    one: WholeComparison
    results: list[WholeResult]

    @property
    def is_cut(self) -> bool:
        """Whether times of all layers were extrapolated."""
        return any(each.all_layers_ms is not None for each in self.results)

    @property
    def compared(self) -> list[tuple[int, WholeResult, Estimate]]:
        """Place and speedup of the cases that have one."""
        return [(n, each, each.result.speedup) for n, each in enumerate(self.results) if each.result.speedup]

    def is_modelled(self, part: str) -> bool:
        """Whether a part of the pass was computed: see ``words.is_modelled_phase``."""
        return is_modelled_phase(self.run, self.one.comparison.comparison, part)

    @property
    def words(self) -> str:
        return self.one.comparison.comparison.title


def _shown(one: WholeComparison) -> list[WholeResult]:
    """Cases with a bar: all but native's second run, which is the noise floor; none where no policy has a speedup."""
    found = [each for each in one.results if each.parts_ms is not None and each.result.case.role != "noise"]
    return found if any(each.result.speedup and each.result.case.role == "policy" for each in found) else []


def _subtitle(rows: Sequence[_Row]) -> str:
    estimates = [speedup.is_interval for row in rows for _, _, speedup in row.compared]
    return (
        "End to end: slowest rank's pass, native over policy, median of pairs. MoE layers alone: of "
        "breakdown iterations. By Amdahl: where the layers' speedup and their share of native's pass put the pass; "
        "most possible: were the layers free. "
        f"{interval_words(estimates)} Parts: mean over ranks, median over breakdown iterations; rest: dense layers, "
        "norms, embedding and output layer."
    )


def _notes(rows: Sequence[_Row]) -> list[str]:
    facts = [row.one.comparison.comparison for row in rows]
    notes = [OVERSUBSCRIBED] if any(fact.oversubscribed for fact in facts) else []
    most = [f"{row.one.most:.3f}{_in(row, rows)}" for row in rows if row.one.most is not None]
    notes += [f"however fast its MoE layers, no pass gains more than {'; '.join(most)} (Amdahl)."] if most else []
    cut = [row.one.comparison.comparison.whole for row in rows if row.is_cut]
    built = dict.fromkeys(f"{whole.num_layers} of {whole.of_layers}" for whole in cut if whole is not None)
    if built:
        notes.append(
            f"{', '.join(built)} layers were built and timed; hatched: extrapolated to all, each further layer like "
            "the mean MoE layer that was timed. No measurement, so without an interval."
        )
    return notes


def _in(row: _Row, rows: Sequence[_Row]) -> str:
    return f" in {row.words}" if len(rows) > 1 else ""


def _legend(rows: Sequence[_Row]) -> Legend:
    legend: list = [
        ("end to end", Line2D([], [], color=INK, marker="s", linewidth=1.4)),
        ("MoE layers alone", Line2D([], [], **_LAYERS_LOOK)),
        ("by Amdahl", Line2D([], [], **_AMDAHL_LOOK)),
    ]
    if any(_most_drawn(row) for row in rows):
        legend.append(("most possible", Line2D([], [], **CEILING_LINE)))
    if any(row.one.comparison.drawn_floor for row in rows):
        legend.append(("noise floor", Patch(facecolor=NOISE_FILL)))
    legend += [
        (f"{part} (modelled)" if modelled else part, Patch(**phase_look(part, modelled=modelled)))
        for part in _parts_of(rows)
        for modelled in sorted({row.is_modelled(part) for row in rows})
    ]
    if any(row.is_cut for row in rows):
        legend.append(("extrapolated", Patch(**EXTRAPOLATED_LOOK)))
    return legend


def _parts_of(rows: Sequence[_Row]) -> list[str]:
    found = [each.parts_ms for row in rows for each in row.results if each.parts_ms is not None]
    return [part for part in PASS_PARTS if any(parts[part] > 0 for parts in found)]


def _draw_row(figure: Sheet, places: Sequence[Any], row: _Row, looks: Looks) -> None:
    speedups, *others = [figure.add_subplot(place) for place in places]
    row_title(speedups, others, row.words, 11.0)
    _draw_speedups(speedups, row, looks)
    _draw_parts(others[0], row)
    if row.is_cut:
        _draw_extrapolated(others[1], row)
    for axes in (speedups, *others):
        # What a policy costs stands once, beside what it gains.
        label = bar_label if axes is speedups else name_label
        names = [label(each.result, looks) for each in row.results]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0, labelleft=axes is speedups or current_size().is_stacked)
        axes.grid(False, axis="y")


def _draw_speedups(axes: Axes, row: _Row, looks: Looks) -> None:
    axes.axvline(1, color=INK, linewidth=1.2, zorder=1)
    floor, most = row.one.comparison.drawn_floor, _most_drawn(row)
    if floor is not None:
        axes.axvspan(floor.low, floor.high, color=NOISE_FILL, linewidth=0, zorder=0.5)
    if most is not None:
        axes.axvline(most, zorder=1, **CEILING_LINE)
    for place, each, speedup in row.compared:
        look = looks.get(each.result.family)
        own = {"color": INK, "marker": "d", "markeredgecolor": "white"} if look is None else marks(look)
        _draw_estimate(axes, speedup, place + _PASS, {**own, "linestyle": "-", "linewidth": 1.4}, cap=8)
        if each.moe_speedup is not None:
            # What the rest of the model takes of the layers' gain.
            ends = [speedup.median, each.moe_speedup.median], [place + _PASS, place + _LAYERS]
            axes.plot(*ends, color=_LOST, linewidth=0.8, zorder=2)
            _draw_estimate(axes, each.moe_speedup, place + _LAYERS, _LAYERS_LOOK, cap=5)
        if each.expected is not None:
            axes.plot([each.expected], [place + _PASS], zorder=4, **_AMDAHL_LOOK)
    low, high = _span(row)
    high = max(high, most or high)
    pad = 0.06 * max(high - low, 0.1)
    axes.set_xlim(low - pad, high + pad)
    axes.set_xlabel("speedup (native = 1)")


def _draw_estimate(axes: Axes, estimate: Estimate, at: float, look: dict[str, Any], *, cap: float) -> None:
    """A mark with its whisker."""
    strokes = {"color": look["color"], "zorder": 3}
    axes.plot([estimate.low, estimate.high], [at, at], linewidth=look["linewidth"], **strokes)
    for end in (estimate.low, estimate.high):
        axes.plot([end], [at], marker="|", markersize=cap, markeredgewidth=look["linewidth"], **strokes)
    axes.plot([estimate.median], [at], zorder=3.5, **{**look, "linestyle": "none"})


def _span(row: _Row) -> tuple[float, float]:
    """Between which values the marks stand."""
    floor = row.one.comparison.drawn_floor
    ends = [1.0] if floor is None else [1.0, floor.low, floor.high]
    for _, each, speedup in row.compared:
        for estimate in (speedup, each.moe_speedup):
            ends += [] if estimate is None else [estimate.low, estimate.high]
        ends += [] if each.expected is None else [each.expected]
    return min(ends), max(ends)


def _most_drawn(row: _Row) -> float | None:
    """What no policy can exceed, where there is room for it."""
    low, high = _span(row)
    most = row.one.most
    return most if most is not None and most - low <= _MOST_STRETCH * (high - low) else None


def _draw_parts(axes: Axes, row: _Row) -> None:
    places, ends = np.arange(len(row.results)), np.zeros(len(row.results))
    for part in PASS_PARTS:
        widths = np.array([each.parts_ms[part] if each.parts_ms else 0.0 for each in row.results])
        look = phase_look(part, modelled=row.is_modelled(part))
        axes.barh(places, widths, left=ends, height=0.62, linewidth=0.6, **look)
        ends += widths
    _write_ends(axes, ends, [milliseconds(end, 3) for end in ends])
    axes.set_xlim(0, 1.13 * ends.max())
    axes.set_xlabel("time of a pass (ms)")


def _draw_extrapolated(axes: Axes, row: _Row) -> None:
    whole = row.one.comparison.comparison.whole
    assert whole is not None
    times = np.array([each.all_layers_ms or 0.0 for each in row.results])
    axes.barh(np.arange(len(times)), times, height=0.62, linewidth=0.6, **EXTRAPOLATED_LOOK)
    words = [
        "" if each.all_layers_ms is None else milliseconds(each.all_layers_ms, 3) + _times_words(each)
        for each in row.results
    ]
    _write_ends(axes, times, words)
    axes.set_xlim(0, 1.75 * times.max())
    axes.set_xlabel(f"all {whole.of_layers} layers, extrapolated (ms)")


def _times_words(each: WholeResult) -> str:
    is_native = each.all_layers_speedup is None or each.result.case.role == "baseline"
    return "" if is_native else f" ({each.all_layers_speedup:.2f} x)"


def _write_ends(axes: Axes, ends: Sequence[float] | np.ndarray, words: Sequence[str]) -> None:
    for place, (end, text) in enumerate(zip(ends, words, strict=True)):
        axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)


def _rows_of(run: Run, row: _Row) -> list[dict[str, Any]]:
    """A row per mark; ``shows`` says of what, and ``origin`` where it was computed or extrapolated."""
    comparison, lines = row.one.comparison, []
    for each in row.results:
        result, is_native = each.result, each.result.case.role == "baseline"
        if result.speedup is not None:
            lines.append(_line(run, comparison, each, "end to end", **speedup_values(result.speedup)))
        if each.moe_speedup is not None and not is_native:
            speedup = speedup_values(each.moe_speedup)
            lines.append(_line(run, comparison, each, "MoE layers", time_ms=each.moe_ms, **speedup))
        if each.expected is not None and not is_native:
            lines.append(_line(run, comparison, each, "by Amdahl", speedup=each.expected) | {"origin": "computed"})
        for part, time_ms in (each.parts_ms or {}).items():
            lines.append(_line(run, comparison, each, "part", part=part, time_ms=time_ms))
        if each.all_layers_ms is not None:
            values = {"time_ms": each.all_layers_ms, "speedup": each.all_layers_speedup}
            lines.append(_line(run, comparison, each, "all layers", **values) | {"origin": "extrapolated"})
    if row.one.most is not None:
        most = reference(run, comparison, "any policy", "bound", shows="most by Amdahl", speedup=row.one.most)
        lines.append(most | {"origin": "computed"})
    return [*lines, *floor_row(run, comparison, shows="end to end")]


def _line(run: Run, comparison: ComparisonResult, each: WholeResult, shows: str, **values: Any) -> dict[str, Any]:
    columns = {"part": None, "time_ms": None, **speedup_values(None), **values}
    return mark(run, comparison, each.result, shows=shows, **columns, **cost_values(each.result))
