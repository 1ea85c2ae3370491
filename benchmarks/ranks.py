"""What grows with the ranks of a node: start, memory of a rank and of the launcher, size of results, lines of the log.

    python benchmarks/ranks.py [--ranks 2 4 8 16 32] [--out DIR]
    python benchmarks/ranks.py --emulated [--ranks 8 128 512] [--out DIR]

Rehearsals of one tiny layer on CPU ranks that share the cores (``run --share-gpu --staged``): nothing here is a time of
a layer. Seconds are CPU seconds of all processes by rank, so that a busy machine says the same; those of the start end
where all ranks have met.

With ``--emulated``, what grows with the ranks that ``emulate`` routes: CPU seconds of one thread by rank, calls of
Python functions in the threads of all ranks, memory of all tokens' scores, and peak memory. The first row also
compiles what is not yet compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
EMULATED_EXPERTS, EMULATED_TOKENS = 1024, 256
# OLMoE's shape with more experts.
EMULATED_MODEL = {
    **{"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "norm_topk_prob": False},
    **{"num_experts": EMULATED_EXPERTS, "num_experts_per_tok": 8},
}
EMULATED_CONFIG = {
    "name": "emulated",
    "model": {"hf_config": "model.json"},
    "workload": {"kind": "synthetic", "peak_load": 4, "tokens_per_rank": EMULATED_TOKENS, "num_batches": 1},
    "policies": [{"name": "token_drop", "capacity_factor": 1.5}, {"name": "lynx", "num_dropped": 64}],
    "emulate": {"links": "h100-nvlink4-ndr", "device": "h100-sxm"},
}
# Runs the command of its arguments, then writes how many functions the threads of its ranks called.
COUNTED = """
import sys, threading
from pathlib import Path
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
threading.setprofile(count)
from moe_ep_bench.cli import main
status = main(sys.argv[2:])
Path(sys.argv[1]).write_text(str(calls))
sys.exit(status)
"""


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


def emulate(folder: Path, num_ranks: int) -> dict[str, float]:
    """Numbers of one emulation: see ``main``. Memory is that of the largest so far."""
    (folder / "model.json").write_text(json.dumps(EMULATED_MODEL))
    config, counted = folder / f"{num_ranks}.yaml", folder / f"{num_ranks}.calls"
    config.write_text(yaml.safe_dump({**EMULATED_CONFIG, "layer": {"ep_size": num_ranks}}))
    out = folder / f"{num_ranks}"
    command = [sys.executable, "-W", "ignore", "-c", COUNTED, counted, "emulate", config, "--out", out]
    before = cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise SystemExit(f"{num_ranks} emulated ranks: status {done.returncode}\n{done.stderr[-3000:]}")
    return {
        "CPU s a rank": (cpu_seconds() - before) / num_ranks,
        "calls a rank": int(counted.read_text()) / num_ranks,
        "scores GiB": 4 * num_ranks * EMULATED_TOKENS * EMULATED_EXPERTS / 2**30,
        "peak GiB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--emulated", action="store_true", help="emulate the ranks on one process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        all_ranks = options.ranks or ([8, 128, 512] if options.emulated else [2, 4, 8, 16, 32])
        for place, num_ranks in enumerate(all_ranks):
            numbers = (emulate if options.emulated else rehearse)(folder, num_ranks)
            if not place:
                print("ranks", *(f"{name:>14}" for name in numbers))
            print(f"{num_ranks:5}", *(f"{value:14.4g}" for value in numbers.values()), flush=True)


if __name__ == "__main__":
    main()
