"""The figures of bars: ``phases``, where a layer's time goes, and ``load``, who has how much to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from moe_ep_bench.analysis.figures.panels import in_panels, label_outer, lay_out, one_scale
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import cost_values, mark, table
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import (
    INK,
    MUTED,
    NATIVE_FILL,
    Drawing,
    Legend,
    Look,
    case_name,
    panel_title,
    phase_look,
    sheet,
    wrap,
)
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.words import (
    NOT_FUSED,
    OVERSUBSCRIBED,
    footer_lines,
    is_modelled_phase,
    milliseconds,
    percent,
)

# More policies in one picture of loads make a tangle; more bars than this, a fence: lines are drawn then.
_MAX_POLICIES = 6
_MAX_BARS = 64
# Panels beside each other have one scale where the highest is no more than so many times the lowest.
_ONE_SCALE = 4.0

Looks = dict[str, Look]


def phases_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Where the time goes: a stacked bar per case, mean over ranks, so that waiting shows."""
    panels = [(c, [r for r in c.results if r.breakdown]) for c in comparisons]
    panels = [(comparison, results) for comparison, results in panels if results]
    if not panels:
        return None
    facts = [comparison.comparison for comparison, _ in panels]
    warnings = [OVERSUBSCRIBED] if any(fact.oversubscribed for fact in facts) else []
    warnings += [NOT_FUSED] if any(fact.permute.is_unfused_permutation for fact in facts) else []
    breakdowns = "batches" if all(fact.device is not None for fact in facts) else "breakdown iterations"
    groups = [g for g in GROUPS if any(r.breakdown.group_ms[g] > 0 for _, results in panels for r in results)]
    most_lines = max(bar_label(r, looks).count("\n") + 1 for _, results in panels for r in results)
    columns = 1 if len(panels) == 1 else 2
    height = -(-len(panels) // columns)
    most_bars = [max(len(results) for _, results in panels[columns * row :][:columns]) for row in range(height)]
    heights = [0.85 + max(0.45, 0.17 * most_lines + 0.08) * bars for bars in most_bars]
    figure = sheet(
        "Where a layer's time goes",
        f"Mean over ranks, median over {breakdowns}. waiting: for the slowest rank, where ranks meet. "
        "gate: router and policy. permute: with the exchange of counts. comm: dispatch and combine, without waiting.",
        footer_lines(run, facts, warnings),
        [
            (f"{group} (modelled)" if modelled else group, Patch(**phase_look(group, modelled=modelled)))
            for group in groups
            for modelled in sorted({is_modelled_phase(run, fact, group) for fact in facts})
        ],
        width=9.5 if columns == 1 else 14,
        body=sum(heights),
    )
    grid = figure.add_gridspec(height, columns, height_ratios=heights)
    for index, (comparison, results) in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(index, columns)])
        panel_title(axes, comparison.comparison.title, 6.5 if columns == 1 else 4.2)
        modelled = {group: is_modelled_phase(run, comparison.comparison, group) for group in groups}
        _phase_bars(axes, results, modelled, looks)
    rows = [
        mark(run, comparison, r, phases=group, time_ms=r.breakdown.group_ms[group], **cost_values(r))
        for comparison, results in panels
        for r in results
        for group in groups
    ]
    return Drawing(figure, table(rows))


def load_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Load of experts and, of several, of ranks, before and after; each policy at its smallest capacity factor."""
    loads = [_Loads(c, native, _smallest_factors(c)) for c in comparisons if (native := c.of_role("baseline"))]
    loads = [one for one in loads if one.policies]
    if not loads:
        return None
    panels = in_panels([one.comparison for one in loads])
    if all(comparison.comparison.num_ranks == 1 for comparison in panels.shown):
        panels = panels.of_columns(2)  # one panel each: there is room for larger ones
    shown = [one for one in loads if one.comparison in panels.shown]
    quantities = ("expert", "rank") if any(one.comparison.comparison.num_ranks > 1 for one in shown) else ("expert",)
    is_one_column = panels.num_columns == 1
    figure = sheet(
        "Load of experts and ranks, before and after" if len(quantities) > 1 else "Load of experts, before and after",
        "(token, expert) pairs of all ranks' tokens, over the mean of the model's own routing; mean over batches. "
        "Of each policy the smallest capacity factor.",
        footer_lines(run, [one.comparison.comparison for one in shown], [*_left_out(shown), *panels.note]),
        _load_legend(shown, looks),
        width=11.0 if is_one_column else panels.width,
        body=len(panels.rows) * (3.7 if is_one_column else (3.2, 5.6)[len(quantities) - 1]),
    )
    of_comparison = {id(one.comparison): one for one in shown}
    for row in lay_out(figure, panels, (1.4, 1)[: len(quantities)], (2.4, 1)[: len(quantities)], 6.5):
        for place in row:
            one = of_comparison[id(place.comparison)]
            for axes, what in zip(place.axes, quantities, strict=True):
                _draw_loads(axes, what, one, [looks[r.family] for r in one.policies])
            label_outer(place, has_one_x=False)
        for panels_of_one in zip(*(place.axes for place in row), strict=True):
            heights = [axes.get_ylim()[1] for axes in panels_of_one]
            if max(heights) <= _ONE_SCALE * min(heights):
                one_scale(panels_of_one, "y")
    rows = [
        mark(run, one.comparison, r, of=what, number=number, load_over_mean=load)
        for one in loads
        for r in (one.native, *one.policies)
        for what in ("expert", "rank")
        for number, load in enumerate(getattr(r.fidelity, f"{what}_load"))
    ]
    return Drawing(figure, table(rows))


@dataclass(frozen=True, eq=False)
class _Loads:
    """The cases of a comparison whose loads are drawn."""

    comparison: ComparisonResult
    native: CaseResult
    policies: list[CaseResult]

    def of(self, what: str) -> list[NDArray[np.float64]]:
        """Loads over the mean, native's first; ``what``: expert or rank."""
        return [getattr(result.fidelity, f"{what}_load") for result in (self.native, *self.policies[:_MAX_POLICIES])]


