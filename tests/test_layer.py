"""The seam to Megatron-Core: laws of a real expert-parallel layer on 1, 2 and 4 gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import flex_laws  # noqa: F401, adds its laws to the others
import graph_laws  # noqa: F401, adds its laws to the others
import pytest
import slice_laws  # noqa: F401, adds its laws to the others
from layer_laws import LAWS, NEEDS_RANKS

pytestmark = pytest.mark.seam

RANK_COUNTS = (1, 2, 4)
CASES = [(name, count) for count in RANK_COUNTS for name in LAWS if count in NEEDS_RANKS.get(name, RANK_COUNTS)]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str | None]]:
    """Run all laws once for each number of ranks."""
    found = {}
    for count in RANK_COUNTS:
        report = tmp_path_factory.mktemp("laws") / "report.json"
        script = Path(__file__).with_name("run_laws.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        job = subprocess.run([*command, script, report], capture_output=True, text=True, timeout=1800)
        found[count] = json.loads(report.read_text()) if report.exists() else {}
        found[count]["output"] = job.stdout[-2000:] + job.stderr[-4000:]
    return found


@pytest.mark.parametrize(("name", "num_ranks"), CASES, ids=[f"{name}-{count}" for name, count in CASES])
def test_law(name: str, num_ranks: int, results: dict[int, dict[str, str | None]]) -> None:
    assert name in results[num_ranks], f"the law did not finish:\n{results[num_ranks]['output']}"
    assert results[num_ranks][name] is None, results[num_ranks][name]


def test_importing_megatron_core_is_silent() -> None:
    code = "import warnings; warnings.simplefilter('error'); import moe_ep_bench.layer.megatron"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "not installed" not in done.stdout + done.stderr
