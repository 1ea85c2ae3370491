"""The frame that every table, figure and answer reads: a row per case, and rows per sample, batch and comparison.

``load`` gives a store of one or several directories; everything else is a function of it. Frames join on ``CASE``. A
directory of ``route`` has the columns of one of ``run``, without times; layers that were routed alike are one case
there. Speedup = native / case, both the slowest rank's time in the same (launch, batch, iteration); the estimate is the
median of these pairs (``timing.statistics``), and the verdict holds its interval against the noise floor of the same
comparison, which comes from native run a second time. Nothing in a frame is to be written to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.origins import device_words, file_of, how_words, origin_of, workload_words
from moe_ep_bench.analysis.reduce import (
    ITERATION,
    PASS_PARTS,
    ROUTED,
    all_layers_ms,
    breakdown,
    by_layer_ms,
    host_bound_share,
    joined_routing,
    layer_time_us,
    moe_time_us,
    probe_floor_us,
    rates,
    routing_means,
    slowest_us,
)
from moe_ep_bench.analysis.seeds import joined
from moe_ep_bench.analysis.store import Case, Comparison, Store, read_store
from moe_ep_bench.facts import ComparisonFacts, RoutedFacts, TimedFacts
from moe_ep_bench.schema import ALL, ATTENTION, LAYER_PHASES, MOE, REST, TOTAL
from moe_ep_bench.timing.statistics import (
    Estimate,
    NoiseFloor,
    drift,
    estimate_median,
    judge,
    minimum_detectable_effect,
    noise_floor,
    outliers,
    paired_ratios,
)
from moe_ep_bench.workload.formatting import tokens_words

COMPARISON = ["directory", "comparison_id"]
CASE = [*COMPARISON, "case_id"]
ESTIMATE = ("median", "low", "high", "is_interval")
# Of what nothing was timed they are null.
_TIMED = (
    *("median_ms", "p90_ms", "p99_ms"),
    *(f"speedup_{end}" for end in (*ESTIMATE, "num_launches")),
    *(f"over_topk_{end}" for end in ESTIMATE),
    *("floor_low", "floor_high", "verdict", "detectable"),
)
# Reading order: policies of the capacity-aware paper first, then by name.
_ROLE_ORDER = ("baseline", "noise", "policy", "replication", "ceiling")
_FIRST_POLICIES = ("topk", "token_drop", "expanded_drop")
# Roles that have no verdict of their own.
_ROLE_VERDICTS = {"baseline": "baseline", "noise": "noise floor"}
# What a policy costs; nothing of the ceiling, whose scores are not the model's.
_COSTS = ("dropped_share", "retained_mass", "output_error", "below_frontier", "below_frontier_experts")


def load(directories: Path | Sequence[Path], passed_over: list[str] | None = None, *, join_draws: bool = True) -> Store:
    """Read and check directories of times or of routing.

    Args:
        passed_over: gets a line for each file that cannot be trusted and is left out; None = the first is raised.
        join_draws: comparisons that differ in the seed of their traffic, or in its layer, become one; ``samples`` are
            of one seed each, so read them apart.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    store = read_store([directories] if isinstance(directories, Path) else directories, passed_over)
    return joined(store) if join_draws else store


# ---- a row per case --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def cases(store: Store) -> pd.DataFrame:
    """A row per case in reading order: baseline, noise, topk, policies, replication, ceiling.

    Columns: ``CASE``; those of ``comparisons`` but ``facts``; what the case is (``policy``, ``policy_params`` (JSON),
    ``label``, ``role``, ``status``, ``reason``, ``capacity_factor``, ``looks_past_top_k``, ``extra_gib_per_rank``,
    ``fits``, whether the model fits the device's memory; ``family``, the policy with every parameter but the capacity
    factor; ``family_label``, the same for people); ``median_ms``, ``p90_ms``, ``p99_ms`` of the slowest rank;
    ``speedup_*`` over native and ``over_topk_*`` over topk (median, low, high, is_interval); ``floor_low``,
    ``floor_high``; ``verdict``; ``detectable``, the smallest speedup that would be called; ``reduce.ROUTED`` and
    ``output_error``; of layers ``pass_ms``, ``reduce.breakdown`` and ``reduce.rates``;
    of whole models ``moe_*``, ``by_amdahl``, ``mean_rank_<part>_ms`` and extrapolations; ``probe_overhead``,
    ``host_bound_share``, ``drift``, ``outlier_share``, ``outlier_worst``.
    """
    means = routing_means(routing(store)).to_dict("index")
    rows = [row for comparison in store.comparisons for row in _rows(comparison, means)]
    frame = pd.DataFrame(rows)
    frame = frame.reindex(columns=list(dict.fromkeys([*frame, *_TIMED])))
    frame = frame.assign(**_families(frame)).astype({"speedup_num_launches": "Int64", "capacity_factor": float})
    return frame.merge(comparisons(store).drop(columns="facts"), on=COMPARISON, how="left", validate="m:1")


