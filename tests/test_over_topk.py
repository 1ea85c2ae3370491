"""Policies are held against ``topk``, which runs the same code, as well as against ``native``."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_builder import FakeCase, FakeComparison, write_run

from moe_ep_bench.analysis.frames import speedups
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.tables import run_text

COLUMNS = ["over_topk_median", "over_topk_low", "over_topk_high"]


def test_speedups_over_topk_are_paired_with_it_and_stand_beside_those_over_native(tmp_path: Path) -> None:
    cases = [
        FakeCase("native", role="baseline"),
        FakeCase("topk", speedup=0.8),
        FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=1.2),
    ]
    run = load_run(write_run(tmp_path, [FakeComparison(cases=cases, noise=0.0)]))
    frame = speedups(run).set_index("policy")
    assert frame.loc["token_drop", COLUMNS].tolist() == pytest.approx([1.5] * 3)
    assert frame.loc["token_drop", "speedup_median"] == pytest.approx(1.2)
    assert frame.loc["native", COLUMNS].tolist() == pytest.approx([0.8**-1] * 3)
    assert frame.loc["topk", COLUMNS].isna().all(), "nothing is held against itself"
    rows = [line.split("  ") for line in run_text(run).splitlines() if line.startswith("token_drop")]
    assert [one for one in rows[0] if "[" in one] == ["1.200 [1.200, 1.200]", "1.500 [1.500, 1.500]"]
