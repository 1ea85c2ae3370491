"""What holds for a compiled twin of a policy: it routes like the formulation in torch, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from policy_cases import Arguments, Spec, context_of, fitted
from torch import Tensor

from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.policies.steps import TORCH

Select = Callable[[Policy, Tensor, RoutingContext, Tensor | None], Routing]
Stats = Callable[[Policy, Tensor, RoutingContext], Tensor]


def assert_routes_like_torch(
    select: Select, stats: Stats | None, spec: Spec, scores_TE: Tensor, case: Arguments
) -> None:
    """Equal maps; weights within rounding; statistics, where there are any, equal where their sums are exact.

    The twin is called with statistics of its own making, with those of the torch form, and with none.
    """
    policy = make_policy(fitted(spec, scores_TE, case))
    stats_SE = policy.stats_by(TORCH, scores_TE, context_of(case))
    expected = policy.select_by(TORCH, scores_TE, context_of(case), stats_SE)
    given = [None]
    if stats is not None:
        ours_SE = stats(policy, scores_TE, context_of(case))
        assert ours_SE.dtype == torch.float64
        torch.testing.assert_close(ours_SE, stats_SE, rtol=1e-12, atol=1e-12)
        given += [ours_SE, stats_SE]
    for one_SE in given:
        assert_same_choice(select(policy, scores_TE, context_of(case), one_SE), expected)


def assert_same_choice(ours: Routing, expected: Routing) -> None:
    """The same pairs to the bit; weights within the rounding of a sum of a few float32."""
    assert ours.map_TE.dtype == torch.bool
    assert ours.weights_TE.dtype == torch.float32
    assert torch.equal(ours.map_TE, expected.map_TE)
    torch.testing.assert_close(ours.weights_TE, expected.weights_TE, rtol=2e-6, atol=1e-30)
    assert not ours.weights_TE[~ours.map_TE].any()
