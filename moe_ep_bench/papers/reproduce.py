"""Emulate or run a config's layers or models, and write what sets them beside the numbers of its claims.

A claim is about all points of the config's sweep that it names; those that differ only in ``workload.skew`` or
``workload.peak_load`` stand side by side. Where a claim has a number, the skew that would give it is looked for: the
same tokens, experts and sharpness of scores, but a busiest expert of any load, whose neighbours on its rank are any
others or nearly as busy (``placement``: scattered, adjacent). That is solved on a modelled device with one batch and at
most ``SOLVED_TOKENS`` per rank. No skew is looked for on real ranks, nor with ``scope: model``, where every layer of a
pass has its own.

The result is ``claims.json`` beside the results; ``analysis.claims`` makes tables of both.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from moe_ep_bench.bench.emulate import emulate
from moe_ep_bench.bench.plan import BASELINE, POLICY, RANKS, VIRTUAL, Comparison, plan
from moe_ep_bench.bench.virtual import Emulation
from moe_ep_bench.config import MEASURED, Experiment, SyntheticConfig, load_experiments
from moe_ep_bench.cost_model.devices import load_device
from moe_ep_bench.files import stable_hash, write_json
from moe_ep_bench.machine.provenance import code_hash
from moe_ep_bench.papers.claims import PLACEMENTS, Claim, claims_path
from moe_ep_bench.policies import Policy
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK
from moe_ep_bench.runtime.launcher import Nodes, launch

# Keys in which comparisons that stand side by side may differ.
_TRAFFIC = ("workload.skew", "workload.peak_load")
# The calibrated skew whose other targets a solved one takes over.
_LIKE = "single_domain"
SOLVED_TOKENS = 2048
# A skew is found when it gives the claimed number to within this.
TOLERANCE = 0.01
_SOLVABLE = ("speedup", "dropped_fraction")
# Peak loads on the grid, and the width at which bisection ends.
_GRID, _NARROWEST = 7, 0.004
_NO_CLAIMS = "claims: expected at least one, got none; without any, use emulate"


@dataclass(frozen=True)
class Reached:
    """What one skew gives.

    Attributes:
        peak_load: of the busiest expert, as the workload was asked for it; None = no skew.
        fullest_expert, fullest_rank: loads over the mean under native.
        values: every solvable metric by policy (label).
    """

    peak_load: float | None
    fullest_expert: float
    fullest_rank: float
    values: dict[str, dict[str, float]]


@dataclass(frozen=True, eq=False)
class _Row:
    """One claim of one policy, or of native (None), at comparisons that differ in their traffic alone."""

    claim: Claim
    policy: Policy | None
    versus: Policy | None
    comparisons: list[Comparison]
    others: dict[str, Any]


def reproduce(
    config: Path, out: Path, overrides: Sequence[str], *, force: bool = False, nproc: int | None = None
) -> int:
    """Emulate a config, find the skews that its claims need, and write ``claims.json``; return the exit status.

    Args:
        nproc: time the config on so many real ranks instead, as ``run`` does.

    Raises:
        ValueError: the config or the results directory cannot be used; one line.
    """
    on_cpu = not torch.cuda.is_available()
    if not load_experiments(config, overrides, on_cpu=False)[0].claims:
        raise ValueError(f"{config}: {_NO_CLAIMS}")
    nodes = None if nproc is None else Nodes(nproc)
    comparisons: Sequence[Comparison]
    if nodes is None:
        comparisons = plan(config, overrides, VIRTUAL, on_cpu=on_cpu, try_out=False)  # ``emulate`` tries it out.
    else:
        comparisons = plan(config, overrides, RANKS, nodes.nproc, on_cpu=on_cpu)
    experiment = comparisons[0].experiment
    try:
        rows = _rows(comparisons)
        solved_on = _device_name(experiment) if nodes is None and experiment.scope == "layer" else None
    except ValueError as problem:
        raise ValueError(f"{config}: {problem}") from None
    if nodes is None:
        status = emulate(config, out, overrides, force=force)
    else:
        status = launch(config, out, overrides, nodes, force=force)
    if status not in (OK, CASES_FAILED):
        return status
    earlier = {} if force else _earlier(claims_path(out))
    solved = {row.policy for row in rows if row.policy is not None and _target(row) is not None}
    solvers: dict[str, _Solver] = {}
    described = []
    for number, row in enumerate(rows):
        print(f"moe-ep-bench: claim {number + 1} of {len(rows)}: {row.claim.source}", file=sys.stderr)
        solver = None
        if solved_on is not None and _target(row) is not None:
            solver = _Solver(row.comparisons[0], solved_on, solved)
            solver = solvers.setdefault(solver.key, solver)
        described.append(_described(row, solver, earlier))
        write_json(claims_path(out), {"code": code_hash(), "solved_on": solved_on, "claims": described})
    return status


def _device_name(experiment: Experiment) -> str | None:
    """The device on which skews are solved for; None where the config names none."""
    name = experiment.claims_device or experiment.emulate.device
    if name == MEASURED:
        return None
    try:
        load_device(name)
    except ValueError as problem:
        raise ValueError(f"claims_device: {problem}") from None
    return name


def _rows(comparisons: Sequence[Comparison]) -> list[_Row]:
    experiment = comparisons[0].experiment
    rows, unmet = [], []
    for number, claim in enumerate(experiment.claims):
        groups: dict[str, tuple[dict[str, Any], list[Comparison]]] = {}
        for one in comparisons:
            if _is_at(one.experiment, claim, number):
                others = {key: value for key, value in one.experiment.point if key not in _TRAFFIC}
                groups.setdefault(stable_hash(others), (others, []))[1].append(one)
        wanted = ", ".join(f"{key} {value}" for key, value in claim.where.items())
        if not groups:
            print(f"moe-ep-bench: left out: {claim.source}: no comparison has {wanted}", file=sys.stderr)
        unmet.append(wanted)
        pairs = experiment.claimed_policies(number)
        rows += [_Row(claim, *pair, alike, others) for others, alike in groups.values() for pair in pairs]
    if not rows:
        wanted = "; ".join(dict.fromkeys(unmet))
        raise ValueError(f"claims: expected a comparison that one of them is about ({wanted}); there is none")
    return rows


def _is_at(experiment: Experiment, claim: Claim, number: int) -> bool:
    values = experiment.model_dump(mode="json")
    for key, wanted in claim.where.items():
        found: Any = values
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                raise ValueError(f"claims.{number}.where: expected dotted keys of the config, got {key}")
            found = found[part]
        if found != wanted:
            return False
    return True


def _target(row: _Row) -> float | None:
    """The number that a skew is to give, where one can be looked for."""
    config = row.comparisons[0].experiment.workload
    solvable = isinstance(config, SyntheticConfig) and row.claim.metric in _SOLVABLE and row.versus is None
    return row.claim.number if solvable else None


def _described(row: _Row, solver: _Solver | None, earlier: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A row, JSON-ready."""
    claim, policy = row.claim, row.policy
    target, key = _target(row), None
    needed: list[dict[str, Any]] = []
    if solver is not None and target is not None and policy is not None:
        key = stable_hash([solver.key, policy.params(), policy.name, claim.metric, target])
        needed = earlier.get(key) or solver.needed(policy, claim.metric, target)
    entries = []
    for comparison in row.comparisons:
        cases = {case.policy: case.case_id for case in comparison.cases if case.role in (POLICY, BASELINE)}
        config = comparison.experiment.workload
        skew = config.skew if isinstance(config, SyntheticConfig) else None
        entries.append(
            {
                "comparison_id": comparison.comparison_id,
                "case_id": cases[policy],
                "versus_id": row.versus and cases[row.versus],
                "traffic": skew or comparison.subject.workload_in_short,
            }
        )
    return {
        "claim": claim.model_dump(mode="json"),
        "policy": policy.name if policy else "native",
        "policy_params": policy.params() if policy else {},
        "label": policy.label if policy else "native",
        "versus": row.versus and row.versus.label,
        "others": row.others,
        "entries": entries,
        "needed_key": key,
        "needed": needed,
        "needed_tokens_per_rank": _solved_tokens(row.comparisons[0]) if needed else None,
    }


