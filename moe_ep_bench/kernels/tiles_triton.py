"""Functions that the routing kernels share: load tokens' scores as a tile, order a token's experts, select by order.

A program works on a tile [BLOCK, WIDTH] of tokens by experts. Experts lie in its columns by groups (DeepSeek-V3,
section 2.1.2; a model without groups has one), each group padded to a power of two: tiles have no other sizes.

Experts are ordered by integers, not by floats: ``preference_order`` packs the bits of a preference and the expert's
number into one int64, so that no two experts of a token are equal, the lower one comes first where preferences
are, and the best of a row is one maximum.

Kernels elsewhere import constants by name: Triton compiles anew where a name changes, but not where an attribute does.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.policies.contract import Routing, RoutingContext

MOST_EXPERTS = 1024
NUM_WARPS = 4

# Elements of a tile for NUM_WARPS warps: 32 scores a thread, 64 registers of order.
_TILE = 4096
_MOST_ROWS = 128

NOTHING = tl.constexpr(-(2**63))
"""In an order: what is never chosen."""
NO_KEY = tl.constexpr(-(2**31))
"""Among keys: less than any float's."""
EXPERT_BITS = tl.constexpr(10)
LAST_EXPERT = tl.constexpr(MOST_EXPERTS - 1)
"""``expert ^ LAST_EXPERT`` counts from the last expert down."""
_FIRST_CLASS = tl.constexpr(2**44)  # above any preference


