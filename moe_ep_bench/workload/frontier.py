"""The frontier of dropping: the most score mass that a policy can keep which only drops.

*By load.* A rank that may compute at most x pairs keeps the most mass with its x highest-scored top-k pairs. Ranks
choose apart from each other, so these choices together are optimal for the whole batch:

    kept(x) = sum over ranks of the mass of the rank's x best pairs.

*By experts.* A decode step reads the weights of the experts that it activates. Of the top-k pairs a set S of experts
keeps those whose expert is in S, so its mass is the sum of the experts' own masses, and the best n experts are those
with the most mass. This is exact because each pair has one expert. (Were tokens free to choose again inside S, the
best S would be a maximum coverage, which is NP-hard.)

Both bound policies that only drop. One that reroutes gives tokens other experts than their top-k: it may keep more.

kept(x) is concave in x, and so is its mean over batches. A policy may spend its loss unevenly, though: much in a
skewed batch, little in an even one. ``joint`` is the frontier of the means over several batches or layers.

Shapes: T = tokens, E = experts, R = ranks, N = top-k pairs of all ranks, P = points of a curve, B = curves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_ep_bench.policies.lazy import Tensor, torch

NUM_POINTS = 65
"""Of a curve, native's fullest rank and no load at all included."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """The frontier of one batch in one layer.

    Attributes:
        best_R: of each expert rank the mass of its n best pairs, n from 0 to all it has: float64 [pairs + 1].
        best_experts: mass of the n best experts, n from 0 to E: float64 [E + 1].
    """

    best_R: tuple[Tensor, ...]
    best_experts: Tensor

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]], rank_E: Tensor) -> Frontier:
        """The frontier of a batch.

        Args:
            pairs: of every source rank the scores (float [pairs]) and experts (int64) of its top-k pairs
                (``top_k_pairs``).
            rank_E: int64 [E], the rank on which each expert lives; the highest is the last rank.
        """
        scores, experts = (torch.cat(list(part)) for part in zip(*pairs, strict=True))
        rank_N, by_rank_N = rank_E.to(torch.int16)[experts].sort(stable=True)
        counts_R = rank_N.bincount(minlength=int(rank_E.max()) + 1)
        of_ranks = np.split(scores[by_rank_N].numpy(), counts_R.cumsum(0)[:-1])
        # numpy sorts values alone, ten times as fast as torch sorts them and their places.
        best_R = tuple(_from_zero(torch.from_numpy(np.sort(score_N)[::-1].astype(np.float64))) for score_N in of_ranks)
        mass_E = torch.zeros(len(rank_E), dtype=torch.float64).index_add(0, experts, scores.double())
        return cls(best_R, _from_zero(mass_E.sort(descending=True).values))

    @property
    def mass(self) -> float:
        """All score mass of the top-k."""
        return float(self.best_experts[-1])

    @property
    def fullest(self) -> int:
        """Pairs of the fullest rank where nothing is dropped."""
        return max(len(best) for best in self.best_R) - 1

    @property
    def num_pairs(self) -> int:
        return sum(len(best) - 1 for best in self.best_R)

    def kept(self, most_pairs: int) -> float:
        """Share of the mass that is kept at most where no rank computes more than so many pairs; 1 of no mass."""
        return self._share(sum(float(best[min(most_pairs, len(best) - 1)]) for best in self.best_R))

    def dropped(self, most_pairs: int) -> int:
        """Pairs that are dropped at least where no rank computes more than so many."""
        return sum(max(0, len(best) - 1 - most_pairs) for best in self.best_R)

    def kept_by_experts(self, num_experts: int) -> float:
        """Share of the mass that is kept at most by a set of so many experts; 1 of no mass."""
        return self._share(float(self.best_experts[min(num_experts, len(self.best_experts) - 1)]))

    def least_load(self, kept_share: float) -> int:
        """The least that the fullest rank computes where at least this share of the mass is kept: pairs."""
        low, high = 0, self.fullest
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.kept(middle) >= kept_share else (middle + 1, high)
        return low

    def curve(self) -> tuple[list[float], list[float]]:
        """``NUM_POINTS`` points, from no load to native's: the fullest rank's load over the mean, the share kept.

        The mean is that of the top-k pairs over ranks, before anything is dropped.
        """
        loads = [self.fullest * place // (NUM_POINTS - 1) for place in range(NUM_POINTS)]
        mean = max(self.num_pairs / len(self.best_R), 1.0)
        return [load / mean for load in loads], [self.kept(load) for load in loads]

    def _share(self, kept: float) -> float:
        return kept / self.mass if self.mass > 0 else 1.0


def top_k_pairs(scores_TE: Tensor, top_k_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and experts of the pairs that a map marks, on the host: float32 [pairs] and int64 [pairs]."""
    token_N, expert_N = top_k_TE.nonzero(as_tuple=True)
    return scores_TE[token_N, expert_N].cpu(), expert_N.cpu()


def joint(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[Tensor, Tensor]:
    """The frontier of means over batches or layers: no choice of one point on each curve has means above it.

    A mean load is spent where it keeps most. Curves are concave, so taking their pieces by falling slope does this.

    Args:
        curves: of each the loads, ascending, and the share kept (``Frontier.curve``), as many points in all.

    Returns:
        Mean load and mean share kept, ascending: float64 [B * (P - 1) + 1].
    """
    load_BP, kept_BP = torch.tensor(curves, dtype=torch.float64).unbind(1)
    step_N, gain_N = load_BP.diff(dim=1).flatten(), kept_BP.diff(dim=1).flatten()
    slope_N = torch.where(step_N > 0, gain_N / step_N.clamp(min=1e-300), torch.inf)
    order_N = slope_N.sort(descending=True, stable=True).indices
    first = kept_BP[:, :1].sum(dim=0)
    means = (torch.cat([load_BP[:, :1].sum(dim=0), step_N[order_N]]), torch.cat([first, gain_N[order_N]]))
    return tuple(values.cumsum(dim=0) / len(curves) for values in means)


def _from_zero(mass_N: Tensor) -> Tensor:
    """Sums of the first n, n from 0 on."""
    return torch.cat([mass_N.new_zeros(1), mass_N.cumsum(dim=0)])
