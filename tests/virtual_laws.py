"""Laws of virtual ranks: layers are built for a process group of one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from laws import law
from layer_laws import FOUR_EXPERTS, SEED, Spec, assert_right, model_of, policy_of, skewed_scores, uneven

from moe_ep_bench.bench.emulated_ranks import modelled_time
from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import VIRTUAL
from moe_ep_bench.bench.traffic import Traffic, route_layer
from moe_ep_bench.bench.virtual_ranks import VirtualRanks
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.layer.backend import DEFAULT_BACKEND, LayerBackend
from moe_ep_bench.layer.experts import DenseReference, seeded_generator
from moe_ep_bench.layer.host import HostStream
from moe_ep_bench.layer.megatron import expert_parallel_groups
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.layer.virtual import Announced, VirtualStack
from moe_ep_bench.models import ModelSpec, logits_from_scores
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.runtime.ranks import Ranks
from moe_ep_bench.timing.protocol import BREAKDOWN, Step

H20 = Device.named("h20")


class OnVirtualRanks:
    """A layer or a model on virtual ranks, with skewed scores of its own for every MoE layer."""

    def __init__(self, lab: Lab, model: ModelSpec, build: Callable[..., Stack], sizes: Sequence[int]) -> None:
        """``sizes``: tokens of each rank."""
        self.device, self.model, self.sizes = lab.device, model, sizes
        self.virtual = VirtualStack(build, len(sizes))
        self.stack = self.virtual.stack
        self.scores = {
            layer: skewed_scores(model, sum(sizes), seed=layer or 7).to(lab.device).split(sizes)
            for layer in self.stack.forms
        }
        self.policies: dict[int | None, Policy | None] = {}

    def context(self, layer: int | None, rank: int) -> RoutingContext:
        return replace(
            self.stack.forms[layer].policy.router.context,
            rank=rank,
            generator=seeded_generator(self.device, 5, rank, layer or 0),
            request_id_T=torch.arange(self.sizes[rank], device=self.device) // 5 + 1000 * rank,
        )

    def announce(
        self, spec: dict | None, policy_layers: Sequence[int] | None = None
    ) -> dict[int | None, list[Routing]]:
        """Work out all ranks' routing of every layer, and let the exchange answer with it."""
        forms, ranks = self.stack.forms, range(len(self.sizes))
        taken = forms.keys() if policy_layers is None else policy_layers
        self.policies = {layer: policy_of(spec) if layer in taken else None for layer in forms}
        self.stack.select_forms([layer for layer, policy in self.policies.items() if policy is not None])
        routings, announced = {}, {}
        for layer, policy in self.policies.items():
            rule, scores = policy or make_policy({"name": "topk"}), self.scores[layer]
            stats = [rule.batch_stats(scores[rank], self.context(layer, rank)) for rank in ranks]
            total_SE = None if stats[0] is None else torch.stack(stats).sum(0)
            routings[layer] = [rule.route(scores[rank], self.context(layer, rank), total_SE) for rank in ranks]
            announced[layer] = Announced(torch.stack([one.map_TE.sum(0) for one in routings[layer]]), total_SE)
        self.virtual.announced = announced
        return routings

    def prepare(self, rank: int) -> None:
        for layer, moe in self.stack.moe_layers.items():
            moe.router.replay_TE = logits_from_scores(self.scores[layer][rank], self.model.score_function)
            if self.policies[layer] is not None:
                moe.router.policy, moe.router.context = self.policies[layer], self.context(layer, rank)


