"""Nothing hangs for ever, and nothing that moves is ended."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from test_run import environment

from moe_ep_bench.runtime import watchdog
from moe_ep_bench.runtime.exit_codes import LOST

WATCHED = """
import time
from moe_ep_bench.runtime.watchdog import Watchdog

def sleeps():
    time.sleep(60.0)

dog = Watchdog(0.2, lambda reason: print(reason, flush=True))
dog.allow(1.0)
sleeps()
"""


def test_a_watchdog_ends_what_stands_still_and_says_where() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=600, env=environment(), check=False
    )
    assert done.returncode == LOST, done.stderr
    assert done.stdout == "timeout: no progress for 1 s in sleeps\n"
    reason, *stacks = done.stderr.splitlines()
    assert reason == "moe-ep-bench: timeout: no progress for 1 s in sleeps"
    assert any(line.endswith(" in sleeps") for line in stacks)


def test_only_what_stands_still_for_too_long_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(watchdog.Watchdog, "_watch", lambda self: None)
    dog = watchdog.Watchdog(1.0, print)

    def overdue_after(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        return dog.is_overdue()

    with dog.paused():
        assert not overdue_after(2.0)
    for _ in range(4):
        dog.feed()
        assert not overdue_after(0.75)
    dog.allow(0.25)  # Never less than it was.
    assert not overdue_after(0.75)
    dog.allow(3.0)
    assert not overdue_after(2.0)
    assert overdue_after(1.5)
    dog.feed()
    assert not overdue_after(2.0)


DEAF = """
import os, sys, time
from moe_ep_bench.runtime.watchdog import Watchdog

def fails(reason):
    raise OSError("the mark's disk is gone")

reads, writes = os.pipe()
os.close(reads)
os.dup2(writes, sys.stderr.fileno())
Watchdog(0.2, fails if sys.argv[1] == "mark" else print)
time.sleep(60.0)
"""


@pytest.mark.parametrize("broken", ["stderr", "mark"])
def test_a_watchdog_ends_what_stands_still_though_it_can_tell_nobody(broken: str) -> None:
    command = [sys.executable, "-c", DEAF, broken]
    assert subprocess.run(command, timeout=600, env=environment(), check=False).returncode == LOST
