"""What all ranks' routing amounts to: in each MoE layer, how many pairs each rank sends to each slot of the experts.

A layer's work on any rank follows from this and from the rank's own tokens. Memory holds the counts of all ranks, and
the tokens of as many as route side by side. A layer that stands alone is a model of one MoE layer, whose key is None.

Shapes: V = cases, R = ranks, T = tokens of one rank, E = experts, P = slots, S = rows of a batch-wide policy's
statistics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.balancers import water_fill
from moe_ep_bench.bench.comparison import BASELINE, CaseSpec, Comparison
from moe_ep_bench.bench.routing import Batches, CaseRouter, Share, Slots, case_metrics
from moe_ep_bench.bench.rows import Row
from moe_ep_bench.config import WaterfillConfig
from moe_ep_bench.workload.frontier import Frontier, top_k_pairs

# Top-k pairs of a batch that are sorted for its frontier; more would take gigabytes.
_MOST_FRONTIER_PAIRS = 2**24


@dataclass(frozen=True, eq=False)
class LayerTraffic:
    """All ranks' routing of one case on one batch in one MoE layer.

    Attributes:
        num_tokens_R: tokens of each rank.
        slots: where the case's experts stand.
        stats_SE: what a batch-wide policy's statistics sum up to over ranks; None where it has none.
        rows_R: of each rank's tokens a row of the table ``routing`` (``case_metrics``).
        moves_shared: pairs that a token's shared experts are worth, where their tokens go to ranks with few pairs.
        frontier: a row of the table ``frontier``; None where dropping has none (``_frontier_row``).
        parts: of each micro-batch the same, where tokens are cut into some; balancers have acted on all together.
    """

    num_tokens_R: list[int]
    slots: Slots
    stats_SE: Tensor | None
    rows_R: list[Row]
    moves_shared: float | None = None
    frontier: Row | None = None
    parts: list[LayerTraffic] = field(default_factory=list)

    @cached_property
    def counts_RP(self) -> NDArray[np.int64]:  # noqa: N802
        """Pairs that the tokens of each rank send to each slot."""
        return np.stack([row["slot_load_P" if "slot_load_P" in row else "load_E"] for row in self.rows_R])

    @cached_property
    def _counts_RRL(self) -> NDArray[np.int64]:  # noqa: N802
        """The same by the rank that a slot is on."""
        return self.counts_RP.reshape(len(self.rows_R), len(self.rows_R), -1)

    @property
    def rank_pairs(self) -> NDArray[np.int64]:
        """Pairs that each rank (row) sends to each (column): int64 [R, R]."""
        return self._counts_RRL.sum(axis=2)

    def copies(self, of: str) -> NDArray[np.int64]:
        """Distinct tokens that each rank (row) sends to each rank or node (column), its own included: int64 [R, X].

        Args:
            of: ``rank`` or ``node``.
        """
        return np.stack([row[{"rank": "copies_R", "node": "copies_N"}[of]] for row in self.rows_R])

    def received(self, rank: int) -> NDArray[np.int64]:
        """Rows that arrive at each of a rank's slots: int64 [P / R]."""
        return self._counts_RRL[:, rank].sum(axis=0)

    @cached_property
    def shared_RR(self) -> NDArray[np.int64] | None:  # noqa: N802
        """Tokens of each rank whose shared experts each rank computes, once rows are there; None = its own, ahead."""
        if self.moves_shared is None:
            return None
        return water_fill(self.num_tokens_R, self.rank_pairs.sum(axis=0), self.moves_shared)


@dataclass(frozen=True, eq=False)
class Traffic:
    """All ranks' routing of one case on batch ``index``, in every MoE layer.

    Attributes:
        lengths_R: of each rank, the tokens of each of its sequences; None where no attention depends on them.
        number: of the micro-batch, where it is one.
    """

    index: int
    layers: Mapping[int | None, LayerTraffic]
    lengths_R: list[tuple[int, ...]] | None = None
    number: int = 0

    def parts(self, num_parts: int) -> list[Traffic]:
        """Its micro-batches."""
        if num_parts == 1:
            return [self]
        return [
            replace(self, number=number, layers={layer: of.parts[number] for layer, of in self.layers.items()})
            for number in range(num_parts)
        ]


Routed = list[tuple[CaseRouter, Traffic]]
"""Of every case its router, and what its routing of a batch amounts to."""


class RoutedBatches:
    """All ranks' routing of a comparison's batches by cases, worked out batch by batch; what is said of it is kept.

    Attributes:
        rows: of each case by id, rows of the table ``routing``; ``frontiers``, of the table ``frontier``.
    """

    def __init__(self, comparison: Comparison, cases: Sequence[CaseSpec], device: torch.device) -> None:
        self.comparison, self.batches = comparison, Batches(comparison, device)
        self.routers = [CaseRouter(case, self.batches) for case in cases]
        self.rows: dict[str, list[Row]] = defaultdict(list)
        self.frontiers: dict[str, list[Row]] = defaultdict(list)

    def route(self, index: int, begin: Callable[[], object] = lambda: None) -> Routed:
        """Route batch ``index`` by every case.

        Args:
            begin: called ahead of each layer of a model.
        """
        comparison = self.comparison
        layers: dict[int | None, list[LayerTraffic]] = {}
        for layer in comparison.workloads:
            if layer is not None:
                begin()
            layers[layer] = traffic_of(self.batches, layer, index, self.routers)
            named = {"layer": comparison.row_layer(layer)}
            for router, of_layer in zip(self.routers, layers[layer], strict=True):
                self.rows[router.case.case_id] += [row | named for row in of_layer.rows_R]
                if of_layer.frontier is not None:
                    self.frontiers[router.case.case_id].append(of_layer.frontier | named)
        lengths_R = comparison.lengths_of_ranks(index) if comparison.scope == "model" else None
        of_cases = zip(*layers.values(), strict=True)
        return [
            (router, Traffic(index, dict(zip(layers, of_case, strict=True)), lengths_R))
            for router, of_case in zip(self.routers, of_cases, strict=True)
        ]


