"""Policies on cases made by hand, as the papers' rules are read; ``test_policies`` holds all to their oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from policy_cases import Arguments, Spec, distinct_scores, route, selected

from moe_ep_bench.kernels.counting import top_k_loads
from moe_ep_bench.policies.steps import score_bins

TOKEN_DROP: Spec = {"name": "token_drop", "capacity_factor": 1}
EXPANDED: Spec = {"name": "expanded_drop", "capacity_factor": 99}
LASER: Spec = {"name": "laser", "eps_high": 1, "t_fix": 0.5, "c": 4}
# Three tokens with K = 2: experts 0 (3 pairs), 1 (2), 2 (1), 3 and 4 (none).
USED = [[0.5, 0.3, 0.1, 0.1, 0.0], [0.5, 0.3, 0.1, 0.1, 0.0], [0.5, 0.1, 0.3, 0.1, 0.0]]
# Preference lists: 0 1 2 3, and 3 2 1 0.
OPPOSITE = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]
NEARLY_EVEN, CONFIDENT = [0.375, 0.25, 0.25, 0.125], [0.125, 0.75, 0.125, 0.0]
BY_LAYER = {**LASER, "carry_loads": True, "t_fix": {"0": 0, "1": 1, "2": 0}, "c": {"0-1": 4, "2": 2}}
# Sums: 0.9, 0.8, 0.7, 0.6 for experts 0 to 3; the top-1s are 0, 1 and 0.
SUMS = [[0.4, 0.1, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2], [0.4, 0.3, 0.1, 0.2]]
BY_ROUNDS = [[0.5, 0.2, 0.1, 0.3, 0.2, 0.1], [0.2, 0.5, 0.1, 0.3, 0.2, 0.1]]
# Rank 1 of two hosts experts 2 and 3 of four; K = 1; gamma is large, so candidates are what is kept.
RANK_1 = {"num_ranks": 2, "rank": 1}
# Expert 0 has one place. Token 0 scores it higher, but token 1 weighs it higher.
WEIGHED, NORMALIZE = [[0.4, 0.4, 0.0, 0.0], [0.3, 0.0, 0.1, 0.0]], {"normalize": True}

# fmt: off
# (policy, scores, K, context, every token's experts)
BY_HAND: list[tuple[Spec, list[list[float]], int, Arguments, list[list[int]]]] = [
    ({"name": "topk"}, [[0.5, 0.25, 0.5, 0.5]], 2, {}, [[0, 2]]),  # ties go to the lower expert
    # What a token considers: all local experts, the best of them, the next best anywhere, and no more than two.
    *(({**EXPANDED, **more}, [[0.4, 0.3, 0.1, 0.2]], 1, RANK_1, [kept]) for more, kept in (
        ({}, [0, 2, 3]), ({"num_candidates": 1}, [0, 3]), ({"num_candidates": 1, "scope": "global"}, [0, 1]),
        ({"max_experts_per_token": 2}, [0, 3]),
    )),
    # Token 0 keeps only its best expert. Expert 1 stays empty: token 1 lost it before, and no place is filled again.
    ({**EXPANDED, "capacity_factor": 1, "max_experts_per_token": 1}, [[0.55, 0.45], [0.3, 0.4]], 1, {}, [[0], []]),
    # floor(0.1 * 2) = 0, but at least one is closed.
    ({"name": "expert_drop"}, [[0.6, 0.4], [0.6, 0.4], [0.4, 0.6]], 1, {}, [[0], [0], []]),
    ({"name": "expert_drop", "fraction": 0.6}, USED, 2, {}, [[0, 1], [0, 1], [0]]),
    # 0.29 * 100 is 29; in doubles it is 28.999999999999996.
    ({"name": "expert_drop", "fraction": 0.29}, torch.eye(100).tolist(), 1, {},
     [*[[]] * 29, *([expert] for expert in range(29, 100))]),
    # 29 of 100 pairs are within 0.29, though its double is a little less.
    ({"name": "budget_drop", "max_dropped": 0.29}, [[0.25, 0]] * 29 + [[0.5, 0]] * 71, 1, {}, [[]] * 29 + [[0]] * 71),
    ({"name": "lynx", "num_dropped": 1}, USED, 2, {}, [[0, 1], [0, 1], [0]]),  # of those that are used
    *(({"name": "dynamic_skip", "beta": beta}, [[0.5, 0.25, 0.125, 0.0625]], 3, {}, [experts])
      for beta, experts in ((0.25, [0, 1, 2]), (0.26, [0, 1]))),
    # Rows need not sum to 1: shares of 1.25 are 0.2, 0.1, 0.4, 0.3. As few as reach the share, and never more than k0.
    *(({"name": "pruned", "k0": k0, "p": p}, [[0.25, 0.125, 0.5, 0.375]], 2, {}, [experts])
      for k0, p, experts in ((3, 0.4, [2]), (3, 0.41, [2, 3]), (2, 0.99, [2, 3]), (3, 1.0, [0, 2, 3]))),
    # S = {0, 3}: each adds what the other insists on, unless it stands beyond max_rank; the base always stays.
    *(({"name": "oea", **fields}, OPPOSITE, 2, {}, experts) for fields, experts in (
        ({"k0": 1}, [[0, 3], [0, 3]]), ({"k0": 1, "max_rank": 3}, [[0], [3]]),
        ({"k0": 2, "k_max": 1}, [[0, 1], [2, 3]]),
    )),
    # The pool is {0, 1, 2}; loads decide, ties go to the higher score and then to the lower index.
    (LASER, [NEARLY_EVEN] * 4, 1, {}, [[0], [1], [2], [0]]),
    # A confident token takes its top-k, and its load counts.
    ({**LASER, "eps_high": 0.75}, [CONFIDENT] * 2 + [NEARLY_EVEN] * 2, 1, {}, [[1], [1], [0], [2]]),
    # Padding is no load; what earlier batches left is, where it is carried over.
    (LASER, [NEARLY_EVEN] * 3, 1, {"token_mask_T": torch.tensor([True, False, True]), "load_E": torch.arange(4)},
     [[0], [], [1]]),
    ({**LASER, "carry_loads": True}, [NEARLY_EVEN] * 2, 1, {"load_E": torch.tensor([2, 1, 3, 0])}, [[1], [0]]),
    # Every layer has values of its own.
    *((BY_LAYER, [NEARLY_EVEN], 1, {"layer_fraction": depth, "load_E": torch.tensor([4, 3, 2, 1])}, [[expert]])
      for depth, expert in ((0.0, 3), (1 / 3, 0), (2 / 3, 1))),
    # S0 = {0, 1}; the budget comes on top of it. S0 holds 0.57 of the mass.
    *(({"name": "xshare", "k0": 1, **fields}, SUMS, 2, {}, experts) for fields, experts in (
        ({"budget": 0}, [[0, 1]] * 3), ({"budget": 1}, [[0, 2], [1, 2], [0, 1]]),
        ({"mass_threshold": 0.5}, [[0, 1]] * 3), ({"mass_threshold": 0.6}, [[0, 2], [1, 2], [0, 1]]),
    )),
    # Two requests of one token each: each adds its best beyond its own first, 1 and 2.
    ({"name": "xshare", "k0": 1, "scope": "request", "request_budget": 1}, OPPOSITE, 4,
     {"request_id_T": torch.tensor([7, 3])}, [[0, 1, 2, 3]] * 2),
    # Ranks add one each and round: S0 = {0, 1} fills the budget of both; then each its best remaining one, 4 = 2 * 2.
    *(({"name": "xshare", "k0": 1, "scope": "rank", "rank_budget": most}, BY_ROUNDS, 6, {"num_ranks": 2}, [shared] * 2)
      for most, shared in ((1, [0, 1]), (2, [0, 1, 2, 3]))),
    # By the score, not by the normalised weight.
    (TOKEN_DROP, WEIGHED, 2, NORMALIZE, [[0, 1], [2]]),
]
# fmt: on


@pytest.mark.parametrize(("spec", "rows", "top_k", "arguments", "experts"), BY_HAND)
def test_a_rule_chooses_what_one_finds_by_hand(
    spec: Spec, rows: list[list[float]], top_k: int, arguments: Arguments, experts: list[list[int]]
) -> None:
    assert selected(route(spec, torch.tensor(rows), {"top_k": top_k, **arguments})) == experts


EQUAL = torch.full([10, 8], 0.125)  # all tokens want experts 0 and 1


def test_scores_are_binned_by_eighths_of_the_octaves_from_two_to_the_minus_16_to_one() -> None:
    scores = [0.0, 2**-17, 2**-16, 1.125 * 2**-16, 2**-15, 0.5, 0.5625, 0.999, 1.0, 3.0]
    assert score_bins(torch.tensor([scores])).tolist() == [[0, 0, 0, 1, 8, 120, 121, 127, 127, 127]]


@pytest.mark.parametrize(
    ("fields", "num_tokens", "load_E"),
    [
        ({"capacity_factor": 0.7}, 360, [63, 63]),  # 0.7 * 360 * 2 / 8, in doubles 62.99999999999999
        ({"capacity_factor": 0.7, "granularity": "device"}, 360, [126, 126]),  # 4 * 63, shared by the first 126 tokens
        ({"capacity_factor": 0.15, "granularity": "device"}, 24, [2, 1]),  # 3.6 places: a token's pairs are split
    ],
)
def test_capacity_is_the_floor_of_the_exact_decimal_product(fields: Spec, num_tokens: int, load_E: list[int]) -> None:
    routing = route({**TOKEN_DROP, **fields}, EQUAL[:1].expand(num_tokens, 8), {"top_k": 2, "num_ranks": 2})
    assert routing.map_TE.sum(dim=0).tolist() == [*load_E, 0, 0, 0, 0, 0, 0]
    # Ties go to the lower token, then to the lower expert.
    assert all(routing.map_TE[:load, expert].all() for expert, load in enumerate(load_E))


@pytest.mark.parametrize("seed", range(3))
def test_loads_are_counted_as_the_model_s_own_top_k_routes_ties_of_groups_and_experts_too(seed: int) -> None:
    levels_TE = torch.randint(0, 3, [50, 16], generator=torch.Generator().manual_seed(seed)).float()
    groups = {"num_groups": 8, "top_groups": 2}
    for how in ({}, groups):
        map_TE = route({"name": "topk"}, levels_TE.exp(), {"top_k": 4, **how}).map_TE
        loads_E = top_k_loads(levels_TE.numpy(), np.zeros(16, np.float32), 4, *how.values())
        assert loads_E.tolist() == map_TE.sum(dim=0).tolist()


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
