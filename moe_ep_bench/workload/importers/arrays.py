"""Read arrays that other programs wrote: npz files, JSON documents, JSON lines and base64 text.

Files are trusted with nothing. Pieces are bounded before memory is taken for them, pickles are never read, and every
error is a ValueError of one line that names the file and the place in it. Whatever the file, an array is held against
the shape and the kind of numbers that a format expects (``checked``), and recorded routing against what a router makes
(``routed_part``).

Shapes: T = tokens, L = layers of the model, K = top_k.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import free_memory_bytes, parse_json, read_bytes

# A line of text or a JSON document; the largest of the published recordings are below 4 MiB.
MAX_PIECE_BYTES = 2**28
# An array of one request or forward pass: 128k tokens of 94 layers, top-8, as int32, are 0.4 GiB.
MAX_ARRAY_BYTES = 2**30
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
        array = value if isinstance(value, np.ndarray) else np.array(value)
    except (ValueError, OverflowError):
        raise UserError(f"{where}: expected lists of equal length, got {brief(value)}") from None
    shape = (None,) * array.ndim if shape is None else shape
    fits = array.ndim == len(shape) and all(
        length in (None, got) for length, got in zip(shape, array.shape, strict=True)
    )
    if fits and not array.size:
        return array.astype(np.int64)  # an empty list becomes an array of floats
    if not fits or array.dtype.kind not in kinds:
        wanted = "x".join("n" if length is None else str(length) for length in shape)
        got = f"{array.dtype} of shape {array.shape}" if value is array else brief(value)
        raise UserError(f"{where}: expected {'whole ' * (kinds == WHOLE)}numbers of shape {wanted}, got {got}")
    return array


def check_size(where: str, size: int, most: int) -> None:
    """Refuse an array of ``size`` bytes before anything is allocated for it.

    Raises:
        ValueError: it is larger than allowed, or than the memory that is free.
    """
    if size > most:
        raise UserError(f"{where}: expected at most {most:,} bytes (--max-bytes), got {size:,}")
    if size > (free := free_memory_bytes()):
        raise UserError(f"{where}: expected at most the {free:,} bytes of memory that are free, got {size:,}")


# ---- npz -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Npz:
    """An opened npz file, whose arrays are read one at a time."""

    path: Path
    archive: np.lib.npyio.NpzFile

    @property
    def names(self) -> list[str]:
        return self.archive.files

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
            self._check_header(name)
            array = self.archive[name]
        except UserError:
            raise
        except Exception as error:  # zipfile, zlib and numpy's parser of headers raise whatever they meet
            raise UserError(f"{self.where(name)}: {brief(str(error), 200, quoted=False)}") from None
        if not isinstance(array, np.ndarray):
            raise UserError(f"{self.where(name)}: expected numbers, got no array")
        return checked(array, self.where(name), shape, kinds)

    def _check_header(self, name: str) -> None:
        """Hold what an array announces against what its member holds: numpy allocates it before it reads."""
        info = self.archive.zip.getinfo(f"{name}.npy")
        with self.archive.zip.open(info) as member:
            if np.lib.format.read_magic(member) == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(member)
            announced = math.prod(shape) * dtype.itemsize
            left = info.file_size - member.tell()
        if dtype.hasobject:
            raise UserError(f"{self.where(name)}: Object arrays are pickles, which are not read")
        if not 0 <= announced <= left:
            raise UserError(f"{self.where(name)}: announces {announced:,} bytes, but {left:,} are there")


@contextmanager
def opened_npz(path: Path, convert: str, max_bytes: int = MAX_ARRAY_BYTES) -> Iterator[Npz]:
    """Open an npz file.

    Args:
        convert: the command that makes one of a pickle, where the pickle is trusted.
        max_bytes: of its largest array.

    Raises:
        ValueError: no such file, a pickle, or a damaged or too large one.
    """
    if path.suffix == ".pt":
        raise UserError(f"{path}: a pickle, which is not read; convert it where it was made: {convert}")
    if not path.is_file():
        raise UserError(f"{path}: expected a regular file")
    with path.open("rb") as file:  # numpy leaves a damaged file open
        try:
            archive = np.load(file, allow_pickle=False)
        except Exception as error:
            words = brief(str(error), 200, quoted=False)
            raise UserError(f"{path}: not a whole, readable npz file ({words})") from None
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise UserError(f"{path}: not a whole, readable npz file (one array)")
        for info in archive.zip.infolist():
            if not info.filename.endswith(".npy"):
                raise UserError(f"{path}: expected arrays only (*.npy), got {brief(info.filename)}")
            check_size(f"{path}: {brief(info.filename, quoted=False)}", info.file_size, max_bytes)
        yield Npz(path, archive)


# ---- text ------------------------------------------------------------------------------------------------------------


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a file's lines without their ends, each with its place (``file:line``)."""
    if not path.is_file():
        raise UserError(f"{path}: expected a regular file")
    with path.open("rb") as file:
        for number in range(1, 2**63):
            line = file.readline(MAX_PIECE_BYTES + 1)
            if not line:
                return
            where = f"{path}:{number}"
            if len(line) > MAX_PIECE_BYTES:
                raise UserError(f"{where}: expected a line of at most {MAX_PIECE_BYTES} bytes, got a longer one")
            yield where, line.rstrip(b"\r\n")


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a JSON value from every line, each with its place."""
    return ((where, parse_json(line, where)) for where, line in lines(path))


def responses(path: Path, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield a server's responses, one a line or pretty-printed one after another, each with its place.

    Args:
        problems: is told of lines that hold none: blank, damaged, null or an error's.

    Raises:
        ValueError: there is no response, or lines of a stream, which carries no routing.
    """
    is_found = False
    for where, text in _documents(path):
        if text.startswith(b"data:"):
            raise UserError(f"{where}: a stream, which carries no routing; expected requests without stream")
        try:
            response = parse_json(text, where)
        except UserError as error:
            problems.append(str(error))
            continue
        if response is None:
            problems.append(f"{where}: null")
        elif isinstance(response, dict) and (response.get("error") or response.get("object") == "error"):
            problems.append(f"{where}: an error, {brief(response.get('error') or response.get('message'))}")
        else:
            is_found = True
            yield where, response
    if not is_found:
        raise UserError(problems[0] if problems else f"{path}: expected a response in each line, got none")


