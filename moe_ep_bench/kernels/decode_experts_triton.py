"""The experts of a decode step in Triton: the weights of an activated expert are read once, others not at all.

With a few tokens per expert an MoE layer's time is that of reading weights, so it is linear in the activated experts
(OEA, arXiv 2511.02237, section 2), whatever the number of tokens. A grouped GEMM made for many rows blurs that law:
it plans for empty experts too, and its tiles are wide. Here a program stands for some rows of one expert's weight
matrix and reads them from end to end, while the few inputs of that expert stay in the cache; a program of an expert
without tokens looks at its column of the map and ends. A layer is three launches: gate-up with the activation, down,
and the sum per token. Each finds its rows in the map by itself, and lets the cache fetch its first weights meanwhile;
down and sum begin while the launch before them ends (programmatic dependent launch, on sm_90). None waits for the host
and no shape follows from the routing, so that a captured CUDA graph may be replayed with another map. Sums have a fixed
order: equal inputs give equal bits.

Shapes: T = tokens, L = local experts, N = T x L rows for pairs, D = hidden size, F = expert FFN size. An expert is
``(silu(x @ gate_FD.T) * (x @ up_FD.T)) @ down_DF.T``.
"""

from __future__ import annotations

import functools
from typing import Any

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
# Tokens of an expert's column of the map that a program reads together.
_MOST_TOKENS = 256
# Of an output: values that a warp of ``combine`` sums, 16 bytes of bfloat16 per thread, and rows under way together.
_SUMMED_COLUMNS = 256
_SUMMED_ROWS = tl.constexpr(8)


# --- Rows --------------------------------------------------------------------------------------------------


@triton.jit
def _takes(map_ptr, token, expert, num_tokens, NUM_EXPERTS: tl.constexpr):
    """Which of these tokens take an expert: int32, 0 or 1."""
    at = token.to(tl.int64) * NUM_EXPERTS + expert
    return (tl.load(map_ptr + at, mask=token < num_tokens, other=0) != 0).to(tl.int32)


