"""What goes through a whole model at once: prompts of a prefill, or one new token of requests that decode.

*Prefill.* A rank's prompts are packed side by side, whatever their lengths, and each attends to itself alone. Of each
only the last token's logits are computed, as an engine does. *Decode.* Every request has ``context_length`` tokens in
Megatron-Core's static cache and adds one. What is cached is random: no time depends on it.

Token ids are random too: where a workload replays scores, nothing depends on them but the values.

Shapes: T = tokens of this rank, S = prompts, B = requests, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
