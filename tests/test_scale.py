"""Emulating many ranks: time grows with the tokens, memory with one rank's alone."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

NUM_EXPERTS, TOKENS_PER_RANK = 1024, 256
# OLMoE's shape with more experts.
MODEL = {
    **{"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "norm_topk_prob": False},
    **{"num_experts": NUM_EXPERTS, "num_experts_per_tok": 8},
}
COMMAND = [sys.executable, "-W", "ignore", "-m", "moe_ep_bench", "emulate"]
CONFIG = {
    "name": "scale",
    "model": {"hf_config": "model.json"},
    "workload": {"kind": "synthetic", "peak_load": 4, "tokens_per_rank": TOKENS_PER_RANK, "num_batches": 1},
    "policies": [{"name": "token_drop", "capacity_factor": 1.5}, {"name": "lynx", "num_dropped": 64}],
    "emulate": {"links": "h100-nvlink4-ndr", "device": "h100-sxm"},
}


def emulated(folder: Path, ranks: int) -> tuple[float, int]:
    """CPU seconds on one thread, and the peak bytes of the largest so far, of emulating so many ranks."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    config = folder / f"{ranks}.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "layer": {"ep_size": ranks}}))
    command = [*COMMAND, str(config), "--out", f"{folder}/{ranks}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime - before.ru_utime, used.ru_maxrss * 1024


@pytest.mark.scale
def test_emulated_ranks_take_time_by_the_token_and_memory_by_the_rank(tmp_path: Path) -> None:
    few, some, many = (emulated(tmp_path, ranks) for ranks in (8, 128, 512))
    assert (many[0] - some[0]) / 384 < 2 * (some[0] - few[0]) / 120
    batch_bytes = 4 * 384 * TOKENS_PER_RANK * NUM_EXPERTS  # the added ranks' scores alone
    assert many[1] - some[1] < 1.5 * batch_bytes, "their tokens as they are routed take 4.5 times as much"


@pytest.mark.scale
def test_thirty_two_ranks_start_end_and_leave_a_log_that_can_be_read(tmp_path: Path) -> None:
    """What only many ranks show: their meeting, file locks, parts of all ranks, and one voice for what all say."""
    program = Path(__file__).parents[1] / "benchmarks" / "ranks.py"
    command = [sys.executable, program, "--ranks", "4", "32", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    _, few, many = (line.split() for line in done.stdout.splitlines())
    names = ("start", "seconds", "gib", "launcher", "kib", "lines")
    few, many = ({name: float(value) for name, value in zip(names, row[1:], strict=True)} for row in (few, many))
    assert 0 < few["start"] < few["seconds"]
    assert many["start"] < 2 * few["start"]
    assert many["seconds"] < 2 * few["seconds"]
    assert many["gib"] < 1.5 * few["gib"]
    assert many["launcher"] < 1.5 * few["launcher"]
    assert many["kib"] < 4 * few["kib"]
    assert many["lines"] <= few["lines"] + 3, "one rank speaks for all"
