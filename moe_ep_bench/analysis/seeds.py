"""Comparisons that differ in the seed of their traffic, or in the layer that it is of, become one.

A synthetic workload's seed decides which experts are busy, and so which of them share a rank. Batches of one seed are
alike, seeds are not: an interval over one seed's batches says nothing of another. So each seed becomes a further
launch, with batches of its own, and the interval of a median covers seeds as it covers launches
(``timing.statistics.estimate_median``). Seeds of several launches stay apart: these are not independent of each other.
Layers of a recording, or of counted experts, are joined likewise. Layers that were routed without times keep their
batches, and are told apart by the column ``layer``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from moe_ep_bench.analysis.store import Case, Comparison, Store
from moe_ep_bench.facts import RoutedFacts

SEED = "workload.seed"
LAYERS = ("workload.layer",)
_FRAMES = ("samples", "routing", "frontier")


def joined(store: Store) -> Store:
    """The store with such comparisons joined, each under the id of its first, or of the group of routed layers."""
    members: dict[tuple[str, str], list[Comparison]] = {}
    for one in store.comparisons:
        members.setdefault((one.directory, _but_for_the_seed(one)), []).append(one)
    return replace(store, comparisons=tuple(map(_join, members.values())))


def _but_for_the_seed(one: Comparison) -> str:
    """What comparisons that are joined have alike; what a seed achieved may differ, what was asked for may not."""
    facts = one.facts
    if isinstance(facts, RoutedFacts):
        return facts.group
    if {SEED, *LAYERS}.isdisjoint(facts.point) or any(len(case.run_ids) > 1 for case in one.cases):
        return one.comparison_id
    point = {key: value for key, value in facts.point.items() if key not in (SEED, *LAYERS)}
    targets = {key: value for key, value in facts.workload.targets.items() if key != "expert_loads"}
    asked = [point, facts.workload.kind, targets, facts.workload.skew]
    apart = {"point": True, "workload": True, "title": True, "sizes": True, "order": True}
    apart |= {"whole": {"num_shared_by_chance"}}
    return json.dumps([facts.model_dump(mode="json", exclude=apart), asked], sort_keys=True)


def _join(members: Sequence[Comparison]) -> Comparison:
    """One comparison of several; of layers that were routed, cases that one lacks are left out."""
    first, facts = members[0], members[0].facts
    parts: dict[tuple[str, ...], list[Case]] = {}
    conditions, num_batches = {}, 0
    if isinstance(facts, RoutedFacts):
        members = sorted(members, key=lambda one: one.facts.layer or 0)
    elif len(members) == 1:
        return first
    for launch, one in enumerate(members):
        values = {"layer": one.facts.layer} if isinstance(one.facts, RoutedFacts) else {"launch": launch}
        for case in one.cases:
            about = case.facts
            key = (about.role, about.policy, json.dumps(about.policy_params, sort_keys=True), about.label)
            parts.setdefault(key, []).append(_moved(case, values, num_batches))
        if not isinstance(one.facts, RoutedFacts):
            conditions |= zip([launch], one.conditions.values(), strict=False)  # of what is modelled there are none
            num_batches += one.facts.num_batches
    if isinstance(facts, RoutedFacts):
        cases = (_one_of(alike) for alike in parts.values() if len(alike) == len(members))
        return replace(first, comparison_id=facts.group, cases=tuple(cases))
    point = {key: value for key, value in facts.point.items() if key not in (SEED, *LAYERS)}
    draws = len(members) if SEED in facts.point else 1
    facts = facts.model_copy(update={"point": point, "num_batches": num_batches, "draws": draws})
    return replace(first, facts=facts, conditions=conditions, cases=tuple(map(_one_of, parts.values())))


def _moved(case: Case, values: dict[str, int | None], batches: int) -> Case:
    """A case whose rows have these values, behind so many batches of other seeds."""

    def moved(rows: pd.DataFrame | None) -> pd.DataFrame | None:
        if rows is None:
            return None
        given = {key: value for key, value in values.items() if key in rows and value is not None}
        return rows.assign(batch=rows["batch"] + batches, **given)

    run_ids = {values.get("launch", launch): run_id for launch, run_id in case.run_ids.items()}
    return replace(case, run_ids=run_ids, **{name: moved(getattr(case, name)) for name in _FRAMES})


def _one_of(parts: list[Case]) -> Case:
    """One case of several; as within a directory, one that failed in a launch failed."""
    run_ids = {launch: run_id for part in parts for launch, run_id in part.run_ids.items()}
    failed = next((part for part in parts if not part.is_ok), None)
    if failed is not None:
        return replace(failed, run_ids=run_ids)
    frames = {name: [getattr(part, name) for part in parts] for name in _FRAMES}
    whole = {
        name: None if any(rows is None for rows in of_parts) else pd.concat(of_parts, ignore_index=True)
        for name, of_parts in frames.items()
    }
    return replace(parts[0], run_ids=run_ids, **whole)
