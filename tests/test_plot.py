"""``moe-ep-bench plot``: several directories side by side, damaged ones, any column against any other, large runs."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest
from results_builder import FakeCase, FakeComparison, assert_nothing_is_clipped, samples, standard_cases, write_run

import plot_results
from moe_ep_bench.analysis import lines as lines_module
from moe_ep_bench.analysis.cases import Store, cases, load, routing
from moe_ep_bench.analysis.drawing import draw
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.lines import lines
from moe_ep_bench.analysis.marks import _give_equal_limits
from moe_ep_bench.analysis.plot import drawings, figures_of
from moe_ep_bench.analysis.style import house_style, settle
from moe_ep_bench.cli import main

ROOT = Path(plot_results.__file__).parent
REFERENCE = ROOT / "results" / "reference"
# All but what holds a run.json alone: there is nothing to draw.
DIRECTORIES = sorted(
    str(path.parent.relative_to(REFERENCE))
    for path in REFERENCE.glob("**/run.json")
    if len(list(path.parent.iterdir())) > 2
)
# Drawn in the fast part too.
SMALL = "quickstart-2cpu"


def run_at(root: Path, **changes) -> Path:
    drops = [
        FakeCase("token_drop", params={"capacity_factor": g}, speedup=1.5 / g**0.5, dropped=0.2 / g, mass=0.9)
        for g in (1.0, 1.5)
    ]
    oea = [FakeCase("oea", params={"k0": k}, speedup=1.2, mass=0.8 + k / 50) for k in (2, 4)]
    usual = {
        "cases": [*(case for case in standard_cases() if case.policy != "token_drop"), *drops, *oea],
        "num_batches": 3,
        "num_iterations": 2,
    }
    comparisons = [FakeComparison("c0", **{**usual, **changes})]
    return write_run(root, comparisons, seed=len(str(root)))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run, which nobody writes to."""
    return run_at(tmp_path_factory.mktemp("plot") / "good")


def plotted(root: Path, *arguments: str | Path) -> tuple[int, Path]:
    out = root / "drawn"
    return main(["plot", *map(str, arguments), "--out", str(out), "--format", "svg"]), out


# ---- directories ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_directories_stand_in_one_figure_and_are_told_apart(good: Path, tmp_path: Path) -> None:
    other = run_at(tmp_path / "other", num_ranks=4)
    same = shutil.copytree(good, tmp_path / "same")
    status, out = plotted(tmp_path, good, other, same, "--figures", "speedup")
    assert status == 0
    rows, of_two = pd.read_csv(out / "speedup.csv"), "Tiny-MoE, EP 2, 4,096 tokens, from"
    assert set(rows["title"]) == {f"{of_two} good", f"{of_two} same", "Tiny-MoE, EP 4, 4,096 tokens"}


