"""Permutation by index and grouped experts, held against loops that spell out what they do."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ep_bench.kernels.swiglu import weighted_swiglu_formula
from moe_ep_bench.layer import parts, te_check
from moe_ep_bench.layer.dispatchers import expert_major_pairs, rank_major_index, sum_per_token
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.te_check import TransformerEngine

pytestmark = pytest.mark.seam


@st.composite
def maps(draw: st.DrawFn) -> torch.Tensor:
    """A routing map of 0 to 20 tokens and 1 to 9 experts, of any density."""
    num_tokens, num_experts = draw(st.integers(0, 20)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    return torch.rand(num_tokens, num_experts, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))


@given(maps())
def test_pairs_come_by_expert_and_then_by_token(map_TE: torch.Tensor) -> None:
    num_tokens, num_experts = map_TE.shape
    expected = [(e, t) for e in range(num_experts) for t in range(num_tokens) if map_TE[t, e]]
    expert_N, token_N = expert_major_pairs(map_TE, len(expected))
    assert list(zip(expert_N.tolist(), token_N.tolist(), strict=True)) == expected


@given(maps(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_are_summed_by_token(map_TE: torch.Tensor, dtype: torch.dtype) -> None:
    expert_N, token_N = expert_major_pairs(map_TE, int(map_TE.sum()))
    # Whole numbers small enough to be exact in bfloat16, so that any order of summing gives the same.
    hidden_ND = torch.arange(len(token_N) * 3).remainder(7).view(-1, 3).to(dtype)
    expected_TD = torch.zeros(len(map_TE), 3)
    for row, token in zip(hidden_ND, token_N, strict=True):
        expected_TD[token] += row
    summed_TD = sum_per_token(hidden_ND, map_TE, token_N * map_TE.shape[1] + expert_N)
    assert summed_TD.dtype == dtype
    assert torch.equal(summed_TD.float(), expected_TD)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**20))
def test_rows_by_expert_and_rank_are_found_among_rows_by_rank_and_expert(
    num_ranks: int, num_local_experts: int, seed: int
) -> None:
    counts_RL = torch.randint(0, 4, (num_ranks, num_local_experts), generator=torch.Generator().manual_seed(seed))
    rows = [(r, e, i) for r in range(num_ranks) for e in range(num_local_experts) for i in range(counts_RL[r, e])]
    index_N = rank_major_index(counts_RL, len(rows))
    assert [rows[i] for i in index_N.tolist()] == sorted(rows, key=lambda row: (row[1], row[0], row[2]))


def test_every_request_and_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_te(version: str | None, problem: str = "", *, routes: bool = False) -> None:
        monkeypatch.setattr(parts, "package_versions", lambda: {"transformer_engine": version})
        monkeypatch.setattr(parts, "transformer_engine", lambda: TransformerEngine(problem, routes))

    with_te(None)
    assert Parts.choose("auto", "auto", on_cpu=False) == Parts("grouped", "indexed")
    assert Parts.choose("sequential", "megatron", on_cpu=True) == Parts("sequential", "megatron")
    assert Parts.choose("decode", "auto", on_cpu=False) == Parts("decode", "indexed")
    assert Parts.choose("decode", "auto", on_cpu=True) == Parts("decode", "indexed")
    assert Parts.choose("auto", "auto", "auto", "allgather", on_cpu=True) == Parts(
        "grouped", "megatron", "auto", "allgather"
    )
    assert Parts.choose("decode", "auto", "auto", "allgather", on_cpu=True) == Parts(
        "decode", "none", "auto", "allgather"
    )
    with pytest.raises(ValueError, match=r"layer.experts: te needs Transformer Engine, which is not installed; exp"):
        Parts.choose("te", "auto", on_cpu=False)
    with pytest.raises(ValueError, match=r"layer.permute: fused needs Transformer Engine, which is not installed; exp"):
        Parts.choose("auto", "fused", on_cpu=False)
    with_te("2.4.0+abc")
    assert Parts.choose("auto", "auto", on_cpu=False) == Parts("te", "fused")
    for takes, ran in ((True, "decode"), (False, "te")):
        chosen = Parts.choose("auto", "auto", on_cpu=False, decode=(takes, "so it is"))
        assert (chosen.experts, chosen.experts_why) == (ran, "so it is")
    # A crossover is a GPU's, and decides nothing for who asks by name.
    assert Parts.choose("auto", "auto", on_cpu=True, decode=(True, "so it is")) == Parts("grouped", "indexed")
    assert Parts.choose("grouped", "auto", on_cpu=False, decode=(True, "so it is")) == Parts("grouped", "fused")
    assert Parts.choose("auto", "auto", on_cpu=True) == Parts("grouped", "indexed")
    with pytest.raises(ValueError, match=r"layer.experts: te needs a GPU; expected auto, grouped or sequential"):
        Parts.choose("te", "auto", on_cpu=True)
    with_te("2.9.0", routes=True)
    assert Parts.choose("auto", "auto", on_cpu=False).fusions == ["activation", "top-k"]
    assert Parts.choose("grouped", "indexed", on_cpu=False).fusions == []
    with_te("2.9.0", "ImportError: undefined symbol")
    chosen = Parts.choose("auto", "auto", on_cpu=False)
    why = "Transformer Engine 2.9.0 does not work here (ImportError: undefined symbol)"
    assert (chosen.experts, chosen.permute, chosen.experts_why, chosen.fusions) == ("grouped", "indexed", why, [])
    for asked in (("te", "auto"), ("auto", "fused")):
        with pytest.raises(ValueError, match=r"needs a Transformer Engine that works; 2.9.0 does not \(ImportError"):
            Parts.choose(*asked, on_cpu=False)
    with_te("1.13.0")
    assert Parts.choose("auto", "auto", on_cpu=False) == Parts("te", "indexed")
    with pytest.raises(ValueError, match=r"fused needs Transformer Engine >= 2.1, found 1.13.0; expected auto"):
        Parts.choose("auto", "fused", on_cpu=False)


TRANSFORMER_ENGINE = """
import torch
WRONG = {wrong!r}
if WRONG == "import":
    raise ImportError("undefined symbol: cublasLt")
