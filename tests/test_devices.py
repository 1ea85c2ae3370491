"""Rooflines by hand, links against slow, obvious forms of them, and files of both: data/devices/ and data/links/."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.devices import (
    PRECISIONS,
    Device,
    ffn_work,
)
from moe_ep_bench.cost_model.links import Link, Links
from moe_ep_bench.facts.words import describe_links
from moe_ep_bench.models import load_model

ROOT = Path(__file__).parents[1]
FIGURES = {
    "name": "test",
    "source": "a test",
    "bf16_tflops": 100.0,
    "memory_tbps": 2.0,
    "memory_gb": 80.0,
    "arithmetic_efficiency": [[1, 0.01], [100, 0.5]],
    "arithmetic_basis": "assumed",
    "memory_efficiency": 0.5,
    "memory_basis": "measured",
    "overhead_us": 3.0,
    "overhead_basis": "assumed",
    "routing_native_ps": 50.0,
    "routing_native_basis": "published",
    "routing_policy_ps": 200.0,
    "routing_policy_basis": "assumed",
    "permute_efficiency": 0.25,
    "permute_basis": "measured",
    "attention_efficiency": 0.4,
    "attention_basis": "assumed",
}


def device(**changes: object) -> Device:
    return Device.model_validate({**FIGURES, **changes})


def test_the_slower_of_arithmetic_and_memory_decides_for_each_piece() -> None:
    # 50 TFLOP/s at 100 rows: 5e7 operations per us. 1 TB/s: 1e6 bytes per us.
    assert device().work_us(1e9, 1e6, 100) == pytest.approx(20)
    assert device().work_us(1e7, 7e6, 100) == pytest.approx(7)
    assert device().work_us([1e9, 1e7], [1e6, 7e6], [100, 100]).tolist() == pytest.approx([20, 7])


def test_a_gated_ffn_reads_the_weights_of_experts_that_have_rows() -> None:
    flops, num_bytes, rows = ffn_work(10, 4, [0, 1, 3], 2)
    np.testing.assert_array_equal(rows, [0, 1, 3])
    np.testing.assert_array_equal(flops, [0, 240, 720])
    np.testing.assert_array_equal(num_bytes, [0, 2 * (120 + 44), 2 * (120 + 3 * 44)])


def test_a_smaller_precision_reads_less_and_multiplies_faster() -> None:
    """Of weights alone, and of arithmetic: rows stay in two bytes."""
    small = device(overhead_us=0.0)
    few, many = small.experts_us(1000, 500, [1], num_matrices=3), small.experts_us(1000, 500, [10**6])
    fp8 = PRECISIONS["fp8"]
    assert few - small.experts_us(1000, 500, [1], fp8) == pytest.approx(3 * 1000 * 500 / 1e6)
    assert small.experts_us(1000, 500, [10**6], fp8) == pytest.approx(many / 2)


def passes_of_te(rows: int, hidden: int, ffn: int, *, matrices: int, fp8: bool) -> int:
    """Bytes that each kernel between an expert's GEMMs reads and writes, row by row, values of two bytes."""
    kernels = []
    for _ in range(rows):
        if matrices == 3:
            kernels.append((2 * ffn * 2, ffn * 2))  # gate and up in, their product out
        else:
            kernels += [(ffn * 2, ffn * 2), (ffn * 2, ffn * 4), (ffn * 4, ffn * 2)]  # GELU, in float32 by weight, cast
        if fp8:
            kernels += [(hidden * 2, hidden * 2)] * 2  # padded, and the padding taken out
            kernels += [(width * 2, width + width) for width in (hidden, ffn)]  # along rows and along columns
    if fp8 and rows:
        kernels += [(hidden * ffn * 2, 2 * hidden * ffn)] * matrices
    return sum(read + written for read, written in kernels)


