"""Words that tables and figures share, so that both say the same of one run; and what stands below a table.

Notes say what has to be known to read a table, warnings what forbids or weakens a reading. Each is a fact and its
sentence, which stands where the fact is neither None nor zero nor empty.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.analysis.columns import NONE
from moe_ep_bench.analysis.columns import milliseconds as milliseconds
from moe_ep_bench.analysis.fidelity import source_loads
from moe_ep_bench.analysis.load import Comparison, Part, Run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.timing import probe_floor_us
from moe_ep_bench.config import LPLB_SOLVE_US
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.tables import DEEPEP_WORDS, MEASURED_ELSEWHERE
from moe_ep_bench.cost_model.transport import exchange_words
from moe_ep_bench.machine.monitor import disturbances, remarks
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import load_of_others, replicate, stacking_words
from moe_ep_bench.policies.waits import waits_words
from moe_ep_bench.timing.statistics import LEVEL, MIN_BATCHES

MODE_WORDS = {
    "run": "measured",
    "emulated": "emulated (one device for all ranks, the all-to-all is modelled)",
    "route": "routing only (nothing was timed)",
}
MODELLED = "modelled (nothing was run)"
ELSEWHERE = "partly measured elsewhere, the rest modelled (nothing was run)"
MODEL_CAVEAT = "Intervals are of traffic only: what the model leaves out, or has wrong, is in none of them."
OVERSUBSCRIBED = "more ranks than cores: they share time slices, and no straggler speedup is claimed"
OVERLAP = (
    "shared experts run beside the transfers in plain iterations, and before them in breakdowns, which may last longer"
)
NOT_FUSED = "permutation is not fused: phase shares are not to be set beside a paper's"

# How times came about, and where router scores were taken from: the tags of a figure, in the words of ``marks``.
PARTLY_ELSEWHERE = "partly measured elsewhere"
HOW = ("measured", "emulated", PARTLY_ELSEWHERE, "modelled", "routed")
WORKLOADS = ("recorded", "synthetic")


@dataclass(frozen=True)
class Origin:
    """One of ``HOW``, and one of ``WORKLOADS``; None where a figure has no times, or no scores."""

    how: str | None
    workload: str | None


class Footer(list[str]):
    """The lines under a figure, and the origins that they put into words."""

    def __init__(self, lines: Iterable[str], origins: Iterable[Origin]) -> None:
        super().__init__(lines)
        self.origins = tuple(dict.fromkeys(origins))


def tags_of(origins: Iterable[Origin]) -> list[str]:
    """The words that a sheet is tagged with: how, then on which scores, each once."""
    found = {word for one in origins for word in (one.how, one.workload)}
    return [word for word in (*HOW, *WORKLOADS) if word in found]


def origin(run: Run, facts: Comparison) -> str:
    """How a comparison's times came about: one of ``HOW``; routed where there are none."""
    if facts.device is not None:
        return PARTLY_ELSEWHERE if is_elsewhere(facts) else "modelled"
    return {"run": "measured", "emulated": "emulated", "route": "routed"}[run.mode]


def is_elsewhere(facts: Comparison) -> bool:
    """Whether others measured the experts or the links of a device that is not here."""
    return facts.device is not None and any(
        f"{MEASURED_ELSEWHERE} (" in (one or "") for one in (facts.device, facts.links)
    )


def origins_of(run: Run, comparisons: Sequence[Comparison]) -> list[Origin]:
    """How each comparison's numbers came about, and on which scores."""
    return [Origin(origin(run, one), one.workload.kind) for one in comparisons]


def footer_lines(run: Run, comparisons: Sequence[Comparison], warnings: Sequence[str] = ()) -> Footer:
    """The two lines under a figure: how, on what, which model, which workload; then what weakens it."""
    facts = [
        [mode_words(run, comparison) for comparison in comparisons],
        [device_words(run, comparison) for comparison in comparisons],
        [c.links for c in comparisons if c.links is not None],
        [f"{c.model}, {scale_words(c.scale)}, {c.dtype}" for c in comparisons],
        ["random weights" for c in comparisons if c.random_weights],
        [workload_words(comparison) for comparison in comparisons],
    ]
    lines = [" | ".join([*([run.named] if run.named else []), *(_said_once(values) for values in facts if values)])]
    notes = [*([count_words(run)] if not all(case.is_ok for case in run.cases) else []), *warnings]
    lines += [f"Note: {'; '.join(note.removesuffix('.') for note in notes)}."] if notes else []
    return Footer(lines, origins_of(run, comparisons))


