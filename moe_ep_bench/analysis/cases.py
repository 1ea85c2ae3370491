"""The frame that every table, figure and answer reads: a row per case, and rows per iteration, batch and comparison.

``load`` gives a store of one or several directories; everything else is a function of it. Frames join on ``CASE``. All
kinds of results have a row per case with the same columns: ``route`` without times, where layers that were routed alike
are one case, and ``quality`` without times and loads, whose numbers are in ``answer_costs``. A time of ``serve`` is
that of a request. Nothing in a frame is to be written to.

Speedup = native / case, both the slowest rank's time in the same (launch, batch, iteration); the estimate is the median
of these pairs (``timing.statistics``), and the verdict holds its interval against the noise floor of the same
comparison, which comes from native run a second time.

Frames are made of each directory by itself and stand one below another. Here, and nowhere else, nulls become alike,
whichever columns a directory has: NaN among numbers, None among all else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from moe_ep_bench.analysis.columns import COSTS, ends
from moe_ep_bench.analysis.reduce import (
    GROUPS,
    PASS_PARTS,
    ROUTED,
    breakdown,
    joined_routing,
    layer_times,
    longest,
    mean_ms,
    moe_times,
    on_slowest,
    phase_times,
    probe_floor_us,
    routing_means,
    with_frontier,
)
from moe_ep_bench.analysis.served import QUANTITIES, agreement, lengths, quantiles, request_times
from moe_ep_bench.analysis.store import ITERATION, KINDS, Comparison, Directory, Store, load, ordered
from moe_ep_bench.facts import NOT_EXECUTED, CaseFacts, ComparisonFacts, RoutedFacts, ServedFacts, TimedFacts, origin_of
from moe_ep_bench.facts.words import (
    Parts,
    case_label,
    describe_links,
    device_name,
    family_words,
    how_parts,
    links_parts,
    ran_on_parts,
    sizes_parts,
    title_words,
    traffic_words,
    workload_parts,
)
from moe_ep_bench.results import ResultsError
from moe_ep_bench.schema import ALL, ATTENTION, HOST_BUSY, LAYER_PHASES, MOE, REHEARSAL, REST, SM_CLOCK, TOTAL
from moe_ep_bench.timing.statistics import (
    LEAST_MODELLED,
    Estimate,
    drift,
    estimate_median,
    judge,
    minimum_detectable_effect,
    noise_floor,
    paired_ratios,
)

COMPARISON = ["directory", "comparison_id"]
CASE = [*COMPARISON, "case_id"]
FACTOR = "capacity_factor"  # what families of policies are swept over
ESTIMATE = ("median", "low", "high", "is_interval")
# Of what nothing was timed they are null.
_TIMED = (
    *("median_ms", "p90_ms", "p99_ms", "slowest_group_ms"),
    *ends("speedup", "over_topk", of=ESTIMATE),
    *("floor_low", "floor_high", "verdict", "detectable"),
)
# Reading order: policies of the capacity-aware paper first, then by name.
_ROLE_ORDER = ("baseline", "noise", "policy", "replication", "balanced")
_FIRST_POLICIES = ("topk", "token_drop", "expanded_drop")
# Roles that have no verdict of their own.
_ROLE_VERDICTS = {"baseline": "baseline", "noise": "noise floor"}
# Costs of a policy; the balanced case, whose scores are not the model's, has none.
_COSTS = [*COSTS, "output_error", "below_frontier", "below_frontier_experts"]


def load_timed(directory: Path, *, or_served: bool = False) -> Store:
    """``load`` one directory; ResultsError where no layers in it were timed (nor, with ``or_served``, servers)."""
    store = load(directory)
    mode = store.comparisons[0].run.mode
    if mode == "serve" and not or_served:
        raise ResultsError(
            f"{directory}: holds times of servers; expected those of layers, which `run` or `emulate` wrote"
        )
    if not KINDS[mode].is_timed:
        shared = ": its ranks shared a device (--share-gpu)" if mode == REHEARSAL else ""
        raise ResultsError(
            f"{directory}: is a {mode} run, without times{shared}; expected what `run` or `emulate` wrote"
        )
    return store


def of_each(frame_of: Callable[[Directory], pd.DataFrame]) -> Callable[[Store], pd.DataFrame]:
    """Frames of a store's directories, each made once, one below another; without any rows one of ``CASE``."""

    @lru_cache(maxsize=32)
    def made(directory: Directory) -> pd.DataFrame:
        return _nulls_alike(frame_of(directory))

    @lru_cache(maxsize=4)
    def joined(store: Store) -> pd.DataFrame:
        parts = [rows for rows in map(made, store.directories) if len(rows)] or [pd.DataFrame(columns=CASE)]
        return parts[0] if len(parts) == 1 else _nulls_alike(pd.concat(parts, ignore_index=True))

    return joined


