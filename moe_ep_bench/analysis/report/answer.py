"""The answer in two sentences: which policy, how much faster, how sure, at what cost, and on what.

``advice`` chooses: the fastest policy within bounds on what it drops that is faster for sure. What it cannot say is
said here as plainly as what it can: that nothing is faster than the noise, or that the data do not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_ep_bench.analysis import advice
from moe_ep_bench.analysis.advice import Bounds, how_words
from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.report.parts import Answer
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.sweep import key_words, sweeps_along, swept_keys
from moe_ep_bench.analysis.words import device_words, estimate_words, mode_words, percent
from moe_ep_bench.timing.statistics import MIN_BATCHES

# Those of ``advise`` where it is not told others.
BOUNDS = Bounds(max_dropped=0.10, min_retained=0.95)
# What is said of a case: its speed and what it costs.
Told = Callable[[CaseResult], str]
_NO_INTERVAL = f"fewer than {MIN_BATCHES} batches give no interval"


def speed_and_cost(result: CaseResult, speed: str = "as fast as native") -> str:
    """``X runs 1.378 [1.277, 1.437] times as fast as native, drops 38.5 % ... and keeps 74.4 % ...``."""
    speedup = f"{result.case.label} runs {estimate_words(result.speedup)} times {speed}"
    fidelity = result.fidelity
    assert fidelity is not None
    if result.case.role == "replication":
        return f"{speedup}, drops nothing and takes more memory"
    return (
        f"{speedup}, drops {percent(fidelity.dropped_share)} % of top-k pairs and keeps "
        f"{percent(fidelity.retained_mass)} % of their score mass"
    )


def answer_of(run: Run, comparison: ComparisonResult, told: Told = speed_and_cost) -> Answer:
    """The answer of one comparison."""
    lead, why = _first_sentence(run, comparison, told)
    return Answer(lead, why, f"{_basis(run, [comparison.comparison])}.")


def answer_of_all(run: Run, comparisons: Sequence[ComparisonResult], told: Told = speed_and_cost) -> Answer:
    """One answer for all comparisons of a run: in how many a policy pays, and where it pays most."""
    if len(comparisons) == 1:
        return answer_of(run, comparisons[0], told)
    answers = [(one, advice.answer(one, BOUNDS)) for one in comparisons]
    basis = f"{_basis(run, [one.comparison for one in comparisons])}{_swept_words(comparisons)}."
    paying = [(one, found.best) for one, found in answers if found.best is not None]
    if paying:
        one, best = max(paying, key=lambda pair: _speed(pair[1]))
        # Replicating busy experts is no policy.
        who = "A policy" if all(found.case.role == "policy" for _, found in paying) else "A policy or replication"
        lead = f"{who} pays in {len(paying)} of {len(comparisons)} comparisons{how_words(run, one)}"
        why = f"most in {one.comparison.title}, where {told(best)}; {_within()}"
        return Answer(lead, f"{why}.", basis)
    refusals = [found.refusal for _, found in answers if found.refusal]
    if len(refusals) == len(answers):
        return Answer("Cannot say", f"{refusals[0]}.", basis)
    measured = [(one, result) for one, found in answers for result in (*found.others, *found.beyond)]
    if not measured:
        return Answer("Keep native", "no policy was measured.", basis)
    one, fastest = max(measured, key=lambda pair: _speed(pair[1]))
    if all(_lacks_intervals(found) for _, found in answers):
        lead = f"Cannot say in any of {len(comparisons)} comparisons{how_words(run, one)}"
        why = f"{_NO_INTERVAL}; the fastest of all stands in {one.comparison.title}, where {told(fastest)}."
        return Answer(lead, why, basis)
    lead = f"Keep native in all {len(comparisons)} comparisons{how_words(run, one)}"
    why = f"{_within()}, none is faster for sure; the fastest of all stands in {one.comparison.title}, where "
    return Answer(lead, f"{why}{told(fastest)}.", basis)


def short_words(comparison: ComparisonResult) -> tuple[str, CaseResult | None]:
    """The answer for a row of the overview, and the case whose numbers go with it: the chosen, or the fastest."""
    found = advice.answer(comparison, BOUNDS)
    fastest = max((*found.others, *found.beyond), key=_speed, default=None)
    words = "cannot say" if found.best is None and _lacks_intervals(found) else found.words
    return words, found.best or fastest


def _first_sentence(run: Run, comparison: ComparisonResult, told: Told) -> tuple[str, str]:
    found, how = advice.answer(comparison, BOUNDS), how_words(run, comparison)
    if found.refusal:
        return "Cannot say", f"{found.refusal}."
    floor = comparison.floor
    noise = "" if floor is None else f" ({floor.low:.3f} to {floor.high:.3f})"
    if found.best is not None:
        # A model repeats itself exactly: it has no noise that an effect could be held against.
        has_noise = floor is not None and comparison.comparison.device is None
        beyond = f", beyond the noise{noise}" if has_noise else ""
        return f"Use {found.best.case.label}{how}", f"{told(found.best)}{beyond}."
    faster = next((result for result in found.beyond if result.verdict == "faster"), None)
    if faster is not None:
        return f"Keep native{how}", f"{_within()}, no policy is faster for sure; beyond that {told(faster)}."
    measured = sorted((*found.others, *found.beyond), key=_speed, reverse=True)
    if not measured:
        return f"Keep native{how}", "no policy was measured."
    fastest = f"the fastest, {told(measured[0])}"
    if _lacks_intervals(found):
        return f"Cannot say{how}", f"{_NO_INTERVAL}; {fastest}."
    if floor is None:
        return f"Cannot say{how}", f"native was not run twice, so there is no noise floor; {fastest}."
    return f"Keep native{how}", f"no policy is faster than the noise{noise}; {fastest}."


def _lacks_intervals(found: advice.Answer) -> bool:
    """Whether policies were measured, and none has an interval that could be held against the noise."""
    measured = (*found.others, *found.beyond)
    return bool(measured) and not any(result.speedup and result.speedup.is_interval for result in measured)


def _within() -> str:
    return (
        f"with at most {100 * BOUNDS.max_dropped:g} % of top-k pairs dropped and {100 * BOUNDS.min_retained:g} % of "
        "their score mass kept"
    )


def _basis(run: Run, all_facts: Sequence[Comparison]) -> str:
    """How and on what, as far as it fits a sentence; the whole of it stands in the environment."""
    facts = all_facts[0]
    mode = mode_words(run, facts)
    models = ", ".join(dict.fromkeys(one.model for one in all_facts))
    what = facts.title if len(all_facts) == 1 else f"{len(all_facts)} comparisons of {models}"
    # What a model of a device or of links is made of follows its name after a colon.
    on = device_words(run, facts).partition(": ")[0]
    links = "" if facts.links is None else f", links {facts.links.partition(': ')[0]}"
    tail = facts.workload.tail_model
    tail_words = f" with a modelled tail ({tail})" if facts.workload.kind == "recorded" and tail else ""
    kinds = " and ".join(dict.fromkeys(one.workload.kind for one in all_facts))
    formats = ", ".join(dict.fromkeys(one.dtype for one in all_facts))
    layer = "one MoE layer, " if facts.whole is None else ""
    return f"{mode[0].upper()}{mode[1:]}: {layer}{what}, {formats}, on {on}{links}, {kinds} workload{tail_words}"


def _swept_words(comparisons: Sequence[ComparisonResult]) -> str:
    """Over which keys they differ, each with its first and last value."""
    said = []
    for key in swept_keys(comparisons):
        labels = next((sweep.labels for sweep in sweeps_along(key, comparisons)), [])
        said.append(f"{key_words(key)} {labels[0]} to {labels[-1]}" if labels else key_words(key))
    return f"; over {', '.join(said)}" if said else ""


def _speed(result: CaseResult) -> float:
    return result.speedup.median if result.speedup is not None else 0.0
