"""Ranks that share a device: what is refused, MPS, and a rehearsal from the command to every page that shows it.

A rehearsal runs here on ranks of the CPU, whose collectives are staged as those of a shared GPU are.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pandas as pd
import pytest
from test_run import cases_of, launch, statuses, write_config

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.plot import drawings
from moe_ep_bench.analysis.show import shown_text
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.bench import commands
from moe_ep_bench.cli import main
from moe_ep_bench.errors import CASES_FAILED, OK, USER_ERROR, UserError
from moe_ep_bench.runtime import sharing
from moe_ep_bench.runtime.sharing import CONTEXT_BYTES, NCCL, STAGED, check_memory, check_sharing, shared_gpus
from moe_ep_bench.schema import LAYER_PHASES, REHEARSAL_SCHEMA

GIB = 2**30
HOW = ("--cpu", "--share-gpu", "--staged")
CHANGES = {
    "workload__num_batches": 2,
    "measure__timeout_s": 30,
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}, {"name": "oea", "k0": 4}],
}


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "got"), [(None, "got none"), ((2, 29, 7), "got 2.29.7"), ((1, 99, 0), "got 1.99.0")])
def test_an_older_nccl_is_refused_with_the_way_on(found, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "loaded_nccl", lambda: found)
    with pytest.raises(UserError, match=r"expected NCCL 2\.30 or newer") as error:
        check_sharing(NCCL, "cuda")
    assert got in str(error.value)
    assert all(way in str(error.value) for way in ("nvidia-nccl-cu13", "LD_PRELOAD", "--staged"))


@pytest.mark.parametrize("found", [(2, 30, 0), (2, 32, 3), (3, 0, 0)])
def test_newer_ones_are_taken_and_staged_asks_for_none(found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "loaded_nccl", lambda: found)
    check_sharing(NCCL, "cuda")
    monkeypatch.setattr(sharing, "loaded_nccl", lambda: None)
    check_sharing(STAGED, "cuda")
    check_sharing(STAGED, "cpu")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cpu", "--share-gpu", "--nproc=2"], "--share-gpu: expected --staged beside it"),
        (["--cpu", "--staged", "--nproc=2"], "--staged: goes with --share-gpu"),
        ([*HOW, "--nproc=2", "--set=layer.cuda_graph=true"], "layer.cuda_graph: expected false with --staged"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["run", str(write_config(tmp_path)), "--out", str(tmp_path / "out"), *arguments]) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not (tmp_path / "out").exists()


def test_ranks_that_do_not_fit_are_refused_beforehand_with_how_many_do() -> None:
    rank, free = 10 * GIB, [32 * GIB]
    check_memory(rank, free, 3)
    with pytest.raises(UserError, match=r"--nproc: expected at most 3 \(about 10\.6 GiB a rank, 32\.0 GiB free"):
        check_memory(rank, free, 4)
    check_memory(rank, 2 * free, 6)
    with pytest.raises(UserError, match=r"at most 4 "):
        check_memory(rank, [32 * GIB, 2 * (rank + CONTEXT_BYTES)], 5)
    check_memory(rank, [], 100)  # No driver tells it.


def test_a_command_of_ranks_that_do_not_fit_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the estimate of its own config, 2 GiB of the GPU carry three tiny ranks."""
    monkeypatch.setattr(commands, "free_bytes_of_gpus", lambda: [2 * GIB])
    monkeypatch.setattr(commands, "torchrun", lambda *_, **__: pytest.fail("ranks were started"))
    command = ["run", str(write_config(tmp_path)), "--out", str(tmp_path / "out"), *HOW]
    assert main([*command, "--nproc=4"]) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "--nproc: expected at most 3 (about 0.6 GiB a rank, 2.0 GiB free on a GPU), got 4" in line
    assert not (tmp_path / "out").exists()


# ---- MPS -------------------------------------------------------------------------------------------------------------

# Writes down what it is asked, and lays a control file as the daemon does.
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
  echo "start $CUDA_MPS_PIPE_DIRECTORY" >> "$MPS_LOG"
  {start}
  touch "$CUDA_MPS_PIPE_DIRECTORY/control"
else
  read word
  echo "$word $CUDA_MPS_PIPE_DIRECTORY" >> "$MPS_LOG"
fi
"""


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a control program of MPS on the PATH; returns its log."""
    log = tmp_path / "mps.log"
    log.touch()
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "nobody"))

    def put(start: str = "") -> Path:
        program = tmp_path / "bin" / "nvidia-cuda-mps-control"
        program.parent.mkdir()
        program.write_text(CONTROL.replace("{start}", start))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("MPS_LOG", str(log))
        return log

    return put


def test_a_private_daemon_is_started_and_ended_and_leaves_nothing(mps, monkeypatch: pytest.MonkeyPatch) -> None:
    log = mps()
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    monkeypatch.setattr(sharing, "_daemon_is_there", lambda: False)
    before = dict(os.environ)
    with shared_gpus(NCCL, 4):
        assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert log.read_text() == f"start {pipes}\n"
    assert log.read_text() == f"start {pipes}\nquit {pipes}\n"
    assert dict(os.environ) == before
    assert not Path(pipes).exists()


