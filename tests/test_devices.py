"""The roofline by hand and by properties; the files of configs/devices/."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moe_ep_bench.devices import DEVICES_DIR, Device, device_names, load_device

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


KNOWN = {name: load_device(name) for name in device_names()}


def device(**changes: object) -> Device:
    return Device.model_validate({**FIGURES, **changes})


def test_the_slower_of_arithmetic_and_memory_decides_for_each_expert() -> None:
    # 50 TFLOP/s at 100 rows: 5e7 operations per us. 1 TB/s: 1e6 bytes per us.
    assert device().time_us(1e9, 1e6, 100) == pytest.approx(3 + 20)
    assert device().time_us(1e7, 7e6, 100) == pytest.approx(3 + 7)
    assert device().time_us([1e9, 1e7], [1e6, 7e6], [100, 100]) == pytest.approx(3 + 20 + 7)


def test_work_alone_has_no_overhead() -> None:
    assert device().work_us([1e9, 1e7], [1e6, 7e6], [100, 100]) == pytest.approx(20 + 7)
    assert device().work_us(0, 0, 0) == 0


def test_routing_takes_a_time_per_score() -> None:
    assert device().routing_us(10**6, by_policy=False) == pytest.approx(50)
    assert device().routing_us(10**6, by_policy=True) == pytest.approx(200)
    assert device().routing_us(0, by_policy=True) == 0


def test_permutation_moves_bytes_at_its_share_of_the_bandwidth() -> None:
    # 2 TB/s x 0.25: 5e5 bytes per us, whatever share of the bandwidth experts reach.
    assert device(memory_efficiency=0.9).permute_us(1e6) == pytest.approx(2)
    assert device().permute_us(0) == 0


def test_few_rows_reach_less_arithmetic() -> None:
    # Between the points: a straight line over logarithms. Beyond them: the nearest point.
    expected = [0.01, math.sqrt(0.01 * 0.5), 0.5, 0.5]
    np.testing.assert_allclose(device().efficiency([0.5, 10, 100, 1e6]), expected)
    assert device().time_us(1e9, 0, 1) == pytest.approx(3 + 1000)


def test_no_work_takes_no_time() -> None:
    assert device().time_us(0, 0, 0) == 0
    assert device().time_us([], [], []) == 0
    assert device().time_us([0, 1e9], [0, 0], [0, 100]) == pytest.approx(3 + 20)


@given(
    rows=st.lists(st.integers(0, 10**5), min_size=1, max_size=8),
    name=st.sampled_from(sorted(KNOWN)),
    more=st.integers(1, 1000),
)
def test_more_tokens_never_take_less_time(rows: list[int], name: str, more: int) -> None:
    hidden, ffn = 2048, 1024

    def time_us(rows_L: np.ndarray) -> float:
        num_bytes = 2 * (3 * hidden * ffn * (rows_L > 0) + rows_L * (2 * hidden + 6 * ffn))
        return KNOWN[name].time_us(6 * hidden * ffn * rows_L, num_bytes, rows_L)

    rows_L = np.array(rows)
    fuller_L = rows_L.copy()
    fuller_L[0] += more
    assert time_us(fuller_L) >= time_us(rows_L) * (1 - 1e-12)


def test_no_device_beats_its_data_sheet() -> None:
    for name in device_names():
        known = load_device(name)
        assert known.time_us(known.bf16_tflops * 1e6, 0, 10**6) > 1
        assert known.time_us(0, known.memory_tbps * 1e6, 10**6) > 1


def test_the_h100_gives_back_what_its_figures_were_measured_on() -> None:
    """Decode of Qwen3-30B-A3B at 16 tokens: 37 us + 3.49 us per activated expert."""
    hidden, ffn, num_experts = 2048, 768, 60
    rows = 16 * 8 / num_experts
    time_us = load_device("h100-sxm").time_us(
        np.full(num_experts, 6 * hidden * ffn * rows), np.full(num_experts, 2 * 3 * hidden * ffn), rows
    )
    assert time_us == pytest.approx(37 + 3.49 * num_experts, rel=0.01)


def test_the_h100_gives_back_what_its_routing_was_measured_on() -> None:
    """524,288 tokens: torch's top-k 2.3 ms, Token Drop 6.4 ms at 64 experts; its 10.96 ms at 128 to within 20 %."""
    known, num_tokens = load_device("h100-sxm"), 524_288
    assert known.routing_us(num_tokens * 64, by_policy=False) == pytest.approx(2300, rel=0.01)
    assert known.routing_us(num_tokens * 64, by_policy=True) == pytest.approx(6400, rel=0.01)
    assert known.routing_us(num_tokens * 128, by_policy=True) == pytest.approx(10_960, rel=0.2)


