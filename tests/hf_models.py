"""Tiny language models of every family, built from configs: nothing is downloaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

VOCABULARY = 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # else every expert scores nearly the same
}
_QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
_LATENT = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen2_moe": (Qwen2MoeConfig, {**_QWEN, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": (Qwen3MoeConfig, {**_QWEN, "norm_topk_prob": True, "head_dim": 16}),
    "deepseek_v2": (
        DeepseekV2Config,
        {
            **_LATENT,
            "num_experts_per_tok": 3,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {**_LATENT, "num_experts_per_tok": 4, "q_lora_rank": 8, "routed_scaling_factor": 2.5},
    ),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 8}),
}
FAMILIES = tuple(_CONFIGS)
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def build(config: PreTrainedConfig, experts: str = "grouped_mm", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=experts, dtype=dtype).eval()
    model.requires_grad_(False)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return model


@functools.cache
def tiny(family: str, experts: str = "grouped_mm", dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model of a family with seeded random weights; the same one whenever it is asked for."""
    kind, own = _CONFIGS[family]
    values = {**_COMMON, **own, **fields}
    if family == "gpt_oss":
        values["max_position_embeddings"] = 131072  # what its RoPE scaling is made for
    return build(kind(**values), experts, dtype)


def save(model: Any, folder: Path) -> Path:
    """Leave a model as a checkpoint, with a tokenizer whose tokens are bytes."""
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    model.save_pretrained(folder)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def checkpoint(folder: Path, family: str, **fields: Any) -> Path:
    """A tiny model's checkpoint, for text in bytes."""
    return save(tiny(family, vocab_size=259, **fields), folder)


def dense() -> Any:
    """A model without experts."""
    return build(LlamaConfig(**_COMMON), "eager")


def tokens(num_sequences: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, int64 [B, S]; 0, the padding, is none of them."""
    return torch.randint(3, VOCABULARY, (num_sequences, length), generator=torch.Generator().manual_seed(seed))
