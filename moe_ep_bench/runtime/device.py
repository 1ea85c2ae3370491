"""GPUs or the CPU: what is measured takes the CPU only where that is asked for, or where there is nothing else.

A torch that cannot use a machine's GPUs (built for another CUDA, an older driver) would otherwise time toy sizes on the
CPU, in a job that ends well. torch is imported where it is asked: what it sees is settled then.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pynvml

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.machine.gpus import query_gpus

# Of a command and of the ranks that it starts: --cpu was given.
_CPU = "MOE_EP_BENCH_CPU"
# What stands in CUDA_VISIBLE_DEVICES for no GPU.
_NONE = ("", "-1", "NoDevFiles")
_DEVICES = Path("/dev")
# Of NVIDIA, of it under Windows or on boards, and of AMD.
_GPU_FILES = ("nvidia*", "dxg", "nvhost*", "kfd")
# So many CPU ranks per core at most, and this many wherever: they share time slices, and rows say so.
_RANKS_PER_CORE, _LEAST_RANKS = 2, 4


def take_cpu() -> None:
    """Measure on the CPU, whatever is here; before torch is imported, and for all processes that this one starts."""
    os.environ |= {_CPU: "1", "CUDA_VISIBLE_DEVICES": ""}


def num_gpus() -> int:
    """GPUs that torch can use; it is not imported where nothing in /dev could be one."""
    if "torch" not in sys.modules and not any(any(_DEVICES.glob(name)) for name in _GPU_FILES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_type() -> str:
    """``cuda`` where torch can use a GPU, else ``cpu``.

    The CPU is asked for by --cpu, or outside of Slurm by an empty CUDA_VISIBLE_DEVICES.

    Raises:
        UserError: the CPU is not asked for, and there are GPUs that torch cannot use, or this is a Slurm job.
    """
    if num_gpus():
        return "cuda"
    in_slurm, visible = "SLURM_JOB_ID" in os.environ, os.environ.get("CUDA_VISIBLE_DEVICES")
    if os.environ.get(_CPU) or (not in_slurm and visible is not None and visible.strip() in _NONE):
        return "cpu"
    if (seen := gpus_in_sight()) or in_slurm or visible:
        raise UserError(
            f"GPUs: {seen or 'no driver lists any'}, and torch can use none ({why_torch_has_none()}); expected a torch "
            "for this driver (launch/setup.sh --cuda12 for CUDA 12), in Slurm a job with --gpus-per-node, or --cpu"
        )
    return "cpu"


def gpus_in_sight() -> str:
    """The first GPU that the driver lists, or what of one is in /dev; empty where there is none."""
    with contextlib.suppress(pynvml.NVMLError):  # No driver, or no GPU.
        for gpu in query_gpus():
            return f"the driver lists {gpu['name']}, driver {gpu['driver']}"
    return ", ".join(sorted(map(str, _DEVICES.glob("nvidia[0-9]"))))


def why_torch_has_none() -> str:
    """Why torch can use no GPU, in its own words."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # of whatever kind: it is the answer
        return brief(error, 200, quoted=False)
    return f"it is built for CUDA {torch.version.cuda} and finds no device"


def local_ranks(wanted: int | None) -> int:
    """Ranks on this node: as many as are wanted, else one per GPU; without any, one CPU rank per core, 2 to 4.

    Raises:
        UserError: none are wanted.
    """
    if wanted is not None and wanted < 1:
        raise UserError(f"--nproc: expected at least 1, got {wanted}")
    return wanted or num_gpus() or min(max(len(os.sched_getaffinity(0)), 2), 4)


def check_num_ranks(nproc: int) -> None:
    """Refuse more ranks on this node than it can carry: one per GPU, or two per core (4 on fewer cores).

    Raises:
        UserError: there are more; or as ``device_type``.
    """
    if device_type() == "cuda":
        most, of = num_gpus(), "the GPUs here"
    else:
        cores = len(os.sched_getaffinity(0))
        most, of = max(_RANKS_PER_CORE * cores, _LEAST_RANKS), f"for {cores} cores"
    if nproc > most:
        raise UserError(f"--nproc: expected at most {most} ({of}), got {nproc}")