def _rows(comparison: Comparison, means: dict[tuple, dict[str, float]]) -> list[dict[str, Any]]:
    facts = comparison.facts
    listed = sorted(comparison.cases, key=_reading_order)
    rows = [_identity(comparison, case) | _routed(comparison, case, means) for case in listed]
    if isinstance(facts, RoutedFacts):
        return rows
    native = comparison.case_of("baseline")
    topk = next((case for case in listed if case.facts.policy == "topk" and case.is_ok), None)
    speedups = {case.case_id: _speedup(native, case) for case in listed}
    again = next((speedups[case.case_id] for case in listed if case.facts.role == "noise"), None)
    floor = None if again is None else noise_floor(again)
    conditions = [comparison.conditions[launch] for launch in sorted(comparison.conditions)]
    floor_us = probe_floor_us(facts, conditions)
    for case, row in zip(listed, rows, strict=True):
        row |= _times(case) | _values("speedup_", speedups[case.case_id], (*ESTIMATE, "num_launches"))
        row |= _values("over_topk_", _speedup(topk, case), ESTIMATE)
        row |= _verdict(case, facts, speedups[case.case_id], floor)
        row |= breakdown(case, floor_us)
        row |= _of_pass(case, facts, row) if facts.whole is None else _of_model(case, facts, row, native)
        row |= rates(case, facts, conditions)
        if "breakdown_layer_ms" in row and row["median_ms"] is not None and comparison.run.mode != "emulated":
            row["probe_overhead"] = row["breakdown_layer_ms"] / row["median_ms"] - 1
    return rows


def _reading_order(case: Case) -> tuple:
    facts = case.facts
    first = _FIRST_POLICIES.index(facts.policy) if facts.policy in _FIRST_POLICIES else len(_FIRST_POLICIES)
    factor = facts.policy_params.get("capacity_factor")
    return (
        _ROLE_ORDER.index(facts.role),
        first,
        _family(facts.policy, facts.policy_params),
        factor or 0.0,
        facts.label,
    )


def _key(comparison: Comparison, case: Case) -> dict[str, str]:
    """``CASE``, on which all frames join."""
    return dict(zip(CASE, (comparison.directory, comparison.comparison_id, case.case_id), strict=True))


def _identity(comparison: Comparison, case: Case) -> dict[str, Any]:
    facts, fit = case.facts, getattr(comparison.facts, "fit", None)
    factor = facts.policy_params.get("capacity_factor")
    return {
        **_key(comparison, case),
        "policy": facts.policy,
        "policy_params": json.dumps(facts.policy_params, sort_keys=True),
        "label": facts.label,
        "role": facts.role,
        "status": case.status,
        "reason": case.reason,
        "capacity_factor": None if factor is None else float(factor),
        "looks_past_top_k": facts.looks_past_top_k,
        "extra_gib_per_rank": facts.extra_bytes_per_rank and facts.extra_bytes_per_rank / 2**30,
        "fits": fit and fit.holds(facts.extra_bytes_per_rank or 0),
    }


def _routed(comparison: Comparison, case: Case, means: dict[tuple, dict[str, float]]) -> dict[str, Any]:
    values = _values("", means.get(tuple(_key(comparison, case).values())), (*ROUTED, "output_error"))
    return values | (dict.fromkeys(_COSTS) if case.facts.role == "ceiling" else {})


