"""Choosing the best: the model's own top-k, ties, and combine weights.

Every choice in the suite is exact about ties: the lower index wins. ``torch.topk`` promises no
order among equals, so it serves only to find the threshold; who stands at the threshold is
decided here.

Shapes: T = tokens, E = experts, K = top_k; a "row" is whatever competes, N its length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.policies.contract import Routing, RoutingContext

# Below this many winners torch.topk finds the threshold sooner than a selection by rank (kthvalue).
_TOPK_LIMIT = 64


def best_per_row(keys_RN: Tensor, count: int) -> Tensor:
    """Mark each row's ``count`` largest keys; among equal keys the lower column wins.

    Args:
        keys_RN: [rows, N] of any ordered dtype.
        count: 0 to N.

    Returns:
        bool [rows, N] with exactly ``count`` marks in each row.
    """
    num_columns = keys_RN.shape[1]
    if count == 0 or keys_RN.numel() == 0:
        return torch.zeros_like(keys_RN, dtype=torch.bool)
    if count >= num_columns:
        return torch.ones_like(keys_RN, dtype=torch.bool)
    if count <= _TOPK_LIMIT:
        threshold_R1 = keys_RN.topk(count, dim=1).values[:, -1:]
    else:
        threshold_R1 = keys_RN.kthvalue(num_columns - count + 1, dim=1, keepdim=True).values
    reaching_RN = keys_RN >= threshold_R1
    if bool((reaching_RN.sum(dim=1) == count).all()):
        return reaching_RN
    above_RN = keys_RN > threshold_R1
    tied_RN = reaching_RN & ~above_RN
    room_R1 = count - above_RN.sum(dim=1, keepdim=True)
    return above_RN | (tied_RN & (tied_RN.cumsum(dim=1) <= room_R1))


def preference(scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """Scores as the model orders them: with the selection bias, where it has one. Shape [T, E]."""
    return scores_TE if context.bias_E is None else scores_TE + context.bias_E


def top_k_map(scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """The model's own choice of K experts per token: bool [T, E], padding rows empty."""
    preference_TE = preference(scores_TE, context)
    if context.num_groups is not None and context.top_groups is not None:
        preference_TE = _inside_top_groups(preference_TE, context.top_k, context.num_groups, context.top_groups)
    return without_padding(best_per_row(preference_TE, context.top_k), context)


def _inside_top_groups(preference_TE: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """Set experts outside a token's best groups to -inf (DeepSeek-V3, node-limited routing)."""
    preference_TGe = preference_TE.unflatten(1, (num_groups, -1))
    value_TG = preference_TGe.topk(top_k // top_groups, dim=-1).values.sum(dim=-1)
    inside_TG = best_per_row(value_TG, top_groups)
    return preference_TGe.masked_fill(~inside_TG.unsqueeze(-1), -torch.inf).flatten(1)


def without_padding(map_TE: Tensor, context: RoutingContext) -> Tensor:
    """Empty the rows of padding tokens."""
    return map_TE if context.token_mask_T is None else map_TE & context.token_mask_T.unsqueeze(1)


def num_valid_tokens(scores_TE: Tensor, context: RoutingContext) -> int:
    """Tokens that are not padding."""
    return scores_TE.shape[0] if context.token_mask_T is None else int(context.token_mask_T.sum())


def weighted(scores_TE: Tensor, map_TE: Tensor, norm_map_TE: Tensor, context: RoutingContext) -> Routing:
    """Give the selected pairs their combine weights.

    Args:
        scores_TE: float32 [T, E].
        map_TE: bool [T, E], the final selection.
        norm_map_TE: bool [T, E], at most K per row: the pairs whose scores sum to 1 where the model
            normalises. That is the original top-k for policies that drop (what is dropped is
            lost, as in Megatron-Core), the final selection for policies that choose anew.
        context: ``normalize`` and ``scale`` are read.
    """
    weights_TE = scores_TE * map_TE
    if context.normalize:
        total_T1 = descending_sum(scores_TE, norm_map_TE, context.top_k)
        weights_TE = torch.where(total_T1 > 0, weights_TE / total_T1, 0.0)
    if context.scale != 1.0:
        weights_TE = weights_TE * context.scale
    return Routing(map_TE=map_TE, weights_TE=weights_TE)


def descending_sum(scores_TE: Tensor, map_TE: Tensor, width: int) -> Tensor:
    """Sum each row's marked scores (at most ``width`` of them) from the largest down, [T, 1].

    Megatron-Core sums the K values in the order in which ``torch.topk`` returns them; adding in
    the same order gives the same bits.
    """
    return (scores_TE * map_TE).topk(width, dim=1).values.sum(dim=1, keepdim=True)
