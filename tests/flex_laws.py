"""Laws of layers behind Megatron-Core's flex dispatcher, with a stand-in for DeepEP's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from layer_laws import BATCH_WIDE, POLICIES, SEED, SOME, Lab, assert_close, law, needs_ranks
from torch import Tensor

from moe_ep_bench.layer.megatron import token_dispatcher
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.policies import RoutingContext, make_policy

FLEX = Parts("grouped", "megatron", "auto", "flex")


class StandIn:
    """A token goes once to every rank that has one of its experts; their sums come back and are added."""

    def __init__(self, side_group: dist.ProcessGroup) -> None:
        self._group = side_group
        self.copies = 0

    def gather(self, value: object) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._group)
        return found

    def dispatch(
        self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, num_experts: int, *_: Any, **__: Any
    ) -> tuple[Any, ...]:
        rank, num_local = dist.get_rank(self._group), num_experts // dist.get_world_size(self._group)
        sent = self.gather((hidden_TD, index_TK, weight_TK))
        index_NK = torch.cat([one[1] for one in sent])
        mine_NK = (index_NK >= 0) & (index_NK // num_local == rank)
        comes_N = mine_NK.any(1)
        self.copies += int(comes_N.sum())
        local_NK = torch.where(mine_NK, index_NK - rank * num_local, -1)[comes_N]
        weight_NK = torch.where(mine_NK, torch.cat([one[2] for one in sent]), 0)[comes_N]
        counts_L = torch.bincount(local_NK[local_NK >= 0], minlength=num_local)
        handle = comes_N, [len(one[0]) for one in sent]
        return torch.cat([one[0] for one in sent])[comes_N], local_NK, weight_NK, counts_L, handle

    def combine(self, rows_ND: Tensor, group: Any, handle: Any, **_: Any) -> tuple[Tensor, None]:
        comes_N, lengths = handle
        all_TD = rows_ND.new_zeros(len(comes_N), rows_ND.shape[1])
        all_TD[comes_N] = rows_ND
        total_TD = torch.stack(self.gather(all_TD)).sum(0)
        return total_TD.split(lengths)[dist.get_rank(self._group)], None


@contextlib.contextmanager
def deep_ep(lab: Lab) -> Iterator[StandIn]:
    stand_in = StandIn(lab.ranks.side_group)
    with (
        mock.patch.object(token_dispatcher, "fused_dispatch", stand_in.dispatch),
        mock.patch.object(token_dispatcher, "fused_combine", stand_in.combine),
        mock.patch.object(token_dispatcher, "set_deepep_num_sms"),
    ):
        yield stand_in


def reference(lab: Lab, name: str) -> DenseReference:
    model = lab.model(name)
    return DenseReference(model, lab.all_hidden(model, 61)[lab.mine(61)], SEED)


def routed(
    lab: Lab, name: str, spec: dict | None, expected: DenseReference, *, width: int | None = None
) -> tuple[float, int]:
    """The output's worst error under a policy, and the copies that came to this rank; ``width`` in place of its own."""
    model, mine = lab.model(name), lab.mine(61)
    hidden_TD, scores_TE = lab.all_hidden(model, 61)[mine], lab.all_scores(model, 61)[mine]
    policy = None if spec is None else make_policy(spec)
    with deep_ep(lab) as stand_in:
        layers = lab.layers(name, parts=FLEX)
        if policy is not None:
            most = policy.most_experts(model.num_experts, lab.context(layers))
            layers.policy.token_dispatcher.most_experts = most if width is None else width
        output_TD, routing = lab.route(layers, policy, hidden_TD, scores_TE)
    return expected.worst_error(output_TD, routing.weights_TE), stand_in.copies


@law
@needs_ranks(2, 4)
def every_policy_behind_flex_equals_the_dense_reference(lab: Lab) -> None:
    for name, specs in (("deepseek-v2-lite", [*POLICIES, *BATCH_WIDE]), ("sigmoid", SOME)):
        expected = reference(lab, name)
        for spec in (None, *specs):
            assert_close(routed(lab, name, spec, expected)[0], TOLERANCE[torch.float32], f"{name} {spec}")


@law
@needs_ranks(2, 4)
def a_table_of_k_experts_would_lose_what_expansion_adds(lab: Lab) -> None:
    expanded = {"name": "expanded_drop", "capacity_factor": 8, "scope": "global", "num_candidates": 4}
    top_k = lab.model("deepseek-v2-lite").top_k
    error, _ = routed(lab, "deepseek-v2-lite", expanded, reference(lab, "deepseek-v2-lite"), width=top_k)
    worst = max(lab.ranks.texts(f"{error:.6f}"), key=float)
    assert float(worst) > 10 * TOLERANCE[torch.float32], "the law above shows nothing"


@law
@needs_ranks(2, 4)
def a_token_travels_to_a_rank_once(lab: Lab) -> None:
    _, copies = routed(lab, "deepseek-v2-lite", {"name": "topk"}, reference(lab, "deepseek-v2-lite"))
    model = lab.model("deepseek-v2-lite")
    context = RoutingContext(top_k=model.top_k, normalize=model.normalize)
    whole = make_policy({"name": "topk"}).route(lab.all_scores(model, 61), context)
    per_rank = model.num_experts // lab.ranks.world_size
    wanted_TR = whole.map_TE.unflatten(1, (lab.ranks.world_size, per_rank)).any(2)
    assert copies == int(wanted_TR[:, lab.ranks.rank].sum())
