"""Token Drop and Expanded Drop (arXiv 2503.05066, Algorithms 1 and 2) without sorting anything.

The published formulation sorts every expert's column of T scores to find its best C pairs. What is needed is one
number per expert: the priority (``priority_triton``) of the last pair that it keeps. Where all tokens fit one tile, as
in decode, one launch of one program counts for each pair those that stand before it with its expert. Larger batches
find it in five passes:

    _offer    reads the scores, the only pass that does: a token's candidates, each with its priority, into slots
              [N, T], and a histogram of every group's priorities by their leading bits
    _cut      of each group: the bin in which the capacity ends
    _gather   lists that bin's pairs, a few thousand of millions
    _settle   finds among them, digit by digit, the last one that stays
    _write    map and weights, once

No result depends on the order in which programs run: atomics add integers, and where in a list a pair stands does not
matter.

Nothing waits for the host.

Shapes: T = tokens, E = experts, K = top_k, N = slots: a token's candidates, G = groups of experts with one capacity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels import priority_triton as priorities
from moe_ep_bench.kernels import tiles_triton as tiles
from moe_ep_bench.kernels.priority_triton import NO_PAIR, Job
from moe_ep_bench.kernels.tiles_triton import EXPERT_BITS, LAST_EXPERT, NO_KEY, NOTHING, NUM_WARPS
from moe_ep_bench.policies.capacity import CapacityPolicy
from moe_ep_bench.policies.contract import Routing, RoutingContext

# Warps of the one program of a decode step: one for each of 16 tokens, so that a round of top-k is two instructions.
_WARPS = 16
# Pairs of pairs of which a thread of it looks at 512.
_MOST_COMPARED = 2**18


def select(policy: CapacityPolicy, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """The policy's ``select``.

    Args:
        scores_TE: T * E at most ``priority_triton.MOST_PAIRS``, E at most ``tiles_triton.MOST_EXPERTS``.
        stats_SE: None.
    """
    num_tokens = len(scores_TE)
    job, routing = Job.of(policy, scores_TE, context), tiles.empty_routing(scores_TE)
    if num_tokens:
        block = job.layout.rows(num_tokens)
        if num_tokens <= block and job.num_shared == 1 and block * block * job.layout.width <= _MOST_COMPARED:
            _drop[(1,)](
                *job.read, *tiles.outputs(routing), num_tokens, job.first_local, job.index_bits, job.range_bits,
                *job.room, context.scale, **job.offers, **job.writes, BLOCK=block,
                LANES=tiles.lanes_of_row(block, _WARPS), LAYOUT=job.layout, num_warps=_WARPS,
            )  # fmt: skip
        else:
            drop_in_passes(job, routing, block, context.scale)
    return routing


@triton.jit(
    do_not_specialize=[
        "num_tokens", "first_local", "index_bits", "range_bits", "least", "whole", "part", "per", "scale",
    ]
)  # fmt: skip
def _drop(
    scores_ptr, bias_ptr, valid_ptr, modality_ptr, random_ptr, map_ptr, weights_ptr,
    num_tokens, first_local, index_bits, range_bits, least, whole, part, per, scale,
    FAVOURED: tl.constexpr, NUM_MORE: tl.constexpr, NUM_LOCAL: tl.constexpr, METRIC: tl.constexpr,
    NORMALIZE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    NUM_EXPERTS: tl.constexpr = LAYOUT.num_experts
    token, is_valid = tiles.tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    is_token = token < num_tokens
    expert, is_expert = tiles.experts_of_columns(LAYOUT)
    scores = tiles.load_whole_rows(scores_ptr, token, is_token, LANES, LAYOUT)
    values = tiles.preference(scores, bias_ptr, expert, is_expert)
    keys, top_keys = tiles.keys_and_those_in_top_groups(values, expert, is_expert, LAYOUT)
    is_top = tiles.best_keys_per_row(top_keys, expert, LAYOUT.top_k)
    is_pair = is_top
    if NUM_LOCAL > 0:
        is_local = ((expert >= first_local) & (expert < first_local + NUM_LOCAL))[None, :]
        is_pair = is_pair | tiles.best_keys_per_row(tl.where(is_local, keys, NO_KEY), expert, NUM_MORE)
    elif NUM_MORE > 0:
        is_pair = is_pair | tiles.best_keys_per_row(tl.where(is_top, NO_KEY, keys), expert, NUM_MORE)
    is_pair = is_pair & is_valid[:, None]

    at = token[:, None] * NUM_EXPERTS + expert[None, :]
    above = priorities.favour(modality_ptr, token, is_token, range_bits, FAVOURED)[:, None]
    SIGNED: tl.constexpr = bias_ptr is not None
    metric = priorities.metric_of(keys, at, token[:, None], num_tokens, random_ptr, is_pair, METRIC, SIGNED)
    priority = priorities.place(above + metric, token[:, None], expert[None, :], index_bits, NUM_EXPERTS)
    priority = tl.where(is_pair, priority, NO_PAIR)
    # Each thread has an expert, and compares all pairs of it: nothing waits for anything.
    is_before = priority[:, None, :] > priority[None, :, :]
    num_before = tl.sum(is_before.to(tl.int32), 0)
    kept = is_pair & (num_before < priorities.capacity_of(tl.sum(is_valid.to(tl.int32), 0), least, whole, part, per))
    if MOST is not None:
        kept = tiles.best_keys_per_row(tl.where(kept, keys, NO_KEY), expert, MOST)

    weights = tl.where(kept, scores, 0.0)
    if NORMALIZE:
        weights = tiles.share(weights, tl.sum(tl.where(is_top, scores, 0.0), 1)[:, None])
    tiles.store_rows(weights_ptr, weights * scale, token, is_token, expert, is_expert, NUM_EXPERTS)
    tiles.store_rows(map_ptr, kept.to(tl.int8), token, is_token, expert, is_expert, NUM_EXPERTS)


# --- In passes ---------------------------------------------------------------------------------------------

_ABOVE_ALL = tl.constexpr(2**63 - 1)
_MOST_BIN_BITS = 12
_LEAST_BIN_BITS = 6
_LISTED = 1024  # pairs that a program lists at a time
# Pairs that a program looks at at a time, and its warps. Where all scores are equal each expert's pairs are all listed:
# an SM then goes through them once to see in which bits they differ, and once for every eight of these.
_SETTLED, _SETTLING_WARPS = 4096, 16
_DIGIT_BITS = tl.constexpr(8)
_DIGITS = tl.constexpr(256)
# Of ``_write``: slots that a program looks at, tokens at most, and zeros that it writes at a time.
_WRITTEN = 1024
_MOST_ROWS = 128
_FILLED = 2048


def drop_in_passes(job: Job, routing: Routing, block: int, scale: float) -> None:
    """Fill ``routing``, ``block`` tokens of scores a program."""
    scores_TE, bias_E, layout = *job.read[:2], job.layout
    num_tokens, num_experts = routing.map_TE.shape
    num_groups = num_experts // job.num_shared
    num_more, num_local = job.offers["NUM_MORE"], job.offers["NUM_LOCAL"]
    num_slots = layout.top_k + (num_local or num_more)
    bin_bits = min(_MOST_BIN_BITS, job.bits, max(_LEAST_BIN_BITS, num_tokens.bit_length() - 4))
    bin_shift, num_bins = job.bits - bin_bits, 2**bin_bits

    # All that must be zero is one tensor, so that one fill does.
    device = routing.map_TE.device
    zeroed = torch.zeros(num_groups * num_bins + num_groups + 2, dtype=torch.int32, device=device)
    histogram, next_G, num_valid, num_listed = zeroed.split([num_groups * num_bins, num_groups, 1, 1])
    priority_NT = torch.empty([num_slots, num_tokens], dtype=torch.int64, device=device)
    listed = torch.empty(num_slots * num_tokens, dtype=torch.int64, device=device)
    bin_G, room_G, start_G, count_G, threshold_G = torch.empty([5, num_groups], dtype=torch.int64, device=device)

    _offer[(triton.cdiv(num_tokens, block),)](
        *job.read, priority_NT, histogram, num_valid, num_tokens, job.first_local, job.index_bits, job.range_bits,
        bin_shift, **job.offers, LOCAL_P=triton.next_power_of_2(max(1, num_local)), NUM_SHARED=job.num_shared,
        NUM_BINS=num_bins, BLOCK=block, LANES=tiles.lanes_of_row(block), LAYOUT=layout, num_warps=NUM_WARPS,
    )  # fmt: skip
    _cut[(num_groups,)](
        histogram, num_valid if job.room_of_valid else None, num_listed, bin_G, room_G, start_G, count_G, threshold_G,
        *job.room, bin_shift, NUM_BINS=num_bins, num_warps=NUM_WARPS,
    )  # fmt: skip
    _gather[(triton.cdiv(num_slots * num_tokens, _LISTED),)](
        priority_NT, bin_G, start_G, next_G, listed, num_slots * num_tokens, job.index_bits, bin_shift,
        NUM_EXPERTS=num_experts, NUM_SHARED=job.num_shared, BLOCK=_LISTED, num_warps=NUM_WARPS,
    )  # fmt: skip
    _settle[(num_groups,)](
        listed, room_G, start_G, count_G, threshold_G, bin_shift, BLOCK=_SETTLED, num_warps=_SETTLING_WARPS
    )
    slots = triton.next_power_of_2(num_slots)
    block = min(_MOST_ROWS, triton.cdiv(_WRITTEN, slots))
    _write[(triton.cdiv(num_tokens, block),)](
        priority_NT, scores_TE, bias_E, threshold_G, *tiles.outputs(routing), num_tokens, job.index_bits, scale,
        TELLS_SCORE=job.tells_score, NUM_SLOTS=num_slots, SLOTS_P=slots, NUM_SHARED=job.num_shared, **job.writes,
        NUM_EXPERTS=num_experts, TOP_K=layout.top_k, BLOCK=block, FILLED=_FILLED, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _slot_at(slot, token, num_tokens):
    """Offset of a token's slot in slots [N, T]; in 64 bits, as tokens are."""
    return (slot + token * 0) * num_tokens + token


