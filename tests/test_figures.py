"""Figures are rows of one frame, drawn from runs that state the answer; one style at two sizes, nothing clipped."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Sheet
from results_builder import (
    WHOLE_CASES,
    FakeCase,
    FakeComparison,
    assert_nothing_is_clipped,
    modelled_facts,
    samples,
    standard_cases,
    write_run,
    write_whole,
)

from moe_ep_bench.analysis import notes
from moe_ep_bench.analysis import tables as tables_module
from moe_ep_bench.analysis.cases import Store, cases, load
from moe_ep_bench.analysis.columns import milliseconds
from moe_ep_bench.analysis.drawing import Drawing, draw
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.lines import lines
from moe_ep_bench.analysis.plot import figures_of
from moe_ep_bench.analysis.style import (
    POLICY_LOOKS,
    folded,
    house_style,
    looks_of,
    settle,
)
from moe_ep_bench.policies import POLICIES

GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
PEAK, LINKS = "workload.peak_load", "emulate.links"
LONG = "a name that goes on, with $\\frac$ and aLongWordThatHasNoPlaceToBreakAnywhereAtAllAndYetMustFitOnItsSheet"
VALUE = "a value that goes on for longer than any"


def store_of(root: Path, *comparisons: FakeComparison, mode: str = "run") -> Store:
    return load(write_run(root, comparisons, mode))


def drawn(name: str, store: Store) -> Drawing | None:
    with house_style():
        drawing = draw(figures_of(store)[name], store)
        if drawing is not None:
            settle(drawing.figure)
    return drawing


def words(figure: Sheet) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def legend(figure: Sheet) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]


def ticks(axis) -> list[str]:
    return [label.get_text().replace("\n", " ") for label in axis.get_ticklabels()]


def drop(factor: float, speedup: float, **changes) -> FakeCase:
    usual = {"params": {"capacity_factor": factor}, "dropped": 0.3 / factor, "mass": 0.9}
    return FakeCase("token_drop", speedup=speedup, **{**usual, **changes})


def native() -> list[FakeCase]:
    return [FakeCase("native", role="baseline"), FakeCase("native", role="noise")]


def eplb(spare: int, speedup: float = 1.2) -> FakeCase:
    return FakeCase("eplb", "replication", {"spare_per_rank": spare}, speedup=speedup)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Four ranks; Token Drop gains most and drops most, oea gains within usual bounds, lynx loses, replicas gain."""
    cases = [
        *standard_cases(),
        FakeCase("lynx", params={"num_dropped": 2}, speedup=0.7, dropped=0.1, mass=0.95),
        FakeCase("oea", params={"k0": 2}, speedup=1.2, dropped=0.05, mass=0.97),
        eplb(1),
    ]
    return store_of(tmp_path_factory.mktemp("figures"), FakeComparison(cases=cases, num_ranks=4, num_iterations=2))


# ---- a figure is data ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_replication_stands_beside_policies(store: Store) -> None:
    for name in ("speedup", "pareto"):
        assert "replication" in set(drawn(name, store).rows["role"]), name
    assert "1 spare" in ticks(drawn("speedup", store).figure.axes[-1].xaxis)


def test_a_figure_without_rows_is_none(tmp_path: Path) -> None:
    bare = store_of(tmp_path, FakeComparison(cases=native(), kinds=("plain",), num_batches=2, num_iterations=1))
    assert [name for name in FIGURES if drawn(name, bare) is not None] == []


# ---- style ---------------------------------------------------------------------------------------------------------


def lightness(colour) -> float:
    """As a grey print shows it, 0 to 1 (Rec. 709)."""
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), to_rgb(colour), strict=True))


