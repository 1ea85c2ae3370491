"""What has to be known to read a comparison's numbers: each note is a fact and its sentence.

A note stands where its fact is neither None nor zero nor empty. Notes say how to read a table, warnings (which begin
with ``warning:``) what forbids or weakens a reading. ``notes`` has them all, the most important ones first in
``most_important``; figures and answers take single sentences from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import COMPARISON, cases, routing
from moe_ep_bench.analysis.columns import NONE
from moe_ep_bench.analysis.origins import component_words
from moe_ep_bench.analysis.reduce import probe_floor_us
from moe_ep_bench.analysis.store import Comparison, Store
from moe_ep_bench.config import LPLB_SOLVE_US
from moe_ep_bench.facts import Conditions, RoutedFacts, TimedFacts
from moe_ep_bench.machine.monitor import disturbances, remarks
from moe_ep_bench.metrics import uniform_activated_experts
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import load_of_others, replicate, stacking_words
from moe_ep_bench.policies.waits import waits_words
from moe_ep_bench.timing.statistics import LEVEL, MIN_BATCHES
from moe_ep_bench.workload.formatting import tokens_words

# Aims of the timing protocol: above these a breakdown is told apart from what it breaks down.
MAX_UNACCOUNTED = 0.01
MAX_PROBE_OVERHEAD = 0.01
# A share of launch-bound iterations below this is chance.
MAX_HOST_BOUND = 0.1
# Pairs cancel a drift that is slow against them; beyond this it is worth a warning.
MAX_DRIFT = 0.1
_ROUNDING = 1e-6  # shares are sums of float32
WARNING = "warning: "

MODEL_CAVEAT = "Intervals are of traffic only: what the model leaves out, or has wrong, is in none of them."
OVERSUBSCRIBED = "more ranks than cores: they share time slices, and no straggler speedup is claimed"
NOT_FUSED = "permutation is not fused: phase shares are not to be set beside a paper's"
READING = "loads, activated experts and traffic count padding that is computed; drops and mass kept are of valid tokens"
FRONTIER = (
    "below frontier: mass that dropping alone could keep beyond this, at the same fullest rank (of experts: with as "
    "many activated experts); a policy that reroutes may keep more, below 0"
)


@dataclass(frozen=True, eq=False)
class _Subject:
    """What notes are about: a comparison, its rows of the frame, and its like in the store."""

    store: Store
    comparison: Comparison
    rows: pd.DataFrame

    @property
    def facts(self) -> Any:
        return self.comparison.facts

    @property
    def kind(self) -> str:
        """``layer``, ``model`` or ``route``."""
        if isinstance(self.facts, RoutedFacts):
            return "route"
        return "layer" if self.facts.whole is None else "model"

    @property
    def is_run(self) -> bool:
        """Whether something was run: neither modelled as a whole nor routed only."""
        return isinstance(self.facts, TimedFacts) and self.facts.device is None

    @property
    def launches(self) -> list[Conditions]:
        return [self.comparison.conditions[launch] for launch in sorted(self.comparison.conditions)]

    @cached_property
    def routing(self) -> pd.DataFrame:
        frame = routing(self.store)
        is_here = frame[COMPARISON].eq([self.comparison.directory, self.comparison.comparison_id]).all(axis=1)
        return frame[is_here]

    @property
    def native(self) -> dict[str, Any] | None:
        """The row of the measured baseline."""
        found = self.rows[(self.rows["role"] == "baseline") & (self.rows["status"] == "ok")].to_dict("records")
        return found[0] if found else None

    @property
    def policies(self) -> pd.DataFrame:
        return self.rows[(self.rows["role"] == "policy") & (self.rows["status"] == "ok")]

    def has(self, column: str, role: str | None = None) -> bool:
        rows = self.rows if role is None else self.rows[self.rows["role"] == role]
        return column in rows and bool(rows[column].notna().any())

    def worst(self, column: str, rows: pd.DataFrame | None = None) -> str:
        """The largest share of a column and whose it is; empty where there is none."""
        rows = self.rows if rows is None else rows
        if column not in rows or rows[column].isna().all():
            return ""
        row = rows.loc[rows[column].astype(float).idxmax()]
        return f"{percent(row[column])} % ({row['label']})"

    def greatest(self, column: str) -> float:
        return float(self.rows[column].astype(float).max()) if self.has(column) else 0.0


def percent(share: float) -> str:
    """A share as a percentage with one decimal, without the sign; a dash where there is none."""
    return NONE if math.isnan(share) else f"{100 * share:.1f}"


# ---- facts -----------------------------------------------------------------------------------------------------------


def _components(of: _Subject) -> str:
    facts = of.facts
    words = f"experts: {component_words(facts.experts)}; permutation: {component_words(facts.permute)}"
    return words + (f"; routing: {component_words(facts.kernel)}" if facts.kernel and of.is_run else "")


def _pass_words(of: _Subject) -> tuple[str, ...] | None:
    rest = getattr(of.facts, "rest", None)
    if rest is None:
        return None
    what, cached = ("step", f" after {rest.context_length:,} tokens") if rest.context_length else ("pass", "")
    attention = rest.attention.removeprefix("modelled").strip() or "as a roofline"
    return what, f"{rest.num_moe_layers}", f"{rest.us_per_moe_layer:,.0f}", cached, attention


def spread_words(num_batches: int, num_launches: int, num_draws: int) -> str:
    """What stands beside a speedup: its interval, or the ends of its samples."""
    if num_batches < MIN_BATCHES:
        return f"(min..max: fewer than {MIN_BATCHES} batches give no interval, and so no verdict)"
    launches = f", and Student's t over {num_launches} launches" if num_launches > 1 else ", of this launch only"
    if num_draws > 1:
        launches = f", and Student's t over {num_draws} draws of the traffic"
    return f"[95 % interval, bootstrapped over batches, then iterations{launches}]"


def _spread(of: _Subject) -> str:
    return spread_words(of.facts.num_batches, len(of.launches), of.facts.draws)


def interval_words(is_interval: Sequence[bool], mark: str = "Whiskers") -> str:
    """What the lines about a speedup are: an interval, or the ends of the samples where batches are too few for one."""
    if all(is_interval):
        return f"{mark}: 95 % interval."
    few = f"fewer than {MIN_BATCHES} batches"
    if not any(is_interval):
        return f"{mark}: smallest and largest pair ({few} give no interval)."
    return f"{mark}: 95 % interval, or smallest and largest pair where there are {few}."


def chance_words(number: int) -> list[str]:
    """How many of many verdicts chance alone would give; nothing of a single one."""
    alpha = 1 - LEVEL
    if number < 2:
        return []
    return [
        f"of {number} verdicts up to {number * alpha:.1f} would be called by chance alone, if nothing differed: "
        f"{number} x {100 * alpha:.0f} %"
    ]


def _chance(of: _Subject) -> str:
    rows = of.rows
    judged = ~rows["role"].isin(["baseline", "noise"]) & rows["floor_low"].notna()
    return "; ".join(chance_words(int((judged & (rows["speedup_is_interval"] == True)).sum())))  # noqa: E712


def _floor(of: _Subject) -> tuple[float, float] | None:
    floors = of.rows[["floor_low", "floor_high"]].dropna()
    return tuple(floors.iloc[0]) if len(floors) and of.is_run else None


def _detectable(of: _Subject) -> str:
    known = of.policies.dropna(subset=["detectable"])
    ends = (
        [known.loc[pick] for pick in (known["detectable"].idxmin(), known["detectable"].idxmax())] if len(known) else []
    )
    return " to ".join(f"{row['detectable']:.3f} ({row['label']})" for row in ends)


def _drift(of: _Subject) -> tuple[float, float, float] | None:
    native = of.native
    if native is None or not of.is_run or pd.isna(native.get("drift")):
        return None
    return 100 * native["drift"], 100 * native["outlier_share"], native["outlier_worst"]


def _padding(of: _Subject) -> float | None:
    if not of.facts.workload.padding or of.native is None:
        return None
    rows = of.routing[of.routing["role"] == "baseline"]
    return 100 * rows["padding_pairs"].sum() / rows["num_pairs"].sum()


def _waits(of: _Subject) -> str:
    """Where each case reads results in the middle of its run; of the last launch."""
    labels = dict(zip(of.rows["case_id"], of.rows["label"], strict=True))
    waits = of.launches[-1].waits if of.launches else {}
    return "; ".join(f"{labels[case]}: {waits_words(lines)}" for case, lines in waits.items() if case in labels)


def _peak_memory(of: _Subject) -> tuple[float, str] | None:
    peaks = [rank.peak_memory_bytes or 0 for launch in of.launches for rank in launch.ranks]
    where = "on the device" if of.facts.backend == "nccl" else "of the process, imports and all"
    return (max(peaks) / 2**30, where) if any(peaks) else None


def _model_extent(of: _Subject) -> tuple[Any, ...]:
    extent = of.facts.whole
    peaks = extent.peak_loads
    return len(extent.moe_layers), min(peaks), max(peaks)


def shared_by_chance_words(shared: Sequence[float]) -> str:
    """That layers have not the neighbours that were asked for; nothing where all have."""
    if not shared:
        return ""
    return (
        f"in {len(shared)} of its MoE layers neighbours share {min(shared):.2f} to {max(shared):.2f} experts, more "
        "than asked for: independent tokens do under this skew"
    )


def _attention(of: _Subject) -> tuple[str, str]:
    kernels = ", ".join(sorted({name for launch in of.launches for name in launch.attention}))
    return of.facts.whole.attention + (f" ({kernels} kernel)" if kernels else ""), _components(of)


def _what_a_pass_is(of: _Subject) -> str:
    cached = of.facts.whole.context_length
    if cached:
        return f"one decode step; {tokens_words(cached)} of each request are in the cache"
    return "the prefill of all prompts, with the last token's logits of each"


def extrapolated_words(facts: TimedFacts) -> str:
    """How many layers were built, and what stands for the others; nothing where all were."""
    extent = facts.whole
    if extent is None or extent.num_layers == extent.of_layers:
        return ""
    return (
        f"{extent.num_layers} of {extent.of_layers} layers were built and timed; each further layer is taken to be "
        "like the mean MoE layer that was"
    )


def _activated(of: _Subject) -> tuple[int, float] | None:
    facts = of.facts
    if of.kind == "route":
        return facts.num_experts, uniform_activated_experts(facts.num_experts, facts.top_k, facts.num_tokens)
    return None


def _activated_on_a_rank(of: _Subject) -> int | None:
    """Experts that a rank holds, where some step leaves a share of them idle."""
    return of.facts.num_experts // of.facts.num_ranks if leaves_idle(of.rows) else None


# A step of decoding leaves this share of the fullest rank's experts idle in some case.
_LEAST_IDLE = 0.05


def leaves_idle(rows: pd.DataFrame) -> bool:
    """Whether activated experts say anything: some native or policy leaves experts of the fullest rank idle."""
    rows = rows[rows["role"].isin(["baseline", "policy"])]
    held = rows["num_experts"] / rows["num_ranks"]
    return bool((rows["activated_fullest_rank"] <= (1 - _LEAST_IDLE) * held).any())


def _replicas(of: _Subject) -> str:
    """What replicas of experts cost, and on how many ranks of batches EPLB put two of one expert."""
    lines = []
    for row in of.rows[of.rows["role"] == "replication"].to_dict("records"):
        if row["status"] != "ok":
            continue
        case = next(case for case in of.comparison.cases if case.case_id == row["case_id"])
        words = (
            ""
            if of.kind == "route"
            else extra_memory_words(row["extra_bytes_per_rank"]) + _solving_words(case.facts.policy_params)
        )
        note = stacked_words(of, case.facts.policy_params)
        if words or note:
            lines.append(f"{row['label']}: {'; '.join(filter(None, (words, note)))}")
    return "\n".join(lines)


def extra_memory_words(extra_bytes: float | None) -> str:
    """What replicas of experts cost, in all layers of the model together."""
    if extra_bytes is None or math.isnan(extra_bytes):
        return "more memory per rank, by how much was not recorded"
    return f"{extra_bytes / 2**30:.3g} GiB more memory per rank, in all layers together"


def _solving_words(params: dict[str, Any]) -> str:
    """What balancing by a linear program is taken to need in every batch; empty where nothing is solved."""
    if params.get("balancer") != "lp":
        return ""
    assumed_us = LPLB_SOLVE_US if params.get("solve_us") is None else params["solve_us"]
    return f"; solving counts in every batch, as {assumed_us:g} us, assumed, in the phase policy"


def stacked_words(of: _Subject, policy_params: dict[str, Any]) -> str:
    """On how many ranks of batches EPLB put two replicas of one expert; empty where on none.

    It is planned again from native's loads. Groups of experts are those of the model's preset; of other models nothing
    is known of groups, which plans over several nodes read, and nothing is said.
    """
    facts, num_nodes = of.facts, policy_params.get("num_nodes", 1)
    preset = facts.model in ModelSpec.names()
    native = of.routing[of.routing["role"] == "baseline"]
    if (num_nodes > 1 and not preset) or "spare_per_rank" not in policy_params or native.empty:
        return ""
    planned = {
        "num_slots": facts.num_experts + policy_params["spare_per_rank"] * facts.num_ranks,
        "num_ranks": facts.num_ranks,
        "num_nodes": num_nodes,
        "num_groups": (ModelSpec.named(facts.model).num_groups or 1) if preset else 1,
        "policy": policy_params.get("policy", "auto"),
    }
    load_UE = np.stack(native["load_E"].to_list())
    layers = load_UE.reshape(-1, native["batch"].nunique(), load_UE.shape[1])
    stacked = np.concatenate([replicate(load_of_others(load_BE), **planned).stacked for load_BE in layers])
    return stacking_words(stacked, "ranks of batches") if stacked.any() else ""


def _machine_remarks(of: _Subject) -> str:
    return "\n".join(dict.fromkeys(line for launch in of.launches for line in remarks(launch.machines)))


# ---- warnings --------------------------------------------------------------------------------------------------------


def _differs(of: _Subject) -> bool:
    again = of.rows[(of.rows["role"] == "noise") & (of.rows["speedup_is_interval"] == True)]  # noqa: E712
    return bool(((again["speedup_low"] > 1) | (again["speedup_high"] < 1)).any())


def _worst_drift(of: _Subject) -> float | None:
    if not of.has("drift"):
        return None
    drifts = of.rows["drift"].dropna().astype(float)
    worst = drifts.loc[drifts.abs().idxmax()]
    return 100 * worst if abs(worst) > MAX_DRIFT else None


def _launch_bound(of: _Subject) -> str:
    """Meaningful on a GPU only, where the host runs ahead of the device."""
    if of.facts.backend != "nccl" or not of.has("host_bound_share"):
        return ""
    return of.worst("host_bound_share", of.rows[of.rows["host_bound_share"].astype(float) > MAX_HOST_BOUND])


def _allocating(of: _Subject) -> tuple[int, str] | None:
    """Most timed iterations of a case that asked the driver for memory on one rank, and the case; None = none did."""
    labels = dict(zip(of.rows["case_id"], of.rows["label"], strict=True))
    counts = [
        (count, labels[case])
        for launch in of.launches
        for rank in launch.ranks
        for case, count in rank.allocating_iterations.items()
        if case in labels
    ]
    return max(counts, default=None)


def _disturbed(of: _Subject) -> str:
    lines = []
    for number, launch in enumerate(of.launches):
        where = f" (launch {number + 1})" if len(of.launches) > 1 else ""
        lines += [f"disturbed machine: {line}{where}" for line in disturbances(launch.machines)]
        if launch.warm_up.change is not None and not launch.warm_up.settled:
            change = f"{100 * launch.warm_up.change:+.1f} %"
            lines.append(f"warm-up did not settle: its last round took {change} against the one before{where}")
    return "\n".join(lines)


def _simpler(of: _Subject) -> str:
    timed = "the layer" if of.kind == "layer" else "what was built"
    return "\n".join(f"{timed} is simpler than {of.facts.model}'s: {line}" for line in of.facts.departures)


def _tail(of: _Subject) -> str:
    """What policies that look past a recorded top-k rest on, and whether it was tried another way."""
    workload = of.facts.workload
    looking = ", ".join(of.policies.loc[of.policies["looks_past_top_k"].astype(bool), "label"])
    if workload.tail_model is None or not looking:
        return ""
    modelled = f"scores past the recorded top-k are modelled ({workload.tail_model} tail)"
    if of.kind == "route":
        return f"{modelled}, and what {looking} did rests on them"
    alike = [one.facts.workload for one in of.store.comparisons if one.facts.workload.recording == workload.recording]
    others = ", ".join(sorted({one.tail_model for one in alike if one.tail_model} - {workload.tail_model}))
    tried = f"set it beside the same under {others}" if others else "measured under this one only (workload.tail: both)"
    return f"{modelled}, and what {looking} did rests on them: {tried}"


# ---- the table of notes ----------------------------------------------------------------------------------------------


class Note(NamedTuple):
    """A sentence, its fact, and of which comparisons it is (``layer``, ``model``, ``route``).

    ``rank``: where there is room for three notes, those of the least rank stand; 0 = in ``show`` only.
    """

    of: str
    sentence: str
    fact: Callable[[_Subject], Any]
    rank: int = 0


_TIMED, _ALL = "layer model", "layer model route"
NOTES = (
    Note(
        "layer",
        "{} ms, tokens/s/GPU: as if each of {} MoE layers took what this one does, beside {} us for the rest of the "
        "model (modelled: attention{} {}, dense layers, norms, output)",
        _pass_words,
    ),
    Note(_ALL, "{}", lambda of: of.rows["workload_words"].iloc[0], 6),
    Note("model", "MoE layers: {}, each with scores of its own: fullest expert {:.2f} to {:.2f} x mean", _model_extent),
    Note("model", "{}", lambda of: shared_by_chance_words(of.facts.whole.shared_by_chance)),
    Note("model", "attention: {}, data-parallel; {}", _attention),
    Note("model", "a pass is {}", _what_a_pass_is),
    Note("layer", "{}", _components),
    Note(_TIMED, MODEL_CAVEAT, lambda of: not of.is_run, 3),
    Note(
        "layer",
        "dispatcher: allgather; crossing bytes are those that an all-to-all would send",
        lambda of: of.is_run and of.facts.dispatcher == "allgather",
    ),
    Note(_TIMED, "replayed from CUDA graphs, which hold {}", lambda of: of.facts.cuda_graph),
    Note(
        "layer",
        "load under native: fullest expert {:.2f} x mean, fullest rank {:.2f} x mean of what valid tokens select",
        lambda of: of.native and (of.native["fullest_expert"], of.native["fullest_rank"]),
    ),
    Note("layer", "padding: native spends {:.1f} % of its pairs on padding", _padding),
    Note(_ALL, READING, lambda of: of.facts.workload.padding),
    Note("layer", "speedup: slowest rank's layer time, native over case, median of pairs {}", _spread, 4),
    Note("model", "end to end: slowest rank's pass, native over case, median of pairs {}", _spread, 4),
    Note(_TIMED, "noise floor: {:.3f} to {:.3f}, by which native run twice differs from itself", _floor, 5),
    Note("layer", "smallest speedup that would be called (power 80 %): {}", _detectable),
    Note(_TIMED, "{}", _chance),
    Note(
        "layer",
        "ceiling: native on perfectly balanced scores; what balance alone could buy, no policy",
        lambda of: (of.rows["role"] == "ceiling").any(),
    ),
    Note(
        "model",
        "MoE share f, MoE speedup s: of breakdown iterations; by Amdahl: 1 / (1 - f + f / s) with native's f; no "
        "policy exceeds 1 / (1 - f) = {:.3f}",
        lambda of: of.greatest("most_by_amdahl"),
    ),
    Note("model", "extrapolated: {}", lambda of: extrapolated_words(of.facts)),
    Note(
        "layer",
        "warm-up: {} rounds over all batches and cases, by launch",
        lambda of: ", ".join(str(launch.warm_up.rounds) for launch in of.launches),
    ),
    Note(
        "layer",
        "native over the run: drift {:+.1f} % (pairs cancel it), {:.1f} % of its iterations far out, the worst {:.2f} "
        "x its batch's median",
        _drift,
    ),
    Note(
        "layer",
        "choosing experts, share of the slowest rank's time: at worst {}",
        lambda of: of.is_run and of.worst("breakdown_policy_share", of.policies),
    ),
    Note(
        "layer",
        "megatron_drop by position: a layer keeps any tokens of a full expert (Megatron-Core's ties are open), route "
        "the earliest, so that their mass kept may differ",
        lambda of: of.rows["policy_params"].str.contains('"drop_policy": "position"').any() and of.is_run,
    ),
    Note("layer", "the host waits for the device, in each run and beyond native: {}", _waits),
    Note(
        "layer",
        "unaccounted time: at worst {}",
        lambda of: of.is_run and of.worst("breakdown_unaccounted_share"),
    ),
    Note("layer", "probe overhead: at worst {}", lambda of: of.worst("probe_overhead")),
    Note(
        "layer",
        "probe floor: {:.1f} us, what a waiting probe costs when nobody waits; waits are less that",
        lambda of: probe_floor_us(of.facts, of.launches),
    ),
    Note("layer route", FRONTIER, lambda of: of.has("below_frontier", "policy")),
    Note(
        _TIMED,
        "output error: relative to native, with random weights; it is no measure of a model's accuracy",
        lambda of: of.facts.random_weights and of.has("output_error"),
    ),
    Note("layer", "peak memory: {:.2f} GiB on the fullest rank ({})", _peak_memory),
    Note(
        "layer",
        "activated: experts with a token on the rank that has most of them, of {}; mean over batches",
        _activated_on_a_rank,
    ),
    Note(
        "route",
        "fullest: pairs over native's mean expert's or rank's; imbalance: over the mean of the pairs that are "
        "computed; of each batch, then means over batches and layers",
        lambda of: True,
    ),
    Note(
        "route",
        "activated: experts with a token, of {} ({:.1f} if tokens chose independently and uniformly), and on the rank "
        "with most of them",
        _activated,
    ),
    Note(
        "route",
        "dropped: of the model's own pairs, also where a policy computes others in their place",
        lambda of: of.policies["looks_past_top_k"].astype(bool).any(),
    ),
    Note(
        "route",
        "scores were not recorded and are assumed equal over the top-k: loads are the recording's, but mass, and what "
        "policies choose by scores (oea, xshare, drops by score), say nothing of the model",
        lambda of: "scores assumed" in of.facts.workload.description,
    ),
    Note(
        "route",
        "EPLB: planned for the mean load of the other batches; what solving a linear program takes is not shown here, "
        "emulate counts it",
        lambda of: of.rows["policy"].eq("eplb").any(),
    ),
    Note(
        "route",
        "assumed: {:.0%} of every sequence's tokens are an image's",
        lambda of: of.facts.image_share,
    ),
    Note(_ALL, "{}", _replicas),
    Note(
        _ALL,
        "mass kept above 100 %: the policy adds experts to the top-k",
        lambda of: of.greatest("retained_mass") > 1 + _ROUNDING,
    ),
    Note(_TIMED, "{}", _machine_remarks),
)
_ON_CPU = (
    "probes are not free on CPU ranks (gloo): read phase times as shares; speedups come from iterations without probes"
)
WARNINGS = (
    Note(_TIMED, "{}", lambda of: of.facts.fit and of.facts.fit.words, 1),
    Note(_TIMED, "the baseline was not measured, so there are no speedups", lambda of: of.native is None, 1),
    Note(
        _TIMED,
        "native was not measured a second time, so there is no noise floor and no verdict",
        lambda of: of.native is not None and not of.has("floor_low"),
        1,
    ),
    Note(
        _TIMED, "native differs from itself: something drifts with the order of cases; the floor covers it", _differs, 2
    ),
    Note(_TIMED, "times drifted by {:+.1f} % between the begin and the end of a launch", _worst_drift, 2),
    Note(_TIMED, OVERSUBSCRIBED, lambda of: of.facts.oversubscribed, 1),
    Note(
        _TIMED,
        f"phases leave more than {percent(MAX_UNACCOUNTED)} % of the time unaccounted for",
        lambda of: of.greatest("breakdown_unaccounted_share") > MAX_UNACCOUNTED,
    ),
    Note(
        _TIMED,
        f"probes cost more than {percent(MAX_PROBE_OVERHEAD)} %: phase times are too long by about that",
        lambda of: of.facts.backend == "nccl" and of.greatest("probe_overhead") > MAX_PROBE_OVERHEAD,
    ),
    Note(_TIMED, _ON_CPU, lambda of: of.facts.backend != "nccl" and of.greatest("probe_overhead") > MAX_PROBE_OVERHEAD),
    Note(
        _TIMED,
        "launch-bound: in {} of the iterations the host issued work until the end; its time is the host's, not the "
        "device's",
        _launch_bound,
        2,
    ),
    Note(
        _TIMED,
        "memory was asked of the driver in {} timed iterations of one rank ({}), which stops the device: fewer tokens "
        "or cases, or more measure.max_warmup",
        _allocating,
        2,
    ),
    Note(_TIMED, NOT_FUSED, lambda of: of.is_run and of.facts.permute.ran not in ("fused", "none")),
    Note(_TIMED, "{}", _disturbed, 2),
    Note(_TIMED, "{}", _simpler),
    Note(_ALL, "{}", _tail, 2),
)


@lru_cache(maxsize=256)
def _said(store: Store, directory: str, comparison_id: str) -> list[tuple[int, str]]:
    """Every note with its rank, warnings last."""
    frame = cases(store)
    rows = frame[frame[COMPARISON].eq([directory, comparison_id]).all(axis=1)]
    subject = _Subject(store, store.by_id[directory, comparison_id], rows)
    found = []
    for prefix, table in (("", NOTES), (WARNING, WARNINGS)):
        for note in table:
            fact = note.fact(subject) if subject.kind in note.of.split() else None
            if fact is None or (isinstance(fact, float) and math.isnan(fact)) or not fact:
                continue
            text = note.sentence.format(*fact if isinstance(fact, tuple) else [fact])
            found += [(note.rank, f"{prefix}{line}") for line in text.split("\n")]
    return found


def notes(store: Store, directory: str, comparison_id: str) -> list[str]:
    """What has to be known to read a comparison's numbers, a sentence each; warnings, last, begin with ``warning:``."""
    return [line for _, line in _said(store, directory, comparison_id)]


def most_important(store: Store, number: int = 3) -> list[str]:
    """The notes of all comparisons that weigh most, each once."""
    found: dict[str, int] = {}
    for one in store.comparisons:
        for rank, line in _said(store, one.directory, one.comparison_id):
            if rank:
                found.setdefault(line, rank)
    return sorted(found, key=lambda line: found[line])[:number]
