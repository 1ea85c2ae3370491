"""Write what ranks measured and routed as rows of ``samples`` and ``routing``.

Shapes: R = ranks, V = cases, S = steps, B = batches, C = columns of a sample, M = numbers of all metrics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.plan import CaseSpec, Comparison
from moe_ep_bench.bench.subjects import LayerSubject
from moe_ep_bench.layer.depth import phases_in_depth
from moe_ep_bench.schema import METRICS, TOTAL, PhaseKey, layer_and_phase
from moe_ep_bench.timing.protocol import COLUMNS, HOST, THREAD_CPU, Step, sample_keys


def columns_of(subject: LayerSubject) -> tuple[PhaseKey, ...]:
    """Columns of a sample: every phase that the layer or model may pass, and what concerns the whole iteration."""
    if subject.name == "layer":
        return COLUMNS
    return sample_keys(phases_in_depth(subject.num_layers, subject.moe_layers))


def _sample_columns(steps: Sequence[Step], times_RSC: np.ndarray, columns: Sequence[PhaseKey]) -> dict[str, list[Any]]:
    """Long rows of one case: every phase of every layer that occurred, of every rank and step."""
    layers, phases = zip(*map(layer_and_phase, columns), strict=True)
    host, cpu = columns.index(HOST), columns.index(THREAD_CPU)
    occurred = ~np.isnan(times_RSC)
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
        "time_us": times_RSC[occurred].tolist(),
        **{
            name: [
                float(times_RSC[rank, step, column]) if total else None
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
    times_RSC: np.ndarray,
    columns: Sequence[PhaseKey],
    metrics: PackedMetrics,
) -> None:
    """Write the parts of one case: all ranks' samples, and what they routed.

    Args:
        columns: of a sample.
        metrics: [R, rows], of each batch a row for each MoE layer.
    """
    identify = partial(job.identity, comparison, case)
    samples = _sample_columns(steps, times_RSC, columns)
    # Routing is the same in every launch. The part with the times is what makes a case finished: last.
    if not job.directory.is_done("routing", case.case_id):
        routing = _routing_columns(metrics, comparison.subject.moe_layers)
        job.directory.write("routing", case.case_id, {**identify(len(routing["rank"])), **routing})
    job.directory.write("samples", case.case_id, {**identify(len(samples["rank"])), **samples}, job.launch)


class PackedMetrics:
    """Metrics of many rows as one float64 array: lists of objects take many times the memory.

    Arrays can travel between ranks, where pickled objects should not. Integers below 2**53 stay exact; None is NaN.

    Attributes:
        keys: how many numbers each metric takes (0 = a scalar), in order; empty before the first row.
        numbers: float64 [*shape, M].
    """

    def __init__(self, *shape: int) -> None:
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

    def with_numbers(self, numbers: np.ndarray) -> PackedMetrics:
        """The same metrics of other rows."""
        other = PackedMetrics()
        other.keys, other.numbers = self.keys, numbers
        return other

    def _allocate(self, keys: dict[str, int]) -> None:
        if not self.keys:
            self.keys = keys
            shape = *self.numbers.shape[:-1], sum(max(length, 1) for length in keys.values())
            self.numbers = np.full(shape, np.nan)

    def column(self, key: str) -> np.ndarray:
        """One metric of all rows: a view, float64 [*shape], with a length of its own [*shape, length]."""
        begin = 0
        for other, length in self.keys.items():
            if other == key:
                return self.numbers[..., begin : begin + length] if length else self.numbers[..., begin]
            begin += max(length, 1)
        raise KeyError(key)


def _routing_columns(metrics: PackedMetrics, layers: Sequence[int | None]) -> dict[str, list[Any]]:
    """Rows of one case, one per rank, batch and layer, from the metrics of [R, rows]."""
    num_ranks, num_rows = metrics.numbers.shape[:2]
    places = list(itertools.product(range(num_ranks), range(num_rows)))
    columns: dict[str, list[Any]] = {
        "rank": [rank for rank, _ in places],
        "batch": [row // len(layers) for _, row in places],
        "layer": [layers[row % len(layers)] for _, row in places],
    }
    for key, length in metrics.keys.items():
        kind = int if METRICS[key].is_integer else float
        rows = metrics.column(key).reshape(len(places), -1).tolist()
        values = [[None if math.isnan(value) else kind(value) for value in row] for row in rows]
        columns[key] = values if length else [value for (value,) in values]
    return columns
