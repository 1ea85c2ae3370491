"""Timeline, Pareto front, scaling and latency are drawn from rows that state the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from results_builder import FAST_RANK, FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.choice import Choice, IterationChoice, choose
from moe_ep_bench.analysis.figures.costs import front, memory_figure, pareto_figure
from moe_ep_bench.analysis.figures.ranks import (
    critical_rank,
    layer_by_rank_us,
    timeline_figure,
    typical_iteration,
    work_by_rank_us,
)
from moe_ep_bench.analysis.figures.scaling import scaling_figure, scalings
from moe_ep_bench.analysis.load import Run, load_run
from moe_ep_bench.analysis.speedups import ComparisonResult, analyse
from moe_ep_bench.analysis.style import Drawing, house_style
from moe_ep_bench.schema import LAYER_PHASES, TOTAL


def drawn(figure, run: Run, **choice) -> Drawing | None:
    with house_style():
        return figure(run, **choice)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four ranks, two iterations of ten batches; Token Drop gains most, and one policy loses."""
    cases = [
        *standard_cases(),
        FakeCase("lynx", params={"num_dropped": 2}, speedup=0.7, dropped=0.1, mass=0.95),
        FakeCase("oea", params={"k0": 2}, speedup=1.2, dropped=0.1, mass=0.95),
    ]
    comparison = FakeComparison(cases=cases, num_ranks=4, num_iterations=2)
    return load_run(write_run(tmp_path_factory.mktemp("figures") / "run", [comparison]))


@pytest.fixture(scope="module")
def comparisons(run: Run) -> list[ComparisonResult]:
    return analyse(run)


# ---- which case ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "label"),
    [(Choice(), "token_drop gamma 1"), (Choice(case="lynx"), "lynx"), (Choice(case="c0-5"), "lynx")],
)
def test_a_case_is_chosen_by_its_label_or_its_id_or_gains_most_beyond_the_noise(comparisons, choice, label):
    chosen = choose(comparisons, choice, lambda case: True)
    assert (chosen.native.case.role, chosen.policy.case.label) == ("baseline", label)


def test_without_a_gain_the_first_policy_is_shown_and_an_unknown_one_refused(comparisons):
    losing = [r for r in comparisons[0].results if r.verdict != "faster"]
    chosen = choose([replace(comparisons[0], results=tuple(losing))], Choice(), lambda case: True)
    assert chosen.policy.case.label == "topk"
    assert "none is faster" in chosen.why
    with pytest.raises(ValueError, match=r"case: expected .*native again, topk, .*lynx.*; got 'lnyx'"):
        choose(comparisons, Choice(case="lnyx"), lambda case: True)


# ---- timeline ------------------------------------------------------------------------------------------------------


def edited(run: Run, label: str, change) -> Run:
    """The run with the timings of one case changed by ``change(timings)``."""
    cases = [replace(case, timings=change(case.timings.copy())) if case.label == label else case for case in run.cases]
    return replace(run, cases=tuple(cases))


def case_of(run: Run, label: str):
    return next(case for case in run.cases if case.label == label)


def test_the_iteration_closest_to_the_median_is_shown(run):
    case = case_of(run, "native")
    rows = case.timings[(case.timings["kind"] == "breakdown") & (case.timings["phase"] == TOTAL)]
    slowest_us = rows.groupby(["launch", "batch", "iteration"])["time_us"].max()
    shown = typical_iteration(case, run.comparisons["c0"])
    assert shown.median_us == pytest.approx(slowest_us.median())
    assert shown.key == (slowest_us - slowest_us.median()).abs().idxmin()
    assert shown.layer_us == slowest_us[shown.key]


def test_the_planted_critical_rank_is_the_one_that_is_marked(run):
    def swap(timings: pd.DataFrame) -> pd.DataFrame:  # rank 2 becomes what rank 0 was: the one that never waits
        timings["rank"] = timings["rank"].replace({0: 2, 2: 0})
        return timings

    run = edited(run, "token_drop gamma 1", swap)
    drawing = drawn(timeline_figure, run)
    marked = drawing.rows[drawing.rows["is_critical"]].groupby("policy")["rank"].unique().map(list).to_dict()
    assert marked == {"native": [0], "token_drop gamma 1": [2]}
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in drawing.figure.axes]
    assert labels[0] == ["critical: rank 0", "rank 1", "rank 2", "rank 3"]
    assert labels[1] == ["rank 0", "rank 1", "critical: rank 2", "rank 3"]


