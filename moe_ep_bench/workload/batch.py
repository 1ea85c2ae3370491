"""A batch of tokens, how ranks share it, and what every source of batches has in common.

Shapes: T = tokens of all ranks together, E = experts, S = sequences.
"""

from __future__ import annotations

import hashlib
import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from moe_ep_bench.workload.skew import peak_load, top_k_load, top_k_share


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


def deal(batch: TokenBatch | Tensor, num_ranks: int) -> list[Tensor]:
    """Share a batch among ranks by whole sequences, as evenly in tokens as these allow.

    Each sequence in turn goes to the rank with the fewest tokens so far, the lowest such rank on
    ties. So the fullest rank leads the emptiest by at most one longest sequence; ranks may be
    uneven, and with fewer sequences than ranks some get nothing.

    Args:
        batch: a batch, or its ``sequence_id_T``.
        num_ranks: among how many ranks, at least 1.

    Returns:
        For every rank the int64 indices of its tokens, ascending; together they are all tokens.

    Raises:
        ValueError: no ranks, or a sequence whose tokens are not adjacent.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    sequence_id_T = batch.sequence_id_T if isinstance(batch, TokenBatch) else batch
    id_S, length_S = torch.unique_consecutive(sequence_id_T, return_counts=True)
    if id_S.unique().numel() != id_S.numel():
        raise ValueError("sequence_id_T: expected the tokens of a sequence side by side, got one in several runs")

    tokens_and_rank = [(0, rank) for rank in range(num_ranks)]  # already a heap
    rank_S = []
    for length in length_S.tolist():
        tokens, rank = tokens_and_rank[0]
        heapq.heapreplace(tokens_and_rank, (tokens + length, rank))
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

        ``peak_load`` is the mean over batches of max_E(load) / mean load, ``peak_load_range`` its
        least and greatest, ``topk_share`` the mean share of the score mass that the top-k hold.
        """
        _, peaks, shares = self._survey
        return {"peak_load": fmean(peaks), "peak_load_range": [min(peaks), max(peaks)], "topk_share": fmean(shares)}

    @cached_property
    def _survey(self) -> tuple[str, list[float], list[float]]:
        # One pass for both questions, one batch in memory at a time.
        digest, peaks, shares = hashlib.sha256(), [], []
        for index in range(self.num_batches):
            batch = self.batch(index)
            digest.update(repr(tuple(batch.scores_TE.shape)).encode())
            digest.update(batch.scores_TE.numpy().data.cast("B"))
            digest.update(batch.sequence_id_T.numpy().data.cast("B"))
            peaks.append(peak_load(top_k_load(batch.scores_TE, self.top_k)))
            shares.append(top_k_share(batch.scores_TE, self.top_k))
        return digest.hexdigest()[:16], peaks, shares
