"""What all ranks' routing amounts to: in each MoE layer, how many pairs each rank sends to each slot of the experts.

A layer's work on any rank follows from this and from the rank's own tokens. Layers, and in each the ranks, route one
after another: memory holds one rank's tokens and the counts of all. A layer that stands alone is a model of one MoE
layer, whose key is None.

Shapes: R = ranks, T = tokens of one rank, E = experts, P = slots (``layer.expert_placement``), N = nodes, S = rows of a
batch-wide policy's statistics.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.balancers import water_fill
from moe_ep_bench.bench.cases import BASELINE, CEILING, NOISE, CaseSpec
from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.routing import Batches, CaseRouter, Routers, Share, case_metrics, in_order, rank_pool
from moe_ep_bench.bench.rows import PackedMetrics
from moe_ep_bench.config import WaterfillConfig
from moe_ep_bench.kernels.dispatch import numba_steps
from moe_ep_bench.layer.expert_placement import ExpertPlacement, Split
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies import Routing
from moe_ep_bench.workload.frontier import Frontier, top_k_pairs

if TYPE_CHECKING:  # It needs Megatron-Core, which routing alone does not.
    from moe_ep_bench.layer.virtual import Announced

# Top-k pairs of a batch that are sorted for its frontier; more would take gigabytes.
_MOST_FRONTIER_PAIRS = 2**24


@dataclass(frozen=True, eq=False)
class LayerTraffic:
    """All ranks' routing of one case on one batch in one MoE layer.

    Attributes:
        num_tokens_R: tokens of each rank.
        counts_RP: int64 on the host, pairs that the tokens of each rank send to each slot.
        stats_SE: what a batch-wide policy's statistics sum up to over ranks; None where it has none.
        metrics: of each rank's tokens, [R] rows of ``case_metrics``.
        frontier: a row of the table ``frontier``, without its batch and layer; None where there is none.
        copies_RR, copies_RN: int64, distinct tokens that each rank sends to each rank and node; None = not counted.
        shared_RR: int64, tokens of each rank whose shared experts each rank computes; None = each its own.
    """

    num_tokens_R: list[int]
    counts_RP: Tensor
    stats_SE: Tensor | None
    metrics: PackedMetrics
    frontier: dict[str, Any] | None = None
    copies_RR: Tensor | None = None
    copies_RN: Tensor | None = None
    shared_RR: NDArray[np.int64] | None = None

    @cached_property
    def rank_pairs(self) -> NDArray[np.int64]:
        """Pairs that each rank (row) sends to each (column): int64 [R, R]."""
        num_ranks = len(self.counts_RP)
        return self.counts_RP.view(num_ranks, num_ranks, -1).sum(2).numpy()

    def received(self, rank: int) -> NDArray[np.int64]:
        """Rows that arrive at each of a rank's slots: int64 [P / R]."""
        return self.counts_RP.unflatten(1, (len(self.counts_RP), -1))[:, rank].sum(0).numpy()

    def announced(self, device: torch.device) -> Announced:
        """What the exchange answers a rank's tokens with."""
        from moe_ep_bench.layer.virtual import Announced

        return Announced(self.counts_RP.to(device), self.stats_SE)

    def work(self, rank: int) -> tuple[Any, ...]:
        """Equal for ranks that have the same to do: their tokens, the pairs they send, the rows of every slot."""
        own = self.num_tokens_R[rank], self.num_shared(rank), int(self.counts_RP[rank].sum())
        return *own, *self.received(rank).tolist()

    def num_shared(self, rank: int) -> int | None:
        """Tokens whose shared experts a rank computes once rows are there; None = its own, ahead of them."""
        return None if self.shared_RR is None else int(self.shared_RR[:, rank].sum())


@dataclass(frozen=True, eq=False)
class Traffic:
    """All ranks' routing of one case on batch ``index``, in every MoE layer.

    Attributes:
        lengths_R: of each rank, the tokens of each of its sequences; None where no attention depends on them.
    """

    index: int
    layers: Mapping[int | None, LayerTraffic]
    lengths_R: list[tuple[int, ...]] | None = None

    def work(self, rank: int) -> tuple[Any, ...]:
        """Equal for ranks that have the same to do, in all layers and between them."""
        return self.lengths_R and self.lengths_R[rank], *(traffic.work(rank) for traffic in self.layers.values())


