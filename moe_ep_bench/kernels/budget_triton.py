"""``budget_drop`` in Triton: one kernel counts scores by cell, one writes what the cells leave.

Between them every rank decides in torch which cells go (``BudgetDrop.dropped_cells``), on tensors of cells: the sum
over ranks stands there anyway. Counts and sums of rounded scores are exact, so atomics in any order give the same bits.

Shapes: T = tokens, E = experts, S = 2 x bins.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels import tiles_triton as tiles
from moe_ep_bench.policies.capacity import BudgetDrop
from moe_ep_bench.policies.contract import Routing, RoutingContext
from moe_ep_bench.policies.steps import BIN_SHIFT, NUM_BINS, SCORE_UNIT

_ONE = tl.constexpr(127 << 23)  # the bits of 1.0
_UNITS = tl.constexpr(1 / SCORE_UNIT)  # of a score of 1, to whose multiples scores are rounded
_WHOLE = tl.constexpr(2.0**52)  # from here on every float64 is whole
_BINS: dict[str, Any] = {"NUM_BINS": NUM_BINS, "SHIFT": BIN_SHIFT, "num_warps": tiles.NUM_WARPS}  # of each launch


@triton.jit
def _cells(scores, expert, NUM_BINS: tl.constexpr, SHIFT: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Each pair's cell: bin * E + expert (``steps.score_bins``)."""
    place = ((scores.to(tl.int32, bitcast=True).to(tl.int64) - _ONE) >> SHIFT) + NUM_BINS
    place = tl.minimum(tl.maximum(place, 0), NUM_BINS - 1)
    return place * NUM_EXPERTS + expert[None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def _count(scores_ptr, bias_ptr, valid_ptr, stats_ptr, num_tokens, NUM_BINS: tl.constexpr, SHIFT: tl.constexpr,
           BLOCK: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    _, expert, _, scores, order = tiles.ordered_block(
        scores_ptr, bias_ptr, valid_ptr, num_tokens, LAYOUT.top_k, BLOCK, LAYOUT
    )
    chosen = tiles.first_of_list(order, LAYOUT.top_k, LAYOUT.num_experts)
    cell = _cells(scores, expert, NUM_BINS, SHIFT, LAYOUT.num_experts)
    units = scores.to(tl.float64) * tl.full([], _UNITS, tl.float64)
    whole = tl.full([], _WHOLE, tl.float64)
    units = tl.where(units < whole, (units + whole) - whole, units)  # rounds to even, as torch does
    tl.atomic_add(stats_ptr + cell, tl.full(cell.shape, 1.0, tl.float64), mask=chosen, sem="relaxed")
    mass_ptr = stats_ptr + NUM_BINS * LAYOUT.num_experts
    tl.atomic_add(mass_ptr + cell, units / tl.full([], _UNITS, tl.float64), mask=chosen, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens"])
def _keep(scores_ptr, bias_ptr, valid_ptr, dropped_ptr, map_ptr, weights_ptr, num_tokens, scale,
          NUM_BINS: tl.constexpr, SHIFT: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
          LAYOUT: tl.constexpr):  # fmt: skip
    token, expert, is_expert, scores, order = tiles.ordered_block(
        scores_ptr, bias_ptr, valid_ptr, num_tokens, LAYOUT.top_k, BLOCK, LAYOUT
    )
    chosen = tiles.first_of_list(order, LAYOUT.top_k, LAYOUT.num_experts)
    cell = _cells(scores, expert, NUM_BINS, SHIFT, LAYOUT.num_experts)
    kept = chosen & (tl.load(dropped_ptr + cell, mask=chosen, other=0) == 0)
    tiles.write_routing(map_ptr, weights_ptr, scores, kept, chosen, scale, token, token < num_tokens, expert, is_expert,
                        NORMALIZE, LAYOUT.num_experts)  # fmt: skip


def select(policy: BudgetDrop, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """``BudgetDrop.select``."""
    routing = tiles.empty_routing(scores_TE)
    if len(scores_TE):
        stats_SE = stats(policy, scores_TE, context) if stats_SE is None else stats_SE
        dropped_SE = tiles.as_bytes(policy.dropped_cells(stats_SE, context.num_ranks))
        grid, block = tiles.blocks_of(scores_TE, context)
        _keep[grid](
            *tiles.inputs(scores_TE, context), dropped_SE, *tiles.outputs(routing), len(scores_TE), context.scale,
            NORMALIZE=context.normalize, **_BINS, **block,
        )  # fmt: skip
    return routing


def stats(policy: BudgetDrop, scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """``BudgetDrop.stats``."""
    num_tokens, num_experts = scores_TE.shape
    stats_SE = torch.zeros(2 * NUM_BINS, num_experts, dtype=torch.float64, device=scores_TE.device)
    if num_tokens:
        grid, block = tiles.blocks_of(scores_TE, context)
        _count[grid](*tiles.inputs(scores_TE, context), stats_SE, num_tokens, **_BINS, **block)
    return stats_SE
