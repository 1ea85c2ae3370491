"""Progress on standard error: tqdm's bar on a terminal, in a file or a pipe lines with the share and the time left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

# Lines follow each other after so long at least, but for those of a new description.
_EVERY_S = 10.0
_FORMAT = "{desc}{percentage:.0f} %, {n:,} of {total:,} {unit}, {remaining} left"

tqdm.monitor_interval = 0  # Else a thread of its own wakes up beside what is timed.


class _Lines(tqdm):
    """A line for each description, and every ``_EVERY_S``."""

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        return lambda text: print(text, file=file, flush=True)

    def refresh(self, *arguments: Any, **options: Any) -> None:
        self.total = max(self.total, self.n)  # Plans are rough, and tqdm takes a count beyond its total for none.
        super().refresh(*arguments, **options)

    def close(self) -> None:
        self.disable = True


def progress_bar(total: int, unit: str, *, shown: bool = True) -> tqdm:
    """Count ``total`` units on standard error; nothing where there is nothing to do or it is not to be ``shown``.

    Args:
        unit: one of them, which is shown in the plural.
    """
    units = unit if total == 1 else f"{unit}{'es' if unit.endswith('ch') else 's'}"
    options: dict[str, Any] = {"total": total, "unit": units, "disable": not shown or not total}
    if sys.stderr.isatty():
        return tqdm(**options, mininterval=1.0, dynamic_ncols=True)
    # A delay of any length keeps the line without a description back.
    options |= {"mininterval": _EVERY_S, "delay": 1e-9, "position": 0}
    return _Lines(**options, file=sys.stderr, bar_format=_FORMAT)
