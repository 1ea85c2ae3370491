"""Place experts in slots of ranks for Megatron-Core's dispatcher.

The dispatcher knows experts by index, an equal number on every rank. Experts that are placed otherwise, or replicated,
are given to it as *slots*: a pair (token, expert) becomes a pair (token, slot), and the dispatcher permutes, counts and
splits slots as it would experts. A slot holds one expert; an expert has one slot or several.

Shapes: T = tokens of a rank, E = experts, R = ranks, P = slots of all ranks; slots r * P / R and on are rank r's. C =
some of them, N = all pairs of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.balancers import FREE, Balanced
from moe_ep_bench.policies.lazy import Tensor, torch


@dataclass(frozen=True, eq=False)
class Split:
    """Which slot each pair of one batch goes to.

    The batch's pairs of an expert are numbered over ranks, then tokens.

    Attributes:
        slot_N: int64, the slots of all pairs, expert by expert; at least one entry for each expert.
        first_E, pairs_E: where an expert's entries begin in it, and how many there are.
        before_RE: pairs of the ranks ahead of each: the number of a rank's first pair.
    """

    slot_N: Tensor
    first_E: Tensor
    pairs_E: Tensor
    before_RE: Tensor

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
        arrays = np.concatenate(parts), pairs_E.cumsum() - pairs_E, pairs_E, before_RE
        return Split(*map(torch.from_numpy, arrays))

    @staticmethod
    def in_turn(expert_P: NDArray[np.int64], num_experts: int, num_ranks: int) -> Split:
        """Give an expert's slots its pairs in turn; rank r begins with the r-th, so that few pairs do not all meet."""
        pairs_E = torch.from_numpy(np.bincount(expert_P, minlength=num_experts))
        before_RE = torch.arange(num_ranks)[:, None].expand(-1, num_experts)
        slot_N = torch.from_numpy(expert_P.argsort(kind="stable"))
        return Split(slot_N, pairs_E.cumsum(0) - pairs_E, pairs_E, before_RE)

    def slot_of(self, number_TC: Tensor, expert_C: Tensor, rank: int) -> Tensor:
        """The slots of a rank's pairs, by their number among its pairs of an expert: int64 [T, C]."""
        pairs_C, first_C, before_C = (
            of_E.to(expert_C.device)[expert_C] for of_E in (self.pairs_E, self.first_E, self.before_RE[rank])
        )
        return self.slot_N.to(expert_C.device)[first_C + (number_TC + before_C) % pairs_C]


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Which expert every slot holds.

    Attributes:
        expert_P: int64 [P]; every expert has at least one slot.
        num_experts: E.
        num_ranks: R, a divisor of P.
        split: of a batch's pairs over the slots; None = an expert's slots take its pairs in turn.
        moved_bytes_RR: of weights that go from each rank to each for this batch, float64; None = none go.
    """

    expert_P: NDArray[np.int64]
    num_experts: int
    num_ranks: int
    split: Split | None = None
    moved_bytes_RR: NDArray[np.float64] | None = None

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Expert e in slot e, Megatron-Core's own placement."""
        return ExpertPlacement(np.arange(num_experts), num_experts, num_ranks)

    @staticmethod
    def of_batch(balanced: Balanced, counts_RE: NDArray[np.int64], expert_bytes: float) -> ExpertPlacement:
        """A batch as a balancer has it, where ranks have ``counts_RE`` pairs; nobody sends to a free slot."""
        num_ranks, num_experts = counts_RE.shape
        expert_RS = balanced.slot_expert_P.reshape(num_ranks, -1)
        expert_P = np.where(expert_RS == FREE, expert_RS[:, :1], expert_RS).ravel()
        split = None if balanced.pairs_P is None else Split.of(expert_P, balanced.pairs_P, counts_RE)
        moved_bytes_RR = balanced.moved_RR(num_ranks) * expert_bytes if balanced.moves else None
        return ExpertPlacement(expert_P, num_experts, num_ranks, split, moved_bytes_RR)

    @property
    def num_slots(self) -> int:
        return len(self.expert_P)

    @cached_property
    def is_contiguous(self) -> bool:
        return self.num_slots == self.num_experts and np.array_equal(self.expert_P, np.arange(self.num_experts))

    @cached_property
    def rank_E(self) -> Tensor | None:  # noqa: N802
        """The rank of every expert, int64 [E]; None where an expert has several slots."""
        if self.num_slots != self.num_experts:
            return None
        slot_E = np.argsort(self.expert_P)
        return torch.from_numpy(slot_E // (self.num_slots // self.num_ranks))

    def spread(self, map_TE: Tensor, rank: int) -> Tensor:
        """Send every pair of source ``rank`` to one slot of its expert, as ``split`` says: bool [T, P]."""
        if self.is_contiguous:
            return map_TE
        expert_P = torch.from_numpy(self.expert_P).to(map_TE.device)
        map_TP = map_TE[:, expert_P]
        slot_C = (expert_P.bincount() > 1)[expert_P].nonzero()[:, 0]  # those that share their expert
        if len(slot_C):
            split = self.split or Split.in_turn(self.expert_P, self.num_experts, self.num_ranks)
            number_TC = map_TP[:, slot_C].cumsum(0) - 1
            map_TP[:, slot_C] &= split.slot_of(number_TC, expert_P[slot_C], rank) == slot_C
        return map_TP
