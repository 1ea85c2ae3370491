"""Figures are rows of one frame, drawn from runs that state the answer; one style at two sizes, nothing clipped."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Sheet
from results_builder import FakeCase, FakeComparison, assert_nothing_is_clipped, standard_cases, write_run
from whole_builder import WHOLE_CASES, write_whole

from moe_ep_bench.analysis.cases import Store, load, samples
from moe_ep_bench.analysis.drawing import Drawing, Figure, case_rows, draw
from moe_ep_bench.analysis.figures import FIGURES, on_front
from moe_ep_bench.analysis.marks import series
from moe_ep_bench.analysis.plot import figures_of
from moe_ep_bench.analysis.style import (
    POLICY_LOOKS,
    SIZES,
    house_style,
    looks_of,
    phase_look,
    settle,
)
from moe_ep_bench.analysis.sweeps import key_words, swept, value_words
from moe_ep_bench.analysis.timeline import critical_rank
from moe_ep_bench.policies import POLICIES
from moe_ep_bench.schema import LAYER_PHASES, TOTAL, UNACCOUNTED, phase_groups

GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
PEAK, LINKS = "workload.peak_load", "emulate.links"
LONG = "a name that goes on, with $\\frac$ and aLongWordThatHasNoPlaceToBreakAnywhereAtAllAndYetMustFitOnItsSheet"


def store_of(root: Path, *comparisons: FakeComparison, mode: str = "run") -> Store:
    return load(write_run(root, comparisons, mode))


def drawn(name: str, store: Store, size: str = "page", case: str | None = None) -> Drawing | None:
    with house_style(size):
        drawing = draw(figures_of(store, case)[name], store)
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
    label = f"token_drop capacity_factor={factor}"
    usual = {"params": {"capacity_factor": factor}, "label": label, "dropped": 0.3 / factor, "mass": 0.9}
    return FakeCase("token_drop", speedup=speedup, **{**usual, **changes})


def native(*, again: bool = True) -> list[FakeCase]:
    noise = [FakeCase("native", role="noise", label="native again")] if again else []
    return [FakeCase("native", role="baseline"), *noise]


def eplb(spare: int, speedup: float = 1.2) -> FakeCase:
    return FakeCase("eplb", "replication", {"spare_per_rank": spare}, f"EPLB, {spare} spare per rank", speedup=speedup)


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


def test_ways_to_balance_have_a_line_each_along_their_spare_slots(tmp_path: Path) -> None:
    ways = [(spare, more) for more in ("", ", least_pairs=64") for spare in (1, 2)]
    made = [
        FakeCase("ultra", "replication", {"spare_per_rank": spare}, f"UltraEP, {spare} spare per rank{more}")
        for spare, more in ways
    ]
    rows = case_rows(store_of(tmp_path, FakeComparison(cases=[*standard_cases(), *made], num_ranks=4)))
    replicas = rows[rows["role"] == "replication"].sort_values("label")
    assert dict(zip(replicas["label"], replicas["line"], strict=True)) == {
        case.label: f"UltraEP{more}" for case, (_, more) in zip(made, ways, strict=True)
    }


@pytest.fixture(scope="module")
def swept_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Peak loads out of order; token_drop pays where the peak load is above its capacity factor."""
    comparisons = []
    for number, peak in enumerate((4, 1, 2.5, 2, 3)):
        drops = [drop(g, 1 + 0.2 * (peak - g)) for g in (1.0, 2.0, 3.0)]
        ceiling = FakeCase("native_balanced", role="ceiling", label="native, balanced scores", speedup=1 + peak / 10)
        facts = {"point": {PEAK: peak}, "title": f"Tiny {number}"}
        sizes = {"num_batches": 2, "num_iterations": 1, "noise": 0.0}
        comparisons.append(FakeComparison(f"c{number}", facts, [*native(), *drops, eplb(1, 1.25), ceiling], **sizes))
    return store_of(tmp_path_factory.mktemp("swept"), *comparisons)


