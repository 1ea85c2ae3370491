"""What has to be known to read a comparison's numbers: a table of sentences over the comparison's facts.

``_facts`` gives a comparison's facts by name. A row of ``NOTES`` names the facts that its sentence needs and stands
where all of these hold: neither missing nor zero nor empty. Of a fact that is a list a line stands for each entry.
Warnings are the rows that forbid or weaken a reading; they come last and begin with ``warning:``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from string import Formatter
from typing import Any, NamedTuple

import pandas as pd

from moe_ep_bench.analysis.cases import COMPARISON, cases, routing
from moe_ep_bench.analysis.origins import component_words, is_same_model
from moe_ep_bench.analysis.reduce import probe_floor_us
from moe_ep_bench.analysis.store import Comparison, Store
from moe_ep_bench.facts import Conditions, RoutedFacts, TimedFacts, tokens_words
from moe_ep_bench.machine.monitor import disturbances, remarks
from moe_ep_bench.timing.statistics import LEVEL, MIN_BATCHES

# Aims of the timing protocol: above these a breakdown is told apart from what it breaks down.
MAX_UNACCOUNTED = 0.01
MAX_PROBE_OVERHEAD = 0.01
# A share of launch-bound iterations below this is chance.
MAX_HOST_BOUND = 0.1
# Pairs cancel a drift that is slow against them; beyond this it is worth a warning.
MAX_DRIFT = 0.1
# A step of decoding leaves this share of the fullest rank's experts idle in some case.
_LEAST_IDLE = 0.05
_ROUNDING = 1e-6  # shares are sums of float32
WARNING = "warning: "

MODEL_CAVEAT = "ranges in brackets come from traffic alone: errors of the model of devices and links are not in them"
OVERSUBSCRIBED = "more ranks than cores: they share time slices, and no straggler speedup is claimed"
NOT_FUSED = "permutation is not fused: phase shares are not to be set beside a paper's"
READING = "loads, activated experts and traffic count padding that is computed; drops and mass kept are of valid tokens"


class Note(NamedTuple):
    """A sentence of the facts in braces.

    Attributes:
        of: the comparisons that it is of: layer, model, route.
        rank: where there is room for three notes, those of the least rank stand; 0 = in ``show`` only.
        when: facts that must hold beside those of the sentence.
    """

    of: str
    sentence: str
    rank: int = 0
    when: str = ""


_TIMED, _ALL = "layer model", "layer model route"
NOTES = (
    Note(_ALL, "{workload}", 6),
    Note(
        "model",
        "a pass is {pass_is}; {num_moe_layers} MoE layers, fullest expert {least_peak:.2f} to {most_peak:.2f} x mean",
    ),
    Note(
        "model",
        "in {num_shared} MoE layers neighbours share more experts than asked: independent tokens do under this skew",
    ),
    Note("model", "attention: {attention}, data-parallel"),
    Note(_TIMED, "{components}"),
    Note(
        "layer",
        "{rest_of} ms, tokens/s/GPU: as if each of {rest_layers} MoE layers took what this one does, beside "
        "{rest_us:,.0f} us a layer for the rest of the model (modelled: {rest_attention}, dense layers, norms, output)",
    ),
    Note(_TIMED, MODEL_CAVEAT, 3, when="modelled"),
    Note(
        "layer", "dispatcher: allgather; crossing bytes are those that an all-to-all would send", when="allgather ran"
    ),
    Note(
        "layer",
        "megatron_drop by position: a layer keeps any tokens of a full expert (Megatron-Core's ties are open), route "
        "the earliest, so that their mass kept may differ",
        when="by_position ran",
    ),
    Note(
        "layer", "probe floor: {probe_floor:.1f} us, what a waiting probe costs when nobody waits; waits are less that"
    ),
    Note(_TIMED, "replayed from CUDA graphs, which hold {graphs}"),
    Note("layer", "under native: fullest expert {native_expert:.2f} x mean, fullest rank {native_rank:.2f} x mean"),
    Note(_ALL, f"{READING}; native spends {{padding_percent:.1f}} % of its pairs on it"),
    Note("layer", "speedup: slowest rank's layer time, native over case, median of pairs {spread}", 4),
    Note("model", "end to end: slowest rank's pass, native over case, median of pairs {spread}", 4),
    Note(
        _TIMED,
        "noise floor: {floor_low:.3f} to {floor_high:.3f}, by which native run twice differs from itself",
        5,
        "ran",
    ),
    Note(
        "layer", "smallest speedup that would be called (power 80 %): {least_detectable:.3f} to {most_detectable:.3f}"
    ),
    Note(_TIMED, "{chance}"),
    Note(
        "layer",
        "ceiling: native on perfectly balanced scores; what balance alone could buy, no policy",
        when="has_ceiling",
    ),
    Note(
        "model",
        "MoE share f, MoE speedup s: of breakdown iterations; by Amdahl: 1 / (1 - f + f / s) with native's f; no "
        "policy exceeds 1 / (1 - f) = {most_by_amdahl:.3f}",
    ),
    Note(
        "model",
        "extrapolated: {num_layers} of {of_layers} layers were built and timed; each further layer is taken to be like "
        "the mean MoE layer that was",
        when="is_cut",
    ),
    Note(
        "layer route",
        "below frontier: mass that dropping alone could keep beyond this, at the same fullest rank (of experts: with "
        "as many activated experts); a policy that reroutes may keep more, below 0",
        when="has_frontier",
    ),
    Note(
        _TIMED,
        "output error: relative to native, with random weights; it is no measure of a model's accuracy",
        when="has_output_error",
    ),
    Note(
        "layer route",
        "activated: experts with a token, of {num_experts}, and on the rank with most of them; mean over batches",
        when="has_idle_experts",
    ),
    Note(
        "route",
        "fullest: pairs over native's mean expert's or rank's; imbalance: over the mean of the pairs that are "
        "computed; of each batch, then means over batches and layers",
    ),
    Note(_ALL, "dropped: of the model's own pairs, also where a policy computes others in their place", 5, "looking"),
    Note(
        "route",
        "scores were not recorded and are assumed equal over the top-k: loads are the recording's, but mass, and what "
        "policies choose by scores (oea, xshare, drops by score), say nothing of the model",
        when="has_assumed_scores",
    ),
    Note(
        "route",
        "replicas: planned for the loads of the other batches; what solving takes is not shown here, emulate counts it",
        when="has_replicas",
    ),
    Note("route", "assumed: {image_share:.0%} of every sequence's tokens are an image's"),
    Note(_TIMED, "more memory: of replicas in all layers together, of moved weights in one", when="takes_memory"),
    Note(_TIMED, "solving counts in every batch, as {solving} us, assumed, in the phase policy"),
    Note(_ALL, "mass kept above 100 %: the policy adds experts to the top-k", when="adds_experts"),
    Note(_TIMED, "{remarks}"),
)
WARNINGS = (
    Note(_TIMED, "{fit}", 1),
    Note(_TIMED, "the baseline was not measured, so there are no speedups", 1, "lacks_native"),
    Note(
        _TIMED,
        "native was not measured a second time, so there is no noise floor and no verdict",
        1,
        "lacks_floor",
    ),
    Note(
        _TIMED,
        "native differs from itself: something drifts with the order of cases; the floor covers it",
        2,
        "native_differs",
    ),
    Note(_TIMED, "times drifted by {drift_percent:+.1f} % between the begin and the end of a launch", 2),
    Note(_TIMED, OVERSUBSCRIBED, 1, "oversubscribed"),
    Note(_TIMED, f"phases leave more than {100 * MAX_UNACCOUNTED:g} % of the time unaccounted for", when="unaccounted"),
    Note(
        _TIMED,
        f"probes cost more than {100 * MAX_PROBE_OVERHEAD:g} %: phase times are too long by about that",
        when="probes on_gpu",
    ),
    Note(
        _TIMED,
        "probes are not free on CPU ranks (gloo): read phase times as shares; speedups come from iterations without "
        "probes",
        when="probes on_cpu",
    ),
    Note(
        _TIMED,
        "launch-bound: in {host_bound_percent:.1f} % of the iterations of {host_bound} the host issued work until the "
        "end; its time is the host's, not the device's",
        2,
        "on_gpu",
    ),
    Note(
        _TIMED,
        "memory was asked of the driver in {num_allocating} timed iterations of one rank ({allocating}), which stops "
        "the device: fewer tokens or cases, or more measure.warmup",
        2,
    ),
    Note(_TIMED, NOT_FUSED, when="unfused"),
    Note(_TIMED, "disturbed machine: {disturbed}", 2),
    Note(_TIMED, "warm-up did not settle: its last round took {unsettled} against the one before", 2),
    Note(_TIMED, "simpler than {model}'s: {departures}"),
    Note(_ALL, "data: {data}, not {model}'s", 2),
    Note(
        _ALL,
        "scores past the recorded top-k are modelled ({tail} tail), and what {looking} did rests on them: {tried}",
        2,
    ),
)


def notes(store: Store, directory: str, comparison_id: str) -> list[str]:
    """What has to be known to read a comparison's numbers, a sentence each; warnings, last, begin with ``warning:``."""
    return [line for _, line in _said(store, directory, comparison_id)]