def _said_once(values: Sequence[str]) -> str:
    """What comparisons share is said once; of more than two different values the first and the last."""
    different = list(dict.fromkeys(values))
    if len(different) > 2:
        different[1:-1] = [f"{len(different) - 2} more"]
    return " / ".join(different)


def mode_words(run: Run, comparison: Comparison) -> str:
    """How the numbers came about."""
    words = MODE_WORDS[run.mode]
    if comparison.device is not None:
        words = ELSEWHERE if is_elsewhere(comparison) else MODELLED
    if comparison.device is None and comparison.backend == "gloo" and _links_name(comparison) in Links.names():
        words += f", MIXED MACHINES: experts of this CPU ({scale_words(comparison.scale)}) behind links of GPUs"
    return f"whole models, {words}" if run.scope == "model" else words


def modelled_line(run: Run) -> str:
    """The first line of an answer whose links are modelled: what is sent and how; empty where nothing is modelled."""
    facts = [one for one in run.comparisons.values() if one.links is not None]
    sent = dict.fromkeys(
        exchange_words(one.dtype, one.transport, one.dispatch_dtype, by_deepep=DEEPEP_WORDS in (one.links or ""))
        for one in facts
    )
    what = "Modelled" if any(one.device is not None for one in facts) else "Modelled links"
    if any(map(is_elsewhere, facts)):
        what = f"{what}, {PARTLY_ELSEWHERE}"
    return f"{what}: {' / '.join(sent)}." if sent else ""


def hardware_words(run: Run, comparison: Comparison) -> str:
    """The devices, how many ranks used them, and what carried the collectives."""
    return ", ".join([device_words(run, comparison), *([comparison.links] if comparison.links else [])])


def device_words(run: Run, comparison: Comparison) -> str:
    """The same without modelled links."""
    if comparison.device is not None:
        return f"{comparison.world_size} ranks {comparison.device}"
    if comparison.links is not None:
        return f"{run.device_name} in place of {comparison.world_size} ranks"
    ranks = f"{comparison.world_size} rank{'' if comparison.world_size == 1 else 's'}"
    words = f"{run.device_name} x {ranks}, {comparison.backend}"
    if comparison.backend != "nccl":
        return words
    return words + (f" {run.nccl}" if run.nccl else "") + (f", driver {run.driver}" if run.driver else "")


def rest_words(facts: Comparison) -> str:
    """What passes, steps and tokens per second of a modelled layer are made of."""
    rest = facts.rest
    assert rest is not None
    what, cached = ("step", f" after {rest.context_length:,} tokens") if rest.context_length else ("pass", "")
    attention = rest.attention.removeprefix("modelled").strip() or "as a roofline"
    return (
        f"{what} ms, tokens/s/GPU: as if each of {rest.num_moe_layers} MoE layers took what this one does, beside "
        f"{rest.us_per_moe_layer:,.0f} us for the rest of the model (modelled: attention{cached} {attention}, dense "
        "layers, norms, output)"
    )


def model_name(described: str | None) -> str | None:
    """The file of a modelled device, or of links with a factor on their bandwidth; None where there is none."""
    return None if described is None else re.sub("^modelled by (devices|links)/", "", described.partition(": ")[0])


def _links_name(comparison: Comparison) -> str:
    """The file of modelled links, without a factor on their bandwidth; empty where there are none."""
    return (model_name(comparison.links) or "").partition(",")[0]


def scale_words(scale: float) -> str:
    """Whether the model has its true sizes."""
    return "true sizes" if scale == 1 else f"sizes x {scale:g} of the true ones"


def part_words(part: Part) -> str:
    """What ran, what was asked for where that was left open, and why."""
    why = f": {part.why}" if part.why else ""
    return part.ran if part.ran == part.requested else f"{part.ran} (asked for {part.requested}{why})"


def workload_words(comparison: Comparison) -> str:
    """Where tokens and scores come from; a model of the tail is named, for it shapes what is measured."""
    workload = comparison.workload
    tail = f", tail model: {workload.tail_model}" if workload.kind == "recorded" and workload.tail_model else ""
    return f"{workload.kind} workload: {workload.description.removeprefix(f'{workload.kind} ')}{tail}"


