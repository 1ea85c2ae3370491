"""Ask a function in a process of its own, and wait for its answer so long and no longer.

``python -m moe_ep_bench.machine.doctor.child MODULE:FUNCTION ARGUMENTS SECONDS`` is that process. Arguments and answer
are JSON. What the function prints goes to standard error; the answer alone to standard output. The process ends itself
when its time is over, so that it does not outlive whoever asked.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from typing import Any

from moe_ep_bench.machine.subprocesses import Command, CommandError

# The one who asks gives up first, and can say so.
_GRACE_S = 10.0


class Question:
    """A function at work in its own process; ``with`` ends that.

    Args:
        function: ``module:function``.

    Raises:
        CommandError: the process cannot be started.
    """

    def __init__(self, function: str, *arguments: Any, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        program = [sys.executable, "-m", __name__, function, json.dumps(arguments), str(timeout_s + _GRACE_S)]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._command = Command(program, {**os.environ, "PYTHONPATH": paths})

    def __enter__(self) -> Question:
        return self

    def __exit__(self, *reason: object) -> None:
        self._command.__exit__(*reason)

    def answer(self) -> Any:
        """What the function returned.

        Raises:
            CommandError: it took too long from its start on, raised, or died.
        """
        status = self._command.wait(self._deadline - time.monotonic(), self._timeout_s)
        if status != 0:
            said = [line.strip() for line in self._command.errors.splitlines() if line.strip()]
            raise CommandError(said[-1][:300] if said and status > 0 else f"died of signal {-status}")
        return json.loads(self._command.output)


def ask(function: str, *arguments: Any, timeout_s: float) -> Any:
    """A ``Question`` and its answer."""
    with Question(function, *arguments, timeout_s=timeout_s) as question:
        return question.answer()


def _main(function: str, arguments: str, limit_s: str) -> None:
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    json.dump(answer, answers)
    answers.flush()
    os._exit(0)  # Destructors of process groups wait for peers.


if __name__ == "__main__":
    _main(*sys.argv[1:])
