#!/usr/bin/env python
"""Do files and options of other people's ever end in anything but a result or one line? On the CPU.

    python benchmarks/fuzz.py [--inputs 10000] [--kind configs|results|recordings|commands] [--seed N]

Mutates sound inputs and gives each to the real entry point, ``cli.main``, in this process. A finding is one of

* an exception that leaves ``main``, a traceback, or an exit status that no page names;
* a message of a user's mistake that is no single, short, printable line;
* a hang: more than 5 s of CPU time before a refusal, 60 s with a result, or 90 s by the clock (other people's work
  may take the rest);
* a prompt: standard input is read, or the terminal opened;
* a process that is started, or a connection;
* a file that is written, made, moved or removed outside of ``--out``; the canary, which hostile contents would touch.

Input N of a kind is drawn from the seed N alone: ``--kind K --seed N --inputs 1`` repeats it. Exit status 1 where
there is a finding. Commands that would measure are given ``--dry-run``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CPU_S, RESULT_CPU_S, CLOCK_S = 5.0, 60.0, 90.0
MORE_BYTES = 4 * 2**30  # that a command may map beyond what this process has
MOST_LINES, MOST_CHARACTERS = 12, 1500  # lines: what `plot` passes over, each in one
SHARES = {"configs": 0.4, "results": 0.3, "recordings": 0.2, "commands": 0.1}  # of --inputs, without --kind
# What pages name: done, cases failed, a user's mistake, `compare --strict`.
STATUSES = (0, 1, 2, 3)


# ---- one call --------------------------------------------------------------------------------------------------------


class _Ended(BaseException):
    """Ends a call from outside; nobody who catches ``Exception`` holds it."""


@dataclass(frozen=True)
class Finding:
    kind: str
    seed: int
    what: str
    command: tuple[str, ...]
    detail: str = ""

    def __str__(self) -> str:
        words = " ".join(repr(one)[1:-1][:200] for one in self.command)
        return f"{self.kind} {self.seed}: {self.what}\n    moe-ep-bench {words}\n{self.detail}"


class _Keyboard(io.TextIOBase):
    """Standard input that nobody may ask."""

    def read(self, *_: object) -> str:
        raise _Ended("prompts: standard input is read")

    readline = read
    readable = isatty = lambda self: True


class _Watch:
    """Notes what a call does to the machine; an audit hook stays for good, so it is switched on for calls alone."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"):
            if event == "subprocess.Popen" and _is_probe(arguments[1]):
                return
            raise _Ended(f"starts a process: {event} {str(arguments[:2])[:200]}")
        if event == "socket.connect":
            raise _Ended(f"connects: {arguments[1]!r}")
        if event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND) if flags else 0
            if isinstance(path, str | bytes | os.PathLike) and (
                writes or (isinstance(mode, str) and set(mode) & set("wax+"))
            ):
                self._changed(event, path)
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.utime"):
            self._changed(event, arguments[0], arguments[-1])
        elif event in ("os.rename", "os.link", "os.symlink"):
            self._changed(event, arguments[1], arguments[-1])

    def _changed(self, event: str, path: Any, folder: Any = -1) -> None:
        """Note a path; it is relative to an open folder where there is one (>= 0)."""
        if isinstance(path, int):
            return
        above = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else os.getcwd()
        place = os.path.abspath(os.path.join(above, os.fsdecode(path)))
        if place == "/dev/tty":
            raise _Ended("prompts: the terminal is opened")
        real = os.path.join(os.path.realpath(os.path.dirname(place)), os.path.basename(place))
        assert self.allowed is not None
        if not real.startswith(self.allowed) and "__pycache__" not in real:
            self.seen.append(f"writes outside of --out: {event} {real}")


def _is_probe(command: Any) -> bool:
    """Programs that say what the machine is: they read no file of the user's."""
    words = command if isinstance(command, list | tuple) else [command]
    return os.path.basename(str(words[0])) in ("git", "nvidia-smi", "lscpu", "uname", "ldconfig", "gcc", "cc")


_watch: _Watch | None = None


