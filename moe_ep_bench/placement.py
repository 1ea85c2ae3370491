"""Plan replicas of experts, and split a batch's pairs over them.

A layer is as late as its fullest *rank*, and which experts share a rank decides how full that gets. Expert e lives on
rank e // (E / R), as Megatron-Core and the policies have it; replicas of busy experts live in spare slots beside.

**Replication** buys balance with memory. Routing stays as it is, and spare *slots* on every rank hold further copies of
busy experts, which share their load. No quality is lost; the price is memory, and a forecast of the load, because
weights are put in place before the tokens come. Plan for one load, and see how the plan bears another with
``Replication.rank_load``.

``replicate`` plans as DeepSeek's Expert Parallelism Load Balancer does (github.com/deepseek-ai/EPLB, whose README
describes two policies; DeepSeek-V3, arXiv 2412.19437, section 3.4, uses them):

- ``hierarchical``: pack groups of experts to nodes, so that group-limited routing crosses few of them; then replicate
  each node's experts into its own slots; then pack these to the node's ranks.
- ``global``: the same as if all were one node and one group.

Two greedy rules do it. *Replicate*: every spare slot goes to the expert whose replicas bear most, each its even share;
no other choice of counts makes the greatest share smaller. *Pack*: the heaviest first, into the lightest pack that has
room, all packs holding the same number. Ties go to the lower index (the published code leaves ties between equal loads
to torch's sort, which promises no order), and sums are float64, not float32.

Packing is a heuristic, so a plan may be worse than contiguous placement. Neither rule keeps two replicas of an expert
apart, and on one rank the second relieves nobody (``Replication.stacked``; deepseek-ai/EPLB, issue 22).

Both rules know the mean load alone. FlashLB (github.com/vllm-project/vllm-ascend, policy_flashlb.py) also plans for
the variance from batch to batch, and stacks none. On a recording of GPT-OSS-20B (EP 8, one to four spare slots a rank,
planned on every other batch) its fullest rank is 8 to 10 % emptier than this plan's in batches of 2,048 neighbouring
tokens, and less than 1 % where tokens are shuffled. So replicas can gain more than this plan shows.

**Balancing.** Replicas that share evenly bear what the plan foresaw. ``balance`` splits each expert's pairs anew for
the batch at hand, so that the fullest rank is as empty as these replicas allow: the linear program of DeepSeek's LPLB
(github.com/deepseek-ai/LPLB). The split is LPLB's, the plan EPLB's: LPLB joins ranks by a graph of its own along which
replicas are placed. ``least_fullest`` bounds what any plan and any split could reach.

Shapes: R = ranks, E = experts, L = layers, P = slots of all ranks (physical experts), S = P / R slots of a rank,
X = layers x nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.models import ModelSpec

# What a linear program takes to balance a batch inside a node, by the README of LPLB; longer beyond one.
LPLB_SOLVE_US = 100.0


def default_ep_size(num_experts: int) -> int:
    """Virtual ranks where a config leaves them open: the largest number up to 8, a node's, that divides the experts."""
    return max(size for size in range(1, 9) if num_experts % size == 0)


@dataclass(frozen=True, eq=False)
class Replication:
    """Which expert every slot holds, and what follows from it.

    Attributes:
        policy: ``hierarchical`` or ``global``.
        slot_expert_LP: int64 [L, P], the expert in each slot; slots r * S to r * S + S - 1 are rank r's. Every expert
            has at least one. (In EPLB: physical to logical.)
        num_experts: E.
        num_ranks: R, a divisor of P.
    """

    policy: str
    slot_expert_LP: NDArray[np.int64]
    num_experts: int
    num_ranks: int

    @property
    def num_slots(self) -> int:
        return self.slot_expert_LP.shape[1]

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

    def extra_bytes_per_rank(self, model: ModelSpec, bytes_per_weight: float) -> float:
        """Memory of a rank's spare slots: (P - E) / R experts in each of the model's MoE layers.

        Slots count whatever they hold. Where R does not divide E, the result is the mean over ranks of what exceeds
        one home for every expert. Scales of quantised blocks are not counted.
        """
        spare_slots = self.num_slots - self.num_experts
        expert_bytes = model.expert_parameters * bytes_per_weight
        return spare_slots * model.num_moe_layers * expert_bytes / self.num_ranks


