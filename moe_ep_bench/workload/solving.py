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

# A batch's peak load is met to within this share of the target, or to one token; a rank's load to within the second;
# the traffic's loads to within the third.
TOLERANCE, RANK_LOAD_TOLERANCE, LONG_RUN_TOLERANCE = 0.01, 0.02, 1e-3
_SHARE_TOLERANCE, _COPYING_TOLERANCE = 1e-4, 2e-3
# The sharpness: from flat scores to one-hot ones, beyond float32 in any case.
_LEAST_SHARPNESS, _GREATEST_SHARPNESS = 1e-4, 1e4
_GREATEST_STRENGTH = 1e6
# The capacity factor of ``cuts`` that is the mean load: as much lies above it as below.
_MEAN = 1.0
# Of a profile: the load that the coldest expert lacks, and how loads below the mean fall, as recordings have it; and
# how steeply those above it may fall.
_MOST_LACKING, _USUAL_FALL, _FALLS = 0.98, 0.8, (0.05, 40.0)
# Places of experts: starts, and exchanges tried from each.
_STARTS, _EXCHANGES = 24, 6000
# Rounds of solving for every expert's load; log odds that no noise outweighs; shares of tokens nearer to none or all
# are taken for this one; loads over the mean below which tolerances are those of this load.
_MOST_ROUNDS, _NEVER, _LEAST_SHARE, _COLD = 50, 60.0, 1e-6, 0.05
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
    loads: Callable[[float], NDArray[np.float64]], peak_load: float, most: float, num_tokens: int | None = None
) -> float:
    """Find the strength of popularity at which the busiest expert gets ``peak_load`` times the mean load.

    In a batch a greater strength swaps one token's choice at a time. So the busiest load moves in steps of one token,
    and the result is within ``TOLERANCE`` or a token of the target.

    Args:
        loads: the experts' loads over the mean, [E], at a strength; 0 is noise alone.
        most: the greatest peak load there is, experts / top_k.
        num_tokens: of the batch whose loads these are; None = the traffic's.

    Raises:
        ValueError: noise alone gives more than ``peak_load``, or no strength gives as much; the range.
    """
    busiest = functools.cache(lambda strength: float(loads(strength).max()))
    tolerance = LONG_RUN_TOLERANCE * peak_load
    if num_tokens is not None:
        tolerance = max(TOLERANCE * peak_load, most / num_tokens)
    if busiest(0.0) > peak_load + tolerance:
        least = math.ceil(busiest(0.0) * 1000) / 1000
        raise UserError(
            f"expected {least:g} to {most:g} (what noise alone gives with {num_tokens} tokens, to "
            f"experts / top_k), got {peak_load:g}; peak_load is of the traffic, to which few tokens add chance",
            "batch_peak_load",
        )
    if busiest(0.0) >= peak_load - tolerance:
        return 0.0
    high = 0.5
    # Ends: with strength enough the most popular expert is every token's.
    while busiest(high) < peak_load - tolerance:
        high *= 2
        if high > _GREATEST_STRENGTH:
            raise UserError(f"expected at most {busiest(high):.3g}, got {peak_load:g}", "peak_load")
    return root(busiest, peak_load, high / 2 if high > 0.5 else 0.0, high, tolerance)


def solve_loads(
    loads: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    wanted_E: NDArray[np.float64],
    most: float,
    num_tokens: int | None = None,
    start_E: NDArray[np.float64] | None = None,
    rounds: int = _MOST_ROUNDS,
) -> NDArray[np.float64]:
    """Find the log odds at which experts get the loads that are wanted, each to ``LONG_RUN_TOLERANCE`` or two tokens.

    An expert that takes a share p of the tokens has arrived in their races with a hazard of -log(1 - p). Its odds are
    raised by as much as the hazard lacks, over and over; what is left after all rounds is reported as achieved.

    Args:
        loads: the experts' loads over the mean, [E], by log odds.
        wanted_E: over the mean; experts without any are never chosen.
        most: the greatest load over the mean there is, experts / top_k.
        num_tokens: in which loads are counted; None = expected ones.
        start_E: log odds that are near; None = from the loads.
    """
    least, token = (_LEAST_SHARE, 0.0) if num_tokens is None else (0.5 / num_tokens, most / num_tokens)

    def log_hazard(load_E: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(-np.log1p(-np.clip(load_E / most, least, 1 - least)))

    bias_E = np.where(wanted_E > 0, log_hazard(wanted_E), -_NEVER) if start_E is None else start_E.copy()
    for _ in range(rounds):
        load_E = loads(bias_E)
        tolerance_E = np.maximum(LONG_RUN_TOLERANCE * np.maximum(wanted_E, _COLD), 2 * token)
        if (np.abs(load_E - wanted_E) <= tolerance_E).all():
            break
        bias_E += np.where(wanted_E > 0, log_hazard(wanted_E) - log_hazard(load_E), 0.0)
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
            f"expected {np.ceil(least * 100) / 100:g} (what tokens share by chance under this skew) "
            f"to below {top_k}, got {overlap:g}",
            "neighbour_overlap",
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
        load_E: load of each expert as drawn, in any unit.
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
        f"expected about {least:.2f} to {most:.2f} on {num_ranks} ranks with this peak load, got {target:g}",
        "rank_load",
    )


