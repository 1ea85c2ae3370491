"""The answer of ``advise``: facts, as ``advice.json`` holds them, and the sentences that say them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

from moe_ep_bench.analysis.cases import own_points, point_parts
from moe_ep_bench.analysis.columns import SAME_KERNELS, cost_words, milliseconds
from moe_ep_bench.analysis.notes import FEW_BATCHES, MODEL_CAVEAT, OVERSUBSCRIBED, TORCH_CAVEAT, chance_words
from moe_ep_bench.errors import UserError
from moe_ep_bench.facts import (
    Assumption,
    Environment,
    JsonRecord,
    PeakLoads,
    TimedFacts,
    has_assumed_traffic,
)
from moe_ep_bench.facts.words import (
    OVERLAP_WORDS,
    Line,
    Parts,
    assumption_words,
    fit_words,
    links_parts,
    mixed_parts,
    modelled_line,
    peak_words,
    ran_on_parts,
    rest_words,
    said_once,
    skew_words,
    title_parts,
    title_words,
)
from moe_ep_bench.files import write_text
from moe_ep_bench.results import ResultsError, read_document

ADVICE = "advice.json"
# Shares are sums of float32.
DIGITS = 6
ROUNDING = 10**-DIGITS
# Why native stays, and what is said of a plan.
Reason = Literal["no_gain", "little_gain", "no_baseline", "does_not_fit", "oversubscribed", "few_batches"]
Decision = Literal["enable", "not_now", "insufficient"]


class _Fact(JsonRecord):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Pass(_Fact):
    """A pass of the whole model: as it was measured, or with the rest of the model modelled."""

    ms: PositiveFloat
    tokens_per_s_per_rank: PositiveFloat


class Case(_Fact):
    """A case of an answer.

    Attributes:
        median_ms: of a layer, or of a whole model; None = it was not measured.
        whole: of a layer, a pass of its model where the rest of it is stated.
        phases_ms: of a mean rank by group of phases (``schema.PHASES``), waiting included; empty where unknown.
        fullest_rank: pairs of the fullest rank over native's mean.
    """

    case_id: str
    label: str
    origin: str
    median_ms: PositiveFloat | None
    whole: Pass | None = None
    phases_ms: dict[str, NonNegativeFloat] = Field(default={})
    fullest_rank: NonNegativeFloat | None = None


class Spread(_Fact):
    """The least and the greatest speedup of one draw of the traffic, or of one layer."""

    least: float
    most: float
    over: Literal["draw", "layer"]


class Growth(_Fact):
    """The phase in which a candidate takes longer than native by most; ``is_summed``: ranks meet ahead of it."""

    phase: str
    us: PositiveFloat
    is_summed: bool = False


class Versus(_Fact):
    """A candidate set against another one: its speedup over that, with its interval, and the verdict."""

    median: PositiveFloat
    low: float
    high: float
    verdict: str


class Candidate(Case):
    """A candidate that was measured; its speedup is over native, and over topk too where that is another.

    Attributes:
        standing: its verdict, or why it may not be picked; None where that was not recorded.
        low, high: of the speedup's interval, or of its samples where there are too few batches.
        growth: why it is hardly faster than native, or slower; None of one that is faster.
        same_as: the label of one with another capacity factor that comes to as many rows.
        redundant_experts: slots for replicas on all ranks, of a plan in equal parts; None of what is no such plan.
        is_eplb: the plan is EPLB's, which servers have.
    """

    median_ms: PositiveFloat
    verdict: str
    standing: str | None = None
    speedup: float
    low: float | None = None
    high: float | None = None
    growth: Growth | None = None
    same_as: str | None = None
    over_topk: float | None = None
    versus: Versus | None = None
    spread: Spread | None = None
    dropped_share: float | None = None
    rerouted_share: float | None = None
    missing_share: float
    retained_mass: float
    extra_gib_per_rank: float | None = None
    redundant_experts: int | None = None
    is_eplb: bool = False


class HeldOut(_Fact):
    """The candidate that the first half of the batches would have chosen: its speedups there and on the others."""

    label: str
    earlier: PositiveFloat
    later: PositiveFloat


class Upkeep(_Fact):
    """Whether a plan of replicas pays a server, judged on batches that it was not made of.

    Attributes:
        num_batches: behind the speedup over native, whose range is ``low`` to ``high``.
        layers: in how many of how many the median speedup is above 1: slots in the others gain nothing.
        rearrange_ms: of putting the plan in place in one layer, planning included where ranks wait for it.
        every: batches that bear it, and the speedup has it; None = the plan stands for good, at no charge.
        pays_after: batches after which a plan has gained what it took; None = never.
    """

    label: str
    decision: Decision
    speedup: PositiveFloat
    low: float
    high: float
    num_batches: int
    layers: tuple[int, int] | None = None
    rearrange_ms: float
    rearranged_gib: float
    every: int | None
    pays_after: int | None

    @staticmethod
    def judged(*, native_ms: float, median_ms: float, verdict: str, every: int | None, **facts: Any) -> Upkeep:
        """The decision, and after how many batches a plan pays.

        Args:
            native_ms, median_ms: of a batch, by native and under the plan.
            verdict: of ``statistics.judge``.
        """
        gain_ms = native_ms - median_ms + (facts["rearrange_ms"] / every if every else 0.0)
        pays_after = max(1, math.ceil(facts["rearrange_ms"] / gain_ms)) if gain_ms > 0 else None
        decisions: dict[str, Decision] = {"faster": "enable", "slower": "not_now"}
        decision = decisions.get(verdict, "insufficient")
        if facts["high"] < 1 or pays_after is None:
            decision = "not_now"
        return Upkeep(decision=decision, every=every, pays_after=pays_after, **facts)


class RankTokens(_Fact):
    """The fewest and the most tokens that a rank holds in any batch, and the mean."""

    least: NonNegativeFloat
    most: PositiveFloat
    mean: PositiveFloat


class Note(_Fact):
    """What may change the decision, or how far it holds (``note_lines``).

    Attributes:
        number: of draws, or of verdicts.
        text: a warning of results, as they have it; or the candidates that are meant.
    """

    kind: Literal[
        "mixed_machines", "skew_is_assumed", "layers_differ", "plan_time_of_this_cpu", "scored_where_chosen",
        "few_draws", "chance", "one_layer", "mass_is_not_accuracy", "as_if_compiled", "of_traffic_alone",
        "warning",
    ]  # fmt: skip
    number: int | None = None
    text: str | None = None


class Unsolved(_Fact):
    """Why turns are not searched.

    Attributes:
        number: of a batch's scores, or of ranks, where they are too many.
        text: the error that refused a point.
    """

    kind: Literal["too_close", "scores", "ranks", "refused"]
    number: int | None = None
    text: str | None = None


class Side(_Fact):
    """Between which two values another is picked: the last that was tried with the pick, the first without it.

    Attributes:
        pick: what is picked there; None = native.
    """

    near: float
    far: float
    pick: str | None


class Turn(_Fact):
    """Where along one key of the config the pick turns (``turns.solve``).

    Attributes:
        least, most: the range that was searched.
        below, above: from the question's value down and up; None = no turn there.
        unsolved: why nothing was searched; None = it was.
    """

    key: str
    least: float | None = None
    most: float | None = None
    below: Side | None = None
    above: Side | None = None
    unsolved: Unsolved | None = None


class Variant(_Fact):
    """The same question under another overlap, which has the same pick."""

    overlap: Literal["none", "shared", "two_batch"]
    native: Case
    pick: Candidate | None


class Answer(_Fact):
    """What to do with one comparison's traffic.

    Attributes:
        facts: of the comparison, as ``run.json`` has them; ``environment``, where it ran.
        point: swept keys with their values, where the question has several.
        pick: None = native stays, for the ``reason``.
        fastest: the fastest candidate within the bounds, where none is picked.
        beside: of a pick that loses pairs or mass the best that loses none, else the fastest within the bounds that
            does; None = there is none that is faster than native.
        tokens_of_ranks: where a recording's sequences stay whole.
        next_best: the fastest within the bounds but for the pick and ``beside``.
        candidates: all, the pick first and last those that may not be picked.
        turns: where another would be picked; empty where nobody asked.
        held_out: where batches follow each other in time.
        plans: of replicas, where batches follow each other in time.
        peaks: of drawn traffic.
    """

    comparison_id: str
    facts: TimedFacts
    environment: Environment
    point: dict[str, Any]
    scope: Literal["layer", "model"]
    native: Case
    pick: Candidate | None
    reason: Reason | None = None
    fastest: Candidate | None = None
    beside: Candidate | None = None
    next_best: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()
    turns: tuple[Turn, ...] = ()
    held_out: HeldOut | None = None
    plans: tuple[Upkeep, ...] = ()
    peaks: PeakLoads | None = None
    tokens_of_ranks: RankTokens | None = None
    variants: tuple[Variant, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Answer:
        for pick, native in ((self.pick, self.native), *((one.pick, one.native) for one in self.variants)):
            if pick is not None and native.median_ms is None:
                raise UserError("native.median_ms: expected a time beside a pick, got null")
        if self.reason == "does_not_fit" and self.facts.fit is None:
            raise UserError("facts.fit: expected the memory that does not fit, got null")
        return self


class Advice(_Fact):
    """All answers to a question, for what they hold, and what may change them.

    Attributes:
        version: raised when a field changes its name or meaning, not when one is added.
        versus: the label of the candidate against which the others are set; None = native alone is.
        lines: the answer for people, without the tables; ``advice_lines`` composes it.
    """

    version: Literal[2] = 2
    lines: list[str] = Field(default=[])
    max_dropped: float
    min_retained: float
    versus: str | None = None
    answers: list[Answer] = Field(min_length=1)
    assumptions: list[Assumption]
    notes: list[Note]

    def name_of(self, answer: Answer) -> str:
        """One of several answers: its place in the sweep, or its title; empty where there is no other."""
        return "" if len(self.answers) == 1 else ", ".join(point_parts(answer.point)) or title_words(answer.facts)


def advice_json(advice: Advice) -> str:
    """The answer as ``advice.json`` and ``--json`` have it (docs/advise.md): facts, and the lines that say them."""
    lines = [line for block in advice_lines(advice) for line in block.splitlines()]
    return advice.model_copy(update={"lines": lines}).model_dump_json(indent=2)


def write_advice(directory: Path, advice: Advice) -> None:
    """Write ``advice.json`` beside the results that it is about."""
    write_text(directory / ADVICE, f"{advice_json(advice)}\n")


def read_advice(directory: Path) -> Advice | None:
    """The answer that ``advise`` left beside its results; None where it was not asked.

    Raises:
        ResultsError: the file is damaged; one line.
    """
    path = directory / ADVICE
    return read_document(path, Advice) if path.is_file() else None


def read_advices(directories: Iterable[Path], passed_over: list[str]) -> list[Advice]:
    """The answers beside results; ``passed_over`` gets a line for each that is damaged."""
    advised = []
    for directory in directories:
        try:
            advised += filter(None, [read_advice(directory)])
        except ResultsError as error:
            passed_over.append(str(error))
    return advised


# ---- sentences -------------------------------------------------------------------------------------------------------


def is_said_first(assumed: Assumption) -> bool:
    """Whether it stands with the picks, which it may change, and not among what else is assumed."""
    return assumed.kind == "asked_layers" or (assumed.missing is not None and assumed.missing.kind == "package")


def advice_lines(advice: Advice) -> list[str]:
    """The picks, what they cost, and for what they hold: a block of lines for each answer."""
    blocks = []
    for answer in advice.answers:
        is_brief = has_assumed_traffic(advice.assumptions)
        lines = _brief_lines(answer) if is_brief else _answer_lines(answer, advice.versus)
        lines, name = "\n".join(lines), advice.name_of(answer)
        blocks.append(f"At {name}: {lines}" if name else lines)
    first = [
        f"\n{words[0].upper()}{words[1:]}."
        for words in map(assumption_words, filter(is_said_first, advice.assumptions))
    ]
    blocks[-1] += f"{''.join([*_fastest_overlap(advice.answers), *first])}\n{_for(advice)}"
    return blocks


def _fastest_overlap(answers: Sequence[Answer]) -> Iterator[str]:
    """Which of several overlaps takes least, each with its own pick."""
    overlaps = {answer.facts.overlap for answer in answers}
    if len(answers) < 2 or len(overlaps) < len(answers) or len({title_words(one.facts) for one in answers}) > 1:
        return
    chosen = [(answer.facts.overlap, answer.pick or answer.native) for answer in answers]
    timed = sorted((one.median_ms, OVERLAP_WORDS[overlap], one.label) for overlap, one in chosen if one.median_ms)
    if len(timed) == len(answers):
        (least, overlap, label), (other, *_), *_ = timed
        yield f"\nThe fastest of these is {label} with {overlap}: {_taken(least, other)}."


def _answer_lines(answer: Answer, versus: str | None) -> Iterator[str]:
    native, pick = answer.native, answer.pick
    if pick is None:
        yield f"{_reason(answer)}."
        if (fastest := answer.fastest) is not None:
            said = f"{fastest.label}: {fastest.speedup:.3f} times native ({fastest.verdict})"
            yield f"The fastest within the bounds is {said}."
        yield from _native_lines(native)
    else:
        yield from _pick_lines(answer, pick)
    yield from _why_lines(native, pick or answer.fastest)
    yield from _tokens_lines(answer)
    yield from _versus_lines(answer, versus)
    if pick is not None and (other := answer.next_best) is not None:
        yield f"Next best: {other.label}, {other.speedup:.3f} times native: {_cost(other)}."
    if answer.turns:
        turns = "; ".join(map(_turn_words, answer.turns))
        yield f"Where it turns, by one draw or layer and its closest rivals: {turns}."
    if (chosen := answer.held_out) is not None:
        first = f"{chosen.label}, {chosen.earlier:.3f} times as fast as native there"
        yield f"The first half of the batches would choose {first}; on the second half it is {chosen.later:.3f} times."
    yield from map(_upkeep_line, answer.plans)
    yield from map(_variant_line, answer.variants)
    if answer.peaks is not None and answer.peaks.traffic is not None and (words := peak_words(answer.peaks)):
        yield f"{words[0].upper()}{words[1:]}."


def _reason(answer: Answer) -> str:
    """Why native stays."""
    if answer.reason == "does_not_fit":
        assert answer.facts.fit is not None
        return f"None: the model {fit_words(answer.facts.fit)}"
    return {
        "little_gain": "Keep native: within the bounds only what drops or reroutes is faster, by no more than 5 %",
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
    if (whole := native.whole) is not None:
        rate = f"{whole.tokens_per_s_per_rank:,.0f} tokens/s a GPU"
        words += f". Whole model, with the rest modelled: {milliseconds(whole.ms)} ms, {rate}"
    yield f"{words}."


def _brief_lines(answer: Answer) -> Iterator[str]:
    """Of one traffic among several: the pick, and what it loses, or the memory that it takes."""
    pick = answer.pick
    yield next(_answer_lines(answer, None))
    if pick is None:
        return
    cost, *others = _cost_lines(answer, pick)
    if costs_answers(pick.missing_share, pick.retained_mass):
        yield from (cost, *others)
    elif pick.extra_gib_per_rank:
        yield cost


def _pick_lines(answer: Answer, pick: Candidate) -> Iterator[str]:
    """What a pick gains and costs, and what a pass comes to."""
    native, how = answer.native, pick.origin
    if (spread := pick.spread) is not None:
        how += f"; {spread.least:.2f} to {spread.most:.2f} by {spread.over}"
    what = "a pass" if answer.scope == "model" else "a layer"
    over = "" if pick.over_topk is None else f" ({pick.over_topk:.3f} times topk, {SAME_KERNELS})"
    gain = f"{what} is {pick.speedup:.3f} times as fast as native{over}, {_taken(pick.median_ms, native.median_ms)}"
    yield f"Use {pick.label}: {gain} ({how})."
    if (ours := pick.whole) is not None and (theirs := native.whole) is not None:
        end_to_end = f"{theirs.ms / ours.ms:.3f} times as fast, {_taken(ours.ms, theirs.ms)}"
        rates = f"{ours.tokens_per_s_per_rank:,.0f} in place of {theirs.tokens_per_s_per_rank:,.0f} tokens/s a GPU"
        of = rest_words(answer.facts.rest) if answer.facts.rest else ""
        rest = f"the rest modelled{of and f' ({of})'}"
        yield f"Whole model, with all such layers and {rest}: {end_to_end}, {rates}."
    yield from _cost_lines(answer, pick)
    if pick.redundant_experts is not None:
        yield _server_line(pick.redundant_experts, is_eplb=pick.is_eplb)


def _cost_lines(answer: Answer, pick: Candidate) -> Iterator[str]:
    """What a pick costs, and the fastest that loses nothing, or that loses no more than asked."""
    yield f"It costs: {_cost(pick)}."
    other, loses = answer.beside, costs_answers(pick.missing_share, pick.retained_mass)
    if other is not None:
        which = "Without loss" if loses else "With loss within the bounds"
        yield f"{which} the best is {other.label}, {other.speedup:.3f} times native: {_cost(other)}."
    elif loses:
        yield "Without loss none is significantly faster than native."


def _server_line(redundant_experts: int, *, is_eplb: bool) -> str:
    """How servers are told to hold replicas."""
    config = json.dumps({"num_redundant_experts": redundant_experts})
    vllm = f"vLLM --enable-expert-parallel --enable-eplb --eplb-config '{config}'"
    sglang = f"SGLang --enable-eplb --ep-num-redundant-experts {redundant_experts}"
    return f"In a server: {vllm}; {sglang}{'' if is_eplb else '; both plan by EPLB'}."


def _cost(candidate: Candidate) -> str:
    """What a candidate drops and keeps, and the memory that it takes."""
    costs = ["nothing is dropped"]
    if costs_answers(candidate.missing_share, candidate.retained_mass):
        costs = [
            cost_words(candidate.model_dump(), " of the pairs are"),
            f"{100 * candidate.retained_mass:.1f} % of the mass is kept",
        ]
    if candidate.extra_gib_per_rank:
        costs.append(f"{candidate.extra_gib_per_rank:.3g} GiB more memory on each rank")
    return ", ".join(costs)


_GROUPS = {
    "gate": "the router",
    "permute": "permutation",
    "comm": "exchanges",
    "experts": "experts",
    "shared": "shared experts",
    "waiting": "waiting for fuller ranks",
    "unaccounted": "no phase",
}
# Tokens of the fullest rank over the mean from which on they are uneven.
_UNEVEN = 1.1
# What of a layer's time, or of what a candidate saves, is too little to be named.
_LEAST_NAMED = 0.01


def _why_lines(native: Case, other: Candidate | None) -> Iterator[str]:
    """Where native's time goes, and which of it the pick, or what comes nearest to one, shortens."""
    if native.median_ms is None or not (spent := native.phases_ms):
        return
    least_ms = _LEAST_NAMED * native.median_ms
    parts = sorted((-ms, _GROUPS.get(group, group)) for group, ms in spent.items() if ms >= least_ms)
    line = f"Why: a rank's mean time with native is {', '.join(f'{-ms:.3g} ms {name}' for ms, name in parts)}"
    if native.fullest_rank is not None:
        line += f"; its fullest rank has {native.fullest_rank:.2f} times the mean load"
    yield f"{line}."
    if other is None or not other.phases_ms:
        return
    changes = {group: other.phases_ms.get(group, 0.0) - ms for group, ms in spent.items()}
    said = [(abs(ms), ms, _GROUPS.get(group, group)) for group, ms in changes.items() if abs(ms) >= least_ms]
    words = [f"{name} by {ms:+.3g} ms" for _, ms, name in sorted(said, reverse=True)]
    load = "" if other.fullest_rank is None else f" makes that {other.fullest_rank:.2f} and"
    what = f"changes {', '.join(words)}" if words else "changes no phase by more than 1 % of the layer"
    yield f"{other.label}{load} {what}."


