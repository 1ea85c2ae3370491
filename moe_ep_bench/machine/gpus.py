"""What the driver says of a node's GPUs, by NVML: of all of them, whatever CUDA_VISIBLE_DEVICES hides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

# Bits of ``throttle_reasons``. Idling and a clock that somebody set are reasons for a low clock too, but no throttling.
THROTTLE_REASONS = {
    "power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}

# How NVML is asked; names have the unit. An error of one costs only itself.
FIELDS: dict[str, Callable[[Any], Any]] = {
    "name": lambda gpu: pynvml.nvmlDeviceGetName(gpu),
    "uuid": lambda gpu: pynvml.nvmlDeviceGetUUID(gpu),
    "memory_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**20,
    "memory_free_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).free / 2**20,
    "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "sm_clock_limit_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "power_default_w": lambda gpu: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3,
    "mig": lambda gpu: "Enabled" if pynvml.nvmlDeviceGetMigMode(gpu)[0] else "Disabled",
    "throttle_reasons": lambda gpu: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),  # from driver 535 on
}


def query_gpus() -> list[dict[str, Any]]:
    """All GPUs of this node, by index: ``index``, ``driver`` and ``FIELDS``; None = the driver does not say.

    Raises:
        pynvml.NVMLError: there is no driver, or it has lost its GPU.
    """
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
