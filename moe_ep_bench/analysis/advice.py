"""The answer of ``advise``: facts, as ``advice.json`` holds them, and the sentences that say them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from moe_ep_bench.analysis.cases import point_words
from moe_ep_bench.analysis.columns import SAME_KERNELS, cost_words, milliseconds
from moe_ep_bench.analysis.notes import FEW_BATCHES, OVERSUBSCRIBED
from moe_ep_bench.analysis.store import read_document
from moe_ep_bench.facts import Assumption, JsonRecord, Rest
from moe_ep_bench.facts.words import OVERLAP_WORDS, fit_words, rest_words, said_once
from moe_ep_bench.files import write_text
from moe_ep_bench.models.memory import Fit

ADVICE = "advice.json"
# Shares are sums of float32.
DIGITS = 6
ROUNDING = 10**-DIGITS


class _Fact(JsonRecord):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Case(_Fact):
    """A case of an answer; null = not measured, or not said of such a case.

    Attributes:
        median_ms: of a layer, or of a whole model.
        pass_ms: of the whole model, with the rest of it modelled.
        speedup: over native; ``over_topk`` where that is another, ``least`` and ``most`` over ``spread_over``.
    """

    case_id: str
    label: str
    origin: str
    median_ms: float | None
    pass_ms: float | None = None
    tokens_per_s_per_rank: float | None = None
    verdict: str | None = None
    speedup: float | None = None
    over_topk: float | None = None
    least: float | None = None
    most: float | None = None
    spread_over: Literal["draw", "layer"] | None = None
    dropped_share: float | None = None
    rerouted_share: float | None = None
    missing_share: float | None = None
    retained_mass: float | None = None
    extra_gib_per_rank: float | None = None


class Variant(_Fact):
    """The same question under another overlap, which has the same pick."""

    overlap: str
    native: Case
    pick: Case | None


class Answer(_Fact):
    """What to do with one comparison's traffic.

    Attributes:
        point: swept keys with their values, where the question has several.
        pick: None = native stays, for the ``reason``.
        fastest: the fastest candidate within the bounds, where none is picked.
        rest: of a pass, as it was modelled.
    """

    comparison_id: str
    title: str
    point: dict[str, Any]
    scope: Literal["layer", "model"]
    native: Case
    pick: Case | None
    reason: Literal["no_gain", "no_baseline", "does_not_fit", "oversubscribed", "few_batches"] | None = None
    fastest: Case | None = None
    fit: Fit | None = None
    rest: Rest | None = None
    variants: tuple[Variant, ...] = ()


class Advice(_Fact):
    """All answers to a question, for what they hold, and what may change them."""

    max_dropped: float
    min_retained: float
    answers: list[Answer] = Field(min_length=1)
    is_one_question: bool
    titles: list[str]
    ran_on: list[str]
    links: list[str]
    modelled: str
    assumptions: list[Assumption]
    notes: list[str]


def write_advice(directory: Path, advice: Advice) -> None:
    """Write ``advice.json`` beside the results that it is about."""
    write_text(directory / ADVICE, f"{advice.model_dump_json(indent=2)}\n")


def read_advice(directory: Path) -> Advice | None:
    """The answer that ``advise`` left beside its results; None where it was not asked.

    Raises:
        ResultsError: the file is damaged; one line.
    """
    path = directory / ADVICE
    return read_document(path, Advice) if path.is_file() else None


# ---- sentences -------------------------------------------------------------------------------------------------------


def advice_lines(advice: Advice) -> list[str]:
    """The picks, what they cost, and for what they hold: a block of lines for each answer."""
    blocks = []
    for answer in advice.answers:
        lines = "\n".join(_answer_lines(answer))
        blocks.append(lines if advice.is_one_question else f"At {answer_name(answer)}: {lines}")
    blocks[-1] += f"\n{_for(advice)}{advice.modelled and ' '}{advice.modelled}"
    return blocks


def answer_name(answer: Answer) -> str:
    """One of several answers: its place in the sweep, or its title."""
    return point_words(answer.point) or answer.title


def _answer_lines(answer: Answer) -> Iterator[str]:
    native, pick = answer.native, answer.pick
    if pick is None:
        yield f"{_reason(answer)}."
        if (fastest := answer.fastest) is not None:
            said = f"{fastest.label}: {fastest.speedup:.3f} times native ({fastest.verdict})"
            yield f"The fastest within the bounds is {said}."
        yield from _native_lines(native)
    else:
        yield from _pick_lines(answer, pick)
    yield from map(_variant_line, answer.variants)


def _reason(answer: Answer) -> str:
    """Why native stays."""
    if answer.reason == "does_not_fit":
        assert answer.fit is not None
        return f"None: the model {fit_words(answer.fit)}"
    return {
        "no_gain": "Keep native: no candidate within the bounds is significantly faster",
        "no_baseline": "Inconclusive: the baseline was not measured, so there are no speedups",
        "oversubscribed": f"Inconclusive: {OVERSUBSCRIBED}",
        "few_batches": f"Inconclusive: {FEW_BATCHES}",
    }[answer.reason or "no_gain"]


def _native_lines(native: Case) -> Iterator[str]:
    """What native takes, and a pass of the whole model."""
    if native.median_ms is None:
        return
    words = f"Native takes {milliseconds(native.median_ms)} ms ({native.origin})"
    if native.pass_ms is not None:
        rate = f"{native.tokens_per_s_per_rank:,.0f} tokens/s a GPU"
        words += f". Whole model, with the rest modelled: {milliseconds(native.pass_ms)} ms, {rate}"
    yield f"{words}."


def _pick_lines(answer: Answer, pick: Case) -> Iterator[str]:
    """What a pick gains and costs, and what a pass comes to."""
    native, how = answer.native, pick.origin
    if pick.least is not None:
        how += f"; {pick.least:.2f} to {pick.most:.2f} by {pick.spread_over}"
    what = "a pass" if answer.scope == "model" else "a layer"
    over = "" if pick.over_topk is None else f" ({pick.over_topk:.3f} times topk, {SAME_KERNELS})"
    gain = f"{what} is {pick.speedup:.3f} times as fast as native{over}, {_taken(pick.median_ms, native.median_ms)}"
    costs = ["nothing is dropped"]
    if costs_answers(pick.missing_share, pick.retained_mass):
        assert pick.retained_mass is not None
        costs = [
            cost_words(pick.model_dump(), " of the pairs are"),
            f"{100 * pick.retained_mass:.1f} % of the mass is kept",
        ]
    if pick.extra_gib_per_rank:
        costs.append(f"{pick.extra_gib_per_rank:.3g} GiB more memory on each rank")
    yield f"Use {pick.label}: {gain} ({how})."
    yield f"It costs: {', '.join(costs)}."
    if native.pass_ms is not None and pick.pass_ms is not None:
        end_to_end = f"{native.pass_ms / pick.pass_ms:.3f} times as fast, {_taken(pick.pass_ms, native.pass_ms)}"
        rates = f"{pick.tokens_per_s_per_rank:,.0f} in place of {native.tokens_per_s_per_rank:,.0f} tokens/s a GPU"
        of = rest_words(answer.rest) if answer.rest else ""
        rest = f"the rest modelled{of and f' ({of})'}"
        yield f"Whole model, with all such layers and {rest}: {end_to_end}, {rates}."


def _variant_line(variant: Variant) -> str:
    """That another overlap has the same pick."""
    words, native_ms = f"With {OVERLAP_WORDS[variant.overlap]}", variant.native.median_ms
    if native_ms is None:
        return f"{words} nothing was modelled."
    if variant.pick is None:
        return f"{words} the answer is the same: native takes {milliseconds(native_ms)} ms."
    speedup = f"{variant.pick.speedup:.3f} times as fast as native"
    return f"{words} the pick is the same: {speedup}, {_taken(variant.pick.median_ms, native_ms)}."


def _taken(ours_ms: float | None, native_ms: float | None) -> str:
    assert ours_ms is not None
    assert native_ms is not None
    return f"{milliseconds(ours_ms)} in place of {milliseconds(native_ms)} ms"


def _for(advice: Advice) -> str:
    """For what the answers hold: model, sizes, traffic, device and links, and the bounds."""
    lost = 100 * (1 - advice.min_retained)
    limits = [f"{100 * advice.max_dropped:g} % of the pairs dropped"] if advice.max_dropped < 1 else []
    limits += [f"{lost:g} % of the score mass lost"] if lost < 100 else []
    within = f"at most {' and '.join(limits)}" if limits else "no bounds"
    return f"For {'; '.join(filter(None, map(said_once, (advice.titles, advice.ran_on, advice.links))))}; {within}."


def costs_answers(missing_share: Any, retained_mass: Any) -> Any:
    """Whether a case, or each of several, leaves out pairs that the model would compute, or score mass."""
    return (missing_share > 0) | (retained_mass <= 1 - ROUNDING)
