"""From directories to a store: comparisons with their typed facts, and one long frame for each table.

Every figure and table rests on these files, so they are checked here and in ``reading``, once: what is missing, damaged
or of another run is an error that names it, never a gap that nobody sees. Who would rather see the rest of a directory
gives a list for these lines: a comparison with a part that cannot be trusted is then left out and named. Directories
stand beside each other and are never pooled: two jobs share no moment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from moe_ep_bench.analysis.reading import (
    Errors,
    Part,
    ResultsError,
    Sizes,
    check,
    read_document,
    read_part,
    read_run_json,
    typed,
)
from moe_ep_bench.errors import brief, printable
from moe_ep_bench.facts import SHARED_ROLES, CaseFacts, Conditions, JudgedFacts, RoutedFacts, RunFacts, TimedFacts
from moe_ep_bench.files import parse_json
from moe_ep_bench.results import RunDirectory, ValidationDirectory
from moe_ep_bench.schema import FRONTIER_SCHEMA, LAYER_PHASES, PHASES, ROUTING_SCHEMA, STATUSES, TOTAL, UNACCOUNTED

_MODES = ("run", "emulated", "route")
_WORDS = {
    "kind": pd.CategoricalDtype(["plain", "breakdown"]),
    "phase": pd.CategoricalDtype([*PHASES, UNACCOUNTED, TOTAL]),
}
# Columns of the store's frames; a case has its words already.
_COLUMNS = {
    "samples": ["launch", "batch", "iteration", "kind", "rank", "layer", "phase", "time_us", "host_us"],
    "routing": [field.name for field in ROUTING_SCHEMA if field.type != pa.string()],
    "frontier": [field.name for field in FRONTIER_SCHEMA if field.type != pa.string()],
}


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
            ``facts`` (``CaseFacts``); ``status``, one of ``STATUSES``; ``reason``, why it is not ok. A case that failed
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


def kind_of(directory: Path) -> str:
    """What a directory holds: timed, routed, quality or validation; what cannot be read is timed."""
    if ValidationDirectory(directory).pairs.is_file():
        return "validation"
    try:
        mode = read_document(RunDirectory(directory).run_json).get("mode")
    except (ValueError, AttributeError):
        return "timed"
    if mode == "route":  # ``papers`` times beside what it routes
        return "timed" if RunDirectory(directory).parts("samples") else "routed"
    return "quality" if mode == "quality" else "timed"


def read_store(
    directories: Iterable[Path],
    passed_over: list[str] | None = None,
    join: Callable[[list[Read]], list[Read]] = list,
) -> Store:
    """Read and check directories of times or of routing; one that is named twice is read once.

    Args:
        join: makes one of several comparisons.
        passed_over: gets a line for each thing that cannot be trusted and is left out; None = the first is raised.

    Raises:
        ResultsError: one line that names the file and what is wrong with it; with ``passed_over`` only where nothing
            is left.
    """
    read: list[Read] = []
    for name, folder in _named(directories).items():
        errors = Errors(None if passed_over is None else [])
        found = Errors(passed_over).read(_read_directory, name, folder, errors)
        if found is not None:  # else one line says why
            read += found
            if passed_over is not None:
                passed_over += errors.lines or []
    if not read:
        raise ResultsError(passed_over.pop() if passed_over else "expected a directory, got none")
    read = join(read)
    cases = pd.concat([one.cases.assign(comparison=place) for place, one in enumerate(read)], ignore_index=True)
    begins = np.cumsum([0, *(len(one.cases) for one in read)])
    frames = {
        table: together([rows.assign(case=rows["case"] + begin) for rows, begin in zip(parts, begins, strict=False)])
        for table, parts in ((table, [one.frames[table] for one in read]) for table in _COLUMNS)
    }
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


def _read_directory(name: str, folder: Path, errors: Errors) -> list[Read]:
    files, kind = RunDirectory(folder), kind_of(folder)
    if kind == "validation":
        raise ResultsError(f"{folder}: holds two runs side by side: name {folder}/real or {folder}/emulated")
    if kind == "quality":
        raise ResultsError(
            f"{folder}: holds what policies do to a model's answers, without times; expected times or routing"
        )
    run = typed(RunFacts, files.run_json, "", read_run_json(files.run_json))
    if run.mode not in _MODES:
        raise ResultsError(f"{files.run_json}: mode: expected one of {', '.join(_MODES)}, got {brief(run.mode)}")
    facts, listed = facts_of(files.run_json, run, errors)
    paths = {table: files.parts(table) for table in _COLUMNS}
    for key, path in ((key, found[0]) for of_table in paths.values() for key, found in of_table.items()):
        if key not in run.comparisons:
            errors.add(ResultsError(f"{path}: foreign, run.json lists no comparison {key!r}"))
    read = []
    for key in sorted(facts, key=lambda key: _place_in_sweep(facts[key])):
        cases = {case_id: case for case_id, case in listed.items() if case.comparison_id == key}
        of_comparison = {table: of_table.get(key, []) for table, of_table in paths.items()}
        found = errors.read(_read_comparison, files, of_comparison, (name, key), facts[key], run, cases, errors)
        read += [] if found is None else [found]
    tried = [case for one in read for case in one.cases.itertuples()]
    if not any(case.status == "ok" for case in tried):
        counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(c.status for c in tried).items()))
        first = f"; {tried[0].facts.label}: {printable(str(tried[0].reason))}" if tried else ""
        nothing = f"none can be read: {errors.lines[-1]}" if errors.lines else "run.json lists none"
        raise ResultsError(f"{files.root}: no case was measured ({counts or nothing}){first}")
    return read


def facts_of(path: Path, run: RunFacts, errors: Errors) -> tuple[dict[str, Any], dict[str, CaseFacts]]:
    """The comparisons and cases of run.json that can be trusted; with a comparison go its cases."""
    model = {"route": RoutedFacts, "quality": JudgedFacts}.get(run.mode, TimedFacts)
    read = {
        key: errors.read(typed, model, path, f"comparisons.{key}", content) for key, content in run.comparisons.items()
    }
    comparisons = {key: facts for key, facts in read.items() if facts is not None}
    read = {key: errors.read(typed, CaseFacts, path, f"cases.{key}", content) for key, content in run.cases.items()}
    cases = {key: facts for key, facts in read.items() if facts is not None}
    for key, case in cases.items():
        if case.comparison_id not in run.comparisons:
            errors.add(ResultsError(f"{path}: cases.{key}.comparison_id: no comparison {brief(case.comparison_id)}"))
    for (key, role), number in Counter((case.comparison_id, case.role) for case in cases.values()).items():
        if role not in SHARED_ROLES and number > 1 and comparisons.pop(key, None) is not None:
            errors.add(ResultsError(f"{path}: comparisons.{key}: expected one {role} case, got {number}"))
    ordered = sorted(cases.items(), key=lambda item: item[1].order)
    return comparisons, {key: case for key, case in ordered if case.comparison_id in comparisons}


def _place_in_sweep(facts: TimedFacts | RoutedFacts) -> tuple[list[tuple[bool, Any]], int]:
    """Sorts comparisons by the values of their swept keys, numbers before words, then by the config's order."""
    point = facts.point if isinstance(facts, TimedFacts) else {}
    values = [point[key] for key in sorted(point)]
    places = [(False, value) if isinstance(value, int | float) else (True, json.dumps(value)) for value in values]
    return places, facts.order if isinstance(facts, RoutedFacts) else 0


