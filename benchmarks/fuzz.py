#!/usr/bin/env python
"""Do files and options of other people's ever end in anything but a result or one line? On the CPU.

    python benchmarks/fuzz.py [--inputs 10000] [--kind configs|results|recordings|commands] [--seed N]

Damages sound files (``damage``: a document, a table, an archive, bytes) and options, and gives each to the real entry
point, ``cli.main``, in this process. A finding is one of

* an exception that leaves ``main``, a traceback, or an exit status that no page names;
* a message of a user's mistake that is no single, short, printable line;
* a hang: more than 5 s of CPU time before a refusal, or 90 s by the clock; a prompt;
* a process that is started, a connection, a file that is written or removed outside of ``--out``; the canary, which
  hostile contents would touch.

Input N of a kind is drawn from the seed N alone: ``--kind K --seed N --inputs 1`` repeats it. Exit status 1 where
there is a finding. Commands that would measure are given ``--dry-run``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import operator
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CPU_S, CLOCK_S = 5.0, 90.0
MORE_BYTES = 4 * 2**30  # that a command may map beyond what this process has
MOST_LINES, MOST_CHARACTERS = 12, 1500  # lines: what `plot` passes over, each in one
SHARES = {"configs": 0.4, "results": 0.3, "recordings": 0.2, "commands": 0.1}  # of --inputs, without --kind
# What pages name: done, cases failed, a user's mistake, `compare --strict`.
STATUSES = (0, 1, 2, 3)


# ---- one call --------------------------------------------------------------------------------------------------------


class _Ended(BaseException):
    """Ends a call from outside; nobody who catches ``Exception`` holds it."""


class Outcome(NamedTuple):
    status: int | None
    out: str
    err: str
    problems: list[str]


class _Keyboard(io.TextIOBase):
    """Standard input that nobody may ask."""

    def read(self, *_: object) -> str:
        raise _Ended("prompts: standard input is read")

    readline = read
    readable = isatty = lambda self: True


_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn")
# Programs that say what the machine is: they read no file of the user's.
_PROBES = ("git", "nvidia-smi", "lscpu", "uname", "ldconfig", "gcc", "cc")
# Which arguments of an event are the path that it changes and the open folder that this is relative to.
_CHANGES = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.utime"), 0),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 1),
}
_allowed: tuple[str, ...] | None = None  # where a call may write; None = no call is running
_seen: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Notes what a call does to the machine; an audit hook stays for good, so it looks at calls alone."""
    if _allowed is None:
        return
    if event in _STARTS:
        words = arguments[1] if event == "subprocess.Popen" else "?"
        if os.path.basename(str(words[0] if isinstance(words, list | tuple) else words)) not in _PROBES:
            raise _Ended(f"starts a process: {event} {str(arguments[:2])[:200]}")
    elif event == "socket.connect":
        raise _Ended(f"connects: {arguments[1]!r}")
    elif event == "open":
        path, mode, flags = arguments
        writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if isinstance(path, str | bytes | os.PathLike) and (writes or set(str(mode or "")) & set("wax+")):
            _changed(event, path, -1)
    elif event in _CHANGES and not isinstance(arguments[_CHANGES[event]], int):
        _changed(event, arguments[_CHANGES[event]], arguments[-1])


def _changed(event: str, path: Any, folder: Any) -> None:
    above = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else os.getcwd()
    place = os.path.abspath(os.path.join(above, os.fsdecode(path)))
    if place == "/dev/tty":
        raise _Ended("prompts: the terminal is opened")
    real = os.path.join(os.path.realpath(os.path.dirname(place)), os.path.basename(place))
    if not real.startswith(_allowed or ()) and "__pycache__" not in real:
        _seen.append(f"writes outside of --out: {event} {real}")


