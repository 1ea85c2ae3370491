#!/usr/bin/env python
"""Do files of other people's ever end in anything but a result or one line? On the CPU.

    python benchmarks/fuzz.py [--inputs 10000] [--kind configs|results|recordings] [--seed N]

Damages sound files (``damage``) and gives each to the real entry point, ``cli.main``, in this process. A finding is one
of

* an exception that leaves ``main``, a traceback, or an exit status that no page names;
* a message of a user's mistake that is no single, short, printable line;
* a hang: more than 5 s of CPU time before a refusal, or 90 s by the clock;
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
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SMALL_MOE = ROOT / "tests" / "data" / "small-moe"
CPU_S, CLOCK_S = 5.0, 90.0
MORE_BYTES = 4 * 2**30  # that a command may map beyond what this process has
MOST_LINES, MOST_CHARACTERS = 12, 1500  # lines: what `plot` passes over, each in one
# What pages name: done, cases failed, a user's mistake, `compare --strict`.
STATUSES = (0, 1, 2, 3)
CANARY = "canary"


# ---- one call --------------------------------------------------------------------------------------------------------


class _Ended(BaseException):
    """Ends a call from outside; nobody who catches ``Exception`` holds it."""


class Outcome(NamedTuple):
    status: int | None
    out: str
    err: str
    problems: list[str]


_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
# Programs that say what the machine is: they read no file of the user's.
_PROBES = ("git", "nvidia-smi", "lscpu", "uname", "ldconfig", "gcc", "cc")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_allowed: tuple[str, ...] | None = None  # where a call may write; None = no call is running
_seen: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Notes what a call does to the machine; an audit hook stays for good, so it looks at calls alone."""
    if _allowed is None:
        return
    if event in _STARTS:
        words = arguments[1] if event == "subprocess.Popen" else "?"
        if os.path.basename(str(words[0] if isinstance(words, list | tuple) else words)) not in _PROBES:
            raise _Ended(f"starts a process, or connects: {event} {str(arguments[:2])[:200]}")
    elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path, mode, flags = arguments
        real = os.path.realpath(os.fsdecode(path))
        if (flags or 0) & _WRITES or set(str(mode or "")) & set("wax+"):
            _seen.extend([f"writes outside of --out: {real}"] if not real.startswith(_allowed) else [])


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


def _stop(*_: object) -> None:
    raise _Ended(f"hangs: more than {CLOCK_S:g} s\n{''.join(traceback.format_stack(limit=12))}")


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """End what takes too long or too much memory; the environment is afterwards as before."""
    memory, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, _stop)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MORE_BYTES
    try:
        signal.setitimer(signal.ITIMER_REAL, CLOCK_S, CLOCK_S)
        resource.setrlimit(resource.RLIMIT_AS, (most, memory[1]))
        with mock.patch.dict(os.environ):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.signal(signal.SIGALRM, handler)


def call(arguments: Sequence[str], out: Path, scratch: Path) -> Outcome:
    """Run one command in this process; it may write below ``out`` and ``scratch`` only."""
    global _allowed
    from moe_ep_bench.cli import main

    warm()
    _seen.clear()
    printed, said, problems, status = io.StringIO(), io.StringIO(), [], None
    begun_s = time.process_time()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _limits():
                # Caches of matplotlib, numba and torch.
                own = (str(Path.home() / ".cache"), str(Path.home() / ".config"), "/tmp/torchinductor_", str(ROOT))
                _allowed = (f"{out.resolve()}", f"{scratch.resolve()}", *own, "/dev/null", "/dev/shm/")
                status = main(list(arguments))
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else None
        except _Ended as ended:
            problems.append(str(ended))
        except BaseException:
            problems.append(f"leaves main:\n{traceback.format_exc()[-3000:]}")
        finally:
            _allowed = None
    problems = [*problems, *_seen[:3]] or _problems_of(status, said.getvalue())
    if status == 2 and (cpu_s := time.process_time() - begun_s) > CPU_S:
        problems.append(f"hangs: {cpu_s:.0f} s of CPU time before a refusal")
    return Outcome(status, printed.getvalue(), said.getvalue(), problems)


