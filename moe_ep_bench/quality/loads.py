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
from moe_ep_bench.quality.routed import Seen


def pass_metrics(seen: Seen) -> dict[str, Any]:
    """The metrics from ``num_steps`` to ``num_dropped_image_pairs`` of ``schema.QUALITY_ROUTING_SCHEMA``."""
    valid_T = seen.what.valid_T
    own_TE = seen.own_TE[valid_T]
    map_TE = own_TE if seen.routing is None else seen.routing.map_TE[valid_T]
    scores_TE = seen.scores_TE[valid_T].double()
    load_PE = _per_step(map_TE, seen.what.step_T[valid_T], seen.what.num_steps)
    load_PE = load_PE[load_PE.sum(dim=1) > 0]  # padding may leave steps empty, and a policy may drop all
    load_PR = load_PE.unflatten(1, (seen.context.num_ranks, -1))
    num_tokens, num_pairs = len(map_TE), int(map_TE.sum())
    num_topk_pairs, num_dropped = int(own_TE.sum()), int((own_TE & ~map_TE).sum())
    mass = float((scores_TE * map_TE).sum())
    dropped_T = (own_TE & ~map_TE).sum(dim=1)
    modality_T = seen.context.modality_T
    is_image_T = None if modality_T is None else modality_T[valid_T] == IMAGE
    return {
        "num_steps": seen.what.num_steps,
        "num_tokens": num_tokens,
        "load_E": map_TE.sum(dim=0).tolist(),
        "num_pairs": num_pairs,
        "num_topk_pairs": num_topk_pairs,
        "num_dropped_pairs": num_dropped,
        "dropped_fraction": num_dropped / num_topk_pairs,
        "retained_mass_topk": mass / float((scores_TE * own_TE).sum()),
        "retained_mass_all": mass / float(scores_TE.sum()),
        "tokens_without_expert": int((~map_TE.any(dim=1)).sum()),
        "experts_per_token": num_pairs / num_tokens,
        "num_image_tokens": None if is_image_T is None else int(is_image_T.sum()),
        "num_dropped_image_pairs": None if is_image_T is None else int(dropped_T[is_image_T].sum()),
        "peak_load": _mean_peak(load_PE),
        "rank_peak_load": _mean_peak(load_PR.sum(dim=2)),
        "activated_experts": _mean((load_PE > 0).sum(dim=1)),
        "activated_experts_fullest_rank": _mean((load_PR > 0).sum(dim=2).amax(dim=1)),
    }


def _per_step(map_TE: Tensor, step_T: Tensor, num_steps: int) -> Tensor:
    """Pairs of each expert in each step: float64 [P, E]."""
    zeros_PE = torch.zeros(num_steps, map_TE.shape[1], dtype=torch.float64, device=map_TE.device)
    return zeros_PE.index_add(0, step_T, map_TE.double())


def _mean_peak(load_PN: Tensor) -> float:
    """The fullest over the mean, of every step; their mean. 0 where nothing is computed."""
    return _mean(load_PN.amax(dim=1) / load_PN.mean(dim=1)) if len(load_PN) else 0.0


def _mean(values_P: Tensor) -> float:
    return float(values_P.double().mean()) if len(values_P) else 0.0
