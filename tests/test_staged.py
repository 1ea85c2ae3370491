"""Laws of the staged group, on two and three ranks: equal to gloo to the bit, whatever the splits and dtypes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import staged_laws


@cache
def held(num_ranks: int) -> tuple[Counter[str], str]:
    """On how many ranks each law held, and what the job printed on standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    program = Path(staged_laws.__file__)
    job = subprocess.run([*command, program], capture_output=True, text=True, timeout=300)
    return Counter(line.removeprefix("held ") for line in job.stdout.splitlines()), job.stderr


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("law", [law.__name__ for law in staged_laws.LAWS])
def test_the_staged_group_does_as_gloo(law: str, num_ranks: int) -> None:
    found, errors = held(num_ranks)
    assert found[law] == num_ranks, errors[-3000:]
