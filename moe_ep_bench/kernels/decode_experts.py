"""The experts of a decode step: each activated one's weights are read once, others not at all.

On CUDA Triton kernels do it (``decode_experts_triton``). On the CPU an expert after the other is a pair of matrix
products over its own rows, which is the same law: an expert without rows costs nothing.

Shapes: T = tokens, L = local experts, N = tokens of an expert, D = hidden size, F = expert FFN size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.kernels.swiglu import weighted_swiglu


def decode_experts(
    hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor
) -> Tensor:
    """Return the experts' weighted sum per token, summed in float32: [T, D] in the inputs' dtype.

    Args:
        hidden_TD: in the weights' dtype (bfloat16, float16 or float32).
        map_TL: bool, which experts each token takes.
        weights_TL: float32 routing weights; those of other pairs are ignored.
        gate_up_L2FD: rows of weights, gate and then up.
    """
    if hidden_TD.is_cuda:
        # Triton comes with torch's CUDA builds, and with no other.
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
