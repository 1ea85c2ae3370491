"""What this rank measures of one comparison: the layer or model, its tokens of every batch, cases that run them.

Each layer's routing is replayed from its own scores. A layer that stands alone has the key None.

Shapes: T = this rank's tokens, E = experts, D = hidden size, N = tokens held against the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.bench.comparison import CaseSpec, Comparison
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.routing import Batches, CaseRouter, Share
from moe_ep_bench.bench.rows import Outcome, Row
from moe_ep_bench.layer.experts import DTYPES, HIDDEN, TOKENS, DenseReference, seeded_generator
from moe_ep_bench.layer.graphs import CapturedRun
from moe_ep_bench.layer.host import free_memory
from moe_ep_bench.layer.megatron import ProcessGroupCollection
from moe_ep_bench.layer.passes import Decode, KeyValueCache, Pass, Prefill
from moe_ep_bench.layer.phases import Rendezvous, replaced
from moe_ep_bench.layer.stack import Stack, layer_seed
from moe_ep_bench.timing.device import CacheFlush, RotatingInput, measure_ceilings
from moe_ep_bench.timing.protocol import BREAKDOWN, Step
from moe_ep_bench.timing.timer import PhaseRecorder, Stopwatch, clock_for


@dataclass(eq=False)
class Case:
    """A case that can run any batch (``timing.protocol.Runnable``), and what was seen of it on this rank.

    Attributes:
        rows: of its routing, by batch and layer.
        error: the worst beside the reference.
        problem: the first thing that was found wrong, in words.
        unclocked: where its last eager run waited for the device, ``file:line``, and no clock saw it.
    """

    router: CaseRouter
    session: Session
    rows: dict[tuple[int, int | None], Row] = field(default_factory=dict)
    error: float = 0.0
    problem: str = ""
    unclocked: list[str] = field(default_factory=list)

    @property
    def spec(self) -> CaseSpec:
        return self.router.case

    @property
    def case_id(self) -> str:
        return self.spec.case_id

    def share(self, batch: int, layer: int | None) -> Share:
        """What a layer sees of this rank's tokens."""
        return self.session.shares[batch][layer].of(self.spec)

    def prepare(self, batch: int) -> Any:
        """Put this case's MoE layers and the batch's routing in place; return the batch's input."""
        shares = {layer: self.share(batch, layer) for layer in self.session.layers}
        self.router.enter(self.session.stack, shares)
        return self.session.inputs[batch]()

    def route_alone(self, batch: int) -> None:
        """Route this rank's tokens of a batch in every layer, as a run would, without the other ranks."""
        self.prepare(batch)
        for layer, moe in self.session.stack.moe_layers.items():
            with contextlib.ExitStack() as alone:
                if hasattr(moe.router, "sum_over_ranks"):
                    alone.enter_context(replaced(moe.router, "sum_over_ranks", lambda stats_SE: stats_SE))
                moe.router.routing(self.share(batch, layer).logits_TE.unsqueeze(1))

    @contextlib.contextmanager
    def ready(self, batch: int, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], object]]:
        session = self.session
        if session.captured is not None:
            yield partial(session.captured[self.case_id, batch, recorder is not None].replay, recorder)
            return
        inputs = self.prepare(batch)
        with contextlib.nullcontext() if recorder is None else session.stack.instrumented(recorder, session.meet):
            yield partial(session.stack.run, inputs)

    def time(self, step: Step) -> dict[Any, float]:
        watch = self.session.watch
        with self.ready(step.batch, watch.recorder if step.kind == BREAKDOWN else None) as run:
            return watch.time(self.case_id, run, f"batch {step.batch} {step.kind} {step.iteration}")