@triton.jit(do_not_specialize=["first_local", "index_bits", "range_bits", "bin_shift"])
def _offer(
    scores_ptr, bias_ptr, valid_ptr, modality_ptr, random_ptr, priority_ptr, histogram_ptr, num_valid_ptr,
    num_tokens, first_local, index_bits, range_bits, bin_shift,
    METRIC: tl.constexpr, FAVOURED: tl.constexpr, NUM_MORE: tl.constexpr, NUM_LOCAL: tl.constexpr,
    LOCAL_P: tl.constexpr, NUM_SHARED: tl.constexpr, NUM_BINS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    NUM_EXPERTS: tl.constexpr = LAYOUT.num_experts
    TOP_K: tl.constexpr = LAYOUT.top_k
    token, is_valid = tiles.tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    is_token = token < num_tokens
    expert_W, is_expert_W = tiles.experts_of_columns(LAYOUT)
    SIGNED: tl.constexpr = bias_ptr is not None
    if valid_ptr is not None:
        tl.atomic_add(num_valid_ptr, tl.sum(is_valid.to(tl.int32), 0), sem="relaxed")
    above = priorities.favour(modality_ptr, token, is_token, range_bits, FAVOURED)

    scores = tiles.load_whole_rows(scores_ptr, token, is_token, LANES, LAYOUT)
    values = tiles.preference(scores, bias_ptr, expert_W, is_expert_W)
    keys, left = tiles.keys_and_those_in_top_groups(values, expert_W, is_expert_W, LAYOUT)
    local_L = tl.arange(0, LOCAL_P)
    is_local_L = local_L < NUM_LOCAL
    was_offered = tl.zeros([BLOCK, LOCAL_P], tl.int1)  # of the local experts: they are in the top-k
    for slot in range(TOP_K):
        key, expert = tiles.best_key(left, expert_W)
        _offer_one(
            slot, key, expert, token, is_token, is_valid, above, random_ptr, priority_ptr, histogram_ptr, num_tokens,
            index_bits, bin_shift, METRIC, SIGNED, NUM_SHARED, NUM_BINS, NUM_EXPERTS,
        )  # fmt: skip
        is_best = expert_W[None, :] == expert[:, None]
        left = tl.where(is_best, NO_KEY, left)
        if NUM_LOCAL > 0:
            was_offered = was_offered | ((first_local + local_L)[None, :] == expert[:, None])
        elif NUM_MORE > 0:
            keys = tl.where(is_best, NO_KEY, keys)

    if NUM_LOCAL > 0:
        # Every local expert has a slot, empty where the token does not offer it a pair, or did so before: in the top-k.
        local = first_local + local_L
        values = tiles.load_rows(scores_ptr, token, is_token, local, is_local_L, NUM_EXPERTS)
        values = tiles.preference(values, bias_ptr, local, is_local_L)
        is_pair = is_local_L[None, :] & is_valid[:, None] & (was_offered == 0)
        if NUM_MORE < NUM_LOCAL:
            is_pair = is_pair & tiles.best_per_row(tiles.preference_order(values, local, is_local_L), NUM_MORE)
        at = token[:, None] * NUM_EXPERTS + local[None, :]
        local_keys = tiles.order_key(values)
        metric = priorities.metric_of(local_keys, at, token[:, None], num_tokens, random_ptr, is_pair, METRIC, SIGNED)
        priority = priorities.place(above[:, None] + metric, token[:, None], local[None, :], index_bits, NUM_EXPERTS)
        to = _slot_at((TOP_K + local_L)[None, :], token[:, None], num_tokens)
        is_slot = is_local_L[None, :] & is_token[:, None]
        tl.store(priority_ptr + to, tl.where(is_pair, priority, NO_PAIR), mask=is_slot)
        bucket = (local // NUM_SHARED)[None, :] * NUM_BINS + (priority >> bin_shift).to(tl.int32)
        tl.atomic_add(histogram_ptr + bucket, 1, mask=is_pair, sem="relaxed")
    elif NUM_MORE > 0:
        for slot in range(TOP_K, TOP_K + NUM_MORE):
            key, expert = tiles.best_key(keys, expert_W)
            _offer_one(
                slot, key, expert, token, is_token, is_valid, above, random_ptr, priority_ptr, histogram_ptr,
                num_tokens, index_bits, bin_shift, METRIC, SIGNED, NUM_SHARED, NUM_BINS, NUM_EXPERTS,
            )  # fmt: skip
            keys = tl.where(expert_W[None, :] == expert[:, None], NO_KEY, keys)


@triton.jit
def _offer_one(
    slot, key, expert, token, is_token, is_valid, above, random_ptr, priority_ptr, histogram_ptr, num_tokens,
    index_bits, bin_shift, METRIC: tl.constexpr, SIGNED: tl.constexpr,
    NUM_SHARED: tl.constexpr, NUM_BINS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
):  # fmt: skip
    """Put one candidate of every token into its slot, and count its priority."""
    at = token * NUM_EXPERTS + expert
    metric = priorities.metric_of(key, at, token, num_tokens, random_ptr, is_valid, METRIC, SIGNED)
    priority = priorities.place(above + metric, token, expert, index_bits, NUM_EXPERTS)
    to = _slot_at(slot, token, num_tokens)
    tl.store(priority_ptr + to, tl.where(is_valid, priority, NO_PAIR), mask=is_token)
    bucket = expert // NUM_SHARED * NUM_BINS + (priority >> bin_shift).to(tl.int32)
    tl.atomic_add(histogram_ptr + bucket, 1, mask=is_valid, sem="relaxed")


@triton.jit(do_not_specialize=["least", "whole", "part", "per", "bin_shift"])
def _cut(
    histogram_ptr, num_valid_ptr, num_listed_ptr, bin_ptr, room_ptr, start_ptr, count_ptr, threshold_ptr,
    least, whole, part, per, bin_shift, NUM_BINS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    bins = tl.arange(0, NUM_BINS)
    count = tl.load(histogram_ptr + group * NUM_BINS + bins)
    capacity = least.to(tl.int64)
    if num_valid_ptr is not None:
        capacity = priorities.capacity_of(tl.load(num_valid_ptr), least, whole, part, per)
    reaching = tl.cumsum(count, 0, reverse=True)  # pairs in a bin and in those above it
    is_cut = (reaching >= capacity) & (reaching - count < capacity)
    above = tl.sum(tl.where(is_cut, reaching - count, 0), 0)
    inside = tl.sum(tl.where(is_cut, count, 0), 0)
    cut = tl.sum(tl.where(is_cut, bins, 0), 0).to(tl.int64)
    room = capacity - above
    overfull = tl.sum(count, 0) > capacity
    # A bin that stays whole needs no second look.
    num_listed = tl.where(overfull & (capacity > 0) & (room < inside), inside, 0)
    threshold = tl.where(overfull, tl.where(capacity > 0, cut << bin_shift, _ABOVE_ALL), 0)
    tl.store(bin_ptr + group, tl.where(num_listed > 0, cut, -1))
    tl.store(room_ptr + group, room)
    tl.store(start_ptr + group, tl.atomic_add(num_listed_ptr, num_listed).to(tl.int64))
    tl.store(count_ptr + group, num_listed.to(tl.int64))
    tl.store(threshold_ptr + group, threshold)


@triton.jit(do_not_specialize=["index_bits", "bin_shift"])
def _gather(
    priority_ptr, bin_ptr, start_ptr, next_ptr, listed_ptr, num_priorities, index_bits, bin_shift,
    NUM_EXPERTS: tl.constexpr, NUM_SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    priority = tl.load(priority_ptr + at, mask=at < num_priorities, other=NO_PAIR)
    is_pair = priority != NO_PAIR
    group = priorities.expert_at(priority, index_bits, NUM_EXPERTS) // NUM_SHARED
    is_listed = is_pair & ((priority >> bin_shift) == tl.load(bin_ptr + group, mask=is_pair, other=-1))
    start = tl.load(start_ptr + group, mask=is_listed, other=0)
    num_listed = tl.sum(is_listed.to(tl.int32), 0)
    first = tl.min(tl.where(is_listed, group, NUM_EXPERTS), 0)
    if (num_listed > 1) & (tl.max(tl.where(is_listed, group, -1), 0) == first):
        # As where scores are equal: a thousand additions to one word would wait for each other.
        nth = tl.atomic_add(next_ptr + first, num_listed, sem="relaxed") + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(listed_ptr + start + nth, priority, mask=is_listed)
    else:
        nth = tl.atomic_add(next_ptr + group, 1, mask=is_listed, sem="relaxed")
        tl.store(listed_ptr + start + nth, priority, mask=is_listed)


@triton.jit(do_not_specialize=["bin_shift"])
def _settle(
    listed_ptr, room_ptr, start_ptr, count_ptr, threshold_ptr, bin_shift, BLOCK: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0)
    num_listed = tl.load(count_ptr + group).to(tl.int32)
    if num_listed > 0:
        listed_ptr += tl.load(start_ptr + group)
        digits = tl.arange(0, _DIGITS)
        lowest = tl.full([], _ABOVE_ALL, tl.int64)
        highest = lowest * 0
        first = num_listed * 0
        while first < num_listed:
            at = first + tl.arange(0, BLOCK)
            priority = tl.load(listed_ptr + at, mask=at < num_listed, other=0)
            lowest = tl.minimum(lowest, tl.min(tl.where(at < num_listed, priority, _ABOVE_ALL), 0))
            highest = tl.maximum(highest, tl.max(priority, 0))
            first += BLOCK
        # Digits in which no two differ need no look.
        low = bin_shift.to(tl.int32)
        next_low = tl.maximum(low - _DIGIT_BITS, 0)
        while (next_low < low) & ((lowest >> next_low) == (highest >> next_low)):
            low = next_low
            next_low = tl.maximum(low - _DIGIT_BITS, 0)
        leading = lowest >> low  # the threshold's bits above ``low``
        room = tl.load(room_ptr + group).to(tl.int32)
        inside = num_listed
        while (low > 0) & (room < inside):
            width = tl.minimum(low, _DIGIT_BITS)
            count = tl.zeros([_DIGITS], tl.int32)
            first = num_listed * 0
            while first < num_listed:
                at = first + tl.arange(0, BLOCK)
                priority = tl.load(listed_ptr + at, mask=at < num_listed, other=NO_PAIR)
                is_inside = (priority >> low) == leading
                digit = (priority >> (low - width)).to(tl.int32) & ((1 << width) - 1)
                count += tl.histogram(digit, _DIGITS, mask=is_inside)
                first += BLOCK
            reaching = tl.cumsum(count, 0, reverse=True)
            is_cut = (reaching >= room) & (reaching - count < room)
            leading = (leading << width) | tl.sum(tl.where(is_cut, digits, 0), 0)
            room -= tl.sum(tl.where(is_cut, reaching - count, 0), 0)
            inside = tl.sum(tl.where(is_cut, count, 0), 0)
            low -= width
        tl.store(threshold_ptr + group, leading << low)


@triton.jit(do_not_specialize=["num_tokens", "index_bits", "scale"])
def _write(
    priority_ptr, scores_ptr, bias_ptr, threshold_ptr, map_ptr, weights_ptr, num_tokens, index_bits, scale,
    TELLS_SCORE: tl.constexpr, NUM_SLOTS: tl.constexpr, SLOTS_P: tl.constexpr, NUM_SHARED: tl.constexpr,
    NORMALIZE: tl.constexpr, MOST: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr,
):  # fmt: skip
    """Zeros first, all in a row, and over them the few pairs that are kept."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    slot = tl.arange(0, SLOTS_P)[:, None]
    row = tl.arange(0, BLOCK)[None, :]
    is_slot = (slot < NUM_SLOTS) & (begin + row < num_tokens)
    priority = tl.load(priority_ptr + _slot_at(slot, begin + row, num_tokens), mask=is_slot, other=NO_PAIR)

    scores_ptr += begin * NUM_EXPERTS
    map_ptr += begin * NUM_EXPERTS
    weights_ptr += begin * NUM_EXPERTS
    num_scores = tl.minimum(num_tokens - begin, BLOCK).to(tl.int32) * NUM_EXPERTS
    for first in range(0, BLOCK * NUM_EXPERTS, FILLED):
        at = first + tl.arange(0, FILLED)
        tl.store(weights_ptr + at, tl.zeros([FILLED], tl.float32), mask=at < num_scores)
        tl.store(map_ptr + at, tl.zeros([FILLED], tl.uint8), mask=at < num_scores)

    is_pair = priority != NO_PAIR
    expert = priorities.expert_at(priority, index_bits, NUM_EXPERTS)
    at = row * NUM_EXPERTS + expert
    kept = priority >= tl.load(threshold_ptr + expert // NUM_SHARED, mask=is_pair, other=_ABOVE_ALL)
    if TELLS_SCORE:
        score = ((priority >> index_bits) & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        score = tl.load(scores_ptr + at, mask=is_pair, other=0.0)
    if MOST is not None:
        # Only a token's best MOST of what its experts keep.
        values = score
        if bias_ptr is not None:
            values += tl.load(bias_ptr + expert, mask=is_pair, other=0.0)
        order = (tiles.order_key(values).to(tl.int64) << EXPERT_BITS) + (expert ^ LAST_EXPERT)
        kept = tl.trans(tiles.best_per_row(tl.trans(tl.where(kept, order, NOTHING)), MOST))
    weight = score
    if NORMALIZE:
        weight = tiles.share(score, tl.sum(tl.where(is_pair & (slot < TOP_K), score, 0.0), 0)[None, :])
    tl.debug_barrier()  # other threads filled what this one writes to
    tl.store(weights_ptr + at, weight * scale, mask=kept)
    tl.store(map_ptr + at, tl.full(at.shape, 1, tl.uint8), mask=kept)
