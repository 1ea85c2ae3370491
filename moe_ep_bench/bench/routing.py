"""Route a rank's tokens by a case, on virtual ranks as on real ones.

``Batches`` has every rank's tokens, a ``Share`` for each rank; ``Routers`` say how a case routes a share. A layer that
stands alone has the key None.

**Replicas** are placed for the loads of all other batches: what a server knows before the tokens come; with one batch
alone, for itself. A balancer (``balancers``) then splits each batch, or moves weights for it, once all counts are
known, which the gather of counts makes every rank know anyway; every rank then solves it by itself, ahead of dispatch,
and is later by that time.

**Carried loads** are what earlier batches left on the experts, for policies with ``carry_loads`` (``policies.laser``).
Batch b starts from what routing batches 0 to b - 1, in this order, left. The chain is worked out once and apart from
all that is timed: so a batch is routed alike on every backend, whichever batch is run first and however often.

Shapes: B = batches, R = ranks, T = tokens of one rank, E = experts, S = rows of a batch-wide policy's statistics.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.bench.cases import CEILING, NATIVE, CaseSpec
from moe_ep_bench.bench.comparison import ROUTING, Comparison
from moe_ep_bench.config import Lossless
from moe_ep_bench.kernels import form_of
from moe_ep_bench.kernels.dispatch import numba_steps
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.layer.scores import logits_from_scores, scores_from_logits
from moe_ep_bench.metrics import ScoreMetrics, moved, routing_metrics, score_metrics
from moe_ep_bench.placement import other_batches
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.policies.laser import LoadAwarePolicy
from moe_ep_bench.workload import TokenBatch
from moe_ep_bench.workload.batch import balanced_scores
from moe_ep_bench.workload.frontier import Frontier

if TYPE_CHECKING:  # They need Megatron-Core, which routing alone does not.
    from moe_ep_bench.kernels.shared import SharedSteps
    from moe_ep_bench.layer.stack import Stack

# Metrics of what a token gets, whatever else an expert is filled up with.
_OF_KEPT = ("retained_mass_topk", "retained_mass_all", "tokens_without_expert", "experts_per_token")

# Scores of a batch whose ranks are shared among threads; of fewer, threads would wait for each other.
_LEAST_SHARED_BYTES = 2**20
# Scores of a batch that are kept rather than made again: of one layer, and of all together.
_MOST_LAYER_BYTES, _MOST_MODEL_BYTES = 2**28, 2**32
# Of a batch whose scores take no more all that cases see is kept too, which takes several times as much.
_MOST_SHARES_BYTES = 2**25
# Scores of batches that are kept beside each other, so that replicas are planned without making any batch again.
_MOST_BATCHES_BYTES = 2**28


# ---- threads ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch work in one thread: a rank's share is small, and handing it out costs more than it saves."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def rank_pool(device: torch.device, num_bytes: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that take a rank each: as many as torch would use on the host, one where a GPU works or all is small.

    Args:
        num_bytes: of the scores of all ranks' tokens.
    """
    workers = torch.get_num_threads() if device.type == "cpu" and num_bytes >= _LEAST_SHARED_BYTES else 1
    with one_thread(), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def in_order(pool: ThreadPoolExecutor, function: Callable, items: Iterable[Any]) -> Iterator[Any]:
    """``map`` over threads that holds no more items that are begun than there are threads."""
    most = pool._max_workers
    if most == 1:
        yield from map(function, items)
        return
    begun: deque[Future] = deque()
    for item in items:
        begun.append(pool.submit(function, item))
        if len(begun) >= most:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


