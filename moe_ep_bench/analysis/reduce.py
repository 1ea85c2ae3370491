"""The only place where ranks are joined and ratios formed: times, phases, rates and routing of one case.

*Layer time.* Ranks meet in every layer, so the slowest one's time is the layer's: the maximum over ranks of ``total``,
per iteration, from plain iterations (nothing is read inside them).

*Phases* come from breakdown iterations, which hold extra clock readings and barriers; what these cost and what no
phase covers are reported beside. A mean over ranks shows what ranks lose to waiting, the slowest rank shows what they
wait *for*. On GPUs each wait is less what its probe costs when nobody waits (``probe_floor_us``).

*Routing.* Each rank reports its own tokens. A batch is one thing to the model, so ranks are joined first (counts and
score mass are summed), every batch of every layer for itself, and only then batches are averaged. Averaging the ranks'
own peaks would miss the very thing: an expert that is busy on every rank.

*Bytes* are counted as (token, expert) pairs, which Megatron-Core's all-to-all sends, and as copies deduplicated per
rank, which DeepEP would send. *Bandwidth* follows nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is a rank's
buffer over the time, bus bandwidth takes out the 1/n of it that stays, for n ranks. With uneven splits the fullest
rank's buffer counts, the larger of what it sends and receives, its own share included, and the slowest rank's time,
waiting excluded. *Experts* are judged on the rank with the most pairs: operations against this device's own square
matmul, bytes against its own copy. The bytes are each operand once: activated weights, inputs, both intermediates
written and read, outputs.

*Whole models.* A pass is the slowest rank's. With the share f of the MoE layers in native's pass, waiting included, and
their speedup s, Amdahl's law (AFIPS 1967) says 1 / (1 - f + f / s) for the pass. Where only the first layers were
built, every further MoE layer is taken to be like the mean of those that were timed, with its attention.

Shapes: I = iterations, R = ranks, P = phases, B = batches, U = batches of layers, E = experts, L = a rank's experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.iterations import PHASE_AXIS, Iterations
from moe_ep_bench.analysis.reading import ITERATION
from moe_ep_bench.analysis.store import Case
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.facts import Conditions, RoutedFacts, TimedFacts
from moe_ep_bench.metrics import imbalance, mass_kept
from moe_ep_bench.schema import LAYER_PHASES, MOE_REST, PHASES, TOTAL, UNACCOUNTED, WAITING_PHASES, phase_groups

# Groups of a layer's phases, and what no phase covers.
MODEL_GROUPS = phase_groups("model")
GROUPS = {**phase_groups("layer"), UNACCOUNTED: (UNACCOUNTED,)}
# What an MoE layer's time consists of in a model.
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
RATES = (
    *("crossing_pair_bytes", "crossing_copy_bytes", "dispatch_gbps", "dispatch_bus_gbps", "combine_gbps"),
    *("combine_bus_gbps", "experts_tflops", "experts_of_matmul", "experts_of_copy"),
)
# A host that is still issuing work when this much of the time is over has kept the device waiting.
_HOST_BOUND = 0.95
# Beside each pair's hidden state its routing weight travels, in float32.
_WEIGHT_BYTES = 4


# ---- times -----------------------------------------------------------------------------------------------------------


def layer_time_us(case: Case) -> pd.Series:
    """Time of the slowest rank in each plain iteration, indexed by (launch, batch, iteration)."""
    return case.plain.series(case.plain.of(TOTAL).max(axis=1))


def host_time_us(case: Case) -> pd.Series:
    """Time for which the slowest rank's host issued a plain iteration, indexed by (launch, batch, iteration)."""
    times = case.plain
    return times.series(times.host_us[np.arange(len(times.index)), times.slowest_rank()])


def host_bound_share(case: Case) -> float:
    """Share of plain iterations in which the slowest rank's host issued work until the end: no queue, no device limit.

    Meaningful on a GPU only, where the host runs ahead of the device.
    """
    return float((host_time_us(case) >= _HOST_BOUND * layer_time_us(case)).mean())


