"""The one door to Megatron-Core: its import, its config, what differs between versions, and what it forgets.

Tried on 0.16.1 (Python 3.11) and 0.19.2 (Python 3.12). Everything else in ``layer/`` imports
Megatron-Core's names from here, so that a version difference is met in one place.

Shapes: T = tokens of all prompts, S = positions, H = heads, D = rotated part of a head.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep_bench.layer.backend import DEFAULT_BACKEND, LayerBackend
from moe_ep_bench.models import LatentAttention, ModelSpec

with warnings.catch_warnings():
    # A dozen per rank, of Apex and Transformer Engine that are missing (``doctor`` says it) and of what is deprecated.
    warnings.simplefilter("ignore")
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.inference.contexts.static_context import StaticInferenceContext as StaticInferenceContext
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.packed_seq_params import PackedSeqParams as PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import mlp, multi_latent_attention
    from megatron.core.transformer.moe import moe_layer, moe_utils
    from megatron.core.transformer.moe import token_dispatcher as token_dispatcher
    from megatron.core.transformer.moe.router import TopKRouter as TopKRouter
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

if TYPE_CHECKING:

    class MoELayer(moe_layer.MoELayer):
        """Parts of a layer are ours, and more than Megatron-Core's own hints ask of any."""

        router: Any
        token_dispatcher: Any

else:
    MoELayer = moe_layer.MoELayer


MEGATRON_VERSION: str = megatron.core.__version__

# Notices about Megatron-Core's own choices that come up once per rank while layers are built and run.
for message in (
    "full scope is deprecated",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
):
    warnings.filterwarnings("ignore", message=message)

# Said at every model that is built; the choice is ``build_gpt``'s.
logging.getLogger(GPTModel.__module__).addFilter(lambda record: "GPTModel IS DEPRECATED" not in record.getMessage())

# 0.16.1 reads this name in its router but defines it only where Transformer Engine is installed;
# its own code takes None for "not there".
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]

# 0.16.1's latent attention takes Transformer Engine for present where only what stands in for it is.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False


def rotate_packed_prompts(
    heads_THD: Tensor,
    cu_seqlens: Tensor,
    freqs_S11D: Tensor,
    *,
    cp_group: Any = None,
    max_seqlen: int | None = None,
    **options: Any,
) -> Tensor:
    """Rotate queries or keys of packed prompts, each from position 0 on, in one pass over all of them.

    So do 0.16 and 0.20, which passes ``max_seqlen`` to wait for nothing; these lengths lie on the host anyway. 0.19's
    own form launches a dozen kernels for every prompt: many prompts would measure launches.

    Args:
        cu_seqlens: where each prompt begins and the last one ends, on the host.
        freqs_S11D: the angles of each position.
        options: of Megatron-Core's rotation of one sequence.
    """
    freqs_T11D = torch.cat([freqs_S11D[:length] for length in cu_seqlens.diff().tolist()])
    return rope_utils._apply_rotary_pos_emb_bshd(heads_THD.unsqueeze(1), freqs_T11D, **options).squeeze(1)


rope_utils._apply_rotary_pos_emb_thd = rotate_packed_prompts

_fused_swiglu = mlp.bias_swiglu_impl


def swiglu_of_any_rows(gate_up_T1F: Tensor, *others: Any) -> Tensor:
    """Megatron-Core's fused activation, of shared experts; of no rows too, whose shape it cannot tell at its end."""
    if gate_up_T1F.numel() == 0:
        return gate_up_T1F.chunk(2, dim=-1)[0]
    return _fused_swiglu(gate_up_T1F, *others)


mlp.bias_swiglu_impl = swiglu_of_any_rows


