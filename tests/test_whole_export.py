"""``export`` of whole models: a trace of passes, layers and phases, tables for a paper, CSV."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from results_builder import FakeCase, standard_cases
from whole_builder import ELSEWHERE_US, write_whole

from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.whole import analyse_whole
from moe_ep_bench.cli import main
from moe_ep_bench.schema import LAYER_PHASES

DROP = "token_drop gamma 1"
Exported = Callable[..., str]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [*standard_cases(), FakeCase("lynx", status="oom", reason="too large")]
    return write_whole(tmp_path_factory.mktemp("export") / "run", cases, of_layers=9)


@pytest.fixture
def exported(directory: Path, capsys: pytest.CaptureFixture[str]) -> Exported:
    def run(*arguments: str) -> str:
        assert main(["show", str(directory), *arguments]) == 0
        return capsys.readouterr().out

    return run


def bars_of(text: str, rank: int) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]


def parents(bars: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Of every bar the names of those that hold it, from the outermost to itself, as a viewer nests them."""
    found, open_bars = [], []
    for bar in bars:
        start, end = (round(1000 * time) for time in (bar["ts"], bar["ts"] + bar["dur"]))
        while open_bars and open_bars[-1][1] <= start:
            open_bars.pop()
        assert not open_bars or end <= open_bars[-1][1], f"{bar['name']} overlaps {open_bars[-1][0]} in part"
        open_bars.append((bar["name"], end))
        found.append(tuple(name for name, _ in open_bars))
    return found


def test_a_trace_holds_every_phase_in_its_layer_in_its_pass(directory: Path, exported: Exported) -> None:
    text = exported("--format", "perfetto", "--case", DROP, "--iteration", "3/1")
    whole = load_run(directory, whole=True)
    case = next(case for case in whole.cases if case.label == DROP)
    rows = case.layers
    rows = rows[(rows.batch == 3) & (rows.iteration == 1) & (rows.time_us > 0)]
    for rank in (0, 1):
        nested = parents(bars_of(text, rank))
        one_pass = f"{DROP}, batch 3, iteration 1"
        assert {path[0] for path in nested} == {one_pass}
        assert [path[1] for path in nested if len(path) == 2] == [
            *("embedding", "layer 0", "layer 1", "layer 2", "output", "unaccounted")
        ]
        assert [path[2] for path in nested if path[1:2] == ("layer 0",) and len(path) == 3] == [
            *("rest", "attention", "dense")
        ]
        for layer in (1, 2):
            present = set(rows[(rows["rank"] == rank) & (rows.layer == layer)].phase)
            assert ("wait_combine" in present) == (rank == 1)  # the builder's rank 1 waits for rank 0
            inside = [path[2] for path in nested if path[1:2] == (f"layer {layer}",) and len(path) == 3]
            assert inside == ["rest", "attention", *(phase for phase in LAYER_PHASES if phase in present)]
    measured = rows[(rows["rank"] == 0) & (rows.layer == 1)].set_index("phase").time_us
    bars = bars_of(text, 0)
    (of_layer,) = [bar for bar in bars if bar["name"] == "layer 1"]
    assert of_layer["dur"] == pytest.approx(measured.sum(), abs=0.01)
    assert of_layer["cat"] == "layer"
    experts = [bar["dur"] for bar in bars if bar["name"] == "experts"]
    assert experts == pytest.approx([measured["experts"]] * 2, abs=0.002)
    assert sum(bar["dur"] for bar in bars if bar["name"] == "attention") == pytest.approx(
        ELSEWHERE_US["attention"], abs=0.01
    )


def test_csv_has_a_row_per_case_with_unrounded_numbers(directory: Path, exported: Exported) -> None:
    rows = pd.read_csv(io.StringIO(exported("--format", "csv"))).set_index("label")
    (one,) = analyse_whole(load_run(directory, whole=True))
    drop = next(each for each in one.results if each.result.case.label == DROP)
    told = rows.loc[DROP]
    assert told.median_ms == drop.result.layer.median_ms
    assert told.speedup_median == drop.result.speedup.median
    assert told.moe_speedup_low == drop.moe_speedup.low
    assert (told.moe_share, told.by_amdahl, told.most_by_amdahl) == (drop.moe_share, drop.expected, one.most)
    assert told.mean_rank_attention_ms == drop.parts_ms["attention"]
    assert told.speedup_extrapolated == drop.all_layers_speedup
    assert rows.loc["lynx"].status == "oom"
    assert pd.isna(rows.loc["lynx"].moe_ms)


def test_samples_are_every_layers_and_sum_to_the_pass(directory: Path, exported: Exported) -> None:
    rows = pd.read_csv(io.StringIO(exported("--format", "csv", "--samples", "--case", DROP)))
    broken = rows[rows.kind == "breakdown"]
    key = ["launch", "rank", "batch", "iteration"]
    totals = broken[broken.phase == "total"].set_index(key).time_us
    parts = broken[broken.phase != "total"].groupby(key).time_us.sum()
    assert parts.sort_index().to_numpy() == pytest.approx(totals.sort_index().to_numpy(), abs=0.01)
    assert sorted(broken.layer.dropna().unique()) == [0, 1, 2]
    assert broken[broken.phase == "experts"].layer.notna().all()
    assert (rows[rows.kind == "plain"].phase == "total").all()
