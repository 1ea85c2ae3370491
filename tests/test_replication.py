"""Expert replication: the published rules and figures, the laws of a plan, and what slots do to pairs and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_ep_bench.balancers import Balanced, lp
from moe_ep_bench.kernels.placing import spread
from moe_ep_bench.metrics import RANKS_PER_NODE, metrics_of_parts, routing_metrics
from moe_ep_bench.placement import Slots, Windows, moved_experts, rank_load, replicate, replicate_by_risk
from moe_ep_bench.policies import RoutingContext, make_policy

some_examples = settings(max_examples=50)

# README of github.com/deepseek-ai/EPLB: two layers of 12 experts.
PUBLISHED_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


# --- The published rules, one item at a time ---------------------------------------------------------


def slow_packs(loads: list[float], num_packs: int) -> list[list[int]]:
    """Heaviest first, into the lightest pack with room; one item per pack stays in order."""
    if len(loads) == num_packs:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        with_room = [pack for pack in packs if len(pack) < len(loads) // num_packs]
        min(with_room, key=lambda pack: sum(loads[held] for held in pack)).append(item)
    return packs


def slow_plan(load_E: list[int], num_slots: int, num_ranks: int) -> list[int]:
    """The expert of every slot under EPLB's global policy."""
    experts = range(len(load_E))
    replicas = list(experts)
    while len(replicas) < num_slots:
        replicas.append(max(experts, key=lambda expert: load_E[expert] / replicas.count(expert)))
    shares = [load_E[expert] / replicas.count(expert) for expert in replicas]
    return [replicas[held] for rank in slow_packs(shares, num_ranks) for held in rank]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """A load of small whole numbers, so that ties and zeros are common; slots and ranks."""
    num_experts, num_ranks = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    per_rank = math.ceil(num_experts / num_ranks) + draw(st.integers(0, 2))
    load_E = draw(st.lists(st.integers(0, 20), min_size=num_experts, max_size=num_experts))
    return load_E, per_rank * num_ranks, num_ranks


def test_batches_without_time_are_each_planned_for_the_others() -> None:
    assert [Windows(3).known(batch) for batch in range(3)] == [(1, 2), (0, 2), (0, 1)]
    assert Windows(1).known(0) == (0,)
    assert Windows(3).num_history == 0
    assert [Windows(2, history=2).known(batch) for batch in range(2)] == [(-2, -1, 1), (-2, -1, 0)], "known, not served"


@given(
    num_batches=st.integers(1, 20),
    window=st.integers(1, 9),
    lag=st.integers(1, 5),
    every=st.none() | st.integers(1, 30),
)
def test_a_plan_knows_a_window_before_all_that_it_serves(
    num_batches: int, window: int, lag: int, every: int | None
) -> None:
    """A server that keeps the last batches, and makes a plan in time for each stretch that it serves."""
    windows, seen, plan = Windows(num_batches, window, lag, every), [], ()
    for batch in range(-windows.num_history, num_batches):
        is_due = batch == 0 or (every is not None and batch > 0 and batch % every == 0)
        if is_due:
            plan = tuple(seen[: len(seen) - lag + 1][-window:])
        if batch >= 0:
            assert windows.known(batch) == plan
            assert len(plan) == window
            assert max(plan) <= batch - lag
            before = windows.before(batch)
            assert (before is None) == (every is None or batch < every)
            assert before is None or windows.known(before) != plan
        seen.append(batch)


