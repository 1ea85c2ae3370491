"""A process that is asked to end does so and says why, wherever it is stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_run import environment

from moe_ep_bench.runtime import signals

ASKED = """
import ctypes, sys, time
from pathlib import Path
from moe_ep_bench.runtime import signals
from moe_ep_bench.runtime.crash_journal import Mark

mark = Mark(Path(sys.argv[1]), "job", 0)
mark.set("case")
with signals.ends_on_signals(lambda: print('last words', file=sys.stderr)), signals.explaining(mark.explain):
    # A lock that is taken twice: native code that no signal ends, as a collective to which nobody comes.
    lib, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    print("ready", flush=True)
    for _ in range(2):
        time.sleep(60) if sys.argv[2] == "sleeps" else lib.pthread_mutex_lock(lock)
"""


def test_a_signal_after_the_end_is_not_for_the_run_any_more() -> None:
    earlier = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with signals.ends_on_signals(lambda: None):
        assert signal.getsignal(signal.SIGTERM) != earlier[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == earlier
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(("where", "number"), [("sleeps", signal.SIGINT), ("stuck", signal.SIGTERM)])
def test_who_is_asked_to_end_ends_and_says_so(where: str, number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKED, str(tmp_path), where]
    asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert asked.stdout is not None
        assert asked.stdout.readline() == "ready\n"
        time.sleep(0.2)
        asked.send_signal(number)
        _, errors = asked.communicate(timeout=600)
    finally:
        asked.kill()
    assert asked.returncode == 128 + number
    assert errors == "last words\n"
    (mark,) = tmp_path.iterdir()
    assert f"stopped by signal {number:d}".encode() in mark.read_bytes()
