"""Start a server as a process group of its own, wait until it answers, and leave nothing of it behind.

A server gets a free port. Another program may take that in between, so a server that has ended while its port is taken
is started again with another. It is ready when ``/v1/models`` answers and a process of its own listens there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import httpx2
import psutil

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.runtime.torchrun import STOPPED_WORDS, end_with_parent
from moe_ep_bench.serving import REFUSAL
from moe_ep_bench.serving.client import model_at

_PORTS_TRIED = 3
_POLL_S, _ASKED_S = 0.25, 2.0  # between questions whether it is ready, and for an answer to one
_GRACE_S = 60.0  # to end by itself after SIGTERM
_KILLED_S = 10.0  # for the kernel to end what was killed


class ServerError(Exception):
    """Why a server does not serve: its status in results, and a reason in one line."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Server:
    """A server that ``start`` starts, and ``stop`` ends with all its processes.

    Args:
        command: words of a shell, in which ``{model}`` and ``{port}`` are filled in.
        variables: of its environment, whole.
        log: gets what it prints.
    """

    def __init__(self, command: str, model: str, variables: Mapping[str, str], log: Path, limit_s: float) -> None:
        self.command, self.model, self.variables, self.log, self.limit_s = command, model, variables, log, limit_s
        self.refusal = log.with_suffix(".refusal").absolute()  # why the plugin did not let it serve
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> str:
        """Start it; return the name under which it has the model, once it answers.

        Raises:
            ServerError: it has ended, or does not answer within the limit; nothing of it is left.
        """
        for attempt in range(_PORTS_TRIED):
            self.port = free_port()
            try:
                self._spawn()
                return self._ready()
            except ServerError:
                is_taken = self.process is not None and self.process.poll() is not None and _is_taken(self.port)
                self.stop()
                if not is_taken or attempt == _PORTS_TRIED - 1:
                    raise
            except BaseException:
                self.stop()
                raise
        raise AssertionError

    def _spawn(self) -> None:
        words = shlex.split(self.command)
        words = [word.replace("{model}", self.model).replace("{port}", str(self.port)) for word in words]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.refusal.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            try:
                self.process = subprocess.Popen(
                    words,
                    env={**self.variables, REFUSAL: str(self.refusal)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise ServerError("failed", f"cannot start {words[0]}: {error.strerror}") from None

    def _ready(self) -> str:
        deadline, problem = time.monotonic() + self.limit_s, ""
        while (left_s := deadline - time.monotonic()) > 0:
            if (reason := self.died()) is not None:
                raise ServerError("failed", reason)
            try:
                name = model_at(self.url, self.model, min(left_s, _ASKED_S))
                if self._listens():
                    return name
                problem = f"who answers at port {self.port} is no process of its own (a container's is not)"
            except UserError as refusal:
                if self._listens():  # Somebody else may answer until its own start fails at the port.
                    raise ServerError("failed", brief(refusal, 300, quoted=False)) from None
                problem = str(refusal)
            except httpx2.ConnectError:
                pass  # It is not there yet.
            except TimeoutError:
                if left_s > _ASKED_S:  # else the time was short
                    problem = problem or "/v1/models: no whole answer"
            except httpx2.HTTPError as error:
                problem = f"/v1/models: {str(error) or type(error).__name__}"
            time.sleep(_POLL_S)
        said = ": ".join(filter(None, (brief(problem, 200, quoted=False), self._said())))
        raise ServerError("timeout", f"did not answer within {self.limit_s:g} s (serve.start_s){said and f': {said}'}")

    def died(self) -> str | None:
        """Why it has ended; None while it runs."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return None
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said = self._said()
        return f"the server ended with {how}{said and f': {said}'}"

    def _said(self) -> str:
        """Why the plugin refused it, or else what it printed last."""
        for path in (self.refusal, self.log):
            with contextlib.suppress(OSError):
                if lines := [line for line in path.read_text(errors="replace").splitlines() if line.strip()]:
                    return brief(lines[-1], 300, quoted=False)
        return ""

    def _processes(self) -> list[psutil.Process]:
        """It and all that it started."""
        with contextlib.suppress(psutil.Error):
            if self.process is not None:
                whole = psutil.Process(self.process.pid)
                return [whole, *whole.children(recursive=True)]
        return []

    def _listens(self) -> bool:
        """Whether a process of its own listens at its port, and not somebody else's."""
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port:
                        return True
        return False

    def terminate(self) -> None:
        """Tell it to end, and wait for nothing."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def stop(self) -> None:
        """End it: SIGTERM, then, of all that is left of its group and its children, SIGKILL."""
        if self.process is None:
            return
        family = self._processes()
        try:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.process.wait()
        deadline = time.monotonic() + _KILLED_S
        while any(map(_is_alive, family)) and time.monotonic() < deadline:
            time.sleep(0.01)


class Running:
    """Somebody's server at a URL, with the methods of ``Server``: it is neither started nor stopped."""

    def __init__(self, url: str, model: str, limit_s: float) -> None:
        self.url, self.model, self.limit_s = url, model, limit_s

    def start(self) -> str:
        """The name under which it has the model. Raises ServerError: it does not answer as one does."""
        try:
            return model_at(self.url, self.model, self.limit_s)
        except UserError as refusal:
            raise ServerError("failed", brief(refusal, 300, quoted=False)) from None
        except TimeoutError:
            raise ServerError("timeout", f"did not answer within {self.limit_s:g} s (serve.start_s)") from None
        except httpx2.HTTPError as problem:
            raise ServerError("failed", f"{self.url}/v1/models: {brief(problem, 200, quoted=False)}") from None

    def died(self) -> None:
        return None

    def terminate(self) -> None:
        """It goes on."""

    def stop(self) -> None:
        """It goes on."""


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _is_taken(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM leave the block as an exception, as SIGINT does, so that it stops what it started; the status is 143.

    A second signal would leave a server behind, so it is ignored: servers have a minute, all together.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)

    def leave(number: int, _: FrameType | None) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        print(f"moe-ep-bench: {STOPPED_WORDS}", file=sys.stderr)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