def traffic_of(batches: Batches, layer: int | None, index: int, routers: Sequence[CaseRouter]) -> list[LayerTraffic]:
    """Route batch ``index`` on all ranks in one layer, by every case, in one pass over the ranks.

    Two where a policy looks at the whole batch: its statistics come first.
    """
    comparison, model = batches.comparison, batches.comparison.model
    slots = [router.slots(index) for router in routers]
    for router in routers:
        router.carried(layer, index, 0)  # worked out before threads ask for it
    stats = _statistics(batches, layer, index, routers)
    per_node, num_parts = comparison.ranks_per_node, comparison.num_parts
    is_sorted = comparison.num_tokens * model.top_k <= _MOST_FRONTIER_PAIRS

    def routed(of_rank: Share) -> tuple[int, list[Row], list[list[Row]], tuple[Tensor, Tensor] | None]:
        """Tokens, of every case a row of metrics and what its micro-batches send, and the top-k pairs."""
        rows, parts = [], []
        for router, placed in zip(routers, slots, strict=True):
            share = of_rank.of(router.case)
            routing = router.route(share, stats.get(router))
            rows.append(case_metrics(router.case, routing, share, per_node))
            if not placed.is_contiguous:
                rows[-1] |= placed.metrics(routing.map_TE, share.rank, per_node)
            parts.append(placed.parts(routing.map_TE, share.rank, per_node, num_parts) if num_parts > 1 else [])
        pairs = top_k_pairs(of_rank.scores_TE, of_rank.of_scores.top_k_TE) if is_sorted else None
        return of_rank.num_tokens, rows, parts, pairs

    num_tokens_R, rows_RV, parts_RV, pairs_R = zip(*batches.of_ranks(routed, layer, index), strict=True)
    rank_E = torch.arange(model.num_experts) // (model.num_experts // comparison.ep_size)
    frontier = Frontier.of(pairs_R, rank_E) if is_sorted else None
    traffic = []
    by_case = zip(routers, slots, zip(*rows_RV, strict=True), zip(*parts_RV, strict=True), strict=True)
    for router, placed, rows_R, parts_R in by_case:
        fills = isinstance(router.case.replication, WaterfillConfig)
        per_token = model.shared_ffn_hidden_size / model.ffn_hidden_size if fills else None
        stats_MSE = stats.get(router)
        whole_SE = None if stats_MSE is None else stats_MSE.sum(dim=0)
        of_case = LayerTraffic(list(num_tokens_R), placed, whole_SE, list(rows_R), per_token)
        for number, part_R in enumerate(zip(*parts_R, strict=True)):
            of_case.parts.append(
                LayerTraffic(
                    [row["num_tokens"] for row in part_R],
                    placed if number == 0 else replace(placed, moved_bytes_RR=None),  # Weights move once.
                    None if stats_MSE is None else stats_MSE[number],
                    list(part_R),
                    per_token,
                )
            )
        traffic.append(replace(of_case, frontier=_frontier_row(frontier, index, router.case, of_case)))
    return traffic


def _statistics(
    batches: Batches, layer: int | None, index: int, routers: Sequence[CaseRouter]
) -> dict[CaseRouter, Tensor]:
    """What each batch-wide policy's statistics sum up to over all ranks: float64 [M, S, E], by micro-batch."""
    with torch.inference_mode():
        first = batches.share(layer, index, 0)
        wide = [router for router in routers if router.stats_of(first.of(router.case)) is not None]

    def stats_of(share: Share) -> list[Tensor]:
        return [router.stats_of(share.of(router.case)) for router in wide]

    of_ranks = batches.of_ranks(stats_of, layer, index) if wide else []
    return {router: sum(stats_R) for router, stats_R in zip(wide, zip(*of_ranks, strict=True), strict=False)}


def _frontier_row(frontier: Frontier | None, index: int, case: CaseSpec, traffic: LayerTraffic) -> Row | None:
    """Of the top-k mass what dropping alone keeps at most where a case computes its loads; the whole curve for native.

    None for cases whose experts have no single home each.
    """
    if frontier is None or not traffic.slots.is_contiguous:
        return None
    load_E = traffic.counts_RP.sum(axis=0)
    loads, kept = frontier.curve() if case.role == BASELINE else (None, None)
    return {
        "batch": index,
        "kept_by_load": frontier.kept(int(traffic.rank_pairs.sum(axis=0).max())),
        "kept_by_experts": frontier.kept_by_experts(int((load_E > 0).sum())),
        "curve_load": loads,
        "curve_kept": kept,
    }
