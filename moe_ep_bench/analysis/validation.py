"""Emulated ranks held against real ones: how far may the speedups of ``emulate`` be trusted?

Both runs are of one config, on the same batches with the same routing; only the emulated one sets the ranks' runs side
by side itself and models what moves between them. A speedup of it *agrees* where it lies within the real speedup's
interval, widened by the real noise floor; an error that all cases share cancels in a speedup, so times and phases are
set beside each other as well (``validation_times``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from moe_ep_bench.analysis.load import Case, ResultsError, Run, is_whole, load_run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.validation_times import (
    PASS_TIMES,
    TIMES,
    LoadLaws,
    PhaseError,
    beside_alone,
    load_laws,
    phase_errors,
    phase_times_ms,
)
from moe_ep_bench.analysis.whole import moe_time_us
from moe_ep_bench.analysis.words import OVERSUBSCRIBED
from moe_ep_bench.bench.validation_directory import ValidationDirectory
from moe_ep_bench.timing.statistics import Estimate, NoiseFloor, estimate_median, noise_floor, paired_ratios

Agreement = Literal["agrees", "differs", "cannot say"]

# A band whose upper end is more than this over its lower one holds too much to confirm anything.
MAX_BAND = 1.25


@dataclass(frozen=True, eq=False)
class CaseCheck:
    """One case, measured and emulated.

    Attributes:
        real, emulated: their own numbers; the baseline's speedup is None.
        band: see ``band_of``; None for references and where the real run gives no interval or no floor.
        agreement: None for the baseline and the noise case, whose speedup is no claim.
        real_ms, emulated_ms: by ``TIMES`` or ``PASS_TIMES``; empty where a run has no breakdown of the case.
    """

    real: CaseResult
    emulated: CaseResult
    band: tuple[float, float] | None
    agreement: Agreement | None
    real_ms: dict[str, float]
    emulated_ms: dict[str, float]

    @property
    def label(self) -> str:
        return self.real.case.label

    @property
    def unmeasured(self) -> str:
        """Why there is nothing to compare; empty where there is."""
        for what, result in (("real", self.real), ("emulated", self.emulated)):
            if not result.case.is_ok:
                return f"{what}: {result.case.status}: {result.case.reason or 'no reason was recorded'}"
        return ""

    @property
    def difference(self) -> float | None:
        """Emulated over real speedup, minus 1; None where there is no claim or one of them lacks."""
        if self.agreement is None or self.real.speedup is None or self.emulated.speedup is None:
            return None
        return self.emulated.speedup.median / self.real.speedup.median - 1


@dataclass(frozen=True)
class MoeCheck:
    """The speedup of a whole model's MoE layers alone, by breakdown iterations; as ``CaseCheck``."""

    label: str
    real: Estimate | None
    emulated: Estimate | None
    band: tuple[float, float] | None
    agreement: Agreement

    @property
    def difference(self) -> float | None:
        """Emulated over real speedup, minus 1; None where one of them lacks."""
        if self.real is None or self.emulated is None:
            return None
        return self.emulated.median / self.real.median - 1


@dataclass(frozen=True, eq=False)
class ComparisonCheck:
    """One comparison, of a layer or of a whole model, measured and emulated.

    Attributes:
        cases: in reading order.
        moe: of every claim of a whole model, the MoE layers alone; nothing of a layer.
        moe_floor: by which native run twice differs from itself in them; None without both.
        unsound: why the two runs may not be held against each other at all; empty where they may.
        threads: of each real rank and of the emulated one.
        phase_errors: of every phase in which ranks work or transfer.
        real_laws, emulated_laws: loads and times.
        alone: the expert phase beside the experts timed outside of the layer (``beside_alone``); may be empty.
    """

    real: ComparisonResult
    emulated: ComparisonResult
    cases: list[CaseCheck]
    moe: list[MoeCheck]
    moe_floor: NoiseFloor | None
    unsound: list[str]
    threads: tuple[int, int]
    phase_errors: list[PhaseError]
    real_laws: LoadLaws
    emulated_laws: LoadLaws
    alone: pd.DataFrame

    @property
    def timed(self) -> str:
        """What was timed, in a word."""
        return "layer" if self.real.comparison.whole is None else "pass"

    @property
    def claims(self) -> list[CaseCheck]:
        """Cases whose speedup is a claim: policies, and the ceiling."""
        return [case for case in self.cases if case.agreement is not None]