def warm() -> None:
    """Import what commands import when they first need it: that takes seconds, which are no hang."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import transformers  # noqa: F401

    import moe_ep_bench.analysis.advise
    import moe_ep_bench.analysis.answer_figures
    import moe_ep_bench.analysis.compare
    import moe_ep_bench.analysis.figures
    import moe_ep_bench.analysis.page
    import moe_ep_bench.analysis.plot
    import moe_ep_bench.analysis.validate
    import moe_ep_bench.bench.question
    import moe_ep_bench.bench.route
    import moe_ep_bench.bench.run
    import moe_ep_bench.papers.run
    import moe_ep_bench.quality.session
    import moe_ep_bench.workload.importers  # noqa: F401


@dataclass
class Outcome:
    status: int | None
    out: str
    err: str
    problems: list[str]
    seconds: float


def call(arguments: Sequence[str], out: Path, scratch: Path) -> Outcome:
    """Run one command in this process; it may write below ``out`` and ``scratch`` only."""
    global _watch
    from moe_ep_bench.cli import main

    _watch = _watch or _Watch()
    printed, said = io.StringIO(), io.StringIO()
    problems: list[str] = []
    status: int | None = None

    def stop(number: int, _: object) -> None:
        waited_s = _waited_s() - waited_before_s
        if number == signal.SIGALRM and waited_s > CLOCK_S / 4:  # for a core, not for a pipe
            return
        limit = f"{RESULT_CPU_S:g} s of CPU time" if number == signal.SIGPROF else f"{CLOCK_S:g} s"
        raise _Ended(f"hangs: more than {limit}\n{''.join(traceback.format_stack(limit=12))}")

    waited_before_s = _waited_s()
    handlers = {one: signal.signal(one, stop) for one in (signal.SIGPROF, signal.SIGALRM)}
    handlers |= {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    limits, environment = resource.getrlimit(resource.RLIMIT_AS), dict(os.environ)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MORE_BYTES
    _watch.seen, begun, cpu_before_s = [], time.monotonic(), time.process_time()
    stdin = sys.stdin
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sys.stdin = _Keyboard()
            signal.setitimer(signal.ITIMER_PROF, RESULT_CPU_S)
            signal.setitimer(signal.ITIMER_REAL, CLOCK_S, CLOCK_S)
            resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
            # Caches of matplotlib, numba and torch.
            own = (str(Path.home() / ".cache"), str(Path.home() / ".config"), "/tmp/torchinductor_")
            # An --out of ODD lies in this process's folder of /proc, where nothing can be made.
            own += ("/proc/self", f"/proc/{os.getpid()}/")
            _watch.allowed = (f"{out}", f"{scratch}", "/dev/null", "/dev/shm/", *own)
            status = main(list(arguments))
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else None
        except _Ended as ended:
            problems.append(str(ended))
        except BaseException:
            problems.append(f"leaves main:\n{traceback.format_exc()[-3000:]}")
        finally:
            _watch.allowed = None
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            sys.stdin = stdin
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.environ.clear()
            os.environ.update(environment)
    problems += _watch.seen[:3]
    err = said.getvalue()
    if not problems:
        problems += _problems_of(status, printed.getvalue(), err)
    if status == 2 and (cpu_s := time.process_time() - cpu_before_s) > CPU_S:
        problems.append(f"hangs: {cpu_s:.0f} s of CPU time before a refusal")
    return Outcome(status, printed.getvalue(), err, problems, time.monotonic() - begun)


def _waited_s() -> float:
    """How long this process has been ready to run, and others ran."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def _problems_of(status: int | None, out: str, err: str) -> list[str]:
    if "Traceback (most recent call last)" in err:
        return [f"traceback:\n{err[-3000:]}"]
    if status not in STATUSES:
        return [f"exit status {status}: {err[-500:]}"]
    lines = err.splitlines()
    if status == 2 and lines and not lines[0].startswith("usage:"):
        if len(lines) > MOST_LINES or not all(line.startswith("moe-ep-bench: ") for line in lines[-1:]):
            return [f"{len(lines)} lines: {err[:600]}"]
        if max(map(len, lines)) > MOST_CHARACTERS:
            return [f"a line of {max(map(len, lines))} characters: {err[:600]}"]
    unprintable = [one for one in err if not one.isprintable() and one != "\n"]
    if unprintable and status == 2 and not err.startswith("usage:"):
        return [f"unprintable {unprintable[0]!r} in: {err[:600]!r}"]
    if status == 2 and not err:
        return ["exit status 2 without a word"]
    return []


# ---- mutations -------------------------------------------------------------------------------------------------------

