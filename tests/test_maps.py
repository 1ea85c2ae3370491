"""A sweep from the config to its map: where comparisons stand, and where a policy stops paying."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_builder import FakeCase, FakeComparison, assert_nothing_is_clipped, write_run

import plot_results
from moe_ep_bench.analysis.figures.maps import map_figure, sweep_figure
from moe_ep_bench.analysis.load import Comparison as Facts
from moe_ep_bench.analysis.load import Run, load_run
from moe_ep_bench.analysis.speedups import ComparisonResult, analyse
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.sweep import in_order, key_words, sweeps_along, swept_keys, value_of, value_words
from moe_ep_bench.analysis.tables import run_text
from moe_ep_bench.bench.description import describe_experiment, describe_point
from moe_ep_bench.bench.plan import RANKS, Comparison
from moe_ep_bench.config import load_experiments

PEAK, LINKS, EP_SIZE = "workload.peak_load", "emulate.links", "layer.ep_size"
LINKS_WORDS = "modelled by links/h100-nvlink4: 10.6 us (assumed) + bytes at 450 GB/s x 0.82 (published)"
DEVICE_WORDS = "modelled by devices/h100-sxm: roofline of 989.4 bf16 TFLOP/s"


# ---- from the config to run.json -----------------------------------------------------------------------------------


def write_config(folder: Path, **sections: object) -> Path:
    config = {
        "name": "x",
        "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
        "workload": {"kind": "synthetic", "num_tokens": 256, "num_batches": 1, "peak_load": 2.0},
        "policies": [{"name": "topk"}],
        **sections,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def test_an_experiment_knows_where_in_the_sweep_it_stands(tmp_path: Path) -> None:
    path = write_config(tmp_path, sweep={PEAK: [2.0, 3.0], EP_SIZE: [1, 2]})
    points = [experiment.point for experiment in load_experiments(path, on_cpu=True)]
    assert points == [((PEAK, peak), (EP_SIZE, size)) for peak in (2.0, 3.0) for size in (1, 2)]
    alone = load_experiments(path, [f"{PEAK}=3", f"{EP_SIZE}=2"], on_cpu=True)
    assert [experiment.point for experiment in alone] == [()]


def test_the_point_is_described_without_folders_and_changes_no_id(tmp_path: Path) -> None:
    swept = load_experiments(write_config(tmp_path, sweep={PEAK: [2.0, 3.0]}), on_cpu=True)[0]
    (alone,) = load_experiments(write_config(tmp_path), on_cpu=True)
    one, other = (Comparison.of(experiment, RANKS, 1, on_cpu=True) for experiment in (swept, alone))
    assert [case.case_id for case in one.cases] == [case.case_id for case in other.cases]
    assert describe_experiment(swept) == describe_experiment(alone)
    (tmp_path / "mine.yaml").write_text("")
    path = write_config(tmp_path, sweep={LINKS: ["h100-nvlink4", "mine.yaml"], EP_SIZE: [None]})
    described = [describe_point(experiment) for experiment in load_experiments(path, on_cpu=True)]
    assert described == [{LINKS: "h100-nvlink4", EP_SIZE: None}, {LINKS: "mine.yaml", EP_SIZE: None}]


@pytest.mark.parametrize("name", ["skew", "experts-per-rank", "links"])
def test_shipped_sweeps_are_of_one_key_and_on_a_modelled_device(name: str) -> None:
    root = Path(plot_results.__file__).parent
    experiments = load_experiments(root / "configs" / f"whatif-{name}.yaml", on_cpu=False)
    assert len(experiments) >= 5
    for experiment in experiments:
        ((key, _),) = experiment.point
        assert experiment.emulate.device == "h100-sxm"
        assert experiment.workload.num_batches >= 10, "an interval needs as many"
        assert len(experiment.make_policies()) == 8
        assert f"[whatif-{name}](../configs/whatif-{name}.yaml) | `{key}`" in (root / "docs" / "whatif.md").read_text()


# ---- built results -------------------------------------------------------------------------------------------------


def cases_of(speedups: dict[float, float], *, ceiling: float | None = None, eplb: float | None = None):
    """token_drop at each capacity factor with the given speedup; with a ceiling all that may stand beside it."""
    drops = [
        FakeCase("token_drop", params={"capacity_factor": factor}, speedup=speedup, dropped=0.3 / factor, mass=0.9)
        for factor, speedup in speedups.items()
    ]
    beside = [
        FakeCase("native", role="noise", label="native again"),
        FakeCase("topk"),
        FakeCase("native_balanced", role="ceiling", label="native, balanced scores", speedup=ceiling or 1.0),
    ]
    spare = FakeCase("eplb", role="replication", label="EPLB, 1 spare per rank", speedup=eplb or 1.0)
    return [FakeCase("native", role="baseline"), *drops, *([spare] if eplb else []), *(beside if ceiling else [])]


def comparison_at(number: int, point: dict, cases: list[FakeCase], **changes) -> FakeComparison:
    facts = {"point": point, "title": f"Tiny {number}", **changes.pop("facts", {})}
    usual = {"num_batches": 2, "num_iterations": 1, "noise": 0.0, "kinds": ("plain",)}
    return FakeComparison(f"c{number}", facts, cases, **{**usual, **changes})


def peak_sweep(root: Path, mode: str = "run", peaks=(2, 1), *, factor: float = 1.0, ceiling=None, eplb=None, **facts):
    """Peak loads written out of order; token_drop pays where the peak load is above its capacity factor."""
    comparisons = []
    for number, peak in enumerate(peaks):
        speedups = {g: (1 + 0.2 * (peak - g)) * factor for g in (1.0, 2.0, 3.0)}
        cases = cases_of(speedups, ceiling=ceiling and ceiling + peak / 10, eplb=eplb)
        comparisons.append(comparison_at(number, {PEAK: peak}, cases, facts=facts))
    return load_run(write_run(root, comparisons, mode))


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return peak_sweep(tmp_path_factory.mktemp("peaks"), peaks=(4, 1, 2.5, 2), ceiling=1, eplb=1.25)


@pytest.fixture(scope="module")
def peaks_axes(peaks: Run) -> Axes:
    (axes,) = figure_of(peaks).axes
    return axes


@pytest.fixture(scope="module")
def peaks_text(peaks: Run) -> str:
    return run_text(peaks)


def figure_of(run: Run, draw=map_figure) -> Figure | None:
    with house_style():
        drawing = draw(run)
    return None if drawing is None else drawing.figure


def words_of(figure: Figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def texts_in(axes) -> dict[tuple[float, float], list[str]]:
    """What stands in each cell, by the cell's centre."""
    found: dict[tuple[float, float], list[str]] = {}
    for text in axes.texts:
        x, y = text.get_position()
        place = min(axes.get_yticks(), key=lambda tick: abs(tick - y))
        found.setdefault((x, place), []).append(text.get_text())
    return found


