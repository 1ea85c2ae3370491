"""The frame that every table, figure and answer reads: a row per case, and rows per sample, batch and comparison.

``load`` gives a store of one or several directories; everything else is a function of it. Frames join on ``CASE``. A
directory of ``route`` has the same columns as one of ``run``, without times; layers that were routed alike are one
case there. Nothing in a frame is to be written to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis import frames
from moe_ep_bench.analysis.draws import over_draws
from moe_ep_bench.analysis.gather import named
from moe_ep_bench.analysis.load import Run, is_quality, is_route, is_whole, load_run
from moe_ep_bench.analysis.parts import ResultsError
from moe_ep_bench.analysis.speedups import analyse, family_key, family_labels
from moe_ep_bench.analysis.words import device_words, mode_words, notes_of, origin, warnings_of, workload_words
from moe_ep_bench.metrics import imbalance, mass_kept
from moe_ep_bench.results import ValidationDirectory

COMPARISON = ["directory", "comparison_id"]
CASE = [*COMPARISON, "case_id"]
# Summed over source ranks; weighted by their tokens.
_COUNTS = [
    "num_tokens", "num_pairs", "padding_pairs", "num_topk_pairs", "num_dropped_pairs", "tokens_without_expert",
    "crossing_pairs", "crossing_copies",
]  # fmt: skip
_SHARES = ["topk_share", "entropy", "regime_single_head", "regime_smooth", "regime_plateau"]
# Means over batches, then over layers, of the frame ``routing``.
ROUTED = [
    "fullest_expert", "fullest_rank", "expert_imbalance", "rank_imbalance", "dropped_share", "retained_mass",
    "below_frontier", "below_frontier_experts", "experts_per_token", "activated_experts", "activated_fullest_rank",
]  # fmt: skip
_LOADS = ["load_E", "load_R", "image_load_E", "pairs_RR"]


@dataclass(frozen=True, eq=False)
class Store:
    """What directories hold, by the name that the column ``directory`` has."""

    runs: dict[str, Run]
    routes: dict[str, Any]


def load(directories: Path | Sequence[Path], passed_over: list[str] | None = None, *, join_draws: bool = True) -> Store:
    """Read and check directories of times or of routing.

    Args:
        passed_over: gets a line for each file that cannot be trusted and is left out; None = the first is raised.
        join_draws: comparisons that differ in the seed of their traffic, or in its layer, become one; ``samples`` are
            of one draw each, so read them apart.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    runs, routes = {}, {}
    for name, directory in named([directories] if isinstance(directories, Path) else directories).items():
        if ValidationDirectory(directory).pairs.is_file():
            raise ResultsError(
                f"{directory}: holds two runs side by side: name {directory}/real or {directory}/emulated"
            )
        if is_quality(directory):
            raise ResultsError(f"{directory}: holds what policies do to a model's answers, without times or loads")
        if is_route(directory):
            from moe_ep_bench.analysis.route.load import load_route  # it imports torch

            routes[name] = load_route(directory, passed_over)
        else:
            run = load_run(directory, passed_over, whole=is_whole(directory))
            runs[name] = over_draws(run)[0] if join_draws else run
    return Store(runs, routes)


@lru_cache(maxsize=4)
def cases(store: Store) -> pd.DataFrame:
    """A row per case in reading order: baseline, noise, topk, policies, replication, ceiling.

    Columns: ``CASE``; those of ``comparisons`` but ``facts``; what the case is (``policy``, ``policy_params`` (JSON),
    ``label``, ``role``, ``status``, ``reason``, ``capacity_factor``, ``looks_past_top_k``, ``extra_bytes_per_rank``;
    ``family``, the policy with every parameter but the capacity factor; ``family_label``, the same for people);
    ``median_ms``, ``p90_ms``, ``p99_ms`` of the slowest rank; ``speedup_*`` over native and ``over_topk_*`` over topk
    (median, low, high, is_interval); ``floor_low``, ``floor_high``; ``verdict``; ``detectable``; ``ROUTED``,
    ``output_error``; ``<group>_ms`` of phase groups; rates; how steady the times were; of whole models ``moe_*``,
    ``by_amdahl``, ``mean_rank_<part>_ms`` and extrapolations.
    """
    parts = [_timed(store, name, run) for name, run in store.runs.items()]
    parts += [_routed(name, route) for name, route in store.routes.items()]
    about = comparisons(store).drop(columns="facts")
    rows = pd.concat([part for part in parts if len(part)], ignore_index=True)
    rows = rows.drop(columns=[name for name in about if name in rows and name not in COMPARISON])
    return rows.merge(about, on=COMPARISON, how="left", validate="m:1")


