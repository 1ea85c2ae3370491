"""What must hold of a layer whoever runs its ranks: a process for each, or one process in turn for all."""

from __future__ import annotations

from typing import Protocol

from laws import law
from layer_laws import BATCH_WIDE, LITE, PERMUTED, POLICIES, SOME, Spec

from moe_ep_bench.layer.backend import DEFAULT_BACKEND, LayerBackend


class Runner(Protocol):
    """A ``Lab`` that holds the outputs of all its ranks against the dense reference."""

    def check(
        self,
        name: str,
        specs: list[Spec],
        num_tokens: int = 61,
        layer_backend: LayerBackend = DEFAULT_BACKEND,
        *,
        on_last: bool = False,
    ) -> None:
        """Raise AssertionError where an output of a model's layer, routed by one of these, is not the reference's.

        Args:
            on_last: all tokens are the last rank's; else ranks have uneven shares of them.
        """


@law(1, 2, 4)
def every_policy_equals_the_dense_reference(runner: Runner) -> None:
    runner.check("sigmoid", [None, *POLICIES, *BATCH_WIDE])


@law()
def layers_with_shared_experts_and_with_few_experts_equal_the_dense_reference(runner: Runner) -> None:
    for name in (LITE, "mixtral-8x7b"):
        runner.check(name, SOME)


@law()
def every_permutation_equals_the_dense_reference(runner: Runner) -> None:
    for layer_backend in PERMUTED:
        runner.check("four-experts", SOME[:4], 37, layer_backend)


@law()
def a_rank_without_tokens_and_a_batch_smaller_than_the_experts_work(runner: Runner) -> None:
    for num_tokens, specs in ((0, SOME[:2]), (3, SOME)):
        for layer_backend in PERMUTED:
            runner.check(LITE, specs, num_tokens, layer_backend, on_last=True)
