"""Layers in blocks of FP8 where no GPU is: their tolerance, memory, what a plan says of them, and what is refused.

``layer_laws`` holds what needs ranks, or Transformer Engine on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_blocks import expert_in_blocks, expert_in_tf32, in_blocks
from test_run import write_config

from moe_ep_bench.bench.description import held_here
from moe_ep_bench.bench.meetings import exchange_us
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import Point
from moe_ep_bench.cost_model.devices import FP8_BLOCK, RUN_DTYPES
from moe_ep_bench.errors import UserError
from moe_ep_bench.layer import backend
from moe_ep_bench.layer.experts import DTYPES, TOLERANCE, DenseReference, expert_weights
from moe_ep_bench.models import ModelSpec

OLMOE = {"model__preset": "olmoe-1b-7b", "model__scale": 1.0, "layer__dtype": "fp8_block"}
EMULATED = {"layer__ep_size": 8, "emulate__links": "h100-nvlink4", "emulate__device": "measured"}


def test_all_dtypes_of_layers_that_run_have_a_tolerance_and_values() -> None:
    assert set(RUN_DTYPES) == set(DTYPES) == set(TOLERANCE) - {"tf32"}


@pytest.mark.parametrize("experts", ["te", "grouped", "sequential", "decode"])
def test_experts_of_transformer_engine_multiply_float32_in_tf32(experts: str) -> None:
    arithmetic = backend.LayerBackend(experts).arithmetic
    assert arithmetic("float32") == ("tf32" if experts == "te" else "float32")
    assert arithmetic("bfloat16") == "bfloat16"


def test_e4m3_rounds_a_value_by_2_6_percent_and_keeps_a_blocks_largest() -> None:
    values = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for rows in (1, FP8_BLOCK):
        kept = in_blocks(values, rows)
        assert float((kept - values).norm() / values.norm()) == pytest.approx(0.0265, abs=0.0005)
        assert torch.equal(in_blocks(kept, rows), kept)
    values[3, 7] = 448.0
    assert in_blocks(values, 1)[3, 7] == 448


@pytest.mark.parametrize(
    ("hidden_size", "ffn_size", "top_k"),
    [(256, 128, 1), (1024, 512, 2), pytest.param(2048, 1024, 8, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("arithmetic", "finer"), [("fp8_block", 0.05), ("tf32", 5 * TOLERANCE["float32"])], ids=["fp8", "tf32"]
)
def test_rounding_stays_within_the_tolerance_and_beyond_that_of_a_finer_dtype(
    arithmetic: str, finer: float, hidden_size: int, ffn_size: int, top_k: int
) -> None:
    """Of the worst of 64 tokens; a token at a wrong expert is further off by far."""
    dtype, of_expert = (torch.float32, expert_in_tf32) if arithmetic == "tf32" else (torch.bfloat16, expert_in_blocks)
    model = ModelSpec(
        name="one", source="test", num_layers=1, hidden_size=hidden_size, num_experts=8, top_k=top_k,
        ffn_hidden_size=ffn_size, normalize=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    hidden_ND = torch.randn(64, hidden_size, generator=generator).to(dtype)
    scores_NE = torch.randn(64, 8, generator=generator).softmax(dim=1)
    map_NE = torch.zeros(64, 8).scatter(1, scores_NE.topk(top_k).indices, 1.0)
    weights_NE = scores_NE * map_NE / (scores_NE * map_NE).sum(dim=1, keepdim=True)
    output_ND = torch.zeros(64, hidden_size)
    for expert in range(8):
        made = expert_weights(5, 0, expert, hidden_size, ffn_size, hidden_ND.device, dtype)
        output_ND += of_expert(hidden_ND, made, weights_NE[:, expert]).float()
    reference = DenseReference(model, hidden_ND, 5)
    assert finer < reference.worst_error(output_ND, weights_NE) < 0.85 * TOLERANCE[arithmetic]
    assert reference.worst_error(output_ND, weights_NE.roll(1, dims=1)) > 5 * TOLERANCE[arithmetic]


# ---- what is refused -------------------------------------------------------------------------------------------------

HOPPER = [(9, 0)]
TO_BFLOAT16 = "expected bfloat16 or float32, or a modelled device"
# Where it is asked for: experts, GPUs, Transformer Engine and CUDA; what is said, or nothing.
REFUSED = {
    "without a GPU": ("auto", None, "2.9.0", "13.0", f"needs a GPU; {TO_BFLOAT16}"),
    "without Transformer Engine": ("auto", HOPPER, None, "13.0", f"needs Transformer .*, got none; {TO_BFLOAT16}"),
    "on an older one": ("te", HOPPER, "2.6.1", "13.0", "needs Transformer Engine 2.7 or later, got 2.6.1"),
    "on Ampere": ("te", [(8, 0)], "2.9.0", "13.0", "needs a GPU of compute capability 9.0 .*, got 8.0; expected"),
    "on Blackwell": ("auto", [(10, 0)], "2.9.0", "13.0", "needs a GPU of compute capability 9.0 .*, got 10.0"),
    "on older and later ones": ("auto", [(8, 9), (10, 0)], "2.9.0", "13.0", "needs .*, got 8.9, 10.0; expected"),
    "before CUDA 12.9": ("te", HOPPER, "2.9.0", "12.6", "needs a torch for CUDA 12.9 or later, got 12.6"),
    "for sequential experts": ("sequential", HOPPER, "2.9.0", "12.9", "needs layer.experts auto or te, .* sequential"),
    "for grouped experts": ("grouped", HOPPER, "2.9.0", "13.0", "needs layer.experts auto or te, .*; got grouped"),
    "for decode experts": ("decode", HOPPER, "2.9.0", "13.0", "needs layer.experts auto or te, .*; got decode"),
    "in a CUDA graph": ("auto graph", HOPPER, "2.9.0", "13.0", "needs layer.cuda_graph false, .*; got true"),
    "not on Hopper": ("auto", HOPPER, "2.9.0+abc", "13.0", None),
    "nor by name": ("te", HOPPER, "2.20.2", "12.9", None),
    "nor beside another GPU": ("auto", [(7, 5), (9, 0)], "2.9.0", "13.0", None),
    "nor of a driver that does not say": ("te", [], "2.20.2", "12.9", None),
}  # fmt: skip


def machine(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[int, int]] | None, te: str | None, cuda: str) -> None:
    monkeypatch.setattr(backend, "version_of", lambda distribution: te)
    monkeypatch.setattr(backend, "compute_capabilities", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize("name", REFUSED)
def test_fp8_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, gpus, te, cuda, said = REFUSED[name]
    machine(monkeypatch, gpus, te, cuda)
    experts, _, graph = asked.partition(" ")
    how = {"cuda_graph": bool(graph), "fp8": True, "on_cpu": gpus is None}
    if said is None:
        chosen = backend.LayerBackend.choose(experts, **how)
        assert (chosen.experts, chosen.permute, chosen.fp8) == ("te", "fused", True)
        return
    with pytest.raises(UserError, match=f"^layer.dtype: fp8_block {said}") as refused:
        backend.LayerBackend.choose(experts, **how)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model__scale": 0.1},
            "no multiples of 128, the blocks of FP8, got fp8_block, and sizes 208 and 96 of OLMoE",
        ),
        ({"model__preset": "gpt-oss-120b"}, "got fp8_block, and sizes 2880 and 2880 of"),
        ({"scope": "model"}, "float32 or bfloat16 with scope model, .*, got fp8_block"),
        ({"layer__dispatch_dtype": "fp8"}, "layer.dispatch_dtype: expected null with real ranks, .*, got fp8"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_built_in_fp8_are_refused(
    changes: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, HOPPER, "2.9.0", "13.0")
    with pytest.raises(UserError, match=said):
        plan(write_config(tmp_path, **{**OLMOE, **changes}), [], "ranks", 2, on_cpu=False)


# ---- what is planned -------------------------------------------------------------------------------------------------


def planned(folder: Path, monkeypatch: pytest.MonkeyPatch, backend_name: str, **changes: object) -> Point:
    machine(monkeypatch, HOPPER, "2.9.0", "13.0")
    (point,) = plan(write_config(folder, **{**OLMOE, **changes}), [], backend_name, 8, on_cpu=False)
    return point


def test_a_layer_in_fp8_holds_its_weights_twice_and_is_another_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8, bf16 = (
        planned(tmp_path, monkeypatch, "ranks", layer__dtype=dtype, layer__experts="te")
        for dtype in ("fp8_block", "bfloat16")
    )
    assert fp8.comparison_id != bf16.comparison_id
    assert [one.layer_backend.fp8 for one in (fp8, bf16)] == [True, False]
    here, beside = held_here(fp8), held_here(bf16)
    scales = 1 + 4 / FP8_BLOCK**2
    assert here["expert_bytes"] == pytest.approx(beside["expert_bytes"] * (2 + scales) / 2)
    assert here["other_weight_bytes"] == beside["other_weight_bytes"]
    assert here["row_bytes"] > beside["row_bytes"]


def test_virtual_ranks_that_are_measured_send_rows_in_bfloat16_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Transformer Engine's layer does, which rounds behind the dispatch."""
    rows_RR = torch.full((8, 8), 1000).numpy()

    def dispatch_us(**changes: object) -> float:
        point = planned(tmp_path, monkeypatch, "virtual", **EMULATED, **changes)
        return float(exchange_us(point, rows_RR)[0].max())

    assert dispatch_us() == dispatch_us(layer__dtype="bfloat16")
    assert dispatch_us(layer__dispatch_dtype="fp8") < 0.8 * dispatch_us()
