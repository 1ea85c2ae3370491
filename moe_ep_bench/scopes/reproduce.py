"""``reproduce``: a config's layers or models emulated, or run, and what sets them beside the numbers of its claims.

A claim's comparisons are all points of the config's sweep that it speaks of; those that differ in nothing but
``workload.skew`` or ``workload.peak_load`` stand side by side. Where a claim has a number, this also asks which skew
would give it: the same tokens, experts and sharpness of scores, but a busiest expert of any load, whose rank's mates
are others' or nearly as busy (``placement``: scattered, adjacent). That is solved on a modelled device, with one batch
and ``SOLVED_TOKENS`` a rank at most. Of whole models (``scope: model``) no skew is looked for: a pass has one in every
layer.

``reproduce`` leaves this in ``claims.json`` beside the results; ``analysis.claims`` makes tables of both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from moe_ep_bench.claims import PLACEMENTS, Claim, claims_path
from moe_ep_bench.config import MEASURED, Experiment, SyntheticConfig, load_experiments
from moe_ep_bench.devices import load_device
from moe_ep_bench.environment import code_hash
from moe_ep_bench.exit_codes import CASES_FAILED, OK
from moe_ep_bench.launcher import Nodes, launch
from moe_ep_bench.policies import Policy
from moe_ep_bench.records import stable_hash, write_json
from moe_ep_bench.scopes.comparison import BASELINE, POLICY, Comparison
from moe_ep_bench.scopes.emulate import emulate
from moe_ep_bench.scopes.emulated import Emulated
from moe_ep_bench.scopes.emulation import Emulation
from moe_ep_bench.scopes.planning import emulated_comparisons, emulated_on, plan_comparisons

# What makes one traffic of another.
_TRAFFIC = ("workload.skew", "workload.peak_load")
# The calibrated skew whose other targets a solved one takes over.
_LIKE = "single_domain"
SOLVED_TOKENS = 2048
# A skew is found when the claim's metric is met to within this.
TOLERANCE = 0.01
_SOLVABLE = ("speedup", "dropped_fraction")
# Peak loads tried before any is solved for, and the width at which bisection ends.
_GRID, _NARROWEST = 7, 0.004
_NO_CLAIMS = "claims: expected at least one, got none; without any, use emulate"


@dataclass(frozen=True)
class Reached:
    """What one skew gives.

    Attributes:
        peak_load: of the busiest expert, what the workload was asked for; None = no skew.
        fullest_expert, fullest_rank: loads over the mean under native.
        values: every solvable metric by policy (label).
    """

    peak_load: float | None
    fullest_expert: float
    fullest_rank: float
    values: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Needed:
    """The skew that a claim needs.

    Attributes:
        found: whether a skew gives the claimed number; where not, the rest is the nearest that any gave.
        value: what it gives.
    """

    placement: str
    found: bool
    value: float
    fullest_expert: float
    fullest_rank: float


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
        nproc: time the config on so many real ranks instead, as ``launch`` does; no skew is looked for then, nor with
            ``scope: model``.

    Raises:
        ValueError: the config or the results directory cannot be used; one line.
    """
    on_cpu = not torch.cuda.is_available()
    if not load_experiments(config, overrides, on_cpu=False)[0].claims:
        raise ValueError(f"{config}: {_NO_CLAIMS}")
    nodes = None if nproc is None else Nodes(nproc)
    comparisons: Sequence[Comparison]
    if nodes is None:
        comparisons = emulated_comparisons(config, overrides, on_cpu=on_cpu)
    else:
        comparisons = plan_comparisons(config, overrides, nodes.nproc, on_cpu=on_cpu)
    try:
        rows = _rows(comparisons)
        of_layers = comparisons[0].experiment.scope == "layer"
        solved_on = _device_name(comparisons[0].experiment) if nodes is None and of_layers else None
    except ValueError as problem:
        raise ValueError(f"{config}: {problem}") from None
    if nodes is None:
        status = emulate(config, out, overrides, force=force)
    else:
        status = launch(config, out, overrides, nodes, force=force)
    if status not in (OK, CASES_FAILED):
        return status
    earlier = {} if force else _earlier(claims_path(out))
    solvers = _Solvers(solved_on, {row.policy for row in rows if row.policy is not None and _target(row) is not None})
    described = []
    for number, row in enumerate(rows):
        print(f"moe-ep-bench: claim {number + 1} of {len(rows)}: {row.claim.source}", file=sys.stderr)
        described.append(_described(row, solvers, earlier))
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
    if not experiment.claims:
        raise ValueError(_NO_CLAIMS)
    rows = []
    for number, claim in enumerate(experiment.claims):
        chosen = [one for one in comparisons if _is_at(one.experiment, claim, number)]
        if not chosen:
            print(f"moe-ep-bench: left out: {claim.source}: no comparison has {_where_words(claim)}", file=sys.stderr)
        for others, alike in _by_all_but_traffic(chosen):
            for policy, versus in experiment.claimed_policies(number):
                rows.append(_Row(claim, policy, versus, alike, others))
    if not rows:
        wanted = "; ".join(dict.fromkeys(_where_words(claim) for claim in experiment.claims))
        raise ValueError(f"claims: expected a comparison that one of them is about ({wanted}); there is none")
    return rows


