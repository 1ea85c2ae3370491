"""The processor and the GPUs: are they there, does torch get them, and will they run at their speed?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe_ep_bench.machine.doctor.findings import NOTE, OK, PROBLEM, Finding
from moe_ep_bench.machine.monitor import THROTTLE_REASONS
from moe_ep_bench.machine.nvidia_smi import Gpu

# Reasons for a low clock that a healthy GPU in a healthy rack does not show; of the others a power cap only under load.
_SLOWED = {
    "hw_thermal": "it is too hot",
    "sw_thermal": "it is too hot",
    "hw_power_brake": "its power supply brakes it",
    "hw_slowdown": "its hardware slows it down (heat or power)",
    "sync_boost": "it keeps to the clock of its group",
    "display_clocks": "a display sets its clock",
}
# Of memory or time that others take, in per cent; a driver alone takes less.
_MAX_USED = 5.0
# Load per core over the last minute that says that others work here.
_MAX_LOAD = 0.5


def cpu_findings(machine: Mapping[str, Any]) -> list[Finding]:
    """The host, and whether it is quiet."""
    cores, load = machine["num_cores"], machine["load_average"]
    free = machine["host_free_bytes"] / 2**30
    findings = [Finding("CPU", OK, f"{machine['cpu']}, {cores} cores for us, {free:.1f} GiB of memory free")]
    if load > _MAX_LOAD * cores:
        what = f"{load:.1f} processes were running on average over the last minute"
        findings.append(
            Finding("load", NOTE, what, "others' work beside a run disturbs its times", "wait, or stop them")
        )
    return findings


def gpu_findings(machine: Mapping[str, Any], gpus: Sequence[Gpu] | str) -> list[Finding]:
    """Hold what the driver has against what torch can use.

    Args:
        machine: ``facts.machine``.
        gpus: of ``nvidia_smi.query_gpus``, or why there are none.
    """
    usable, hidden = machine["gpus"], machine["variables"].get("CUDA_VISIBLE_DEVICES")
    if isinstance(gpus, str) and not usable:
        # No nvidia-smi is a machine without GPUs; one that fails is a machine with a broken driver.
        if any(words in gpus for words in ("No such file", "No devices were found")):
            return [_none()]
        fix = "look at nvidia-smi and dmesg; the node may have to be restarted"
        return [Finding("GPUs", PROBLEM, f"nvidia-smi: {gpus}", "the driver does not work: no GPU can be used", fix)]
    if not usable and not gpus:
        return [_none()]
    if not usable:
        what = f"{len(gpus)} here, none that torch can use"
        if hidden is not None and hidden.strip() in ("", "-1"):
            return [Finding("GPUs", NOTE, f"{what} (CUDA_VISIBLE_DEVICES={hidden!r})", "runs take the CPU")]
        fix = "install a torch with CUDA that this driver supports (nvidia-smi names its CUDA)"
        return [Finding("GPUs", PROBLEM, f"{what}: {machine['no_gpus_why']}", "runs would take the CPU", fix)]
    findings = [_listed(usable, "" if isinstance(gpus, str) else gpus[0].driver)]
    if isinstance(gpus, str):
        what = f"nvidia-smi: {gpus}"
        findings.append(Finding("driver", NOTE, what, "clocks, power caps and NVLinks cannot be looked at"))
        return findings
    if len({gpu["name"] for gpu in usable}) > 1:
        findings.append(Finding("GPUs", NOTE, "of several kinds", "the slowest one sets every layer's time"))
    mine = {gpu["uuid"] for gpu in usable}
    # What is so of several is said once.
    alike: dict[Finding, list[int]] = {}
    for gpu in gpus:
        for finding in _state(gpu) if gpu.uuid in mine else ():
            alike.setdefault(finding, []).append(gpu.index)
    for finding, indices in alike.items():
        several = f"{', '.join(map(str, indices))}: " if len(indices) > 1 else ""
        check = "GPUs" if several else f"GPU {indices[0]}"
        findings.append(replace(finding, check=check, what=several + finding.what))
    return findings


def _none() -> Finding:
    means = "ranks run on the CPU with gloo, which shows the machinery and no GPU's times; `emulate` models a GPU's"
    return Finding("GPUs", NOTE, "none", means)


def _listed(usable: Sequence[Mapping[str, Any]], driver: str) -> Finding:
    counts: dict[str, int] = {}
    for gpu in usable:
        counts[gpu["name"]] = counts.get(gpu["name"], 0) + 1
    names = ", ".join(f"{count} x {name}" for name, count in counts.items())
    free = min(gpu["free_bytes"] for gpu in usable) / 2**30
    driver = f", driver {driver}" if driver else ""
    return Finding("GPUs", OK, f"{names}{driver}, {free:.1f} GiB free on the fullest")


def _state(gpu: Gpu) -> list[Finding]:
    """What makes one GPU slower than its like, or unusable."""
    findings = []

    def found(status: str, what: str, means: str, remedy: str = "") -> None:
        findings.append(Finding("GPU", status, what, means, remedy))

    if gpu.compute_mode == "Prohibited":
        found(PROBLEM, "compute mode Prohibited", "no process may use it", "nvidia-smi -c DEFAULT, as root")
    if gpu.mig == "Enabled":
        found(NOTE, "MIG is enabled", "a rank gets a slice of a GPU, and NCCL joins no slices of one GPU")
    if gpu.ecc_errors:
        what = f"{gpu.ecc_errors:.0f} uncorrected memory errors since the driver was loaded"
        found(NOTE, what, "results may be wrong and kernels may die", "have it reset or replaced")
    if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < gpu.power_default_w:
        what = f"capped at {gpu.power_limit_w:.0f} W of {gpu.power_default_w:.0f} W"
        found(NOTE, what, "matmuls run slower than on others of its kind; times hold for this cap", "nvidia-smi -pl")
    slowed = [words for reason, words in _SLOWED.items() if (gpu.throttle_reasons or 0) & THROTTLE_REASONS[reason]]
    if slowed:
        clocks = f"{gpu.sm_clock_mhz or 0:.0f} of {gpu.sm_clock_limit_mhz or 0:.0f} MHz, {gpu.temperature_c or 0:.0f} C"
        found(
            NOTE,
            f"throttled now: {slowed[0]} ({clocks})",
            "its rank will be the straggler",
            "mend its cooling or supply",
        )
    used = (
        100 * (1 - gpu.memory_free_mib / gpu.memory_mib) if gpu.memory_mib and gpu.memory_free_mib is not None else 0.0
    )
    if max(used, gpu.utilization_percent or 0.0) > _MAX_USED:
        what = f"{used:.0f} % of its memory is taken, {gpu.utilization_percent or 0:.0f} % of its time"
        found(NOTE, what, "another process uses it and disturbs the times", "nvidia-smi lists it")
    return findings