def count_words(run: Run) -> str:
    """How many cases were measured, and what became of the others."""
    counts = Counter(case.status for case in run.cases)
    lost = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()) if status != "ok")
    num_lost = len(run.cases) - counts["ok"]
    return f"{len(run.cases)} cases: {counts['ok']} measured, {num_lost} not" + (f" ({lost})" if lost else "")


def phase_origin(run: Run, comparison: Comparison, group: str) -> str:
    """How a group of phases came about: measured, measured elsewhere or modelled.

    Of a device that is not here all is modelled but what a table holds; of emulated ranks what moves between them.
    """
    words = comparison.links if group == "comm" else comparison.device if group == "experts" else None
    if words is not None and f"{MEASURED_ELSEWHERE} (" in words:
        return MEASURED_ELSEWHERE
    modelled = comparison.device is not None or (run.mode == "emulated" and group == "comm")
    return "modelled" if modelled else "measured"


def interval_words(is_interval: Sequence[bool], mark: str = "Whiskers") -> str:
    """What the lines about a speedup are: an interval, or the ends of the samples where batches are too few for one."""
    if all(is_interval):
        return f"{mark}: 95 % interval."
    few = f"fewer than {MIN_BATCHES} batches"
    if not any(is_interval):
        return f"{mark}: smallest and largest pair ({few} give no interval)."
    return f"{mark}: 95 % interval, or smallest and largest pair where there are {few}."


def percent(share: float) -> str:
    """A share as a percentage with one decimal, without the sign; a dash where there is none."""
    return NONE if math.isnan(share) else f"{100 * share:.1f}"


# ---- below a table ---------------------------------------------------------------------------------------------------

# Aims of the timing protocol: above these a breakdown is told apart from what it breaks down.
MAX_UNACCOUNTED = 0.01
MAX_PROBE_OVERHEAD = 0.01
# A share of launch-bound iterations below this is chance.
MAX_HOST_BOUND = 0.1
# Pairs cancel a drift that is slow against them; beyond this it is worth a warning.
MAX_DRIFT = 0.1

# What each number of a table of padded batches is about.
READING = "loads, activated experts and traffic count padding that is computed; drops and mass kept are of valid tokens"

# Of the columns that hold a policy against the frontier of dropping.
FRONTIER = (
    "below frontier: mass that dropping alone could keep beyond this, at the same fullest rank (of experts: with as "
    "many activated experts); a policy that reroutes may keep more, below 0"
)