def test_of_ranks_that_wait_equally_the_one_that_works_longest_is_critical():
    times_us = pd.DataFrame(0.0, index=range(3), columns=[*LAYER_PHASES, TOTAL])
    times_us[TOTAL] = [5.0, 7.0, 6.0]
    assert critical_rank(times_us) == 1
    times_us.loc[1, "wait_combine"] = 0.1
    assert critical_rank(times_us) == 2


def test_an_iteration_is_chosen_by_its_numbers_and_unknown_ones_are_refused(run):
    drawing = drawn(timeline_figure, run, choice=Choice(iteration=IterationChoice.parse("7/1")))
    policy = drawing.rows[drawing.rows["policy"] != "native"]
    assert policy[["launch", "batch", "iteration"]].drop_duplicates().to_numpy().tolist() == [[0, 7, 1]]
    with pytest.raises(ValueError, match=r"iteration: expected .*batch 0\.\.9.*got 0/99/0"):
        drawn(timeline_figure, run, choice=Choice(iteration=IterationChoice.parse("0/99/0")))


def test_of_many_ranks_some_are_shown_and_the_critical_ones_among_them(tmp_path):
    cases = [FakeCase("native", role="baseline"), FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=1.5)]
    comparison = FakeComparison(cases=cases, num_ranks=48, num_experts=48, num_batches=2, num_iterations=1)
    run = load_run(write_run(tmp_path, [comparison]))

    def blame(timings: pd.DataFrame) -> pd.DataFrame:
        timings["rank"] = timings["rank"].replace({0: 31, 31: 0})
        return timings

    run = edited(run, "token_drop gamma 1", blame)
    drawing = drawn(timeline_figure, run)
    shown = drawing.rows["rank"].unique()
    assert 16 <= len(shown) <= 18
    assert {0, 31} <= set(shown)
    texts = " ".join(text.get_text().replace("\n", " ") for text in drawing.figure.texts)
    assert f"{len(shown)} of 48 ranks" in texts


# ---- Pareto front --------------------------------------------------------------------------------------------------


def test_the_front_holds_exactly_the_points_that_no_other_beats():
    generator = np.random.default_rng(0)
    for number in range(60):
        points = [tuple(map(float, point)) for point in generator.integers(0, 5, (number % 12 + 1, 2))]

        def is_beaten(one, points=points):
            return any(a >= one[0] and b >= one[1] and (a, b) != one for a, b in points)

        kept = front(points)
        assert sorted(kept) == [place for place, one in enumerate(points) if not is_beaten(one)]
        assert [points[place][0] for place in kept] == sorted(points[place][0] for place in kept)


def test_policies_on_the_front_and_points_within_the_noise_are_told(run):
    drawing = drawn(pareto_figure, run)
    rows = drawing.rows.set_index("policy")
    on_front = rows["on_front_of_retained_mass"]
    assert on_front["token_drop gamma 1"]  # fastest
    assert on_front["oea"]  # slower than Token Drop, and keeps more
    assert not on_front["lynx"]  # keeps as much as oea, and is slower than native
    assert rows.loc["topk", "verdict"] == "no difference"
    hollow = [
        line
        for line in drawing.figure.axes[0].lines
        if line.get_markerfacecolor() == "none" and line.get_marker() not in ("None", "")
    ]
    assert [line.get_xdata()[0] for line in hollow] == [pytest.approx(100)]


# ---- scaling -------------------------------------------------------------------------------------------------------


def ladder(root: Path, points: list[tuple[int, int, float, dict]]) -> Run:
    """A comparison for each point: ranks, tokens, the policy's speedup, and facts."""
    sizes = {"num_experts": 16, "num_batches": 2, "num_iterations": 1, "noise": 0.0}
    comparisons = []
    for number, (ranks, tokens, speedup, facts) in enumerate(points):
        drop = FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=speedup, dropped=0.2, mass=0.8)
        cases = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again"), drop]
        comparisons.append(FakeComparison(f"c{number}", facts, cases, num_ranks=ranks, tokens=tokens, **sizes))
    return load_run(write_run(root, comparisons))


