"""``emulate``: one device stands in for all expert-parallel ranks, one after another.

For each batch every virtual rank runs the same layer on its own tokens, with as many rows arriving
at its experts as all ranks' routing would send it (``layer.virtual``). What it takes is measured with the
same phases and clock as in ``run``; the runs are then set side by side (``measure.timeline``), where
waiting appears, and what moves between ranks is modelled from the bytes (``links``).

All cases of a rank run one after another in an order that changes as in ``run``, so that what is
compared was measured moments apart. Before anything is timed, the same policies on the same number of
ranks are held against the dense reference at a small hidden size, with real rows in the exchange.

Shapes: R = virtual ranks, T = tokens of a rank, E = experts, V = cases, S = steps, C = columns of a sample.
"""

from __future__ import annotations

import gc
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench import environment
from moe_ep_bench.config import load_experiments
from moe_ep_bench.exit_codes import OK
from moe_ep_bench.layer.build import DTYPES
from moe_ep_bench.layer.experts import seeded_generator
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import initialize_expert_parallel
from moe_ep_bench.layer.phases import instrumented
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.layer.router import logits_from_scores, scores_from_logits
from moe_ep_bench.layer.virtual import VirtualRanks
from moe_ep_bench.links import Links, links_names, load_links
from moe_ep_bench.machine import MachineSampler
from moe_ep_bench.measure.cache import CacheFlush, RotatingInput
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
    plan,
    turn_of,
)
from moe_ep_bench.measure.timeline import Leg, compose, legs_of
from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.ranks import Ranks, join
from moe_ep_bench.records import TOTAL, RunDirectory, stable_hash, write_json
from moe_ep_bench.scopes import run
from moe_ep_bench.scopes.comparison import CEILING, CaseSpec, Comparison
from moe_ep_bench.scopes.job import Job, open_job
from moe_ep_bench.scopes.rows import case_columns, packed_metrics, routing_columns
from moe_ep_bench.timer import PhaseRecorder, clock_for
from moe_ep_bench.workload import TokenBatch, deal
from moe_ep_bench.workload.balanced import balanced_scores

_DRAWS = 11  # As in ``run``: both drop the same pairs at random.
_NATIVE = make_policy({"name": "topk"})
_JOIN_TIMEOUT_S = 120.0
# The check against the dense reference: tokens of each rank, and the hidden sizes' share of the true ones.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64
DEFAULT_EP_SIZE = 8


@dataclass(frozen=True)
class Emulated(Comparison):
    """What ``emulate`` times: a comparison on virtual ranks behind modelled links."""

    links: Links

    @staticmethod
    def on(experiment: Any, *, on_cpu: bool) -> Emulated:
        """The experiment on ``layer.ep_size`` virtual ranks (8 where the config leaves it open).

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        if experiment.emulate.links is None:
            raise ValueError(
                f"emulate.links: expected one of {', '.join(links_names())}, or a path to such a file; got none"
            )
        if experiment.measure.launches != 1:
            raise ValueError(
                f"measure.launches: emulate makes one launch; expected 1, got {experiment.measure.launches}"
            )
        base = Comparison.of(experiment, experiment.layer.ep_size or DEFAULT_EP_SIZE, on_cpu=on_cpu)
        links = load_links(experiment.emulate.links)
        return Emulated(base.experiment, base.world_size, base.workload, base.parts, links)

    @property
    def definition(self) -> dict[str, Any]:
        return {**super().definition, "mode": "emulated", "links": self.links.model_dump(mode="json")}


@dataclass
class _Traffic:
    """What all ranks' routing of one case on one batch amounts to."""

    counts_RE: Tensor
    stats_SE: Tensor | None
    metrics: list[dict[str, Any]]
    link_us: dict[str, NDArray[np.float64]]
    """What each meeting takes on the modelled links, [R] microseconds."""