# ---- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's tokens of a batch in one MoE layer, on the device that routes them.

    Attributes:
        rank: of all ranks: random policies draw by it.
        context: facts of the tokens, but for randomness; a policy sees ``CaseRouter.context``.
        drawn_TE: float32 [T, E], the workload's scores.
        score_function: by which the layer makes scores of its logits; None where no layer is asked.
    """

    layer: int | None
    rank: int
    context: RoutingContext
    drawn_TE: Tensor
    score_function: str | None = None

    @staticmethod
    def of_rank(
        comparison: Comparison, layer: int | None, tokens: TokenBatch, rank: int, device: torch.device
    ) -> Share:
        valid_T = None if tokens.valid_T is None else tokens.valid_T.to(device)
        context = comparison.context(layer, rank % comparison.ep_size, tokens.sequence_id_T.to(device), valid_T)
        function = None if comparison.backend == ROUTING else comparison.model.score_function
        return Share(layer, rank, context, tokens.scores_TE.to(device), function)

    @property
    def num_tokens(self) -> int:
        return len(self.drawn_TE)

    @cached_property
    def logits_TE(self) -> Tensor:  # noqa: N802
        """What the layer's router sees in place of its gate's output."""
        assert self.score_function is not None
        return logits_from_scores(self.drawn_TE, self.score_function)

    @cached_property
    def scores_TE(self) -> Tensor:  # noqa: N802
        """What a policy sees: what the layer makes of its logits, else scores as they are."""
        if self.score_function is None:
            return self.drawn_TE
        return scores_from_logits(self.logits_TE, self.score_function)

    @cached_property
    def of_scores(self) -> ScoreMetrics:
        return score_metrics(self.scores_TE, self.context)

    @cached_property
    def steps(self) -> SharedSteps | None:
        """By which policies that route these scores share what they have in common; None where they cannot."""
        if not self.scores_TE.is_cpu or numba_steps("cpu") is None:
            return None
        from moe_ep_bench.kernels.shared import SharedSteps

        return SharedSteps(self.scores_TE)

    @cached_property
    def balanced(self) -> Share:
        """The same tokens with the same values in other places, so that loads are balanced: for the ceiling."""
        context = self.context
        groups = context.num_groups, context.top_groups
        first = self.rank * len(self.drawn_TE)  # ranks have as many tokens each, or nearly
        share = replace(self, drawn_TE=balanced_scores(self.drawn_TE, context.top_k, *groups, first=first))
        if self.score_function is not None and self.context.num_groups is None:  # A token's K best stay its K best.
            share.__dict__["of_scores"] = moved(self.of_scores, share.scores_TE, self.context)
        return share

    def of(self, case: CaseSpec) -> Share:
        """The tokens as a case sees them."""
        return self.balanced if case.role == CEILING else self


_Value = TypeVar("_Value")


class _Recent(Generic[_Value]):
    """The last few values that were asked for. (``lru_cache`` of a method would hold its object in a circle.)"""

    def __init__(self, most: int) -> None:
        self._most, self._values = most, dict[Hashable, _Value]()

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]
        return value


class Batches:
    """All ranks' tokens of a comparison's batches: kept where they are small, else made anew, rank by rank.

    Args:
        few: only so many of each rank's tokens, from the first to the last; None = all.

    Attributes:
        frontiers: by layer and batch, once they are known.
        num_bytes: of the scores of a batch in a layer.
    """

    def __init__(self, comparison: Comparison, device: torch.device, few: int | None = None) -> None:
        self.comparison, self.device, self._few = comparison, device, few
        self.frontiers: dict[tuple[int | None, int], Frontier] = {}
        num_tokens, num_layers = comparison.num_tokens, len(comparison.workloads)
        if few is not None:
            num_tokens = min(num_tokens, few * comparison.world_size)
        layer_bytes = self.num_bytes = num_tokens * comparison.model.num_experts * torch.float32.itemsize
        self._keeps_tokens = layer_bytes <= min(_MOST_LAYER_BYTES, _MOST_MODEL_BYTES // num_layers)
        self._keeps_shares = layer_bytes * num_layers <= _MOST_SHARES_BYTES
        num_batches = max(1, _MOST_BATCHES_BYTES // (layer_bytes * num_layers))
        self._tokens = _Recent[list[TokenBatch]](num_batches * num_layers)
        self._shares = _Recent[list[Share]](num_layers)

    def shares(self, layer: int | None, index: int) -> Iterable[Share]:
        """Every rank's tokens of a batch in a layer, rank by rank."""
        if self._keeps_shares:
            return self._shares.get((layer, index), lambda: list(self._make_shares(layer, index)))
        return self._make_shares(layer, index)

    def _make_shares(self, layer: int | None, index: int) -> Iterator[Share]:
        if self._keeps_tokens:
            tokens = iter(self._tokens.get((layer, index), lambda: self._make_tokens(layer, index)))
        else:
            tokens = map(self._cut, self.comparison.rank_batches(layer, index))
        for rank, of_rank in enumerate(tokens):
            yield Share.of_rank(self.comparison, layer, of_rank, rank, self.device)

    def _make_tokens(self, layer: int | None, index: int) -> list[TokenBatch]:
        """All ranks' tokens, made in threads; the first rank's alone, which solves for the batch's targets."""
        make = partial(self.comparison.rank_batch, layer, index)
        first = make(0)
        with rank_pool(torch.device("cpu"), self.num_bytes) as pool:
            others = in_order(pool, make, range(1, self.comparison.world_size))
            return [self._cut(tokens) for tokens in (first, *others)]

    def _cut(self, tokens: TokenBatch) -> TokenBatch:
        """Some of a rank's tokens from the first to the last, and so of both where some are padding."""
        if self._few is None:
            return tokens
        num_tokens = min(self._few, tokens.num_tokens)
        return tokens.rows(torch.linspace(0, max(tokens.num_tokens - 1, 0), num_tokens).long())


