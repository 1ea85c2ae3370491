"""Place experts in slots of ranks for Megatron-Core's dispatcher.

The dispatcher knows experts by index, an equal number on every rank. Experts that are placed otherwise, or replicated,
are given to it as *slots*: a pair (token, expert) becomes a pair (token, slot), and the dispatcher permutes, counts and
splits slots as it would experts. A slot holds one expert; an expert has one slot or several.

Shapes: T = tokens of a rank, E = experts, R = ranks, P = slots of all ranks; slots r * P / R and on are rank r's. N =
all pairs of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.placement import Placement, Replication


@dataclass(frozen=True, eq=False)
class Split:
    """Which slot each pair of one batch goes to, so that every slot gets a given number.

    The batch's pairs of an expert are numbered over ranks, then tokens. Slots are interleaved, so that every rank sends
    each of them about the same share.

    Attributes:
        slot_N: int64, the slots of all pairs, expert by expert; at least one entry for each expert.
        first_E, pairs_E: where an expert's entries begin in it, and how many there are.
        before_RE: pairs of the ranks ahead of each.
    """

    slot_N: Tensor
    first_E: Tensor
    pairs_E: Tensor
    before_RE: Tensor

    @staticmethod
    def of(expert_P: Tensor, pairs_P: NDArray[np.int64], counts_RE: NDArray[np.int64]) -> Split:
        """Give slots ``pairs_P`` pairs, where ranks have ``counts_RE`` for each expert."""
        parts = []
        for expert in range(counts_RE.shape[1]):
            slots = np.flatnonzero(expert_P.numpy() == expert)
            sizes = pairs_P[slots]
            places = [(np.arange(size) + 0.5) / size for size in sizes if size] or [np.zeros(1)]
            owner = np.repeat(slots, sizes) if sizes.any() else slots[:1]
            parts.append(owner[np.concatenate(places).argsort(kind="stable")])
        pairs_E = np.array([len(part) for part in parts])
        before_RE = counts_RE.cumsum(axis=0) - counts_RE
        arrays = np.concatenate(parts), pairs_E.cumsum() - pairs_E, pairs_E, before_RE
        return Split(*map(torch.from_numpy, arrays))

    def slot_of(self, number_TP: Tensor, expert_P: Tensor, rank: int) -> Tensor:
        """The slots of a rank's pairs, by their number among its pairs of an expert: int64 [T, P]."""
        pairs_P, first_P, before_P = (
            of_E.to(expert_P.device)[expert_P] for of_E in (self.pairs_E, self.first_E, self.before_RE[rank])
        )
        return self.slot_N.to(expert_P.device)[first_P + (number_TP + before_P) % pairs_P]


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Which expert every slot holds.

    Attributes:
        expert_P: int64 [P]; every expert has at least one slot.
        num_experts: E.
        num_ranks: R, a divisor of P.
        split: of a batch's pairs over the slots; None = an expert's slots take its pairs in turn.
    """

    expert_P: Tensor
    num_experts: int
    num_ranks: int
    split: Split | None = None

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Expert e in slot e, Megatron-Core's own placement."""
        return ExpertPlacement(torch.arange(num_experts), num_experts, num_ranks)

    @staticmethod
    def of_replication(plan: Replication) -> ExpertPlacement:
        """The first layer of an EPLB plan."""
        return ExpertPlacement(torch.from_numpy(plan.slot_expert_LP[0]), plan.num_experts, plan.num_ranks)

    @staticmethod
    def of_placement(placement: Placement) -> ExpertPlacement:
        """Slots for shares of load: each expert shared evenly, and as many slots on every rank.

        Raises:
            ValueError: ranks hold different numbers of experts, or an expert is shared unevenly.
        """
        held_RE = placement.share_RE > 0
        counts_R = held_RE.sum(axis=1)
        if len(set(counts_R.tolist())) > 1:
            raise UserError(
                "expected as many experts on every rank, where a layer is run;"
                f" got {counts_R.min()} to {counts_R.max()}"
            )
        if not np.allclose(placement.share_RE, held_RE / held_RE.sum(axis=0)):
            raise UserError("expected replicas that share their expert evenly, where a layer is run; got uneven shares")
        num_ranks, num_experts = held_RE.shape
        return ExpertPlacement(torch.from_numpy(np.nonzero(held_RE)[1].astype(np.int64)), num_experts, num_ranks)

    @property
    def num_slots(self) -> int:
        return len(self.expert_P)

    @cached_property
    def is_contiguous(self) -> bool:
        return self.num_slots == self.num_experts and torch.equal(self.expert_P, torch.arange(self.num_experts))

    @cached_property
    def rank_E(self) -> Tensor | None:  # noqa: N802
        """The rank of every expert, int64 [E]; None where an expert has several slots."""
        if self.num_slots != self.num_experts:
            return None
        rank_P = torch.arange(self.num_slots) // (self.num_slots // self.num_ranks)
        return torch.empty_like(rank_P).scatter(0, self.expert_P, rank_P)

    @cached_property
    def replicas(self) -> Tensor:
        """Slots of every expert: int64 [E]."""
        return torch.bincount(self.expert_P, minlength=self.num_experts)

    @cached_property
    def _replica_number(self) -> Tensor:
        """Which of its expert's replicas a slot is, in the order of slots: int64 [P]."""
        same_PP = self.expert_P[:, None] == self.expert_P
        earlier_PP = same_PP.tril(-1)
        return earlier_PP.sum(1)

    def spread(self, map_TE: Tensor, rank: int) -> Tensor:
        """Send every pair to one slot of its expert: bool [T, P].

        The pairs of a replicated expert go to its slots in turn, in the order of the tokens. ``rank``, the source,
        decides which slot is first, so that the few pairs of many ranks do not all meet in the same one. Where there is
        a ``split``, it decides.
        """
        if self.is_contiguous:
            return map_TE
        map_TP = map_TE[:, self.expert_P.to(map_TE.device)]
        shared_P = (self.replicas > 1)[self.expert_P].to(map_TE.device)
        if not bool(shared_P.any()):
            return map_TP
        replicas_P = self.replicas[self.expert_P].to(map_TE.device)[shared_P]
        number_TP = map_TP[:, shared_P].cumsum(0) - 1
        if self.split is not None:
            slot_TP = self.split.slot_of(number_TP, self.expert_P.to(map_TE.device)[shared_P], rank)
            map_TP[:, shared_P] &= slot_TP == shared_P.nonzero()[:, 0]
            return map_TP
        map_TP[:, shared_P] &= (number_TP + rank) % replicas_P == self._replica_number.to(map_TE.device)[shared_P]
        return map_TP

    def spread_weights(self, weights_TE: Tensor, map_TP: Tensor) -> Tensor:
        """The weights of pairs whose slots are chosen: float32 [T, P], 0 elsewhere."""
        if self.is_contiguous:
            return weights_TE
        return weights_TE[:, self.expert_P.to(map_TP.device)] * map_TP
