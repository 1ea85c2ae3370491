"""``laser`` and ``load_only`` on a GPU: what is parallel in parallel, the rest one token after another in one warp.

A token's pool and the order of its preference list depend on nothing but its own scores. The first kernel finds them
for all tokens at once and writes every expert's *place*: where in the token's list it stands, or -1 outside the pool.
A confident token's pool is its top-k, of which the K least loaded are all. What is left is sequential: of each pool
the K least loaded, equals by place, by the loads that the chunks before it left. One program goes through the tokens
with the loads in registers. Load and place are packed into one integer, so that each of the K rounds is one 32-bit
minimum, which a warp takes in one instruction; the places of the next step are on their way while this one is
decided. Chunks of many tokens are worth a launch each, over all of the GPU. Weights, which no later token waits for,
come last, for all tokens at once.

The rule is ``policies.steps.Steps.least_loaded``. Nothing here waits for the device, so a CUDA graph can hold it.

Shapes: T = tokens, E = experts, K = top_k; C = chunks.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels import tiles_triton as tiles
from moe_ep_bench.kernels.tiles_triton import NOTHING
from moe_ep_bench.policies.contract import Routing, RoutingContext
from moe_ep_bench.policies.laser import Laser, LoadOnly

# From this many tokens on, a launch for each chunk costs less than going through its tokens in one program.
_PARALLEL_CHUNK = 1024

# Pairs of a chunk that the one program decides on at once, and those of a warp: a few tokens, to fill each other's
# waits. A lone token has one warp, which needs no barrier.
_STEP_TILE = 4096
_WARP_TILE = 1024

_LEAST = tl.constexpr(-(2**31))
_MOST = tl.constexpr(2**31 - 1)
_OUTSIDE = tl.constexpr(2**30)  # above any load and place that are packed into one integer


@triton.jit
def _exchanged(values, STAGE: tl.constexpr, SPAN: tl.constexpr):
    """One step of a bitonic sort: columns SPAN apart are put in order, runs of 2**STAGE by turns down and up."""
    rows: tl.constexpr = values.shape[0]
    width: tl.constexpr = values.shape[1]
    pairs: tl.constexpr = rows * width // (2 * SPAN)
    descends = ((tl.arange(0, pairs) * (2 * SPAN) % width) >> STAGE) % 2 == 0
    takes_larger = descends[:, None] == (tl.arange(0, 2) == 0)[None, :]
    here = tl.reshape(values, [pairs, 2, SPAN])
    # Of two in a column, the other is what is missing to their sum, also where that wraps around.
    partner = tl.sum(here, 1)[:, None, :] - here
    ordered = tl.where(takes_larger[:, :, None] == (here > partner), here, partner)
    return tl.reshape(ordered, [rows, width])


@triton.jit
def _sorted(values, LOG_WIDTH: tl.constexpr):
    """Each row of an int64 tile, the largest first: tl.sort, which Triton's interpreter takes minutes for."""
    for stage in tl.static_range(1, LOG_WIDTH + 1):
        for step in tl.static_range(1, stage + 1):
            values = _exchanged(values, stage, 2 ** (stage - step))
    return values


