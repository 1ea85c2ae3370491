"""What a result was obtained on, as plain values for ``run.json``: code, packages, hardware, settings, job.

The first rank writes it once per run; of the other ranks who they were (``describe_rank``). Clocks while a run is timed
are ``monitor``'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml

from moe_ep_bench.files import read_text
from moe_ep_bench.machine.commit import DIRTY, commit_of, output_of
from moe_ep_bench.policies.lazy import torch

_PACKAGE = Path(__file__).resolve().parents[1]

# Variables that change what is measured, and the Slurm job. A fixed list, for others may hold secrets.
_VARIABLE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "NVSHMEM_", "NVTE_", "GLOO_", "OMP_")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_INTERPRET", "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip

# What must be equal for results to lie in one directory, and what besides where ranks ran on GPUs.
_COMPARED = ("device_name", "python", "torch", "megatron_core", "transformer_engine", "apex", "cuda")
_COMPARED_ON_GPUS = ("nccl", "triton", "deep_ep")

# How NVML is asked; names have the unit. An error of one costs only itself.
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "name": lambda gpu: pynvml.nvmlDeviceGetName(gpu),
    "uuid": lambda gpu: pynvml.nvmlDeviceGetUUID(gpu),
    "compute_capability": lambda gpu: list(pynvml.nvmlDeviceGetCudaComputeCapability(gpu)),
    "memory_mib": lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total) / 2**20,
    "memory_free_mib": lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).free) / 2**20,
    "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "sm_clock_limit_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "power_default_w": lambda gpu: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3,
    "mig": lambda gpu: "Enabled" if pynvml.nvmlDeviceGetMigMode(gpu)[0] else "Disabled",
}


def code_hash() -> str:
    """Hash of this package's source: equal on ranks that run the same code."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def loaded_nccl() -> tuple[int, int, int] | None:
    """The version of the NCCL that this process runs, which need not be torch's; None where there is none.

    ``torch.cuda.nccl.version()`` is the one that torch was built with.
    """
    _ = torch.version  # Its import loads its own, where nothing has loaded another before (LD_PRELOAD).
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 10000, version.value // 100 % 100, version.value % 100


def package_versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on; None = not installed."""
    # Another project holds the name ``apex`` on the package index.
    has_apex = importlib.util.find_spec("apex") and importlib.util.find_spec("apex.optimizers")
    nccl = loaded_nccl()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": version_of("megatron-core"),
        "transformer_engine": version_of("transformer-engine"),
        "apex": version_of("apex") or "unknown" if has_apex else None,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "triton": version_of("triton") or version_of("pytorch-triton"),
        "deep_ep": version_of("deep_ep"),
        "transformers": version_of("transformers"),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """Names and sizes of the device and its host."""
    on_cuda, num_cores = device.type == "cuda", len(os.sched_getaffinity(0))
    return {
        "device_type": device.type,
        "device_name": torch.cuda.get_device_name(device) if on_cuda else cpu_name(),
        "num_devices": torch.cuda.device_count() if on_cuda else num_cores,
        "cpu_name": cpu_name(),
        "num_cores": num_cores,
        "memory_bytes": psutil.virtual_memory().total,
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process held: on a GPU since ``host.free_memory``, on a CPU ever."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cache_bytes(device: torch.device) -> int:
    """Size of the device's last-level cache; an assumed 64 MiB where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 64 * 2**20


# Commands whose first argument is a config.
_OF_A_CONFIG = ("run", "emulate", "route", "validate", "papers", "quality", "serve")


def asked(arguments: Sequence[str]) -> dict[str, str]:
    """The command line and its config, word for word; empty where no command with a config was given.

    Args:
        arguments: of the process, without its name.
    """
    config = next((Path(argument) for argument in arguments[1:] if Path(argument).is_file()), None)
    if config is None or arguments[0] not in _OF_A_CONFIG:
        return {}
    return {"command": shlex.join(["moe-ep-bench", *arguments]), "config_text": read_text(config)}


def describe(device: torch.device) -> dict[str, Any]:
    """Everything for ``run.json`` that one rank can say; clocks, commit and load are those of this moment."""
    commit = commit_of()
    return {
        **hardware(device),
        **package_versions(),
        **(describe_gpus() if device.type == "cuda" else {}),
        "variables": relevant_variables(),
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "load_average": list(os.getloadavg()),
        "git_commit": commit.removesuffix(DIRTY) if commit else None,
        # Of this package: results and notes beside it do not change what is measured.
        "git_dirty": bool(commit and commit.endswith(DIRTY)),
        "threads_per_rank": torch.get_num_threads(),
    }


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


def compute_capabilities() -> list[tuple[int, int]]:
    """Major and minor of each kind of GPU of this node, which the driver is asked for: no process takes a GPU by it."""
    with contextlib.suppress(pynvml.NVMLError):
        return sorted({tuple(gpu["compute_capability"]) for gpu in query_gpus() if gpu["compute_capability"]})
    return []


def describe_gpus() -> dict[str, Any]:
    """The first node's driver and GPUs, and how they are linked (``nvidia-smi topo -m``); empty where none is known."""
    with contextlib.suppress(pynvml.NVMLError):
        if gpus := query_gpus():
            topology = re.sub(r"\x1b\[[0-9;]*m", "", output_of("nvidia-smi", "topo", "-m") or "")  # it underlines
            return {"driver": gpus[0]["driver"], "gpus": gpus, "topology": topology.splitlines()}
    return {}


def describe_rank(device: torch.device) -> dict[str, Any]:
    """Which process a rank was: its host, cores and GPU."""
    on_cuda = device.type == "cuda"
    return {
        "hostname": socket.gethostname(),
        "num_cores": len(os.sched_getaffinity(0)),
        "gpu_name": torch.cuda.get_device_name(device) if on_cuda else None,
        "gpu_uuid": f"GPU-{torch.cuda.get_device_properties(device).uuid}" if on_cuda else None,
    }


def relevant_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that change what is measured, of a fixed list: others may hold secrets."""
    kept = [name for name in sorted(variables) if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLES]
    return {name: variables[name] for name in kept}


def conditions(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment (``describe``) that must be equal for results to lie in one directory."""
    on_gpus = environment.get("device_type") == "cuda"
    return {key: environment.get(key) for key in (*_COMPARED, *(_COMPARED_ON_GPUS if on_gpus else ()))}
