"""Token imbalances that other benchmarks prescribe: which experts a token may choose, or how many tokens each gets.

``megatron_w0`` to ``w7`` are those of Megatron-LM's token-imbalance benchmark (NVIDIA/Megatron-LM, pull request 7488),
but for ``w4``, whose experts are alike and whose ranks are not.
With E experts, top-K and a hot set of H = max(K, E / 4):

==  ==============================================================================================
w0  round-robin: every expert alike
w1  three tokens of four choose in a hot set, experts 0 to H - 1, the fourth among all
w2  the same; there it is told apart by what ranks own. Contiguous ranks make it a hot rank
w3  the hot set is every other expert
w5  all choose among the upper half; the lower half gets nothing
w6  as w1, and the hot set moves on by H every three batches
w7  every fourth batch every other token chooses in the hot set; else all among all
==  ==============================================================================================

``power_law_1.01`` and ``power_law_1.2`` are aiconfigurator's (ai-dynamo/aiconfigurator, ``power_law_logits_v3``):
tokens of an expert are drawn from a power law with that exponent between 1 and 0.8 T (0.01 and 2 where T K <= E) and
scaled to T K in all. It also gives rank 0 the most, which depends on the number of ranks and is left out here.

Which of its possible experts a token takes is chance, from our own stream: loads are those of the source in
distribution, not to the token. Scores are a softmax of noise plus what keeps the choice where it belongs.

Shapes: T = tokens of a batch, E = experts, K = top_k.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.randomness import Stream, generator

INSIDE = 40.0
"""Added to logits of the experts among which a token chooses: above what noise differs by."""


def check(pattern: str, num_experts: int, top_k: int, num_groups: int | None) -> None:
    """Refuse a model that the pattern cannot be of. Raises ValueError."""
    if num_groups is not None:
        raise UserError(f"skew: {pattern} knows no groups of experts; the model has {num_groups}")
    if pattern == "megatron_w5" and num_experts // 2 < top_k:
        raise UserError(f"skew: megatron_w5 leaves {num_experts // 2} experts, fewer than top_k={top_k}")


def inside(
    pattern: str, index: int, row_T: NDArray[np.int64], num_experts: int, top_k: int, num_tokens: int, seed: int
) -> NDArray[np.bool_]:
    """Among which experts some tokens of batch ``index`` choose their top-k: bool [T, E], at least K in a row.

    Args:
        row_T: the tokens' numbers in the batch.
    """
    inside_TE = np.zeros((len(row_T), num_experts), dtype=bool)
    if pattern == "megatron_w0":
        np.put_along_axis(inside_TE, (row_T[:, None] * top_k + np.arange(top_k)) % num_experts, True, axis=1)
        return inside_TE
    if pattern.startswith("power_law"):
        # Each expert's tokens stand side by side in one row of T K, cut into K rows of T: no token has one twice.
        quota_E = quotas(pattern, index, num_experts, top_k, num_tokens, seed)
        place_TK = row_T[:, None] + num_tokens * np.arange(top_k)
        np.put_along_axis(inside_TE, np.searchsorted(quota_E.cumsum(), place_TK, side="right"), True, axis=1)
        return inside_TE
    hot, experts = max(top_k, num_experts // 4), np.arange(num_experts)
    pool_E, is_hot_T = experts < hot, row_T % 4 != 0
    match pattern:
        case "megatron_w3":
            spread = np.unique(2 * np.arange(max(top_k, num_experts // 2)) % num_experts)
            pool_E = np.isin(experts, spread) if len(spread) >= top_k else experts >= 0
        case "megatron_w5":
            pool_E, is_hot_T = experts >= num_experts // 2, np.ones(len(row_T), dtype=bool)
        case "megatron_w6":
            pool_E = (experts - index // 3 * hot) % num_experts < hot
        case "megatron_w7":
            is_hot_T = (row_T % 2 == 0) & (index % 4 == 3)
    return pool_E | ~is_hot_T[:, None]


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
