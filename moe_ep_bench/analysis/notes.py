"""What has to be known to read a table: how the numbers came about, and what weakens them.

Notes say what is so; warnings say what forbids or weakens a reading. One line each.
"""

from __future__ import annotations

import math

from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.padding import padding_notes
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.words import MODEL_CAVEAT, NOT_FUSED, OVERSUBSCRIBED, part_words, percent, workload_words
from moe_ep_bench.machine.monitor import disturbances, remarks
from moe_ep_bench.timing.statistics import MIN_BATCHES

# Aims of the timing protocol: above these a breakdown is told apart from what it breaks down.
MAX_UNACCOUNTED = 0.01
MAX_PROBE_OVERHEAD = 0.01
# A share of launch-bound iterations below this is chance.
MAX_HOST_BOUND = 0.1
# Pairs cancel a drift that is slow against them; beyond this it is worth a warning.
MAX_DRIFT = 0.1


def notes_of(comparison: ComparisonResult) -> list[str]:
    facts, results = comparison.comparison, comparison.results
    modelled = facts.device is not None
    notes = [workload_words(facts)]
    if modelled:
        notes.append(f"experts: {part_words(facts.experts)}; permutation: {part_words(facts.permute)}")
        notes.append(MODEL_CAVEAT)
    else:
        routing = f"; routing: {part_words(facts.kernel)}" if facts.kernel else ""
        notes.append(f"experts: {part_words(facts.experts)}; permutation: {part_words(facts.permute)}{routing}")
        if facts.dispatcher == "allgather":
            notes.append("dispatcher: allgather; crossing bytes are those that an all-to-all would send")
        if facts.cuda_graph is not None:
            notes.append(f"replayed from CUDA graphs, which hold {facts.cuda_graph}")
    baseline = comparison.of_role("baseline")
    if baseline is not None and baseline.fidelity is not None:
        load = baseline.fidelity
        notes.append(
            f"imbalance under {baseline.case.label}: fullest expert {load.fullest_expert:.2f} x mean, "
            f"fullest rank {load.fullest_rank:.2f} x mean"
            + (" of what valid tokens select" if facts.workload.padding else "")
        )
    notes += padding_notes(comparison)
    notes.append("speedup: slowest rank's layer time, native over case, median of pairs " + spread_words(comparison))
    if comparison.floor is not None and not modelled:
        low, high = comparison.floor.low, comparison.floor.high
        notes.append(f"noise floor: {low:.3f} to {high:.3f}, by which native run twice differs from itself")
    notes += _detectable(comparison)
    if comparison.of_role("ceiling") is not None:
        notes.append("ceiling: native on perfectly balanced scores; what balance alone could buy, no policy")
    if not modelled:
        notes += _steadiness(comparison, baseline)
        routed = {r: r.breakdown.policy_share for r in results if r.breakdown and r.case.role == "policy"}
        notes += _worst("choosing experts, share of the slowest rank's time", routed)
        notes += _worst("unaccounted time", {r: r.breakdown.unaccounted_share for r in results if r.breakdown})
    notes += _worst("probe overhead", {r: r.probe_overhead for r in results if r.probe_overhead is not None})
    if facts.random_weights and any(r.fidelity and not math.isnan(r.fidelity.output_error) for r in results):
        notes.append("output error: relative to native, with random weights; it is no measure of a model's accuracy")
    notes += _memory(comparison)
    notes += [f"{r.case.label}: {extra_memory_words(r)}" for r in comparison.replications]
    notes += dict.fromkeys(line for launch in comparison.conditions for line in remarks(launch.machines))
    return notes


def spread_words(comparison: ComparisonResult) -> str:
    """What stands beside a speedup: its interval, or the ends of its samples."""
    if comparison.comparison.num_batches < MIN_BATCHES:
        return f"(min..max: fewer than {MIN_BATCHES} batches give no interval, and so no verdict)"
    num_launches = len(comparison.conditions)
    launches = f", and Student's t over {num_launches} launches" if num_launches > 1 else ", of this launch only"
    return f"[95 % interval, bootstrapped over batches, then iterations{launches}]"


def _detectable(comparison: ComparisonResult) -> list[str]:
    effects = {result: result.detectable for result in comparison.policies if result.detectable is not None}
    if not effects:
        return []
    best, worst = min(effects, key=effects.__getitem__), max(effects, key=effects.__getitem__)
    return [
        f"smallest speedup that would be called (power 80 %): {effects[best]:.3f} ({best.case.label}) "
        f"to {effects[worst]:.3f} ({worst.case.label})"
    ]


def _steadiness(comparison: ComparisonResult, baseline: CaseResult | None) -> list[str]:
    notes = []
    if comparison.conditions:
        rounds = ", ".join(str(launch.warm_up.rounds) for launch in comparison.conditions)
        notes.append(f"warm-up: {rounds} rounds over all batches and cases, by launch")
    if baseline is not None and baseline.outliers is not None and baseline.drift is not None:
        far_out, worst = percent(baseline.outliers.share), baseline.outliers.worst
        notes.append(
            f"native over the run: drift {100 * baseline.drift:+.1f} % (pairs cancel it), {far_out} % of its "
            f"iterations far out, the worst {worst:.2f} x its batch's median"
        )
    return notes


