"""Read arrays that other programs wrote: npz files, JSON lines, base64 text.

Files are trusted with nothing. Pieces are bounded by ``MAX_PIECE_BYTES`` or the memory that is free before they are
read, pickles are never read, and every error is a ValueError of one line that names the file and the place in it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import free_memory_bytes, is_whole_number, parse_json

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


@contextmanager
def opened_npz(path: Path, convert: str) -> Iterator[NpzFile]:
    """Open an npz file, whose arrays ``npz_array`` reads one at a time.

    Args:
        convert: the command that makes one of a pickle, where the pickle is trusted.

    Raises:
        ValueError: no such file, a pickle, or a damaged or too large one.
    """
    if path.suffix == ".pt":
        raise UserError(f"{path}: a pickle, which is not read; convert it where it was made: {convert}")
    if not path.is_file():
        raise UserError(f"{path}: expected a regular file")
    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
            assert isinstance(archive, NpzFile), "an array alone"
        except Exception as error:  # numpy's and zipfile's readers raise whatever they meet
            words = brief(str(error), 200, quoted=False)
            raise UserError(f"{path}: not a whole, readable npz file ({words})") from None
        for info in archive.zip.infolist():
            if info.file_size > (free := free_memory_bytes()):
                name = brief(info.filename, quoted=False)
                raise UserError(f"{path}: {name}: expected at most the {free:,} bytes of memory that are free")
        yield archive


def npz_array(
    archive: NpzFile, path: Path, name: str, shape: tuple[int | None, ...] | None = None, kinds: str = WHOLE
) -> NDArray[Any]:
    """Read an array of the npz file at ``path``.

    Raises:
        ValueError: no such array, a damaged or pickled one, or one that is not as ``checked`` expects.
    """
    if name not in archive.files:
        raise UserError(f"{path}: missing array: {name}")
    try:
        array = archive[name]
    except Exception as error:
        raise UserError(f"{path}: {name}: {brief(str(error), 200, quoted=False)}") from None
    return checked(array, f"{path}: {name}", shape, kinds)


def base64_bytes(text: Any, where: str) -> bytes:
    """Decode base64 text. Raises ValueError: it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise UserError(f"{where}: expected base64 text, got {brief(text)}") from None


def array_of_text(value: Any, where: str, shape: tuple[int | None, ...]) -> NDArray[np.integer]:
    """Read whole numbers of nested lists, or of the base64 text of an npy file. Raises ValueError."""
    if isinstance(value, str):
        content = base64_bytes(value, where)
        try:
            value = np.load(io.BytesIO(content), allow_pickle=False)
        except Exception as error:
            raise UserError(f"{where}: {brief(str(error), 200, quoted=False)}") from None
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
    if not is_whole_number(value, least):
        raise UserError(f"{where}: {name}: expected a whole number from {least}, got {brief(value)}")
    return value
