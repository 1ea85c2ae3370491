"""What all ranks' routing amounts to: in each MoE layer, how many pairs each rank sends to each slot of the experts.

A layer's work on any rank follows from this and from the rank's own tokens. Layers, and in each the ranks, route one
after another: memory holds one rank's tokens and the counts of all. A layer that stands alone is a model of one MoE
layer, whose key is None.

Shapes: R = ranks, T = tokens of one rank, E = experts, P = slots (``layer.expert_placement``), C = chunks of a rank's
tokens, S = rows of a batch-wide policy's statistics.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.bench.plan import BASELINE, CEILING, NATIVE, CaseSpec
from moe_ep_bench.bench.rows import PackedMetrics
from moe_ep_bench.bench.subjects import LayerSubject
from moe_ep_bench.kernels import compiled
from moe_ep_bench.kernels.dispatch import numba_steps
from moe_ep_bench.layer.expert_placement import ExpertPlacement, Split
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.layer.scores import logits_from_scores, scores_from_logits
from moe_ep_bench.metrics import ScoreMetrics, moved, routing_metrics, score_metrics
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.frontier import Frontier, top_k_pairs
from moe_ep_bench.policies.laser import LoadAwarePolicy
from moe_ep_bench.workload import TokenBatch
from moe_ep_bench.workload.batch import balanced_scores

if TYPE_CHECKING:  # They need Megatron-Core, which routing alone does not.
    from moe_ep_bench.kernels.shared import SharedSteps
    from moe_ep_bench.layer.stack import Stack
    from moe_ep_bench.layer.virtual import Announced

# Metrics of what a token gets, whatever else an expert is filled up with.
_OF_KEPT = ("retained_mass_topk", "retained_mass_all", "tokens_without_expert", "experts_per_token")

# Scores of a batch that are kept rather than made again: of one layer, and of all together.
_HELD_BYTES, _HELD_BYTES_OF_ALL = 2**28, 2**32
# Of batches whose scores take no more, all that cases see is kept too: several times as much.
_HELD_SHARES_BYTES = 2**27
# Top-k pairs of a batch that are sorted for its frontier; more would take gigabytes.
_MOST_FRONTIER_PAIRS = 2**24


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Work in one thread: a rank's share of a batch is small, and handing it out costs more than it saves."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def rank_pool(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Threads that take a rank each: as many as torch would use on the host, one where a GPU works."""
    num_threads = torch.get_num_threads() if device.type == "cpu" else 1
    with one_thread(), ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's tokens of a batch in one MoE layer, on the device that routes them.

    Attributes:
        layer: None = it stands alone.
        rank: of all real ones, or the virtual one: random policies draw by it.
        context: what is so of the tokens, but for randomness; a policy knows of it ``CaseRouter.context``.
        make_scores: returns what a policy sees, float32 [T, E].
        logits_TE: what the layer's router sees in place of its gate's output; None where no layer is asked for.
    """

    layer: int | None
    rank: int
    context: RoutingContext
    make_scores: Callable[[], Tensor]
    logits_TE: Tensor | None = None

    @cached_property
    def scores_TE(self) -> Tensor:  # noqa: N802
        return self.make_scores()

    @cached_property
    def of_scores(self) -> ScoreMetrics:
        return score_metrics(self.scores_TE, self.context)

    @classmethod
    def of_logits(cls, layer: int | None, rank: int, context: RoutingContext, logits_TE: Tensor, fn: str) -> Share:
        """``fn``: the model's score function, through which policies see the logits."""
        return cls(layer, rank, context, partial(scores_from_logits, logits_TE, fn), logits_TE)

    @property
    def num_tokens(self) -> int:
        return len(self.context.request_id_T)

    @cached_property
    def steps(self) -> SharedSteps | None:
        """By which policies that route these scores share what they have in common; None where they cannot."""
        if not self.scores_TE.is_cpu or numba_steps("cpu") is None:
            return None
        from moe_ep_bench.kernels.shared import SharedSteps

        return SharedSteps(self.scores_TE)


