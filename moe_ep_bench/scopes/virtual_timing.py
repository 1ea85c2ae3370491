"""How long each virtual rank's part of a layer takes: measured on this device, or modelled for another.

``MeasuredRanks`` runs the very layer that real ranks run, as one rank after another. In most cases that is one run of
the layer, from gate to combine. Where rows are too many to be held at once, or experts stand in slots, it is two: the
router on all of the rank's tokens, and then the rest of the layer with that routing, chunk by chunk.

Shapes: T = tokens of a rank, E = experts, P = slots, L = slots of a rank, C = chunks, D = hidden size.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moe_ep_bench.devices import Device
from moe_ep_bench.layer.build import DTYPES
from moe_ep_bench.layer.experts import HIDDEN, seeded_generator
from moe_ep_bench.layer.megatron import MoELayer
from moe_ep_bench.layer.phases import instrumented
from moe_ep_bench.layer.virtual import VirtualRanks
from moe_ep_bench.measure.cache import CacheFlush, RotatingInput
from moe_ep_bench.measure.modelled import RankWork, modelled_legs
from moe_ep_bench.measure.timeline import Leg, legs_of
from moe_ep_bench.policies import Routing
from moe_ep_bench.scopes.comparison import Comparison
from moe_ep_bench.scopes.traffic import CaseRouter, Share, Traffic, chunks_of
from moe_ep_bench.timer import PhaseRecorder, clock_for

# What the router's own run has taken.
_ROUTING = ("gate", "policy")


@dataclass(frozen=True)
class RankTime:
    """What one rank's run took, between its meetings with others.

    Attributes:
        legs, meetings: see ``measure.timeline.legs_of``.
        host_us: host time to issue it all; ``thread_cpu_us`` is CPU time of the issuing thread.
    """

    legs: list[Leg]
    meetings: list[str]
    host_us: float
    thread_cpu_us: float


class RankTimer(Protocol):
    """Says what a rank's run of a case takes.

    Attributes:
        needs_tokens: whether it wants the rank's share; else it is given None.
    """

    needs_tokens: bool

    def time(self, router: Any, traffic: Any, rank: int, share: Any, index: int, *, first: bool = False) -> RankTime:
        """Of a layer: a ``CaseRouter``, its ``Traffic`` and ``Share``; of a whole model what holds those of layers."""
        ...


def rank_work(traffic: Traffic, rank: int) -> RankWork:
    """What a rank does in one run of a layer."""
    sent = int(traffic.counts_CRP[:, rank].sum())
    return RankWork(traffic.num_tokens_R[rank], sent, traffic.received(rank).sum(0))


def run_timed(recorder: PhaseRecorder, flush: Callable[[], None] | None, run: Callable[[], object]) -> RankTime:
    """Time one run of what ``recorder`` is in, cut at its meetings; waits for the device."""
    if flush is not None:
        flush()
    recorder.clock.wait()
    cpu_start, host_start = time.thread_time_ns(), time.perf_counter_ns()
    recorder.begin()
    run()
    recorder.end()
    host_us, cpu_us = (time.perf_counter_ns() - host_start) / 1e3, (time.thread_time_ns() - cpu_start) / 1e3
    return RankTime(*legs_of(recorder.segments_us()), host_us, cpu_us)


@dataclass(frozen=True)
class ModelledRanks:
    """Ranks on a device that is not here: nothing runs."""

    comparison: Comparison
    device: Device
    needs_tokens: ClassVar[bool] = False

    def time(
        self, router: CaseRouter, traffic: Traffic, rank: int, share: Share | None, index: int, *, first: bool = False
    ) -> RankTime:
        """See ``measure.modelled``; the same whenever it is asked."""
        legs, meetings = modelled_legs(
            self.device,
            self.comparison.model,
            rank_work(traffic, rank),
            by_policy=router.case.policy is not None,
            batch_wide=traffic.stats_SE is not None,
            alone=self.comparison.ep_size == 1,
            bytes_per_value=DTYPES[self.comparison.experiment.layer.dtype].itemsize,
            experts=self.comparison.parts.experts,
        )
        return RankTime(legs, meetings, 0.0, 0.0)


class MeasuredRanks:
    """Ranks that this device stands in for, one after another."""

    needs_tokens = True

    def __init__(self, comparison: Comparison, device: torch.device, num_chunks: int, most_tokens: int) -> None:
        """``num_chunks``: of a rank's tokens; ``most_tokens``: of any rank on any batch."""
        self._comparison, self._device, self._num_chunks = comparison, device, num_chunks
        self._recorder = PhaseRecorder(clock_for(device))
        self._flush = CacheFlush(device) if comparison.experiment.measure.flush_l2 else None
        self._layers: dict[int | None, VirtualRanks] = {}
        self._inputs = RotatingInput(self._hidden(most_tokens), len(comparison.cases))

    def time(
        self, router: CaseRouter, traffic: Traffic, rank: int, share: Share | None, index: int, *, first: bool = False
    ) -> RankTime:
        """Run the layer as the rank whose share it is.

        Args:
            first: look whether the layer's router sends what ``traffic`` says; waits for the device.
        """
        assert share is not None
        assert share.context.rank == rank
        hidden_T1D = self._inputs.next()[: share.num_tokens]
        if router.slots.is_contiguous and self._num_chunks == 1:
            return self._in_one(router, traffic, share, index, hidden_T1D, check=first)
        return self._in_parts(router, traffic, share, index, hidden_T1D, check=first)

    def _in_one(
        self, router: CaseRouter, traffic: Traffic, share: Share, index: int, hidden_T1D: Tensor, *, check: bool
    ) -> RankTime:
        virtual, layer = self._as_rank(router, traffic, share, index)
        self._announce(virtual, traffic, 0, check=check)
        with virtual.connected():
            return self._timed(layer, lambda: virtual.run(layer, hidden_T1D))

    def _in_parts(
        self, router: CaseRouter, traffic: Traffic, share: Share, index: int, hidden_T1D: Tensor, *, check: bool
    ) -> RankTime:
        virtual, layer = self._as_rank(router, traffic, share, index)
        with virtual.connected():
            routed = self._timed(layer, lambda: layer.router(hidden_T1D))
        routing = router.route(share, index, traffic.stats_SE)
        map_TP = router.slots.spread(routing.map_TE, share.context.rank)
        weights_TP = router.slots.spread_weights(routing.weights_TE, map_TP)
        virtual, layer = self._as_rank(router, traffic, share, index, router.slots.num_slots)
        bodies = []
        for number, chunk in enumerate(chunks_of(share.num_tokens, self._num_chunks)):
            layer.router.replay_TE = None
            self._announce(virtual, traffic, number, check=check)
            with virtual.connected(), virtual.routed(layer, Routing(map_TP[chunk], weights_TP[chunk])):
                bodies.append(self._timed(layer, lambda chunk=chunk: virtual.run(layer, hidden_T1D[chunk])))
        return _joined(routed, bodies)

    def _announce(self, virtual: VirtualRanks, traffic: Traffic, chunk: int, *, check: bool) -> None:
        """Put what all ranks send onto the device, where a gather would leave it, before the clock runs."""
        virtual.exchange.counts_RP = traffic.counts_CRP[chunk].to(self._device)
        virtual.exchange.checks_counts = check

    def _as_rank(
        self, router: CaseRouter, traffic: Traffic, share: Share, index: int, num_slots: int | None = None
    ) -> tuple[VirtualRanks, MoELayer]:
        """The layer of a case, seen from the share's rank, with its routing in it."""
        virtual = self._virtual(num_slots)
        virtual.become(share.context.rank)
        virtual.exchange.stats_SE = traffic.stats_SE
        layers = virtual.layers
        layer = layers.native if router.case.policy is None else layers.policy
        layer.router.replay_TE = share.logits_TE
        if router.case.policy is not None:
            layers.policy_router.policy = router.case.policy
            layers.policy_router.context = router.context(share, index)
        return virtual, layer

    def _virtual(self, num_slots: int | None) -> VirtualRanks:
        """Layers of the model's experts (None), or of so many slots; built when they are first asked for."""
        if num_slots == self._comparison.model.num_experts:
            num_slots = None
        if num_slots not in self._layers:
            self._layers[num_slots] = VirtualRanks(
                self._comparison.model,
                DTYPES[self._comparison.experiment.layer.dtype],
                self._device,
                self._comparison.ep_size,
                self._comparison.experiment.layer.seed,
                self._comparison.parts,
                num_slots,
            )
        return self._layers[num_slots]

    def _timed(self, layer: MoELayer, run: Callable[[], object]) -> RankTime:
        with instrumented(layer, self._recorder, lambda: None):
            return run_timed(self._recorder, self._flush, run)

    def _hidden(self, num_tokens: int) -> Tensor:
        seed, model = self._comparison.experiment.layer.seed, self._comparison.model
        generator = seeded_generator(self._device, seed, HIDDEN, num_tokens)
        hidden_TD = torch.randn(num_tokens, model.hidden_size, generator=generator, device=self._device)
        return hidden_TD.to(DTYPES[self._comparison.experiment.layer.dtype]).unsqueeze(1)


def _joined(routed: RankTime, bodies: Sequence[RankTime]) -> RankTime:
    """One run of the layer: the router's, then the rest, whose chunks follow each other between the same meetings."""
    rest: list[Leg] = [defaultdict(float) for _ in bodies[0].legs]
    for body in bodies:
        assert body.meetings == bodies[0].meetings
        for leg, part in zip(rest, body.legs, strict=True):
            for phase, time_us in part.items():
                leg[phase] += time_us
    for phase in _ROUTING:
        rest[0].pop(phase, None)
    for phase, time_us in routed.legs[-1].items():
        rest[0][phase] += time_us
    every = (routed, *bodies)
    return RankTime(
        [*routed.legs[:-1], *rest],
        [*routed.meetings, *bodies[0].meetings],
        sum(one.host_us for one in every),
        sum(one.thread_cpu_us for one in every),
    )
