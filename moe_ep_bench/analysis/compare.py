"""Compare two runs of the same cases: what became slower, what faster, and what is inconclusive.

Cases are paired by case id, a hash of all that defines them. Of each pair are compared the time of the layer, or of a
whole model's pass; what it consists of (``times_of``); and the speedup over native. Two jobs share no moment;
``timing.statistics`` says how a change is estimated all the same. Each change is held against the noise floors of both
runs, of the same quantity: what native differs by from itself.

No interval of a time shows that the whole machine was slower. Native is the control: a case is slower only where native
is unchanged, or where the case's speedup over native, whose pairs ran moments apart, fell as well. Native has no
control; its change is reported as the machine's or that of code that all cases share.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.draws import over_draws
from moe_ep_bench.analysis.frames import speedups
from moe_ep_bench.analysis.load import Case, Comparison, Part, ResultsError, Run, load_times
from moe_ep_bench.analysis.parts import read_jobs
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.analysis.whole import MOE_PHASES, slowest_us
from moe_ep_bench.analysis.words import MODE_WORDS, OVERSUBSCRIBED, warnings_of
from moe_ep_bench.errors import UserError
from moe_ep_bench.schema import LAYER_PHASES, TOTAL
from moe_ep_bench.timing.statistics import (
    BELOW_MODEL,
    MIN_BATCHES,
    Estimate,
    estimate_change,
    estimate_median,
    joint_floor,
    judge,
    noise_floor,
    paired_ratios,
)

# The layer, or the pass of a whole model: from plain iterations, as the speedup is.
ALL = "all"
MOE, ATTENTION, REST = PARTS = ("MoE layers", "attention", "the rest")
# Of run.json's ``environment``: what decides times.
_ENVIRONMENT = (
    *("device_name", "driver", "cpu_name", "num_cores", "threads_per_rank", "python", "torch", "cuda", "nccl"),
    *("triton", "megatron_core", "transformer_engine", "apex", "deep_ep", "variables"),
)
# Of run.json's ``comparisons``: what the same config may have become on another machine.
_PARTS = ("backend", "experts", "permute", "kernel", "cuda_graph", "oversubscribed", "links", "device", "placement")
_INFORMATIVE = ("hostname", "code", "git_commit")
CHANGEABLE = (*_ENVIRONMENT, *_PARTS, "clocks")

# Measured conditions: how far they may differ, and their form. A GPU's clock moves in steps of 15 MHz, under 1 %; the
# matmul and the copy beside a run are taken a few times only, too rough to take a verdict away.
_MEASURED = {
    "clocks": (0.02, "SM clock {:,.0f} MHz (median)"),
    "matmul beside the run": (0.05, "{:.3g} TFLOP/s"),
    "copy beside the run": (0.05, "{:.3g} GB/s"),
}
# Which verdicts a condition takes away: of times and speedups, of times only, or none.
_WEIGHTS = {**dict.fromkeys(CHANGEABLE, "all"), "clocks": "times"}
# Of a run's own warnings, those that say that its times may not be those of another day.
_WEAKENS = ("disturbed machine", "warm-up did not settle", "times drifted", "more ranks than cores", "launch-bound")
# What ``judge`` says of a ratio above the floor, in words for a time and for a speedup.
_WORDS = {"time": {"faster": "slower", "slower": "faster"}, "speedup": {"faster": "higher", "slower": "lower"}}
# Verdicts on a time and on a speedup that say the same.
_SAME = ("no difference", BELOW_MODEL)
_AGREE = {("slower", "lower"), ("faster", "higher"), *((one, other) for one in _SAME for other in _SAME)}
# A share of pairs or score mass that differs by less is rounding.
_ROUTING_STEP = 5e-4
_CASE = ["comparison_id", "case_id", "title", "label", "policy", "role"]
_STATE = ["status", "reason", "dropped_share", "retained_mass"]


@dataclass(frozen=True, eq=False)
class RunChange:
    """What two run directories have in common, and what only one of them holds.

    Attributes:
        cases: a row per common case in reading order: what it is; ``not_compared``, why; how it
            ``routes_differently``; ``time_*`` and ``speedup_*``, the fields of ``changes`` of the layer or the pass.
        changes: a row per case x quantity x of (time or speedup): ``base`` and ``new``, medians (microseconds, or a
            speedup); ``ratio`` = new / base with its interval; the floor, ratios that noise alone makes; ``verdict``
            (``statistics.judge``; a higher or lower speedup in place of a faster or slower time), and ``why`` it is
            inconclusive.
        only_base, only_new: rows of ``frames.speedups``.
        differences: conditions that differ (``_differences``), with their comparison id.
        warnings: what weakens either run: comparison id and line.
    """

    base: Run
    new: Run
    cases: pd.DataFrame
    changes: pd.DataFrame
    only_base: pd.DataFrame
    only_new: pd.DataFrame
    differences: pd.DataFrame
    warnings: list[tuple[str, str]]
    same_machine: bool

    @property
    def native_moved(self) -> pd.DataFrame:
        """Rows of native that became slower or faster itself."""
        return self.cases[(self.cases["role"] == "baseline") & self.cases["time_verdict"].isin(["slower", "faster"])]


def compare_directories(
    base: Path, new: Path, *, intended: Collection[str] = (), same_machine: bool = False
) -> RunChange:
    """Compare two results directories.

    Args:
        intended: conditions that were changed on purpose (``CHANGEABLE``).
        same_machine: the machine is known to be unchanged, so that native is no control but a case like others.

    Raises:
        ValueError: no case was measured in both, they are of two modes or scopes, or ``intended`` names no condition.
    """
    for key in intended:
        if key not in CHANGEABLE:
            raise UserError(f"--changed: expected some of {', '.join(CHANGEABLE)}; got {key!r}")
    old, now = runs = [over_draws(load_times(directory))[0] for directory in (base, new)]
    if old.scope != now.scope:
        raise ResultsError(f"{new}: holds times of a {now.scope}, but {base} of a {old.scope}; expected one scope")
    if old.mode != now.mode:
        raise ResultsError(
            f"{new}: {MODE_WORDS[now.mode]}, but {base} is {MODE_WORDS[old.mode]}: not compared; "
            "`moe-ep-bench validate` holds one against the other"
        )
    first, second = map(speedups, runs)
    cases = first[_CASE + _STATE].merge(second[["case_id", *_STATE]], on="case_id", suffixes=("_base", "_new"))
    records = cases.to_dict("records")
    cases["not_compared"] = [_not_compared(row) for row in records]
    cases["routes_differently"] = [_routes_differently(row) for row in records]
    measured = cases[cases["not_compared"].isna()]
    if measured.empty:
        raise ResultsError(
            f"{new}: no case is in {base} as well; expected results of the same config on as many ranks (see the case "
            "ids in run.json)"
        )
    differing = pd.concat(
        _differences(*runs, name, intended).assign(comparison_id=name) for name in cases["comparison_id"].unique()
    )
    changes = _changes(runs, measured, differing, same_machine)
    for of in _WORDS:
        of_all = changes[(changes["quantity"] == ALL) & (changes["of"] == of)].set_index("case_id")
        cases = cases.join(of_all.drop(columns=["quantity", "of"]).add_prefix(f"{of}_"), on="case_id")
    warnings = [
        (result.results[0].case.comparison_id, f"{name}: {line}")
        for name, run in (("BASE", old), ("NEW", now))
        for result in analyse(run)
        for line in warnings_of(result, run)
        if line.startswith(_WEAKENS)
    ]
    only_base, only_new = (one[~one["case_id"].isin(cases["case_id"])] for one in (first, second))
    return RunChange(old, now, cases, changes, only_base, only_new, differing, warnings, same_machine)


def _not_compared(row: dict[str, Any]) -> str | None:
    lost = [
        f"{row[f'status_{run}']} in {run.upper()}: {' '.join((row[f'reason_{run}'] or 'no reason recorded').split())}"
        for run in ("base", "new")
        if row[f"status_{run}"] != "ok"
    ]
    return "; ".join(lost) or None


def _routes_differently(row: dict[str, Any]) -> str | None:
    """Equal ids mean equal routing: where that is not so, speeds are not of the same work."""
    words = [
        f"{what} {100 * row[f'{name}_base']:.1f} % in BASE, {100 * row[f'{name}_new']:.1f} % in NEW"
        for what, name in (("dropped", "dropped_share"), ("mass kept", "retained_mass"))
        if abs(row[f"{name}_new"] - row[f"{name}_base"]) > _ROUTING_STEP
    ]
    return "; ".join(words) or None


def _changes(runs: list[Run], cases: pd.DataFrame, differing: pd.DataFrame, same_machine: bool) -> pd.DataFrame:
    """``RunChange.changes`` of cases that both runs measured, native's ahead of the others of its comparison."""
    weighty = differing[~differing["intended"].astype(bool)]
    forbidding = {
        of: weighty[weighty["takes_verdicts_on"].isin(weights)].groupby("comparison_id")["key"].agg(", ".join)
        for of, weights in (("time", ["all", "times"]), ("speedup", ["all"]))
    }
    timed = [_timed(run) for run in runs]
    rows: list[dict[str, Any]] = []
    native: dict[tuple[str, str], dict[str, Any]] = {}
    for case_id, comparison_id, role in cases[["case_id", "comparison_id", "role"]].itertuples(index=False):
        old, now = (of_run[case_id] for of_run in timed)
        for name in (name for name in old if name in now):
            time, speedup = (
                {"case_id": case_id, "quantity": name, "of": of}
                | _change(
                    old[name], now[name], of, runs[1].comparisons[comparison_id], forbidding[of].get(comparison_id)
                )
                for of in _WORDS
            )
            rows.append(time)
            if role == "baseline":
                native[comparison_id, name] = time
                continue
            rows.append(speedup)
            if not same_machine:
                _hold_against_native(time, speedup, native.get((comparison_id, name)))
    return pd.DataFrame(rows)


