"""Several results directories read side by side.

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
from typing import TYPE_CHECKING

import pandas as pd

from moe_ep_bench.analysis.load import (
    Case,
    Comparison,
    Conditions,
    Run,
    is_quality,
    is_route,
    is_whole,
    load_run,
)
from moe_ep_bench.analysis.parts import ResultsError

if TYPE_CHECKING:
    from moe_ep_bench.analysis.quality_frames import Quality
    from moe_ep_bench.analysis.route.load import RouteRun


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
    found = Gathered()
    runs: dict[str, Run] = {}
    routes: dict[str, RouteRun] = {}
    wholes: dict[str, Run] = {}
    qualities: dict[str, Quality] = {}
    for name, directory in _named(directories).items():
        try:
            if is_quality(directory):
                from moe_ep_bench.analysis.quality_frames import read_quality

                if not (quality := read_quality(directory)).groups:
                    raise ResultsError(
                        f"{directory}: holds scores of tasks, of which there are no figures; `show` prints them"
                    )
                qualities[name] = quality
            elif is_route(directory):
                from moe_ep_bench.analysis.route.load import load_route  # it imports torch

                routes[name] = load_route(directory, found.passed_over)
            elif is_whole(directory):
                wholes[name] = load_run(directory, found.passed_over, whole=True)
            else:
                runs[name] = load_run(directory, found.passed_over)
        except ResultsError as error:
            found.passed_over.append(str(error))
    pools: dict[tuple, dict[str, Run]] = {}
    for name, run in runs.items():
        pools.setdefault(_conditions(run), {})[name] = run
    is_alone = len(pools) + len(routes) + len(wholes) + len(qualities) == 1
    kept_apart = []
    for members in pools.values():
        name, *others = members
        run, words = pool(members)
        found.notes += words
        folder = f"{name}-and-{len(others)}-more" if others else name
        if not is_alone:
            kept_apart.append(f"{', '.join(members)} ({_condition_words(run)})")
            run = replace(run, named=f"from {', '.join(members)}")
        found.runs["" if is_alone else folder] = run
    for name, route in routes.items():
        kept_apart += [] if is_alone else [f"{name} (routing only)"]
        found.routes["" if is_alone else name] = route if is_alone else route.named(f"from {name}")
    for name, whole in wholes.items():
        kept_apart += [] if is_alone else [f"{name} (whole models)"]
        named = whole if is_alone else replace(whole, named=f"from {name}")
        found.wholes["" if is_alone else name] = named
    for name, judged in qualities.items():
        kept_apart += [] if is_alone else [f"{name} (quality)"]
        found.qualities["" if is_alone else name] = judged
    if kept_apart:
        found.notes.append(f"kept apart, for mode, device or versions differ: {'; '.join(kept_apart)}")
    found.notes = ["; ".join(found.notes)] if found.notes else []
    return found


def _named(directories: Iterable[Path]) -> dict[str, Path]:
    """Directories by a short name of each: its own, with as many of the folders above it as tell it from the others."""
    different: dict[Path, Path] = {}
    for directory in directories:
        different.setdefault(directory.resolve(), directory)
    parts = {directory: Path(os.path.abspath(directory)).parts[1:] for directory in different.values()}
    depth = dict.fromkeys(parts, 1)
    while True:
        names = {directory: "-".join(parts[directory][-number:]) or "root" for directory, number in depth.items()}
        counts = Counter(names.values())
        alike = [one for one, name in names.items() if counts[name] > 1 and depth[one] < len(parts[one])]
        if not alike:
            return {name: directory for directory, name in names.items()}
        for directory in alike:
            depth[directory] += 1


def _conditions(run: Run) -> tuple:
    return run.mode, run.scope, run.device_name, run.torch, run.megatron_core, run.nccl, run.driver


def _condition_words(run: Run) -> str:
    mode, scope, *others = _conditions(run)
    names = ("", "torch ", "megatron-core ", "nccl ", "driver ")
    said = [f"{name}{value}" for name, value in zip(names, others, strict=True) if value is not None]
    how = {"run": "measured"}.get(mode, mode)
    return ", ".join([f"whole models, {how}" if scope == "model" else how, *said])


def pool(runs: dict[str, Run]) -> tuple[Run, list[str]]:
    """Make one run of several by name, all of one mode, device and versions.

    Returns:
        The run, and in words what became of them; nothing of a single one.
    """
    (_, first), *_ = runs.items()
    if len(runs) == 1:
        return first, []
    comparisons: dict[str, Comparison] = {}
    cases: dict[tuple[str, str], Case] = {}  # by comparison and case
    conditions: dict[str, dict[int, Conditions]] = {}
    sources: dict[str, list[str]] = {}
    variants: dict[str, list[str]] = {}  # of one defined comparison, those that were recorded differently
    merged, differing, repeated = [], [], []
    for name, run in runs.items():
        for original, facts in run.comparisons.items():
            own = {case.case_id: case for case in run.cases if case.comparison_id == original}
            known = variants.setdefault(original, [])
            alike = (one for one in known if comparisons[one] == facts and _recorded_alike(one, own, cases))
            comparison_id = next(alike, original if not known else f"{original} of {name}")
            launches, num_known = _launches_among(comparison_id, own, cases)
            if comparison_id not in comparisons:
                known.append(comparison_id)
                comparisons[comparison_id] = facts
                differing += [facts.title] if len(known) > 1 else []
            else:
                has_new = any(number >= num_known for number in launches.values())
                (merged if has_new else repeated).append(facts.title)
            sources.setdefault(comparison_id, []).append(name)
            for case in own.values():
                key = (comparison_id, case.case_id)
                moved = _moved(replace(case, comparison_id=comparison_id), launches)
                cases[key] = _joined(cases[key], moved) if key in cases else moved
            ours = run.conditions.get(original, {})
            known_conditions = conditions.setdefault(comparison_id, {})
            known_conditions |= {new: ours[old] for old, new in launches.items() if old in ours}
    words = [f"read as one: {', '.join(runs)}"]
    for titles, what in (
        (merged, "with further launches of"),
        (repeated, "the same job's, so read once"),
        (differing, "recorded differently, so kept apart"),
    ):
        words += [f"{what}: {' / '.join(dict.fromkeys(titles))}"] if titles else []
    titled = _told_apart(comparisons, sources)
    pooled = replace(first, comparisons=titled, cases=tuple(cases.values()), conditions=conditions)
    return pooled, [", ".join(words)]


def _recorded_alike(comparison_id: str, own: dict[str, Case], cases: dict[tuple[str, str], Case]) -> bool:
    """Whether cases that both have are described alike."""

    def described(case: Case) -> tuple:
        return case.policy, case.policy_params, case.label, case.role, case.extra_bytes_per_rank

    both = ((case, cases.get((comparison_id, case_id))) for case_id, case in own.items())
    return all(other is None or described(case) == described(other) for case, other in both)


def _launches_among(
    comparison_id: str, own: dict[str, Case], cases: dict[tuple[str, str], Case]
) -> tuple[dict[int, int], int]:
    """New numbers of a comparison's launches, beside those that are there, and from which number on they are new.

    A job wrote one launch: where it is there already, in a copy of the directory, its launch is that one.
    """
    there = [case for (other, _), case in cases.items() if other == comparison_id]
    numbers = {run_id: launch for case in there for launch, run_id in case.run_ids.items()}
    offset = 1 + max(numbers.values(), default=-1)
    ours = {launch: run_id for case in own.values() for launch, run_id in case.run_ids.items()}
    return {launch: numbers.get(run_id, launch + offset) for launch, run_id in ours.items()}, offset


def _moved(case: Case, launches: dict[int, int]) -> Case:
    """A case with its launches renumbered."""
    numbers = case.timings["launch"].map(launches).astype(case.timings["launch"].dtype)
    run_ids = {launches[launch]: run_id for launch, run_id in case.run_ids.items()}
    return replace(case, timings=case.timings.assign(launch=numbers), run_ids=run_ids)


def _joined(first: Case, second: Case) -> Case:
    """One case of two, of each launch the first's rows. As within a directory, one that failed in a launch failed."""
    run_ids = {**second.run_ids, **first.run_ids}
    if not first.is_ok or set(run_ids) == set(first.run_ids):
        return replace(first, run_ids=run_ids)
    if not second.is_ok:
        return replace(second, run_ids=run_ids)
    further = second.timings[~second.timings["launch"].isin(list(first.run_ids))]
    return replace(first, timings=pd.concat([first.timings, further], ignore_index=True), run_ids=run_ids)


def _told_apart(comparisons: dict[str, Comparison], sources: dict[str, list[str]]) -> dict[str, Comparison]:
    """Comparisons of different directories that have one title say where they are from."""
    origins: dict[str, set[str]] = {}
    for comparison_id, facts in comparisons.items():
        origins.setdefault(facts.title, set()).add(", ".join(sources[comparison_id]))
    return {
        comparison_id: facts.model_copy(update={"title": f"{facts.title}, from {', '.join(sources[comparison_id])}"})
        if len(origins[facts.title]) > 1
        else facts
        for comparison_id, facts in comparisons.items()
    }
