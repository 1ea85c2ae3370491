"""Laws of virtual ranks, in a process of their own: layers are built for a process group of one.

Prints one line per law.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from layer_laws import ALL_PARTS, BATCH_WIDE, FOUR_EXPERTS, POLICIES, SIGMOID_MODEL, SOME
from torch import Tensor

from moe_ep_bench.bench.plan import VIRTUAL, plan
from moe_ep_bench.bench.rank_timers import MeasuredRanks
from moe_ep_bench.bench.traffic import CaseRouter, RankBatches, Shares, Traffic, traffic_of
from moe_ep_bench.layer.build import SingleLayer
from moe_ep_bench.layer.expert_placement import ExpertPlacement, Split
from moe_ep_bench.layer.experts import seeded_generator
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import initialize_expert_parallel
from moe_ep_bench.layer.parts import DEFAULT_PARTS, Parts
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.layer.scores import logits_from_scores, scores_from_logits
from moe_ep_bench.layer.virtual import Announced, VirtualRanks, with_slots
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import balance, make_placement, replicate
from moe_ep_bench.policies import Policy, Routing, make_policy
from moe_ep_bench.runtime.ranks import Ranks, join

SEED = 3


class Lab:
    """Virtual ranks with uneven shares of seeded tokens."""

    def __init__(
        self,
        ranks: Ranks,
        model: ModelSpec,
        num_ranks: int,
        num_tokens: int,
        parts: Parts = DEFAULT_PARTS,
        num_slots: int | None = None,
    ) -> None:
        self.model, self.device = model, ranks.device
        built = model if num_slots is None else with_slots(model, num_slots)
        build = partial(SingleLayer, built, torch.float32, ranks.device, seed=SEED, parts=parts)
        self.virtual = VirtualRanks(build, num_ranks)
        self.pair = self.virtual.subject.pairs[None]
        generator = torch.Generator().manual_seed(7)
        logits_TE = torch.randn(num_tokens, model.num_experts, generator=generator)
        logits_TE += 1.5 * torch.randn(model.num_experts, generator=generator)
        scores_TE = scores_from_logits(logits_TE, model.score_function)
        # What arrives at a policy has been logits in between.
        scores_TE = scores_from_logits(logits_from_scores(scores_TE, model.score_function), model.score_function)
        hidden_TD = torch.randn(num_tokens, model.hidden_size, generator=generator)
        sizes = [num_tokens * r * (r + 1) // (num_ranks * (num_ranks + 1)) for r in range(num_ranks + 1)]
        shares = [slice(begin, end) for begin, end in itertools.pairwise(sizes)]
        self.scores = [scores_TE[share].to(ranks.device) for share in shares]
        self.hidden = [hidden_TD[share].to(ranks.device) for share in shares]

    def context(self, rank: int):
        return replace(
            self.pair.policy_router.context,
            rank=rank,
            generator=seeded_generator(self.device, 5, rank),
            request_id_T=torch.arange(len(self.hidden[rank]), device=self.device) // 5 + 1000 * rank,
        )

    def routings(self, policy: Policy | None) -> list[Routing]:
        """What each rank's router chooses, worked out outside the layer, and announced."""
        policy = policy or make_policy({"name": "topk"})
        stats = [policy.batch_stats(self.scores[r], self.context(r)) for r in range(self.virtual.num_ranks)]
        total = None if stats[0] is None else torch.stack(stats).sum(0)
        routings = [policy.route(self.scores[r], self.context(r), total) for r in range(self.virtual.num_ranks)]
        self.announce(routings, total)
        return routings

    def announce(self, routings: list[Routing], stats_SE: Tensor | None = None) -> None:
        counts_RP = torch.stack([routing.map_TE.sum(0) for routing in routings])
        self.virtual.announced = {None: Announced(counts_RP, stats_SE)}

    def prepare(self, policy: Policy | None, rank: int) -> contextlib.AbstractContextManager[None]:
        self.virtual.subject.take(() if policy is None else (None,))
        router = self.virtual.subject.moe_layers[None].router
        router.replay_TE = logits_from_scores(self.scores[rank], self.model.score_function)
        if policy is not None:
            router.policy, router.context = policy, self.context(rank)
        return contextlib.nullcontext()

    def check(self, policy: Policy | None, what: str, slots: ExpertPlacement | None = None) -> None:
        """Hold all ranks' outputs against the reference; layers with ``slots`` are given their routing."""
        routings = self.routings(policy)
        on_slots = routings
        if slots is not None:
            maps = [slots.spread(routing.map_TE, rank) for rank, routing in enumerate(routings)]
            weights = [slots.spread_weights(routing.weights_TE, m) for routing, m in zip(routings, maps, strict=True)]
            on_slots = [Routing(map_TP, weights_TP) for map_TP, weights_TP in zip(maps, weights, strict=True)]
            self.announce(on_slots)
            self.virtual.subject.take(() if policy is None else (None,))

        def prepare(rank: int) -> contextlib.AbstractContextManager[None]:
            return self.prepare(policy, rank) if slots is None else self.virtual.routed({None: on_slots[rank]})

        hidden: list[Tensor] = [hidden_TD.unsqueeze(1) for hidden_TD in self.hidden]
        outputs = self.virtual.side_by_side(hidden, prepare)
        for rank, (output_T1D, routing) in enumerate(zip(outputs, routings, strict=True)):
            reference = DenseReference(self.model, self.hidden[rank], SEED)
            error = reference.worst_error(output_T1D[:, 0], routing.weights_TE)
            assert error <= TOLERANCE[torch.float32], f"{what}, rank {rank}: {error:.3g}"


