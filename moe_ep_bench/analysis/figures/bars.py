"""The figures of bars: ``phases``, where a layer's time goes, and ``load``, who has how much to do."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.figures.panels import (
    bar_label,
    in_panels,
    lay_out,
    name_rows,
    one_scale,
    warnings_of,
    write_ends,
)
from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.marks import cost_values, mark, table
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import (
    INK,
    MUTED,
    NATIVE_FILL,
    Drawing,
    Legend,
    Look,
    Looks,
    case_name,
    num_columns,
    panel_title,
    phase_look,
    sheet,
)
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.words import footer_lines, is_modelled_phase, milliseconds

# More policies in one picture of loads make a tangle; more bars than this, a fence: lines are drawn then.
_MAX_POLICIES = 6
_MAX_BARS = 64
# Panels beside each other have one scale where the highest is no more than so many times the lowest.
_ONE_SCALE = 4.0
_NATIVE = {"facecolor": NATIVE_FILL, "edgecolor": MUTED, "linewidth": 0.6}


def stacked_bars(axes: Axes, times_ms: pd.DataFrame, modelled: dict[str, bool], unit: str, height: float) -> None:
    """Stack times, a bar per row and a part per column; parts that were modelled look so."""
    places, ends = np.arange(len(times_ms)), np.zeros(len(times_ms))
    for part, times in times_ms.items():
        look = phase_look(str(part), modelled=modelled[str(part)])
        axes.barh(places, times, left=ends, height=height, linewidth=0.6, **look)
        ends += times
    write_ends(axes, ends, [milliseconds(end, 3) for end in ends])
    axes.set_xlim(0, 1.17 * ends.max())
    axes.set_xlabel(f"time of {unit} (ms)")


def phase_legend(run: Run, facts: list[Comparison], groups: list[str]) -> Legend:
    """Groups of phases; those that were timed in some comparisons and modelled in others stand twice."""
    return [
        (f"{group} (modelled)" if modelled else group, Patch(**phase_look(group, modelled=modelled)))
        for group in groups
        for modelled in sorted({is_modelled_phase(run, fact, group) for fact in facts})
    ]


def phases_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Where the time goes: a stacked bar per case, mean over ranks, so that waiting shows."""
    panels = [(c, [r for r in c.results if r.breakdown]) for c in comparisons]
    panels = [(comparison, results) for comparison, results in panels if results]
    if not panels:
        return None
    facts = [comparison.comparison for comparison, _ in panels]
    times = [pd.DataFrame([r.breakdown.group_ms for r in results])[list(GROUPS)] for _, results in panels]
    groups = [group for group in GROUPS if any((of_panel[group] > 0).any() for of_panel in times)]
    rows = [
        mark(run, comparison, result, phases=group, time_ms=of_panel.at[at, group], **cost_values(result))
        for (comparison, results), of_panel in zip(panels, times, strict=True)
        for at, result in enumerate(results)
        for group in groups
    ]
    labels = [[bar_label(result, looks) for result in results] for _, results in panels]
    most_lines = max(label.count("\n") + 1 for of_panel in labels for label in of_panel)
    columns = num_columns(len(panels))
    most_bars = [max(map(len, labels[at : at + columns])) for at in range(0, len(panels), columns)]
    heights = [0.85 + max(0.45, 0.17 * most_lines + 0.08) * bars for bars in most_bars]
    breakdowns = "batches" if all(fact.device is not None for fact in facts) else "breakdown iterations"
    figure = sheet(
        "Where a layer's time goes",
        f"Mean over ranks, median over {breakdowns}. waiting: for the slowest rank, where ranks meet. "
        "gate: router and policy. permute: with the exchange of counts. comm: dispatch and combine, without waiting.",
        footer_lines(run, facts, warnings_of(facts, phases=True)),
        phase_legend(run, facts, groups),
        width=9.5 if len(panels) == 1 else 14,
        body=sum(heights),
    )
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for index, (fact, of_panel, names) in enumerate(zip(facts, times, labels, strict=True)):
        axes = figure.add_subplot(grid[divmod(index, columns)])
        panel_title(axes, fact.title, 6.5 if columns == 1 else 4.2)
        modelled = {group: is_modelled_phase(run, fact, group) for group in groups}
        stacked_bars(axes, of_panel[groups], modelled, "one layer", 0.68)
        name_rows(axes, names)
    return Drawing(figure, table(rows))