class _Timed(NamedTuple):
    """A quantity of one case in one run: Series by (launch, batch, iteration), of the speedup pairs with native."""

    time: pd.Series
    speedup: pd.Series
    again: Estimate | None
    """Native over native a second time, of the same quantity."""


def _timed(run: Run) -> dict[str, dict[str, _Timed]]:
    """By case id and quantity."""
    times = {case: times_of(case, run.scope == "model") for case in run.cases if case.is_ok}
    by_role = {(case.comparison_id, case.role): own for case, own in times.items()}
    found: dict[str, dict[str, _Timed]] = {}
    for comparison_id in run.comparisons:
        native, again = (by_role.get((comparison_id, role), {}) for role in ("baseline", "noise"))
        floors = {name: estimate_median(_pairs(native.get(name), series)) for name, series in again.items()}
        for case, own in times.items():
            if case.comparison_id == comparison_id:
                found[case.case_id] = {
                    name: _Timed(series, _pairs(native.get(name), series), floors.get(name))
                    for name, series in own.items()
                }
    return found


def _pairs(native: pd.Series | None, case: pd.Series) -> pd.Series:
    if native is None:
        return case.iloc[:0]
    ratios = paired_ratios(native, case[case > 0])
    return ratios[ratios > 0]


def _change(old: _Timed, now: _Timed, of: str, facts: Comparison, differing: str | None) -> dict[str, Any]:
    """The numbers of one change, its verdict, and why it is inconclusive."""
    base, new = getattr(old, of), getattr(now, of)
    ratio = None if base.empty or new.empty else estimate_change(base, new)
    floor = joint_floor(noise_floor(old.again), noise_floor(now.again)) if old.again and now.again else None
    is_modelled, shared = facts.device is not None, facts.oversubscribed
    verdict, why = judge(ratio, floor, is_modelled=is_modelled, is_oversubscribed=shared), None
    if differing:
        why = f"conditions differ: {differing}"
    elif verdict == "inconclusive":
        why = "nothing to divide: no common batch, or a time of 0"
        if ratio is not None and not ratio.is_interval:
            why = f"{ratio.num_batches} batches: fewer than {MIN_BATCHES} give no interval"
        elif shared:
            why = OVERSUBSCRIBED
        elif ratio is not None and floor is None:
            why = "a run lacks its noise floor"
        elif ratio is not None and floor is not None:
            low, high, noise = (100 * (end - 1) for end in (ratio.low, ratio.high, floor.high))
            why = f"the interval ({low:+.1f} to {high:+.1f} %) lies partly in the noise floor ({noise:.1f} %)"
    return {
        "base": base.median(),
        "new": new.median(),
        "ratio": getattr(ratio, "median", None),
        **{name: getattr(ratio, name, None) for name in ("low", "high", "is_interval", "num_batches", "num_launches")},
        **{f"floor_{end}": getattr(floor, end, None) for end in ("low", "high")},
        "verdict": "inconclusive" if why else _WORDS[of].get(verdict, verdict),
        "why": why,
    }


