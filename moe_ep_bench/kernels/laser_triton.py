"""``laser`` and ``load_only`` on a GPU: what is parallel in parallel, the rest one token after another in one warp.

A token's pool and the order of its preference list depend on nothing but its own scores. The first kernel finds them
for all tokens at once and writes every expert's *place*: where in the token's list it stands, or -1 outside the pool.
A confident token's pool is its top-k, of which the K least loaded are all. What is left is sequential: of each pool
the K least loaded, equals by place, by the loads that the tokens before it left. One program goes through the tokens
with the loads in registers. Load and place are packed into one integer, so that each of the K rounds is one 32-bit
minimum, which a warp takes in one instruction; the places of the next token are on their way while this one is
decided. Weights, which no later token waits for, come last, for all tokens at once.

The rule is ``policies.steps.Steps.least_loaded``. Nothing here waits for the device, so a CUDA graph can hold it.

Shapes: T = tokens, E = experts, K = top_k.
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

_MOST = tl.constexpr(2**31 - 1)
_OUTSIDE = tl.constexpr(2**30)  # above any load and place that are packed into one integer
MOST_SCORES = 2**29
"""T * E, padded to less than twice as many: the load of an expert leaves the bits of a place."""


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
    """Place of every expert of the pool in its token's preference list, 0 first: int16 [T, E]; -1 outside."""
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
def _in_order(
    place_ptr, map_ptr, num_tokens, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Route all tokens in one program, one after another."""
    expert = tl.arange(0, WIDTH)
    is_expert = expert < NUM_EXPERTS
    offset = tl.arange(0, 1)
    load = tl.zeros([WIDTH], tl.int32)

    is_next = offset < num_tokens
    next_row = offset.to(tl.int64)
    next_place = _places_of(place_ptr, next_row, is_next, expert, is_expert, NUM_EXPERTS)
    for token in range(num_tokens):
        is_there = is_next
        row = next_row
        place = next_place
        # Nothing in this step waits for what the next one will read.
        position = token + 1 + offset
        is_next = position < num_tokens
        next_row = position.to(tl.int64)
        next_place = _places_of(place_ptr, next_row, is_next, expert, is_expert, NUM_EXPERTS)

        chosen = _least_counted(place, load, TOP_K)
        load += tl.sum(chosen.to(tl.int32), 0) * WIDTH
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
    """The policy's ``select``: find the places of all tokens, go through them in order, weigh what they chose.

    Args:
        scores_TE: T * E at most ``MOST_SCORES``.
        context: loads start at zero, whatever ``load_E`` is.
        stats_SE: None.
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

    width = triton.next_power_of_2(num_experts)
    # One warp, which needs no barrier.
    _in_order[(1,)](place_TE, map_TE, num_tokens, NUM_EXPERTS=num_experts, TOP_K=rule.top_k, WIDTH=width, num_warps=1)
    _weights[grid](
        scores_TE, map_TE, weights_TE, num_tokens, context.scale, NORMALIZE=context.normalize, NUM_EXPERTS=num_experts,
        WIDTH=width, BLOCK=block, num_warps=tiles.NUM_WARPS,
    )  # fmt: skip
    return routing


def _bits(number: float) -> int:
    """The bits of a float64, as an integer."""
    return struct.unpack("<q", struct.pack("<d", number))[0]