class Emulation:
    """One comparison's measurement."""

    def __init__(self, job: Job, comparison: Emulated, cases: Sequence[CaseSpec]) -> None:
        experiment, model = comparison.experiment, comparison.model
        self.job, self.comparison, self.cases = job, comparison, list(cases)
        self.model, self.seed, self.device = model, experiment.layer.seed, job.ranks.device
        self.dtype = DTYPES[experiment.layer.dtype]
        self.num_ranks = comparison.ep_size
        self.virtual = VirtualRanks(model, self.dtype, self.device, self.num_ranks, self.seed, comparison.parts)
        router = self.virtual.layers.policy_router
        router.context = replace(router.context, layer_fraction=comparison.layer_fraction)
        self.recorder = PhaseRecorder(clock_for(self.device))
        settings = experiment.measure
        self.steps = plan(comparison.workload.num_batches, settings.iterations, 0)
        self.samples = np.empty(0)  # [V, R, S, C]
        self.routing_rows: list[list[list[dict[str, Any]]]] = []  # by case, rank and batch
        self.flush = CacheFlush(self.device) if settings.flush_l2 else None
        self.errors: dict[str, float] = {}

    def check(self) -> None:
        """Hold every case against the dense reference, at a small hidden size and with rows that are truly exchanged.

        Cases that fail are recorded and left out.
        """
        small = self.model.scaled(min(1.0, _CHECKED_WIDTH / self.model.hidden_size))
        virtual = VirtualRanks(small, torch.float32, self.device, self.num_ranks, self.seed, self.comparison.parts)
        scores_TE = self.comparison.workload.batch(0).scores_TE[: _CHECKED_TOKENS * self.num_ranks].to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        hidden_ND = torch.randn(len(scores_TE), small.hidden_size, generator=generator, device=self.device)
        reference = DenseReference(small, hidden_ND, self.seed)
        for case in list(self.cases):
            self.job.begin(case.case_id)
            error = _reference_error(virtual, case, self._scores(case, scores_TE), hidden_ND, reference)
            self.errors[case.case_id] = error
            if error > TOLERANCE[torch.float32]:
                self.cases.remove(case)
                reason = (
                    f"output differs from the dense reference by {error:.2g}, allowed is {TOLERANCE[torch.float32]:g}"
                )
                self.job.write_unmeasured(self.comparison, case, "failed", reason)

    def measure(self) -> dict[str, Any]:
        """Measure all batches; return the conditions under which that was done."""
        self.samples = np.full((len(self.cases), self.num_ranks, len(self.steps), len(COLUMNS)), np.nan)
        self.routing_rows = [[[] for _ in range(self.num_ranks)] for _ in self.cases]
        ceilings = measure_ceilings(self.device, self.dtype)
        with MachineSampler(self.device) as sampler, collections_between():
            for batch in range(self.comparison.workload.num_batches):
                self._measure_batch(batch)
        here = {
            "hostname": socket.gethostname(),
            "machine": sampler.stop().as_dict(),
            "ceilings": asdict(ceilings),
            "peak_memory_bytes": environment.peak_memory_bytes(self.device),
        }
        rounds = 1 + self.comparison.experiment.measure.warmup
        return {"warm_up": {"rounds": rounds, "change": None, "settled": False}, "ranks": [here]}

    def write(self, conditions: dict[str, Any]) -> None:
        """Write the conditions, then every case's routing and its samples, which make it finished."""
        directory, comparison = self.job.directory, self.comparison
        path = directory.conditions_path(comparison.comparison_id, self.job.launch)
        write_json(path, {"run_id": self.job.run_id, **conditions})
        steps = [*self.steps, *(replace(step, kind=BREAKDOWN) for step in self.steps)]
        for number, case in enumerate(self.cases):
            keys, metrics_RBM = packed_metrics(self.routing_rows[number])
            routing = routing_columns(keys, list(metrics_RBM))
            plain_RSC = np.full_like(self.samples[number], np.nan)
            for name in (TOTAL, HOST, THREAD_CPU):
                plain_RSC[..., COLUMNS.index(name)] = self.samples[number][..., COLUMNS.index(name)]
            samples = case_columns(steps, list(np.concatenate([plain_RSC, self.samples[number]], axis=1)))
            identify = partial(self.job.identity, comparison, case)
            directory.write_routing(case.case_id, {**identify(len(routing["rank"])), **routing})
            directory.write_case(case.case_id, self.job.launch, {**identify(len(samples["rank"])), **samples})

    def _measure_batch(self, index: int) -> None:
        batch = self.comparison.workload.batch(index)
        shares = deal(batch, self.num_ranks, self.comparison.experiment.workload.rank_shares)
        traffic = [self._traffic(case, index, batch, shares) for case in self.cases]
        for number, case in enumerate(self.cases):
            error = self.errors[case.case_id] if index == 0 else None
            for rank, row in enumerate(traffic[number].metrics):
                self.routing_rows[number][rank].append({**row, "reference_error": error, "output_error": None})
        settings = self.comparison.experiment.measure
        rounds = 1 + settings.warmup + settings.iterations
        inputs = RotatingInput(self._hidden(max(map(len, shares))), len(self.cases))
        for round_number in range(rounds):
            iteration = round_number - rounds + settings.iterations
            legs: list[list[list[Leg]]] = [[] for _ in self.cases]
            hosts: list[list[tuple[float, float]]] = [[] for _ in self.cases]
            meetings: list[list[str]] = [[] for _ in self.cases]
            gc.collect(0)
            turn = turn_of(Step(index, max(iteration, 0), PLAIN), self.comparison.workload.num_batches, len(self.cases))
            for rank, tokens_T in enumerate(shares):
                self.virtual.become(rank)
                scores_TE = batch.scores_TE[tokens_T].to(self.device)
                for number in order(len(self.cases), turn):
                    self.job.begin(self.cases[number].case_id)
                    self._prepare(self.cases[number], traffic[number], index, rank, scores_TE, batch, tokens_T)
                    one, met, spent = self._timed(
                        self.cases[number], inputs.next()[: len(tokens_T)], check=round_number == 0
                    )
                    legs[number].append(one)
                    hosts[number].append(spent)
                    meetings[number] = met
            if iteration >= 0:
                step = next(
                    s for s, step in enumerate(self.steps) if (step.batch, step.iteration) == (index, iteration)
                )
                for number in range(len(self.cases)):
                    self._store(number, step, legs[number], meetings[number], traffic[number], hosts[number])

    def _context(self, rank: int, index: int, request_id_T: Tensor) -> RoutingContext:
        draws = seeded_generator(self.device, self.seed, _DRAWS, index, rank)
        return replace(self.virtual.layers.policy_router.context, rank=rank, generator=draws, request_id_T=request_id_T)

    def _scores(self, case: CaseSpec, scores_TE: Tensor) -> Tensor:
        """What the case's router sees: the replayed logits, and back."""
        seen_TE = balanced_scores(scores_TE, self.model.top_k) if case.role == CEILING else scores_TE
        return logits_from_scores(seen_TE, self.model.score_function)

    def _traffic(self, case: CaseSpec, index: int, batch: TokenBatch, shares: Sequence[Tensor]) -> _Traffic:
        """Route every rank's tokens outside of the layer."""
        policy: Policy = case.policy or _NATIVE
        scores, contexts = [], []
        for rank, tokens_T in enumerate(shares):
            logits_TE = self._scores(case, batch.scores_TE[tokens_T].to(self.device))
            scores.append(scores_from_logits(logits_TE, self.model.score_function))
            contexts.append(self._context(rank, index, batch.sequence_id_T[tokens_T].to(self.device)))
        partial = [policy.batch_stats(s, c) for s, c in zip(scores, contexts, strict=True)]
        stats_SE = None if partial[0] is None else torch.stack(partial).sum(0)  # pyright: ignore
        factor = case.params.get("capacity_factor")
        counts, metrics = [], []
        for rank in range(self.num_ranks):
            context = self._context(rank, index, contexts[rank].request_id_T)
            routing: Routing = policy.route(scores[rank], context, stats_SE)
            counts.append(routing.map_TE.sum(0))
            extra = {"capacity_factor": factor} if isinstance(factor, float) else {}
            metrics.append(routing_metrics(routing, scores[rank], context, **extra))
        counts_RE = torch.stack(counts)
        return _Traffic(counts_RE, stats_SE, metrics, self._link_us(counts_RE, stats_SE))

    def _hidden(self, num_tokens: int) -> Tensor:
        generator = seeded_generator(self.device, self.seed, 10, num_tokens)
        hidden_TD = torch.randn(num_tokens, self.model.hidden_size, generator=generator, device=self.device)
        return hidden_TD.to(self.dtype).unsqueeze(1)

    def _prepare(
        self,
        case: CaseSpec,
        traffic: _Traffic,
        index: int,
        rank: int,
        scores_TE: Tensor,
        batch: TokenBatch,
        tokens_T: Tensor,
    ) -> None:
        layers, exchange = self.virtual.layers, self.virtual.exchange
        router = layers.native_router if case.policy is None else layers.policy_router
        router.replay_TE = self._scores(case, scores_TE)
        if case.policy is not None:
            layers.policy_router.policy = case.policy
            layers.policy_router.context = self._context(rank, index, batch.sequence_id_T[tokens_T].to(self.device))
        exchange.counts_RE, exchange.stats_SE = traffic.counts_RE, traffic.stats_SE

    def _timed(
        self, case: CaseSpec, hidden_T1D: Tensor, *, check: bool
    ) -> tuple[list[Leg], list[str], tuple[float, float]]:
        """Legs, meetings and (host, thread CPU) microseconds of one run as the current rank."""
        layer = self.virtual.layers.native if case.policy is None else self.virtual.layers.policy
        self.virtual.exchange.checks_counts = check
        if self.flush is not None:
            self.flush()
        with self.virtual.connected(), instrumented(layer, self.recorder, lambda: None):
            self.recorder.clock.wait()
            cpu_start, host_start = time.thread_time_ns(), time.perf_counter_ns()
            self.recorder.begin()
            self.virtual.run(layer, hidden_T1D)
            self.recorder.end()
            spent = (time.perf_counter_ns() - host_start) / 1e3, (time.thread_time_ns() - cpu_start) / 1e3
        return *legs_of(self.recorder.segments_us()), spent

    def _store(
        self,
        number: int,
        step: int,
        legs_R: list[list[Leg]],
        meetings: list[str],
        traffic: _Traffic,
        hosts: list[tuple[float, float]],
    ) -> None:
        for rank, times in enumerate(compose(legs_R, meetings, traffic.link_us)):
            times[HOST], times[THREAD_CPU] = hosts[rank]
            for name, value in times.items():
                self.samples[number, rank, step, COLUMNS.index(name)] = value

    def _link_us(self, counts_RE: Tensor, stats_SE: Tensor | None) -> dict[str, NDArray[np.float64]]:
        links, num_ranks = self.comparison.links, self.num_ranks
        pairs_RR = counts_RE.view(num_ranks, num_ranks, -1).sum(2).cpu().numpy().astype(np.float64)
        row_bytes = self.model.hidden_size * torch.empty((), dtype=self.dtype).element_size()
        weight_bytes = 4
        count_bytes = self.model.num_experts * 8
        everyone = np.ones(num_ranks)
        stats_bytes = 0 if stats_SE is None else stats_SE.numel() * 8
        return {
            "wait_policy": everyone * links.all_reduce_us(stats_bytes, num_ranks),
            "wait_metadata": everyone * links.all_gather_us(count_bytes, num_ranks),
            # Rows and their weights travel one after the other.
            "wait_dispatch": (links.all_to_all_us(pairs_RR * row_bytes) + links.all_to_all_us(pairs_RR * weight_bytes)),
            "wait_combine": links.all_to_all_us(pairs_RR.T * row_bytes),
        }