def _earlier(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Skews that this code solved for before, by key; none where the file is not there or not ours."""
    try:
        content = json.loads(path.read_text())
        if content["code"] != code_hash():
            return {}
        return {row["needed_key"]: row["needed"] for row in content["claims"] if row["needed"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _solved_tokens(comparison: Comparison) -> int:
    return min(SOLVED_TOKENS, max(1, comparison.subject.num_tokens // comparison.subject.world_size))


class _Solver:
    """All skews of one layer on a modelled device; each is tried once, for all policies."""

    def __init__(self, like: Comparison, device: str, policies: Collection[Policy]) -> None:
        self._like, self._device, self._policies = like, device, policies
        self._try = functools.cache(self._reached)
        definition = self._at(PLACEMENTS[0], None).definition
        self.key = stable_hash({key: value for key, value in definition.items() if key != "measure"})

    def needed(self, policy: Policy, metric: str, target: float) -> list[dict[str, Any]]:
        """The mildest skew for each placement that can differ, or the nearest that any skew comes; JSON-ready.

        ``found`` says whether the skew gives the claimed number, ``value`` what it gives.
        """

        def value(reached: Reached) -> float:
            return reached.values[policy.label][metric]

        model, needed = self._like.model, []
        for placement in PLACEMENTS if model.num_experts > self._like.ep_size else PLACEMENTS[:1]:
            best = solve(functools.partial(self._try, placement), value, target, most=model.num_experts / model.top_k)
            found = abs(value(best) - target) <= TOLERANCE
            loads = {"fullest_expert": best.fullest_expert, "fullest_rank": best.fullest_rank}
            needed.append({"placement": placement, "found": found, "value": value(best), **loads})
        return needed

    def _at(self, placement: str, peak_load: float | None) -> Comparison:
        like, experiment = self._like, self._like.experiment
        config, tokens = cast(SyntheticConfig, experiment.workload), _solved_tokens(like)
        if config.skew is not None:
            config = config.model_copy(update={"skew": _LIKE})
        targets = config.targets(experiment.model.preset)
        targets |= {"peak_load": peak_load, "placement": placement, "rank_load": None}
        targets |= {"drift": 0.0, "burst_every": None, "burst_peak_load": None}
        workload = SyntheticConfig(
            tokens_per_rank=tokens,
            # The same share.
            padding_per_rank=config.padding_per_rank * tokens * like.subject.world_size // like.subject.num_tokens,
            mask_padding=config.mask_padding,
            num_batches=1,
            seed=config.seed,
            sequence_length=config.sequence_length,
            **targets,
        )
        modelled = experiment.emulate.model_copy(update={"device": self._device})
        experiment = experiment.model_copy(update={"workload": workload, "emulate": modelled})
        return Comparison.of(experiment, VIRTUAL, on_cpu=not torch.cuda.is_available())

    def _reached(self, placement: str, peak_load: float | None) -> Reached | None:
        """None where there is no such skew."""
        try:
            comparison = self._at(placement, peak_load)
            comparison.workload.batch(0)
        except ValueError:
            return None
        return modelled_once(comparison, peak_load, self._policies)


def solve(
    reach: Callable[[float | None], Reached | None], value: Callable[[Reached], float], target: float, *, most: float
) -> Reached:
    """The mildest skew at which ``value`` is ``target`` to within ``TOLERANCE``; the nearest one where none is.

    Peak loads from no skew to ``most`` are tried on a grid; between the first two that have the target between them
    it is closed in on.

    Args:
        reach: what a peak load gives (None = no skew); None where it cannot be had.
        most: the highest peak load.
    """
    tried: list[Reached] = []
    unskewed = reach(None)
    grid = np.geomspace(unskewed.fullest_expert if unskewed else 1.0, most, _GRID + 1)[1:]
    for peak_load in (None, *(round(float(peak), 4) for peak in grid)):
        here = reach(peak_load)
        if here is None:
            continue
        tried.append(here)
        if len(tried) > 1 and (value(tried[-2]) - target) * (value(here) - target) <= 0:
            tried += _between(reach, value, target, *tried[-2:])
            break
    if not tried:
        raise ValueError("claims: no skew of this workload can be had")
    return min(tried, key=lambda one: (round(abs(value(one) - target), 6), one.fullest_expert))


def _between(
    reach: Callable[[float | None], Reached | None],
    value: Callable[[Reached], float],
    target: float,
    low: Reached,
    high: Reached,
) -> Iterator[Reached]:
    """Skews ever nearer to the target, which lies between what ``low`` and ``high`` give."""
    low_peak, high_peak = low.peak_load or low.fullest_expert, cast(float, high.peak_load)
    low_gap, high_gap = value(low) - target, value(high) - target
    while high_peak - low_peak > _NARROWEST:
        # Linear interpolation, kept off the ends so that a bend cannot stall it.
        share = low_gap / (low_gap - high_gap) if low_gap != high_gap else 0.5
        middle = round(low_peak + min(max(share, 0.15), 0.85) * (high_peak - low_peak), 4)
        here = reach(middle)
        if here is None:  # Less than noise alone gives.
            low_peak = middle
            continue
        yield here
        gap = value(here) - target
        if abs(gap) <= TOLERANCE / 2:
            return
        if (gap < 0) == (low_gap < 0):
            low_peak, low_gap = middle, gap
        else:
            high_peak, high_gap = middle, gap


def modelled_once(comparison: Comparison, peak_load: float | None, policies: Collection[Policy]) -> Reached:
    """What native and policies take and drop on the first batch; nothing is written.

    Raises:
        ValueError: the comparison has no modelled device.
    """
    if comparison.device is None:
        raise ValueError(f"emulate.device: expected a modelled one, got {MEASURED}")
    cases = [case for case in comparison.cases if case.role == BASELINE or case.policy in policies]
    emulation = Emulation(comparison, cases, torch.device("cpu"), lambda case_id: None)
    with torch.inference_mode():
        emulation.measure()
    values = {}
    for number, case in enumerate(cases):
        column = emulation.metrics[number].column
        dropped, of = (column(key)[:, 0].sum() for key in ("num_dropped_pairs", "num_topk_pairs"))
        speedup = emulation.layer_us[0, 0] / emulation.layer_us[number, 0]
        if case.policy is not None:
            values[case.label] = {"speedup": float(speedup), "dropped_fraction": float(dropped / of)}
    load_E, load_R = (emulation.metrics[0].column(key)[:, 0].sum(axis=0) for key in ("load_E", "load_R"))
    return Reached(peak_load, float(load_E.max() / load_E.mean()), float(load_R.max() / load_R.mean()), values)
