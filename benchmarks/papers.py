"""Set every config of configs/papers beside its paper and gather the rows: results/reference/papers-modelled.csv.

    python benchmarks/papers.py --out results/papers      # 40 minutes on one core; goes on where it was stopped

Where experts are those of a measured table, the config is modelled by the roofline too (``ours_by_roofline``). Whole
models on an H20 have one batch here, and Table 10 two of its prompts' lengths; the configs ask for more.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

from moe_ep_bench.cli import main
from moe_ep_bench.files import parse_yaml

CONFIGS = Path(__file__).parents[1] / "configs" / "papers"
ONE_BATCH = ["workload.num_batches=1"]
OVERRIDES = {
    **dict.fromkeys(("whole-capacity", "whole-capacity-mixtral", "whole-capacity-qwen"), ONE_BATCH),
    "whole-capacity-qwen3": ONE_BATCH,
    "whole-capacity-table10": [*ONE_BATCH, "sweep.workload.sequence_length=[100, 1000]"],
}
ROOFLINE, NO_4_BITS = "emulate.device=h100-sxm", "layer.dtype=bfloat16"
# Words for people: a config has the device and the reasons, its results directory the rest.
WORDS = ["mode", "device", "links"]


def claims(config: Path, out: Path, overrides: list[str]) -> pd.DataFrame:
    """The rows of ``claims.csv``, without words."""
    status = main(["papers", str(config), "--out", str(out), *(part for one in overrides for part in ("--set", one))])
    assert status == 0, f"{config}: ended with status {status}"
    return pd.read_csv(out / "claims.csv").drop(columns=WORDS)


def rows_of(config: Path, out: Path) -> pd.DataFrame:
    name, settings = config.stem, parse_yaml(config.read_text())
    overrides, device = OVERRIDES.get(name, []), settings["emulate"]["device"]
    rows = claims(config, out / name, overrides)
    if device.startswith("table:"):
        dtype = [NO_4_BITS] if settings["layer"]["dtype"] != "bfloat16" else []
        rows["ours_by_roofline"] = claims(config, out / f"{name}-roofline", [*overrides, ROOFLINE, *dtype])["ours"]
    commit = json.loads((out / name / "run.json").read_text())["environment"]["git_commit"][:8]
    return rows.assign(config=name, device=device, commit=commit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    frame = pd.concat([rows_of(config, out) for config in sorted(CONFIGS.rglob("*.yaml"))])
    frame.to_csv(out / "papers-modelled.csv", index=False, float_format="%.6g")
