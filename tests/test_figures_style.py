"""One style at three sizes, in grey as in colour, tagged with where its numbers come from, equal to the byte."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from results_builder import FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.load import Run, load_run
from moe_ep_bench.analysis.style import (
    MIN_POINTS,
    PHASE_LOOKS,
    SIZES,
    Sheet,
    house_style,
    looks_of,
    save,
    settle_layout,
)
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.policies import POLICIES
from moe_ep_bench.schema import LAYER_PHASES, UNACCOUNTED

RECORDED = {"workload": {"kind": "recorded", "description": "a trace", "tail_model": None}}


def run_of(root: Path, mode: str = "run", **changes) -> Run:
    usual = {"cases": standard_cases(), "num_batches": 3, "num_iterations": 1, "num_ranks": 4}
    return load_run(write_run(root, [FakeComparison(**{**usual, **changes})], mode=mode))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("style") / "run")


def sheet_of(name: str, run: Run) -> Sheet:
    drawing = FIGURES[name](run)
    figure = drawing.figure
    assert isinstance(figure, Sheet)
    return figure


def tick_labels(axis: Axis) -> list[Text]:
    """Those that are drawn: locators also make ticks beyond the ends of an axis."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    shown = [tick.label1 for tick in axis.get_major_ticks() if low - slack <= tick.get_loc() <= high + slack]
    return [label for label in shown if label.get_visible() and label.get_text()]


def texts_of(figure: Sheet) -> list[Text]:
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [*axes.texts, axes.title]
        for axis in (axes.xaxis, axes.yaxis):
            texts += [axis.label, *tick_labels(axis)]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def assert_texts_fit(figure: Sheet) -> None:
    """Every text of a figure that was laid out is large enough and on the sheet."""
    width, height = figure.get_size_inches()
    for text in texts_of(figure):
        assert text.get_fontsize() >= MIN_POINTS, text.get_text()
        box = text.get_window_extent()
        outside = max(-box.x0, -box.y0, box.x1 - width * figure.dpi, box.y1 - height * figure.dpi)
        assert outside < 0.02 * figure.dpi, text.get_text()


NAMES = ("timeline", "pareto", "latency", "phases", "speedup", "load", "dropped")


@pytest.mark.parametrize(
    ("name", "size"),
    # Pages with longer texts: test_analysis.test_nothing_is_clipped_and_no_text_hides_another.
    [*((name, "column") for name in NAMES), ("timeline", "page"), ("latency", "page"), ("pareto", "slide")],
)
def test_every_figure_fits_every_size(measured, name, size):
    with house_style(size):
        figure = sheet_of(name, measured)
        settle_layout(figure)
        figure.draw_without_rendering()
        assert figure.get_figwidth() <= SIZES[size][0]
        assert figure.dpi == SIZES[size][3]
        panels = [axes.get_position() for axes in figure.axes]
        assert all(panel.width > 0.2 for panel in panels) or size != "column"
        assert_texts_fit(figure)
        for axes in figure.axes if size == "page" else ():
            for axis, ends in ((axes.xaxis, ("x0", "x1")), (axes.yaxis, ("y0", "y1"))):
                boxes = [label.get_window_extent() for label in tick_labels(axis)]
                boxes.sort(key=lambda box, begin=ends[0]: getattr(box, begin))
                assert all(getattr(a, ends[1]) < getattr(b, ends[0]) + 0.02 * figure.dpi for a, b in pairwise(boxes))


def test_a_size_leaves_no_settings_behind_and_an_unknown_one_is_refused():
    before = dict(matplotlib.rcParams)
    with house_style("slide"):
        pass
    assert dict(matplotlib.rcParams) == before
    with pytest.raises(ValueError, match=r"size: expected one of page, column, slide; got 'poster'"):
        house_style("poster").__enter__()


