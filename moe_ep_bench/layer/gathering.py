"""Dispatching without permuting: every rank gets all tokens, and its experts pick theirs from the map.

Megatron-Core's all-gather dispatcher sorts what it gathered by expert, for which it must know how many rows there are:
it waits for the host. Experts that take a map (``backends.MappedExperts``) need no sorted rows. What is left is an
all-gather of tokens, weights and map, and a reduce-scatter of the ranks' partial sums; on one rank nothing at all. No
shape follows from the routing, so that a CUDA graph can hold it. It suits the few tokens of a decode step: what
travels is every token to every rank.

Shapes: T = tokens of all ranks, E = experts, L = local experts, D = hidden size.
"""

from __future__ import annotations

from torch import Tensor

from moe_ep_bench.layer.megatron import MoEAllGatherTokenDispatcher


class MapDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron-Core's all-gather and reduce-scatter, with nothing sorted between them."""

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        assert self.routing_map is not None
        hidden_states, probs, self.routing_map = self.gathered(hidden_states, probs, self.routing_map)
        return hidden_states, probs

    def gathered(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what all ranks hand in here, rank by rank: tokens [T, D], weights and map [T, E]."""
        self.routing_map = routing_map
        hidden_states, probs = super().token_dispatch(hidden_states, probs)
        return hidden_states, probs, self.routing_map

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens [T, D], which local experts they take (bool [T, L]) and their weights (float32 [T, L])."""
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1]
        local = slice(first, last + 1)
        # The reduce-scatter sums in this one's dtype.
        self.local_probs = probs[:, local]
        map_TL, self.routing_map = self.routing_map[:, local], None
        return hidden_states, map_TL, self.local_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states
