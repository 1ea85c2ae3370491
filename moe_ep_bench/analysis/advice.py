"""``advise``: what a results directory says one should do, in words.

Of the policies that stay within bounds on what they drop, and of replication where it was measured, the fastest that
is faster for sure; or native, and that plainly. What is taken for sure is what the table calls ``faster``: the whole
interval of the speedup lies beyond the noise floor. How the numbers came about stands beside them, because a model
cannot be surer than what it leaves out.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.notes import extra_memory_words
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.sweep import (
    Sweep,
    Value,
    crossings,
    in_order,
    key_words,
    point_words,
    speedups_along,
    sweeps_along,
    swept_keys,
    value_words,
)
from moe_ep_bench.analysis.words import (
    MODEL_CAVEAT,
    OVERSUBSCRIBED,
    count_words,
    estimate_words,
    hardware_words,
    mode_words,
    percent,
    scale_words,
)
from moe_ep_bench.timing.statistics import MIN_BATCHES

_WIDTH = 110
# Shares are sums of float32.
_ROUNDING = 1e-6
_KEEP_NATIVE = "keep native"


@dataclass(frozen=True)
class Bounds:
    """What a policy may cost.

    Attributes:
        max_dropped: share of top-k pairs that may go uncomputed.
        min_retained: share of the top-k's score mass that must be kept.

    Raises:
        ValueError: one of them is no share; names the option.
    """

    max_dropped: float
    min_retained: float

    def __post_init__(self) -> None:
        for option, share in (("--max-dropped", self.max_dropped), ("--min-retained", self.min_retained)):
            if not 0 <= share <= 1:
                raise ValueError(f"{option}: expected a share from 0 to 1, got {share:g}")

    def admit(self, result: CaseResult) -> bool:
        assert result.fidelity is not None
        return (
            result.fidelity.dropped_share <= self.max_dropped + _ROUNDING
            and result.fidelity.retained_mass >= self.min_retained - _ROUNDING
        )

    @property
    def words(self) -> str:
        return (
            f"at most {100 * self.max_dropped:g} % of top-k pairs dropped and at least {100 * self.min_retained:g} % of"
            " the top-k's score mass kept"
        )


@dataclass(frozen=True, eq=False)
class Answer:
    """What to do in one comparison.

    Attributes:
        best: what to use; None = native.
        others: what else is within the bounds, the fastest first.
        beyond: what is not, the fastest first.
        refusal: why nothing can be said at all; empty where something can.
    """

    comparison: ComparisonResult
    best: CaseResult | None
    others: tuple[CaseResult, ...]
    beyond: tuple[CaseResult, ...]
    refusal: str

    @property
    def words(self) -> str:
        if self.refusal:
            return "cannot say"
        return _KEEP_NATIVE if self.best is None else self.best.case.label


def answer(comparison: ComparisonResult, bounds: Bounds) -> Answer:
    """Choose among measured policies and replication; ``topk``, which is the model's own routing, is no choice."""
    candidates = [
        result
        for result in (*comparison.policies, *comparison.replications)
        if result.case.policy != "topk" and result.speedup is not None and result.fidelity is not None
    ]
    candidates.sort(key=_speed, reverse=True)
    within = [result for result in candidates if bounds.admit(result)]
    beyond = tuple(result for result in candidates if result not in within)
    refusal = _refusal(comparison)
    best = next((result for result in within if result.verdict == "faster" and not refusal), None)
    return Answer(comparison, best, tuple(result for result in within if result is not best), beyond, refusal)


@dataclass(frozen=True)
class Subject:
    """What speedups are of, and what has to stand beside them.

    Attributes:
        said: once, before all answers.
        speed: a case's speedup in words.
        beside: lines that follow an answer's first.
    """

    said: str
    speed: Callable[[CaseResult], str]
    beside: Callable[[Answer], list[str]]


LAYER = Subject(
    said="Speedups are of one MoE layer: a whole model gains less, as scope: model shows (docs/model.md).",
    speed=lambda result: f"speedup {estimate_words(result.speedup)}",
    beside=lambda _: [],
)


def advice(run: Run, bounds: Bounds, subject: Subject = LAYER) -> str:
    """The answers of all comparisons of a run, a few lines each, and how they change along its sweep."""
    comparisons = in_order(analyse(run))
    answers = [answer(comparison, bounds) for comparison in comparisons]
    sweeps = [sweep for key in swept_keys(comparisons) for sweep in sweeps_along(key, comparisons)]
    blocks = [
        _wrapped(
            [
                f"Asked: the most speed with {bounds.words}.",
                "Score mass is no accuracy: evaluate your model under a policy before you serve with it.",
                subject.said,
            ]
        )
    ]
    bases = [_basis_words(run, comparison) for comparison in comparisons]
    if len(set(bases)) == 1:
        blocks.append(_wrapped(bases[:1]))
    for one, basis in zip(answers, bases, strict=True):
        lines = [basis] if len(set(bases)) > 1 else []
        own_sweeps = [sweep for sweep in sweeps if one.comparison in sweep.comparisons]
        lines += _lines(run, one, own_sweeps, bounds, subject)
        blocks.append("\n".join([_title(one.comparison), *_indented(lines)]))
    by_comparison = {id(one.comparison): one for one in answers}
    for sweep in sweeps:
        blocks.append(_along(sweep, [by_comparison[id(comparison)] for comparison in sweep.comparisons]))
    if any(not case.is_ok for case in run.cases):
        blocks.append(count_words(run))
    return "\n\n".join(blocks)