class Shares:
    """One rank's tokens as the cases of a comparison see them: made once, for all cases."""

    def __init__(self, layer: LayerSubject, tokens: TokenBatch, rank: int, device: torch.device) -> None:
        self.num_tokens, self.rank = tokens.num_tokens, rank
        valid_T = None if tokens.valid_T is None else tokens.valid_T.to(device)
        context = layer.context(rank, tokens.sequence_id_T.to(device), valid_T)
        scores_TE, model, (key,) = tokens.scores_TE.to(device), layer.model, layer.workloads

        def made(balanced: bool) -> Share:
            seen_TE = balanced_scores(scores_TE, model.top_k) if balanced else scores_TE
            logits_TE = logits_from_scores(seen_TE, model.score_function)
            share = Share.of_logits(key, rank, context, logits_TE, model.score_function)
            if balanced and model.num_groups is None:  # A token's K best stay its K best, in other places.
                share.__dict__["of_scores"] = moved(self._of_case(False).of_scores, share.scores_TE, context)
            return share

        self._of_case = functools.lru_cache(2)(made)

    def of(self, case: CaseSpec) -> Share:
        """Balanced for the ceiling of balancing."""
        return self._of_case(case.role == CEILING)


@dataclass(frozen=True, eq=False)
class CaseRouter:
    """How a case routes, on virtual ranks as on real ones; its experts stand in ``slots``.

    ``carried`` gives the loads that a batch starts from (``CarriedLoads``).
    """

    case: CaseSpec
    slots: ExpertPlacement
    seed: int
    carried: Callable[[CaseSpec, int | None, int, int], Tensor | None] = lambda *_: None

    @property
    def rule(self) -> Policy:
        """What routes: the policy, or the model's own top-k."""
        return self.case.policy or NATIVE

    def context(self, share: Share, index: int) -> RoutingContext:
        """What the rule knows of a rank's tokens of batch ``index``, its randomness at its start."""
        place = () if share.layer is None else (share.layer,)
        draws = seeded_generator(share.context.request_id_T.device, self.seed, DRAWS, index, share.rank, *place)
        load_E = self.carried(self.case, share.layer, index, share.rank)
        return replace(self.case.told(share.context), generator=draws, load_E=load_E)

    def route(self, share: Share, index: int, stats_SE: Tensor | None) -> Routing:
        """Over experts; ``on_slots`` sends pairs on."""
        rule = compiled(self.rule, share.scores_TE.device)
        return rule.route(share.scores_TE, self.context(share, index), stats_SE)

    def map_of(self, share: Share, index: int, stats_SE: Tensor | None) -> Tensor:
        """The map of ``route``, bool [T, E], found with what other cases found of the same scores."""
        if not self._shares_steps(share):
            return self.route(share, index, stats_SE).map_TE
        rule, context = self._in_place(share, index)
        return rule.by(share.steps).select(share.scores_TE, context, stats_SE).map_TE

    def stats_of(self, share: Share, index: int) -> Tensor | None:
        """Of a batch-wide policy what is summed over ranks, float64 [S, E]."""
        if not self._shares_steps(share):
            return compiled(self.rule, share.scores_TE.device).batch_stats(share.scores_TE, self.context(share, index))
        rule, context = self._in_place(share, index)
        return rule.by(share.steps).stats(share.scores_TE, context)

    def _shares_steps(self, share: Share) -> bool:
        return share.steps is not None and type(self.rule) in share.steps.policies

    def _in_place(self, share: Share, index: int) -> tuple[Policy, RoutingContext]:
        """The rule with its values in the share's layer, and what it knows there."""
        context = self.context(share, index)
        rule = self.rule.in_layer(context.layer_fraction)
        if share.rank == 0:  # All ranks' scores are of one workload.
            rule.check(share.scores_TE, context)
        return rule, context

    def on_slots(self, routing: Routing, rank: int) -> Routing:
        """A rank's routing over slots."""
        map_TP: Tensor = self.slots.spread(routing.map_TE, rank)
        return Routing(map_TP, self.slots.spread_weights(routing.weights_TE, map_TP))

    def enter(self, stack: Stack, shares: Mapping[int | None, Share], index: int) -> None:
        """Put the case's routing of a rank's tokens of batch ``index`` into the MoE layers of ``stack``."""
        policy = self.case.policy
        stack.take(() if policy is None else stack.forms)
        for layer, share in shares.items():
            assert share.logits_TE is not None
            if policy is None:  # By Megatron-Core's own router.
                stack.route(layer, share.logits_TE)
                continue
            told = self.context(share, index)
            here = policy.in_layer(told.layer_fraction)
            context = replace(told, random_TE=here.draws(share.logits_TE, told))  # a captured graph cannot draw
            stack.route(layer, share.logits_TE, here, context)


