"""What a pair counts for with its expert, as one integer: its *standing*.

An expert under capacity (arXiv 2503.05066) keeps its best C pairs: by modality first where one is favoured, then by the
metric, then the lower token, then the lower expert of those that share the capacity. A standing packs all of that into
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

from moe_ep_bench.kernels.tiles_triton import on_device
from moe_ep_bench.policies.capacity import IMAGE, CapacityPolicy, expert_capacity
from moe_ep_bench.policies.contract import RoutingContext
from moe_ep_bench.policies.field_checks import decimal

MOST_PAIRS = 2**30
"""T * E, so that a standing stays below 2**63."""
NO_PAIR = tl.constexpr(-1)

_FLOAT_BITS = 31  # of a float that is not negative


@dataclass(frozen=True, eq=False)
class Ranking:
    """By what pairs are ordered, as kernels read it.

    Attributes:
        range_bits, index_bits: widths of the metric and of the pair's number.
        bits: width of a standing.
        modality_T: int64, or None where none is favoured.
        favoured: the modality whose pairs outrank the other's.
        random_TE: float32, the metric ``random``; None for others.
        tells_score: the metric is the score, and nothing else.
    """

    range_bits: int
    index_bits: int
    bits: int
    modality_T: Tensor | None
    favoured: int
    random_TE: Tensor | None
    tells_score: bool


def ranking(policy: CapacityPolicy, scores_TE: Tensor, context: RoutingContext) -> Ranking:
    """The order of ``CapacityPolicy._keys``, drawn from the context's generator where it is random."""
    num_tokens, _ = scores_TE.shape
    is_signed = policy.metric == "score" and context.bias_E is not None
    is_float = policy.metric in ("score", "random")
    range_bits = _FLOAT_BITS + is_signed if is_float else (num_tokens + 1).bit_length()
    index_bits = max(1, (scores_TE.numel() - 1).bit_length())
    favours = policy.modality != "uniform" and context.modality_T is not None
    return Ranking(
        range_bits=range_bits,
        index_bits=index_bits,
        bits=range_bits + favours + index_bits,
        modality_T=on_device(context.modality_T, scores_TE.device, torch.int64) if favours else None,
        favoured=IMAGE if policy.modality == "text_first" else 1 - IMAGE,
        random_TE=on_device(policy.draws(scores_TE, context), scores_TE.device, torch.float32),
        tells_score=policy.metric == "score" and not is_signed,
    )


@dataclass(frozen=True)
class Room:
    """A capacity that a kernel can compute: max(least, whole * T + part * T // per).

    T counts valid tokens where ``of_valid``; without it the host knew T, and ``least`` is the whole capacity.
    """

    least: int
    whole: int = 0
    part: int = 0
    per: int = 1
    of_valid: bool = False


def room_of(policy: CapacityPolicy, shape: torch.Size, context: RoutingContext, num_shared: int) -> Room:
    """The capacity of groups of ``num_shared`` experts (``policies.capacity.expert_capacity``), no tokens counted."""
    num_tokens, num_experts = shape
    least = min(num_shared * policy.min_capacity, 2**31 - 1)
    if context.token_mask_T is None or num_tokens == 0:
        of_all = expert_capacity(policy.capacity_factor, num_tokens, context.top_k, num_experts, num_shared)
        return Room(min(max(least, of_all), 2**31 - 1))
    of_token = decimal(policy.capacity_factor) * num_shared * context.top_k / num_experts
    # More room than there are pairs is room for all.
    of_token = largest_below(min(of_token, Fraction(num_experts)), num_tokens)
    whole, part = divmod(of_token.numerator, of_token.denominator)
    return Room(least, whole, part, of_token.denominator, of_valid=True)


@dataclass(frozen=True, eq=False)
class Job:
    """What a capacity policy's launches are given.

    Attributes:
        scores_TE: float32, contiguous.
        bias_E: float32, or None.
        valid_T: bytes, 0 = padding; or None.
        first_local: the first expert of the tokens' own rank.
        num_shared: neighbouring experts that share a capacity.
        constants: compile-time arguments: METRIC, NORMALIZE, MOST (experts that a token keeps at most, or None), and
            those of ``tiles_triton.layout``.
        expansion: NUM_MORE further experts that a token considers, of NUM_LOCAL on its own rank (0 = anywhere), and
            LOCAL_P, the power of two that holds these.
    """

    scores_TE: Tensor
    bias_E: Tensor | None
    valid_T: Tensor | None
    ranking: Ranking
    room: Room
    first_local: int
    scale: float
    num_shared: int
    constants: dict[str, Any]
    expansion: dict[str, int]


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
    """What stands above the metric: int64 [BLOCK], 0 where no modality is favoured. 1 is an image, all else text."""
    above = token * 0
    if modality_ptr is not None:
        is_image = tl.load(modality_ptr + token, mask=is_token, other=0) == 1
        above = (is_image == (FAVOURED == 1)).to(tl.int64) << range_bits
    return above


@triton.jit
def capacity_of(num_valid, least, whole, part, per):
    """A Room's capacity for so many valid tokens: int64."""
    count = num_valid.to(tl.int64)
    return tl.maximum(least.to(tl.int64), whole * count + part * count // per)


@triton.jit
def metric_of(key, at, token, num_tokens, random_ptr, is_pair, METRIC: tl.constexpr, SIGNED: tl.constexpr):
    """What an expert orders its pairs by, the largest first, as an integer that is not negative."""
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
    """Standing of a pair by what its expert orders by; among equals the lower token wins, then the lower expert."""
    return (key << index_bits) | ((1 << index_bits.to(tl.int64)) - 1 - (token * NUM_EXPERTS + expert))


@triton.jit
def expert_at(standing, index_bits, NUM_EXPERTS: tl.constexpr):
    """Whose pair this is."""
    last = (1 << index_bits) - 1  # in 32 bits: MOST_PAIRS
    return (last - (standing.to(tl.int32) & last)) % NUM_EXPERTS
