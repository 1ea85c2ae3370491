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
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pandas as pd

from moe_ep_bench.analysis.store import Comparison, Read, together
from moe_ep_bench.facts import RoutedFacts

SEED = "workload.seed"
_JOINED = (SEED, "workload.layer")


def joined(read: Iterable[Read]) -> list[Read]:
    """Comparisons joined, each under the id of its first, or of the group of routed layers."""
    groups: dict[tuple[str, str], list[Read]] = {}
    for one in read:
        groups.setdefault((one.comparison.directory, _alike(one)), []).append(one)
    return [_joined(members) for members in groups.values()]


def _alike(one: Read) -> str:
    """What comparisons that are joined have alike; what a seed achieved may differ, what was asked for may not."""
    facts = one.comparison.facts
    if isinstance(facts, RoutedFacts):
        return facts.group
    if set(_JOINED).isdisjoint(facts.point) or one.frames["samples"]["launch"].nunique() > 1:
        return one.comparison.comparison_id
    targets = {key: value for key, value in facts.workload.targets.items() if key != "expert_loads"}
    asked = [_point(one.comparison), facts.workload.kind, targets, facts.workload.skew]
    apart = {"point": True, "workload": True, "title": True, "sizes": True, "order": True}
    apart |= {"whole": {"num_shared_by_chance", "shared_by_chance"}}  # of earlier versions
    return json.dumps([facts.model_dump(mode="json", exclude=apart), asked], sort_keys=True)


def _point(comparison: Comparison) -> dict[str, object]:
    """The point of the sweep without what is joined."""
    return {key: value for key, value in comparison.facts.point.items() if key not in _JOINED}


def _joined(members: Sequence[Read]) -> Read:
    """One of several: cases by what they are, launch after launch and batch after batch, or layer beside layer.

    A case that failed for one seed failed; one that a routed layer lacks is left out.
    """
    comparison = members[0].comparison
    is_routed = isinstance(comparison.facts, RoutedFacts)
    if len(members) == 1 and not is_routed:
        return members[0]
    listed, parts, begin = [], {table: [] for table in members[0].frames}, 0
    for launch, (of_member, cases, frames) in enumerate(members):
        about = [[facts.role, facts.policy, facts.policy_params, facts.label] for facts in cases["facts"]]
        keys = pd.Series([json.dumps(words, sort_keys=True) for words in about], cases.index)
        listed.append(cases.assign(key=keys))
        given = {"layer": of_member.facts.layer} if is_routed else {"launch": launch}
        for table, rows in frames.items():
            own = {name: value for name, value in given.items() if name in rows and value is not None}
            parts[table].append(rows.assign(case=rows["case"].map(keys), batch=rows["batch"] + begin, **own))
        begin += 0 if is_routed else of_member.facts.num_batches
    cases = pd.concat(listed)
    if is_routed:
        cases = cases[cases.groupby("key")["key"].transform("size") == len(members)]
    order = cases["key"].drop_duplicates()
    cases = cases.sort_values("status", key=lambda status: status == "ok", kind="stable").drop_duplicates("key")
    cases = cases.set_index("key").loc[order].reset_index()
    numbers = pd.Series(cases.index, cases["key"])[(cases["status"] == "ok").to_numpy()]
    joined_frames = {}
    for table, of_table in parts.items():
        rows = together(of_table)
        rows = rows[rows["case"].isin(numbers.index)]
        joined_frames[table] = rows.assign(case=rows["case"].map(numbers).astype(int))
    return Read(_shared([one.comparison for one in members]), cases.drop(columns="key"), joined_frames)


def _shared(members: Sequence[Comparison]) -> Comparison:
    """What the cases of several comparisons share; conditions of each are those of a launch."""
    first, facts = members[0], members[0].facts
    if isinstance(facts, RoutedFacts):
        first = min(members, key=lambda comparison: comparison.facts.layer or 0)
        return replace(first, comparison_id=facts.group)
    num_batches = sum(comparison.facts.num_batches for comparison in members)
    draws = len(members) if SEED in facts.point else 1
    facts = facts.model_copy(update={"point": _point(first), "num_batches": num_batches, "draws": draws})
    conditions = {launch: told for launch, one in enumerate(members) for told in one.conditions.values()}
    return replace(first, facts=facts, conditions=conditions)