@dataclass(frozen=True, eq=False)
class Validation:
    """All comparisons of a directory that ``validate`` wrote."""

    files: ValidationDirectory
    real: Run
    emulated: Run
    comparisons: list[ComparisonCheck]
    links: str
    """Where the links are from, in words."""


def is_validation(directory: Path) -> bool:
    """Whether ``validate`` wrote this directory."""
    return ValidationDirectory(directory).pairs.is_file()


def load_validation(directory: Path) -> Validation:
    """Read both runs and set them against each other.

    Raises:
        ResultsError: one line: a file is missing or cannot be trusted.
    """
    files = ValidationDirectory(directory)
    try:
        pairs, links = files.read_pairs()
    except ValueError as error:
        raise ResultsError(str(error)) from None
    real, emulated = (load_run(directory, whole=is_whole(files.real)) for directory in (files.real, files.emulated))
    by_id = [dict(zip(run.comparisons, analyse(run), strict=True)) for run in (real, emulated)]
    for run, ids, known in zip((real, emulated), zip(*pairs, strict=True), by_id, strict=True):
        missing = [one for one in ids if one not in known]
        if missing:
            raise ResultsError(f"{run.directory}: holds no comparison {missing[0]}, which {files.pairs} names")
    threads = _threads(real), _threads(emulated)
    alone = _read_alone(files.experts_alone)
    checks = [check_comparison(by_id[0][one], by_id[1][other], threads, alone) for one, other in pairs]
    return Validation(files, real, emulated, checks, links)


def check_comparison(
    real: ComparisonResult, emulated: ComparisonResult, threads: tuple[int, int], alone: pd.DataFrame
) -> ComparisonCheck:
    """Set one comparison's two runs against each other.

    Args:
        threads: of each real rank and of the emulated one.
        alone: rows of ``bench.validate``, of any comparisons.

    Raises:
        ResultsError: one run has a case that the other does not know.
    """
    twins = {_key(result.case): result for result in emulated.results}
    for result in real.results:
        if _key(result.case) not in twins:
            raise ResultsError(f"the emulated run has no case {result.case.label}, which the real one has")
    pairs = [(result, twins[_key(result.case)]) for result in real.results]
    unsound = _unsound(real, pairs, threads)
    moe, moe_floor = _check_moe(pairs, sound=not unsound) if real.comparison.whole is not None else ([], None)
    return ComparisonCheck(
        real=real,
        emulated=emulated,
        cases=[_check_case(one, other, real, sound=not unsound) for one, other in pairs],
        moe=moe,
        moe_floor=moe_floor,
        unsound=unsound,
        threads=threads,
        phase_errors=phase_errors([(one.case, other.case) for one, other in pairs]),
        real_laws=load_laws([result.case for result, _ in pairs], real.comparison.num_tokens),
        emulated_laws=load_laws([result.case for _, result in pairs], real.comparison.num_tokens),
        alone=beside_alone([result.case for _, result in pairs], alone),
    )


def band_of(real: Estimate | None, floor: NoiseFloor | None) -> tuple[float, float] | None:
    """The real speedup's interval, widened on both sides by the real noise floor's factor.

    Returns:
        Lowest and highest speedup that the real run does not exclude; None without an interval or a floor.
    """
    if real is None or floor is None or not real.is_interval:
        return None
    return real.low * floor.low, real.high * floor.high


def agreement_of(emulated: Estimate | None, band: tuple[float, float] | None) -> Agreement:
    """Whether the emulated speedup lies within what the real run allows.

    ``differs`` outside of the band, however wide it is; inside, ``agrees`` where the band is at most ``MAX_BAND`` wide
    (upper over lower end). A wider one would hold almost anything: ``cannot say``, as without any band.
    """
    if emulated is None or band is None:
        return "cannot say"
    low, high = band
    if not low <= emulated.median <= high:
        return "differs"
    return "agrees" if high / low <= MAX_BAND else "cannot say"


