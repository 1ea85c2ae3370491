"""Figures of what policies do to answers: checkpoints put together."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from test_quality import Judged, judged, quality_of

from moe_ep_bench.analysis.quality_figures import capacity_figure, fronts_figure, is_on_front
from moe_ep_bench.analysis.style import Drawing, house_style
from moe_ep_bench.policies import make_policy


def test_a_front_keeps_what_no_other_case_beats_in_both() -> None:
    points = pd.DataFrame({"value": [3, 1, 2, 2, 4], "cross_entropy_added_nats": [0.1, 0.5, 0.5, 0.3, 0.2]})
    assert points[is_on_front(points)].index.tolist() == [0, 1, 3]


def gammas(*added: float) -> list[tuple[dict[str, Any], list[Judged]]]:
    """Token Drop at two capacity factors on several checkpoints: the lower costs ``added``, the higher half of it."""
    comparisons = []
    for number, more in enumerate(added):
        cases = [judged("native", {}, [0.0] * 12, num_pairs=100.0)]
        for gamma, costs in ((1.0, more), (2.0, more / 2)):
            policy = make_policy({"name": "token_drop", "capacity_factor": gamma})
            loads = {"num_pairs": 50 * gamma, "num_topk_pairs": 100.0, "rank_peak_load": 1.0 + number}
            case = judged("token_drop", policy.params(), [costs] * 12, **loads)
            cases.append({**case, "label": policy.label})
        facts = {"model": f"small-{number}", "title": f"small-{number} on words", "order": number}
        comparisons.append((facts, cases))
    return comparisons


def drawn(drawing: Drawing | None) -> Drawing:
    assert drawing is not None
    return drawing


def test_checkpoints_are_one_panel_of_their_means_with_students_t_over_them() -> None:
    half = 4.302653 * 0.1 / math.sqrt(3)
    quality = quality_of(*gammas(0.3, 0.4, 0.5))
    with house_style():
        drawings = [drawn(draw(quality)) for draw in (capacity_figure, fronts_figure)]
    for drawing in drawings:
        (axes,) = drawing.figure.axes
        assert "3 checkpoints on words" in axes.get_title("left")
        rows = drawing.rows.sort_values("value")
        assert rows["checkpoints"].tolist() == [3, 3]
        # Capacity factors; half the pairs on a fullest rank of 2 on average, and all of them.
        assert rows["value"].tolist() == [1.0, 2.0]
        assert rows["on_line"].tolist() == [True, True]
        assert rows["cross_entropy_added_nats"].tolist() == pytest.approx([0.4, 0.2])
        assert rows["half_width_nats"].tolist() == pytest.approx([half, half / 2])
    with house_style():
        alone = drawn(capacity_figure(quality_of(*gammas(0.3))))
    assert "small-0 on words" in alone.figure.axes[0].get_title("left")
    assert alone.rows["half_width_nats"].tolist() == pytest.approx([0, 0], abs=1e-12)


def test_what_one_checkpoint_has_not_answered_yet_is_left_out() -> None:
    first, (facts, cases) = gammas(0.3, 0.4)
    quality = quality_of(first, (facts, cases[:2]))
    with house_style():
        assert capacity_figure(quality) is None, "one capacity factor is no line"
        assert drawn(fronts_figure(quality)).rows["value"].tolist() == [0.75]
