"""How popular each expert is, and on which rank the popular ones lie.

A *family* says how popularity falls from the most to the least wanted expert, up to one number, the
strength, which workloads solve for:

* ``lognormal``  odds exp(strength * z), z standard normal: a few hot experts, a long tail
* ``zipf``       odds rank^-strength
* ``dirichlet``  odds drawn from a symmetric Dirichlet distribution with concentration 1 / strength
* ``uniform``    all alike; no skew can be asked for

Which expert is hot is drawn once; with *drift* the draw changes from batch to batch, so that a hot
spot moves. Experts can then be *placed*: left scattered as drawn, spread so that contiguous ranks
are alike, or put side by side so that they share a rank. A load of the fullest rank can be asked
for; it is met by choosing which experts share that rank.

Shapes: E = experts, R = ranks, L = E / R experts of a rank.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, gammaln, ndtr

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.randomness import Stream, generator

# A rank's load is met to within this share of the target.
RANK_LOAD_TOLERANCE = 0.02


def drawn_popularity(seed: int, num_experts: int, batch: int, drift: float) -> NDArray[np.float64]:
    """Standard normal values, float64 [E], that say how much each expert is wanted in a batch.

    Consecutive batches are correlated by ``1 - drift`` (an autoregressive process); 0 = all batches alike.
    """
    normal_E = generator(seed, Stream.POPULARITY).normal(size=num_experts)
    if drift == 0:
        return normal_E
    kept = 1 - drift
    for step in range(1, batch + 1):
        fresh_E = generator(seed, Stream.POPULARITY, step).normal(size=num_experts)
        normal_E = kept * normal_E + math.sqrt(1 - kept**2) * fresh_E
    return normal_E


def log_odds(family: str, normal_E: NDArray[np.float64], strength: float) -> NDArray[np.float64]:
    """Logarithm of the experts' odds, float64 [E]; the order of ``normal_E`` is kept, strength 0 is no skew."""
    if family == "uniform" or strength == 0:
        return np.zeros_like(normal_E)
    if family == "lognormal":
        return strength * normal_E
    if family == "zipf":
        rank_E = np.empty(len(normal_E))
        rank_E[np.argsort(-normal_E, kind="stable")] = np.arange(1, len(normal_E) + 1)
        return -strength * np.log(rank_E)
    # Gamma variates in place of the Dirichlet's shares: the sum does not matter.
    concentration, uniform_E = 1 / strength, ndtr(normal_E)
    with np.errstate(divide="ignore"):
        exact_E = np.log(gammaincinv(concentration, uniform_E))
    # Where the quantile is too small for a float, its leading term is exact.
    small_E = (np.log(uniform_E) + gammaln(concentration + 1)) / concentration
    return np.where(exact_E > -600, exact_E, small_E)


def placed(placement: str, normal_E: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which drawn expert stands at each index: int64 [E], a permutation."""
    if placement == "scattered":
        return np.arange(len(normal_E))
    hottest_first_E = np.argsort(-normal_E, kind="stable")
    if placement == "adjacent":
        return hottest_first_E
    return np.array(_halved(np.exp(normal_E), hottest_first_E.tolist()))


def _halved(weight_E: NDArray[np.float64], hottest_first: list[int]) -> list[int]:
    """Order experts so that the first and the last half weigh alike, and each half's halves, as far as halves go."""
    if len(hottest_first) % 2:
        return hottest_first
    halves = _dealt(weight_E, hottest_first, 2, len(hottest_first) // 2)
    return [expert for half in halves for expert in _halved(weight_E, half)]


def placed_for_rank_load(
    load_E: NDArray[np.float64], num_ranks: int, target: float, hot_rank: int
) -> NDArray[np.int64]:
    """Place experts so that the fullest of ``num_ranks`` contiguous ranks gets ``target`` times the mean load.

    Args:
        load_E: load of each expert as drawn.
        hot_rank: which rank is to be the fullest.

    Returns:
        Which drawn expert stands at each index: int64 [E].

    Raises:
        ValueError: no choice of experts comes within ``RANK_LOAD_TOLERANCE``; the message says what could.
    """
    per_rank = len(load_E) // num_ranks
    mean = load_E.sum() / num_ranks
    hottest_first_E = np.argsort(-load_E, kind="stable")
    chosen = _nearest_set(load_E, hottest_first_E, per_rank, target * mean)
    rest = [expert for expert in hottest_first_E.tolist() if expert not in chosen]
    ranks = _dealt(load_E, rest, num_ranks - 1, per_rank)
    ranks.insert(hot_rank, sorted(chosen))
    achieved = max(load_E[experts].sum() for experts in ranks) / mean
    if abs(achieved - target) > RANK_LOAD_TOLERANCE * target:
        most = load_E[hottest_first_E[:per_rank]].sum() / mean
        least = max(load_E[experts].sum() for experts in _dealt(load_E, hottest_first_E.tolist(), num_ranks, per_rank))
        raise UserError(
            f"rank_load: expected about {least / mean:.2f} to {most:.2f} on {num_ranks} ranks with this peak load, "
            f"got {target:g}"
        )
    return np.array([expert for experts in ranks for expert in experts])


def _nearest_set(load_E: NDArray[np.float64], hottest_first_E: NDArray[np.int64], size: int, wanted: float) -> set[int]:
    """``size`` experts whose loads sum to about ``wanted``: the hottest, then exchanges that come nearer."""
    chosen, others = list(hottest_first_E[:size]), list(hottest_first_E[size:])
    while others:
        surplus = load_E[chosen].sum() - wanted
        change = load_E[others][None, :] - load_E[chosen][:, None]  # of the sum, if the two change places
        after = np.abs(surplus + change)
        best = np.unravel_index(np.argmin(after), after.shape)
        if after[best] >= abs(surplus):
            break
        chosen[best[0]], others[best[1]] = others[best[1]], chosen[best[0]]
    return {int(expert) for expert in chosen}


def _dealt(load_E: NDArray[np.float64], hottest_first: list[int], num_ranks: int, per_rank: int) -> list[list[int]]:
    """Experts dealt so that ranks are as alike as may be: each to the emptiest rank that has room."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = np.zeros(num_ranks)
    for expert in hottest_first:
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < per_rank]
        emptiest = min(free, key=lambda rank: (sums[rank], rank))
        ranks[emptiest].append(expert)
        sums[emptiest] += load_E[expert]
    return ranks