CANARY = "canary"
ODD = [
    *(None, True, False, -1, 0, 1, 2, 3.5, -0.0, 1e308, -1e308, 1e-320, float("nan"), float("inf")),
    *(2**31, 2**63, -(2**63), 10**12, 10**30, 10**400, "", " ", "x", "null", "NaN", "1e400", "-", "..", "/"),
    *("../../../../etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "a\nb", "a\x00b", "\x1b[31mred", "\u202e"),
    *("<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "&amp;", "$HOME", "%s%n", "{0}", "${x}", "`id`"),
    *("é", "日本語", "\ud800", "9" * 5000, "a" * 100_000, "[" * 200, "=1+1", "all", "both", "measured", "h100-sxm"),
    *([], {}, [[]], [None], [1, 2, 3], {"a": 1}, {"": None}, [[[[[[[[1]]]]]]]], ["x"] * 2000, [0.5, float("nan")]),
]


def odd(rand: random.Random) -> Any:
    return copy.deepcopy(rand.choice(ODD))


def places(value: Any, above: tuple = ()) -> list[tuple]:
    """The path of every value in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [above] if above else []
    for key, one in inner:
        found += places(one, (*above, key))
    return found


def mutate(document: Any, rand: random.Random) -> Any:
    """A copy of a document with one to three values replaced, removed, renamed, repeated, moved or wrapped."""
    document = copy.deepcopy(document)
    for _ in range(rand.choice((1, 1, 1, 2, 3))):
        found = places(document)
        if not found:
            return odd(rand)
        *above, last = rand.choice(found)
        parent = document
        for key in above:
            parent = parent[key]
        value, how = parent[last], rand.random()
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if how < 0.3 and is_number:  # sound, or nearly
            parent[last] = rand.choice((0, 1, 2, 3, 5, 8, 64, 1000, 10**6, 10**9, 10**18, 0.5, 1.5, -1, 1e-9))
        elif how < 0.55:
            parent[last] = odd(rand)
        elif how < 0.63:
            del parent[last]
        elif how < 0.71 and isinstance(parent, dict):
            parent[str(odd(rand))[:300]] = parent.pop(last)
        elif how < 0.76:
            parent[last] = [value] * rand.choice((1, 2, 50))
        elif how < 0.81:
            parent[last] = {rand.choice(("x", "name", "kind", "preset")): value}
        elif how < 0.88:
            other = document
            for key in rand.choice(found):
                other = (
                    other[key] if isinstance(other, dict) or (isinstance(other, list) and key < len(other)) else other
                )
                if not isinstance(other, dict | list):
                    break
            parent[last] = copy.deepcopy(other)
        elif how < 0.94 and is_number:
            larger = value if isinstance(value, float) else min(value, 10**300)
            parent[last] = rand.choice((-value, larger * 1000, larger * 1e20, larger + 0.5, str(value), [value]))
        elif isinstance(value, str):
            parent[last] = value[: rand.randrange(len(value) + 1)] + str(odd(rand))[:50]
        else:
            parent[last] = str(value)
    return document


YAML_TOKENS = [
    *(
        '!!int ""',
        "!!int x",
        "!!bool x",
        '!!float ""',
        "!!null x",
        "!!timestamp 99",
        "!!binary x",
        "!!set {a}",
        "!!omap x",
    ),
    *("!!pairs x", "!!python/none x", "!!python/name:os.system", "!x y", "!<a> b"),
    *("? [a, b]\n: c", "? {a: b}\n: c"),
    *("{[a]: b}", "{{a: b}: c}", "&a [*a]", "&a {b: *a}", "*missing", "<<: 1", "<<: [1]", "<<: *a", "%YAML 9.9\n---\n"),
    *("---\n", "...\n", "\t", "'", '"', "|", ">", '"\\ud800"', '"\\x00"', '"\\UFFFFFFFF"', "2001-99-99", "2001-01-01"),
    *(
        "0x" + "f" * 5000,
        "1" * 5000,
        "1" + ":59" * 3000,
        "0b1",
        "0o9",
        "1_0",
        ".nan",
        "-.inf",
        "1e999",
        "~",
        "@",
        "=",
        "!!value",
    ),
    "!!python/object/apply:os.system ['touch canary']",
    "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [canary]]",
]


def mutate_text(text: str, rand: random.Random, tokens: Sequence[str]) -> bytes:
    lines = text.split("\n")
    for _ in range(rand.choice((1, 1, 2, 3))):
        at, how = rand.randrange(len(lines)), rand.random()
        line = lines[at]
        if how < 0.35:
            key, colon, _ = line.partition(": ")
            lines[at] = f"{key}{colon}{rand.choice(tokens)}" if colon else rand.choice(tokens)
        elif how < 0.5:
            lines.insert(at, rand.choice(tokens))
        elif how < 0.6:
            del lines[at]
            lines = lines or [""]
        elif how < 0.7:
            lines.insert(rand.randrange(len(lines)), line)
        elif how < 0.8:
            lines[at] = " " * rand.randrange(6) + line.strip()
        else:
            place = rand.randrange(len(line) + 1)
            lines[at] = line[:place] + rand.choice((*tokens, "\x00", "\ufeff", "{", "]", ":", " ", "#")) + line[place:]
    return (
        mutate_bytes("\n".join(lines).encode("utf-8", "surrogatepass"), rand)
        if rand.random() < 0.1
        else "\n".join(lines).encode("utf-8", "surrogatepass")
    )


def mutate_bytes(content: bytes, rand: random.Random) -> bytes:
    """Flip, cut, repeat or overwrite bytes."""
    data = bytearray(content)
    for _ in range(rand.choice((1, 1, 2, 8))):
        at = rand.randrange(len(data) + 1)
        if rand.random() < 0.4:  # where formats keep their lengths
            at = rand.choice((rand.randrange(min(64, len(data)) + 1), max(0, len(data) - rand.randrange(1, 64))))
        how = rand.random()
        if how < 0.5 and at < len(data):
            data[at] = rand.choice((data[at] ^ (1 << rand.randrange(8)), 0, 255, rand.randrange(256)))
        elif how < 0.65:
            del data[at:]
        elif how < 0.8:
            data[at : at + 8] = rand.choice((b"\xff" * 8, b"\x00" * 8, (2**40).to_bytes(8, "little"), os.urandom(0)))
        else:
            piece = data[at : at + rand.randrange(1, 64)]
            data[at:at] = piece
    return bytes(data)


def bombs(rand: random.Random) -> bytes:
    """A text that grows, nests, or is too long, for YAML and JSON."""
    return rand.choice(
        (
            lambda: b"".join(
                [b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n"]
                + [b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)]
            ),
            lambda: b"[" * rand.choice((100, 1000, 100_000)),
            lambda: b"model: " + b"{a: " * rand.choice((50, 1000, 20_000)),
            lambda: b'{"a":' * rand.choice((50, 1000, 100_000)) + b"1",
            lambda: b"[" * 5000 + b"]" * 5000,
            lambda: b"x: " + b"1" * 1_500_000,
            lambda: b"- " * 3000,
            lambda: b"a: 1\n" * 300_000,
            lambda: b"? " * 2000,
            lambda: b"",
            lambda: b"\x00" * 100,
            lambda: b"\xff\xfe" + os.urandom(0),
            lambda: b"name: &a x\nworkload: " + b"&b " * 100,
        )
    )()


def replace_file(path: Path, rand: random.Random, elsewhere: Path) -> None:
    """Put something that is no such file in a file's place."""
    path.unlink(missing_ok=True)
    how = rand.randrange(7)
    if how == 0:
        path.symlink_to(elsewhere)
    elif how == 1:
        path.symlink_to(rand.choice(("/dev/zero", "/proc/self/environ", "missing", "/", path.name)))
    elif how == 2:
        os.mkfifo(path)
    elif how == 3:
        path.mkdir()
    elif how == 4:
        path.write_bytes(b"")
    elif how == 5:
        path.write_bytes(bombs(rand))
    # else it is missing


# ---- configs ---------------------------------------------------------------------------------------------------------

SMALL = {
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 1, "peak_load": 2},
    "layer": {"ep_size": 4},
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": [1.0, 1.5]}, {"name": "oea", "k0": 3}],
    "emulate": {"device": "h100-sxm", "links": "h100-nvlink4", "replication": [{"spare_per_rank": 1}]},
    "measure": {"iterations": 1, "breakdown_iterations": 1},
    "sweep": {"workload.seed": [0, 1]},
}
SHAPED = {
    "name": "shaped",
    "model": {"num_experts": 8, "top_k": 2, "hidden_size": 64, "ffn_hidden_size": 32},
    "workload": {
        "kind": "synthetic",
        "tokens_per_rank": 16,
        "num_batches": 2,
        "peak_load": 1.5,
        "image_share": 0.5,
    },
    "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
    "on_cpu": {"layer.dtype": "float32"},
}
QUALITY = ("quality-capacity", "quality-oea", "quality-small", "quality-tasks-capacity")


class Configs:
    """Mutated configs, and overrides of sound ones."""

    def __init__(self, bases: Path) -> None:
        own = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if not path.stem.startswith("quality")]
        self.texts = [path.read_text() for path in own if "accuracy" not in path.parts]
        # Those of papers draw many large batches before they say what they would do.
        self.light = [path.read_text() for path in own if "papers" not in path.parts]
        self.quality = [(ROOT / "configs" / f"{name}.yaml").read_text() for name in QUALITY]
        self.keys = sorted({".".join(map(str, place)) for base in (SMALL, SHAPED) for place in places(base)})

    def __call__(self, rand: random.Random, box: Path) -> list[str]:
        path, command = box / "config.yaml", rand.choice(("emulate", "route", "run", "points", "advise", "quality"))
        texts = {"quality": self.quality, "points": self.texts}.get(command, self.light)
        how, overrides = rand.random(), []
        if how < 0.45:
            base = rand.choice((SMALL, SHAPED)) if command != "quality" and rand.random() < 0.6 else None
            document = mutate(base or yaml.safe_load(rand.choice(texts)), rand)
            path.write_bytes(_yaml(document))
        elif how < 0.8:
            text = rand.choice((_yaml(SMALL).decode(), *texts)) if command != "quality" else rand.choice(texts)
            path.write_bytes(mutate_text(text, rand, YAML_TOKENS))
        elif how < 0.92:
            path.write_bytes(_yaml(rand.choice((SMALL, SHAPED))))
            for _ in range(rand.choice((1, 2))):
                value = rand.choice((*YAML_TOKENS, *(repr(one)[:2000] for one in ODD)))
                key = rand.choice(
                    (*self.keys, "sweep", "", "a.b", "policies.9", "sweep.workload.seed", "workload.trace")
                )
                overrides += ["--set", f"{key}={value}".replace("\x00", "")]
        elif how < 0.97:
            path.write_bytes(bombs(rand))
        else:
            (box / "other.yaml").write_bytes(_yaml(SMALL))
            replace_file(path, rand, box / "other.yaml")
        options = {"points": ["--list-points"], "run": ["--dry-run", "--nproc", "2"]}.get(command, ["--dry-run"])
        if command != "points":
            options += ["--out", "out"]
        return ["run" if command == "points" else command, "config.yaml", *options, *overrides]


def _yaml(document: Any) -> bytes:
    try:
        return yaml.safe_dump(document, sort_keys=False).encode("utf-8", "surrogatepass")
    except Exception:  # what the safe dumper does not write
        return json.dumps(document, default=str).encode("utf-8", "surrogatepass")


# ---- results directories ---------------------------------------------------------------------------------------------


def make_directories(folder: Path) -> dict[str, Path]:
    """Small, sound directories of every command, and what reads each."""
    from results_builder import FakeCase, FakeComparison, standard_cases, write_run
    from whole_builder import write_whole

    from moe_ep_bench.bench.route import route
    from moe_ep_bench.bench.run import emulate
    from moe_ep_bench.papers.run import run_claims

    native = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again")]
    drop = FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=1.5, dropped=0.25, mass=0.8)
    small = {"num_batches": 4, "num_iterations": 2, "tokens": 256}
    failed = FakeCase("oea", params={"k0": 3}, status="failed", reason="out of luck")
    found = {
        "run": write_run(
            folder / "run",
            [FakeComparison(cases=[*standard_cases(), failed], num_launches=2, **small)],
        ),
        "whole": write_whole(folder / "whole", [drop, *native], num_batches=4, num_iterations=2, tokens=256),
        "validation": folder / "validation",
    }
    for what, mode in (("real", "run"), ("emulated", "emulated")):
        root = write_run(
            folder / "validation" / what,
            [FakeComparison(what[0], cases=[drop, *native], **small)],
            mode,
            seed=len(what),
        )
        described = json.loads((root / "run.json").read_text())
        described["environment"]["threads_per_rank"] = 1
        (root / "run.json").write_text(json.dumps(described))
    (folder / "validation" / "validation.json").write_text(json.dumps({"pairs": [["r", "e"]], "links": "here"}))
    claim = {"source": "Table 1", "policy": {"name": "token_drop", "capacity_factor": 1.0}, "paper": 1.1, "note": "x"}
    config = {**SMALL, "model": {"preset": "mixtral-8x7b"}, "policies": SMALL["policies"][:2], "claims": [claim]}
    del config["sweep"]
    (folder / "small.yaml").write_bytes(_yaml(config))
    for name, make in (("emulated", emulate), ("routed", route), ("claims", run_claims)):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            make(folder / "small.yaml", folder / name, [])
        found[name] = folder / name
    found["quality"] = _thinned_quality(folder / "quality")
    return found


