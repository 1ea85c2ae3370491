"""The Triton form of Token Drop and Expanded Drop routes like the formulation in torch, in triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from policy_cases import SPECS, Arguments, Spec, distinct_scores, random_scores
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twin_laws import assert_routes_like_torch

from moe_ep_bench.kernels.capacity_triton import capacity
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.policies.capacity import expert_capacity

OURS = [spec for spec in SPECS if spec["name"] in ("token_drop", "expanded_drop")]
pytestmark = pytest.mark.usefixtures("patched_once")

TOKEN_DROP = {"name": "token_drop", "capacity_factor": 1.0}
EXPANDED_DROP = {"name": "expanded_drop", "capacity_factor": 1.0}


class Operators(TorchDispatchMode):
    """The names of torch's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def check(spec: Spec, scores_TE: Tensor, case: Arguments) -> None:
    assert_routes_like_torch(capacity, None, spec, scores_TE, case)


@pytest.mark.parametrize("number", range(len(OURS)))
def test_every_rule_routes_like_torch(number: int) -> None:
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
    image_T = torch.arange(num_tokens) % 3 % 2
    case = {"top_k": 4, "num_ranks": 4, "rank": draw.randrange(4), "modality_T": image_T, "seed": number, **model}
    check(OURS[number], random_scores(kind, num_tokens, num_experts, number), case)


SCORES = {
    "several blocks": random_scores("softmax", 301, 64, 1),
    "no tokens": torch.empty(0, 64),
    "one expert takes all": distinct_scores(200, 16, 4) * 0.001 + torch.eye(16)[3],
    "neighbouring floats": (torch.ones(120, 16).view(torch.int32) + torch.arange(16) % 3).view(torch.float32),
    # Far more pairs at the threshold than a program looks at in one go.
    "thousands of equals": torch.full([1100, 8], 0.125),
}


@pytest.mark.parametrize("spec", [TOKEN_DROP, EXPANDED_DROP, {**TOKEN_DROP, "granularity": "device"}], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_it_routes_scores_of_every_kind_like_torch(name: str, spec: Spec) -> None:
    scores_TE = SCORES[name]
    if spec["name"] == "expanded_drop" and name == "thousands of equals":
        scores_TE = scores_TE[:300]
    check(spec, scores_TE, {"top_k": 2, "num_ranks": 4, "rank": 1, "normalize": True})


@pytest.mark.parametrize("gamma", [0.7, 123456.7])
def test_a_capacity_of_valid_tokens_is_the_exact_decimal_one(gamma: float) -> None:
    """0.7 * 360 * 2 / 8 is 63, where doubles give 62; no host counts the tokens, but for absurdly many decimals."""
    valid_T = torch.arange(400) < 360
    scores_TE = distinct_scores(400, 8, 6) * 0.001 + torch.eye(8)[0] + torch.eye(8)[5]
    policy, context = (
        make_policy({**TOKEN_DROP, "capacity_factor": gamma}),
        RoutingContext(top_k=2, token_mask_T=valid_T),
    )
    routing = capacity(policy, scores_TE, context, None)
    room = min(360, expert_capacity(gamma, 360, 2, 8))
    assert routing.map_TE.sum(dim=0).tolist() == [room, 0, 0, 0, 0, room, 0, 0]


@pytest.mark.parametrize("spec", [TOKEN_DROP, {**EXPANDED_DROP, "num_candidates": 4}], ids=str)
def test_a_decode_step_is_one_launch_and_a_longer_batch_five(spec: Spec, launches: list[str]) -> None:
    for num_tokens, expected in ((32, ["_drop"]), (33, ["_offer", "_cut", "_gather", "_settle", "_write"])):
        launches.clear()
        scores_TE = random_scores("softmax", num_tokens, 128, 1)
        with Operators() as torch_s:
            capacity(make_policy(spec), scores_TE, RoutingContext(top_k=8), None)
        assert launches == expected
        # A fill is a launch too: passes need one.
        fills = {name for name in torch_s.seen if "zero" in name or "fill" in name}
        assert bool(fills) == (num_tokens > 32), fills
