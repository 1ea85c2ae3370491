"""The expert computation by itself: what the emulated expert phase is held against.

The layer's own experts, built as ``emulate`` builds them, get as many rows for each of a rank's experts as the
emulated run counted, outside of the layer and of any phase timer. Of every comparison the baseline and the first
policy other than ``topk`` are timed, on every rank's counts and every batch.

Shapes: B = batches, R = virtual ranks, E = experts, L = E / R, N = rows of a rank, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from moe_ep_bench.bench.plan import BASELINE, POLICY, VIRTUAL, CaseSpec, Comparison, plan
from moe_ep_bench.files import atomic_path
from moe_ep_bench.layer.build import SingleLayer
from moe_ep_bench.layer.experts import DTYPES, seeded_generator
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import initialize_expert_parallel
from moe_ep_bench.layer.virtual import VirtualRanks
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.exit_codes import OK
from moe_ep_bench.runtime.ranks import join
from moe_ep_bench.timing.cache import CacheFlush
from moe_ep_bench.timing.protocol import collections_between
from moe_ep_bench.timing.timer import clock_for

# Of each rank's counts; the first, untimed round lets every shape be seen.
REPETITIONS = 3

ALONE_SCHEMA = pa.schema(
    [
        ("comparison_id", pa.string()),
        ("case_id", pa.string()),
        ("rank", pa.int32()),
        ("batch", pa.int32()),
        ("repetition", pa.int32()),
        ("num_rows", pa.int64()),
        ("time_us", pa.float64()),
    ]
)

_JOIN_TIMEOUT_S = 120.0
_ROWS = 20  # a stream of random numbers that the layer does not use


def time_experts_alone(config: Path, emulated: Path, out: Path, overrides: Sequence[str]) -> int:
    """Time the experts of every comparison that ``emulated`` holds; return the exit status.

    Args:
        emulated: a finished directory of ``emulate`` with the same config and overrides.
        out: the Parquet file to write (``ALONE_SCHEMA``).
    """
    comparisons = plan(config, overrides, VIRTUAL, on_cpu=not torch.cuda.is_available())
    ranks = join(_JOIN_TIMEOUT_S)
    try:
        with device_scope(), torch.inference_mode(), collections_between():
            initialize_expert_parallel(1, _JOIN_TIMEOUT_S)
            rows = [row for one in comparisons for row in _time(one, RunDirectory(emulated), ranks.device)]
    finally:
        ranks.close()
    with atomic_path(out) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=ALONE_SCHEMA), temporary, compression="zstd")
    return OK


def chosen_cases(comparison: Comparison) -> list[CaseSpec]:
    """The baseline, and the first policy that changes the routing (topk where there is no other)."""
    policies = sorted((case for case in comparison.cases if case.role == POLICY), key=lambda case: case.name == "topk")
    return [*(case for case in comparison.cases if case.role == BASELINE), *policies[:1]]


def counts_of(directory: RunDirectory, case: CaseSpec) -> np.ndarray | None:
    """Pairs that each expert gets of each batch, from all ranks: int64 [B, E]; None where the case was not measured."""
    path = directory.path("routing", case.case_id)
    if not path.is_file():
        return None
    rows = pq.read_table(path, columns=["batch", "load_E"]).to_pydict()
    counts_BE = np.zeros((1 + max(rows["batch"]), len(rows["load_E"][0])), dtype=np.int64)
    for batch, load_E in zip(rows["batch"], rows["load_E"], strict=True):
        counts_BE[batch] += load_E
    return counts_BE


def _time(comparison: Comparison, directory: RunDirectory, device: torch.device) -> Iterator[dict[str, Any]]:
    model, num_ranks, settings = comparison.model, comparison.ep_size, comparison.experiment.layer
    dtype = DTYPES[settings.dtype]
    build = partial(SingleLayer, model, dtype, device, seed=settings.seed, parts=comparison.parts)
    experts = VirtualRanks(build, num_ranks).subject.pairs[None].native.experts
    found = [(case, counts_of(directory, case)) for case in chosen_cases(comparison)]
    # Each work is one rank's share of one batch under one case.
    works = [
        (case, rank, batch, counts_L)
        for case, counts_BE in found
        if counts_BE is not None
        for batch, counts_E in enumerate(counts_BE)
        for rank, counts_L in enumerate(counts_E.reshape(num_ranks, -1))
    ]
    most = max((int(counts_L.sum()) for *_, counts_L in works), default=0)
    generator = seeded_generator(device, settings.seed, _ROWS)
    source_ND = torch.randn(most, model.hidden_size, generator=generator, device=device).to(dtype)
    weights_N = torch.rand(most, generator=generator, device=device)
    flush = CacheFlush(device) if comparison.experiment.measure.flush_l2 else None
    for repetition in range(-1, REPETITIONS):
        for case, rank, batch, counts_L in works:
            time_us = _timed(experts, source_ND, weights_N, torch.from_numpy(counts_L), flush)
            if repetition >= 0:
                yield {
                    "comparison_id": comparison.comparison_id,
                    "case_id": case.case_id,
                    "rank": rank,
                    "batch": batch,
                    "repetition": repetition,
                    "num_rows": int(counts_L.sum()),
                    "time_us": time_us,
                }


def _timed(
    experts: torch.nn.Module, source_ND: Tensor, weights_N: Tensor, counts_L: Tensor, flush: CacheFlush | None
) -> float:
    """Microseconds of one run on rows that were just written, as the permutation before the experts leaves them."""
    clock, num_rows = clock_for(source_ND.device), int(counts_L.sum())
    hidden_ND, weights_N = source_ND[:num_rows].clone(), weights_N[:num_rows].clone()
    if flush is not None:
        flush()
    clock.wait()
    start = clock.stamp()
    experts(hidden_ND, counts_L, weights_N)
    end = clock.stamp()
    clock.wait()
    return clock.between_us(start, end)
