"""The measurement behind ``emulate``: every case on every virtual rank, one after another, set side by side.

For each batch all ranks' routing is worked out first, outside of any layer (``traffic``). Then every rank's part of
the layer is timed (``virtual_timing``), all cases moments apart and in an order that changes as in ``run``; ranks with
the same to do are timed once. Each rank's times are put together over iterations, and ranks are then composed into a
layer with its meetings (``measure.timeline``), where what moves between ranks is modelled (``links``).

Shapes: R = virtual ranks, V = cases, B = batches, C = columns of a sample, E = experts, P = slots.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench import environment
from moe_ep_bench.devices import Device
from moe_ep_bench.layer.build import DTYPES
from moe_ep_bench.layer.reference import TOLERANCE
from moe_ep_bench.layer.slots import Slots
from moe_ep_bench.machine import MachineSampler
from moe_ep_bench.measure.ceilings import measure_ceilings
from moe_ep_bench.measure.protocol import (
    BREAKDOWN,
    COLUMNS,
    HOST,
    PLAIN,
    THREAD_CPU,
    Step,
    collections_between,
    order,
    turn_of,
)
from moe_ep_bench.measure.timeline import compose, median_legs
from moe_ep_bench.records import TOTAL, write_json
from moe_ep_bench.scopes.comparison import BASELINE, NOISE, CaseSpec, Planned
from moe_ep_bench.scopes.emulated import Emulated
from moe_ep_bench.scopes.job import Job
from moe_ep_bench.scopes.rows import PackedMetrics, case_columns, routing_columns
from moe_ep_bench.scopes.small_layers import SmallLayers, few_of
from moe_ep_bench.scopes.traffic import CaseRouter, RankBatches, Shares, Traffic, traffic_of
from moe_ep_bench.scopes.virtual_timing import MeasuredRanks, ModelledRanks, RankTime, RankTimer

# Share of the free memory that a chunk's rows may take; the rest is for what allocators keep and routing needs.
_MEMORY_SHARE = 0.5
# Bytes of what travels beside rows: a pair's weight, a count, a number of a policy's statistics.
_WEIGHT_BYTES, _COUNT_BYTES, _STATISTIC_BYTES = 4, 8, 8


class Emulation:
    """One comparison's measurement.

    Args:
        device: what runs the layers, and routes.
        begin: called with a case's id ahead of each of its runs.

    Attributes:
        columns: of a sample.
    """

    columns: Sequence[str] = COLUMNS

    def __init__(
        self, comparison: Emulated, cases: Sequence[CaseSpec], device: torch.device, begin: Callable[[str], None]
    ) -> None:
        self.comparison, self.cases, self.device, self.begin = comparison, list(cases), device, begin
        self.seed = comparison.experiment.layer.seed
        self.num_ranks, self.num_batches = comparison.ep_size, comparison.workload.num_batches
        self.num_chunks = 1
        self.samples = np.empty(0)  # [V, R, B, C]
        self.metrics: list[PackedMetrics] = []  # of each case, [R, B] rows
        self.errors: dict[str, float | None] = {case.case_id: None for case in cases}
        self.timed_runs = self.shared_runs = 0

    def check(self) -> dict[CaseSpec, str]:
        """Hold every case against the dense reference, at a small hidden size and with rows that are truly exchanged.

        Cases that fail are left out, and returned with the reason. On a device that is not here no layer runs, and
        nothing is checked.
        """
        failed: dict[CaseSpec, str] = {}
        if self.comparison.device is not None:
            return failed
        allowed = TOLERANCE[torch.float32]
        for case, error, where in self._errors():
            if error > allowed and case not in failed:
                self.cases.remove(case)
                failed[case] = f"output differs from the dense reference by {error:.2g}{where}, allowed is {allowed:g}"
        return failed

    def _errors(self) -> Iterator[tuple[CaseSpec, float, str]]:
        """Each case's error, kept in ``errors``, and where it was found."""
        few = [few_of(tokens) for tokens in RankBatches(self.comparison, 0)]
        checked = SmallLayers(self.comparison, self.device)
        for router in self._routers(0):
            self.begin(router.case.case_id)
            error = self.errors[router.case.case_id] = checked.error(router, self.comparison, few)
            yield router.case, error, ""

    @property
    def layer_us(self) -> NDArray[np.float64]:
        """The slowest rank's time of every case and batch, microseconds [V, B], once they are measured."""
        return self.samples[..., self.columns.index(TOTAL)].max(axis=1)

    def measure(self) -> dict[str, Any] | None:
        """Time all batches; return the conditions under which that was done, None where nothing ran."""
        self.samples = np.full((len(self.cases), self.num_ranks, self.num_batches, len(self.columns)), np.nan)
        self.metrics = self._no_metrics()
        if self.comparison.device is not None:
            timer = self._modelled(self.comparison.device)
            for batch in range(self.num_batches):
                self._time_batch(batch, timer, rounds=1, kept=1)
            return None
        settings = self.comparison.experiment.measure
        rounds = 1 + settings.warmup + settings.iterations
        timer = self._measured()
        ceilings = measure_ceilings(self.device, DTYPES[self.comparison.experiment.layer.dtype])
        with MachineSampler(self.device) as sampler, collections_between():
            for batch in range(self.num_batches):
                self._time_batch(batch, timer, rounds, settings.iterations)
        here = {
            "hostname": socket.gethostname(),
            "machine": sampler.stop().as_dict(),
            "ceilings": asdict(ceilings),
            "peak_memory_bytes": environment.peak_memory_bytes(self.device),
        }
        warm_up = {"rounds": 1 + settings.warmup, "change": None, "settled": False}
        emulated = {"timed": self.timed_runs, "shared": self.shared_runs, "num_chunks": self.num_chunks}
        return {"warm_up": warm_up, "ranks": [here], "emulated_runs": emulated}

    def _no_metrics(self) -> list[PackedMetrics]:
        """Room for the routing metrics of each case."""
        return [PackedMetrics(self.num_ranks, self.num_batches) for _ in self.cases]

    def _modelled(self, device: Device) -> RankTimer:
        return ModelledRanks(self.comparison, device)

    def _measured(self) -> RankTimer:
        most_tokens, self.num_chunks = self._sizes()
        return MeasuredRanks(self.comparison, self.device, self.num_chunks, most_tokens)

    def write(self, job: Job, conditions: dict[str, Any] | None) -> None:
        """Write the conditions, then every case's routing and its samples, which make it finished."""
        directory, comparison = job.directory, self.comparison
        if conditions is not None:
            path = directory.conditions_path(comparison.comparison_id, job.launch)
            write_json(path, {"run_id": job.run_id, **conditions})
        steps = [Step(batch, 0, kind) for kind in (PLAIN, BREAKDOWN) for batch in range(self.num_batches)]
        for number, case in enumerate(self.cases):
            metrics = self.metrics[number]
            routing = routing_columns(metrics.keys, list(torch.from_numpy(metrics.numbers)))
            plain_RBC = np.full_like(self.samples[number], np.nan)
            for name in (TOTAL, HOST, THREAD_CPU):
                plain_RBC[..., self.columns.index(name)] = self.samples[number][..., self.columns.index(name)]
            times_RSC = list(np.concatenate([plain_RBC, self.samples[number]], axis=1))
            self._write_case(job, case, steps, times_RSC, routing)

    def _write_case(
        self,
        job: Job,
        case: CaseSpec,
        steps: Sequence[Step],
        times_RSC: Sequence[NDArray[np.float64]],
        routing: dict[str, list[Any]],
    ) -> None:
        samples, identify = case_columns(steps, times_RSC), partial(job.identity, self.comparison, case)
        job.directory.write_routing(case.case_id, {**identify(len(routing["rank"])), **routing})
        job.directory.write_case(case.case_id, job.launch, {**identify(len(samples["rank"])), **samples})

    def _time_batch(self, index: int, timer: RankTimer, rounds: int, kept: int) -> None:
        """Time one batch; of ``rounds`` the last ``kept`` count."""
        ranks, routers, traffic = self._routed(index)
        for number, one in enumerate(traffic):
            self._put_metrics(number, index, one)
        times: list[list[list[RankTime]]] = [[[] for _ in range(self.num_ranks)] for _ in routers]
        for round_number in range(rounds):
            gc.collect(0)
            turn = turn_of(Step(index, round_number, PLAIN), self.num_batches, len(routers))
            done: dict[tuple[Any, ...], RankTime] = {}
            for rank, tokens in enumerate(ranks if timer.needs_tokens else [None] * self.num_ranks):
                shares = tokens and self._shares(tokens, rank)
                for number in order(len(routers), turn):
                    router = routers[number]
                    self.begin(router.case.case_id)
                    work = (number, *traffic[number].work(rank))
                    if work not in done:
                        share = shares and shares.of(router.case)
                        done[work] = timer.time(router, traffic[number], rank, share, index, first=round_number == 0)
                        self.timed_runs += 1
                    else:
                        self.shared_runs += 1
                    if round_number >= rounds - kept:
                        times[number][rank].append(done[work])
        for number, one in enumerate(traffic):
            self._store(number, index, times[number], self._link_us(one))

    def _routed(self, index: int) -> tuple[Iterable[Any], Sequence[Any], Sequence[Any]]:
        """A batch: every rank's tokens, how each case routes them, and what that amounts to."""
        ranks, routers = RankBatches(self.comparison, index), self._routers(index)
        return ranks, routers, self._traffic(self.comparison, routers, ranks, index, self.num_chunks)

    def _shares(self, tokens: Any, rank: int) -> Any:
        """One rank's tokens as the cases see them."""
        return Shares(self.comparison, tokens, rank, self.device)

    def _put_metrics(self, number: int, index: int, traffic: Any) -> None:
        """Keep a case's routing metrics of one batch."""
        self.metrics[number].put_all((slice(None), index), traffic.metrics)
        error = self.errors[self.cases[number].case_id]
        if index == 0 and error is not None:
            self.metrics[number].column("reference_error")[:, 0] = error

    def _store(
        self, number: int, index: int, times_R: Sequence[Sequence[RankTime]], link_us: dict[str, NDArray[np.float64]]
    ) -> None:
        legs_R = [median_legs([run.legs for run in runs]) for runs in times_R]
        for rank, phases in enumerate(compose(legs_R, times_R[0][0].meetings, link_us)):
            phases[HOST] = float(np.median([run.host_us for run in times_R[rank]]))
            phases[THREAD_CPU] = float(np.median([run.thread_cpu_us for run in times_R[rank]]))
            for name, value in phases.items():
                self.samples[number, rank, index, self.columns.index(name)] = value

    def _routers(self, index: int) -> list[CaseRouter]:
        return [CaseRouter(case, self._slots(case, index), self.seed) for case in self.cases]

    def _slots(self, case: CaseSpec, index: int) -> Slots:
        """Where a case's experts stand for one batch."""
        wanted = case.replication
        if wanted is None:
            return self.comparison.slots
        return Slots.of_replication(self.comparison.replicate(wanted, self._forecast(index)))

    def _forecast(self, index: int) -> NDArray[np.float64]:
        """The load that replicas are placed for, [E]: that of all other batches; of the batch itself if it is alone."""
        loads_BE = self._native_loads
        return (np.delete(loads_BE, index, axis=0) if self.num_batches > 1 else loads_BE).mean(axis=0)

    @cached_property
    def _native_loads(self) -> NDArray[np.float64]:
        """Pairs of every expert under the model's own top-k, [B, E]."""
        case = self.comparison.case(BASELINE, "native")
        router = CaseRouter(case, Slots.contiguous(self.comparison.model.num_experts, self.num_ranks), self.seed)
        loads = []
        for batch in range(self.num_batches):
            ranks = RankBatches(self.comparison, batch)
            (traffic,) = traffic_of(self.comparison, [router], ranks, batch, self.device)
            loads.append(traffic.counts_CRP.sum((0, 1)).numpy().astype(np.float64))
        return np.stack(loads)

    def _traffic(
        self, planned: Planned, routers: Sequence[CaseRouter], ranks: RankBatches, index: int, num_chunks: int
    ) -> list[Traffic]:
        """Of every case. Native runs a second time for the noise floor, but routes the same."""
        baseline = next((router for router in routers if router.case.role == BASELINE), None)
        own = [router for router in routers if router.case.role != NOISE or baseline is None]
        found = traffic_of(planned, own, ranks, index, self.device, num_chunks)
        by_case = {router.case.case_id: traffic for router, traffic in zip(own, found, strict=True)}
        return [by_case.get(r.case.case_id) or by_case[baseline.case.case_id] for r in routers]

    def _sizes(self) -> tuple[int, int]:
        """The most tokens of a rank in any batch, and in how many chunks the fullest rank's rows fit into memory."""
        most_tokens = max(
            tokens.num_tokens for batch in range(self.num_batches) for tokens in RankBatches(self.comparison, batch)
        )
        wanted = self.comparison.experiment.emulate.chunk_tokens
        if wanted is not None:
            return most_tokens, -(-most_tokens // wanted)
        traffic = self._traffic(self.comparison, self._routers(0), RankBatches(self.comparison, 0), 0, 1)
        most_rows = max(int(max(pairs.sum(1).max(), pairs.sum(0).max())) for pairs in (t.rank_pairs for t in traffic))
        available = environment.available_memory_bytes(self.device, 1) * _MEMORY_SHARE
        needed = most_rows * self.comparison.bytes_per_row
        return most_tokens, max(1, -(-int(needed) // int(available)))

    def _link_us(self, traffic: Any) -> dict[str, NDArray[np.float64]]:
        """What each meeting takes on the modelled links, [R] microseconds."""
        return self._layer_link_us(traffic)

    def _layer_link_us(self, traffic: Traffic) -> dict[str, NDArray[np.float64]]:
        links, num_ranks = self.comparison.links, self.num_ranks
        row_bytes = self.comparison.model.hidden_size * DTYPES[self.comparison.experiment.layer.dtype].itemsize
        # Chunks are this device's need; ranks of their own send all at once.
        pairs_RR = traffic.rank_pairs.astype(np.float64)
        everyone = np.ones(num_ranks)
        stats_bytes = 0 if traffic.stats_SE is None else traffic.stats_SE.numel() * _STATISTIC_BYTES
        count_bytes = traffic.counts_CRP.shape[2] * _COUNT_BYTES
        return {
            "wait_policy": everyone * links.all_reduce_us(stats_bytes, num_ranks),
            "wait_metadata": everyone * links.all_gather_us(count_bytes, num_ranks),
            # Rows and their weights travel one after the other.
            "wait_dispatch": links.all_to_all_us(pairs_RR * row_bytes) + links.all_to_all_us(pairs_RR * _WEIGHT_BYTES),
            "wait_combine": links.all_to_all_us(pairs_RR.T * row_bytes),
        }