def _thinned_quality(folder: Path) -> Path:
    """A few cases, sequences and layers of a directory that ``quality`` wrote."""
    whole = ROOT / "results" / "reference" / "quality-small-2cpu"
    described = json.loads((whole / "run.json").read_text())
    first = next(iter(described["comparisons"]))
    described["comparisons"] = {first: described["comparisons"][first]}
    own = {key: case for key, case in described["cases"].items() if case["comparison_id"] == first}
    described["cases"] = dict(sorted(own.items(), key=lambda item: item[1]["role"] != "baseline")[:5])
    for part in ("quality", "routing"):
        (folder / part).mkdir(parents=True)
        for key in described["cases"]:
            table = pq.read_table(whole / part / f"{key}.parquet", partitioning=None)
            rows = table.to_pandas()
            keep = rows["item"] < 12 if part == "quality" else rows["layer"] < 4
            pq.write_table(table.filter(pa.array(keep.to_numpy())), folder / part / f"{key}.parquet")
    (folder / "run.json").write_text(json.dumps(described))
    return folder


class Results:
    """One to three damaged files of a directory that one of the commands wrote."""

    def __init__(self, bases: Path) -> None:
        self.directories = make_directories(bases)

    def __call__(self, rand: random.Random, box: Path) -> list[str]:
        # Directories of our own making are small, and read within a tenth of a second; those of commands take longer.
        small = rand.random() < 0.85
        name = rand.choice(
            ("run", "run", "validation", "whole", "quality") if small else ("emulated", "routed", "claims")
        )
        directory = box / "in"
        shutil.copytree(self.directories[name], directory)
        shutil.copytree(self.directories[name], box / "sound")
        files = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix in (".json", ".parquet"))
        for _ in range(rand.choice((1, 1, 2, 3))):
            # As likely in one kind of file as in another.
            suffix = rand.choice((".json", ".json", ".parquet"))
            path = rand.choice([path for path in files if path.suffix == suffix and path.is_file()] or files)
            damage(path, rand, box / "sound" / path.relative_to(directory))
        return self.command(name, rand)

    def command(self, name: str, rand: random.Random) -> list[str]:
        shown = ["md", "latex", "csv", "json"]  # A page draws all figures, which takes longer than a hang may.
        commands = [["show", "in"], ["show", "in"], ["compare", "sound", "in"], ["compare", "in", "sound", "--json"]]
        commands += [["show", "in", "--format", rand.choice(shown), "--out", "out/file"]]
        commands += [
            ["advise", "in"],
            ["plot", "in", "--out", "out", "--format", "svg", "--figures", _figure(name, rand)],
        ]
        commands += [["show", "in", "--format", "perfetto", "--out", "out/file"]]
        if name == "run":
            commands += [["show", "in", "--format", "csv", "--samples", "--out", "out/file"]]
        if name in ("emulated", "claims") and rand.random() < 0.3:
            again = {"emulated": "emulate", "claims": "papers"}[name]
            return [again, str(self.directories[name].parent / "small.yaml"), "--out", "in"]
        return rand.choice(commands)


