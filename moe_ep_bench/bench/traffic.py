"""What all ranks' routing amounts to: in each MoE layer, how many pairs each rank sends to each slot of the experts.

A layer's work on any rank follows from this and from the rank's own tokens. Layers, and in each the ranks, route one
after another: memory holds one rank's tokens and the counts of all. A layer that stands alone is a model of one MoE
layer, whose key is None.

Shapes: R = ranks, T = tokens of one rank, E = experts, P = slots (``bench.slots``), S = rows of a batch-wide policy's
statistics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.balancers import water_fill
from moe_ep_bench.bench.comparison import BASELINE, CEILING, NOISE, CaseSpec, Comparison
from moe_ep_bench.bench.routing import Batches, CaseRouter, Share, case_metrics
from moe_ep_bench.bench.rows import Row
from moe_ep_bench.bench.slots import Slots
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
    """

    num_tokens_R: list[int]
    slots: Slots
    stats_SE: Tensor | None
    rows_R: list[Row]
    moves_shared: float | None = None
    frontier: Row | None = None

    @cached_property
    def counts_RP(self) -> NDArray[np.int64]:  # noqa: N802
        """Pairs that the tokens of each rank send to each slot."""
        return np.stack([row.get("slot_load_P", row["load_E"]) for row in self.rows_R])

    @cached_property
    def _counts_RRL(self) -> NDArray[np.int64]:  # noqa: N802
        """The same by the rank that a slot is on."""
        return self.counts_RP.reshape(len(self.rows_R), len(self.rows_R), -1)

    @property
    def rank_pairs(self) -> NDArray[np.int64]:
        """Pairs that each rank (row) sends to each (column): int64 [R, R]."""
        return self._counts_RRL.sum(axis=2)

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
    """

    index: int
    layers: Mapping[int | None, LayerTraffic]
    lengths_R: list[tuple[int, ...]] | None = None


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

    def route(self, index: int, begin: Callable[[], object] = lambda: None) -> list[tuple[CaseRouter, Traffic]]:
        """Of every case its router, and what its routing of batch ``index`` amounts to.

        Args:
            begin: called ahead of each layer of a model.
        """
        comparison = self.comparison
        baseline = next((router for router in self.routers if router.case.role == BASELINE), None)
        # Native runs a second time for the noise floor, but routes the same.
        stand_ins = {router: baseline if baseline and router.case.role == NOISE else router for router in self.routers}
        distinct = list(dict.fromkeys(stand_ins.values()))
        layers: dict[int | None, dict[CaseRouter, LayerTraffic]] = {}
        for layer in comparison.workloads:
            if layer is not None:
                begin()
            layers[layer] = dict(zip(distinct, traffic_of(self.batches, layer, index, distinct), strict=True))
            named = {"layer": comparison.row_layer(layer)}
            for router, stand_in in stand_ins.items():
                of_layer, case_id = layers[layer][stand_in], router.case.case_id
                self.rows[case_id] += [row | named for row in of_layer.rows_R]
                if of_layer.frontier is not None:
                    self.frontiers[case_id].append(of_layer.frontier | named)
        lengths_R = comparison.lengths_of_ranks(index) if comparison.scope == "model" else None
        return [
            (router, Traffic(index, {layer: of_cases[stand_in] for layer, of_cases in layers.items()}, lengths_R))
            for router, stand_in in stand_ins.items()
        ]


def traffic_of(batches: Batches, layer: int | None, index: int, routers: Sequence[CaseRouter]) -> list[LayerTraffic]:
    """Route batch ``index`` on all ranks in one layer, by every case; ranks side by side, in threads."""
    model = batches.comparison.model
    placed = [(router, router.slots(index)) for router in routers]
    for router in routers:
        router.carried(layer, index, 0)  # worked out before threads ask for it
    stats = _statistics(batches, layer, index, routers)
    ranks = list(batches.over_ranks(partial(_route_rank, placed, stats), layer, index))
    pairs = [of_rank.pairs for of_rank in ranks]
    rank_E = torch.arange(model.num_experts) // (model.num_experts // batches.comparison.ep_size)
    frontier = None if None in pairs else Frontier.of(pairs, rank_E)
    traffic = []
    for number, (router, slots) in enumerate(placed):
        fills = isinstance(router.case.replication, WaterfillConfig)
        per_token = model.shared_ffn_hidden_size / model.ffn_hidden_size if fills else None
        rows, num_tokens = [of_rank.rows[number] for of_rank in ranks], [of_rank.num_tokens for of_rank in ranks]
        of_case = LayerTraffic(num_tokens, slots, stats[number], rows, per_token)
        traffic.append(replace(of_case, frontier=_frontier_row(frontier, index, router.case, of_case)))
    return traffic


def _statistics(batches: Batches, layer: int | None, index: int, routers: Sequence[CaseRouter]) -> list[Tensor | None]:
    """What each batch-wide policy's statistics sum up to over all ranks, float64 [S, E]; None where there are none."""

    @torch.inference_mode()
    def stats_of(numbers: Sequence[int], share: Share) -> list[Tensor | None]:
        return [routers[number].stats_of(share.of(routers[number].case)) for number in numbers]

    first = stats_of(range(len(routers)), next(batches.shares(layer, index)))  # which says who has any
    sums = [None if stats_SE is None else torch.zeros_like(stats_SE) for stats_SE in first]
    if wide := [number for number, stats_SE in enumerate(first) if stats_SE is not None]:
        for of_rank in batches.over_ranks(partial(stats_of, wide), layer, index):
            for number, stats_SE in zip(wide, of_rank, strict=True):
                sums[number] += stats_SE
    return sums


