"""Claims about reading nvidia-smi and the kernel's list of NICs, on texts of their form."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ep_bench.machine.nvidia_smi import (
    _FIELDS,
    parse_nvlinks,
    parse_topology,
    query_gpus,
    query_topology,
    rdma_ports,
)
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
OLD_DRIVER = (
    "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tPHB\tPIX\t0-7\nGPU1\tPHB\t X \tPHB\t0-7\nmlx5_0\tPIX\tPHB\t X \t\n"
)
NVLINKS = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
)
GPU_LINE = {
    "index": "0",
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-aaaa",
    "driver": "570.86.15",
    "memory_mib": "81559",
    "memory_free_mib": "81077",
    "utilization_percent": "0",
    "temperature_c": "31",
    "sm_clock_mhz": "345",
    "sm_clock_limit_mhz": "1980",
    "power_w": "71.52",
    "power_limit_w": "700.00",
    "power_default_w": "700.00",
    "compute_mode": "Default",
    "mig": "Disabled",
    "ecc_errors": "0",
    "event_reasons": "0x0000000000000001",
    "throttle_reasons": "0x0000000000000001",
}


def answering(unknown: tuple[str, ...] = (), **cells: str):
    """A driver with one GPU that knows all fields but some."""

    def run(command: list[str], timeout_s: float) -> str:
        fields = command[1].removeprefix("--query-gpu=").split(",")
        for field in fields:
            if field in unknown:
                raise CommandError(f'ended with status 2: Field "{field}" is not a valid field to query.')
        names = {field: key for key, field in _FIELDS.items()}
        return ", ".join({**GPU_LINE, **cells}[names[field]] for field in fields) + "\n"

    return run


def test_a_gpu_is_read_field_by_field() -> None:
    (gpu,) = query_gpus(answering())
    assert (gpu.index, gpu.name, gpu.uuid, gpu.driver) == (0, "NVIDIA H100 80GB HBM3", "GPU-aaaa", "570.86.15")
    assert (gpu.memory_mib, gpu.memory_free_mib, gpu.power_w, gpu.power_limit_w) == (81559, 81077, 71.52, 700)
    assert (gpu.sm_clock_mhz, gpu.sm_clock_limit_mhz, gpu.throttle_reasons) == (345, 1980, 1)
    assert (gpu.compute_mode, gpu.mig) == ("Default", "Disabled")


@pytest.mark.parametrize("cell", ["[N/A]", "N/A", "[Not Supported]", "[GPU requires reset]", "[Unknown Error]"])
def test_what_the_driver_does_not_say_is_unknown_and_not_zero(cell: str) -> None:
    (gpu,) = query_gpus(answering(power_limit_w=cell, mig=cell, ecc_errors=cell))
    assert (gpu.power_limit_w, gpu.mig, gpu.ecc_errors) == (None, None, None)


def test_a_failing_driver_is_an_error_with_its_words() -> None:
    def fails(command: list[str], timeout_s: float) -> str:
        raise CommandError("ended with status 9: NVIDIA-SMI has failed because it couldn't communicate with the driver")

    with pytest.raises(CommandError, match="couldn't communicate"):
        query_gpus(fails)
    with pytest.raises(CommandError, match="couldn't communicate"):
        query_topology(fails)


def test_topology_names_paths_and_nics() -> None:
    topology = parse_topology(TWO_H100)
    assert topology.gpus == ["GPU0", "GPU1"]
    assert topology.between_gpus() == {("GPU0", "GPU1"): "NV18"}
    assert topology.nics == {"NIC0": "mlx5_0", "NIC1": "mlx5_1"}
    assert topology.nearest_nic("GPU0") == ("mlx5_0", "PIX")
    assert topology.nearest_nic("GPU1") == ("mlx5_1", "NODE")


def test_nvlinks_are_counted_by_gpu_and_inactive_ones_told_apart() -> None:
    assert parse_nvlinks(NVLINKS) == {0: [26.562, None], 1: [26.562, 26.562]}
    assert parse_nvlinks("GPU 0: NVIDIA L4 (UUID: GPU-a)\n") == {}


def leave_port(root: Path, nic: str, state: str, layer: str = "InfiniBand") -> None:
    folder = root / nic / "ports" / "1"
    folder.mkdir(parents=True)
    for name, value in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", layer)):
        (folder / name).write_text(f"{value}\n")


def test_rdma_ports_are_read_from_the_kernel(tmp_path: Path) -> None:
    leave_port(tmp_path, "mlx5_0", "4: ACTIVE")
    leave_port(tmp_path, "mlx5_1", "1: DOWN", "Ethernet")
    up, down = rdma_ports(tmp_path)
    assert (up.nic, up.number, up.is_active, up.rate, up.link_layer) == (
        "mlx5_0",
        1,
        True,
        "400 Gb/sec (4X NDR)",
        "InfiniBand",
    )
    assert (down.is_active, down.link_layer) == (False, "Ethernet")
    assert rdma_ports(tmp_path / "nothing") == []
