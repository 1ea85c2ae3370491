"""A process that is asked to end does so at once, says so, and is blamed for nothing, wherever it is stuck.

Python runs a signal's handler between two bytecodes. A rank that waits in native code, in a collective to which nobody
comes or on a device, never gets there. The C part of the handler writes the signal's number into a pipe
(``signal.set_wakeup_fd``), and a thread that reads it ends the process. What is finished lies on disk by then: files
are renamed when they are whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator

from moe_ep_bench.runtime.crash_journal import stopped_reason
from moe_ep_bench.runtime.torchrun import ask_to_close

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_explain: list[Callable[[str], None]] = []


@contextlib.contextmanager
def ends_on_signals(say: Callable[[], object]) -> Iterator[None]:
    """In the block, end the process with 128 + signal at SIGTERM or SIGINT; SIGUSR1 asks ranks to close.

    For the main thread only. ``say``, the last words, is called on a thread of its own.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def watch() -> None:
        with open(reads, "rb", buffering=0) as numbers:
            for data in iter(lambda: numbers.read(1), b""):
                if data[0] == signal.SIGUSR1:
                    ask_to_close()
                elif data[0] in (signal.SIGTERM, signal.SIGINT):
                    _end(data[0], say)

    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    earlier = {number: signal.signal(number, lambda number, frame: None) for number in handled}
    earlier_fd = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        os.close(writes)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _end(number: int, say: Callable[[], object]) -> None:
    try:
        for explain in _explain:
            explain(stopped_reason(number))
        say()
    finally:  # Though nobody may hear it.
        os._exit(128 + number)


@contextlib.contextmanager
def explaining(explain: Callable[[str], None]) -> Iterator[None]:
    """Call ``explain`` with the reason where a signal ends the process in the block."""
    _explain.append(explain)
    try:
        yield
    finally:
        _explain.remove(explain)


def end_with_parent() -> None:
    """In a rank: have the kernel send SIGTERM when torchrun's process is gone. Before torch is imported."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
