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

from moe_ep_bench.analysis.store import Comparison, Store
from moe_ep_bench.facts import RoutedFacts

SEED = "workload.seed"
_JOINED = (SEED, "workload.layer")


def joined(store: Store) -> Store:
    """The store with such comparisons joined, each under the id of its first, or of the group of routed layers."""
    places = store.samples["case"].map(store.cases["comparison"])
    launches = store.samples.groupby(places)["launch"].nunique()
    moves = pd.DataFrame(
        [
            {
                "directory": comparison.directory,
                "alike": _alike(comparison, launches.get(place, 1)),
                "is_routed": isinstance(comparison.facts, RoutedFacts),
                "num_batches": comparison.facts.num_batches,
                "layer": getattr(comparison.facts, "layer", None),
            }
            for place, comparison in enumerate(store.comparisons)
        ]
    )
    groups, is_routed = moves.groupby(["directory", "alike"], sort=False), moves["is_routed"]
    size = groups["alike"].transform("size")
    moves["comparison"] = groups.ngroup()
    moves["members"] = size.where(is_routed, 1)
    moves["first_batch"] = (groups["num_batches"].cumsum() - moves["num_batches"]).mask(is_routed, 0)
    moves["launch"] = groups.cumcount().where((size > 1) & ~is_routed)
    members = moves.groupby("comparison").groups.values()
    comparisons = [_joined([store.comparisons[place] for place in of_one]) for of_one in members]
    return _moved(replace(store, comparisons=tuple(comparisons)), moves)


def _alike(comparison: Comparison, num_launches: int) -> str:
    """What comparisons that are joined have alike; what a seed achieved may differ, what was asked for may not."""
    facts = comparison.facts
    if isinstance(facts, RoutedFacts):
        return facts.group
    if set(_JOINED).isdisjoint(facts.point) or num_launches > 1:
        return comparison.comparison_id
    targets = {key: value for key, value in facts.workload.targets.items() if key != "expert_loads"}
    asked = [_point(comparison), facts.workload.kind, targets, facts.workload.skew]
    apart = {"point": True, "workload": True, "title": True, "sizes": True, "order": True}
    apart |= {"whole": {"num_shared_by_chance"}}
    return json.dumps([facts.model_dump(mode="json", exclude=apart), asked], sort_keys=True)


def _point(comparison: Comparison) -> dict[str, object]:
    """The point of the sweep without what is joined."""
    return {key: value for key, value in comparison.facts.point.items() if key not in _JOINED}


def _joined(members: Sequence[Comparison]) -> Comparison:
    """What is shared by the cases of several comparisons; conditions of each are those of a launch."""
    first, facts = members[0], members[0].facts
    if isinstance(facts, RoutedFacts):
        first = min(members, key=lambda comparison: comparison.facts.layer or 0)
        return replace(first, comparison_id=facts.group)
    if len(members) == 1:
        return first
    num_batches = sum(comparison.facts.num_batches for comparison in members)
    draws = len(members) if SEED in facts.point else 1
    facts = facts.model_copy(update={"point": _point(first), "num_batches": num_batches, "draws": draws})
    conditions = {launch: told for launch, one in enumerate(members) for told in one.conditions.values()}
    return replace(first, facts=facts, conditions=conditions)


def _moved(store: Store, moves: pd.DataFrame) -> Store:
    """Cases and rows under the comparison that theirs became, launch after launch and batch after batch.

    A case that failed for one seed failed; one that a routed layer lacks is left out.

    Args:
        moves: by the old comparison's place: the new one's; how many ``members`` must have a case; its ``first_batch``;
            and its ``launch`` or ``layer``, null where these stay as they are.
    """
    moves = moves.loc[store.cases["comparison"]].set_index(store.cases.index)
    cases = store.cases.drop(columns="comparison").join(moves)
    about = [[facts.role, facts.policy, facts.policy_params, facts.label] for facts in cases["facts"]]
    cases["key"] = [json.dumps(words, sort_keys=True) for words in about]
    by_key = cases.groupby(["comparison", "key"], sort=False)
    cases["case"] = by_key.ngroup()
    cases = cases[by_key["key"].transform("size") >= cases["members"]]
    first = cases.sort_values("status", key=lambda status: status == "ok", kind="stable").drop_duplicates("case")
    first = first.set_index("case", drop=False).sort_index()
    kept = cases.drop(columns=["facts", "members"])[cases["case"].map(first["status"]) == "ok"]
    places = pd.Series(range(len(first)), first.index)

    def moved(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows[rows["case"].isin(kept.index)]
        of_rows = kept.loc[rows["case"]].set_index(rows.index)
        given = {
            name: of_rows[name].where(of_rows[name].notna(), rows[name]) for name in ("launch", "layer") if name in rows
        }
        given = {name: values.astype(rows[name].dtype) for name, values in given.items()}
        return rows.assign(case=of_rows["case"].map(places), batch=rows["batch"] + of_rows["first_batch"], **given)

    frames = {table: moved(getattr(store, table)) for table in ("samples", "routing", "frontier")}
    return replace(store, cases=first[list(store.cases)].reset_index(drop=True), **frames)
