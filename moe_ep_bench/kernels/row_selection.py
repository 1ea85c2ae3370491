"""Selecting per token and per expert in one pass over the scores, compiled for the host.

torch composes these steps from operations that each read and write [T, E]; here each is one loop.
The rules are those of ``policies.steps.Steps``, to the bit. The loops release the GIL, and those that
take ``first`` and ``last`` touch only these rows (or requests), so that threads may share a batch.

Shapes: T = tokens, E = experts, N = columns of a row, G = groups of experts.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moe_ep_bench.policies.steps import BIN_SHIFT, NUM_BINS, SCORE_UNIT

# Candidates are counted in blocks of a vector register.
PADDING = 8
# Tokens whose keys are put in order of experts at once.
_TILE = 16


@njit(cache=True, nogil=True)
def best_per_row(keys_RN, columns, count, map_RN, first, last):
    """Mark the ``count`` largest keys among ``columns`` (ascending indices); the lower column wins a tie."""
    count = min(count, columns.shape[0])
    if count == 0:
        return
    best_keys, best_columns, near_keys, near_columns = room_for(columns.shape[0], keys_RN)
    for row in range(first, last):
        find_best(keys_RN[row], columns, count, best_keys, best_columns, near_keys, near_columns)
        for place in range(count):
            map_RN[row, best_columns[place]] = True


@njit(cache=True, nogil=True)
def marked_first(bits_TE, mark_TE, keys_TE, first, last):
    """Integers in the order of the floats whose bits are given, those of marked places above all others."""
    for token in range(first, last):
        for expert in range(bits_TE.shape[1]):
            bits = np.int64(bits_TE[token, expert])
            bits = bits if bits >= 0 else -(bits & 0x7FFFFFFF)
            keys_TE[token, expert] = bits + (np.int64(mark_TE[token, expert]) << 40)


@njit(cache=True, nogil=True)
def group_values(keys_TE, count, value_TG, first, last):
    """Sum each group's one or two largest keys, of all groups at once: branches could not be predicted."""
    num_groups = value_TG.shape[1]
    size = keys_TE.shape[1] // num_groups
    best_G, second_G = np.empty(num_groups, keys_TE.dtype), np.empty(num_groups, keys_TE.dtype)
    keys_eG = np.empty((size, num_groups), keys_TE.dtype)
    for token in range(first, last):
        for group in range(num_groups):
            for index in range(size):
                keys_eG[index, group] = keys_TE[token, group * size + index]
        best_G[:] = -np.inf
        second_G[:] = -np.inf
        for index in range(size):
            for group in range(num_groups):
                key, best = keys_eG[index, group], best_G[group]
                lesser = best if key > best else key
                best_G[group] = key if key > best else best
                second_G[group] = lesser if lesser > second_G[group] else second_G[group]
        for group in range(num_groups):
            value_TG[token, group] = best_G[group] + (second_G[group] if count == 2 else np.float32(0.0))


@njit(cache=True, nogil=True)
def fewest_reaching(scores_TE, keys_TE, columns, count, share, map_TE, first, last):
    """Mark the best ``count`` by key, but no more than hold ``share`` of the row's sum."""
    num_experts = scores_TE.shape[1]
    count = min(count, num_experts)
    best_keys, best_columns, near_keys, near_columns = room_for(num_experts, keys_TE)
    for token in range(first, last):
        total = 0.0
        for expert in range(num_experts):
            total += np.float64(scores_TE[token, expert])
        find_best(keys_TE[token], columns, count, best_keys, best_columns, near_keys, near_columns)
        held = 0.0
        for place in range(count):
            map_TE[token, best_columns[place]] = True
            held += np.float64(scores_TE[token, best_columns[place]])
            if (held / total if total > 0 else 0.0) >= share:
                break


@njit(cache=True, nogil=True)
def room_for(num_columns, keys):
    """What ``find_best`` works in for so many columns of such keys: best keys and their columns, and near ones."""
    best_keys = np.empty(num_columns + PADDING, keys.dtype)
    best_columns = np.empty(best_keys.size, np.int64)
    return best_keys, best_columns, np.empty_like(best_keys), np.empty_like(best_columns)


