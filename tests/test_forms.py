"""Every compiled form of a policy routes like its rule in torch: one suite of laws for numba and Triton.

``test_policies`` holds the rule in torch against its oracle. Here Triton's interpreter runs the kernels; ``-m gpu``
runs them on a CUDA device, on larger batches and inside graphs too. Which form runs is one table.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from policy_cases import (
    ONE_OF_EACH,
    SCORE_KINDS,
    SPECS,
    Arguments,
    Spec,
    assert_same,
    assert_same_choice,
    context_of,
    distinct_scores,
    fitted,
    possible_groups,
    random_scores,
)
from test_route import write_config
from torch import Tensor

from moe_ep_bench import kernels
from moe_ep_bench.bench.description import kernels_of
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import ROUTING
from moe_ep_bench.config import label_of
from moe_ep_bench.facts import Component
from moe_ep_bench.facts.words import component_words
from moe_ep_bench.kernels import capacity_triton, form_of, has_triton, oracle_for, triton_forms
from moe_ep_bench.kernels.experts import row_sums, row_sums_by_bags, weighted_swiglu, weighted_swiglu_formula
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.policies.laser import LoadOnly
from moe_ep_bench.policies.selection import TopK

pytestmark = pytest.mark.usefixtures("patched_once")


class Form(NamedTuple):
    """Attributes:
    kernel: what ``PolicyForm.runs`` must say.
    asked_for: the device type for which a form is asked.
    device: where the scores lie.
    """

    kernel: str
    asked_for: str
    device: str


NUMBA, INTERPRETED, COMPILED = (
    Form("numba", "cpu", "cpu"),
    Form("triton", "cuda", "cpu"),
    Form("triton", "cuda", "cuda"),
)
ON_HOST = [pytest.param(NUMBA, id="numba"), pytest.param(INTERPRETED, id="triton")]
on_host = pytest.mark.parametrize("form", ON_HOST)
every_form = pytest.mark.parametrize("form", [*ON_HOST, pytest.param(COMPILED, id="cuda", marks=pytest.mark.gpu)])

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
MORE_RULES: list[Spec] = [{**BY_REQUEST, "k0": 0, "request_budget": 10_000}, LASER, LOAD_ONLY]


def coarse(scores_TE: Tensor) -> Tensor:
    """Scores with few bits: their sums are exact, and so equal in the other order in which a GPU adds."""
    return (scores_TE * 2**12).ceil() / 2**12


def forms(form: Form, policy: Policy, shape: tuple[int, ...]) -> tuple[Any, Policy]:
    """The compiled form, and the policy to hold it against."""
    compiled = form_of(policy, form.asked_for)
    assert compiled.runs(*shape) == form.kernel
    return compiled, oracle_for(policy, "cuda") if form.device == "cuda" else policy


def assert_routes_like_torch(form: Form, spec: Spec, scores_TE: Tensor, **case: Any) -> Routing:
    """Equal maps; weights within rounding; statistics, where there are any, equal where their sums are exact.

    The form is called with statistics of its own making, and with none. It draws what the form in torch draws.
    """
    arguments: Arguments = {"top_k": 2, **case}
    policy, scores_TE = make_policy(fitted(spec, scores_TE, arguments)), scores_TE.to(form.device)
    compiled, oracle = forms(form, policy, scores_TE.shape)
    context = context_of(arguments, form.device)
    stats_SE = oracle.batch_stats(scores_TE, context)
    expected = oracle.route(scores_TE, context, stats_SE)
    given = [None]
    if stats_SE is not None:
        ours_SE = compiled.batch_stats(scores_TE, context_of(arguments, form.device))
        assert ours_SE.dtype == torch.float64
        torch.testing.assert_close(ours_SE, stats_SE, rtol=1e-12, atol=1e-12)
        given.append(ours_SE)
    for one_SE in given:
        ours = context_of(arguments, form.device)
        assert_same_choice(compiled.route(scores_TE, ours, one_SE), expected)
        assert torch.equal(ours.generator.get_state(), context.generator.get_state())
    return expected


# --- Any case ----------------------------------------------------------------------------------------------


def drawn(number: int, device: str) -> tuple[Tensor, Arguments]:
    """Scores, and a model and a batch with options; which, depends on the number."""
    draw, generator = random.Random(number), torch.Generator().manual_seed(number)
    if device == "cuda":
        by_request = SPECS[number].get("scope") == "request"  # decode steps alone
        shapes = [(1, 64), (16, 128), (777, 60), (3001, 256)]
        num_tokens, num_experts = shapes[(number + number // 4) % (3 if by_request else 4)]
    else:
        num_tokens, num_experts = draw.choice([1, 5, 37]), draw.choice([8, 12, 64])
    options: Arguments = {
        "top_k": draw.choice([4, 6]),
        "num_ranks": 4,
        "rank": number % 4,
        "normalize": number % 2 == 0,
        "scale": 2.5 if number % 3 == 0 else 1.0,
        "modality_T": torch.randint(0, 2, [num_tokens], generator=generator),
        "request_id_T": torch.randint(0, 1 + max(3, num_tokens // 16), [num_tokens], generator=generator) * 1000 - 7,
        "layer_fraction": number % 5 / 5,
        "seed": number,
    }
    scores_TE = random_scores(draw.choice(SCORE_KINDS), num_tokens, num_experts, number)
    if number % 4 == 1:
        options["bias_E"] = torch.randint(-4, 5, [num_experts], generator=generator) / 4
    if number % 4 == 2:
        options["token_mask_T"] = torch.rand([num_tokens], generator=generator) < 0.7
    groups = possible_groups(num_experts, options["top_k"])
    if number % 4 == 3 and groups:
        options["num_groups"], options["top_groups"] = groups[number % len(groups)]
        scores_TE = (scores_TE * 2**20).round() / 2**20  # a group's value is a sum: keep it exact
    return (coarse(scores_TE) if device == "cuda" else scores_TE), options


@pytest.mark.slow
@every_form
@pytest.mark.parametrize("number", range(len(SPECS)), ids=lambda number: label_of(make_policy(SPECS[number])))
def test_every_policy_routes_like_torch(number: int, form: Form) -> None:
    """Each spec once, with whatever model, padding and scores its number draws."""
    scores_TE, options = drawn(number, form.device)
    assert_routes_like_torch(form, SPECS[number], scores_TE, **options)


# --- Scores of every kind ----------------------------------------------------------------------------------


TOKEN = torch.arange(26)
SCATTERED = torch.randint(-2, 3, [26], generator=torch.Generator().manual_seed(2)) * 2**61
LEVELS = random_scores("levels", 10, 8, seed=3)
LEVELS[::2] = 0.25
ODD_IDS = torch.tensor([3, -1, 3, 0, -(2**63)])
FEW_TOKENS: dict[str, tuple[Tensor, Arguments]] = {
    "wide rows": (
        random_scores("softmax", 20, 256, 3),
        {"top_k": 8, "normalize": True, "token_mask_T": TOKEN[:20] % 7 != 0, "request_id_T": TOKEN[:20] // 11},
    ),
    "one expert takes all": (torch.eye(16)[9].expand(5, 16), {"request_id_T": ODD_IDS}),
    "denormals": (
        torch.randint(0, 5, [5, 16], generator=torch.Generator().manual_seed(4)) * 2.0**-149,
        {"request_id_T": ODD_IDS},
    ),
    "equal denormals": (LEVELS * 2.0**-140, {"top_k": 2}),
    "zeros": (torch.zeros(10, 8), {"top_k": 2}),
    "no tokens": (torch.zeros(0, 16), {}),
    "padding alone": (random_scores("softmax", 1, 12, 0), {"top_k": 3, "token_mask_T": TOKEN[:1] > 0}),
    # One request is padding alone.
    "scattered requests": (
        random_scores("sigmoid", 26, 16, 3),
        {"top_k": 3, "request_id_T": SCATTERED, "token_mask_T": (TOKEN % 10 < 7) & (SCATTERED != 0)},
    ),
}
# Several blocks of tokens, and a threshold of every kind at which an expert's capacity ends.
MANY_TOKENS: dict[str, Tensor] = {
    "several blocks": random_scores("softmax", 140, 64, 1),
    "one expert takes most": distinct_scores(200, 16, 4) * 0.001 + torch.eye(16)[3],
    "neighbouring floats": (torch.ones(120, 16).view(torch.int32) + torch.arange(16) % 3).view(torch.float32),
    # Far more pairs at the threshold than a program looks at in one go.
    "equal": torch.full([200, 8], 0.125),
}


@pytest.mark.slow
@on_host
@pytest.mark.parametrize("spec", [*EVERY_RULE, *MORE_RULES], ids=str)
def test_few_tokens_of_every_kind_are_routed_like_torch(spec: Spec, form: Form) -> None:
    for scores_TE, options in FEW_TOKENS.values():
        requests = {"request_id_T": TOKEN[: len(scores_TE)] // 4}
        assert_routes_like_torch(form, spec, scores_TE, **{"top_k": 4, "num_ranks": 4, **requests, **options})


@pytest.mark.slow
@on_host
@pytest.mark.parametrize("spec", [TOKEN_DROP, EXPANDED_DROP, {**TOKEN_DROP, "granularity": "device"}], ids=str)
@pytest.mark.parametrize("kind", MANY_TOKENS)
def test_capacities_cut_scores_of_every_kind_like_torch(
    kind: str, spec: Spec, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity_triton, "_LISTED", 128)
    monkeypatch.setattr(capacity_triton, "_SETTLED", 64)
    for scores_TE in (MANY_TOKENS[kind], MANY_TOKENS[kind][:0]):
        assert_routes_like_torch(form, spec, scores_TE, num_ranks=4, rank=1, normalize=True)


@on_host
def test_statistics_of_other_ranks_decide_as_in_torch(form: Form) -> None:
    """They open experts that nobody here wants."""
    scores_TE = random_scores("softmax", 12, 32, 8)
    others_SE = torch.stack([torch.arange(32).double() % 3, torch.arange(32).double().flip(0) % 11])
    context = context_of({"top_k": 4, "num_ranks": 4, "normalize": True, "request_id_T": torch.arange(12)})
    num_batch_wide = 0
    for policy in map(make_policy, EVERY_RULE):
        compiled, _ = forms(form, policy, scores_TE.shape)
        own_SE = compiled.batch_stats(scores_TE, context)
        if own_SE is None:
            continue
        num_batch_wide += 1
        stats_SE = own_SE + others_SE.repeat(-(-len(own_SE) // 2), 1)[: len(own_SE)]
        expected = policy.route(scores_TE, context, stats_SE)
        assert_same_choice(compiled.route(scores_TE, context, stats_SE), expected)
    assert num_batch_wide == 9


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


@on_host
@pytest.mark.parametrize(("spec", "rows", "marks"), THRESHOLDS)
def test_thresholds_are_compared_in_float64(spec: Spec, rows: list[list[float]], marks: list[int], form: Form) -> None:
    routing = assert_routes_like_torch(form, spec, torch.tensor(rows), top_k=len(rows[0]))
    assert routing.map_TE.sum(dim=1).tolist() == marks


@on_host
@pytest.mark.parametrize("share", [0.1, 0.7])
def test_laser_compares_scores_and_shares_in_float64(share: float, form: Form) -> None:
    """Scores lie on either side of a threshold that in float32 would be one of them."""
    near = torch.tensor(share, dtype=torch.float32)
    around = torch.stack([torch.nextafter(near, torch.tensor(0.0)), near, torch.nextafter(near, torch.tensor(1.0))])
    # Of expert 0 and others: above t_fix of the best, or not.
    scores_TE = torch.tensor([[1.0, value, 0.01, 0.02] for value in around for _ in range(3)])
    assert_routes_like_torch(form, {**LASER, "eps_high": 1, "t_fix": share, "c": 4}, scores_TE, top_k=1)
    # A top-k that holds eps_high itself of its row stays, however full its expert is.
    equal_TE = torch.tensor([[0.5, 0.25, 0.25, 0.0]] * 3)
    routing = assert_routes_like_torch(form, {**LASER, "eps_high": 0.5, "t_fix": 0.5, "c": 4}, equal_TE, top_k=1)
    assert routing.map_TE[:, 0].all()
    # A top-k that holds just about eps_high of a row sum of 1: half a row's last bit decides.
    rest = (1.0 - around.double()).float()
    lefts = rest, torch.nextafter(rest, torch.ones(3)), torch.nextafter(rest, -torch.ones(3))
    rows_TE = torch.cat([torch.stack([around, left, torch.zeros(3), torch.zeros(3)], dim=1) for left in lefts])
    rule = {**LASER, "eps_high": share, "t_fix": 0, "c": 4}
    assert_routes_like_torch(form, rule, rows_TE.repeat_interleave(3, dim=0), top_k=1)


@on_host
@pytest.mark.parametrize("gamma", [0.7, 123456.7])
def test_a_capacity_of_valid_tokens_is_the_exact_decimal_one(gamma: float, form: Form) -> None:
    """0.7 * 360 * 2 / 8 is 63, where doubles give 62; no host counts the tokens, but for absurdly many decimals."""
    valid_T = torch.arange(400) < 360
    scores_TE = distinct_scores(400, 8, 6) * 0.001 + torch.eye(8)[0] + torch.eye(8)[5]
    rule = {**TOKEN_DROP, "capacity_factor": gamma}
    map_TE = assert_routes_like_torch(form, rule, scores_TE, token_mask_T=valid_T).map_TE
    room = min(360, int(Fraction(str(gamma)) * 360 * 2 / 8))
    assert map_TE.sum(dim=0).tolist() == [room, 0, 0, 0, 0, room, 0, 0]


# --- Launches ----------------------------------------------------------------------------------------------


@pytest.mark.slow
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
    context = RoutingContext(top_k=4, num_ranks=4, request_id_T=torch.arange(shape[0]))
    form_of(make_policy(spec), "cuda").select(random_scores("softmax", *shape, 1), context)
    assert len(launches) == expected, launches


# --- Which form runs ---------------------------------------------------------------------------------------


EVERYONE = [make_policy(spec) for spec in ONE_OF_EACH]
ON_HOST_FROM_GPU = {"laser", "load_only"}

every_policy = pytest.mark.parametrize("policy", EVERYONE, ids=lambda policy: policy.name)


@every_policy
def test_what_runs_is_what_the_table_says(policy: Policy) -> None:
    assert form_of(policy, "cpu").runs(100, 64) == "numba"
    on_gpu = "torch" if policy.name == "sere" else "triton"
    assert form_of(policy, "cuda").runs(100, 64) == on_gpu
    assert has_triton(policy) == (on_gpu == "triton")
    assert form_of(policy, "cuda").runs(100, 2048) == ("numba" if policy.name in ON_HOST_FROM_GPU else "torch")


def test_beyond_a_forms_size_auto_falls_back_and_says_what_runs() -> None:
    policy = make_policy({"name": "token_drop", "capacity_factor": 1.0})
    assert form_of(policy, "cuda").runs(2**21, 1024) == "torch"
    assert form_of(policy, "cuda").runs(2**20, 1024) == "triton"
    assert [form_of(LoadOnly(), "cuda").runs(2**n, 1024) for n in (19, 20)] == ["triton", "numba"]
    by_request = make_policy({"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2})
    assert [form_of(by_request, "cuda").runs(num_tokens, 64) for num_tokens in (1024, 1025)] == ["triton", "torch"]


class OwnTopK(TopK):
    """The first K experts: a rule of its own under a class that has compiled forms."""

    name: ClassVar[str] = "own_topk"

    def route(self, scores_TE: Tensor, context: RoutingContext, stats: Tensor | None = None) -> Routing:
        map_TE = (torch.arange(scores_TE.shape[1]) < context.top_k).expand_as(scores_TE)
        return Routing(map_TE=map_TE, weights_TE=scores_TE * map_TE)


def test_a_policy_of_one_s_own_needs_nothing_but_its_route() -> None:
    policy, context = OwnTopK(), RoutingContext(top_k=3)
    scores_TE = random_scores("softmax", 10, 8, seed=1)
    assert_same(form_of(policy, "cpu").route(scores_TE, context), policy.route(scores_TE, context))
    assert [form_of(policy, device).runs(5, 8) for device in ("cpu", "cuda")] == ["torch"] * 2


@pytest.mark.slow
def test_neither_numba_nor_triton_is_imported_before_it_is_chosen() -> None:
    code = """
