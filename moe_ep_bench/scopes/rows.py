"""From what ranks measured to the columns of ``records``.

Shapes: R = ranks, V = cases, S = steps, B = batches, C = columns of a sample, M = numbers of all metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from moe_ep_bench.measure.protocol import COLUMNS, HOST, THREAD_CPU, Step
from moe_ep_bench.records import PHASES, ROUTING_SCHEMA, TOTAL, UNACCOUNTED


def case_columns(steps: Sequence[Step], times_RSC: Sequence[np.ndarray]) -> dict[str, list[Any]]:
    """Long rows of one case: every phase that occurred, of every rank and step."""
    rows: dict[str, list[Any]] = defaultdict(list)
    host, cpu = COLUMNS.index(HOST), COLUMNS.index(THREAD_CPU)
    for rank, times_SC in enumerate(times_RSC):
        for step, times_C in zip(steps, times_SC, strict=True):
            for phase in (*PHASES, UNACCOUNTED, TOTAL):
                time_us = float(times_C[COLUMNS.index(phase)])
                if np.isnan(time_us):
                    continue
                is_total = phase == TOTAL
                row = {
                    "rank": rank,
                    "batch": step.batch,
                    "iteration": step.iteration,
                    "kind": step.kind,
                    "phase": phase,
                    "time_us": time_us,
                    "host_us": float(times_C[host]) if is_total else None,
                    "thread_cpu_us": float(times_C[cpu]) if is_total else None,
                }
                for name, value in row.items():
                    rows[name].append(value)
    return rows


def packed_metrics(rows_VB: Sequence[Sequence[dict[str, Any]]]) -> tuple[dict[str, int], Tensor]:
    """Metrics of this rank as float64 [V, B, numbers], and how many numbers each key takes (0 = a scalar).

    Tensors travel between ranks where pickled objects should not; integers below 2**53 stay exact.
    """
    if not rows_VB:
        return {}, torch.empty(0, 0, 0, dtype=torch.float64)
    keys = {key: len(value) if isinstance(value, list) else 0 for key, value in rows_VB[0][0].items()}

    def numbers(row: dict[str, Any]) -> list[float]:
        flat: list[float] = []
        for key, length in keys.items():
            value = row[key]
            flat.extend(value if length else [float("nan") if value is None else float(value)])
        return flat

    return keys, torch.tensor([[numbers(row) for row in rows] for rows in rows_VB], dtype=torch.float64)


def routing_columns(keys: dict[str, int], metrics_RBM: Sequence[Tensor]) -> dict[str, list[Any]]:
    """Rows of one case, one per rank and batch, from what the ranks sent."""
    rows: dict[str, list[Any]] = defaultdict(list)
    for rank, metrics_BM in enumerate(metrics_RBM):
        for batch, numbers in enumerate(metrics_BM.tolist()):
            rows["rank"].append(rank)
            rows["batch"].append(batch)
            position = 0
            for key, length in keys.items():
                field = ROUTING_SCHEMA.field(key).type
                whole = pa.types.is_integer(field.value_type if length else field)
                values = numbers[position : position + max(length, 1)]
                position += max(length, 1)
                values = [None if np.isnan(value) else int(value) if whole else value for value in values]
                rows[key].append(values if length else values[0])
    return rows
