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
from collections.abc import Collection, Iterable, Sequence
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
from moe_ep_bench.results import RunDirectory, ValidationDirectory
from moe_ep_bench.schema import LAYER_PHASES, PHASES, ROUTING_SCHEMA, SAMPLES_SCHEMA

# Columns of ``ROUTING_SCHEMA`` that are read: a case has its words already.
_ROUTED = [field.name for field in ROUTING_SCHEMA if field.type != pa.string()]
_PARTS = {"run": ("samples", "routing"), "emulated": ("samples", "routing"), "route": ("routing",)}


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
        return "timed" if RunDirectory(directory).path("samples", "any").parent.exists() else "routed"
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
        else:
            comparisons += Errors(passed_over).read(_read_directory, name, folder, passed_over) or []
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
    for path in sorted(
        path for table in ("samples", "routing") for path in files.path(table, "").parent.glob("*.parquet")
    ):
        # ``route`` leaves what it routed by an earlier version of a policy.
        if path.stem not in run.cases and run.mode != "route":
            errors.add(ResultsError(f"{path}: foreign, run.json lists no case {path.stem!r}"))
    read = [
        errors.read(_read_case, files, case_id, case, facts[case.comparison_id], run.mode)
        for case_id, case in _with_parts(files, listed, _PARTS[run.mode][0], errors).items()
    ]
    cases = [case for case in read if case is not None]
    if run.mode == "route":
        conditions: dict[str, dict[int, Conditions]] = {}
    else:
        modelled = [key for key, one in facts.items() if one.device is not None]
        cases, jobs = _of_one_job(files, cases, errors, modelled)
        conditions = _read_all_conditions(
            files, {key: job for key, job in jobs.items() if key[0] not in modelled}, errors
        )
    if not any(case.is_ok for case in cases):
        counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(c.status for c in cases).items()))
        first = f"; {cases[0].facts.label}: {printable(str(cases[0].reason))}" if cases else ""
        nothing = "none can be read" if passed_over else "run.json lists none"
        raise ResultsError(f"{files.root}: no case was measured ({counts or nothing}){first}")
    found = [
        Comparison(
            name,
            comparison_id,
            one,
            run,
            tuple(case for case in cases if case.facts.comparison_id == comparison_id),
            conditions.get(comparison_id, {}),
        )
        for comparison_id, one in sorted(facts.items(), key=lambda item: _place_in_sweep(item[1]))
    ]
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


def _with_parts(files: RunDirectory, cases: dict[str, CaseFacts], table: str, errors: Errors) -> dict[str, CaseFacts]:
    """The cases that have their parts; one line for all others, which an unfinished run leaves."""
    paths = {key: errors.read(files.path, table, key) for key in cases}
    cases = {key: case for key, case in cases.items() if paths[key] is not None}
    missing = [key for key in cases if not files.path(table, key).is_file()]
    if missing:
        path, label = files.path(table, missing[0]), cases[missing[0]].label
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        errors.add(ResultsError(f"{path}: missing; the run did not finish ({label}{more}): start it again to go on"))
    return {key: case for key, case in cases.items() if key not in missing}


def _read_case(files: RunDirectory, case_id: str, case: CaseFacts, facts: TimedFacts | RoutedFacts, mode: str) -> Case:
    identity = {"case_id": case_id, "comparison_id": case.comparison_id, "mode": mode}
    empty = pd.DataFrame(columns=SAMPLE), pd.DataFrame(columns=_ROUTED)
    if isinstance(facts, RoutedFacts):
        routing, frontier = _read_routing(files, case_id, identity, facts, facts.num_ranks, facts.num_batches)
        return Case(case_id, case, "ok", None, {}, empty[0], routing, frontier)
    path, routing_path = files.path("samples", case_id), files.path("routing", case_id)
    part = read_part(path, SAMPLES_SCHEMA, identity, ["run_id", "status", "reason", *SAMPLE])
    launches = launches_of(path, part)
    run_ids = {launch: row["run_id"] for launch, row in launches.items()}
    for launch, row in launches.items():
        if row["status"] != "ok":
            reason = row["reason"] or "no reason was recorded"
            reason = f"launch {launch + 1}: {reason}" if len(launches) > 1 else reason
            return Case(case_id, case, row["status"], reason, run_ids, *empty)
    samples = samples_of(path, part, facts.world_size, LAYER_PHASES if facts.whole is None else tuple(PHASES))
    if not routing_path.is_file():
        raise ResultsError(f"{routing_path}: missing; the run did not finish ({case.label}): start it again to go on")
    routing, frontier = _read_routing(files, case_id, identity, facts, facts.world_size)
    if lacking := sorted(set(part["batch"].to_pylist()) - {None, *routing["batch"]}):
        raise ResultsError(f"{routing_path}: batch: expected rows of every timed batch, got none of {lacking[0]}")
    return Case(case_id, case, "ok", None, run_ids, samples, routing, frontier)


