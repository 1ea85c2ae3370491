"""Laws of what Megatron-Core offers beside its plain layer: drop-and-pad, and shared experts beside the transfers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from laws import law
from layer_laws import CLOSE, LITE, Lab, assert_right, run_layer
from torch import Tensor

from moe_ep_bench.layer import megatron
from moe_ep_bench.layer.build import LayerPair
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.phases import Rendezvous, instrumented, replaced
from moe_ep_bench.layer.scores import logits_from_scores
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.policies.waits import watched_waits
from moe_ep_bench.timing.timer import PhaseRecorder, clock_for

PERMUTATIONS = [Parts("grouped", permute) for permute in ("indexed", "megatron")]


def layers(lab: Lab, parts: Parts, padded_to: float | None = None) -> LayerPair:
    return lab.new_subject(LITE, torch.float32, parts, padded_to=padded_to).pair


def tokens(lab: Lab) -> tuple[Tensor, Tensor]:
    """Hidden states and scores of 24 tokens a rank: splits that are known beforehand need as many on all."""
    return lab.tokens(num_tokens=24 * lab.ranks.world_size, even=True)


def context_of(lab: Lab) -> RoutingContext:
    model = lab.model()
    return RoutingContext(top_k=model.top_k, normalize=model.normalize, scale=model.routed_scale)


@law(1, 2)
def drop_and_pad_at_full_capacity_computes_what_native_does(lab: Lab) -> None:
    model = lab.model()
    for parts in PERMUTATIONS:
        pair = layers(lab, parts, padded_to=model.num_experts / model.top_k)
        native_TD, native = run_layer(pair.native, *tokens(lab))
        output_TD, padded = run_layer(pair.padded, *tokens(lab))
        assert torch.equal(padded.weights_TE, native.weights_TE), parts
        assert bool(padded.map_TE.all())  # Every expert takes all tokens, most at weight 0.
        torch.testing.assert_close(output_TD, native_TD, **CLOSE)


@law(1, 2)
def drop_and_pad_drops_by_megatrons_rule_and_exchanges_no_counts(lab: Lab) -> None:
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity

    model, (hidden_TD, scores_TE) = lab.model(), tokens(lab)
    reference, refused = lab.reference(LITE, hidden_TD), AssertionError("counts are gathered")
    for factor, parts in ((factor, parts) for factor in (0.4, 1.5) for parts in PERMUTATIONS):
        pair = layers(lab, parts, padded_to=factor)
        native_TD, native = run_layer(pair.native, hidden_TD, scores_TE)
        rows: list[tuple[Tensor, ...]] = []
        hook = pair.native.experts.register_forward_pre_hook(lambda module, inputs, rows=rows: rows.append(inputs))
        gather = "gather_from_sequence_parallel_region"
        with mock.patch.object(megatron.token_dispatcher, gather, side_effect=refused):
            output_TD, padded = run_layer(pair.padded, hidden_TD, scores_TE)
        hook.remove()
        expected_TE, _ = apply_router_token_dropping(
            native.weights_TE, native.map_TE, model.top_k, factor, "probs", True
        )
        assert torch.equal(padded.weights_TE, expected_TE)
        ours = make_policy({"name": "megatron_drop", "capacity_factor": factor, "pad_to_capacity": True})
        expected_TE = ours.route(scores_TE, context_of(lab)).weights_TE
        torch.testing.assert_close(padded.weights_TE, expected_TE, rtol=2e-6, atol=0)
        capacity = get_capacity(len(hidden_TD) * model.top_k, model.num_experts, factor)
        assert padded.map_TE.sum(dim=0).tolist() == [capacity] * model.num_experts
        ((_, counts_L, _),) = rows
        assert counts_L.tolist() == [capacity * lab.ranks.world_size] * pair.native.num_local_experts
        assert pair.padded.token_dispatcher.cuda_sync_point == "no_sync"
        assert_right(reference, output_TD, padded, parts)
        drops = not torch.equal(padded.weights_TE, native.weights_TE)
        assert drops == (not torch.equal(output_TD, native_TD))
        assert drops or factor > 1


def broken_down(lab: Lab, moe: megatron.MoELayer) -> tuple[Tensor, set[str]]:
    """The output of a breakdown iteration, and the phases that it has."""
    recorder = PhaseRecorder(clock_for(lab.ranks.device))
    with instrumented(moe, recorder, Rendezvous(lab.ep_group, lab.ranks.device)):
        recorder.begin()
        output_TD, _ = run_layer(moe, *tokens(lab))
        recorder.end()
    return output_TD, set(recorder.times_us())


@law(1, 2)
def drop_and_pad_waits_before_the_transfers_alone(lab: Lab) -> None:
    _, phases = broken_down(lab, layers(lab, PERMUTATIONS[0], padded_to=1.0).padded)
    waits = {name for name in phases if name.startswith("wait_")}
    assert waits == (set() if lab.ranks.world_size == 1 else {"wait_dispatch", "wait_combine"})


@law(1, 2)
def shared_experts_beside_transfers_change_nothing_but_the_order(lab: Lab) -> None:
    steps = ("pre_forward_comm", "linear_fc1_forward_and_act", "linear_fc2_forward", "post_forward_comm", "get_output")
    for parts in PERMUTATIONS:
        before, beside = layers(lab, parts, 1.0), layers(lab, replace(parts, shared_expert_overlap=True), 1.0)
        shared, calls = beside.native.shared_experts, []
        with contextlib.ExitStack() as spies:
            for name in ("forward", *steps):
                noted = partial(note, calls, name, getattr(shared, name))
                spies.enter_context(replaced(shared, name, noted))
            for plain, overlapping in zip(before.forms, beside.forms, strict=True):
                expected_TD, _ = run_layer(plain, *tokens(lab))
                output_TD, _ = run_layer(overlapping, *tokens(lab))
                assert calls == list(steps), (parts, calls)
                torch.testing.assert_close(output_TD, expected_TD, **CLOSE)
                calls.clear()
                output_TD, phases = broken_down(lab, overlapping)
                assert calls == ["forward"], (parts, calls)
                assert "shared" in phases
                torch.testing.assert_close(output_TD, expected_TD, **CLOSE)
                calls.clear()


def note(calls: list[str], name: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    calls.append(name)
    return method(*arguments, **options)


@law(1)
def megatron_drop_is_routed_by_megatrons_own_operations_which_wait_for_nothing(lab: Lab) -> None:
    router, scores_TE = layers(lab, PERMUTATIONS[0]).policy_router, tokens(lab)[1]
    router.context, logits_TE = context_of(lab), logits_from_scores(scores_TE, "softmax")
    for factor, order, pad in (
        (0.4, "probs", False),
        (1.5, "position", False),
        (1.0, "probs", True),
        (0, "probs", False),
    ):
        spec = {"name": "megatron_drop", "capacity_factor": factor, "drop_policy": order, "pad_to_capacity": pad}
        router.policy = make_policy(spec)
        with watched_waits(lab.ranks.device) as waits:
            weights_TE, map_TE = router.routing(logits_TE)
        assert not waits
        ours = router.policy.route(scores_TE, router.context)
        assert torch.equal(map_TE.sum(dim=0), ours.map_TE.sum(dim=0)), spec
        if order == "probs":
            torch.testing.assert_close(weights_TE, ours.weights_TE, rtol=2e-6, atol=0)
        assert router.config.moe_expert_capacity_factor is None
        assert router.routing(logits_TE[:0])[1].shape == (0, lab.model().num_experts)
