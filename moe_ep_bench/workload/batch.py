"""A batch of tokens, how ranks share it, and what every source of batches has in common.

Shapes: T = tokens of all ranks together, E = experts, S = sequences.
"""

from __future__ import annotations

import hashlib
import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.workload.selection import TopK
from moe_ep_bench.workload.skew import entropy, mass_share, neighbour_overlap, peak_load, rank_load


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """One global batch: what all ranks together feed to the layer.

    Attributes:
        scores_TE: float32 router scores; every row is positive and sums to 1.
        sequence_id_T: int64, from 0; the tokens of one sequence are adjacent.
    """

    scores_TE: Tensor
    sequence_id_T: Tensor

    def __post_init__(self) -> None:
        assert self.scores_TE.dtype == torch.float32
        assert self.sequence_id_T.dtype == torch.int64
        assert self.sequence_id_T.shape == self.scores_TE.shape[:1]

    @property
    def num_tokens(self) -> int:
        return self.scores_TE.shape[0]


def deal(batch: TokenBatch | Tensor, num_ranks: int, shares: Sequence[float] | None = None) -> list[Tensor]:
    """Share a batch among ranks by whole sequences, as evenly in tokens as these allow.

    Each sequence in turn goes to the rank with the fewest tokens so far (over its share), the lowest such
    rank on ties. So with equal shares the fullest rank leads the emptiest by at most one longest sequence;
    ranks may be uneven, and with fewer sequences than ranks some get nothing.

    Args:
        batch: a batch, or its ``sequence_id_T``.
        num_ranks: among how many ranks, at least 1.
        shares: what ranks get in relation to each other, repeated as often as there are ranks; 0 = nothing.

    Returns:
        For every rank the int64 indices of its tokens, ascending; together they are all tokens.

    Raises:
        ValueError: no ranks, no rank with a share, or a sequence whose tokens are not adjacent.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    sequence_id_T = batch.sequence_id_T if isinstance(batch, TokenBatch) else batch
    id_S, length_S = torch.unique_consecutive(sequence_id_T, return_counts=True)
    if id_S.unique().numel() != id_S.numel():
        raise ValueError("sequence_id_T: expected the tokens of a sequence side by side, got one in several runs")

    share_R = [1.0 if shares is None else shares[rank % len(shares)] for rank in range(num_ranks)]
    fill_and_rank = [(0.0, rank) for rank in range(num_ranks) if share_R[rank] > 0]  # already a heap
    if not fill_and_rank:
        raise ValueError(f"shares: expected one above 0 among the {num_ranks} ranks, got {share_R}")
    rank_S = []
    for length in length_S.tolist():
        fill, rank = fill_and_rank[0]
        heapq.heapreplace(fill_and_rank, (fill + length / share_R[rank], rank))
        rank_S.append(rank)
    rank_T = torch.tensor(rank_S, dtype=torch.int64).repeat_interleave(length_S)
    tokens_per_rank = torch.bincount(rank_T, minlength=num_ranks).tolist()
    return list(torch.argsort(rank_T, stable=True).split(tokens_per_rank))


class Workload(ABC):
    """A source of ``num_batches`` batches that are the same bytes whenever and wherever they are made.

    A subclass makes batches and describes them. It holds no state that batches change, and knows
    nothing of ranks.
    """

    num_batches: int
    num_experts: int
    top_k: int
    num_groups: int | None = None
    top_groups: int | None = None

    @property
    def selection(self) -> TopK:
        """The model's own top-k."""
        return TopK(self.top_k, self.num_groups, self.top_groups)

    @abstractmethod
    def make_batch(self, index: int) -> TokenBatch:
        """Make batch ``index``, from nothing but the workload's fields and ``index``."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Say in JSON-ready words and numbers what the batches are; makes every batch once.

        Keys: ``kind`` (synthetic or recorded), ``description`` (one line for readers),
        ``tail_model`` (how scores below a recorded top-k were filled in, else None), ``targets``
        (what was asked for), ``achieved`` (see ``achieved``), ``recording`` (provenance, else None).
        """

    def batch(self, index: int) -> TokenBatch:
        """Return batch ``index``, 0 to ``num_batches - 1``."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch: expected 0 to {self.num_batches - 1}, got {index}")
        return self.make_batch(index)

    def fingerprint(self) -> str:
        """16 hex digits of the sha256 over the bytes of all batches; makes every batch once."""
        return self._survey[0]

    def achieved(self) -> dict[str, object]:
        """What the batches turned out to be under the model's own top-k.

        Means over batches: ``peak_load`` (max_E(load) / mean load; ``peak_load_range`` its least and
        greatest), ``rank_load`` (the same of contiguous ranks, by their number: powers of two that divide the
        experts), ``activated_experts`` (with at least one token), ``topk_share`` of the score mass, ``entropy``
        of the scores over log E, and ``neighbour_overlap`` (experts that adjacent tokens of a sequence share;
        None without such tokens).
        """
        surveys = self._survey[1]
        peaks = [survey.peak_load for survey in surveys]
        overlaps = [survey.neighbour_overlap for survey in surveys if survey.neighbour_overlap is not None]
        return {
            "peak_load": fmean(peaks),
            "peak_load_range": [min(peaks), max(peaks)],
            "rank_load": {
                str(ranks): fmean(survey.rank_load[ranks] for survey in surveys) for ranks in surveys[0].rank_load
            },
            "activated_experts": fmean(survey.activated_experts for survey in surveys),
            "topk_share": fmean(survey.topk_share for survey in surveys),
            "entropy": fmean(survey.entropy for survey in surveys),
            "neighbour_overlap": fmean(overlaps) if overlaps else None,
        }

    @cached_property
    def _survey(self) -> tuple[str, list[_BatchSurvey]]:
        # One pass for both questions, one batch in memory at a time.
        digest, surveys = hashlib.sha256(), []
        for index in range(self.num_batches):
            batch = self.batch(index)
            digest.update(repr(tuple(batch.scores_TE.shape)).encode())
            digest.update(batch.scores_TE.numpy().data.cast("B"))
            digest.update(batch.sequence_id_T.numpy().data.cast("B"))
            surveys.append(_BatchSurvey.of(batch, self.selection))
        return digest.hexdigest()[:16], surveys


@dataclass(frozen=True)
class _BatchSurvey:
    """What one batch turned out to be (``Workload.achieved``)."""

    peak_load: float
    rank_load: dict[int, float]
    activated_experts: int
    topk_share: float
    entropy: float
    neighbour_overlap: float | None

    @classmethod
    def of(cls, batch: TokenBatch, selection: TopK) -> _BatchSurvey:
        map_TE = torch.from_numpy(selection.chosen(np.log(batch.scores_TE.numpy())))
        load_E = map_TE.sum(0)
        counts = [2**power for power in range(1, 9) if load_E.numel() % 2**power == 0]
        return cls(
            peak_load(load_E),
            {num_ranks: rank_load(load_E, num_ranks) for num_ranks in counts},
            int((load_E > 0).sum()),
            mass_share(batch.scores_TE, map_TE),
            entropy(batch.scores_TE),
            neighbour_overlap(map_TE, batch.sequence_id_T),
        )
