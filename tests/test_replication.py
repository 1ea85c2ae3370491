"""Expert replication: DeepSeek's published example, the published rules done slowly, and the laws of a plan."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.placement import Replication, other_batches, replicate

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


def slow_plan(load_E: list[int], num_slots: int, num_ranks: int, num_nodes: int, num_groups: int) -> list[int]:
    """The expert of every slot under the hierarchical policy; with one node and one group it is the global one."""
    size = len(load_E) // num_groups
    groups = [list(range(first, first + size)) for first in range(0, len(load_E), size)]
    slots = []
    for node in slow_packs([sum(load_E[expert] for expert in group) for group in groups], num_nodes):
        experts = [expert for group in node for expert in groups[group]]
        replicas = list(experts)
        while len(replicas) < num_slots // num_nodes:
            replicas.append(max(experts, key=lambda expert: load_E[expert] / replicas.count(expert)))
        shares = [load_E[expert] / replicas.count(expert) for expert in replicas]
        slots += [replicas[held] for rank in slow_packs(shares, num_ranks // num_nodes) for held in rank]
    return slots


@dataclass(frozen=True)
class Case:
    """A load and sizes that fit together."""

    load_LE: list[list[int]]
    num_slots: int
    num_ranks: int
    num_nodes: int
    num_groups: int

    @property
    def num_experts(self) -> int:
        return len(self.load_LE[0])

    def plan(self, policy: str = "auto") -> Replication:
        return replicate(
            self.load_LE,
            num_slots=self.num_slots,
            num_ranks=self.num_ranks,
            num_nodes=self.num_nodes,
            num_groups=self.num_groups,
            policy=policy,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One to three nodes that divide the groups; small whole loads, so that ties and zeros are common."""
    num_nodes = draw(st.integers(1, 3))
    num_groups = num_nodes * draw(st.integers(1, 3))
    num_experts = num_groups * draw(st.integers(1, 3))
    num_ranks = num_nodes * draw(st.integers(1, 3))
    per_rank = math.ceil(num_experts / num_ranks) + draw(st.integers(0, 2))
    load_E = st.lists(st.integers(0, 20), min_size=num_experts, max_size=num_experts)
    return Case(draw(st.lists(load_E, min_size=1, max_size=3)), per_rank * num_ranks, num_ranks, num_nodes, num_groups)


def loads(num_experts: int) -> st.SearchStrategy[list[float]]:
    load = st.just(0.0) | st.floats(1e-3, 1e6)  # so small as to lose digits when it is divided, no load is
    return st.lists(load, min_size=num_experts, max_size=num_experts)


# --- Published figures -------------------------------------------------------------------------------


def test_hierarchical_plan_is_the_one_that_the_eplb_readme_prints() -> None:
    """16 replicas, 4 groups, 2 nodes, 8 GPUs; the README's policy is chosen, not given."""
    plan = replicate(PUBLISHED_LOAD, num_slots=16, num_ranks=8, num_nodes=2, num_groups=4)
    assert plan.policy == "hierarchical"
    assert plan.slot_expert_LP.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    # What follows from it, worked out by hand for the first layer: 1, 4, 5 and 10 have two replicas.
    assert plan.replicas[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert plan.rank_load(PUBLISHED_LOAD)[0].tolist() == [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152]


@some_examples
@given(case=cases())
def test_ranks_that_hold_an_expert_twice_are_told(case: Case) -> None:
    plan = case.plan()
    for slots_P, stacked_R in zip(plan.slot_expert_LP.tolist(), plan.stacked.tolist(), strict=True):
        size = len(slots_P) // case.num_ranks
        ranks = [slots_P[first : first + size] for first in range(0, len(slots_P), size)]
        assert stacked_R == [len(set(held)) < len(held) for held in ranks]


def test_the_published_rules_stack_replicas_of_an_expert_that_outweighs_a_rank() -> None:
    """deepseek-ai/EPLB, issue 22: more replicas than ranks."""
    plan = replicate([100, 10, 10, 10], num_slots=8, num_ranks=2)
    assert plan.replicas[0].max() > plan.num_ranks
    assert plan.stacked.tolist() == [[True, True]]
    assert not replicate([4, 3, 2, 1], num_slots=4, num_ranks=2).stacked.any()


def test_each_batch_is_planned_for_the_others() -> None:
    assert other_batches([[1, 2], [3, 4], [5, 0]], 1).tolist() == [[1, 2], [5, 0]]
    assert other_batches([[1, 2]], 0).tolist() == [[1, 2]]


@pytest.mark.parametrize(("num_nodes", "num_groups", "policy"), [(2, 1, "auto"), (2, 4, "global"), (5, 7, "auto")])
def test_global_plan_is_the_one_that_the_published_code_gives(num_nodes: int, num_groups: int, policy: str) -> None:
    """The README prints none; this is eplb.py's own, at commit 5791971, for the README's load and one group."""
    plan = replicate(
        PUBLISHED_LOAD, num_slots=16, num_ranks=8, num_nodes=num_nodes, num_groups=num_groups, policy=policy
    )
    assert plan.policy == "global"
    assert plan.slot_expert_LP.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]


