"""The gated activation between an expert's two GEMMs, in one pass over memory.

As torch operations silu, product, scaling by the routing weight and rounding read and write a row
of F values about eleven times over; what is computed is three reads and a write. On CUDA one Triton
kernel does it; elsewhere, and where Triton has no C compiler, the formula below, which is also the kernel's oracle.

Shapes: N = pairs (rows), F = expert FFN size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.kernels.toolchain import triton_lacks


def weighted_swiglu(gate_up_N2F: Tensor, weights_N: Tensor) -> Tensor:
    """Return ``silu(gate) * up * weight`` in the dtype of ``gate_up_N2F``, computed in float32.

    Args:
        gate_up_N2F: contiguous rows of F gate values, then F up values.
        weights_N: float32 routing weight of each row.
    """
    if gate_up_N2F.is_cuda and not triton_lacks():
        from moe_ep_bench.kernels.swiglu_triton import weighted_swiglu as compiled

        return compiled(gate_up_N2F, weights_N)
    return weighted_swiglu_formula(gate_up_N2F, weights_N)


def weighted_swiglu_formula(gate_up_N2F: Tensor, weights_N: Tensor) -> Tensor:
    gate_NF, up_NF = gate_up_N2F.float().chunk(2, dim=1)
    return torch.nn.functional.silu(gate_NF).mul_(up_NF).mul_(weights_N.unsqueeze(1)).to(gate_up_N2F.dtype)
