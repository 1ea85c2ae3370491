"""Where the time of one case goes, and what its links and experts achieved.

*Layer time.* Ranks meet in every layer, so the slowest one's time is the layer's: the maximum over
ranks of ``total``, per iteration, from plain iterations (nothing is read inside them).

*Phases* come from breakdown iterations, which hold extra clock readings and barriers; what these cost and what no
phase covers are reported beside. A mean over ranks shows what ranks lose to waiting, the slowest rank shows what they
wait *for*. On GPUs each wait is less what its probe costs when nobody waits (``probe_floor_us``).

*Bytes* are counted as (token, expert) pairs, which Megatron-Core's all-to-all sends, and as copies deduplicated per
rank, which DeepEP would send. *Bandwidth* follows nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is a rank's
buffer over the time, bus bandwidth takes out the 1/n of it that stays, for n ranks. With uneven splits the fullest
rank's buffer counts, the larger of what it sends and receives, its own share included, and the slowest rank's time,
waiting excluded.

*Experts* are judged on the rank with the most pairs: operations against this device's own square matmul, bytes against
its own copy. The bytes are each operand once: activated weights, inputs, both intermediates written and read, outputs.
Where experts are cut, a rank computes its slice of every pair of its tensor group, and reads its slice of the weights;
a dispatch is then an all-to-all and an all-gather, for which there is no one bandwidth.

Shapes: B = batches, R = EP ranks, L = experts of a rank, N = rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.fidelity import pairs_by_rank, source_loads
from moe_ep_bench.analysis.load import Case, Comparison, Conditions
from moe_ep_bench.analysis.parts import PHASE_AXIS, Iterations
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.schema import LAYER_PHASES, PHASES, TOTAL, UNACCOUNTED, WAITING_PHASES, phase_groups

# Groups of a layer's phases, and what no phase covers.
MODEL_GROUPS = phase_groups("model")
GROUPS = {**phase_groups("layer"), UNACCOUNTED: (UNACCOUNTED,)}

# A host that is still issuing work when this much of the time is over has kept the device waiting.
_HOST_BOUND = 0.95
# Beside each pair's hidden state its routing weight travels, in float32.
_WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Breakdown:
    """What the breakdown iterations of a case say.

    Attributes:
        group_ms: time of each of ``GROUPS``, mean over ranks, then median over iterations.
        slowest_phase: the phase that takes longest (median over iterations) on the rank that is
            slowest in each iteration; ``waiting (dispatch)`` and the like when it is a wait.
        unaccounted_share: time that no phase covers, over total, on the slowest rank: sum over sum
            within a batch, then the median over batches.
        policy_share: likewise of the phase ``policy``: what choosing experts costs.
        layer_ms: median layer time of these iterations, probes included.
    """

    group_ms: dict[str, float]
    slowest_phase: str
    unaccounted_share: float
    policy_share: float
    layer_ms: float


@dataclass(frozen=True)
class Rates:
    """Medians over breakdown iterations.

    Attributes:
        crossing_pair_bytes, crossing_copy_bytes: hidden states that leave their rank in a dispatch, all ranks
            together, mean over batches: as pairs, and deduplicated.
        dispatch_gbps, combine_gbps: algorithm bandwidth, 1e9 bytes per second; None with one rank, under another
            dispatcher than the all-to-all, where experts are cut, and where these phases were not timed.
        dispatch_bus_gbps, combine_bus_gbps: bus bandwidth.
        experts_tflops: of the rank with the most pairs.
        experts_of_matmul: over that rank's square matmul.
        experts_of_copy: bytes that the experts must move, per second, over that rank's copy bandwidth.
    """

    crossing_pair_bytes: float
    crossing_copy_bytes: float
    dispatch_gbps: float | None
    dispatch_bus_gbps: float | None
    combine_gbps: float | None
    combine_bus_gbps: float | None
    experts_tflops: float
    experts_of_matmul: float
    experts_of_copy: float


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


def probe_floor_us(comparison: Comparison, conditions: Sequence[Conditions]) -> float:
    """What a probe costs on a GPU when nobody waits: median over launches and ranks; 0 where that is not known."""
    known = [rank.probe_floor_us for launch in conditions for rank in launch.ranks if rank.probe_floor_us is not None]
    return float(np.median(known)) if known and comparison.backend == "nccl" else 0.0


def break_down(case: Case, floor_us: float = 0.0) -> Breakdown | None:
    """Reduce the breakdown iterations of a case; None when it has none. ``floor_us`` is taken off every wait."""
    if case.breakdown.index.empty:
        return None
    times = case.breakdown.less(floor_us, WAITING_PHASES)
    slowest_us_IP = times.on_slowest()
    batches, batch_I = np.unique(times.index.get_level_values("batch"), return_inverse=True)
    per_batch_us_BP = np.zeros((len(batches), slowest_us_IP.shape[1]))
    np.add.at(per_batch_us_BP, batch_I, slowest_us_IP)
    median_us = dict(zip(PHASE_AXIS, np.median(slowest_us_IP, axis=0), strict=True))
    shares_P = np.median(per_batch_us_BP / per_batch_us_BP[:, [PHASE_AXIS.index(TOTAL)]], axis=0)
    shares = dict(zip(PHASE_AXIS, shares_P, strict=True))
    slowest = max(LAYER_PHASES, key=median_us.__getitem__)
    return Breakdown(
        group_ms=times.mean_ms(GROUPS),
        # Waiting is not the phase that it stands before.
        slowest_phase=f"waiting ({PHASES[slowest].meets})" if PHASES[slowest].is_waiting else slowest,
        unaccounted_share=float(shares[UNACCOUNTED]),
        policy_share=float(shares["policy"]),
        layer_ms=float(median_us[TOTAL]) / 1e3,
    )


def rates(case: Case, comparison: Comparison, conditions: Sequence[Conditions]) -> Rates | None:
    """Rates of one case; None where its experts were not timed, and of whole models, whose phases are many layers'."""
    times = case.breakdown
    if comparison.whole is not None or not conditions or "experts" not in times.occurred:
        return None
    hidden_bytes = comparison.hidden_size * VALUE_BYTES[comparison.dtype]
    crossing_bytes = case.routing.groupby("batch")[["crossing_pairs", "crossing_copies"]].sum().mean() * hidden_bytes
    pairs = _fullest_buffer_pairs(case.routing, comparison.num_ranks)
    gbps: dict[str, float | None] = {}
    for phase, pair_bytes in (("dispatch", hidden_bytes + _WEIGHT_BYTES), ("combine", hidden_bytes)):
        found = _algorithm_gbps(times, phase, pairs * pair_bytes, comparison)
        gbps[f"{phase}_gbps"] = found
        gbps[f"{phase}_bus_gbps"] = None if found is None else found * (comparison.num_ranks - 1) / comparison.num_ranks
    tflops, of_matmul, of_copy = _expert_rates(case, comparison, conditions)
    return Rates(
        *map(float, crossing_bytes), **gbps, experts_tflops=tflops, experts_of_matmul=of_matmul, experts_of_copy=of_copy
    )