@dataclass(frozen=True, eq=False)
class LayerTraffic:
    """All ranks' routing of one case on one batch in one MoE layer.

    Attributes:
        num_tokens_R: tokens of each rank.
        counts_CRP: int64 on the host, pairs that the tokens of each rank's chunk send to each slot.
        stats_SE: what a batch-wide policy's statistics sum up to over ranks; None where it has none.
        metrics: of each rank's tokens, [R] rows: ``metrics.routing_metrics``, and empty columns for what a layer's
            output is compared with.
        frontier: ``frontier_row``; None where there is none.
        copies_RR, copies_RN: int64, distinct tokens that each rank sends to each rank and node; None = not counted.
    """

    num_tokens_R: list[int]
    counts_CRP: Tensor
    stats_SE: Tensor | None
    metrics: PackedMetrics
    frontier: dict[str, Any] | None = None
    copies_RR: Tensor | None = None
    copies_RN: Tensor | None = None

    @property
    def num_ranks(self) -> int:
        return self.counts_CRP.shape[1]

    @cached_property
    def rank_pairs(self) -> NDArray[np.int64]:
        """Pairs that each rank (row) sends to each (column): int64 [R, R]."""
        return self.counts_CRP.sum(0).view(self.num_ranks, self.num_ranks, -1).sum(2).numpy()

    def received(self, rank: int) -> NDArray[np.int64]:
        """Rows that arrive at each of a rank's slots, chunk by chunk: int64 [C, P / R]."""
        return self.counts_CRP.unflatten(2, (self.num_ranks, -1))[:, :, rank].sum(1).numpy()

    def announced(self, chunk: int, device: torch.device) -> Announced:
        """What the exchange answers a rank's chunk of tokens with."""
        from moe_ep_bench.layer.virtual import Announced

        return Announced(self.counts_CRP[chunk].to(device), self.stats_SE)

    def work(self, rank: int) -> tuple[Any, ...]:
        """Equal for ranks that have the same to do: their tokens, the pairs they send, the rows of every slot."""
        sent_C = tuple(self.counts_CRP[:, rank].sum(1).tolist())
        return self.num_tokens_R[rank], sent_C, *map(tuple, self.received(rank).tolist())


@dataclass(frozen=True, eq=False)
class Traffic:
    """All ranks' routing of one case on batch ``index``, in every MoE layer.

    Attributes:
        lengths_R: of each rank, the tokens of each of its sequences; None where no attention depends on them.
    """

    index: int
    layers: Mapping[int | None, LayerTraffic]
    lengths_R: list[tuple[int, ...]] | None = None

    @property
    def is_batch_wide(self) -> bool:
        """Whether the case's policy sums statistics over ranks."""
        return any(traffic.stats_SE is not None for traffic in self.layers.values())

    def work(self, rank: int) -> tuple[Any, ...]:
        """Equal for ranks that have the same to do, in all layers and between them."""
        return self.lengths_R and self.lengths_R[rank], *(traffic.work(rank) for traffic in self.layers.values())