def test_a_policy_has_its_look_in_every_run_and_variants_are_lighter() -> None:
    alone = looks_of({"oea k0=2": "oea"})["oea k0=2"]
    lines = {"topk": "topk", "lynx num_dropped=2": "lynx", "oea k0=2": "oea", "oea k0=3": "oea"}
    beside = looks_of(lines)
    assert (alone["color"], alone["marker"]) == (beside["oea k0=2"]["color"], beside["oea k0=2"]["marker"])
    assert beside["oea k0=3"]["marker"] != alone["marker"]
    # A variant that comes first, or stands in a figure where others do not, takes no other's look.
    look = looks_of({"oea k0=3": "oea", "oea": "oea", "lynx num_dropped=2": "lynx"})["oea"]
    assert (look["color"], look["marker"]) == POLICY_LOOKS["oea"] == (alone["color"].upper(), alone["marker"])
    assert looks_of({"oea k0=3": "oea"}, {"oea": "oea"})["oea"]["marker"] == alone["marker"]
    assert lightness(beside["oea k0=3"]["color"]) > lightness(alone["color"])
    assert set(POLICIES) <= set(POLICY_LOOKS)
    colours = [colour for name, (colour, _) in POLICY_LOOKS.items() if name != "native"]
    assert len(set(colours)) == len(colours)
    assert all(lightness(colour) > 0.2 for colour in colours)


def test_policies_of_a_users_own_have_looks_that_no_other_has() -> None:
    own = {"mine_0 k=2": "mine_0", "mine_0 k=3": "mine_0"}
    names = ["topk", *(f"mine_{number}" for number in range(12)), "ours, mixed"]
    looks = looks_of(dict(zip(names, names, strict=True)) | own)
    pairs = {(look["color"], look["marker"]) for look in looks.values()}
    assert len(pairs) == len(names) + len(own)
    taken = {colour for colour, _ in POLICY_LOOKS.values()}
    assert taken.isdisjoint(look["color"] for name, look in looks.items() if name != "topk")
    colours = [looks[name]["color"] for name in ("mine_0", *own)]
    assert sorted(colours, key=lightness) == colours, "variants are lighter"
    assert looks_of(own)["mine_0 k=2"]["color"] == colours[0]


def test_a_users_policy_has_neither_colour_nor_marker_of_another_and_its_first_value_is_not_pale() -> None:
    run = {"token_drop": "token_drop", "mine alpha=0": "mine", "mine": "mine"}
    of_others = {part for look in POLICY_LOOKS.values() for part in look}
    for look in (looks_of(run)[name] for name in ("mine alpha=0", "mine")):
        assert not {look["color"], look["marker"]} & of_others
    along = {"token_drop capacity_factor=1.5": "token_drop", "mine alpha=0.25": "mine", "mine alpha=0.5": "mine"}
    names, full = list(along), looks_of(run)
    found = looks_of(run, along)
    for name in names[:2]:
        policy = full[along[name]]
        assert (found[name]["color"], found[name]["marker"]) == (policy["color"], policy["marker"]), "as the policy"
    assert lightness(found[names[2]]["color"]) > lightness(found[names[1]]["color"])
    beside = looks_of(run, {"mine": "mine", **along})
    assert len({(beside[name]["color"], beside[name]["marker"]) for name in ("mine", *names)}) == 4


def test_all_variants_of_a_users_policy_are_drawn(tmp_path: Path) -> None:
    own = [FakeCase("mine", params={"k": k, "capacity_factor": 1.0}, dropped=k / 10) for k in (1, 2, 3)]
    few = {"num_batches": 2, "num_iterations": 1}
    store = store_of(tmp_path, FakeComparison(cases=[*native(), *own, drop(1.0, 1.5)], **few))
    labels = [f"mine k={k} capacity_factor=1.0" for k in (1, 2, 3)]
    assert set(cases(store)["label"]) >= set(labels)
    for name in ("speedup", "load", "phases", "pareto"):
        drawing = drawn(name, store)
        assert set(labels) <= set(drawing.rows["label"]), name
        assert sum("mine" in text for text in [*legend(drawing.figure), *ticks(drawing.figure.axes[0].yaxis)]) >= 3, (
            name
        )