def load_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Load of experts and, of several, of ranks, before and after; each policy at its smallest capacity factor."""
    loads = {c: [c.of_role("baseline"), *_smallest_factors(c)] for c in comparisons if c.of_role("baseline")}
    loads = {comparison: results for comparison, results in loads.items() if len(results) > 1}
    if not loads:
        return None
    rows = [
        mark(run, comparison, result, of=what, number=number, load_over_mean=load)
        for comparison, results in loads.items()
        for result in results
        for what in ("expert", "rank")
        for number, load in enumerate(getattr(result.fidelity, f"{what}_load"))
    ]
    panels = in_panels(list(loads))
    quantities = ("expert", "rank")
    if all(comparison.comparison.num_ranks == 1 for comparison in panels.shown):
        # One panel each: there is room for larger ones.
        quantities, panels = ("expert",), in_panels(list(loads), most=2)
    drawn = {comparison: loads[comparison][: _MAX_POLICIES + 1] for comparison in panels.shown}
    left_out = dict.fromkeys(r.family for comparison in drawn for r in loads[comparison][_MAX_POLICIES + 1 :])
    notes = [f"not drawn, but in the CSV beside the figure: {', '.join(left_out)}."] if left_out else []
    is_one_column = panels.num_columns == 1
    figure = sheet(
        f"Load of {' and '.join(f'{what}s' for what in quantities)}, before and after",
        "(token, expert) pairs of all ranks' tokens, over the mean of the model's own routing; mean over batches. "
        "Of each policy the smallest capacity factor.",
        footer_lines(run, [comparison.comparison for comparison in panels.shown], [*notes, *panels.note]),
        _load_legend([result for results in drawn.values() for result in results[1:]], looks),
        width=11.0 if is_one_column else panels.width,
        body=len(panels.rows) * (3.7 if is_one_column else 2.4 * len(quantities) + 0.8),
    )
    ratios = ((2.4, 1) if is_one_column else (1.4, 1))[: len(quantities)]
    for row in lay_out(figure, panels, ratios, 6.5):
        for place in row:
            results = drawn[place.comparison]
            for axes, what in zip(place.axes, quantities, strict=True):
                of_cases = [getattr(result.fidelity, f"{what}_load") for result in results]
                _draw_loads(axes, what, of_cases, [looks[result.family] for result in results[1:]])
            place.label_outer(has_one_x=False)
        for of_quantity in zip(*(place.axes for place in row), strict=True):
            heights = [axes.get_ylim()[1] for axes in of_quantity]
            if max(heights) <= _ONE_SCALE * min(heights):
                one_scale(of_quantity, "y")
    return Drawing(figure, table(rows))


def _smallest_factors(comparison: ComparisonResult) -> list[CaseResult]:
    """Of each family its smallest capacity factor. Without topk, whose loads are native's."""
    smallest: dict[str, CaseResult] = {}
    for result in comparison.policies:  # in reading order: factors ascend
        if result.case.policy != "topk":
            smallest.setdefault(result.family, result)
    return list(smallest.values())


def _load_legend(drawn: list[CaseResult], looks: Looks) -> Legend:
    legend: list = [("native (before)", Patch(**_NATIVE))]
    for family, look in looks.items():
        names = {case_name(result, looks) for result in drawn if result.family == family}
        if names:
            # Where comparisons differ in their smallest factor there is none to name.
            name = names.pop() if len(names) == 1 else look.label
            legend.append((name, (Patch(**_fill(look)), Line2D([], [], **(look.marks | {"linestyle": "none"})))))
    return legend


def _draw_loads(axes: Axes, what: str, loads: list[np.ndarray], looks: list[Look]) -> None:
    """Draw native's loads, the first, as a grey ground and the others beside it, or if they are many as lines."""
    if len(loads) * len(loads[0]) <= _MAX_BARS:
        order = np.argsort(-loads[0], kind="stable")
        width = 0.84 / len(loads)
        for at, (load, fill) in enumerate(zip(loads, [_NATIVE, *map(_fill, looks)], strict=True)):
            axes.bar(np.arange(len(order)) + (at - (len(loads) - 1) / 2) * width, load[order], width, **fill)
        axes.set_xticks(range(len(order)), order)
        axes.set_xlim(-0.6, len(order) - 0.4)
        axes.set_xlabel(f"{what}s, sorted by native load")
    else:
        _draw_profiles(axes, [np.sort(load)[::-1] for load in loads], looks)
        axes.set_xlabel(f"{what}s, each case's fullest first")
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (2, 2)), zorder=3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{what} load (1 = mean)")
    axes.grid(False, axis="x")


def _draw_profiles(axes: Axes, loads: list[np.ndarray], looks: list[Look]) -> None:
    """Each case's own loads in descending order: one falling line a case, whatever it moved where."""
    native, *others = loads
    number = len(native)
    edges = np.arange(number + 1) + 0.5
    axes.stairs(native, edges, fill=True, **_NATIVE)
    # Markers of different policies stand at different places: equal loads must not hide each other.
    every = max(len(others), number // 5)
    for index, (load, look) in enumerate(zip(others, looks, strict=True)):
        axes.stairs(load, edges, baseline=None, color=look.colour, linestyle=look.line, linewidth=1.6, zorder=2.5)
        marked = np.arange(index * every // len(others), number, every)
        marked = marked[load[marked] > 0]
        axes.plot(marked + 1, load[marked], zorder=2.6, **(look.marks | {"linestyle": "none"}))
    axes.set_xlim(0.5, number + 0.5)


def _fill(look: Look) -> dict:
    return {"facecolor": look.colour, "edgecolor": "white", "hatch": look.hatch, "linewidth": 0.6}
