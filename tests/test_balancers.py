"""Lossless balancers: one test of each law for all of them, and the best of all choices found one by one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_ep_bench.balancers import (
    FREE,
    LLEP_THRESHOLD,
    MOVING,
    OVER_REPLICAS,
    Balanced,
    activated,
    epic,
    llep,
    lp,
    moonep,
    ultra,
    water_fill,
    with_free_slots,
)
from moe_ep_bench.placement import rank_load, replicate, replicate_by_risk

some_examples = settings(max_examples=50)
SOLVED = {name: balance for name, balance in OVER_REPLICAS.items() if name != "static"}


@dataclass(frozen=True)
class Batch:
    """Slots as a balancer is given them, and a batch's pairs of each source rank."""

    slot_expert_P: NDArray[np.int64]
    counts_RE: NDArray[np.int64]

    @property
    def num_ranks(self) -> int:
        return len(self.counts_RE)

    @property
    def load_E(self) -> NDArray[np.int64]:  # noqa: N802
        return self.counts_RE.sum(axis=0)

    def ranks_of(self, expert: int) -> list[int]:
        size = len(self.slot_expert_P) // self.num_ranks
        return sorted({int(slot) // size for slot in np.flatnonzero(self.slot_expert_P == expert)})


def on_ranks(values_P: Any, num_ranks: int) -> NDArray[np.int64]:
    return np.asarray(values_P).reshape(num_ranks, -1).sum(axis=1)


@st.composite
def batches(draw: st.DrawFn, *, moving: bool = False, small: bool = False) -> Batch:
    """Replicas planned for another load than the batch has, or homes and free slots."""
    num_ranks, per_rank = draw(st.integers(1 + small, 3 if small else 5)), draw(st.integers(1, 2 if small else 4))
    num_experts, most = num_ranks * per_rank, 4 if small else 200
    counts = st.lists(st.integers(0, most), min_size=num_experts, max_size=num_experts)
    zeros = np.zeros((num_ranks, num_experts), dtype=np.int64)
    counts_RE = np.array([draw(counts)]) if small else np.array(draw(st.lists(counts, min_size=1, max_size=num_ranks)))
    counts_RE = np.concatenate([counts_RE, zeros[len(counts_RE) :]])
    spare = draw(st.integers(0, min(2, num_experts - per_rank)))
    if moving:
        return Batch(with_free_slots(num_experts, num_ranks, spare), counts_RE)
    sizes = {"num_slots": num_ranks * (per_rank + spare), "num_ranks": num_ranks}
    known_BE = np.array(draw(st.lists(counts, min_size=1, max_size=3)))
    by_risk = draw(st.booleans())
    plan = replicate_by_risk(known_BE, **sizes) if by_risk else replicate(known_BE.mean(axis=0), **sizes)
    return Batch(plan, counts_RE)


options = st.fixed_dictionaries({"least_pairs": st.sampled_from([1, 5, 50]), "ranks_per_node": st.integers(1, 4)})


def check(batch: Batch, balanced: Balanced) -> None:
    """The laws of the contract but the last."""
    given, held = batch.slot_expert_P, balanced.slot_expert_P
    assert balanced.pairs_P is not None
    assert balanced.pairs_P.min() >= 0
    assert not balanced.pairs_P[held == FREE].any()
    taken = held != FREE
    sums_E = np.bincount(held[taken], balanced.pairs_P[taken], minlength=len(batch.load_E))
    assert sums_E.tolist() == batch.load_E.tolist(), "every pair is computed once, where its expert is"
    assert len(held) == len(given)
    assert (held[given != FREE] == given[given != FREE]).all(), "slots keep their experts"
    size = len(held) // batch.num_ranks
    filled = np.flatnonzero((given == FREE) & taken)
    moved = sorted((expert, receiver) for expert, _, receiver in balanced.moves)
    assert moved == sorted((int(held[slot]), int(slot) // size) for slot in filled), "free slots hold what moved"
    has = {(expert, rank) for expert in range(len(batch.load_E)) for rank in batch.ranks_of(expert)}
    for expert, sender, receiver in balanced.moves:
        assert (expert, sender) in has, "nobody passes on what it has not got"
        assert (expert, receiver) not in has
        has.add((expert, receiver))
    assert balanced.moved_RR(batch.num_ranks).sum() == len(balanced.moves)


def activated_on_ranks(pairs_P: NDArray[np.int64], expert_P: NDArray[np.int64], num_ranks: int) -> list[int]:
    size = len(expert_P) // num_ranks
    ranks = [np.s_[first : first + size] for first in range(0, len(expert_P), size)]
    return [len(set(expert_P[rank][pairs_P[rank] > 0].tolist())) for rank in ranks]


# --- Laws --------------------------------------------------------------------------------------------


@some_examples
@given(batch=batches(), name=st.sampled_from(list(SOLVED)))
def test_choosing_replicas_computes_every_pair_once_where_its_expert_is(batch: Batch, name: str) -> None:
    balanced = SOLVED[name](batch.slot_expert_P, batch.counts_RE)
    check(batch, balanced)
    assert not balanced.moves
    again = SOLVED[name](batch.slot_expert_P, batch.counts_RE)
    assert again.pairs_P.tolist() == balanced.pairs_P.tolist()


@some_examples
@given(batch=batches(moving=True), name=st.sampled_from(list(MOVING)), how=options)
def test_moving_weights_computes_every_pair_once_within_the_slots_of_every_rank(batch, name, how) -> None:
    balanced = MOVING[name](batch.slot_expert_P, batch.counts_RE, **how)
    check(batch, balanced)
    homes = np.where(batch.slot_expert_P == FREE, 0, batch.load_E[batch.slot_expert_P])
    before_R, after_R = on_ranks(homes, batch.num_ranks), on_ranks(balanced.pairs_P, batch.num_ranks)
    assert after_R.max() <= before_R.max(), "the fullest rank is never fuller"
    assert after_R.max() >= batch.load_E.sum() / batch.num_ranks
    if balanced.moves:
        assert after_R.max() < before_R.max(), "nothing moves for nothing"
    if name == "llep" and before_R.max() <= LLEP_THRESHOLD * batch.load_E.sum() / batch.num_ranks:
        assert not balanced.moves
    assert MOVING[name](batch.slot_expert_P, batch.counts_RE, **how).moves == balanced.moves


# --- Oracles: the best of all choices ----------------------------------------------------------------


def least_split(batch: Batch) -> int:
    """The fullest rank of the best of all whole splits, tried one by one."""
    loads = {(0,) * batch.num_ranks}
    for expert, load in enumerate(batch.load_E.tolist()):
        ranks = batch.ranks_of(expert)
        splits = [split for split in itertools.product(range(load + 1), repeat=len(ranks)) if sum(split) == load]
        loads = {
            tuple(had + dict(zip(ranks, split, strict=True)).get(rank, 0) for rank, had in enumerate(before))
            for before in loads
            for split in splits
        }
    return min(map(max, loads))


@settings(some_examples, max_examples=30)
@given(batch=batches(small=True))
def test_no_whole_split_has_a_less_full_rank_than_the_linear_program_s(batch: Batch) -> None:
    """Rounding loses nothing against the best of whole pairs."""
    pairs_P = lp(batch.slot_expert_P, batch.counts_RE).pairs_P
    assert on_ranks(pairs_P, batch.num_ranks).max() == least_split(batch)


def slow_llep(batch: Batch, least_pairs: int, **_: int) -> list[int]:
    """Pairs of every rank by the paper's Algorithms 2 and 3, with assigned and pending loads; slots without a bound."""
    load_E, num_ranks = batch.load_E.tolist(), batch.num_ranks
    per_rank = len(load_E) // num_ranks
    pending = [sum(load_E[rank * per_rank : (rank + 1) * per_rank]) for rank in range(num_ranks)]
    native, assigned, capacity = list(pending), [0] * num_ranks, -(-sum(load_E) // num_ranks)
    if max(native) <= LLEP_THRESHOLD * sum(load_E) / num_ranks:
        return native
    for expert in sorted(range(len(load_E)), key=lambda expert: -load_E[expert]):
        home, left = expert // per_rank, load_E[expert]
        pending[home] -= left
        keeps = min(left, max(capacity - assigned[home] - pending[home], 0))
        assigned[home] += keeps
        left -= keeps
        while left:
            others = sorted((rank for rank in range(num_ranks) if rank != home), key=lambda r: assigned[r] + pending[r])
            for rank in others:
                chunk = min(left, capacity - assigned[rank] - pending[rank])
                if chunk > 0 and (chunk >= least_pairs or chunk == left):
                    break
            else:
                rank, chunk = others[0], left
            assigned[rank] += chunk
            left -= chunk
    return assigned if max(assigned) < max(native) else native


@some_examples
@given(batch=batches(moving=True), how=options)
def test_llep_follows_the_paper_done_slowly_where_slots_do_not_bind(batch: Batch, how: dict[str, Any]) -> None:
    num_experts = len(batch.load_E)
    assume(batch.num_ranks > 1)
    free_P = with_free_slots(num_experts, batch.num_ranks, num_experts)
    after_R = on_ranks(llep(free_P, batch.counts_RE, **how).pairs_P, batch.num_ranks)
    assert after_R.tolist() == slow_llep(batch, **how)


def slow_moonep(batch: Batch) -> dict[tuple[int, int], int]:
    """Pairs by (expert, rank) as MoonEP's reference allots them; equal loads of ranks, pair by pair."""
    load_E, num_ranks = batch.load_E.tolist(), batch.num_ranks
    per_rank, (share, more) = len(load_E) // num_ranks, divmod(sum(load_E), num_ranks)
    home = {rank: list(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(num_ranks)}
    surplus = [sum(load_E[e] for e in home[rank]) - share - (rank < more) for rank in range(num_ranks)]
    quotas: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    while max(surplus) > 0:
        giver, taker = surplus.index(max(surplus)), surplus.index(min(surplus))
        quotas[giver][taker] = -surplus[taker]
        surplus[giver], surplus[taker] = surplus[giver] + surplus[taker], 0
    found = {(expert, expert // per_rank): load for expert, load in enumerate(load_E)}
    for giver in range(num_ranks):
        left = {expert: load_E[expert] for expert in home[giver]}
        while any(quotas[giver].values()):
            taker = max(sorted(quotas[giver]), key=quotas[giver].__getitem__)
            expert = max(left, key=left.__getitem__)
            pairs = min(left[expert], quotas[giver][taker])
            found[expert, taker] = found.get((expert, taker), 0) + pairs
            found[expert, giver] -= pairs
            left[expert] -= pairs
            quotas[giver][taker] -= pairs
    return found


@some_examples
@given(batch=batches(moving=True))
def test_moonep_makes_all_ranks_equal_by_experts_of_one_home_for_each(batch: Batch) -> None:
    """With as many free slots as a rank has experts, as MoonEP reserves; its planner done slowly says which."""
    num_experts, num_ranks = len(batch.load_E), batch.num_ranks
    slots_P = with_free_slots(num_experts, num_ranks, num_experts // num_ranks)
    balanced = moonep(slots_P, batch.counts_RE)
    check(Batch(slots_P, batch.counts_RE), balanced)
    after_R = on_ranks(balanced.pairs_P, num_ranks)
    total = int(batch.load_E.sum())
    if not balanced.moves:
        assert on_ranks(batch.load_E, num_ranks).max() <= -(-total // num_ranks)
        return
    assert sorted(after_R.tolist()) == sorted((total + rank) // num_ranks for rank in range(num_ranks))
    homes = {(receiver, sender) for _, sender, receiver in balanced.moves}
    assert len(homes) == len({receiver for receiver, _ in homes}), "a rank takes experts of one home"
    size = len(slots_P) // num_ranks
    places = [(int(expert), slot // size) for slot, expert in enumerate(balanced.slot_expert_P)]
    found = {place: pairs for place, pairs in zip(places, balanced.pairs_P.tolist(), strict=True) if pairs}
    assert found == {place: pairs for place, pairs in slow_moonep(batch).items() if pairs}


def slow_epic(
    batch: Batch, least_pairs: int, ranks_per_node: int, experts_of: list[set[int]] | None = None
) -> list[int]:
    """Pairs of every rank after the exchanges, each found by trying all.

    Args:
        experts_of: those of each rank, which are changed; None = at their homes.
    """
    num_ranks, load_E = batch.num_ranks, batch.load_E.tolist()
    per_rank = len(load_E) // num_ranks
    if experts_of is None:
        experts_of = [set(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(num_ranks)]
    native = [sum(load_E[expert] for expert in experts) for experts in experts_of]
    after, exchanged = list(native), []
    for first in range(0, num_ranks, ranks_per_node):
        node = sorted(range(first, min(first + ranks_per_node, num_ranks)), key=lambda rank: -native[rank])
        while len(node) > 1:
            fuller, emptier = node.pop(0), node.pop()
            swaps = [(ours, theirs) for ours in sorted(experts_of[fuller]) for theirs in sorted(experts_of[emptier])]
            gains = [load_E[ours] - load_E[theirs] for ours, theirs in swaps]
            fullest = [max(native[fuller] - gain, native[emptier] + gain) for gain in gains]
            best = fullest.index(min(fullest))
            if native[fuller] - fullest[best] >= least_pairs:
                after[fuller], after[emptier] = native[fuller] - gains[best], native[emptier] + gains[best]
                exchanged.append((fuller, emptier, *swaps[best]))
    if max(after) >= max(native):
        return native
    for fuller, emptier, ours, theirs in exchanged:
        experts_of[fuller] ^= {ours, theirs}
        experts_of[emptier] ^= {ours, theirs}
    return after


@some_examples
@given(batch=batches(moving=True), how=options)
def test_epic_exchanges_the_two_experts_that_help_most_inside_a_node(batch: Batch, how: dict[str, Any]) -> None:
    slots_P = with_free_slots(len(batch.load_E), batch.num_ranks, 1)
    balanced = epic(slots_P, batch.counts_RE, **how)
    check(Batch(slots_P, batch.counts_RE), balanced)
    assert sorted(on_ranks(balanced.pairs_P, batch.num_ranks)) == sorted(slow_epic(batch, **how))
    ways = {(sender, receiver) for _, sender, receiver in balanced.moves}
    assert ways == {(receiver, sender) for sender, receiver in ways}, "who gives takes"
    assert all(sender // how["ranks_per_node"] == receiver // how["ranks_per_node"] for sender, receiver in ways)


def test_a_pair_of_ranks_without_a_gain_keeps_no_other_of_its_node_from_one() -> None:
    load_E = [120, 80, 60, 40, 50, 30, 10, 10, 100, 0, 40, 40, 10, 10, 0, 0]  # rank 4 has nothing to gain from rank 7
    batch = Batch(with_free_slots(16, 8, 1), np.array([load_E] + [[0] * 16] * 7))
    how = {"least_pairs": 1, "ranks_per_node": 4}
    after_R = on_ranks(epic(batch.slot_expert_P, batch.counts_RE, **how).pairs_P, 8).tolist()
    assert after_R == slow_epic(batch, **how)
    assert after_R[4:] == [100, 50, 50, 0]


@some_examples
@given(batch=batches(moving=True), more=st.integers(0, 2**32), how=options)
def test_epics_experts_stay_where_they_went(batch: Batch, more: int, how: dict[str, Any]) -> None:
    """Four batches of other loads: each begins where the one before it ended, and no rank ever holds more experts."""
    random, num_ranks, num_experts = np.random.default_rng(more), batch.num_ranks, len(batch.load_E)
    experts_of = [set(map(int, own)) for own in np.array_split(np.arange(num_experts), num_ranks)]
    slots_P = with_free_slots(num_experts, num_ranks, 1)
    for _ in range(4):
        of_batch = Batch(slots_P, batch.counts_RE[:, random.permutation(num_experts)])
        balanced = epic(slots_P, of_batch.counts_RE, **how)
        check(of_batch, balanced)
        expected = slow_epic(of_batch, **how, experts_of=experts_of)
        assert on_ranks(balanced.pairs_P, num_ranks).tolist() == expected
        slots_P = balanced.left_P(num_ranks)
        left = [set(own[own != FREE].tolist()) for own in slots_P.reshape(num_ranks, -1)]
        assert left == experts_of
        assert (slots_P.reshape(num_ranks, -1)[:, -1] == FREE).all()


# --- By hand -----------------------------------------------------------------------------------------


def test_no_choice_of_ranks_activates_fewer_experts_on_the_rank_with_most() -> None:
    """All choices, one by one: pairs of one expert on several ranks only add to what these activate."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        num_ranks = int(generator.integers(1, 5))
        experts = np.concatenate([np.arange(9), generator.integers(9, size=-9 % num_ranks + num_ranks)])
        slots_P = generator.permutation(experts)
        counts_RE = np.zeros((num_ranks, 9), dtype=np.int64)
        counts_RE[0] = generator.integers(0, 9, size=9)
        batch = Batch(slots_P, counts_RE)
        busy = [batch.ranks_of(int(expert)) for expert in np.flatnonzero(batch.load_E)]
        best = min(np.bincount(ranks, minlength=num_ranks).max() for ranks in itertools.product(*busy))
        found = activated_on_ranks(activated(slots_P, counts_RE).pairs_P, slots_P, num_ranks)
        assert max(found) == best
        assert sum(found) == len(busy), "each expert on one rank"


@pytest.mark.parametrize("load_E", [[13, 7], [10, 10, 1]])
def test_llep_moves_nothing_at_its_threshold_nor_where_the_fullest_rank_gains_nothing(load_E: list[int]) -> None:
    """Of three ranks the free slot of the last goes to expert 0, and expert 1 would fill rank 0 again."""
    num_ranks = len(load_E)
    counts_RE = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    counts_RE[0] = load_E
    assert not llep(with_free_slots(num_ranks, num_ranks, 1), counts_RE, least_pairs=1).moves


def test_llep_moves_as_many_pairs_as_are_asked_for_at_least() -> None:
    """Four of seven pairs fit one rank, the other three the other."""
    counts_RE = np.array([[12, 1, 2], [0, 0, 0], [0, 0, 0]])
    balanced = llep(with_free_slots(3, 3, 1), counts_RE, least_pairs=4)
    assert on_ranks(balanced.pairs_P, 3).tolist() == [5, 5, 5]


def test_ranks_that_got_weights_pass_them_on() -> None:
    """Six ranks take a share of expert 0: LLEP's home sends it six times, UltraEP's a few times."""
    counts_RE = np.zeros((8, 8), dtype=np.int64)
    counts_RE[0] = [800, 1, 1, 1, 1, 1, 1, 1]
    how = {"least_pairs": 1}
    direct, relayed = (move(with_free_slots(8, 8, 1), counts_RE, **how) for move in (llep, ultra))
    assert direct.moved_RR(8).sum() == relayed.moved_RR(8).sum() == 7
    assert direct.moved_RR(8).sum(axis=1).max() == 7
    assert relayed.moved_RR(8).sum(axis=1).max() <= 3
    first = {receiver for _, sender, receiver in relayed.moves if sender == 0}
    assert all(sender in first | {0} for _, sender, _ in relayed.moves), "over one rank at most"


# --- Plans -------------------------------------------------------------------------------------------


@some_examples
@given(batch=batches(), data=st.data())
def test_a_plan_by_risk_holds_every_expert_and_keeps_replicas_apart(batch: Batch, data: st.DataObject) -> None:
    num_ranks, num_experts = batch.counts_RE.shape
    most = num_experts - num_experts // num_ranks
    spare = data.draw(st.integers(0, most))
    load = st.lists(st.integers(0, 20), min_size=num_experts, max_size=num_experts)
    load_BE = data.draw(st.lists(load, min_size=1, max_size=4))
    plan = replicate_by_risk(load_BE, num_slots=num_experts + spare * num_ranks, num_ranks=num_ranks)
    assert set(plan) == set(range(num_experts))
    ranks = plan.reshape(num_ranks, num_experts // num_ranks + spare).tolist()
    assert all(len(set(held)) == len(held) for held in ranks)


def test_a_plan_by_risk_parts_experts_that_are_busy_together() -> None:
    """Experts 0 and 2 are busy in the same batches, 1 and 3 in the others: the mean load tells none apart."""
    load_BE = np.array([[10, 2, 10, 2], [2, 10, 2, 10]] * 4)
    plan = replicate_by_risk(load_BE, num_slots=4, num_ranks=2)
    assert rank_load(load_BE, plan, 2).max() == 12
    assert rank_load(load_BE, replicate(load_BE.mean(axis=0), num_slots=4, num_ranks=2), 2).max() == 20


def test_where_plans_are_as_good_replicas_go_where_the_greedy_rule_puts_them() -> None:
    plan = replicate_by_risk([1] * 8, num_slots=12, num_ranks=2)
    assert np.bincount(plan).tolist() == [2, 2, 2, 2, 1, 1, 1, 1]


def test_replicas_follow_the_spread_where_means_are_equal() -> None:
    steady, unsteady = [5] * 6, [1, 9, 1, 9, 1, 9]
    plan = replicate_by_risk(np.array([steady, steady, unsteady, steady]).T, num_slots=6, num_ranks=2)
    assert plan.tolist().count(2) == 2


# --- Shared experts ----------------------------------------------------------------------------------


def least_level(num_tokens: int, pairs_R: list[int], pairs_per_token: float) -> float:
    """The fullest rank of the best of all ways to give out the tokens, tried one by one."""
    splits = itertools.product(range(num_tokens + 1), repeat=len(pairs_R))
    full = (np.add(pairs_R, np.multiply(pairs_per_token, split)).max() for split in splits if sum(split) == num_tokens)
    return min(full)


@some_examples
@given(
    ranks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=3),
    pairs_per_token=st.sampled_from([0.5, 1.0, 2.0, 3.3]),
)
def test_water_filling_leaves_the_emptiest_fullest_rank_and_computes_every_token_once(ranks, pairs_per_token) -> None:
    tokens_R, pairs_R = (list(values) for values in zip(*ranks, strict=True))
    given_RR = water_fill(tokens_R, pairs_R, pairs_per_token)
    assert given_RR.min() >= 0
    assert given_RR.sum(axis=1).tolist() == tokens_R
    level_R = pairs_R + pairs_per_token * given_RR.sum(axis=0)
    assert level_R.max() == pytest.approx(least_level(sum(tokens_R), pairs_R, pairs_per_token))
    assert level_R.max() <= (np.array(pairs_R) + pairs_per_token * np.array(tokens_R)).max() + 1e-9
    senders, receivers = np.nonzero(given_RR * (1 - np.eye(len(ranks), dtype=int)))
    assert not set(senders) & set(receivers), "who sends its tokens takes no others"
