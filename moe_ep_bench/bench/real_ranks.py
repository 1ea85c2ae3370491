"""This rank among real ones: its layer or model, its tokens of every batch, and the steps that ranks take together.

What needs no other rank comes first: ceilings, building, and each case's routing of this rank's tokens. Ranks agree on
what is raised there: it costs a case, and no rank is left waiting in a collective. Then every case runs once on every
batch: shapes are seen, routing metrics taken, and each layer's output is held against the dense reference for the input
that it got. Where cases are replayed from CUDA graphs, all ranks capture a batch or none does.

Shapes: T = this rank's tokens, E = experts, D = hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.bench.inspection import LayerLook, Look, look, look_replayed, relative_error, worse
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.layer_runner import LayerRunner, random_pass, stack_builder
from moe_ep_bench.bench.measure import Case
from moe_ep_bench.bench.point import BALANCED, BASELINE, CaseSpec, Point
from moe_ep_bench.bench.result import Result, columns_of
from moe_ep_bench.bench.routing import Router, case_metrics
from moe_ep_bench.bench.tokens import Tokens
from moe_ep_bench.kernels import oracle_for
from moe_ep_bench.layer.components import DecodeExperts
from moe_ep_bench.layer.experts import DTYPES, HIDDEN, TOLERANCE, DenseReference, seeded_generator
from moe_ep_bench.layer.graphs import CapturedRun, Graph, unfit_environment
from moe_ep_bench.layer.host import free_memory
from moe_ep_bench.layer.megatron import ProcessGroupCollection
from moe_ep_bench.layer.passes import KeyValueCache
from moe_ep_bench.layer.phases import Rendezvous, replaced
from moe_ep_bench.layer.stack import layer_seed
from moe_ep_bench.machine.monitor import watched_machine
from moe_ep_bench.runtime.attempts import Loss, is_of_peers
from moe_ep_bench.timing.device import CacheFlush, RotatingInput, measure_ceilings
from moe_ep_bench.timing.protocol import (
    BREAKDOWN,
    UNCOUNTED,
    Step,
    all_steps,
    probe_floor_us,
    warm_breakdowns,
    warm_up,
)
from moe_ep_bench.timing.timer import PhaseRecorder, Stopwatch, clock_for

# Tokens of each rank and batch that are held against the dense reference.
NUM_CHECKED_TOKENS = 16


class RealRanks(LayerRunner):
    """A point's cases on this rank; collectives are torch.distributed's. Building it needs no other rank.

    Attributes:
        cases: those that are still in order.
        tokens: this rank's by batch and layer; ``inputs`` return the input of each batch.
        meet: where the ranks that talk to each other are waited for.
        captured: the cases' CUDA graphs, by case, batch and whether phases are timed; None where cases run eagerly.
    """

    def __init__(self, job: Job, point: Point, cases: Sequence[CaseSpec], groups: ProcessGroupCollection) -> None:
        self.job, self.point, self.device = job, point, job.ranks.device
        layer, self.settings = point.experiment.layer, point.experiment.measure
        self.seed, self.dtype, self.num_batches = layer.seed, DTYPES[layer.planned_dtype], point.workload.num_batches
        self.tolerance = TOLERANCE[point.layer_backend.arithmetic(layer.planned_dtype)]
        self.ceilings = measure_ceilings(self.device, self.dtype)
        free_memory(self.device)  # over 2 GiB on a GPU
        self.meet = Rendezvous(groups.ep, self.device)
        self.stack = stack_builder(point, self.device)(groups=groups)
        self._cache: KeyValueCache | None = None
        if point.context_length:
            most_requests = int(point.rank_tokens[:, job.ranks.rank].max())
            self._cache = KeyValueCache(most_requests, point.context_length)
        self.router = Router(point, self.device)
        self.cases = [Case(case, self) for case in cases]
        self.tokens = [self._make_tokens(batch) for batch in range(self.num_batches)]
        self.inputs = [self._new_input(batch) for batch in range(self.num_batches)]
        self.captured: dict[tuple[str, int, bool], CapturedRun] | None = None
        self._reference: DenseReference | None = None
        self._stats: dict[tuple[str, int | None], Tensor] = {}  # by case and layer: what oracles need on batch 0
        flush = CacheFlush(self.device) if self.settings.flush_l2 else None
        self.watch = Stopwatch(PhaseRecorder(clock_for(self.device)), self.meet, flush, self.settings.hold_us)
        self.conditions: dict[str, Any] = {}
        self.result = Result()
        self._compile_experts()

    def _make_tokens(self, batch: int) -> dict[int | None, Tokens]:
        """This rank's tokens of a batch in each layer."""
        made = {}
        for layer in self.point.workloads:
            self.job.guard.feed()
            made[layer] = self.router.tokens(layer, batch, self.job.ranks.rank)
        return made

    def _new_input(self, batch: int) -> Callable[[], Any]:
        """A function that returns the input of a batch on this rank: hidden states of a layer, or a model's pass."""
        ids_T = next(iter(self.tokens[batch].values())).context.request_id_T
        sequences, lengths = torch.unique_consecutive(ids_T, return_counts=True)
        device, size = self.device, self.point.model.hidden_size
        if self.point.scope == "model":
            run = random_pass(self.point, device, batch, self.job.ranks.rank, lengths.tolist(), self._cache)
            return lambda: run
        # Hidden states follow from the sequence, not from the number of ranks.
        hidden = [torch.empty(0, size, device=device)]
        for sequence, length in zip(sequences.tolist(), lengths.tolist(), strict=True):
            generator = seeded_generator(device, self.seed, HIDDEN, batch, sequence)
            hidden.append(torch.randn(length, size, generator=generator, device=device))
        # Cases follow each other on one batch; none is to find its input in the cache.
        return RotatingInput(torch.cat(hidden).to(self.dtype).unsqueeze(1), len(self.point.cases)).next

    def _compile_experts(self) -> None:
        """Compute a token by each local expert of the first MoE layer: experts' kernels compile."""
        experts, model = next(iter(self.stack.moe_layers.values())).experts, self.point.model
        num_local = model.num_experts // self.stack.ep_group.size()
        hidden_ND = torch.zeros(num_local, model.hidden_size, dtype=self.dtype, device=self.device)
        if isinstance(experts, DecodeExperts):
            map_NL = torch.eye(num_local, dtype=torch.bool, device=self.device)
            experts(hidden_ND, map_NL, map_NL.float())
        else:
            counts_L = torch.ones(num_local, dtype=torch.int64)
            experts(hidden_ND, counts_L, torch.ones(num_local, device=self.device))

    def close(self) -> None:
        """Drop the graphs: no NCCL communicator can end while one holds its collectives (pytorch#115388)."""
        self.captured = None

    # ---- runs --------------------------------------------------------------------------------------------------------

    def tokens_of(self, case: Case, batch: int, layer: int | None) -> Tokens:
        """This rank's tokens as a layer sees them."""
        return self.tokens[batch][layer].seen_by(case.spec)

    def prepare(self, case: Case, batch: int, rank: int = 0) -> Any:
        """See ``LayerRunner``; ``rank`` is always this one."""
        layers = {layer: self.tokens_of(case, batch, layer) for layer in self.point.workloads}
        self.router.enter(case.spec, self.stack, layers)
        return self.inputs[batch]()

    def meetings(self, recorder: PhaseRecorder | None) -> contextlib.AbstractContextManager[object]:
        return self.stack.instrumented(recorder, self.meet) if recorder else contextlib.nullcontext()

    @contextlib.contextmanager
    def ready(
        self, case: Case, batch: int, recorder: PhaseRecorder | None = None, rank: int = 0
    ) -> Iterator[Callable[[], object]]:
        """See ``LayerRunner``; a captured run is replayed."""
        if self.captured is not None:
            yield partial(self.captured[case.case_id, batch, recorder is not None].replay, recorder)
            return
        with super().ready(case, batch, recorder, rank) as run:
            yield run

    def time(self, case: Case, step: Step) -> dict[Any, float]:
        """Microseconds of one iteration, by phase where it is broken down."""
        return self.time_run(case, step, self.watch.recorder if step.kind == BREAKDOWN else None)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def try_alone(self) -> None:
        """Route every batch by every case: kernels compile. Statistics of a batch-wide policy are this rank's own."""
        if self._cache is not None:  # of a model that decodes
            assert self.stack.gpt is not None
            self._cache.fill_(self.stack.gpt, self.device, self.seed)
        for case in self.cases:
            self.job.guard.at(case.case_id)
            with self._without_others(case):
                for batch in range(self.num_batches):
                    self.job.guard.feed()
                    self._route_alone(case, batch)
        self.drop_failing("before timing")

    def _route_alone(self, case: Case, batch: int) -> None:
        self.prepare(case, batch)
        for layer, moe in self.stack.moe_layers.items():
            with contextlib.ExitStack() as alone:
                if hasattr(moe.router, "sum_over_ranks"):
                    alone.enter_context(replaced(moe.router, "sum_over_ranks", lambda stats_SE: stats_SE))
                moe.router.routing(self.tokens_of(case, batch, layer).logits_TE.unsqueeze(1))

    @contextlib.contextmanager
    def _without_others(self, case: Case) -> Iterator[None]:
        """Record what the block raises as the case's problem. Ranks do not meet in it, so they stay together."""
        try:
            yield
        except Exception as error:
            case.problem = case.problem or self.job.record_failure(error)

    def check(self) -> None:
        """Run every case on every batch once: shapes are seen, routing metrics taken, every layer's output checked."""
        for batch in range(self.num_batches):
            native: Tensor | None = None
            for case in self.cases:
                self.job.begin(case.case_id)
                if batch == 0:
                    self._share_stats(case)
                is_native = case.spec.role == BASELINE
                if is_native and batch == 0:  # Where it is lost, no case of this size can be had.
                    self.job.guard.at(self.point.comparison_id)
                seen = self._look(case, batch)
                native = seen.output if is_native else native
                with self._without_others(case):
                    self._note(case, batch, seen, native)
        self.drop_failing("before timing")

    def _share_stats(self, case: Case) -> None:
        """Sum a batch-wide policy's statistics of batch 0 over its EP group, apart from the layer's own all-reduce."""
        policy, ranks, ep_size = case.spec.policy, self.job.ranks, self.point.ep_size
        if policy is None or ep_size == 1:
            return
        for layer in self.point.workloads:
            stats_SE: Tensor | None = None
            with self._without_others(case):
                tokens, oracle = self.tokens_of(case, 0, layer), oracle_for(policy, self.device)
                stats_SE = oracle.batch_stats(tokens.scores_TE, self.router.context(case.spec, tokens))
            of_ranks = ranks.all_gather(None if stats_SE is None else stats_SE.cpu())
            of_group = [one for one in of_ranks[ranks.rank // ep_size * ep_size :][:ep_size] if one is not None]
            if of_group:
                self._stats[case.case_id, layer] = torch.stack(of_group).sum(dim=0)

    def _note(self, case: Case, batch: int, seen: Look, native: Tensor | None) -> None:
        """Record the metrics of a run, NaN and Inf, and on batch 0 the error beside the reference."""
        self._note_problem(case, batch, seen)
        last = list(self.point.workloads)[-1]
        for layer, of_layer in seen.layers.items():
            self.job.guard.feed()
            tokens = self.tokens_of(case, batch, layer)
            row, _ = case_metrics(of_layer.routing.map_TE, tokens, self.point.ranks_per_node)
            row["reference_error"] = self._reference_error(case, layer, of_layer) if batch == 0 else None
            row["output_error"] = None
            if layer == last and case.spec.role != BALANCED and native is not None:
                row["output_error"] = relative_error(seen.output, native, tokens.context.token_mask_T)
            case.rows[batch, layer] = row

    def _note_problem(self, case: Case, batch: int, seen: Look) -> None:
        """Record NaN and Inf. The reference covers a few tokens of one batch, this covers all tokens of all batches."""
        if seen.problem:
            case.problem = case.problem or Loss("failed", f"{seen.problem}, batch {batch}")

    def check_again(self, when: str = "after timing") -> None:
        """Hold every layer of every case against the reference once more, replayed where it is timed so."""
        for case in self.cases:
            self.job.begin(case.case_id)
            seen = self._look(case, 0)
            with self._without_others(case):
                self._note_problem(case, 0, seen)
            if self.captured is not None:
                seen = self._look_replayed(case, 0, seen)
            with self._without_others(case):
                for layer, of_layer in seen.layers.items():
                    self.job.guard.feed()
                    row = case.rows[0, layer]
                    row["reference_error"] = worse(self._reference_error(case, layer, of_layer), row["reference_error"])
        self.drop_failing(when)

    def _look(self, case: Case, batch: int) -> Look:
        return look(self, case, batch, self._checked_rows(batch))

    def _look_replayed(self, case: Case, batch: int, eager: Look) -> Look:
        """See ``inspection.look_replayed``; a replay that differs is the case's problem."""
        assert self.captured is not None
        run, rows_N = self.captured[case.case_id, batch, False], self._checked_rows(batch)
        seen, differs = look_replayed(run, eager, rows_N, self.tolerance)
        if differs:
            case.problem = case.problem or Loss("failed", f"replayed from a CUDA graph, on batch {batch} {differs}")
        return seen

    def _checked_rows(self, batch: int) -> Tensor:
        """Indices of this rank's tokens that are held against the dense reference: int64 [N]."""
        num_tokens = next(iter(self.tokens[batch].values())).num_tokens
        places_N = torch.linspace(0, max(num_tokens - 1, 0), min(NUM_CHECKED_TOKENS, num_tokens))
        return places_N.long().to(self.device)

    def _reference_error(self, case: Case, layer: int | None, seen: LayerLook) -> float:
        """Compare a layer's run on batch 0 with the dense reference, and a policy's map with the policy itself."""
        policy, tokens, router = case.spec.policy, self.tokens_of(case, 0, layer), self.router
        weights_NE = seen.routing.weights_TE[self._checked_rows(0)]
        error = self.reference(layer, seen.input_ND).worst_error(seen.output_ND, weights_NE)
        if policy is not None:
            # In a context of its own, whose random numbers are at their start.
            oracle, stats_SE = oracle_for(policy, self.device), self._stats.get((case.case_id, layer))
            stats_SE = None if stats_SE is None else stats_SE.to(self.device)
            expected = oracle.route(tokens.scores_TE, router.context(case.spec, tokens), stats_SE)
            if not torch.equal(expected.map_TE, seen.routing.map_TE):
                error = float("inf")
        case.error = worse(error, case.error)
        return error

    def reference(self, layer: int | None, input_ND: Tensor) -> DenseReference:
        """The dense reference of a layer for an input. A layer alone has one input in all cases, so one reference."""
        if layer is None and self._reference is not None:
            return self._reference
        reference = DenseReference(self.point.model, input_ND, layer_seed(self.seed, layer))
        if layer is None:
            self._reference = reference
        return reference

    def drop_failing(self, when: str) -> None:
        """Record cases that are wrong on any rank as not measured, and go on without them; ranks agree on it."""
        found_R = self.job.ranks.all_gather([(case.problem, case.error) for case in self.cases])
        for case, of_ranks in zip(list(self.cases), zip(*found_R, strict=True), strict=True):
            problem_R, error_R = zip(*of_ranks, strict=True)
            if any(problem_R):
                rank, loss = next((rank, problem) for rank, problem in enumerate(problem_R) if problem)
                self._drop(case, loss.status, f"{when}: rank {rank}: {loss.words}")
            elif not all(error <= self.tolerance for error in error_R):  # NaN too
                allowed = f"allowed is {self.tolerance:g}"
                what = f"output differs from the dense reference by {np.max(error_R):.2g}, {allowed}"
                self._drop(case, "failed", f"{when}: {what}")

    def _drop(self, case: Case, status: str, reason: str) -> None:
        captured = self.captured or {}
        for key in [key for key in captured if key[0] == case.case_id]:
            del captured[key]
        self.cases.remove(case)
        self.result.times.pop(case.case_id, None)
        self.result.unmeasured[case.case_id] = status, reason

    # ---- CUDA graphs -------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Keep every case's runs of all batches as CUDA graphs, where the config asks for that.

        A replay meets the other ranks. So they agree first that all have captured a batch, and were alike in the one
        before; where a rank cannot capture, that is the case's problem there.
        """
        if not self.point.layer_backend.cuda_graph:
            return
        self.captured, self._pool = {}, torch.cuda.graph_pool_handle()
        self.meet()  # Its communicator is set up at its first use, which no capture allows.
        for case in self.cases:
            self.job.begin(case.case_id)
            for batch in range(self.num_batches):
                self.job.guard.feed()
                eager = self._look(case, batch)
                self._capture(case, batch)
                if self.job.ranks.first_error(case.problem):
                    break
                self._look_replayed(case, batch, eager)
                if batch:  # The first is looked at again after timing.
                    self.captured[case.case_id, batch, False].forget()
        self.drop_failing("before timing")
        self.check_again("replayed from CUDA graphs")

    def _capture(self, case: Case, batch: int) -> None:
        """Capture a batch, once more with its phases where these are timed. Nothing is exchanged with other ranks."""
        assert self.captured is not None
        try:
            if self.meet.size > 1 and (unfit := unfit_environment()):
                raise RuntimeError(unfit)
            for by_phase in (False, True) if self.settings.breakdown_iterations else (False,):
                what = self.stack, self.prepare(case, batch), Graph(self._pool), clock_for(self.device), self.meet
                run = self.captured[case.case_id, batch, by_phase] = CapturedRun(*what, by_phase=by_phase)
                if by_phase:
                    run.forget()
        except Exception as error:
            if is_of_peers(error):
                raise
            self._pool = torch.cuda.graph_pool_handle()  # that of a capture which failed may stay in use
            words = (str(error).splitlines() or [type(error).__name__])[0]
            loss = Loss.of(error)._replace(words=f"cannot be captured as a CUDA graph: {words}")
            case.problem = case.problem or loss
            # NCCL may set something up between ranks while it captures. Should others wait there, this is why.
            self.job.guard.explain(loss)

    # ---- times -------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        clock = clock_for(self.device)
        if self.settings.breakdown_iterations:
            warm_breakdowns(self.cases, self.num_batches, clock, self.meet, self.job.begin)
        slowest = lambda times_B: np.max(self.job.ranks.all_gather(times_B), axis=0)  # noqa: E731
        result = warm_up(self.cases, self.num_batches, self.settings.warmup, clock, slowest, self.job.begin)
        self.conditions["warm_up"] = asdict(result)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what this rank's machine does in the block, and what a waiting probe costs behind it."""
        with watched_machine(self.device, self.ceilings) as here, self.watch.recorder.clock.watched():
            yield
        if self.meet.size > 1:
            here["probe_floor_us"] = probe_floor_us(self.meet, clock_for(self.device))
        self.conditions["ranks"] = self.job.ranks.gather(here)

    def schedule(self) -> Iterator[Sequence[Step]]:
        """All steps at once, in rounds over the batches."""
        steps = all_steps(self.num_batches, self.settings.iterations, self.settings.breakdown_iterations)
        counted = [step for step in steps if step.kind != UNCOUNTED]
        self.result.expect([case.case_id for case in self.cases], counted, columns_of(self.point))
        yield steps

    def keep(self, case: int, step: Step, times: Any) -> None:
        self.result.keep(self.cases[case].case_id, step, times)

    def finish(self) -> Result:
        """Gather all ranks' samples and metrics to rank 0, which writes them."""
        ranks, result = self.job.ranks, self.result
        self.job.guard.at(self.point.comparison_id)
        if not self.cases:
            return result
        if self.captured is None:
            self.conditions["unclocked"] = {case.case_id: case.unclocked for case in self.cases if case.unclocked}
        result.conditions = self.conditions
        for case in self.cases:
            self.job.guard.feed()
            of_ranks = ranks.gather((result.times.pop(case.case_id), list(case.rows.values())))
            if ranks.is_first:
                times_R, rows_R = zip(*of_ranks, strict=True)
                result.times[case.case_id] = np.concatenate(times_R)
                result.rows[case.case_id] = list(chain(*rows_R))
        return result