def _figure(name: str, rand: random.Random) -> str:
    of = {"whole": ("whole",), "routed": ("ranks",), "quality": ("quality",)}
    return rand.choice(of.get(name, ("speedup", "phases", "timeline", "latency", "loads", "pareto")))


def damage(path: Path, rand: random.Random, sound: Path) -> None:
    """Damage a JSON document or a Parquet part."""
    how = rand.random()
    if not path.is_file() or how < 0.08:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        replace_file(path, rand, sound)
    elif path.suffix == ".json" and how < 0.8:
        with contextlib.suppress(ValueError, RecursionError):  # what was damaged before
            path.write_text(json.dumps(mutate(json.loads(path.read_bytes()), rand)), "utf-8", "surrogatepass")
    elif path.suffix == ".json" and how < 0.9:
        text = path.read_bytes().decode(errors="replace")
        tokens = ("NaN", "Infinity", "-1e999", "9" * 5000, '"\\ud800"', "{", "null", '"', "[]")
        path.write_bytes(mutate_text(text, rand, tokens))
    elif path.suffix == ".parquet" and how < 0.75:
        with contextlib.suppress(pa.ArrowException, OSError):
            pq.write_table(mutate_table(pq.read_table(path, partitioning=None), rand), path)
    else:
        with contextlib.suppress(OSError):  # a link to what takes no bytes
            path.write_bytes(mutate_bytes(path.read_bytes(), rand))


def mutate_table(table: pa.Table, rand: random.Random) -> pa.Table:
    """A table with values, rows, a column's type or a column changed."""
    place = rand.randrange(table.num_columns)
    field, how = table.schema.field(place), rand.random()
    column = table.column(place).to_pylist()
    if how < 0.6 and column:
        pool: list[Any] = [None]
        if pa.types.is_integer(field.type):
            most = 2 ** (field.type.bit_width - 1)
            pool += [-1, 0, 7, most - 1, -most]
        elif pa.types.is_floating(field.type):
            pool += [float("nan"), float("inf"), -1.0, 0.0, 1e308, 1e-320]
        elif pa.types.is_string(field.type):
            pool += [one for one in ODD if isinstance(one, str) and "\ud800" not in one] + [
                "{",
                '{"a": NaN}',
                "[]",
                "ok",
            ]
        elif pa.types.is_list(field.type):
            pool += [[], [None], [-1], [2**62] * 3, [0] * 8]
        elif pa.types.is_boolean(field.type):
            pool += [True, False]
        value = rand.choice(pool)
        rows = (
            range(len(column)) if rand.random() < 0.4 else rand.sample(range(len(column)), rand.randint(1, len(column)))
        )
        for row in rows:
            column[row] = value
        return table.set_column(place, field, pa.array(column, field.type))
    if how < 0.7:
        return table.slice(0, rand.randrange(table.num_rows + 1))
    if how < 0.8:
        return pa.concat_tables([table, table.slice(0, rand.randrange(table.num_rows + 1))])
    if how < 0.9:
        return table.drop_columns([field.name])
    other = rand.choice((pa.string(), pa.float64(), pa.int64(), pa.list_(pa.float64()), pa.binary()))
    return table.set_column(place, pa.field(field.name, other), pa.nulls(table.num_rows, other))


