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
    assert done.returncode == 0, f"{done.stdout[-500:]}{done.stderr[-3000:]}"
    return json.loads((folder / "report.json").read_text())


def test_every_kernel_compiles_for_an_h100_as_its_launch_code_calls_it(report):
    (failure,) = report["failures"]  # which is meant to fail
    assert (failure["case"], failure["kernel"]) == ("fails", "__main__.changes_its_type")
    assert "initial type int32 but is re-assigned to fp32" in failure["error"]
    assert {kernel["case"] for kernel in report["kernels"]} == set(report["cases"]) - {"fails"}


def test_no_kernel_needs_more_registers_or_shared_memory_than_there_is(report):
    names = ("case", "kernel", "constants", "registers", "spilled_bytes", "shared_bytes")
    most = {"spilled_bytes": MOST_SPILLED_BYTES, "shared_bytes": MOST_SHARED_BYTES}
    too_large = [kernel for kernel in report["kernels"] if any(kernel[name] > most[name] for name in most)]
    assert [{name: kernel[name] for name in names} for kernel in too_large] == []


def test_a_launch_that_overlaps_the_one_before_it_waits_for_its_results(report):
    kernels = [one for one in report["kernels"] if one["constants"].get("OVERLAPS") in (True, "True")]
    waits = {one["kernel"].rpartition(".")[2]: one["waits"] for one in kernels}
    assert waits == {"_gate_up_kernel": 0, "_down_kernel": 1, "_combine_kernel": 1}


def test_a_kernel_is_compiled_with_the_types_and_constants_of_its_launch(report):
    kernels = {kernel["case"]: kernel for kernel in report["kernels"]}
    wide, odd = kernels["weighted_swiglu, bfloat16"], kernels["weighted_swiglu, odd size"]
    assert wide["kernel"] == "moe_ep_bench.kernels.swiglu_triton._kernel"
    types = {"gate_up_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16", "ffn_size": "i32"}
    assert wide["arguments"] == odd["arguments"] == types
    assert (wide["constants"], odd["constants"]) == ({"COLUMNS": 1024}, {"COLUMNS": 32})
