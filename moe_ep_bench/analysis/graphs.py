"""Layers, or whole models, run eagerly beside the same replayed from CUDA graphs.

At decode sizes a layer's kernels end before the host has issued the next ones, so that a layer run eagerly takes as
long as the host does, whatever a policy saves. A graph is issued at once: what its replay takes is the device's own
time, and serving engines decode that way. Whether a policy pays there shows only from the replay. Of whole models the
same holds, a step being a pass.

A *pair* is two comparisons that differ in nothing but that. They have the same batches, but were timed one after the
other: cases within each are paired moment by moment, the two with each other are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from moe_ep_bench.analysis import render
from moe_ep_bench.analysis.activated import layer_words
from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.marks import cost_values, floor_row, mark, speedup_values, table
from moe_ep_bench.analysis.notes import MAX_HOST_BOUND
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import INK, MUTED, NOISE_FILL, Drawing, Legend, Look, case_name, panel_title, sheet
from moe_ep_bench.analysis.sweep import key_words, value_of, value_words
from moe_ep_bench.analysis.timing import host_time_us, layer_time_us
from moe_ep_bench.analysis.words import OVERSUBSCRIBED, footer_lines, percent
from moe_ep_bench.timing.statistics import Estimate, estimate_median, paired_ratios

GRAPH_KEY = "layer.cuda_graph"
_TOKEN_KEYS = ("workload.num_tokens", "workload.tokens_per_rank")
_NOT_INTERLEAVED = "timed one after the other, not interleaved: what drifted between the two is in no interval"

_EAGER, _REPLAYED = "run eagerly", "replayed from CUDA graphs"
_NATIVE = Look("native", INK, "*", "-", "")
_BIGGER = {"*": 1.5}  # a star of the same size looks smaller
# Times further apart than this get a logarithmic axis.
_LINEAR_RANGE = 20


@dataclass(frozen=True, eq=False)
class CasePair:
    """One case, measured in both comparisons; ``ratio`` is its time run eagerly over that of the replay."""

    eager: CaseResult
    replayed: CaseResult
    ratio: Estimate | None

    @property
    def label(self) -> str:
        return self.eager.case.label

    @property
    def both(self) -> tuple[CaseResult, CaseResult]:
        return self.eager, self.replayed


@dataclass(frozen=True, eq=False)
class Pair:
    """Comparisons that differ in nothing but CUDA graphs.

    Attributes:
        cases: those measured in both, in reading order.
        left_out: the others' labels, with what became of them.
    """

    eager: ComparisonResult
    replayed: ComparisonResult
    cases: list[CasePair]
    left_out: list[str]

    @property
    def held(self) -> str:
        """What the graphs hold."""
        assert self.replayed.comparison.cuda_graph is not None
        return self.replayed.comparison.cuda_graph


def graph_pairs(comparisons: Sequence[ComparisonResult]) -> list[Pair]:
    """All pairs that have a case in common, in the order of the comparisons that were run eagerly."""
    replays: dict[str, ComparisonResult] = {}
    for result in comparisons:
        if result.comparison.cuda_graph is not None:
            replays.setdefault(_all_else(result.comparison), result)
    found = []
    for result in comparisons:
        replayed = replays.get(_all_else(result.comparison))
        if result.comparison.cuda_graph is None and replayed is not None:
            pair = _pair(result, replayed)
            found += [pair] if pair.cases else []
    return found


def _all_else(facts: Comparison) -> str:
    """Everything that is said of a comparison but whether graphs were replayed."""
    described = facts.model_dump(mode="json", exclude={"title", "cuda_graph"})
    described["point"].pop(GRAPH_KEY, None)
    return json.dumps(described, sort_keys=True)


def _pair(eager: ComparisonResult, replayed: ComparisonResult) -> Pair:
    others = {result.case.label: result for result in replayed.results}
    cases, left_out = [], []
    for result in eager.results:
        other = others.pop(result.case.label, None)
        if other is not None and result.layer is not None and other.layer is not None:
            ratios = paired_ratios(layer_time_us(result.case), layer_time_us(other.case))
            cases.append(CasePair(result, other, estimate_median(ratios)))
        else:
            statuses = [result.case.status, "not asked for" if other is None else other.case.status]
            left_out.append(f"{result.case.label} (eager: {statuses[0]}, replayed: {statuses[1]})")
    left_out += [f"{label} (eager: not asked for, replayed: {r.case.status})" for label, r in others.items()]
    return Pair(eager, replayed, cases, left_out)


def graph_table(pair: Pair) -> render.Table:
    """A pair as a table with a row per case, and what has to be known to read it."""
    facts = pair.eager.comparison
    identities = [comparison.results[0].case.comparison_id for comparison in (pair.eager, pair.replayed)]
    notes = [
        f"the graphs hold {pair.held}; comparisons {identities[0]} (eager) and {identities[1]} (replayed)",
        _NOT_INTERLEAVED,
        "host: time to issue an iteration on the slowest rank, median; launch-bound: iterations that it issued until "
        "their end",
        *([f"left out: {', '.join(pair.left_out)}"] if pair.left_out else []),
    ]
    columns = [render.text("policy")]
    for which in ("eager", "replayed"):
        columns += [render.number(f"{which}_us", f"{which} us", "{:.1f}")]
        columns += [
            render.number(f"{which}_host_us", "its host us", "{:.1f}"),
            render.percentage(f"{which}_bound", "launch-bound %"),
        ]
    columns += [render.interval("ratio", "eager / replayed")]
    columns += [
        render.interval(f"{which}_speedup", f"speedup {which}", one="baseline") for which in ("eager", "replayed")
    ]
    columns += [render.percentage("dropped_share", "dropped %"), render.percentage("retained_mass", "mass kept %")]
    title = f"{facts.title}, {layer_words(facts)}: {_EAGER}, and {_REPLAYED}"
    return render.Table(pd.DataFrame([_table_row(case, facts) for case in pair.cases]), columns, title, notes)


def _table_row(pair: CasePair, facts: Comparison) -> dict[str, Any]:
    role, fidelity = pair.eager.case.role, pair.eager.fidelity
    row: dict[str, Any] = {"policy": pair.label, "role": role}
    for which, result in (("eager", pair.eager), ("replayed", pair.replayed)):
        row[f"{which}_us"] = _layer_us(result)
        row[f"{which}_host_us"] = float(host_time_us(result.case).median())
        row[f"{which}_bound"] = result.host_bound_share if facts.backend == "nccl" else None
    estimates = {"ratio": pair.ratio, "eager_speedup": pair.eager.speedup, "replayed_speedup": pair.replayed.speedup}
    for name, estimate in estimates.items():
        row |= {f"{name}_{end}": getattr(estimate, end, None) for end in ("median", "low", "high", "is_interval")}
    # The ceiling's scores are not the model's, so keeping them whole says nothing about the model.
    known = fidelity if role != "ceiling" else None
    return row | {name: getattr(known, name, None) for name in ("dropped_share", "retained_mass")}


def _layer_us(result: CaseResult) -> float:
    assert result.layer is not None
    return result.layer.median_ms * 1e3


def graphs_figure(run: Run, comparisons: list[ComparisonResult], looks: dict[str, Look]) -> Drawing | None:
    """Time over the tokens of a step, run eagerly and replayed; below it what policies gain over native in both."""
    pairs = graph_pairs(comparisons)
    if not pairs:
        return None
    panels: dict[str, list[Pair]] = {}
    for pair in pairs:
        panels.setdefault(_panel_words(pair), []).append(pair)
    facts = [one.comparison for pair in pairs for one in (pair.eager, pair.replayed)]
    scope = run.scope
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width = 10.5 if columns == 1 else 14.0
    chosen = _chosen(pairs)
    labels = {case.label for pair in pairs for case in pair.cases if case.eager.case.role == "policy"}
    smallest = "Of each policy the smallest capacity factor. " if len(labels) > len(chosen) else ""
    figure = sheet(
        f"What a policy gains when the {scope} is replayed from CUDA graphs",
        f"Slowest rank's time of {'one MoE layer' if scope == 'layer' else 'a decode step'}, median; below it native "
        "over policy, median of paired iterations, with "
        "the 95 % interval (smallest and largest pair where batches are too few). Noise floor: native run twice, the "
        f"wider of both ways. {smallest}Dropped: top-k pairs not computed. Kept: score mass over that of the model's "
        f"own top-k. The two ways were {_NOT_INTERLEAVED}.",
        footer_lines(run, facts, _warnings(pairs)),
        _legend(pairs, looks),
        width=width,
        body=6.0 * rows,
    )
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3, 2.4] * rows)
    for index, (words, members) in enumerate(panels.items()):
        row, column = divmod(index, columns)
        above = figure.add_subplot(grid[2 * row, column])
        below = figure.add_subplot(grid[2 * row + 1, column], sharex=above)
        panel_title(above, words, width / columns - 1.3)
        _panel(above, below, members, looks, f"{scope} time (us)")
    return Drawing(figure, table(_rows(run, pairs, chosen)))


def _rows(run: Run, pairs: Sequence[Pair], chosen: dict[str, str]) -> Iterator[dict]:
    """A row per case drawn and way in which its layer ran, and the noise floors."""
    for pair in pairs:
        for place, (comparison, way) in enumerate(((pair.eager, _EAGER), (pair.replayed, _REPLAYED))):
            for case in pair.cases:
                result = case.both[place]
                if case.label in chosen.values() or case.eager.case.role == "baseline":
                    values = {"way": way, f"{run.scope}_time_us": _layer_us(result), **speedup_values(result.speedup)}
                    yield mark(run, comparison, result, **values, **cost_values(result))
            yield from floor_row(run, comparison, way=way)


def _panel_words(pair: Pair) -> str:
    """Which layer, and of a sweep all but the tokens of a step: what a panel's pairs have in common."""
    facts = pair.eager.comparison
    said = (GRAPH_KEY, "model.preset", *_TOKEN_KEYS)
    others = [f"{key_words(key)} {value_words(value_of(key, facts))}" for key in sorted(facts.point) if key not in said]
    built = "" if facts.whole is None else f", {facts.whole.num_layers} layers"
    layer = f"{facts.model}{built}, EP {facts.num_ranks}, {facts.dtype}, {layer_words(facts)}"
    return ", ".join([layer, *others]) + f"; the graphs hold {pair.held}"


