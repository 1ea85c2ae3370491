"""GPUs or the CPU: what is measured takes the CPU only where that is asked for, or where there is nothing else.

A torch that cannot use a machine's GPUs (built for another CUDA, an older driver) would otherwise time toy sizes on the
CPU, in a job that ends well. torch is imported where it is asked: what it sees is settled then.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from moe_ep_bench.errors import UserError, brief

_DEVICES = Path("/dev")
# Of NVIDIA, of it under Windows or on boards, and of AMD.
_GPU_FILES = ("nvidia*", "dxg", "nvhost*", "kfd")
# So many CPU ranks per core at most, and this many wherever: they share time slices, and rows say so.
_RANKS_PER_CORE, _LEAST_RANKS = 2, 4

# How NVML is asked; names have the unit. An error of one costs only itself.
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "name": lambda gpu: pynvml.nvmlDeviceGetName(gpu),
    "uuid": lambda gpu: pynvml.nvmlDeviceGetUUID(gpu),
    "memory_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**20,
    "memory_free_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).free / 2**20,
    "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "sm_clock_limit_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "power_default_w": lambda gpu: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3,
    "mig": lambda gpu: "Enabled" if pynvml.nvmlDeviceGetMigMode(gpu)[0] else "Disabled",
}


def take_cpu() -> None:
    """Measure on the CPU, whatever is here; before torch is imported, and for all processes that this one starts."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def num_gpus() -> int:
    """GPUs that torch can use; it is not imported where nothing in /dev could be one."""
    if "torch" not in sys.modules and not any(any(_DEVICES.glob(name)) for name in _GPU_FILES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_type() -> str:
    """``cuda`` where torch can use a GPU, else ``cpu``; an empty CUDA_VISIBLE_DEVICES (--cpu) asks for the CPU.

    Raises:
        UserError: there are GPUs that torch cannot use, or that are hidden from it, and the CPU is not asked for.
    """
    if num_gpus():
        return "cuda"
    seen = ", ".join(sorted(map(str, _DEVICES.glob("nvidia[0-9]"))))
    with contextlib.suppress(pynvml.NVMLError):  # No driver, or no GPU.
        for gpu in query_gpus():
            seen = f"the driver lists {gpu['name']}, driver {gpu['driver']}"
    if not seen or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    import torch

    why = f"it is built for CUDA {torch.version.cuda} and finds no device"
    try:
        torch.cuda.init()
    except Exception as error:  # of whatever kind: it is the answer
        why = brief(error, 200, quoted=False)
    raise UserError(
        f"GPUs: {seen}, and torch can use none ({why}); expected a torch for this driver (launch/setup.sh --cuda12 for "
        "CUDA 12), in Slurm a job with --gpus-per-node, or --cpu"
    )


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


def query_gpus() -> list[dict[str, Any]]:
    """All GPUs of this node, CUDA_VISIBLE_DEVICES or not: ``index``, ``driver`` and ``_FIELDS``; None = unsaid.

    Raises:
        pynvml.NVMLError: there is no driver, or it has lost its GPU.
    """
    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        row: dict[str, Any] = {"index": index, "driver": driver}
        for name, read in _FIELDS.items():
            try:
                row[name] = read(handle)
            except (pynvml.NVMLError, LookupError):
                row[name] = None
        gpus.append(row)
    return gpus
