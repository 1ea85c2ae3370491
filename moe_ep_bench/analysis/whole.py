"""Whole models as plain text: what a policy's faster layers come to from end to end, and what bounds it.

*End to end* is a pass of the whole model, the slowest rank's time; its speedup, interval and verdict come from plain
iterations like a layer's. *MoE share* is what of native's pass the MoE layers take, waiting included, on the slowest
rank of breakdown iterations; *MoE speedup* is theirs alone. With the share f and the speedup s of the MoE layers,
Amdahl's law (AFIPS 1967) says 1 / (1 - f + f / s) for the pass, and at most 1 / (1 - f) however fast they get.

Where only the first layers were built, what all would take is extrapolated: every further MoE layer like the mean of
those that were timed, with its attention. Such numbers stand in columns of their own and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pandas as pd

from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.notes import spread_words
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.timing import GROUPS, MODEL_GROUPS
from moe_ep_bench.analysis.whole_layers import MOE_PHASES, LayerTimes, by_layer_ms, layer_times
from moe_ep_bench.analysis.words import (
    MODEL_CAVEAT,
    part_words,
    workload_words,
)
from moe_ep_bench.schema import TOTAL, UNACCOUNTED
from moe_ep_bench.timing.statistics import Estimate, estimate_median, paired_ratios
from moe_ep_bench.workload.formatting import tokens_words

_ITERATION = ["launch", "batch", "iteration"]

# What a pass consists of, in the order in which figures stack it: what no policy changes, then the MoE layers.
PASS_PARTS = {
    "attention": MODEL_GROUPS["attention"],
    "rest": MODEL_GROUPS["rest"],
    "policy": ("policy",),
    "gate": tuple(phase for phase in GROUPS["gate"] if phase != "policy"),
    **{name: phases for name, phases in GROUPS.items() if name not in ("gate", UNACCOUNTED)},
    UNACCOUNTED: (*MODEL_GROUPS[UNACCOUNTED], UNACCOUNTED),
}


@dataclass(frozen=True)
class WholeResult:
    """Numbers of one case from end to end; None where breakdown iterations or the baseline are missing.

    Attributes:
        moe_ms: time of all MoE layers in a pass; median over iterations, slowest rank.
        moe_share: that over the pass.
        moe_speedup: of the MoE layers, native over case.
        expected: what Amdahl's law says of the pass for this ``moe_speedup`` and native's share.
        policy_ms: what choosing experts takes of a pass, in all layers together.
        tokens_per_s: of all ranks; one token per request where a pass is a decode step.
        all_layers_ms: extrapolated to all layers of the model; None where all were built.
        all_layers_speedup: the ratio of these times.
        parts_ms: time of each of ``PASS_PARTS``, mean over ranks, then median over breakdown iterations.
    """

    result: CaseResult
    moe_ms: float | None
    moe_share: float | None
    moe_speedup: Estimate | None
    expected: float | None
    policy_ms: float | None
    tokens_per_s: float | None
    all_layers_ms: float | None
    all_layers_speedup: float | None
    parts_ms: dict[str, float] | None


@dataclass(frozen=True, eq=False)
class WholeComparison:
    """Cases of one comparison in reading order.

    Attributes:
        most: 1 / (1 - f) with native's MoE share f: what no policy can exceed; None without breakdown iterations.
    """

    comparison: ComparisonResult
    results: tuple[WholeResult, ...]
    most: float | None

    @property
    def is_cut(self) -> bool:
        """Whether only the first layers of the model were built."""
        whole = self.comparison.comparison.whole
        assert whole is not None
        return whole.num_layers < whole.of_layers


@lru_cache(maxsize=2)
def analyse_whole(run: Run) -> list[WholeComparison]:
    """Set every case against its baseline, from end to end and in its MoE layers."""
    return [_analyse(comparison) for comparison in analyse(run)]


def _analyse(comparison: ComparisonResult) -> WholeComparison:
    baseline = comparison.of_role("baseline")
    native = _whole_result(comparison, baseline, None) if baseline is not None else None
    results = tuple(
        native if native is not None and result is baseline else _whole_result(comparison, result, native)
        for result in comparison.results
    )
    share = native.moe_share if native is not None else None
    return WholeComparison(comparison, results, None if share is None else 1 / (1 - share))


def _whole_result(comparison: ComparisonResult, result: CaseResult, native: WholeResult | None) -> WholeResult:
    facts, case = comparison.comparison, result.case
    times_us = slowest_us(case)
    if result.layer is None or times_us is None:
        rate = None if result.layer is None else facts.num_tokens / result.layer.median_ms * 1e3
        return WholeResult(result, None, None, None, None, None, rate, None, None, None)
    moe_us = moe_time_us(case)
    share = float(moe_us.sum() / times_us[TOTAL].sum())
    speedup = expected = None
    if native is not None and native.moe_share is not None:
        speedup = estimate_median(paired_ratios(moe_time_us(native.result.case), moe_us))
        expected = None if speedup is None else 1 / (1 - native.moe_share + native.moe_share / speedup.median)
    all_ms = _all_layers_ms(comparison, result)
    native_ms = None if native is None else native.all_layers_ms
    return WholeResult(
        result=result,
        moe_ms=float(moe_us.median()) / 1e3,
        moe_share=share,
        moe_speedup=speedup,
        expected=expected,
        policy_ms=float(times_us["policy"].median()) / 1e3,
        tokens_per_s=facts.num_tokens / result.layer.median_ms * 1e3,
        all_layers_ms=all_ms,
        all_layers_speedup=None if all_ms is None or native_ms is None else native_ms / all_ms,
        parts_ms=_parts_ms(case),
    )


def slowest_us(case: Case) -> pd.DataFrame | None:
    """Phases of the slowest rank in each breakdown iteration, summed over layers; None where there are none."""
    times_us = _broken_down(case)
    return None if times_us is None else times_us.loc[times_us.groupby(level=_ITERATION)[TOTAL].idxmax()]


def _broken_down(case: Case) -> pd.DataFrame | None:
    """Phases of every rank in each breakdown iteration, summed over layers; None where there are none."""
    rows = case.timings[case.timings["kind"] == "breakdown"]
    if rows.empty:
        return None
    return rows.pivot(index=[*_ITERATION, "rank"], columns="phase", values="time_us").fillna(0.0)


def _parts_ms(case: Case) -> dict[str, float]:
    times_us = _broken_down(case)
    assert times_us is not None
    mean_us = times_us.groupby(level=_ITERATION).mean()
    sums_us = {
        name: mean_us.reindex(columns=list(phases), fill_value=0.0).sum(axis=1) for name, phases in PASS_PARTS.items()
    }
    return {name: float(sum_us.median()) / 1e3 for name, sum_us in sums_us.items()}


def moe_time_us(case: Case) -> pd.Series:
    """Time of all MoE layers on the slowest rank of each breakdown iteration, indexed by launch, batch, iteration."""
    times_us = slowest_us(case)
    assert times_us is not None
    return times_us.reindex(columns=list(MOE_PHASES), fill_value=0.0).sum(axis=1).droplevel("rank")


def _all_layers_ms(comparison: ComparisonResult, result: CaseResult) -> float | None:
    """The pass with all layers, from plain iterations of the built ones and their shares in breakdown iterations."""
    facts = comparison.comparison.whole
    assert facts is not None
    missing = facts.of_layers - facts.num_layers
    rows = result.case.layers
    if not missing or rows is None or rows.empty or result.layer is None or result.breakdown is None:
        return None
    moe_layers = by_layer_ms(rows).loc[facts.moe_layers]
    of_one = float(moe_layers.sum(axis=1).mean()) / result.breakdown.layer_ms
    return result.layer.median_ms * (1 + missing * of_one)


def whole_notes(one: WholeComparison) -> list[str]:
    """What has to be known to read a comparison's numbers; a line each."""
    facts = one.comparison.comparison
    whole = facts.whole
    assert whole is not None
    peaks = whole.peak_loads
    notes = [
        workload_words(facts),
        f"MoE layers: {len(whole.moe_layers)}, each with scores of its own: fullest expert {min(peaks):.2f} to "
        f"{max(peaks):.2f} x mean",
        *chance_words(whole.shared_by_chance),
        f"attention: {whole.attention}{_kernel_words(one)}, data-parallel; experts: {part_words(facts.experts)}; "
        f"permutation: {part_words(facts.permute)}",
        *([f"replayed from CUDA graphs, which hold {facts.cuda_graph}"] if facts.cuda_graph is not None else []),
        "end to end: slowest rank's pass, native over case, median of pairs " + spread_words(one.comparison),
    ]
    if facts.device is not None:
        notes.append(MODEL_CAVEAT)
    elif one.comparison.floor is not None:
        floor = one.comparison.floor
        words = "by which native run twice differs from itself"
        notes.append(f"noise floor: {floor.low:.3f} to {floor.high:.3f}, {words}")
    if one.most is not None:
        notes.append(
            "MoE share f, MoE speedup s: of breakdown iterations; by Amdahl: 1 / (1 - f + f / s) with native's f; no "
            f"policy exceeds 1 / (1 - f) = {one.most:.3f}"
        )
    if whole.context_length:
        notes.append(
            f"a pass is one decode step; {tokens_words(whole.context_length)} of each request are in the cache"
        )
    else:
        notes.append("a pass is the prefill of all prompts, with the last token's logits of each")
    cut = extrapolated_words(one)
    return [*notes, cut] if cut else notes


