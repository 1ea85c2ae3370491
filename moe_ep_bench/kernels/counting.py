"""Counting what batches and routings amount to, in one pass over memory, compiled for the host.

Shapes: T = tokens, E = experts, K = top_k, R = ranks.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moe_ep_bench.kernels.row_selection import find_best, marked_columns, room_for


@njit(cache=True, nogil=True)
def top_k_loads(noise_TE, bias_E, top_k, num_groups=1, top_groups=1, sharpness=1.0):
    """Number of tokens that have each expert among their ``top_k`` best by ``noise + bias``: int64 [E].

    Args:
        num_groups, top_groups: the top-k looks only into the best groups of neighbours. A group's value is the sum of
            its best ``top_k // top_groups`` scores; the lower group wins a tie.
        sharpness: a factor on logits, of which scores are the softmax; decides only where groups are compared.
    """
    num_tokens, num_experts = noise_TE.shape
    size, counted = num_experts // num_groups, top_k // top_groups
    load_E = np.zeros(num_experts, np.int64)
    columns = np.arange(num_experts)
    keys = np.empty(num_experts, noise_TE.dtype)
    best_keys, best_columns, near_keys, near_columns = room_for(num_experts, noise_TE)
    # Side by side stand the groups, which are worked on at once.
    rest, values = np.empty((size, num_groups), noise_TE.dtype), np.empty(num_groups)
    tops = np.empty((counted, num_groups))
    for token in range(num_tokens):
        for expert in range(num_experts):
            keys[expert] = noise_TE[token, expert] + bias_E[expert]
        if num_groups > 1:
            tops[:] = -np.inf
            for group in range(num_groups):
                for index in range(size):
                    rest[index, group] = keys[group * size + index]
            for index in range(size):
                for place in range(counted):  # Branches could not be predicted.
                    for group in range(num_groups):
                        key, top = rest[index, group], tops[place, group]
                        tops[place, group] = key if key > top else top
                        rest[index, group] = top if key > top else key
            greatest = tops[0].max()
            for group in range(num_groups):
                values[group] = 0.0
                for place in range(counted):
                    values[group] += math.exp(sharpness * (tops[place, group] - greatest))
            num_columns = 0
            for group in range(num_groups):
                place = 0  # among the groups, best first
                for other in range(num_groups):
                    place += values[other] > values[group] or (values[other] == values[group] and other < group)
                if place < top_groups:
                    for expert in range(group * size, (group + 1) * size):
                        columns[num_columns] = expert
                        num_columns += 1
            columns_N = columns[:num_columns]
        else:
            columns_N = columns
        find_best(keys, columns_N, top_k, best_keys, best_columns, near_keys, near_columns)
        for place in range(top_k):
            load_E[best_columns[place]] += 1
    return load_E


@njit(cache=True, nogil=True)
def copy_down(noise_TE, is_copied_TE, before_E):
    """Give every marked place the number above it, in place; ``before_E`` stands above the first row."""
    num_tokens, num_experts = noise_TE.shape
    for token in range(num_tokens):
        for expert in range(num_experts):
            if is_copied_TE[token, expert]:
                noise_TE[token, expert] = noise_TE[token - 1, expert] if token else before_E[expert]


@njit(cache=True, nogil=True)
def routing_counts(map_TE, top_k_TE, scores_TE, valid_T, num_ranks, ranks_per_node, end_M):
    """Loads of experts and copies to ranks and nodes, by micro-batch, and sums over valid tokens of all of them.

    Args:
        map_TE, top_k_TE: as uint8.
        valid_T: bool [T]; empty = all tokens are valid.
        end_M: int64, where each micro-batch's tokens end, the last at T.

    Returns:
        int64 [M, E], pairs of each expert; int64 [M, R] and [M, N], tokens with a pair on each rank and on each node,
        whose ranks follow each other. Of valid tokens pairs, those of them that are top-k pairs, top-k pairs that
        another expert of the token stands in for (as many as a token lacks, at most as many as it has added), tokens
        with a pair, and the score mass of their pairs.
    """
    num_tokens, num_experts = map_TE.shape
    rank_E = np.arange(num_experts) // (num_experts // num_ranks)
    node_E = rank_E // ranks_per_node
    num_parts, part = len(end_M), 0
    load_ME = np.zeros((num_parts, num_experts), np.int64)
    copies_MR = np.zeros((num_parts, num_ranks), np.int64)
    copies_MN = np.zeros((num_parts, (num_ranks + ranks_per_node - 1) // ranks_per_node), np.int64)
    load_E, copies_R, copies_N = load_ME[0], copies_MR[0], copies_MN[0]
    num_valid_pairs = num_kept = num_rerouted = num_served = 0
    mass = 0.0
    columns = np.empty(num_experts, np.int64)
    for token in range(num_tokens):
        while token >= end_M[part]:
            part += 1
            load_E, copies_R, copies_N = load_ME[part], copies_MR[part], copies_MN[part]
        map_E, top_k_E, scores_E = map_TE[token], top_k_TE[token], scores_TE[token]
        pairs = marked_columns(map_E, columns)
        last_rank = last_node = -1  # columns ascend, and so do their ranks and nodes
        kept, held = 0, 0.0
        for place in range(pairs):
            expert = columns[place]
            rank, node = rank_E[expert], node_E[expert]
            load_E[expert] += 1
            copies_R[rank] += rank != last_rank
            copies_N[node] += node != last_node
            last_rank, last_node = rank, node
            kept += top_k_E[expert]
            held += np.float64(scores_E[expert])
        if valid_T.size == 0 or valid_T[token]:
            chosen = 0
            for expert in range(num_experts):
                chosen += top_k_E[expert]
            num_valid_pairs += pairs
            num_kept += kept
            num_rerouted += min(pairs, chosen) - kept
            num_served += pairs > 0
            mass += held
    return load_ME, copies_MR, copies_MN, num_valid_pairs, num_kept, num_rerouted, num_served, mass


@njit(cache=True, nogil=True)
def counts_by_rank(map_TE, own_TE, top_k_TE, scores_TE, valid_T, num_ranks, ranks_per_node, rank_S):
    """``routing_counts`` on each of some ranks, each first in an axis: pairs of a rank's own experts are ``own_TE``'s.

    Those of all other experts are ``map_TE``'s. Only tokens whose pairs differ are looked at again.
    """
    num_tokens, num_experts = map_TE.shape
    size = num_experts // num_ranks
    num_nodes = (num_ranks + ranks_per_node - 1) // ranks_per_node
    load_E, copies_R, copies_N = (
        np.zeros(num_experts, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_nodes, np.int64),
    )
    pairs_TR, pairs_TN = np.zeros((num_tokens, num_ranks), np.int32), np.zeros((num_tokens, num_nodes), np.int32)
    pairs_T, kept_T = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    chosen_T, is_valid_T = np.zeros(num_tokens, np.int64), np.ones(num_tokens, np.bool_)
    columns = np.empty(num_experts, np.int64)
    num_valid_pairs = num_kept = num_rerouted = num_served = 0
    mass = 0.0
    for token in range(num_tokens):
        pairs, held = marked_columns(map_TE[token], columns), 0.0
        for place in range(pairs):
            expert = columns[place]
            load_E[expert] += 1
            pairs_TR[token, expert // size] += 1
            pairs_TN[token, expert // size // ranks_per_node] += 1
            kept_T[token] += top_k_TE[token, expert]
            held += np.float64(scores_TE[token, expert])
        for rank in range(num_ranks):
            copies_R[rank] += pairs_TR[token, rank] > 0
        for node in range(num_nodes):
            copies_N[node] += pairs_TN[token, node] > 0
        for expert in range(num_experts):
            chosen_T[token] += top_k_TE[token, expert]
        pairs_T[token] = pairs
        is_valid_T[token] = valid_T.size == 0 or valid_T[token]
        if is_valid_T[token]:
            num_valid_pairs += pairs
            num_kept += kept_T[token]
            num_rerouted += min(pairs, chosen_T[token]) - kept_T[token]
            num_served += pairs > 0
            mass += held

    num_some = rank_S.size
    load_SE, copies_SR, copies_SN = (
        np.empty((num_some, num_experts), np.int64),
        np.empty((num_some, num_ranks), np.int64),
        np.empty((num_some, num_nodes), np.int64),
    )
    sums_4S, mass_S = np.empty((4, num_some), np.int64), np.full(num_some, mass)
    for place in range(num_some):
        rank = rank_S[place]
        node = rank // ranks_per_node
        load_SE[place], copies_SR[place], copies_SN[place] = load_E, copies_R, copies_N
        sums_4S[0, place], sums_4S[1, place] = num_valid_pairs, num_kept
        sums_4S[2, place], sums_4S[3, place] = num_rerouted, num_served
        for token in range(num_tokens):
            more = kept = 0
            gained = 0.0
            for expert in range(rank * size, (rank + 1) * size):
                if map_TE[token, expert] != own_TE[token, expert]:
                    step = 1 if own_TE[token, expert] else -1
                    load_SE[place, expert] += step
                    more += step
                    kept += step * top_k_TE[token, expert]
                    gained += step * np.float64(scores_TE[token, expert])
            of_rank, of_node = pairs_TR[token, rank], pairs_TN[token, node]
            copies_SR[place, rank] += (of_rank + more > 0) - (of_rank > 0)
            copies_SN[place, node] += (of_node + more > 0) - (of_node > 0)
            if is_valid_T[token]:
                pairs, chosen = pairs_T[token], chosen_T[token]
                sums_4S[0, place] += more
                sums_4S[1, place] += kept
                sums_4S[2, place] += min(pairs + more, chosen) - min(pairs, chosen) - kept
                sums_4S[3, place] += (pairs + more > 0) - (pairs > 0)
                mass_S[place] += gained
    return load_SE, copies_SR, copies_SN, sums_4S[0], sums_4S[1], sums_4S[2], sums_4S[3], mass_S


@njit(cache=True, nogil=True)
def deal(ascending_TE, order_OE, row_T, top_k, of_round):
    """Give each token's values, the largest first, to experts in its round's order (``batch.balanced_scores``)."""
    num_tokens, num_experts = ascending_TE.shape
    dealt_TE = np.empty_like(ascending_TE)
    for token in range(num_tokens):
        order_E = order_OE[row_T[token] // of_round % order_OE.shape[0]]
        place = row_T[token] * top_k % num_experts
        for turn in range(num_experts):
            dealt_TE[token, order_E[place]] = ascending_TE[token, num_experts - 1 - turn]
            place = place + 1 if place + 1 < num_experts else 0
    return dealt_TE


@njit(cache=True, nogil=True)
def marked_pairs(map_TE, scores_TE, count):
    """Scores and experts of the ``count`` pairs that a map, as uint8, marks, token by token: [pairs], int64 [pairs]."""
    num_tokens, num_experts = map_TE.shape
    score_N, expert_N, end = np.empty(count, scores_TE.dtype), np.empty(count + num_experts, np.int64), 0
    for token in range(num_tokens):
        for index in range(end, end + marked_columns(map_TE[token], expert_N[end:])):
            score_N[index] = scores_TE[token, expert_N[index]]
            end += 1
    return score_N, expert_N[:count]


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def score_sums(top_k_TE, scores_TE, log_TE, valid_T):
    """Sums over valid tokens for ``metrics.ScoreMetrics``.

    Args:
        top_k_TE: as uint8, padding rows empty.
        log_TE: float64 [T, E], logarithms of the scores; of a score of 0 any number.
        valid_T: bool [T]; empty = all tokens are valid.
    """
    num_tokens, num_experts = scores_TE.shape
    num_pairs = 0
    mass_sum = top_k_sum = share_sum = entropy_sum = 0.0
    for token in range(num_tokens):
        if valid_T.size and not valid_T[token]:
            continue
        scores_E, top_k_E = scores_TE[token], top_k_TE[token]
        pairs, mass, top_k_mass, weighted = 0, 0.0, 0.0, 0.0
        for expert in range(num_experts):
            score = np.float64(scores_E[expert])
            mass += score
            weighted += score * log_TE[token, expert]
            pairs += top_k_E[expert]
            top_k_mass += score * top_k_E[expert]
        num_pairs += pairs
        mass_sum += mass
        top_k_sum += top_k_mass
        if mass > 0:
            share_sum += top_k_mass / mass
            if num_experts > 1:
                entropy = (np.log(mass) - weighted / mass) / np.log(num_experts)
                entropy_sum += min(max(entropy, 0.0), 1.0)  # rounding may carry it past either end
    return num_pairs, top_k_sum, mass_sum, share_sum, entropy_sum


@njit(cache=True, nogil=True)
def slot_counts(map_TE, slot_N, first_E, pairs_E, before_E, num_slots, num_ranks, ranks_per_node):
    """Pairs of each slot, and tokens with a pair on each rank and on each node.

    Args:
        map_TE: as uint8.
        slot_N, first_E, pairs_E, before_E: of ``placement.Slots``, the last of this rank.

    Returns:
        int64 [P], [R] and [N].
    """
    num_tokens, num_experts = map_TE.shape
    counts_P = np.zeros(num_slots, np.int64)
    num_nodes = (num_ranks + ranks_per_node - 1) // ranks_per_node
    copies_R, last_R = np.zeros(num_ranks, np.int64), np.full(num_ranks, -1, np.int64)  # the last token there
    copies_N, last_N = np.zeros(num_nodes, np.int64), np.full(num_nodes, -1, np.int64)
    rank_P = np.arange(num_slots) * num_ranks // num_slots
    node_P = rank_P // ranks_per_node
    turn_E = before_E % pairs_E
    columns = np.empty(num_experts, np.int64)
    for token in range(num_tokens):
        for place in range(marked_columns(map_TE[token], columns)):
            expert = columns[place]
            turn = turn_E[expert]
            slot = slot_N[first_E[expert] + turn]
            turn_E[expert] = turn + 1 if turn + 1 < pairs_E[expert] else 0
            counts_P[slot] += 1
            rank, node = rank_P[slot], node_P[slot]
            copies_R[rank] += last_R[rank] != token
            last_R[rank] = token
            copies_N[node] += last_N[node] != token
            last_N[node] = token
    return counts_P, copies_R, copies_N
