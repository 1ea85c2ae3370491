"""A whole language model, Megatron-Core's ``GPTModel``: in every MoE layer native and policy stand side by side.

Attention, norms, dense layers, embedding and output layer are built once, and so are the weights of every MoE layer.
What a case changes is which of a layer's two MoE layers stands in its place (``Transformer.take``): Megatron-Core's own
router on its dropless path, or a policy on the dynamic one, as ``build`` makes them for a layer alone.

Weights are random, but follow from the seed, the layer and the expert's global id. Layers count from 0 through the
whole depth, dense ones included.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_ep_bench.layer.attention import SdpaAttention
from moe_ep_bench.layer.backends import experts_submodule
from moe_ep_bench.layer.build import (
    DEFAULT_PARTS,
    LayerPair,
    config_fields,
    pair_with_policy,
    put_own_dispatcher,
    seed_weights,
)
from moe_ep_bench.layer.experts import DEPTH, REST, seeded_generator
from moe_ep_bench.layer.megatron import (
    GPTModel,
    MLATransformerConfig,
    MoELayer,
    TransformerConfig,
    build_gpt,
    decoder_spec,
    default_groups,
    moe_submodules,
)
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.router import ReplayRouter
from moe_ep_bench.models import LatentAttention, ModelSpec


class Transformer:
    """The first layers of a model on this rank, ready for inference.

    Attributes:
        gpt: Megatron-Core's model; all of it is on every rank but the experts, which are shared out.
        pairs: by layer, the two MoE layers that may stand there.
    """

    def __init__(self, gpt: GPTModel, pairs: dict[int, LayerPair]) -> None:
        self.gpt = gpt
        self.pairs = pairs

    @property
    def layers(self) -> Any:
        return self.gpt.decoder.layers

    @property
    def moe_layers(self) -> dict[int, MoELayer]:
        """Those that stand in the model now, by layer."""
        return {layer: self.layers[layer].mlp for layer in self.pairs}

    def take(self, policy_layers: Collection[int]) -> None:
        """Put the policy's MoE layer into these layers' place, and the native one into all others'."""
        for layer, pair in self.pairs.items():
            self.layers[layer].mlp = pair.policy if layer in policy_layers else pair.native


def build_transformer(
    model: ModelSpec,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    ep_group: dist.ProcessGroup,
    seed: int,
    max_length: int,
    parts: Parts = DEFAULT_PARTS,
    core_attention: Any = SdpaAttention,
    groups: Any = None,
) -> Transformer:
    """Build the first ``num_layers`` layers of ``model``, embedding and output layer on this rank with seeded weights.

    Enter ``host.device_scope()`` first. The experts must divide over the ranks of ``ep_group``.

    Args:
        max_length: positions that a sequence may have.
        core_attention: None = Megatron-Core's own ``DotProductAttention``.
        groups: Megatron-Core's process groups for MoE layers; None = those that ``initialize_expert_parallel`` formed.
    """
    groups = default_groups() if groups is None else groups
    config = whole_config(model, num_layers, dtype, ep_group.size(), parts, on_cpu=device.type == "cpu")
    own = moe_submodules(model.num_experts, ReplayRouter, experts_submodule(parts, model.num_experts))
    spec = decoder_spec(config, core_attention, own)
    assert model.vocab_size is not None
    gpt = build_gpt(
        config, spec, model.vocab_size, max_length=max_length, tied=model.tied_embeddings, ep_group=groups.ep
    )
    gpt.to(device).eval()
    for norm in (module for module in gpt.modules() if isinstance(module, torch.nn.RMSNorm)):
        norm.to(dtype)
    pairs = {}
    for layer in range(model.first_dense_layers, num_layers):
        native = gpt.decoder.layers[layer].mlp
        put_own_dispatcher(native, parts, groups)
        pairs[layer] = pair_with_policy(native, model, dtype, device, ep_group, parts, groups)
    seed_transformer(gpt, model, dtype, device, seed)
    return Transformer(gpt, pairs)


def whole_config(
    model: ModelSpec, num_layers: int, dtype: torch.dtype, ep_size: int, parts: Parts = DEFAULT_PARTS, *, on_cpu: bool
) -> TransformerConfig:
    """Megatron-Core's config for the first ``num_layers`` layers of ``model``; MoE layers are dropless ones."""
    assert model.attention is not None
    num_dense = model.first_dense_layers
    fields = {
        **config_fields(model, dtype, ep_size, None, parts, on_cpu=on_cpu),
        "num_layers": num_layers,
        "num_attention_heads": model.attention.num_heads,
        "moe_layer_freq": [0] * num_dense + [1] * (num_layers - num_dense),
        "ffn_hidden_size": model.dense_ffn_hidden_size or model.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        # Fusions of Megatron-Core's own attention and residuals, which want CUDA.
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }
    attention = model.attention
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


def layer_seed(seed: int, layer: int) -> int:
    """The seed of one layer's weights."""
    return int(np.random.SeedSequence((seed, DEPTH, layer)).generate_state(1)[0])


@torch.no_grad()
def seed_transformer(gpt: GPTModel, model: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Fill all weights: MoE layers as ``build`` fills one, matrices so that sizes are kept, norms with ones."""
    for name, parameter in gpt.named_parameters():
        if ".experts." in name:
            continue
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = seeded_generator(device, seed, REST, zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.copy_(values * parameter.shape[1] ** -0.5)
    for layer, block in enumerate(gpt.decoder.layers):
        if isinstance(block.mlp, MoELayer):
            seed_weights(block.mlp, model, dtype, device, layer_seed(seed, layer))
