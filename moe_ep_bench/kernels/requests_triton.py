"""What each request opens where a batch shares experts by requests (``xshare``, scope ``request``), in Triton.

A request is all tokens of one id, wherever they stand. Its set stands in the row of one of its tokens, so that nobody
has to know how many requests there are. The program of a request's first token looks through all ids for the others,
and adds their scores in order, in one launch. That is for decode steps: larger batches are torch's.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels import tiles_triton as tiles
from moe_ep_bench.policies.contract import RoutingContext
from moe_ep_bench.policies.xshare import XShare

MOST_TOKENS = 1024
_MOST_ROWS = 4
_WARPS = 2 * tiles.NUM_WARPS


@triton.jit
def _add_rows(wanted, sums, token, is_there, scores_ptr, bias_ptr, expert, is_expert, COUNT: tl.constexpr,
              BLOCK: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """Count by expert which of a tile's tokens want it, and add the tokens' scores one after the other."""
    row = tl.arange(0, BLOCK)
    if COUNT > 0:
        scores = tiles.load_rows(scores_ptr, token, is_there, expert, is_expert, LAYOUT.num_experts)
        order = tiles.order_rows(scores, is_there, bias_ptr, expert, is_expert, COUNT, LAYOUT)
        wanted += tl.sum(tiles.first_of_list(order, COUNT, LAYOUT.num_experts).to(tl.int32), 0)
    for place in range(BLOCK):
        is_one = (row == place) & is_there
        at = tl.sum(tl.where(is_one, token, 0), 0) * LAYOUT.num_experts + expert
        is_score = is_expert & (tl.sum(is_one.to(tl.int32), 0) > 0)
        sums += tl.load(scores_ptr + at, mask=is_score, other=0.0).to(tl.float64)
    return wanted, sums


@triton.jit
def _store_set(set_ptr, wanted, sums, num_valid, expert, is_expert, BUDGET: tl.constexpr, LAYOUT: tl.constexpr):
    """Write what a request's tokens want and the ``BUDGET`` best of the rest; nothing where all are padding."""
    in_set = wanted > 0
    if LAYOUT.num_experts <= BUDGET:
        in_set = is_expert
    else:
        left = is_expert & (wanted == 0)
        num_added = num_valid * 0
        while (num_valid > 0) & (num_added < BUDGET):
            best = tl.max(tl.where(left, sums, -1.0), 0)
            adds = left & (expert == tl.min(tl.where(left & (sums == best), expert, LAYOUT.num_experts), 0))
            in_set = in_set | adds
            left = left & (adds == 0)
            num_added += 1
    in_set = in_set & (num_valid > 0)
    tl.store(set_ptr + expert, in_set.to(tl.uint8), mask=is_expert)


@triton.jit(do_not_specialize=["num_tokens"])
def _find_sets(scores_ptr, bias_ptr, valid_ptr, id_ptr, sets_ptr, num_tokens, COUNT: tl.constexpr,
               BUDGET: tl.constexpr, TOKENS_P: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """A program per token; it works where its token is the first valid one of a request."""
    expert, is_expert = tiles.experts_of_columns(LAYOUT)
    row = tl.arange(0, BLOCK)
    here = tl.program_id(0).to(tl.int64)
    every, is_valid = tiles.tokens_of_block(here * 0, num_tokens, valid_ptr, TOKENS_P)
    ids = tl.load(id_ptr + every, mask=is_valid, other=0)
    is_mine = is_valid & (ids == tl.load(id_ptr + here))
    nth = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    opens = tl.min(tl.where(is_mine, every, num_tokens), 0) == here
    num_rows = tl.where(opens, tl.sum(is_mine.to(tl.int32), 0), 0)

    width: tl.constexpr = LAYOUT.width
    wanted = tl.zeros([width], tl.int32)
    sums = tl.zeros([width], tl.float64)
    first = num_rows * 0
    while first < num_rows:
        is_row = is_mine[None, :] & (nth[None, :] == (first + row)[:, None])
        token = tl.sum(tl.where(is_row, every[None, :], 0), 1)
        is_there = first + row < num_rows
        wanted, sums = _add_rows(
            wanted, sums, token, is_there, scores_ptr, bias_ptr, expert, is_expert, COUNT, BLOCK, LAYOUT
        )
        first += BLOCK
    _store_set(sets_ptr + here * LAYOUT.num_experts, wanted, sums, num_rows, expert, is_expert, BUDGET, LAYOUT)


def request_sets(policy: XShare, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
    """What every request opens, in one of its rows: uint8 [T, E]; None in the other scopes."""
    if policy.scope != "request":
        return None
    num_tokens, num_experts = scores_TE.shape
    sets_TE = torch.empty((num_tokens, num_experts), dtype=torch.uint8, device=scores_TE.device)
    if num_tokens == 0:
        return sets_TE
    layout, device = tiles.Layout.of(num_experts, context), scores_TE.device
    rows = tiles.inputs(scores_TE, context)
    id_T = tiles.on_device(context.request_id_T, device, torch.int64)
    count, budget = min(policy.k0, num_experts), min(policy.request_budget or 0, num_experts)
    _find_sets[(num_tokens,)](
        *rows, id_T, sets_TE, num_tokens, COUNT=count, BUDGET=budget, TOKENS_P=triton.next_power_of_2(num_tokens),
        BLOCK=min(_MOST_ROWS, layout.rows(num_tokens)), LAYOUT=layout, num_warps=_WARPS,
    )  # fmt: skip
    return sets_TE
