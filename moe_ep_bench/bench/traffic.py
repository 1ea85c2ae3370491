"""What all ranks' routing amounts to: in each MoE layer, how many pairs each rank sends to each slot of the experts.

A layer's work on any rank follows from this and from the rank's own tokens. Memory holds the counts of all ranks, and
the tokens of as many as route side by side. A layer that stands alone is a model of one MoE layer, whose key is None.

Shapes: V = cases, R = ranks, T = tokens of one rank, E = experts, P = slots, S = rows of a batch-wide policy's
statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.balancers import water_fill
from moe_ep_bench.bench.point import BASELINE, CaseSpec, Point
from moe_ep_bench.bench.result import Row
from moe_ep_bench.bench.routing import Router, case_metrics
from moe_ep_bench.bench.tokens import Tokens
from moe_ep_bench.config import WaterfillConfig
from moe_ep_bench.metrics import crossing_metrics, metrics_by_rank
from moe_ep_bench.placement import Slots
from moe_ep_bench.workload.frontier import Frontier, top_k_pairs

# What is kept of a rank that was routed.
ROUTED = "routed"
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
        stands_for: tokens for which each one of ``rows_R`` stands; all else counts these.
    """

    num_tokens_R: list[int]
    slots: Slots
    stats_SE: Tensor | None
    rows_R: list[Row]
    moves_shared: float | None = None
    frontier: Row | None = None
    parts: list[LayerTraffic] = field(default_factory=list)
    stands_for: int = 1

    @cached_property
    def counts_RP(self) -> NDArray[np.int64]:  # noqa: N802
        """Pairs that the tokens of each rank send to each slot."""
        routed = [row["slot_load_P" if "slot_load_P" in row else "load_E"] for row in self.rows_R]
        return self.stands_for * np.stack(routed)

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
        return self._copies[of]

    @cached_property
    def _copies(self) -> dict[str, NDArray[np.int64]]:
        columns = {"rank": "copies_R", "node": "copies_N"}
        return {of: self.stands_for * np.stack([row[column] for row in self.rows_R]) for of, column in columns.items()}

    @property
    def received_RL(self) -> NDArray[np.int64]:  # noqa: N802
        """Rows that arrive at each of a rank's slots: int64 [R, P / R]."""
        return self._counts_RRL.sum(axis=0)

    @cached_property
    def shared_RR(self) -> NDArray[np.int64] | None:  # noqa: N802
        """Tokens of each rank whose shared experts each rank computes, once rows are there; None = its own, ahead."""
        if self.moves_shared is None:
            return None
        return water_fill(self.num_tokens_R, self.rank_pairs.sum(axis=0), self.moves_shared)


@dataclass(frozen=True, eq=False)
class Traffic:
    """All ranks' routing of one case on one batch, in every MoE layer.

    Attributes:
        lengths_R: of each rank, the tokens of each of its sequences; None where no attention depends on them.
        number: of the micro-batch, where it is one.
    """

    batch: int
    layers: Mapping[int | None, LayerTraffic]
    lengths_R: list[tuple[int, ...]] | None = None
    number: int = 0

    @property
    def rows(self) -> list[Row]:
        """Rows of the table ``routing``."""
        return [row for of_layer in self.layers.values() for row in of_layer.rows_R]

    @property
    def frontiers(self) -> list[Row]:
        """Rows of the table ``frontier``; there may be none."""
        return [of_layer.frontier for of_layer in self.layers.values() if of_layer.frontier is not None]

    def parts(self, num_parts: int) -> list[Traffic]:
        """Its micro-batches."""
        if num_parts == 1:
            return [self]
        return [
            replace(self, number=number, layers={layer: of.parts[number] for layer, of in self.layers.items()})
            for number in range(num_parts)
        ]


def route_batch(
    router: Router, cases: Sequence[CaseSpec], batch: int, begin: Callable[[], object] = lambda: None
) -> list[Traffic]:
    """Route a batch on all ranks, in every MoE layer, by every case.

    Args:
        begin: called ahead of each layer of a model.
    """
    point = router.point
    layers: dict[int | None, list[LayerTraffic]] = {}
    for layer in point.workloads:
        if layer is not None:
            begin()
        layers[layer] = route_layer(router, cases, layer, batch)
    lengths_R = point.lengths_of_ranks(batch) if point.scope == "model" else None
    of_cases = zip(*layers.values(), strict=True)
    return [Traffic(batch, dict(zip(layers, of_case, strict=True)), lengths_R) for of_case in of_cases]