def _tokens_lines(answer: Answer) -> Iterator[str]:
    """That ranks' tokens, not their experts, make the fullest rank, where they do for the greater part."""
    held, native = answer.tokens_of_ranks, answer.native
    if held is None or native.fullest_rank is None:
        return
    over_mean = held.most / held.mean
    if over_mean >= max(_UNEVEN, native.fullest_rank):
        said = f"Ranks hold {held.least:,.0f} to {held.most:,.0f} tokens by whole sequences"
        yield f"{said}, up to {over_mean:.2f} times the mean: this, more than busy experts, decides which rank is last."


def _versus_lines(answer: Answer, label: str | None) -> Iterator[str]:
    """The verdict on the pick, or on what comes nearest to one, against the candidate that was named."""
    others = [one for one in answer.candidates if one.versus is not None]
    if label is None or not others:
        return
    first = next((one for one in (answer.pick, answer.fastest) if one in others), others[0])
    found = first.versus
    assert found is not None
    speedup = f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}] times as fast"
    yield f"Against {label}: {first.label} is {speedup} ({found.verdict}); the table has the others."


def growth_words(growth: Growth | None) -> str:
    """``policy +21 us``: why a candidate loses; empty where it does not, or where nothing takes longer."""
    if growth is None:
        return ""
    what = growth.phase.replace("_", " ") + (" and its sum over ranks" if growth.is_summed else "")
    return f"{what} +{growth.us:,.3g} us"