RECORDED = {"workload": {"kind": "recorded", "description": "a trace", "tail_model": "geometric"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "facts", "how", "scores"),
    [
        ("run", {}, "MEASURED", "SYNTHETIC"),
        ("run", RECORDED, "MEASURED", "RECORDED"),
        ("emulated", modelled_facts(None), "EMULATED", "SYNTHETIC"),
        ("emulated", modelled_facts(), "MODELLED", "SYNTHETIC"),
    ],
)
def test_origins_are_told_apart_by_words_tags_frames_and_phases(tmp_path, mode, facts, how, scores) -> None:
    sizes = {"num_batches": 3, "num_iterations": 1}
    run = store_of(tmp_path, FakeComparison(facts=facts, cases=standard_cases(), **sizes), mode=mode)
    figure = drawn("phases", run).figure
    tags = {text.get_text(): text.get_bbox_patch() for text in figure.texts if text.get_bbox_patch() is not None}
    assert set(tags) == {how, scores}
    is_filled = {word: lightness(box.get_facecolor()[:3]) < 0.9 for word, box in tags.items()}
    assert is_filled == {how: how == "MEASURED", scores: scores == "RECORDED"}
    spines = figure.axes[0].spines
    assert spines["top"].get_visible() == (how != "MEASURED")
    assert (spines["left"].get_linestyle() not in ("-", "solid")) == (how == "MODELLED")
    modelled = {name for name in legend(figure) if name.endswith("(modelled)")}
    assert {"MEASURED": 0, "EMULATED": 1}.get(how, len(legend(figure))) == len(modelled)
    footer = words(figure)
    assert "Tiny-MoE, true sizes, bfloat16 | random weights | " in footer
    assert ("tail model: geometric" in footer) == (facts is RECORDED)


# ---- nothing clipped -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two families along peak loads over two links, named at length."""
    comparisons = []
    for number, (links, peak) in enumerate(itertools.product((1, 2), (1.0, 2.0))):
        cases = [*native(), drop(1.0, 1.2), drop(2.0, 0.9), FakeCase("oea", params={"k0": VALUE})]
        cases += [drop(g, 1 + g / 9, params={"capacity_factor": g, "metric": VALUE}) for g in (1.0, 2.0)]
        facts = {"point": {LINKS: f"{LONG} {links}", PEAK: peak}, "title": f"{LONG} {number}"}
        facts |= modelled_facts(None) | {"links": {**modelled_facts()["links"], "name": LONG}}
        facts |= {"workload": {"kind": "recorded", "description": LONG, "tail_model": LONG}, "oversubscribed": True}
        comparisons.append(FakeComparison(f"c{number}", facts, cases, num_batches=2, num_iterations=1))
    return store_of(tmp_path_factory.mktemp("long"), *comparisons)


@pytest.mark.slow
def test_long_names_are_not_clipped_and_hide_nothing(long_names: Store) -> None:
    for name in FIGURES:
        if (drawing := drawn(name, long_names)) is not None:
            assert_nothing_is_clipped(drawing.figure)
            beside = [(axes, text) for axes in drawing.figure.axes for text in axes.texts]
            assert bool(beside) == (name in ("phases", "ranks"))
            assert all(text.get_window_extent().x1 <= axes.bbox.x1 for axes, text in beside)


def overlapping(axis) -> list[tuple[str, str]]:
    """Pairs of an axis's labels of which one lies upon the other."""
    boxes = [(label.get_text(), label.get_window_extent()) for label in axis.get_ticklabels() if label.get_text()]
    pairs = itertools.combinations(boxes, 2)
    return [(one, other) for (one, box), (other, beside) in pairs if box.overlaps(beside)]


@pytest.mark.slow
def test_long_names_of_policies_keep_their_parts_and_lie_upon_none(tmp_path: Path) -> None:
    names = ["my_very_long_policy_name_for_experts", "SharedExpertsByMyOwnWaterFillingRule", "oea"]
    own = [FakeCase(name, params={"budget": k}, mass=0.9, dropped=0.1) for name in names for k in (1, 2, 3)]
    few = {"num_batches": 2, "num_iterations": 1}
    for factors in ([], [drop(1.0, 1.5), drop(2.0, 1.2)]):
        store = store_of(tmp_path / str(len(factors)), FakeComparison(cases=[*native(), *own, *factors], **few))
        for name in ("speedup", "dropped", "phases"):
            figure = drawn(name, store).figure
            figure.draw_without_rendering()
            axes = figure.axes[-1] if factors and name != "phases" else figure.axes[0]
            axis = axes.xaxis if factors and name != "phases" else axes.yaxis
            assert overlapping(axis) == [], name
            labels = [label.get_text().split("\n") for label in axis.get_ticklabels()]
            lines = {line for lines in labels for line in lines}
            assert {"my_very_long_policy_name_for_", "my_very_long_policy_name_for_experts"} & lines, name
            assert any(line.startswith("SharedExpertsByMyOwnWaterFilling") for line in lines), name
            assert not any(re.search(r"(policy_na|FillingRu|Ru)$", line) for line in lines)
            assert_nothing_is_clipped(figure)


