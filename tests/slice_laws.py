"""Laws of layers whose experts are cut into slices: Megatron-Core's expert tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from laws import law
from layer_laws import (
    LATE,
    LITE,
    SEED,
    TOPK,
    Lab,
    assert_phases,
    assert_right,
    breakdown,
    violations,
)
from virtual_time import all_in, passing_where_late

from moe_ep_bench.layer import megatron
from moe_ep_bench.layer.build import LayerPair
from moe_ep_bench.layer.experts import ROUTED, expert_weights
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.policies import make_policy

# Ranks: expert-parallel ranks and slices. One of four is a replica of a pair.
SHAPES = {2: [(1, 2)], 4: [(2, 2), (1, 2), (1, 4)]}
ALL_TO_ALL = [Parts(experts, permute) for experts in ("grouped", "sequential") for permute in ("indexed", "megatron")]
GATHERING = Parts("grouped", "megatron", "auto", "allgather")
SPECS = [
    None,
    {"name": "token_drop", "capacity_factor": 0.5},
    {"name": "token_drop", "capacity_factor": 0},
    {"name": "expanded_drop", "capacity_factor": 1.5},
    {"name": "megatron_drop", "capacity_factor": 1.0},
    {"name": "oea", "k0": 1},
]


@contextlib.contextmanager
def cut(lab: Lab, ep_size: int, num_slices: int) -> Iterator[Rendezvous]:
    """Where all ranks meet that share experts, in slices; afterwards all ranks share whole ones again."""
    lab.ep_group = megatron.initialize_expert_parallel(ep_size, 60, num_slices)
    try:
        yield Rendezvous(megatron.meeting_group(), lab.ranks.device)
    finally:
        lab.forget()


def layers_of(lab: Lab, parts: Parts, num_slices: int, dtype: torch.dtype = torch.float32) -> LayerPair:
    return lab.layers(LITE, dtype, replace(parts, expert_tensor_parallel=num_slices))


@law(2, 4, on_one=False)
def experts_in_slices_equal_the_dense_reference_and_topk_equals_native_bit_for_bit(lab: Lab) -> None:
    for number, (ep_size, num_slices) in enumerate(SHAPES[lab.ranks.world_size]):
        with cut(lab, ep_size, num_slices):
            for parts in (*ALL_TO_ALL, GATHERING) if number == 0 else ALL_TO_ALL[:1]:
                layers = layers_of(lab, parts, num_slices)
                hidden_TD, scores_TE = lab.tokens(num_tokens=60, even=parts == GATHERING)
                reference = lab.reference(LITE, hidden_TD)
                native_TD, native = lab.route(layers, None, hidden_TD, scores_TE)
                ours_TD, ours = lab.route(layers, TOPK, hidden_TD, scores_TE)
                assert torch.equal(native.map_TE, ours.map_TE), parts
                assert torch.equal(native_TD, ours_TD), parts
                for spec in SPECS if parts.experts == "grouped" else SPECS[:2]:
                    routed = lab.route(layers, spec, hidden_TD, scores_TE)
                    assert_right(reference, *routed, f"EP {ep_size} x {num_slices} {parts} {spec}")
            if number == 0:
                hidden_TD, scores_TE = lab.tokens(num_tokens=60)
                reference = lab.reference(LITE, hidden_TD.bfloat16())
                layers = layers_of(lab, ALL_TO_ALL[0], num_slices, torch.bfloat16)
                assert_right(reference, *lab.route(layers, TOPK, hidden_TD.bfloat16(), scores_TE), "bfloat16")


@law(4, on_one=False)
def every_rank_holds_its_slice_of_its_experts_and_nothing_more(lab: Lab) -> None:
    model = lab.model()
    for ep_size, num_slices in SHAPES[lab.ranks.world_size]:
        with cut(lab, ep_size, num_slices):
            layer = layers_of(lab, ALL_TO_ALL[0], num_slices).native
            held = sum(weight.numel() for weight in layer.experts.parameters())
            one = 3 * model.hidden_size * model.ffn_hidden_size
            assert held * ep_size * num_slices == model.num_experts * one
            first = lab.ranks.rank // num_slices % ep_size * (model.num_experts // ep_size)
            assert layer.local_expert_indices[0] == first
            sizes = model.hidden_size, model.ffn_hidden_size
            whole = expert_weights(SEED, ROUTED, first, *sizes, lab.ranks.device, torch.float32)
            width, slice_rank = model.ffn_hidden_size // num_slices, lab.ranks.rank % num_slices
            columns = slice(slice_rank * width, (slice_rank + 1) * width)
            assert torch.equal(layer.experts.down_LDF[0], whole.down_DF[:, columns])
            gate_FD, up_FD = whole.gate_up_2FD.chunk(2)
            assert torch.equal(layer.experts.gate_up_L2FD[0], torch.cat((gate_FD[columns], up_FD[columns])))


@law(4, on_one=False)
def a_policy_sees_its_own_ranks_tokens_and_a_batch_wide_one_those_of_all_slices(lab: Lab) -> None:
    model = lab.model()
    with cut(lab, 2, 2):
        layers, (hidden_TD, scores_TE) = layers_of(lab, ALL_TO_ALL[0], 2), lab.tokens(num_tokens=60)
        context = lab.context(layers)
        assert (context.num_ranks, context.rank) == (2, lab.ranks.rank // 2)
        drop, oea = make_policy({"name": "token_drop", "capacity_factor": 1.0}), make_policy({"name": "oea", "k0": 1})
        _, routing = lab.route(layers, drop, hidden_TD, scores_TE)
        assert torch.equal(routing.map_TE, drop.route(scores_TE, context).map_TE)
        _, routing = lab.route(layers, oea, hidden_TD, scores_TE)
        whole = oea.route(lab.all_scores(model, 60), context)
        assert torch.equal(routing.map_TE, whole.map_TE[lab.mine(60)])
        alone = oea.route(scores_TE, context).map_TE
        assert int(lab.summed((alone != routing.map_TE).any().long())), "the sum over slices makes no difference"


@law(4, on_one=False)
def phases_of_slices_are_exclusive_and_close_against_the_total(lab: Lab) -> None:
    for ep_size, num_slices in SHAPES[lab.ranks.world_size]:
        with cut(lab, ep_size, num_slices) as meet:
            for parts in (*ALL_TO_ALL[:2], GATHERING):
                times = breakdown(lab, layers_of(lab, parts, num_slices), meet=meet)
                if parts == GATHERING:
                    assert_phases(lab, times, "wait_dispatch", "wait_combine", but="metadata")
                else:
                    assert_phases(lab, times, "wait_metadata", "wait_dispatch", "wait_combine")


@law(2, 4, on_one=False)
def a_slow_rank_shows_as_waiting_where_slices_meet(lab: Lab) -> None:
    """Also what is late between the all-to-all and the all-gather: no transfer absorbs it."""
    ep_size, num_slices = SHAPES[lab.ranks.world_size][0]
    # What the all-to-all returns late is waited for before the all-gather, but not by those that gather elsewhere.
    is_near = lab.ranks.rank // num_slices == (lab.ranks.world_size - 1) // num_slices
    after = "wait_dispatch" if is_near else "wait_combine"
    inside = [
        ("token_dispatcher", "token_dispatch", "dispatch", after, None),
        ("token_dispatcher", "gather_rows", "dispatch", "wait_combine", None),
        ("experts", "forward", "experts", "wait_combine", None),
    ]
    with cut(lab, ep_size, num_slices) as meet:
        indexed, megatrons = (layers_of(lab, parts, num_slices) for parts in ALL_TO_ALL[:2])
        found = violations(lab, indexed, [*LATE[:3], *inside], meet) + violations(lab, megatrons, inside, meet)
    assert not found, found


@law(4, on_one=False)
def before_a_transfer_only_its_own_ranks_are_waited_for(lab: Lab) -> None:
    """Sums that are late hold up their column of ranks alone: the all-to-all back is the column's."""
    with cut(lab, 2, 2) as meet:
        layers = layers_of(lab, ALL_TO_ALL[0], 2)
        dispatcher, run = layers.native.token_dispatcher, partial(breakdown, lab, layers, None, meet=meet)
        passed = passing_where_late(lab.ranks.device, dispatcher, "sum_slices", run, is_slow=lab.ranks.rank == 3)
        where = {1: "wait_combine", 3: "combine"}.get(lab.ranks.rank)
        assert passed == (all_in(where) if where else {}), passed
