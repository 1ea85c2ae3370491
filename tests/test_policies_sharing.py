"""Hand-made cases of the policies that choose anew: oea, laser, load_only, xshare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from policy_cases import Arguments, assert_same, cases, few_examples, route, selected
from torch import Tensor

from moe_ep_bench.policies import RoutingContext, make_policy

# --- oea -------------------------------------------------------------------------------------------

# Preference lists: 0 1 2 3, and 3 2 1 0.
OPPOSITE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({"k0": 1}, [[0, 3], [0, 3]]),  # S = {0, 3}: each adds what the other insists on
        ({"k0": 1, "k_max": 1}, [[0], [3]]),
        ({"k0": 1, "max_rank": 3}, [[0], [3]]),  # the other's expert stands at position 4
        ({"k0": 2, "k_max": 3}, [[0, 1, 2], [1, 2, 3]]),
        ({"k0": 2, "k_max": 1}, [[0, 1], [2, 3]]),  # the base always stays
        ({"k0": 3, "max_rank": 1}, [[0, 1, 2], [1, 2, 3]]),
        ({"k0": 2, "p": 0.35, "k_max": 4}, [[0, 3], [0, 3]]),
    ],
)
def test_oea_adds_what_others_activate_in_order_of_preference(fields: dict, experts: list[list[int]]) -> None:
    assert selected(route({"name": "oea", **fields}, OPPOSITE, {"top_k": 2})) == experts


def test_rank_fill_activates_as_many_on_every_rank_by_summed_score() -> None:
    # Both tokens insist on rank 0 (experts 0 to 2). Rank 1 adds two: 4 (0.3 in all), then 3 before 5 (0.1 each).
    scores_TE = torch.tensor([[0.5, 0.1, 0.1, 0.05, 0.2, 0.05], [0.1, 0.5, 0.1, 0.05, 0.1, 0.05]])
    arguments = {"top_k": 4, "num_ranks": 2}
    assert selected(route({"name": "oea", "k0": 1}, scores_TE, arguments)) == [[0, 1], [0, 1]]
    assert selected(route({"name": "oea", "k0": 1, "rank_fill": True}, scores_TE, arguments)) == [[0, 1, 3, 4]] * 2


# --- laser and load_only ---------------------------------------------------------------------------


def laser(
    rows: list[list[float]], top_k: int = 1, arguments: Arguments | None = None, **fields: Any
) -> list[list[int]]:
    num_experts = len(rows[0])
    spec = {"name": "laser", "eps_high": 1, "t_fix": 0.5, "c": num_experts, **fields}
    return selected(route(spec, torch.tensor(rows), {"top_k": top_k, **(arguments or {})}))


NEARLY_EVEN = [0.375, 0.25, 0.25, 0.125]


def test_laser_spreads_a_plateau_over_the_least_loaded() -> None:
    # The pool is {0, 1, 2}; loads decide, ties go to the higher score and then to the lower index.
    assert laser([NEARLY_EVEN] * 4) == [[0], [1], [2], [0]]


def test_a_confident_token_takes_its_top_k_and_its_load_counts() -> None:
    confident = [0.125, 0.75, 0.125, 0.0]
    assert laser([confident, confident, NEARLY_EVEN, NEARLY_EVEN], eps_high=0.75) == [[1], [1], [0], [2]]


@pytest.mark.parametrize(("eps_high", "experts"), [(0.375, [[0], [0]]), (0.376, [[0], [1]])])
def test_confidence_is_the_share_of_the_row_sum(eps_high: float, experts: list[list[int]]) -> None:
    sigmoid_like = [4 * score for score in NEARLY_EVEN]
    assert laser([sigmoid_like] * 2, eps_high=eps_high) == experts


@pytest.mark.parametrize(("t_fix", "experts"), [(1, [0]), (0.67, [0]), (0.66, [1]), (0.5, [1]), (0.3, [3])])
def test_the_pool_is_what_scores_near_the_best(t_fix: float, experts: list[int]) -> None:
    loads = {"load_E": torch.tensor([3, 2, 2, 1])}
    assert laser([NEARLY_EVEN], t_fix=t_fix, arguments=loads) == [experts]


def test_random_trimming_may_lose_the_top_k_and_draws_from_the_generator() -> None:
    row = [0.4, 0.3, 0.2, 0.1]
    chosen = [laser([row], t_fix=0, c=1, trim="random", arguments={"seed": seed})[0] for seed in range(60)]
    assert {expert for experts in chosen for expert in experts} == {0, 1, 2, 3}
    assert chosen == [laser([row], t_fix=0, c=1, trim="random", arguments={"seed": seed})[0] for seed in range(60)]


def test_a_chunk_sees_the_loads_that_the_chunks_before_it_left() -> None:
    rows = [NEARLY_EVEN] * 5
    assert laser(rows, chunk_size=2) == [[0], [0], [1], [1], [2]]
    # Padding has no place in a chunk.
    mask = {"token_mask_T": torch.tensor([True, False, True, True, True])}
    assert laser(rows, chunk_size=2, arguments=mask) == [[0], [], [0], [1], [1]]


@pytest.mark.parametrize(
    ("layer_fraction", "experts"),
    [(0.0, [3]), (0.33, [3]), (1 / 3, [0]), (0.6, [0]), (2 / 3, [1]), (1.0, [1])],
)
def test_bands_replace_values_by_thirds_of_the_depth(layer_fraction: float, experts: list[int]) -> None:
    bands = {"early": {"t_fix": 0}, "final": {"c": 2, "t_fix": 0}}
    arguments = {"layer_fraction": layer_fraction, "load_E": torch.tensor([4, 3, 2, 1])}
    assert laser([NEARLY_EVEN], t_fix=1, bands=bands, arguments=arguments) == [experts]


@few_examples
@given(case=cases())
def test_laser_without_confidence_or_threshold_is_load_only(case: tuple[Tensor, Arguments]) -> None:
    scores_TE, arguments = case
    if arguments["top_k"] == scores_TE.shape[1]:
        return
    positive_TE = scores_TE + 2**-10  # no top-k holds a whole row
    spec = {"name": "laser", "eps_high": 1, "t_fix": 0, "c": scores_TE.shape[1]}
    assert_same(route(spec, positive_TE, arguments), route({"name": "load_only"}, positive_TE, arguments))


# --- xshare ----------------------------------------------------------------------------------------

# Sums: 0.9, 0.8, 0.7, 0.6 for experts 0 to 3; the top-1s are 0, 1 and 0.
SUMS = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2], [0.4, 0.3, 0.1, 0.2]])


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({"k0": 1, "budget": 0}, [[0, 1], [0, 1], [0, 1]]),
        ({"k0": 1, "budget": 1}, [[0, 2], [1, 2], [0, 1]]),  # in addition to S0 = {0, 1}
        ({"k0": 0, "budget": 1}, [[0], [0], [0]]),  # fewer than K in S
        ({"k0": 0, "budget": 3}, [[0, 2], [1, 2], [0, 1]]),
        ({"k0": 0, "budget": 0}, [[], [], []]),
        ({"k0": 0, "mass_threshold": 0.25}, [[0], [0], [0]]),
        ({"k0": 0, "mass_threshold": 0.5}, [[0, 1], [0, 1], [0, 1]]),
        ({"k0": 1, "mass_threshold": 0.5}, [[0, 1], [0, 1], [0, 1]]),  # S0 holds 0.57
        ({"k0": 1, "mass_threshold": 0.6}, [[0, 2], [1, 2], [0, 1]]),
    ],
)
def test_xshare_chooses_inside_what_the_batch_shares(fields: dict, experts: list[list[int]]) -> None:
    assert selected(route({"name": "xshare", **fields}, SUMS, {"top_k": 2})) == experts


def test_a_mass_threshold_that_is_just_met_is_reached() -> None:
    scores_TE = torch.tensor([[0.5, 0.25, 0.25]])
    for threshold, experts in [(0, []), (0.5, [0]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1, [0, 1, 2])]:
        spec = {"name": "xshare", "k0": 0, "mass_threshold": threshold}
        assert selected(route(spec, scores_TE, {"top_k": 3})) == [experts]


def test_every_request_adds_its_own_best() -> None:
    # Two requests of one token each, and one that is padding. Their second choices are 1 and 2.
    scores_TE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.9, 0.9, 0.9, 0.9]])
    arguments = {
        "top_k": 4,
        "request_id_T": torch.tensor([7, 3, 5]),
        "token_mask_T": torch.tensor([True, True, False]),
    }
    spec = {"name": "xshare", "k0": 1, "scope": "request"}
    assert selected(route({**spec, "request_budget": 0}, scores_TE, arguments)) == [[0, 3], [0, 3], []]
    assert selected(route({**spec, "request_budget": 1}, scores_TE, arguments)) == [[0, 1, 2, 3]] * 2 + [[]]
    one = {**arguments, "request_id_T": torch.tensor([3, 3, 5])}
    # One request: the sums of the rest are 0.5 each, so the lower index.
    assert selected(route({**spec, "request_budget": 1}, scores_TE, one)) == [[0, 1, 3], [0, 1, 3], []]
    # `budget` comes on top, by the batch's sums.
    both = {**spec, "request_budget": 0, "budget": 1}
    assert selected(route(both, scores_TE, arguments)) == [[0, 1, 3], [0, 1, 3], []]


@pytest.mark.parametrize(
    ("k0", "rank_budget", "shared"),
    [
        (0, 0, []),
        (0, 1, [0, 3]),  # one round: the best of each rank
        (0, 2, [0, 1, 3, 4]),
        (1, 1, [0, 1]),  # S0 = {0, 1} fills the budget of both ranks
        (1, 2, [0, 1, 2, 3]),  # then each rank its best remaining one: 4 = 2 * 2
        (0, 9, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_ranks_add_one_each_and_round(k0: int, rank_budget: int, shared: list[int]) -> None:
    scores_TE = torch.tensor([[0.5, 0.2, 0.1, 0.3, 0.2, 0.1], [0.2, 0.5, 0.1, 0.3, 0.2, 0.1]])
    spec = {"name": "xshare", "k0": k0, "scope": "rank", "rank_budget": rank_budget}
    experts = selected(route(spec, scores_TE, {"top_k": 6, "num_ranks": 2}))
    assert experts == [shared] * 2


@pytest.mark.parametrize("spec", [{"name": "xshare", "k0": 0, "budget": 1}, {"name": "oea", "k0": 1}])
def test_a_rank_without_tokens_shares_what_the_others_decide(spec: dict) -> None:
    policy, context = make_policy(spec), RoutingContext(top_k=2)
    stats_SE = policy.batch_stats(SUMS, context)
    nobody_SE = policy.batch_stats(SUMS[:0], context)
    assert nobody_SE.shape == stats_SE.shape
    assert not nobody_SE.any()
    assert policy.route(SUMS[:0], context, stats_SE).map_TE.shape == (0, 4)
