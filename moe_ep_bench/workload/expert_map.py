"""Plan replicas for a recording's loads and write them as servers read them: which expert each physical slot holds.

The file is JSON with one key, ``physical_to_logical_map``: a row per layer of the model, an expert's index per slot,
the slots of rank 0 first. SGLang reads it (``--init-expert-location FILE.json``). vLLM names its map alike, but plans
it itself from loads that it counts: it reads no file.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path, check_folder
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import replicate
from moe_ep_bench.workload.counts import read_counts

MAP = "physical_to_logical_map"


def write_expert_map(
    source: Path, out: Path, *, num_ranks: int, spare_per_rank: int, num_nodes: int = 1, preset: str | None = None
) -> str:
    """Plan by EPLB for the loads of a recording, layer by layer.

    Args:
        source: a recording, or counts of any form that ``counts`` reads.
        out: the file to write.
        num_ranks: ranks that share all experts.
        spare_per_rank: slots of each rank beyond its share.
        num_nodes: nodes of neighbouring ranks, which the hierarchical policy reads.
        preset: the model. Its dense layers get a row too, in order, as SGLang asks for one per layer; and its groups of
            experts are packed onto nodes. None = a row per recorded layer.

    Returns:
        What was planned, and what it does to the fullest rank's load.

    Raises:
        ValueError: the recording, the numbers or the model do not fit each other.
    """
    load_LE = read_counts(source)
    num_experts = load_LE.shape[1]
    asked = (("--ep", num_ranks, 1), ("--spare-per-rank", spare_per_rank, 0), ("--nodes", num_nodes, 1))
    for option, value, least in asked:
        if value < least:
            raise UserError(f"{option}: expected at least {least}, got {value}")
    if num_experts % num_ranks:
        raise UserError(f"--ep: expected a divisor of the {num_experts} experts of {source.name}, got {num_ranks}")
    model = None if preset is None else ModelSpec.named(preset)
    if model is not None and (model.num_experts, model.num_moe_layers) != (num_experts, len(load_LE)):
        raise UserError(
            f"--preset: {preset} has {model.num_moe_layers} layers of {model.num_experts} experts, {source.name} has "
            f"{len(load_LE)} of {num_experts}"
        )
    num_slots = num_experts + spare_per_rank * num_ranks
    try:
        plan = replicate(
            load_LE,
            num_slots=num_slots,
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            num_groups=(model and model.num_groups) or 1,
        )
    except ValueError as error:
        raise UserError(f"--ep, --nodes: {error}") from None
    dense = 0 if model is None else model.first_dense_layers
    rows = [*([(np.arange(num_slots) % num_experts).tolist()] * dense), *plan.slot_expert_LP.tolist()]
    check_folder(out.parent, "OUT: folder")
    with atomic_path(out) as temporary:
        temporary.write_text(json.dumps({MAP: rows}) + "\n")
    before_LR = load_LE.reshape(len(load_LE), num_ranks, -1).sum(axis=2)
    peaks = [(load_LR.max(axis=1) / load_LR.mean(axis=1)).mean() for load_LR in (before_LR, plan.rank_load(load_LE))]
    return (
        f"{out}: {len(rows)} layers ({dense} of them dense), {num_slots} slots on {num_ranks} ranks, "
        f"{plan.policy} policy\nfullest rank over the mean, mean over recorded layers: {peaks[0]:.2f} in order, "
        f"{peaks[1]:.2f} as planned for the same loads"
    )