class RoutedBatches:
    """All ranks' routing of a comparison's batches by cases, worked out batch by batch; what is said of it is kept.

    Attributes:
        metrics: of each case, [R, B x layers] rows, those of a batch's layers together.
        frontiers: of each case by id, rows of the table ``frontier``.
    """

    def __init__(self, comparison: Comparison, cases: Sequence[CaseSpec], device: torch.device) -> None:
        self.comparison, self.cases = comparison, list(cases)
        self.batches = Batches(comparison, device)
        self.routers = Routers(self.batches)
        num_rows = comparison.workload.num_batches * len(comparison.workloads)
        self.metrics = {case.case_id: PackedMetrics(comparison.world_size, num_rows) for case in cases}
        self.frontiers: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def route(self, index: int, begin: Callable[[], object] = lambda: None) -> list[tuple[CaseRouter, Traffic]]:
        """Of every case its router, and what its routing of batch ``index`` amounts to.

        Args:
            begin: called ahead of each layer of a model.
        """
        comparison = self.comparison
        routers = [self.routers.of(case, index) for case in self.cases]
        layers: list[dict[int | None, LayerTraffic]] = [{} for _ in routers]
        for place, (layer, named) in enumerate(comparison.row_layers.items(), index * len(comparison.workloads)):
            if layer is not None:
                begin()
            for of_case, router, traffic in zip(layers, routers, self._layer(layer, index, routers), strict=True):
                of_case[layer], case_id = traffic, router.case.case_id
                self.metrics[case_id].put((slice(None), place), traffic.metrics)
                if traffic.frontier is not None:
                    self.frontiers[case_id].append({"batch": index, "layer": named, **traffic.frontier})
        lengths_R = comparison.lengths_of_ranks(index) if comparison.scope == "model" else None
        return [(router, Traffic(index, of_case, lengths_R)) for router, of_case in zip(routers, layers, strict=True)]

    def _layer(self, layer: int | None, index: int, routers: Sequence[CaseRouter]) -> list[LayerTraffic]:
        """Of every case. Native runs a second time for the noise floor, but routes the same."""
        baseline = next((router for router in routers if router.case.role == BASELINE), None)
        stand_ins = [baseline if baseline and router.case.role == NOISE else router for router in routers]
        distinct, links = list(dict.fromkeys(stand_ins)), self.comparison.links
        nodes = links.ranks_per_node if links and self.comparison.exchange.transport == "copies" else None
        traffic = dict(zip(distinct, traffic_of(self.batches, layer, index, distinct, nodes), strict=True))
        return [traffic[router] for router in stand_ins]


def traffic_of(
    batches: Batches, layer: int | None, index: int, routers: Sequence[CaseRouter], ranks_per_node: int | None = None
) -> list[LayerTraffic]:
    """Route batch ``index`` on all ranks in one layer, by every case; ranks side by side, in threads.

    Args:
        ranks_per_node: count copies too, for nodes of so many ranks; None = do not.
    """
    num_ranks, place = batches.comparison.world_size, (layer, index)
    # One array each for all ranks: many small ones between the large ones that come and go would scatter memory.
    counts = [torch.zeros(num_ranks, router.slots.num_slots, dtype=torch.int64) for router in routers]
    metrics = [PackedMetrics(num_ranks) for _ in routers]
    copies: list[list[tuple[Tensor, Tensor]]] = [[] for _ in routers]
    num_tokens: list[int] = []
    pairs: list[tuple[Tensor, Tensor]] | None = None if place in batches.frontiers else []
    with rank_pool(batches.device, batches.num_bytes) as pool:
        for router in routers:
            router.carried(router.case, layer, index, 0)  # worked out before threads ask for it
        stats = _statistics(batches, layer, index, routers, pool)
        route = partial(_route_rank, routers, index=index, stats=stats, ranks_per_node=ranks_per_node)
        for rank, (rows, share) in enumerate(in_order(pool, route, batches.shares(layer, index))):
            num_tokens.append(share.num_tokens)
            pairs = _with_pairs(pairs, routers, share)
            for number, (row, counts_P, copied) in enumerate(rows):
                metrics[number].put((rank,), row)
                counts[number][rank] = counts_P
                copies[number] += [] if copied is None else [copied]
        frontiers = _frontier_rows(batches, place, pairs, routers, counts)
    stacked = [[torch.stack(part) for part in zip(*of_ranks, strict=True)] for of_ranks in copies]
    parts = zip(counts, stats, metrics, frontiers, stacked, strict=True)
    traffic = [LayerTraffic(num_tokens, *facts, *copied) for *facts, copied in parts]
    return [_with_shared(batches.comparison.model, *of_case) for of_case in zip(routers, traffic, strict=True)]


