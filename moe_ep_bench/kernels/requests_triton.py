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
_CHUNK = 64  # tokens
_WARPS = 2 * NUM_WARPS


@triton.jit
def _add_rows(wanted, sums, token, is_there, scores_ptr, bias_ptr, expert, is_expert, COUNT: tl.constexpr,
              BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
              TOP_GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr):  # fmt: skip
    """Count by expert which of a tile's tokens want it, and add the tokens' scores one after the other."""
    row = tl.arange(0, BLOCK)
    if COUNT > 0:
        scores = load_rows(scores_ptr, token, is_there, expert, is_expert, NUM_EXPERTS)
        order = order_rows(
            scores, is_there, bias_ptr, expert, is_expert, COUNT, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P
        )
        wanted += tl.sum(first_of_list(order, COUNT, NUM_EXPERTS).to(tl.int32), 0)
    for one in range(BLOCK):
        is_one = (row == one) & is_there
        at = tl.sum(tl.where(is_one, token, 0), 0) * NUM_EXPERTS + expert
        is_score = is_expert & (tl.sum(is_one.to(tl.int32), 0) > 0)
        sums += tl.load(scores_ptr + at, mask=is_score, other=0.0).to(tl.float64)
    return wanted, sums


@triton.jit
def _store_set(set_ptr, wanted, sums, num_valid, expert, is_expert, BUDGET: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Write what a request's tokens want and the ``BUDGET`` best of the rest; nothing where all are padding."""
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
    tl.store(set_ptr + expert, in_set.to(tl.uint8), mask=is_expert)


@triton.jit(do_not_specialize=["num_tokens"])
def _find_sets(scores_ptr, bias_ptr, valid_ptr, id_ptr, sets_ptr, num_tokens, COUNT: tl.constexpr,
               BUDGET: tl.constexpr, TOKENS_P: tl.constexpr, BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
               TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
               SIZE_P: tl.constexpr):  # fmt: skip
    """A program per token; it works where its token is the first valid one of a request."""
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    row = tl.arange(0, BLOCK)
    here = tl.program_id(0).to(tl.int64)
    every, is_valid = tokens_of_block(here * 0, num_tokens, valid_ptr, TOKENS_P)
    ids = tl.load(id_ptr + every, mask=is_valid, other=0)
    is_mine = is_valid & (ids == tl.load(id_ptr + here))
    nth = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    opens = tl.min(tl.where(is_mine, every, num_tokens), 0) == here
    num_rows = tl.where(opens, tl.sum(is_mine.to(tl.int32), 0), 0)

    wanted = tl.zeros([GROUPS_P * SIZE_P], tl.int32)
    sums = tl.zeros([GROUPS_P * SIZE_P], tl.float64)
    first = num_rows * 0
    while first < num_rows:
        is_row = is_mine[None, :] & (nth[None, :] == (first + row)[:, None])
        token = tl.sum(tl.where(is_row, every[None, :], 0), 1)
        wanted, sums = _add_rows(wanted, sums, token, first + row < num_rows, scores_ptr, bias_ptr, expert, is_expert,
                                 COUNT, BLOCK, NUM_EXPERTS, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P)  # fmt: skip
        first += BLOCK
    _store_set(sets_ptr + here * NUM_EXPERTS, wanted, sums, num_rows, expert, is_expert, BUDGET, NUM_EXPERTS)


@triton.jit
def _add_chunks(scores_ptr, bias_ptr, valid_ptr, order_ptr, begin_ptr, end_ptr, wanted_ptr, sums_ptr, valid_count_ptr,
                CHUNK: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
                TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
                SIZE_P: tl.constexpr):  # fmt: skip
    """A program per place in ``order``; it works where a chunk of a request begins, and writes into that row."""
    here = tl.program_id(0).to(tl.int64)
    end = tl.load(end_ptr + here)
    if (here - tl.load(begin_ptr + here)) % CHUNK == 0:
        expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
        row = tl.arange(0, BLOCK)
        num_rows = tl.minimum(end - here, CHUNK).to(tl.int32)
        num_valid = num_rows * 0
        wanted = tl.zeros([GROUPS_P * SIZE_P], tl.int32)
        sums = tl.zeros([GROUPS_P * SIZE_P], tl.float64)
        first = num_rows * 0
        while first < num_rows:
            is_there = first + row < num_rows
            token = tl.load(order_ptr + here + first + row, mask=is_there, other=0)
            if valid_ptr is not None:
                is_there = is_there & (tl.load(valid_ptr + token, mask=is_there, other=0) != 0)
            num_valid += tl.sum(is_there.to(tl.int32), 0)
            wanted, sums = _add_rows(wanted, sums, token, is_there, scores_ptr, bias_ptr, expert, is_expert, COUNT,
                                     BLOCK, NUM_EXPERTS, TOP_K, GROUPS, TOP_GROUPS, GROUPS_P, SIZE_P)  # fmt: skip
            first += BLOCK
        tl.store(wanted_ptr + here * NUM_EXPERTS + expert, (wanted > 0).to(tl.uint8), mask=is_expert)
        tl.store(sums_ptr + here * NUM_EXPERTS + expert, sums, mask=is_expert)
        tl.store(valid_count_ptr + here, num_valid)


@triton.jit
def _join_chunks(begin_ptr, end_ptr, wanted_ptr, sums_ptr, valid_count_ptr, sets_ptr, CHUNK: tl.constexpr,
                 BUDGET: tl.constexpr, NUM_EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
                 SIZE_P: tl.constexpr):  # fmt: skip
    """A program per place; it works where a request begins, and clears the row elsewhere."""
    expert, is_expert = experts_of_columns(NUM_EXPERTS, GROUPS, GROUPS_P, SIZE_P)
    here = tl.program_id(0).to(tl.int64)
    end = tl.where(tl.load(begin_ptr + here) == here, tl.load(end_ptr + here), here)
    num_valid = tl.zeros([], tl.int32)
    wanted = tl.zeros([GROUPS_P * SIZE_P], tl.int32)
    sums = tl.zeros([GROUPS_P * SIZE_P], tl.float64)
    chunk = here
    while chunk < end:
        num_valid += tl.load(valid_count_ptr + chunk)
        wanted += tl.load(wanted_ptr + chunk * NUM_EXPERTS + expert, mask=is_expert, other=0).to(tl.int32)
        sums += tl.load(sums_ptr + chunk * NUM_EXPERTS + expert, mask=is_expert, other=0.0)
        chunk += CHUNK
    _store_set(sets_ptr + here * NUM_EXPERTS, wanted, sums, num_valid, expert, is_expert, BUDGET, NUM_EXPERTS)


def request_sets(policy: XShare, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
    """What every request opens, in one of its rows: uint8 [T, E]; None in the other scopes."""
    if policy.scope != "request":
        return None
    num_tokens, num_experts = scores_TE.shape
    sets_TE = torch.empty((num_tokens, num_experts), dtype=torch.uint8, device=scores_TE.device)
    if num_tokens == 0:
        return sets_TE
    shape, device = layout(num_experts, context), scores_TE.device
    rows = inputs(scores_TE, context)
    id_T = on_device(context.request_id_T, device, torch.int64)
    counts = {"COUNT": min(policy.k0, num_experts), "BUDGET": min(policy.request_budget or 0, num_experts)}
    block = rows_of_tile(num_tokens, shape)
    if num_tokens <= _MOST_UNSORTED:
        _find_sets[(num_tokens,)](
            *rows, id_T, sets_TE, num_tokens, TOKENS_P=triton.next_power_of_2(num_tokens),
            BLOCK=min(_ROWS_UNSORTED, block), num_warps=_WARPS, **counts, **shape,
        )  # fmt: skip
        return sets_TE
    sorted_T, order_T = id_T.sort(stable=True)
    begin_T, end_T = (torch.searchsorted(sorted_T, sorted_T, right=is_end) for is_end in (False, True))
    wanted_TE = torch.empty_like(sets_TE)
    sums_TE = torch.empty(sets_TE.shape, dtype=torch.float64, device=device)
    num_valid_T = torch.empty(num_tokens, dtype=torch.int32, device=device)
    chunks = (begin_T, end_T, wanted_TE, sums_TE, num_valid_T)
    _add_chunks[(num_tokens,)](
        *rows, order_T, *chunks, CHUNK=_CHUNK, COUNT=counts["COUNT"], BLOCK=block, num_warps=_WARPS, **shape
    )
    columns = {name: shape[name] for name in ("NUM_EXPERTS", "GROUPS", "GROUPS_P", "SIZE_P")}
    _join_chunks[(num_tokens,)](*chunks, sets_TE, CHUNK=_CHUNK, BUDGET=counts["BUDGET"], num_warps=NUM_WARPS, **columns)
    return sets_TE
