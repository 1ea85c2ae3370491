"""Papers' numbers beside ours, as ``papers`` left them: a frame with a row per claim, policy and traffic.

Ours is a layer or, with ``scope: model``, a pass of a whole model; where the paper measured the other, the row says so.
Runs that differ in their seed alone are draws of one traffic: their mean is ours. The traffic that was chosen
beforehand is primary; the others are a range. No row is left out because it does not fit.

A pass gains less than its MoE layers. With their share f of native's pass, a paper's n from end to end takes MoE layers
that are f / (1 / n - (1 - f)) times as fast (Amdahl, AFIPS 1967); from 1 / (1 - f) on nothing that MoE layers do
suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from moe_ep_bench.analysis.activated import mean_activated
from moe_ep_bench.analysis.fidelity import layers_apart
from moe_ep_bench.analysis.load import Case, Comparison, ResultsError, Run, is_whole, load_run
from moe_ep_bench.analysis.parts import Described, described, read_document
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.sweep import key_words
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.analysis.whole import WholeComparison, analyse_whole, moe_time_us, slowest_us
from moe_ep_bench.analysis.words import mode_words
from moe_ep_bench.files import inside
from moe_ep_bench.papers.claims import (
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
from moe_ep_bench.timing.statistics import estimate_median, paired_ratios

# What the paper measured, where ours is a layer, a pass, or a pass's MoE layers.
_OF = {
    "layer": {
        "layer": "",
        "end_to_end": ", end to end (ours: a layer)",
        "not_stated": ", layer or end to end not stated (ours: a layer)",
    },
    "end_to_end": {
        "end_to_end": ", end to end",
        "not_stated": ", layer or end to end not stated (ours: end to end)",
    },
    "layers": {
        "layer": ", layers",
        "end_to_end": ", end to end (ours: all MoE layers)",
        "not_stated": ", layer or end to end not stated (ours: all MoE layers)",
    },
}
_NEEDED = ("found", "value", "fullest_expert", "fullest_rank")
# Columns for people alone.
NOT_IN_CSV = ("number", "comparison_id", "claim", "case", "paper", "unmeasured", "primary_because")


class _WrittenClaim(Claim):
    """A claim of a results directory: its policies are words, for making them would run files that it names."""

    policy: dict[str, Any] | None = None
    versus: dict[str, Any] | None = None


class _Needed(Described):  # ``papers.needed_skew``
    placement: Literal[*PLACEMENTS]
    found: bool
    value: float | None
    fullest_expert: float | None
    fullest_rank: float | None


class _Entry(Described):
    comparison_id: str
    case_id: str
    versus_id: str | None
    traffic: str | None
    primary: bool = False


class _Written(Described):  # ``papers.run``
    claim: _WrittenClaim
    policy: str
    policy_params: dict[str, Any]
    label: str
    versus: str | None
    others: dict[str, Any]
    primary_because: str | None = None
    entries: list[_Entry]
    needed: list[_Needed]
    needed_tokens_per_rank: int | None


class _ClaimsFile(Described):
    claims: list[_Written]
    solved_on: str | None


@dataclass(frozen=True, eq=False)
class Claims:
    """A results directory with its claims.

    Attributes:
        frame: a row per claim, policy and traffic. ``number`` counts claims x policies; ``claim``, ``case`` and
            ``paper`` are words; ``ours`` is by the claim's metric, ``ours_low`` and ``ours_high`` the ends of its
            interval (of its samples where batches are too few, and itself where it has neither); ``difference`` from
            the paper's; ``unmeasured`` the reason where there is no ``ours``; ``needed_*`` see
            ``papers.needed_skew``; ``moe_speedup_needed`` see ``needed_moe_speedup``; ``peak_at_most`` and
            ``gain_at_most`` see ``papers.claims``. ``primary``: the traffic that was chosen beforehand, the first where
            none was; ``draws`` that were measured and averaged, their least and largest as ``ours_low``, ``ours_high``.
        comparisons: those that were measured, by id; ``wholes`` the same as whole models, empty of layers.
        solved_on: device that was modelled to find needed skews; None without any.
        solved_tokens: tokens a rank for which they were found.
    """

    directory: Path
    run: Run
    frame: pd.DataFrame
    comparisons: dict[str, ComparisonResult]
    wholes: dict[str, WholeComparison]
    solved_on: str | None
    solved_tokens: int | None

    @property
    def is_whole(self) -> bool:
        """Whether ours are whole models, not layers."""
        return self.run.scope == "model"

    @property
    def measured(self) -> pd.DataFrame:
        return self.frame[self.frame["ours"].notna()]


def load_claims(directory: Path) -> Claims:
    """Read what ``papers`` left.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    path = inside(directory, claims_path(directory))
    if not path.is_file():
        raise ResultsError(f"{path}: missing; a directory with claims is one that `papers` has written")
    content = described(_ClaimsFile, path, "", read_document(path))
    written = content.claims
    run = load_run(directory, whole=is_whole(directory))
    wholes = dict(zip(run.comparisons, analyse_whole(run), strict=True)) if run.scope == "model" else {}
    comparisons = {name: one.comparison for name, one in wholes.items()}
    comparisons = comparisons or dict(zip(run.comparisons, analyse(run), strict=True))
    try:
        rows = [
            {"number": number, **row, "needed_device": content.solved_on if one.needed else None}
            for number, one in enumerate(written, start=1)
            for row in _rows(one, run, comparisons, wholes)
        ]
        frame = pd.DataFrame(rows).astype(dict.fromkeys(_NUMBERS, float))  # NaN where there is none
        frame = _over_draws(frame, {n: one.claim for n, one in enumerate(written, start=1)})
        about = list(dict.fromkeys(frame["comparison_id"][frame["ours"].notna()]))
        tokens = {one.needed_tokens_per_rank for one in written} - {None}
    except KeyError as error:
        raise ResultsError(f"{path}: of another run than run.json, or damaged: {error!r}"[:300]) from None
    return Claims(
        directory,
        run,
        frame,
        {name: comparisons[name] for name in about},
        {name: wholes[name] for name in about if name in wholes},
        content.solved_on,
        max(tokens, default=None),
    )


