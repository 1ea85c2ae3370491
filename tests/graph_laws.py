"""Laws of layers whose tokens are gathered rather than permuted, and of their runs kept as graphs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from laws import law
from layer_laws import (
    BATCH_WIDE,
    LITE,
    POLICIES,
    SOME,
    TOPK,
    Lab,
    assert_phases,
    assert_right,
    breakdown,
)
from tape_graphs import TapeClock, TapeGraph, dense_decode_experts
from torch import Tensor

from moe_ep_bench.layer import backends
from moe_ep_bench.layer.graphs import CapturedRun
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.layer.scores import logits_from_scores
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.selection import weighted

BY_MAP = Parts("decode", "none", "torch", "allgather")
GATHERED = [BY_MAP, Parts("grouped", "megatron", "auto", "allgather")]


class TopKOnDevice(Policy):
    """Top-k for tests, without ties broken."""

    name = "topk_on_device"

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        chosen_TK = scores_TE.topk(context.top_k, dim=1).indices
        map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
        return weighted(scores_TE, map_TE, map_TE, context)


class RandomOnDevice(TopKOnDevice):
    """The same by random numbers, as a random metric has them."""

    name = "random_on_device"

    def random_keys(self, like_TE: Tensor, context: RoutingContext) -> Tensor:
        return context.random_keys(like_TE)

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        map_TE = super().route(context.random_keys(scores_TE), context).map_TE
        return weighted(scores_TE, map_TE, map_TE, context)


@law()
def gathered_layers_equal_the_dense_reference_and_route_like_others(lab: Lab) -> None:
    for name, specs in ((LITE, [None, *POLICIES, *BATCH_WIDE]), ("four-experts", SOME)):
        hidden_TD, scores_TE = lab.tokens(name, 60, even=True)
        reference = lab.reference(name, hidden_TD)
        for spec in specs:
            _, expected = lab.route(lab.layers(name), spec, hidden_TD, scores_TE)
            for parts in GATHERED:
                output_TD, routing = lab.route(lab.layers(name, parts=parts), spec, hidden_TD, scores_TE)
                assert torch.equal(routing.map_TE, expected.map_TE), f"{name} {parts} {spec}"
                assert_right(reference, output_TD, routing, f"{name} {parts} {spec}")


@law()
def experts_by_map_permute_nothing_know_no_counts_and_sum_bfloat16_in_float32(lab: Lab) -> None:
    layers, (hidden_TD, _) = lab.layers(LITE, torch.bfloat16, BY_MAP), lab.tokens(num_tokens=20, even=True)
    seen = []
    hook = layers.policy.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    output_TD, routing = lab.route(layers, TOPK, hidden_TD.bfloat16())
    hook.remove()
    assert_right(lab.reference(LITE, hidden_TD.bfloat16()), output_TD, routing, "bfloat16")
    ((gathered_TD, map_TL, weights_TL),) = seen
    assert output_TD.dtype == torch.bfloat16
    assert len(gathered_TD) == 20
    assert map_TL.shape == weights_TL.shape == (20, layers.native.num_local_experts)
    assert (map_TL.dtype, weights_TL.dtype) == (torch.bool, torch.float32)


@law()
def a_gathered_layer_s_phases_are_named_like_any_other_s(lab: Lab) -> None:
    times = breakdown(lab, lab.layers(parts=BY_MAP))
    assert_phases(lab, times, "wait_dispatch", "wait_combine", but="metadata")


@contextlib.contextmanager
def capturable() -> Iterator[None]:
    with mock.patch.object(backends, "decode_experts", dense_decode_experts):
        yield


def captured(
    lab: Lab, stack: Stack, policy: Policy | None, hidden_TD: Tensor, scores_TE: Tensor, *, by_phase: bool
) -> CapturedRun:
    stack.take(() if policy is None else stack.forms)
    layer = stack.moe_layers[None]
    layer.router.replay_TE = logits_from_scores(scores_TE, layer.router.score_function)
    if policy is not None:
        # As ``CaseRouter.enter`` has it: a graph can draw nothing.
        context = lab.context(stack.forms[None])
        context = replace(context, random_TE=policy.random_keys(scores_TE, context))
        layer.router.policy, layer.router.context = policy, context
    meet = Rendezvous(lab.ep_group, lab.ranks.device)
    return CapturedRun(stack, hidden_TD.unsqueeze(1), TapeGraph(), TapeClock(), meet, by_phase=by_phase)


@law()
def a_captured_run_computes_again_what_lies_in_its_tensors(lab: Lab) -> None:
    """With random numbers that were drawn before the capture, and are the same in every replay."""
    for name, policies in ((LITE, (None, TopKOnDevice(), RandomOnDevice())), ("sigmoid", (None, TopKOnDevice()))):
        stack, (hidden_TD, scores_TE) = lab.stack(name, parts=BY_MAP), lab.tokens(name, 60, even=True)
        hidden_TD, maps = hidden_TD.clone(), []
        with capturable():
            for policy in policies:
                eager_TD, routing = lab.route(stack.forms[None], policy, hidden_TD, scores_TE)
                run = captured(lab, stack, policy, hidden_TD, scores_TE, by_phase=False)
                run.replay()
                assert torch.equal(run.output[:, 0], eager_TD), f"{name} {policy}: captured"
                # Other inputs in the same place, and nothing of what the capture has computed.
                other = hidden_TD.flip(0).contiguous()
                other_TD, _ = lab.route(stack.forms[None], policy, other, scores_TE)
                hidden_TD.copy_(other)
                run.output.fill_(torch.nan)
                run.replay()
                assert torch.equal(run.output[:, 0], other_TD), f"{name} {policy}: replayed"
                assert torch.equal(run.routing[None][1], routing.map_TE)
                assert not torch.equal(other_TD, eager_TD)
                maps.append(routing.map_TE)
        assert name != LITE or not torch.equal(maps[-1], maps[0]), "scores decide, where numbers should"


@law()
def a_capture_meets_no_other_rank_and_a_failed_one_keeps_nobody_waiting(lab: Lab) -> None:
    stack, (hidden_TD, scores_TE) = lab.stack(parts=BY_MAP), lab.tokens(num_tokens=60, even=True)
    with capturable():
        lab.route(stack.forms[None], TopKOnDevice(), hidden_TD, scores_TE)
        for by_phase in (False, True):
            if lab.ranks.is_first:  # The others do nothing meanwhile.
                captured(lab, stack, TopKOnDevice(), hidden_TD, scores_TE, by_phase=by_phase)
        assert lab.ranks.told("captured") == ["captured"] * lab.ranks.world_size


@law(1)
def what_a_graph_reads_lives_as_long_as_the_graph(lab: Lab) -> None:
    # The next case gets a context of its own; the random numbers of this one would be given back.
    stack, (hidden_TD, scores_TE) = lab.stack(parts=BY_MAP), lab.tokens(num_tokens=60, even=True)
    with capturable():
        lab.route(stack.forms[None], TopKOnDevice(), hidden_TD, scores_TE)
        run = captured(lab, stack, RandomOnDevice(), hidden_TD, scores_TE, by_phase=False)
        router = stack.moe_layers[None].router
        read = [weakref.ref(one) for one in (router.context, router.replay_TE)]
        router.context, router.replay_TE = lab.context(stack.forms[None]), None
        gc.collect()
        assert all(one() is not None for one in read)
        del run
        gc.collect()
        assert read[0]() is None


@law(1)
def what_waits_for_the_device_cannot_be_captured(lab: Lab) -> None:
    # The all-to-all dispatcher counts on the host, and so does the layer's own permutation behind an all-gather.
    if lab.ranks.device.type != "cpu":
        return  # Tapes notice waiting on the host alone; a GPU's own graphs have a test of their own.
    hidden_TD, scores_TE = lab.tokens("olmoe-1b-7b", 20)
    for parts in (Parts("decode", "indexed"), GATHERED[1]):
        stack = lab.stack("olmoe-1b-7b", parts=parts)
        lab.route(stack.forms[None], TopKOnDevice(), hidden_TD, scores_TE)
        with pytest.raises(RuntimeError, match="capturing"):
            captured(lab, stack, TopKOnDevice(), hidden_TD, scores_TE, by_phase=False)
        assert "forward" not in vars(stack.forms[None].policy)