def _nulls_alike(rows: pd.DataFrame) -> pd.DataFrame:
    """NaN among numbers, None among all else."""
    words = {str(name): column.astype(object) for name, column in rows.items() if not is_numeric_dtype(column)}
    nulls = {name: column.isna() for name, column in words.items()}
    alike = {name: column.where(~nulls[name], None) if nulls[name].any() else column for name, column in words.items()}
    return rows.assign(**alike).reset_index(drop=True)


# ---- a row per case --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def cases(store: Store) -> pd.DataFrame:
    """A row per case in reading order: baseline, noise, topk, policies, replication, balanced.

    Columns: ``CASE``; those of ``comparisons``; what the case is (``policy``, ``policy_params`` (JSON), ``label``,
    ``role``, ``status``, ``reason``, ``capacity_factor``, ``looks_past_top_k``, ``by_torch``, ``data_model``,
    ``extra_gib_per_rank``, ``fits``, whether the model fits the device's memory; ``family``, the policy with every
    parameter but the capacity factor; ``family_label``, the same for people; ``settings``, from which labels are
    composed, and which no file gets); ``reduce.ROUTED`` and ``output_error``;
    ``median_ms``, ``p90_ms``, ``p99_ms`` of the slowest rank, of several EP groups their mean, and ``slowest_group_ms``
    and ``slowest_group_fullest_*`` of the slowest and the fullest of them; ``speedup_*`` over native and
    ``over_topk_*`` over topk (median, low, high, is_interval); ``floor_low``, ``floor_high``; ``verdict``;
    ``detectable``, the smallest speedup that would be called; ``host_bound_share``; ``drift``; ``host_busy_ms``, of the
    rank whose host takes longest, and ``sm_clock_mhz``, of that whose GPU is slowest, medians; ``reduce.breakdown``;
    ``probe_overhead``; of layers ``pass_ms``; of whole models ``moe_*``, ``by_amdahl``, ``mean_rank_<part>_ms``; of
    servers ``_served``.
    """
    rows = _cases(store).merge(comparisons(store), on=COMPARISON, how="left", validate="m:1")
    return rows.copy()  # of one piece


@of_each
def _cases(store: Directory) -> pd.DataFrame:
    """``cases`` without what a comparison's cases share."""
    rows = _listed(store)
    if len(store.routing):
        means = routing_means(_routing(store))
        means.loc[means.index.isin(rows.index[rows["role"] == "balanced"]), _COSTS] = np.nan
        rows = rows.join(means)
    if len(store.samples):
        rows = rows.join([_times(store), _speedups(store, rows), breakdown(_phase_times(store), rows["ep_size"])])
        rows = rows.join(_passes(rows)).join(_models(store, rows))
        of_probes = rows["breakdown_layer_ms"] / rows["median_ms"] - 1
        rows["probe_overhead"] = of_probes.where([one.run.mode != "emulated" for one in rows["comparison"]])
    if len(store.requests):
        rows = rows.join([_times(store), _speedups(store, rows), _served(store, rows)])
    if len(store.rehearsal):
        rows = rows.join(_rehearsed(store, rows))
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *ROUTED, "output_error", *_TIMED])))
    return rows.drop(columns=["comparison", "native", "topk", "noise", "probe_floor_us", "ep_size"])


