"""Load-aware routing, token by token, compiled for the host.

Each token's choice depends on the loads that all tokens before it left, so there is nothing to
vectorise over tokens; what a token does is small enough that one core routes about a million of
them a second. The rule is ``policies.steps.Steps.least_loaded``, to the bit.

Shapes: T = tokens, E = experts, K = top_k; c = pool size.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moe_ep_bench.kernels.row_selection import PADDING, find_best


@njit(cache=True, nogil=True)
def least_loaded(scores_TE, keys_TE, valid_T, random_TE, load_E, map_TE, top_k, eps_high, t_fix, pool_size):
    """Mark every valid token's experts in ``map_TE`` (all False before); ``load_E`` is used up.

    Args:
        scores_TE: float32 [T, E].
        keys_TE: float32 or int64 [T, E], what orders a token's experts.
        valid_T: bool [T], or [0] where every token is valid.
        random_TE: float32 [T, E], what a pool too large is trimmed by, or [0, 0] for the keys.
        load_E: float64 [E], the loads before the first token.
        map_TE: bool [T, E], the result.
    """
    num_tokens, num_experts = scores_TE.shape
    all_E = np.arange(num_experts)
    width = num_experts + PADDING
    best_keys = np.empty(width, keys_TE.dtype)
    near_keys = np.empty(width, keys_TE.dtype)
    best_random = np.empty(width, random_TE.dtype)
    near_random = np.empty(width, random_TE.dtype)
    near = np.empty(width, np.int64)
    top_K = np.empty(width, np.int64)
    trimmed = np.empty(width, np.int64)
    is_top_E = np.zeros(num_experts, np.bool_)
    pool = all_E.copy()
    chosen_K = np.empty(top_k, np.int64)
    chosen_loads = np.empty(top_k, np.float64)
    chosen_keys = np.empty(top_k, keys_TE.dtype)
    # With no share to reach and no score to clear, neither the top-k nor any sum is needed.
    everyone = eps_high == np.inf and t_fix == 0.0 and pool_size == num_experts
    for token in range(num_tokens):
        if valid_T.shape[0] and not valid_T[token]:
            continue
        keys_E = keys_TE[token]

        num_pool = num_experts
        confident = False
        if not everyone:
            scores_E = scores_TE[token]
            find_best(keys_E, all_E, top_k, best_keys, top_K, near_keys, near)
            total = 0.0
            best = np.float32(0.0)
            for expert in range(num_experts):
                total += np.float64(scores_E[expert])
                best = max(best, scores_E[expert])
            for place in range(top_k):
                is_top_E[top_K[place]] = True
            top_sum = 0.0
            for expert in range(num_experts):
                if is_top_E[expert]:
                    top_sum += np.float64(scores_E[expert])
            confident = (top_sum / total if total > 0 else 0.0) >= eps_high
            if not confident:
                least = t_fix * np.float64(best)
                num_pool = 0
                for expert in range(num_experts):
                    pool[num_pool] = expert  # overwritten by the next one unless it counts
                    num_pool += is_top_E[expert] or np.float64(scores_E[expert]) >= least
                if num_pool > pool_size:
                    if random_TE.shape[0]:
                        find_best(random_TE[token], pool[:num_pool], pool_size, best_random, trimmed, near_random, near)
                    else:
                        find_best(keys_E, pool[:num_pool], pool_size, best_keys, trimmed, near_keys, near)
                    pool[:pool_size] = trimmed[:pool_size]
                    num_pool = pool_size
            for place in range(top_k):
                is_top_E[top_K[place]] = False

        chosen = top_K
        if not confident:
            _least_loaded_of(pool, num_pool, load_E, keys_E, chosen_loads, chosen_keys, chosen_K)
            chosen = chosen_K
        for place in range(top_k):
            expert = chosen[place]
            map_TE[token, expert] = True
            load_E[expert] += 1.0


@njit(cache=True, nogil=True)
def _least_loaded_of(pool, num_pool, load_E, keys_E, chosen_loads, chosen_keys, chosen_K):
    """Fill the arrays with the least loaded of the pool; equals by larger key, then by lower index."""
    top_k = chosen_K.shape[0]
    for index in range(num_pool):
        expert = pool[index]
        load = load_E[expert]
        key = keys_E[expert]
        place = min(index, top_k)
        while place > 0:
            other = chosen_loads[place - 1]
            if load > other:
                break
            if load == other:
                other_key = chosen_keys[place - 1]
                if key < other_key or (key == other_key and expert > chosen_K[place - 1]):
                    break
            if place < top_k:
                chosen_loads[place] = other
                chosen_keys[place] = chosen_keys[place - 1]
                chosen_K[place] = chosen_K[place - 1]
            place -= 1
        if place < top_k:
            chosen_loads[place] = load
            chosen_keys[place] = key
            chosen_K[place] = expert
