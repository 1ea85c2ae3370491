"""What a result was obtained on: code, packages and hardware, as plain values for ``run.json``."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parent


def code_hash() -> str:
    """Hash of this package's source: equal on ranks that run the same code."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def package_versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on; None = not installed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": _version("megatron-core"),
        "transformer_engine": _version("transformer-engine"),
        "apex": nvidia_apex_version(),
        "cuda": torch.version.cuda,
    }


def nvidia_apex_version() -> str | None:
    """Version of NVIDIA Apex. Another project holds the name ``apex`` on the package index."""
    if importlib.util.find_spec("apex") is None or importlib.util.find_spec("apex.optimizers") is None:
        return None
    return _version("apex") or "unknown"


def hardware(device: torch.device) -> dict[str, Any]:
    """Names and sizes of the device and its host."""
    on_cuda = device.type == "cuda"
    return {
        "device_name": torch.cuda.get_device_name(device) if on_cuda else cpu_name(),
        "num_devices": torch.cuda.device_count() if on_cuda else len(os.sched_getaffinity(0)),
        "cpu_name": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def available_memory_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Memory that one rank may still take on its device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) * 1024 // ranks_per_node


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory that this process held: on the device since ``forget_peak_memory``, on a CPU ever."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def forget_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def cache_bytes(device: torch.device) -> int:
    """Size of the device's last-level cache; an assumed 64 MiB where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 64 * 2**20


def describe(device: torch.device) -> dict[str, Any]:
    """Everything for ``run.json``; commit and load are those of this moment."""
    return {
        **hardware(device),
        **package_versions(),
        "hostname": socket.gethostname(),
        "load_average": list(os.getloadavg()),
        "git_commit": _git("rev-parse", "HEAD"),
        # Of this package: results and notes beside it do not change what is measured.
        "git_dirty": bool(_git("status", "--porcelain", "--", ".")),
        "threads_per_rank": torch.get_num_threads(),
    }


def comparable(environment: dict[str, Any]) -> dict[str, Any]:
    """The part of an environment that must be equal for results to lie in one directory."""
    return {key: environment.get(key) for key in ("device_name", *package_versions())}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
