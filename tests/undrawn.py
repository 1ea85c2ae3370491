"""Figures without their marks: for tests of the numbers in them, and of all that is made beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.figure import Figure

from moe_ep_bench.analysis import drawing, page, style


def _save(figure: Figure, target: Any, **options: Any) -> None:
    """An empty file, or nothing into a stream."""
    if isinstance(target, str | Path):
        Path(target).write_bytes(b"")


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Let figures have their rows and words, on an empty sheet that is saved as an empty file."""
    with (
        mock.patch.object(drawing, "facets", return_value=(Figure(), None)),
        mock.patch.object(drawing, "dress"),
        mock.patch.object(style, "settle"),
        mock.patch.object(page, "settle"),
        mock.patch.object(Figure, "savefig", _save),
    ):
        yield