def _problems_of(status: int | None, err: str) -> list[str]:
    """What is wrong with a status, or with the one line of a refusal."""
    lines = err.splitlines() or [""]
    is_refused, longest = status == 2, max(map(len, lines))
    wrong = {
        "traceback": "Traceback (most recent call last)" in err,
        f"exit status {status}": status not in STATUSES,
        f"{len(lines)} lines": is_refused and (len(lines) > MOST_LINES or not lines[-1].startswith("moe-ep-bench: ")),
        f"a line of {longest} characters": is_refused and longest > MOST_CHARACTERS,
        "unprintable": is_refused and not err.replace("\n", "").isprintable(),
    }
    return [f"{what}: {err[-3000:]!r}" for what, found in wrong.items() if found][:1]


# ---- damage ----------------------------------------------------------------------------------------------------------

ODD = [
    *(None, True, -1, 0, 3.5, 1e308, 1e-320, float("nan"), float("inf"), 2**31, 2**63, -(2**63), 10**12, 10**400),
    *("", " ", "null", "NaN", "1e400", "..", "/", "../../../../etc/passwd", "/dev/zero", "/proc/self/mem", "a\nb"),
    *("a\x00b", "\x1b[31mred", "\u202e", "<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "${x}"),
    *("日本語", "\ud800", "9" * 5000, "a" * 100_000, "[" * 200, "all", "measured", "h100-sxm"),
    *([], {}, [[]], [None], [1, 2, 3], {"a": 1}, {"": None}, [[[[[[[[1]]]]]]]], ["x"] * 2000, [0.5, float("nan")]),
]
# What YAML and JSON give a meaning, or must not.
TOKENS = [
    *('!!int ""', "!!timestamp 99", "!!binary x", "!!set {a}", "!x y", "!!python/name:os.system", "? [a, b]\n: c"),
    *("{{a: b}: c}", "&a [*a]", "*missing", "<<: *a", "%YAML 9.9\n---\n", "...\n", "\t", "'", '"', "|", '"\\ud800"'),
    *("2001-99-99", "0x" + "f" * 5000, "1" + ":59" * 3000, ".nan", "Infinity", "1e999", "{", "]", ":", "#", "\x00"),
    f"!!python/object/apply:os.system ['touch {CANARY}']",
    f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{CANARY}]]",
]
_ALIASES = [b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)]
BOMBS = [
    *(b"a0: &a0 [x,x,x,x]\n" + b"".join(_ALIASES), b"x: " + b"1" * 1_500_000, b"- " * 3000, b"a: 1\n" * 300_000),
    *(b"[" * 100_000, b"model: " + b"{a: " * 20_000, b'{"a":' * 100_000 + b"1", b"? " * 2000, b"", b"\xff\xfe"),
]
_VALUES = {
    pa.types.is_integer: [-1, 0, 7, 2**31 - 1, -(2**31)],
    pa.types.is_floating: [float("nan"), float("inf"), -1.0, 0.0, 1e308, 1e-320],
    pa.types.is_string: ["{", '{"a": NaN}', "ok", "\x1b[31m", "a\x00b", "<script>", "9" * 5000],
    pa.types.is_list: [[], [None], [-1], [2**62] * 3],
}


class Touch:
    """Touches the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(CANARY),)


def places(value: Any, above: tuple = ()) -> Iterator[tuple]:
    """The path of every value in a document."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*above, key)
        yield from places(inner, (*above, key))


