"""Balance one batch over ranks without loss: choose among replicas, or move weights of experts for this batch.

Routing is the model's own and stays so: every pair (token, expert) is computed exactly once, by its expert's weights.
A *balancer* decides on which rank, once all ranks know the batch's counts, which they gather anyway.

**Contract.** A balancer is a pure, deterministic function of the experts in slots and of the batch's pairs of each
source rank and expert. It returns ``Balanced``: the experts in slots while the batch is computed, how many pairs each
slot computes, and whose weights move from where to where. Its laws, which tests hold for every one of them: each
expert's pairs are all computed, on ranks that hold it; slots that held an expert hold it still, and moved weights go to
free ones, so no rank holds more than its slots; and its rank that is fullest (``activated``: that activates most
experts) is no fuller than without it.

Over replicas that a plan put in place ahead (``placement``):

``static``     replicas share evenly, in turn; nothing is solved
``lp``         the least possible load of the fullest rank: the linear program of DeepSeek's LPLB
               (github.com/deepseek-ai/LPLB), over slots of any plan (LPLB joins ranks by a graph of its own). SGLang's
               (pull request 24515) stops after few steps, said to come within 2 % of this; that was not tried here
``activated``  the fewest experts with pairs on the rank that has most of them, whose weights are what a decode step
               reads: METRO's aim (arXiv 2512.09277). METRO is greedy and said to be near the best; this is the best

By weights that move in the batch into free slots, which all layers share, from contiguous homes:

``llep``       Least-Loaded Expert Parallelism (arXiv 2601.17111, Algorithms 2 and 3; SalesforceAIResearch/
               LeastLoadedEP): experts by falling load; what the home has no room for below the mean rank's load goes to
               the least loaded rank. A home sends every copy
``ultra``      after UltraEP's quota planner (arXiv 2606.04101; Dots-Infra/UltraEP): bisection for the lowest load that
               no rank need exceed; ranks above it give away pairs of their busiest experts to ranks with most room.
               Ranks that got weights pass them on, so that no home sends all copies of a busy expert
``moonep``     MoonEP's planner (MoonshotAI/MoonEP, as forks have it: zhumakhan/MoonEP, tests/planning_reference.py):
               the fullest home fills the emptiest rank up to the mean, until none is above it; a rank takes experts of
               one home alone, so that E / R free slots always make all ranks equal
``epic``       EPIC's exchange (SIGCOMM 2026, doi 10.1145/3789240.3829201, as AI-Infra-Team/awesome-papers, issue 228,
               sums it up; the paper itself was not read): inside a node the fullest rank and the emptiest, the second
               of each and so on, exchange the two experts that help most, where that saves more time than it takes.
               Experts stay where they went, for the batches after it

By tokens of shared experts, whose weights every rank holds: ``water_fill``, to the ranks with fewest pairs, as
DeepEP-Waterfill of SGLang (pull request 19290) with a rule of ours: SGLang's source ranks decide each for itself.

Ours in all four: ranks have ``spare_per_rank`` free slots (LLEP sets no bound; what finds none under ``moonep`` stays
home), and nothing moves unless the fullest rank gets emptier by it. Left out: UltraEP's preference for replicas near a
token, and its bound to one NVLink domain.

Shapes: R = ranks, E = experts, P = slots of all ranks, slots r * P / R and on being rank r's; V = places, an expert on
a rank in however many slots; X = experts on several ranks, S = their places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FREE = -1
"""The content of a free slot."""

LLEP_THRESHOLD = 1.3
"""LLEP moves nothing while the fullest rank has at most so many times the mean (lambda)."""

SOLVE_US = 100.0
"""Assumed time until every rank has solved a batch, where a config gives none. LPLB's README says so of its linear
program inside a node, UltraEP's report (v1) of its planner at EP 64; no GPU time of the others is at hand."""


