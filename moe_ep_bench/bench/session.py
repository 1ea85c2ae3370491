"""Measure one comparison on this rank: what is run, checks, timing, samples.

First comes what needs no other rank: ceilings, building, and each case's routing of this rank's tokens. What is raised
there ranks agree on: it becomes a row, and no rank is left waiting in a collective. Then every case runs once on every
batch, which checks it against the dense reference, takes its routing metrics and lets every shape be seen; then come
warm-up, timing, another check, and all ranks' samples are written.

Native and policy share all weights, and a case puts one of the two into the place of every MoE layer (``layer.build``).
Each layer's routing is replayed from its own scores, and each layer's output is held against the dense reference for
the input that it got. A layer that stands alone has the key None.

Shapes: T = this rank's tokens, E = experts, D = hidden size, N = tokens checked against the
dense reference, V = cases, S = steps.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep_bench.bench.building import builder, random_pass
from moe_ep_bench.bench.job import Job, ceilings_of, is_of_peers, reason_of, split_reason, watched_machine
from moe_ep_bench.bench.plan import BASELINE, CEILING, CaseSpec, Comparison
from moe_ep_bench.bench.rows import PackedMetrics, columns_of, write_case
from moe_ep_bench.bench.traffic import CarriedLoads, CaseRouter, Share, Shares, case_metrics
from moe_ep_bench.kernels.dispatch import oracle_for
from moe_ep_bench.layer.attention import kernels_of_attention
from moe_ep_bench.layer.backends import MappedExperts
from moe_ep_bench.layer.build import Transformer, layer_seed
from moe_ep_bench.layer.experts import DTYPES, HIDDEN, seeded_generator
from moe_ep_bench.layer.graphs import CapturedRun, Graphs, unfit_environment
from moe_ep_bench.layer.host import device_scope, free_memory
from moe_ep_bench.layer.megatron import initialize_expert_parallel, meeting_group
from moe_ep_bench.layer.passes import KeyValueCache
from moe_ep_bench.layer.phases import Rendezvous, replaced
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.layer.scores import logits_from_scores
from moe_ep_bench.machine import provenance
from moe_ep_bench.policies import Routing, RoutingContext
from moe_ep_bench.policies.megatron_drop import MegatronDrop
from moe_ep_bench.policies.waits import beyond, watched_waits
from moe_ep_bench.runtime.ranks import Ranks
from moe_ep_bench.timing.memory import Allocations, CacheFlush, RotatingInput
from moe_ep_bench.timing.protocol import measure, plan, probe_floor_us, warm_breakdowns, warm_up
from moe_ep_bench.timing.timer import PhaseRecorder, clock_for
from moe_ep_bench.workload import TokenBatch
from moe_ep_bench.workload.batch import balanced_scores

NUM_CHECKED_TOKENS = 16


# ---- One case --------------------------------------------------------------------------------------------------------


class RankBatch(NamedTuple):
    """This rank's share of a batch, on its device."""

    next_input: Callable[[], Any]
    """Returns what the layer or model is run on."""
    logits: dict[int | None, tuple[Tensor, Tensor]]
    """By layer what its router is to see, [T, E]: the workload's logits, and the same balanced."""
    contexts: dict[int | None, RoutingContext]
    """By layer what is so of its tokens, but for randomness."""