import sys, torch
from moe_ep_bench.kernels import form_of, has_triton
from moe_ep_bench.policies import RoutingContext, make_policy
form_of(make_policy({"name": "topk"}), "cpu").policy.route(torch.rand(3, 8), RoutingContext(top_k=2))
assert not {"numba", "triton"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def _forgets() -> None:
    """The table is looked up anew, before and after."""
    kernels.triton_lacks.cache_clear()
    yield
    kernels.triton_lacks.cache_clear()


@pytest.mark.usefixtures("_forgets")
def test_without_triton_that_is_said_once_and_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(RuntimeWarning, match="cannot be imported"):
        assert form_of(TopK(), "cuda").runs(8, 64) == "torch"
    assert form_of(TopK(), "cuda").runs(8, 64) == "torch"  # warnings are errors here


class OnGpu(torch.Tensor):
    """Lies on the host and says that it lies on a GPU."""

    is_cuda = property(lambda self: True)


@pytest.mark.usefixtures("_forgets")
def test_without_a_c_compiler_torch_runs_and_results_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton is there, and builds nothing: no case is lost, and what cannot run without it is refused by name."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    why = "no C compiler (gcc or clang), which Triton needs"
    policies = [{"name": "token_drop", "capacity_factor": 1.0}, {"name": "load_only"}]
    config = write_config(tmp_path, policies=policies)
    comparison = plan(config, [], ROUTING)[0]
    with pytest.warns(RuntimeWarning, match=r"no C compiler.*: on the GPU policies and activations run as torch"):
        ran = kernels_of(replace(comparison, on_gpu=True))
    assert component_words(ran) == f"numba, torch (asked for auto: {why})"
    assert kernels_of(comparison) == Component(requested="auto", ran="numba")
    rows_N2F, weights_N = torch.rand(3, 8), torch.rand(3)
    expected_NF = weighted_swiglu_formula(rows_N2F, weights_N)
    assert torch.equal(weighted_swiglu(rows_N2F.as_subclass(OnGpu), weights_N), expected_NF)
    places_N, ends_T = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3])
    expected_TF = row_sums_by_bags(rows_N2F, places_N, ends_T)
    assert torch.equal(row_sums(rows_N2F.as_subclass(OnGpu), places_N, ends_T), expected_TF)
    for asked, key in (("decode", "layer.experts: decode"), ("auto", "layer.cuda_graph: true")):
        with pytest.raises(ValueError, match=f"{key} needs Triton's kernels on a GPU: no C compiler"):
            LayerBackend.choose(asked, cuda_graph="graph" in key, on_cpu=False)


