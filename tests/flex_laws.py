"""Laws of layers behind Megatron-Core's flex dispatcher, with a stand-in for DeepEP's kernels."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from laws import law
from layer_laws import BATCH_WIDE, LITE, POLICIES, SOME, TOPK, Lab, policy_of
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
        hidden_ND, index_NK, weight_NK = (torch.cat(parts) for parts in zip(*sent, strict=True))
        mine_NK = (index_NK >= 0) & (index_NK // num_local == rank)
        comes_N = mine_NK.any(1)
        self.copies += int(comes_N.sum())
        local_NK = torch.where(mine_NK, index_NK - rank * num_local, -1)[comes_N]
        counts_L = torch.bincount(local_NK[local_NK >= 0], minlength=num_local)
        handle = comes_N, [len(one[0]) for one in sent]
        return hidden_ND[comes_N], local_NK, torch.where(mine_NK, weight_NK, 0)[comes_N], counts_L, handle

    def combine(self, rows_ND: Tensor, group: Any, handle: Any, **_: Any) -> tuple[Tensor, None]:
        comes_N, lengths = handle
        all_TD = rows_ND.new_zeros(len(comes_N), rows_ND.shape[1])
        all_TD[comes_N] = rows_ND
        total_TD = torch.stack(self.gather(all_TD)).sum(0)
        return total_TD.split(lengths)[dist.get_rank(self._group)], None


def routed(
    lab: Lab, name: str, spec: dict | None, expected: DenseReference, *, width: int | None = None
) -> tuple[float, int]:
    """The output's worst error under a policy, and the copies that came to this rank; ``width`` in place of its own."""
    policy, stand_in = policy_of(spec), StandIn(lab.ranks.side_group)
    with (
        mock.patch.object(token_dispatcher, "fused_dispatch", stand_in.dispatch),
        mock.patch.object(token_dispatcher, "fused_combine", stand_in.combine),
        mock.patch.object(token_dispatcher, "set_deepep_num_sms"),
    ):
        layers = lab.layers(name, parts=FLEX)
        if policy is not None:
            most = policy.most_experts(lab.model(name).num_experts, lab.context(layers))
            layers.policy.token_dispatcher.most_experts = most if width is None else width
        output_TD, routing = lab.route(layers, policy, *lab.tokens(name))
    return expected.worst_error(output_TD, routing.weights_TE), stand_in.copies


@law(2, 4, on_one=False)
def policies_behind_flex_equal_the_dense_reference(lab: Lab) -> None:
    every = [*POLICIES, *BATCH_WIDE] if lab.ranks.world_size == 2 else []
    for name, specs in ((LITE, [None, *every]), ("sigmoid", SOME)):
        expected = lab.reference(name, lab.tokens(name)[0])
        for spec in specs:
            assert routed(lab, name, spec, expected)[0] <= TOLERANCE[torch.float32], f"{name} {spec}"


@law(on_one=False)
def a_table_of_k_experts_would_lose_what_expansion_adds(lab: Lab) -> None:
    expanded = {"name": "expanded_drop", "capacity_factor": 8, "scope": "global", "num_candidates": 4}
    error, _ = routed(lab, LITE, expanded, lab.reference(LITE, lab.tokens()[0]), width=lab.model().top_k)
    worst = max(lab.ranks.told(error))
    assert float(worst) > 10 * TOLERANCE[torch.float32], "the law above shows nothing"


@law(on_one=False)
def a_token_travels_to_a_rank_once(lab: Lab) -> None:
    model = lab.model()
    _, copies = routed(lab, LITE, TOPK, lab.reference(LITE, lab.tokens()[0]))
    context = RoutingContext(top_k=model.top_k, normalize=model.normalize)
    whole = make_policy(TOPK).route(lab.all_scores(model, 61), context)
    wanted_TR = whole.map_TE.unflatten(1, (lab.ranks.world_size, -1)).any(2)
    assert copies == int(wanted_TR[:, lab.ranks.rank].sum())
