"""Laws of layers whose tokens are gathered rather than permuted, and of their runs kept as graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from layer_laws import BATCH_WIDE, POLICIES, SEED, Lab, assert_close, breakdown, law, needs_ranks
from tape_graphs import TapeClock, TapeGraph, dense_decode_experts
from torch import Tensor

from moe_ep_bench.layer import backends
from moe_ep_bench.layer.build import SingleLayer
from moe_ep_bench.layer.graphs import CapturedRun
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.layer.scores import logits_from_scores
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.policies.selection import weighted
from moe_ep_bench.schema import TOTAL, UNACCOUNTED
from moe_ep_bench.timing.timer import PhaseRecorder

BY_MAP = Parts("decode", "none", "torch", "allgather")
GATHERED = [BY_MAP, Parts("grouped", "megatron", "auto", "allgather")]
TOPK = make_policy({"name": "topk"})


class TopKOnDevice(Policy):
    """Top-k for tests that waits for nothing: policies' torch forms look at values here and there."""

    name = "topk_on_device"

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        chosen_TK = scores_TE.topk(context.top_k, dim=1).indices
        map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
        return weighted(scores_TE, map_TE, map_TE, context)


class RandomOnDevice(TopKOnDevice):
    """The same by random numbers, as a random metric has them."""

    name = "random_on_device"

    def draws(self, like_TE: Tensor, context: RoutingContext) -> Tensor:
        return context.drawn(like_TE)

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        map_TE = super().route(context.drawn(scores_TE), context).map_TE
        return weighted(scores_TE, map_TE, map_TE, context)


def even(lab: Lab, num_tokens: int) -> slice:
    """This rank's share of tokens, as large as every other's."""
    share = num_tokens // lab.ranks.world_size
    return slice(lab.ranks.rank * share, (lab.ranks.rank + 1) * share)


@law
def gathered_layers_equal_the_dense_reference_and_route_like_others(lab: Lab) -> None:
    for name in ("deepseek-v2-lite", "four-experts"):
        model = lab.model(name)
        mine = even(lab, 60)
        hidden_TD, scores_TE = lab.all_hidden(model, 60)[mine], lab.all_scores(model, 60)[mine]
        reference = DenseReference(model, hidden_TD, SEED)
        for spec in (None, *POLICIES, *BATCH_WIDE):
            policy = None if spec is None else make_policy(spec)
            if spec is not None and spec.get("num_candidates", 0) > model.num_experts:
                continue
            _, expected = lab.route(lab.layers(name), policy, hidden_TD, scores_TE)
            for parts in GATHERED:
                output_TD, routing = lab.route(lab.layers(name, parts=parts), policy, hidden_TD, scores_TE)
                assert torch.equal(routing.map_TE, expected.map_TE), f"{name} {parts} {spec}"
                error = reference.worst_error(output_TD, routing.weights_TE)
                assert_close(error, TOLERANCE[torch.float32], f"{name} {parts} {spec}")


@law
def gathered_tokens_in_bfloat16_are_summed_in_float32(lab: Lab) -> None:
    model, mine = lab.model("olmoe-1b-7b"), even(lab, 60)
    hidden_TD = lab.all_hidden(model, 60)[mine].bfloat16()
    reference = DenseReference(model, hidden_TD, SEED)
    output_TD, routing = lab.route(lab.layers("olmoe-1b-7b", torch.bfloat16, BY_MAP), TOPK, hidden_TD)
    assert output_TD.dtype == torch.bfloat16
    assert_close(reference.worst_error(output_TD, routing.weights_TE), TOLERANCE[torch.bfloat16], "bfloat16")


@law
def experts_by_map_permute_nothing_and_know_no_counts(lab: Lab) -> None:
    layers = lab.layers("deepseek-v2-lite", parts=BY_MAP)
    seen = []
    hook = layers.native.experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    mine = even(lab, 20)
    lab.route(layers, None, lab.all_hidden(lab.model("deepseek-v2-lite"), 20)[mine])
    hook.remove()
    hidden_TD, map_TL, weights_TL = seen[0]
    gathered = 20 // lab.ranks.world_size * lab.ranks.world_size
    assert len(hidden_TD) == gathered
    assert map_TL.shape == weights_TL.shape == (gathered, layers.native.num_local_experts)
    assert map_TL.dtype == torch.bool


@law
def a_gathered_layer_s_phases_are_named_like_any_other_s(lab: Lab) -> None:
    layers, model = lab.layers("deepseek-v2-lite", parts=BY_MAP), lab.model("deepseek-v2-lite")
    times = breakdown(lab, layers, lab.all_hidden(model, 60)[even(lab, 60)])
    expected = {"shared", "gate", "policy", "permute", "dispatch", "experts", "combine"}
    if lab.ranks.world_size > 1:
        expected |= {"wait_dispatch", "wait_combine"}
    assert set(times) == {*expected, UNACCOUNTED, TOTAL}


@contextlib.contextmanager
def capturable() -> Iterator[None]:
    with mock.patch.object(backends, "decode_experts", dense_decode_experts):
        yield


