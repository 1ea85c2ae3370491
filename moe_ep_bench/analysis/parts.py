"""Read the files of a results directory and check them: ``run.json`` and Parquet parts.

A part is trusted only after it has been held against the schema and against what run.json says of its case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moe_ep_bench.analysis.reading import ResultsError
from moe_ep_bench.errors import UserError, brief, printable
from moe_ep_bench.files import read_json
from moe_ep_bench.presets import problem_words
from moe_ep_bench.results import RunDirectory, check_size
from moe_ep_bench.schema import (
    FRONTIER_SCHEMA,
    LAYER_PHASES,
    METRICS,
    MODES,
    PHASES,
    SCHEMA_VERSION,
    STATUSES,
    TOTAL,
    UNACCOUNTED,
)

ITERATION = ["launch", "batch", "iteration", "kind"]
SAMPLE = ["rank", *ITERATION, "layer", "phase", "time_us", "host_us"]
# What a measured routing row must hold. The two ratios of masses are exempt: a rank without valid tokens has none.
_ROUTING_NEEDS = ("rank", "batch", "num_tokens", "load_E", "load_R", "num_topk_pairs", "num_dropped_pairs")

LEAST_US, MOST_US = 1e-6, 1e15  # no clock tells less, no run lasts so long
MOST_COUNT = 2**53  # beyond which a double does not count

_Read = TypeVar("_Read")


class Tried:
    """Calls a reader; its error passes through, or becomes a line where lines are collected."""

    def __init__(self, lines: list[str] | None) -> None:
        self._lines = lines

    def __call__(self, read: Callable[..., _Read], *arguments: Any) -> _Read | None:
        try:
            return read(*arguments)
        except UserError as error:
            self.error(error)
            return None

    def error(self, error: UserError) -> None:
        if self._lines is None:
            raise error
        self._lines.append(str(error))


class Described(BaseModel):
    """What a JSON document of a results directory says: typed, finite, and free to say more."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


_Type = TypeVar("_Type", bound=Described)


def described(model: type[_Type], path: Path, key: str, content: Any) -> _Type:
    """What ``path`` says under ``key``; ResultsError names the first key that says it otherwise."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([*([key] if key else []), *map(str, first["loc"])]) or "damaged"
        raise ResultsError(f"{path}: {brief(where, 200, quoted=False)}: {problem_words(first)}") from None


class Job(Described):
    """What run.json says of a job; null stands for nothing, as earlier versions wrote it."""

    created: str | None = None
    config: list[dict[str, Any]] | dict[str, Any] | None = None
    environment: dict[str, Any] = Field({})
    hashes: dict[str, Any] = Field({})

    @field_validator("environment", "hashes", mode="before")
    @classmethod
    def _nothing(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _check(self) -> Job:
        ranks = self.environment.get("ranks") or []
        if not isinstance(ranks, list) or not all(isinstance(one, dict) for one in ranks):
            raise UserError(f"environment.ranks: expected a list of keys with values, got {brief(ranks)}")
        for config in self.config if isinstance(self.config, list) else [self.config or {}]:
            if not isinstance(config.get("workload") or {}, dict):
                raise UserError(f"config.workload: expected keys with values, got {brief(config['workload'])}")
            if dotted := _dotted(config):
                raise UserError(f"config: expected keys without dots, got {brief(dotted)}")
        return self


def _dotted(config: dict[str, Any]) -> str | None:
    """A key that would be taken for one inside another."""
    left = [config]
    while left:
        for key, value in left.pop().items():
            if "." in key:
                return key
            left += [value] if isinstance(value, dict) else []
    return None


class Jobs(Job):
    """run.json as far as every mode writes it: the latest job, and all whose rows are there."""

    run_id: str
    mode: Literal[*MODES]
    runs: dict[str, Job] = Field({})


def read_jobs(directory: Path) -> Jobs:
    """What run.json says of the jobs.

    Raises:
        ResultsError: it is missing or damaged.
    """
    path = RunDirectory(directory).run_json
    return described(Jobs, path, "", read_run_json(path))


def read_document(path: Path) -> Any:
    """A JSON document of a results directory.

    Raises:
        ResultsError: it is missing or damaged.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ResultsError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        said = str(error).removeprefix(f"{path}: ")
        raise ResultsError(f"{path}: damaged, not JSON: {printable(said)}") from None


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
    content = read_document(path)
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
            check_size(path, part.metadata)
            found = part.schema_arrow
            for field in schema:
                if found.names.count(field.name) != 1 or found.field(field.name).type != field.type:
                    raise ResultsError(f"{path}: foreign, expected a column {field.name} of type {field.type}")
            return part.read(list(columns or schema.names))
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {printable(str(error))}") from error


