"""Claims about GPUs or the CPU: a run never takes the CPU because torch cannot use the GPUs that there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from test_run import write_config

from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK, USER_ERROR, UserError
from moe_ep_bench.runtime import torchrun
from moe_ep_bench.runtime.ranks import Ranks, join
from moe_ep_bench.runtime.torchrun import check_num_ranks, device_type, take_cpu

H100 = {"name": "NVIDIA H100 80GB HBM3", "driver": "550.54.15"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which nobody has said anything, and whose driver and torch see no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # So that what a test sets is taken back.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torchrun, "query_gpus", lambda: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torchrun, "_DEVICES", tmp_path)
    return monkeypatch


def test_gpus_that_torch_cannot_use_are_refused_with_the_reason(machine: pytest.MonkeyPatch) -> None:
    assert device_type() == "cpu", "there are none"
    machine.setattr(torchrun, "query_gpus", lambda: [H100])
    too_old = RuntimeError("The NVIDIA driver on your system\nis too old (found version 12040)")
    machine.setattr(torch.cuda, "init", Mock(side_effect=too_old))
    asks = r"H100 80GB HBM3, driver 550.54.15, and torch can use none .* is too old .* --cuda12 .* --cpu"
    for asked in (device_type, lambda: join(1.0)):
        with pytest.raises(UserError, match=asks):
            asked()
    machine.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_type() == "cpu", "the GPUs were hidden on purpose"


def test_gpus_that_a_job_may_not_use_are_refused_unless_the_cpu_is_asked_for(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    machine.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    with pytest.raises(UserError, match=r"GPUs: /.*/nvidia0, .*--gpus-per-node.*--cpu"):
        device_type()
    take_cpu()
    assert device_type() == "cpu"


COMMANDS = {
    "calibrate": ["--nproc", "2"],
    "run": ["--nproc", "2"],
    "emulate": [],
    "validate": ["--nproc", "2"],
    "papers": ["--nproc", "2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_measure_end_with_2_and_start_nothing(
    machine: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    machine.setattr(torchrun, "query_gpus", lambda: [H100])
    claims = [{"source": "Table 1", "policy": {"name": "topk"}, "paper": 1.1, "note": "none"}]
    config = write_config(tmp_path, emulate={"links": "h100-nvlink4"}, layer__ep_size=2, claims=claims)
    out = tmp_path / "out"
    what = ["--out", f"{out}.yaml"] if command == "calibrate" else [str(config), "--out", str(out)]
    assert main([command, *what, *COMMANDS[command]]) == USER_ERROR
    assert "the driver lists NVIDIA H100" in capsys.readouterr().err
    assert not list(out.rglob("*.parquet"))


def test_cpu_asks_for_the_cpu_and_what_is_modelled_asks_for_nothing(
    machine: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.setattr(torchrun, "query_gpus", lambda: [H100])
    measured = write_config(tmp_path)
    assert main(["run", str(measured), "--nproc", "2", "--dry-run"]) == USER_ERROR
    assert main(["run", str(measured), "--nproc", "2", "--dry-run", "--cpu"]) == OK
    machine.delenv("CUDA_VISIBLE_DEVICES")
    ranks = join(10.0, measures=False)
    assert ranks.backend == "gloo"
    ranks.close()


def test_more_ranks_than_a_node_carries_are_refused_before_any_starts(
    machine: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    check_num_ranks(4)
    assert main(["run", str(write_config(tmp_path)), "--nproc", "1000", "--out", str(tmp_path / "out")]) == USER_ERROR
    assert "--nproc: expected at most 4 (for 2 cores), got 1000" in capsys.readouterr().err
    machine.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    check_num_ranks(32)
    machine.setattr(torch.cuda, "is_available", lambda: True)
    machine.setattr(torch.cuda, "device_count", lambda: 8)
    check_num_ranks(8)
    with pytest.raises(UserError, match=r"expected at most 8 \(the GPUs here\), got 9"):
        check_num_ranks(9)


def test_more_ranks_than_cores_are_flagged_on_gpus_too(machine: pytest.MonkeyPatch) -> None:
    """A rank may be bound to the cores near its GPU; torchrun is not."""
    cores = {0: {4, 5}, os.getppid(): set(range(8))}
    machine.setattr(os, "sched_getaffinity", lambda pid: set(cores[pid]))
    ranks = Ranks(0, 8, 8, torch.device("cuda", 0), cast(Any, None))
    machine.setenv("RANK", "0")
    assert not ranks.oversubscribed
    machine.delenv("RANK")
    assert ranks.oversubscribed


def test_nccl_leaves_a_rank_that_waits_to_our_guard(machine: pytest.MonkeyPatch) -> None:
    """Its own handling aborts a survivor without a word, and who ends so is blamed."""
    machine.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"):
        machine.setenv(name, "")
        machine.delenv(name)
    machine.setattr(torch.cuda, "is_available", lambda: True)
    machine.setattr(torch.cuda, "device_count", lambda: 1)
    machine.setattr(torch.cuda, "set_device", lambda device: None)
    machine.setattr(torch.distributed, "init_process_group", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        join(1.0)
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3", "what a user has set stays"