# ---- a comparison ----------------------------------------------------------------------------------------------------


def _read_comparison(
    files: RunDirectory,
    paths: Mapping[str, Sequence[Path]],
    key: tuple[str, str],
    facts: TimedFacts | RoutedFacts,
    run: RunFacts,
    listed: Mapping[str, CaseFacts],
    errors: Errors,
) -> Read:
    """Read all parts of a comparison, ``case`` of whose frames is a row of its cases.

    Raises:
        ResultsError: a part cannot be trusted, or says nothing of a case that others know.
    """
    is_timed = isinstance(facts, TimedFacts)
    first = "samples" if is_timed else "routing"
    parts: dict[str, list[Part]] = {}
    for table, columns in _COLUMNS.items():
        more = ["status", "reason"] if table == "samples" else []
        mode = {} if table == "frontier" else {"mode": run.mode}
        identity = {"comparison_id": key[1], **mode}
        parts[table] = [read_part(table, path, identity, [*more, *columns]) for path in paths[table]]
    routed = (case_id for part in parts["routing"] for case_id in part.rows["case_id"].unique())
    statuses = _statuses(parts["samples"]) if is_timed else dict.fromkeys(routed, ("ok", None))
    cases = pd.DataFrame(
        [(case_id, listed[case_id], *statuses[case_id]) for case_id in listed if case_id in statuses],
        columns=["case_id", "facts", "status", "reason"],
    )
    if missing := [case for case_id, case in listed.items() if case_id not in statuses]:
        path = files.path(first, key[1], 0 if is_timed else None)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        left = f"no rows of {missing[0].label}{more}; the run did not finish: start it again to go on"
        errors.add(ResultsError(f"{path}: {left}"))
    ok = cases[cases["status"] == "ok"]
    frames = {table: _checked(table, of_table, ok, facts) for table, of_table in parts.items()}
    for case in ok.drop(frames["routing"]["case"].unique()).itertuples():
        where = f"{(paths['routing'] or paths[first])[0]} ({case.facts.label})"
        raise ResultsError(f"{where}: expected rows of the table routing too, got none; start the run again")
    _check_units({table: of_table[0] for table, of_table in paths.items() if of_table}, frames, ok)
    measured = [part for part in parts["samples"] if part.rows["case_id"].isin(ok["case_id"]).any()]
    conditions = _conditions(measured) if is_timed and facts.device is None else {}
    return Read(Comparison(*key, facts, run, conditions), cases, frames)