# --- On a GPU alone ----------------------------------------------------------------------------------------


BIG = [
    {"name": "topk"},
    TOKEN_DROP,
    {**TOKEN_DROP, "granularity": "device"},
    EXPANDED_DROP,
    {**EXPANDED_DROP, "capacity_factor": 1.5, "num_candidates": 2, "max_experts_per_token": 8},
    {"name": "oea", "k0": 4},
    {"name": "xshare", "k0": 1, "budget": 16},
    {"name": "dynamic_skip", "beta": 0.3},
]
BIG_KINDS = {
    "levels": lambda: random_scores("levels", 5000, 64, 1),
    "signed zeros": lambda: random_scores("signed zeros", 999, 64, 2),
    "equal": lambda: torch.full([70_001, 64], 0.125),
    "zero rows": lambda: coarse(random_scores("zero rows", 2000, 64, 3)),
    "denormals": lambda: distinct_scores(1000, 64, 4) * 1e-40,
    "one expert takes all": lambda: distinct_scores(50_000, 64, 5) * 2**-12 + torch.eye(64)[3],
}


def labels(specs: list[Spec]) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=lambda spec: label_of(make_policy(spec)).replace(" ", ","))


@pytest.mark.gpu
@labels(BIG)
@pytest.mark.parametrize("kind", BIG_KINDS)
def test_many_tokens_of_every_kind_are_routed_like_torch_on_a_gpu(kind: str, spec: Spec) -> None:
    scores_TE = BIG_KINDS[kind]()
    assert_routes_like_torch(COMPILED, spec, scores_TE, top_k=8, num_ranks=8)


