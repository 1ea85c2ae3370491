"""Solve for the targets of synthetic traffic: loads of experts and ranks, neighbours alike, sharp scores.

Every target grows with one number of the recipe, so halving an interval finds it: peak load with the strength of
popularity, neighbour overlap with the share of copied noise, and top-k share with the sharpness, a factor on all
logits.

Shapes: T = tokens, E = experts, K = top_k, R = EP ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.placement import pack
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.workload.scores import chosen_experts

# A batch's peak load is met to within this share of the target, or to one token; a rank's load to within the second.
TOLERANCE, RANK_LOAD_TOLERANCE = 0.01, 0.02
_SHARE_TOLERANCE, _COPYING_TOLERANCE = 1e-4, 2e-3
# The sharpness: from flat scores to one-hot ones, beyond float32 in any case.
_LEAST_SHARPNESS, _GREATEST_SHARPNESS = 1e-4, 1e4
_GREATEST_STRENGTH = 1e6
# Rounds of solving for every expert's load; and log odds that no noise outweighs.
_MOST_ROUNDS, _NEVER = 50, 60.0
# Neighbours that copy with a greater probability are equal.
_MOST_COPYING = 0.9999


def root(value: Callable[[float], float], target: float, low: float, high: float, tolerance: float) -> float:
    """Find where a growing function is ``target``, to within ``tolerance``; an end where it is not between them.

    Illinois' form of the rule of false position. Where the function jumps over the target, the result is one side of
    the jump.
    """
    below, above = value(low) - target, value(high) - target
    if below >= -tolerance or above <= tolerance:
        return low if below >= -tolerance else high
    last = 0.0
    while True:
        place = high - above * (high - low) / (above - below)
        surplus = value(place) - target
        if abs(surplus) <= tolerance or not low < place < high or high - low < 1e-9 * max(1.0, high):
            return place
        if surplus > 0:
            high, above, below = place, surplus, below / 2 if last > 0 else below
        else:
            low, below, above = place, surplus, above / 2 if last < 0 else above
        last = surplus


def solve_strength(
    loads: Callable[[float], NDArray[np.int64]], peak_load: float, num_tokens: int, most: float
) -> float:
    """Find the strength of popularity at which the busiest expert gets ``peak_load`` times the mean load.

    A greater strength swaps one token's choice at a time. So the busiest load moves in steps of one token, and the
    result is within ``TOLERANCE`` or a token of the target.

    Args:
        loads: the experts' loads, [E], at a strength; 0 is noise alone.
        most: the greatest peak load there is, experts / top_k.

    Raises:
        ValueError: noise alone gives more than ``peak_load``, or no strength gives as much; the range.
    """
    busiest = functools.cache(lambda strength: int(loads(strength).max()))
    alone_E = loads(0.0)
    mean_load = alone_E.sum() / len(alone_E)
    target = peak_load * mean_load
    tolerance = max(TOLERANCE * target, 1.0)
    if alone_E.max() > target + tolerance:
        least = math.ceil(alone_E.max() / mean_load * 1000) / 1000
        raise UserError(
            f"peak_load: expected {least:g} to {most:g} (what noise alone gives with {num_tokens} "
            f"tokens, to experts / top_k), got {peak_load:g}"
        )
    if alone_E.max() >= target - tolerance:
        return 0.0
    high = 0.5
    # Ends: with strength enough the most popular expert is every token's.
    while busiest(high) < target - tolerance:
        high *= 2
        if high > _GREATEST_STRENGTH:
            raise UserError(f"peak_load: expected at most {busiest(high) / mean_load:.3g}, got {peak_load:g}")
    return root(busiest, target, high / 2 if high > 0.5 else 0.0, high, tolerance)


def solve_loads(
    loads: Callable[[NDArray[np.float64]], NDArray[np.int64]], wanted_E: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Find the log odds at which experts get the loads that are wanted, each to ``TOLERANCE`` or two tokens.

    An expert's odds are raised by as much as it lacks, over and over; what is left after ``_MOST_ROUNDS`` is reported
    as achieved.

    Args:
        loads: the experts' loads, [E], by log odds.
        wanted_E: in tokens; experts without any are never chosen.
    """
    bias_E = np.where(wanted_E > 0, np.log(np.maximum(wanted_E, 1e-9)), -_NEVER)
    for _ in range(_MOST_ROUNDS):
        load_E = loads(bias_E)
        if (np.abs(load_E - wanted_E) <= np.maximum(TOLERANCE * wanted_E, 2.0)).all():
            break
        bias_E += np.where(wanted_E > 0, np.log((wanted_E + 0.5) / (load_E + 0.5)), 0.0)
    return bias_E


