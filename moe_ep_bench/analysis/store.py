"""From directories to a store: comparisons with their typed facts, each with its cases' samples and routing.

Every figure and table rests on these files, so they are checked here and in ``reading``, once: what is missing, damaged
or of another run is an error that names it, never a gap that nobody sees. Who would rather see the rest of a directory
gives a list for these lines: what cannot be trusted is then left out and named. Directories stand beside each other and
are never pooled: two jobs share no moment.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from moe_ep_bench.analysis.iterations import Iterations, iterations_of
from moe_ep_bench.analysis.reading import (
    SAMPLE,
    Errors,
    Part,
    ResultsError,
    check_routing,
    launches_of,
    read_document,
    read_frontier,
    read_part,
    read_run_json,
    samples_of,
    typed,
)
from moe_ep_bench.errors import printable
from moe_ep_bench.facts import SHARED_ROLES, CaseFacts, Conditions, JudgedFacts, RoutedFacts, RunFacts, TimedFacts
from moe_ep_bench.files import checked_json
from moe_ep_bench.results import RunDirectory, ValidationDirectory
from moe_ep_bench.schema import LAYER_PHASES, PHASES, ROUTING_SCHEMA

# Columns of ``ROUTING_SCHEMA`` that are read: a case has its words already.
_ROUTED = [field.name for field in ROUTING_SCHEMA if field.type != pa.string()]
_PARTS = {"run": ("samples", "routing"), "emulated": ("samples", "routing"), "route": ("routing",)}
_COLUMNS = {"samples": ["run_id", "status", "reason", *SAMPLE], "routing": _ROUTED, "frontier": None}


@dataclass(frozen=True, eq=False)
class Case:
    """One policy on one workload.

    Attributes:
        status: one of ``STATUSES``; ``reason`` says why when it is not ok. A case that failed in one launch failed.
        run_ids: the job that wrote each launch.
        samples: the columns ``SAMPLE``; of a whole model each phase of every layer; no rows unless timed.
        routing: numbers of ``ROUTING_SCHEMA``, a row per rank, batch and layer; no rows unless ok.
        frontier: one row per layer and batch, as in ``FRONTIER_SCHEMA``; None where it was not computed.
    """

    case_id: str
    facts: CaseFacts
    status: str
    reason: str | None
    run_ids: dict[int, str]
    samples: pd.DataFrame
    routing: pd.DataFrame
    frontier: pd.DataFrame | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @cached_property
    def plain(self) -> Iterations:
        """Plain iterations, of which only the totals are timed."""
        return iterations_of(self.samples, "plain")

    @cached_property
    def breakdown(self) -> Iterations:
        return iterations_of(self.samples, "breakdown")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Cases on the same batches, in run.json's order, and under which conditions each launch was timed."""

    directory: str
    comparison_id: str
    facts: TimedFacts | RoutedFacts
    run: RunFacts
    cases: tuple[Case, ...]
    conditions: dict[int, Conditions] = field(default_factory=dict)

    def case_of(self, role: str) -> Case | None:
        """The measured case of a role that one case holds (baseline, noise, ceiling), if there is one."""
        return next((case for case in self.cases if case.facts.role == role and case.is_ok), None)


@dataclass(frozen=True, eq=False)
class Store:
    """Comparisons in the order of their directories and sweeps; ``folders`` by the column ``directory``."""

    folders: dict[str, Path]
    comparisons: tuple[Comparison, ...]

    @cached_property
    def by_id(self) -> dict[tuple[str, str], Comparison]:
        return {(one.directory, one.comparison_id): one for one in self.comparisons}


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


def read_store(directories: Iterable[Path], passed_over: list[str] | None = None) -> Store:
    """Read and check directories of times or of routing; one that is named twice is read once.

    Args:
        passed_over: gets a line for each thing that cannot be trusted and is left out; None = the first is raised.

    Raises:
        ResultsError: one line that names the file and what is wrong with it; with ``passed_over`` only where nothing
            is left.
    """
    folders, comparisons = _named(directories), []
    for name, folder in folders.items():
        if passed_over is None or len(folders) == 1:
            comparisons += _read_directory(name, folder, passed_over)
            continue
        lines: list[str] = []
        read = Errors(passed_over).read(_read_directory, name, folder, lines)
        if read is not None:  # else the error's line says why
            passed_over += lines
            comparisons += read
    if not comparisons:
        raise ResultsError(f"{', '.join(map(str, folders.values()))}: nothing can be read; {(passed_over or [''])[-1]}")
    return Store(folders, tuple(comparisons))


