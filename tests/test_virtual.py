"""Virtual ranks on one process give what real ranks give: the dense reference, for every policy and part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.seam

SCRIPT = Path(__file__).with_name("virtual_laws.py")


@pytest.fixture(scope="module")
def output() -> str:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    return done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize(
    "law",
    [
        "every_policy_equals_the_dense_reference",
        "every_part_equals_the_dense_reference",
        "experts_in_slots_equal_the_dense_reference",
        "chunks_and_slots_compute_what_was_worked_out",
        "a_rank_without_tokens_takes_part",
        "timed_runs_see_the_rows_that_real_ranks_would",
        "counts_other_than_announced_are_noticed",
    ],
)
def test_law(law: str, output: str) -> None:
    assert f"{law}: ok" in output, output
