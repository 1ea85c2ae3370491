"""The model's own top-k, and how skewed a batch is under it: the numbers that workloads aim at and report.

*Peak load* is the load of the busiest expert over the mean load T * K / E: 1 when all experts are
equally busy, E / K when some expert is chosen by every token. Without expert parallelism it is a
curiosity; with it, the busiest expert's rank is the one that all others wait for.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.policies.lazy import Tensor, torch


@dataclass(frozen=True)
class TopK:
    """Top-k over all experts, or over those of the best groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Attributes:
        top_k: experts per token.
        num_groups, top_groups: the top-k looks only into the ``top_groups`` best of ``num_groups`` equal groups
            of experts; a group's value is the sum of its best ``top_k // top_groups`` scores. None = no groups.
    """

    top_k: int
    num_groups: int | None = None
    top_groups: int | None = None

    def chosen(self, logits_TE: NDArray[np.floating], factor: float = 1.0) -> NDArray[np.bool_]:
        """Which experts each token goes to, bool [T, E], where its scores are the softmax of ``factor * logits_TE``.

        Rows without ties are assumed.
        """
        if self.num_groups is not None and self.top_groups is not None:
            logits_TE = np.where(self._in_best_groups(logits_TE, factor), logits_TE, -np.inf)
        kth = logits_TE.shape[1] - self.top_k
        return logits_TE >= np.partition(logits_TE, kth, axis=1)[:, kth, None]

    def loads(
        self, noise_TE: NDArray[np.float64], bias_E: NDArray[np.float64], factor: float = 1.0
    ) -> NDArray[np.int64]:
        """How many tokens go to each expert where ``chosen`` gets ``noise + bias``: int64 [E]."""
        count = _compiled_loads()
        if count is None:
            return np.count_nonzero(self.chosen(noise_TE + bias_E, factor), axis=0)
        groups = self.num_groups or 1, self.top_groups or 1
        return count(np.ascontiguousarray(noise_TE), bias_E, self.top_k, *groups, float(factor))

    def _in_best_groups(self, logits_TE: NDArray[np.floating], factor: float) -> NDArray[np.bool_]:
        assert self.num_groups is not None
        assert self.top_groups is not None
        num_tokens, num_experts = logits_TE.shape
        odds_TE = np.exp(factor * (logits_TE - logits_TE.max(axis=1, keepdims=True)))
        size, counted = num_experts // self.num_groups, self.top_k // self.top_groups
        odds_TGE = odds_TE.reshape(num_tokens, self.num_groups, size)
        value_TG = np.partition(odds_TGE, size - counted, axis=2)[:, :, size - counted :].sum(axis=2)
        # Groups may tie, at zero say: the order of a stable sort decides, and exactly top_groups are taken.
        best_TG = np.argsort(-value_TG, axis=1, kind="stable")[:, : self.top_groups]
        in_best_TG = np.zeros(value_TG.shape, dtype=bool)
        np.put_along_axis(in_best_TG, best_TG, True, axis=1)
        return in_best_TG.repeat(size, axis=1)


@functools.cache
def _compiled_loads() -> Callable[..., NDArray[np.int64]] | None:
    """numba's form of counting; None where numba is missing."""
    try:
        from moe_ep_bench.kernels.counting import top_k_loads
    except ImportError:
        return None
    return top_k_loads


def rank_load(load_E: Tensor, num_ranks: int) -> float:
    """Fullest rank's load over the mean, with experts on ``num_ranks`` ranks in order; of E ranks it is the peak load.

    E must divide by the ranks, and some load be above 0.
    """
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
    if scores_TE.is_cpu:
        return _balanced_by_numpy(scores_TE.numpy(), top_k)
    first_T1 = (torch.arange(num_tokens, device=scores_TE.device) * top_k).unsqueeze(1)
    expert_TE = (first_T1 + torch.arange(num_experts, device=scores_TE.device)) % num_experts
    descending_TE = scores_TE.sort(dim=1, descending=True).values
    return torch.empty_like(scores_TE).scatter_(1, expert_TE, descending_TE)


def _balanced_by_numpy(scores_TE: NDArray[np.float32], top_k: int) -> Tensor:
    """``balanced_scores`` on the host: tokens whose best expert is the same are shifted together."""
    num_experts = scores_TE.shape[1]
    descending_TE = np.sort(scores_TE, axis=1)[:, ::-1]
    balanced_TE = np.empty_like(scores_TE)
    num_places = num_experts // math.gcd(top_k, num_experts)
    for place in range(num_places):
        shifted_TE = np.roll(descending_TE[place::num_places], place * top_k % num_experts, axis=1)
        balanced_TE[place::num_places] = shifted_TE
    return torch.from_numpy(balanced_TE)
