"""``first_rows``, ``weighted_swiglu`` and ``row_sums`` of ``experts`` in Triton: a value is read once and written once.

Shapes: N = pairs (rows), T = tokens, F = expert FFN size, D = columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_COLUMNS = 1024
# A copy computes nothing: two loads of 16 bytes a thread are under way at once.
_MOST_COPIED_COLUMNS = 2048


@triton.jit
def _first_rows_kernel(rows_ptr, row_of_place_ptr, count_ptr, out_ptr, num_columns, COLUMNS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    if place < tl.load(count_ptr):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < num_columns
        row = tl.load(row_of_place_ptr + place)
        values = tl.load(rows_ptr + row * num_columns + column, mask=inside)
        tl.store(out_ptr + place * num_columns + column, values, mask=inside)


def first_rows(rows_TD: Tensor, row_of_place_N: Tensor, count: Tensor) -> Tensor:
    """See ``experts.first_rows``."""
    num_columns = rows_TD.shape[1]
    out_ND = torch.empty(len(row_of_place_N), num_columns, dtype=rows_TD.dtype, device=rows_TD.device)
    if len(out_ND):
        columns = min(_MOST_COPIED_COLUMNS, triton.next_power_of_2(num_columns))
        grid = (len(out_ND), triton.cdiv(num_columns, columns))
        _first_rows_kernel[grid](
            rows_TD.contiguous(), row_of_place_N.contiguous(), count, out_ND, num_columns, COLUMNS=columns
        )
    return out_ND


@triton.jit
def _swiglu_kernel(gate_up_ptr, weights_ptr, out_ptr, ffn_size, COLUMNS: tl.constexpr):
    # Rows times 2F may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < ffn_size
    gate = tl.load(gate_up_ptr + row * 2 * ffn_size + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * ffn_size + ffn_size + column, mask=inside).to(tl.float32)
    weight = tl.load(weights_ptr + row)
    value = gate * tl.sigmoid(gate) * up * weight
    tl.store(out_ptr + row * ffn_size + column, value.to(out_ptr.dtype.element_ty), mask=inside)


def weighted_swiglu(gate_up_N2F: Tensor, weights_N: Tensor) -> Tensor:
    """See ``experts.weighted_swiglu``."""
    num_rows, width = gate_up_N2F.shape
    ffn_size = width // 2
    out_NF = torch.empty(num_rows, ffn_size, dtype=gate_up_N2F.dtype, device=gate_up_N2F.device)
    if num_rows:
        columns = min(_MOST_COLUMNS, triton.next_power_of_2(ffn_size))
        grid = (num_rows, triton.cdiv(ffn_size, columns))
        _swiglu_kernel[grid](gate_up_N2F.contiguous(), weights_N.contiguous(), out_NF, ffn_size, COLUMNS=columns)
    return out_NF


@triton.jit
def _row_sums_kernel(rows_ptr, row_of_place_ptr, ends_ptr, out_ptr, num_columns, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    begin = tl.load(ends_ptr + token - 1, mask=token > 0, other=0)
    total = tl.zeros([COLUMNS], tl.float32)
    for place in range(begin, tl.load(ends_ptr + token)):
        row = tl.load(row_of_place_ptr + place)
        total += tl.load(rows_ptr + row * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_columns + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def row_sums(rows_ND: Tensor, row_of_place_N: Tensor, ends_T: Tensor) -> Tensor:
    """See ``experts.row_sums``."""
    num_columns = rows_ND.shape[1]
    out_TD = torch.empty(len(ends_T), num_columns, dtype=rows_ND.dtype, device=rows_ND.device)
    if len(ends_T):
        columns = min(_MOST_COLUMNS, triton.next_power_of_2(num_columns))
        grid = (len(ends_T), triton.cdiv(num_columns, columns))
        _row_sums_kernel[grid](
            rows_ND.contiguous(), row_of_place_N.contiguous(), ends_T.contiguous(), out_TD, num_columns, COLUMNS=columns
        )
    return out_TD
