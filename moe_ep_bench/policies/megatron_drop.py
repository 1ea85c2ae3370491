"""Megatron-Core's own capacity rule, for comparison with the capacity-aware policies.

It differs from ``token_drop`` in three ways: capacity is rounded up, pairs are ordered by their
final weight (normalised, without selection bias), and an expert may be padded to its capacity with
pairs that nobody chose. Those carry weight 0: they cost time and change no output, as in training
with buffers of one size. The rule is that of ``apply_router_token_dropping`` in Megatron-Core; ties,
which it leaves open, go to the lower token, and a pair of weight 0 outranks one that nobody chose.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from moe_ep_bench.policies.contract import Phase, Routing, RoutingContext, SteppedPolicy
from moe_ep_bench.policies.field_types import Factor, Flag, policy
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import top_k_map, weighted, without_padding

DropPolicy = Literal["probs", "position"]


@policy
class MegatronDrop(SteppedPolicy):
    """Each expert keeps its best C = ceil(T * K / E * gamma) top-k pairs, T counting valid tokens.

    Attributes:
        capacity_factor: gamma >= 0 (``moe_expert_capacity_factor``).
        drop_policy: keep the largest weights (``probs``) or the earliest tokens (``position``). In a layer
            Megatron-Core's router drops, and by ``position`` keeps any: it takes top-k of zeros and ones.
        pad_to_capacity: fill every expert up to C with further tokens, earliest first, at weight 0.
    """

    name: ClassVar[str] = "megatron_drop"
    acts_in: ClassVar[tuple[Phase, ...]] = ("prefill",)

    capacity_factor: Factor
    drop_policy: DropPolicy = "probs"
    pad_to_capacity: Flag = False

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        return num_experts if self.pad_to_capacity else context.top_k

    def most_pairs(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int:
        within = self.capacity(num_tokens, num_experts, context) * num_experts
        return within if self.pad_to_capacity else min(within, context.num_valid(num_tokens) * context.top_k)

    def capacity(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int:
        """Pairs that an expert has room for."""
        num_valid = context.num_valid(num_tokens)
        # In doubles, as there: a ceiling of the exact decimal would be another rule.
        return math.ceil(min(num_valid * context.top_k / num_experts * self.capacity_factor, num_valid))

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        keys_TE = torch.ones_like(scores_TE)
        if self.drop_policy == "probs":
            keys_TE = weighted(scores_TE, top_k_TE, top_k_TE, context, self.steps).weights_TE
        candidates_TE = top_k_TE
        if self.pad_to_capacity:
            keys_TE = keys_TE.masked_fill(~top_k_TE, -1.0)
            candidates_TE = without_padding(torch.ones_like(top_k_TE), context)
        map_TE = self.steps.within_capacity(
            candidates_TE, keys_TE, self.capacity(*scores_TE.shape, context), num_shared=1
        )
        kept = weighted(scores_TE, map_TE & top_k_TE, top_k_TE, context, self.steps)
        return Routing(map_TE=map_TE, weights_TE=kept.weights_TE)
