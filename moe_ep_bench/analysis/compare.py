"""Two runs of the same cases: what became slower, what faster, and what cannot be said.

Cases are paired by case id, which is a hash of all that defines them, so that only like is set against like.
Of each pair are compared: the time of the layer, or of a whole model's pass; what it consists of
(``quantities``); and the speedup over native. Times of two jobs share no moment; how they
are estimated all the same is told in ``timing.changes``. Each change is held against the noise floors of both
runs, of the same quantity: what native differs by from itself.

A time has one weakness that no interval shows: the whole machine may have been slower. Native is the control. A case
is called slower only where native was found unchanged, or where the case's speedup over native, whose pairs ran
moments apart, fell as well. Native itself has no control; what it shows is reported and said to be the machine's or
that of code that all cases share.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from moe_ep_bench.analysis.differences import Difference, check_intended, differences
from moe_ep_bench.analysis.fidelity import Fidelity
from moe_ep_bench.analysis.load import Case, Comparison, ResultsError, Run, check_timed, is_whole, load_run
from moe_ep_bench.analysis.notes import warnings_of
from moe_ep_bench.analysis.quantities import ALL, MOE, PARTS, times_of
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.words import MODE_WORDS
from moe_ep_bench.timing.changes import estimate_change, joint_floor
from moe_ep_bench.timing.statistics import (
    MIN_BATCHES,
    Estimate,
    NoiseFloor,
    estimate_median,
    judge,
    noise_floor,
    paired_ratios,
)

# What is measured of a policy, beside controls: these decide ``--fail-over``.
_JUDGED_ROLES = ("policy", "replication")
# Of a run's own warnings, those that say that its times may not be those of another day.
_WEAKENS = ("disturbed machine", "warm-up did not settle", "times drifted", "more ranks than cores", "launch-bound")
# What ``judge`` says of a ratio above the floor, in words for a time and for a speedup.
_TIME_WORDS = {"faster": "slower", "slower": "faster"} | {same: same for same in ("no difference", "cannot say")}
_SPEEDUP_WORDS = {"faster": "higher", "slower": "lower"} | {same: same for same in ("no difference", "cannot say")}
# Verdicts on a time and on a speedup that say the same.
_AGREE = {("slower", "lower"), ("faster", "higher"), ("no difference", "no difference")}
# A share of pairs or score mass that differs by less is rounding.
_FIDELITY_STEP = 5e-4


@dataclass(frozen=True)
class Change:
    """A quantity in NEW over the same in BASE.

    Attributes:
        base, new: medians over all iterations: microseconds, or a speedup. None where there is none.
        ratio: new / base; above 1 is slower for a time and higher for a speedup.
        floor: ratios that noise alone makes.
        verdict: slower or faster (of a speedup: higher or lower), no difference, or cannot say.
        why: it cannot be said; None where it can.
    """

    base: float | None
    new: float | None
    ratio: Estimate | None
    floor: NoiseFloor | None
    verdict: str
    why: str | None


@dataclass(frozen=True, eq=False)
class CaseChange:
    """One case in both runs; its changes are empty where it was not measured in both.

    Attributes:
        time, speedup: of the layer, or of a whole model's pass; no speedup for native itself.
        phases: of the layer, or of all MoE layers of a whole model together.
        parts: of a pass (``quantities.PARTS``); empty for a layer.
        moe_speedup: of a whole model's MoE layers alone.
        fidelity: of NEW.
        why: it is not compared at all; None where it is.
    """

    base: Case
    new: Case
    time: Change | None = None
    speedup: Change | None = None
    phases: dict[str, Change] = field(default_factory=dict)
    parts: dict[str, Change] = field(default_factory=dict)
    moe_speedup: Change | None = None
    fidelity: Fidelity | None = None
    fidelity_change: str | None = None
    why: str | None = None

    @property
    def is_judged(self) -> bool:
        return self.base.role in _JUDGED_ROLES


@dataclass(frozen=True, eq=False)
class ComparisonChange:
    """All common cases of a comparison, in reading order.

    Attributes:
        control: native's own change; None where it was not measured in both.
        warnings: what weakens either run, which names it.
    """

    comparison: Comparison
    cases: tuple[CaseChange, ...]
    differences: tuple[Difference, ...]
    control: Change | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RunChange:
    """Everything that two run directories have in common, and what only one of them holds."""

    base: Run
    new: Run
    comparisons: tuple[ComparisonChange, ...]
    only_base: tuple[Case, ...]
    only_new: tuple[Case, ...]
    same_machine: bool

    @property
    def cases(self) -> list[CaseChange]:
        return [case for comparison in self.comparisons for case in comparison.cases]


@dataclass(frozen=True, eq=False)
class _Timed:
    """Times of one case in one run and native's pairs with it: Series by (launch, batch, iteration)."""

    time_us: pd.Series
    speedup: pd.Series
    floor: NoiseFloor | None