def probe_floor_us(facts: TimedFacts, conditions: Sequence[Conditions]) -> float:
    """What a probe costs on a GPU when nobody waits: median over launches and ranks; 0 where that is not known."""
    known = [rank.probe_floor_us for launch in conditions for rank in launch.ranks if rank.probe_floor_us is not None]
    return float(np.median(known)) if known and facts.backend == "nccl" else 0.0


def breakdown(case: Case, floor_us: float = 0.0) -> dict[str, Any]:
    """What the breakdown iterations of a case say; empty when it has none. ``floor_us`` is taken off every wait.

    Returns:
        ``breakdown_slowest_phase``, which takes longest (median over iterations) on the rank that is slowest in each
        iteration, ``waiting (dispatch)`` and the like when it is a wait; ``breakdown_unaccounted_share``, time that no
        phase covers over total on the slowest rank, sum over sum within a batch, then the median over batches, and
        likewise ``breakdown_policy_share``; ``breakdown_layer_ms``, the median, probes included; ``<group>_ms``, mean
        over ranks, then median over iterations.
    """
    if case.breakdown.index.empty:
        return {}
    times = case.breakdown.less(floor_us, WAITING_PHASES)
    slowest_us_IP = times.on_slowest()
    batches, batch_I = np.unique(times.index.get_level_values("batch"), return_inverse=True)
    per_batch_us_BP = np.zeros((len(batches), slowest_us_IP.shape[1]))
    np.add.at(per_batch_us_BP, batch_I, slowest_us_IP)
    median_us = dict(zip(PHASE_AXIS, np.median(slowest_us_IP, axis=0), strict=True))
    shares_P = np.median(per_batch_us_BP / per_batch_us_BP[:, [PHASE_AXIS.index(TOTAL)]], axis=0)
    shares = dict(zip(PHASE_AXIS, shares_P, strict=True))
    slowest = max(LAYER_PHASES, key=median_us.__getitem__)
    return {
        # Waiting is not the phase that it stands before.
        "breakdown_slowest_phase": f"waiting ({PHASES[slowest].meets})" if PHASES[slowest].is_waiting else slowest,
        "breakdown_unaccounted_share": float(shares[UNACCOUNTED]),
        "breakdown_policy_share": float(shares["policy"]),
        "breakdown_layer_ms": float(median_us[TOTAL]) / 1e3,
        **{f"{group}_ms": time_ms for group, time_ms in times.mean_ms(GROUPS).items()},
    }


# ---- rates -----------------------------------------------------------------------------------------------------------


def rates(case: Case, facts: TimedFacts, conditions: Sequence[Conditions]) -> dict[str, float | None]:
    """``RATES`` of one case, medians over breakdown iterations; empty where its experts were not timed.

    Of whole models too, whose phases are many layers'. ``crossing_*``: hidden states that leave their rank in a
    dispatch, all ranks together, mean over batches. Bandwidths, 1e9 bytes per second, are None with one rank, under
    another dispatcher than the all-to-all, and where these phases were not timed.
    """
    times = case.breakdown
    if facts.whole is not None or not conditions or "experts" not in times.occurred:
        return {}
    hidden_bytes = facts.hidden_size * VALUE_BYTES[facts.dtype]
    crossing_bytes = case.routing.groupby("batch")[["crossing_pairs", "crossing_copies"]].sum().mean() * hidden_bytes
    pairs = _fullest_buffer_pairs(case.routing, facts.num_ranks)
    found: dict[str, float | None] = dict(zip(RATES[:2], map(float, crossing_bytes), strict=True))
    for phase, pair_bytes in (("dispatch", hidden_bytes + _WEIGHT_BYTES), ("combine", hidden_bytes)):
        gbps = _algorithm_gbps(times, phase, pairs * pair_bytes, facts)
        found[f"{phase}_gbps"] = gbps
        found[f"{phase}_bus_gbps"] = None if gbps is None else gbps * (facts.num_ranks - 1) / facts.num_ranks
    return found | dict(zip(RATES[-3:], _expert_rates(case, facts, conditions), strict=True))


