"""Emulate or run a config's layers or models, and write what sets them beside the numbers of its claims.

A claim is about all points of the config's sweep that it names; those that differ only in ``workload.skew`` or
``workload.peak_load`` stand side by side, and those that differ in ``workload.seed`` are draws of one: their mean
counts. Where a claim has a number, the skew that would give it is looked for on a
modelled device (``needed_skew``). None is looked for on real ranks, nor with ``scope: model``, where every layer of a
pass has its own.

The result is ``claims.json`` beside the results; ``analysis.claims`` makes tables of both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ep_bench.bench.plan import BASELINE, POLICY, RANKS, VIRTUAL, Comparison, plan
from moe_ep_bench.bench.run import emulate, launch
from moe_ep_bench.config import MEASURED, Experiment, SyntheticConfig, load_experiments
from moe_ep_bench.cost_model.table_devices import load_device
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import read_json, stable_hash, write_json
from moe_ep_bench.machine.provenance import code_hash
from moe_ep_bench.papers.claims import Claim, claims_path
from moe_ep_bench.papers.needed_skew import SkewSolver, solved_tokens
from moe_ep_bench.papers.published import Primary
from moe_ep_bench.policies import Policy
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK

# Keys in which comparisons that stand side by side may differ.
_TRAFFIC = ("workload.skew", "workload.peak_load", "workload.seed")
_SOLVABLE = ("speedup", "dropped_fraction")


@dataclass(frozen=True, eq=False)
class _Row:
    """One claim of one policy, or of native (None), at comparisons that differ in their traffic alone.

    Attributes:
        others: where in the sweep they stand, apart from the traffic.
        primary: which traffic was chosen beforehand.
    """

    claim: Claim
    policy: Policy | None
    versus: Policy | None
    comparisons: list[Comparison]
    others: dict[str, Any]
    primary: Primary | None

    @property
    def target(self) -> float | None:
        """The number that a skew is to give, where one can be looked for."""
        is_synthetic = isinstance(self.comparisons[0].experiment.workload, SyntheticConfig)
        solvable = is_synthetic and self.claim.metric in _SOLVABLE and self.versus is None
        return self.claim.number if solvable else None


def run_claims(
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
        raise UserError(f"{config}: claims: expected at least one, got none; without any, use emulate")
    comparisons: Sequence[Comparison]
    if nproc is None:
        comparisons = plan(config, overrides, VIRTUAL, on_cpu=on_cpu, try_out=False)  # ``emulate`` tries it out.
    else:
        comparisons = plan(config, overrides, RANKS, nproc, on_cpu=on_cpu)
    experiment = comparisons[0].experiment
    try:
        rows = _rows(comparisons)
        solved_on = _device_name(experiment) if nproc is None and experiment.scope == "layer" else None
    except ValueError as problem:
        raise UserError(f"{config}: {problem}") from None
    if nproc is None:
        status = emulate(config, out, overrides, force=force)
    else:
        status = launch(config, out, overrides, nproc, force=force).status
    if status not in (OK, CASES_FAILED):
        return status
    earlier = {} if force else _earlier(claims_path(out))
    solved = {row.policy for row in rows if row.policy is not None and row.target is not None}
    solvers: dict[str, SkewSolver] = {}
    described = []
    for number, row in enumerate(rows):
        print(f"moe-ep-bench: claim {number + 1} of {len(rows)}: {row.claim.source}", file=sys.stderr)
        solver = None
        if solved_on is not None and row.target is not None:
            solver = SkewSolver(row.comparisons[0], solved_on, solved)
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
        raise UserError(f"claims_device: {problem}") from None
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
        try:
            rows += [
                _Row(claim.resolved(policy), policy, versus, alike, others, claim.primary())
                for others, alike in groups.values()
                for policy, versus in pairs
            ]
        except ValueError as problem:
            raise UserError(f"claims.{number}.{problem}") from None
    if not rows:
        wanted = "; ".join(dict.fromkeys(unmet))
        raise UserError(f"claims: expected a comparison that one of them is about ({wanted}); there is none")
    return rows


def _is_at(experiment: Experiment, claim: Claim, number: int) -> bool:
    try:
        return all(_value(experiment, key) == wanted for key, wanted in claim.where.items())
    except KeyError as key:
        raise UserError(f"claims.{number}.where: expected dotted keys of the config, got {key.args[0]}") from None


def _value(experiment: Experiment, dotted: str) -> Any:
    """A config's value; KeyError where there is no such key."""
    found: Any = experiment.model_dump(mode="json")
    for part in dotted.split("."):
        if not isinstance(found, dict) or part not in found:
            raise KeyError(dotted)
        found = found[part]
    return found


def _described(row: _Row, solver: SkewSolver | None, earlier: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A row, JSON-ready."""
    claim, policy = row.claim, row.policy
    target, key = row.target, None
    needed: list[dict[str, Any]] = []
    if solver is not None and target is not None and policy is not None:
        key = stable_hash([solver.key, policy.params(), policy.name, claim.metric, target])
        needed = earlier.get(key) or solver.needed(policy, claim.metric, target)
    entries, primary = [], row.primary
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
                "primary": primary is not None
                and all(str(_value(comparison.experiment, key)) == wanted for key, wanted in primary.at.items()),
            }
        )
    return {
        "claim": claim.model_dump(mode="json"),
        "policy": policy.name if policy else "native",
        "policy_params": policy.params() if policy else {},
        "label": policy.label if policy else "native",
        "versus": row.versus and row.versus.label,
        "others": row.others,
        "primary_because": primary and primary.why,
        "entries": entries,
        "needed_key": key,
        "needed": needed,
        "needed_tokens_per_rank": solved_tokens(row.comparisons[0]) if needed else None,
    }


def _earlier(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Skews that this code solved for before, by key; none where the file is not there or not ours."""
    try:
        content = read_json(path)
        if content["code"] != code_hash():
            return {}
        return {row["needed_key"]: row["needed"] for row in content["claims"] if row["needed"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
