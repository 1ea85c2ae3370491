"""Claims about the doctor: it tells what is so and what it costs; it ends, and its exit status tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_run import environment

from moe_ep_bench import kernels
from moe_ep_bench.errors import CASES_FAILED, LOST
from moe_ep_bench.machine import doctor
from moe_ep_bench.machine.doctor import NOTE, OK, PROBLEM


def examined(out: Path, *torchrun: str, faults: str = "", nproc: int = 2) -> subprocess.CompletedProcess[str]:
    how = ["--nproc", str(nproc)] if not torchrun else []
    command = [sys.executable, *torchrun, "-m", "moe_ep_bench", "doctor", "--out", str(out), *how]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment(faults))


def test_this_machine_is_examined(tmp_path: Path) -> None:
    done = examined(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for check in ("packages", "disk", "all-to-all"):
        assert sum(line.startswith(f"ok      {check}") for line in lines) == 1, lines
    assert "rank 0 of 2 over gloo: every value was right" in done.stdout
    assert lines[-1] == "no problems: runs can start"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("wrong", "rank 0 of 2 over gloo: rank 1: 1 of 393,216 values from rank 0 came wrong"),
        ("kill", "rank 0 of 2 over gloo: "),
    ],
)
def test_a_wrong_value_and_a_lost_rank_are_problems(fault: str, words: str, tmp_path: Path) -> None:
    done = examined(tmp_path, faults=f"exchange={fault}")
    assert done.returncode == (CASES_FAILED if fault == "wrong" else LOST), done.stdout + done.stderr
    assert f"problem all-to-all  {words}" in done.stdout


def test_somebodys_own_torchrun_has_its_ranks_exchange(tmp_path: Path) -> None:
    done = examined(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every value was right") == 1, "the other rank prints problems and notes alone"


def test_a_doctor_that_hangs_is_ended(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from moe_ep_bench.machine import doctor; doctor._LIMIT_S = 0.2; "
        "doctor.exchange = lambda: iter(lambda: time.sleep(600), 0); doctor.doctor(Path(sys.argv[1]), None)"
    )
    of_rank = {**environment(), "RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=of_rank, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (0:00:00.200000)!")


def test_no_gpu_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = doctor.gpus()
    assert finding.status == NOTE
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    assert [*doctor.gpus()] == [(OK, "GPUs", "2 x H100")]


def test_what_a_gpu_run_does_without_is_a_note_and_triton_without_a_compiler_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    notes = {finding.words.split(":")[0] for finding in doctor.packages() if finding.status == NOTE}
    assert {"no transformer_engine", "no apex"} <= notes
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert kernels.lacking() == "no C compiler (gcc or clang)"
    assert any(kernels.lacking() in finding.words for finding in doctor.packages() if finding.status == PROBLEM)
    compiler = tmp_path / "cc"
    compiler.touch(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(kernels.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert kernels.lacking() == f"no {tmp_path / 'Python.h'}"
    (tmp_path / "Python.h").touch()
    assert kernels.lacking() == ""


def test_a_directory_is_tried_and_left_as_it_was_and_one_that_takes_nothing_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(out: Path) -> str:
        (finding,) = doctor.disk(out)
        return finding.status

    assert [status(tmp_path / folder) for folder in (".", "a/b")] == [OK, OK]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert status(tmp_path / "file" / "below") == PROBLEM
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    assert status(tmp_path) == PROBLEM
