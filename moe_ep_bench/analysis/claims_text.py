"""Papers' claims beside ours as plain text: the table, what the traffic is, and why numbers differ."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from moe_ep_bench.analysis.claims import ClaimResult, Claims
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.whole import WholeComparison, chance_words, extrapolated_words
from moe_ep_bench.analysis.whole_claims import (
    NEEDED_HEADER,
    NEEDED_WORDS,
    SHARE_HEADER,
    needed_cell,
    share_cells,
)
from moe_ep_bench.analysis.words import NONE, aligned, hardware_words, milliseconds, mode_words, percent
from moe_ep_bench.papers.claims import (
    NATIVE_METRICS,
    OWN_METRICS,
    PASS_METRICS,
    PHASE_METRICS,
    PLACEMENTS,
    Claim,
    most_gain,
    most_peak,
)

NOT_AT_HAND = "not at hand"
# What the paper measured, where ours is a layer, and where it is a whole model.
_OF = {
    "layer": "",
    "end_to_end": ", end to end (ours: a layer)",
    "not_stated": ", layer or end to end not stated (ours: a layer)",
}
_OF_PASS = {"end_to_end": ", end to end", "not_stated": ", layer or end to end not stated (ours: end to end)"}
_OF_ITS_LAYERS = {
    "layer": ", layers",
    "end_to_end": ", end to end (ours: all MoE layers)",
    "not_stated": ", layer or end to end not stated (ours: all MoE layers)",
}
METRIC_WORDS = {
    "speedup": "speedup",
    "dropped_fraction": "dropped share",
    "retained_mass": "mass kept",
    "gate_time": "relative time of gate and policy",
    "permute_time": "relative time of permutation",
    "comm_time": "relative time of communication",
    "experts_time": "relative time of experts",
    "layer_time": "relative time of the layer",
    "activated_experts": "relative number of activated experts",
    "moe_speedup": "speedup of all MoE layers in a pass",
    "step_time": "relative time of a decode step",
    "tokens_per_s": "relative tokens per second",
    "native_layer_us": "native's layer (us)",
    "native_activated_experts": "native's activated experts",
}
_PHASES = (*PHASE_METRICS.values(), "waiting")
_WIDTH = 120
_COLUMNS = "Under each traffic: ours (ours - paper's), share of the top-k pairs that are dropped in %."


def claims_text(claims: Claims) -> str:
    """The table, what the traffic is, phases where a claim is about them, and why numbers differ."""
    parts = [
        _heading(claims),
        _table(claims),
        textwrap.wrap(_columns(claims), _WIDTH),
        _needed_lines(claims),
        _traffic_table(claims),
        *_phase_tables(claims),
        _reasons(claims),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _heading(claims: Claims) -> list[str]:
    ours = "whole models here, from end to end" if claims.is_whole else "one layer here"
    ours += cut_words(claims)
    return textwrap.wrap(f"Papers' numbers beside {ours}: {how_words(claims)}", _WIDTH)


def cut_words(claims: Claims) -> str:
    """How many layers of how many passes went through; nothing where all."""
    cut = [one.comparison.comparison.whole for one in claims.wholes.values() if one.is_cut]
    found = dict.fromkeys(f"the first {one.num_layers} of {one.of_layers} layers" for one in cut if one)
    return f" ({', '.join(found)})" if found else ""


def how_words(claims: Claims) -> str:
    """How ours came about, by which device and links."""
    facts = [one.comparison for one in claims.comparisons]
    if claims.run.mode == "run":
        held = [one.cuda_graph and f"replayed from CUDA graphs: {one.cuda_graph}" for one in facts]
        parts = [
            [mode_words(claims.run, one) for one in facts],
            [hardware_words(claims.run, one) for one in facts],
            [f"{one.experts.ran} experts, {one.dispatcher}" for one in facts],
            [words or "run eagerly" for words in held],
        ]
    else:
        device = [one.device or f"{claims.run.device_name} in place of {one.world_size} ranks" for one in facts]
        parts = [[mode_words(claims.run, one) for one in facts], device, [one.links or NONE for one in facts]]
    return "; ".join(" / ".join(dict.fromkeys(values)) for values in parts)


def _columns(claims: Claims) -> str:
    extrapolated = list(dict.fromkeys(filter(None, map(extrapolated_words, claims.wholes.values()))))
    return " ".join([_COLUMNS, *(f"[all: ...]: {words}." for words in extrapolated)])


def _table(claims: Claims) -> list[str]:
    solved = any(result.needed for result in claims.results)
    header = ["", "claim", "policy", "paper", *claims.traffics]
    header += [f"needed, {placement}" for placement in PLACEMENTS] if solved else []
    header += [NEEDED_HEADER] if claims.is_whole else []
    rows = [
        [
            str(number),
            metric_in_words(result, claims.is_whole),
            policy_words(result),
            paper_words(result.claim),
            *(_cell(result, name) for name in claims.traffics),
            *([_needed_cell(result, placement) for placement in PLACEMENTS] if solved else []),
            *([needed_cell(result.claim, _wholes(result, claims.traffics))] if claims.is_whole else []),
        ]
        for number, result in enumerate(claims.results, start=1)
    ]
    return aligned([header, *rows], left=(1, 2))


def _wholes(result: ClaimResult, traffics: Sequence[str]) -> list[WholeComparison | None]:
    """Of each traffic; None where nothing was measured under one that the claim is about."""
    by_traffic = {one.traffic: one.whole for one in result.ours}
    return [by_traffic.get(name) for name in traffics if name in by_traffic or name in result.unmeasured]


def claim_words(result: ClaimResult, is_whole: bool) -> str:
    """Where it stands and of what it is; where in the sweep, if the claim itself does not say."""
    others = f" ({result.others})" if result.others and not result.claim.where else ""
    return f"{result.claim.source}{_of_words(result.claim, is_whole)}{others}"


def _of_words(claim: Claim, is_whole: bool) -> str:
    if not is_whole:
        return _OF[claim.of]
    return _OF_PASS[claim.of] if claim.metric in PASS_METRICS else _OF_ITS_LAYERS[claim.of]


def metric_in_words(result: ClaimResult, is_whole: bool) -> str:
    metric = "" if result.claim.metric == "speedup" else f": {METRIC_WORDS[result.claim.metric]}"
    return f"{claim_words(result, is_whole)}{metric}"


def policy_words(result: ClaimResult) -> str:
    return f"{result.label} against {result.versus}" if result.versus else result.label


def paper_words(claim: Claim) -> str:
    """The number, ``above`` or ``below`` one, or from one to another."""
    if claim.paper is None:
        return NOT_AT_HAND
    low, high = claim.paper
    if low is None or high is None:
        return f"below {_number(claim, high)}" if low is None else f"above {_number(claim, low)}"
    return _number(claim, low) if low == high else f"{_number(claim, low)} to {_number(claim, high)}"


def _number(claim: Claim, value: float | None) -> str:
    assert value is not None
    if claim.metric in OWN_METRICS:
        return f"{100 * value:.1f} %"
    return f"{value:.1f}" if claim.metric in NATIVE_METRICS else f"{value:.2f}"


def _cell(result: ClaimResult, traffic: str) -> str:
    ours = next((one for one in result.ours if one.traffic == traffic), None)
    if ours is None:
        return "not measured" if traffic in result.unmeasured else NONE
    text = _number(result.claim, ours.value)
    if ours.difference is not None:
        if result.claim.number is None:
            text += " holds" if ours.difference == 0 else " does not hold"
        else:
            difference = 100 * ours.difference if result.claim.metric in OWN_METRICS else ours.difference
            digits = 1 if result.claim.metric in (*OWN_METRICS, *NATIVE_METRICS) else 2
            text += f" ({difference:+.{digits}f})"
    if ours.all_layers is not None:
        text += f" [all: {ours.all_layers:.2f}]"
    return text if result.claim.metric == "dropped_fraction" else f"{text}, {percent(ours.dropped)}"


def _needed_cell(result: ClaimResult, placement: str) -> str:
    needed = next((one for one in result.needed if one.placement == placement), None)
    if needed is None:
        return NONE
    if not needed.found:
        assert result.claim.number is not None
        bound = "at most" if needed.value < result.claim.number else "at least"
        return f"not reachable: {bound} {_number(result.claim, needed.value)}"
    return f"peak {needed.fullest_expert:.2f}, rank {needed.fullest_rank:.2f}"


def _needed_lines(claims: Claims) -> list[str]:
    if claims.is_whole:
        return textwrap.wrap(NEEDED_WORDS, _WIDTH)
    if claims.solved_on is None or claims.solved_tokens is None:
        return []
    text = (
        f"needed: the mildest skew at which a layer, modelled on devices/{claims.solved_on} with"
        f" {claims.solved_tokens:,} tokens a rank and one batch, gives the paper's number: load of the busiest expert"
        " and of the fullest rank, over the mean. scattered: experts lie as drawn; adjacent: the busiest lie side by"
        " side, on one rank."
    )
    return textwrap.wrap(text, _WIDTH)


def _traffic_table(claims: Claims) -> list[str]:
    header = ["layer and traffic", "fullest expert", "fullest rank", "balance alone gains", "what the traffic is"]
    if claims.is_whole:
        header[:1], header[4:4] = ["model and traffic"], SHARE_HEADER
    rows = []
    wholes = claims.wholes
    for one in claims.comparisons:
        native, ceiling = one.of_role("baseline"), one.of_role("ceiling")
        fidelity = native and native.fidelity
        rows.append(
            [
                one.comparison.title,
                f"{fidelity.fullest_expert:.2f}" if fidelity else NONE,
                f"{fidelity.fullest_rank:.2f}" if fidelity else NONE,
                f"{ceiling.speedup.median:.2f}" if ceiling and ceiling.speedup else NONE,
                *(share_cells(wholes[id(one)]) if claims.is_whole else []),
                textwrap.shorten(basis_words(one), 90, placeholder=" ..."),
            ]
        )
    chances = [
        line
        for one in claims.comparisons
        if one.comparison.whole is not None
        for words in chance_words(one.comparison.whole.shared_by_chance)
        for line in textwrap.wrap(f"{one.comparison.title}: {words}", _WIDTH)
    ]
    return [*aligned([header, *rows], left=(0, len(header) - 1)), *chances]


def basis_words(one: ComparisonResult) -> str:
    """What a workload was calibrated to, without its other words."""
    return one.comparison.workload.description.split("; synthetic", 1)[0].removeprefix("synthetic, ")


def _phase_tables(claims: Claims) -> list[list[str]]:
    """Milliseconds by group of phases, for comparisons that a claim on phases is about."""
    about = {
        id(ours.comparison): ours.comparison
        for result in claims.results
        for ours in result.ours
        if result.claim.metric in PHASE_METRICS
    }
    tables = []
    for one in about.values():
        cases = [r for r in one.results if r.case.role in ("baseline", "policy") and r.breakdown and r.layer]
        rows = [[r.case.label, *_phase_cells(r)] for r in cases]
        title = f"{one.comparison.title}: milliseconds, mean over ranks; layer: the slowest rank"
        tables.append([title, *aligned([["policy", *_PHASES, "layer"], *rows], left=(0,))])
    return tables


def _phase_cells(result: CaseResult) -> Iterable[str]:
    assert result.breakdown is not None
    assert result.layer is not None
    return [
        *(milliseconds(result.breakdown.group_ms[name], 3) for name in _PHASES),
        milliseconds(result.layer.median_ms),
    ]


def _reasons(claims: Claims) -> list[str]:
    """Each reason once, with the numbers of its claims, and what follows from the numbers themselves."""
    numbers: dict[str, list[int]] = {}
    for number, result in enumerate(claims.results, start=1):
        for reason in [result.claim.note.strip(), *_facts(result, claims)]:
            numbers.setdefault(reason, []).append(number)
    lines = ["Why they differ, and what was inferred"]
    for reason, of in numbers.items():
        lines += textwrap.wrap(f"{_ranges(of)}: {reason}", _WIDTH, subsequent_indent="   ")
    return lines


def _facts(result: ClaimResult, claims: Claims) -> Iterable[str]:
    claim, number = result.claim, result.claim.number
    if claim.of == "end_to_end" and number is not None and not claims.is_whole:
        yield (
            "End to end is never more than the layer: attention and all else that dropping does not touch dilute it. "
            "The layer behind such a number gained at least as much."
        )
    factor = result.params.get("capacity_factor")
    if claim.metric != "dropped_fraction" or number is None or not factor or result.policy != "token_drop":
        return
    facts = result.ours[0].comparison.comparison if result.ours else None
    if facts is None or facts.num_experts != facts.num_ranks:
        return
    peak, gain = most_peak(number, factor, facts.num_experts), most_gain(number, factor, facts.num_experts)
    claimed = [
        one.claim.number
        for one in claims.results
        if one.claim.metric == "speedup" and one.label == result.label and one.claim.number is not None
        if one.ours and one.ours[0].comparison.comparison == facts
    ]
    above = [f"{value:.2f}" for value in claimed if value > gain]
    than = f", less than the {' and '.join(above)} claimed for it" if above else ""
    bound = f"{factor:g} + {number:g} x {facts.num_experts} = {peak:.2f}"
    yield (
        f"With {facts.num_experts} experts, one to a rank, {100 * number:.0f} % dropped at {factor:g} bounds the"
        f" busiest expert at {bound} times the mean, and the layer's gain at {peak:.2f} / {factor:g} ="
        f" {gain:.2f}{than}, if ranks' tokens are alike and time grows with the largest load."
    )


def _ranges(numbers: Sequence[int]) -> str:
    """``1-3, 5`` of 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
