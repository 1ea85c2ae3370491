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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.draws import over_draws
from moe_ep_bench.analysis.load import Case, Run, is_quality, is_route, is_whole, load_run
from moe_ep_bench.analysis.parts import ResultsError

# What a directory may hold, and how a note calls it.
KINDS = {"layers": "", "models": "whole models", "routing": "routing only", "quality": "quality"}
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


@dataclass(frozen=True, eq=False)
class Gathered:
    """What directories hold.

    Attributes:
        found: of each of ``KINDS`` its ``Run``, ``RouteRun`` or ``Quality`` by a name that is a folder's, "" where
            there is nothing else.
        passed_over: a line for each thing that could not be trusted.
        notes: a line on what was read as one and what was not; none of a single directory.
    """

    found: dict[str, dict[str, Any]]
    passed_over: list[str]
    notes: list[str]


def kind_of(directory: Path) -> str:
    """Which of ``KINDS`` a directory holds."""
    kinds = {"models": is_whole, "routing": is_route, "quality": is_quality}
    return next((kind for kind, is_kind in kinds.items() if is_kind(directory)), "layers")


def gather(directories: Sequence[Path]) -> Gathered:
    """Read directories, each with what can be trusted of it; one that is named twice is read once."""
    found: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    passed_over, notes = [], []
    pools: dict[tuple, dict[str, Run]] = {}
    for name, directory in _named(directories).items():
        kind = kind_of(directory)
        try:
            run = _read(kind, directory, passed_over)
        except ResultsError as error:
            passed_over.append(str(error))
            continue
        if kind == "layers":
            pools.setdefault((run.mode, *(getattr(run, key) for key in _POOLED)), {})[name] = run
        else:
            found[kind][name] = run
    for members in pools.values():
        name = next(iter(members))
        run, words = pool(members)
        notes += words
        found["layers"][f"{name}-and-{len(members) - 1}-more" if len(members) > 1 else name] = over_draws(run)[0]
    if sum(map(len, found.values())) == 1:
        (kind,) = (kind for kind, of in found.items() if of)
        found[kind] = {"": found[kind].popitem()[1]}
    elif any(found.values()):
        members = [", ".join(pool_of) for pool_of in pools.values()]
        apart = []
        for of, run in zip(members, found["layers"].values(), strict=True):
            known = [f"{name}{getattr(run, key)}" for key, name in _POOLED.items() if getattr(run, key) is not None]
            apart.append(f"{of} ({', '.join(['measured' if run.mode == 'run' else run.mode, *known])})")
        for kind in ("routing", "models", "quality"):
            apart += [f"{name} ({KINDS[kind]})" for name in found[kind]]
        notes.append(f"kept apart, for mode, device or versions differ: {'; '.join(apart)}")
        for (name, run), of in zip(found["layers"].items(), members, strict=True):
            found["layers"][name] = replace(run, named=f"from {of}")
        found["routing"] = {name: route.named(f"from {name}") for name, route in found["routing"].items()}
        found["models"] = {name: replace(whole, named=f"from {name}") for name, whole in found["models"].items()}
    return Gathered(found, passed_over, ["; ".join(notes)] if notes else [])


def _read(kind: str, directory: Path, passed_over: list[str]) -> Any:
    if kind == "quality":
        from moe_ep_bench.analysis.quality_frames import read_quality

        quality = read_quality(directory)
        if not quality.groups:
            raise ResultsError(f"{directory}: holds scores of tasks, of which there are no figures; `show` prints them")
        return quality
    if kind == "routing":
        from moe_ep_bench.analysis.route.load import load_route  # it imports torch

        return load_route(directory, passed_over)
    run = load_run(directory, passed_over, whole=kind == "models")
    return over_draws(run)[0] if kind == "models" else run


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

    A job wrote one launch: a job that is there already, in a copy of the directory, adds nothing. The second value says
    what became of the runs; nothing of a single one.
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
        if titles[facts.title] > 1:
            apart = ", ".join(names)
            facts = facts.model_copy(update={"title": f"{facts.title}, from {apart}", "directory": apart})
        comparisons[key] = facts
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
