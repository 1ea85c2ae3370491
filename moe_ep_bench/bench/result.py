"""What measuring a point gives, and how it is written: rows of ``samples``, ``routing`` and ``frontier``.

Shapes: R = ranks, S = steps, C = columns of a sample.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from moe_ep_bench.bench.point import CaseSpec, Point
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.attempts import lost_attempts
from moe_ep_bench.schema import BESIDE_TOTAL, REHEARSAL, TOTAL, UNACCOUNTED, PhaseKey, layer_and_phase, phases_in_depth
from moe_ep_bench.timing.protocol import COLUMNS, PLAIN, Step, sample_keys

Row = dict[str, Any]
"""Values by column of a table."""


def columns_of(point: Point) -> tuple[PhaseKey, ...]:
    """Columns of a sample: every phase that the layer or model may pass, and what concerns the whole iteration."""
    if point.scope == "layer":
        return COLUMNS
    return sample_keys(phases_in_depth(point.num_layers, [layer for layer in point.workloads if layer is not None]))


def identity(run_id: str, point: Any, case: CaseSpec) -> dict[str, Any]:
    """The columns that name the case of rows; ``point`` is of ``plan`` or of ``quality``."""
    return {
        "run_id": run_id,
        "case_id": case.case_id,
        "comparison_id": point.comparison_id,
        "mode": point.mode,
        "subject": point.scope,
        "backend": point.backend,
        "model": point.model.name,
        "policy": case.name,
        "policy_params": json.dumps(case.params, sort_keys=True),
        "num_ranks": point.ep_size,
        "status": "ok",
    }


@dataclass(eq=False)
class Result:
    """What measuring or routing a point gave, of all ranks; what is by case is so by id.

    Attributes:
        unmeasured: status and reason of cases without times.
        steps, columns: of samples, with their places in ``times``.
        times: of measured cases, float64 microseconds [R, S, C], NaN where a phase did not occur.
        rows: of the table ``routing``: of every batch one for each rank and MoE layer.
        frontiers: rows of the table ``frontier``; there may be none.
        conditions: under which they were timed; None = modelled, or nothing was.
    """

    unmeasured: dict[str, tuple[str, str]] = field(default_factory=dict)
    steps: dict[Step, int] = field(default_factory=dict)
    columns: dict[PhaseKey, int] = field(default_factory=dict)
    times: dict[str, np.ndarray] = field(default_factory=dict)
    rows: defaultdict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    frontiers: defaultdict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    conditions: dict[str, Any] | None = None

    def expect(
        self, cases: Iterable[str], steps: Iterable[Step], columns: Iterable[PhaseKey], num_ranks: int = 1
    ) -> None:
        """Make room for the times of cases, of this rank or of all that this process stands for."""
        self.steps = {step: place for place, step in enumerate(steps)}
        self.columns = {column: place for place, column in enumerate(columns)}
        size = num_ranks, len(self.steps), len(self.columns)
        self.times = {case_id: np.full(size, np.nan) for case_id in cases}

    def keep(self, case_id: str, step: Step, times: Mapping[PhaseKey, Any], rank: int | slice = 0) -> None:
        """Take in one iteration of a case, of a rank or of several; of a plain one nothing was to be accounted for."""
        for name, time_us in times.items():
            if step.kind != PLAIN or name != UNACCOUNTED:
                self.times[case_id][rank, self.steps[step], self.columns[name]] = time_us


def write(directory: RunDirectory, run_id: str, point: Point, result: Result, launch: int = 0) -> None:
    """Write the parts of a point: what ranks routed, then of a timed one samples, which make it finished.

    Rows of cases that have none here stay.
    """
    part = point.comparison_id
    facts = {case.case_id: identity(run_id, point, case) for case in point.cases}
    frontiers: list[Row] = [
        {"comparison_id": part, "case_id": key} | as_columns(result.frontiers[key])
        for key in facts
        if result.frontiers.get(key)
    ]
    if frontiers:
        directory.write("frontier", part, frontiers, replaces=[row["case_id"] for row in frontiers])
    if routed := [key for key in facts if key in result.rows]:
        by_rank = {key: sorted(result.rows[key], key=itemgetter("rank")) for key in routed}
        rows = ({**facts[key], **as_columns(of_case)} for key, of_case in by_rank.items())
        directory.write("routing", part, rows, replaces=routed)
    if point.mode == "route":
        return

    def samples() -> Iterator[dict[str, Any]]:
        for key, (status, reason) in result.unmeasured.items():
            yield {**facts[key], "status": status, "reason": reason}
        for key, times_RSC in result.times.items():
            yield {**facts[key], **_sample_columns(result.steps, times_RSC, result.columns)}

    def walked() -> Iterator[dict[str, Any]]:
        for key, (status, reason) in result.unmeasured.items():
            yield {**facts[key], "status": status, "reason": reason, **lost(key)}
        for key, times_RSC in result.times.items():
            yield {**facts[key], **_walked_columns(times_RSC, result.columns, lost(key))}

    def lost(key: str) -> dict[str, Any]:
        return {"lost_attempts": [[*map(str, lost_attempts(directory.attempts, key))]]}

    conditions = result.conditions and {"run_id": run_id, **result.conditions}
    rows = walked() if point.mode == REHEARSAL else samples()
    directory.write(point.table, part, rows, launch, conditions=conditions)
    directory.begun(part).unlink(missing_ok=True)


def as_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Rows as columns; what a row lacks is None."""
    names = dict.fromkeys(chain.from_iterable(dict.fromkeys(map(tuple, rows))))
    return {name: [row.get(name) for row in rows] for name in names}


