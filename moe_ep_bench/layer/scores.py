"""A model's score function, and what it makes scores of.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scores_from_logits(logits_TE: Tensor, score_function: str) -> Tensor:
    """The model's score function: float32 [T, E], softmax over the experts or sigmoid."""
    if score_function == "softmax":
        return torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    return torch.sigmoid(logits_TE.float())


def logits_from_scores(scores_TE: Tensor, score_function: str) -> Tensor:
    """Logits that the score function turns back into these scores (softmax: rows that sum to 1)."""
    smallest = torch.finfo(torch.float32).tiny
    if score_function == "softmax":
        return scores_TE.clamp_min(smallest).log()
    return torch.logit(scores_TE.clamp_min(smallest))
