"""Measure whole models on this rank: the session of a ``ModelComparison``.

What is compared differs in the MoE layers alone, which native and policy share all weights of; a case puts one of the
two into every layer's place (``layer.transformer``). Each layer's routing is replayed from its own scores, and each
layer's output is held against the dense reference for the input that it got.

Shapes: T = this rank's tokens, E = experts, D = hidden size, N = tokens checked, L = layers, V = words.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.kernels.twins import oracle_for
from moe_ep_bench.layer.attention_kernels import kernels_of_attention
from moe_ep_bench.layer.depth import instrumented_model
from moe_ep_bench.layer.experts import DRAWS, TOKENS, seeded_generator
from moe_ep_bench.layer.graphs import Graph
from moe_ep_bench.layer.graphs_in_depth import CapturedPass
from moe_ep_bench.layer.passes import Decode, KeyValueCache, Pass, Prefill
from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.layer.reference import DenseReference
from moe_ep_bench.layer.router import logits_from_scores, scores_from_logits
from moe_ep_bench.layer.transformer import Transformer, build_transformer, layer_seed
from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.policies import Routing, RoutingContext
from moe_ep_bench.scopes.comparison import BASELINE, CEILING, CaseSpec
from moe_ep_bench.scopes.model_comparison import ModelComparison
from moe_ep_bench.scopes.model_rows import model_columns, write_model_case
from moe_ep_bench.scopes.timed import Session, capacity_factor, relative_error, rows_to_check
from moe_ep_bench.timer import Clock, PhaseRecorder
from moe_ep_bench.workload.balanced import balanced_scores


@dataclass(frozen=True)
class LayerScores:
    """What one layer's router is to see of this rank's share of a batch."""

    logits_TE: Tensor
    balanced_logits_TE: Tensor


@dataclass(frozen=True)
class ModelBatch:
    """This rank's share of a batch, on its device."""

    run: Pass
    request_id_T: Tensor
    scores: dict[int, LayerScores]
    """By layer."""


@dataclass(frozen=True, eq=False)
class ModelCase:
    """A case on the whole model, able to run any batch; see ``measure.protocol.Runnable``."""

    spec: CaseSpec
    transformer: Transformer
    batches: Sequence[ModelBatch]
    contexts: dict[int, RoutingContext]
    """By layer: what is so of all batches."""
    seed: int
    global_rank: int
    meet: Rendezvous
    captured: dict[tuple[int, bool], CapturedPass] = field(default_factory=dict)
    """Passes as CUDA graphs, as in ``timed.LayerCase``."""

    @property
    def case_id(self) -> str:
        return self.spec.case_id

    def prepare(self, batch: int) -> Pass:
        """Put this case's MoE layers and the batch's routing into the model."""
        transformer, share = self.transformer, self.batches[batch]
        transformer.take(() if self.spec.policy is None else transformer.pairs.keys())
        for layer, moe in transformer.moe_layers.items():
            scores = share.scores[layer]
            moe.router.replay_TE = scores.balanced_logits_TE if self.spec.role == CEILING else scores.logits_TE
            if self.spec.policy is not None:
                moe.router.policy = self.spec.policy
                moe.router.context = self.spec.told(self.context_for(batch, layer))
                if hasattr(moe.token_dispatcher, "most_experts"):
                    num_experts = scores.logits_TE.shape[1]
                    moe.token_dispatcher.most_experts = self.spec.policy.most_experts(num_experts, self.contexts[layer])
        return share.run

    @contextlib.contextmanager
    def ready(self, batch: int, recorder: PhaseRecorder | None = None) -> Iterator[Callable[[], object]]:
        if (batch, recorder is not None) in self.captured:
            yield partial(self.captured[batch, recorder is not None].replay, recorder)
            return
        run, transformer = self.prepare(batch), self.transformer
        timers = contextlib.nullcontext() if recorder is None else instrumented_model(transformer, recorder, self.meet)
        with timers:
            yield lambda: run(transformer.gpt)

    def capture(self, batch: int, new_graph: Callable[[], Graph], clock: Clock, *, by_phase: bool) -> None:
        """Keep the pass of a batch as graphs; ``by_phase``: a second time, with its phases timed.

        Raises:
            RuntimeError: as ``CapturedPass``.
        """
        for timed in (False, True)[: 1 + by_phase]:
            run = CapturedPass(self.transformer, self.prepare(batch), new_graph, clock, self.meet, by_phase=timed)
            if timed:
                run.forget()
            self.captured[batch, timed] = run

    def context_for(self, batch: int, layer: int) -> RoutingContext:
        """What is so of this rank's tokens in a layer; randomness starts anew with every call."""
        share = self.batches[batch]
        draws = seeded_generator(share.request_id_T.device, self.seed, DRAWS, batch, self.global_rank, layer)
        return replace(self.contexts[layer], generator=draws, request_id_T=share.request_id_T)

    def scores(self, batch: int, layer: int) -> Tensor:
        """The scores that a layer's router sees: float32 [T, E]."""
        self.prepare(batch)
        router = self.transformer.moe_layers[layer].router
        return scores_from_logits(router.replay_TE, router.score_function)