def _hold_against_native(time: dict[str, Any], speedup: dict[str, Any], native: dict[str, Any] | None) -> None:
    """Take the verdict on a time away where native's own change forbids it; see the module."""
    if time["verdict"] == "inconclusive" or (time["verdict"], speedup["verdict"]) in _AGREE:
        return
    if native is None or native["ratio"] is None:
        why = "native was not measured in both, so the machine has no control"
    elif time["verdict"] not in _SAME and native["verdict"] not in _SAME:
        why = f"native changed by {percent_change(native['ratio'])}: perhaps the machine, not the case"
    elif native["verdict"] in ("slower", "faster"):
        why = f"native became {native['verdict']} ({percent_change(native['ratio'])}), and this did not"
    else:
        return
    time |= {"verdict": "inconclusive", "why": why}


def percent_change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


# ---- what a case consists of -----------------------------------------------------------------------------------------


def times_of(case: Case, is_whole: bool) -> dict[str, pd.Series]:
    """Microseconds of each quantity of a measured case, indexed by (launch, batch, iteration).

    Of a layer these are its phases, each on the rank that spends most in it. Of a whole model the pass in three parts,
    on the rank that is slowest in each breakdown iteration, where they add up: its MoE layers, waiting included;
    attention; and all the rest, which no policy reaches. The phases are then those of all MoE layers together.

    Returns:
        ``ALL``, then ``PARTS`` of a whole model, then every phase that occurred; ``ALL`` alone without breakdown
        iterations.
    """
    found = {ALL: layer_time_us(case)}
    slowest = slowest_us(case) if is_whole else None
    if slowest is not None:
        moe, attention = slowest[list(MOE_PHASES)].sum(axis=1), slowest["attention"]
        found |= {MOE: moe, ATTENTION: attention, REST: slowest[TOTAL] - moe - attention}
    times = case.breakdown
    occurred = [phase for phase in LAYER_PHASES if phase in times.occurred]
    return found | {phase: times.series(times.of(phase).max(axis=1)) for phase in occurred}


