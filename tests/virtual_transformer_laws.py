"""Laws of whole models on virtual ranks, in a process of their own: layers are built for a process group of one.

Prints one line per law.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.layer import RankWork
from moe_ep_bench.cost_model.timeline import Leg, compose, legs_of, phase_of_meeting
from moe_ep_bench.cost_model.whole_model import PassWork, modelled_pass
from moe_ep_bench.layer.build import Transformer
from moe_ep_bench.layer.experts import seeded_generator
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import initialize_expert_parallel
from moe_ep_bench.layer.passes import Decode, KeyValueCache, Pass, Prefill
from moe_ep_bench.layer.scores import logits_from_scores, scores_from_logits
from moe_ep_bench.layer.virtual import Announced, VirtualRanks
from moe_ep_bench.models import load_model
from moe_ep_bench.policies import Policy, Routing, make_policy
from moe_ep_bench.runtime.ranks import Ranks, join
from moe_ep_bench.schema import TOTAL, UNACCOUNTED, layer_and_phase, phases_in_depth
from moe_ep_bench.timing.timer import PhaseRecorder, clock_for

SEED, CONTEXT = 3, 8
# Latent attention, a dense layer and shared experts; norms of queries and keys; grouped queries.
DROP, LYNX = {"name": "token_drop", "capacity_factor": 0.5}, {"name": "lynx", "num_dropped": 2}
EXCHANGED = (
    ("deepseek-v2-lite", 4, False, (None, LYNX)),
    ("mixtral-8x7b", 2, True, (DROP,)),
)
# Prompts of each rank, or requests that decode.
LENGTHS = {4: ((7, 3), (5,), (4, 4, 2), (9,)), 2: ((7, 3), (5,))}


class Lab:
    """A model on virtual ranks with skewed scores of its own for every layer, and the same model on one rank."""

    def __init__(self, ranks: Ranks, name: str, num_ranks: int, *, decodes: bool = False) -> None:
        self.device = ranks.device
        self.model = load_model(name).scaled(1 / 32).model_copy(update={"vocab_size": 256})
        self.num_layers = self.model.first_dense_layers + 2
        self.build = partial(
            Transformer, self.model, torch.float32, ranks.device, seed=SEED, num_layers=self.num_layers, max_length=64
        )
        self.virtual = VirtualRanks(self.build, num_ranks)
        self.sizes = [sum(lengths) for lengths in LENGTHS[num_ranks]]
        caches: list[KeyValueCache | None] = [None, None]
        if decodes:
            caches[0] = self.virtual.new_cache(max(self.sizes), CONTEXT)
        self.cache = caches[0]
        generator = torch.Generator().manual_seed(7)
        self.ids = [torch.randint(256, (size,), generator=generator).to(self.device) for size in self.sizes]
        self.scores = {layer: self._scores(layer) for layer in self.virtual.subject.pairs}

    def _scores(self, layer: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(layer)
        logits_TE = torch.randn(sum(self.sizes), self.model.num_experts, generator=generator)
        logits_TE += 1.5 * torch.randn(self.model.num_experts, generator=generator)
        scores_TE = scores_from_logits(logits_TE, self.model.score_function)
        # What arrives at a policy has been logits in between.
        scores_TE = scores_from_logits(
            logits_from_scores(scores_TE, self.model.score_function), self.model.score_function
        )
        return [scores_TE.to(self.device) for scores_TE in scores_TE.split(self.sizes)]

    def run(self, rank: int, cache: KeyValueCache | None = None) -> Pass:
        if self.cache is not None:
            return Decode(self.ids[rank], cache or self.cache)
        return Prefill(self.ids[rank], LENGTHS[len(self.sizes)][rank])

    def context(self, layer: int, rank: int):
        return replace(
            self.virtual.subject.pairs[layer].policy_router.context,
            rank=rank,
            generator=seeded_generator(self.device, 5, rank, layer),
            request_id_T=torch.arange(self.sizes[rank], device=self.device) + 1000 * rank,
        )

    def announce(self, spec: dict | None, policy_layers: tuple[int, ...] | None = None) -> dict[int, list[Routing]]:
        """Work out all ranks' routing of every layer, and let the exchange answer with it."""
        pairs = self.virtual.subject.pairs
        taken = pairs.keys() if policy_layers is None else policy_layers
        self.policies: dict[int, Policy | None] = {
            layer: make_policy(spec) if spec is not None and layer in taken else None for layer in pairs
        }
        self.virtual.subject.take([layer for layer, policy in self.policies.items() if policy is not None])
        routings, announced = {}, {}
        for layer, policy in self.policies.items():
            rule, numbers = policy or make_policy({"name": "topk"}), range(len(self.sizes))
            stats = [rule.batch_stats(self.scores[layer][r], self.context(layer, r)) for r in numbers]
            total = None if stats[0] is None else torch.stack(stats).sum(0)
            routings[layer] = [rule.route(self.scores[layer][r], self.context(layer, r), total) for r in numbers]
            counts_RE = torch.stack([routing.map_TE.sum(0) for routing in routings[layer]])
            announced[layer] = Announced(counts_RE, total)
        self.virtual.announced = announced
        return routings

    def prepare(self, rank: int) -> contextlib.AbstractContextManager[None]:
        for layer, moe in self.virtual.subject.moe_layers.items():
            moe.router.replay_TE = logits_from_scores(self.scores[layer][rank], self.model.score_function)
            if self.policies[layer] is not None:
                moe.router.policy, moe.router.context = self.policies[layer], self.context(layer, rank)
        return contextlib.nullcontext()

    def work(self, rank: int) -> PassWork:
        """What a modelled rank is told of the pass that this one runs."""
        per_rank = self.model.num_experts // len(self.sizes)
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        layers = {
            layer: RankWork(self.sizes[rank], int(one.counts_RP[rank].sum()), one.counts_RP[:, mine].sum(0).numpy())
            for layer, one in self.virtual.announced.items()
        }
        if self.cache is not None:
            return PassWork((), self.sizes[rank], CONTEXT, layers)
        return PassWork(LENGTHS[len(self.sizes)][rank], 0, 0, layers)

    def alone(self, ranks: Ranks) -> Transformer:
        """The same model on one real rank, which has all experts."""
        group = initialize_expert_parallel(1, 60)
        return self.build(ep_group=group)