def read_frontier(files: RunDirectory, case_id: str, routing: pd.DataFrame) -> pd.DataFrame | None:
    """A case's part of the table ``frontier``, in order; None where it has none.

    Args:
        routing: the case's rows of the table ``routing``, whose batches (and layers) it must have.

    Raises:
        ResultsError: it is damaged, or has other rows.
    """
    path = files.path("frontier", case_id)
    if not path.is_file():
        return None
    keys = [key for key in ("batch", "layer") if key in routing and routing[key].notna().all()]
    table = read_table(path, FRONTIER_SCHEMA)
    found = np.column_stack([table[key].to_numpy() for key in keys]).astype(float)
    order = np.lexsort(found.T[::-1])
    if not np.array_equal(found[order], np.unique(routing[keys].to_numpy(dtype=float), axis=0)):
        raise ResultsError(
            f"{path}: expected one row for each {' and '.join(keys)} of the routing, got {len(table)} rows"
        )
    for column in ("kept_by_load", "kept_by_experts"):
        shares = table[column].to_numpy()
        if not ((shares >= 0) & (shares <= 1 + 1e-6)).all():
            raise ResultsError(f"{path}: {column}: expected shares, got others")
    rows = (table if (order[1:] > order[:-1]).all() else table.take(order)).to_pandas()
    for load, kept in zip(rows["curve_load"], rows["curve_kept"], strict=True):
        if load is None and kept is None:  # Native's part alone has the curve.
            continue
        if load is None or kept is None or len(load) != len(kept) or not np.isfinite([load, kept]).all():
            raise ResultsError(f"{path}: expected curves of as many loads as shares, got others")
    return rows


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


def launches_of(path: Path, samples: pa.Table) -> dict[int, dict[str, Any]]:
    """The run_id, status and reason of each launch, by launch in their order.

    Raises:
        ResultsError: a row has no launch, or a launch no status, or several.
    """
    columns = ["launch", "run_id", "status", "reason"]
    launches: dict[int, list[dict[str, Any]]] = {}
    for row in samples.group_by(columns, use_threads=False).aggregate([]).to_pylist():
        launches.setdefault(row["launch"], []).append(row)
    for rows in launches.values():
        found = list(dict.fromkeys(row["status"] for row in rows))
        if len(found) != 1 or found[0] not in STATUSES:
            raise ResultsError(f"{path}: status: expected one of {', '.join(STATUSES)} in all rows, got {found}")
    if None in launches:
        raise ResultsError(f"{path}: damaged, a row lacks its launch")
    return {launch: launches[launch][0] for launch in sorted(launches)}