def test_comparisons_stand_in_the_order_of_the_sweep(peaks: Run, peaks_text: str) -> None:
    assert [facts.point[PEAK] for facts in peaks.comparisons.values()] == [1, 2, 2.5, 4]
    places = [peaks_text.index(f"Tiny {number}:") for number in (1, 3, 2, 0)]
    assert places == sorted(places)
    unswept = [result_at({}, title=name) for name in "bac"]
    assert in_order(unswept) == unswept


# ---- keys and values -----------------------------------------------------------------------------------------------


def result_at(point: dict, num_ranks: int = 2, **facts) -> ComparisonResult:
    """A comparison of which nothing was measured."""
    described = FakeComparison(facts={"point": point, **facts}, num_ranks=num_ranks).described()
    return ComparisonResult(Facts.model_validate(described), (), None, ())


def test_ep_size_is_shown_as_experts_per_rank_and_numbers_beside_words_as_words() -> None:
    results = [result_at({EP_SIZE: size}, size or 8) for size in (2, 4, None)]
    (sweep,) = sweeps_along(EP_SIZE, results)
    (mixed,) = sweeps_along(PEAK, [result_at({PEAK: peak}) for peak in (None, 2.0)])
    assert (mixed.values, mixed.is_numeric) == (("2", "unskewed"), False)
    assert (key_words(sweep.key), sweep.labels) == ("experts per rank", ["1", "2", "4"])
    assert [result.comparison.num_ranks for result in sweep.comparisons] == [8, 4, 2]


def test_words_are_for_people() -> None:
    point = {"emulate.replication": [{"spare_per_rank": 1, "policy": None}], LINKS: "pcie5", PEAK: None}
    facts = result_at(point).comparison
    assert [value_words(value_of(key, facts)) for key in point] == ["spare_per_rank=1", "pcie5", "unskewed"]
    assert [key_words(key) for key in (LINKS, "layer.cuda_graph")] == ["links", "cuda graph"]


def test_the_key_with_most_numbers_is_the_axis_and_the_others_have_maps_of_their_own() -> None:
    points = itertools.product(("pcie5", "nvlink", "ib"), (2.0, 1.0))
    results = [result_at({LINKS: links, PEAK: peak}) for links, peak in points]
    assert swept_keys(results) == [PEAK, LINKS]
    assert [(sweep.others, sweep.values) for sweep in sweeps_along(PEAK, results)] == [
        ("links ib", (1.0, 2.0)),
        ("links nvlink", (1.0, 2.0)),
        ("links pcie5", (1.0, 2.0)),
    ]
    assert [sweep.values for sweep in sweeps_along(LINKS, results)] == [("ib", "nvlink", "pcie5")] * 2