# ---- routing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CaseRouter:
    """How a case routes; its experts stand in ``slots``.

    Attributes:
        carried: gives the loads that a batch starts from (``Routers.carried``).
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
        return form_of(self.rule, share.scores_TE.device).route(share.scores_TE, self.context(share, index), stats_SE)

    def map_of(self, share: Share, index: int, stats_SE: Tensor | None) -> Tensor:
        """The map of ``route``, bool [T, E], found with what other cases found of the same scores."""
        if not self._shares_steps(share):
            return self.route(share, index, stats_SE).map_TE
        rule, context = self._in_place(share, index)
        return rule.by(share.steps).select(share.scores_TE, context, stats_SE).map_TE

    def stats_of(self, share: Share, index: int) -> Tensor | None:
        """Of a batch-wide policy what is summed over ranks, float64 [S, E]."""
        if not self._shares_steps(share):
            form = form_of(self.rule, share.scores_TE.device)
            return form.batch_stats(share.scores_TE, self.context(share, index))
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
            if policy is None:  # By Megatron-Core's own router.
                stack.route(layer, share.logits_TE)
                continue
            told = self.context(share, index)
            here = policy.in_layer(told.layer_fraction)
            context = replace(told, random_TE=here.random_keys(share.logits_TE, told))  # a captured graph cannot draw
            stack.route(layer, share.logits_TE, here, context)


class Routers:
    """How the cases of a comparison route its batches: where their experts stand, and what loads they start from."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self._comparison = batches, batches.comparison
        self._seed = self._comparison.experiment.layer.seed
        self._placements: dict[tuple[Lossless, int], ExpertPlacement] = {}
        self._loads: dict[tuple[str, int | None, int], Tensor] = {}

    def of(self, case: CaseSpec, index: int = 0) -> CaseRouter:
        """How a case routes batch ``index``."""
        return CaseRouter(case, self.slots(case, index), self._seed, self.carried)

    def slots(self, case: CaseSpec, index: int) -> ExpertPlacement:
        """Where a case's experts stand for batch ``index``."""
        wanted = case.replication
        if wanted is None:
            return self._comparison.slots
        if (wanted, index) not in self._placements:
            self._placements[wanted, index] = self._place(wanted, index)
        return self._placements[wanted, index]

    def _place(self, wanted: Lossless, index: int) -> ExpertPlacement:
        comparison, counts_BRE = self._comparison, self._counts
        slot_expert_P = comparison.slots_ahead(wanted, other_batches(counts_BRE.sum(axis=1), index))
        balanced = wanted.balance(slot_expert_P, counts_BRE[index])
        return ExpertPlacement.of_batch(balanced, counts_BRE[index], comparison.expert_bytes)

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Pairs of each rank's tokens and each expert under the model's own top-k, [B, R, E]."""
        native = next(case for case in self._comparison.cases if case.policy is None and case.replication is None)
        router = CaseRouter(native, self._comparison.slots, self._seed)

        def counts_of(index: int, share: Share) -> list[int]:
            return router.map_of(share, index, None).sum(0).tolist()

        with rank_pool(torch.device("cpu"), self._batches.num_bytes) as pool:
            indices = range(self._comparison.workload.num_batches)
            ranks = (in_order(pool, partial(counts_of, i), self._batches.shares(None, i)) for i in indices)
            return np.array([list(counts_RE) for counts_RE in ranks])

    def carried(self, case: CaseSpec, layer: int | None, index: int, rank: int) -> Tensor | None:
        """Loads that batch ``index`` starts from on a rank, float64 [E]; None = nothing."""
        policy = case.policy
        if index == 0 or not isinstance(policy, LoadAwarePolicy) or not policy.carry_loads:
            return None
        for after in range(1, index + 1):
            if (case.case_id, layer, after) not in self._loads:
                self._loads[case.case_id, layer, after] = self._left(case, layer, after - 1)
        load_RE = self._loads[case.case_id, layer, index]
        return load_RE.sum(dim=0) if policy.load_scope == "all" else load_RE[rank]

    def _left(self, case: CaseSpec, layer: int | None, index: int) -> Tensor:
        """Pairs of every rank's tokens up to batch ``index``: float64 [R, E]."""
        router = self.of(case, index)
        maps = (router.route(share.of(case), index, None).map_TE for share in self._batches.shares(layer, index))
        load_RE = torch.stack([map_TE.sum(dim=0).double() for map_TE in maps])
        return load_RE if index == 0 else load_RE + self._loads[case.case_id, layer, index]


def case_metrics(case: CaseSpec, routing: Routing, share: Share) -> dict[str, Any]:
    """``routing_metrics`` of a case's routing, excess load by its own capacity factor; loads of image tokens."""
    how: dict[str, Any] = {"of_scores": share.of_scores, "capacity_factor": case.capacity_factor}
    row = routing_metrics(routing, share.scores_TE, share.context, **how)
    if case.is_padded:  # What fills an expert up weighs nothing: it is computed, and no mass of it is kept.
        kept = replace(routing, map_TE=routing.weights_TE > 0)
        of_kept = routing_metrics(kept, share.scores_TE, share.context, **how)
        row |= {key: of_kept[key] for key in _OF_KEPT}
    if share.context.modality_T is not None:
        is_image_T, valid_T = share.context.modality_T == IMAGE, share.context.token_mask_T
        row["num_image_tokens"] = int((is_image_T if valid_T is None else is_image_T & valid_T).sum())
        row["image_load_E"] = routing.map_TE[is_image_T].sum(dim=0).tolist()
    return row