class Layer(OnVirtualRanks):
    """Shares of seeded tokens."""

    def __init__(self, lab: Lab, model: ModelSpec, sizes: Sequence[int], layer_backend: LayerBackend) -> None:
        build = partial(Stack, model, torch.float32, lab.device, seed=SEED, layer_backend=layer_backend)
        super().__init__(lab, model, build, sizes)
        hidden_TD = torch.randn(sum(sizes), model.hidden_size, generator=torch.Generator().manual_seed(8))
        self.hidden = hidden_TD.to(lab.device).split(sizes)
        self.references = [DenseReference(model, hidden_TD, SEED) for hidden_TD in self.hidden]

    def check(self, spec: Spec, what: object) -> None:
        """Hold all ranks' outputs against the reference."""
        routings = self.announce(spec)[None]
        outputs = self.virtual.side_by_side([hidden_TD.unsqueeze(1) for hidden_TD in self.hidden], self.prepare)
        for reference, output_T1D, routing in zip(self.references, outputs, routings, strict=True):
            assert_right(reference, output_T1D[:, 0], routing, what)


class Lab:
    """Virtual ranks, four or fewer, in a process group of one."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.device, self.groups = ranks, ranks.device, expert_parallel_groups(1, 60)

    def check(
        self,
        name: str,
        specs: Sequence[Spec],
        num_tokens: int = 61,
        layer_backend: LayerBackend = DEFAULT_BACKEND,
        *,
        on_last: bool = False,
    ) -> None:
        """As real ranks do (``layer_laws.Lab``)."""
        for num_ranks in (2, 4) if name == FOUR_EXPERTS.name else (4,):
            sizes = [share.stop - share.start for share in uneven(num_tokens, num_ranks)]
            sizes = [0] * (num_ranks - 1) + [num_tokens] if on_last else sizes
            layer = Layer(self, model_of(name), sizes, layer_backend)
            for spec in specs:
                layer.check(spec, f"{name} {layer_backend} {num_ranks} ranks, {num_tokens} tokens, {spec}")


CONFIG = """
model: {preset: deepseek-v2-lite, scale: 0.03125}
workload: {kind: synthetic, peak_load: 4, tokens_per_rank: 53, num_batches: 1, sequence_length: 7}
layer: {ep_size: 4, dtype: float32}
policies: [{name: token_drop, capacity_factor: 1.0}, {name: lynx, num_dropped: 8}]
emulate: {links: h100-nvlink4}
"""


@law()
def experts_compute_what_was_worked_out_and_runs_are_cut_as_modelled_ones(lab: Lab) -> None:
    for num_ranks in (4, 1):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.yaml"
            config.write_text(CONFIG)
            (comparison,) = plan(config, [f"layer.ep_size={num_ranks}"], VIRTUAL, on_cpu=True)
        job = mock.Mock(spec=Job, ranks=lab.ranks)
        runner = VirtualRanks(job, comparison, comparison.cases[:4])
        layer = runner.stack.forms[None].native
        for running in runner.cases:
            case = running.spec
            (of_layer,) = route_layer(runner.router, [case], None, 0)
            traffic = runner.traffic[case.case_id] = Traffic(0, {None: of_layer})
            for rank in range(0, num_ranks, 3):
                seen: list[torch.Tensor] = []
                waits: list[object] = []
                hook = layer.experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1].cpu()))
                with mock.patch.object(HostStream, "synchronize", lambda event, waits=waits: waits.append(event)):
                    took = runner.time(running, Step(0, 0, BREAKDOWN, rank))
                hook.remove()
                assert waits, f"{case.label}: the host paces no layer in which it waits for its device"
                assert [counts_L.tolist() for counts_L in seen] == [of_layer.received_RL[rank].tolist()], case.label
                modelled = modelled_time(replace(comparison, device=H20), case, traffic)
                assert took.meetings == modelled.meetings, case.label
                assert [list(leg) for leg in took.legs] == [list(leg) for leg in modelled.legs], case.label
                if num_ranks > 1:
                    runner.traffic[case.case_id] = Traffic(0, {None: replace(of_layer, rows_R=of_layer.rows_R[::-1])})
                    with pytest.raises(RuntimeError, match="sends other counts"):
                        runner.time(running, Step(0, 0, BREAKDOWN, rank))
                    runner.traffic[case.case_id] = traffic