@pytest.mark.slow
def test_figures_land_beside_one_directory_and_are_the_same_bytes_in_another_process(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(good, tmp_path / "one")
    shutil.copytree(good, tmp_path / "two")
    assert plot_results.main(["one", "--format", "svg,pdf", "--figures", "speedup"]) == 0
    written = [f"speedup.{kind}" for kind in ("svg", "pdf", "csv")]
    assert capsys.readouterr().out.splitlines() == [f"one/figures/{name}" for name in written]
    # Another process, another hash seed, another user's matplotlib settings; pyplot and torch stay unimported.
    (tmp_path / "matplotlibrc").write_text("font.size: 20\naxes.facecolor: red\n")
    code = (
        "import sys\nfrom moe_ep_bench.cli import main\n"
        "assert main(['plot', 'two', '--format', 'svg,pdf', '--figures', 'speedup']) == 0\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert not {m.split('.')[0] for m in sys.modules} & {'torch', 'megatron'}\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT), "SOURCE_DATE_EPOCH": "86400"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in written:
        assert Path("two/figures", name).read_bytes() == Path("one/figures", name).read_bytes()


def test_what_cannot_be_trusted_is_named_and_the_rest_drawn(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(good, tmp_path / "damaged")
    (path,) = (damaged / "routing").glob("*.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    status, out = plotted(tmp_path, good, damaged, "--figures", "dropped")
    assert status == 1
    assert sorted(path.name for path in out.iterdir()) == ["dropped.csv", "dropped.svg"]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: damaged, not Parquet" in line


# ---- any column against any other ----------------------------------------------------------------------------------


def test_a_column_over_another_with_its_csv(good: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path), "--format", "svg"]
    where = "policy == 'oea'"
    assert main(["plot", str(good), "--x", "k0", "--y", "retained_mass", "--where", where, *out]) == 0
    rows = pd.read_csv(tmp_path / "retained_mass-over-k0.csv")
    assert rows["k0"].tolist() == [2, 4]
    frame = cases(load(good)).query(where)
    np.testing.assert_allclose(rows["retained_mass"], frame["retained_mass"], rtol=1e-8)
    assert (tmp_path / "retained_mass-over-k0.svg").is_file()


def rows_of(store: Store, *asked: str, **more: str) -> pd.DataFrame:
    (figure,) = lines(*asked, **more).values()
    return figure.rows(store, figure.frame(store))


def test_a_policys_line_leaves_out_the_parameter_along_the_axis(good: Path) -> None:
    store = load(good)
    assert set(rows_of(store, "k0", "dropped_share").query("k0.notna()")["line"]) == {"oea"}
    by_policy = rows_of(store, "capacity_factor", "dropped_share", by="policy", where="role == 'policy'")
    assert set(by_policy["line"]) == {"topk", "token_drop", "oea"}


def variants(root: Path) -> Store:
    """Two sizes of batches; Token Drop and oea, of which there are two."""
    params = ("token_drop", {"capacity_factor": 1.0}), ("oea", {"k0": 2}), ("oea", {"k0": 4})
    comparisons = []
    for number, tokens in enumerate((1024, 4096)):
        cases = [
            FakeCase(policy, params=of, mass=0.6 + value / 10, speedup=1 + value / 10)
            for policy, of in params
            for value in of.values()
        ]
        about = {"tokens": tokens, "num_batches": 2, "num_iterations": 1, "noise": 0.0}
        cases = [FakeCase("native", role="baseline"), *cases]
        comparisons.append(FakeComparison(f"c{number}", {"title": f"Tiny {number}"}, cases, **about))
    return load(write_run(root, comparisons))


def test_variants_of_a_policy_are_never_averaged(tmp_path: Path) -> None:
    """Along a setting each is a line of its own; along what was measured they are points of their policy's line."""
    store = variants(tmp_path)
    of_policies = rows_of(store, "num_tokens", "retained_mass", by="policy")
    masses = of_policies.groupby("line")["retained_mass"].agg(list)
    assert masses[["oea k0=2", "oea k0=4"]].tolist() == [pytest.approx([0.8] * 2), pytest.approx([1.0] * 2)]
    assert set(masses.index) == {"native", "token_drop", "oea k0=2", "oea k0=4"}
    of_numbers = rows_of(store, "num_tokens", "retained_mass", by="ep_size")
    assert set(of_numbers["line"]) == {
        f"2, {name}" for name in ("native", "token_drop capacity_factor=1.0", "oea k0=2", "oea k0=4")
    }
    costs = rows_of(
        store, "retained_mass", "speedup_median", by="policy", where="policy == 'oea' and num_tokens == 1024"
    )
    assert costs["line"].tolist() == ["oea"] * 2
    assert sorted(costs["speedup_median"]) == pytest.approx([1.2, 1.4])


def test_a_mean_over_comparisons_has_no_whiskers(tmp_path: Path) -> None:
    store = variants(tmp_path)
    rows = rows_of(store, "k0", "speedup_median", facet="model", where="policy == 'oea'")
    assert rows["speedup_median"].tolist() == pytest.approx([1.2, 1.4])
    assert rows["speedup_low"].isna().all()
    assert rows_of(store, "k0", "speedup_median", where="policy == 'oea'")["speedup_low"].notna().all()


def test_whiskers_of_any_column_stand_in_the_csv_and_the_caption(tmp_path: Path) -> None:
    cases = [FakeCase("native", role="baseline"), *(FakeCase("oea", params={"k0": k}, speedup=1.2) for k in (2, 4))]
    workload = {"kind": "synthetic", "description": "skewed", "tail_model": None, "targets": {"peak_load": 2.0}}
    comparisons = [
        FakeComparison(f"c{ep}", {"workload": workload}, cases, num_ranks=ep, num_iterations=1) for ep in (2, 4)
    ]
    run = write_run(tmp_path / "run", comparisons)
    asked = ["--bare", "--x", "ep_size", "--y", "speedup_median", "--facet", "k0"]
    status, out = plotted(tmp_path, run, *asked)
    assert status == 0
    rows = pd.read_csv(out / "speedup_median-over-ep_size-k0.csv")
    assert (rows["speedup_low"] < rows["speedup_median"]).all()
    assert (rows["speedup_median"] < rows["speedup_high"]).all()
    assert rows[["speedup_is_interval", "is_one_draw"]].all(axis=None)
    assert "Whiskers: 95 % interval, one draw." in (out / "speedup_median-over-ep_size-k0.txt").read_text()
    status, out = plotted(tmp_path / "mean", run, *asked[:2], "model", *asked[3:])
    assert "Whiskers" not in (out / "speedup_median-over-model-k0.txt").read_text()


def test_columns_of_batches_are_means_and_percentiles_and_phases_are_of_their_slowest_rank(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = load(good)
    varied = routing(store).assign(rank_imbalance=lambda rows: 1 + rows["batch"] ** 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(lines_module, "routing", lambda _: varied)
        rows = rows_of(store, "k0", "rank_imbalance_p95").query("k0 == 2")
    assert rows["rank_imbalance_p95"].tolist() == pytest.approx([np.quantile([1, 2, 5], 0.95)])
    by_batch = rows_of(store, "batch", "entropy", facet="policy")
    assert sorted(by_batch["batch"].unique()) == [0, 1, 2]
    assert set(by_batch["heading"]) == {"policy native", "policy topk", "policy token_drop", "policy oea"}
    times = samples(store).query("kind == 'breakdown' and phase == 'experts' and label == 'oea k0=2'")
    slowest_us = times.groupby(["batch", "iteration"])["time_us"].max().groupby("batch").median()
    drawn = rows_of(store, "batch", "experts_us", by="label").query("line == 'oea k0=2'")
    assert drawn.set_index("batch")["experts_us"].to_dict() == pytest.approx(slowest_us.to_dict())


def test_speedups_along_a_swept_number_have_whiskers_and_what_has_no_value_goes_by_its_name(tmp_path: Path) -> None:
    """One line per capacity factor, replication by its label; speedups of the frame at each peak load."""
    comparisons = []
    for number, peak in enumerate((4, 1, 2)):
        drops = [
            FakeCase("token_drop", params={"capacity_factor": g}, speedup=1 + 0.2 * (peak - g)) for g in (1.0, 2.0)
        ]
        eplb = FakeCase("eplb", "replication", {"spare_per_rank": 1}, speedup=1.25)
        cases = [FakeCase("native", role="baseline"), *drops, eplb]
        facts = {"point": {"workload.peak_load": peak}, "title": f"Tiny {number}"}
        comparisons.append(FakeComparison(f"c{number}", facts, cases, num_batches=2, num_iterations=1, noise=0.0))
    (figure,) = lines("peak_load", "speedup_median", by="capacity_factor").values()
    with house_style():
        drawing = draw(figure, load(write_run(tmp_path, comparisons)))
    (axes,) = drawing.figure.axes
    paths = [line for line in axes.lines if len(line.get_xdata()) == 3 and line.get_linestyle() != "None"]
    found = {tuple(np.round(np.asarray(line.get_ydata(), dtype=float), 6)) for line in paths}
    assert found == {(1.0, 1.2, 1.6), (0.8, 1.0, 1.4), (1.25, 1.25, 1.25)}
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()][:3] == [
        "1",
        "2",
        "EPLB, 1 spare per rank",
    ]
    assert len(axes.containers) == 3
    places = {(*line.get_transform().transform((1, 1)),) for line in paths}
    assert places == {(*axes.transData.transform((1, 1)),)}, "no line stands beside its number"


def test_panels_of_one_quantity_have_one_axis(tmp_path: Path) -> None:
    store = variants(tmp_path)
    (figure,) = lines("num_tokens", "speedup_median", facet="policy").values()
    with house_style():
        panels = draw(figure, store).figure.axes
    assert len(panels) == 2
    assert len({axes.get_ylim() for axes in panels}) == 1
    low, high = panels[0].get_ylim()
    assert all(low < y < high for axes in panels for line in axes.lines for y in line.get_ydata())


def test_whiskers_far_beyond_all_points_are_cut_and_a_speedups_axis_begins_at_nothing_at_least(tmp_path: Path) -> None:
    cases = [FakeCase("native", role="baseline"), *(FakeCase("oea", params={"k0": k}, speedup=k / 2) for k in (2, 4))]
    for noise in (0.01, 1.5):
        store = load(write_run(tmp_path / str(noise), [FakeComparison(cases=cases, num_iterations=1, noise=noise)]))
        (figure,) = lines("k0", "speedup_median").values()
        with house_style():
            drawing = draw(figure, store)
        low, high = drawing.figure.axes[0].get_ylim()
        values = [*drawing.rows["speedup_median"], 1.0]
        assert 0 <= low < min(values)
        assert max(values) < high < max(values) + 1.3 * max(0.5, np.ptp(values))
        is_cut = (drawing.rows["speedup_high"] > high).any() or (drawing.rows["speedup_low"] < low).any()
        assert is_cut == (noise > 1)
        assert any("some whiskers are cut by the axis" in line for line in drawing.words) == is_cut


def test_panels_over_different_quantities_keep_their_own_axes() -> None:
    """Decode's costs, which are small, would be a flat line beside prefill's."""
    figure = matplotlib.figure.Figure()
    for axes, xlabel, top in zip(figure.subplots(3), ["activated", "pairs", "activated"], [0.1, 2.0, 0.2], strict=True):
        axes.set(xlabel=xlabel, ylabel="cost", ylim=(0, top))
    _give_equal_limits(figure)
    assert [axes.get_ylim()[1] for axes in figure.axes] == [0.2, 2.0, 0.2]


def test_figures_of_a_config_are_drawn_by_default(good: Path, tmp_path: Path) -> None:
    run = shutil.copytree(good, tmp_path / "run")
    content = json.loads((run / "run.json").read_text())
    line = {"x": "k0", "y": "retained_mass", "by": "policy", "facet": None, "where": None}
    runs = {name: {**job, "config": [{"figures": [line]}, {}]} for name, job in content["runs"].items()}
    (run / "run.json").write_text(json.dumps({**content, "runs": runs}))
    assert set(figures_of(load(run))) - set(FIGURES) == {"retained_mass-over-k0-by-policy"}
    status, out = plotted(tmp_path, run, "--figures", "retained_mass-over-k0-by-policy")
    assert status == 0
    assert (out / "retained_mass-over-k0-by-policy.csv").is_file()


def test_where_chooses_rows_of_a_named_figure_beside_native(good: Path, tmp_path: Path) -> None:
    status, out = plotted(tmp_path, good, "--figures", "speedup,load", "--where", "policy == 'oea' and k0 == 4")
    assert status == 0
    assert set(pd.read_csv(out / "speedup.csv")["label"]) == {"oea k0=4"}
    assert set(pd.read_csv(out / "load.csv")["label"]) == {"native", "oea k0=4"}
    status, out = plotted(tmp_path, good, "--figures", "speedup", "--where", "capacity_factor > 1")
    assert pd.read_csv(out / "speedup.csv")["capacity_factor"].tolist() == [1.5]


def test_a_bare_figure_is_a_picture_alone_and_its_words_are_beside_it(good: Path, tmp_path: Path) -> None:
    out = tmp_path / "bare"
    asked = ["--figures", "speedup,pareto", "--format", "pdf,svg", "--out", str(out)]
    assert main(["plot", str(good), "--bare", *asked]) == 0
    assert {path.name for path in out.iterdir()} == {
        f"{name}.{kind}" for name in ("speedup", "pareto") for kind in ("pdf", "svg", "csv", "txt")
    }
    assert (out / "speedup.pdf").read_bytes().startswith(b"%PDF-")
    text = (out / "speedup.txt").read_text().splitlines()
    assert text[:2] == ["Speedup over native Megatron-Core.", "Tiny-MoE, EP 2, 4,096 tokens."]
    assert text[3].startswith("measured | NVIDIA Fake 80GB x 2 ranks, nccl | Tiny-MoE")
    with house_style():
        bare, dressed = (draw(FIGURES["speedup"], load(good), bare=bare) for bare in (True, False))
        settle(bare.figure)
    assert bare.figure.texts == []
    assert [axes.get_title("left") for axes in bare.figure.axes] == [""] * len(bare.figure.axes)
    assert len(bare.figure.legends) == 1
    assert bare.figure.get_figheight() < dressed.figure.get_figheight() - 0.8
    assert_nothing_is_clipped(bare.figure)
    pd.testing.assert_frame_equal(bare.rows, dressed.rows)


def test_panels_of_a_bare_figure_are_told_apart(tmp_path: Path) -> None:
    with house_style():
        figure = draw(FIGURES["speedup"], variants(tmp_path), bare=True).figure
    assert {axes.get_title("left") for axes in figure.axes} == {"Tiny 0", "Tiny 1", ""}


def test_all_panels_are_drawn_where_they_are_asked_for(tmp_path: Path) -> None:
    about = {"cases": [FakeCase("native", role="baseline"), FakeCase("topk")], "num_batches": 1, "num_iterations": 1}
    write_run(tmp_path / "run", [FakeComparison(f"c{n}", {"title": f"Tiny {n}"}, **about) for n in range(5)])
    few, whole = (
        (tmp_path / name, main(["plot", str(tmp_path / "run"), "--figures", "dropped", *more]))
        for name, more in (
            ("few", ["--out", str(tmp_path / "few")]),
            ("all", ["--all", "--out", str(tmp_path / "all")]),
        )
    )
    said = {
        path.name: "".join(re.findall(r"<!-- (.*?) -->", (path / "dropped.svg").read_text()))
        for path, _ in (few, whole)
    }
    assert [f"Tiny {n}" in said["few"] for n in range(5)] == [True, True, True, True, True]
    assert "of 5 panels 4 are drawn, without Tiny 2 (plot" in said["few"]
    assert "panels" not in said["all"]


def test_where_leaves_out_figures_whose_rows_lack_the_column(good: Path, tmp_path: Path) -> None:
    claims = REFERENCE / "whole-capacity-modelled"
    status, out = plotted(tmp_path / "one", claims, "--figures", "claims", "--where", "traffic == 'mixed'")
    assert status == 0
    assert set(pd.read_csv(out / "claims.csv")["traffic"]) == {"mixed"}
    where = ["--where", "speedup_median > 1.2"]
    status, out = plotted(tmp_path / "two", claims, "--figures", "claims,pareto", *where)
    assert [path.name for path in sorted(out.iterdir())] == ["pareto.csv", "pareto.svg"]
    assert plotted(tmp_path / "three", QUALITY[0], good, *where)[0] == 0
    assert not (tmp_path / "three" / "drawn" / "quality.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--where", "1"], "--where: expected columns and literals"),
        (["--where", "budget == 1 +"], "--where: expected columns and literals"),
        (["--where", "facts == null"], "--where: expected a column, one of "),
        (["--figures", "speedup", "--where", "polcy == 'oea'"], "--where: expected a column, one of "),
        (["--x", "k0", "--y", "retained_mass", "--where", "1"], "--where: expected columns and literals"),
        (["--x", "k0", "--y", "retained_mass", "--where", "step == null"], "--where: expected a column, one of "),
        (["--x", "facts", "--y", "retained_mass"], "--x: expected a column, one of "),
        (["--x", "k0", "--y", "facts"], "--y: expected a column, one of "),
        (["--x", "k0", "--y", "title"], "--y: expected a column of numbers; title has words"),
        (["--x", "k0", "--y", "retained_mass", "--by", "point"], "--by: expected a column, one of "),
        (["--x", "k0", "--y", "retained_mass", "--facet", "reason"], "--facet: expected a column, one of "),
    ],
)
def test_what_nobody_can_ask_for_is_one_line(
    arguments: list[str], line: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = plotted(tmp_path, good, *arguments)
    (said,) = capsys.readouterr().err.splitlines()
    assert (status, said.startswith(f"moe-ep-bench: {line}")) == (2, True), said
    assert not out.exists()


QUALITY = [REFERENCE / "quality-small-2cpu", REFERENCE / "quality-small-seed0"]


def test_two_directories_of_quality_stand_in_one_figure(tmp_path: Path) -> None:
    alone = {path: plotted(tmp_path / path.name, path)[1] for path in QUALITY}
    numbers = {path: pd.read_csv(out / "quality.csv") for path, out in alone.items()}
    status, out = plotted(tmp_path / "both", *QUALITY, "--figures", "quality")
    assert status == 0
    rows = pd.read_csv(out / "quality.csv")
    assert len(rows) == sum(map(len, numbers.values()))
    for path, own in numbers.items():
        of_one = rows[rows["title"].str.endswith(f", from {path.name}")].reset_index(drop=True)
        pd.testing.assert_frame_equal(of_one.drop(columns="title"), own.drop(columns="title"))


def test_columns_are_those_of_times_and_routing_whatever_else_is_beside(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--x", "k0", "--y", "retained_mass"]
    assert plotted(tmp_path / "one", QUALITY[0], *asked)[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "moe-ep-bench: retained_mass-over-k0: not drawn, the run has no rows for it"
    alone, both = (plotted(tmp_path / name, *of, good, *asked) for name, of in (("two", []), ("three", QUALITY[:1])))
    assert (alone[0], both[0]) == (0, 0)
    assert len({(out / "retained_mass-over-k0.csv").read_text() for _, out in (alone, both)}) == 1


# ---- all figures of all reference results --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "directory", [name if name == SMALL else pytest.param(name, marks=pytest.mark.slow) for name in DIRECTORIES]
)
def test_no_figure_of_a_reference_result_is_clipped_and_no_text_hides_another(directory: str) -> None:
    number = 0
    with house_style():
        for drawing in drawings(load([REFERENCE / directory], [])).values():
            settle(drawing.figure)
            assert_nothing_is_clipped(drawing.figure)
            assert any(axes.get_xlabel() for axes in drawing.figure.axes)
            number += 1
    assert number


# ---- scale ---------------------------------------------------------------------------------------------------------


@pytest.mark.scale
def test_128_ranks_and_50_cases_are_drawn_in_2_gb(tmp_path: Path) -> None:
    factors = np.linspace(0.5, 4, 47)
    drops = [FakeCase("token_drop", params={"capacity_factor": float(g)}, speedup=1 + 0.1 / g) for g in factors]
    many = FakeComparison(cases=[*standard_cases(), *drops], num_ranks=128, num_experts=128, num_batches=15)
    many.num_iterations = 1
    directory = write_run(tmp_path / "run", [many])
    subprocess.run([sys.executable, str(ROOT / "plot_results.py"), str(directory)], check=True, capture_output=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 2e9