def place_in_groups(
    load_E: NDArray[np.int64], num_ranks: int, target: float, hot_rank: int, num_groups: int
) -> NDArray[np.int64]:
    """The same for a model that routes by groups: experts change places within theirs, and groups change places.

    A rank holds whole groups, or a group whole ranks. In the latter case the heaviest group that can has the hot rank.

    Raises:
        ValueError: also where neither divides the other.
    """
    size, per_rank = len(load_E) // num_groups, len(load_E) // num_ranks
    load_GL = load_E.reshape(num_groups, size)
    if per_rank % size == 0:
        order_G = place_for_rank_load(load_GL.sum(axis=1), num_ranks, target, hot_rank)
        return (order_G[:, None] * size + np.arange(size)).ravel()
    if size % per_rank:
        raise UserError(
            f"expected ranks that hold whole groups, or parts of one, of {num_groups}; got {num_ranks}", "rank_load"
        )
    of_group, mean = size // per_rank, load_E.sum() / num_ranks
    packed_GL = np.stack([pack(of_one.astype(np.float64), of_group) for of_one in load_GL])
    packed_G = np.take_along_axis(load_GL, packed_GL, axis=1).reshape(num_groups, of_group, -1).sum(axis=2).max(axis=1)
    most_G = np.sort(load_GL, axis=1)[:, -per_rank:].sum(axis=1)
    for hot in np.argsort(-load_GL.sum(axis=1), kind="stable"):
        others = np.delete(np.arange(num_groups), hot)
        if (packed_G[others] > (1 + RANK_LOAD_TOLERANCE) * target * mean).any():
            continue
        try:
            wanted = target * mean / (load_GL[hot].sum() / of_group)
            inside_L = _in_one_group(load_GL[hot], of_group, wanted, hot_rank % of_group)
        except UserError:
            continue
        order_G = np.insert(others, hot_rank // of_group, hot)
        places_GL = packed_GL.copy()
        places_GL[hot] = inside_L
        return (order_G[:, None] * size + places_GL[order_G]).ravel()
    raise UserError(
        f"expected about {packed_G.max() / mean:.2f} to {most_G.max() / mean:.2f} on {num_ranks} ranks with"
        f" this peak load and {num_groups} groups, got {target:g}",
        "rank_load",
    )


def _in_one_group(load_L: NDArray[np.int64], num_ranks: int, target: float, hot_rank: int) -> NDArray[np.int64]:
    if num_ranks == 1:
        if abs(target - 1) > RANK_LOAD_TOLERANCE:
            raise UserError(f"expected 1 on one rank, got {target:g}", "rank_load")
        return np.arange(len(load_L))
    return place_for_rank_load(load_L, num_ranks, target, hot_rank)


def load_profile(num_experts: int, peak_load: float, dropped: dict[float, float]) -> NDArray[np.float64]:
    """Loads of experts over the mean, descending, which have a peak and lose given shares at two capacities.

    Above the mean stand the peak and loads that fall to it as a power; below it, loads that fall to almost nothing as
    another. For each number of experts above the mean the two powers follow from the shares; of these numbers the one
    counts whose loads below the mean fall as recorded ones do.

    Args:
        dropped: share of the pairs above a capacity, by capacity factor: that of 1, and another above 1.

    Returns:
        float64 [E], mean 1.

    Raises:
        ValueError: no such profile has these numbers.
    """
    (other, wanted), excess = next(cut for cut in dropped.items() if cut[0] != _MEAN), num_experts * dropped[_MEAN]
    rest = excess - (peak_load - 1)
    found: list[tuple[float, NDArray[np.float64]]] = []
    for num_above in range(2, num_experts):
        above_N = 1 - np.arange(num_above - 1) / (num_above - 1)
        lacking_N = (np.arange(num_experts - num_above) + 0.5) / (num_experts - num_above)

        def excesses(fall: float, above_N: NDArray[np.float64] = above_N) -> NDArray[np.float64]:
            return np.concatenate([[peak_load - 1], rest * above_N**fall / (above_N**fall).sum()])

        def above_other(fall: float, excesses: Callable[[float], NDArray[np.float64]] = excesses) -> float:
            return float(np.maximum(excesses(fall) - (other - 1), 0).sum()) / num_experts

        def lacking(fall: float, lacking_N: NDArray[np.float64] = lacking_N) -> float:
            return -_MOST_LACKING * float((lacking_N**fall).sum())

        least, most = above_other(_FALLS[0]), above_other(_FALLS[1])
        if rest < 0 or not least * (1 - TOLERANCE) <= wanted <= most * (1 + TOLERANCE) or lacking(0.0) > -excess:
            continue
        excess_N = excesses(root(above_other, wanted, *_FALLS, 1e-4 * wanted + 1e-9))
        if excess_N.max() > peak_load - 1 + 1e-9:
            continue
        fall = root(lacking, -excess, 0.0, 200.0, 1e-6 * num_experts)
        profile_E = np.concatenate([1 + excess_N, 1 - _MOST_LACKING * lacking_N**fall])
        found.append((abs(math.log((fall + 0.05) / _USUAL_FALL)), profile_E))
    if not found:
        shares = ", ".join(f"{share:g} at {factor:g}" for factor, share in dropped.items())
        raise UserError(f"no loads with a peak load of {peak_load:g} lose these shares: {shares}", "cuts")
    profile_E = min(found, key=lambda one: one[0])[1]
    return profile_E / profile_E.mean()


def place_for_cuts(
    load_E: NDArray[np.float64], num_ranks: int, rank_loads: dict[float, float], random: np.random.Generator
) -> NDArray[np.float64]:
    """Place loads on contiguous ranks so that the fullest rank has given loads, before and after cuts.

    Experts that are drawn change places wherever that brings the fullest rank nearer to what is wanted.

    Args:
        load_E: over the mean.
        rank_loads: of the fullest rank over the mean, by capacity factor; ``inf`` = before any cut.

    Returns:
        The loads in their places, float64 [E].

    Raises:
        ValueError: no start comes within ``RANK_LOAD_TOLERANCE``; the message says how near.
    """
    per_rank = len(load_E) // num_ranks
    kept_CE = np.minimum(load_E, np.array(list(rank_loads))[:, None]) / per_rank
    wanted_C = np.array(list(rank_loads.values()))

    def misses(kept_CR: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.abs(kept_CR.max(axis=1) / wanted_C - 1)

    nearest = np.inf
    for _ in range(_STARTS):
        place_E = random.permutation(len(load_E))
        kept_CR = kept_CE[:, place_E].reshape(len(wanted_C), num_ranks, per_rank).sum(axis=2)
        miss_C = misses(kept_CR)
        for here, there in random.integers(len(load_E), size=(_EXCHANGES, 2)).tolist():
            if miss_C.max() <= RANK_LOAD_TOLERANCE / 2:
                break
            change_C = kept_CE[:, place_E[there]] - kept_CE[:, place_E[here]]
            after_CR = kept_CR.copy()
            after_CR[:, here // per_rank] += change_C
            after_CR[:, there // per_rank] -= change_C
            if ((after_C := misses(after_CR)) ** 2).sum() < (miss_C**2).sum():
                place_E[[here, there]] = place_E[[there, here]]
                kept_CR, miss_C = after_CR, after_C
        nearest = min(nearest, miss_C.max())
        if miss_C.max() <= RANK_LOAD_TOLERANCE:
            return load_E[place_E]
    raise UserError(
        f"no places of the experts come nearer than {nearest:.1%} to the fullest rank's loads", "rank_load", "cuts"
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
