"""Laws of layers whose experts are cut into slices: Megatron-Core's expert tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from layer_laws import SEED, CountedSum, Lab, assert_close, law, needs_ranks
from torch import Tensor
from virtual_time import all_in, passing_where_late

from moe_ep_bench.layer import megatron
from moe_ep_bench.layer.build import LayerPair, SingleLayer
from moe_ep_bench.layer.experts import ROUTED, expert_weights
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.phases import Rendezvous, instrumented
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.policies import Policy, make_policy
from moe_ep_bench.schema import LAYER_PHASES, TOTAL, UNACCOUNTED
from moe_ep_bench.timing.timer import Clock, PhaseRecorder, clock_for

# Ranks: expert-parallel ranks and slices. One of four is a replica of a pair.
SHAPES = {2: [(1, 2)], 4: [(2, 2), (1, 2), (1, 4)]}
ALL_TO_ALL = [
    Parts(experts, permute, expert_tensor_parallel=2)
    for experts in ("grouped", "sequential")
    for permute in ("indexed", "megatron")
]
GATHERING = Parts("grouped", "megatron", "auto", "allgather", expert_tensor_parallel=2)
SOME_POLICIES = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": 0.5},
    {"name": "token_drop", "capacity_factor": 0},
    {"name": "expanded_drop", "capacity_factor": 1.5},
    {"name": "megatron_drop", "capacity_factor": 1.0},
    {"name": "oea", "k0": 1},
    {"name": "xshare", "k0": 1, "budget": 2},
]


@contextlib.contextmanager
def cut(lab: Lab, ep_size: int, num_slices: int) -> Iterator[dist.ProcessGroup]:
    """The group of all ranks that share experts, in slices; afterwards all ranks share whole ones again."""
    lab.ep_group = megatron.initialize_expert_parallel(ep_size, 60, num_slices)
    try:
        yield megatron.meeting_group()
    finally:
        lab.ep_group = megatron.initialize_expert_parallel(lab.ranks.world_size, 60)
        lab._subjects.clear()


def layers_of(lab: Lab, parts: Parts, num_slices: int, dtype: torch.dtype = torch.float32) -> LayerPair:
    model = lab.model("deepseek-v2-lite")
    parts = replace(parts, expert_tensor_parallel=num_slices)
    return SingleLayer(model, dtype, lab.ranks.device, lab.ep_group, SEED, parts).pair


def tokens(lab: Lab, num_tokens: int, *, even: bool = False) -> tuple[Tensor, Tensor]:
    """This rank's hidden states and scores: every rank has tokens of its own."""
    model, ranks = lab.model("deepseek-v2-lite"), lab.ranks
    each = num_tokens // ranks.world_size
    mine = slice(ranks.rank * each, (ranks.rank + 1) * each) if even else lab.mine(num_tokens)
    return lab.all_hidden(model, num_tokens)[mine], lab.all_scores(model, num_tokens)[mine]


@law
@needs_ranks(2, 4)
def experts_in_slices_equal_the_dense_reference(lab: Lab) -> None:
    model = lab.model("deepseek-v2-lite")
    for number, (ep_size, num_slices) in enumerate(SHAPES[lab.ranks.world_size]):
        with cut(lab, ep_size, num_slices):
            for parts in (*ALL_TO_ALL, GATHERING) if number == 0 else ALL_TO_ALL[:1]:
                layers = layers_of(lab, parts, num_slices)
                hidden_TD, scores_TE = tokens(lab, 60, even=parts.dispatcher == "allgather")
                reference = DenseReference(model, hidden_TD, SEED)
                for spec in (None, *SOME_POLICIES):
                    policy = None if spec is None else make_policy(spec)
                    output_TD, routing = lab.route(layers, policy, hidden_TD, scores_TE)
                    error = reference.worst_error(output_TD, routing.weights_TE)
                    assert_close(error, TOLERANCE[torch.float32], f"EP {ep_size} x {num_slices} {parts} {spec}")


@law
@needs_ranks(2, 4)
def slices_in_bfloat16_stay_within_its_tolerance(lab: Lab) -> None:
    ep_size, num_slices = SHAPES[lab.ranks.world_size][0]
    with cut(lab, ep_size, num_slices):
        layers = layers_of(lab, ALL_TO_ALL[0], num_slices, torch.bfloat16)
        hidden_TD, scores_TE = tokens(lab, 60)
        hidden_TD = hidden_TD.bfloat16()
        reference = DenseReference(lab.model("deepseek-v2-lite"), hidden_TD, SEED)
        output_TD, routing = lab.route(layers, make_policy({"name": "topk"}), hidden_TD, scores_TE)
        assert_close(reference.worst_error(output_TD, routing.weights_TE), TOLERANCE[torch.bfloat16], "topk")