def _memory(comparison: ComparisonResult) -> list[str]:
    peaks = [rank.peak_memory_bytes for launch in comparison.conditions for rank in launch.ranks]
    known = [peak for peak in peaks if peak is not None]
    if not known:
        return []
    of_what = "on the device" if comparison.comparison.backend == "nccl" else "of the process, imports and all"
    return [f"peak memory: {max(known) / 2**30:.2f} GiB on the fullest rank ({of_what})"]


def extra_memory_words(result: CaseResult) -> str:
    """What replicas of experts cost, in all layers of the model together."""
    if result.case.extra_bytes_per_rank is None:
        return "more memory per rank, by how much was not recorded"
    return f"{result.case.extra_bytes_per_rank / 2**30:.3g} GiB more memory per rank, in all layers together"


def _worst(what: str, values: dict[CaseResult, float]) -> list[str]:
    if not values:
        return []
    worst = max(values, key=lambda result: values[result])
    return [f"{what}: at worst {percent(values[worst])} % ({worst.case.label})"]


def warnings_of(comparison: ComparisonResult, run: Run) -> list[str]:
    facts, results = comparison.comparison, comparison.results
    warnings = []
    if comparison.of_role("baseline") is None:
        warnings.append("the baseline was not measured, so there are no speedups")
    elif comparison.floor is None:
        warnings.append("native was not measured a second time, so there is no noise floor and no verdict")
    again = comparison.of_role("noise")
    if again is not None and again.speedup is not None and again.speedup.is_interval:
        low, high = again.speedup.low, again.speedup.high
        if low > 1 or high < 1:
            warnings.append("native differs from itself: something drifts with the order of cases; the floor covers it")
    warnings += _machine_warnings(comparison)
    if facts.oversubscribed:
        warnings.append(OVERSUBSCRIBED)
    warnings += _breakdown_warnings(comparison)
    bound = {r: r.host_bound_share for r in results if r.host_bound_share is not None and facts.backend == "nccl"}
    if bound and max(bound.values()) > MAX_HOST_BOUND:
        worst = max(bound, key=bound.__getitem__)
        warnings.append(
            f"launch-bound: in {percent(bound[worst])} % of the iterations of {worst.case.label} the host issued work "
            "until the end; its time is the host's, not the device's"
        )
    if facts.permute.is_unfused_permutation and facts.device is None:
        warnings.append(NOT_FUSED)
    timed = "the layer" if facts.whole is None else "what was built"
    warnings += [f"{timed} is simpler than {facts.model}'s: {line}" for line in facts.departures]
    warnings += _tail_warnings(comparison, run)
    return warnings


def _tail_warnings(comparison: ComparisonResult, run: Run) -> list[str]:
    """What policies that look past a recorded top-k rest on, and whether it was tried another way."""
    facts, tail = comparison.comparison, comparison.comparison.workload.tail_model
    looking = [result.case.label for result in comparison.policies if result.case.looks_past_top_k]
    if tail is None or not looking:
        return []
    others = {
        other.workload.tail_model
        for other in run.comparisons.values()
        if (other.workload.recording, other.model, other.num_ranks, other.num_tokens)
        == (facts.workload.recording, facts.model, facts.num_ranks, facts.num_tokens)
    } - {tail, None}
    other_words = (
        f"set it beside the same under {', '.join(sorted(map(str, others)))}"
        if others
        else "measured under this one only; workload.tail: both measures two"
    )
    modelled = f"scores past the recorded top-k are modelled ({tail} tail)"
    return [f"{modelled}, and what {', '.join(looking)} did rests on them: {other_words}"]


def _machine_warnings(comparison: ComparisonResult) -> list[str]:
    warnings = []
    for number, launch in enumerate(comparison.conditions):
        where = f" (launch {number + 1})" if len(comparison.conditions) > 1 else ""
        warnings += [f"disturbed machine: {line}{where}" for line in disturbances(launch.machines)]
        if launch.warm_up.change is not None and not launch.warm_up.settled:
            change = f"{100 * launch.warm_up.change:+.1f} %"
            warnings.append(f"warm-up did not settle: its last round took {change} against the one before{where}")
    drifts = [result.drift for result in comparison.results if result.drift is not None]
    if drifts and max(map(abs, drifts)) > MAX_DRIFT:
        warnings.append(
            f"times drifted by {100 * max(drifts, key=abs):+.1f} % between the begin and the end of a launch"
        )
    return warnings


def _breakdown_warnings(comparison: ComparisonResult) -> list[str]:
    results, warnings = comparison.results, []
    if any(result.breakdown and result.breakdown.unaccounted_share > MAX_UNACCOUNTED for result in results):
        warnings.append(f"phases leave more than {percent(MAX_UNACCOUNTED)} % of the time unaccounted for")
    if any(result.probe_overhead is not None and result.probe_overhead > MAX_PROBE_OVERHEAD for result in results):
        if comparison.comparison.backend == "nccl":
            warnings.append(
                f"probes cost more than {percent(MAX_PROBE_OVERHEAD)} %: phase times are too long by about that"
            )
        else:
            warnings.append(
                "probes are not free on CPU ranks (gloo): read phase times as shares; speedups come from "
                "iterations without probes"
            )
    return warnings
