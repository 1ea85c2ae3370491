"""Papers' numbers beside ours: what ``reproduce`` prints, its table as CSV, and its figure.

One row for each claim and policy; its columns are what the same layer gives under each traffic, or the same whole model
(``scope: model``). One of the two is ours, by the device and links that stand above the table, and where the paper
measured the other its row says so. A paper's number that is not at hand stays empty, and no row is left out because it
does not fit.
"""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pydantic import ValidationError

from moe_ep_bench.analysis.activated import mean_activated
from moe_ep_bench.analysis.fidelity import Fidelity
from moe_ep_bench.analysis.load import ResultsError, Run, is_whole, load_run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.style import (
    DEFAULT_FORMATS,
    INK,
    MUTED,
    NOISE_FILL,
    house_style,
    panel_title,
    save,
    settle_layout,
    sheet,
    wrap,
)
from moe_ep_bench.analysis.sweep import key_words
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.analysis.whole import WholeComparison, analyse_whole, extrapolated_words, load_whole
from moe_ep_bench.analysis.whole_claims import (
    NEEDED_HEADER,
    NEEDED_WORDS,
    SHARE_HEADER,
    all_layers_value,
    needed_cell,
    share_cells,
    whole_value,
)
from moe_ep_bench.analysis.words import NONE, aligned, hardware_words, milliseconds, mode_words, percent, scale_words
from moe_ep_bench.claims import (
    NATIVE_METRICS,
    OWN_METRICS,
    PASS_METRICS,
    PHASE_METRICS,
    PLACEMENTS,
    Claim,
    claims_path,
    most_gain,
    most_peak,
)
from moe_ep_bench.measure.statistics import estimate_median, paired_ratios
from moe_ep_bench.records import atomic_path

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
_METRIC_WORDS = {
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
_PHASES = ("gate", "permute", "comm", "experts", "waiting")
_LOOKS = (
    {"color": "#009E73", "marker": "o"},
    {"color": "#0072B2", "marker": "s"},
    {"color": "#D55E00", "marker": "^"},
    {"color": "#CC79A7", "marker": "D"},
    {"color": "#E69F00", "marker": "v"},
)
_PAPER_LOOK = {"color": INK, "marker": "|", "markersize": 15, "markeredgewidth": 2.4, "linestyle": "none"}
_WIDTH = 120
_COLUMNS = "Under each traffic: ours (ours - paper's), share of the top-k pairs that are dropped in %."


@dataclass(frozen=True)
class Ours:
    """What we have under one traffic.

    Attributes:
        traffic: name of the skew, or what the workload is called.
        value: by the claim's metric; low and high are the ends of its interval, or of its samples where there are too
            few batches for one, and the value itself where it has neither.
        difference: from the paper's; None where that is not at hand.
        dropped: share of top-k pairs that the policy does not compute.
        whole: the comparison as one of whole models; None of layers.
        all_layers: the value extrapolated to all layers, where a pass had only the first ones.
    """

    traffic: str
    value: float
    low: float
    high: float
    difference: float | None
    dropped: float
    comparison: ComparisonResult
    whole: WholeComparison | None = None
    all_layers: float | None = None


@dataclass(frozen=True)
class Needed:
    """See ``scopes.reproduce.Needed``."""

    placement: str
    found: bool
    value: float
    fullest_expert: float
    fullest_rank: float


@dataclass(frozen=True, eq=False)
class ClaimResult:
    """One claim of one policy.

    Attributes:
        label, versus: of the policy and of the one in native's place.
        others: where in the sweep it stands, apart from the skew; empty without any.
        unmeasured: traffic for which there is nothing, with the reason.
    """

    claim: Claim
    policy: str
    params: dict[str, Any]
    label: str
    versus: str | None
    others: str
    ours: tuple[Ours, ...]
    unmeasured: dict[str, str]
    needed: tuple[Needed, ...]


@dataclass(frozen=True, eq=False)
class Claims:
    """A results directory with its claims.

    Attributes:
        solved_on: device that was modelled to find needed skews; None without any.
        solved_tokens: tokens a rank for which they were found.
    """

    directory: Path
    run: Run
    results: tuple[ClaimResult, ...]
    solved_on: str | None
    solved_tokens: int | None

    @property
    def is_whole(self) -> bool:
        """Whether ours are whole models, not layers."""
        return self.run.scope == "model"

    @property
    def wholes(self) -> dict[int, WholeComparison]:
        """``comparisons`` as those of whole models, by ``id``; empty of layers."""
        return {id(o.comparison): o.whole for r in self.results for o in r.ours if o.whole is not None}

    @property
    def comparisons(self) -> list[ComparisonResult]:
        """Those that claims are about, once."""
        return list({id(o.comparison): o.comparison for r in self.results for o in r.ours}.values())

    @property
    def traffics(self) -> list[str]:
        found = dict.fromkeys(name for r in self.results for name in [*(o.traffic for o in r.ours), *r.unmeasured])
        return list(found)


def load_claims(directory: Path) -> Claims:
    """Read what ``reproduce`` left.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    path = claims_path(directory)
    try:
        content = json.loads(path.read_text())
        rows = content["claims"]
    except OSError:
        raise ResultsError(f"{path}: missing; a directory with claims is one that `reproduce` has written") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path}: damaged: {error}") from None
    run, by_id = (_whole_comparisons if is_whole(directory) else _layer_comparisons)(directory)
    try:
        results = tuple(_result(row, by_id) for row in rows)
        tokens = {row["needed_tokens_per_rank"] for row in rows} - {None}
    except (KeyError, TypeError, ValidationError) as error:
        raise ResultsError(f"{path}: of another run than run.json, or damaged: {error!r}"[:300]) from None
    return Claims(directory, run, results, content["solved_on"], max(tokens, default=None))


_ById = dict[str, ComparisonResult] | dict[str, WholeComparison]


def _layer_comparisons(directory: Path) -> tuple[Run, _ById]:
    run = load_run(directory)
    return run, dict(zip(run.comparisons, analyse(run), strict=True))


def _whole_comparisons(directory: Path) -> tuple[Run, _ById]:
    whole = load_whole(directory)
    return whole.run, dict(zip(whole.run.comparisons, analyse_whole(whole), strict=True))


def _result(row: dict[str, Any], by_id: _ById) -> ClaimResult:
    claim = Claim.model_validate(row["claim"])
    ours, unmeasured = [], {}
    for entry in row["entries"]:
        found = by_id[entry["comparison_id"]]
        whole = found if isinstance(found, WholeComparison) else None
        comparison = found.comparison if isinstance(found, WholeComparison) else found
        traffic = entry["traffic"] or comparison.comparison.title.rsplit(", ", 1)[-1]
        cases = {result.case.case_id: result for result in comparison.results}
        case, versus = cases[entry["case_id"]], entry["versus_id"] and cases[entry["versus_id"]]
        against = versus or comparison.of_role("baseline")
        value, all_layers = _value(claim, case, against, comparison, whole)
        if value is None:
            unmeasured[traffic] = case.case.reason or "it or what it is set against was not measured"
            continue
        assert case.fidelity is not None
        difference, dropped = claim.difference(value[0]), case.fidelity.dropped_share
        ours.append(Ours(traffic, *value, difference, dropped, comparison, whole, all_layers))
    others = ", ".join(f"{key_words(key)} {value}" for key, value in row["others"].items())
    needed = tuple(Needed(**one) for one in row["needed"])
    params = {key: value for key, value in row["policy_params"].items() if value is not None}
    return ClaimResult(
        claim, row["policy"], params, row["label"], row["versus"], others, tuple(ours), unmeasured, needed
    )


def _value(
    claim: Claim,
    case: CaseResult,
    against: CaseResult | None,
    comparison: ComparisonResult,
    whole: WholeComparison | None,
) -> tuple[tuple[float, float, float] | None, float | None]:
    """Value, low and high, None where one of the two was not measured; and the value of all layers (``Ours``)."""
    if not case.case.is_ok or case.fidelity is None or against is None or not against.case.is_ok:
        return None, None
    if whole is not None:
        wholes = {one.result.case.case_id: one for one in whole.results}
        pair = wholes[case.case.case_id], wholes[against.case.case_id]
        return whole_value(claim, *pair, comparison.comparison), all_layers_value(claim, *pair)
    return _layer_value(claim, case, against, comparison), None


def _layer_value(
    claim: Claim, case: CaseResult, against: CaseResult, comparison: ComparisonResult
) -> tuple[float, float, float] | None:
    assert case.fidelity is not None
    ours_us, native_us = layer_time_us(case.case), layer_time_us(against.case)
    if claim.metric in ("speedup", "layer_time", "native_layer_us"):
        pair = (native_us, ours_us) if claim.metric == "speedup" else (ours_us, native_us)
        found = estimate_median(native_us if claim.metric == "native_layer_us" else paired_ratios(*pair))
        return None if found is None else (found.median, found.low, found.high)
    if claim.metric in ("activated_experts", "native_activated_experts"):
        ours, native = (mean_activated(one.case, comparison.comparison) for one in (case, against))
        if ours is None or not native:  # A placement that is not ours to count, or no tokens.
            return None
        return (native if claim.metric == "native_activated_experts" else ours / native,) * 3
    if claim.metric in PHASE_METRICS:
        group = PHASE_METRICS[claim.metric]
        if case.breakdown is None or against.breakdown is None or not against.breakdown.group_ms[group]:
            return None
        return (case.breakdown.group_ms[group] / against.breakdown.group_ms[group],) * 3
    return (_share(case.fidelity, claim.metric),) * 3


def _share(fidelity: Fidelity, metric: str) -> float:
    return fidelity.dropped_share if metric == "dropped_fraction" else fidelity.retained_mass


# ---- text ----------------------------------------------------------------------------------------------------------


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
    ours += _cut_words(claims)
    return textwrap.wrap(f"Papers' numbers beside {ours}: {_how(claims)}", _WIDTH)


def _cut_words(claims: Claims) -> str:
    """How many layers of how many passes went through; nothing where all."""
    cut = [one.comparison.comparison.whole for one in claims.wholes.values() if one.is_cut]
    found = dict.fromkeys(f"the first {one.num_layers} of {one.of_layers} layers" for one in cut if one)
    return f" ({', '.join(found)})" if found else ""


def _how(claims: Claims) -> str:
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
            _with_metric(result, claims.is_whole),
            _policy_words(result),
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


def _claim_words(result: ClaimResult, is_whole: bool) -> str:
    """Where it stands and of what it is; where in the sweep, if the claim itself does not say."""
    others = f" ({result.others})" if result.others and not result.claim.where else ""
    return f"{result.claim.source}{_of_words(result.claim, is_whole)}{others}"


def _of_words(claim: Claim, is_whole: bool) -> str:
    if not is_whole:
        return _OF[claim.of]
    return _OF_PASS[claim.of] if claim.metric in PASS_METRICS else _OF_ITS_LAYERS[claim.of]


def _with_metric(result: ClaimResult, is_whole: bool) -> str:
    metric = "" if result.claim.metric == "speedup" else f": {_METRIC_WORDS[result.claim.metric]}"
    return f"{_claim_words(result, is_whole)}{metric}"


def _policy_words(result: ClaimResult) -> str:
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
                textwrap.shorten(_basis(one), 90, placeholder=" ..."),
            ]
        )
    return aligned([header, *rows], left=(0, len(header) - 1))


def _basis(one: ComparisonResult) -> str:
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


# ---- files ---------------------------------------------------------------------------------------------------------


def write_claims(claims: Claims) -> list[Path]:
    """Write ``claims.txt``, ``claims.csv`` and the figure; return their paths."""
    text, table = claims.directory / "claims.txt", claims.directory / "claims.csv"
    with atomic_path(text) as temporary:
        temporary.write_text(claims_text(claims) + "\n")
    rows = [row for result in claims.results for row in _csv_rows(claims, result)]
    if rows:
        with atomic_path(table) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    drawn = []
    with house_style():
        figure = claims_figure(claims)
        if figure is not None:
            settle_layout(figure)
        for file_format in DEFAULT_FORMATS if figure is not None else ():
            assert figure is not None
            path = claims.directory / "figures" / f"claims.{file_format}"
            save(figure, path, file_format)
            drawn.append(path)
    return [text, *([table] if rows else []), *drawn]


def _csv_rows(claims: Claims, result: ClaimResult) -> Iterable[dict[str, Any]]:
    needed = {one.placement: one for one in result.needed}
    low, high = result.claim.paper or (None, None)
    for ours in result.ours:
        facts, native = ours.comparison.comparison, ours.comparison.of_role("baseline")
        yield {
            "source": result.claim.source,
            "of": result.claim.of,
            "ours_of": _ours_of(claims, result.claim),
            "metric": result.claim.metric,
            "policy": result.label,
            "versus": result.versus,
            "comparison": facts.title,
            "traffic": ours.traffic,
            "paper_low": low,
            "paper_high": high,
            "ours": ours.value,
            "ours_low": ours.low,
            "ours_high": ours.high,
            "difference": ours.difference,
            "ours_extrapolated_to_all_layers": ours.all_layers,
            "dropped_share": ours.dropped,
            "fullest_expert": native and native.fidelity and native.fidelity.fullest_expert,
            "fullest_rank": native and native.fidelity and native.fidelity.fullest_rank,
            **{
                f"needed_{placement}_{name}": needed.get(placement) and getattr(needed[placement], name)
                for placement in PLACEMENTS
                for name in ("found", "value", "fullest_expert", "fullest_rank")
            },
            "mode": mode_words(claims.run, facts),
            "device": facts.device or claims.run.device_name,
            "links": facts.links,
            "needed_device": claims.solved_on if result.needed else None,
            "note": result.claim.note.strip(),
        }


def _ours_of(claims: Claims, claim: Claim) -> str:
    if not claims.is_whole:
        return "layer"
    return "end_to_end" if claim.metric in PASS_METRICS else "layers"


def claims_figure(claims: Claims) -> Figure | None:
    """The paper's number as a mark and ours by traffic, a panel for each metric; None where nothing was measured."""
    panels: dict[str, list[ClaimResult]] = {}
    for result in claims.results:
        if result.ours:
            panels.setdefault(_METRIC_WORDS[result.claim.metric], []).append(result)
    if not panels:
        return None
    looks = dict(zip(claims.traffics, _cycle(_LOOKS, len(claims.traffics)), strict=True))
    results = [result for panel in panels.values() for result in panel]
    legend = [
        *([("paper", Line2D([], [], **_PAPER_LOOK))] if any(r.claim.number is not None for r in results) else []),
        *([("paper: a range", Patch(facecolor=NOISE_FILL))] if any(_is_range(r.claim) for r in results) else []),
        *((f"ours, {name.replace('_', ' ')}", _mark(look)) for name, look in looks.items()),
    ]
    heights = [_row_height(panel, claims.is_whole) * len(panel) for panel in panels.values()]
    figure = sheet(
        "Papers' numbers beside ours",
        f"Ours: {'whole models, a pass from end to end' if claims.is_whole else 'one layer'}; whiskers are 95 % "
        "intervals, or smallest and largest pair below ten batches. Rows without a mark: the paper's number is not at "
        "hand.",
        [_how(claims), _what(claims)],
        legend,
        width=11,
        body=sum(heights) + 0.75 * len(heights),  # titles and axes
    )
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for row, (title, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[row, 0])
        panel_title(axes, title, 7.0)
        _draw(axes, panel, looks, claims.is_whole)
    return figure


def _what(claims: Claims) -> str:
    """Which layers, and what traffic."""
    facts = [one.comparison for one in claims.comparisons]
    models = dict.fromkeys(f"{one.model}, {scale_words(one.scale)}, {one.dtype}" for one in facts)
    traffic = dict.fromkeys(_basis(one) for one in claims.comparisons)
    return f"{' / '.join(models)}{_cut_words(claims)} | {facts[0].workload.kind} traffic, {'; '.join(traffic)}"


def _draw(axes: Axes, panel: Sequence[ClaimResult], looks: dict[str, dict[str, Any]], is_whole: bool) -> None:
    factor = 100 if panel[0].claim.metric in OWN_METRICS else 1
    if panel[0].claim.metric not in (*OWN_METRICS, *NATIVE_METRICS):
        axes.axvline(1, color=MUTED, linewidth=1, zorder=1)
    for place, result in enumerate(panel):
        claim = result.claim
        if claim.number is not None:
            axes.plot([factor * claim.number], [place], zorder=2, **_PAPER_LOOK)
        step = min(0.2, 0.6 / max(1, len(result.ours)))
        for at, ours in enumerate(result.ours):
            y = place + (at - (len(result.ours) - 1) / 2) * step
            axes.hlines(
                y, factor * ours.low, factor * ours.high, color=looks[ours.traffic]["color"], linewidth=1.4, zorder=3
            )
            axes.plot([factor * ours.value], [y], zorder=4, **_style(looks[ours.traffic]))
    low, high = axes.get_xlim()
    for place, result in enumerate(panel):
        if _is_range(result.claim) and result.claim.paper is not None:
            begin, end = result.claim.paper
            begin = low if begin is None else factor * begin
            axes.barh(place, (high if end is None else factor * end) - begin, 0.7, begin, color=NOISE_FILL, zorder=0.5)
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(panel)), [_name(result, is_whole) for result in panel])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(panel) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"{_METRIC_WORDS[panel[0].claim.metric]}{' (%)' if factor == 100 else ''}")


def _name(result: ClaimResult, is_whole: bool) -> str:
    return f"{wrap(_claim_words(result, is_whole), 4.0, 8)}\n{wrap(_policy_words(result), 4.0, 8)}"


def _row_height(panel: Sequence[ClaimResult], is_whole: bool) -> float:
    """Inches, enough for the longest name."""
    most_lines = max(_name(result, is_whole).count("\n") + 1 for result in panel)
    return max(0.52, 0.15 * most_lines + 0.12)


def _is_range(claim: Claim) -> bool:
    return claim.paper is not None and claim.number is None


def _style(look: dict[str, Any]) -> dict[str, Any]:
    return {**look, "linestyle": "none", "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}


def _mark(look: dict[str, Any]) -> Line2D:
    return Line2D([], [], **_style(look))


def _cycle(looks: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return [looks[at % len(looks)] for at in range(number)]
