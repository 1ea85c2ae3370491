"""Decode: the experts' time over the experts that a step activates.

A decode step is bound by memory: what it takes is the weights that it reads, those of the activated experts, however
many tokens share them (OEA, arXiv 2511.02237, Figure 1). Under expert parallelism each rank reads its own, so the rank
that activates most decides. Here every batch of every case is a point, activated experts of that rank against the
experts' phase of the slowest rank; points of all comparisons of one layer on one machine are pooled, so that a
sweep over the tokens of a step, and policies that activate fewer, lie on one line. What the line's slope is worth
shows beside the bound: an expert's weights over the bandwidth at which this device reads.

OEA's cost model (section 2) has a term for the tokens too: time = c + b x activated + a x pairs.

Points of one batch under several policies are no independent ones: intervals are over batches (``timing.linear``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.fidelity import pairs_by_rank
from moe_ep_bench.analysis.load import Case, Comparison, Run
from moe_ep_bench.analysis.speedups import ComparisonResult, analyse
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.timing.linear import CostFit, LinearFit, cost_fit, linear_fit

# A run is a decode run where this share of the experts, on the fullest rank, lies idle in some batch.
_LEAST_IDLE = 0.05
_ROLES = ("baseline", "policy")


@dataclass(frozen=True, eq=False)
class Steps:
    """Batches of comparisons that differ in their tokens alone.

    Attributes:
        comparisons: of the run, in its order.
        points: a row per batch and case: comparison_id, case_id, label, family (native: None), num_tokens, batch,
            activated, pairs, time_us.
        line: of time over activated experts; None where a line cannot be fitted.
        cost: the same with a term for pairs; None where the two cannot be told apart.
        bound_us: one expert's weights at the bandwidth that was measured beside the run; None where none was.
    """

    comparisons: list[Comparison]
    points: pd.DataFrame
    line: LinearFit | None
    cost: CostFit | None
    bound_us: float | None

    @property
    def title(self) -> str:
        facts = self.comparisons[0]
        ends = dict.fromkeys(f"{end:,}" for end in (self.points["num_tokens"].min(), self.points["num_tokens"].max()))
        return f"{facts.model}, EP {facts.num_ranks}, {' to '.join(ends)} tokens a step, {layer_words(facts)}"


def layer_words(facts: Comparison) -> str:
    """How the layer ran: its experts, and where they are not the usual ones the dispatcher and CUDA graphs."""
    dispatcher = "" if facts.dispatcher == "alltoall" else f", {facts.dispatcher} dispatcher"
    replayed = "" if facts.cuda_graph is None else f", replayed from CUDA graphs ({facts.cuda_graph})"
    return f"{facts.experts.ran} experts{dispatcher}{replayed}"


def mean_activated(case: Case, facts: Comparison) -> float:
    """Activated experts of the rank that activates most, mean over batches."""
    return float(_fullest_rank(case, facts)["activated"].mean())


def activated_by_case(result: ComparisonResult) -> dict[str, float]:
    """Activated experts of the fullest rank by case id, mean over batches; empty where all steps activate all experts.

    Nothing has to be timed for it. Experts that are held several times are left out: which rank reads them does
    not follow from the counts.
    """
    facts = result.comparison
    measured = [one.case for one in result.results if one.case.is_ok and one.case.role != "replication"]
    by_batch = {case: _fullest_rank(case, facts)["activated"] for case in measured}
    counts = [found for case, found in by_batch.items() if case.role in _ROLES]
    if not counts or not _leaves_idle(pd.concat(counts), facts):
        return {}
    return {case.case_id: float(found.mean()) for case, found in by_batch.items()}


def decode_steps(run: Run, comparisons: Sequence[ComparisonResult] | None = None) -> list[Steps]:
    """Pool a run's points; nothing where every batch activates all experts, or nothing was timed by phase."""
    pools: dict[tuple[object, ...], list[ComparisonResult]] = {}
    for result in analyse(run) if comparisons is None else comparisons:
        if result.comparison.device is None:
            pools.setdefault(_layer(result.comparison), []).append(result)
    found = []
    for pool in pools.values():
        parts = [
            _points(one.case, result.comparison).assign(family=None if one.case.role == "baseline" else one.family)
            for result in pool
            for one in result.results
            if one.case.role in _ROLES and one.case.is_ok
        ]
        parts = [part for part in parts if len(part)]
        if not parts or not _leaves_idle(pd.concat(parts)["activated"], pool[0].comparison):
            continue
        points = pd.concat(parts, ignore_index=True)
        batch = points.groupby(["comparison_id", "batch"]).ngroup()
        line = _or_none(linear_fit, points["activated"], points["time_us"], batch=batch)
        cost = _or_none(cost_fit, points["activated"], points["pairs"], points["time_us"], batch=batch)
        found.append(Steps([result.comparison for result in pool], points, line, cost, _bound_us(pool)))
    return found


