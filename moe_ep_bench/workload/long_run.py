"""Expected loads of experts under Gumbel-top-k, without a draw: what a popularity comes to in the long run.

A token takes the K experts with the greatest noise plus log odds. That is a race: expert e arrives at an exponential
time with rate w_e, the odds, and the first K are taken (Efraimidis & Spirakis 2006). An expert's share of the tokens is

    integral over t of  w_e exp(-w_e t) P(at most K - 1 of the others have arrived by t)

The number of others is Poisson-binomial; its distribution is built up from the first expert on and from the last one
on, and the two meet at each expert. In log t the integrand falls off on both sides, so that the trapezoidal rule is
exact to 3e-5 of a load. Neighbours that share noise are alike, but each is distributed as one alone, so the loads are
theirs too. Groups of experts that are compared by their scores have no such form.

Shapes: E = experts, K = top_k, N = points of time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The step of log time, and its ends: before the first hardly any expert has arrived; after so many mean times of the
# K-th busiest expert, K have.
_STEP, _FIRST, _LAST = 0.2, 1e-5, 25.0
# Log odds so far above those of the (K + 1)-th expert: chosen always.
_CERTAIN = 25.0


def long_run_loads(bias_E: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Each expert's expected load over the mean: float64 [E], mean 1, at most E / K.

    Args:
        bias_E: log odds, float64 [E].
    """
    num_experts = len(bias_E)
    if top_k == num_experts:
        return np.ones(num_experts)
    descending_E = np.sort(bias_E)[::-1]
    log_rate_E = np.minimum(bias_E, descending_E[top_k] + _CERTAIN)
    log_rate_E -= np.log(np.exp(log_rate_E - log_rate_E.max()).sum()) + log_rate_E.max()
    last = np.log(_LAST) - np.sort(log_rate_E)[-top_k]
    log_time_N = np.arange(np.log(_FIRST * top_k), last + _STEP, _STEP)
    hazard_EN = np.exp(log_rate_E[:, None] + log_time_N)
    absent_EN = np.exp(-hazard_EN)

    def with_expert(counted_KN: NDArray[np.float64], expert: int) -> NDArray[np.float64]:
        """Probabilities of 0 to K - 1 arrivals, or at most so many, among one expert more."""
        after_KN = counted_KN * absent_EN[expert]
        after_KN[1:] += counted_KN[:-1] * (1 - absent_EN[expert])
        return after_KN

    before_EKN = np.empty((num_experts, top_k, len(log_time_N)))
    before_EKN[0] = 0.0
    before_EKN[0, 0] = 1.0
    for expert in range(1, num_experts):
        before_EKN[expert] = with_expert(before_EKN[expert - 1], expert - 1)
    at_most_KN, room_EN = np.ones_like(before_EKN[0]), np.empty_like(hazard_EN)
    for expert in range(num_experts - 1, -1, -1):
        room_EN[expert] = (before_EKN[expert, ::-1] * at_most_KN).sum(axis=0)
        at_most_KN = with_expert(at_most_KN, expert)
    share_E = (hazard_EN * absent_EN * room_EN).sum(axis=1)
    return share_E / share_E.mean()
