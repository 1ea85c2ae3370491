"""Policies on cases made by hand, as the papers' rules are read; ``test_policies`` holds all to their oracles."""

from __future__ import annotations

import pytest
import torch
from policy_cases import (
    Arguments,
    Spec,
    distinct_scores,
    route,
    selected,
)

TOKEN_DROP: Spec = {"name": "token_drop", "capacity_factor": 1}
EXPANDED: Spec = {"name": "expanded_drop", "capacity_factor": 99}
LASER: Spec = {"name": "laser", "eps_high": 1, "t_fix": 0.5, "c": 4}
OEA: Spec = {"name": "oea", "k0": 1}
XSHARE: Spec = {"name": "xshare"}
REQUESTS: Spec = {"name": "xshare", "k0": 1, "scope": "request"}
MEGATRON: Spec = {"name": "megatron_drop", "capacity_factor": 1.0}


def chosen(spec: Spec, rows: list[list[float]], top_k: int, arguments: Arguments | None = None) -> list[list[int]]:
    """Every token's experts."""
    return selected(route(spec, torch.tensor(rows), {"top_k": top_k, **(arguments or {})}))


# Three tokens with K = 2: experts 0 (3 pairs), 1 (2), 2 (1), 3 and 4 (none).
USED = [[0.5, 0.3, 0.1, 0.1, 0.0], [0.5, 0.3, 0.1, 0.1, 0.0], [0.5, 0.1, 0.3, 0.1, 0.0]]
ALL, NONE = [[0, 1], [0, 1], [0, 2]], [[], [], []]
# Preference lists: 0 1 2 3, and 3 2 1 0.
OPPOSITE = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]
# Both tokens insist on rank 0 (experts 0 to 2). Rank 1 adds two: 4 (0.3 in all), then 3 before 5 (0.1 each).
INSISTENT = [[0.5, 0.1, 0.1, 0.05, 0.2, 0.05], [0.1, 0.5, 0.1, 0.05, 0.1, 0.05]]
NEARLY_EVEN, CONFIDENT = [0.375, 0.25, 0.25, 0.125], [0.125, 0.75, 0.125, 0.0]
SIGMOID_LIKE = [4 * score for score in NEARLY_EVEN]
LOADS, FALLING = {"load_E": torch.tensor([3, 2, 2, 1])}, {"load_E": torch.tensor([4, 3, 2, 1])}
BY_LAYER = {**LASER, "t_fix": {"0": 0, "1": 1, "2": 0}, "c": {"0-1": 4, "2": 2}}
# Sums: 0.9, 0.8, 0.7, 0.6 for experts 0 to 3; the top-1s are 0, 1 and 0.
SUMS = [[0.4, 0.1, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2], [0.4, 0.3, 0.1, 0.2]]
# Two requests of one token each, and one that is padding. Their second choices are 1 and 2.
OF_REQUESTS = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.9, 0.9, 0.9, 0.9]]
APART = {"request_id_T": torch.tensor([7, 3, 5]), "token_mask_T": torch.tensor([True, True, False])}
TOGETHER = {**APART, "request_id_T": torch.tensor([3, 3, 5])}
BY_ROUNDS = [[0.5, 0.2, 0.1, 0.3, 0.2, 0.1], [0.2, 0.5, 0.1, 0.3, 0.2, 0.1]]
# Rank 1 of two hosts experts 2 and 3 of four; K = 1; gamma is large, so candidates are what is kept.
RANK_1 = {"num_ranks": 2, "rank": 1}
# Expert 0 has one place. Token 0 scores it higher, but token 1 weighs it higher.
WEIGHED, NORMALIZE = [[0.4, 0.4, 0.0, 0.0], [0.3, 0.0, 0.1, 0.0]], {"normalize": True}

