"""A terminal gets a progress bar; a file or a pipe gets one line per comparison and no bar."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class _Lines(tqdm):
    """A line on standard error for each description, with what was done before it."""

    def __init__(self, total: int, unit: str) -> None:
        super().__init__(total=total, unit=unit, disable=True)
        self._units = f"{unit}es" if unit.endswith("ch") else f"{unit}s"

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0

    def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
        print(f"{desc}: {self.n:,} of {self.total:,} {self._units} done before", file=sys.stderr, flush=True)


def progress_bar(total: int, unit: str, *, shown: bool = True) -> tqdm:
    """Count ``total`` units on standard error; nothing where there is nothing to do or it is not to be ``shown``."""
    options: dict[str, Any] = {"total": total, "unit": unit}
    if not shown or not total:
        return tqdm(**options, disable=True)
    return tqdm(**options, mininterval=1.0, dynamic_ncols=True) if sys.stderr.isatty() else _Lines(**options)