_KEYS = {"workload.peak_load": "peak load", "workload.batch_peak_load": "peak load of a batch"} | {
    "layer.ep_size": "EP size",
    "workload.num_tokens": "tokens",
}


def _turn_words(turn: Turn) -> str:
    """Where the pick turns along a key."""
    name = _KEYS.get(turn.key, turn.key)
    if turn.unsolved is not None:
        return f"{name}: not solved, for {_unsolved_words(turn.unsolved)}"
    assert turn.least is not None
    assert turn.most is not None
    if turn.below is turn.above is None:
        return f"{name}: no turn from {turn.least:,g} to {turn.most:,g}"
    said = []
    for side, beyond, end in ((turn.below, "below", turn.least), (turn.above, "above", turn.most)):
        if side is None:
            said.append(f"none {'down' if beyond == 'below' else 'up'} to {end:,g}")
        else:
            least, most = sorted((side.near, side.far))
            pick = f"use {side.pick}" if side.pick else "keep native"
            said.append(f"between {least:,g} and {most:,g} ({beyond}: {pick})")
    return f"{name}: {', '.join(said)}"


def _unsolved_words(why: Unsolved) -> str:
    if why.number is None:
        return why.text or "in its typical draw or layer the pick is too close to call"
    return (
        f"a batch has {why.number / 1e6:,.0f} million scores"
        if why.kind == "scores"
        else f"{why.number} ranks take long"
    )


