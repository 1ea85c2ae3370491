"""Run many expert-parallel ranks on the device that is here, one after another, through the same layer or model.

A *virtual rank* is a point of view: each MoE layer's dispatcher is told how many ranks there are and which of them it
is. Where ranks would meet, ``VirtualRanks`` answers: with the counts of all ranks' routing, the statistics of all
ranks' tokens, and rows of the right number. Between these points Megatron-Core's code and ours run as on real ranks.

Rows of a buffer are enough for timing, because times do not depend on values: ``MeasuredRanks`` times so the very layer
or model that real ranks run. For checks ``side_by_side`` hands out the very rows that the other ranks would send:
``SmallLayers`` holds cases so against the dense reference, at a small hidden size.

Shapes: R = virtual ranks, T = tokens of a rank, N = tokens of all ranks, D = hidden size, P = slots of all ranks (here
one for each expert), S = rows of a batch-wide policy's statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.routing import Batches, CaseRouter, Share
from moe_ep_bench.bench.session import builder, random_pass
from moe_ep_bench.bench.traffic import LayerTraffic, Routed, Traffic, traffic_of
from moe_ep_bench.cost_model.timeline import RankTime, legs_of
from moe_ep_bench.layer.components import fill_experts_
from moe_ep_bench.layer.experts import (
    DTYPES,
    HIDDEN,
    ROUTED,
    ROWS,
    DenseReference,
    ExpertWeights,
    expert_weights,
    seeded_generator,
)
from moe_ep_bench.layer.megatron import token_dispatcher, with_experts_on
from moe_ep_bench.layer.passes import KeyValueCache, Pass
from moe_ep_bench.layer.stack import Stack, layer_seed
from moe_ep_bench.schema import BESIDE_TOTAL
from moe_ep_bench.timing.device import CacheFlush, RotatingInput
from moe_ep_bench.timing.protocol import PLAIN, Step, measure
from moe_ep_bench.timing.timer import PhaseRecorder, Stopwatch, clock_for, no_meeting

# Tokens of each rank that are held against the reference, and the hidden size there.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64


# ---- virtual ranks ---------------------------------------------------------------------------------------------------


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

    @staticmethod
    def of(traffic: LayerTraffic, device: torch.device) -> Announced:
        """The same on the device, where a gather would leave it."""
        return Announced(torch.from_numpy(traffic.counts_RP).to(device), traffic.stats_SE)


class VirtualRanks:
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
                moe.register_forward_pre_hook(partial(self._begin, layer))

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
        instead = {"gather_from_sequence_parallel_region": self._gather_counts}
        return mock.patch.multiple(token_dispatcher, all_to_all=self._all_to_all, **instead)

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

    def _begin(self, layer: int | None, module: Any, inputs: Any) -> None:
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


# ---- times -----------------------------------------------------------------------------------------------------------


class MeasuredRanks:
    """Ranks that this device stands in for, one after another.

    Attributes:
        virtual: the layer or model, seen from one of them.
        watch: times them.
        unclocked: by case id, where the host waits for the device and no clock sees it (``facts.Conditions``).
    """

    def __init__(self, comparison: Comparison, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        measure, layer = comparison.experiment.measure, comparison.experiment.layer
        flush = CacheFlush(device) if measure.flush_l2 else None
        self.watch = Stopwatch(PhaseRecorder(clock_for(device)), no_meeting, flush, measure.hold_us)
        self.unclocked: dict[str, list[str]] = {}
        self.virtual = VirtualRanks(builder(comparison, device), comparison.ep_size)
        most = comparison.most_tokens
        self._hidden = self._cache = None
        if comparison.scope == "layer":
            generator = seeded_generator(device, layer.seed, HIDDEN, most)
            hidden_TD = torch.randn(most, comparison.model.hidden_size, generator=generator, device=device)
            self._hidden = RotatingInput(hidden_TD.to(DTYPES[layer.dtype]).unsqueeze(1), len(comparison.cases))
        elif comparison.context_length:
            self._cache = self.virtual.new_cache(most, comparison.context_length)

    def times(self, routed: Routed, begin: Callable[[str], None]) -> list[list[list[RankTime]]]:
        """Run the measuring loop on one batch, rank after rank: of each case and rank the last rounds, which count."""
        settings, ranks = self._comparison.experiment.measure, range(self.virtual.group.size())
        batches, index = routed[0][0].batches, routed[0][1].index
        times: list[list[list[RankTime]]] = [[[] for _ in ranks] for _ in routed]

        def keep(number: int, step: Step, rank_time: RankTime) -> None:
            if step.iteration >= settings.fewest_rounds - settings.iterations:
                times[number][step.rank].append(rank_time)

        for iteration in range(settings.fewest_rounds):
            for rank in ranks:
                of_rank = {layer: batches.share(layer, index, rank) for layer in self._comparison.workloads}
                turns = [RankCase(self, router, traffic, rank, of_rank) for router, traffic in routed]
                measure(turns, [Step(index, iteration, PLAIN, rank)], begin, keep)
        return times

    def batch(self, traffic: Traffic, rank: int) -> Tensor | Pass:
        """What a rank runs: hidden states [T, 1, D] of a layer, a model's pass."""
        if self._hidden is not None:
            return self._hidden.next()[: traffic.layers[None].num_tokens_R[rank]]
        assert traffic.lengths_R is not None
        lengths = traffic.lengths_R[rank]
        return random_pass(self._comparison, self._device, traffic.index, rank, lengths, self._cache)

    def announce(self, traffic: Traffic) -> None:
        """Put what all ranks send on the device before the clock runs."""
        layers = traffic.layers.items()
        self.virtual.announced = {layer: Announced.of(of_layer, self._device) for layer, of_layer in layers}


