"""Make a rank's tokens of a batch: ``tokens`` is the sole maker, for real ranks, virtual ones and routing alone.

``Batches`` keeps them for all that is routed of them. A layer that stands alone has the key None.

Shapes: T = tokens of one rank, E = experts, R = ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.bench.kept import Kept
from moe_ep_bench.bench.point import BALANCED, ROUTING, CaseSpec, Point
from moe_ep_bench.metrics import ScoreMetrics, chosen_experts, score_metrics
from moe_ep_bench.models import ScoreFunction, logits_from_scores, scores_from_logits
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.contract import check_inputs
from moe_ep_bench.workload.batch import balanced_scores

T = TypeVar("T")
# Of a batch's tokens, which are routed again and again: bytes for each score, as drawn and as balanced, as layers make
# them, and the top-k of both.
_SCORE_BYTES, _KEPT_BYTES = 18, 5 * 2**27


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
    score_function: ScoreFunction | None = None
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
        # Logits are not kept: few ask for them.
        return scores_from_logits(logits_from_scores(self.workload_scores_TE, self.score_function), self.score_function)

    @cached_property
    def of_scores(self) -> ScoreMetrics:
        return score_metrics(self.scores_TE, self.sharing_context)

    @cached_property
    def sharing_context(self) -> RoutingContext:
        """The context with the model's own choice as it was worked out once."""
        return replace(self.context, top_k_TE=self.top_k_TE)

    def at(self, rank: int) -> Tokens:
        """The same tokens as those of another rank for which this one stands."""
        other = replace(self, rank=rank, context=replace(self.context, rank=rank % self.context.num_ranks))
        for name in ("scores_TE", "top_k_TE", "of_scores"):  # row by row the same
            other.__dict__[name] = getattr(self, name)
        return other

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
        parts: list[Tokens] = [
            replace(
                self,
                number=number,
                workload_scores_TE=workload_scores_TE,
                context=replace(self.context, **{name: values[number] for name, values in cut.items()}),
            )
            for number, workload_scores_TE in enumerate(self.workload_scores_TE.tensor_split(num_parts))
        ]
        for name in ("scores_TE", "top_k_TE"):  # row by row the same
            if (whole := getattr(self, name)) is not None:
                for part, values in zip(parts, whole.tensor_split(num_parts), strict=True):
                    part.__dict__[name] = values
        return parts


def tokens(
    point: Point, layer: int | None, batch: int, rank: int, device: torch.device, few: int | None = None
) -> Tokens:
    """A rank's tokens of a batch in a layer.

    Args:
        few: only so many of them, from the first to the last; None = all.
    """
    made = point.workloads[layer].rank_batch(batch, rank % point.num_sources, point.num_sources, point.tokens_R)
    made = made.with_padding(point.experiment.workload.padding_per_rank)
    if few is not None:  # from the first to the last, and so of both where some are padding
        count = min(few, made.num_tokens)
        made = made.rows(torch.linspace(0, max(made.num_tokens - 1, 0), count).long())
    valid_T = None if made.valid_T is None else made.valid_T.to(device)
    context = point.context(layer, rank % point.ep_size, made.sequence_id_T.to(device), valid_T)
    function = None if point.backend == ROUTING else point.model.score_function
    first = None if point.tokens_R is None else int(point.tokens_R[:rank].sum())
    return Tokens(layer, batch, rank, context, made.scores_TE.to(device), function, first=first)


