"""Turn a results directory into frames: a row per case with its speedup and what it costs, or a row per sample.

``speedups`` holds layers and whole models alike. Of a whole model a case's time is a pass and its speedup is from end
to end; the columns from ``moe_ms`` on say what its MoE layers have to do with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.activated import activated_by_case
from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.analysis.whole import PASS_PARTS, WholeComparison, WholeResult, analyse_whole
from moe_ep_bench.timing.statistics import Estimate, estimate_median, paired_ratios

# Roles that have no verdict of their own.
_ROLE_VERDICTS = {"baseline": "baseline", "noise": "noise floor"}


@lru_cache(maxsize=2)
def speedups(run: Run) -> pd.DataFrame:
    """A row per case of every comparison, in reading order; empty where there is nothing. Not to be written to.

    Columns: what the case is (``comparison_id`` to ``reason``); ``median_ms``, ``p90_ms``, ``p99_ms`` of the slowest
    rank; ``speedup_*`` over native and ``over_topk_*`` over the policy topk, which runs the same code as the other
    policies (median, low, high, is_interval); ``floor_low``, ``floor_high``, the noise floor; ``verdict``;
    ``detectable``, the smallest speedup that would be called; the routing's cost (``dropped_share``,
    ``retained_mass``, ``output_error``) and loads; times by phase group; rates; how steady the times were.
    """
    if run.scope == "model":
        of_models = analyse_whole(run)
        rows = [
            _common(run, one.comparison, each.result) | _of_model(one, each) | _steadiness(each.result)
            for one in of_models
            for each in one.results
        ]
    else:
        rows = [
            _common(run, comparison, result) | _of_layer(result) | _steadiness(result)
            for comparison in analyse(run)
            for result in comparison.results
        ]
    frame = pd.DataFrame(rows)
    topk = frame["case_id"].where((frame["policy"] == "topk") & (frame["role"] == "policy"))
    frame = frame.assign(topk=topk.groupby(frame["comparison_id"]).transform("first"))
    times_us = {case.case_id: layer_time_us(case) for case in run.cases if case.is_ok}
    over = [_over_topk(times_us, one, other) for one, other in zip(frame["topk"], frame["case_id"], strict=True)]
    place = int(frame.columns.get_loc("speedup_num_launches")) + 1
    for name in ("is_interval", "high", "low", "median"):
        frame.insert(place, f"over_topk_{name}", [getattr(estimate, name, None) for estimate in over])
    return frame.drop(columns="topk").astype({"speedup_num_launches": "Int64"})


def _over_topk(times_us: dict[str, pd.Series], topk: str | None, case_id: str) -> Estimate | None:
    if topk not in times_us or case_id not in times_us or topk == case_id:
        return None
    return estimate_median(paired_ratios(times_us[topk], times_us[case_id]))


def _common(run: Run, comparison: ComparisonResult, result: CaseResult) -> dict[str, Any]:
    """What a case is, its time, its speedup and what it drops and keeps."""
    case, facts = result.case, comparison.comparison
    row: dict[str, Any] = {
        "comparison_id": case.comparison_id,
        "case_id": case.case_id,
        "mode": "modelled" if facts.device is not None else run.mode,
        "scope": run.scope,
        "title": facts.title,
        "model": facts.model,
        "scale": facts.scale,
        "device": run.device_name,
        "num_ranks": facts.num_ranks,
        "num_tokens": facts.num_tokens,
        "num_batches": facts.num_batches,
        "dtype": facts.dtype,
        "point": _json(facts.point),
        "policy": case.policy,
        "policy_params": _json(case.policy_params),
        "label": case.label,
        "role": case.role,
        "status": case.status,
        "reason": case.reason,
    }
    row |= {name: getattr(result.layer, name, None) for name in ("median_ms", "p90_ms", "p99_ms")}
    of_speedup = ("median", "low", "high", "is_interval", "num_launches")
    row |= {f"speedup_{name}": getattr(result.speedup, name, None) for name in of_speedup}
    row |= {f"floor_{end}": getattr(comparison.floor, end, None) for end in ("low", "high")}
    verdict = _ROLE_VERDICTS.get(case.role, result.verdict) if case.is_ok else None
    row |= {"verdict": verdict, "detectable": result.detectable}
    of_fidelity = ("dropped_share", "retained_mass", "output_error", "fullest_expert", "fullest_rank")
    row |= {name: getattr(result.fidelity, name, None) for name in of_fidelity}
    return row | {"activated_fullest_rank": activated_by_case(comparison).get(case.case_id)}


def _of_layer(result: CaseResult) -> dict[str, Any]:
    of_breakdown = ("slowest_phase", "unaccounted_share", "policy_share", "layer_ms")
    row = {f"breakdown_{name}": getattr(result.breakdown, name, None) for name in of_breakdown}
    groups = {} if result.breakdown is None else result.breakdown.group_ms
    row |= {f"{name}_ms": time_ms for name, time_ms in groups.items()}
    of_rates = (
        *("crossing_pair_bytes", "crossing_copy_bytes", "dispatch_gbps", "dispatch_bus_gbps", "combine_gbps"),
        *("combine_bus_gbps", "experts_tflops", "experts_of_matmul", "experts_of_copy"),
    )
    return row | {name: getattr(result.rates, name, None) for name in of_rates}


def _of_model(one: WholeComparison, each: WholeResult) -> dict[str, Any]:
    facts = one.comparison.comparison
    assert facts.whole is not None
    parts_ms = each.parts_ms or {}
    row = {name: getattr(facts.whole, name) for name in ("num_layers", "of_layers", "context_length")}
    row |= {"moe_ms": each.moe_ms, "moe_share": each.moe_share}
    of_speedup = ("median", "low", "high", "is_interval")
    row |= {f"moe_speedup_{name}": getattr(each.moe_speedup, name, None) for name in of_speedup}
    row |= {"by_amdahl": each.expected, "most_by_amdahl": one.most}
    row |= {"policy_ms": each.policy_ms, "tokens_per_s": each.tokens_per_s}
    row |= {"tokens_per_s_per_rank": each.tokens_per_s and each.tokens_per_s / facts.world_size}
    row |= {f"mean_rank_{part}_ms": parts_ms.get(part) for part in PASS_PARTS}
    return row | {"all_layers_ms_extrapolated": each.all_layers_ms, "speedup_extrapolated": each.all_layers_speedup}


def _steadiness(result: CaseResult) -> dict[str, Any]:
    """How steady a case's times were."""
    return {
        "probe_overhead": result.probe_overhead,
        "host_bound_share": result.host_bound_share,
        "drift": result.drift,
        "outlier_share": getattr(result.outliers, "share", None),
    }