# ---- a figure is data ----------------------------------------------------------------------------------------------


def test_a_figure_is_added_by_one_row(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Figure(
        "Peaks", [series("at", "fullest_expert", names=True)], where="role == 'policy'", columns=["fullest_expert"]
    )
    monkeypatch.setitem(FIGURES, "peaks", row)
    drawing = drawn("peaks", store)
    assert drawing.rows["label"].tolist() == ["topk", "token_drop gamma 1", "lynx", "oea"]
    assert drawing.rows["fullest_expert"].notna().all()
    assert "Peaks" in words(drawing.figure)


def test_replication_stands_beside_policies(store: Store, swept_store: Store) -> None:
    for name, of in (("speedup", store), ("pareto", store), ("map", swept_store)):
        assert "replication" in set(drawn(name, of).rows["role"]), name
    assert "1 spare" in ticks(drawn("speedup", store).figure.axes[-1].xaxis)


def test_a_figure_without_rows_is_none(tmp_path: Path) -> None:
    bare = store_of(tmp_path, FakeComparison(cases=native(), kinds=("plain",), num_batches=2, num_iterations=1))
    assert [name for name in FIGURES if drawn(name, bare) is not None] == []


# ---- style ---------------------------------------------------------------------------------------------------------


def test_a_size_leaves_no_settings_behind_and_an_unknown_one_is_refused() -> None:
    before = dict(matplotlib.rcParams)
    with house_style("column"):
        pass
    assert dict(matplotlib.rcParams) == before
    with pytest.raises(ValueError, match=r"size: expected some of page, column; got 'poster'"):
        house_style("poster").__enter__()


def lightness(colour) -> float:
    """As a grey print shows it, 0 to 1 (Rec. 709)."""
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), to_rgb(colour), strict=True))


def test_a_policy_has_its_look_in_every_run_and_variants_are_lighter() -> None:
    alone = looks_of(["oea k0=2"])["oea k0=2"]
    beside = looks_of(["topk", "lynx num_dropped=2", "oea k0=2", "oea k0=3"])
    assert (alone["color"], alone["marker"]) == (beside["oea k0=2"]["color"], beside["oea k0=2"]["marker"])
    assert beside["oea k0=3"]["marker"] != alone["marker"]
    # A variant that comes first, or stands in a figure where others do not, takes no other's look.
    of_run = ["oea k0=3", "oea", "lynx num_dropped=2"]
    look = looks_of(of_run)["oea"]
    assert (look["color"], look["marker"]) == POLICY_LOOKS["oea"] == (alone["color"].upper(), alone["marker"])
    assert looks_of(["oea k0=3"], ["oea"])["oea"]["marker"] == alone["marker"]
    assert lightness(beside["oea k0=3"]["color"]) > lightness(alone["color"])
    assert set(POLICIES) <= set(POLICY_LOOKS)
    looks = [look for name, look in POLICY_LOOKS.items() if name != "native"]
    assert len(set(looks)) == len(looks)
    assert all(lightness(colour) > 0.2 for colour, _ in looks)


def test_neighbouring_phases_are_told_apart_in_grey() -> None:
    groups = {phase: group for group, phases in phase_groups("layer").items() for phase in phases}
    order = [groups.get(phase, phase) for phase in (*LAYER_PHASES, UNACCOUNTED)]
    neighbours = {frozenset(pair) for pair in itertools.pairwise(order) if len(set(pair)) == 2}
    assert len(neighbours) > 6
    for first, second in map(tuple, neighbours):
        looks = phase_look(first), phase_look(second)
        far = abs(lightness(looks[0]["facecolor"]) - lightness(looks[1]["facecolor"]))
        assert len({look.get("hatch") for look in looks}) == 2 or far > 0.15, (first, second)


RECORDED = {"workload": {"kind": "recorded", "description": "a trace", "tail_model": "geometric"}}


