"""Write what ranks measured and routed as rows of ``samples`` and ``routing``.

Shapes: V = cases, R = ranks, S = steps, C = columns of a sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from moe_ep_bench.bench.comparison import CaseSpec, Comparison
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import BESIDE_TOTAL, TOTAL, UNACCOUNTED, PhaseKey, layer_and_phase, phases_in_depth
from moe_ep_bench.timing.protocol import COLUMNS, PLAIN, Step, sample_keys

Row = dict[str, Any]
"""Values by column of a table."""


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


def identity(run_id: str, comparison: Any, case: CaseSpec) -> dict[str, Any]:
    """The columns that say which case rows belong to; ``comparison`` is of ``plan``, or of ``quality``."""
    return {
        "run_id": run_id,
        "case_id": case.case_id,
        "comparison_id": comparison.comparison_id,
        "mode": comparison.mode,
        "subject": comparison.scope,
        "backend": comparison.backend,
        "model": comparison.model.name,
        "policy": case.name,
        "policy_params": json.dumps(case.params, sort_keys=True),
        "num_ranks": comparison.ep_size,
        "status": "ok",
    }


@dataclass(eq=False)
class Outcome:
    """What measuring a comparison came to, of all ranks; what is by case is so by id.

    Attributes:
        unmeasured: status and reason of cases without times.
        steps, columns: of samples.
        times: of measured cases, microseconds [R, S, C].
        rows: of each, rows of the table ``routing``: of every batch one for each rank and MoE layer.
        frontiers: of each, rows of the table ``frontier``; there may be none.
        conditions: under which they were timed; None = modelled, or nothing was.
    """

    unmeasured: dict[str, tuple[str, str]] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    columns: Sequence[PhaseKey] = ()
    times: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    frontiers: dict[str, list[Row]] = field(default_factory=dict)
    conditions: dict[str, Any] | None = None


def write_launch(directory: RunDirectory, run_id: str, comparison: Comparison, launch: int, outcome: Outcome) -> None:
    """Write the parts of one launch of a comparison: what ranks routed, then samples, which make it finished."""
    facts = {case.case_id: identity(run_id, comparison, case) for case in comparison.cases}
    write_routing(directory, comparison, {key: facts[key] for key in outcome.times}, outcome.rows, outcome.frontiers)

    def rows() -> Iterator[dict[str, Any]]:
        for key, (status, reason) in outcome.unmeasured.items():
            yield {**facts[key], "status": status, "reason": reason}
        for key, times_RSC in outcome.times.items():
            yield {**facts[key], **_sample_columns(outcome.steps, times_RSC, outcome.columns)}

    conditions = outcome.conditions and {"run_id": run_id, **outcome.conditions}
    directory.write("samples", comparison.comparison_id, rows(), launch, conditions=conditions)


def write_routing(
    directory: RunDirectory,
    comparison: Comparison,
    facts: Mapping[str, Mapping[str, Any]],
    rows: Mapping[str, Sequence[Row]],
    frontiers: Mapping[str, Sequence[Row]],
) -> None:
    """Write what ranks routed in cases; see ``Outcome``. Rows of other cases stay.

    Args:
        facts: by id, columns that say which case it is (``identity``).
    """
    part = comparison.comparison_id
    known = {
        key: {"comparison_id": part, "case_id": key} | as_columns(frontiers[key]) for key in facts if frontiers.get(key)
    }
    if known:
        directory.write("frontier", part, known.values(), replaces=known.keys())
    if facts:
        by_rank = (sorted(rows[key], key=itemgetter("rank")) for key in facts)
        routed = ({**of_case, **as_columns(listed)} for of_case, listed in zip(facts.values(), by_rank, strict=True))
        directory.write("routing", part, routed, replaces=facts.keys())


def as_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Rows as columns; what a row lacks is None."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}


def _sample_columns(steps: Sequence[Step], times_RSC: np.ndarray, columns: Sequence[PhaseKey]) -> dict[str, Any]:
    """Long rows of one case: every phase of every layer that occurred, of every rank and step."""
    layers, phases = zip(*map(layer_and_phase, columns), strict=True)
    whole = {name: columns.index(name) for name in BESIDE_TOTAL}
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
