"""Capacity: no expert computes more than its share of pairs (arXiv 2503.05066, section 3.2).

Under expert parallelism the fullest expert sets the layer's time. Both policies of this paper
bound it: an expert accepts at most C = floor(gamma * T * K / E) of this rank's pairs, gamma being
the capacity factor, and drops the rest. The bound is per source rank, so it costs no
communication; summed over ranks no expert exceeds gamma times the mean load.

- ``token_drop`` (Algorithm 1) applies it to the model's top-k pairs.
- ``expanded_drop`` (Algorithm 2) first offers each token more experts, by default those on its own
  rank, so that experts with room take what costs no transfer, and then applies the same bound.

Where the model divides weights by their sum, that is the sum of its top-k: what is dropped is lost, as in Megatron-Core
and the paper's first release (papers/published/capacity.yaml).

*Budget.* With ``budget_drop`` the user says what may be lost, in pairs or in score mass, and the policy finds the
smallest load of the fullest rank (or expert) for which that suffices. So it adapts to each batch and layer by itself.

All ranks must draw the same line, which takes one sum over them: a histogram of the top-k scores, by expert. A *cell*
is the pairs of one expert whose scores share a bin (``steps.score_bins``), and goes as a whole. From the sum every
rank works out alike:

1. The experts of each rank order their cells by their mean score, the lowest first.
2. To get down to a load x a rank gives up cells in this order until at most x pairs are left.
3. x is the smallest for which all ranks together give up no more than the budget.

The budget is exact: it is never exceeded, for cells know their pairs and their mass (scores are rounded to 2**-32, so
that sums are exact whatever their order). The bins cost optimality alone. A cell's scores differ by less than an
eighth, and ranks stop at whole cells; ``workload.frontier`` says what is possible.

Pairs go by score alone: a selection bias has chosen them, and has no part in what they are worth.

Statistics: in the first rows pairs by bin and expert, in the others their score mass.

Shapes: T = local tokens, E = experts, K = top_k, R = EP ranks, L = E / R experts per rank, S = 2 x bins, C = cells of a
rank, N = cells of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import (
    Count,
    Factor,
    Positive,
    Routing,
    RoutingContext,
    Share,
    SteppedPolicy,
    decimal,
    policy,
)
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import preference, top_k_map, weighted, without_padding
from moe_ep_bench.policies.steps import NUM_BINS, by_group, lowest

Metric = Literal["score", "order", "reverse_order", "random"]
Granularity = Literal["expert", "device"]
Modality = Literal["uniform", "image_first", "text_first"]
Scope = Literal["local", "global"]
Rounding = Literal["floor", "ceil"]

IMAGE = 1  # in RoutingContext.modality_T


class Room(NamedTuple):
    """Capacity of neighbouring experts that share one; the Triton forms read the same numbers.

    Attributes:
        of_token: pairs per token of the rank, num_shared * gamma * K / E. It is exact: the capacity factor is taken as
            the decimal that the user wrote. gamma = 0.7, T = 360, K = 2, E = 8 gives 63, where doubles give 62.
        num_shared: experts that share the capacity (L under device granularity, else 1).
    """

    of_token: Fraction
    num_shared: int
    rounding: Rounding

    def pairs(self, num_tokens: int) -> int:
        """The capacity for so many valid tokens."""
        exact = self.of_token * num_tokens
        return math.floor(exact) if self.rounding == "floor" else math.ceil(exact)


@policy
class CapacityPolicy(SteppedPolicy):
    """Fields and rules that ``token_drop`` and ``expanded_drop`` share.

    Attributes:
        capacity_factor: gamma >= 0, capacity over mean load; 0 drops everything.
        metric: which pairs an expert prefers: highest ``score``, earliest token (``order``),
            latest (``reverse_order``), or ``random``.
        granularity: ``expert``, or ``device``: the L experts of a rank share L capacities.
        modality: ``image_first`` drops image pairs before any text pair, ``text_first`` the reverse.
        rounding: how a capacity is rounded: ``floor`` (the paper's algorithms), or ``ceil`` (its released code).
    """

    capacity_factor: Factor
    metric: Metric = "score"
    granularity: Granularity = "expert"
    modality: Modality = "uniform"
    rounding: Rounding = "floor"

    torch_only: ClassVar[Mapping[str, object]] = {"rounding": "ceil"}

    @property
    def draws(self) -> bool:
        return self.metric == "random"

    def check(self, scores_TE: Tensor, context: RoutingContext) -> None:
        super().check(scores_TE, context)
        if self.modality != "uniform" and context.modality_T is None:
            raise UserError(f"modality={self.modality} needs the tokens' modality, got None", "modality_T")

    def room(self, num_experts: int, context: RoutingContext) -> Room:
        num_shared = num_experts // context.num_ranks if self.granularity == "device" else 1
        of_token = decimal(self.capacity_factor) * num_shared * context.top_k / num_experts
        return Room(of_token, num_shared, self.rounding)

    def most_pairs(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int:
        room = self.room(num_experts, context)
        within = room.pairs(context.num_valid(num_tokens)) * num_experts // room.num_shared
        return min(within, super().most_pairs(num_tokens, num_experts, context))

    def within_capacity(self, candidates_TE: Tensor, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """Keep of the candidate pairs what the experts (or devices) have room for: bool [T, E]."""
        num_tokens, num_experts = candidates_TE.shape
        room = self.room(num_experts, context)
        # A whole number of any size is no number of torch's.
        capacity = min(room.pairs(context.num_valid(num_tokens)), candidates_TE.numel())
        # Keys come first and always: what a random metric draws must not depend on the data.
        keys_TE = self._keys(scores_TE, context)
        return self.steps.within_capacity(candidates_TE, keys_TE, capacity, room.num_shared)

    def _keys(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """Keys by which an expert orders its pairs, the largest first: [T, E], float32 or int64."""
        if self.metric == "score":
            keys_TE = preference(scores_TE, context)
        elif self.metric == "random":
            keys_TE = context.random_keys(scores_TE)
        else:
            num_tokens = scores_TE.shape[0]
            token_T1 = torch.arange(num_tokens, device=scores_TE.device).unsqueeze(1)
            keys_TE = (num_tokens - token_T1 if self.metric == "order" else token_T1).expand_as(scores_TE)
        if self.modality == "uniform" or context.modality_T is None:
            return keys_TE
        is_image_T = context.modality_T == IMAGE
        favoured_T1 = (~is_image_T if self.modality == "image_first" else is_image_T).unsqueeze(1)
        return self.steps.marked_first(keys_TE, favoured_T1)


@policy
class TokenDrop(CapacityPolicy):
    """Capacity-aware Token Drop (arXiv 2503.05066, Algorithm 1)."""

    name = "token_drop"
    acts_in = ("prefill",)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        map_TE = self.within_capacity(top_k_TE, scores_TE, context)
        return weighted(scores_TE, map_TE, top_k_TE, context, self.steps)


@policy
class ExpandedDrop(CapacityPolicy):
    """Capacity-aware Expanded Drop (arXiv 2503.05066, Algorithm 2).

    Top-k pairs have no privilege over expanded ones: the published algorithm orders all of them
    by the same metric.

    Attributes:
        num_candidates: m, a token's further experts: its best on its own rank (``local``; None = all), or its next
            best anywhere (``global``; required).
        scope: ``local`` or ``global``.
        max_experts_per_token: experts that a token keeps in the end, its best. Freed places are not refilled; None = no
            limit.
    """

    name = "expanded_drop"
    experts_in = ("num_candidates", "max_experts_per_token")
    acts_in = ("prefill",)
    looks_past_top_k = True

    num_candidates: Count | None = None
    scope: Scope = "local"
    max_experts_per_token: Positive | None = None

    def __post_init__(self) -> None:
        if self.num_candidates is None and self.scope == "global":
            raise UserError("scope=global needs a whole number >= 0, got None", "num_candidates")

    @property
    def knows_rank(self) -> bool:
        return self.draws or self.scope == "local"

    @property
    def fills_experts_apart(self) -> bool:
        # A class of a user's own may choose otherwise.
        takes_all = type(self) is ExpandedDrop and self.num_candidates is None and self.max_experts_per_token is None
        return takes_all and self.scope == "local" and self.granularity == "expert" and not self.draws

    def further_experts(self, num_experts: int, context: RoutingContext) -> int:
        """Number of further experts that a token considers: on its own rank, or beyond its top-k anywhere."""
        most = num_experts - context.top_k if self.scope == "global" else num_experts // context.num_ranks
        return most if self.num_candidates is None else min(self.num_candidates, most)

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        wanted = min(context.top_k + self.further_experts(num_experts, context), num_experts)
        return wanted if self.max_experts_per_token is None else min(wanted, self.max_experts_per_token)

    def most_pairs(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int:
        if self.scope == "global":
            return super().most_pairs(num_tokens, num_experts, context)
        # Experts of the token's own rank keep what they have room for. Candidates elsewhere are top-k pairs, of which
        # there are T x K at most, and the other R - 1 ranks have room too. With whole capacities, gamma x T x K / R
        # a rank, that is min(gamma, 1 + gamma / R) x T x K.
        num_local, num_valid = num_experts // context.num_ranks, context.num_valid(num_tokens)
        room = self.room(num_experts, context)
        of_rank = room.pairs(num_valid) * num_local // room.num_shared
        here = min(of_rank, num_valid * num_local)
        elsewhere = min(of_rank * (context.num_ranks - 1), num_valid * min(context.top_k, num_experts - num_local))
        return min(here + elsewhere, num_valid * self.most_experts(num_experts, context))

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        preference_TE = preference(scores_TE, context)
        candidates_TE = self._expand(top_k_TE, preference_TE, context)
        map_TE = self.within_capacity(candidates_TE, scores_TE, context)
        if self.max_experts_per_token is not None:
            keys_TE = preference_TE.masked_fill(~map_TE, lowest(preference_TE))
            map_TE = map_TE & self.steps.best_per_row(keys_TE, self.max_experts_per_token)
        return weighted(scores_TE, map_TE, top_k_TE, context, self.steps)

    def _expand(self, top_k_TE: Tensor, preference_TE: Tensor, context: RoutingContext) -> Tensor:
        """Add the further experts that each token considers: bool [T, E]."""
        num_experts = top_k_TE.shape[1]
        count = self.further_experts(num_experts, context)
        if count == 0:
            return top_k_TE
        if self.scope == "global":
            others_TE = self.steps.best_per_row(preference_TE.masked_fill(top_k_TE, -torch.inf), count)
            return top_k_TE | without_padding(others_TE, context)
        num_local = num_experts // context.num_ranks
        local = slice(context.rank * num_local, (context.rank + 1) * num_local)
        expanded_TE = top_k_TE.clone()
        expanded_TE[:, local] |= self.steps.best_per_row(preference_TE[:, local], count)
        return without_padding(expanded_TE, context)


@policy
class BudgetDrop(SteppedPolicy):
    """Drop within a budget; of ``max_dropped`` and ``max_lost_mass`` give one.

    Attributes:
        max_dropped: most of the batch's top-k pairs that are dropped, 0 to 1.
        max_lost_mass: most of the top-k's score mass that is lost, 0 to 1.
    """

    name = "budget_drop"
    acts_in = ("prefill",)

    max_dropped: Share | None = None
    max_lost_mass: Share | None = None

    def __post_init__(self) -> None:
        if (self.max_dropped is None) == (self.max_lost_mass is None):
            got = "neither" if self.max_dropped is None else "both"
            raise UserError(f"max_dropped and max_lost_mass: expected one of them, got {got}")

    @property
    def stats_key(self) -> tuple[Any, ...]:
        return ()

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        return self.steps.histogram(scores_TE, top_k_TE)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        stats_SE = self.stats(scores_TE, context) if stats_SE is None else stats_SE
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        dropped_SE = self.steps.of_all_ranks(self.dropped_cells, stats_SE, context.num_ranks)
        map_TE = self.steps.without_cells(scores_TE, top_k_TE, dropped_SE)
        return weighted(scores_TE, map_TE, top_k_TE, context, self.steps)

    def dropped_cells(self, stats_SE: Tensor, num_ranks: int) -> Tensor:
        """Which cells are given up, from the statistics of all ranks: bool [bins, E]."""
        pairs_SE, mass_SE = stats_SE.view(2, NUM_BINS, -1)
        num_local = pairs_SE.shape[1] // num_ranks
        pairs_RC, mass_RC = (by_group(values_SE, num_local) for values_SE in (pairs_SE, mass_SE))
        # Empty cells go last, where they change nothing.
        mean_RC = torch.where(pairs_RC > 0, mass_RC / pairs_RC, torch.inf)
        order_RC = mean_RC.sort(dim=1, stable=True).indices
        pairs_RC, mass_RC = pairs_RC.gather(1, order_RC), mass_RC.gather(1, order_RC)
        # Pairs that a rank still computes before it gives up each cell.
        before_RC = pairs_RC.sum(dim=1, keepdim=True) - pairs_RC.cumsum(dim=1) + pairs_RC

        lost_RC, share = (pairs_RC, self.max_dropped) if self.max_lost_mass is None else (mass_RC, self.max_lost_mass)
        assert share is not None
        # Compared as whole numbers where the share is a decimal: 29 of 100 pairs are within 0.29.
        numerator, denominator = decimal(share).as_integer_ratio()
        before_N, order_N = before_RC.flatten().sort(descending=True, stable=True)
        lost_N = lost_RC.flatten()[order_N].cumsum(dim=0)
        affordable_N = denominator * lost_N <= numerator * lost_N[-1]
        # Ranks that are equally full must give way together, or nothing is gained: x is the fullest that cannot.
        fullest = torch.where(affordable_N, -1.0, before_N).max()
        dropped_RC = torch.zeros_like(order_RC, dtype=torch.bool).scatter(1, order_RC, before_RC > fullest)
        return dropped_RC.view(num_ranks, NUM_BINS, -1).transpose(0, 1).reshape(NUM_BINS, -1)