@some_examples
@given(case=cases(), policy=st.sampled_from(["hierarchical", "global"]))
def test_plan_follows_the_published_rules_done_slowly(case: Case, policy: str) -> None:
    """Slot by slot, ties included; every layer as if it were alone. So a plan keeps what the rules promise."""
    nodes, groups = (1, 1) if policy == "global" else (case.num_nodes, case.num_groups)
    expected = [slow_plan(load_E, case.num_slots, case.num_ranks, nodes, groups) for load_E in case.load_LE]
    plan = case.plan(policy)
    assert plan.slot_expert_LP.tolist() == expected
    assert plan.replicas.tolist() == [[slots.count(e) for e in range(case.num_experts)] for slots in expected]


# --- Laws of every plan ------------------------------------------------------------------------------


@some_examples
@given(case=cases(), policy=st.sampled_from(["hierarchical", "global"]), data=st.data())
def test_ranks_bear_all_of_any_load_and_each_replica_its_even_share(
    case: Case, policy: str, data: st.DataObject
) -> None:
    """Two batches of another load than the one that was planned for."""
    plan = case.plan(policy)
    layers, per_rank = len(case.load_LE), case.num_slots // case.num_ranks
    load_BLE = np.array(data.draw(loads(2 * layers * case.num_experts))).reshape(2, layers, case.num_experts)
    load_BLR = plan.rank_load(load_BLE)
    assert load_BLR.sum(axis=2) == pytest.approx(load_BLE.sum(axis=2), rel=1e-12)
    for batch, layer, rank in itertools.product(range(2), range(layers), range(case.num_ranks)):
        held = plan.slot_expert_LP[layer, rank * per_rank : (rank + 1) * per_rank].tolist()
        shares = [load_BLE[batch, layer, e] / plan.slot_expert_LP[layer].tolist().count(e) for e in held]
        assert load_BLR[batch, layer, rank] == pytest.approx(sum(shares), rel=1e-12)


# --- Wrong inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_slots": 8}, "^num_slots: expected a multiple of num_ranks=8, at least the 12 experts, got 8$"),
        ({"num_groups": 8}, "^num_groups: expected a divisor of the 12 experts, got 8$"),
        ({"num_nodes": 3, "num_groups": 3}, "^num_nodes: expected a divisor of num_ranks=8, got 3$"),
        (
            {"num_nodes": 2, "num_groups": 3, "policy": "hierarchical"},
            "^num_groups: expected a multiple of num_nodes=2 for hierarchical, got 3$",
        ),
    ],
)
def test_wrong_inputs_are_named_in_one_line(wrong: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"load_LE": PUBLISHED_LOAD, "num_slots": 16, "num_ranks": 8}
    with pytest.raises(ValueError, match=message) as caught:
        replicate(**{**right, **wrong})
    assert "\n" not in str(caught.value)
