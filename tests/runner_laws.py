"""What must hold of a layer whoever runs its ranks: a process for each, or one for all (``virtual_laws.Lab``)."""

from __future__ import annotations

from unittest import mock

from laws import law
from layer_laws import BATCH_WIDE, LITE, PERMUTED, POLICIES, SOME, Lab
from torch import Tensor

from moe_ep_bench.layer.megatron import TopKRouter


@law(1, 2, 4)
def every_policy_equals_the_dense_reference(lab: Lab) -> None:
    lab.check("sigmoid", [None, *POLICIES, *BATCH_WIDE])


@law()
def layers_with_shared_experts_and_with_few_experts_equal_the_dense_reference(lab: Lab) -> None:
    for name in (LITE, "mixtral-8x7b"):
        lab.check(name, SOME)


@law()
def every_permutation_equals_the_dense_reference(lab: Lab) -> None:
    for layer_backend in PERMUTED:
        lab.check("four-experts", SOME[:4], 37, layer_backend)


@law()
def a_rank_without_tokens_and_a_batch_smaller_than_the_experts_work(lab: Lab) -> None:
    own = TopKRouter.routing

    def of_some(self: TopKRouter, logits: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        assert logits.numel(), "Transformer Engine's fused top-k takes no empty batch"
        return own(self, logits, *others)

    with mock.patch.object(TopKRouter, "routing", of_some):
        for num_tokens, specs in ((0, SOME[:2]), (3, SOME)):
            for layer_backend in PERMUTED:
                lab.check(LITE, specs, num_tokens, layer_backend, on_last=True)
