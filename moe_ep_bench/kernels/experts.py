"""Operations before, between and after the GEMMs of experts, each in one pass over memory.

torch composes these steps from operations that each read and write whole rows. On CUDA a Triton kernel does each;
elsewhere, and where Triton has no C compiler, the torch form below, which is also the kernel's oracle.

``first_rows``       the rows of the pairs that a policy chose, in a buffer for as many as it may choose
``weighted_swiglu``  the gated activation: silu, product and scaling read and write a row of F values about eleven times
                     over, where three reads and a write are needed
``row_sums``         each token's rows summed up, the end of a combine: ``embedding_bag`` moves 0.8 TB/s in bfloat16 on
                     an H200, a fifth of a copy
``decode_experts``   all of a decode step's experts: each activated one's weights are read once, others not at all

Shapes: T = tokens, L = local experts, N = rows (pairs, or tokens of an expert), D = hidden size, F = expert FFN size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.kernels import triton_lacks


def first_rows(rows_TD: Tensor, row_of_place_N: Tensor, count: Tensor) -> Tensor:
    """Gather ``rows_TD[row_of_place_N]``, of which only the first ``count`` rows are sure to be written: [N, D].

    Args:
        row_of_place_N: int64; those past ``count`` may be anything within.
        count: int64 scalar on the device of the rows, for which the host does not wait; at most N.
    """
    if rows_TD.is_cuda and not triton_lacks():
        from moe_ep_bench.kernels.experts_triton import first_rows as compiled

        return compiled(rows_TD, row_of_place_N, count)
    if rows_TD.is_cuda:
        return rows_TD.index_select(0, row_of_place_N)
    out_ND, num_rows = rows_TD.new_empty(len(row_of_place_N), rows_TD.shape[1]), int(count)
    torch.index_select(rows_TD, 0, row_of_place_N[:num_rows], out=out_ND[:num_rows])
    return out_ND


def weighted_swiglu(gate_up_N2F: Tensor, weights_N: Tensor) -> Tensor:
    """Return ``silu(gate) * up * weight`` in the dtype of ``gate_up_N2F``, computed in float32.

    Args:
        gate_up_N2F: contiguous rows of F gate values, then F up values.
        weights_N: float32 routing weight of each row.
    """
    if gate_up_N2F.is_cuda and not triton_lacks():
        from moe_ep_bench.kernels.experts_triton import weighted_swiglu as compiled

        return compiled(gate_up_N2F, weights_N)
    return weighted_swiglu_formula(gate_up_N2F, weights_N)


def weighted_swiglu_formula(gate_up_N2F: Tensor, weights_N: Tensor) -> Tensor:
    gate_NF, up_NF = gate_up_N2F.float().chunk(2, dim=1)
    return torch.nn.functional.silu(gate_NF).mul_(up_NF).mul_(weights_N.unsqueeze(1)).to(gate_up_N2F.dtype)


def row_sums(rows_ND: Tensor, row_of_place_N: Tensor, ends_T: Tensor) -> Tensor:
    """Sum every token's rows in the order of its places: [T, D]; a token without any gets zeros.

    Sums are float32, and rounded once to the dtype of the rows.

    Args:
        row_of_place_N: int64, the rows of token 0, then those of token 1, and so on.
        ends_T: int64, where each token's places end.
    """
    if rows_ND.is_cuda and not triton_lacks():
        from moe_ep_bench.kernels.experts_triton import row_sums as compiled

        return compiled(rows_ND, row_of_place_N, ends_T)
    return row_sums_by_bags(rows_ND, row_of_place_N, ends_T)


def row_sums_by_bags(rows_ND: Tensor, row_of_place_N: Tensor, ends_T: Tensor) -> Tensor:
    offsets = torch.cat([ends_T.new_zeros(1), ends_T])
    return torch.nn.functional.embedding_bag(row_of_place_N, rows_ND, offsets, mode="sum", include_last_offset=True)


def decode_experts(
    hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor
) -> Tensor:
    """Return the experts' weighted sum per token, summed in float32: [T, D] in the inputs' dtype.

    On the CPU an expert after the other is a pair of matrix products over its own rows; one without rows costs nothing.

    Args:
        hidden_TD: in the weights' dtype (bfloat16, float16 or float32).
        map_TL: bool, which experts each token takes.
        weights_TL: float32 routing weights; those of other pairs are ignored.
        gate_up_L2FD: rows of weights, gate and then up.
    """
    if hidden_TD.is_cuda:
        # Without Triton a layer refuses these experts (``layer.backend``).
        from moe_ep_bench.kernels.decode_experts_triton import decode_experts as compiled

        return compiled(hidden_TD, map_TL, weights_TL, gate_up_L2FD, down_LDF)
    out_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32)
    for expert in map_TL.any(0).nonzero()[:, 0].tolist():
        token_N = map_TL[:, expert].nonzero()[:, 0]
        gate_up_N2F = torch.nn.functional.linear(hidden_TD[token_N], gate_up_L2FD[expert])
        activated_NF = weighted_swiglu(gate_up_N2F, weights_TL[token_N, expert])
        # A token takes an expert once: no row is added to twice.
        out_TD[token_N] += torch.nn.functional.linear(activated_NF, down_LDF[expert])
    return out_TD.to(hidden_TD.dtype)
