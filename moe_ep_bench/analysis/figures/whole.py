"""The figure ``whole``: what faster MoE layers come to in a whole model, and what a pass consists of.

Per comparison two panels, in each of them a row per case. On the left two speedups: that of the pass, measured from
end to end, and that of its MoE layers alone; where Amdahl's law puts the pass is a mark at the same height, so that
law and measurement are read against each other. On the right a pass in parts. Where only the first layers were built a
third panel extrapolates to all of them: hatched, for nothing of it was timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.figures.bars import phase_legend, stacked_bars
from moe_ep_bench.analysis.figures.decode import graphs_figure
from moe_ep_bench.analysis.figures.panels import (
    SPEEDUP_LABEL,
    bar_label,
    draw_references,
    in_panels,
    name_rows,
    reference_legend,
    warnings_of,
    write_ends,
)
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import cost_values, floor_row, mark, reference, speedup_values, table
from moe_ep_bench.analysis.speedups import family_labels
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    EXTRAPOLATED_LOOK,
    INK,
    MUTED,
    Drawing,
    Legend,
    Look,
    Looks,
    is_narrow,
    looks_of,
    row_title,
    sheet,
)
from moe_ep_bench.analysis.whole import PASS_PARTS, WholeComparison, WholeResult, analyse_whole
from moe_ep_bench.analysis.words import footer_lines, interval_words, is_modelled_phase, milliseconds

# Of a row: where the pass and where the MoE layers stand, from its middle.
_PASS, _LAYERS = -0.15, 0.17
_LAYERS_LOOK = {"color": MUTED, "marker": "o", "markersize": 4.5, "linewidth": 1.0}
_CEILING_LOOK = {"color": INK, "marker": "d", "markeredgecolor": "white", "linewidth": 1.4}
_LOST = "#BBBBBB"  # of the line from a policy's layers to its pass
_AMDAHL_LOOK = {"color": INK, "marker": "|", "markersize": 13, "markeredgewidth": 1.8, "linestyle": "none"}
# The most that any policy could gain is drawn unless it would take more of the panel than all marks.
_MOST_STRETCH = 2.0


def whole_graphs_figure(run: Run) -> Drawing | None:
    """``graphs_figure`` of whole models; None where no comparison was measured both eagerly and replayed."""
    comparisons = [one.comparison for one in analyse_whole(run)]
    return graphs_figure(run, comparisons, looks_of(family_labels(comparisons)))


def whole_figure(run: Run) -> Drawing | None:
    """Speedup from end to end beside that of the MoE layers, and the parts of a pass; None without both."""
    comparisons = [one for one in analyse_whole(run) if _shown(one)]
    if not comparisons:
        return None
    looks = looks_of(family_labels([one.comparison for one in comparisons]))
    rows = {id(one.comparison): table(_rows_of(run, one)) for one in comparisons}
    panels = in_panels([one.comparison for one in comparisons])
    drawn = [one for one in comparisons if one.comparison in panels.shown]
    is_cut = any(_is_cut(rows[id(one.comparison)]) for one in drawn)
    of_one = (1.25, 1.6, 0.8) if is_cut else (1.2, 1.6)
    beside = 1 if is_cut or is_narrow() or len(drawn) == 1 else 2  # comparisons
    labels = [[bar_label(each.result, looks) for each in _shown(one)] for one in drawn]
    heights = [
        0.85 + max(0.19 * (label.count("\n") + 1) for names in row for label in names) * max(map(len, row))
        for row in (labels[at : at + beside] for at in range(0, len(labels), beside))
    ]
    facts = [one.comparison.comparison for one in drawn]
    figure = sheet(
        "What faster MoE layers come to in a whole model",
        _subtitle([rows[id(one.comparison)] for one in drawn]),
        footer_lines(run, facts, [*warnings_of(facts), *_notes(drawn, is_cut), *panels.note]),
        _legend(run, drawn, rows),
        width=14.0 if is_cut or beside > 1 else 12.0,
        body=sum(heights) * (len(of_one) if is_narrow() else 1),
    )
    if is_narrow():
        grid = figure.add_gridspec(len(of_one) * len(drawn), 1)
    else:
        grid = figure.add_gridspec(
            len(heights), beside * len(of_one), width_ratios=of_one * beside, height_ratios=heights
        )
    for number, (one, names) in enumerate(zip(drawn, labels, strict=True)):
        own = rows[id(one.comparison)]
        places = [divmod(number * len(of_one) + at, grid.ncols) for at in range(2 + _is_cut(own))]
        speedups, *others = [figure.add_subplot(grid[place]) for place in places]
        row_title(speedups, others, one.comparison.comparison.title, 11.0 / beside - 1.0 * (beside > 1))
        _draw_speedups(speedups, one, own, looks)
        parts = own[own["shows"] == "part"].pivot(index="policy", columns="part", values="time_ms")
        modelled = {part: is_modelled_phase(run, one.comparison.comparison, part) for part in PASS_PARTS}
        parts = parts.loc[[each.result.case.label for each in _shown(one)], list(PASS_PARTS)]
        stacked_bars(others[0], parts, modelled, "a pass", 0.62)
        if _is_cut(own):
            _draw_extrapolated(others[1], one)
        for axes in (speedups, *others):
            name_rows(axes, names, is_named=axes is speedups)
    return Drawing(figure, pd.concat(rows.values(), ignore_index=True))


def _shown(one: WholeComparison) -> list[WholeResult]:
    """Cases with a bar: all but native's second run, which is the noise floor; none where no policy has a speedup."""
    found = [each for each in one.results if each.parts_ms is not None and each.result.case.role != "noise"]
    return found if any(each.result.speedup and each.result.case.role == "policy" for each in found) else []


