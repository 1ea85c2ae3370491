"""Read a directory that ``moe-ep-bench route`` wrote as frames, with virtual ranks joined.

Rows are per source rank; a batch is one thing to the model, to an expert and to a GPU. So ranks are joined first
(counts are summed, shares of mass weighted by tokens), every batch of every layer for itself, and only what is
reduced there (``metrics.imbalance``) may be averaged afterwards.

Shapes: L = layers, B = batches, E = experts, R = EP ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from moe_ep_bench.analysis.load import Workload
from moe_ep_bench.analysis.load import is_route as is_route  # beside what it guards
from moe_ep_bench.analysis.parts import ResultsError, Tried, one_line, read_run_json, read_table
from moe_ep_bench.metrics import imbalance
from moe_ep_bench.placement import Placement, make_placement
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import METRICS, OVERLAP_SCHEMA, ROUTING_SCHEMA, SCORE_CURVES_SCHEMA
from moe_ep_bench.workload.formatting import tokens_words

_COUNTS = [
    "num_tokens", "num_pairs", "padding_pairs", "num_topk_pairs", "num_dropped_pairs", "tokens_without_expert",
    "crossing_pairs",
]  # fmt: skip
_SHARES = [name for name, metric in METRICS.items() if metric.of == "scores"]
# Of all ranks together.
ROUTED = (
    "expert_imbalance",  # pairs of the fullest expert over the mean one's
    "rank_imbalance",
    "dropped_share",  # of the model's own pairs
    "retained_mass",  # selected score mass over the top-k's
    "experts_per_token",  # of valid tokens
    "activated",  # experts with a pair
    "fullest_activated",  # on the rank that has most of them
)
_OF_CASE = ["policy", "params", "looks_past_top_k"]


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _PlacementFacts(_Described):
    name: str
    shares: list[list[float]] | None  # of a matrix


class Facts(_Described):
    """What all cases of a comparison share; layers of a ``group`` and sizes of a ``family`` differ in nothing else."""

    order: int
    title: str
    model: str
    num_experts: int
    top_k: int
    num_ranks: int
    num_tokens: int
    num_batches: int
    layer: int | None
    traffic: str
    phase: Literal["prefill", "decode"]
    group: str
    family: str
    placement: _PlacementFacts
    layer_weights: list[float] | None
    image_share: float | None
    workload: Workload


class _CaseFacts(_Described):
    order: int
    comparison_id: str
    policy: str
    policy_params: dict[str, Any]
    label: str
    role: Literal["baseline", "policy"]
    looks_past_top_k: bool


class _Description(_Described):
    mode: str
    run_id: str
    comparisons: dict[str, Facts]
    cases: dict[str, _CaseFacts]


@dataclass(frozen=True, eq=False)
class RouteGroup:
    """Layers that were routed alike, in the order of the layers.

    Attributes:
        facts: the first layer's.
        layers: None where nothing numbers the one layer.
        batches: one row per layer, case and batch, for cases that every layer has; the baseline, ``native``, stands
            first. Columns: ``layer`` (its name), ``label``, ``policy``, ``params``, ``looks_past_top_k``; summed
            counts and mean shares of ``routing``; ``ROUTED``; pairs as arrays: ``load_E``, ``load_R``,
            ``load_over_mean_E`` (over the model's mean load T * K / E) and ``image_load_E`` (of image tokens; absent
            without modality).
        scores, overlap: the tables of all layers, with ``layer``.
    """

    facts: Facts
    layers: tuple[int | None, ...]
    batches: pd.DataFrame
    scores: pd.DataFrame
    overlap: pd.DataFrame

    @property
    def layer_names(self) -> list[str]:
        return [_name(layer) for layer in self.layers]

    @cached_property
    def by_layer(self) -> pd.DataFrame:
        """One row per ``label`` and ``layer``: means over batches."""
        numbers = [*_COUNTS, *_SHARES, *ROUTED]
        return self.batches.groupby(["label", "layer"], sort=False)[numbers].mean().reset_index()

    @cached_property
    def cases(self) -> pd.DataFrame:
        """One row per case, by label: ``policy``, ``params``, ``looks_past_top_k``; means over batches, then layers."""
        cases = self.batches.drop_duplicates("label").set_index("label")[_OF_CASE]
        return cases.join(self.by_layer.drop(columns="layer").groupby("label").mean())

    def of(self, labels: Iterable[str]) -> pd.DataFrame:
        """The rows of ``by_layer`` of some cases, case by case."""
        return pd.concat([self.by_layer[self.by_layer["label"] == label] for label in labels], ignore_index=True)

    def loads(self, label: str, name: str) -> NDArray[np.float64]:
        """An array column of a case's batches: [L, B, E or R]."""
        load_NE = np.stack(self.batches.loc[self.batches["label"] == label, name].to_list())
        return load_NE.reshape(len(self.layers), -1, load_NE.shape[1])

    @property
    def title(self) -> str:
        facts = self.facts
        return f"{facts.model}, {tokens_words(facts.num_tokens)}, EP {facts.num_ranks}, {facts.traffic}"


