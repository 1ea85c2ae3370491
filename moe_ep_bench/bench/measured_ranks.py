"""Run a comparison as each of its ranks, one after another, on the device that is here.

``MeasuredRanks`` times the very layer or model that real ranks run. ``SmallLayers`` holds cases against the dense
reference, at a small hidden size and with rows that are truly exchanged.

Shapes: T = tokens of a rank, N = tokens of all ranks, D = hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.routing import Batches, CaseRouter, Share
from moe_ep_bench.bench.session import builder, random_pass
from moe_ep_bench.bench.traffic import LayerTraffic, Traffic, traffic_of
from moe_ep_bench.cost_model.timeline import RankTime, legs_of
from moe_ep_bench.layer.experts import DTYPES, HIDDEN, DenseReference, seeded_generator
from moe_ep_bench.layer.passes import Pass
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.layer.virtual import Announced, VirtualRanks
from moe_ep_bench.timing.device import CacheFlush, RotatingInput
from moe_ep_bench.timing.protocol import Runnable, Step, find_waiting
from moe_ep_bench.timing.timer import HOST, THREAD_CPU, PhaseRecorder, Stopwatch, clock_for, no_meeting

# Tokens of each rank that are held against the reference, and the hidden size there.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64


class MeasuredRanks:
    """Ranks that this device stands in for, one after another.

    Attributes:
        virtual: the layer or model, seen from one of them.
        watch: times them.
    """

    def __init__(self, comparison: Comparison, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        measure, layer = comparison.experiment.measure, comparison.experiment.layer
        flush = CacheFlush(device) if measure.flush_l2 else None
        self.watch = Stopwatch(PhaseRecorder(clock_for(device)), no_meeting, flush)
        self.virtual = VirtualRanks(builder(comparison, device), comparison.ep_size)
        most = comparison.most_tokens
        self._hidden = self._cache = None
        if comparison.scope == "layer":
            generator = seeded_generator(device, layer.seed, HIDDEN, most)
            hidden_TD = torch.randn(most, comparison.model.hidden_size, generator=generator, device=device)
            self._hidden = RotatingInput(hidden_TD.to(DTYPES[layer.dtype]).unsqueeze(1), len(comparison.cases))
        elif comparison.context_length:
            self._cache = self.virtual.new_cache(most, comparison.context_length)

    def note_waiting(self, cases: Sequence[Runnable], begin: Callable[[str], None]) -> None:
        """Find in which of a rank's cases the host waits for the device; one that waits on a rank waits on all."""
        self.virtual.exchange.checks_counts = False
        waiting = find_waiting(cases, self.watch.recorder.clock, no_meeting, lambda beyond_us_C: beyond_us_C, begin)
        self.watch = self.watch._replace(waiting=self.watch.waiting | waiting)

    def batch(self, traffic: Traffic, rank: int) -> Tensor | Pass:
        """What a rank runs: hidden states [T, 1, D] of a layer, a model's pass."""
        if self._hidden is not None:
            return self._hidden.next()[: traffic.layers[None].num_tokens_R[rank]]
        assert traffic.lengths_R is not None
        lengths = traffic.lengths_R[rank]
        return random_pass(self._comparison, self._device, traffic.index, rank, lengths, self._cache)

    def announce(self, traffic: Traffic) -> None:
        """Put what all ranks send on the device, where a gather would leave it, before the clock runs."""
        self.virtual.announced = {layer: _announced(one, self._device) for layer, one in traffic.layers.items()}


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
        watch = self.ranks.watch
        self.ranks.virtual.exchange.checks_counts = step.iteration == 0
        with self.ready(step.batch, watch.recorder) as run:
            times = watch.time(self.case_id, run)
        return RankTime(*legs_of(watch.recorder.segments_us()), times[HOST], times[THREAD_CPU])


def _announced(traffic: LayerTraffic, device: torch.device) -> Announced:
    """What the exchange answers a rank's tokens with."""
    return Announced(torch.from_numpy(traffic.counts_RP).to(device), traffic.stats_SE)


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
        shares = [of_rank.of(router.case) for of_rank in self._batches.shares(layer, 0)]
        self._virtual.announced = {None: _announced(traffic, self._device)}
        hidden, reference = self._input(tuple(traffic.num_tokens_R))
        outputs = self._virtual.side_by_side(
            [of_rank.unsqueeze(1) for of_rank in hidden],
            lambda rank: router.enter(self._virtual.stack, {None: shares[rank]}),
        )
        weights_TE = torch.cat([router.route(share, traffic.stats_SE).weights_TE for share in shares])
        return reference.worst_error(torch.cat(outputs)[:, 0], weights_TE)

    def _make_input(self, sizes: tuple[int, ...]) -> tuple[list[Tensor], DenseReference]:
        """Every rank's hidden states, and the reference for all of them."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        hidden_ND = torch.randn(sum(sizes), self._model.hidden_size, generator=generator, device=self._device)
        return list(hidden_ND.split(sizes)), DenseReference(self._model, hidden_ND, self._seed)
