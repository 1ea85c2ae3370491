"""The measurement behind ``emulate``: every case on every virtual rank, one after another, set side by side.

What is measured is a layer that stands alone, whose key is None, or a whole model with its MoE layers by number. First
few tokens are held against the dense reference (``small_layers``).

For each batch all ranks' routing is worked out first, outside of any layer (``traffic``). Then every rank's run is
timed, or modelled (``rank_timers``), all cases moments apart and in an order that changes as in ``run``; ranks with the
same to do are timed once. Each rank's times are put together over iterations, and ranks are then set side by side with
their meetings (``cost_model.timeline``), where what moves is modelled (``links``) from each layer's own bytes.

Shapes: R = virtual ranks, V = cases, B = batches, C = columns of a sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.job import Job, ceilings_of, split_reason, watched_machine
from moe_ep_bench.bench.rank_timers import MeasuredRanks, RankTime, modelled_time
from moe_ep_bench.bench.routing import CaseRouter, Share
from moe_ep_bench.bench.rows import Outcome, columns_of
from moe_ep_bench.bench.traffic import RoutedBatches, Traffic
from moe_ep_bench.cost_model.timeline import compose, median_legs
from moe_ep_bench.cost_model.transport import Rows
from moe_ep_bench.layer.experts import DTYPES
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.reference import TOLERANCE
from moe_ep_bench.schema import TOTAL, PhaseKey, phase_key
from moe_ep_bench.timing.protocol import BREAKDOWN, PLAIN, Step, measure
from moe_ep_bench.timing.timer import HOST, THREAD_CPU

# Bytes of what travels beside rows: a count, a number of a policy's statistics.
_COUNT_BYTES, _STATISTIC_BYTES = 8, 8

Work = tuple[Any, ...]
"""What a rank has to do: equal for ranks that take as long."""


def measure_comparison(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> Outcome:
    """Measure ``cases`` on virtual ranks."""
    job.enter(comparison)
    with device_scope(), torch.inference_mode():
        emulation = Emulation(comparison, cases, job.ranks.device, job.begin)
        if comparison.device is not None:
            emulation.model()
            return emulation.outcome()
        # Only a layer that is built needs Megatron-Core.
        from moe_ep_bench.layer.megatron import expert_parallel_groups

        expert_parallel_groups(1, comparison.experiment.measure.timeout_s + 60)
        failed = emulation.check(job.survive)
        conditions = emulation.measure() if emulation.cases else None
        free_memory(job.ranks.device)
        outcome = emulation.outcome()
        outcome.unmeasured = {case.case_id: split_reason(reason) for case, reason in failed.items()}
        outcome.conditions = conditions
        return outcome


class _Turn(NamedTuple):
    """A case on one rank's tokens of a batch, as ``timing.protocol.measure`` times it."""

    case_id: str
    time: Callable[[Step], RankTime]