@triton.jit
def _float64(bits):
    """The float64 with these bits: a kernel would take a number itself as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["eps_high_bits", "t_fix_bits", "pool_size"])
def _places(
    scores_ptr, bias_ptr, random_ptr, valid_ptr, place_ptr, num_tokens, eps_high_bits, t_fix_bits, pool_size,
    EVERYONE: tl.constexpr, LOG_WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Where in its token's preference list every expert of the pool stands, 0 first: int16 [T, E]; -1 outside."""
    token, is_valid = tiles.tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    expert, is_expert = tiles.experts_of_columns(LAYOUT)
    scores = tiles.load_rows(scores_ptr, token, is_valid, expert, is_expert, LAYOUT.num_experts)
    preferred = tiles.preference(scores, bias_ptr, expert, is_expert)
    order = tiles.preference_order(preferred, expert, is_expert)
    order = tiles.list_order(order, preferred, LAYOUT)

    in_pool = order != NOTHING
    if not EVERYONE:
        in_top = tiles.best_per_row(order, LAYOUT.top_k)
        # These sums are exact, and hence those of any order, as long as the scores above 0 of a row lie within a
        # factor of 2**29 / E of each other; beyond it a share can differ from another order's by a unit in 2**53.
        scores64 = scores.to(tl.float64)
        total = tl.sum(scores64, 1)
        top_share = tl.where(total > 0, tl.sum(tl.where(in_top, scores64, 0.0), 1) / tl.where(total > 0, total, 1.0), 0)
        is_confident = top_share >= _float64(eps_high_bits)
        least = _float64(t_fix_bits) * tl.max(scores64, 1)
        in_pool = ((scores64 >= least[:, None]) & in_pool & ~is_confident[:, None]) | in_top

        trim_by = order
        if random_ptr is not None:
            random = tiles.load_rows(random_ptr, token, is_valid, expert, is_expert, LAYOUT.num_experts)
            trim_by = tiles.preference_order(random, expert, is_expert)
        excess = tl.sum(in_pool.to(tl.int32), 1) - pool_size
        for turn in range(tl.max(excess, 0)):
            worst = tl.min(tl.where(in_pool, trim_by, -(NOTHING + 1)), 1)
            in_pool = in_pool & ((trim_by != worst[:, None]) | (turn >= excess)[:, None])

    # Sorted together with its order, each expert's mark tells its place.
    marked = _sorted(tl.where(order == NOTHING, NOTHING, order * 2 + in_pool.to(tl.int64)), LOG_WIDTH)
    place = tl.broadcast_to(tl.arange(0, LAYOUT.width)[None, :], marked.shape)
    place = tl.where(((marked & 1) != 0) & is_valid[:, None], place, -1)
    at = token[:, None] * LAYOUT.num_experts + tiles.expert_in(marked >> 1)
    tl.store(place_ptr + at, place.to(tl.int16), mask=(token < num_tokens)[:, None] & (marked != NOTHING))


@triton.jit
def _rows(position, is_there, order_ptr):
    """The tokens at these positions of the order in which tokens are routed: int64."""
    row = position.to(tl.int64)
    if order_ptr is not None:
        row = tl.load(order_ptr + row, mask=is_there, other=0)
    return row


@triton.jit
def _places_of(place_ptr, row, is_there, expert, is_expert, NUM_EXPERTS: tl.constexpr):
    """The rows of a [T, E] tensor of places as a tile: int32, -1 where there is nothing."""
    at = row[:, None] * NUM_EXPERTS + expert[None, :]
    return tl.load(place_ptr + at, mask=is_there[:, None] & is_expert[None, :], other=-1).to(tl.int32)


@triton.jit
def _least_counted(place, load, TOP_K: tl.constexpr):
    """Mark each row's K least loaded of the pool, by loads that are counts above the bits of a place: int32 [WIDTH]."""
    key = tl.where(place < 0, _OUTSIDE, place) + load[None, :]
    left = key
    least = tl.min(left, 1)
    for _ in tl.static_range(TOP_K - 1):
        left = tl.where(left == least[:, None], _MOST, left)
        least = tl.min(left, 1)
    return (key <= least[:, None]) & (place >= 0)


@triton.jit
def _least_loaded(place, load, TOP_K: tl.constexpr):
    """Mark each row's K least loaded of the pool: by any loads, float64 [WIDTH].

    The bits of floats that are not negative order like integers: the upper half decides, then the lower, then the
    place, each by a minimum of 32 bits.
    """
    bits = load.to(tl.int64, bitcast=True)
    lower = ((bits & 0xFFFFFFFF) + _LEAST).to(tl.int32)[None, :]
    upper = tl.where(place < 0, _MOST, (bits >> 32).to(tl.int32)[None, :])
    chosen = place != place
    for _ in tl.static_range(TOP_K):
        is_least = upper == tl.min(upper, 1)[:, None]
        least_lower = tl.min(tl.where(is_least, lower, _MOST), 1)
        is_least = is_least & (lower == least_lower[:, None])
        is_least = place == tl.min(tl.where(is_least, place, _MOST), 1)[:, None]
        chosen = chosen | (is_least & (place >= 0))
        upper = tl.where(is_least, _MOST, upper)
    return chosen


