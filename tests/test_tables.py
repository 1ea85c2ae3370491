"""Measured tables: devices and links of others' Parquet files, on small made-up ones and on the real package."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from moe_ep_bench.facts.words import describe_device, describe_links

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from tables import DEVICES, WITH_FP8, experts_rows, fullest_ranks, gemm_speeds, predicted_us

from moe_ep_bench.cli import main
from moe_ep_bench.cost_model import expert_rows
from moe_ep_bench.cost_model import tables as reading
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.expert_rows import load_device_of_layer
from moe_ep_bench.cost_model.expert_table import SHAPE, ExpertTable, balanced_loads, tables_of_shape
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.phases import RankWork, layer_segments
from moe_ep_bench.cost_model.tables import load_links
from moe_ep_bench.facts import ExpertFacts, Rows, TimedFacts, origin_of
from moe_ep_bench.models import ModelSpec

HAS_PACKAGE = find_spec("aiconfigurator_core") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="aiconfigurator-core is not installed: the extra `tables`")
TOKENS = (1, 2, 4, 16, 64, 256, 1024, 4096, 8192, 16384)
# hidden size, FFN size, experts, top-k
SMALL, UNLIKE = (1024, 512, 16, 2), (8192, 8192, 16, 2)
NAME = "table:h100_sxm/vllm/1.0"


def model(shape: tuple[int, int, int, int] = SMALL) -> ModelSpec:
    hidden, ffn, experts, top_k = shape
    changes = {"hidden_size": hidden, "ffn_hidden_size": ffn, "num_experts": experts, "top_k": top_k}
    return ModelSpec.named("olmoe-1b-7b").model_copy(update=changes)


def law_us(loads_L: np.ndarray, num_tokens: int) -> float:
    """What the made-up GPU takes: 10 us, 2 us an activated expert, 0.05 us a row, 0.01 us a token of all ranks."""
    return 10.0 + 2.0 * float((loads_L > 0).sum()) + 0.05 * float(loads_L.sum()) + 0.01 * num_tokens


def moe_rows(dtype: str = "bfloat16", shape: tuple[int, int, int, int] = SMALL) -> pd.DataFrame:
    hidden, ffn, experts, top_k = shape
    rows = [
        {
            "moe_dtype": dtype,
            "num_tokens": number,
            "hidden_size": hidden,
            "inter_size": ffn,
            "topk": top_k,
            "num_experts": experts,
            "moe_tp_size": 1,
            "moe_ep_size": ep_size,
            "distribution": "balanced",
            "latency": law_us(balanced_loads(number, experts, top_k, experts // ep_size), number) / 1e3,
        }
        for ep_size in (1, 2, 4, 8)
        for number in TOKENS
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one system with two shapes, and NCCL on 4 and 8 GPUs."""
    moe, nccl, other = (tmp_path / "data/h100_sxm" / one for one in ("moe/vllm/1.0", "comm/nccl/2.0", "comm/vllm/1.0"))
    for folder in (moe, nccl, other):
        folder.mkdir(parents=True)
    rows = pd.concat([moe_rows(), moe_rows("fp8_block"), moe_rows(shape=UNLIKE), moe_rows().assign(moe_tp_size=2)])
    rows.to_parquet(moe / "moe_perf.parquet")
    collectives = [
        {"op_name": op, "nccl_dtype": "half", "num_gpus": gpus, "message_size": 2**power, "latency": latency / 1e3}
        for op in ("alltoall", "all_gather", "all_reduce")
        for gpus in (4, 8)
        for power, latency in ((9, 8.0 + gpus), (12, 9.0 + gpus), (19, 20.0 + gpus), (24, 200.0 + gpus))
    ]
    pd.DataFrame(collectives).to_parquet(nccl / "nccl_perf.parquet")
    for module in (reading, expert_rows):
        monkeypatch.setattr(module, "root", lambda: tmp_path)
    monkeypatch.setattr(reading, "package_version", lambda: ("aiconfigurator-core", "0.0"))
    return tmp_path


def bound(ep_size: int = 8, dtype: str = "bfloat16", shape: tuple[int, int, int, int] = SMALL) -> Device:
    return load_device_of_layer(NAME, model(shape), ep_size, dtype)


def table_of(ep_size: int) -> ExpertTable:
    table = bound(ep_size).experts
    assert table is not None
    return table


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("ep_size", [1, 2, 8])
def test_a_table_device_is_exact_at_measured_rows_and_near_between_and_beyond(ep_size: int) -> None:
    table = table_of(ep_size)
    for number in (*TOKENS, 100, 2000, 50_000):
        loads_L = table.loads(number)
        allowed = 0.01 if number in TOKENS else 0.1
        assert table.time_us(loads_L, number) == pytest.approx(law_us(loads_L, number), rel=allowed)
    assert table.time_us([0, 0], 16) == 0


