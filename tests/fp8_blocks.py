"""Experts in blocks of FP8, computed slowly by torch: what Transformer Engine's GEMMs come to, wherever tests run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
from torch import Tensor

from moe_ep_bench.layer import megatron, stack
from moe_ep_bench.layer.components import GroupedExperts
from moe_ep_bench.layer.experts import ExpertWeights

BLOCK = 128


def in_blocks(values: Tensor, rows: int) -> Tensor:
    """What E4M3 keeps of a matrix whose blocks of ``rows`` x 128 each have a power of two as scale: float32.

    The scale is the largest with which the block's largest value stays below E4M3's, 448.
    """
    shape, values = values.shape, values.float()
    blocks = values.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))  # [blocks, rows, blocks, 128]
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-30)
    scale = torch.exp2((448 / largest).log2().floor())
    return ((blocks * scale).to(torch.float8_e4m3fn).float() / scale).reshape(shape)


def expert_in_blocks(hidden_ND: Tensor, weights: ExpertWeights, weights_N: Tensor) -> Tensor:
    """One expert's rows, scaled by their routing weights ahead of the second GEMM: bfloat16 between GEMMs."""
    gate_up_N2F = (in_blocks(hidden_ND, 1) @ in_blocks(weights.gate_up_2FD, BLOCK).T).bfloat16()
    gate_NF, up_NF = gate_up_N2F.float().chunk(2, dim=-1)
    activated_NF = (torch.nn.functional.silu(gate_NF) * up_NF * weights_N.unsqueeze(1)).bfloat16()
    return (in_blocks(activated_NF, 1) @ in_blocks(weights.down_DF, BLOCK).T).bfloat16()


def expert_in_tf32(hidden_ND: Tensor, weights: ExpertWeights, weights_N: Tensor) -> Tensor:
    """The same of float32, of whose operands tensor cores read ten bits of mantissa."""

    def read(values: Tensor) -> Tensor:
        return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)

    gate_NF, up_NF = (read(hidden_ND) @ read(weights.gate_up_2FD).T).chunk(2, dim=-1)
    return read(torch.nn.functional.silu(gate_NF) * up_NF * weights_N.unsqueeze(1)) @ read(weights.down_DF).T


class BlockExperts(GroupedExperts):
    """Stands for ``TEGroupedMLP``: in FP8 under the context alone. Notes whether each run was."""

    is_in_fp8 = False
    ran_in_fp8: list[bool] = []  # noqa: RUF012 - of all layers that a test builds

    def __init__(self, num_local_experts: int, config: Any, *others: Any, **more: Any) -> None:
        super().__init__(num_local_experts, config, *others, **more)
        self.config = config

    def forward(self, hidden_ND: Tensor, counts_L: Tensor, weights_N: Tensor) -> tuple[Tensor, None]:
        self.ran_in_fp8.append(BlockExperts.is_in_fp8)
        parts, ends = [], counts_L.cumsum(0).tolist()
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            weights = ExpertWeights(self.gate_up_L2FD[expert], self.down_LDF[expert])
            parts.append(expert_in_blocks(hidden_ND[begin:end], weights, weights_N[begin:end]))
        return torch.cat(parts), None


@contextlib.contextmanager
def _context(config: Any) -> Iterator[None]:
    assert (config.fp8, config.fp8_recipe) == ("e4m3", "blockwise")
    BlockExperts.is_in_fp8 = True
    try:
        yield
    finally:
        BlockExperts.is_in_fp8 = False


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Build and run layers whose experts compute in FP8, without Transformer Engine."""
    BlockExperts.ran_in_fp8.clear()
    with (
        # From 2.6 on shared experts are looked at for its layers.
        mock.patch("megatron.core.utils.get_te_version", return_value=Version("2.5")),
        mock.patch.object(megatron, "get_fp8_context", _context),
        mock.patch.object(stack, "experts_submodule", return_value=BlockExperts),
    ):
        yield
