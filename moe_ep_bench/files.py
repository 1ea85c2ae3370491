"""Write files whole or not at all, and hash what they say."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_ep_bench.errors import UserError

_MOST_LINKS = 40  # of one path, as in Linux


def stable_hash(value: Any) -> str:
    """Hash a JSON-ready value: 16 hex digits, equal for equal content on any machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block ends well, and vanishes otherwise.

    A link stays: the file that it leads to is replaced, or made. A device or a pipe stays too: all bytes go through it.

    Raises:
        ValueError: one line: links lead in a ring, or a device or pipe does not take the bytes.
    """
    through = _is_stream(path)
    if path.is_symlink() and not through:
        link, path = path, Path(os.path.realpath(path))
        if path.is_symlink():
            raise UserError(f"{link}: leads to no file, as links lead in a ring")
    if not through:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=None if through else path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if through:
            _pour(temporary, path)
            return
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder to write into that is a file, or lies below one; said before anything is read or drawn.

    Raises:
        ValueError: one line that names the option, the folder and the file.
    """
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if place.exists():
            words = "is a file" if place == folder else f"lies below {place}, which is a file"
            raise UserError(f"{option} {folder}: {words}; expected a directory")


def write_json(path: Path, value: Any) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def _is_stream(path: Path) -> bool:
    """Whether bytes for ``path`` are to go through it: it is there, and neither a regular file nor a directory."""
    return _descriptor(path) is not None or (path.exists() and not path.is_file() and not path.is_dir())


def _pour(source: Path, path: Path) -> None:
    """Write the bytes of ``source`` through ``path``, behind what was printed before; a pipe waits for its reader.

    Raises:
        ValueError: they cannot be written; one line that names the path.
        BrokenPipeError: nobody reads them any more.
    """
    sys.stdout.flush()
    descriptor = _descriptor(path)
    try:
        # What is open is not opened again: that would begin at the start of a file, and a socket refuses it.
        sink = os.open(path, os.O_WRONLY) if descriptor is None else os.dup(descriptor)
        with open(source, "rb") as read, open(sink, "wb") as written:
            shutil.copyfileobj(read, written)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _descriptor(path: Path) -> int | None:
    """The descriptor of this process that ``path`` names, itself or through links; None where it names a file."""
    own = os.path.realpath("/proc/self/fd")
    for _ in range(_MOST_LINKS):
        if path.name.isdecimal() and os.path.realpath(path.parent) == own:
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None
