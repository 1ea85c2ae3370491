"""End this process where it is stuck or asked to end: no hang lasts, and whoever is asked to end is blamed for nothing.

Python runs a signal's handler between two bytecodes. A rank that waits in native code, in a collective to which nobody
comes or on a device, never gets there. The C part of the handler writes the signal's number into a pipe
(``signal.set_wakeup_fd``), and a thread that reads it ends the process. The same thread ends it where nothing has moved
for too long, with all stacks in the log. ``faulthandler.dump_traceback_later`` would too, but leaves no reason. What is
finished lies on disk by then: files are renamed when they are whole.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from moe_ep_bench.errors import brief
from moe_ep_bench.runtime.attempts import STOPPED, Attempt
from moe_ep_bench.runtime.exit_codes import LOST
from moe_ep_bench.runtime.torchrun import ask_to_close, leave_status

# Ranks that wait for one that hangs are overdue soon after it or before: once a rank has ended, torchrun stops the
# others, and they could no longer say where they stood.
_GRACE_S = 3.0


STOPPED_WORDS = "stopped: what is finished is kept, the same command does what is left"


class Guard:
    """Ends the process when ``feed`` was not called for ``timeout_s`` seconds, and at SIGTERM or SIGINT.

    SIGUSR1 asks ranks to close. For the main thread, as a context manager.
    """

    def __init__(self, timeout_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._attempt: Attempt | None = None
        self._fed, self._guarded = time.monotonic(), threading.get_ident()

    def __enter__(self) -> Guard:
        reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._earlier = {number: signal.signal(number, lambda number, frame: None) for number in handled}
        self._earlier_fd = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reads,), name="guard", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._earlier_fd)
        os.close(self._writes)
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def feed(self) -> None:
        self._fed = time.monotonic()

    def allow(self, timeout_s: float) -> None:
        """From now on wait so long, if that is longer."""
        self._timeout_s = max(self._timeout_s, timeout_s)
        self.feed()

    def at(self, name: str) -> None:
        """Note that work on a case, or on a comparison as a whole, begins."""
        self.feed()
        if self._attempt is not None:
            self._attempt.name(name)

    def explain(self, reason: str) -> None:
        """Note why what is tried is being lost, until the next thing is."""
        if self._attempt is not None:
            self._attempt.explain(reason)

    @contextlib.contextmanager
    def trying(self, attempt: Attempt, timeout_s: float) -> Iterator[None]:
        """Allow so long while the block lasts. Whatever ends the process then is noted in ``attempt``."""
        outside, self._timeout_s, self._attempt = self._timeout_s, timeout_s, attempt
        self.feed()
        try:
            yield
        finally:
            self._attempt, self._timeout_s = None, outside
            self.feed()
            attempt.clear()

    def lose(self, reason: str, rank: int) -> NoReturn:
        """End at once: the process group is lost, and destructors would wait for peers that may never come."""
        try:
            self.explain(reason)
            print(f"moe-ep-bench: rank {rank}: {brief(reason, 300, quoted=False)}", file=sys.stderr, flush=True)
        finally:  # Though nobody may hear it.
            os._exit(LOST)

    def is_overdue(self) -> bool:
        return time.monotonic() - self._fed > self._timeout_s

    def _watch(self, reads: int) -> None:
        with open(reads, "rb", buffering=0) as numbers:
            while True:
                if not select.select([numbers], [], [], min(1.0, self._timeout_s / 10))[0]:
                    if self.is_overdue():
                        self._end_hung()
                elif not (data := numbers.read(1)):
                    return
                elif data[0] == signal.SIGUSR1:
                    ask_to_close()
                elif data[0] in self._earlier:
                    self._end_asked(data[0])

    def _end_asked(self, number: int) -> NoReturn:
        try:
            self._explain_last(f"{STOPPED} by signal {number}")
            if os.environ.get("RANK", "0") == "0":
                print(f"moe-ep-bench: {STOPPED_WORDS}", file=sys.stderr, flush=True)
        finally:  # Whatever cannot be printed or noted: this thread is all that ends the process.
            os._exit(128 + number)

    def _end_hung(self) -> NoReturn:
        status, place = LOST, sys._current_frames()[self._guarded].f_code.co_name
        try:
            reason = f"timeout: no progress for {self._timeout_s:g} s in {place}"
            is_tried = self._explain_last(reason)
            print(f"moe-ep-bench: {reason}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr)
            time.sleep(_GRACE_S)
            # Before or after all cases another start would end alike.
            status = LOST if is_tried else leave_status(LOST)
        finally:
            os._exit(status)

    def _explain_last(self, reason: str) -> bool:
        """Note why the process ends, whatever it may still begin; whether there was anything to be lost."""
        attempt = self._attempt
        if attempt is not None:
            attempt.explain_last(reason)
        return attempt is not None
