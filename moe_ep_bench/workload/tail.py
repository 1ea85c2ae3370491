"""The scores that a recording left out: those of the experts below the top-k.

A recording names a token's K best experts and their scores; policies that look further (expanded
drop, LASER, XShare) ask for the other E - K too. What is known of them: they are below the K-th
score, and in a softmax they share the mass that the top-k leave. A *tail model* says in what
proportions:

* ``uniform``     all alike: the least that one can assume;
* ``popularity``  as often as each expert is in the top-k of that layer, plus one: a hot expert is then
  also a likely runner-up, which gives a policy that re-routes tokens less room.

Both are jittered by a random factor from 0.5 to 1.5 per token and expert, so that the order of
the tail is not that of the indices, and both are capped below the K-th score; what a capped
expert cannot take the others share in proportion (water-filling). The row's mass is conserved.

Not every recorded row can be completed that way. ``fit_top_k`` mends such rows by as little as it takes.

A recording with the scores of all experts needs no model (``recorded``). Its rows are replayed as they are, but where
a model chose by more than scores (a selection bias, groups): there the scores that were passed over are capped below
the K-th, by the same water-filling, so that the top-k of the scores are the recorded experts.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.workload.scores import separate_ties

TAILS = ("popularity", "uniform")
# No model: the scores of all experts are in the recording.
RECORDED = "recorded"

# Every tail score is at most (1 - MARGIN) and its cap at least (1 - 2 * MARGIN) of the K-th score.
# The caps differ at random, so that capped experts do not tie.
MARGIN = 0.005
# The least mass of a tail: where rounding left the top-k with all of it or more, they are scaled down to make room.
MIN_TAIL_MASS = 2.0**-20
# How far what was not chosen is set below what was, where both tie: enough to outlast a logarithm in float32.
TIE_STEP = 2.0**-18


def keep_top_k_ahead(
    ids_TK: NDArray[np.int64], full_TE: NDArray[np.float32], selection: RoutingContext
) -> NDArray[np.float32]:
    """Recorded rows whose K largest scores are those of the recorded experts, strictly: float32 [T, E].

    No top-k has to break a tie.

    Routers in bfloat16 tie often, and ``torch.topk`` promises no order then: what ties with the K-th score without
    having been chosen is set ``TIE_STEP`` below it.

    Args:
        ids_TK: the recorded top-k.
        full_TE: non-negative, each row with a sum of about 1; rows that need no cap are returned as they are, but for
            zeros, which become the least positive number.
        selection: the model's; where it has groups, the recorded experts' stay ahead too.
    """
    scores_TE = np.maximum(full_TE, np.finfo(np.float32).tiny)
    is_top_TE = np.zeros(full_TE.shape, dtype=bool)
    np.put_along_axis(is_top_TE, ids_TK, True, axis=1)
    last_T1 = np.take_along_axis(scores_TE, ids_TK, axis=1).min(axis=1, keepdims=True)
    behind_T = (~is_top_TE & (scores_TE > last_T1)).any(axis=1)
    if selection.num_groups is not None:
        limit_TE = outside_limit(ids_TK, np.take_along_axis(scores_TE, ids_TK, axis=1), full_TE.shape[1], selection)
        behind_T |= (scores_TE > limit_TE).any(axis=1)
    ids_RK, rows_RE = ids_TK[behind_T], scores_TE[behind_T].astype(np.float64)
    rows_RE /= rows_RE.sum(axis=1, keepdims=True)
    fitted_RK = fit_top_k(np.take_along_axis(rows_RE, ids_RK, axis=1), full_TE.shape[1])
    scores_TE[behind_T] = fill_tail(ids_RK, fitted_RK, rows_RE, np.full(rows_RE.shape, 0.5), selection)
    cap_T1 = last_T1 * np.float32(1 - TIE_STEP)
    np.copyto(scores_TE, cap_T1, where=~is_top_TE & (scores_TE > cap_T1) & ~behind_T[:, None])
    return scores_TE


def fit_top_k(scores_TK: NDArray[np.float64], num_experts: int) -> NDArray[np.float32]:
    """Make recorded top-k scores ones that a tail fits under, changing only rows where it does not.

    * *scaled*: the top-k hold all the mass or, by rounding, more. They are scaled to leave ``MIN_TAIL_MASS``.
    * *raised*: even E - K experts just below the K-th score could not hold the mass that the top-k leave
      (the K-th score was rounded down, to 0 perhaps). The lowest of the top-k are raised to one common level,
      the lowest that holds all mass.

    Equal scores are then moved apart by units in the last place of float32, best first as recorded: in the
    result every row descends strictly, and all scores are positive.

    Args:
        scores_TK: float64, descending, non-negative.
        num_experts: E, more than K.
    """
    scores_TK = scores_TK.copy()
    top_k = scores_TK.shape[1]
    sum_T = scores_TK.sum(axis=1)
    scaled_T = sum_T > 1 - MIN_TAIL_MASS
    scores_TK[scaled_T] *= ((1 - MIN_TAIL_MASS) / sum_T[scaled_T])[:, None]

    room = (num_experts - top_k) * (1 - 2 * MARGIN)  # mass that the tail holds, in K-th scores
    raised_T = 1 - scores_TK.sum(axis=1) > room * scores_TK[:, -1]
    rows_TK = scores_TK[raised_T]
    before_TK = np.concatenate([np.zeros((len(rows_TK), 1)), rows_TK.cumsum(axis=1)], axis=1)  # mass of the best k
    waiting_T = np.ones(len(rows_TK), dtype=bool)
    for keep in reversed(range(top_k)):  # keep the best `keep` as they are, raise the rest
        level_T = (1 - before_TK[:, keep]) / (top_k - keep + room)
        fits_T = waiting_T if keep == 0 else waiting_T & (level_T <= rows_TK[:, keep - 1])
        rows_TK[fits_T, keep:] = level_T[fits_T, None]
        waiting_T = waiting_T & ~fits_T
    scores_TK[raised_T] = rows_TK

    fitted_TK = scores_TK.astype(np.float32)
    separate_ties(fitted_TK, np.broadcast_to(-np.arange(top_k, dtype=np.float64), fitted_TK.shape))
    return fitted_TK


def fill_tail(
    ids_TK: NDArray[np.int64],
    scores_TK: NDArray[np.float32],
    weights_E: NDArray[np.float64],
    jitter_TE: NDArray[np.float64],
    selection: RoutingContext,
) -> NDArray[np.float32]:
    """Complete top-k scores (from ``fit_top_k``) to full rows that sum to 1: float32 [T, E], without ties.

    The top-k of every row are exactly ``ids_TK`` in their order, with exactly ``scores_TK``. Where a model has groups,
    experts of others than theirs stay so low that their groups are not chosen; a row whose tail has no room then sums
    to less than 1.

    Args:
        weights_E: in what proportions the experts share the tail's mass, positive; [T, E] where rows have their own.
        jitter_TE: random numbers, uniform from 0 to below 1.
    """
    best_TK = scores_TK.astype(np.float64)
    shares_TE = weights_E * (0.5 + jitter_TE)
    np.put_along_axis(shares_TE, ids_TK, 0.0, axis=1)
    caps_TE = best_TK[:, -1:] * (1 - MARGIN * (2 - jitter_TE))
    if selection.num_groups is not None:
        limit_TE = outside_limit(ids_TK, best_TK, caps_TE.shape[1], selection)
        caps_TE = np.minimum(caps_TE, limit_TE * (1 - MARGIN * (2 - jitter_TE)))
    filled_TE = water_fill(shares_TE, caps_TE, 1 - best_TK.sum(axis=1))
    np.put_along_axis(filled_TE, ids_TK, best_TK, axis=1)
    scores_TE = filled_TE.astype(np.float32)
    separate_ties(scores_TE, filled_TE)
    return scores_TE


def outside_limit(
    ids_TK: NDArray[np.int64], scores_TK: NDArray[np.floating], num_experts: int, selection: RoutingContext
) -> NDArray[np.float64]:
    """Upper bounds of experts outside the recorded ones' groups, [T, E]; infinite for all others.

    A group's value is the sum of its best K // ``top_groups`` scores. The recorded experts alone give the least of
    their groups so much, and as many equal scores of another group come to no more. Groups with more recorded experts
    than that bind nobody: all others are below the K-th score anyway.
    """
    num_groups, top_groups = selection.num_groups, selection.top_groups
    assert num_groups is not None
    assert top_groups is not None
    is_in_TKG = (ids_TK // (num_experts // num_groups))[:, :, None] == np.arange(num_groups)
    value_TG = (is_in_TKG * scores_TK.astype(np.float64)[:, :, None]).sum(axis=1)
    has_TG = is_in_TKG.any(axis=1)
    least_T1 = np.where(has_TG, value_TG, np.inf).min(axis=1, keepdims=True) / (ids_TK.shape[1] // top_groups)
    return np.where(has_TG, np.inf, least_T1).repeat(num_experts // num_groups, axis=1)


def water_fill(
    shares_TE: NDArray[np.float64], caps_TE: NDArray[np.float64], mass_T: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Split each row's mass in proportion to its shares, but give nobody more than its cap.

    The answer is min(level * share, cap) at the one level that uses up the mass. Whoever is over
    the cap stays over it, because capping anyone raises the level for the rest; so rounds of
    capping end at that level exactly, mostly within ten.

    Args:
        shares_TE: non-negative; 0 takes nothing.
        caps_TE: positive; a row's caps where shares are positive sum to its mass or more.
        mass_T: positive.
    """
    capped_TE = np.zeros(shares_TE.shape, dtype=bool)
    while True:
        free_T = np.where(capped_TE, 0.0, shares_TE).sum(axis=1)
        left_T = mass_T - np.where(capped_TE, caps_TE, 0.0).sum(axis=1)
        level_T = np.divide(left_T, free_T, out=np.zeros_like(left_T), where=free_T > 0)
        filled_TE = level_T[:, None] * shares_TE
        over_TE = ~capped_TE & (filled_TE > caps_TE)
        if not over_TE.any():
            return np.where(capped_TE, caps_TE, filled_TE)
        capped_TE |= over_TE
