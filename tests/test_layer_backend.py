"""What a layer is made of: experts and permutation by where it runs, the router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
import torch
from layer_laws import FUSED
from torch import Tensor

from moe_ep_bench.layer import backend, megatron
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.layer.components import BoundedDispatcher, IndexedAlltoAllDispatcher, own_dispatcher
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import megatron_config
from moe_ep_bench.layer.router import PolicyRouter
from moe_ep_bench.models import ScoreFunction, load_model, logits_from_scores, scores_from_logits
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.policies.steps import TORCH

pytestmark = pytest.mark.seam


# What is asked for, on a CPU or not, beside which Transformer Engine: experts and permutation that run, or the error.
REQUESTS = [
    ("auto", "GPU", None, ("grouped", "indexed")),
    ("decode", "GPU", None, ("decode", "none")),
    ("te", "GPU", None, "layer.experts: te needs Transformer Engine 2.7 or later, got none; expected auto, grouped or"),
    ("te", "GPU", "2.6.0", "or later, got 2.6.0"),
    ("auto", "CPU", "2.9.0+abc", ("grouped", "indexed")),
    ("sequential", "CPU", None, ("sequential", "megatron")),
    ("te", "CPU", "2.9.0", "layer.experts: te needs a GPU; expected auto, grouped or sequential"),
    ("auto", "GPU", "2.9.0+abc", ("te", "fused")),
    ("auto", "GPU", "2.5.1", ("grouped", "indexed")),
    ("auto graph", "GPU", None, ("decode", "none")),
    ("grouped graph", "GPU", None, "layer.cuda_graph: true needs layer.experts decode"),
    ("decode graph", "CPU", None, "layer.cuda_graph: true needs a GPU"),
    ("auto fused", "GPU", None, "layer.permute: fused needs Transformer Engine 2.7 or later, got none; expected"),
    ("auto fused", "GPU", "2.5.1", "layer.permute: fused needs .*, got 2.5.1"),
    ("grouped fused", "CPU", "2.9.0", "layer.permute: fused needs a GPU; expected auto or unfused"),
    ("grouped fused", "GPU", "2.9.0", ("grouped", "fused")),
    ("sequential fused", "GPU", "2.9.0", ("sequential", "fused")),
    ("auto fused", "GPU", "2.9.0", ("te", "fused")),
    ("auto unfused", "GPU", "2.9.0", ("te", "indexed")),
    ("auto unfused", "CPU", None, ("grouped", "indexed")),
    ("sequential unfused", "CPU", None, ("sequential", "megatron")),
    ("decode unfused", "GPU", None, "layer.permute: expected auto with decode experts, which permute nothing; got"),
    ("auto fused graph", "GPU", "2.9.0", "layer.permute: expected auto with decode experts"),
]


@pytest.mark.parametrize(("asked", "where", "te", "expected"), REQUESTS)
def test_every_request_and_what_runs(
    asked: str, where: str, te: str | None, expected: tuple[str, str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "version_of", lambda distribution: te)
    experts, *more = asked.split(" ")
    graph = "graph" in more
    permute = next((word for word in more if word != "graph"), "auto")
    how = {"cuda_graph": graph, "on_cpu": where == "CPU"}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            LayerBackend.choose(experts, permute, **how)
        return
    chosen = LayerBackend.choose(experts, permute, **how)
    assert (chosen.experts, chosen.permute, chosen.cuda_graph) == (*expected, graph)
    assert chosen.fuses_router(load_model("olmoe-1b-7b")) == (chosen.experts == "te")
    assert not chosen.fuses_router(load_model("deepseek-v4-flash"))


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
@pytest.mark.parametrize(
    ("chosen", "native", "policy", "fuses"),
    [
        (LayerBackend("te"), None, BoundedDispatcher, True),
        (LayerBackend("te", permutation="indexed"), IndexedAlltoAllDispatcher, IndexedAlltoAllDispatcher, False),
        (LayerBackend("grouped", permutation="fused"), None, BoundedDispatcher, True),
        (LayerBackend("grouped"), IndexedAlltoAllDispatcher, IndexedAlltoAllDispatcher, False),
        (LayerBackend("sequential"), None, BoundedDispatcher, False),
    ],
)
def test_fused_permutations_are_megatrons_own_whatever_computes_the_experts(
    chosen: LayerBackend, native: type | None, policy: type, fuses: bool
) -> None:
    """Ours stands in the dispatcher where they are by index; ``moe_permute_fusion`` is on where they are fused."""
    assert (own_dispatcher(chosen), own_dispatcher(chosen, any_pairs=True)) == (native, policy)
    model = load_model("olmoe-1b-7b")
    with mock.patch.multiple(megatron.moe_utils, create=True, **FUSED):
        config = megatron_config(model, torch.float32, 1, chosen, on_cpu=True)
    assert config.moe_permute_fusion == fuses
    assert config.moe_grouped_gemm == (chosen.experts == "te")


def test_megatrons_fused_activation_takes_no_rows_too() -> None:
    """A rank without tokens has shared experts all the same; Transformer Engine's experts go with that activation."""
    gate_up_T1F = torch.randn(3, 1, 8)
    gate_T1F, up_T1F = gate_up_T1F.chunk(2, dim=-1)
    how = None, False
    activated_T1F = megatron.mlp.bias_swiglu_impl(gate_up_T1F, *how)
    torch.testing.assert_close(activated_T1F, torch.nn.functional.silu(gate_T1F) * up_T1F)
    assert megatron.mlp.bias_swiglu_impl(gate_up_T1F[:0], *how).shape == (0, 1, 4)