def samples(run: Run, cases: Sequence[Case]) -> pd.DataFrame:
    """A row per case, launch, rank, batch, iteration, kind, phase and, of a whole model, layer."""
    frames = []
    for case in cases:
        if not case.is_ok:
            continue
        rows = case.timings
        if run.scope == "model":
            # Sums over layers give way to the layers' own.
            layers = case.layers if case.layers is not None else rows.iloc[:0].assign(layer=pd.NA)
            rows = rows[~rows["phase"].isin(set(layers["phase"]))].assign(layer=pd.NA)
            parts = [part.astype({"layer": "Int32"}) for part in (rows, layers[list(rows.columns)]) if len(part)]
            rows = pd.concat(parts, ignore_index=True)
        more = ["layer"] if run.scope == "model" else []
        rows = rows.sort_values(["launch", "batch", "iteration", "kind", "rank", *more, "phase"])
        about = {"comparison_id": case.comparison_id, "case_id": case.case_id, "role": case.role}
        about |= {"policy": case.policy, "policy_params": _json(case.policy_params), "label": case.label}
        about |= {"mode": "modelled" if run.comparisons[case.comparison_id].device is not None else run.mode}
        frames.append(pd.concat([pd.DataFrame(about, index=rows.index), rows], axis=1))
    return pd.concat(frames, ignore_index=True)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
