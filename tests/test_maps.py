"""A sweep from the config to its map: where comparisons stand, and where a policy stops paying."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from results_builder import FakeCase, FakeComparison, write_run

import plot_results
from moe_ep_bench.analysis.figures.maps import map_figure, sweep_figure
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.speedups import ComparisonResult, analyse
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.sweep import in_order, key_words, sweeps_along, swept_keys, value_of, value_words
from moe_ep_bench.analysis.tables import run_text
from moe_ep_bench.bench.description import describe_experiment, describe_point
from moe_ep_bench.bench.plan import RANKS, Comparison
from moe_ep_bench.config import ConfigError, load_experiments

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


@pytest.mark.parametrize("key", ["point", "_point"])
def test_the_point_is_no_key_of_a_config(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"config.yaml: {key}: no such key"):
        load_experiments(write_config(tmp_path, **{key: [["workload.peak_load", 2.0]]}), on_cpu=True)


def test_the_point_changes_no_id(tmp_path: Path) -> None:
    swept = load_experiments(write_config(tmp_path, sweep={PEAK: [2.0, 3.0]}), on_cpu=True)[0]
    (alone,) = load_experiments(write_config(tmp_path), on_cpu=True)
    assert swept.point != alone.point
    one, other = (Comparison.of(experiment, RANKS, 1, on_cpu=True) for experiment in (swept, alone))
    assert [case.case_id for case in one.cases] == [case.case_id for case in other.cases]
    assert describe_experiment(swept) == describe_experiment(alone)


def test_the_point_is_described_without_folders(tmp_path: Path) -> None:
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


def cases_of(speedups: dict[float, float], *, ceiling: float = 1.5, eplb: float | None = None) -> list[FakeCase]:
    """token_drop at each capacity factor with the given speedup, between native and its ceiling."""
    drops = [
        FakeCase("token_drop", params={"capacity_factor": factor}, speedup=speedup, dropped=0.3 / factor, mass=0.9)
        for factor, speedup in speedups.items()
    ]
    spare = FakeCase("eplb", role="replication", label="EPLB, 1 spare per rank", speedup=eplb or 1.0)
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("topk"),
        *drops,
        *([spare] if eplb else []),
        FakeCase("native_balanced", role="ceiling", label="native, balanced scores", speedup=ceiling),
    ]


def comparison_at(number: int, point: dict, cases: list[FakeCase], **changes) -> FakeComparison:
    facts = {"point": point, "title": f"Tiny {number}", **changes.pop("facts", {})}
    return FakeComparison(f"c{number}", facts, cases, **{"num_iterations": 1, "noise": 0.0, **changes})


def peak_sweep(root: Path, mode: str = "run", *, factor: float = 1.0, eplb: float | None = None, **changes) -> Path:
    """Peak loads 1 to 4, written out of order; token_drop pays where the peak load is above its capacity factor."""
    comparisons = [
        comparison_at(
            number,
            {PEAK: peak},
            cases_of({g: (1 + 0.2 * (peak - g)) * factor for g in (1.0, 2.0, 3.0)}, ceiling=1 + peak / 10, eplb=eplb),
            **changes,
        )
        for number, peak in enumerate((4, 1, 2.5, 2))
    ]
    return write_run(root, comparisons, mode)


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peak_sweep(tmp_path_factory.mktemp("peaks"), eplb=1.25)


def analysed(directory: Path) -> list[ComparisonResult]:
    return analyse(load_run(directory))


def figure_of(directory: Path, draw=map_figure) -> Figure | None:
    run = load_run(directory)
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


def test_run_json_without_points_links_or_device_is_read_as_before(tmp_path: Path) -> None:
    directory = write_run(tmp_path, [FakeComparison("c0", cases=cases_of({1.0: 1.2}), num_iterations=1)])
    (facts,) = load_run(directory).comparisons.values()
    assert (facts.point, facts.links, facts.device) == ({}, None, None)


def test_comparisons_stand_in_the_order_of_the_sweep(peaks: Path) -> None:
    run = load_run(peaks)
    assert [facts.point[PEAK] for facts in run.comparisons.values()] == [1, 2, 2.5, 4]
    text = run_text(run)
    assert [text.index(f"Tiny {number}:") for number in (1, 3, 2, 0)] == sorted(
        text.index(f"Tiny {number}:") for number in range(4)
    )


def test_ep_size_is_shown_as_experts_per_rank(tmp_path: Path) -> None:
    comparisons = [
        comparison_at(number, {EP_SIZE: size}, cases_of({1.0: 1.2, 2.0: 1.1}), num_ranks=size or 8)
        for number, size in enumerate((2, 4, None))
    ]
    results = analysed(write_run(tmp_path, comparisons))
    (sweep,) = sweeps_along(EP_SIZE, results)
    assert (key_words(sweep.key), sweep.labels) == ("experts per rank", ["1", "2", "4"])
    assert [result.comparison.num_ranks for result in sweep.comparisons] == [8, 4, 2]


def test_words_are_for_people(tmp_path: Path) -> None:
    point = {"emulate.replication": [{"spare_per_rank": 1, "policy": None}], LINKS: "pcie5"}
    (result,) = analysed(write_run(tmp_path, [comparison_at(0, point, cases_of({1.0: 1.2}))]))
    assert [value_of(key, result.comparison) for key in point] == ["spare_per_rank=1", "pcie5"]
    assert [key_words(key) for key in (LINKS, "layer.cuda_graph")] == ["links", "cuda graph"]
    unskewed = comparison_at(0, {PEAK: None}, cases_of({1.0: 1.2}))
    (result,) = analysed(write_run(tmp_path / "unskewed", [unskewed]))
    assert value_words(value_of(PEAK, result.comparison)) == "unskewed"


def test_the_key_with_most_numbers_is_the_axis_and_the_others_have_maps_of_their_own(tmp_path: Path) -> None:
    comparisons = [
        comparison_at(number, {LINKS: links, PEAK: peak}, cases_of({1.0: 1.2, 2.0: 1.1}))
        for number, (links, peak) in enumerate(itertools.product(("pcie5", "nvlink", "ib"), (2.0, 1.0)))
    ]
    results = analysed(write_run(tmp_path, comparisons))
    assert swept_keys(results) == [PEAK, LINKS]
    assert [(sweep.others, sweep.values) for sweep in sweeps_along(PEAK, results)] == [
        ("links ib", (1.0, 2.0)),
        ("links nvlink", (1.0, 2.0)),
        ("links pcie5", (1.0, 2.0)),
    ]
    assert [sweep.values for sweep in sweeps_along(LINKS, results)] == [("ib", "nvlink", "pcie5")] * 2
    titles = [axes.get_title(loc="left").replace("\n", " ") for axes in figure_of(tmp_path).axes]
    assert [title.partition(":")[0] for title in titles] == [
        "token_drop, links ib",
        "token_drop, links nvlink",
        "token_drop, links pcie5",
    ]


def test_numbers_and_words_of_one_key_stand_as_words(tmp_path: Path) -> None:
    comparisons = [
        comparison_at(number, {PEAK: peak}, cases_of({1.0: 1.2, 2.0: 0.9})) for number, peak in enumerate((None, 2.0))
    ]
    (sweep,) = sweeps_along(PEAK, analysed(write_run(tmp_path, comparisons)))
    assert sweep.values == ("2", "unskewed")
    assert not sweep.is_numeric


def test_in_order_leaves_comparisons_without_a_sweep_alone(tmp_path: Path) -> None:
    comparisons = [FakeComparison(name, cases=cases_of({1.0: 1.2}), num_iterations=1) for name in ("b", "a", "c")]
    results = analysed(write_run(tmp_path, comparisons))
    assert in_order(results) == results


# ---- map -----------------------------------------------------------------------------------------------------------


def test_every_cell_shows_its_speedup_and_what_it_drops(peaks: Path) -> None:
    (axes,) = figure_of(peaks).axes
    cells = texts_in(axes)
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


def test_the_break_even_line_runs_along_the_edges_of_cells_that_pay(peaks: Path) -> None:
    """Gamma 1 pays above a peak load of 1, gamma 2 above 2, gamma 3 at 4 alone: three steps, each ahead of its cell."""
    (axes,) = figure_of(peaks).axes
    steps = [(0, 0), (1, 1), (2, 2)]  # the last column of each row that does not pay
    upright = {((x + 0.5, y - 0.5), (x + 0.5, y + 0.5)) for x, y in steps}
    level = {((x - 0.5, y - 0.5), (x + 0.5, y - 0.5)) for x, y in steps[1:]}
    assert break_even_of(axes) == upright | level


def test_no_text_of_a_map_hides_its_break_even_line(peaks: Path) -> None:
    (axes,) = figure_of(peaks).axes
    axes.figure.draw_without_rendering()
    ends = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    points = np.concatenate([start + np.linspace(0, 1, 50)[:, None] * (end - start) for start, end in ends])
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(points)
    assert boxes
    assert not any(box.contains(*point) for box in boxes for point in points)
    assert min(line.get_zorder() for line in axes.lines) > max(text.get_zorder() for text in axes.texts)


@pytest.mark.parametrize(
    ("factor", "words"), [(0.6, "nowhere faster than native"), (1.7, "faster than native in every cell")]
)
def test_a_map_without_a_break_even_says_so(tmp_path: Path, factor: float, words: str) -> None:
    (axes,) = figure_of(peak_sweep(tmp_path, factor=factor)).axes
    assert break_even_of(axes) == set()
    assert axes.get_title(loc="left").replace("\n", " ") == f"token_drop: {words}"


def hatches_of(axes) -> set[tuple[float, float, str]]:
    return {(p.get_x() + 0.5, p.get_y() + 0.5, p.get_hatch()) for p in axes.patches if p.get_hatch()}


def test_cells_inside_the_noise_floor_are_hatched(tmp_path: Path) -> None:
    speedups = ({1.0: 1.0, 2.0: 1.5}, {1.0: 1.5, 2.0: 0.999})
    comparisons = [
        comparison_at(number, {PEAK: 1.0 + number}, cases_of(one), noise=0.02, num_iterations=6)
        for number, one in enumerate(speedups)
    ]
    directory = write_run(tmp_path, comparisons)
    verdicts = {
        (x, result.capacity_factor): result.verdict
        for x, comparison in enumerate(analysed(directory))
        for result in comparison.policies
        if result.capacity_factor
    }
    assert set(verdicts.values()) >= {"faster"}
    expected = {"no difference": "////", "inconclusive": ".."}
    (axes,) = figure_of(directory).axes
    found = {(x, y): hatch for x, y, hatch in hatches_of(axes) if y < 2}
    assert found == {(x, g - 1): expected[verdict] for (x, g), verdict in verdicts.items() if verdict in expected}
    assert len(found) == 2


def test_a_case_that_failed_is_an_empty_cell_with_its_status(tmp_path: Path) -> None:
    comparisons = [comparison_at(number, {PEAK: 1.0 + number}, cases_of({1.0: 1.5, 2.0: 0.9})) for number in range(2)]
    comparisons[1].cases[3].status, comparisons[1].cases[3].reason = "oom", "too big"
    (axes,) = figure_of(write_run(tmp_path, comparisons)).axes
    assert texts_in(axes)[1, 0] == ["oom"]
    drawn = {tuple(map(tuple, line.get_xydata().tolist())) for line in axes.lines}
    assert drawn == {((-0.5, 0.5), (0.5, 0.5))}, "no break-even beside what was not measured"


def test_replication_is_in_the_table_with_its_memory(peaks: Path) -> None:
    text = run_text(load_run(peaks))
    assert "EPLB, 1 spare per rank: more memory per rank, by how much was not recorded" in text


def test_several_replications_are_allowed_and_their_memory_is_said(tmp_path: Path) -> None:
    spare = [
        FakeCase("eplb", role="replication", label=f"EPLB, {n} spare per rank", params={"spare_per_rank": n})
        for n in (1, 2)
    ]
    directory = write_run(tmp_path, [FakeComparison("c0", cases=[*cases_of({1.0: 1.2}), *spare], num_iterations=1)])
    path = directory / "run.json"
    path.write_text(
        path.read_text().replace('"role": "replication"', '"role": "replication", "extra_bytes_per_rank": 3e9')
    )
    (result,) = analysed(directory)
    assert [one.case.extra_bytes_per_rank for one in result.replications] == [3e9, 3e9]
    assert [one.case.label for one in result.results[-3:]] == [*(c.label for c in spare), "native, balanced scores"]
    assert "EPLB, 2 spare per rank: 2.79 GiB more memory per rank" in run_text(load_run(directory))


@pytest.mark.parametrize("draw", [map_figure, sweep_figure])
def test_captions_say_what_is_modelled(tmp_path: Path, draw) -> None:
    emulated = figure_of(peak_sweep(tmp_path / "emulated", "emulated", facts={"links": LINKS_WORDS}), draw)
    words = words_of(emulated)
    assert "emulated (one device for all ranks, the all-to-all is modelled)" in words
    assert "NVIDIA Fake 80GB in place of 2 ranks" in words
    assert LINKS_WORDS.partition(":")[0] in words
    facts = {"links": LINKS_WORDS, "device": DEVICE_WORDS}
    words = words_of(figure_of(peak_sweep(tmp_path / "modelled", "emulated", facts=facts), draw))
    assert "modelled (nothing was run)" in words
    assert DEVICE_WORDS.partition(":")[0] in words
    assert LINKS_WORDS.partition(":")[0] in words
    assert "NVIDIA Fake" not in words
    assert "emulated" not in words


@pytest.mark.parametrize("draw", [map_figure, sweep_figure])
def test_without_a_sweep_or_several_factors_nothing_is_drawn(tmp_path: Path, draw) -> None:
    one_value = write_run(tmp_path / "value", [comparison_at(0, {PEAK: 2.0}, cases_of({1.0: 1.2, 2.0: 1.1}))])
    one_factor = [comparison_at(number, {PEAK: 1.0 + number}, cases_of({1.0: 1.2})) for number in range(2)]
    assert figure_of(one_value, draw) is None
    assert figure_of(write_run(tmp_path / "factor", one_factor), draw) is None


# ---- lines ---------------------------------------------------------------------------------------------------------


def test_lines_run_along_the_key_with_the_ceiling_dashed(peaks: Path) -> None:
    above, below = figure_of(peaks, sweep_figure).axes
    lines = {
        tuple(np.round(line.get_ydata(), 6)): line for line in above.lines if list(line.get_xdata()) == [1, 2, 2.5, 4]
    }
    for factor in (1.0, 2.0, 3.0):
        assert tuple(np.round([1 + 0.2 * (peak - factor) for peak in (1, 2, 2.5, 4)], 6)) in lines
    assert lines[1.1, 1.2, 1.25, 1.4].get_linestyle() == "--"
    assert (1.25,) * 4 in lines
    assert [line.get_ydata()[0] for line in below.lines] == pytest.approx([30, 15, 10], rel=1e-3)


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [map_figure, sweep_figure])
@pytest.mark.parametrize("families", [2])
def test_nothing_is_clipped_and_no_text_hides_another(tmp_path: Path, draw, families: int) -> None:
    long = "a name that goes on and on withALongWordThatHasNoPlaceToBreakAnywhereAtAll"
    cases = cases_of({1.0: 1.2, 2.0: 0.9}, eplb=1.1)
    for number in range(families):
        cases += [
            FakeCase("expanded_drop", params={"capacity_factor": g, "metric": f"{long}{number}"}, speedup=1 + g / 9)
            for g in (1.0, 2.0)
        ]
    cases[5].label = long
    comparisons = [
        comparison_at(number, {LINKS: f"{long} {links}", PEAK: peak}, list(cases), facts={"links": long})
        for number, (links, peak) in enumerate(itertools.product((1, 2), (1.0, 2.0)))
    ]
    figure = figure_of(write_run(tmp_path, comparisons), draw)
    figure.draw_without_rendering()
    boxes = [artist.get_window_extent() for artist in (*figure.texts, *figure.legends)]
    boxes += [axes.get_tightbbox() for axes in figure.axes]
    for box in boxes:
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
