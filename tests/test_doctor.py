"""Claims about the doctor: it tells what is so and what it costs; it ends, and its exit status tells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import doctor_children
import pynvml
import pytest
import torch
from test_environment import H100

from moe_ep_bench.cli import main
from moe_ep_bench.kernels import toolchain
from moe_ep_bench.machine import doctor
from moe_ep_bench.machine.doctor import NOTE, OK, PROBLEM, gpu_notes, ranks_and_exchange
from moe_ep_bench.machine.gpus import THROTTLE_REASONS
from moe_ep_bench.runtime.exit_codes import USER_ERROR

# ---- the all-to-all


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (doctor_children.exchanges_wrongly, "rank 1 got 1 of 393,216 values from rank 0 wrong"),
        (doctor_children.is_lost, "process 1 terminated with signal SIGKILL"),
    ],
)
def test_a_wrong_value_and_a_lost_rank_are_problems(
    does: Callable[..., None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "exchange", does)
    (finding,) = ranks_and_exchange(2)
    assert finding.status == PROBLEM
    assert words in finding.words


def test_ranks_that_torchrun_started_exchange_with_each_other(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "moe_ep_bench", "doctor", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all-to-all") == 1, "the other rank prints problems and notes alone"
    assert "rank 0 of 2 over gloo: every value was right" in done.stdout


def test_more_ranks_than_the_machine_carries_are_a_problem() -> None:
    (finding,) = ranks_and_exchange(1000)
    assert (finding.status, finding.check) == (PROBLEM, "ranks")


# ---- what is found


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"power_limit_w": 500.0}, "capped at 500 W of 700 W"),
        (
            {"throttle_reasons": THROTTLE_REASONS["hw_thermal"], "temperature_c": 92.0},
            "slowed down now (hw_thermal; 92 C)",
        ),
        ({"memory_free_mib": 40000.0}, "51 % of its memory"),
        ({"utilization_percent": 97.0}, "97 % of its time"),
        ({"ecc_errors": 3}, "3 uncorrected memory errors"),
        ({"mig": "Enabled"}, "MIG is enabled"),
    ],
)
def test_what_makes_one_gpu_slow_is_named_with_its_number(state: dict[str, Any], words: str) -> None:
    (note,) = gpu_notes({**H100, **state})
    assert words in note


@pytest.mark.parametrize("state", [{}, {"throttle_reasons": THROTTLE_REASONS["power_cap"]}, dict.fromkeys(H100)])
def test_a_healthy_gpu_one_at_its_cap_and_one_that_says_nothing_have_no_notes(state: dict[str, Any]) -> None:
    assert list(gpu_notes({**H100, **state})) == []


@pytest.mark.parametrize(("seen", "status"), [("", NOTE), ("/dev/nvidia0", PROBLEM)])
def test_no_gpu_is_a_note_and_one_that_torch_cannot_use_a_problem(
    seen: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpus_in_sight", lambda: seen)
    (finding,) = doctor.gpus()
    assert (finding.status, seen in finding.words) == (status, True)


def test_a_driver_that_fails_costs_its_clocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    monkeypatch.setattr(doctor, "query_gpus", Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)))
    found, unknown = doctor.gpus()
    assert (found.words, unknown.status) == ("2 x H100", NOTE)
    assert "GPU is lost" in unknown.words


def test_what_a_gpu_run_does_without_is_a_note_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    notes = {finding.words.split(":")[0] for finding in doctor.packages() if finding.status == NOTE}
    assert {"no transformer_engine", "no apex", "no deep_ep"} <= notes


def test_triton_without_a_c_compiler_is_a_problem_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    lacking = toolchain.lacking()
    assert lacking == "no C compiler (gcc or clang)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert any(lacking in finding.words for finding in doctor.packages() if finding.status == PROBLEM)
    compiler = tmp_path / "cc"
    compiler.touch(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert toolchain.lacking() == f"no {tmp_path / 'Python.h'}"
    (tmp_path / "Python.h").touch()
    assert toolchain.lacking() == ""


# ---- the whole


@pytest.mark.parametrize("folder", [".", "a/b"])
def test_a_directory_is_tried_and_left_as_it_was(folder: str, tmp_path: Path) -> None:
    assert doctor.disk(tmp_path / folder).status == OK
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_and_a_full_disk_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert doctor.disk(tmp_path / "file" / "below").status == PROBLEM
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    assert doctor.disk(tmp_path).status == PROBLEM


def test_this_machine_is_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["doctor", "--out", str(out), "--nproc", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 120 for line in lines)
    for check in ("packages", "disk", "all-to-all"):
        assert any(line.startswith(f"ok      {check}") for line in lines), lines
    assert lines[-1] == "no problems: runs can start"
    assert not out.exists()


def test_a_number_of_ranks_that_is_none_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nproc", "0"]) == USER_ERROR
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n"), "--nproc: expected" in shown.err) == ("", 1, True)
