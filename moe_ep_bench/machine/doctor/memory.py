"""Does a config fit this machine: its ranks, and the memory that each needs at its fullest?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_ep_bench.machine.doctor.findings import NOTE, OK, PROBLEM, Finding


def ranks_findings(machine: Mapping[str, Any], nproc: int) -> list[Finding]:
    """So many ranks on this node."""
    num_gpus, cores = len(machine["gpus"]), machine["num_cores"]
    if num_gpus and nproc > num_gpus:
        what = f"{nproc} on this node, which has {num_gpus} GPUs that torch can use"
        return [Finding("ranks", PROBLEM, what, "each needs one of its own", f"--nproc {num_gpus}")]
    if not num_gpus and nproc > cores:
        what = f"{nproc} on {cores} cores"
        return [Finding("ranks", NOTE, what, "they share time slices; no straggler speedup is claimed")]
    return []


def available_bytes(machine: Mapping[str, Any], nproc: int) -> int:
    """What each of a node's ranks may still take: the fullest GPU's rest, or a share of the host's."""
    gpus = machine["gpus"][:nproc]
    return min(gpu["free_bytes"] for gpu in gpus) if gpus else machine["host_free_bytes"] // nproc


def memory_findings(comparisons: Sequence[Mapping[str, Any]], available: int) -> list[Finding]:
    """Hold what every comparison needs per rank (an estimate) against what is free.

    Args:
        comparisons: of ``facts.plan``.
        available: bytes that each rank may take.
    """
    most = max(comparisons, key=lambda one: one["memory_bytes"])
    needs = f"about {most['memory_bytes'] / 2**30:.1f} GiB of {available / 2**30:.1f} GiB that are free per rank"
    too_large = sum(one["memory_bytes"] > available for one in comparisons)
    cases = sum(len(one["cases"]) for one in comparisons)
    if not too_large:
        what = (
            f"{cases} cases in {len(comparisons)} comparison{'s' * (len(comparisons) > 1)}, the largest takes {needs}"
        )
        return [Finding("memory", OK, what)]
    what = f"{too_large} of {len(comparisons)} comparisons need more than there is; {most['title']} needs {needs}"
    remedy = "more ranks, fewer workload.num_tokens or num_batches, or a smaller model.scale"
    return [Finding("memory", PROBLEM, what, "they would be skipped, the rest would run", remedy)]
