"""Fork the Python processes that tests start from one that has imported torch, Megatron-Core and the package.

Importing them takes a core five seconds, and tests start hundreds of ranks and commands. ``warm`` replaces what
``subprocess`` calls to fork and execute. A call of this interpreter (``-m``, ``-c`` or a script) goes to a server,
which forks the process and hands it over as the caller's own child: process ids, signals, sessions, streams and exit
statuses are those of an ordinary one. What such a process starts is forked likewise. Any other option of Python
(``-X utf8``) asks for an ordinary process. /proc shows the server's environment and command line.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence

# Beside the package's own modules, what these import as they are called.
IMPORTED = ("matplotlib.pyplot", "pyarrow.dataset", "scipy.optimize", "scipy.signal", "torch.distributed.run")
_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_INSTALLED = [path for path in sys.path if path.startswith((sys.base_prefix, sys.prefix))]
_PR_SET_CHILD_SUBREAPER = 36
_FORK_EXEC = _posixsubprocess.fork_exec
# Arguments of fork_exec by their place.
_ARGS, _EXECUTABLES, _KEEP, _CWD, _ENV, _STREAMS, _ERRORS, _SESSION, _PREEXEC = 0, 1, 3, 4, 5, (6, 9, 11), 13, 15, 21


def _job(call: Sequence[object]) -> dict[str, object] | None:
    """What a call of ``fork_exec`` asks for; None where it is not this interpreter's, or more than this can do."""
    program, *arguments = (os.fsdecode(argument) for argument in call[_ARGS])
    unbuffered = arguments[:1] == ["-u"]
    kind, *rest = arguments[unbuffered:] or ["-"]
    if os.fsencode(sys.executable) not in call[_EXECUTABLES] or call[_PREEXEC] is not None:
        return None
    if kind.startswith("-") and kind not in ("-m", "-c"):
        return None
    if kind == "-c" and "from multiprocessing" in rest[0]:  # its children carry pickled state
        return None
    env = dict(os.environ)
    if call[_ENV] is not None:
        env = dict(os.fsdecode(variable).split("=", 1) for variable in call[_ENV])
    return {
        "command": [program, kind, *rest],
        "unbuffered": unbuffered or bool(env.get("PYTHONUNBUFFERED")),
        "env": env,
        "cwd": os.path.abspath(os.fsdecode(call[_CWD])) if call[_CWD] is not None else os.getcwd(),
        "session": bool(call[_SESSION]),
    }


def _files(call: Sequence[object]) -> dict[int, int]:
    """The descriptors of a process by number, each with the caller's own."""
    streams = {number: call[place] for number, place in enumerate(_STREAMS)}
    return {number: number if own == -1 else own for number, own in streams.items()} | {
        number: number for number in call[_KEEP] if number != call[_ERRORS]
    }


def _become(job: dict[str, object], files: dict[int, int]) -> None:
    """Be the process that ``job`` asks for, in a fork; never returns."""
    status = 1
    try:
        atexit._clear()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if job["session"]:
            os.setsid()
        _take_files(files)
        os.environ.clear()
        os.environ.update(job["env"])
        os.chdir(job["cwd"])
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            if number:
                stream.reconfigure(errors="backslashreplace" if number == 2 else None)
                stream.reconfigure(line_buffering=number == 2 or stream.isatty(), write_through=job["unbuffered"])
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        # What torch and Python read as they start.
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_INSTALLED]
        importlib.invalidate_caches()
        sys.orig_argv = list(job["command"])
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ImportError):
            importlib.import_module("sitecustomize")
        status = _run(*job["command"][1:])
    except BaseException:
        traceback.print_exc()
    finally:
        for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(BaseException):
                end()
        os._exit(status)


def _take_files(files: dict[int, int]) -> None:
    """Have these descriptors under their numbers, and no others."""
    above = {number: os.dup(own) for number, own in files.items()}  # Out of each other's way first.
    high = max([*above.values(), *files]) + 1
    copies = {number: os.dup2(own, high + number) for number, own in above.items()}
    for number, own in copies.items():
        os.dup2(own, number, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in files:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _run(kind: str, *rest: str) -> int:
    """Do what ``python KIND REST`` does; its exit status."""
    try:
        if kind == "-m":
            sys.argv = list(rest)
            sys.path.insert(0, os.getcwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = [kind, *rest]
            sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code & 0xFF if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


def _fork_here(*call: object) -> int:
    """``fork_exec`` in a warm process: its own fork goes on as the process asked for."""
    job = _job(call)
    if job is None:
        return _FORK_EXEC(*call)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(job, _files(call))
    return pid


def _replace(fork_exec: Callable[..., int]) -> None:
    subprocess._fork_exec = fork_exec
    _posixsubprocess.fork_exec = fork_exec


def _import_all() -> None:
    """Import the package too, but for kernels that look, as they are imported, whether they are interpreted."""
    package = importlib.import_module("moe_ep_bench")
    modules = (module.name for module in pkgutil.walk_packages(package.__path__, "moe_ep_bench."))
    for name in [*IMPORTED, *modules]:
        if not name.endswith(("__main__", "_triton")):
            importlib.import_module(name)
    sys.modules["numba"].njit(lambda: None)()  # It looks for what it knows at the first call.


def _serve(connection: socket.socket) -> None:
    """Fork a process for each request, as a child of this server's parent."""
    parent = os.getppid()
    with warnings.catch_warnings(action="ignore"):
        _import_all()
    gc.freeze()  # or each collection in a fork would walk through all of it
    gc.set_threshold(100_000, 50, 50)
    _replace(_fork_here)
    while True:
        length, own, _, _ = socket.recv_fds(connection, 8, 64)
        if not length:
            return
        text = b""
        while len(text) < int.from_bytes(length, "big"):
            text += connection.recv(1 << 20)
        job, numbers = json.loads(text)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.001)
            connection.sendall(os.getpid().to_bytes(8, "big"))
            _become(job, dict(zip(numbers, own, strict=True)))
        os.waitpid(between, 0)
        for number in own:
            os.close(number)


class Server:
    """The process that forks; started by the first request."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def _start(self) -> socket.socket:
        mine, its = socket.socketpair()
        with its:
            command = [sys.executable, "-X", "utf8", __file__, str(its.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()])
        return mine

    def fork_exec(self, *call: object) -> int:
        job = _job(call)
        if job is None:
            return _FORK_EXEC(*call)
        with self._lock:
            if self._connection is None:
                self._connection = self._start()
            files = _files(call)
            text = json.dumps([job, list(files)]).encode()
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # Whom the server's children's children fall to.
            try:
                socket.send_fds(self._connection, [len(text).to_bytes(8, "big")], list(files.values()))
                self._connection.sendall(text)
                pid = int.from_bytes(self._connection.recv(8), "big")
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not pid:
            raise RuntimeError("the server of warm processes ended")
        return pid

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._process.wait()


@contextlib.contextmanager
def warm(server: Server) -> Iterator[None]:
    """Let ``server`` fork what is started in here."""
    _replace(server.fork_exec)
    try:
        yield
    finally:
        _replace(_FORK_EXEC)


if __name__ == "__main__":
    sys.path.insert(0, _ROOT)
    _serve(socket.socket(fileno=int(sys.argv[1])))
