"""Laws of what Megatron-Core offers beside its plain layer: drop-and-pad, and shared experts beside the transfers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from layer_laws import SEED, Lab, assert_close, law
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ep_bench.layer import megatron
from moe_ep_bench.layer.build import LayerPair, SingleLayer
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.phases import Rendezvous, instrumented, replaced
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.layer.scores import logits_from_scores
from moe_ep_bench.policies import Routing, RoutingContext, make_policy
from moe_ep_bench.timing.timer import PhaseRecorder, clock_for

MODEL = "deepseek-v2-lite"  # It has shared experts.
PERMUTATIONS = [Parts("grouped", permute) for permute in ("indexed", "megatron")]
EACH = 24  # tokens of a rank: splits that are known beforehand need as many on all


def layers(lab: Lab, parts: Parts, padded_to: float | None = None) -> LayerPair:
    known = {"padded_to": padded_to}
    return SingleLayer(lab.model(MODEL), torch.float32, lab.ranks.device, lab.ep_group, SEED, parts, **known).pair


def tokens(lab: Lab) -> tuple[Tensor, Tensor]:
    """This rank's hidden states and scores."""
    model, first = lab.model(MODEL), lab.ranks.rank * EACH
    whole = EACH * lab.ranks.world_size
    mine = slice(first, first + EACH)
    return lab.all_hidden(model, whole)[mine], lab.all_scores(model, whole)[mine]


def run(moe: megatron.MoELayer, hidden_TD: Tensor, scores_TE: Tensor) -> tuple[Tensor, Routing]:
    seen: list[tuple[Tensor, Tensor]] = []
    moe.router.replay_TE = logits_from_scores(scores_TE, moe.router.score_function)
    hook = moe.router.register_forward_hook(lambda module, inputs, output: seen.append(output))
    output_T1D, _ = moe(hidden_TD.unsqueeze(1))
    hook.remove()
    ((weights_TE, map_TE),) = seen
    return output_T1D[:, 0], Routing(map_TE=map_TE, weights_TE=weights_TE)


@law
def drop_and_pad_at_full_capacity_computes_what_native_does(lab: Lab) -> None:
    model = lab.model(MODEL)
    for parts in PERMUTATIONS:
        pair = layers(lab, parts, padded_to=model.num_experts / model.top_k)
        native_TD, native = run(pair.native, *tokens(lab))
        output_TD, padded = run(pair.padded, *tokens(lab))
        assert torch.equal(padded.weights_TE, native.weights_TE), parts
        assert bool(padded.map_TE.all())  # Every expert takes all tokens, most at weight 0.
        torch.testing.assert_close(output_TD, native_TD, rtol=1e-4, atol=1e-5)


@law
def drop_and_pad_drops_by_megatrons_rule_and_exchanges_no_counts(lab: Lab) -> None:
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity

    model, (hidden_TD, scores_TE) = lab.model(MODEL), tokens(lab)
    reference = DenseReference(model, hidden_TD, SEED)
    for factor in (0.4, 1.5):
        outputs = []
        for parts in PERMUTATIONS:
            pair = layers(lab, parts, padded_to=factor)
            native_TD, native = run(pair.native, hidden_TD, scores_TE)
            rows = []
            hook = pair.native.experts.register_forward_pre_hook(lambda module, inputs, rows=rows: rows.append(inputs))
            refused = AssertionError("counts are gathered")
            gather = "gather_from_sequence_parallel_region"
            with mock.patch.object(megatron.token_dispatcher, gather, side_effect=refused):
                output_TD, padded = run(pair.padded, hidden_TD, scores_TE)
            hook.remove()
            kept = native.weights_TE, native.map_TE, model.top_k, factor, "probs", True
            expected_TE, _ = apply_router_token_dropping(*kept)
            assert torch.equal(padded.weights_TE, expected_TE)
            spec = {"name": "megatron_drop", "capacity_factor": factor, "pad_to_capacity": True}
            context = RoutingContext(top_k=model.top_k, normalize=model.normalize, scale=model.routed_scale)
            ours = make_policy(spec).route(scores_TE, context)
            torch.testing.assert_close(padded.weights_TE, ours.weights_TE, rtol=2e-6, atol=0)
            capacity = get_capacity(EACH * model.top_k, model.num_experts, factor)
            assert padded.map_TE.sum(dim=0).tolist() == [capacity] * model.num_experts
            ((_, counts_L, _),) = rows
            assert counts_L.tolist() == [capacity * lab.ranks.world_size] * pair.native.num_local_experts
            assert pair.padded.token_dispatcher.cuda_sync_point == "no_sync"
            assert_close(reference.worst_error(output_TD, padded.weights_TE), TOLERANCE[torch.float32], str(parts))
            drops = not torch.equal(padded.weights_TE, native.weights_TE)
            assert drops == (not torch.equal(output_TD, native_TD))
            assert drops or factor > 1
            outputs.append(output_TD)
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)


