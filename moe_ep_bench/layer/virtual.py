"""Many expert-parallel ranks on one device, one after another, through the same layer.

A *virtual rank* is a point of view: the layer's dispatcher is told how many ranks there are and
which of them it is, so that it permutes, counts and splits as it would there. Where ranks would
meet, an ``Exchange`` answers in their place: with the counts of all ranks' routing, with the
statistics of all ranks' tokens, and with rows of the right number. What runs between these
points is Megatron-Core's own code and ours, as on real ranks; nothing is sent.

To check it, the exchange can hand out the very rows that the other ranks would send
(``whole_layer``); to time it, rows of a buffer are enough, because times do not depend on values.

Experts that are placed otherwise than Megatron-Core has it, or replicated, stand in *slots* (``layer.slots``): such
layers have slots for experts, and a routing that is worked out outside of them.

Shapes: R = virtual ranks, T = tokens of one rank, E = experts, P = slots of all ranks (P = E where every expert has
its own), D = hidden size, N = rows that a rank sends or receives.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_ep_bench.layer.backends import fill_experts_
from moe_ep_bench.layer.build import DEFAULT_PARTS, LayerPair, build_layers
from moe_ep_bench.layer.experts import ROUTED, ExpertWeights, expert_weights
from moe_ep_bench.layer.megatron import MoELayer, default_groups, token_dispatcher
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.slots import Slots
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies import Routing

# What goes through the all-to-alls of one layer run, in order.
_ROWS, _WEIGHTS, _RESULTS = "rows", "weights", "results"


class VirtualGroup:
    """As much of a process group as Megatron-Core asks of it while layers are built: its size and one's rank."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.current = 0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self.current