def route_layer(router: Router, cases: Sequence[CaseSpec], layer: int | None, batch: int) -> list[LayerTraffic]:
    """Route a batch on all ranks in one layer, by every case, in one pass over the ranks.

    Two where a policy looks at the whole batch: its statistics come first.
    """
    point, model = router.point, router.point.model
    slots_V = [router.slots(case, batch) for case in cases]
    for case in cases:
        router.carried(case, layer, batch)  # worked out before threads ask for it
    stats = _statistics(router, cases, layer, batch)
    has_frontier = point.num_tokens * model.top_k <= _MOST_FRONTIER_PAIRS and not point.is_sampled
    pairs_R: dict[int, tuple[Tensor, Tensor]] = {}  # Too many to be kept; what follows from them is.

    def route_source(tokens: Tokens) -> list[tuple[int, list[tuple[Row, list[Row]]]]]:
        """Of each rank with these tokens their number, and rows of every case."""
        rows_V = [
            _route_case(router, case, slots, tokens.seen_by(case), stats.get(case.case_id))
            for case, slots in zip(cases, slots_V, strict=True)
        ]
        if has_frontier:
            pairs_R[tokens.rank] = top_k_pairs(tokens.scores_TE, tokens.of_scores.top_k_TE)
        others = range(tokens.rank + point.num_sources, point.world_size, point.num_sources)
        elsewhere_V = [
            _elsewhere(router, case, slots, tokens, others, stats.get(case.case_id), of_case)
            for case, slots, of_case in zip(cases, slots_V, rows_V, strict=True)
        ]
        of_ranks = [(tokens.num_tokens, list(rows_V)) for rows_V in zip(*elsewhere_V, strict=True)]
        of_ranks.insert(0, (tokens.num_tokens, rows_V))
        router.routed(point.num_parts)
        return of_ranks

    of_sources = router.for_sources(ROUTED, route_source, layer, batch)
    of_ranks = [of_source[turn] for turn in range(len(of_sources[0])) for of_source in of_sources]
    num_tokens_R, rows_RV = zip(*of_ranks, strict=True)
    traffic = []
    for case, slots, of_ranks in zip(cases, slots_V, zip(*rows_RV, strict=True), strict=True):
        rows_R, parts_R = zip(*of_ranks, strict=True)
        if slots.rearranged is not None and point.links is not None:
            for row, once_us in zip(rows_R, slots.rearranged.once_us(point.links), strict=True):
                row["rearrange_us"] = float(once_us)
        traffic.append(_layer_traffic(point, case, slots, stats.get(case.case_id), num_tokens_R, rows_R, parts_R))
    if not has_frontier:
        return traffic

    @torch.inference_mode()
    def frontier_rows() -> list[Row | None]:
        for rank in set(range(point.num_sources)) - pairs_R.keys():  # whose rows were kept
            tokens = router.tokens(layer, batch, rank)
            pairs_R[rank] = top_k_pairs(tokens.scores_TE, tokens.of_scores.top_k_TE)
        rank_E = torch.arange(model.num_experts) // (model.num_experts // point.ep_size)
        frontier = Frontier.of(point.of_ranks([pairs_R[rank] for rank in range(point.num_sources)]), rank_E)
        return [_frontier_row(frontier, case, of_case) for case, of_case in zip(cases, traffic, strict=True)]

    place = {"batch": batch, "layer": point.row_layer(layer)}
    rows_V = router.batches.kept.once(("frontier", layer, batch), frontier_rows)
    return [replace(of_case, frontier=row and {**row, **place}) for of_case, row in zip(traffic, rows_V, strict=True)]


def _elsewhere(
    router: Router,
    case: CaseSpec,
    slots: Slots,
    tokens: Tokens,
    others: Sequence[int],
    stats_MSE: Sequence[Tensor] | None,
    here: tuple[Row, list[Row]],
) -> list[tuple[Row, list[Row]]]:
    """``_route_case`` of the same tokens on other ranks, by what it gave on one."""
    point, (row, parts) = router.point, here
    if not others:
        return []
    if case.policy is None or not case.policy.knows_rank:
        return [(row | seen, parts) for seen in _seen_from(row, others, slots, point.ranks_per_node)]
    if not case.policy.fills_experts_apart or tokens.context.modality_T is not None:
        return [_route_case(router, case, slots, tokens.at(rank), stats_MSE) for rank in others]
    maps_TE, of_scores = router.chosen_apart(case, tokens), tokens.of_scores
    by_rank = metrics_by_rank(maps_TE, tokens.scores_TE, tokens.context, of_scores, list(others), point.ranks_per_node)
    lengths = [len(map_TE) for map_TE, _ in maps_TE] if point.num_parts > 1 else []
    return [
        (
            {**row, "rank": rank, **metrics},
            [
                {"num_tokens": length, "slot_load_P": load_P, "copies_R": copies_R, "copies_N": copies_N}
                for length, (load_P, copies_R, copies_N) in zip(lengths, of_parts, strict=False)
            ],
        )
        for rank, (metrics, of_parts) in zip(others, by_rank, strict=True)
    ]


def _seen_from(row: Row, ranks: Sequence[int], slots: Slots, ranks_per_node: int) -> Iterator[Row]:
    """What differs in a row of the same tokens on each of some other ranks."""
    crossing = crossing_metrics(row["load_R"], row["copies_R"], row["copies_N"], np.array(ranks), ranks_per_node)
    for rank, *counts in zip(ranks, *crossing.values(), strict=True):
        moved = {} if slots.is_contiguous else slots.moved_bytes(rank)
        yield {"rank": rank, **dict(zip(crossing, counts, strict=True)), **moved}


