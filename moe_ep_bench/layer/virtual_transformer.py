"""A whole model seen from each of many expert-parallel ranks, one after another, on one device.

Attention, dense layers, embedding and output layer need no other rank: a virtual rank runs them on its own tokens as a
real one does. Every MoE layer is one of ``layer.virtual``, with one exchange for all of them: as a pass comes to a
layer, the exchange is told what all ranks' routing of that layer sends (``Announced``), and answers with it at the
layer's meetings.

Shapes: R = virtual ranks, E = experts, S = rows of a batch-wide policy's statistics, V = words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.layer.backends import fill_experts_
from moe_ep_bench.layer.build import DEFAULT_PARTS
from moe_ep_bench.layer.experts import ROUTED, ExpertWeights, expert_weights
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.passes import KeyValueCache, Pass
from moe_ep_bench.layer.transformer import build_transformer, layer_seed
from moe_ep_bench.layer.virtual import Exchange, VirtualGroup, see_from, virtual_groups
from moe_ep_bench.models import ModelSpec


@dataclass(frozen=True, eq=False)
class Announced:
    """What all ranks' routing of one layer amounts to; see ``virtual.Exchange``."""

    counts_RE: Tensor
    stats_SE: Tensor | None = None


class VirtualTransformer:
    """``build_transformer`` seen from each of ``num_ranks`` expert-parallel ranks.

    One rank's weights are held, which all ranks share unless ``become`` is asked to load a rank's own. Needs what
    ``VirtualRanks`` needs.

    Attributes:
        announced: by MoE layer, what its exchange is to answer with; set before a pass runs.
    """

    def __init__(
        self,
        model: ModelSpec,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        num_ranks: int,
        seed: int,
        max_length: int,
        parts: Parts = DEFAULT_PARTS,
    ) -> None:
        self.model, self.dtype, self.device, self.seed = model, dtype, device, seed
        self.group: Any = VirtualGroup(num_ranks)
        self.exchange = Exchange(self.group)
        self.announced: Mapping[int, Announced] = {}
        self.transformer = build_transformer(
            model,
            num_layers,
            dtype,
            device,
            self.group,
            seed,
            max_length,
            parts,
            groups=virtual_groups(self.group),
        )
        for layer, pair in self.transformer.pairs.items():
            pair.policy_router.sum_over_ranks = self.exchange.sum_over_ranks
            for moe in (pair.native, pair.policy):
                moe.register_forward_pre_hook(partial(self._come_to, layer))

    @property
    def num_ranks(self) -> int:
        return self.group.size()

    def _come_to(self, layer: int, module: Any, inputs: Any) -> None:
        announced = self.announced[layer]
        self.exchange.counts_RP, self.exchange.stats_SE = announced.counts_RE, announced.stats_SE
        self.exchange.begin(layer)

    def become(self, rank: int, *, own_weights: bool = False) -> None:
        """See the model from ``rank``; with ``own_weights`` every MoE layer gets the weights of that rank's experts."""
        self.group.current = rank
        for layer, pair in self.transformer.pairs.items():
            indices = see_from(pair, rank)
            if own_weights:
                with torch.no_grad():
                    fill_experts_(pair.native.experts, [self._weights[layer][expert] for expert in indices])

    @cached_property
    def _weights(self) -> dict[int, list[ExpertWeights]]:
        """All experts' weights of every MoE layer: for checks at small sizes."""
        sizes = self.model.hidden_size, self.model.ffn_hidden_size
        return {
            layer: [
                expert_weights(layer_seed(self.seed, layer), ROUTED, expert, *sizes, self.device, self.dtype)
                for expert in range(self.model.num_experts)
            ]
            for layer in self.transformer.pairs
        }

    def connected(self) -> contextlib.AbstractContextManager[None]:
        """Let the exchange answer where ranks would meet, while the block runs."""
        return self.exchange.connected()

    def new_cache(self, max_requests: int, context_length: int) -> KeyValueCache:
        """A filled cache, of which all ranks use as much as they have requests."""
        cache = KeyValueCache(max_requests, context_length)
        nothing_RE = torch.zeros(self.num_ranks, self.model.num_experts, dtype=torch.int64, device=self.device)
        self.announced = dict.fromkeys(self.transformer.pairs, Announced(nothing_RE))
        self.exchange.checks_counts = False  # The gate itself routes; what it chooses does not matter.
        self.transformer.take(())
        with self.connected():
            cache.fill_(self.transformer.gpt, self.device, self.seed)
        self.exchange.checks_counts = True
        return cache

    def whole_pass(self, runs: Sequence[Pass], prepare: Callable[[int], None]) -> list[Tensor]:
        """All ranks' logits, [.., V] each, with the values that real ranks would compute.

        A row is a round on its way to the experts, and another on its way back: after two rounds for each MoE layer the
        logits are those of ranks side by side. Holds all ranks' rows of all layers: for checks at small sizes.

        Args:
            runs: what goes through the model on each rank.
            prepare: puts a rank's routing into all layers.
        """
        self.exchange.keep()
        logits: list[Tensor] = []
        with self.connected():
            for _ in range(1 + 2 * len(self.transformer.pairs)):
                logits = []
                for rank, run in enumerate(runs):
                    self.become(rank, own_weights=True)
                    prepare(rank)
                    logits.append(run(self.transformer.gpt))
        return logits
