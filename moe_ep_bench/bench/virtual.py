"""The measurement behind ``emulate``: every case on every virtual rank, one after another, set side by side.

What is measured is a layer that stands alone, whose key is None, or a whole model with its MoE layers by number. First
few tokens are held against the dense reference (``small_layers``).

For each batch all ranks' routing is worked out first, outside of any layer (``traffic``). Then every rank's run is
timed, or modelled (``rank_timers``), all cases moments apart and in an order that changes as in ``run``; ranks with the
same to do are timed once. Each rank's times are put together over iterations, and ranks are then set side by side with
their meetings (``cost_model.timeline``), where what moves is modelled (``links``) from each layer's own bytes.

Shapes: R = virtual ranks, V = cases, B = batches, C = columns of a sample, E = experts, P = slots.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.bench.job import Job, ceilings_of, split_reason, watched_machine
from moe_ep_bench.bench.plan import BASELINE, NOISE, CaseSpec, Comparison
from moe_ep_bench.bench.rank_timers import MeasuredRanks, ModelledRanks, RankTime
from moe_ep_bench.bench.replicas import Replicas
from moe_ep_bench.bench.rows import PackedMetrics, Samples, columns_of, write_case, write_frontier
from moe_ep_bench.bench.subjects import LayerSubject, ModelSubject
from moe_ep_bench.bench.traffic import (
    CarriedLoads,
    CaseRouter,
    LayerTraffic,
    RankBatches,
    Share,
    Shares,
    Traffic,
    bytes_of_batch,
    traffic_of,
)
from moe_ep_bench.cost_model.timeline import compose, median_legs
from moe_ep_bench.cost_model.transport import Rows
from moe_ep_bench.layer.experts import DTYPES
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.reference import TOLERANCE
from moe_ep_bench.machine import provenance
from moe_ep_bench.policies.waits import beyond
from moe_ep_bench.schema import TOTAL, PhaseKey, phase_key
from moe_ep_bench.timing.protocol import BREAKDOWN, PLAIN, Step, measure
from moe_ep_bench.timing.timer import HOST, THREAD_CPU

# Share of the free memory that a chunk's rows may take; the rest is for what allocators keep and routing needs.
_MEMORY_SHARE = 0.5
# Scores of a comparison's batches that are kept, so that replicas are planned and statistics taken without making any
# batch again; what cases see of them takes several times as much.
_KEPT_BYTES = 2**28
# Modelled cases are written after so many seconds.
_KEPT_AFTER_S = 30.0
# Bytes of what travels beside rows: a count, a number of a policy's statistics.
_COUNT_BYTES, _STATISTIC_BYTES = 8, 8


def measure_comparison(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
    """Measure ``cases`` on virtual ranks and write their parts."""
    job.enter(comparison)
    device = job.ranks.device
    with device_scope(), torch.inference_mode():
        if comparison.device is None:
            # Only a layer that is built needs Megatron-Core.
            from moe_ep_bench.layer.megatron import expert_parallel_groups

            expert_parallel_groups(1, comparison.experiment.measure.timeout_s + 60)
        _measure(job, Emulation(comparison, cases, device, job.begin))
    if comparison.device is None:
        free_memory(device)


def _measure(job: Job, emulation: Emulation) -> None:
    for case, reason in emulation.check(job.survive).items():
        job.write_unmeasured(emulation.comparison, case, *split_reason(reason))

    def keep(numbers: Sequence[int]) -> None:
        with job.writing():
            emulation.write(job, numbers)
        job.check_written()

    is_modelled = emulation.comparison.device is not None
    conditions = emulation.measure(keep if is_modelled else lambda numbers: None)
    if conditions is not None:
        job.write_conditions(emulation.comparison, conditions)
        keep(range(len(emulation.cases)))


class _Turn:
    """Whose turn it is among a batch's ranks, with its tokens; one rank's are held at a time."""

    def __init__(self, emulation: Emulation, timer: MeasuredRanks, batches: Mapping[int | None, RankBatches]) -> None:
        self.emulation, self.timer, self._batches = emulation, timer, batches
        self.done: dict[tuple[Any, ...], RankTime] = {}
        self._at, self._ranks, self._shares = (-1, -1), iter(()), {}

    def shares(self, step: Step) -> dict[int | None, Shares]:
        """The tokens of the rank whose turn ``step`` is; ranks take their turns in order, round by round."""
        if self._at != (step.iteration, step.rank):
            if step.rank == 0:
                self._ranks = self.emulation.shares_of_ranks(self._batches)
                self.done.clear()
            self._at, self._shares = (step.iteration, step.rank), next(self._ranks)
        return self._shares


@dataclass(frozen=True, eq=False)
class _VirtualCase:
    """A case on one batch, as ``timing.protocol.measure`` times it: ranks with the same to do once a round."""

    router: CaseRouter
    traffic: Traffic
    turn: _Turn

    @property
    def case_id(self) -> str:
        return self.router.case.case_id

    def time(self, step: Step) -> RankTime:
        case, turn, work = self.router.case, self.turn, (self.case_id, *self.traffic.work(step.rank))
        shares = {layer: one.of(case) for layer, one in turn.shares(step).items()}
        turn.emulation.shared_runs += work in turn.done
        if work not in turn.done:
            first = step.iteration == 0
            turn.done[work] = turn.timer.time(self.router, self.traffic, step.rank, shares, first=first)
            turn.emulation.timed_runs += 1
        return turn.done[work]


def _groups(num_cases: int, num_groups: int) -> list[range]:
    """Cut cases into groups that follow each other, as even as can be; none is empty."""
    num_groups = max(1, min(num_groups, num_cases))
    bounds = [num_cases * group // num_groups for group in range(num_groups + 1)]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


class Emulation:
    """One comparison's measurement.

    Args:
        device: what runs the layers, and routes.
        begin: called with a case's id ahead of each of its runs.

    Attributes:
        layers: what is routed: each MoE layer by itself.
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
        self.seed, subject = comparison.experiment.layer.seed, comparison.subject
        self.num_ranks, self.num_batches = comparison.ep_size, comparison.workload.num_batches
        self.layers, self.columns = subject.layers(), columns_of(subject)
        # Batches whose scores and what cases see of them are kept until the comparison ends.
        kept = _KEPT_BYTES // (len(self.layers) * max(map(bytes_of_batch, self.layers.values())))
        self._ranks = lru_cache(max(1, kept) * len(self.layers))(self._make_ranks)
        self.carried = CarriedLoads(self._all_shares, comparison.slots, self.seed)
        self.replicas = Replicas(comparison, self._all_shares)
        self.num_chunks = 1
        self.samples = np.empty(0)
        self.metrics: list[PackedMetrics] = []
        self.errors: dict[tuple[str, int | None], float] = {}
        self.frontiers: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.timed_runs = self.shared_runs = 0

    def check(self, survive: Callable[[Exception], str]) -> dict[CaseSpec, str]:
        """Hold every case against the dense reference, at a small hidden size and with rows that are truly exchanged.

        Cases that fail are left out, and returned with the reason. On a device that is not here no layer runs, and
        nothing is checked.

        Args:
            survive: returns the reason where a case raises (``Job.survive``).
        """
        failed: dict[CaseSpec, str] = {}
        if self.comparison.device is not None:
            return failed
        from moe_ep_bench.bench.small_layers import checks_of

        allowed, routers = TOLERANCE[torch.float32], self._routers(0)
        for case, layer, error_of in checks_of(self.comparison, routers, self.layers, self.device, self.begin):
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
        return failed

    @property
    def layer_us(self) -> NDArray[np.float64]:
        """The slowest rank's time of every case and batch, microseconds [V, B], once they are measured."""
        return self.samples[..., self.columns.index(TOTAL)].max(axis=1)

    def measure(self, keep: Callable[[Sequence[int]], object] = lambda numbers: None) -> dict[str, Any] | None:
        """Time all batches; return the conditions under which that was done, None where nothing ran.

        Args:
            keep: where nothing runs, called with the numbers of cases that are finished. They are no more at once than
                take ``_KEPT_AFTER_S`` or so, for what is not kept is lost where the job ends.
        """
        comparison, settings = self.comparison, self.comparison.experiment.measure
        self.samples = np.full((len(self.cases), self.num_ranks, self.num_batches, len(self.columns)), np.nan)
        self.metrics = [PackedMetrics(self.num_ranks, self.num_batches * len(self.layers)) for _ in self.cases]
        if comparison.device is not None:
            self._routers(0)  # Replicas are planned, once for all batches.
            begin, modelled = time.monotonic(), ModelledRanks(comparison, comparison.device)
            self._model_batch(0, modelled, range(len(self.cases)))
            to_come_s = (time.monotonic() - begin) * (self.num_batches - 1)
            for numbers in _groups(len(self.cases), math.ceil(to_come_s / _KEPT_AFTER_S)):
                for batch in range(1, self.num_batches):
                    self._model_batch(batch, modelled, numbers)
                keep(numbers)
            return None
        ceilings = ceilings_of(self.device, DTYPES[comparison.experiment.layer.dtype])
        self.num_chunks = self._chunks()
        timer = MeasuredRanks(comparison, self.device, self.num_chunks)
        with watched_machine(self.device, ceilings) as here:
            for batch in range(self.num_batches):
                self._measure_batch(batch, timer)
        here["allocating_iterations"] = dict(timer.watch.allocations.iterations)
        warm_up = {"rounds": 1 + settings.warmup, "change": None, "settled": False}
        emulated = {"timed": self.timed_runs, "shared": self.shared_runs, "num_chunks": self.num_chunks}
        baseline = next((case.case_id for case in self.cases if case.role == BASELINE), None)
        waits = beyond(timer.waits, baseline)
        return {"warm_up": warm_up, "ranks": [here], "emulated_runs": emulated, "waits": waits}

    def write(self, job: Job, numbers: Sequence[int]) -> None:
        """Write the routing of the cases of these numbers, and their samples, which make them finished."""
        steps = [Step(batch, 0, kind) for kind in (PLAIN, BREAKDOWN) for batch in range(self.num_batches)]
        whole = [self.columns.index(name) for name in (TOTAL, HOST, THREAD_CPU)]
        samples = Samples((), steps, self.columns)
        for number in numbers:
            case, metrics, samples_RBC = self.cases[number], self.metrics[number], self.samples[number]
            plain_RBC = np.full_like(samples_RBC, np.nan)
            plain_RBC[..., whole] = samples_RBC[..., whole]
            times_RSC = np.concatenate([plain_RBC, samples_RBC], axis=1)
            write_frontier(job.directory, self.comparison, case, self.frontiers[case.case_id])
            write_case(job, self.comparison, case, samples, times_RSC, metrics)

    def _model_batch(self, index: int, modelled: ModelledRanks, numbers: Sequence[int]) -> None:
        """Model the cases of these numbers on one batch; ranks with the same to do take the same."""
        routers = [self._router(self.cases[number], index) for number in numbers]
        _, traffic = self._routed(index, routers, keep=False)
        self._keep_metrics(index, numbers, traffic)
        for number, router, of_case in zip(numbers, routers, traffic, strict=True):
            done: dict[tuple[Any, ...], RankTime] = {}
            times = []
            for rank in range(self.num_ranks):
                self.begin(router.case.case_id)
                work = of_case.work(rank)
                self.shared_runs += work in done
                if work not in done:
                    done[work] = modelled.time(router, of_case, rank)
                    self.timed_runs += 1
                times.append([done[work]])
            self._store(number, index, times, of_case)

    def _measure_batch(self, index: int, timer: MeasuredRanks) -> None:
        """Run the measuring loop on one batch, rank after rank; the last rounds count."""
        settings, numbers = self.comparison.experiment.measure, range(len(self.cases))
        routers = self._routers(index)
        batches, traffic = self._routed(index, routers, keep=True)
        self._keep_metrics(index, numbers, traffic)
        turn = _Turn(self, timer, batches)
        cases = [_VirtualCase(router, of_case, turn) for router, of_case in zip(routers, traffic, strict=True)]
        rounds, times = 1 + settings.warmup + settings.iterations, defaultdict(list)
        steps = [Step(index, number, PLAIN, rank) for number in range(rounds) for rank in range(self.num_ranks)]

        def keep(number: int, step: Step, time: RankTime) -> None:
            if step.iteration >= rounds - settings.iterations:
                times[number, step.rank].append(time)

        measure(cases, steps, self.begin, keep)
        for number, of_case in zip(numbers, traffic, strict=True):
            self._store(number, index, [times[number, rank] for rank in range(self.num_ranks)], of_case)

    def _routed(
        self, index: int, routers: Sequence[CaseRouter], *, keep: bool
    ) -> tuple[dict[int | None, RankBatches], list[Traffic]]:
        """A batch: all ranks' tokens of each layer where these are kept, and what each case's routing amounts to."""
        batches: dict[int | None, RankBatches] = {}
        layers: list[dict[int | None, LayerTraffic]] = [{} for _ in routers]
        for layer, subject in self.layers.items():
            if layer is not None:
                self.begin(self.comparison.comparison_id)
            ranks = self._ranks(layer, index)
            for of_case, one in zip(layers, self._traffic(subject, routers, ranks, self.num_chunks), strict=True):
                of_case[layer] = one
            if keep:
                batches[layer] = ranks
        subject = self.comparison.subject
        lengths_R = subject.lengths_of_ranks(index) if isinstance(subject, ModelSubject) else None
        return batches, [Traffic(index, of_case, lengths_R) for of_case in layers]

    def _keep_metrics(self, index: int, numbers: Sequence[int], traffic: Sequence[Traffic]) -> None:
        """Take in what the cases of these numbers routed."""
        for number, of_case in zip(numbers, traffic, strict=True):
            case, metrics = self.cases[number], self.metrics[number]
            for row, (layer, one) in enumerate(of_case.layers.items(), index * len(self.layers)):
                metrics.put((slice(None), row), one.metrics)
                if one.frontier is not None:
                    self.frontiers[case.case_id].append({"batch": index, "layer": layer, **one.frontier})
                if index == 0:
                    metrics["reference_error"][:, row] = self.errors.get((case.case_id, layer), np.nan)

    def shares_of_ranks(self, batches: Mapping[int | None, RankBatches]) -> Iterator[dict[int | None, Shares]]:
        """Every rank's tokens, rank by rank, as the cases see them in each layer."""
        for rank, tokens in enumerate(zip(*batches.values(), strict=True)):
            own = zip(batches, tokens, strict=True)
            yield {layer: Shares(self.layers[layer], one, rank, self.device) for layer, one in own}

    def _store(
        self,
        number: int,
        index: int,
        times_R: Sequence[Sequence[RankTime]],
        traffic: Traffic,
    ) -> None:
        """Set a case's ranks side by side, behind links and the balancing of replicas."""
        link_us, replication = self._link_us(traffic), self.cases[number].replication
        legs_R, meetings = [median_legs([run.legs for run in runs]) for runs in times_R], times_R[0][0].meetings
        if replication is not None and replication.solving_us:
            for legs in legs_R:  # Every rank solves once all counts are known.
                leg = legs[meetings.index("wait_metadata") + 1]
                leg["policy"] = leg.get("policy", 0.0) + replication.solving_us
        for rank, phases in enumerate(compose(legs_R, meetings, link_us)):
            phases[HOST] = float(np.median([run.host_us for run in times_R[rank]]))
            phases[THREAD_CPU] = float(np.median([run.thread_cpu_us for run in times_R[rank]]))
            for name, value in phases.items():
                self.samples[number, rank, index, self.columns.index(name)] = value

    def _router(self, case: CaseSpec, index: int) -> CaseRouter:
        return CaseRouter(case, self.replicas.slots(case, index), self.seed, self.carried)

    def _routers(self, index: int) -> list[CaseRouter]:
        return [self._router(case, index) for case in self.cases]

    def _all_shares(self, case: CaseSpec, layer: int | None, index: int) -> Iterator[Share]:
        """Every rank's tokens of a batch in a layer."""
        return (one.of(case) for one in self._ranks(layer, index).shares(self.device))

    def _make_ranks(self, layer: int | None, index: int) -> RankBatches:
        return RankBatches(self.layers[layer], index, len(self.layers))

    def _traffic(
        self, layer: LayerSubject, routers: Sequence[CaseRouter], ranks: RankBatches, num_chunks: int
    ) -> list[LayerTraffic]:
        """Of every case. Native runs a second time for the noise floor, but routes the same."""
        baseline = next((one for one in routers if one.case.role == BASELINE), None)
        stands_for = [baseline if baseline and one.case.role == NOISE else one for one in routers]
        own = list(dict.fromkeys(stands_for))
        links, exchange = self.comparison.links, self.comparison.exchange
        nodes = {"ranks_per_node": links.ranks_per_node} if links and exchange.transport == "copies" else {}
        traffic = traffic_of(layer, own, ranks, ranks.index, self.device, num_chunks, **nodes)
        found = dict(zip(own, traffic, strict=True))
        return [found[one] for one in stands_for]

    def _chunks(self) -> int:
        """In how many chunks the fullest rank's rows fit into memory; a model is not run in chunks."""
        if not self.comparison.in_chunks:
            return 1
        traffic = self._traffic(self.comparison.subject, self._routers(0), self._ranks(None, 0), 1)
        most_rows = max(int(max(pairs.sum(1).max(), pairs.sum(0).max())) for pairs in (t.rank_pairs for t in traffic))
        available = provenance.available_memory_bytes(self.device, 1) * _MEMORY_SHARE
        return max(1, -(-int(most_rows * self.comparison.bytes_per_row) // int(available)))

    def _link_us(self, traffic: Traffic) -> dict[PhaseKey, NDArray[np.float64]]:
        """What each meeting takes on the modelled links, [R] microseconds."""
        links, num_ranks, found = self.comparison.links, self.num_ranks, {}
        assert links is not None
        for layer, one in traffic.layers.items():
            # Chunks are this device's need; ranks of their own send all at once.
            counted = (None if one is None else one.double().numpy() for one in (one.copies_RR, one.copies_RN))
            rows = Rows(one.rank_pairs.astype(np.float64), *counted)
            dispatch_us, combine_us = self.comparison.exchange.times_us(links, rows)
            stats_bytes = 0 if one.stats_SE is None else one.stats_SE.numel() * _STATISTIC_BYTES
            gathered_us = links.all_gather_us(one.counts_CRP.shape[2] * _COUNT_BYTES, num_ranks)
            found |= {
                phase_key(layer, "wait_policy"): np.full(num_ranks, links.all_reduce_us(stats_bytes, num_ranks)),
                phase_key(layer, "wait_metadata"): np.full(num_ranks, gathered_us),
                phase_key(layer, "wait_dispatch"): dispatch_us,
                phase_key(layer, "wait_combine"): combine_us,
            }
        return found
