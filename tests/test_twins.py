"""Which form of a policy runs is one table: what it holds, what it refuses, what it says of a missing package."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from policy_cases import assert_same, random_scores
from torch import Tensor

from moe_ep_bench.kernels import twins
from moe_ep_bench.kernels.twins import KERNELS, kernel_for, oracle_for, twin_for
from moe_ep_bench.policies import POLICIES, Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.policies.selection import weighted
from moe_ep_bench.policies.steps import Steps

FIELDS = {
    "token_drop": {"capacity_factor": 1.0},
    "expanded_drop": {"capacity_factor": 1.0},
    "megatron_drop": {"capacity_factor": 1.0},
    "pruned": {"k0": 2},
    "oea": {"k0": 2},
    "laser": {"eps_high": 0.8, "t_fix": 0.1, "c": 8},
    "xshare": {"k0": 1, "budget": 4},
    "lynx": {"num_dropped": 2},
    "dynamic_skip": {"beta": 0.5},
}
EVERYONE = [make_policy({"name": name, **FIELDS.get(name, {})}) for name in POLICIES]
WITHOUT_TRITON = {"megatron_drop"}
ON_HOST_FROM_GPU = {"laser", "load_only"}

every_policy = pytest.mark.parametrize("policy", EVERYONE, ids=lambda policy: policy.name)


def runs(policy: Policy, kernel: str, device_type: str, num_tokens: int = 100, num_experts: int = 64) -> bool:
    try:
        return kernel_for(policy, kernel, device_type, num_tokens, num_experts) == kernel
    except ValueError:
        return False


@every_policy
def test_what_can_run_is_what_the_table_says(policy: Policy) -> None:
    assert {kernel for kernel in KERNELS if runs(policy, kernel, "cpu")} == {"torch", "numba"}
    on_gpu = {"torch"} | ({"triton"} if policy.name not in WITHOUT_TRITON else set())
    on_gpu |= {"numba"} if policy.name in ON_HOST_FROM_GPU else set()
    assert {kernel for kernel in KERNELS if runs(policy, kernel, "cuda")} == on_gpu


@every_policy
def test_auto_takes_the_fastest_that_can_run(policy: Policy) -> None:
    for device_type in ("cpu", "cuda"):
        able = [kernel for kernel in KERNELS if runs(policy, kernel, device_type)]
        assert kernel_for(policy, "auto", device_type, 100, 64) == able[0]


@every_policy
def test_all_kernels_that_can_run_route_alike(policy: Policy) -> None:
    scores_TE = random_scores("softmax", 40, 16, seed=3)
    context = RoutingContext(top_k=4, num_ranks=4, request_id_T=torch.arange(40) // 10)
    expected = policy.route(scores_TE, context, kernel="torch")
    for kernel in ("numba", "auto"):
        assert_same(policy.route(scores_TE, context, kernel=kernel), expected)
        twin = twin_for(policy, kernel, scores_TE)
        stats_SE = twin.stats(policy, scores_TE, context)
        assert_same(twin.select(policy, scores_TE, context, stats_SE), expected)


@pytest.mark.parametrize(
    ("kernel", "device_type", "name", "shape", "message"),
    [
        ("triton", "cpu", "topk", (8, 64), "Triton compiles for CUDA GPUs, and the scores lie on the host"),
        ("triton", "cuda", "megatron_drop", (8, 64), "there is no Triton form of it; expected auto, torch"),
        ("triton", "cuda", "topk", (8, 2048), "it takes 1,024 experts at most"),
        ("triton", "cuda", "token_drop", (2**21, 1024), "it takes 1,073,741,824 scores at most"),
        ("numba", "cuda", "oea", (8, 64), "numba runs on the host, and the scores lie on a GPU; expected auto, triton"),
        ("cuda", "cpu", "oea", (8, 64), "expected one of auto, triton, numba, torch; got 'cuda'"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_with_the_reason(
    kernel: str, device_type: str, name: str, shape: tuple[int, int], message: str
) -> None:
    policy = make_policy({"name": name, **FIELDS.get(name, {})})
    with pytest.raises(ValueError, match=message):
        kernel_for(policy, kernel, device_type, *shape)


def test_beyond_a_twins_size_auto_falls_back_and_says_what_runs() -> None:
    policy = make_policy({"name": "token_drop", "capacity_factor": 1.0})
    assert kernel_for(policy, "auto", "cuda", 2**21, 1024) == "torch"
    assert kernel_for(policy, "auto", "cuda", 2**20, 1024) == "triton"


@every_policy
def test_the_oracle_is_torch_but_for_what_goes_token_by_token(policy: Policy) -> None:
    assert oracle_for(policy, "cuda") == ("numba" if policy.name in ON_HOST_FROM_GPU else "torch")


@dataclass(frozen=True, kw_only=True)
class Own(Policy):
    """A policy that somebody wrote for themselves: the first K experts."""

    name: ClassVar[str] = "own"

    def select_by(self, steps: Steps, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
        map_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
        map_TE[:, : context.top_k] = True
        return weighted(scores_TE, map_TE, map_TE, context, steps)


def test_a_policy_of_one_s_own_runs_step_by_step() -> None:
    scores_TE = random_scores("softmax", 5, 8, seed=1)
    for kernel in ("auto", "numba", "torch"):
        assert Own().route(scores_TE, RoutingContext(top_k=3), kernel=kernel).map_TE[:, :3].all()
    assert kernel_for(Own(), "auto", "cuda", 5, 8) == "torch"


@pytest.fixture
def _forgets() -> None:
    """The table is looked up anew, before and after."""
    tables = (twins.triton_twins, twins._steps)
    for table in tables:
        table.cache_clear()
    yield
    for table in tables:
        table.cache_clear()


@pytest.mark.usefixtures("_forgets")
@pytest.mark.parametrize(("module", "device_type", "name"), [("numba", "cpu", "topk"), ("triton", "cuda", "topk")])
def test_a_missing_package_is_said_once_and_torch_runs(
    monkeypatch: pytest.MonkeyPatch, module: str, device_type: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    policy = make_policy({"name": name})
    with pytest.warns(RuntimeWarning, match="cannot be imported"):
        assert kernel_for(policy, "auto", device_type, 8, 64) == "torch"
    assert kernel_for(policy, "auto", device_type, 8, 64) == "torch"  # warnings are errors here
    with pytest.raises(ValueError, match="is not installed"):
        kernel_for(policy, module, device_type, 8, 64)
