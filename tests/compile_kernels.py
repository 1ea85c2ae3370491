"""Compile our Triton kernels for an H100 as their own launch code would, on a machine without a GPU.

Triton's interpreter runs a kernel as Python and numpy, so what it accepts may still not compile: a variable that
changes its type in a loop, a list of tensors. Here launch code runs on CPU tensors under a stand-in for Triton's
driver, and a launch only compiles: with the argument types, alignments and compile-time constants that a GPU would
see. Nothing is launched: what a kernel would have written is garbage, and launch code must not look at it.

    python tests/compile_kernels.py REPORT.json

A crash of the compiler ends this process; the last line printed is what it was compiling. Needs Triton with its ptxas,
and TRITON_INTERPRET unset.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

CAPABILITY = 90

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def cases() -> dict[str, Callable[[], object]]:
    """What is compiled: calls of launch code, each under a name of its own."""
    from moe_ep_bench.kernels import row_sums_triton, swiglu_triton

    def swiglu(num_rows: int, ffn_size: int, dtype: torch.dtype) -> object:
        return swiglu_triton.weighted_swiglu(torch.empty(num_rows, 2 * ffn_size, dtype=dtype), torch.empty(num_rows))

    def row_sums(num_rows: int, num_columns: int) -> object:
        rows_ND = torch.empty(num_rows, num_columns, dtype=torch.bfloat16)
        return row_sums_triton.row_sums(rows_ND, torch.zeros(num_rows, dtype=torch.int64), torch.arange(num_rows))

    return {
        "row_sums": partial(row_sums, 64, 2048),
        # A size that 16 divides is known to the compiler as such.
        "weighted_swiglu, bfloat16": partial(swiglu, 64, 1408, torch.bfloat16),
        "weighted_swiglu, odd size": partial(swiglu, 3, 27, torch.bfloat16),
        **{f"{name}, {shape}": partial(_route, spec, shape) for name, shape, spec in ROUTED},
        "decode experts, qwen3": partial(_decode, 16, 128, 2048, 768, torch.bfloat16),
        "decode experts, gpt-oss": partial(_decode, 64, 32, 2880, 2880, torch.bfloat16),
        "decode experts, odd sizes": partial(_decode, 3, 5, 45, 27, torch.float32),
    }


# Policies at shapes that differ in what is compiled: OLMoE's prefill, Qwen3's decode, DeepSeek-V3 with all that a model
# and a batch may have, and what compiles sooner: the same of few experts, and twelve, which is no power of two.
_TOKEN_DROP = {"name": "token_drop", "capacity_factor": 1.0}
_EXPANDED_DROP = {"name": "expanded_drop", "capacity_factor": 1.0}
_LASER = {"name": "laser", "eps_high": 0.9, "t_fix": 0.01, "c": 16}
_BY_REQUEST = {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2, "budget": 16}
ROUTED: list[tuple[str, str, dict[str, Any]]] = [
    ("topk", "deepseek", {"name": "topk"}),
    ("token_drop", "prefill", _TOKEN_DROP),
    ("token_drop", "decode", _TOKEN_DROP),
    ("token_drop by device and modality", "deepseek",
     {**_TOKEN_DROP, "granularity": "device", "modality": "image_first"}),
    ("expanded_drop", "prefill", _EXPANDED_DROP),
    ("expanded_drop", "decode", {**_EXPANDED_DROP, "max_experts_per_token": 8}),
    ("expert_drop", "prefill", {"name": "expert_drop"}),
    ("budget_drop", "grouped", {"name": "budget_drop", "max_lost_mass": 0.01}),
    ("oea with all", "grouped", {"name": "oea", "k0": 4, "p": 0.7, "k_max": 6, "max_rank": 20, "rank_fill": True}),
    ("xshare by request", "decode", _BY_REQUEST),
    ("laser", "decode", _LASER),
    ("laser, random trim", "grouped", {**_LASER, "trim": "random", "chunk_size": 16}),
    ("laser, large chunks", "odd", {**_LASER, "c": 8, "chunk_size": 4096}),
    ("load_only", "decode", {"name": "load_only"}),
    ("xshare", "decode", {"name": "xshare", "k0": 1, "budget": 16}),
    ("xshare by rank", "grouped", {"name": "xshare", "k0": 1, "scope": "rank", "rank_budget": 4}),
    ("lynx", "decode", {"name": "lynx", "num_dropped": 4}),
    ("pruned", "odd", {"name": "pruned", "k0": 2, "p": 0.8}),
    ("dynamic_skip", "odd", {"name": "dynamic_skip", "beta": 0.4}),
]  # fmt: skip


def _decode(num_tokens: int, num_experts: int, hidden_size: int, ffn_size: int, dtype: torch.dtype) -> object:
    """A decode step's experts. Their weights take no memory, for nobody touches them."""
    from moe_ep_bench.kernels.decode_experts_triton import decode_experts

    return decode_experts(
        torch.empty(num_tokens, hidden_size, dtype=dtype),
        torch.empty(num_tokens, num_experts, dtype=torch.bool),
        torch.empty(num_tokens, num_experts),
        torch.empty(num_experts, 2 * ffn_size, hidden_size, dtype=dtype),
        torch.empty(num_experts, hidden_size, ffn_size, dtype=dtype),
    )


