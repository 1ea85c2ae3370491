"""Whole models on Megatron-Core: laws of ``transformer_laws`` on one and two gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformer_graph_laws  # noqa: F401, adds its laws to the others
from transformer_laws import LAWS, NEEDS_RANKS

pytestmark = pytest.mark.seam

RANK_COUNTS = (1, 2)
CASES = [(name, count) for count in RANK_COUNTS for name in LAWS if count in NEEDS_RANKS.get(name, RANK_COUNTS)]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str | None]]:
    """Run all laws once for each number of ranks."""
    found = {}
    for count in RANK_COUNTS:
        report = tmp_path_factory.mktemp("laws") / "report.json"
        script = Path(__file__).with_name("run_transformer_laws.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        job = subprocess.run([*command, script, report], capture_output=True, text=True, timeout=600)
        found[count] = json.loads(report.read_text()) if report.exists() else {}
        found[count]["output"] = job.stdout[-2000:] + job.stderr[-4000:]
    return found


@pytest.mark.parametrize(("name", "num_ranks"), CASES, ids=[f"{name}-{count}" for name, count in CASES])
def test_law(name: str, num_ranks: int, results: dict[int, dict[str, str | None]]) -> None:
    assert name in results[num_ranks], f"the law did not finish:\n{results[num_ranks]['output']}"
    assert results[num_ranks][name] is None, results[num_ranks][name]
