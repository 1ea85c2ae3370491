"""Figures of what policies do to answers: checkpoints put together, and the papers' orderings at a glance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_figures_style import assert_texts_fit
from test_quality import judged, seeds

from moe_ep_bench.analysis.quality_figures import Point, capacity_figure, front, fronts_figure
from moe_ep_bench.analysis.quality_orderings import find_over_checkpoints
from moe_ep_bench.analysis.quality_orderings_figure import in_halves, orderings_figure
from moe_ep_bench.analysis.quality_report import JudgedComparison
from moe_ep_bench.analysis.style import Drawing, house_style, settle_layout
from moe_ep_bench.policies import make_policy


def test_a_front_keeps_what_no_other_case_beats_in_both() -> None:
    points = [Point(3, 0.1, None), Point(1, 0.5, None), Point(2, 0.5, None), Point(2, 0.3, None), Point(4, 0.2, None)]
    assert [(point.x, point.added) for point in front(points)] == [(1, 0.5), (2, 0.3), (3, 0.1)]


def gammas(*added: float) -> list[JudgedComparison]:
    """Token Drop at two capacity factors on several checkpoints: the lower costs ``added``, the higher half of it."""
    comparisons = []
    for number, more in enumerate(added):
        cases = []
        for gamma, costs in ((1.0, more), (2.0, more / 2)):
            params = make_policy({"name": "token_drop", "capacity_factor": gamma}).params()
            case = judged("token_drop", params, [costs] * 12)
            case.routing["num_pairs"], case.routing["rank_peak_load"] = 50 * gamma, 1.0 + number
            cases.append(case)
        native = judged("native", {}, [0.0] * 12)
        native.routing["num_pairs"] = 100
        facts = {"model": f"small-{number}", "title": f"small-{number} on words", "text": "words", "order": number}
        comparisons.append(JudgedComparison(facts, native, cases))
    return comparisons


def drawn(drawing: Drawing | None) -> Drawing:
    assert drawing is not None
    return drawing


def test_checkpoints_are_one_panel_of_their_means_with_students_t_over_them() -> None:
    half = 4.302653 * 0.1 / math.sqrt(3)
    with house_style():
        capacity, fronts = (drawn(draw(gammas(0.3, 0.4, 0.5))) for draw in (capacity_figure, fronts_figure))
    for drawing, values in ((capacity, [1.0, 2.0]), (fronts, [1.0, 2.0])):
        (axes,) = drawing.figure.axes
        assert "3 checkpoints on words" in axes.get_title("left")
        rows = drawing.rows.sort_values("value")
        assert rows["checkpoints"].tolist() == [3, 3]
        assert rows["value"].tolist() == values  # Half the pairs on a fullest rank of 2 on average, and all of them.
        assert rows["cross_entropy_added_nats"].tolist() == pytest.approx([0.4, 0.2])
        assert rows["half_width_nats"].tolist() == pytest.approx([half, half / 2])
        said = " ".join(" ".join(text.get_text().split()) for text in drawing.figure.texts)
        assert "Student's t over checkpoints" in said
        assert "over sequences" not in said
    with house_style():
        alone = drawn(capacity_figure(gammas(0.3)))
    assert "small-0 on words" in alone.figure.axes[0].get_title("left")
    said = " ".join(" ".join(text.get_text().split()) for text in alone.figure.texts)
    assert "Student's t over sequences." in said


def test_what_one_checkpoint_has_not_answered_yet_is_left_out() -> None:
    first, second = gammas(0.3, 0.4)
    begun = JudgedComparison(second.facts, second.native, second.cases[:1])
    with house_style():
        assert capacity_figure([first, begun]) is None, "one capacity factor is no line"
        assert drawn(fronts_figure([first, begun])).rows["value"].tolist() == [0.75]


def test_an_ordering_stands_at_its_difference_in_halves_of_its_interval() -> None:
    comparisons = seeds(0.10, 0.12, 0.14)
    ((overall, each),) = find_over_checkpoints(comparisons)
    with house_style():
        drawing = drawn(orderings_figure(comparisons))
    (axes,) = drawing.figure.axes
    places = [list(line.get_xdata()) for line in axes.lines]
    assert [overall.more / overall.half] in places
    assert pytest.approx([one.more / overall.half for one in each.values()]) in places
    assert axes.get_title("left") == "3 checkpoints on words"
    rows = drawing.rows
    assert set(rows["comparison"]) == {"3 checkpoints on words"}
    assert rows["checkpoint"].tolist() == ["all", "small-0", "small-1", "small-2"]
    assert rows["worse_costs_more"].tolist() == [overall.more, *(one.more for one in each.values())]
    assert set(rows["verdict"]) == {"holds"}
    with house_style():
        (alone,) = drawn(orderings_figure(comparisons[:1])).rows.itertuples()
    assert (alone.checkpoint, alone.half_width) == ("small-0", each["small-0"].half)
    assert orderings_figure(gammas(0.3)) is None


def test_what_never_varies_stands_at_an_end_and_what_never_differs_in_the_middle() -> None:
    for more, place in ((0.1, 100.0), (-0.1, -100.0)):
        ((overall, _),) = find_over_checkpoints(seeds(more, more))
        assert overall.half == pytest.approx(0, abs=1e-12)
        assert in_halves(overall) == place
        with house_style():
            assert np.isfinite(drawn(orderings_figure(seeds(more, more))).figure.axes[0].get_xlim()).all()
    ((overall, _),) = find_over_checkpoints(seeds(0.1))
    assert in_halves(overall) == 0.0  # One checkpoint says nothing of others.


@pytest.mark.parametrize("size", ["page", "column", "slide"])
def test_orderings_fit_every_size(size: str) -> None:
    with house_style(size):
        figure = drawn(orderings_figure(seeds(0.10, 0.12, -0.14))).figure
        settle_layout(figure)
        assert_texts_fit(figure)
