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
from twin_laws import report_of

KERNELS = Path(__file__).parents[1] / "moe_ep_bench" / "kernels"
ROUTING = ("rows", "sets", "requests", "capacity", "capacity_passes", "laser")
CASES = (
    "topk in groups",
    "pruned",
    "dynamic_skip",
    "oea with rank_fill",
    "expert_drop",
    "xshare by mass",
    "xshare by rank",
    "xshare by request",
    "xshare by sorted request",
    "token_drop",
    "token_drop by device",
    "expanded_drop",
    "expanded_drop in passes",
    "laser in order",
    "laser by chunk, random trim",
    "load_only",
)

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


def emulated(folder: Path, *arguments: Path) -> dict[str, Any]:
    """Run run_ptx.py; the cases of its report."""
    return report_of("run_ptx.py", folder, *arguments)["cases"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return emulated(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demonstrations")
    (folder / "demonstrations.py").write_text(DEMONSTRATIONS)
    return emulated(folder, folder / "demonstrations.py")


# --- Our kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_compiled_code_routes_like_torch(ours, case):
    seen = ours[case]
    assert (seen["error"], seen["differs"]) == ("", "")
    assert seen["instructions"]


def test_no_program_races_with_itself_or_leaves_its_tensors(ours):
    assert {case: seen["found"] for case, seen in ours.items() if seen["found"]} == {}


def test_every_case_is_claimed_and_every_routing_kernel_is_in_one(ours):
    assert set(ours) == set(CASES)
    ran = {kernel for seen in ours.values() for kernel in seen["kernels"]}
    launched = {
        f"{module}_triton.{name}"
        for module in ROUTING
        for name in re.findall(r"^ +(_\w+)\[.+\]\(", (KERNELS / f"{module}_triton.py").read_text(), re.MULTILINE)
    }
    assert len(launched) >= 10
    assert ran == launched


# --- The checks can fail -----------------------------------------------------------------------------------


def test_a_load_of_what_another_warp_stored_before_a_barrier_is_a_race(demonstrations):
    assert any("race in global memory: " in what for what in demonstrations["no barrier"]["found"])


def test_a_barrier_ends_the_race(demonstrations):
    assert (demonstrations["a barrier"]["found"], demonstrations["a barrier"]["differs"]) == ({}, "")


def test_our_kernels_need_their_barriers(demonstrations):
    assert any("race in shared memory: " in what for what in demonstrations["our kernel without its barriers"]["found"])


@pytest.mark.parametrize(("case", "instruction"), [("reads beyond", "ld.global"), ("writes beyond", "st.global")])
def test_an_access_beyond_a_tensor_is_seen(demonstrations, case, instruction):
    [what] = demonstrations[case]["found"]
    assert "outside of global memory: " in what
    assert instruction in what


def test_reading_what_nobody_wrote_changes_the_result(demonstrations):
    assert demonstrations["reads what nobody wrote"]["differs"]


def test_an_unknown_instruction_is_named(demonstrations):
    assert "ex2.approx" in demonstrations["an unknown instruction"]["error"]


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


def test_a_comparison_with_no_number_is_false_unless_it_is_unordered():
    for comparison, expected in (("ne", 0), ("neu", 1), ("le", 0), ("leu", 1), ("num", 0)):
        setp = f"setp.{comparison}.f32 %p1, 0f7FC00000, 0f3F800000;"
        assert lanes(f"{setp}\nselp.b32 %r1, 1, 0, %p1;")[0] == expected


def test_lanes_exchange_values():
    assert lanes("shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;")[:4] == [1, 0, 3, 2]
    assert lanes("shfl.sync.up.b32 %r1, %r0, 2, 0, -1;")[:4] == [0, 1, 0, 1]
    assert lanes("shfl.sync.idx.b32 %r1, %r0, 5, 31, -1;") == 32 * [5]
    assert lanes("redux.sync.add.s32 %r1, %r0, -1;") == 32 * [496]
    assert lanes("setp.lt.u32 %p1, %r0, 3;\nvote.sync.ballot.b32 %r1, %p1, -1;") == 32 * [7]


def test_a_guard_spares_the_others_and_widening_follows_the_sign():
    assert lanes("mov.b32 %r1, 7;\nsetp.eq.s32 %p1, %r0, 1;\n@%p1 mov.b32 %r1, 9;\n")[:3] == [7, 9, 7]
    assert lanes("mov.b16 %rs1, -2;\ncvt.s64.s16 %rd1, %rs1;", "i8")[0] == -2
    assert lanes("mov.b32 %r1, -2;\ncvt.u64.u32 %rd1, %r1;", "i8")[0] == 2**32 - 2
    assert lanes("mov.b64 %rd1, {%r0, -1};", "i8")[3] == 3 - 2**32
    assert lanes("mov.b64 %rd2, 0x700000005;\nmov.b64 {_, %r1}, %rd2;")[0] == 7


def test_a_matrix_comes_back_from_shared_memory_as_it_went():
    rows = "mov.u32 %r0, %tid.x;\nshl.b32 %r2, %r0, 4;\n"
    there = "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r2], {%r0, %r3};\nbar.sync 0;\n"
    back = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r1}, [%r2];\nshl.b32 %r4, %r4, 8;\nor.b32 %r1, %r1, %r4;"
    assert lanes(f"{rows}add.s32 %r3, %r0, 100;\n{there}{back}") == [lane << 8 | lane + 100 for lane in range(32)]
    # The words of matrix 0 lie in rows, four lanes to a row.
    assert lanes(f"{rows}mov.b32 %r3, 0;\n{there}shl.b32 %r4, %r0, 2;\nld.shared.b32 %r1, [%r4];")[:6] == [*range(6)]


def test_atomic_additions_do_not_race_among_themselves_but_with_a_load():
    counted, found = emulate("atom.global.gpu.relaxed.add.u32 %r1, [%rd0], 2;", num_threads=128)
    assert counted.view(np.int32)[0] == 256
    assert not found
    _, found = emulate("atom.shared.add.u32 %r1, [global_smem+4], 2;\nld.shared.b32 %r2, [global_smem+4];", 128)
    assert [*found] == ["race in shared memory: ld.shared.b32 %r2, [global_smem+4]"]


def test_an_access_that_is_not_aligned_or_outside_shared_memory_is_seen():
    assert [*emulate("ld.shared.b32 %r1, [global_smem+2];")[1]] == [
        "misaligned in shared memory: ld.shared.b32 %r1, [global_smem+2]"
    ]
    assert "outside of shared memory" in str(emulate("ld.shared.b32 %r1, [global_smem+1024];")[1])
    assert "outside of global memory" in str(emulate("mov.b64 %rd1, 0;\nld.global.b32 %r1, [%rd1];")[1])


def test_a_loop_runs_and_a_branch_that_some_threads_take_is_refused():
    count = "add.s32 %r1, %r1, 1;\nsetp.lt.s32 %p1, %r1, 5;\n@%p1 bra $L__loop;"
    assert lanes(f"mov.b32 %r1, 0;\n$L__loop:\n{count}") == 32 * [5]
    with pytest.raises(NotImplementedError, match=r"a branch that only some threads take: @%p1 bra \$L__loop"):
        lanes(f"mov.u32 %r1, %tid.x;\n$L__loop:\n{count}")


@pytest.mark.parametrize(
    "instruction", ["mma.sync %r1, %r2", "bar.sync 1, 64", "cvt.rzi.s32.f32 %r1, %r2", "div.f32 %r1, %r2, %r3"]
)
def test_an_instruction_that_is_not_known_is_an_error_that_names_it(instruction):
    with pytest.raises(NotImplementedError, match=re.escape(instruction)):
        emulate(f"{instruction};")
