"""Experts in slots of ranks, where replicas and weights that move stand beside them.

A slot holds one expert; an expert has one slot or several, over which its pairs (token, expert) are split.

Shapes: T = tokens of a rank, E = experts, R = ranks, P = slots of all ranks; slots r * P / R and on are rank r's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.balancers import FREE, Balanced
from moe_ep_bench.policies.lazy import Tensor


@dataclass(frozen=True, eq=False)
class Split:
    """Which slot each pair of one batch goes to.

    The batch's pairs of an expert are numbered over ranks, then tokens.

    Attributes:
        slot_N: int64, the slots of all pairs, expert by expert, again from the first where there are more; at least one
            entry for each expert.
        first_E, pairs_E: where an expert's entries begin in it, and how many there are.
        before_RE: pairs of the ranks ahead of each: the number of a rank's first pair.
    """

    slot_N: NDArray[np.int64]
    first_E: NDArray[np.int64]
    pairs_E: NDArray[np.int64]
    before_RE: NDArray[np.int64]

    @staticmethod
    def of(expert_P: NDArray[np.int64], pairs_P: NDArray[np.int64], counts_RE: NDArray[np.int64]) -> Split:
        """Give slots ``pairs_P`` pairs, where ranks have ``counts_RE`` for each expert.

        Slots are interleaved, so that every rank sends each of them about the same share.
        """
        parts = []
        for expert in range(counts_RE.shape[1]):
            slots = np.flatnonzero(expert_P == expert)
            sizes = pairs_P[slots]
            places = [(np.arange(size) + 0.5) / size for size in sizes if size] or [np.zeros(1)]
            owner = np.repeat(slots, sizes) if sizes.any() else slots[:1]
            parts.append(owner[np.concatenate(places).argsort(kind="stable")])
        pairs_E = np.array([len(part) for part in parts])
        before_RE = counts_RE.cumsum(axis=0) - counts_RE
        return Split(np.concatenate(parts), pairs_E.cumsum() - pairs_E, pairs_E, before_RE)

    @staticmethod
    def in_turn(expert_P: NDArray[np.int64], num_experts: int, num_ranks: int) -> Split:
        """Give an expert's slots its pairs in turn; rank r begins with the r-th, so that few pairs do not all meet."""
        pairs_E = np.bincount(expert_P, minlength=num_experts)
        before_RE = np.repeat(np.arange(num_ranks)[:, None], num_experts, axis=1)
        return Split(expert_P.argsort(kind="stable"), pairs_E.cumsum() - pairs_E, pairs_E, before_RE)


@dataclass(frozen=True, eq=False)
class Slots:
    """Which expert every slot holds, and how a batch's pairs are split over them.

    Attributes:
        expert_P: int64 [P]; every expert has at least one slot.
        num_ranks: R, a divisor of P.
        moved_bytes_RR: of weights that go from each rank to each for this batch, float64; None = none go.
    """

    expert_P: NDArray[np.int64]
    num_ranks: int
    split: Split
    moved_bytes_RR: NDArray[np.float64] | None = None

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int) -> Slots:
        """Expert e in slot e, Megatron-Core's own placement."""
        expert_E = np.arange(num_experts)
        return Slots(expert_E, num_ranks, Split.in_turn(expert_E, num_experts, num_ranks))

    @staticmethod
    def of_batch(balanced: Balanced, counts_RE: NDArray[np.int64], expert_bytes: float) -> Slots:
        """A batch as a balancer has it, where ranks have ``counts_RE`` pairs; nobody sends to a free slot."""
        num_ranks, num_experts = counts_RE.shape
        expert_RS = balanced.slot_expert_P.reshape(num_ranks, -1)
        expert_P = np.where(expert_RS == FREE, expert_RS[:, :1], expert_RS).ravel()
        if balanced.pairs_P is None:
            split = Split.in_turn(expert_P, num_experts, num_ranks)
        else:
            split = Split.of(expert_P, balanced.pairs_P, counts_RE)
        moved_bytes_RR = balanced.moved_RR(num_ranks) * expert_bytes if balanced.moves else None
        return Slots(expert_P, num_ranks, split, moved_bytes_RR)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether every expert has the slot of its own number alone."""
        return np.array_equal(self.expert_P, np.arange(len(self.split.pairs_E)))

    def counts(self, map_TE: Tensor, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What a rank's tokens send: pairs to each slot [P], distinct tokens to each rank [R]."""
        from moe_ep_bench.kernels.counting import slot_counts

        split = self.split
        of_rank = split.slot_N, split.first_E, split.pairs_E, split.before_RE[rank]
        return slot_counts(map_TE.cpu().contiguous().numpy(), *of_rank, len(self.expert_P), self.num_ranks)
