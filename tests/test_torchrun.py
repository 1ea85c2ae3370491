"""Claims about starting ranks by torchrun: the status is what ranks agreed on, whatever torchrun makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from test_run import environment
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from moe_ep_bench.errors import CASES_FAILED, CLOSED, LOST, OK
from moe_ep_bench.runtime import torchrun as torchrun_module
from moe_ep_bench.runtime.torchrun import asked_to_close, launched_plan, leave_status, local_ranks, torchrun

FAILURE = ProcessFailure(local_rank=1, pid=1, exitcode=-9, error_file="")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[Sequence[str]]]:
    """Let a function stand for all that torchrun does; returns the command lines that torchrun gets."""
    for name in ("PET_NNODES", "PET_MAX_RESTARTS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    commands: list[Sequence[str]] = []

    def stand_in(does: Callable[[], object]) -> list[Sequence[str]]:
        monkeypatch.setattr(torch_run, "main", lambda command: (commands.append(command), does()))
        return commands

    return stand_in


def agree(status: int, local_rank: int = 0, node: int = 0) -> None:
    os.environ.update(LOCAL_RANK=str(local_rank), GROUP_RANK=str(node))
    try:
        assert leave_status(status) == 0, "a rank that fails would be started again"
    finally:
        del os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]


def fail(error: Exception) -> Callable[[], object]:
    def does() -> None:
        agree(CASES_FAILED, local_rank=1)  # Only a node's first rank is asked.
        raise error

    return does


def test_the_status_is_what_the_ranks_agreed_on_and_ranks_know_nothing_of_it_elsewhere(ranks) -> None:
    commands = ranks(lambda: agree(CASES_FAILED))
    assert torchrun([["run", "config.yaml"]], 2, max_restarts=3) == (CASES_FAILED, True)
    (command,) = commands
    assert {"--nproc-per-node=2", "--max-restarts=3", "--standalone"} < set(command)
    assert command[-4:] == ["-m", "moe_ep_bench", "run", "config.yaml"]
    assert leave_status(CASES_FAILED) == CASES_FAILED, "somebody's own torchrun"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ChildFailedError("moe_ep_bench", {1: FAILURE}), LOST),
        (RendezvousTimeoutError("too few"), LOST),
        (SignalException("asked", signal.SIGTERM), 128 + signal.SIGTERM),
    ],
)  # fmt: skip
def test_ranks_that_could_not_agree_are_lost_and_a_signal_is_told(error: Exception, status: int, ranks) -> None:
    ranks(fail(error))
    assert torchrun([["run"]], 1) == (status, False)


def test_nodes_that_do_not_meet_are_told_where_and_why(
    ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RendezvousConnectionError("see the inner exception")
    error.__cause__ = RuntimeError("timed out\nafter 8 s")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "node1:29400")
    ranks(fail(error))
    assert torchrun([["run"]], 1).status == LOST
    expected = "moe-ep-bench: torchrun at node1:29400: RendezvousConnectionError: timed out after 8 s\n"
    assert capsys.readouterr().err == expected


def test_the_worst_of_several_launches_counts_and_none_is_begun_after_one_was_lost(ranks) -> None:
    left = iter([CASES_FAILED, OK])
    ranks(lambda: agree(next(left)))
    assert torchrun([["run"]] * 2, 1) == (CASES_FAILED, True)
    left = iter([OK])
    commands = ranks(lambda: [agree(status) for status in left])  # The second leaves no status.
    assert torchrun([["run"]] * 3, 1) == (LOST, False)
    assert len(commands) == 4


def test_sigusr1_is_a_request_to_close_that_ranks_of_later_launches_find_too(ranks) -> None:
    asked: list[bool] = []

    def does() -> None:
        asked.append(asked_to_close())
        signal.raise_signal(signal.SIGUSR1)
        asked.append(asked_to_close())
        agree(CLOSED if asked[0] else OK, node=1)
        asked[:1] = [asked_to_close()]

    commands, earlier = ranks(does), signal.getsignal(signal.SIGUSR1)
    assert torchrun([["run"]] * 3, 1) == (CLOSED, False), "of the second node"
    assert len(commands) == 2, "what follows is not begun"
    assert signal.getsignal(signal.SIGUSR1) == earlier
    assert not asked_to_close()


def test_every_launch_finds_the_plan_and_somebody_elses_ranks_find_none(ranks) -> None:
    found: list[str | None] = []
    ranks(lambda: (found.append(launched_plan()), agree(OK)))
    torchrun([["run"]] * 2, 1, plan='{"hash": "h"}')
    assert found == ['{"hash": "h"}'] * 2
    assert launched_plan() is None


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_what_the_user_has_set_stays_and_several_nodes_meet_where_it_says(
    nodes: str, ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    commands = ranks(lambda: seen.append(os.environ.get("OMP_NUM_THREADS")))
    monkeypatch.setenv("PET_NNODES", nodes)
    torchrun([["run"]], 1)
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    torchrun([["run"]], 1)
    assert seen == ["1", "4"]
    assert ("--standalone" in commands[-1]) == (nodes == "1")


LEAVING = """
import atexit, runpy, sys, time
atexit.register(time.sleep, 1000)  # As a destructor that waits for peers.
sys.argv = ["moe-ep-bench", "run", sys.argv[1], "--list-points"]
runpy.run_module("moe_ep_bench", run_name="__main__")
"""


def test_a_rank_waits_for_nothing_at_its_end_and_all_that_it_said_arrives() -> None:
    command = [sys.executable, "-c", LEAVING, "configs/quickstart.yaml"]
    env = {**environment(), "RANK": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert done.returncode == OK, done.stderr
    assert done.stdout == "0\n"


def test_where_the_driver_lists_no_gpu_ranks_are_of_cores_and_torch_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(torchrun_module, "_seen_gpus", lambda: "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    assert local_ranks(None) == 3
    assert "torch" not in sys.modules
