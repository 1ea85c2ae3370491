"""Laws of layers whose tokens are gathered rather than permuted, and of their runs kept as graphs."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import torch
from laws import law
from layer_laws import (
    BATCH_WIDE,
    LITE,
    POLICIES,
    SOME,
    TOPK,
    Lab,
    assert_right,
)
from tape_graphs import TapeClock, TapeGraph, dense_decode_experts
from torch import Tensor

from moe_ep_bench.layer import components
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.layer.graphs import CapturedRun
from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.selection import weighted

BY_MAP = LayerBackend("decode")


class TopKOnDevice(Policy):
    """Top-k for tests, without ties broken."""

    name = "topk_on_device"

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        chosen_TK = scores_TE.topk(context.top_k, dim=1).indices
        map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
        return weighted(scores_TE, map_TE, map_TE, context)


@law()
def gathered_layers_equal_the_dense_reference_and_route_like_others(lab: Lab) -> None:
    for name, specs in ((LITE, [None, *POLICIES, *BATCH_WIDE]), ("four-experts", SOME)):
        hidden_TD, scores_TE = lab.tokens(name, 60, even=True)
        reference = lab.reference(name, hidden_TD)
        for spec in specs:
            _, expected = lab.route(lab.layers(name), spec, hidden_TD, scores_TE)
            output_TD, routing = lab.route(lab.layers(name, layer_backend=BY_MAP), spec, hidden_TD, scores_TE)
            assert torch.equal(routing.map_TE, expected.map_TE), f"{name} {spec}"
            assert_right(reference, output_TD, routing, f"{name} {spec}")


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


@law(1)
def what_a_graph_reads_lives_as_long_as_the_graph(lab: Lab) -> None:
    """The next case gets a context of its own; the random numbers of this one would be given back."""
    stack, (hidden_TD, scores_TE) = lab.stack(layer_backend=BY_MAP), lab.tokens(num_tokens=60, even=True)
    with mock.patch.object(components, "decode_experts", dense_decode_experts):
        lab.route(stack.forms[None], TopKOnDevice(), hidden_TD, scores_TE)
        stack.select_forms(stack.forms)
        router, meet = stack.moe_layers[None].router, Rendezvous(lab.ep_group, lab.ranks.device)
        run = CapturedRun(stack, hidden_TD.unsqueeze(1), TapeGraph(), TapeClock(), meet, by_phase=False)
        read = [weakref.ref(one) for one in (router.context, router.replay_TE)]
        router.context, router.replay_TE = lab.context(stack.forms[None]), None
        gc.collect()
        assert all(one() is not None for one in read)
        del run
        gc.collect()
        assert read[0]() is None
