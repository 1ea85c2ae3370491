"""Build what is compared: an MoE layer alone or a whole model, with Megatron-Core's router and with a policy.

Every MoE layer is built in forms that share one set of weights; ``take`` selects which of them runs. ``native`` is the
baseline of every speedup: Megatron-Core's router on its dropless path, which knows its buffer sizes beforehand.
``policy`` takes any number of experts per token, and waits for the host where native does. ``padded`` is
Megatron-Core's own drop-and-pad, which waits nowhere. Random weights follow from the seed, the layer and the expert's
global id, not from the number of ranks.
"""

from __future__ import annotations

import contextlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep_bench.layer.attention import SdpaAttention
from moe_ep_bench.layer.backends import experts_submodule, fill_experts_
from moe_ep_bench.layer.configs import megatron_config
from moe_ep_bench.layer.dispatchers import BoundedDispatcher, own_dispatcher
from moe_ep_bench.layer.experts import DEPTH, GATE, REST, ROUTED, SHARED, expert_weights, fill_mlp_, seeded_generator
from moe_ep_bench.layer.megatron import (
    MoELayer,
    TransformerConfig,
    build_gpt,
    decoder_spec,
    default_groups,
    moe_submodules,
)
from moe_ep_bench.layer.parts import DEFAULT_PARTS, Parts
from moe_ep_bench.layer.phases import instrumented, instrumented_model, replaced
from moe_ep_bench.layer.router import PolicyRouter, ReplayRouter
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.timing.timer import PhaseRecorder


@dataclass(frozen=True)
class LayerPair:
    """The forms of an MoE layer on this rank, which share their weights."""

    native: MoELayer
    policy: MoELayer
    padded: MoELayer | None = None

    @property
    def forms(self) -> tuple[MoELayer, ...]:
        return self.native, self.policy, *([self.padded] if self.padded is not None else [])

    @property
    def policy_router(self) -> PolicyRouter:
        return self.policy.router


