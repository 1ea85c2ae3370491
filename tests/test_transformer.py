"""Whole models on Megatron-Core: laws of ``transformer_laws`` on two gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformer_graph_laws  # noqa: F401, adds its laws to the others
from transformer_laws import LAWS

pytestmark = pytest.mark.seam


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """{law: error or null} of one job."""
    report = tmp_path_factory.mktemp("laws") / "report.json"
    script = Path(__file__).with_name("run_transformer_laws.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, report]
    job = subprocess.run(command, capture_output=True, text=True, timeout=900)
    found = json.loads(report.read_text()) if report.exists() else {}
    return {**found, "output": job.stdout[-2000:] + job.stderr[-4000:]}


@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, results: dict[str, str | None]) -> None:
    assert law in results, f"the law did not finish:\n{results['output']}"
    assert results[law] is None, results[law]