@functools.cache
def warm() -> None:
    """Import what commands import when they first need it: that takes seconds, which are no hang."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import transformers  # noqa: F401

    import moe_ep_bench.analysis.advise
    import moe_ep_bench.analysis.compare
    import moe_ep_bench.analysis.page
    import moe_ep_bench.analysis.plot
    import moe_ep_bench.analysis.validate
    import moe_ep_bench.bench.question
    import moe_ep_bench.bench.route
    import moe_ep_bench.bench.run
    import moe_ep_bench.papers.run
    import moe_ep_bench.quality.session
    import moe_ep_bench.workload.importers  # noqa: F401

    sys.addaudithook(_note)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """End what takes too long or too much memory; signals' handlers and the environment are afterwards as before."""

    def stop(*_: object) -> None:
        raise _Ended(f"hangs: more than {CLOCK_S:g} s\n{''.join(traceback.format_stack(limit=12))}")

    signals = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers, environment = {number: signal.getsignal(number) for number in signals}, dict(os.environ)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MORE_BYTES
    try:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, CLOCK_S, CLOCK_S)
        resource.setrlimit(resource.RLIMIT_AS, (most, memory[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)


def call(arguments: Sequence[str], out: Path, scratch: Path) -> Outcome:
    """Run one command in this process; it may write below ``out`` and ``scratch`` only."""
    global _allowed
    from moe_ep_bench.cli import main

    warm()
    _seen.clear()
    printed, said, problems, status = io.StringIO(), io.StringIO(), [], None
    begun_s, stdin = time.process_time(), sys.stdin
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _limits():
                sys.stdin = _Keyboard()
                # Caches of matplotlib, numba and torch; an --out of ODD lies in /proc, where nothing can be made.
                own = (str(Path.home() / ".cache"), str(Path.home() / ".config"), "/tmp/torchinductor_")
                own += ("/dev/null", "/dev/shm/", "/proc/self", f"/proc/{os.getpid()}/")
                _allowed = (f"{out}", f"{scratch}", *own)
                status = main(list(arguments))
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else None
        except _Ended as ended:
            problems.append(str(ended))
        except BaseException:
            problems.append(f"leaves main:\n{traceback.format_exc()[-3000:]}")
        finally:
            _allowed, sys.stdin = None, stdin
    problems = [*problems, *_seen[:3]] or _problems_of(status, said.getvalue())
    if status == 2 and (cpu_s := time.process_time() - begun_s) > CPU_S:
        problems.append(f"hangs: {cpu_s:.0f} s of CPU time before a refusal")
    return Outcome(status, printed.getvalue(), said.getvalue(), problems)


def _problems_of(status: int | None, err: str) -> list[str]:
    """What is wrong with a status, or with the one line of a refusal."""
    lines = err.splitlines()
    if "Traceback (most recent call last)" in err:
        return [f"traceback:\n{err[-3000:]}"]
    if status not in STATUSES:
        return [f"exit status {status}: {err[-500:]}"]
    if status != 2 or err.startswith("usage:"):
        return []
    if not lines or len(lines) > MOST_LINES or not lines[-1].startswith("moe-ep-bench: "):
        return [f"{len(lines)} lines: {err[:600]}"]
    if max(map(len, lines)) > MOST_CHARACTERS:
        return [f"a line of {max(map(len, lines))} characters: {err[:600]}"]
    if unprintable := [letter for letter in err if not letter.isprintable() and letter != "\n"]:
        return [f"unprintable {unprintable[0]!r} in: {err[:600]!r}"]
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
NUMBERS = (0, 1, 2, 3, 5, 8, 64, 1000, 10**6, 10**9, 10**18, 0.5, 1.5, -1, 1e-9)
# What YAML and JSON give a meaning, or must not.
TOKENS = [
    *('!!int ""', "!!bool x", "!!timestamp 99", "!!binary x", "!!set {a}", "!!omap x", "!!pairs x", "!x y", "!<a> b"),
    *(
        "!!python/none x",
        "!!python/name:os.system",
        "? [a, b]\n: c",
        "{[a]: b}",
        "{{a: b}: c}",
        "&a [*a]",
        "&a {b: *a}",
    ),
    *("*missing", "<<: 1", "<<: *a", "%YAML 9.9\n---\n", "---\n", "...\n", "\t", "'", '"', "|", '"\\ud800"', '"\\x00"'),
    *("2001-99-99", "0x" + "f" * 5000, "1" * 5000, "1" + ":59" * 3000, ".nan", "NaN", "Infinity", "1e999", "~", "@"),
    *("{", "}", "[", "]", ":", "#", "\x00", "\ufeff", "null", "-1", "65536"),
    f"!!python/object/apply:os.system ['touch {CANARY}']",
    f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{CANARY}]]",
]
_ALIASES = [b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)]
BOMBS = [
    *(b"a0: &a0 [x,x,x,x]\n" + b"".join(_ALIASES), b"x: " + b"1" * 1_500_000, b"- " * 3000, b"a: 1\n" * 300_000),
    *(b"[" * 100_000, b"model: " + b"{a: " * 20_000, b'{"a":' * 100_000 + b"1", b"[" * 5000 + b"]" * 5000),
    *(b"? " * 2000, b"", b"\x00" * 100, b"\xff\xfe"),
]


