"""What is added stands in the places that are promised, and in no other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
import torch
import yaml
from torch import Tensor

from moe_ep_bench.analysis.cases import cases, load, routing
from moe_ep_bench.cli import main
from moe_ep_bench.policies import POLICIES, Policy, Routing, RoutingContext
from moe_ep_bench.runtime.exit_codes import OK

CONFIG = {
    "name": "tiny",
    "model": {"preset": "deepseek-v2-lite"},
    "workload": {"kind": "synthetic", "num_batches": 2, "peak_load": 4.0, "sequence_length": 8},
    "layer": {"ep_size": 4},
    "policies": [{"name": "best_only", "scale": 0.5}],
    "sweep": {"workload.num_tokens": [16, 48, 96]},
}


@dataclass(frozen=True, kw_only=True)
class BestOnly(Policy):
    """Every token goes to its best expert alone."""

    name: ClassVar[str] = "best_only"

    scale: float

    def route(self, scores_TE: Tensor, context: RoutingContext, stats: Tensor | None = None) -> Routing:
        map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, scores_TE.argmax(dim=1, keepdim=True), True)
        return Routing(map_TE=map_TE, weights_TE=self.scale * scores_TE * map_TE)


def test_a_policy_is_added_in_its_module_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "best_only", BestOnly)
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(CONFIG))
    assert main(["route", str(config), "--out", str(out)]) == OK

    store = load(out)
    added = cases(store).query("policy == 'best_only'")
    assert added["policy_params"].tolist() == 3 * ['{"scale": 0.5}']
    loads = routing(store).query("policy == 'best_only'").groupby("comparison_id")["load_E"].sum()
    assert sorted(int(load_E.sum()) for load_E in loads) == [2 * 16, 2 * 48, 2 * 96]


TREE = Path(__file__).parents[1]


def insert(path: Path, before: str, row: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, f"{row}\n{before}"))


def test_a_phase_is_added_by_one_row_and_its_hook_and_a_model_by_one_yaml(tmp_path: Path) -> None:
    """The router's own glue, which no other phase covers, as a phase and a group of its own; a preset of a new name."""
    shutil.copytree(TREE / "moe_ep_bench", tmp_path / "moe_ep_bench", ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / "moe_ep_bench"
    gate = 'Phase("gate", '
    insert(package / "schema.py", f"        {gate}", '        Phase("glue", "router"),')
    gating = '    Stage("router", "gating", '
    insert(package / "layer/stages.py", gating, '    Stage("router", "forward", "glue"),')
    models = package / "data" / "models"
    preset = yaml.safe_load((models / "olmoe-1b-7b.yaml").read_text())
    (models / "own-moe.yaml").write_text(yaml.safe_dump({**preset, "name": "Own MoE", "num_experts": 12, "top_k": 3}))
    config = {
        "name": "tiny",
        "model": {"preset": "own-moe", "scale": 0.03125},
        "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 1, "peak_load": 2.0},
        "layer": {"dtype": "float32"},
        "policies": [{"name": "topk"}],
        "measure": {"iterations": 1, "breakdown_iterations": 1, "warmup": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    for command in (
        ["run", "--nproc", "1", "config.yaml", "--out", "out"],
        ["plot", "out", "--figures", "phases", "--format", "svg"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "moe_ep_bench", *command],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    samples = pd.concat(map(pd.read_parquet, (tmp_path / "out" / "cases").glob("*.parquet")))
    broken = samples[samples.kind == "breakdown"]
    assert (broken[broken.phase == "glue"].groupby("case_id").time_us.sum() > 0).all()
    assert set(broken[broken.phase == "glue"].case_id) == set(broken.case_id)
    routed = pd.concat(map(pd.read_parquet, (tmp_path / "out" / "routing").glob("*.parquet")))
    assert set(routed.model) == {"Own MoE x 0.03125"} or set(routed.model) == {"Own MoE"}
    assert {(len(load_E), sum(load_E)) for load_E in routed[routed.policy == "native"].load_E} == {(12, 3 * 64)}
    figure = pd.read_csv(tmp_path / "out" / "figures" / "phases.csv")
    assert (figure[figure.phases == "router"].time_ms > 0).all()
    assert set(figure[figure.phases == "router"].label) >= {"native", "topk"}
