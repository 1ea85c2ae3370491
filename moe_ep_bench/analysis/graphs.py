"""Layers, or whole models, run eagerly beside the same replayed from CUDA graphs.

At decode sizes a layer's kernels end before the host has issued the next ones, so that a layer run eagerly takes as
long as the host does, whatever a policy saves. A graph is issued at once: what its replay takes is the device's own
time, and serving engines decode that way. Of whole models the same holds, a step being a pass.

A *pair* is two comparisons that differ in nothing but that. They have the same batches, but were timed one after the
other: cases within each are paired moment by moment, the two with each other are not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.activated import layer_words
from moe_ep_bench.analysis.columns import interval, number, percentage, text
from moe_ep_bench.analysis.load import Comparison
from moe_ep_bench.analysis.render import Table
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.timing import host_time_us, layer_time_us
from moe_ep_bench.timing.statistics import Estimate, estimate_median, paired_ratios

GRAPH_KEY = "layer.cuda_graph"
NOT_INTERLEAVED = "timed one after the other, not interleaved: what drifted between the two is in no interval"
EAGER, REPLAYED = "run eagerly", "replayed from CUDA graphs"


@dataclass(frozen=True, eq=False)
class CasePair:
    """One case, measured in both comparisons; ``ratio`` is its time run eagerly over that of the replay."""

    eager: CaseResult
    replayed: CaseResult
    ratio: Estimate | None

    @property
    def label(self) -> str:
        return self.eager.case.label


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
    for one in comparisons:
        if one.comparison.cuda_graph is not None:
            replays.setdefault(_all_else(one.comparison), one)
    eager = [one for one in comparisons if one.comparison.cuda_graph is None]
    pairs = [_pair(one, replays[_all_else(one.comparison)]) for one in eager if _all_else(one.comparison) in replays]
    return [pair for pair in pairs if pair.cases]


def _all_else(facts: Comparison) -> str:
    """Everything that is said of a comparison but whether graphs were replayed."""
    described = facts.model_dump(mode="json", exclude={"title", "cuda_graph"})
    described["point"].pop(GRAPH_KEY, None)
    return json.dumps(described, sort_keys=True)


def _pair(eager: ComparisonResult, replayed: ComparisonResult) -> Pair:
    sides = [{result.case.label: result for result in one.results} for one in (eager, replayed)]
    cases, left_out = [], []
    for label in dict.fromkeys([*sides[0], *sides[1]]):
        one, other = (side.get(label) for side in sides)
        if one is not None and other is not None and one.layer is not None and other.layer is not None:
            ratios = paired_ratios(layer_time_us(one.case), layer_time_us(other.case))
            cases.append(CasePair(one, other, estimate_median(ratios)))
        else:
            statuses = ["not asked for" if result is None else result.case.status for result in (one, other)]
            left_out.append(f"{label} (eager: {statuses[0]}, replayed: {statuses[1]})")
    return Pair(eager, replayed, cases, left_out)


def graph_table(pair: Pair) -> Table:
    """A pair as a table with a row per case, and what has to be known to read it."""
    facts = pair.eager.comparison
    identities = [comparison.results[0].case.comparison_id for comparison in (pair.eager, pair.replayed)]
    notes = [
        f"the graphs hold {pair.held}; comparisons {identities[0]} (eager) and {identities[1]} (replayed)",
        NOT_INTERLEAVED,
        "host: time to issue an iteration on the slowest rank, median; launch-bound: iterations that it issued until "
        "their end",
        *([f"left out: {', '.join(pair.left_out)}"] if pair.left_out else []),
    ]
    columns = [text("policy")]
    for way in ("eager", "replayed"):
        columns += [number(f"{way}_us", f"{way} us", "{:.1f}")]
        columns += [number(f"{way}_host_us", "its host us", "{:.1f}")]
        columns += [percentage(f"{way}_bound", "launch-bound")]
    columns += [interval("ratio", "eager / replayed")]
    columns += [interval(f"{way}_speedup", f"speedup {way}", of_baseline="1") for way in ("eager", "replayed")]
    columns += [percentage("dropped_share", "dropped"), percentage("retained_mass", "mass kept")]
    title = f"{facts.title}, {layer_words(facts)}: {EAGER}, and {REPLAYED}"
    return Table(pd.DataFrame([_table_row(case, facts) for case in pair.cases]), columns, title, notes)


def _table_row(pair: CasePair, facts: Comparison) -> dict[str, Any]:
    role = pair.eager.case.role
    row: dict[str, Any] = {"policy": pair.label, "role": role}
    estimates = {"ratio": pair.ratio}
    for way, result in (("eager", pair.eager), ("replayed", pair.replayed)):
        assert result.layer is not None
        row[f"{way}_us"] = result.layer.median_ms * 1e3
        row[f"{way}_host_us"] = float(host_time_us(result.case).median())
        row[f"{way}_bound"] = result.host_bound_share if facts.backend == "nccl" else None
        estimates[f"{way}_speedup"] = result.speedup
    for name, estimate in estimates.items():
        row |= {f"{name}_{end}": getattr(estimate, end, None) for end in ("median", "low", "high", "is_interval")}
    # The ceiling's scores are not the model's, so keeping them whole says nothing about the model.
    known = pair.eager.fidelity if role != "ceiling" else None
    return row | {name: getattr(known, name, None) for name in ("dropped_share", "retained_mass")}
