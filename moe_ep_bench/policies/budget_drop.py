"""Budget: drop no more than the user allows, where it relieves the fullest rank most.

A capacity factor says how full an expert may get, and what is lost follows from the traffic. ``budget_drop`` turns
this round: the user says what may be lost, in pairs or in score mass, and the policy finds the smallest load of the
fullest rank (or expert) for which that suffices. So it adapts to each batch and layer by itself.

All ranks must draw the same line, which takes one sum over them: a histogram of the top-k scores, by expert. A *cell*
is the pairs of one expert whose scores share a bin, and goes as a whole. Bins divide each octave from 2**-16 to 1 into
``bins_per_octave`` equal parts; scores outside are counted in the first or last bin. From the sum every rank works out
alike:

1. Each group (rank or expert) orders its cells by their mean score, the lowest first.
2. To get down to a load x a group gives up cells in this order until at most x pairs are left.
3. x is the smallest for which all groups together give up no more than the budget.

The budget is exact: it is never exceeded, for cells know their pairs and their mass (scores are rounded to 2**-32, so
that sums are exact whatever their order). The bins cost optimality alone. A cell's scores differ by less than a
factor 1 + 1 / bins_per_octave, and groups stop at whole cells; ``workload.frontier`` says what is possible.

Pairs go by score alone: a selection bias has chosen them, and has no part in what they are worth.

Statistics: in the first rows pairs by bin and expert, in the others their score mass.

Shapes: T = local tokens, E = experts, S = 2 x bins, G = groups, C = cells of a group, N = cells of all groups.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import Phase, Routing, RoutingContext, SteppedPolicy
from moe_ep_bench.policies.field_types import Positive, Share, decimal, policy
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import top_k_map, weighted
from moe_ep_bench.policies.steps import by_group

Granularity = Literal["rank", "expert"]

NUM_OCTAVES = 16
# Sums of multiples of it are exact up to 2**21, two million tokens of softmax scores.
SCORE_UNIT = 2.0**-32


@policy
class BudgetDrop(SteppedPolicy):
    """Drop within a budget; of ``max_dropped`` and ``max_lost_mass`` give one.

    Attributes:
        max_dropped: most of the batch's top-k pairs that are dropped, 0 to 1.
        max_lost_mass: most of the top-k's score mass that is lost, 0 to 1.
        granularity: whose load shrinks: that of the fullest ``rank``, or of the fullest ``expert``.
        bins_per_octave: 1 to 64, a power of two; more bins come nearer to the frontier, and take longer to sum.
    """

    name: ClassVar[str] = "budget_drop"
    acts_in: ClassVar[tuple[Phase, ...]] = ("prefill",)

    max_dropped: Share | None = None
    max_lost_mass: Share | None = None
    granularity: Granularity = "rank"
    bins_per_octave: Positive = 8

    def __post_init__(self) -> None:
        if (self.max_dropped is None) == (self.max_lost_mass is None):
            got = "neither" if self.max_dropped is None else "both"
            raise UserError(f"max_dropped and max_lost_mass: expected one of them, got {got}")
        if self.bins_per_octave not in (1, 2, 4, 8, 16, 32, 64):
            raise UserError(f"bins_per_octave: expected a power of two from 1 to 64, got {self.bins_per_octave}")

    @property
    def num_bins(self) -> int:
        return NUM_OCTAVES * self.bins_per_octave

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        return self.steps.histogram(scores_TE, top_k_TE, self.num_bins, self.bins_per_octave, SCORE_UNIT)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        stats_SE = self.stats(scores_TE, context) if stats_SE is None else stats_SE
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        dropped_SE = self.dropped_cells(stats_SE, context.num_ranks)
        map_TE = self.steps.without_cells(scores_TE, top_k_TE, dropped_SE, self.bins_per_octave)
        return weighted(scores_TE, map_TE, top_k_TE, context, self.steps)

    def dropped_cells(self, stats_SE: Tensor, num_ranks: int) -> Tensor:
        """Which cells are given up, from the statistics of all ranks: bool [bins, E]."""
        pairs_SE, mass_SE = stats_SE.view(2, self.num_bins, -1)
        num_groups = num_ranks if self.granularity == "rank" else pairs_SE.shape[1]
        group_size = pairs_SE.shape[1] // num_groups
        pairs_GC, mass_GC = (by_group(values_SE, group_size) for values_SE in (pairs_SE, mass_SE))
        # Empty cells go last, where they change nothing.
        mean_GC = torch.where(pairs_GC > 0, mass_GC / pairs_GC, torch.inf)
        order_GC = mean_GC.sort(dim=1, stable=True).indices
        pairs_GC, mass_GC = pairs_GC.gather(1, order_GC), mass_GC.gather(1, order_GC)
        # What a group still computes before it gives up each cell.
        before_GC = pairs_GC.sum(dim=1, keepdim=True) - pairs_GC.cumsum(dim=1) + pairs_GC

        lost_GC, share = (pairs_GC, self.max_dropped) if self.max_lost_mass is None else (mass_GC, self.max_lost_mass)
        assert share is not None
        # Compared as whole numbers where the share is a decimal: 29 of 100 pairs are within 0.29.
        numerator, denominator = decimal(share).as_integer_ratio()
        before_N, order_N = before_GC.flatten().sort(descending=True, stable=True)
        lost_N = lost_GC.flatten()[order_N].cumsum(dim=0)
        affordable_N = denominator * lost_N <= numerator * lost_N[-1]
        # Groups that are equally full must give way together, or nothing is gained: x is the fullest that cannot.
        fullest = torch.where(affordable_N, -1.0, before_N).max()
        dropped_GC = torch.zeros_like(order_GC, dtype=torch.bool).scatter(1, order_GC, before_GC > fullest)
        return dropped_GC.view(num_groups, self.num_bins, -1).transpose(0, 1).reshape(self.num_bins, -1)