_MEANS = (
    *("ours", "dropped_share", "ours_extrapolated_to_all_layers", "fullest_expert", "fullest_rank"),
    "moe_speedup_needed",
)
_NUMBERS = ("paper_low", "paper_high", "ours_low", "ours_high", "difference", *_MEANS)


def _over_draws(frame: pd.DataFrame, claims: dict[int, Claim]) -> pd.DataFrame:
    """A row per claim and traffic: means over its draws that were measured, and which traffic is primary."""
    merged = []
    for (number, _), draws in frame.groupby(["number", "traffic"], sort=False):
        measured = draws[draws["ours"].notna()]
        draws = measured if len(measured) else draws.iloc[:1]
        row = draws.iloc[0].copy()
        row["draws"] = len(draws)
        if len(draws) > 1:
            row[list(_MEANS)] = draws[list(_MEANS)].mean()
            row["ours_low"], row["ours_high"] = draws["ours"].min(), draws["ours"].max()
            row["difference"] = math.nan if math.isnan(row["ours"]) else claims[number].difference(row["ours"])
        merged.append(row)
    frame = pd.DataFrame(merged).astype({"draws": int, **dict.fromkeys(_NUMBERS, float)}).infer_objects()
    chosen = frame.groupby("number")["primary"].transform("any")
    frame["primary"] = frame["primary"].where(chosen, ~frame.duplicated("number")).astype(bool)
    return frame.reset_index(drop=True)


def _rows(
    written: _Written,
    run: Run,
    comparisons: dict[str, ComparisonResult],
    wholes: dict[str, WholeComparison],
) -> Iterator[dict[str, Any]]:
    """Rows of ``Claims.frame`` for one claim of one policy, a row for each traffic."""
    claim = written.claim
    ours_of = "layer" if run.scope != "model" else "end_to_end" if claim.metric in PASS_METRICS else "layers"
    others = ", ".join(f"{key_words(key)} {value}" for key, value in written.others.items())
    label, versus = written.label, written.versus
    needed = {one.placement: one for one in written.needed}
    for entry in written.entries:
        name = entry.comparison_id
        comparison, whole = comparisons[name], wholes.get(name)
        facts, native = comparison.comparison, comparison.of_role("baseline")
        cases = {result.case.case_id: result for result in comparison.results}
        case = cases[entry.case_id]
        against = cases[entry.versus_id] if entry.versus_id else native
        is_measured = case.case.is_ok and against is not None and against.case.is_ok
        value = _value(claim, case, against, facts) if is_measured and case.fidelity is not None else None
        low, high = claim.paper or (None, None)
        yield {
            "comparison_id": name,
            "claim": claim.source + _OF[ours_of][claim.of] + (f" ({others})" if others and not claim.where else ""),
            "case": f"{label} against {versus}" if versus else label,
            "paper": paper_words(claim),
            "source": claim.source,
            "of": claim.of,
            "ours_of": ours_of,
            "metric": claim.metric,
            "policy": label,
            "versus": versus,
            "comparison": facts.title,
            "traffic": entry.traffic or facts.title.rsplit(", ", 1)[-1],
            "primary": entry.primary,
            "primary_because": written.primary_because,
            "paper_low": low,
            "paper_high": high,
            **dict(zip(("ours", "ours_low", "ours_high"), value or (None,) * 3, strict=True)),
            "difference": value and claim.difference(value[0]),
            "ours_extrapolated_to_all_layers": value and whole and _all_layers_value(claim, case, against, whole),
            "dropped_share": value and case.fidelity and case.fidelity.dropped_share,
            "fullest_expert": native and native.fidelity and native.fidelity.fullest_expert,
            "fullest_rank": native and native.fidelity and native.fidelity.fullest_rank,
            **{
                f"needed_{placement}_{column}": getattr(needed[placement], column) if placement in needed else None
                for placement in PLACEMENTS
                for column in _NEEDED
            },
            "mode": mode_words(run, facts),
            "device": facts.device or run.device_name,
            "links": facts.links,
            "note": claim.note.strip(),
            "unmeasured": None if value else case.case.reason or "it or what it is set against was not measured",
            "moe_speedup_needed": needed_moe_speedup(claim, native_share(whole)) if value and whole else None,
            **_bounds(claim, written, facts),
        }