def odd(rand: random.Random) -> Any:
    return copy.deepcopy(rand.choice(ODD))


def places(value: Any, above: tuple = ()) -> Iterator[tuple]:
    """The path of every value in a document."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*above, key)
        yield from places(inner, (*above, key))


def mutate(document: Any, rand: random.Random) -> Any:
    """A copy of a document with one to three values replaced, removed, renamed, repeated, moved or wrapped."""
    document = copy.deepcopy(document)
    for _ in range(rand.choice((1, 1, 1, 2, 3))):
        if not (found := [*places(document)]):
            return odd(rand)
        *above, last = rand.choice(found)
        parent = functools.reduce(operator.getitem, above, document)
        value, moved = parent[last], functools.reduce(operator.getitem, rand.choice(found), document)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        near = (*NUMBERS, -value, str(value), [value]) if is_number else ODD
        how = rand.random()
        if how < 0.1:
            del parent[last]
        elif how < 0.2 and isinstance(parent, dict):
            parent[str(odd(rand))[:300]] = parent.pop(last)
        else:
            others = (
                [value] * rand.choice((1, 2, 50)),
                {rand.choice(("x", "name", "kind")): value},
                f"{value}"[:50] + "x",
            )
            options = (rand.choice(near), odd(rand), rand.choice((*others, moved)))
            parent[last] = copy.deepcopy(rand.choice(options))
    return document


def mutate_text(content: bytes, rand: random.Random) -> bytes:
    """Put tokens of the format where values, lines and parts of lines stand."""
    lines = content.decode(errors="replace").split("\n")
    for _ in range(rand.choice((1, 1, 2, 3))):
        at, token = rand.randrange(len(lines)), rand.choice(TOKENS)
        line, (key, colon, _) = lines[at], lines[at].partition(": ")
        place = rand.randrange(len(line) + 1)
        others = (
            [f"{key}{colon}{token}"],
            [token, line],
            [],
            [line] * 2,
            [f"  {line}"],
            [line[:place] + token + line[place:]],
        )
        lines[at : at + 1] = rand.choice(others) or [""]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_bytes(content: bytes, rand: random.Random) -> bytes:
    """Cut, repeat or overwrite bytes; as likely as not where formats keep their lengths."""
    data = bytearray(content)
    for _ in range(rand.choice((1, 1, 2, 8))):
        ends = rand.randrange(min(64, len(data)) + 1), max(0, len(data) - rand.randrange(1, 64))
        at = rand.choice((*ends, rand.randrange(len(data) + 1), rand.randrange(len(data) + 1)))
        piece = rand.choice((b"\xff" * 8, b"\x00" * 8, (2**40).to_bytes(8, "little"), bytes([rand.randrange(256)])))
        kept = rand.choice((data[at:], data[at:], data[at + len(piece) :], data[at + len(piece) :], b""))
        data[at:] = piece * (len(kept) > 0) + kept
    return bytes(data)


_VALUES = {
    pa.types.is_integer: [-1, 0, 7, 2**31 - 1, -(2**31)],
    pa.types.is_floating: [float("nan"), float("inf"), -1.0, 0.0, 1e308, 1e-320],
    pa.types.is_string: ["{", '{"a": NaN}', "[]", "ok", "\x1b[31m", "a\x00b", "<script>", "9" * 5000],
    pa.types.is_list: [[], [None], [-1], [2**62] * 3, [0] * 8],
    pa.types.is_boolean: [True, False],
}


def mutate_table(table: pa.Table, rand: random.Random) -> pa.Table:
    """A table with values of a column, its rows, or a column's type changed."""
    place = rand.randrange(table.num_columns)
    field, column = table.schema.field(place), table.column(place).to_pylist()
    if rand.random() < 0.6 and column:
        value = rand.choice([None, *next((values for fits, values in _VALUES.items() if fits(field.type)), [])])
        for row in rand.sample(range(len(column)), rand.choice((len(column), rand.randint(1, len(column))))):
            column[row] = value
        return table.set_column(place, field, pa.array(column, field.type))
    cut = table.slice(0, rand.randrange(table.num_rows + 1))
    other = rand.choice((pa.string(), pa.float64(), pa.int64(), pa.list_(pa.float64()), pa.binary()))
    changed = table.set_column(place, pa.field(field.name, other), pa.nulls(table.num_rows, other))
    return rand.choice((cut, pa.concat_tables([table, cut]), table.drop_columns([field.name]), changed))