@njit(cache=True, nogil=True)
def find_best(keys_N, columns, count, best_keys, best_columns, near_keys, near_columns):
    """Put the ``count`` largest keys among ``columns``, best first, and their columns at the front of two arrays.

    Branches that depend on scores cannot be predicted and would take most of the time, so there are
    none: a lower bound of the count-th largest key leaves few candidates, and each is put at the place
    that the number of larger ones tells. Only where two candidates are equal an insertion follows.

    Args:
        columns: ascending, at least ``count``.
        best_keys, best_columns, near_keys, near_columns: of ``room_for``.
    """
    num_columns = columns.shape[0]
    # The least of ``count`` maxima over disjoint columns: at least ``count`` keys reach it.
    for place in range(count):
        best_keys[place] = keys_N[columns[place]]
    index = count
    while index + count <= num_columns:
        for place in range(count):
            best_keys[place] = max(best_keys[place], keys_N[columns[index + place]])
        index += count
    bound = best_keys[0]
    for place in range(1, count):
        bound = min(bound, best_keys[place])

    num_near = 0
    for index in range(num_columns):
        key = keys_N[columns[index]]
        near_keys[num_near] = key
        near_columns[num_near] = columns[index]
        num_near += key >= bound
    padded = (num_near + PADDING - 1) // PADDING * PADDING
    for index in range(num_near, padded):
        near_keys[index] = bound  # larger than no candidate

    sum_of_places = 0
    for index in range(num_near):
        key = near_keys[index]
        place = _num_larger(near_keys, padded, key)
        best_keys[place] = key
        best_columns[place] = near_columns[index]
        sum_of_places += place
    if sum_of_places == num_near * (num_near - 1) // 2:
        return  # all places were different
    for index in range(num_near):
        key = near_keys[index]
        place = min(index, count)
        while place > 0 and key > best_keys[place - 1]:  # columns ascend, so an equal one never overtakes
            best_keys[place] = best_keys[place - 1]
            best_columns[place] = best_columns[place - 1]
            place -= 1
        best_keys[place] = key
        best_columns[place] = near_columns[index]


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _num_larger(keys, count, key):
    """Number of the first ``count`` keys that are larger. Counted in float32, which vectorises; exact up to 2**24."""
    larger = np.float32(0)
    for index in range(count):
        larger += np.float32(keys[index] > key)
    return int(larger)


@njit(cache=True, nogil=True)
def marked_columns(map_E, columns):
    """Put the columns of a row's marks at the front of ``columns``, ascending; return how many there are.

    Branches on marks cannot be predicted, so there are none. Marks are uint8: bool takes twice as long to add.
    """
    count = 0
    for column in range(map_E.shape[0] - 1):
        columns[count] = column
        count += map_E[column]
    columns[count] = map_E.shape[0] - 1
    return count + map_E[map_E.shape[0] - 1]


@njit(cache=True, nogil=True)
def load_of(map_TE, first, last):
    """Marks of every column: int64 [E]."""
    load_E = np.zeros(map_TE.shape[1], np.int64)
    for token in range(first, last):
        for expert in range(map_TE.shape[1]):
            load_E[expert] += map_TE[token, expert]
    return load_E


@njit(cache=True, nogil=True)
def histogram(bits_TE, scores_TE, map_TE, first, last):
    """Marked pairs by score bin and expert, and in the rows below the sum of their scores: float64 [2 * bins, E]."""
    num_experts = scores_TE.shape[1]
    cells_SE = np.zeros((2 * NUM_BINS, num_experts))
    for token in range(first, last):
        for expert in range(num_experts):
            if map_TE[token, expert]:
                place = score_bin(bits_TE[token, expert])
                units = np.rint(np.float64(scores_TE[token, expert]) / SCORE_UNIT)
                cells_SE[place, expert] += 1
                cells_SE[NUM_BINS + place, expert] += units * SCORE_UNIT
    return cells_SE