_NOTES = {
    "skew_is_assumed": "the traffic's skew is assumed: a recording of your server may choose otherwise "
    "(docs/servers.md)",
    "plan_time_of_this_cpu": "time to plan was measured on this CPU (emulate.replication: plan_ms)",
    "scored_where_chosen": "the pick was chosen and scored on the same traffic, so its speedup is slightly optimistic",
    "few_draws": "{number} draws of the traffic give wide intervals: more draws tell more (sweep.workload.seed)",
    "one_layer": "speedups are of one MoE layer: a whole model gains less (docs/model.md)",
    "mass_is_not_accuracy": "score mass is not accuracy: evaluate the model first (docs/quality.md)",
    "as_if_compiled": TORCH_CAVEAT.format("{text}"),
    "of_traffic_alone": MODEL_CAVEAT,
    "warning": "{text}",
}


def note_lines(advice: Advice) -> Iterator[Line]:
    """The notes as people read them, some with facts of the answers."""
    for note in advice.notes:
        if note.kind == "mixed_machines":
            mixed = [one for one in advice.answers if one.facts.mixes_machines]
            lines = [", ".join(mixed_parts(one.scope, one.facts.scale)) for one in mixed]
        elif note.kind == "layers_differ":
            skews = [one.facts.workload.skew for one in advice.answers]
            lines = [skew_words(skew.layers) for skew in skews if skew is not None and skew.layers is not None]
        elif note.kind == "chance":
            lines = chance_words(note.number or 0)
        else:
            lines = [_NOTES[note.kind].format(number=note.number, text=note.text)]
        yield from (Line(line, is_warning=note.kind == "warning") for line in dict.fromkeys(lines))


