"""Claims about our Triton kernels that need a compiler and no GPU: for an H100, with the ptxas that Triton brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from twin_laws import report_of

# Stores and loads of one thread: two registers that are put aside cost nothing beside a tile's loads.
MOST_SPILLED_BYTES = 16
# Of one program, "Compute Capability 9.0" in the CUDA C++ Programming Guide: 227 KiB.
MOST_SHARED_BYTES = 227 * 1024

# Triton's interpreter runs both.
DEMONSTRATIONS = """
import torch
import triton
import triton.language as tl


@triton.jit
def doubled(values_ptr, out_ptr):
    tl.store(out_ptr, 2 * tl.load(values_ptr))


@triton.jit
def sum_of_halves(count):
    total = 0
    for _ in range(count):
        total += 0.5
    return total


@triton.jit
def changes_its_type(out_ptr, count):
    tl.store(out_ptr, sum_of_halves(count))


@triton.jit
def keeps_too_much(values_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    values = tl.load(values_ptr + at)
    tl.store(out_ptr + at, values / tl.sum(values * values))


def launch(kernel, **constants):
    values = torch.ones(8192)
    second = 7 if kernel is changes_its_type else torch.empty(8192)
    kernel[(1,)](values, second, num_warps=1, **constants)


def launch_all():
    launch(changes_its_type)
    launch(doubled)


def cases():
    return {
        "one of two": launch_all,
        "spills": lambda: launch(keeps_too_much, SIZE=8192),
    }
"""


def compiled(folder: Path, *arguments: Path) -> dict[str, Any]:
    """Run compile_kernels.py; return its report."""
    return report_of("compile_kernels.py", folder, *arguments)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demonstrations")
    (folder / "demonstrations.py").write_text(DEMONSTRATIONS)
    return compiled(folder, folder / "demonstrations.py")


def test_every_kernel_compiles_for_an_h100_as_its_launch_code_calls_it(ours):
    assert ours["failures"] == []
    assert {kernel["case"] for kernel in ours["kernels"]} == set(ours["cases"])


def test_no_kernel_needs_more_registers_than_a_thread_has(ours):
    names = ("case", "kernel", "constants", "registers", "spilled_bytes")
    spilling = [kernel for kernel in ours["kernels"] if kernel["spilled_bytes"] > MOST_SPILLED_BYTES]
    assert [{name: kernel[name] for name in names} for kernel in spilling] == []


def test_no_kernel_needs_more_shared_memory_than_there_is(ours):
    assert [kernel for kernel in ours["kernels"] if kernel["shared_bytes"] > MOST_SHARED_BYTES] == []


def test_a_kernel_is_compiled_with_the_types_and_constants_of_its_launch(ours):
    kernels = {kernel["case"]: kernel for kernel in ours["kernels"]}
    wide, odd = kernels["weighted_swiglu, bfloat16"], kernels["weighted_swiglu, odd size"]
    assert wide["kernel"] == "moe_ep_bench.kernels.swiglu_triton._kernel"
    types = {"gate_up_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16", "ffn_size": "i32"}
    assert wide["arguments"] == odd["arguments"] == types
    assert (wide["constants"], odd["constants"]) == ({"COLUMNS": 1024}, {"COLUMNS": 32})


def test_a_kernel_that_does_not_compile_is_reported_by_name_and_those_after_it_still_compile(demonstrations):
    [failure] = [failure for failure in demonstrations["failures"] if failure["case"] == "one of two"]
    assert failure["kernel"] == "demonstrations.changes_its_type"
    assert "def sum_of_halves(count)" in failure["error"]
    assert "initial type int32 but is re-assigned to fp32" in failure["error"]
    compiled_too = [kernel["kernel"] for kernel in demonstrations["kernels"] if kernel["case"] == "one of two"]
    assert compiled_too == ["demonstrations.doubled"]


def test_spills_are_reported(demonstrations):
    [kernel] = [kernel for kernel in demonstrations["kernels"] if kernel["case"] == "spills"]
    assert kernel["spilled_bytes"] > MOST_SPILLED_BYTES