def _rehearsed(store: Directory, rows: pd.DataFrame) -> pd.DataFrame:
    """What is known of cases that ran and were not timed; the worst of ranks and launches."""
    by_case = store.rehearsal.groupby("case")
    phases = by_case["phases"].agg(_in_all)
    memory = {
        place: max(rank.peak_memory_bytes or 0 for launch in one.conditions.values() for rank in launch.ranks) / 2**30
        for place, one in enumerate(store.comparisons)
        if one.conditions
    }
    return pd.DataFrame(
        {
            "num_iterations": by_case["num_iterations"].min(),
            "phases_ran": phases.map(", ".join),
            "num_phases": phases.map(len),
            "lost_attempts": by_case["lost_attempts"].agg(lambda reasons: "; ".join(_in_all(reasons[:1])) or None),
            "reference_error": store.routing.groupby("case")["reference_error"].max(),
            "peak_memory_gib": store.cases["comparison"].map(memory),
        }
    ).reindex(rows.index)


def _in_all(lists: Iterable[Sequence[str] | None]) -> list[str]:
    """What stands in each of several lists, in the order of the first."""
    first, *others = (() if words is None else tuple(words) for words in lists)  # null where others wrote them
    return [one for one in first if all(one in other for other in others)]


def differs_from_topk(rows: pd.DataFrame) -> pd.Series:
    """Whether the speedup over ``topk``, which runs the policies' kernels, is another than the one over native.

    It is where native differs from ``topk`` by more than the noise floor; of modelled times, and where there is no
    floor, by more than the model can tell.
    """
    ratio = rows["speedup_median"].mask(rows["role"] == "baseline", 1.0) / rows["over_topk_median"]
    floor = rows["floor_high"].mask(rows["origin"].isin(NOT_EXECUTED)).transform(np.log)
    return ratio.transform(np.log).abs() > floor.fillna(np.log1p(LEAST_MODELLED))


@lru_cache(maxsize=4)
def _listed(store: Directory) -> pd.DataFrame:
    """What each case is, in reading order, by its number in the store.

    Beside columns of ``cases``: ``comparison``, the object; ``native``, ``topk`` and ``noise``, the numbers of the
    comparison's measured cases of that kind; ``probe_floor_us``; ``ep_size``.
    """
    numbered = zip(store.cases["comparison"], store.cases.itertuples(), strict=True)
    rows = pd.DataFrame([_identity(store.comparisons[number], case) for number, case in numbered])
    rows = rows.astype({"capacity_factor": float})
    place = store.cases["comparison"]
    for name, is_kind in {
        "native": rows["role"] == "baseline",
        "topk": rows["policy"] == "topk",
        "noise": rows["role"] == "noise",
    }.items():
        measured = place[is_kind & (rows["status"] == "ok")].drop_duplicates()
        rows[name] = place.map(pd.Series(measured.index, measured))
    order = [(place[case], *_reading_order(store.cases["facts"][case])) for case in rows.index]
    return rows.loc[sorted(rows.index, key=order.__getitem__)]


def _identity(comparison: Comparison, case: Any) -> dict[str, Any]:
    facts, fit = case.facts, getattr(comparison.facts, "fit", None)
    factor, is_policy = facts.policy_params.get(FACTOR), facts.role == "policy"
    return {
        **values_of("", comparison, COMPARISON),
        **values_of("", case, ("case_id", "status", "reason")),
        "policy": facts.policy,
        "label": case_label(facts),
        **values_of("", facts, ("role", "looks_past_top_k", "by_torch", "data_model", "settings")),
        "spare_by_layer": facts.spare_by_layer and tuple(facts.spare_by_layer),
        "spare_layers": tuple(facts.spare_layers),
        "comparison": comparison,
        "policy_params": params_json(facts.policy_params),
        "capacity_factor": None if factor is None else float(factor),
        "extra_gib_per_rank": facts.extra_bytes_per_rank and facts.extra_bytes_per_rank / 2**30,
        "family": family_words(facts.policy, facts.policy_params) if is_policy else None,
        "family_label": case_label(facts, without=[FACTOR]) if is_policy else None,
        "fits": fit and fit.holds(facts.extra_bytes_per_rank or 0),
        "probe_floor_us": probe_floor_us(comparison.facts, comparison.conditions.values()),
        "ep_size": comparison.facts.num_ranks,
    }


