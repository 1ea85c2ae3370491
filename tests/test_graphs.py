"""Layers run eagerly beside the same layers replayed from CUDA graphs: what pairs, what is said, what is drawn."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from results_builder import FakeCase, FakeComparison, assert_nothing_is_clipped, write_run

import plot_results
from moe_ep_bench.analysis.figures import draw_figures
from moe_ep_bench.analysis.figures.decode import graphs_figure
from moe_ep_bench.analysis.graphs import GRAPH_KEY, Pair, graph_pairs, graph_table
from moe_ep_bench.analysis.load import Run, load_run
from moe_ep_bench.analysis.render import render
from moe_ep_bench.analysis.show import text_of
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import house_style

EAGER_US, REPLAYED_US = 300.0, 120.0
TOKENS = "workload.num_tokens"


def cases(oea: float = 1.05) -> list[FakeCase]:
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("oea", params={"k0": 3}, label="oea k0=3", speedup=oea, dropped=0.5, mass=0.75),
    ]


def eager(identity: str = "eager", tokens: int = 16, **changes: object) -> FakeComparison:
    facts = {"point": {GRAPH_KEY: False, TOKENS: tokens}, **changes.pop("facts", {})}
    usual = {"cases": cases(), "native_us": EAGER_US, "noise": 0.0, "host_share": 1.0}
    usual |= {"num_batches": 2, "num_iterations": 1}
    return FakeComparison(identity, **{**usual, "tokens": tokens, "facts": facts, **changes})


def replayed(identity: str = "replayed", tokens: int = 16, **changes: object) -> FakeComparison:
    facts = {"point": {GRAPH_KEY: True, TOKENS: tokens}, "cuda_graph": "the whole layer", **changes.pop("facts", {})}
    usual = {"cases": cases(1.5), "native_us": REPLAYED_US, "host_share": 0.05, "kinds": ("plain",)}
    return eager(identity, tokens, **{**usual, "facts": facts, **changes})


def pairs_of(root: Path, *comparisons: FakeComparison) -> list[Pair]:
    return graph_pairs(analyse(load_run(write_run(root, comparisons))))


# ---- pairs -------------------------------------------------------------------------------------------------------


def test_a_case_s_two_times_their_ratio_and_both_speedups_are_the_slowest_rank_s(tmp_path: Path) -> None:
    """Batches that differ tenfold, alike in both ways, do not widen the ratio's interval."""
    run = load_run(write_run(tmp_path, [eager(), replayed()]))
    (pair,) = graph_pairs(analyse(run))
    for case in run.cases:
        case.timings["time_us"] *= 1 + case.timings["batch"]
    (varied,) = graph_pairs(analyse(run))
    ratio = varied.cases[0].ratio
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((2.5, 2.5, 2.5))
    assert [case.label for case in pair.cases] == ["native", "native again", "oea k0=3"]
    native, _, oea = pair.cases
    assert (native.eager.layer.median_ms, native.replayed.layer.median_ms) == pytest.approx((0.3, 0.12))
    assert (native.ratio.median, oea.ratio.median) == pytest.approx((2.5, 2.5 * 1.5 / 1.05))
    assert (oea.eager.speedup.median, oea.replayed.speedup.median) == pytest.approx((1.05, 1.5))


OTHER = (
    {"model": "Other-MoE"},
    {"dtype": "float32"},
    {"dispatcher": "allgather"},
    {"workload": {"kind": "synthetic", "description": "Zipf 1.2", "tail_model": None}},
    {"point": {GRAPH_KEY: True, TOKENS: 16, "workload.seed": 2}},
)


def test_what_differs_in_anything_else_is_no_pair(tmp_path: Path) -> None:
    native = cases()[:1]
    others = [replayed(f"other{number}", cases=native, facts=facts) for number, facts in enumerate(OTHER)]
    run = load_run(write_run(tmp_path, [eager(cases=native), *others, replayed(cases=native)]))
    found = dict(zip(run.comparisons, analyse(run), strict=True))
    pairs = {name: len(graph_pairs([found["eager"], one])) for name, one in found.items() if name != "eager"}
    assert pairs == {**{f"other{number}": 0 for number in range(len(OTHER))}, "replayed": 1}