def mutate(document: Any, rand: random.Random) -> Any:
    """A document with one to three values removed, renamed, repeated, wrapped, or replaced by odd or other ones."""
    for _ in range(rand.choice((1, 1, 2, 3))):
        if not (found := [*places(document)]):
            return copy.deepcopy(rand.choice(ODD))
        *above, last = rand.choice(found)
        parent = functools.reduce(operator.getitem, above, document)
        value, other = parent[last], functools.reduce(operator.getitem, rand.choice(found), document)
        how = rand.random()
        if how < 0.1:
            del parent[last]
        elif how < 0.2 and isinstance(parent, dict):
            parent[str(rand.choice(ODD))[:300]] = parent.pop(last)
        else:
            near = (rand.choice((-1, 0, 1e-9, 3, 64, 10**6, 10**18)), f"{value}"[:50], [value] * 2, {"name": value})
            parent[last] = copy.deepcopy(rand.choice((rand.choice(near), rand.choice(ODD), other)))
    return document


def mutate_text(content: bytes, rand: random.Random) -> bytes:
    """Put tokens of the format where values, lines and parts of lines stand."""
    lines = content.decode(errors="replace").split("\n")
    for _ in range(rand.choice((1, 2, 3))):
        at, token = rand.randrange(len(lines)), rand.choice(TOKENS)
        line, place = lines[at], rand.randrange(len(lines[at]) + 1)
        valued = f"{line.partition(': ')[0]}: {token}"
        lines[at : at + 1] = rand.choice(([valued], [token, line], [line] * 2, [line[:place] + token + line[place:]]))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_bytes(content: bytes, rand: random.Random) -> bytes:
    """Cut or overwrite bytes; as likely as not where formats keep their lengths."""
    data = bytearray(content)
    for _ in range(rand.choice((1, 2, 8))):
        at = rand.choice((rand.randrange(min(64, len(data)) + 1), rand.randrange(len(data) + 1)))
        piece = rand.choice((b"\xff" * 8, b"\x00" * 8, (2**40).to_bytes(8, "little"), bytes([rand.randrange(256)])))
        data[at:] = rand.choice((piece + data[at:], piece + data[at + len(piece) :], b""))
    return bytes(data)


def mutate_document(content: bytes, rand: random.Random, read: Callable, write: Callable[[Any], str]) -> bytes:
    changed = mutate(read(content), rand)
    try:
        text = write(changed)
    except Exception:  # what the safe dumper does not write
        text = json.dumps(changed, default=str)
    return text.encode("utf-8", "surrogatepass")


def mutate_table(content: bytes, rand: random.Random) -> bytes:
    """Change values of a column, the rows, or a column's type."""
    table, file = pq.read_table(io.BytesIO(content), partitioning=None), io.BytesIO()
    place = rand.randrange(table.num_columns)
    field, column = table.schema.field(place), table.column(place).to_pylist()
    value = rand.choice([None, *next((values for fits, values in _VALUES.items() if fits(field.type)), [])])
    for row in rand.sample(range(len(column)), rand.randint(0, len(column))):
        column[row] = value
    cut = table.slice(0, rand.randrange(table.num_rows + 1))
    other = rand.choice((pa.string(), pa.float64(), pa.int64(), pa.list_(pa.float64()), pa.binary()))
    retyped = table.set_column(place, pa.field(field.name, other), pa.nulls(table.num_rows, other))
    changed = table.set_column(place, field, pa.array(column, field.type))
    options = (changed, changed, cut, pa.concat_tables([table, cut]), table.drop_columns([field.name]), retyped)
    pq.write_table(rand.choice(options), file)
    return file.getvalue()


def mutate_archive(content: bytes, rand: random.Random) -> bytes:
    """Change a member of an npz file: its bytes, its name, or its contents to a pickle's, a text's or very many."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name, buffer, file = rand.choice(list(members)), io.BytesIO(), io.BytesIO()
    arrays = (np.array([Touch()], dtype=object), np.array(["a"]), np.zeros((0, 3)), np.full((2, 3, 4), -(2**62)))
    np.save(buffer, rand.choice(arrays), allow_pickle=True)
    members |= rand.choice(
        (
            {name: mutate_bytes(members[name], rand)},
            {name: buffer.getvalue()},
            {"../x.npy": members[name]},
            {f"{number}.npy": b"" for number in range(3000)},
        )
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return file.getvalue()


def mutate_header(content: bytes, rand: random.Random) -> bytes:
    """Change the JSON header of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = mutate_document(content[8:end], rand, json.loads, json.dumps)
    told = rand.choice((*[len(header)] * 9, 0, 2**30, 2**62, len(header) - 1))
    return told.to_bytes(8, "little") + header + content[end:]


