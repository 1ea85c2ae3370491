"""Skipping: computing less of the model's top-k, without routing anything anew.

- ``expert_drop`` closes the experts that a batch uses least; the baseline of arXiv 2503.05066 that
  drops experts where the paper's own method drops tokens.
- ``lynx`` closes the least used of the experts that a batch activates, so that a memory-bound step
  reads fewer weights (arXiv 2411.08982, batch-aware expert selection).
- ``dynamic_skip`` lets each token skip experts whose score falls far behind its best one
  (arXiv 2402.14800, dynamic expert skipping, there for K = 2).

The first two decide for the whole batch: their statistics are the top-k pairs per expert.

Shapes: T = local tokens, E = experts.
"""

from __future__ import annotations

import math

from moe_ep_bench.policies.contract import Count, Routing, RoutingContext, Share, SteppedPolicy, decimal, policy
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import top_k_map, weighted
from moe_ep_bench.policies.steps import Steps


@policy
class ClosingPolicy(SteppedPolicy):
    """The rule that ``expert_drop`` and ``lynx`` share: experts are closed by their load in the batch."""

    def closed(self, load_E: Tensor) -> Tensor:
        """Which experts nobody may use: bool [E], from the batch's top-k pairs per expert (float64)."""
        raise NotImplementedError

    def num_closed(self, num_experts: int) -> int:
        """The least number of experts that are closed, or left without a token."""
        raise NotImplementedError

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        return max(1, min(context.top_k, num_experts - self.num_closed(num_experts)))

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        return self.steps.load_of(top_k_map(scores_TE, context, self.steps)).unsqueeze(0)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        stats_SE = self.stats(scores_TE, context) if stats_SE is None else stats_SE
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        return weighted(scores_TE, top_k_TE & ~self.closed(stats_SE[0]), top_k_TE, context, self.steps)


@policy
class ExpertDrop(ClosingPolicy):
    """Skip the least loaded experts, unused ones included; the lower index first among equals.

    Attributes:
        fraction: share of experts that are closed, 0 to 1: floor(fraction * E), at least one.
    """

    name = "expert_drop"
    acts_in = ("prefill",)

    fraction: Share = 0.1

    def closed(self, load_E: Tensor) -> Tensor:
        return least(self.steps, load_E, self.num_closed(load_E.numel()))

    def num_closed(self, num_experts: int) -> int:
        return max(1, math.floor(decimal(self.fraction) * num_experts))


@policy
class Lynx(ClosingPolicy):
    """Close the least used of the experts that the batch activates; the lower index first among equals.

    Attributes:
        num_dropped: experts that are closed; as many as are activated, or more, leaves nothing.
    """

    name = "lynx"
    acts_in = ("decode",)
    experts_in = ("num_dropped",)

    num_dropped: Count

    def num_closed(self, num_experts: int) -> int:
        return min(self.num_dropped, num_experts)

    def closed(self, load_E: Tensor) -> Tensor:
        is_activated_E = load_E > 0
        return is_activated_E & least(self.steps, load_E.masked_fill(~is_activated_E, torch.inf), self.num_dropped)


@policy
class DynamicSkip(SteppedPolicy):
    """A token skips those of its top-k whose score is below ``beta`` times the best score among them.

    Attributes:
        beta: 0 to 1; 0 skips nothing, 1 all that do not equal the best.
    """

    name = "dynamic_skip"

    beta: Share

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        best_T1 = (scores_TE * top_k_TE).amax(dim=1, keepdim=True).double()
        map_TE = top_k_TE & (scores_TE >= self.beta * best_T1)
        return weighted(scores_TE, map_TE, map_TE, context, self.steps)


def least(steps: Steps, load_E: Tensor, count: int) -> Tensor:
    """Mark the ``count`` smallest, the lower index first among equals: bool [E]."""
    return steps.best_per_row(-load_E.unsqueeze(0), count)[0]
