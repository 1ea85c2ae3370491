"""Hold virtual ranks against the dense reference, at a small hidden size and with rows that are truly exchanged."""

from __future__ import annotations

import contextlib
from functools import cache, partial

import torch
from torch import Tensor

from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.routing import Batches, CaseRouter
from moe_ep_bench.bench.traffic import traffic_of
from moe_ep_bench.layer.reference import DenseReference
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.layer.virtual import VirtualRanks, with_slots

# Tokens of each rank that are held against the reference, and the hidden size there.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64


class SmallLayers:
    """A comparison's layer at a small hidden size, with values that real ranks would compute."""

    def __init__(self, comparison: Comparison, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        self._batches = Batches(comparison, device, few=_CHECKED_TOKENS)
        self._model = comparison.model.scaled(min(1.0, _CHECKED_WIDTH / comparison.model.hidden_size))
        self._seed = comparison.experiment.layer.seed
        self._built, self._input = cache(self._build), cache(self._make_input)

    def error(self, router: CaseRouter, layer: int | None) -> float:
        """The worst token's error when all ranks of a case exchange real rows, on few tokens of batch 0."""
        (traffic,) = traffic_of(self._batches, layer, 0, [router])
        shares = [of_rank.of(router.case) for of_rank in self._batches.shares(layer, 0)]
        routings = [router.route(share, 0, traffic.stats_SE) for share in shares]
        virtual = self._built(router.slots.num_slots)
        virtual.placement = router.slots
        virtual.announced = {None: traffic.announced(self._device)}

        def prepare(rank: int) -> contextlib.AbstractContextManager[None]:
            router.enter(virtual.stack, {None: shares[rank]}, 0)
            if router.slots.is_contiguous:
                return contextlib.nullcontext()
            return virtual.routed({None: router.on_slots(routings[rank], rank)})

        hidden, reference = self._input(tuple(traffic.num_tokens_R))
        outputs = virtual.side_by_side([of_rank.unsqueeze(1) for of_rank in hidden], prepare)
        weights_TE = torch.cat([routing.weights_TE for routing in routings])
        return reference.worst_error(torch.cat(outputs)[:, 0], weights_TE)

    def _make_input(self, sizes: tuple[int, ...]) -> tuple[list[Tensor], DenseReference]:
        """Every rank's hidden states, and the reference for all of them."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        hidden_ND = torch.randn(sum(sizes), self._model.hidden_size, generator=generator, device=self._device)
        return list(hidden_ND.split(sizes)), DenseReference(self._model, hidden_ND, self._seed)

    def _build(self, num_slots: int) -> VirtualRanks:
        model = self._model if num_slots == self._model.num_experts else with_slots(self._model, num_slots)
        parts = self._comparison.parts
        build = partial(Stack, model, torch.float32, self._device, seed=self._seed, parts=parts)
        return VirtualRanks(build, self._comparison.ep_size)
