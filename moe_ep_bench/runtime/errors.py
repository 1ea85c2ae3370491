"""A closed standard error never ends a command; a user's mistake is one line, a defect of ours a traceback."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO, cast

from moe_ep_bench.errors import UserError, cannot_write, printable
from moe_ep_bench.runtime.exit_codes import LOST, USER_ERROR

_MOST_CHARACTERS = 1500  # of the line; values in it are cut much earlier
# The last two: what libraries raise of a file that is not what it should be; the file is the user's.
_MISTAKES = (UserError, UnicodeError, json.JSONDecodeError)
_UNWRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST),  # a file where a directory is to be, or the reverse
)


def complain(error: Exception) -> int:
    """Print what ended a command, in one line where the user can correct it; return the exit status.

    That is ``LOST`` for what the user cannot correct: 1 would say that a job went through.
    """
    is_unwritable = isinstance(error, OSError) and error.errno in _UNWRITABLE
    if not is_unwritable and not isinstance(error, _MISTAKES):
        traceback.print_exception(error)
        return LOST
    line = printable(f"moe-ep-bench: {cannot_write(error) if isinstance(error, OSError) else error}")
    print(line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}...", file=sys.stderr)
    return USER_ERROR


class _Tolerant:
    """A stream whose writes never fail; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed.
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def tolerant_stderr() -> Iterator[None]:
    """Drop what cannot be written to standard error in the block: a closed terminal, a full disk, a killed ``tee``."""
    stream = sys.stderr
    sys.stderr = cast(TextIO, _Tolerant(stream))
    try:
        yield
    finally:
        sys.stderr = stream
