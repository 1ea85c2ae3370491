"""Hand-made cases and laws of topk, token_drop and expanded_drop."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import capacity_groups
from policy_cases import (
    METRICS,
    MODALITIES,
    Arguments,
    Spec,
    assert_same,
    cases,
    distinct_scores,
    every_granularity,
    experts_of,
    few_examples,
    random_scores,
    route,
)
from torch import Tensor

from moe_ep_bench.policies import Routing

# --- topk ------------------------------------------------------------------------------------------


def test_topk_ties_go_to_the_lower_expert() -> None:
    assert experts_of({"name": "topk"}, [0.5, 0.25, 0.5, 0.5], top_k=2) == [0, 2]
    assert experts_of({"name": "topk"}, [0.0, 0.0, 0.0, 0.0], top_k=3) == [0, 1, 2]


def test_the_bias_selects_but_does_not_weigh() -> None:
    scores_TE = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    routing = route({"name": "topk"}, scores_TE, {"top_k": 2, "bias_E": torch.tensor([-1.0, 0.0, 0.0, 0.0])})
    assert routing.map_TE.tolist() == [[False, True, True, False]]
    torch.testing.assert_close(routing.weights_TE, torch.tensor([[0.0, 0.3, 0.2, 0.0]]))


def test_normalised_weights_sum_to_the_scale_and_zero_rows_to_zero() -> None:
    scores_TE = torch.tensor([[0.6, 0.2, 0.1], [0.0, 0.0, 0.0]])
    routing = route({"name": "topk"}, scores_TE, {"top_k": 2, "normalize": True, "scale": 2.0})
    torch.testing.assert_close(routing.weights_TE, torch.tensor([[1.5, 0.5, 0.0], [0.0, 0.0, 0.0]]))
    assert routing.map_TE.tolist() == [[True, True, False], [True, True, False]]


# --- token_drop ------------------------------------------------------------------------------------


@every_granularity
@pytest.mark.parametrize("metric", METRICS)
@few_examples
@given(case=cases())
def test_a_huge_capacity_drops_nothing(metric: str, granularity: str, case: tuple[Tensor, Arguments]) -> None:
    scores_TE, arguments = case
    spec = {"name": "token_drop", "capacity_factor": 1e6, "metric": metric, "granularity": granularity}
    assert_same(route(spec, scores_TE, arguments), route({"name": "topk"}, scores_TE, arguments))


def test_min_capacity_is_kept_where_the_factor_gives_less() -> None:
    # All 10 tokens want experts 0 and 1. Devices of four experts share 4 * 2 places.
    scores_TE = torch.full([10, 8], 0.125)
    spec = {"name": "token_drop", "capacity_factor": 0, "min_capacity": 2}
    by_expert = route(spec, scores_TE, {"top_k": 2, "num_ranks": 2})
    by_device = route({**spec, "granularity": "device"}, scores_TE, {"top_k": 2, "num_ranks": 2})
    assert by_expert.map_TE.sum(dim=0).tolist() == [2, 2, 0, 0, 0, 0, 0, 0]
    assert by_device.map_TE.sum(dim=0).tolist() == [4, 4, 0, 0, 0, 0, 0, 0]


def test_capacity_is_the_floor_of_the_exact_decimal_product() -> None:
    # 0.7 * 360 * 2 / 8 is 63; in doubles it is 62.99999999999999.
    scores_TE = torch.full([360, 8], 0.125)
    routing = route({"name": "token_drop", "capacity_factor": 0.7}, scores_TE, {"top_k": 2})
    assert routing.map_TE.sum(dim=0).tolist() == [63, 63, 0, 0, 0, 0, 0, 0]
    # On a device of 4 experts: 4 * 63, shared by the first 126 tokens.
    spec = {"name": "token_drop", "capacity_factor": 0.7, "granularity": "device"}
    routing = route(spec, scores_TE, {"top_k": 2, "num_ranks": 2})
    assert routing.map_TE.sum(dim=0).tolist() == [126, 126, 0, 0, 0, 0, 0, 0]


# Four tokens want expert 0 of four; gamma 2 leaves it floor(2 * 4 * 1 / 4) = 2 places.
@pytest.mark.parametrize(
    ("metric", "kept"),
    [("score", [1, 2]), ("order", [0, 1]), ("reverse_order", [2, 3])],
)
def test_each_metric_keeps_its_best(metric: str, kept: list[int]) -> None:
    scores_TE = torch.tensor([[0.5, 0, 0, 0], [0.7, 0, 0, 0], [0.6, 0, 0, 0], [0.4, 0, 0, 0]])
    spec = {"name": "token_drop", "capacity_factor": 2, "metric": metric}
    assert route(spec, scores_TE, {"top_k": 1}).map_TE[:, 0].nonzero().flatten().tolist() == kept


def test_ties_go_to_the_lower_token_then_to_the_lower_expert() -> None:
    # Equal scores: all four tokens want experts 0 and 1, on one device of floor(2 * 0.625 * 4 * 2 / 4) = 2 places.
    scores_TE = torch.full([4, 4], 0.25)
    spec = {"name": "token_drop", "capacity_factor": 0.625, "granularity": "device"}
    routing = route(spec, scores_TE, {"top_k": 2, "num_ranks": 2})
    assert routing.map_TE.nonzero().tolist() == [[0, 0], [0, 1]]
    # An odd capacity splits a token's pairs: floor(2 * 0.8 * 4 * 2 / 4) = 3.
    routing = route({**spec, "capacity_factor": 0.8}, scores_TE, {"top_k": 2, "num_ranks": 2})
    assert routing.map_TE.nonzero().tolist() == [[0, 0], [0, 1], [1, 0]]


def test_random_keeps_different_tokens_for_different_seeds_and_the_same_for_the_same() -> None:
    scores_TE = torch.full([64, 4], 0.25)
    spec = {"name": "token_drop", "capacity_factor": 1, "metric": "random"}
    kept = [tuple(route(spec, scores_TE, {"top_k": 1, "seed": seed}).map_TE[:, 0].tolist()) for seed in (1, 1, 2)]
    assert kept[0] == kept[1] != kept[2]
    assert sum(kept[0]) == 16


@every_granularity
@pytest.mark.parametrize("metric", METRICS)
@few_examples
@given(case=cases())
def test_more_capacity_never_loses_a_pair(metric: str, granularity: str, case: tuple[Tensor, Arguments]) -> None:
    scores_TE, arguments = case
    spec = {"name": "token_drop", "metric": metric, "granularity": granularity}
    kept = [route({**spec, "capacity_factor": gamma}, scores_TE, arguments).map_TE for gamma in (0.2, 0.5, 1, 2)]
    assert not any((less & ~more).any() for less, more in itertools.pairwise(kept))


@every_granularity
@pytest.mark.parametrize("name", ["token_drop", "expanded_drop"])
@pytest.mark.parametrize("modality", MODALITIES)
@few_examples
@given(num_tokens=st.integers(0, 50), seed=st.integers(0, 2**16))
def test_score_is_invariant_to_token_order(
    name: str, granularity: str, modality: str, num_tokens: int, seed: int
) -> None:
    scores_TE = distinct_scores(num_tokens, 16, seed)
    generator = torch.Generator().manual_seed(seed)
    arguments = {
        "top_k": 4,
        "num_ranks": 4,
        "rank": 1,
        "normalize": True,
        "modality_T": torch.randint(0, 2, [num_tokens], generator=generator),
        "token_mask_T": torch.rand([num_tokens], generator=generator) < 0.8,
    }
    spec = {"name": name, "capacity_factor": 0.7, "granularity": granularity, "modality": modality}
    routing = route(spec, scores_TE, arguments)
    order = torch.randperm(num_tokens, generator=generator)
    permuted = {**arguments, **{key: arguments[key][order] for key in ("modality_T", "token_mask_T")}}
    shuffled = route(spec, scores_TE[order], permuted)
    assert_same(shuffled, Routing(map_TE=routing.map_TE[order], weights_TE=routing.weights_TE[order]))


@every_granularity
@pytest.mark.parametrize("name", ["token_drop", "expanded_drop"])
@pytest.mark.parametrize("gamma", [0.3, 0.7, 1, 1.1, 2.5])
def test_capacities_of_all_source_ranks_bound_the_global_load(name: str, granularity: str, gamma: float) -> None:
    """arXiv 2503.05066, Eq. 5: max load <= gamma * mean load, with no word between the ranks."""
    num_experts, num_ranks, top_k = 16, 4, 3
    tokens_R = [37, 0, 101, 5]  # ranks may hold uneven numbers of tokens
    load_E = torch.zeros(num_experts, dtype=torch.int64)
    for rank, num_tokens in enumerate(tokens_R):
        scores_TE = random_scores("softmax", num_tokens, num_experts, seed=11)  # one seed: all want the same experts
        spec = {"name": name, "capacity_factor": gamma, "granularity": granularity}
        load_E += route(spec, scores_TE, {"top_k": top_k, "num_ranks": num_ranks, "rank": rank}).map_TE.sum(dim=0)
    mean_load = Fraction(sum(tokens_R) * top_k, num_experts)
    if granularity == "expert":
        assert int(load_E.max()) <= Fraction(str(gamma)) * mean_load
    else:
        load_R = load_E.view(num_ranks, -1).sum(dim=1)
        assert int(load_R.max()) <= Fraction(str(gamma)) * mean_load * (num_experts // num_ranks)


@every_granularity
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("modality", "dropped_first"), [("image_first", 1), ("text_first", 0)])
@few_examples
@given(case=cases())
def test_a_modality_is_dropped_to_the_last_pair_before_the_other_loses_one(
    metric: str, granularity: str, modality: str, dropped_first: int, case: tuple[Tensor, Arguments]
) -> None:
    scores_TE, arguments = case
    spec = {"name": "token_drop", "capacity_factor": 0.5, "metric": metric, "granularity": granularity}
    kept_TE = route({**spec, "modality": modality}, scores_TE, arguments).map_TE
    dropped_TE = route({"name": "topk"}, scores_TE, arguments).map_TE & ~kept_TE
    is_first_T = arguments["modality_T"] == dropped_first
    for group in capacity_groups(granularity, scores_TE.shape[1], arguments["num_ranks"]):
        assert not (kept_TE[is_first_T][:, group].any() and dropped_TE[~is_first_T][:, group].any())


# --- expanded_drop ---------------------------------------------------------------------------------


@every_granularity
@pytest.mark.parametrize("metric", METRICS)
@few_examples
@given(case=cases())
def test_no_further_candidates_make_expanded_drop_token_drop(
    metric: str, granularity: str, case: tuple[Tensor, Arguments]
) -> None:
    scores_TE, arguments = case
    rule = {"capacity_factor": 0.7, "metric": metric, "granularity": granularity}
    token_drop = route({"name": "token_drop", **rule}, scores_TE, arguments)
    for scope in ("local", "global"):
        spec = {"name": "expanded_drop", **rule, "num_candidates": 0, "scope": scope}
        assert_same(route(spec, scores_TE, arguments), token_drop)


# Rank 1 of two hosts experts 2 and 3 of four; K = 1; gamma is large, so candidates are what is kept.
@pytest.mark.parametrize(
    ("expansion", "kept"),
    [
        ({}, [0, 2, 3]),  # all local experts
        ({"num_candidates": 1}, [0, 3]),  # the best local one
        ({"num_candidates": 99}, [0, 2, 3]),  # clamped to L
        ({"num_candidates": 0}, [0]),
        ({"num_candidates": 1, "scope": "global"}, [0, 1]),  # the next best anywhere
        ({"num_candidates": 2, "scope": "global"}, [0, 1, 3]),
        ({"max_experts_per_token": 2}, [0, 3]),
        ({"max_experts_per_token": 1}, [0]),
    ],
)
def test_what_a_token_considers(expansion: Spec, kept: list[int]) -> None:
    row = [0.4, 0.3, 0.1, 0.2]
    spec = {"name": "expanded_drop", "capacity_factor": 99, **expansion}
    assert experts_of(spec, row, top_k=1, num_ranks=2, rank=1) == kept


def test_top_k_experts_on_the_own_rank_count_among_its_m_best() -> None:
    # Expert 3 is the top-1 and the best on rank 1, so m = 1 adds nothing.
    spec = {"name": "expanded_drop", "capacity_factor": 99, "num_candidates": 1}
    assert experts_of(spec, [0.1, 0.2, 0.3, 0.4], top_k=1, num_ranks=2, rank=1) == [3]


def test_places_freed_by_the_limit_per_token_are_not_refilled() -> None:
    # As above, then token 0 keeps only its best expert. Expert 1 stays empty: token 1 lost it before.
    scores_TE = torch.tensor([[0.55, 0.45], [0.3, 0.4]])
    spec = {"name": "expanded_drop", "capacity_factor": 1, "max_experts_per_token": 1}
    assert route(spec, scores_TE, {"top_k": 1}).map_TE.tolist() == [[True, False], [False, False]]