def _fullest_buffer_pairs(routing: pd.DataFrame, num_ranks: int) -> pd.Series:
    """Pairs of the fullest rank's buffer, by batch: the larger of what it sends and receives, local pairs included."""
    batches, load_BRR = source_loads(routing, "load_R")
    replicas = load_BRR.reshape(len(batches), -1, num_ranks, num_ranks)
    fullest_B = np.maximum(*(replicas.sum(axis=axis).max(axis=(1, 2)) for axis in (3, 2)))
    return pd.Series(fullest_B, batches, dtype=float)


def _algorithm_gbps(times: Iterations, phase: str, buffer_bytes: pd.Series, facts: TimedFacts) -> float | None:
    """Algorithm bandwidth of an all-to-all."""
    if facts.num_ranks == 1 or facts.dispatcher != "alltoall" or phase not in times.occurred:
        return None
    bytes_I = buffer_bytes.loc[times.index.get_level_values("batch")].to_numpy()
    return float(np.median(bytes_I / times.of(phase).max(axis=1))) / 1e3


def _expert_rates(case: Case, facts: TimedFacts, conditions: Sequence[Conditions]) -> tuple[float, ...]:
    """TFLOP/s, its share of the matmul's, and the share of the copy's bandwidth."""
    hidden, ffn, size = facts.hidden_size, facts.ffn_hidden_size, VALUE_BYTES[facts.dtype]
    batches, pairs_BRL = pairs_by_rank(case.routing, facts)
    batch_I = batches.get_indexer(case.breakdown.index.get_level_values("batch"))
    rank_I = pairs_BRL.sum(axis=2).argmax(axis=1)[batch_I]
    pairs_IL = pairs_BRL[batch_I, rank_I]
    pairs_I, activated_I = pairs_IL.sum(axis=1), (pairs_IL > 0).sum(axis=1)
    time_us_I = case.breakdown.of("experts")[np.arange(len(rank_I)), rank_I]
    ceilings = []
    for name in ("matmul_tflops", "copy_gbps"):
        by_rank = np.median([[getattr(rank.ceilings, name) for rank in launch.ranks] for launch in conditions], axis=0)
        # One device may have stood in for all ranks.
        ceilings.append(by_rank[rank_I] if len(by_rank) > 1 else by_rank[0])
    matrices = facts.expert_matrices
    tflops_I = 2 * matrices * hidden * ffn * pairs_I / time_us_I / 1e6
    moved_bytes_I = size * (matrices * hidden * ffn * activated_I + pairs_I * 2 * (hidden + matrices * ffn))
    found = tflops_I, tflops_I / ceilings[0], moved_bytes_I / time_us_I / 1e3 / ceilings[1]
    return tuple(float(np.median(values_I)) for values_I in found)


# ---- whole models ----------------------------------------------------------------------------------------------------


def slowest_us(case: Case) -> pd.DataFrame | None:
    """Phases of the slowest rank, summed over layers, by launch, batch and breakdown iteration; None without these."""
    times = case.breakdown
    return None if times.index.empty else pd.DataFrame(times.on_slowest(), times.index, PHASE_AXIS)


def moe_time_us(case: Case) -> pd.Series:
    """Time of all MoE layers on the slowest rank of each breakdown iteration, indexed by launch, batch, iteration."""
    times_us = slowest_us(case)
    assert times_us is not None
    return times_us[list(MOE_PHASES)].sum(axis=1)


def by_layer_ms(case: Case) -> pd.DataFrame:
    """Milliseconds of each layer: columns attention, moe, dense and rest; mean over ranks, median over iterations."""
    rows = case.samples
    rows = rows[(rows["kind"] == "breakdown") & rows["phase"].isin(PHASES) & rows["layer"].notna()]
    kinds = rows["phase"].where(~rows["phase"].isin(MOE_PHASES), "moe")
    sums = rows.groupby([rows["layer"].astype(int), kinds, *ITERATION, rows["rank"]])["time_us"].sum()
    means = sums.groupby(level=["layer", "phase", *ITERATION]).mean()
    return means.groupby(level=["layer", "phase"]).median().unstack("phase") / 1e3


