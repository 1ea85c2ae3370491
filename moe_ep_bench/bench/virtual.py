"""The measurement behind ``emulate``: every case on every virtual rank, one after another, set side by side.

What is measured is a layer that stands alone, whose key is None, or a whole model with its MoE layers by number.

For each batch all ranks' routing is worked out first, outside of any layer (``traffic``). Then every rank's run is
timed (``rank_timers``), all cases moments apart and in an order that changes as in ``run``; ranks with the same to do
are timed once. Each rank's times are put together over iterations, and ranks are then set side by side with their
meetings (``cost_model.timeline``), where what moves between ranks is modelled (``links``) from each layer's own bytes.

Before that few tokens are held against the dense reference, at a small hidden size and with rows that are exchanged.

Shapes: R = virtual ranks, V = cases, B = batches, C = columns of a sample, E = experts, P = slots.
"""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.plan import BASELINE, NOISE, CaseSpec, Comparison
from moe_ep_bench.bench.rank_timers import MeasuredRanks, ModelledRanks, RankTime, RankTimer, slotted
from moe_ep_bench.bench.rows import PackedMetrics, routing_columns, write_case
from moe_ep_bench.bench.subjects import LayerSubject
from moe_ep_bench.bench.traffic import CaseRouter, LayerTraffic, RankBatches, Shares, Traffic, traffic_of
from moe_ep_bench.cost_model.timeline import compose, median_legs
from moe_ep_bench.files import write_json
from moe_ep_bench.layer.build import SingleLayer
from moe_ep_bench.layer.depth import phases_in_depth
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.layer.experts import DTYPES
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.layer.virtual import VirtualRanks
from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.monitor import MachineSampler
from moe_ep_bench.schema import TOTAL, PhaseKey
from moe_ep_bench.timing.ceilings import measure_ceilings
from moe_ep_bench.timing.protocol import (
    BREAKDOWN,
    COLUMNS,
    HOST,
    PLAIN,
    THREAD_CPU,
    Step,
    collections_between,
    order,
    sample_keys,
    turn_of,
)
from moe_ep_bench.workload import TokenBatch

# Share of the free memory that a chunk's rows may take; the rest is for what allocators keep and routing needs.
_MEMORY_SHARE = 0.5
# Bytes of what travels beside rows: a pair's weight, a count, a number of a policy's statistics.
_WEIGHT_BYTES, _COUNT_BYTES, _STATISTIC_BYTES = 4, 8, 8
# Tokens of each rank that are held against the reference, and the hidden size there.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64


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
        self.columns: Sequence[PhaseKey] = COLUMNS
        if comparison.scope == "model":
            self.columns = sample_keys(phases_in_depth(subject.num_layers, subject.moe_layers))
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
        for case, error, where in self._errors():
            if error > allowed and case not in failed:
                self.cases.remove(case)
                failed[case] = f"output differs from the dense reference by {error:.2g}{where}, allowed is {allowed:g}"
        return failed

    def _errors(self) -> Iterator[tuple[CaseSpec, float, str]]:
        """Each case's error in each layer, kept in ``errors``, and where it was found."""
        checked = _SmallLayers(self.comparison, self.device)
        for layer, subject in self.layers.items():
            few = [_few_of(tokens) for tokens in RankBatches(subject, 0)]
            where = "" if layer is None else f" in layer {layer}"
            for router in self._routers(0):
                self.begin(router.case.case_id)
                error = self.errors[router.case.case_id, layer] = checked.error(router, subject, few)
                yield router.case, error, where

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
        ceilings = measure_ceilings(self.device, DTYPES[self.comparison.experiment.layer.dtype])
        with MachineSampler(self.device) as sampler, collections_between():
            for batch in range(self.num_batches):
                self._time_batch(batch, timer, rounds, settings.iterations)
        here = {
            "hostname": socket.gethostname(),
            "machine": sampler.stop().as_dict(),
            "ceilings": asdict(ceilings),
            "peak_memory_bytes": provenance.peak_memory_bytes(self.device),
        }
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
            metrics = self.metrics[number]
            routing = routing_columns(metrics.keys, list(torch.from_numpy(metrics.numbers)))
            plain_RBC = np.full_like(self.samples[number], np.nan)
            for name in (TOTAL, HOST, THREAD_CPU):
                plain_RBC[..., self.columns.index(name)] = self.samples[number][..., self.columns.index(name)]
            times_RSC = list(np.concatenate([plain_RBC, self.samples[number]], axis=1))
            write_case(job, comparison, case, steps, times_RSC, self.columns, routing, tuple(self.layers))

    def _time_batch(self, index: int, timer: RankTimer, rounds: int, kept: int) -> None:
        """Time one batch; of ``rounds`` the last ``kept`` count."""
        routers = self._routers(index)
        batches, traffic = self._routed(index, routers, keep=timer.needs_tokens)
        for number, one in enumerate(traffic):
            self._put_metrics(number, one)
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
        of_model = self.comparison.scope == "model"
        lengths_R = self.comparison.subject.lengths_of_ranks(index) if of_model else None
        return batches, [Traffic(index, of_case, lengths_R) for of_case in layers]

    def _shares(self, batches: Mapping[int | None, RankBatches]) -> Iterator[dict[int | None, Shares]]:
        """Every rank's tokens, rank by rank, as the cases see them in each layer; nothing where none were kept."""
        if not batches:
            yield from ({} for _ in range(self.num_ranks))
        for rank, tokens in enumerate(zip(*batches.values(), strict=True)):
            own = zip(batches, tokens, strict=True)
            yield {layer: Shares(self.layers[layer], one, rank, self.device) for layer, one in own}

    def _put_metrics(self, number: int, traffic: Traffic) -> None:
        """Keep a case's routing metrics of one batch."""
        metrics, case_id = self.metrics[number], self.cases[number].case_id
        for row, (layer, one) in enumerate(traffic.layers.items(), traffic.index * len(self.layers)):
            metrics.put_all((slice(None), row), one.metrics)
            if traffic.index == 0:
                metrics.column("reference_error")[:, row] = self.errors.get((case_id, layer), np.nan)

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
        return [CaseRouter(case, self._slots(case, index), self.seed) for case in self.cases]

    def _slots(self, case: CaseSpec, index: int) -> ExpertPlacement:
        """Where a case's experts stand for one batch."""
        wanted = case.replication
        if wanted is None:
            return self.comparison.slots
        return ExpertPlacement.of_replication(self.comparison.replicate(wanted, self._forecast(index)))

    def _forecast(self, index: int) -> NDArray[np.float64]:
        """The load that replicas are placed for, [E]: that of all other batches; of the batch itself if it is alone."""
        loads_BE = self._native_loads
        return (np.delete(loads_BE, index, axis=0) if self.num_batches > 1 else loads_BE).mean(axis=0)

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
        if not subject.in_chunks:
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
        return {
            meeting if layer is None else (layer, meeting): link_us
            for layer, one in traffic.layers.items()
            for meeting, link_us in self._layer_link_us(one).items()
        }

    def _layer_link_us(self, traffic: LayerTraffic) -> dict[str, NDArray[np.float64]]:
        links, num_ranks = self.comparison.links, self.num_ranks
        assert links is not None
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