def mutate_lines(content: bytes, rand: random.Random) -> bytes:
    first, _, others = content.partition(b"\n")
    return mutate_document(first, rand, json.loads, json.dumps) + b"\n" + others


# How files of a kind are damaged in ways that their format knows.
DAMAGES: dict[str, list[Callable[[bytes, random.Random], bytes]]] = {
    ".yaml": [functools.partial(mutate_document, read=yaml.safe_load, write=yaml.safe_dump), mutate_text],
    ".json": [functools.partial(mutate_document, read=json.loads, write=json.dumps), mutate_text],
    ".jsonl": [mutate_lines, mutate_text],
    ".parquet": [mutate_table],
    ".npz": [mutate_archive],
    ".safetensors": [mutate_header],
}


def damage(path: Path, rand: random.Random) -> None:
    """Damage a file in a way that its format knows, as bytes, or put something else in its place."""
    content, how = path.read_bytes(), rand.random()
    if how < 0.06:
        path.unlink()
        target = rand.choice(("/dev/zero", "/proc/self/environ", "missing", "/", path.name))
        rand.choice((lambda: path.symlink_to(target), lambda: os.mkfifo(path), path.mkdir, lambda: None))()
    elif how < 0.1:
        path.write_bytes(rand.choice(BOMBS))
    else:
        harm = mutate_bytes if how > 0.85 else rand.choice(DAMAGES.get(path.suffix, [mutate_text]))
        path.write_bytes(harm(content, rand))


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
Sources = list[tuple[str, str]]
"""A sound file or folder below ``bases``, and a command that takes it as IN."""


def configs(bases: Path) -> Sources:
    """Configs of commands that would do something with each."""
    (bases / "small.yaml").write_text(yaml.safe_dump(SMALL))
    commands = {
        "small.yaml": ("emulate", "route", "advise", "run --nproc 4"),
        "whatif-skew.yaml": ("emulate", "advise"),
        "model-prefill.yaml": ("run --nproc 2",),
        "decode.yaml": ("run --nproc 2",),
        "route-drops.yaml": ("route",),
        "quality-small.yaml": (f"quality --set model.checkpoint={SMALL_MOE} --set text.file=words.txt",),
    }
    (bases / "words.txt").write_text("words " * 10_000)
    for name in commands.keys() - {"small.yaml"}:
        shutil.copy(ROOT / "configs" / name, bases)
    return [(name, f"{command} IN --dry-run --out out") for name in commands for command in commands[name]]


def results(bases: Path) -> Sources:
    """Directories that commands wrote."""
    from results_builder import FakeCase, FakeComparison, standard_cases, write_run
    from whole_builder import write_whole

    from moe_ep_bench.bench.route import route
    from moe_ep_bench.bench.run import emulate

    small = {"num_batches": 4, "num_iterations": 2, "tokens": 256}
    failed = FakeCase("oea", params={"k0": 3}, status="failed", reason="out of luck")
    write_run(bases / "run", [FakeComparison(cases=[*standard_cases(), failed], num_launches=2, **small)])
    pair = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again")]
    drop = FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=1.5, dropped=0.25, mass=0.8)
    write_whole(bases / "whole", [drop, *pair], **small)
    (bases / "small.yaml").write_text(yaml.safe_dump({**SMALL, "sweep": {}}))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name, write in (("emulated", emulate), ("routed", route)):
            write(bases / "small.yaml", bases / name, [])
    shutil.copytree(ROOT / "results" / "reference" / "quality-small-2cpu", bases / "quality")
    shutil.copytree(bases / "run", bases / "sound")
    more = ("advise IN", "compare sound IN", "show IN --format json --out out/file")
    more += ("plot IN --out out --format svg --figures speedup",)
    # Directories of our own making are read within a tenth of a second; those of commands take longer.
    shown = [(name, "show IN") for name in ("run", "whole") * 3 + ("quality", "emulated", "routed")]
    return [*shown, *[("run", line) for line in more] * 3, ("whole", "advise IN"), ("emulated", "advise IN")]