def all_layers_ms(case: Case, facts: TimedFacts, median_ms: float, breakdown_layer_ms: float) -> float | None:
    """The pass with all layers, from plain iterations of the built ones and their shares in breakdown iterations."""
    assert facts.whole is not None
    missing = facts.whole.of_layers - facts.whole.num_layers
    if not missing:
        return None
    layers_ms = by_layer_ms(case)
    if layers_ms.empty:
        return None
    of_one = float(layers_ms.loc[facts.whole.moe_layers].sum(axis=1).mean()) / breakdown_layer_ms
    return median_ms * (1 + missing * of_one)


# ---- routing ---------------------------------------------------------------------------------------------------------

# Summed over source ranks; weighted by their tokens; means over batches, then over layers.
COUNTS = [
    "num_tokens", "num_pairs", "padding_pairs", "num_topk_pairs", "num_dropped_pairs", "tokens_without_expert",
    "crossing_pairs", "crossing_copies", "num_image_tokens",
]  # fmt: skip
SHARES = ["topk_share", "entropy", "regime_single_head", "regime_smooth", "regime_plateau"]
ROUTED = [
    "fullest_expert", "fullest_rank", "expert_imbalance", "rank_imbalance", "dropped_share", "retained_mass",
    "below_frontier", "below_frontier_experts", "experts_per_token", "activated_experts", "activated_fullest_rank",
    "moved_gib",
]  # fmt: skip