def _read_routing(
    files: RunDirectory,
    case_id: str,
    identity: dict[str, str],
    facts: TimedFacts | RoutedFacts,
    world_size: int,
    num_batches: int | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """The case's routing and its frontier."""
    path = files.path("routing", case_id)
    rows = read_part(path, ROUTING_SCHEMA, identity, _ROUTED).select(_ROUTED).to_pandas()
    sizes = {"num_experts": facts.num_experts, "num_ranks": facts.num_ranks}
    check_routing(path, rows, world_size=world_size, num_batches=num_batches, **sizes)
    return rows, read_frontier(files, case_id, rows)


def _of_one_job(
    files: RunDirectory, cases: list[Case], errors: Errors, modelled: Collection[str]
) -> tuple[list[Case], dict[tuple[str, int], str]]:
    """Pairs ran back to back: in each launch, measured cases of a comparison are of one job, not of two repetitions.

    What is modelled (ids of comparisons) gives the same whenever it is asked. Of two jobs the baseline's stands, for
    nothing is said without it; where it is not there, the first case's.

    Returns:
        The cases that stand, and the job of every comparison and launch that was measured.
    """
    first: dict[tuple[str, int], Case] = {}
    strangers = set()
    for case in sorted((case for case in cases if case.is_ok), key=lambda case: case.facts.role != "baseline"):
        comparison_id = case.facts.comparison_id
        others = {launch: first.setdefault((comparison_id, launch), case) for launch in case.run_ids}
        for launch, other in others.items() if comparison_id not in modelled else ():
            if other.run_ids[launch] != case.run_ids[launch] and case.case_id not in strangers:
                strangers.add(case.case_id)
                path, other_path = (files.path("samples", one.case_id) for one in (case, other))
                errors.add(
                    ResultsError(
                        f"{path}: of another job than {other_path.name}, so their iterations are no pairs "
                        f"({case.run_ids[launch]}, {other.run_ids[launch]}): run the comparison again"
                    )
                )
    jobs = {(comparison_id, launch): case.run_ids[launch] for (comparison_id, launch), case in first.items()}
    return [case for case in cases if case.case_id not in strangers], jobs


def _read_all_conditions(
    files: RunDirectory, jobs: dict[tuple[str, int], str], errors: Errors
) -> dict[str, dict[int, Conditions]]:
    """By comparison and launch, of the launches that were measured."""
    conditions: dict[str, dict[int, Conditions]] = {}
    for (comparison_id, launch), run_id in jobs.items():
        launches = conditions.setdefault(comparison_id, {})
        num_ranks = {len(one.ranks) for one in launches.values()}
        one = errors.read(_read_conditions, files, comparison_id, launch, run_id, num_ranks)
        if one is not None:
            launches[launch] = one
    return conditions


def _read_conditions(
    files: RunDirectory, comparison_id: str, launch: int, run_id: str, num_ranks: Collection[int]
) -> Conditions:
    """Of one launch; ``num_ranks`` is what other launches of the comparison had, if there are any."""
    path = files.conditions_path(comparison_id, launch)
    if not path.is_file():
        raise ResultsError(f"{path}: missing; it says under which conditions the cases were timed")
    conditions = typed(Conditions, path, "", read_document(path))
    if conditions.run_id != run_id:
        raise ResultsError(f"{path}: of another job than the cases ({conditions.run_id}, {run_id})")
    if num_ranks and len(conditions.ranks) not in num_ranks:
        raise ResultsError(f"{path}: ranks: expected as many as in other launches, got {len(conditions.ranks)}")
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
