"""What the driver says of a node's GPUs, and the kernel of its NICs; a driver that hangs holds nobody up.

NVML, the driver's own library, sees all GPUs of the node, whatever CUDA_VISIBLE_DEVICES hides. It is asked in a child
process with a timeout. Paths between GPUs and NICs are not NVML's: they come from ``nvidia-smi topo -m``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from moe_ep_bench.machine.subprocesses import CommandError, ask, output_of

TIMEOUT_S = 20.0

# Bits of ``throttle_reasons``. Idling and a clock that somebody set are reasons for a low clock too, but no throttling.
THROTTLE_REASONS = {
    "power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
    "display_clocks": pynvml.nvmlClocksEventReasonDisplayClockSetting,
}
_COMPUTE_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")


def throttle_reasons(gpu: Any) -> int:
    """Bits of ``THROTTLE_REASONS``."""
    try:
        return pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except pynvml.nvmlExceptionClass(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
        # Older drivers have it under its first name only.
        return pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)


def _nvlinks(gpu: Any) -> list[bool]:
    """Of each NVLink whether it is active; empty for GPUs without."""
    active = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active.append(bool(pynvml.nvmlDeviceGetNvLinkState(gpu, link)))
        except pynvml.NVMLError:
            break
    return active


# How NVML is asked; names have the unit. An error of one costs only itself.
FIELDS: dict[str, Callable[[Any], Any]] = {
    "name": pynvml.nvmlDeviceGetName,
    "uuid": pynvml.nvmlDeviceGetUUID,
    "memory_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**20,
    "memory_free_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).free / 2**20,
    "utilization_percent": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "temperature_c": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
    "sm_clock_limit_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "power_default_w": lambda gpu: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3,
    "compute_mode": lambda gpu: _COMPUTE_MODES[pynvml.nvmlDeviceGetComputeMode(gpu)],
    "mig": lambda gpu: "Enabled" if pynvml.nvmlDeviceGetMigMode(gpu)[0] else "Disabled",
    # Uncorrected ones, since the driver was loaded.
    "ecc_errors": lambda gpu: pynvml.nvmlDeviceGetTotalEccErrors(
        gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    "throttle_reasons": throttle_reasons,
    "nvlinks": _nvlinks,
}


def query_gpus() -> list[dict[str, Any]]:
    """All GPUs of this node, by index: ``index``, ``driver`` and ``FIELDS``; None = the driver does not say.

    Raises:
        CommandError: NVML is missing, fails or hangs: no driver, no GPU, or one that is lost.
    """
    return ask(f"{__name__}:read_gpus", timeout_s=TIMEOUT_S)


def read_gpus() -> list[dict[str, Any]]:
    """``query_gpus``, in this process."""
    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        row: dict[str, Any] = {"index": index, "driver": driver}
        for name, read in FIELDS.items():
            try:
                row[name] = read(gpu)
            except (pynvml.NVMLError, LookupError):
                row[name] = None
        found.append(row)
    return found


def query_topology() -> dict[str, dict[str, Any]]:
    """The node's topology, see ``parse_topology``; raises CommandError as ``query_gpus``."""
    return parse_topology(output_of(["nvidia-smi", "topo", "-m"], TIMEOUT_S))


def parse_topology(text: str) -> dict[str, dict[str, Any]]:
    """A matrix as ``nvidia-smi topo -m`` prints it, underlined also where nobody looks.

    Returns:
        ``paths``: {device: {device: path}}; NV<n> = n NVLinks, then PIX, PXB, PHB, NODE, SYS: ever further over PCIe.
        ``nics``: {NIC<n>: its name}, where the matrix numbers them.

    Raises:
        CommandError: it has none.
    """
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    start = next((number for number, words in enumerate(lines) if words[:1] == ["GPU0"]), None)
    if start is None:
        raise CommandError("nvidia-smi topo -m: expected a matrix")
    header = lines[start]
    names = header[: header.index("CPU")] if "CPU" in header else header
    paths, nics = {}, {}
    for words in lines[start + 1 :]:
        if len(words) > len(names) and words[0] in names:
            cells = dict(zip(names, words[1:], strict=False))
            paths[words[0]] = {name: path for name, path in cells.items() if name != words[0]}
        elif len(words) == 2 and re.fullmatch(r"NIC\d+:", words[0]):
            nics[words[0].rstrip(":")] = words[1]
    return {"paths": paths, "nics": nics}


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, Any]]:
    """Ports of all RDMA NICs, as the kernel lists them: nic, number, is_active, rate and link_layer."""

    def read(path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return ""

    return [
        {
            "nic": port.parents[1].name,
            "number": int(port.name),
            "is_active": "ACTIVE" in read(port / "state"),
            "rate": read(port / "rate"),  # 400 Gb/sec (4X NDR)
            "link_layer": read(port / "link_layer") or "InfiniBand",
        }
        for port in sorted(root.glob("*/ports/*"))
    ]
