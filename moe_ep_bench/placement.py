"""Plan replicas of experts ahead of the tokens; ``balancers`` splits each batch over them.

A layer is as late as its fullest *rank*, and which experts share a rank decides how full that gets. Expert e lives on
rank e // (E / R), as Megatron-Core and the policies have it; replicas of busy experts live in spare slots beside.

**Replication** buys balance with memory. Routing stays as it is, and spare *slots* on every rank hold further copies of
busy experts, which share their load. No quality is lost; the price is memory, and a forecast of the load, because
weights are put in place before the tokens come. Plan for one load, and see how the plan bears another with
``Replication.rank_load``.

``replicate`` plans for the mean load by the global policy of DeepSeek's Expert Parallelism Load Balancer
(github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv 2412.19437, section 3.4). Two greedy rules do it. *Replicate*: every
spare slot goes to the expert whose replicas bear most, each its even share; no other choice of counts makes the
greatest share smaller. *Pack*: the heaviest first, into the lightest pack that has room, all packs holding the same
number. Ties go to the lower index (the published code leaves ties between equal loads to torch's sort, which promises
no order), and sums are float64, not float32.

Packing is a heuristic, so a plan may be worse than contiguous placement. Neither rule keeps two replicas of an expert
apart, and on one rank the second relieves nobody (``Replication.stacked``; deepseek-ai/EPLB, issue 22).

``replicate_by_risk`` plans for the spread of loads from batch to batch too, as FlashLB does
(github.com/vllm-project/vllm-ascend, policy_flashlb.py). A load's *risk* is its mean and Z standard deviations; a
rank's variance counts how its experts' loads rise and fall together. Replicas go where risk is greatest, the heaviest
first onto the rank that then has the least risk, replicas of one expert onto distinct ranks. How many spare slots the
busiest quarter of experts gets, then the next, is tried around what the greedy rule says: the number whose plan has the
emptiest fullest rank, mean over the batches that are known. Ours: replicas are at most R, and where slots run out
an expert changes places so that its replicas stand apart (the published code then keeps the plan before).

Shapes: R = ranks, E = experts, L = layers, B = batches, P = slots of all ranks (physical experts), S = P / R slots of a
rank, X = layers or other rows that are planned each by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_ep_bench.errors import UserError

# FlashLB's: the upper quartile of a normal distribution; parts of the experts; slots tried to each side.
_Z, _QUARTERS, _WIDTH = 0.6744897501960817, 4, 8


def default_ep_size(num_experts: int) -> int:
    """Virtual ranks where a config leaves them open: the largest number up to 8, a node's, that divides the experts."""
    return max(size for size in range(1, 9) if num_experts % size == 0)


@dataclass(frozen=True, eq=False)
class Replication:
    """Which expert every slot holds, and what follows from it.

    Attributes:
        slot_expert_LP: int64 [L, P], the expert in each slot; slots r * S to r * S + S - 1 are rank r's. Every expert
            has at least one. (In EPLB: physical to logical.)
        num_experts: E.
        num_ranks: R, a divisor of P.
    """

    slot_expert_LP: NDArray[np.int64]
    num_experts: int
    num_ranks: int

    @cached_property
    def replicas(self) -> NDArray[np.int64]:
        """Slots of all ranks that hold each expert: int64 [L, E], at least 1. (In EPLB: expert count.)"""
        return np.stack([np.bincount(expert_P, minlength=self.num_experts) for expert_P in self.slot_expert_LP])

    @cached_property
    def stacked(self) -> NDArray[np.bool_]:
        """Ranks that hold two replicas or more of one expert, of which all but the first are wasted: bool [L, R]."""
        expert_LRS = np.sort(self.slot_expert_LP.reshape(len(self.slot_expert_LP), self.num_ranks, -1), axis=2)
        return (expert_LRS[..., 1:] == expert_LRS[..., :-1]).any(axis=2)

    def rank_load(self, load_LE: ArrayLike) -> NDArray[np.float64]:
        """Load of every rank, replicas sharing evenly: [..., L, E] -> float64 [..., L, R].

        The load may differ from the one that was planned for. A load [E] is one layer's.
        """
        load_LE = np.atleast_2d(np.asarray(load_LE, dtype=np.float64))
        *leading, num_layers, _ = load_LE.shape
        slot_expert_LP = np.broadcast_to(self.slot_expert_LP, (*leading, *self.slot_expert_LP.shape))
        slot_load_LP = np.take_along_axis(load_LE / self.replicas, slot_expert_LP, axis=-1)
        return slot_load_LP.reshape(*leading, num_layers, self.num_ranks, -1).sum(axis=-1)


