"""Reading files that others made, without trusting them: bounded pieces, named places, no pickles.

Every error is a ValueError of one line that names the file and the place in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

# A line of text or a JSON document; the largest of the published recordings are below 4 MiB.
MAX_PIECE_BYTES = 2**28


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file, each with its place (``file:line``), without their ends."""
    with path.open("rb") as file:
        for number in range(1, 2**63):
            line = file.readline(MAX_PIECE_BYTES + 1)
            if not line:
                return
            where = f"{path}:{number}"
            if len(line) > MAX_PIECE_BYTES:
                raise ValueError(f"{where}: expected a line of at most {MAX_PIECE_BYTES} bytes, got a longer one")
            yield where, line.rstrip(b"\r\n")


def parse_json(text: bytes, where: str) -> Any:
    """A JSON value; NaN and infinities, which JSON does not have, are refused."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON, got {_start(text)} ({' '.join(str(error).split())})") from None


def read_json(path: Path) -> Any:
    """A JSON document."""
    size = path.stat().st_size
    if size > MAX_PIECE_BYTES:
        raise ValueError(f"{path}: expected at most {MAX_PIECE_BYTES} bytes, got {size}")
    return parse_json(path.read_bytes(), str(path))


def integers(value: Any, where: str, shape: tuple[int | None, ...]) -> NDArray[np.int64]:
    """Nested lists of whole numbers as an array; None in ``shape`` takes any length."""
    return _numbers(value, where, shape, "iu", "whole numbers").astype(np.int64)


def reals(value: Any, where: str, shape: tuple[int | None, ...]) -> NDArray[np.float64]:
    """Nested lists of numbers as an array; None in ``shape`` takes any length."""
    return _numbers(value, where, shape, "iuf", "numbers").astype(np.float64)


def whole(record: Any, name: str, where: str, least: int) -> int:
    """A whole number of a JSON object."""
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: {name}: expected a whole number from {least}, got {brief(value)}")
    return value


def brief(value: Any) -> str:
    """A value for an error message, cut short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def sha256_of(paths: Sequence[Path], root: Path) -> str:
    """One file's sha256; of several files, that of the lines ``<sha256>  <path below root>`` in order."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(paths) == 1:
        return digests[0]
    root = root if root.is_dir() else root.parent
    listing = "".join(
        f"{digest}  {path.relative_to(root).as_posix()}\n" for digest, path in zip(digests, paths, strict=True)
    )
    return hashlib.sha256(listing.encode()).hexdigest()


class Npz:
    """Arrays of whole numbers in an npz file, read a few rows at a time.

    ``numpy.load`` believes what an array's header says of its size, and allocates it; here the
    header is first held against the size of the member, and then only blocks of it are read.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path = path
        self._archive = archive
        self.names = [name.removesuffix(".npy") for name in archive.namelist()]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """The shape of an array of ``num_dims`` dimensions."""
        with self._member(name) as (_, shape, _):
            if len(shape) != num_dims:
                raise ValueError(f"{self.where(name)}: expected {num_dims} dimensions, got shape {shape}")
            return shape

    def blocks(self, name: str, rows: int) -> Iterator[NDArray[np.int64]]:
        """The array, at most ``rows`` of its first dimension at a time."""
        with self._member(name) as (file, shape, dtype):
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            for first in range(0, shape[0], rows):
                here = min(rows, shape[0] - first)
                data = file.read(here * row_bytes)
                if len(data) != here * row_bytes:
                    raise ValueError(f"{self.where(name)}: expected {here * row_bytes} more bytes, got {len(data)}")
                values = np.frombuffer(data, dtype) if data else np.zeros(0, np.int64)
                yield values.reshape(here, *shape[1:]).astype(np.int64)

    def vector(self, name: str) -> NDArray[np.int64]:
        """All of a one-dimensional array."""
        self.shape(name, 1)
        return np.concatenate([np.zeros(0, np.int64), *self.blocks(name, 2**20)])

    @contextmanager
    def _member(self, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype]]:
        if name not in self.names:
            raise ValueError(f"{self.path}: missing array: {name}")
        try:
            info = self._archive.getinfo(f"{name}.npy")
            with self._archive.open(info) as file:
                version = np.lib.format.read_magic(file)
                if version == (1, 0):
                    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
                else:
                    shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
                # An empty list becomes an array of floats.
                if dtype.hasobject or (dtype.kind not in "iu" and math.prod(shape)):
                    raise ValueError(f"expected whole numbers, got dtype {dtype}")
                if is_fortran and len(shape) > 1:
                    raise ValueError("expected C order, got Fortran order (save numpy.ascontiguousarray of it)")
                expected = file.tell() + math.prod(shape) * dtype.itemsize
                if expected != info.file_size:
                    raise ValueError(f"expected {expected} bytes for shape {shape} of {dtype}, got {info.file_size}")
                yield file, shape, dtype
        except _NPZ_ERRORS as error:
            text = " ".join(str(error).split())
            raise ValueError(text if text.startswith(str(self.path)) else f"{self.where(name)}: {text}") from None


_NPZ_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError)


@contextmanager
def opened_npz(path: Path) -> Iterator[Npz]:
    """Open an npz file; what is no such file, a pickle among them, is refused."""
    try:
        archive = zipfile.ZipFile(path)
    except _NPZ_ERRORS as error:
        raise ValueError(f"{path}: not a whole, readable npz file ({' '.join(str(error).split())})") from None
    with archive:
        strange = [name for name in archive.namelist() if not name.endswith(".npy")]
        if strange:
            raise ValueError(f"{path}: expected arrays only (*.npy), got {brief(strange[0])}")
        yield Npz(path, archive)


def _numbers(value: Any, where: str, shape: tuple[int | None, ...], kinds: str, words: str) -> NDArray[Any]:
    try:
        array = np.array(value)
    except ValueError:
        raise ValueError(f"{where}: expected lists of equal length, got {brief(value)}") from None
    if array.size == 0 and len(shape) == array.ndim:
        array = array.astype(np.int64)
    wanted = "x".join("n" if length is None else str(length) for length in shape)
    fits = len(shape) == array.ndim and all(
        length in (None, got) for length, got in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in kinds:
        raise ValueError(f"{where}: expected {words} of shape {wanted}, got {brief(value)}")
    return array


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _start(text: bytes) -> str:
    return brief(text[:40].decode(errors="replace")) if text else "nothing"
