"""What grows with the ranks of a node: start, memory of a rank and of the launcher, size of results, lines of the log.

    python benchmarks/ranks.py [--ranks 2 4 8 16 32] [--out DIR]

Rehearsals of one tiny layer on CPU ranks that share the cores (``run --share-gpu --staged``): nothing here is a time of
a layer. Seconds are CPU seconds of all processes by rank, so that a busy machine says the same; those of the start end
where all ranks have met.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from moe_ep_bench.analysis.cases import cases, load

CONFIG = {
    "name": "ranks",
    "model": {"preset": "deepseek-v2-lite", "scale": 0.03125},
    "workload": {"kind": "synthetic", "tokens_per_rank": 32, "num_batches": 1, "peak_load": 3, "sequence_length": 16},
    "layer": {"dtype": "float32"},
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}],
    "measure": {"iterations": 1, "breakdown_iterations": 1, "warmup": 1},
}
HOW = ("--cpu", "--share-gpu", "--staged")


def cpu_seconds() -> float:
    """Of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rehearse(folder: Path, num_ranks: int) -> dict[str, float]:
    """Numbers of one job: see ``main``."""
    config, out, log = folder / "ranks.yaml", folder / f"{num_ranks}", folder / f"{num_ranks}.log"
    config.write_text(yaml.safe_dump(CONFIG))
    command = [sys.executable, "-m", "moe_ep_bench", "run", str(config), *HOW]
    before, start, launcher_bytes = cpu_seconds(), 0.0, 0
    with log.open("w") as errors:
        job = subprocess.Popen([*command, "--nproc", str(num_ranks), "--out", str(out)], stdout=errors, stderr=errors)
    while job.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(job.pid)
            launcher_bytes = max(launcher_bytes, launcher.memory_info().rss)
            if not start and len(list(out.glob("attempts/now-*"))) == num_ranks:  # Ranks have met and agreed.
                times = [one.cpu_times() for one in (launcher, *launcher.children(recursive=True))]
                start = sum(used.user + used.system for used in times)
        time.sleep(0.2)
    if job.returncode != 0:
        raise SystemExit(f"{num_ranks} ranks: status {job.returncode}\n{log.read_text()[-3000:]}")
    rows = cases(load(out))
    assert (rows["status"] == "ok").all()
    return {
        "start, CPU s": start / num_ranks,
        "all, CPU s": (cpu_seconds() - before) / num_ranks,
        "GiB a rank": rows["peak_memory_gib"].max(),
        "GiB launcher": launcher_bytes / 2**30,
        "results KiB": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**10,
        "lines of log": log.read_text().count("\n"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for place, num_ranks in enumerate(options.ranks):
            numbers = rehearse(folder, num_ranks)
            if not place:
                print("ranks", *(f"{name:>14}" for name in numbers))
            print(f"{num_ranks:5}", *(f"{value:14.4g}" for value in numbers.values()), flush=True)


if __name__ == "__main__":
    main()
