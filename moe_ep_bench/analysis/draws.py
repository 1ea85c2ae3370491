"""Make one comparison of several that differ in the draw of their traffic alone, or in the layer that it is of.

A synthetic workload's seed decides which experts are busy, and so which of them share a rank. Batches of one draw are
alike, draws are not: an interval over one draw's batches says nothing of another. So each draw becomes a further
launch, with batches of its own, and the interval of a median covers draws as it covers launches
(``timing.statistics.estimate_median``). Draws of several launches stay apart: these are not independent of each other.
Layers of a recording, or of counted experts, are joined likewise.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd

from moe_ep_bench.analysis.load import Case, Comparison, Conditions, Run

SEED = "workload.seed"
LAYERS = ("workload.layer", "workload.skew_layer")
_FRAMES = ("timings", "routing", "layers", "frontier")


def over_draws(run: Run) -> tuple[Run, dict[str, str]]:
    """Join comparisons whose points in the sweep differ in ``workload.seed``, or in their layer, alone.

    Returns:
        The run, and of each of its comparisons by id the one that it is part of, named as the first of these.
    """
    members: dict[str, list[str]] = {}
    repeated = {case.comparison_id for case in run.cases if len(case.run_ids) > 1}
    for name, facts in run.comparisons.items():
        is_draw = not {SEED, *LAYERS}.isdisjoint(facts.point) and name not in repeated
        members.setdefault(_but_for_the_draw(facts) if is_draw else name, []).append(name)
    if len(members) == len(run.comparisons):
        return run, {name: name for name in run.comparisons}
    comparisons, conditions = dict(run.comparisons), dict(run.conditions)
    drawn = {name for names in members.values() if len(names) > 1 for name in names}
    cases = [case for case in run.cases if case.comparison_id not in drawn]
    for names in (names for names in members.values() if len(names) > 1):
        parts: dict[tuple, list[Case]] = {}
        said: dict[int, Conditions] = {}
        num_batches = 0
        for launch, name in enumerate(names):
            for case in (case for case in run.cases if case.comparison_id == name):
                key = (case.role, case.policy, json.dumps(case.policy_params, sort_keys=True), case.label)
                parts.setdefault(key, []).append(_renumbered(case, names[0], launch, num_batches))
            said |= zip([launch], conditions.pop(name, {}).values(), strict=False)  # of what is modelled there are none
            num_batches += comparisons.pop(name).num_batches
        first = run.comparisons[names[0]]
        point = {key: value for key, value in first.point.items() if key not in (SEED, *LAYERS)}
        draws = len(names) if SEED in first.point else 1
        comparisons[names[0]] = first.model_copy(update={"point": point, "num_batches": num_batches, "draws": draws})
        if names[0] in run.conditions:
            conditions[names[0]] = said
        cases += [_joined(of_case) for of_case in parts.values()]
    comparisons = {name: comparisons[name] for name in run.comparisons if name in comparisons}
    joined = replace(run, comparisons=comparisons, cases=tuple(cases), conditions=conditions)
    return joined, {name: names[0] for names in members.values() for name in names}


def _but_for_the_draw(facts: Comparison) -> str:
    """What comparisons that are joined have alike; what a draw achieved may differ, what was asked for may not."""
    point = {key: value for key, value in facts.point.items() if key not in (SEED, *LAYERS)}
    targets = {key: getattr(facts.workload, key) for key in ("kind", "targets", "skew")}
    targets["targets"] = {key: value for key, value in targets["targets"].items() if key != "expert_loads"}
    apart = {"point": True, "workload": True, "title": True, "sizes": True, "whole": {"peak_loads", "shared_by_chance"}}
    return json.dumps([facts.model_dump(mode="json", exclude=apart), point, targets], sort_keys=True)


def _renumbered(case: Case, comparison_id: str, launch: int, batches: int) -> Case:
    """A case as that launch of a comparison, behind so many batches of other draws."""

    def behind(rows: pd.DataFrame | None) -> pd.DataFrame | None:
        if rows is None:
            return None
        rows = rows.assign(batch=rows["batch"] + batches)
        return rows.assign(launch=launch) if "launch" in rows else rows

    run_ids = {launch: run_id for launch, run_id in zip([launch], case.run_ids.values(), strict=True)}
    frames = {name: behind(getattr(case, name)) for name in _FRAMES}
    return replace(case, comparison_id=comparison_id, run_ids=run_ids, **frames)


def _joined(parts: list[Case]) -> Case:
    """One case of several draws; as within a directory, one that failed in a launch failed."""
    run_ids = {launch: run_id for part in parts for launch, run_id in part.run_ids.items()}
    failed = next((part for part in parts if not part.is_ok), None)
    if failed is not None:
        return replace(failed, run_ids=run_ids)
    frames = {name: [getattr(part, name) for part in parts] for name in _FRAMES}
    joined = {
        name: None if any(one is None for one in of) else pd.concat(of, ignore_index=True)
        for name, of in frames.items()
    }
    return replace(parts[0], run_ids=run_ids, **joined)