def every_policy_equals_the_dense_reference(ranks: Ranks) -> None:
    lite = ModelSpec.named("deepseek-v2-lite").scaled(1 / 32)
    for model, specs in ((lite, [None, *POLICIES, *BATCH_WIDE]), (SIGMOID_MODEL, [None, *SOME, BATCH_WIDE[0]])):
        lab = Lab(ranks, model, 4, 61)
        for spec in specs:
            lab.check(None if spec is None else make_policy(spec), f"{model.name} {spec}")


def every_part_equals_the_dense_reference(ranks: Ranks) -> None:
    for parts in ALL_PARTS:
        for num_ranks in (2, 4):  # With 4 ranks each has one expert.
            lab = Lab(ranks, FOUR_EXPERTS, num_ranks, 37, parts)
            for spec in (None, {"name": "token_drop", "capacity_factor": 1.0}):
                lab.check(None if spec is None else make_policy(spec), f"{parts} {num_ranks} {spec}")


def experts_in_slots_equal_the_dense_reference(ranks: Ranks) -> None:
    model = ModelSpec.named("deepseek-v2-lite").scaled(1 / 32)
    load_E = torch.arange(model.num_experts).numpy() ** 2.0
    plan = replicate(load_E, num_slots=model.num_experts + 8, num_ranks=4)
    even = ExpertPlacement.of_replication(plan)
    counts_RE = np.full((4, model.num_experts), 5)
    pairs_P = balance(plan.slot_expert_LP[0], counts_RE.sum(axis=0), 4)
    for slots in (
        ExpertPlacement.of_placement(make_placement("strided", model.num_experts, 4)),
        even,
        replace(even, split=Split.of(even.expert_P, pairs_P, counts_RE)),
    ):
        lab = Lab(ranks, model, 4, 61, num_slots=slots.num_slots)
        lab.virtual.placement = slots
        for spec in (
            None,
            {"name": "token_drop", "capacity_factor": 1.0},
            {"name": "expanded_drop", "capacity_factor": 1.0},
        ):
            lab.check(None if spec is None else make_policy(spec), f"{slots.num_slots} slots {spec}", slots)


def a_rank_without_tokens_takes_part(ranks: Ranks) -> None:
    for num_tokens in (0, 3):
        lab = Lab(ranks, ModelSpec.named("deepseek-v2-lite").scaled(1 / 32), 4, num_tokens)
        assert len(lab.hidden[0]) == 0
        for spec in (None, {"name": "expanded_drop", "capacity_factor": 1.0}):
            lab.check(None if spec is None else make_policy(spec), f"{num_tokens} tokens, {spec}")