def _values(prefix: str, source: Any, names: Iterable[str]) -> dict[str, Any]:
    """Attributes, or values of a mapping, as columns; none where there is no source."""
    get = source.get if isinstance(source, dict) else lambda name: getattr(source, name, None)
    return {f"{prefix}{name}": get(name) for name in names}


def _speedup(native: Case | None, case: Case) -> Estimate | None:
    """Of the case over another; None of that itself, and where nothing pairs."""
    if native is None or native is case or not case.is_ok:
        return None
    return estimate_median(paired_ratios(layer_time_us(native), layer_time_us(case)))


def _times(case: Case) -> dict[str, Any]:
    """Quantiles of the layer's time, and how steady it was."""
    times_us = layer_time_us(case)
    if times_us.empty:
        return dict.fromkeys(("median_ms", "p90_ms", "p99_ms"))
    far = outliers(times_us)
    return {
        **dict(zip(("median_ms", "p90_ms", "p99_ms"), times_us.quantile([0.5, 0.9, 0.99]) / 1e3, strict=True)),
        "host_bound_share": host_bound_share(case),
        "drift": drift(times_us),
        "outlier_share": far.share,
        "outlier_worst": far.worst,
    }


def _verdict(case: Case, facts: TimedFacts, speedup: Estimate | None, floor: NoiseFloor | None) -> dict[str, Any]:
    modelled = facts.device is not None
    verdict = judge(speedup, floor, is_modelled=modelled, is_oversubscribed=facts.oversubscribed)
    detectable = minimum_detectable_effect(speedup, floor, is_modelled=modelled) if speedup and floor else None
    role_verdict = _ROLE_VERDICTS.get(case.facts.role, verdict)
    return {
        **_values("floor_", floor, ("low", "high")),
        "verdict": role_verdict if case.is_ok else None,
        "detectable": detectable,
    }


def _of_pass(case: Case, facts: TimedFacts, row: dict[str, Any]) -> dict[str, Any]:
    """What a layer comes to in a pass of its model, where the rest of it is stated."""
    if facts.rest is None or row["median_ms"] is None:
        return {}
    pass_ms = facts.rest.pass_ms(row["median_ms"])
    return {"pass_ms": pass_ms, "tokens_per_s_per_rank": facts.num_tokens / facts.world_size / pass_ms * 1e3}


def _of_model(case: Case, facts: TimedFacts, row: dict[str, Any], native: Case | None) -> dict[str, Any]:
    """What the MoE layers have to do with a pass, and what it would be with all layers."""
    assert facts.whole is not None
    about = _values("", facts.whole, ("num_layers", "of_layers", "context_length"))
    if row["median_ms"] is None:
        return about
    rate = facts.num_tokens / row["median_ms"] * 1e3
    about |= {"tokens_per_s": rate, "tokens_per_s_per_rank": rate / facts.world_size}
    times_us = slowest_us(case)
    if times_us is None:
        return about
    moe_us, speedup, share, all_speedup = moe_time_us(case), None, None, None
    all_ms = all_layers_ms(case, facts, row["median_ms"], row["breakdown_layer_ms"])
    if native is not None and not native.breakdown.index.empty:
        native_us = moe_time_us(native)
        share = float(native_us.sum() / slowest_us(native)[TOTAL].sum())
        speedup = estimate_median(paired_ratios(native_us, moe_us)) if case is not native else None
    if native is not None and native is not case and all_ms is not None and not native.breakdown.index.empty:
        native_ms = float(layer_time_us(native).median()) / 1e3
        native_all_ms = all_layers_ms(native, facts, native_ms, breakdown(native)["breakdown_layer_ms"])
        all_speedup = native_all_ms and native_all_ms / all_ms
    return about | {
        "moe_ms": float(moe_us.median()) / 1e3,
        "moe_share": float(moe_us.sum() / times_us[TOTAL].sum()),
        **_values("moe_speedup_", speedup, ESTIMATE),
        "by_amdahl": 1 / (1 - share + share / speedup.median) if speedup and share is not None else None,
        "most_by_amdahl": None if share is None else 1 / (1 - share),
        "policy_ms": float(times_us["policy"].median()) / 1e3,
        **{f"mean_rank_{part}_ms": time_ms for part, time_ms in case.breakdown.mean_ms(PASS_PARTS).items()},
        "all_layers_ms_extrapolated": all_ms,
        "speedup_extrapolated": all_speedup,
    }


