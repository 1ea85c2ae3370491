"""DeepEP behind Megatron-Core's flex dispatcher, with room for policies that give a token more than K experts.

DeepEP sends a token to a rank once, however many of its experts live there. Megatron-Core hands it a table of each
token's experts, made by taking the K largest routing weights again: what a policy gave a token beyond K would be lost
without a word. So the table is made as wide as the policy needs (``Policy.most_experts``).

Shapes: T = this rank's tokens, E = experts.
"""

from __future__ import annotations

from moe_ep_bench.layer.megatron import MoEFlexTokenDispatcher


class FlexDispatcher(MoEFlexTokenDispatcher):
    """Megatron-Core's own; how many experts of a token it sends can be set."""

    @property
    def most_experts(self) -> int:
        """Experts of a token that are sent, those with the largest weights."""
        return self._comm_manager.router_topk

    @most_experts.setter
    def most_experts(self, count: int) -> None:
        self._comm_manager.router_topk = count