class _SmallLayers:
    """A comparison's layer at a small hidden size, with values that real ranks would compute."""

    def __init__(self, comparison: Comparison, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        self._model = comparison.model.scaled(min(1.0, _CHECKED_WIDTH / comparison.model.hidden_size))
        self._seed = comparison.experiment.layer.seed
        self._built: dict[int, VirtualRanks] = {}
        self._inputs: dict[tuple[int, ...], tuple[list[Tensor], DenseReference]] = {}

    def error(self, router: CaseRouter, subject: LayerSubject, ranks: Sequence[TokenBatch]) -> float:
        """The worst token's error when all ranks of a case exchange real rows.

        Args:
            subject: the layer.
            ranks: every rank's few tokens of batch 0.
        """
        (traffic,) = traffic_of(subject, [router], ranks, 0, self._device)
        shares = [Shares(subject, tokens, rank, self._device).of(router.case) for rank, tokens in enumerate(ranks)]
        routings = [router.route(share, 0, traffic.stats_SE) for share in shares]
        virtual = self._virtual(router.slots)
        virtual.announced = {None: traffic.announced(0, self._device)}

        def prepare(rank: int) -> contextlib.AbstractContextManager[None]:
            router.enter(virtual.subject, {None: shares[rank]}, 0)
            if router.slots.is_contiguous:
                return contextlib.nullcontext()
            return virtual.routed({None: router.on_slots(routings[rank], rank)})

        hidden, reference = self._input([tokens.num_tokens for tokens in ranks])
        outputs = virtual.side_by_side([mine.unsqueeze(1) for mine in hidden], prepare)
        weights_TE = torch.cat([routing.weights_TE for routing in routings])
        return reference.worst_error(torch.cat(outputs)[:, 0], weights_TE)

    def _input(self, sizes: Sequence[int]) -> tuple[list[Tensor], DenseReference]:
        """Every rank's hidden states, and the reference for all of them."""
        key = tuple(sizes)
        if key not in self._inputs:
            generator = torch.Generator(self._device).manual_seed(self._seed)
            hidden_ND = torch.randn(sum(sizes), self._model.hidden_size, generator=generator, device=self._device)
            self._inputs[key] = list(hidden_ND.split(key)), DenseReference(self._model, hidden_ND, self._seed)
        return self._inputs[key]

    def _virtual(self, slots: ExpertPlacement) -> VirtualRanks:
        if slots.num_slots not in self._built:
            model, parts = slotted(self._model, slots.num_slots), self._comparison.parts
            build = partial(SingleLayer, model, torch.float32, self._device, seed=self._seed, parts=parts)
            self._built[slots.num_slots] = VirtualRanks(build, self._comparison.ep_size)
        virtual = self._built[slots.num_slots]
        virtual.placement = slots
        return virtual


def _few_of(tokens: TokenBatch) -> TokenBatch:
    """Some of a rank's tokens from the first to the last, and so of both where some are padding."""
    num_checked = min(_CHECKED_TOKENS, tokens.num_tokens)
    return tokens.rows(torch.linspace(0, max(tokens.num_tokens - 1, 0), num_checked).long())
