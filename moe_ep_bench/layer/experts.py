"""Expert weights, seeded by global expert id, and the slow, obvious layer made of them.

With one seed for all ranks every rank would hold the same experts, and a token that reached the wrong rank would still
come back right. So a wrong dispatch shows, and any rank can make any expert again for the dense reference.

The reference shares nothing with the dispatcher. Each rank makes all experts again, one at a time, and applies them to
a few of its tokens; a case's output on these must be the weighted sum, whatever the routing was.

Shapes: T = tokens, N = tokens checked, E = experts, D = hidden size, F = expert FFN size; a gated expert is
``(silu(x @ gate_FD.T) * (x @ up_FD.T)) @ down_DF.T``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.models import ModelSpec

# Of hidden states, and of weights as they are made, by ``layer.dtype``. In FP8 experts round both ahead of their GEMMs.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_block": torch.bfloat16}

# Worst relative error of a token that is still rounding: sums of some thousand products. TF32 rounds to three bits more
# than bfloat16, an eighth (an H200 was off by 0.0013). E4M3 has three bits of mantissa and rounds a value by 2.6 %
# (root mean square). Operands of both GEMMs are rounded, and the activation multiplies two outputs of the first: 7 % of
# a token, of the worst one at small sizes 9 % (tests/test_fp8.py).
TOLERANCE = {"float32": 1e-4, "tf32": 4e-3, "bfloat16": 3e-2, "fp8_block": 0.12}

# Streams of random numbers that must not overlap: routed experts, shared experts, the gate; hidden states and policies.
ROUTED, SHARED, GATE = 0, 1, 2
HIDDEN, DRAWS, ROWS = 10, 11, 12
# Seeds in a whole model: layers, weights outside of MoE layers, token ids, cached keys and values.
DEPTH, REST, TOKENS, CACHE = 20, 21, 22, 23


class ExpertWeights(NamedTuple):
    gate_up_2FD: Tensor
    down_DF: Tensor


def seeded_generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator on ``device`` whose stream follows from the whole numbers in ``key``."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    return torch.Generator(device=device).manual_seed(seed)


def expert_weights(
    seed: int, stream: int, expert: int, hidden_size: int, ffn_size: int, device: torch.device, dtype: torch.dtype
) -> ExpertWeights:
    """Make one expert: normal weights of standard deviation 1/sqrt(fan-in), so that outputs keep their size."""
    generator = seeded_generator(device, seed, stream, expert)

    def normal(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return (values * columns**-0.5).to(dtype)

    return ExpertWeights(normal(2 * ffn_size, hidden_size), normal(hidden_size, ffn_size))


def fill_mlp_(mlp: Any, weights: ExpertWeights) -> None:
    """Copy weights into a Megatron-Core ``MLP`` (gate rows first, then up, as it splits them)."""
    mlp.linear_fc1.weight.data.copy_(weights.gate_up_2FD)
    mlp.linear_fc2.weight.data.copy_(weights.down_DF)


def apply_expert(x_TD: Tensor, weights: ExpertWeights) -> Tensor:
    """The expert as a formula, in float32 whatever the weights' dtype."""
    gate_TF, up_TF = (x_TD.float() @ weights.gate_up_2FD.float().T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_TF) * up_TF) @ weights.down_DF.float().T


class DenseReference:
    """Outputs of every expert for some of a rank's tokens.

    Args:
        hidden_ND: the tokens' inputs, in the layer's dtype.
        seed: the seed from which the layer's weights were made.
    """

    def __init__(self, model: ModelSpec, hidden_ND: Tensor, seed: int) -> None:
        device, dtype = hidden_ND.device, hidden_ND.dtype

        def output(stream: int, expert: int, ffn_size: int) -> Tensor:
            weights = expert_weights(seed, stream, expert, model.hidden_size, ffn_size, device, dtype)
            return apply_expert(hidden_ND, weights)

        routed = [output(ROUTED, expert, model.ffn_hidden_size) for expert in range(model.num_experts)]
        self._routed_END = torch.stack(routed)
        self._shared_ND = (
            output(SHARED, 0, model.shared_ffn_hidden_size)
            if model.shared_ffn_hidden_size
            else torch.zeros_like(self._routed_END[0])
        )

    def output(self, weights_NE: Tensor) -> Tensor:
        """The layer's output for these combine weights: float32 [N, D]."""
        return torch.einsum("ne,end->nd", weights_NE.float(), self._routed_END) + self._shared_ND

    def worst_error(self, output_ND: Tensor, weights_NE: Tensor) -> float:
        """The largest |output - reference| / |reference| of a token (0 where both vanish, inf where one does)."""
        if output_ND.shape[0] == 0:
            return 0.0
        expected_ND = self.output(weights_NE)
        off_N = (output_ND.float() - expected_ND).norm(dim=1)
        size_N = expected_ND.norm(dim=1)
        relative_N = torch.where(off_N == 0, 0.0, off_N / size_N)
        return float(relative_N.max())
