"""``laser`` and ``load_only`` in Triton route like their formulation in torch, pair for pair, in whatever chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from policy_cases import SPECS, Arguments, Spec, cases, context_of, few_examples, random_scores
from torch import Tensor
from twin_laws import assert_routes_like_torch, assert_same_choice

from moe_ep_bench.kernels import laser_triton
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy

WIDE: Spec = {"name": "laser", "eps_high": 0.9, "t_fix": 0.05, "c": 6}

every_spec = pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if spec["name"] in ("laser", "load_only")], ids=str
)
pytestmark = pytest.mark.usefixtures("patched_once")
each_policy = pytest.mark.parametrize("spec", [WIDE, {"name": "load_only"}], ids=["laser", "load_only"])


def select(policy: Policy, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """The form in Triton."""
    route = {"laser": laser_triton.laser, "load_only": laser_triton.load_only}[policy.name]
    return route(policy, scores_TE, context, stats_SE)


def assert_like_torch(spec: Spec, scores_TE: Tensor, **case: Any) -> None:
    assert_routes_like_torch(select, None, spec, scores_TE, {"top_k": 2, **case})


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 experts, one program decides on 2 tokens at once, many programs on one token each."""
    monkeypatch.setattr(laser_triton, "_STEP_TILE", 32)
    monkeypatch.setattr(laser_triton, "_WARP_TILE", 16)


# --- Any case --------------------------------------------------------------------------------------


@every_spec
@settings(few_examples, max_examples=2)
@given(case=cases(most_experts=64, most_tokens=12))
def test_routes_like_torch(spec: Spec, case: tuple[Tensor, Arguments]) -> None:
    assert_routes_like_torch(select, None, spec, *case)


# --- Chunks and padding ----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("most_in_one_program", [1, 10_000])
@pytest.mark.parametrize("chunk_size", [3, 10])
@each_policy
def test_any_chunk_size_routes_like_torch_on_either_path(
    spec: Spec, chunk_size: int, most_in_one_program: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laser_triton, "_PARALLEL_CHUNK", most_in_one_program)
    scores_TE = random_scores("softmax", 9, 16, seed=chunk_size)
    mask_T = torch.arange(9) % 4 != 1
    chunked = {**spec, "chunk_size": chunk_size}
    assert_like_torch(chunked, scores_TE, token_mask_T=mask_T)
    assert_like_torch(chunked, scores_TE, load_E=torch.arange(16) % 5 / 8, normalize=True)


@each_policy
def test_padding_between_tokens_moves_no_token_into_another_chunk(spec: Spec) -> None:
    scores_TE = random_scores("softmax", 12, 8, seed=4)
    policy = make_policy({**spec, "chunk_size": 4})
    together = select(policy, scores_TE, RoutingContext(top_k=2), None)
    apart_TE = torch.full([36, 8], 0.125)
    apart_TE[1::3] = scores_TE
    mask_T = torch.arange(36) % 3 == 1
    apart = select(policy, apart_TE, RoutingContext(top_k=2, token_mask_T=mask_T), None)
    assert torch.equal(apart.map_TE[mask_T], together.map_TE)
    assert not apart.map_TE[~mask_T].any()
    assert not apart.weights_TE[~mask_T].any()


@pytest.mark.parametrize("num_tokens", [0, 1])
@each_policy
def test_no_token_and_a_lone_token_route_like_torch(spec: Spec, num_tokens: int) -> None:
    scores_TE = random_scores("softmax", num_tokens, 12, seed=0)
    for mask in (True, False):
        mask_T = torch.full([num_tokens], mask)
        assert_like_torch({**spec, "chunk_size": 5}, scores_TE, token_mask_T=mask_T, top_k=3)


# --- Scores and thresholds -------------------------------------------------------------------------