@dataclass(frozen=True)
class Layout:
    """How a kernel lays experts into columns and finds the model's top-k: a compile-time argument.

    Attributes:
        groups: of experts; a model without groups has one.
        groups_p, size_p: powers of two that hold the groups, and a group's experts.
    """

    num_experts: int
    top_k: int
    groups: int
    top_groups: int
    groups_p: int
    size_p: int

    @classmethod
    def of(cls, num_experts: int, context: RoutingContext) -> Layout:
        groups = context.num_groups or 1
        padded = triton.next_power_of_2(groups), triton.next_power_of_2(num_experts // groups)
        return cls(num_experts, context.top_k, groups, context.top_groups or 1, *padded)

    @property
    def width(self) -> int:
        return self.groups_p * self.size_p

    def rows(self, num_tokens: int) -> int:
        """Tokens that a program takes: as many as a tile holds, and no more than there are."""
        return max(1, min(_MOST_ROWS, _TILE // self.width, triton.next_power_of_2(num_tokens)))


def blocks_of(scores_TE: Tensor, context: RoutingContext) -> tuple[tuple[int], dict[str, Any]]:
    """The grid of a launch with a program for each block of tokens, and its BLOCK and LAYOUT."""
    num_tokens, num_experts = scores_TE.shape
    layout = Layout.of(num_experts, context)
    block = layout.rows(num_tokens)
    return (triton.cdiv(num_tokens, block),), {"BLOCK": block, "LAYOUT": layout}


def lanes_of_row(num_rows: int, num_warps: int = NUM_WARPS) -> int:
    """Threads that share a row of a tile of so many, one row to each of them."""
    return max(1, min(32, 32 * num_warps // num_rows))


def as_bytes(flags: Tensor | None) -> Tensor | None:
    """Booleans as the bytes that they are in memory, in order."""
    return None if flags is None else flags.contiguous().view(torch.uint8)


def on_device(values: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A tensor of a context as a kernel reads it, or None."""
    return None if values is None else values.to(device, dtype).contiguous()


def inputs(scores_TE: Tensor, context: RoutingContext) -> tuple[Any, ...]:
    """Scores, selection bias and padding mask as kernels read them; None for what there is not."""
    device = scores_TE.device
    return (
        scores_TE.contiguous(),
        on_device(context.bias_E, device, torch.float32),
        as_bytes(on_device(context.token_mask_T, device, torch.bool)),
    )


def empty_routing(scores_TE: Tensor) -> Routing:
    """A routing that a kernel is yet to write."""
    shape, device = scores_TE.shape, scores_TE.device
    return Routing(
        map_TE=torch.empty(shape, dtype=torch.bool, device=device),
        weights_TE=torch.empty(shape, dtype=torch.float32, device=device),
    )


def outputs(routing: Routing) -> tuple[Any, ...]:
    """Map and weights as kernels write them."""
    return as_bytes(routing.map_TE), routing.weights_TE


@triton.jit
def tokens_of_block(first, num_tokens, valid_ptr, BLOCK: tl.constexpr):
    """Token numbers from ``first`` on: int64 [BLOCK], and which of them are there and no padding."""
    token = first.to(tl.int64) + tl.arange(0, BLOCK)
    is_there = token < num_tokens
    if valid_ptr is not None:
        is_there = is_there & (tl.load(valid_ptr + token, mask=is_there, other=0) != 0)
    return token, is_there


@triton.jit
def expert_of_column(column, LAYOUT: tl.constexpr):
    """The expert of each of these columns, and which of them have one."""
    inner = column % LAYOUT.size_p
    group = column // LAYOUT.size_p
    size = LAYOUT.num_experts // LAYOUT.groups
    return group * size + inner, (inner < size) & (group < LAYOUT.groups)


@triton.jit
def experts_of_columns(LAYOUT: tl.constexpr):
    """The expert of every column, int32 [WIDTH], and which columns have one."""
    return expert_of_column(tl.arange(0, LAYOUT.width), LAYOUT)


@triton.jit
def load_rows(values_ptr, token, is_there, expert, is_expert, NUM_EXPERTS: tl.constexpr):
    """The rows of a [T, E] tensor as a tile; 0 where there is nothing."""
    at = token[:, None] * NUM_EXPERTS + expert[None, :]
    return tl.load(values_ptr + at, mask=is_there[:, None] & is_expert[None, :], other=0.0)


@triton.jit
def load_whole_rows(values_ptr, token, is_there, LANES: tl.constexpr, LAYOUT: tl.constexpr):
    """``load_rows`` of all experts, each row on ``LANES`` threads of a warp, so that rounds over rows hardly shuffle.

    Triton spreads a tile over threads by how its addresses lie: four neighbouring columns to a thread, then threads
    along the dimensions from the last to the first. What comes first here, runs of columns, stays within a thread.
    """
    block: tl.constexpr = token.shape[0]
    width: tl.constexpr = LAYOUT.width
    near: tl.constexpr = min(4, width)
    lanes: tl.constexpr = min(LANES, width // near)
    runs: tl.constexpr = width // (near * lanes)
    run = tl.arange(0, runs)[:, None, None, None]
    lane = tl.arange(0, lanes)[None, None, :, None]
    column = (run * lanes + lane) * near + tl.arange(0, near)[None, None, None, :]
    expert, is_expert = expert_of_column(column, LAYOUT)
    row = token[None, :, None, None]
    is_there = is_there[None, :, None, None]
    values = tl.load(values_ptr + row * LAYOUT.num_experts + expert, mask=is_there & is_expert, other=0.0)
    return tl.reshape(tl.permute(values, (1, 0, 2, 3)), [block, width])


@triton.jit
def store_rows(values_ptr, values, token, is_token, expert, is_expert, NUM_EXPERTS: tl.constexpr):
    """Write a tile into the rows of a [T, E] tensor."""
    at = token[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(values_ptr + at, values, mask=is_token[:, None] & is_expert[None, :])


@triton.jit
def order_key(value):
    """Integers that order like these floats; 0.0 and -0.0 are one, denormals are not zero: int32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def preference(scores, bias_ptr, expert, is_expert):
    """Scores as the model orders them: with its selection bias, where it has one."""
    if bias_ptr is not None:
        scores = scores + tl.load(bias_ptr + expert, mask=is_expert, other=0.0)[None, :]
    return scores


@triton.jit
def preference_order(values, expert, is_expert):
    """One int64 for every expert of a token, the more preferred the larger; NOTHING where a column has no expert."""
    order = (order_key(values).to(tl.int64) << EXPERT_BITS) + (expert ^ LAST_EXPERT)[None, :]
    return tl.where(is_expert[None, :], order, NOTHING)


@triton.jit
def expert_in(order):
    """The expert that an order belongs to."""
    return (order & LAST_EXPERT).to(tl.int32) ^ LAST_EXPERT


@triton.jit
def best_key(keys, expert):
    """The largest ``order_key`` of each row and its lowest expert: int32 [BLOCK], int32 [BLOCK].

    Two 32-bit maxima cost less than one of a 64-bit order. A row without any key but NO_KEY has no meaning.
    """
    best = tl.max(keys, 1)
    lowest = tl.where(keys == best[:, None], expert[None, :], LAST_EXPERT)
    return best, tl.min(lowest, 1)


@triton.jit
def best_keys_per_row(keys, expert, count):
    """``best_per_row`` of 32-bit keys, the lowest expert first among equals; NO_KEY is never chosen."""
    marks = keys != keys
    for _ in range(count):
        _, lowest = best_key(keys, expert)
        is_best = (expert[None, :] == lowest[:, None]) & (keys != NO_KEY)
        marks = marks | is_best
        keys = tl.where(is_best, NO_KEY, keys)
    return marks


@triton.jit
def best_per_row(order, count):
    """Mark each row's ``count`` largest; fewer where there are fewer: bool [BLOCK, WIDTH]."""
    marks = order != order
    for _ in range(count):
        best = tl.max(order, 1)[:, None]
        is_best = (order == best) & (order != NOTHING)
        marks = marks | is_best
        order = tl.where(is_best, NOTHING, order)
    return marks


@triton.jit
def inside_top_groups(order, values, LAYOUT: tl.constexpr):
    """The order of the experts in a token's best groups, NOTHING for others (``selection.top_k_map``).

    A group is worth the sum of its best ``top_k // top_groups`` preferences, the largest added first.
    """
    if LAYOUT.groups == 1:
        return order
    block: tl.constexpr = order.shape[0]
    groups_p: tl.constexpr = LAYOUT.groups_p
    left = tl.reshape(order, [block, groups_p, LAYOUT.size_p])
    grouped = tl.reshape(values, [block, groups_p, LAYOUT.size_p])
    worth = tl.zeros([block, groups_p], tl.float32)
    for _ in range(LAYOUT.top_k // LAYOUT.top_groups):
        is_best = (left == tl.max(left, 2)[:, :, None]) & (left != NOTHING)
        worth += tl.sum(tl.where(is_best, grouped, 0.0), 2)
        left = tl.where(is_best, NOTHING, left)
    group = tl.arange(0, groups_p)
    top = best_per_row(preference_order(worth, group, group < LAYOUT.groups), LAYOUT.top_groups)
    inside = tl.broadcast_to(top[:, :, None], [block, groups_p, LAYOUT.size_p])
    return tl.where(tl.reshape(inside, [block, LAYOUT.width]), order, NOTHING)


@triton.jit
def keys_and_those_in_top_groups(values, expert, is_expert, LAYOUT: tl.constexpr):
    """Each expert's ``order_key``, and the same of the experts in a token's best groups alone; NO_KEY for others."""
    keys = tl.where(is_expert[None, :], order_key(values), NO_KEY)
    inside = keys
    if LAYOUT.groups > 1:
        order = inside_top_groups(preference_order(values, expert, is_expert), values, LAYOUT)
        inside = tl.where(order != NOTHING, keys, NO_KEY)
    return keys, inside


@triton.jit
def list_order(order, values, LAYOUT: tl.constexpr):
    """The order of a token's preference list (``selection.list_keys``): where there are groups, top-k first."""
    if LAYOUT.groups == 1:
        return order
    inside = inside_top_groups(order, values, LAYOUT)
    return tl.where(best_per_row(inside, LAYOUT.top_k), order + _FIRST_CLASS, order)


@triton.jit
def ordered_block(scores_ptr, bias_ptr, valid_ptr, num_tokens, DEEPEST: tl.constexpr, BLOCK: tl.constexpr,
                  LAYOUT: tl.constexpr):  # fmt: skip
    """A program's tokens, the experts of its columns, which columns have one, scores, and order.

    The order is that of every token's preference list, read no deeper than ``DEEPEST``; NOTHING in rows of padding.
    """
    expert, is_expert = experts_of_columns(LAYOUT)
    token, is_there = tokens_of_block(tl.program_id(0) * BLOCK, num_tokens, valid_ptr, BLOCK)
    scores = load_rows(scores_ptr, token, is_there, expert, is_expert, LAYOUT.num_experts)
    order = order_rows(scores, is_there, bias_ptr, expert, is_expert, DEEPEST, LAYOUT)
    return token, expert, is_expert, scores, order


@triton.jit
def order_rows(scores, is_there, bias_ptr, expert, is_expert, DEEPEST: tl.constexpr, LAYOUT: tl.constexpr):
    """The order of ``ordered_block``."""
    values = preference(scores, bias_ptr, expert, is_expert)
    order = preference_order(values, expert, is_expert)
    # The list opens with the top-k: what stands behind them may not be asked for.
    only_top_k: tl.constexpr = LAYOUT.top_k >= DEEPEST
    order = inside_top_groups(order, values, LAYOUT) if only_top_k else list_order(order, values, LAYOUT)
    return tl.where(is_there[:, None], order, NOTHING)


@triton.jit
def first_of_list(order, COUNT: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Mark each row's ``COUNT`` first: bool [BLOCK, WIDTH]."""
    return order != NOTHING if COUNT >= NUM_EXPERTS else best_per_row(order, COUNT)


@triton.jit
def share(score, total):
    """score / total in float32, rounded as torch rounds it; of nothing it is 0."""
    return tl.where(total > 0, tl.div_rn(score, tl.where(total > 0, total, 1.0)), 0.0)


@triton.jit
def write_routing(map_ptr, weights_ptr, scores, chosen, divided_by, scale, token, is_token, expert, is_expert,
                  NORMALIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr):  # fmt: skip
    """Write a tile's map and weights; ``divided_by`` marks the pairs whose scores sum to 1 (``selection.weighted``)."""
    weights = tl.where(chosen, scores, 0.0)
    if NORMALIZE:
        weights = share(weights, tl.sum(tl.where(divided_by, scores, 0.0), 1)[:, None])
    store_rows(map_ptr, chosen.to(tl.uint8), token, is_token, expert, is_expert, NUM_EXPERTS)
    store_rows(weights_ptr, weights * scale, token, is_token, expert, is_expert, NUM_EXPERTS)