def _route_case(
    router: Router, case: CaseSpec, slots: Slots, tokens: Tokens, stats_MSE: Sequence[Tensor] | None
) -> tuple[Row, list[Row]]:
    """A rank's row of metrics under a case, and what its tokens and each of its micro-batches send."""
    point = router.point
    sizes = point.ranks_per_node, point.num_parts

    def routed() -> tuple[Tensor, Row, list[Row]]:
        map_TE = router.chosen(case, tokens, stats_MSE)
        return map_TE, *case_metrics(map_TE, tokens, *sizes)

    map_TE, row, parts = routed() if case.policy is not None else tokens.once(("native", *sizes), routed)
    row = row | {"layer": point.row_layer(tokens.layer)}
    if slots.is_contiguous:
        return row, parts
    parts = slots.parts(map_TE, tokens.rank, *sizes) if point.num_parts > 1 else []
    return row | slots.metrics(map_TE, tokens.rank, point.ranks_per_node, parts), parts


def _layer_traffic(
    point: Point,
    case: CaseSpec,
    slots: Slots,
    stats_MSE: Sequence[Tensor] | None,
    num_tokens_R: Sequence[int],
    rows_R: Sequence[Row],
    parts_RM: Sequence[Sequence[Row]],
) -> LayerTraffic:
    """All ranks' routing of one case, with its micro-batches where there are some."""
    fills = isinstance(case.replication, WaterfillConfig)
    model, stands_for = point.model, point.stands_for
    shared = {
        "moves_shared": model.shared_ffn_hidden_size / model.ffn_hidden_size if fills else None,
        "stands_for": stands_for,
    }
    parts = [
        LayerTraffic(
            [stands_for * row["num_tokens"] for row in part_R],
            slots if number == 0 else replace(slots, moved_bytes_RR=None, rearranged=None),  # Weights move once.
            None if stats_MSE is None else stats_MSE[number],
            list(part_R),
            **shared,
        )
        for number, part_R in enumerate(zip(*parts_RM, strict=True))
    ]
    stats_SE = None if stats_MSE is None else torch.stack(list(stats_MSE)).sum(dim=0)
    num_tokens_R = [stands_for * num_tokens for num_tokens in num_tokens_R]
    return LayerTraffic(num_tokens_R, slots, stats_SE, list(rows_R), parts=parts, **shared)


def _stats_key(case: CaseSpec) -> tuple[Any, ...] | None:
    """By what cases of a kind of policy share statistics. A class inherits none, for it may count otherwise."""
    return case.policy.stats_key if case.policy and "stats_key" in vars(type(case.policy)) else None


def _statistics(
    router: Router, cases: Sequence[CaseSpec], layer: int | None, batch: int
) -> dict[str, Sequence[Tensor]]:
    """Sums over all ranks of each batch-wide policy's statistics, by case id: float64 [S, E] of each micro-batch."""

    @torch.inference_mode()
    def wide_ids() -> list[str]:
        first = router.tokens(layer, batch, 0)
        return [case.case_id for case in cases if router.stats_of(case, first.seen_by(case)) is not None]

    ids = router.batches.kept.once(("wide", layer, batch), wide_ids)
    wide = [case for case in cases if case.case_id in ids]
    if not wide:
        return {}
    keys = [_stats_key(one) for one in wide]
    kinds = [one.case_id if key is None else (type(one.policy), *key) for one, key in zip(wide, keys, strict=True)]
    firsts = {kind: case for kind, case in reversed(list(zip(kinds, wide, strict=True)))}

    def stats_of(tokens: Tokens) -> list[Tensor]:
        of_kinds = (router.stats_of(case, tokens.seen_by(case)) for case in firsts.values())
        return [stats_MSE for stats_MSE in of_kinds if stats_MSE is not None]

    first, *others = router.for_sources("summed", stats_of, layer, batch)
    with torch.inference_mode():
        sums = [total.clone() for total in first]
        for of_rank in others:
            for total, of_case in zip(sums, of_rank, strict=True):
                total += of_case
        for total in sums:
            total *= router.point.world_size // router.point.num_sources
    of_kinds = {kind: total.unbind() for kind, total in zip(firsts, sums, strict=True)}
    return {case.case_id: of_kinds[kind] for case, kind in zip(wide, kinds, strict=True)}


def _frontier_row(frontier: Frontier, case: CaseSpec, traffic: LayerTraffic) -> Row | None:
    """The share of top-k mass that dropping keeps at most at the loads of a case; for native the whole curve.

    None for cases whose experts have no single home each.
    """
    if not traffic.slots.is_contiguous:
        return None
    load_E = traffic.counts_RP.sum(axis=0)
    loads, kept = frontier.curve() if case.role == BASELINE else (None, None)
    return {
        "kept_by_load": frontier.kept(int(traffic.rank_pairs.sum(axis=0).max())),
        "kept_by_experts": frontier.kept_by_experts(int((load_E > 0).sum())),
        "curve_load": loads,
        "curve_kept": kept,
    }