@njit(cache=True, nogil=True)
def without_cells(bits_TE, map_TE, dropped_SE, kept_TE, first, last):
    """Mark what is marked and whose cell is not dropped."""
    for token in range(first, last):
        for expert in range(map_TE.shape[1]):
            if map_TE[token, expert]:
                kept_TE[token, expert] = not dropped_SE[score_bin(bits_TE[token, expert]), expert]


@njit(cache=True, nogil=True)
def score_bin(bits):
    """The bin of a score, from the bits of its float32; those of -0.0 are negative, and in the first."""
    return min(max(((np.int64(bits) - (127 << 23)) >> BIN_SHIFT) + NUM_BINS, 0), NUM_BINS - 1)


@njit(cache=True, nogil=True)
def by_request(scores_TE, wanted_TE, request_T, wanted_QE, sums_QE, first, last):
    """Join the tokens, in their order, of each request from ``first`` to ``last``."""
    for token in range(scores_TE.shape[0]):
        request = request_T[token]
        if first <= request < last:
            for expert in range(scores_TE.shape[1]):
                wanted_QE[request, expert] |= wanted_TE[token, expert]
                sums_QE[request, expert] += np.float64(scores_TE[token, expert])


@njit(cache=True, nogil=True)
def marked_descending(scores_TE, map_TE, values_TW, first, last):
    """Each row's W largest marked scores, largest first, and zeros: float32 [T, W]."""
    width = values_TW.shape[1]
    for token in range(first, last):
        held = 0
        for expert in range(scores_TE.shape[1]):
            if map_TE[token, expert]:
                score = scores_TE[token, expert]
                place = min(held, width)
                while place > 0 and score > values_TW[token, place - 1]:
                    if place < width:
                        values_TW[token, place] = values_TW[token, place - 1]
                    place -= 1
                if place < width:
                    values_TW[token, place] = score
                held += 1
        for place in range(held, width):
            values_TW[token, place] = 0.0


@njit(cache=True, nogil=True)
def weights(scores_TE, map_TE, total_T, scale, weights_TE, first, last):
    """score / total * scale on the map, 0 elsewhere; no division where ``total_T`` is empty. All float32."""
    divide = total_T.shape[0] > 0
    for token in range(first, last):
        total = total_T[token] if divide else np.float32(1.0)
        for expert in range(scores_TE.shape[1]):
            weight = np.float32(0.0)
            if map_TE[token, expert] and total > 0:
                weight = scores_TE[token, expert]
                if divide:
                    weight = weight / total
                weight = weight * scale
            weights_TE[token, expert] = weight


