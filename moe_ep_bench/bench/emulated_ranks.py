"""Virtual ranks: all ranks' routing of a batch, the time of each rank by itself, and ranks side by side.

For each batch all ranks' routing is worked out first, outside of any layer (``traffic``). Then every rank's run is
timed on the device that is here (``virtual_ranks``), or modelled. Each rank's times are put together over iterations,
and ranks are then set side by side with their meetings (``cost_model.timeline``), which links model from each layer's
own bytes (``meetings``). With two batches that overlap, each micro-batch is modelled by itself.

Shapes: R = virtual ranks, B = batches, C = columns of a sample, M = micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.bench.measure import Case, Runner
from moe_ep_bench.bench.meetings import meeting_us
from moe_ep_bench.bench.point import CaseSpec, Point
from moe_ep_bench.bench.result import Result, columns_of
from moe_ep_bench.bench.routing import Router
from moe_ep_bench.bench.tokens import Batches
from moe_ep_bench.bench.traffic import Traffic, route_batch
from moe_ep_bench.config import NO_OVERLAP
from moe_ep_bench.cost_model.phases import PassWork, RankWork, layer_segments, pass_segments
from moe_ep_bench.cost_model.timeline import Chain, RankTime, compose, compose_alike, legs_of, side_by_side
from moe_ep_bench.schema import BESIDE_TOTAL, TOTAL, PhaseKey, phase_key
from moe_ep_bench.timing.protocol import BREAKDOWN, PLAIN, Step


class EmulatedRanks(Runner):
    """All virtual ranks of a point, side by side; subclasses time each of them.

    Args:
        device: what runs the layers, and routes.
        begin: called with an id ahead of what is done for a case, or for the point as a whole.
        routed: called whenever a rank is routed by all cases, with its share of ``Point.routing_work``.
        batches: see ``Router``.

    Attributes:
        cases: those that are still in order.
        traffic: by case id, all ranks' routing of the batch that is timed.
        errors: beside the dense reference, by case id and layer.
    """

    def __init__(
        self,
        point: Point,
        cases: Sequence[CaseSpec],
        device: torch.device,
        begin: Callable[[str], None],
        routed: Callable[[int], object] = lambda _: None,
        batches: Batches | None = None,
    ) -> None:
        self.point, self.device, self.begin = point, device, begin
        self.num_ranks, self.num_batches = point.ep_size, point.workload.num_batches
        self.router = Router(point, device, routed=routed, batches=batches)
        self.cases = [Case(case, self) for case in cases]
        self.traffic: dict[str, Traffic] = {}
        self.errors: dict[tuple[str, int | None], float] = {}
        self.result = Result()

    def steps(self, batch: int) -> list[Step]:
        """The steps of a batch; none where nothing runs."""
        return []

    def taken(self, case: Case) -> list[RankTime]:
        """What all ranks took of the batch: of each micro-batch, float64 [R]."""
        raise NotImplementedError

    def schedule(self) -> Iterator[Sequence[Step]]:
        """Batch by batch: route it on all ranks, time its steps, then set ranks side by side.

        Each batch gives times twice, once plain and once broken down.
        """
        kept = [Step(batch, 0, kind) for kind in (PLAIN, BREAKDOWN) for batch in range(self.num_batches)]
        self.result.expect([case.case_id for case in self.cases], kept, columns_of(self.point), self.num_ranks)
        for batch in range(self.num_batches):
            begin = partial(self.begin, self.point.comparison_id)
            traffic = route_batch(self.router, [case.spec for case in self.cases], batch, begin)
            self.traffic = {case.case_id: of_case for case, of_case in zip(self.cases, traffic, strict=True)}
            if steps := self.steps(batch):
                yield steps
            for case in self.cases:
                self.result.rows[case.case_id] += self.traffic[case.case_id].rows
                self.result.frontiers[case.case_id] += self.traffic[case.case_id].frontiers
            self._set_side_by_side(batch)

    def close(self) -> None:
        """Let go of rows and tokens, which cases and their runner would keep in a circle."""
        self.cases, self.traffic = [], {}

    def finish(self) -> Result:
        """Samples and routing of the cases that are in order."""
        for case in self.cases:
            for row in self.result.rows[case.case_id]:
                row["reference_error"] = self.errors.get((case.case_id, row["layer"])) if row["batch"] == 0 else None
        return self.result

    # ---- ranks side by side ------------------------------------------------------------------------------------------

    def _set_side_by_side(self, batch: int) -> None:
        """Put the ranks of all cases behind links: every micro-batch's chain, of cases with one outline at once."""
        by_outline: dict[object, list[tuple[Case, list[Chain], Mapping[str, Any]]]] = {}
        for case in self.cases:
            taken, parts = self.taken(case), self.traffic[case.case_id].parts(self.point.num_parts)
            chains = [self._chain(times, part) for times, part in zip(taken, parts, strict=True)]
            if self.point.overlap != NO_OVERLAP:
                chains = [chain.with_shared_beside() for chain in chains]
            outline = tuple(chain.outline for chain in chains)
            by_outline.setdefault(outline, []).append((case, chains, taken[0].beside))
        is_one_of_many = self.point.num_parts > 1 and self.point.scope == "layer"
        for alike in by_outline.values():
            chains = [Chain.stacked(part_C, self.num_ranks) for part_C in zip(*(one[1] for one in alike), strict=True)]
            times_CR = (compose_alike if is_one_of_many else compose)(chains)
            for place, (case, _, beside) in enumerate(alike):
                times: dict[PhaseKey, Any] = {**{name: time_us[place] for name, time_us in times_CR.items()}, **beside}
                whole: dict[PhaseKey, Any] = {name: times[name] for name in (TOTAL, *BESIDE_TOTAL) if name in times}
                self.result.keep(case.case_id, Step(batch, 0, PLAIN), whole, slice(None))
                self.result.keep(case.case_id, Step(batch, 0, BREAKDOWN), times, slice(None))

    def _chain(self, times: RankTime, traffic: Traffic) -> Chain:
        """A micro-batch's way through all ranks."""
        link_us: dict[PhaseKey, NDArray[np.float64]] = {}
        held: dict[PhaseKey, float] = {}
        for layer, of_layer in traffic.layers.items():
            for phase, (time_us, share) in meeting_us(self.point, of_layer).items():
                link_us[phase_key(layer, phase)], held[phase_key(layer, phase)] = time_us, share
        return Chain(times.legs, times.meetings, link_us, held)