def decode_words(steps: Steps) -> list[str]:
    """The line, the cost model and the bound, as lines of text."""
    lines = []
    if steps.line is not None:
        line = steps.line
        lines.append(
            f"experts' time = {line.intercept_us:.1f} us + {line.slope_us:.2f} us x activated experts of the fullest "
            f"rank [{line.slope_low_us:.2f}, {line.slope_high_us:.2f}], R2 {line.r2:.4f}, {line.num_points} points"
        )
    if steps.cost is not None:
        cost = steps.cost
        lines.append(
            f"with a term for tokens: {cost.intercept_us:.1f} us + {cost.per_expert_us:.2f} us x activated + "
            f"{cost.per_pair_us:.3f} us x pairs, R2 {cost.r2:.4f}"
        )
    if steps.bound_us is not None:
        lines.append(f"bound: {steps.bound_us:.2f} us an expert, its weights at the speed at which this device reads")
    return lines


def _layer(facts: Comparison) -> tuple[object, ...]:
    """What makes a step's time comparable with another's."""
    sizes = facts.scale, facts.hidden_size, facts.ffn_hidden_size
    computed = facts.experts.ran, facts.dispatcher, facts.cuda_graph
    return facts.model, *sizes, facts.num_ranks, facts.dtype, *computed, facts.flush_l2


def _leaves_idle(activated: pd.Series, facts: Comparison) -> bool:
    return activated.min() <= (1 - _LEAST_IDLE) * (facts.num_experts // facts.num_ranks)


def _or_none(fit, *columns: pd.Series, batch: pd.Series):
    try:
        return fit(*columns, cluster_N=batch)
    except ValueError:
        return None


def _fullest_rank(case: Case, facts: Comparison) -> pd.DataFrame:
    """By batch: activated experts and pairs of the rank that activates most, all source ranks' tokens together."""
    batches, pairs_BRL = pairs_by_rank(case.routing, facts)  # B = batches, R = EP ranks, L = experts of a rank
    activated_BR = (pairs_BRL > 0).sum(axis=2)
    fullest = np.arange(len(batches)), activated_BR.argmax(axis=1)
    return pd.DataFrame({"activated": activated_BR[fullest], "pairs": pairs_BRL.sum(axis=2)[fullest]}, batches)


def _points(case: Case, facts: Comparison) -> pd.DataFrame:
    """A row per batch of which the experts were timed."""
    times = case.timings[(case.timings["kind"] == "breakdown") & (case.timings["phase"] == "experts")]
    slowest_us = times.groupby(["batch", "launch", "iteration"])["time_us"].max().groupby("batch").median()
    points = _fullest_rank(case, facts).loc[slowest_us.index].assign(time_us=slowest_us).reset_index(names="batch")
    about = {"comparison_id": case.comparison_id, "case_id": case.case_id, "label": case.label}
    return points.assign(**about, num_tokens=facts.num_tokens)


def _bound_us(pool: Sequence[ComparisonResult]) -> float | None:
    facts = pool[0].comparison
    measured = [rank.ceilings.read_gbps for result in pool for launch in result.conditions for rank in launch.ranks]
    if not measured or None in measured:
        return None
    weights_bytes = 3 * facts.hidden_size * facts.slice_size * VALUE_BYTES[facts.dtype]
    return weights_bytes / float(np.median(measured)) / 1e3
