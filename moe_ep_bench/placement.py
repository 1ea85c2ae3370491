"""Plan replicas of experts ahead of the tokens; ``balancers`` splits each batch over them.

A layer is as late as its fullest *rank*, and which experts share a rank decides how full that gets. Expert e lives on
rank e // (E / R), as Megatron-Core and the policies have it; replicas of busy experts live in spare slots beside.

**Replication** buys balance with memory. Routing stays as it is, and spare *slots* on every rank hold further copies of
busy experts, which share their load. No quality is lost; the price is memory, and a forecast of the load, because
weights are put in place before the tokens come. Plan for one load, and see how the plan bears another with
``rank_load``. A plan is the expert in each slot, int64 [P]: slots r * S to r * S + S - 1 are rank r's, and every expert
has one at least.

``replicate`` plans for the mean load by the global policy of DeepSeek's Expert Parallelism Load Balancer
(github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv 2412.19437, section 3.4). Two greedy rules do it. *Replicate*: every
spare slot goes to the expert whose replicas bear most, each its even share; no other choice of counts makes the
greatest share smaller. *Pack*: the heaviest first, into the lightest pack that has room, all packs holding the same
number. Ties go to the lower index (the published code leaves ties between equal loads to torch's sort, which promises
no order), and sums are float64, not float32.

Packing is a heuristic, so a plan may be worse than contiguous placement. Neither rule keeps two replicas of an expert
apart, and on one rank the second relieves nobody (deepseek-ai/EPLB, issue 22).

``replicate_by_risk`` plans for the spread of loads from batch to batch too, as FlashLB does
(github.com/vllm-project/vllm-ascend, policy_flashlb.py). A load's *risk* is its mean and Z standard deviations; a
rank's variance counts how its experts' loads rise and fall together. Replicas go where risk is greatest, the heaviest
first onto the rank that then has the least risk, replicas of one expert onto distinct ranks. How many spare slots the
busiest quarter of experts gets, then the next, is tried around what the greedy rule says: the number whose plan has the
emptiest fullest rank, mean over the batches that are known. Ours: replicas are at most R, and where slots run out
an expert changes places so that its replicas stand apart (the published code then keeps the plan before).

Shapes: R = ranks, E = experts, B = batches, P = slots of all ranks (physical experts), S = P / R slots of a rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_ep_bench.errors import UserError

# FlashLB's: the upper quartile of a normal distribution; parts of the experts; slots tried to each side.
_Z, _QUARTERS, _WIDTH = 0.6744897501960817, 4, 8


def default_ep_size(num_experts: int) -> int:
    """Virtual ranks where a config leaves them open: the largest number up to 8, a node's, that divides the experts."""
    return max(size for size in range(1, 9) if num_experts % size == 0)


def rank_load(load_BE: ArrayLike, slot_expert_P: NDArray[np.int64], num_ranks: int) -> NDArray[np.float64]:
    """Load of every rank under a plan, replicas sharing evenly: [..., E] -> float64 [..., R]."""
    load_BE = np.asarray(load_BE, dtype=np.float64)
    slot_load_BP = (load_BE / np.bincount(slot_expert_P, minlength=load_BE.shape[-1]))[..., slot_expert_P]
    return slot_load_BP.reshape(*load_BE.shape[:-1], num_ranks, -1).sum(axis=-1)


def replicate(load_E: ArrayLike, *, num_slots: int, num_ranks: int, num_groups: int = 1) -> NDArray[np.int64]:
    """Plan which expert every slot holds from the load to expect (see the module's docstring): int64 [P].

    Args:
        load_E: pairs, or anything proportional to them: finite, non-negative.
        num_slots: P, of all ranks: a multiple of R, at least E. P - E of them are spare.
        num_groups: groups of experts, neighbours by index. As in the published code on one node, experts of busier
            groups come first where loads tie.

    Raises:
        ValueError: one line that names the field, its value and what is allowed.
    """
    load_E = np.asarray(load_E, dtype=np.float64)
    _check(len(load_E), num_slots, num_ranks)
    busiest_G = (-load_E.reshape(num_groups, -1).sum(axis=1)).argsort(kind="stable")
    expert_E = np.arange(len(load_E)).reshape(num_groups, -1)[busiest_G].ravel()
    replica_P, replicas_E = _spread(load_E[expert_E], num_slots)
    return expert_E[replica_P[pack((load_E[expert_E] / replicas_E)[replica_P], num_ranks)]]


def replicate_by_risk(load_BE: ArrayLike, *, num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    """Plan the slots from the loads of several batches (see the module's docstring): int64 [P].

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
        return _spread(risk_E[expert_I], len(expert_I) + spare, num_ranks)[1]

    replicas_E, spare = np.ones(num_experts, dtype=np.int64), num_slots - num_experts
    for first in range(0, num_experts, size):
        part, later = order_E[first : first + size], order_E[first + size :]
        greedy = int(dealt(order_E[first:], spare)[: len(part)].sum()) - len(part)
        fewest = max(0, greedy - _WIDTH, spare - len(later) * (num_ranks - 1))
        plans = []
        for number in range(fewest, min(spare, greedy + _WIDTH, len(part) * (num_ranks - 1)) + 1):
            replicas_E[part], replicas_E[later] = dealt(part, number), dealt(later, spare - number)
            expert_P = _pack_by_risk(mean_E, covariance_EE, replicas_E, num_ranks)
            fullest = rank_load(load_BE, expert_P, num_ranks).max(axis=1).mean()
            plans.append((fullest, abs(number - greedy), number, expert_P))
        *_, number, expert_P = min(plans, key=lambda tried: tried[:3])
        replicas_E[part] = dealt(part, number)
        spare -= number
    return expert_P


def other_batches(load_BE: ArrayLike, index: int) -> NDArray[np.float64]:
    """Loads of all batches but one, which a server knows ahead of it: float64 [B - 1, E].

    A batch that stands alone is planned for itself.
    """
    load_BE = np.asarray(load_BE, dtype=np.float64)
    return np.delete(load_BE, index, axis=0) if len(load_BE) > 1 else load_BE


def _spread(
    load_E: NDArray[np.float64], num_slots: int, most: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give every expert a replica, and every slot left to the expert whose replicas then bear most.

    Args:
        most: replicas of an expert; None = any number.

    Returns:
        The expert of each replica in the order in which they were given, int64 [num_slots], and each expert's
        replicas, int64 [E].
    """
    num_experts = len(load_E)
    replica_P, replicas_E = np.arange(num_slots), np.ones(num_experts, dtype=np.int64)
    for slot in range(num_experts, num_slots):
        share_E = load_E / replicas_E
        busiest = (share_E if most is None else np.where(replicas_E < most, share_E, -1)).argmax()
        replica_P[slot] = busiest
        replicas_E[busiest] += 1
    return replica_P, replicas_E


def pack(load_I: NDArray[np.float64], num_packs: int) -> NDArray[np.int64]:
    """Put items into packs of equal number, the heaviest first, each into the lightest pack that has room.

    Returns:
        int64 [I]: the items pack by pack, inside a pack in the order in which they came. Where a pack holds one
        item there is nothing to choose, and items stay in order, as in the published code.
    """
    room = len(load_I) // num_packs
    if room == 1:
        return np.arange(len(load_I))
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    pack_load_N = np.zeros(num_packs)
    for heaviest in (-load_I).argsort(kind="stable").tolist():
        lightest = int(np.where([len(items) < room for items in packs], pack_load_N, np.inf).argmin())
        packs[lightest].append(heaviest)
        pack_load_N[lightest] += load_I[heaviest]
    return np.array(packs).ravel()


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
