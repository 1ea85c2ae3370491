"""Another benchmark's imbalance: how many tokens each expert gets in a batch.

``power_law_1.01`` and ``power_law_1.2`` are aiconfigurator's (ai-dynamo/aiconfigurator, ``power_law_logits_v3``):
tokens of an expert are drawn from a power law with that exponent between 1 and 0.8 T (0.01 and 2 where T K <= E) and
scaled to T K in all. It also gives rank 0 the most, which depends on the number of ranks and is left out here.

Scores are a softmax of noise plus what keeps each token's choice at its experts.

Shapes: T = tokens of a batch, E = experts, K = top_k.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.workload.randomness import Stream, generator

INSIDE = 40.0
"""Added to logits of a token's experts: above what noise differs by."""


def inside(
    pattern: str, index: int, row_T: NDArray[np.int64], num_experts: int, top_k: int, num_tokens: int, seed: int
) -> NDArray[np.bool_]:
    """The experts of some tokens of batch ``index``: bool [T, E], K in a row.

    Each expert's tokens stand side by side in one row of T K, cut into K rows of T: no token has one twice.

    Args:
        row_T: the tokens' numbers in the batch.
    """
    quota_E = quotas(pattern, index, num_experts, top_k, num_tokens, seed)
    place_TK = row_T[:, None] + num_tokens * np.arange(top_k)
    inside_TE = np.zeros((len(row_T), num_experts), dtype=bool)
    np.put_along_axis(inside_TE, np.searchsorted(quota_E.cumsum(), place_TK, side="right"), True, axis=1)
    return inside_TE


@lru_cache(maxsize=8)
def quotas(pattern: str, index: int, num_experts: int, top_k: int, num_tokens: int, seed: int) -> NDArray[np.int64]:
    """Tokens of every expert under a power law in batch ``index``: int64 [E], T K in all, at most T each."""
    exponent, total = float(pattern.rpartition("_")[2]), num_tokens * top_k
    least, most = (1.0, 0.8 * num_tokens) if total > num_experts else (0.01, 2.0)
    uniform_E = generator(seed, Stream.POPULARITY, index).random(num_experts)
    # The inverse of the distribution function of x ** -exponent between its ends.
    ends = np.array([least, most]) ** (1 - exponent)
    weight_E = (ends[0] + (ends[1] - ends[0]) * uniform_E) ** (1 / (1 - exponent))
    quota_E = np.minimum(np.rint(weight_E / weight_E.sum() * total), num_tokens).astype(np.int64)
    fullest_E = np.argsort(-weight_E, kind="stable")
    while missing := total - int(quota_E.sum()):  # What rounding and the limit of T have left or added.
        has_room_E = quota_E < num_tokens if missing > 0 else quota_E > 0
        quota_E[fullest_E[has_room_E[fullest_E]][: abs(missing)]] += np.sign(missing)
    quota_E.setflags(write=False)
    return quota_E
