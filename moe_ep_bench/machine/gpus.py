"""What the driver says of a node's GPUs; a driver that hangs holds nobody up.

NVML, the driver's own library, sees all GPUs of the node, whatever CUDA_VISIBLE_DEVICES hides. It is asked in a child
process with a timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from moe_ep_bench.machine.subprocesses import ask

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


def throttle_reasons(gpu: Any) -> int:
    """Bits of ``THROTTLE_REASONS``."""
    try:
        return pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except pynvml.nvmlExceptionClass(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
        # Older drivers have it under its first name only.
        return pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)


# How NVML is asked; names have the unit. An error of one costs only itself.
FIELDS: dict[str, Callable[[Any], Any]] = {
    "name": pynvml.nvmlDeviceGetName,
    "uuid": pynvml.nvmlDeviceGetUUID,
    "memory_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**20,
    "memory_free_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).free / 2**20,
    "utilization_percent": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "temperature_c": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "sm_clock_limit_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "power_default_w": lambda gpu: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3,
    "mig": lambda gpu: "Enabled" if pynvml.nvmlDeviceGetMigMode(gpu)[0] else "Disabled",
    # Uncorrected ones, since the driver was loaded.
    "ecc_errors": lambda gpu: pynvml.nvmlDeviceGetTotalEccErrors(
        gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    "throttle_reasons": throttle_reasons,
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
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        row: dict[str, Any] = {"index": index, "driver": driver}
        for name, read in FIELDS.items():
            try:
                row[name] = read(handle)
            except (pynvml.NVMLError, LookupError):
                row[name] = None
        gpus.append(row)
    return gpus
