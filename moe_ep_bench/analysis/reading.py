"""Read the files of a results directory and check them: JSON against typed facts, Parquet parts against the schema.

A part is trusted only after it has been held against the schema and against what run.json says of its case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike
from pydantic import BaseModel, ValidationError

from moe_ep_bench.errors import UserError, brief, printable, problem_words
from moe_ep_bench.files import inside, read_json
from moe_ep_bench.results import RunDirectory, check_size, conditions_of
from moe_ep_bench.schema import METRICS, SCHEMA_VERSION, STATUSES, TABLES, TOTAL, UNACCOUNTED

ITERATION = ["launch", "batch", "iteration"]
SAMPLE = ["rank", *ITERATION, "kind", "layer", "phase", "time_us", "host_us"]
# What a measured routing row must hold. The two ratios of masses are exempt: a rank without valid tokens has none.
ROUTING_NEEDS = ("rank", "batch", "num_tokens", "load_E", "load_R", "num_topk_pairs", "num_dropped_pairs")

LEAST_US, MOST_US = 1e-6, 1e15  # no clock tells less, no run lasts so long
MOST_COUNT = 2**53  # beyond which a double does not count

_Type = TypeVar("_Type", bound=BaseModel)
_Value = TypeVar("_Value")


class ResultsError(UserError):
    """A results directory, or a file of one, that cannot be read; one printable line, whatever the file holds."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class Errors:
    """Errors of what is read one by one: raised at once, or collected as lines where the rest is wanted."""

    def __init__(self, lines: list[str] | None) -> None:
        self._lines = lines

    def add(self, error: UserError) -> None:
        if self._lines is None:
            raise error
        self._lines.append(str(error))

    def read(self, reader: Callable[..., _Value], *arguments: Any) -> _Value | None:
        """What the reader returns; None where it raised, and the error was collected."""
        try:
            return reader(*arguments)
        except UserError as error:
            self.add(error)
            return None


# ---- JSON ------------------------------------------------------------------------------------------------------------


def typed(model: type[_Type], path: Path, key: str, content: Any) -> _Type:
    """What ``path`` says under ``key``; ResultsError names the first key that says it otherwise."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([*([key] if key else []), *map(str, first["loc"])]) or "damaged"
        raise ResultsError(f"{path}: {brief(where, 200, quoted=False)}: {problem_words(first)}") from None


def read_document(path: Path) -> Any:
    """A JSON document of a results directory; ResultsError where it is missing or damaged."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ResultsError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        problem = str(error).removeprefix(f"{path}: ")
        raise ResultsError(f"{path}: damaged, not JSON: {printable(problem)}") from None


def read_run_json(path: Path) -> dict[str, Any]:
    """Read run.json; ResultsError where it is missing, damaged or of another version."""
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
        hint = "; it is newer than this program, which needs updating"
        hint = hint if version > SCHEMA_VERSION else "; an earlier version wrote it: measure again, elsewhere"
        raise ResultsError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {version}{hint}")
    return content


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a part (None = all); ResultsError where it is damaged or lacks a column of the schema."""
    try:
        # Quicker than pq.read_table by half: a part is one small file.
        with pq.ParquetFile(path) as part:
            check_size(path, part.metadata)
            fields = part.schema_arrow
            for field in schema:
                if fields.names.count(field.name) != 1 or fields.field(field.name).type != field.type:
                    raise ResultsError(f"{path}: foreign, expected a column {field.name} of type {field.type}")
            return part.read(list(columns or schema.names), use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {printable(str(error))}") from error


class Part(NamedTuple):
    """A part of a comparison: its rows by case; of samples the launch, and under which conditions, as JSON."""

    path: Path
    cases: dict[str, pa.Table]
    launch: int | None
    conditions: bytes | None


def read_part(
    files: RunDirectory, table: str, path: Path, identity: Mapping[str, str], columns: Sequence[str] | None = None
) -> Part:
    """Read columns of a comparison's part (None = all).

    Args:
        identity: columns and the value that all their rows must have.

    Raises:
        ResultsError: it is damaged, foreign or empty.
    """
    number = path.stem.rpartition("-")[2]
    launch = int(number) if table == "samples" and number.isdecimal() else None
    expected_of = {**identity, **({"launch": launch} if table == "samples" else {})}
    wanted = None if columns is None else [*dict.fromkeys(["case_id", *expected_of, *columns])]
    rows = read_table(inside(files.root, path), TABLES[table].schema, wanted)
    if rows.num_rows == 0:
        raise ResultsError(f"{path}: damaged, it has no rows")
    for column, expected in expected_of.items():
        others = [value for value in pc.unique(rows[column]).to_pylist() if value != expected]
        if others:
            raise ResultsError(f"{path}: foreign, {column}: expected {expected!r}, got {others[0]!r}")
    if rows["case_id"].null_count:
        raise ResultsError(f"{path}: damaged, a row lacks its case_id")
    ids = rows["case_id"].combine_chunks().dictionary_encode()
    place_N = ids.indices.to_numpy()
    cases = {key: rows.filter(pa.array(place_N == place)) for place, key in enumerate(ids.dictionary.to_pylist())}
    return Part(path, cases, launch, conditions_of(rows))


def launches_of(path: object, samples: pa.Table) -> dict[int, dict[str, Any]]:
    """The run_id, status and reason of each launch, by launch in their order; ResultsError where one has not one."""
    columns = ["launch", "run_id", "status", "reason"]
    launches: dict[int, list[dict[str, Any]]] = {}
    for row in samples.group_by(columns, use_threads=False).aggregate([]).to_pylist():
        launches.setdefault(row["launch"], []).append(row)
    for rows in launches.values():
        statuses = list(dict.fromkeys(row["status"] for row in rows))
        if len(statuses) != 1 or statuses[0] not in STATUSES:
            raise ResultsError(f"{path}: status: expected one of {', '.join(STATUSES)} in all rows, got {statuses}")
    return {launch: launches[launch][0] for launch in sorted(launches)}


def samples_of(path: object, samples: pa.Table, world_size: int, phases: Sequence[str]) -> pd.DataFrame:
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
    needed = ("rank", *ITERATION, "kind", "phase")
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
    totals = samples.append_column("is_total", pc.cast(is_total, pa.int64()))
    totals = totals.group_by([*ITERATION, "kind"], use_threads=False).aggregate([("is_total", "sum")])
    for row in totals.filter(pc.not_equal(totals["is_total_sum"], world_size)).sort_by("iteration").to_pylist():
        raise ResultsError(
            f"{path}: launch {row['launch']}, batch {row['batch']}, {row['kind']} iteration {row['iteration']}: "
            f"expected totals of {world_size} ranks, got {row['is_total_sum']}"
        )
    # Of millions of rows each word is one object.
    return samples.to_pandas(strings_to_categorical=True).astype({"kind": object, "phase": object})


def check_routing(
    path: object,
    rows: pd.DataFrame,
    *,
    num_experts: int,
    num_ranks: int,
    world_size: int,
    num_batches: int | None = None,
) -> None:
    """Raise ResultsError unless rows of routing hold counts, and all ranks' of every batch and layer once."""
    check_counts(lambda _: path, rows, {"load_E": num_experts, "load_R": num_ranks})
    where_NK = np.column_stack([rows[key].to_numpy(dtype=float, na_value=-1) for key in ("rank", "batch", "layer")])
    units, numbers = np.unique(where_NK[:, 1:], axis=0, return_counts=True)
    if len(units) < np.prod([len(np.unique(column)) for column in where_NK[:, 1:].T]):
        raise ResultsError(f"{path}: layer: expected rows of every batch in each, got fewer")
    is_short = num_batches is not None and len(np.unique(where_NK[:, 1])) != num_batches
    if is_short or (numbers != world_size).any() or len(np.unique(where_NK, axis=0)) < len(where_NK):
        of_all = "every batch" if num_batches is None else f"{num_batches} batches"
        raise ResultsError(f"{path}: expected one row for each of {world_size} ranks in {of_all}, got {len(rows)}")


