"""The experts of a decode step in Triton: the weights of an activated expert are read once, others not at all.

With a few tokens per expert an MoE layer's time is that of reading weights, so it is linear in the activated experts
(OEA, arXiv 2511.02237, section 2), whatever the number of tokens. A grouped GEMM made for many rows blurs that law:
it plans for empty experts too, and its tiles are wide. Here a program stands for some rows of one expert's weight
matrix and reads them from end to end, while the few inputs of that expert stay in the cache; a program of an expert
without tokens looks at two numbers and ends. A layer is four launches: sort the pairs, gate-up with the activation,
down, and the sum per token. None waits for the host and no shape follows from the routing, so that a captured CUDA
graph may be replayed with another map. Sums have a fixed order: equal inputs give equal bits.

Shapes: T = tokens, L = local experts, N = rows for pairs, X = rows of inputs (T, or N), D = hidden size, F = expert
FFN size. An expert is ``(silu(x @ gate_FD.T) * (x @ up_FD.T)) @ down_DF.T``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ep_bench.kernels.tiles_triton import as_bytes

# --- Sizes -------------------------------------------------------------------------------------------------
# Chosen by reasoning for an H100 (132 SMs, 227 KiB of shared memory each), and not measured yet.
#
# A memory that delivers 3 TB/s with a latency of about 1 us has 3 MB under way, some 24 KB per SM; we plan for more, as
# programs begin and end. A step of the inner loop takes _STEP_BYTES at most, two thirds or more of them weights in
# decode: with bfloat16 and 16 rows, 64 weight rows of 256 bytes, 16 KiB. Triton keeps _STAGES - 1 steps in shared
# memory (60 KiB) and all but the one that is computed under way. Three programs fit an SM: 96 KiB of weights under way.
_STEP_BYTES = 24 * 1024
_STAGES = 4
_NUM_WARPS = 4
# Weight rows of a program: the longest programs that still fill the SMs a few times. Qwen3-30B-A3B (128 experts) has
# 3,072 programs for gate-up and 4,096 for down, of which 1,171 and 1,562 read weights where 48.8 experts are activated.
_MOST_FEATURES, _FEWEST_FEATURES = 64, 32
_ENOUGH_PROGRAMS = 4 * 132
# Inputs of an expert that share one reading of its weights. Tensor cores take 16 at least; absent ones cost no memory.
_FEWEST_ROWS, _MOST_ROWS = 16, 64
# Of a map: bytes that a program of ``pairs_by_expert`` looks at together.
_MAP_TILE = 4096
# Of an output: values that a warp of ``combine`` sums, 16 bytes of bfloat16 per thread, and rows under way together.
_SUMMED_COLUMNS = 256
_SUMMED_ROWS = tl.constexpr(8)

_NO_ROW = tl.constexpr(2**31 - 1)


# --- Pairs -------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """The pairs of a map, sorted by expert and then by token. Rows beyond the last pair hold anything.

    Attributes:
        token_N: int32, the token of each row.
        weights_N: float32, its routing weight.
        ends_L: int32, where each expert's rows end, and the next one's begin.
        place_TL: int32, the row of each (token, expert), or -1 where it is no pair.
    """

    token_N: Tensor
    weights_N: Tensor
    ends_L: Tensor
    place_TL: Tensor


@triton.jit
def _pairs_kernel(map_ptr, weights_ptr, token_ptr, weight_ptr, ends_ptr, place_ptr, num_tokens, most_pairs,
                  NUM_EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One expert's pairs. Where they begin, every program counts for itself: that costs less than another launch."""
    expert = tl.program_id(0)
    earlier = tl.arange(0, EXPERTS_P)
    begin = 0
    for first in range(0, num_tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        at = token.to(tl.int64)[:, None] * NUM_EXPERTS + earlier[None, :]
        is_pair = tl.load(map_ptr + at, mask=(token < num_tokens)[:, None] & (earlier < expert)[None, :], other=0)
        begin += tl.sum(tl.sum(is_pair.to(tl.int32), 1), 0)

    end = begin
    for first in range(0, num_tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_token = token < num_tokens
        at = token.to(tl.int64) * NUM_EXPERTS + expert
        is_pair = tl.load(map_ptr + at, mask=is_token, other=0).to(tl.int32)
        place = end + tl.cumsum(is_pair, 0) - is_pair
        has_row = (is_pair != 0) & (place < most_pairs)
        tl.store(place_ptr + at, tl.where(has_row, place, -1), mask=is_token)
        tl.store(token_ptr + place, token, mask=has_row)
        tl.store(weight_ptr + place, tl.load(weights_ptr + at, mask=has_row, other=0.0), mask=has_row)
        end += tl.sum(is_pair, 0)
    tl.store(ends_ptr + expert, tl.minimum(end, most_pairs))


def pairs_by_expert(map_TL: Tensor, weights_TL: Tensor, most_pairs: int | None = None) -> Pairs:
    """Sort the pairs of a map by expert, then by token, in one launch.

    Reads the map (T x L bytes) once per expert, from the cache, and the weights of its pairs.

    Args:
        map_TL: bool, which experts each token takes.
        weights_TL: float32 routing weights; those of other pairs are ignored.
        most_pairs: N; T x L unless given. With more pairs than that the last ones are dropped: they have no row,
            place -1, and add nothing to an output.
    """
    num_tokens, num_experts = map_TL.shape
    num_rows = num_tokens * num_experts if most_pairs is None else most_pairs
    device = map_TL.device
    pairs = Pairs(
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(num_experts, dtype=torch.int32, device=device),
        torch.empty(num_tokens, num_experts, dtype=torch.int32, device=device),
    )
    experts_p = triton.next_power_of_2(num_experts)
    block = max(1, min(_MAP_TILE // experts_p, triton.next_power_of_2(num_tokens)))
    _pairs_kernel[(num_experts,)](
        as_bytes(map_TL), weights_TL.contiguous(), *pairs, num_tokens, num_rows,
        NUM_EXPERTS=num_experts, EXPERTS_P=experts_p, BLOCK=block, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return pairs


# --- Experts -----------------------------------------------------------------------------------------------


@triton.jit
def _rows_of_expert(ends_ptr, expert):
    """Where an expert's rows begin and end."""
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    return begin, tl.load(ends_ptr + expert)


@triton.jit
def _product(inputs_ptr, row, is_row, matrix_ptr, feature, is_feature, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of inputs times rows of a matrix, both of SIZE values in a run: float32 [ROWS, FEATURES]."""
    total = tl.zeros([row.shape[0], feature.shape[0]], tl.float32)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < SIZE
        inputs = tl.load(
            inputs_ptr + row[:, None] * SIZE + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
        )
        matrix = tl.load(
            matrix_ptr + feature[None, :] * SIZE + column[:, None],
            mask=is_feature[None, :] & inside[:, None],
            other=0.0,
        )
        # For float32 "ieee" means no rounding to TF32; to 16-bit types it means nothing.
        total = tl.dot(inputs, matrix, total, input_precision="ieee")
    return total


@triton.jit
def _gate_up_kernel(hidden_ptr, token_ptr, weights_ptr, ends_ptr, gate_up_ptr, activated_ptr, HIDDEN: tl.constexpr,
                    FFN: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Gate and up of one expert for some of its F features, and the weighted activation, for all rows of it."""
    expert = tl.program_id(1)
    begin, end = _rows_of_expert(ends_ptr, expert)
    # A gate and its up are neighbours, so that one product holds both, and its columns split in two.
    first_feature = tl.program_id(0) * (FEATURES // 2)
    inner = tl.arange(0, FEATURES)
    feature = first_feature + inner // 2
    matrix_ptr = gate_up_ptr + expert.to(tl.int64) * (2 * FFN * HIDDEN)
    out_feature = first_feature + tl.arange(0, FEATURES // 2)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < end
        if token_ptr is not None:
            source = tl.load(token_ptr + row, mask=is_row, other=0).to(tl.int64)
        else:
            source = row.to(tl.int64)
        gate_up = _product(
            hidden_ptr, source, is_row, matrix_ptr, feature + (inner % 2) * FFN, feature < FFN, HIDDEN, BLOCK
        )
        gate, up = tl.split(tl.reshape(gate_up, [ROWS, FEATURES // 2, 2]))
        weight = tl.load(weights_ptr + row, mask=is_row, other=0.0)
        value = gate * tl.sigmoid(gate) * up * weight[:, None]
        tl.store(
            activated_ptr + row.to(tl.int64)[:, None] * FFN + out_feature[None, :],
            value.to(activated_ptr.dtype.element_ty),
            mask=is_row[:, None] & (out_feature < FFN)[None, :],
        )


@triton.jit
def _down_kernel(activated_ptr, ends_ptr, down_ptr, out_ptr, HIDDEN: tl.constexpr, FFN: tl.constexpr,
                 ROWS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Some of the D outputs of one expert, for all rows of it."""
    expert = tl.program_id(1)
    begin, end = _rows_of_expert(ends_ptr, expert)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < HIDDEN
    matrix_ptr = down_ptr + expert.to(tl.int64) * (HIDDEN * FFN)
    for first in range(begin, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        is_row = row < end
        value = _product(activated_ptr, row, is_row, matrix_ptr, feature, is_feature, FFN, BLOCK)
        tl.store(
            out_ptr + row[:, None] * HIDDEN + feature[None, :],
            value.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & is_feature[None, :],
        )


def _sizes(most_rows: int, num_experts: int, num_features: int, size: int, dtype: torch.dtype) -> dict[str, int]:
    """How a product is cut: inputs and weight rows of a program, and how much of their length it takes at a time."""
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, triton.next_power_of_2(most_rows)))
    fills = num_experts * triton.cdiv(num_features, _MOST_FEATURES) >= _ENOUGH_PROGRAMS
    features = _MOST_FEATURES if fills else _FEWEST_FEATURES
    columns = _STEP_BYTES // ((rows + features) * dtype.itemsize)
    block = min(1 << (columns.bit_length() - 1), triton.next_power_of_2(size))
    return {"ROWS": rows, "FEATURES": features, "BLOCK": max(16, block), "num_warps": _NUM_WARPS, "num_stages": _STAGES}


def expert_rows(
    hidden_XD: Tensor,
    token_N: Tensor | None,
    weights_N: Tensor,
    ends_L: Tensor,
    gate_up_L2FD: Tensor,
    down_LDF: Tensor,
    *,
    most_rows: int | None = None,
) -> Tensor:
    """Return each pair's expert output times its routing weight: [N, D] in the inputs' dtype, in two launches.

    Gate, up, activation and routing weight are float32 until the activation is rounded, once. Rows beyond the last
    expert's end are left as they are found. Reads 6 x D x F bytes of bfloat16 weights per activated expert, once for
    every 16, 32 or 64 of its rows; inputs and activations are read again by every program, but from the cache.

    Args:
        hidden_XD: inputs, in the weights' dtype (bfloat16, float16 or float32).
        token_N: int32, which row is a pair's input; None where row n is that of pair n.
        weights_N: float32 routing weight of each pair.
        ends_L: int32, where each expert's rows end, as ``pairs_by_expert`` and a cumulative sum of counts have it.
        gate_up_L2FD: rows of weights, gate and then up.
        most_rows: the most rows that an expert can have, which sets how many share a reading of its weights; unless
            given, twice the mean over all experts. An expert with more is computed as exactly, reading more often.
    """
    num_experts, hidden_size, ffn_size = down_LDF.shape
    num_rows, dtype, device = len(weights_N), hidden_XD.dtype, hidden_XD.device
    assert gate_up_L2FD.is_contiguous() & down_LDF.is_contiguous(), "a copy of the weights would be the time itself"
    most_rows = triton.cdiv(2 * num_rows, num_experts) if most_rows is None else most_rows
    activated_NF = torch.empty(num_rows, ffn_size, dtype=dtype, device=device)
    out_ND = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
    if num_rows == 0:
        return out_ND
    sizes = _sizes(most_rows, num_experts, 2 * ffn_size, hidden_size, dtype)
    _gate_up_kernel[(triton.cdiv(2 * ffn_size, sizes["FEATURES"]), num_experts)](
        hidden_XD.contiguous(), token_N, weights_N.contiguous(), ends_L, gate_up_L2FD, activated_NF,
        HIDDEN=hidden_size, FFN=ffn_size, **sizes,
    )  # fmt: skip
    sizes = _sizes(most_rows, num_experts, hidden_size, ffn_size, dtype)
    _down_kernel[(triton.cdiv(hidden_size, sizes["FEATURES"]), num_experts)](
        activated_NF, ends_L, down_LDF, out_ND, HIDDEN=hidden_size, FFN=ffn_size, **sizes
    )
    return out_ND


# --- Tokens ------------------------------------------------------------------------------------------------


@triton.jit
def _combine_kernel(rows_ptr, place_ptr, out_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr,
                    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Some columns of one token's output. Its rows ascend with its experts: the next one is the least that is left."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_P)
    place = tl.load(place_ptr + token * NUM_EXPERTS + expert, mask=expert < NUM_EXPERTS, other=-1)
    left = tl.where(place >= 0, place, _NO_ROW)
    count = tl.sum((place >= 0).to(tl.int32), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    total = tl.zeros([COLUMNS], tl.float32)
    for _ in range(0, count, _SUMMED_ROWS):
        # Unrolled: where a row lies does not follow from the sum, so that their loads overlap.
        for _ in tl.static_range(_SUMMED_ROWS):
            row = tl.min(left, 0)
            left = tl.where(left == row, _NO_ROW, left)
            at = row.to(tl.int64) * HIDDEN + column
            total += tl.load(rows_ptr + at, mask=inside & (row != _NO_ROW), other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(out_ND: Tensor, place_TL: Tensor) -> Tensor:
    """Sum each token's rows in the order of experts, in float32: [T, D] in their dtype, in one launch.

    A token without pairs gets zeros. Reads the rows of pairs once, and T x L places of four bytes per block of columns.

    Args:
        out_ND: rows of pairs.
        place_TL: int32, as ``pairs_by_expert`` has it: -1, or a row, ascending along a token's experts.
    """
    num_tokens, num_experts = place_TL.shape
    hidden_size = out_ND.shape[1]
    out_TD = torch.empty(num_tokens, hidden_size, dtype=out_ND.dtype, device=out_ND.device)
    if num_tokens:
        columns = min(_SUMMED_COLUMNS, triton.next_power_of_2(hidden_size))
        # One warp: then a minimum over experts needs no barrier.
        _combine_kernel[(num_tokens, triton.cdiv(hidden_size, columns))](
            out_ND.contiguous(), place_TL.contiguous(), out_TD,
            NUM_EXPERTS=num_experts, EXPERTS_P=triton.next_power_of_2(num_experts), HIDDEN=hidden_size,
            COLUMNS=columns, num_warps=1,
        )  # fmt: skip
    return out_TD


def decode_experts(
    hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor
) -> Tensor:
    """Return the experts' weighted sum per token, [T, D] in the inputs' dtype, in four launches and with no sync.

    Any map will do: a token may take none of these experts or all of them. Device memory for T x L pairs is set
    aside (T x L x (D + F) values), but only rows of pairs are touched.

    Args:
        hidden_TD: inputs, in the weights' dtype (bfloat16, float16 or float32).
        map_TL: bool, which experts each token takes.
        weights_TL: float32 routing weights; those of other pairs are ignored.
        gate_up_L2FD: rows of weights, gate and then up.
    """
    num_tokens = len(hidden_TD)
    if num_tokens == 0:
        return torch.empty_like(hidden_TD)
    pairs = pairs_by_expert(map_TL, weights_TL)
    out_ND = expert_rows(
        hidden_TD, pairs.token_N, pairs.weights_N, pairs.ends_L, gate_up_L2FD, down_LDF, most_rows=num_tokens
    )
    return combine(out_ND, pairs.place_TL)
