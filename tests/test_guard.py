"""Nothing hangs for ever, nothing that moves is ended, and whoever is asked to end does so wherever it is stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_run import environment

from moe_ep_bench.runtime import guard as module
from moe_ep_bench.runtime.exit_codes import LOST
from moe_ep_bench.runtime.guard import Guard

# A guarded process: how long it may stand still, where it does, and whether it can say anything.
GUARDED = """
import ctypes, os, sys, time
from pathlib import Path
from moe_ep_bench.runtime.attempts import Attempt
from moe_ep_bench.runtime.guard import Guard

folder, timeout_s, where, *deaf = sys.argv[1:]
attempt = Attempt(Path(folder), "job", 0)

def stands():
    if where != "native":
        time.sleep(60.0)
    # A lock that is taken twice: code that no signal ends, as a collective to which nobody comes.
    lib, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    for _ in range(2):
        lib.pthread_mutex_lock(lock)

if "stderr" in deaf:
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, sys.stderr.fileno())
with Guard(60.0) as guard:
    with guard.trying(attempt, float(timeout_s)):
        guard.at("case")
        print("ready", flush=True)
        if "attempt" in deaf:
            attempt._file = -1
        stands()
"""


def guarded(folder: Path, timeout_s: float, where: str, *deaf: str) -> subprocess.Popen:
    command = [sys.executable, "-c", GUARDED, str(folder), str(timeout_s), where, *deaf]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def test_what_stands_still_is_ended_and_says_where(tmp_path: Path) -> None:
    job = guarded(tmp_path, 1.0, "sleeps")
    _, errors = job.communicate(timeout=600)
    assert job.returncode == LOST, errors
    said, *stacks = errors.splitlines()
    reason = "timeout: no progress for 1 s in stands"
    assert said == f"moe-ep-bench: {reason}"
    assert any(line.endswith(" in stands") for line in stacks)
    (left,) = tmp_path.iterdir()
    assert left.read_text().rstrip("\0") == f"1\ncase\n{reason}"


@pytest.mark.parametrize("deaf", ["stderr", "attempt"])
def test_what_stands_still_is_ended_though_it_can_tell_nobody(deaf: str, tmp_path: Path) -> None:
    job = guarded(tmp_path, 0.2, "sleeps", deaf)
    job.communicate(timeout=600)
    assert job.returncode == LOST


@pytest.mark.parametrize(("where", "number"), [("sleeps", signal.SIGINT), ("native", signal.SIGTERM)])
def test_who_is_asked_to_end_ends_and_says_so(where: str, number: signal.Signals, tmp_path: Path) -> None:
    job = guarded(tmp_path, 60.0, where)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        time.sleep(0.2)
        job.send_signal(number)
        _, errors = job.communicate(timeout=600)
    finally:
        job.kill()
    assert (job.returncode, errors) == (128 + number, f"moe-ep-bench: {module.STOPPED_WORDS}\n")
    (left,) = tmp_path.iterdir()
    assert f"stopped by signal {number:d}".encode() in left.read_bytes()


def test_a_signal_after_the_end_is_not_for_the_run_any_more() -> None:
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    earlier = [signal.getsignal(number) for number in handled]
    with Guard():
        assert not set(earlier) & {signal.getsignal(number) for number in handled}
    assert [signal.getsignal(number) for number in handled] == earlier
    assert signal.set_wakeup_fd(-1) == -1


def test_only_what_stands_still_for_too_long_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    guard = Guard(1.0)

    def overdue_after(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        return guard.is_overdue()

    cleared = []
    with guard.trying(SimpleNamespace(clear=lambda: cleared.append(True), name=print), 3.0):
        assert not overdue_after(2.0)
        assert overdue_after(2.0)
        guard.at("case")
        assert not overdue_after(2.0)
    assert cleared == [True]
    assert not overdue_after(0.75), "leaving is moving"
    guard.feed()
    assert not overdue_after(0.75)
    guard.allow(0.25)  # Never less than it was.
    assert not overdue_after(0.75)
    guard.allow(3.0)
    assert not overdue_after(2.0)
    assert overdue_after(1.5)