_NOTES = {
    "rest": "{}",
    "workload": "{}",
    "parts": "{}",
    "is_modelled": MODEL_CAVEAT,
    "allgather": "dispatcher: allgather; crossing bytes are those that an all-to-all would send",
    "pieces": "a rank's tokens are routed at once and go through the rest of the layer in {} pieces",
    "graph": "replayed from CUDA graphs, which hold {}",
    "overlap": OVERLAP,
    "load": "load under native: fullest expert {0.fullest_expert:.2f} x mean, fullest rank {0.fullest_rank:.2f} x mean "
    "of what valid tokens select",
    "padding": "padding: native spends {:.1f} % of its pairs on padding",
    "has_padding": READING,
    "spread": "speedup: slowest rank's layer time, native over case, median of pairs {}",
    "floor": "noise floor: {0.low:.3f} to {0.high:.3f}, by which native run twice differs from itself",
    "detectable": "smallest speedup that would be called (power 80 %): {}",
    "chance": "{}",
    "ceiling": "ceiling: native on perfectly balanced scores; what balance alone could buy, no policy",
    "warm_up": "warm-up: {} rounds over all batches and cases, by launch",
    "drift": "native over the run: drift {:+.1f} % (pairs cancel it), {:.1f} % of its iterations far out, the worst "
    "{:.2f} x its batch's median",
    "choosing": "choosing experts, share of the slowest rank's time: at worst {}",
    "position": "megatron_drop by position: a layer keeps any tokens of a full expert (Megatron-Core's ties are open), "
    "route the earliest, so that their mass kept may differ",
    "waits": "the host waits for the device, in each run and beyond native: {}",
    "unaccounted": "unaccounted time: at worst {}",
    "probes": "probe overhead: at worst {}",
    "probe_floor": "probe floor: {:.1f} us, what a waiting probe costs when nobody waits; waits are less that",
    "frontier": FRONTIER,
    "error": "output error: relative to native, with random weights; it is no measure of a model's accuracy",
    "on_device": "peak memory: {:.2f} GiB on the fullest rank (on the device)",
    "of_process": "peak memory: {:.2f} GiB on the fullest rank (of the process, imports and all)",
}
_WARNINGS = {
    "unfit": "{}",
    "no_baseline": "the baseline was not measured, so there are no speedups",
    "no_floor": "native was not measured a second time, so there is no noise floor and no verdict",
    "differs": "native differs from itself: something drifts with the order of cases; the floor covers it",
    "drift": "times drifted by {:+.1f} % between the begin and the end of a launch",
    "oversubscribed": OVERSUBSCRIBED,
    "unaccounted": f"phases leave more than {percent(MAX_UNACCOUNTED)} % of the time unaccounted for",
    "probes": f"probes cost more than {percent(MAX_PROBE_OVERHEAD)} %: phase times are too long by about that",
    "cpu_probes": "probes are not free on CPU ranks (gloo): read phase times as shares; speedups come from iterations "
    "without probes",
    "launch_bound": "launch-bound: in {} of the iterations the host issued work until the end; its time is the host's, "
    "not the device's",
    "allocating": "memory was asked of the driver in {} timed iterations of one rank ({}), which stops the device: "
    "fewer tokens or cases, or more measure.max_warmup",
    "not_fused": NOT_FUSED,
}


def _said(sentences: Mapping[str, str], facts: Mapping[str, Any]) -> list[str]:
    return [
        sentence.format(*facts[key] if isinstance(facts[key], tuple) else [facts[key]])
        for key, sentence in sentences.items()
        if facts.get(key)
    ]


def notes_of(comparison: ComparisonResult) -> list[str]:
    facts, results = comparison.comparison, comparison.results
    baseline = comparison.of_role("baseline")
    far = baseline.outliers if baseline else None
    effects = {r.case.label: r.detectable for r in comparison.policies if r.detectable is not None}
    ends = [pick(effects, key=effects.__getitem__) for pick in (min, max)] if effects else []
    peaks = [rank.peak_memory_bytes or 0 for launch in comparison.conditions for rank in launch.ranks]
    peak_gib = max(peaks, default=0) / 2**30
    routing = None if baseline is None else baseline.case.routing
    padding = (
        facts.workload.padding and routing is not None and routing["padding_pairs"].sum() / routing["num_pairs"].sum()
    )
    parts = f"experts: {part_words(facts.experts)}; permutation: {part_words(facts.permute)}"
    known: dict[str, Any] = {
        "rest": facts.rest and rest_words(facts),
        "workload": workload_words(facts),
        "parts": parts,
        "is_modelled": facts.device is not None,
        "load": baseline and baseline.fidelity,
        "padding": padding and 100 * padding,
        "has_padding": facts.workload.padding,
        "spread": spread_words(comparison),
        "detectable": " to ".join(f"{effects[label]:.3f} ({label})" for label in ends),
        "chance": "; ".join(chance_words(num_verdicts(comparison))),
        "ceiling": comparison.of_role("ceiling"),
        "probes": _worst({r: r.probe_overhead for r in results}),
        "frontier": any(r.case.frontier is not None for r in comparison.policies),
        "error": facts.random_weights and any(r.fidelity and not math.isnan(r.fidelity.output_error) for r in results),
        "on_device": facts.backend == "nccl" and peak_gib,
        "of_process": facts.backend != "nccl" and peak_gib,
    }
    if facts.device is None:
        known |= {
            "parts": parts + (f"; routing: {part_words(facts.kernel)}" if facts.kernel else ""),
            "allgather": facts.dispatcher == "allgather",
            "graph": facts.cuda_graph,
            "overlap": facts.shared_expert_overlap,
            "pieces": facts.num_pieces > 1 and facts.num_pieces,
            "floor": comparison.floor,
            "warm_up": ", ".join(str(launch.warm_up.rounds) for launch in comparison.conditions),
            "drift": far and (100 * baseline.drift, 100 * far.share, far.worst),
            "choosing": _worst({r: r.breakdown and r.breakdown.policy_share for r in comparison.policies}),
            "position": any(r.case.policy_params.get("drop_policy") == "position" for r in comparison.policies),
            "waits": _waits(comparison),
            "unaccounted": _worst({r: r.breakdown and r.breakdown.unaccounted_share for r in results}),
            "probe_floor": facts.whole is None and probe_floor_us(facts, comparison.conditions),
        }
    load_BE = None if routing is None else source_loads(routing, "load_E")[1].sum(axis=1)
    memory = []
    for one in comparison.replications:
        note = "" if load_BE is None else stacked_note(load_BE, one.case.policy_params, facts)
        words = f"{extra_memory_words(one)}{solving_words(one)}"
        memory.append(f"{one.case.label}: {'; '.join(filter(None, (words, note)))}")
    machines = dict.fromkeys(line for launch in comparison.conditions for line in remarks(launch.machines))
    return [*_said(_NOTES, known), *memory, *machines]