def _is_cut(rows: pd.DataFrame) -> bool:
    """Whether times of all layers were extrapolated."""
    return (rows["shows"] == "all layers").any()


def _subtitle(frames: Sequence[pd.DataFrame]) -> str:
    spreads = pd.concat(
        rows.loc[(rows["shows"] == "end to end") & rows["speedup"].notna(), "speedup_spread"] for rows in frames
    )
    return (
        "End to end: slowest rank's pass, native over policy, median of pairs. MoE layers alone: of "
        "breakdown iterations. By Amdahl: where the layers' speedup and their share of native's pass put the pass; "
        f"most possible: were the layers free. {interval_words(list(spreads == '95 % interval'))} Parts: mean over "
        "ranks, median over breakdown iterations; rest: dense layers, norms, embedding and output layer."
    )


def _notes(drawn: Sequence[WholeComparison], is_cut: bool) -> list[str]:
    most = [f"{one.most:.3f}" for one in drawn if one.most is not None]
    notes = [f"however fast its MoE layers, no pass gains more than {', '.join(most)} (Amdahl)."] if most else []
    if is_cut:
        wholes = [one.comparison.comparison.whole for one in drawn]
        built = dict.fromkeys(
            f"{one.num_layers} of {one.of_layers}" for one in wholes if one and one.num_layers < one.of_layers
        )
        notes.append(
            f"{', '.join(built)} layers were built and timed; hatched: extrapolated to all, each further layer like "
            "the mean MoE layer that was timed. No measurement, so without an interval."
        )
    return notes


def _legend(run: Run, drawn: Sequence[WholeComparison], rows: dict[int, pd.DataFrame]) -> Legend:
    frames = [rows[id(one.comparison)] for one in drawn]
    both = pd.concat(frames)
    legend: list = [
        ("end to end", Line2D([], [], color=INK, marker="s", linewidth=1.4)),
        ("MoE layers alone", Line2D([], [], **_LAYERS_LOOK)),
        ("by Amdahl", Line2D([], [], **_AMDAHL_LOOK)),
    ]
    if any(_most_drawn(own) is not None for own in frames):
        legend.append(("most possible", Line2D([], [], **CEILING_LINE)))
    legend += reference_legend(_floors(both), native=False)
    used = set(both.loc[both["time_ms"] > 0, "part"])
    facts = [one.comparison.comparison for one in drawn]
    legend += phase_legend(run, facts, [part for part in PASS_PARTS if part in used])
    return [*legend, *([("extrapolated", Patch(**EXTRAPOLATED_LOOK))] if _is_cut(both) else [])]


def _floors(rows: pd.DataFrame) -> pd.DataFrame:
    """The noise floors, as ``draw_references`` takes them."""
    return rows[rows["role"] == "noise"].assign(result=None)


def _draw_speedups(axes: Axes, one: WholeComparison, rows: pd.DataFrame, looks: Looks) -> None:
    draw_references(axes, _floors(rows), upright=True)
    most = _most_drawn(rows)
    if most is not None:
        axes.axvline(most, zorder=1, **CEILING_LINE)
    for place, each in enumerate(_shown(one)):
        own = rows[rows["policy"] == each.result.case.label].set_index("shows")
        if "end to end" not in own.index:
            continue
        look = looks.get(each.result.family)
        _draw_estimate(axes, own.loc["end to end"], place + _PASS, _pass_look(look), cap=8)
        if "MoE layers" in own.index:
            # What the rest of the model takes of the layers' gain.
            ends = own.loc[["end to end", "MoE layers"], "speedup"]
            axes.plot(ends, [place + _PASS, place + _LAYERS], color=_LOST, linewidth=0.8, zorder=2)
            _draw_estimate(axes, own.loc["MoE layers"], place + _LAYERS, _LAYERS_LOOK, cap=5)
        if "by Amdahl" in own.index:
            axes.plot([own.at["by Amdahl", "speedup"]], [place + _PASS], zorder=4, **_AMDAHL_LOOK)
    low, high = _span(rows)
    high = max(high, most or high)
    pad = 0.06 * max(high - low, 0.1)
    axes.set_xlim(low - pad, high + pad)
    axes.set_xlabel(SPEEDUP_LABEL)


