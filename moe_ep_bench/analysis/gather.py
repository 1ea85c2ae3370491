"""Read several results directories side by side.

A question may need more than one job: scaling over EP size takes one per number of ranks. Runs of one mode, on one
device and with the same versions become one run, so that one figure shows them all; a comparison that several of them
hold, defined alike and recorded alike, gains their launches as further launches of its own. What differs in any of
these is never pooled: it is another run, with figures of its own that say whose they are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from moe_ep_bench.analysis.load import Case, Run, is_quality, is_route, is_whole, load_run
from moe_ep_bench.analysis.parts import ResultsError

if TYPE_CHECKING:
    from moe_ep_bench.analysis.quality_frames import Quality
    from moe_ep_bench.analysis.route.load import RouteRun

# What must be alike in runs that are read as one, and how it is named.
_POOLED = {
    "device_name": "",
    "torch": "torch ",
    "megatron_core": "megatron-core ",
    "nccl": "nccl ",
    "driver": "driver ",
}
_MERGED, _REPEATED, _DIFFERING = (
    "with further launches of",
    "the same job's, so read once",
    "recorded differently, so kept apart",
)


@dataclass(eq=False)
class Gathered:
    """What directories hold.

    Attributes:
        runs, routes, wholes, qualities: by a name that is a folder's, "" where there is nothing else.
        passed_over: a line for each thing that could not be trusted.
        notes: a line on what was read as one and what was not; none of a single directory.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    routes: dict[str, RouteRun] = field(default_factory=dict)
    wholes: dict[str, Run] = field(default_factory=dict)
    qualities: dict[str, Quality] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def gather(directories: Sequence[Path]) -> Gathered:
    """Read directories, each with what can be trusted of it.

    Args:
        directories: what ``run``, ``emulate``, ``route`` or ``quality`` wrote; one that is named twice is read once.
    """
    found, notes = Gathered(), []
    pools: dict[tuple, dict[str, Run]] = {}
    for name, directory in _named(directories).items():
        try:
            _read(name, directory, found, pools)
        except ResultsError as error:
            found.passed_over.append(str(error))
    for members in pools.values():
        name = next(iter(members))
        run, words = pool(members)
        notes += words
        found.runs[f"{name}-and-{len(members) - 1}-more" if len(members) > 1 else name] = run
    kinds: list[dict[str, Any]] = [found.runs, found.routes, found.wholes, found.qualities]
    if sum(map(len, kinds)) == 1:
        for kind in kinds:
            for name in list(kind):
                kind[""] = kind.pop(name)
    elif any(kinds):
        members = [", ".join(pool_of) for pool_of in pools.values()]
        apart = []
        for of, run in zip(members, found.runs.values(), strict=True):
            known = [f"{name}{getattr(run, key)}" for key, name in _POOLED.items() if getattr(run, key) is not None]
            apart.append(f"{of} ({', '.join(['measured' if run.mode == 'run' else run.mode, *known])})")
        for kind, what in zip(kinds[1:], ("routing only", "whole models", "quality"), strict=True):
            apart += [f"{name} ({what})" for name in kind]
        notes.append(f"kept apart, for mode, device or versions differ: {'; '.join(apart)}")
        for (name, run), of in zip(found.runs.items(), members, strict=True):
            found.runs[name] = replace(run, named=f"from {of}")
        found.routes = {name: route.named(f"from {name}") for name, route in found.routes.items()}
        found.wholes = {name: replace(whole, named=f"from {name}") for name, whole in found.wholes.items()}
    found.notes = ["; ".join(notes)] if notes else []
    return found


def _read(name: str, directory: Path, found: Gathered, pools: dict[tuple, dict[str, Run]]) -> None:
    """Read one directory; runs of layers go where they may be pooled."""
    if is_quality(directory):
        from moe_ep_bench.analysis.quality_frames import read_quality

        quality = read_quality(directory)
        if not quality.groups:
            raise ResultsError(f"{directory}: holds scores of tasks, of which there are no figures; `show` prints them")
        found.qualities[name] = quality
    elif is_route(directory):
        from moe_ep_bench.analysis.route.load import load_route  # it imports torch

        found.routes[name] = load_route(directory, found.passed_over)
    elif is_whole(directory):
        found.wholes[name] = load_run(directory, found.passed_over, whole=True)
    else:
        run = load_run(directory, found.passed_over)
        pools.setdefault((run.mode, *(getattr(run, key) for key in _POOLED)), {})[name] = run