def _walked_columns(times_RSC: np.ndarray, columns: Iterable[PhaseKey], lost: Mapping[str, Any]) -> dict[str, Any]:
    """A row for each rank of one case: its iterations, and the phases that occurred in them."""
    phases = [layer_and_phase(key)[1] for key in columns]
    beside = {TOTAL, UNACCOUNTED, *BESIDE_TOTAL}
    occurred_RC = ~np.all(np.isnan(times_RSC), axis=1)
    num_ranks, num_steps, _ = times_RSC.shape
    of_ranks = [
        list(
            dict.fromkeys(
                phase for phase, is_there in zip(phases, row, strict=True) if is_there and phase not in beside
            )
        )
        for row in occurred_RC
    ]
    return {
        "rank": np.arange(num_ranks),
        "num_iterations": [num_steps] * num_ranks,
        "phases": of_ranks,
        **{name: reasons * num_ranks for name, reasons in lost.items()},
    }


def _sample_columns(steps: Iterable[Step], times_RSC: np.ndarray, columns: Mapping[PhaseKey, int]) -> dict[str, Any]:
    """Long rows of one case: every phase of every layer that occurred, of every rank and step."""
    layers, phases = zip(*map(layer_and_phase, columns), strict=True)
    whole = {name: columns[name] for name in BESIDE_TOTAL}
    occurred = ~np.isnan(times_RSC)
    occurred[..., list(whole.values())] = False
    rank_N, step_N, column_N = np.nonzero(occurred)
    is_total_N = np.equal(phases, TOTAL)[column_N]
    steps_of = {name: pa.array([getattr(step, name) for step in steps]) for name in ("batch", "iteration", "kind")}
    return {
        "rank": rank_N,
        **{name: values.take(pa.array(step_N)) for name, values in steps_of.items()},
        "layer": pa.array(layers, pa.int32()).take(pa.array(column_N)),
        "phase": pa.array(phases).take(pa.array(column_N)),
        "time_us": times_RSC[occurred],
        **{
            name: pa.array(values_N := times_RSC[rank_N, step_N, column], mask=~is_total_N | np.isnan(values_N))
            for name, column in whole.items()
        },
    }
