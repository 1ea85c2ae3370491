"""What only many ranks show, emulated and real: counts and bytes, never seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "ranks.py"


def numbers(names: tuple[str, ...], *options: str | Path) -> list[dict[str, float]]:
    """Rows that benchmarks/ranks.py prints."""
    command = [sys.executable, PROGRAM, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    rows = (line.split()[1:] for line in done.stdout.splitlines()[1:])
    return [{name: float(value) for name, value in zip(names, row, strict=True)} for row in rows]


@pytest.mark.scale
def test_an_emulated_rank_costs_as_many_calls_among_many_and_memory_for_its_scores_alone(tmp_path: Path) -> None:
    names = ("seconds", "calls", "scores", "gib")
    _, some, many = numbers(names, "--emulated", "--ranks", "8", "128", "512", "--out", tmp_path)
    assert 0 < many["calls"] < 1.1 * some["calls"], "a rank must not visit the others one by one"
    added = {name: many[name] - some[name] for name in ("scores", "gib")}
    assert 0 < added["gib"] < 1.5 * added["scores"], "their tokens as they are routed take 4.5 times as much"


@pytest.mark.scale
def test_thirty_two_ranks_start_end_and_leave_a_log_that_can_be_read(tmp_path: Path) -> None:
    """What only many ranks show: their meeting, file locks, parts of all ranks, and one voice for what all say."""
    names = ("start", "seconds", "gib", "launcher", "kib", "lines")
    few, many = numbers(names, "--ranks", "4", "32", "--out", tmp_path)
    assert 0 < many["start"] < many["seconds"]
    assert many["gib"] < 1.5 * few["gib"]
    assert many["launcher"] < 1.5 * few["launcher"]
    assert many["kib"] < 4 * few["kib"]
    assert many["lines"] <= few["lines"] + 3, "one rank speaks for all"
