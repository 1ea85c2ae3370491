"""Run another program within a time limit, whatever becomes of it.

A driver that lost its GPU keeps whoever asks it, and such a process may not even die when it is killed. So what asks
is always another process; who waits for it waits so long and no longer, and goes on without it. Its output goes to
temporary files: a pipe fills up, and stays open as long as any grandchild lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO

# What was killed is waited for this long, then left to the kernel.
_KILLED_S = 2.0


class CommandError(RuntimeError):
    """Why a program gave no output, in one line."""


class Command:
    """A program that was started; ``with`` stops it, and all that it started, at the end.

    Raises:
        CommandError: there is no such program, or it cannot be started.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._files = contextlib.ExitStack()  # closed by __exit__
        try:
            self._out = self._files.enter_context(TemporaryFile())  # noqa: SIM115
            self._err = self._files.enter_context(TemporaryFile())  # noqa: SIM115
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, env=env, start_new_session=True
            )
        except OSError as error:
            self._files.close()
            raise CommandError(f"{command[0]}: {error.strerror or error}") from None

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_S)
        self._files.close()

    def wait(self, timeout_s: float, allowed_s: float | None = None) -> int:
        """Its exit status (minus the signal that ended it).

        Args:
            allowed_s: all the time that it had, to say so; of which ``timeout_s`` is what is left.

        Raises:
            CommandError: it runs longer.
        """
        try:
            return self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            raise CommandError(f"no answer within {allowed_s or timeout_s:.3g} s") from None

    @property
    def output(self) -> str:
        return _text(self._out)

    @property
    def errors(self) -> str:
        return _text(self._err)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def output_of(command: Sequence[str], timeout_s: float) -> str:
    """What a program prints.

    Raises:
        CommandError: it is not there, fails, or takes longer than ``timeout_s``.
    """
    with Command(command) as started:
        status = started.wait(timeout_s)
        if status != 0:
            said = " ".join((started.output + " " + started.errors).split())
            raise CommandError(f"ended with status {status}{': ' + said[:300] if said else ''}")
        return started.output