@law
@needs_ranks(2, 4)
def topk_on_slices_equals_the_native_layer_bit_for_bit(lab: Lab) -> None:
    for ep_size, num_slices in SHAPES[lab.ranks.world_size]:
        with cut(lab, ep_size, num_slices):
            for parts in ALL_TO_ALL:
                layers = layers_of(lab, parts, num_slices)
                native_TD, native = lab.route(layers, None, *tokens(lab, 60))
                ours_TD, ours = lab.route(layers, make_policy({"name": "topk"}), *tokens(lab, 60))
                assert torch.equal(native.map_TE, ours.map_TE), parts
                assert torch.equal(native_TD, ours_TD), parts


@law
@needs_ranks(2, 4)
def every_rank_holds_its_slice_of_its_experts_and_nothing_more(lab: Lab) -> None:
    model = lab.model("deepseek-v2-lite")
    for ep_size, num_slices in SHAPES[lab.ranks.world_size]:
        with cut(lab, ep_size, num_slices):
            layer = layers_of(lab, ALL_TO_ALL[0], num_slices).native
            held = sum(weight.numel() for weight in layer.experts.parameters())
            one = 3 * model.hidden_size * model.ffn_hidden_size
            assert held * ep_size * num_slices == model.num_experts * one
            slice_rank = lab.ranks.rank % num_slices
            first = lab.ranks.rank // num_slices % ep_size * (model.num_experts // ep_size)
            assert layer.local_expert_indices[0] == first
            sizes = model.hidden_size, model.ffn_hidden_size
            whole = expert_weights(SEED, ROUTED, first, *sizes, lab.ranks.device, torch.float32)
            columns = slice(
                slice_rank * model.ffn_hidden_size // num_slices, (slice_rank + 1) * model.ffn_hidden_size // num_slices
            )
            assert torch.equal(layer.experts.down_LDF[0], whole.down_DF[:, columns])
            gate_FD, up_FD = whole.gate_up_2FD.chunk(2)
            assert torch.equal(layer.experts.gate_up_L2FD[0], torch.cat((gate_FD[columns], up_FD[columns])))


@law
@needs_ranks(2, 4)
def a_slice_that_is_missing_is_noticed_by_the_reference(lab: Lab) -> None:
    ep_size, num_slices = SHAPES[lab.ranks.world_size][0]
    with cut(lab, ep_size, num_slices):
        layers = layers_of(lab, ALL_TO_ALL[0], num_slices)
        if lab.ranks.rank % num_slices == 0:
            layers.native.experts.down_LDF.zero_()
        hidden_TD, scores_TE = tokens(lab, 60)
        output_TD, routing = lab.route(layers, None, hidden_TD, scores_TE)
        reference = DenseReference(lab.model("deepseek-v2-lite"), hidden_TD, SEED)
        assert reference.worst_error(output_TD, routing.weights_TE) > 0.1