class Emulation:
    """One comparison's measurement.

    Args:
        device: what runs the layers, and routes.
        begin: called with a case's id ahead of each of its runs.

    Attributes:
        columns: of a sample.
        routed: the cases that are still in order, and their routing.
        samples: by case id, microseconds [R, B, C].
        runs: how many were ``timed``, and how many ``shared`` the time of another rank.
    """

    def __init__(
        self, comparison: Comparison, cases: Sequence[CaseSpec], device: torch.device, begin: Callable[[str], None]
    ) -> None:
        self.comparison, self.device, self.begin = comparison, device, begin
        self.num_ranks, self.num_batches = comparison.ep_size, comparison.workload.num_batches
        self.columns, self.routed = columns_of(comparison), RoutedBatches(comparison, cases, device)
        size = self.num_ranks, self.num_batches, len(self.columns)
        self.samples = {case.case_id: np.full(size, np.nan) for case in cases}
        self.runs: Counter[str] = Counter(timed=0, shared=0)

    @property
    def cases(self) -> list[CaseSpec]:
        return self.routed.cases

    @property
    def layer_us(self) -> NDArray[np.float64]:
        """The slowest rank's time of every case and batch, microseconds [V, B], once they are measured."""
        samples_VRBC = np.stack([self.samples[case.case_id] for case in self.cases])
        return samples_VRBC[..., self.columns.index(TOTAL)].max(axis=1)

    def check(self, survive: Callable[[Exception], str]) -> dict[CaseSpec, str]:
        """Hold every case against the dense reference, at a small hidden size and with rows that are truly exchanged.

        Cases that fail are left out, and returned with the reason.

        Args:
            survive: returns the reason where a case raises (``Job.survive``).
        """
        from moe_ep_bench.bench.small_layers import SmallLayers

        small, allowed = SmallLayers(self.comparison, self.device), TOLERANCE[torch.float32]
        failed: dict[CaseSpec, str] = {}
        for place, layer in enumerate(self.comparison.workloads):
            for case in (case for case in self.cases if case not in failed):
                self.begin(case.case_id)
                try:
                    error = small.error(self.routed.routers.of(case), layer)
                except Exception as problem:
                    failed[case] = survive(problem)
                    continue
                metrics = {"reference_error": np.full(self.num_ranks, error)}
                self.routed.metrics[case.case_id].put((slice(None), place), metrics)
                if error > allowed:
                    what = f"output differs from the dense reference by {error:.2g}"
                    failed[case] = f"{what}{'' if layer is None else f' in layer {layer}'}, allowed is {allowed:g}"
        self.routed.cases = [case for case in self.cases if case not in failed]
        return failed

    def model(self) -> None:
        """Model all batches on a device that is not here."""
        for index in range(self.num_batches):
            for router, traffic in self._route(index):
                done: dict[Work, RankTime] = {}
                times = []
                for rank in range(self.num_ranks):
                    self.begin(router.case.case_id)
                    run = partial(modelled_time, self.comparison, router, traffic, rank)
                    times.append([self._once(traffic.work(rank), done, run)])
                self._store(router, times, traffic)

    def measure(self) -> dict[str, Any]:
        """Time all batches; return the conditions under which that was done."""
        settings = self.comparison.experiment.measure
        ceilings = ceilings_of(self.device, DTYPES[self.comparison.experiment.layer.dtype])
        timer = MeasuredRanks(self.comparison, self.device)
        with watched_machine(self.device, ceilings) as here:
            for index in range(self.num_batches):
                self.measure_batch(index, timer)
        here["allocating_iterations"] = dict(timer.watch.allocations.iterations)
        return {
            "warm_up": {"rounds": settings.fewest_rounds - settings.iterations, "change": None, "settled": False},
            "ranks": [here],
            "emulated_runs": dict(self.runs),
        }

    def outcome(self) -> Outcome:
        """What all cases that are in order took and routed: each batch once plain and once broken down."""
        steps = [Step(index, 0, kind) for kind in (PLAIN, BREAKDOWN) for index in range(self.num_batches)]
        whole = [self.columns.index(name) for name in (TOTAL, HOST, THREAD_CPU)]
        times = {}
        for case in self.cases:
            samples_RBC = self.samples[case.case_id]
            plain_RBC = np.full_like(samples_RBC, np.nan)
            plain_RBC[..., whole] = samples_RBC[..., whole]
            times[case.case_id] = np.concatenate([plain_RBC, samples_RBC], axis=1)
        routed = {"metrics": self.routed.metrics, "frontiers": self.routed.frontiers}
        return Outcome(steps=steps, columns=self.columns, times=times, **routed)

    # ---- one batch ---------------------------------------------------------------------------------------------------

    def measure_batch(self, index: int, timer: MeasuredRanks) -> None:
        """Run the measuring loop on one batch, rank after rank; the last rounds count."""
        settings, layers = self.comparison.experiment.measure, list(self.comparison.workloads)
        routed, times = self._route(index), defaultdict(list)
        rounds = settings.fewest_rounds

        def keep(number: int, step: Step, rank_time: RankTime) -> None:
            if step.iteration >= rounds - settings.iterations:
                times[number, step.rank].append(rank_time)

        for iteration in range(rounds):
            done: dict[Work, RankTime] = {}
            ranks = zip(*(self.routed.batches.shares(layer, index) for layer in layers), strict=True)
            for rank, shares in enumerate(ranks):
                of_rank = dict(zip(layers, shares, strict=True))
                turns = [self._turn(timer, router, traffic, of_rank, done) for router, traffic in routed]
                measure(turns, [Step(index, iteration, PLAIN, rank)], self.begin, keep)
        for number, (router, traffic) in enumerate(routed):
            self._store(router, [times[number, rank] for rank in range(self.num_ranks)], traffic)

    def _turn(
        self,
        timer: MeasuredRanks,
        router: CaseRouter,
        traffic: Traffic,
        of_rank: Mapping[int | None, Share],
        done: dict[Work, RankTime],
    ) -> _Turn:
        case = router.case

        def time(step: Step) -> RankTime:
            def run() -> RankTime:
                shares = {layer: share.of(case) for layer, share in of_rank.items()}
                return timer.time(router, traffic, step.rank, shares, first=step.iteration == 0)

            return self._once((case.case_id, *traffic.work(step.rank)), done, run)

        return _Turn(case.case_id, time)

    def _once(self, work: Work, done: dict[Work, RankTime], run: Callable[[], RankTime]) -> RankTime:
        """What ``run`` takes, or what a rank with the same work took."""
        self.runs["shared" if work in done else "timed"] += 1
        if work not in done:
            done[work] = run()
        return done[work]

    def _route(self, index: int) -> list[tuple[CaseRouter, Traffic]]:
        return self.routed.route(index, partial(self.begin, self.comparison.comparison_id))

    def _store(self, router: CaseRouter, times_R: Sequence[Sequence[RankTime]], traffic: Traffic) -> None:
        """Set a case's ranks side by side, behind links and what balancing takes."""
        case = router.case
        legs_R, meetings = [median_legs([run.legs for run in runs]) for runs in times_R], times_R[0][0].meetings
        if case.replication is not None and case.replication.solving_us:
            for legs in legs_R:  # Every rank solves once all counts are known.
                leg = legs[meetings.index("wait_metadata") + 1]
                leg["policy"] = leg.get("policy", 0.0) + case.replication.solving_us
        for rank, phases in enumerate(compose(legs_R, meetings, self._link_us(router, traffic))):
            phases[HOST] = float(np.median([run.host_us for run in times_R[rank]]))
            phases[THREAD_CPU] = float(np.median([run.thread_cpu_us for run in times_R[rank]]))
            for name, value in phases.items():
                self.samples[case.case_id][rank, traffic.index, self.columns.index(name)] = value

    def _link_us(self, router: CaseRouter, traffic: Traffic) -> dict[PhaseKey, NDArray[np.float64]]:
        """What each meeting takes on the modelled links, [R] microseconds."""
        links, num_ranks, meetings = self.comparison.links, self.num_ranks, {}
        assert links is not None
        for layer, of_layer in traffic.layers.items():
            copies = of_layer.copies_RR, of_layer.copies_RN
            counted = (None if counts is None else counts.double().numpy() for counts in copies)
            rows = Rows(of_layer.rank_pairs.astype(np.float64), *counted)
            if of_layer.shared_RR is not None:
                rows = rows.beside(of_layer.shared_RR, links.ranks_per_node)
            dispatch_us, combine_us = self.comparison.exchange.times_us(links, rows)
            if router.slots.moved_bytes_RR is not None:  # The same links carry them, ahead of the rows.
                dispatch_us = dispatch_us + links.all_to_all_us(router.slots.moved_bytes_RR)
            stats_bytes = 0 if of_layer.stats_SE is None else of_layer.stats_SE.numel() * _STATISTIC_BYTES
            gathered_us = links.all_gather_us(of_layer.counts_RP.shape[1] * _COUNT_BYTES, num_ranks)
            meetings |= {
                phase_key(layer, "wait_policy"): np.full(num_ranks, links.all_reduce_us(stats_bytes, num_ranks)),
                phase_key(layer, "wait_metadata"): np.full(num_ranks, gathered_us),
                phase_key(layer, "wait_dispatch"): dispatch_us,
                phase_key(layer, "wait_combine"): combine_us,
            }
        return meetings
