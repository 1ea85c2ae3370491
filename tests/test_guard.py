"""Nothing hangs for ever, nothing that moves is ended, and who is asked to end does so wherever it is stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_run import environment

from moe_ep_bench.errors import LOST
from moe_ep_bench.runtime.attempts import collect_lost, lost_attempts

# A guarded rank: how long it may stand still, and what it does.
GUARDED = """
import ctypes, sys, time
from pathlib import Path
from moe_ep_bench.errors import LOST
from moe_ep_bench.runtime.attempts import Guard
from moe_ep_bench.runtime.torchrun import become_rank

folder, timeout_s, does = sys.argv[1:]
become_rank()

def moves():
    for _ in range(30):
        time.sleep(0.1)
        guard.feed()

def sleeps():
    print("ready", flush=True)
    time.sleep(60.0)

def waits():  # A lock that is taken twice: code that no signal interrupts, as a collective to which nobody comes.
    print("ready", flush=True)
    lib, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    for _ in range(2):
        lib.pthread_mutex_lock(lock)

with Guard(Path(folder), "job", 0, float(timeout_s)) as guard:
    guard.at("case")
    globals()[does]()
time.sleep(2.5)
"""


def guarded(folder: Path, timeout_s: float, does: str, rank: str = "0") -> subprocess.Popen:
    command = [sys.executable, "-c", GUARDED, str(folder), str(timeout_s), does]
    env = environment() | ({"RANK": rank} if rank else {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize("does", ["sleeps", "waits"])
@pytest.mark.parametrize("rank", ["0", ""], ids=["a rank, for torchrun", "alone"])
def test_what_stands_still_is_ended_and_says_where(does: str, rank: str, tmp_path: Path) -> None:
    job = guarded(tmp_path, 1.0, does, rank)
    _, errors = job.communicate(timeout=600)
    words = f"moe-ep-bench: no progress for 0:00:01 in {does}; the same command goes on\n"
    assert (job.returncode, errors) == ((1, "") if rank else (LOST, words)), "1 would say that it went through"
    collect_lost(tmp_path, ["job"])
    assert lost_attempts(tmp_path, "case") == [("timeout", f"no progress for 0:00:01 in {does} (rank 0)")]


@pytest.mark.parametrize("rank", ["0", ""], ids=["a rank", "alone"])
def test_what_moves_is_not_ended_and_nobody_is_guarded_afterwards(rank: str, tmp_path: Path) -> None:
    job = guarded(tmp_path, 2.0, "moves", rank)
    _, errors = job.communicate(timeout=600)
    assert (job.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("does", "number"), [("sleeps", signal.SIGINT), ("waits", signal.SIGTERM)])
def test_who_is_asked_to_end_ends_and_is_not_blamed(does: str, number: signal.Signals, tmp_path: Path) -> None:
    job = guarded(tmp_path, 60.0, does)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGUSR1)  # torchrun's process handles it.
        job.send_signal(number)
        _, errors = job.communicate(timeout=600)
    finally:
        job.kill()
    assert (job.returncode, errors) == (-number, "")
    collect_lost(tmp_path, ["job"])
    assert list(tmp_path.iterdir()) == []