@pytest.mark.parametrize(
    ("words_", "folded_"),
    [
        ("my_long_policy_name k=2", "my_long_\npolicy_name\nk=2"),
        ("SharedExpertsRule k=2", "SharedExperts\nRule k=2"),
        (f"token_drop, {GAMMA} 1.5", f"token_drop,\n{GAMMA} 1.5"),
        ("drops some 102.1 % kept", "drops some\n102.1 % kept"),
        ("short", "short"),
    ],
)
def test_a_text_breaks_between_words_or_parts_of_a_name_and_never_before_its_unit(words_: str, folded_: str) -> None:
    assert folded(words_, 13 * 0.55 * 9 / 72 + 1e-6, 9) == folded_


# ---- axes, legends -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_panels_of_a_facet_show_a_case_at_one_place(tmp_path: Path) -> None:
    """Though some have no value in one of them: side by side a row is one policy, under one another a column."""
    few = {"num_batches": 2, "num_iterations": 1}
    oea = [FakeCase("oea", params={"k0": k}, dropped=0.1, rerouted=0.1 * (k == 3)) for k in (1, 2, 3)]
    for upright, more in ((True, []), (False, [drop(1.0, 1.5), drop(2.0, 1.2)])):
        comparison = FakeComparison(cases=[*native(), *oea, *more], **few)
        panels = drawn("speedup", store_of(tmp_path / str(upright), comparison)).figure.axes
        assert len(panels) == 3
        labels = ticks(panels[0].yaxis if upright else panels[-1].xaxis)
        assert labels == [*(f"oea k0={k}" for k in (1, 2, 3)), *([] if upright else ["1", "2"])]
        (point,) = [
            line for line in panels[2].lines if line.get_marker() not in ("None", None) and len(line.get_xdata())
        ]
        place = point.get_ydata() if upright else point.get_xdata()
        assert labels[round(float(place[0]))] == "oea k0=3"
        assert len({tuple(np.sort(axes.get_ylim() if upright else axes.get_xlim())) for axes in panels}) == 1


def test_legends_show_points_as_points_and_what_is_joined_as_lines(tmp_path: Path) -> None:
    cases = [
        *native(),
        FakeCase("topk"),
        drop(1.0, 1.5),
        drop(2.0, 1.2),
        replace(drop(1.0, 1.1), policy="expanded_drop"),
        eplb(1),
    ]
    figure = drawn("speedup", store_of(tmp_path, FakeComparison(cases=cases, num_iterations=1))).figure
    handles = dict(zip(legend(figure), figure.legends[0].legend_handles, strict=True))
    is_line = {
        name: handle.get_linestyle() != "None" for name, handle in handles.items() if hasattr(handle, "get_marker")
    }
    expected = {"topk": False, "token_drop": True, f"expanded_drop, {GAMMA} 1": False, "native": True}
    assert {name: is_line[name] for name in expected} == expected
    assert not is_line["EPLB, 1 spare per rank" if "EPLB, 1 spare per rank" in is_line else "EPLB"]


def test_a_reversed_axis_says_so(store: Store) -> None:
    panels = drawn("pareto", store).figure.axes
    reversed_ = [axes.get_xlim()[0] > axes.get_xlim()[1] for axes in panels]
    assert any(reversed_)
    assert reversed_ == [axes.get_xlabel().replace("\n", " ").endswith(", axis reversed") for axes in panels]


def test_ranks_have_whole_ticks_and_shares_none_below_zero(tmp_path: Path) -> None:
    lossless = [FakeCase("oea", params={"k0": k}, dropped=0.0) for k in (1, 2)]
    sizes = {"num_ranks": 16, "num_experts": 16, "num_batches": 2, "num_iterations": 1}
    store = store_of(tmp_path, FakeComparison(cases=[*native(), *lossless], **sizes))
    of_ranks = drawn("load", store).figure.axes[1]
    assert of_ranks.get_xlabel() == "ranks, the fullest first"
    assert [tick for tick in of_ranks.get_xticks() if tick != round(tick)] == []
    dropped = next(axes for axes in drawn("speedup", store).figure.axes if axes.get_xlabel() == "dropped (%)")
    low, high = dropped.get_xlim()
    assert -1 < low < 0 < 4 < high
    assert min(tick for tick in dropped.get_xticks() if low <= tick <= high) == 0


