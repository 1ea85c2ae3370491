"""Every routing policy against its oracle, against the laws that all share, and against wrong input.

The oracle says which pairs a policy keeps and what they weigh; what follows from that (capacities, budgets, candidates,
monotony) is held nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from oracles import expected_routing
from policy_cases import (
    ONE_OF_EACH,
    SPECS,
    TORCH_SPECS,
    Arguments,
    Spec,
    assert_same,
    cases,
    context_of,
    every_spec,
    few_examples,
    fitted,
    random_scores,
    route,
)
from torch import Tensor
from waits import watched_waits

from moe_ep_bench.config import label_of
from moe_ep_bench.kernels import form_of
from moe_ep_bench.kernels.policy_steps import DeviceSteps, HostSteps
from moe_ep_bench.policies import POLICIES, Routing, RoutingContext, laws, make_policy
from moe_ep_bench.policies.steps import TORCH

# --- The rule and the laws -------------------------------------------------------------------------


def assert_as_expected(routing: Routing, spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    expected = expected_routing(spec, scores_TE, context_of(arguments))
    assert torch.equal(routing.map_TE, expected.map_TE)
    torch.testing.assert_close(routing.weights_TE.double(), expected.weights_TE, rtol=1e-6, atol=1e-12)


def assert_keeps_the_rule_and_the_laws(spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    """The oracle's routing, the laws of ``check-policy``, the same bits by every form and from given keys."""
    spec = fitted(spec, scores_TE, arguments)
    policy, routing = make_policy(spec), route(spec, scores_TE, arguments)
    assert_as_expected(routing, spec, scores_TE, arguments)
    for law in laws.LAWS:
        law(laws.Trial(policy, scores_TE, arguments, form_of(policy, "cpu")), routing)
    for steps in (TORCH, HostSteps(), DeviceSteps()):
        form = policy.by(steps)
        for stats_SE in (None, form.batch_stats(scores_TE, context_of(arguments))):
            assert_same(form.route(scores_TE, context_of(arguments), stats_SE), routing)
    context = context_of(arguments)
    random_TE, here = policy.random_keys(scores_TE, context), policy.in_layer(context.layer_fraction)
    assert (random_TE is not None) == ("random" in (getattr(here, "metric", None), getattr(here, "trim", None)))
    if random_TE is not None:
        assert_same(policy.route(scores_TE, dataclasses.replace(context, generator=None, random_TE=random_TE)), routing)


@few_examples
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 45), st.integers(1, 30), st.integers(0, 99))
def test_an_expert_that_all_tokens_want_keeps_its_best_whatever_ties(num_tokens, num_experts, capacity, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    keys_TE = torch.randint(levels, (num_tokens, num_experts), generator=generator).float()
    asked = torch.ones(keys_TE.shape, dtype=torch.bool), keys_TE, capacity, 1
    assert torch.equal(HostSteps().within_capacity(*asked), TORCH.within_capacity(*asked))


@few_examples
@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.booleans()), min_size=1))
def test_marked_keys_come_first_and_all_keep_their_order(places):
    keys_1E = torch.tensor([[key for key, _ in places]])
    mark_1E = torch.tensor([[mark for _, mark in places]])
    first_1E = HostSteps().marked_first(keys_1E, mark_1E)
    assert torch.equal(first_1E, TORCH.marked_first(keys_1E, mark_1E))
    order = sorted(range(len(places)), key=lambda place: (places[place][1], places[place][0]))
    assert torch.equal(first_1E.argsort(dim=1, stable=True), torch.tensor([order]))


@every_spec
def test_every_policy_keeps_its_rule_and_all_laws(spec: Spec) -> None:
    # A seed of its own, or every spec would meet the same few cases.
    @seed(zlib.crc32(repr(spec).encode()))
    @settings(few_examples, max_examples=3)
    @given(case=cases(most_experts=64))
    def holds(case: tuple[Tensor, Arguments]) -> None:
        assert_keeps_the_rule_and_the_laws(spec, *case)

    holds()