def captured(
    lab: Lab, subject: SingleLayer, policy: Policy | None, hidden_TD: Tensor, scores_TE: Tensor, *, by_phase: bool
) -> CapturedRun:
    subject.take(() if policy is None else subject.pairs)
    layer = subject.moe_layers[None]
    layer.router.replay_TE = logits_from_scores(scores_TE, layer.router.score_function)
    if policy is not None:
        # As ``Traffic.enter`` has it: a graph can draw nothing.
        context = lab.context(subject.pair)
        context = replace(context, random_TE=policy.draws(scores_TE, context))
        layer.router.policy, layer.router.context = policy, context
    meet = Rendezvous(lab.ep_group, lab.ranks.device)
    return CapturedRun(subject, hidden_TD.unsqueeze(1), TapeGraph, TapeClock(), meet, by_phase=by_phase)


@law
def a_captured_run_computes_again_what_lies_in_its_tensors(lab: Lab) -> None:
    for name in ("deepseek-v2-lite", "sigmoid"):
        subject, model, mine = lab.subject(name, parts=BY_MAP), lab.model(name), even(lab, 60)
        hidden_TD, scores_TE = lab.all_hidden(model, 60)[mine].clone(), lab.all_scores(model, 60)[mine].clone()
        with capturable():
            for policy in (None, TopKOnDevice()):
                eager_TD, routing = lab.route(subject.pair, policy, hidden_TD, scores_TE)
                run = captured(lab, subject, policy, hidden_TD, scores_TE, by_phase=False)
                assert torch.equal(run.output[:, 0], eager_TD), f"{name} {policy}: captured"
                # Other inputs in the same place, and nothing of what the capture has computed.
                other = hidden_TD.flip(0).contiguous()
                other_TD, _ = lab.route(subject.pair, policy, other, scores_TE)
                hidden_TD.copy_(other)
                run.output.fill_(torch.nan)
                run.replay()
                assert torch.equal(run.output[:, 0], other_TD), f"{name} {policy}: replayed"
                assert torch.equal(run.routing[None][1], routing.map_TE)
                assert not torch.equal(other_TD, eager_TD)


@law
def random_numbers_are_drawn_before_the_capture_and_are_the_same_in_every_replay(lab: Lab) -> None:
    subject, model, mine = lab.subject("deepseek-v2-lite", parts=BY_MAP), lab.model("deepseek-v2-lite"), even(lab, 60)
    hidden_TD, scores_TE = lab.all_hidden(model, 60)[mine], lab.all_scores(model, 60)[mine]
    with capturable():
        eager_TD, routing = lab.route(subject.pair, RandomOnDevice(), hidden_TD, scores_TE)
        _, by_scores = lab.route(subject.pair, TopKOnDevice(), hidden_TD, scores_TE)
        assert not torch.equal(routing.map_TE, by_scores.map_TE)
        run = captured(lab, subject, RandomOnDevice(), hidden_TD, scores_TE, by_phase=False)
        for _ in range(2):
            run.output.fill_(torch.nan)
            run.replay()
            assert torch.equal(run.routing[None][1], routing.map_TE)
            assert torch.equal(run.output[:, 0], eager_TD)


@law
def phases_of_a_captured_run_are_those_of_its_replay(lab: Lab) -> None:
    subject, model, mine = lab.subject("deepseek-v2-lite", parts=BY_MAP), lab.model("deepseek-v2-lite"), even(lab, 60)
    hidden_TD, scores_TE = lab.all_hidden(model, 60)[mine], lab.all_scores(model, 60)[mine]
    with capturable():
        lab.route(subject.pair, TopKOnDevice(), hidden_TD, scores_TE)
        run = captured(lab, subject, TopKOnDevice(), hidden_TD, scores_TE, by_phase=True)
        recorder = PhaseRecorder(TapeClock())
        for _ in range(2):
            recorder.begin()
            run.replay(recorder)
            recorder.end()
            times = recorder.times_us()
            expected = {"shared", "gate", "policy", "permute", "dispatch", "experts", "combine"}
            if lab.ranks.world_size > 1:
                expected |= {"wait_dispatch", "wait_combine"}
            assert set(times) == {*expected, UNACCOUNTED, TOTAL}
            assert all(value >= 0 for value in times.values()), times
            covered = sum(value for phase, value in times.items() if phase != TOTAL)
            assert abs(covered - times[TOTAL]) < 1
    assert "forward" not in vars(subject.pair.policy), "something is left on the layer"
    assert "forward" not in vars(subject.pair.policy.experts)


@law
@needs_ranks(1)
def what_waits_for_the_device_cannot_be_captured(lab: Lab) -> None:
    # The all-to-all dispatcher counts on the host, and so does the layer's own permutation behind an all-gather.
    if lab.ranks.device.type != "cpu":
        return  # Tapes notice waiting on the host alone; a GPU's own graphs have a test of their own.
    model = lab.model("olmoe-1b-7b")
    hidden_TD, scores_TE = lab.all_hidden(model, 20), lab.all_scores(model, 20)
    for parts in (Parts("decode", "indexed"), Parts("grouped", "megatron", "auto", "allgather")):
        subject = lab.subject("olmoe-1b-7b", parts=parts)
        lab.route(subject.pair, TopKOnDevice(), hidden_TD, scores_TE)
        with pytest.raises(RuntimeError, match="capturing"):
            captured(lab, subject, TopKOnDevice(), hidden_TD, scores_TE, by_phase=False)
        assert "forward" not in vars(subject.pair.policy)