@pytest.mark.parametrize(
    ("mode", "facts", "how", "scores"),
    [
        ("run", {}, "MEASURED", "SYNTHETIC"),
        ("run", RECORDED, "MEASURED", "RECORDED"),
        ("emulated", {"links": "modelled by links/x"}, "EMULATED", "SYNTHETIC"),
        ("emulated", {"links": "modelled by links/x", "device": "modelled by devices/x"}, "MODELLED", "SYNTHETIC"),
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
    assert "Tiny-MoE, true sizes, bfloat16" in footer
    assert ("tail model: geometric" in footer) == (facts is RECORDED)


# ---- nothing clipped -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two families along peak loads over two links, named at length."""
    comparisons = []
    for number, (links, peak) in enumerate(itertools.product((1, 2), (1.0, 2.0))):
        cases = [*native(), drop(1.0, 1.2), drop(2.0, 0.9), FakeCase("oea", params={"k0": 1}, label=f"oea {LONG}")]
        cases += [drop(g, 1 + g / 9, params={"capacity_factor": g, "metric": LONG}, label=LONG) for g in (1.0, 2.0)]
        facts = {"point": {LINKS: f"{LONG} {links}", PEAK: peak}, "title": f"{LONG} {number}", "links": LONG}
        facts |= {"workload": {"kind": "recorded", "description": LONG, "tail_model": LONG}, "oversubscribed": True}
        comparisons.append(FakeComparison(f"c{number}", facts, cases, num_batches=2, num_iterations=1))
    return store_of(tmp_path_factory.mktemp("long"), *comparisons)


@pytest.mark.parametrize("size", ["page", "column"])
def test_long_names_are_not_clipped_and_hide_nothing(long_names: Store, size: str) -> None:
    for name in ("speedup", "timeline") if size != "page" else FIGURES:
        if (drawing := drawn(name, long_names, size)) is not None:
            assert drawing.figure.get_figwidth() <= SIZES[size][0]
            assert_nothing_is_clipped(drawing.figure)


# ---- lines, panels --------------------------------------------------------------------------------------------------


def test_policies_without_a_capacity_factor_stand_in_rows_by_their_names(tmp_path: Path) -> None:
    cases = [*native(), FakeCase("topk"), *(FakeCase("oea", params={"k0": k}, label=f"oea k0={k}") for k in (3, 5))]
    run = store_of(tmp_path, FakeComparison(cases=cases, num_batches=2, num_iterations=1, noise=0.0))
    left, right = drawn("speedup", run).figure.axes
    assert ticks(left.yaxis) == ["topk", "oea k0=3", "oea k0=5"]
    assert left.get_ylim() == right.get_ylim() == (2.5, -0.5)
    assert np.ptp(left.get_xlim()) > 0.099  # noise is not blown up to fill a panel


def test_names_along_an_axis_do_not_touch(tmp_path: Path) -> None:
    cases = [*native(), FakeCase("topk"), *(drop(1 + n / 4, 1.3) for n in range(8)), *map(eplb, (1, 2, 3))]
    runs = [
        write_run(tmp_path / "layer", [FakeComparison(cases=cases, num_batches=2, num_iterations=1)]),
        write_whole(tmp_path / "whole", WHOLE_CASES),
    ]
    for axes in drawn("speedup", load(runs)).figure.axes:
        level = [label.get_window_extent() for label in axes.get_xticklabels() if not label.get_rotation()]
        assert all(first.x1 + 4 < second.x0 for first, second in itertools.pairwise(level))


def test_a_facet_leaves_out_panels_for_which_it_has_no_rows(tmp_path: Path) -> None:
    layer = [*native(), FakeCase("topk"), drop(1.0, 1.3), drop(2.0, 1.1)]
    runs = [
        write_run(tmp_path / "layer", [FakeComparison(cases=layer, num_iterations=1)]),
        write_whole(tmp_path / "whole", WHOLE_CASES),
    ]
    for size, order in itertools.product(("page", "column"), (runs, runs[::-1])):
        panels = drawn("speedup", load(order), size).figure.axes
        ours = 0 if order is runs else 3
        of_layer, of_whole = panels[ours : ours + 2], [axes for axes in panels if axes not in panels[ours : ours + 2]]
        assert [axes.get_ylabel().split()[0] for axes in of_layer] == ["speedup", "dropped"]
        assert [axes.get_ylabel().split()[0] for axes in of_whole] == ["speedup", "MoE", "dropped"]
        assert [bool(axes.get_title("left")) for axes in (*of_layer, *of_whole)] == [True, False, True, False, False]
        assert [bool(axes.get_xlabel()) for axes in (*of_layer, *of_whole)] == [False, True, False, False, True]


def test_beside_capacity_factors_a_policy_without_one_stands_at_its_name_and_a_case_has_one_name(tmp_path) -> None:
    by_device = {"capacity_factor": 1.0, "granularity": "device"}
    device = drop(1.0, 2.0, params=by_device, label="token_drop capacity_factor=1.0 granularity=device")
    cases = [*native(), FakeCase("topk"), drop(1.0, 1.3), drop(2.0, 1.1), device]
    run = store_of(tmp_path, FakeComparison(cases=cases, num_iterations=1, noise=0.0))
    figure = drawn("dropped", run).figure
    assert ticks(figure.axes[-1].xaxis) == ["topk", "1", "2"]
    named = f"token_drop granularity=device, {GAMMA} 1"
    assert set(legend(figure)) == {"native", "topk", "token_drop", named}
    bars = [bar for bar in ticks(drawn("phases", run).figure.axes[0].yaxis) if bar.startswith("token_drop")]
    assert [bar.partition(f"{GAMMA} ")[0] + bar.partition(f"{GAMMA} ")[2][0] for bar in bars] == [
        *("token_drop, 1", "token_drop, 2", "token_drop granularity=device, 1"),
    ]
    assert legend(drawn("load", run).figure) == [f"token_drop, {GAMMA} 1", named, "native"]


def test_of_a_long_sweep_some_points_are_drawn_and_the_csv_has_all(swept_store: Store) -> None:
    for name in ("pareto", "load", "dropped"):
        drawing = drawn(name, swept_store)
        assert len(drawing.figure.axes) == 8
        assert drawing.rows["title"].nunique() == 5
        assert "of 5 comparisons 4 are drawn" in words(drawing.figure)


def test_loads_fall_from_each_cases_own_fullest(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    cases = [*native(), FakeCase("oea", params={"k0": 3}), FakeCase("lynx", params={"num_dropped": 8})]
    for case in cases:
        case.expert_load = generator.permutation(np.linspace(0, 2, 128))
    run = store_of(tmp_path, FakeComparison(cases=cases, num_ranks=1, num_experts=128, num_batches=2))
    (axes,) = drawn("load", run).figure.axes  # the load of one rank says nothing
    paths = [line.get_ydata() for line in axes.lines if len(line.get_ydata()) == 128 and line.get_marker() == "None"]
    assert len(paths) == 3
    assert all((np.diff(np.asarray(path, dtype=float)) <= 1e-9).all() for path in paths)
    assert set(legend(axes.figure)) == {"native", "oea", "lynx"}


# ---- costs ---------------------------------------------------------------------------------------------------------


def test_the_front_holds_exactly_the_points_that_no_other_beats() -> None:
    generator = np.random.default_rng(0)
    for number in range(60):
        points = generator.integers(0, 5, (number % 12 + 1, 2))
        beaten = [any((other >= point).all() and (other > point).any() for other in points) for point in points]
        assert on_front(points).tolist() == [not one for one in beaten]


def test_policies_on_the_front_and_points_within_the_noise_are_told(store: Store) -> None:
    drawing = drawn("pareto", store)
    on_front = drawing.rows.set_index("label")["on_front_of_retained_mass"]
    assert on_front[["token_drop gamma 1", "oea"]].all()  # fastest; slower and keeps more
    assert not on_front["lynx"]
    hollow = [line for line in drawing.figure.axes[0].lines if line.get_markerfacecolor() == "none"]
    places = [line.get_xdata()[0] for line in hollow if len(line.get_xdata())]
    assert places == [pytest.approx(100)]


def test_what_drops_everything_sets_no_scale_and_stands_in_the_note_with_its_numbers(tmp_path: Path) -> None:
    gone = FakeCase("lynx", params={"num_dropped": 8}, speedup=4, dropped=1.0, mass=0.0)
    kept = FakeCase("oea", params={"k0": 3}, speedup=1.2, dropped=0.5, mass=0.8)
    run = store_of(tmp_path, FakeComparison(cases=[*native(), gone, kept], num_iterations=1, noise=0.0))
    drawing = drawn("pareto", run)
    assert set(drawing.rows["label"]) == {"lynx", "oea"}
    for axes in drawing.figure.axes:
        assert axes.get_ylim()[1] < 1.3
    assert "off the scale: lynx, speedup 4.00 at 100% dropped" in words(drawing.figure)


# ---- timeline ------------------------------------------------------------------------------------------------------


def test_the_fastest_policy_that_costs_little_is_shown_and_a_choice_of_the_user_is_kept(store: Store) -> None:
    for label, asked in {"oea": None, "lynx": "lynx", "topk": "c0-2"}.items():
        assert set(drawn("timeline", store, case=asked).rows["label"]) == {"native", label}
    with pytest.raises(ValueError, match=r"case: expected .*native again, topk, .*lynx.*; got 'lnyx'"):
        drawn("timeline", store, case="lnyx")


def test_the_typical_iteration_is_shown_and_the_rank_that_waits_least_is_critical(store: Store) -> None:
    rows = drawn("timeline", store, case="oea").rows
    times = samples(store, case_rows(store).query("label == 'oea'"))
    slowest = times[(times["kind"] == "breakdown") & (times["phase"] == TOTAL)]
    slowest = slowest.groupby(["launch", "batch", "iteration"])["time_us"].max()
    key = (slowest - slowest.median()).abs().idxmin()
    shown = rows[rows["label"] == "oea"]
    assert set(map(tuple, shown[["launch", "batch", "iteration"]].to_numpy())) == {key}
    assert (shown["begin_us"] + shown["time_us"]).max() == pytest.approx(slowest[key])
    assert set(shown.loc[shown["is_critical"], "rank"]) == {0}  # the slow one, which never waits
    times_us = pd.DataFrame(0.0, index=range(3), columns=[*LAYER_PHASES, TOTAL])
    times_us[TOTAL] = [5.0, 7.0, 6.0]
    assert critical_rank(times_us) == 1
    times_us.loc[1, "wait_combine"] = 0.1
    assert critical_rank(times_us) == 2


def test_of_many_ranks_some_are_shown_and_the_critical_ones_among_them(tmp_path: Path) -> None:
    sizes = {"num_ranks": 48, "num_experts": 48, "num_batches": 2, "num_iterations": 1}
    run = store_of(tmp_path, FakeComparison(cases=[*native(again=False), drop(1.0, 1.5)], **sizes))
    drawing = drawn("timeline", run)
    lanes = drawing.rows["rank"].unique()
    assert 16 <= len(lanes) <= 18
    assert 0 in lanes
    assert f"{len(lanes)} of 48 ranks" in words(drawing.figure)


# ---- sweeps --------------------------------------------------------------------------------------------------------


def table_of(*points: dict, ranks: tuple[int, ...] = ()) -> pd.DataFrame:
    words = [json.dumps(point) for point in points]
    rows = pd.DataFrame({"directory": "run", "comparison_id": words, "point": words, "num_experts": 8})
    return rows.assign(num_ranks=ranks or 2)


def test_the_key_with_most_numbers_is_the_axis_and_the_others_stand_apart() -> None:
    points = itertools.product(("pcie5", "nvlink", "ib"), (2.0, 1.0))
    rows = swept(table_of(*({LINKS: links, PEAK: peak} for links, peak in points)))
    assert set(rows["swept_key"]) == {PEAK}
    assert sorted(rows["other_keys"].unique()) == ["links ib", "links nvlink", "links pcie5"]
    assert rows.groupby("other_keys")["swept_value"].agg(list).tolist() == [[1.0, 2.0]] * 3
    assert rows.groupby("other_keys")["at"].agg(list).tolist() == [[0, 1]] * 3
    words = swept(table_of(*({LINKS: links} for links in ("pcie5", "ib", "ib"))))
    assert words["swept_value"].tolist() == ["ib", "pcie5"]
    assert swept(table_of({LINKS: "ib"}, {LINKS: "ib"})).empty


def test_ep_size_is_shown_as_experts_per_rank_and_numbers_beside_words_as_words() -> None:
    size = "layer.ep_size"
    assert swept(table_of({size: 2}, {size: 4}, {size: 8}, ranks=(2, 4, 8)))["swept_value"].tolist() == [1.0, 2.0, 4.0]
    assert key_words(size) == "experts per rank"
    assert swept(table_of({PEAK: None}, {PEAK: 2.0}))["swept_value"].tolist() == ["2", "no skew"]
    spare = [{"emulate.replication": [{"spare_per_rank": spare, "policy": None}]} for spare in (2, 1)]
    assert swept(table_of(*spare))["swept_value"].tolist() == ["spare_per_rank=1", "spare_per_rank=2"]
    assert [value_words(value) for value in (True, [], 2.0)] == ["on", "none", "2"]


def cells(axes: Axes) -> dict[tuple[float, float], list[str]]:
    """What stands in each cell, by the cell's centre."""
    found: dict[tuple[float, float], list[str]] = {}
    for text in axes.texts:
        x, y = text.get_position()
        found.setdefault((x, min(axes.get_yticks(), key=lambda tick: abs(tick - y))), []).append(text.get_text())
    return found


def break_even(axes: Axes) -> set[tuple]:
    lines = [line for line in axes.lines if len(line.get_xydata()) and line.get_color() != "white"]
    return {tuple(map(tuple, line.get_xydata().tolist())) for line in lines}


def test_a_map_has_speedups_and_costs_in_its_cells_and_break_even_along_the_edges(swept_store: Store) -> None:
    (axes,) = drawn("map", swept_store).figure.axes
    texts = cells(axes)
    for column, peak in enumerate((1, 2, 2.5, 3, 4)):
        for row, factor in enumerate((1.0, 2.0, 3.0)):
            assert texts[column, row] == [f"{1 + 0.2 * (peak - factor):.2f}\n{30 / factor:.1f} %"]
    assert ticks(axes.yaxis) == ["1", "2", "3", "perfect balance", "EPLB, 1 spare per rank"]
    assert (ticks(axes.xaxis), axes.get_xlabel()) == (["1", "2", "2.5", "3", "4"], "peak load of the busiest expert")
    # Gamma 1 pays above a peak load of 1, gamma 2 above 2, gamma 3 at 4 alone.
    upright = {((x + 0.5, y - 0.5), (x + 0.5, y + 0.5)) for x, y in ((0, 0), (1, 1), (3, 2))}
    level = {((x - 0.5, y + 0.5), (x + 0.5, y + 0.5)) for x, y in ((1, 0), (2, 1), (3, 1))}
    assert break_even(axes) == upright | level


def test_a_failed_case_is_an_empty_cell_with_its_status_and_has_no_break_even_beside_it(tmp_path: Path) -> None:
    comparisons = []
    for n in range(2):
        cases = [*native(), drop(1.0, 1.5), drop(2.0, 0.9)]
        comparisons.append(FakeComparison(f"c{n}", {"point": {PEAK: 1.0 + n}}, cases, num_batches=2, num_iterations=1))
    comparisons[1].cases[2].status, comparisons[1].cases[2].reason = "oom", "too big"
    (axes,) = drawn("map", store_of(tmp_path, *comparisons)).figure.axes
    assert cells(axes)[1, 0] == ["oom"]
    assert break_even(axes) == {((-0.5, 0.5), (0.5, 0.5))}
