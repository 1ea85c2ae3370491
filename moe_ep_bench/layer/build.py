"""Build the layers that are compared: Megatron-Core's own, and the same one with a policy inside.

``native`` is the baseline of every speedup: Megatron-Core's router and its dropless path, which
knows its buffer sizes beforehand. ``policy`` takes the dynamic path, which any number of experts
per token needs and which costs a host sync before the first permutation. Both share one set of
weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_ep_bench.layer.backends import experts_submodule, fill_experts_
from moe_ep_bench.layer.experts import GATE, ROUTED, SHARED, expert_weights, fill_mlp_, seeded_generator
from moe_ep_bench.layer.flex import FlexDispatcher
from moe_ep_bench.layer.gathering import MapDispatcher
from moe_ep_bench.layer.megatron import MoELayer, TransformerConfig, default_groups, moe_submodules
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.permutation import IndexedAlltoAllDispatcher
from moe_ep_bench.layer.router import PolicyRouter, ReplayRouter
from moe_ep_bench.layer.tensor_group import TensorGroupDispatcher
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies import RoutingContext, make_policy

DEFAULT_PARTS = Parts()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LayerPair:
    """The two layers on this rank, sharing their weights, and the group that they talk in."""

    native: MoELayer
    policy: MoELayer
    ep_group: dist.ProcessGroup

    @property
    def native_router(self) -> ReplayRouter:
        return self.native.router

    @property
    def policy_router(self) -> PolicyRouter:
        return self.policy.router


def build_layers(
    model: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    ep_group: dist.ProcessGroup,
    seed: int,
    parts: Parts = DEFAULT_PARTS,
    groups: Any = None,
) -> LayerPair:
    """Build both layers of ``model`` on this rank with seeded weights, ready for inference.

    Enter ``host.device_scope()`` first. The experts must divide over the ranks of ``ep_group``.

    Args:
        groups: Megatron-Core's process groups; None = those that ``initialize_expert_parallel`` formed.
    """
    groups = default_groups() if groups is None else groups
    native = _build(model, dtype, device, ep_group, ReplayRouter, parts, groups, capacity_factor=None)
    pair = pair_with_policy(native, model, dtype, device, ep_group, parts, groups)
    seed_weights(native, model, dtype, device, seed)
    return pair


def pair_with_policy(
    native: MoELayer,
    model: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    ep_group: dist.ProcessGroup,
    parts: Parts = DEFAULT_PARTS,
    groups: Any = None,
) -> LayerPair:
    """Build the layer that takes policies beside a native one, whose weights it shares; arguments as above."""
    groups = default_groups() if groups is None else groups
    context = RoutingContext(
        top_k=model.top_k,
        num_ranks=ep_group.size(),
        rank=ep_group.rank(),
        normalize=model.normalize,
        scale=model.routed_scale,
        num_groups=model.num_groups,
        top_groups=model.top_groups,
    )
    top_k = make_policy({"name": "topk"})
    # Experts that are cut see the tokens of all ranks that hold a slice.
    together = ep_group if parts.expert_tensor_parallel == 1 else groups.tp_ep
    router = functools.partial(PolicyRouter, policy=top_k, context=context, ep_group=together, kernel=parts.kernel)
    policy = _build(model, dtype, device, ep_group, router, parts, groups, capacity_factor=1.0)
    policy.experts, policy.shared_experts = native.experts, native.shared_experts
    policy.router.weight = native.router.weight
    return LayerPair(native=native, policy=policy, ep_group=ep_group)


def _build(
    model: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    ep_group: dist.ProcessGroup,
    router: Any,
    parts: Parts,
    groups: Any,
    capacity_factor: float | None,
) -> MoELayer:
    config = transformer_config(model, dtype, ep_group.size(), capacity_factor, parts, on_cpu=device.type == "cpu")
    submodules = moe_submodules(model.num_experts, router, experts_submodule(parts, model.num_experts))
    layer = MoELayer(config, submodules, layer_number=1, pg_collection=groups)
    layer.set_layer_number(1)
    put_own_dispatcher(layer, parts, groups)
    return layer.to(device).eval()


def put_own_dispatcher(layer: MoELayer, parts: Parts, groups: Any) -> None:
    """Ours in place of the one that Megatron-Core has built, where ``parts`` say so."""
    own = _own_dispatcher(parts)
    if own is not None:
        layer.token_dispatcher = own(
            layer.num_local_experts, layer.local_expert_indices, config=layer.config, pg_collection=groups
        )


def _own_dispatcher(parts: Parts) -> Any:
    """Ours, in place of the one that Megatron-Core has built; None = it stays."""
    if parts.dispatcher == "flex":
        return FlexDispatcher
    if parts.by_map:
        return MapDispatcher
    if parts.permute == "indexed":
        return IndexedAlltoAllDispatcher
    cut = parts.expert_tensor_parallel > 1 and parts.dispatcher == "alltoall"
    return TensorGroupDispatcher if cut else None


def transformer_config(
    model: ModelSpec,
    dtype: torch.dtype,
    ep_size: int,
    capacity_factor: float | None,
    parts: Parts = DEFAULT_PARTS,
    *,
    on_cpu: bool,
) -> TransformerConfig:
    """Megatron-Core's config for one MoE layer of ``model``.

    Args:
        capacity_factor: None for the dropless path; any number for the dynamic one, where the
            dispatcher counts its buffers (the factor itself is used by nobody: a policy routes).
    """
    fields = config_fields(model, dtype, ep_size, capacity_factor, parts, on_cpu=on_cpu)
    return TransformerConfig(num_layers=1, num_attention_heads=1, **fields)


def config_fields(
    model: ModelSpec,
    dtype: torch.dtype,
    ep_size: int,
    capacity_factor: float | None,
    parts: Parts = DEFAULT_PARTS,
    *,
    on_cpu: bool,
) -> dict[str, Any]:
    """What Megatron-Core's config says of ``model``'s MoE layers, wherever they stand; arguments as above."""
    softmax = model.score_function == "softmax"
    return {
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
        # Its value is zero: replayed scores stand for what the biased selection sees.
        "moe_router_enable_expert_bias": model.selection_bias,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_expert_capacity_factor": capacity_factor,
        "moe_token_dispatcher_type": parts.dispatcher,
        "moe_permute_fusion": parts.permute == "fused",
        "moe_grouped_gemm": parts.experts == "te",
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
        # Overlap moves the shared experts' GEMMs onto a side stream inside other phases.
        "moe_shared_expert_overlap": False,
        "expert_model_parallel_size": ep_size,
        "expert_tensor_parallel_size": parts.expert_tensor_parallel,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_cpu_initialization": on_cpu,
        "perform_initialization": False,
    }


@torch.no_grad()
def seed_weights(layer: MoELayer, model: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Fill gate, routed and shared experts with what follows from the seed and their global ids."""
    gate = seeded_generator(device, seed, GATE)
    weight_ED = torch.randn(model.num_experts, model.hidden_size, generator=gate, device=device)
    layer.router.weight.data.copy_(weight_ED * model.hidden_size**-0.5)
    sizes = model.hidden_size, model.ffn_hidden_size
    weights = (expert_weights(seed, ROUTED, e, *sizes, device, dtype) for e in layer.local_expert_indices)
    dispatcher = layer.token_dispatcher
    if dispatcher.tp_size > 1:
        weights = (one.sliced(dispatcher.tp_rank, dispatcher.tp_size) for one in weights)
    fill_experts_(layer.experts, weights)
    if layer.shared_experts is not None:
        fill_mlp_(
            layer.shared_experts,
            expert_weights(seed, SHARED, 0, model.hidden_size, model.shared_ffn_hidden_size, device, dtype),
        )
