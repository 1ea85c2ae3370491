"""The stack of MoE layers that runs on this rank: one layer alone, or a whole model with all between its MoE layers.

Every MoE layer has two forms with one set of weights; ``select_forms`` says which runs. ``native`` is the baseline
of every speedup: Megatron-Core's router on its dropless path, which knows its buffer sizes beforehand.
``policy`` takes any number of experts per token, and waits for the host where native does. Random weights follow from
the seed, the layer and the expert's global id, not from the number of ranks.

Layers count from 0 through the whole depth, dense ones included; None is the key of a layer that stands alone.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Container
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.layer.backend import DEFAULT_BACKEND, LayerBackend
from moe_ep_bench.layer.components import BoundedDispatcher, experts_submodule, fill_experts_, own_dispatcher
from moe_ep_bench.layer.experts import DEPTH, GATE, REST, ROUTED, SHARED, expert_weights, fill_mlp_, seeded_generator
from moe_ep_bench.layer.megatron import (
    GPTModel,
    MoELayer,
    ProcessGroupCollection,
    TransformerConfig,
    build_gpt,
    decoder_spec,
    megatron_config,
    moe_submodules,
    multiply_in_fp8,
)
from moe_ep_bench.layer.passes import SdpaAttention
from moe_ep_bench.layer.phases import instrumented, instrumented_model
from moe_ep_bench.layer.router import PolicyRouter, ReplayRouter
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.timing.timer import PhaseRecorder


class Forms(NamedTuple):
    """Both forms of an MoE layer on this rank."""

    native: MoELayer
    policy: MoELayer


class Stack:
    """MoE layers of this rank, ready for inference. Enter ``host.device_scope()`` before building one.

    A layer alone runs on hidden states [T, 1, D] and returns the same; a model runs on a ``passes.Pass`` and returns
    logits.

    Attributes:
        forms: both forms of every MoE layer.
        moe_layers: the form of each that runs now.
        gpt: Megatron-Core's model, of which every rank has all but the experts; None = one layer alone.
    """

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroupCollection,
        seed: int,
        layer_backend: LayerBackend = DEFAULT_BACKEND,
        *,
        num_layers: int | None = None,
        max_length: int = 0,
    ) -> None:
        """Build the layers.

        Args:
            groups: ``megatron.expert_parallel_groups``; the experts must divide over the ranks of ``groups.ep``.
            num_layers: of the model, from the first on, with embedding and output layer; None = one MoE layer alone.
            max_length: positions that a sequence of the model may have.
        """
        self.model, self.dtype, self.device, self.seed, self.layer_backend = model, dtype, device, seed, layer_backend
        self.groups, self.ep_group = groups, groups.ep
        self.forms: dict[int | None, Forms] = {}
        self.moe_layers: dict[int | None, MoELayer] = {}
        self.gpt: GPTModel | None = None
        if num_layers is None:
            self._add(None, self._new_layer(ReplayRouter))
        else:
            self.gpt = self._new_model(num_layers, max_length)
            for layer in (layer for layer in model.moe_layers if layer < num_layers):
                self._add(layer, self._decoder_layers[layer].mlp)
        self._seed()
        self.select_forms(())

    def select_forms(self, policy_layers: Container[int | None]) -> None:
        """Run the policy's form of these layers, and the native form of all others."""
        for layer, (native, policy) in self.forms.items():
            moe = self.moe_layers[layer] = policy if layer in policy_layers else native
            if self.gpt is not None:
                self._decoder_layers[layer].mlp = moe

    @property
    def _decoder_layers(self) -> Any:
        assert self.gpt is not None
        return self.gpt.decoder.layers

    def route(
        self, layer: int | None, logits_TE: Tensor, policy: Policy | None = None, context: RoutingContext | None = None
    ) -> None:
        """Replay these logits in a layer from now on, under ``policy`` where its policy form runs.

        Args:
            context: fields of the next batch that the policy may see.
        """
        moe = self.moe_layers[layer]
        moe.router.replay_TE = logits_TE
        if policy is not None:
            assert context is not None
            moe.router.policy, moe.router.context = policy, context
            context.num_valid(len(logits_TE))  # Counted here, where no clock runs.

    def run(self, batch: Any) -> Tensor:
        """Run on a batch of this rank."""
        return self.moe_layers[None](batch)[0] if self.gpt is None else batch(self.gpt)

    def instrumented(self, recorder: PhaseRecorder, meet: Callable[[], object]) -> contextlib.AbstractContextManager:
        """Time every phase with ``recorder``, and probe the waiting with ``meet``, while the block runs."""
        if self.gpt is None:
            return instrumented(self.moe_layers[None], recorder, meet)
        return instrumented_model(self.gpt, recorder, meet)

    # ---- building ----------------------------------------------------------------------------------------------------

    def _config(self, num_layers: int | None = None) -> TransformerConfig:
        sizes, on_cpu = (self.ep_group.size(), self.layer_backend), self.device.type == "cpu"
        return megatron_config(self.model, self.dtype, *sizes, on_cpu=on_cpu, num_layers=num_layers)

    def _submodules(self, router: Any) -> Any:
        num_experts = self.model.num_experts
        return moe_submodules(num_experts, router, experts_submodule(self.layer_backend, num_experts))

    def _new_layer(self, router: Any) -> MoELayer:
        submodules = self._submodules(router)
        layer = MoELayer(self._config(), submodules, layer_number=1, pg_collection=self.groups)
        layer.set_layer_number(1)
        return layer.to(self.device).eval()

    def _new_model(self, num_layers: int, max_length: int) -> GPTModel:
        model, config = self.model, self._config(num_layers)
        assert model.vocab_size is not None
        spec = decoder_spec(config, SdpaAttention, self._submodules(ReplayRouter))
        sizes = {"max_length": max_length, "tied": model.tied_embeddings}
        gpt = build_gpt(config, spec, model.vocab_size, ep_group=self.ep_group, **sizes).to(self.device).eval()
        for norm in (module for module in gpt.modules() if isinstance(module, torch.nn.RMSNorm)):
            norm.to(self.dtype)
        return gpt

    def _add(self, layer: int | None, native: MoELayer) -> None:
        """Build the policy's form beside a native one, whose weights it shares."""
        model, layer_backend = self.model, self.layer_backend
        context = RoutingContext(
            top_k=model.top_k,
            num_ranks=self.ep_group.size(),
            rank=self.ep_group.rank(),
            normalize=model.normalize,
            scale=model.routed_scale,
            num_groups=model.num_groups,
            top_groups=model.top_groups,
        )
        topk = make_policy({"name": "topk"})
        router = partial(PolicyRouter, policy=topk, context=context, ep_group=self.ep_group)
        policy = self._new_layer(router)
        if layer_backend.fp8:
            multiply_in_fp8(native.experts)
        policy.experts, policy.shared_experts = native.experts, native.shared_experts
        policy.router.weight = native.router.weight
        for moe in (native, policy):
            dispatcher = own_dispatcher(layer_backend, any_pairs=moe is policy)
            if dispatcher is not None:
                experts = moe.num_local_experts, moe.local_expert_indices
                moe.token_dispatcher = dispatcher(*experts, config=moe.config, pg_collection=self.groups)
        if isinstance(policy.token_dispatcher, BoundedDispatcher):
            policy.token_dispatcher.router = policy.router
        self.forms[layer] = Forms(native, policy)

    @torch.no_grad()
    def _seed(self) -> None:
        """Fill matrices so that activations keep their size, norms with ones, and the MoE layers."""
        for name, parameter in () if self.gpt is None else self.gpt.named_parameters():
            if ".experts." in name:
                continue
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = seeded_generator(self.device, self.seed, REST, zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator, device=self.device)
            parameter.copy_(values * parameter.shape[1] ** -0.5)
        for layer, (native, _) in self.forms.items():
            self._seed_layer(native, layer_seed(self.seed, layer))

    def _seed_layer(self, moe: MoELayer, seed: int) -> None:
        """Fill gate, routed and shared experts of a layer."""
        model, device, dtype = self.model, self.device, self.dtype
        gate = seeded_generator(device, seed, GATE)
        weight_ED = torch.randn(model.num_experts, model.hidden_size, generator=gate, device=device)
        moe.router.weight.data.copy_(weight_ED * model.hidden_size**-0.5)
        sizes = model.hidden_size, model.ffn_hidden_size
        weights = (expert_weights(seed, ROUTED, e, *sizes, device, dtype) for e in moe.local_expert_indices)
        fill_experts_(moe.experts, weights)
        if moe.shared_experts is not None:
            sizes = model.hidden_size, model.shared_ffn_hidden_size
            fill_mlp_(moe.shared_experts, expert_weights(seed, SHARED, 0, *sizes, device, dtype))


def layer_seed(seed: int, layer: int | None) -> int:
    """The seed of one layer's weights; None = the layer that stands alone."""
    return seed if layer is None else int(np.random.SeedSequence((seed, DEPTH, layer)).generate_state(1)[0])
