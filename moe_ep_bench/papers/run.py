"""Emulate or run a config's layers or models, and write which case each of its claims is about.

A claim is about all points of the config's sweep that it names. Those that differ only in their traffic stand side by
side: ``workload.skew`` and ``workload.peak_load``, and recordings beside both. Those that differ in ``workload.seed``
are draws of one, and so are the layers of recordings; their mean counts.
The result is ``claims.json`` beside the results, a row per claim, policy and comparison; ``analysis.paper_claims`` sets
the papers' numbers beside ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_ep_bench.bench.commands import emulate, launch
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import BASELINE, POLICY, RANKS, REPLICATION, VIRTUAL, Point
from moe_ep_bench.config import Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.errors import CASES_FAILED, OK, UserError, naming
from moe_ep_bench.facts.words import traffic_words
from moe_ep_bench.files import stable_hash, write_json
from moe_ep_bench.papers import Primary
from moe_ep_bench.papers.claims import Claim, claims_path

# Keys in which comparisons that stand side by side may differ.
_TRAFFIC = ("workload.skew", "workload.peak_load", "workload.seed", "workload.trace", "workload.layer")


def run_claims(
    config: Path, out: Path, overrides: Sequence[str], *, force: bool = False, nproc: int | None = None
) -> int:
    """Emulate a config and write ``claims.json``; return the exit status.

    Args:
        nproc: time the config on so many real ranks instead, as ``run`` does.

    Raises:
        ValueError: the config or the results directory cannot be used; one line.
    """
    if not load_experiments(config, overrides, on_cpu=False)[0].claims:
        raise UserError(f"{config}: claims: expected at least one, got none; without any, use emulate")
    comparisons = plan(config, overrides, VIRTUAL if nproc is None else RANKS, nproc)
    with naming(str(config)):
        rows = claim_rows(comparisons)
    if nproc is None:
        status = emulate(comparisons, out, force=force)
    else:
        status = launch(config, out, overrides, nproc, force=force).status
    if status in (OK, CASES_FAILED):
        write_json(claims_path(out), {"claims": rows})
    return status


def claim_rows(comparisons: Sequence[Point]) -> list[dict[str, Any]]:
    """A row per claim, policy and comparison, JSON-ready; ``number`` counts what stands side by side.

    Raises:
        ValueError: a claim names no comparison, or a number that is not published.
    """
    experiment = comparisons[0].experiment
    rows: list[dict[str, Any]] = []
    number, unmet = 0, []
    swept = {key: None for comparison in comparisons for key, _ in comparison.experiment.point}
    beside = [key for key in swept if key not in _TRAFFIC]
    for place, claim in enumerate(experiment.claims):
        alike: dict[str, list[Point]] = {}
        for comparison in comparisons:
            if _is_at(comparison.experiment, claim, place):
                alike.setdefault(stable_hash(_setting(comparison, beside)), []).append(comparison)
        unmet.append(", ".join(f"{key} {value}" for key, value in claim.where.items()))
        if not alike:
            print(f"moe-ep-bench: left out: {claim.source}: no comparison has {unmet[-1]}", file=sys.stderr)
        for group in alike.values():
            for policy, versus in experiment.claimed_policies(place):
                with naming(section=f"claims.{place}"):
                    resolved = claim.resolved(policy)
                number += 1
                rows += _rows(number, resolved, policy, versus, group, [] if claim.where else beside)
    if not rows:
        wanted = "; ".join(dict.fromkeys(unmet))
        raise UserError(f"expected a comparison that one of them is about ({wanted}); there is none", "claims")
    return rows


def _rows(
    number: int, claim: Claim, policy: Any, versus: Any, comparisons: list[Point], setting: list[str]
) -> Iterator[dict[str, Any]]:
    """Of one claim of one policy (None: native), at comparisons that differ in their traffic alone.

    Args:
        setting: keys that tell the claim's place in the sweep.
    """
    chosen = (one for one in claim.primaries() if any(_has(each.experiment, one) for each in comparisons))
    primary = next(chosen, None)
    for comparison in comparisons:
        listed = (case for case in comparison.cases if case.role in (POLICY, REPLICATION, BASELINE))
        cases = {case.rule: case.case_id for case in listed}
        workload = comparison.experiment.workload
        skew = workload.skew if isinstance(workload, SyntheticConfig) else None
        is_recorded = isinstance(workload, RecordedConfig)
        yield {
            "number": number,
            **{name: getattr(claim, name) for name in ("source", "of", "metric", "paper", "note")},
            "comparison_id": comparison.comparison_id,
            "case_id": cases[policy],
            "versus_id": cases[versus] if versus else None,
            "setting": _setting(comparison, setting),
            "traffic": "recorded" if is_recorded else skew or traffic_words(comparison.subject.workload),
            "primary": primary is not None and _has(comparison.experiment, primary),
            "primary_because": primary and primary.why,
        }


def _has(experiment: Experiment, primary: Primary) -> bool:
    """Whether a traffic is the one that was chosen beforehand."""
    try:
        return all(str(_value(experiment, key)) == wanted for key, wanted in primary.at.items())
    except KeyError:  # Of another kind of traffic.
        return False


def _setting(comparison: Point, keys: Sequence[str]) -> dict[str, Any]:
    """The place of a comparison in the sweep, apart from its traffic."""
    return {key: _value(comparison.experiment, key) for key in keys}


def _is_at(experiment: Experiment, claim: Claim, place: int) -> bool:
    try:
        return all(_value(experiment, key) == wanted for key, wanted in claim.where.items())
    except KeyError as key:
        raise UserError(f"expected dotted keys of the config, got {key.args[0]}", f"claims.{place}.where") from None


def _value(experiment: Experiment, dotted: str) -> Any:
    """A config's value; KeyError where there is no such key."""
    value: Any = experiment.model_dump(mode="json")
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            raise KeyError(dotted)
        value = value[part]
    return value
