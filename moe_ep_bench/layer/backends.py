"""The experts of a layer: our grouped ones, and one door to Megatron-Core's. All get the same weights.

Shapes: N = pairs that this rank's experts compute, sorted by expert, T = tokens of all ranks, L = local experts,
D = hidden size, F = expert FFN size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.kernels.experts import decode_experts, weighted_swiglu
from moe_ep_bench.layer.experts import ExpertWeights, fill_mlp_
from moe_ep_bench.layer.megatron import TransformerConfig, expert_submodule
from moe_ep_bench.layer.parts import Parts


class GroupedExperts(torch.nn.Module):
    """All local experts in two grouped GEMMs with the gated activation between them.

    Megatron-Core builds it in the place of its own experts. The routing weight scales the
    activation, as ``SequentialMLP`` has it, so that combining is a plain sum.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: Any = None, **_: Any) -> None:
        super().__init__()
        ffn_size, hidden_size = config.moe_ffn_hidden_size, config.hidden_size
        self.num_local_experts = num_local_experts
        # Rows are output features, as in a linear layer: the layout in which the GEMM reads along D.
        self.gate_up_L2FD = _weight(config, num_local_experts, 2 * ffn_size, hidden_size)
        self.down_LDF = _weight(config, num_local_experts, hidden_size, ffn_size)

    def forward(self, hidden_ND: Tensor, counts_L: Tensor, weights_N: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs [N, D], each row scaled by its routing weight, and no bias.

        Args:
            hidden_ND: inputs, sorted by local expert.
            counts_L: rows of each local expert, on any device.
            weights_N: float32 routing weight of each row.
        """
        if hidden_ND.shape[0] == 0:
            return hidden_ND, None
        ends_L = counts_L.cumsum(0).to(device=hidden_ND.device, dtype=torch.int32, non_blocking=True)
        gate_up_N2F = torch.nn.functional.grouped_mm(hidden_ND, self.gate_up_L2FD.transpose(1, 2), offs=ends_L)
        activated_NF = weighted_swiglu(gate_up_N2F, weights_N)
        return torch.nn.functional.grouped_mm(activated_NF, self.down_LDF.transpose(1, 2), offs=ends_L), None


class DecodeExperts(GroupedExperts):
    """The same experts, of all tokens by a map: the weights of activated ones are read once.

    Nothing is permuted, and no shape follows from the routing.
    """

    def forward(self, hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor) -> tuple[Tensor, None]:
        """Return the weighted sum of each token's local experts, [T, D], and no bias.

        Args:
            hidden_TD: all tokens.
            map_TL: bool, which local experts each takes.
            weights_TL: float32 routing weights.
        """
        return decode_experts(hidden_TD, map_TL, weights_TL, self.gate_up_L2FD, self.down_LDF), None


def _weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    # On CUDA Megatron-Core's own modules are born on the device too.
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device), requires_grad=False)


def experts_submodule(parts: Parts, num_experts: int) -> Any:
    """What Megatron-Core is to build as the experts of an MoE layer."""
    if parts.experts == "grouped":
        return GroupedExperts
    if parts.experts == "decode":
        return DecodeExperts
    return expert_submodule(num_experts, use_te=parts.experts == "te")


def fill_experts_(experts: Any, weights: Iterable[ExpertWeights]) -> None:
    """Copy the local experts' weights, in order, into whichever backend this is."""
    for index, expert in enumerate(weights):
        if isinstance(experts, GroupedExperts):
            experts.gate_up_L2FD[index].copy_(expert.gate_up_2FD)
            experts.down_LDF[index].copy_(expert.down_DF)
        elif hasattr(experts, "local_experts"):
            fill_mlp_(experts.local_experts[index], expert)
        else:  # TEGroupedMLP: grouped linear layers hold one parameter per expert
            getattr(experts.linear_fc1, f"weight{index}").data.copy_(expert.gate_up_2FD)
            getattr(experts.linear_fc2, f"weight{index}").data.copy_(expert.down_DF)