def _where_words(claim: Claim) -> str:
    return ", ".join(f"{key} {value}" for key, value in claim.where.items())


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


def _by_all_but_traffic(
    comparisons: Sequence[Comparison],
) -> Iterator[tuple[dict[str, Any], list[Comparison]]]:
    groups: dict[str, tuple[dict[str, Any], list[Comparison]]] = {}
    for one in comparisons:
        others = {key: value for key, value in one.experiment.point if key not in _TRAFFIC}
        groups.setdefault(stable_hash(others), (others, []))[1].append(one)
    yield from groups.values()


def _described(row: _Row, solvers: _Solvers, earlier: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A row, JSON-ready."""
    claim = row.claim
    target, key = _target(row), None
    needed: list[dict[str, Any]] = []
    if target is not None and solvers.device is not None and row.policy is not None:
        solver = solvers.like(row.comparisons[0])
        key = stable_hash([solver.key, row.policy.params(), row.policy.name, claim.metric, target])
        needed = earlier.get(key) or [asdict(one) for one in solver.needed(row.policy, claim.metric, target)]
    return {
        "claim": claim.model_dump(mode="json"),
        "policy": row.policy.name if row.policy else "native",
        "policy_params": row.policy.params() if row.policy else {},
        "label": row.policy.label if row.policy else "native",
        "versus": row.versus and row.versus.label,
        "others": row.others,
        "entries": [_entry(row, comparison) for comparison in row.comparisons],
        "needed_key": key,
        "needed": needed,
        "needed_tokens_per_rank": _solved_tokens(row.comparisons[0]) if needed else None,
    }


def _entry(row: _Row, comparison: Comparison) -> dict[str, Any]:
    cases = {case.policy: case.case_id for case in comparison.cases if case.role in (POLICY, BASELINE)}
    config = comparison.experiment.workload
    skew = config.skew if isinstance(config, SyntheticConfig) else None
    return {
        "comparison_id": comparison.comparison_id,
        "case_id": cases[row.policy],
        "versus_id": row.versus and cases[row.versus],
        "traffic": skew or comparison.workload_in_short,
    }


def _target(row: _Row) -> float | None:
    """The number that a skew is to give, where one can be looked for."""
    config = row.comparisons[0].experiment.workload
    solvable = isinstance(config, SyntheticConfig) and row.claim.metric in _SOLVABLE and row.versus is None
    return row.claim.number if solvable else None


def _solved_tokens(comparison: Comparison) -> int:
    return min(SOLVED_TOKENS, max(1, comparison.num_tokens // comparison.world_size))


def _solved_padding(comparison: Emulated) -> int:
    """The same share of padding."""
    padding = comparison.experiment.workload.padding_per_rank
    return padding * _solved_tokens(comparison) * comparison.world_size // comparison.num_tokens


class _Solver:
    """All skews of one layer on a modelled device: each is tried once, for all policies."""

    def __init__(self, like: Comparison, device: str, policies: Collection[Policy]) -> None:
        self._like, self._device, self._policies = like, device, policies
        self._tried: dict[tuple[str, float | None], Reached | None] = {}
        definition = self._at(PLACEMENTS[0], None).definition
        self.key = stable_hash({key: value for key, value in definition.items() if key != "measure"})

    def needed(self, policy: Policy, metric: str, target: float) -> list[Needed]:
        """The mildest skew for each placement that can differ, or the nearest that any skew comes."""
        placements = PLACEMENTS if self._like.model.num_experts > self._like.ep_size else PLACEMENTS[:1]
        return [self._needed(placement, policy, metric, target) for placement in placements]

    def _needed(self, placement: str, policy: Policy, metric: str, target: float) -> Needed:
        def value(reached: Reached) -> float:
            return reached.values[policy.label][metric]

        best = solve(
            lambda peak_load: self._try(placement, peak_load),
            value,
            target,
            most=self._like.model.num_experts / self._like.model.top_k,
        )
        return Needed(
            placement,
            abs(value(best) - target) <= TOLERANCE,
            value(best),
            best.fullest_expert,
            best.fullest_rank,
        )

    def _at(self, placement: str, peak_load: float | None) -> Emulated:
        experiment = self._like.experiment
        config = cast(SyntheticConfig, experiment.workload)
        targets = config.targets(experiment.model.preset)
        if config.skew is not None:
            targets = config.model_copy(update={"skew": _LIKE}).targets(experiment.model.preset)
        targets |= {"peak_load": peak_load, "placement": placement, "rank_load": None}
        targets |= {"drift": 0.0, "burst_every": None, "burst_peak_load": None}
        workload = SyntheticConfig(
            tokens_per_rank=_solved_tokens(self._like),
            padding_per_rank=_solved_padding(self._like),
            mask_padding=config.mask_padding,
            num_batches=1,
            seed=config.seed,
            sequence_length=config.sequence_length,
            **targets,
        )
        modelled = experiment.emulate.model_copy(update={"device": self._device})
        experiment = experiment.model_copy(update={"workload": workload, "emulate": modelled})
        return emulated_on(experiment, on_cpu=not torch.cuda.is_available())

    def _try(self, placement: str, peak_load: float | None) -> Reached | None:
        """None where there is no such skew."""
        if (placement, peak_load) not in self._tried:
            try:
                comparison = self._at(placement, peak_load)
                comparison.workload.batch(0)
            except ValueError:
                self._tried[placement, peak_load] = None
            else:
                self._tried[placement, peak_load] = modelled_once(comparison, peak_load, self._policies)
        return self._tried[placement, peak_load]


class _Solvers:
    """A solver for each layer that claims are about, and for all policies that they name."""

    def __init__(self, device: str | None, policies: Collection[Policy]) -> None:
        self.device, self._policies = device, policies
        self._solvers: dict[str, _Solver] = {}

    def like(self, comparison: Comparison) -> _Solver:
        assert self.device is not None
        solver = _Solver(comparison, self.device, self._policies)
        return self._solvers.setdefault(solver.key, solver)


def solve(
    reach: Callable[[float | None], Reached | None], value: Callable[[Reached], float], target: float, *, most: float
) -> Reached:
    """The mildest skew at which ``value`` is ``target`` to within ``TOLERANCE``; the nearest one where none is.

    From no skew to ``most`` peak loads are tried on a grid; between the first two that have the target between them
    it is closed in on.

    Args:
        reach: what a peak load gives (None = no skew); None where it cannot be had.
        most: the highest peak load.
    """
    tried: list[Reached] = []
    for peak_load in _grid(reach(None), most):
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


def _grid(unskewed: Reached | None, most: float) -> list[float | None]:
    least = unskewed.fullest_expert if unskewed else 1.0
    return [None, *(round(float(peak), 4) for peak in np.geomspace(least, most, _GRID + 1)[1:])]


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
        # A straight line's guess, kept off the ends so that a bend cannot stall it.
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


def modelled_once(comparison: Emulated, peak_load: float | None, policies: Collection[Policy]) -> Reached:
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
    layer_us_V = emulation.layer_us[:, 0]
    load_E, load_R = (emulation.metrics[0].column(key)[:, 0].sum(axis=0) for key in ("load_E", "load_R"))

    def dropped_fraction(number: int) -> float:
        dropped, of = (emulation.metrics[number].column(key)[:, 0] for key in ("num_dropped_pairs", "num_topk_pairs"))
        return float(dropped.sum() / of.sum())

    return Reached(
        peak_load,
        float(load_E.max() / load_E.mean()),
        float(load_R.max() / load_R.mean()),
        {
            case.label: {
                "speedup": float(layer_us_V[0] / layer_us_V[number]),
                "dropped_fraction": dropped_fraction(number),
            }
            for number, case in enumerate(cases)
            if case.policy is not None
        },
    )


def _earlier(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Skews that were solved for before by this code, by key; none where the file is not there or not ours."""
    try:
        content = json.loads(path.read_text())
        if content["code"] != code_hash():
            return {}
        return {row["needed_key"]: row["needed"] for row in content["claims"] if row["needed"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