def _named(directories: Iterable[Path]) -> dict[str, Path]:
    """Directories by a short name of each: its own, with as many of the folders above it as tell it from the others."""
    different: dict[Path, Path] = {}
    for directory in directories:
        different.setdefault(directory.resolve(), directory)
    parts = {directory: Path(os.path.abspath(directory)).parts[1:] for directory in different.values()}
    names = {}
    for directory, path in parts.items():
        ends = (path[-number:] for number in range(1, len(path) + 1))
        unique = (end for end in ends if sum(other[-len(end) :] == end for other in parts.values()) == 1)
        names["-".join(next(unique, path)) or "root"] = directory
    return names


def _read_directory(name: str, folder: Path, passed_over: list[str] | None) -> list[Comparison]:
    files, errors, kind = RunDirectory(folder), Errors(passed_over), kind_of(folder)
    if kind == "validation":
        raise ResultsError(f"{folder}: holds two runs side by side: name {folder}/real or {folder}/emulated")
    if kind == "quality":
        raise ResultsError(
            f"{folder}: holds what policies do to a model's answers, without times; expected times or routing"
        )
    run = typed(RunFacts, files.run_json, "", read_run_json(files.run_json))
    if run.mode not in _PARTS:
        raise ResultsError(f"{files.run_json}: mode: expected one of {', '.join(_PARTS)}, got {run.mode!r}")
    facts, listed = facts_of(files.run_json, run, errors)
    parts = {table: files.parts(table) for table in ("samples", "routing", "frontier")}
    for key, path in ((key, paths[0]) for of_table in parts.values() for key, paths in of_table.items()):
        if key not in run.comparisons:
            errors.add(ResultsError(f"{path}: foreign, run.json lists no comparison {key!r}"))
    found, missing = [], []
    for key, one in sorted(facts.items(), key=lambda item: _place_in_sweep(item[1])):
        cases = {case_id: case for case_id, case in listed.items() if case.comparison_id == key}
        of_table = {table: of_table.get(key, []) for table, of_table in parts.items()}
        read, conditions, are_all = _read_comparison(files, of_table, key, one, cases, run.mode, errors)
        found.append(Comparison(name, key, one, run, tuple(read.values()), conditions))
        # Of what is there and cannot be read another line says so.
        missing += [case for case_id, case in cases.items() if are_all and case_id not in read]
    if missing:
        table = _PARTS[run.mode][0]
        path = files.path(table, missing[0].comparison_id, 0 if table == "samples" else None)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        left = f"no rows of {missing[0].label}{more}; the run did not finish: start it again to go on"
        errors.add(ResultsError(f"{path}: {left}"))
    cases = [case for one in found for case in one.cases]
    if not any(case.is_ok for case in cases):
        counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(c.status for c in cases).items()))
        first = f"; {cases[0].facts.label}: {printable(str(cases[0].reason))}" if cases else ""
        nothing = f"none can be read: {passed_over[-1]}" if passed_over else "run.json lists none"
        raise ResultsError(f"{files.root}: no case was measured ({counts or nothing}){first}")
    if passed_over is not None:
        passed_over += [line for one in found for line in _without_baseline(files.run_json, one)]
    return found


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
            errors.add(ResultsError(f"{path}: cases.{key}.comparison_id: no comparison {case.comparison_id!r}"))
    for (key, role), number in Counter((case.comparison_id, case.role) for case in cases.values()).items():
        if role not in SHARED_ROLES and number > 1 and comparisons.pop(key, None) is not None:
            errors.add(ResultsError(f"{path}: comparisons.{key}: expected one {role} case, got {number}"))
    ordered = sorted(cases.items(), key=lambda item: item[1].order)
    return comparisons, {key: case for key, case in ordered if case.comparison_id in comparisons}


def _read_comparison(
    files: RunDirectory,
    paths: Mapping[str, Sequence[Path]],
    comparison_id: str,
    facts: TimedFacts | RoutedFacts,
    cases: Mapping[str, CaseFacts],
    mode: str,
    errors: Errors,
) -> tuple[dict[str, Case], dict[int, Conditions], bool]:
    """The cases of a comparison that can be trusted, the conditions of each launch, and whether all could be read."""
    identity = {"comparison_id": comparison_id}
    parts: dict[str, list[Part]] = {}
    for table, columns in _COLUMNS.items():
        own = {**identity, **({} if table == "frontier" else {"mode": mode})}
        read = [errors.read(read_part, files, table, path, own, columns) for path in paths[table]]
        parts[table] = [part for part in read if part is not None]
    is_lost = {table: len(parts[table]) < len(paths[table]) for table in parts}
    found, conditions, are_all = {}, {}, not any(is_lost.values())
    for case_id, case in cases.items():
        of_case = {table: [part for part in of_table if case_id in part.cases] for table, of_table in parts.items()}
        first = "routing" if isinstance(facts, RoutedFacts) else "samples"
        if not of_case[first] or (is_lost["routing"] and not of_case["routing"]):
            continue
        read = errors.read(_read_case, case_id, case, facts, of_case)
        are_all = are_all and read is not None
        if read is not None:
            found[case_id] = read
    if isinstance(facts, TimedFacts) and facts.device is None:
        timed = {launch for case in found.values() if case.is_ok for launch in case.run_ids}
        of_launches = {part.launch: part for part in parts["samples"]}
        for launch in sorted(timed):
            one = errors.read(_read_conditions, of_launches[launch], {len(one.ranks) for one in conditions.values()})
            if one is not None:
                conditions[launch] = one
    return found, conditions, are_all