def params_json(params: Mapping[str, Any]) -> str:
    """Parameters as the column ``policy_params`` has them."""
    return json.dumps(params, sort_keys=True)


def _reading_order(facts: CaseFacts) -> tuple:
    """By role and policy, then by values as numbers: ``c=6`` stands before ``c=10``."""
    params = facts.policy_params
    first = _FIRST_POLICIES.index(facts.policy) if facts.policy in _FIRST_POLICIES else len(_FIRST_POLICIES)
    values = [(key, ordered(value)) for key, value in sorted(params.items()) if key != FACTOR and value is not None]
    return _ROLE_ORDER.index(facts.role), first, facts.policy, values, params.get(FACTOR) or 0.0


def values_of(prefix: str, source: object, names: Iterable[str]) -> dict[str, Any]:
    """Attributes as columns; none where there is no source."""
    return {f"{prefix}{name}": getattr(source, name, None) for name in names}


# ---- times of cases --------------------------------------------------------------------------------------------------

_layer_times = lru_cache(maxsize=4)(lambda store: layer_times(store.samples, _listed(store)["ep_size"]))
_request_times = lru_cache(maxsize=4)(lambda store: request_times(store.requests))
_phase_times = lru_cache(maxsize=4)(lambda store: phase_times(store.samples, _listed(store)["probe_floor_us"]))


def _whole_times(store: Directory) -> pd.DataFrame:
    """``time_us`` of each layer, pass or request, by ``reduce.KEY``."""
    return _request_times(store) if len(store.requests) else _layer_times(store)


def _times(store: Directory) -> pd.DataFrame:
    """Quantiles of the time of a layer or request, and of layers how steady it was.

    ``host_bound_share``: of plain iterations, in which the slowest rank's time is its host's: no queue, no device
    limit. It says something on a GPU only, where the host runs ahead of the device.
    """
    times_us = _whole_times(store)
    by_case = times_us["time_us"].groupby(level="case")
    ends = (
        by_case.quantile(np.array([0.5, 0.9, 0.99])).unstack().set_axis(["median_ms", "p90_ms", "p99_ms"], axis=1) / 1e3
    )
    if len(store.requests):
        return ends
    is_bound = times_us["host_us"] >= times_us["time_us"]
    beside = store.samples.set_index(["case", "rank"])[[HOST_BUSY, SM_CLOCK]].astype(float).dropna(how="all")
    of_rank = beside.groupby(level=["case", "rank"]).median().groupby(level="case")
    num_groups = _listed(store)["comparison"].map(lambda one: getattr(one.facts, "num_replicas", 1), "ignore")
    several = num_groups.loc[times_us.index.get_level_values("case")].to_numpy() > 1
    slowest_group_us = times_us["slowest_group_us"].where(several)
    return ends.assign(
        slowest_group_ms=slowest_group_us.groupby(level="case").median() / 1e3,
        host_bound_share=is_bound.groupby(level="case").mean(),
        drift=by_case.apply(drift),
        host_busy_ms=of_rank[HOST_BUSY].max() / 1e3,
        sm_clock_mhz=of_rank[SM_CLOCK].min(),
    )


