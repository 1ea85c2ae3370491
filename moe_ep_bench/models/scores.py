"""A model's score function, and what it makes scores of.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.models.spec import ScoreFunction


def scores_from_logits(logits_TE: Tensor, score_function: ScoreFunction) -> Tensor:
    """The model's score function: float32 [T, E], softmax over the experts or of each expert alone."""
    if score_function == "softmax":
        return torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    if score_function == "sigmoid":
        return torch.sigmoid(logits_TE.float())
    return torch.nn.functional.softplus(logits_TE.float()).sqrt()


def logits_from_scores(scores_TE: Tensor, score_function: ScoreFunction) -> Tensor:
    """Logits that the score function turns back into these scores (softmax: rows that sum to 1)."""
    smallest = torch.finfo(torch.float32).tiny
    if score_function == "softmax":
        return scores_TE.clamp_min(smallest).log()
    if score_function == "sigmoid":
        return torch.logit(scores_TE.clamp_min(smallest))
    # The square of a score below 1e-19 has no logit whose softplus is above 0.
    return scores_TE.double().square().clamp_min(smallest).expm1().log().float()
