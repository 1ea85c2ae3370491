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

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.bench.cases import BASELINE, NOISE, CaseSpec
from moe_ep_bench.bench.job import Job, ceilings_of, split_reason, watched_machine
from moe_ep_bench.bench.plan import Comparison
from moe_ep_bench.bench.rank_timers import MeasuredRanks, RankTime, modelled_time
from moe_ep_bench.bench.replicas import Replicas
from moe_ep_bench.bench.routing import Batches, CarriedLoads, CaseRouter, Shares
from moe_ep_bench.bench.rows import PackedMetrics, Samples, columns_of, write_case, write_frontier
from moe_ep_bench.bench.traffic import LayerTraffic, Traffic, traffic_of
from moe_ep_bench.cost_model.timeline import compose, median_legs
from moe_ep_bench.cost_model.transport import Rows
from moe_ep_bench.layer.experts import DTYPES
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.reference import TOLERANCE
from moe_ep_bench.policies.waits import beyond
from moe_ep_bench.schema import TOTAL, PhaseKey, phase_key
from moe_ep_bench.timing.protocol import BREAKDOWN, PLAIN, Step, measure
from moe_ep_bench.timing.timer import HOST, THREAD_CPU

# Bytes of what travels beside rows: a count, a number of a policy's statistics.
_COUNT_BYTES, _STATISTIC_BYTES = 8, 8