# ---- families --------------------------------------------------------------------------------------------------------


def _parameters(params: dict[str, Any]) -> list[str]:
    """``key=value`` of what is set, all but the capacity factor."""
    return [f"{key}={value}" for key, value in sorted(params.items()) if key != "capacity_factor" and value is not None]


def _family(policy: str, params: dict[str, Any]) -> str:
    return " ".join([policy, *_parameters(params)])


def _families(rows: pd.DataFrame) -> dict[str, list[str | None]]:
    """``family`` of policies, and ``family_label``: the case's label, which also tables show, without the factor.

    That is the policy and those parameters that are not at their defaults. Where it names two families alike,
    parameters that tell them apart are added.
    """
    known = [(policy, json.loads(params)) for policy, params in zip(rows["policy"], rows["policy_params"], strict=True)]
    families = [_family(*case) if role == "policy" else None for case, role in zip(known, rows["role"], strict=True)]
    first = {family: place for place, family in reversed(list(enumerate(families))) if family is not None}
    short = {}
    for family, place in first.items():
        label, (policy, params) = rows["label"].iloc[place], known[place]
        named = [(label.find(f" {words}"), words) for words in _parameters(params)]
        short[family] = " ".join([policy, *(words for at, words in sorted(named) if at >= 0)])
    labels = dict(short)
    for family, place in first.items():
        if list(short.values()).count(short[family]) > 1:
            policy, params = known[place]
            others = [set(_parameters(known[at][1])) for at in first.values() if known[at][0] == policy]
            differing = [words for words in _parameters(params) if words not in set.intersection(*others)]
            labels[family] = " ".join([policy, *differing])
    return {"family": families, "family_label": [labels.get(family) for family in families]}


# ---- a row per comparison --------------------------------------------------------------------------------------------

_FACTS = (
    "title", "sizes", "model", "scale", "num_experts", "top_k", "num_ranks", "world_size", "num_replicas", "num_tokens",
    "num_batches", "dtype", "backend", "oversubscribed", "traffic",
)  # fmt: skip


@lru_cache(maxsize=4)
def comparisons(store: Store) -> pd.DataFrame:
    """A row per comparison, in the order of the sweep.

    Columns: ``COMPARISON``; ``title``, ``sizes``, ``model``, ``scale``, ``num_experts``, ``top_k``, ``num_ranks`` (and
    ``ep_size``), ``world_size``, ``num_replicas``, ``num_tokens``, ``num_batches``, ``num_draws`` (seeds of
    its traffic, where they were joined), ``num_launches``, ``dtype``, ``backend``, ``traffic`` (in
    words, of ``route``); ``mode``, ``scope``, ``origin`` (``origins.ORIGINS``); ``workload`` (its kind),
    ``tail_model``, ``seed``, ``peak_load``;
    ``device``, ``links``, ``transport``, ``dispatch_dtype``, ``oversubscribed``; ``point`` (JSON: swept keys with
    values), ``swept`` and ``swept_value``, the first key whose values differ in the store; ``how``, ``ran_on``,
    ``links_words``, ``workload_words``, for footers; ``facts``, the comparison's object in run.json.
    """
    frame = pd.DataFrame([_comparison(one) for one in store.comparisons])
    points = [json.loads(point) for point in frame["point"]]
    keys = dict.fromkeys(key for point in points for key in point)
    swept = next((key for key in keys if len({json.dumps(point.get(key)) for point in points}) > 1), None)
    return frame.assign(swept=swept, swept_value=[point.get(swept) for point in points])


def _comparison(one: Comparison) -> dict[str, Any]:
    facts, run = one.facts, one.run
    timed = facts if isinstance(facts, TimedFacts) else None
    return {
        "directory": one.directory,
        "comparison_id": one.comparison_id,
        **_values("", facts, _FACTS),
        "title": _title(facts),
        "ep_size": facts.num_ranks,
        "num_draws": getattr(facts, "draws", 1),
        "num_launches": len(one.conditions),
        "mode": run.mode,
        "scope": run.scope,
        "origin": origin_of(run, facts),
        "workload": facts.workload.kind,
        "tail_model": facts.workload.tail_model,
        "seed": facts.workload.seed,
        "peak_load": facts.workload.targets.get("peak_load"),
        "device": timed and (file_of(timed.device) or run.environment.device_name),
        "links": timed and file_of(timed.links),
        **_values("", timed if timed and timed.links else None, ("transport", "dispatch_dtype")),
        "point": json.dumps(timed.point if timed else {}, sort_keys=True),
        "how": how_words(run, facts),
        "ran_on": device_words(run, facts),
        "links_words": timed and timed.links,
        "workload_words": _workload_words(one),
        "facts": facts.model_dump(mode="json"),
    }


