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

import numpy as np
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
from moe_ep_bench.machine import provenance
from moe_ep_bench.metrics import score_order, token_overlap
from moe_ep_bench.policies.selection import top_k_map
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.workload import RecordedWorkload, TokenBatch

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

    fill(
        directory,
        comparisons,
        "route",
        "routing",
        {"torch": torch.__version__},
        lambda run_id: describe_run(run_id, comparisons, provenance.describe(_CPU)),
        routed,
        unit=("batch", lambda comparison, cases: comparison.workload.num_batches),
        # What a comparison leaves beside its cases stands under the same rule.
        is_left=lambda comparison: force or not directory.is_done("score_curves", comparison.comparison_id),
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
    tables: dict[str, list[dict[str, Any]]] = {"overlap": [], "score_curves": []}
    for index in range(num_batches):
        routers = [CaseRouter(case, replicas.slots(case, index), layer.seed, carried, layer.kernel) for case in cases]
        for case, packed, traffic in zip(cases, metrics, traffic_of(batches, None, index, routers), strict=True):
            packed.put((slice(None), index), traffic.metrics)
            if traffic.frontier is not None:
                frontiers[case.case_id].append({"batch": index, "layer": comparison.layer, **traffic.frontier})
        for table, rows in _of_batch(comparison, batches.whole(index), index).items():
            tables[table] += [{**row, "batch": index, "comparison_id": comparison.comparison_id} for row in rows]
        progress.update()
    for case, packed in zip(cases, metrics, strict=True):
        write_frontier(directory, comparison, case, frontiers[case.case_id])
        columns = routing_columns(packed, [comparison.layer])
        directory.write("routing", case.case_id, {**identity("route", run_id, comparison, case), **columns})
    for table, rows in tables.items():
        if rows:  # There may be no pair of tokens.
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            directory.write(table, comparison.comparison_id, columns)


def _of_batch(comparison: Comparison, batch: TokenBatch, index: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of the tables that no policy changes: experts that tokens share, and scores by their place in a token."""
    workload = comparison.workload
    columns, num_experts = score_order(batch.scores_TE), batch.scores_TE.shape[1]
    scores = [
        {"position": place + 1, **{name: float(values[place]) for name, values in columns.items()}}
        for place in range(num_experts)
    ]
    map_TE = top_k_map(batch.scores_TE, comparison.context(None, 0, batch.sequence_id_T, None))
    domain_T = None
    if isinstance(workload, RecordedWorkload):
        ends = np.cumsum([trace.num_tokens for trace in workload.traces])
        domain_T = torch.from_numpy(np.searchsorted(ends, workload.draw(index), side="right"))
    shared = token_overlap(map_TE, batch.sequence_id_T, domain_T)
    overlap = [
        {"kind": kind, "num_pairs": pairs, "shared_experts": experts} for kind, (pairs, experts) in shared.items()
    ]
    return {"overlap": overlap, "score_curves": scores}
