"""Ask a program, or a function in a process of its own, with a timeout that holds.

A driver that lost its GPU hangs whoever asks it, and such a process may survive SIGKILL: after the timeout this process
goes on without it. Output goes to temporary files, which no grandchild can keep open or fill up.
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
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import Any

# What was killed is waited for this long, then left to the kernel.
_KILLED_S = 2.0
# A function's process ends itself this long after its timeout, also where whoever asked is gone.
_GRACE_S = 10.0


class CommandError(RuntimeError):
    """Why there is no answer, in one line."""


def output_of(command: Sequence[str], timeout_s: float) -> str:
    """What a program prints; CommandError where it is not there, fails, or takes longer than ``timeout_s``."""
    status, output, errors = _finish(command, timeout_s)
    if status != 0:
        said = " ".join(f"{output} {errors}".split())
        raise CommandError(f"ended with status {status}{': ' + said[:300] if said else ''}")
    return output


def ask(function: str, *arguments: Any, timeout_s: float) -> Any:
    """What a function (``module:function``) returns in a process of its own; arguments and answer are JSON.

    Raises:
        CommandError: it raised, died, or took longer than ``timeout_s``.
    """
    command = [sys.executable, "-m", __name__, function, json.dumps(arguments), str(timeout_s + _GRACE_S)]
    paths = os.pathsep.join(path for path in sys.path if path)
    status, output, errors = _finish(command, timeout_s, {**os.environ, "PYTHONPATH": paths})
    if status != 0:
        said = [line.strip() for line in errors.splitlines() if line.strip()]
        raise CommandError(said[-1][:300] if said and status > 0 else f"died of signal {-status}")
    return json.loads(output)


def _finish(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status (minus the signal that ended it), output and errors of a program that may take ``timeout_s``."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=env, start_new_session=True
            )
        except OSError as error:
            raise CommandError(f"{command[0]}: {error.strerror or error}") from None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CommandError(f"no answer within {timeout_s:.3g} s") from None
        finally:
            if process.poll() is None:  # With all that it started.
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILLED_S)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return status, texts[0], texts[1]


def _answer(function: str, arguments: str, limit_s: str) -> None:
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the function prints is no answer.
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    json.dump(answer, answers)
    answers.flush()
    os._exit(0)  # A library's destructors may wait for others.


if __name__ == "__main__":
    _answer(*sys.argv[1:])