@pytest.mark.usefixtures("made_up")
def test_uneven_loads_follow_their_rows_and_activated_experts() -> None:
    """The made-up GPU is linear, so that the law has to find it back, tokens of all ranks apart."""
    table = table_of(2)
    assert table.token_us == pytest.approx(0.01, rel=0.05)
    many, few = ([4096, 100, 50, 1], [500, 400, 0, 0, 300], [512] * 8), ([16], [16, 1], [3])
    for num_tokens, loads in [*((4096, loads) for loads in many), *((16, loads) for loads in few)]:
        loads_L = np.pad(loads, (0, 8 - len(loads)))
        assert table.time_us(loads_L, num_tokens) == pytest.approx(law_us(loads_L, num_tokens), rel=0.06)
    # Of eight ranks the first has one pair of 1, 2 and 4 tokens.
    assert table_of(8).time_us([1, 1], 4) == pytest.approx(law_us(np.ones(2), 4), rel=0.1)


def test_what_grows_alike_on_all_ep_sizes_is_for_tokens_of_all_ranks() -> None:
    """Where many ranks take no less than few, pairs cost nothing; experts keep a tenth of the least growth."""
    growth = {1: 0.010, 2: 0.011, 4: 0.012, 8: 0.013}
    rows = [(*SMALL, ep_size, tokens, 10 + us * tokens) for ep_size, us in growth.items() for tokens in TOKENS]
    tables = tables_of_shape(pd.DataFrame(rows, columns=[*SHAPE, "ep_size", "num_tokens", "us"]))
    assert tables[1].token_us == pytest.approx(0.9 * 0.010)


@pytest.mark.usefixtures("made_up")
def test_replicas_beyond_a_ranks_experts_cost_their_weights_reading() -> None:
    table = table_of(8)
    weights_us = 3 * 1024 * 512 * 2 / (Device.named("h100-sxm").reached_tbps * 1e6)
    held, one_more, two_more = (table.time_us([1] * number, 4096) for number in (2, 3, 4))
    assert two_more - one_more == pytest.approx(one_more - held) == pytest.approx(weights_us)


@pytest.mark.usefixtures("made_up")
def test_a_shape_that_was_not_measured_is_refused_with_those_that_were() -> None:
    sizes = "1024 x 512, 16 experts, top-2 \\(EP 1, 2, 4, 8\\)"
    for wanted, got in (((1024, 768, 16, 2), "1024 x 768, 16 experts, top-2, EP 8"), ((1024, 512, 16, 4), ".*top-4")):
        with pytest.raises(ValueError, match=f"measured, .*{sizes}; 8192 x 8192, .*; got {got}"):
            bound(8, shape=wanted)
    with pytest.raises(ValueError, match=f"measured, {sizes}; got .*, EP 16$"):  # of its own shape alone
        bound(16)
    with pytest.raises(ValueError, match=r"expected layer\.dtype one of bfloat16, fp8_block; got nvfp4"):
        bound(8, "nvfp4")