@law
@needs_ranks(2, 4)
def a_policy_sees_its_own_ranks_tokens_and_a_batch_wide_one_those_of_all_slices(lab: Lab) -> None:
    ep_size, num_slices = SHAPES[lab.ranks.world_size][0]
    model = lab.model("deepseek-v2-lite")
    with cut(lab, ep_size, num_slices):
        layers = layers_of(lab, ALL_TO_ALL[0], num_slices)
        hidden_TD, scores_TE = tokens(lab, 60)
        context = lab.context(layers)
        assert (context.num_ranks, context.rank) == (ep_size, lab.ranks.rank // num_slices)
        drop = make_policy({"name": "token_drop", "capacity_factor": 1.0})
        _, routing = lab.route(layers, drop, hidden_TD, scores_TE)
        assert torch.equal(routing.map_TE, drop.route(scores_TE, context).map_TE)
        _, routing = lab.route(layers, CountedSum(), hidden_TD, scores_TE)
        whole = CountedSum().route(lab.all_scores(model, 60), context)
        assert torch.equal(routing.map_TE, whole.map_TE[lab.mine(60)])
        oea = make_policy({"name": "oea", "k0": 1})
        _, routing = lab.route(layers, oea, hidden_TD, scores_TE)
        whole = oea.route(lab.all_scores(model, 60), replace(context, request_id_T=None))
        assert torch.equal(routing.map_TE, whole.map_TE[lab.mine(60)])
        alone = oea.route(scores_TE, context).map_TE
        assert int(lab.summed((alone != routing.map_TE).any().long())), "the sum over slices makes no difference"


def breakdown(
    lab: Lab, layers: LayerPair, meet: Rendezvous, policy: Policy | None = None, clock: Clock | None = None
) -> dict[str, float]:
    """Microseconds per phase of one instrumented iteration; every rank has as many tokens.

    Clock None = the device's own.
    """
    layer = layers.native if policy is None else layers.policy
    hidden_TD, _ = tokens(lab, 16 * lab.ranks.world_size, even=True)
    layer.router.replay_TE = None
    if policy is not None:
        layer.router.policy = policy
    recorder = PhaseRecorder(clock or clock_for(lab.ranks.device))
    with instrumented(layer, recorder, meet):
        meet()
        recorder.begin()
        layer(hidden_TD.unsqueeze(1))
        recorder.end()
    return recorder.times_us()


@law
@needs_ranks(2, 4)
def phases_of_slices_are_exclusive_and_close_against_the_total(lab: Lab) -> None:
    for ep_size, num_slices in SHAPES[lab.ranks.world_size]:
        with cut(lab, ep_size, num_slices) as group:
            meet = Rendezvous(group, lab.ranks.device)
            for parts in (*ALL_TO_ALL, GATHERING):
                times = breakdown(lab, layers_of(lab, parts, num_slices), meet)
                expected = {"shared", "gate", "policy", "permute", "dispatch", "experts", "combine"}
                expected |= {"wait_dispatch", "wait_combine"}
                if parts.dispatcher == "alltoall":
                    expected |= {"metadata", "wait_metadata"}
                assert set(times) == {*expected, UNACCOUNTED, TOTAL}, parts
                assert set(times) <= {*LAYER_PHASES, UNACCOUNTED, TOTAL}
                covered = sum(value for phase, value in times.items() if phase != TOTAL)
                assert abs(covered - times[TOTAL]) < 1.0, (parts, times)


# Whose methods are late, whose time that is, and where the ranks of its tensor group then wait, and all others. What
# the all-to-all returns late is waited for before the all-gather, but not by those that gather elsewhere.
LATE = [
    ("router", "gating", "gate", "wait_metadata", "wait_metadata", None),
    ("router", "gating", "gate", "wait_policy", "wait_policy", CountedSum()),
    ("token_dispatcher", "dispatch_preprocess", "permute", "wait_dispatch", "wait_dispatch", None),
    ("token_dispatcher", "token_dispatch", "dispatch", "wait_dispatch", "wait_combine", None),
    ("token_dispatcher", "gather_rows", "dispatch", "wait_combine", "wait_combine", None),
    ("experts", "forward", "experts", "wait_combine", "wait_combine", None),
]


@law
@needs_ranks(2, 4)
def a_slow_rank_shows_as_waiting_where_slices_meet(lab: Lab) -> None:
    """Also what is late between the all-to-all and the all-gather: no transfer absorbs it."""
    ep_size, num_slices = SHAPES[lab.ranks.world_size][0]
    violations = []  # Raised at the end: a rank that leaves early would hang the others.
    slow = lab.ranks.world_size - 1
    is_near = lab.ranks.rank // num_slices == slow // num_slices
    with cut(lab, ep_size, num_slices) as group:
        meet = Rendezvous(group, lab.ranks.device)
        for parts, late in ((ALL_TO_ALL[0], LATE), (ALL_TO_ALL[1], LATE[3:])):
            layers = layers_of(lab, parts, num_slices)
            for owner, method, phase, near, far, policy in late:
                wait = near if is_near else far
                layer = layers.native if policy is None else layers.policy
                is_slow = lab.ranks.rank == slow
                run = partial(breakdown, lab, layers, meet, policy)
                passed = passing_where_late(lab.ranks.device, getattr(layer, owner), method, run, is_slow=is_slow)
                if passed != all_in(phase if is_slow else wait):
                    violations.append(f"{parts.permute}: rank {slow} late in {method}: {passed}")
    assert not violations, violations


@law
@needs_ranks(4)
def before_a_transfer_only_its_own_ranks_are_waited_for(lab: Lab) -> None:
    """Sums that are late hold up their column of ranks alone: the all-to-all back is the column's."""
    with cut(lab, 2, 2) as group:
        layers, meet = layers_of(lab, ALL_TO_ALL[0], 2), Rendezvous(group, lab.ranks.device)
        dispatcher, run = layers.native.token_dispatcher, partial(breakdown, lab, layers, meet, None)
        passed = passing_where_late(lab.ranks.device, dispatcher, "sum_slices", run, is_slow=lab.ranks.rank == 3)
        where = {1: "wait_combine", 3: "combine"}.get(lab.ranks.rank)
        assert passed == (all_in(where) if where else {}), passed
