"""benchmarks/experts.py at toy sizes: its permutations give tokens back, and its table compares rates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import experts

from moe_ep_bench.models import load_model

pytestmark = pytest.mark.seam
CPU = torch.device("cpu")


def test_every_permutation_gives_each_token_back_as_often_as_it_has_experts() -> None:
    model = load_model("olmoe-1b-7b").scaled(1 / 32)
    ways = experts.permutations(model, 24, torch.float32, CPU)
    hidden_TD = torch.randn(24, model.hidden_size, generator=torch.Generator().manual_seed(1))
    assert [*ways] == [experts.COPY, "permute and unpermute, indexed", "permute and unpermute, megatron"]
    assert {way.bytes for way in ways.values()} == {2 * (1 + model.top_k) * hidden_TD.nbytes}
    for name in [*ways][1:]:
        torch.testing.assert_close(ways[name].run(), hidden_TD * model.top_k)
    assert experts.no_transformer_engine(CPU).startswith("layer.experts: te needs a GPU")


def test_rates_stand_beside_the_square_matmuls_and_the_copys() -> None:
    contenders = {
        experts.SQUARE: experts.Contender(print, flops=4e6),
        experts.COPY: experts.Contender(print, bytes=8e3),
        "grouped": experts.Contender(print, flops=2e6),
        "permute": experts.Contender(print, bytes=8e3),
    }
    table = experts.compared(contenders, dict(zip(contenders, (1.0, 2.0, 2.0, 6.0), strict=True))).set_index("what")
    assert table["of square matmul"].dropna().to_dict() == {experts.SQUARE: 1.0, "grouped": 0.25}
    assert table["times the copy"].dropna().to_dict() == {"permute": 3.0}
    assert table.loc["grouped", ["ms", "TFLOP/s"]].tolist() == [2e-3, 1.0]
    assert table.loc[experts.COPY, "GB/s"] == 4.0