def timings_of(path: Path, samples: pa.Table, world_size: int, phases: Sequence[str] = LAYER_PHASES) -> pd.DataFrame:
    """The samples of a measured case: the columns ``SAMPLE``.

    Args:
        phases: that may occur, beside the total and what is unaccounted for.

    Raises:
        ResultsError: a row lacks what it must have or stands there twice, or an iteration lacks a rank.
    """
    samples = samples.select(SAMPLE)
    for column, allowed in (("kind", ("plain", "breakdown")), ("phase", (*phases, TOTAL, UNACCOUNTED))):
        for value in sorted(set(pc.unique(samples[column]).to_pylist()) - {None, *allowed}):
            raise ResultsError(f"{path}: {column}: expected one of {', '.join(allowed)}; got {value!r}")
    time_us, host_us = (samples[column].to_numpy() for column in ("time_us", "host_us"))
    needed = ("rank", *ITERATION, "phase")
    if any(samples[column].null_count for column in needed) or np.isnan(time_us).any():
        raise ResultsError(f"{path}: damaged, a measured row lacks its rank, batch, iteration or time_us")
    if samples.group_by([*needed, "layer"], use_threads=False).aggregate([]).num_rows != len(samples):
        raise ResultsError(f"{path}: damaged, one rank, iteration, layer and phase stands there twice")
    if (np.abs([time_us, host_us]) >= MOST_US).any():
        raise ResultsError(f"{path}: damaged, a time is not below {MOST_US:g} us")
    is_total = pc.equal(samples["phase"], TOTAL)
    if (time_us[is_total.to_numpy()] < LEAST_US).any():
        raise ResultsError(f"{path}: damaged, a total is not above 0")
    # The slowest rank can be named only when all ranks are there.
    totals = samples.append_column("is_total", pc.cast(is_total, pa.int64())).group_by(ITERATION, use_threads=False)
    totals = totals.aggregate([("is_total", "sum")])
    for row in totals.filter(pc.not_equal(totals["is_total_sum"], world_size)).sort_by("iteration").to_pylist():
        raise ResultsError(
            f"{path}: launch {row['launch']}, batch {row['batch']}, {row['kind']} iteration {row['iteration']}: "
            f"expected totals of {world_size} ranks, got {row['is_total_sum']}"
        )
    # Of millions of rows each word is one object.
    return samples.to_pandas(strings_to_categorical=True).astype({"kind": object, "phase": object})


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

    def mean_ms(self, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """Milliseconds of groups of phases: mean over ranks, then median over iterations; empty without iterations."""
        sums = {name: self.of(*phases).mean(axis=1) for name, phases in groups.items()} if len(self.index) else {}
        return {name: float(np.median(sum_us_I)) / 1e3 for name, sum_us_I in sums.items()}

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
    """Raise ResultsError unless rows of routing hold counts, and all ranks' of every batch (and layer) once."""
    check_counts(path, rows, {"load_E": num_experts, "load_R": num_ranks})
    keys = ["rank", *(key for key in ("batch", "layer") if key in rows)]
    where_NK = np.column_stack([rows[key].to_numpy(dtype=float, na_value=-1) for key in keys])
    batches, numbers = np.unique(where_NK[:, 1:], axis=0, return_counts=True)
    if len(batches) < np.prod([len(np.unique(column)) for column in where_NK[:, 1:].T]):
        raise ResultsError(f"{path}: layer: expected rows of every batch in each, got fewer")
    if (numbers != world_size).any() or len(np.unique(where_NK, axis=0)) < len(where_NK):
        raise ResultsError(f"{path}: expected one row for each of {world_size} ranks in every batch")


def check_counts(
    path: Path, rows: pd.DataFrame, lengths: Mapping[str, int], needs: Sequence[str] = _ROUTING_NEEDS
) -> None:
    """Raise ResultsError unless rows of routing have what they must, and every number of them is one that can be.

    Args:
        lengths: of the columns of lists; all entries are counts.
        needs: columns without nulls.
    """
    for column in needs:
        if rows[column].isna().any():
            raise ResultsError(f"{path}: damaged, a measured row lacks its {column}")
    for column, expected in lengths.items():
        for found in set(rows[column].map(len)) - {expected}:
            raise ResultsError(f"{path}: {column}: expected {expected} entries, got {found}")
        counts = np.stack(rows[column].to_list()).astype(float)
        if not ((counts >= 0) & (counts < MOST_COUNT)).all():
            raise ResultsError(f"{path}: {column}: expected counts, got others")
    numbers = [name for name, metric in METRICS.items() if name in rows and not pa.types.is_list(metric.dtype)]
    values_NM = rows[numbers].to_numpy(dtype=float)
    least_M = [-1 if name == "max_violation" else 0 for name in numbers]
    is_known = np.isnan(values_NM) | ((values_NM >= least_M) & (values_NM < MOST_COUNT))
    for column in np.array(numbers)[~is_known.all(axis=0)]:
        raise ResultsError(f"{path}: {column}: expected finite numbers from 0, got others")