def _warnings(pairs: Sequence[Pair]) -> list[str]:
    warnings = [OVERSUBSCRIBED] if any(pair.eager.comparison.oversubscribed for pair in pairs) else []
    on_gpu = [case for pair in pairs if pair.eager.comparison.backend == "nccl" for case in pair.cases]
    for words, results in ((_EAGER, [c.eager for c in on_gpu]), (_REPLAYED, [c.replayed for c in on_gpu])):
        bound = sum((result.host_bound_share or 0) > MAX_HOST_BOUND for result in results)
        if bound:
            warnings.append(
                f"{words}, {bound} of {len(results)} cases are launch-bound: their time is the host's, not the device's"
            )
    return warnings


def _chosen(pairs: Sequence[Pair]) -> dict[str, str]:
    """The label that stands for each policy family: that of its smallest capacity factor."""
    policies = [case for pair in pairs for case in pair.cases if case.eager.case.role == "policy"]
    chosen: dict[str, str] = {}
    for case in sorted(policies, key=lambda case: case.eager.capacity_factor or 0.0):
        chosen.setdefault(case.eager.family, case.label)
    return chosen


def _series(pairs: Sequence[Pair], looks: dict[str, Look]) -> list[tuple[Look, list[tuple[int, CasePair]]]]:
    """Native and each policy family: its look, and its cases by the tokens of a step, ascending."""
    chosen = _chosen(pairs)
    picks: list[tuple[Look, Callable[[CasePair], bool]]] = [(_NATIVE, lambda case: case.eager.case.role == "baseline")]
    for family, look in looks.items():
        if family in chosen:
            picks.append((look, lambda case, label=chosen[family]: case.label == label))
    ascending = sorted(pairs, key=lambda pair: pair.eager.comparison.num_tokens)
    return [
        (look, [(pair.eager.comparison.num_tokens, case) for pair in ascending for case in pair.cases if pick(case)])
        for look, pick in picks
    ]