def _estimates(times_us: pd.Series, pairs: pd.Series) -> dict[Hashable, Estimate | None]:
    """Speedup of each case over another, ``pairs`` by case; None over itself, and where nothing pairs."""
    by_case: dict[Hashable, pd.Series] = {
        case: of_case.droplevel("case") for case, of_case in times_us.groupby(level="case")
    }
    return {
        case: estimate_median(paired_ratios(by_case[over], by_case[case]))
        if over in by_case and case in by_case and over != case
        else None
        for case, over in pairs.items()
    }


def _judged(times_us: pd.Series, rows: pd.DataFrame, unlike: Collection[Hashable] = ()) -> pd.DataFrame:
    """Speedups over native, the noise floor, and verdicts on policies but for cases that are ``unlike`` native."""
    speedups, found = _estimates(times_us, rows["native"]), {}
    for case, row in rows.iterrows():
        facts, speedup, same_again = row["comparison"].facts, speedups[case], speedups.get(row["noise"])
        modelled, is_shared = getattr(facts, "device", None) is not None, getattr(facts, "oversubscribed", False)
        floor = noise_floor(same_again) if same_again else None
        verdict = judge(None if case in unlike else speedup, floor, is_modelled=modelled, is_oversubscribed=is_shared)
        found[case] = {
            **values_of("speedup_", speedup, ESTIMATE),
            **values_of("floor_", floor, ("low", "high")),
            "verdict": verdict if row["status"] == "ok" and row["role"] not in _ROLE_VERDICTS else None,
            "detectable": minimum_detectable_effect(speedup, floor, is_modelled=modelled)
            if speedup and floor
            else None,
        }
    return _as_numbers(pd.DataFrame.from_dict(found, orient="index"))


def _as_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Numbers and nulls as numbers; of a column of nulls alone pandas cannot know."""
    return rows.astype({name: float for name in rows if not str(name).endswith(("is_interval", "verdict"))})


def _speedups(store: Directory, rows: pd.DataFrame) -> pd.DataFrame:
    """Speedups over native and topk, and verdicts on the first, given the noise floor."""
    times_us = _whole_times(store)["time_us"]
    # A whole request takes as long as its answer is: others' lengths decide nothing.
    of_lengths = lengths(store.requests, rows["native"]) if len(store.requests) else pd.DataFrame()
    unlike = set(of_lengths.index[of_lengths["other_length_share"] > 0]) if len(of_lengths) else set()
    over_topk = [values_of("over_topk_", one, ESTIMATE) for one in _estimates(times_us, rows["topk"]).values()]
    judged = _judged(times_us, rows, unlike).join(_as_numbers(pd.DataFrame(over_topk, rows.index)))
    words = rows["role"].map(_ROLE_VERDICTS).where(rows["status"] == "ok", None)
    return judged.assign(verdict=judged["verdict"].fillna(words))[list(_TIMED[4:])]


def _served(store: Directory, rows: pd.DataFrame) -> pd.DataFrame:
    """Times of parts of a request, throughput, their speedups over native with verdicts, and how answers agree.

    Each quantity has columns ``<quantity>_speedup_*``, a noise floor of its own ``<quantity>_floor_*``, and
    ``<quantity>_verdict``.
    """
    times_us = _request_times(store)
    found = [quantiles(times_us), agreement(store.requests, rows["native"]), lengths(store.requests, rows["native"])]
    for name, column in QUANTITIES.items():
        found.append(_judged(times_us[column].dropna(), rows).drop(columns="detectable").add_prefix(f"{name}_"))
    first, *others = found
    return first.join([*others], how="outer").reindex(rows.index)


def _passes(rows: pd.DataFrame) -> pd.DataFrame:
    """Time and throughput of a pass, of a layer's model where its rest is stated."""
    found = {}
    for case, comparison, layer_ms in rows[["comparison", "median_ms"]].dropna().itertuples(name=None):
        facts = comparison.facts
        if pass_ms := layer_ms if facts.whole else facts.rest and facts.rest.pass_ms(layer_ms):
            per_s = facts.num_tokens / pass_ms * 1e3
            of_scope = {"tokens_per_s": per_s} if facts.whole else {"pass_ms": pass_ms}
            found[case] = {"tokens_per_s_per_rank": per_s / facts.world_size, **of_scope}
    return pd.DataFrame.from_dict(found, orient="index")


