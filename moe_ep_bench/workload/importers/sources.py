"""What an importer is given: files that others made, and what the user says because these do not.

Files are read without trusting them: bounded pieces, named places, no pickles. Every error is a ValueError of one line
that names the file and the place in it.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import free_memory_bytes, parse_json, read_bytes
from moe_ep_bench.models import load_model
from moe_ep_bench.workload.trace import MAX_EXPERTS

# A line of text or a JSON document; the largest of the published recordings are below 4 MiB.
MAX_PIECE_BYTES = 2**28
# An array of one request or forward pass: 128k tokens of 94 layers, top-8, as int32, are 0.4 GiB.
MAX_ARRAY_BYTES = 2**30
_most_bytes: ContextVar[int] = ContextVar("most_bytes", default=MAX_ARRAY_BYTES)


@contextmanager
def most_bytes(number: int) -> Iterator[None]:
    """Take arrays of so many bytes in the block (``trace import --max-bytes``)."""
    token = _most_bytes.set(number)
    try:
        yield
    finally:
        _most_bytes.reset(token)


def check_size(where: str, size: int) -> None:
    """Refuse an array before anything is allocated for it.

    Raises:
        ValueError: it is larger than allowed, or than the memory that is free.
    """
    if size > (most := _most_bytes.get()):
        raise UserError(f"{where}: expected at most {most:,} bytes (--max-bytes), got {size:,}")
    if size > (free := free_memory_bytes()):
        raise UserError(f"{where}: expected at most the {free:,} bytes of memory that are free, got {size:,}")


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file, each with its place (``file:line``), without their ends."""
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


def read_json(path: Path) -> Any:
    """A JSON document."""
    return parse_json(read_bytes(path, MAX_PIECE_BYTES), path)


def integers(value: Any, where: str, shape: tuple[int | None, ...]) -> NDArray[np.int64]:
    """Nested lists of whole numbers as an array; None in ``shape`` takes any length."""
    return _numbers(value, where, shape, "iu", "whole numbers").astype(np.int64)


def reals(value: Any, where: str, shape: tuple[int | None, ...]) -> NDArray[np.float64]:
    """Nested lists of numbers as an array; None in ``shape`` takes any length."""
    return _numbers(value, where, shape, "iuf", "numbers").astype(np.float64)


def routing_layers(ids_TLK: NDArray[np.integer]) -> list[int]:
    """Layers that route. One expert K times over is no routing: the buffer of a layer that never wrote to it."""
    wrote_L = (ids_TLK > 0).any(axis=(0, 2)) | (ids_TLK.shape[2] == 1)
    return np.flatnonzero(wrote_L).tolist()


