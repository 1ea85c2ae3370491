"""Commands that build no layer run where Megatron-Core cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml
from trace_files import write_trace

CONFIG = {
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 32, "num_batches": 1, "peak_load": 3.0},
    "layer": {"ep_size": 2, "dtype": "float32"},
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}],
    "measure": {"iterations": 1, "breakdown_iterations": 1, "warmup": 1},
    "emulate": {"device": "h100-sxm", "links": "h100-nvlink4"},
}
COMMANDS = [
    ["route", "tiny.yaml", "--out", "routed"],
    ["emulate", "tiny.yaml", "--out", "emulated"],
    ["trace", "info", "trace.safetensors"],
    ["papers", "--paper", "oea"],
    ["show", "emulated"],
    ["plot", "emulated", "--format", "svg", "--figures", "speedup"],
    ["compare", "emulated", "emulated"],
    ["advise", "tiny.yaml", "--dry-run"],  # What it goes on with is what ``emulate`` does.
    ["advise", "emulated"],
    ["check-policy", "topk"],
]
SCRIPT = """
import json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
from moe_ep_bench import cli
from moe_ep_bench.analysis import style
style.DEFAULT_FORMATS = ("svg",)
statuses = [cli.main(command) for command in json.loads(sys.argv[1])]
print(json.dumps(statuses))
sys.exit("megatron" in sys.modules)
"""


def test_commands_that_build_no_layer_need_no_megatron(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    write_trace(tmp_path / "trace.safetensors", length_S=[20, 10], num_layers=1, num_experts=16, top_k=4)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)],
        cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * len(COMMANDS)
