"""From directories to a store: comparisons with their typed facts, and one long frame for each table.

Parts are written whole, by this program alone, so their content is trusted. A part must be of its table, version,
comparison, mode and launch, must not be empty, and Parquet's checksums must hold. Every case of run.json must have a
status and, where it was measured, its routing. What is not so is one line that names the file: raised, or given to who
would rather see the rest of a directory; the comparison is then left out. Directories stand beside each other and are
never pooled: two jobs share no moment.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from moe_ep_bench.errors import UserError, brief, problem_words
from moe_ep_bench.facts import CaseFacts, Conditions, JudgedFacts, RoutedFacts, RunFacts, TimedFacts
from moe_ep_bench.files import read_json
from moe_ep_bench.results import RunDirectory, ValidationDirectory, conditions_of
from moe_ep_bench.schema import FRONTIER_SCHEMA, PHASES, ROUTING_SCHEMA, SCHEMA_VERSION, TABLES, TOTAL, UNACCOUNTED

ITERATION = ["launch", "batch", "iteration"]
_WORDS = {
    "kind": pd.CategoricalDtype(["plain", "breakdown"]),
    "phase": pd.CategoricalDtype([*PHASES, UNACCOUNTED, TOTAL]),
}
# Columns of the store's frames; a case has its words already.
_COLUMNS = {
    "samples": [*ITERATION, "kind", "rank", "layer", "phase", "time_us", "host_us"],
    "routing": [field.name for field in ROUTING_SCHEMA if field.type != pa.string()],
    "frontier": [field.name for field in FRONTIER_SCHEMA if field.type != pa.string()],
}
_Type = TypeVar("_Type", bound=BaseModel)


class ResultsError(UserError):
    """A results directory, or a file of one, that cannot be read."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What cases on the same batches share, and under which conditions each launch was timed."""

    directory: str
    comparison_id: str
    facts: TimedFacts | RoutedFacts
    run: RunFacts
    conditions: Mapping[int, Conditions]


@dataclass(frozen=True, eq=False)
class Store:
    """Comparisons in the order of their directories and sweeps, and what was recorded of their cases.

    Attributes:
        cases: a row per case in run.json's order: ``comparison``, its place among ``comparisons``; ``case_id``;
            ``facts`` (``CaseFacts``); ``status``, of the schema; ``reason``, why it is not ok. A case that failed
            in one launch failed. Its number, the index, is the column ``case`` of the other frames, which hold
            ``_COLUMNS`` of the cases that are ok.
        samples: a row per launch, rank, batch, iteration, kind, layer and phase.
        routing: a row per rank, batch and layer.
        frontier: a row per batch and layer, where it was computed.
    """

    comparisons: tuple[Comparison, ...]
    cases: pd.DataFrame
    samples: pd.DataFrame
    routing: pd.DataFrame
    frontier: pd.DataFrame

    @cached_property
    def by_id(self) -> dict[tuple[str, str], Comparison]:
        return {(comparison.directory, comparison.comparison_id): comparison for comparison in self.comparisons}


class Read(NamedTuple):
    """A comparison, its cases, and by table their rows, whose column ``case`` is a row of its cases."""

    comparison: Comparison
    cases: pd.DataFrame
    frames: dict[str, pd.DataFrame]


# ---- files -----------------------------------------------------------------------------------------------------------


def typed(model: type[_Type], where: str, content: Any) -> _Type:
    """Content as its type; ResultsError names the first key that is otherwise, behind ``where``."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "damaged"
        raise ResultsError(f"{where}{brief(key, 200, quoted=False)}: {problem_words(first)}") from None


def read_document(path: Path, model: type[_Type]) -> _Type:
    """A JSON document of a results directory; ResultsError where it is missing, damaged or of another type."""
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ResultsError(f"{path}: missing; a results directory is one that `moe-ep-bench` has written") from None
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ResultsError(str(error)) from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if model is RunFacts and version != SCHEMA_VERSION:
        hint = "another version of this program wrote it: use that one, or measure again elsewhere"
        raise ResultsError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {brief(version)}; {hint}")
    return typed(model, f"{path}: ", content)


def facts_of(path: Path, run: RunFacts) -> tuple[dict[str, Any], dict[str, CaseFacts]]:
    """The comparisons of run.json, and its cases in the config's order, by id."""
    model = {"route": RoutedFacts, "quality": JudgedFacts}.get(run.mode, TimedFacts)
    comparisons = {key: typed(model, f"{path}: comparisons.{key}.", told) for key, told in run.comparisons.items()}
    cases = {key: typed(CaseFacts, f"{path}: cases.{key}.", told) for key, told in run.cases.items()}
    return comparisons, dict(sorted(cases.items(), key=lambda item: item[1].order))


class Part(NamedTuple):
    """Rows of a comparison's part; of samples also under which conditions they were timed, as JSON."""

    path: Path
    rows: pd.DataFrame
    conditions: bytes | None


