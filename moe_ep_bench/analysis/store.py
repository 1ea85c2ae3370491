"""From directories to one store: their comparisons with typed facts, their cases, and a frame for each table on disk.

All kinds of results (``run``, ``emulate``, ``route``, ``quality``, ``serve``) are read alike and have one key:
directory, comparison, case. ``KINDS`` says which tables a kind has. Samples are pivoted here and nowhere else: on disk
each phase has a row, in the store a column.

Parts are written whole, by this program alone, so their content is trusted where Parquet's checksums hold. Every case
of run.json must have a status and, where it was timed, its routing. Anything else is one line that names the file:
raised, or given to a caller who wants the rest of a directory; the comparison is then left out. Directories stand
side by side and are never pooled: two jobs share no moment. Draws of one traffic are joined (``draws``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from moe_ep_bench.analysis.draws import Comparison, Read, joined, together
from moe_ep_bench.facts import CaseFacts, Conditions, JudgedFacts, RoutedFacts, RunFacts, ServedFacts, TimedFacts
from moe_ep_bench.facts.words import case_label
from moe_ep_bench.results import ResultsError, RunDirectory, ValidationDirectory, read_document, typed
from moe_ep_bench.schema import (
    COUNTS,
    HOST,
    HOST_BUSY,
    IDENTITY,
    PHASES,
    REHEARSAL,
    SM_CLOCK,
    TABLES,
    TOTAL,
    UNACCOUNTED,
)

ITERATION = ["launch", "batch", "iteration"]
# Top-k pairs that a token does not compute, dropped or rerouted: a column of frames, and of files that do not tell
# dropped pairs (null) from rerouted ones.
MISSING = "num_missing_pairs"
# Which iteration of which rank, and of a whole model which layer; the columns of a sample's times.
STEP = ["case", *ITERATION, "kind", "rank", "layer"]
TIMES = [*PHASES, UNACCOUNTED, TOTAL]
BESIDE = [HOST, HOST_BUSY, SM_CLOCK]


class Kind(NamedTuple):
    """How results of a mode are read: the type of a comparison's facts, and its tables.

    A case that has rows in the first table is done.
    """

    facts: type[BaseModel]
    tables: tuple[str, ...]

    is_timed: bool = False


_TIMED = Kind(TimedFacts, ("samples", "routing", "frontier"), is_timed=True)
KINDS = {
    "run": _TIMED,
    "emulated": _TIMED,
    REHEARSAL: Kind(TimedFacts, (REHEARSAL, "routing", "frontier")),
    "route": Kind(RoutedFacts, ("routing", "frontier")),
    "quality": Kind(JudgedFacts, ("quality", "quality_routing")),
    "serve": Kind(ServedFacts, ("requests", "quality"), is_timed=True),
}
_ALL_TABLES = [*dict.fromkeys(table for kind in KINDS.values() for table in kind.tables)]


# Lists of every rank's counts that no view asks for; those that are read are narrower than on disk.
_UNREAD = {"copies_R", "copies_N", "image_load_E"}
_NARROW_COUNTS = pa.list_(pa.int32())


def _read_columns(table: str) -> list[str]:
    """Columns that are read of a part: not those that say which case a row is of."""
    if table == "samples":
        return [*ITERATION, "kind", "rank", "layer", "phase", "time_us", *BESIDE]
    of_case = {name for name, _ in IDENTITY} - {"rank", "batch"} | _UNREAD
    more = [MISSING] if "num_topk_pairs" in TABLES[table].schema.names else []
    return [*(name for name in TABLES[table].schema.names if name not in of_case), *more]


# Columns of the store's frames after ``case``.
COLUMNS = {table: _read_columns(table) for table in _ALL_TABLES} | {"samples": [*STEP[1:], *TIMES, *BESIDE]}


@dataclass(frozen=True, eq=False)
class Directory:
    """Comparisons of one directory in the order of its sweep, and all rows of their cases.

    Attributes:
        cases: a row per case in run.json's order: ``comparison``, its place among ``comparisons``; ``case_id``;
            ``facts`` (``CaseFacts``); ``status``, of the schema; ``reason``, why it is not ok. A case that failed
            in one launch failed. Its number, the index, is the column ``case`` of the other frames, which hold
            ``COLUMNS`` of the cases that are ok; a table that this kind of results lacks is empty.
        samples: a row per ``STEP``, with ``TIMES`` (microseconds, null where a phase did not occur) at the pace of the
            slower of device and host (``paced``), and ``BESIDE`` of an iteration in the row that has its total.
        routing: a row per rank, batch and layer.
        frontier: a row per batch and layer, where it was computed.
        rehearsal: a row per launch and rank of cases that ran and were not timed.
        requests: of ``serve``, a row per launch and request.
        quality, quality_routing: of answers, as in the schema.
    """

    folder: Path
    comparisons: tuple[Comparison, ...]
    cases: pd.DataFrame
    samples: pd.DataFrame
    routing: pd.DataFrame
    frontier: pd.DataFrame
    rehearsal: pd.DataFrame
    requests: pd.DataFrame
    quality: pd.DataFrame
    quality_routing: pd.DataFrame


@dataclass(frozen=True, eq=False)
class Store:
    """Directories side by side, in the order in which they were named."""

    directories: tuple[Directory, ...]
    are_draws_joined: bool = True

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        return tuple(one for directory in self.directories for one in directory.comparisons)

    @cached_property
    def by_id(self) -> dict[tuple[str, str], Comparison]:
        return {(comparison.directory, comparison.comparison_id): comparison for comparison in self.comparisons}


# ---- files -----------------------------------------------------------------------------------------------------------


def facts_of(path: Path, run: RunFacts) -> tuple[dict[str, Any], dict[str, CaseFacts]]:
    """The comparisons of run.json, and its cases in the config's order, by id."""
    model = KINDS[run.mode].facts
    comparisons = {key: typed(model, f"{path}: comparisons.{key}.", facts) for key, facts in run.comparisons.items()}
    cases = {key: typed(CaseFacts, f"{path}: cases.{key}.", facts) for key, facts in run.cases.items()}
    return comparisons, dict(sorted(cases.items(), key=lambda item: item[1].order))