def test_a_line_connects_only_what_differs_in_nothing_else(tmp_path):
    points = [
        (2, 2048, 1.1, {}),
        (4, 4096, 1.2, {}),
        (8, 8192, 1.4, {}),
        (8, 4096, 1.3, {}),
        (16, 16384, 9.0, {"dtype": "float32"}),
    ]
    run = ladder(tmp_path, points)
    found = {(one.quantity, tuple(value for value, _ in one.points)) for one in scalings(run)}
    assert found == {
        ("EP size (ranks), tokens per rank held", (2.0, 4.0, 8.0)),
        ("EP size (ranks), tokens of all ranks held", (4.0, 8.0)),
        ("tokens per rank", (512.0, 1024.0)),
    }
    drawing = drawn(scaling_figure, run)
    rows = drawing.rows[(drawing.rows["quantity"].str.contains("per rank held")) & (drawing.rows["role"] == "policy")]
    np.testing.assert_allclose(rows["speedup"], [1.1, 1.2, 1.4], rtol=1e-6)
    np.testing.assert_allclose(rows["layer_time_us"], [2000 / 1.1, 2000 / 1.2, 2000 / 1.4], rtol=1e-6)


# ---- latency -------------------------------------------------------------------------------------------------------


def test_work_is_time_without_waiting(run):
    case = case_of(run, "native")
    work = work_by_rank_us(case)
    rows = case.timings[case.timings["kind"] == "breakdown"]
    for rank in range(4):
        slow = [
            part.loc[part["phase"] == TOTAL, "time_us"].item()
            - part.loc[part["phase"].str.startswith("wait_"), "time_us"].sum()
            for _, part in rows[rows["rank"] == rank].groupby(["batch", "iteration"])
        ]
        np.testing.assert_allclose(sorted(work.loc[rank]), sorted(slow))
    layer = layer_by_rank_us(case)
    assert layer.loc[1].median() == pytest.approx(FAST_RANK * layer.loc[0].median())


# ---- memory against score mass -------------------------------------------------------------------------------------


def replicas(spare: int, speedup: float, **params) -> FakeCase:
    how = " + LP" if params else ""
    params = {"spare_per_rank": spare, **params}
    return FakeCase("eplb", "replication", params, f"EPLB{how}, {spare} spare per rank", speedup=speedup)


def test_replicas_stand_over_their_slots_beside_policies_and_above_the_bound(tmp_path: Path) -> None:
    cases = [replicas(spare, 1 + spare / 10, **how) for how in ({}, {"balancer": "lp"}) for spare in (1, 2)]
    comparison = FakeComparison(cases=[*standard_cases(), *cases], num_iterations=1)
    drawing = drawn(memory_figure, load_run(write_run(tmp_path / "both", [comparison])))
    rows = drawing.rows[drawing.rows["role"] == "replication"]
    assert rows["spare_per_rank"].tolist() == [1, 2, 1, 2]
    # No expert of the fake load bears more than a rank's mean by half.
    assert rows["bound_of_fullest_rank"].tolist() == pytest.approx([1.0] * 4)
    assert drawing.rows.loc[drawing.rows["role"] != "replication", "bound_of_fullest_rank"].isna().all()
    speeds, loads = drawing.figure.axes[0], drawing.figure.axes[2]
    static, lp = (line.get_xydata() for line in speeds.lines[:2])
    assert static.tolist() == [[0, 1], *([n, s] for n, s in zip([1, 2], rows["speedup"], strict=False))]
    assert lp[:, 1].tolist() == [1, *rows["speedup"][2:]]
    assert speeds.get_ylim() == drawing.figure.axes[1].get_ylim() != loads.get_ylim()
    without = FakeComparison(cases=standard_cases(), num_iterations=1)
    assert drawn(memory_figure, load_run(write_run(tmp_path / "none", [without]))) is None
