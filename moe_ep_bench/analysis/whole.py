"""Whole models: what a policy's faster layers come to from end to end, what bounds it, and its layers one by one.

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
from typing import NamedTuple

import pandas as pd

from moe_ep_bench.analysis.choice import ITERATION
from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.parts import PHASE_AXIS
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.timing import GROUPS, MODEL_GROUPS
from moe_ep_bench.analysis.words import (
    MODEL_CAVEAT,
    OVERLAP,
    chance_words,
    num_verdicts,
    part_words,
    spread_words,
    workload_words,
)
from moe_ep_bench.schema import LAYER_PHASES, MOE_REST, TOTAL, UNACCOUNTED
from moe_ep_bench.timing.statistics import Estimate, estimate_median, paired_ratios
from moe_ep_bench.workload.formatting import tokens_words

# What an MoE layer's time consists of.
MOE_PHASES = (*LAYER_PHASES, MOE_REST)
# What a pass consists of, in the order in which figures stack it: what no policy changes, then the MoE layers.
PASS_PARTS = {
    "attention": MODEL_GROUPS["attention"],
    "rest": MODEL_GROUPS["rest"],
    "policy": ("policy",),
    "gate": tuple(phase for phase in GROUPS["gate"] if phase != "policy"),
    **{name: phases for name, phases in GROUPS.items() if name not in ("gate", UNACCOUNTED)},
    UNACCOUNTED: (*MODEL_GROUPS[UNACCOUNTED], UNACCOUNTED),
}
# So many policies' layers are shown one by one; all are in ``show --format csv --samples``.
_MOST_POLICIES = 4


@dataclass(frozen=True)
class WholeResult:
    """Numbers of one case from end to end; None where breakdown iterations or the baseline are missing.

    Attributes:
        tokens_per_s: of all ranks; one token per request where a pass is a decode step.
        moe_ms: time of all MoE layers in a pass; median over iterations, slowest rank. ``moe_share``: over the pass.
        moe_speedup: of the MoE layers, native over case.
        expected: what Amdahl's law says of the pass for this ``moe_speedup`` and native's share.
        policy_ms: what choosing experts takes of a pass, in all layers together.
        all_layers_ms: extrapolated to all layers of the model; None where all were built.
        all_layers_speedup: the ratio of these times.
        parts_ms: time of each of ``PASS_PARTS``, mean over ranks, then median over breakdown iterations.
    """

    result: CaseResult
    tokens_per_s: float | None = None
    moe_ms: float | None = None
    moe_share: float | None = None
    moe_speedup: Estimate | None = None
    expected: float | None = None
    policy_ms: float | None = None
    all_layers_ms: float | None = None
    all_layers_speedup: float | None = None
    parts_ms: dict[str, float] | None = None


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


class LayerTimes(NamedTuple):
    """Milliseconds by layer: native's attention and dense layer (``parts``), and its and policies' MoE layer."""

    parts: pd.DataFrame
    moe: pd.DataFrame
    shown_words: str


@lru_cache(maxsize=2)
def analyse_whole(run: Run) -> list[WholeComparison]:
    """Set every case against its baseline, from end to end and in its MoE layers."""
    found = []
    for comparison in analyse(run):
        baseline = comparison.of_role("baseline")
        native = None if baseline is None else _whole_result(comparison, baseline, None)
        results = [
            _whole_result(comparison, result, native) if native is None or result is not baseline else native
            for result in comparison.results
        ]
        share = None if native is None else native.moe_share
        found.append(WholeComparison(comparison, tuple(results), None if share is None else 1 / (1 - share)))
    return found


def _whole_result(comparison: ComparisonResult, result: CaseResult, native: WholeResult | None) -> WholeResult:
    if result.layer is None:
        return WholeResult(result)
    rate = comparison.comparison.num_tokens / result.layer.median_ms * 1e3
    times_us = slowest_us(result.case)
    if times_us is None:
        return WholeResult(result, rate)
    moe_us = moe_time_us(result.case)
    speedup = expected = None
    if native is not None and native.moe_share is not None:
        speedup = estimate_median(paired_ratios(moe_time_us(native.result.case), moe_us))
        expected = None if speedup is None else 1 / (1 - native.moe_share + native.moe_share / speedup.median)
    all_ms, native_ms = _all_layers_ms(comparison, result), None if native is None else native.all_layers_ms
    return WholeResult(
        result=result,
        tokens_per_s=rate,
        moe_ms=float(moe_us.median()) / 1e3,
        moe_share=float(moe_us.sum() / times_us[TOTAL].sum()),
        moe_speedup=speedup,
        expected=expected,
        policy_ms=float(times_us["policy"].median()) / 1e3,
        all_layers_ms=all_ms,
        all_layers_speedup=None if all_ms is None or native_ms is None else native_ms / all_ms,
        parts_ms=result.case.breakdown.mean_ms(PASS_PARTS),
    )


def slowest_us(case: Case) -> pd.DataFrame | None:
    """Phases of the slowest rank, summed over layers, by launch, batch and breakdown iteration; None without these."""
    times = case.breakdown
    return None if times.index.empty else pd.DataFrame(times.on_slowest(), times.index, PHASE_AXIS)


def moe_time_us(case: Case) -> pd.Series:
    """Time of all MoE layers on the slowest rank of each breakdown iteration, indexed by launch, batch, iteration."""
    times_us = slowest_us(case)
    assert times_us is not None
    return times_us[list(MOE_PHASES)].sum(axis=1)


def _all_layers_ms(comparison: ComparisonResult, result: CaseResult) -> float | None:
    """The pass with all layers, from plain iterations of the built ones and their shares in breakdown iterations."""
    whole, rows = comparison.comparison.whole, result.case.layers
    assert whole is not None
    missing = whole.of_layers - whole.num_layers
    if not missing or rows is None or rows.empty or result.layer is None or result.breakdown is None:
        return None
    of_one = float(_by_layer_ms(rows).loc[whole.moe_layers].sum(axis=1).mean()) / result.breakdown.layer_ms
    return result.layer.median_ms * (1 + missing * of_one)


def layers_ms(one: WholeComparison) -> LayerTimes | None:
    """Every layer's parts under native, and its MoE layer under the policies that gain most; None without native's."""
    native = one.comparison.of_role("baseline")
    if native is None or native.case.layers is None or native.case.layers.empty:
        return None
    found = [
        (result.speedup.median, result.case)
        for result in (*one.comparison.policies, *one.comparison.replications)
        if result.speedup and result.case.policy != "topk" and result.case.layers is not None
    ]
    fastest = [case for _, case in sorted(found, key=lambda pair: -pair[0]) if len(case.layers)]
    times = {case.label: _by_layer_ms(case.layers) for case in (native.case, *fastest[:_MOST_POLICIES])}
    own = times[native.case.label]
    words = "mean over ranks, median over breakdown iterations"
    if len(fastest) > _MOST_POLICIES:
        words += f"; the {_MOST_POLICIES} of {len(fastest)} policies that gain most from end to end"
    return LayerTimes(
        own[[kind for kind in ("attention", "dense") if kind in own]],
        pd.DataFrame({label: of_case.get("moe") for label, of_case in times.items()}, index=own.index, dtype=float),
        words,
    )


def _by_layer_ms(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of each layer: columns attention, moe, dense and rest; mean over ranks, median over iterations.

    Args:
        rows: as ``Case.layers``; what is of no layer is left out.
    """
    rows = rows[rows["layer"].notna()]
    kinds = rows["phase"].where(~rows["phase"].isin(MOE_PHASES), "moe")
    sums = rows.groupby([rows["layer"].astype(int), kinds, *ITERATION, rows["rank"]])["time_us"].sum()
    means = sums.groupby(level=["layer", "phase", *ITERATION]).mean()
    return means.groupby(level=["layer", "phase"]).median().unstack("phase") / 1e3