class Exchange:
    """What a rank hears from the others.

    Attributes:
        counts_RP: int64, pairs that each rank sends to each slot; known before the layer runs.
        checks_counts: look whether each rank's router sends what ``counts_RP`` says; waits for the device.
        stats_SE: what a batch-wide policy's statistics sum up to over ranks; None where there are none.
    """

    def __init__(self, group: VirtualGroup) -> None:
        self._group = group
        self.counts_RP = torch.empty(0)
        self.stats_SE: Tensor | None = None
        self.checks_counts = True
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self._kept: dict[tuple[int | None, str], list[tuple[Tensor, ...] | None]] | None = None
        self._layer: int | None = None
        self._step = 0

    def begin(self, layer: int | None = None) -> None:
        """A rank's run of a layer begins; of several layers each keeps what is sent there apart."""
        self._layer, self._step = layer, 0

    def keep(self) -> None:
        """From now on keep what ranks send, and hand it on once all have sent."""
        self._kept = {}

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Answer where ranks would meet, while the block runs."""
        with (
            mock.patch.object(token_dispatcher, "all_to_all", self.all_to_all),
            mock.patch.object(token_dispatcher, "gather_from_sequence_parallel_region", self.gather_counts),
        ):
            yield

    def gather_counts(self, counts_P: Tensor, *_: Any, **__: Any) -> Tensor:
        """Stands for the gather of all ranks' counts: int64 [R * P].

        Raises:
            RuntimeError: this rank's router chose otherwise than was announced, and that is looked for.
        """
        announced_P = self.counts_RP[self._group.current].to(counts_P.device)
        if self.checks_counts and not torch.equal(counts_P.to(announced_P.dtype), announced_P):
            raise RuntimeError("the layer's router sends other counts than were worked out for it")
        return self.counts_RP.to(counts_P.device, non_blocking=True).flatten()

    def sum_over_ranks(self, stats_SE: Tensor) -> Tensor:
        """Stands for the all-reduce of a policy's statistics."""
        return stats_SE if self.stats_SE is None else self.stats_SE

    def all_to_all(
        self, group: Any, sent: Tensor, output_splits: Any = None, input_splits: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        """Stands for an all-to-all: as many rows as the other ranks send here."""
        what = (_ROWS, _WEIGHTS, _RESULTS)[self._step % 3]
        self._step += 1
        outgoing, incoming = _whole(input_splits, sent), _whole(output_splits, sent)
        if self._kept is not None:
            here = self._group.current
            arrived = self._kept.setdefault((self._layer, what), [None] * self._group.size())
            received = None if None in arrived else torch.cat([pieces[here] for pieces in arrived if pieces])
            arrived[here] = sent.split(outgoing)
            if received is not None:
                return received
        return self._buffer(sum(incoming), sent)

    def _buffer(self, num_rows: int, like: Tensor) -> Tensor:
        """Rows of random values, kept from run to run and grown when they do not suffice."""
        width = like.shape[1] if like.ndim == 2 else 0
        buffer = self._buffers.get((width, like.dtype))
        if buffer is None or len(buffer) < num_rows:
            shape = (num_rows, width) if width else (num_rows,)
            buffer = torch.rand(shape, device=like.device).to(like.dtype)
            self._buffers[width, like.dtype] = buffer
        return buffer[:num_rows]


def _whole(splits: Any, sent: Tensor) -> list[int]:
    if splits is None:
        return [len(sent)]
    return splits.tolist() if hasattr(splits, "tolist") else list(splits)


def virtual_groups(group: VirtualGroup) -> Any:
    """Megatron-Core's process groups with ``group`` in place of the expert-parallel one."""
    groups = copy.copy(default_groups())
    groups.ep = groups.tp_ep = group
    return groups


def see_from(layers: LayerPair, rank: int) -> list[int]:
    """Let both layers take themselves for ``rank``'s; return the experts or slots that are its own."""
    per_rank = layers.native.config.num_moe_experts // layers.ep_group.size()
    indices = list(range(rank * per_rank, (rank + 1) * per_rank))
    for layer in (layers.native, layers.policy):
        layer.local_expert_indices = layer.token_dispatcher.local_expert_indices = indices
        if hasattr(layer.token_dispatcher, "ep_rank"):
            layer.token_dispatcher.ep_rank = rank
    return indices


class VirtualRanks:
    """The two layers of ``build_layers`` seen from each of ``num_ranks`` expert-parallel ranks.

    One rank's weights are held; all ranks share them unless ``become`` is asked to load a rank's own. With
    ``num_slots`` the layers have so many slots in place of the model's experts, and every run is to be ``routed``.
    Needs an initialised ``torch.distributed`` of one process, ``initialize_expert_parallel(1)`` and ``device_scope()``.
    """

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        num_ranks: int,
        seed: int,
        parts: Parts = DEFAULT_PARTS,
        num_slots: int | None = None,
    ) -> None:
        self.model, self.dtype, self.device, self.seed = model, dtype, device, seed
        self.num_slots = model.num_experts if num_slots is None else num_slots
        self.slots = Slots.contiguous(self.num_slots, num_ranks)
        self.group = VirtualGroup(num_ranks)
        self.exchange = Exchange(self.group)
        groups = virtual_groups(self.group)
        layer_model = model if num_slots is None else _with_slots(model, num_slots)
        self.layers: LayerPair = build_layers(layer_model, dtype, device, self.group, seed, parts, groups=groups)
        self.layers.policy_router.sum_over_ranks = self.exchange.sum_over_ranks

    @property
    def num_ranks(self) -> int:
        return self.group.size()

    def become(self, rank: int, *, own_weights: bool = False) -> None:
        """See the layers from ``rank``; with ``own_weights`` its slots get the weights that ``slots`` say."""
        self.group.current = rank
        indices = see_from(self.layers, rank)
        if own_weights:
            with torch.no_grad():
                held = self.slots.expert_P[indices].tolist()
                fill_experts_(self.layers.native.experts, [self._weights[expert] for expert in held])

    @functools.cached_property
    def _weights(self) -> list[ExpertWeights]:
        """All experts' weights: for checks at small sizes."""
        sizes = self.model.hidden_size, self.model.ffn_hidden_size
        experts = range(self.model.num_experts)
        return [expert_weights(self.seed, ROUTED, e, *sizes, self.device, self.dtype) for e in experts]

    def connected(self) -> contextlib.AbstractContextManager[None]:
        """Let the exchange answer where ranks would meet, while the block runs."""
        return self.exchange.connected()

    @contextlib.contextmanager
    def routed(self, layer: MoELayer, routing: Routing) -> Iterator[None]:
        """Let ``layer`` route as was worked out before, over its slots, while the block runs."""

        def given(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return routing.weights_TE, routing.map_TE

        with mock.patch.object(layer.router, "routing", given):
            yield

    def run(self, layer: MoELayer, hidden_T1D: Tensor) -> Tensor:
        """One run of ``layer`` as the current rank: [T, 1, D]. Inside ``connected``."""
        self.exchange.begin()
        output_T1D, _ = layer(hidden_T1D)
        return output_T1D

    def whole_layer(
        self,
        layer: MoELayer,
        hidden: Sequence[Tensor],
        prepare: Callable[[int], contextlib.AbstractContextManager[None]],
    ) -> list[Tensor]:
        """All ranks' outputs, [T, 1, D] each, with the values that real ranks would compute.

        Ranks run three times: first each tells what it sends, then it computes what was sent to it,
        then it combines what came back. Holds all ranks' rows at once: for checks at small sizes.

        Args:
            hidden: every rank's hidden states.
            prepare: puts a rank's routing into the layer, for as long as the context lasts.
        """
        self.exchange.keep()
        outputs: list[Tensor] = []
        with self.connected():
            for _ in range(3):
                outputs = []
                for rank in range(self.num_ranks):
                    self.become(rank, own_weights=True)
                    with prepare(rank):
                        outputs.append(self.run(layer, hidden[rank]))
        return outputs


def _with_slots(model: ModelSpec, num_slots: int) -> ModelSpec:
    """A layer of so many experts, with room for any number of them per token; nothing but given routings suits it."""
    fields = {"num_experts": num_slots, "num_groups": None, "top_groups": None, "group_score_experts": None}
    return model.model_copy(update=fields)