@pytest.mark.parametrize("matrices", [2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_block"])
def test_transformer_engines_experts_take_their_gemms_and_the_passes_between_them(matrices: int, dtype: str) -> None:
    """Beside the same GEMMs without passes, at 1e6 bytes a microsecond."""
    rows_L, how = [3, 0, 5], {"num_matrices": matrices}
    plain, te = device(), device(experts_as="te", dtypes=("bfloat16", "fp8_block"))
    precision = PRECISIONS[dtype]
    extra_us = te.experts_us(64, 32, rows_L, precision, **how) - plain.experts_us(64, 32, rows_L, precision, **how)
    passes = [passes_of_te(rows, 64, 32, matrices=matrices, fp8=dtype == "fp8_block") for rows in rows_L]
    assert extra_us == pytest.approx(sum(passes) / 1e6)


def test_transformer_engine_sends_rows_as_they_are_and_fp8_has_the_devices_speed() -> None:
    plain, te = device(), device(experts_as="te", speeds={"fp8_block": 1.5}, speeds_basis="measured elsewhere")
    assert plain.precision("fp8_block") == PRECISIONS["fp8_block"]
    cast = te.precision("fp8_block")
    assert (cast.sent_bytes, cast.speed, cast.weight_bytes) == (2, 1.5, PRECISIONS["fp8_block"].weight_bytes)
    assert te.precision("bfloat16") == PRECISIONS["bfloat16"]
    assert te.precision("fp8_block", "nvfp4").sent_bytes == 0.5 + 1 / 16, "unless a config says what is sent"
    with pytest.raises(ValueError, match="speeds, speeds_basis: expected both or neither"):
        device(speeds={"fp8_block": 1.5})


def test_routing_takes_a_time_per_score_and_permutation_its_share_of_the_bandwidth() -> None:
    assert [device().routing_us(10**6, by_policy=one) for one in (False, True)] == pytest.approx([50, 200])
    # 2 TB/s x 0.25: 5e5 bytes per us, whatever share of the bandwidth experts reach.
    assert device(memory_efficiency=0.9).permute_us(1e6) == pytest.approx(2)
    assert device().routing_us(0, by_policy=True) == device().permute_us(0) == 0


def test_policies_that_go_token_by_token_take_their_own_time() -> None:
    """As h200.md has it: at 65,536 tokens and 64 experts LASER 18 ms and budget_drop 0.33, at 16 and 128 0.2."""
    known, prompts, step = Device.load("h200-sxm"), 65_536 * 64, 16 * 128

    def took(name: str, num_scores: int, num_experts: int = 64) -> float:
        return known.for_policy(name, num_experts).routing_us(num_scores, by_policy=True)

    assert took("laser", prompts) == pytest.approx(18_000, rel=0.02)
    assert took("laser", 65_536 * 8, 8) == pytest.approx(18_000, rel=0.02), "as many tokens of fewer experts"
    assert took("budget_drop", prompts) == pytest.approx(325, rel=0.02)
    assert took("budget_drop", step) == pytest.approx(200, rel=0.02)
    assert took("token_drop", prompts) == known.routing_us(prompts, by_policy=True)


def test_few_rows_reach_less_arithmetic() -> None:
    # Between the points: a straight line over logarithms. Beyond them: the nearest point.
    expected = [0.01, math.sqrt(0.01 * 0.5), 0.5, 0.5]
    np.testing.assert_allclose(device().arithmetic_efficiency.at([0.5, 10, 100, 1e6], growth=0), expected)
    assert device().work_us(1e9, 0, 1) == pytest.approx(1000)


@pytest.mark.parametrize("name", Device.names())
def test_decode_reads_weights_and_waits_for_nothing_else(name: str) -> None:
    """So few rows of an expert need less arithmetic than the device has: experts take their weights' time."""
    device, model = Device.named(name), load_model("qwen3-235b-a22b")
    weights_us = 3 * model.hidden_size * model.ffn_hidden_size * 2 / (device.reached_tbps * 1e6)
    for rows in (1, 2, 4):
        took_us = device.ffn_us(model.hidden_size, model.ffn_hidden_size, np.full(8, rows), PRECISIONS["bfloat16"])
        assert took_us == pytest.approx(8 * weights_us, rel=0.05)


def test_an_h20s_memory_beats_an_h100s_at_decode() -> None:
    model = load_model("deepseek-v3")
    took_us = [
        Device.named(name).experts_us(model.hidden_size, model.ffn_hidden_size, np.full(16, 8))
        for name in ("h20", "h100-sxm")
    ]
    assert took_us[0] < took_us[1]


def test_no_work_takes_no_time() -> None:
    known = device()
    assert known.work_us(0, 0, 0) == 0
    assert known.work_us([], [], []).shape == (0,)
    assert known.experts_us(1000, 500, []) == known.experts_us(1000, 500, [0, 0]) == 0
    assert known.experts_us(1000, 500, [0, 3]) == known.experts_us(1000, 500, [3])


@pytest.mark.parametrize(
    ("name", "prompts", "decode_us"),
    [
        ("h200-sxm-measured", [(8_192, 64.8, 38.4), (32_768, 148.3, 60.4), (65_536, 316.8, 80.3)], (25.6, 13.1)),
        ("h100-sxm-measured", [(16_384, 96.0, 45.8), (32_768, 152.3, 57.6), (65_536, 317.1, 78.9)], (26.2, 13.7)),
    ],
)
def test_a_measured_device_gives_back_what_its_layers_took(
    name: str, prompts: list[tuple[int, float, float]], decode_us: tuple[float, float]
) -> None:
    """The phase ``policy`` of native and of Token Drop or OEA (results/reference/h200.md, h100.md)."""
    known = Device.load(name)
    for num_tokens, native_us, policy_us in prompts:  # 64 experts
        assert known.routing_us(num_tokens * 64, by_policy=False) == pytest.approx(native_us, rel=0.2)
        assert known.routing_us(num_tokens * 64, by_policy=True) == pytest.approx(policy_us, abs=25)
    for by_policy, time_us in zip((False, True), decode_us, strict=True):  # 16 tokens, 128 experts, from a CUDA graph
        assert known.routing_us(16 * 128, by_policy=by_policy) == pytest.approx(time_us, rel=0.1)
    assert known.routing_us(1, by_policy=True) == pytest.approx(known.routing_policy_us, rel=1e-3)


def test_a_gate_in_float32_takes_the_longer_of_its_own_figure_and_the_roofline() -> None:
    known, servers = Device.load("h100-sxm-measured"), Device.load("h100-sxm")
    for num_tokens, gate_us in ((16_384, 215.2), (32_768, 508.2), (65_536, 840.0)):  # results/reference/h100.md
        assert known.gate_us(num_tokens, 2048, 64, 2) == pytest.approx(gate_us, rel=0.15)
        assert servers.gate_us(num_tokens, 2048, 64, 2) < gate_us / 3, "it multiplies bfloat16"
    slow_memory = known.model_copy(update={"memory_tbps": 0.001})
    assert slow_memory.gate_us(16, 2048, 64, 2) > known.gate_us(16, 2048, 64, 2) > 0 == known.gate_us(0, 2048, 64, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100-sxm-measured", "h200-sxm-measured"])
def test_measured_experts_are_fitted_to_the_points_that_are_kept(name: str) -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    from device import fitted

    points = pd.read_csv(ROOT / "results" / "reference" / name.split("-")[0] / "device.csv")
    figures = itertools.islice(fitted(points, Device.load(name)), 9)  # errors come after them
    fit = yaml.safe_load("\n".join(figures))
    stated = yaml.safe_load((Device.folder() / f"{name}.yaml").read_text())
    shares = stated.pop("arithmetic_efficiency")
    assert shares[:7] == fit.pop("arithmetic_efficiency")
    assert {key: stated[key] for key in fit} == fit
    assert len(shares) == (8 if name.startswith("h100") else 7)


def test_beyond_the_points_of_experts_alone_an_h100_has_the_share_of_its_layers() -> None:
    """A rank's experts with 30,000 rows and more each: operations over measured time, all cases, ranks and batches."""
    directory = ROOT / "results" / "reference" / "deepseek-v2-lite-h100-emulated"
    samples, routed = (
        pd.concat(map(pd.read_parquet, (directory / folder).glob("*.parquet"))) for folder in ("cases", "routing")
    )
    keys = ["case_id", "batch", "rank"]
    us = samples[samples["phase"] == "experts"].groupby(keys)["time_us"].median()
    load_R = routed.groupby(keys[:2])["load_R"].agg(lambda loads: np.stack(loads).sum(axis=0))
    pairs = np.array([load_R[case, batch][rank] for case, batch, rank in us.index])
    model, known = load_model("deepseek-v2-lite"), Device.load("h100-sxm-measured")
    tflops = 6 * pairs * model.hidden_size * model.ffn_hidden_size / us.to_numpy() / 1e6
    assert pairs.min() / 8 > 20_000
    rows, share = known.arithmetic_efficiency.root[-1]
    assert rows == 65_536 * 6 * 8 / 64
    assert share == pytest.approx(np.median(tflops) / known.bf16_tflops, abs=5e-4)
    assert np.abs(tflops / (share * known.bf16_tflops) - 1).max() < 0.04


# On an A100 SGLang's kernels are the only ones of its tables; under its power cap an H100 has fewer clocks the longer
# its products take.
FALLING = ("a100-sxm-80gb", "h100-sxm-measured", "h200-sxm-measured")


@pytest.mark.parametrize("name", [name for name in Device.names() if name not in FALLING])
def test_the_share_of_the_arithmetic_does_not_fall_as_rows_grow(name: str) -> None:
    assert (np.diff([share for _, share in Device.load(name).arithmetic_efficiency.root]) >= 0).all()


MEASURED = ("h100-sxm", "h200-sxm")


# On an A100 SGLang's kernels, the only ones of its tables, take 2.4 times as long from 2,048 to 4,096 rows.
@pytest.mark.parametrize("name", sorted({*Device.names()} - {"a100-sxm-80gb"}))
def test_twice_the_rows_of_experts_take_hardly_more_than_twice_the_time(name: str) -> None:
    known = Device.load(name)
    for rows in np.geomspace(1, 2**16, 40):
        once, twice = (known.experts_us(7168, 2048, np.full(8, count)) for count in (rows, 2 * rows))
        assert once * (1 - 1e-9) <= twice <= 2.1 * once, rows


@pytest.mark.parametrize("name", Device.names())
def test_figures_say_what_they_rest_on(name: str) -> None:
    known = Device.load(name)
    bases = {key: value for key, value in known.model_dump().items() if key.endswith("_basis") and value}
    experts = ["arithmetic_basis", "memory_basis", "overhead_basis"]
    if known.speeds and not name.endswith("measured"):
        experts = [*experts, "speeds_basis"]  # of others' GEMMs
    if name == "h100-sxm-te":
        experts = [*experts, "permute_basis"]  # fitted to others' layers
    experts = [key for key in bases if key in experts]
    measured = [key for key in bases if key not in experts or name.endswith("measured")]
    assert [key for key, basis in bases.items() if basis == "measured"] == (
        measured if name.startswith(MEASURED) else []
    )
    elsewhere = [] if name == "h20" or name.endswith("measured") else experts
    assert [key for key, basis in bases.items() if basis == "measured elsewhere"] == elsewhere
    # An abstract gives what FlashAttention-2 reaches on an A100.
    published = ["attention_basis"] if name == "a100-sxm-80gb" else []
    assert [key for key, basis in bases.items() if basis == "published"] == published


# ---- Links -----------------------------------------------------------------------------------------------------------


INTRA = {
    "latency_us": 10.0,
    "latency_basis": "assumed",
    "bandwidth_gbps": 100.0,
    "efficiency": 0.5,
    "efficiency_basis": "published",
}
INTER = {**INTRA, "latency_us": 25.0, "bandwidth_gbps": 20.0}


def links(ranks_per_node: int = 4, **changes: object) -> Links:
    fields = {"name": "test", "source": "a test", "ranks_per_node": ranks_per_node, "intra": INTRA, "inter": INTER}
    return Links.model_validate({**fields, **changes})


def oracle_us(bytes_RR: np.ndarray, ranks_per_node: int, intra: dict, inter: dict) -> list[float]:
    """One rank after another, one message after another."""
    times = []
    for rank in range(len(bytes_RR)):
        sent, received = {"intra": 0.0, "inter": 0.0}, {"intra": 0.0, "inter": 0.0}
        for other in range(len(bytes_RR)):
            if other == rank:
                continue
            link = "intra" if other // ranks_per_node == rank // ranks_per_node else "inter"
            sent[link] += bytes_RR[rank, other]
            received[link] += bytes_RR[other, rank]
        busy = [0.0]
        for link, figures in (("intra", intra), ("inter", inter)):
            both = sent[link], received[link]
            if most := max(both) if figures.get("duplex") != "half" else sum(both) / 2:
                bytes_per_us = figures["bandwidth_gbps"] * figures["efficiency"] * 1e9 / 1e6
                busy.append(figures["latency_us"] + most / bytes_per_us)
        times.append(max(busy))
    return times


@settings(max_examples=100)
@given(
    num_ranks=st.integers(1, 9),
    ranks_per_node=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    duplex=st.sampled_from(["full", "half"]),
)
def test_all_to_all_equals_one_message_after_another(
    num_ranks: int, ranks_per_node: int, seed: int, density: float, duplex: str
) -> None:
    random = np.random.default_rng(seed)
    bytes_RR = random.integers(0, 10**8, (num_ranks, num_ranks)) * (random.random((num_ranks, num_ranks)) < density)
    intra = {**INTRA, "duplex": duplex}
    times_us = links(ranks_per_node, intra=intra).all_to_all_us(bytes_RR)
    assert times_us.dtype == np.float64
    np.testing.assert_allclose(times_us, oracle_us(bytes_RR, ranks_per_node, intra, INTER), rtol=1e-12)


def gather_oracle(partners: int, num_bytes: float, link: Link) -> float:
    """Ranks that hand on all they hold, to whom has nothing of it yet, until they hold all."""
    held, time_us = 1, 0.0
    while held < partners:
        given_on = min(held, partners - held)
        time_us += link.latency_us + given_on * num_bytes / (link.reached_gbps * 1e3)
        held += given_on
    return time_us


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 12, 13])
def test_all_gather_doubles_what_ranks_hold(num_ranks: int) -> None:
    model = links(4)
    inside, nodes = min(num_ranks, 4), math.ceil(num_ranks / 4)
    expected = gather_oracle(nodes, 1e4, model.inter) + gather_oracle(inside, nodes * 1e4, model.intra)
    assert model.all_gather_us(1e4, num_ranks) == pytest.approx(expected)


def test_all_reduce_takes_the_faster_way() -> None:
    model = links(8, inter=None)
    bytes_per_us = model.intra.reached_gbps * 1e3
    # Small: three steps of all bytes. Large: twice three steps, but 7/8 of the bytes in each direction.
    assert model.all_reduce_us(80, 8) == pytest.approx(3 * (10 + 80 / bytes_per_us))
    assert model.all_reduce_us(8e9, 8) == pytest.approx(2 * (3 * 10 + 7e9 / bytes_per_us))
    assert model.all_reduce_us(80, 5) == pytest.approx(3 * (10 + 80 / bytes_per_us)), "three steps reach eight"
    assert model.all_reduce_us(80, 1) == 0
    several = links(2)
    assert several.all_reduce_us(80, 4) == pytest.approx(10 + 80 / 5e4 + 25 + 80 / 1e4)


CURVE = {**INTRA, "curve": [[1e3, 10.0], [1e4, 10.0], [1e6, 100.0]]}


def test_a_curve_goes_through_its_points() -> None:
    link = Link.model_validate(CURVE)
    # Below, on, between (a straight line over logarithms) and beyond the points, there at 50,000 bytes per us.
    sizes = [0, 1, 1e3, 1e4, 1e5, 1e6, 2e6]
    np.testing.assert_allclose(link.time_us(sizes), [0, 10, 10, 10, 10**1.5, 100, 120])
    # By itself a curve goes on as between its last points, but never falls.
    assert [Curve.of([1, 3], times).at(7) for times in ([5, 9], [9, 5])] == pytest.approx([17, 5])


def test_a_measured_link_goes_through_its_points_but_for_chance() -> None:
    """A tenth above a larger message is chance; a fifth is another protocol."""
    link = Link.measured([1e3, 2e3, 4e3, 8e3, 1e4], [10.5, 10.0, 13.0, 11.0, 20.0], "measured")
    assert link.curve.root == ((1e3, 10.0), (2e3, 10.0), (4e3, 13.0), (8e3, 11.0), (1e4, 20.0))
    link = Link.measured([1e3, 2e3, 4e3, 8e3], [10.0, 12.0, 11.5, 21.5], "measured")
    assert (link.latency_us, link.bandwidth_gbps) == pytest.approx((10, 0.4))
    np.testing.assert_allclose(link.time_us([500, 2e3, 4e3, 16e3]), [10, 11.5, 11.5, 41.5])
    with pytest.raises(ValueError, match="expected times that grow with the bytes, got none up to 4,000 bytes"):
        Link.measured([1e3, 2e3, 4e3], [30.0, 20.0, 20.0], "measured")


def test_more_ranks_than_one_node_has_are_refused() -> None:
    alone = links(4, inter=None)
    for ask in (lambda: alone.all_to_all_us(np.ones((5, 5))), lambda: alone.all_gather_us(8, 5)):
        with pytest.raises(ValueError, match=r"at most 4 ranks .* got 5"):
            ask()


GOOD = {"name": "test", "source": "a test", "ranks_per_node": 4, "intra": INTRA, "inter": None}
WRONG_DEVICES = [
    ({"arithmetic_efficiency": [[100, 0.5], [1, 0.1]]}, "arithmetic_efficiency: expected rising sizes"),
    ({"arithmetic_efficiency": []}, "arithmetic_efficiency: .*at least one value"),
    ({"routing_policy_basis": "guessed"}, "routing_policy_basis: .*got 'guessed'"),
    (
        {"arithmetic_efficiency": [[1, 0.1], [9, 1.1]]},
        "arithmetic_efficiency: expected shares of at most 1, got 1.1",
    ),
    ({"gate_tflops": 19}, "gate_tflops, gate_basis: expected both or neither"),
]
WRONG_LINKS = [
    ({**GOOD, "intra": {**INTRA, "bandwidth": 1}}, "intra.bandwidth: no such key"),
    ({**GOOD, "intra": {**INTRA, "curve": [[1, 2], [1, 3]]}}, r"curve: expected rising sizes.*got \[1.0, 3.0\]"),
    ({**GOOD, "intra": None}, "intra: expected a link with ranks_per_node=4"),
    ({**GOOD, "intra": None, "ranks_per_node": 1}, "inter: expected a link where intra is null"),
]


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        *((Device, {**FIGURES, **changes}, words) for changes, words in WRONG_DEVICES),
        *((Links, content, words) for content, words in WRONG_LINKS),
    ],
)
def test_a_wrong_file_is_told_in_one_line(kind: type, content: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(ValueError, match=words) as error:
        kind.load(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_scaled_links_carry_more_in_the_same_time_and_keep_their_latency() -> None:
    plain = links(intra=CURVE)
    plain.all_gather_us(8, 4)
    faster = plain.scaled(4)
    assert plain.scaled(1) is plain
    for before, after in ((plain.intra, faster.intra), (plain.inter, faster.inter)):
        sizes = np.array([1e2, 5e3, 7e5, 3e9])
        np.testing.assert_allclose(after.time_us(4 * sizes), before.time_us(sizes))
        assert after.latency_us == before.latency_us
    assert "bandwidth x 4" in describe_links(faster.facts(4))
