"""Hold virtual ranks against the dense reference, at a small hidden size and with rows that are truly exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from moe_ep_bench.bench.plan import CaseSpec, Comparison
from moe_ep_bench.bench.subjects import LayerSubject
from moe_ep_bench.bench.traffic import CaseRouter, RankBatches, Shares, traffic_of
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.layer.reference import DenseReference
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.layer.virtual import VirtualRanks, with_slots
from moe_ep_bench.workload import TokenBatch

# Tokens of each rank that are held against the reference, and the hidden size there.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64


def checks_of(
    comparison: Comparison,
    routers: Sequence[CaseRouter],
    layers: Mapping[int | None, LayerSubject],
    device: torch.device,
    begin: Callable[[str], object],
) -> Iterator[tuple[CaseSpec, int | None, Callable[[], float]]]:
    """Each case in each MoE layer, and what runs it on few tokens of batch 0 and returns its worst error.

    Args:
        begin: called with a case's id ahead of each of its runs.
    """
    small = _SmallLayers(comparison, device)
    for layer, subject in layers.items():
        few = [_few_of(tokens) for tokens in RankBatches(subject, 0)]
        for router in routers:
            begin(router.case.case_id)
            yield router.case, layer, partial(small.error, router, subject, few)


class _SmallLayers:
    """A comparison's layer at a small hidden size, with values that real ranks would compute."""

    def __init__(self, comparison: Comparison, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        self._model = comparison.model.scaled(min(1.0, _CHECKED_WIDTH / comparison.model.hidden_size))
        self._seed = comparison.experiment.layer.seed
        self._built: dict[int, VirtualRanks] = {}
        self._inputs: dict[tuple[int, ...], tuple[list[Tensor], DenseReference]] = {}

    def error(self, router: CaseRouter, subject: LayerSubject, ranks: Sequence[TokenBatch]) -> float:
        """The worst token's error when all ranks of a case exchange real rows.

        Args:
            subject: the layer.
            ranks: every rank's few tokens of batch 0.
        """
        (traffic,) = traffic_of(subject, [router], ranks, 0, self._device)
        shares = [Shares(subject, tokens, rank, self._device).of(router.case) for rank, tokens in enumerate(ranks)]
        routings = [router.route(share, 0, traffic.stats_SE) for share in shares]
        virtual = self._virtual(router.slots)
        virtual.announced = {None: traffic.announced(0, self._device)}

        def prepare(rank: int) -> contextlib.AbstractContextManager[None]:
            router.enter(virtual.stack, {None: shares[rank]}, 0)
            if router.slots.is_contiguous:
                return contextlib.nullcontext()
            return virtual.routed({None: router.on_slots(routings[rank], rank)})

        hidden, reference = self._input([tokens.num_tokens for tokens in ranks])
        outputs = virtual.side_by_side([mine.unsqueeze(1) for mine in hidden], prepare)
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

    def _virtual(self, slots: ExpertPlacement) -> VirtualRanks:
        if slots.num_slots not in self._built:
            plain, parts = slots.num_slots == self._model.num_experts, self._comparison.parts
            model = self._model if plain else with_slots(self._model, slots.num_slots)
            build = partial(Stack, model, torch.float32, self._device, seed=self._seed, parts=parts)
            self._built[slots.num_slots] = VirtualRanks(build, self._comparison.ep_size)
        virtual = self._built[slots.num_slots]
        virtual.placement = slots
        return virtual


def _few_of(tokens: TokenBatch) -> TokenBatch:
    """Some of a rank's tokens from the first to the last, and so of both where some are padding."""
    num_checked = min(_CHECKED_TOKENS, tokens.num_tokens)
    return tokens.rows(torch.linspace(0, max(tokens.num_tokens - 1, 0), num_checked).long())