def test_every_step_of_a_sweep_has_its_own_pair(tmp_path: Path) -> None:
    steps = itertools.product((eager, replayed), enumerate((64, 4, 16)))
    found = pairs_of(tmp_path, *(one(f"{one.__name__}{n}", tokens, cases=cases()[:1]) for one, (n, tokens) in steps))
    tokens = [(pair.eager.comparison.num_tokens, pair.replayed.comparison.num_tokens) for pair in found]
    assert tokens == [(4, 4), (16, 16), (64, 64)]


def test_a_case_that_lacks_one_side_is_left_out_by_name(tmp_path: Path) -> None:
    lost = [*cases(), FakeCase("lynx", status="failed", reason="not capturable"), FakeCase("laser")]
    (pair,) = pairs_of(tmp_path / "one", eager(cases=[*cases(), FakeCase("lynx")]), replayed(cases=lost))
    assert [case.label for case in pair.cases] == ["native", "native again", "oea k0=3"]
    words = "lynx (eager: ok, replayed: failed), laser (eager: not asked for, replayed: ok)"
    assert pair.left_out == words.replace("), ", ")|").split("|")
    assert f"left out: {words}" in graph_table(pair).notes
    none = [FakeCase("native", role="baseline", status="oom", reason="too large"), FakeCase("laser")]
    assert pairs_of(tmp_path / "none", eager(), replayed(cases=none)) == []


# ---- words -------------------------------------------------------------------------------------------------------


def row_of(text: str, label: str) -> list[str]:
    (row,) = (line for line in text.splitlines() if line.startswith(f"{label}  "))
    return row.removeprefix(label).split("  ")


def test_the_summary_has_a_row_per_case_and_says_what_was_compared(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, [eager(num_batches=10), replayed(num_batches=10)]))
    (pair,) = graph_pairs(analyse(run))
    text = render([graph_table(pair)], "text")
    assert text in text_of(run.directory)
    cells = [cell.strip() for cell in row_of(text, "oea k0=3") if cell.strip()]
    replay_us = REPLAYED_US / 1.5
    assert cells == [
        *(f"{EAGER_US / 1.05:.1f}", f"{EAGER_US / 1.05:.1f}", "100.0"),  # the host took as long as the layer
        *(f"{replay_us:.1f}", f"{0.05 * replay_us:.1f}", "0.0"),
        *("3.571 [3.571, 3.571]", "1.050 [1.050, 1.050]", "1.500 [1.500, 1.500]", "50.0", "75.0"),
    ]
    assert "the graphs hold the whole layer; comparisons eager (eager) and replayed (replayed)" in text
    assert "timed one after the other, not interleaved" in text
    assert "replayed from CUDA graphs, which hold the whole layer" in text_of(run.directory)


def test_an_all_gather_has_no_bandwidth_of_an_all_to_all(tmp_path: Path) -> None:
    runs = {
        name: load_run(write_run(tmp_path / name, [eager(cases=cases()[:1], facts={"dispatcher": name})]))
        for name in ("alltoall", "allgather")
    }
    found = {name: analyse(run)[0].results[0].rates for name, run in runs.items()}
    assert found["alltoall"].dispatch_gbps > 0
    assert found["allgather"].dispatch_gbps is found["allgather"].combine_bus_gbps is None
    assert found["allgather"].experts_tflops == pytest.approx(found["alltoall"].experts_tflops)
    assert "dispatcher: allgather" in text_of(runs["allgather"].directory)
    assert "dispatcher: allgather" not in text_of(runs["alltoall"].directory)


# ---- figure ------------------------------------------------------------------------------------------------------

