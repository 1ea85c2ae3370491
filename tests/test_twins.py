"""Which form of a policy runs is one table: what it holds, what it refuses, what it says of a missing package."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from policy_cases import (
    ONE_OF_EACH,
    assert_same,
    random_scores,
)
from test_route import write_config
from torch import Tensor

from moe_ep_bench import kernels
from moe_ep_bench.bench.description import kernels_of
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import ROUTING
from moe_ep_bench.facts import Component
from moe_ep_bench.facts.words import component_words
from moe_ep_bench.kernels import form_of, has_triton
from moe_ep_bench.kernels.experts import row_sums, row_sums_by_bags, weighted_swiglu, weighted_swiglu_formula
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.policies.laser import LoadOnly
from moe_ep_bench.policies.selection import TopK

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


def test_beyond_a_twins_size_auto_falls_back_and_says_what_runs() -> None:
    policy = make_policy({"name": "token_drop", "capacity_factor": 1.0})
    assert form_of(policy, "cuda").runs(2**21, 1024) == "torch"
    assert form_of(policy, "cuda").runs(2**20, 1024) == "triton"
    assert [form_of(LoadOnly(), "cuda").runs(2**n, 1024) for n in (19, 20)] == ["triton", "numba"]
    by_request = make_policy({"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2})
    assert [form_of(by_request, "cuda").runs(num_tokens, 64) for num_tokens in (1024, 1025)] == ["triton", "torch"]


class OwnTopK(TopK):
    """The first K experts: a rule of its own under a class that has twins."""

    name: ClassVar[str] = "own_topk"

    def route(self, scores_TE: Tensor, context: RoutingContext, stats: Tensor | None = None) -> Routing:
        map_TE = (torch.arange(scores_TE.shape[1]) < context.top_k).expand_as(scores_TE)
        return Routing(map_TE=map_TE, weights_TE=scores_TE * map_TE)


def test_a_policy_of_one_s_own_needs_nothing_but_its_route() -> None:
    policy, context = OwnTopK(), RoutingContext(top_k=3)
    scores_TE = random_scores("softmax", 10, 8, seed=1)
    assert_same(form_of(policy, "cpu").route(scores_TE, context), policy.route(scores_TE, context))
    assert [form_of(policy, device).runs(5, 8) for device in ("cpu", "cuda")] == ["torch"] * 2


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