_DECISIONS = {"enable": "enable", "not_now": "not now", "insufficient": "insufficient evidence"}


def _upkeep_line(plan: Upkeep) -> str:
    """Whether to keep a plan, and what that takes."""
    charged = f" with a new plan every {plan.every} batches" if plan.every else ""
    gain = f"{plan.speedup:.3f} times as fast as native [{plan.low:.3f}, {plan.high:.3f}]"
    takes = f"a new plan takes {milliseconds(plan.rearrange_ms)} ms and moves {plan.rearranged_gib:.3g} GiB in a layer"
    pays = "never pays off" if plan.pays_after is None else f"pays off after {plan.pays_after:,} batches"
    on = f"on {plan.num_batches} later batches{charged}"
    if plan.layers is not None:
        on += ", and gains in {} of {} layers".format(*plan.layers)
    return f"{plan.label}: {_DECISIONS[plan.decision]}. It is {gain} {on}; {takes}, and {pays}."


def _variant_line(variant: Variant) -> str:
    """That another overlap has the same pick."""
    words, native_ms = f"With {OVERLAP_WORDS[variant.overlap]}", variant.native.median_ms
    if native_ms is None:
        return f"{words} nothing was modelled."
    if variant.pick is None:
        return f"{words} the answer is the same: native takes {milliseconds(native_ms)} ms."
    speedup = f"{variant.pick.speedup:.3f} times as fast as native"
    return f"{words} the pick is the same: {speedup}, {_taken(variant.pick.median_ms, native_ms)}."


