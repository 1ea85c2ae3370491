"""Opportunistic expert activation: once an expert's weights are read, they serve everyone (arXiv 2511.02237).

A memory-bound decode step takes as long as the weights that it reads, that is, as the experts that
the batch activates. ``pruned`` lets each token insist on fewer experts than the model's K. ``oea`` then
lets every token *piggyback* on the experts that others insist on, at no further reads.

The rules walk down a token's *preference list* (``selection.list_keys``); its first K are the top-k.

Shapes: T = local tokens, E = experts, K = top_k.
"""

from __future__ import annotations

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import (
    ByLayer,
    Positive,
    Routing,
    RoutingContext,
    ShareAboveZero,
    SteppedPolicy,
    policy,
)
from moe_ep_bench.policies.lazy import Tensor
from moe_ep_bench.policies.selection import list_keys, weighted, without_padding
from moe_ep_bench.policies.steps import lowest


@policy
class Pruned(SteppedPolicy):
    """A token takes the first n of its list: k0, or fewer if these hold share p of its row sum.

    Attributes:
        k0: most experts of a token, at most the model's K. Where p is below 1 it may be more; E makes it the paper's
            top-p method (section 3.1).
        p: above 0, to 1; 1 cuts nothing. A row without mass reaches no share.
    """

    name = "pruned"
    acts_in = ("decode",)
    experts_in = ("k0",)

    k0: Positive
    p: ShareAboveZero = 1.0

    @property
    def looks_past_top_k(self) -> bool:  # type: ignore[override]
        """A share is of the whole row."""
        return self.p != 1

    def check_model(self, num_experts: int, top_k: int) -> None:
        super().check_model(num_experts, top_k)
        k0, p = (max(value) if isinstance(value, ByLayer) else value for value in (self.k0, self.p))
        if k0 > top_k and p == 1:
            raise UserError(f"expected at most {top_k}, the model's top-k, where p is 1; got {k0}", "k0")

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        return min(self.k0, num_experts)

    def base(self, scores_TE: Tensor, keys_TE: Tensor, context: RoutingContext) -> Tensor:
        """The first n of every list: bool [T, E]."""
        if self.p == 1:
            return without_padding(self.steps.best_per_row(keys_TE, self.k0), context)
        return without_padding(self.steps.fewest_reaching(scores_TE, keys_TE, self.k0, self.p), context)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        map_TE = self.base(scores_TE, list_keys(scores_TE, context, self.steps), context)
        return weighted(scores_TE, map_TE, map_TE, context, self.steps, width=self.k0)


@policy
class OEA(Pruned):
    """Base = ``pruned``; S = union of the batch's bases; then each token adds experts of S in list order.

    Statistics: how many tokens have an expert in their base.

    Attributes:
        k_max: a token adds while it holds fewer; None = K. Its base always stays.
        max_rank: positions of its list that a token looks at; None = all.
    """

    name = "oea"
    experts_in = ("k0", "k_max", "max_rank")

    k_max: Positive | None = None
    max_rank: Positive | None = None

    @property
    def looks_past_top_k(self) -> bool:
        return True

    def most_added(self, context: RoutingContext) -> int:
        """A token adds experts while it holds fewer than this."""
        return context.top_k if self.k_max is None else self.k_max

    def keeps_base_apart(self, context: RoutingContext) -> bool:
        """Whether the base has to be kept beside what a token adds.

        Otherwise the base, which opens the list and lies in S, is among the first of S that are added.
        """
        return self.k0 > self.most_added(context) or self.max_rank is not None

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        within = num_experts if self.max_rank is None else self.max_rank
        return min(max(self.k0, min(self.most_added(context), within)), num_experts)

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        base_TE = self.base(scores_TE, list_keys(scores_TE, context, self.steps), context)
        return self.steps.load_of(base_TE).unsqueeze(0)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        stats_SE = self.stats(scores_TE, context) if stats_SE is None else stats_SE
        shared_E = stats_SE[0] > 0
        keys_TE = list_keys(scores_TE, context, self.steps)
        k_max = self.most_added(context)
        if self.max_rank is None or self.max_rank >= scores_TE.shape[1]:
            map_TE = self.steps.best_per_row(keys_TE, k_max, shared_E)
        else:
            within_TE = self.steps.best_per_row(keys_TE, self.max_rank) & shared_E
            map_TE = self.steps.best_per_row(keys_TE.masked_fill(~within_TE, lowest(keys_TE)), k_max) & within_TE
        map_TE = without_padding(map_TE, context)
        if self.keeps_base_apart(context):
            map_TE = map_TE | self.base(scores_TE, keys_TE, context)
        return weighted(scores_TE, map_TE, map_TE, context, self.steps, width=max(self.k0, k_max))
