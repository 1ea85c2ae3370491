"""What a layer is made of: experts and permutation by where it runs, a Transformer Engine that is tried, the router."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor

from moe_ep_bench.kernels.swiglu import weighted_swiglu_formula
from moe_ep_bench.layer import parts, te_check
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.router import PolicyRouter
from moe_ep_bench.layer.scores import logits_from_scores, scores_from_logits
from moe_ep_bench.layer.te_check import TransformerEngine
from moe_ep_bench.models import ScoreFunction, load_model
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.policies.steps import TORCH

pytestmark = pytest.mark.seam


# What is asked for, on a CPU or not, beside which Transformer Engine (and its problem): what runs, or the error.
REQUESTS = [
    (("auto",), "GPU", None, Parts("grouped", "indexed")),
    (("decode",), "GPU", None, Parts("decode", "indexed")),
    (("te",), "GPU", None, "layer.experts: te needs Transformer Engine, which is not installed; exp"),
    (("auto",), "CPU", "2.4.0+abc", Parts("grouped", "indexed")),
    (("sequential",), "CPU", None, Parts("sequential", "indexed")),
    (("auto", "allgather"), "CPU", None, Parts("grouped", "megatron", dispatcher="allgather")),
    (("decode", "allgather"), "CPU", None, Parts("decode", "none", dispatcher="allgather")),
    (("te",), "CPU", "2.4.0+abc", "layer.experts: te needs a GPU; expected auto, grouped or sequential"),
    (("auto",), "GPU", "2.4.0+abc", Parts("te", "fused")),
    (("auto",), "GPU", "1.13.0", Parts("te", "indexed")),
    (("te",), "GPU", "2.9.0 broken", r"a Transformer Engine that works; 2.9.0 does not \(ImportError"),
    (("auto", "allgather", "graph"), "GPU", None,
     Parts("decode", "none", "auto", "allgather", cuda_graph=True, experts_why="a CUDA graph holds no others")),
    (("auto", "alltoall", "graph"), "GPU", None, "layer.cuda_graph: true needs layer.dispatcher allgather"),
    (("grouped", "allgather", "graph"), "GPU", None, "layer.cuda_graph: true needs layer.experts decode"),
    (("auto", "flex"), "CPU", None, "flex needs a GPU"),
    (("auto", "flex"), "GPU", None, r"flex needs DeepEP \(the package deep_ep\), which is not installed"),
]  # fmt: skip


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Parts]:
    def chosen(asked: tuple[str, ...], where: str, te: str | None, **options: object) -> Parts:
        version, _, problem = (te or "").partition(" ")
        found = TransformerEngine("ImportError: undefined symbol" if problem else "", routes=te == "2.9.0")
        monkeypatch.setattr(parts, "version_of", lambda distribution: version or None)
        monkeypatch.setattr(parts, "transformer_engine", lambda: found)
        names = [one for one in asked if one != "graph"]
        return Parts.choose(*names, cuda_graph="graph" in asked, on_cpu=where == "CPU", **options)

    return chosen


@pytest.mark.parametrize(("asked", "where", "te", "expected"), REQUESTS)
def test_every_request_and_what_runs(
    asked: tuple[str, ...], where: str, te: str | None, expected: Parts | str, choose: Callable[..., Parts]
) -> None:
    if isinstance(expected, Parts):
        assert choose(asked, where, te) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            choose(asked, where, te)


def test_auto_fuses_what_the_version_can(choose) -> None:
    model = load_model("olmoe-1b-7b")
    assert choose(("grouped",), "GPU", "2.9.0").fuses_router(model)
    assert not choose(("grouped",), "GPU", "2.9.0").fuses_router(load_model("deepseek-v4-flash"))
    chosen = choose(("auto",), "GPU", "2.9.0 broken")
    why = "Transformer Engine 2.9.0 does not work here (ImportError: undefined symbol)"
    assert (chosen.experts, chosen.permute, chosen.experts_why) == ("grouped", "indexed", why)
    assert not chosen.fuses_router(model)


TRANSFORMER_ENGINE = """
import torch
WRONG = {wrong!r}
if WRONG == "import":
    raise ImportError("undefined symbol: cublasLt")
def moe_permute(hidden, routing_map, num_out_tokens, map_type):
    token = routing_map.T.nonzero()[:, 1]
    rows = hidden[token.flip(0) if WRONG == "permutation" else token]
    return torch.cat([rows, rows[: num_out_tokens - len(rows) if WRONG != "spare rows" else 0]]), None
class GroupedLinear(torch.nn.Module):
    def __init__(self, number, inputs, outputs, bias, params_dtype, device):
        super().__init__()
        for i in range(number):
            setattr(self, f"weight{{i}}", torch.randn(outputs, inputs, dtype=params_dtype))
    def forward(self, rows, counts):
        parts = [x @ getattr(self, f"weight{{i}}").T for i, x in enumerate(rows.split(counts))]
        return torch.cat(parts[::-1] if WRONG == "experts" else parts)
