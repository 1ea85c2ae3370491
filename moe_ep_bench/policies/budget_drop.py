"""Budget: drop no more than the user allows, where it relieves the fullest rank most.

A capacity factor says how full an expert may get, and what is lost follows from the traffic. ``budget_drop`` turns
this round: the user says what may be lost, in pairs or in score mass, and the policy finds the smallest load of the
fullest rank (or expert) for which that suffices. So it adapts to each batch and layer by itself.

All ranks must draw the same line, which takes one sum over them: a histogram of the top-k scores, by expert. A *cell*
is the pairs of one expert whose scores share a bin (``steps.score_bins``), and goes as a whole. From the sum every
rank works out alike:

1. The experts of each rank order their cells by their mean score, the lowest first.
2. To get down to a load x a rank gives up cells in this order until at most x pairs are left.
3. x is the smallest for which all ranks together give up no more than the budget.

The budget is exact: it is never exceeded, for cells know their pairs and their mass (scores are rounded to 2**-32, so
that sums are exact whatever their order). The bins cost optimality alone. A cell's scores differ by less than an
eighth, and ranks stop at whole cells; ``workload.frontier`` says what is possible.

Pairs go by score alone: a selection bias has chosen them, and has no part in what they are worth.

Statistics: in the first rows pairs by bin and expert, in the others their score mass.

Shapes: T = local tokens, E = experts, R = ranks, S = 2 x bins, C = cells of a rank, N = cells of all ranks.
"""

from __future__ import annotations

from typing import ClassVar

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import Phase, Routing, RoutingContext, SteppedPolicy
from moe_ep_bench.policies.field_types import Share, decimal, policy
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import top_k_map, weighted
from moe_ep_bench.policies.steps import NUM_BINS, by_group


@policy
class BudgetDrop(SteppedPolicy):
    """Drop within a budget; of ``max_dropped`` and ``max_lost_mass`` give one.

    Attributes:
        max_dropped: most of the batch's top-k pairs that are dropped, 0 to 1.
        max_lost_mass: most of the top-k's score mass that is lost, 0 to 1.
    """

    name: ClassVar[str] = "budget_drop"
    acts_in: ClassVar[tuple[Phase, ...]] = ("prefill",)

    max_dropped: Share | None = None
    max_lost_mass: Share | None = None

    def __post_init__(self) -> None:
        if (self.max_dropped is None) == (self.max_lost_mass is None):
            got = "neither" if self.max_dropped is None else "both"
            raise UserError(f"max_dropped and max_lost_mass: expected one of them, got {got}")

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        return self.steps.histogram(scores_TE, top_k_TE)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        stats_SE = self.stats(scores_TE, context) if stats_SE is None else stats_SE
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        dropped_SE = self.dropped_cells(stats_SE, context.num_ranks)
        map_TE = self.steps.without_cells(scores_TE, top_k_TE, dropped_SE)
        return weighted(scores_TE, map_TE, top_k_TE, context, self.steps)

    def dropped_cells(self, stats_SE: Tensor, num_ranks: int) -> Tensor:
        """Which cells are given up, from the statistics of all ranks: bool [bins, E]."""
        pairs_SE, mass_SE = stats_SE.view(2, NUM_BINS, -1)
        num_local = pairs_SE.shape[1] // num_ranks
        pairs_RC, mass_RC = (by_group(values_SE, num_local) for values_SE in (pairs_SE, mass_SE))
        # Empty cells go last, where they change nothing.
        mean_RC = torch.where(pairs_RC > 0, mass_RC / pairs_RC, torch.inf)
        order_RC = mean_RC.sort(dim=1, stable=True).indices
        pairs_RC, mass_RC = pairs_RC.gather(1, order_RC), mass_RC.gather(1, order_RC)
        # What a rank still computes before it gives up each cell.
        before_RC = pairs_RC.sum(dim=1, keepdim=True) - pairs_RC.cumsum(dim=1) + pairs_RC

        lost_RC, share = (pairs_RC, self.max_dropped) if self.max_lost_mass is None else (mass_RC, self.max_lost_mass)
        assert share is not None
        # Compared as whole numbers where the share is a decimal: 29 of 100 pairs are within 0.29.
        numerator, denominator = decimal(share).as_integer_ratio()
        before_N, order_N = before_RC.flatten().sort(descending=True, stable=True)
        lost_N = lost_RC.flatten()[order_N].cumsum(dim=0)
        affordable_N = denominator * lost_N <= numerator * lost_N[-1]
        # Ranks that are equally full must give way together, or nothing is gained: x is the fullest that cannot.
        fullest = torch.where(affordable_N, -1.0, before_N).max()
        dropped_RC = torch.zeros_like(order_RC, dtype=torch.bool).scatter(1, order_RC, before_RC > fullest)
        return dropped_RC.view(num_ranks, NUM_BINS, -1).transpose(0, 1).reshape(NUM_BINS, -1)