@dataclass(frozen=True, eq=False)
class RouteRun:
    """Everything a route directory holds."""

    directory: Path
    groups: tuple[RouteGroup, ...]

    def named(self, words: str) -> RouteRun:
        """The same, with ``words`` behind what every figure's footer says of the workload."""
        groups = []
        for group in self.groups:
            workload = group.facts.workload
            workload = workload.model_copy(update={"description": f"{workload.description}, {words}"})
            groups.append(replace(group, facts=group.facts.model_copy(update={"workload": workload})))
        return RouteRun(self.directory, tuple(groups))


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
    description = _read_description(files.run_json)
    groups: dict[str, list[RouteGroup]] = {}
    for comparison_id, facts in sorted(description.comparisons.items(), key=lambda item: item[1].order):
        layer = tried(_read_layer, files, comparison_id, description, tried)
        if layer is not None:
            groups.setdefault(facts.group, []).append(layer)
    if not groups:
        raise ResultsError(f"{files.run_json}: {'no comparison can be read' if passed_over else 'lists no comparison'}")
    return RouteRun(files.root, tuple(_joined(layers) for layers in groups.values()))


def _joined(layers: list[RouteGroup]) -> RouteGroup:
    """The layers of a group as one, with the cases that every layer has."""
    layers = sorted(layers, key=lambda layer: layer.facts.layer or 0)
    common = set.intersection(*(set(layer.batches["label"]) for layer in layers))
    batches = pd.concat([layer.batches for layer in layers], ignore_index=True)
    overlaps = [layer.overlap for layer in layers if len(layer.overlap)]
    return RouteGroup(
        layers[0].facts,
        tuple(layer.facts.layer for layer in layers),
        batches[batches["label"].isin(common)],
        pd.concat([layer.scores for layer in layers], ignore_index=True),
        pd.concat(overlaps, ignore_index=True) if overlaps else layers[0].overlap,
    )


def _name(layer: int | None) -> str:
    return "-" if layer is None else str(layer)


def _read_layer(files: RunDirectory, comparison_id: str, description: _Description, tried: Tried) -> RouteGroup:
    """One comparison, as a group of one layer."""
    facts = description.comparisons[comparison_id]
    placement = make_placement(facts.placement.shares or facts.placement.name, facts.num_experts, facts.num_ranks)
    cases = [(case_id, case) for case_id, case in description.cases.items() if case.comparison_id == comparison_id]
    read = [
        (case.role, tried(_read_case, files, case_id, case, facts, placement))
        for case_id, case in sorted(cases, key=lambda item: item[1].order)
    ]
    if not any(role == "baseline" and rows is not None for role, rows in read):
        raise ResultsError(
            f"{files.run_json}: comparisons.{comparison_id} ({facts.title}): its native case cannot be read, and all "
            "others are held against it"
        )
    scores = _read_table(files.path("score_curves", comparison_id), SCORE_CURVES_SCHEMA)
    overlap_path = files.path("overlap", comparison_id)
    overlap = (
        _read_table(overlap_path, OVERLAP_SCHEMA)
        if overlap_path.is_file()
        else pd.DataFrame(columns=OVERLAP_SCHEMA.names)
    )
    batches = pd.concat([rows for _, rows in read if rows is not None], ignore_index=True)
    of_layer = (frame.assign(layer=_name(facts.layer)) for frame in (batches, scores, overlap))
    return RouteGroup(facts, (facts.layer,), *of_layer)


