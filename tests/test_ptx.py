"""Claims about the compiled code of our Triton kernels, its PTX, which ``ptx_emulator`` runs without a GPU.

Where Triton's interpreter says that a kernel's Python is right, this says that what the compiler made of it is: for a
handful of batches, on memory full of garbage, with no race between warps and no access outside a tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_emulator import Code, Memory, address_of, run_programs
from run_ptx import CASES
from twin_laws import report_of

KERNELS = Path(__file__).parents[1] / "moe_ep_bench" / "kernels"
ROUTING = ("rows", "sets", "requests", "capacity", "capacity_passes", "laser")
# Each is wrong in one way, but for the second.
DEMONSTRATIONS = """
import re
from unittest import mock

import __main__ as run_ptx
import torch
import triton
import triton.language as tl


@triton.jit
def reverse_in_place(values_ptr, SIZE: tl.constexpr, WAITS: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(values_ptr + at, at)
    if WAITS:
        tl.debug_barrier()
    values = tl.load(values_ptr + SIZE - 1 - at)
    if WAITS:
        tl.debug_barrier()
    tl.store(values_ptr + at, values)


@triton.jit
def double(values_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, 2 * tl.load(values_ptr + at))


@triton.jit
def add_to(values_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(out_ptr + at) + tl.load(values_ptr + at))


@triton.jit
def exponential(values_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.exp(tl.load(values_ptr + at)))


def reverse(waits):
    values = torch.empty(256, dtype=torch.int32)
    reverse_in_place[(1,)](values, SIZE=256, WAITS=waits, num_warps=4)
    return "" if torch.equal(values, torch.arange(255, -1, -1, dtype=torch.int32)) else str(values)


def sum_of_doubles(kernel, size, expected, out_size=64):
    out = torch.empty(out_size)
    kernel[(1,)](torch.ones(64)[:size], out, SIZE=64, num_warps=2)
    return "" if float(out.sum()) == expected else str(out)


def without_barriers():
    code = run_ptx.Code
    with mock.patch.object(run_ptx, "Code", lambda ptx: code(re.sub(r"bar\\.sync\\s+0", "bar.warp.sync -1", ptx))):
        return run_ptx.cases()["topk in groups"]()


def cases():
    return {
        "no barrier": lambda: reverse(False),
        "a barrier": lambda: reverse(True),
        "reads beyond": lambda: sum_of_doubles(double, 60, 128),
        "writes beyond": lambda: sum_of_doubles(double, 64, 120, out_size=60),
        "reads what nobody wrote": lambda: sum_of_doubles(add_to, 64, 64),
        "an unknown instruction": lambda: sum_of_doubles(exponential, 64, 0),
        "our kernel without its barriers": without_barriers,
    }
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, Any]:
    """The cases of the report of run_ptx.py."""
    folder: Path = tmp_path_factory.mktemp("emulated")
    (folder / "demonstrations.py").write_text(DEMONSTRATIONS)
    return report_of("run_ptx.py", folder, folder / "demonstrations.py")


# --- Our kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_compiled_code_routes_like_torch_without_a_race_or_an_access_outside(seen, case):
    one = seen[case]
    assert (one["error"], one["differs"], one["found"]) == ("", "", {})
    assert one["instructions"]


def test_every_routing_kernel_is_in_a_case(seen):
    ran = {kernel for case in CASES for kernel in seen[case]["kernels"]}
    launched = {
        f"{module}_triton.{name}"
        for module in ROUTING
        for name in re.findall(r"^ +(_\w+)\[.+\]\(", (KERNELS / f"{module}_triton.py").read_text(), re.MULTILINE)
    }
    assert len(launched) >= 10
    assert ran == launched


# --- The checks can fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("no barrier", "race in global memory: "),
        ("our kernel without its barriers", "race in shared memory: "),
        ("reads beyond", r"outside of global memory: .*ld\.global"),
        ("writes beyond", r"outside of global memory: .*st\.global"),
    ],
)
def test_what_is_wrong_in_one_way_is_found(seen, case, what):
    assert any(re.search(what, one) for one in seen[case]["found"])


def test_a_barrier_ends_the_race(seen):
    assert (seen["a barrier"]["found"], seen["a barrier"]["differs"]) == ({}, "")


def test_reading_what_nobody_wrote_changes_the_result_and_an_unknown_instruction_is_named(seen):
    assert seen["reads what nobody wrote"]["differs"]
    assert "ex2.approx" in seen["an unknown instruction"]["error"]


# --- The emulator ------------------------------------------------------------------------------------------

_REGISTERS = ".reg .pred %p<9>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n"


def emulate(instructions: str, num_threads: int = 32, num_bytes: int = 1024) -> tuple[np.ndarray, Counter[str]]:
    """Run a few instructions, %rd0 the address of a tensor of zeros, which is returned with what was found."""
    body = f"{_REGISTERS}ld.param.b64 %rd0, [kernel_param_0];\n{instructions}\nret;"
    found: Counter[str] = Counter()
    memory = Memory("global", [np.zeros(0, np.uint8), np.zeros(num_bytes, np.uint8)], found)
    memory.allow(1, 0, num_bytes)
    run_programs(Code(f".reqntid {num_threads}\n{{\n{body}\n}}\n"), 1, [address_of(1, 0)], memory, shared_bytes=1024)
    return memory.piece(1), found


def lanes(instructions: str, dtype: str = "i4") -> list[Any]:
    """What each thread of a warp has in %r1 or %rd1, its own number being in %r0."""
    width = np.dtype(dtype).itemsize
    result = "%r1" if width == 4 else "%rd1"
    store = f"mad.wide.u32 %rd8, %r0, {width}, %rd0;\nst.global.b{8 * width} [%rd8], {result};"
    memory, found = emulate(f"mov.u32 %r0, %tid.x;\n{instructions}\n{store}", num_bytes=32 * width)
    assert not found
    return memory.view(dtype).tolist()


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r1, 2147483647, 1", -(2**31)),
        ("div.s32 %r1, -7, 2", -3),
        ("mul.hi.s32 %r1, -3, 1073741824", -1),
        ("shl.b32 %r1, 1, 32", 0),
        ("shr.s32 %r1, -8, 40", -1),
        ("bfe.s32 %r1, 0xABCD, 4, 8", 0xBC - 256),
        ("bfi.b32 %r1, 0xFF, 0x12345678, 8, 4", 0x12345F78),
        ("prmt.b32 %r1, 0x33221100, 0x77665544, 0x7240", 0x77224400),
        ("popc.b32 %r1, -2", 31),
        ("max.f32 %r1, 0f7FC00000, 0f3F800000", 0x3F800000),  # not a number, and 1
        ("selp.b32 %r1, 1, 2, %p1", 2),
    ],
)
def test_an_instruction_does_what_the_manual_says(instruction, expected):
    assert lanes(f"mov.pred %p1, 0;\n{instruction};") == 32 * [expected]