def from_base64(text: str, where: str) -> bytes:
    """The bytes of base64 text. Raises ValueError: it is none, or stands for more bytes than one array may have."""
    check_size(where, len(text) * 3 // 4)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UserError(f"{where}: expected base64, got {brief(text)} ({error})") from None


def whole(record: Any, name: str, where: str, least: int) -> int:
    """A whole number of a JSON object."""
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{where}: {name}: expected a whole number from {least}, got {brief(value)}")
    return value


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


@dataclass(frozen=True)
class Npz:
    """Arrays of whole numbers in an npz file, read one at a time and never unpickled."""

    path: Path
    _archive: np.lib.npyio.NpzFile

    @property
    def names(self) -> list[str]:
        return self._archive.files

    def where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def reals(self, name: str) -> NDArray[Any]:
        """An array of numbers of any dimensions. Raises ValueError: as ``array``."""
        return self._load(name, "iuf", "numbers")

    def _load(self, name: str, kinds: str, words: str) -> NDArray[Any]:
        if name not in self.names:
            raise UserError(f"{self.path}: missing array: {name}")
        try:
            self._check_header(name)
            array = self._archive[name]
        except UserError:
            raise
        except Exception as error:  # zipfile, zlib and numpy's parser of headers raise whatever they meet
            raise UserError(f"{self.where(name)}: {brief(str(error), 200, quoted=False)}") from None
        if not isinstance(array, np.ndarray) or (array.dtype.kind not in kinds and array.size):
            got = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else "no array"
            raise UserError(f"{self.where(name)}: expected {words}, got {got}")
        return array

    def _check_header(self, name: str) -> None:
        """Hold what an array announces against what its member holds: numpy allocates it before it reads."""
        info = self._archive.zip.getinfo(f"{name}.npy")
        with self._archive.zip.open(info) as member:
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

    def array(self, name: str, num_dims: int) -> NDArray[np.integer]:
        """An array of ``num_dims`` dimensions, of whatever integers are stored.

        Raises:
            ValueError: no such array, a damaged or pickled one, or one of other things or dimensions.
        """
        array = self._load(name, "iu", "whole numbers")
        if array.ndim != num_dims:
            raise UserError(f"{self.where(name)}: expected {num_dims} dimensions, got shape {array.shape}")
        return array if array.size else array.astype(np.int64)  # an empty list becomes an array of floats


@contextmanager
def opened_npz(path: Path) -> Iterator[Npz]:
    """Open an npz file; what is no such file, a pickle among them, is refused."""
    if not path.is_file():
        raise UserError(f"{path}: expected a regular file")
    with path.open("rb") as file:  # numpy leaves a damaged file open
        try:
            archive = np.load(file, allow_pickle=False)
        except Exception as error:
            raise UserError(
                f"{path}: not a whole, readable npz file ({brief(str(error), 200, quoted=False)})"
            ) from None
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise UserError(f"{path}: not a whole, readable npz file (one array)")
        for info in archive.zip.infolist():
            name, size = info.filename, info.file_size
            if not name.endswith(".npy"):
                raise UserError(f"{path}: expected arrays only (*.npy), got {brief(name)}")
            check_size(f"{path}: {brief(name, quoted=False)}", size)
        yield Npz(path, archive)


def _numbers(value: Any, where: str, shape: tuple[int | None, ...], kinds: str, words: str) -> NDArray[Any]:
    try:
        array = np.array(value)
    except ValueError:
        raise UserError(f"{where}: expected lists of equal length, got {brief(value)}") from None
    if array.size == 0 and len(shape) == array.ndim:
        array = array.astype(np.int64)
    wanted = "x".join("n" if length is None else str(length) for length in shape)
    fits = len(shape) == array.ndim and all(
        length in (None, got) for length, got in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in kinds:
        raise UserError(f"{where}: expected {words} of shape {wanted}, got {brief(value)}")
    return array


# ---- What the user says ----------------------------------------------------------------------------------------------

PHASES = ("prefill", "decode", "prefill and decode", "training")
ASSUMED = "assumed equal over the top-k: the source holds expert ids only"
_OF_MODEL = ("model", "num_experts", "score_function")


@dataclass(frozen=True)
class ImportOptions:
    """Facts about a recording, as options of ``trace import`` say them; ``top_k`` and ``num_layers`` from the preset.

    The preset gives all facts of the model, and the recording must agree; its layers include the dense ones.
    """

    preset: str | None = None
    model: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    num_layers: int | None = None
    domain: str | None = None
    phase: str | None = None
    licence: str | None = None
    score_function: str | None = None
    micro_batch_size: int = 1
    assume_equal_scores: bool = False

    def __post_init__(self) -> None:
        if self.phase is not None and self.phase not in PHASES:
            raise UserError(f"phase: expected one of {', '.join(PHASES)}; got {self.phase!r}")
        if self.score_function not in (None, "softmax", "sigmoid"):
            raise UserError(f"score_function: expected softmax or sigmoid, got {self.score_function!r}")
        if self.num_experts is not None and not 2 <= self.num_experts <= MAX_EXPERTS:
            raise UserError(f"num_experts: expected 2 to {MAX_EXPERTS}, got {self.num_experts}")
        if self.micro_batch_size < 1:
            raise UserError(f"micro_batch_size: expected at least 1, got {self.micro_batch_size}")
        for name in ("model", "domain", "licence"):
            words = getattr(self, name)
            if words is not None and not (words.strip() and words.isprintable()):
                raise UserError(f"{name}: expected words on one line, got {words!r}")

    def with_preset(self) -> ImportOptions:
        """The same with the facts of ``preset``, where there is one.

        Raises:
            ValueError: no such preset, or a fact given beside it.
        """
        if self.preset is None:
            return self
        for name in _OF_MODEL:
            if getattr(self, name) is not None:
                raise UserError(f"{name}: expected none beside preset, which says it; got {getattr(self, name)!r}")
        try:
            spec = load_model(self.preset)
        except ValueError as error:
            raise UserError(f"preset: {error}") from None
        return replace(
            self,
            model=spec.name,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_layers=spec.num_layers,
            score_function=spec.score_function,
        )

    def metadata(self) -> dict[str, str]:
        """The trace's metadata as far as the user gives it."""
        stated = {name: getattr(self, name) or "unstated" for name in ("domain", "licence")}
        return stated | {name: getattr(self, name) for name in ("model", "phase") if getattr(self, name) is not None}

    def need(self, name: str, why: str) -> object:
        """The option of that name. Raises ValueError: it was not given."""
        value = getattr(self, name)
        if value is None:
            raise UserError(f"{name}: needed, because {why}{' (or preset)' if name in _OF_MODEL else ''}")
        return value

    def check_top_k(self, top_k: int, where: str) -> None:
        """Hold a recording's top-k against the preset's."""
        if self.top_k not in (None, top_k):
            raise UserError(f"{where}: top_k: the model has {self.top_k}, the recording {top_k}")

    def accept_no_scores(self, where: str, remedy: str = "") -> str:
        """The ``score`` of a trace that is made from ids alone. Raises ValueError: the user has not accepted that."""
        if not self.assume_equal_scores:
            raise UserError(
                f"{where}: no scores, only expert ids: {remedy}set assume_equal_scores to give all of a token's top-k "
                "the same score (loads stay true; score mass and choices by score then mean nothing)"
            )
        return ASSUMED
