"""Whole models: rows in which Amdahl's law holds, and what figures, page and table say of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_builder import FakeCase, standard_cases
from whole_builder import ELSEWHERE_TOTAL_US, ELSEWHERE_US, write_whole

from moe_ep_bench.analysis.cases import load
from moe_ep_bench.analysis.drawing import draw
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.reduce import PASS_PARTS
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.cli import main

# Native's MoE layers are two thirds of a pass; a policy that runs them so many times as fast gains what the law says.
SHARE, LAYERS = 2 / 3, 1.5
END_TO_END = 1 / (1 - SHARE + SHARE / LAYERS)
DROP = "token_drop gamma 2"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of three layers."""
    return write_whole(tmp_path_factory.mktemp("whole"), listed())


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of nine layers."""
    return write_whole(tmp_path_factory.mktemp("cut"), listed(), of_layers=9)


def listed() -> list[FakeCase]:
    return [
        FakeCase("token_drop", params={"capacity_factor": 2.0}, speedup=LAYERS, dropped=0.05, mass=0.97),
        FakeCase("laser", status="oom", reason="rank 1: tried to allocate 12 GiB"),
        *(case for case in standard_cases() if case.policy != "token_drop"),
    ]


def test_the_pass_its_layers_and_its_parts_are_drawn(run: Path) -> None:
    with house_style():
        speedups, phases = (draw(FIGURES[name], load(run)) for name in ("speedup", "phases"))
    assert [axes.get_ylabel() for axes in speedups.figure.axes] == [
        "speedup (native = 1)",
        "MoE speedup",
        "dropped (%)",
    ]
    row = speedups.rows.set_index("label").loc[DROP]
    assert row["speedup_median"] == pytest.approx(END_TO_END, rel=0.01)
    assert row["moe_speedup_median"] == pytest.approx(LAYERS, rel=0.03)
    assert row["floor_low"] < row["floor_high"], "no speedup without its noise floor"
    assert phases.figure.axes[0].get_xlabel() == "time of a pass (ms)"
    parts = phases.rows[phases.rows["label"] == "native"].set_index("phases")["time_ms"]
    assert list(parts.index) == [part for part in PASS_PARTS if part in parts]
    assert parts["attention"] == pytest.approx(ELSEWHERE_US["attention"] / 1e3)
    assert parts["rest"] == pytest.approx((ELSEWHERE_TOTAL_US - ELSEWHERE_US["attention"]) / 1e3)
    assert parts["waiting"] > 0
    assert parts.sum() == pytest.approx(3 * ELSEWHERE_TOTAL_US / 1e3, rel=0.02)


def test_a_page_of_whole_models_is_written(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["show", str(cut), "--format", "html", "--out", str(out)]) == 0
    page = out.read_text()
    assert page.count("<figure") > 1
    for words in ("end to end", "by Amdahl", "3 of 9 layers", "eights are random"):
        assert words in page
