"""The roofline by hand and by properties; the files of data/devices/."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from moe_ep_bench.cost_model.devices import (
    PRECISIONS,
    RUN_DTYPES,
    VALUE_BYTES,
    Device,
    ffn_work,
)

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
}


KNOWN = {name: Device.load(name) for name in Device.names()}


def device(**changes: object) -> Device:
    return Device.model_validate({**FIGURES, **changes})


def test_the_slower_of_arithmetic_and_memory_decides_for_each_piece() -> None:
    # 50 TFLOP/s at 100 rows: 5e7 operations per us. 1 TB/s: 1e6 bytes per us.
    assert device().work_us(1e9, 1e6, 100) == pytest.approx(20)
    assert device().work_us(1e7, 7e6, 100) == pytest.approx(7)
    assert device().work_us([1e9, 1e7], [1e6, 7e6], [100, 100]) == pytest.approx(20 + 7)


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


def test_routing_takes_a_time_per_score_and_permutation_its_share_of_the_bandwidth() -> None:
    assert [device().routing_us(10**6, by_policy=one) for one in (False, True)] == pytest.approx([50, 200])
    # 2 TB/s x 0.25: 5e5 bytes per us, whatever share of the bandwidth experts reach.
    assert device(memory_efficiency=0.9).permute_us(1e6) == pytest.approx(2)
    assert device().routing_us(0, by_policy=True) == device().permute_us(0) == 0


def test_few_rows_reach_less_arithmetic() -> None:
    # Between the points: a straight line over logarithms. Beyond them: the nearest point.
    expected = [0.01, math.sqrt(0.01 * 0.5), 0.5, 0.5]
    np.testing.assert_allclose(device().arithmetic_efficiency.at([0.5, 10, 100, 1e6], growth=0), expected)
    assert device().work_us(1e9, 0, 1) == pytest.approx(1000)


def test_a_value_has_as_many_bytes_as_in_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in RUN_DTYPES} == {
        name: VALUE_BYTES[name] for name in RUN_DTYPES
    }


def test_no_work_takes_no_time() -> None:
    known = device()
    assert known.work_us(0, 0, 0) == known.work_us([], [], []) == 0
    assert known.experts_us(1000, 500, []) == known.experts_us(1000, 500, [0, 0]) == 0
    assert known.experts_us(1000, 500, [0, 3]) == known.experts_us(1000, 500, [3])


def test_the_h100s_roofline_is_near_what_a_decode_step_took_with_torch() -> None:
    """Qwen3-30B-A3B at 16 tokens, grouped_mm: 37 us + 3.49 us per activated expert. The fit is of other kernels."""
    # 128 pairs on 60 experts: rows are 0.4 % of what their weights are.
    rows_L = np.array([3] * 8 + [2] * 52 + [0] * 68)
    time_us = Device.load("h100-sxm").experts_us(2048, 768, rows_L)
    assert time_us == pytest.approx(37 + 3.49 * 60, rel=0.15)


def test_the_h200_gives_back_what_its_layers_took() -> None:
    """The phase ``policy`` of native and of Token Drop, 64 experts (results/reference/h200.md)."""
    known = Device.load("h200-sxm-measured")
    for num_tokens, native_us, policy_us in ((8_192, 64.8, 38.4), (32_768, 148.3, 60.4), (65_536, 316.8, 80.3)):
        assert known.routing_us(num_tokens * 64, by_policy=False) == pytest.approx(native_us, rel=0.2)
        assert known.routing_us(num_tokens * 64, by_policy=True) == pytest.approx(policy_us, rel=0.2)
    assert known.routing_us(1, by_policy=True) == pytest.approx(known.routing_policy_us, rel=1e-3)


def test_the_measured_experts_of_the_h200_are_fitted_to_the_points_that_are_kept() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    from device import fitted

    name = "h200-sxm-measured"
    points = pd.read_csv(ROOT / "results" / "reference" / "h200" / "device.csv")
    figures = itertools.islice(fitted(points, Device.load(name)), 9)  # errors come after them
    fit = yaml.safe_load("\n".join(figures))
    stated = yaml.safe_load((Device.folder() / f"{name}.yaml").read_text())
    assert {key: stated[key] for key in fit} == fit


@pytest.mark.parametrize("name", [name for name in Device.names() if not name.startswith("h200-sxm")])
def test_assumed_routing_is_the_h200s_by_memory_bandwidth(name: str) -> None:
    known, h200 = Device.load(name), Device.load("h200-sxm")
    ratio = h200.memory_tbps / known.memory_tbps
    assert known.routing_native_ps == pytest.approx(h200.routing_native_ps * ratio, rel=0.005)
    assert known.routing_policy_ps == pytest.approx(h200.routing_policy_ps * ratio, rel=0.005)
    assert (known.routing_native_us, known.routing_policy_us) == (h200.routing_native_us, h200.routing_policy_us)


@pytest.mark.parametrize("name", Device.names())
def test_figures_say_what_they_rest_on(name: str) -> None:
    known = Device.load(name)
    bases = {key: value for key, value in known.model_dump().items() if key.endswith("_basis")}
    experts = ["arithmetic_basis", "memory_basis", "overhead_basis"]
    measured = [key for key in bases if key not in experts or name.endswith("measured")]
    assert [key for key, basis in bases.items() if basis == "measured"] == (
        measured if name.startswith("h200-sxm") else []
    )
    elsewhere = [] if name in ("h20", "h200-sxm-measured") else experts
    assert [key for key, basis in bases.items() if basis == "measured elsewhere"] == elsewhere
    # Of attention two abstracts give what FlashAttention-2 reaches.
    published = ["attention_basis"] if name in ("h100-sxm", "a100-sxm-80gb") else []
    assert [key for key, basis in bases.items() if basis == "published"] == published


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arithmetic_efficiency": [[100, 0.5], [1, 0.1]]}, "arithmetic_efficiency: expected rising sizes"),
        ({"arithmetic_efficiency": []}, "arithmetic_efficiency: .*at least 1"),
        ({"memory_efficiency": 2}, "memory_efficiency: .*got 2"),
        ({"permute_efficiency": 0}, "permute_efficiency: .*got 0"),
        ({"routing_native_ps": 0}, "routing_native_ps: .*got 0"),
        ({"routing_policy_basis": "guessed"}, "routing_policy_basis: .*got 'guessed'"),
        ({"tflops": 2}, "tflops: no such key"),
        ({"attention_efficiency": 0.5}, "attention_basis: expected one with attention_efficiency and none without"),
        ({"attention_basis": "assumed"}, "attention_basis: expected one with attention_efficiency and none without"),
        (
            {"arithmetic_efficiency": [[1, 0.1], [9, 1.1]]},
            "arithmetic_efficiency: expected shares of at most 1, got 1.1",
        ),
    ],
)
def test_a_wrong_file_is_told_in_one_line(changes: dict, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({**FIGURES, **changes}))
    with pytest.raises(ValueError, match=words) as error:
        Device.load(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