def _taken(ours_ms: float, native_ms: float | None) -> str:
    assert native_ms is not None  # as answers are checked
    change = 100 * (ours_ms / native_ms - 1)
    words = f"{abs(change):.1f} % {'less' if change <= 0 else 'more'}"
    return f"{milliseconds(ours_ms)} in place of {milliseconds(native_ms)} ms, {words}"


def _for(advice: Advice) -> str:
    """For what the answers hold: model, sizes, traffic, device and links, and the bounds; then what is modelled."""
    lost = 100 * (1 - advice.min_retained)
    limits = [f"{100 * advice.max_dropped:g} % of the pairs dropped"] if advice.max_dropped < 1 else []
    limits += [f"{lost:g} % of the score mass lost"] if lost < 100 else []
    within = f"at most {' and '.join(limits)}" if limits else "no bounds"
    answers, facts = advice.answers, [one.facts for one in advice.answers]
    own = own_points(list(map(title_words, facts)), [one.point for one in answers])
    asked = (
        [_with((*title_parts(one), *point_parts(at)), _assumed_skew(one)) for one, at in zip(facts, own, strict=True)],
        [ran_on_parts(one.environment, one.facts, in_short=True) for one in answers],
        [_with(links_parts(one), _assumed_links(one)) for one in facts],
    )
    overlapped = [one.facts.model_copy(update={"overlap": of.overlap}) for one in answers for of in one.variants]
    modelled = modelled_line([*facts, *overlapped])
    return f"For {'; '.join(filter(None, map(said_once, asked)))}; {within}.{modelled and ' '}{modelled}"


