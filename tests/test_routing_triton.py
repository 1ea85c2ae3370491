"""Policies in Triton route like their formulation in torch: claims that Triton's interpreter can try."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from policy_cases import SPECS, Arguments, Spec, assert_same_choice, context_of, distinct_scores, fitted, random_scores
from torch import Tensor

from moe_ep_bench.kernels import capacity_triton, triton_twins
from moe_ep_bench.policies import Routing, RoutingContext, make_policy

pytestmark = pytest.mark.usefixtures("patched_once")

TOKEN_DROP: Spec = {"name": "token_drop", "capacity_factor": 1.0}
EXPANDED_DROP: Spec = {"name": "expanded_drop", "capacity_factor": 1.0}
LASER: Spec = {"name": "laser", "eps_high": 0.9, "t_fix": 0.05, "c": 6}
LOAD_ONLY: Spec = {"name": "load_only"}
BY_REQUEST: Spec = {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2}
# What each kernel does with one policy or another, the fields such that they bind with some tens of tokens.
EVERY_RULE: list[Spec] = [
    {"name": "topk"},
    {"name": "pruned", "k0": 5, "p": 0.3},
    {"name": "dynamic_skip", "beta": 0.3},
    {"name": "budget_drop", "max_lost_mass": 0.2},
    {"name": "expert_drop", "fraction": 0.3},
    {"name": "lynx", "num_dropped": 5},
    {"name": "oea", "k0": 2, "p": 0.6, "k_max": 3},
    {"name": "oea", "k0": 1, "max_rank": 20},
    {"name": "xshare", "k0": 0, "budget": 11},
    {"name": "xshare", "k0": 1, "mass_threshold": 0.7},
    {"name": "xshare", "k0": 0, "scope": "rank", "rank_budget": 4},
    {**BY_REQUEST, "budget": 3},
]

each_load_aware = pytest.mark.parametrize("spec", [LASER, LOAD_ONLY], ids=["laser", "load_only"])


def assert_routes_like_torch(spec: Spec, scores_TE: Tensor, case: Arguments) -> Routing:
    """Equal maps; weights within rounding; statistics, where there are any, equal where their sums are exact.

    The twin is called with statistics of its own making, and with none. It draws what the torch form draws.
    """
    policy = make_policy(fitted(spec, scores_TE, case))
    twin, context = triton_twins()[type(policy)], context_of(case)
    stats_SE = policy.batch_stats(scores_TE, context)
    expected = policy.route(scores_TE, context, stats_SE)
    given = [None]
    if stats_SE is not None:
        ours_SE = twin.stats(policy, scores_TE, context_of(case))
        assert ours_SE.dtype == torch.float64
        torch.testing.assert_close(ours_SE, stats_SE, rtol=1e-12, atol=1e-12)
        given.append(ours_SE)
    for one_SE in given:
        ours = context_of(case)
        assert_same_choice(twin.select(policy, scores_TE, ours, one_SE), expected)
        assert torch.equal(ours.generator.get_state(), context.generator.get_state())
    return expected


def assert_like_torch(spec: Spec, scores_TE: Tensor, **case: Any) -> Tensor:
    """The map."""
    return assert_routes_like_torch(spec, scores_TE, {"top_k": 2, **case}).map_TE


# --- Any case ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(SPECS)), ids=lambda number: make_policy(SPECS[number]).label)
def test_every_policy_routes_like_torch(number: int) -> None:
    """Each spec once, with whatever model, padding and scores its number draws."""
    draw = random.Random(number)
    num_tokens, num_experts = draw.choice([1, 5, 37]), draw.choice([8, 12, 64])
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
    token_T = torch.arange(num_tokens)
    case = {"top_k": 4, "num_ranks": 4, "rank": draw.randrange(4), "seed": number, "layer_fraction": number % 3 / 3}
    case |= {"modality_T": token_T % 3 % 2, "request_id_T": token_T % 4 * 1000 - 7, **model}
    scores_TE = random_scores(kind, num_tokens, num_experts, number)
    if "num_groups" in model:  # a group's value is a sum: keep it exact
        scores_TE = (scores_TE * 2**20).round() / 2**20
    assert_routes_like_torch(SPECS[number], scores_TE, case)


@pytest.mark.parametrize("spec", EVERY_RULE, ids=str)
def test_many_blocks_no_tokens_and_degenerate_scores_route_like_torch(spec: Spec) -> None:
    token_T = torch.arange(20)
    model = {"top_k": 8, "num_ranks": 4, "normalize": True}
    by_token = {"token_mask_T": token_T % 7 != 0, "request_id_T": token_T // 11}
    assert_like_torch(spec, random_scores("softmax", 20, 256, 3), **model, **by_token)
    one_takes_all = torch.zeros(5, 16)
    one_takes_all[:, 9] = 1.0
    denormal_TE = torch.randint(0, 5, [5, 16], generator=torch.Generator().manual_seed(4)) * 2.0**-149
    for scores_TE in (one_takes_all, denormal_TE, torch.zeros(0, 16)):
        request_id_T = torch.tensor([3, -1, 3, 0, -(2**63)])[: len(scores_TE)]
        assert_like_torch(spec, scores_TE, top_k=4, num_ranks=4, request_id_T=request_id_T)


def test_statistics_of_other_ranks_decide_as_in_torch() -> None:
    """They open experts that nobody here wants."""
    scores_TE = random_scores("softmax", 12, 32, 8)
    others_SE = torch.stack([torch.arange(32).double() % 3, torch.arange(32).double().flip(0) % 11])
    context = context_of({"top_k": 4, "num_ranks": 4, "normalize": True, "request_id_T": torch.arange(12)})
    for policy in map(make_policy, EVERY_RULE):
        twin = triton_twins()[type(policy)]
        if not hasattr(twin, "stats"):
            continue
        own_SE = twin.stats(policy, scores_TE, context)
        stats_SE = own_SE + others_SE.repeat(-(-len(own_SE) // 2), 1)[: len(own_SE)]
        expected = policy.route(scores_TE, context, stats_SE)
        assert_same_choice(twin.select(policy, scores_TE, context, stats_SE), expected)


# --- Thresholds are float64 --------------------------------------------------------------------------------


BELOW_ONE = float(torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)))
AS_FLOAT = {share: float(torch.tensor(share)) for share in (0.1, 0.7)}
THRESHOLDS = [
    # 7/10 reaches 0.7, as doubles do, and float32(0.7), which lies below, but not the next double above.
    *(({"name": "pruned", "k0": 3, "p": p}, [[7.0, 2.0, 1.0], [4.0, 3.0, 3.0]], marks)
      for p, marks in ((0.7, [1, 2]), (0.7000000000000001, [2, 3]), (AS_FLOAT[0.7], [1, 2]))),
    # float32(0.1) lies above 0.1: by it, 1 would be less than a tenth of 10.
    *(({"name": "dynamic_skip", "beta": beta}, [[10.0, 1.0, BELOW_ONE, 0.0]], [marks])
      for beta, marks in ((0.1, 2), (AS_FLOAT[0.1], 1), (0.09999999, 3), (0.0, 4))),
    *(({"name": "xshare", "k0": 0, "mass_threshold": share}, [[4.0, 3.0, 2.0, 1.0]], [marks])
      for share, marks in ((0.7, 2), (0.7000000000000001, 3), (0.4, 1), (1.0, 4), (0.0, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "rows", "marks"), THRESHOLDS)
def test_thresholds_are_compared_in_float64(spec: Spec, rows: list[list[float]], marks: list[int]) -> None:
    assert assert_like_torch(spec, torch.tensor(rows), top_k=len(rows[0])).sum(dim=1).tolist() == marks


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_laser_compares_scores_and_shares_in_float64(share: float) -> None:
    """Scores lie on either side of a threshold that in float32 would be one of them."""
    near = torch.tensor(share, dtype=torch.float32)
    around = torch.stack([torch.nextafter(near, torch.tensor(0.0)), near, torch.nextafter(near, torch.tensor(1.0))])
    # Of expert 0 and others: above t_fix of the best, or not.
    scores_TE = torch.tensor([[1.0, value, 0.01, 0.02] for value in around for _ in range(3)])
    assert_like_torch({"name": "laser", "eps_high": 1, "t_fix": share, "c": 4}, scores_TE, top_k=1)
    # A top-k that holds just about eps_high of a row sum of 1: half a row's last bit decides.
    rest = (1.0 - around.double()).float()
    lefts = rest, torch.nextafter(rest, torch.ones(3)), torch.nextafter(rest, -torch.ones(3))
    rows_TE = torch.cat([torch.stack([around, left, torch.zeros(3), torch.zeros(3)], dim=1) for left in lefts])
    rule = {"name": "laser", "eps_high": share, "t_fix": 0, "c": 4}
    assert_like_torch(rule, rows_TE.repeat_interleave(3, dim=0), top_k=1)


# --- Capacities --------------------------------------------------------------------------------------------

SCORES = {
    "several blocks": random_scores("softmax", 140, 64, 1),
    "no tokens": torch.empty(0, 64),
    "one expert takes all": distinct_scores(200, 16, 4) * 0.001 + torch.eye(16)[3],
    "neighbouring floats": (torch.ones(120, 16).view(torch.int32) + torch.arange(16) % 3).view(torch.float32),
    # Far more pairs at the threshold than a program looks at in one go.
    "equal": torch.full([200, 8], 0.125),
}


@pytest.mark.parametrize("spec", [TOKEN_DROP, EXPANDED_DROP, {**TOKEN_DROP, "granularity": "device"}], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_capacities_of_scores_of_every_kind(name: str, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_triton, "_LISTED", 128)
    monkeypatch.setattr(capacity_triton, "_SETTLED", 64)
    assert_like_torch(spec, SCORES[name], num_ranks=4, rank=1, normalize=True)


@pytest.mark.parametrize("gamma", [0.7, 123456.7])
def test_a_capacity_of_valid_tokens_is_the_exact_decimal_one(gamma: float) -> None:
    """0.7 * 360 * 2 / 8 is 63, where doubles give 62; no host counts the tokens, but for absurdly many decimals."""
    valid_T = torch.arange(400) < 360
    scores_TE = distinct_scores(400, 8, 6) * 0.001 + torch.eye(8)[0] + torch.eye(8)[5]
    map_TE = assert_like_torch({**TOKEN_DROP, "capacity_factor": gamma}, scores_TE, token_mask_T=valid_T)
    room = min(360, int(Fraction(str(gamma)) * 360 * 2 / 8))
    assert map_TE.sum(dim=0).tolist() == [room, 0, 0, 0, 0, room, 0, 0]


# --- Requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [BY_REQUEST, {**BY_REQUEST, "k0": 0, "request_budget": 10_000}], ids=str)
def test_tokens_of_a_request_may_stand_anywhere(spec: Spec) -> None:
    generator = torch.Generator().manual_seed(2)
    id_T = torch.randint(-2, 3, [26], generator=generator) * 2**61
    mask_T = (torch.rand([26], generator=generator) < 0.7) & (id_T != 0)  # one request is padding alone
    scores_TE = random_scores("sigmoid", 26, 16, 3)
    assert_like_torch(spec, scores_TE, top_k=3, request_id_T=id_T, token_mask_T=mask_T)


# --- LASER -------------------------------------------------------------------------------------------------


@each_load_aware
def test_few_tokens_and_equal_scores_of_any_size(spec: Spec) -> None:
    for mask_T in (torch.zeros(0, dtype=torch.bool), torch.tensor([True]), torch.tensor([False])):
        assert_like_torch(spec, random_scores("softmax", len(mask_T), 12, seed=0), token_mask_T=mask_T, top_k=3)
    assert_like_torch(spec, random_scores("softmax", 9, 16, seed=3), token_mask_T=torch.arange(9) % 4 != 1)
    levels_TE = random_scores("levels", 10, 8, seed=3)
    levels_TE[::2] = 0.25
    for scale in (0.0, 2.0**-140):
        assert_like_torch(spec, levels_TE * scale)


# --- Launches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (TOKEN_DROP, (32, 128), 1),
        ({**EXPANDED_DROP, "num_candidates": 4}, (32, 128), 1),
        ({**EXPANDED_DROP, "num_candidates": 4}, (33, 128), 5),
        *((rule, (16, 256), 2 if rule["name"] == "budget_drop" else 1) for rule in EVERY_RULE[:-1]),
        (BY_REQUEST, (16, 256), 2),
        (LASER, (16, 16), 3),
        (LOAD_ONLY, (16, 16), 3),
    ],
    ids=str,
)
def test_a_decode_step_is_few_launches(spec: Spec, shape: tuple[int, int], expected: int, launches: list[str]) -> None:
    policy, scores_TE = make_policy(spec), random_scores("softmax", *shape, 1)
    context = RoutingContext(top_k=4, num_ranks=4, request_id_T=torch.arange(shape[0]))
    triton_twins()[type(policy)].select(policy, scores_TE, context, None)
    assert len(launches) == expected, launches