@dataclass(frozen=True, eq=False)
class Balanced:
    """The placement of a batch.

    Attributes:
        slot_expert_P: int64 [P], the expert in each slot, or ``FREE``.
        pairs_P: int64 [P], pairs of each slot; None = an expert's slots take its pairs in turn.
        moves: (expert, from rank, to rank) of all weights that move, in order: a rank may pass on what it got.
    """

    slot_expert_P: NDArray[np.int64]
    pairs_P: NDArray[np.int64] | None = None
    moves: tuple[tuple[int, int, int], ...] = ()

    def moved_RR(self, num_ranks: int) -> NDArray[np.int64]:  # noqa: N802
        """Experts whose weights go from each rank (row) to each (column): int64 [R, R]."""
        moved_RR = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        for _, sender, receiver in self.moves:
            moved_RR[sender, receiver] += 1
        return moved_RR

    def left_P(self, num_ranks: int) -> NDArray[np.int64]:  # noqa: N802
        """Slots for the next batch, int64 [P], where weights stay at the rank that got them and leave the other.

        Free slots are a rank's last.
        """
        left_RS = []
        for rank, expert_S in enumerate(self.slot_expert_P.reshape(num_ranks, -1)):
            gone = [FREE, *(expert for expert, sender, _ in self.moves if sender == rank)]
            kept_S = expert_S[~np.isin(expert_S, gone)]
            left_RS.append(np.pad(kept_S, (0, len(expert_S) - len(kept_S)), constant_values=FREE))
        return np.concatenate(left_RS)


def with_free_slots(num_experts: int, num_ranks: int, spare_per_rank: int) -> NDArray[np.int64]:
    """Experts at their homes, and free slots beside them: int64 [P]."""
    home_RL = np.arange(num_experts).reshape(num_ranks, -1)
    return np.pad(home_RL, ((0, 0), (0, spare_per_rank)), constant_values=FREE).ravel()


# ---- over replicas that are there ------------------------------------------------------------------------------------


def static(slot_expert_P: ArrayLike, counts_RE: ArrayLike) -> Balanced:
    """Replicas share evenly."""
    del counts_RE
    return Balanced(np.asarray(slot_expert_P))