class Subject(ABC):
    """What is measured on this rank, ready for inference: an MoE layer alone, or a whole model.

    Enter ``host.device_scope()`` before building one. The experts must divide over the ranks of ``ep_group``.

    Attributes:
        pairs: both forms of every MoE layer, by layer. Layers count from 0 through the whole depth, dense ones
            included; None is the key of a layer that stands alone.
        moe_layers: the form of each that runs now.
    """

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ep_group: dist.ProcessGroup,
        seed: int,
        parts: Parts = DEFAULT_PARTS,
        groups: Any = None,
        padded_to: float | None = None,
    ) -> None:
        """Prepare to build the layers.

        Args:
            groups: Megatron-Core's process groups; None = those that ``initialize_expert_parallel`` formed.
            padded_to: capacity factor of the padded form; None = there is none.
        """
        self.model, self.dtype, self.device, self.seed, self.parts = model, dtype, device, seed, parts
        self.ep_group, self._padded_to = ep_group, padded_to
        self._groups = default_groups() if groups is None else groups
        self.pairs: dict[int | None, LayerPair] = {}
        self.moe_layers: dict[int | None, MoELayer] = {}

    def take(self, policy_layers: Container[int | None], *, padded: bool = False) -> None:
        """Run the policy's form of these layers, or the ``padded`` one, and the native form of all others."""
        for layer, pair in self.pairs.items():
            other = pair.padded if padded else pair.policy
            assert other is not None
            self.moe_layers[layer] = other if layer in policy_layers else pair.native

    def route(
        self, layer: int | None, logits_TE: Tensor, policy: Policy | None = None, context: RoutingContext | None = None
    ) -> None:
        """Replay these logits in a layer from now on, under ``policy`` where its policy form runs.

        Args:
            context: what the policy may know of the next batch.
        """
        moe = self.moe_layers[layer]
        moe.router.replay_TE = logits_TE
        if policy is not None:
            assert context is not None
            moe.router.policy, moe.router.context = policy, context
            context.num_valid(len(logits_TE))  # Counted here, where no clock runs.
            if hasattr(moe.token_dispatcher, "most_experts"):
                moe.token_dispatcher.most_experts = policy.most_experts(logits_TE.shape[1], context)

    @abstractmethod
    def run(self, batch: Any) -> Tensor:
        """Run on a batch of this rank."""

    @abstractmethod
    def instrumented(self, recorder: PhaseRecorder, meet: Callable[[], object]) -> contextlib.AbstractContextManager:
        """Time every phase with ``recorder``, and probe the waiting with ``meet``, while the block runs."""

    def _config(self, capacity_factor: float | None, **how: Any) -> TransformerConfig:
        size, on_cpu = self.ep_group.size(), self.device.type == "cpu"
        return megatron_config(self.model, self.dtype, size, capacity_factor, self.parts, on_cpu=on_cpu, **how)

    def _submodules(self, router: Any) -> Any:
        num_experts = self.model.num_experts
        return moe_submodules(num_experts, router, experts_submodule(self.parts, num_experts))

    def _new_layer(self, router: Any, capacity_factor: float | None, *, padded: bool = False) -> MoELayer:
        config = self._config(capacity_factor, padded=padded)
        layer = MoELayer(config, self._submodules(router), layer_number=1, pg_collection=self._groups)
        layer.set_layer_number(1)
        return layer.to(self.device).eval()

    def _add(self, layer: int | None, native: MoELayer) -> None:
        """Build the other forms beside a native one, whose weights they share."""
        model, parts = self.model, self.parts
        context = RoutingContext(
            top_k=model.top_k,
            num_ranks=self.ep_group.size(),
            rank=self.ep_group.rank(),
            normalize=model.normalize,
            scale=model.routed_scale,
            num_groups=model.num_groups,
            top_groups=model.top_groups,
        )
        # Ranks that hold slices of the same experts decide together about the tokens of all.
        deciding = self.ep_group if parts.expert_tensor_parallel == 1 else self._groups.tp_ep
        topk = make_policy({"name": "topk"})
        router = partial(PolicyRouter, policy=topk, context=context, ep_group=deciding, kernel=parts.kernel)
        # Behind an all-to-all rows are bounded by the policy; other dispatchers count them where there is a factor.
        policy = self._new_layer(router, capacity_factor=None if parts.dispatcher == "alltoall" else 1.0)
        factor, padded = self._padded_to, None
        if factor is not None:
            padded = self._new_layer(ReplayRouter, factor, padded=True)
        pair = self.pairs[layer] = LayerPair(native, policy, padded)
        for moe in pair.forms:
            moe.experts, moe.shared_experts = native.experts, native.shared_experts
            moe.router.weight = native.router.weight
            dispatcher = own_dispatcher(parts, padded=moe is padded, any_pairs=moe is policy)
            if dispatcher is not None:
                experts = moe.num_local_experts, moe.local_expert_indices
                moe.token_dispatcher = dispatcher(*experts, config=moe.config, pg_collection=self._groups)
            if parts.shared_expert_overlap:
                moe.token_dispatcher.set_shared_experts(native.shared_experts)
        if isinstance(policy.token_dispatcher, BoundedDispatcher):
            policy.token_dispatcher.router = policy.router

    @torch.no_grad()
    def _seed_layer(self, layer: int | None) -> None:
        """Fill gate, routed and shared experts of a layer."""
        model, device, dtype, moe = self.model, self.device, self.dtype, self.pairs[layer].native
        seed = layer_seed(self.seed, layer)
        gate = seeded_generator(device, seed, GATE)
        weight_ED = torch.randn(model.num_experts, model.hidden_size, generator=gate, device=device)
        moe.router.weight.data.copy_(weight_ED * model.hidden_size**-0.5)
        sizes = model.hidden_size, model.ffn_hidden_size
        weights = (expert_weights(seed, ROUTED, e, *sizes, device, dtype) for e in moe.local_expert_indices)
        dispatcher = moe.token_dispatcher
        if dispatcher.tp_size > 1:
            weights = (one.sliced(dispatcher.tp_rank, dispatcher.tp_size) for one in weights)
        fill_experts_(moe.experts, weights)
        if moe.shared_experts is not None:
            sizes = model.hidden_size, model.shared_ffn_hidden_size
            fill_mlp_(moe.shared_experts, expert_weights(seed, SHARED, 0, *sizes, device, dtype))


def layer_seed(seed: int, layer: int | None) -> int:
    """The seed of one layer's weights; None = the layer that stands alone."""
    return seed if layer is None else int(np.random.SeedSequence((seed, DEPTH, layer)).generate_state(1)[0])


