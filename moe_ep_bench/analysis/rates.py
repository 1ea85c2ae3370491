"""What the links and the experts achieved, in bytes and operations per second.

*Bytes* are counted twice: as (token, expert) pairs, which Megatron-Core's all-to-all sends, and as
copies deduplicated per rank, which a dispatcher such as DeepEP would send. *Bandwidth* follows
nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is a rank's buffer over the time, bus bandwidth
takes out the 1/n of it that stays, for n ranks. With uneven splits the fullest rank's buffer counts, the larger of
what it sends and what it receives, its own share included, and the slowest rank's time, waiting excluded.

*Experts* are judged on the rank with the most pairs: operations against this device's own square
matmul, bytes against its own copy. The bytes are those of two GEMMs with an activation between
them, each operand once: activated weights, inputs, both intermediates written and read, outputs. Where
experts are cut, a rank computes its slice of every pair of its tensor group, and reads its slice of the
weights; a dispatch is then an all-to-all and an all-gather, for which there is no one bandwidth.

Shapes: B = batches, R = EP ranks, E = experts, L = experts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.load import Case, Comparison, Conditions
from moe_ep_bench.analysis.parts import source_loads
from moe_ep_bench.cost_model.devices import VALUE_BYTES

# Beside each pair's hidden state its routing weight travels, in float32.
_WEIGHT_BYTES = 4


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


def rates(case: Case, comparison: Comparison, conditions: Sequence[Conditions]) -> Rates | None:
    """Rates of one case; None where its experts were not timed, and of whole models, whose phases are many layers'."""
    times = case.timings[case.timings["kind"] == "breakdown"]
    if comparison.whole is not None or not conditions or not (times["phase"] == "experts").any():
        return None
    hidden_bytes = comparison.hidden_size * VALUE_BYTES[comparison.dtype]
    crossing = case.routing.groupby("batch")[["crossing_pairs", "crossing_copies"]].sum().mean()
    buffers = _fullest_buffer_pairs(case.routing, comparison.num_ranks)
    dispatch = _bandwidth(times, "dispatch", buffers * (hidden_bytes + _WEIGHT_BYTES), comparison)
    combine = _bandwidth(times, "combine", buffers * hidden_bytes, comparison)
    return Rates(
        float(crossing["crossing_pairs"]) * hidden_bytes,
        float(crossing["crossing_copies"]) * hidden_bytes,
        *dispatch,
        *combine,
        *_expert_rates(case, times, comparison, conditions),
    )


def _fullest_buffer_pairs(routing: pd.DataFrame, num_ranks: int) -> pd.Series:
    """Pairs of the fullest rank's buffer, by batch: the larger of what it sends and receives, local pairs included."""
    batches, load_BRR = source_loads(routing, "load_R")
    replicas = load_BRR.reshape(len(batches), -1, num_ranks, num_ranks)
    fullest_B = np.maximum(*(replicas.sum(axis=axis).max(axis=(1, 2)) for axis in (3, 2)))
    return pd.Series(fullest_B, batches, dtype=float)


def _bandwidth(
    times: pd.DataFrame, phase: str, buffer_bytes: pd.Series, comparison: Comparison
) -> tuple[float, float] | tuple[None, None]:
    """Algorithm and bus bandwidth of an all-to-all."""
    num_ranks = comparison.num_ranks
    slowest_us = times[times["phase"] == phase].groupby(["launch", "batch", "iteration"])["time_us"].max()
    is_one_transfer = comparison.dispatcher == "alltoall" and comparison.expert_tensor_parallel == 1
    if num_ranks == 1 or not is_one_transfer or slowest_us.empty:
        return None, None
    algorithm_gbps = float((buffer_bytes.reindex(slowest_us.index, level="batch") / slowest_us).median()) / 1e3
    return algorithm_gbps, algorithm_gbps * (num_ranks - 1) / num_ranks


def _expert_rates(
    case: Case, times: pd.DataFrame, comparison: Comparison, conditions: Sequence[Conditions]
) -> tuple[float, float, float]:
    """TFLOP/s, its share of the matmul's, and the share of the copy's bandwidth."""
    hidden, ffn, size = comparison.hidden_size, comparison.slice_size, VALUE_BYTES[comparison.dtype]
    experts = times[times["phase"] == "experts"]
    time_us, rank_N, batch_N = (experts[name].to_numpy() for name in ("time_us", "rank", "batch"))
    matmul_tflops, copy_gbps = (
        np.median([[getattr(rank.ceilings, name) for rank in launch.ranks] for launch in conditions], axis=0)
        for name in ("matmul_tflops", "copy_gbps")
    )
    if len(matmul_tflops) == 1:  # One device stood in for all ranks.
        matmul_tflops, copy_gbps = (np.repeat(value, comparison.world_size) for value in (matmul_tflops, copy_gbps))
    found = []
    for batch, pairs_RL in zip(*pairs_by_rank(case.routing, comparison), strict=True):
        rank = int(pairs_RL.sum(axis=1).argmax())
        pairs, activated = int(pairs_RL[rank].sum()), int((pairs_RL[rank] > 0).sum())
        moved_bytes = size * (3 * hidden * ffn * activated + pairs * (2 * hidden + 6 * ffn))
        for one_us in time_us[(rank_N == rank) & (batch_N == batch)]:
            tflops, gbps = 6 * hidden * ffn * pairs / one_us / 1e6, moved_bytes / one_us / 1e3
            found.append((tflops, tflops / matmul_tflops[rank], gbps / copy_gbps[rank]))
    tflops, of_matmul, of_copy = np.median(found, axis=0)
    return float(tflops), float(of_matmul), float(of_copy)


def pairs_by_rank(routing: pd.DataFrame, comparison: Comparison) -> tuple[pd.Index, np.ndarray]:
    """Pairs of each rank's own experts, all source ranks of its replica together.

    Args:
        routing: a case's. Experts are placed contiguously.

    Returns:
        The batches, and the pairs [B, ranks, L].
    """
    batches, load_BRE = source_loads(routing, "load_E")
    replicas = load_BRE.reshape(len(batches), -1, comparison.num_together, comparison.num_experts).sum(axis=2)
    columns = replicas.reshape(len(batches), -1, comparison.num_experts // comparison.num_ranks)
    # All ranks that hold slices of an expert compute all of its pairs.
    return batches, columns.repeat(comparison.expert_tensor_parallel, axis=1)
