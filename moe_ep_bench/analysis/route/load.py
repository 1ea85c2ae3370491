"""Read a directory that ``moe-ep-bench route`` wrote as frames, with virtual ranks joined.

Rows on disk are per source rank; a batch is one thing to the model, to an expert and to a GPU. So ranks are joined
first (counts and score mass are summed), every batch of every layer for itself, and only what is
reduced there (``metrics.imbalance``) may be averaged afterwards.

Shapes: L = layers, B = batches, E = experts, R = EP ranks, N = E or R.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveFloat

from moe_ep_bench.analysis.load import CaseFacts, Count, Workload
from moe_ep_bench.analysis.parts import (
    Described,
    ResultsError,
    Tried,
    check_counts,
    described,
    read_frontier,
    read_run_json,
    read_table,
)
from moe_ep_bench.metrics import imbalance, mass_kept
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import METRICS, OVERLAP_SCHEMA, ROUTING_SCHEMA, SCORE_CURVES_SCHEMA
from moe_ep_bench.workload.formatting import tokens_words

_COUNTS = [
    "num_tokens", "num_pairs", "padding_pairs", "num_topk_pairs", "num_dropped_pairs", "tokens_without_expert",
    "crossing_pairs",
]  # fmt: skip
_SHARES = [name for name, metric in METRICS.items() if metric.of == "scores"]
_READ = ["case_id", "rank", "batch", *_COUNTS, *_SHARES, "retained_mass_topk", "load_E", "load_R", "image_load_E"]
# Of all ranks together.
ROUTED = [
    "fullest_expert",  # its pairs over native's mean, T K / E: with it goes the time
    "fullest_rank",  # likewise, over T K / R
    "expert_imbalance",  # pairs of the fullest expert over the mean of the pairs that are computed
    "rank_imbalance",
    "dropped_share",  # of the model's own pairs
    "retained_mass",  # selected score mass over the top-k's
    "experts_per_token",  # of valid tokens
    "activated",  # experts with a pair
    "fullest_activated",  # on the rank that has most of them
]
# What dropping alone keeps at most, less what the case keeps, of the top-k's mass; null where it was not computed.
FRONTIER = ["below_frontier", "below_frontier_experts"]
# What run.json says of a comparison. Layers of a ``group``, and sizes of a ``family``, differ in nothing else.
_FACTS = [
    "order", "group", "family", "model", "num_experts", "top_k", "num_ranks", "num_tokens", "num_batches", "traffic",
    "phase", "image_share",
]  # fmt: skip
_LOADS = ["load_E", "load_R", "load_over_mean_E", "image_load_E", "pairs_RR"]


class _Facts(Described):  # ``bench.description``
    order: int
    title: str
    group: str
    family: str
    model: str
    num_experts: Count
    top_k: Count
    num_ranks: Count
    num_tokens: Count
    num_batches: Count
    traffic: str
    phase: str | None
    layer: NonNegativeInt | None
    image_share: float | None
    bytes_per_pair: PositiveFloat | None = None
    workload: Workload


class _Case(CaseFacts):
    order: int


class _RunFacts(Described):
    """run.json, whose comparisons and cases are validated one by one."""

    mode: Literal["route"]
    comparisons: dict[str, Any]
    cases: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RouteRun:
    """Everything a route directory holds.

    Each frame names its ``group`` (layers that were routed alike) and ``layer``, and what is known of these:
    ``comparison`` (the group's title), ``num_layers``, ``workload`` (its kind), ``description``,
    ``tail_model``, ``is_padded``, and ``_FACTS``.

    Attributes:
        batches: a row per group, layer, case and batch, in that order, ``native`` first; cases that a layer lacks are
            left out. Columns: ``label``, ``policy``, ``params``, ``looks_past_top_k``; summed counts and mean shares of
            the table ``routing``; ``ROUTED``; pairs as arrays: ``load_E``, ``load_R``, ``load_over_mean_E`` (over the
            model's mean load T * K / E), ``image_load_E`` (of image tokens; null without modality), ``pairs_RR``
            (from each source rank to each rank's experts, row by row).
        scores, overlap: the tables ``score_curves`` and ``overlap``.
    """

    directory: Path
    batches: pd.DataFrame
    scores: pd.DataFrame
    overlap: pd.DataFrame

    @cached_property
    def layers(self) -> pd.DataFrame:
        """A row per group, case and layer: means over batches."""
        return _means(self.batches.drop(columns=_LOADS), ["group", "label", "layer"])

    @cached_property
    def cases(self) -> pd.DataFrame:
        """A row per group and case: means over batches, then over layers."""
        return _means(self.layers, ["group", "label"])

    def loads(self, group: str, label: str, name: str) -> NDArray[np.float64]:
        """An array column of one case's batches: [L, B, N]."""
        rows = self.batches[(self.batches["group"] == group) & (self.batches["label"] == label)]
        return np.stack(rows[name].to_list()).reshape(rows["layer"].nunique(), -1, len(rows[name].iloc[0]))

    def named(self, words: str) -> RouteRun:
        """The same, with ``words`` behind what every figure's footer says of the workload."""
        frames = {name: getattr(self, name) for name in ("batches", "scores", "overlap")}
        said = {name: rows.assign(description=rows["description"] + f", {words}") for name, rows in frames.items()}
        return replace(self, **said)


def _means(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    grouped = rows.groupby(keys, sort=False)
    return grouped.first().assign(**grouped[[*_COUNTS, *_SHARES, *ROUTED, *FRONTIER]].mean()).reset_index()


def short(label: str) -> str:
    """A case's label for tables and legends: that there are bands, and not which."""
    return re.sub(r" bands=\S+", " bands", label)


def load_route(directory: Path | str, passed_over: list[str] | None = None) -> RouteRun:
    """Read and check a route directory.

    Args:
        passed_over: where it is given, cases and layers that cannot be trusted are left out, and a line that names the
            file and what is wrong with it is added here for each. None = the first such is raised.

    Raises:
        ResultsError: one line that names the file and what is wrong with it; with ``passed_over`` only where nothing
            is left.
    """
    files = RunDirectory(Path(directory))
    tried = Tried(passed_over)
    content = described(_RunFacts, files.run_json, "", read_run_json(files.run_json))
    about, read = [], {}
    found = {
        kind: {
            key: facts.model_dump()
            for key, one in listed.items()
            if (facts := tried(described, model, files.run_json, f"{kind}.{key}", one)) is not None
        }
        for kind, model, listed in (("comparisons", _Facts, content.comparisons), ("cases", _Case, content.cases))
    }
    cases = sorted(found["cases"].items(), key=lambda case: case[1]["order"])
    for comparison_id, facts in sorted(found["comparisons"].items(), key=lambda item: item[1]["order"]):
        own = {case_id: case for case_id, case in cases if case["comparison_id"] == comparison_id}
        if (frames := tried(_read_layer, files, comparison_id, facts, own, tried)) is not None:
            about.append(_about(comparison_id, facts))
            read[comparison_id] = frames
    if not read:
        raise ResultsError(f"{files.run_json}: {'no comparison can be read' if passed_over else 'lists no comparison'}")
    known = pd.DataFrame(about).set_index("comparison_id").loc[list(read)]
    groups = known.groupby("group")
    known = known.assign(place=groups["order"].transform("min"), num_layers=groups["layer"].transform("size"))
    known = known.sort_values(["place", "layer_number"], kind="stable")
    layers = known.groupby("group")["layer"]
    # The workload's own words, of all layers together.
    spans = layers.transform("size").astype(str) + " layers from " + layers.transform("first") + " to "
    spans += layers.transform("last")
    known["description"] = [
        words if number == 1 else re.sub(r"layer \d+", span, words, count=1)
        for words, number, span in zip(known["description"], known["num_layers"], spans, strict=True)
    ]

    def joined(place: int) -> pd.DataFrame:
        rows = pd.concat([read[key][place].assign(comparison_id=key) for key in known.index], ignore_index=True)
        clashing = [name for name in rows if name in known]
        return rows.join(known.drop(columns=clashing), on="comparison_id").drop(columns="comparison_id")

    batches, scores, overlap = map(joined, range(3))
    num_layers = batches.groupby(["group", "label"])["layer"].transform("nunique")
    return RouteRun(files.root, batches[num_layers == batches["num_layers"]], scores, overlap)


def _about(comparison_id: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What each row of a comparison says of it."""
    workload, layer = facts["workload"], facts["layer"]
    size = tokens_words(facts["num_tokens"])
    return {
        "comparison_id": comparison_id,
        **{name: facts[name] for name in _FACTS},
        "comparison": f"{facts['model']}, {size}, EP {facts['num_ranks']}, {facts['traffic']}",
        "layer": "-" if layer is None else str(layer),
        "layer_number": layer or 0,
        "bytes_per_pair": facts.get("bytes_per_pair"),
        "workload": workload["kind"],
        "description": workload["description"],
        "tail_model": workload["tail_model"],
        "is_padded": workload.get("padding") is not None,
    }


def _read_layer(
    files: RunDirectory,
    comparison_id: str,
    facts: Mapping[str, Any],
    cases: Mapping[str, Mapping[str, Any]],
    tried: Tried,
) -> tuple[pd.DataFrame, ...]:
    """One comparison's batches, score curves and overlap."""
    read = [(case["role"], tried(_read_case, files, case_id, case, facts)) for case_id, case in cases.items()]
    if not any(role == "baseline" and rows is not None for role, rows in read):
        raise ResultsError(
            f"{files.run_json}: comparisons.{comparison_id} ({facts['title']}): its native case cannot be read, and "
            "all others are held against it"
        )
    scores = _read_table(files.path("score_curves", comparison_id), SCORE_CURVES_SCHEMA)
    overlap_path = files.path("overlap", comparison_id)
    has_overlap = overlap_path.is_file()
    overlap = (read_table(overlap_path, OVERLAP_SCHEMA) if has_overlap else OVERLAP_SCHEMA.empty_table()).to_pandas()
    return pd.concat([rows for _, rows in read if rows is not None], ignore_index=True), scores, overlap


def _read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pd.DataFrame:
    if not path.is_file():
        raise ResultsError(f"{path}: missing; routing did not finish: start it again to go on")
    return read_table(path, schema, columns).to_pandas()


def _read_case(files: RunDirectory, case_id: str, case: Mapping[str, Any], facts: Mapping[str, Any]) -> pd.DataFrame:
    """One row per batch, ranks joined."""
    path, num_experts = files.path("routing", case_id), facts["num_experts"]
    rows = _read_table(path, ROUTING_SCHEMA, _READ)
    if set(rows["case_id"]) != {case_id}:
        raise ResultsError(f"{path}: foreign, case_id: expected {case_id!r} in all rows")
    rows = rows.sort_values(["batch", "rank"])
    ranks, every_batch = [*range(facts["num_ranks"])] * facts["num_batches"], rows["batch"].unique()
    if rows["rank"].tolist() != ranks or rows["batch"].tolist() != every_batch.repeat(facts["num_ranks"]).tolist():
        raise ResultsError(
            f"{path}: expected one row for each of {facts['num_ranks']} ranks in {facts['num_batches']} batches, "
            f"got {len(rows)}"
        )
    check_counts(path, rows, {"load_E": num_experts, "load_R": facts["num_ranks"]})
    batches = rows["batch"].to_numpy()[:: facts["num_ranks"]]
    shape = len(batches), facts["num_ranks"], -1
    summed_BN = rows[_COUNTS].to_numpy().reshape(shape).sum(axis=1)
    counts = dict(zip(_COUNTS, summed_BN.T, strict=True))
    weighted_BRN = (rows[_SHARES].to_numpy(dtype=float) * rows[["num_tokens"]].to_numpy()).reshape(shape)
    means = dict(zip(_SHARES, np.nansum(weighted_BRN, axis=1).T / counts["num_tokens"], strict=True))
    load_BRE = np.stack(rows["load_E"].to_list()).reshape(shape)
    load_BE = load_BRE.sum(axis=1)
    if case["role"] == "replication":  # Replicas stand elsewhere in every batch; their ranks were counted.
        pairs_NR, fullest_activated = np.stack(rows["load_R"].to_list()).astype(np.float64), np.nan
    else:
        pairs_NR = load_BRE.reshape(len(rows), facts["num_ranks"], -1).sum(axis=2).astype(np.float64)
        fullest_activated = (load_BE > 0).reshape(*shape).sum(axis=2).max(axis=1)
    pairs_BRR = pairs_NR.reshape(shape)
    load_BR = pairs_BRR.sum(axis=1)
    has_images = bool(rows["image_load_E"].notna().all())
    images_BE = np.stack(rows["image_load_E"].to_list()).reshape(shape).sum(axis=1) if has_images else None
    retained_B = mass_kept(rows, rows["batch"])
    return pd.DataFrame(
        {
            "batch": batches,
            **counts,
            **means,
            "label": case["label"],
            "policy": case["policy"],
            "params": [case["policy_params"]] * len(batches),
            "looks_past_top_k": case["looks_past_top_k"],
            "fullest_expert": load_BE.max(axis=1) * num_experts / counts["num_topk_pairs"],
            "fullest_rank": load_BR.max(axis=1) * facts["num_ranks"] / counts["num_topk_pairs"],
            "expert_imbalance": imbalance(load_BE),
            "rank_imbalance": imbalance(load_BR),
            "dropped_share": counts["num_dropped_pairs"] / counts["num_topk_pairs"],
            "retained_mass": retained_B,
            **_below_frontier(files, case_id, rows, retained_B),
            "experts_per_token": (counts["num_pairs"] - counts["padding_pairs"]) / counts["num_tokens"],
            "activated": (load_BE > 0).sum(axis=1),
            "fullest_activated": fullest_activated,
            "load_E": list(load_BE),
            "load_R": list(load_BR),
            "load_over_mean_E": list(load_BE * (num_experts / counts["num_topk_pairs"][:, None])),
            "image_load_E": None if images_BE is None else list(images_BE),
            "pairs_RR": list(pairs_BRR.reshape(len(batches), -1)),
        }
    )


def _below_frontier(files: RunDirectory, case_id: str, routing: pd.DataFrame, retained_B: np.ndarray) -> dict[str, Any]:
    """``FRONTIER`` of every batch; a rerouting policy may keep more, below 0."""
    rows = read_frontier(files, case_id, routing)
    if rows is None:
        return dict.fromkeys(FRONTIER, np.nan)
    most = (rows["kept_by_load"], rows["kept_by_experts"])
    return {name: one.to_numpy() - retained_B for name, one in zip(FRONTIER, most, strict=True)}