def traffic_of(
    layer: LayerSubject,
    routers: Sequence[CaseRouter],
    ranks: Iterable[TokenBatch],
    index: int,
    device: torch.device,
    num_chunks: int = 1,
    ranks_per_node: int | None = None,
) -> list[LayerTraffic]:
    """Route batch ``index`` on all ranks in one layer, by every case.

    Ranks are routed side by side, on as many threads as torch would use.

    Args:
        ranks: every rank's tokens, in order; gone through twice where a policy decides for the whole batch.
        num_chunks: C; chunks are of tokens that follow each other, as even as can be (``chunks_of``).
        ranks_per_node: count copies too, for nodes of so many ranks; None = do not.
    """
    with rank_pool(device) as pool:
        for router in routers:
            router.carried(router.case, next(iter(layer.workloads)), index, 0)  # worked out before threads ask for it
        stats = _statistics(routers, _shares_of(layer, ranks, device), index, pool)
        num_tokens: list[int] = []
        # One array each for all ranks: many small ones between the large ones that come and go would scatter memory.
        counts = [torch.zeros(num_chunks, layer.ep_size, one.slots.num_slots, dtype=torch.int64) for one in routers]
        metrics = [PackedMetrics(layer.ep_size) for _ in routers]
        copies: list[list[tuple[Tensor, Tensor]]] = [[] for _ in routers]
        known = ranks.frontier if isinstance(ranks, RankBatches) else None  # of cases that were routed before
        pairs: list[tuple[Tensor, Tensor]] | None = [] if known is None else None
        how = {"index": index, "stats": stats, "num_chunks": num_chunks, "ranks_per_node": ranks_per_node}
        route = partial(_route_rank, routers, **how)
        for rank, (found, of_rank) in enumerate(in_order(pool, route, _shares_of(layer, ranks, device))):
            num_tokens.append(of_rank.num_tokens)
            if pairs is not None:
                pairs = with_pairs(pairs, _seen(routers, of_rank))
            for number, (row, counts_CP, copied) in enumerate(found):
                copies[number] += [] if copied is None else [copied]
                counts[number][:, rank] = counts_CP
                metrics[number].put((rank,), {**row, "reference_error": None, "output_error": None})
        rows, known = _frontier_rows(known, pairs, routers, metrics)
        if isinstance(ranks, RankBatches):
            ranks.frontier = known
    traffic = [LayerTraffic(num_tokens, *parts) for parts in zip(counts, stats, metrics, rows, strict=True)]
    if ranks_per_node is None:
        return traffic
    stacked = ([torch.stack(parts) for parts in zip(*of_ranks, strict=True)] for of_ranks in copies)
    return [replace(one, copies_RR=to_R, copies_RN=to_N) for one, (to_R, to_N) in zip(traffic, stacked, strict=True)]


def copies_of(map_TP: Tensor, num_ranks: int, ranks_per_node: int) -> tuple[Tensor, Tensor]:
    """Distinct tokens that a rank sends to each rank, int64 [R], and to each node: neighbours, the last maybe fewer."""
    to_rank_TR = map_TP.unflatten(1, (num_ranks, -1)).any(2)
    to_node_TN = torch.stack([part.any(1) for part in to_rank_TR.split(ranks_per_node, dim=1)], dim=1)
    return to_rank_TR.sum(0), to_node_TN.sum(0)


@torch.inference_mode()
def _route_rank(
    routers: Sequence[CaseRouter],
    shares: Shares,
    *,
    index: int,
    stats: Sequence[Tensor | None],
    num_chunks: int,
    ranks_per_node: int | None,
) -> tuple[list[tuple[dict[str, Any], Tensor, tuple[Tensor, Tensor] | None]], Shares]:
    """Of one rank and every case the row of metrics, pairs by chunk and slot, int64 [C, P], and copies; and shares."""
    found = []
    for router, stats_SE in zip(routers, stats, strict=True):
        share, slots = shares.of(router.case), router.slots
        if router.case.is_padded:  # What fills an expert up is told apart by its weight.
            routing = router.route(share, index, stats_SE)
        else:
            map_TE = router.map_of(share, index, stats_SE)
            routing = Routing(map_TE, map_TE)  # of weights nothing is asked
        row = case_metrics(router.case, routing, share)
        copied = None
        if ranks_per_node is not None:
            copied = copies_of(slots.spread(routing.map_TE, shares.rank), slots.num_ranks, ranks_per_node)
        if num_chunks == 1 and slots.is_contiguous:
            found.append((row, torch.tensor([row["load_E"]]), copied))
            continue
        counts_CP, placed = in_slots(routing.map_TE, slots, shares.rank, num_chunks)
        found.append((row if slots.is_contiguous else row | placed, counts_CP, copied))
    return found, shares