def timed_runs_see_the_rows_that_real_ranks_would(ranks: Ranks) -> None:
    lab = Lab(ranks, ModelSpec.named("deepseek-v2-lite").scaled(1 / 32), 8, 97)
    policy = make_policy({"name": "token_drop", "capacity_factor": 1.5})
    routings = lab.routings(policy)
    counts_RE = torch.stack([routing.map_TE.sum(0) for routing in routings])
    virtual = lab.virtual
    seen = []
    hook = lab.pair.policy.experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    with virtual.connected():
        for rank in range(8):
            virtual.become(rank)
            lab.prepare(policy, rank)
            output_T1D = virtual.subject.run(lab.hidden[rank].unsqueeze(1))
            assert output_T1D.shape == (len(lab.hidden[rank]), 1, lab.model.hidden_size)
    hook.remove()
    for rank, (hidden_ND, counts_L, weights_N) in enumerate(seen):
        expected_L = counts_RE[:, rank * 8 : (rank + 1) * 8].sum(0)
        assert torch.equal(counts_L.cpu(), expected_L.cpu()), rank
        assert len(hidden_ND) == len(weights_N) == int(expected_L.sum())


CONFIG = """
name: chunks
model: {preset: deepseek-v2-lite, scale: 0.03125}
workload: {kind: synthetic, peak_load: 4, tokens_per_rank: 53, num_batches: 1, sequence_length: 7}
layer: {ep_size: 4, dtype: float32}
policies: [{name: token_drop, capacity_factor: 1.0}, {name: lynx, num_dropped: 8}]
emulate: {links: h100-nvlink4, replication: [{spare_per_rank: 1}]}
"""


def chunks_and_slots_compute_what_was_worked_out(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        (comparison,) = plan(config, [], VIRTUAL, on_cpu=True)
    plain = ExpertPlacement.contiguous(64, 4)
    spare = ExpertPlacement.of_replication(replicate(torch.arange(64).numpy(), num_slots=68, num_ranks=4))
    batches = RankBatches(comparison.subject, 0)
    for case, slots, num_chunks in itertools.product(comparison.cases[:4], (plain, spare), (1, 3)):
        router = CaseRouter(case, slots, seed=0)
        (of_layer,) = traffic_of(comparison.subject, [router], batches, 0, ranks.device, num_chunks)
        traffic = Traffic(0, {None: of_layer})
        timer = MeasuredRanks(comparison, ranks.device, num_chunks)
        in_one = num_chunks == 1 and slots is plain
        for rank, tokens in enumerate(batches):
            shares = {None: Shares(comparison.subject, tokens, rank, ranks.device).of(case)}
            timer.time(router, traffic, rank, shares)  # builds the layers
            layer = timer._virtual(slots.num_slots).subject.pairs[None].native
            seen: list[Tensor] = []
            hook = layer.experts.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[1].cpu()))
            took = timer.time(router, traffic, rank, shares, first=True)
            hook.remove()
            assert torch.equal(torch.stack(seen), torch.from_numpy(of_layer.received(rank))), (case.label, rank)
            meetings = ["wait_metadata", "wait_dispatch", "wait_combine"]
            assert took.meetings == (["wait_policy"] if case.name == "lynx" else []) + meetings
            assert len(took.legs) == len(took.meetings) + 1
            phases = [set(leg) - {"unaccounted"} for leg in took.legs]
            assert phases[-4] >= {"gate", "policy"} or case.name == "lynx"
            assert phases[-2] >= {"experts"}, (case.label, in_one, phases)


def counts_other_than_announced_are_noticed(ranks: Ranks) -> None:
    lab = Lab(ranks, FOUR_EXPERTS, 2, 37)
    counts_RE = torch.stack([routing.map_TE.sum(0) for routing in lab.routings(None)])
    lab.virtual.announced = {None: Announced(counts_RE.roll(1, dims=1))}
    lab.prepare(None, 0)
    with lab.virtual.connected():
        lab.virtual.exchange.checks_counts = False
        lab.virtual.subject.run(lab.hidden[0].unsqueeze(1))
        lab.virtual.exchange.checks_counts = True
        with pytest.raises(RuntimeError, match="sends other counts"):
            lab.virtual.subject.run(lab.hidden[0].unsqueeze(1))


LAWS = (
    counts_other_than_announced_are_noticed,
    every_policy_equals_the_dense_reference,
    every_part_equals_the_dense_reference,
    experts_in_slots_equal_the_dense_reference,
    chunks_and_slots_compute_what_was_worked_out,
    a_rank_without_tokens_takes_part,
    timed_runs_see_the_rows_that_real_ranks_would,
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
                print(f"{law.__name__}: {traceback.format_exc()[-1500:]}", flush=True)
    ranks.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
