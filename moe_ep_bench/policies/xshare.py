"""XShare: a batch agrees on a set of experts, and every token chooses inside it (arXiv 2602.07265).

The set S starts from what each token wants most and grows by the experts with the largest score
summed over the batch (greedy maximisation of the mass that S holds), until a budget is spent. So
fewer experts are read than the tokens' own choices would activate, at the least loss of mass.

Section 2.2 defines a token's scores as zero outside its top-k, and within it as shares of the top-k's sum.
``scores: topk`` takes it at its word: only the top-k counts in sums, and a token selects no other expert. ``full``
(ours, the default) sums the router's scores of all experts, and lets a token fall back on others of S.

Statistics: per expert, how many tokens (or requests) put it into the set that S starts from, and
its score summed over the valid tokens. Both are sums, so ranks may add theirs up.

Shapes: T = local tokens, E = experts, K = top_k, R = EP ranks, L = E / R, Q = requests on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import Count, Routing, RoutingContext, Share, SteppedPolicy, policy
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import list_keys, summed_scores, top_k_map, weighted, without_padding
from moe_ep_bench.policies.steps import best_first, place_in_row, share_of

Scope = Literal["batch", "request", "rank"]
Scores = Literal["full", "topk"]

# Which fields each scope reads besides k0.
_READS: dict[str, tuple[str, ...]] = {
    "batch": ("budget", "mass_threshold"),
    "request": ("request_budget", "budget"),
    "rank": ("rank_budget",),
}


@policy
class XShare(SteppedPolicy):
    """S0 = union of the tokens' first k0; S = S0 and a budget of further experts; top-k inside S.

    Among equal sums the lower expert comes first. A token of which S holds fewer than K experts
    selects fewer.

    Attributes:
        k0: experts that every token brings into S0; 0 = none.
        scope: the budget is per batch, request or rank.
            ``batch``: S = S0 and the ``budget`` best of the rest, or as many as hold the share ``mass_threshold`` of
            all score mass (no mass, no share).
            ``request``: S = every request's S0 and its ``request_budget`` best by its own sums, and the ``budget`` best
            of the rest by the batch's.
            ``rank``: every rank adds its best remaining one in turn until S has rank_budget * R; tested between rounds,
            so S may end up to R - 1 larger.
        budget: experts, in addition to S0 (``batch``) or to the union (``request``; none = 0).
        mass_threshold: share of the score mass that the set reaches, 0 to 1.
        request_budget: experts per request, in addition to its S0.
        rank_budget: experts per rank, S0 included.
        scores: ``full``, or ``topk``: zero outside a token's own top-k, and over the sum of it inside.
    """

    name = "xshare"
    acts_in = ("decode",)
    experts_in = ("k0", "budget", "request_budget", "rank_budget")
    looks_past_top_k = True
    torch_only: ClassVar[Mapping[str, object]] = {"scores": "topk"}

    k0: Count
    budget: Count | None = None
    mass_threshold: Share | None = None
    scope: Scope = "batch"
    request_budget: Count | None = None
    rank_budget: Count | None = None
    scores: Scores = "full"

    def __post_init__(self) -> None:
        for name in ("budget", "mass_threshold", "request_budget", "rank_budget"):
            if getattr(self, name) is not None and name not in _READS[self.scope]:
                raise UserError(f"scope={self.scope} does not read it, got {getattr(self, name)!r}", name)
        if self.scope == "batch" and (self.budget is None) == (self.mass_threshold is None):
            given = "neither" if self.budget is None else "both"
            raise UserError(f"budget and mass_threshold: scope=batch expects one of them, got {given}")
        needed = {"request": "request_budget", "rank": "rank_budget"}.get(self.scope)
        if needed is not None and getattr(self, needed) is None:
            raise UserError(f"scope={self.scope} needs a whole number >= 0, got None", needed)

    def check(self, scores_TE: Tensor, context: RoutingContext) -> None:
        super().check(scores_TE, context)
        if self.scope == "request" and context.request_id_T is None:
            raise UserError("request_id_T: scope=request needs the tokens' requests, got None")

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        alone = self.k0 == 0 and self.scope == "batch" and self.budget is not None  # S is the budget's.
        return max(1, min(context.top_k, self.budget or 0)) if alone else context.top_k

    @property
    def stats_key(self) -> tuple[Any, ...]:
        return self.k0, self.scores, self.request_budget if self.scope == "request" else None

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        wanted_TE = self.steps.best_per_row(list_keys(scores_TE, context, self.steps), self.k0)
        wanted_TE = without_padding(wanted_TE, context)
        if self.scores == "topk":
            top_k_TE = top_k_map(scores_TE, context, self.steps)
            wanted_TE, scores_TE = wanted_TE & top_k_TE, top_k_shares(scores_TE, top_k_TE)
        if self.scope == "request":
            wanted_E = self._requests_sets(scores_TE, wanted_TE, context).sum(dim=0).double()
        else:
            wanted_E = self.steps.load_of(wanted_TE)
        return torch.stack([wanted_E, summed_scores(scores_TE, context)])

    def _requests_sets(self, scores_TE: Tensor, wanted_TE: Tensor, context: RoutingContext) -> Tensor:
        """S_r of every request that has a valid token: bool [Q, E]."""
        assert context.request_id_T is not None
        assert self.request_budget is not None
        id_T = context.request_id_T
        if context.token_mask_T is not None:
            valid_T = context.token_mask_T
            scores_TE, wanted_TE, id_T = scores_TE[valid_T], wanted_TE[valid_T], id_T[valid_T]
        # A request's tokens lie together, mostly: there are fewer runs of equal ids to sort than tokens.
        ids_N, run_T = id_T.unique_consecutive(return_inverse=True)
        ids_Q, request_N = ids_N.unique(return_inverse=True)
        wanted_QE, sums_QE = self.steps.by_request(scores_TE, wanted_TE, request_N[run_T], ids_Q.numel())
        return wanted_QE | self.steps.best_per_row(sums_QE.masked_fill(wanted_QE, -1.0), self.request_budget)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        stats_SE = self.stats(scores_TE, context) if stats_SE is None else stats_SE
        shared_E = self.steps.of_all_ranks(self.shared_experts, stats_SE, context.num_ranks)
        if self.scores == "topk":
            map_TE = top_k_map(scores_TE, context, self.steps) & shared_E
        else:
            map_TE = self.steps.best_per_row(list_keys(scores_TE, context, self.steps), context.top_k, shared_E)
            map_TE = without_padding(map_TE, context)
        return weighted(scores_TE, map_TE, map_TE, context, self.steps)

    def shared_experts(self, stats_SE: Tensor, num_ranks: int) -> Tensor:
        """S, from how many tokens each expert starts and the experts' summed scores: bool [E]."""
        start_E, sums_E = stats_SE[0] > 0, stats_SE[1]
        if self.mass_threshold is not None:
            return start_E | most_mass(start_E, sums_E, self.mass_threshold)
        if self.rank_budget is not None:
            return start_E | in_rounds(start_E, sums_E, self.rank_budget, num_ranks)
        return start_E | self.steps.best_per_row(sums_E.masked_fill(start_E, -1.0).unsqueeze(0), self.budget or 0)[0]


