"""Read the files of a results directory and check them: ``run.json`` and Parquet parts.

A part is trusted only after it has been held against the schema and against what run.json says of its case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import read_json
from moe_ep_bench.presets import problem_words
from moe_ep_bench.results import RunDirectory, check_part
from moe_ep_bench.schema import LAYER_PHASES, METRICS, MODES, SCHEMA_VERSION, STATUSES, TOTAL, UNACCOUNTED

ITERATION = ["launch", "batch", "iteration", "kind"]
SAMPLE = ["rank", *ITERATION, "layer", "phase", "time_us", "host_us"]
# What a measured routing row must hold. The two ratios of masses are exempt: a rank without valid tokens has none.
_ROUTING_NEEDS = ("rank", "batch", "num_tokens", "load_E", "load_R", "num_topk_pairs", "num_dropped_pairs")

LEAST_US, MOST_US = 1e-6, 1e15  # no clock tells less, no run lasts so long
MOST_COUNT = 2**53  # beyond which a double does not count

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
        raise ResultsError(f"{path}: damaged, not JSON: {one_line(said)}") from None


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
        found = check_part(path).schema.to_arrow_schema()
        for field in schema:
            if found.names.count(field.name) != 1 or found.field(field.name).type != field.type:
                raise ResultsError(f"{path}: foreign, expected a column {field.name} of type {field.type}")
        return pq.read_table(path, columns=list(columns or schema.names), partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {one_line(error)}") from error


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
    if not (np.abs(rows[["time_us", "host_us"]].to_numpy(float, na_value=0)) < MOST_US).all():
        raise ResultsError(f"{path}: damaged, a time is not below {MOST_US:g} us")
    is_total = rows["phase"] == TOTAL
    if (rows.loc[is_total, "time_us"] < LEAST_US).any():
        raise ResultsError(f"{path}: damaged, a total is not above 0")
    # The slowest rank can be named only when all ranks are there.
    num_totals = is_total.groupby([rows[name] for name in ITERATION], observed=True).sum()
    for (launch, batch, iteration, kind), number in num_totals[num_totals != world_size].items():
        raise ResultsError(
            f"{path}: launch {launch}, batch {batch}, {kind} iteration {iteration}: "
            f"expected totals of {world_size} ranks, got {number}"
        )
    return rows.astype({"kind": object, "phase": object})


def over_layers(samples: pd.DataFrame) -> pd.DataFrame:
    """Samples with each phase once, the sum of it over all layers that have it; ``layer`` goes."""
    if samples["layer"].isna().all():
        return samples.drop(columns="layer")
    by = ["rank", *ITERATION, "phase"]
    return samples.groupby(by, sort=False).agg({"time_us": "sum", "host_us": "first"}).reset_index()


def check_routing(path: Path, rows: pd.DataFrame, *, num_experts: int, num_ranks: int, world_size: int) -> None:
    """Raise ResultsError unless each rank has a row in every batch, with a load for each expert and expert rank."""
    check_counts(path, rows, {"load_E": num_experts, "load_R": num_ranks})
    counts = rows.groupby("batch")["rank"].nunique()
    if (counts != world_size).any() or rows.duplicated(["rank", "batch"]).any():
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
    for column, metric in METRICS.items():
        if column not in rows or pa.types.is_list(metric.dtype):
            continue
        known = rows[column].dropna().astype(float)
        if not ((known >= -1 if metric.name == "max_violation" else known >= 0) & (known < MOST_COUNT)).all():
            raise ResultsError(f"{path}: {column}: expected finite numbers from 0, got others")
