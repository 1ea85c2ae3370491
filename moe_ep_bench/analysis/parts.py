"""Read the files of a results directory and check them: ``run.json`` and Parquet parts.

A part is trusted only after it has been held against the schema and against what run.json says of its case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from moe_ep_bench.errors import UserError
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import FRONTIER_SCHEMA, LAYER_PHASES, PHASES, SCHEMA_VERSION, STATUSES, TOTAL, UNACCOUNTED

ITERATION = ["launch", "batch", "iteration", "kind"]
SAMPLE = ["rank", *ITERATION, "layer", "phase", "time_us", "host_us"]
# What a measured routing row must hold. The two ratios of masses are exempt: a rank without valid tokens has none.
_ROUTING_NEEDS = ("rank", "batch", "num_tokens", "load_E", "load_R", "num_topk_pairs", "num_dropped_pairs")

_Read = TypeVar("_Read")


class ResultsError(UserError):
    """A results directory, or a file of one, that cannot be read; the message is one line for the user."""


class Tried:
    """Calls a reader; its error passes through, or becomes a line where lines are collected."""

    def __init__(self, lines: list[str] | None) -> None:
        self._lines = lines

    def __call__(self, read: Callable[..., _Read], *arguments: Any) -> _Read | None:
        try:
            return read(*arguments)
        except ResultsError as error:
            self.error(error)
            return None

    def error(self, error: ResultsError) -> None:
        if self._lines is None:
            raise error
        self._lines.append(str(error))


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def read_run_json(path: Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        ResultsError: it is missing, damaged or of another version.
    """
    if path.parent.is_file():
        raise ResultsError(f"{path.parent}: is a file; expected a directory that `moe-ep-bench` has written")
    if not path.parent.is_dir():
        raise ResultsError(f"{path.parent}: no such directory")
    if not path.is_file():
        raise ResultsError(f"{path}: missing; a results directory is one that `moe-ep-bench` has written")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: damaged, not JSON: {one_line(error)}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ResultsError(f"{path}: schema_version: expected a whole number, got {version!r}")
    if version != SCHEMA_VERSION:
        hint = "; it is newer than this program, which needs updating" if version > SCHEMA_VERSION else ""
        raise ResultsError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {version}{hint}")
    return content


def read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a part; the default is all.

    Raises:
        ResultsError: it is damaged, or lacks a column of the schema.
    """
    try:
        # Quicker than pq.read_table by half: a part is one small file.
        with pq.ParquetFile(path) as part:
            found = part.schema_arrow
            for field in schema:
                if field.name not in found.names or found.field(field.name).type != field.type:
                    raise ResultsError(f"{path}: foreign, expected a column {field.name} of type {field.type}")
            return part.read(list(columns or schema.names))
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {one_line(error)}") from error


def read_frontier(files: RunDirectory, case_id: str) -> pd.DataFrame | None:
    """A case's part of the table ``frontier``; None where it has none."""
    path = files.path("frontier", case_id)
    return read_table(path, FRONTIER_SCHEMA).to_pandas() if path.is_file() else None


def read_part(
    path: Path, schema: pa.Schema, identity: Mapping[str, str], columns: Sequence[str] | None = None
) -> pa.Table:
    """Read columns of a case's part; the default is all.

    Args:
        identity: columns and the value that all their rows must have.

    Raises:
        ResultsError: it is damaged, foreign or empty.
    """
    table = read_table(path, schema, None if columns is None else [*identity, *columns])
    if table.num_rows == 0:
        raise ResultsError(f"{path}: damaged, it has no rows")
    for column, expected in identity.items():
        others = [value for value in pc.unique(table[column]).to_pylist() if value != expected]
        if others:
            raise ResultsError(f"{path}: foreign, {column}: expected {expected!r}, got {others[0]!r}")
    return table


def launches_of(path: Path, samples: pa.Table) -> pd.DataFrame:
    """The run_id, status and reason of each launch, indexed by launch in their order.

    Raises:
        ResultsError: a launch has no status, or several.
    """
    columns = ["launch", "run_id", "status", "reason"]
    rows = samples.group_by(columns, use_threads=False).aggregate([]).to_pandas()
    for _, statuses in rows.groupby("launch", dropna=False)["status"]:
        found = list(statuses.unique())
        if len(found) != 1 or found[0] not in STATUSES:
            raise ResultsError(f"{path}: status: expected one of {', '.join(STATUSES)} in all rows, got {found}")
    return rows.drop_duplicates("launch").set_index("launch").sort_index()


def timings_of(path: Path, samples: pa.Table, world_size: int, phases: Sequence[str] = LAYER_PHASES) -> pd.DataFrame:
    """The samples of a measured case: the columns ``SAMPLE``.

    Args:
        phases: that may occur, beside the total and what is unaccounted for.

    Raises:
        ResultsError: a row lacks what it must have or stands there twice, or an iteration lacks a rank.
    """
    # Categories keep millions of rows fast to compare.
    rows = samples.select(SAMPLE).to_pandas(strings_to_categorical=True)
    for column, allowed in (("kind", ("plain", "breakdown")), ("phase", (*phases, TOTAL, UNACCOUNTED))):
        for value in rows[column].cat.categories.difference(allowed):
            raise ResultsError(f"{path}: {column}: expected one of {', '.join(allowed)}; got {value!r}")
    if rows[["rank", *ITERATION, "phase", "time_us"]].isna().any(axis=None):
        raise ResultsError(f"{path}: damaged, a measured row lacks its rank, batch, iteration or time_us")
    if rows.duplicated(["rank", *ITERATION, "layer", "phase"]).any():
        raise ResultsError(f"{path}: damaged, one rank, iteration, layer and phase stands there twice")
    is_total = rows["phase"] == TOTAL
    if (rows.loc[is_total, "time_us"] <= 0).any():
        raise ResultsError(f"{path}: damaged, a total is not above 0")
    # The slowest rank can be named only when all ranks are there.
    num_totals = is_total.groupby([rows[name] for name in ITERATION], observed=True).sum()
    for (launch, batch, iteration, kind), number in num_totals[num_totals != world_size].items():
        raise ResultsError(
            f"{path}: launch {launch}, batch {batch}, {kind} iteration {iteration}: "
            f"expected totals of {world_size} ranks, got {number}"
        )
    return rows.astype({"kind": object, "phase": object})