def measure_comparison(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
    """Measure ``cases`` on virtual ranks and write their parts."""
    job.enter(comparison)
    with device_scope(), torch.inference_mode():
        _measure(job, Emulation(comparison, cases, job.ranks.device, job.begin))
    free_memory(job.ranks.device)  # what is kept of batches holds itself, and may be gigabytes


def _measure(job: Job, emulation: Emulation) -> None:
    comparison = emulation.comparison
    if comparison.device is not None:
        emulation.model()
    else:
        # Only a layer that is built needs Megatron-Core.
        from moe_ep_bench.layer.megatron import expert_parallel_groups

        expert_parallel_groups(1, comparison.experiment.measure.timeout_s + 60)
        for case, reason in emulation.check(job.survive).items():
            job.write_unmeasured(comparison, case, *split_reason(reason))
        if emulation.cases:
            job.write_conditions(comparison, emulation.measure())
    with job.writing():
        emulation.write(job)
    job.check_written()


@dataclass(frozen=True, eq=False)
class _Turn:
    """A case on one rank's tokens of a batch, as ``timing.protocol.measure`` times it."""

    emulation: Emulation
    timer: MeasuredRanks
    router: CaseRouter
    traffic: Traffic
    shares: Mapping[int | None, Shares]
    done: dict[tuple[Any, ...], RankTime]

    @property
    def case_id(self) -> str:
        return self.router.case.case_id

    def time(self, step: Step) -> RankTime:
        def run() -> RankTime:
            shares = {layer: of_rank.of(self.router.case) for layer, of_rank in self.shares.items()}
            return self.timer.time(self.router, self.traffic, step.rank, shares, first=step.iteration == 0)

        return self.emulation.once((self.case_id, *self.traffic.work(step.rank)), self.done, run)


class Emulation:
    """One comparison's measurement.

    Args:
        device: what runs the layers, and routes.
        begin: called with a case's id ahead of each of its runs.

    Attributes:
        columns: of a sample.
        samples: microseconds [V, R, B, C].
        metrics: of each case [R, B x layers] rows, those of a batch's layers together as ``write_case`` wants them.
        errors: of each case and layer, beside the reference.
        frontiers: of each case, rows of the table ``frontier``.
    """

    def __init__(
        self, comparison: Comparison, cases: Sequence[CaseSpec], device: torch.device, begin: Callable[[str], None]
    ) -> None:
        self.comparison, self.cases, self.device, self.begin = comparison, list(cases), device, begin
        self.num_ranks, self.num_batches = comparison.ep_size, comparison.workload.num_batches
        self.columns, self.batches = columns_of(comparison), Batches(comparison, device)
        self.carried, self.replicas = CarriedLoads(self.batches), Replicas(self.batches)
        self.samples = np.full((len(self.cases), self.num_ranks, self.num_batches, len(self.columns)), np.nan)
        num_rows = self.num_batches * len(comparison.workloads)
        self.metrics = [PackedMetrics(self.num_ranks, num_rows) for _ in self.cases]
        self.errors: dict[tuple[str, int | None], float] = {}
        self.frontiers: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.timed_runs = self.shared_runs = 0

    @property
    def layer_us(self) -> NDArray[np.float64]:
        """The slowest rank's time of every case and batch, microseconds [V, B], once they are measured."""
        return self.samples[..., self.columns.index(TOTAL)].max(axis=1)

    def check(self, survive: Callable[[Exception], str]) -> dict[CaseSpec, str]:
        """Hold every case against the dense reference, at a small hidden size and with rows that are truly exchanged.

        Cases that fail are left out, and returned with the reason.

        Args:
            survive: returns the reason where a case raises (``Job.survive``).
        """
        from moe_ep_bench.bench.small_layers import checks_of

        failed: dict[CaseSpec, str] = {}
        allowed = TOLERANCE[torch.float32]
        for case, layer, error_of in checks_of(self.comparison, self._routers(0), self.device, self.begin):
            if case in failed:
                continue
            try:
                error = self.errors[case.case_id, layer] = error_of()
            except Exception as problem:
                failed[case] = survive(problem)
                continue
            if error > allowed:
                where = "" if layer is None else f" in layer {layer}"
                failed[case] = f"output differs from the dense reference by {error:.2g}{where}, allowed is {allowed:g}"
        self.cases = [case for case in self.cases if case not in failed]
        self.samples, self.metrics = self.samples[: len(self.cases)], self.metrics[: len(self.cases)]
        return failed

    def model(self) -> None:
        """Model all batches on a device that is not here."""
        for index in range(self.num_batches):
            for number, (router, traffic) in enumerate(self._routed(index)):
                done: dict[tuple[Any, ...], RankTime] = {}
                times = []
                for rank in range(self.num_ranks):
                    self.begin(router.case.case_id)
                    run = partial(modelled_time, self.comparison, router, traffic, rank)
                    times.append([self.once(traffic.work(rank), done, run)])
                self._store(number, index, times, traffic)

    def measure(self) -> dict[str, Any]:
        """Time all batches; return the conditions under which that was done."""
        settings = self.comparison.experiment.measure
        ceilings = ceilings_of(self.device, DTYPES[self.comparison.experiment.layer.dtype])
        timer = MeasuredRanks(self.comparison, self.device)
        with watched_machine(self.device, ceilings) as here:
            for index in range(self.num_batches):
                self._measure_batch(index, timer)
        here["allocating_iterations"] = dict(timer.watch.allocations.iterations)
        baseline = next((case.case_id for case in self.cases if case.role == BASELINE), None)
        return {
            "warm_up": {"rounds": 1 + settings.warmup, "change": None, "settled": False},
            "ranks": [here],
            "emulated_runs": {"timed": self.timed_runs, "shared": self.shared_runs},
            "waits": beyond(timer.waits, baseline),
        }

    def write(self, job: Job) -> None:
        """Write the routing of all cases, and their samples, which make them finished."""
        steps = [Step(index, 0, kind) for kind in (PLAIN, BREAKDOWN) for index in range(self.num_batches)]
        whole = [self.columns.index(name) for name in (TOTAL, HOST, THREAD_CPU)]
        samples = Samples((), steps, self.columns)
        for case, metrics, samples_RBC in zip(self.cases, self.metrics, self.samples, strict=True):
            plain_RBC = np.full_like(samples_RBC, np.nan)
            plain_RBC[..., whole] = samples_RBC[..., whole]
            times_RSC = np.concatenate([plain_RBC, samples_RBC], axis=1)
            write_frontier(job.directory, self.comparison, case, self.frontiers[case.case_id])
            write_case(job, self.comparison, case, samples, times_RSC, metrics)

    # ---- one batch ---------------------------------------------------------------------------------------------------

    def once(self, work: tuple[Any, ...], done: dict[tuple[Any, ...], RankTime], run: Callable[[], Any]) -> RankTime:
        """What ``run`` takes, or what a rank with the same work took."""
        self.shared_runs += work in done
        if work not in done:
            done[work] = run()
            self.timed_runs += 1
        return done[work]

    def _measure_batch(self, index: int, timer: MeasuredRanks) -> None:
        """Run the measuring loop on one batch, rank after rank; the last rounds count."""
        settings, layers = self.comparison.experiment.measure, list(self.comparison.workloads)
        routed = self._routed(index)
        rounds, times = 1 + settings.warmup + settings.iterations, defaultdict(list)

        def keep(number: int, step: Step, rank_time: RankTime) -> None:
            if step.iteration >= rounds - settings.iterations:
                times[number, step.rank].append(rank_time)

        for iteration in range(rounds):
            done: dict[tuple[Any, ...], RankTime] = {}
            ranks = zip(*(self.batches.shares(layer, index) for layer in layers), strict=True)
            for rank, shares in enumerate(ranks):
                of_rank = dict(zip(layers, shares, strict=True))
                turns = [_Turn(self, timer, router, traffic, of_rank, done) for router, traffic in routed]
                measure(turns, [Step(index, iteration, PLAIN, rank)], self.begin, keep)
        for number, (_, traffic) in enumerate(routed):
            self._store(number, index, [times[number, rank] for rank in range(self.num_ranks)], traffic)

    def _routed(self, index: int) -> list[tuple[CaseRouter, Traffic]]:
        """Of every case its router, and what its routing of a batch amounts to; metrics are kept."""
        comparison, routers = self.comparison, self._routers(index)
        by_layer: dict[int | None, list[LayerTraffic]] = {}
        for place, layer in enumerate(comparison.workloads, index * len(comparison.workloads)):
            if layer is not None:
                self.begin(comparison.comparison_id)
            by_layer[layer] = self._layer_traffic(layer, index, routers)
            for case, metrics, traffic in zip(self.cases, self.metrics, by_layer[layer], strict=True):
                case_id = case.case_id
                error = self.errors.get((case_id, layer)) if index == 0 else None
                checked = {} if error is None else {"reference_error": np.full(self.num_ranks, error)}
                metrics.put((slice(None), place), {**traffic.metrics, **checked})
                if traffic.frontier is not None:
                    self.frontiers[case_id].append({"batch": index, "layer": layer, **traffic.frontier})
        lengths_R = comparison.lengths_of_ranks(index) if comparison.scope == "model" else None
        of_cases = ({layer: of_layer[place] for layer, of_layer in by_layer.items()} for place in range(len(routers)))
        traffic = [Traffic(index, layers, lengths_R) for layers in of_cases]
        return list(zip(routers, traffic, strict=True))

    def _layer_traffic(self, layer: int | None, index: int, routers: Sequence[CaseRouter]) -> list[LayerTraffic]:
        """Of every case. Native runs a second time for the noise floor, but routes the same."""
        baseline = next((router for router in routers if router.case.role == BASELINE), None)
        stand_ins = [baseline if baseline and router.case.role == NOISE else router for router in routers]
        distinct, links = list(dict.fromkeys(stand_ins)), self.comparison.links
        nodes = links.ranks_per_node if links and self.comparison.exchange.transport == "copies" else None
        traffic = dict(zip(distinct, traffic_of(self.batches, layer, index, distinct, nodes), strict=True))
        return [traffic[router] for router in stand_ins]

    def _store(self, number: int, index: int, times_R: Sequence[Sequence[RankTime]], traffic: Traffic) -> None:
        """Set a case's ranks side by side, behind links and the balancing of replicas."""
        replication = self.cases[number].replication
        legs_R, meetings = [median_legs([run.legs for run in runs]) for runs in times_R], times_R[0][0].meetings
        if replication is not None and replication.solving_us:
            for legs in legs_R:  # Every rank solves once all counts are known.
                leg = legs[meetings.index("wait_metadata") + 1]
                leg["policy"] = leg.get("policy", 0.0) + replication.solving_us
        for rank, phases in enumerate(compose(legs_R, meetings, self._link_us(traffic))):
            phases[HOST] = float(np.median([run.host_us for run in times_R[rank]]))
            phases[THREAD_CPU] = float(np.median([run.thread_cpu_us for run in times_R[rank]]))
            for name, value in phases.items():
                self.samples[number, rank, index, self.columns.index(name)] = value

    def _link_us(self, traffic: Traffic) -> dict[PhaseKey, NDArray[np.float64]]:
        """What each meeting takes on the modelled links, [R] microseconds."""
        links, num_ranks, meetings = self.comparison.links, self.num_ranks, {}
        assert links is not None
        for layer, of_layer in traffic.layers.items():
            copies = of_layer.copies_RR, of_layer.copies_RN
            counted = (None if counts is None else counts.double().numpy() for counts in copies)
            rows = Rows(of_layer.rank_pairs.astype(np.float64), *counted)
            dispatch_us, combine_us = self.comparison.exchange.times_us(links, rows)
            stats_bytes = 0 if of_layer.stats_SE is None else of_layer.stats_SE.numel() * _STATISTIC_BYTES
            gathered_us = links.all_gather_us(of_layer.counts_RP.shape[1] * _COUNT_BYTES, num_ranks)
            meetings |= {
                phase_key(layer, "wait_policy"): np.full(num_ranks, links.all_reduce_us(stats_bytes, num_ranks)),
                phase_key(layer, "wait_metadata"): np.full(num_ranks, gathered_us),
                phase_key(layer, "wait_dispatch"): dispatch_us,
                phase_key(layer, "wait_combine"): combine_us,
            }
        return meetings

    def _routers(self, index: int) -> list[CaseRouter]:
        seed = self.comparison.experiment.layer.seed
        return [CaseRouter(case, self.replicas.slots(case, index), seed, self.carried) for case in self.cases]
