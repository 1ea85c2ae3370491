"""Route a rank's tokens by a case, on virtual ranks as on real ones.

``Batches`` makes every rank's tokens, a ``Share`` for each rank; a ``CaseRouter`` routes shares as its case does, to
experts in ``Slots``. A layer that stands alone has the key None.

**Replicas** are placed for the loads of all other batches: what a server knows before the tokens come; with one batch
alone, for itself. A balancer (``balancers``) then splits each batch, or moves weights for it, once all counts are
known, which the gather of counts makes every rank know anyway; every rank then solves it by itself, ahead of dispatch,
and is later by that time.

**Carried loads** are what earlier batches left on the experts, for policies with ``carry_loads`` (``policies.laser``).
Batch b starts from what routing batches 0 to b - 1, in this order, left. The chain is worked out once and apart from
all that is timed: so a batch is routed alike on every backend, whichever batch is run first and however often.

Shapes: B = batches, R = ranks, T = tokens of one rank, E = experts, P = slots of all ranks; slots r * P / R and on are
rank r's. N = entries of all experts' turns, S = rows of a batch-wide policy's statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.balancers import FREE, Balanced
from moe_ep_bench.bench.comparison import BALANCED, BASELINE, NATIVE, ROUTING, CaseSpec, Comparison
from moe_ep_bench.kernels import form_of
from moe_ep_bench.kernels.counting import slot_counts
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.metrics import RANKS_PER_NODE, ScoreMetrics, routing_metrics, score_metrics
from moe_ep_bench.models import logits_from_scores, scores_from_logits
from moe_ep_bench.placement import other_batches
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.workload.batch import balanced_scores

if TYPE_CHECKING:  # It needs Megatron-Core, which routing alone does not.
    from moe_ep_bench.layer.stack import Stack

V = TypeVar("V")


# ---- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's tokens of a batch in one MoE layer, on the device that routes them.

    Attributes:
        rank: of all ranks: random policies draw by it.
        number: of the micro-batch, of those that a rank's tokens are cut into.
        first: how many tokens ranks before it have; None = as many each as this one, or nearly.
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
    number: int = 0
    first: int | None = None

    def parts(self, num_parts: int) -> list[Share]:
        """The tokens in so many micro-batches, in order, as even as can be."""
        if num_parts == 1:
            return [self]
        of_tokens = {name: getattr(self.context, name) for name in ("token_mask_T", "request_id_T", "modality_T")}
        cut = {name: value.tensor_split(num_parts) for name, value in of_tokens.items() if value is not None}
        return [
            replace(
                self,
                number=number,
                drawn_TE=drawn_TE,
                context=replace(self.context, **{name: values[number] for name, values in cut.items()}),
            )
            for number, drawn_TE in enumerate(self.drawn_TE.tensor_split(num_parts))
        ]

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
        """The same tokens with the same values in other places, so that loads are balanced: for the balanced case."""
        context = self.context
        groups = context.num_groups, context.top_groups
        first = self.rank * len(self.drawn_TE) if self.first is None else self.first
        return replace(self, drawn_TE=balanced_scores(self.drawn_TE, context.top_k, *groups, first=first))

    def of(self, case: CaseSpec) -> Share:
        """The tokens as a case sees them."""
        return self.balanced if case.role == BALANCED else self


class Batches:
    """All ranks' tokens of a comparison's batches, made rank by rank whenever they are asked for.

    Args:
        few: only so many of each rank's tokens, from the first to the last; None = all.
    """

    def __init__(self, comparison: Comparison, device: torch.device, few: int | None = None) -> None:
        self.comparison, self.device, self.seed = comparison, device, comparison.experiment.layer.seed
        self.contiguous = Slots.contiguous(comparison.model.num_experts, comparison.ep_size)
        self._few = few

    def share(self, layer: int | None, index: int, rank: int) -> Share:
        """A rank's tokens of a batch in a layer."""
        comparison = self.comparison
        tokens = comparison.rank_batch(layer, index, rank)
        if self._few is not None:  # from the first to the last, and so of both where some are padding
            count = min(self._few, tokens.num_tokens)
            tokens = tokens.rows(torch.linspace(0, max(tokens.num_tokens - 1, 0), count).long())
        valid_T = None if tokens.valid_T is None else tokens.valid_T.to(self.device)
        ids_T, ep_rank = tokens.sequence_id_T.to(self.device), rank % comparison.ep_size
        function = None if comparison.backend == ROUTING else comparison.model.score_function
        context = comparison.context(layer, ep_rank, ids_T, valid_T)
        first = None if comparison.tokens_R is None else int(comparison.tokens_R[:rank].sum())
        return Share(layer, index, rank, context, tokens.scores_TE.to(self.device), function, first=first)

    def of_ranks(self, function: Callable[[Share], V], layer: int | None, index: int) -> list[V]:
        """A function of every rank's tokens, in order of rank: ranks side by side in as many threads as torch has.

        In one where a GPU works. A rank's share is small, so that torch works on it in one thread. A thread holds the
        tokens of one rank at a time.
        """
        self.comparison.workloads[layer].solve(index)  # before threads ask for it
        ranks, num_threads = range(self.comparison.world_size), torch.get_num_threads()

        @torch.inference_mode()
        def of_rank(rank: int) -> V:
            return function(self.share(layer, index, rank))

        torch.set_num_threads(1)
        try:
            if self.device.type != "cpu":
                return list(map(of_rank, ranks))
            with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(of_rank, ranks))
        finally:
            torch.set_num_threads(num_threads)

    @cached_property
    def native_counts(self) -> NDArray[np.int64]:
        """Pairs of each rank's tokens and each expert under the model's own top-k, [B, R, E]."""
        router = CaseRouter(next(case for case in self.comparison.cases if case.role == BASELINE), self)

        def counts_of(share: Share) -> NDArray[np.int64]:
            return router.route(share, None).map_TE.sum(0).cpu().numpy()

        return np.array(
            [self.of_ranks(counts_of, None, index) for index in range(self.comparison.workload.num_batches)]
        )