def _read_case(
    case_id: str, case: CaseFacts, facts: TimedFacts | RoutedFacts, parts: Mapping[str, Sequence[Part]]
) -> Case:
    """A case of the parts that have rows of it."""
    samples, frontier = pd.DataFrame(columns=SAMPLE), pd.DataFrame(columns=_ROUTED)
    run_ids: dict[int, str] = {}
    if isinstance(facts, RoutedFacts):
        world_size, num_batches = facts.num_ranks, facts.num_batches
    else:
        world_size, num_batches, where = facts.world_size, None, f"{parts['samples'][0].path} ({case.label})"
        tables = [part.cases[case_id] for part in parts["samples"]]
        launches = launches_of(where, pa.concat_tables(tables))
        run_ids = {launch: row["run_id"] for launch, row in launches.items()}
        for launch, row in launches.items():
            if row["status"] != "ok":
                reason = row["reason"] or "no reason was recorded"
                reason = f"launch {launch + 1}: {reason}" if len(launches) > 1 else reason
                return Case(case_id, case, row["status"], reason, run_ids, samples, frontier)
        phases = LAYER_PHASES if facts.whole is None else tuple(PHASES)
        samples = samples_of(where, pa.concat_tables(tables), world_size, phases)
        if not parts["routing"]:
            raise ResultsError(f"{where}: expected rows of the table routing too, got none; start the run again")
    part = parts["routing"][0]
    where, routing = f"{part.path} ({case.label})", part.cases[case_id].select(_ROUTED).to_pandas()
    sizes = {"num_experts": facts.num_experts, "num_ranks": facts.num_ranks}
    check_routing(where, routing, world_size=world_size, num_batches=num_batches, **sizes)
    if lacking := sorted({*samples["batch"]} - {*routing["batch"]}):
        raise ResultsError(f"{where}: batch: expected rows of every timed batch, got none of {lacking[0]}")
    found = [read_frontier(one.path, one.cases[case_id], routing) for one in parts["frontier"]]
    return Case(case_id, case, "ok", None, run_ids, samples, routing, found[0] if found else None)


def _read_conditions(part: Part, num_ranks: Collection[int]) -> Conditions:
    """Of one launch; ``num_ranks`` is what other launches of the comparison had, if there are any."""
    if part.conditions is None:
        raise ResultsError(f"{part.path}: conditions: missing in its metadata; they say how the cases were timed")
    try:
        content = checked_json(part.conditions, f"{part.path}: conditions")
    except ValueError as error:
        raise ResultsError(str(error)) from None
    conditions = typed(Conditions, part.path, "conditions", content)
    if num_ranks and len(conditions.ranks) not in num_ranks:
        got = len(conditions.ranks)
        raise ResultsError(f"{part.path}: conditions.ranks: expected as many as in other launches, got {got}")
    return conditions


def _without_baseline(path: Path, comparison: Comparison) -> Sequence[str]:
    """A line where a comparison can have no speedups."""
    number = sum(case.is_ok for case in comparison.cases)
    if isinstance(comparison.facts, RoutedFacts) or not number or comparison.case_of("baseline") is not None:
        return []
    return [
        f"{path}: comparisons.{comparison.comparison_id} ({comparison.facts.title}): native, its baseline, is not "
        f"there as measured, so its {number} cases have no speedups"
    ]


def _place_in_sweep(facts: TimedFacts | RoutedFacts) -> tuple[list[tuple[bool, Any]], int]:
    """Sorts comparisons by the values of their swept keys, numbers before words, then by the config's order."""
    point = facts.point if isinstance(facts, TimedFacts) else {}
    values = [point[key] for key in sorted(point)]
    places = [(False, value) if isinstance(value, int | float) else (True, json.dumps(value)) for value in values]
    return places, facts.order if isinstance(facts, RoutedFacts) else 0
