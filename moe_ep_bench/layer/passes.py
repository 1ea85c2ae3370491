"""Batches of a whole model: prompts of a prefill, or one new token of each request that decodes.

*Prefill.* A rank's prompts are packed side by side, whatever their lengths, and each attends to itself alone. Of each
only the last token's logits are computed, as an engine does. *Decode.* Every request has ``context_length`` tokens in
Megatron-Core's static cache and adds one. What is cached is random: no time depends on it.

Token ids are random too: where a workload replays scores, nothing depends on them but the values.

*Core attention* is torch's ``scaled_dot_product_attention``, whose kernel torch selects by itself (a profiler shows
which). Without Transformer Engine, Megatron-Core's own writes the scores of all pairs of tokens to memory, and supports
neither packed prompts nor latent attention's unequal heads. Projections, norms, rotary positions and the cache stay its
own.

Shapes: T = tokens of this rank, S = prompts (keys in attention), B = requests, V = vocabulary, Q = queries, H = heads,
G = key-value heads, D = head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_ep_bench.errors import UserError
from moe_ep_bench.layer.experts import CACHE, seeded_generator
from moe_ep_bench.layer.megatron import GPTModel, PackedSeqParams, StaticInferenceContext

# A batch of this rank goes through a model: logits [S, V] of each prompt's last token, or [B, V] of requests' new ones.
Pass = Callable[[GPTModel], Tensor]


class Prefill:
    """Prompts ``ids_T``, one after the other, of these lengths (at least one)."""

    def __init__(self, ids_T: Tensor, lengths: Sequence[int]) -> None:
        assert sum(lengths) == len(ids_T) > 0
        device = ids_T.device
        # On the host, where rotary positions and attention read them.
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        longest = max(lengths)
        self._inputs = {
            "input_ids": ids_T.unsqueeze(0),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]).to(device).unsqueeze(0),
            "attention_mask": None,
            "packed_seq_params": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
        }
        self._last_S = (bounds[1:].long() - 1).to(device)

    def __call__(self, gpt: GPTModel) -> Tensor:
        keep = gpt.output_layer.register_forward_pre_hook(lambda module, inputs: (inputs[0][self._last_S], *inputs[1:]))
        try:
            return gpt(**self._inputs).flatten(0, 1)
        finally:
            keep.remove()


class KeyValueCache:
    """Keys and values of ``context_length`` earlier tokens of up to ``max_requests`` requests, in every layer."""

    def __init__(self, max_requests: int, context_length: int) -> None:
        self.context_length = context_length
        self.context = StaticInferenceContext(max_requests, context_length + 1)

    def fill_(self, gpt: GPTModel, device: torch.device, seed: int) -> None:
        """Have Megatron-Core lay out its buffers, and fill them with random numbers."""
        ids_B = torch.zeros(self.context.max_batch_size, dtype=torch.int64, device=device)
        Decode(ids_B, self)(gpt)
        for layer, tensors in self.context.key_value_memory_dict.items():
            for number, tensor in enumerate(tensors):
                tensor.normal_(generator=seeded_generator(device, seed, CACHE, layer, number))


class Decode:
    """The next token of each of some requests, ``ids_B``."""

    def __init__(self, ids_B: Tensor, cache: KeyValueCache) -> None:
        self._cache = cache
        self._inputs: dict[str, Any] = {
            "input_ids": ids_B.unsqueeze(1),
            "position_ids": torch.full_like(ids_B, cache.context_length).unsqueeze(1),
            "attention_mask": None,
            "runtime_gather_output": True,
        }

    def __call__(self, gpt: GPTModel) -> Tensor:
        context = self._cache.context
        context.sequence_len_offset = self._cache.context_length
        context.enable_decode_mode()
        return gpt(**self._inputs, inference_context=context)[:, -1]


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
