"""Compare two runs of the same cases: what became slower, what faster, and what cannot be said.

Cases are paired by case id, a hash of all that defines them. Of each pair are compared the time of the layer, or of a
whole model's pass; what it consists of (``quantities``); and the speedup over native. Two jobs share no moment;
``timing.changes`` says how a change is estimated all the same. Each change is held against the noise floors of both
runs, of the same quantity: what native differs by from itself.

No interval of a time shows that the whole machine was slower. Native is the control: a case is slower only where native
is unchanged, or where the case's speedup over native, whose pairs ran moments apart, fell as well. Native has no
control; its change is reported as the machine's or that of code that all cases share.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from moe_ep_bench.analysis.differences import check_intended, differences
from moe_ep_bench.analysis.fidelity import Fidelity
from moe_ep_bench.analysis.load import Case, ResultsError, Run, check_timed, is_whole, load_run
from moe_ep_bench.analysis.notes import warnings_of
from moe_ep_bench.analysis.quantities import ALL, MOE, times_of
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.words import MODE_WORDS
from moe_ep_bench.timing.changes import estimate_change, joint_floor
from moe_ep_bench.timing.statistics import MIN_BATCHES, NoiseFloor, estimate_median, judge, noise_floor, paired_ratios

# What is measured of a policy, beside controls: these decide ``--fail-over``.
_JUDGED_ROLES = ("policy", "replication")
# Of a run's own warnings, those that say that its times may not be those of another day.
_WEAKENS = ("disturbed machine", "warm-up did not settle", "times drifted", "more ranks than cores", "launch-bound")
# What ``judge`` says of a ratio above the floor, in words for a time and for a speedup.
_WORDS = {"time": {"faster": "slower", "slower": "faster"}, "speedup": {"faster": "higher", "slower": "lower"}}
# Verdicts on a time and on a speedup that say the same.
_AGREE = {("slower", "lower"), ("faster", "higher"), ("no difference", "no difference")}
# A share of pairs or score mass that differs by less is rounding.
_FIDELITY_STEP = 5e-4

CHANGE_FIELDS = (
    *("base", "new", "ratio", "low", "high", "is_interval", "num_batches", "num_launches"),
    *("floor_low", "floor_high", "verdict", "why"),
)


@dataclass(frozen=True, eq=False)
class RunChange:
    """What two run directories have in common, and what only one of them holds.

    Attributes:
        cases: a row per common case in reading order: what it is; ``is_judged``; ``not_compared``, why; how it
            ``routes_differently``; ``dropped_share`` and ``retained_mass`` of NEW; ``time_*`` and ``speedup_*``, the
            fields of ``changes`` for the layer or the pass.
        changes: a row per case x quantity x of (time or speedup): ``base`` and ``new``, medians (microseconds, or a
            speedup); ``ratio`` = new / base with its interval; the floor, ratios that noise alone makes; ``verdict``:
            slower or faster (of a speedup: higher or lower), no difference, or inconclusive; ``why`` it cannot.
        differences: by comparison id, conditions that differ (``differences.differences``).
        warnings: by comparison id, what weakens either run, which each names.
    """

    base: Run
    new: Run
    cases: pd.DataFrame
    changes: pd.DataFrame
    differences: dict[str, pd.DataFrame]
    warnings: dict[str, list[str]]
    same_machine: bool

    @property
    def only_base(self) -> list[Case]:
        return _without(self.base, self.new)

    @property
    def only_new(self) -> list[Case]:
        return _without(self.new, self.base)


def _without(run: Run, other: Run) -> list[Case]:
    known = {case.case_id for case in other.cases}
    return [case for case in run.cases if case.case_id not in known]


class _Timed(NamedTuple):
    """A quantity of one case in one run: Series by (launch, batch, iteration), of the speedup pairs with native."""

    time: pd.Series
    speedup: pd.Series
    floor: NoiseFloor | None


def compare_directories(
    base: Path, new: Path, *, intended: Collection[str] = (), same_machine: bool = False
) -> RunChange:
    """Read two results directories, both of layers or both of whole models, and compare them (``compare_runs``)."""
    for directory in (base, new):
        check_timed(directory)
    check_intended(intended)
    of_models = [is_whole(directory) for directory in (base, new)]
    runs = [load_run(directory, whole=whole) for directory, whole in zip((base, new), of_models, strict=True)]
    if of_models[0] != of_models[1]:
        words = ["times of whole models" if whole else "times of layers" for whole in of_models]
        raise ResultsError(f"{new}: holds {words[1]}, but {base} {words[0]}; expected two directories of one scope")
    return compare_runs(*runs, intended=intended, same_machine=same_machine)


def compare_runs(base: Run, new: Run, *, intended: Collection[str] = (), same_machine: bool = False) -> RunChange:
    """Compare two runs.

    Args:
        intended: conditions that were changed on purpose (``differences.CHANGEABLE``).
        same_machine: the machine is known to be unchanged, so that native is no control but a case like others.

    Raises:
        ResultsError: no case is in both, or one run is emulated and the other not.
        ValueError: ``intended`` names no condition.
    """
    check_intended(intended)
    if base.mode != new.mode:
        raise ResultsError(
            f"{new.directory}: {MODE_WORDS[new.mode]}, but {base.directory} is {MODE_WORDS[base.mode]}: not compared; "
            "`moe-ep-bench validate` holds one against the other"
        )
    results = [dict(zip(run.comparisons, analyse(run), strict=True)) for run in (base, new)]
    cases, changes, differing, warnings = [], [], {}, {}
    for comparison_id in (one for one in results[0] if one in results[1]):
        pair = [of_run[comparison_id] for of_run in results]
        differing[comparison_id] = found = differences(base, new, comparison_id, intended)
        warnings[comparison_id] = [
            f"{name}: {line}"
            for name, result, run in zip(("BASE", "NEW"), pair, (base, new), strict=True)
            for line in warnings_of(result, run)
            if line.startswith(_WEAKENS)
        ]
        others = {result.case.case_id: result for result in pair[1].results}
        common = [(one, others[one.case.case_id]) for one in pair[0].results if one.case.case_id in others]
        cases += [_case(*results_of_case) for results_of_case in common]
        changes += _changes(pair, common, found, same_machine)
    if not cases:
        raise ResultsError(
            f"{new.directory}: no case is in {base.directory} as well; expected results of the same config "
            "on as many ranks (see the case ids in run.json)"
        )
    frame = pd.DataFrame(changes, columns=["case_id", "quantity", "of", *CHANGE_FIELDS])
    wide = pd.DataFrame(cases).set_index("case_id", drop=False)
    whole = frame[frame["quantity"] == ALL]
    for of in _WORDS:
        fields = whole[whole["of"] == of].set_index("case_id")[list(CHANGE_FIELDS)]
        wide = wide.join(fields.add_prefix(f"{of}_"))
    return RunChange(base, new, wide.reset_index(drop=True), frame, differing, warnings, same_machine)


def _case(base: CaseResult, new: CaseResult) -> dict[str, Any]:
    """What a common case is, and why it is not compared or does not do the same work."""
    case, kept = new.case, None if new.case.role == "ceiling" else new.fidelity
    lost = [
        f"{result.case.status} in {name}: {' '.join((result.case.reason or 'no reason was recorded').split())}"
        for name, result in (("BASE", base), ("NEW", new))
        if not result.case.is_ok
    ]
    row = {name: getattr(case, name) for name in ("comparison_id", "case_id", "label", "policy", "role")}
    return {
        **row,
        "is_judged": base.case.role in _JUDGED_ROLES,
        "not_compared": "; ".join(lost) or None,
        "routes_differently": None if lost else _fidelity_change(base.fidelity, new.fidelity),
        "dropped_share": getattr(kept, "dropped_share", None),
        "retained_mass": getattr(kept, "retained_mass", None),
    }


def _fidelity_change(base: Fidelity | None, new: Fidelity | None) -> str | None:
    """Equal ids mean equal routing: where that is not so, speeds are not of the same work."""
    if base is None or new is None:
        return None
    pairs = (
        ("dropped", base.dropped_share, new.dropped_share),
        ("mass kept", base.retained_mass, new.retained_mass),
    )
    words = [
        f"{what} {100 * old:.1f} % in BASE, {100 * now:.1f} % in NEW"
        for what, old, now in pairs
        if abs(now - old) > _FIDELITY_STEP
    ]
    return "; ".join(words) or None


def _changes(
    pair: list[ComparisonResult],
    common: list[tuple[CaseResult, CaseResult]],
    found: pd.DataFrame,
    same_machine: bool,
) -> list[dict[str, Any]]:
    """Rows of ``RunChange.changes`` for one comparison."""
    weighty = found[~found["intended"].astype(bool)]
    differing = {
        of: ", ".join(weighty[weighty["takes_verdicts_on"].isin(weights)]["key"])
        for of, weights in (("time", ["all", "times"]), ("speedup", ["all"]))
    }
    quantities = [_quantities(of_run) for of_run in pair]

    def change(case_id: str, name: str, of: str) -> dict[str, Any]:
        old, now = (of_run[case_id][name] for of_run in quantities)
        floors = (old.floor, now.floor)
        return {"case_id": case_id, "quantity": name, "of": of} | _change(
            getattr(old, of), getattr(now, of), floors, _WORDS[of], differing[of]
        )

    rows: list[dict[str, Any]] = []
    native: dict[str, dict[str, Any]] = {}
    for base, new in sorted(common, key=lambda one: one[0].case.role != "baseline"):
        if not (base.case.is_ok and new.case.is_ok):
            continue
        case_id = base.case.case_id
        for name in (one for one in quantities[0][case_id] if one in quantities[1][case_id]):
            time = change(case_id, name, "time")
            rows.append(time)
            if base.case.role == "baseline":
                native[name] = time
                continue
            speedup = change(case_id, name, "speedup")
            if not same_machine:
                _hold_against_native(time, speedup, native.get(name))
            if name in (ALL, MOE):
                rows.append(speedup)
    return rows


def _quantities(comparison: ComparisonResult) -> dict[str, dict[str, _Timed]]:
    """By case and quantity its times, its pairs with native, and the floor of that quantity."""
    is_whole_model = comparison.comparison.whole is not None
    times = {r.case.case_id: times_of(r.case, is_whole_model) for r in comparison.results if r.case.is_ok}
    native, again = comparison.of_role("baseline"), comparison.of_role("noise")
    of_native = {} if native is None else times[native.case.case_id]
    floors = {}
    for name, series in ({} if again is None else times[again.case.case_id]).items():
        same_again = estimate_median(_pairs(of_native.get(name), series))
        if same_again is not None:
            floors[name] = noise_floor(same_again)
    return {
        case_id: {
            name: _Timed(series, _pairs(of_native.get(name), series), floors.get(name)) for name, series in own.items()
        }
        for case_id, own in times.items()
    }


def _pairs(native: pd.Series | None, case: pd.Series) -> pd.Series:
    if native is None:
        return case.iloc[:0]
    ratios = paired_ratios(native, case[case > 0])
    return ratios[ratios > 0]


def _change(
    old: pd.Series,
    now: pd.Series,
    floors: tuple[NoiseFloor | None, NoiseFloor | None],
    words: dict[str, str],
    differing: str,
) -> dict[str, Any]:
    """The fields of one change (``CHANGE_FIELDS``)."""
    ratio = None if old.empty or now.empty else estimate_change(old, now)
    floor = None if floors[0] is None or floors[1] is None else joint_floor(floors[0], floors[1])
    verdict = judge(ratio, floor)
    if differing:
        why = f"conditions differ: {differing}"
    elif verdict != "inconclusive":
        why = None
    elif ratio is None:
        why = "nothing to divide: no common batch, or a time of 0"
    elif not ratio.is_interval:
        why = f"{ratio.num_batches} batches: fewer than {MIN_BATCHES} give no interval"
    elif floor is None:
        why = "a run lacks its noise floor"
    else:
        low, high, noise = (100 * (end - 1) for end in (ratio.low, ratio.high, floor.high))
        why = f"the interval ({low:+.1f} to {high:+.1f} %) lies partly in the noise floor ({noise:.1f} %)"
    of_ratio = ("low", "high", "is_interval", "num_batches", "num_launches")
    return {
        "base": None if old.empty else float(old.median()),
        "new": None if now.empty else float(now.median()),
        "ratio": getattr(ratio, "median", None),
        **{name: getattr(ratio, name, 0) for name in of_ratio},
        **({} if ratio else {"low": None, "high": None, "is_interval": False}),
        "floor_low": getattr(floor, "low", None),
        "floor_high": getattr(floor, "high", None),
        "verdict": "inconclusive" if why else words.get(verdict, verdict),
        "why": why,
    }


def _hold_against_native(time: dict[str, Any], speedup: dict[str, Any], native: dict[str, Any] | None) -> None:
    """Take the verdict on a time away where native's own change forbids it; see the module."""
    if time["verdict"] == "inconclusive":
        return
    if native is None or native["ratio"] is None:
        why = "native was not measured in both, so the machine has no control"
    elif native["verdict"] == "no difference" or (time["verdict"], speedup["verdict"]) in _AGREE:
        return
    elif time["verdict"] != "no difference":
        why = f"native changed by {percent_change(native['ratio'])}: perhaps the machine, not the case"
    elif native["verdict"] != "inconclusive":
        why = f"native became {native['verdict']} ({percent_change(native['ratio'])}), and this did not"
    else:
        return
    time |= {"verdict": "inconclusive", "why": why}


def percent_change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def native_moved(change: RunChange) -> pd.DataFrame:
    """Rows of native that became slower or faster itself."""
    cases = change.cases
    return cases[(cases["role"] == "baseline") & cases["time_verdict"].isin(["slower", "faster"])]