def most_important(store: Store, number: int = 3) -> list[str]:
    """The notes of all comparisons that weigh most, each once."""
    ranks: dict[str, int] = {}
    for comparison in store.comparisons:
        for rank, line in _said(store, comparison.directory, comparison.comparison_id):
            if rank:
                ranks.setdefault(line, rank)
    return sorted(ranks, key=lambda line: ranks[line])[:number]


@lru_cache(maxsize=256)
def _said(store: Store, directory: str, comparison_id: str) -> list[tuple[int, str]]:
    """Every note with its rank."""
    frame = cases(store)
    rows = frame[frame[COMPARISON].eq([directory, comparison_id]).all(axis=1)]
    facts = _facts(store, store.by_id[directory, comparison_id], rows)
    return [
        (note.rank, prefix + line)
        for prefix, table in (("", NOTES), (WARNING, WARNINGS))
        for note in table
        if facts["kind"] in note.of.split()
        for line in _lines(note, facts)
    ]


def _lines(note: Note, facts: dict[str, Any]) -> Iterator[str]:
    """The note's lines; none where a fact does not hold."""
    names = [name for _, name, _, _ in Formatter().parse(note.sentence) if name]
    values = {name: facts.get(name) for name in (*names, *note.when.split())}
    if not all(value == value and value for value in values.values()):  # NaN is unequal to itself
        return
    listed = next((name for name in names if isinstance(values[name], list)), None)
    for entry in [None] if listed is None else values[listed]:
        yield note.sentence.format(**values if listed is None else values | {listed: entry})