def _documents(path: Path) -> Iterator[tuple[str, bytes]]:
    """A file's lines that are not blank; where the first is only the begin of a document, its documents instead."""
    (_, first), *more = [*itertools.islice(((where, line) for where, line in lines(path) if line.strip()), 2)] or [
        ("", b"")
    ]
    if not (more and first.strip() in (b"{", b"[")):
        yield from ((where, line) for where, line in lines(path) if line.strip())
        return
    text, number = read_bytes(path, MAX_PIECE_BYTES).decode(errors="replace").strip(), 0
    while text:
        number += 1
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            end = len(text)  # what follows cannot be told apart; the parser says what is wrong
        yield f"{path}: document {number}", text[:end].encode()
        text = text[end:].lstrip()


def json_document(path: Path) -> Any:
    return parse_json(read_bytes(path, MAX_PIECE_BYTES), path)


def whole_number(record: Any, name: str, where: str, least: int = 0) -> int:
    """Read a whole number of a JSON object."""
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{where}: {name}: expected a whole number from {least}, got {brief(value)}")
    return value


def from_base64(text: Any, where: str, max_bytes: int) -> bytes:
    """Decode base64 text. Raises ValueError: it is none, or stands for more bytes than an array may have."""
    if not isinstance(text, str):
        raise UserError(f"{where}: expected base64 text, got {brief(text)}")
    check_size(where, len(text) * 3 // 4, max_bytes)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UserError(f"{where}: expected base64, got {brief(text)} ({error})") from None


# ---- routing ---------------------------------------------------------------------------------------------------------


# What fills buffers where nothing was recorded, beside ids below 0: zeros, a type's largest value, -1 as uint8.
_FILLS = (0, 255, 2**15 - 1, 2**16 - 1, 2**31 - 1)


class RoutedPart(NamedTuple):
    """What of an array was recorded.

    Attributes:
        known_T: which tokens were, bool [T].
        layers: their ids [recorded tokens, K] by layer that routes.
        num_padding: tokens that are left out because a fill stands in all their places.
    """

    known_T: NDArray[np.bool_]
    layers: dict[int, NDArray[np.integer]]
    num_padding: int


def routed_part(ids_TLN: NDArray[np.integer], where: str, dense_layers: Sequence[int] = ()) -> RoutedPart:
    """Find what was recorded in arrays of one size, whose rest programs fill up.

    Experts below 0 say that nothing was recorded: of a token, a layer, or a place beyond the model's top-k. A layer
    all of whose tokens have expert 0 K times over does not route: nobody wrote to its buffer of zeros. No router gives
    a token one expert twice, so that a token with one of ``_FILLS`` in all its places is padding. With K = 1 neither
    can be told from the ids.

    Args:
        dense_layers: that do not route with K = 1, by their places in the array.

    Raises:
        ValueError: a token was recorded in part.
    """
    is_chosen_TLN = ids_TLN >= 0
    top_k = int(is_chosen_TLN.any(axis=(0, 1)).sum())
    ids_TLK, is_chosen_TLK = ids_TLN[..., :top_k], is_chosen_TLN[..., :top_k]
    routes_L = (ids_TLK > 0 if top_k > 1 else is_chosen_TLK).any(axis=(0, 2))
    layers = [layer for layer in np.flatnonzero(routes_L).tolist() if top_k > 1 or layer not in dense_layers]
    is_padding_T = np.zeros(len(ids_TLN), dtype=bool)
    if top_k > 1:
        routed_TM = ids_TLK[:, layers or slice(None)].reshape(len(ids_TLN), -1)
        is_padding_T = (routed_TM == routed_TM[:, :1]).all(axis=1) & np.isin(routed_TM[:, 0], _FILLS)
    is_chosen_TM = is_chosen_TLN[:, layers].reshape(len(ids_TLN), len(layers) * ids_TLN.shape[2])
    expected_M = np.tile(np.arange(ids_TLN.shape[2]) < top_k, len(layers))
    known_T = is_chosen_TM.any(axis=1) & ~is_padding_T
    wrong_T = known_T & (is_chosen_TM != expected_M).any(axis=1)
    if wrong_T.any():
        token = int(wrong_T.argmax())
        raise UserError(
            f"{where}: token {token}: expected {top_k} experts in each of the layers {brief(layers)}, or -1 in all; "
            f"got {brief(ids_TLN[token].tolist())}"
        )
    return RoutedPart(known_T, {layer: ids_TLK[known_T, layer] for layer in layers}, int(is_padding_T.sum()))