def read_part(table: str, path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read columns of a part; words of samples are categories; routing has ``MISSING``.

    Raises:
        ResultsError: it is damaged.
    """
    # Of millions of samples each word is one object.
    words = ["case_id", "status", "reason", "kind", "phase"] if table == "samples" else None
    try:
        # Quicker than pq.read_table by half: a part is one small file.
        with pq.ParquetFile(path, read_dictionary=words, page_checksum_verification=True) as part:
            rows = part.read(columns, use_threads=False)
            types = [_NARROW_COUNTS if field.type == COUNTS else field.type for field in rows.schema]
            rows = rows.cast(pa.schema(list(zip(rows.schema.names, types, strict=True))))
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {' '.join(str(error).split())}") from error
    frame = rows.to_pandas()
    if MISSING in columns:
        told = frame["num_dropped_pairs"] + frame["num_rerouted_pairs"]
        frame[MISSING] = frame[MISSING].fillna(told) if MISSING in frame else told
    return frame


# ---- directories -----------------------------------------------------------------------------------------------------


def is_validation(directory: Path) -> bool:
    """Whether a directory holds a real run and an emulated one, side by side."""
    return ValidationDirectory(directory).pairs.is_file()


def load(directories: Path | Iterable[Path], passed_over: list[str] | None = None, *, join_draws: bool = True) -> Store:
    """Read directories of results; one that is named twice is read once.

    Args:
        passed_over: gets a line for each thing that is left out; None = the first is raised.
        join_draws: comparisons that differ in the seed of their traffic, or in its layer, become one; ``samples`` are
            of one seed each, so read them apart.

    Raises:
        ResultsError: one line that names the file and what is wrong with it; with ``passed_over`` only where nothing
            is left.
    """
    read: list[Directory] = []
    lines: list[str] = []
    for name, folder in _named([directories] if isinstance(directories, Path) else directories).items():
        try:
            one, left_out = read_directory(name, folder, join_draws=join_draws)
        except ResultsError as error:
            one, left_out = None, [str(error)]
        read += [] if one is None else [one]
        lines += left_out
    if not read or (lines and passed_over is None):
        raise ResultsError(lines[0] if lines else "expected a directory, got none")
    if passed_over is not None:
        passed_over += lines
    return Store(tuple(read), join_draws)


@lru_cache(maxsize=2)
def with_draws_apart(store: Store) -> Store:
    """The same directories, each draw of a traffic a comparison of its own."""
    return load([one.folder for one in store.directories], [], join_draws=False) if store.are_draws_joined else store


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


def read_directory(name: str, folder: Path, *, join_draws: bool) -> tuple[Directory | None, list[str]]:
    """All comparisons that can be read, None where there are none, and a line for each thing that is left out."""
    if is_validation(folder):
        raise ResultsError(f"{folder}: holds two runs side by side: name {folder}/real or {folder}/emulated")
    files = RunDirectory(folder)
    run = read_document(files.run_json, RunFacts)
    facts, listed = facts_of(files.run_json, run)
    paths = {table: files.parts(table) for table in KINDS[run.mode].tables}
    read: list[Read] = []
    lines: list[str] = []
    for key in sorted(facts, key=lambda key: _place_in_sweep(facts[key])):
        cases = {case_id: case for case_id, case in listed.items() if case.comparison_id == key}
        of_comparison = {table: of_table.get(key, []) for table, of_table in paths.items()}
        try:
            comparison = Comparison(name, key, facts[key], run, {})
            read.append(_read_comparison(files, of_comparison, comparison, cases, lines))
        except ResultsError as error:
            lines.append(str(error))
    tried = [case for one in read for case in one.cases.to_dict("records")]
    if not any(case["status"] == "ok" for case in tried):
        if lines:  # They say why.
            return None, lines
        first = [f"{case_label(case['facts'])}: {case['status']}: {case['reason']}" for case in tried[:1]]
        raise ResultsError(f"{folder}: no case was measured; {', '.join(first) or 'run.json lists none'}")
    read = joined(read) if join_draws else read
    cases = pd.concat([one.cases.assign(comparison=place) for place, one in enumerate(read)], ignore_index=True)
    if not (cases["status"] == "ok").any():
        raise ResultsError(f"{folder}: no case was measured under every seed of its traffic")
    begins = np.cumsum([0, *(len(one.cases) for one in read)])
    frames = {
        table: together([rows.assign(case=rows["case"] + begin) for rows, begin in zip(parts, begins, strict=False)])
        for table, parts in ((table, [one.frames[table] for one in read]) for table in _ALL_TABLES)
    }
    return Directory(folder, tuple(one.comparison for one in read), cases, **frames), lines


def _place_in_sweep(facts: TimedFacts | RoutedFacts | JudgedFacts | ServedFacts) -> tuple[list[tuple[int, Any]], int]:
    """Sorts comparisons: timed ones by the values of their swept keys, others by the config."""
    point = facts.point if isinstance(facts, TimedFacts) else {}
    return [ordered(point[key]) for key in sorted(point)], 0 if isinstance(facts, TimedFacts) else facts.order


def ordered(value: Any) -> tuple[int, Any]:
    """A key that orders JSON values of any types: numbers, words, lists, then all else."""
    if isinstance(value, int | float):
        return 0, value
    if isinstance(value, str):
        return 1, value
    return (2, [ordered(one) for one in value]) if isinstance(value, list) else (3, json.dumps(value, sort_keys=True))


def _read_comparison(
    files: RunDirectory,
    paths: Mapping[str, Sequence[Path]],
    comparison: Comparison,
    listed: Mapping[str, CaseFacts],
    lines: list[str],
) -> Read:
    """Read all parts of a comparison; ``lines`` gets what the run has not come to.

    Args:
        paths: of its parts, by table; rows of the first make a case done.

    Raises:
        ResultsError: a part cannot be read, or a measured case lacks its routing.
    """
    first, key = next(iter(paths)), comparison.comparison_id
    parts: dict[str, list[pd.DataFrame]] = {table: [] for table in _ALL_TABLES}
    for table, of_table in paths.items():
        more = ["case_id", *(["status", "reason"] if table == first else [])]
        parts[table] = [read_part(table, path, [*more, *_read_columns(table)]) for path in of_table]
    done = _statuses(parts[first]).set_index("case_id")
    cases = pd.DataFrame({"case_id": list(listed), "facts": list(listed.values())}, dtype=object)
    cases = cases.join(done, on="case_id")
    missing, cases = cases[cases["status"].isna()], cases[cases["status"].notna()].reset_index(drop=True)
    if len(missing):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        left = (
            f"no rows of {case_label(missing['facts'].iloc[0])}{more}; the run did not finish: start it again to go on"
        )
        lines.append(f"{files.path(first, key, 0 if TABLES[first].is_by_launch else None)}: {left}")
    ok = cases[cases["status"] == "ok"]
    routed = {case_id for part in parts["routing"] for case_id in part["case_id"].unique()}
    for facts in ok.loc[~ok["case_id"].isin(routed), "facts"] if "routing" in paths else ():
        raise ResultsError(f"{files.path('routing', key)}: no rows of {case_label(facts)}, which was measured")
    frames = {table: _rows_of(table, of_table, ok) for table, of_table in parts.items()}
    launches = {
        int(part["launch"].iloc[0]): part["case_id"].isin(ok["case_id"]).any()
        for part in (parts["samples"] or parts[REHEARSAL])
    }
    conditions = {
        launch: read_document(path, Conditions)
        for launch, is_measured in launches.items()
        if is_measured and (path := files.conditions(key, launch)).is_file()
    }
    return Read(replace(comparison, conditions=conditions), cases, frames)


def _statuses(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Status and reason of each case: those of the first launch in which it is not ok."""
    columns = ["case_id", "launch", "status", "reason"]
    of_parts = [part.reindex(columns=columns).drop_duplicates().astype(object) for part in parts]
    rows = pd.concat([pd.DataFrame(columns=columns), *of_parts])
    if len(parts) > 1:
        where = "launch " + (rows["launch"] + 1).astype(str) + ": "
        rows["reason"] = (where + rows["reason"].astype(str)).where(rows["status"] != "ok", None)
    rows = rows.sort_values("status", key=lambda status: status == "ok", kind="stable").drop_duplicates("case_id")
    return rows[["case_id", "status", "reason"]]


def _rows_of(table: str, parts: Sequence[pd.DataFrame], ok: pd.DataFrame) -> pd.DataFrame:
    """The rows of cases that are ok, of all parts of a table."""
    frames = [pd.DataFrame(columns=["case", *COLUMNS[table]])]
    for part in parts:
        place_N = pd.Index(ok["case_id"]).get_indexer(pd.Index(part["case_id"]))
        rows = part[place_N >= 0].assign(case=ok.index[place_N[place_N >= 0]])
        rows = pivoted(rows) if table == "samples" else rows
        frames.append(rows.reindex(columns=frames[0].columns))  # Not every part has all.
    rows = together(frames)
    return paced(rows) if table == "samples" else rows


# ---- samples ---------------------------------------------------------------------------------------------------------


def pivoted(rows: pd.DataFrame) -> pd.DataFrame:
    """Samples with a column for each of ``TIMES``, of rows that have ``phase`` and ``time_us``."""
    step_N = rows.groupby(STEP, sort=False, dropna=False, observed=True).ngroup().to_numpy()
    first_S = np.unique(step_N, return_index=True)[1]
    times_SC = np.full((len(first_S), len(TIMES)), np.nan)
    # Categories of the same words in another order would keep their codes.
    times_SC[step_N, rows["phase"].astype("category").cat.set_categories(TIMES).cat.codes] = rows["time_us"]
    is_total_N = rows["phase"].eq(TOTAL).to_numpy()
    beside_SC = np.full((len(first_S), len(BESIDE)), np.nan)
    beside_SC[step_N[is_total_N]] = rows.loc[is_total_N].reindex(columns=BESIDE).astype(float)
    steps = rows[STEP].iloc[first_S].reset_index(drop=True)
    steps = steps.astype({"rank": int, "batch": int, "iteration": int, "layer": float})
    numbers = pd.DataFrame(np.hstack([times_SC, beside_SC]), columns=[*TIMES, *BESIDE])
    return pd.concat([steps, numbers], axis=1)


def paced(samples: pd.DataFrame) -> pd.DataFrame:
    """Samples in which a case takes as long as the slower of its device and its host, in each batch of a rank.

    A server's layers follow each other no faster than either. Which of them is the slower is decided by their medians
    over iterations: where they alternate, the larger of each iteration would be more than either takes. Time that the
    host takes beyond the device is unaccounted for in breakdown iterations.
    """
    totals = samples[samples[TOTAL].notna() & samples[HOST_BUSY].notna()]
    cell = ["case", "launch", "batch", "rank", "kind"]
    of_cell = totals.groupby(cell, observed=True)[[TOTAL, HOST_BUSY]].transform("median")
    totals = totals[of_cell[HOST_BUSY] > of_cell[TOTAL]]
    beyond_us = (totals[HOST_BUSY] - totals[TOTAL]).reindex(samples.index, fill_value=0.0)
    return samples.assign(**{name: samples[name].astype(float) + beyond_us for name in (TOTAL, UNACCOUNTED)})


# ---- jobs ------------------------------------------------------------------------------------------------------------


def jobs(store: Store) -> pd.DataFrame:
    """A row per directory and job whose rows are there, in order of time.

    Columns: ``directory``, ``run_id``, ``created``, ``command`` and ``config_text`` (word for word; null where they
    were not recorded), ``config`` (resolved), ``environment`` and ``hashes`` (dicts).
    """
    runs = {one.directory: one.run for one in store.comparisons}
    rows = [
        {"directory": name, "run_id": run_id, **job.model_dump()}
        for name, run in runs.items()
        for run_id, job in sorted(run.runs.items(), key=lambda item: (str(item[1].created), item[0]))
    ]
    return pd.DataFrame(rows)