# ---- map -----------------------------------------------------------------------------------------------------------


def test_every_cell_shows_its_speedup_and_what_it_drops(peaks_axes: Axes) -> None:
    axes, cells = peaks_axes, texts_in(peaks_axes)
    for column, peak in enumerate((1, 2, 2.5, 4)):
        for row, factor in enumerate((1.0, 2.0, 3.0)):
            assert cells[column, row] == [f"{1 + 0.2 * (peak - factor):.2f}", f"{30 / factor:.1f} %"]
    balance, spare = axes.get_yticks()[-2:]
    assert [cells[column, balance][0] for column in range(4)] == ["1.10", "1.20", "1.25", "1.40"]
    assert [cells[column, spare] for column in range(4)] == [["1.25", "0.0 %"]] * 4
    labels = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    assert labels == ["1", "2", "3", "perfect balance", "EPLB, 1 spare per rank"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "2.5", "4"]
    assert axes.get_xlabel() == "peak load of the busiest expert"


def break_even_of(axes) -> set[tuple]:
    """Pieces of the line, each from end to end."""
    return {tuple(map(tuple, line.get_xydata().tolist())) for line in axes.lines}


def test_the_break_even_line_runs_along_the_edges_of_cells_that_pay(peaks_axes: Axes) -> None:
    """Gamma 1 pays above a peak load of 1, gamma 2 above 2, gamma 3 at 4 alone: three steps, each ahead of its cell."""
    steps = [(0, 0), (1, 1), (2, 2)]  # the last column of each row that does not pay
    upright = {((x + 0.5, y - 0.5), (x + 0.5, y + 0.5)) for x, y in steps}
    level = {((x - 0.5, y - 0.5), (x + 0.5, y - 0.5)) for x, y in steps[1:]}
    assert break_even_of(peaks_axes) == upright | level


def test_no_text_of_a_map_hides_its_break_even_line(peaks_axes: Axes) -> None:
    axes = peaks_axes
    axes.figure.draw_without_rendering()
    ends = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    points = np.concatenate([start + np.linspace(0, 1, 50)[:, None] * (end - start) for start, end in ends])
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(points)
    assert boxes
    assert not any(box.contains(*point) for box in boxes for point in points)
    assert min(line.get_zorder() for line in axes.lines) > max(text.get_zorder() for text in axes.texts)


EMULATED = {"links": LINKS_WORDS}, "emulated (one device for all ranks, the all-to-all is modelled)"
MODELLED = {"links": LINKS_WORDS, "device": DEVICE_WORDS}, "modelled (nothing was run)"


@pytest.mark.parametrize(
    ("factor", "where", "origin"),
    [(0.6, "nowhere faster than native", EMULATED), (1.7, "faster than native in every cell", MODELLED)],
)
def test_sheets_say_where_there_is_no_break_even_and_what_is_modelled(
    tmp_path: Path, factor: float, where: str, origin: tuple
) -> None:
    facts, how = origin
    run = peak_sweep(tmp_path, "emulated", factor=factor, **facts)
    figure = figure_of(run)
    (axes,), words = figure.axes, words_of(figure)
    assert break_even_of(axes) == set()
    assert axes.get_title(loc="left").replace("\n", " ") == f"token_drop: {where}"
    assert how in words
    assert all(model.partition(":")[0] in words for model in facts.values())
    assert ("NVIDIA Fake 80GB in place of 2 ranks" in words) == ("emulated" in words) == (origin is EMULATED)


def hatches_of(axes) -> set[tuple[float, float, str]]:
    return {(p.get_x() + 0.5, p.get_y() + 0.5, p.get_hatch()) for p in axes.patches if p.get_hatch()}


def test_cells_inside_the_noise_floor_are_hatched(tmp_path: Path) -> None:
    speedups = ({1.0: 1.0, 2.0: 1.5}, {1.0: 1.5, 2.0: 0.999})
    noisy = {"noise": 0.02, "num_batches": 10, "num_iterations": 3}
    comparisons = [
        comparison_at(number, {PEAK: 1.0 + number}, cases_of(one, ceiling=1.5), **noisy)
        for number, one in enumerate(speedups)
    ]
    run = load_run(write_run(tmp_path, comparisons))
    verdicts = {
        (x, result.capacity_factor): result.verdict
        for x, comparison in enumerate(analyse(run))
        for result in comparison.policies
        if result.capacity_factor
    }
    assert set(verdicts.values()) >= {"faster"}
    expected = {"no difference": "////", "inconclusive": ".."}
    (axes,) = figure_of(run).axes
    found = {(x, y): hatch for x, y, hatch in hatches_of(axes) if y < 2}
    assert found == {(x, g - 1): expected[verdict] for (x, g), verdict in verdicts.items() if verdict in expected}
    assert len(found) == 2


