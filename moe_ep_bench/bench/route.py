"""``route``: what policies do to loads, work and score mass, on any number of virtual ranks; nothing is timed.

A routing decision needs scores and nothing else, so that a laptop can answer how many experts a batch activates
or how full the fullest of 256 ranks would be. Batches are made and dealt to virtual ranks exactly as ``run`` deals
them to real ones, and a policy sees what it would see there. ``on_cpu`` is not applied: a size that is too much work
for a CPU's experts is none for routing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from moe_ep_bench.bench.cases import CaseSpec
from moe_ep_bench.bench.description import describe_run
from moe_ep_bench.bench.job import fill, identity
from moe_ep_bench.bench.plan import ROUTING, Comparison, plan
from moe_ep_bench.bench.replicas import Replicas
from moe_ep_bench.bench.routing import Batches, CarriedLoads, CaseRouter, one_thread
from moe_ep_bench.bench.rows import PackedMetrics, routing_columns, write_frontier
from moe_ep_bench.bench.traffic import traffic_of
from moe_ep_bench.layer.host import free_memory
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

    def routed(run_id: str, comparison: Comparison, cases: Sequence[CaseSpec], progress: tqdm) -> None:
        with one_thread(), torch.inference_mode():
            _route_comparison(directory, run_id, comparison, cases, progress)
        free_memory(_CPU)  # what is kept of batches holds itself, and may be gigabytes

    fill(
        directory,
        comparisons,
        "route",
        "routing",
        {"torch": torch.__version__},
        lambda run_id: describe_run(run_id, comparisons, provenance.describe(_CPU)),
        routed,
        unit=("batch", lambda comparison, cases: comparison.workload.num_batches),
        force=force,
    )
    return directory


def _route_comparison(
    directory: RunDirectory, run_id: str, comparison: Comparison, cases: Sequence[CaseSpec], progress: tqdm
) -> None:
    """Route ``cases`` and write their parts."""
    layer, batches, num_batches = (
        comparison.experiment.layer,
        Batches(comparison, _CPU),
        comparison.workload.num_batches,
    )
    carried, replicas = CarriedLoads(batches), Replicas(batches)
    metrics = [PackedMetrics(comparison.ep_size, num_batches) for _ in cases]
    frontiers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for index in range(num_batches):
        routers = [CaseRouter(case, replicas.slots(case, index), layer.seed, carried) for case in cases]
        for case, packed, traffic in zip(cases, metrics, traffic_of(batches, None, index, routers), strict=True):
            packed.put((slice(None), index), traffic.metrics)
            if traffic.frontier is not None:
                frontiers[case.case_id].append({"batch": index, "layer": comparison.layer, **traffic.frontier})
        progress.update()
    for case, packed in zip(cases, metrics, strict=True):
        write_frontier(directory, comparison, case, frontiers[case.case_id])
        columns = routing_columns(packed, [comparison.layer])
        directory.write("routing", case.case_id, {**identity("route", run_id, comparison, case), **columns})
