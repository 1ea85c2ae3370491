"""Core attention by torch's ``scaled_dot_product_attention``.

Without Transformer Engine, Megatron-Core's own writes the scores of all pairs of tokens to memory, and supports neither
packed prompts nor latent attention's unequal heads. Projections, norms, rotary positions and the cache stay its own.
torch selects a kernel by itself (a profiler shows which).

Shapes: T = tokens of all prompts, Q = queries, S = keys, B = requests, H = heads, G = key-value heads, D = head size.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_ep_bench.errors import UserError


class SdpaAttention(torch.nn.Module):
    """Causal attention over whole prompts, or of one new token per request over its cache.

    Built and called with Megatron-Core's arguments; those without effect at inference are ignored.
    """

    def __init__(
        self, config: Any, *arguments: Any, softmax_scale: float | None = None, k_channels: int | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend. Queries [Q, B, H, D] give [Q, B, H*D]; with ``packed_seq_params`` [T, H, D] give [T, H*D].

        Raises:
            ValueError: more than one new token per request meets a cache.
        """
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            return self._packed(query, key, value, lengths).flatten(1)
        if query.shape[0] not in (1, key.shape[0]):
            raise UserError(f"attention: expected one new token per request, got {query.shape[0]}")
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return self._attend(*heads).permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, lengths: list[int]) -> Tensor:
        outputs, begin = [], 0
        for length, neighbours in itertools.groupby(lengths):  # Prompts of one length are one call.
            number = len(list(neighbours))
            rows = slice(begin, begin + number * length)
            heads = (
                tensor[rows].unflatten(0, (number, length)).transpose(1, 2)
                for tensor in (query_THD, key_TGD, value_TGD)
            )
            outputs.append(self._attend(*heads).transpose(1, 2).flatten(0, 1))
            begin = rows.stop
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _attend(self, query_BHQD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            query_BHQD,
            key_BGSD,
            value_BGSD,
            is_causal=query_BHQD.shape[2] > 1,
            scale=self.scale,
            enable_gqa=query_BHQD.shape[1] != key_BGSD.shape[1],
        )
