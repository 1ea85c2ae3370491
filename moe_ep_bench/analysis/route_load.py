"""Read a directory that ``moe-ep-bench route`` wrote, and join its virtual ranks.

Rows are per source rank; a batch is one thing to the model, to an expert and to a GPU. So ranks are joined first
(counts are summed, shares of mass weighted by tokens), every batch of every layer for itself, and only what is
reduced there (``metrics.imbalance``) may be averaged afterwards.

Shapes: B = batches, E = experts, R = EP ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from moe_ep_bench.analysis.described import Tried, Workload, read_run_json
from moe_ep_bench.analysis.load import is_route as is_route  # beside what it guards
from moe_ep_bench.analysis.parts import ResultsError, one_line, read_table
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
class RoutedCase:
    """One policy, or the model's own top-k, on one layer: its batches, ranks joined.

    Attributes:
        counts_B: one row per batch: summed counts, and means over tokens weighted by tokens.
        load_BE: int64, pairs per expert. image_load_BE: those of image tokens; None without modality.
    """

    case_id: str
    comparison_id: str
    policy: str
    params: Mapping[str, Any]
    label: str
    is_baseline: bool
    looks_past_top_k: bool
    counts_B: pd.DataFrame
    load_BE: NDArray[np.int64]
    image_load_BE: NDArray[np.int64] | None
    top_k: int
    placement: Placement

    @cached_property
    def rank_load(self) -> NDArray[np.float64]:
        return self.placement.rank_load(self.load_BE)

    @property
    def expert_imbalance(self) -> NDArray[np.float64]:
        return imbalance(self.load_BE)

    @property
    def rank_imbalance(self) -> NDArray[np.float64]:
        return imbalance(self.rank_load)

    @property
    def normalised_load(self) -> NDArray[np.float64]:
        """Pairs over the model's mean load T * K / E, whatever the policy computes."""
        return self.load_BE * (self.load_BE.shape[1] / self.counts_B["num_topk_pairs"].to_numpy()[:, None])

    @property
    def activated(self) -> NDArray[np.int64]:
        return (self.load_BE > 0).sum(axis=1)

    @property
    def fullest_activated(self) -> NDArray[np.int64]:
        """Activated experts on the rank that has most of them."""
        return self.placement.activated_experts(self.load_BE).max(axis=1)

    @property
    def dropped_share(self) -> NDArray[np.float64]:
        return (self.counts_B["num_dropped_pairs"] / self.counts_B["num_topk_pairs"]).to_numpy()

    @property
    def retained_mass(self) -> NDArray[np.float64]:
        """Selected score mass over the top-k's."""
        return (self.counts_B["selected_mass"] / self.counts_B["topk_share"]).to_numpy()

    @property
    def experts_per_token(self) -> NDArray[np.float64]:
        """Of valid tokens."""
        of_valid_B = self.counts_B["num_pairs"] - self.counts_B["padding_pairs"]
        return (of_valid_B / self.counts_B["num_tokens"]).to_numpy()


@dataclass(frozen=True, eq=False)
class RoutedLayer:
    """One comparison: a layer, its baseline and its policies."""

    comparison_id: str
    facts: Facts
    cases: Mapping[str, RoutedCase]
    """By label; the baseline is ``native``."""
    scores: pd.DataFrame
    overlap: pd.DataFrame

    @property
    def native(self) -> RoutedCase:
        return next(case for case in self.cases.values() if case.is_baseline)


