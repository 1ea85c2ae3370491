"""Nothing hangs for ever, and nothing that moves is ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from test_run import environment

from moe_ep_bench.runtime import watchdog
from moe_ep_bench.runtime.device import is_busy
from moe_ep_bench.runtime.exit_codes import LOST

WATCHED = """
import sys, time
from moe_ep_bench.runtime.watchdog import Watchdog

def sleeps():
    time.sleep(60.0)

dog = Watchdog(60.0, lambda: "busy" in sys.argv)
with dog.during(1.0, lambda reason: print(reason, flush=True)):
    sleeps()
"""


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("idle", "timeout: no progress for 1 s in sleeps"),
        ("busy", "peer lost: other ranks did not come within 1 s"),
    ],
)
def test_a_watchdog_ends_what_stands_still_and_says_where_or_that_its_device_waits(device: str, reason: str) -> None:
    command = [sys.executable, "-c", WATCHED, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), check=False)
    assert done.returncode == LOST, done.stderr
    assert done.stdout == f"{reason}\n"
    said, *stacks = done.stderr.splitlines()
    assert said == f"moe-ep-bench: {reason}"
    assert any(line.endswith(" in sleeps") for line in stacks)


@pytest.mark.parametrize(
    ("device", "waits"),
    [
        (lambda: True, True),
        (lambda: False, False),
        (threading.Event().wait, True),  # The driver waits for its device, and whoever asks it waits too.
        (lambda: 1 / 0, False),
    ],
)
def test_a_rank_is_to_blame_only_where_its_device_has_nothing_left_to_do(
    device: Callable[[], bool], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host may wait in ``bool(tensor)``, in any line of anybody's: this very one, say."""
    monkeypatch.setattr(watchdog.Watchdog, "_watch", lambda self: None)
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.2)
    reason = watchdog.Watchdog(9.0, device)._reason()
    assert reason.startswith("peer lost" if waits else "timeout: no progress for 9 s in ")


def test_a_gpu_is_busy_while_its_stream_has_work_and_the_cpu_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    done = {0: True, 1: False}

    def default_stream(device: torch.device) -> SimpleNamespace:
        asked.append(device.index)
        return SimpleNamespace(query=lambda: done[device.index])

    monkeypatch.setattr(torch.cuda, "default_stream", default_stream)
    assert [is_busy(torch.device("cuda", index)) for index in (0, 1)] == [False, True]
    assert not is_busy(torch.device("cpu"))
    assert asked == [0, 1]


def test_only_what_stands_still_for_too_long_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(watchdog.Watchdog, "_watch", lambda self: None)
    dog = watchdog.Watchdog(1.0)

    def overdue_after(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        return dog.is_overdue()

    with dog.during(3.0, print):
        assert not overdue_after(2.0)
        assert overdue_after(2.0)
    assert not overdue_after(0.75), "leaving is moving"
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
with Watchdog().during(0.2, fails if sys.argv[1] == "mark" else print):
    time.sleep(60.0)
"""


@pytest.mark.parametrize("broken", ["stderr", "mark"])
def test_a_watchdog_ends_what_stands_still_though_it_can_tell_nobody(broken: str) -> None:
    command = [sys.executable, "-c", DEAF, broken]
    assert subprocess.run(command, timeout=600, env=environment(), check=False).returncode == LOST
