"""Claims about reading GPUs by NVML, their topology and the kernel's list of NICs, on made-up answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from moe_ep_bench.machine import gpus
from moe_ep_bench.machine.gpus import parse_topology, query_gpus, query_topology, rdma_ports, read_gpus
from moe_ep_bench.machine.subprocesses import CommandError

# Tabs and underlining as nvidia-smi prints them, into a pipe too.
TWO_H100 = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\tSYS\t0-51,104-155\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tNODE\t52-103,156-207\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tNODE\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n\n"
)
ONE_GPU = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"
OLD_DRIVER = (
    "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tPHB\tPIX\t0-7\nGPU1\tPHB\t X \tPHB\t0-7\nmlx5_0\tPIX\tPHB\t X \t\n"
)
# One GPU as ``query_gpus`` gives it.
H100 = {
    "index": 0, "driver": "570.86.15", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "memory_mib": 81559.0,
    "memory_free_mib": 81077.0, "utilization_percent": 0, "temperature_c": 31, "sm_clock_mhz": 345,
    "memory_clock_mhz": 2619, "sm_clock_limit_mhz": 1980, "power_w": 71.52, "power_limit_w": 700.0,
    "power_default_w": 700.0, "compute_mode": "Default", "mig": "Disabled", "ecc_errors": 0, "throttle_reasons": 1,
    "nvlinks": [True] * 18,
}  # fmt: skip


def links(gpu: object, link: int) -> int:
    if link >= 18:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return 1


ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "570.86.15",
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: "handle",
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=81559 * 2**20, free=81077 * 2**20),
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=0),
    "nvmlDeviceGetTemperature": lambda gpu, sensor: 31,
    "nvmlDeviceGetClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: 345, pynvml.NVML_CLOCK_MEM: 2619}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: 1980,
    "nvmlDeviceGetPowerUsage": lambda gpu: 71_520,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: 700_000,
    "nvmlDeviceGetComputeMode": lambda gpu: pynvml.NVML_COMPUTEMODE_DEFAULT,
    "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: 0,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 1,
    "nvmlDeviceGetNvLinkState": links,
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
    nvml.setattr(pynvml, "nvmlDeviceGetNvLinkState", failing(pynvml.NVML_ERROR_NOT_SUPPORTED))
    unknown = dict.fromkeys(("power_limit_w", "mig", "ecc_errors"))
    assert read_gpus() == [{**H100, **unknown, "nvlinks": []}]


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


def test_without_nvidia_smi_there_is_no_topology_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CommandError, match="nvidia-smi: No such file or directory"):
        query_topology()


def test_topology_names_paths_and_nics() -> None:
    assert parse_topology(TWO_H100) == {
        "paths": {
            "GPU0": {"GPU1": "NV18", "NIC0": "PIX", "NIC1": "SYS"},
            "GPU1": {"GPU0": "NV18", "NIC0": "SYS", "NIC1": "NODE"},
            "NIC0": {"GPU0": "PIX", "GPU1": "SYS", "NIC1": "SYS"},
            "NIC1": {"GPU0": "SYS", "GPU1": "NODE", "NIC0": "SYS"},
        },
        "nics": {"NIC0": "mlx5_0", "NIC1": "mlx5_1"},
    }


def test_topology_of_one_gpu_and_of_old_drivers_is_read() -> None:
    assert parse_topology(ONE_GPU)["paths"] == {"GPU0": {}}
    assert parse_topology(OLD_DRIVER)["paths"]["GPU1"] == {"GPU0": "PHB", "mlx5_0": "PHB"}
    with pytest.raises(CommandError, match="expected a matrix"):
        parse_topology("Failed to initialize NVML")


def leave_port(root: Path, nic: str, state: str, layer: str = "InfiniBand") -> None:
    folder = root / nic / "ports" / "1"
    folder.mkdir(parents=True)
    for name, value in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", layer)):
        (folder / name).write_text(f"{value}\n")


def test_rdma_ports_are_read_from_the_kernel(tmp_path: Path) -> None:
    leave_port(tmp_path, "mlx5_0", "4: ACTIVE")
    leave_port(tmp_path, "mlx5_1", "1: DOWN", "Ethernet")
    rate = "400 Gb/sec (4X NDR)"
    assert rdma_ports(tmp_path) == [
        {"nic": "mlx5_0", "number": 1, "is_active": True, "rate": rate, "link_layer": "InfiniBand"},
        {"nic": "mlx5_1", "number": 1, "is_active": False, "rate": rate, "link_layer": "Ethernet"},
    ]
    assert rdma_ports(tmp_path / "nothing") == []
