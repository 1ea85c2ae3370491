"""Experts in slots of ranks, where replicas and weights that move stand beside them.

A slot holds one expert; an expert has one slot or several, over which its pairs (token, expert) are split.

Shapes: T = tokens of a rank, E = experts, R = ranks, P = slots of all ranks; slots r * P / R and on are rank r's. N =
entries of all experts' turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.balancers import FREE, Balanced
from moe_ep_bench.policies.lazy import Tensor


@dataclass(frozen=True, eq=False)
class Slots:
    """Which expert every slot holds, and which slot each pair of one batch goes to.

    The batch's pairs of an expert are numbered over ranks, then tokens, and take the expert's *turns*: a slot for each
    pair, again from the first where there are more pairs.

    Attributes:
        expert_P: int64; every expert has at least one slot.
        turn_N: int64, the slots of all experts' turns, expert by expert; at least one entry for each.
        turns_E: how many entries each expert has.
        before_RE: pairs of the ranks ahead of each: the number of a rank's first pair. R divides P.
        moved_bytes_RR: of weights that go from each rank to each for this batch, float64; None = none go.
    """

    expert_P: NDArray[np.int64]
    turn_N: NDArray[np.int64]
    turns_E: NDArray[np.int64]
    before_RE: NDArray[np.int64]
    moved_bytes_RR: NDArray[np.float64] | None = None

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int) -> Slots:
        """Expert e in slot e, Megatron-Core's own placement."""
        return Slots._in_turn(np.arange(num_experts), num_experts, num_ranks)

    @staticmethod
    def of_batch(balanced: Balanced, counts_RE: NDArray[np.int64], expert_bytes: float) -> Slots:
        """A batch as a balancer has it, where ranks have ``counts_RE`` pairs; nobody sends to a free slot."""
        num_ranks, num_experts = counts_RE.shape
        expert_RS = balanced.slot_expert_P.reshape(num_ranks, -1)
        expert_P = np.where(expert_RS == FREE, expert_RS[:, :1], expert_RS).ravel()
        moved_RR = balanced.moved_RR(num_ranks) * expert_bytes if balanced.moves else None
        if balanced.pairs_P is None:
            return Slots._in_turn(expert_P, num_experts, num_ranks, moved_RR)
        turns = []
        for expert in range(num_experts):
            slots = np.flatnonzero(expert_P == expert)
            sizes = balanced.pairs_P[slots]
            # Slots are interleaved, so that every rank sends each of them about the same share.
            places = [(np.arange(size) + 0.5) / size for size in sizes if size] or [np.zeros(1)]
            owner = np.repeat(slots, sizes) if sizes.any() else slots[:1]
            turns.append(owner[np.concatenate(places).argsort(kind="stable")])
        before_RE = counts_RE.cumsum(axis=0) - counts_RE
        return Slots(expert_P, np.concatenate(turns), np.array(list(map(len, turns))), before_RE, moved_RR)

    @staticmethod
    def _in_turn(
        expert_P: NDArray[np.int64],
        num_experts: int,
        num_ranks: int,
        moved_RR: NDArray[np.float64] | None = None,
    ) -> Slots:
        """Give an expert's slots its pairs in turn; rank r begins with the r-th, so that few pairs do not all meet."""
        before_RE = np.repeat(np.arange(num_ranks)[:, None], num_experts, axis=1)
        turns_E = np.bincount(expert_P, minlength=num_experts)
        return Slots(expert_P, expert_P.argsort(kind="stable"), turns_E, before_RE, moved_RR)

    @property
    def num_ranks(self) -> int:
        return len(self.before_RE)

    @property
    def first_E(self) -> NDArray[np.int64]:  # noqa: N802
        """Where each expert's turns begin."""
        return self.turns_E.cumsum() - self.turns_E

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether every expert has the slot of its own number alone."""
        return np.array_equal(self.expert_P, np.arange(len(self.turns_E)))

    def counts(self, map_TE: Tensor, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What a rank's tokens send: pairs to each slot [P], distinct tokens to each rank [R]."""
        from moe_ep_bench.kernels.counting import slot_counts

        of_rank = self.turn_N, self.first_E, self.turns_E, self.before_RE[rank]
        return slot_counts(map_TE.cpu().contiguous().numpy(), *of_rank, len(self.expert_P), self.num_ranks)