# fmt: off
# By hand: (policy, scores, K, context, every token's experts).
BY_HAND: dict[str, list[tuple[Spec, list[list[float]], int, Arguments, list[list[int]]]]] = {
    "topk: ties go to the lower expert": [
        ({"name": "topk"}, [[0.5, 0.25, 0.5, 0.5]], 2, {}, [[0, 2]]),
        ({"name": "topk"}, [[0.0] * 4], 3, {}, [[0, 1, 2]]),
    ],
    "expanded_drop: what a token considers": [
        *(({**EXPANDED, **more}, [[0.4, 0.3, 0.1, 0.2]], 1, RANK_1, [kept]) for more, kept in (
            ({}, [0, 2, 3]),  # all local experts
            ({"num_candidates": 1}, [0, 3]),  # the best local one
            ({"num_candidates": 99}, [0, 2, 3]),  # clamped to L
            ({"num_candidates": 0}, [0]),
            ({"num_candidates": 1, "scope": "global"}, [0, 1]),  # the next best anywhere
            ({"num_candidates": 2, "scope": "global"}, [0, 1, 3]),
            ({"max_experts_per_token": 2}, [0, 3]),
            ({"max_experts_per_token": 1}, [0]),
        )),
        # Expert 3 is the top-1 and the best on rank 1, so m = 1 adds nothing.
        ({**EXPANDED, "num_candidates": 1}, [[0.1, 0.2, 0.3, 0.4]], 1, RANK_1, [[3]]),
    ],
    # Token 0 keeps only its best expert. Expert 1 stays empty: token 1 lost it before.
    "expanded_drop: freed places are not refilled": [
        ({**EXPANDED, "capacity_factor": 1, "max_experts_per_token": 1}, [[0.55, 0.45], [0.3, 0.4]], 1, {}, [[0], []]),
    ],
    "expert_drop closes the least used": [
        *(({"name": "expert_drop", **fields}, USED, 2, {}, experts) for fields, experts in (
            ({}, ALL),  # floor(0.1 * 5) = 0, but at least one: expert 3, which nobody uses
            ({"fraction": 0.4}, ALL),  # 3 and 4
            ({"fraction": 0.6}, [[0, 1], [0, 1], [0]]),  # and 2
            ({"fraction": 0.1, "count": 4}, [[0], [0], [0]]),  # count wins
            ({"count": 0}, ALL),
            ({"count": 5}, NONE),
        )),
        # Experts 1, 2 and 3 once each, 0 never: the lower of equals is closed.
        ({"name": "expert_drop", "count": 2}, torch.eye(4)[[3, 1, 2]].tolist(), 1, {}, [[3], [], [2]]),
        # 0.29 * 100 is 29; in doubles it is 28.999999999999996.
        ({"name": "expert_drop", "fraction": 0.29}, torch.eye(100).tolist(), 1, {},
         [*[[]] * 29, *([expert] for expert in range(29, 100))]),
    ],
    "lynx closes the least used of those that are used": [
        *(({"name": "lynx", "num_dropped": dropped}, USED, 2, {}, experts) for dropped, experts in (
            (0, ALL), (1, [[0, 1], [0, 1], [0]]), (2, [[0], [0], [0]]), (3, NONE), (9, NONE),
        )),
        ({"name": "lynx", "num_dropped": 2}, torch.eye(4)[[3, 1, 2]].tolist(), 1, {}, [[3], [], []]),
    ],
    "dynamic_skip skips what is below a share of the best": [
        *(({"name": "dynamic_skip", "beta": beta}, [[0.5, 0.25, 0.125, 0.0625]], 3, {}, [experts])
          for beta, experts in (
              (0, [0, 1, 2]), (0.25, [0, 1, 2]), (0.26, [0, 1]), (0.5, [0, 1]), (0.51, [0]), (1, [0]))),
        # The top-k is {2, 0} by the bias; its best score, without it, is expert 0's.
        ({"name": "dynamic_skip", "beta": 0.9}, [[0.6, 0.3, 0.1]], 2, {"bias_E": torch.tensor([0.0, 0.0, 1.0])}, [[0]]),
    ],
    # Rows need not sum to 1: shares of 1.25 are 0.2, 0.1, 0.4, 0.3.
    "pruned takes as few as reach the share": [
        ({"name": "pruned", **fields}, [[0.25, 0.125, 0.5, 0.375]], 2, {}, [experts]) for fields, experts in (
            ({"k0": 1}, [2]),
            ({"k0": 3}, [0, 2, 3]),
            ({"k0": 3, "p": 0.4}, [2]),  # 0.4 of the row's mass reaches 0.4
            ({"k0": 3, "p": 0.41}, [2, 3]),
            ({"k0": 3, "p": 0.7}, [2, 3]),
            ({"k0": 2, "p": 0.99}, [2, 3]),  # never more than k0
            ({"k0": 99}, [0, 1, 2, 3]),
        )
    ],
    "oea adds what others activate in order of preference": [
        ({**OEA, **fields}, OPPOSITE, 2, {}, experts) for fields, experts in (
            ({}, [[0, 3], [0, 3]]),  # S = {0, 3}: each adds what the other insists on
            ({"k_max": 1}, [[0], [3]]),
            ({"max_rank": 3}, [[0], [3]]),  # the other's expert stands at position 4
            ({"k0": 2, "k_max": 3}, [[0, 1, 2], [1, 2, 3]]),
            ({"k0": 2, "k_max": 1}, [[0, 1], [2, 3]]),  # the base always stays
            ({"k0": 3, "max_rank": 1}, [[0, 1, 2], [1, 2, 3]]),
            ({"k0": 2, "p": 0.35, "k_max": 4}, [[0, 3], [0, 3]]),
        )
    ],
    "oea: rank_fill activates as many on every rank by summed score": [
        (OEA, INSISTENT, 4, {"num_ranks": 2}, [[0, 1], [0, 1]]),
        ({**OEA, "rank_fill": True}, INSISTENT, 4, {"num_ranks": 2}, [[0, 1, 3, 4]] * 2),
    ],
    "laser spreads a plateau over the least loaded": [
        # The pool is {0, 1, 2}; loads decide, ties go to the higher score and then to the lower index.
        (LASER, [NEARLY_EVEN] * 4, 1, {}, [[0], [1], [2], [0]]),
        # A confident token takes its top-k, and its load counts.
        ({**LASER, "eps_high": 0.75}, [CONFIDENT] * 2 + [NEARLY_EVEN] * 2, 1, {}, [[1], [1], [0], [2]]),
        # Confidence is the share of the row sum.
        ({**LASER, "eps_high": 0.375}, [SIGMOID_LIKE] * 2, 1, {}, [[0], [0]]),
        ({**LASER, "eps_high": 0.376}, [SIGMOID_LIKE] * 2, 1, {}, [[0], [1]]),
        # The pool is what scores near the best.
        *(({**LASER, "t_fix": t_fix}, [NEARLY_EVEN], 1, LOADS, [[expert]])
          for t_fix, expert in ((1, 0), (0.67, 0), (0.66, 1), (0.5, 1), (0.3, 3))),
        # A chunk sees the loads that the chunks before it left; padding has no place in a chunk.
        ({**LASER, "chunk_size": 2}, [NEARLY_EVEN] * 5, 1, {}, [[0], [0], [1], [1], [2]]),
        ({**LASER, "chunk_size": 2}, [NEARLY_EVEN] * 5, 1,
         {"token_mask_T": torch.tensor([True, False, True, True, True])}, [[0], [], [0], [1], [1]]),
        # Every layer has values of its own.
        *((BY_LAYER, [NEARLY_EVEN], 1, {"layer_fraction": depth, **FALLING}, [[expert]])
          for depth, expert in ((0.0, 3), (1 / 3, 0), (2 / 3, 1))),
    ],
    "xshare chooses inside what the batch shares": [
        ({**XSHARE, **fields}, SUMS, 2, {}, experts) for fields, experts in (
            ({"k0": 1, "budget": 0}, [[0, 1], [0, 1], [0, 1]]),
            ({"k0": 1, "budget": 1}, [[0, 2], [1, 2], [0, 1]]),  # in addition to S0 = {0, 1}
            ({"k0": 0, "budget": 1}, [[0], [0], [0]]),  # fewer than K in S
            ({"k0": 0, "budget": 3}, [[0, 2], [1, 2], [0, 1]]),
            ({"k0": 0, "budget": 0}, NONE),
            ({"k0": 0, "mass_threshold": 0.25}, [[0], [0], [0]]),
            ({"k0": 0, "mass_threshold": 0.5}, [[0, 1], [0, 1], [0, 1]]),
            ({"k0": 1, "mass_threshold": 0.5}, [[0, 1], [0, 1], [0, 1]]),  # S0 holds 0.57
            ({"k0": 1, "mass_threshold": 0.6}, [[0, 2], [1, 2], [0, 1]]),
        )
    ],
    "xshare: a share that is just met is reached": [
        ({**XSHARE, "k0": 0, "mass_threshold": share}, [[0.5, 0.25, 0.25]], 3, {}, [experts]) for share, experts in (
            (0, []), (0.5, [0]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1, [0, 1, 2]))
    ],
    "xshare: every request adds its best": [
        ({**REQUESTS, **fields}, OF_REQUESTS, 4, arguments, [shared, shared, []]) for arguments, fields, shared in (
            (APART, {"request_budget": 0}, [0, 3]),
            (APART, {"request_budget": 1}, [0, 1, 2, 3]),
            (TOGETHER, {"request_budget": 1}, [0, 1, 3]),  # the sums of the rest are 0.5 each
            (APART, {"request_budget": 0, "budget": 1}, [0, 1, 3]),  # on top, by the batch's sums
        )
    ],
    "xshare: ranks add one each and round": [
        ({**XSHARE, "k0": k0, "scope": "rank", "rank_budget": budget}, BY_ROUNDS, 6, {"num_ranks": 2}, [shared] * 2)
        for k0, budget, shared in (
            (0, 0, []),
            (0, 1, [0, 3]),  # one round: the best of each rank
            (0, 2, [0, 1, 3, 4]),
            (1, 1, [0, 1]),  # S0 = {0, 1} fills the budget of both ranks
            (1, 2, [0, 1, 2, 3]),  # then each rank its best remaining one: 4 = 2 * 2
            (0, 9, [0, 1, 2, 3, 4, 5]),
        )
    ],
    "megatron_drop orders by the normalised weight where token_drop orders by the score": [
        (MEGATRON, WEIGHED, 2, NORMALIZE, [[1], [0, 2]]),
        (TOKEN_DROP, WEIGHED, 2, NORMALIZE, [[0, 1], [2]]),
        ({**MEGATRON, "drop_policy": "position"}, WEIGHED, 2, NORMALIZE, [[0, 1], [2]]),
    ],
}
# fmt: on


