"""A rank that is asked to end does so and says why, wherever it is stuck."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_run import environment

from moe_ep_bench.runtime import signals
from moe_ep_bench.runtime.crash_journal import stopped_by

ASKED = """
import ctypes, sys, time
from pathlib import Path
from moe_ep_bench.runtime import signals
from moe_ep_bench.runtime.crash_journal import Mark, stopped_reason

signals._STUCK_S, signals._LEAVE_S = 2.0, 2.0
mark = Mark(Path(sys.argv[1]), "job", 0)
mark.set("case")

def stuck():
    # A lock that is taken twice: native code that no signal ends, as a collective to which nobody comes.
    lib, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    print("ready", flush=True)
    for _ in range(2):
        lib.pthread_mutex_lock(lock)

def sleeps():
    print("ready", flush=True)
    time.sleep(60)

try:
    with signals.stoppable():
        try:
            with signals.explaining(mark.explain):
                (stuck if sys.argv[2] == "stuck" else sleeps)()
        except signals.Stopped as stopped:
            mark.explain(stopped_reason(stopped.args[0]))
            if sys.argv[2] == "leaves":
                stuck()
            raise
except signals.Stopped as stopped:
    time.sleep(3.0)  # Whoever has left in time is not ended any more.
    sys.exit(100)
"""


TWICE = """
import hashlib, os, signal, sys, threading, time
from moe_ep_bench.runtime import signals

def send():
    for _ in range(2):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

try:
    with signals.stoppable():
        threading.Thread(target=send, daemon=True).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))  # native code: handlers run after it
except signals.Stopped as stopped:
    sys.exit(100)
"""


def test_a_second_signal_leaves_no_traceback() -> None:
    """As ``timeout`` ends a job: once by its process id, once with its group."""
    began = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
    rounds = round(1.5 * 200_000 / (time.monotonic() - began))
    asked = [sys.executable, "-c", TWICE, str(rounds)]
    ended = subprocess.run(asked, capture_output=True, text=True, env=environment(), timeout=600, check=False)
    assert (ended.returncode, ended.stderr) == (100, "")


def test_a_signal_after_the_end_is_not_for_the_run_any_more() -> None:
    earlier = signal.getsignal(signal.SIGTERM)
    with signals.stoppable():
        assert signal.getsignal(signal.SIGTERM) != earlier
    assert signal.getsignal(signal.SIGTERM) == earlier
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("where", "status", "number"),
    [
        ("sleeps", 100, signal.SIGINT),
        ("stuck", 128, signal.SIGTERM),
        ("leaves", 128, signal.SIGINT),
    ],
)
def test_who_is_asked_to_end_ends_and_says_so(where: str, status: int, number: signal.Signals, tmp_path: Path) -> None:
    asked = subprocess.Popen(
        [sys.executable, "-c", ASKED, str(tmp_path), where], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert asked.stdout is not None
        assert asked.stdout.readline() == "ready\n"
        time.sleep(0.2)
        asked.send_signal(number)
        asked.communicate(timeout=600)
    finally:
        asked.kill()
    assert asked.returncode == (status if status == 100 else 128 + number)
    assert stopped_by(tmp_path, "job") == number