def read_part(table: str, path: Path, identity: Mapping[str, object], columns: Sequence[str] | None = None) -> Part:
    """Read columns of a part beside those of its identity (None = all); words of samples are categories.

    Args:
        identity: columns and the value that all their rows must have; of samples also the launch of their file's name.

    Raises:
        ResultsError: it is damaged, foreign or empty.
    """
    schema = TABLES[table].schema
    if table == "samples":
        launch = path.stem.rpartition("-")[2]
        identity = {**identity, "launch": int(launch) if launch.isdecimal() else None}
    wanted = schema.names if columns is None else [*dict.fromkeys(["case_id", *identity, *columns])]
    try:
        # Quicker than pq.read_table by half: a part is one small file.
        with pq.ParquetFile(path, page_checksum_verification=True) as part:
            types = dict(zip(part.schema_arrow.names, part.schema_arrow.types, strict=True))
            for name, dtype in zip(schema.names, schema.types, strict=True):
                if types.get(name) != dtype:
                    raise ResultsError(f"{path}: foreign, expected a column {name} of type {dtype}")
            rows = part.read(wanted, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {' '.join(str(error).split())}") from error
    if rows.num_rows == 0:
        raise ResultsError(f"{path}: damaged, it has no rows")
    version = (rows.schema.metadata or {}).get(b"schema_version", b"none").decode()
    for name, expected, found in (
        ("schema_version", str(SCHEMA_VERSION), [version]),
        *((name, expected, rows[name].unique().to_pylist()) for name, expected in identity.items()),
    ):
        if others := [value for value in found if value != expected]:
            raise ResultsError(f"{path}: foreign, {name}: expected {brief(expected)}, got {brief(others[0])}")
    # Of millions of samples each word is one object.
    return Part(path, rows.to_pandas(strings_to_categorical=table == "samples"), conditions_of(rows))


# ---- directories -----------------------------------------------------------------------------------------------------


def kind_of(directory: Path) -> str:
    """What a directory holds: validation, quality or times, routing included; what cannot be read is the last."""
    if ValidationDirectory(directory).pairs.is_file():
        return "validation"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        if read_json(RunDirectory(directory).run_json)["mode"] == "quality":
            return "quality"
    return "times"


def read_store(
    directories: Iterable[Path],
    passed_over: list[str] | None = None,
    join: Callable[[list[Read]], list[Read]] = list,
) -> Store:
    """Read directories of times or of routing; one that is named twice is read once.

    Args:
        join: makes one of several comparisons.
        passed_over: gets a line for each thing that is left out; None = the first is raised.

    Raises:
        ResultsError: one line that names the file and what is wrong with it; with ``passed_over`` only where nothing
            is left.
    """
    read: list[Read] = []
    lines: list[str] = []
    for name, folder in _named(directories).items():
        try:
            read += _read_directory(name, folder, lines)
        except ResultsError as error:
            lines.append(str(error))
    if not read or (lines and passed_over is None):
        raise ResultsError(lines[0] if lines else "expected a directory, got none")
    if passed_over is not None:
        passed_over += lines
    read = join(read)
    cases = pd.concat([one.cases.assign(comparison=place) for place, one in enumerate(read)], ignore_index=True)
    begins = np.cumsum([0, *(len(one.cases) for one in read)])
    frames = {
        table: together([rows.assign(case=rows["case"] + begin) for rows, begin in zip(parts, begins, strict=False)])
        for table, parts in ((table, [one.frames[table] for one in read]) for table in _COLUMNS)
    }
    if not (cases["status"] == "ok").any():
        raise ResultsError("no case was measured under every seed of its traffic")
    return Store(tuple(one.comparison for one in read), cases, **frames)


def together(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows of several frames; empty ones, whose columns have no types, are left out."""
    return pd.concat([rows for rows in parts if len(rows)] or parts[:1], ignore_index=True)


def _named(directories: Iterable[Path]) -> dict[str, Path]:
    """Directories by a short name of each: its own, or its whole path where several have that."""
    paths: dict[Path, Path] = {}
    for directory in directories:
        paths.setdefault(directory.resolve(), directory)
    count = Counter(path.name for path in paths)
    return {
        path.name if path.name and count[path.name] == 1 else "/".join(path.parts[1:]) or "/": directory
        for path, directory in paths.items()
    }


def _read_directory(name: str, folder: Path, lines: list[str]) -> list[Read]:
    """All comparisons that can be read; ``lines`` gets what is left out."""
    files, kind = RunDirectory(folder), kind_of(folder)
    if kind == "validation":
        raise ResultsError(f"{folder}: holds two runs side by side: name {folder}/real or {folder}/emulated")
    if kind == "quality":
        raise ResultsError(
            f"{folder}: holds what policies do to a model's answers, without times; expected times or routing"
        )
    run = read_document(files.run_json, RunFacts)
    facts, listed = facts_of(files.run_json, run)
    paths = {table: files.parts(table) for table in _COLUMNS}
    read, num_lines = [], len(lines)
    for key in sorted(facts, key=lambda key: _place_in_sweep(facts[key])):
        cases = {case_id: case for case_id, case in listed.items() if case.comparison_id == key}
        of_comparison = {table: of_table.get(key, []) for table, of_table in paths.items()}
        try:
            read.append(_read_comparison(files, of_comparison, (name, key), facts[key], run, cases, lines))
        except ResultsError as error:
            lines.append(str(error))
    tried = [case for one in read for case in one.cases.itertuples()]
    if not any(case.status == "ok" for case in tried):
        if len(lines) > num_lines:  # They say why.
            return []
        counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(c.status for c in tried).items()))
        first = f"; {tried[0].facts.label}: {tried[0].reason}" if tried else ""
        raise ResultsError(f"{folder}: no case was measured ({counts or 'run.json lists none'}){first}")
    return read


def _place_in_sweep(facts: TimedFacts | RoutedFacts) -> tuple[list[tuple[bool, Any]], int]:
    """Sorts comparisons by the values of their swept keys, numbers before words, then by the config's order."""
    point = facts.point if isinstance(facts, TimedFacts) else {}
    values = [point[key] for key in sorted(point)]
    places = [(False, value) if isinstance(value, int | float) else (True, json.dumps(value)) for value in values]
    return places, facts.order if isinstance(facts, RoutedFacts) else 0


def _read_comparison(
    files: RunDirectory,
    paths: Mapping[str, Sequence[Path]],
    key: tuple[str, str],
    facts: TimedFacts | RoutedFacts,
    run: RunFacts,
    listed: Mapping[str, CaseFacts],
    lines: list[str],
) -> Read:
    """Read all parts of a comparison; ``lines`` gets what the run has not come to.

    Raises:
        ResultsError: a part cannot be read, or a measured case lacks its routing.
    """
    parts: dict[str, list[Part]] = {}
    for table, columns in _COLUMNS.items():
        identity = {"comparison_id": key[1]} | ({} if table == "frontier" else {"mode": run.mode})
        more = ["status", "reason"] if table == "samples" else []
        parts[table] = [read_part(table, path, identity, [*columns, *more]) for path in paths[table]]
    is_timed = isinstance(facts, TimedFacts)
    routed = dict.fromkeys(case_id for part in parts["routing"] for case_id in part.rows["case_id"].unique())
    statuses = _statuses(parts["samples"]) if is_timed else dict.fromkeys(routed, ("ok", None))
    cases = pd.DataFrame(
        [(case_id, case, *statuses[case_id]) for case_id, case in listed.items() if case_id in statuses],
        columns=["case_id", "facts", "status", "reason"],
    )
    ok = cases[cases["status"] == "ok"]
    if missing := [case for case_id, case in listed.items() if case_id not in statuses]:
        path = files.path("samples", key[1], 0) if is_timed else files.path("routing", key[1])
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        left = f"no rows of {missing[0].label}{more}; the run did not finish: start it again to go on"
        lines.append(f"{path}: {left}")
    for case in ok[~ok["case_id"].isin(routed)].itertuples():
        raise ResultsError(f"{files.path('routing', key[1])}: no rows of {case.facts.label}, which was measured")
    frames = {table: _rows_of(table, of_table, ok) for table, of_table in parts.items()}
    measured = [part for part in parts["samples"] if part.conditions and part.rows["case_id"].isin(ok["case_id"]).any()]
    conditions = {
        int(part.rows["launch"].iloc[0]): typed(Conditions, f"{part.path}: conditions.", json.loads(part.conditions))
        for part in measured
    }
    return Read(Comparison(*key, facts, run, conditions), cases, frames)


def _statuses(parts: Sequence[Part]) -> dict[str, tuple[str, str | None]]:
    """Status and reason of each case by its id: those of the first launch in which it is not ok."""
    statuses: dict[str, tuple[str, str | None]] = {}
    for part in parts:
        rows = part.rows[["case_id", "launch", "status", "reason"]].drop_duplicates().astype(object)
        for row in rows.itertuples():
            reason = None
            if row.status != "ok":
                reason = f"launch {row.launch + 1}: " if len(parts) > 1 else ""
                reason += row.reason if isinstance(row.reason, str) else "no reason was recorded"
            if statuses.get(row.case_id, ("ok", None))[0] == "ok":
                statuses[row.case_id] = row.status, reason
    return statuses


def _rows_of(table: str, parts: Sequence[Part], ok: pd.DataFrame) -> pd.DataFrame:
    """The rows of cases that are ok, of all parts of a table."""
    frames = [pd.DataFrame(columns=["case", *_COLUMNS[table]])]
    for part in parts:
        place_N = pd.Index(ok["case_id"]).get_indexer(part.rows["case_id"])
        rows = part.rows[place_N >= 0].assign(case=ok.index[place_N[place_N >= 0]])[frames[0].columns]
        if table == "samples":
            rows = rows.astype({"rank": int, "batch": int, "iteration": int, **_WORDS})
        frames.append(rows)
    return together(frames)
