"""Sums of each token's rows as a Triton kernel: every row is read once and every sum written once.

Shapes: N = rows, T = tokens, D = columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_COLUMNS = 1024


@triton.jit
def _kernel(rows_ptr, row_of_place_ptr, ends_ptr, out_ptr, num_columns, COLUMNS: tl.constexpr):
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
    """See ``row_sums.row_sums``."""
    num_columns = rows_ND.shape[1]
    out_TD = torch.empty(len(ends_T), num_columns, dtype=rows_ND.dtype, device=rows_ND.device)
    if len(ends_T):
        columns = min(_MOST_COLUMNS, triton.next_power_of_2(num_columns))
        grid = (len(ends_T), triton.cdiv(num_columns, columns))
        _kernel[grid](
            rows_ND.contiguous(), row_of_place_N.contiguous(), ends_T.contiguous(), out_TD, num_columns, COLUMNS=columns
        )
    return out_TD