# ---- facts -----------------------------------------------------------------------------------------------------------


def _facts(store: Store, comparison: Comparison, rows: pd.DataFrame) -> dict[str, Any]:
    """The facts that ``NOTES`` and ``WARNINGS`` name."""
    facts, of_role = comparison.facts, dict(list(rows[rows["status"] == "ok"].groupby("role")))
    policies = of_role.get("policy", rows.iloc[:0])
    known = {
        "kind": "route" if isinstance(facts, RoutedFacts) else "layer" if facts.whole is None else "model",
        "workload": rows["workload_words"].iloc[0],
        "model": facts.model,
        "num_experts": facts.num_experts,
        "has_idle_experts": isinstance(facts, RoutedFacts) or leaves_idle(rows),
        "has_frontier": policies["below_frontier"].notna().any(),
        "has_replicas": "replication" in of_role,
        "adds_experts": rows["retained_mass"].astype(float).max() > 1 + _ROUNDING,
        "looking": ", ".join(policies.loc[policies["looks_past_top_k"].astype(bool), "label"]),
        "data": _foreign_data(facts.model, rows),
        **_tail(store, comparison),
    }
    if "baseline" in of_role:
        frame = routing(store)
        batches = frame[frame["case_id"].eq(of_role["baseline"]["case_id"].iloc[0])]
        peaks = batches.groupby("layer", dropna=False)["expert_imbalance"].mean()
        known |= {"least_peak": peaks.min(), "most_peak": peaks.max()}
        if facts.workload.padding:
            known["padding_percent"] = 100 * batches["padding_pairs"].sum() / batches["num_pairs"].sum()
    if isinstance(facts, RoutedFacts):
        has_assumed = "scores assumed" in facts.workload.description
        return known | {"has_assumed_scores": has_assumed, "image_share": facts.image_share}
    launches = [comparison.conditions[launch] for launch in sorted(comparison.conditions)]
    return known | _of_layer(facts, launches) | _of_times(facts, rows, of_role) | _of_launches(rows, launches)