def _legend(pairs: Sequence[Pair], looks: dict[str, Look]) -> Legend:
    legend: list[tuple[str, Line2D | Patch]] = []
    for look, cases in _series(pairs, looks):
        if cases:
            words = (
                look.label if look is _NATIVE else f"{case_name(cases[0][1].eager, looks)}: {_fidelity_words(cases)}"
            )
            legend.append((words, Line2D([], [], **_marks(look, hollow=False))))
    either = Look("", MUTED, "o", "-", "")
    legend += [(_EAGER, Line2D([], [], **_marks(either, hollow=True)))]
    legend += [(_REPLAYED, Line2D([], [], **_marks(either, hollow=False)))]
    if any(one.floor for pair in pairs for one in (pair.eager, pair.replayed)):
        legend.append(("noise floor", Patch(facecolor=NOISE_FILL)))
    return legend


def _fidelity_words(cases: Sequence[tuple[int, CasePair]]) -> str:
    """What a policy costs, from the least to the most of its cases."""
    costs = [one.fidelity for _, case in cases for one in case.both if one.fidelity is not None]
    dropped, kept = ([getattr(cost, name) for cost in costs] for name in ("dropped_share", "retained_mass"))
    return f"dropped {_range_words(dropped)} %, kept {_range_words(kept)} %"