@dataclass(frozen=True, eq=False)
class RouteGroup:
    """Layers that were routed alike, in the order of the layers."""

    layers: tuple[RoutedLayer, ...]

    @property
    def facts(self) -> Facts:
        return self.layers[0].facts

    @property
    def layer_names(self) -> list[str]:
        return ["-" if layer.facts.layer is None else str(layer.facts.layer) for layer in self.layers]

    @property
    def labels(self) -> list[str]:
        """Cases that every layer has, the baseline first."""
        return [label for label in self.layers[0].cases if all(label in layer.cases for layer in self.layers)]

    def cases(self, label: str) -> list[RoutedCase]:
        """The same case on every layer."""
        return [layer.cases[label] for layer in self.layers]

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

        def renamed(layer: RoutedLayer) -> RoutedLayer:
            workload = layer.facts.workload
            described = workload.model_copy(update={"description": f"{workload.description}, {words}"})
            return replace(layer, facts=layer.facts.model_copy(update={"workload": described}))

        groups = tuple(RouteGroup(tuple(map(renamed, group.layers))) for group in self.groups)
        return RouteRun(self.directory, groups)


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
    by_comparison: dict[str, dict[str, _CaseFacts]] = {comparison_id: {} for comparison_id in description.comparisons}
    for case_id, case in sorted(description.cases.items(), key=lambda item: item[1].order):
        by_comparison[case.comparison_id][case_id] = case
    groups: dict[str, list[RoutedLayer]] = {}
    for comparison_id, facts in sorted(description.comparisons.items(), key=lambda item: item[1].order):
        spec = facts.placement.shares or facts.placement.name
        placement = make_placement(spec, facts.num_experts, facts.num_ranks)
        cases = [
            tried(_read_case, files, case_id, case, facts, placement)
            for case_id, case in by_comparison[comparison_id].items()
        ]
        layer = tried(_layer, files, comparison_id, facts, [case for case in cases if case is not None])
        if layer is not None:
            groups.setdefault(facts.group, []).append(layer)
    if not groups:
        raise ResultsError(f"{files.run_json}: {'no comparison can be read' if passed_over else 'lists no comparison'}")
    ordered = [sorted(layers, key=lambda layer: layer.facts.layer or 0) for layers in groups.values()]
    return RouteRun(files.root, tuple(RouteGroup(tuple(layers)) for layers in ordered))


def _layer(files: RunDirectory, comparison_id: str, facts: Facts, cases: list[RoutedCase]) -> RoutedLayer:
    if not any(case.is_baseline for case in cases):
        raise ResultsError(
            f"{files.run_json}: comparisons.{comparison_id} ({facts.title}): its native case cannot be read, and all "
            "others are held against it"
        )
    return RoutedLayer(
        comparison_id,
        facts,
        {case.label: case for case in cases},
        _read_table(files.path("score_curves", comparison_id), SCORE_CURVES_SCHEMA),
        _read_table(files.path("overlap", comparison_id), OVERLAP_SCHEMA, optional=True),
    )


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


def _read_table(path: Path, schema: pa.Schema, *, optional: bool = False) -> pd.DataFrame:
    if not path.is_file():
        if optional:
            return pd.DataFrame(columns=schema.names)
        raise ResultsError(f"{path}: missing; routing did not finish: start it again to go on")
    return read_table(path, schema).to_pandas()


def _read_case(files: RunDirectory, case_id: str, case: _CaseFacts, facts: Facts, placement: Placement) -> RoutedCase:
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
    has_images = rows["image_load_E"].notna().all()
    return RoutedCase(
        case_id=case_id,
        comparison_id=case.comparison_id,
        policy=case.policy,
        params=case.policy_params,
        label=case.label,
        is_baseline=case.role == "baseline",
        looks_past_top_k=case.looks_past_top_k,
        counts_B=pd.concat([counts, means], axis=1),
        load_BE=_summed(grouped, "load_E"),
        image_load_BE=_summed(grouped, "image_load_E") if has_images else None,
        top_k=facts.top_k,
        placement=placement,
    )


def _summed(grouped: Any, column: str) -> NDArray[np.int64]:
    """A list column summed over the rows of every batch: [B, E]."""
    return np.stack([np.sum(np.stack(batch[column].to_list()), axis=0) for _, batch in grouped]).astype(np.int64)
