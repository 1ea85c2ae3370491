"""The *priority* of a pair at its expert, as one integer.

An expert under capacity (arXiv 2503.05066) keeps its best C pairs: by modality first where one is favoured, then by the
metric, then the lower token, then the lower expert of those that share the capacity. A priority packs all of that into
an int64, larger for what is rather kept. No two pairs have the same, so ties need no thought, and what an expert keeps
is what stands at some threshold or above.

    favoured (1 bit) | metric (up to 32 bits) | T * E - 1 - number of the pair (up to 30 bits)

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels.tiles_triton import Layout, inputs, on_device
from moe_ep_bench.policies.capacity import IMAGE, CapacityPolicy, ExpandedDrop, Room
from moe_ep_bench.policies.contract import RoutingContext

MOST_PAIRS = 2**30
"""T * E, so that a priority stays below 2**63."""
NO_PAIR = tl.constexpr(-1)

_FLOAT_BITS = 31  # of a float that is not negative

Linear = tuple[int, int, int, int]
"""A capacity that a kernel can compute, (least, whole, part, per): max(least, whole * T + part * T // per)."""


@dataclass(frozen=True, eq=False)
class Job:
    """Arguments of a capacity policy's launches, as kernels read them.

    Attributes:
        read: scores, bias, padding mask, modality (None where none is favoured) and the metric ``random`` (or None).
        index_bits, range_bits, bits: widths of a pair's number, of the metric, and of a priority.
        tells_score: the metric is the score, and nothing else.
        room: T in it counts valid tokens if ``room_of_valid``; else the host knew T, and ``least`` is all of it.
        first_local: the first expert of the tokens' own rank.
        num_shared: neighbouring experts that share a capacity.
        offers: compile-time arguments of what finds pairs: METRIC; FAVOURED, the modality whose pairs outrank the
            other's; NUM_MORE further experts that a token considers, of NUM_LOCAL on its own rank (0 = anywhere).
        writes: of what writes: NORMALIZE, and MOST, the experts that a token keeps (None = no limit).
    """

    read: tuple[Tensor | None, ...]
    index_bits: int
    range_bits: int
    bits: int
    tells_score: bool
    room: Linear
    room_of_valid: bool
    first_local: int
    num_shared: int
    layout: Layout
    offers: dict[str, Any]
    writes: dict[str, Any]

    @classmethod
    def of(cls, policy: CapacityPolicy, scores_TE: Tensor, context: RoutingContext) -> Job:
        """The order of ``CapacityPolicy._keys``, drawn from the context's generator where it is random."""
        (num_tokens, num_experts), device = scores_TE.shape, scores_TE.device
        num_local = num_experts // context.num_ranks
        room = policy.room(num_experts, context)
        is_signed = policy.metric == "score" and context.bias_E is not None
        is_float = policy.metric in ("score", "random")
        range_bits = _FLOAT_BITS + is_signed if is_float else (num_tokens + 1).bit_length()
        index_bits = max(1, (scores_TE.numel() - 1).bit_length())
        favours = policy.modality != "uniform" and context.modality_T is not None
        num_more, of_local, most = _expansion(policy, num_experts, context)
        capacity, of_valid = _linear(room, num_tokens, num_experts, is_masked=context.token_mask_T is not None)
        return cls(
            read=(
                *inputs(scores_TE, context),
                on_device(context.modality_T, device, torch.int64) if favours else None,
                on_device(policy.random_keys(scores_TE, context), device, torch.float32),
            ),
            index_bits=index_bits,
            range_bits=range_bits,
            bits=range_bits + favours + index_bits,
            tells_score=policy.metric == "score" and not is_signed,
            room=capacity,
            room_of_valid=of_valid,
            first_local=context.rank * num_local,
            num_shared=room.num_shared,
            layout=Layout.of(num_experts, context),
            offers={
                "METRIC": policy.metric,
                "FAVOURED": IMAGE if policy.modality == "text_first" else 1 - IMAGE,
                "NUM_MORE": num_more,
                "NUM_LOCAL": of_local,
            },
            writes={"NORMALIZE": context.normalize, "MOST": most},
        )


def _expansion(policy: CapacityPolicy, num_experts: int, context: RoutingContext) -> tuple[int, int, int | None]:
    """Further experts that a token considers, of how many on its rank (0 = anywhere), and the most that it keeps."""
    if not isinstance(policy, ExpandedDrop):
        return 0, 0, None
    num_more, most = policy.further_experts(num_experts, context), policy.max_experts_per_token
    num_local = num_experts // context.num_ranks if policy.scope == "local" and num_more else 0
    return num_more, num_local, most if most is not None and most < context.top_k + num_more else None


def _linear(room: Room, num_tokens: int, num_experts: int, *, is_masked: bool) -> tuple[Linear, bool]:
    """A ``Room`` as a kernel computes it from the number of valid tokens; all of it, where the host knows them."""
    if not is_masked or num_tokens == 0:
        return (min(room.pairs(num_tokens), 2**31 - 1), 0, 0, 1), False
    # More room than there are pairs is room for all.
    of_token = largest_below(min(room.of_token, Fraction(num_experts)), num_tokens)
    return (0, *divmod(of_token.numerator, of_token.denominator), of_token.denominator), True


def largest_below(number: Fraction, most: int) -> Fraction:
    """The largest fraction with a denominator up to ``most`` that is not above ``number``.

    For every whole n up to ``most`` floor(n * number) is the same with it, for floor(n * number) / n is such a fraction
    too; and 64 bits hold the product.
    """
    near = number.limit_denominator(most)
    if near <= number:
        return near
    # The one before it in the Farey sequence: a / b with p b - a q = 1 and the largest such b.
    p, q = near.numerator, near.denominator
    first = pow(p, -1, q)
    b = first + q * ((most - first) // q)
    return Fraction((p * b - 1) // q, b)


@triton.jit
def favour(modality_ptr, token, is_token, range_bits, FAVOURED: tl.constexpr):
    """The bit above the metric: int64 [BLOCK], 0 where no modality is favoured. 1 is an image, all else text."""
    above = token * 0
    if modality_ptr is not None:
        is_image = tl.load(modality_ptr + token, mask=is_token, other=0) == 1
        above = (is_image == (FAVOURED == 1)).to(tl.int64) << range_bits
    return above


@triton.jit
def capacity_of(num_valid, least, whole, part, per):
    """A ``Linear`` capacity for so many valid tokens: int64."""
    count = num_valid.to(tl.int64)
    return tl.maximum(least.to(tl.int64), whole * count + part * count // per)


@triton.jit
def metric_of(key, at, token, num_tokens, random_ptr, is_pair, METRIC: tl.constexpr, SIGNED: tl.constexpr):
    """The metric by which an expert orders its pairs, the largest first, as an integer that is not negative."""
    if METRIC == "score":
        value = key.to(tl.int64)
        if SIGNED:
            value += 2147483648
    elif METRIC == "random":
        value = tl.load(random_ptr + at, mask=is_pair, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
    elif METRIC == "order":
        value = num_tokens - token + key * 0
    else:
        value = token + key * 0
    return value


@triton.jit
def place(key, token, expert, index_bits, NUM_EXPERTS: tl.constexpr):
    """Priority of a pair by what its expert orders by; among equals the lower token wins, then the lower expert."""
    return (key << index_bits) | ((1 << index_bits.to(tl.int64)) - 1 - (token * NUM_EXPERTS + expert))


@triton.jit
def expert_at(priority, index_bits, NUM_EXPERTS: tl.constexpr):
    """The expert of a pair."""
    last = (1 << index_bits) - 1  # in 32 bits: MOST_PAIRS
    return (last - (priority.to(tl.int32) & last)) % NUM_EXPERTS