def refuse(broken: ArrayLike, path_of: Callable[[int], object], words: Callable[[int], str] | str) -> None:
    """Raise ResultsError where any row is broken: one line that names the first one's file."""
    for place in map(int, np.flatnonzero(broken)):
        raise ResultsError(f"{path_of(place)}: {words if isinstance(words, str) else words(place)}")


def check_counts(
    path_of: Callable[[int], object],
    rows: pd.DataFrame,
    lengths: Mapping[str, ArrayLike],
    needs: Sequence[str] = ROUTING_NEEDS,
) -> None:
    """Raise ResultsError unless rows of routing have what they must, and every number of them is one that can be.

    Args:
        path_of: the file of a row, by its place.
        lengths: of the columns of lists, one number or each row's; all entries are counts.
        needs: columns without nulls.
    """
    for column in needs:
        refuse(rows[column].isna(), path_of, f"damaged, a measured row lacks its {column}")
    for column, length in lengths.items():
        got_N, expected_N = rows[column].map(len).to_numpy(dtype=int), np.broadcast_to(length, len(rows))
        words = f"{column}: expected {{}} entries, got {{}}".format
        refuse(got_N != expected_N, path_of, lambda at, w=words, e=expected_N, g=got_N: w(e[at], g[at]))
        counts, places_N = np.concatenate(rows[column].to_list() or [[]]), np.arange(len(rows))
        strange = np.repeat(places_N, got_N)[~((counts >= 0) & (counts < MOST_COUNT))]
        refuse(np.isin(places_N, strange), path_of, f"{column}: expected counts, got others")
    for column in (name for name in rows if name in METRICS and not pa.types.is_list(METRICS[name].dtype)):
        values_N = rows[column].to_numpy(dtype=float, na_value=np.nan)
        least = -1 if column == "max_violation" else 0
        is_known = np.isnan(values_N) | ((values_N >= least) & (values_N < MOST_COUNT))
        refuse(~is_known, path_of, f"{column}: expected finite numbers from 0, got others")


def read_frontier(path: Path, found: pa.Table, routing: pd.DataFrame) -> pd.DataFrame:
    """A case's rows of the table ``frontier``, by layer and batch in order.

    Args:
        routing: the case's rows of the table ``routing``, whose batches and layers it must have.

    Raises:
        ResultsError: it is damaged, or has other rows.
    """
    rows = found.to_pandas()
    keys = [key for key in ("layer", "batch") if rows[key].notna().all() and routing[key].notna().all()]
    where_NK, of_routing = (frame[keys].to_numpy(dtype=float) for frame in (rows, routing))
    order = np.lexsort(where_NK.T[::-1])
    if not np.array_equal(where_NK[order], np.unique(of_routing, axis=0)):
        raise ResultsError(f"{path}: expected one row for each layer and batch of the routing, got {len(rows)} rows")
    for column in ("kept_by_load", "kept_by_experts"):
        if not rows[column].between(0, 1 + 1e-6).all():
            raise ResultsError(f"{path}: {column}: expected shares, got others")
    for load, kept in zip(rows["curve_load"], rows["curve_kept"], strict=True):
        if load is None and kept is None:  # Native's part alone has the curve.
            continue
        if load is None or kept is None or len(load) != len(kept) or not np.isfinite([load, kept]).all():
            raise ResultsError(f"{path}: expected curves of as many loads as shares, got others")
    return rows.iloc[order].reset_index(drop=True)