def _check_case(real: CaseResult, emulated: CaseResult, of: ComparisonResult, *, sound: bool) -> CaseCheck:
    is_claim = real.case.role in ("policy", "ceiling")
    band = band_of(real.speedup, of.floor) if is_claim and sound else None
    times = TIMES if of.comparison.whole is None else PASS_TIMES
    return CaseCheck(
        real=real,
        emulated=emulated,
        band=band,
        agreement=agreement_of(emulated.speedup, band) if is_claim else None,
        real_ms=phase_times_ms(real.case, times),
        emulated_ms=phase_times_ms(emulated.case, times),
    )


def _check_moe(pairs: list[tuple[CaseResult, CaseResult]], *, sound: bool) -> tuple[list[MoeCheck], NoiseFloor | None]:
    """An error of the MoE layers is diluted in the pass; here it is not. Their own noise floor beside it."""
    real, emulated = (_moe_speedups([pair[run].case for pair in pairs]) for run in (0, 1))
    again = next((real.get(_key(result.case)) for result, _ in pairs if result.case.role == "noise"), None)
    floor = noise_floor(again) if again is not None else None
    checks = []
    for result, _ in pairs:
        if result.case.role in ("policy", "ceiling"):
            one, other = (speedups.get(_key(result.case)) for speedups in (real, emulated))
            band = band_of(one, floor) if sound else None
            checks.append(MoeCheck(result.case.label, one, other, band, agreement_of(other, band)))
    return checks, floor


def _moe_speedups(cases: list[Case]) -> dict[tuple[str, str, str], Estimate]:
    """By ``_key``, native's time in all MoE layers over each case's."""
    times_us = {
        _key(case): moe_time_us(case) for case in cases if case.is_ok and (case.timings["kind"] == "breakdown").any()
    }
    native = next((times_us.get(_key(case)) for case in cases if case.role == "baseline"), None)
    if native is None:
        return {}
    found = {key: estimate_median(paired_ratios(native, of_case)) for key, of_case in times_us.items()}
    return {key: estimate for key, estimate in found.items() if estimate is not None}


def _unsound(real: ComparisonResult, pairs: list[tuple[CaseResult, CaseResult]], threads: tuple[int, int]) -> list[str]:
    reasons = []
    if real.comparison.oversubscribed:
        reasons.append(OVERSUBSCRIBED)
    if threads[0] != threads[1]:
        reasons.append(f"each real rank computed with {threads[0]} thread(s), the emulated one with {threads[1]}")
    other = [one.case.label for one, two in pairs if one.case.is_ok and two.case.is_ok and not _same_routing(one, two)]
    if other:
        reasons.append(f"routing is not the same in both runs: {', '.join(other)}")
    return reasons


def _same_routing(real: CaseResult, emulated: CaseResult) -> bool:
    """Whether every rank sent every expert as many pairs of every batch, in every layer."""
    keys = [key for key in ("batch", "layer", "rank") if key in real.case.routing]
    loads = [result.case.routing.set_index(keys)["load_E"].sort_index().map(tuple) for result in (real, emulated)]
    return loads[0].equals(loads[1])


def _key(case: Case) -> tuple[str, str, str]:
    """What names a case in both runs; ids differ, for they say how it was measured."""
    return case.role, case.policy, json.dumps(case.policy_params, sort_keys=True)


def _threads(run: Run) -> int:
    """Compute threads of a rank of the latest job."""
    path = run.directory / "run.json"
    try:
        return int(json.loads(path.read_text())["environment"]["threads_per_rank"])
    except (KeyError, TypeError, ValueError):
        raise ResultsError(f"{path}: environment.threads_per_rank: missing") from None


def _read_alone(path: Path) -> pd.DataFrame:
    if not path.is_file():
        return pd.DataFrame(columns=["case_id", "rank", "batch", "num_rows", "time_us"])
    return pd.read_parquet(path)
