"""Write files whole or not at all, hash what they say, and read YAML and JSON; what is wrong is one line.

YAML is read by PyYAML's safe loader, which runs nothing, with three rules of our own: no key stands twice, a date is
text, and 1e9 is a number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

from moe_ep_bench.errors import UserError, brief, cannot_write


def stable_hash(value: Any) -> str:
    """Hash a JSON-ready value: 16 hex digits, equal for equal content on any machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- writing ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block ends well, and vanishes otherwise.

    A link stays: the file that it leads to is replaced, or made.

    Raises:
        ValueError: one line: a folder, device or pipe stands there, or no file can be made.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: expected a regular file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except FileNotFoundError as error:  # Below /proc no file can be made.
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    except OSError as error:
        error.filename = str(path)  # not the temporary one
        raise
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text; the file appears whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def check_folder(folder: Path, option: str) -> None:
    """Refuse a file as a folder to write into, before anything is read or drawn; ValueError names the option."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{option} {folder}: is a file; expected a directory")


@contextlib.contextmanager
def writing_to(path: Path, option: str) -> Iterator[None]:
    """Say in one line that a path cannot be written, where the block fails to; ValueError names option and path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: {cannot_write(error)}") from None


def make_folder(folder: Path, option: str) -> None:
    """Make a folder to write into, and try to write there.

    Raises:
        ValueError: one line that names the option, the folder and what is in the way.
    """
    check_folder(folder, option)
    with writing_to(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is not UTF-8; one line that names the file.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(f"{path}: expected text in UTF-8, got byte 0x{byte:02x} at position {error.start}") from None


def parse_json(text: bytes | str, where: object) -> Any:
    """A JSON value.

    Raises:
        ValueError: one line that begins with ``where``.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        start = text[:40].decode(errors="replace") if isinstance(text, bytes) else text[:40]
        words = brief(start) if text else "nothing"
        raise UserError(f"{where}: expected JSON, got {words} ({' '.join(str(error).split())})") from None


def read_json(path: Path) -> Any:
    """The JSON value of a file.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: one line that names the file.
    """
    return parse_json(path.read_bytes(), path)


def is_whole_number(value: object, least: int = 0) -> bool:
    """Whether a JSON value is a whole number from ``least`` on; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Takes no key twice, of which PyYAML would take the last; a date is text, and 1e9 a number."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                words = f"{brief(key.value, quoted=False)} stands here twice"
                raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse YAML of plain values whose keys are unique.

    Raises:
        ValueError: the text is not that; one line with the place.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        words = re.sub(r'in "<[\w ]+>", line', "in line", " ".join(str(error).split()))
        raise UserError(f"not valid YAML: {brief(words, 200, quoted=False)}") from None
