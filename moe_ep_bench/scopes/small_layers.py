"""Virtual ranks held against the dense reference: few tokens, a small hidden size, rows that are truly exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_ep_bench.layer.reference import DenseReference
from moe_ep_bench.layer.slots import Slots
from moe_ep_bench.layer.virtual import VirtualRanks
from moe_ep_bench.policies import Routing
from moe_ep_bench.scopes.comparison import Planned
from moe_ep_bench.scopes.emulated import Emulated
from moe_ep_bench.scopes.traffic import CaseRouter, Shares, traffic_of
from moe_ep_bench.workload import TokenBatch

# Tokens of each rank, and the hidden size.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64


def few_of(tokens: TokenBatch) -> TokenBatch:
    """Some of a rank's tokens from the first to the last, and so of both where some are padding."""
    num_checked = min(_CHECKED_TOKENS, tokens.num_tokens)
    return tokens.rows(torch.linspace(0, max(tokens.num_tokens - 1, 0), num_checked).long())


class SmallLayers:
    """A comparison's layer at a small hidden size, with values that real ranks would compute."""

    def __init__(self, comparison: Emulated, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        model = comparison.model
        self._model = model.scaled(min(1.0, _CHECKED_WIDTH / model.hidden_size))
        self._seed = comparison.experiment.layer.seed
        self._layers: dict[int, VirtualRanks] = {}
        self._inputs: dict[tuple[int, ...], tuple[list[Tensor], DenseReference]] = {}

    def error(self, router: CaseRouter, planned: Planned, ranks: Sequence[TokenBatch]) -> float:
        """The worst token's error when all ranks of a case exchange real rows.

        Args:
            planned: what the router knows of the layer: the comparison, or one layer of it.
            ranks: every rank's few tokens of batch 0.
        """
        (traffic,) = traffic_of(planned, [router], ranks, 0, self._device)
        shares = [Shares(planned, tokens, rank, self._device).of(router.case) for rank, tokens in enumerate(ranks)]
        routings = [router.route(share, 0, traffic.stats_SE) for share in shares]
        virtual = self._virtual(router.slots)
        virtual.exchange.counts_RP, virtual.exchange.stats_SE = traffic.counts_CRP[0], traffic.stats_SE
        layers = virtual.layers
        layer = layers.native if router.case.policy is None else layers.policy

        @contextlib.contextmanager
        def prepare(rank: int) -> Iterator[None]:
            if not router.slots.is_contiguous:
                layer.router.replay_TE = None
                with virtual.routed(layer, _on_slots(router.slots, routings[rank], rank)):
                    yield
                return
            layer.router.replay_TE = shares[rank].logits_TE
            if router.case.policy is not None:
                layers.policy_router.policy = router.case.policy
                layers.policy_router.context = router.context(shares[rank], 0)
            yield

        hidden, reference = self._input([tokens.num_tokens for tokens in ranks])
        outputs = virtual.whole_layer(layer, [mine.unsqueeze(1) for mine in hidden], prepare)
        weights_TE = torch.cat([routing.weights_TE for routing in routings])
        return reference.worst_error(torch.cat(outputs)[:, 0], weights_TE)

    def _input(self, sizes: Sequence[int]) -> tuple[list[Tensor], DenseReference]:
        """Every rank's hidden states, and the reference for all of them."""
        key = tuple(sizes)
        if key not in self._inputs:
            generator = torch.Generator(self._device).manual_seed(self._seed)
            hidden_ND = torch.randn(sum(sizes), self._model.hidden_size, generator=generator, device=self._device)
            self._inputs[key] = list(hidden_ND.split(key)), DenseReference(self._model, hidden_ND, self._seed)
        return self._inputs[key]

    def _virtual(self, slots: Slots) -> VirtualRanks:
        if slots.num_slots not in self._layers:
            num_slots = None if slots.num_slots == self._model.num_experts else slots.num_slots
            parts = self._comparison.parts
            self._layers[slots.num_slots] = VirtualRanks(
                self._model, torch.float32, self._device, self._comparison.ep_size, self._seed, parts, num_slots
            )
        virtual = self._layers[slots.num_slots]
        virtual.slots = slots
        return virtual


def _on_slots(slots: Slots, routing: Routing, rank: int) -> Routing:
    map_TP: Tensor = slots.spread(routing.map_TE, rank)
    return Routing(map_TP, slots.spread_weights(routing.weights_TE, map_TP))