def _value(
    claim: Claim, case: CaseResult, against: CaseResult | None, facts: Comparison
) -> tuple[float, float, float] | None:
    """Value, low and high by the claim's metric; None where it was not measured."""
    assert case.fidelity is not None
    assert against is not None
    metric = claim.metric
    if metric in OWN_METRICS:
        return (case.fidelity.dropped_share if metric == "dropped_fraction" else case.fidelity.retained_mass,) * 3
    if metric.endswith("activated_experts"):
        ours, native = (_activated(one.case, facts) for one in (case, against))
        if ours is None or not native:  # A placement that is not ours to count, or no tokens.
            return None
        return (native if metric in NATIVE_METRICS else ours / native,) * 3
    if metric == "imbalance_cut":
        assert against.fidelity is not None
        return (against.fidelity.fullest_expert / case.fidelity.fullest_expert,) * 3
    if metric in PHASE_METRICS:
        group = PHASE_METRICS[metric]
        if case.breakdown is None or against.breakdown is None or not against.breakdown.group_ms[group]:
            return None
        return (case.breakdown.group_ms[group] / against.breakdown.group_ms[group],) * 3
    if metric == "moe_speedup" and (slowest_us(case.case) is None or slowest_us(against.case) is None):
        return None
    time_us = moe_time_us if metric == "moe_speedup" else layer_time_us
    ours_us, against_us = time_us(case.case), time_us(against.case)
    if metric == "native_layer_us":
        found = estimate_median(against_us)
    elif metric in ("layer_time", "step_time"):
        found = estimate_median(paired_ratios(ours_us, against_us))
    else:
        found = estimate_median(paired_ratios(against_us, ours_us))
    return None if found is None else (found.median, found.low, found.high)


def _activated(case: Case, facts: Comparison) -> float | None:
    """Of the rank that activates most, mean over batches and layers."""
    return mean_activated(replace(case, routing=layers_apart(case.routing)), facts)


def _all_layers_value(
    claim: Claim, case: CaseResult, against: CaseResult | None, whole: WholeComparison
) -> float | None:
    """The value of a whole pass, extrapolated to all layers; None where all were built, or it is of no pass."""
    times_ms = {one.result.case.case_id: one.all_layers_ms for one in whole.results}
    ours_ms, against_ms = (times_ms[one.case.case_id] if one else None for one in (case, against))
    if claim.metric not in PASS_METRICS or ours_ms is None or against_ms is None:
        return None
    return ours_ms / against_ms if claim.metric == "step_time" else against_ms / ours_ms


def native_share(whole: WholeComparison) -> float | None:
    """The MoE layers' share of native's pass."""
    return next((one.moe_share for one in whole.results if one.result.case.role == "baseline"), None)


def needed_moe_speedup(claim: Claim, share: float | None) -> float | None:
    """How much faster MoE layers must be for a paper's number; infinity where no speed of theirs gives it.

    Args:
        share: of native's pass, f; None where it was not measured.

    Returns:
        None without ``share``, and where the claim is not about a whole pass over native's, or has no number.
    """
    if claim.metric not in PASS_METRICS or claim.number is None or claim.versus is not None or share is None:
        return None
    pass_share = claim.number if claim.metric == "step_time" else 1 / claim.number
    left = pass_share - (1 - share)
    return share / left if left > 0 else math.inf


def _bounds(claim: Claim, written: _Written, facts: Comparison) -> dict[str, float | None]:
    """What Token Drop's published share of dropped pairs bounds, where each rank has one expert."""
    factor, dropped = written.policy_params.get("capacity_factor"), claim.number
    is_bound = claim.metric == "dropped_fraction" and written.policy == "token_drop" and factor
    if not is_bound or dropped is None or facts.num_experts != facts.num_ranks:
        return {"peak_at_most": None, "gain_at_most": None}
    arguments = dropped, factor, facts.num_experts
    return {"peak_at_most": most_peak(*arguments), "gain_at_most": most_gain(*arguments)}


def paper_words(claim: Claim) -> str:
    """The number, ``above`` or ``below`` one, or from one to another."""
    if claim.paper is None:
        return "not stated"
    low, high = (None if end is None else number_words(claim.metric, end) for end in claim.paper)
    if low is None or high is None:
        return f"below {high}" if low is None else f"above {low}"
    return low if low == high else f"{low} to {high}"


def number_words(metric: str, value: float) -> str:
    """A value by a claim's metric, with its unit where it is a share."""
    if metric in OWN_METRICS:
        return f"{100 * value:.1f} %"
    return f"{value:.1f}" if metric in NATIVE_METRICS else f"{value:.2f}"
