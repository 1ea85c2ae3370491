"""Sheets of many comparisons and policies: who stands where, under which name, and what is left to the CSV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from results_builder import FakeCase, FakeComparison, write_run

from moe_ep_bench.analysis.figures.costs import pareto_figure
from moe_ep_bench.analysis.figures.panels import MOST, case_rows, drawn_part
from moe_ep_bench.analysis.figures.policies import dropped_figure, load_figure, phases_figure, speedup_figure
from moe_ep_bench.analysis.figures.ranks import latency_figure
from moe_ep_bench.analysis.figures.scaling import scalings
from moe_ep_bench.analysis.load import Run, load_run
from moe_ep_bench.analysis.style import Drawing, house_style
from moe_ep_bench.workload.formatting import tokens_words

GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
PEAK = "workload.peak_load"


def decode_cases() -> list[FakeCase]:
    """Variants that have no capacity factor; lynx drops everything."""
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("topk"),
        FakeCase("lynx", params={"num_dropped": 8}, label="lynx num_dropped=8", speedup=4, dropped=1.0, mass=0.0),
        FakeCase("oea", params={"k0": 3}, label="oea k0=3", speedup=1.2, dropped=0.5, mass=0.8),
        FakeCase("oea", params={"k0": 5}, label="oea k0=5", speedup=1.1, dropped=0.2, mass=0.9),
    ]


def drop_cases() -> list[FakeCase]:
    by_device = {"capacity_factor": 1.0, "granularity": "device"}
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("topk"),
        FakeCase("token_drop", params={"capacity_factor": 1.0}, label="token_drop capacity_factor=1.0", speedup=1.3),
        FakeCase("token_drop", params={"capacity_factor": 2.0}, label="token_drop capacity_factor=2.0", speedup=1.1),
        FakeCase("token_drop", params=by_device, label="token_drop capacity_factor=1.0 granularity=device", speedup=2),
    ]


def drawn(figure, run: Run) -> Drawing:
    with house_style():
        drawing = figure(run)
    return drawing


def one(cases: list[FakeCase], number: int = 0, **changes) -> FakeComparison:
    usual = {"num_batches": 2, "num_iterations": 1, "noise": 0.0}
    return FakeComparison(f"c{number}", cases=cases, **{**usual, **changes})


def run_of(root: Path, *comparisons: FakeComparison) -> Run:
    return load_run(write_run(root, comparisons))


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("decode"), one(decode_cases()))


@pytest.fixture(scope="module")
def drops(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("drops"), one(drop_cases(), num_batches=10))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Seven peak loads."""
    return run_of(tmp_path_factory.mktemp("swept"), *sweep(7))


def ticks(axis) -> list[str]:
    return [label.get_text().replace("\n", " ") for label in axis.get_ticklabels()]


def legend(drawing: Drawing) -> list[str]:
    return [text.get_text() for text in drawing.figure.legends[0].get_texts()]


def words(drawing: Drawing) -> str:
    return " ".join(text.get_text() for text in drawing.figure.texts).replace("\n", " ")


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", [speedup_figure, dropped_figure])
def test_policies_without_a_capacity_factor_stand_in_rows_by_their_names(decode, figure):
    drawing = drawn(figure, decode)
    left, right = drawing.figure.axes
    assert ticks(left.yaxis) == ["topk", "lynx num_dropped=8", "oea k0=3", "oea k0=5"]
    assert left.get_ylim() == right.get_ylim() == (3.5, -0.5)
    dropped = next(axes for axes in (left, right) if "dropped" in axes.get_xlabel())
    places = {line.get_ydata()[0]: line.get_xdata()[0] for line in dropped.lines if line.get_marker() != "None"}
    assert places == pytest.approx({0: 0, 1: 100, 2: 50, 3: 20}, abs=0.5)


def test_beside_capacity_factors_a_policy_without_one_stands_at_its_name(drops):
    drawing = drawn(dropped_figure, drops)
    assert ticks(drawing.figure.axes[-1].xaxis) == ["topk", "1", "2"]
    assert legend(drawing) == ["topk", "token_drop", f"token_drop granularity=device, {GAMMA} 1"]


def test_a_case_has_one_name_in_all_figures(drops):
    """Families by the parameters that their labels name; a case by its capacity factor too."""
    device = f"token_drop granularity=device, {GAMMA} 1"
    bars = ticks(drawn(phases_figure, drops).figure.axes[0].yaxis)
    named = [label.split(" 0.0 % dropped")[0] for label in bars]
    expected = ["topk", f"token_drop, {GAMMA} 1", f"token_drop, {GAMMA} 2", device]
    assert named == ["native", "native again", *expected]
    assert legend(drawn(load_figure, drops)) == ["native (before)", expected[1], device]
    latency = drawn(latency_figure, drops)
    assert words(latency).startswith(f"Latency on every rank: native and {device}")
    assert legend(latency) == ["native", device]


