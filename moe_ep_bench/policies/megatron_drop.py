"""Megatron-Core's own capacity rule, for comparison with the capacity-aware policies.

It differs from ``token_drop`` in two ways: capacity is rounded up, and pairs are ordered by their final weight
(normalised, without selection bias). The rule is that of ``apply_router_token_dropping`` in Megatron-Core with
``drop_policy`` probs and without padding; ties, which it leaves open, go to the lower token.
"""

from __future__ import annotations

import math
from typing import ClassVar

from moe_ep_bench.policies.contract import Phase, Routing, RoutingContext, SteppedPolicy
from moe_ep_bench.policies.field_types import Factor, policy
from moe_ep_bench.policies.lazy import Tensor
from moe_ep_bench.policies.selection import top_k_map, weighted


@policy
class MegatronDrop(SteppedPolicy):
    """Each expert keeps its best C = ceil(T * K / E * gamma) top-k pairs, T counting valid tokens.

    Attributes:
        capacity_factor: gamma >= 0 (``moe_expert_capacity_factor``).
    """

    name: ClassVar[str] = "megatron_drop"
    acts_in: ClassVar[tuple[Phase, ...]] = ("prefill",)

    capacity_factor: Factor

    def most_pairs(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int:
        within = self.capacity(num_tokens, num_experts, context) * num_experts
        return min(within, super().most_pairs(num_tokens, num_experts, context))

    def capacity(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int:
        """Pairs that an expert has room for."""
        num_valid = context.num_valid(num_tokens)
        # In doubles, as there: a ceiling of the exact decimal would be another rule.
        return math.ceil(min(num_valid * context.top_k / num_experts * self.capacity_factor, num_valid))

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        weights_TE = weighted(scores_TE, top_k_TE, top_k_TE, context, self.steps).weights_TE
        capacity = self.capacity(*scores_TE.shape, context)
        map_TE = self.steps.within_capacity(top_k_TE, weights_TE, capacity, num_shared=1)
        return weighted(scores_TE, map_TE, top_k_TE, context, self.steps)
