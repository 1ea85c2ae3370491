"""Keep what ranks' routing of a modelled point gave until the point is finished, so that the next job goes on there.

A line of the file is one value and its key, as JSON, compressed, behind its length: numbers alone, nothing that would
run. Values are few numbers, the counts of a rank say, never scores. What a killed job had begun to write is cut off.
A disk that takes no more ends the keeping and nothing else. Once a point's parts are written the file goes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Key = tuple[str | int | None, ...]
# So often values are written; what is finished sooner leaves no file.
_EVERY_S = 2.0
_LENGTH_BYTES = 8
_CASES: Key = ("cases",)


class Kept:
    """Values by key; those of an earlier job that did the same, then this job's.

    Args:
        path: the file (``RunDirectory.begun``); None = nothing is kept.
        case_ids: of all that is routed; values of others do not hold.

    Attributes:
        known: what was found, and not asked for yet.
    """

    def __init__(self, path: Path | None = None, case_ids: Sequence[str] = ()) -> None:
        self.known: dict[Key, Any] = {}
        self._path, self._lock, self._written = path, threading.Lock(), time.monotonic()
        self._new: list[tuple[Key, Any]] = [(_CASES, [*case_ids])]
        if path is None or not path.exists():
            return
        records, num_bytes = _read(path.read_bytes())
        if records.pop(_CASES, None) == [*case_ids]:
            self.known, self._new = records, []
        else:
            num_bytes = 0
        os.truncate(path, num_bytes)

    def number(self, what: str) -> int:
        """How many values are known whose keys begin so."""
        return sum(key[0] == what for key in self.known)

    def once(self, key: Key, make: Callable[[], T]) -> T:
        """The value of a key, which is asked for once: as it was kept, else made and kept. Threads may ask."""
        if key in self.known:
            return self.known.pop(key)
        value = make()
        if self._path is not None:
            with self._lock:
                self._new.append((key, value))
                if time.monotonic() - self._written >= _EVERY_S:
                    self._write(self._path)
        return value

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            with open(path, "ab") as file:
                file.writelines(_lines(self._new))
        except OSError:  # What is left is made as if nothing had been asked to be kept.
            self._path = None
        self._new, self._written = [], time.monotonic()


def _lines(records: Sequence[tuple[Key, Any]]) -> Iterator[bytes]:
    for record in records:
        line = zlib.compress(json.dumps(record, default=_as_json).encode(), 1)
        yield len(line).to_bytes(_LENGTH_BYTES, "little") + line


def _read(content: bytes) -> tuple[dict[Key, Any], int]:
    """Values by key up to the first line that is not whole, and how many bytes they take."""
    records, end = dict[Key, Any](), 0
    with contextlib.suppress(zlib.error, ValueError):
        while len(content) > (begin := end + _LENGTH_BYTES):
            length = int.from_bytes(content[end:begin], "little")
            if begin + length > len(content):
                break
            key, value = json.loads(zlib.decompress(content[begin : begin + length]), object_hook=_from_json)
            records[tuple(key)], end = value, begin + length
    return records, end


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": value.numpy()}
    if isinstance(value, np.generic):
        return value.item()
    assert isinstance(value, np.ndarray), type(value)
    return {"array": base64.b64encode(value.tobytes()).decode(), "dtype": str(value.dtype), "shape": value.shape}


def _from_json(value: dict[str, Any]) -> Any:
    if "array" in value:
        numbers = np.frombuffer(base64.b64decode(value["array"]), value["dtype"])
        return numbers.reshape(value["shape"]).copy()
    return torch.from_numpy(value["tensor"]) if "tensor" in value else value
