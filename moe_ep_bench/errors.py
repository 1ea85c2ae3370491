"""Tell a user's mistake from a defect of ours."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """What a user can correct: one line that names the file or option, the value, and what is allowed.

    Commands print it and exit with 2; any other exception is a defect and shown with its traceback. It is a ValueError,
    so that pydantic's validators may raise it.
    """


@contextlib.contextmanager
def naming(where: str, hint: str = "") -> Iterator[None]:
    """Name the file, key or option that a ValueError in the block is about."""
    try:
        yield
    except ValueError as problem:
        raise UserError(f"{where}: {problem}{hint}") from None


@contextlib.contextmanager
def saying(hint: str) -> Iterator[None]:
    """End the line of a ValueError in the block with what to do."""
    try:
        yield
    except ValueError as problem:
        raise UserError(f"{problem}{hint}") from None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of an error's line: the known name that begins with a word, holds it or is spelt like it; else empty."""
    text, names = str(word).lower(), list(known)
    close = [name for name in names if text and name.lower().startswith(text)]
    close += [name for name in names if text and text in name.lower()]
    close += difflib.get_close_matches(text, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def brief(value: object, most: int = 80, *, quoted: bool = True) -> str:
    """A value as an error's line shows it: on one line, cut at ``most`` characters."""
    try:
        text = " ".join((repr(value) if quoted else str(value)).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """A text as one line that no terminal takes for a command: what cannot be printed is written out."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in " ".join(text.split()))