def _foreign_data(model: str, rows: pd.DataFrame) -> list[str]:
    """Policies that decide by data of another model than the comparison's, and whose these are."""
    used = rows[["policy", "data_model"]].dropna().drop_duplicates().itertuples(index=False)
    return [f"{policy} decides by {of}'s" for policy, of in used if not is_same_model(of, model)]


def _tail(store: Store, comparison: Comparison) -> dict[str, Any]:
    """The tail model of recorded scores, and whether it was tried another way."""
    workload = comparison.facts.workload
    alike = [one.facts.workload for one in store.comparisons if one.facts.workload.recording == workload.recording]
    others = ", ".join(sorted({one.tail_model for one in alike if one.tail_model} - {workload.tail_model}))
    tried = f"set it beside the same under {others}" if others else "measured under this one only (workload.tail: both)"
    return {"tail": workload.tail_model, "tried": tried}


def _of_layer(facts: TimedFacts, launches: Sequence[Conditions]) -> dict[str, Any]:
    """What was timed, or modelled."""
    ran = facts.device is None
    parts = {"experts": facts.experts, "permutation": facts.permute, "routing": facts.kernel if ran else None}
    known: dict[str, Any] = {
        "ran": ran,
        "modelled": not ran,
        "components": "; ".join(f"{name}: {component_words(part)}" for name, part in parts.items() if part),
        "allgather": facts.dispatcher == "allgather",
        "probe_floor": probe_floor_us(facts, launches),
        "graphs": facts.cuda_graph,
        "fit": facts.fit and facts.fit.words,
        "oversubscribed": facts.oversubscribed,
        "unfused": ran and facts.permute.ran not in ("fused", "none"),
        "departures": facts.departures,
        "on_gpu": facts.backend == "nccl",
        "on_cpu": facts.backend != "nccl",
        "spread": spread_words(facts.num_batches, len(launches), facts.draws),
    }
    if (rest := facts.rest) is not None:
        cached = f" after {rest.context_length:,} tokens" if rest.context_length else ""
        attention = rest.attention.removeprefix("modelled").strip() or "as a roofline"
        known |= {"rest_of": "step" if cached else "pass", "rest_layers": rest.num_moe_layers}
        known |= {"rest_us": rest.us_per_moe_layer, "rest_attention": f"attention{cached} {attention}"}
    if (whole := facts.whole) is not None:
        cached = f"one decode step; {tokens_words(whole.context_length)} of each request are in the cache"
        known |= {
            "pass_is": cached if whole.context_length else "the prefill of all prompts, to the last token's logits",
            "attention": whole.attention,
            "num_moe_layers": len(whole.moe_layers),
            "num_layers": whole.num_layers,
            "of_layers": whole.of_layers,
            "is_cut": whole.num_layers < whole.of_layers,
            "num_shared": whole.num_shared_by_chance,
        }
    return known


