"""Every routing policy against its oracle, against the laws that all share, and against hand-made cases."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from oracles import capacity, capacity_groups, expanded_candidates, expected_routing
from torch import Tensor

from moe_ep_bench.policies import POLICIES, Routing, RoutingContext, make_policy

Spec = dict[str, Any]
Arguments = dict[str, Any]  # of a RoutingContext; ``seed`` stands for a fresh generator

METRICS = ("score", "order", "reverse_order", "random")
GRANULARITIES = ("expert", "device")
MODALITIES = ("uniform", "image_first", "text_first")
EXPANSIONS = (
    {},
    {"num_candidates": 2},
    {"num_candidates": 3, "scope": "global"},
    {"max_experts_per_token": 2},
    {"num_candidates": 1, "scope": "global", "max_experts_per_token": 3},
)

# Every combination of the fields that decide an order, and of each other field at least two values.
_RULES = [
    {"capacity_factor": 0.7, "metric": metric, "granularity": granularity, "modality": modality}
    for metric, granularity, modality in itertools.product(METRICS, GRANULARITIES, MODALITIES)
]
SPECS: list[Spec] = [
    {"name": "topk"},
    *({"name": "token_drop", **rule} for rule in _RULES),
    {"name": "token_drop", "capacity_factor": 0},
    {"name": "token_drop", "capacity_factor": 0, "min_capacity": 2},
    {"name": "token_drop", "capacity_factor": 0.3, "min_capacity": 1, "granularity": "device"},
    {"name": "token_drop", "capacity_factor": 1},
    {"name": "token_drop", "capacity_factor": 1.5, "granularity": "device"},
    *(
        {"name": "expanded_drop", **rule, **expansion}
        for rule, expansion in zip(_RULES, itertools.cycle(EXPANSIONS), strict=False)
    ),
    {"name": "expanded_drop", "capacity_factor": 0, "min_capacity": 1},
    {"name": "expanded_drop", "capacity_factor": 1e6},
    {"name": "expanded_drop", "capacity_factor": 1e6, "num_candidates": 0},
    {"name": "expanded_drop", "capacity_factor": 1e6, "num_candidates": 10_000, "scope": "global"},
    {"name": "expanded_drop", "capacity_factor": 1.0, "num_candidates": 10_000},
    {"name": "expanded_drop", "capacity_factor": 1.2, "granularity": "device", "max_experts_per_token": 1},
    {"name": "expanded_drop", "capacity_factor": 1.0, "max_experts_per_token": 10_000},
]

every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: make_policy(spec).label.replace(" ", ","))
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
few_examples = settings(derandomize=True, deadline=None, max_examples=12)


# --- Making cases ----------------------------------------------------------------------------------


def context_of(arguments: Arguments) -> RoutingContext:
    """A context with a fresh generator, so that every route of a case draws the same numbers."""
    rest = dict(arguments)
    return RoutingContext(generator=torch.Generator().manual_seed(rest.pop("seed", 0)), **rest)


def route(spec: Spec, scores_TE: Tensor, arguments: Arguments) -> Routing:
    return make_policy(spec).route(scores_TE, context_of(arguments))


def random_scores(kind: str, num_tokens: int, num_experts: int, seed: int) -> Tensor:
    """Router scores of one kind; some experts are sought after, so that capacities bind."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn([num_tokens, num_experts], generator=generator)
    logits_TE += 1.5 * torch.randn([num_experts], generator=generator)
    match kind:
        case "softmax":
            return logits_TE.softmax(dim=1)
        case "sigmoid":  # rows do not sum to 1
            return logits_TE.sigmoid()
        case "levels":  # heavy ties, zeros among them
            return torch.randint(0, 4, [num_tokens, num_experts], generator=generator) / 4
        case "signed zeros":
            values = torch.tensor([-0.0, 0.0, 0.5])
            return values[torch.randint(0, 3, [num_tokens, num_experts], generator=generator)]
        case "equal":
            return torch.full([num_tokens, num_experts], 1 / 8)
        case "zero rows":
            return logits_TE.softmax(dim=1) * (torch.rand([num_tokens, 1], generator=generator) < 0.5)
    raise AssertionError(kind)


SCORE_KINDS = ("softmax", "sigmoid", "levels", "signed zeros", "equal", "zero rows")


