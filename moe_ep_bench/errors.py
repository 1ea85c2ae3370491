"""Tell a user's mistake from a defect of ours."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class UserError(ValueError):
    """What a user can correct: one line that names the file or option, the value, and what is allowed.

    Commands print it and exit with 2; any other exception is a defect and shown with its traceback. It is a ValueError,
    so that pydantic's validators may raise it.
    """


@contextlib.contextmanager
def naming(where: str, hint: str = "", joint: str = ": ") -> Iterator[None]:
    """Name the file, key or option that a ValueError in the block is about."""
    try:
        yield
    except ValueError as problem:
        raise UserError(f"{where}{joint if where else ''}{problem}{hint}") from None


def check_known(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise a UserError at the first name that is not among the known ones, which its line lists."""
    known = list(known)
    for name in names:
        if name not in known:
            raise UserError(f"{option}: expected some of {', '.join(known)}; got {name!r}")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of an error's line: the known name that begins with a word, holds it or is spelt like it; else empty."""
    text, names = str(word).lower(), list(known)
    close = [name for name in names if text and name.lower().startswith(text)]
    close += [name for name in names if text and text in name.lower()]
    close += difflib.get_close_matches(text, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def brief(value: object, most: int = 80, *, quoted: bool = True) -> str:
    """A value as an error's line shows it: on one line, cut at ``most`` characters, true as files write it."""
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join((repr(value) if quoted else str(value)).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def cannot_write(error: OSError) -> str:
    """What could not be written, and why; pyarrow's own errors name no file and say the rest in their text."""
    return f"cannot write {error.filename or 'a file'}: {error.strerror or error}"


def printable(text: str) -> str:
    """A text as one line that no terminal takes for a command: what cannot be printed is written out."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in " ".join(text.split())
    )


# What pydantic's own messages of these types become.
_PLAIN_WORDS = {
    "too_short": "give at least one value",
    "string_too_short": "give at least one character",
    "string_pattern_mismatch": "expected a text of the pattern {pattern}",
    "union_tag_invalid": "expected {discriminator} to be one of {expected_tags}",
    "union_tag_not_found": "expected a key {discriminator}",
}


def problem_words(problem: Mapping[str, Any]) -> str:
    """One error of pydantic's: what was expected, with the value where the message has none."""
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if plain := _PLAIN_WORDS.get(problem["type"]):
        message = plain.format_map(problem.get("ctx", {}))
    return message if problem["type"] in ("missing", "value_error") else f"{message}, got {brief(problem['input'])}"
