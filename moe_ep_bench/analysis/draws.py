"""Comparisons as they are read, and draws of one traffic joined into one comparison.

Comparisons that differ in the seed of their traffic, or in the layer that it is of, become one. A synthetic workload's
seed decides which experts are busy, and so which of them share a rank. Batches of one seed are alike, seeds are not: an
interval over one seed's batches says nothing of another. So each seed becomes a further launch, with batches of its
own, and the interval of a median covers seeds as it covers launches (``timing.statistics.estimate_median``). Seeds of
several launches stay apart: these are not independent of each other. Layers of a recording, or of counted experts, are
joined likewise. Layers that were routed without times keep their batches, and are told apart by the column ``layer``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import pandas as pd

from moe_ep_bench.facts import Conditions, JudgedFacts, RoutedFacts, RunFacts, ServedFacts, TimedFacts

SEED = "workload.seed"
LAYER = "workload.layer"
# Facts in which draws of one traffic may differ, as in the swept keys above.
_APART = {"point", "workload", "title", "sizes", "rank_tokens", "order"}


_Facts = TypeVar("_Facts", bound=TimedFacts | RoutedFacts | JudgedFacts | ServedFacts, covariant=True)


@dataclass(frozen=True, eq=False)
class Comparison(Generic[_Facts]):
    """Facts that cases on the same batches share, and the conditions of each launch."""

    directory: str
    comparison_id: str
    facts: _Facts
    run: RunFacts
    conditions: Mapping[int, Conditions]


class Read(NamedTuple):
    """A comparison, its cases, and by table their rows, whose column ``case`` is a row of its cases."""

    comparison: Comparison
    cases: pd.DataFrame
    frames: dict[str, pd.DataFrame]


def together(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows of several frames; empty ones, whose columns have no types, are left out."""
    return pd.concat([rows for rows in parts if len(rows)] or parts[:1], ignore_index=True)


def joined(read: Iterable[Read]) -> list[Read]:
    """Draws joined, each under the id of its first, or of the group of routed layers."""
    groups: dict[str, list[Read]] = {}
    for one in read:
        groups.setdefault(_alike(one), []).append(one)
    return [_joined(members) for members in groups.values()]


def _joined(members: Sequence[Read]) -> Read:
    """One of several that are alike."""
    if _group(members[0]) is not None:
        return _joined_layers(members)
    return _joined_launches(members) if len(members) > 1 else members[0]


def _group(one: Read) -> str | None:
    """The group of a routed layer."""
    return one.comparison.facts.group if isinstance(one.comparison.facts, RoutedFacts) else None


def _alike(one: Read) -> str:
    """A key of comparisons that are joined: facts that were asked for, not those that a seed achieved."""
    facts = one.comparison.facts
    if (group := _group(one)) is not None:
        return group
    if not _swept(one.comparison) or one.frames["samples"]["launch"].nunique() > 1:
        return one.comparison.comparison_id
    targets = {key: value for key, value in facts.workload.targets.items() if key != "expert_loads"}
    asked = [_point(one.comparison), [*_swept(one.comparison)], facts.workload.kind, targets]
    asked.append(facts.workload.skew and facts.workload.skew.model_dump())
    return json.dumps([facts.model_dump(mode="json", exclude=_APART), asked], sort_keys=True)


def _swept(comparison: Comparison) -> dict[str, int]:
    """Seed and layer of the point of the sweep, along which comparisons are joined."""
    point = getattr(comparison.facts, "point", {})
    return {key: value for key in (SEED, LAYER) if isinstance(value := point.get(key), int)}


def _point(comparison: Comparison) -> dict[str, object]:
    """The point of the sweep without what is joined."""
    return {key: value for key, value in comparison.facts.point.items() if key not in _swept(comparison)}


# ---- rows ------------------------------------------------------------------------------------------------------------


