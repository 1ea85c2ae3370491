"""``route``: what policies do to loads, work and score mass, on any number of virtual ranks; nothing is timed.

A routing decision needs scores and nothing else, so that a laptop can answer how many experts a batch activates
or how full the fullest of 256 ranks would be. Batches are made and dealt to virtual ranks exactly as ``run`` deals
them to real ones, and a policy sees what it would see there. ``on_cpu`` is not applied: a size that is too much work
for a CPU's experts is none for routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moe_ep_bench.bench.comparison import ROUTING, CaseSpec, Comparison
from moe_ep_bench.bench.description import routed_facts, run_json
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.routing import one_thread
from moe_ep_bench.bench.rows import identity, write_routing
from moe_ep_bench.bench.run import fill
from moe_ep_bench.bench.traffic import RoutedBatches
from moe_ep_bench.errors import progress_bar
from moe_ep_bench.machine import provenance
from moe_ep_bench.results import RunDirectory

_CPU = torch.device("cpu")


def route(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> RunDirectory:
    """Route every batch of every comparison of ``config`` by every policy and write the rows.

    Args:
        out: results directory; cases whose rows are in it are not routed again unless ``force``.

    Raises:
        ValueError: one line naming the file, the key and what is allowed; or why ``out`` cannot be used.
    """
    comparisons = plan(config, overrides, ROUTING)
    directory = RunDirectory(out)

    def routed(run_id: str, comparison: Comparison, cases: Sequence[CaseSpec]) -> None:
        batches, num_batches = RoutedBatches(comparison, cases, _CPU), comparison.workload.num_batches
        progress = progress_bar(num_batches, "batch", comparison.title)
        with one_thread(), torch.inference_mode(), progress:
            for index in range(num_batches):
                batches.route(index)
                progress.update()
        facts = {case.case_id: identity(run_id, comparison, case) for case in cases}
        write_routing(directory, comparison, facts, batches.rows, batches.frontiers)

    fill(
        directory,
        comparisons,
        "routing",
        {"torch": torch.__version__},
        lambda run_id: run_json(run_id, comparisons, provenance.describe(_CPU), routed_facts),
        routed,
        force=force,
    )
    return directory