def _waits(comparison: ComparisonResult) -> str:
    """Where each case reads results in the middle of its run; of the last launch."""
    found = comparison.conditions[-1].waits if comparison.conditions else {}
    labels = {result.case.case_id: result.case.label for result in comparison.results}
    return "; ".join(f"{labels[case]}: {waits_words(of)}" for case, of in found.items() if case in labels)


def _worst(shares: Mapping[CaseResult, float | None]) -> str:
    """The largest share and whose it is; empty where there is none."""
    share, label = max(((one, r.case.label) for r, one in shares.items() if one is not None), default=(None, ""))
    return "" if share is None else f"{percent(share)} % ({label})"


def spread_words(comparison: ComparisonResult) -> str:
    """What stands beside a speedup: its interval, or the ends of its samples."""
    if comparison.comparison.num_batches < MIN_BATCHES:
        return f"(min..max: fewer than {MIN_BATCHES} batches give no interval, and so no verdict)"
    num_launches, draws = len(comparison.conditions), comparison.comparison.draws
    launches = f", and Student's t over {num_launches} launches" if num_launches > 1 else ", of this launch only"
    if draws > 1:
        launches = f", and Student's t over {draws} draws of the traffic"
    return f"[95 % interval, bootstrapped over batches, then iterations{launches}]"


def num_verdicts(comparison: ComparisonResult) -> int:
    """How many cases of a comparison are held against its noise floor."""
    judged = [r for r in comparison.results if r.case.role not in ("baseline", "noise")]
    return sum(r.speedup is not None and r.speedup.is_interval for r in judged) if comparison.floor else 0


def chance_words(number: int) -> list[str]:
    """How many of many verdicts chance alone would give; nothing of a single one."""
    alpha = 1 - LEVEL
    if number < 2:
        return []
    return [
        f"of {number} verdicts up to {number * alpha:.1f} would be called by chance alone, if nothing differed: "
        f"{number} x {100 * alpha:.0f} %"
    ]


def extra_memory_words(result: CaseResult) -> str:
    """What replicas of experts cost, in all layers of the model together."""
    if result.case.extra_bytes_per_rank is None:
        return "more memory per rank, by how much was not recorded"
    return f"{result.case.extra_bytes_per_rank / 2**30:.3g} GiB more memory per rank, in all layers together"


def stacked_note(load_BE: NDArray[Any], policy_params: Mapping[str, Any], facts: Any) -> str:
    """On how many ranks of batches EPLB put two replicas of one expert; empty where on none.

    It is planned again from native's loads. Groups of experts are those of the model's preset; of other models nothing
    is known of groups, which plans over several nodes read, and nothing is said.

    Args:
        load_BE: native's, or of several layers [L, B, E].
        facts: with ``model``, ``num_experts`` and ``num_ranks``.
    """
    num_nodes, preset = policy_params.get("num_nodes", 1), facts.model in ModelSpec.names()
    if (num_nodes > 1 and not preset) or "spare_per_rank" not in policy_params:
        return ""
    planned = {
        "num_slots": facts.num_experts + policy_params["spare_per_rank"] * facts.num_ranks,
        "num_ranks": facts.num_ranks,
        "num_nodes": num_nodes,
        "num_groups": (ModelSpec.named(facts.model).num_groups or 1) if preset else 1,
        "policy": policy_params.get("policy", "auto"),
    }
    layers = load_BE.reshape(-1, *load_BE.shape[-2:])
    stacked = np.concatenate([replicate(load_of_others(of_one), **planned).stacked for of_one in layers])
    return stacking_words(stacked, "ranks of batches") if stacked.any() else ""