def replicate(load_LE: ArrayLike, *, num_slots: int, num_ranks: int, num_groups: int = 1) -> Replication:
    """Plan which expert every slot holds, layer by layer, from the load to expect (see the module's docstring).

    Args:
        load_LE: pairs, or anything proportional to them: [L, E], or [E] for one layer; finite, non-negative.
        num_slots: P, of all ranks: a multiple of R, at least E. P - E of them are spare.
        num_groups: groups of experts, neighbours by index. As in the published code on one node, experts of busier
            groups come first where loads tie.

    Raises:
        ValueError: one line that names the field, its value and what is allowed.
    """
    load_LE = np.atleast_2d(np.asarray(load_LE, dtype=np.float64))
    num_layers, num_experts = load_LE.shape
    _check(num_experts, num_slots, num_ranks)
    busiest_LG = (-load_LE.reshape(num_layers, num_groups, -1).sum(axis=2)).argsort(axis=1, kind="stable")
    expert_LE = np.arange(num_experts).reshape(num_groups, -1)[busiest_LG].reshape(num_layers, num_experts)
    load_LE = np.take_along_axis(load_LE, expert_LE, axis=1)
    replica_LP, replicas_LE = _spread(load_LE, num_slots)
    replica_load_LP = np.take_along_axis(load_LE / replicas_LE, replica_LP, axis=1)
    slot_LP = np.take_along_axis(replica_LP, pack(replica_load_LP, num_ranks), axis=1)
    return Replication(np.take_along_axis(expert_LE, slot_LP, axis=1), num_experts, num_ranks)