def whole_notes(one: WholeComparison) -> list[str]:
    """What has to be known to read a comparison's numbers; a line each."""
    facts, floor = one.comparison.comparison, one.comparison.floor
    whole = facts.whole
    assert whole is not None
    kernels = ", ".join(sorted({name for launch in one.comparison.conditions for name in launch.attention}))
    run = "the prefill of all prompts, with the last token's logits of each"
    if whole.context_length:
        run = f"one decode step; {tokens_words(whole.context_length)} of each request are in the cache"
    notes = [
        workload_words(facts),
        f"MoE layers: {len(whole.moe_layers)}, each with scores of its own: fullest expert {min(whole.peak_loads):.2f} "
        f"to {max(whole.peak_loads):.2f} x mean",
        *shared_words(whole.shared_by_chance),
        f"attention: {whole.attention}{kernels and f' ({kernels} kernel)'}, data-parallel; experts: "
        f"{part_words(facts.experts)}; permutation: {part_words(facts.permute)}",
        f"a pass is {run}",
        "end to end: slowest rank's pass, native over case, median of pairs " + spread_words(one.comparison),
    ]
    notes += chance_words(num_verdicts(one.comparison))
    if facts.cuda_graph is not None:
        notes.append(f"replayed from CUDA graphs, which hold {facts.cuda_graph}")
    if facts.shared_expert_overlap:
        notes.append(OVERLAP)
    if facts.device is not None:
        notes.append(MODEL_CAVEAT)
    elif floor is not None:
        notes.append(f"noise floor: {floor.low:.3f} to {floor.high:.3f}, by which native run twice differs from itself")
    if one.most is not None:
        notes.append(
            "MoE share f, MoE speedup s: of breakdown iterations; by Amdahl: 1 / (1 - f + f / s) with native's f; no "
            f"policy exceeds 1 / (1 - f) = {one.most:.3f}"
        )
    cut = extrapolated_words(one)
    return [*notes, cut] if cut else notes


def shared_words(shared: list[float]) -> list[str]:
    """That layers have not the neighbours that were asked for; nothing where all have."""
    if not shared:
        return []
    shares = f"{min(shared):.2f} to {max(shared):.2f} experts"
    why = "more than asked for: independent tokens do under this skew"
    return [f"in {len(shared)} of its MoE layers neighbours share {shares}, {why}"]


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