# ---- one comparison ----------------------------------------------------------------------------------------------


def _title(comparison: ComparisonResult) -> str:
    where = point_words(comparison.comparison)
    return f"{comparison.comparison.title}{f' ({where})' if where else ''}"


def _basis_words(run: Run, comparison: ComparisonResult) -> str:
    facts = comparison.comparison
    return (
        f"How: {mode_words(run, facts)}, {hardware_words(run, facts)}, {scale_words(facts.scale)}, {facts.dtype}."
        + (f" {MODEL_CAVEAT}" if facts.device is not None else "")
    )


def _refusal(comparison: ComparisonResult) -> str:
    if comparison.of_role("baseline") is None:
        return "the baseline was not measured, so there are no speedups"
    return OVERSUBSCRIBED if comparison.comparison.oversubscribed else ""


def _lines(run: Run, one: Answer, sweeps: Sequence[Sweep], bounds: Bounds, subject: Subject) -> list[str]:
    if one.refusal:
        return [f"Cannot say: {one.refusal}."]
    best, label = one.best, how_words(run, one.comparison)
    if best is not None:
        lines = [f"Use {best.case.label}{label}: {_speed_words(one.comparison, best, subject)}."]
        lines += [*subject.beside(one), f"Costs: {_cost_words(best)}."]
        lines += [_tail_words(one.comparison, best)] if _rests_on_tail(one.comparison, best) else []
    else:
        lines = [f"{_KEEP_NATIVE.capitalize()}{label}: {_why_native(one, bounds, subject)}.", *subject.beside(one)]
    lines.append(_ceiling_words(one.comparison))
    # Where native is kept, its reason has named the fastest.
    named = [best] if best is not None else list(one.others[:1])
    runners = [result for result in one.others if result not in named and _speed(result) > 1]
    if runners:
        lines.append(f"Runner-up: {_named(one.comparison, runners[0], subject)}.")
    replications = [result for result in one.others if result.case.role == "replication"]
    if replications and not any(result in replications for result in (*named, *runners[:1])):
        lines.append(f"Without dropping: {_named(one.comparison, replications[0], subject)}.")
    if best is None and one.comparison.comparison.num_batches < MIN_BATCHES:
        changes = [f"{MIN_BATCHES} batches or more (workload.num_batches): they give intervals"]
    else:
        changes = _changes(one, sweeps)
    return lines + ([f"What would change this: {'; '.join(changes)}."] if changes else [])


def how_words(run: Run, comparison: ComparisonResult) -> str:
    """No advice from a model goes without saying so."""
    if comparison.comparison.device is not None:
        return " (modelled)"
    return " (emulated)" if run.mode == "emulated" else ""


def _speed(result: CaseResult) -> float:
    assert result.speedup is not None
    return result.speedup.median


def _speed_words(comparison: ComparisonResult, result: CaseResult, subject: Subject) -> str:
    return f"{subject.speed(result)}, {_sure_words(comparison, result)}"


def _sure_words(comparison: ComparisonResult, result: CaseResult) -> str:
    """What the interval and the noise floor allow to be said."""
    floor, speedup = comparison.floor, result.speedup
    assert speedup is not None
    as_modelled = ", as far as the model goes" if comparison.comparison.device is not None else ""
    if result.verdict in ("faster", "slower"):
        return f"{result.verdict} for sure{as_modelled}"
    if floor is None:
        return "cannot say: native was not run twice, so there is no noise floor"
    within = f"the noise floor ({floor.low:.3f} to {floor.high:.3f})"
    if result.verdict == "no difference":
        return f"inside {within}"
    if not speedup.is_interval:
        return f"cannot say: fewer than {MIN_BATCHES} batches give no interval"
    return f"cannot say: its interval reaches into {within}"


def _cost_words(result: CaseResult) -> str:
    fidelity = result.fidelity
    assert fidelity is not None
    if result.case.role == "replication":
        return f"{extra_memory_words(result)}; drops nothing"
    error = "output error not measured"
    if not math.isnan(fidelity.output_error):
        error = f"output error {fidelity.output_error:.2g} (random weights)"
    dropped, kept = percent(fidelity.dropped_share), percent(fidelity.retained_mass)
    return f"drops {dropped} % of top-k pairs, keeps {kept} % of the top-k's score mass; {error}"


def _named(comparison: ComparisonResult, result: CaseResult, subject: Subject) -> str:
    return f"{result.case.label}, {_speed_words(comparison, result, subject)}; {_cost_words(result)}"