# ---- conditions ------------------------------------------------------------------------------------------------------


def _differences(base: Run, new: Run, comparison_id: str, intended: Collection[str]) -> pd.DataFrame:
    """The conditions of a comparison that differ; what a run did not record differs from nothing.

    Another GPU, driver or package takes away the verdicts on times and speedups, unless the user names it as changed on
    purpose. Another clock takes the verdicts on times only, for a speedup is paired inside its run. Other code and
    another host are listed and take nothing: code is what ``compare`` mostly compares.

    Returns:
        key, base, new (texts), takes_verdicts_on (all, times or none), intended (changed on purpose: of no weight).
    """
    recorded = [_conditions(run, comparison_id) for run in (base, new)]
    rows = []
    for key in (*_ENVIRONMENT, *_PARTS, *_MEASURED, *_INFORMATIVE):
        old, now = (conditions.get(key) for conditions in recorded)
        if old is None or now is None:
            continue
        is_same = old == now
        if key in _MEASURED:
            allowed, form = _MEASURED[key]
            is_same = abs(now - old) <= allowed * abs(old)
            old, now = form.format(old), form.format(now)
        if not is_same:
            rows.append((key, old, now, _WEIGHTS.get(key, "none"), key in intended))
    return pd.DataFrame(rows, columns=["key", "base", "new", "takes_verdicts_on", "intended"])


def _conditions(run: Run, comparison_id: str) -> dict[str, Any]:
    """The conditions that a run recorded: texts, and numbers of ``_MEASURED``."""
    runs = read_jobs(run.directory).runs
    ids = {run_id for case in run.cases if case.comparison_id == comparison_id for run_id in case.run_ids.values()}
    jobs = [runs[run_id] for run_id in sorted(ids & runs.keys())]
    hashes = [{key: one for key, one in job.hashes.items() if key == "code"} for job in jobs]
    environments = [job.environment | code for job, code in zip(jobs, hashes, strict=True)]
    found: dict[str, Any] = {}
    for key in (*_ENVIRONMENT, *_INFORMATIVE):
        texts = {_text(one[key]) for one in environments if key in one}
        if texts:
            found[key] = " and ".join(sorted(texts))
    facts = run.comparisons[comparison_id]
    for key in _PARTS:
        value = getattr(facts, key)
        found[key] = value.ran.partition(" (")[0] if isinstance(value, Part) else _text(value)
    if facts.kernel is None:  # not recorded
        del found["kernel"]
    launches = list(run.conditions.get(comparison_id, {}).values())
    clocks = [state.sm_clock_mhz[1] for one in launches for _, state in one.machines if state.sm_clock_mhz]
    if clocks:
        found["clocks"] = float(np.median(clocks))
    ceilings = [rank.ceilings for one in launches for rank in one.ranks]
    if ceilings:
        found["matmul beside the run"] = min(one.matmul_tflops for one in ceilings)
        found["copy beside the run"] = min(one.copy_gbps for one in ceilings)
    return found


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return " ".join(f"{key}={one}" for key, one in sorted(value.items())) or "none"
    return value if isinstance(value, str) else json.dumps(value)
