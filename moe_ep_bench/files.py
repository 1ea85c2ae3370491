"""Write files whole or not at all, hash what they say, and read YAML and JSON that others wrote.

Whatever reads a document of a user's, or of a results directory, comes through here; whom it concerns holds a type (a
pydantic model) against it. Refused at this door, each in one line:

* what is no regular file, or larger than its kind ever is; in a results directory, what leads out of it;
* nesting beyond ``MOST_DEPTH``, and aliases that stand for more than ``MOST_VALUES`` values;
* whole numbers of more than 64 bits, and in JSON numbers that it does not have (NaN, infinities);
* YAML's tags and merge keys: a config needs none. A date is text, and 1e9 is a number;
* characters that are no text: halves of some (surrogates), control characters, and marks that turn a line round.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

from moe_ep_bench.errors import UserError, brief, cannot_write

MOST_YAML_BYTES = 2**20
MOST_JSON_BYTES = 2**28
MOST_DEPTH = 40
MOST_VALUES = 200_000
_TOO_DEEP = f"expected values at most {MOST_DEPTH} deep in each other, got deeper ones"
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def stable_hash(value: Any) -> str:
    """Hash a JSON-ready value: 16 hex digits, equal for equal content on any machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def free_memory_bytes() -> int:
    """Memory of this machine that no process has; a lot where the system does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return 2**62


# ---- paths -----------------------------------------------------------------------------------------------------------


def _regular(path: Path) -> Path:
    """Where a path leads. Raises ValueError: in a ring, or to a pipe or a device; one line that names it."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise UserError(f"{path}: leads to no file, as links lead in a ring")
    if target.exists() and not target.is_file() and not target.is_dir():
        raise UserError(f"{path}: expected a regular file")
    return target


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block ends well, and vanishes otherwise.

    A link stays: the file that it leads to is replaced, or made.

    Raises:
        ValueError: one line: links lead in a ring, a device or pipe stands there, or no file can be made.
    """
    path = _regular(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except FileNotFoundError as error:  # Below /proc no file can be made.
        raise UserError(f"cannot write {path}: {error.strerror}") from None
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
    """Refuse a folder to write into that is a file, or lies below one; said before anything is read or drawn.

    Raises:
        ValueError: one line that names the option, the folder and the file.
    """
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not place.is_dir():
        words = "is a file" if place == folder else f"lies below {place}, which is a file"
        raise UserError(f"{option} {folder}: {words}; expected a directory")


@contextlib.contextmanager
def writing_to(path: Path, option: str) -> Iterator[None]:
    """Say in one line that a path cannot be written, where the block fails to; ValueError names option and path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: {cannot_write(error)}") from None


def make_folders(root: Path, option: str, *folders: Path) -> None:
    """Make a folder to write into, and try to write there, and into those of ``folders`` that there are.

    Raises:
        ValueError: one line that names the option, the folder and what is in the way.
    """
    check_folder(root, option)
    with writing_to(root, option):
        root.mkdir(parents=True, exist_ok=True)
        # What an earlier run left may belong to somebody else, or be no folder any more.
        for folder in (root, *filter(Path.exists, folders)):
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"x")


def inside(folder: Path, path: Path) -> Path:
    """A path below a folder, which no name and no link leads out of it, and where no pipe or device stands.

    Raises:
        ValueError: one line that names the path.
    """
    if "\0" in str(path) or len(path.name) > 250:
        raise UserError(f"{brief(str(path), quoted=False)}: no name of a file")
    if not _regular(path).is_relative_to(folder.resolve()):
        raise UserError(f"{path}: leads out of {folder}")
    return path


def refuse_links_out(root: Path, *folders: Path) -> None:
    """Look through a results directory, and folders of it, before files of fixed names are written there.

    Raises:
        ValueError: a link there leads out of the directory; one line that names it.
    """
    for folder in (root, *folders):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_symlink():
                inside(root, path)


# ---- documents -------------------------------------------------------------------------------------------------------