def _route(spec: dict[str, Any], shape: str) -> object:
    """Route scores of a shape, none of which is looked at."""
    from moe_ep_bench.kernels.dispatch import triton_twins
    from moe_ep_bench.policies import RoutingContext, make_policy

    num_tokens, num_experts = {
        "prefill": (8192, 64), "decode": (16, 128), "deepseek": (333, 256), "grouped": (5000, 32), "odd": (5001, 12),
    }[shape]  # fmt: skip
    context = RoutingContext(top_k=4 if shape == "odd" else 8, num_ranks=4, generator=torch.Generator(),
                             request_id_T=torch.zeros(num_tokens, dtype=torch.int64))  # fmt: skip
    if shape in ("deepseek", "grouped"):
        context = replace(
            context, normalize=True, scale=2.5, num_groups=8, top_groups=4, bias_E=torch.zeros(num_experts),
            load_E=torch.zeros(num_experts), token_mask_T=torch.ones(num_tokens, dtype=torch.bool),
            modality_T=torch.zeros(num_tokens, dtype=torch.int64),
        )  # fmt: skip
    policy = make_policy(spec)
    return triton_twins()[type(policy)].select(policy, torch.zeros(num_tokens, num_experts), context, None)


class StandInDriver:
    """All that a launch asks of a driver before it has a compiled kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Takes the place of ``JITFunction.run``: compiles, notes what came of it, and launches nothing."""

    def __init__(self) -> None:
        self.case = ""
        self.kernels: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []
        self._run = triton.JITFunction.run
        self._seen: dict[str, dict[str, Any]] = {}

    def install(self) -> None:
        # What ptxas says of spills is not kept with a compiled kernel in the cache.
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.runtime.driver.set_active(StandInDriver())
        compiler = self

        def run(self: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            compiler.compile(self, args, kwargs)

        triton.JITFunction.run = run

    def call(self, name: str, launch: Callable[[], object]) -> None:
        """Run one case. Launch code that fails is noted under its case, with no kernel."""
        self.case = name
        try:
            launch()
        except Exception as error:
            self._fail("", error)

    def compile(self, function: triton.JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = f"{function.fn.__module__}.{function.fn.__qualname__}"
        print(f"{self.case}: {name}", flush=True)
        try:
            with redirect_stdout(io.StringIO()) as log:
                kernel = self._run(function, *args, grid=None, warmup=True, **kwargs)
        except Exception as error:
            # The launches that follow are compiled all the same.
            self._fail(name, error)
            return
        if kernel.hash not in self._seen:
            self._seen[kernel.hash] = {**described(kernel), **used(log.getvalue())}
        entry = {"case": self.case, "kernel": name, **self._seen[kernel.hash]}
        if entry not in self.kernels:
            self.kernels.append(entry)

    def _fail(self, kernel: str, error: BaseException) -> None:
        # Of a function that a kernel calls, the compiler names the call, and gives its own mistake as the cause.
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        text = "\n\n".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        self.failures.append({"case": self.case, "kernel": kernel, "error": text})


def described(kernel: Any) -> dict[str, Any]:
    """What a kernel was compiled for, by the names of its arguments, and the shared memory of one program."""
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    return {
        "arguments": {name: kind for name, kind in kernel.src.signature.items() if name not in constants},
        "constants": constants,
        "shared_bytes": kernel.metadata.shared,
        "waits": kernel.asm["ptx"].count("griddepcontrol.wait"),
    }


def used(ptxas_log: str) -> dict[str, int]:
    """Registers of a thread, and the bytes that its code stores and loads because they are too few."""
    registers = [int(number) for number in _REGISTERS.findall(ptxas_log)]
    spilled_bytes = [int(stored) + int(loaded) for stored, loaded in _SPILLS.findall(ptxas_log)]
    # The most of any function, should a kernel have one that is not inlined.
    return {"registers": max(registers), "spilled_bytes": max(spilled_bytes)}


@triton.jit
def changes_its_type(out_ptr, count):
    total = 0
    for _ in range(count):
        total += 0.5
    tl.store(out_ptr, total)


def main() -> None:
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set, and the interpreter compiles nothing; expected it unset")
    compiler = Compiler()
    compiler.install()
    # One that fails comes first, and those after it compile all the same.
    chosen = {"fails": lambda: changes_its_type[(1,)](torch.empty(1), 7), **cases()}
    for name, launch in chosen.items():
        compiler.call(name, launch)
    found = {"cases": list(chosen), "kernels": compiler.kernels, "failures": compiler.failures}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
