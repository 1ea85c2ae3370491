"""Route by the compiled code of our Triton kernels, emulated, and compare with the formulation in torch.

Launch code runs on CPU tensors, as in ``compile_kernels``, but here a launch compiles its kernel and then runs the PTX
(``ptx_emulator``). What ``torch.empty`` gives is full of garbage, so that a kernel that reads what nobody wrote is
found by what it routes.

    python tests/run_ptx.py REPORT.json CASES.py

CASES.py has a function ``cases`` like the one below, whose cases it adds. Needs Triton with its ptxas, and
TRITON_INTERPRET unset.
"""

from __future__ import annotations

import inspect
import json
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from compile_kernels import StandInDriver, chosen_cases
from policy_cases import Arguments, Spec, context_of, random_scores
from ptx_emulator import Code, Memory, address_of, run_programs
from torch import Tensor
from twin_laws import assert_same_choice

from moe_ep_bench.kernels import requests_triton
from moe_ep_bench.kernels.dispatch import triton_twins
from moe_ep_bench.policies import make_policy

Case = Callable[[], str]
"""What differs from what is expected; nothing where nothing does."""

# --- Cases -------------------------------------------------------------------------------------------------

_MIXED: Arguments = {"top_k": 4, "num_ranks": 4, "rank": 1, "normalize": True, "scale": 2.5}
_TOKEN_DROP: Spec = {"name": "token_drop", "capacity_factor": 0.7}
_EXPANDED_DROP: Spec = {"name": "expanded_drop", "capacity_factor": 1.0}
_LASER: Spec = {"name": "laser", "eps_high": 0.6, "t_fix": 0.1, "c": 8}
_BY_REQUEST: Spec = {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2}


# Every kernel of a policy, with one program and with more; sizes that are no powers of two, padding, ties.
CASES: dict[str, tuple[Spec, tuple[int, int], dict[str, Any]]] = {
    "topk in groups": ({"name": "topk"}, (18, 64), {"num_groups": 8, "top_groups": 2}),
    "pruned": ({"name": "pruned", "k0": 3, "p": 0.5}, (9, 60), {}),
    "dynamic_skip": ({"name": "dynamic_skip", "beta": 0.3}, (9, 32), {}),
    "oea with rank_fill": ({"name": "oea", "k0": 2, "p": 0.5, "k_max": 4, "rank_fill": True}, (40, 128), {}),
    "expert_drop": ({"name": "expert_drop", "fraction": 0.3}, (9, 32), {}),
    "xshare by mass": ({"name": "xshare", "k0": 1, "mass_threshold": 0.9}, (9, 60), {}),
    "xshare by rank": ({"name": "xshare", "k0": 0, "scope": "rank", "rank_budget": 3}, (9, 32), {}),
    "xshare by request": (_BY_REQUEST, (9, 32), {}),
    "xshare by sorted request": (_BY_REQUEST, (18, 60), {"is_sorted": True}),
    "token_drop": ({**_TOKEN_DROP, "metric": "order", "modality": "image_first"}, (33, 64), {"kind": "levels"}),
    "token_drop by device": ({**_TOKEN_DROP, "granularity": "device"}, (40, 128), {}),
    "expanded_drop": ({**_EXPANDED_DROP, "num_candidates": 2, "max_experts_per_token": 3}, (9, 32), {}),
    "expanded_drop in passes": (
        {**_EXPANDED_DROP, "num_candidates": 3, "scope": "global", "metric": "random"}, (40, 128), {"biased": True},
    ),
    "laser in order": ({**_LASER, "chunk_size": 2}, (9, 32), {}),
    "laser by chunk, random trim": ({**_LASER, "trim": "random", "chunk_size": 9}, (9, 60), {}),
    "load_only": ({"name": "load_only"}, (9, 32), {"loaded": True}),
}  # fmt: skip


def cases() -> dict[str, Case]:
    return {name: partial(like_torch, spec, shape, **_MIXED, **more) for name, (spec, shape, more) in CASES.items()}


def like_torch(
    spec: Spec, shape: tuple[int, int], kind: str = "sigmoid", biased: bool = False, loaded: bool = False,
    is_sorted: bool = False, **arguments: Any,
) -> str:  # fmt: skip
    """Route random scores [T, E] of requests of three tokens, with padding, by Triton's twin and by torch.

    ``is_sorted``: as a batch of many tokens, whose requests are sorted and added up in chunks.
    """
    num_tokens, num_experts = shape
    # Of few bits, so that sums are exact in any order.
    scores_TE = (random_scores(kind, num_tokens, num_experts, 1) * 4096).ceil() / 4096
    token_T = torch.arange(num_tokens)
    given: Arguments = {
        **arguments,
        "token_mask_T": token_T % 7 != 3,
        "request_id_T": token_T // 3,
        "modality_T": token_T % 2,
        "bias_E": (torch.arange(num_experts) % 5 - 2) / 4 if biased else None,
        "load_E": torch.arange(num_experts) % 4 / 3 if loaded else None,
    }
    policy = make_policy(spec)
    expected = policy.route(scores_TE, context_of(given))
    sizes = {"_MOST_UNSORTED": 10, "_CHUNK": 2} if is_sorted else {}
    with mock.patch.multiple(requests_triton, **sizes) if sizes else nullcontext():
        ours = triton_twins()[type(policy)].select(policy, scores_TE, context_of(given), None)
    try:
        assert_same_choice(ours, expected)
    except AssertionError as error:
        return f"{int((ours.map_TE != expected.map_TE).sum())} pairs of {ours.map_TE.numel()} differ {error}"
    return ""