@dataclass(frozen=True, eq=False)
class Iterations:
    """Times of one kind of iteration as arrays: I iterations x R ranks x P phases.

    Attributes:
        index: (launch, batch, iteration) of each iteration, ascending.
        time_us: [I, R, P]; 0 where a phase did not occur on a rank.
        host_us: of the totals, [I, R].
        occurred: phases that occurred anywhere.
    """

    index: pd.MultiIndex
    time_us: np.ndarray
    host_us: np.ndarray
    occurred: frozenset[str]

    def of(self, *phases: str) -> np.ndarray:
        """Sum of phases, [I, R]."""
        return self.time_us[:, :, [_PHASE_PLACES[phase] for phase in phases]].sum(axis=2)

    def less(self, floor_us: float, phases: Iterable[str]) -> Iterations:
        """The same with a floor taken off phases, which end at 0."""
        time_us, places = self.time_us.copy(), [_PHASE_PLACES[phase] for phase in phases]
        time_us[:, :, places] = (time_us[:, :, places] - floor_us).clip(min=0.0)
        return replace(self, time_us=time_us)

    def on_slowest(self) -> np.ndarray:
        """Phases of the rank with the longest total in each iteration, [I, P]; of equal ones the first."""
        return self.time_us[np.arange(len(self.index)), self.slowest_rank()]

    def slowest_rank(self) -> np.ndarray:
        return self.of(TOTAL).argmax(axis=1)

    def series(self, values_I: np.ndarray) -> pd.Series:
        return pd.Series(values_I, self.index)


# The last axis of ``Iterations.time_us``.
PHASE_AXIS = (*PHASES, UNACCOUNTED, TOTAL)
_PHASE_PLACES = {phase: place for place, phase in enumerate(PHASE_AXIS)}


def iterations_of(timings: pd.DataFrame, kind: str) -> Iterations:
    """Lay out the samples of plain or of breakdown iterations; a layer's phases are summed over layers already."""
    rows = timings[timings["kind"] == kind]
    names = ["launch", "batch", "iteration"]
    levels, place_N = [], np.zeros(len(rows), dtype=np.int64)
    for name in names:
        values, code_N = np.unique(rows[name].to_numpy(dtype=np.int64), return_inverse=True)
        levels.append(values)
        place_N = place_N * len(values) + code_N
    places, iteration_N = np.unique(place_N, return_inverse=True)
    codes = np.unravel_index(places, [max(len(values), 1) for values in levels])
    ranks, rank_N = np.unique(rows["rank"].to_numpy(dtype=np.int64), return_inverse=True)
    phases, phase_N = np.unique(rows["phase"].to_numpy(dtype=str), return_inverse=True)
    axis_N = np.array([_PHASE_PLACES[phase] for phase in phases], dtype=np.int64)[phase_N]
    time_us = np.zeros((len(places), max(len(ranks), 1), len(PHASE_AXIS)))
    time_us[iteration_N, rank_N, axis_N] = rows["time_us"]
    host_us = np.full(time_us.shape[:2], np.nan)
    is_total_N = axis_N == _PHASE_PLACES[TOTAL]
    host_us[iteration_N[is_total_N], rank_N[is_total_N]] = rows["host_us"].to_numpy(dtype=float)[is_total_N]
    index = pd.MultiIndex.from_arrays([values[code] for values, code in zip(levels, codes, strict=True)], names=names)
    return Iterations(index, time_us, host_us, frozenset(map(str, phases)))


def over_layers(samples: pd.DataFrame) -> pd.DataFrame:
    """Samples with each phase once, the sum of it over all layers that have it; ``layer`` goes."""
    if samples["layer"].isna().all():
        return samples.drop(columns="layer")
    by = ["rank", *ITERATION, "phase"]
    return samples.groupby(by, sort=False).agg({"time_us": "sum", "host_us": "first"}).reset_index()


def check_routing(path: Path, rows: pd.DataFrame, *, num_experts: int, num_ranks: int, world_size: int) -> None:
    """Raise ResultsError unless each rank has a row in every batch, with a load for each expert and expert rank."""
    for column in _ROUTING_NEEDS:
        if rows[column].isna().any():
            raise ResultsError(f"{path}: damaged, a measured row lacks its {column}")
    for column, expected in (("load_E", num_experts), ("load_R", num_ranks)):
        for found in set(rows[column].map(len)) - {expected}:
            raise ResultsError(f"{path}: {column}: expected {expected} entries, got {found}")
    counts = rows.groupby("batch")["rank"].nunique()
    if (counts != world_size).any() or rows.duplicated(["rank", "batch"]).any():
        raise ResultsError(f"{path}: expected one row for each of {world_size} ranks in every batch")
