"""The measurement behind ``emulate``: every case on every virtual rank, one after another, set side by side.

What is measured is a layer that stands alone, whose key is None, or a whole model with its MoE layers by number. First
few tokens are held against the dense reference (``measured_ranks.SmallLayers``).

For each batch all ranks' routing is worked out first, outside of any layer (``traffic``). Then every rank's run is
timed (``measured_ranks``), all cases moments apart and in an order that changes as in ``run``, or modelled. Each rank's
times are put together over iterations, and ranks are then set side by side with their meetings
(``cost_model.timeline``), where what moves is modelled (``links``) from each layer's own bytes. With two batches that
overlap, each micro-batch is modelled by itself.

Shapes: R = virtual ranks, V = cases, B = batches, C = columns of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.bench.comparison import CaseSpec, Comparison
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.routing import CaseRouter
from moe_ep_bench.bench.rows import Outcome, columns_of
from moe_ep_bench.bench.traffic import LayerTraffic, Routed, RoutedBatches, Traffic
from moe_ep_bench.config import NO_OVERLAP
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.cost_model.exchanges import Copies
from moe_ep_bench.cost_model.phases import PassWork, RankWork, layer_segments, pass_segments
from moe_ep_bench.cost_model.timeline import Chain, RankTime, compose, compose_alike, legs_of, median_legs
from moe_ep_bench.errors import UserError
from moe_ep_bench.layer.experts import DTYPES, TOLERANCE
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.machine.monitor import watched_machine
from moe_ep_bench.runtime.attempts import split_reason
from moe_ep_bench.schema import BESIDE_TOTAL, TOTAL, PhaseKey, phase_key
from moe_ep_bench.timing.device import measure_ceilings
from moe_ep_bench.timing.protocol import BREAKDOWN, PLAIN, Step

# Bytes of what travels beside rows: a pair's routing weight, a count, a number of a policy's statistics.
_WEIGHT_BYTES, _COUNT_BYTES, _STATISTIC_BYTES = 4, 8, 8
# Multiprocessors that an exchange holds where nobody says: as DeepSeek-V3 gives it (arXiv 2412.19437, section 3.2.2).
HELD_SMS = 20


def measure_comparison(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> Outcome:
    """Measure ``cases`` on virtual ranks."""
    job.guard.at(comparison.comparison_id)
    with device_scope(), torch.inference_mode():
        emulation = Emulation(comparison, cases, job.ranks.device, job.begin)
        if comparison.device is not None:
            emulation.time(partial(modelled_times, comparison))
            return emulation.outcome()
        from moe_ep_bench.layer.megatron import expert_parallel_groups

        expert_parallel_groups(1, comparison.experiment.measure.timeout_s + 60)
        failed = emulation.check(job.record_failure)
        conditions = emulation.measure() if emulation.cases else None
        free_memory(job.ranks.device)
        outcome = emulation.outcome()
        outcome.unmeasured = {case.case_id: split_reason(reason) for case, reason in failed.items()}
        outcome.conditions = conditions
        return outcome


def modelled_times(comparison: Comparison, routed: Routed, begin: Callable[[str], None]) -> list[list[list[RankTime]]]:
    """What all ranks take of a batch on a device that is not here: of each case and rank one run."""
    times = []
    for router, traffic in routed:
        times.append([])
        for rank in range(comparison.ep_size):
            begin(router.case.case_id)
            times[-1].append([modelled_time(comparison, router, traffic, rank)])
    return times


def modelled_time(comparison: Comparison, router: CaseRouter, traffic: Traffic, rank: int) -> RankTime:
    """What a rank takes on a device that is not here: see ``cost_model.phases``."""
    device, model, dtype = comparison.device, comparison.model, comparison.experiment.layer.dtype
    assert device is not None
    if (policy := router.case.policy) is not None:
        device = device.for_policy(policy.name, model.num_experts)
    exchange = comparison.sent_for
    by_rank = exchange in ("rank", "node")
    layers = {
        layer: RankWork(
            of_layer.num_tokens_R[rank],
            int(of_layer.counts_RP[rank].sum()),
            of_layer.received(rank),
            sum(of_layer.num_tokens_R),
            None if of_layer.shared_RR is None else int(of_layer.shared_RR[:, rank].sum()),
            int(of_layer.copies("rank")[:, rank].sum()) if by_rank else None,
        )
        for layer, of_layer in traffic.layers.items()
    }
    how: dict[str, Any] = {
        "by_policy": policy is not None,
        "batch_wide": any(of_layer.stats_SE is not None for of_layer in traffic.layers.values()),
        "alone": comparison.ep_size == 1,
        "dtype": dtype,
        "dispatch_dtype": comparison.experiment.layer.dispatch_dtype,
        "exchange": exchange,
        "solving_us": 0.0
        if traffic.number
        else (router.case.replication and router.case.replication.solving_us) or 0.0,
    }
    if traffic.lengths_R is None:
        return RankTime(*legs_of(layer_segments(device, model, layers[None], **how)))
    work = PassWork(traffic.lengths_R[rank], comparison.context_length, layers, comparison.num_parts)
    return RankTime(*legs_of(pass_segments(device, model, comparison.num_layers, work, **how)))


def sent_copies(traffic: LayerTraffic, copies: Copies, num_nodes: int) -> NDArray[np.int64]:
    """Copies of tokens that each rank sends to each rank, or to each node: int64 [R, R or N].

    A token that goes to another rank for its shared experts alone is a copy of its own there.
    """
    sent_RX = traffic.rank_pairs if copies == "pair" else traffic.copies(copies)
    if traffic.shared_RR is None:
        return sent_RX
    shared_RX = traffic.shared_RR
    if copies == "node":
        shared_RX = shared_RX.reshape(len(shared_RX), num_nodes, -1).sum(axis=2)
    return sent_RX + shared_RX


def exchange_us(comparison: Comparison, rows_RR: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Microseconds that dispatch and combine of a layer keep each rank's links busy, float64 [R] each.

    As Megatron-Core's all-to-all over NCCL sends them: a row for each (token, expert), and ahead of the experts its
    weight in an all-to-all of its own. A token that has one copy for each rank carries its weights itself.

    Args:
        rows_RR: from each rank to each.
    """
    links, device, dtype = comparison.links, comparison.device, comparison.experiment.layer.dtype
    assert links is not None
    sent_as, width = comparison.experiment.layer.dispatch_dtype, comparison.model.expert_hidden_size
    precision = PRECISIONS[dtype].sent(sent_as) if device is None else device.precision(dtype, sent_as)
    dispatch_us, weights_us, combine_us = (
        links.all_to_all_us(sent_RR * num_bytes)
        for sent_RR, num_bytes in (
            (rows_RR, width * precision.sent_bytes),
            (rows_RR, 0 if comparison.sent_for else _WEIGHT_BYTES),
            (rows_RR.T, width * precision.hidden_bytes),
        )
    )
    return dispatch_us + weights_us, combine_us