def test_a_daemon_that_is_there_is_used_and_stays(mps, tmp_path: Path) -> None:
    log = mps()
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody" / "control").touch()
    with shared_gpus(STAGED, 3):
        assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "33"
        assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "nobody")
    assert log.read_text() == ""


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("echo no permission >&2; exit 1", "no permission"),
        ("echo no; echo '  permission '; exit 1", "no permission"),
        ("exit 3", "status 3"),
        ("exec sleep 60", "Command '['nvidia-cuda-mps-control', '-d']' timed out after 1.0 seconds"),
    ],
)
def test_without_one_ranks_take_turns_and_a_line_says_why(
    mps, start: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mps(start)
    if "sleep" in start:
        monkeypatch.setattr(sharing, "_MPS_TIMEOUT_S", 1.0)
    with shared_gpus(NCCL, 2):
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ
    assert capsys.readouterr().err == f"moe-ep-bench: no MPS ({why}): ranks take turns on a GPU\n"


def test_variables_of_the_user_stay(mps, monkeypatch: pytest.MonkeyPatch) -> None:
    mps()
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    monkeypatch.setattr(sharing, "_daemon_is_there", lambda: False)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "90")
    with shared_gpus(NCCL, 2):
        assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "90"
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "90"


# ---- a rehearsal -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rehearsal of two ranks, of which one was killed in a case twice, and in another once."""
    folder = tmp_path_factory.mktemp("rehearsal")
    config, out = write_config(folder, **CHANGES), folder / "out"
    done = launch(config, *HOW, "--out", out, faults="token_drop=kill")
    assert done.returncode == CASES_FAILED, done.stderr
    return out


def test_a_killed_rank_costs_its_case_and_the_others_ran(rehearsed: Path) -> None:
    found = statuses(rehearsed)
    status, reason = found.pop("token_drop capacity_factor=1.0")
    assert status == "failed"
    assert reason == "ended without a word (killed, or out of memory) (rank 1) (2 attempts)"
    assert {status for status, _ in found.values()} == {"ok"}


def test_no_time_is_on_disk(rehearsed: Path) -> None:
    rows = cases_of(rehearsed)
    assert list(rows) == REHEARSAL_SCHEMA.names
    assert not [name for name in rows if name.endswith("_us")]
    ran = rows[rows.status == "ok"]
    assert set(ran.num_iterations) == {2 * (2 + 1)}
    assert all({*phases} == {*LAYER_PHASES} - {"wait_policy"} for phases in ran[ran.policy == "token_drop"].phases)
    assert all(set(phases) >= {"dispatch", "experts", "combine"} for phases in ran.phases)
    assert (ran.groupby("case_id")["rank"].nunique() == 2).all()


def test_its_rows_say_what_ran_and_have_no_time(rehearsed: Path) -> None:
    rows = cases(load(rehearsed)).query("status == 'ok'")
    assert (rows["origin"] == "rehearsed").all()
    assert rows["median_ms"].isna().all()
    assert rows["speedup_median"].isna().all()
    assert (rows["num_iterations"] == 6).all()
    assert (rows["peak_memory_gib"] > 0.01).all()
    assert (rows["reference_error"] < 1e-4).all()
    assert rows["dropped_share"].notna().any()


def test_every_table_figure_and_page_says_that_ranks_shared_a_device(
    rehearsed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "rehearsal (ranks shared a device, so nothing was timed)"
    store = load(rehearsed)
    assert said in shown_text(store)
    with house_style():
        drawn = drawings(store)
        assert set(drawn) == {"dropped", "load"}
        for drawing in drawn.values():
            words = [text.get_text() for text in drawing.figure.findobj(lambda one: hasattr(one, "get_text"))]
            assert any(said in " ".join(text.split()) for text in words)
            assert "REHEARSED" in words
    assert main(["show", str(rehearsed), "--format", "html"]) == OK
    page = (rehearsed / "report.html").read_text()
    assert said in page.replace("Rehearsal", "rehearsal")
    assert "speedup" not in page.partition("<script")[0].lower().partition("</style>")[2]
    assert main(["show", str(rehearsed), "--view", "phases,ranks"]) == OK
    assert "--view phases: the run has no such numbers" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["compare", "DIR", "DIR"], ["advise", "DIR"]])
def test_what_needs_times_refuses_it(command: list[str], rehearsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(rehearsed) if word == "DIR" else word for word in command]) == USER_ERROR
    assert "a rehearsal run, without times: its ranks shared a device (--share-gpu)" in capsys.readouterr().err


def test_times_and_rehearsals_never_share_a_directory(rehearsed: Path) -> None:
    done = launch(rehearsed.parent / "config.yaml", "--cpu", "--out", rehearsed)
    assert done.returncode == USER_ERROR
    assert "holds results with mode rehearsal, here it is run; choose another directory" in done.stderr


def test_a_fault_that_was_survived_is_named(tmp_path: Path) -> None:
    """A rank that hung once is started again with the others, and the row keeps why."""
    changes = CHANGES | {"policies": [{"name": "topk"}], "measure__timeout_s": 8}
    config, out = write_config(tmp_path, **changes), tmp_path / "out"
    done = launch(config, *HOW, "--out", out, faults="topk=hang_once")
    assert done.returncode == OK, done.stderr
    ((reason,),) = {tuple(one) for one in cases_of(out).query("policy == 'topk'")["lost_attempts"]}
    assert reason.startswith("timeout: no progress for 0:00:08 in _strike (rank 1)")
    assert "attempts lost before" in shown_text(load(out))


def test_routing_says_that_it_was_rehearsed(rehearsed: Path) -> None:
    routing = pd.concat(pd.read_parquet(path) for path in (rehearsed / "routing").glob("*.parquet"))
    assert set(routing["mode"]) == {"rehearsal"}
