"""Laws of a whole model's decode steps that are kept as graphs; tapes stand in for CUDA's (``tape_graphs``)."""

from __future__ import annotations

from unittest import mock

import torch
from graph_laws import BY_MAP, TopKOnDevice, capturable
from laws import law
from layer_laws import LITE
from tape_graphs import Operations, TapeClock, TapeGraph
from torch import Tensor
from transformer_laws import SEED, Lab, replayed

from moe_ep_bench.layer.graphs import CapturedRun
from moe_ep_bench.layer.passes import Decode, KeyValueCache
from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.policies import Policy
from moe_ep_bench.schema import TOTAL, UNACCOUNTED, layer_and_phase, phases_in_depth
from moe_ep_bench.timing.timer import PhaseRecorder

REQUESTS = 6


def decoding(lab: Lab, name: str, policy: Policy | None) -> tuple[Stack, Decode, Tensor]:
    """A model with skewed scores in every layer, a step of some requests, and their ids [B]."""
    model, built = lab.model(name), lab.build(name, BY_MAP)
    replayed(lab, built, model, REQUESTS)
    if policy is not None:
        for forms in built.forms.values():
            forms.policy.router.policy = policy
        built.take(built.forms)
    cache = KeyValueCache(REQUESTS, 8)
    cache.fill_(built.gpt, lab.ranks.device, SEED)
    ids_B = lab.ids(model, REQUESTS)
    return built, Decode(ids_B, cache), ids_B


def captured(lab: Lab, built: Stack, step: Decode, *, by_phase: bool) -> CapturedRun:
    meet = Rendezvous(lab.groups.ep, lab.ranks.device)
    return CapturedRun(built, step, TapeGraph(), TapeClock(), meet, by_phase=by_phase)


@law()
def a_captured_pass_computes_again_what_lies_in_its_tensors(lab: Lab) -> None:
    for name, policies in ((LITE, (None, TopKOnDevice())), ("olmoe-1b-7b", (None,))):
        for policy in policies:
            built, step, ids_B = decoding(lab, name, policy)
            with capturable():
                eager_BV = step(built.gpt)
                run = captured(lab, built, step, by_phase=False)
                run.replay()
                assert run.output is not None
                assert torch.equal(run.output, eager_BV), f"{name} {policy}: captured"
                ids_B.copy_(ids_B.flip(0))
                other_BV = step(built.gpt)
                run.output.fill_(torch.nan)
                run.replay()
                assert torch.equal(run.output, other_BV), f"{name} {policy}: replayed"
                assert not torch.equal(other_BV, eager_BV)
                # Later than another pass through the same collectives and cache.
                run.replay()
                assert torch.equal(run.output, other_BV), f"{name} {policy}: replayed again"
            maps = {layer: map_TE for layer, (_, map_TE) in run.routing.items()}
            assert maps.keys() == built.forms.keys()
            assert all(int(map_TE.sum()) == REQUESTS * lab.model(name).top_k for map_TE in maps.values())


@law(1, 2)
def a_pass_is_one_graph_with_its_collectives_and_a_replay_issues_nothing_else(lab: Lab) -> None:
    built, step, _ = decoding(lab, LITE, TopKOnDevice())
    with capturable():
        step(built.gpt)
        with Operations() as eager:
            step(built.gpt)
        meet = Rendezvous(lab.groups.ep, lab.ranks.device)
        graph = TapeGraph()
        run = CapturedRun(built, step, graph, TapeClock(), meet, by_phase=False)
    # The graph holds nothing that the eager run does not issue: gloo issues copies of its own, a tape notes views.
    held, issued = [name for name in graph.operations if name != "aten::detach"], iter(eager.names)
    assert all(name in issued for name in held), "something was copied"
    # Each MoE layer gathers tokens, weights and map, and scatters sums.
    collectives = [name for name in held if name.startswith("c10d::")]
    assert len(collectives) == (0 if lab.ranks.world_size == 1 else 4 * len(built.forms))
    with mock.patch.object(TapeGraph, "replay", autospec=True) as played, Operations() as beside:
        run.replay()
    assert played.call_args_list == [mock.call(graph)]
    assert beside.names == []


@law()
def phases_of_a_captured_pass_are_those_of_its_replay(lab: Lab) -> None:
    built, step, _ = decoding(lab, LITE, TopKOnDevice())
    before = [set(vars(module)) for module in built.gpt.modules()]
    with capturable():
        step(built.gpt)
        run = captured(lab, built, step, by_phase=True)
        assert [set(vars(module)) for module in built.gpt.modules()] == before, "something is left on the model"
        recorder = PhaseRecorder(TapeClock())
        for _ in range(2):
            recorder.begin()
            run.replay(recorder)
            recorder.end()
            times = recorder.times_us()
            total, unaccounted = times.pop(TOTAL), times.pop(UNACCOUNTED)
            assert set(times) <= set(phases_in_depth(len(built.gpt.decoder.layers), built.forms))
            assert all(value >= 0 for value in times.values()), times
            assert abs(sum(times.values()) + unaccounted - total) < 1, times
            moe = {phase for layer, phase in map(layer_and_phase, times) if layer in built.forms}
            assert {"attention", "rest", "gate", "policy", "experts", "shared", "combine", "moe_rest"} <= moe
            assert ("wait_dispatch" in moe) == (lab.ranks.world_size > 1)
            assert {phase for layer, phase in map(layer_and_phase, times) if layer is None} == {
                "embedding",
                "rest",
                "output",
            }