def _title(facts: ComparisonFacts) -> str:
    if not isinstance(facts, RoutedFacts):
        return facts.title
    return f"{facts.model}, {tokens_words(facts.num_tokens)}, EP {facts.num_ranks}, {facts.traffic}"


def _workload_words(one: Comparison) -> str:
    """The workload's own words, of all layers that were routed alike together."""
    words = workload_words(one.facts)
    layers = one.cases[0].routing["layer"].dropna().unique() if isinstance(one.facts, RoutedFacts) and one.cases else ()
    if len(layers) < 2:
        return words
    return re.sub(r"layer \d+", f"{len(layers)} layers from {min(layers)} to {max(layers)}", words, count=1)


@lru_cache(maxsize=4)
def conditions(store: Store) -> pd.DataFrame:
    """A row per comparison, launch and rank: ``COMPARISON``, ``launch``, ``rank`` and what was recorded of them."""
    rows = [
        {
            "directory": one.directory,
            "comparison_id": one.comparison_id,
            "launch": launch,
            "rank": rank,
            "run_id": of_launch.run_id,
            "warm_up_rounds": of_launch.warm_up.rounds,
            "hostname": of_rank.hostname,
            **_values("", of_rank.ceilings, ("matmul_size", "matmul_tflops", "copy_gbps", "read_gbps")),
            **_values("", of_rank, ("peak_memory_bytes", "probe_floor_us")),
            "sm_clock_mhz": of_rank.machine.sm_clock_mhz and of_rank.machine.sm_clock_mhz[1],
        }
        for one in store.comparisons
        for launch, of_launch in sorted(one.conditions.items())
        for rank, of_rank in enumerate(of_launch.ranks)
    ]
    return pd.DataFrame(rows, columns=None if rows else [*COMPARISON, "launch", "rank"])


def jobs(store: Store) -> pd.DataFrame:
    """A row per directory and job whose rows are there, in order of time.

    Columns: ``directory``, ``run_id``, ``created``, ``command`` and ``config_text`` (word for word; null where they
    were not recorded), ``config`` (resolved), ``environment`` and ``hashes`` (dicts).
    """
    runs = {one.directory: one.run for one in store.comparisons}
    rows = [
        {"directory": name, "run_id": run_id, **job.model_dump()}
        for name, run in runs.items()
        for run_id, job in sorted(run.runs.items(), key=lambda item: (str(item[1].created), item[0]))
    ]
    return pd.DataFrame(rows)


# ---- rows per sample, iteration and batch ----------------------------------------------------------------------------


def samples(store: Store, of: pd.DataFrame | None = None) -> pd.DataFrame:
    """A row per case, launch, rank, batch, iteration, kind, phase and layer: ``time_us`` and ``host_us``.

    Of a whole model phases are each layer's own; ``layer`` is null where a phase is of none.

    Args:
        of: rows of ``cases``; None = all.
    """
    order = ["launch", "batch", "iteration", "kind", "rank", "layer", "phase"]
    parts = []
    for comparison, case in _timed(store, of):
        about = _key(comparison, case) | _values("", case.facts, ("role", "policy", "label"))
        about["policy_params"] = json.dumps(case.facts.policy_params, sort_keys=True)
        parts.append(_beside(about, case.samples.astype({"layer": "Int32"}).sort_values(order)))
    return _together(parts)