def broken_down(lab: Lab, moe: megatron.MoELayer) -> tuple[Tensor, set[str]]:
    """The output of a breakdown iteration, and the phases that it has."""
    recorder = PhaseRecorder(clock_for(lab.ranks.device))
    with instrumented(moe, recorder, Rendezvous(lab.ep_group, lab.ranks.device)):
        recorder.begin()
        output_TD, _ = run(moe, *tokens(lab))
        recorder.end()
    return output_TD, set(recorder.times_us())


@law
def drop_and_pad_waits_before_the_transfers_alone(lab: Lab) -> None:
    pair, alone = layers(lab, PERMUTATIONS[0], padded_to=1.0), lab.ranks.world_size == 1
    waits = {name for name in broken_down(lab, pair.padded)[1] if name.startswith("wait_")}
    assert waits == (set() if alone else {"wait_dispatch", "wait_combine"})


@law
def shared_experts_beside_transfers_change_nothing_but_the_order(lab: Lab) -> None:
    steps = ("pre_forward_comm", "linear_fc1_forward_and_act", "linear_fc2_forward", "post_forward_comm", "get_output")
    for parts in PERMUTATIONS:
        before, beside = layers(lab, parts, 1.0), layers(lab, replace(parts, shared_expert_overlap=True), 1.0)
        shared, calls = beside.native.shared_experts, []
        with contextlib.ExitStack() as spies:
            for name in ("forward", *steps):
                noted = partial(note, calls, name, getattr(shared, name))
                spies.enter_context(replaced(shared, name, noted))
            for form in ("native", "policy", "padded"):
                expected_TD, _ = run(getattr(before, form), *tokens(lab))
                output_TD, _ = run(getattr(beside, form), *tokens(lab))
                assert calls == list(steps), (form, parts, calls)
                torch.testing.assert_close(output_TD, expected_TD, rtol=1e-4, atol=1e-5)
                calls.clear()
                output_TD, phases = broken_down(lab, getattr(beside, form))
                assert calls == ["forward"], (form, parts, calls)
                assert "shared" in phases
                torch.testing.assert_close(output_TD, expected_TD, rtol=1e-4, atol=1e-5)
                calls.clear()


def note(calls: list[str], name: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    calls.append(name)
    return method(*arguments, **options)


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a device: shapes or numbers that follow from values."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal"), name
        return function(*arguments, **(options or {}))


@law
def megatron_drop_is_routed_by_megatrons_own_operations_which_wait_for_nothing(lab: Lab) -> None:
    model, pair, scores_TE = lab.model(MODEL), layers(lab, PERMUTATIONS[0]), tokens(lab)[1]
    router, logits_TE = pair.policy_router, logits_from_scores(scores_TE, "softmax")
    router.context = RoutingContext(top_k=model.top_k, normalize=model.normalize, scale=model.routed_scale)
    for factor, order, pad in (
        (0.4, "probs", False),
        (1.5, "position", False),
        (1.0, "probs", True),
        (0, "probs", False),
    ):
        spec = {"name": "megatron_drop", "capacity_factor": factor, "drop_policy": order, "pad_to_capacity": pad}
        router.policy = make_policy(spec)
        with NoWaiting():
            weights_TE, map_TE = router.routing(logits_TE)
        ours = router.policy.route(scores_TE, router.context)
        assert torch.equal(map_TE.sum(dim=0), ours.map_TE.sum(dim=0)), spec
        if order == "probs":
            torch.testing.assert_close(weights_TE, ours.weights_TE, rtol=2e-6, atol=0)
        assert router.config.moe_expert_capacity_factor is None
        assert router.routing(logits_TE[:0])[1].shape == (0, model.num_experts)
    router.kernel = "torch"  # Asked for by name, ours runs: it waits.
    try:
        with NoWaiting():
            router.routing(logits_TE)
    except AssertionError:
        return
    raise RuntimeError("nothing was noticed")
