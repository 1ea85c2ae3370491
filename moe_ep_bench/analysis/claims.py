"""Papers' numbers beside ours, as ``papers`` left them; claims_text.py prints them, claims_report.py draws them.

One row for each claim and policy; its columns are what the same layer gives under each traffic, or the same whole model
(``scope: model``). One of the two is ours, by the device and links that stand above the table, and where the paper
measured the other its row says so. A paper's number that is not at hand stays empty, and no row is left out because it
does not fit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe_ep_bench.analysis.activated import mean_activated
from moe_ep_bench.analysis.fidelity import Fidelity
from moe_ep_bench.analysis.load import ResultsError, Run, is_whole, load_run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.sweep import key_words
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.analysis.whole import WholeComparison, analyse_whole
from moe_ep_bench.analysis.whole_claims import (
    all_layers_value,
    whole_value,
)
from moe_ep_bench.papers.claims import (
    PHASE_METRICS,
    Claim,
    claims_path,
)
from moe_ep_bench.timing.statistics import estimate_median, paired_ratios


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
    """See ``papers.needed_skew``."""

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
    """Read what ``papers`` left.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    path = claims_path(directory)
    try:
        content = json.loads(path.read_text())
        rows = content["claims"]
    except OSError:
        raise ResultsError(f"{path}: missing; a directory with claims is one that `papers` has written") from None
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
    run = load_run(directory, whole=True)
    return run, dict(zip(run.comparisons, analyse_whole(run), strict=True))


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