def replicate_by_risk(load_BE: ArrayLike, *, num_slots: int, num_ranks: int) -> Replication:
    """Plan one layer's slots from the loads of several batches (see the module's docstring).

    Args:
        load_BE: pairs of each batch, or one [E], whose loads then do not vary.
        num_slots: P, of all ranks: a multiple of R, at least E and at most E x R.

    Raises:
        ValueError: as ``replicate``.
    """
    load_BE = np.atleast_2d(np.asarray(load_BE, dtype=np.float64))
    num_batches, num_experts = load_BE.shape
    _check(num_experts, num_slots, num_ranks)
    mean_E = load_BE.mean(axis=0)
    covariance_EE = (load_BE - mean_E).T @ (load_BE - mean_E) / max(num_batches - 1, 1)
    risk_E = mean_E + _Z * np.sqrt(covariance_EE.diagonal())
    order_E, size = np.argsort(-risk_E, kind="stable"), -(-num_experts // _QUARTERS)

    def dealt(expert_I: NDArray[np.int64], spare: int) -> NDArray[np.int64]:
        """Replicas of some experts that get so many spare slots: int64 [I]."""
        return _spread(risk_E[expert_I][None], len(expert_I) + spare, num_ranks)[1][0]

    replicas_E, spare = np.ones(num_experts, dtype=np.int64), num_slots - num_experts
    for first in range(0, num_experts, size):
        part, later = order_E[first : first + size], order_E[first + size :]
        greedy = int(dealt(order_E[first:], spare)[: len(part)].sum()) - len(part)
        fewest = max(0, greedy - _WIDTH, spare - len(later) * (num_ranks - 1))
        plans = []
        for number in range(fewest, min(spare, greedy + _WIDTH, len(part) * (num_ranks - 1)) + 1):
            replicas_E[part], replicas_E[later] = dealt(part, number), dealt(later, spare - number)
            expert_P = _pack_by_risk(mean_E, covariance_EE, replicas_E, num_ranks)
            plan = Replication(expert_P[None], num_experts, num_ranks)
            fullest = plan.rank_load(load_BE[:, None]).max(axis=2).mean()
            plans.append((fullest, abs(number - greedy), number, plan))
        *_, number, plan = min(plans, key=lambda tried: tried[:3])
        replicas_E[part] = dealt(part, number)
        spare -= number
    return plan


def other_batches(load_BE: ArrayLike, index: int) -> NDArray[np.float64]:
    """Loads of all batches but one, which a server knows ahead of it: float64 [B - 1, E].

    A batch that stands alone is planned for itself.
    """
    load_BE = np.asarray(load_BE, dtype=np.float64)
    return np.delete(load_BE, index, axis=0) if len(load_BE) > 1 else load_BE


def _spread(
    load_XE: NDArray[np.float64], num_slots: int, most: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give every expert a replica, and every slot left to the expert whose replicas then bear most.

    Args:
        most: replicas of an expert; None = any number.

    Returns:
        The expert of each replica in the order in which they were given, int64 [X, num_slots], and each expert's
        replicas, int64 [X, E].
    """
    num_rows, num_experts = load_XE.shape
    row_X = np.arange(num_rows)
    replica_XP = np.empty((num_rows, num_slots), dtype=np.int64)
    replica_XP[:, :num_experts] = np.arange(num_experts)
    replicas_XE = np.ones(load_XE.shape, dtype=np.int64)
    for slot in range(num_experts, num_slots):
        share_XE = load_XE / replicas_XE
        busiest_X = (share_XE if most is None else np.where(replicas_XE < most, share_XE, -1)).argmax(axis=1)
        replica_XP[:, slot] = busiest_X
        replicas_XE[row_X, busiest_X] += 1
    return replica_XP, replicas_XE


def pack(load_XI: NDArray[np.float64], num_packs: int) -> NDArray[np.int64]:
    """Put items into packs of equal number, the heaviest first, each into the lightest pack that has room.

    Returns:
        int64 [X, I]: the items pack by pack, inside a pack in the order in which they came. Where a pack holds one
        item there is nothing to choose, and items stay in order, as in the published code.
    """
    num_rows, num_items = load_XI.shape
    room = num_items // num_packs
    if room == 1:
        return np.tile(np.arange(num_items), (num_rows, 1))
    row_X = np.arange(num_rows)
    item_XI = np.empty(load_XI.shape, dtype=np.int64)
    pack_load_XN = np.zeros((num_rows, num_packs))
    held_XN = np.zeros((num_rows, num_packs), dtype=np.int64)
    for heaviest_X in (-load_XI).argsort(axis=1, kind="stable").T:
        pack_X = np.where(held_XN < room, pack_load_XN, np.inf).argmin(axis=1)
        item_XI[row_X, pack_X * room + held_XN[row_X, pack_X]] = heaviest_X
        pack_load_XN[row_X, pack_X] += load_XI[row_X, heaviest_X]
        held_XN[row_X, pack_X] += 1
    return item_XI


def _pack_by_risk(
    mean_E: NDArray[np.float64], covariance_EE: NDArray[np.float64], replicas_E: NDArray[np.int64], num_ranks: int
) -> NDArray[np.int64]:
    """The expert of every slot, int64 [P]: the heaviest replica first, each onto the rank that then has least risk."""
    share_E, room = mean_E / replicas_E, replicas_E.sum() // num_ranks
    shared_EE = covariance_EE / replicas_E / replicas_E[:, None]
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    mean_R, variance_R, cross_RE = np.zeros(num_ranks), np.zeros(num_ranks), np.zeros((num_ranks, len(mean_E)))
    is_full_R, holds_RE = np.zeros(num_ranks, dtype=bool), np.zeros((num_ranks, len(mean_E)), dtype=bool)
    for expert in np.argsort(-share_E, kind="stable").repeat(replicas_E[np.argsort(-share_E, kind="stable")]):
        variance_after_R = variance_R + shared_EE[expert, expert] + 2 * cross_RE[:, expert]
        risk_R = mean_R + share_E[expert] + _Z * np.sqrt(np.maximum(variance_after_R, 0))
        barred_R = is_full_R | holds_RE[:, expert]
        rank = int(np.where(is_full_R if barred_R.all() else barred_R, np.inf, risk_R).argmin())
        held[rank].append(int(expert))
        mean_R[rank] += share_E[expert]
        variance_R[rank] = variance_after_R[rank]
        cross_RE[rank] += shared_EE[expert]
        is_full_R[rank], holds_RE[rank, expert] = len(held[rank]) == room, True
    return np.array(_unstacked(held)).ravel()


def _unstacked(held: list[list[int]]) -> list[list[int]]:
    """Exchange replicas that stand together for experts of other ranks.

    A rank without the expert always has one that this rank lacks: it holds as many distinct experts, or more.
    """
    for here in held:
        for expert in [expert for place, expert in enumerate(here) if expert in here[:place]]:
            there, other = next(
                (rank, other) for rank in held if expert not in rank for other in rank if other not in here
            )
            here[len(here) - 1 - here[::-1].index(expert)], there[there.index(other)] = other, expert
    return held


def _check(num_experts: int, num_slots: int, num_ranks: int) -> None:
    if num_slots < num_experts or num_slots % num_ranks:
        raise UserError(
            f"num_slots: expected a multiple of num_ranks={num_ranks}, at least the {num_experts} experts,"
            f" got {num_slots}"
        )