def _fullest_buffer_pairs(routing: pd.DataFrame, num_ranks: int) -> pd.Series:
    """Pairs of the fullest rank's buffer, by batch: the larger of what it sends and receives, local pairs included."""
    batches, load_BRR = source_loads(routing, "load_R")
    replicas = load_BRR.reshape(len(batches), -1, num_ranks, num_ranks)
    fullest_B = np.maximum(*(replicas.sum(axis=axis).max(axis=(1, 2)) for axis in (3, 2)))
    return pd.Series(fullest_B, batches, dtype=float)


def _algorithm_gbps(times: Iterations, phase: str, buffer_bytes: pd.Series, comparison: Comparison) -> float | None:
    """Algorithm bandwidth of an all-to-all."""
    is_one_transfer = comparison.dispatcher == "alltoall" and comparison.expert_tensor_parallel == 1
    if comparison.num_ranks == 1 or not is_one_transfer or phase not in times.occurred:
        return None
    bytes_I = buffer_bytes.loc[times.index.get_level_values("batch")].to_numpy()
    return float(np.median(bytes_I / times.of(phase).max(axis=1))) / 1e3


def _expert_rates(case: Case, comparison: Comparison, conditions: Sequence[Conditions]) -> tuple[float, float, float]:
    """TFLOP/s, its share of the matmul's, and the share of the copy's bandwidth."""
    hidden, ffn, size = comparison.hidden_size, comparison.slice_size, VALUE_BYTES[comparison.dtype]
    batches, pairs_BRL = pairs_by_rank(case.routing, comparison)
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
    tflops_I = 6 * hidden * ffn * pairs_I / time_us_I / 1e6
    moved_bytes_I = size * (3 * hidden * ffn * activated_I + pairs_I * (2 * hidden + 6 * ffn))
    found = tflops_I, tflops_I / ceilings[0], moved_bytes_I / time_us_I / 1e3 / ceilings[1]
    tflops, of_matmul, of_copy = (float(np.median(values_I)) for values_I in found)
    return tflops, of_matmul, of_copy
