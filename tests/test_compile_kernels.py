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

# What one thread carries out, in lines of PTX: as compiled by Triton 3.7.1, and a quarter more. ``loops`` says whether
# that is all of it. Capacities at T = 524,288 live from it: ``_offer`` shuffles twice a candidate, ``_write`` never.
MOST = {
    ("token_drop, prefill", "_offer"): {"instructions": 590, "loads": 10, "shuffles": 2, "loops": 1},
    ("expanded_drop, prefill", "_offer"): {"instructions": 1270, "shuffles": 2, "loops": 1},
    ("token_drop, prefill", "_write"): {"instructions": 360, "loads": 20, "shuffles": 0, "exchanges": 0, "loops": 0},
    ("expanded_drop, prefill", "_write"): {"instructions": 360, "loads": 20, "shuffles": 0, "exchanges": 0, "loops": 0},
    ("token_drop, decode", "_drop"): {"instructions": 1060, "shuffles": 8, "barriers": 6, "loops": 0},
    ("expanded_drop, decode", "_drop"): {"instructions": 1600, "shuffles": 8, "barriers": 6, "loops": 1},
    ("decode experts, qwen3", "_gate_up_kernel"): {"instructions": 960, "loads": 18},
    ("decode experts, qwen3", "_down_kernel"): {"instructions": 800, "loads": 17},
}

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


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("compiled")
    (folder / "demonstrations.py").write_text(DEMONSTRATIONS)
    return report_of("compile_kernels.py", folder, folder / "demonstrations.py")


def part_of(report: dict[str, Any], is_ours: bool) -> dict[str, Any]:
    """What the report says of our kernels, or of the demonstrations."""
    return {
        key: [one for one in report[key] if (one["case"] not in ("one of two", "spills")) == is_ours]
        for key in ("kernels", "failures")
    }


@pytest.fixture(scope="module")
def ours(report):
    return part_of(report, is_ours=True)


@pytest.fixture(scope="module")
def demonstrations(report):
    return part_of(report, is_ours=False)


def test_every_kernel_compiles_for_an_h100_as_its_launch_code_calls_it(report, ours):
    assert ours["failures"] == []
    assert {kernel["case"] for kernel in report["kernels"]} == set(report["cases"])


def test_no_kernel_needs_more_registers_or_shared_memory_than_there_is(ours):
    names = ("case", "kernel", "constants", "registers", "spilled_bytes", "shared_bytes")
    most = {"spilled_bytes": MOST_SPILLED_BYTES, "shared_bytes": MOST_SHARED_BYTES}
    too_large = [kernel for kernel in ours["kernels"] if any(kernel[name] > most[name] for name in most)]
    assert [{name: kernel[name] for name in names} for kernel in too_large] == []


@pytest.mark.parametrize(("case", "kernel"), MOST)
def test_a_kernel_is_no_longer_than_it_was(ours, case, kernel):
    [code] = [one["code"] for one in ours["kernels"] if one["case"] == case and one["kernel"].endswith(f".{kernel}")]
    most = MOST[case, kernel]
    assert {name: code[name] for name in most if code[name] > most[name]} == {}


def test_a_launch_that_overlaps_the_one_before_it_waits_for_its_results(ours):
    kernels = [one for one in ours["kernels"] if one["constants"].get("OVERLAPS") in (True, "True")]
    waits = {one["kernel"].rpartition(".")[2]: one["code"]["waits"] for one in kernels}
    assert waits == {"_gate_up_kernel": 0, "_down_kernel": 1, "_combine_kernel": 1}


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
