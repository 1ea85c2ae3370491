"""Progress on standard error: a bar on a terminal; in a file or a pipe lines with the share done and the time left."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from tqdm import tqdm

# Lines follow each other after so long at least, but for those of a new description.
_EVERY_S = 10.0
# Of less that is done nobody can tell how long the rest takes.
_LEAST_SHARE = 0.01
# What takes no longer says nothing.
SILENT_S = 1.0

_announcement: threading.Timer | None = None


def announce(words: str) -> None:
    """Say what a command is about to do, unless it says something else, or ends, within ``SILENT_S``."""
    global _announcement
    settle()
    _announcement = threading.Timer(SILENT_S, lambda: print(f"moe-ep-bench: {words}", file=sys.stderr, flush=True))
    _announcement.daemon = True
    _announcement.start()


def settle() -> None:
    """Withdraw what was announced and not said yet."""
    if _announcement is not None:
        _announcement.cancel()


class _Lines(tqdm):
    """A line on standard error for each description, and every ``_EVERY_S``."""

    def __init__(self, total: int, unit: str, delay: float) -> None:
        super().__init__(total=total, unit=unit, disable=True)
        self._units, self._delay = f"{unit}es" if unit.endswith("ch") else f"{unit}s", delay
        self._description, self._began = "", time.monotonic()
        self._said = self._began

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0
        self._say(_EVERY_S)

    def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
        is_new, self._description = desc != self._description, desc or ""
        self._say(0.0 if is_new else _EVERY_S)

    def _say(self, at_least_s: float) -> None:
        now = time.monotonic()
        if now - self._began < self._delay or now - self._said < at_least_s:
            return
        settle()
        self._said, taken_s = now, now - self._began
        is_known = taken_s >= 1 and self.n >= max(1, _LEAST_SHARE * self.total)
        left = f", {duration(taken_s / self.n * (self.total - self.n))} left" if is_known else ""
        done = f"{100 * self.n / self.total:.0f} %, {self.n:,} of {self.total:,} {self._units}{left}"
        print(f"{self._description}: {done}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """About how long, in words."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def progress_bar(total: int, unit: str, *, shown: bool = True, delay: float = 0.0) -> tqdm:
    """Count ``total`` units on standard error; nothing where there is nothing to do or it is not to be ``shown``.

    Args:
        delay: seconds in which nothing is shown yet.
    """
    options: dict[str, Any] = {"total": total, "unit": unit}
    if not shown or not total:
        return tqdm(**options, disable=True)
    if not sys.stderr.isatty():
        return _Lines(**options, delay=delay)
    settle()
    return tqdm(**options, mininterval=1.0, dynamic_ncols=True, delay=delay, leave=delay == 0)