@dataclass(frozen=True)
class LayerLook:
    """What was seen of one MoE layer in an untimed pass."""

    routing: Routing
    gated_TE: Tensor
    input_ND: Tensor
    output_ND: Tensor

    @property
    def problem(self) -> str:
        """What of it is no number; empty where all is well."""
        for what, values in (
            ("the gate's logits", self.gated_TE),
            ("routing weights", self.routing.weights_TE),
            ("output", self.output_ND),
        ):
            if not bool(values.isfinite().all()):
                return f"NaN or Inf in {what}"
        return ""


class ModelSession(Session):
    """The state of one comparison of whole models on this rank."""

    comparison: ModelComparison

    @property
    def columns(self) -> list[str]:
        return model_columns(self.comparison)

    def build(self) -> None:
        comparison = self.comparison
        longest = comparison.context_length + comparison.num_tokens
        self.transformer = build_transformer(
            comparison.model,
            comparison.num_layers,
            self.dtype,
            self.device,
            self.ep_group,
            self.seed,
            longest,
            comparison.parts,
        )
        self.contexts = {
            layer: replace(pair.policy_router.context, layer_fraction=comparison.fraction_of(layer))
            for layer, pair in self.transformer.pairs.items()
        }
        self._new_cache()
        self.batches = [self._model_batch(number) for number in range(self.num_batches)]

    def _new_cache(self) -> None:
        comparison = self.comparison
        if not comparison.context_length:
            return
        shares, rank = comparison.experiment.workload.rank_shares, self.job.ranks.rank
        most = max(
            int(comparison.workload.tokens_of_ranks(number, comparison.world_size, shares)[rank])
            for number in range(self.num_batches)
        )
        self.cache = KeyValueCache(most, comparison.context_length)
        self.cache.fill_(self.transformer.gpt, self.device, self.seed)

    def _model_batch(self, number: int) -> ModelBatch:
        """This rank's tokens of a batch, with the scores that every layer has for them."""
        comparison, ranks = self.comparison, self.job.ranks
        shares = comparison.experiment.workload.rank_shares
        scores, sequence_id_T = {}, torch.empty(0, dtype=torch.int64)
        for layer, workload in zip(comparison.moe_layers, comparison.workloads, strict=True):
            self.job.watchdog.feed()
            mine = next(islice(workload.rank_batches(number, ranks.world_size, shares), ranks.rank, None))
            assert not scores or torch.equal(mine.sequence_id_T, sequence_id_T), "layers see other tokens"
            sequence_id_T = mine.sequence_id_T
            scores[layer] = self._layer_scores(mine.scores_TE.to(self.device))
        generator = seeded_generator(self.device, self.seed, TOKENS, number, ranks.rank)
        vocabulary = comparison.model.vocab_size
        ids_T = torch.randint(vocabulary, (len(sequence_id_T),), generator=generator, device=self.device)
        lengths = torch.unique_consecutive(sequence_id_T, return_counts=True)[1].tolist()
        run = Decode(ids_T, self.cache) if comparison.context_length else Prefill(ids_T, lengths)
        return ModelBatch(run, sequence_id_T.to(self.device), scores)

    def _layer_scores(self, scores_TE: Tensor) -> LayerScores:
        model = self.comparison.model
        balanced_TE = balanced_scores(scores_TE, model.top_k)
        return LayerScores(
            logits_from_scores(scores_TE, model.score_function), logits_from_scores(balanced_TE, model.score_function)
        )

    def new_case(self, case: CaseSpec) -> ModelCase:
        rank = self.job.ranks.rank
        return ModelCase(case, self.transformer, self.batches, self.contexts, self.seed, rank, self.meet)

    def look(self, case: ModelCase, batch: int) -> tuple[Tensor, dict[int, LayerLook]]:
        """Run a case once, untimed: its logits, and what its MoE layers were given, chose and returned."""
        run = case.prepare(batch)
        rows_N = rows_to_check(len(self.batches[batch].request_id_T)).to(self.device)
        routed: dict[int, Routing] = {}
        gated: dict[int, Tensor] = {}
        ends: dict[int, tuple[Tensor, Tensor]] = {}

        def note_routing(layer: int, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            routed[layer] = Routing(map_TE=output[1], weights_TE=output[0])

        def note_ends(layer: int, module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
            ends[layer] = tuple(tensor.flatten(0, 1)[rows_N].clone() for tensor in (inputs[0], output[0]))

        with contextlib.ExitStack() as hooks:
            for layer, moe in self.transformer.moe_layers.items():
                hooks.callback(moe.router.register_forward_hook(partial(note_routing, layer)).remove)
                hooks.callback(moe.register_forward_hook(partial(note_ends, layer)).remove)
                moe.router.look = partial(gated.__setitem__, layer)
                hooks.callback(setattr, moe.router, "look", None)
            logits_SV = run(self.transformer.gpt)
        return logits_SV, {layer: LayerLook(routed[layer], gated[layer], *ends[layer]) for layer in routed}

    def observe_all(self) -> None:
        """Run every case on every batch once: shapes are seen, routing metrics taken, every layer's output checked."""
        for batch in range(self.num_batches):
            native_SV: Tensor | None = None
            for case in self.cases:
                self.job.begin(case.case_id)
                logits_SV, looks = self.look(case, batch)
                self._note(case, batch, logits_SV, looks)
                if case.spec.role == BASELINE:
                    native_SV = logits_SV
                for layer, look in looks.items():
                    self.job.watchdog.feed()
                    row = routing_metrics(
                        look.routing,
                        case.scores(batch, layer),
                        case.context_for(batch, layer),
                        num_slices=self.comparison.num_slices,
                        **capacity_factor(case.spec),
                    )
                    row["reference_error"] = self.layer_error(case, layer, look) if batch == 0 else None
                    is_last = layer == self.comparison.moe_layers[-1]
                    compared = is_last and case.spec.role != CEILING and native_SV is not None
                    row["output_error"] = relative_error(logits_SV, native_SV, None) if compared else None
                    self.routing_rows[case.case_id].append(row)
        self._note_kernels()

    def _note_kernels(self) -> None:
        """Which kernels torch takes for attention here, in one pass more."""
        self.job.watchdog.feed()
        run = self.cases[0].prepare(0)
        mine = kernels_of_attention(partial(run, self.transformer.gpt))
        of_ranks = [json.loads(text) for text in self.job.ranks.texts(json.dumps(mine))]
        self.conditions["attention"] = sorted({name for names in of_ranks for name in names})

    def _note(self, case: ModelCase, batch: int, logits_SV: Tensor, looks: dict[int, LayerLook]) -> None:
        found = [f"{look.problem}, layer {layer}, batch {batch}" for layer, look in looks.items() if look.problem]
        if not bool(logits_SV.isfinite().all()):
            found.append(f"NaN or Inf in the logits, batch {batch}")
        if found:
            self.problems.setdefault(case.case_id, found[0])

    def layer_error(self, case: ModelCase, layer: int, look: LayerLook) -> float:
        """Hold a layer's run on batch 0 against the dense reference, and a policy's map against the policy itself."""
        reference = DenseReference(self.comparison.model, look.input_ND, layer_seed(self.seed, layer))
        rows_N = rows_to_check(len(look.routing.map_TE)).to(self.device)
        error = reference.worst_error(look.output_ND, look.routing.weights_TE[rows_N])
        policy, scores_TE = case.spec.policy, case.scores(0, layer)
        if policy is not None and (
            self.comparison.num_together == 1 or policy.batch_stats(scores_TE, case.context_for(0, layer)) is None
        ):
            oracle = oracle_for(policy, self.device.type)
            expected = policy.route(scores_TE, case.spec.told(case.context_for(0, layer)), kernel=oracle)
            if not torch.equal(expected.map_TE, look.routing.map_TE):
                error = float("inf")
        self.errors[case.case_id] = max(error, self.errors.get(case.case_id, 0.0))
        return error

    def check_again(self) -> None:
        """Hold every layer of every case against the reference once more, after the model was timed."""
        for case in self.cases:
            self.job.begin(case.case_id)
            logits_SV, looks = self.look(case, 0)
            self._note(case, 0, logits_SV, looks)
            if (0, False) in case.captured:
                eager = logits_SV, [look.routing.map_TE for look in looks.values()]
                problem = self._unlike(eager, self.observed(case, 0), 0)
                if problem:
                    self.problems.setdefault(case.case_id, problem)
            for row, (layer, look) in zip(self.routing_rows[case.case_id], looks.items(), strict=False):
                self.job.watchdog.feed()
                row["reference_error"] = max(self.layer_error(case, layer, look), row["reference_error"])

    def observed(self, case: ModelCase, batch: int) -> tuple[Tensor, list[Tensor]]:
        if (batch, False) not in case.captured:
            logits_SV, looks = self.look(case, batch)
            return logits_SV, [look.routing.map_TE for look in looks.values()]
        captured = case.captured[batch, False]
        captured.replay()
        assert captured.logits_BV is not None
        found = captured.logits_BV.clone(), [map_TE.clone() for _, map_TE in captured.routing.values()]
        if batch:  # The first is looked at again after timing.
            captured.forget()
        return found

    def write_case(self, case: CaseSpec, times_RSC: Sequence[np.ndarray], routing: dict[str, list[Any]]) -> None:
        write_model_case(self.job, self.comparison, case, self.steps, times_RSC, self.columns, routing)


SESSIONS: dict[str, type[Session]] = {"layer": Session, "model": ModelSession}
"""What measures a comparison, by its scope."""