class Session:
    """The state of one comparison's measurement on this rank. Building it needs no other rank.

    Attributes:
        cases: those that are still in order.
        shares: this rank's tokens by batch and layer; ``inputs`` hand out what a batch is run on.
        stack: the layer or model that runs.
        meet: where the ranks that talk to each other are waited for.
        captured: the cases' CUDA graphs, by case, batch and whether phases are timed; None where cases run eagerly.
        outcome: what has been found, for the results.
    """

    def __init__(
        self, job: Job, comparison: Comparison, cases: Sequence[CaseSpec], groups: ProcessGroupCollection
    ) -> None:
        self.job, self.comparison, self.device = job, comparison, job.ranks.device
        settings, measure = comparison.experiment.layer, comparison.experiment.measure
        self.settings, self.seed, self.dtype = measure, settings.seed, DTYPES[settings.dtype]
        self.ceilings = measure_ceilings(self.device, self.dtype)
        free_memory(self.device)  # over 2 GiB on a GPU
        self.meet = Rendezvous(groups.ep, self.device)
        self.layers, self.num_batches = tuple(comparison.workloads), comparison.workload.num_batches
        self.stack = builder(comparison, self.device)(groups=groups)
        self._cache: KeyValueCache | None = None
        if comparison.context_length:
            most_requests = int(comparison.rank_tokens[:, job.ranks.rank].max())
            self._cache = KeyValueCache(most_requests, comparison.context_length)
        batches = Batches(comparison, self.device)
        self.cases = [Case(CaseRouter(case, batches), self) for case in cases]
        self.shares = [self._shares(batches, number) for number in range(self.num_batches)]
        self.inputs = [self._new_input(number) for number in range(self.num_batches)]
        self.captured: dict[tuple[str, int, bool], CapturedRun] | None = None
        self._reference: DenseReference | None = None
        flush = CacheFlush(self.device) if measure.flush_l2 else None
        self.watch = Stopwatch(PhaseRecorder(clock_for(self.device)), self.meet, flush, measure.hold_us)
        self.conditions: dict[str, Any] = {}
        self.outcome = Outcome()

    def close(self) -> None:
        """Drop the graphs: no NCCL communicator can end while one holds its collectives (pytorch#115388)."""
        self.captured = None

    def drop(self, case: Case, status: str, reason: str) -> None:
        """Record a case as not measured, and go on without it."""
        for key in [key for key in self.captured or {} if key[0] == case.case_id]:
            del self.captured[key]
        self.cases.remove(case)
        self.outcome.unmeasured[case.case_id] = status, reason

    def reference(self, layer: int | None, input_ND: Tensor) -> DenseReference:
        """What a layer should make of an input. All cases give a layer alone the same one, which is kept."""
        if layer is None and self._reference is not None:
            return self._reference
        reference = DenseReference(self.comparison.model, input_ND, layer_seed(self.seed, layer))
        if layer is None:
            self._reference = reference
        return reference

    def _shares(self, batches: Batches, number: int) -> dict[int | None, Share]:
        """This rank's tokens of a batch in each layer."""
        shares = {}
        for layer in self.layers:
            self.job.guard.feed()
            shares[layer] = batches.share(layer, number, self.job.ranks.rank)
        return shares

    def _new_input(self, number: int) -> Callable[[], Any]:
        """What hands out the input for this rank's tokens of a batch: hidden states of a layer, a model's pass."""
        ids_T = self.shares[number][self.layers[0]].context.request_id_T
        sequences, lengths = torch.unique_consecutive(ids_T, return_counts=True)
        device, size = self.device, self.comparison.model.hidden_size
        if self.comparison.scope == "model":
            run = random_pass(self.comparison, device, number, self.job.ranks.rank, lengths.tolist(), self._cache)
            return lambda: run
        # Hidden states follow from the sequence, not from the number of ranks.
        hidden = [torch.empty(0, size, device=device)]
        for sequence, length in zip(sequences.tolist(), lengths.tolist(), strict=True):
            generator = seeded_generator(device, self.seed, HIDDEN, number, sequence)
            hidden.append(torch.randn(length, size, generator=generator, device=device))
        # Cases follow each other on one batch; none is to find its input in the cache.
        return RotatingInput(torch.cat(hidden).to(self.dtype).unsqueeze(1), len(self.comparison.cases)).next


# ---- what runs -------------------------------------------------------------------------------------------------------


def builder(comparison: Comparison, device: torch.device) -> Callable[..., Stack]:
    """What builds the layer or model, once it is given its process groups."""
    model, settings = comparison.model, comparison.experiment.layer
    build = partial(Stack, model, DTYPES[settings.dtype], device, seed=settings.seed, parts=comparison.parts)
    if comparison.scope == "layer":
        return build
    longest = comparison.context_length + comparison.most_tokens
    return partial(build, num_layers=comparison.num_layers, max_length=longest)


def random_pass(
    comparison: Comparison,
    device: torch.device,
    index: int,
    rank: int,
    lengths: Sequence[int],
    cache: KeyValueCache | None,
) -> Pass:
    """A rank's pass of a model over batch ``index``: a decode step where there is a cache, else a prefill.

    Args:
        lengths: tokens of each of the rank's sequences.
    """
    generator = seeded_generator(device, comparison.experiment.layer.seed, TOKENS, index, rank)
    ids_T = torch.randint(comparison.model.vocab_size, (sum(lengths),), generator=generator, device=device)
    return Prefill(ids_T, lengths) if cache is None else Decode(ids_T, cache)
