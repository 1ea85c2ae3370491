"""Compile our Triton kernels for an H100 as their own launch code would, on a machine without a GPU.

Triton's interpreter runs a kernel as Python and numpy, so what it accepts may still not compile: a variable that
changes its type in a loop, a list of tensors. Run as a script, in a process without the interpreter, this file lets
launch code run on CPU tensors under a stand-in for Triton's driver, and a launch only compiles: with the argument
types, alignments and compile-time constants that a GPU would see. Nothing is launched: what a kernel would have written
is garbage, and launch code must not look at it. The last line printed is what was being compiled.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

# Stores and loads of one thread: three registers that are put aside cost nothing beside a tile's loads. Triton 3.8
# does so in ``_offer`` by device and modality, 3.7 puts two aside at most.
MOST_SPILLED_BYTES = 24
# Of one program, "Compute Capability 9.0" in the CUDA C++ Programming Guide: 227 KiB.
MOST_SHARED_BYTES = 227 * 1024
_COPIES = re.compile(r"cp\.async\.(?:ca|cg)\.")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def cases() -> dict[str, Callable[[], object]]:
    """What is compiled: calls of launch code, each under a name of its own."""
    from moe_ep_bench.kernels import experts_triton

    def swiglu(num_rows: int, ffn_size: int, dtype: torch.dtype) -> object:
        return experts_triton.weighted_swiglu(torch.empty(num_rows, 2 * ffn_size, dtype=dtype), torch.empty(num_rows))

    def row_sums(num_rows: int, num_columns: int) -> object:
        rows_ND = torch.empty(num_rows, num_columns, dtype=torch.bfloat16)
        return experts_triton.row_sums(rows_ND, torch.zeros(num_rows, dtype=torch.int64), torch.arange(num_rows))

    def first_rows(num_rows: int, num_columns: int) -> object:
        rows_TD = torch.empty(num_rows, num_columns, dtype=torch.bfloat16)
        return experts_triton.first_rows(rows_TD, torch.zeros(num_rows, dtype=torch.int64), torch.tensor(1))

    return {
        "first_rows": partial(first_rows, 64, 2048),
        "first_rows, odd size": partial(first_rows, 3, 4097),
        "row_sums": partial(row_sums, 64, 2048),
        # A size that 16 divides is known to the compiler as such.
        "weighted_swiglu, bfloat16": partial(swiglu, 64, 1408, torch.bfloat16),
        "weighted_swiglu, odd size": partial(swiglu, 3, 27, torch.bfloat16),
        **{f"{name}, {shape}": partial(_route, spec, shape) for name, shape, spec in ROUTED},
        "decode experts, qwen3": partial(_decode, 16, 128, 2048, 768, torch.bfloat16),
        "decode experts, gpt-oss": partial(_decode, 64, 32, 2880, 2880, torch.bfloat16),
        "decode experts, odd sizes": partial(_decode, 3, 5, 45, 27, torch.float32),
        # One step of the inner loop: then Triton pipelines the outer one.
        "decode experts, narrow": partial(_decode, 16, 8, 64, 64, torch.bfloat16),
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
    ("oea with all", "grouped", {"name": "oea", "k0": 4, "p": 0.7, "k_max": 6, "max_rank": 20}),
    ("xshare by request", "decode", _BY_REQUEST),
    ("laser", "decode", _LASER),
    ("laser, random trim", "grouped", {**_LASER, "trim": "random"}),
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
    from moe_ep_bench.kernels import triton_forms
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
    return triton_forms()[type(policy)].select(policy, torch.zeros(num_tokens, num_experts), context, None)


def _copies_before_wait(ptx: str) -> int:
    """Copies to shared memory begun before the wait for the launch ahead; 0 where a kernel never waits."""
    ahead, wait, _ = ptx.partition("griddepcontrol.wait")
    return len(_COPIES.findall(ahead)) if wait else 0


class StandInDriver:
    """All that a launch asks of a driver before it has a compiled kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled_instead_of_launched() -> list[dict[str, Any]]:
    """Let every launch compile its kernel for an H100, and note in this list what came of it."""
    # What ptxas says of spills is not kept with a compiled kernel in the cache.
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.runtime.driver.set_active(StandInDriver())
    compile_, kernels, seen = triton.JITFunction.run, [], {}

    def run(self: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        with redirect_stdout(io.StringIO()) as log:
            kernel = compile_(self, *args, grid=None, warmup=True, **kwargs)
        if kernel.hash not in seen:  # Else it was not compiled anew.
            seen[kernel.hash] = {
                "kernel": f"{self.fn.__module__}.{self.fn.__qualname__}",
                "constants": {self.arg_names[path[0]]: value for path, value in kernel.src.constants.items()},
                "shared_bytes": kernel.metadata.shared,
                # The most of any function, should a kernel have one that is not inlined.
                "spilled_bytes": max(sum(map(int, found)) for found in _SPILLS.findall(log.getvalue())),
                "waits": kernel.asm["ptx"].count("griddepcontrol.wait"),
                "copies_before_it_waits": _copies_before_wait(kernel.asm["ptx"]),
            }
        kernels.append(seen[kernel.hash])

    triton.JITFunction.run = run
    return kernels


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, Any]:
    """In a process of its own, for this one is the interpreter's."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, folder / "report.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-100:]}{done.stderr[-3000:]}"
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
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


def main() -> None:
    kernels, found = compiled_instead_of_launched(), {}
    for name, launch in cases().items():
        print(name, flush=True)
        launch()
        found[name] = kernels.copy()
        kernels.clear()
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