class SingleLayer(Subject):
    """An MoE layer of ``model`` alone. Its batch is hidden states [T, 1, D], its output too."""

    def __init__(self, *args: Any, num_pieces: int = 1, **kwargs: Any) -> None:
        """Take ``Subject``'s arguments; ``num_pieces``: of a rank's tokens, see ``run_in_pieces``."""
        super().__init__(*args, **kwargs)
        self._add(None, self._new_layer(ReplayRouter, capacity_factor=None))
        self._seed_layer(None)
        if num_pieces > 1:
            for moe in self.pair.forms:
                run_in_pieces(moe, num_pieces)
        self.take(())

    @property
    def pair(self) -> LayerPair:
        return self.pairs[None]

    def run(self, batch: Tensor) -> Tensor:
        return self.moe_layers[None](batch)[0]

    def instrumented(self, recorder: PhaseRecorder, meet: Callable[[], object]) -> contextlib.AbstractContextManager:
        return instrumented(self.moe_layers[None], recorder, meet)


class Transformer(Subject):
    """The first layers of ``model`` with embedding and output layer. Its batch is a ``Pass``, its output logits.

    Attributes:
        gpt: Megatron-Core's model; every rank has all of it but the experts, which are spread over ranks.
    """

    def __init__(self, *args: Any, num_layers: int, max_length: int, **kwargs: Any) -> None:
        """Take ``Subject``'s arguments; ``max_length``: positions that a sequence may have."""
        super().__init__(*args, **kwargs)
        model, config = self.model, self._config(None, num_layers=num_layers)
        assert model.vocab_size is not None
        spec, group = decoder_spec(config, SdpaAttention, self._submodules(ReplayRouter)), self._groups.ep
        self.gpt = build_gpt(
            config, spec, model.vocab_size, max_length=max_length, tied=model.tied_embeddings, ep_group=group
        )
        self.gpt.to(self.device).eval()
        for norm in (module for module in self.gpt.modules() if isinstance(module, torch.nn.RMSNorm)):
            norm.to(self.dtype)
        for layer in range(model.first_dense_layers, num_layers):
            self._add(layer, self.layers[layer].mlp)
        self._seed()
        self.take(())

    @property
    def layers(self) -> Any:
        return self.gpt.decoder.layers

    def take(self, policy_layers: Container[int | None], *, padded: bool = False) -> None:
        super().take(policy_layers, padded=padded)
        for layer, moe in self.moe_layers.items():
            self.layers[layer].mlp = moe

    def run(self, batch: Callable[[Any], Tensor]) -> Tensor:
        return batch(self.gpt)

    def instrumented(self, recorder: PhaseRecorder, meet: Callable[[], object]) -> contextlib.AbstractContextManager:
        return instrumented_model(self.gpt, recorder, meet)

    @torch.no_grad()
    def _seed(self) -> None:
        """Fill matrices so that activations keep their size, norms with ones, and the MoE layers."""
        for name, parameter in self.gpt.named_parameters():
            if ".experts." in name:
                continue
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = seeded_generator(self.device, self.seed, REST, zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator, device=self.device)
            parameter.copy_(values * parameter.shape[1] ** -0.5)
        for layer in self.pairs:
            self._seed_layer(layer)


def run_in_pieces(layer: MoELayer, num_pieces: int) -> None:
    """Let the layer route all of its input [T, 1, D] and then run on so many pieces of it, from now on.

    What is permuted for all of a long prefill at once may not fit. The router sees all tokens first, so that a policy
    decides as it would without. Every rank has as many pieces, and they meet in each; some may be empty.
    """
    forward, router = layer.forward, layer.router

    def in_pieces(hidden_T1D: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        probs_TE, map_TE = layer.route(hidden_T1D)
        most_pairs = router.most_pairs if isinstance(router, PolicyRouter) else None
        outputs = []
        parts = (whole.tensor_split(num_pieces) for whole in (hidden_T1D, probs_TE, map_TE))
        for piece_T1D, *routed in zip(*parts, strict=True):
            if most_pairs is not None:
                num_tokens, num_experts = routed[1].shape
                of_token = router.policy.most_experts(num_experts, router.context)
                router.most_pairs = min(most_pairs, num_tokens * of_token)
            with replaced(layer, "route", lambda *_, routed=routed, **__: tuple(routed)):
                outputs.append(forward(piece_T1D, *arguments, **options)[0])
        return torch.cat(outputs), None

    layer.forward = in_pieces
