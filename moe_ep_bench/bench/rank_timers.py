"""How long each virtual rank's run of a layer or a whole model takes: measured here, or modelled for another device.

``MeasuredRanks`` runs the very layer or model that real ranks run, as one rank after another. Where experts stand in
slots, a run is two: the router on the rank's tokens, and then the rest of the layer with that routing.

Shapes: T = tokens of a rank, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.routing import CaseRouter, Share
from moe_ep_bench.bench.traffic import Traffic
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.cost_model.layer import RankWork, layer_segments
from moe_ep_bench.cost_model.timeline import Leg, legs_of
from moe_ep_bench.cost_model.whole_model import PassWork, pass_segments
from moe_ep_bench.layer.experts import DTYPES, HIDDEN, seeded_generator
from moe_ep_bench.schema import PhaseKey
from moe_ep_bench.timing.memory import Allocations, CacheFlush, RotatingInput
from moe_ep_bench.timing.timer import HOST, THREAD_CPU, PhaseRecorder, Stopwatch, clock_for, no_meeting

if TYPE_CHECKING:  # They need Megatron-Core, which modelled ranks do not.
    from moe_ep_bench.layer.passes import Pass
    from moe_ep_bench.layer.virtual import VirtualRanks

# What the router's own run has taken.
_ROUTING = ("gate", "policy")


@dataclass(frozen=True)
class RankTime:
    """What one rank's run took, between its meetings with others.

    Attributes:
        legs, meetings: see ``cost_model.timeline.legs_of``.
        host_us: host time to issue it all; ``thread_cpu_us`` is CPU time of the issuing thread.
    """

    legs: list[Leg]
    meetings: list[PhaseKey]
    host_us: float = 0.0
    thread_cpu_us: float = 0.0


def modelled_time(comparison: Comparison, router: CaseRouter, traffic: Traffic, rank: int) -> RankTime:
    """What a rank takes on a device that is not here: see ``cost_model.layer`` and ``cost_model.whole_model``."""
    device, model, dtype = comparison.device, comparison.model, comparison.experiment.layer.dtype
    assert device is not None
    layers = {
        layer: RankWork(
            of_layer.num_tokens_R[rank],
            int(of_layer.counts_RP[rank].sum()),
            of_layer.received(rank),
            int(sum(of_layer.num_tokens_R)),
            of_layer.num_shared(rank),
        )
        for layer, of_layer in traffic.layers.items()
    }
    how: dict[str, Any] = {
        "by_policy": router.case.policy is not None,
        "batch_wide": any(of_layer.stats_SE is not None for of_layer in traffic.layers.values()),
        "alone": comparison.ep_size == 1,
        "bytes_per_value": VALUE_BYTES[dtype],
        "dtype": dtype,
    }
    if traffic.lengths_R is None:
        return RankTime(*legs_of(layer_segments(device, model, layers[None], **how)))
    lengths, context = traffic.lengths_R[rank], comparison.context_length
    work = PassWork((), len(lengths), context, layers) if context else PassWork(lengths, 0, 0, layers)
    return RankTime(*legs_of(pass_segments(device, model, comparison.num_layers, work, **how)))


class MeasuredRanks:
    """Ranks that this device stands in for, one after another.

    Attributes:
        watch: times them.
    """

    def __init__(self, comparison: Comparison, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        measure, layer = comparison.experiment.measure, comparison.experiment.layer
        flush = CacheFlush(device) if measure.flush_l2 else None
        recorder = PhaseRecorder(clock_for(device))
        self.watch = Stopwatch(recorder, no_meeting, flush, Allocations(device))
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
        batch, case_id = self._batch(traffic, rank, shares), router.case.case_id

        def as_rank(num_slots: int) -> VirtualRanks:
            """Layers of so many slots, seen from the rank, with the case's routing in them.

            What all ranks send is on the device, where a gather would leave it, before the clock runs.
            """
            virtual = self._built(num_slots)
            virtual.become(rank)
            router.enter(virtual.stack, shares, traffic.index)
            virtual.announced = {layer: of_layer.announced(self._device) for layer, of_layer in traffic.layers.items()}
            virtual.exchange.checks_counts = first
            return virtual

        virtual = as_rank(self._comparison.model.num_experts)
        whole = partial(virtual.stack.run, batch)
        with virtual.connected():
            if router.slots.is_contiguous:
                return self._timed(virtual, case_id, whole, counts=not first)
            gate = partial(virtual.stack.moe_layers[None].router, batch)
            routed = self._timed(virtual, case_id, gate, counts=not first)
        routing = router.route(shares[None], traffic.index, traffic.layers[None].stats_SE)
        rest = as_rank(router.slots.num_slots)
        with rest.connected(), rest.routed({None: router.on_slots(routing, rank)}):
            return _joined(routed, self._timed(rest, case_id, partial(rest.stack.run, batch), counts=not first))

    def _build(self, num_slots: int) -> VirtualRanks:
        from moe_ep_bench.bench.building import builder
        from moe_ep_bench.layer.virtual import VirtualRanks

        return VirtualRanks(builder(self._comparison, self._device, num_slots), self._comparison.ep_size)

    def _timed(self, virtual: VirtualRanks, case_id: str, run: Callable[[], object], *, counts: bool) -> RankTime:
        """One run of a case, cut at its meetings; waits for the device. ``counts``: its allocations do."""
        with virtual.stack.instrumented(self.watch.recorder, no_meeting):
            times = self.watch.time(case_id, run, counts=counts)
        return RankTime(*legs_of(self.watch.recorder.segments_us()), times[HOST], times[THREAD_CPU])

    def _batch(self, traffic: Traffic, rank: int, shares: Mapping[int | None, Share]) -> Tensor | Pass:
        """What runs: hidden states [T, 1, D] of a layer, a model's pass."""
        if self._hidden is not None:
            return self._hidden.next()[: shares[None].num_tokens]
        from moe_ep_bench.bench.building import random_pass

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
