"""Laws of whole models on virtual ranks."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from laws import law
from torch import Tensor
from virtual_laws import SEED, Lab, OnVirtualRanks

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.phases import PassWork, RankWork, pass_segments
from moe_ep_bench.cost_model.timeline import Chain, Leg, compose, legs_of, phase_of_meeting, side_by_side
from moe_ep_bench.layer.passes import Decode, KeyValueCache, Pass, Prefill
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.models import load_model
from moe_ep_bench.policies import Routing
from moe_ep_bench.schema import TOTAL, UNACCOUNTED, layer_and_phase, phases_in_depth
from moe_ep_bench.timing.timer import PhaseRecorder, clock_for

CONTEXT = 8
DROP, LYNX = {"name": "token_drop", "capacity_factor": 0.5}, {"name": "lynx", "num_dropped": 2}
# Prompts of each rank, or requests that decode.
LENGTHS = {4: ((7, 3), (5,), (4, 4, 2), (9,)), 2: ((7, 3), (5,))}


class Model(OnVirtualRanks):
    """A model on virtual ranks."""

    def __init__(self, lab: Lab, name: str, num_ranks: int = 2, *, decodes: bool = False) -> None:
        model = load_model(name).scaled(1 / 32).model_copy(update={"vocab_size": 256})
        self.num_layers, self.lengths = model.first_dense_layers + 2, LENGTHS[num_ranks]
        sizes = {"num_layers": self.num_layers, "max_length": 64}
        self.build = partial(Stack, model, torch.float32, lab.device, seed=SEED, **sizes)
        super().__init__(lab, model, self.build, [sum(lengths) for lengths in self.lengths])
        self.cache = self.virtual.new_cache(max(self.sizes), CONTEXT) if decodes else None
        generator = torch.Generator().manual_seed(7)
        self.ids = [torch.randint(256, (size,), generator=generator).to(lab.device) for size in self.sizes]

    def batch(self, rank: int, cache: KeyValueCache | None = None) -> Pass:
        if self.cache is not None:
            return Decode(self.ids[rank], cache or self.cache)
        return Prefill(self.ids[rank], self.lengths[rank])

    def run(self, rank: int) -> Tensor:
        self.virtual.become(rank)
        self.prepare(rank)
        with self.virtual.connected():
            return self.stack.run(self.batch(rank))

    def work(self, rank: int) -> PassWork:
        """What a modelled rank is told of the pass that this one runs."""
        per_rank = self.model.num_experts // len(self.sizes)
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        layers = {
            layer: RankWork(self.sizes[rank], int(one.counts_RP[rank].sum()), one.counts_RP[:, mine].sum(0).numpy())
            for layer, one in self.virtual.announced.items()
        }
        return PassWork(self.lengths[rank], 0 if self.cache is None else CONTEXT, layers)


def expected_logits(model: Model, one: Stack, routings: dict[int, list[Routing]], rank: int, cache) -> Tensor:
    """Of a rank's tokens alone, on all experts, with the routing that was worked out for them."""
    one.select_forms(one.forms.keys())
    with contextlib.ExitStack() as given:
        for layer, moe in one.moe_layers.items():
            routing = routings[layer][rank]
            instead = mock.patch.object(moe.router, "routing", lambda *_, r=routing, **__: (r.weights_TE, r.map_TE))
            given.enter_context(instead)
        return model.batch(rank, cache)(one.gpt)


@law()
def ranks_that_exchange_rows_give_the_logits_of_one_rank(lab: Lab) -> None:
    """With latent attention, a dense layer and shared experts; and with grouped queries, where requests decode."""
    for name, num_ranks, decodes, specs in (
        ("deepseek-v2-lite", 4, False, (None, LYNX)),
        ("mixtral-8x7b", 2, True, (DROP,)),
    ):
        model = Model(lab, name, num_ranks, decodes=decodes)
        one, cache = model.build(groups=lab.groups), None
        if decodes:
            cache = KeyValueCache(max(model.sizes), CONTEXT)
            cache.fill_(one.gpt, lab.device, SEED)
        for spec in specs:
            routings = model.announce(spec)
            found = model.virtual.side_by_side([model.batch(rank) for rank in range(num_ranks)], model.prepare)
            for rank, logits_SV in enumerate(found):
                expected_SV = expected_logits(model, one, routings, rank, cache)
                assert expected_SV.std() > 0.1
                torch.testing.assert_close(
                    logits_SV, expected_SV, rtol=1e-3, atol=1e-4, msg=lambda m, at=(name, spec, rank): f"{at}: {m}"
                )


def timed_legs(model: Model, recorder: PhaseRecorder, rank: int) -> tuple[list[Leg], list[str]]:
    """A rank's pass, cut at its meetings; what was cut away is what was not sent, and where nobody was waited for."""
    with model.stack.instrumented(recorder, lambda: None):
        recorder.begin()
        model.run(rank)
        recorder.end()
    legs, meetings = legs_of(recorder.segments_us())
    times = recorder.times_us()
    cut = {phase for phase in times if layer_and_phase(phase)[1] in ("dispatch", "combine") or phase in meetings}
    kept_us = times[TOTAL] - sum(times[phase] for phase in cut)
    assert abs(sum(sum(leg.values()) for leg in legs) - kept_us) < 1.0
    return legs, meetings


@law()
def a_pass_is_cut_at_the_meetings_of_all_layers_in_order(lab: Lab) -> None:
    recorder = PhaseRecorder(clock_for(lab.device))
    for name, decodes, spec in (("deepseek-v2-lite", True, None), ("olmoe-1b-7b", False, LYNX)):
        model = Model(lab, name, decodes=decodes)
        model.announce(spec)
        (first, meetings), (second, others) = (timed_legs(model, recorder, rank) for rank in range(2))
        own = [*(["wait_policy"] if spec else []), "wait_metadata", "wait_dispatch", "wait_combine"]
        assert meetings == others == [(layer, wait) for layer in sorted(model.scores) for wait in own]
        assert len(first) == len(second) == len(meetings) + 1
        assert "embedding" in first[0]
        assert "output" in first[-1]
        segments = pass_segments(
            Device.load("h100-sxm"), model.model, model.num_layers, model.work(0), by_policy=spec is not None,
            batch_wide=spec is not None, dtype="float32",
        )  # fmt: skip
        modelled, modelled_meetings = legs_of(segments)
        assert modelled_meetings == meetings
        assert [leg.keys() | {UNACCOUNTED} for leg in modelled] == [leg.keys() | {UNACCOUNTED} for leg in first]
        link_us = {meeting: np.full(2, 50.0) for meeting in meetings}
        times = compose([Chain(side_by_side([first, second]), meetings, link_us)])
        assert times.keys() - {TOTAL, UNACCOUNTED} <= set(phases_in_depth(model.num_layers, model.scores))
        assert sum(us for phase, us in times.items() if phase != TOTAL) == pytest.approx(times[TOTAL])
        assert all((times[phase_of_meeting(meeting)] >= 50).all() for meeting in meetings)