class Touch:
    """Touches the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(CANARY),)


def mutate_archive(path: Path, rand: random.Random) -> None:
    """Change a member of an npz file: its bytes, its name, or its contents to a pickle's, a text's or very many."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name, buffer = rand.choice(list(members)), io.BytesIO()
    arrays = (np.array([Touch()], dtype=object), np.array(["a"]), np.zeros((0, 3)), np.full((2, 3, 4), -(2**62)))
    np.save(buffer, rand.choice(arrays), allow_pickle=True)
    others = {name: mutate_bytes(members[name], rand)}, {name: buffer.getvalue()}, {"../x.npy": members[name]}
    members |= rand.choice((*others, {f"{number}.npy": b"" for number in range(3000)}))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for member, content in members.items():
            archive.writestr(member, content)


def mutate_header(content: bytes, rand: random.Random) -> bytes:
    """Change the JSON header of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(mutate(json.loads(content[8:end]), rand)).encode("utf-8", "surrogatepass")
    told = rand.choice((*[len(header)] * 9, 0, 2**30, 2**62, len(header) - 1))
    return told.to_bytes(8, "little") + header + content[end:]


def replace_file(path: Path, rand: random.Random) -> None:
    """Put something that is no such file in a file's place, or nothing."""
    if path.is_file():
        (path.parent / "sound").write_bytes(path.read_bytes())
    path.unlink(missing_ok=True)
    how = rand.randrange(5)
    if how == 0:
        path.symlink_to(rand.choice(("/dev/zero", "/proc/self/environ", "missing", "/", path.name, "sound")))
    elif how == 1:
        os.mkfifo(path)
    elif how == 2:
        path.mkdir()
    elif how == 3:
        path.write_bytes(rand.choice(BOMBS))


def damage(path: Path, rand: random.Random) -> None:
    """Damage a file in a way that its format knows, as bytes, or altogether."""
    how, kind = rand.random(), path.suffix
    if path.is_dir():
        return
    if not path.is_file() or how < 0.06:
        replace_file(path, rand)
        return
    content = path.read_bytes()
    harmless = ValueError, RecursionError, LookupError, OSError, pa.ArrowException, zipfile.BadZipFile, yaml.YAMLError
    with contextlib.suppress(*harmless):  # what was damaged before
        if how > 0.85:
            path.write_bytes(mutate_bytes(content, rand))
        elif kind == ".parquet":
            pq.write_table(mutate_table(pq.read_table(path, partitioning=None), rand), path)
        elif kind == ".npz":
            mutate_archive(path, rand)
        elif kind == ".safetensors":
            path.write_bytes(mutate_header(content, rand))
        elif how < 0.4 or kind not in (".yaml", ".json", ".jsonl"):
            path.write_bytes(mutate_text(content, rand))
        elif kind == ".jsonl":
            first, _, others = content.decode().partition("\n")
            path.write_bytes(_yaml(mutate(json.loads(first), rand), as_json=True) + f"\n{others}".encode())
        else:
            read = json.loads if kind == ".json" else yaml.safe_load
            path.write_bytes(_yaml(mutate(read(content), rand), as_json=kind == ".json"))


def _yaml(document: Any, *, as_json: bool = False) -> bytes:
    try:
        text = json.dumps(document) if as_json else yaml.safe_dump(document, sort_keys=False)
    except Exception:  # what the safe dumper does not write
        text = json.dumps(document, default=str)
    return text.encode("utf-8", "surrogatepass")


# ---- inputs ----------------------------------------------------------------------------------------------------------

SMALL = {
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 1, "peak_load": 2},
    "layer": {"ep_size": 4},
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": [1.0, 1.5]}, {"name": "oea", "k0": 3}],
    "emulate": {"device": "h100-sxm", "links": "h100-nvlink4", "replication": [{"spare_per_rank": 1}]},
    "measure": {"iterations": 1, "breakdown_iterations": 1},
    "sweep": {"workload.seed": [0, 1]},
}

Make = Callable[[random.Random, Path], list[str]]
"""Lays an input into an empty folder, and returns the command that takes it."""


