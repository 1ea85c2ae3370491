"""Route a rank's tokens by a case, on virtual ranks as on real ones: ``Router.route(case, tokens)``.

**Replicas** are placed for the loads of the batches that a plan knows (``placement.Windows``). A balancer
(``balancers``) then splits each batch, or moves weights for it, once all counts are known, which the gather of counts
makes every rank know anyway; every rank then solves it by itself, ahead of dispatch, and is later by that time.

**Carried loads** are what earlier batches left on the experts, for policies with ``carry_loads`` (``policies.laser``).
Batch b starts from what routing batches 0 to b - 1, in this order, left. The chain is worked out once and apart from
all that is timed: so a batch is routed alike on every backend, whichever batch is run first and however often.

Shapes: B = batches, R = ranks, T = tokens of one rank, E = experts, P = slots of all ranks, M = micro-batches, S = rows
of a batch-wide policy's statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.balancers import Balanced, with_free_slots
from moe_ep_bench.bench.point import NATIVE, CaseSpec, Point
from moe_ep_bench.bench.tokens import Batches, Tokens
from moe_ep_bench.config import Lossless, ReplicationConfig
from moe_ep_bench.kernels import PolicyForm, form_of
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.metrics import RANKS_PER_NODE, metrics_of_parts
from moe_ep_bench.placement import Rearrangement, Slots, moved_experts, plan_ahead
from moe_ep_bench.policies import Routing, RoutingContext
from moe_ep_bench.policies.capacity import IMAGE, ExpandedDrop
from moe_ep_bench.workload.scores import batch_seed

if TYPE_CHECKING:  # It needs Megatron-Core, which routing alone does not.
    from moe_ep_bench.layer.stack import Stack

# Spare slots of a rank, who plans, and the batches that are known: what makes a plan.
_PlanKey = tuple[int, str | None, tuple[int, ...]]


class Router:
    """Routes the tokens of a point by its cases, and keeps what all ranks' earlier routing decides.

    Args:
        device: routes.
        few: only so many of each rank's tokens; None = all.
        routed: called whenever a rank is routed by all cases, with its share of ``Point.routing_work``.
        batches: those of a point with the same ones, whose tokens are shared; None = made here.
    """

    def __init__(
        self,
        point: Point,
        device: torch.device,
        few: int | None = None,
        routed: Callable[[int], object] = lambda _: None,
        batches: Batches | None = None,
    ) -> None:
        self.point, self.routed = point, routed
        self.batches = Batches(point, device, few) if batches is None else batches
        self.tokens, self.for_every_rank = self.batches.tokens, self.batches.for_every_rank
        self.for_sources = self.batches.for_sources
        self.native_counts = self.batches.native_counts
        self._contiguous = Slots.contiguous(point.model.num_experts, point.ep_size)
        self._slots: dict[str, tuple[int, Slots]] = {}
        self._load_RE: dict[tuple[str, int | None, int], Tensor] = {}
        self._left: dict[tuple[str, int], NDArray[np.int64]] = {}
        self._moved: dict[tuple[_PlanKey, _PlanKey | None], NDArray[np.int64]] = {}

    # ---- how a case routes -------------------------------------------------------------------------------------------

    def route(self, case: CaseSpec, tokens: Tokens, stats_MSE: Iterable[Tensor] | None = None) -> Routing:
        """The case's routing of a rank's tokens, over experts: of each micro-batch by itself.

        Args:
            tokens: as the case sees them (``Tokens.seen_by``).
            stats_MSE: of a batch-wide policy, its statistics summed over all ranks, of each micro-batch.
        """
        routed = self._routed(form_of(case.policy or NATIVE, tokens.scores_TE.device), case, tokens, stats_MSE)
        return Routing(_joined([one.map_TE for one in routed]), _joined([one.weights_TE for one in routed]))

    def chosen(self, case: CaseSpec, tokens: Tokens, stats_MSE: Iterable[Tensor] | None = None) -> Tensor:
        """The same pairs without weights, bool [T, E]: cases share what follows from the tokens alone."""
        form = form_of(case.policy or NATIVE, tokens.scores_TE.device, is_shared=True)
        return _joined([one.map_TE for one in self._routed(form, case, tokens, stats_MSE)])

    def chosen_apart(self, case: CaseSpec, tokens: Tokens) -> list[tuple[Tensor, Tensor]]:
        """Of each micro-batch the pairs with experts of other ranks, and with a rank's own, whichever rank that is.

        Of a policy that ``fills_experts_apart``: as if no expert were a rank's own, and as if all were.
        """
        assert isinstance(case.policy, ExpandedDrop)
        device, maps = tokens.scores_TE.device, []
        others, own = (
            form_of(one, device, is_shared=True) for one in (replace(case.policy, num_candidates=0), case.policy)
        )
        for part in tokens.parts(self.point.num_parts):
            context = replace(self._sharing_context(case, part), num_ranks=1, rank=0)
            maps.append(tuple(form.route(part.scores_TE, context).map_TE for form in (others, own)))
        return maps

    def _routed(
        self, form: PolicyForm, case: CaseSpec, tokens: Tokens, stats_MSE: Iterable[Tensor] | None
    ) -> list[Routing]:
        """Of each micro-batch."""
        parts = tokens.parts(self.point.num_parts)
        stats = [None] * len(parts) if stats_MSE is None else stats_MSE
        return [
            form.route(part.scores_TE, self._sharing_context(case, part), stats_SE)
            for part, stats_SE in zip(parts, stats, strict=True)
        ]

    def stats_of(self, case: CaseSpec, tokens: Tokens) -> Tensor | None:
        """A batch-wide policy's statistics of this rank, which are summed over ranks: float64 [M, S, E]; else None."""
        form, parts = form_of(case.policy or NATIVE, tokens.scores_TE.device), tokens.parts(self.point.num_parts)
        of_parts = (form.batch_stats(part.scores_TE, self._sharing_context(case, part)) for part in parts)
        stats = [stats_SE for stats_SE in of_parts if stats_SE is not None]
        return torch.stack(stats) if stats else None

    def context(self, case: CaseSpec, tokens: Tokens) -> RoutingContext:
        """The context of a rank's tokens as the case's policy sees it, its randomness at its start."""
        return self._seen(case, tokens, tokens.context)

    def _sharing_context(self, case: CaseSpec, tokens: Tokens) -> RoutingContext:
        """The same for what nobody times: all cases take the model's own choice as it was worked out once."""
        return self._seen(case, tokens, tokens.sharing_context)

    def _seen(self, case: CaseSpec, tokens: Tokens, context: RoutingContext) -> RoutingContext:
        generator = None
        if case.policy is not None and getattr(case.policy, "draws", True):  # A user's own need not say that it does.
            place = [key for key in (tokens.layer, tokens.number or None) if key is not None]
            device, seed = tokens.workload_scores_TE.device, self.point.experiment.layer.seed
            generator = seeded_generator(device, seed, DRAWS, batch_seed(tokens.batch), tokens.rank, *place)
        load_RE, context = self.carried(case, tokens.layer, tokens.batch), case.visible(context)
        if generator is None and load_RE is None:
            return context
        return replace(context, generator=generator, load_E=None if load_RE is None else load_RE[tokens.rank])

    def enter(self, case: CaseSpec, stack: Stack, layers: Mapping[int | None, Tokens]) -> None:
        """Put the case's routing of a rank's tokens, by layer, into the MoE layers of ``stack``."""
        policy = case.policy
        stack.select_forms(() if policy is None else stack.forms)
        for layer, of_layer in layers.items():
            if policy is None:  # By Megatron-Core's own router.
                stack.route(layer, of_layer.logits_TE)
                continue
            context = self.context(case, of_layer)
            here = policy.in_layer(context.layer_fraction)
            # A captured graph cannot draw.
            context = replace(context, random_TE=here.random_keys(of_layer.logits_TE, context))
            stack.route(layer, of_layer.logits_TE, here, context)

    # ---- what other batches decide -----------------------------------------------------------------------------------

    def carried(self, case: CaseSpec, layer: int | None, batch: int) -> Tensor | None:
        """Loads from which a batch starts on every rank, float64 [R, E]; None if policies carry none."""
        if batch == 0 or not getattr(case.policy, "carry_loads", False):
            return None

        def load_of(tokens: Tokens) -> Tensor:
            return self.chosen(case, tokens.seen_by(case)).sum(dim=0).double()

        # Batch after batch, because each starts from what those before it left.
        for number in range(1, batch + 1):
            if (case.case_id, layer, number) not in self._load_RE:
                load_RE = torch.stack(self.for_every_rank(f"carried {case.case_id}", load_of, layer, number - 1))
                before_RE = self._load_RE.get((case.case_id, layer, number - 1))
                self._load_RE[case.case_id, layer, number] = load_RE if before_RE is None else load_RE + before_RE
        return self._load_RE[case.case_id, layer, batch]

    def slots(self, case: CaseSpec, batch: int) -> Slots:
        """Where the case's experts stand for a batch. The last batch's are kept: they are as large as the batch."""
        wanted, point = case.replication, self.point
        if wanted is None:
            return self._contiguous
        known = self._slots.get(case.case_id)
        if known is not None and known[0] == batch:
            return known[1]
        balanced = self._balanced(case, wanted, batch)
        slots = Slots.of_batch(balanced, self.native_counts(batch), point.expert_bytes, point.num_sources)
        slots = replace(slots, rearranged=self._rearranged(wanted, batch))
        self._slots[case.case_id] = batch, slots
        return slots

    def _balanced(self, case: CaseSpec, wanted: Lossless, batch: int) -> Balanced:
        """A batch over slots as its plan has them, or as the batches before it left them, one after the other."""
        begins_P, _ = self._planned(self._plan_key(wanted, batch))
        for number in range(batch) if wanted.keeps_places else ():
            if (left := (case.case_id, number)) not in self._left:
                self._left[left] = self._balance(wanted, begins_P, number).left_P(self.point.ep_size)
            begins_P = self._left[left]
        return self._balance(wanted, begins_P, batch)

    def _balance(self, wanted: Lossless, slot_expert_P: NDArray[np.int64], batch: int) -> Balanced:
        counts_RE, stands_for, exchange_pairs = self.native_counts(batch), self.point.stands_for, None
        if wanted.keeps_places and (pairs := self.point.exchange_pairs(stands_for * counts_RE.sum(axis=0))):
            exchange_pairs = max(1, pairs // stands_for)
        rule, per_node = wanted.of_sample(stands_for), self.point.ranks_per_node
        return self.batches.once(
            (rule, slot_expert_P.tobytes(), batch, per_node, exchange_pairs),
            lambda: rule.balance(slot_expert_P, counts_RE, per_node, exchange_pairs),
        )

    def _plan_key(self, wanted: Lossless, batch: int) -> _PlanKey:
        plan, known = None, ()
        if isinstance(wanted, ReplicationConfig):
            plan, known = wanted.plan, self.point.windows(wanted).known(batch)
        return self.point.spare_here(wanted), plan, known

    def _planned(self, key: _PlanKey) -> tuple[NDArray[np.int64], float]:
        """The expert in each slot, int64 [P], and the milliseconds that this CPU took to plan."""
        point, (spare, plan, known) = self.point, key

        def planned() -> tuple[NDArray[np.int64], float]:
            load_BE = list(map(self.batches.loads, known))
            load_BE = np.array(load_BE, dtype=np.float64).reshape(-1, point.model.num_experts)
            sizes = {"num_ranks": point.ep_size, "spare_per_rank": spare}
            began = time.perf_counter()
            slot_expert_P = plan_ahead(plan, load_BE, **sizes, num_groups=point.model.num_groups or 1)
            return slot_expert_P, 1e3 * (time.perf_counter() - began)

        return self.batches.once(key, planned)

    def _rearranged(self, wanted: Lossless, batch: int) -> Rearrangement | None:
        """What it took to put a batch's plan in place, from the plan before, or from experts at their homes."""
        if not isinstance(wanted, ReplicationConfig) or self.point.windows(wanted).window is None:
            return None
        point, before = self.point, self.point.windows(wanted).before(batch)
        after_key, before_key = self._plan_key(wanted, batch), None
        after_P, measured_ms = self._planned(after_key)
        if before is None:
            before_P = with_free_slots(point.model.num_experts, point.ep_size, after_key[0])
        else:
            before_P, _ = self._planned(before_key := self._plan_key(wanted, before))
        if (after_key, before_key) not in self._moved:  # All batches that the plan serves share it.
            moved_RR = moved_experts(before_P, after_P, point.ep_size, point.ranks_per_node)
            self._moved[after_key, before_key] = moved_RR
        plan_us = 1e3 * (measured_ms if wanted.plan_ms is None else wanted.plan_ms)
        moved_bytes_RR = self._moved[after_key, before_key] * np.float64(point.expert_bytes)
        return Rearrangement(moved_bytes_RR, wanted.every, plan_us if wanted.rearrange == "stall" else None)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def case_metrics(
    map_TE: Tensor, tokens: Tokens, ranks_per_node: int = RANKS_PER_NODE, num_parts: int = 1
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A row of the table ``routing`` of the pairs that a case computes, and what each micro-batch sends to home slots.

    The row has ``routing_metrics``, and loads of image tokens where there are any.
    """
    row: dict[str, Any] = {"rank": tokens.rank, "batch": tokens.batch, "layer": tokens.layer}
    of_tokens = tokens.scores_TE, tokens.context, tokens.of_scores
    metrics, parts = metrics_of_parts(map_TE, *of_tokens, ranks_per_node, num_parts)
    row |= metrics
    if tokens.context.modality_T is not None:
        is_image_T, valid_T = tokens.context.modality_T == IMAGE, tokens.context.token_mask_T
        row["num_image_tokens"] = int((is_image_T if valid_T is None else is_image_T & valid_T).sum())
        row["image_load_E"] = map_TE[is_image_T].sum(dim=0).cpu().numpy()
    return row, parts
