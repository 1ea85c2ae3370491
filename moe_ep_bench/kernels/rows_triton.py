"""Policies in which every token chooses by itself, as one Triton kernel: ``topk``, ``pruned``, ``dynamic_skip``.

A program takes a block of tokens, orders each token's experts, marks the first of that list and writes map
and weights in the same pass, so that scores are read once and a routing is written once. The steps of
which it consists also serve the policies that agree on a set of experts first (``sets_triton``).

Sums that decide something are float64. torch adds them from the first column to the last, a tile in a tree;
both are exact, hence equal, while the sum is below 2**29 times the smallest score above 0 that it holds.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels.tiles_triton import (
    NOTHING,
    NUM_WARPS,
    best_per_row,
    empty_routing,
    experts_of_columns,
    inputs,
    inside_top_groups,
    layout,
    list_order,
    load_rows,
    outputs,
    preference,
    preference_order,
    rows_of_tile,
    share,
    store_rows,
    tokens_of_block,
)
from moe_ep_bench.policies.contract import Policy, Routing, RoutingContext
from moe_ep_bench.policies.oea import Pruned
from moe_ep_bench.policies.skipping import DynamicSkip

# --- Steps of a kernel -------------------------------------------------------------------------------------


@triton.jit
def order_rows(scores, is_there, bias_ptr, expert, is_expert, DEEPEST: tl.constexpr, TOP_K: tl.constexpr,
               GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
               SIZE_P: tl.constexpr):  # fmt: skip
    """The order of every token's preference list, read no deeper than ``DEEPEST``; NOTHING in rows of padding."""
    values = preference(scores, bias_ptr, expert, is_expert)
    order = preference_order(values, expert, is_expert)
    if DEEPEST <= TOP_K:  # the list opens with the top-k: what stands behind them is not asked for
        order = inside_top_groups(order, values, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P)
    else:
        order = list_order(order, values, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P)
    return tl.where(is_there[:, None], order, NOTHING)


@triton.jit
def first_of_list(order, COUNT: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Mark each row's ``COUNT`` first: bool [BLOCK, WIDTH]."""
    return order != NOTHING if COUNT >= NUM_EXPERTS else best_per_row(order, COUNT)


@triton.jit
def first_reaching(order, scores, COUNT: tl.constexpr, SHARE: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Mark each row's ``COUNT`` first, but no more than hold ``SHARE`` of the row's sum; 1 cuts nothing.

    See ``steps.Steps.fewest_reaching``.
    """
    if SHARE == 1:
        marks = first_of_list(order, COUNT, NUM_EXPERTS)
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


@triton.jit
def write_routing(map_ptr, weights_ptr, scores, chosen, divided_by, scale, token, is_token, expert, is_expert,
                  NORMALIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr):  # fmt: skip
    """Write a tile's map and weights; ``divided_by`` marks the pairs whose scores sum to 1 (``selection.weighted``)."""
    weights = tl.where(chosen, scores, 0.0)
    if NORMALIZE:
        weights = share(weights, tl.sum(tl.where(divided_by, scores, 0.0), 1)[:, None])
    store_rows(map_ptr, chosen.to(tl.uint8), token, is_token, expert, is_expert, NUM_EXPERTS)
    store_rows(weights_ptr, weights * scale, token, is_token, expert, is_expert, NUM_EXPERTS)


# --- Tokens that choose by themselves ----------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens"])
def _choose(scores_ptr, bias_ptr, valid_ptr, map_ptr, weights_ptr, num_tokens, scale,
            COUNT: tl.constexpr, SHARE: tl.constexpr, BETA: tl.constexpr, NORMALIZE: tl.constexpr,
            BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
            TOP_GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr):  # fmt: skip
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    token, is_there = tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    scores = load_rows(scores_ptr, token, is_there, expert, is_expert, NUM_EXPERTS)
    order = order_rows(
        scores, is_there, bias_ptr, expert, is_expert, COUNT, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P
    )
    chosen = first_reaching(order, scores, COUNT, SHARE, NUM_EXPERTS)
    if BETA is not None:
        best = tl.max(tl.where(chosen, scores, 0.0), 1)[:, None]
        chosen = chosen & (scores.to(tl.float64) >= tl.full([], BETA, tl.float64) * best.to(tl.float64))
    write_routing(map_ptr, weights_ptr, scores, chosen, chosen, scale, token, token < num_tokens, expert, is_expert,
                  NORMALIZE, NUM_EXPERTS)  # fmt: skip


def topk(policy: Policy, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
    """``TopK.select``, as all functions of this module for inputs that were checked before."""
    return _chosen(scores_TE, context, COUNT=context.top_k)


def pruned(policy: Pruned, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
    """``Pruned.select``."""
    return _chosen(scores_TE, context, COUNT=min(policy.k0, scores_TE.shape[1]), SHARE=policy.p)


def dynamic_skip(
    policy: DynamicSkip, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None
) -> Routing:
    """``DynamicSkip.select``."""
    return _chosen(scores_TE, context, COUNT=context.top_k, BETA=policy.beta)


def _chosen(
    scores_TE: Tensor, context: RoutingContext, *, COUNT: int, SHARE: float = 1.0, BETA: float | None = None
) -> Routing:
    num_tokens, num_experts = scores_TE.shape
    routing = empty_routing(scores_TE)
    if num_tokens:
        shape = layout(num_experts, context)
        block = rows_of_tile(num_tokens, shape)
        _choose[(triton.cdiv(num_tokens, block),)](
            *inputs(scores_TE, context),
            *outputs(routing),
            num_tokens,
            context.scale,
            COUNT=COUNT,
            SHARE=SHARE,
            BETA=BETA,
            NORMALIZE=context.normalize,
            BLOCK=block,
            num_warps=NUM_WARPS,
            **shape,
        )
    return routing
