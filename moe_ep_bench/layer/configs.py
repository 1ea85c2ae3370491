"""Megatron-Core's config of what is built: an MoE layer alone, or the first layers of a model."""

from __future__ import annotations

from typing import Any

import torch

from moe_ep_bench.layer.megatron import MLATransformerConfig, TransformerConfig
from moe_ep_bench.layer.parts import DEFAULT_PARTS, Parts
from moe_ep_bench.models import LatentAttention, ModelSpec


def megatron_config(
    model: ModelSpec,
    dtype: torch.dtype,
    ep_size: int,
    capacity_factor: float | None,
    parts: Parts = DEFAULT_PARTS,
    *,
    on_cpu: bool,
    num_layers: int | None = None,
) -> TransformerConfig:
    """Return Megatron-Core's config.

    Args:
        capacity_factor: None for the dropless path. Any number selects the dynamic path, where the dispatcher counts
            its buffers; the number itself has no effect, because a policy routes.
        num_layers: layers of the model from the first; None = an MoE layer alone.
    """
    softmax = model.score_function == "softmax"
    fields: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "moe_ffn_hidden_size": model.ffn_hidden_size,
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.top_k,
        "moe_router_score_function": model.score_function,
        # Softmax before the selection leaves weights as they are; after it, they sum to 1.
        "moe_router_pre_softmax": softmax and not model.normalize,
        "moe_router_topk_scaling_factor": model.routed_scale if model.routed_scale != 1.0 else None,
        "moe_router_num_groups": model.num_groups,
        "moe_router_group_topk": model.top_groups,
        # The bias is zero: replayed scores are already what the biased selection sees.
        "moe_router_enable_expert_bias": model.selection_bias,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_expert_capacity_factor": capacity_factor,
        "moe_token_dispatcher_type": parts.dispatcher,
        "moe_permute_fusion": parts.permute == "fused",
        "moe_router_fusion": parts.fuses_router(model),
        # One kernel for SwiGLU and routing weights; without it Transformer Engine's experts take several.
        "bias_activation_fusion": parts.experts == "te",
        "moe_grouped_gemm": parts.experts == "te",
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
        "expert_model_parallel_size": ep_size,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_cpu_initialization": on_cpu,
        "perform_initialization": False,
    }
    if num_layers is None:
        return TransformerConfig(num_layers=1, num_attention_heads=1, **fields)
    attention = model.attention
    assert attention is not None
    fields |= {
        "num_layers": num_layers,
        "num_attention_heads": attention.num_heads,
        "moe_layer_freq": [int(layer in model.moe_layers) for layer in range(num_layers)],
        "ffn_hidden_size": model.dense_ffn_hidden_size or model.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        # These fusions of attention and residuals need CUDA.
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
    }
    if isinstance(attention, LatentAttention):
        return MLATransformerConfig(
            **fields,
            q_lora_rank=attention.q_lora_rank,
            kv_lora_rank=attention.kv_lora_rank,
            qk_head_dim=attention.qk_nope_head_dim,
            qk_pos_emb_head_dim=attention.qk_rope_head_dim,
            v_head_dim=attention.v_head_dim,
            qk_layernorm=attention.q_lora_rank is not None,
            rope_type="rope",
        )
    return TransformerConfig(
        **fields,
        num_query_groups=attention.num_kv_heads,
        kv_channels=attention.head_dim,
        add_qkv_bias=attention.bias != "none",
        qk_layernorm=attention.qk_norm != "none",
    )
