"""What is added stands in the places that are promised, and in no other: a policy is a module and a row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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
