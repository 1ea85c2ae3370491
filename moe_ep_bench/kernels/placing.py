"""Placing replicas of experts on ranks, compiled for the host.

Shapes: R = ranks, E = experts, P = slots of all ranks.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def spread(load_E, num_slots, most):
    """``placement._spread``: the expert of each replica, int64 [num_slots], and each expert's replicas, int64 [E]."""
    num_experts = load_E.size
    replica_P, replicas_E = np.arange(num_slots), np.ones(num_experts, np.int64)
    share_E = load_E.copy() if most > 1 else np.full(num_experts, -1.0)
    for slot in range(num_experts, num_slots):
        busiest = 0
        for expert in range(1, num_experts):
            if share_E[expert] > share_E[busiest]:
                busiest = expert
        replica_P[slot] = busiest
        replicas_E[busiest] += 1
        share_E[busiest] = load_E[busiest] / replicas_E[busiest] if replicas_E[busiest] < most else -1.0
    return replica_P, replicas_E


@njit(cache=True, nogil=True)
def ranks_by_risk(expert_P, share_E, shared_EE, num_ranks, room, z):
    """The rank of each replica in order, the one that then has least risk: mean load and ``z`` deviations; int64 [P].

    A rank has ``room`` replicas at most, and one of an expert where another rank has room.

    Args:
        share_E, shared_EE: mean load of a replica of each expert, and covariances.
    """
    mean_R, variance_R, held_R = np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    cross_RE, holds_RE = np.zeros((num_ranks, share_E.size)), np.zeros((num_ranks, share_E.size), np.bool_)
    rank_P = np.empty(expert_P.size, np.int64)
    for place in range(expert_P.size):
        expert = expert_P[place]
        chosen, least = -1, np.inf
        for again in range(2):  # again with ranks that hold one
            for rank in range(num_ranks):
                if held_R[rank] < room and (again or not holds_RE[rank, expert]):
                    variance = variance_R[rank] + shared_EE[expert, expert] + 2 * cross_RE[rank, expert]
                    risk = mean_R[rank] + share_E[expert] + z * np.sqrt(max(variance, 0.0))
                    if chosen < 0 or risk < least:
                        chosen, least = rank, risk
            if chosen >= 0:
                break
        rank_P[place] = chosen
        mean_R[chosen] += share_E[expert]
        variance_R[chosen] = variance_R[chosen] + shared_EE[expert, expert] + 2 * cross_RE[chosen, expert]
        for other in range(share_E.size):
            cross_RE[chosen, other] += shared_EE[expert, other]
        held_R[chosen] += 1
        holds_RE[chosen, expert] = True
    return rank_P
