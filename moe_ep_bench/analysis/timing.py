"""Where the time of one case goes, and what its links and experts achieved.

*Layer time.* Ranks meet in every layer, so the slowest one's time is the layer's: the maximum over
ranks of ``total``, per iteration, from plain iterations (nothing is read inside them).

*Phases.* They come from breakdown iterations, which hold extra clock readings and barriers. The
slowest rank waits for nobody; the others wait for it. So a mean over ranks shows what the ranks
lose to waiting, and the slowest rank shows what they wait *for*. What the probes cost and what no
phase covers are reported beside, for a breakdown is worth no more than these two allow. On GPUs each wait
is less what its probe costs when nobody waits (``probe_floor_us``).

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

Shapes: B = batches, R = EP ranks, L = experts of a rank, N = rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.fidelity import pairs_by_rank, source_loads
from moe_ep_bench.analysis.load import Case, Comparison, Conditions
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.schema import LAYER_PHASES, PHASES, TOTAL, UNACCOUNTED, WAITING_PHASES, phase_groups

# Groups of a layer's phases, and what no phase covers.
MODEL_GROUPS = phase_groups("model")
GROUPS = {**phase_groups("layer"), UNACCOUNTED: (UNACCOUNTED,)}

ITERATION = ["launch", "batch", "iteration"]

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
    return _totals(case).groupby(ITERATION)["time_us"].max()


def host_time_us(case: Case) -> pd.Series:
    """Time for which the slowest rank's host issued a plain iteration, indexed by (launch, batch, iteration)."""
    return _slowest_rank(case).set_index(ITERATION)["host_us"]


def host_bound_share(case: Case) -> float:
    """Share of plain iterations in which the slowest rank's host issued work until the end: no queue, no device limit.

    Meaningful on a GPU only, where the host runs ahead of the device.
    """
    slowest = _slowest_rank(case)
    return float((slowest["host_us"] >= _HOST_BOUND * slowest["time_us"]).mean())


def _totals(case: Case) -> pd.DataFrame:
    return case.timings[(case.timings["kind"] == "plain") & (case.timings["phase"] == TOTAL)]


def _slowest_rank(case: Case) -> pd.DataFrame:
    """Of each plain iteration the total of the rank that took longest."""
    rows = _totals(case)
    return rows.loc[rows.groupby(ITERATION)["time_us"].idxmax()]


def probe_floor_us(comparison: Comparison, conditions: Sequence[Conditions]) -> float:
    """What a probe costs on a GPU when nobody waits: median over launches and ranks; 0 where that is not known."""
    known = [rank.probe_floor_us for launch in conditions for rank in launch.ranks if rank.probe_floor_us is not None]
    return float(np.median(known)) if known and comparison.backend == "nccl" else 0.0


def break_down(case: Case, floor_us: float = 0.0) -> Breakdown | None:
    """Reduce the breakdown iterations of a case; None when it has none. ``floor_us`` is taken off every wait."""
    rows = case.timings[case.timings["kind"] == "breakdown"]
    if rows.empty:
        return None
    # One row per (launch, batch, iteration, rank), a column per phase; a phase that did not occur took no time.
    times_us = rows.pivot(index=[*ITERATION, "rank"], columns="phase", values="time_us").fillna(0.0)
    times_us = times_us.reindex(columns=[*LAYER_PHASES, UNACCOUNTED, TOTAL], fill_value=0.0)
    waits = list(WAITING_PHASES)
    times_us[waits] = (times_us[waits] - floor_us).clip(lower=0.0)
    slowest_us = times_us.loc[times_us.groupby(level=ITERATION)[TOTAL].idxmax()]
    per_batch_us = slowest_us.groupby(level="batch").sum()
    shares = per_batch_us.div(per_batch_us[TOTAL], axis=0).median()
    mean_us = times_us.groupby(level=ITERATION).mean()
    slowest = str(slowest_us[list(LAYER_PHASES)].median().idxmax())
    return Breakdown(
        group_ms={name: float(mean_us[list(phases)].sum(axis=1).median()) / 1e3 for name, phases in GROUPS.items()},
        # Waiting is not the phase that it stands before.
        slowest_phase=f"waiting ({PHASES[slowest].meets})" if PHASES[slowest].is_waiting else slowest,
        unaccounted_share=float(shares[UNACCOUNTED]),
        policy_share=float(shares["policy"]),
        layer_ms=float(slowest_us[TOTAL].median()) / 1e3,
    )


