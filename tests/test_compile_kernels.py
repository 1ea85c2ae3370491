"""Claims about our Triton kernels that need a compiler and no GPU: for an H100, with the ptxas that Triton brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Stores and loads of one thread: two registers that are put aside cost nothing beside a tile's loads.
MOST_SPILLED_BYTES = 16
# Of one program, "Compute Capability 9.0" in the CUDA C++ Programming Guide: 227 KiB.
MOST_SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, Any]:
    """In a process of its own, for this one is the interpreter's."""
    folder, script = tmp_path_factory.mktemp("compiled"), Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(script.parents[1])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, script, folder / "report.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-100:]}{done.stderr[-3000:]}"
    return json.loads((folder / "report.json").read_text())


def test_every_kernel_compiles_for_an_h100_within_the_registers_and_shared_memory_that_there_are(report):
    assert all(report.values()), "cases that launch nothing"
    most = {"spilled_bytes": MOST_SPILLED_BYTES, "shared_bytes": MOST_SHARED_BYTES}
    for case, kernels in report.items():
        assert [one for one in kernels if any(one[name] > most[name] for name in most)] == [], case


def test_a_launch_that_overlaps_the_one_before_it_waits_for_its_results(report):
    kernels = [one for kernels in report.values() for one in kernels if one["constants"].get("OVERLAPS") is True]
    waits = {one["kernel"].rpartition(".")[2]: one["waits"] for one in kernels}
    assert waits == {"_gate_up_kernel": 0, "_down_kernel": 1, "_combine_kernel": 1}
    assert {one["copies_before_it_waits"] for one in kernels} == {0}