@pytest.mark.slow
def test_times_of_points_begin_where_points_do_and_of_bars_at_zero(store: Store, tmp_path: Path) -> None:
    def limits_of(figure) -> tuple[float, float]:
        with house_style():
            return draw(figure, store).figure.axes[0].get_ylim()

    (figure,) = lines("dropped_share", "median_ms").values()
    low, high = limits_of(figure)
    times = cases(store).query("status == 'ok' and dropped_share.notna() and role != 'noise'")["median_ms"]
    assert 0 < 0.5 * times.min() < low < times.min() < times.max() < high
    (figure,) = lines("dropped_share", "median_ms", where="label == 'native'").values()
    low, high = limits_of(figure)
    assert high - low == pytest.approx(0.1 * high, rel=0.1), "noise is not blown up"
    waits = [FakeCase("oea", params={"k0": k}, dropped=0.2 + k / 9, phase_factors={"experts": k}) for k in (0.1, 1.0)]
    (figure,) = lines("dropped_share", "experts_ms", where="policy == 'oea'").values()
    store_ = store_of(tmp_path, FakeComparison(cases=[*native(), *waits], num_ranks=4, num_iterations=1))
    with house_style():
        assert draw(figure, store_).figure.axes[0].get_ylim()[0] == 0, "which is near"
    for name in ("phases", "ranks"):
        assert drawn(name, store).figure.axes[0].get_xlim()[0] == 0


@pytest.mark.slow
def test_a_policy_has_one_colour_and_marker_in_every_figure_of_a_directory(tmp_path: Path) -> None:
    own = [
        FakeCase(f"mine_{n}", params={"capacity_factor": g}, mass=0.9, dropped=g / 20)
        for n in range(8)
        for g in (1.0, 2.0)
    ]
    few = {"num_batches": 2, "num_iterations": 1}
    store = store_of(tmp_path, FakeComparison(cases=[*native(), *own, drop(1.0, 1.5)], **few))
    (by_own,) = lines("capacity_factor", "retained_mass", where="policy in ('mine_6', 'mine_3')").values()
    looks: dict[str, set[tuple]] = {}
    with house_style():
        asked = [
            draw(figure, store, where) for figure, where in ((FIGURES["speedup"], "policy == 'mine_5'"), (by_own, None))
        ]
    for drawing in (*asked, *(drawn(name, store) for name in ("speedup", "dropped", "load", "pareto"))):
        for name, handle in zip(legend(drawing.figure), drawing.figure.legends[0].legend_handles, strict=True):
            if name.startswith("mine_"):
                looks.setdefault(name.split(",")[0], set()).add((to_rgb(handle.get_color()), handle.get_marker()))
    assert {len(found) for found in looks.values()} == {1}
    assert len({look for found in looks.values() for look in found}) == len(looks) == 8


# ---- lines, panels --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_facet_leaves_out_panels_for_which_it_has_no_rows(tmp_path: Path) -> None:
    layer = [*native(), FakeCase("topk"), drop(1.0, 1.3), drop(2.0, 1.1)]
    runs = [
        write_run(tmp_path / "layer", [FakeComparison(cases=layer, num_iterations=1)]),
        write_whole(tmp_path / "whole", WHOLE_CASES),
    ]
    for order in (runs, runs[::-1]):
        panels = drawn("speedup", load(order)).figure.axes
        ours = 0 if order is runs else 3
        of_layer, of_whole = panels[ours : ours + 2], [axes for axes in panels if axes not in panels[ours : ours + 2]]
        assert [axes.get_ylabel().split()[0] for axes in of_layer] == ["speedup", "dropped"]
        assert [axes.get_ylabel().split()[0] for axes in of_whole] == ["speedup", "MoE", "dropped"]
        assert [bool(axes.get_title("left")) for axes in (*of_layer, *of_whole)] == [True, False, True, False, False]
        assert [bool(axes.get_xlabel()) for axes in (*of_layer, *of_whole)] == [False, True, False, False, True]


