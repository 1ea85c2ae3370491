"""The tables that commands write and analysis reads: columns, phases, modes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

SCHEMA_VERSION = 6

# A rehearsal is a run whose ranks share a device: nothing of it is timed.
REHEARSAL = "rehearsal"
Mode = Literal["run", "emulated", "route", "quality", "serve", "rehearsal"]


@dataclass(frozen=True)
class Phase:
    """A stretch of an iteration that is timed as one.

    Attributes:
        group: what figures sum it into. The four of the capacity-aware paper (arXiv 2503.05066, Figure 2) are gate,
            permute, comm and experts.
        meets: of a waiting phase, the phase of what ranks do once the slowest has come; None = it is no waiting.
        of: whether an MoE layer has it, or a whole model beside these.
    """

    name: str
    group: str
    meets: str | None = None
    of: Literal["layer", "model"] = "layer"

    @property
    def is_waiting(self) -> bool:
        return self.meets is not None


# Beside the phases: the whole layer or model, and what of a breakdown iteration no phase covers.
TOTAL, UNACCOUNTED = "total", "unaccounted"
# Columns of ``samples`` that say more of a whole iteration, in its total's row.
BESIDE_TOTAL = HOST, HOST_BUSY, THREAD_CPU, SM_CLOCK = "host_us", "host_busy_us", "thread_cpu_us", "sm_clock_mhz"
# What of an MoE layer in a whole model no other phase covers.
MOE_REST = "moe_rest"

# All phases, by name. Those of a layer stand in the order in which it passes them; ``rest`` is norms and residual
# additions.
PHASES = {
    phase.name: phase
    for phase in (
        Phase("shared", "shared"),
        Phase("gate", "gate"),
        Phase("wait_policy", "waiting", meets="policy"),
        Phase("policy", "gate"),
        Phase("permute", "permute"),
        Phase("wait_metadata", "waiting", meets="metadata"),
        Phase("metadata", "permute"),
        Phase("wait_dispatch", "waiting", meets="dispatch"),
        Phase("dispatch", "comm"),
        Phase("experts", "experts"),
        Phase("wait_combine", "waiting", meets="combine"),
        Phase("combine", "comm"),
        Phase("embedding", "rest", of="model"),
        Phase("attention", "attention", of="model"),
        Phase("dense", "rest", of="model"),
        Phase("rest", "rest", of="model"),
        Phase(MOE_REST, UNACCOUNTED, of="model"),
        Phase("output", "rest", of="model"),
    )
}
LAYER_PHASES = tuple(name for name, phase in PHASES.items() if phase.of == "layer")
MODEL_PHASES = tuple(name for name, phase in PHASES.items() if phase.of == "model")
WAITING_PHASES = tuple(name for name, phase in PHASES.items() if phase.is_waiting)

# Of what times are compared: the layer, or the pass of a whole model; then the parts of a pass.
ALL = "all"
MOE, ATTENTION, REST = PARTS = ("MoE layers", "attention", "the rest")

# Under what a phase is recorded: its name, and in the depth of a model its layer before it.
PhaseKey = str | tuple[int, str]


def layer_and_phase(key: PhaseKey) -> tuple[int | None, str]:
    """The layer of a recorded phase, None where it is of none, and its name."""
    return (None, key) if isinstance(key, str) else key


def phases_in_depth(num_layers: int, moe_layers: Collection[int]) -> list[PhaseKey]:
    """All phases that a model of so many layers may pass, in their order."""
    names: list[PhaseKey] = ["embedding"]
    for layer in range(num_layers):
        own = (*LAYER_PHASES, MOE_REST) if layer in moe_layers else ("dense",)
        names += [(layer, phase) for phase in ("rest", "attention", *own)]
    return [*names, "rest", "output"]


def phase_key(layer: int | None, phase: str) -> PhaseKey:
    """Under what a phase of a layer is recorded; None = of no layer, or of one that stands alone."""
    return phase if layer is None else (layer, phase)


def phase_groups(of: Literal["layer", "model"]) -> dict[str, tuple[str, ...]]:
    """The phases of every group in the order in which figures stack them: waiting last."""
    rows = sorted((phase for phase in PHASES.values() if phase.of == of), key=lambda phase: phase.is_waiting)
    return {row.group: tuple(phase.name for phase in rows if phase.group == row.group) for row in rows}


COUNTS = pa.list_(pa.int64())
# Numbers of how tokens were routed, which ``metrics`` computes in this order: columns of ``routing``; integers are
# exact. Loads and traffic are of all that is computed, padding included; drops, masses and shares are of valid tokens.
ROUTING_METRICS = {
    "num_tokens": pa.int64(),  # valid tokens of this rank
    "load_E": COUNTS,  # pairs per expert, from this source rank
    "load_R": COUNTS,  # pairs per expert rank, from this source rank
    "num_pairs": pa.int64(),
    "padding_pairs": pa.int64(),  # of num_pairs, those of padding tokens
    "num_topk_pairs": pa.int64(),
    "num_dropped_pairs": pa.int64(),  # top-k pairs that nobody computes
    "num_rerouted_pairs": pa.int64(),  # top-k pairs in whose place the token has another expert
    "dropped_share": pa.float64(),  # of top-k pairs
    "rerouted_share": pa.float64(),  # of top-k pairs
    "retained_mass_topk": pa.float64(),  # selected score mass over the top-k mass
    "retained_mass_all": pa.float64(),  # selected score mass over all score mass
    "peak_load": pa.float64(),  # fullest expert over the mean of computed pairs, of this source rank
    "tokens_without_expert": pa.int64(),
    "experts_per_token": pa.float64(),
    "activated_experts": pa.int64(),
    "activated_experts_fullest_rank": pa.int64(),
    "crossing_pairs": pa.int64(),  # whose expert lives on another rank
    "crossing_copies": pa.int64(),  # to other ranks, one per (token, rank)
    "crossing_node_copies": pa.int64(),  # to other nodes, one per (token, node)
    "copies_R": COUNTS,  # tokens with a pair on each expert rank, from this source rank
    "copies_N": COUNTS,  # and on each node
    # Of the scores alone: no policy changes them.
    "topk_share": pa.float64(),
    "entropy": pa.float64(),  # normalised to 0..1
}
# Further columns: of the layer's output, of image tokens, which not every workload has, and of slots, where experts are
# not at their homes.
_MORE_METRICS = {
    "reference_error": pa.float64(),  # worst token: |layer - dense reference| / |reference|
    # |layer - native layer| / |native layer|, all valid tokens; of a whole model of the logits, in its last layer.
    "output_error": pa.float64(),
    "num_image_tokens": pa.int64(),  # valid ones
    "image_load_E": COUNTS,  # of load_E
    "slot_load_P": COUNTS,  # pairs per slot, from this source rank
    "moved_weight_bytes": pa.int64(),  # of experts that this rank is sent; of a new plan the batch's share
    # Of putting the batch's plan in place once; a batch's dispatch has its share of it.
    "rearrange_us": pa.float64(),
    "rearranged_bytes": pa.int64(),  # of weights that this rank is sent
}


def _table(columns: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """A schema whose parts say their version."""
    return pa.schema(columns, {"schema_version": str(SCHEMA_VERSION), "written_by": "moe-ep-bench"})


# Columns that say which case a row is of, and of which rank and batch.
IDENTITY = [
    ("run_id", pa.string()),
    ("case_id", pa.string()),
    ("comparison_id", pa.string()),
    ("mode", pa.string()),
    ("subject", pa.string()),  # layer or model
    ("backend", pa.string()),  # ranks, virtual (one device in turn for each rank), modelled or routing; null of quality
    ("model", pa.string()),
    ("policy", pa.string()),
    ("policy_params", pa.string()),  # JSON
    ("num_ranks", pa.int32()),  # expert-parallel size
    ("status", pa.string()),  # ok, failed, oom, timeout, skipped
    ("reason", pa.string()),  # null when ok
    ("rank", pa.int32()),  # global rank
    ("batch", pa.int32()),
]

# One row per case x launch x rank x batch x iteration x kind x layer x phase. A case that could not be measured in a
# launch has one row there, of nulls, with its status and reason.
SAMPLES_SCHEMA = _table(
    [
        *IDENTITY,
        ("launch", pa.int32()),
        ("iteration", pa.int32()),
        ("kind", pa.string()),  # plain (two clock readings) or breakdown (every phase)
        ("layer", pa.int32()),  # of a whole model, from 0, dense ones included; null = of none, or timed alone
        ("phase", pa.string()),  # PHASES, total, unaccounted
        ("time_us", pa.float64()),  # of the device; on the CPU of the host
        # BESIDE_TOTAL, of total rows; null where there is no such thing.
        (HOST, pa.float64()),  # host time to issue the iteration
        (HOST_BUSY, pa.float64()),  # the same without waiting for the GPU; null on the CPU, which is its own device
        (THREAD_CPU, pa.float64()),  # CPU time of the issuing thread
        (SM_CLOCK, pa.float64()),  # clock of the GPU ahead of the iteration, by the length of its hold
    ]
)

# What a rehearsal leaves in place of samples: one row per case x launch x rank, with what ran there and no time.
REHEARSAL_SCHEMA = _table(
    [
        *IDENTITY,
        ("launch", pa.int32()),
        ("num_iterations", pa.int32()),
        ("phases", pa.list_(pa.string())),  # that occurred
        ("lost_attempts", pa.list_(pa.string())),  # why earlier jobs lost the case, oldest first
    ]
)

# One row per case x rank x batch x layer. Virtual ranks are rows like any others.
ROUTING_SCHEMA = _table(
    [
        *IDENTITY,
        ("layer", pa.int32()),  # of the model or the recording; null = a layer alone, or synthetic scores
        *ROUTING_METRICS.items(),
        *_MORE_METRICS.items(),
    ]
)

# The frontier of dropping (``workload.frontier``): one row per case x batch x layer, all ranks together. A case without
# a part has none: real ranks see their own scores alone, replicas lose nothing, and very large batches are passed over.
FRONTIER_SCHEMA = _table(
    [
        ("comparison_id", pa.string()),
        ("case_id", pa.string()),
        ("batch", pa.int32()),
        ("layer", pa.int32()),
        ("kept_by_load", pa.float64()),  # share of the top-k mass, at this case's fullest rank
        ("kept_by_experts", pa.float64()),  # at its number of activated experts
        ("curve_load", pa.list_(pa.float64())),  # of native: the fullest rank over the mean, ascending
        ("curve_kept", pa.list_(pa.float64())),  # the share kept there
    ]
)

# What ``quality`` leaves of a model's answers: one row per metric of each sequence of a text, of each question of a
# task, and of each whole task. ``rank`` is null, the model ran as a whole. A task's rows without a filter are ours:
# ``dropped_share``, ``rerouted_share``, ``retained_mass_topk`` and ``experts_per_token`` of all its passes and layers.
QUALITY_SCHEMA = _table(
    [
        *IDENTITY,
        ("stage", pa.string()),  # of a text: in which the policy acted, prefill or decode
        ("task", pa.string()),  # null = the text
        ("item", pa.int64()),  # sequence of the text, question of the task; null = the whole task
        ("metric", pa.string()),  # of a text: cross_entropy and kl (nats per token), agreement (share of tokens)
        ("filter", pa.string()),  # of a task's answers, as the harness names it; null = the metric is ours
        ("value", pa.float64()),
        ("stderr", pa.float64()),  # the harness' own; null where it gives none
        ("higher_is_better", pa.bool_()),
        ("num_tokens", pa.int64()),  # of a sequence, that were predicted: all but its first
        ("num_samples", pa.int64()),  # questions of a whole task
        ("num_fewshot", pa.int32()),
        ("version", pa.string()),  # of the task; null where it has none
        ("is_asked", pa.bool_()),  # of a whole task: the config names it; False = a part of a group
    ]
)

# And of its routing: one row per batch and layer, all virtual ranks together. Where the tokens of each position were
# a batch of their own (``decode``), what is called a mean is over these steps.
QUALITY_ROUTING_SCHEMA = _table(
    [
        *IDENTITY,
        ("stage", pa.string()),
        ("layer", pa.int32()),  # of the decoder
        ("num_steps", pa.int64()),
        *(
            (name, ROUTING_METRICS[name])
            for name in (
                *("num_tokens", "load_E", "num_pairs", "num_topk_pairs", "num_dropped_pairs", "num_rerouted_pairs"),
                *("dropped_share", "rerouted_share"),
                *("retained_mass_topk", "retained_mass_all", "tokens_without_expert", "experts_per_token", "peak_load"),
            )
        ),
        ("rank_peak_load", pa.float64()),  # imbalance of ranks, mean
        ("activated_experts", pa.float64()),  # mean
        ("activated_experts_fullest_rank", pa.float64()),  # mean
    ]
)


# Kinds of requests of ``serve``: of a round, and sent one at a time.
LOAD, ALONE = "load", "alone"

# What ``serve`` leaves: one row per case x launch (start of the servers) x request. ``batch`` is the round, null of
# requests that were sent alone, and ``iteration`` the place in it. A case whose server was lost in a start has one row
# there, of nulls, with its status and reason.
REQUESTS_SCHEMA = _table(
    [
        *IDENTITY,
        ("launch", pa.int32()),
        ("iteration", pa.int32()),
        ("kind", pa.string()),  # load (in a round) or alone (one at a time, not timed)
        ("prompt", pa.int32()),  # its place among all
        ("sent_us", pa.float64()),  # since the round began
        ("first_us", pa.float64()),  # from sending to the first token
        ("time_us", pa.float64()),  # from sending to the last one
        ("num_prompt_tokens", pa.int64()),  # as the server counts
        ("num_tokens", pa.int64()),  # of the answer
        (
            "num_arrivals",
            pa.int64(),
        ),  # moments at which pieces of it came; fewer than tokens where they come in bunches
        ("text", pa.string()),
        ("tokens", pa.list_(pa.string())),  # as the server spells them
        ("logprobs", pa.list_(pa.float64())),  # of these tokens, nats
    ]
)


@dataclass(frozen=True)
class Table:
    """A table on disk: a Parquet part per comparison (and launch), in a folder of a results directory."""

    folder: str
    schema: pa.Schema
    is_by_launch: bool = False


TABLES = {
    "samples": Table("cases", SAMPLES_SCHEMA, is_by_launch=True),
    REHEARSAL: Table("cases", REHEARSAL_SCHEMA, is_by_launch=True),
    "routing": Table("routing", ROUTING_SCHEMA),
    "frontier": Table("frontier", FRONTIER_SCHEMA),
    "requests": Table("requests", REQUESTS_SCHEMA, is_by_launch=True),
    "quality": Table("quality", QUALITY_SCHEMA),
    "quality_routing": Table("routing", QUALITY_ROUTING_SCHEMA),
}