def _pass_look(look: Look | None) -> dict[str, Any]:
    return _CEILING_LOOK if look is None else {**look.marks, "linewidth": 1.4}


def _draw_estimate(axes: Axes, row: pd.Series, at: float, look: dict[str, Any], *, cap: float) -> None:
    """A mark with its whisker."""
    ends = [row["speedup_low"], row["speedup_high"]]
    caps = {"marker": "|", "markersize": cap, "markeredgewidth": look["linewidth"]}
    axes.plot(ends, [at, at], color=look["color"], linewidth=look["linewidth"], zorder=3, **caps)
    axes.plot([row["speedup"]], [at], zorder=3.5, **{**look, "linestyle": "none"})


def _span(rows: pd.DataFrame) -> tuple[float, float]:
    """Between which values the marks stand."""
    marks = rows[rows["shows"].isin(["end to end", "MoE layers", "by Amdahl"])]
    ends = marks[["speedup", "speedup_low", "speedup_high"]].to_numpy(dtype=float)
    return min(1.0, float(np.nanmin(ends))), max(1.0, float(np.nanmax(ends)))


def _most_drawn(rows: pd.DataFrame) -> float | None:
    """What no policy can exceed, where there is room for it."""
    low, high = _span(rows)
    most = rows.loc[rows["role"] == "bound", "speedup"]
    return float(most.iloc[0]) if len(most) and most.iloc[0] - low <= _MOST_STRETCH * (high - low) else None


def _draw_extrapolated(axes: Axes, one: WholeComparison) -> None:
    whole = one.comparison.comparison.whole
    assert whole is not None
    times_ms, words = [], []
    for each in _shown(one):
        time_ms, speedup = each.all_layers_ms, each.all_layers_speedup
        times_ms.append(time_ms or 0.0)
        has_speedup = speedup is not None and each.result.case.role != "baseline"
        words.append(
            "" if time_ms is None else milliseconds(time_ms, 3) + (f" ({speedup:.2f} x)" if has_speedup else "")
        )
    axes.barh(np.arange(len(times_ms)), times_ms, height=0.62, linewidth=0.6, **EXTRAPOLATED_LOOK)
    write_ends(axes, times_ms, words)
    axes.set_xlim(0, 1.75 * max(times_ms))
    axes.set_xlabel(f"all {whole.of_layers} layers, extrapolated (ms)")


def _rows_of(run: Run, one: WholeComparison) -> list[dict[str, Any]]:
    """A row per mark; ``shows`` says of what, and ``origin`` where it was computed or extrapolated."""
    comparison, lines = one.comparison, []
    for each in _shown(one):
        is_native = each.result.case.role == "baseline"
        marks: list[tuple[str, dict[str, Any]]] = []
        if each.result.speedup is not None:
            marks.append(("end to end", speedup_values(each.result.speedup)))
        if each.moe_speedup is not None and not is_native:
            marks.append(("MoE layers", {"time_ms": each.moe_ms, **speedup_values(each.moe_speedup)}))
        if each.expected is not None and not is_native:
            marks.append(("by Amdahl", {"speedup": each.expected, "origin": "computed"}))
        marks += [("part", {"part": part, "time_ms": time_ms}) for part, time_ms in (each.parts_ms or {}).items()]
        if each.all_layers_ms is not None:
            times = {"time_ms": each.all_layers_ms, "speedup": each.all_layers_speedup}
            marks.append(("all layers", {**times, "origin": "extrapolated"}))
        empty = {"part": None, "time_ms": None, **speedup_values(None), **cost_values(each.result)}
        lines += [mark(run, comparison, each.result, shows=shows, **empty) | values for shows, values in marks]
    if one.most is not None:
        most = reference(run, comparison, "any policy", "bound", shows="most by Amdahl", speedup=one.most)
        lines.append(most | {"origin": "computed"})
    return [*lines, *floor_row(run, comparison, shows="end to end")]