# ---- panels --------------------------------------------------------------------------------------------------------


def sweep(number: int) -> list[FakeComparison]:
    cases = [*drop_cases()[:1], *drop_cases()[-3:]]
    facts = [{"point": {PEAK: 1.0 + n}, "title": f"Tiny, peak load {1 + n}"} for n in range(number)]
    return [one(cases, n, facts=facts[n], kinds=("plain",)) for n in range(number)]


def test_of_a_long_sweep_points_from_the_first_to_the_last_are_drawn(swept, tmp_path):
    rows, notes = drawn_part(swept, case_rows(swept))
    assert [swept.comparisons[one].point[PEAK] for one in rows["comparison_id"].unique()] == [1, 3, 5, 7]
    assert notes == ["of 7 values of peak load of the busiest expert 4 are drawn; the CSV has all."]
    few = drop_cases()[:1]
    for number, comparisons in ((MOST, sweep(MOST)), (6, [one(few, n) for n in range(6)])):
        run = run_of(tmp_path / str(number), *(replace(each, cases=few) for each in comparisons))
        rows, notes = drawn_part(run, case_rows(run))
        assert (rows["comparison_id"].nunique(), notes) == (number, [])


@pytest.mark.parametrize("figure", [pareto_figure, load_figure, dropped_figure])
def test_a_sheet_of_a_sweep_is_one_page_and_its_csv_has_every_point(swept, figure):
    drawing = drawn(figure, swept)
    width, height = drawing.figure.get_size_inches()
    assert height < 0.75 * width
    assert len(drawing.figure.axes) == 2 * MOST
    assert drawing.rows["comparison"].nunique() == 7
    assert "of 7 values of peak load of the busiest expert 4 are drawn" in words(drawing)


# ---- loads ---------------------------------------------------------------------------------------------------------


def test_loads_of_many_experts_fall_from_each_cases_own_fullest(tmp_path):
    generator = np.random.default_rng(0)
    cases = decode_cases()
    for case in cases:
        case.expert_load = generator.permutation(np.linspace(0, 2, 128))
    drawing = drawn(load_figure, run_of(tmp_path, one(cases, num_ranks=1, num_experts=128)))
    (axes,) = drawing.figure.axes  # the load of one rank says nothing
    assert axes.get_xlabel() == "experts, the fullest first"
    lines = [patch.get_data().values for patch in axes.patches if hasattr(patch, "get_data")]
    assert len(lines) == 4
    assert all((np.diff(line) <= 1e-9).all() for line in lines)


def test_policies_for_which_a_load_sheet_has_no_room_are_named(tmp_path):
    cases = [FakeCase("native", role="baseline")]
    cases += [FakeCase("oea", params={"k0": k0}, label=f"oea k0={k0}") for k0 in range(1, 9)]
    drawing = drawn(load_figure, run_of(tmp_path, one(cases)))
    assert len(legend(drawing)) == 1 + 6
    assert "not drawn, but in the CSV: oea k0=7, oea k0=8." in words(drawing)
    assert drawing.rows["policy"].nunique() == 9


# ---- Pareto front --------------------------------------------------------------------------------------------------


def test_what_drops_everything_stands_at_the_edge_with_its_numbers_and_sets_no_scale(decode):
    drawing = drawn(pareto_figure, decode)
    for axes, text in zip(drawing.figure.axes, ("speedup 4.00\nat 0 %", "speedup 4.00\nat 100 %"), strict=True):
        assert axes.get_ylim()[1] < 1.3
        assert [label.get_text() for label in axes.texts] == [text]
        at_edge = [line for line in axes.lines if not line.get_clip_on()]
        assert [line.get_xdata()[0] for line in at_edge] == [axes.get_xlim()[1]]
        assert axes.get_ylim()[0] < at_edge[0].get_ydata()[0] < axes.get_ylim()[1]
    rows = drawing.rows.set_index("policy")
    assert rows.loc["lynx num_dropped=8", "speedup"] == pytest.approx(4)


# ---- scaling and titles --------------------------------------------------------------------------------------------


def test_steps_of_one_token_and_of_several_are_on_one_line(tmp_path):
    titles = {
        n: f"Tiny-MoE, EP 1, {words}, unskewed" for n, words in ((1, "1 token"), (4, "4 tokens"), (16, "1 tokens"))
    }
    comparisons = [
        one(decode_cases()[:1], n, num_ranks=1, tokens=n, facts={"title": title}) for n, title in titles.items()
    ]
    assert [tokens_words(n) for n in (1, 4)] == ["1 token", "4 tokens"]
    (found,) = scalings(run_of(tmp_path, *comparisons))
    assert (found.held, [value for value, _ in found.points]) == ("Tiny-MoE, unskewed, EP 1", [1, 4, 16])