def megatron_config(
    model: ModelSpec,
    dtype: torch.dtype,
    ep_size: int,
    layer_backend: LayerBackend = DEFAULT_BACKEND,
    *,
    on_cpu: bool,
    num_layers: int | None = None,
) -> TransformerConfig:
    """Return Megatron-Core's config.

    Args:
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
        "moe_token_dispatcher_type": layer_backend.dispatcher,
        "moe_permute_fusion": layer_backend.permute == "fused",
        "moe_router_fusion": layer_backend.fuses_router(model),
        # One kernel for SwiGLU and routing weights; without it Transformer Engine's experts take several.
        "bias_activation_fusion": layer_backend.experts == "te",
        "moe_grouped_gemm": layer_backend.experts == "te",
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
    if layer_backend.fp8:
        fields |= {"fp8": "e4m3", "fp8_recipe": "blockwise"}
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
        fields["q_lora_rank"] = attention.q_lora_rank  # None says that there is none, whatever Megatron-Core's hint
        return MLATransformerConfig(
            **fields,
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


_groups: dict[int, ProcessGroupCollection] = {}


def expert_parallel_groups(ep_size: int, timeout_s: float) -> ProcessGroupCollection:
    """Megatron-Core's process groups, with expert-parallel groups of neighbouring ranks, data-parallel to each other.

    Groups are never given back, and have threads and buffers: those of a size are formed once. Every rank calls this
    alike; ``torch.distributed`` must be initialised and its world size a multiple of ``ep_size``.
    """
    if not parallel_state.is_initialized():
        minutes: Any = timeout_s / 60
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=minutes, create_gloo_process_groups=False)
    if ep_size not in _groups:
        group, _ = dist.new_subgroups(ep_size, timeout=datetime.timedelta(seconds=timeout_s))
        _groups[ep_size] = with_experts_on(group)
    return _groups[ep_size]


def with_experts_on(group: Any) -> ProcessGroupCollection:
    """The process groups of an MoE layer whose experts lie on the ranks of ``group``, whole."""
    groups = moe_utils.get_default_pg_collection()
    groups.ep = groups.tp_ep = group
    return groups


def moe_submodules(num_experts: int, router: Any, experts: Any) -> moe_layer.MoESubmodules:
    """Megatron-Core's own parts of an MoE layer (shared experts without Transformer Engine) with these two in place.

    Args:
        router: called with ``config``, ``pg_collection`` and, from 0.19 on, ``is_mtp_layer``.
        experts: called with the number of local experts, ``config``, ``pg_collection`` and, from 0.19 on, ``name``.
    """
    return dataclasses.replace(_submodules(num_experts, use_te=False), router=router, experts=experts)


def expert_submodule(num_experts: int, *, use_te: bool) -> Any:
    """Megatron-Core's own experts: ``TEGroupedMLP`` with Transformer Engine, else ``SequentialMLP``."""
    return _submodules(num_experts, use_te=use_te).experts


def multiply_in_fp8(experts: Any) -> None:
    """Have ``TEGroupedMLP`` run as its config's FP8 recipe says: in Megatron-Core the block of layers around it does.

    Transformer Engine rounds the weights in the first run and keeps them beside the others: fill these before.
    """
    run = experts.forward

    def forward(*inputs: Any) -> Any:
        with get_fp8_context(experts.config):
            return run(*inputs)

    experts.forward = forward


def _submodules(num_experts: int, *, use_te: bool) -> moe_layer.MoESubmodules:
    spec: Any = get_moe_module_spec(use_te=use_te, num_experts=num_experts, moe_grouped_gemm=use_te)
    # A ModuleSpec in 0.16, a functools.partial in 0.19.
    return spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]


def decoder_spec(config: TransformerConfig, core_attention: Any = None, moe_submodules: Any = None) -> Any:
    """Megatron-Core's own spec of a decoder's layers, RMSNorm and without Transformer Engine.

    Args:
        config: ``moe_layer_freq`` says which layers are MoE layers.
        core_attention: in place of ``DotProductAttention``; called with Megatron-Core's arguments.
        moe_submodules: in place of the MoE layers' own parts.
    """
    block: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    frequencies = config.moe_layer_freq
    assert isinstance(frequencies, list)
    # One object stands for all layers of a kind.
    block.layer_specs = [copy.deepcopy(spec) for spec in block.layer_specs]
    for spec, is_moe in zip(block.layer_specs, frequencies, strict=True):
        if core_attention is not None:
            spec.submodules.self_attention.submodules.core_attention = core_attention
        if is_moe and moe_submodules is not None:
            spec.submodules.mlp = ModuleSpec(module=MoELayer, submodules=moe_submodules)
    # With NVIDIA Apex the last norm would be one that knows no RMSNorm.
    block.layer_norm = block.layer_specs[0].submodules.input_layernorm
    return block


def build_gpt(
    config: TransformerConfig, spec: Any, vocab_size: int, *, max_length: int, tied: bool, ep_group: Any
) -> GPTModel:
    """A language model of these layers with rotary positions.

    Megatron-Core 0.19 calls ``GPTModel`` deprecated in favour of its hybrid models: the choice stands here alone.

    Args:
        ep_group: whose ranks share the experts.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.ep = groups.tp_ep = ep_group
    # Attention asks for a state of random numbers for its dropout, though nothing is dropped.
    initialize_rng_tracker(inference_rng_tracker=True)
    gpt = GPTModel(
        config,
        spec,
        vocab_size,
        max_length,
        parallel_output=False,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    if isinstance(config, MLATransformerConfig) and not config.qk_layernorm:
        # Without a latent for queries 0.19 normalises that of keys and values only with Transformer Engine.
        layers: Any = gpt.decoder.layers
        for layer in layers:
            layer.self_attention.kv_layernorm = torch.nn.RMSNorm(config.kv_lora_rank, eps=config.layernorm_epsilon)
    return gpt
