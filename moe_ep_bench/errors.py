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
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in " ".join(text.split())
    )


# What a field expects, by pydantic's type of error; its context fills the braces.
_EXPECTED = {
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "text",
    "string_pattern_mismatch": "text of the pattern {pattern}",
    "path_type": "a path",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "mapping_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "union_tag_not_found": "the key {discriminator}",
    "union_tag_invalid": "{discriminator} as one of {expected_tags}",
}


def problem_words(problem: Mapping[str, Any]) -> str:
    """One error of pydantic's in our words: ``expected ..., got value``."""
    kind = problem["type"]
    if kind == "missing":
        return "missing"
    if kind == "extra_forbidden":
        return "no such key"
    if kind == "json_invalid":
        return f"not valid JSON: {problem['ctx']['error']}"
    if kind == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    context = {key: _plain(value) for key, value in problem.get("ctx", {}).items()}
    if kind in _EXPECTED:
        got = problem["ctx"]["tag"] if kind == "union_tag_invalid" else problem["input"]
        return f"expected {_EXPECTED[kind].format(**context)}, got {brief(got)}{_as_yaml_writes(kind, got)}"
    return f"{problem['msg'][0].lower()}{problem['msg'][1:]}, got {brief(problem['input'])}"


def _as_yaml_writes(kind: str, got: object) -> str:
    """How YAML writes a number that it took for text, as it does 1e9."""
    try:
        number = repr(float(got)) if kind == "float_type" and isinstance(got, str) else ""
    except ValueError:
        return ""
    return f" (text to YAML; as a number {number})" if "." in number else ""


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace("'", "")