@pytest.mark.parametrize("claim", BY_HAND)
def test_a_rule_chooses_what_one_finds_by_hand(claim: str) -> None:
    for spec, rows, top_k, arguments, experts in BY_HAND[claim]:
        assert chosen(spec, rows, top_k, arguments) == experts, (spec, arguments)


def test_a_bias_selects_but_does_not_weigh() -> None:
    biased = {"top_k": 2, "bias_E": torch.tensor([-1.0, 0.0, 0.0, 0.0])}
    routing = route({"name": "topk"}, torch.tensor([[0.5, 0.3, 0.2, 0.0]]), biased)
    assert routing.map_TE.tolist() == [[False, True, True, False]]
    torch.testing.assert_close(routing.weights_TE, torch.tensor([[0.0, 0.3, 0.2, 0.0]]))


EQUAL = torch.full([10, 8], 0.125)  # all tokens want experts 0 and 1


@pytest.mark.parametrize(
    ("fields", "num_tokens", "load_E"),
    [
        ({"capacity_factor": 0, "min_capacity": 2}, 10, [2, 2]),
        ({"capacity_factor": 0, "min_capacity": 2, "granularity": "device"}, 10, [4, 4]),  # 4 experts share 4 * 2
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


@pytest.mark.seam
@pytest.mark.parametrize("drop_policy", ["probs", "position"])
@pytest.mark.parametrize("gamma", [0.3, 1.3, 100])
@pytest.mark.parametrize("pad", [False, True])
def test_megatron_drop_is_megatron_cores_rule(gamma: float, drop_policy: str, pad: bool) -> None:
    from moe_ep_bench.layer import megatron  # noqa: F401 - silences the notices of the next import
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping  # isort: skip

    for normalize in (False, True):
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