def _with(parts: Parts, assumed: str) -> Parts:
    """Parts, the last with what is assumed behind it."""
    return (*parts[:-1], f"{parts[-1]} ({assumed})") if assumed else parts


def _assumed_skew(facts: TimedFacts) -> str:
    """Whose skew is assumed to be this model's; empty where it is known."""
    skew = facts.workload.skew
    if skew is None or (skew.of is None and skew.basis != "assumed"):
        return ""
    return f"assumed, {skew.of}'s" if skew.of else "assumed"


def _assumed_links(facts: TimedFacts) -> str:
    """Which figures of the links between these ranks are assumed; empty where none is."""
    links = facts.links
    if links is None or facts.exchange is not None or links.measured_by is not None:
        return ""
    is_crossing = facts.num_ranks > links.ranks_per_node
    link = links.inter if is_crossing else links.intra
    named = {"latency": "latency", "efficiency": "share of the bandwidth reached"}
    words = ", ".join(named[name] for name in named if getattr(link, f"{name}_basis", None) == "assumed")
    return words and f"assumed {'between nodes' if is_crossing else 'inside a node'}: {words}"


def costs_answers(missing_share: Any, retained_mass: Any) -> Any:
    """Whether a case, or each of several, leaves out pairs that the model would compute, or score mass."""
    return (missing_share > 0) | (retained_mass <= 1 - ROUNDING)
