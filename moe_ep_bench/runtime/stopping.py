"""How a rank ends that is asked to (SIGTERM, SIGINT), also where it is stuck.

Python runs a signal's handler between two of its own steps. A rank that waits in native code, for a collective to which
nobody comes or a device that computes for ever, takes no such step: it would be killed in the end and have said
nothing, and a case would be blamed. The kernel's part of the handler runs all the same, and writes the signal's number
into a pipe (``signal.set_wakeup_fd``). A thread reads it, leaves the main thread a moment, and otherwise ends the
process in its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from moe_ep_bench.runtime.crash_journal import stopped_reason

_STOPPING = (signal.SIGTERM, signal.SIGINT)
# For the main thread to run its handler; then to leave what it was doing, groups of ranks included. Clusters kill 30 s
# after SIGTERM, and so does torchrun's agent.
_STUCK_S, _LEAVE_S = 3.0, 10.0

_explain: list[Callable[[str], None]] = []


class Stopped(BaseException):
    """The run was asked to end, by signal number ``args[0]`` (SIGTERM, SIGINT)."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped in the block at the first signal, and end the process with 128 + signal where that cannot be.

    Signals stay ignored after one was taken. For the main thread only.
    """
    raised, left = threading.Event(), threading.Event()

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        # A cluster signals every process of a job, and so does the launcher: once is enough.
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raised.set()
        raise Stopped(number)

    def watch() -> None:
        with open(reads, "rb", buffering=0) as came:
            number = next((data[0] for data in iter(lambda: came.read(1), b"") if data[0] in _STOPPING), None)
        if number is not None and not (raised.wait(_STUCK_S) and left.wait(_LEAVE_S)):
            _end(number)

    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    earlier_fd = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="stopping", daemon=True).start()
    earlier = {each: signal.signal(each, stop) for each in _STOPPING}
    try:
        yield
    finally:
        if not raised.is_set():
            for each, handler in earlier.items():
                signal.signal(each, handler)
        left.set()
        signal.set_wakeup_fd(earlier_fd)
        os.close(writes)


@contextlib.contextmanager
def explaining(explain: Callable[[str], None]) -> Iterator[None]:
    """While the block lasts, have ``explain`` told why this process ends where the main thread cannot say it."""
    _explain.append(explain)
    try:
        yield
    finally:
        _explain.remove(explain)


def _end(number: int) -> NoReturn:
    try:
        for explain in _explain:
            explain(stopped_reason(number))
    finally:
        os._exit(128 + number)