def test_policies_with_one_key_have_the_same_statistics() -> None:
    scores_TE = random_scores("levels", 40, 16, seed=5)
    arguments = {"top_k": 4, "num_ranks": 4, "modality_T": torch.arange(40) % 2, "request_id_T": torch.arange(40) // 9}
    context, found = context_of(arguments), {}
    for spec in SPECS + TORCH_SPECS:
        policy = make_policy(fitted(spec, scores_TE, arguments))
        if policy.stats_key is not None:
            found.setdefault((spec["name"], policy.stats_key), []).append(policy.batch_stats(scores_TE, context))
    assert {name for (name, _), stats in found.items() if len(stats) > 1} == {"budget_drop", "xshare"}
    assert sum(name == "xshare" for name, _ in found) > 2
    for first, *others in found.values():
        assert all(torch.equal(first, other) for other in others)


def test_the_specs_cover_every_policy_and_every_field() -> None:
    for name, policy in POLICIES.items():
        specs = [spec for spec in SPECS + TORCH_SPECS if spec["name"] == name]
        assert specs, name
        for field in dataclasses.fields(policy):
            assert len({repr(spec.get(field.name, field.default)) for spec in specs}) > 1, (name, field.name)


@every_spec
@pytest.mark.parametrize("padded", [False, True])
def test_no_torch_form_waits_for_the_device_but_those_that_say_so(spec: Spec, padded: bool) -> None:
    """As a timed layer calls it; what waits on a GPU is counted beside its time."""
    scores_TE = random_scores("levels", 40, 16, seed=5)
    tokens_T = torch.arange(40)
    arguments = {"top_k": 2, "num_ranks": 4, "modality_T": tokens_T % 2, "request_id_T": tokens_T // 9}
    spec = fitted(spec, scores_TE, arguments)
    policy, context = (
        make_policy(spec).by(TORCH),
        context_of({**arguments, "token_mask_T": tokens_T % 5 > 0 if padded else None}),
    )
    context.num_valid(40)  # counted before anything is timed
    with watched_waits() as found:
        policy.select(scores_TE, context, policy.stats(scores_TE, context))
    assert bool(found) == (spec.get("scope") == "request"), found


# A policy's fields, then tokens, top-k, experts, ranks; the most pairs that it may choose.
BOUNDS = [
    ({"name": "token_drop", "capacity_factor": 1.0, "rounding": "ceil"}, (20, 6, 64, 1), 120),
    ({"name": "token_drop", "capacity_factor": 0.7, "rounding": "ceil"}, (1001, 2, 16, 1), 1408),
    ({"name": "token_drop", "capacity_factor": 0.7}, (1001, 2, 16, 1), 1392),
    ({"name": "token_drop", "capacity_factor": 0.5, "granularity": "device"}, (8, 4, 16, 4), 16),
    ({"name": "expanded_drop", "capacity_factor": 2.0}, (1024, 6, 64, 8), 7680),
    ({"name": "expanded_drop", "capacity_factor": 2.0, "granularity": "device"}, (1024, 6, 64, 8), 7680),
    ({"name": "expanded_drop", "capacity_factor": 0.5}, (1024, 6, 64, 8), 3072),
    ({"name": "expanded_drop", "capacity_factor": 2.0, "max_experts_per_token": 7}, (1024, 6, 64, 8), 7168),
    ({"name": "expanded_drop", "capacity_factor": 2.0, "scope": "global", "num_candidates": 9}, (8, 2, 8, 2), 32),
    ({"name": "expert_drop", "fraction": 0.75}, (10, 4, 8, 2), 20),
    ({"name": "lynx", "num_dropped": 6}, (10, 4, 8, 2), 20),
    ({"name": "oea", "k0": 1, "k_max": 8, "max_rank": 3}, (10, 4, 8, 2), 30),
    ({"name": "xshare", "k0": 0, "budget": 3}, (10, 4, 8, 2), 30),
    ({"name": "topk"}, (10, 8, 8, 1), 80),
]


@pytest.mark.parametrize(
    ("spec", "shape", "expected"), BOUNDS, ids=lambda value: value.get("name", "") if isinstance(value, dict) else ""
)
def test_a_policy_states_the_most_pairs_that_it_may_choose(spec: Spec, shape: tuple[int, ...], expected: int) -> None:
    num_tokens, top_k, num_experts, num_ranks = shape
    policy, context = make_policy(spec), RoutingContext(top_k=top_k, num_ranks=num_ranks)
    assert policy.most_pairs(num_tokens, num_experts, context) == expected
    padded = dataclasses.replace(context, token_mask_T=torch.arange(num_tokens + 5) < num_tokens)
    assert policy.most_pairs(num_tokens + 5, num_experts, padded) == expected


# No token at all is the simplest of ``cases``; a selection of many winners takes another path than one of few.
@every_spec
@pytest.mark.parametrize(
    ("kind", "num_tokens", "num_experts", "top_k"),
    [("softmax", 1, 8, 8), ("softmax", 1, 256, 8), ("levels", 400, 8, 2)],
)
def test_corners_of_the_shapes(spec: Spec, kind: str, num_tokens: int, num_experts: int, top_k: int) -> None:
    token_T = torch.arange(num_tokens)
    by_token = {"modality_T": token_T % 3 % 2, "request_id_T": token_T // 250}
    arguments = {"top_k": top_k, "num_ranks": 8, "rank": 7, "normalize": num_tokens == 1, **by_token}
    assert_keeps_the_rule_and_the_laws(spec, random_scores(kind, num_tokens, num_experts, seed=1), arguments)


@pytest.fixture
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_four_threads")
@pytest.mark.parametrize(
    "spec",
    [
        {"name": "topk"},
        {"name": "pruned", "k0": 3, "p": 0.4},
        {"name": "token_drop", "capacity_factor": 0.9},
        {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2},
    ],
    ids=lambda spec: spec["name"],
)
def test_the_number_of_threads_does_not_matter(spec: Spec) -> None:
    scores_TE = random_scores("levels", 4501, 16, seed=4)
    token_T = torch.arange(4501)
    for normalize, request_T in ((False, token_T // 450), (True, token_T % 7)):  # together, and scattered
        arguments = {"top_k": 3, "normalize": normalize, "request_id_T": request_T}
        assert_same(route(spec, scores_TE, arguments), make_policy(spec).route(scores_TE, context_of(arguments)))


def test_a_pool_in_random_order_leaves_ties_to_the_lower_expert() -> None:
    spec = {**LASER, "eps_high": 1, "c": 10, "trim": "random"}
    assert_keeps_the_rule_and_the_laws(spec, torch.full([20, 16], 1 / 16), {"top_k": 3, "num_ranks": 4, "seed": 1})


# --- Policies as values ----------------------------------------------------------------------------


@every_spec
def test_a_policy_is_a_frozen_value_that_its_params_rebuild(spec: Spec) -> None:
    policy = make_policy(spec)
    assert make_policy({"name": policy.name, **policy.params()}) == policy
    assert make_policy({"name": policy.name, **json.loads(json.dumps(policy.params()))}) == policy
    assert hash(make_policy(spec)) == hash(policy)
    assert label_of(policy).startswith(policy.name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.capacity_factor = 2.0


# --- Errors ----------------------------------------------------------------------------------------


LASER: Spec = {"name": "laser", "eps_high": 0.5, "t_fix": 0.5, "c": 4}


@pytest.mark.parametrize("spec", ONE_OF_EACH, ids=lambda spec: spec["name"])
def test_no_field_takes_a_word_that_it_does_not_know_or_a_negative_number(spec: Spec) -> None:
    for field in dataclasses.fields(make_policy(spec)):
        for wrong in (-1, *(["nonsense"] if field.name != "similarity" else [])):  # which names a file
            with pytest.raises(ValueError, match=rf"\A{field.name}: [^\n]*{wrong}[^\n]*\Z"):
                make_policy({**spec, field.name: wrong})


UNIFORM = torch.full([6, 8], 0.125)
NAN = UNIFORM.clone()
NAN[-1, -1] = torch.nan


@pytest.mark.parametrize("spec", ONE_OF_EACH, ids=lambda spec: spec["name"])
def test_every_form_of_every_policy_checks_scores_and_context(spec: Spec) -> None:
    policy = make_policy(spec)
    wrong = (
        ("scores_TE", NAN, {}),
        ("rank", UNIFORM, {"rank": 4, "num_ranks": 4}),
        ("scores_TE", UNIFORM.double(), {}),
    )
    for form in (policy, form_of(policy, "cpu")):
        for call in (form.route, form.batch_stats):
            for key, scores_TE, context in wrong:
                with pytest.raises(ValueError, match=rf"\A{key}: [^\n]*\Z"):
                    call(scores_TE, RoutingContext(top_k=2, **context))


@every_spec
def test_who_does_not_know_its_rank_routes_alike_on_all(spec: Spec) -> None:
    scores_TE, token_T = random_scores("softmax", 50, 16, seed=9), torch.arange(50)
    arguments = {"top_k": 4, "num_ranks": 4, "modality_T": token_T % 2, "request_id_T": token_T // 5}
    spec = fitted(spec, scores_TE, arguments)
    if not make_policy(spec).knows_rank:
        first, last = (route(spec, scores_TE, {**arguments, "rank": rank}) for rank in (0, 3))
        assert_same(first, last)
