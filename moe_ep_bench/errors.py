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


def saying(hint: str) -> contextlib.AbstractContextManager[None]:
    """End the line of a ValueError in the block with what to do."""
    return naming("", hint)


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


# Where pydantic's own message is none for people, by its type of error; the error's context fills the braces.
_WORDS = {
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    "string_too_short": "text",
    "string_pattern_mismatch": "text of the pattern {pattern}",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "keys with values"),
    "union_tag_not_found": "the key {discriminator}",
    "union_tag_invalid": "{discriminator} as one of {expected_tags}",
}


def problem_words(problem: Mapping[str, Any]) -> str:
    """One error of pydantic's as ``expected ..., got value``; its own message where that says so already."""
    kind, message, context = problem["type"], problem["msg"], problem.get("ctx", {})
    if kind == "missing":
        return "missing"
    if kind == "extra_forbidden":
        return "no such key"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    plain = {
        key: f"{value:g}" if isinstance(value, float) else str(value).replace("'", "") for key, value in context.items()
    }
    expected = _WORDS[kind].format(**plain) if kind in _WORDS else message.removeprefix("Input should be ")
    return f"expected {expected}, got {brief(context.get('tag', problem['input']))}"