def test_beside_capacity_factors_a_policy_without_one_stands_at_its_name_and_a_case_has_one_name(tmp_path) -> None:
    by_device = {"capacity_factor": 1.0, "granularity": "device"}
    device = drop(1.0, 2.0, params=by_device)
    cases = [*native(), FakeCase("topk"), drop(1.0, 1.3), drop(2.0, 1.1), device]
    run = store_of(tmp_path, FakeComparison(cases=cases, num_iterations=1, noise=0.0))
    figure, named = drawn("dropped", run).figure, f"token_drop granularity=device, {GAMMA} 1"
    assert ticks(figure.axes[-1].xaxis) == ["topk", "1", "2"]
    assert set(legend(figure)) == {"native", "topk", "token_drop", named}
    bars = [bar.partition("%")[0] for bar in ticks(drawn("phases", run).figure.axes[0].yaxis) if "token" in bar]
    assert [bar[: bar.index(GAMMA) + 3] for bar in bars] == [f"token_drop, {GAMMA} {g}" for g in (1, 2)] + [named]
    assert legend(drawn("load", run).figure) == [f"token_drop, {GAMMA} 1", named, "native"]


@pytest.mark.slow
def test_of_a_long_sweep_some_points_are_drawn_and_the_csv_has_all(tmp_path: Path) -> None:
    comparisons = [
        FakeComparison(f"c{n}", {"title": f"Tiny {n}"}, [*native(), drop(1.0, 1.5)], num_batches=1, num_iterations=1)
        for n in range(5)
    ]
    run = store_of(tmp_path, *comparisons)
    for name in ("pareto", "load", "dropped"):
        drawing = drawn(name, run)
        assert len(drawing.figure.axes) == 8
        assert drawing.rows["title"].nunique() == 5
        assert "of 5 panels 4 are drawn" in words(drawing.figure)
        titles = " ".join(axes.get_title(side) for axes in drawing.figure.axes for side in ("left", "center"))
        assert [n for n in range(5) if f"Tiny {n}" in titles] == [0, 1, 3, 4], "evenly spaced"


@pytest.mark.parametrize("factors", [False, True])
def test_the_first_load_is_the_tables_fullest_expert_and_rank(tmp_path: Path, factors: bool) -> None:
    """Whose fullest expert is another in each batch and layer: a mean by the expert's number would hide it."""
    drops = [drop(1.0, 1.2)] if factors else [FakeCase("oea", params={"k0": 2})]
    run = write_run(tmp_path, [FakeComparison(cases=[*native(), *drops], num_batches=8, num_iterations=1)])
    for path in run.glob("routing/*.parquet"):
        rows = pd.read_parquet(path)
        turned = [np.roll(load_E, batch) for load_E, batch in zip(rows["load_E"], rows["batch"], strict=True)]
        loads = {"load_E": turned, "load_R": [load_E.reshape(2, -1).sum(axis=1) for load_E in turned]}
        schema = pq.read_schema(path)
        pq.write_table(pa.Table.from_pandas(rows.assign(**loads), schema, preserve_index=False), path)
    store = load(run)
    drawing = drawn("load", store)
    first = drawing.rows.query("place == 1").pivot(index="label", columns="of", values="load_over_mean")
    table = cases(store).set_index("label").loc[first.index]
    assert first["expert"].tolist() == pytest.approx(table["fullest_expert"].tolist())
    assert first["rank"].tolist() == pytest.approx(table["fullest_rank"].tolist())
    assert ("of each policy the smallest capacity factor" in words(drawing.figure)) == factors