def distinct_scores(num_tokens: int, num_experts: int, seed: int) -> Tensor:
    """No two scores are equal, anywhere."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_tokens * num_experts, generator=generator)
    return (order.view(num_tokens, num_experts) + 1.0) / 2**20


def possible_groups(num_experts: int, top_k: int) -> list[tuple[int, int]]:
    """(num_groups, top_groups) that a model with these experts may have."""
    return [
        (groups, top)
        for groups in (2, 4, 8)
        for top in (1, 2, 4)
        if num_experts % groups == 0
        and top <= groups
        and top * (num_experts // groups) >= top_k
        and 1 <= top_k // top <= num_experts // groups
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Arguments]:
    """Scores and context arguments: any shape of interest, any option of a model, with and without padding."""
    num_experts = draw(st.sampled_from([8, 12, 16, 32, 64, 128, 256]))
    num_tokens = draw(st.integers(0, 40))
    top_k = draw(st.integers(1, 8))
    num_ranks = draw(st.sampled_from([ranks for ranks in range(1, 9) if num_experts % ranks == 0]))
    num_groups, top_groups = draw(st.sampled_from([(None, None), *possible_groups(num_experts, top_k)]))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)

    scores_TE = random_scores(draw(st.sampled_from(SCORE_KINDS)), num_tokens, num_experts, seed)
    bias_E = None
    if draw(st.booleans()):  # of few levels and both signs: ties survive, preferences turn negative
        bias_E = torch.randint(-4, 5, [num_experts], generator=generator) / 4
    if num_groups is not None:  # a group's value is a sum: keep it exact (see oracles)
        scores_TE = (scores_TE * 2**20).round() / 2**20
    token_mask_T = None
    if draw(st.booleans()):
        token_mask_T = torch.rand([num_tokens], generator=generator) < draw(st.sampled_from([0.0, 0.7]))
    return scores_TE, {
        "top_k": top_k,
        "num_ranks": num_ranks,
        "rank": draw(st.integers(0, num_ranks - 1)),
        "normalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "bias_E": bias_E,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "token_mask_T": token_mask_T,
        "modality_T": torch.randint(0, 2, [num_tokens], generator=generator),
        "seed": seed,
    }


# --- The rule and the laws -------------------------------------------------------------------------


def assert_same(routing: Routing, other: Routing) -> None:
    """Bit for bit."""
    assert torch.equal(routing.map_TE, other.map_TE)
    assert torch.equal(routing.weights_TE, other.weights_TE)


def assert_as_expected(routing: Routing, spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    expected = expected_routing(spec, scores_TE, context_of(arguments))
    assert torch.equal(routing.map_TE, expected.map_TE)
    torch.testing.assert_close(routing.weights_TE.double(), expected.weights_TE, rtol=1e-6, atol=1e-12)


def law_shapes_and_values(routing: Routing, spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    """One bit per (token, expert), so no expert twice; weights are finite, and zero off the map."""
    assert routing.map_TE.shape == routing.weights_TE.shape == scores_TE.shape
    assert routing.map_TE.dtype == torch.bool
    assert routing.weights_TE.dtype == torch.float32
    assert routing.weights_TE.isfinite().all()
    assert (routing.weights_TE >= 0).all()
    assert (routing.weights_TE[~routing.map_TE] == 0).all()


def law_pure_and_deterministic(routing: Routing, spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    """The same inputs give the same bits, stay as they were, and the global generator does not move."""
    before = scores_TE.clone(), {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    global_state = torch.get_rng_state()
    assert_same(route(spec, scores_TE, arguments), routing)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert torch.equal(scores_TE, before[0])
    assert all(torch.equal(arguments[key], value) for key, value in before[1].items())


def law_padding(routing: Routing, spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    """Padding selects nothing, and what it holds, or that it is there at all, changes nothing."""
    valid_T = arguments["token_mask_T"]
    if valid_T is None:
        return
    assert not routing.map_TE[~valid_T].any()
    assert not routing.weights_TE[~valid_T].any()
    other_TE = torch.where(valid_T.unsqueeze(1), scores_TE, 0.75)
    assert_same(route(spec, other_TE, arguments), routing)
    if spec.get("metric") == "random":
        return  # its keys are drawn for all rows, padding included
    without = {**arguments, "token_mask_T": None, "modality_T": arguments["modality_T"][valid_T]}
    shorter = route(spec, scores_TE[valid_T], without)
    assert torch.equal(shorter.map_TE, routing.map_TE[valid_T])
    assert torch.equal(shorter.weights_TE, routing.weights_TE[valid_T])


def law_capacity(routing: Routing, spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    """No expert, or no device, holds more pairs than its capacity."""
    if "capacity_factor" not in spec:
        return
    num_tokens, num_experts = scores_TE.shape
    valid_T = arguments["token_mask_T"]
    groups = capacity_groups(spec.get("granularity", "expert"), num_experts, arguments["num_ranks"])
    room = capacity(
        spec["capacity_factor"],
        num_tokens if valid_T is None else int(valid_T.sum()),
        arguments["top_k"],
        num_experts,
        len(groups[0]),
        spec.get("min_capacity", 0),
    )
    load_E = routing.map_TE.sum(dim=0).tolist()
    assert all(sum(load_E[expert] for expert in group) <= room for group in groups)


def law_candidates(routing: Routing, spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    """Only candidates are chosen: K of them by the model itself, of the top-k by Token Drop."""
    top_k = route({"name": "topk"}, scores_TE, arguments)
    experts_T = routing.map_TE.sum(dim=1)
    if spec["name"] == "expanded_drop":
        candidates = expanded_candidates(
            scores_TE, context_of(arguments), spec.get("num_candidates"), spec.get("scope", "local")
        )
        chosen = [set(row.nonzero().flatten().tolist()) for row in routing.map_TE]
        assert all(experts <= allowed for experts, allowed in zip(chosen, candidates, strict=True))
        assert (experts_T <= (spec.get("max_experts_per_token") or scores_TE.shape[1])).all()
    if spec["name"] == "token_drop":
        assert not (routing.map_TE & ~top_k.map_TE).any()
    if spec["name"] == "topk":
        valid_T = arguments["token_mask_T"]
        assert (experts_T == (arguments["top_k"] if valid_T is None else arguments["top_k"] * valid_T)).all()


NORMALISED_BY_TOP_K = ("topk", "token_drop", "expanded_drop")


def law_weights(routing: Routing, spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    """What stays of the top-k keeps its weight exactly: what is dropped is lost, not shared out."""
    if spec["name"] not in NORMALISED_BY_TOP_K:
        return
    top_k = route({"name": "topk"}, scores_TE, arguments)
    both_TE = routing.map_TE & top_k.map_TE
    assert torch.equal(routing.weights_TE[both_TE], top_k.weights_TE[both_TE])
    if spec["name"] == "topk" and arguments["normalize"]:
        has_mass_T = (scores_TE * top_k.map_TE).sum(dim=1) > 0
        total_T = routing.weights_TE.sum(dim=1)
        torch.testing.assert_close(total_T, arguments["scale"] * has_mass_T.float())


LAWS: list[Callable[[Routing, Spec, Tensor, Arguments], None]] = [
    law_shapes_and_values,
    law_pure_and_deterministic,
    law_padding,
    law_capacity,
    law_candidates,
    law_weights,
]


def assert_keeps_the_rule_and_the_laws(spec: Spec, scores_TE: Tensor, arguments: Arguments) -> None:
    routing = route(spec, scores_TE, arguments)
    assert_as_expected(routing, spec, scores_TE, arguments)
    for law in LAWS:
        law(routing, spec, scores_TE, arguments)


@every_spec
def test_every_policy_keeps_its_rule_and_all_laws(spec: Spec) -> None:
    # A seed of its own, or every spec would meet the same few cases.
    @seed(zlib.crc32(repr(spec).encode()))
    @settings(few_examples, max_examples=20)
    @given(case=cases())
    def holds(case: tuple[Tensor, Arguments]) -> None:
        assert_keeps_the_rule_and_the_laws(spec, *case)

    holds()


def test_the_specs_cover_every_policy_and_every_field() -> None:
    for name, policy in POLICIES.items():
        specs = [spec for spec in SPECS if spec["name"] == name]
        assert specs, name
        for field in dataclasses.fields(policy):
            assert len({spec.get(field.name, field.default) for spec in specs}) > 1, (name, field.name)


CORNERS = [
    (num_tokens, num_experts, num_ranks, top_k)
    for num_experts, num_ranks, top_k in [(8, 1, 1), (8, 8, 8), (64, 4, 6), (256, 8, 8)]
    for num_tokens in (0, 1, 5)  # none, one, fewer than experts
]


@every_spec
def test_corners_of_the_shapes(spec: Spec) -> None:
    for num_tokens, num_experts, num_ranks, top_k in CORNERS:
        scores_TE = random_scores("softmax", num_tokens, num_experts, seed=num_tokens)
        arguments = {
            "top_k": top_k,
            "num_ranks": num_ranks,
            "rank": num_ranks - 1,
            "modality_T": torch.arange(num_tokens) % 2,
            "token_mask_T": None,
            "normalize": True,
            "scale": 1.0,
        }
        assert_keeps_the_rule_and_the_laws(spec, scores_TE, arguments)


@every_spec
@pytest.mark.parametrize("kind", ["sigmoid", "levels"])
def test_capacities_in_the_hundreds(spec: Spec, kind: str) -> None:
    # A selection of many winners takes another path than one of few.
    num_tokens = 600
    scores_TE = random_scores(kind, num_tokens, 8, seed=3)
    arguments = {"top_k": 2, "num_ranks": 4, "rank": 2, "modality_T": torch.arange(num_tokens) % 3 % 2}
    assert_as_expected(route(spec, scores_TE, arguments), spec, scores_TE, arguments)


@every_spec
def test_memory_layout_does_not_matter(spec: Spec) -> None:
    scores_TE = random_scores("levels", 30, 16, seed=1)
    arguments = {"top_k": 4, "num_ranks": 4, "rank": 1, "modality_T": torch.arange(30) % 2}
    strided_TE = scores_TE.t().contiguous().t()
    assert not strided_TE.is_contiguous()
    assert_same(route(spec, strided_TE, arguments), route(spec, scores_TE, arguments))


@every_spec
def test_the_sign_of_zero_does_not_matter(spec: Spec) -> None:
    scores_TE = random_scores("signed zeros", 40, 16, seed=5)
    assert (scores_TE.signbit() & (scores_TE == 0)).any()
    arguments = {"top_k": 6, "num_ranks": 4, "rank": 3, "modality_T": torch.arange(40) % 2}
    assert torch.equal(route(spec, scores_TE, arguments).map_TE, route(spec, scores_TE.abs(), arguments).map_TE)


# --- topk ------------------------------------------------------------------------------------------


def experts_of(spec: Spec, row: list[float], **arguments: Any) -> list[int]:
    """The experts that a lone token selects."""
    return route(spec, torch.tensor([row]), arguments).map_TE[0].nonzero().flatten().tolist()


def test_topk_ties_go_to_the_lower_expert() -> None:
    assert experts_of({"name": "topk"}, [0.5, 0.25, 0.5, 0.5], top_k=2) == [0, 2]
    assert experts_of({"name": "topk"}, [0.0, 0.0, 0.0, 0.0], top_k=3) == [0, 1, 2]


def test_the_bias_selects_but_does_not_weigh() -> None:
    scores_TE = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    routing = route({"name": "topk"}, scores_TE, {"top_k": 2, "bias_E": torch.tensor([-1.0, 0.0, 0.0, 0.0])})
    assert routing.map_TE.tolist() == [[False, True, True, False]]
    torch.testing.assert_close(routing.weights_TE, torch.tensor([[0.0, 0.3, 0.2, 0.0]]))


def test_groups_restrict_the_top_k() -> None:
    # Two groups of four, K = 2, one group allowed: a group is worth its best 2. {0.5, 0.1} < {0.4, 0.3}.
    row = [0.5, 0.1, 0.0, 0.0, 0.4, 0.3, 0.0, 0.0]
    assert experts_of({"name": "topk"}, row, top_k=2) == [0, 4]
    assert experts_of({"name": "topk"}, row, top_k=2, num_groups=2, top_groups=1) == [4, 5]


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


@every_granularity
@pytest.mark.parametrize("name", ["token_drop", "expanded_drop"])
def test_no_capacity_drops_everything(name: str, granularity: str) -> None:
    spec = {"name": name, "capacity_factor": 0, "granularity": granularity}
    routing = route(spec, random_scores("softmax", 50, 16, seed=0), {"top_k": 4, "num_ranks": 4})
    assert not routing.map_TE.any()
    assert not routing.weights_TE.any()


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


def test_capacity_counts_only_valid_tokens() -> None:
    # 8 of 16 tokens are padding: C = floor(1 * 8 * 1 / 4) = 2, of the valid ones.
    token_mask_T = torch.arange(16) >= 8
    routing = route(
        {"name": "token_drop", "capacity_factor": 1},
        torch.full([16, 4], 0.25),
        {"top_k": 1, "token_mask_T": token_mask_T},
    )
    assert routing.map_TE[:, 0].nonzero().flatten().tolist() == [8, 9]


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


def test_random_is_fair() -> None:
    # 8 tokens for 4 places, 400 times: each token stays half of the time (binomial, sd 10).
    scores_TE = torch.rand([8, 4], generator=torch.Generator().manual_seed(0)) * 0.1 + torch.tensor([0.5, 0, 0, 0])
    spec = {"name": "token_drop", "capacity_factor": 2, "metric": "random"}
    kept = [route(spec, scores_TE, {"top_k": 1, "seed": seed}).map_TE[:, 0] for seed in range(400)]
    assert all(abs(count - 200) < 50 for count in torch.stack(kept).sum(dim=0).tolist())


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


def test_order_depends_on_token_order() -> None:
    # Both tokens want expert 0, which has floor(1 * 2 * 1 / 2) = 1 place: whoever comes first has it.
    scores_TE = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    spec = {"name": "token_drop", "capacity_factor": 1, "metric": "order"}
    routing = route(spec, scores_TE, {"top_k": 1})
    reversed_ = route(spec, scores_TE.flip(0), {"top_k": 1})
    assert routing.map_TE.tolist() == [[True, False], [False, False]]
    assert reversed_.map_TE.flip(0).tolist() == [[False, False], [True, False]]


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


def test_image_first_keeps_the_poorest_text_over_the_best_image() -> None:
    scores_TE = torch.tensor([[0.1, 0.0], [0.9, 0.0], [0.8, 0.0], [0.7, 0.0]])  # text, image, image, text
    arguments = {"top_k": 1, "modality_T": torch.tensor([0, 1, 1, 0])}
    spec = {"name": "token_drop", "capacity_factor": 1.5}  # floor(1.5 * 4 * 1 / 2) = 3 places
    kept = {
        modality: route({**spec, "modality": modality}, scores_TE, arguments).map_TE[:, 0].tolist()
        for modality in MODALITIES
    }
    assert kept == {
        "uniform": [False, True, True, True],
        "image_first": [True, True, False, True],
        "text_first": [False, True, True, True],
    }


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


def test_top_k_pairs_have_no_privilege_over_expanded_ones() -> None:
    # Expert 1 is the first choice of token 1 (0.4) and the second of token 0 (0.45); it has one place.
    scores_TE = torch.tensor([[0.55, 0.45], [0.3, 0.4]])
    routing = route({"name": "expanded_drop", "capacity_factor": 1}, scores_TE, {"top_k": 1})
    assert routing.map_TE.tolist() == [[True, True], [False, False]]


def test_places_freed_by_the_limit_per_token_are_not_refilled() -> None:
    # As above, then token 0 keeps only its best expert. Expert 1 stays empty: token 1 lost it before.
    scores_TE = torch.tensor([[0.55, 0.45], [0.3, 0.4]])
    spec = {"name": "expanded_drop", "capacity_factor": 1, "max_experts_per_token": 1}
    assert route(spec, scores_TE, {"top_k": 1}).map_TE.tolist() == [[True, False], [False, False]]


def test_expanded_weights_are_normalised_by_the_original_top_k() -> None:
    spec = {"name": "expanded_drop", "capacity_factor": 99}
    routing = route(spec, torch.tensor([[0.5, 0.25, 0.125, 0.125]]), {"top_k": 1, "normalize": True})
    assert routing.weights_TE.tolist() == [[1.0, 0.5, 0.25, 0.25]]


# --- Policies as values ----------------------------------------------------------------------------


@every_spec
def test_a_policy_is_a_frozen_value_that_its_params_rebuild(spec: Spec) -> None:
    policy = make_policy(spec)
    assert make_policy({"name": policy.name, **policy.params()}) == policy
    assert policy.label.startswith(policy.name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.capacity_factor = 2.0


def test_1_and_1_0_are_the_same_policy() -> None:
    one, one_point_zero = (make_policy({"name": "token_drop", "capacity_factor": value}) for value in (1, 1.0))
    assert one == one_point_zero
    assert repr(one.params()) == repr(one_point_zero.params())


# --- Errors ----------------------------------------------------------------------------------------


DROP: Spec = {"name": "token_drop", "capacity_factor": 1.0}
EXPANDED: Spec = {"name": "expanded_drop", "capacity_factor": 1.0}
DROP_FIELDS = "capacity_factor, metric, granularity, modality, min_capacity"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "token_dorp"}, f"name: expected one of {', '.join(POLICIES)}; got 'token_dorp' (did you mean "),
        ({"name": "token_dorp"}, "(did you mean token_drop?)"),
        ({"name": "zzz"}, f"name: expected one of {', '.join(POLICIES)}; got 'zzz'"),
        ({}, f"name: expected one of {', '.join(POLICIES)}; got None"),
        ({"name": ["topk"]}, "got ['topk']"),
        ({"name": "topk", "k": 2}, "k: topk has no such field; expected no fields"),
        (
            {**DROP, "capacity_facto": 2},
            f"capacity_facto: token_drop has no such field; expected {DROP_FIELDS} (did you mean capacity_factor?)",
        ),
        ({**DROP, "scope": "local"}, f"scope: token_drop has no such field; expected {DROP_FIELDS}"),
        ({"name": "token_drop"}, "capacity_factor: token_drop needs it"),
        ({"name": "expanded_drop", "num_candidates": 2}, "capacity_factor: expanded_drop needs it"),
        ({**DROP, "capacity_factor": -0.5}, "capacity_factor: expected a finite number >= 0, got -0.5"),
        ({**DROP, "capacity_factor": float("nan")}, "capacity_factor: expected a finite number >= 0, got nan"),
        ({**DROP, "capacity_factor": float("inf")}, "capacity_factor: expected a finite number >= 0, got inf"),
        ({**DROP, "capacity_factor": "1.5"}, "capacity_factor: expected a finite number >= 0, got '1.5'"),
        ({**DROP, "capacity_factor": None}, "capacity_factor: expected a finite number >= 0, got None"),
        ({**DROP, "metric": "scores"}, "metric: expected one of score, order, reverse_order, random; got 'scores'"),
        ({**DROP, "metric": None}, "metric: expected one of score, order, reverse_order, random; got None"),
        ({**DROP, "granularity": "rank"}, "granularity: expected one of expert, device; got 'rank'"),
        ({**DROP, "modality": "image"}, "modality: expected one of uniform, image_first, text_first; got 'image'"),
        ({**DROP, "min_capacity": -1}, "min_capacity: expected a whole number >= 0, got -1"),
        ({**DROP, "min_capacity": 1.5}, "min_capacity: expected a whole number >= 0, got 1.5"),
        ({**DROP, "min_capacity": True}, "min_capacity: expected a whole number >= 0, got True"),
        ({**EXPANDED, "scope": "node"}, "scope: expected one of local, global; got 'node'"),
        ({**EXPANDED, "scope": "global"}, "num_candidates: scope=global needs a whole number >= 0, got None"),
        ({**EXPANDED, "num_candidates": -1}, "num_candidates: expected a whole number >= 0, got -1"),
        ({**EXPANDED, "num_candidates": "2"}, "num_candidates: expected a whole number >= 0, got '2'"),
        ({**EXPANDED, "max_experts_per_token": 0}, "max_experts_per_token: expected a whole number >= 1, got 0"),
        ({**EXPANDED, "max_experts_per_token": True}, "max_experts_per_token: expected a whole number >= 1, got True"),
        ({**EXPANDED, "capacity_factor": -1}, "capacity_factor: expected a finite number >= 0, got -1"),
    ],
)
def test_a_wrong_spec_is_refused_with_a_message_that_names_the_field(spec: Spec, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared below
        make_policy(spec)
    assert message in str(error.value)


def with_value(value: float) -> Tensor:
    """Six tokens, eight experts, one bad score in the last corner."""
    scores_TE = torch.full([6, 8], 0.125)
    scores_TE[-1, -1] = value
    return scores_TE


BAD_SCORES = "scores_TE: expected finite, non-negative values; got NaN, Inf or a negative score"


@pytest.mark.parametrize("spec", [{"name": "topk"}, DROP, EXPANDED], ids=lambda spec: spec["name"])
@pytest.mark.parametrize(
    ("scores_TE", "message"),
    [
        (with_value(float("nan")), BAD_SCORES),
        (with_value(float("inf")), BAD_SCORES),
        (with_value(-1e-30), BAD_SCORES),
        (torch.full([6, 8], 0.125, dtype=torch.float64), "scores_TE: expected float32, got torch.float64"),
        (torch.full([6, 8], 0.125, dtype=torch.bfloat16), "scores_TE: expected float32, got torch.bfloat16"),
        (torch.ones([6, 8], dtype=torch.int64), "scores_TE: expected float32, got torch.int64"),
        (torch.full([8], 0.125), "scores_TE: expected 2 dimensions [T, E], got 1"),
        (torch.full([2, 3, 8], 0.125), "scores_TE: expected 2 dimensions [T, E], got 3"),
    ],
    ids=["nan", "inf", "negative", "float64", "bfloat16", "int64", "1-d", "3-d"],
)
def test_wrong_scores_are_refused(spec: Spec, scores_TE: Tensor, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared below
        route(spec, scores_TE, {"top_k": 2})
    assert str(error.value) == message


@pytest.mark.parametrize("spec", [{"name": "topk"}, DROP, EXPANDED], ids=lambda spec: spec["name"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 9}, "top_k: expected 1 to 8 (the experts), got 9"),
        ({"top_k": 0}, "top_k: expected 1 to 8 (the experts), got 0"),
        ({"num_ranks": 3}, "num_ranks: expected a divisor of the 8 experts, got 3"),
        ({"num_ranks": 0}, "num_ranks: expected a divisor of the 8 experts, got 0"),
        ({"num_ranks": 4, "rank": 4}, "rank: expected 0 to 3, got 4"),
        ({"num_ranks": 4, "rank": -1}, "rank: expected 0 to 3, got -1"),
        ({"bias_E": torch.zeros(7)}, "bias_E: expected shape (8,), got (7,)"),
        ({"bias_E": torch.full([8], float("nan"))}, "bias_E: expected finite values, got NaN or Inf"),
        ({"bias_E": torch.zeros(8, dtype=torch.float64)}, "bias_E: expected float32, got torch.float64"),
        ({"load_E": torch.zeros(9)}, "load_E: expected shape (8,), got (9,)"),
        ({"token_mask_T": torch.ones(5, dtype=torch.bool)}, "token_mask_T: expected shape (6,), got (5,)"),
        ({"token_mask_T": torch.ones(6)}, "token_mask_T: expected bool, got torch.float32"),
        ({"modality_T": torch.zeros(5)}, "modality_T: expected shape (6,), got (5,)"),
        ({"request_id_T": torch.zeros(7)}, "request_id_T: expected shape (6,), got (7,)"),
        ({"num_groups": 2}, "num_groups and top_groups: expected both or neither"),
        ({"top_groups": 2}, "num_groups and top_groups: expected both or neither"),
        ({"num_groups": 3, "top_groups": 1}, "num_groups: expected a divisor of the 8 experts, got 3"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups: expected 1 to 4, got 5"),
        (
            {"top_k": 3, "num_groups": 4, "top_groups": 1},
            "top_groups: expected groups of 2 experts that can hold top_k=3, got 1",
        ),
    ],
    ids=str,
)
def test_a_wrong_context_is_refused(spec: Spec, arguments: Arguments, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared below
        route(spec, torch.full([6, 8], 0.125), {"top_k": 2, **arguments})
    assert str(error.value) == message


@pytest.mark.parametrize("spec", [DROP, EXPANDED], ids=lambda spec: spec["name"])
@pytest.mark.parametrize("num_tokens", [0, 6])
def test_what_a_policy_needs_from_the_context_is_asked_for(spec: Spec, num_tokens: int) -> None:
    scores_TE, context = torch.full([num_tokens, 8], 0.125), RoutingContext(top_k=2)
    needs_generator = make_policy({**spec, "metric": "random"})
    with pytest.raises(
        ValueError, match=r"^generator: metric=random needs a torch\.Generator in the context, got None$"
    ):
        needs_generator.route(scores_TE, context)
    for modality in ("image_first", "text_first"):
        needs_modality = make_policy({**spec, "modality": modality})
        with pytest.raises(
            ValueError, match=rf"^modality_T: modality={modality} needs the tokens' modality, got None$"
        ):
            needs_modality.route(scores_TE, context)
