"""Run a program, or a function in a subprocess, with a timeout that holds whatever becomes of it.

A driver that lost its GPU hangs whoever asks it, and such a process may survive SIGKILL. So another process asks, and
this one goes on without it after the timeout. Output goes to temporary files: a pipe fills up, and stays open as long
as any grandchild lives.

A function's process (``Question``) is ``python -m moe_ep_bench.machine.subprocesses MODULE:FUNCTION ARGUMENTS
SECONDS``. Arguments and answer are JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO, Any, Self

# What was killed is waited for this long, then left to the kernel.
_KILLED_S = 2.0
# A function's process ends itself this long after its timeout: it does not outlive whoever asked, who gives up first.
_GRACE_S = 10.0


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

    def __enter__(self) -> Self:
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
            allowed_s: all the time that it had, of which ``timeout_s`` is left; for the error.

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
    """What a program prints; CommandError where it is not there, fails, or takes longer than ``timeout_s``."""
    with Command(command) as started:
        status = started.wait(timeout_s)
        if status != 0:
            said = " ".join((started.output + " " + started.errors).split())
            raise CommandError(f"ended with status {status}{': ' + said[:300] if said else ''}")
        return started.output


class Question(Command):
    """A function (``module:function``) at work in a subprocess; ``with`` ends that."""

    def __init__(self, function: str, *arguments: Any, timeout_s: float) -> None:
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        program = [sys.executable, "-m", __name__, function, json.dumps(arguments), str(timeout_s + _GRACE_S)]
        paths = os.pathsep.join(path for path in sys.path if path)
        super().__init__(program, {**os.environ, "PYTHONPATH": paths})

    def answer(self) -> Any:
        """What the function returned; CommandError where it took too long from its start on, raised, or died."""
        status = self.wait(self._deadline - time.monotonic(), self._timeout_s)
        if status != 0:
            said = [line.strip() for line in self.errors.splitlines() if line.strip()]
            raise CommandError(said[-1][:300] if said and status > 0 else f"died of signal {-status}")
        return json.loads(self.output)


def ask(function: str, *arguments: Any, timeout_s: float) -> Any:
    """Call a function in a subprocess with a timeout: a ``Question`` and its answer."""
    with Question(function, *arguments, timeout_s=timeout_s) as question:
        return question.answer()


def _answer(function: str, arguments: str, limit_s: str) -> None:
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the function prints is no answer.
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    json.dump(answer, answers)
    answers.flush()
    os._exit(0)  # Destructors of process groups wait for peers.


if __name__ == "__main__":
    _answer(*sys.argv[1:])