def _models(store: Directory, rows: pd.DataFrame) -> pd.DataFrame:
    """Times, shares and speedups of the MoE layers in a whole model's pass."""
    rows = rows[[getattr(one.facts, "whole", None) is not None for one in rows["comparison"]]]
    times_us = _phase_times(store)
    times_us = times_us[times_us.index.get_level_values("case").isin(rows.index)]
    if times_us.empty:
        return pd.DataFrame()
    slowest_us = on_slowest(times_us, rows["ep_size"])
    moe_us, native = moe_times(slowest_us), rows["native"]
    share = moe_us.groupby(level="case").sum() / slowest_us[TOTAL].groupby(level="case").sum()
    speedups = [values_of("moe_speedup_", one, ESTIMATE) for one in _estimates(moe_us, native).values()]
    speedups = _as_numbers(pd.DataFrame(speedups, rows.index))
    native_share = native.map(share)
    return speedups.assign(
        moe_ms=moe_us.groupby(level="case").median() / 1e3,
        moe_share=share,
        by_amdahl=1 / (1 - native_share + native_share / speedups["moe_speedup_median"]),
        most_by_amdahl=(1 / (1 - native_share)).where(share.notna()),
        policy_ms=slowest_us["policy"].groupby(level="case").median() / 1e3,
    ).join(mean_ms(times_us, PASS_PARTS).add_prefix("mean_rank_").add_suffix("_ms"))


# ---- a row per comparison --------------------------------------------------------------------------------------------

_FACTS = (
    "title", "sizes", "model", "scale", "num_experts", "top_k", "num_ranks", "world_size", "num_replicas", "num_tokens",
    "fullest_tokens", "num_batches", "dtype", "backend", "oversubscribed", "traffic",
)  # fmt: skip


@lru_cache(maxsize=4)
def comparisons(store: Store) -> pd.DataFrame:
    """A row per comparison, in the order of the sweep.

    Columns: ``COMPARISON``; ``_FACTS``, as in ``facts``; ``ep_size``, which is ``num_ranks``; ``num_draws``, seeds of
    its traffic, where they were joined; ``num_launches``; ``mode``, ``scope``, ``origin`` (``facts.ORIGINS``);
    ``workload`` (its kind), ``tail_model``, ``seed``, ``peak_load``; ``device``, ``links``; ``point`` (JSON: swept keys
    with values); ``how``, ``ran_on``, ``links_words``, ``workload_words``, for footers, ``ran_on_short``
    and ``links_short`` without figures; ``run`` and ``facts``, typed.
    """
    rows = _comparisons(store)
    own = own_points(rows["title"], list(map(json.loads, rows["point"])))
    titles = [", ".join((title, *point_parts(point))) for title, point in zip(rows["title"], own, strict=True)]
    return rows.assign(title=titles)


@of_each
def _comparisons(store: Directory) -> pd.DataFrame:
    """``comparisons`` whose titles may be alike."""
    return pd.DataFrame(list(map(_comparison, store.comparisons)))


