"""How skewed a batch is under the model's own top-k: the numbers that workloads aim at and report.

*Peak load* is the load of the busiest expert over the mean load T * K / E: 1 when all experts are
equally busy, E / K when some expert is chosen by every token. Without expert parallelism it is a
curiosity; with it, the busiest expert's rank is the one that all others wait for.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import math

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


def rank_load(load_E: Tensor, num_ranks: int) -> float:
    """Fullest rank's load over the mean, with experts on ``num_ranks`` ranks in order; E must divide by it."""
    load_R = load_E.view(num_ranks, -1).sum(1)
    return load_R.max().item() * num_ranks / load_R.sum().item()


def entropy(scores_TE: Tensor) -> float:
    """Entropy of a token's scores over log E, mean over tokens: 1 is flat, 0 one expert with all the mass."""
    shares_TE = scores_TE.double() / scores_TE.sum(1, keepdim=True, dtype=torch.float64)
    return -torch.xlogy(shares_TE, shares_TE).sum(1).mean().item() / math.log(scores_TE.shape[1])


def mass_share(scores_TE: Tensor, map_TE: Tensor) -> float:
    """Share of a token's score mass that the experts of ``map_TE`` hold, mean over tokens."""
    held_T = (scores_TE * map_TE).sum(1, dtype=torch.float64)
    return (held_T / scores_TE.sum(1, dtype=torch.float64)).mean().item()


def shared_by_neighbours(map_TE: Tensor, sequence_id_T: Tensor) -> tuple[int, int]:
    """How many of the experts of ``map_TE`` adjacent tokens of a sequence share, over all such pairs, and the pairs."""
    adjacent_T = sequence_id_T[1:] == sequence_id_T[:-1]
    return int((map_TE[1:] & map_TE[:-1])[adjacent_T].sum()), int(adjacent_T.sum())