def _timed(store: Store, name: str, run: Run) -> pd.DataFrame:
    rows = frames.speedups(run)
    found = [run.by_key[key] for key in rows[["comparison_id", "case_id"]].itertuples(index=False, name=None)]
    labels = family_labels(analyse(run))
    families = [family_key(case) if case.role == "policy" else None for case in found]
    params = [case.policy_params for case in found]
    means = _means(_routing(store, name)).reindex(pd.MultiIndex.from_frame(rows[["comparison_id", "case_id"]]))
    return rows.assign(
        directory=name,
        capacity_factor=pd.Series([one.get("capacity_factor") for one in params], rows.index, float),
        looks_past_top_k=[case.looks_past_top_k for case in found],
        extra_bytes_per_rank=pd.Series([case.extra_bytes_per_rank for case in found], rows.index, float),
        family=families,
        family_label=[labels.get(key) for key in families],
        **{column: means[column].to_numpy() for column in ROUTED if column not in rows},
    )


def _routed(name: str, route: Any) -> pd.DataFrame:
    rows = route.cases.rename(columns=_ROUTE_NAMES)
    keys = [_family(*one) for one in zip(rows["policy"], rows["params"], strict=True)]
    return rows[[*ROUTED, "label", "policy", "looks_past_top_k"]].assign(
        directory=name,
        comparison_id=route.cases["group"],
        case_id=rows["label"],
        scope="layer",
        status="ok",
        role=np.where(rows["label"] == "native", "baseline", "policy"),
        policy_params=[json.dumps(one, sort_keys=True) for one in rows["params"]],
        capacity_factor=rows["params"].str.get("capacity_factor").astype(float),
        family=keys,
        family_label=keys,
    )


_ROUTE_NAMES = {"activated": "activated_experts", "fullest_activated": "activated_fullest_rank"}


def _family(policy: str, params: dict[str, Any]) -> str:
    words = [
        f"{key}={value}" for key, value in sorted(params.items()) if key != "capacity_factor" and value is not None
    ]
    return " ".join([policy, *words])


@lru_cache(maxsize=4)
def comparisons(store: Store) -> pd.DataFrame:
    """A row per comparison, in the order of the sweep.

    Columns: ``COMPARISON``; ``title``, ``sizes``, ``model``, ``scale``, ``num_experts``, ``top_k``, ``num_ranks`` (and
    ``ep_size``), ``world_size``, ``num_replicas``, ``num_tokens``, ``num_batches``, ``num_draws``, ``dtype``;
    ``mode``, ``scope``, ``origin`` (measured, emulated, partly measured elsewhere, modelled, routed); ``workload`` (its
    kind), ``tail_model``, ``seed``, ``peak_load``; ``device``, ``links``, ``oversubscribed``; ``point`` (JSON: swept
    keys with values), ``swept`` and ``swept_value``, the first key whose values differ in the store; ``how``,
    ``ran_on``, ``links_words``, ``workload_words``, for footers; ``facts``, the comparison's object in run.json.
    """
    rows = [
        {
            "directory": name,
            "comparison_id": comparison_id,
            **{key: getattr(facts, key) for key in _FACTS},
            "ep_size": facts.num_ranks,
            "num_draws": facts.draws,
            "mode": run.mode,
            "scope": run.scope,
            "origin": origin(run, facts),
            "workload": facts.workload.kind,
            "tail_model": facts.workload.tail_model,
            "seed": facts.workload.seed,
            "peak_load": facts.workload.targets.get("peak_load"),
            "device": frames.model_name(facts.device) or run.device_name,
            "links": frames.model_name(facts.links),
            "point": json.dumps(facts.point, sort_keys=True),
            "how": mode_words(run, facts),
            "ran_on": device_words(run, facts),
            "links_words": facts.links,
            "workload_words": workload_words(facts),
            "facts": facts.model_dump(mode="json"),
        }
        for name, run in store.runs.items()
        for comparison_id, facts in run.comparisons.items()
    ]
    for name, route in store.routes.items():
        rows += [
            {
                **{
                    key: case[key]
                    for key in ("model", "num_experts", "top_k", "num_ranks", "num_tokens", "num_batches")
                },
                "directory": name,
                "comparison_id": case["group"],
                "title": case["comparison"],
                "ep_size": case["num_ranks"],
                "mode": "route",
                "scope": "layer",
                "origin": "routed",
                "workload": case["workload"],
                "tail_model": case["tail_model"],
                "traffic": case["traffic"],
                "point": "{}",
                "how": "routing only (nothing was timed)",
                "workload_words": case["description"],
                "facts": {**case},
            }
            for case in route.cases.drop_duplicates("group").to_dict("records")
        ]
    found = pd.DataFrame(rows)
    points = [json.loads(point) for point in found["point"]]
    swept = next((key for key in dict.fromkeys(key for one in points for key in one) if _differs(key, points)), None)
    return found.assign(swept=swept, swept_value=[one.get(swept) for one in points])