def expected_logits(lab: Lab, one: Transformer, routings: dict[int, list[Routing]], rank: int, cache) -> Tensor:
    """Of a rank's tokens alone, on all experts, with the routing that was worked out for them."""
    one.take(one.pairs.keys())
    with contextlib.ExitStack() as stack:
        for layer, moe in one.moe_layers.items():
            routing = routings[layer][rank]
            given = mock.patch.object(moe.router, "routing", lambda *_, r=routing, **__: (r.weights_TE, r.map_TE))
            stack.enter_context(given)
        return lab.run(rank, cache)(one.gpt)


def ranks_that_exchange_rows_give_the_logits_of_one_rank(ranks: Ranks) -> None:
    for name, num_ranks, decodes, specs in EXCHANGED:
        lab = Lab(ranks, name, num_ranks, decodes=decodes)
        one, cache = lab.alone(ranks), None
        if decodes:
            cache = KeyValueCache(max(lab.sizes), CONTEXT)
            cache.fill_(one.gpt, ranks.device, SEED)
        for spec in specs:
            routings = lab.announce(spec)
            found = lab.virtual.side_by_side([lab.run(rank) for rank in range(num_ranks)], lab.prepare)
            for rank, logits_SV in enumerate(found):
                expected_SV = expected_logits(lab, one, routings, rank, cache)
                assert expected_SV.std() > 0.1
                torch.testing.assert_close(
                    logits_SV, expected_SV, rtol=1e-3, atol=1e-4, msg=lambda m, at=(name, spec, rank): f"{at}: {m}"
                )


def timed_legs(lab: Lab, recorder: PhaseRecorder, rank: int) -> tuple[list[Leg], list[str]]:
    """A rank's pass, cut at its meetings; what was cut away is what was not sent, and where nobody was waited for."""
    lab.virtual.become(rank)
    lab.prepare(rank)
    with lab.virtual.connected(), lab.virtual.subject.instrumented(recorder, lambda: None):
        recorder.begin()
        lab.virtual.subject.run(lab.run(rank))
        recorder.end()
    legs, meetings = legs_of(recorder.segments_us())
    times = recorder.times_us()
    cut = {phase for phase in times if layer_and_phase(phase)[1] in ("dispatch", "combine") or phase in meetings}
    kept_us = times[TOTAL] - sum(times[phase] for phase in cut)
    assert abs(sum(sum(leg.values()) for leg in legs) - kept_us) < 1.0
    return legs, meetings


