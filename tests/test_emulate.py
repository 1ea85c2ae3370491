"""Emulated ranks from the command line to the table, and beside real ranks of the same config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from test_run import cases_of, environment, launch, write_config

from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.summary import summary_table
from moe_ep_bench.cli import main
from moe_ep_bench.exit_codes import OK, USER_ERROR
from moe_ep_bench.records import PHASES, TOTAL, UNACCOUNTED

LINKS = {"emulate": {"links": "h100-nvlink4"}}


def emulate(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "moe_ep_bench", "emulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emulate")
    done = emulate(write_config(folder, layer__ep_size=4, **LINKS), "--out", folder / "out")
    assert done.returncode == OK, done.stderr
    return folder / "out"


def test_every_rank_batch_and_iteration_has_all_phases_that_add_up(finished: Path) -> None:
    rows = cases_of(finished)
    assert set(rows["mode"]) == {"emulated"}
    assert rows.case_id.nunique() == 7
    plain, breakdown = rows[rows.kind == "plain"], rows[rows.kind == "breakdown"]
    assert len(plain) == 7 * 4 * 3 * 2  # cases, ranks, batches, iterations
    assert set(breakdown.phase) == {*PHASES, TOTAL, UNACCOUNTED} - {"wait_policy"}
    keys = ["case_id", "rank", "batch", "iteration"]
    parts = breakdown[breakdown.phase != TOTAL].groupby(keys).time_us.sum()
    totals = breakdown[breakdown.phase == TOTAL].set_index(keys).time_us
    pd.testing.assert_series_equal(parts, totals.sort_index(), check_names=False)
    pd.testing.assert_series_equal(plain.set_index(keys).time_us.sort_index(), totals.sort_index(), check_names=False)
    waits = breakdown[breakdown.phase == "wait_dispatch"].groupby(["case_id", "batch", "iteration"]).time_us
    assert (waits.min() == 0).all(), "the last rank waits for nobody"
    assert (waits.max() > 0).all()


def test_the_table_says_that_it_is_emulated_and_by_which_links(finished: Path) -> None:
    text = summary_table(load_run(finished))
    assert "emulated (one device for all ranks, the all-to-all is modelled)" in text
    assert "in place of 4 ranks" in text
    assert "links/h100-nvlink4" in text
    assert "probe overhead" not in text
    (comparison,) = json.loads((finished / "run.json").read_text())["comparisons"].values()
    assert comparison["world_size"] == comparison["num_ranks"] == 4


def test_routing_is_that_of_real_ranks(tmp_path: Path) -> None:
    config = write_config(tmp_path, layer__ep_size=2, workload__num_batches=2, **LINKS)
    done = emulate(config, "--out", tmp_path / "emulated")
    assert done.returncode == OK, done.stderr
    done = launch(config, "--out", tmp_path / "real", "--set", "measure.max_warmup=1")
    assert done.returncode == OK, done.stderr

    def routing(out: Path) -> pd.DataFrame:
        rows = pd.concat(pd.read_parquet(path) for path in (out / "routing").glob("*.parquet"))
        labels = {
            case_id: case["label"] for case_id, case in json.loads((out / "run.json").read_text())["cases"].items()
        }
        own = ["run_id", "case_id", "comparison_id", "mode", "reference_error", "output_error"]
        return (
            rows.assign(label=rows.case_id.map(labels))
            .drop(columns=own)
            .sort_values(["label", "rank", "batch"])
            .reset_index(drop=True)
        )

    pd.testing.assert_frame_equal(routing(tmp_path / "emulated"), routing(tmp_path / "real"))


def test_a_finished_directory_is_not_measured_again(finished: Path) -> None:
    done = emulate(finished.parent / "config.yaml", "--out", finished)
    assert done.returncode == OK
    assert "finished before" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "emulate.links: expected one of a100-nvlink3"),
        ({"emulate": {"links": "h100-nvlnk4"}}, "h100-nvlnk4"),
        ({"emulate": {"link": "x"}}, "emulate.link: no such key; expected one of links (did you mean links?)"),
        ({**LINKS, "measure__launches": 3}, "measure.launches: emulate makes one launch; expected 1, got 3"),
        ({**LINKS, "layer__ep_size": 7}, "layer.ep_size: expected a divisor of the 64 experts"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    changes: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emulate", str(write_config(tmp_path, **changes)), "--out", str(tmp_path / "out")]) == USER_ERROR
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1, printed.err
    assert message in printed.err
    assert not (tmp_path / "out").exists()