# ---- recordings and imports ------------------------------------------------------------------------------------------


class Recordings:
    """Damaged recordings, sources of imports, counts, placements and models."""

    def __init__(self, bases: Path) -> None:
        import test_importers as importers
        from test_importers import npy, raw, routing, written
        from test_trace import parts, save

        self.bases = bases
        save(bases / "toy.safetensors", *parts())
        importers.megatron(bases / "megatron")
        np.savez(bases / "sglang.npz", **importers.sglang_arrays(importers.sglang()))
        importers.esft(bases / "esft", lengths=(2,), domains=("law",))
        ids = routing(3, 4, 16, 3)
        response = {"prompt_routed_experts": npy(ids), "choices": [{"routed_experts": ids.tolist()}]}
        written(bases / "vllm.jsonl", response, response)
        np.savez(bases / "vllm.npz", routed_experts=ids, prompt_routed_experts=ids)
        written(bases / "sglang.jsonl", {"meta_info": {"routed_experts": raw(routing(6, 27, 64, 6))}})
        (bases / "counts.json").write_text(json.dumps({"logical_count": np.arange(1, 129).reshape(2, 64).tolist()}))
        np.savez(bases / "counts.npz", logical_count=np.arange(1, 129).reshape(2, 64))
        (bases / "placement.json").write_text(json.dumps(np.eye(4).repeat(16, axis=1).tolist()))
        model = {"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32, "num_experts": 8}
        model |= {"num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
        model |= {"num_key_value_heads": 4, "norm_topk_prob": False}
        (bases / "model.json").write_text(json.dumps(model))

    def __call__(self, rand: random.Random, box: Path) -> list[str]:
        name, command = rand.choice(_RECORDED)
        source = self.bases / name
        if source.is_dir():
            shutil.copytree(source, box / name)
            path = rand.choice(sorted(one for one in (box / name).rglob("*") if one.is_file()))
        else:
            path = Path(shutil.copy(source, box / name))
        how = rand.random()
        if how < 0.05:
            sound = Path(shutil.copy(path, box / "sound"))
            replace_file(path, rand, sound)
        elif path.suffix == ".json" and how < 0.7:
            path.write_text(json.dumps(mutate(json.loads(path.read_bytes()), rand)), "utf-8", "surrogatepass")
        elif path.suffix == ".jsonl" and how < 0.7:
            lines = path.read_text().splitlines()
            at = rand.randrange(len(lines))
            lines[at] = json.dumps(mutate(json.loads(lines[at]), rand))
            path.write_text("\n".join(lines), "utf-8", "surrogatepass")
        elif path.suffix == ".npz" and how < 0.7:
            damage_npz(path, rand)
        elif path.suffix == ".safetensors" and how < 0.7:
            damage_header(path, rand)
        elif path.suffix in (".json", ".jsonl", ".txt") and how < 0.85:
            tokens = ("NaN", "Infinity", "1e999", "9" * 5000, '"\\ud800"', "{", "null", '"', "[]", "-1", "\t", "65536")
            path.write_bytes(mutate_text(path.read_bytes().decode(errors="replace"), rand, tokens))
        else:
            path.write_bytes(mutate_bytes(path.read_bytes(), rand))
        return [name if word == "IN" else word for word in command]


_OPTIONS = {
    "megatron": ["--model", "toy", "--phase", "prefill", "--score-function", "softmax"],
    "sglang.npz": ["--model", "toy", "--assume-equal-scores"],
    "esft": ["--domain", "law"],
    "vllm.jsonl": ["--model", "toy", "--num-experts", "16", "--assume-equal-scores"],
    "vllm.npz": ["--model", "toy", "--num-experts", "16", "--assume-equal-scores"],
    "sglang.jsonl": ["--preset", "deepseek-v2-lite", "--assume-equal-scores"],
}
_ADVISE = ["advise", "--model", "olmoe-1b-7b", "--ep", "4", "--tokens", "64", "--dry-run", "--out", "out"]
_ROUTED = ["emulate", "small.yaml", "--dry-run", "--out", "out", "--set", "sweep.workload.seed=[0]"]
_EPLB = ["trace", "eplb", "IN", "out/map.json", "--ep", "4", "--spare-per-rank", "1"]
_REPLAYED = "workload={kind: recorded, trace: IN, layer: all, tail: both, num_tokens: 8}"
_COUNTS = ("counts.json", "counts.npz")
_RECORDED: list[tuple[str, list[str]]] = [
    *(
        (name, ["trace", "import", name.partition(".")[0], "IN", "out/made.safetensors", *options])
        for name, options in _OPTIONS.items()
    ),
    *(("toy.safetensors", ["trace", what, "IN"]) for what in ("info", "info", "thresholds")),
    ("toy.safetensors", _EPLB),
    ("toy.safetensors", [*_ADVISE, "--trace", "IN"]),
    (
        "toy.safetensors",
        [*_ROUTED, "--set", "workload={kind: recorded, trace: IN, layer: all, tail: both, num_tokens: 8}"],
    ),
    *((name, _EPLB) for name in _COUNTS),
    *((name, [*_ROUTED, "--set", "workload.skew_from=IN", "--set", "workload.peak_load=2"]) for name in _COUNTS),
    ("counts.json", ["trace", "info", "IN"]),
    *(("model.json", [*_ROUTED, "--set", "model={hf_config: IN}"]) for _ in range(2)),
]
_RECORDED = [(name, [word.replace("IN", name) for word in command]) for name, command in _RECORDED]


def damage_npz(path: Path, rand: random.Random) -> None:
    """Change one member of an npz file: its bytes, its header, its type, its name; or what the archive says of it."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name, how = rand.choice(list(members)), rand.random()
    if how < 0.25:
        members[name] = mutate_bytes(members[name], rand)
    elif how < 0.6:
        header = rand.choice(
            (
                "{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000,), }",
                "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000, 1000000), }",
                "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
                "{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (1,), }",
                "{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }",
                "{'descr': '<U1000000', 'fortran_order': True, 'shape': (), }",
                "{'descr': '<f2', 'fortran_order': True, 'shape': (3, 4, 3), }",
                "__import__('os').system('touch canary')",
                "{" * 2000,
                "(" * 100_000,
                "{'descr': " + "9" * 5000 + "}",
            )
        )
        text = header.encode().ljust(118) + b"\n"
        length = len(text).to_bytes(2, "little") if len(text) < 2**16 else b"\xff\xff"
        members[name] = b"\x93NUMPY\x01\x00" + length + text + rand.choice((b"", b"\x00" * 4096, _PICKLE))
    elif how < 0.75:
        buffer = io.BytesIO()
        np.save(buffer, rand.choice(_ARRAYS), allow_pickle=True)
        members[name] = buffer.getvalue()
    elif how < 0.85:
        odd_names = ("../x.npy", "/x.npy", "x.txt", "x", "\x1b.npy", "a" * 3000 + ".npy")
        members[rand.choice(odd_names)] = members.pop(name)
    elif how < 0.93:
        members = {
            name: b"\x93NUMPY\x01\x00v\x00" + b" " * 100 + b"\x00" * (600 * 2**20 if rand.random() < 0.1 else 2**20)
        }
    else:
        members = {f"{number}.npy": b"" for number in range(3000)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for one, content in members.items():
            archive.writestr(one, content)


class _Touch:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(CANARY),)


def _pickled() -> bytes:
    import pickle

    return pickle.dumps(_Touch())


_PICKLE = _pickled()
_ARRAYS = [
    np.array([_Touch()], dtype=object),
    np.array([1.5, np.nan, np.inf]),
    np.array(["a", "b"]),
    np.array([[1 + 2j]]),
    np.array(2**63, dtype=np.uint64),
    np.zeros((0, 3)),
    np.full((2, 3, 4), -(2**62)),
    np.array([b"x"]),
    np.array(["2001-01-01"], dtype="datetime64[D]"),
    np.ones((3, 4, 3)),
    np.zeros((1,) * 30),
]


def damage_header(path: Path, rand: random.Random) -> None:
    """Change the JSON header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(mutate(json.loads(content[8 : 8 + length]), rand)).encode("utf-8", "surrogatepass")
    told = len(header) if rand.random() < 0.9 else rand.choice((0, 2**30, 2**62, 10**8, len(header) - 1))
    path.write_bytes(told.to_bytes(8, "little") + header + content[8 + length :])


# ---- command lines ---------------------------------------------------------------------------------------------------


class Commands:
    """Options of every command with odd values, missing, repeated and in each other's places."""

    def __init__(self, bases: Path) -> None:
        from results_builder import FakeComparison, standard_cases, write_run
        from test_trace import parts, save

        from moe_ep_bench.cli.arguments import make_parser

        self.bases = bases
        (bases / "config.yaml").write_bytes(_yaml(SMALL))
        write_run(bases / "run", [FakeComparison(cases=standard_cases(), num_batches=2, num_iterations=2, tokens=64)])
        save(bases / "toy.safetensors", *parts())
        self.actions = dict(_parsers(make_parser()))

    def __call__(self, rand: random.Random, box: Path) -> list[str]:
        for name in ("config.yaml", "toy.safetensors"):
            shutil.copy(self.bases / name, box)
        shutil.copytree(self.bases / "run", box / "run")
        name = rand.choice(list(self.actions))
        words = name.split()
        if rand.random() < 0.05:
            words[-1] = str(odd(rand))[:300]
        for action in self.actions[name]:
            if not action.option_strings:
                if rand.random() < 0.95:
                    words += [self.value(action, rand)]
            elif action.required or rand.random() < 0.25:
                words += [action.option_strings[0], *([self.value(action, rand)] if action.nargs != 0 else [])]
        if rand.random() < 0.1:
            words.insert(rand.randrange(len(words) + 1), str(odd(rand))[:300])
        if name in ("run", "emulate", "route", "quality", "advise"):
            words += ["--dry-run"]
        elif name == "plot":
            words += ["--figures", "speedup", "--format", "svg"]  # All of them take longer than a hang may.
        elif name in ("validate", "papers", "calibrate", "doctor", "trace record", "check-policy"):
            # They would measure or start something: their own checks of options are what is tried.
            words = [word if word not in ("config.yaml", "topk") else "missing.yaml" for word in words]
            words += {"calibrate": ["--nproc", "0"], "doctor": ["missing.yaml"]}.get(name, [])
        return [word.replace("\x00", "") for word in words]

    def value(self, action: argparse.Action, rand: random.Random) -> str:
        """A sound value of an option, or an odd one."""
        if rand.random() < 0.3:
            return str(odd(rand))[:3000].replace("\x00", "")
        if action.choices:
            return rand.choice(list(map(str, action.choices)))
        sound = {
            **dict.fromkeys(("config", "configs"), "config.yaml"),
            **dict.fromkeys(("file", "trace", "source"), "toy.safetensors"),
            **dict.fromkeys(("directory", "directories", "base", "new", "run_directory"), "run"),
            **{
                "out": "out/file",
                "overrides": "workload.num_tokens=8",
                "format": "svg",
                "policy": "topk",
                "kind": "vllm",
            },
            **{"model": "olmoe-1b-7b", "preset": "olmoe-1b-7b", "device": "h100-sxm", "kind": "vllm"},
            **{"figures": "speedup", "size": "page", "case": "token_drop", "iteration": "median", "fields": "k0=3"},
        }
        return sound.get(action.dest, rand.choice(("1", "2", "4", "0.5", "5%")))


def _parsers(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, list[argparse.Action]]]:
    """The actions of every command, by its name."""
    own = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, one in action.choices.items():
                yield from _parsers(one, f"{name} {word}".strip())
        elif action.dest not in ("help", "version"):
            own.append(action)
    if name and own:
        yield name, own


# ---- rounds ----------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Path], Callable[[random.Random, Path], list[str]]]] = {
    "configs": Configs,
    "results": Results,
    "recordings": Recordings,
    "commands": Commands,
}