def joined_routing(case: Case, facts: TimedFacts | RoutedFacts) -> pd.DataFrame:
    """A row per layer and batch of a case, its source ranks joined.

    Columns: ``layer``, ``batch``, ``COUNTS``, ``SHARES``, ``ROUTED``, ``output_error`` and ``reference_error`` (worst
    rank), and pairs as lists: ``load_E``, ``load_R``, ``image_load_E`` (null without images), ``pairs_RR`` (from each
    source rank to each rank's experts, row by row). ``fullest_*`` are over the model's mean, T*K/E and T*K/R, the same
    yardstick for every policy, so that dropping shows as less load; ``*_imbalance`` over the mean of the pairs that are
    computed; ``retained_mass`` is ``metrics.mass_kept``, above 1 where a policy adds experts; ``below_*`` what dropping
    alone keeps at most at the same fullest rank, or with as many activated experts, less what the case keeps, below 0
    where a policy that reroutes keeps more; null where it was not computed.
    """
    rows = case.routing
    layer_N, batch_N = rows["layer"].fillna(-1).to_numpy(dtype=int), rows["batch"].to_numpy()
    rows = rows.take(np.lexsort((rows["rank"], batch_N, layer_N)))
    num_sources = rows["rank"].nunique()  # of which every unit has a row (``reading.check_routing``)
    num_units = len(rows) // num_sources

    def by_unit(names: str | list[str]) -> np.ndarray:
        """Columns, or the lists of one: [U, source ranks, columns or entries]."""
        values = np.stack(rows[names].to_list()) if isinstance(names, str) else rows[names].to_numpy(dtype=float)
        return values.reshape(num_units, num_sources, -1)

    first = rows.iloc[::num_sources]
    counts = dict(zip(COUNTS, np.nansum(by_unit(COUNTS), axis=1).T, strict=True))
    topk_U, tokens_U = counts["num_topk_pairs"], counts["num_tokens"]
    weighted_URS = by_unit(SHARES) * by_unit(["num_tokens"])
    with warnings.catch_warnings(action="ignore"):  # of units without tokens, pairs or an error
        shares = dict(zip(SHARES, np.nansum(weighted_URS, axis=1).T / tokens_U, strict=True))
        errors_U2 = np.nanmax(by_unit(["output_error", "reference_error"]), axis=1)
        dropped_U = counts["num_dropped_pairs"] / topk_U
    load_UE, load_URR = by_unit("load_E").sum(axis=1), by_unit("load_R")
    load_UR = load_URR.sum(axis=1)
    kept_U = mass_kept(rows, np.arange(len(rows)) // num_sources)
    # Slots say where replicas and moved weights are. Elsewhere experts are at their homes, or it is not known.
    in_slots = rows["slot_load_P"].notna().all()
    is_known = in_slots or (
        (isinstance(facts, RoutedFacts) or facts.placement == "contiguous") and case.facts.role != "replication"
    )
    load_UP = by_unit("slot_load_P").sum(axis=1) if in_slots else load_UE
    activated_UR = (load_UP.reshape(num_units, facts.num_ranks, -1) > 0).sum(axis=2)
    most = (np.nan, np.nan)
    if case.frontier is not None:
        most = (case.frontier[name].to_numpy() for name in ("kept_by_load", "kept_by_experts"))
    has_images = rows["image_load_E"].notna().all()
    return pd.DataFrame(
        {
            "layer": first["layer"].astype("Int64").to_numpy(),
            "batch": first["batch"].to_numpy(),
            **counts,
            **shares,
            "output_error": errors_U2[:, 0],
            "reference_error": errors_U2[:, 1],
            "fullest_expert": load_UE.max(axis=1) * load_UE.shape[1] / topk_U,
            "fullest_rank": load_UR.max(axis=1) * load_UR.shape[1] / topk_U,
            "expert_imbalance": imbalance(load_UE),
            "rank_imbalance": imbalance(load_UR),
            "dropped_share": dropped_U,
            "retained_mass": kept_U,
            **dict(zip(("below_frontier", "below_frontier_experts"), (share - kept_U for share in most), strict=True)),
            "experts_per_token": (counts["num_pairs"] - counts["padding_pairs"]) / tokens_U,
            "activated_experts": (load_UE > 0).sum(axis=1),
            "activated_fullest_rank": activated_UR.max(axis=1) if is_known else np.nan,
            "moved_gib": by_unit(["moved_weight_bytes"]).sum(axis=(1, 2)) / 2**30,
            "load_E": list(load_UE),
            "load_R": list(load_UR),
            "image_load_E": list(by_unit("image_load_E").sum(axis=1)) if has_images else None,
            "pairs_RR": list(load_URR.reshape(num_units, -1)),
        }
    )


def routing_means(routing: pd.DataFrame) -> pd.DataFrame:
    """``ROUTED`` by case, means over batches, then over layers; of output errors the worst layer of each batch first.

    Args:
        routing: of ``joined_routing``, with directory, comparison_id and case_id.
    """
    case = ["directory", "comparison_id", "case_id"]
    if routing.empty:  # no case was measured
        return pd.DataFrame(columns=[*ROUTED, "output_error"])
    by_layer = routing.groupby([*case, "layer"], dropna=False)[ROUTED].mean()
    errors = routing.groupby([*case, "batch"])["output_error"].max()
    return by_layer.groupby(case).mean().join(errors.groupby(case).mean())


def source_loads(routing: pd.DataFrame, column: str) -> tuple[pd.Index, np.ndarray]:
    """The batches, ascending, and their loads, source ranks in their order: [B, source ranks, E or R]."""
    batch_N = routing["batch"].to_numpy()
    order_N = np.lexsort((routing["rank"].to_numpy(), batch_N))
    batches = pd.Index(np.unique(batch_N), name="batch")
    load_NE = np.stack(routing[column].to_numpy()[order_N])
    return batches, load_NE.reshape(len(batches), -1, load_NE.shape[1])


def pairs_by_rank(routing: pd.DataFrame, facts: TimedFacts) -> tuple[pd.Index, np.ndarray]:
    """Pairs of each rank's own experts, all source ranks of its replica together; experts are placed contiguously.

    Returns:
        The batches, and the pairs [B, ranks, L].
    """
    batches, load_BRE = source_loads(routing, "load_E")
    replicas = load_BRE.reshape(len(batches), -1, facts.num_ranks, facts.num_experts).sum(axis=2)
    return batches, replicas.reshape(len(batches), -1, facts.num_experts // facts.num_ranks)