@pytest.mark.usefixtures("made_up")
def test_a_table_says_that_it_was_measured_elsewhere_and_the_rest_is_modelled() -> None:
    device = bound()
    described = device.facts, device.experts.facts
    words = describe_device(*described, num_tokens=16_384)
    assert "16,384 tokens, extrapolated to 50,000; " in describe_device(*described, num_tokens=50_000)
    assert words.startswith(
        "experts measured elsewhere (aiconfigurator-core 0.0, vLLM 1.0 on H100 SXM, bfloat16): 1024 x 512, 16 experts,"
        " top-2, EP 8: 10 rows of 1 to 16,384 tokens; "
    )
    assert "; the rest modelled by devices/h100-sxm: roofline" in words
    links = describe_links(load_links("table:h100_sxm/nccl/2.0").facts())
    assert links.startswith("measured elsewhere (aiconfigurator-core 0.0, NCCL 2.0")


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("table:", "expected a system of h100_sxm; got ''"),
        ("table:h1/vllm/1.0", "expected a system of h100_sxm; got 'h1' .did you mean h100_sxm"),
        ("table:h100_sxm/sglang/1.0", "expected a framework of vllm; got 'sglang'"),
        ("table:h100_sxm/vllm/2", "expected a version of vllm of 1.0; got '2'"),
        ("table:h100_sxm/vllm/1.0/fp4", "expected table:h100_sxm/vllm/1.0; got .table:h100_sxm/vllm/1.0/fp4."),
    ],
)
def test_what_is_not_there_is_told_in_one_line_that_lists_what_is(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        load_device_of_layer(name, model(), 8, "bfloat16")
    assert "\n" not in str(error.value)


def test_a_damaged_table_is_named(made_up: Path) -> None:
    path = made_up / "data/h100_sxm/moe/vllm/1.0/moe_perf.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"moe_perf\.parquet: damaged: ") as error:
        bound()
    assert "\n" not in str(error.value)


def test_tables_of_another_distribution_are_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module may move to another distribution, whose version then says which rows they are."""

    def version(name: str) -> str:
        if name != "others":
            raise reading.metadata.PackageNotFoundError(name)
        return "0.13.0"

    reading.package_version.cache_clear()
    monkeypatch.setattr(reading.metadata, "version", version)
    monkeypatch.setattr(reading.metadata, "packages_distributions", lambda: {"aiconfigurator_core": ["others"]})
    assert reading.package_version() == ("others", "0.13.0")
    reading.package_version.cache_clear()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PACKAGE", "no-such-package")
    with pytest.raises(ValueError, match=r"^no-such-package is not installed; .*moe-ep-bench\[tables\]'$"):
        bound()


@pytest.mark.usefixtures("made_up")
def test_a_tensor_parallel_slice_is_held_by_the_rows_of_whole_experts_that_were_cut() -> None:
    slice_of = model((1024, 256, 16, 2)).model_copy(update={"tensor_parallel": 2})
    device = load_device_of_layer(NAME, slice_of, 8, "bfloat16")
    assert device.experts.ffn_hidden_size == 256


@pytest.mark.usefixtures("made_up")
def test_a_tables_experts_hold_the_sorting_of_rows_that_a_rooflines_do_not() -> None:
    work = RankWork(100, 200, np.array([100, 300]))
    for device, sorts in ((bound(8), False), (Device.named("h100-sxm"), True)):
        segments = layer_segments(device, model(), work, by_policy=False, batch_wide=False)
        at = [phase for phase, _ in segments].index("experts")
        before, after = segments[at - 1], segments[at + 1]
        assert (before[0], before[1] > 0, after[0], after[1] > 0) == ("permute", sorts, "permute", sorts)


@pytest.mark.usefixtures("made_up")
def test_tables_know_a_layer_by_the_width_that_its_experts_take() -> None:
    latent = model(UNLIKE).model_copy(update={"latent_size": 8192, "hidden_size": 4096})
    assert load_device_of_layer(NAME, latent, 8, "bfloat16").experts.hidden_size == 8192


@pytest.mark.usefixtures("made_up")
def test_advise_takes_a_table_in_low_precision(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {num_experts: 16, top_k: 2, hidden_size: 1024, ffn_hidden_size: 512}\n"
        "workload: {kind: synthetic, num_tokens: 512, num_batches: 2, sequence_length: 16, peak_load: 3}\n"
        "layer: {ep_size: 8, dtype: fp8_block}\n"
        "policies: [{name: token_drop, capacity_factor: 1.0}]\n"
        f"emulate: {{device: {NAME}, links: table:h100_sxm/nccl/2.0}}\n"
    )
    out = tmp_path / "out"
    assert main(["emulate", str(config), "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["show", str(out)]) == 0
    said = capsys.readouterr().out
    assert "measured elsewhere (aiconfigurator-core 0.0, vLLM 1.0 on H100 SXM, fp8_block)" in said
    modelled = ["--set", "emulate.device=h100-sxm", "--set", "layer.dtype=nvfp4"]
    assert main(["emulate", str(config), "--out", str(out), *modelled]) == 2
    assert "layer.dtype nvfp4" in capsys.readouterr().err
    here = ["--set", "emulate.device=measured", "--set", "layer.dtype=nvfp4"]
    assert main(["emulate", str(config), "--out", str(out), *here]) == 2
    assert "layer.dtype: expected float32 or bfloat16 or fp8_block where" in capsys.readouterr().err
    # Routing is the same whatever the dtype, and nothing is timed.
    assert main(["route", str(config), "--out", str(tmp_path / "routed")]) == 0


_ROWS = {"package": "x", "package_version": "1", "system": "s", "framework": "f", "version": "2", "file": "p"}
EXPERTS = {"expert_rows": ExpertFacts.model_construct(measured_by=Rows(**_ROWS))}
NCCL = {"links": Links.named("h100-nvlink4").facts().model_copy(update={"measured_by": Rows(**_ROWS)})}


@pytest.mark.parametrize(
    ("device", "links", "expected"),
    [
        (EXPERTS, {}, ["measured elsewhere", "modelled", "modelled"]),
        ({}, NCCL, ["modelled", "measured elsewhere", "modelled"]),
        # Figures of a roofline may be fitted to tables; what they give is modelled all the same.
        ({}, {}, ["modelled"] * 3),
        ({"device": None}, NCCL, ["measured", "measured elsewhere", "measured"]),
    ],
)
def test_parts_that_were_measured_elsewhere_are_told_from_those_that_are_modelled(
    device: dict[str, Any], links: dict[str, Any], expected: list[str]
) -> None:
    modelled = {"device": Device.named("b200-sxm").facts, "links": Links.named("h100-nvlink4").facts()}
    facts, run = TimedFacts.model_construct(**{**modelled, **device, **links}), SimpleNamespace(mode="emulated")
    assert [facts.phase_origin("emulated", group) for group in ("experts", "comm", "gate")] == expected
    words = "partly measured elsewhere" if "measured elsewhere" in expected else "modelled"
    assert origin_of(run, facts) == ("emulated" if facts.device is None else words)


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("made_up")
def test_collectives_are_exact_at_measured_sizes_on_as_many_gpus() -> None:
    for ranks, time_us in ((4, 24.0), (8, 28.0), (6, 28.0)):  # Six take eight GPUs' curve.
        links = load_links("table:h100_sxm/nccl/2.0", ranks)
        bytes_RR = np.full((ranks, ranks), 2.0**20 * (7 / 8 if ranks > 4 else 3 / 4) / (ranks - 1))
        np.testing.assert_allclose(links.all_to_all_us(bytes_RR), time_us, rtol=1e-6)
    links, uneven_RR = load_links("table:h100_sxm/nccl/2.0"), np.zeros((8, 8))
    uneven_RR[0, 1] = 2.0**20 * 7 / 8  # Each takes its larger direction.
    np.testing.assert_allclose(links.all_to_all_us(uneven_RR), [28, 28, *[0] * 6], rtol=1e-6)
    np.testing.assert_allclose(links.scaled(2).all_to_all_us(2 * uneven_RR), [28, 28, *[0] * 6], rtol=1e-6)
    for factor in (1, 2):
        assert links.scaled(factor).all_gather_us(factor * 2**20 / 8, 8) == pytest.approx(28.0)
        assert links.scaled(factor).all_reduce_us(factor * 2**20, 8) == pytest.approx(28.0)
    assert links.all_reduce_us(8, 1) == 0
    with pytest.raises(ValueError, match="at most 8 ranks"):
        links.all_to_all_us(np.ones((16, 16)))


# ---- the real package ------------------------------------------------------------------------------------------------


@needs_package
def test_mixtral_on_eight_h100_takes_what_was_measured() -> None:
    """aiconfigurator-core 0.12.0, h100_sxm/moe/vllm/0.24.0: 4.57 ms balanced at 16,384 tokens, 12.2 under 1.01."""
    name, mixtral = "table:h100_sxm/vllm/0.24.0", ModelSpec.named("mixtral-8x7b")
    table = load_device_of_layer(name, mixtral, 8, "bfloat16").experts
    assert table is not None
    assert table.time_us(table.loads(16_384), 16_384) == pytest.approx(4570, rel=0.01)
    drawn = fullest_ranks("power_law_1.01", 16_384, 8, 2, 8, draws=200)
    assert np.mean([table.time_us(load_L, 16_384) for load_L in drawn]) == pytest.approx(12_200, rel=0.15)


@needs_package
@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "b200-sxm", "gb200"])
def test_rooflines_are_within_15_percent_on_shapes_that_were_held_out(name: str) -> None:
    rows = experts_rows(*DEVICES[name])
    rows = rows.assign(error=np.abs(predicted_us(Device.named(name), rows) / rows["us"] - 1))
    assert (rows[rows["held"]].groupby("framework")["error"].median() < 0.15).all()


@needs_package
@pytest.mark.parametrize(
    ("name", "table"), [("h100-nvlink4", "table:h100_sxm/nccl/2.29.2"), ("gb200-nvl72", "table:gb200/nccl/2.29.2")]
)
def test_built_in_links_are_the_tables(name: str, table: str) -> None:
    mine, theirs = Links.named(name).intra, load_links(table).intra
    assert mine is not None
    assert theirs is not None
    sizes = np.logspace(3, 8.6, 50)
    np.testing.assert_allclose(mine.time_us(sizes), theirs.time_us(sizes), rtol=0.01)


@needs_package
def test_a_system_without_a_device_file_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"expected a system with a file of data/devices/ of a100_sxm, .*; got 'l40s'"):
        load_device_of_layer("table:l40s/vllm/0.24.0", model(), 8, "bfloat16")


@needs_package
@pytest.mark.parametrize("system", WITH_FP8)
def test_what_gemms_gain_by_smaller_values_is_what_device_files_state(system: str) -> None:
    (name,) = (name for name, (of, _) in DEVICES.items() if of == system)
    stated = {dtype: float(f"{gain:.3g}") for dtype, gain in gemm_speeds(system).items()}
    assert Device.named(name).speeds == stated