@dataclass
class Round:
    """What came of many inputs."""

    kind: str
    findings: list[Finding]
    statuses: Counter
    slowest_s: float


def fuzz(
    kind: str,
    inputs: int,
    seed: int = 0,
    *,
    keep: Path | None = None,
    report: Callable[[Finding], None] = lambda _: None,
    seconds: float = float("inf"),
) -> Round:
    """Try inputs ``seed`` to ``seed + inputs - 1`` of a kind.

    Args:
        keep: where the folders of inputs with findings are left.
        seconds: begin none after so many.
    """
    warm()
    here, begun = Path.cwd(), time.monotonic()
    done = Round(kind, [], Counter(), 0.0)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name).resolve()
        (folder / "bases").mkdir()
        make = KINDS[kind](folder / "bases")
        tempdir, tempfile.tempdir = tempfile.tempdir, str(folder / "scratch")
        (folder / "scratch").mkdir()
        try:
            for number in range(seed, seed + inputs):
                if time.monotonic() - begun > seconds:
                    break
                box = folder / "box"
                box.mkdir()
                os.chdir(box)
                rand = random.Random(f"{kind} {number}")
                if kind == "recordings":
                    (box / "small.yaml").write_bytes(_yaml(SMALL))
                command = make(rand, box)
                before = _listing(box)
                # A command that goes on with a directory writes into that; `out` is where all others may.
                # Without --out, command lines have their defaults below the working directory.
                may = box / "in" if command[-2:] == ["--out", "in"] else box if kind == "commands" else box / "out"
                outcome = call(command, may, folder / "scratch")
                problems = outcome.problems
                inside = "" if may == box else f"{may.name}/"
                changed = {path for path in _listing(box) ^ before if not path[0].startswith((inside, "out"))}
                problems += [f"changes files outside of --out: {sorted(changed)[:3]}"] if changed else []
                problems += ["the canary was touched"] if list(folder.rglob(CANARY)) else []
                problems += ["leaves temporary files"] if any((folder / "scratch").iterdir()) else []
                done.statuses[str(outcome.status)] += 1
                done.slowest_s = max(done.slowest_s, outcome.seconds)
                os.chdir(here)
                for problem in problems:
                    done.findings.append(Finding(kind, number, problem, tuple(command)))
                    report(done.findings[-1])
                    if keep is not None:
                        shutil.rmtree(keep / f"{kind}-{number}", ignore_errors=True)
                        shutil.copytree(box, keep / f"{kind}-{number}", symlinks=True, ignore=_no_regular_file)
                shutil.rmtree(box)
                shutil.rmtree(folder / "scratch")
                (folder / "scratch").mkdir()
        finally:
            os.chdir(here)
            tempfile.tempdir = tempdir
    return done


