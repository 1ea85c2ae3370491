"""Cases set against their baseline: how much faster, how sure, and at what cost in fidelity.

Speedup = native / case, both the slowest rank's time of one layer in the same (launch, batch, iteration);
the estimate is the median of these pairs (``timing.statistics``). The verdict holds its interval
against the noise floor of the same comparison, which comes from native run a second time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from moe_ep_bench.analysis.fidelity import Fidelity, fidelity
from moe_ep_bench.analysis.load import Case, Comparison, Conditions, Run
from moe_ep_bench.analysis.timing import (
    Breakdown,
    Rates,
    break_down,
    host_bound_share,
    layer_time_us,
    probe_floor_us,
    rates,
)
from moe_ep_bench.timing.statistics import (
    Estimate,
    NoiseFloor,
    Outliers,
    Verdict,
    drift,
    estimate_median,
    judge,
    minimum_detectable_effect,
    noise_floor,
    outliers,
    paired_ratios,
)

# Reading order: policies of the capacity-aware paper first, then by name.
_FIRST_POLICIES = ("topk", "token_drop", "expanded_drop")
_ROLE_ORDER = ("baseline", "noise", "policy", "replication", "ceiling")


@dataclass(frozen=True)
class LayerTime:
    """Time of the slowest rank over plain iterations."""

    median_ms: float
    p90_ms: float
    p99_ms: float


@dataclass(frozen=True, eq=False)
class CaseResult:
    """Numbers of one case; all None when it was not measured, so that no speed stands without its fidelity.

    Attributes:
        speedup: over the comparison's baseline; None for the baseline itself and where nothing pairs.
        verdict: what the speedup shows against the noise floor.
        detectable: the smallest true speedup that the verdict would have called, with a power of 80 %.
        probe_overhead: median layer time of breakdown iterations over that of plain ones, minus 1; None of emulated
            ranks, where every iteration is broken down.
        host_bound_share: of plain iterations; see ``timing.host_bound_share``.
        drift, outliers: of the layer time, over all launches.
    """

    case: Case
    layer: LayerTime | None
    speedup: Estimate | None
    verdict: Verdict
    detectable: float | None
    breakdown: Breakdown | None
    probe_overhead: float | None
    fidelity: Fidelity | None
    rates: Rates | None
    host_bound_share: float | None
    drift: float | None
    outliers: Outliers | None

    @property
    def family(self) -> str:
        """The policy with every parameter but its capacity factor: what one line of a figure shows."""
        return family_key(self.case)

    @property
    def capacity_factor(self) -> float | None:
        value = self.case.policy_params.get("capacity_factor")
        return None if value is None else float(value)


@dataclass(frozen=True, eq=False)
class ComparisonResult:
    """Cases in reading order: baseline, noise, topk, policies, replication, ceiling.

    Attributes:
        floor: None without a measured native-against-native pair.
        conditions: of each launch, in order.
    """

    comparison: Comparison
    results: tuple[CaseResult, ...]
    floor: NoiseFloor | None
    conditions: tuple[Conditions, ...]

    def of_role(self, role: str) -> CaseResult | None:
        """The measured case of a role that one case holds (baseline, noise, ceiling), if there is one."""
        return next(iter(self._all_of_role(role)), None)

    @property
    def policies(self) -> list[CaseResult]:
        """Measured policies, in reading order."""
        return self._all_of_role("policy")

    @property
    def replications(self) -> list[CaseResult]:
        """Measured ways of holding busy experts several times: alternatives that drop nothing, and cost memory."""
        return self._all_of_role("replication")

    def _all_of_role(self, role: str) -> list[CaseResult]:
        return [result for result in self.results if result.case.role == role and result.case.is_ok]


@lru_cache(maxsize=2)
def analyse(run: Run) -> list[ComparisonResult]:
    """Set every case of a run against its baseline, comparison by comparison, in the order of run.json."""
    return [_analyse_comparison(run, comparison_id) for comparison_id in run.comparisons]


def _analyse_comparison(run: Run, comparison_id: str) -> ComparisonResult:
    cases = sorted((c for c in run.cases if c.comparison_id == comparison_id), key=_reading_order)
    baseline = next((case for case in cases if case.role == "baseline" and case.is_ok), None)
    speedups: dict[str, Estimate | None] = dict.fromkeys(case.case_id for case in cases)
    if baseline is not None:
        native_us = layer_time_us(baseline)
        for case in cases:
            if case is not baseline:
                speedups[case.case_id] = estimate_median(paired_ratios(native_us, layer_time_us(case)))
    again = next((speedups[case.case_id] for case in cases if case.role == "noise"), None)
    floor = None if again is None else noise_floor(again)
    facts, launches = run.comparisons[comparison_id], run.conditions.get(comparison_id, {})
    conditions = tuple(launches[launch] for launch in sorted(launches))
    results, floor_us, modelled = [], probe_floor_us(facts, conditions), facts.device is not None
    for case in cases:
        times_us, breakdown, speedup = layer_time_us(case), break_down(case, floor_us), speedups[case.case_id]
        is_measured = not times_us.empty
        layer = LayerTime(*(times_us.quantile([0.5, 0.9, 0.99]) / 1e3)) if is_measured else None
        has_overhead = layer is not None and breakdown is not None and run.mode != "emulated"
        results.append(
            CaseResult(
                case=case,
                layer=layer,
                speedup=speedup,
                verdict=judge(speedup, floor, is_modelled=modelled, is_oversubscribed=facts.oversubscribed),
                detectable=minimum_detectable_effect(speedup, floor, is_modelled=modelled)
                if speedup and floor
                else None,
                breakdown=breakdown,
                probe_overhead=breakdown.layer_ms / layer.median_ms - 1 if has_overhead else None,
                fidelity=fidelity(case),
                rates=rates(case, facts, conditions),
                host_bound_share=host_bound_share(case) if is_measured else None,
                drift=drift(times_us) if is_measured else None,
                outliers=outliers(times_us) if is_measured else None,
            )
        )
    return ComparisonResult(facts, tuple(results), floor, conditions)


def _reading_order(case: Case) -> tuple:
    first = _FIRST_POLICIES.index(case.policy) if case.policy in _FIRST_POLICIES else len(_FIRST_POLICIES)
    capacity_factor = case.policy_params.get("capacity_factor")
    return (_ROLE_ORDER.index(case.role), first, family_key(case), capacity_factor or 0.0, case.label)


def family_key(case: Case) -> str:
    """Name a policy and the parameters that are set, all but the capacity factor."""
    return " ".join([case.policy, *_parameters(case)])


def family_labels(comparisons: list[ComparisonResult]) -> dict[str, str]:
    """Families in reading order, each with the name that it has in every figure.

    It is the case's label, which also the tables show, without the capacity factor: the policy and those parameters
    that are not at their defaults. Where that names two families alike, parameters that tell them apart are added.
    """
    cases: dict[str, Case] = {}
    for comparison in comparisons:
        for result in comparison.policies:
            cases.setdefault(result.family, result.case)
    names = {key: _family_name(case) for key, case in cases.items()}
    return {
        key: names[key] if list(names.values()).count(names[key]) == 1 else _longer_name(case, cases.values())
        for key, case in sorted(cases.items(), key=lambda item: _reading_order(item[1]))
    }


def _family_name(case: Case) -> str:
    """The policy and the parameters that its label names, in the label's order, all but the capacity factor."""
    named = [(case.label.find(f" {words}"), words) for words in _parameters(case)]
    return " ".join([case.policy, *(words for place, words in sorted(named) if place >= 0)])


def _longer_name(case: Case, others: Iterable[Case]) -> str:
    """The policy and the parameters in which variants of it differ."""
    shared = set.intersection(*(set(_parameters(other)) for other in others if other.policy == case.policy))
    return " ".join([case.policy, *(words for words in _parameters(case) if words not in shared)])


def _parameters(case: Case) -> list[str]:
    """``key=value`` of what is set, all but the capacity factor."""
    params = {key: value for key, value in case.policy_params.items() if key != "capacity_factor" and value is not None}
    return [f"{key}={value}" for key, value in sorted(params.items())]
