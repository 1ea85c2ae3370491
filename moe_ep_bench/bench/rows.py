"""Write what ranks measured and routed as rows of ``samples`` and ``routing``.

Shapes: R = ranks, V = cases, S = steps, B = batches, C = columns of a sample, M = numbers of all metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.plan import CaseSpec, Comparison
from moe_ep_bench.schema import METRICS, TOTAL, PhaseKey, layer_and_phase
from moe_ep_bench.timing.protocol import HOST, THREAD_CPU, Step


def sample_columns(
    steps: Sequence[Step], times_RSC: Sequence[np.ndarray], columns: Sequence[PhaseKey]
) -> dict[str, list[Any]]:
    """Long rows of one case: every phase of every layer that occurred, of every rank and step."""
    layers, phases = zip(*map(layer_and_phase, columns), strict=True)
    host, cpu = columns.index(HOST), columns.index(THREAD_CPU)
    times = np.stack(times_RSC)
    occurred = ~np.isnan(times)
    occurred[..., [host, cpu]] = False
    places = [index.tolist() for index in np.nonzero(occurred)]
    is_total = [phases[column] == TOTAL for column in places[2]]
    return {
        "rank": places[0],
        "batch": [steps[step].batch for step in places[1]],
        "iteration": [steps[step].iteration for step in places[1]],
        "kind": [steps[step].kind for step in places[1]],
        "layer": [layers[column] for column in places[2]],
        "phase": [phases[column] for column in places[2]],
        "time_us": times[occurred].tolist(),
        **{
            name: [
                float(times[rank, step, column]) if total else None
                for rank, step, total in zip(*places[:2], is_total, strict=True)
            ]
            for name, column in (("host_us", host), ("thread_cpu_us", cpu))
        },
    }


def write_case(
    job: Job,
    comparison: Comparison,
    case: CaseSpec,
    steps: Sequence[Step],
    times_RSC: Sequence[np.ndarray],
    columns: Sequence[PhaseKey],
    routing: dict[str, list[Any]],
    layers: Sequence[int | None] = (None,),
) -> None:
    """Write the parts of one case: all ranks' samples, and what they routed.

    Args:
        columns: of a sample.
        routing: rows of ``routing_columns``, in which a batch has a row for each of ``layers``.
        layers: that were routed; None = a layer alone.
    """
    identify = partial(job.identity, comparison, case)
    samples = sample_columns(steps, times_RSC, columns)
    # Routing is the same in every launch. The part with the times is what makes a case finished: last.
    if not job.directory.is_done("routing", case.case_id):
        places = {
            "batch": [row // len(layers) for row in routing["batch"]],
            "layer": [layers[row % len(layers)] for row in routing["batch"]],
        }
        job.directory.write("routing", case.case_id, {**identify(len(routing["rank"])), **routing, **places})
    job.directory.write("samples", case.case_id, {**identify(len(samples["rank"])), **samples}, job.launch)


class PackedMetrics:
    """Metrics of many rows as one float64 array: lists of objects take many times the memory.

    Integers below 2**53 stay exact; None is NaN.

    Attributes:
        keys: how many numbers each metric takes (0 = a scalar), in order; empty before the first row.
        numbers: float64 [*shape, M].
    """

    def __init__(self, *shape: int) -> None:
        self._shape = shape
        self.keys: dict[str, int] = {}
        self.numbers = np.empty((*shape, 0))

    def put(self, index: tuple[int, ...], row: Mapping[str, Any]) -> None:
        """Take in a row; all rows have the same metrics as the first one."""
        self._allocate({key: len(value) if isinstance(value, list) else 0 for key, value in row.items()})
        flat: list[float] = []
        for key, length in self.keys.items():
            value = row[key]
            flat.extend(value if length else [float("nan") if value is None else float(value)])
        self.numbers[index] = flat

    def put_all(self, index: tuple[int | slice, ...], rows: PackedMetrics) -> None:
        """Take in many rows at once."""
        self._allocate(rows.keys)
        self.numbers[index] = rows.numbers

    def _allocate(self, keys: dict[str, int]) -> None:
        if not self.keys:
            self.keys = keys
            self.numbers = np.full((*self._shape, sum(max(length, 1) for length in keys.values())), np.nan)

    def column(self, key: str) -> np.ndarray:
        """One metric of all rows: a view, float64 [*shape], with a length of its own [*shape, length]."""
        begin = 0
        for other, length in self.keys.items():
            if other == key:
                return self.numbers[..., begin : begin + length] if length else self.numbers[..., begin]
            begin += max(length, 1)
        raise KeyError(key)


def packed_metrics(rows_VB: Sequence[Sequence[dict[str, Any]]]) -> tuple[dict[str, int], Tensor]:
    """Metrics of this rank as float64 [V, B, numbers], and how many numbers each key takes (``PackedMetrics``).

    Tensors travel between ranks where pickled objects should not.
    """
    if not rows_VB:
        return {}, torch.empty(0, 0, 0, dtype=torch.float64)
    packed = PackedMetrics(len(rows_VB), len(rows_VB[0]))
    for number, rows in enumerate(rows_VB):
        for batch, row in enumerate(rows):
            packed.put((number, batch), row)
    return packed.keys, torch.from_numpy(packed.numbers)


def routing_columns(keys: dict[str, int], metrics_RBM: Sequence[Tensor]) -> dict[str, list[Any]]:
    """Rows of one case, one per rank and batch, from what the ranks sent."""
    rows: dict[str, list[Any]] = defaultdict(list)
    for rank, metrics_BM in enumerate(metrics_RBM):
        for batch, numbers in enumerate(metrics_BM.tolist()):
            rows["rank"].append(rank)
            rows["batch"].append(batch)
            position = 0
            for key, length in keys.items():
                values = numbers[position : position + max(length, 1)]
                position += max(length, 1)
                kind = int if METRICS[key].is_integer else float
                values = [None if np.isnan(value) else kind(value) for value in values]
                rows[key].append(values if length else values[0])
    return rows