@triton.jit
def _rows_of_expert(map_ptr, expert, num_tokens, NUM_EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Begin and end of an expert's rows: T rows are reserved for each."""
    begin = expert * num_tokens
    end = begin
    for first in range(0, num_tokens, TOKENS):
        end += tl.sum(_takes(map_ptr, first + tl.arange(0, TOKENS), expert, num_tokens, NUM_EXPERTS), 0)
    return begin, end


@triton.jit
def _inputs_of_rows(map_ptr, row, begin, expert, num_tokens, NUM_EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """The input of each of an expert's rows: the tokens that take the expert, in order."""
    source = row * 0
    before = begin
    for first in range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        takes = _takes(map_ptr, token, expert, num_tokens, NUM_EXPERTS)
        place = before + tl.cumsum(takes, 0) - takes
        is_here = (place[None, :] == row[:, None]) & (takes != 0)[None, :]
        source += tl.sum(tl.where(is_here, token[None, :], 0), 1)
        before += tl.sum(takes, 0)
    return source.to(tl.int64)


# --- Experts -----------------------------------------------------------------------------------------------


@triton.jit
def _ask_for(matrix_ptr, feature, is_feature, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Let the cache fetch the first columns of rows of a matrix; nothing waits for them here."""
    line: tl.constexpr = 1024 // matrix_ptr.dtype.element_ty.primitive_bitwidth  # values in 128 bytes
    lines: tl.constexpr = COLUMNS // line if line < COLUMNS else 1
    column = tl.arange(0, lines) * line
    at = tl.where(is_feature, feature, 0)[:, None] * SIZE + tl.where(column < SIZE, column, 0)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(matrix_ptr + at).to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


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


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(hidden_ptr, map_ptr, weights_ptr, gate_up_ptr, activated_ptr, num_tokens,
                    NUM_EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, FFN: tl.constexpr, TOKENS: tl.constexpr,
                    OVERLAPS: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Gate and up of one expert for some of its F features, and the weighted activation, for all rows of it."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(1)
    begin, end = _rows_of_expert(map_ptr, expert, num_tokens, NUM_EXPERTS, TOKENS)
    # A gate and its up are neighbours, so that one product holds both, and its columns split in two.
    first_feature = tl.program_id(0) * (FEATURES // 2)
    inner = tl.arange(0, FEATURES)
    feature = first_feature + inner // 2
    is_feature = feature < FFN
    feature += (inner % 2) * FFN
    matrix_ptr = gate_up_ptr + expert.to(tl.int64) * (2 * FFN * HIDDEN)
    out_feature = first_feature + tl.arange(0, FEATURES // 2)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < end
        if OVERLAPS:
            _ask_for(matrix_ptr, feature, is_feature, HIDDEN, 2 * BLOCK)
        source = _inputs_of_rows(map_ptr, row, begin, expert, num_tokens, NUM_EXPERTS, TOKENS)
        gate_up = _product(hidden_ptr, source, is_row, matrix_ptr, feature, is_feature, HIDDEN, BLOCK)
        gate, up = tl.split(tl.reshape(gate_up, [ROWS, FEATURES // 2, 2]))
        weight = tl.load(weights_ptr + source * NUM_EXPERTS + expert, mask=is_row, other=0.0)
        value = gate * tl.sigmoid(gate) * up * weight[:, None]
        tl.store(
            activated_ptr + row.to(tl.int64)[:, None] * FFN + out_feature[None, :],
            value.to(activated_ptr.dtype.element_ty),
            mask=is_row[:, None] & (out_feature < FFN)[None, :],
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(activated_ptr, map_ptr, down_ptr, out_ptr, num_tokens, NUM_EXPERTS: tl.constexpr,
                 HIDDEN: tl.constexpr, FFN: tl.constexpr, TOKENS: tl.constexpr, OVERLAPS: tl.constexpr,
                 ROWS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Some of the D outputs of one expert, for all rows of it, each in the row of its token."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(1)
    begin, end = _rows_of_expert(map_ptr, expert, num_tokens, NUM_EXPERTS, TOKENS)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < HIDDEN
    matrix_ptr = down_ptr + expert.to(tl.int64) * (HIDDEN * FFN)
    if OVERLAPS:  # noqa: SIM102 - this is the compiler's, the other the program's
        # Not in the loop: where one step holds all of F, Triton pipelines this loop, and would load ahead of the wait.
        if begin < end:
            _ask_for(matrix_ptr, feature, is_feature, FFN, 2 * BLOCK)
            tl.extra.cuda.gdc_wait()  # for the activations; weights and map were there before
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < end
        value = _product(activated_ptr, row.to(tl.int64), is_row, matrix_ptr, feature, is_feature, FFN, BLOCK)
        to = _inputs_of_rows(map_ptr, row, begin, expert, num_tokens, NUM_EXPERTS, TOKENS) + begin
        tl.store(
            out_ptr + to[:, None] * HIDDEN + feature[None, :],
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


@functools.cache
def _overlaps() -> dict[str, Any]:
    """Launch options that let a launch begin before the one before it has ended: from sm_90 on, where Triton can."""
    can = (
        not triton.knobs.runtime.interpret
        and hasattr(tl.extra.cuda, "gdc_wait")
        and triton.runtime.driver.active.get_current_target().arch >= 90
    )
    return {"OVERLAPS": True, "launch_pdl": True} if can else {"OVERLAPS": False}


def expert_rows(
    hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor
) -> Tensor:
    """Every pair's expert output times its routing weight, in two launches: [N, D].

    A pair's row is its expert times T plus its token; rows of no pair are left as they are found. Gate, up, activation
    and routing weight are float32 until the activation is rounded, once. Reads 6 x D x F bytes of bfloat16 weights per
    activated expert, once for every 16, 32 or 64 of its rows; inputs and activations are read again by every program,
    but from the cache.
    """
    num_experts, hidden_size, ffn_size = down_LDF.shape
    num_tokens, num_rows, dtype, device = len(hidden_TD), weights_TL.numel(), hidden_TD.dtype, hidden_TD.device
    assert gate_up_L2FD.is_contiguous() & down_LDF.is_contiguous(), "a copy of the weights would be the time itself"
    activated_NF = torch.empty(num_rows, ffn_size, dtype=dtype, device=device)
    out_ND = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
    if num_rows == 0:
        return out_ND
    map_bytes, overlaps = as_bytes(map_TL), _overlaps()
    shape = {
        "NUM_EXPERTS": num_experts,
        "HIDDEN": hidden_size,
        "FFN": ffn_size,
        "TOKENS": min(_MOST_TOKENS, max(16, triton.next_power_of_2(num_tokens))),
    }
    sizes = _sizes(num_tokens, num_experts, 2 * ffn_size, hidden_size, dtype)
    # The operation before is no launch of ours, and is over when this one begins.
    _gate_up_kernel[(triton.cdiv(2 * ffn_size, sizes["FEATURES"]), num_experts)](
        hidden_TD.contiguous(), map_bytes, weights_TL.contiguous(), gate_up_L2FD, activated_NF, num_tokens,
        OVERLAPS=overlaps["OVERLAPS"], **shape, **sizes,
    )  # fmt: skip
    sizes = _sizes(num_tokens, num_experts, hidden_size, ffn_size, dtype)
    _down_kernel[(triton.cdiv(hidden_size, sizes["FEATURES"]), num_experts)](
        activated_NF, map_bytes, down_LDF, out_ND, num_tokens, **overlaps, **shape, **sizes
    )
    return out_ND


# --- Tokens ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(rows_ptr, map_ptr, out_ptr, num_tokens, NUM_EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr,
                    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr):  # fmt: skip
    """Some columns of one token's output: the rows of its experts, one after another."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_P)
    takes = tl.load(map_ptr + token * NUM_EXPERTS + expert, mask=expert < NUM_EXPERTS, other=0) != 0
    left = tl.where(takes, expert, NUM_EXPERTS)
    count = tl.sum(takes.to(tl.int32), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    total = tl.zeros([COLUMNS], tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    for _ in range(0, count, _SUMMED_ROWS):
        # Unrolled: where a row lies does not follow from the sum, so that their loads overlap.
        for _ in tl.static_range(_SUMMED_ROWS):
            next_expert = tl.min(left, 0)
            left = tl.where(left == next_expert, NUM_EXPERTS, left)
            at = (next_expert.to(tl.int64) * num_tokens + token) * HIDDEN + column
            total += tl.load(rows_ptr + at, mask=inside & (next_expert < NUM_EXPERTS), other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(rows_ND: Tensor, map_TL: Tensor) -> Tensor:
    """Sum each token's rows in the order of experts, in float32: [T, D] in their dtype, in one launch.

    A token without pairs gets zeros. Reads the rows of pairs once, and T x L bytes per block of columns.

    Args:
        rows_ND: N = L x T, the row of token t and expert e being e * T + t; those of no pair may hold anything.
    """
    num_tokens, num_experts = map_TL.shape
    hidden_size = rows_ND.shape[1]
    out_TD = torch.empty(num_tokens, hidden_size, dtype=rows_ND.dtype, device=rows_ND.device)
    if num_tokens:
        columns = min(_SUMMED_COLUMNS, triton.next_power_of_2(hidden_size))
        # One warp: then a minimum over experts needs no barrier.
        _combine_kernel[(num_tokens, triton.cdiv(hidden_size, columns))](
            rows_ND.contiguous(), as_bytes(map_TL), out_TD, num_tokens,
            NUM_EXPERTS=num_experts, EXPERTS_P=triton.next_power_of_2(num_experts), HIDDEN=hidden_size,
            COLUMNS=columns, num_warps=1, **_overlaps(),
        )  # fmt: skip
    return out_TD


def decode_experts(
    hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor
) -> Tensor:
    """``experts.decode_experts`` in three launches and with no sync.

    Any map will do: a token may take none of these experts or all of them. Device memory for T x L pairs is set
    aside (T x L x (D + F) values), but only rows of pairs are touched.
    """
    # A slice, among several ranks. ``combine`` reads it while the launch before it ends, which must not be its copy.
    map_TL = map_TL.contiguous()
    return combine(expert_rows(hidden_TD, map_TL, weights_TL, gate_up_L2FD, down_LDF), map_TL)
