"""What grows with the ranks of a node: start, memory of a rank and of the launcher, size of results, lines of the log.

    python benchmarks/ranks.py [--ranks 2 4 8 16 32] [--out DIR]

Rehearsals of one tiny layer on CPU ranks that share the cores (``run --share-gpu --staged``): nothing here is a time of
a layer. Seconds are CPU seconds of all processes, so that a busy machine says the same.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

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


def rehearse(folder: Path, num_ranks: int) -> dict[str, float]:
    """Numbers of one job: see ``main``."""
    config, out = folder / "ranks.yaml", folder / f"{num_ranks}"
    config.write_text(yaml.safe_dump(CONFIG))
    command = [sys.executable, "-m", "moe_ep_bench", "run", str(config), *HOW]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    job = subprocess.run([*command, "--nproc", str(num_ranks), "--out", str(out)], capture_output=True, text=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if job.returncode != 0:
        raise SystemExit(f"{num_ranks} ranks: status {job.returncode}\n{job.stderr[-3000:]}")
    rows = cases(load(out))
    assert (rows["status"] == "ok").all()
    seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {
        "CPU s": seconds,
        "CPU s a rank": seconds / num_ranks,
        "GiB a rank": rows["peak_memory_gib"].max(),
        "results KiB": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**10,
        "lines of log": len(job.stderr.splitlines()),
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
