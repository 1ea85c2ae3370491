"""Write what ranks measured and routed as rows of ``samples`` and ``routing``.

Shapes: V = cases, R = ranks, S = steps, B = batches, C = columns of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.job import Job
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import METRICS, TOTAL, UNACCOUNTED, PhaseKey, layer_and_phase, phases_in_depth
from moe_ep_bench.timing.protocol import COLUMNS, PLAIN, Step, sample_keys
from moe_ep_bench.timing.timer import HOST, THREAD_CPU


def columns_of(comparison: Comparison) -> tuple[PhaseKey, ...]:
    """Columns of a sample: every phase that the layer or model may pass, and what concerns the whole iteration."""
    if comparison.scope == "layer":
        return COLUMNS
    return sample_keys(phases_in_depth(comparison.num_layers, list(comparison.workloads)))


class Samples:
    """Times of cases: float64 [V, S, C] microseconds, NaN where a phase did not occur."""

    def __init__(self, cases: Sequence[Any], steps: Sequence[Step], columns: Sequence[PhaseKey]) -> None:
        self.steps, self.columns = steps, columns
        self.times_VSC = np.full((len(cases), len(steps), len(columns)), np.nan)
        self._step, self._column = ({key: place for place, key in enumerate(keys)} for keys in (steps, columns))

    def add(self, case: int, step: Step, times: Mapping[PhaseKey, float]) -> None:
        """Take in one iteration; of a plain one nothing was to be accounted for."""
        for name, time_us in times.items():
            if step.kind != PLAIN or name != UNACCOUNTED:
                self.times_VSC[case, self._step[step], self._column[name]] = time_us


class PackedMetrics(dict[str, np.ndarray]):
    """Metrics of many rows as float64 arrays, [*shape] or of lists [*shape, length]: many dicts take far more memory.

    Integers below 2**53 stay exact; None is NaN.
    """

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def put(self, index: tuple[int | slice, ...], row: Mapping[str, Any]) -> None:
        """Take in a row, or with a slice in ``index`` several rows as arrays."""
        num_slices = sum(isinstance(place, slice) for place in index)
        for key, value in row.items():
            if key not in self:
                self[key] = np.full((*self.shape, *np.shape(value)[num_slices:]), np.nan)
            self[key][index] = np.nan if value is None else value


def write_case(
    job: Job,
    comparison: Comparison,
    case: CaseSpec,
    samples: Samples,
    times_RSC: np.ndarray,
    metrics: Mapping[str, np.ndarray],
    frontier: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the parts of one case: all ranks' samples, and what they routed.

    Args:
        samples: whose steps and columns these are.
        metrics, frontier: see ``write_routing``.
    """
    # Routing is the same in every launch. The part with the times is what makes a case finished: last.
    facts = job.identity(comparison, case)
    if not job.directory.is_done("routing", case.case_id):
        write_routing(job.directory, facts, comparison, metrics, frontier)
    rows = _sample_columns(samples.steps, times_RSC, samples.columns)
    job.directory.write("samples", case.case_id, {**facts, **rows}, job.launch)


def write_routing(
    directory: RunDirectory,
    facts: Mapping[str, Any],
    comparison: Comparison,
    metrics: Mapping[str, np.ndarray],
    frontier: Sequence[Mapping[str, Any]],
) -> None:
    """Write what ranks routed in a case.

    Args:
        facts: columns that say which case it is (``job.identity``).
        metrics: [R, rows], of each batch a row for each MoE layer.
        frontier: rows of the table of that name; there may be none.
    """
    case_id = facts["case_id"]
    if frontier:
        columns = {name: [row[name] for row in frontier] for name in frontier[0]}
        directory.write("frontier", case_id, {"comparison_id": comparison.comparison_id, "case_id": case_id, **columns})
    layers = list(comparison.row_layers.values())
    directory.write("routing", case_id, {**facts, **_routing_columns(metrics, layers)})


def _sample_columns(steps: Sequence[Step], times_RSC: np.ndarray, columns: Sequence[PhaseKey]) -> dict[str, Any]:
    """Long rows of one case: every phase of every layer that occurred, of every rank and step."""
    layers, phases = zip(*map(layer_and_phase, columns), strict=True)
    whole = {"host_us": columns.index(HOST), "thread_cpu_us": columns.index(THREAD_CPU)}
    occurred = ~np.isnan(times_RSC)
    occurred[..., list(whole.values())] = False
    rank_N, step_N, column_N = (index.tolist() for index in np.nonzero(occurred))
    rows = list(zip(rank_N, step_N, [phases[column] == TOTAL for column in column_N], strict=True))
    return {
        "rank": rank_N,
        **{name: [getattr(steps[step], name) for step in step_N] for name in ("batch", "iteration", "kind")},
        "layer": [layers[column] for column in column_N],
        "phase": [phases[column] for column in column_N],
        "time_us": times_RSC[occurred].tolist(),
        **{
            name: [float(times_RSC[rank, step, column]) if is_total else None for rank, step, is_total in rows]
            for name, column in whole.items()
        },
    }


def _routing_columns(metrics: Mapping[str, np.ndarray], layers: Sequence[int | None]) -> dict[str, list[Any]]:
    """Rows of one case, one per rank, batch and layer, from the metrics of [R, rows]."""
    num_ranks, num_rows = next(iter(metrics.values())).shape[:2]
    rank_N, row_N = np.indices((num_ranks, num_rows)).reshape(2, -1).tolist()
    columns: dict[str, list[Any]] = {
        "rank": rank_N,
        "batch": [row // len(layers) for row in row_N],
        "layer": [layers[row % len(layers)] for row in row_N],
    }
    for key, values in metrics.items():
        flat = values.reshape(num_ranks * num_rows, *values.shape[2:])
        if METRICS[key].is_integer:
            columns[key] = flat.astype(np.int64).tolist()
        else:
            columns[key] = [None if np.isnan(value) else value for value in flat.tolist()]
    return columns