def _joined_layers(members: Sequence[Read]) -> Read:
    """One comparison of layers that were routed alike, with a column ``layer``, of cases that all layers have."""
    first = min((one.comparison for one in members), key=lambda comparison: comparison.facts.layer or 0)
    marks = [{} if (layer := one.comparison.facts.layer) is None else {"layer": layer} for one in members]
    keys = [set(_keys(one.cases)) for one in members]
    layers = sorted(one.comparison.facts.layer or 0 for one in members)
    named = {"layers": layers, "model_layers": _model_layers(one.comparison for one in members)}
    workload = first.facts.workload.model_copy(update=named)
    facts = first.facts.model_copy(update={"workload": workload})
    comparison = replace(first, comparison_id=first.facts.group, facts=facts)
    return _with_rows(comparison, members, marks, set.intersection(*keys))


def _joined_launches(members: Sequence[Read]) -> Read:
    """One comparison of several draws, each a launch with batches of its own. A case that failed in one failed."""
    marks, begin = [], 0
    for launch, one in enumerate(members):
        marks.append({"launch": launch, "batch": lambda rows, begin=begin: rows["batch"] + begin})
        begin += one.comparison.facts.num_batches
    keys = set().union(*(_keys(one.cases) for one in members))
    return _with_rows(_shared([one.comparison for one in members], begin), members, marks, keys)


def _keys(cases: pd.DataFrame) -> pd.Series:
    """A key of each case, alike in all draws."""
    about = [[facts.role, facts.policy, facts.policy_params] for facts in cases["facts"]]
    return pd.Series([json.dumps(words, sort_keys=True) for words in about], cases.index, dtype=object)


def _with_rows(comparison: Comparison, members: Sequence[Read], marks: Sequence[Any], keys: set[str]) -> Read:
    """Cases of these keys and their rows, each member's marked by columns."""
    listed = pd.concat([one.cases.assign(key=_keys(one.cases)) for one in members])
    listed = listed[listed["key"].isin(keys)]
    listed = listed.sort_values("status", key=lambda status: status == "ok", kind="stable")
    cases = listed.drop_duplicates("key", ignore_index=True)
    is_ok = (cases["status"] == "ok").to_numpy()
    numbers = pd.Series(cases.index[is_ok], cases["key"][is_ok])
    places = [_keys(one.cases).map(numbers) for one in members]
    frames = {}
    for table, first in members[0].frames.items():
        parts = [first.iloc[:0]]
        for one, marked, place in zip(members, marks, places, strict=True):
            if len(rows := one.frames[table]):
                rows = rows.assign(**{name: value for name, value in marked.items() if name in rows})
                parts.append(rows.assign(case=rows["case"].map(place)).dropna(subset="case"))
        frames[table] = together(parts).astype({"case": int})
    return Read(comparison, cases.drop(columns="key"), frames)


# ---- facts -----------------------------------------------------------------------------------------------------------


def _model_layers(members: Iterable[Comparison]) -> list[int]:
    """The model's numbers of all layers that are joined."""
    return sorted({number for one in members for number in one.facts.workload.model_layers})


def _shared(members: Sequence[Comparison], num_batches: int) -> Comparison:
    """Facts that cases of several draws share; the conditions of a draw are those of a launch."""
    first, facts = members[0], members[0].facts
    swept = {key: {_swept(one)[key] for one in members} for key in _swept(first)}
    seeds, layers = (sorted(swept.get(key, ())) for key in (SEED, LAYER))
    named = {"seeds": seeds, "layers": layers, "model_layers": _model_layers(members)}
    shared = {
        "workload": facts.workload.model_copy(update=named),
        "routing_checksum": None,
        "load_overlap": None,
        "point": _point(first),
        "num_batches": num_batches,
        "draws": len(members) if SEED in swept else 1,
        "layers": max(1, len(layers)),
    }
    conditions = {launch: of for launch, one in enumerate(members) for of in one.conditions.values()}
    return replace(first, facts=facts.model_copy(update=shared), conditions=conditions)