def read_bytes(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is no regular file, or a larger one; one line that names it.
    """
    if "\0" in str(path):
        raise UserError(f"{brief(str(path))}: no name of a file")
    # A pipe without a writer would be waited for.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise UserError(f"{path}: expected a regular file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        size = max(facts.st_size, len(content))
        raise UserError(f"{path}: expected at most {most_bytes:,} bytes, got {size:,}")
    return content


def read_text(path: Path, most_bytes: int = MOST_JSON_BYTES) -> str:
    """The text of a regular file.

    Raises:
        OSError, ValueError: as ``read_bytes``, or it is not UTF-8.
    """
    try:
        return read_bytes(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(f"{path}: expected text in UTF-8, got byte 0x{byte:02x} at position {error.start}") from None


def parse_json(text: bytes | str, where: object, *, infinities: bool = False) -> Any:
    """A JSON value; NaN and infinities, which JSON does not have, are refused, unless ``infinities`` are taken.

    Raises:
        ValueError: one line that begins with ``where``.
    """
    try:
        return json.loads(text, parse_constant=float if infinities else _refuse_constant)
    except (ValueError, RecursionError) as error:
        start = text[:40].decode(errors="replace") if isinstance(text, bytes) else text[:40]
        words = brief(start) if text else "nothing"
        raise UserError(f"{where}: expected JSON, got {words} ({' '.join(str(error).split())})") from None


def is_whole_number(value: object, least: int = 0) -> bool:
    """Whether a JSON value is a whole number from ``least`` on; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _refuse_constant(name: str) -> None:
    raise UserError(f"{name} is no JSON number")


def checked_json(text: bytes | str, where: object) -> Any:
    """A JSON document of plain values.

    Raises:
        ValueError: one line that begins with ``where``.
    """
    value = parse_json(text, where)
    if problem := _problem_of(value):
        raise UserError(f"{where}: {problem}")
    return value


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """The JSON document (``checked_json``) of a file.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: one line that names the file.
    """
    return checked_json(read_text(path, most_bytes), path)


def _problem_of(document: Any, most_values: float = math.inf, *, infinities: bool = False) -> str:
    """What no reader should meet in a document; a value that stands in several places counts in each."""
    left: list[tuple[Any, int]] = [(document, 1)]
    seen = 0
    while left:
        value, depth = left.pop()
        seen += 1
        if seen > most_values:
            return f"more than {most_values:,} values, aliases counted"
        if isinstance(value, dict | list):
            if depth > MOST_DEPTH:
                return _TOO_DEEP
            inner = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
            left += [(part, depth + 1) for part in inner]
        elif isinstance(value, float) and not (infinities or math.isfinite(value)):
            return "expected numbers that a double holds, got a larger one"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            return f"expected whole numbers of 64 bits, got one of {value.bit_length()}"
        elif isinstance(value, str) and (character := _NO_TEXT.search(value)):
            return f"expected text, got the character U+{ord(character[0]):04X}"
        elif not isinstance(value, float | int | str | None):
            return f"expected text, numbers, lists and keys with values, got {type(value).__name__}"
    return ""


# ---- YAML ------------------------------------------------------------------------------------------------------------


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Takes no key twice, of which PyYAML would take the last, and merges none: merges may multiply without bound."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def descend_resolver(self, current_node: yaml.Node | None, current_index: Any) -> None:
        """Called at every value that is composed; libyaml's composer would overflow the stack."""
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise yaml.YAMLError(_TOO_DEEP)
        super().descend_resolver(current_node, current_index)

    def ascend_resolver(self) -> None:
        self.depth -= 1
        super().ascend_resolver()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError):  # as !!int, !!bool and others meet text
            expected = f"expected {node.tag.replace('tag:yaml.org,2002:', '!!')}, got {brief(node.value)}"
            raise yaml.constructor.ConstructorError(None, None, expected, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):  # a list or text of the tag !!map or !!set
            return super().construct_mapping(node, deep)  # which refuses it
        seen = set()
        for key, _ in node.value:
            is_merge, is_twice = key.tag.endswith(":merge"), isinstance(key.value, str) and key.value in seen
            if is_merge or is_twice:
                words = "merge keys are not read" if is_merge else f"{brief(key.value, quoted=False)} stands here twice"
                raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
            seen |= {key.value} if isinstance(key.value, str) else set()
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse YAML of plain values whose keys are unique.

    Raises:
        ValueError: the text is not that.
    """
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        words = re.sub(r'in "<[\w ]+>", line', "in line", " ".join(str(error).split()))
        raise UserError(f"not valid YAML: {brief(words, 200, quoted=False)}") from None
    if problem := _problem_of(value, most_values=MOST_VALUES, infinities=True):  # which schemas refuse by their key
        raise UserError(f"not valid YAML: {problem}")
    return value