_FACTS = (
    "title", "sizes", "model", "scale", "num_experts", "top_k", "num_ranks", "world_size", "num_replicas", "num_tokens",
    "num_batches", "dtype", "oversubscribed", "transport", "dispatch_dtype",
)  # fmt: skip


def _differs(key: str, points: list[dict[str, Any]]) -> bool:
    return len({json.dumps(one.get(key)) for one in points}) > 1


def samples(store: Store, of: pd.DataFrame | None = None) -> pd.DataFrame:
    """A row per case, launch, rank, batch, iteration, kind, phase and layer: ``time_us`` and ``host_us``.

    Args:
        of: rows of ``cases``; None = all.
    """
    parts = []
    for name, run in store.runs.items():
        chosen = [case for case in run.cases if _is_of(of, name, case.comparison_id, case.case_id)]
        if any(case.is_ok for case in chosen):
            parts.append(frames.samples(run, chosen).assign(directory=name))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=CASE)


def iterations(store: Store, of: pd.DataFrame | None = None) -> pd.DataFrame:
    """A row per case, kind (plain, breakdown), launch, batch and iteration, on its slowest rank.

    Columns: ``CASE``, ``kind``, ``launch``, ``batch``, ``iteration``, ``time_us``, ``host_us``; in breakdowns
    ``<phase>_us``, of a whole model summed over layers, less what a waiting probe costs when nobody waits.
    """
    parts = []
    for name, run in store.runs.items():
        for case in run.cases:
            if not case.is_ok or not _is_of(of, name, case.comparison_id, case.case_id):
                continue
            for kind in ("plain", "breakdown"):
                times = getattr(case, kind)
                if times.index.empty:
                    continue
                rows = times.index.to_frame(index=False)
                at = np.arange(len(rows)), times.slowest_rank()
                rows = rows.assign(time_us=times.of("total")[at], host_us=times.host_us[at])
                if kind == "breakdown":
                    rows = rows.assign(
                        **{f"{phase}_us": times.of(phase)[at] for phase in sorted(times.occurred - {"total"})}
                    )
                about = {"directory": name, "comparison_id": case.comparison_id, "case_id": case.case_id, "kind": kind}
                parts.append(rows.assign(**about))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=CASE)


def _is_of(of: pd.DataFrame | None, *key: str) -> bool:
    return of is None or key in set(of[CASE].itertuples(index=False, name=None))


@lru_cache(maxsize=4)
def routing(store: Store) -> pd.DataFrame:
    """A row per case, batch and layer, source ranks joined.

    Columns: ``CASE``, ``label``, ``role``, ``policy``, ``batch``, ``layer`` (null of a lone layer); counts of all ranks
    (``num_tokens``, ``num_pairs``, ``num_topk_pairs``, ...), shares of scores (``topk_share``, ``entropy``, regimes);
    ``ROUTED``, ``output_error`` (worst rank); pairs as lists: ``load_E``, ``load_R``, ``image_load_E`` (null without
    images), ``pairs_RR`` (from each source rank to each rank's experts, row by row).
    """
    parts = [_routing(store, name).assign(directory=name) for name in store.runs]
    for name, route in store.routes.items():
        rows = route.batches.rename(columns=_ROUTE_NAMES)
        about = {"directory": name, "comparison_id": rows["group"], "case_id": rows["label"], "output_error": np.nan}
        role = np.where(rows["label"] == "native", "baseline", "policy")
        layer = pd.to_numeric(rows["layer"], errors="coerce").astype("Int64")
        wanted = ["label", "policy", "batch", *_SHARES, *[c for c in _COUNTS if c in rows], *ROUTED, *_LOADS]
        parts.append(rows[wanted].assign(**about, role=role, layer=layer))
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


@lru_cache(maxsize=8)
def _routing(store: Store, name: str) -> pd.DataFrame:
    run = store.runs[name]
    parts = [_joined(case, run.comparisons[case.comparison_id]) for case in run.cases if case.is_ok]
    return pd.concat(parts, ignore_index=True)