def own_points(titles: Iterable[str], points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each comparison's point the swept keys in which it differs from others of the same title."""
    places, values = list(zip(titles, points, strict=True)), {}
    for title, point in places:
        for key, value in point.items():
            values.setdefault((title, key), set()).add(json.dumps(value))
    return [{key: value for key, value in point.items() if len(values[title, key]) > 1} for title, point in places]


def is_one_draw(facts: ComparisonFacts) -> bool:
    """Whether a single draw of a layer's synthetic workload decides which experts are busy together on a rank.

    A load of the fullest rank that was calibrated holds native's alone, so policies are by chance then too.
    """
    workload, targets = facts.workload, facts.workload.targets
    is_skewed = bool(targets.get("peak_load") or targets.get("batch_peak_load")) and not workload.is_balanced
    is_placed = bool(targets.get("pattern") or targets.get("expert_loads")) or facts.whole is not None
    is_one = getattr(facts, "draws", 1) == 1 and facts.num_ranks > 1
    return workload.kind == "synthetic" and is_skewed and not is_placed and is_one


def point_parts(point: Mapping[str, Any]) -> Parts:
    """A place in a sweep: swept keys, without their section, and values."""
    named = [(key.rpartition(".")[2].replace("_", " "), value) for key, value in point.items()]
    return tuple(f"no {name}" if value is None else f"{name} {value}" for name, value in named)


def _comparison(one: Comparison) -> dict[str, Any]:
    facts, run = one.facts, one.run
    ran_layers, is_served = isinstance(facts, TimedFacts), isinstance(facts, ServedFacts)
    workload = getattr(facts, "workload", None)
    links = getattr(facts, "links", None)
    point = facts.point if ran_layers else {"serve.model": facts.served} if is_served else {}
    device = ran_layers and facts.device and device_name(facts.device, facts.expert_rows)
    return {
        **values_of("", one, COMPARISON),
        **values_of("", facts, _FACTS),
        **values_of("", run, ("mode", "scope")),
        **values_of("", workload, ("tail_model", "seed")),
        "title": title_words(facts),
        "sizes": workload and ", ".join(sizes_parts(facts)),
        "traffic": traffic_words(facts.workload) if isinstance(facts, RoutedFacts) else None,
        "ep_size": facts.num_ranks,
        "num_draws": getattr(facts, "draws", 1),
        "is_one_draw": is_one_draw(facts) if workload else False,
        "num_launches": getattr(facts, "num_starts", None) or len(one.conditions),
        "origin": origin_of(run, facts),
        "workload": workload and workload.kind,
        "peak_load": workload and workload.targets.get("peak_load"),
        "device": device or (run.environment.device_name if ran_layers or is_served else None),
        "links": ", ".join(links_parts(facts, in_column=True)) or None,
        "point": json.dumps(point, sort_keys=True),
        "how": ", ".join(how_parts(run, facts)),
        "ran_on": ", ".join(ran_on_parts(run.environment, facts)),
        "ran_on_short": ", ".join(ran_on_parts(run.environment, facts, in_short=True)),
        "links_words": links and describe_links(links, getattr(facts, "exchange", None)),
        "links_short": ", ".join(links_parts(facts)) or None,
        "workload_words": workload and ", ".join(workload_parts(facts)),
        "run": run,
        "facts": facts,
    }


# ---- rows per iteration and batch ------------------------------------------------------------------------------------


@of_each
def ranks(store: Directory) -> pd.DataFrame:
    """A row per case and rank: ``CASE``, ``rank``, ``<group>_ms`` of its phases, median over breakdown iterations.

    A phase is of all layers together, a wait less what its probes cost (``reduce.phase_times``).
    """
    phases_us = _phase_times(store).fillna(0.0)
    sums_us = {f"{group}_ms": phases_us[list(phases)].sum(axis=1) for group, phases in GROUPS.items()}
    medians_us = pd.DataFrame(sums_us, phases_us.index).groupby(level=["case", "rank"]).median()
    return _named(store, (medians_us / 1e3).reset_index())


@of_each
def timings(store: Directory) -> pd.DataFrame:
    """A row per case, quantity, launch, batch and iteration: ``time_us``, and ``speedup`` over native in the same one.

    Columns: ``CASE``, ``role``, ``quantity``, ``ITERATION``, ``time_us``, ``speedup`` (null of native, and where either
    took no time). Quantities: ``ALL``, of plain iterations. Of breakdown iterations the ``PARTS`` of a whole model's
    pass, on the rank that is slowest in each, where they add up: MoE layers, waiting included; attention; and the rest,
    which no policy reaches. Then every phase of a layer, on the rank that spends most in it, all MoE layers together.
    Of servers there is ``ALL`` alone: a request.
    """
    if len(store.requests):
        return _paired(store, {ALL: _request_times(store)["time_us"]})
    listed, phases_us = _listed(store), _phase_times(store)
    is_model = [getattr(comparison.facts, "whole", None) is not None for comparison in listed["comparison"]]
    ep_size = listed["ep_size"]
    pass_us = on_slowest(phases_us[phases_us.index.get_level_values("case").isin(listed.index[is_model])], ep_size)
    moe_us = moe_times(pass_us)
    parts = {ALL: _layer_times(store)["time_us"], MOE: moe_us, ATTENTION: pass_us["attention"]}
    parts[REST] = pass_us[TOTAL] - moe_us - pass_us["attention"]
    longest_us = longest(phases_us, ep_size)
    parts |= {phase: longest_us[phase].dropna() for phase in LAYER_PHASES}
    return _paired(store, parts)


def _paired(store: Directory, parts: Mapping[str, pd.Series]) -> pd.DataFrame:
    """Quantities by ``reduce.KEY`` as rows, with the speedup over native in the same iteration."""
    listed = _listed(store)
    rows = pd.concat(parts, names=["quantity"]).rename("time_us").reset_index()
    pair = ["quantity", *ITERATION]
    natives = rows[rows["case"].isin(listed["native"])].rename(columns={"case": "native", "time_us": "native_us"})
    rows = rows.assign(native=rows["case"].map(listed["native"])).merge(natives, on=["native", *pair], how="left")
    is_pair = (rows["native_us"] > 0) & (rows["time_us"] > 0) & (rows["case"] != rows["native"])
    rows["speedup"] = (rows["native_us"] / rows["time_us"]).where(is_pair)
    return _named(store, rows[["case", *pair, "time_us", "speedup"]], "role")


@of_each
def batch_phases(store: Directory) -> pd.DataFrame:
    """A row per case and batch: ``<phase>_us`` of ``timings``, median over iterations."""
    longest_us = longest(_phase_times(store), _listed(store)["ep_size"])[list(LAYER_PHASES)]
    medians_us = longest_us.groupby(level=["case", "batch"]).median().add_suffix("_us")
    return _named(store, medians_us.reset_index())


@lru_cache(maxsize=4)
def _routing(store: Directory) -> pd.DataFrame:
    """``reduce.joined_routing`` of all cases beside the frontier; ``case`` is the number in the store."""
    parts, of_case = [], store.cases["comparison"]
    is_replicated = store.cases["facts"].map(lambda facts: facts.role == "replication", "ignore")
    cases_N = store.routing["case"]
    for (comparison, replicated), rows in store.routing.groupby([cases_N.map(of_case), cases_N.map(is_replicated)]):
        facts = store.comparisons[int(str(comparison))].facts
        is_contiguous = getattr(facts, "placement", "contiguous") == "contiguous"
        parts.append(joined_routing(rows, facts, at_home=is_contiguous and not replicated))
    joined = pd.concat(parts, ignore_index=True).sort_values("case", kind="stable", ignore_index=True)
    return with_frontier(joined, store.frontier)


@of_each
def routing(store: Directory) -> pd.DataFrame:
    """A row per case, batch, layer and EP group, source ranks joined.

    Columns: ``CASE``, ``label``, ``role``, ``policy``, ``capacity_factor`` and those of ``reduce.joined_routing`` and
    ``reduce.with_frontier``.
    """
    if store.routing.empty:
        return pd.DataFrame()
    rows = _named(store, _routing(store), "label", "role", "policy", "capacity_factor")
    return rows.astype({"layer": "Int64"})


def _named(store: Directory, rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Rows behind the columns that say which case they are of, in place of its number."""
    about = _listed(store).loc[rows["case"], [*CASE, *columns]].reset_index(drop=True)
    return pd.concat([about, rows.drop(columns="case").reset_index(drop=True)], axis=1)
