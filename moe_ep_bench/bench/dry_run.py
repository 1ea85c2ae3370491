"""``--dry-run`` of ``run``, ``emulate`` and ``route``: cases, memory and arithmetic to expect; nothing runs.

Needs no torch where there is no GPU: the plan of a sweep is printed before torch would be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pynvml

from moe_ep_bench.bench.plan import RANKS, ROUTING, VIRTUAL, Comparison, plan
from moe_ep_bench.cost_model.devices import device_of_gpu
from moe_ep_bench.cost_model.transport import exchange_words
from moe_ep_bench.layer.te_check import untried
from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.gpus import query_gpus
from moe_ep_bench.runtime.device import device_type, num_gpus
from moe_ep_bench.runtime.exit_codes import OK


def dry_run(config: Path, overrides: Sequence[str], world_size: int, point: int | None = None) -> int:
    """Print the cases, the memory that each rank needs and the arithmetic to expect; run nothing, touch no device."""
    device = device_type()
    with untried():
        comparisons = plan(config, overrides, RANKS, world_size, on_cpu=device == "cpu", point=point, try_out=False)
    gpu = _gpu_by_driver() if device == "cuda" else {}
    for comparison in comparisons:
        print(f"{comparison.title} on {world_size} rank(s), {_asked_for(comparison)}")
        _print_cases(comparison, device)
        print(f"  {comparison.need.describe(_free_bytes(device, gpu, world_size))}; {_work_words(comparison, gpu)}")
    return OK


def dry_run_virtual(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases and how often a layer would be run, or nothing where it is modelled; run nothing."""
    device = "cuda" if num_gpus() else "cpu"
    with untried():
        comparisons = plan(config, overrides, VIRTUAL, on_cpu=device == "cpu", try_out=False)
    gpu = _gpu_by_driver() if device == "cuda" else {}
    for comparison in comparisons:
        assert comparison.links is not None
        emulate, dtype = comparison.experiment.emulate, comparison.experiment.layer.dtype
        sent = exchange_words(dtype, emulate.transport, emulate.dispatch_dtype)
        print(f"{comparison.title}, {_asked_for(comparison)}")
        print(f"  {comparison.links.describe()}; {sent}")
        _print_cases(comparison)
        # What a GPU that is here has is not asked: a dry run touches no device.
        if comparison.device is not None and comparison.fit is not None and comparison.fit.words:
            print(f"  {comparison.fit.words}")
        subject = comparison.subject.name
        if comparison.device is not None:
            print(f"  {comparison.describe_device()}; no {subject} is run")
            continue
        runs = (
            f"{comparison.num_iterations():,} runs of a rank's {subject} at most, fewer where ranks have the same to do"
        )
        print(f"  {runs}; {comparison.need.describe(_free_bytes(device, gpu, 1))}")
    return OK


def dry_run_routing(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases; route nothing."""
    for comparison in plan(config, overrides, ROUTING, try_out=False):
        print(f"{comparison.title}: {comparison.workload.num_batches} batches")
        _print_cases(comparison)
    return OK


def _asked_for(comparison: Comparison) -> str:
    """The workload in words, without what its batches would turn out to be: none is made."""
    for workload in comparison.subject.workloads.values():
        workload.forgo_survey()
    return comparison.describe_workload()["description"]


def _print_cases(comparison: Comparison, device: str | None = None) -> None:
    """Print the cases of a plan; with a device also what routes by each policy there."""
    for case in comparison.cases:
        kernel = device and comparison.kernel_of(case, device)
        print(f"  {case.case_id}  {case.role:11}  {case.label}" + (f", routed by {kernel}" if kernel else ""))


def _gpu_by_driver() -> dict[str, Any]:
    """The GPU with the least free memory, as the driver has it without a CUDA context; empty = it says nothing."""
    try:
        gpus = [gpu for gpu in query_gpus() if gpu["memory_free_mib"] is not None]
    except pynvml.NVMLError:
        return {}
    return min(gpus, key=lambda gpu: gpu["memory_free_mib"], default={})


def _free_bytes(device: str, gpu: dict[str, Any], ranks_per_node: int) -> int | None:
    """Memory that a rank may take; None = unknown."""
    if device == "cpu":
        return provenance.host_memory_bytes(ranks_per_node)
    return int(gpu["memory_free_mib"] * 2**20) if gpu else None


def _work_words(comparison: Comparison, gpu: dict[str, Any]) -> str:
    """The arithmetic of a rank, and the least time that it takes where a file of data/devices/ has this GPU."""
    iterations = comparison.num_iterations() * comparison.experiment.measure.launches
    num_operations = comparison.subject.flops_per_rank() * iterations
    said = f"{iterations:,} iterations with {num_operations / 1e12:.3g} TFLOP a rank"
    known = device_of_gpu(gpu["name"]) if gpu else None
    if known is None or comparison.experiment.layer.dtype != "bfloat16":
        return said
    seconds = num_operations / (known.bf16_tflops * 1e12)
    return (
        f"{said}, at least {seconds:.0f} s (modelled: the data sheet's arithmetic, devices/{known.name}; no transfers)"
    )
