"""Claims about reading GPUs by NVML, on made-up answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from moe_ep_bench.machine import gpus
from moe_ep_bench.machine.gpus import query_gpus, read_gpus
from moe_ep_bench.machine.subprocesses import CommandError

# One GPU as ``query_gpus`` gives it.
H100 = {
    "index": 0, "driver": "570.86.15", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "memory_mib": 81559.0,
    "memory_free_mib": 81077.0, "utilization_percent": 0, "temperature_c": 31, "sm_clock_mhz": 345,
    "sm_clock_limit_mhz": 1980, "power_w": 71.52, "power_limit_w": 700.0,
    "power_default_w": 700.0, "mig": "Disabled", "ecc_errors": 0, "throttle_reasons": 1,
}  # fmt: skip


ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "570.86.15",
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: "handle",
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=81559 * 2**20, free=81077 * 2**20),
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=0),
    "nvmlDeviceGetTemperature": lambda gpu, sensor: 31,
    "nvmlDeviceGetClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: 345}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: 1980,
    "nvmlDeviceGetPowerUsage": lambda gpu: 71_520,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: 700_000,
    "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: 0,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 1,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A driver with one GPU."""
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setitem(gpus.FIELDS, "name", lambda gpu: "NVIDIA H100 80GB HBM3")
    monkeypatch.setitem(gpus.FIELDS, "uuid", lambda gpu: "GPU-0")
    return monkeypatch


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise pynvml.NVMLError(error)

    return fail


def test_a_gpu_is_read_field_by_field_in_the_units_of_the_names(nvml: pytest.MonkeyPatch) -> None:
    assert read_gpus() == [H100]


def test_what_the_driver_does_not_say_is_unknown_and_not_zero(nvml: pytest.MonkeyPatch) -> None:
    for name in ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetMigMode", "nvmlDeviceGetTotalEccErrors"):
        nvml.setattr(pynvml, name, failing(pynvml.NVML_ERROR_NOT_SUPPORTED))
    unknown = dict.fromkeys(("power_limit_w", "mig", "ecc_errors"))
    assert read_gpus() == [{**H100, **unknown}]


def test_an_older_driver_is_asked_for_its_reasons_by_the_older_name(nvml: pytest.MonkeyPatch) -> None:
    nvml.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", failing(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    nvml.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda gpu: 64)
    assert read_gpus()[0]["throttle_reasons"] == 64


# What stands in for NVML in the child process that ``query_gpus`` starts.
FAKE = """
from unittest.mock import MagicMock
import time
class NVMLError(Exception): pass
def nvmlInit(): {what}
def nvmlSystemGetDriverVersion(): return "570"
def nvmlDeviceGetCount(): return 0
def __getattr__(name): return MagicMock()
"""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("pass", None),
        ("raise NVMLError('Driver Not Loaded')", "pynvml.NVMLError: Driver Not Loaded"),
        ("time.sleep(3600)", "no answer within 5 s"),
    ],
)
def test_nvml_is_asked_in_a_process_that_may_fail_or_hang(
    what: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE.format(what=what))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(gpus, "TIMEOUT_S", 5.0 if why and "5 s" in why else 200.0)
    if why is None:
        assert query_gpus() == []
    else:
        with pytest.raises(CommandError) as caught:
            query_gpus()
        assert str(caught.value) == why