def _why_native(one: Answer, bounds: Bounds, subject: Subject) -> str:
    if one.others:
        fastest = one.others[0]
        return (
            f"nothing within the bounds is faster for sure; the fastest is {_named(one.comparison, fastest, subject)}"
        )
    if not one.beyond:
        return "no policy was measured"
    nearest = min(one.beyond, key=lambda result: _excess(result, bounds))
    return f"nothing stays within the bounds; the nearest is {_named(one.comparison, nearest, subject)}"


def _excess(result: CaseResult, bounds: Bounds) -> float:
    """How far a case lies beyond the bounds; a mass that is not known lies farthest."""
    assert result.fidelity is not None
    missing = bounds.min_retained - result.fidelity.retained_mass
    over = result.fidelity.dropped_share - bounds.max_dropped
    return math.inf if math.isnan(missing) else max(missing, 0.0) + max(over, 0.0)


def _ceiling_words(comparison: ComparisonResult) -> str:
    ceiling = comparison.of_role("ceiling")
    if ceiling is None or ceiling.speedup is None:
        return "Perfect balance, the ceiling of balancing, was not measured."
    return f"Perfect balance, the ceiling of balancing (dropping also saves work): {estimate_words(ceiling.speedup)}."


def _rests_on_tail(comparison: ComparisonResult, result: CaseResult) -> bool:
    return result.case.looks_past_top_k and comparison.comparison.workload.tail_model is not None


def _tail_words(comparison: ComparisonResult, result: CaseResult) -> str:
    tail = comparison.comparison.workload.tail_model
    return f"{result.case.label} looks at scores past the recorded top-k, which are modelled ({tail} tail)."


# ---- what would change it ----------------------------------------------------------------------------------------


def _changes(one: Answer, sweeps: Sequence[Sweep]) -> list[str]:
    changes = []
    subject = one.best or next(iter((*one.others, *one.beyond)), None)
    if subject is not None:
        changes += [_break_even_words(subject, sweep) for sweep in sweeps if sweep.is_numeric]
    faster = next((result for result in one.beyond if result.verdict == "faster"), None)
    if faster is not None and (one.best is None or _speed(faster) > _speed(one.best)):
        fidelity = faster.fidelity
        assert fidelity is not None
        changes.append(
            f"looser bounds: {faster.case.label} gives {estimate_words(faster.speedup)}, drops "
            f"{percent(fidelity.dropped_share)} % and keeps {percent(fidelity.retained_mass)} %"
        )
    return changes


def _break_even_words(subject: CaseResult, sweep: Sweep) -> str:
    """Where along a sweep of numbers a case stops or begins to be faster than native."""
    found = speedups_along(sweep, lambda comparison: _same_case(comparison, subject))
    values = [float(value) for value, _ in found]
    speedups = [speedup for _, speedup in found]
    name, label = key_words(sweep.key), subject.case.label
    places = [f"about {about:.3g} (between {low:g} and {high:g})" for about, low, high in crossings(values, speedups)]
    if places:
        return f"{name}: {label} breaks even at {' and '.join(places)}"
    where = f"from {value_words(values[0])} to {value_words(values[-1])}"
    if speedups[0] > 1:
        return f"no {name} {where}: {label} stays faster than native"
    return f"no {name} {where}: {label} stays no faster than native"


def _same_case(comparison: ComparisonResult, subject: CaseResult) -> float | None:
    wanted = subject.case.role, subject.family, subject.capacity_factor
    for result in (*comparison.policies, *comparison.replications):
        if (result.case.role, result.family, result.capacity_factor) == wanted and result.speedup is not None:
            return result.speedup.median
    return None


def _along(sweep: Sweep, answers: Sequence[Answer]) -> str:
    """How the answer changes along a sweep, equal neighbours together."""
    others = f" (with {sweep.others})" if sweep.others else ""
    rows = []
    for words, group in itertools.groupby(zip(sweep.values, answers, strict=True), key=lambda pair: pair[1].words):
        pairs = list(group)
        speedups = [_speed(one.best) for _, one in pairs if one.best is not None]
        rows.append((_span_words(sweep, [value for value, _ in pairs]), f"{words}{_range_words(speedups)}"))
    width = max(len(span) for span, _ in rows)
    return "\n".join(
        [f"Along {key_words(sweep.key)}{others}:", *(f"  {span.ljust(width)}  {words}" for span, words in rows)]
    )


def _span_words(sweep: Sweep, values: Sequence[Value]) -> str:
    words = list(map(value_words, values))
    if sweep.is_numeric and len(words) > 1:
        return f"{words[0]} to {words[-1]}"
    return ", ".join(words)


def _range_words(speedups: Sequence[float]) -> str:
    if not speedups:
        return ""
    low, high = f"{min(speedups):.2f}", f"{max(speedups):.2f}"
    return f" ({low})" if low == high else f" ({low} to {high})"


def _wrapped(lines: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False) for line in lines)


def _indented(lines: Sequence[str]) -> list[str]:
    return [
        textwrap.fill(
            line,
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    ]