def chance_words(shared: list[float]) -> list[str]:
    """That layers have not the neighbours that were asked for; nothing where all have."""
    if not shared:
        return []
    shares = f"{min(shared):.2f} to {max(shared):.2f} experts"
    why = "more than asked for: independent tokens do under this skew"
    return [f"in {len(shared)} of its MoE layers neighbours share {shares}, {why}"]


def _kernel_words(one: WholeComparison) -> str:
    """Which of torch's kernels attention took; nothing in results that do not say."""
    found = sorted({name for launch in one.comparison.conditions for name in launch.attention})
    return f" ({', '.join(found)} kernel{'s' if len(found) > 1 else ''})" if found else ""


def extrapolated_words(one: WholeComparison) -> str:
    """How many layers were built, and what stands for the others; nothing where all were."""
    whole = one.comparison.comparison.whole
    assert whole is not None
    if not one.is_cut:
        return ""
    return (
        f"extrapolated: {whole.num_layers} of {whole.of_layers} layers were built and timed; each further layer is "
        "taken to be like the mean MoE layer that was"
    )


def layers_ms(one: WholeComparison) -> LayerTimes | None:
    """Every layer's parts under native, and its MoE layer under the policies that gain most; None without native's."""
    native = one.comparison.of_role("baseline")
    if native is None or native.case.layers is None or native.case.layers.empty:
        return None
    return layer_times(native.case, [result.case for result in _fastest(one)])


def _fastest(one: WholeComparison) -> list[CaseResult]:
    """What changes routing or placement, the fastest from end to end first; ``topk`` changes neither."""
    found = [result for result in (*one.comparison.policies, *one.comparison.replications) if result.speedup]
    found = [result for result in found if result.case.policy != "topk"]
    return sorted(found, key=lambda result: result.speedup.median if result.speedup else 0.0, reverse=True)
