"""What makes tokens differ: Gumbel noise on the logits, independent or alike between neighbours.

Taking the top-k of logits with Gumbel noise draws K experts without replacement, with the odds
that popularity gives them (the Gumbel-top-k trick: Kool et al. 2019, arXiv 1903.06059). Neighbouring
tokens of a real text share experts; here their noise is correlated: a Gaussian autoregressive
process along each sequence, mapped to Gumbel values (a Gaussian copula), so that each token alone is
distributed as before and only its likeness to the one before it changes.

A sequence is whatever ``sequence_id_T`` says: a text at prefill, or the consecutive tokens of one
speculative request.

Shapes: T = tokens, E = experts, N = pairs of neighbours that are simulated.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.special import log_ndtr

from moe_ep_bench.workload.randomness import Stream, generator
from moe_ep_bench.workload.selection import TopK

_NUM_PAIRS = 4096
_BISECTIONS = 12


def independent_noise(seed: int, batch: int, num_tokens: int, num_experts: int) -> NDArray[np.float64]:
    """Gumbel noise, float64 [T, E]."""
    return generator(seed, Stream.NOISE, batch).gumbel(size=(num_tokens, num_experts))


def correlated_noise(
    seed: int, batch: int, num_tokens: int, num_experts: int, sequence_length: int, correlation: float
) -> NDArray[np.float64]:
    """Gumbel noise, float64 [T, E]; underlying normals of neighbours in a sequence correlate by ``correlation``."""
    normal_TE = generator(seed, Stream.NOISE, batch).normal(size=(num_tokens, num_experts))
    for start in range(0, num_tokens, sequence_length):
        rows = slice(start, start + sequence_length)
        # The first token is as it is, the others x_t = c x_{t-1} + sqrt(1 - c^2) e_t: all are standard normal.
        normal_TE[start + 1 : start + sequence_length] *= np.sqrt(1 - correlation**2)
        normal_TE[rows] = lfilter([1.0], [1.0, -correlation], normal_TE[rows], axis=0)
    return _gumbel(normal_TE)


def solve_correlation(seed: int, bias_E: NDArray[np.float64], top_k: TopK, overlap: float) -> float:
    """Find the correlation at which neighbouring tokens share ``overlap`` of the experts they go to.

    Raises:
        ValueError: out of reach; the message gives the range, from independent tokens to equal ones.
    """
    random = generator(seed, Stream.PAIRS)
    first_NE, fresh_NE = (random.normal(size=(_NUM_PAIRS, len(bias_E))) for _ in range(2))
    chosen_NE = top_k.chosen(_gumbel(first_NE) + bias_E)

    def shared(correlation: float) -> float:
        second_NE = correlation * first_NE + np.sqrt(1 - correlation**2) * fresh_NE
        return float((chosen_NE & top_k.chosen(_gumbel(second_NE) + bias_E)).sum() / _NUM_PAIRS)

    least = shared(0.0)
    if not least <= overlap < top_k.top_k:
        raise ValueError(
            f"neighbour_overlap: expected {np.ceil(least * 100) / 100:g} (what tokens share by chance under this skew) "
            f"to below {top_k.top_k}, got {overlap:g}"
        )
    return _bisect(shared, overlap)


def _bisect(function: Callable[[float], float], target: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


def _gumbel(normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Gumbel value at the same quantile."""
    return -np.log(-log_ndtr(normal))