def in_slots(map_TE: Tensor, slots: ExpertPlacement, rank: int, num_chunks: int) -> tuple[Tensor, dict[str, Any]]:
    """Pairs by chunk and slot, int64 [C, P], and ``placed_metrics``."""
    chunks = chunks_of(len(map_TE), num_chunks)
    if not map_TE.is_cpu or numba_steps("cpu") is None:
        map_TP = slots.spread(map_TE, rank)
        counts_CP = torch.stack([map_TP[chunk].sum(0) for chunk in chunks])
        copies_R = map_TP.unflatten(1, (slots.num_ranks, -1)).any(2).sum(0)
        return counts_CP, placed_metrics(counts_CP.sum(0), copies_R, slots, rank)
    from moe_ep_bench.kernels.counting import slot_counts

    slot_N, first_E, pairs_E, before_RE = _split_of(slots)
    bounds_C = np.array([0, *(chunk.stop for chunk in chunks)])
    split = slot_N, first_E, pairs_E, before_RE[rank]
    counts_CP, copies_R = slot_counts(map_TE.contiguous().numpy(), *split, slots.num_slots, slots.num_ranks, bounds_C)
    counts_CP = torch.from_numpy(counts_CP)
    return counts_CP, placed_metrics(counts_CP.sum(0), torch.from_numpy(copies_R), slots, rank)


@functools.lru_cache(64)
def _split_of(slots: ExpertPlacement) -> tuple[NDArray[np.int64], ...]:
    """How an expert's pairs go to its slots, on the host: what ``Split`` holds, in its order."""
    split = slots.split or Split.in_turn(slots.expert_P, slots.num_experts, slots.num_ranks)
    return tuple(one.contiguous().numpy() for one in (split.slot_N, split.first_E, split.pairs_E, split.before_RE))


def _shares_of(layer: LayerSubject, ranks: Iterable[TokenBatch], device: torch.device) -> Iterable[Shares]:
    """Every rank's tokens as cases see them, rank by rank."""
    if isinstance(ranks, RankBatches):
        return ranks.shares(device)
    return (Shares(layer, tokens, rank, device) for rank, tokens in enumerate(ranks))


def in_order(pool: ThreadPoolExecutor, function: Callable, items: Iterable[Any]) -> Iterator[Any]:
    """``map`` over threads that holds no more items that are begun than there are threads."""
    ahead = pool._max_workers
    if ahead == 1:
        yield from map(function, items)
        return
    begun: deque[Future] = deque()
    for item in items:
        begun.append(pool.submit(function, item))
        if len(begun) >= ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def _seen(routers: Sequence[CaseRouter], shares: Shares) -> Share | None:
    """A rank's tokens as the model sees them; None where all cases see balanced ones."""
    return next((shares.of(one.case) for one in routers if one.case.role != CEILING), None)


def with_pairs(pairs: list[tuple[Tensor, Tensor]], share: Share | None) -> list[tuple[Tensor, Tensor]] | None:
    """Add a rank's top-k pairs to those of the ranks before it; None where there are too many, or no share."""
    if share is None:
        return None
    pairs.append(top_k_pairs(share.scores_TE, share.of_scores.top_k_TE))
    return pairs if sum(len(scores_N) for scores_N, _ in pairs) <= _MOST_FRONTIER_PAIRS else None


def frontier_row(case: CaseSpec, frontier: Frontier, load_E: Tensor, rank_E: Tensor) -> dict[str, Any]:
    """What of the top-k mass dropping alone keeps at most, where a case computes ``load_E`` pairs (all ranks')."""
    fullest = int(load_E.new_zeros(int(rank_E.max()) + 1).index_add(0, rank_E, load_E).max())
    loads, kept = frontier.curve() if case.role == BASELINE else (None, None)
    return {
        "kept_by_load": frontier.kept(fullest),
        "kept_by_experts": frontier.kept_by_experts(int((load_E > 0).sum())),
        "curve_load": loads,
        "curve_kept": kept,
    }