@pytest.mark.gpu
@labels(BIG)
@pytest.mark.parametrize("shape", [(524_288, 64), (524_287, 128)], ids=str)
def test_the_largest_batches_are_routed_like_torch_and_alike_again(shape: tuple[int, int], spec: Spec) -> None:
    generator = torch.Generator("cuda").manual_seed(6)
    scores_TE = coarse((2 * torch.randn(shape, generator=generator, device="cuda")).softmax(dim=1))
    options = {"top_k": 8, "num_ranks": 8, "normalize": True}
    assert_routes_like_torch(COMPILED, spec, scores_TE, **options)
    once, again = (form_of(make_policy(spec), "cuda").route(scores_TE, RoutingContext(**options)) for _ in range(2))
    assert torch.equal(again.map_TE, once.map_TE)
    assert torch.equal(again.weights_TE, once.weights_TE)


@pytest.mark.gpu
@labels([*BIG, BY_REQUEST])
@pytest.mark.parametrize("num_tokens", [16, 100])
def test_a_graph_routes_new_scores_as_a_launch_does(num_tokens: int, spec: Spec) -> None:
    policy, token_T = make_policy(spec), torch.arange(num_tokens, device="cuda")
    select = triton_forms()[type(policy)].select
    batches = [coarse(random_scores("softmax", num_tokens, 128, seed)).cuda() for seed in (7, 8)]
    context = RoutingContext(top_k=8, num_ranks=8, token_mask_T=token_T != 3, request_id_T=token_T // 4)
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
