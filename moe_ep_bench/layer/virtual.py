"""A layer or model seen from each of many expert-parallel ranks, one after another, on the device that is here.

A *virtual rank* is a point of view: each MoE layer's dispatcher is given a number of ranks and its own among them.
Where ranks would meet, ``VirtualStack`` answers: with the counts of all ranks' routing, the statistics of all ranks'
tokens, and rows of the right number. Between these points Megatron-Core's code and ours run as on real ranks.

Rows of a buffer are enough for timing, because times do not depend on values. For checks ``side_by_side`` hands out the
very rows that the other ranks would send.

Shapes: R = virtual ranks, T = tokens of a rank, D = hidden size, P = slots of all ranks (here one for each expert), S =
rows of a batch-wide policy's statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from moe_ep_bench.layer.components import fill_experts_
from moe_ep_bench.layer.experts import ROUTED, ROWS, ExpertWeights, expert_weights, seeded_generator
from moe_ep_bench.layer.megatron import token_dispatcher, with_experts_on
from moe_ep_bench.layer.passes import KeyValueCache
from moe_ep_bench.layer.stack import Stack, layer_seed


class VirtualGroup:
    """As much of a process group as Megatron-Core asks of it while layers are built: its size and this rank."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.current = 0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self.current


class Announced(NamedTuple):
    """What all ranks' routing of one layer sends, known before it runs.

    Attributes:
        counts_RP: int64, pairs that each rank sends to each slot.
        stats_SE: a batch-wide policy's statistics, summed over ranks; None = the policy has none.
    """

    counts_RP: Tensor
    stats_SE: Tensor | None = None


