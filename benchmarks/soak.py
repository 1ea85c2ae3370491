"""Does a long sweep leave anything behind? Hundreds of small cases on two CPU ranks, watched from outside.

    python benchmarks/soak.py [--cases 500] [--out DIR]

A sweep over seeds makes comparisons of ten cases each, which torchrun measures on two ranks. Meanwhile the
resident memory and the open files of its processes are read from /proc, and set against the cases that are finished.
Within a comparison memory rises by some hundred MiB and falls again when freed buffers are handed back, so that a line
through all samples says when they were taken; what would leak is what stays. So the least of each comparison counts.
The first fifth is left out, while libraries load and allocators reach their size; over the rest a line is fitted to
each process: memory per case, with a 95 % interval (Student's t; residuals taken as independent). It is flat where
what it would add over all cases stays below a bound. Afterwards there
must be no process, temporary file or shared-memory segment that was not there before. Exit status 1 where one of that
does not hold. Nothing here is a claim about speed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from scipy.stats import t as student_t

from moe_ep_bench.analysis.cases import cases, load

CASES_PER_COMPARISON = 10
_POLICIES = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": [1.0, 1.5, 2.0]},
    {"name": "expanded_drop", "capacity_factor": 1.0},
    {"name": "oea", "k0": 3},
    {"name": "pruned", "k0": 3},
]
# What all cases together may add to a process, and how many files more it may have open at the end.
MOST_GROWTH_BYTES, MOST_FILES = 64 * 2**20, 4
_LEFT_OUT = 0.2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    num_finished: int
    resident_bytes: int
    num_files: int


def config(num_cases: int) -> dict[str, object]:
    """A sweep of comparisons that each take a moment."""
    return {
        "name": "soak",
        "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
        "workload": {"kind": "synthetic", "num_tokens": 32, "num_batches": 1, "sequence_length": 8},
        "layer": {"dtype": "float32"},
        "policies": _POLICIES,
        "measure": {"iterations": 1, "breakdown_iterations": 1, "warmup": 1, "timeout_s": 120},
        "sweep": {"workload.seed": list(range(-(-num_cases // CASES_PER_COMPARISON)))},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500, metavar="N", help="rounded up to tens (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to keep the results (default: nowhere)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        problems = soak(options.cases, options.out or Path(folder) / "out", Path(folder))
    for problem in problems:
        print(f"soak: {problem}")
    return 1 if problems else 0


def soak(num_cases: int, out: Path, folder: Path) -> list[str]:
    """Measure so many cases and print what became of the processes' memory; return what is wrong."""
    path, temporary = folder / "soak.yaml", folder / "tmp"
    path.write_text(yaml.safe_dump(config(num_cases)))
    temporary.mkdir()
    shared_before = unmapped_segments()
    command = [sys.executable, "-m", "moe_ep_bench", "run", "--nproc", "2", str(path), "--out", str(out)]
    with open(folder / "errors", "w") as errors:
        job = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}, stderr=errors)
    samples: dict[str, list[Sample]] = defaultdict(list)
    seen: set[Process] = set()
    while job.poll() is None:
        num_finished, running = CASES_PER_COMPARISON * len(list((out / "cases").glob("*.parquet"))), _processes()
        ours = _descendants(job.pid, running)
        seen.update(ours)
        ranks = [one for one in ours if one.parent == job.pid]
        for name, pid in {"torchrun": job.pid, **{f"rank {i}": one.pid for i, one in enumerate(ranks)}}.items():
            _sample(name, pid, num_finished, samples)
        time.sleep(0.1)
    if job.returncode:
        return [f"exit status {job.returncode}: {(folder / 'errors').read_text()[-500:]}"]
    rows = cases(load(out, join_draws=False))
    measured = int(rows["status"].eq("ok").sum())
    print(f"soak: {measured} of {len(rows)} cases measured on 2 CPU ranks")
    problems = [] if measured == len(rows) >= num_cases else [f"only {measured} cases were measured"]
    for name in sorted(samples):
        problems += _judge(name, samples[name], len(rows))
    # Whose parent has ended has another now.
    known = {(one.pid, one.started) for one in seen}
    left = [f"process {one.pid}" for one in _processes() if (one.pid, one.started) in known]
    # torch's cache of compiled code is one folder per user, which it means to keep.
    left += [str(file) for file in temporary.iterdir() if not file.name.startswith("torchinductor_")]
    left += [str(file) for file in out.rglob("*") if file.name.startswith((".", "now-"))]
    segments = unmapped_segments() - shared_before
    for _ in range(2):  # another program may be about to map, or to remove, what it has just made
        time.sleep(0.5)
        segments &= unmapped_segments()
    left += sorted(segments)
    print(f"soak: left behind: {', '.join(left) or 'no process, temporary file or shared-memory segment'}")
    return problems + [f"left behind: {one}" for one in left]