def _with_shared(model: ModelSpec, router: CaseRouter, traffic: LayerTraffic) -> LayerTraffic:
    """The same, where the case gives tokens of shared experts to other ranks."""
    if not isinstance(router.case.replication, WaterfillConfig):
        return traffic
    pairs_per_token = model.shared_ffn_hidden_size / model.ffn_hidden_size
    shared_RR = water_fill(traffic.num_tokens_R, traffic.rank_pairs.sum(axis=0), pairs_per_token)
    return replace(traffic, shared_RR=shared_RR)


@torch.inference_mode()
def _statistics(
    batches: Batches, layer: int | None, index: int, routers: Sequence[CaseRouter], pool: ThreadPoolExecutor
) -> list[Tensor | None]:
    """What each batch-wide policy's statistics sum up to over all ranks, float64 [S, E]; None where there are none."""

    @torch.inference_mode()
    def stats_of(share: Share, numbers: Sequence[int]) -> list[Tensor | None]:
        return [routers[number].stats_of(share.of(routers[number].case), index) for number in numbers]

    ranks = iter(batches.shares(layer, index))
    # The first rank's say who has any.
    first = stats_of(next(ranks), range(len(routers)))
    sums = {number: stats_SE for number, stats_SE in enumerate(first) if stats_SE is not None}
    for of_rank in in_order(pool, partial(stats_of, numbers=list(sums)), ranks if sums else ()):
        for number, stats_SE in zip(sums, of_rank, strict=True):
            sums[number] = sums[number] + stats_SE
    return [sums.get(number) for number in range(len(routers))]


@torch.inference_mode()
def _route_rank(
    routers: Sequence[CaseRouter],
    of_rank: Share,
    *,
    index: int,
    stats: Sequence[Tensor | None],
    ranks_per_node: int | None,
) -> tuple[list[tuple[dict[str, Any], Tensor, tuple[Tensor, Tensor] | None]], Share]:
    """Of one rank and every case the row of metrics, pairs by slot, int64 [P], and copies; and the share."""
    rows = []
    for router, stats_SE in zip(routers, stats, strict=True):
        share, slots, copied = of_rank.of(router.case), router.slots, None
        if router.case.is_padded:  # What fills an expert up is told apart by its weight.
            routing = router.route(share, index, stats_SE)
        else:
            map_TE = router.map_of(share, index, stats_SE)
            routing = Routing(map_TE, map_TE)  # of weights nothing is asked
        row = case_metrics(router.case, routing, share)
        if ranks_per_node is not None:
            copied = copies_of(slots.spread(routing.map_TE, of_rank.rank), slots.num_ranks, ranks_per_node)
        counts_P = torch.tensor(row["load_E"])
        if not slots.is_contiguous:
            counts_P, placed = in_slots(routing.map_TE, slots, of_rank.rank)
            row |= placed
        rows.append((row, counts_P, copied))
    return rows, of_rank


def copies_of(map_TP: Tensor, num_ranks: int, ranks_per_node: int) -> tuple[Tensor, Tensor]:
    """Distinct tokens that a rank sends to each rank, int64 [R], and to each node: neighbours, the last maybe fewer."""
    to_rank_TR = map_TP.unflatten(1, (num_ranks, -1)).any(2)
    to_node_TN = torch.stack([node_TR.any(1) for node_TR in to_rank_TR.split(ranks_per_node, dim=1)], dim=1)
    return to_rank_TR.sum(0), to_node_TN.sum(0)