def _range_words(shares: Sequence[float]) -> str:
    ends = list(dict.fromkeys(percent(share) for share in (min(shares), max(shares))))
    return " to ".join(ends)


def _marks(look: Look, *, hollow: bool) -> dict:
    """Run eagerly: hollow and dashed; replayed: filled and solid."""
    return {
        "color": look.colour,
        "linestyle": (0, (4, 2)) if hollow else "-",
        "linewidth": 1.0 if hollow else 1.6,
        "zorder": 2.8 if hollow else 3,
        "marker": look.marker,
        "markersize": 6 * _BIGGER.get(look.marker, 1),
        "markerfacecolor": "white" if hollow else look.colour,
        "markeredgecolor": look.colour if hollow else "white",
        "markeredgewidth": 1.2 if hollow else 0.6,
    }


def _panel(above: Axes, below: Axes, pairs: Sequence[Pair], looks: dict[str, Look], time_words: str) -> None:
    """Steps of as many tokens stand side by side, so that no case hides another."""
    series = _series(pairs, looks)
    tokens = sorted({pair.eager.comparison.num_tokens for pair in pairs})
    ticks = np.log2(tokens)
    room = float(np.diff(ticks).min()) if len(ticks) > 1 else 1.0
    step = room * (min(0.09, 0.55 / len(series)) if len(ticks) > 1 else min(0.25, 0.8 / len(series)))
    times_us = []
    for number, (look, cases) in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * step
        x = [float(np.log2(of_step)) + shift for of_step, _ in cases]
        for hollow in (True, False):
            results = [case.eager if hollow else case.replayed for _, case in cases]
            marks = _marks(look, hollow=hollow)
            above.plot(x, [_layer_us(result) for result in results], **marks)
            times_us += [_layer_us(result) for result in results]
            if look is not _NATIVE:
                _speedups(below, x, results, marks)
        if len(ticks) == 1:  # no line leads the eye along the axis: one leads it from the one way to the other
            for place, (_, case) in zip(x, cases, strict=True):
                above.vlines(place, *sorted(map(_layer_us, case.both)), color=look.colour, linewidth=0.9, zorder=2)
    _floors(below, pairs, room * 0.8)
    below.use_sticky_edges = False
    below.axhline(1, color=INK, linewidth=1.2, zorder=1)
    if max(times_us) > _LINEAR_RANGE * min(times_us):
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_major_formatter(lambda time_us, _: f"{time_us:,.0f}")
        above.yaxis.set_minor_locator(NullLocator())
    else:
        above.set_ylim(0, 1.06 * max(times_us))
    above.set_ylabel(time_words)
    above.tick_params(labelbottom=False)
    below.set_ylabel("speedup (native = 1)")
    below.set_xlabel("tokens of a step")
    below.set_xticks(ticks, [f"{of_step:,}" for of_step in tokens])
    below.set_xlim(ticks[0] - 0.5 * room, ticks[-1] + 0.5 * room)
    for axes in (above, below):
        axes.grid(False, axis="x")


def _speedups(axes: Axes, x: Sequence[float], results: Sequence[CaseResult], marks: dict) -> None:
    """Speedups where there are some, with their intervals."""
    known = [(place, result.speedup) for place, result in zip(x, results, strict=True) if result.speedup]
    if known:
        axes.plot([place for place, _ in known], [speedup.median for _, speedup in known], **marks)
        for place, speedup in known:
            axes.vlines(place, speedup.low, speedup.high, color=marks["color"], linewidth=1.0, zorder=2.5)


def _floors(axes: Axes, pairs: Sequence[Pair], width: float) -> None:
    """Within these a speedup is none."""
    for pair in pairs:
        floors = [one.floor for one in (pair.eager, pair.replayed) if one.floor]
        if floors:
            low, high = min(floor.low for floor in floors), max(floor.high for floor in floors)
            place = float(np.log2(pair.eager.comparison.num_tokens))
            axes.bar(place, high - low, width, bottom=low, color=NOISE_FILL, linewidth=0, zorder=0.5)
