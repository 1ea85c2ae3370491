"""Turn a run into frames: a row per case with its speedup and what it costs, or a row per sample.

``speedups`` holds layers and whole models alike. Of a whole model a case's time is a pass and its speedup is from end
to end; the columns from ``num_layers`` on say what its MoE layers have to do with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.activated import activated_by_case
from moe_ep_bench.analysis.load import Case, Comparison, Run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.timing import Rates, layer_time_us
from moe_ep_bench.analysis.whole import PASS_PARTS, WholeComparison, WholeResult, analyse_whole
from moe_ep_bench.analysis.words import model_name, origin
from moe_ep_bench.timing.statistics import estimate_median, paired_ratios

# Roles that have no verdict of their own.
_ROLE_VERDICTS = {"baseline": "baseline", "noise": "noise floor"}
_ESTIMATE = ("median", "low", "high", "is_interval")
_FIDELITY = (
    "dropped_share", "retained_mass", "output_error", "fullest_expert", "fullest_rank", "below_frontier",
    "below_frontier_experts",
)  # fmt: skip
_BREAKDOWN = ("slowest_phase", "unaccounted_share", "policy_share", "layer_ms")


@lru_cache(maxsize=2)
def speedups(run: Run) -> pd.DataFrame:
    """A row per case of every comparison, in reading order; empty where there is nothing. Not to be written to.

    Columns: what the case is (``comparison_id`` to ``reason``; ``device`` is the modelled one where nothing ran,
    ``links`` the modelled ones, ``peak_load`` what was asked of a synthetic workload, ``fits`` whether the model
    fits the device's memory); ``median_ms``, ``p90_ms``, ``p99_ms`` of the slowest rank; ``speedup_*`` over native
    and ``over_topk_*`` over the policy topk, which runs the same code as the other policies (median, low, high,
    is_interval); ``floor_low``, ``floor_high``, the noise floor; ``verdict``; ``detectable``, the smallest speedup
    that would be called; the routing's cost (``dropped_share``, ``retained_mass``, ``output_error``) and loads, over
    native's mean (``fullest_expert``, ``fullest_rank``); times by phase group; rates; how steady the times were.
    """
    if run.scope == "model":
        rows = [
            common | _of_model(one, each) | _steadiness(each.result)
            for one in analyse_whole(run)
            for common, each in zip(_common(run, one.comparison), one.results, strict=True)
        ]
    else:
        rows = [
            common | _of_layer(one.comparison, result) | _steadiness(result)
            for one in analyse(run)
            for common, result in zip(_common(run, one), one.results, strict=True)
        ]
    return pd.DataFrame(rows).astype({"speedup_num_launches": "Int64"})


def _values(prefix: str, source: object, names: Iterable[str]) -> dict[str, Any]:
    """Attributes as columns; none where there is no source."""
    return {f"{prefix}{name}": getattr(source, name, None) for name in names}


def _common(run: Run, one: ComparisonResult) -> list[dict[str, Any]]:
    """What each case is, its time, its speedup and what it drops and keeps."""
    topk = next((other.case for other in one.policies if other.case.policy == "topk"), None)
    activated = activated_by_case(one)
    return [_of_case(run, one, result, topk, activated.get(result.case.case_id)) for result in one.results]


def _of_case(
    run: Run, one: ComparisonResult, result: CaseResult, topk: Case | None, activated: float | None
) -> dict[str, Any]:
    case, facts, over_topk = result.case, one.comparison, None
    if topk is not None and case is not topk and case.is_ok:
        over_topk = estimate_median(paired_ratios(layer_time_us(topk), layer_time_us(case)))
    return {
        "comparison_id": case.comparison_id,
        "case_id": case.case_id,
        "mode": _mode(run, case),
        "scope": run.scope,
        **_values("", facts, ("title", "model", "scale")),
        "device": model_name(facts.device) or run.device_name,
        "links": model_name(facts.links),
        **_values("", facts, ("transport", "dispatch_dtype") if facts.links else ()),
        "ep_size": facts.num_ranks,
        **_values("", facts, ("num_ranks", "num_tokens", "num_batches", "dtype")),
        "peak_load": facts.workload.targets.get("peak_load"),
        "seed": facts.workload.seed,
        "fits": facts.fit and facts.fit.holds(case.extra_bytes_per_rank or 0),
        "point": _json(facts.point),
        "policy": case.policy,
        "policy_params": _json(case.policy_params),
        **_values("", case, ("label", "role", "status", "reason")),
        **_values("", result.layer, ("median_ms", "p90_ms", "p99_ms")),
        **_values("speedup_", result.speedup, (*_ESTIMATE, "num_launches")),
        **_values("over_topk_", over_topk, _ESTIMATE),
        **_values("floor_", one.floor, ("low", "high")),
        "verdict": _ROLE_VERDICTS.get(case.role, result.verdict) if case.is_ok else None,
        "detectable": result.detectable,
        **_values("", result.fidelity, _FIDELITY),
        "activated_fullest_rank": activated,
    }


def _of_layer(facts: Comparison, result: CaseResult) -> dict[str, Any]:
    groups_ms = {} if result.breakdown is None else result.breakdown.group_ms
    known = facts.rest is not None and result.layer is not None
    pass_ms = facts.rest.pass_ms(result.layer.median_ms) if known else None
    return {
        "pass_ms": pass_ms,
        "tokens_per_s_per_rank": pass_ms and facts.num_tokens / facts.world_size / pass_ms * 1e3,
        **_values("breakdown_", result.breakdown, _BREAKDOWN),
        **{f"{name}_ms": time_ms for name, time_ms in groups_ms.items()},
        **_values("", result.rates, (field.name for field in fields(Rates))),
    }


def _of_model(one: WholeComparison, each: WholeResult) -> dict[str, Any]:
    facts, parts_ms = one.comparison.comparison, each.parts_ms or {}
    return {
        **_values("", facts.whole, ("num_layers", "of_layers", "context_length")),
        **_values("", each, ("moe_ms", "moe_share")),
        **_values("moe_speedup_", each.moe_speedup, _ESTIMATE),
        "by_amdahl": each.expected,
        "most_by_amdahl": one.most,
        **_values("", each, ("policy_ms", "tokens_per_s")),
        "tokens_per_s_per_rank": each.tokens_per_s and each.tokens_per_s / facts.world_size,
        **{f"mean_rank_{part}_ms": parts_ms.get(part) for part in PASS_PARTS},
        "all_layers_ms_extrapolated": each.all_layers_ms,
        "speedup_extrapolated": each.all_layers_speedup,
    }


def _steadiness(result: CaseResult) -> dict[str, Any]:
    """How steady a case's times were."""
    values = _values("", result, ("probe_overhead", "host_bound_share", "drift"))
    return values | {"outlier_share": getattr(result.outliers, "share", None)}


def samples(run: Run, cases: Sequence[Case]) -> pd.DataFrame:
    """A row per case, launch, rank, batch, iteration, kind, phase and, of a whole model, layer."""
    is_model, frames = run.scope == "model", []
    for case in cases:
        if not case.is_ok:
            continue
        rows = case.timings
        if is_model:
            # Sums over layers give way to the layers' own.
            layers = case.layers if case.layers is not None else rows.iloc[:0].assign(layer=pd.NA)
            rows = rows[~rows["phase"].isin(set(layers["phase"]))].assign(layer=pd.NA)
            parts = [part.astype({"layer": "Int32"}) for part in (rows, layers[list(rows.columns)]) if len(part)]
            rows = pd.concat(parts, ignore_index=True)
        order = ["launch", "batch", "iteration", "kind", "rank", *(["layer"] if is_model else []), "phase"]
        rows = rows.sort_values(order)
        about = _values("", case, ("comparison_id", "case_id", "role", "policy"))
        about |= {"policy_params": _json(case.policy_params), "label": case.label, "mode": _mode(run, case)}
        frames.append(pd.concat([pd.DataFrame(about, index=rows.index), rows], axis=1))
    return pd.concat(frames, ignore_index=True)


def _mode(run: Run, case: Case) -> str:
    facts = run.comparisons[case.comparison_id]
    return run.mode if facts.device is None else origin(run, facts)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