@dataclass(frozen=True, eq=False)
class RankCase:
    """A case on one rank's tokens of a batch, as ``timing.protocol`` runs and times it.

    Attributes:
        of_rank: the tokens in every MoE layer.
    """

    ranks: MeasuredRanks
    router: CaseRouter
    traffic: Traffic
    rank: int
    of_rank: Mapping[int | None, Share]

    @property
    def case_id(self) -> str:
        return self.router.case.case_id

    @contextlib.contextmanager
    def ready(self, batch: int, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], object]]:
        virtual = self.ranks.virtual
        virtual.become(self.rank)
        shares = {layer: share.of(self.router.case) for layer, share in self.of_rank.items()}
        self.router.enter(virtual.stack, shares)
        self.ranks.announce(self.traffic)
        run = partial(virtual.stack.run, self.ranks.batch(self.traffic, self.rank))
        timed = virtual.stack.instrumented(recorder, no_meeting) if recorder else contextlib.nullcontext()
        with virtual.connected(), timed:
            yield run

    def time(self, step: Step) -> RankTime:
        """One iteration; the first looks whether every layer's router sends what was announced, and waits for that."""
        watch, is_first = self.ranks.watch, step.iteration == 0
        self.ranks.virtual.checks_counts = is_first
        with (
            self.ready(step.batch, watch.recorder) as run,
            watch.recorder.clock.unseen() if is_first else contextlib.nullcontext([]) as places,
        ):
            times = watch.time(self.case_id, run)
        if places:
            self.ranks.unclocked[self.case_id] = sorted({*self.ranks.unclocked.get(self.case_id, ()), *places})
        beside = {name: times[name] for name in BESIDE_TOTAL if name in times}
        return RankTime(*legs_of(watch.recorder.segments_us()), beside)


# ---- values ----------------------------------------------------------------------------------------------------------


class SmallLayers:
    """A comparison's layer at a small hidden size, with values that real ranks would compute."""

    def __init__(self, comparison: Comparison, device: torch.device) -> None:
        self._device, self._seed = device, comparison.experiment.layer.seed
        self._batches = Batches(comparison, device, few=_CHECKED_TOKENS)
        self._model = comparison.model.scaled(min(1.0, _CHECKED_WIDTH / comparison.model.hidden_size))
        self._input = cache(self._make_input)
        build = partial(Stack, self._model, torch.float32, device, seed=self._seed, parts=comparison.parts)
        self._virtual = VirtualRanks(build, comparison.ep_size)

    def error(self, router: CaseRouter, layer: int | None) -> float:
        """The worst token's error when all ranks of a case exchange real rows, on few tokens of batch 0."""
        (traffic,) = traffic_of(self._batches, layer, 0, [router])
        ranks = range(self._batches.comparison.ep_size)
        shares = [self._batches.share(layer, 0, rank).of(router.case) for rank in ranks]
        self._virtual.announced = {None: Announced.of(traffic, self._device)}
        hidden, reference = self._input(tuple(traffic.num_tokens_R))
        outputs = self._virtual.side_by_side(
            [of_rank.unsqueeze(1) for of_rank in hidden],
            lambda rank: router.enter(self._virtual.stack, {None: shares[rank]}),
        )
        stats_MSE = None if traffic.stats_SE is None else traffic.stats_SE[None]
        weights_TE = torch.cat([router.route(share, stats_MSE).weights_TE for share in shares])
        return reference.worst_error(torch.cat(outputs)[:, 0], weights_TE)

    def _make_input(self, sizes: tuple[int, ...]) -> tuple[list[Tensor], DenseReference]:
        """Every rank's hidden states, and the reference for all of them."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        hidden_ND = torch.randn(sum(sizes), self._model.hidden_size, generator=generator, device=self._device)
        return list(hidden_ND.split(sizes)), DenseReference(self._model, hidden_ND, self._seed)
