"""Measure one comparison on this rank: layers, checks, timing, samples.

Shapes: T = this rank's tokens, E = experts, D = hidden size, N = tokens checked against the
dense reference, V = cases, S = steps.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench import environment
from moe_ep_bench.kernels.twins import oracle_for
from moe_ep_bench.layer.build import DTYPES, LayerPair, build_layers
from moe_ep_bench.layer.experts import DRAWS, HIDDEN, seeded_generator
from moe_ep_bench.layer.graphs import CapturedRun, Graph, make_graphs
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.megatron import MoELayer, initialize_expert_parallel, meeting_group
from moe_ep_bench.layer.phases import Rendezvous, instrumented
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.layer.router import ReplayRouter, logits_from_scores, scores_from_logits
from moe_ep_bench.machine import MachineSampler
from moe_ep_bench.measure.cache import CacheFlush, RotatingInput
from moe_ep_bench.measure.ceilings import measure_ceilings
from moe_ep_bench.measure.protocol import COLUMNS, Step, measure, plan, warm_up
from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.policies import Routing, RoutingContext
from moe_ep_bench.records import write_json
from moe_ep_bench.scopes.comparison import BASELINE, CEILING, CaseSpec, Comparison
from moe_ep_bench.scopes.job import Job
from moe_ep_bench.scopes.rows import case_columns, packed_metrics, routing_columns
from moe_ep_bench.timer import Clock, PhaseRecorder, clock_for
from moe_ep_bench.workload import TokenBatch, deal
from moe_ep_bench.workload.balanced import balanced_scores

NUM_CHECKED_TOKENS = 16


@dataclass(frozen=True)
class RankBatch:
    """This rank's share of a batch, on its device."""

    hidden: RotatingInput
    """Hidden states, [T, 1, D]."""
    logits_TE: Tensor
    balanced_logits_TE: Tensor
    request_id_T: Tensor
    """A sequence's tokens are one request's: a text at prefill, the tokens of one step at decode."""
    valid_T: Tensor | None
    """False = padding; None = all are valid."""


@dataclass(frozen=True, eq=False)
class LayerCase:
    """A case on its layer, able to run any batch.

    Attributes:
        meet: where the ranks that talk to each other are waited for.
        captured: runs as CUDA graphs by batch and whether their phases are timed; where there are any, they are what
            is run.
    """

    spec: CaseSpec
    layer: MoELayer
    batches: Sequence[RankBatch]
    context: RoutingContext
    seed: int
    global_rank: int
    meet: Rendezvous
    captured: dict[tuple[int, bool], CapturedRun] = field(default_factory=dict)

    @property
    def case_id(self) -> str:
        return self.spec.case_id

    @property
    def router(self) -> ReplayRouter:
        return self.layer.router

    def prepare(self, batch: int) -> Tensor:
        share = self.batches[batch]
        self.router.replay_TE = share.balanced_logits_TE if self.spec.role == CEILING else share.logits_TE
        if self.spec.policy is not None:
            self.layer.router.policy = self.spec.policy
            self.layer.router.context = self.spec.told(self.context_for(batch))
            if hasattr(self.layer.token_dispatcher, "most_experts"):
                num_experts = share.logits_TE.shape[1]
                self.layer.token_dispatcher.most_experts = self.spec.policy.most_experts(num_experts, self.context)
        return share.hidden.next()

    @contextlib.contextmanager
    def ready(self, batch: int, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], object]]:
        """See ``measure.protocol.Runnable``."""
        by_phase = recorder is not None
        if (batch, by_phase) in self.captured:
            yield partial(self.captured[batch, by_phase].replay, recorder)
            return
        hidden_T1D = self.prepare(batch)
        with instrumented(self.layer, recorder, self.meet) if by_phase else contextlib.nullcontext():
            yield lambda: self.layer(hidden_T1D)

    def capture(self, batch: int, new_graph: Callable[[], Graph], clock: Clock, *, by_phase: bool) -> None:
        """Keep the run of a batch as graphs; ``by_phase``: a second time, with its phases timed.

        Raises:
            RuntimeError: as ``CapturedRun``.
        """
        for timed in (False, True)[: 1 + by_phase]:
            run = CapturedRun(self.layer, self.prepare(batch), new_graph, clock, self.meet, by_phase=timed)
            self.captured[batch, timed] = run

    def context_for(self, batch: int) -> RoutingContext:
        """What is so of this rank's tokens of ``batch``; randomness starts anew with every call."""
        share = self.batches[batch]
        draws = seeded_generator(share.logits_TE.device, self.seed, DRAWS, batch, self.global_rank)
        return replace(self.context, generator=draws, request_id_T=share.request_id_T, token_mask_T=share.valid_T)

    def scores(self, batch: int) -> Tensor:
        """The scores that the router sees: float32 [T, E]."""
        self.prepare(batch)
        assert self.router.replay_TE is not None
        return scores_from_logits(self.router.replay_TE, self.router.score_function)


