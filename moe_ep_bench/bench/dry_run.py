"""``--dry-run`` of ``run``, ``emulate`` and ``route``: cases, memory and iterations to expect; nothing runs.

Needs no torch where there is no GPU: the plan of a sweep is printed before torch would be imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pynvml

from moe_ep_bench.bench.comparison import MODELLED, RANKS, ROUTING, VIRTUAL, Comparison
from moe_ep_bench.bench.description import describe_workload, device_words, fit_of, held_here
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.cost_model.transport import exchange_words
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
    comparisons = plan(config, overrides, backend, world_size, on_cpu=device == "cpu", point=point, try_out=False)
    free_bytes = provenance.host_memory_bytes(world_size or 1)
    if device == "cuda":  # As the driver has it, without a CUDA context.
        with contextlib.suppress(pynvml.NVMLError, ValueError):
            free_bytes = min(int((gpu["memory_free_mib"] or 0) * 2**20) for gpu in query_gpus())
    for comparison in comparisons:
        print("\n  ".join(_lines(comparison, free_bytes)))
    return OK


def _lines(comparison: Comparison, free_bytes: int) -> Iterator[str]:
    """The title, the cases, and what they take."""
    backend, experiment = comparison.backend, comparison.experiment
    batches = f"{comparison.workload.num_batches} batches of {describe_workload(comparison)['description']}"
    yield f"{comparison.title} on {comparison.world_size} rank(s), {batches}"
    if comparison.links is not None:
        sent = exchange_words(experiment.layer.dtype, experiment.emulate.transport, experiment.emulate.dispatch_dtype)
        yield f"{comparison.links.describe()}; {sent}"
    for case in comparison.cases:
        kernel = comparison.kernel_of(case) if backend == RANKS else None
        yield f"{case.case_id}  {case.role:11}  {case.label}" + (f", routed by {kernel}" if kernel else "")
    if backend == MODELLED:
        fit = fit_of(comparison)
        yield "; ".join([*([fit.words] if fit and fit.words else []), f"{device_words(comparison)}: nothing is run"])
    elif backend != ROUTING:
        sizes = {name: size / 2**30 for name, size in held_here(comparison).items()}
        weights, rest = sizes["expert_bytes"] + sizes["other_weight_bytes"], sizes["cache_bytes"] + sizes["row_bytes"]
        memory = f"about {weights:.1f} GiB of weights and {rest:.1f} GiB of activations a rank"
        number = comparison.num_iterations() * (experiment.measure.launches if backend == RANKS else 1)
        yield f"{memory}, {free_bytes / 2**30:.1f} GiB are free; {number:,} iterations"
