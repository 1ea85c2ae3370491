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
from numpy.typing import NDArray

from moe_ep_bench.policies.lazy import Tensor, torch

NUM_POINTS = 65
"""Points of a curve, with native's fullest rank and no load at all."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """The frontier of one batch in one layer.

    Attributes:
        by_load: most mass that is kept where no rank computes more than n pairs, n from 0 to native's fullest rank:
            float64 [pairs + 1].
        by_experts: mass of the n best experts, n from 0 to E: float64 [E + 1].
        mean_load: top-k pairs of a rank, mean over ranks, before anything is dropped.
    """

    by_load: NDArray[np.float64]
    by_experts: NDArray[np.float64]
    mean_load: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]], rank_E: Tensor) -> Frontier:
        """The frontier of a batch.

        Args:
            pairs: of every source rank the scores (float [pairs]) and experts (int64) of its top-k pairs
                (``top_k_pairs``).
            rank_E: int64 [E], the rank on which each expert lives; the highest is the last rank.
        """
        score_N, expert_N = (torch.cat(list(parts)).numpy() for parts in zip(*pairs, strict=True))
        load_R = np.bincount(rank_E.numpy()[expert_N], minlength=int(rank_E.max()) + 1)
        by_rank_N = np.argsort(rank_E.numpy().astype(np.int16)[expert_N], kind="stable")
        gain = np.zeros(load_R.max() + 1)  # of the n-th best pair of every rank
        for score_of_rank in np.split(score_N[by_rank_N], load_R.cumsum()[:-1]):
            gain[1 : len(score_of_rank) + 1] += np.sort(score_of_rank)[::-1]
        mass_E = np.bincount(expert_N, score_N, minlength=len(rank_E))
        by_experts = np.concatenate([[0.0], np.sort(mass_E)[::-1].cumsum()])
        return cls(gain.cumsum(), by_experts, max(load_R.mean(), 1.0))

    def kept(self, most_pairs: int) -> float:
        """Share of the mass that is kept at most where no rank computes more than so many pairs; 1 of no mass."""
        return _share(self.by_load, most_pairs)

    def kept_by_experts(self, num_experts: int) -> float:
        """Share of the mass that is kept at most by a set of so many experts; 1 of no mass."""
        return _share(self.by_experts, num_experts)

    def curve(self) -> tuple[list[float], list[float]]:
        """``NUM_POINTS`` points, from no load to native's: the fullest rank's load over the mean, the share kept."""
        loads = [(len(self.by_load) - 1) * place // (NUM_POINTS - 1) for place in range(NUM_POINTS)]
        return [load / self.mean_load for load in loads], [self.kept(load) for load in loads]


def _share(mass: NDArray[np.float64], count: int) -> float:
    return float(mass[min(count, len(mass) - 1)] / mass[-1]) if mass[-1] > 0 else 1.0


def top_k_pairs(scores_TE: Tensor, top_k_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and experts of the pairs that a map marks, on the host: float32 [pairs] and int64 [pairs]."""
    from moe_ep_bench.kernels.counting import marked_pairs  # Reading results does without numba.

    map_TE = top_k_TE.cpu().contiguous().numpy()
    pairs = marked_pairs(map_TE.view(np.uint8), scores_TE.cpu().contiguous().numpy(), np.count_nonzero(map_TE))
    return torch.from_numpy(pairs[0]), torch.from_numpy(pairs[1])


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
    slope_N = gain_N / step_N.clamp(min=1e-300)  # where loads are equal so is what is kept
    order_N = slope_N.sort(descending=True, stable=True).indices
    first = kept_BP[:, :1].sum(dim=0)
    means = (torch.cat([load_BP[:, :1].sum(dim=0), step_N[order_N]]), torch.cat([first, gain_N[order_N]]))
    load_N, kept_N = (values.cumsum(dim=0) / len(curves) for values in means)
    return load_N, kept_N