def _left_out(loads: list[_Loads]) -> list[str]:
    """Which policies there is no room for."""
    names = dict.fromkeys(result.family for one in loads for result in one.policies[_MAX_POLICIES:])
    return [f"not drawn, but in the CSV beside the figure: {', '.join(names)}."] if names else []


def _load_legend(loads: list[_Loads], looks: Looks) -> Legend:
    drawn = [result for one in loads for result in one.policies[:_MAX_POLICIES]]
    legend: list = [("native (before)", Patch(facecolor=NATIVE_FILL, edgecolor=MUTED))]
    for family, look in looks.items():
        names = {case_name(result, looks) for result in drawn if result.family == family}
        if names:
            # Where comparisons differ in their smallest factor there is none to name.
            name = names.pop() if len(names) == 1 else look.label
            legend.append((name, (Patch(**_fill(look)), Line2D([], [], **_marks(look)))))
    return legend


def _phase_bars(axes: Axes, results: list[CaseResult], groups: dict[str, bool], looks: Looks) -> None:
    """Stack groups of phases, each with whether it was modelled."""
    places, ends = np.arange(len(results)), np.zeros(len(results))
    for group, modelled in groups.items():
        widths = np.array([r.breakdown.group_ms[group] for r in results])
        axes.barh(places, widths, left=ends, height=0.68, linewidth=0.6, **phase_look(group, modelled=modelled))
        ends += widths
    for place, end in zip(places, ends, strict=True):
        axes.annotate(
            milliseconds(end, 3), (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axes.set_xlim(0, 1.13 * ends.max())
    axes.set_xlabel("time of one layer (ms)")
    axes.set_yticks(places, [bar_label(result, looks) for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def name_label(result: CaseResult, looks: Looks) -> str:
    """The case's name alone, in lines that fit beside a bar."""
    return wrap(case_name(result, looks), 2.4, 9)


def bar_label(result: CaseResult, looks: Looks) -> str:
    """Name the case and what it costs, so that a short bar is not read as a gift."""
    name = name_label(result, looks)
    if result.case.role != "policy" or result.fidelity is None:
        return name
    dropped, kept = percent(result.fidelity.dropped_share), percent(result.fidelity.retained_mass)
    return f"{name}\n{dropped} % dropped, {kept} % mass kept"


def _smallest_factors(comparison: ComparisonResult) -> list[CaseResult]:
    """Of each family its smallest capacity factor. Without topk, whose loads are native's."""
    smallest: dict[str, CaseResult] = {}
    for result in comparison.policies:  # in reading order: factors ascend
        if result.case.policy != "topk":
            smallest.setdefault(result.family, result)
    return list(smallest.values())


def _draw_loads(axes: Axes, what: str, of: _Loads, looks: list[Look]) -> None:
    """Draw native's loads as a grey ground and the others beside it, or where they are too many for bars as lines."""
    loads = of.of(what)
    if len(loads) * len(loads[0]) <= _MAX_BARS:
        _load_bars(axes, loads, looks)
        axes.set_xlabel(f"{what}s, sorted by native load")
    else:
        _load_profiles(axes, loads, looks)
        axes.set_xlabel(f"{what}s, each case's fullest first")
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (2, 2)), zorder=3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{what} load (1 = mean)")
    axes.grid(False, axis="x")


def _load_bars(axes: Axes, loads: list[NDArray[np.float64]], looks: list[Look]) -> None:
    order = np.argsort(-loads[0], kind="stable")
    places = np.arange(len(order))
    native, *others = (load[order] for load in loads)
    width = 0.84 / len(loads)
    offsets = (np.arange(len(loads)) - (len(loads) - 1) / 2) * width
    axes.bar(places + offsets[0], native, width, facecolor=NATIVE_FILL, edgecolor=MUTED, linewidth=0.6)
    for offset, load, look in zip(offsets[1:], others, looks, strict=False):
        axes.bar(places + offset, load, width, linewidth=0.6, **_fill(look))
    axes.set_xticks(places, order)
    axes.set_xlim(-0.6, len(order) - 0.4)


def _load_profiles(axes: Axes, loads: list[NDArray[np.float64]], looks: list[Look]) -> None:
    """Each case's own loads in descending order: one falling line a case, whatever it moved where."""
    native, *others = (np.sort(load)[::-1] for load in loads)
    number = len(native)
    edges = np.arange(number + 1) + 0.5
    axes.stairs(native, edges, fill=True, facecolor=NATIVE_FILL, edgecolor=MUTED, linewidth=0.6)
    # Markers of different policies stand at different places: equal loads must not hide each other.
    drawn = list(zip(others, looks, strict=False))
    every = max(len(drawn), number // 5)
    for index, (load, look) in enumerate(drawn):
        axes.stairs(load, edges, baseline=None, color=look.colour, linestyle=look.line, linewidth=1.6, zorder=2.5)
        marked = np.arange(index * every // len(drawn), number, every)
        marked = marked[load[marked] > 0]
        axes.plot(marked + 1, load[marked], zorder=2.6, **_marks(look))
    axes.set_xlim(0.5, number + 0.5)


def _marks(look: Look) -> dict:
    return {"linestyle": "none", "marker": look.marker, "color": look.colour, "markeredgecolor": "white"}


def _fill(look: Look) -> dict:
    return {"facecolor": look.colour, "edgecolor": "white", "hatch": look.hatch}