class VirtualStack:
    """A layer or a model, seen from each of ``num_ranks`` expert-parallel ranks, and what each hears from the others.

    One rank's weights are held, and all ranks share them unless ``become`` loads a rank's own. Needs an initialised
    ``torch.distributed`` of one process, ``expert_parallel_groups(1)`` and ``device_scope()``.

    Attributes:
        announced: what all ranks send in each MoE layer; set it before a run.
        checks_counts: check that each rank's router sends what was announced; waits for the device.
    """

    def __init__(self, build: Callable[..., Stack], num_ranks: int) -> None:
        """``build``: a ``Stack`` that is called with ``groups``."""
        self.group = VirtualGroup(num_ranks)
        self.stack = build(groups=with_experts_on(self.group))
        self.announced: Mapping[int | None, Announced] = {}
        self.checks_counts = True
        self._weights_of = cache(self._make_weights)
        self._buffers: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._generator = seeded_generator(self.stack.device, self.stack.seed, ROWS)
        self._kept: dict[tuple[int | None, int], list[tuple[Tensor, ...] | None]] | None = None
        self._layer: int | None = None
        self._step = 0
        for layer, forms in self.stack.forms.items():
            forms.policy.router.sum_over_ranks = partial(self._sum_over_ranks, layer)
            for moe in forms:
                moe.register_forward_pre_hook(partial(self._enter, layer))

    def become(self, rank: int, *, own_weights: bool = False) -> None:
        """See every MoE layer from ``rank``, with its ``own_weights`` or with those that all share."""
        self.group.current = rank
        per_rank = self.stack.model.num_experts // self.group.size()
        experts = list(range(rank * per_rank, (rank + 1) * per_rank))
        for layer, forms in self.stack.forms.items():
            for moe in forms:
                moe.local_expert_indices = moe.token_dispatcher.local_expert_indices = experts
                if hasattr(moe.token_dispatcher, "ep_rank"):
                    moe.token_dispatcher.ep_rank = rank
            if own_weights:
                with torch.no_grad():
                    fill_experts_(forms.native.experts, [self._weights_of(layer, expert) for expert in experts])

    def _make_weights(self, layer: int | None, expert: int) -> ExpertWeights:
        """An expert's weights, which are kept: for checks at small sizes."""
        stack = self.stack
        sizes = stack.model.hidden_size, stack.model.ffn_hidden_size
        return expert_weights(layer_seed(stack.seed, layer), ROUTED, expert, *sizes, stack.device, stack.dtype)

    def connected(self) -> contextlib.AbstractContextManager[Any]:
        """Answer where ranks would meet, while the block runs."""
        return mock.patch.multiple(
            token_dispatcher,
            all_to_all=self._all_to_all,
            gather_from_sequence_parallel_region=self._gather_counts,
        )

    def side_by_side(self, batches: Sequence[Any], prepare: Callable[[int], None]) -> list[Tensor]:
        """Return all ranks' outputs, with the values that real ranks would compute.

        All ranks run in turn, and again: two rounds for each MoE layer, there and back, after a first in which all
        send. Holds all ranks' rows of all layers at once: for checks at small sizes.

        Args:
            batches: what each rank runs on.
            prepare: puts a rank's routing into the MoE layers.
        """
        self._kept = {}
        outputs: list[Tensor] = []
        with self.connected():
            for _ in range(1 + 2 * len(self.stack.forms)):
                outputs = []
                for rank, batch in enumerate(batches):
                    self.become(rank, own_weights=True)
                    prepare(rank)
                    outputs.append(self.stack.run(batch))
        return outputs

    def new_cache(self, max_requests: int, context_length: int) -> KeyValueCache:
        """Return a filled cache of a model, which each rank uses for as many requests as it has."""
        filled, stack = KeyValueCache(max_requests, context_length), self.stack
        assert stack.gpt is not None
        nothing_RE = torch.zeros(self.group.size(), stack.model.num_experts, dtype=torch.int64, device=stack.device)
        self.announced = dict.fromkeys(stack.forms, Announced(nothing_RE))
        self.checks_counts = False  # The gate routes; what it selects does not matter.
        stack.select_forms(())
        with self.connected():
            filled.fill_(stack.gpt, stack.device, stack.seed)
        self.checks_counts = True
        return filled

    # ---- what a rank hears from the others ---------------------------------------------------------------------------

    def _enter(self, layer: int | None, module: Any, inputs: Any) -> None:
        """Begin a rank's run of an MoE layer; each layer keeps apart what is sent in it."""
        self._layer, self._step = layer, 0

    def _sum_over_ranks(self, layer: int | None, stats_SE: Tensor) -> Tensor:
        """Stand in for the all-reduce of a policy's statistics."""
        announced_SE = self.announced[layer].stats_SE
        return stats_SE if announced_SE is None else announced_SE

    def _gather_counts(self, counts_P: Tensor, *_: Any, **__: Any) -> Tensor:
        """Stand in for the gather of all ranks' counts: int64 [R * P].

        Raises:
            RuntimeError: counts are checked, and this rank's router sends others than announced.
        """
        counts_RP = self.announced[self._layer].counts_RP
        announced_P = counts_RP[self.group.current].to(counts_P.device)
        if self.checks_counts and not torch.equal(counts_P.to(announced_P.dtype), announced_P):
            raise RuntimeError("the layer's router sends other counts than were worked out for it")
        return counts_RP.to(counts_P.device, non_blocking=True).flatten()

    def _all_to_all(
        self, group: Any, sent: Tensor, output_splits: Any = None, input_splits: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        """Stand in for an all-to-all: return as many rows as the other ranks send here."""
        what = self._layer, self._step % 3  # rows, weights or results
        self._step += 1
        outgoing, incoming = _sizes(input_splits, sent), _sizes(output_splits, sent)
        if self._kept is not None:  # What ranks send is handed on once all have sent.
            here = self.group.current
            arrived = self._kept.setdefault(what, [None] * self.group.size())
            received = None if None in arrived else torch.cat([pieces[here] for pieces in arrived if pieces])
            arrived[here] = sent.split(outgoing)
            if received is not None:
                return received
        return self._buffer(sum(incoming), sent)

    def _buffer(self, num_rows: int, like: Tensor) -> Tensor:
        """Rows of random values, kept from run to run and grown when there are too few.

        Hidden states as a layer's norm gives them, of both signs and a mean square of 1: a GPU's power, and so its
        clock, depends on the bits that change. Routing weights lie between 0 and 1.
        """
        kind = like.shape[1:], like.dtype
        if kind not in self._buffers or len(self._buffers[kind]) < num_rows:
            draw, generator = torch.randn if like.ndim > 1 else torch.rand, self._generator
            shape = num_rows, *like.shape[1:]
            self._buffers[kind] = draw(shape, dtype=like.dtype, device=like.device, generator=generator)
        return self._buffers[kind][:num_rows]


def _sizes(splits: Any, sent: Tensor) -> list[int]:
    """Rows to or from each rank; without splits there is one rank."""
    if splits is None:
        return [len(sent)]
    return splits.tolist() if hasattr(splits, "tolist") else list(splits)
