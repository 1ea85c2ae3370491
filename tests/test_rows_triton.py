"""Claims about the Triton form of policies whose tokens choose by themselves, or among experts that a batch opens.

They run in Triton's interpreter. What is right is the formulation in torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from policy_cases import SPECS, Spec, cases, context_of, few_examples, random_scores
from torch import Tensor
from twin_laws import Select, Stats, assert_routes_like_torch, assert_same_choice

from moe_ep_bench.kernels import budget_triton, requests_triton, rows_triton, sets_triton
from moe_ep_bench.policies import make_policy

ALONE = ("topk", "pruned", "dynamic_skip")
TOGETHER = ("budget_drop", "expert_drop", "lynx", "oea", "xshare")
OURS = [spec for spec in SPECS if spec["name"] in ALONE + TOGETHER]

# Every rule once, its fields such that they bind with some tens of tokens.
EVERY_RULE: list[Spec] = [
    {"name": "topk"},
    {"name": "pruned", "k0": 5, "p": 0.3},
    {"name": "dynamic_skip", "beta": 0.3},
    {"name": "budget_drop", "max_lost_mass": 0.2},
    {"name": "expert_drop", "fraction": 0.3},
    {"name": "lynx", "num_dropped": 5},
    {"name": "oea", "k0": 2, "p": 0.6, "k_max": 3},
    {"name": "oea", "k0": 1, "rank_fill": True, "max_rank": 20},
    {"name": "xshare", "k0": 0, "budget": 11},
    {"name": "xshare", "k0": 1, "mass_threshold": 0.7},
    {"name": "xshare", "k0": 0, "scope": "rank", "rank_budget": 4},
    {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2, "budget": 3},
]

every_rule = pytest.mark.parametrize("spec", EVERY_RULE, ids=str)


pytestmark = pytest.mark.usefixtures("patched_once")


def twin(spec: Spec) -> tuple[Select, Stats | None]:
    name = spec["name"]
    if name in ALONE:
        return getattr(rows_triton, name), None
    module = budget_triton if name == "budget_drop" else sets_triton
    return getattr(module, name), getattr(module, f"{name}_stats")


def assert_like_torch(spec: Spec, scores_TE: Tensor, **context: Any) -> None:
    assert_routes_like_torch(*twin(spec), spec, scores_TE, context)


# --- Like torch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", OURS, ids=lambda spec: make_policy(spec).label.replace(" ", ","))
@settings(few_examples, max_examples=2)
@given(case=cases(most_experts=64, most_tokens=16))
def test_every_policy_routes_like_torch(spec, case):
    assert_routes_like_torch(*twin(spec), spec, *case)


@every_rule
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(20, 256)])
def test_many_blocks_route_like_torch(spec, num_tokens, num_experts):
    scores_TE = random_scores("softmax", num_tokens, num_experts, 3)
    mask_T = torch.arange(num_tokens) % 7 != 0
    request_id_T = torch.arange(num_tokens) // 11
    assert_like_torch(
        spec, scores_TE, top_k=8, num_ranks=4, normalize=True, token_mask_T=mask_T, request_id_T=request_id_T
    )


@every_rule
@pytest.mark.parametrize("num_tokens", [0])
def test_no_token_and_one_token_route_like_torch(spec, num_tokens):
    scores_TE = random_scores("softmax", num_tokens, 16, 2)
    assert_like_torch(spec, scores_TE, top_k=2, num_ranks=2, request_id_T=torch.full([num_tokens], -(2**63)))


@every_rule
def test_degenerate_scores_route_like_torch(spec):
    one_takes_all = torch.zeros(5, 16)
    one_takes_all[:, 9] = 1.0
    denormal_TE = torch.randint(0, 5, [5, 16], generator=torch.Generator().manual_seed(4)) * 2.0**-149
    for scores_TE in (one_takes_all, denormal_TE):
        assert_like_torch(spec, scores_TE, top_k=4, num_ranks=4, request_id_T=torch.tensor([3, -1, 3, 0, -1]))


def test_statistics_of_other_ranks_decide_as_in_torch():
    """They open experts that nobody here wants."""
    scores_TE = random_scores("softmax", 12, 32, 8)
    others_SE = torch.stack([torch.arange(32).double() % 3, torch.arange(32).double().flip(0) % 11])
    context = context_of({"top_k": 4, "num_ranks": 4, "normalize": True, "request_id_T": torch.arange(12)})
    for spec in EVERY_RULE:
        select, stats = twin(spec)
        if stats is None:
            continue
        policy = make_policy(spec)
        own_SE = stats(policy, scores_TE, context)
        stats_SE = own_SE + others_SE.repeat(-(-len(own_SE) // 2), 1)[: len(own_SE)]
        expected = policy.route(scores_TE, context, stats_SE)
        assert_same_choice(select(policy, scores_TE, context, stats_SE), expected)


# --- Thresholds are float64 --------------------------------------------------------------------------------


def test_pruned_compares_shares_with_p_in_float64():
    """7/10 reaches 0.7, as doubles do; it reaches float32(0.7), which lies below, and not the next double above."""
    scores_TE = torch.tensor([[7.0, 2.0, 1.0], [4.0, 3.0, 3.0]])
    for p, marks in ((0.7, [1, 2]), (0.7000000000000001, [2, 3]), (float(torch.tensor(0.7)), [1, 2])):
        spec = {"name": "pruned", "k0": 3, "p": p}
        assert_like_torch(spec, scores_TE, top_k=3)
        routing = rows_triton.pruned(make_policy(spec), scores_TE, context_of({"top_k": 3}), None)
        assert routing.map_TE.sum(dim=1).tolist() == marks


def test_dynamic_skip_compares_with_beta_in_float64():
    """float32(0.1) lies above 0.1: by it, 1 would be less than a tenth of 10."""
    below_one = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    scores_TE = torch.tensor([[10.0, 1.0, below_one, 0.0]])
    for beta, marks in ((0.1, 2), (torch.tensor(0.1).item(), 1), (0.09999999, 3), (0.0, 4)):
        spec = {"name": "dynamic_skip", "beta": beta}
        assert_like_torch(spec, scores_TE, top_k=4)
        routing = rows_triton.dynamic_skip(make_policy(spec), scores_TE, context_of({"top_k": 4}), None)
        assert routing.map_TE.sum() == marks


def test_xshare_compares_the_share_of_mass_in_float64():
    scores_TE = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    for threshold, num_open in ((0.7, 2), (0.7000000000000001, 3), (0.4, 1), (1.0, 4), (0.0, 0)):
        spec = {"name": "xshare", "k0": 0, "mass_threshold": threshold}
        assert_like_torch(spec, scores_TE, top_k=4)
        routing = sets_triton.xshare(make_policy(spec), scores_TE, context_of({"top_k": 4}), None)
        assert routing.map_TE.sum() == num_open


# --- Requests ----------------------------------------------------------------------------------------------

REQUESTS: list[Spec] = [
    {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2},
    {"name": "xshare", "k0": 0, "scope": "request", "request_budget": 10_000},
]


@pytest.mark.parametrize("spec", REQUESTS, ids=str)
def test_tokens_of_a_request_may_stand_anywhere(spec):
    generator = torch.Generator().manual_seed(2)
    id_T = torch.randint(0, 5, [48], generator=generator) * 2**61 - 2**62
    mask_T = (torch.rand([48], generator=generator) < 0.7) & (id_T != 0)  # one request is padding alone
    assert_like_torch(spec, random_scores("softmax", 48, 16, 3), top_k=3, request_id_T=id_T, token_mask_T=mask_T)


@pytest.mark.parametrize("spec", REQUESTS, ids=str)
def test_sorted_requests_route_like_torch(spec, monkeypatch):
    monkeypatch.setattr(requests_triton, "_MOST_UNSORTED", 10)
    monkeypatch.setattr(requests_triton, "_CHUNK", 4)  # some chunks a request, of some tiles each
    generator = torch.Generator().manual_seed(3)
    id_T = torch.randint(-1, 2, [26], generator=generator) * 2**61
    mask_T = (torch.rand([26], generator=generator) < 0.8) & (id_T != 0)
    scores_TE = random_scores("sigmoid", 26, 512, 4)
    for token_mask_T in (None, mask_T):
        assert_like_torch(spec, scores_TE, top_k=3, request_id_T=id_T, token_mask_T=token_mask_T)


# --- Launches ----------------------------------------------------------------------------------------------


@every_rule
def test_a_decode_step_is_one_launch_and_with_requests_two(spec, launches):
    select, _ = twin(spec)
    case = {"top_k": 4, "num_ranks": 4, "request_id_T": torch.arange(16)}
    launches.clear()
    select(make_policy(spec), random_scores("softmax", 16, 256, 1), context_of(case), None)
    assert len(launches) == (2 if spec.get("scope") == "request" or spec["name"] == "budget_drop" else 1)


@pytest.mark.parametrize(("num_tokens", "expected"), [(16, 1), (40, 2)])
def test_statistics_are_one_launch_where_one_program_holds_the_batch_and_two_beyond(num_tokens, expected, launches):
    launches.clear()
    scores_TE = random_scores("softmax", num_tokens, 256, 1)
    sets_triton.oea_stats(make_policy({"name": "oea", "k0": 2}), scores_TE, context_of({"top_k": 4}))
    assert len(launches) == expected
