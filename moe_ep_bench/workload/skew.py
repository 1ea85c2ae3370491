"""How skewed a batch is under the model's own top-k: the numbers that workloads aim at and report.

*Peak load* is the load of the busiest expert over the mean load T * K / E: 1 when all experts are
equally busy, E / K when some expert is chosen by every token. Without expert parallelism it is a
curiosity; with it, the busiest expert's rank is the one that all others wait for.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_load(scores_TE: Tensor, top_k: int) -> Tensor:
    """How many tokens have each expert among their ``top_k`` best: int64 [E]."""
    ids_TK = scores_TE.topk(top_k, dim=1, sorted=False).indices
    return torch.bincount(ids_TK.flatten(), minlength=scores_TE.shape[1])


def peak_load(load_E: Tensor) -> float:
    """Busiest expert's load over the mean; load_E must not be all zero."""
    return load_E.max().item() * load_E.numel() / load_E.sum().item()


def top_k_share(scores_TE: Tensor, top_k: int) -> float:
    """Share of a token's score mass that its ``top_k`` best experts hold, mean over tokens."""
    best_TK = scores_TE.topk(top_k, dim=1, sorted=False).values
    return (best_TK.sum(1, dtype=torch.float64) / scores_TE.sum(1, dtype=torch.float64)).mean().item()
