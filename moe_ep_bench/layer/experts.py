"""Expert weights, seeded by global expert id.

With one seed for all ranks every rank would hold the same experts, and a token that reached the wrong rank would still
come back right. So a wrong dispatch shows, and any rank can make any expert again for the dense reference.

Shapes: D = hidden size, F = expert FFN size; a gated expert is
``(silu(x @ gate_FD.T) * (x @ up_FD.T)) @ down_DF.T``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Streams of random numbers that must not overlap: routed experts, shared experts, the gate; hidden states and policies.
ROUTED, SHARED, GATE = 0, 1, 2
HIDDEN, DRAWS = 10, 11
# Of a whole model: layers' seeds, weights outside of MoE layers, token ids, cached keys and values.
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