def _reference_error(
    virtual: VirtualRanks, case: CaseSpec, logits_TE: Tensor, hidden_TD: Tensor, reference: DenseReference
) -> float:
    """The worst token's error when all ranks of a case exchange real rows; T = tokens of all ranks."""
    model, num_ranks, seed = virtual.model, virtual.num_ranks, virtual.seed
    logits = list(logits_TE.split(-(-len(logits_TE) // num_ranks)))
    logits += [logits_TE[:0]] * (num_ranks - len(logits))
    hidden = hidden_TD.split([len(mine) for mine in logits])
    policy = case.policy or _NATIVE

    def context(rank: int) -> RoutingContext:
        draws = seeded_generator(logits_TE.device, seed, _DRAWS, rank)
        requests_T = torch.full((len(logits[rank]),), rank, device=logits_TE.device)
        return replace(virtual.layers.policy_router.context, rank=rank, generator=draws, request_id_T=requests_T)

    scores = [scores_from_logits(mine, model.score_function) for mine in logits]
    partial_stats = [policy.batch_stats(mine, context(rank)) for rank, mine in enumerate(scores)]
    stats_SE = None if partial_stats[0] is None else torch.stack(partial_stats).sum(0)  # pyright: ignore
    routings = [policy.route(mine, context(rank), stats_SE) for rank, mine in enumerate(scores)]
    virtual.exchange.counts_RE = torch.stack([routing.map_TE.sum(0) for routing in routings])
    virtual.exchange.stats_SE = stats_SE

    def prepare(rank: int) -> None:
        layers = virtual.layers
        router = layers.native_router if case.policy is None else layers.policy_router
        router.replay_TE = logits[rank]
        if case.policy is not None:
            layers.policy_router.policy, layers.policy_router.context = case.policy, context(rank)

    layer = virtual.layers.native if case.policy is None else virtual.layers.policy
    outputs = virtual.whole_layer(layer, [mine.unsqueeze(1) for mine in hidden], prepare)
    weights_TE = torch.cat([routing.weights_TE for routing in routings])
    return reference.worst_error(torch.cat(outputs)[:, 0], weights_TE)


def emulate(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> int:
    """Measure all comparisons of ``config`` on virtual ranks; return the exit status.

    Raises:
        ValueError: the config or the results directory cannot be used; one line.
    """
    on_cpu = not torch.cuda.is_available()
    comparisons = plan_emulation(config, overrides, on_cpu=on_cpu)
    ranks = join(_JOIN_TIMEOUT_S)
    try:
        directory = RunDirectory(out)
        run.check_directory(directory, ranks, force)
        if force:
            for comparison in comparisons:
                run.forget(directory, comparison)
        todo = [
            [case for case in comparison.cases if not directory.is_finished(case.case_id, 0)]
            for comparison in comparisons
        ]
        # Cases of a comparison are paired: one that is incomplete is measured whole again.
        todo = [comparison.cases if cases else [] for comparison, cases in zip(comparisons, todo, strict=True)]
        return _emulate_all(ranks, directory, comparisons, todo)
    finally:
        ranks.close()


def plan_emulation(config: Path, overrides: Sequence[str], *, on_cpu: bool) -> list[Emulated]:
    """All comparisons of a config file on virtual ranks.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    comparisons = []
    for experiment in load_experiments(config, overrides, on_cpu=on_cpu):
        try:
            comparison = Emulated.on(experiment, on_cpu=on_cpu)
            comparison.workload.batch(0)
            comparison.try_policies()
        except ValueError as problem:
            raise ValueError(f"{config}: {problem}") from None
        comparisons.append(comparison)
    return comparisons


def _emulate_all(
    ranks: Ranks, directory: RunDirectory, comparisons: Sequence[Emulated], todo: Sequence[Sequence[CaseSpec]]
) -> int:
    if not any(todo):
        print("moe-ep-bench: all cases were finished before; --force runs them again", file=sys.stderr)
        return OK
    run_id = stable_hash([time.time_ns()])
    description = run.run_description(ranks, run_id, comparisons)
    description["mode"] = "emulated"
    for comparison in comparisons:
        description["comparisons"][comparison.comparison_id]["links"] = comparison.links.describe()
    directory.write_run(description)
    settings = [comparison.experiment.measure for comparison in comparisons]
    runs = [
        (2 + one.warmup + one.iterations) * comparison.workload.num_batches * comparison.ep_size * len(cases)
        for one, comparison, cases in zip(settings, comparisons, todo, strict=True)
    ]
    with open_job(
        ranks,
        directory,
        run_id=run_id,
        launch=0,
        timeout_s=max(one.timeout_s for one in settings),
        num_iterations=sum(runs),
        marks=directory.attempts,
        mode="emulated",
    ) as job:
        for comparison, cases in zip(comparisons, todo, strict=True):
            if not cases:
                continue
            job.enter(comparison)
            job.progress.set_description(comparison.title)
            with device_scope(), torch.inference_mode():
                initialize_expert_parallel(1, comparison.experiment.measure.timeout_s + 60)
                emulation = Emulation(job, comparison, cases)
                emulation.check()
                emulation.write(emulation.measure())
    return run.status_of(directory, comparisons, 0)
