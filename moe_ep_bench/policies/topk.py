"""The model's own routing: every token goes to its K best experts, whatever their load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moe_ep_bench.policies.contract import Policy, Routing, RoutingContext
from moe_ep_bench.policies.selection import top_k_map, weighted
from moe_ep_bench.policies.steps import Steps


@dataclass(frozen=True, kw_only=True)
class TopK(Policy):
    """No policy at all: the baseline, on the path that the policies take."""

    name: ClassVar[str] = "topk"

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        return context.top_k

    def select_by(self, steps: Steps, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
        map_TE = top_k_map(scores_TE, context, steps)
        return weighted(scores_TE, map_TE, map_TE, context, steps)
