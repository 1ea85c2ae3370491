"""Read arrays that other programs wrote: npz files, JSON lines, base64 text.

Files are trusted with nothing. Pieces are bounded by ``MAX_PIECE_BYTES`` or the memory that is free before they are
read, pickles are never read, and every error is a ValueError of one line that names the file and the place in it.
"""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import free_memory_bytes, parse_json

# A line of text or a JSON document; the largest of the published recordings are below 4 MiB.
MAX_PIECE_BYTES = 2**28
WHOLE, REAL = "iu", "iuf"


def checked(value: Any, where: str, shape: tuple[int | None, ...] | None, kinds: str = WHOLE) -> NDArray[Any]:
    """Hold an array, or nested lists, against what a format expects.

    Args:
        shape: lengths by dimension, of which None takes any; None = any shape.
        kinds: ``WHOLE`` numbers or ``REAL`` ones.

    Raises:
        ValueError: another shape, or other things than numbers.
    """
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        raise UserError(f"{where}: expected lists of equal length, got {brief(value)}") from None
    shape = (None,) * array.ndim if shape is None else shape
    lengths = zip(shape, array.shape, strict=False)
    fits = len(shape) == array.ndim and all(length in (None, got) for length, got in lengths)
    if fits and not array.size:
        return array.astype(np.int64)  # an empty list becomes an array of floats
    if not fits or array.dtype.kind not in kinds:
        wanted = "x".join("n" if length is None else str(length) for length in shape)
        got = f"{array.dtype} of shape {array.shape}" if value is array else brief(value)
        raise UserError(f"{where}: expected {'whole ' * (kinds == WHOLE)}numbers of shape {wanted}, got {got}")
    return array


def check_size(where: str, size: int) -> None:
    """Refuse to read more bytes than the memory has that is free. Raises ValueError."""
    if size > (free := free_memory_bytes()):
        raise UserError(f"{where}: expected at most the {free:,} bytes of memory that are free, got {size:,}")


def read_npy(file: BinaryIO, where: str) -> NDArray[Any]:
    """Read an array in npy form, which says its type and shape ahead of its content.

    Raises:
        ValueError: it is damaged, a pickle, or holds less than it announces.
    """
    try:
        is_first_version = np.lib.format.read_magic(file) == (1, 0)
        read_header = np.lib.format.read_array_header_1_0 if is_first_version else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
        content = file.read()
        if dtype.hasobject:
            raise UserError("Object arrays are pickles, which are not read")
        return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")
    except Exception as error:  # zipfile, zlib and numpy's parser of headers raise whatever they meet
        raise UserError(f"{where}: {brief(str(error), 200, quoted=False)}") from None


@dataclass(frozen=True)
class Npz:
    """An opened npz file, whose arrays are read one at a time."""

    path: Path
    archive: zipfile.ZipFile

    @property
    def names(self) -> list[str]:
        return [name.removesuffix(".npy") for name in self.archive.namelist()]

    def where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def array(self, name: str, shape: tuple[int | None, ...] | None = None, kinds: str = WHOLE) -> NDArray[Any]:
        """Read an array of a shape, or of any.

        Raises:
            ValueError: no such array, a damaged or pickled one, or one that is not as ``checked`` expects.
        """
        if name not in self.names:
            raise UserError(f"{self.path}: missing array: {name}")
        try:
            with self.archive.open(f"{name}.npy") as member:
                array = read_npy(member, self.where(name))
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
            raise UserError(f"{self.where(name)}: {brief(str(error), 200, quoted=False)}") from None
        return checked(array, self.where(name), shape, kinds)


@contextmanager
def opened_npz(path: Path, convert: str) -> Iterator[Npz]:
    """Open an npz file.

    Args:
        convert: the command that makes one of a pickle, where the pickle is trusted.

    Raises:
        ValueError: no such file, a pickle, or a damaged or too large one.
    """
    if path.suffix == ".pt":
        raise UserError(f"{path}: a pickle, which is not read; convert it where it was made: {convert}")
    if not path.is_file():
        raise UserError(f"{path}: expected a regular file")
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise UserError(f"{path}: not a whole, readable npz file ({brief(str(error), 200, quoted=False)})") from None
    with archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                raise UserError(f"{path}: expected arrays only (*.npy), got {brief(info.filename)}")
            check_size(f"{path}: {brief(info.filename, quoted=False)}", info.file_size)
        yield Npz(path, archive)


def base64_bytes(text: Any, where: str) -> bytes:
    """Decode base64 text. Raises ValueError: it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise UserError(f"{where}: expected base64 text, got {brief(text)}") from None


def array_of_text(value: Any, where: str, shape: tuple[int | None, ...]) -> NDArray[np.integer]:
    """Read whole numbers of nested lists, or of the base64 text of an npy file. Raises ValueError."""
    if isinstance(value, str):
        value = read_npy(io.BytesIO(base64_bytes(value, where)), where)
    return checked(value, where, shape)


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a file's lines without their ends, each with its place (``file:line``).

    Raises:
        ValueError: no regular file, or a line of more than ``MAX_PIECE_BYTES``.
    """
    if not path.is_file():
        raise UserError(f"{path}: expected a regular file")
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_PIECE_BYTES + 1):
            number += 1
            if len(line) > MAX_PIECE_BYTES:
                raise UserError(
                    f"{path}:{number}: expected a line of at most {MAX_PIECE_BYTES} bytes, got a longer one"
                )
            yield f"{path}:{number}", line.rstrip(b"\r\n")


def json_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON object of every line, each with its place. Raises ValueError: a line is none."""
    for where, line in lines(path):
        record = parse_json(line, where)
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected an object, got {brief(record)}")
        yield where, record


def whole_number(record: dict[str, Any], name: str, where: str, least: int = 0) -> int:
    """Read a whole number of a JSON object. Raises ValueError: it is none, or below ``least``."""
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{where}: {name}: expected a whole number from {least}, got {brief(value)}")
    return value
