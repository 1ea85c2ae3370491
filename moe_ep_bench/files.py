"""Write files whole or not at all, hash what they say, and read YAML and JSON; what is wrong is one line.

YAML is read and written by PyYAML's safe classes, which run nothing, with the scalars of YAML 1.2; no key stands twice.
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
from typing import Any, ClassVar, TypeGuard

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


def parse_json(text: bytes | str, where: object, *, unique: bool = False) -> Any:
    """A JSON value; ``unique`` takes no key twice, of which ``json`` would take the last.

    Raises:
        ValueError: one line that begins with ``where``.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        start = text[:40].decode(errors="replace") if isinstance(text, bytes) else text[:40]
        words = brief(start) if text else "nothing"
        raise UserError(f"{where}: expected JSON, got {words} ({' '.join(str(error).split())})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{brief(name, quoted=False)} stands here twice")
    return dict(pairs)


def read_json(path: Path) -> Any:
    """The JSON value of a file.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: one line that names the file.
    """
    return parse_json(path.read_bytes(), path)


def is_whole_number(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether a JSON value is a whole number from ``least`` on; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# Scalars without quotes, by the core schema of YAML 1.2 (yaml.org/spec/1.2.2, section 10.3.2); all others are text. By
# YAML 1.1, PyYAML's own, ``12:30`` is a number, ``on`` true and 2026-01-31 a date.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


_SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """Takes no key twice, of which PyYAML would take the last."""

    yaml_implicit_resolvers: ClassVar = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                words = f"{brief(key.value, quoted=False)} stands here twice"
                raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)  # a leading 0 is no octal
        return int(node.value, base)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that ``_Loader`` would read as something else."""

    yaml_implicit_resolvers: ClassVar = {}


for tag, pattern, first in _SCALARS:
    for kind in (_Loader, _Dumper):
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


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


def dump_yaml(value: Any, **style: Any) -> str:
    """Plain values as YAML that ``parse_yaml`` reads back; ``style`` is PyYAML's."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style)
