"""What each request opens where a batch shares experts by requests (``xshare``, scope ``request``), in Triton.

A request is all tokens of one id, wherever they stand. Its set stands in the row of one of its tokens, so that nobody
has to know how many requests there are. Scores are added in a fixed order, whichever program runs first. In a batch of
few tokens, the program of a request's first token looks through all ids for the others: one launch. More tokens are
sorted by id; a program adds up ``_CHUNK`` of a request's tokens, and a second launch adds these sums in their order, so
that a long request keeps the whole GPU busy.

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

_MOST_UNSORTED = 1024
_ROWS_UNSORTED = 4
_CHUNK = 64  # tokens
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


@triton.jit
def _add_chunks(scores_ptr, bias_ptr, valid_ptr, order_ptr, begin_ptr, end_ptr, wanted_ptr, sums_ptr, valid_count_ptr,
                CHUNK: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """A program per place in ``order``; it works where a chunk of a request begins, and writes into that row."""
    here = tl.program_id(0).to(tl.int64)
    end = tl.load(end_ptr + here)
    if (here - tl.load(begin_ptr + here)) % CHUNK == 0:
        expert, is_expert = tiles.experts_of_columns(LAYOUT)
        row = tl.arange(0, BLOCK)
        num_rows = tl.minimum(end - here, CHUNK).to(tl.int32)
        num_valid = num_rows * 0
        width: tl.constexpr = LAYOUT.width
        wanted = tl.zeros([width], tl.int32)
        sums = tl.zeros([width], tl.float64)
        first = num_rows * 0
        while first < num_rows:
            is_there = first + row < num_rows
            token = tl.load(order_ptr + here + first + row, mask=is_there, other=0)
            if valid_ptr is not None:
                is_there = is_there & (tl.load(valid_ptr + token, mask=is_there, other=0) != 0)
            num_valid += tl.sum(is_there.to(tl.int32), 0)
            wanted, sums = _add_rows(
                wanted, sums, token, is_there, scores_ptr, bias_ptr, expert, is_expert, COUNT, BLOCK, LAYOUT
            )
            first += BLOCK
        tl.store(wanted_ptr + here * LAYOUT.num_experts + expert, (wanted > 0).to(tl.uint8), mask=is_expert)
        tl.store(sums_ptr + here * LAYOUT.num_experts + expert, sums, mask=is_expert)
        tl.store(valid_count_ptr + here, num_valid)


@triton.jit
def _join_chunks(begin_ptr, end_ptr, wanted_ptr, sums_ptr, valid_count_ptr, sets_ptr, CHUNK: tl.constexpr,
                 BUDGET: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """A program per place; it works where a request begins, and clears the row elsewhere."""
    expert, is_expert = tiles.experts_of_columns(LAYOUT)
    here = tl.program_id(0).to(tl.int64)
    end = tl.where(tl.load(begin_ptr + here) == here, tl.load(end_ptr + here), here)
    num_valid = tl.zeros([], tl.int32)
    width: tl.constexpr = LAYOUT.width
    wanted = tl.zeros([width], tl.int32)
    sums = tl.zeros([width], tl.float64)
    chunk = here
    while chunk < end:
        num_valid += tl.load(valid_count_ptr + chunk)
        wanted += tl.load(wanted_ptr + chunk * LAYOUT.num_experts + expert, mask=is_expert, other=0).to(tl.int32)
        sums += tl.load(sums_ptr + chunk * LAYOUT.num_experts + expert, mask=is_expert, other=0.0)
        chunk += CHUNK
    _store_set(sets_ptr + here * LAYOUT.num_experts, wanted, sums, num_valid, expert, is_expert, BUDGET, LAYOUT)


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
    block = layout.rows(num_tokens)
    if num_tokens <= _MOST_UNSORTED:
        _find_sets[(num_tokens,)](
            *rows, id_T, sets_TE, num_tokens, COUNT=count, BUDGET=budget, TOKENS_P=triton.next_power_of_2(num_tokens),
            BLOCK=min(_ROWS_UNSORTED, block), LAYOUT=layout, num_warps=_WARPS,
        )  # fmt: skip
        return sets_TE
    sorted_T, order_T = id_T.sort(stable=True)
    begin_T, end_T = (torch.searchsorted(sorted_T, sorted_T, right=is_end) for is_end in (False, True))
    wanted_TE = torch.empty_like(sets_TE)
    sums_TE = torch.empty(sets_TE.shape, dtype=torch.float64, device=device)
    num_valid_T = torch.empty(num_tokens, dtype=torch.int32, device=device)
    chunks = (begin_T, end_T, wanted_TE, sums_TE, num_valid_T)
    _add_chunks[(num_tokens,)](
        *rows, order_T, *chunks, CHUNK=_CHUNK, COUNT=count, BLOCK=block, LAYOUT=layout, num_warps=_WARPS
    )
    _join_chunks[(num_tokens,)](*chunks, sets_TE, CHUNK=_CHUNK, BUDGET=budget, LAYOUT=layout, num_warps=tiles.NUM_WARPS)
    return sets_TE