def _joined(case: Any, facts: Any) -> pd.DataFrame:
    """One case's rows, ranks joined."""
    rows = case.routing.assign(layer=case.routing.get("layer", pd.Series(-1, case.routing.index)).fillna(-1))
    rows = rows.sort_values(["layer", "batch", "rank"])
    units = rows.groupby(["layer", "batch"])
    found = units[_COUNTS].sum().reset_index()
    num_units = len(found)
    weighted = rows[_SHARES].astype(float).mul(rows["num_tokens"], axis=0).groupby([rows["layer"], rows["batch"]]).sum()
    found[_SHARES] = weighted.to_numpy() / found[["num_tokens"]].to_numpy()
    load_UE, load_URR = (
        np.stack(rows[column].to_list()).reshape(num_units, -1, len(rows[column].iloc[0]))
        for column in ("load_E", "load_R")
    )
    load_UE, load_UR = load_UE.sum(axis=1), load_URR.sum(axis=1)
    topk_U = found["num_topk_pairs"].to_numpy()
    kept_U = mass_kept(rows, units.ngroup())
    activated_UR = (load_UE.reshape(num_units, facts.num_ranks, -1) > 0).sum(axis=2)
    is_elsewhere = facts.placement != "contiguous" or case.role == "replication"
    below = {name: np.nan for name in ("below_frontier", "below_frontier_experts")}
    if case.frontier is not None:
        most = case.frontier.sort_values(["layer", "batch"] if "layer" in case.routing else ["batch"])
        kept_by = {"below_frontier": "kept_by_load", "below_frontier_experts": "kept_by_experts"}
        below = {name: most[column].to_numpy() - kept_U for name, column in kept_by.items()}
    return found.assign(
        comparison_id=case.comparison_id,
        case_id=case.case_id,
        label=case.label,
        role=case.role,
        policy=case.policy,
        layer=found["layer"].astype("Int64").where(found["layer"] >= 0),
        output_error=units["output_error"].max().to_numpy(),
        fullest_expert=load_UE.max(axis=1) * load_UE.shape[1] / topk_U,
        fullest_rank=load_UR.max(axis=1) * load_UR.shape[1] / topk_U,
        expert_imbalance=imbalance(load_UE),
        rank_imbalance=imbalance(load_UR),
        dropped_share=found["num_dropped_pairs"] / topk_U,
        retained_mass=kept_U,
        **below,
        experts_per_token=(found["num_pairs"] - found["padding_pairs"]) / found["num_tokens"],
        activated_experts=(load_UE > 0).sum(axis=1),
        activated_fullest_rank=np.nan if is_elsewhere else activated_UR.max(axis=1),
        load_E=list(load_UE),
        load_R=list(load_UR),
        image_load_E=None,
        pairs_RR=list(load_URR.reshape(num_units, -1)),
    )


def _means(rows: pd.DataFrame) -> pd.DataFrame:
    """By comparison and case: means over batches, then over layers."""
    keys = ["comparison_id", "case_id"]
    layers = rows.assign(layer=rows["layer"].fillna(-1)).groupby([*keys, "layer"])[ROUTED].mean()
    return layers.groupby(keys).mean()


def conditions(store: Store) -> pd.DataFrame:
    """A row per comparison, launch and rank: ``COMPARISON``, ``launch``, ``rank`` and what was recorded of them."""
    rows = [
        {
            "directory": name,
            "comparison_id": comparison_id,
            "launch": launch,
            "rank": rank,
            "run_id": found.run_id,
            "warm_up_rounds": found.warm_up.rounds,
            "hostname": about.hostname,
            "matmul_tflops": about.ceilings.matmul_tflops,
            "copy_gbps": about.ceilings.copy_gbps,
            "read_gbps": about.ceilings.read_gbps,
            "peak_memory_bytes": about.peak_memory_bytes,
            "probe_floor_us": about.probe_floor_us,
            "sm_clock_mhz": about.machine.sm_clock_mhz and about.machine.sm_clock_mhz[1],
        }
        for name, run in store.runs.items()
        for comparison_id, launches in run.conditions.items()
        for launch, found in launches.items()
        for rank, about in enumerate(found.ranks)
    ]
    return pd.DataFrame(rows)


@lru_cache(maxsize=4)
def frontiers(store: Store) -> pd.DataFrame:
    """A row per case, batch and layer of what dropping alone can keep at most: ``kept_by_load``, ``kept_by_experts``.

    Of native also the curve: ``curve_load`` (fullest rank over the mean, ascending) and ``curve_kept``, lists.
    """
    parts = [
        case.frontier.assign(directory=name, comparison_id=case.comparison_id, case_id=case.case_id)
        for name, run in store.runs.items()
        for case in run.cases
        if case.frontier is not None
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=CASE)


def notes(store: Store, directory: str, comparison_id: str) -> list[str]:
    """What has to be known to read a comparison's numbers, a sentence each; warnings begin with ``warning:``."""
    if directory not in store.runs:
        return []
    run = store.runs[directory]
    result = dict(zip(run.comparisons, analyse(run), strict=True))[comparison_id]
    return [*notes_of(result), *(f"warning: {line}" for line in warnings_of(result, run))]