@some_examples
@given(data=st.data())
def test_a_rearrangement_sends_each_rank_what_it_lacks_once(data: st.DataObject) -> None:
    num_ranks, per_rank, ranks_per_node = (data.draw(st.integers(1, most)) for most in (4, 4, 3))
    experts = st.lists(st.integers(0, 5), min_size=num_ranks * per_rank, max_size=num_ranks * per_rank)
    before_P = np.array(data.draw(experts))
    after_P = np.array(data.draw(st.lists(st.sampled_from(before_P.tolist()), min_size=before_P.size, max_size=99)))
    after_P = after_P[: after_P.size // num_ranks * num_ranks]
    held, wanted = ([set(row) for row in np.array_split(plan, num_ranks)] for plan in (before_P, after_P))
    moved_RR = moved_experts(before_P, after_P, num_ranks, ranks_per_node)
    assert moved_RR.sum(axis=0).tolist() == [len(wanted[rank] - held[rank]) for rank in range(num_ranks)]
    assert not moved_RR.diagonal().any()
    for sender, receiver in np.argwhere(moved_RR):
        assert moved_RR[sender, receiver] <= len(held[sender] & (wanted[receiver] - held[receiver]))
    for receiver in range(num_ranks):  # over nodes goes only what no rank of the node holds
        node = [rank for rank in range(num_ranks) if rank // ranks_per_node == receiver // ranks_per_node]
        near = set.union(*(held[rank] for rank in node))
        far = sum(moved_RR[sender, receiver] for sender in range(num_ranks) if sender not in node)
        assert far == len(wanted[receiver] - near)


def test_the_same_plan_moves_nothing_and_a_busy_expert_has_many_senders() -> None:
    plan = np.array([0, 1, 2, 3])
    assert not moved_experts(plan, plan[[1, 0, 3, 2]], 2).any(), "places of a rank are its own"
    moved_RR = moved_experts(np.array([0, 0, 1, 2]), np.array([0, 0, 0, 0]), 4)
    assert moved_RR.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_the_plan_is_the_one_that_the_published_code_gives() -> None:
    """The README prints none; this is eplb.py's own, at commit 5791971, for the README's load and one group."""
    assert [replicate(load_E, num_slots=16, num_ranks=8).tolist() for load_E in PUBLISHED_LOAD] == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]


def test_a_public_replay_of_few_devices() -> None:
    """FlashLB's example: eight experts on 8 devices of 2 slots; published 232 by EPLB and 205 by FlashLB."""
    load_E = np.array([600, 560, 120, 120, 20, 10, 10, 10], dtype=np.float64)

    def fullest(slot_expert_P: np.ndarray) -> float:
        return (load_E / np.bincount(slot_expert_P))[slot_expert_P].reshape(8, -1).sum(axis=1).max()

    eplb = fullest(replicate(load_E, num_slots=16, num_ranks=8))
    assert (eplb, eplb * 8 / load_E.sum()) == (232, 1.28)
    assert fullest(replicate_by_risk(load_E[None], num_slots=16, num_ranks=8)) == 200, "by risk, after FlashLB"


def test_groups_decide_between_equal_loads_alone() -> None:
    by_index, by_group = (replicate([2, 1, 4, 1], num_slots=4, num_ranks=2, num_groups=number) for number in (1, 2))
    assert by_index.tolist() == [2, 3, 0, 1]
    assert by_group.tolist() == [2, 1, 0, 3]


def test_a_plan_by_risk_is_as_it_was() -> None:
    """Of two batches, with quarters, ties and replicas that are kept apart; frozen."""
    plan = replicate_by_risk(PUBLISHED_LOAD, num_slots=16, num_ranks=4)
    assert plan.tolist() == [1, 5, 2, 9, 6, 4, 11, 2, 10, 7, 8, 9, 5, 3, 8, 0]
    load_BE = np.random.default_rng(0).exponential(size=(5, 12)).round(2)
    plan = replicate_by_risk(load_BE, num_slots=18, num_ranks=3)
    assert plan.tolist() == [10, 4, 5, 2, 8, 3, 7, 0, 9, 2, 6, 3, 0, 11, 9, 4, 1, 8]


@some_examples
@given(case=cases())
def test_plan_follows_the_published_rules_done_slowly(case: tuple[list[int], int, int]) -> None:
    """Slot by slot, ties included. So a plan keeps what the rules promise."""
    load_E, num_slots, num_ranks = case
    assert replicate(load_E, num_slots=num_slots, num_ranks=num_ranks).tolist() == slow_plan(*case)


@some_examples
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 12), st.integers(1, 5))
def test_every_spare_slot_goes_to_the_expert_that_bears_most_and_may_have_one(load_E, spare, most):
    replicas, given_to = [1] * len(load_E), []
    for _ in range(spare):
        share = [load / held if held < most else -1 for load, held in zip(load_E, replicas, strict=True)]
        given_to.append(share.index(max(share)))
        replicas[given_to[-1]] += 1
    replica_P, replicas_E = spread(np.array(load_E, dtype=float), len(load_E) + spare, most)
    assert replica_P.tolist() == [*range(len(load_E)), *given_to]
    assert replicas_E.tolist() == replicas


