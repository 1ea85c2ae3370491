"""LASER: where a token is nearly indifferent, send it to the least loaded experts (arXiv 2510.03293).

A token whose top-k holds most of its mass keeps it. Any other token widens its choice to the
experts whose score comes near its best one, and takes the least loaded of these. Tokens are
routed one after another, each by the loads that those before it left.
``load_only`` ignores scores but for ties: the balance that load-aware routing could reach at most.

Loads begin at zero with every batch and are this rank's own, so the policies cost no communication; section 4 says
neither, and ``carry_loads`` is its other reading. The sequential rule is not for torch: it runs
compiled, on the host (``kernels.row_selection``) or in one program of a GPU (``kernels.laser_triton``).

Shapes: T = local tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import Flag, Positive, Routing, RoutingContext, Share, SteppedPolicy, policy
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import list_keys, weighted
from moe_ep_bench.policies.steps import LeastLoaded

Trim = Literal["top", "random"]


@policy
class LoadAwarePolicy(SteppedPolicy):
    """The rule that ``laser`` and ``load_only`` share: tokens in order, loads carried from one to the next.

    Attributes:
        carry_loads: start a batch from the loads that this rank's earlier ones left (``load_E``), not from zero.
    """

    looks_past_top_k = True
    torch_only: ClassVar[Mapping[str, object]] = {"carry_loads": True}

    carry_loads: Flag = False

    def rule(self, scores_TE: Tensor, context: RoutingContext) -> tuple[LeastLoaded, Tensor | None]:
        """The rule of this layer, and keys that trim a pool that is too large: float32 [T, E] drawn anew, or None."""
        raise NotImplementedError

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        """Start from the loads of earlier batches and go through this rank's valid tokens."""
        rule, random_TE = self.rule(scores_TE, context)
        load_E = scores_TE.new_zeros(scores_TE.shape[1], dtype=torch.float64)
        if self.carry_loads and context.load_E is not None:
            load_E += context.load_E.to(load_E)
        keys_TE = list_keys(scores_TE, context, self.steps)
        rows = {"valid_T": context.token_mask_T, "random_TE": random_TE}
        map_TE = self.steps.least_loaded(scores_TE, keys_TE, load_E, rule, **rows)
        return weighted(scores_TE, map_TE, map_TE, context, self.steps)


@policy
class Laser(LoadAwarePolicy):
    """Load-aware choice among near-best experts.

    Attributes:
        eps_high: a token whose top-k holds at least this share of its row sum takes its top-k; 0 to 1.
        t_fix: otherwise its pool is all experts that score at least t_fix times its best score, and
            its top-k; 0 to 1.
        c: the pool is trimmed to this many, K to E. The token takes the K least loaded of them, the
            more preferred first among equals.
        trim: keep the first c of the token's preference list (``top``), or any c (``random``), which
            may lose experts of the top-k.
    """

    name = "laser"
    experts_in = ("c",)

    eps_high: Share
    t_fix: Share
    c: Positive
    trim: Trim = "top"

    @property
    def draws(self) -> bool:
        return self.trim == "random"

    def check(self, scores_TE: Tensor, context: RoutingContext) -> None:
        super().check(scores_TE, context)
        num_experts = scores_TE.shape[1]
        if not context.top_k <= self.c <= num_experts:
            raise UserError(f"expected {context.top_k} (top_k) to {num_experts} (the experts), got {self.c}", "c")

    def rule(self, scores_TE: Tensor, context: RoutingContext) -> tuple[LeastLoaded, Tensor | None]:
        rule = LeastLoaded(top_k=context.top_k, eps_high=self.eps_high, t_fix=self.t_fix, pool_size=self.c)
        return rule, self.random_keys(scores_TE, context)


@policy
class LoadOnly(LoadAwarePolicy):
    """The K least loaded of all experts, the more preferred first among equals: the balance bound."""

    name = "load_only"

    def rule(self, scores_TE: Tensor, context: RoutingContext) -> tuple[LeastLoaded, None]:
        """Everyone's pool is all experts."""
        return LeastLoaded(top_k=context.top_k, eps_high=math.inf, t_fix=0.0, pool_size=scores_TE.shape[1]), None