def _listing(box: Path) -> set[tuple[str, int, int]]:
    found = set()
    for above, _, names in os.walk(box):
        for name in names:
            path = os.path.join(above, name)
            facts = os.lstat(path)
            found.add((os.path.relpath(path, box), facts.st_size, facts.st_mtime_ns))
    return found


def _no_regular_file(folder: str, names: list[str]) -> list[str]:
    """Pipes, which cannot be copied."""
    paths = {name: Path(folder, name) for name in names}
    return [name for name, path in paths.items() if not (path.is_symlink() or path.is_file() or path.is_dir())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="of all kinds together, or of --kind (%(default)s)")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="the first input's (%(default)s)")
    parser.add_argument("--keep", type=Path, help="leave inputs with findings here")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no input of a kind after so many")
    options = parser.parse_args(arguments)
    kinds = {options.kind: 1.0} if options.kind else SHARES
    failed = False
    for kind, share in kinds.items():
        begun = time.monotonic()
        done = fuzz(
            kind,
            round(options.inputs * share),
            options.seed,
            keep=options.keep,
            report=lambda finding: print(finding, flush=True),
            seconds=options.seconds,
        )
        failed |= bool(done.findings)
        statuses = ", ".join(f"{number} x {status}" for status, number in sorted(done.statuses.items()))
        print(
            f"{kind}: {done.statuses.total()} inputs in {time.monotonic() - begun:.0f} s, "
            f"{len(done.findings)} findings; exit statuses {statuses}; the slowest took {done.slowest_s:.1f} s",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