def _judge(name: str, samples: list[Sample], num_cases: int) -> list[str]:
    """Print the line of one process; what is wrong with it."""
    # With the last case the processes begin to end.
    kept = [sample for sample in samples if _LEFT_OUT * num_cases <= sample.num_finished < num_cases]
    floors: dict[int, int] = {}
    for sample in kept:
        comparison = sample.num_finished // CASES_PER_COMPARISON
        floors[comparison] = min(floors.get(comparison, sample.resident_bytes), sample.resident_bytes)
    if len(floors) < 3:
        return [f"{name}: too few samples for a line"]
    slope, within = _slope(np.array(list(floors)) * float(CASES_PER_COMPARISON), np.array(list(floors.values()), float))
    growth, files = slope * num_cases, (kept[0].num_files, max(sample.num_files for sample in kept[-5:]))
    most, last = max(sample.resident_bytes for sample in kept), list(floors.values())[-1]
    print(
        f"soak: {name}: {most / 2**20:.0f} MiB at most, {last / 2**20:.0f} in between at the end, "
        f"{slope / 2**10:+.1f} +- {within / 2**10:.1f} KiB per case, {growth / 2**20:+.1f} MiB over {num_cases} cases; "
        f"{files[0]} to {files[1]} open files"
    )
    problems = []
    if growth > MOST_GROWTH_BYTES:
        problems.append(
            f"{name}: memory grows by {growth / 2**20:.0f} MiB, allowed are {MOST_GROWTH_BYTES / 2**20:.0f}"
        )
    if files[1] > files[0] + MOST_FILES:
        problems.append(f"{name}: open files grow from {files[0]} to {files[1]}")
    return problems


def _slope(x_N: np.ndarray, y_N: np.ndarray) -> tuple[float, float]:
    """The slope of a line fitted by least squares, and half of its 95 % interval."""
    (slope, _), left = np.polyfit(x_N, y_N, 1), len(x_N) - 2
    residual_N = y_N - np.polyval(np.polyfit(x_N, y_N, 1), x_N)
    error = np.sqrt((residual_N**2).sum() / left / ((x_N - x_N.mean()) ** 2).sum())
    return float(slope), float(student_t.ppf(0.975, left) * error)


class Process(NamedTuple):
    """A running process; ``started`` in clock ticks since boot."""

    started: int
    pid: int
    parent: int


def _processes() -> list[Process]:
    """All processes but zombies, in order of their start."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *values = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It has just ended.
        if state != "Z":
            found.append(Process(int(values[17]), int(path.parent.name), int(parent)))
    return sorted(found)


def _descendants(root: int, running: list[Process]) -> list[Process]:
    """The processes that ``root`` has started, and theirs."""
    children = [one for one in running if one.parent == root]
    return children + [found for child in children for found in _descendants(child.pid, running)]


def unmapped_segments() -> set[str]:
    """The shared memory that no process maps any more: what other programs work with meanwhile is not ours."""
    found = {str(file) for file in Path("/dev/shm").iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found -= {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:
            continue  # It has just ended.
    return {file for file in found if os.path.exists(file)}


def _sample(name: str, pid: int, num_finished: int, samples: dict[str, list[Sample]]) -> None:
    process = Path("/proc") / str(pid)
    try:
        resident = int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
        samples[name].append(Sample(num_finished, resident, len(os.listdir(process / "fd"))))
    except OSError:
        return  # It has just ended.


if __name__ == "__main__":
    sys.exit(main())
