"""Routing by Triton on a CUDA device: the same pairs as by torch, on every shape, inside a graph too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from policy_cases import SPECS, Spec, assert_same_choice, distinct_scores, fitted, possible_groups, random_scores
from torch import Tensor

from moe_ep_bench.kernels import form_of, oracle_for, triton_twins
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy

pytestmark = pytest.mark.gpu

BIG = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": 1.0},
    {"name": "token_drop", "capacity_factor": 1.0, "granularity": "device"},
    {"name": "expanded_drop", "capacity_factor": 1.0},
    {"name": "expanded_drop", "capacity_factor": 1.5, "num_candidates": 2, "max_experts_per_token": 8},
    {"name": "oea", "k0": 4},
    {"name": "xshare", "k0": 1, "budget": 16},
    {"name": "dynamic_skip", "beta": 0.3},
]
BY_REQUEST = {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2}  # of decode steps alone
# Batch-wide rules sum in another order than torch: scores with few bits have exact sums, and so equal ones.
EXACT = 2**12


@pytest.fixture(scope="module")
def device() -> torch.device:
    assert torch.cuda.is_available(), "-m gpu needs a CUDA device"
    return torch.device("cuda", 0)


def model(num_tokens: int, num_experts: int, number: int, device: torch.device) -> dict[str, Any]:
    """Options of a model and a batch; which, depends on the number."""
    generator = torch.Generator().manual_seed(number)
    options: dict[str, Any] = {
        "top_k": 6,
        "num_ranks": 4,
        "rank": number % 4,
        "normalize": number % 2 == 0,
        "scale": 2.5 if number % 3 == 0 else 1.0,
        "modality_T": torch.randint(0, 2, [num_tokens], generator=generator).to(device),
        "request_id_T": torch.randint(0, 1 + num_tokens // 16, [num_tokens], generator=generator).to(device) * 7 - 9,
        "layer_fraction": number % 5 / 5,
    }
    if number % 4 == 1:
        options["bias_E"] = (torch.randint(-4, 5, [num_experts], generator=generator) / 4).to(device)
    if number % 4 == 2:
        options["token_mask_T"] = (torch.rand([num_tokens], generator=generator) < 0.7).to(device)
    groups = possible_groups(num_experts, 6)
    if number % 4 == 3 and groups:
        options["num_groups"], options["top_groups"] = groups[number % len(groups)]
    return options


def both(policy: Policy, scores_TE: Tensor, options: dict[str, Any]) -> tuple[Routing, Routing]:
    """By Triton, and by what it is held against, with equal draws."""
    device = scores_TE.device

    def context() -> RoutingContext:
        return RoutingContext(generator=torch.Generator(device).manual_seed(1), **options)

    fastest = form_of(policy, "cuda")
    assert fastest.runs(*scores_TE.shape) == "triton"
    return fastest.route(scores_TE, context()), oracle_for(policy, "cuda").route(scores_TE, context())


def coarse(scores_TE: Tensor) -> Tensor:
    return (scores_TE * EXACT).ceil() / EXACT


def one_shape_each() -> list[Any]:
    """Every spec with one of the shapes, each of which meets every option of a model: kernels compile for each pair."""
    shapes = [(1, 64), (16, 128), (777, 60), (3001, 256)]
    drawn = [
        (shapes[(number + number // 4) % (3 if spec.get("scope") == "request" else 4)], number)
        for number, spec in enumerate(SPECS)
    ]
    return [pytest.param(shape, number, id=f"{shape[0]}x{shape[1]}-{number}") for shape, number in drawn]


@pytest.mark.parametrize(("shape", "number"), one_shape_each())
def test_every_policy_routes_like_torch(shape: tuple[int, int], number: int, device: torch.device) -> None:
    options = model(*shape, number, device)
    scores_TE = coarse(random_scores("softmax" if number % 2 else "sigmoid", *shape, number)).to(device)
    policy = make_policy(fitted(SPECS[number], scores_TE, options))
    assert_same_choice(*both(policy, scores_TE, options))


KINDS = {
    "levels": lambda: random_scores("levels", 5000, 64, 1),
    "signed zeros": lambda: random_scores("signed zeros", 999, 64, 2),
    "equal": lambda: torch.full([70_001, 64], 0.125),
    "zero rows": lambda: coarse(random_scores("zero rows", 2000, 64, 3)),
    "denormals": lambda: distinct_scores(1000, 64, 4) * 1e-40,
    "one expert takes all": lambda: distinct_scores(50_000, 64, 5) * 2**-12 + torch.eye(64)[3],
}


@pytest.mark.parametrize("spec", BIG, ids=lambda spec: make_policy(spec).label.replace(" ", ","))
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_every_kind_are_routed_like_torch(kind: str, spec: Spec, device: torch.device) -> None:
    scores_TE = KINDS[kind]().to(device)
    request_T = torch.arange(len(scores_TE), device=device) // 100
    assert_same_choice(*both(make_policy(spec), scores_TE, {"top_k": 8, "num_ranks": 8, "request_id_T": request_T}))


@pytest.mark.parametrize("spec", BIG, ids=lambda spec: make_policy(spec).label.replace(" ", ","))
@pytest.mark.parametrize("shape", [(524_288, 64), (524_287, 128)], ids=str)
def test_the_largest_batches_are_routed_like_torch(shape: tuple[int, int], spec: Spec, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(6)
    logits_TE = 2 * torch.randn(shape, generator=generator, device=device)
    scores_TE = coarse(logits_TE.softmax(dim=1))
    request_T = torch.arange(shape[0], device=device) // 256
    policy = make_policy(spec)
    options = {"top_k": 8, "num_ranks": 8, "normalize": True, "request_id_T": request_T}
    ours, expected = both(policy, scores_TE, options)
    assert_same_choice(ours, expected)
    again = form_of(policy, "cuda").route(scores_TE, RoutingContext(**options))
    assert torch.equal(again.map_TE, ours.map_TE)
    assert torch.equal(again.weights_TE, ours.weights_TE)


@pytest.mark.parametrize("spec", [*BIG, BY_REQUEST], ids=lambda spec: make_policy(spec).label.replace(" ", ","))
@pytest.mark.parametrize("num_tokens", [16, 100])
def test_a_graph_routes_new_scores_as_a_launch_does(num_tokens: int, spec: Spec, device: torch.device) -> None:
    policy = make_policy(spec)
    select = triton_twins()[type(policy)].select
    batches = [coarse(random_scores("softmax", num_tokens, 128, seed)).to(device) for seed in (7, 8)]
    context = RoutingContext(top_k=8, num_ranks=8, token_mask_T=torch.arange(num_tokens, device=device) != 3)
    context = replace(context, request_id_T=torch.arange(num_tokens, device=device) // 4)
    expected = [select(policy, scores_TE, context, None) for scores_TE in batches]
    inputs_TE = batches[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = select(policy, inputs_TE, context, None)
    for scores_TE, one in zip(batches, expected, strict=True):
        inputs_TE.copy_(scores_TE)
        graph.replay()
        assert torch.equal(routing.map_TE, one.map_TE)
        assert torch.equal(routing.weights_TE, one.weights_TE)
