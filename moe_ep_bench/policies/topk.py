"""The model's own routing: every token goes to its K best experts, whatever their load."""

from __future__ import annotations

from typing import ClassVar

from moe_ep_bench.policies.contract import Routing, RoutingContext, SteppedPolicy
from moe_ep_bench.policies.field_types import policy
from moe_ep_bench.policies.lazy import Tensor
from moe_ep_bench.policies.selection import top_k_map, weighted


@policy
class TopK(SteppedPolicy):
    """No policy at all: the baseline, on the path that the policies take."""

    name: ClassVar[str] = "topk"

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        map_TE = top_k_map(scores_TE, context, self.steps)
        return weighted(scores_TE, map_TE, map_TE, context, self.steps)