class ModelledRanks(EmulatedRanks):
    """Virtual ranks on a device that is not here: nothing runs."""

    def taken(self, case: Case) -> list[RankTime]:
        self.begin(case.case_id)
        parts = self.traffic[case.case_id].parts(self.point.num_parts)
        return [modelled_time(self.point, case.spec, part) for part in parts]


def modelled_time(point: Point, case: CaseSpec, traffic: Traffic) -> RankTime:
    """Times of all ranks on a modelled device (``cost_model.phases``), float64 [R]."""
    device, model, dtype = point.device, point.model, point.experiment.layer.dtype
    assert device is not None
    if (policy := case.policy) is not None:
        device = device.for_policy(policy.name, model.num_experts)
    exchange, num_parts = point.sent_for, point.num_parts
    by_rank = exchange in ("rank", "node")
    layers = {
        layer: RankWork(
            np.array(of_layer.num_tokens_R),
            of_layer.counts_RP.sum(axis=1),
            of_layer.received_RL,
            sum(of_layer.num_tokens_R),
            None if of_layer.shared_RR is None else of_layer.shared_RR.sum(axis=0),
            of_layer.copies("rank").sum(axis=0) if by_rank else None,
        )
        for layer, of_layer in traffic.layers.items()
    }
    how: dict[str, Any] = {
        "by_policy": policy is not None,
        "batch_wide": any(of_layer.stats_SE is not None for of_layer in traffic.layers.values()),
        "alone": point.ep_size == 1,
        "dtype": dtype,
        "dispatch_dtype": point.experiment.layer.dispatch_dtype,
        "exchange": exchange,
        "solving_us": 0.0 if traffic.number else (case.replication and case.replication.solving_us) or 0.0,
    }
    if traffic.lengths_R is None:
        return RankTime(*legs_of(layer_segments(device, model, layers[None], **how)))
    passes_R = []
    for rank, lengths in enumerate(traffic.lengths_R):
        of_rank = {layer: work.of_rank(rank) for layer, work in layers.items() if layer is not None}
        work = PassWork(lengths, point.context_length, of_rank, num_parts)
        passes_R.append(legs_of(pass_segments(device, model, point.num_layers, work, **how)))
    return RankTime(side_by_side([legs for legs, _ in passes_R]), passes_R[0][1])
