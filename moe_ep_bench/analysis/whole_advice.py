"""``advise`` from end to end: what a policy gains of a whole model's pass, and what the rest of the model leaves of it.

The choice is ``advice``'s, by the pass. Beside it stand the MoE layers' own speedup s, what Amdahl's law
makes of it with their share f of native's pass, 1 / (1 - f + f / s), and the most that any policy could gain,
1 / (1 - f). Where the layers are faster beyond their own noise and the pass keeps less than half of the gain, or
none that is sure, this is said in words: a layer's speedup would have misled.
"""

from __future__ import annotations

from pathlib import Path

from moe_ep_bench.analysis.advice import LAYER, Answer, Bounds, Subject, advice
from moe_ep_bench.analysis.load import Run, is_whole, load_run
from moe_ep_bench.analysis.speedups import CaseResult
from moe_ep_bench.analysis.whole import WholeComparison, WholeResult, analyse_whole
from moe_ep_bench.analysis.words import estimate_words, percent
from moe_ep_bench.timing.statistics import judge, noise_floor

# A pass that keeps less than this of its layers' gain is worth a sentence.
_KEPT = 0.5


def advice_of(directory: Path, bounds: Bounds) -> str:
    """Advice from a results directory, of whole models or of layers.

    Raises:
        ResultsError: it cannot be read or trusted.
    """
    if is_whole(directory):
        return whole_advice(load_run(directory, whole=True), bounds)
    return advice(load_run(directory), bounds, LAYER)


def whole_advice(run: Run, bounds: Bounds) -> str:
    """The answers of all comparisons of whole models; see the module."""
    found = analyse_whole(run)
    in_comparison = {one.comparison.results[0].case.comparison_id: one for one in found}

    def beside(answer: Answer) -> list[str]:
        one = in_comparison[answer.comparison.results[0].case.comparison_id]
        return _beside(one, answer)

    said = "Speedups are of a whole model's pass, from end to end; what its MoE layers alone gain stands beside them."
    speed = "{} from end to end".format
    return advice(run, bounds, Subject(said, lambda result: speed(estimate_words(result.speedup)), beside))


def _beside(one: WholeComparison, answer: Answer) -> list[str]:
    within = [result for result in (answer.best, *answer.others) if result is not None]
    results = {each.result.case.case_id: each for each in one.results}
    ranked = sorted((results[result.case.case_id] for result in within), key=_speed, reverse=True)
    lines = [_amdahl_words(one, results[answer.best.case.case_id])] if answer.best is not None else []
    lost = _lost(one, ranked, answer.best)
    lines += [_lost_words(one, lost)] if lost is not None else []
    lines += [_cut_words(one, results[answer.best.case.case_id])] if one.is_cut and answer.best is not None else []
    if len(ranked) > 1:
        lines.append(f"Within the bounds, by the pass (MoE layers alone): {'; '.join(map(_ranked_words, ranked))}.")
    return lines


def _speed(each: WholeResult) -> float:
    assert each.result.speedup is not None
    return each.result.speedup.median


def _amdahl_words(one: WholeComparison, each: WholeResult) -> str:
    """The layers' speedup, what follows from it for the pass, and what bounds every policy."""
    if each.moe_speedup is None or each.expected is None or one.most is None:
        return "Its MoE layers alone: not measured (no breakdown iterations)."
    return (
        f"Its MoE layers alone: {estimate_words(each.moe_speedup)}; by Amdahl's law that makes a pass "
        f"{each.expected:.3f}; no policy exceeds {one.most:.3f}."
    )


def _lost(one: WholeComparison, ranked: list[WholeResult], best: CaseResult | None) -> WholeResult | None:
    """The chosen case, or where native is kept that whose layers gain most, if the pass keeps too little of it."""
    gaining = [each for each in ranked if _layers_are_faster(one, each)]
    if best is not None:
        gaining = [each for each in gaining if each.result.case.case_id == best.case.case_id]
    wasted = [each for each in gaining if each.result.verdict != "faster" or _kept(each) < _KEPT]
    return max(wasted, key=_layers_speed, default=None)


def _layers_speed(each: WholeResult) -> float:
    assert each.moe_speedup is not None
    return each.moe_speedup.median


def _layers_are_faster(one: WholeComparison, each: WholeResult) -> bool:
    """Whether the MoE layers' speedup lies beyond what native's layers differ by from themselves."""
    again = next((other.moe_speedup for other in one.results if other.result.case.role == "noise"), None)
    return judge(each.moe_speedup, None if again is None else noise_floor(again)) == "faster"


def _kept(each: WholeResult) -> float:
    """Which share of the layers' gain the pass has."""
    return (_speed(each) - 1) / (_layers_speed(each) - 1)


def _lost_words(one: WholeComparison, each: WholeResult) -> str:
    native = next(other for other in one.results if other.result.case.role == "baseline")
    assert native.moe_share is not None
    of_pass, label = f"MoE layers are {percent(native.moe_share)} % of a pass", each.result.case.label
    gain = f"{_layers_speed(each):.2f}x of the MoE layers are {_speed(each):.2f}x end to end"
    if each.result.verdict == "faster":
        return f"The rest of the model leaves little of the layers' gain: {gain}: {of_pass}."
    most = "" if one.most is None else f", and no policy exceeds {one.most:.3f}"
    verdict = each.result.verdict
    return f"The layers' gain dies in the rest of the model: under {label} {gain} ({verdict}): {of_pass}{most}."


def _cut_words(one: WholeComparison, each: WholeResult) -> str:
    whole = one.comparison.comparison.whole
    assert whole is not None
    far = "" if each.all_layers_speedup is None else f" all {whole.of_layers} would gain {each.all_layers_speedup:.3f}"
    return f"Only {whole.num_layers} of {whole.of_layers} layers were built; extrapolated, no measurement:{far}."


def _ranked_words(each: WholeResult) -> str:
    layers = "not measured" if each.moe_speedup is None else f"{each.moe_speedup.median:.3f}"
    return f"{each.result.case.label} {_speed(each):.3f} ({layers})"
