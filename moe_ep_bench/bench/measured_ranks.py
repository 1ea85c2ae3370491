"""Run a comparison as each of its ranks, one after another, on the device that is here.

``MeasuredRanks`` times the very layer or model that real ranks run. Where experts stand in slots, a run is two: the
router on the rank's tokens, and then the rest of the layer with that routing. ``SmallLayers`` holds cases against the
dense reference, at a small hidden size and with rows that are truly exchanged.

Shapes: T = tokens of a rank, N = tokens of all ranks, D = hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor

from moe_ep_bench.bench.building import builder, random_pass
from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.rank_times import RankTime
from moe_ep_bench.bench.routing import Batches, CaseRouter, Share, on_slots
from moe_ep_bench.bench.traffic import Traffic, traffic_of
from moe_ep_bench.cost_model.timeline import legs_of
from moe_ep_bench.layer.experts import DTYPES, HIDDEN, seeded_generator
from moe_ep_bench.layer.passes import Pass
from moe_ep_bench.layer.reference import DenseReference
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.layer.virtual import VirtualRanks, with_slots
from moe_ep_bench.timing.memory import Allocations, CacheFlush, RotatingInput
from moe_ep_bench.timing.timer import HOST, THREAD_CPU, PhaseRecorder, Stopwatch, clock_for, no_meeting

# What the router's own run has taken.
_ROUTING = ("gate", "policy")
# Tokens of each rank that are held against the reference, and the hidden size there.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64


class MeasuredRanks:
    """Ranks that this device stands in for, one after another.

    Attributes:
        watch: times them.
    """

    def __init__(self, comparison: Comparison, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        measure, layer = comparison.experiment.measure, comparison.experiment.layer
        flush = CacheFlush(device) if measure.flush_l2 else None
        self.watch = Stopwatch(PhaseRecorder(clock_for(device)), no_meeting, flush, Allocations(device))
        self._built = cache(self._build)
        most, virtual = comparison.most_tokens, self._built(comparison.model.num_experts)
        self._hidden = self._cache = None
        if comparison.scope == "layer":
            generator = seeded_generator(device, layer.seed, HIDDEN, most)
            hidden_TD = torch.randn(most, comparison.model.hidden_size, generator=generator, device=device)
            self._hidden = RotatingInput(hidden_TD.to(DTYPES[layer.dtype]).unsqueeze(1), len(comparison.cases))
        elif comparison.context_length:
            self._cache = virtual.new_cache(most, comparison.context_length)

    def time(
        self,
        router: CaseRouter,
        traffic: Traffic,
        rank: int,
        shares: Mapping[int | None, Share],
        *,
        first: bool = False,
    ) -> RankTime:
        """Run as a rank.

        Args:
            shares: the rank's tokens in every MoE layer.
            first: look whether every layer's router sends what ``traffic`` says; waits for the device. Its allocations
                do not count.
        """
        batch, slots = self._batch(traffic, rank, shares), next(iter(traffic.layers.values())).slots

        def as_rank(num_slots: int) -> VirtualRanks:
            """Layers of so many slots, seen from the rank, with the case's routing in them.

            What all ranks send is on the device, where a gather would leave it, before the clock runs.
            """
            virtual = self._built(num_slots)
            virtual.become(rank)
            router.enter(virtual.stack, shares)
            virtual.announced = {layer: of_layer.announced(self._device) for layer, of_layer in traffic.layers.items()}
            virtual.exchange.checks_counts = first
            return virtual

        timed = partial(self._timed, case_id=router.case.case_id, counts=not first)
        virtual = as_rank(self._comparison.model.num_experts)
        with virtual.connected():
            if slots.is_contiguous:
                return timed(virtual, partial(virtual.stack.run, batch))
            routed = timed(virtual, partial(virtual.stack.moe_layers[None].router, batch))
        routing = router.route(shares[None], traffic.layers[None].stats_SE)
        rest = as_rank(slots.num_slots)
        with rest.connected(), rest.routed({None: on_slots(slots, routing, rank)}):
            return _joined(routed, timed(rest, partial(rest.stack.run, batch)))

    def _build(self, num_slots: int) -> VirtualRanks:
        return VirtualRanks(builder(self._comparison, self._device, num_slots), self._comparison.ep_size)

    def _timed(self, virtual: VirtualRanks, run: Callable[[], object], *, case_id: str, counts: bool) -> RankTime:
        """One run of a case, cut at its meetings; waits for the device. ``counts``: its allocations do."""
        with virtual.stack.instrumented(self.watch.recorder, no_meeting):
            times = self.watch.time(case_id, run, counts=counts)
        return RankTime(*legs_of(self.watch.recorder.segments_us()), times[HOST], times[THREAD_CPU])

    def _batch(self, traffic: Traffic, rank: int, shares: Mapping[int | None, Share]) -> Tensor | Pass:
        """What runs: hidden states [T, 1, D] of a layer, a model's pass."""
        if self._hidden is not None:
            return self._hidden.next()[: shares[None].num_tokens]
        assert traffic.lengths_R is not None
        lengths = traffic.lengths_R[rank]
        return random_pass(self._comparison, self._device, traffic.index, rank, lengths, self._cache)


def _joined(routed: RankTime, body: RankTime) -> RankTime:
    """One run of the layer: the router's, then the rest, whose own routing does not count."""
    first = {phase: time_us for phase, time_us in body.legs[0].items() if phase not in _ROUTING}
    for phase, time_us in routed.legs[-1].items():
        first[phase] = first.get(phase, 0.0) + time_us
    return RankTime(
        [*routed.legs[:-1], first, *body.legs[1:]],
        [*routed.meetings, *body.meetings],
        routed.host_us + body.host_us,
        routed.thread_cpu_us + body.thread_cpu_us,
    )


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
        ((traffic,), _) = traffic_of(self._batches, layer, 0, [router])
        shares = [of_rank.of(router.case) for of_rank in self._batches.shares(layer, 0)]
        routings, slots = [router.route(share, traffic.stats_SE) for share in shares], traffic.slots
        virtual = self._built(slots.num_slots)
        virtual.placement = slots
        virtual.announced = {None: traffic.announced(self._device)}

        def prepare(rank: int) -> contextlib.AbstractContextManager[None]:
            router.enter(virtual.stack, {None: shares[rank]})
            if slots.is_contiguous:
                return contextlib.nullcontext()
            return virtual.routed({None: on_slots(slots, routings[rank], rank)})

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
