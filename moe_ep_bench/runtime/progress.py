"""Progress on standard error."""

from __future__ import annotations

import sys

from tqdm import tqdm

tqdm.monitor_interval = 0  # Else a thread of its own wakes up beside what is timed.


_SELDOM_S = 60.0  # how often a pipe or a log, which keeps every update, gets one


def progress_bar(total: int, unit: str, title: str = "", *, shown: bool = True) -> tqdm:
    """Count ``total`` units on standard error; nothing where there is nothing to do or it is not to be ``shown``.

    What ends within a minute says nothing in a log.
    """
    seldom = {"mininterval": 1.0} if sys.stderr.isatty() else {"mininterval": _SELDOM_S, "delay": _SELDOM_S}
    how = {"dynamic_ncols": True, "disable": not shown or not total, **seldom}
    return tqdm(total=total, unit=f" {unit}", desc=title or None, **how)