def in_slots(map_TE: Tensor, slots: ExpertPlacement, rank: int) -> tuple[Tensor, dict[str, Any]]:
    """Pairs by slot, int64 [P], and those metrics that depend on where experts stand."""
    if map_TE.is_cpu and numba_steps("cpu") is not None:
        from moe_ep_bench.kernels.counting import slot_counts

        slot_N, first_E, pairs_E, before_RE = _split_of(slots)
        split = slot_N, first_E, pairs_E, before_RE[rank]
        arrays = slot_counts(map_TE.contiguous().numpy(), *split, slots.num_slots, slots.num_ranks)
        counts_P, copies_R = map(torch.from_numpy, arrays)
    else:
        map_TP = slots.spread(map_TE, rank)
        counts_P, copies_R = map_TP.sum(0), map_TP.unflatten(1, (slots.num_ranks, -1)).any(2).sum(0)
    counts_RS = counts_P.view(slots.num_ranks, -1)
    load_R = counts_RS.sum(1)
    moved_RR = slots.moved_bytes_RR
    return counts_P, {
        "slot_load_P": counts_P.tolist(),
        "moved_weight_bytes": 0 if moved_RR is None else int(moved_RR[:, rank].sum()),
        "load_R": load_R.tolist(),
        "activated_experts_fullest_rank": int((counts_RS > 0).sum(1).max()),
        "crossing_pairs": int(load_R.sum() - load_R[rank]),
        "crossing_copies": int(copies_R.sum() - copies_R[rank]),
    }


@functools.lru_cache(64)
def _split_of(slots: ExpertPlacement) -> tuple[NDArray[np.int64], ...]:
    """How an expert's pairs go to its slots, on the host: what ``Split`` holds, in its order."""
    split = slots.split or Split.in_turn(slots.expert_P, slots.num_experts, slots.num_ranks)
    parts = split.slot_N, split.first_E, split.pairs_E, split.before_RE
    return tuple(part.contiguous().numpy() for part in parts)


# ---- the frontier of dropping ----------------------------------------------------------------------------------------


def _with_pairs(
    pairs: list[tuple[Tensor, Tensor]] | None, routers: Sequence[CaseRouter], share: Share
) -> list[tuple[Tensor, Tensor]] | None:
    """Add a rank's top-k pairs to those of ranks before it; None where all are balanced, or there are too many."""
    if pairs is None or all(router.case.role == CEILING for router in routers):
        return None
    pairs.append(top_k_pairs(share.scores_TE, share.of_scores.top_k_TE))
    return pairs if sum(len(scores_N) for scores_N, _ in pairs) <= _MOST_FRONTIER_PAIRS else None


def _frontier_rows(
    batches: Batches,
    place: tuple[int | None, int],
    pairs: list[tuple[Tensor, Tensor]] | None,
    routers: Sequence[CaseRouter],
    counts: Sequence[Tensor],
) -> list[dict[str, Any] | None]:
    """Of the top-k mass what dropping alone keeps at most where a case computes its loads; the whole curve for native.

    None for cases whose experts have no single home each or that see balanced scores, and where nothing is known.
    """
    homes = [None if router.case.role == CEILING else router.slots.rank_E for router in routers]
    rank_E = next((home_E for home_E in homes if home_E is not None), None)
    if pairs and rank_E is not None:
        batches.frontiers[place] = Frontier.of(pairs, rank_E)
    frontier, rows = batches.frontiers.get(place), []
    for router, home_E, counts_RP in zip(routers, homes, counts, strict=True):
        if frontier is None or home_E is None:
            rows.append(None)
            continue
        load_E = counts_RP.sum(0)
        fullest = int(load_E.new_zeros(int(home_E.max()) + 1).index_add(0, home_E, load_E).max())
        loads, kept = frontier.curve() if router.case.role == BASELINE else (None, None)
        rows.append(
            {
                "kept_by_load": frontier.kept(fullest),
                "kept_by_experts": frontier.kept_by_experts(int((load_E > 0).sum())),
                "curve_load": loads,
                "curve_kept": kept,
            }
        )
    return rows