@dataclass(frozen=True)
class Observation:
    """One untimed run of a case on a batch."""

    output_TD: Tensor
    routing: Routing
    gated_TE: Tensor | None = None
    """The gate's own logits, which the workload's scores replace; None where a graph was replayed."""

    @property
    def problem(self) -> str:
        """What of it is no number; empty where all is well."""
        for what, values in (
            ("the gate's logits", self.gated_TE),
            ("routing weights", self.routing.weights_TE),
            ("output", self.output_TD),
        ):
            if values is not None and not bool(values.isfinite().all()):
                return f"NaN or Inf in {what}"
        return ""


def measure_comparison(job: Job, comparison: Comparison, cases: Sequence[CaseSpec], new_session: type[Session]) -> None:
    """Measure ``cases`` in a session of this kind and write their parts; every rank calls this alike."""
    job.enter(comparison)
    shortage = _memory_shortage(job, comparison)
    if shortage:
        if job.ranks.is_first:
            for case in cases:
                job.write_unmeasured(comparison, case, "skipped", shortage)
        job.check_written()
        return
    with device_scope(), torch.inference_mode():
        session = new_session(job, comparison, cases)
        session.observe_all()
        session.drop_failing("before timing")
        if session.cases and comparison.parts.cuda_graph:
            session.capture_all()
            session.check_again()
            session.drop_failing("replayed from CUDA graphs")
        if session.cases:  # All ranks agree on them.
            session.warm_up()
            samples_VSC = session.time()
            session.check_again()
            session.drop_failing("after timing")
            job.enter(comparison)
            session.write_conditions()
            session.write(samples_VSC)
    del session
    free_memory(job.ranks.device)


def _memory_shortage(job: Job, comparison: Comparison) -> str:
    """Why this comparison does not fit some rank's memory; empty if it fits all. Agreed by all ranks."""
    need = comparison.memory_bytes_per_rank()
    available = environment.available_memory_bytes(job.ranks.device, job.ranks.local_world_size)
    gib = 2**30
    short = ""
    if need > available:
        short = f"needs about {need / gib:.1f} GiB per rank, {available / gib:.1f} GiB are free"
        short += comparison.hint_for(available)
    found = [(rank, text) for rank, text in enumerate(job.ranks.texts(short)) if text]
    return f"rank {found[0][0]}: {found[0][1]}" if found else ""


