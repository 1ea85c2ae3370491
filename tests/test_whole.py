"""Whole models: rows in which Amdahl's law holds, and what figure, page and table say of them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from results_builder import FakeCase, FakeComparison, standard_cases, write_run
from whole_builder import ELSEWHERE_TOTAL_US, ELSEWHERE_US, write_whole

from moe_ep_bench.analysis.cases import load
from moe_ep_bench.analysis.drawing import draw
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.reduce import PASS_PARTS
from moe_ep_bench.analysis.style import house_style, phase_look
from moe_ep_bench.cli import main

# Native's MoE layers are two thirds of a pass; a policy that runs them so many times as fast gains what the law says.
SHARE, LAYERS = 2 / 3, 1.5
END_TO_END = 1 / (1 - SHARE + SHARE / LAYERS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of three layers."""
    return write_whole(tmp_path_factory.mktemp("whole"), cases())


@pytest.fixture(scope="module")
def run(directory: Path) -> Path:
    return directory


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of nine layers."""
    return write_whole(tmp_path_factory.mktemp("cut"), cases(), of_layers=9)


def cases() -> list[FakeCase]:
    return [
        FakeCase("token_drop", params={"capacity_factor": 2.0}, speedup=LAYERS, dropped=0.05, mass=0.97),
        FakeCase("laser", status="oom", reason="rank 1: tried to allocate 12 GiB"),
        *(case for case in standard_cases() if case.policy != "token_drop"),
    ]


def drawn(run: Path) -> tuple[pd.DataFrame, list[str], int]:
    """The marks, all texts on the sheet, and how many bars are hatched as extrapolated."""
    with house_style():
        drawing = draw(FIGURES["whole"], load(run))
        texts = [text.get_text() for text in drawing.figure.texts]
        texts += [text for axes in drawing.figure.axes for text in (axes.get_xlabel(), axes.get_title(loc="left"))]
        bars = [bar for axes in drawing.figure.axes for bar in axes.patches]
    return drawing.rows, texts, sum(bar.get_hatch() == phase_look("extrapolated")["hatch"] for bar in bars)


def shown(rows: pd.DataFrame, what: str, policy: str = "token_drop gamma 2") -> pd.DataFrame:
    return rows[(rows.label == policy) & (rows.shows == what)]


def test_the_pass_its_layers_and_the_law_stand_side_by_side(run: Path) -> None:
    rows, texts, num_hatched = drawn(run)
    found = {what: shown(rows, what).speedup_median.item() for what in ("end to end", "MoE layers alone", "by Amdahl")}
    assert found["end to end"] == pytest.approx(END_TO_END, rel=0.01)
    assert found["MoE layers alone"] == pytest.approx(LAYERS, rel=0.03)
    assert found["by Amdahl"] == pytest.approx(END_TO_END, rel=0.02)
    assert shown(rows, "by Amdahl").origin.item() == "computed"
    assert rows[rows.role == "bound"].speedup_median.item() == pytest.approx(1 / (1 - SHARE), rel=0.03)
    assert (rows[rows.shows == "end to end"].origin == "measured").all()
    ends = rows[rows.shows == "end to end"]
    assert (ends.floor_low < ends.floor_high).all(), "no speedup without its noise floor"
    assert any("no pass gains more than" in " ".join(text.split()) for text in texts)
    assert num_hatched == 0
    assert not any("extrapolated" in text for text in texts)
    parts = shown(rows, "part", "native").set_index("part").time_ms
    assert list(parts.index) == list(PASS_PARTS)
    assert parts["attention"] == pytest.approx(ELSEWHERE_US["attention"] / 1e3)
    assert parts["rest"] == pytest.approx((ELSEWHERE_TOTAL_US - ELSEWHERE_US["attention"]) / 1e3)
    assert parts["waiting"] > 0
    assert parts.sum() == pytest.approx(3 * ELSEWHERE_TOTAL_US / 1e3, rel=0.02)


def test_what_was_extrapolated_is_hatched_and_said_and_nothing_else_is(cut: Path) -> None:
    rows, texts, num_hatched = drawn(cut)
    extrapolated = rows[rows.origin == "extrapolated"]
    assert set(extrapolated.shows) == {"all layers"}
    assert extrapolated.speedup_low.isna().all()
    assert num_hatched == len(extrapolated)
    assert shown(rows, "all layers").speedup_median.item() > shown(rows, "end to end").speedup_median.item()
    assert "all 9 layers, extrapolated (ms)" in texts
    for note in ("3 of 9 layers were built and timed", "no pass gains more than"):
        assert any(note in " ".join(text.split()) for text in texts)


def test_a_page_of_whole_models_is_written(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert main(["show", str(cut), "--format", "html", "--out", str(out)]) == 0
    page = out.read_text()
    assert page.count("<figure") == 1
    for words in ("end to end", "by Amdahl", "extrapolated", "eights are random"):
        assert words in page


def test_plot_chooses_by_what_a_directory_holds(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = write_run(tmp_path / "layers", [FakeComparison(cases=standard_cases()[::4], num_batches=2)])
    out = tmp_path / "figures"
    command = ["plot", str(directory), str(layers), "--figures", "whole,dropped", "--format", "svg"]
    assert main([*command, "--out", str(out)]) == 0
    names = {str(path.relative_to(out)) for path in out.rglob("*.svg")}
    assert names == {"whole.svg", "dropped.svg"}
    assert main(["plot", str(directory), "--figures", "speedup"]) == 2
    assert "speedup: not drawn" in capsys.readouterr().err
    assert main(["plot", str(layers), "--figures", "whole"]) == 2


def test_the_table_of_layers_shows_native_and_the_policy_that_gains_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [FakeCase("oea", params={"k0": k0}, label=f"oea k0={k0}", speedup=1 + k0 / 10) for k0 in range(3, 9)]
    directory = write_whole(tmp_path / "run", [FakeCase("native", role="baseline"), *many], num_batches=2)
    assert main(["show", str(directory), "--view", "layers"]) == 0
    table = capsys.readouterr().out.partition("fastest policy")[2].splitlines()
    assert [line.split()[:2] for line in table[4:10]] == [
        [str(layer), policy] for layer in range(3) for policy in ("native", "oea")
    ]
    assert table[5].split()[2] == "k0=8"