def _statuses(parts: Sequence[Part]) -> dict[str, tuple[str, str | None]]:
    """Status and reason of each case by its id: those of the first launch in which it is not ok."""
    statuses: dict[str, tuple[str, str | None]] = {}
    for part in parts:
        rows = part.rows[["case_id", "launch", "status", "reason"]].drop_duplicates().astype(object)
        for row in rows[rows["case_id"].duplicated() | ~rows["status"].isin(STATUSES)].itertuples():
            expected = f"expected one of {', '.join(STATUSES)} in all rows of a case"
            raise ResultsError(f"{part.path}: status: {expected}, got {brief(row.status)}")
        for row in rows.itertuples():
            reason = None
            if row.status != "ok":
                reason = f"launch {row.launch + 1}: " if len(parts) > 1 else ""
                reason += row.reason if isinstance(row.reason, str) else "no reason was recorded"
            if statuses.get(row.case_id, ("ok", None))[0] == "ok":
                statuses[row.case_id] = row.status, reason
    return statuses


def _checked(table: str, parts: Sequence[Part], ok: pd.DataFrame, facts: TimedFacts | RoutedFacts) -> pd.DataFrame:
    """The rows of cases that are ok, of all parts of a table, held against its rules."""
    if isinstance(facts, RoutedFacts):
        sizes = Sizes(facts.num_experts, facts.num_ranks, facts.num_ranks, facts.num_batches)
    else:
        phases = LAYER_PHASES if facts.whole is None else tuple(PHASES)
        sizes = Sizes(facts.num_experts, facts.num_ranks, facts.world_size, phases=(*phases, TOTAL, UNACCOUNTED))
    frames = [pd.DataFrame(columns=["case", *_COLUMNS[table]])]
    for part in parts:
        place_N = pd.Index(ok["case_id"]).get_indexer(part.rows["case_id"])
        rows = part.rows[place_N >= 0]
        check(table, part.path, rows, sizes)
        rows = rows.assign(case=ok.index[place_N[place_N >= 0]])[["case", *_COLUMNS[table]]]
        if table == "samples":
            rows = rows.astype({"rank": int, "batch": int, "iteration": int, **_WORDS})
        frames.append(rows)
    return together(frames)


def _check_units(paths: Mapping[str, Path], frames: Mapping[str, pd.DataFrame], ok: pd.DataFrame) -> None:
    """Raise ResultsError where routing lacks a timed batch of a case, or a frontier other units than routing."""

    def units(table: str, *names: str) -> set[tuple[float, ...]]:
        rows = frames[table][["case", *names]].drop_duplicates()
        return set(map(tuple, rows.astype(float).fillna(-1).to_numpy()))

    unit, with_frontier = ("batch", "layer"), set(frames["frontier"]["case"])
    differing = units("routing", *unit) ^ units("frontier", *unit)
    for table, differ, words in (
        ("routing", units("samples", "batch") - units("routing", "batch"), "every timed batch, got none"),
        (
            "frontier",
            {(case, batch) for case, batch, _ in differing if case in with_frontier},
            "each batch and layer of the routing once, got others",
        ),
    ):
        for case, batch in sorted(differ)[:1]:
            label = ok["facts"][case].label
            raise ResultsError(f"{paths[table]} ({label}): batch: expected rows of {words} of batch {batch:g}")


def _conditions(parts: Sequence[Part]) -> dict[int, Conditions]:
    """Under which conditions each launch was timed."""
    conditions: dict[int, Conditions] = {}
    for path, rows, told in parts:
        if told is None:
            raise ResultsError(f"{path}: conditions: missing in its metadata; they say how the cases were timed")
        try:
            content = parse_json(told, f"{path}: conditions")
        except ValueError as error:
            raise ResultsError(str(error)) from None
        launch = typed(Conditions, path, "conditions", content)
        conditions[int(rows["launch"].iloc[0])] = launch
        if len({len(launch.ranks) for launch in conditions.values()}) > 1:
            got = len(launch.ranks)
            raise ResultsError(f"{path}: conditions.ranks: expected as many as in other launches, got {got}")
    return conditions