# ---- slots -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Slots:
    """Which expert every slot holds, and which slot each pair of one batch goes to.

    The batch's pairs of an expert are numbered over ranks, then tokens, and take the expert's *turns*: a slot for each
    pair, again from the first where there are more pairs.

    Attributes:
        expert_P: int64; every expert has at least one slot.
        turn_N: int64, the slots of all experts' turns, expert by expert; at least one entry for each.
        turns_E: how many entries each expert has.
        before_RE: pairs of the ranks ahead of each: the number of a rank's first pair. R divides P.
        moved_bytes_RR: of weights that go from each rank to each for this batch, float64; None = none go.
    """

    expert_P: NDArray[np.int64]
    turn_N: NDArray[np.int64]
    turns_E: NDArray[np.int64]
    before_RE: NDArray[np.int64]
    moved_bytes_RR: NDArray[np.float64] | None = None

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int) -> Slots:
        """Expert e in slot e, Megatron-Core's own placement."""
        return Slots._in_turn(np.arange(num_experts), num_experts, num_ranks)

    @staticmethod
    def of_batch(balanced: Balanced, counts_RE: NDArray[np.int64], expert_bytes: float) -> Slots:
        """A batch as a balancer has it, where ranks have ``counts_RE`` pairs; nobody sends to a free slot."""
        num_ranks, num_experts = counts_RE.shape
        expert_RS = balanced.slot_expert_P.reshape(num_ranks, -1)
        expert_P = np.where(expert_RS == FREE, expert_RS[:, :1], expert_RS).ravel()
        moved_RR = balanced.moved_RR(num_ranks) * expert_bytes if balanced.moves else None
        if balanced.pairs_P is None:
            return Slots._in_turn(expert_P, num_experts, num_ranks, moved_RR)
        turns = []
        for expert in range(num_experts):
            slots = np.flatnonzero(expert_P == expert)
            sizes = balanced.pairs_P[slots]
            # Slots are interleaved, so that every rank sends each of them about the same share.
            places = [(np.arange(size) + 0.5) / size for size in sizes if size] or [np.zeros(1)]
            owner = np.repeat(slots, sizes) if sizes.any() else slots[:1]
            turns.append(owner[np.concatenate(places).argsort(kind="stable")])
        before_RE = counts_RE.cumsum(axis=0) - counts_RE
        return Slots(expert_P, np.concatenate(turns), np.array(list(map(len, turns))), before_RE, moved_RR)

    @staticmethod
    def _in_turn(
        expert_P: NDArray[np.int64],
        num_experts: int,
        num_ranks: int,
        moved_RR: NDArray[np.float64] | None = None,
    ) -> Slots:
        """Give an expert's slots its pairs in turn; rank r begins with the r-th, so that few pairs do not all meet."""
        before_RE = np.repeat(np.arange(num_ranks)[:, None], num_experts, axis=1)
        turns_E = np.bincount(expert_P, minlength=num_experts)
        return Slots(expert_P, expert_P.argsort(kind="stable"), turns_E, before_RE, moved_RR)

    @property
    def num_ranks(self) -> int:
        return len(self.before_RE)

    @property
    def first_E(self) -> NDArray[np.int64]:  # noqa: N802
        """Where each expert's turns begin."""
        return self.turns_E.cumsum() - self.turns_E

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether every expert has the slot of its own number alone."""
        return np.array_equal(self.expert_P, np.arange(len(self.turns_E)))

    def counts(
        self,
        map_TE: Tensor,
        rank: int,
        ranks_per_node: int = RANKS_PER_NODE,
        before_E: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], ...]:
        """What a rank's tokens send: pairs to each slot [P], distinct tokens to each rank [R] and to each node [N].

        Args:
            before_E: pairs of each expert ahead of these; None = of the ranks before.
        """
        of_rank = self.turn_N, self.first_E, self.turns_E, self.before_RE[rank] if before_E is None else before_E
        sizes = len(self.expert_P), self.num_ranks, ranks_per_node
        return slot_counts(map_TE.cpu().contiguous().numpy(), *of_rank, *sizes)

    def parts(self, map_TE: Tensor, rank: int, ranks_per_node: int, num_parts: int) -> list[dict[str, Any]]:
        """Of a rank's micro-batches, by ``metrics``' names, what each sends."""
        rows, before_E = [], self.before_RE[rank]
        for map_PE in map_TE.tensor_split(num_parts):
            counts = self.counts(map_PE, rank, ranks_per_node, before_E)
            rows.append(
                {"num_tokens": len(map_PE), **dict(zip(("slot_load_P", "copies_R", "copies_N"), counts, strict=True))}
            )
            before_E = before_E + map_PE.sum(dim=0).cpu().numpy()
        return rows

    def metrics(self, map_TE: Tensor, rank: int, ranks_per_node: int = RANKS_PER_NODE) -> dict[str, Any]:
        """Those metrics of a rank's tokens that depend on where experts stand (``metrics.routing_metrics``).

        ``slot_load_P`` are pairs by slot, int64 [P].
        """
        counts_P, copies_R, copies_N = self.counts(map_TE, rank, ranks_per_node)
        counts_RS = counts_P.reshape(self.num_ranks, -1)
        load_R, moved_RR = counts_RS.sum(axis=1), self.moved_bytes_RR
        return {
            "slot_load_P": counts_P,
            "moved_weight_bytes": 0 if moved_RR is None else int(moved_RR[:, rank].sum()),
            "load_R": load_R,
            "activated_experts_fullest_rank": int((counts_RS > 0).sum(axis=1).max()),
            "crossing_pairs": int(load_R.sum() - load_R[rank]),
            "crossing_copies": int(copies_R.sum() - copies_R[rank]),
            "crossing_node_copies": int(copies_N.sum() - copies_N[rank // ranks_per_node]),
            "copies_R": copies_R,
            "copies_N": copies_N,
        }


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
            return self.batches.contiguous
        if index not in self._slots:
            counts_BRE = self.batches.native_counts
            slot_expert_P = comparison.slots_ahead(wanted, other_batches(counts_BRE.sum(axis=1), index))
            balanced = wanted.balance(slot_expert_P, counts_BRE[index])
            # Of this batch alone: a split batch by batch is as large as the batch.
            self._slots = {index: Slots.of_batch(balanced, counts_BRE[index], comparison.expert_bytes)}
        return self._slots[index]

    def context(self, share: Share) -> RoutingContext:
        """What the rule knows of a rank's tokens of a batch, its randomness at its start."""
        place = [key for key in (share.layer, share.number or None) if key is not None]
        device, load_E = share.context.request_id_T.device, self.carried(share.layer, share.batch, share.rank)
        draws = seeded_generator(device, self.batches.seed, DRAWS, share.batch, share.rank, *place)
        return replace(self.case.visible(share.context), generator=draws, load_E=load_E)

    def route(self, share: Share, stats_MSE: Tensor | None) -> Routing:
        """The case's routing of a rank's tokens, over experts: of each micro-batch (M) by itself."""
        form, parts = form_of(self.rule, share.scores_TE.device), share.parts(self.batches.comparison.num_parts)
        stats = [None] * len(parts) if stats_MSE is None else stats_MSE
        routed = [form.route(part.scores_TE, self.context(part), of) for part, of in zip(parts, stats, strict=True)]
        if len(routed) == 1:
            return routed[0]
        return Routing(torch.cat([one.map_TE for one in routed]), torch.cat([one.weights_TE for one in routed]))

    def stats_of(self, share: Share) -> Tensor | None:
        """Of a batch-wide policy what is summed over ranks, float64 [M, S, E]."""
        form, parts = form_of(self.rule, share.scores_TE.device), share.parts(self.batches.comparison.num_parts)
        stats = [form.batch_stats(part.scores_TE, self.context(part)) for part in parts]
        return None if stats[0] is None else torch.stack(stats)

    def enter(self, stack: Stack, shares: Mapping[int | None, Share]) -> None:
        """Put the case's routing of a rank's tokens of a batch into the MoE layers of ``stack``."""
        policy = self.case.policy
        stack.select_forms(() if policy is None else stack.forms)
        for layer, share in shares.items():
            if policy is None:  # By Megatron-Core's own router.
                stack.route(layer, share.logits_TE)
                continue
            context = self.context(share)
            here = policy.in_layer(context.layer_fraction)
            # A captured graph cannot draw.
            context = replace(context, random_TE=here.random_keys(share.logits_TE, context))
            stack.route(layer, share.logits_TE, here, context)

    def carried(self, layer: int | None, index: int, rank: int) -> Tensor | None:
        """Loads that batch ``index`` starts from on a rank, float64 [E]; None = nothing."""
        if index == 0 or not getattr(self.case.policy, "carry_loads", False):
            return None
        for before in range(index):  # In turn: each starts from what those before it left.
            if (layer, before + 1) not in self._loads:
                load_RE = torch.stack(self.batches.of_ranks(self._load_of, layer, before))
                self._loads[layer, before + 1] = load_RE + self._loads[layer, before] if before else load_RE
        return self._loads[layer, index][rank]

    def _load_of(self, share: Share) -> Tensor:
        return self.route(share.of(self.case), None).map_TE.sum(dim=0).double()


def case_metrics(
    case: CaseSpec, routing: Routing, share: Share, ranks_per_node: int = RANKS_PER_NODE
) -> dict[str, Any]:
    """A row of the table ``routing``: ``routing_metrics``, and loads of image tokens where there are any."""
    row: dict[str, Any] = {"rank": share.rank, "batch": share.batch, "layer": share.layer}
    row |= routing_metrics(routing, share.scores_TE, share.context, share.of_scores, ranks_per_node)
    if share.context.modality_T is not None:
        is_image_T, valid_T = share.context.modality_T == IMAGE, share.context.token_mask_T
        row["num_image_tokens"] = int((is_image_T if valid_T is None else is_image_T & valid_T).sum())
        row["image_load_E"] = routing.map_TE[is_image_T].sum(dim=0).cpu().numpy()
    return row