@each_policy
@pytest.mark.parametrize("scale", [0.0, 2.0**-140])
def test_equal_scores_of_any_size_route_like_torch(spec: Spec, scale: float) -> None:
    levels_TE = random_scores("levels", 10, 8, seed=3)
    levels_TE[::2] = 0.25
    assert_like_torch(spec, levels_TE * scale)


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_thresholds_are_compared_in_float64(share: float) -> None:
    """Scores lie on either side of a threshold that in float32 would be one of them."""
    near = torch.tensor(share, dtype=torch.float32)
    around = [torch.nextafter(near, torch.tensor(0.0)), near, torch.nextafter(near, torch.tensor(1.0))]
    # Of expert 0 and others: above t_fix of the best, or not.
    scores_TE = torch.tensor([[1.0, value, 0.01, 0.02] for value in around for _ in range(3)])
    assert_like_torch({"name": "laser", "eps_high": 1, "t_fix": share, "c": 4}, scores_TE, top_k=1)
    # A top-k that holds just about eps_high of a row sum of 1: half a row's last bit decides.
    rest = 1.0 - torch.stack(around).double()
    for left in (
        rest.float(),
        torch.nextafter(rest.float(), torch.ones(3)),
        torch.nextafter(rest.float(), -torch.ones(3)),
    ):
        rows_TE = torch.stack([torch.stack(around), left, torch.zeros(3), torch.zeros(3)], dim=1)
        rule = {"name": "laser", "eps_high": share, "t_fix": 0, "c": 4}
        assert_like_torch(rule, rows_TE.repeat_interleave(3, dim=0), top_k=1)


def test_random_trimming_draws_what_the_torch_form_draws_and_leaves_the_generator_where_it_does() -> None:
    scores_TE = random_scores("softmax", 11, 16, seed=6)
    spec = {**WIDE, "t_fix": 0.0, "trim": "random"}
    contexts = [context_of({"top_k": 3, "seed": 5}) for _ in range(2)]
    policy = make_policy(spec)
    for _ in range(2):
        ours = select(policy, scores_TE, contexts[0], None)
        assert_same_choice(ours, policy.route(scores_TE, contexts[1]))


# --- Loads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "chunk_size"), [("any fraction", 3), ("huge", 100), ("tiny", 3), ("-0.0", 100)])
@each_policy
def test_carried_loads_of_any_size_count_as_in_torch(spec: Spec, kind: str, chunk_size: int) -> None:
    """Also where adding to them rounds: a chunk's pairs are added to them at once."""
    generator = torch.Generator().manual_seed(2)
    load_E = {
        "any fraction": torch.rand([8], generator=generator, dtype=torch.float64) * 3,
        "huge": 2.0**53 + 2 * torch.randint(0, 2, [8], generator=generator).double(),
        "tiny": torch.randint(0, 3, [8], generator=generator).double() * 5e-324,
        "-0.0": torch.tensor([0.0, -0.0], dtype=torch.float64).repeat(4),
    }[kind]
    scores_TE = random_scores("softmax", 9, 8, seed=8)
    assert_like_torch({**spec, "chunk_size": chunk_size}, scores_TE, load_E=load_E, top_k=3)


def test_counts_too_large_to_pack_with_a_place_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a packed integer can count: the limit is lowered here, so that it is passed."""
    monkeypatch.setattr(laser_triton, "_OUTSIDE", tl.constexpr(64))
    scores_TE = torch.zeros([20, 8])
    scores_TE[:, 5] = 1.0  # its load alone, above the bits of a place, is far beyond the limit
    assert_like_torch(WIDE, scores_TE, top_k=1)


# --- Launches --------------------------------------------------------------------------------------


@each_policy
def test_a_batch_is_three_launches_in_small_chunks_and_in_one(spec: Spec, launches: list[str]) -> None:
    """Places, choice, weights: however many tokens."""
    for chunk_size, chosen_by in ((1, "_in_order"), (4, "_in_order"), (100, "_one_chunk")):
        launches.clear()
        policy = make_policy({**spec, "chunk_size": chunk_size})
        select(policy, random_scores("softmax", 16, 8, seed=0), RoutingContext(top_k=2), None)
        assert launches == ["_places", chosen_by, "_weights"]
