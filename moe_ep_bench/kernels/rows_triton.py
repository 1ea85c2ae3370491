"""Policies in which every token chooses by itself, as one Triton kernel: ``topk``, ``pruned``, ``dynamic_skip``.

A program takes a block of tokens, orders each token's experts, marks the first of that list and writes map
and weights in the same pass, so that scores are read once and a routing is written once.

Sums that decide something are float64. torch adds them from the first column to the last, a tile in a tree;
both are exact, hence equal, while the sum is below 2**29 times the smallest score above 0 that it holds.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels import tiles_triton as tiles
from moe_ep_bench.kernels.tiles_triton import NOTHING
from moe_ep_bench.policies.contract import Routing, RoutingContext
from moe_ep_bench.policies.oea import Pruned
from moe_ep_bench.policies.selection import TopK
from moe_ep_bench.policies.skipping import DynamicSkip


@triton.jit
def first_reaching(order, scores, COUNT: tl.constexpr, SHARE: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Mark each row's ``COUNT`` first, but no more than hold ``SHARE`` of the row's sum; 1 cuts nothing.

    See ``steps.Steps.fewest_reaching``.
    """
    if SHARE == 1:
        marks = tiles.first_of_list(order, COUNT, NUM_EXPERTS)
    else:
        # Not the bare SHARE: Triton may take a Python float for float32.
        enough = tl.full([], SHARE, tl.float64)
        total = tl.sum(scores.to(tl.float64), 1)[:, None]
        divisor = tl.where(total > 0, total, 1.0)
        held = total - total
        is_short = held == held
        marks = order != order
        num_rounds = 0
        while (num_rounds < COUNT) & (tl.max(is_short.to(tl.int32)) > 0):
            best = tl.max(order, 1)[:, None]
            is_next = (order == best) & (order != NOTHING) & is_short
            marks = marks | is_next
            order = tl.where(is_next, NOTHING, order)
            held += tl.sum(tl.where(is_next, scores, 0.0), 1)[:, None].to(tl.float64)  # of one score a row
            is_short = (best != NOTHING) & (held / divisor < enough)
            num_rounds += 1
    return marks


@triton.jit(do_not_specialize=["num_tokens"])
def _choose(scores_ptr, bias_ptr, valid_ptr, map_ptr, weights_ptr, num_tokens, scale, COUNT: tl.constexpr,
            SHARE: tl.constexpr, BETA: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
            LAYOUT: tl.constexpr):  # fmt: skip
    token, expert, is_expert, scores, order = tiles.ordered_block(
        scores_ptr, bias_ptr, valid_ptr, num_tokens, COUNT, BLOCK, LAYOUT
    )
    chosen = first_reaching(order, scores, COUNT, SHARE, LAYOUT.num_experts)
    if BETA is not None:
        best = tl.max(tl.where(chosen, scores, 0.0), 1)[:, None]
        chosen = chosen & (scores.to(tl.float64) >= tl.full([], BETA, tl.float64) * best.to(tl.float64))
    tiles.write_routing(map_ptr, weights_ptr, scores, chosen, chosen, scale, token, token < num_tokens, expert,
                        is_expert, NORMALIZE, LAYOUT.num_experts)  # fmt: skip


def select(
    policy: TopK | Pruned | DynamicSkip, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None
) -> Routing:
    """The policy's ``select``; ``stats_SE`` is None."""
    routing = tiles.empty_routing(scores_TE)
    if len(scores_TE):
        grid, block = tiles.blocks_of(scores_TE, context)
        _choose[grid](
            *tiles.inputs(scores_TE, context), *tiles.outputs(routing), len(scores_TE), context.scale,
            COUNT=min(policy.k0, scores_TE.shape[1]) if isinstance(policy, Pruned) else context.top_k,
            SHARE=policy.p if isinstance(policy, Pruned) else 1.0,
            BETA=policy.beta if isinstance(policy, DynamicSkip) else None,
            NORMALIZE=context.normalize, num_warps=tiles.NUM_WARPS, **block,
        )  # fmt: skip
    return routing
