"""Make a rank's tokens of a batch: ``tokens`` is the sole maker, for real ranks, virtual ones and routing alone.

A layer that stands alone has the key None.

Shapes: T = tokens of one rank, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ep_bench.bench.point import BALANCED, ROUTING, CaseSpec, Point
from moe_ep_bench.metrics import ScoreMetrics, chosen_experts, score_metrics
from moe_ep_bench.models import logits_from_scores, scores_from_logits
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.contract import check_inputs
from moe_ep_bench.workload.batch import balanced_scores

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Tokens:
    """One rank's tokens of a batch in one MoE layer, on the device that routes them.

    Attributes:
        rank: of all ranks: random policies draw by it.
        context: facts of the tokens, but for randomness; a policy sees ``routing.Router.context``.
        workload_scores_TE: float32 [T, E], the workload's scores.
        score_function: by which the layer makes scores of its logits; None where no layer is asked.
        number: of the micro-batch, of those that a rank's tokens are cut into.
        first: how many tokens the ranks before it have; None = as many each as this one, or nearly.
    """

    layer: int | None
    batch: int
    rank: int
    context: RoutingContext
    workload_scores_TE: Tensor
    score_function: str | None = None
    number: int = 0
    first: int | None = None
    _known: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.workload_scores_TE)

    @cached_property
    def logits_TE(self) -> Tensor:  # noqa: N802
        """What the layer's router sees in place of its gate's output."""
        assert self.score_function is not None
        return logits_from_scores(self.workload_scores_TE, self.score_function)

    @cached_property
    def scores_TE(self) -> Tensor:  # noqa: N802
        """What a policy sees: what the layer makes of its logits, else scores as they are."""
        if self.score_function is None:
            return self.workload_scores_TE
        return scores_from_logits(self.logits_TE, self.score_function)

    @cached_property
    def of_scores(self) -> ScoreMetrics:
        return score_metrics(self.scores_TE, self.context)

    def seen_by(self, case: CaseSpec) -> Tokens:
        """The tokens as a case sees them: of the balanced case with balanced loads."""
        return self._balanced if case.role == BALANCED else self

    @cached_property
    def _balanced(self) -> Tokens:
        """The same tokens with the same values in other places, so that loads are balanced."""
        context = self.context
        groups = context.num_groups, context.top_groups
        first = self.rank * len(self.workload_scores_TE) if self.first is None else self.first
        return replace(
            self, workload_scores_TE=balanced_scores(self.workload_scores_TE, context.top_k, *groups, first=first)
        )

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What cases share of what is worked out of these tokens, by a key of its own."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @cached_property
    def top_k_TE(self) -> Tensor | None:  # noqa: N802
        """The model's own choice, padding's too (``RoutingContext.top_k_TE``); None on a GPU, whose forms choose."""
        if not self.scores_TE.is_cpu:
            return None
        context = replace(self.context, token_mask_T=None)
        check_inputs(self.scores_TE, context)
        return chosen_experts(self.scores_TE, context)

    def parts(self, num_parts: int) -> list[Tokens]:
        """The tokens in so many micro-batches, in order, as even as can be."""
        if num_parts == 1:
            return [self]
        return self.once(num_parts, lambda: self._cut(num_parts))

    def _cut(self, num_parts: int) -> list[Tokens]:
        of_tokens = {name: getattr(self.context, name) for name in ("token_mask_T", "request_id_T", "modality_T")}
        cut = {name: value.tensor_split(num_parts) for name, value in of_tokens.items() if value is not None}
        return [
            replace(
                self,
                number=number,
                workload_scores_TE=workload_scores_TE,
                context=replace(self.context, **{name: values[number] for name, values in cut.items()}),
            )
            for number, workload_scores_TE in enumerate(self.workload_scores_TE.tensor_split(num_parts))
        ]


def tokens(
    point: Point, layer: int | None, batch: int, rank: int, device: torch.device, few: int | None = None
) -> Tokens:
    """A rank's tokens of a batch in a layer.

    Args:
        few: only so many of them, from the first to the last; None = all.
    """
    made = point.workloads[layer].rank_batch(batch, rank, point.world_size, point.tokens_R)
    made = made.with_padding(point.experiment.workload.padding_per_rank)
    if few is not None:  # from the first to the last, and so of both where some are padding
        count = min(few, made.num_tokens)
        made = made.rows(torch.linspace(0, max(made.num_tokens - 1, 0), count).long())
    valid_T = None if made.valid_T is None else made.valid_T.to(device)
    context = point.context(layer, rank % point.ep_size, made.sequence_id_T.to(device), valid_T)
    function = None if point.backend == ROUTING else point.model.score_function
    first = None if point.tokens_R is None else int(point.tokens_R[:rank].sum())
    return Tokens(layer, batch, rank, context, made.scores_TE.to(device), function, first=first)