@dataclass(frozen=True, eq=False)
class Case:
    """A case that can run any batch; see ``timing.protocol.Runnable``.

    Attributes:
        captured: one CUDA graph by batch and whether its phases are timed; where there are any, they are what is run.
    """

    router: CaseRouter
    session: Session
    captured: dict[tuple[int, bool], CapturedRun] = field(default_factory=dict)

    @property
    def spec(self) -> CaseSpec:
        return self.router.case

    @property
    def case_id(self) -> str:
        return self.spec.case_id

    def share(self, batch: int, layer: int | None) -> Share:
        """What a layer sees of this rank's tokens."""
        held, session = self.session.batches[batch], self.session
        logits_TE = held.logits[layer][self.spec.role == CEILING]
        function = session.comparison.model.score_function
        return Share.of_logits(layer, session.job.ranks.rank, held.contexts[layer], logits_TE, function)

    def enter(self, batch: int) -> None:
        """Put this case's MoE layers and the batch's routing in place."""
        shares = {layer: self.share(batch, layer) for layer in self.session.layers}
        self.router.enter(self.session.subject, shares, batch)

    def prepare(self, batch: int) -> Any:
        """``enter``, and return the batch's input."""
        self.enter(batch)
        return self.session.batches[batch].next_input()

    def route_alone(self, batch: int) -> None:
        """Route this rank's tokens of a batch in every layer, as a run would, without the other ranks."""
        session = self.session
        self.enter(batch)
        for layer, moe in session.subject.moe_layers.items():
            logits_TE = session.batches[batch].logits[layer][self.spec.role == CEILING]
            with contextlib.ExitStack() as stack:
                if hasattr(moe.router, "sum_over_ranks"):
                    stack.enter_context(replaced(moe.router, "sum_over_ranks", lambda stats_SE: stats_SE))
                moe.router.routing(logits_TE.unsqueeze(1))

    @contextlib.contextmanager
    def ready(self, batch: int, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], object]]:
        by_phase = recorder is not None
        if (batch, by_phase) in self.captured:
            yield partial(self.captured[batch, by_phase].replay, recorder)
            return
        inputs, subject = self.prepare(batch), self.session.subject
        with subject.instrumented(recorder, self.session.meet) if by_phase else contextlib.nullcontext():
            yield partial(subject.run, inputs)

    def capture(self, batch: int, graphs: Graphs, *, by_phase: bool) -> None:
        """Keep the run of a batch as a graph; ``by_phase``: a second time, with its phases timed.

        Raises:
            RuntimeError: as ``CapturedRun``.
        """
        session = self.session
        for timed in (False, True)[: 1 + by_phase]:
            what = session.subject, self.prepare(batch), graphs.new(), clock_for(session.device), session.meet
            run = self.captured[batch, timed] = CapturedRun(*what, by_phase=timed)
            if timed:
                run.forget()


class LayerLook(NamedTuple):
    """What was seen of one MoE layer in an untimed run."""

    routing: Routing
    gated_TE: Tensor
    """The gate's own logits, which the workload's scores replace."""
    input_ND: Tensor
    output_ND: Tensor


class Observation(NamedTuple):
    """One untimed run of a case on a batch."""

    output: Tensor
    layers: dict[int | None, LayerLook]
    waits: Mapping[str, int] = MappingProxyType({})
    """Where the host waited for a GPU (``policies.waits``)."""

    @property
    def problem(self) -> str:
        """What of it is no number; empty where all is well."""
        for layer, seen in self.layers.items():
            where = "" if layer is None else f", layer {layer}"
            parts = {"the gate's logits": seen.gated_TE, "routing weights": seen.routing.weights_TE}
            for what, values in {**parts, "output": seen.output_ND}.items():
                if not bool(values.isfinite().all()):
                    return f"NaN or Inf in {what}{where}"
        whole = "output" if None in self.layers else "the logits"
        return "" if bool(self.output.isfinite().all()) else f"NaN or Inf in {whole}"