# ---- many lines ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load", "dropped"])
def test_no_policy_vanishes_while_another_has_two_lines(tmp_path: Path, name: str) -> None:
    many = [FakeCase("laser", params={"c": c}, dropped=c / 100) for c in range(6, 18)]
    few = [FakeCase(name, params={"k": 2}, dropped=0.2) for name in ("lynx", "oea", "xshare")]
    run = store_of(tmp_path, FakeComparison(cases=[*native(), *many, *few], num_batches=2, num_iterations=1))
    drawing = drawn(name, run)
    named = f"{legend(drawing.figure)} {ticks(drawing.figure.axes[0].yaxis)}"
    assert all(f"{policy} k=2" in named for policy in ("lynx", "oea", "xshare"))
    assert re.search(r"laser c=6\b", named)
    assert "laser c=17" not in named
    (left_out,) = re.findall(
        r"[56] of 1[56] lines are not drawn: (.*) \(plot --all draws them; the CSV", words(drawing.figure)
    )
    assert left_out.split("; ")[-2:] == ["laser c=16", "laser c=17"], "which they are is said"
    with house_style():
        whole = draw(FIGURES[name], run, limited=False)
    named = f"{legend(whole.figure)} {ticks(whole.figure.axes[0].yaxis)}"
    assert all(f"laser c={c}'" in named for c in range(6, 18))
    assert "not drawn" not in words(whole.figure)
    pd.testing.assert_frame_equal(whole.rows, drawing.rows)
    assert drawing.rows["label"].nunique() == 15 + (name != "dropped"), "native too, and the CSV has all"


def test_what_gains_most_is_drawn_whatever_is_left_out(tmp_path: Path) -> None:
    others = [FakeCase(f"mine{number}", params={"k": 2}, speedup=1.1) for number in range(10)]
    slow, fast = (FakeCase("mine0", params={"k": k}, speedup=speedup) for k, speedup in ((3, 0.9), (4, 1.5)))
    run = store_of(tmp_path, FakeComparison(cases=[*native(), *others, slow, fast], num_iterations=1))
    drawing = drawn("speedup", run)
    assert "mine0 k=4" not in words(drawing.figure).partition("not drawn")[2], "the fastest"
    assert "mine0 k=3" in words(drawing.figure).partition("not drawn")[2]


# ---- costs ---------------------------------------------------------------------------------------------------------