def test_equal_rows_give_equal_bytes(measured, tmp_path, monkeypatch):
    for number in range(2):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(86400 * (number + 1)))  # what a date in a file would come from
        with house_style("column"):
            figure = sheet_of("load", measured)
            for file_format in ("svg", "pdf"):
                save(figure, tmp_path / f"{number}.{file_format}", file_format)
    for file_format in ("svg", "pdf"):
        assert (tmp_path / f"0.{file_format}").read_bytes() == (tmp_path / f"1.{file_format}").read_bytes()


# ---- a policy's look ------------------------------------------------------------------------------------------------


def test_a_policy_has_its_colour_and_marker_in_every_run():
    alone = looks_of({"oea k0=2": "oea"})["oea k0=2"]
    beside = looks_of({"topk": "topk", "lynx num_dropped=2": "lynx", "oea k0=2": "oea", "oea k0=3": "oea 3"})
    assert (alone.colour, alone.marker) == (beside["oea k0=2"].colour, beside["oea k0=2"].marker)
    variant = beside["oea k0=3"]
    assert variant.marker != alone.marker
    assert lightness(variant.colour) > lightness(alone.colour)


def test_policies_differ_in_look_and_none_is_black():
    looks = [policy.look for policy in POLICIES.values()]
    assert len(set(looks)) == len(looks)
    assert all(lightness(colour) > 0.2 for colour, _ in looks)


# ---- grey ----------------------------------------------------------------------------------------------------------


def lightness(colour: str) -> float:
    """As a grey print shows it, 0 to 1 (Rec. 709)."""
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), to_rgb(colour), strict=True))


def test_neighbouring_phases_are_told_apart_in_grey():
    phases = (*LAYER_PHASES, UNACCOUNTED)
    order = [next(group for group, own in GROUPS.items() if phase in own) for phase in phases]
    stacked = list(GROUPS)
    neighbours = {frozenset(pair) for pair in (*pairwise(order), *pairwise(stacked)) if len(set(pair)) == 2}
    assert len(neighbours) > 8
    for one, other in (tuple(pair) for pair in neighbours):
        looks = PHASE_LOOKS[one], PHASE_LOOKS[other]
        hatches = {look.get("hatch") for look in looks}
        far = abs(lightness(looks[0]["facecolor"]) - lightness(looks[1]["facecolor"]))
        assert len(hatches) == 2 or far > 0.15, (one, other)


# ---- origin --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "facts", "how", "scores"),
    [
        ("run", {}, "MEASURED", "SYNTHETIC"),
        ("run", RECORDED, "MEASURED", "RECORDED"),
        ("emulated", {"links": "modelled by links/x"}, "EMULATED", "SYNTHETIC"),
        ("emulated", {"links": "modelled by links/x", "device": "modelled by devices/x"}, "MODELLED", "SYNTHETIC"),
    ],
)
def test_origins_are_told_apart_by_words_and_frames(tmp_path, mode, facts, how, scores):
    run = run_of(tmp_path, mode, cases=standard_cases()[::4], facts=facts)
    with house_style():
        figure = sheet_of("speedup", run)
        settle_layout(figure)
    tags = {text.get_text(): text for text in figure.texts if text.get_bbox_patch() is not None}
    assert list(tags) == [how, scores]
    is_filled = {word: lightness(tag.get_bbox_patch().get_facecolor()[:3]) < 0.9 for word, tag in tags.items()}
    assert is_filled == {how: how == "MEASURED", scores: scores == "RECORDED"}
    spines = figure.axes[0].spines
    assert spines["top"].get_visible() == (how != "MEASURED")
    is_dashed = spines["left"].get_linestyle() not in ("-", "solid")
    assert is_dashed == (how == "MODELLED")


def test_phases_that_were_modelled_are_called_so_and_dashed(tmp_path):
    with house_style():
        figure = sheet_of("phases", run_of(tmp_path, "emulated", facts={"links": "modelled by links/x"}))
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name for name in named if name.endswith("(modelled)")] == ["comm (modelled)"]
    dashed = [bars[0].get_linestyle() not in ("-", "solid") for bars in figure.axes[0].containers]
    assert dashed == [name == "comm (modelled)" for name in named]