class Batches:
    """Tokens of a point's batches on all ranks, and what the model's own top-k makes of them.

    Args:
        device: holds tokens.
        few: only so many of each rank's tokens; None = all.

    Attributes:
        kept: of the point that is modelled, what was worked out of its ranks.
    """

    def __init__(self, point: Point, device: torch.device, few: int | None = None) -> None:
        self._point, self._device, self._few, self.kept = point, device, few, Kept()
        self._lock, self._kept, self._kept_bytes = threading.Lock(), dict[tuple[int | None, int, int], Tokens](), 0
        self._counts: dict[int, NDArray[np.int64]] = {}
        self._known: dict[object, Any] = {}

    def serves(self, point: Point) -> bool:
        """Whether another point has the same batches, as points that differ in their overlap do."""
        return point.workloads is self._point.workloads and point.backend == self._point.backend

    def tokens(self, layer: int | None, batch: int, rank: int) -> Tokens:
        """A rank's tokens of a batch in a layer; those of the last batches are kept on the host, as far as they fit."""
        key = layer, batch, rank
        if (kept := self._kept.get(key)) is not None:
            return kept
        made = tokens(self._point, layer, batch, rank, self._device, self._few)
        if batch >= 0 and self._device.type == "cpu":  # Earlier batches are counted once.
            self._keep(key, made)
        return made

    def _keep(self, key: tuple[int | None, int, int], made: Tokens) -> None:
        """Keep tokens in place of those of other batches, the first ones first."""
        num_bytes = _bytes_of(made)
        with self._lock:
            others = (other for other in list(self._kept) if other[:2] != key[:2])
            while self._kept_bytes + num_bytes > _KEPT_BYTES and (other := next(others, None)) is not None:
                self._kept_bytes -= _bytes_of(self._kept.pop(other))
            if self._kept_bytes + num_bytes <= _KEPT_BYTES:
                self._kept[key], self._kept_bytes = made, self._kept_bytes + num_bytes

    def for_every_rank(self, what: str, function: Callable[[Tokens], T], layer: int | None, batch: int) -> list[T]:
        """A function of every rank's tokens, in order of rank; ranks with the same tokens share what comes of it."""
        return self._point.of_ranks(self.for_sources(what, function, layer, batch))

    def for_sources(self, what: str, function: Callable[[Tokens], T], layer: int | None, batch: int) -> list[T]:
        """The same of each rank whose tokens are drawn: side by side in as many threads as torch has.

        In one where a GPU works. A rank has few tokens, so that torch works on them in one thread. A thread holds the
        tokens of one rank at a time.

        Args:
            what: names the function in what is kept.
        """
        ranks, num_threads = range(self._point.num_sources), torch.get_num_threads()
        if any((what, layer, batch, rank) not in self.kept.known for rank in ranks):
            self._point.workloads[layer].solve(batch)  # before threads ask for it

        @torch.inference_mode()
        def of_rank(rank: int) -> T:
            return self.kept.once((what, layer, batch, rank), lambda: function(self.tokens(layer, batch, rank)))

        torch.set_num_threads(1)
        try:
            if self._device.type != "cpu" or num_threads == 1:
                return list(map(of_rank, ranks))
            with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(of_rank, ranks))
        finally:
            torch.set_num_threads(num_threads)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What points share of what follows from all ranks' tokens, by a key of all that it depends on besides."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def loads(self, batch: int) -> NDArray[np.float64] | NDArray[np.int64]:
        """Pairs of each expert, or in relation to each other what a sample is matched to, which need not be drawn.

        Of batches ahead of the first, which nobody routes, no scores are made where loads can be had without.
        """
        workload = self._point.workload
        if (matched_E := workload.matched_loads(batch)) is not None:
            return matched_E
        counts_all = self._few is None and not self._point.experiment.workload.padding_per_rank
        if batch < 0 and counts_all:
            loads_E = self.once(("loads", batch), lambda: workload.loads_without_scores(batch))
            if loads_E is not None:
                return loads_E
        return self.native_counts(batch).sum(axis=0)

    def native_counts(self, batch: int) -> NDArray[np.int64]:
        """Pairs of each rank's tokens and each expert under the model's own top-k, padding's too: int64 [R, E]."""
        if batch not in self._counts:

            def counts_of(tokens: Tokens) -> NDArray[np.int64]:
                top_k_TE = tokens.top_k_TE
                if top_k_TE is None:
                    top_k_TE = chosen_experts(tokens.scores_TE, replace(tokens.context, token_mask_T=None))
                return top_k_TE.sum(dim=0).cpu().numpy()

            self._counts[batch] = np.array(self.for_every_rank("counted", counts_of, None, batch))
        return self._counts[batch]


def _bytes_of(tokens: Tokens) -> int:
    return _SCORE_BYTES * tokens.workload_scores_TE.numel()
