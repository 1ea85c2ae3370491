"""Virtual ranks on the device that is here: their values beside the reference, and their times, one after another.

The very layer or model that real ranks run is timed; ``layer.virtual`` answers where its ranks would meet.

Shapes: R = virtual ranks, T = tokens of a rank, N = tokens of all ranks, D = hidden size.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.bench.emulated_ranks import EmulatedRanks
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.layer_runner import LayerRunner, random_pass, stack_builder
from moe_ep_bench.bench.measure import Case
from moe_ep_bench.bench.point import CaseSpec, Point
from moe_ep_bench.bench.routing import Router
from moe_ep_bench.bench.tokens import Tokens
from moe_ep_bench.bench.traffic import LayerTraffic, Traffic, route_layer
from moe_ep_bench.cost_model.timeline import RankTime, legs_of, median_legs, side_by_side
from moe_ep_bench.layer.experts import DTYPES, HIDDEN, TOLERANCE, DenseReference, seeded_generator
from moe_ep_bench.layer.host import free_memory
from moe_ep_bench.layer.passes import Pass
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.layer.virtual import Announced, VirtualStack
from moe_ep_bench.machine.monitor import watched_machine
from moe_ep_bench.runtime.attempts import Loss
from moe_ep_bench.schema import BESIDE_TOTAL
from moe_ep_bench.timing.device import CacheFlush, RotatingInput, measure_ceilings
from moe_ep_bench.timing.protocol import BREAKDOWN, UNCOUNTED, Step
from moe_ep_bench.timing.timer import PhaseRecorder, Stopwatch, clock_for, no_meeting

# Tokens of each rank that are held against the reference, and the hidden size there.
_CHECKED_TOKENS, _CHECKED_WIDTH = 6, 64


class VirtualRanks(EmulatedRanks, LayerRunner):
    """A point's cases on ranks that this device stands in for, one after another.

    Attributes:
        virtual: the layer or model, seen from one of them.
    """

    def __init__(self, job: Job, point: Point, cases: Sequence[CaseSpec]) -> None:
        super().__init__(point, cases, job.ranks.device, job.begin)
        self.job, device, most = job, self.device, point.most_tokens
        self.settings, layer = point.experiment.measure, point.experiment.layer
        self.ceilings = measure_ceilings(device, DTYPES[layer.planned_dtype])
        free_memory(device)  # over 2 GiB on a GPU
        self._runs: dict[str, list[tuple[int, RankTime]]] = defaultdict(list)  # of a batch, by case id
        self.small = SmallLayers(point, device)
        self.virtual = VirtualStack(stack_builder(point, device), point.ep_size)
        self.stack = self.virtual.stack
        self._tokens = lru_cache(maxsize=1)(self._make_tokens)  # All cases follow each other on the same ones.
        self._hidden = self._cache = None
        if point.scope == "layer":
            generator = seeded_generator(device, layer.seed, HIDDEN, most)
            hidden_TD = torch.randn(most, point.model.hidden_size, generator=generator, device=device)
            self._hidden = RotatingInput(hidden_TD.to(DTYPES[layer.planned_dtype]).unsqueeze(1), len(point.cases))
        elif point.context_length:
            self._cache = self.virtual.new_cache(most, point.context_length)
        flush = CacheFlush(device) if self.settings.flush_l2 else None
        self.watch = Stopwatch(PhaseRecorder(clock_for(device)), no_meeting, flush, self.settings.hold_us)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Hold every case against the dense reference, at a small hidden size and with rows that are truly exchanged.

        ``VirtualStack`` checks besides, in each case's first run, that routers send what was announced.
        """
        for case in list(self.cases):
            self.begin(case.case_id)
            try:
                problem = self._reference_problem(case)
            except Exception as error:
                problem = self.job.record_failure(error)
            if problem:
                self.cases.remove(case)
                self.result.unmeasured[case.case_id] = problem.status, problem.words

    def _reference_problem(self, case: Case) -> Loss | None:
        """Where a case's output differs from the reference; None if in no layer."""
        allowed = TOLERANCE[self.point.layer_backend.arithmetic("float32")]
        for layer in self.point.workloads:
            error = self.errors[case.case_id, layer] = self.small.error(case.spec, layer)
            if not error <= allowed:  # NaN too
                where = "" if layer is None else f" in layer {layer}"
                differs = f"output differs from the dense reference by {error:.2g}{where}"
                return Loss("failed", f"{differs}, allowed is {allowed:g}")
        return None

    # ---- times -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with watched_machine(self.device, self.ceilings) as here, self.watch.recorder.clock.watched():
            yield
        num_rounds = self.settings.fewest_rounds - self.settings.iterations
        self.result.conditions = {
            "unclocked": {case.case_id: case.unclocked for case in self.cases if case.unclocked},
            "warm_up": {"rounds": num_rounds, "change": None, "settled": False},
            "ranks": [here],
        }

    def steps(self, batch: int) -> list[Step]:
        """Rounds over all ranks, of which the last count."""
        settings = self.settings
        num_warm = settings.fewest_rounds - settings.iterations
        return [
            Step(batch, iteration, BREAKDOWN if iteration >= num_warm else UNCOUNTED, rank)
            for iteration in range(settings.fewest_rounds)
            for rank in range(self.num_ranks)
        ]

    def prepare(self, case: Case, batch: int, rank: int = 0) -> Tensor | Pass:
        """See ``LayerRunner``. What all ranks send is put on the device before the clock runs."""
        traffic = self.traffic[case.case_id]
        self.virtual.become(rank)
        layers = {layer: tokens.seen_by(case.spec) for layer, tokens in self._tokens(batch, rank).items()}
        self.router.enter(case.spec, self.stack, layers)
        self.virtual.announced = {
            layer: _announced(of_layer, self.device) for layer, of_layer in traffic.layers.items()
        }
        return self._input(traffic, rank)

    @contextlib.contextmanager
    def meetings(self, recorder: PhaseRecorder | None) -> Iterator[None]:
        timed = self.stack.instrumented(recorder, no_meeting) if recorder else contextlib.nullcontext()
        with self.virtual.connected(), timed:
            yield

    def time(self, case: Case, step: Step) -> RankTime:
        """One iteration, broken down; the first checks what routers send, and finds where the host waits unclocked."""
        recorder, is_first = self.watch.recorder, step.iteration == 0
        self.virtual.checks_counts = is_first
        with recorder.clock.unseen() if is_first else contextlib.nullcontext([]) as places:
            times = self.time_run(case, step, recorder)
        case.unclocked = sorted({*case.unclocked, *places})
        beside = {name: times[name] for name in BESIDE_TOTAL if name in times}
        return RankTime(*legs_of(recorder.segments_us()), beside)

    def keep(self, case: int, step: Step, times: RankTime) -> None:
        self._runs[self.cases[case].case_id].append((step.rank, times))

    def taken(self, case: Case) -> list[RankTime]:
        """Runs of each rank together, then ranks side by side."""
        runs = self._runs.pop(case.case_id)
        runs_R = [[times for of, times in runs if of == rank] for rank in range(self.num_ranks)]
        legs = side_by_side([median_legs([run.legs for run in runs]) for runs in runs_R])
        beside = {
            name: np.array([np.median([run.beside[name] for run in runs]) for runs in runs_R])
            for name in runs_R[0][0].beside
        }
        return [RankTime(legs, runs_R[0][0].meetings, beside)]

    def _make_tokens(self, batch: int, rank: int) -> dict[int | None, Tokens]:
        """A rank's tokens by layer."""
        return {layer: self.router.tokens(layer, batch, rank) for layer in self.point.workloads}

    def _input(self, traffic: Traffic, rank: int) -> Tensor | Pass:
        """A rank's input: hidden states [T, 1, D] of a layer, or a model's pass."""
        if self._hidden is not None:
            return self._hidden.next()[: traffic.layers[None].num_tokens_R[rank]]
        assert traffic.lengths_R is not None
        lengths = traffic.lengths_R[rank]
        return random_pass(self.point, self.device, traffic.batch, rank, lengths, self._cache)