def configs(bases: Path) -> Make:
    """Damaged configs, and odd overrides of sound ones."""
    shipped = sorted((ROOT / "configs").glob("*.yaml"))
    quality = [path.read_bytes() for path in shipped if path.stem.startswith("quality")]
    texts = [_yaml(SMALL)] * 2 + [path.read_bytes() for path in shipped if not path.stem.startswith("quality")]
    keys = [".".join(map(str, place)) for place in places(SMALL)] + ["sweep", "", "a.b", "policies.9", "workload.trace"]

    def make(rand: random.Random, box: Path) -> list[str]:
        command, overrides = rand.choice(("emulate", "route", "run", "points", "advise", "quality")), []
        (box / "config.yaml").write_bytes(rand.choice(quality if command == "quality" else texts))
        if rand.random() < 0.85:
            damage(box / "config.yaml", rand)
        else:
            for _ in range(rand.choice((1, 2))):
                value = rand.choice((*TOKENS, *(repr(value)[:2000] for value in ODD)))
                overrides += ["--set", f"{rand.choice(keys)}={value}".replace("\x00", "")]
        if command == "points":
            return ["run", "config.yaml", "--list-points", *overrides]
        ranks = ["--nproc", "2"] if command == "run" else []
        return [command, "config.yaml", "--dry-run", "--out", "out", *ranks, *overrides]

    return make


