"""Compute loads, drops and score mass of one router's choice in one pass, over all virtual ranks.

Means over steps, where the tokens of each position are a batch of their own: a step waits for its own fullest
expert, and reads the weights that it activates itself.

Shapes: T = tokens of a pass, E = experts, R = ranks, P = steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.quality.routed import RouterCall

Row = dict[str, Any]
"""Values by column; columns that are absent are null."""
Tables = dict[str, list[Row]]
"""Rows by the name of their table in ``schema.TABLES``."""


def pass_metrics(call: RouterCall) -> dict[str, Any]:
    """The metrics from ``num_steps`` to ``num_dropped_image_pairs`` of ``schema.QUALITY_ROUTING_SCHEMA``."""
    forward_pass, modality_T = call.forward_pass, call.context.modality_T
    valid_T, num_steps = forward_pass.valid_T, forward_pass.num_steps
    own_TE, scores_TE = call.own_TE[valid_T], call.scores_TE[valid_T].double()
    map_TE = own_TE if call.routing is None else call.routing.map_TE[valid_T]
    dropped_T = (own_TE & ~map_TE).sum(dim=1)
    is_image_T = None if modality_T is None else modality_T[valid_T] == IMAGE
    load_PE = torch.zeros(num_steps, map_TE.shape[1], dtype=torch.float64, device=map_TE.device)
    load_PE.index_add_(0, forward_pass.step_T[valid_T], map_TE.double())
    load_PE = load_PE[load_PE.sum(dim=1) > 0]  # padding may leave steps empty, and a policy may drop all
    load_PRe = load_PE.unflatten(1, (call.context.num_ranks, -1))
    num_pairs, num_topk_pairs, num_dropped = int(map_TE.sum()), int(own_TE.sum()), int(dropped_T.sum())
    mass = float((scores_TE * map_TE).sum())
    return {
        "num_steps": num_steps,
        "num_tokens": len(map_TE),
        "load_E": map_TE.sum(dim=0).tolist(),
        "num_pairs": num_pairs,
        "num_topk_pairs": num_topk_pairs,
        "num_dropped_pairs": num_dropped,
        "dropped_fraction": num_dropped / num_topk_pairs,
        "retained_mass_topk": mass / float((scores_TE * own_TE).sum()),
        "retained_mass_all": mass / float(scores_TE.sum()),
        "tokens_without_expert": int((~map_TE.any(dim=1)).sum()),
        "experts_per_token": num_pairs / len(map_TE),
        "num_image_tokens": None if is_image_T is None else int(is_image_T.sum()),
        "num_dropped_image_pairs": None if is_image_T is None else int(dropped_T[is_image_T].sum()),
        "peak_load": _mean(_peak(load_PE)),
        "rank_peak_load": _mean(_peak(load_PRe.sum(dim=2))),
        "activated_experts": _mean((load_PE > 0).sum(dim=1)),
        "activated_experts_fullest_rank": _mean((load_PRe > 0).sum(dim=2).amax(dim=1)),
    }


def _peak(load_PN: Tensor) -> Tensor:
    """The fullest of every step over the step's mean."""
    return load_PN.amax(dim=1) / load_PN.mean(dim=1)


def _mean(values_P: Tensor) -> float:
    """0 where nothing is computed."""
    return float(values_P.double().mean()) if len(values_P) else 0.0
