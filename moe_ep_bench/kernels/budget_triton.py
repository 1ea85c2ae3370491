"""``budget_drop`` in Triton: one kernel counts scores by cell, one writes what the cells leave.

Between them every rank decides in torch which cells go (``BudgetDrop.dropped_cells``), on tensors of cells: the sum
over ranks stands there anyway. Counts and sums of rounded scores are exact, so atomics in any order give the same bits.

Shapes: T = tokens, E = experts, S = 2 x bins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels.rows_triton import first_of_list, order_rows, write_routing
from moe_ep_bench.kernels.tiles_triton import (
    NUM_WARPS,
    as_bytes,
    empty_routing,
    experts_of_columns,
    inputs,
    layout,
    load_rows,
    outputs,
    rows_of_tile,
    tokens_of_block,
)
from moe_ep_bench.policies.budget_drop import BudgetDrop
from moe_ep_bench.policies.contract import Routing, RoutingContext
from moe_ep_bench.policies.steps import bin_shift

_ONE = tl.constexpr(127 << 23)  # the bits of 1.0
_UNITS = tl.constexpr(2.0**32)  # of a score of 1, to whose multiples scores are rounded
_WHOLE = tl.constexpr(2.0**52)  # from here on every float64 is whole


@triton.jit
def _cells(scores, expert, NUM_BINS: tl.constexpr, SHIFT: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Each pair's cell: bin * E + expert (``steps.score_bins``)."""
    place = ((scores.to(tl.int32, bitcast=True).to(tl.int64) - _ONE) >> SHIFT) + NUM_BINS
    place = tl.minimum(tl.maximum(place, 0), NUM_BINS - 1)
    return place * NUM_EXPERTS + expert[None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def _count(scores_ptr, bias_ptr, valid_ptr, stats_ptr, num_tokens, NUM_BINS: tl.constexpr, SHIFT: tl.constexpr,
           BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
           TOP_GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr):  # fmt: skip
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    token, is_there = tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    scores = load_rows(scores_ptr, token, is_there, expert, is_expert, NUM_EXPERTS)
    order = order_rows(
        scores, is_there, bias_ptr, expert, is_expert, TOP_K, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P
    )
    chosen = first_of_list(order, TOP_K, NUM_EXPERTS)
    cell = _cells(scores, expert, NUM_BINS, SHIFT, NUM_EXPERTS)
    units = scores.to(tl.float64) * tl.full([], _UNITS, tl.float64)
    whole = tl.full([], _WHOLE, tl.float64)
    units = tl.where(units < whole, (units + whole) - whole, units)  # rounds to even, as torch does
    tl.atomic_add(stats_ptr + cell, tl.full(cell.shape, 1.0, tl.float64), mask=chosen, sem="relaxed")
    mass_ptr = stats_ptr + NUM_BINS * NUM_EXPERTS
    tl.atomic_add(mass_ptr + cell, units / tl.full([], _UNITS, tl.float64), mask=chosen, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens"])
def _keep(scores_ptr, bias_ptr, valid_ptr, dropped_ptr, map_ptr, weights_ptr, num_tokens, scale,
          NUM_BINS: tl.constexpr, SHIFT: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
          NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
          GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr):  # fmt: skip
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    token, is_there = tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    scores = load_rows(scores_ptr, token, is_there, expert, is_expert, NUM_EXPERTS)
    order = order_rows(
        scores, is_there, bias_ptr, expert, is_expert, TOP_K, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P
    )
    chosen = first_of_list(order, TOP_K, NUM_EXPERTS)
    cell = _cells(scores, expert, NUM_BINS, SHIFT, NUM_EXPERTS)
    kept = chosen & (tl.load(dropped_ptr + cell, mask=chosen, other=0) == 0)
    write_routing(map_ptr, weights_ptr, scores, kept, chosen, scale, token, token < num_tokens, expert, is_expert,
                  NORMALIZE, NUM_EXPERTS)  # fmt: skip


def budget_drop(
    policy: BudgetDrop, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None
) -> Routing:
    """``BudgetDrop.select``, as ``budget_drop_stats`` for inputs that were checked before."""
    num_tokens, num_experts = scores_TE.shape
    routing = empty_routing(scores_TE)
    if num_tokens:
        stats_SE = budget_drop_stats(policy, scores_TE, context) if stats_SE is None else stats_SE
        dropped_SE = as_bytes(policy.dropped_cells(stats_SE, context.num_ranks))
        shape = layout(num_experts, context)
        block = rows_of_tile(num_tokens, shape)
        _keep[(triton.cdiv(num_tokens, block),)](
            *inputs(scores_TE, context),
            dropped_SE,
            *outputs(routing),
            num_tokens,
            context.scale,
            NUM_BINS=policy.num_bins,
            SHIFT=bin_shift(policy.bins_per_octave),
            NORMALIZE=context.normalize,
            BLOCK=block,
            num_warps=NUM_WARPS,
            **shape,
        )
    return routing


def budget_drop_stats(policy: BudgetDrop, scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """``BudgetDrop.stats``."""
    num_tokens, num_experts = scores_TE.shape
    stats_SE = torch.zeros(2 * policy.num_bins, num_experts, dtype=torch.float64, device=scores_TE.device)
    if num_tokens:
        shape = layout(num_experts, context)
        block = rows_of_tile(num_tokens, shape)
        _count[(triton.cdiv(num_tokens, block),)](
            *inputs(scores_TE, context),
            stats_SE,
            num_tokens,
            NUM_BINS=policy.num_bins,
            SHIFT=bin_shift(policy.bins_per_octave),
            BLOCK=block,
            num_warps=NUM_WARPS,
            **shape,
        )
    return stats_SE
