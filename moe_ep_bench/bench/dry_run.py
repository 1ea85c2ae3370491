"""``--dry-run`` of ``run``, ``emulate`` and ``route``: cases, memory and iterations to expect; nothing runs.

Needs no torch where there is no GPU: the plan of a sweep is printed before torch would be imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_ep_bench.bench.comparison import MODELLED, RANKS, ROUTING, Comparison
from moe_ep_bench.bench.description import device_words, fit_of, held_here, workload_facts
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.errors import OK


def dry_run(
    config: Path, overrides: Sequence[str], backend: str, world_size: int | None = None, point: int | None = None
) -> int:
    """Print the cases of every comparison, and what its runs would take; run nothing, touch no device.

    Args:
        backend: ``ranks``, ``virtual`` or ``routing``.
        world_size: real ranks.
    """
    comparisons = plan(config, overrides, backend, world_size, point=point, try_out=False)
    for comparison in comparisons:
        print("\n  ".join(_lines(comparison)))
    return OK


def _lines(comparison: Comparison) -> Iterator[str]:
    """The title, the cases, and what they take."""
    backend = comparison.backend
    batches = f"{comparison.workload.num_batches} batches of {workload_facts(comparison).description}"
    yield f"{comparison.title} on {comparison.world_size} rank(s), {batches}"
    for case in comparison.cases:
        kernel = comparison.kernel_of(case) if backend == RANKS else None
        yield f"{case.case_id}  {case.role:11}  {case.label}" + (f", routed by {kernel}" if kernel else "")
    if backend == MODELLED:
        fit = fit_of(comparison)
        yield "; ".join([*([fit.words] if fit and fit.words else []), f"{device_words(comparison)}: nothing is run"])
    elif backend != ROUTING:
        sizes = {name: size / 2**30 for name, size in held_here(comparison).items()}
        weights, rest = sizes["expert_bytes"] + sizes["other_weight_bytes"], sizes["cache_bytes"] + sizes["row_bytes"]
        number = comparison.iterations_per_case * len(comparison.cases) * comparison.experiment.measure.launches
        yield f"about {weights:.1f} GiB of weights and {rest:.1f} GiB of activations a rank; {number:,} iterations"
