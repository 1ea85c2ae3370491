"""Hand-made cases of the policies that compute less: expert_drop, lynx, dynamic_skip, megatron_drop, pruned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from policy_cases import Arguments, assert_same, cases, distinct_scores, experts_of, few_examples, route, selected
from torch import Tensor

from moe_ep_bench.policies import RoutingContext, make_policy

# Three tokens with K = 2: experts 0 (3 pairs), 1 (2), 2 (1), 3 and 4 (none).
USED = torch.tensor([[0.5, 0.3, 0.1, 0.1, 0.0], [0.5, 0.3, 0.1, 0.1, 0.0], [0.5, 0.1, 0.3, 0.1, 0.0]])


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({}, [[0, 1], [0, 1], [0, 2]]),  # floor(0.1 * 5) = 0, but at least one: expert 3, which nobody uses
        ({"fraction": 0.4}, [[0, 1], [0, 1], [0, 2]]),  # 3 and 4
        ({"fraction": 0.6}, [[0, 1], [0, 1], [0]]),  # and 2
        ({"fraction": 0.1, "count": 4}, [[0], [0], [0]]),  # count wins
        ({"count": 0}, [[0, 1], [0, 1], [0, 2]]),
        ({"count": 5}, [[], [], []]),
    ],
)
def test_expert_drop_skips_the_least_loaded_unused_ones_first(fields: dict, experts: list[list[int]]) -> None:
    assert selected(route({"name": "expert_drop", **fields}, USED, {"top_k": 2})) == experts


def test_expert_drop_counts_the_exact_decimal_fraction() -> None:
    # 0.7 * 10 is 7 and 0.29 * 100 is 29; in doubles the latter is 28.999999999999996.
    scores_TE = torch.eye(100)
    kept = route({"name": "expert_drop", "fraction": 0.29}, scores_TE, {"top_k": 1}).map_TE.sum()
    assert int(kept) == 71


def test_expert_drop_and_lynx_close_the_lower_expert_of_equals() -> None:
    scores_TE = torch.eye(4)[[3, 1, 2]]  # experts 1, 2 and 3 once each, 0 never
    assert selected(route({"name": "expert_drop", "count": 2}, scores_TE, {"top_k": 1})) == [[3], [], [2]]
    assert selected(route({"name": "lynx", "num_dropped": 2}, scores_TE, {"top_k": 1})) == [[3], [], []]


@pytest.mark.parametrize(
    ("num_dropped", "experts"),
    [
        (0, [[0, 1], [0, 1], [0, 2]]),
        (1, [[0, 1], [0, 1], [0]]),  # expert 2, used once; unused ones do not count
        (2, [[0], [0], [0]]),
        (3, [[], [], []]),
        (9, [[], [], []]),
    ],
)
def test_lynx_closes_the_least_used_of_the_activated(num_dropped: int, experts: list[list[int]]) -> None:
    assert selected(route({"name": "lynx", "num_dropped": num_dropped}, USED, {"top_k": 2})) == experts


def test_what_is_closed_is_decided_by_all_ranks() -> None:
    policy, context = make_policy({"name": "lynx", "num_dropped": 1}), RoutingContext(top_k=1)
    mine, theirs = torch.eye(3)[[0, 0, 1]], torch.eye(3)[[1, 1, 2]]
    stats_SE = policy.batch_stats(mine, context) + policy.batch_stats(theirs, context)
    assert stats_SE.tolist() == [[2, 3, 1]]
    assert selected(policy.route(mine, context)) == [[0], [0], []]
    assert selected(policy.route(mine, context, stats_SE)) == [[0], [0], [1]]


@pytest.mark.parametrize(
    ("beta", "experts"), [(0, [0, 1, 2]), (0.25, [0, 1, 2]), (0.26, [0, 1]), (0.5, [0, 1]), (0.51, [0]), (1, [0])]
)
def test_dynamic_skip_skips_what_is_below_a_share_of_the_best(beta: float, experts: list[int]) -> None:
    assert experts_of({"name": "dynamic_skip", "beta": beta}, [0.5, 0.25, 0.125, 0.0625], top_k=3) == experts


def test_dynamic_skip_compares_scores_without_bias_and_normalises_what_stays() -> None:
    arguments = {"top_k": 2, "normalize": True, "bias_E": torch.tensor([0.0, 0.0, 1.0])}
    routing = route({"name": "dynamic_skip", "beta": 0.9}, torch.tensor([[0.6, 0.3, 0.1]]), arguments)
    assert selected(routing) == [[0]]  # the top-k is {2, 0}; its best score is expert 0's
    assert routing.weights_TE.tolist() == [[1.0, 0.0, 0.0]]


# --- megatron_drop ---------------------------------------------------------------------------------


def test_megatron_drop_orders_by_the_normalised_weight_where_token_drop_orders_by_the_score() -> None:
    # Expert 0 has one place. Token 0 scores it higher, but token 1 weighs it higher.
    scores_TE = torch.tensor([[0.4, 0.4, 0.0, 0.0], [0.3, 0.0, 0.1, 0.0]])
    arguments = {"top_k": 2, "normalize": True}
    spec = {"capacity_factor": 1.0}
    assert selected(route({"name": "megatron_drop", **spec}, scores_TE, arguments)) == [[1], [0, 2]]
    assert selected(route({"name": "token_drop", **spec}, scores_TE, arguments)) == [[0, 1], [2]]
    position = {"name": "megatron_drop", **spec, "drop_policy": "position"}
    assert selected(route(position, scores_TE, arguments)) == [[0, 1], [2]]


# --- pruned ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({"k0": 1}, [2]),
        ({"k0": 3}, [0, 2, 3]),
        ({"k0": 3, "p": 0.4}, [2]),  # 0.4 of the row's mass reaches 0.4
        ({"k0": 3, "p": 0.41}, [2, 3]),
        ({"k0": 3, "p": 0.7}, [2, 3]),
        ({"k0": 2, "p": 0.99}, [2, 3]),  # never more than k0
        ({"k0": 99}, [0, 1, 2, 3]),
    ],
)
def test_pruned_takes_as_few_as_reach_the_share(fields: dict, experts: list[int]) -> None:
    # Rows need not sum to 1: shares of 1.25 are 0.2, 0.1, 0.4, 0.3.
    assert experts_of({"name": "pruned", **fields}, [0.25, 0.125, 0.5, 0.375], top_k=2) == experts


@few_examples
@given(case=cases())
def test_what_cuts_nothing_is_top_k(case: tuple[Tensor, Arguments]) -> None:
    scores_TE, arguments = case
    top_k = route({"name": "topk"}, scores_TE, arguments)
    for spec in (
        {"name": "pruned", "k0": arguments["top_k"]},
        {"name": "oea", "k0": arguments["top_k"]},
        {"name": "dynamic_skip", "beta": 0},
        {"name": "lynx", "num_dropped": 0},
        {"name": "expert_drop", "count": 0},
        {"name": "megatron_drop", "capacity_factor": 1e6},
        {"name": "laser", "eps_high": 0, "t_fix": 0, "c": scores_TE.shape[1]},
        {"name": "xshare", "k0": arguments["top_k"], "budget": 0},
        {"name": "xshare", "k0": 0, "budget": scores_TE.shape[1]},
    ):
        assert_same(route(spec, scores_TE, arguments), top_k)


# --- Megatron-Core itself --------------------------------------------------------------------------


@pytest.mark.seam
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("drop_policy", ["probs", "position"])
@pytest.mark.parametrize("gamma", [0.3, 1.3, 100])
@pytest.mark.parametrize("pad", [False, True])
def test_megatron_drop_is_megatron_cores_rule(gamma: float, drop_policy: str, normalize: bool, pad: bool) -> None:
    from moe_ep_bench.layer import megatron  # noqa: F401 - silences the notices of the next import
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping  # isort: skip

    scores_TE, arguments = distinct_scores(53, 8, seed=1), {"top_k": 3, "normalize": normalize, "scale": 2.5}
    top_k = route({"name": "topk"}, scores_TE, arguments)
    weights_TE, map_TE = apply_router_token_dropping(top_k.weights_TE, top_k.map_TE, 3, gamma, drop_policy, pad)
    spec = {"name": "megatron_drop", "capacity_factor": gamma, "drop_policy": drop_policy, "pad_to_capacity": pad}
    routing = route(spec, scores_TE, arguments)
    # Which of equals it takes is open there: of all top-k pairs by position, of the fillers by weight.
    assert torch.equal(routing.map_TE.sum(dim=0), map_TE.sum(dim=0))
    if drop_policy == "probs":
        assert torch.equal(routing.weights_TE, weights_TE)
        assert pad or torch.equal(routing.map_TE, map_TE)


@pytest.mark.seam
@pytest.mark.parametrize(("top_k", "num_groups", "top_groups"), [(8, 8, 4), (6, 4, 2), (4, 4, 4), (2, 8, 1), (5, 4, 2)])
def test_groups_restrict_as_megatron_core_does(top_k: int, num_groups: int, top_groups: int) -> None:
    from moe_ep_bench.layer import megatron  # noqa: F401 - silences the notices of the next import
    from megatron.core.transformer.moe.moe_utils import group_limited_topk  # isort: skip

    scores_TE, bias_E = distinct_scores(200, 64, seed=2), distinct_scores(1, 64, seed=3)[0]
    arguments = {"top_k": top_k, "num_groups": num_groups, "top_groups": top_groups, "bias_E": bias_E}
    _, experts_TK = group_limited_topk(scores_TE + bias_E, top_k, 200, 64, num_groups, top_groups)
    expected_TE = torch.zeros(200, 64, dtype=torch.bool).scatter(1, experts_TK, True)
    assert torch.equal(route({"name": "topk"}, scores_TE, arguments).map_TE, expected_TE)
    # Policies that reduce a list of K start from the same K.
    assert torch.equal(route({"name": "pruned", "k0": top_k}, scores_TE, arguments).map_TE, expected_TE)