def replicate(
    load_LE: ArrayLike,
    *,
    num_slots: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    policy: str = "auto",
) -> Replication:
    """Plan which expert every slot holds, layer by layer, from the load to expect (see the module's docstring).

    Args:
        load_LE: pairs, or anything proportional to them: [L, E], or [E] for one layer; finite, non-negative.
        num_slots: P, of all ranks: a multiple of R, at least E. P - E of them are spare.
        num_nodes, num_groups: nodes of ranks and groups of experts, of equal size, neighbours by index.
        policy: ``hierarchical``, ``global`` (reads neither nodes nor groups), or ``auto``, as published: hierarchical
            where num_nodes divides num_groups.

    Raises:
        ValueError: one line that names the field, its value and what is allowed.
    """
    load_LE = np.atleast_2d(np.asarray(load_LE, dtype=np.float64))
    num_layers, num_experts = load_LE.shape
    policy = _check(num_experts, num_slots, num_ranks, num_nodes, num_groups, policy)
    if policy == "global":
        num_nodes = num_groups = 1

    # Packed groups put the experts into the order of nodes.
    group_load_LG = load_LE.reshape(num_layers, num_groups, -1).sum(axis=2)
    expert_of_group_GI = np.arange(num_experts).reshape(num_groups, -1)
    expert_LE = expert_of_group_GI[pack(group_load_LG, num_nodes)].reshape(num_layers, num_experts)

    # From here on, every node of every layer is a row of its own.
    expert_XE = expert_LE.reshape(num_layers * num_nodes, -1)
    load_XE = np.take_along_axis(load_LE, expert_LE, axis=1).reshape(expert_XE.shape)
    replica_XP, replicas_XE = _spread(load_XE, num_slots // num_nodes)
    replica_load_XP = np.take_along_axis(load_XE / replicas_XE, replica_XP, axis=1)
    slot_XP = np.take_along_axis(replica_XP, pack(replica_load_XP, num_ranks // num_nodes), axis=1)
    slot_expert_LP = np.take_along_axis(expert_XE, slot_XP, axis=1).reshape(num_layers, num_slots)
    return Replication(policy, slot_expert_LP, num_experts, num_ranks)


def stacking_words(stacked: NDArray[np.bool_], ranks: str) -> str:
    """Say on how many ``ranks`` the second of two replicas relieves nobody (``Replication.stacked``)."""
    on = f"{stacked.sum()} of {stacked.size} {ranks}"
    return f"two replicas of one expert stand together, where the second relieves nobody, on {on}"


def load_of_others(load_BE: ArrayLike) -> NDArray[np.float64]:
    """For each batch the mean load of all others, which a server knows ahead of it: float64 [B, E].

    A batch that stands alone is planned for itself.
    """
    load_BE = np.asarray(load_BE, dtype=np.float64)
    return (load_BE.sum(axis=0) - load_BE) / (len(load_BE) - 1) if len(load_BE) > 1 else load_BE


def _spread(load_XE: NDArray[np.float64], num_slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give every expert a replica, and every slot left to the expert whose replicas then bear most.

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
        busiest_X = (load_XE / replicas_XE).argmax(axis=1)
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


def balance(slot_expert_P: ArrayLike, load_E: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """Split every expert's pairs over its slots so that the fullest rank is as empty as these slots allow.

    The linear program: minimise t, where x_er >= 0 pairs of expert e go to rank r that holds it, all of an expert's
    pairs go somewhere, and no rank gets more than t. Of whole pairs the fullest rank gets t rounded up, because flows
    with whole capacities have whole solutions: rounding costs less than one pair.

    Args:
        slot_expert_P: the expert in each slot, P / num_ranks of them on every rank, as in ``Replication``.
        load_E: whole pairs of every expert in one batch, below 2**31 in all.

    Returns:
        int64 [P], pairs of every slot. Of an expert's slots on one rank the first takes all.
    """
    from scipy.optimize import linprog  # It takes a second to import.
    from scipy.sparse import csr_array

    expert_P, load_E, R = np.asarray(slot_expert_P), np.asarray(load_E, dtype=np.int64), num_ranks
    rank_P = np.arange(len(expert_P)) // (len(expert_P) // R)
    # V = experts on ranks, in however many slots; those on several ranks are X experts in S places.
    place_V, first_V = np.unique(rank_P * len(load_E) + expert_P, return_index=True)
    rank_V, expert_V = np.divmod(place_V, len(load_E))
    is_shared_V = np.bincount(expert_V, minlength=len(load_E))[expert_V] > 1
    pairs_V = np.where(is_shared_V, 0, load_E[expert_V])
    if is_shared_V.any():
        fixed_R, rank_S = np.bincount(rank_V, pairs_V, minlength=R), rank_V[is_shared_V]
        shared_X, expert_S = np.unique(expert_V[is_shared_V], return_inverse=True)
        load_X, S = load_E[shared_X], len(rank_S)
        share_S, values, minus_t = np.arange(S), np.ones(S), (-np.ones(R), (np.arange(R), np.full(R, S)))
        on_ranks = csr_array((values, (rank_S, share_S)), shape=(R, S + 1)) + csr_array(minus_t, shape=(R, S + 1))
        of_experts = csr_array((values, (expert_S, share_S)), shape=(len(load_X), S + 1))
        solution = linprog(
            np.r_[np.zeros(S), 1.0], A_ub=on_ranks, b_ub=-fixed_R, A_eq=of_experts, b_eq=load_X, method="highs-ds"
        )
        assert solution.status == 0, solution.message
        pairs_V[is_shared_V] = _whole_pairs(solution.fun, load_X, fixed_R.astype(np.int64), expert_S, rank_S)
    pairs_P = np.zeros(len(expert_P), dtype=np.int64)
    pairs_P[first_V] = pairs_V
    return pairs_P


def _whole_pairs(
    least: float,
    load_X: NDArray[np.int64],
    fixed_R: NDArray[np.int64],
    expert_S: NDArray[np.int64],
    rank_S: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Whole pairs of every place, no rank above ``least`` rounded up: a flow from experts over places to ranks.

    Args:
        fixed_R: pairs that a rank has beside.
        expert_S, rank_S: of each place.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    X, R = len(load_X), len(fixed_R)
    source, sink, num_nodes = X + R, X + R + 1, X + R + 2
    tails = np.r_[np.full(X, source), expert_S, X + np.arange(R)]
    heads = np.r_[np.arange(X), X + rank_S, np.full(R, sink)]
    most = int(np.ceil(least - 1e-6 * max(1.0, least)))  # The solver may be so far off.
    while True:
        room_R = np.maximum(most - fixed_R, 0)
        capacities = np.r_[load_X, load_X[expert_S], room_R].astype(np.int32)
        flow = maximum_flow(csr_array((capacities, (tails, heads)), shape=(num_nodes, num_nodes)), source, sink)
        if flow.flow_value == load_X.sum():
            return np.asarray(flow.flow.toarray()[expert_S, X + rank_S], dtype=np.int64)
        most += 1


def least_fullest(load_E: ArrayLike, *, num_slots: int, num_ranks: int) -> float:
    """A bound: no placement of so many slots and no split of pairs has a fullest rank with fewer pairs.

    The larger of two: the mean rank's load, and the greatest share of an expert, whose replicas together bear all of
    it, under the best numbers of replicas (``_spread``).
    """
    load_1E = np.asarray(load_E, dtype=np.float64)[None]
    _, replicas_1E = _spread(load_1E, num_slots)
    return float(max(load_1E.sum() / num_ranks, (load_1E / replicas_1E).max()))


def _check(num_experts: int, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int, policy: str) -> str:
    """Check the numbers against each other; return the policy, with ``auto`` decided."""
    if num_slots < num_experts or num_slots % num_ranks:
        raise UserError(
            f"num_slots: expected a multiple of num_ranks={num_ranks}, at least the {num_experts} experts,"
            f" got {num_slots}"
        )
    if policy == "auto":
        policy = "global" if num_groups % num_nodes else "hierarchical"
    if policy == "global":
        return policy
    if num_groups % num_nodes:
        raise UserError(f"num_groups: expected a multiple of num_nodes={num_nodes} for {policy}, got {num_groups}")
    if num_experts % num_groups:
        raise UserError(f"num_groups: expected a divisor of the {num_experts} experts, got {num_groups}")
    if num_ranks % num_nodes:
        raise UserError(f"num_nodes: expected a divisor of num_ranks={num_ranks}, got {num_nodes}")
    return policy