@lru_cache(maxsize=4)
def timings(store: Store) -> pd.DataFrame:
    """A row per case, quantity, launch, batch and iteration: ``time_us``, and ``speedup`` over native in the same one.

    Columns: ``CASE``, ``role``, ``quantity``, ``ITERATION``, ``time_us``, ``speedup`` (null of native, and where either
    took no time). Quantities: ``ALL``, of plain iterations. Of breakdown iterations the ``PARTS`` of a whole model's
    pass, on the rank that is slowest in each, where they add up: MoE layers, waiting included; attention; and the rest,
    which no policy reaches. Then every phase of a layer, on the rank that spends most in it, all MoE layers together.
    """
    parts = []
    for comparison, case in _timed(store):
        broken, quantities = case.breakdown, {ALL: layer_time_us(case)}
        if len(broken.index) and getattr(comparison.facts, "whole", None) is not None:
            pass_us, moe_us = slowest_us(case), moe_time_us(case)
            quantities |= {MOE: moe_us, ATTENTION: pass_us["attention"]}
            quantities[REST] = pass_us[TOTAL] - moe_us - pass_us["attention"]
        occurred = [phase for phase in LAYER_PHASES if phase in broken.occurred]
        quantities |= {phase: broken.series(broken.of(phase).max(axis=1)) for phase in occurred}
        rows = pd.concat(quantities, names=["quantity"]).rename("time_us").reset_index()
        parts.append(_beside(_key(comparison, case) | {"role": case.facts.role}, rows))
    if not parts:
        return pd.DataFrame(columns=[*CASE, "role", "quantity", *ITERATION, "time_us", "speedup"])
    frame = pd.concat(parts, ignore_index=True)
    pair = [*COMPARISON, "quantity", *ITERATION]
    natives = frame[frame["role"] == "baseline"].set_index(pair)["time_us"].rename("native_us")
    native_us = frame.join(natives, on=pair)["native_us"].mask(frame["role"] == "baseline")
    return frame.assign(speedup=(native_us / frame["time_us"]).where((native_us > 0) & (frame["time_us"] > 0)))


def layers(store: Store, of: pd.DataFrame | None = None) -> pd.DataFrame:
    """A row per case and layer of whole models: ``attention``, ``moe``, ``dense`` and ``rest`` in milliseconds.

    Mean over ranks, median over breakdown iterations.
    """
    parts = []
    for comparison, case in _timed(store, of):
        if getattr(comparison.facts, "whole", None) is None or case.breakdown.index.empty:
            continue
        about = _key(comparison, case) | {"label": case.facts.label}
        parts.append(_beside(about, by_layer_ms(case).reset_index()))
    return _together(parts)


def _beside(about: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of a case behind the columns that say which it is."""
    return pd.concat([pd.DataFrame(about, index=rows.index), rows], axis=1)


def _together(parts: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=CASE)


def _timed(store: Store, of: pd.DataFrame | None = None) -> list[tuple[Comparison, Case]]:
    wanted = None if of is None else set(of[CASE].itertuples(index=False, name=None))
    return [
        (comparison, case)
        for comparison in store.comparisons
        for case in comparison.cases
        if case.is_ok
        and len(case.samples)
        and (wanted is None or (comparison.directory, comparison.comparison_id, case.case_id) in wanted)
    ]


@lru_cache(maxsize=4)
def routing(store: Store) -> pd.DataFrame:
    """A row per case, batch and layer, source ranks joined.

    Columns: ``CASE``, ``label``, ``role``, ``policy``, ``capacity_factor`` and those of ``reduce.joined_routing``.
    """
    parts = []
    for comparison in store.comparisons:
        for case in (case for case in comparison.cases if case.is_ok):
            about = _key(comparison, case) | _values("", case.facts, ("label", "role", "policy"))
            about["capacity_factor"] = case.facts.policy_params.get("capacity_factor")
            parts.append(_beside(about, joined_routing(case, comparison.facts)))
    frame = _together(parts)
    return frame.astype({"capacity_factor": float}) if parts else frame


@lru_cache(maxsize=4)
def frontiers(store: Store) -> pd.DataFrame:
    """A row per case, layer and batch of what dropping alone can keep at most: ``kept_by_load``, ``kept_by_experts``.

    Of native also the curve: ``curve_load`` (fullest rank over the mean, ascending) and ``curve_kept``, lists.
    """
    return _together(
        [
            case.frontier.assign(**_key(comparison, case))
            for comparison in store.comparisons
            for case in comparison.cases
            if case.frontier is not None
        ]
    )
