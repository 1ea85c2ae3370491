"""SERE: a batch computes the experts that its tokens want most, which stand in for those alike (arXiv 2602.07616).

A memory-bound decode step takes as long as the experts that the batch activates. Every token's first ``k0`` experts are
*primary* for all; every other one of the batch's top-k is *secondary*, and its tokens go to the primary expert that is
most like it, with the weight that the router gave the secondary one. A secondary expert which is like none stays.

As in the published kernel (JL-Cheng/SERE, ``rerouting_kernel.cu``) an expert moves as a whole, whichever token chose
it, the lower index wins among equals, and weights were normalised before. Where two of a token's experts end up in one,
the kernel computes it for both. Here the token has it once, with the sum of their weights: the same output, fewer
pairs.

How alike experts are was measured on a checkpoint (``similarity``): one rule looks at weights, not at scores alone.

Statistics: per expert, how many tokens have it among their first ``k0``.

Shapes: T = local tokens, E = experts, K = top_k, L = MoE layers.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import (
    Count,
    Positive,
    Routing,
    RoutingContext,
    Share,
    SteppedPolicy,
    layer_at,
    policy,
)
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import list_keys, top_k_map, weighted, without_padding
from moe_ep_bench.policies.similarity import HOW, Similarity, open_similarity


@policy
class SERE(SteppedPolicy):
    """Secondary experts' tokens go to the most similar primary one, where its similarity reaches ``threshold``.

    Attributes:
        k0: experts that every token makes primary (the paper's S).
        similarity: file of the experts' similarity.
        threshold: least similarity, 0 to 1 (the paper's rho).
        layer: MoE layer whose matrix serves all; None = each layer's own.
    """

    name = "sere"
    acts_in = ("decode",)
    looks_past_top_k = True  # No choice does, but what is said of the mass of pairs that moved.
    experts_in = ("k0",)
    file_fields = ("similarity",)

    k0: Positive
    similarity: str | None = None
    threshold: Share = 0.0
    layer: Count | None = None

    def __post_init__(self) -> None:
        if self.similarity is None:
            raise UserError(f"sere needs a file of the experts' similarity; {HOW}", "similarity")

    @cached_property
    def data(self) -> Similarity:
        """The file; ValueError where there is none."""
        found = open_similarity(Path(str(self.similarity)))
        if self.layer is not None and self.layer >= found.num_layers:
            raise UserError(f"expected 0 to {found.num_layers - 1}, layers of {found.path}; got {self.layer}", "layer")
        return found

    @property
    def layered(self) -> dict[str, int]:
        per_layer = self.layer is None and self.data.num_layers > 1
        return super().layered | ({"similarity": self.data.num_layers} if per_layer else {})

    def check(self, scores_TE: Tensor, context: RoutingContext) -> None:
        super().check(scores_TE, context)
        self._check_experts(scores_TE.shape[1])
        self._matrix_number(context)

    def check_model(self, num_experts: int, top_k: int) -> None:
        super().check_model(num_experts, top_k)
        self._check_experts(num_experts)

    def _check_experts(self, num_experts: int) -> None:
        if self.data.num_experts != num_experts:
            got = f"{self.data.num_experts} in {self.data.path.name}"
            raise UserError(f"expected a file of {num_experts} experts, as the model has, got {got}", "similarity")

    def _matrix_number(self, context: RoutingContext) -> int:
        """Which matrix serves this layer; ValueError: there is none."""
        if "similarity" not in self.layered:
            return self.layer or 0
        return layer_at(context.layer_fraction, self.data.num_layers, "similarity")

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        first_TE = self.steps.best_per_row(list_keys(scores_TE, context, self.steps), self.k0)
        return self.steps.load_of(without_padding(first_TE, context)).unsqueeze(0)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        stats_SE = self.stats(scores_TE, context) if stats_SE is None else stats_SE
        matrix_EE = self.data.matrices(scores_TE.device)[self._matrix_number(context)]
        top_k_TE = top_k_map(scores_TE, context, self.steps)
        own = weighted(scores_TE, top_k_TE, top_k_TE, context, self.steps)
        target_E = self.stand_ins(stats_SE[0] > 0, matrix_EE)
        return Routing(*self.steps.moved(own.map_TE, own.weights_TE, target_E))

    def stand_ins(self, primary_E: Tensor, matrix_EE: Tensor) -> Tensor:
        """The expert that computes each expert's tokens: int64 [E]."""
        among_EE = matrix_EE.masked_fill(~primary_E, -1.0)
        most_alike_E = self.steps.best_per_row(among_EE, 1).byte().argmax(dim=1)
        stays_E = primary_E | (among_EE.amax(dim=1) < self.threshold)  # all of them where none is primary
        return torch.where(stays_E, torch.arange(len(primary_E), device=primary_E.device), most_alike_E)
