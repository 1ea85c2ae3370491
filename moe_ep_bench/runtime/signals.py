"""A job that is asked to end does so, says so, and leaves no rank behind, wherever it is stuck.

    stoppable          SIGTERM and SIGINT end a run at once; no case is blamed, and the same command goes on later
    closing_on_signal  after SIGUSR1 a launcher's ranks finish the comparison that they measure and begin no other
    end_with_parent    the kernel sends a rank SIGTERM when its launcher is gone

Python runs a signal's handler between two bytecodes. A rank that waits in native code, in a collective to which nobody
comes or on a device, never gets there. So the C part of the handler also writes the signal's number into a pipe
(``signal.set_wakeup_fd``); a thread reads it, gives the main thread a moment, and else ends the process in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from moe_ep_bench.runtime.crash_journal import stopped_reason

LAUNCHER = "MOE_EP_BENCH_LAUNCHER"
"""Environment variable of ranks: process id of our own launcher. torchrun's agent sets no such thing."""

_CLOSE_FILE = "MOE_EP_BENCH_CLOSING"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# For the main thread to run its handler; then to leave what it was doing, groups of ranks included. Clusters kill 30 s
# after SIGTERM, and so does torchrun's agent.
_STUCK_S, _LEAVE_S = 3.0, 10.0

_explain: list[Callable[[str], None]] = []


class Stopped(BaseException):
    """The run was asked to end, by signal number ``args[0]`` (SIGTERM, SIGINT)."""


def raise_at_first(numbers: Iterable[int], error: Callable[[int], BaseException]) -> dict[int, Any]:
    """Raise ``error(number)`` in the main thread at the first of these signals; ignore all later ones.

    A cluster signals every process of a job, some more than once. Returns the handlers that were there before.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        set_handlers(dict.fromkeys(earlier, signal.SIG_IGN))
        raise error(number)

    earlier: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    set_handlers(dict.fromkeys(earlier, stop))
    return earlier


def set_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def signals_wait(numbers: Iterable[int]) -> Iterator[None]:
    """Handle those of these signals that come in the block after it.

    Not by the kernel's mask, which processes that are started in the block would inherit.
    """
    came: list[int] = []
    earlier = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    set_handlers(dict.fromkeys(earlier, lambda number, frame: came.append(number)))
    try:
        yield
    finally:
        set_handlers(earlier)
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped in the block at the first signal, and end the process with 128 + signal where that cannot be.

    Signals stay ignored after one was taken. For the main thread only.
    """
    raised, left = threading.Event(), threading.Event()

    def stopped(number: int) -> Stopped:
        raised.set()
        return Stopped(number)

    def watch() -> None:
        # Open to the end: a second signal (`timeout` sends one to the process, one to its group) finds no broken pipe.
        with open(reads, "rb", buffering=0) as came:
            number = next((data[0] for data in iter(lambda: came.read(1), b"") if data[0] in earlier), None)
            if number is None or (raised.wait(_STUCK_S) and left.wait(_LEAVE_S)):
                return
        try:
            for explain in _explain:
                explain(stopped_reason(number))
        finally:
            os._exit(128 + number)

    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    earlier_fd = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    earlier = raise_at_first((signal.SIGTERM, signal.SIGINT), stopped)
    threading.Thread(target=watch, name="stopping", daemon=True).start()
    try:
        yield
    finally:
        if not raised.is_set():
            set_handlers(earlier)
        signal.set_wakeup_fd(earlier_fd)
        left.set()
        os.close(writes)


@contextlib.contextmanager
def explaining(explain: Callable[[str], None]) -> Iterator[None]:
    """Call ``explain`` with the reason where a signal ends the process in the block and the main thread is stuck."""
    _explain.append(explain)
    try:
        yield
    finally:
        _explain.remove(explain)


@contextlib.contextmanager
def closing_on_signal() -> Iterator[None]:
    """In a launcher: turn SIGUSR1 into a request that the ranks started meanwhile can see (``asked_to_close``).

    The request is a file, named in the ranks' environment: signals would reach the ranks of one node only.
    """
    usr1, over = {signal.SIGUSR1}, threading.Event()

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, usr1)
        over.wait()

    with tempfile.TemporaryDirectory(prefix="moe-ep-bench-") as folder:
        request = Path(folder, "close")
        earlier = signal.signal(signal.SIGUSR1, lambda number, frame: request.touch())
        # Ranks inherit this thread's mask, so that a cluster that signals all processes of a job does not end them.
        # What is meant for this process goes to a thread that does nothing else.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, usr1)
        thread = threading.Thread(target=take, name="closing", daemon=True)
        thread.start()
        os.environ[_CLOSE_FILE] = str(request)
        try:
            yield
        finally:
            del os.environ[_CLOSE_FILE]
            over.set()
            thread.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGUSR1, earlier)


def asked_to_close() -> bool:
    """Whether this rank's launcher was asked to end after the comparison that is measured."""
    request = os.environ.get(_CLOSE_FILE)
    return request is not None and os.path.exists(request)


def end_with_parent() -> None:
    """In a rank that torchrun or our launcher started: end when the parent is gone. Elsewhere do nothing.

    Called before torch is imported, which takes seconds. The parent is looked at afterwards: one that died before the
    kernel was asked sends no signal.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        print("moe-ep-bench: the launcher of this rank is gone", file=sys.stderr)
        os._exit(128 + signal.SIGTERM)