def _frontier_rows(
    known: Frontier | None,
    pairs: list[tuple[Tensor, Tensor]] | None,
    routers: Sequence[CaseRouter],
    metrics: Sequence[PackedMetrics],
) -> tuple[list[dict[str, Any] | None], Frontier | None]:
    """``frontier_row`` of every case whose experts have one home each and which sees the model's scores; and of what.

    Args:
        known: the batch's frontier; None = it follows from ``pairs``.
    """
    homes = [None if one.case.role == CEILING else one.slots.rank_E for one in routers]
    rank_E = next((one for one in homes if one is not None), None)
    if (known is None and pairs is None) or rank_E is None:
        return [None for _ in routers], known
    frontier, rows = known or Frontier.of(pairs or [], rank_E), []
    for router, home_E, of_case in zip(routers, homes, metrics, strict=True):
        load_E = torch.from_numpy(of_case["load_E"].sum(axis=0)).long()
        rows.append(None if home_E is None else frontier_row(router.case, frontier, load_E, home_E))
    return rows, frontier


def _statistics(
    routers: Sequence[CaseRouter], ranks: Iterable[Shares], index: int, pool: ThreadPoolExecutor
) -> list[Tensor | None]:
    """What each batch-wide policy's statistics sum up to over all ranks, float64 [S, E]; None where there are none."""
    total: dict[int, Tensor] = {}
    asked = list(range(len(routers)))

    @torch.inference_mode()
    def of_rank(shares: Shares, numbers: Sequence[int]) -> list[Tensor | None]:
        return [routers[number].stats_of(shares.of(routers[number].case), index) for number in numbers]

    ranks = iter(ranks)
    for first in ranks:  # which says who has any
        for number, stats_SE in zip(asked, of_rank(first, asked), strict=True):
            if stats_SE is not None:
                total[number] = stats_SE
        break
    asked = list(total)
    for found in in_order(pool, partial(of_rank, numbers=asked), ranks if asked else ()):
        for number, stats_SE in zip(asked, found, strict=True):
            total[number] = total[number] + stats_SE
    return [total.get(number) for number in range(len(routers))]


def case_metrics(case: CaseSpec, routing: Routing, share: Share) -> dict[str, Any]:
    """``routing_metrics`` of a case's routing; excess load by the case's own capacity factor."""
    how: dict[str, Any] = {"of_scores": share.of_scores, "capacity_factor": case.capacity_factor}
    row = routing_metrics(routing, share.scores_TE, share.context, **how)
    if case.is_padded:  # What fills an expert up weighs nothing: it is computed, and no mass of it is kept.
        kept = replace(routing, map_TE=routing.weights_TE > 0)
        of_kept = routing_metrics(kept, share.scores_TE, share.context, **how)
        row |= {key: of_kept[key] for key in _OF_KEPT}
    return row