def lp(slot_expert_P: ArrayLike, counts_RE: ArrayLike) -> Balanced:
    """Split every expert's pairs over its slots so that the fullest rank is as empty as these slots allow.

    The linear program: minimise t, where x_er >= 0 pairs of expert e go to rank r that holds it, all of an expert's
    pairs go somewhere, and no rank gets more than t. Its best in whole pairs is t rounded up, because flows with whole
    capacities have whole solutions: bisection finds it, a maximum flow from experts over places to ranks for each t.
    Of an expert's slots on one rank the first takes all.
    """
    from scipy.sparse import csr_array  # It takes a second to import.
    from scipy.sparse.csgraph import maximum_flow

    places = _Places.of(slot_expert_P, counts_RE)
    R, rank_V, expert_V, load_E = places.num_ranks, places.rank_V, places.expert_V, places.load_E
    is_shared_V = np.bincount(expert_V, minlength=len(load_E))[expert_V] > 1
    pairs_V = np.where(is_shared_V, 0, load_E[expert_V])
    if not is_shared_V.any():
        return places.balanced(pairs_V)
    fixed_R, rank_S = np.bincount(rank_V, pairs_V, minlength=R).astype(np.int64), rank_V[is_shared_V]
    shared_X, expert_S = np.unique(expert_V[is_shared_V], return_inverse=True)
    load_X, X = load_E[shared_X], len(shared_X)
    source, sink, num_nodes = X + R, X + R + 1, X + R + 2
    tails = np.r_[np.full(X, source), expert_S, X + np.arange(R)]
    heads = np.r_[np.arange(X), X + rank_S, np.full(R, sink)]

    def flow(most: int) -> Any:
        """The most pairs of shared experts that go to ranks which have ``most`` at most."""
        capacities = np.r_[load_X, load_X[expert_S], np.maximum(most - fixed_R, 0)].astype(np.int32)
        return maximum_flow(csr_array((capacities, (tails, heads)), shape=(num_nodes, num_nodes)), source, sink)

    mean = -(-int(load_E.sum()) // R)
    levels = range(max(mean, int(fixed_R.max())), int(fixed_R.max() + load_X.sum()) + 1)
    most = levels[bisect_left(levels, load_X.sum(), key=lambda level: flow(level).flow_value)]
    pairs_V[is_shared_V] = flow(most).flow.toarray()[expert_S, X + rank_S]
    return places.balanced(pairs_V)


def activated(slot_expert_P: ArrayLike, counts_RE: ArrayLike) -> Balanced:
    """Give each expert's pairs to one rank, so that the rank with most experts that have pairs has as few as possible.

    The busiest first, to the rank with fewest experts and then pairs; then experts change ranks along the shortest path
    from a rank with n of them to one with n - 2 at most, until there is none: then no choice has a smaller greatest
    number (semi-matchings: Harvey, Ladner, Lovasz, Tamir, J. Algorithms 59, 2006).
    """
    places = _Places.of(slot_expert_P, counts_RE)
    ranks_of: dict[int, list[int]] = {}
    for expert, rank in zip(places.expert_V.tolist(), places.rank_V.tolist(), strict=True):
        ranks_of.setdefault(expert, []).append(rank)
    experts_of: list[dict[int, None]] = [{} for _ in range(places.num_ranks)]
    pairs_R = [0] * places.num_ranks
    busiest = np.argsort(-places.load_E, kind="stable").tolist()
    for expert in sorted(filter(places.load_E.__getitem__, busiest), key=lambda expert: len(ranks_of[expert]) > 1):
        rank = min(ranks_of[expert], key=lambda rank: (len(experts_of[rank]), pairs_R[rank]))
        experts_of[rank][expert] = None
        pairs_R[rank] += int(places.load_E[expert])
    while path := _relieving_path(experts_of, ranks_of):
        for expert, sender, receiver in path:
            del experts_of[sender][expert]
            experts_of[receiver][expert] = None
    pairs_V = [
        places.load_E[expert] if expert in experts_of[rank] else 0
        for expert, rank in zip(places.expert_V, places.rank_V, strict=True)
    ]
    return places.balanced(np.array(pairs_V, dtype=np.int64))


def _relieving_path(
    experts_of: list[dict[int, None]], ranks_of: dict[int, list[int]]
) -> list[tuple[int, int, int]] | None:
    """Moves (expert, from, to) that take one expert from a fullest rank to one with two fewer; None where none do."""
    most = max(map(len, experts_of), default=0)
    came_by: dict[int, tuple[int, int] | None] = {r: None for r, held in enumerate(experts_of) if len(held) == most}
    queue = list(came_by)
    for rank in queue:
        for expert in experts_of[rank]:
            for other in ranks_of[expert]:
                if other in came_by:
                    continue
                came_by[other] = (expert, rank)
                if len(experts_of[other]) > most - 2:
                    queue.append(other)
                    continue
                path = []
                while (step := came_by[other]) is not None:
                    path.append((step[0], step[1], other))
                    other = step[1]
                return path
    return None


@dataclass(frozen=True, eq=False)
class _Places:
    """The ranks of every expert, slots of one expert on one rank taken together.

    Attributes:
        rank_V, expert_V, slot_V: int64, rank, expert and first slot of every place.
    """

    slot_expert_P: NDArray[np.int64]
    load_E: NDArray[np.int64]
    num_ranks: int
    rank_V: NDArray[np.int64]
    expert_V: NDArray[np.int64]
    slot_V: NDArray[np.int64]

    @staticmethod
    def of(slot_expert_P: ArrayLike, counts_RE: ArrayLike) -> _Places:
        expert_P, counts_RE = np.asarray(slot_expert_P), np.asarray(counts_RE, dtype=np.int64)
        num_ranks, num_experts = counts_RE.shape
        rank_P = np.arange(len(expert_P)) // (len(expert_P) // num_ranks)
        place_V, slot_V = np.unique(rank_P * num_experts + expert_P, return_index=True)
        rank_V, expert_V = np.divmod(place_V, num_experts)
        return _Places(expert_P, counts_RE.sum(axis=0), num_ranks, rank_V, expert_V, slot_V)

    def balanced(self, pairs_V: NDArray[np.int64]) -> Balanced:
        pairs_P = np.zeros(len(self.slot_expert_P), dtype=np.int64)
        pairs_P[self.slot_V] = pairs_V
        return Balanced(self.slot_expert_P, pairs_P)


# ---- by weights that move --------------------------------------------------------------------------------------------


class _Ranks:
    """A batch at the homes of its experts, a slot for each, and what is given away.

    Attributes:
        slot_E, home_E: the slot and the rank of each expert, as many on every rank; contiguous under
            ``with_free_slots``.
        used_R: pairs of every rank.
        mean: pairs of the mean rank, rounded up.
        given: pairs by (expert, rank), of ranks beside the home; ``given_to``: those ranks by expert.
    """

    def __init__(self, slot_expert_P: ArrayLike, counts_RE: ArrayLike) -> None:
        self.slot_expert_P = np.asarray(slot_expert_P)
        counts_RE = np.asarray(counts_RE, dtype=np.int64)
        self.num_ranks, self.load_E = len(counts_RE), counts_RE.sum(axis=0)
        slot_P = np.flatnonzero(self.slot_expert_P != FREE)
        self.slot_E = slot_P[np.argsort(self.slot_expert_P[slot_P], kind="stable")]
        self.home_E = self.slot_E // (len(self.slot_expert_P) // self.num_ranks)
        self.used_R = np.bincount(self.home_E, self.load_E, minlength=self.num_ranks).astype(np.int64)
        self.free_R = (self.slot_expert_P.reshape(self.num_ranks, -1) == FREE).sum(axis=1)
        self.mean = -(-int(self.load_E.sum()) // self.num_ranks)
        self.given: dict[tuple[int, int], int] = {}
        self.given_to: dict[int, list[int]] = {}

    def takers(self, expert: int) -> NDArray[np.int64]:
        """Ranks beside the home that have the expert, or a free slot for it; those with fewest pairs first."""
        can_R = self._can_take(expert)
        order_R = np.argsort(self.used_R, kind="stable")
        return order_R[can_R[order_R]]

    def taker(self, expert: int) -> int | None:
        """The first of ``takers``; None = there is none."""
        can_R = self._can_take(expert)
        return int(np.where(can_R, self.used_R, np.iinfo(np.int64).max).argmin()) if can_R.any() else None

    def _can_take(self, expert: int) -> NDArray[np.bool_]:
        can_R = self.free_R > 0
        can_R[self.given_to.get(expert, [])] = True
        can_R[self.home_E[expert]] = False
        return can_R

    def give(self, expert: int, rank: int, pairs: int) -> None:
        """Move pairs of an expert from its home to a rank."""
        if (expert, rank) not in self.given:
            self.free_R[rank] -= 1
            self.given_to.setdefault(expert, []).append(rank)
        self.given[expert, rank] = self.given.get((expert, rank), 0) + pairs
        self.used_R[self.home_E[expert]] -= pairs
        self.used_R[rank] += pairs

    def balanced(self, *, relayed: bool) -> Balanced:
        """The batch as given away; where no rank is emptier by it, at its homes."""
        expert_P, size = self.slot_expert_P.copy(), len(self.slot_expert_P) // self.num_ranks
        pairs_P = np.zeros(len(expert_P), dtype=np.int64)
        pairs_P[self.slot_E] = self.load_E
        if not self.given or self.used_R.max() >= pairs_P.reshape(self.num_ranks, -1).sum(axis=1).max():
            return Balanced(expert_P, pairs_P)
        for (expert, rank), pairs in self.given.items():
            slot = rank * size + int((expert_P[rank * size : (rank + 1) * size] == FREE).argmax())
            expert_P[slot], pairs_P[slot] = expert, pairs
            pairs_P[self.slot_E[expert]] -= pairs
        return Balanced(expert_P, pairs_P, tuple(self._moves(relayed)))

    def _moves(self, relayed: bool) -> list[tuple[int, int, int]]:
        """Transfers (expert, from, to): from the home, or if ``relayed`` the least busy of it and its receivers."""
        moves, sent_R = [], [0] * self.num_ranks
        senders: dict[int, list[int]] = {}
        for expert, rank in sorted(self.given, key=lambda move: -int(self.load_E[move[0]])):
            known = senders.setdefault(expert, [int(self.home_E[expert])])
            sender = min(known, key=sent_R.__getitem__) if relayed else known[0]
            if sender == known[0]:
                known.append(rank)  # One rank between a home and whom its weights reach, at most.
            sent_R[sender] += 1
            moves.append((expert, sender, rank))
        return moves


def llep(slot_expert_P: ArrayLike, counts_RE: ArrayLike, *, least_pairs: int, **_: object) -> Balanced:
    """Spill what a rank has above the mean to the least loaded ranks, where the fullest has ``LLEP_THRESHOLD`` of it.

    Args:
        slot_expert_P: as ``with_free_slots``.
        least_pairs: no fewer pairs of an expert go to a rank, unless they are all that is left (m).
    """
    ranks = _Ranks(slot_expert_P, counts_RE)
    if ranks.used_R.max() <= LLEP_THRESHOLD * ranks.load_E.sum() / ranks.num_ranks:
        return ranks.balanced(relayed=False)
    for expert in np.argsort(-ranks.load_E, kind="stable").tolist():
        # Pairs that its home already gave away do not count: ``used_R`` falls as pairs go.
        left = min(int(ranks.used_R[ranks.home_E[expert]]) - ranks.mean, int(ranks.load_E[expert]))
        while left > 0 and len(takers := ranks.takers(expert)):
            chunks = [(rank, min(left, ranks.mean - int(ranks.used_R[rank]))) for rank in takers.tolist()]
            fitting = (chunk for chunk in chunks if chunk[1] > 0 and (chunk[1] >= least_pairs or chunk[1] == left))
            rank, pairs = next(fitting, (int(takers[0]), left))
            ranks.give(expert, rank, pairs)
            left -= pairs
    return ranks.balanced(relayed=False)


def ultra(slot_expert_P: ArrayLike, counts_RE: ArrayLike, *, least_pairs: int, **_: object) -> Balanced:
    """Find the lowest load that no rank need exceed, and give away what is above it.

    Args: as ``llep``; fewer pairs than ``least_pairs`` move only where they are all that a rank has too many.
    """
    best = _Ranks(slot_expert_P, counts_RE)
    low, high = best.mean, int(best.used_R.max())
    while low < high:
        middle = (low + high) // 2
        ranks = _Ranks(slot_expert_P, counts_RE)
        if _gives_away(ranks, middle, least_pairs):
            best, high = ranks, middle
        else:
            low = middle + 1
    return best.balanced(relayed=True)


def _gives_away(ranks: _Ranks, most: int, least_pairs: int) -> bool:
    """Leave no rank with more than ``most`` pairs; False where free slots or ranks' room end before that."""
    by_load = np.argsort(-ranks.load_E, kind="stable")
    for rank in np.argsort(-ranks.used_R, kind="stable").tolist():
        for expert in by_load[ranks.home_E[by_load] == rank].tolist():
            left = int(ranks.load_E[expert])
            while (excess := int(ranks.used_R[rank]) - most) > 0 and left > 0:
                taker = ranks.taker(expert)
                if taker is None:
                    break
                pairs = min(excess, left, most - int(ranks.used_R[taker]))
                if pairs <= 0 or (pairs < least_pairs and pairs < excess):
                    break
                ranks.give(expert, taker, pairs)
                left -= pairs
        if ranks.used_R[rank] > most:
            return False
    return True


def moonep(slot_expert_P: ArrayLike, counts_RE: ArrayLike, **_: object) -> Balanced:
    """Make all ranks equal, to a pair: quotas between ranks first, then experts for them, the busiest first.

    Args:
        slot_expert_P: as ``with_free_slots``; of E / R free slots a rank none is lacking.
    """
    ranks = _Ranks(slot_expert_P, counts_RE)
    share, more = divmod(int(ranks.load_E.sum()), ranks.num_ranks)
    surplus_R = ranks.used_R - share - (np.arange(ranks.num_ranks) < more)
    quota_RR = np.zeros((ranks.num_ranks, ranks.num_ranks), dtype=np.int64)
    while surplus_R.max() > 0:
        giver, taker = int(surplus_R.argmax()), int(surplus_R.argmin())
        quota_RR[giver, taker] = -surplus_R[taker]
        surplus_R[giver] += surplus_R[taker]
        surplus_R[taker] = 0
    left_E = ranks.load_E.copy()
    for giver, quota_R in enumerate(quota_RR):
        own_E = np.where(ranks.home_E == giver, left_E, -1)
        while quota_R.max() > 0:
            taker, expert = int(quota_R.argmax()), int(own_E.argmax())
            if not ranks.free_R[taker]:
                quota_R[taker] = 0
                continue
            pairs = min(int(quota_R[taker]), int(own_E[expert]))
            ranks.give(expert, taker, pairs)
            own_E[expert] -= pairs
            quota_R[taker] -= pairs
    return ranks.balanced(relayed=False)


def epic(
    slot_expert_P: ArrayLike, counts_RE: ArrayLike, *, least_pairs: int, ranks_per_node: int, **_: object
) -> Balanced:
    """Let ranks of a node, the fullest with the emptiest, exchange an expert each, where that saves enough.

    Args:
        slot_expert_P: a slot for each expert, as many on every rank, and free ones; an exchange takes one of each rank.
        least_pairs: pairs by which the fuller of two gets emptier at least: as many as are computed in the time of an
            exchange, which takes 92 us of a DeepSeek-R1 expert over an H20's NVLink and 210 over an H800's.
        ranks_per_node: rank r is on node r // ranks_per_node.
    """
    ranks = _Ranks(slot_expert_P, counts_RE)
    expert_RL = np.argsort(ranks.home_E, kind="stable").reshape(ranks.num_ranks, -1)
    load_RL = ranks.load_E[expert_RL]
    for first in range(0, ranks.num_ranks, ranks_per_node):
        node = first + np.argsort(-ranks.used_R[first : first + ranks_per_node], kind="stable")
        for fuller, emptier in zip(node[: len(node) // 2], node[::-1], strict=False):
            most, least = ranks.used_R[fuller], ranks.used_R[emptier]
            gain_LL = load_RL[fuller][:, None] - load_RL[emptier]
            after_LL = np.maximum(most - gain_LL, least + gain_LL)
            has_room = ranks.free_R[fuller] and ranks.free_R[emptier]
            if not has_room or most - after_LL.min() < max(least_pairs, 1):
                continue
            here, there = np.unravel_index(after_LL.argmin(), after_LL.shape)
            for rank, other, place in ((fuller, emptier, here), (emptier, fuller, there)):
                ranks.give(int(expert_RL[rank, place]), int(other), int(load_RL[rank, place]))
    return ranks.balanced(relayed=False)


# ---- by shared experts -----------------------------------------------------------------------------------------------


def water_fill(tokens_R: ArrayLike, pairs_R: ArrayLike, pairs_per_token: float) -> NDArray[np.int64]:
    """Give the shared experts' tokens to ranks so that the fullest is as empty as they allow (whole tokens).

    Every rank holds the shared experts. What a rank keeps of its own tokens does not travel.

    Args:
        tokens_R: tokens of each rank.
        pairs_R: pairs of routed experts that each rank computes.
        pairs_per_token: work of a token's shared experts, in pairs.

    Returns:
        int64 [R, R]: tokens of each rank (row) whose shared experts each rank (column) computes.
    """
    tokens_R, pairs_R = np.asarray(tokens_R, dtype=np.int64), np.asarray(pairs_R, dtype=np.float64)
    order_R, total = np.argsort(pairs_R, kind="stable"), int(tokens_R.sum())
    levels_R = (pairs_R[order_R].cumsum() + pairs_per_token * total) / np.arange(1, len(pairs_R) + 1)
    # The first so many ranks, to which the water reaches.
    level = levels_R[np.flatnonzero(np.append(pairs_R[order_R][1:], np.inf) >= levels_R)[0]]
    filled_R = np.floor(np.maximum(level - pairs_R, 0) / pairs_per_token + 1e-9).astype(np.int64)
    for _ in range(total - int(filled_R.sum())):
        filled_R[(pairs_R + pairs_per_token * (filled_R + 1)).argmin()] += 1
    kept_R = np.minimum(tokens_R, filled_R)
    surplus_R, room_R, given_RR = tokens_R - kept_R, filled_R - kept_R, np.diag(kept_R)
    for sender in np.flatnonzero(surplus_R):
        for receiver in np.flatnonzero(room_R):
            moved = min(surplus_R[sender], room_R[receiver])
            given_RR[sender, receiver] += moved
            surplus_R[sender] -= moved
            room_R[receiver] -= moved
    return given_RR


# ---- the table -------------------------------------------------------------------------------------------------------

OVER_REPLICAS: dict[str, Callable[[ArrayLike, ArrayLike], Balanced]] = {
    "static": static,
    "lp": lp,
    "activated": activated,
}
# Each takes of ``least_pairs`` and ``ranks_per_node`` what it needs.
MOVING: dict[str, Callable[..., Balanced]] = {"llep": llep, "ultra": ultra, "moonep": moonep, "epic": epic}
