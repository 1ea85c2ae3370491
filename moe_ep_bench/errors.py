"""What a user is told: mistakes in one line, unlike defects of ours; exit statuses; progress."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

# Exit statuses of every command, and of the ranks.
OK = 0
CASES_FAILED = 1  # the job went through, but some cases have a reason instead of times
USER_ERROR = 2  # one line was printed that says what to change
LOST = 75  # a rank lost the process group, or stood still; a new job goes on with the next case (EX_TEMPFAIL)
CLOSED = 138  # asked to (SIGUSR1), ended between comparisons; the same command does the rest (128 + the signal)

_SELDOM_S = 60.0  # how often a pipe or a log, which keeps every update, gets one


class UserError(ValueError):
    """What a user can correct: one line that names the file or option, the key, the value, and what is allowed.

    Commands print it and exit with 2; any other exception is a defect and shown with its traceback. It is a ValueError,
    so that pydantic's validators may raise it.

    Attributes:
        words: what is wrong, and what is allowed.
        keys: dotted keys that have the value; several where values do not go together, none where no key has it.
        where: the file or option.
    """

    def __init__(self, words: str, *keys: str, where: str = "") -> None:
        super().__init__(": ".join(filter(None, [where, ", ".join(keys), words])))
        self.words, self.keys, self.where = words, keys, where

    def without(self, file: str) -> UserError:
        """The same error without the name of a file that no user wrote."""
        return UserError(self.words, *self.keys, where="" if self.where == file else self.where)

    def within(self, section: str) -> UserError:
        """The same error of the section that has its keys; of the whole section where it has none, or names a file."""
        if not section:
            return self
        if self.where or not self.keys:
            return UserError(str(self), section)
        return UserError(self.words, *(f"{section}.{key}" for key in self.keys))


@contextlib.contextmanager
def naming(where: str = "", hint: str = "", *, keys: Sequence[str] = (), section: str = "") -> Iterator[None]:
    """Name the file or option that a ValueError in the block is about, its keys, or the section that has its keys."""
    try:
        yield
    except ValueError as problem:
        error = problem if isinstance(problem, UserError) else UserError(str(problem))
        error = UserError(str(error), *keys) if keys else error.within(section)
        where = ": ".join(filter(None, [where, error.where]))
        raise UserError(f"{error.words}{hint}", *error.keys, where=where) from None


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


def in_ranges(numbers: Iterable[int]) -> str:
    """Numbers as a person writes them: ``0 to 2, 5``."""
    ordered = sorted(numbers)
    starts = [number for number in ordered if number - 1 not in ordered]
    ends = [number for number in ordered if number + 1 not in ordered]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


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


def problem_error(problem: Mapping[str, Any], key: str, where: str = "") -> UserError:
    """One error of pydantic's, or what a validator of ours raised: at a key, of a file."""
    raised = problem.get("ctx", {}).get("error")
    error = raised if isinstance(raised, UserError) else UserError(problem_words(problem))
    error = error.within(key)
    return UserError(error.words, *error.keys, where=where)


def problem_words(problem: Mapping[str, Any]) -> str:
    """One error of pydantic's: what was expected, with the value where the message has none."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    message = problem["msg"].replace("Input should be", "expected")
    if plain := _PLAIN_WORDS.get(problem["type"]):
        message = plain.format_map(problem.get("ctx", {}))
    return message if problem["type"] == "missing" else f"{message}, got {brief(problem['input'])}"


def progress_bar(total: int, unit: str, title: str = "", *, shown: bool = True) -> tqdm:
    """Count ``total`` units on standard error; nothing where there is nothing to do or it is not to be ``shown``.

    What ends within a minute says nothing in a log.
    """
    seldom = {"mininterval": 1.0} if sys.stderr.isatty() else {"mininterval": _SELDOM_S, "delay": _SELDOM_S}
    how = {"dynamic_ncols": True, "disable": not shown or not total, **seldom}
    tqdm.monitor_interval = 0  # Else a thread of its own wakes up beside what is timed.
    return tqdm(total=total, unit=f" {unit}", desc=title or None, **how)
