"""No hang lasts: a thread ends the process when nothing has moved for too long, and dumps all stacks to the log.

``faulthandler.dump_traceback_later`` would end it as surely. But it leaves no reason, so that a rank which only waited
for another would be blamed as the one that hung.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from moe_ep_bench.runtime.crash_journal import PEER_LOST, WAITED
from moe_ep_bench.runtime.exit_codes import LOST

# A driver that waits for its device answers nobody meanwhile.
_ANSWER_S = 1.0

# A rank that waits for others ends later than the one that keeps it waiting: once a rank has ended, the agent stops
# the others, and the culprit could no longer say what it was doing.
_GRACE_S = 3.0


class Watchdog:
    """Ends the process when ``feed`` was not called for ``timeout_s`` seconds.

    This rank was waiting for others where it stood in a collective, or where its device had work left: all of that was
    launched, and on a device only a collective lasts until others come. So it does not matter in which line the host
    waits for the device (``bool(tensor)``, ``.tolist()``: no frame of torch's shows it).

    Args:
        is_busy: whether the rank's device has work left; asked in a thread of its own.
        status: gives the exit status, outside of ``during``.
    """

    def __init__(
        self,
        timeout_s: float = math.inf,
        is_busy: Callable[[], bool] = lambda: False,
        status: Callable[[], int] = lambda: LOST,
    ) -> None:
        self._timeout_s, self._is_busy, self._status = timeout_s, is_busy, status
        self._on_timeout: Callable[[str], object] = lambda reason: None
        self._fed, self._stopped, self._watched = time.monotonic(), threading.Event(), threading.get_ident()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def feed(self) -> None:
        self._fed = time.monotonic()

    def allow(self, timeout_s: float) -> None:
        """From now on wait so long, if that is longer."""
        self._timeout_s = max(self._timeout_s, timeout_s)
        self.feed()

    @contextlib.contextmanager
    def during(self, timeout_s: float, on_timeout: Callable[[str], object]) -> Iterator[None]:
        """Allow so long while the block lasts, and end with ``LOST``.

        Args:
            on_timeout: told the reason first. It begins with "peer lost" where this rank was waiting for others, with
                "timeout" where it was itself what took so long.
        """
        outside = self._timeout_s, self._on_timeout, self._status
        self.feed()
        self._timeout_s, self._on_timeout, self._status = timeout_s, on_timeout, lambda: LOST
        try:
            yield
        finally:
            self.feed()
            self._timeout_s, self._on_timeout, self._status = outside

    def is_overdue(self) -> bool:
        return time.monotonic() - self._fed > self._timeout_s

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout_s / 10)):
            if self.is_overdue():
                self._end()

    def _end(self) -> NoReturn:
        try:  # Whatever cannot be printed or noted: this thread is all that ends the process.
            reason = self._reason()
            self._on_timeout(reason)
            if reason.startswith(PEER_LOST):
                time.sleep(_GRACE_S)
            print(f"moe-ep-bench: {reason}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr)
        finally:
            os._exit(self._status())

    def _reason(self) -> str:
        frame = sys._current_frames().get(self._watched)
        stack = traceback.extract_stack(frame) if frame else []
        if any("distributed_c10d" in entry.filename for entry in stack) or self._is_device_busy():
            return f"{WAITED} {self._timeout_s:g} s"
        where = f" in {stack[-1].name}" if stack else ""
        return f"timeout: no progress for {self._timeout_s:g} s{where}"

    def _is_device_busy(self) -> bool:
        answers = []

        def ask() -> None:
            try:
                answers.append(self._is_busy())
            except Exception:  # A broken device is not waiting.
                answers.append(False)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ANSWER_S)
        return answers != [False]