def results(bases: Path) -> Make:
    """One to three damaged files of a directory that one of the commands wrote."""
    from results_builder import FakeCase, FakeComparison, standard_cases, write_run
    from whole_builder import write_whole

    from moe_ep_bench.bench.route import route
    from moe_ep_bench.bench.run import emulate
    from moe_ep_bench.papers.run import run_claims

    small = {"num_batches": 4, "num_iterations": 2, "tokens": 256}
    drop = FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=1.5, dropped=0.25, mass=0.8)
    pair = [drop, FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again")]
    failed = FakeCase("oea", params={"k0": 3}, status="failed", reason="out of luck")
    write_run(bases / "run", [FakeComparison(cases=[*standard_cases(), failed], num_launches=2, **small)])
    write_whole(bases / "whole", pair, **small)
    claim = {"source": "Table 1", "policy": {"name": "token_drop", "capacity_factor": 1.0}, "paper": 1.1, "note": "x"}
    config = {**SMALL, "model": {"preset": "mixtral-8x7b"}, "policies": SMALL["policies"][:2], "claims": [claim]}
    del config["sweep"]
    (bases / "small.yaml").write_bytes(_yaml(config))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name, write in (("emulated", emulate), ("routed", route), ("claims", run_claims)):
            write(bases / "small.yaml", bases / name, [])
    _thin_quality(bases / "quality")
    figures = {"whole": ["whole"], "routed": ["load"], "quality": ["quality_fronts"]}
    again = {"emulated": "emulate", "claims": "papers"}

    def make(rand: random.Random, box: Path) -> list[str]:
        # Directories of our own making are read within a tenth of a second; those of commands take longer.
        name = rand.choice(("run", "whole", "quality") * 6 + ("emulated", "routed", "claims"))
        for copied in ("in", "sound"):
            shutil.copytree(bases / name, box / copied)
        files = sorted(path for path in (box / "in").rglob("*") if path.suffix in (".json", ".parquet"))
        for _ in range(rand.choice((1, 1, 2, 3))):
            suffix = rand.choice((".json", ".json", ".parquet"))  # as likely in one kind of file as in another
            damage(rand.choice([path for path in files if path.suffix == suffix] or files), rand)
        if name in again and rand.random() < 0.3:
            return [again[name], str(bases / "small.yaml"), "--out", "in"]
        figure = rand.choice(figures.get(name, ["speedup", "phases", "timeline", "load", "pareto"]))
        form = rand.choice(("md", "latex", "csv", "json"))  # a page draws all figures, which takes longer than a hang
        commands = (
            *(["show", "in"], ["advise", "in"], ["compare", "sound", "in"], ["compare", "in", "sound", "--json"]),
            ["show", "in", "--format", form, "--out", "out/file"],
            ["plot", "in", "--out", "out", "--format", "svg", "--figures", figure],
        )
        return rand.choice(commands)

    return make


def _thin_quality(folder: Path) -> None:
    """A few cases, sequences and layers of a directory that ``quality`` wrote."""
    whole = ROOT / "results" / "reference" / "quality-small-2cpu"
    described = json.loads((whole / "run.json").read_text())
    first = next(iter(described["comparisons"]))
    described["comparisons"] = {first: described["comparisons"][first]}
    cases = {key: case for key, case in described["cases"].items() if case["comparison_id"] == first}
    described["cases"] = dict(sorted(cases.items(), key=lambda item: item[1]["role"] != "baseline")[:5])
    for part, column, most in (("quality", "item", 12), ("routing", "layer", 4)):
        (folder / part).mkdir(parents=True)
        table = pq.read_table(whole / part / f"{first}.parquet", partitioning=None)
        few = pc.field("case_id").isin(list(described["cases"])) & (pc.field(column) < most)
        pq.write_table(table.filter(few), folder / part / f"{first}.parquet")
    (folder / "run.json").write_text(json.dumps(described))


def recordings(bases: Path) -> Make:
    """Damaged recordings, sources of imports, counts and models."""
    import test_importers as importers
    from test_importers import npy, raw, routing, written
    from test_recorded import trace_parts, write

    write(bases / "toy.safetensors", *trace_parts())
    importers.megatron(bases / "megatron")
    importers.esft(bases / "esft", lengths=(2,), domains=("law",))
    (bases / "toy.yaml").write_bytes(importers.TOY.read_bytes())
    np.savez(bases / "vllm.npz", **importers.vllm_arrays())
    ids = routing(3, 4, 16, 3)
    written(bases / "vllm.jsonl", *[{"choices": [{"routed_experts": npy(ids), "prompt_token_ids": [1, 2]}]}] * 2)
    written(bases / "sglang.jsonl", {"meta_info": {"routed_experts": raw(routing(6, 27, 64, 6)), "prompt_tokens": 4}})
    counts = np.arange(1, 129).reshape(2, 64)
    (bases / "counts.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    np.savez(bases / "counts.npz", logical_count=counts)
    model = {"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "vocab_size": 100}
    model |= {"num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    (bases / "model.json").write_text(json.dumps({**model, "norm_topk_prob": False}))
    (bases / "small.yaml").write_bytes(_yaml(SMALL))
    into, equal = "out/x.safetensors", "--assume-equal-scores"
    vllm = f"--preset toy.yaml {equal}"
    routed = "emulate small.yaml --dry-run --out out --set sweep.workload.seed=[0] --set"
    eplb = "trace eplb IN out/map.json --ep 4 --spare-per-rank 1"
    counted = [
        (name, line) for name in ("counts.json", "counts.npz") for line in (eplb, f"{routed} workload.skew_from=IN")
    ]
    commands = [
        ("megatron", f"trace import megatron IN {into} --preset toy.yaml --phase prefill"),
        ("esft", f"trace import esft IN {into} --domain law"),
        ("sglang.jsonl", f"trace import sglang IN {into} --preset deepseek-v2-lite {equal}"),
        *((name, f"trace import vllm IN {into} {vllm}") for name in ("vllm.jsonl", "vllm.npz")),
        *(("toy.safetensors", line) for line in ("trace info IN", "trace info IN", "trace thresholds IN", eplb)),
        ("toy.safetensors", "advise --model olmoe-1b-7b --ep 4 --tokens 64 --dry-run --out out --trace IN"),
        ("toy.safetensors", f"{routed} workload={{kind:recorded,trace:IN,layer:all,tail:both,num_tokens:8}}"),
        *counted,
        *[("model.json", f"{routed} model={{hf_config:IN}}")] * 2,
    ]

    def make(rand: random.Random, box: Path) -> list[str]:
        name, line = rand.choice(commands)
        shutil.copytree(bases, box, dirs_exist_ok=True)
        files = [box / name] if (box / name).is_file() else sorted(p for p in (box / name).rglob("*") if p.is_file())
        damage(rand.choice(files), rand)
        return [word.replace("IN", name).replace(":", ": ") for word in line.split()]

    return make


def commands(bases: Path) -> Make:
    """Options of every command with odd values, missing, repeated and in each other's places."""
    from results_builder import FakeComparison, standard_cases, write_run
    from test_recorded import trace_parts, write

    from moe_ep_bench.cli.arguments import make_parser

    (bases / "config.yaml").write_bytes(_yaml(SMALL))
    write_run(bases / "run", [FakeComparison(cases=standard_cases(), num_batches=2, num_iterations=2, tokens=64)])
    write(bases / "toy.safetensors", *trace_parts())
    actions = dict(_parsers(make_parser()))
    sound = {
        **dict.fromkeys(("config", "configs"), "config.yaml"),
        **dict.fromkeys(("file", "trace", "source"), "toy.safetensors"),
        **dict.fromkeys(("directory", "directories", "base", "new", "run_directory"), "run"),
        **{"out": "out/file", "overrides": "workload.num_tokens=8", "format": "svg", "policy": "topk", "kind": "vllm"},
        **{"model": "olmoe-1b-7b", "preset": "olmoe-1b-7b", "device": "h100-sxm", "figures": "speedup"},
    }

    def value(action: argparse.Action, rand: random.Random) -> str:
        if rand.random() < 0.3:
            return str(odd(rand))[:3000]
        if action.choices:
            return rand.choice(list(map(str, action.choices)))
        return sound.get(action.dest, rand.choice(("1", "2", "4", "0.5", "5%")))

    def make(rand: random.Random, box: Path) -> list[str]:
        shutil.copytree(bases, box, dirs_exist_ok=True)
        name = rand.choice(list(actions))
        words = name.split()
        for action in actions[name]:
            if not action.option_strings:
                words += [value(action, rand)]
            elif action.required or rand.random() < 0.25:
                words += [action.option_strings[0], *([value(action, rand)] if action.nargs != 0 else [])]
        if rand.random() < 0.15:
            words.insert(rand.randrange(len(words) + 1), str(odd(rand))[:300])
        if name in ("run", "emulate", "route", "quality", "advise"):
            words += ["--dry-run"]
        elif name == "plot":
            words += ["--figures", "speedup", "--format", "svg"]  # all of them take longer than a hang may
        elif name in ("validate", "papers", "calibrate", "doctor", "trace record", "check-policy"):
            # They would measure or start something: their own checks of options are what is tried.
            words = [word if word not in ("config.yaml", "topk") else "missing.yaml" for word in words]
            words += {"calibrate": ["--nproc", "0"], "doctor": ["--nproc", "0"]}.get(name, [])
        return [word.replace("\x00", "") for word in words]

    return make


def _parsers(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, list[argparse.Action]]]:
    """The actions of every command, by its name."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from _parsers(inner, f"{name} {word}".strip())
        elif action.dest not in ("help", "version"):
            found.append(action)
    if name and found:
        yield name, found


# ---- rounds ----------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Path], Make]] = {make.__name__: make for make in (configs, results, recordings, commands)}


def fuzz(kind: str, inputs: int, seed: int = 0) -> tuple[list[str], Counter]:
    """Try inputs ``seed`` to ``seed + inputs - 1`` of a kind; what was found, and how often each exit status came."""
    warm()
    findings, statuses, usual = [], Counter(), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name).resolve()
        bases, box, scratch = (folder / part for part in ("bases", "box", "scratch"))
        bases.mkdir()
        make = KINDS[kind](bases)
        for number in range(seed, seed + inputs):
            for fresh in (box, scratch):
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir()
            tempfile.tempdir = str(scratch)
            try:
                with contextlib.chdir(box):
                    command = make(random.Random(f"{kind} {number}"), box)
                    # A command that goes on with a directory writes into that; `out` is where all others may. Command
                    # lines without --out have their defaults below the working directory.
                    goes_on = command[-2:] == ["--out", "in"]
                    outcome = call(
                        command, box / "in" if goes_on else box if kind == "commands" else box / "out", scratch
                    )
            finally:
                tempfile.tempdir = usual
            problems = list(outcome.problems)
            problems += ["the canary was touched"] if any(folder.rglob(CANARY)) else []
            problems += ["leaves temporary files"] if any(scratch.iterdir()) else []
            statuses[str(outcome.status)] += 1
            words = " ".join(repr(word)[1:-1][:200] for word in command)
            findings += [f"{kind} {number}: {problem}\n    moe-ep-bench {words}" for problem in problems]
    return findings, statuses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="of all kinds together, or of --kind (%(default)s)")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="the first input's (%(default)s)")
    options = parser.parse_args(arguments)
    failed = False
    for kind, share in ({options.kind: 1.0} if options.kind else SHARES).items():
        findings, statuses = fuzz(kind, round(options.inputs * share), options.seed)
        failed |= bool(findings)
        counts = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
        print(*findings, f"{kind}: {len(findings)} findings; exit statuses {counts}", sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
