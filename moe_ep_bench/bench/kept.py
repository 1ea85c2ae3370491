"""Keep what routing of ranks gave, where none measure, until a point is finished, so that the next job goes on there.

A record of the file is one value and its key, as JSON and the bytes of its arrays, compressed, behind its length:
numbers alone, nothing that would run. Values are few numbers, the counts of a rank say, never scores. A point that
lasts ``_FIRST_S`` or less keeps nothing, for its parts are written then. What a killed job had begun to write is cut
off. A disk that takes no more ends the keeping and nothing else. Once a point's parts are written the file goes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Key = tuple[str | int | None, ...]
# When values are written first, and how often from then on.
_FIRST_S, _EVERY_S = 10.0, 2.0
_LENGTH_BYTES = 8
# No record that is written here is larger when it is unpacked.
_MOST_BYTES = 2**28
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
        self._path, self._lock, self._due = path, threading.Lock(), time.monotonic() + _FIRST_S
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
        return sum(key[:1] == (what,) for key in self.known)

    def once(self, key: Key, make: Callable[[], T]) -> T:
        """The value of a key, which is asked for once: as it was kept, else made and kept. Threads may ask."""
        if key in self.known:
            return self.known.pop(key)
        value = make()
        if self._path is not None:
            with self._lock:
                self._new.append((key, value))
                if time.monotonic() >= self._due:
                    self._write(self._path)
        return value

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            with open(path, "ab") as file:
                file.writelines(map(_record, self._new))
        except OSError:  # What is left is made as if nothing had been asked to be kept.
            self._path = None
        self._new, self._due = [], time.monotonic() + _EVERY_S


def _record(value: tuple[Key, Any]) -> bytes:
    arrays: list[np.ndarray] = []

    def as_json(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": value.numpy()}
        if isinstance(value, np.generic):
            return value.item()
        assert isinstance(value, np.ndarray), type(value)
        arrays.append(value)
        return {"array": value.dtype.str, "shape": value.shape}

    text = json.dumps(value, default=as_json).encode()
    record = zlib.compress(b"".join([_length(text), text, *(array.tobytes() for array in arrays)]), 1)
    return _length(record) + record


def _length(content: bytes) -> bytes:
    return len(content).to_bytes(_LENGTH_BYTES, "little")


def _read(content: bytes) -> tuple[dict[Key, Any], int]:
    """Values by key up to the first record that is not one, and how many bytes they take."""
    records, end = dict[Key, Any](), 0
    with contextlib.suppress(zlib.error, ValueError, TypeError, KeyError, RecursionError):
        while len(content) > (begin := end + _LENGTH_BYTES):
            if begin + (length := int.from_bytes(content[end:begin], "little")) > len(content):
                break
            unpacking = zlib.decompressobj()
            record = unpacking.decompress(content[begin : begin + length], _MOST_BYTES)
            if not unpacking.eof:
                break
            key, value = _value(record)
            records[tuple(key)], end = value, begin + length
    return records, end


def _value(record: bytes) -> list[Any]:
    """A key and its value. Arrays are met in the order in which they were written."""
    place = _LENGTH_BYTES + int.from_bytes(record[:_LENGTH_BYTES], "little")

    def from_json(value: dict[str, Any]) -> Any:
        nonlocal place
        if "tensor" in value:
            return torch.from_numpy(value["tensor"])
        if "array" not in value:
            return value
        array = np.frombuffer(record, value["array"], math.prod(value["shape"]), place).reshape(value["shape"])
        place += array.nbytes
        return array.copy()

    return json.loads(record[_LENGTH_BYTES:place], object_hook=from_json)
