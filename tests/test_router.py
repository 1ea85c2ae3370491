"""Claims about the seam's router and the scope that layers run in, without a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor

from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.router import PolicyRouter
from moe_ep_bench.layer.scores import logits_from_scores, scores_from_logits
from moe_ep_bench.models import ScoreFunction
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.policies.steps import TORCH

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
        kernel="torch",
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