def solve_copying(shared: Callable[[float], float], overlap: float, top_k: int, *, or_chance: bool = False) -> float:
    """Find the probability of copied noise at which neighbouring tokens share ``overlap`` of their experts.

    Args:
        shared: the mean of experts that neighbours share, by that probability; 0 is independent tokens.
        or_chance: 0, independent tokens, where these already share more.

    Raises:
        ValueError: out of reach; the message gives the range, from independent tokens to equal ones.
    """
    least = shared(0.0)
    if or_chance and overlap < least:
        return 0.0
    if not least <= overlap < top_k:
        raise UserError(
            f"neighbour_overlap: expected {np.ceil(least * 100) / 100:g} (what tokens share by chance under this skew) "
            f"to below {top_k}, got {overlap:g}"
        )
    return root(shared, overlap, 0.0, _MOST_COPYING, _COPYING_TOLERANCE * overlap)


def solve_sharpness(logits_TE: NDArray[np.float64], selection: RoutingContext, topk_share: float) -> float:
    """Find the factor on all logits at which the top-k hold ``topk_share`` of the score mass, mean over tokens."""
    logits_TE = logits_TE - logits_TE.max(axis=1, keepdims=True)
    ungrouped_TE = chosen_experts(logits_TE, selection) if selection.num_groups is None else None

    def share(log_sharpness: float) -> float:
        sharpness = math.exp(log_sharpness)
        chosen_TE = chosen_experts(logits_TE, selection, sharpness) if ungrouped_TE is None else ungrouped_TE
        odds_TE = np.exp(sharpness * logits_TE)
        return float(((odds_TE * chosen_TE).sum(axis=1) / odds_TE.sum(axis=1)).mean())

    ends = math.log(_LEAST_SHARPNESS), math.log(_GREATEST_SHARPNESS)
    return math.exp(root(share, topk_share, *ends, _SHARE_TOLERANCE))


def place_for_rank_load(load_E: NDArray[np.int64], num_ranks: int, target: float, hot_rank: int) -> NDArray[np.int64]:
    """Place experts so that the fullest of ``num_ranks`` contiguous ranks gets ``target`` times the mean load.

    The hot rank starts from the hottest experts and exchanges them until its load is met; where exchanges end short of
    it, the next start takes one more of the coldest. The others share the rest as evenly as ``placement.pack`` does it.

    Args:
        load_E: load of each expert as drawn.
        hot_rank: which rank is to be the fullest.

    Returns:
        Which drawn expert stands at each index: int64 [E].

    Raises:
        ValueError: no choice of experts comes within ``RANK_LOAD_TOLERANCE``; the message says what could.
    """

    def packed(experts: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
        """Share some experts among ranks as evenly as may be: int64 [R, experts of a rank]."""
        return experts[pack(load_E[experts].astype(np.float64), ranks)].reshape(ranks, -1)

    per_rank, mean = len(load_E) // num_ranks, load_E.sum() / num_ranks
    hottest_first_E = np.argsort(-load_E, kind="stable")
    for num_cold in range(per_rank + 1):
        start = np.roll(hottest_first_E, num_cold)
        hot, others = _exchanged(load_E, start[:per_rank], start[per_rank:], target * mean)
        rank_RL = np.insert(packed(np.sort(others), num_ranks - 1), hot_rank, np.sort(hot), axis=0)
        achieved = load_E[rank_RL].sum(axis=1).max() / mean
        if abs(achieved - target) <= RANK_LOAD_TOLERANCE * target:
            return rank_RL.ravel()
    most = load_E[hottest_first_E[:per_rank]].sum() / mean
    least = load_E[packed(np.arange(len(load_E)), num_ranks)].sum(axis=1).max() / mean
    raise UserError(
        f"rank_load: expected about {least:.2f} to {most:.2f} on {num_ranks} ranks with this peak load, got {target:g}"
    )


def _exchanged(
    load_E: NDArray[np.int64], hot: NDArray[np.int64], others: NDArray[np.int64], wanted: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Exchange experts of the hot rank for others as long as that brings its load nearer to what is wanted."""
    hot, others = hot.copy(), others.copy()
    while others.size:
        surplus = load_E[hot].sum() - wanted
        after = np.abs(surplus + load_E[others][None, :] - load_E[hot][:, None])  # if the two change places
        place = np.unravel_index(np.argmin(after), after.shape)
        if after[place] >= abs(surplus):
            break
        hot[place[0]], others[place[1]] = others[place[1]], hot[place[0]]
    return hot, others