"""
ROUTER = """
def fused_topk_with_score_function(logits, topk, **options):
    return None, logits >= logits.topk(topk, dim=1).values[:, -1:]
"""


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("", ""),
        ("import", "ImportError: undefined symbol: cublasLt"),
        ("permutation", "its permutation gives other rows than torch"),
        ("spare rows", "its permutation gives other rows than torch"),
        ("experts", "its grouped GEMM is off by"),
    ],
)
def test_a_transformer_engine_is_tried_on_a_batch_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, problem: str
) -> None:
    folder = tmp_path / "transformer_engine" / "pytorch"
    folder.mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    (folder / "__init__.py").write_text(TRANSFORMER_ENGINE.format(wrong=wrong))
    (folder / "router.py").write_text(ROUTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(te_check._FOUND, "")
    monkeypatch.delenv(te_check._FOUND)
    monkeypatch.setattr(te_check, "_of_a_child", partial(te_check._of_a_child, "cpu"))
    found = te_check.transformer_engine()
    assert found.problem.startswith(problem) if problem else found == ("", True)
    monkeypatch.setattr(te_check, "_of_a_child", None)
    assert te_check.transformer_engine() == found, "torchrun's ranks ask no more"


def test_the_triton_activation_equals_its_formula() -> None:
    """Run by Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is made for Linux")
    from moe_ep_bench.kernels.swiglu_triton import weighted_swiglu

    generator = torch.Generator().manual_seed(1)
    for rows, ffn_size in ((0, 16), (1, 1), (5, 48), (3, 1408)):
        for dtype, rtol in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            gate_up_N2F = (3 * torch.randn(rows, 2 * ffn_size, generator=generator)).to(dtype)
            weights_N = torch.rand(rows, generator=generator)
            ours_NF = weighted_swiglu(gate_up_N2F, weights_N)
            torch.testing.assert_close(ours_NF, weighted_swiglu_formula(gate_up_N2F, weights_N), rtol=rtol, atol=1e-6)


def test_the_activation_is_silu_of_the_gate_times_up_times_weight() -> None:
    gate_up_N2F = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.0, 5.0, 6.0, -7.0]])
    weights_N = torch.tensor([0.5, 2.0])
    expected = [[w * (g / (1 + 2.718281828459045 ** -g)) * u for g, u in zip(row[:2], row[2:], strict=True)]
                for row, w in zip(gate_up_N2F.tolist(), weights_N.tolist(), strict=True)]  # fmt: skip
    torch.testing.assert_close(weighted_swiglu_formula(gate_up_N2F, weights_N), torch.tensor(expected))


# ---- The router ------------------------------------------------------------------------------------------------------


BATCH_WIDE = (
    {"name": "oea", "k0": 1},
    {"name": "expanded_drop", "capacity_factor": 1.0},
)


def routed(policy: Policy, group_size: int) -> tuple[Tensor, Tensor, int]:
    """A router's weights and map, and how many sums over ranks it asked for."""
    sums = []
    router = SimpleNamespace(
        config=SimpleNamespace(num_moe_experts=16),
        score_function="softmax",
        policy=policy,
        context=RoutingContext(top_k=2, num_ranks=1),
        kernel="torch",
        ep_group=SimpleNamespace(size=lambda: group_size),
        sum_over_ranks=lambda stats_SE: (sums.append(stats_SE), stats_SE)[1],
    )
    logits_TE = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    weights_TE, map_TE = PolicyRouter.routing(router, logits_TE)
    return weights_TE, map_TE, len(sums)


@pytest.mark.parametrize("spec", BATCH_WIDE, ids=lambda spec: spec["name"])
def test_a_rank_without_others_sums_no_statistics_and_routes_alike(spec: dict[str, object]) -> None:
    """The statistics would be a launch of their own, and a compiled policy takes them in the selection's."""
    policy = make_policy(spec)
    alone, beside = routed(policy, 1), routed(policy, 2)
    assert alone[2] == 0
    has_stats = policy.by(TORCH).batch_stats(torch.rand(4, 16), RoutingContext(top_k=2)) is not None
    assert beside[2] == has_stats
    assert torch.equal(alone[0], beside[0])
    assert torch.equal(alone[1], beside[1])


@pytest.mark.parametrize("function", get_args(ScoreFunction))
def test_logits_turn_back_into_the_scores_that_they_came_of(function: ScoreFunction) -> None:
    logits_TE = 8 * torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    scores_TE = scores_from_logits(logits_TE, function)
    back_TE = logits_from_scores(scores_TE, function)
    torch.testing.assert_close(scores_from_logits(back_TE, function), scores_TE, rtol=1e-5, atol=1e-30)
    # Workloads' scores are shares of a row, down to what a softmax leaves.
    shares_TE = (6 * logits_TE).softmax(dim=1)
    back_TE = scores_from_logits(logits_from_scores(shares_TE, function), function)
    torch.testing.assert_close(back_TE, shares_TE, rtol=1e-5, atol=2e-19)


def test_float32_is_float32_where_layers_run_whatever_the_image_sets() -> None:
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 sets what is "high" here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with device_scope():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