class _Routed(NamedTuple):
    """One rank's tokens: of every case a row of metrics; scores and experts of the top-k pairs, where not too many."""

    num_tokens: int
    rows: list[Row]
    pairs: tuple[Tensor, Tensor] | None


@torch.inference_mode()
def _route_rank(placed: Sequence[tuple[CaseRouter, Slots]], stats: Sequence[Tensor | None], of_rank: Share) -> _Routed:
    rows = []
    for (router, slots), stats_SE in zip(placed, stats, strict=True):
        share = of_rank.of(router.case)
        routing = router.route(share, stats_SE)
        rows.append(case_metrics(router.case, routing, share))
        if not slots.is_contiguous:
            rows[-1] |= slot_metrics(slots, of_rank.rank, routing.map_TE)
    comparison = placed[0][0].batches.comparison
    is_sorted = comparison.num_tokens * comparison.model.top_k <= _MOST_FRONTIER_PAIRS
    pairs = top_k_pairs(of_rank.scores_TE, of_rank.of_scores.top_k_TE) if is_sorted else None
    return _Routed(of_rank.num_tokens, rows, pairs)


def slot_metrics(slots: Slots, rank: int, map_TE: Tensor) -> Row:
    """Those metrics that depend on where experts stand; ``slot_load_P`` are pairs by slot, int64 [P]."""
    counts_P, copies_R = slots.counts(map_TE, rank)
    counts_RS = counts_P.reshape(slots.num_ranks, -1)
    load_R, moved_RR = counts_RS.sum(axis=1), slots.moved_bytes_RR
    return {
        "slot_load_P": counts_P,
        "moved_weight_bytes": 0 if moved_RR is None else int(moved_RR[:, rank].sum()),
        "load_R": load_R,
        "activated_experts_fullest_rank": int((counts_RS > 0).sum(axis=1).max()),
        "crossing_pairs": int(load_R.sum() - load_R[rank]),
        "crossing_copies": int(copies_R.sum() - copies_R[rank]),
    }


def _frontier_row(frontier: Frontier | None, index: int, case: CaseSpec, traffic: LayerTraffic) -> Row | None:
    """Of the top-k mass what dropping alone keeps at most where a case computes its loads; the whole curve for native.

    None for cases whose experts have no single home each or that see balanced scores.
    """
    if frontier is None or case.role == CEILING or not traffic.slots.is_contiguous:
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
