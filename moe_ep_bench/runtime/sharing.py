"""Several ranks on one GPU: a rehearsal of the distributed path, whose times mean nothing.

NCCL lets ranks share a GPU from 2.30 on. Its own tests want CUDA's Multi-Process Service (MPS) beside it, by which
kernels of several processes run at once; without it ranks take turns on the GPU. ``staged`` needs no NCCL
(``runtime.staged``), and rehearses ranks of the CPU too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.machine.provenance import loaded_nccl

Sharing = Literal["nccl", "staged"]
NCCL, STAGED = get_args(Sharing)

SHARE_FLAG = {NCCL: ["--share-gpu"], STAGED: ["--share-gpu", "--staged"]}
"""How a command asks for it."""

MOST_PER_GPU = 16
"""Ranks on a GPU, or on a core that stands for one; MPS carries 48 processes, and each rank needs a context."""

CONTEXT_BYTES = 600 * 2**20
"""Assumed, of a CUDA context with NCCL's buffers beside what a rank holds."""

# What NCCL reads of each rank.
_NCCL_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_LEAST_NCCL = (2, 30)
_MPS, _PIPES = "nvidia-cuda-mps-control", "CUDA_MPS_PIPE_DIRECTORY"
_MPS_TIMEOUT_S = 15
_WANTS_MPS = "MOE_EP_BENCH_MPS"


# ---- whether it can be -----------------------------------------------------------------------------------------------


def check_sharing(sharing: Sharing, device_type: str) -> None:
    """Refuse what cannot carry ranks that share a device.

    Raises:
        UserError: NCCL on the CPU, or one that is too old; it names the way on.
    """
    if sharing == STAGED:
        return
    if device_type == "cpu":
        raise UserError("--share-gpu: expected --staged beside it where ranks are on the CPU, got a CPU")
    found = loaded_nccl()
    if found is None or found < _LEAST_NCCL:
        wanted, got = ".".join(map(str, _LEAST_NCCL)), "none" if found is None else ".".join(map(str, found))
        raise UserError(
            f"--share-gpu: expected NCCL {wanted} or newer, got {got}; install a newer nvidia-nccl-cu13 and set "
            "LD_PRELOAD to its libnccl.so.2 (torch finds its own before LD_LIBRARY_PATH), or add --staged"
        )


def free_bytes_of_gpus() -> list[float]:
    """Free memory of each GPU that torch can use, as the driver tells it."""
    import torch

    with contextlib.suppress(RuntimeError, ModuleNotFoundError):
        total = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
        return [size - torch.cuda.device_memory_used(gpu) for gpu, size in enumerate(total)]
    return []


def ranks_that_fit(rank_bytes: float, free_bytes: float) -> int:
    """Ranks of this size that a GPU with so much free memory carries."""
    return int(free_bytes // (rank_bytes + CONTEXT_BYTES))


def check_memory(rank_bytes: float, free_bytes_G: list[float], nproc: int) -> None:
    """Refuse ranks that do not fit on GPUs with so much free memory, by the estimate of what a rank holds.

    Raises:
        UserError: it names how many ranks fit.
    """
    if not free_bytes_G:
        return
    on_each = -(-nproc // len(free_bytes_G))
    fit = min(ranks_that_fit(rank_bytes, free) for free in free_bytes_G)
    if on_each > fit:
        sizes = f"about {(rank_bytes + CONTEXT_BYTES) / 2**30:.1f} GiB a rank, {min(free_bytes_G) / 2**30:.1f} GiB free"
        raise UserError(f"--nproc: expected at most {fit * len(free_bytes_G)} ({sizes} on a GPU), got {nproc}")


# ---- what ranks need -------------------------------------------------------------------------------------------------


def let_nccl_share() -> None:
    """Of a rank, before its process group is made."""
    os.environ.setdefault(_NCCL_VARIABLE, "1")


@contextlib.contextmanager
def shared_gpus(sharing: Sharing | None, ranks_per_gpu: int) -> Iterator[None]:
    """Have ranks that are started in the block find what they need to share GPUs: variables, and MPS.

    ``MOE_EP_BENCH_MPS=0`` starts no daemon: of several jobs on one GPU none has it for itself.

    Args:
        sharing: None = they do not share, and nothing is done.
    """
    if sharing is None:
        yield
        return
    with contextlib.ExitStack() as held:
        wants_mps = os.environ.get(_WANTS_MPS, "1") != "0" and shutil.which(_MPS) is not None
        found = held.enter_context(_mps()) if wants_mps else {}
        if found or _daemon_is_there():
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(100 // ranks_per_gpu, 1))
        if sharing == NCCL:
            found[_NCCL_VARIABLE] = "1"
        before = dict(os.environ)
        os.environ |= {**found, **before}  # A user's stay.
        try:
            yield
        finally:
            for name in found.keys() - before.keys():
                os.environ.pop(name, None)


def _daemon_is_there() -> bool:
    return Path(os.environ.get(_PIPES, "/tmp/nvidia-mps"), "control").exists()


@contextlib.contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """A private MPS daemon while the block lasts; variables by which processes find it.

    Nothing where there is one already; where it cannot be started ranks take turns, and a line says so.
    """
    if _daemon_is_there():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {_PIPES: f"{folder}/pipes", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        error = _control(["-d"], places)
        if error:
            print(f"moe-ep-bench: no MPS ({error}): ranks take turns on a GPU", file=sys.stderr)
            yield {}
            return
        try:
            yield dict(places)
        finally:
            if _control([], places, "quit\n"):  # It waits for clients, of which one may hang.
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(Path(places[_PIPES], f"{_MPS}.pid").read_text()), signal.SIGKILL)


def _control(arguments: list[str], places: Mapping[str, str], said: str = "") -> str:
    """Call MPS's control program; what went wrong, or nothing."""
    how = {"env": {**os.environ, **places}, "timeout": _MPS_TIMEOUT_S, "capture_output": True, "text": True}
    try:
        job = subprocess.run([_MPS, *arguments], input=said, check=False, **how)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return brief(problem, 200, quoted=False)
    words = " ".join((job.stderr or job.stdout).split()) or f"status {job.returncode}"
    return "" if job.returncode == 0 else brief(words, 200, quoted=False)
