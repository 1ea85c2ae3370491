"""What connects GPUs and nodes, and which settings of NCCL change how it is used."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ep_bench.machine.doctor.findings import NOTE, OK, Finding
from moe_ep_bench.machine.nvidia_smi import Port, Topology

# NCCL takes some tens of MB for each GPU of the node from there.
_SHM_BYTES_PER_GPU = 2**26
_SHM = Path("/dev/shm")

# Settings that somebody may have left, and what they cost. None = any value but "0" or nothing.
_COSTLY = {
    ("NCCL_P2P_DISABLE", None): "GPUs do not reach each other's memory: all-to-alls go through the host",
    ("NCCL_SHM_DISABLE", None): "GPUs without a direct path talk over the network inside of one node",
    ("NCCL_IB_DISABLE", None): "nodes talk over TCP instead of RDMA",
    ("NCCL_NET_GDR_LEVEL", "LOC"): "what travels between nodes is copied through host memory",
    ("NCCL_DEBUG", "INFO"): "NCCL writes a log while a run is timed",
    ("NCCL_DEBUG", "TRACE"): "NCCL writes a log while a run is timed",
    ("CUDA_LAUNCH_BLOCKING", None): "every kernel waits for the one before it: no time means anything",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked by another one, in timed runs too",
    ("TORCH_NCCL_BLOCKING_WAIT", None): "the host waits for every collective, in timed runs too",
    ("TRITON_INTERPRET", None): "Triton's kernels run in its interpreter, thousands of times slower",
}


def topology_findings(topology: Topology | str, nvlinks: Mapping[int, Sequence[float | None]] | str) -> list[Finding]:
    """Paths between GPUs, and from GPUs to NICs.

    Args:
        topology: of ``nvidia_smi.query_topology``, or why there is none.
        nvlinks: of ``nvidia_smi.query_nvlinks``, likewise.
    """
    if isinstance(topology, str):
        return [Finding("topology", NOTE, f"unknown ({topology})", "what connects the GPUs cannot be said")]
    findings = []
    paths = topology.between_gpus()
    if paths:
        listed = ", ".join(f"{count} x {path}" for path, count in Counter(paths.values()).most_common())
        over_pcie = [pair for pair, path in paths.items() if not path.startswith("NV")]
        if over_pcie:
            what = f"{len(over_pcie)} of {len(paths)} pairs of GPUs have no NVLink ({listed})"
            means = "their all-to-all goes over PCIe, an order of magnitude slower"
            findings.append(Finding("topology", NOTE, what, means, "take GPUs that are connected"))
        else:
            findings.append(Finding("topology", OK, f"NVLink between all GPUs ({listed} pairs)"))
    dead = {} if isinstance(nvlinks, str) else {gpu: sum(s is None for s in links) for gpu, links in nvlinks.items()}
    if any(dead.values()) and paths:
        listed = ", ".join(f"GPU {gpu}: {count} of {len(nvlinks[gpu])}" for gpu, count in dead.items() if count)
        means = "the all-to-all is slower than this machine could; some boards leave links unconnected"
        findings.append(Finding("NVLink", NOTE, f"inactive links ({listed})", means, "nvidia-smi nvlink --status"))
    near = {gpu: topology.nearest_nic(gpu) for gpu in topology.gpus}
    far = [gpu for gpu, nic in near.items() if nic is not None and nic[1] in ("NODE", "SYS")]
    if far:
        what = f"{', '.join(far)} reach their nearest NIC across the host ({near[far[0]][1]})"
        findings.append(Finding("NICs", NOTE, what, "between nodes these ranks are slower than with a NIC beside them"))
    return findings


def nic_findings(ports: Sequence[Port]) -> list[Finding]:
    """RDMA between nodes."""
    active = [port for port in ports if port.is_active]
    if not active:
        what = "no RDMA NIC" if not ports else f"none of {len(ports)} RDMA ports is active"
        return [Finding("NICs", NOTE, what, "one node is fine; between nodes collectives go over TCP, far slower")]
    kinds = Counter(f"{port.rate} {port.link_layer}" for port in active)
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    findings = [Finding("NICs", OK, f"RDMA: {listed}")]
    if len(active) < len(ports):
        idle = ", ".join(f"{port.nic}:{port.number}" for port in ports if not port.is_active)
        findings.append(Finding("NICs", NOTE, f"ports that are down: {idle}", "less bandwidth between nodes"))
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        means = "RDMA pins memory, and may fail for large buffers"
        findings.append(Finding("NICs", NOTE, "locked memory is limited", means, "ulimit -l unlimited, in the job too"))
    return findings


def shared_memory_findings(num_gpus: int, folder: Path = _SHM) -> list[Finding]:
    """What NCCL needs where several GPUs of a node work together."""
    needed = num_gpus * _SHM_BYTES_PER_GPU
    try:
        space = os.statvfs(folder)
    except OSError:
        return []
    free = space.f_bavail * space.f_frsize
    if num_gpus < 2 or free >= needed:
        return []
    what = f"{free / 2**20:.0f} MiB free in {folder}"
    means = f"NCCL may fail there with {num_gpus} GPUs (about {needed / 2**20:.0f} MiB, an estimate)"
    return [Finding("NCCL", NOTE, what, means, "give the container more: docker run --shm-size=8g")]


def nccl_findings(machine: Mapping[str, Any]) -> list[Finding]:
    """NCCL's version, and all settings that change what is measured."""
    version, variables = machine["packages"]["nccl"], machine["variables"]
    findings = []
    if machine["gpus"]:
        settings = ", ".join(f"{name}={value}" for name, value in variables.items() if "NCCL" in name)
        findings.append(Finding("NCCL", OK, f"{version}, {settings or 'no variable of its own is set'}"))
    for (name, value), means in _COSTLY.items():
        found = variables.get(name, "")
        if (found.upper() == value) if value else found not in ("", "0"):
            findings.append(Finding("settings", NOTE, f"{name}={found}", means, f"unset {name}"))
    return findings