@some_examples
@given(case=cases(), seed=st.integers(0, 99))
def test_ranks_bear_all_of_any_load_and_each_replica_its_even_share(
    case: tuple[list[int], int, int], seed: int
) -> None:
    """Two batches of another load than the one that was planned for."""
    load_E, num_slots, num_ranks = case
    plan = replicate(load_E, num_slots=num_slots, num_ranks=num_ranks).tolist()
    load_BE = np.random.default_rng(seed).exponential(size=(2, len(load_E)))
    share_BP = [[load_E[expert] / plan.count(expert) for expert in plan] for load_E in load_BE]
    expected_BR = np.reshape(share_BP, (2, num_ranks, -1)).sum(axis=2)
    np.testing.assert_allclose(rank_load(load_BE, np.array(plan), num_ranks), expected_BR, rtol=1e-12)


@pytest.mark.parametrize("num_slots", [8, 20])
@pytest.mark.parametrize("plan", [replicate, replicate_by_risk])
def test_a_wrong_number_of_slots_is_named_in_one_line(plan: Callable[..., object], num_slots: int) -> None:
    expected = f"^num_slots: expected a multiple of num_ranks=8, at least the 12 experts, got {num_slots}$"
    with pytest.raises(ValueError, match=expected):
        plan(PUBLISHED_LOAD[0], num_slots=num_slots, num_ranks=8)


# ---- Experts in slots ------------------------------------------------------------------------------------------------


@st.composite
def placed(draw: st.DrawFn) -> tuple[NDArray[np.int64], list[torch.Tensor]]:
    """Slots of a random plan [P], and a random map [T, E] of each rank's tokens."""
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    num_experts = num_ranks * draw(st.integers(1, 4))
    spare = draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    load_E = generator.exponential(size=num_experts)
    plan_P = replicate(load_E, num_slots=num_experts + spare * num_ranks, num_ranks=num_ranks)
    sizes = [draw(st.integers(0, 40)) for _ in range(num_ranks)]
    return plan_P, [torch.from_numpy(generator.random((size, num_experts)) < 0.4) for size in sizes]


def slots_of(plan_P: NDArray[np.int64], maps: list[torch.Tensor], *, is_split: bool) -> Slots:
    counts_RE = np.stack([map_TE.sum(0).numpy() for map_TE in maps])
    pairs_P = lp(plan_P, counts_RE).pairs_P if is_split else None
    return Slots.of_batch(Balanced(plan_P, pairs_P), counts_RE, 1.0)


@settings(max_examples=30)
@given(placed(), st.booleans())
def test_every_pair_goes_to_one_slot_of_its_expert_and_ranks_send_each_slot_its_share(case, is_split: bool) -> None:
    plan_P, maps = case
    slots, num_experts = slots_of(plan_P, maps, is_split=is_split), maps[0].shape[1]
    counts_RP = np.stack([slots.counts(map_TE, rank)[0] for rank, map_TE in enumerate(maps)])
    if is_split:
        counts_RE = np.stack([map_TE.sum(0).numpy() for map_TE in maps])
        assert counts_RP.sum(axis=0).tolist() == lp(plan_P, counts_RE).pairs_P.tolist()
    for rank, map_TE in enumerate(maps):
        for expert in range(num_experts):
            sent = counts_RP[rank, plan_P == expert]
            assert sent.sum() == map_TE[:, expert].sum()
            if not is_split:
                assert sent.max() - sent.min() <= 1
                continue
            total_P = counts_RP[:, plan_P == expert].sum(axis=0)
            even_P = total_P * (sent.sum() / max(total_P.sum(), 1))
            assert np.abs(sent - even_P).max() <= len(even_P)
    # Another batch's tokens find a slot too: few of them are checked against the reference.
    assert slots.counts(maps[0].repeat(2, 1), 0)[0].sum() == 2 * maps[0].sum()


