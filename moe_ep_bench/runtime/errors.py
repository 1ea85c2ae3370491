"""Writing to a closed stderr must never kill a run; a user's mistake is one line, a defect of ours a traceback.

A terminal is closed, ``tee`` is killed, the disk of a log file is full: then every write to standard error raises, in
a progress bar, a traceback or the thread that is about to end a hung process. So commands write through a stream that
drops what cannot be written.

What a user can correct is a ``ValueError`` that this package raised: its text was written for the user. One that a
library or the interpreter raised (shapes that do not match, say) is a defect.
"""

from __future__ import annotations

import contextlib
import dis
import errno
import json
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO, cast

from moe_ep_bench.runtime.exit_codes import LOST, USER_ERROR

# What libraries raise of a file that is not what it should be; the file is the user's.
_UNREADABLE = (UnicodeError, json.JSONDecodeError)
_PACKAGE = __name__.partition(".")[0]
_UNWRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST),  # a file where a directory is to be, or the reverse
)


def complain(error: Exception) -> int:
    """Say on standard error what ended a command; return the exit status that it calls for.

    What the user can correct is one line; what nobody foresaw is shown whole.
    """
    status = status_of(error)
    if status == LOST:
        traceback.print_exception(error)
    elif isinstance(error, OSError):
        # pyarrow's own errors say it in their text.
        print(f"moe-ep-bench: cannot write {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
    else:
        print(f"moe-ep-bench: {error}", file=sys.stderr)
    return status


def status_of(error: Exception) -> int:
    """``USER_ERROR`` for what the user can correct, else ``LOST``: 1 would say that a job went through."""
    unwritable = isinstance(error, OSError) and error.errno in _UNWRITABLE
    return USER_ERROR if unwritable or is_mistake(error) else LOST


def is_mistake(error: Exception) -> bool:
    """Whether an error is the user's to correct: a ``raise`` of this package began it, or a file cannot be read."""
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    if isinstance(error, _UNREADABLE):
        return True
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    code, module = innermost.tb_frame.f_code, innermost.tb_frame.f_globals.get("__name__", "")
    # What the interpreter raises in our own lines (int("x"), a strict zip) begins at another instruction.
    is_raise = code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raise and module.partition(".")[0] == _PACKAGE


def in_short(error: Exception) -> str:
    """A library's error in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


class _Tolerant:
    """A stream whose writes never fail; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # ValueError: it was closed.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def tolerant_stderr() -> Iterator[None]:
    """Let nothing in the block fail because standard error cannot be written."""
    stream = sys.stderr
    sys.stderr = cast(TextIO, _Tolerant(stream))
    try:
        yield
    finally:
        sys.stderr = stream
