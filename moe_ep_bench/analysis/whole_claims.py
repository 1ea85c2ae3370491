"""Claims of whole models: what of a pass is set beside a paper's number, and what its MoE layers would need for it.

A pass gains less than its MoE layers. With their share f of native's pass, a paper's n from end to end takes MoE layers
that are f / (1 / n - (1 - f)) times as fast (Amdahl, AFIPS 1967); from 1 / (1 - f) on nothing that MoE layers do
suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from moe_ep_bench.analysis.activated import mean_activated
from moe_ep_bench.analysis.fidelity import layers_apart
from moe_ep_bench.analysis.load import Case, Comparison
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.analysis.whole import WholeComparison, WholeResult, moe_time_us
from moe_ep_bench.analysis.words import NONE, percent
from moe_ep_bench.papers.claims import PASS_METRICS, Claim
from moe_ep_bench.timing.statistics import estimate_median, paired_ratios


def whole_value(
    claim: Claim, ours: WholeResult, against: WholeResult, facts: Comparison
) -> tuple[float, float, float] | None:
    """Value, low and high by the claim's metric; None where it was not measured."""
    if claim.metric in PASS_METRICS:
        return _ratio(claim, layer_time_us(ours.result.case), layer_time_us(against.result.case))
    if claim.metric == "moe_speedup":
        if ours.moe_ms is None or against.moe_ms is None:
            return None
        return _ratio(claim, moe_time_us(ours.result.case), moe_time_us(against.result.case))
    if claim.metric == "activated_experts":
        shares = [_activated(one.result.case, facts) for one in (ours, against)]
        if shares[0] is None or not shares[1]:
            return None
        return (shares[0] / shares[1],) * 3
    found = ours.result.fidelity
    assert found is not None
    return (found.dropped_share if claim.metric == "dropped_fraction" else found.retained_mass,) * 3


def _ratio(claim: Claim, ours_us: pd.Series, against_us: pd.Series) -> tuple[float, float, float] | None:
    pair = (ours_us, against_us) if claim.metric == "step_time" else (against_us, ours_us)
    found = estimate_median(paired_ratios(*pair))
    return None if found is None else (found.median, found.low, found.high)


def all_layers_value(claim: Claim, ours: WholeResult, against: WholeResult) -> float | None:
    """The value of a whole pass, extrapolated to all layers; None where all were built, or it is of no pass."""
    if claim.metric not in PASS_METRICS or ours.all_layers_ms is None or against.all_layers_ms is None:
        return None
    speedup = against.all_layers_ms / ours.all_layers_ms
    return 1 / speedup if claim.metric == "step_time" else speedup


def _activated(case: Case, facts: Comparison) -> float | None:
    """Of the rank that activates most, mean over batches and layers."""
    return mean_activated(replace(case, routing=layers_apart(case.routing)), facts)


def needed_moe_speedup(claim: Claim, share: float) -> float | None:
    """How much faster MoE layers must be for a paper's number; None where no speed of theirs gives it.

    Args:
        share: of native's pass, f.

    Raises:
        ValueError: the claim is not about a whole pass, or has no number.
    """
    if claim.metric not in PASS_METRICS or claim.number is None:
        raise ValueError(f"claims: expected a number of a whole pass, got {claim.metric} {claim.paper}")
    pass_share = claim.number if claim.metric == "step_time" else 1 / claim.number
    left = pass_share - (1 - share)
    return share / left if left > 0 else None


def needed_cell(claim: Claim, wholes: Sequence[WholeComparison | None]) -> str:
    """``needed_moe_speedup`` under each traffic; dashes where nothing was measured, or native is not the other side."""
    if claim.metric not in PASS_METRICS or claim.number is None or claim.versus is not None:
        return NONE
    return " / ".join(_needed_words(claim, None if one is None else _native_share(one)) for one in wholes)


def _needed_words(claim: Claim, share: float | None) -> str:
    if share is None:
        return NONE
    needed = needed_moe_speedup(claim, share)
    return "not reachable" if needed is None else f"{needed:.2f}"


NEEDED_HEADER = "MoE speedup needed"
NEEDED_WORDS = (
    "MoE speedup needed: by Amdahl's law, f / (1 / n - (1 - f)) with the MoE layers' share f of native's pass under"
    " each traffic and the paper's n. No skew is looked for with whole models: which one gives a number is asked of"
    " layers (configs/papers/)."
)


def share_cells(whole: WholeComparison) -> list[str]:
    """The MoE layers' share of native's pass in percent, and what no policy exceeds."""
    share = _native_share(whole)
    return [NONE, NONE] if share is None or whole.most is None else [percent(share), f"{whole.most:.2f}"]


SHARE_HEADER = ["MoE share %", "at most"]


def _native_share(whole: WholeComparison) -> float | None:
    return next((one.moe_share for one in whole.results if one.result.case.role == "baseline"), None)