def look(case: Case, batch: int) -> Observation:
    """Run a case once, untimed, and look at what its MoE layers were given, chose and returned."""
    inputs, session = case.prepare(batch), case.session
    rows_N = session.rows_to_check(batch)
    seen: dict[int | None, dict[str, Any]] = defaultdict(dict)

    def note_routing(layer: int | None, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        seen[layer]["routing"] = Routing(map_TE=output[1], weights_TE=output[0])

    def note_ends(layer: int | None, module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        ends = {"input_ND": inputs[0], "output_ND": output[0]}
        seen[layer].update({name: hidden.flatten(0, 1)[rows_N].clone() for name, hidden in ends.items()})

    with contextlib.ExitStack() as hooks:
        for layer, moe in session.subject.moe_layers.items():
            hooks.callback(moe.router.register_forward_hook(partial(note_routing, layer)).remove)
            hooks.callback(moe.register_forward_hook(partial(note_ends, layer)).remove)
            moe.router.look = partial(seen[layer].__setitem__, "gated_TE")
            hooks.callback(setattr, moe.router, "look", None)
        waits = hooks.enter_context(watched_waits(session.device)) if session.device.type == "cuda" else {}
        output = session.subject.run(inputs)
    return Observation(output, {layer: LayerLook(**parts) for layer, parts in seen.items()}, waits)


def replay(case: Case, batch: int) -> tuple[Tensor, dict[int | None, Routing]]:
    """Run a case once from its graph: its output, and what its layers chose."""
    captured = case.captured[batch, False]
    captured.replay()
    assert captured.output is not None
    chosen = captured.routing.items()
    routed = {layer: Routing(map_TE=map_TE.clone(), weights_TE=weights.clone()) for layer, (weights, map_TE) in chosen}
    return captured.output.clone(), routed


# ---- The measurement -----------------------------------------------------------------------------------------------


def measure_comparison(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
    """Measure ``cases`` and write their parts; every rank calls this alike."""
    job.enter(comparison)
    available = provenance.available_memory_bytes(job.ranks.device, job.ranks.local_world_size)
    shortage = _first_word(job.ranks, comparison.shortage(available))
    if shortage:
        for case in cases:
            job.write_unmeasured(comparison, case, "skipped", shortage)
        job.check_written()
        return
    with device_scope(), torch.inference_mode(), contextlib.ExitStack() as held:
        session = _built(job, comparison, cases)
        if session is None:
            return
        held.callback(session.close)
        session.try_all()
        session.drop_failing("before timing")
        if session.cases:
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
            session.write(samples_VSC)
    del session
    free_memory(job.ranks.device)


def _built(job: Job, comparison: Comparison, cases: Sequence[CaseSpec]) -> Session | None:
    """Build what runs; None where a rank cannot, which is then the reason of every case's row."""
    session, reason = None, ""
    ep_group = form_groups(comparison)
    try:
        session = Session(job, comparison, cases, ep_group)
    except Exception as error:
        reason = job.survive(error)
        # Should others wait in a collective of Megatron-Core's after all, the job is lost, and this is why.
        job.mark.explain(reason)
    if first := _first_word(job.ranks, reason):
        rank, _, said = first.partition(": ")
        status, words = split_reason(said)
        for case in cases:
            job.write_unmeasured(comparison, case, status, f"while building: {rank}: {words}")
        session = None
        free_memory(job.ranks.device)
    job.mark.withdraw()
    job.check_written()
    if session is not None:
        session.fill_cache()
    return session


def form_groups(comparison: Comparison) -> dist.ProcessGroup:
    """This rank's expert-parallel group; every rank calls this alike."""
    measure = comparison.experiment.measure
    # The watchdog is to end a hang, because it knows who hangs; the collectives' own limit lies behind it.
    return initialize_expert_parallel(comparison.ep_size, measure.timeout_s + 60, comparison.subject.num_slices)


def _first_word(ranks: Ranks, text: str) -> str:
    """What the first rank that has something to say says; empty where none has. Every rank calls this."""
    return next((f"rank {rank}: {said}" for rank, said in enumerate(ranks.texts(text)) if said), "")


class Session:
    """The state of one comparison's measurement on this rank. Building it needs no other rank.

    Attributes:
        layers: each MoE layer as a subject of its own.
        subject: the layer or model that runs.
        columns: of a sample.
        meet: where the ranks that talk to each other are waited for.
        graphs: of all cases; None where they run eagerly.
    """

    def __init__(
        self, job: Job, comparison: Comparison, cases: Sequence[CaseSpec], ep_group: dist.ProcessGroup
    ) -> None:
        self.job, self.comparison, self.device = job, comparison, job.ranks.device
        planned, settings = comparison.subject, comparison.experiment.layer
        measure = self.settings = comparison.experiment.measure
        self.ceilings = ceilings_of(self.device, DTYPES[settings.dtype])
        provenance.forget_peak_memory(self.device)
        self.seed, self.dtype = settings.seed, DTYPES[settings.dtype]
        self.meet = Rendezvous(meeting_group(), self.device)
        self.layers, self.columns = planned.layers(), columns_of(planned)
        self.num_batches = comparison.workload.num_batches
        self.subject = builder(comparison, self.device)(ep_group=ep_group)
        self._cache: KeyValueCache | None = None
        if isinstance(self.subject, Transformer) and planned.context_length:
            most_requests = int(planned.rank_tokens[:, job.ranks.rank].max())
            self._cache = KeyValueCache(most_requests, planned.context_length)
        self.batches = [self._batch(number) for number in range(self.num_batches)]
        carried = CarriedLoads(self._shares, comparison.slots, self.seed)
        self.cases = [Case(CaseRouter(case, comparison.slots, self.seed, carried), self) for case in cases]
        self.timed: list[Case] = []
        self.flush = CacheFlush(self.device) if measure.flush_l2 else None
        self.steps = plan(self.num_batches, measure.iterations, measure.breakdown_iterations)
        self.conditions: dict[str, Any] = {}
        self.routing_rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.errors: dict[str, float] = {}
        self.problems: dict[str, str] = {}
        self.waits: dict[str, Counter[str]] = {}
        self.graphs: Graphs | None = None
        self._alone: DenseReference | None = None
        self._compute_alone()

    def fill_cache(self) -> None:
        """Fill the KV cache of a model that decodes, for which its ranks meet."""
        if self._cache is not None:
            assert isinstance(self.subject, Transformer)
            self._cache.fill_(self.subject.gpt, self.device, self.seed)

    def close(self) -> None:
        """Drop the graphs: no NCCL communicator can end while one holds its collectives (pytorch/pytorch#115388)."""
        for case in self.cases:
            case.captured.clear()

    def _batch(self, number: int) -> RankBatch:
        model, config, ranks = self.comparison.model, self.comparison.experiment.workload, self.job.ranks
        logits: dict[int | None, tuple[Tensor, Tensor]] = {}
        mine: TokenBatch | None = None
        for layer, subject in self.layers.items():
            self.job.watchdog.feed()
            tokens = subject.workload.rank_batch(number, ranks.rank, ranks.world_size, config.rank_shares)
            tokens = tokens.with_padding(config.padding_per_rank)
            assert mine is None or torch.equal(tokens.sequence_id_T, mine.sequence_id_T), "layers see other tokens"
            mine, scores_TE = tokens, tokens.scores_TE.to(self.device)
            balanced_TE = balanced_scores(scores_TE, model.top_k)
            own, even = (logits_from_scores(one, model.score_function) for one in (scores_TE, balanced_TE))
            logits[layer] = own, even
        assert mine is not None
        valid_T = None if mine.valid_T is None else mine.valid_T.to(self.device)
        tokens = self.subject.ep_group.rank(), mine.sequence_id_T.to(self.device), valid_T
        contexts = {layer: subject.context(*tokens) for layer, subject in self.layers.items()}
        return RankBatch(self._new_input(number, mine), logits, contexts)

    def _shares(self, case: CaseSpec, layer: int | None, number: int) -> Iterator[Share]:
        """Every rank's tokens of a batch in a layer."""
        of, config = self.layers[layer], self.comparison.experiment.workload
        rank_batches = of.workload.rank_batches(number, self.job.ranks.world_size, config.rank_shares)
        for rank, tokens in enumerate(rank_batches):
            tokens = tokens.with_padding(config.padding_per_rank)
            yield replace(Shares(of, tokens, rank % of.ep_size, self.device).of(case), rank=rank)

    def _new_input(self, number: int, mine: TokenBatch) -> Callable[[], Any]:
        """What hands out the input for this rank's tokens of a batch: hidden states of a layer, a model's pass."""
        sequences, lengths = torch.unique_consecutive(mine.sequence_id_T, return_counts=True)
        device, size = self.device, self.comparison.model.hidden_size
        if self.comparison.subject.name == "model":
            run = random_pass(self.comparison, device, number, self.job.ranks.rank, lengths.tolist(), self._cache)
            return lambda: run
        # Hidden states follow from the sequence, not from the number of ranks.
        hidden = [torch.empty(0, size, device=device)]
        for sequence, length in zip(sequences.tolist(), lengths.tolist(), strict=True):
            generator = seeded_generator(device, self.seed, HIDDEN, number, sequence)
            hidden.append(torch.randn(length, size, generator=generator, device=device))
        # Cases follow each other on one batch; none is to find its input in the cache.
        return RotatingInput(torch.cat(hidden).to(self.dtype).unsqueeze(1), len(self.comparison.cases)).next

    def rows_to_check(self, batch: int) -> Tensor:
        """Indices of this rank's tokens that are held against the dense reference: int64 [N]."""
        num_tokens = len(next(iter(self.batches[batch].contexts.values())).request_id_T)
        places_N = torch.linspace(0, max(num_tokens - 1, 0), min(NUM_CHECKED_TOKENS, num_tokens))
        return places_N.long().to(self.device)

    # ---- checks ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _without_others(self, case: Case) -> Iterator[None]:
        """Let what is raised in the block, in which ranks do not meet, be the case's problem: ranks stay together."""
        try:
            yield
        except Exception as error:
            self.problems.setdefault(case.case_id, self.job.survive(error))

    def try_all(self) -> None:
        """Route every batch by every case: kernels compile, and what raises does so while no rank waits for another.

        The statistics of a policy that looks at the whole batch are this rank's own.
        """
        for case in self.cases:
            self.job.mark.set(case.case_id)
            with self._without_others(case):
                for batch in range(self.num_batches):
                    self.job.watchdog.feed()
                    case.route_alone(batch)

    def _compute_alone(self) -> None:
        """Compute a token by each local expert of the first MoE layer: experts' kernels compile."""
        experts = next(iter(self.subject.moe_layers.values())).experts
        num_local = self.comparison.model.num_experts // self.subject.ep_group.size()
        counts_L = torch.ones(num_local, dtype=torch.int64)
        hidden_ND = torch.zeros(num_local, self.comparison.model.hidden_size, dtype=self.dtype, device=self.device)
        weights_N = torch.ones(num_local, device=self.device)
        if isinstance(experts, MappedExperts):
            map_NL = torch.eye(num_local, dtype=torch.bool, device=self.device)
            experts(hidden_ND, map_NL, map_NL.float())
        else:
            experts(hidden_ND, counts_L, weights_N)

    def observe_all(self) -> None:
        """Run every case on every batch once: shapes are seen, routing metrics taken, every layer's output checked."""
        last = self.comparison.subject.moe_layers[-1]
        for batch in range(self.num_batches):
            native: Tensor | None = None
            for case in self.cases:
                self.job.begin(case.case_id)
                seen = look(case, batch)
                if case.spec.role == BASELINE:
                    native = seen.output
                with self._without_others(case):
                    self._note_problem(case, seen, batch)
                    for layer, of_layer in seen.layers.items():
                        self.job.watchdog.feed()
                        share = case.share(batch, layer)
                        row = case_metrics(case.spec, of_layer.routing, share, self.comparison.subject.num_slices)
                        row["reference_error"] = self._reference_error(case, layer, of_layer) if batch == 0 else None
                        compared = layer == last and case.spec.role != CEILING and native is not None
                        valid_T = share.context.token_mask_T
                        row["output_error"] = relative_error(seen.output, native, valid_T) if compared else None
                        self.routing_rows[case.case_id].append(row)
        if self.comparison.subject.name == "model":  # One pass more shows which kernels torch takes for attention.
            self.job.watchdog.feed()
            kernels = kernels_of_attention(partial(self.subject.run, self.cases[0].prepare(0)))
            of_ranks = [json.loads(text) for text in self.job.ranks.texts(json.dumps(kernels))]
            self.conditions["attention"] = sorted({name for names in of_ranks for name in names})

    def _note_problem(self, case: Case, seen: Observation, batch: int) -> None:
        """Note what is no number. The reference is held against few tokens of one batch; this is found in all."""
        self.waits[case.case_id] = Counter(seen.waits)  # The last look is a run in which nothing was compiled.
        if seen.problem:
            self.problems.setdefault(case.case_id, f"{seen.problem}, batch {batch}")

    def _reference_error(self, case: Case, layer: int | None, seen: LayerLook) -> float:
        """Compare a layer's run on batch 0 with the dense reference; a policy's map also with the policy itself.

        Not so the map of a policy whose statistics are summed over other ranks. Where Megatron-Core drops, which of
        equals it keeps is open: then the loads must be the policy's.
        """
        weights_NE = seen.routing.weights_TE[self.rows_to_check(0)]
        error = self._reference(layer, seen.input_ND).worst_error(seen.output_ND, weights_NE)
        policy, share = case.spec.policy, case.share(0, layer)
        if policy is not None and (
            self.comparison.subject.num_together == 1
            or policy.batch_stats(share.scores_TE, case.router.context(share, 0)) is None
        ):
            expected = oracle_for(policy, self.device).route(share.scores_TE, case.router.context(share, 0))
            maps = expected.map_TE, seen.routing.map_TE
            if isinstance(policy, MegatronDrop):
                maps = maps[0].sum(dim=0), maps[1].sum(dim=0)
            if not torch.equal(*maps):
                error = float("inf")
        self.errors[case.case_id] = max(error, self.errors.get(case.case_id, 0.0))
        return error

    def _reference(self, layer: int | None, input_ND: Tensor) -> DenseReference:
        if layer is None and self._alone is not None:  # All cases give a layer alone the same input.
            return self._alone
        reference = DenseReference(self.comparison.model, input_ND, layer_seed(self.seed, layer))
        if layer is None:
            self._alone = reference
        return reference

    def check_again(self) -> None:
        """Hold every layer of every case against the reference once more, after it was timed."""
        for case in self.cases:
            self.job.begin(case.case_id)
            seen = look(case, 0)
            with self._without_others(case):
                self._note_problem(case, seen, 0)
            if case.captured:
                seen = self._replayed(case, seen)
            rows = self.routing_rows[case.case_id]
            with self._without_others(case):
                for row, (layer, of_layer) in zip(rows, seen.layers.items(), strict=False):
                    self.job.watchdog.feed()
                    row["reference_error"] = max(self._reference_error(case, layer, of_layer), row["reference_error"])

    def drop_failing(self, when: str) -> None:
        """Record cases whose output is wrong on any rank as failed, and go on without them."""
        tolerance, ranks = TOLERANCE[self.dtype], self.job.ranks
        mine = torch.tensor([self.errors.get(case.case_id, 0.0) for case in self.cases], dtype=torch.float64)
        worst_V = torch.stack(ranks.gather(mine, everywhere=True)).amax(dim=0)
        problems = [json.loads(text) for text in ranks.texts(json.dumps(self.problems))]
        for case, worst in zip(list(self.cases), worst_V.tolist(), strict=True):
            of_ranks = [(rank, of[case.case_id]) for rank, of in enumerate(problems) if case.case_id in of]
            if of_ranks:
                rank, reason = of_ranks[0]
                status, words = split_reason(reason)
                self._fail(case, f"{when}: rank {rank}: {words}", status)
            elif not worst <= tolerance:
                what = f"output differs from the dense reference by {worst:.2g}, allowed is {tolerance:g}"
                self._fail(case, f"{when}: {what}")
        self.job.check_written()

    def _fail(self, case: Case, reason: str, status: str = "failed") -> None:
        case.captured.clear()
        self.cases.remove(case)
        self.job.write_unmeasured(self.comparison, case.spec, status, reason)

    # ---- CUDA graphs -------------------------------------------------------------------------------------------------

    def capture_all(self) -> None:
        """Keep every case's runs as CUDA graphs; those that cannot be kept are recorded as failed, on all ranks."""
        self.meet()  # Its communicator is set up at its first use, which no capture allows.
        self.graphs = Graphs(self.device)
        for case in list(self.cases):
            self.job.begin(case.case_id)
            said = self._capture(case, self.graphs)
            self.job.mark.withdraw()
            if said:
                rank, status, reason = said.split(": ", 2)
                self._fail(case, f"{rank}: {reason}", status)

    def _capture(self, case: Case, graphs: Graphs) -> str:
        """Keep a case's runs of all batches. Every rank learns alike why they cannot be kept: rank, status and reason.

        Empty where they are kept. A replay meets the other ranks, so they agree first that all have captured.
        """
        unlike = ""
        for batch in range(self.num_batches):
            self.job.watchdog.feed()
            eager = look(case, batch)
            said = _first_word(self.job.ranks, self._keep(case, batch, graphs))
            if said:
                return said
            output, routed = replay(case, batch)
            unlike = unlike or self._unlike(eager, output, routed, batch)
            if batch:  # The first is looked at again after timing.
                case.captured[batch, False].forget()
        return _first_word(self.job.ranks, unlike and f"failed: {unlike}")

    def _keep(self, case: Case, batch: int, graphs: Graphs) -> str:
        """Capture a batch; status and reason where this rank cannot. Nothing is exchanged with other ranks."""
        try:
            if self.meet.size > 1 and (unfit := unfit_environment()):
                raise RuntimeError(unfit)
            case.capture(batch, graphs, by_phase=self.settings.breakdown_iterations > 0)
        except Exception as error:
            if is_of_peers(error):
                raise
            graphs.abandon_pool()
            status = reason_of(error).partition(": ")[0]
            what = (str(error).splitlines() or [type(error).__name__])[0]
            said = f"{status}: cannot be captured as a CUDA graph: {what}"
            # NCCL may set something up between ranks while it captures. Should others wait there, this is why.
            self.job.mark.explain(said)
            return said
        return ""

    def _replayed(self, case: Case, eager: Observation) -> Observation:
        """Hold a replay of batch 0 against an eager run, and take from it what can be seen."""
        output, routed = replay(case, 0)
        problem = self._unlike(eager, output, routed, 0)
        if problem:
            self.problems.setdefault(case.case_id, problem)
        if None not in routed:
            return eager
        output_ND = output.flatten(0, 1)[self.rows_to_check(0)]
        return Observation(output, {None: eager.layers[None]._replace(routing=routed[None], output_ND=output_ND)})

    def _unlike(self, eager: Observation, output: Tensor, routed: dict[int | None, Routing], batch: int) -> str:
        """In what a replayed run differs from the same one run eagerly; empty where it does not."""
        if not all(torch.equal(seen.routing.map_TE, routed[layer].map_TE) for layer, seen in eager.layers.items()):
            return f"replayed from a CUDA graph, it routes batch {batch} otherwise"
        gap, size = (float(x.float().norm()) for x in (output - eager.output, eager.output))
        if not gap <= TOLERANCE[self.dtype] * size:
            return f"replayed from a CUDA graph, its output on batch {batch} is off by {gap:.2g} of {size:.2g}"
        return ""

    # ---- timing ------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        rounds, clock = (self.settings.warmup, self.settings.max_warmup), clock_for(self.device)
        if self.settings.breakdown_iterations:
            warm_breakdowns(self.cases, self.num_batches, clock, self.meet, self.job.begin)
        result = warm_up(self.cases, self.num_batches, rounds, clock, self._slowest, self.job.begin)
        self.job.progress.total += (result.rounds - rounds[0]) * self.num_batches * len(self.cases)
        self.conditions["warm_up"] = asdict(result)

    def _slowest(self, times_B: np.ndarray) -> np.ndarray:
        return torch.stack(self.job.ranks.gather(torch.from_numpy(times_B), everywhere=True)).amax(dim=0).numpy()

    def time(self) -> np.ndarray:
        self.timed = list(self.cases)  # Later checks may take cases away; samples stay in this order.
        allocations = Allocations(self.device)
        with watched_machine(self.device, self.ceilings) as mine:
            order = self.timed, self.steps, clock_for(self.device), self.meet
            preroll_us = self.comparison.experiment.measure.preroll_us
            samples_VSC = measure(*order, self.job.begin, self.flush, self.columns, preroll_us, allocations)
        mine["allocating_iterations"] = dict(allocations.iterations)
        if self.graphs is not None:
            mine["cuda_graphs"] = {"count": sum(len(case.captured) for case in self.timed), **self.graphs.num_bytes()}
        if self.meet.size > 1:
            mine["probe_floor_us"] = probe_floor_us(self.meet, clock_for(self.device), preroll_us)
        self.conditions["ranks"] = [json.loads(text) for text in self.job.ranks.texts(json.dumps(mine))]
        return samples_VSC

    def write(self, samples_VSC: np.ndarray) -> None:
        """Gather all ranks' samples and metrics on rank 0, which writes conditions and then case by case."""
        ranks = self.job.ranks
        baseline = next((case.case_id for case in self.timed if case.spec.role == BASELINE), None)
        self.conditions["waits"] = beyond(self.waits, baseline)
        self.job.write_conditions(self.comparison, self.conditions)
        times_RVSC = ranks.gather(torch.from_numpy(samples_VSC))
        packed = PackedMetrics(len(self.timed), len(self.routing_rows[self.timed[0].case_id]))
        for index, case in enumerate(self.timed):
            for number, row in enumerate(self.routing_rows[case.case_id]):
                packed.put((index, number), row)
        metrics = {key: ranks.gather(torch.from_numpy(values)) for key, values in packed.items()}
        with self.job.writing():
            for index, case in enumerate(self.timed):
                if ranks.is_first and case in self.cases:
                    self.job.watchdog.feed()
                    times_RSC = np.stack([ranked[index].numpy() for ranked in times_RVSC])
                    own = {key: np.stack([one[index].numpy() for one in of_ranks]) for key, of_ranks in metrics.items()}
                    write_case(self.job, self.comparison, case.spec, self.steps, times_RSC, self.columns, own)
        self.job.check_written()


def relative_error(output_TD: Tensor, native_TD: Tensor, valid_T: Tensor | None) -> float:
    """|output - native| / |native| over valid tokens; None = all are."""
    if valid_T is not None:
        output_TD, native_TD = output_TD[valid_T], native_TD[valid_T]
    size = float(native_TD.float().norm())
    return float((output_TD.float() - native_TD.float()).norm()) / size if size else 0.0
