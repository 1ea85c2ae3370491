"""Experts in slots: every pair finds one slot of its expert, replicas share evenly, metrics follow."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.balancers import lp
from moe_ep_bench.bench.traffic import in_slots
from moe_ep_bench.layer.expert_placement import ExpertPlacement, Split
from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.placement import replicate
from moe_ep_bench.policies import RoutingContext, make_policy


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertPlacement, torch.Tensor, int]:
    """Slots of a random plan, a random map [T, E] and a source rank."""
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    num_experts = num_ranks * draw(st.integers(1, 4))
    spare = draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    load_E = generator.exponential(size=num_experts)
    plan = replicate(load_E, num_slots=num_experts + spare * num_ranks, num_ranks=num_ranks)
    slots = ExpertPlacement(plan.slot_expert_LP[0], num_experts, num_ranks)
    map_TE = torch.from_numpy(generator.random((draw(st.integers(0, 40)), num_experts)) < 0.4)
    return slots, map_TE, draw(st.integers(0, num_ranks - 1))


@settings(max_examples=20)
@given(cases())
def test_every_pair_goes_to_one_slot_of_its_expert_and_replicas_share_evenly(case) -> None:
    slots, map_TE, rank = case
    map_TP = slots.spread(map_TE, rank)
    for expert in range(slots.num_experts):
        of_expert_TC = map_TP[:, slots.expert_P == expert]
        assert torch.equal(of_expert_TC.sum(1), map_TE[:, expert].long())
        loads = of_expert_TC.sum(0)
        assert int(loads.max() - loads.min()) <= 1
    weights_TE = torch.rand(map_TE.shape) * map_TE
    weights_TP = slots.spread_weights(weights_TE, map_TP)
    assert torch.equal(weights_TP != 0, map_TP & (weights_TP != 0))
    torch.testing.assert_close(weights_TP.sum(1), weights_TE.sum(1))


@settings(max_examples=20)
@given(cases(), st.integers(0, 10**6))
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
@given(cases(), st.booleans())
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