def _of_times(facts: TimedFacts, rows: pd.DataFrame, of_role: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """What the rows of ``cases`` say."""
    most = rows.select_dtypes("number").astype(float).max()
    native, noise, policies, replicas = (
        of_role.get(role, rows.iloc[:0]) for role in ("baseline", "noise", "policy", "replication")
    )
    judged = rows[~rows["role"].isin(["baseline", "noise"]) & rows["floor_low"].notna()]
    differs = (noise["speedup_low"] > 1) | (noise["speedup_high"] < 1)
    known: dict[str, Any] = {
        "lacks_native": native.empty,
        "lacks_floor": len(native) and rows["floor_low"].isna().all(),
        "native_differs": (differs & noise["speedup_is_interval"].eq(True)).any(),
        "by_position": rows["policy_params"].str.contains('"drop_policy": "position"').any(),
        "has_ceiling": rows["role"].eq("ceiling").any(),
        "has_output_error": facts.random_weights and rows["output_error"].notna().any(),
        "least_detectable": policies["detectable"].astype(float).min(),
        "most_detectable": policies["detectable"].astype(float).max(),
        "chance": chance_words(int(judged["speedup_is_interval"].eq(True).sum())),
        "unaccounted": most.get("breakdown_unaccounted_share", 0) > MAX_UNACCOUNTED,
        "probes": most.get("probe_overhead", 0) > MAX_PROBE_OVERHEAD,
        **{name: most.get(name) for name in ("most_by_amdahl", "floor_low", "floor_high")},
        "takes_memory": replicas["extra_gib_per_rank"].gt(0).any(),
        "solving": solving_words(replicas["policy_params"]),
    }
    if len(native):
        known |= {"native_expert": native["fullest_expert"].iloc[0], "native_rank": native["fullest_rank"].iloc[0]}
    if "drift" in rows and abs(drift := rows["drift"].astype(float)).max() > MAX_DRIFT:
        known["drift_percent"] = 100 * drift[drift.abs().idxmax()]
    if "host_bound_share" in rows and most["host_bound_share"] > MAX_HOST_BOUND:
        worst = rows.loc[rows["host_bound_share"].astype(float).idxmax()]
        known |= {"host_bound_percent": 100 * worst["host_bound_share"], "host_bound": worst["label"]}
    return known


def _of_launches(rows: pd.DataFrame, launches: Sequence[Conditions]) -> dict[str, Any]:
    """What was recorded of each launch while it was timed."""
    labels = dict(zip(rows["case_id"], rows["label"], strict=True))
    allocating = [
        (count, labels[case])
        for launch in launches
        for rank in launch.ranks
        for case, count in rank.allocating_iterations.items()
        if case in labels
    ]
    number, label = max(allocating, default=(0, ""))
    unsettled = [launch.warm_up.change for launch in launches if not launch.warm_up.settled]
    return {
        "num_allocating": number,
        "allocating": label,
        "remarks": list(dict.fromkeys(line for launch in launches for line in remarks(launch.machines))),
        "disturbed": list(dict.fromkeys(line for launch in launches for line in disturbances(launch.machines))),
        "unsettled": [f"{100 * change:+.1f} %" for change in unsettled if change is not None],
    }


def leaves_idle(rows: pd.DataFrame) -> bool:
    """Whether activated experts say anything: some native or policy leaves experts of the fullest rank idle."""
    rows = rows[rows["role"].isin(["baseline", "policy"])]
    held = rows["num_experts"] / rows["num_ranks"]
    return bool((rows["activated_fullest_rank"] <= (1 - _LEAST_IDLE) * held).any())


def solving_words(policy_params: Iterable[str]) -> str:
    """What solving is taken to need for each case that solves every batch; empty without one."""
    times_us = {params["solve_us"] for params in map(json.loads, policy_params) if params.get("solve_us") is not None}
    return " or ".join(f"{time_us:g}" for time_us in sorted(times_us))


# ---- words of statistics ---------------------------------------------------------------------------------------------


def spread_words(num_batches: int, num_launches: int, num_draws: int) -> str:
    """What stands beside a speedup: its interval, or the ends of its samples."""
    if num_batches < MIN_BATCHES:
        return f"(min..max: fewer than {MIN_BATCHES} batches give no interval, and so no verdict)"
    launches = f", and Student's t over {num_launches} launches" if num_launches > 1 else ", of this launch only"
    if num_draws > 1:
        launches = f", and Student's t over {num_draws} draws of the traffic"
    return f"[95 % interval, bootstrapped over batches, then iterations{launches}]"


def interval_words(is_interval: Sequence[bool]) -> str:
    """What whiskers are: an interval, or the ends of the samples where batches are too few for one."""
    few = f"fewer than {MIN_BATCHES} batches"
    if all(is_interval):
        return "Whiskers: 95 % interval."
    if not any(is_interval):
        return f"Whiskers: smallest and largest pair ({few} give no interval)."
    return f"Whiskers: 95 % interval, or smallest and largest pair where there are {few}."


def chance_words(number: int) -> list[str]:
    """How many of many verdicts chance alone would give; nothing of a single one."""
    alpha = 1 - LEVEL
    if number < 2:
        return []
    return [
        f"of {number} verdicts up to {number * alpha:.1f} would be called by chance alone, if nothing differed: "
        f"{number} x {100 * alpha:.0f} %"
    ]