def chunks_of(num_tokens: int, num_chunks: int) -> list[slice]:
    """Cut a rank's tokens into pieces that differ by one token at most; some are empty where there are few tokens."""
    bounds = [num_tokens * number // num_chunks for number in range(num_chunks + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def placed_metrics(counts_P: Tensor, copies_R: Tensor, slots: ExpertPlacement, rank: int) -> dict[str, Any]:
    """Those metrics of ``routing_metrics`` that depend on where experts stand, for experts that stand in slots.

    Args:
        counts_P: pairs of a rank's tokens that each slot gets; ``copies_R``: tokens of which each rank gets some.
    """
    counts_RS = counts_P.view(slots.num_ranks, -1)
    load_R = counts_RS.sum(1)
    return {
        "load_R": load_R.tolist(),
        "activated_experts_fullest_rank": int((counts_RS > 0).sum(1).max()),
        "crossing_pairs": int(load_R.sum() - load_R[rank]),
        "crossing_copies": int(copies_R.sum() - copies_R[rank]),
    }


class RankBatches:
    """The ranks' tokens of one batch in one of ``num_layers`` MoE layers, rank by rank, padding marked.

    They may be gone through any number of times. Small batches are held, and what cases see of them with them; larger
    ones are made anew each time, one rank's tokens after the other's, where the workload can
    (``Workload.rank_batches``).
    """

    def __init__(self, layer: LayerSubject, index: int, num_layers: int = 1) -> None:
        self._layer, self.index = layer, index
        num_bytes = bytes_of_batch(layer)
        is_held = num_bytes <= min(_HELD_BYTES, _HELD_BYTES_OF_ALL // num_layers)
        self._held = self._made_at_once() if is_held else None
        self._holds_shares = num_bytes * num_layers <= _HELD_SHARES_BYTES
        self._shares: dict[torch.device, list[Shares]] = {}
        self.frontier: Frontier | None = None
        """Of this batch, once it is known."""

    def __iter__(self) -> Iterator[TokenBatch]:
        return self._made() if self._held is None else iter(self._held)

    def shares(self, device: torch.device) -> Iterable[Shares]:
        """The same as the cases see them."""
        made = (Shares(self._layer, tokens, rank, device) for rank, tokens in enumerate(self))
        if not self._holds_shares:
            return made
        if device not in self._shares:
            self._shares[device] = list(made)
        return self._shares[device]

    def _made_at_once(self) -> list[TokenBatch]:
        """All ranks' tokens, in threads; the first rank's alone, which solves for the batch's targets."""
        config, ep_size = self._layer.experiment.workload, self._layer.ep_size

        def tokens_of(rank: int) -> TokenBatch:
            tokens = self._layer.workload.rank_batch(self.index, rank, ep_size, config.rank_shares)
            return tokens.with_padding(config.padding_per_rank)

        first = tokens_of(0)
        with rank_pool(torch.device("cpu")) as pool:
            return [first, *pool.map(tokens_of, range(1, ep_size))]

    def _made(self) -> Iterator[TokenBatch]:
        config = self._layer.experiment.workload
        ranks = self._layer.workload.rank_batches(self.index, self._layer.ep_size, config.rank_shares)
        return (tokens.with_padding(config.padding_per_rank) for tokens in ranks)


def bytes_of_batch(layer: LayerSubject) -> int:
    """Of the scores of all ranks' tokens."""
    return layer.workload.num_tokens * layer.workload.num_experts * torch.float32.itemsize


@dataclass(frozen=True, eq=False)
class CarriedLoads:
    """Loads that earlier batches left on the experts, for policies with ``carry_loads`` (``policies.laser``).

    Batch b starts from what routing batches 0 to b - 1, in this order, left. The chain is worked out once and apart
    from all that is timed: so a batch is routed alike on every backend, whichever batch is run first and however often.

    Attributes:
        shares: every rank's tokens of a batch in a layer as a case sees them, rank by rank.
        slots, seed: as of ``CaseRouter``.
    """

    shares: Callable[[CaseSpec, int | None, int], Iterable[Share]]
    slots: ExpertPlacement
    seed: int
    _known: dict[tuple[str, int | None, int], Tensor] = field(default_factory=dict)

    def __call__(self, case: CaseSpec, layer: int | None, index: int, rank: int) -> Tensor | None:
        """What batch ``index`` starts from on a rank, float64 [E]; None = nothing."""
        policy = case.policy
        if index == 0 or not isinstance(policy, LoadAwarePolicy) or not policy.carry_loads:
            return None
        for after in range(1, index + 1):
            if (case.case_id, layer, after) not in self._known:
                self._known[case.case_id, layer, after] = self._left(case, layer, after - 1)
        load_RE = self._known[case.case_id, layer, index]
        return load_RE.sum(dim=0) if policy.load_scope == "all" else load_RE[rank]

    def _left(self, case: CaseSpec, layer: int | None, index: int) -> Tensor:
        """Pairs of every rank's tokens up to batch ``index``: float64 [R, E]."""
        router = CaseRouter(case, self.slots, self.seed, self)
        maps = [router.route(share, index, None).map_TE for share in self.shares(case, layer, index)]
        load_RE = torch.stack([map_TE.sum(dim=0).double() for map_TE in maps])
        return load_RE if index == 0 else load_RE + self._known[case.case_id, layer, index]
