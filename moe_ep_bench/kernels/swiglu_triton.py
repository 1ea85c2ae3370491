"""``weighted_swiglu`` as a Triton kernel: every value is read once and written once.

Shapes: N = pairs (rows), F = expert FFN size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_COLUMNS = 1024


@triton.jit
def _kernel(gate_up_ptr, weights_ptr, out_ptr, ffn_size, COLUMNS: tl.constexpr):
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
        _kernel[grid](gate_up_N2F.contiguous(), weights_N.contiguous(), out_NF, ffn_size, COLUMNS=columns)
    return out_NF