class Emulation:
    """One comparison's measurement.

    Args:
        device: what runs the layers, and routes.
        begin: called with a case's id ahead of each of its runs.

    Attributes:
        columns: of a sample.
        routed: the cases that are still in order, and their routing.
        samples: by case id, microseconds [R, B, C].
        errors: beside the dense reference, by case id and layer.
    """

    def __init__(
        self, comparison: Comparison, cases: Sequence[CaseSpec], device: torch.device, begin: Callable[[str], None]
    ) -> None:
        self.comparison, self.device, self.begin = comparison, device, begin
        self.num_ranks, self.num_batches = comparison.ep_size, comparison.workload.num_batches
        self.columns, self.routed = columns_of(comparison), RoutedBatches(comparison, cases, device)
        size = self.num_ranks, self.num_batches, len(self.columns)
        self.samples = {case.case_id: np.full(size, np.nan) for case in cases}
        self.errors: dict[tuple[str, int | None], float] = {}

    @property
    def cases(self) -> list[CaseSpec]:
        return [router.case for router in self.routed.routers]

    def check(self, record_failure: Callable[[Exception], str]) -> dict[CaseSpec, str]:
        """Hold every case against the dense reference, at a small hidden size and with rows that are truly exchanged.

        Cases that fail are left out, and returned with the reason.

        Args:
            record_failure: returns the reason where a case raises (``Job.record_failure``).
        """
        from moe_ep_bench.bench.measured_ranks import SmallLayers

        small, allowed = SmallLayers(self.comparison, self.device), TOLERANCE[torch.float32]
        failed: dict[CaseSpec, str] = {}
        for layer in self.comparison.workloads:
            for router in (router for router in self.routed.routers if router.case not in failed):
                case = router.case
                self.begin(case.case_id)
                try:
                    error = self.errors[case.case_id, layer] = small.error(router, layer)
                except Exception as problem:
                    failed[case] = record_failure(problem)
                    continue
                if not error <= allowed:  # NaN too
                    what = f"output differs from the dense reference by {error:.2g}"
                    failed[case] = f"{what}{'' if layer is None else f' in layer {layer}'}, allowed is {allowed:g}"
        self.routed.routers = [router for router in self.routed.routers if router.case not in failed]
        return failed

    def time(self, times: Callable[[Routed, Callable[[str], None]], Sequence[Sequence[Sequence[RankTime]]]]) -> None:
        """Take all batches, and set the ranks of each side by side.

        Args:
            times: of a batch, what each case takes on each rank, run by run.
        """
        for index in range(self.num_batches):
            routed = self.routed.route(index, partial(self.begin, self.comparison.comparison_id))
            parts = [traffic.parts(self.comparison.num_parts) for _, traffic in routed]
            routed_parts = [
                [(router, part) for (router, _), part in zip(routed, of_number, strict=True)]
                for of_number in zip(*parts, strict=True)
            ]
            times_of_parts = [times(of_part, self.begin) for of_part in routed_parts]
            for (router, _), traffic_M, times_MR in zip(routed, parts, zip(*times_of_parts, strict=True), strict=True):
                self._store(router, times_MR, traffic_M)

    def measure(self) -> dict[str, Any]:
        """Time all batches on the device that is here; return the conditions under which that was done."""
        from moe_ep_bench.bench.measured_ranks import MeasuredRanks

        settings = self.comparison.experiment.measure
        ceilings = measure_ceilings(self.device, DTYPES[self.comparison.experiment.layer.dtype])
        free_memory(self.device)  # over 2 GiB on a GPU
        ranks = MeasuredRanks(self.comparison, self.device)
        with watched_machine(self.device, ceilings) as here, ranks.watch.recorder.clock.watched():
            self.time(ranks.times)
        return {
            "unclocked": ranks.unclocked,
            "warm_up": {"rounds": settings.fewest_rounds - settings.iterations, "change": None, "settled": False},
            "ranks": [here],
        }

    def outcome(self) -> Outcome:
        """What all cases that are in order took and routed: each batch once plain and once broken down."""
        steps = [Step(index, 0, kind) for kind in (PLAIN, BREAKDOWN) for index in range(self.num_batches)]
        whole = [self.columns.index(name) for name in (TOTAL, *BESIDE_TOTAL)]
        times, rows = {}, self.routed.rows
        for case in self.cases:
            samples_RBC = self.samples[case.case_id]
            plain_RBC = np.full_like(samples_RBC, np.nan)
            plain_RBC[..., whole] = samples_RBC[..., whole]
            times[case.case_id] = np.concatenate([plain_RBC, samples_RBC], axis=1)
            for row in rows[case.case_id]:
                row["reference_error"] = self.errors.get((case.case_id, row["layer"])) if row["batch"] == 0 else None
        return Outcome(steps=steps, columns=self.columns, times=times, rows=rows, frontiers=self.routed.frontiers)

    # ---- ranks side by side ------------------------------------------------------------------------------------------

    def _store(
        self, router: CaseRouter, times_MR: Sequence[Sequence[Sequence[RankTime]]], traffic: list[Traffic]
    ) -> None:
        """Set a case's ranks side by side, behind links: the chain of every micro-batch (M)."""
        chains = [self._chain(times_R, part) for times_R, part in zip(times_MR, traffic, strict=True)]
        if self.comparison.overlap != NO_OVERLAP:
            chains = [chain.with_shared_beside() for chain in chains]
        is_one_of_many = len(chains) > 1 and self.comparison.scope == "layer"
        for rank, phases in enumerate((compose_alike if is_one_of_many else compose)(chains)):
            runs = times_MR[0][rank]
            beside = {name: float(np.median([run.beside[name] for run in runs])) for name in runs[0].beside}
            for name, value in {**phases, **beside}.items():
                self.samples[router.case.case_id][rank, traffic[0].index, self.columns.index(name)] = value

    def _chain(self, times_R: Sequence[Sequence[RankTime]], traffic: Traffic) -> Chain:
        legs_R, link_us, held = [median_legs([run.legs for run in runs]) for runs in times_R], {}, {}
        for layer, of_layer in traffic.layers.items():
            for phase, (time_us, share) in self._link_us(of_layer).items():
                link_us[phase_key(layer, phase)], held[phase_key(layer, phase)] = time_us, share
        return Chain(legs_R, times_R[0][0].meetings, link_us, held)

    def _link_us(self, traffic: LayerTraffic) -> dict[PhaseKey, tuple[NDArray[np.float64], float]]:
        """What each meeting of a layer takes on the modelled links, [R] microseconds, and its ``held_share``."""
        links, num_ranks = self.comparison.links, self.num_ranks
        assert links is not None
        sms: tuple[int | None, int | None] = (None, None)
        if links.exchange is None:
            rows_RR = sent_copies(traffic, self.comparison.sent_for or "pair", 1)
            if self.comparison.sent_for is not None:
                rows_RR = links.routed(rows_RR, sent_copies(traffic, "node", -(-num_ranks // links.ranks_per_node)))
            dispatch_us, combine_us = exchange_us(self.comparison, rows_RR)
        else:
            sent_RX = sent_copies(traffic, links.exchange.copies, links.exchange.num_nodes)
            dispatch_us, combine_us = links.exchange.times_us(sent_RX)
            sms = links.exchange.held_sms(sent_RX)
        if traffic.slots.moved_bytes_RR is not None:  # The same links carry them, ahead of the rows.
            dispatch_us = dispatch_us + links.all_to_all_us(traffic.slots.moved_bytes_RR)
        stats_bytes = 0 if traffic.stats_SE is None else traffic.stats_SE.numel() * _STATISTIC_BYTES
        # A measured exchange tells ranks its counts by itself.
        count_bytes = traffic.counts_RP.shape[1] * _COUNT_BYTES
        gathered_us = 0.0 if links.exchange is not None else links.all_gather_us(count_bytes, num_ranks)
        held_dispatch, held_combine = (held_share(self.comparison, of_phase) for of_phase in sms)
        return {
            "wait_policy": (np.full(num_ranks, links.all_reduce_us(stats_bytes, num_ranks)), 0.0),
            "wait_metadata": (np.full(num_ranks, gathered_us), 0.0),
            "wait_dispatch": (dispatch_us, held_dispatch),
            "wait_combine": (combine_us, held_combine),
        }


def held_share(comparison: Comparison, sms: int | None) -> float:
    """The share of a modelled device's multiprocessors that an exchange holds, where anything is beside it.

    Those that its rows state; of others none where pairs are sent, for DeepEP's low-latency kernels receive by a hook,
    else ``HELD_SMS`` (assumed).

    Raises:
        UserError: the device does not state how many it has, or has no more.
    """
    device, links = comparison.device, comparison.links
    if comparison.overlap == NO_OVERLAP or device is None or links is None:
        return 0.0
    if sms is None:
        sms = 0 if links.exchange is not None and links.exchange.copies == "pair" else HELD_SMS
    if not sms:
        return 0.0
    if device.num_sms is None or device.num_sms <= sms:
        expected = f"more than the {sms} multiprocessors that an exchange holds"
        raise UserError(
            f"devices/{device.name}: num_sms: expected {expected}, with emulate.overlap; got {device.num_sms}"
        )
    return sms / device.num_sms