def test_a_case_that_failed_is_an_empty_cell_with_its_status(tmp_path: Path) -> None:
    comparisons = [comparison_at(number, {PEAK: 1.0 + number}, cases_of({1.0: 1.5, 2.0: 0.9})) for number in range(2)]
    comparisons[1].cases[1].status, comparisons[1].cases[1].reason = "oom", "too big"
    (axes,) = figure_of(load_run(write_run(tmp_path, comparisons))).axes
    assert texts_in(axes)[1, 0] == ["oom"]
    assert break_even_of(axes) == {((-0.5, 0.5), (0.5, 0.5))}, "no break-even beside what was not measured"


def test_replication_is_in_the_table_with_its_memory(peaks_text: str, tmp_path: Path) -> None:
    assert "EPLB, 1 spare per rank: more memory per rank, by how much was not recorded" in peaks_text
    spare = [
        FakeCase("eplb", role="replication", label=f"EPLB, {n} spare per rank", params={"spare_per_rank": n})
        for n in (1, 2)
    ]
    cases = [*cases_of({1.0: 1.2}, ceiling=1.5), *spare]
    directory = write_run(tmp_path, [comparison_at(0, {}, cases)])
    path = directory / "run.json"
    path.write_text(
        path.read_text().replace('"role": "replication"', '"role": "replication", "extra_bytes_per_rank": 3e9')
    )
    run = load_run(directory)
    (result,) = analyse(run)
    assert [one.case.extra_bytes_per_rank for one in result.replications] == [3e9, 3e9]
    assert [one.case.label for one in result.results[-3:]] == [*(c.label for c in spare), "native, balanced scores"]
    text = run_text(run)
    assert "EPLB, 2 spare per rank: 2.79 GiB more memory per rank" in text
    assert "two replicas of one expert stand together" in text


def test_without_several_factors_nothing_is_drawn(tmp_path: Path) -> None:
    one_factor = [comparison_at(number, {PEAK: 1.0 + number}, cases_of({1.0: 1.2})) for number in range(2)]
    run = load_run(write_run(tmp_path, one_factor))
    assert figure_of(run) is figure_of(run, sweep_figure) is None


def test_lines_run_along_the_key_with_the_ceiling_dashed(peaks: Run) -> None:
    above, below = figure_of(peaks, sweep_figure).axes
    found = [line for line in above.lines if list(line.get_xdata()) == [1, 2, 2.5, 4]]
    lines = {tuple(np.round(line.get_ydata(), 6)): line for line in found}
    speedups = {tuple(np.round([1 + 0.2 * (peak - factor) for peak in (1, 2, 2.5, 4)], 6)) for factor in (1, 2, 3)}
    assert lines.keys() >= {*speedups, (1.25,) * 4}
    assert lines[1.1, 1.2, 1.25, 1.4].get_linestyle() == "--"
    assert [line.get_ydata()[0] for line in below.lines] == pytest.approx([30, 15, 10], rel=1e-3)


# ---- clipping ------------------------------------------------------------------------------------------------------

LONG = "a name that goes on and on withALongWordThatHasNoPlaceToBreakAnywhereAtAll"


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three families along peak loads, over two links."""
    cases = cases_of({1.0: 1.2, 2.0: 0.9}, ceiling=1.5, eplb=1.1)
    cases = [case for case in cases if case.role != "noise" and case.policy != "topk"]
    cases += [
        FakeCase("expanded_drop", params={"capacity_factor": g, "metric": f"{LONG}{number}"}, speedup=1 + g / 9)
        for number in range(2)
        for g in (1.0, 2.0)
    ]
    cases[3].label = LONG
    points = itertools.product((1, 2), (1.0, 2.0))
    comparisons = [
        comparison_at(number, {LINKS: f"{LONG} {links}", PEAK: peak}, list(cases), facts={"links": LONG})
        for number, (links, peak) in enumerate(points)
    ]
    return load_run(write_run(tmp_path_factory.mktemp("long"), comparisons))


@pytest.mark.parametrize("draw", [map_figure, sweep_figure])
def test_nothing_is_clipped_and_no_text_hides_another(long_names: Run, draw) -> None:
    figure = figure_of(long_names, draw)
    titles = ["".join(axes.get_title(loc="left").split()) for axes in figure.axes]
    of_drops = [title for title in titles if title.startswith("token_drop")]
    assert ["".join(f"links {LONG} 1".split()) in title for title in of_drops] == [True, False]
    assert_nothing_is_clipped(figure)
