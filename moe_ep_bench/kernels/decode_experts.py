"""The experts of a decode step: each activated one's weights are read once, others not at all.

On CUDA Triton kernels do it (``decode_experts_triton``). On the CPU an expert after the other is a pair of matrix
products over its own rows, which is the same law: an expert without rows costs nothing.

Shapes: T = tokens, L = local experts, N = pairs, D = hidden size, F = expert FFN size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.kernels.swiglu import weighted_swiglu


def expert_rows(hidden_ND: Tensor, weights_N: Tensor, ends_L: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor) -> Tensor:
    """Return each row's expert output times its routing weight: [N, D] in the inputs' dtype.

    Args:
        hidden_ND: inputs, sorted by expert, in the weights' dtype (bfloat16, float16 or float32).
        weights_N: float32 routing weight of each row.
        ends_L: int32, where each expert's rows end.
        gate_up_L2FD: rows of weights, gate and then up.
    """
    if hidden_ND.is_cuda:
        # Triton comes with torch's CUDA builds, and with no other.
        from moe_ep_bench.kernels.decode_experts_triton import expert_rows as compiled

        return compiled(hidden_ND, weights_N, ends_L, gate_up_L2FD, down_LDF)
    out_ND, begin = torch.empty_like(hidden_ND), 0
    for expert, end in enumerate(ends_L.tolist()):
        if end > begin:
            rows = slice(begin, end)
            out_ND[rows] = _expert(hidden_ND[rows], weights_N[rows], gate_up_L2FD[expert], down_LDF[expert])
        begin = end
    return out_ND


def decode_experts(
    hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor
) -> Tensor:
    """Return the experts' weighted sum per token, summed in float32: [T, D] in the inputs' dtype.

    Args:
        map_TL: bool, which experts each token takes.
        weights_TL: float32 routing weights; those of other pairs are ignored.
        gate_up_L2FD: rows of weights, gate and then up.
    """
    if hidden_TD.is_cuda:
        from moe_ep_bench.kernels.decode_experts_triton import decode_experts as compiled

        return compiled(hidden_TD, map_TL, weights_TL, gate_up_L2FD, down_LDF)
    out_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32)
    for expert in map_TL.any(0).nonzero()[:, 0].tolist():
        token_N = map_TL[:, expert].nonzero()[:, 0]
        rows_ND = _expert(hidden_TD[token_N], weights_TL[token_N, expert], gate_up_L2FD[expert], down_LDF[expert])
        # A token takes an expert once: no row is added to twice.
        out_TD[token_N] += rows_ND
    return out_TD.to(hidden_TD.dtype)


def _expert(hidden_ND: Tensor, weights_N: Tensor, gate_up_2FD: Tensor, down_DF: Tensor) -> Tensor:
    gate_up_N2F = torch.nn.functional.linear(hidden_ND, gate_up_2FD)
    return torch.nn.functional.linear(weighted_swiglu(gate_up_N2F, weights_N), down_DF)
