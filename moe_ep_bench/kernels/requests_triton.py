"""What each request opens where a batch shares experts by requests (``xshare``, scope ``request``), in Triton.

A request is all tokens of one id, wherever they stand. A program stands at every token and works only where it is its
request's first: so there is one per request, and nobody has to know how many there are. It marks what any of the
request's tokens wants, adds their scores in the order of the tokens, as the formulation in torch does, and takes the
best of the rest. Few tokens look through all ids to find their request's; more are sorted by id first.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels.rows_triton import first_of_list, order_rows
from moe_ep_bench.kernels.tiles_triton import (
    NUM_WARPS,
    experts_of_columns,
    inputs,
    layout,
    load_rows,
    on_device,
    rows_of_tile,
    tokens_of_block,
)
from moe_ep_bench.policies.contract import RoutingContext
from moe_ep_bench.policies.xshare import XShare

_MOST_UNSORTED = 1024
_ROWS_UNSORTED = 4
_WARPS = 2 * NUM_WARPS


@triton.jit(do_not_specialize=["num_tokens"])
def _find_request_sets(scores_ptr, bias_ptr, valid_ptr, id_ptr, order_ptr, end_ptr, sets_ptr, num_tokens,
                       COUNT: tl.constexpr, BUDGET: tl.constexpr, TOKENS_P: tl.constexpr, BLOCK: tl.constexpr,
                       NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
                       GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr):  # fmt: skip
    """Write the set of each request into one row of ``sets`` [T, E] (bytes), and nothing into the others.

    A program stands at every token; it goes on where it is its request's first, and adds up the request's rows in the
    order of the tokens. With ``order`` tokens lie by request, each run ending before ``end``, padding among them.
    """
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    row = tl.arange(0, BLOCK)
    here = tl.program_id(0).to(tl.int64)
    if order_ptr is None:
        every, is_valid = tokens_of_block(here * 0, num_tokens, valid_ptr, TOKENS_P)
        ids = tl.load(id_ptr + every, mask=is_valid, other=0)
        is_mine = is_valid & (ids == tl.load(id_ptr + here))
        nth = tl.cumsum(is_mine.to(tl.int32), 0) - 1
        opens = tl.min(tl.where(is_mine, every, num_tokens), 0) == here
        num_rows = tl.sum(is_mine.to(tl.int32), 0)
    else:
        before = tl.maximum(here - 1, 0)
        opens = (here == 0) | (tl.load(end_ptr + before) == here)
        num_rows = (tl.load(end_ptr + here) - here).to(tl.int32)
    num_rows = tl.where(opens, num_rows, 0)

    num_valid = num_rows * 0
    wanted = tl.zeros([GROUPS_P * SIZE_P], tl.int32)
    sums = tl.zeros([GROUPS_P * SIZE_P], tl.float64)
    first = num_valid
    while first < num_rows:
        is_there = first + row < num_rows
        if order_ptr is None:
            is_row = is_mine[None, :] & (nth[None, :] == (first + row)[:, None])
            token = tl.sum(tl.where(is_row, every[None, :], 0), 1)
        else:
            token = tl.load(order_ptr + here + first + row, mask=is_there, other=0)
            if valid_ptr is not None:
                is_there = is_there & (tl.load(valid_ptr + token, mask=is_there, other=0) != 0)
        num_valid += tl.sum(is_there.to(tl.int32), 0)
        if COUNT > 0:
            scores = load_rows(scores_ptr, token, is_there, expert, is_expert, NUM_EXPERTS)
            order = order_rows(scores, is_there, bias_ptr, expert, is_expert, COUNT, TOP_K, GROUPS, TOP_GROUPS,
                               GROUPS_P, SIZE_P)  # fmt: skip
            wanted += tl.sum(first_of_list(order, COUNT, NUM_EXPERTS).to(tl.int32), 0)
        for one in range(BLOCK):
            is_one = (row == one) & is_there
            at = tl.sum(tl.where(is_one, token, 0), 0) * NUM_EXPERTS + expert
            is_score = is_expert & (tl.sum(is_one.to(tl.int32), 0) > 0)
            sums += tl.load(scores_ptr + at, mask=is_score, other=0.0).to(tl.float64)
        first += BLOCK

    in_set = wanted > 0
    if BUDGET >= NUM_EXPERTS:
        in_set = is_expert
    else:
        left = is_expert & (wanted == 0)
        num_added = num_valid * 0
        while (num_valid > 0) & (num_added < BUDGET):
            best = tl.max(tl.where(left, sums, -1.0), 0)
            adds = left & (expert == tl.min(tl.where(left & (sums == best), expert, NUM_EXPERTS), 0))
            in_set = in_set | adds
            left = left & (adds == 0)
            num_added += 1
    in_set = in_set & (num_valid > 0)
    tl.store(sets_ptr + here * NUM_EXPERTS + expert, in_set.to(tl.uint8), mask=is_expert)


def request_sets(policy: XShare, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
    """What every request opens, in one of its rows: uint8 [T, E]; None in the other scopes."""
    if policy.scope != "request":
        return None
    num_tokens, num_experts = scores_TE.shape
    sets_TE = torch.empty((num_tokens, num_experts), dtype=torch.uint8, device=scores_TE.device)
    if num_tokens == 0:
        return sets_TE
    shape = layout(num_experts, context)
    id_T = on_device(context.request_id_T, scores_TE.device, torch.int64)
    order_T = end_T = None
    block, tokens = min(_ROWS_UNSORTED, rows_of_tile(num_tokens, shape)), triton.next_power_of_2(num_tokens)
    if num_tokens > _MOST_UNSORTED:
        sorted_T, order_T = id_T.sort(stable=True)
        end_T = torch.searchsorted(sorted_T, sorted_T, right=True)
        block, tokens = rows_of_tile(num_tokens, shape), 1
    _find_request_sets[(num_tokens,)](
        *inputs(scores_TE, context),
        id_T,
        order_T,
        end_T,
        sets_TE,
        num_tokens,
        COUNT=min(policy.k0, num_experts),
        BUDGET=min(policy.request_budget or 0, num_experts),
        TOKENS_P=tokens,
        BLOCK=block,
        num_warps=_WARPS,
        **shape,
    )
    return sets_TE