def rates(case: Case, comparison: Comparison, conditions: Sequence[Conditions]) -> Rates | None:
    """Rates of one case; None where its experts were not timed, and of whole models, whose phases are many layers'."""
    times = case.timings[case.timings["kind"] == "breakdown"]
    if comparison.whole is not None or not conditions or not (times["phase"] == "experts").any():
        return None
    hidden_bytes = comparison.hidden_size * VALUE_BYTES[comparison.dtype]
    crossing_bytes = case.routing.groupby("batch")[["crossing_pairs", "crossing_copies"]].sum().mean() * hidden_bytes
    pairs = _fullest_buffer_pairs(case.routing, comparison.num_ranks)
    gbps: dict[str, float | None] = {}
    for phase, pair_bytes in (("dispatch", hidden_bytes + _WEIGHT_BYTES), ("combine", hidden_bytes)):
        found = _algorithm_gbps(times[times["phase"] == phase], pairs * pair_bytes, comparison)
        gbps[f"{phase}_gbps"] = found
        gbps[f"{phase}_bus_gbps"] = None if found is None else found * (comparison.num_ranks - 1) / comparison.num_ranks
    tflops, of_matmul, of_copy = _expert_rates(case, times[times["phase"] == "experts"], comparison, conditions)
    return Rates(
        *map(float, crossing_bytes), **gbps, experts_tflops=tflops, experts_of_matmul=of_matmul, experts_of_copy=of_copy
    )


def _fullest_buffer_pairs(routing: pd.DataFrame, num_ranks: int) -> pd.Series:
    """Pairs of the fullest rank's buffer, by batch: the larger of what it sends and receives, local pairs included."""
    batches, load_BRR = source_loads(routing, "load_R")
    replicas = load_BRR.reshape(len(batches), -1, num_ranks, num_ranks)
    fullest_B = np.maximum(*(replicas.sum(axis=axis).max(axis=(1, 2)) for axis in (3, 2)))
    return pd.Series(fullest_B, batches, dtype=float)


def _algorithm_gbps(times: pd.DataFrame, buffer_bytes: pd.Series, comparison: Comparison) -> float | None:
    """Algorithm bandwidth of an all-to-all."""
    is_one_transfer = comparison.dispatcher == "alltoall" and comparison.expert_tensor_parallel == 1
    if comparison.num_ranks == 1 or not is_one_transfer or times.empty:
        return None
    slowest_us = times.groupby(ITERATION)["time_us"].max()
    return float((buffer_bytes.reindex(slowest_us.index, level="batch") / slowest_us).median()) / 1e3


def _expert_rates(
    case: Case, experts: pd.DataFrame, comparison: Comparison, conditions: Sequence[Conditions]
) -> tuple[float, float, float]:
    """TFLOP/s, its share of the matmul's, and the share of the copy's bandwidth."""
    hidden, ffn, size = comparison.hidden_size, comparison.slice_size, VALUE_BYTES[comparison.dtype]
    batches, pairs_BRL = pairs_by_rank(case.routing, comparison)
    rank_B = pairs_BRL.sum(axis=2).argmax(axis=1)
    pairs_BL = pairs_BRL[np.arange(len(batches)), rank_B]
    of_batch = pd.DataFrame(
        {"rank": rank_B, "pairs": pairs_BL.sum(axis=1), "activated": (pairs_BL > 0).sum(axis=1)}, batches
    )
    rows = experts.merge(of_batch.reset_index(), on=["batch", "rank"])
    for name in ("matmul_tflops", "copy_gbps"):
        ceilings = np.median([[getattr(rank.ceilings, name) for rank in launch.ranks] for launch in conditions], axis=0)
        # One device may have stood in for all ranks.
        rows[name] = ceilings[rows["rank"].astype(int)] if len(ceilings) > 1 else ceilings[0]
    tflops = 6 * hidden * ffn * rows["pairs"] / rows["time_us"] / 1e6
    moved_bytes = size * (3 * hidden * ffn * rows["activated"] + rows["pairs"] * (2 * hidden + 6 * ffn))
    of_copy = moved_bytes / rows["time_us"] / 1e3 / rows["copy_gbps"]
    return float(tflops.median()), float((tflops / rows["matmul_tflops"]).median()), float(of_copy.median())
