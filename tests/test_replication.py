"""Expert replication: the published rules and figures, the laws of a plan, and what slots do to pairs and metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.balancers import lp
from moe_ep_bench.bench.traffic import in_slots
from moe_ep_bench.layer.expert_placement import ExpertPlacement, Split
from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.placement import other_batches, rank_load, replicate
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


def test_each_batch_is_planned_for_the_others() -> None:
    assert other_batches([[1, 2], [3, 4], [5, 0]], 1).tolist() == [[1, 2], [5, 0]]
    assert other_batches([[1, 2]], 0).tolist() == [[1, 2]]


def test_the_plan_is_the_one_that_the_published_code_gives() -> None:
    """The README prints none; this is eplb.py's own, at commit 5791971, for the README's load and one group."""
    assert [replicate(load_E, num_slots=16, num_ranks=8).tolist() for load_E in PUBLISHED_LOAD] == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]


def test_groups_decide_between_equal_loads_alone() -> None:
    by_index, by_group = (replicate([2, 1, 4, 1], num_slots=4, num_ranks=2, num_groups=number) for number in (1, 2))
    assert by_index.tolist() == [2, 3, 0, 1]
    assert by_group.tolist() == [2, 1, 0, 3]


@some_examples
@given(case=cases())
def test_plan_follows_the_published_rules_done_slowly(case: tuple[list[int], int, int]) -> None:
    """Slot by slot, ties included. So a plan keeps what the rules promise."""
    load_E, num_slots, num_ranks = case
    assert replicate(load_E, num_slots=num_slots, num_ranks=num_ranks).tolist() == slow_plan(*case)


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
def test_a_wrong_number_of_slots_is_named_in_one_line(num_slots: int) -> None:
    expected = f"^num_slots: expected a multiple of num_ranks=8, at least the 12 experts, got {num_slots}$"
    with pytest.raises(ValueError, match=expected):
        replicate(PUBLISHED_LOAD[0], num_slots=num_slots, num_ranks=8)


# ---- Experts in slots ------------------------------------------------------------------------------------------------


@st.composite
def placed(draw: st.DrawFn) -> tuple[ExpertPlacement, torch.Tensor, int]:
    """Slots of a random plan, a random map [T, E] and a source rank."""
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    num_experts = num_ranks * draw(st.integers(1, 4))
    spare = draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    load_E = generator.exponential(size=num_experts)
    plan = replicate(load_E, num_slots=num_experts + spare * num_ranks, num_ranks=num_ranks)
    slots = ExpertPlacement(plan, num_experts, num_ranks)
    map_TE = torch.from_numpy(generator.random((draw(st.integers(0, 40)), num_experts)) < 0.4)
    return slots, map_TE, draw(st.integers(0, num_ranks - 1))


@settings(max_examples=20)
@given(placed())
def test_every_pair_goes_to_one_slot_of_its_expert_and_replicas_share_evenly(case) -> None:
    slots, map_TE, rank = case
    map_TP = slots.spread(map_TE, rank)
    for expert in range(slots.num_experts):
        of_expert_TC = map_TP[:, slots.expert_P == expert]
        assert torch.equal(of_expert_TC.sum(1), map_TE[:, expert].long())
        loads = of_expert_TC.sum(0)
        assert int(loads.max() - loads.min()) <= 1


@settings(max_examples=20)
@given(placed(), st.integers(0, 10**6))
def test_a_split_gives_every_slot_its_pairs_and_every_rank_sends_each_its_share(case, seed: int) -> None:
    slots, map_TE, _ = case
    generator = np.random.default_rng(seed)
    ranks = [map_TE[torch.from_numpy(generator.random(len(map_TE)) < 0.7)] for _ in range(slots.num_ranks)]
    counts_RE = np.stack([one.sum(0).numpy() for one in ranks])
    pairs_P = lp(slots.expert_P, counts_RE).pairs_P
    split = Split.of(slots.expert_P, pairs_P, counts_RE)
    slots = ExpertPlacement(slots.expert_P, slots.num_experts, slots.num_ranks, split)
    maps = [slots.spread(one, rank) for rank, one in enumerate(ranks)]
    assert sum(one.sum(0) for one in maps).tolist() == pairs_P.tolist()
    for rank, map_TP in enumerate(maps):
        for expert in range(slots.num_experts):
            own_P = slots.expert_P == expert
            assert torch.equal(map_TP[:, own_P].sum(1), ranks[rank][:, expert].long())
            even_P = pairs_P[own_P] * (counts_RE[rank, expert] / max(counts_RE[:, expert].sum(), 1))
            assert np.abs(map_TP[:, own_P].sum(0).numpy() - even_P).max() <= len(even_P)
    # Another batch's tokens find a slot too: few of them are checked against the reference.
    assert torch.equal(slots.spread(map_TE, 0).sum(1), map_TE.sum(1))


@settings(max_examples=15)
@given(placed(), st.booleans())
def test_metrics_of_placed_experts_are_those_of_a_slow_count(case, is_split: bool) -> None:
    slots, map_TE, rank = case
    if is_split:
        counts_RE = np.tile(map_TE.sum(0).numpy(), (slots.num_ranks, 1))
        pairs_P = lp(slots.expert_P, counts_RE).pairs_P
        split = Split.of(slots.expert_P, pairs_P, counts_RE)
        slots = ExpertPlacement(slots.expert_P, slots.num_experts, slots.num_ranks, split)
    map_TP = slots.spread(map_TE, rank)
    per_rank = slots.num_slots // slots.num_ranks
    pairs = [(token, int(slot) // per_rank, int(slot)) for token, slot in map_TP.nonzero()]
    found = in_slots(map_TE, slots, rank)
    assert found["slot_load_P"].tolist() == map_TP.sum(0).tolist()
    assert found["load_R"].tolist() == [sum(to == other for _, to, _ in pairs) for other in range(slots.num_ranks)]
    assert found["crossing_pairs"] == sum(to != rank for _, to, _ in pairs)
    assert found["crossing_copies"] == len({(int(token), to) for token, to, _ in pairs if to != rank})
    activated = [len({slot for _, to, slot in pairs if to == other}) for other in range(slots.num_ranks)]
    assert found["activated_experts_fullest_rank"] == max(activated)


def test_contiguous_slots_change_no_metric() -> None:
    scores_TE = torch.rand(33, 8, generator=torch.Generator().manual_seed(1)).softmax(1)
    context = RoutingContext(top_k=2, num_ranks=4, rank=1)
    routing = make_policy({"name": "topk"}).route(scores_TE, context)
    slots = ExpertPlacement.contiguous(8, 4)
    assert slots.is_contiguous
    map_TP = slots.spread(routing.map_TE, 1)
    assert torch.equal(map_TP, routing.map_TE)
    metrics = routing_metrics(routing, scores_TE, context)
    placed = in_slots(routing.map_TE, slots, 1)
    assert placed.pop("moved_weight_bytes") == 0
    assert placed.pop("slot_load_P").tolist() == metrics["load_E"].tolist()
    assert placed.pop("load_R").tolist() == metrics["load_R"].tolist()
    assert placed == {key: metrics[key] for key in placed}


def test_few_pairs_of_many_ranks_do_not_meet_in_one_replica() -> None:
    slots = ExpertPlacement(np.array([0, 1, 0, 0]), num_experts=2, num_ranks=4)
    one_pair = torch.tensor([[True, False]])
    assert {int(slots.spread(one_pair, rank).nonzero()[0, 1]) for rank in range(3)} == {0, 2, 3}