@njit(cache=True, nogil=True)
def within_capacity(candidates_TE, keys_TE, load_G, capacity, num_shared, lowest, map_TE):
    """Keep of every group's candidates the ``capacity`` with the largest keys; ties by token, then by expert.

    Args:
        candidates_TE: as uint8.
        load_G: int64, candidates per group.
        capacity: above 0.
        lowest: a key that none is below.
        map_TE: bool [T, E], the result, all False before.
    """
    num_tokens, num_experts = candidates_TE.shape
    num_groups = load_G.shape[0]
    if num_shared == 1 and load_G.min() == num_tokens:
        _best_of_each_expert(keys_TE, capacity, map_TE)
        return
    group_E = np.arange(num_experts) // num_shared
    start_G = np.zeros(num_groups + 1, np.int64)  # of an overfull group's keys in one long list
    for group in range(num_groups):
        start_G[group + 1] = start_G[group] + (load_G[group] if load_G[group] > capacity else 0)
    listed = np.empty(start_G[num_groups], keys_TE.dtype)
    next_G = start_G[:num_groups].copy()
    expert_N = np.empty(load_G.sum() + num_experts, np.int64)  # of all candidates, token by token
    end_T = np.empty(num_tokens, np.int64)
    end = 0
    for token in range(num_tokens):
        count = marked_columns(candidates_TE[token], expert_N[end : end + num_experts])
        for index in range(end, end + count):
            expert = expert_N[index]
            group = group_E[expert]
            if load_G[group] > capacity:
                listed[next_G[group]] = keys_TE[token, expert]
                next_G[group] += 1
        end += count
        end_T[token] = end

    # A group with room for all takes whatever is above the lowest key, and any number of ties.
    threshold_G = np.full(num_groups, lowest, keys_TE.dtype)
    ties_G = load_G.copy()
    for group in range(num_groups):
        if load_G[group] > capacity:
            keys = listed[start_G[group] : start_G[group + 1]]
            threshold = _nth_smallest(keys, keys.size - capacity)
            above = 0
            for index in range(keys.size):
                above += keys[index] > threshold
            threshold_G[group] = threshold
            ties_G[group] = capacity - above

    first = 0
    for token in range(num_tokens):
        for index in range(first, end_T[token]):
            expert = expert_N[index]
            group = group_E[expert]
            key = keys_TE[token, expert]
            threshold = threshold_G[group]
            map_TE[token, expert] = key > threshold
            if key == threshold and ties_G[group] > 0:
                ties_G[group] -= 1
                map_TE[token, expert] = True
        first = end_T[token]


@njit(cache=True, nogil=True)
def _best_of_each_expert(keys_TE, capacity, map_TE):
    """``within_capacity`` where every token is a candidate of every expert, and of more than ``capacity``."""
    num_tokens, num_experts = keys_TE.shape
    keys_ET = np.empty((num_experts, num_tokens), keys_TE.dtype)
    for first in range(0, num_tokens, _TILE):  # of tokens, whose keys caches hold
        last = min(first + _TILE, num_tokens)
        for expert in range(num_experts):
            for token in range(first, last):
                keys_ET[expert, token] = keys_TE[token, expert]
    threshold_E = np.empty(num_experts, keys_TE.dtype)
    surplus_E = np.zeros(num_experts, np.int64)  # of keys that equal the threshold, the last of which are left out
    for expert in range(num_experts):
        threshold = _nth_smallest(keys_ET[expert], num_tokens - capacity)
        reaching = 0
        for token in range(num_tokens):
            reaching += keys_ET[expert, token] >= threshold
        threshold_E[expert] = threshold
        surplus_E[expert] = reaching - capacity
    for token in range(num_tokens):
        for expert in range(num_experts):
            map_TE[token, expert] = keys_TE[token, expert] >= threshold_E[expert]
    for expert in range(num_experts):
        token = num_tokens
        while surplus_E[expert] > 0:
            token -= 1
            if keys_TE[token, expert] == threshold_E[expert]:
                map_TE[token, expert] = False
                surplus_E[expert] -= 1


@njit(cache=True, nogil=True)
def _nth_smallest(keys, n):
    """The value that stands at ``n`` in ascending order; ``keys`` is left in another order (quickselect)."""
    low, high = 0, keys.size  # it stands in keys[low:high]
    while high - low > 1:
        first, middle, final = keys[low], keys[(low + high) // 2], keys[high - 1]
        pivot = max(min(first, middle), min(max(first, middle), final))
        # Without branches on the keys: swap always, and move on where the key belongs below.
        split = low
        for index in range(low, high):
            key = keys[index]
            keys[index] = keys[split]
            keys[split] = key
            split += key < pivot
        if n < split:
            high = split
            continue
        low = split
        for index in range(low, high):  # of what is left, those that equal the pivot
            key = keys[index]
            keys[index] = keys[split]
            keys[split] = key
            split += key == pivot
        if n < split:
            return pivot
        low = split
    return keys[n]


# ---- load-aware routing ----------------------------------------------------------------------------------------------


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
    best_keys, top_K, near_keys, near = room_for(num_experts, keys_TE)
    best_random, trimmed, near_random, _ = room_for(num_experts, random_TE)
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
