#!/usr/bin/env python
"""How do time and memory of emulated routing grow with the number of virtual ranks? Ratios of one run, on the CPU.

    python benchmarks/emulate_scale.py [--quick] [--tokens 256] [--out DIR]

Every number of ranks is a process of its own, with the same tokens per rank of a model with 1,024 experts: what
``emulate`` does for one batch beside timing layers (making each rank's tokens, routing them by native and two
policies, metrics, counts, links). Memory is the process's peak less what it held before the batch. Linear time is a
constant number of microseconds per token; memory bounded by one rank's tokens stays as it is while ranks are added,
but for the counts of pairs, [ranks, experts].
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from moe_ep_bench.files import atomic_path, write_json
from moe_ep_bench.machine import provenance

NUM_EXPERTS, TOP_K = 1024, 8
RANKS, QUICK_RANKS = (8, 32, 128, 512, 1024), (2, 8)
# OLMoE's shape with more experts.
MODEL = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": False,
}
CONFIG = """
name: scale
model: {{hf_config: model.json}}
workload: {{kind: synthetic, peak_load: 4, tokens_per_rank: {tokens}, num_batches: 1, sequence_length: 128}}
layer: {{ep_size: {ranks}}}
policies: [{{name: token_drop, capacity_factor: 1.5}}, {{name: lynx, num_dropped: 64}}]
emulate: {{links: h100-nvlink4-ndr, device: h100-sxm}}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few ranks and tokens, to see that it works")
    parser.add_argument("--tokens", type=int, default=256, help="of each rank (%(default)s)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)  # a process of one row
    options = parser.parse_args(arguments)
    if options.config:
        print(json.dumps(_measured(options.config)))
        return 0
    tokens = 512 if options.quick else options.tokens
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.json").write_text(json.dumps(MODEL))
        for ranks in QUICK_RANKS if options.quick else RANKS:
            config = Path(folder) / "config.yaml"
            config.write_text(CONFIG.format(tokens=tokens, ranks=ranks))
            command = [sys.executable, "-W", "ignore", __file__, "--config", str(config)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout.splitlines()[-1])
            batch_mb = ranks * tokens * NUM_EXPERTS * 4 / 2**20
            rows.append({"ranks": ranks, "tokens": ranks * tokens, **row, "whole batch MB": batch_mb})
            print(f"{ranks} ranks done", file=sys.stderr, flush=True)
    table = pd.DataFrame(rows)
    table["us/token"] = table["CPU s"] / table["tokens"] * 1e6
    table["time ratio"] = table["us/token"] / table["us/token"].iloc[0]
    table["memory ratio"] = table["peak MB"] / table["peak MB"].iloc[0]
    print(table.to_string(index=False, float_format="{:.3g}".format))
    if options.out:
        with atomic_path(options.out / "emulate_scale.csv") as path:
            table.to_csv(path, index=False)
        described = {"environment": provenance.describe(torch.device("cpu")), "tokens_per_rank": tokens}
        write_json(options.out / "emulate_scale.json", described)
    return 0


def _measured(config: Path) -> dict[str, float]:
    """CPU seconds of one batch, and the memory that it took."""
    from moe_ep_bench.bench.comparison import VIRTUAL
    from moe_ep_bench.bench.plan import plan
    from moe_ep_bench.bench.virtual import Emulation

    torch.set_num_threads(1)
    (comparison,) = plan(config, [], VIRTUAL, on_cpu=True)  # Makes rank 0's tokens and compiles what is compiled.
    emulation = Emulation(comparison, comparison.cases, torch.device("cpu"), lambda case_id: None)
    before = _resident_bytes()
    _forget_peak()
    start = time.process_time()
    with torch.inference_mode():
        emulation.model()
    seconds = time.process_time() - start
    peak = provenance.peak_memory_bytes(torch.device("cpu")) or 0
    return {"CPU s": seconds, "peak MB": (peak - before) / 2**20}


def _resident_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024


def _forget_peak() -> None:
    """Linux: the next peak is of what comes."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    sys.exit(main())
