"""How long each virtual rank's run of a layer or a whole model takes: measured here, or modelled for another device.

``MeasuredRanks`` runs the very layer or model that real ranks run, as one rank after another. Where a layer's rows are
too many to be held at once, or experts stand in slots, a run is two: the router on all of the rank's tokens, and then
the rest of the layer with that routing, chunk by chunk.

Shapes: T = tokens of a rank, E = experts, P = slots, L = slots of a rank, C = chunks, D = hidden size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_ep_bench.bench.plan import Comparison
from moe_ep_bench.bench.traffic import CaseRouter, Share, Traffic, chunks_of
from moe_ep_bench.cost_model.devices import VALUE_BYTES, Device
from moe_ep_bench.cost_model.layer import RankWork, layer_segments
from moe_ep_bench.cost_model.timeline import Leg, legs_of
from moe_ep_bench.cost_model.whole_model import PassWork, pass_segments
from moe_ep_bench.layer.experts import DTYPES, HIDDEN, seeded_generator
from moe_ep_bench.policies import Routing
from moe_ep_bench.policies.waits import watched_waits
from moe_ep_bench.schema import PhaseKey
from moe_ep_bench.timing.memory import Allocations, CacheFlush, RotatingInput
from moe_ep_bench.timing.timer import HOST, THREAD_CPU, PhaseRecorder, Stopwatch, clock_for, no_meeting

if TYPE_CHECKING:  # They need Megatron-Core, which modelled ranks do not.
    from moe_ep_bench.layer.passes import Pass
    from moe_ep_bench.layer.virtual import VirtualRanks

# What the router's own run has taken.
_ROUTING = ("gate", "policy")

# One rank's tokens of a batch in every MoE layer.
RankShares = Mapping[int | None, Share]


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


@dataclass(frozen=True)
class ModelledRanks:
    """Ranks on a device that is not here: nothing runs."""

    comparison: Comparison
    device: Device

    def time(self, router: CaseRouter, traffic: Traffic, rank: int) -> RankTime:
        """See ``cost_model.layer`` and ``cost_model.whole_model``; the same whenever it is asked."""
        comparison, subject = self.comparison, self.comparison.subject
        layers = {
            layer: RankWork(
                one.num_tokens_R[rank],
                int(one.counts_CRP[:, rank].sum()),
                one.received(rank).sum(0),
                int(sum(one.num_tokens_R)),
            )
            for layer, one in traffic.layers.items()
        }
        how: dict[str, Any] = {
            "by_policy": router.case.policy is not None,
            "batch_wide": traffic.is_batch_wide,
            "alone": comparison.ep_size == 1,
            "bytes_per_value": VALUE_BYTES[comparison.experiment.layer.dtype],
            "dtype": comparison.experiment.layer.dtype,
        }
        if traffic.lengths_R is None:
            return RankTime(*legs_of(layer_segments(self.device, comparison.model, layers[None], **how)))
        lengths, context_length = traffic.lengths_R[rank], subject.context_length
        work = PassWork((), len(lengths), context_length, layers) if context_length else PassWork(lengths, 0, 0, layers)
        return RankTime(*legs_of(pass_segments(self.device, comparison.model, subject.num_layers, work, **how)))


class MeasuredRanks:
    """Ranks that this device stands in for, one after another.

    Attributes:
        watch: times them.
        waits: where the host waited for a GPU in a run of each case before timing (``policies.waits``).
    """

    def __init__(self, comparison: Comparison, device: torch.device, num_chunks: int = 1) -> None:
        """``num_chunks``: of a rank's tokens; more than one of a layer alone."""
        self._comparison, self._device, self._num_chunks = comparison, device, num_chunks
        settings = comparison.experiment.measure
        flush = CacheFlush(device) if settings.flush_l2 else None
        recorder = PhaseRecorder(clock_for(device))
        self.watch = Stopwatch(recorder, no_meeting, settings.preroll_us, flush, Allocations(device))
        self.waits: dict[str, Counter[str]] = {}
        self._built: dict[int, VirtualRanks] = {}
        subject, virtual = comparison.subject, self._virtual(comparison.model.num_experts)
        self._hidden = self._cache = None
        if subject.name == "layer":
            layer, most = comparison.experiment.layer, subject.most_tokens
            generator = seeded_generator(device, layer.seed, HIDDEN, most)
            hidden_TD = torch.randn(most, comparison.model.hidden_size, generator=generator, device=device)
            self._hidden = RotatingInput(hidden_TD.to(DTYPES[layer.dtype]).unsqueeze(1), len(comparison.cases))
        elif subject.context_length:
            self._cache = virtual.new_cache(subject.most_tokens, subject.context_length)

    def time(
        self, router: CaseRouter, traffic: Traffic, rank: int, shares: RankShares, *, first: bool = False
    ) -> RankTime:
        """Run as the rank whose shares these are.

        Args:
            first: look whether every layer's router sends what ``traffic`` says; waits for the device.
        """
        assert all(share.context.rank == rank for share in shares.values())
        batch = self._batch(traffic, rank, shares)
        virtual = self._as_rank(self._comparison.model.num_experts, router, traffic, rank, shares)
        timed = partial(self._timed, virtual, router.case.case_id, counts=not first)
        self._announce(virtual, traffic, 0, check=first)
        if not router.slots.is_contiguous or self._num_chunks > 1:
            return self._in_parts(virtual, router, traffic, rank, shares, batch, first=first)
        with virtual.connected():
            if first and self._device.type == "cuda":
                with watched_waits(self._device) as self.waits[router.case.case_id]:
                    virtual.stack.run(batch)
            return timed(lambda: virtual.stack.run(batch))

    def _in_parts(
        self,
        virtual: VirtualRanks,
        router: CaseRouter,
        traffic: Traffic,
        rank: int,
        shares: RankShares,
        hidden_T1D: Tensor,
        *,
        first: bool,
    ) -> RankTime:
        case_id, how = router.case.case_id, {"counts": not first}
        with virtual.connected():
            route = partial(virtual.stack.moe_layers[None].router, hidden_T1D)
            routed = self._timed(virtual, case_id, route, **how)
        share = shares[None]
        on_slots = router.on_slots(router.route(share, traffic.index, traffic.layers[None].stats_SE), rank)
        virtual = self._as_rank(router.slots.num_slots, router, traffic, rank, shares)
        bodies = []
        for number, chunk in enumerate(chunks_of(share.num_tokens, self._num_chunks)):
            self._announce(virtual, traffic, number, check=first)
            routing = Routing(on_slots.map_TE[chunk], on_slots.weights_TE[chunk])
            with virtual.connected(), virtual.routed({None: routing}):
                run = partial(virtual.stack.run, hidden_T1D[chunk])
                bodies.append(self._timed(virtual, case_id, run, **how))
        return _joined(routed, bodies)

    def _announce(self, virtual: VirtualRanks, traffic: Traffic, chunk: int, *, check: bool) -> None:
        """Put what all ranks send onto the device, where a gather would leave it, before the clock runs."""
        virtual.announced = {layer: one.announced(chunk, self._device) for layer, one in traffic.layers.items()}
        virtual.exchange.checks_counts = check

    def _as_rank(
        self, num_slots: int, router: CaseRouter, traffic: Traffic, rank: int, shares: RankShares
    ) -> VirtualRanks:
        """Layers of so many slots, seen from a rank, with a case's routing in them."""
        virtual = self._virtual(num_slots)
        virtual.become(rank)
        router.enter(virtual.stack, shares, traffic.index)
        return virtual

    def _virtual(self, num_slots: int) -> VirtualRanks:
        """Layers of so many slots, built when they are first asked for."""
        if num_slots not in self._built:
            from moe_ep_bench.bench.building import builder
            from moe_ep_bench.layer.virtual import VirtualRanks

            build = builder(self._comparison, self._device, num_slots)
            self._built[num_slots] = VirtualRanks(build, self._comparison.ep_size)
        return self._built[num_slots]

    def _timed(self, virtual: VirtualRanks, case_id: str, run: Callable[[], object], *, counts: bool) -> RankTime:
        """One run of a case, cut at its meetings; waits for the device. ``counts``: its allocations do."""
        with virtual.stack.instrumented(self.watch.recorder, no_meeting):
            times = self.watch.time(case_id, run, counts=counts)
        return RankTime(*legs_of(self.watch.recorder.segments_us()), times[HOST], times[THREAD_CPU])

    def _batch(self, traffic: Traffic, rank: int, shares: RankShares) -> Tensor | Pass:
        """What the subject runs on: hidden states [T, 1, D] of a layer, a model's pass."""
        if self._hidden is not None:
            return self._hidden.next()[: shares[None].num_tokens]
        assert traffic.lengths_R is not None
        index, lengths = traffic.index, traffic.lengths_R[rank]
        from moe_ep_bench.bench.building import random_pass

        return random_pass(self._comparison, self._device, index, rank, lengths, self._cache)


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
