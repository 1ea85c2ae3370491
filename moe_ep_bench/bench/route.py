"""``route``: what policies do to loads, work and score mass, on any number of virtual ranks; nothing is timed.

A routing decision needs scores and nothing else, so that a laptop can answer how many experts a batch activates
or how full the fullest of 256 ranks would be. Batches are made and dealt to virtual ranks exactly as ``run`` deals
them to real ones, and a policy sees what it would see there. ``on_cpu`` is not applied: a size that is too much work
for a CPU's experts is none for routing.

Shapes: T = tokens of a rank, E = experts, K = top_k, R = EP ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from moe_ep_bench.bench.description import describe_run
from moe_ep_bench.bench.job import fill, identity
from moe_ep_bench.bench.plan import REPLICATION, ROUTING, CaseSpec, Comparison, plan
from moe_ep_bench.bench.replicas import Replicas
from moe_ep_bench.bench.rows import write_frontier
from moe_ep_bench.bench.traffic import (
    CarriedLoads,
    CaseRouter,
    Share,
    case_metrics,
    frontier_row,
    in_slots,
    one_thread,
    with_pairs,
)
from moe_ep_bench.kernels import compiled
from moe_ep_bench.machine import provenance
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.policies.frontier import Frontier
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.workload import TokenBatch, deal

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
        force=force,
    )
    return directory


def _route_comparison(
    directory: RunDirectory, run_id: str, comparison: Comparison, cases: Sequence[CaseSpec], progress: tqdm
) -> None:
    """Route ``cases`` and write their parts; one batch is in memory at a time."""
    layer = comparison.experiment.layer
    rows_of: dict[str, dict[str, list[Any]]] = {case.case_id: defaultdict(list) for case in cases}
    frontiers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    num_experts = comparison.model.num_experts
    rank_E = torch.arange(num_experts) // (num_experts // comparison.ep_size)

    def shares_of(case: CaseSpec, _: int | None, index: int) -> list[Share]:
        return _shares(comparison, comparison.workload.batch(index))

    carried, replicas = CarriedLoads(shares_of, comparison.slots, layer.seed), Replicas(comparison, shares_of)
    for index in range(comparison.workload.num_batches):
        batch = comparison.workload.batch(index)
        shares = _shares(comparison, batch)
        frontier = _frontier(shares, rank_E)
        for case in cases:
            router = CaseRouter(case, replicas.slots(case, index), layer.seed, carried)
            rows = _route_batch(router, shares, index, layer.kernel)
            for rank, row in enumerate(rows):
                _append(rows_of[case.case_id], {**row, "rank": rank, "batch": index, "layer": comparison.layer})
            if frontier is not None and case.role != REPLICATION:
                load_E = torch.tensor([row["load_E"] for row in rows]).sum(dim=0)
                own = {"batch": index, "layer": comparison.layer, **frontier_row(case, frontier, load_E, rank_E)}
                frontiers[case.case_id].append(own)
        progress.update()
    for case in cases:
        named = identity("route", run_id, comparison, case)
        write_frontier(directory, comparison, case, frontiers[case.case_id])
        directory.write("routing", case.case_id, {**named, **rows_of[case.case_id]})


def _shares(comparison: Comparison, batch: TokenBatch) -> list[Share]:
    """Every virtual rank's tokens of a batch."""
    config = comparison.experiment.workload
    shares = []
    for rank, tokens_T in enumerate(deal(batch, comparison.ep_size, config.rank_shares)):
        tokens = batch.rows(tokens_T).with_padding(config.padding_per_rank)
        context = comparison.subject.context(rank, tokens.sequence_id_T, tokens.valid_T)
        shares.append(Share(None, rank, context, lambda scores_TE=tokens.scores_TE: scores_TE))
    return shares


def _frontier(shares: Sequence[Share], rank_E: Tensor) -> Frontier | None:
    """What dropping alone could keep of a batch; None where there are too many pairs."""
    pairs: list[tuple[Tensor, Tensor]] | None = []
    for share in shares:
        pairs = None if pairs is None else with_pairs(pairs, share)
    return None if pairs is None else Frontier.of(pairs, rank_E)


def _route_batch(router: CaseRouter, shares: Sequence[Share], index: int, kernel: str) -> list[dict[str, Any]]:
    """Route one batch by one case as its ranks would together: the metrics of every source rank."""
    contexts = [router.context(share, index) for share in shares]
    routings = compiled(router.rule, _CPU, kernel).select_all([share.scores_TE for share in shares], contexts)
    rows = []
    for share, routing in zip(shares, routings, strict=True):
        row = case_metrics(router.case, routing, share)
        if router.case.replication is not None:
            row |= in_slots(routing.map_TE, router.slots, share.rank, 1)[1]
        if share.context.modality_T is not None:
            is_image_T = share.context.modality_T == IMAGE
            valid_T = share.context.token_mask_T
            row["num_image_tokens"] = int((is_image_T if valid_T is None else is_image_T & valid_T).sum())
            row["image_load_E"] = routing.map_TE[is_image_T].sum(dim=0).tolist()
        rows.append(row)
    return rows


def _append(rows: dict[str, list[Any]], row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        rows[name].append(value)
