"""The Triton form of Token Drop and Expanded Drop routes like the formulation in torch, in triton's interpreter."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import SPECS, Arguments, Spec, cases, context_of, distinct_scores, random_scores
from torch import Tensor
from twin_laws import assert_routes_like_torch, assert_same_choice

from moe_ep_bench.kernels.capacity_triton import capacity, route_and_count
from moe_ep_bench.kernels.standings_triton import largest_below
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.policies.capacity import expert_capacity

OURS = [spec for spec in SPECS if spec["name"] in ("token_drop", "expanded_drop")]
pytestmark = pytest.mark.usefixtures("patched_once")

TOKEN_DROP = {"name": "token_drop", "capacity_factor": 1.0}
EXPANDED_DROP = {"name": "expanded_drop", "capacity_factor": 1.0}


def check(spec: Spec, scores_TE: Tensor, case: Arguments) -> None:
    assert_routes_like_torch(capacity, None, spec, scores_TE, case)


@settings(max_examples=40)
@given(spec=st.sampled_from(OURS), case=cases())
def test_it_routes_like_torch(spec: Spec, case: tuple[Tensor, Arguments]) -> None:
    check(spec, *case)


@pytest.mark.parametrize("number", range(len(OURS)))
def test_every_rule_routes_like_torch(number: int) -> None:
    """Each spec once, with whatever model, padding and scores its number draws."""
    draw = random.Random(number)
    num_tokens, num_experts = draw.choice([1, 5, 37, 70]), draw.choice([8, 12, 64])
    generator = torch.Generator().manual_seed(number)
    model: dict[str, Any] = draw.choice(
        [
            {},
            {"normalize": True, "scale": 2.5, "bias_E": torch.randint(-4, 5, [num_experts], generator=generator) / 4},
            {"num_groups": 4, "top_groups": 2},
            {"token_mask_T": torch.rand(num_tokens, generator=generator) < 0.7},
        ]
    )
    kind = draw.choice(["softmax", "levels", "signed zeros", "equal", "zero rows"])
    image_T = torch.arange(num_tokens) % 3 % 2
    case = {"top_k": 4, "num_ranks": 4, "rank": draw.randrange(4), "modality_T": image_T, "seed": number, **model}
    check(OURS[number], random_scores(kind, num_tokens, num_experts, number), case)


SCORES = {
    "several blocks": random_scores("softmax", 301, 64, 1),
    "no tokens": torch.empty(0, 64),
    "levels": random_scores("levels", 150, 64, 2),
    "denormals": distinct_scores(90, 16, 3) * 1e-40,
    "one expert takes all": distinct_scores(200, 16, 4) * 0.001 + torch.eye(16)[3],
    "neighbouring floats": (torch.ones(120, 16).view(torch.int32) + torch.arange(16) % 3).view(torch.float32),
    # Far more pairs at the threshold than a program looks at in one go.
    "thousands of equals": torch.full([2500, 8], 0.125),
    "large and small": 2.0 ** torch.arange(-126, 126, 2).repeat(16).view(126, 16),
}


@pytest.mark.parametrize("spec", [TOKEN_DROP, EXPANDED_DROP, {**TOKEN_DROP, "granularity": "device"}], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_it_routes_scores_of_every_kind_like_torch(name: str, spec: Spec) -> None:
    scores_TE = SCORES[name]
    if spec["name"] == "expanded_drop" and name == "thousands of equals":
        scores_TE = scores_TE[:300]
    check(spec, scores_TE, {"top_k": 2, "num_ranks": 4, "rank": 1, "normalize": True})


@pytest.mark.parametrize("num_experts", [128, 160, 256])
def test_it_takes_wide_models_with_groups(num_experts: int) -> None:
    scores_TE = random_scores("sigmoid", 20, num_experts, 5)
    scores_TE = (scores_TE * 2**20).round() / 2**20  # a group's value is a sum: keep it exact
    bias_E = torch.arange(num_experts) % 7 / 8
    case = {"top_k": 8, "num_ranks": 8, "num_groups": 8, "top_groups": 4, "bias_E": bias_E, "normalize": True}
    most = 6 if num_experts == 128 else None  # a token's candidates are compared pair by pair: slow to interpret
    check({**EXPANDED_DROP, "capacity_factor": 0.6, "max_experts_per_token": most}, scores_TE, case)
    check({**TOKEN_DROP, "capacity_factor": 0.6}, scores_TE, {**case, "top_k": 16})


@pytest.mark.parametrize("gamma", [0.7, 1.1, 0.12345678901234567, 123456.7])
def test_a_capacity_of_valid_tokens_is_the_exact_decimal_one(gamma: float) -> None:
    """0.7 * 360 * 2 / 8 is 63, where doubles give 62; no host counts the tokens, but for absurdly many decimals."""
    valid_T = torch.arange(400) < 360
    scores_TE = distinct_scores(400, 8, 6) * 0.001 + torch.eye(8)[0] + torch.eye(8)[5]
    routing, counts = route_and_count(
        make_policy({**TOKEN_DROP, "capacity_factor": gamma}), scores_TE, RoutingContext(top_k=2, token_mask_T=valid_T)
    )
    room = min(360, expert_capacity(gamma, 360, 2, 8))
    assert counts.load_E.tolist() == [room, 0, 0, 0, 0, room, 0, 0]
    assert routing.map_TE.sum(dim=0).tolist() == counts.load_E.tolist()


@pytest.mark.parametrize("spec", [TOKEN_DROP, {**EXPANDED_DROP, "max_experts_per_token": 3}], ids=str)
def test_loads_and_dropped_pairs_fall_out(spec: Spec) -> None:
    scores_TE, context = random_scores("softmax", 150, 32, 7), RoutingContext(top_k=4, num_ranks=4, rank=2)
    routing, counts = route_and_count(make_policy(spec), scores_TE, context)
    top_k_TE = make_policy({"name": "topk"}).route(scores_TE, context).map_TE
    assert torch.equal(counts.load_E.long(), routing.map_TE.sum(dim=0))
    assert int(counts.num_dropped) == int((top_k_TE & ~routing.map_TE).sum()) > 0


@pytest.mark.parametrize("spec", [TOKEN_DROP, {**EXPANDED_DROP, "num_candidates": 4}], ids=str)
def test_a_decode_step_is_one_launch_and_a_longer_batch_five(spec: Spec, launches: list[str]) -> None:
    for num_tokens, expected in ((32, ["_drop"]), (33, ["_offer", "_cut", "_gather", "_settle", "_write"])):
        launches.clear()
        capacity(make_policy(spec), random_scores("softmax", num_tokens, 128, 1), RoutingContext(top_k=8), None)
        assert launches == expected


@given(number=st.fractions(0, 20, max_denominator=10**9), most=st.integers(1, 60))
@settings(max_examples=200)
def test_a_capacity_per_token_may_be_a_smaller_fraction(number: Fraction, most: int) -> None:
    """For every number of tokens up to the most it gives the same capacity, and no larger fraction is below it."""
    near = largest_below(number, most)
    assert near.denominator <= most
    assert [n * near // 1 for n in range(most + 1)] == [n * number // 1 for n in range(most + 1)]
    assert near == max(Fraction(n * number // 1, n) for n in range(1, most + 1))


def test_repeated_runs_are_identical() -> None:
    scores_TE = random_scores("levels", 200, 16, 8)
    runs = [capacity(make_policy(EXPANDED_DROP), scores_TE, RoutingContext(top_k=4, num_ranks=4), None) for _ in "ab"]
    assert_same_choice(*runs)


def test_strided_scores_are_read_as_they_are() -> None:
    scores_TE = distinct_scores(16, 50, 9).T
    assert not scores_TE.is_contiguous()
    check(TOKEN_DROP, scores_TE, {"top_k": 2})


def test_a_wrong_threshold_would_be_seen() -> None:
    """The law above can fail: one pair more or less is another map."""
    scores_TE = random_scores("softmax", 64, 16, 10)
    tight, loose = (make_policy({**TOKEN_DROP, "capacity_factor": gamma}) for gamma in (0.5, 0.75))
    context = RoutingContext(top_k=4)
    with pytest.raises(AssertionError):
        assert_same_choice(capacity(tight, scores_TE, context, None), loose.route(scores_TE, context))


def test_randomness_is_drawn_as_the_policy_draws_it() -> None:
    """Two routes in a row from one generator: the second continues where the first stopped."""
    policy = make_policy({**TOKEN_DROP, "metric": "random", "capacity_factor": 0.5})
    scores_TE = random_scores("softmax", 50, 8, 11)
    contexts = [context_of({"top_k": 2, "seed": 5}) for _ in range(2)]
    for _ in range(2):
        ours = capacity(policy, scores_TE, contexts[0], None)
        assert_same_choice(ours, policy.route(scores_TE, contexts[1]))