# ---- The router ------------------------------------------------------------------------------------------------------


BATCH_WIDE = (
    {"name": "oea", "k0": 1},
    {"name": "expanded_drop", "capacity_factor": 1.0},
)


def routed(policy: Policy, group_size: int) -> tuple[Tensor, Tensor, int]:
    """A router's weights and map, and how many sums over ranks it asked for."""
    sums = []
    router = SimpleNamespace(
        config=SimpleNamespace(num_moe_experts=16),
        score_function="softmax",
        policy=policy,
        context=RoutingContext(top_k=2, num_ranks=1),
        ep_group=SimpleNamespace(size=lambda: group_size),
        sum_over_ranks=lambda stats_SE: (sums.append(stats_SE), stats_SE)[1],
    )
    logits_TE = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    weights_TE, map_TE = PolicyRouter.routing(router, logits_TE)
    return weights_TE, map_TE, len(sums)


@pytest.mark.parametrize("spec", BATCH_WIDE, ids=lambda spec: spec["name"])
def test_a_rank_without_others_sums_no_statistics_and_routes_alike(spec: dict[str, object]) -> None:
    """The statistics would be a launch of their own, and a compiled policy takes them in the selection's."""
    policy = make_policy(spec)
    alone, beside = routed(policy, 1), routed(policy, 2)
    assert alone[2] == 0
    has_stats = policy.by(TORCH).batch_stats(torch.rand(4, 16), RoutingContext(top_k=2)) is not None
    assert beside[2] == has_stats
    assert torch.equal(alone[0], beside[0])
    assert torch.equal(alone[1], beside[1])


@pytest.mark.parametrize("function", get_args(ScoreFunction))
def test_logits_turn_back_into_the_scores_that_they_came_of(function: ScoreFunction) -> None:
    logits_TE = 8 * torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    scores_TE = scores_from_logits(logits_TE, function)
    back_TE = logits_from_scores(scores_TE, function)
    torch.testing.assert_close(scores_from_logits(back_TE, function), scores_TE, rtol=1e-5, atol=1e-30)
    # Workloads' scores are shares of a row, down to what a softmax leaves.
    shares_TE = (6 * logits_TE).softmax(dim=1)
    back_TE = scores_from_logits(logits_from_scores(shares_TE, function), function)
    torch.testing.assert_close(back_TE, shares_TE, rtol=1e-5, atol=2e-19)


def test_float32_is_float32_where_layers_run_whatever_the_image_sets() -> None:
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 sets what is "high" here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with device_scope():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
