"""``--dry-run`` of ``run``, ``emulate`` and ``route``: cases, memory and iterations to expect; nothing runs.

Needs no torch where there is no GPU: the plan of a sweep is printed before torch would be imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pynvml

from moe_ep_bench.bench.comparison import MODELLED, RANKS, ROUTING, VIRTUAL, Comparison
from moe_ep_bench.bench.description import describe_workload, device_words, fit_of, held_here
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.cost_model.transport import exchange_words
from moe_ep_bench.layer.te_check import untried
from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.gpus import query_gpus
from moe_ep_bench.runtime.device import device_type, num_gpus
from moe_ep_bench.runtime.exit_codes import OK


def dry_run(
    config: Path, overrides: Sequence[str], backend: str, world_size: int | None = None, point: int | None = None
) -> int:
    """Print the cases of every comparison, and what its runs would take; run nothing, touch no device.

    Args:
        backend: ``ranks``, ``virtual`` or ``routing``.
        world_size: real ranks.
    """
    device = device_type() if backend == RANKS else "cuda" if num_gpus() and backend == VIRTUAL else "cpu"
    with untried():
        comparisons = plan(config, overrides, backend, world_size, on_cpu=device == "cpu", point=point, try_out=False)
    gpu = _gpu_by_driver() if device == "cuda" else {}
    for comparison in comparisons:
        print("\n  ".join(_lines(comparison, device, gpu)))
    return OK


def _lines(comparison: Comparison, device: str, gpu: dict[str, Any]) -> Iterator[str]:
    """The title, the cases, and what they take."""
    backend, title = comparison.backend, comparison.title
    if backend == ROUTING:
        yield f"{title}: {comparison.workload.num_batches} batches"
        yield from _cases(comparison)
        return
    on_ranks = f" on {comparison.world_size} rank(s)" if backend == RANKS else ""
    yield f"{title}{on_ranks}, {describe_workload(comparison)['description']}"
    if comparison.links is not None:
        emulate = comparison.experiment.emulate
        sent = exchange_words(comparison.experiment.layer.dtype, emulate.transport, emulate.dispatch_dtype)
        yield f"{comparison.links.describe()}; {sent}"
    yield from _cases(comparison)
    if backend == MODELLED:
        fit = fit_of(comparison)
        if fit is not None and fit.words:
            yield fit.words
        yield f"{device_words(comparison)}; no {comparison.scope} is run"
        return
    sharing = comparison.world_size if backend == RANKS else 1
    free = provenance.host_memory_bytes(sharing) if device == "cpu" else None
    if gpu:
        free = int(gpu["memory_free_mib"] * 2**20)
    sizes = {name: size / 2**30 for name, size in held_here(comparison).items()}
    memory = f"about {sizes['expert_bytes'] + sizes['other_weight_bytes']:.1f} GiB of weights and "
    memory += f"{sizes['cache_bytes'] + sizes['row_bytes']:.1f} GiB of activations a rank"
    memory += "" if free is None else f", {free / 2**30:.1f} GiB are free"
    if backend == RANKS:
        yield f"{memory}; {comparison.num_iterations() * comparison.experiment.measure.launches:,} iterations"
        return
    runs = f"{comparison.num_iterations():,} runs of a rank's {comparison.scope}"
    yield f"{runs}; {memory}"


def _cases(comparison: Comparison) -> Iterator[str]:
    """The cases of a plan, and on real ranks what routes by each policy."""
    for case in comparison.cases:
        kernel = comparison.kernel_of(case) if comparison.backend == RANKS else None
        yield f"{case.case_id}  {case.role:11}  {case.label}" + (f", routed by {kernel}" if kernel else "")


def _gpu_by_driver() -> dict[str, Any]:
    """The GPU with the least free memory, as the driver has it without a CUDA context; empty = it says nothing."""
    try:
        gpus = [gpu for gpu in query_gpus() if gpu["memory_free_mib"] is not None]
    except pynvml.NVMLError:
        return {}
    return min(gpus, key=lambda gpu: gpu["memory_free_mib"], default={})