POLICIES = [
    *(FakeCase("oea", params={"k0": k0}, label=f"oea k0={k0}", speedup=1 + 0.1 * k0, dropped=0.1) for k0 in (3, 5, 7)),
    *(FakeCase("xshare", params={"k0": 1, "budget": b}, label=f"xshare budget={b}") for b in (8, 32)),
    FakeCase("lynx", params={"num_dropped": 8}, label="lynx num_dropped=8", speedup=1.2),
    *(FakeCase("token_drop", params={"capacity_factor": g}, speedup=2 - g / 4) for g in (2.0, 1.0)),
    FakeCase("topk", speedup=0.98),
]


def sweep(root: Path, tokens: tuple[int, ...], policies: list[FakeCase], num_layers: int = 1) -> Run:
    """Both ways of layers, at some numbers of tokens, under native and some policies."""
    comparisons = []
    for layer, of_step, way in itertools.product(range(num_layers), tokens, (eager, replayed)):
        facts = {"dtype": "float32"} if layer else {}
        if way is replayed:
            facts["cuda_graph"] = "gate and policy; experts"
        native_us = (EAGER_US if way is eager else REPLAYED_US) + of_step * (1 + layer)
        identity = f"{layer}-{of_step}-{way.__name__}"
        facts["point"] = {GRAPH_KEY: way is replayed, TOKENS: of_step, "layer.dtype": facts.get("dtype", "bfloat16")}
        own = [*cases()[:2], *policies]
        comparisons.append(way(identity, of_step, facts=facts, cases=own, native_us=native_us, noise=0.01))
    return load_run(write_run(root, comparisons))


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    return drawn(sweep(tmp_path_factory.mktemp("graphs"), (4, 64), POLICIES))


def drawn(run: Run) -> Figure:
    with house_style():
        drawing = graphs_figure(run)
    return drawing.figure


def is_hollow(line: Line2D) -> bool:
    return to_hex(line.get_markerfacecolor()) == to_hex("white")


def test_eager_is_hollow_and_dashed_and_a_replay_filled_and_solid(figure: Figure) -> None:
    above, below = figure.axes
    for axes, per_way in ((above, 9), (below, 8)):  # native stands above only, token_drop is one line
        lines = [line for line in axes.lines if line.get_marker() not in ("None", "")]
        hollow = [line for line in lines if is_hollow(line)]
        assert (len(hollow), len(lines)) == (per_way, 2 * per_way)
        assert all(line.is_dashed() == is_hollow(line) for line in lines)
    replay = next(line for line in above.lines if not is_hollow(line))
    assert replay.get_ydata() == pytest.approx([REPLAYED_US + tokens for tokens in (4, 64)], rel=0.02)
    assert [float(tick) for tick in below.get_xticks()] == [4, 64]
    assert [label.get_text() for label in below.get_xticklabels()] == ["4", "64"]


def test_each_layer_has_a_panel_of_its_own_that_says_what_its_graphs_hold(tmp_path: Path) -> None:
    titles = [axes.get_title(loc="left") for axes in drawn(sweep(tmp_path, (4,), [], num_layers=2)).axes]
    titles = [title.replace("\n", " ") for title in titles if title]
    assert [("bfloat16" in title, "float32" in title) for title in titles] == [(True, False), (False, True)]
    assert all(title.endswith("; the graphs hold gate and policy; experts") for title in titles)
    assert not any("tokens" in title for title in titles)


def test_a_policy_of_several_factors_is_drawn_at_its_smallest_and_nothing_is_clipped(figure: Figure) -> None:
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label for label in labels if label.startswith("token_drop")] == [
        "token_drop, \N{GREEK SMALL LETTER GAMMA} 1: dropped 0.0 %, kept 100.0 %"
    ]
    assert_nothing_is_clipped(figure)
    for axes in figure.axes:
        low, high = axes.get_ylim()
        heights = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
        assert low <= heights.min() <= heights.max() <= high


def test_without_a_pair_there_is_no_such_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path, [eager()])
    assert draw_figures(load_run(directory), tmp_path / "none", [], ["graphs"]) == ([], ["graphs"])
    assert plot_results.main([str(directory), "--figures", "graphs"]) == 2
    assert "graphs: not drawn" in capsys.readouterr().err
