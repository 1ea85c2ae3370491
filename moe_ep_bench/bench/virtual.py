"""The measurement behind ``emulate``: every case on every virtual rank, one after another, set side by side.

What is measured is a layer that stands alone, whose key is None, or a whole model with its MoE layers by number.

For each batch all ranks' routing is worked out first, outside of any layer (``traffic``). Then every rank's run is
timed (``rank_timers``), all cases moments apart and in an order that changes as in ``run``; ranks with the same to do
are timed once. Each rank's times are put together over iterations, and ranks are then set side by side with their
meetings (``cost_model.timeline``), where what moves between ranks is modelled (``links``) from each layer's own bytes.

Before that few tokens are held against the dense reference (``small_layers``).

Shapes: R = virtual ranks, V = cases, B = batches, C = columns of a sample, E = experts, P = slots.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.bench.carried import CarriedLoads
from moe_ep_bench.bench.job import Job, watched_machine
from moe_ep_bench.bench.plan import BASELINE, NOISE, CaseSpec, Comparison
from moe_ep_bench.bench.rank_timers import MeasuredRanks, ModelledRanks, RankTime
from moe_ep_bench.bench.rows import PackedMetrics, columns_of, write_case
from moe_ep_bench.bench.small_layers import errors_of
from moe_ep_bench.bench.subjects import LayerSubject, ModelSubject
from moe_ep_bench.bench.traffic import CaseRouter, LayerTraffic, RankBatches, Share, Shares, Traffic, traffic_of
from moe_ep_bench.cost_model.timeline import compose, median_legs
from moe_ep_bench.files import write_json
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.layer.experts import DTYPES
from moe_ep_bench.layer.reference import TOLERANCE
from moe_ep_bench.machine import provenance
from moe_ep_bench.schema import TOTAL, PhaseKey, phase_key
from moe_ep_bench.timing.protocol import (
    BREAKDOWN,
    HOST,
    PLAIN,
    THREAD_CPU,
    Step,
    collections_between,
    order,
    turn_of,
)

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
        layers: what is routed: each MoE layer by itself.
        columns: of a sample.
        samples: microseconds [V, R, B, C].
        metrics: of each case [R, B x layers] rows, those of a batch's layers together as ``write_case`` wants them.
        errors: of each case and layer, beside the reference.
    """

    def __init__(
        self, comparison: Comparison, cases: Sequence[CaseSpec], device: torch.device, begin: Callable[[str], None]
    ) -> None:
        self.comparison, self.cases, self.device, self.begin = comparison, list(cases), device, begin
        self.seed, subject = comparison.experiment.layer.seed, comparison.subject
        self.num_ranks, self.num_batches = comparison.ep_size, comparison.workload.num_batches
        self.layers = subject.layers()
        self.carried = CarriedLoads(self._all_shares, comparison.slots, self.seed)
        self.columns = columns_of(subject)
        self.num_chunks = 1
        self.samples = np.empty(0)
        self.metrics: list[PackedMetrics] = []
        self.errors: dict[tuple[str, int | None], float] = {}
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
        routers = self._routers(0)
        for case, layer, error in errors_of(self.comparison, routers, self.layers, self.device, self.begin):
            self.errors[case.case_id, layer] = error
            if error > allowed and case not in failed:
                self.cases.remove(case)
                where = "" if layer is None else f" in layer {layer}"
                failed[case] = f"output differs from the dense reference by {error:.2g}{where}, allowed is {allowed:g}"
        return failed

    @property
    def layer_us(self) -> NDArray[np.float64]:
        """The slowest rank's time of every case and batch, microseconds [V, B], once they are measured."""
        return self.samples[..., self.columns.index(TOTAL)].max(axis=1)

    def measure(self) -> dict[str, Any] | None:
        """Time all batches; return the conditions under which that was done, None where nothing ran."""
        self.samples = np.full((len(self.cases), self.num_ranks, self.num_batches, len(self.columns)), np.nan)
        num_rows = self.num_batches * len(self.layers)
        self.metrics = [PackedMetrics(self.num_ranks, num_rows) for _ in self.cases]
        if self.comparison.device is not None:
            modelled = ModelledRanks(self.comparison, self.comparison.device)
            for batch in range(self.num_batches):
                self._time_batch(batch, modelled, rounds=1, kept=1)
            return None
        settings = self.comparison.experiment.measure
        rounds = 1 + settings.warmup + settings.iterations
        self.num_chunks = self._chunks()
        timer = MeasuredRanks(self.comparison, self.device, self.num_chunks)
        dtype = DTYPES[self.comparison.experiment.layer.dtype]
        with watched_machine(self.device, dtype) as here, collections_between():
            for batch in range(self.num_batches):
                self._time_batch(batch, timer, rounds, settings.iterations)
        warm_up = {"rounds": 1 + settings.warmup, "change": None, "settled": False}
        emulated = {"timed": self.timed_runs, "shared": self.shared_runs, "num_chunks": self.num_chunks}
        return {"warm_up": warm_up, "ranks": [here], "emulated_runs": emulated}

    def write(self, job: Job, conditions: dict[str, Any] | None) -> None:
        """Write the conditions, then every case's routing and its samples, which make it finished."""
        comparison = self.comparison
        if conditions is not None:
            path = job.directory.conditions_path(comparison.comparison_id, job.launch)
            write_json(path, {"run_id": job.run_id, **conditions})
        steps = [Step(batch, 0, kind) for kind in (PLAIN, BREAKDOWN) for batch in range(self.num_batches)]
        for number, case in enumerate(self.cases):
            plain_RBC = np.full_like(self.samples[number], np.nan)
            for name in (TOTAL, HOST, THREAD_CPU):
                plain_RBC[..., self.columns.index(name)] = self.samples[number][..., self.columns.index(name)]
            times_RSC = np.concatenate([plain_RBC, self.samples[number]], axis=1)
            write_case(job, comparison, case, steps, times_RSC, self.columns, self.metrics[number])

    def _time_batch(self, index: int, timer: MeasuredRanks | ModelledRanks, rounds: int, kept: int) -> None:
        """Time one batch; of ``rounds`` the last ``kept`` count."""
        routers = self._routers(index)
        batches, traffic = self._routed(index, routers, keep=timer.needs_tokens)
        for case, metrics, of_case in zip(self.cases, self.metrics, traffic, strict=True):
            for row, (layer, one) in enumerate(of_case.layers.items(), index * len(self.layers)):
                metrics.put_all((slice(None), row), one.metrics)
                if index == 0:
                    metrics.column("reference_error")[:, row] = self.errors.get((case.case_id, layer), np.nan)
        times: list[list[list[RankTime]]] = [[[] for _ in range(self.num_ranks)] for _ in routers]
        for round_number in range(rounds):
            gc.collect(0)
            turn = turn_of(Step(index, round_number, PLAIN), self.num_batches, len(routers))
            done: dict[tuple[Any, ...], RankTime] = {}
            for rank, shares in enumerate(self._shares(batches)):
                for number in order(len(routers), turn):
                    router = routers[number]
                    self.begin(router.case.case_id)
                    work = (number, *traffic[number].work(rank))
                    if work not in done:
                        own = {layer: one.of(router.case) for layer, one in shares.items()}
                        done[work] = timer.time(router, traffic[number], rank, own, first=round_number == 0)
                        self.timed_runs += 1
                    else:
                        self.shared_runs += 1
                    if round_number >= rounds - kept:
                        times[number][rank].append(done[work])
        for number, one in enumerate(traffic):
            self._store(number, index, times[number], self._link_us(one))

    def _routed(
        self, index: int, routers: Sequence[CaseRouter], *, keep: bool
    ) -> tuple[dict[int | None, RankBatches], list[Traffic]]:
        """A batch: all ranks' tokens of each layer where these are kept, and what each case's routing amounts to."""
        batches: dict[int | None, RankBatches] = {}
        layers: list[dict[int | None, LayerTraffic]] = [{} for _ in routers]
        for layer, subject in self.layers.items():
            if layer is not None:
                self.begin(self.comparison.comparison_id)
            ranks = RankBatches(subject, index, len(self.layers))
            for of_case, one in zip(layers, self._traffic(subject, routers, ranks, self.num_chunks), strict=True):
                of_case[layer] = one
            if keep:
                batches[layer] = ranks
        subject = self.comparison.subject
        lengths_R = subject.lengths_of_ranks(index) if isinstance(subject, ModelSubject) else None
        return batches, [Traffic(index, of_case, lengths_R) for of_case in layers]

    def _shares(self, batches: Mapping[int | None, RankBatches]) -> Iterator[dict[int | None, Shares]]:
        """Every rank's tokens, rank by rank, as the cases see them in each layer; nothing where none were kept."""
        if not batches:
            yield from ({} for _ in range(self.num_ranks))
        for rank, tokens in enumerate(zip(*batches.values(), strict=True)):
            own = zip(batches, tokens, strict=True)
            yield {layer: Shares(self.layers[layer], one, rank, self.device) for layer, one in own}

    def _store(
        self,
        number: int,
        index: int,
        times_R: Sequence[Sequence[RankTime]],
        link_us: dict[PhaseKey, NDArray[np.float64]],
    ) -> None:
        legs_R = [median_legs([run.legs for run in runs]) for runs in times_R]
        for rank, phases in enumerate(compose(legs_R, times_R[0][0].meetings, link_us)):
            phases[HOST] = float(np.median([run.host_us for run in times_R[rank]]))
            phases[THREAD_CPU] = float(np.median([run.thread_cpu_us for run in times_R[rank]]))
            for name, value in phases.items():
                self.samples[number, rank, index, self.columns.index(name)] = value

    def _routers(self, index: int) -> list[CaseRouter]:
        return [CaseRouter(case, self._slots(case, index), self.seed, self.carried) for case in self.cases]

    def _all_shares(self, layer: int | None, index: int) -> Iterator[Share]:
        """Every rank's tokens of a batch in a layer."""
        of = self.layers[layer]
        for rank, tokens in enumerate(RankBatches(of, index, len(self.layers))):
            yield Share.of(of, tokens, rank, self.device)

    def _slots(self, case: CaseSpec, index: int) -> ExpertPlacement:
        """Where a case's experts stand for one batch: replicas are placed for the mean load of all other batches."""
        if case.replication is None:
            return self.comparison.slots
        loads_BE = self._native_loads
        if self.num_batches > 1:  # One that is alone is placed for itself.
            loads_BE = np.delete(loads_BE, index, axis=0)
        return ExpertPlacement.of_replication(self.comparison.replicate(case.replication, loads_BE.mean(axis=0)))

    @cached_property
    def _native_loads(self) -> NDArray[np.float64]:
        """Pairs of every expert under the model's own top-k, [B, E]; a layer's that stands alone."""
        slots, layer = ExpertPlacement.contiguous(self.comparison.model.num_experts, self.num_ranks), self.layers[None]
        router = CaseRouter(self.comparison.case(BASELINE, "native"), slots, self.seed)
        loads = []
        for batch in range(self.num_batches):
            (traffic,) = traffic_of(layer, [router], RankBatches(layer, batch), batch, self.device)
            loads.append(traffic.counts_CRP.sum((0, 1)).numpy().astype(np.float64))
        return np.stack(loads)

    def _traffic(
        self, layer: LayerSubject, routers: Sequence[CaseRouter], ranks: RankBatches, num_chunks: int
    ) -> list[LayerTraffic]:
        """Of every case. Native runs a second time for the noise floor, but routes the same."""
        baseline = next((router for router in routers if router.case.role == BASELINE), None)
        own = [router for router in routers if router.case.role != NOISE or baseline is None]
        found = traffic_of(layer, own, ranks, ranks.index, self.device, num_chunks)
        by_case = {router.case.case_id: traffic for router, traffic in zip(own, found, strict=True)}
        return [by_case.get(r.case.case_id) or by_case[baseline.case.case_id] for r in routers]

    def _chunks(self) -> int:
        """In how many chunks the fullest rank's rows fit into memory; a model is not run in chunks."""
        subject, wanted = self.comparison.subject, self.comparison.experiment.emulate.chunk_tokens
        if not self.comparison.in_chunks:
            return 1
        if wanted is not None:
            return -(-subject.most_tokens // wanted)
        traffic = self._traffic(subject, self._routers(0), RankBatches(subject, 0), 1)
        most_rows = max(int(max(pairs.sum(1).max(), pairs.sum(0).max())) for pairs in (t.rank_pairs for t in traffic))
        available = provenance.available_memory_bytes(self.device, 1) * _MEMORY_SHARE
        needed = most_rows * self.comparison.bytes_per_row
        return max(1, -(-int(needed) // int(available)))

    def _link_us(self, traffic: Traffic) -> dict[PhaseKey, NDArray[np.float64]]:
        """What each meeting takes on the modelled links, [R] microseconds."""
        links, num_ranks = self.comparison.links, self.num_ranks
        assert links is not None
        row_bytes = self.comparison.model.hidden_size * DTYPES[self.comparison.experiment.layer.dtype].itemsize
        everyone, found = np.ones(num_ranks), {}
        for layer, one in traffic.layers.items():
            # Chunks are this device's need; ranks of their own send all at once.
            pairs_RR = one.rank_pairs.astype(np.float64)
            stats_bytes = 0 if one.stats_SE is None else one.stats_SE.numel() * _STATISTIC_BYTES
            # Rows and their weights travel one after the other.
            dispatch_R = links.all_to_all_us(pairs_RR * row_bytes) + links.all_to_all_us(pairs_RR * _WEIGHT_BYTES)
            found |= {
                phase_key(layer, "wait_policy"): everyone * links.all_reduce_us(stats_bytes, num_ranks),
                phase_key(layer, "wait_metadata"): everyone
                * links.all_gather_us(one.counts_CRP.shape[2] * _COUNT_BYTES, num_ranks),
                phase_key(layer, "wait_dispatch"): dispatch_R,
                phase_key(layer, "wait_combine"): links.all_to_all_us(pairs_RR.T * row_bytes),
            }
        return found