# --- Running them ------------------------------------------------------------------------------------------


class Emulator:
    """Takes the place of ``JITFunction.run``: compiles a kernel, and runs its PTX on the tensors of the launch."""

    def __init__(self) -> None:
        self._run = triton.JITFunction.run
        self._start()

    def _start(self) -> None:
        self._codes: dict[str, Code] = {}
        self.found: Counter[str] = Counter()
        self.kernels: list[str] = []
        self.num_instructions = 0

    def install(self) -> None:
        triton.runtime.driver.set_active(StandInDriver())
        emulator = self

        def run(self: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            emulator.launch(self, args, grid, kwargs)

        triton.JITFunction.run = run
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            setattr(owner, name, full_of_garbage(getattr(owner, name)))

    def call(self, case: Case) -> dict[str, Any]:
        """Run one case; what was seen."""
        self._start()
        differs = error = ""
        try:
            differs = case()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return {
            "differs": differs,
            "error": error,
            "found": dict(self.found),
            "kernels": self.kernels,
            "instructions": self.num_instructions,
        }

    def launch(self, function: triton.JITFunction, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        name = f"{function.fn.__module__.rpartition('.')[2]}.{function.fn.__name__}"
        self.kernels.append(name)
        kernel = self._run(function, *args, grid=None, warmup=True, **kwargs)
        if kernel.hash not in self._codes:
            self._codes[kernel.hash] = Code(kernel.asm["ptx"])

        of_kernel = {key: value for key, value in kwargs.items() if key in function.arg_names}
        bound = inspect.signature(function.fn).bind(*args, **of_kernel)
        bound.apply_defaults()
        # What the compiler knows (constants, None, the number 1) is no argument. Two null pointers to scratch memory
        # come last.
        types = {one: kind for one, kind in kernel.src.signature.items() if kind != "constexpr"}
        arguments = [number_or_tensor(bound.arguments[one], kind) for one, kind in types.items()] + [0, 0]
        found: Counter[str] = Counter()
        [num_programs] = grid
        try:
            self.num_instructions += run_on_tensors(
                self._codes[kernel.hash], num_programs, arguments, kernel.metadata.shared, found
            )
        finally:
            self.found.update({f"{name}: {what}": count for what, count in found.items()})


def number_or_tensor(value: Any, kind: str) -> Tensor | int:
    """An argument as PTX has it: a float by its bits."""
    if isinstance(value, Tensor):
        return value
    return struct.unpack("<I", struct.pack("<f", value))[0] if kind == "fp32" else int(value)


def run_on_tensors(
    code: Code, num_programs: int, arguments: list[Tensor | int], shared_bytes: int, found: Counter[str]
) -> int:
    """Emulate a launch on the memory of its tensors, of which it may touch what those tensors span."""
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    # Views of one tensor stay views of one.
    contents = {one.untyped_storage().data_ptr(): bytes_of(one).numpy() for one in tensors}
    # Piece 0 is empty, so that a null pointer is outside.
    memory = Memory("global", [np.zeros(0, np.uint8), *contents.values()], found)
    numbers = []
    for one in arguments:
        if isinstance(one, Tensor):
            piece = 1 + list(contents).index(one.untyped_storage().data_ptr())
            first = one.storage_offset() * one.itemsize
            last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            memory.allow(piece, first, (last + 1) * one.itemsize if one.numel() else 0)
            one = address_of(piece, first)
        numbers.append(one)
    num_instructions = run_programs(code, num_programs, numbers, memory, shared_bytes)
    for piece, content in enumerate(contents.values(), start=1):
        content[...] = memory.piece(piece)
    return num_instructions


def bytes_of(tensor: Tensor) -> Tensor:
    """All memory of a tensor and of what it is a view of."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


def full_of_garbage(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An allocation whose memory holds what a stranger left there. (A bool is 0 or 1, whoever wrote it.)"""
    generator = torch.Generator().manual_seed(7)

    def allocate_used(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        bytes_of(tensor).random_(0, 2 if tensor.dtype == torch.bool else 256, generator=generator)
        return tensor

    return allocate_used


def main() -> None:
    emulator = Emulator()
    emulator.install()
    report, chosen = chosen_cases("emulate the compiled code of Triton kernels", cases)
    seen = {}
    for name, case in chosen.items():
        seen[name] = emulator.call(case)
        kernels = dict(Counter(seen[name]["kernels"]))
        print(f"{seen[name]['instructions']:9,} instructions  {name}: {kernels}", flush=True)
    report.write_text(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()