def _read_description(path: Path) -> _Description:
    content = read_run_json(path)
    try:
        description = _Description.model_validate(content)
    except ValidationError as error:
        raise ResultsError(f"{path}: damaged: {one_line(error)[:200]}") from None
    if description.mode != "route":
        raise ResultsError(f"{path}: mode: expected route, got {description.mode}")
    for case_id, case in description.cases.items():
        if case.comparison_id not in description.comparisons:
            raise ResultsError(f"{path}: cases.{case_id}.comparison_id: no comparison {case.comparison_id!r}")
    return description


def _read_table(path: Path, schema: pa.Schema) -> pd.DataFrame:
    if not path.is_file():
        raise ResultsError(f"{path}: missing; routing did not finish: start it again to go on")
    return read_table(path, schema).to_pandas()


def _read_case(files: RunDirectory, case_id: str, case: _CaseFacts, facts: Facts, placement: Placement) -> pd.DataFrame:
    """One row per batch, ranks joined."""
    path = files.path("routing", case_id)
    rows = _read_table(path, ROUTING_SCHEMA)
    if set(rows["case_id"]) != {case_id}:
        raise ResultsError(f"{path}: foreign, case_id: expected {case_id!r} in all rows")
    if len(rows) != facts.num_ranks * facts.num_batches or rows.duplicated(["rank", "batch"]).any():
        raise ResultsError(
            f"{path}: expected one row for each of {facts.num_ranks} ranks in {facts.num_batches} batches, "
            f"got {len(rows)}"
        )
    if (rows["load_E"].map(len) != facts.num_experts).any():
        raise ResultsError(f"{path}: load_E: expected {facts.num_experts} entries")
    grouped = rows.groupby("batch")
    counts = grouped[_COUNTS].sum()
    weighted = rows[_SHARES].mul(rows["num_tokens"], axis=0)
    # Scores of every token sum to 1, so that a share of all mass is a mean over tokens.
    weighted["selected_mass"] = rows["retained_mass_all"] * rows["num_tokens"]
    means = weighted.groupby(rows["batch"]).sum().div(counts["num_tokens"], axis=0)
    load_BE = _summed(grouped, "load_E")
    load_BR = placement.rank_load(load_BE)
    frame = pd.concat([counts, means], axis=1).assign(
        label=case.label,
        policy=case.policy,
        params=[case.policy_params] * len(counts),
        looks_past_top_k=case.looks_past_top_k,
        expert_imbalance=imbalance(load_BE),
        rank_imbalance=imbalance(load_BR),
        dropped_share=counts["num_dropped_pairs"] / counts["num_topk_pairs"],
        retained_mass=means["selected_mass"] / means["topk_share"],
        experts_per_token=(counts["num_pairs"] - counts["padding_pairs"]) / counts["num_tokens"],
        activated=(load_BE > 0).sum(axis=1),
        fullest_activated=placement.activated_experts(load_BE).max(axis=1),
        load_E=list(load_BE),
        load_R=list(load_BR),
        load_over_mean_E=list(load_BE * (facts.num_experts / counts["num_topk_pairs"].to_numpy()[:, None])),
    )
    if rows["image_load_E"].notna().all():
        frame["image_load_E"] = list(_summed(grouped, "image_load_E"))
    return frame.reset_index()


def _summed(grouped: Any, column: str) -> NDArray[np.int64]:
    """A list column summed over the rows of every batch: [B, E]."""
    return np.stack([np.sum(np.stack(batch[column].to_list()), axis=0) for _, batch in grouped]).astype(np.int64)
