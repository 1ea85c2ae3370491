"""Fork the Python processes that tests start from one that has imported torch and Megatron-Core: that takes seconds.

``warm`` replaces what ``subprocess`` calls to fork and execute. A call of this interpreter (``-m``, ``-c`` or a
script) goes to a server, which forks the process and hands it over as the caller's own child: process ids, signals,
sessions, streams and exit statuses are those of an ordinary one. What such a process starts is forked likewise. It has
this checkout's package imported too, unless it would find another; tests' helpers each imports anew. /proc shows the
server's environment and command line. Where ``MOE_EP_BENCH_MEGATRON`` names a folder with ``megatron/core`` in it, that
is the Megatron-Core of all these processes.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
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

IMPORTED = (
    "megatron.core.models.gpt",
    "megatron.core.transformer.moe.moe_layer",
    "matplotlib.pyplot",
    "numba",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pydantic.main",
    "safetensors.torch",
    "scipy.optimize",
    "scipy.signal",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.run",
    "yaml",
)
_PACKAGE = "moe_ep_bench"
ASKED = os.path.realpath(os.environ["MOE_EP_BENCH_MEGATRON"]) if os.environ.get("MOE_EP_BENCH_MEGATRON") else None
_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# What only a process that begins anew reads.
READ_AT_START = {
    name: os.environ.get(name) for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHOME", "MOE_EP_BENCH_MEGATRON")
}
_PYTHON = sys.executable
_INSTALLED = [one for one in sys.path if one == ASKED or one.startswith((sys.base_prefix, sys.prefix))]
_PR_SET_CHILD_SUBREAPER = 36
_FORK_EXEC = _posixsubprocess.fork_exec
# Arguments of fork_exec by their place.
_ARGS, _EXECUTABLES, _KEEP, _CWD, _ENV, _STREAMS = 0, 1, 3, 4, 5, (6, 9, 11)
_ERRORS, _SESSION, _GROUP, _PREEXEC = 13, 15, 16, 21


def _job(call: Sequence[object]) -> dict[str, object] | None:
    """What a call of ``fork_exec`` asks for; None where it is not this interpreter's, or more than this can do."""
    program, *arguments = (os.fsdecode(one) for one in call[_ARGS])
    if os.fsencode(_PYTHON) not in call[_EXECUTABLES] or call[_PREEXEC] is not None or call[_GROUP] >= 0:
        return None
    unbuffered = arguments[:1] == ["-u"]
    arguments = arguments[unbuffered:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        return None
    if arguments[0] == "-c" and "from multiprocessing" in arguments[1]:  # its children carry pickled state
        return None
    env = None if call[_ENV] is None else [os.fsdecode(one) for one in call[_ENV]]
    env = dict(os.environ) if env is None else dict(one.split("=", 1) for one in env)
    if any(env.get(name) != value for name, value in READ_AT_START.items()):
        return None
    return {
        "program": program,
        "arguments": arguments,
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
        for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(one, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if job["session"]:
            os.setsid()
        # Out of each other's way first.
        above = {number: os.dup(own) for number, own in files.items()}
        high = max([*above.values(), *files]) + 1
        copies = {number: os.dup2(own, high + number) for number, own in above.items()}
        for number, own in copies.items():
            os.dup2(own, number, inheritable=True)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in files:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.environ.clear()
        os.environ.update(job["env"])
        os.chdir(job["cwd"])
        own = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        if not _finds_this_package(job["arguments"], own):
            for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
                del sys.modules[name]
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            if number:
                stream.reconfigure(errors="backslashreplace" if number == 2 else None)
                stream.reconfigure(line_buffering=number == 2 or stream.isatty(), write_through=job["unbuffered"])
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        sys.path[:] = [*own, *_INSTALLED]
        importlib.invalidate_caches()
        sys.orig_argv = [job["program"], *job["arguments"]]
        with contextlib.suppress(ImportError):
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        status = _run(job["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status)


def _finds_this_package(arguments: list[str], own: list[str]) -> bool:
    """Whether a process would import the package of this checkout."""
    first = os.getcwd() if arguments[0] in ("-m", "-c") else os.path.dirname(os.path.realpath(arguments[0]))
    folders = [one for one in (first, *own) if os.path.isdir(os.path.join(one, _PACKAGE))]
    return os.path.realpath(folders[0]) == _ROOT if folders else _INSTALLED_IS_THIS


def _run(arguments: list[str]) -> int:
    kind, *rest = arguments
    try:
        if kind == "-m":
            sys.argv = rest
            sys.path.insert(0, os.getcwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = arguments
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


def megatron_core() -> str:
    """Which Megatron-Core a process of tests has: ``0.16.1 in <folder>``.

    Raises:
        RuntimeError: it is not the one that ``MOE_EP_BENCH_MEGATRON`` asks for.
    """
    found = None
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("megatron.core")
    folder = os.path.dirname(os.path.realpath(found.origin)) if found and found.origin else None
    if ASKED and folder != os.path.join(ASKED, "megatron", "core"):
        raise RuntimeError(f"MOE_EP_BENCH_MEGATRON: expected a folder with megatron/core, got {ASKED}; found {folder}")
    if folder is None:
        return "none"
    facts = runpy.run_path(os.path.join(folder, "package_info.py"))
    return f"{facts['__shortversion__']} in {folder}"


def _replace(fork_exec: Callable[..., int]) -> None:
    subprocess._fork_exec = fork_exec
    _posixsubprocess.fork_exec = fork_exec


def _nothing() -> None:
    pass


def _modules() -> list[str]:
    """Modules of the package; not those whose kernels look, as they are imported, whether they are interpreted."""
    package = importlib.import_module(_PACKAGE)
    names = [one.name for one in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}.")]
    return [name for name in names if not name.endswith(("__main__", "_triton"))]


def _serve(connection: socket.socket) -> None:
    """Fork a process for each request, as a child of this server's parent."""
    parent = os.getppid()
    with warnings.catch_warnings(action="ignore"):
        for name in [*IMPORTED, *_modules()]:
            importlib.import_module(name)
        # Numba and torch's compiler look for what they know at the first call.
        sys.modules["numba"].njit(_nothing)()
        sys.modules["torch"].compile(_nothing, backend="eager")()
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
        job = json.loads(text)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.001)
            connection.sendall(os.getpid().to_bytes(8, "big"))
            _become(job, dict(zip(job["numbers"], own, strict=True)))
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
            env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            env |= {"PYTHONPATH": ASKED} if ASKED else {}
            command = [sys.executable, __file__, str(its.fileno())]
            self._process = subprocess.Popen(command, env=env, pass_fds=[its.fileno()])
        return mine

    def fork_exec(self, *call: object) -> int:
        job = _job(call)
        if job is None or job["arguments"][0] == __file__:
            return _FORK_EXEC(*call)
        with self._lock:
            if self._connection is None:
                self._connection = self._start()
            files = _files(call)
            job["numbers"] = list(files)
            text = json.dumps(job).encode()
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
    _installed = importlib.util.find_spec(_PACKAGE)
    _INSTALLED_IS_THIS = _installed is not None and os.path.dirname(os.path.dirname(_installed.origin)) == _ROOT
    sys.path.insert(0, _ROOT)
    _serve(socket.socket(fileno=int(sys.argv[1])))
