"""Route a rank's tokens by a case, on virtual ranks as on real ones.

``Batches`` makes every rank's tokens, a ``Share`` for each rank; a ``CaseRouter`` routes shares as its case does. A
layer that stands alone has the key None.

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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.bench.comparison import CEILING, NATIVE, ROUTING, CaseSpec, Comparison
from moe_ep_bench.bench.slots import Slots
from moe_ep_bench.kernels import form_of
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.metrics import ScoreMetrics, routing_metrics, score_metrics
from moe_ep_bench.models import logits_from_scores, scores_from_logits
from moe_ep_bench.placement import other_batches
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.workload.batch import TokenBatch, balanced_scores

if TYPE_CHECKING:  # It needs Megatron-Core, which routing alone does not.
    from moe_ep_bench.layer.stack import Stack

# Scores of a batch whose ranks are shared among threads; of fewer, threads would wait for each other.
_LEAST_SHARED_BYTES = 2**20

V = TypeVar("V")


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
    batch: int
    rank: int
    context: RoutingContext
    drawn_TE: Tensor
    score_function: str | None = None

    @staticmethod
    def of_rank(
        comparison: Comparison, layer: int | None, batch: int, rank: int, tokens: TokenBatch, device: torch.device
    ) -> Share:
        valid_T = None if tokens.valid_T is None else tokens.valid_T.to(device)
        context = comparison.context(layer, rank % comparison.ep_size, tokens.sequence_id_T.to(device), valid_T)
        function = None if comparison.backend == ROUTING else comparison.model.score_function
        return Share(layer, batch, rank, context, tokens.scores_TE.to(device), function)

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
    def balanced(self) -> Share:
        """The same tokens with the same values in other places, so that loads are balanced: for the ceiling."""
        context = self.context
        groups = context.num_groups, context.top_groups
        first = self.rank * len(self.drawn_TE)  # ranks have as many tokens each, or nearly
        return replace(self, drawn_TE=balanced_scores(self.drawn_TE, context.top_k, *groups, first=first))

    def of(self, case: CaseSpec) -> Share:
        """The tokens as a case sees them."""
        return self.balanced if case.role == CEILING else self


class Batches:
    """All ranks' tokens of a comparison's batches, made rank by rank whenever they are asked for.

    Args:
        few: only so many of each rank's tokens, from the first to the last; None = all.
    """

    def __init__(self, comparison: Comparison, device: torch.device, few: int | None = None) -> None:
        self.comparison, self.device, self.seed = comparison, device, comparison.experiment.layer.seed
        self._few = few

    def shares(self, layer: int | None, index: int) -> Iterator[Share]:
        """Every rank's tokens of a batch in a layer, rank by rank."""
        for rank, tokens in enumerate(self.comparison.rank_batches(layer, index)):
            if self._few is not None:  # from the first to the last, and so of both where some are padding
                count = min(self._few, tokens.num_tokens)
                tokens = tokens.rows(torch.linspace(0, max(tokens.num_tokens - 1, 0), count).long())
            yield Share.of_rank(self.comparison, layer, index, rank, tokens, self.device)

    def over_ranks(self, function: Callable[[Share], V], layer: int | None, index: int) -> Iterator[V]:
        """A function of every rank's tokens, in order of rank: in as many threads as torch would use on the host.

        In one where a GPU works or scores are few. No more ranks are begun than there are threads.
        """
        num_bytes = self.comparison.num_tokens * self.comparison.model.num_experts * torch.float32.itemsize
        on_host = self.device.type == "cpu" and num_bytes >= _LEAST_SHARED_BYTES
        most, begun = torch.get_num_threads() if on_host else 1, deque[Future[V]]()
        if most == 1:
            with one_thread():
                yield from map(function, self.shares(layer, index))
            return
        with one_thread(), ThreadPoolExecutor(most, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for share in self.shares(layer, index):
                begun.append(pool.submit(function, share))
                if len(begun) >= most:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()

    @cached_property
    def native_counts(self) -> NDArray[np.int64]:
        """Pairs of each rank's tokens and each expert under the model's own top-k, [B, R, E]."""
        native = next(case for case in self.comparison.cases if case.policy is None and case.replication is None)
        router = CaseRouter(native, self)

        def counts_of(share: Share) -> NDArray[np.int64]:
            return router.route(share, None).map_TE.sum(0).cpu().numpy()

        batches = range(self.comparison.workload.num_batches)
        return np.array([list(self.over_ranks(counts_of, None, index)) for index in batches])


# ---- routing ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class CaseRouter:
    """How a case routes the batches of its comparison, where its experts stand, and what loads a batch starts from."""

    case: CaseSpec
    batches: Batches
    _slots: dict[int, Slots] = field(default_factory=dict)
    _loads: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    @property
    def rule(self) -> Policy:
        """What routes: the policy, or the model's own top-k."""
        return self.case.policy or NATIVE

    def slots(self, index: int) -> Slots:
        """Where the case's experts stand for batch ``index``."""
        comparison, wanted = self.batches.comparison, self.case.replication
        if wanted is None:
            return comparison.slots
        if index not in self._slots:
            counts_BRE = self.batches.native_counts
            slot_expert_P = comparison.slots_ahead(wanted, other_batches(counts_BRE.sum(axis=1), index))
            balanced = wanted.balance(slot_expert_P, counts_BRE[index])
            # Of this batch alone: a split batch by batch is as large as the batch.
            self._slots = {index: Slots.of_batch(balanced, counts_BRE[index], comparison.expert_bytes)}
        return self._slots[index]

    def context(self, share: Share) -> RoutingContext:
        """What the rule knows of a rank's tokens of a batch, its randomness at its start."""
        place = () if share.layer is None else (share.layer,)
        device, load_E = share.context.request_id_T.device, self.carried(share.layer, share.batch, share.rank)
        draws = seeded_generator(device, self.batches.seed, DRAWS, share.batch, share.rank, *place)
        return replace(self.case.told(share.context), generator=draws, load_E=load_E)

    def route(self, share: Share, stats_SE: Tensor | None) -> Routing:
        """The case's routing of a rank's tokens, over experts."""
        return form_of(self.rule, share.scores_TE.device).route(share.scores_TE, self.context(share), stats_SE)

    def stats_of(self, share: Share) -> Tensor | None:
        """Of a batch-wide policy what is summed over ranks, float64 [S, E]."""
        return form_of(self.rule, share.scores_TE.device).batch_stats(share.scores_TE, self.context(share))

    def enter(self, stack: Stack, shares: Mapping[int | None, Share]) -> None:
        """Put the case's routing of a rank's tokens of a batch into the MoE layers of ``stack``."""
        policy = self.case.policy
        stack.take(() if policy is None else stack.forms)
        for layer, share in shares.items():
            if policy is None:  # By Megatron-Core's own router.
                stack.route(layer, share.logits_TE)
                continue
            told = self.context(share)
            here = policy.in_layer(told.layer_fraction)
            context = replace(told, random_TE=here.random_keys(share.logits_TE, told))  # a captured graph cannot draw
            stack.route(layer, share.logits_TE, here, context)

    def carried(self, layer: int | None, index: int, rank: int) -> Tensor | None:
        """Loads that batch ``index`` starts from on a rank, float64 [E]; None = nothing."""
        if index == 0 or not getattr(self.case.policy, "carry_loads", False):
            return None
        for before in range(index):  # In turn: each starts from what those before it left.
            if (layer, before + 1) not in self._loads:
                shares = (share.of(self.case) for share in self.batches.shares(layer, before))
                load_RE = torch.stack([self.route(share, None).map_TE.sum(dim=0).double() for share in shares])
                self._loads[layer, before + 1] = load_RE + self._loads[layer, before] if before else load_RE
        return self._loads[layer, index][rank]


def case_metrics(case: CaseSpec, routing: Routing, share: Share) -> dict[str, Any]:
    """A row of the table ``routing``: ``routing_metrics``, and loads of image tokens where there are any."""
    row: dict[str, Any] = {"rank": share.rank, "batch": share.batch, "layer": share.layer}
    row |= routing_metrics(routing, share.scores_TE, share.context, share.of_scores)
    if share.context.modality_T is not None:
        is_image_T, valid_T = share.context.modality_T == IMAGE, share.context.token_mask_T
        row["num_image_tokens"] = int((is_image_T if valid_T is None else is_image_T & valid_T).sum())
        row["image_load_E"] = routing.map_TE[is_image_T].sum(dim=0).cpu().numpy()
    return row
