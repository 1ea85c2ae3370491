"""Progress on standard error."""

from __future__ import annotations

import sys

from tqdm import tqdm

tqdm.monitor_interval = 0  # Else a thread of its own wakes up beside what is timed.


def progress_bar(total: int, unit: str, *, shown: bool = True) -> tqdm:
    """Count ``total`` units on standard error; nothing where there is nothing to do or it is not to be ``shown``."""
    seldom = 1.0 if sys.stderr.isatty() else 10.0  # a log keeps every one
    return tqdm(total=total, unit=f" {unit}", disable=not shown or not total, mininterval=seldom, dynamic_ncols=True)