def compare_runs(base: Run, new: Run, *, intended: Collection[str] = (), same_machine: bool = False) -> RunChange:
    """Set two runs side by side.

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
    base_ids, new_ids = ({case.case_id for case in run.cases} for run in (base, new))
    if not base_ids & new_ids:
        raise ResultsError(
            f"{new.directory}: no case is in {base.directory} as well; expected results of the same config "
            "on as many ranks (see the case ids in run.json)"
        )
    base_results, new_results = (dict(zip(run.comparisons, analyse(run), strict=True)) for run in (base, new))
    common = [comparison_id for comparison_id in base_results if comparison_id in new_results]
    compared = []
    for comparison_id in common:
        found = tuple(differences(base, new, comparison_id, intended))
        pair = base_results[comparison_id], new_results[comparison_id]
        compared.append(_compare(pair, (base, new), found, same_machine))
    return RunChange(
        base,
        new,
        tuple(compared),
        tuple(case for case in base.cases if case.case_id not in new_ids),
        tuple(case for case in new.cases if case.case_id not in base_ids),
        same_machine,
    )


def _compare(
    pair: tuple[ComparisonResult, ComparisonResult],
    runs: tuple[Run, Run],
    found: tuple[Difference, ...],
    same_machine: bool,
) -> ComparisonChange:
    quantities = [_quantities(of_run) for of_run in pair]
    others = {result.case.case_id: result for result in pair[1].results}
    native = next((r.case.case_id for r in pair[0].results if r.case.role == "baseline"), None)
    judgement = _Judge.of(found, same_machine)
    controls: dict[str, Change] = {}
    if native is not None and all(native in of_run for of_run in quantities):
        base, new = (of_run[native] for of_run in quantities)
        controls = {name: judgement.of_time(base[name], new[name]) for name in base if name in new}
    cases = [
        _case_change(result, others[result.case.case_id], quantities, controls, judgement)
        for result in pair[0].results
        if result.case.case_id in others
    ]
    warnings = [
        f"{name}: {line}"
        for name, result, run in zip(("BASE", "NEW"), pair, runs, strict=True)
        for line in warnings_of(result, run)
        if line.startswith(_WEAKENS)
    ]
    return ComparisonChange(pair[1].comparison, tuple(cases), found, controls.get(ALL), tuple(warnings))


def _quantities(comparison: ComparisonResult) -> dict[str, dict[str, _Timed]]:
    """By case and quantity its times, its pairs with native, and the floor of that quantity."""
    is_whole_model = comparison.comparison.whole is not None
    times = {r.case.case_id: times_of(r.case, is_whole_model) for r in comparison.results if r.case.is_ok}
    native, again = comparison.of_role("baseline"), comparison.of_role("noise")
    of_native = {} if native is None else times[native.case.case_id]
    floors = {} if native is None or again is None else _floors(of_native, times[again.case.case_id])
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


def _floors(native: dict[str, pd.Series], again: dict[str, pd.Series]) -> dict[str, NoiseFloor]:
    found = {}
    for name in native.keys() & again.keys():
        same_again = estimate_median(_pairs(native[name], again[name]))
        if same_again is not None:
            found[name] = noise_floor(same_again)
    return found


def _case_change(
    base: CaseResult,
    new: CaseResult,
    quantities: list[dict[str, dict[str, _Timed]]],
    controls: dict[str, Change],
    judgement: _Judge,
) -> CaseChange:
    case_id = base.case.case_id
    lost = [
        f"{result.case.status} in {name}: {' '.join((result.case.reason or 'no reason was recorded').split())}"
        for name, result in (("BASE", base), ("NEW", new))
        if not result.case.is_ok
    ]
    if lost:
        return CaseChange(base.case, new.case, why="; ".join(lost))
    base_timed, new_timed = (of_run[case_id] for of_run in quantities)
    if base.case.role == "baseline":
        times, speedups = controls, {}
    else:
        common = [name for name in base_timed if name in new_timed]
        times = {n: judgement.of_case(base_timed[n], new_timed[n], controls.get(n)) for n in common}
        speedups = {n: judgement.of_speedup(base_timed[n], new_timed[n]) for n in (ALL, MOE) if n in common}
    return CaseChange(
        base.case,
        new.case,
        time=times[ALL],
        speedup=speedups.get(ALL),
        phases={name: change for name, change in times.items() if name not in (ALL, *PARTS)},
        parts={name: times[name] for name in PARTS if name in times},
        moe_speedup=speedups.get(MOE),
        fidelity=new.fidelity,
        fidelity_change=_fidelity_change(base.fidelity, new.fidelity),
    )


def _fidelity_change(base: Fidelity | None, new: Fidelity | None) -> str | None:
    """Equal ids mean equal routing: where that is not so, speeds are not of the same work."""
    if base is None or new is None:
        return None
    words = [
        f"{what} {100 * old:.1f} % in BASE, {100 * now:.1f} % in NEW"
        for what, old, now in (
            ("dropped", base.dropped_share, new.dropped_share),
            ("mass kept", base.retained_mass, new.retained_mass),
        )
        if abs(now - old) > _FIDELITY_STEP
    ]
    return "; ".join(words) or None


@dataclass(frozen=True)
class _Judge:
    """Verdicts, once the conditions of both runs are known.

    Attributes:
        no_times, no_speedups: why there are no verdicts on these; None where there are.
    """

    same_machine: bool
    no_times: str | None
    no_speedups: str | None

    @staticmethod
    def of(found: Collection[Difference], same_machine: bool) -> _Judge:
        of_times = [one.key for one in found if one.counts_for_times]
        of_speedups = [one.key for one in found if one.counts_for_speedups]
        why = [f"conditions differ: {', '.join(keys)}" if keys else None for keys in (of_times, of_speedups)]
        return _Judge(same_machine, *why)

    def of_time(self, base: _Timed, new: _Timed) -> Change:
        return self._change(base.time_us, new.time_us, base, new, _TIME_WORDS, self.no_times)

    def of_speedup(self, base: _Timed, new: _Timed) -> Change:
        return self._change(base.speedup, new.speedup, base, new, _SPEEDUP_WORDS, self.no_speedups)

    def of_case(self, base: _Timed, new: _Timed, native: Change | None) -> Change:
        """The verdict on a time, which native's own may take away; see the module."""
        found = self.of_time(base, new)
        if self.same_machine or found.verdict == "cannot say":
            return found
        if native is None or native.ratio is None:
            return _undecided(found, "native was not measured in both, so the machine has no control")
        if native.verdict == "no difference" or (found.verdict, self.of_speedup(base, new).verdict) in _AGREE:
            return found
        moved = percent_change(native.ratio)
        if found.verdict != "no difference":
            return _undecided(found, f"native changed by {moved}: perhaps the machine, not the case")
        if native.verdict != "cannot say":
            return _undecided(found, f"native became {native.verdict} ({moved}), and this did not")
        return found

    @staticmethod
    def _change(
        old: pd.Series, now: pd.Series, base: _Timed, new: _Timed, words: dict[str, str], differing: str | None
    ) -> Change:
        ratio = None if old.empty or now.empty else estimate_change(old, now)
        floor = None if base.floor is None or new.floor is None else joint_floor(base.floor, new.floor)
        verdict = "cannot say" if differing else words[judge(ratio, floor)]
        why = (differing or _why(ratio, floor)) if verdict == "cannot say" else None
        medians = (None if values.empty else float(values.median()) for values in (old, now))
        return Change(*medians, ratio, floor, verdict, why)


def _undecided(change: Change, why: str) -> Change:
    return Change(change.base, change.new, change.ratio, change.floor, "cannot say", why)


def _why(ratio: Estimate | None, floor: NoiseFloor | None) -> str:
    if ratio is None:
        return "nothing to divide: no common batch, or a time of 0"
    if not ratio.is_interval:
        return f"{ratio.num_batches} batches: fewer than {MIN_BATCHES} give no interval"
    if floor is None:
        return "a run lacks its noise floor"
    return (
        f"the interval ({100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %) lies partly "
        f"in the noise floor ({100 * (floor.high - 1):.1f} %)"
    )


def percent_change(ratio: Estimate) -> str:
    return f"{100 * (ratio.median - 1):+.1f} %"


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
