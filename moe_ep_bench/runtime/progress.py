"""A progress bar for a person, and now and then a line for a log file."""

from __future__ import annotations

import sys

from tqdm import tqdm

# Seconds between two showings. A log file keeps every one of them.
_ON_A_TERMINAL, _IN_A_FILE = 1.0, 60.0


def progress_bar(total: int, unit: str, *, shown: bool = True) -> tqdm:
    """Count ``total`` units on standard error; nothing where there is nothing to do or it is not to be ``shown``."""
    interval = _ON_A_TERMINAL if sys.stderr.isatty() else _IN_A_FILE
    return tqdm(total=total, unit=unit, disable=not (shown and total), mininterval=interval, dynamic_ncols=True)