def _named(directories: Iterable[Path]) -> dict[str, Path]:
    """Directories by a short name of each: its own, with as many of the folders above it as tell it from the others."""
    different: dict[Path, Path] = {}
    for directory in directories:
        different.setdefault(directory.resolve(), directory)
    parts = {directory: Path(os.path.abspath(directory)).parts[1:] for directory in different.values()}
    named = {}
    for directory, own in parts.items():
        ends = (own[-number:] for number in range(1, len(own) + 1))
        unique = (end for end in ends if sum(other[-len(end) :] == end for other in parts.values()) == 1)
        named["-".join(next(unique, own)) or "root"] = directory
    return named


def pool(runs: dict[str, Run]) -> tuple[Run, list[str]]:
    """Make one run of several by name, all of one mode, device and versions.

    A job wrote one launch: a job that is there already, in a copy of the directory, adds nothing.

    Returns:
        The run, and in words what became of them; nothing of a single one.
    """
    first = next(iter(runs.values()))
    if len(runs) == 1:
        return first, []
    # By the comparison's id and how it was recorded: the runs that hold it.
    holders: dict[tuple[str, str], list[str]] = {}
    for name, run in runs.items():
        for comparison_id, facts in run.comparisons.items():
            holders.setdefault((comparison_id, facts.model_dump_json()), []).append(name)
    recorded = Counter(comparison_id for comparison_id, _ in holders)
    titles = Counter(runs[names[0]].comparisons[original].title for (original, _), names in holders.items())
    comparisons, conditions, cases = {}, {}, []
    said: dict[str, list[str]] = {_MERGED: [], _REPEATED: [], _DIFFERING: []}
    for (original, _), names in holders.items():
        facts = runs[names[0]].comparisons[original]
        key = f"{original} of {names[0]}" if original in comparisons else original
        parts: dict[str, list[Case]] = {}
        jobs: dict[str, int] = {}  # the launch of each
        for name in names:
            own = [case for case in runs[name].cases if case.comparison_id == original]
            new = dict.fromkeys(job for case in own for job in case.run_ids.values() if job not in jobs)
            if name != names[0]:
                said[_MERGED if new else _REPEATED].append(facts.title)
            jobs |= {job: number for number, job in enumerate(new, len(jobs))}
            for case in own:
                parts.setdefault(case.case_id, []).append(case)
        said[_DIFFERING] += [facts.title] if recorded[original] > 1 else []
        told_apart = f"{facts.title}, from {', '.join(names)}" if titles[facts.title] > 1 else facts.title
        comparisons[key] = facts.model_copy(update={"title": told_apart})
        found = [one for name in names for one in runs[name].conditions.get(original, {}).values()]
        conditions[key] = {jobs[one.run_id]: one for one in reversed(found) if one.run_id in jobs}
        cases += [replace(_joined(of_case, jobs), comparison_id=key) for of_case in parts.values()]
    words = [f"read as one: {', '.join(runs)}"]
    words += [f"{what}: {' / '.join(dict.fromkeys(of))}" for what, of in said.items() if of]
    return replace(first, comparisons=comparisons, cases=tuple(cases), conditions=conditions), [", ".join(words)]


def _joined(parts: list[Case], jobs: dict[str, int]) -> Case:
    """One case of several, each job's rows once. As within a directory, a case that failed in a launch failed."""
    run_ids = {jobs[job]: job for part in parts for job in part.run_ids.values()}
    failed = next((part for part in parts if not part.is_ok), None)
    if failed is not None:
        return replace(failed, run_ids=run_ids)
    timings, known = [], set()
    for part in parts:
        launches = {launch: jobs[job] for launch, job in part.run_ids.items() if job not in known}
        known.update(part.run_ids.values())
        rows = part.timings[part.timings["launch"].isin(list(launches))]
        timings.append(rows.assign(launch=rows["launch"].map(launches).astype("int32")))
    return replace(parts[0], timings=pd.concat(timings, ignore_index=True), run_ids=run_ids)