def top_k_shares(scores_TE: Tensor, top_k_TE: Tensor) -> Tensor:
    """Scores over the sum of the token's top-k, 0 outside it: float32 [T, E].

    Rounded to 2**-24, so that sums over tokens are exact whatever their order.
    """
    inside_TE = scores_TE.double() * top_k_TE
    return (share_of(inside_TE, inside_TE.sum(dim=1, keepdim=True)) * 2**24).round().float() / 2**24


def most_mass(start_E: Tensor, sums_E: Tensor, threshold: float) -> Tensor:
    """The fewest further experts, largest sums first, with which ``start_E`` holds the share: bool [E]."""
    order_E = best_first(sums_E.masked_fill(start_E, -1.0).unsqueeze(0))[0]
    rest_E = sums_E.masked_fill(start_E, 0.0)[order_E]
    # held[n]: mass of S with n of the rest; the last is all there is, so that its share is exactly 1.
    held_N = torch.cat([(sums_E * start_E).sum().unsqueeze(0), rest_E]).cumsum(dim=0)
    needed_E = share_of(held_N[:-1], held_N[-1]) < threshold
    return torch.zeros_like(start_E).scatter(0, order_E, needed_E)


def in_rounds(start_E: Tensor, sums_E: Tensor, rank_budget: int, num_ranks: int) -> Tensor:
    """Experts that ranks add, one per rank and round, until there are rank_budget * R: bool [E]."""
    start_RL = start_E.view(num_ranks, -1)
    num_local = start_RL.shape[1]
    left_R1 = num_local - start_RL.sum(dim=1, keepdim=True)
    rounds_L = torch.arange(num_local, device=start_E.device)
    size_L = start_RL.sum() + torch.minimum(left_R1, rounds_L).sum(dim=0)  # of S after so many rounds
    num_rounds = (size_L < rank_budget * num_ranks).sum()
    place_RL = place_in_row(sums_E.view(num_ranks, -1).masked_fill(start_RL, -1.0))
    return (place_RL < num_rounds).view(-1)