@pytest.mark.parametrize("name", [name for name in device_names() if name != "h100-sxm"])
def test_assumed_routing_is_the_h100s_by_memory_bandwidth(name: str) -> None:
    known, h100 = load_device(name), load_device("h100-sxm")
    ratio = h100.memory_tbps / known.memory_tbps
    assert known.routing_native_ps == pytest.approx(h100.routing_native_ps * ratio, rel=0.005)
    assert known.routing_policy_ps == pytest.approx(h100.routing_policy_ps * ratio, rel=0.005)


@pytest.mark.parametrize(
    ("name", "tflops", "tbps", "size_gb"),
    [
        ("h20", 148, 4.0, 96),
        ("h100-sxm", 989.4, 3.35, 80),
        ("h200-sxm", 989.4, 4.8, 141),
        ("a100-sxm-80gb", 312, 2.039, 80),
    ],
)
def test_data_sheet_figures(name: str, tflops: float, tbps: float, size_gb: float) -> None:
    known = load_device(name)
    assert (known.bf16_tflops, known.memory_tbps, known.memory_gb) == (tflops, tbps, size_gb)


@pytest.mark.parametrize("name", device_names())
def test_every_file_loads_and_its_figures_have_sources(name: str) -> None:
    known = load_device(name)
    assert known.name == name
    assert known.describe().startswith(f"modelled by devices/{name}: ")
    # Nothing was measured on a device but the H100: the rest must say that it is assumed.
    bases = {key: value for key, value in known.model_dump().items() if key.endswith("_basis")}
    measured = ["memory_basis", "overhead_basis", "routing_native_basis", "routing_policy_basis"]
    assert [key for key, basis in bases.items() if basis == "measured"] == (measured if name == "h100-sxm" else [])
    assert set(bases.values()) <= {"assumed", "measured"}
    for number, line in enumerate((DEVICES_DIR / f"{name}.yaml").read_text().splitlines(), 1):
        if re.match(r"\s*(- \[|\w+: *)[\d.]+", line):
            assert re.search(r"#\s+\S+ \S+", line), f"{name}.yaml:{number}: a figure without its source: {line}"


def test_a_description_says_what_is_assumed() -> None:
    words = device().describe()
    assert "up to 50% reached (assumed)" in words
    assert "50% reached (measured)" in words
    assert "3 us a pass (assumed)" in words
    assert "routing 50 ps a score (published), by a policy 200 ps (assumed)" in words
    assert words.endswith("permutation at 25% of the memory's TB/s (measured); 80 GB")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((-1, 0, 1), "at least 0"), ((1, math.inf, 1), "finite"), (([1, 2], [1, 2, 3], 1), r"got shapes \(2,\), \(3,\)")],
)
def test_wrong_numbers_are_refused(arguments: tuple, words: str) -> None:
    for timed in (device().time_us, device().work_us):
        with pytest.raises(ValueError, match=words):
            timed(*arguments)


def test_negative_scores_and_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="scores: expected at least 0, got -1"):
        device().routing_us(-1, by_policy=True)
    for num_bytes in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="bytes: expected a finite number of at least 0"):
            device().permute_us(num_bytes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arithmetic_efficiency": [[100, 0.5], [1, 0.1]]}, "arithmetic_efficiency: expected rising rows"),
        ({"arithmetic_efficiency": []}, "arithmetic_efficiency: .*at least 1"),
        ({"memory_efficiency": 2}, "memory_efficiency: .*got 2"),
        ({"permute_efficiency": 0}, "permute_efficiency: .*got 0"),
        ({"routing_native_ps": 0}, "routing_native_ps: .*got 0"),
        ({"routing_policy_basis": "guessed"}, "routing_policy_basis: .*got 'guessed'"),
        ({"tflops": 2}, "tflops: no such key"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(changes: dict, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({**FIGURES, **changes}))
    with pytest.raises(ValueError, match=words) as error:
        load_device(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"h100-sxm.*got 'h1000'"):
        load_device("h1000")