def moe_permute(hidden, routing_map, num_out_tokens, map_type):
    token = routing_map.T.nonzero()[:, 1]
    return hidden[token.flip(0) if WRONG == "permutation" else token], None
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
    on_cpu = partial(te_check.ask, f"{te_check.__name__}:tried", "cpu")
    monkeypatch.setattr(te_check, "ask", lambda name, timeout_s: on_cpu(timeout_s=timeout_s))
    found = te_check.transformer_engine()
    assert found.problem.startswith(problem) if problem else found == ("", True)
    monkeypatch.setattr(te_check, "ask", None)
    assert te_check.transformer_engine() == found, "a launcher's ranks ask no more"


def test_the_triton_activation_equals_its_formula() -> None:
    """Run by Triton's interpreter, in a process of its own: it has to be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton is made for Linux")
    code = (
        "import torch\n"
        "from moe_ep_bench.kernels.swiglu import weighted_swiglu_formula as formula\n"
        "from moe_ep_bench.kernels.swiglu_triton import weighted_swiglu as compiled\n"
        "generator = torch.Generator().manual_seed(1)\n"
        "for rows, ffn in ((0, 16), (1, 1), (5, 48), (3, 1408)):\n"
        "    for dtype in (torch.float32, torch.bfloat16):\n"
        "        gate_up = (3 * torch.randn(rows, 2 * ffn, generator=generator)).to(dtype)\n"
        "        weights = torch.rand(rows, generator=generator)\n"
        "        ours, expected = compiled(gate_up, weights), formula(gate_up, weights)\n"
        "        assert ours.dtype == dtype and ours.shape == (rows, ffn)\n"
        "        rtol = 1e-2 if dtype == torch.bfloat16 else 1e-6\n"
        "        torch.testing.assert_close(ours, expected, rtol=rtol, atol=1e-6)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_activation_is_silu_of_the_gate_times_up_times_weight() -> None:
    gate_up_N2F = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.0, 5.0, 6.0, -7.0]])
    weights_N = torch.tensor([0.5, 2.0])
    expected = [[w * (g / (1 + 2.718281828459045 ** -g)) * u for g, u in zip(row[:2], row[2:], strict=True)]
                for row, w in zip(gate_up_N2F.tolist(), weights_N.tolist(), strict=True)]  # fmt: skip
    torch.testing.assert_close(weighted_swiglu_formula(gate_up_N2F, weights_N), torch.tensor(expected))