def _announced(traffic: LayerTraffic, device: torch.device) -> Announced:
    """All ranks' counts and statistics of a layer, on the device, where collectives would leave them."""
    return Announced(torch.from_numpy(traffic.counts_RP).to(device), traffic.stats_SE)


class SmallLayers:
    """A point's layer at a small hidden size, in float32, with values that real ranks would compute."""

    def __init__(self, point: Point, device: torch.device) -> None:
        self._device, self._seed, self._num_ranks = device, point.experiment.layer.seed, point.ep_size
        self._router = Router(point, device, few=_CHECKED_TOKENS)
        self._model = point.model.scaled(min(1.0, _CHECKED_WIDTH / point.model.hidden_size))
        self._input = cache(self._make_input)
        layer_backend = replace(point.layer_backend, fp8=False)
        build = partial(Stack, self._model, torch.float32, device, seed=self._seed, layer_backend=layer_backend)
        self._virtual = VirtualStack(build, point.ep_size)

    def error(self, case: CaseSpec, layer: int | None) -> float:
        """The worst token's error when all ranks of a case exchange real rows, on few tokens of batch 0."""
        router, ranks = self._router, range(self._num_ranks)
        (traffic,) = route_layer(router, [case], layer, 0)
        tokens_R = [router.tokens(layer, 0, rank).seen_by(case) for rank in ranks]
        self._virtual.announced = {None: _announced(traffic, self._device)}
        hidden, reference = self._input(tuple(traffic.num_tokens_R))
        outputs = self._virtual.side_by_side(
            [of_rank.unsqueeze(1) for of_rank in hidden],
            lambda rank: router.enter(case, self._virtual.stack, {None: tokens_R[rank]}),
        )
        stats_MSE = None if traffic.stats_SE is None else traffic.stats_SE[None]
        weights_TE = torch.cat([router.route(case, tokens, stats_MSE).weights_TE for tokens in tokens_R])
        return reference.worst_error(torch.cat(outputs)[:, 0], weights_TE)

    def _make_input(self, sizes: tuple[int, ...]) -> tuple[list[Tensor], DenseReference]:
        """Every rank's hidden states, and the reference for all of them."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        hidden_ND = torch.randn(sum(sizes), self._model.hidden_size, generator=generator, device=self._device)
        return list(hidden_ND.split(sizes)), DenseReference(self._model, hidden_ND, self._seed)
