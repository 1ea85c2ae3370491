"""The perfect-balance ceiling: the same scores, dealt so that every expert gets the same load."""

from __future__ import annotations

import torch
from torch import Tensor


def balanced_scores(scores_TE: Tensor, top_k: int) -> Tensor:
    """Permute each token's scores so that top-k loads differ by at most one pair between experts.

    A token's values stay the same, so its weights do too; only which expert holds which value
    changes: token t's K best go to experts t*K, t*K + 1, ... modulo E.

    Args:
        scores_TE: float32 [T, E].

    Returns:
        float32 [T, E].
    """
    num_tokens, num_experts = scores_TE.shape
    first_T1 = (torch.arange(num_tokens, device=scores_TE.device) * top_k).unsqueeze(1)
    expert_TE = (first_T1 + torch.arange(num_experts, device=scores_TE.device)) % num_experts
    descending_TE = scores_TE.sort(dim=1, descending=True).values
    return torch.empty_like(scores_TE).scatter_(1, expert_TE, descending_TE)