def a_pass_is_cut_at_the_meetings_of_all_layers_in_order(ranks: Ranks) -> None:
    recorder = PhaseRecorder(clock_for(ranks.device))
    for name, decodes, spec in (("deepseek-v2-lite", True, None), ("olmoe-1b-7b", False, LYNX)):
        lab = Lab(ranks, name, 2, decodes=decodes)
        lab.announce(spec)
        (first, meetings), (second, others) = (timed_legs(lab, recorder, rank) for rank in range(2))
        own = [*(["wait_policy"] if spec else []), "wait_metadata", "wait_dispatch", "wait_combine"]
        assert meetings == others == [(layer, wait) for layer in sorted(lab.scores) for wait in own]
        assert len(first) == len(second) == len(meetings) + 1
        assert "embedding" in first[0]
        assert "output" in first[-1]
        modelled, modelled_meetings = modelled_pass(
            Device.load("h100-sxm"), lab.model, lab.num_layers, lab.work(0), by_policy=spec is not None,
            batch_wide=spec is not None, bytes_per_value=4,
        )  # fmt: skip
        assert modelled_meetings == meetings
        assert [leg.keys() | {UNACCOUNTED} for leg in modelled] == [leg.keys() | {UNACCOUNTED} for leg in first]
        link_us = {meeting: np.full(2, 50.0) for meeting in meetings}
        for times in compose([first, second], meetings, link_us):
            assert times.keys() - {TOTAL, UNACCOUNTED} <= set(phases_in_depth(lab.num_layers, lab.scores))
            assert sum(us for phase, us in times.items() if phase != TOTAL) == pytest.approx(times[TOTAL])
            assert all(times[phase_of_meeting(meeting)] >= 50 for meeting in meetings)


def topk_sends_what_native_sends_and_a_layers_policy_changes_that_layer_alone(ranks: Ranks) -> None:
    lab = Lab(ranks, "deepseek-v2-lite", 2)
    lab.announce(None)
    native = {layer: announced.counts_RP for layer, announced in lab.virtual.announced.items()}
    first, second = sorted(native)
    assert not torch.equal(native[first], native[second]), "layers are routed alike"
    for spec, taken, changed in (
        ({"name": "topk"}, (first, second), ()),
        (DROP, (first,), (first,)),
        (DROP, (second,), (second,)),
    ):
        lab.announce(spec, taken)
        for layer, announced in lab.virtual.announced.items():
            assert torch.equal(announced.counts_RP, native[layer]) == (layer not in changed), (spec, layer)
        lab.virtual.exchange.checks_counts = True  # Every layer's own router says the same, or it is an error.
        for rank in range(2):
            lab.virtual.become(rank)
            lab.prepare(rank)
            with lab.virtual.connected():
                lab.virtual.subject.run(lab.run(rank))


def counts_of_another_layer_are_noticed(ranks: Ranks) -> None:
    lab = Lab(ranks, "olmoe-1b-7b", 2)
    lab.announce(None)
    first, second = sorted(lab.scores)
    announced = lab.virtual.announced
    lab.virtual.announced = {first: announced[first], second: announced[first]}
    lab.virtual.become(0)
    lab.prepare(0)
    with lab.virtual.connected(), pytest.raises(RuntimeError, match="sends other counts"):
        lab.virtual.subject.run(lab.run(0))


LAWS = (
    ranks_that_exchange_rows_give_the_logits_of_one_rank,
    a_pass_is_cut_at_the_meetings_of_all_layers_in_order,
    topk_sends_what_native_sends_and_a_layers_policy_changes_that_layer_alone,
    counts_of_another_layer_are_noticed,
)


def main() -> int:
    ranks = join(60)
    failed = 0
    with device_scope(), torch.inference_mode():
        initialize_expert_parallel(1, 60)
        for law in LAWS:
            try:
                law(ranks)
                print(f"{law.__name__}: ok", flush=True)
            except Exception:
                failed += 1
                print(f"{law.__name__}: {traceback.format_exc()[-2500:]}", flush=True)
    ranks.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