def recordings(bases: Path) -> Sources:
    """Recordings, sources of imports, counts and models."""
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
    (bases / "small.yaml").write_text(yaml.safe_dump({**SMALL, "sweep": {"workload.seed": [0]}}))
    into, equal = "out/x.safetensors", "--assume-equal-scores"
    routed = "emulate small.yaml --dry-run --out out --set"
    eplb = "trace eplb IN out/map.json --ep 4 --spare-per-rank 1"
    counted = (eplb, f"{routed} workload.skew_from=IN")
    toy = "--set model={num_experts:16,top_k:3,hidden_size:64,ffn_hidden_size:32}"
    vllm = f"--preset toy.yaml {equal}"
    return [
        ("megatron", f"trace import megatron IN {into} --preset toy.yaml --phase prefill"),
        ("esft", f"trace import esft IN {into} --domain law"),
        ("sglang.jsonl", f"trace import sglang IN {into} --preset deepseek-v2-lite {equal}"),
        *((name, f"trace import vllm IN {into} {vllm}") for name in ("vllm.jsonl", "vllm.npz")),
        *(("toy.safetensors", line) for line in ("trace info IN", "trace thresholds IN", eplb)),
        ("toy.safetensors", f"{routed} workload={{kind:recorded,trace:IN,layer:all,tail:both,num_tokens:8}} {toy}"),
        *((name, line) for name in ("counts.json", "counts.npz") for line in counted),
        *[("model.json", f"{routed} model={{hf_config:IN}}")] * 2,
    ]


KINDS: dict[str, Callable[[Path], Sources]] = {make.__name__: make for make in (configs, results, recordings)}


def fuzz(
    kind: str, inputs: int, seed: int = 0, harm: Callable[[Path, random.Random], object] = damage
) -> tuple[list[str], Counter]:
    """Try inputs ``seed`` to ``seed + inputs - 1`` of a kind; what was found, and how often each exit status came."""
    warm()
    findings, statuses, usual = [], Counter(), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name).resolve()
        bases, box, scratch = (folder / part for part in ("bases", "box", "scratch"))
        bases.mkdir()
        sources = KINDS[kind](bases)
        for number in range(seed, seed + inputs):
            rand = random.Random(f"{kind} {number}")
            source, line = rand.choice(sources)
            for fresh in (box, scratch):
                shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(bases, box)
            scratch.mkdir()
            files = [path for path in sorted((box / source).rglob("*")) if path.is_file()] or [box / source]
            for path in rand.sample(files, min(len(files), rand.choice((1, 1, 2)))):
                harm(path, rand)
            # YAML has a space behind a colon.
            command = [word.replace("IN", source).replace(":", ": ") for word in line.split()]
            try:
                tempfile.tempdir = str(scratch)
                with contextlib.chdir(box):
                    outcome = call(command, box / "out", scratch)
            finally:
                tempfile.tempdir = usual
            problems = list(outcome.problems)
            problems += ["the canary was touched"] if any(folder.rglob(CANARY)) else []
            left = [path for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]
            problems += ["leaves temporary files"] if left else []
            statuses[str(outcome.status)] += 1
            findings += [f"{kind} {number}: {problem}\n    moe-ep-bench {' '.join(command)}" for problem in problems]
    return findings, statuses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="of all kinds together, or of --kind (%(default)s)")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="the first input's (%(default)s)")
    options = parser.parse_args(arguments)
    kinds, failed = [options.kind] if options.kind else list(KINDS), False
    for kind in kinds:
        findings, statuses = fuzz(kind, options.inputs // len(kinds), options.seed)
        failed |= bool(findings)
        counts = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
        print(*findings, f"{kind}: {len(findings)} findings; exit statuses {counts}", sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