def sent_one_by_one(slots: Slots, map_TE: torch.Tensor, rank: int) -> list[tuple[int, int]]:
    """Token and slot of every pair: an expert's pairs are numbered over ranks, then tokens."""
    seen_E, sent = [0] * map_TE.shape[1], []
    for token, expert in map_TE.nonzero().tolist():
        of_expert = slots.turn_N[slots.first_E[expert] :][: slots.turns_E[expert]]
        number = slots.before_RE[rank, expert] + seen_E[expert]
        sent.append((token, int(of_expert[number % len(of_expert)])))
        seen_E[expert] += 1
    return sent


@settings(max_examples=20)
@given(placed(), st.booleans())
def test_metrics_of_placed_experts_are_those_of_a_slow_count(case, is_split: bool) -> None:
    plan_P, maps = case
    slots, rank = slots_of(plan_P, maps, is_split=is_split), len(maps) - 1
    per_rank = len(plan_P) // len(maps)
    pairs = [(token, slot // per_rank, slot) for token, slot in sent_one_by_one(slots, maps[rank], rank)]
    found = slots.metrics(maps[rank], rank, ranks_per_node=2)
    of_parts = slots.metrics(maps[rank], rank, 2, slots.parts(maps[rank], rank, 2, num_parts=2))
    assert listed(of_parts) == listed(found)
    assert found["slot_load_P"].tolist() == [sum(slot == other for *_, slot in pairs) for other in range(len(plan_P))]
    assert found["load_R"].tolist() == [sum(to == other for _, to, _ in pairs) for other in range(len(maps))]
    assert found["crossing_pairs"] == sum(to != rank for _, to, _ in pairs)
    assert found["crossing_copies"] == len({(token, to) for token, to, _ in pairs if to != rank})
    nodes = {(token, to // 2) for token, to, _ in pairs}
    assert found["crossing_node_copies"] == sum(node != rank // 2 for _, node in nodes)
    assert found["copies_R"].tolist() == [
        len({token for token, to, _ in pairs if to == other}) for other in range(len(maps))
    ]
    assert found["copies_N"].tolist() == [
        sum(node == other for _, node in nodes) for other in range(-(-len(maps) // 2))
    ]
    activated = [len({slot for _, to, slot in pairs if to == other}) for other in range(len(maps))]
    assert found["activated_experts_fullest_rank"] == max(activated)


def listed(metrics):
    return {name: np.array(value).tolist() for name, value in metrics.items()}


def test_contiguous_slots_change_no_metric() -> None:
    scores_TE = torch.rand(33, 8, generator=torch.Generator().manual_seed(1)).softmax(1)
    context = RoutingContext(top_k=2, num_ranks=4, rank=1)
    routing = make_policy({"name": "topk"}).route(scores_TE, context)
    slots = Slots.contiguous(8, 4)
    assert slots.is_contiguous
    metrics, parts = metrics_of_parts(routing.map_TE, scores_TE, context, num_parts=4)
    assert listed(metrics) == listed(routing_metrics(routing, scores_TE, context))
    assert list(map(listed, parts)) == list(map(listed, slots.parts(routing.map_TE, 1, RANKS_PER_NODE, num_parts=4)))
    placed = slots.metrics(routing.map_TE, 1)
    assert placed.pop("moved_weight_bytes") == 0
    assert placed.pop("slot_load_P").tolist() == metrics["load_E"].tolist()
    for name in ("load_R", "copies_R", "copies_N"):
        assert placed.pop(name).tolist() == metrics[name].tolist()
    assert placed == {key: metrics[key] for key in placed}


def test_few_pairs_of_many_ranks_do_not_meet_in_one_replica() -> None:
    slots = Slots.of_batch(Balanced(np.array([0, 1, 0, 0]), None), np.ones((4, 2), dtype=np.int64), 1.0)
    one_pair = torch.tensor([[True, False]])
    assert {int(slots.counts(one_pair, rank)[0].argmax()) for rank in range(3)} == {0, 2, 3}


def test_an_expert_without_pairs_in_a_split_batch_keeps_a_slot_for_tokens_of_another() -> None:
    balanced = Balanced(np.array([0, 1, 0, 2]), np.array([2, 0, 1, 1]))
    slots = Slots.of_batch(balanced, np.array([[2, 0, 0], [1, 0, 1]]), 1.0)
    assert slots.turns_E.tolist() == [3, 1, 1]
    assert slots.counts(torch.tensor([[False, True, False]]), 0)[0].tolist() == [0, 1, 0, 0]
