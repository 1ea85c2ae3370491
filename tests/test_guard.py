"""Nothing hangs for ever, nothing that moves is ended, and who is asked to end does so wherever it is stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_run import environment

from moe_ep_bench.runtime.attempts import collect_lost, lost_attempts

# A guarded rank: how long it may stand still, outside and in what it tries, and what it does there.
GUARDED = """
import ctypes, sys, time
from pathlib import Path
from moe_ep_bench.runtime.attempts import Attempt, Guard
from moe_ep_bench.runtime.torchrun import become_rank

folder, outside_s, timeout_s, does = sys.argv[1:]
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

with Guard(float(outside_s)) as guard:
    attempt = Attempt(Path(folder), "job", 0)
    with guard.trying(attempt, float(timeout_s)):
        guard.at("case")
        does == "leaves" or globals()[does]()
    if does == "leaves":
        guard.allow(0.1)  # Never less than it was.
        guard.allow(0.5)
        time.sleep(60.0)
time.sleep(1.0)
"""


def guarded(folder: Path, outside_s: float, timeout_s: float, does: str) -> subprocess.Popen:
    command = [sys.executable, "-c", GUARDED, str(folder), str(outside_s), str(timeout_s), does]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


@pytest.mark.parametrize("does", ["sleeps", "waits"])
def test_what_stands_still_is_ended_and_says_where(does: str, tmp_path: Path) -> None:
    job = guarded(tmp_path, 60.0, 1.0, does)
    _, errors = job.communicate(timeout=600)
    assert (job.returncode, errors) == (1, "")
    collect_lost(tmp_path, ["job"])
    assert lost_attempts(tmp_path, "case") == [f"timeout: no progress for 0:00:01 in {does} (rank 0)"]


def test_what_moves_is_not_ended_and_nobody_is_guarded_afterwards(tmp_path: Path) -> None:
    job = guarded(tmp_path, 0.9, 1.0, "moves")
    _, errors = job.communicate(timeout=600)
    assert (job.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_outside_of_what_is_tried_another_limit_counts(tmp_path: Path) -> None:
    job = guarded(tmp_path, 0.2, 60.0, "leaves")
    _, errors = job.communicate(timeout=600)
    assert job.returncode == 1
    assert errors.startswith("Timeout (0:00:00.500000)!\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("does", "number"), [("sleeps", signal.SIGINT), ("waits", signal.SIGTERM)])
def test_who_is_asked_to_end_ends_and_is_not_blamed(does: str, number: signal.Signals, tmp_path: Path) -> None:
    job = guarded(tmp_path, 60.0, 60.0, does)
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