@triton.jit
def _in_order(
    place_ptr, order_ptr, load_ptr, map_ptr, num_tokens, CHUNK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Route all tokens in one program, BLOCK of a chunk in every step; without ``load_ptr`` loads start at 0."""
    STEPS: tl.constexpr = (CHUNK + BLOCK - 1) // BLOCK
    expert = tl.arange(0, WIDTH)
    is_expert = expert < NUM_EXPERTS
    offset = tl.arange(0, BLOCK)
    if load_ptr is None:
        load = tl.zeros([WIDTH], tl.int32)
    else:
        # Adding 0 turns -0.0, whose bits are negative, into 0.0.
        load = tl.load(load_ptr + expert, mask=is_expert, other=0.0) + 0.0
    counts = tl.zeros([WIDTH], tl.int32)

    is_next = (offset < CHUNK) & (offset < num_tokens)
    next_row = _rows(offset, is_next, order_ptr)
    next_place = _places_of(place_ptr, next_row, is_next, expert, is_expert, NUM_EXPERTS)
    for step in range((num_tokens + CHUNK - 1) // CHUNK * STEPS):
        is_there = is_next
        row = next_row
        place = next_place
        # Nothing in this step waits for what the next one will read.
        in_chunk = (step + 1) % STEPS * BLOCK + offset
        position = (step + 1) // STEPS * CHUNK + in_chunk
        is_next = (in_chunk < CHUNK) & (position < num_tokens)
        next_row = _rows(position, is_next, order_ptr)
        next_place = _places_of(place_ptr, next_row, is_next, expert, is_expert, NUM_EXPERTS)

        chosen = _least_counted(place, load, TOP_K) if load_ptr is None else _least_loaded(place, load, TOP_K)
        counts += tl.sum(chosen.to(tl.int32), 0)
        # A chunk's pairs are added at once, as the torch form adds them: one by one could round differently.
        is_last = (step + 1) % STEPS == 0
        if load_ptr is None:
            load += tl.where(is_last, counts, 0) * WIDTH
        else:
            load += tl.where(is_last, counts, 0).to(tl.float64)
        counts = tl.where(is_last, 0, counts)
        tiles.store_rows(map_ptr, chosen.to(tl.uint8), row, is_there, expert, is_expert, NUM_EXPERTS)


@triton.jit(do_not_specialize=["first", "end"])
def _one_chunk(
    place_ptr, order_ptr, load_ptr, count_ptr, next_load_ptr, next_count_ptr, map_ptr, first, end,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Route the tokens of one chunk in parallel, by the load that the last chunk saw plus what it chose."""
    expert = tl.arange(0, WIDTH)
    is_expert = expert < NUM_EXPERTS
    load = tl.load(load_ptr + expert, mask=is_expert, other=0.0)
    load += tl.load(count_ptr + expert, mask=is_expert, other=0).to(tl.float64)
    # All programs would write the same.
    tl.store(next_load_ptr + expert, load, mask=is_expert & (tl.program_id(0) == 0))

    position = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = position < end
    row = _rows(position, is_there, order_ptr)
    place = _places_of(place_ptr, row, is_there, expert, is_expert, NUM_EXPERTS)
    chosen = _least_loaded(place, load, TOP_K)
    count = tl.sum(chosen.to(tl.int32), 0)
    tl.atomic_add(next_count_ptr + expert, count, mask=is_expert & (count > 0))
    tiles.store_rows(map_ptr, chosen.to(tl.uint8), row, is_there, expert, is_expert, NUM_EXPERTS)


@triton.jit
def _weights(
    scores_ptr, map_ptr, weights_ptr, num_tokens, scale, NORMALIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weights of the chosen pairs, 0 for all others."""
    token, is_token = tiles.tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, None, BLOCK)
    expert = tl.arange(0, WIDTH)
    is_expert = expert < NUM_EXPERTS
    scores = tiles.load_rows(scores_ptr, token, is_token, expert, is_expert, NUM_EXPERTS)
    at = token[:, None] * NUM_EXPERTS + expert[None, :]
    chosen = tl.load(map_ptr + at, mask=is_token[:, None] & is_expert[None, :], other=0) != 0
    weights = tl.where(chosen, scores, 0.0)
    if NORMALIZE:
        weights = tiles.share(weights, tl.sum(weights, 1)[:, None])
    tiles.store_rows(weights_ptr, weights * scale, token, is_token, expert, is_expert, NUM_EXPERTS)


def select(policy: Laser | LoadOnly, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """The policy's ``select``: find the places of all tokens, go through the chunks, weigh what they chose.

    ``stats_SE`` is None.
    """
    num_tokens, num_experts = scores_TE.shape
    device = scores_TE.device
    routing = tiles.empty_routing(scores_TE)
    if num_tokens == 0:
        return routing
    is_everyone = isinstance(policy, LoadOnly)  # every expert is in every pool: no threshold need be tried
    rule, random_TE = policy.rule(scores_TE, context)
    scores_TE, bias_E, valid_T = tiles.inputs(scores_TE, context)
    map_TE, weights_TE = tiles.outputs(routing)
    chunk_size = min(rule.chunk_size, num_tokens)

    place_TE = torch.empty(scores_TE.shape, dtype=torch.int16, device=device)
    layout = tiles.Layout.of(num_experts, context)
    # A sort holds many values at once.
    block = max(1, layout.rows(num_tokens) // 4)
    grid = (triton.cdiv(num_tokens, block),)
    _places[grid](
        scores_TE, bias_E, random_TE, valid_T, place_TE, num_tokens, _bits(rule.eps_high), _bits(rule.t_fix),
        rule.pool_size, EVERYONE=is_everyone, LOG_WIDTH=layout.width.bit_length() - 1, BLOCK=block, LAYOUT=layout,
        num_warps=tiles.NUM_WARPS,
    )  # fmt: skip

    # Padding has no place in a chunk: it comes after the last valid token. A lone token and the whole batch need no
    # order, since padding chooses nothing.
    order_T = None
    if valid_T is not None and 1 < chunk_size < num_tokens:
        order_T = valid_T.sort(descending=True, stable=True).indices
    load_E = tiles.on_device(context.load_E, device, torch.float64)
    is_parallel = chunk_size == num_tokens or chunk_size >= _PARALLEL_CHUNK
    choose = _choose_by_chunk if is_parallel else _choose_in_one_program
    choose(place_TE, order_T, load_E, map_TE, chunk_size, rule.top_k)
    _weights[grid](
        scores_TE, map_TE, weights_TE, num_tokens, context.scale, NORMALIZE=context.normalize, NUM_EXPERTS=num_experts,
        WIDTH=triton.next_power_of_2(num_experts), BLOCK=block, num_warps=tiles.NUM_WARPS,
    )  # fmt: skip
    return routing


def _bits(number: float) -> int:
    """Of a float64, as an integer."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _choose_in_one_program(
    place_TE: Tensor, order_T: Tensor | None, load_E: Tensor | None, map_TE: Tensor, chunk_size: int, top_k: int
) -> None:
    """One launch for all chunks."""
    num_tokens, num_experts = place_TE.shape
    width = triton.next_power_of_2(num_experts)
    if load_E is None and num_tokens * width >= _OUTSIDE.value:
        # An expert's load may come to leave no bits for a place.
        load_E = torch.zeros(num_experts, dtype=torch.float64, device=place_TE.device)
    block = min(max(1, _STEP_TILE // width), triton.next_power_of_2(chunk_size))
    _in_order[(1,)](
        place_TE, order_T, load_E, map_TE, num_tokens, CHUNK=chunk_size, NUM_EXPERTS=num_experts, TOP_K=top_k,
        WIDTH=width, BLOCK=block, num_warps=max(1, block * width // _WARP_TILE),
    )  # fmt: skip


def _choose_by_chunk(
    place_TE: Tensor, order_T: Tensor | None, load_E: Tensor | None, map_TE: Tensor, chunk_size: int, top_k: int
) -> None:
    """A launch for each chunk, which hands the next one the loads that it saw and what it chose."""
    num_tokens, num_experts = place_TE.shape
    width = triton.next_power_of_2(num_experts)
    block = max(1, _WARP_TILE // width)
    firsts = range(0, num_tokens, chunk_size)
    seen_CE = torch.zeros([len(firsts) + 1, num_experts], dtype=torch.float64, device=place_TE.device)
    count_CE = torch.zeros(seen_CE.shape, dtype=torch.int32, device=place_TE.device)
    if load_E is not None:
        seen_CE[0] = load_E
    for chunk, first in enumerate(firsts):
        end = min(first + chunk_size, num_tokens)
        _one_chunk[(triton.cdiv(end - first, block),)](
            place_TE, order_T, seen_CE[chunk], count_CE[chunk], seen_CE[chunk + 1], count_CE[chunk + 1], map_TE,
            first, end, NUM_EXPERTS=num_experts, TOP_K=top_k, WIDTH=width, BLOCK=block, num_warps=1,
        )  # fmt: skip