class Session:
    """The state of one comparison's measurement on this rank.

    Attributes:
        columns: of a sample.
    """

    columns: Sequence[str] = COLUMNS

    def __init__(self, job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
        self.job = job
        self.comparison = comparison
        measure = comparison.experiment.measure
        self.device, self.seed = job.ranks.device, comparison.experiment.layer.seed
        self.dtype = DTYPES[comparison.experiment.layer.dtype]
        # The watchdog is to end a hang, because it knows who hangs; the collectives' own limit lies behind it.
        self.ep_group = initialize_expert_parallel(comparison.ep_size, measure.timeout_s + 60, comparison.num_slices)
        environment.forget_peak_memory(self.device)
        self.meet = Rendezvous(meeting_group(), self.device)
        self.build()
        self.cases = [self.new_case(case) for case in cases]
        self.timed: list[Any] = []
        self._new_graph: Callable[[], Graph] | None = None
        self.flush = CacheFlush(self.device) if measure.flush_l2 else None
        self.conditions: dict[str, Any] = {}
        self.routing_rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.errors: dict[str, float] = {}
        self.problems: dict[str, str] = {}

    def build(self) -> None:
        """Make what is run, and the batches that it is run on."""
        model = self.comparison.model
        self.layers = build_layers(model, self.dtype, self.device, self.ep_group, self.seed, self.comparison.parts)
        router = self.layers.policy_router
        router.context = replace(router.context, layer_fraction=self.comparison.layer_fraction)
        self.batches = [self._share(self.comparison.workload.batch(b), b, self.dtype) for b in range(self.num_batches)]
        hidden_TD = self.batches[0].hidden.copies[0][:, 0]
        self.checked_N = rows_to_check(len(hidden_TD))
        self.reference = DenseReference(model, hidden_TD[self.checked_N], self.seed)

    @property
    def num_batches(self) -> int:
        return self.comparison.workload.num_batches

    def _share(self, batch: TokenBatch, index: int, dtype: torch.dtype) -> RankBatch:
        """This rank's tokens of a batch. A token's hidden state does not depend on the number of ranks."""
        self.job.watchdog.feed()
        model, ranks = self.comparison.model, self.job.ranks
        tokens_T = deal(batch, ranks.world_size, self.comparison.experiment.workload.rank_shares)[ranks.rank]
        mine = batch.rows(tokens_T).with_padding(self.comparison.experiment.workload.padding_per_rank)
        scores_TE = mine.scores_TE.to(self.device)
        hidden = []
        for sequence, length in zip(*torch.unique_consecutive(mine.sequence_id_T, return_counts=True), strict=True):
            generator = seeded_generator(self.device, self.seed, HIDDEN, index, int(sequence))
            hidden.append(torch.randn(int(length), model.hidden_size, generator=generator, device=self.device))
        hidden_TD = torch.cat(hidden) if hidden else torch.empty(0, model.hidden_size, device=self.device)
        balanced_TE = balanced_scores(scores_TE, model.top_k)
        return RankBatch(
            # Cases follow each other on one batch; none is to find its input in the cache.
            hidden=RotatingInput(hidden_TD.to(dtype).unsqueeze(1), len(self.comparison.cases)),
            logits_TE=logits_from_scores(scores_TE, model.score_function),
            balanced_logits_TE=logits_from_scores(balanced_TE, model.score_function),
            request_id_T=mine.sequence_id_T.to(self.device),
            valid_T=None if mine.valid_T is None else mine.valid_T.to(self.device),
        )

    def new_case(self, case: CaseSpec) -> LayerCase:
        """A case that can run any batch."""
        layers: LayerPair = self.layers
        layer = layers.native if case.policy is None else layers.policy
        context, rank = layers.policy_router.context, self.job.ranks.rank
        return LayerCase(case, layer, self.batches, context, self.seed, rank, self.meet)

    def observe(self, case: LayerCase, batch: int) -> Observation:
        """Run a case once, untimed, and look at what its router chose."""
        if (batch, False) in case.captured:
            captured = case.captured[batch, False]
            captured.replay()
            output_T1D, (weights_TE, map_TE) = captured.output_T1D.clone(), captured.routing
            return Observation(output_T1D[:, 0], Routing(map_TE=map_TE.clone(), weights_TE=weights_TE.clone()))
        seen: list[tuple[Tensor, Tensor]] = []
        gated: list[Tensor] = []
        hidden_T1D = case.prepare(batch)
        hook = case.router.register_forward_hook(lambda module, inputs, output: seen.append(output))
        case.router.look = gated.append
        try:
            output_T1D, _ = case.layer(hidden_T1D)
        finally:
            hook.remove()
            case.router.look = None
        weights_TE, map_TE = seen[0]
        return Observation(output_T1D[:, 0], Routing(map_TE=map_TE, weights_TE=weights_TE), gated[0])

    def observe_all(self) -> None:
        """Run every case on every batch once: shapes are seen, routing metrics taken, outputs checked."""
        for batch in range(self.num_batches):
            native_TD: Tensor | None = None
            for case in self.cases:
                self.job.begin(case.case_id)
                observation = self.observe(case, batch)
                self._note_problem(case, observation, batch)
                if case.spec.role == BASELINE:
                    native_TD = observation.output_TD
                row = routing_metrics(
                    observation.routing,
                    case.scores(batch),
                    case.context_for(batch),
                    num_slices=self.comparison.num_slices,
                    **capacity_factor(case.spec),
                )
                row["reference_error"] = self.reference_error(case, observation) if batch == 0 else None
                row["output_error"] = (
                    None
                    if case.spec.role == CEILING or native_TD is None
                    else relative_error(observation.output_TD, native_TD, self.batches[batch].valid_T)
                )
                self.routing_rows[case.case_id].append(row)

    def _note_problem(self, case: LayerCase, observation: Observation, batch: int) -> None:
        """The reference is held against few tokens of one batch; what is no number is found wherever it is."""
        if observation.problem:
            self.problems.setdefault(case.case_id, f"{observation.problem}, batch {batch}")

    def reference_error(self, case: LayerCase, observation: Observation) -> float:
        """Compare a run on batch 0 with the dense reference; a policy's map also with the policy itself.

        Not so the map of a policy whose statistics are summed over other ranks.
        """
        error = self.reference.worst_error(
            observation.output_TD[self.checked_N], observation.routing.weights_TE[self.checked_N]
        )
        policy = case.spec.policy
        if policy is not None and (
            self.comparison.num_together == 1 or policy.batch_stats(case.scores(0), case.context_for(0)) is None
        ):
            oracle = oracle_for(policy, self.job.ranks.device.type)
            expected = policy.route(case.scores(0), case.spec.told(case.context_for(0)), kernel=oracle)
            if not torch.equal(expected.map_TE, observation.routing.map_TE):
                error = float("inf")
        self.errors[case.case_id] = max(error, self.errors.get(case.case_id, 0.0))
        return error

    def check_again(self) -> None:
        """Hold every case against the reference once more, after its layer was timed."""
        for case in self.cases:
            self.job.begin(case.case_id)
            observation = self.observe(case, 0)
            self._note_problem(case, observation, 0)
            error = self.reference_error(case, observation)
            self.routing_rows[case.case_id][0]["reference_error"] = max(
                error, self.routing_rows[case.case_id][0]["reference_error"]
            )

    def capture_all(self) -> None:
        """Keep every case's runs as CUDA graphs; those that cannot be kept are recorded as failed."""
        for case in list(self.cases):
            self.job.begin(case.case_id)
            problem = self._capture(case)
            found = [(rank, text) for rank, text in enumerate(self.job.ranks.texts(problem)) if text]
            self.job.mark.withdraw()
            if found:
                case.captured.clear()
                self.cases.remove(case)
                if self.job.ranks.is_first:
                    reason = f"rank {found[0][0]}: {found[0][1]}"
                    self.job.write_unmeasured(self.comparison, case.spec, "failed", reason)

    def _capture(self, case: Any) -> str:
        """Keep a case's runs of all batches, and say why they cannot be kept; empty where they are."""
        by_phase, clock = self.comparison.experiment.measure.breakdown_iterations > 0, clock_for(self.device)
        if self._new_graph is None:
            self._new_graph = make_graphs(self.device)
        problem = ""
        for batch in range(self.num_batches):
            self.job.watchdog.feed()
            eager = self.observed(case, batch)
            try:
                case.capture(batch, self._new_graph, clock, by_phase=by_phase)
            except (torch.OutOfMemoryError, torch.distributed.DistBackendError):
                raise
            except RuntimeError as error:
                self._new_graph = None  # A capture that failed may leave its memory in use.
                problem = f"cannot be captured as a CUDA graph: {str(error).splitlines()[0]}"
                # Where others wait in a collective that this rank has left, the job is lost, and this is why.
                self.job.mark.explain(f"failed: {problem}")
                return problem
            # Ranks go on together, whichever of them finds a difference.
            problem = problem or self._unlike(eager, self.observed(case, batch), batch)
        return problem

    def observed(self, case: Any, batch: int) -> tuple[Tensor, list[Tensor]]:
        """Run a case once, untimed, from its graph where it has one: its output, and the maps that it chose."""
        observation = self.observe(case, batch)
        return observation.output_TD, [observation.routing.map_TE]

    def _unlike(self, eager: tuple[Tensor, list[Tensor]], replayed: tuple[Tensor, list[Tensor]], batch: int) -> str:
        """In what a replayed run differs from the same one run eagerly; empty where it does not."""
        tolerance = TOLERANCE[DTYPES[self.comparison.experiment.layer.dtype]]
        if not all(torch.equal(one, other) for one, other in zip(eager[1], replayed[1], strict=True)):
            return f"replayed from a CUDA graph, it routes batch {batch} otherwise"
        gap, size = (float(x.float().norm()) for x in (replayed[0] - eager[0], eager[0]))
        if not gap <= tolerance * size:
            return f"replayed from a CUDA graph, its output on batch {batch} is off by {gap:.2g} of {size:.2g}"
        return ""

    def drop_failing(self, when: str) -> None:
        """Record cases whose output is wrong on any rank as failed, and go on without them."""
        tolerance = TOLERANCE[DTYPES[self.comparison.experiment.layer.dtype]]
        mine = torch.tensor([self.errors[case.case_id] for case in self.cases], dtype=torch.float64)
        worst_V = torch.stack(self.job.ranks.gather(mine, everywhere=True)).max(dim=0).values
        problems = [json.loads(text) for text in self.job.ranks.texts(json.dumps(self.problems))]
        for case, worst in zip(list(self.cases), worst_V.tolist(), strict=True):
            found = [f"rank {rank}: {of[case.case_id]}" for rank, of in enumerate(problems) if case.case_id in of]
            if not found and worst <= tolerance:
                continue
            self.cases.remove(case)
            if self.job.ranks.is_first:
                what = f"output differs from the dense reference by {worst:.2g}, allowed is {tolerance:g}"
                reason = f"{when}: {found[0] if found else what}"
                self.job.write_unmeasured(self.comparison, case.spec, "failed", reason)
        self.job.check_written()

    def warm_up(self) -> None:
        settings = self.comparison.experiment.measure
        rounds = settings.warmup, settings.max_warmup
        result = warm_up(self.cases, self.num_batches, rounds, clock_for(self.device), self._slowest, self.job.begin)
        self.job.progress.total += (result.rounds - settings.warmup) * self.num_batches * len(self.cases)
        self.conditions["warm_up"] = asdict(result)

    def _slowest(self, times_B: np.ndarray) -> np.ndarray:
        return torch.stack(self.job.ranks.gather(torch.from_numpy(times_B), everywhere=True)).amax(dim=0).numpy()

    def time(self) -> np.ndarray:
        self.timed = list(self.cases)  # Later checks may take cases away; samples stay in this order.
        ceilings = measure_ceilings(self.device, DTYPES[self.comparison.experiment.layer.dtype])
        with MachineSampler(self.device) as sampler:
            samples_VSC = measure(
                self.timed, self.steps, clock_for(self.device), self.meet, self.job.begin, self.flush, self.columns
            )
        mine = {
            "hostname": socket.gethostname(),
            "machine": sampler.stop().as_dict(),
            "ceilings": asdict(ceilings),
            "peak_memory_bytes": environment.peak_memory_bytes(self.device),
        }
        self.conditions["ranks"] = [json.loads(text) for text in self.job.ranks.texts(json.dumps(mine))]
        return samples_VSC

    def write_conditions(self) -> None:
        """Say under which conditions this launch was timed."""
        if self.job.ranks.is_first:
            path = self.job.directory.conditions_path(self.comparison.comparison_id, self.job.launch)
            with self.job.writing():
                write_json(path, {"run_id": self.job.run_id, **self.conditions})

    @property
    def steps(self) -> list[Step]:
        settings = self.comparison.experiment.measure
        return plan(self.num_batches, settings.iterations, settings.breakdown_iterations)

    def write(self, samples_VSC: np.ndarray) -> None:
        """Gather all ranks' samples and metrics on rank 0, which writes them case by case."""
        times = self.job.ranks.gather(torch.from_numpy(samples_VSC))
        keys, metrics_VBM = packed_metrics([self.routing_rows[case.case_id] for case in self.timed])
        metrics = self.job.ranks.gather(metrics_VBM)
        if self.job.ranks.is_first:
            with self.job.writing():
                self._write_parts(times, keys, metrics)
        self.job.check_written()

    def _write_parts(self, times: Sequence[Tensor], keys: dict[str, int], metrics: Sequence[Tensor]) -> None:
        for index, case in enumerate(self.timed):
            if case not in self.cases:
                continue
            self.job.watchdog.feed()
            routing = routing_columns(keys, [ranked[index] for ranked in metrics])
            self.write_case(case.spec, [ranked.numpy()[index] for ranked in times], routing)

    def write_case(self, case: CaseSpec, times_RSC: Sequence[np.ndarray], routing: dict[str, list[Any]]) -> None:
        """Write the parts of one case: all ranks' samples, and what they routed."""
        samples = case_columns(self.steps, times_RSC)
        directory, identify = self.job.directory, partial(self.job.identity, self.comparison, case)
        # Routing is the same in every launch. The part with the times is what makes a case finished: last.
        if not directory.is_routed(case.case_id):
            directory.write_routing(case.case_id, {**identify(len(routing["rank"])), **routing})
        directory.write_case(case.case_id, self.job.launch, {**identify(len(samples["rank"])), **samples})


def rows_to_check(num_tokens: int) -> Tensor:
    """Indices of a rank's tokens that are held against the dense reference: int64 [N]."""
    return torch.linspace(0, max(num_tokens - 1, 0), min(NUM_CHECKED_TOKENS, num_tokens)).long()


def capacity_factor(case: CaseSpec) -> dict[str, float]:
    """The policy's own, for ``routing_metrics``; empty where it has none."""
    factor = case.params.get("capacity_factor")
    return {"capacity_factor": factor} if isinstance(factor, float) else {}


def relative_error(output_TD: Tensor, native_TD: Tensor, valid_T: Tensor | None) -> float:
    """|output - native| / |native| over valid tokens; None = all are."""
    if valid_T is not None:
        output_TD, native_TD = output_TD[valid_T], native_TD[valid_T]
    size = float(native_TD.float().norm())
    return float((output_TD.float() - native_TD.float()).norm()) / size if size else 0.0