def test_points_within_the_noise_are_hollow_and_what_drops_everything_sets_no_scale(tmp_path: Path) -> None:
    gone = FakeCase("lynx", params={"num_dropped": 8}, speedup=4, dropped=1.0, mass=0.0)
    kept = FakeCase("oea", params={"k0": 3}, speedup=1.2, dropped=0.5, mass=0.8)
    drawing = drawn("pareto", store_of(tmp_path, FakeComparison(cases=[*native(), FakeCase("topk"), gone, kept])))
    assert set(drawing.rows["label"]) == {"topk", "oea k0=3"}
    hollow = [line for line in drawing.figure.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert [line.get_xdata()[0] for line in hollow if len(line.get_xdata())] == [pytest.approx(100)]


@pytest.mark.parametrize(("is_one", "batches"), [(True, 10), (False, 10), (True, 2)])
def test_an_interval_of_one_draw_says_so_where_no_title_does(tmp_path: Path, is_one: bool, batches: int) -> None:
    targets = {"peak_load": 2.0, **({} if is_one else {"pattern": "every second"})}
    for titled in (False, True):
        workload = {"kind": "synthetic", "description": "skewed", "tail_model": None, "targets": targets}
        facts = {"workload": {**workload, "is_one_draw": titled}}
        comparison = FakeComparison("c0", facts, [*native(), drop(1.0, 1.5)], num_batches=batches, num_iterations=1)
        store = store_of(tmp_path / str(titled), comparison)
        says = is_one and not titled and batches == 10
        for name in ("speedup", "pareto"):
            drawing = drawn(name, store)
            assert ("Whiskers: 95 % interval, one draw." in drawing.how) == says
            assert (notes.ONE_DRAW in words(drawing.figure)) == (notes.ONE_DRAW in " ".join(drawing.words)) == says
            assert drawing.rows["is_one_draw"].tolist() == [is_one]
        assert not any("Whiskers" in line for line in drawn("dropped", store).words)


def test_of_several_traffics_some_intervals_are_of_one_draw() -> None:
    said = notes.interval_words([True, True, False], [True, False, True])
    assert said.startswith("Whiskers: 95 % interval, some of one draw, or smallest and largest pair ")
    assert notes.interval_words([False], [True]).startswith("Whiskers: smallest and largest pair ")


# ---- ranks ---------------------------------------------------------------------------------------------------------


def test_each_rank_has_its_phases_under_native_and_the_fastest_policy(store: Store) -> None:
    drawing = drawn("ranks", store)
    assert set(drawing.rows["label"]) == {"native", "token_drop capacity_factor=1.0"}
    times = samples(store).query("kind == 'breakdown' and label == 'token_drop capacity_factor=1.0'")
    for phase, group in {"experts": "experts", "wait_combine": "waiting"}.items():
        expected_ms = times[times["phase"] == phase].groupby("rank")["time_us"].median() / 1e3
        found = drawing.rows.query(f"role == 'policy' and phases == {group!r}").set_index("rank")["time_ms"]
        assert found.to_dict() == pytest.approx(expected_ms.to_dict())
    bars = ticks(drawing.figure.axes[0].yaxis)
    assert bars == [f"{name}, rank {rank}" for name in ("native", f"token_drop, {GAMMA} 1") for rank in range(4)]
    axes, ends = drawing.figure.axes[0], {}
    for piece in axes.patches:
        ends[piece.get_y()] = max(ends.get(piece.get_y(), 0), piece.get_x() + piece.get_width())
    assert sorted(text.xy[0] for text in axes.texts) == pytest.approx(sorted(ends.values()))
    assert {text.get_text() for text in axes.texts} == {milliseconds(end) for end in ends.values()}
    assert "25.0 % dropped, 80.0 % kept" in drawing.figure.axes[0].get_title("left").replace("\n", " ")


@pytest.mark.slow
def test_ranks_are_shown_under_what_advise_picked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases_ = [*native(), drop(1.0, 1.5), FakeCase("oea", params={"k0": 2}, speedup=1.1, dropped=0.0), eplb(1)]
    run = tmp_path / "run"
    write_run(run, [FakeComparison(cases=cases_, num_ranks=4, num_batches=2, num_iterations=1)])
    for label, of_variant in (("oea k0=2", False), ("EPLB, 1 spare per rank", True)):
        (case_id,) = cases(load(run)).query("label == @label")["case_id"]
        pick = SimpleNamespace(pick=SimpleNamespace(case_id=case_id), variants=())
        answer = SimpleNamespace(pick=None, variants=(pick,)) if of_variant else pick
        advised = [SimpleNamespace(answers=[answer])]
        monkeypatch.setattr(tables_module, "read_advices", lambda *_, advised=advised: advised)
        assert set(drawn("ranks", load(run)).rows["label"]) == {"native", label}
        (table,) = tables_module.tables(load(run), ["ranks"])
        assert {row["label"] for row in table.rows} == {"native", label}
    answer.variants = ()
    assert set(drawn("ranks", load(run)).rows["label"]) == {"native", "token_drop capacity_factor=1.0"}


def test_waits_of_ranks_are_less_what_their_probes_cost(tmp_path: Path) -> None:
    facts = {"oversubscribed": True, "permute": {"requested": "auto", "ran": "indexed"}}
    about = {"num_batches": 2, "num_iterations": 1, "noise": 0.0, "conditions": {"rank": {"probe_floor_us": 50.0}}}
    about |= {"probe_overhead": 0.05, "facts": facts}
    run = store_of(tmp_path, FakeComparison(cases=[*native(), drop(1.0, 1.5)], **about))
    waits = samples(run).query("kind == 'breakdown' and phase == 'wait_combine' and label == 'native' and rank == 1")
    rows = drawn("ranks", run).rows.query("label == 'native' and phases == 'waiting'").set_index("rank")
    assert rows["time_ms"].to_dict() == pytest.approx({0: 0.0, 1: (waits["time_us"].iloc[0] - 50) / 1e3})
    said = words(drawn("phases", run).figure)
    for warning in ("probes cost up to 5.0 %", "they share time slices", "permutation is not fused"):
        assert warning in said


def test_of_many_ranks_those_that_work_longest_under_native_are_shown(tmp_path: Path) -> None:
    sizes = {"num_ranks": 48, "num_experts": 48, "num_batches": 2, "num_iterations": 1}
    waiting = FakeCase("native", role="baseline", phase_factors={"wait_combine": 2.0})  # all but rank 0 wait
    run = store_of(tmp_path, FakeComparison(cases=[waiting, drop(1.0, 1.5)], **sizes))
    drawing = drawn("ranks", run)
    assert 0 in set(drawing.rows["rank"])  # the others work less
    assert drawing.rows["rank"].nunique() == 12
    assert "of 48 ranks the 12 are drawn" in words(drawing.figure)