def solving_words(result: CaseResult) -> str:
    """What balancing by a linear program takes in every batch; empty where nothing is solved."""
    params = result.case.policy_params
    if params.get("balancer") != "lp":
        return ""
    assumed_us = LPLB_SOLVE_US if params.get("solve_us") is None else params["solve_us"]
    return f"; solving counts in every batch, as {assumed_us:g} us, assumed, in the phase policy"


def warnings_of(comparison: ComparisonResult, run: Run) -> list[str]:
    facts, results, again = comparison.comparison, comparison.results, comparison.of_role("noise")
    native = again.speedup if again else None
    drift = max((result.drift for result in results if result.drift is not None), key=abs, default=0.0)
    is_gpu = facts.backend == "nccl"
    probes = any((result.probe_overhead or 0) > MAX_PROBE_OVERHEAD for result in results)
    bound = {r: r.host_bound_share for r in results if is_gpu and (r.host_bound_share or 0) > MAX_HOST_BOUND}
    known = {
        "unfit": facts.fit and facts.fit.words,
        "no_baseline": comparison.of_role("baseline") is None,
        "no_floor": comparison.of_role("baseline") and comparison.floor is None,
        "differs": native and native.is_interval and (native.low > 1 or native.high < 1),
        "drift": abs(drift) > MAX_DRIFT and 100 * drift,
        "oversubscribed": facts.oversubscribed,
        "unaccounted": any(r.breakdown and r.breakdown.unaccounted_share > MAX_UNACCOUNTED for r in results),
        "probes": probes and is_gpu,
        "cpu_probes": probes and not is_gpu,
        "launch_bound": _worst(bound),
        "allocating": _most_allocating(comparison),
        "not_fused": facts.permute.is_unfused_permutation and facts.device is None,
    }
    timed = "the layer" if facts.whole is None else "what was built"
    simpler = [f"{timed} is simpler than {facts.model}'s: {line}" for line in facts.departures]
    return [*_said(_WARNINGS, known), *_machine_warnings(comparison), *simpler, *_tail_warnings(comparison, run)]


def _most_allocating(comparison: ComparisonResult) -> tuple[int, str] | None:
    """Most timed iterations of a case that asked the driver for memory on one rank, and the case; None = none did."""
    labels = {result.case.case_id: result.case.label for result in comparison.results}
    found = [
        (count, labels[case])
        for launch in comparison.conditions
        for rank in launch.ranks
        for case, count in rank.allocating_iterations.items()
        if case in labels
    ]
    return max(found, default=None)


def _machine_warnings(comparison: ComparisonResult) -> list[str]:
    warnings = []
    for number, launch in enumerate(comparison.conditions):
        where = f" (launch {number + 1})" if len(comparison.conditions) > 1 else ""
        warnings += [f"disturbed machine: {line}{where}" for line in disturbances(launch.machines)]
        if launch.warm_up.change is not None and not launch.warm_up.settled:
            change = f"{100 * launch.warm_up.change:+.1f} %"
            warnings.append(f"warm-up did not settle: its last round took {change} against the one before{where}")
    return warnings


def _tail_warnings(comparison: ComparisonResult, run: Run) -> list[str]:
    """What policies that look past a recorded top-k rest on, and whether it was tried another way."""
    workload = comparison.comparison.workload
    looking = ", ".join(result.case.label for result in comparison.policies if result.case.looks_past_top_k)
    if workload.tail_model is None or not looking:
        return []
    alike = [one.workload for one in run.comparisons.values() if one.workload.recording == workload.recording]
    others = ", ".join(sorted({one.tail_model for one in alike if one.tail_model} - {workload.tail_model}))
    tried = f"set it beside the same under {others}" if others else "measured under this one only (workload.tail: both)"
    modelled = f"scores past the recorded top-k are modelled ({workload.tail_model} tail)"
    return [f"{modelled}, and what {looking} did rests on them: {tried}"]
