"""Does a long sweep leave anything behind? Hundreds of small cases on two CPU ranks, watched from outside.

    python benchmarks/soak.py [--cases 500] [--out DIR]

A sweep over seeds makes comparisons of ten cases each, which torchrun measures on two ranks. Meanwhile the resident
memory and the open files of its processes are read, and set against the cases that are finished. Within a comparison
memory rises and falls again when freed buffers are handed back; what would leak is what stays, so the least of each
comparison counts. The first fifth is left out, while libraries load and allocators reach their size; a line through
the rest says what all cases would add to a process. Afterwards there must be no process or temporary file that was not
there before. Exit status 1 where one of that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import yaml

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
MOST_GROWTH_MIB, MOST_FILES = 64, 4
_LEFT_OUT = 0.2


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
    command = [sys.executable, "-m", "moe_ep_bench", "run", "--nproc", "2", str(path), "--out", str(out)]
    samples: list[tuple[str, int, float, int]] = []
    started: set[psutil.Process] = set()
    with open(folder / "errors", "w") as errors:
        job = psutil.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}, stderr=errors)
    while job.poll() is None:
        finished = CASES_PER_COMPARISON * len(list((out / "cases").glob("*.parquet")))
        with contextlib.suppress(psutil.Error):  # it has just ended
            started.update(job.children(recursive=True))
            for number, process in enumerate([job, *sorted(job.children(), key=lambda child: child.pid)]):
                name = f"rank {number - 1}" if number else "torchrun"
                samples.append((name, finished, process.memory_info().rss / 2**20, process.num_fds()))
        time.sleep(0.1)
    if job.returncode:
        return [f"exit status {job.returncode}: {(folder / 'errors').read_text()[-500:]}"]
    rows = cases(load(out, join_draws=False))
    measured = int(rows["status"].eq("ok").sum())
    print(f"soak: {measured} of {len(rows)} cases measured on 2 CPU ranks")
    problems = [] if measured == len(rows) >= num_cases else [f"only {measured} cases were measured"]
    for name, of_process in pd.DataFrame(samples, columns=["name", "finished", "mib", "files"]).groupby("name"):
        problems += judge(str(name), of_process, len(rows))
    left = [f"process {process.pid}" for process in started if process.is_running()]
    # torch's cache of compiled code is one folder per user, which it means to keep.
    left += [str(file) for file in temporary.iterdir() if not file.name.startswith("torchinductor_")]
    left += [str(file) for file in out.rglob("*") if file.name.startswith((".", "now-"))]
    print(f"soak: left behind: {', '.join(left) or 'no process or temporary file'}")
    return problems + [f"left behind: {what}" for what in left]


def judge(name: str, samples: pd.DataFrame, num_cases: int) -> list[str]:
    """Print the line of one process; what is wrong with it."""
    # With the last case the processes begin to end.
    kept = samples[(samples["finished"] >= _LEFT_OUT * num_cases) & (samples["finished"] < num_cases)]
    floors = kept.groupby(kept["finished"] // CASES_PER_COMPARISON)["mib"].min()
    if len(floors) < 3:
        return [f"{name}: too few samples for a line"]
    growth = np.polyfit(floors.index * CASES_PER_COMPARISON, floors, 1)[0] * num_cases
    first, last = int(kept["files"].iloc[0]), int(kept["files"].tail(5).max())
    most = f"{kept['mib'].max():.0f} MiB at most, {growth:+.1f} MiB over {num_cases} cases"
    print(f"soak: {name}: {most}; {first} to {last} open files")
    wrong = {
        f"memory grows by {growth:.0f} MiB, allowed are {MOST_GROWTH_MIB}": growth > MOST_GROWTH_MIB,
        f"open files grow from {first} to {last}": last > first + MOST_FILES,
    }
    return [f"{name}: {what}" for what, found in wrong.items() if found]


if __name__ == "__main__":
    sys.exit(main())
