"""A batch of tokens, how ranks share it, and what every source of batches has in common.

Shapes: T = tokens of all ranks together, E = experts, R = ranks, S = sequences.
"""

from __future__ import annotations

import hashlib
import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.workload.selection import TopK
from moe_ep_bench.workload.skew import entropy, mass_share, peak_load, rank_load, shared_by_neighbours


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tokens of a global batch: of all ranks together, of one, or a few rows of it.

    Attributes:
        scores_TE: float32 router scores; every row is positive and sums to 1.
        sequence_id_T: int64, from 0 in the global batch; the tokens of one sequence are adjacent.
        valid_T: bool, False = padding (``with_padding``); None = all are valid.
    """

    scores_TE: Tensor
    sequence_id_T: Tensor
    valid_T: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.scores_TE.dtype == torch.float32
        assert self.sequence_id_T.dtype == torch.int64
        assert self.sequence_id_T.shape == self.scores_TE.shape[:1]
        assert self.valid_T is None or (self.valid_T.dtype, self.valid_T.shape) == (torch.bool, (self.num_tokens,))

    @property
    def num_tokens(self) -> int:
        return self.scores_TE.shape[0]

    def rows(self, rows_N: Tensor) -> TokenBatch:
        """Some of the tokens, by their int64 indices."""
        valid_N = None if self.valid_T is None else self.valid_T[rows_N]
        return TokenBatch(self.scores_TE[rows_N], self.sequence_id_T[rows_N], valid_N)

    def with_padding(self, num_padding: int) -> TokenBatch:
        """The same rows as a rank's batch whose last ``num_padding`` ones are padding.

        An engine replays a decode step as a CUDA graph that was captured for a fixed number of tokens; with fewer
        requests than that the last slots hold what finished requests have left there. So a padding token's scores
        stay as they were drawn. A rank without tokens has no padding either.

        Raises:
            ValueError: no token would be left.
        """
        if num_padding == 0 or self.num_tokens == 0:
            return self
        if num_padding >= self.num_tokens:
            raise ValueError(
                f"padding_per_rank: expected less than the {self.num_tokens} tokens that a rank has, got {num_padding}"
            )
        return replace(self, valid_T=torch.arange(self.num_tokens) < self.num_tokens - num_padding)


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
    sequence_id_T = batch.sequence_id_T if isinstance(batch, TokenBatch) else batch
    id_S, length_S = torch.unique_consecutive(sequence_id_T, return_counts=True)
    if id_S.unique().numel() != id_S.numel():
        raise ValueError("sequence_id_T: expected the tokens of a sequence side by side, got one in several runs")

    rank_S = torch.from_numpy(deal_sequences(length_S.numpy(), num_ranks, shares))
    rank_T = rank_S.repeat_interleave(length_S)
    tokens_per_rank = torch.bincount(rank_T, minlength=num_ranks).tolist()
    return list(torch.argsort(rank_T, stable=True).split(tokens_per_rank))


def deal_sequences(
    length_S: NDArray[np.int64], num_ranks: int, shares: Sequence[float] | None = None
) -> NDArray[np.int64]:
    """Which rank gets each sequence, by the rule of ``deal``: int64 [S].

    Args:
        length_S: tokens of each sequence.
        num_ranks, shares: see ``deal``.

    Raises:
        ValueError: no ranks, or no rank with a share.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    share_R = [1.0 if shares is None else shares[rank % len(shares)] for rank in range(num_ranks)]
    fill_and_rank = [(0.0, rank) for rank in range(num_ranks) if share_R[rank] > 0]  # already a heap
    if not fill_and_rank:
        raise ValueError(f"shares: expected one above 0 among the {num_ranks} ranks, got {share_R}")
    rank_S = np.empty(len(length_S), dtype=np.int64)
    for sequence, length in enumerate(length_S.tolist()):
        fill, rank = fill_and_rank[0]
        heapq.heapreplace(fill_and_rank, (fill + length / share_R[rank], rank))
        rank_S[sequence] = rank
    return rank_S


class Workload(ABC):
    """A source of ``num_batches`` batches that are the same bytes whenever and wherever they are made.

    A subclass makes batches and describes them. What it keeps between batches changes none, and it knows
    nothing of ranks: what each of them gets, ``deal`` says.
    """

    num_tokens: int
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
        self._check_index(index)
        return self.make_batch(index)

    def rank_batches(self, index: int, num_ranks: int, shares: Sequence[float] | None = None) -> Iterator[TokenBatch]:
        """Yield each rank's tokens of batch ``index``, rank by rank: those that ``deal`` gives it of ``batch(index)``.

        A ``StreamedWorkload`` holds one rank's tokens at a time, others the batch.

        Raises:
            IndexError: no such batch.
            ValueError: see ``deal``; raised when the first rank is asked for.
        """
        self._check_index(index)
        if num_ranks == 1 and index in self._kept:
            return iter([self._kept.pop(index)])
        return self.make_rank_batches(index, num_ranks, shares)

    def tokens_of_ranks(self, index: int, num_ranks: int, shares: Sequence[float] | None = None) -> NDArray[np.int64]:
        """How many tokens each rank gets of batch ``index`` (``rank_batches``): int64 [R]; arguments as there."""
        return np.array([tokens.num_tokens for tokens in self.rank_batches(index, num_ranks, shares)])

    def blocks(self, index: int) -> Iterator[TokenBatch]:
        """Yield batch ``index`` a few rows at a time, in order; a sequence may go on in the next block.

        A ``StreamedWorkload`` holds one block at a time, others the batch.
        """
        self._check_index(index)
        return self.make_blocks(index)

    def make_rank_batches(self, index: int, num_ranks: int, shares: Sequence[float] | None) -> Iterator[TokenBatch]:
        """Deal batch ``index``; a subclass that need not hold all of it does better."""
        batch = self.make_batch(index)
        for tokens_T in deal(batch, num_ranks, shares):
            yield batch.rows(tokens_T)

    def make_blocks(self, index: int) -> Iterator[TokenBatch]:
        """Make all of batch ``index`` one block; a subclass that need not hold all of it does better."""
        yield self.make_batch(index)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch: expected 0 to {self.num_batches - 1}, got {index}")

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

    def keep_batches(self) -> None:
        """Keep every batch that is gone through until one rank, which has all of it, asks for it once."""
        self.__dict__["_keeps"] = True

    @cached_property
    def _kept(self) -> dict[int, TokenBatch]:
        return {}

    def findings(self) -> dict[str, Any]:
        """What going through all batches once has shown, JSON-ready, for others to take over; goes through them."""
        fingerprint, surveys = self._survey
        return {"fingerprint": fingerprint, "surveys": [asdict(survey) for survey in surveys], "solved": self.solved()}

    def take_findings(self, findings: Mapping[str, Any]) -> None:
        """Take over the ``findings`` of an equal workload elsewhere, in place of going through all batches."""
        surveys = [_BatchSurvey.of(said) for said in findings["surveys"]]
        self.__dict__["_survey"] = findings["fingerprint"], surveys
        self.take_solved(findings["solved"])

    def solved(self) -> dict[str, Any]:
        """What was solved for while batches were made, JSON-ready; a subclass that solves for something says it."""
        return {}

    def take_solved(self, solved: Mapping[str, Any]) -> None:
        """Take over what an equal workload has ``solved`` for."""
        assert not solved, "a subclass that solves for something takes it over"

    @cached_property
    def _survey(self) -> tuple[str, list[_BatchSurvey]]:
        # One pass for both questions, one block in memory at a time.
        digest, surveys = hashlib.sha256(), []
        for index in range(self.num_batches):
            tally, ids, scores = _Tally(self.num_experts, self.selection), [], []
            digest.update(repr((self.num_tokens, self.num_experts)).encode())
            for block in self.blocks(index):
                digest.update(block.scores_TE.numpy().data.cast("B"))
                ids.append(block.sequence_id_T)
                tally.add(block)
                scores += [block.scores_TE] if "_keeps" in self.__dict__ else []
            if scores:
                self._kept[index] = TokenBatch(torch.cat(scores), torch.cat(ids))
            for sequence_id_T in ids:
                digest.update(sequence_id_T.numpy().data.cast("B"))
            surveys.append(tally.survey())
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
    def of(cls, said: Mapping[str, Any]) -> Self:
        """From what JSON has made of one: its keys are texts."""
        return cls(**{**said, "rank_load": {int(ranks): load for ranks, load in said["rank_load"].items()}})


class _Tally:
    """Takes in a batch block by block, in order, and says what it turned out to be."""

    def __init__(self, num_experts: int, selection: TopK) -> None:
        self.selection = selection
        self.load_E = torch.zeros(num_experts, dtype=torch.int64)
        self.num_tokens = self.num_neighbours = self.num_shared = 0
        self.topk_share = self.entropy = 0.0
        # The last token's, whose neighbour is in the block to come.
        self.map_1E = torch.zeros(0, num_experts, dtype=torch.bool)
        self.sequence_id_1 = torch.zeros(0, dtype=torch.int64)

    def add(self, block: TokenBatch) -> None:
        map_TE = torch.from_numpy(self.selection.chosen(np.log(block.scores_TE.numpy())))
        self.load_E += map_TE.sum(0)
        self.num_tokens += block.num_tokens
        self.topk_share += block.num_tokens * mass_share(block.scores_TE, map_TE)
        self.entropy += block.num_tokens * entropy(block.scores_TE)
        sequence_id_T = torch.cat([self.sequence_id_1, block.sequence_id_T])
        num_shared, num_neighbours = shared_by_neighbours(torch.cat([self.map_1E, map_TE]), sequence_id_T)
        self.num_shared += num_shared
        self.num_neighbours += num_neighbours
        self.map_1E, self.sequence_id_1 = map_TE[-1:], sequence_id_T[-1:]

    def survey(self) -> _BatchSurvey:
        counts = [2**power for power in range(1, 9) if len(self.load_E) % 2**power == 0]
        return _BatchSurvey(
            peak_load(self.load_E),
            {num_ranks: rank_load(self.load_E, num_ranks) for num_ranks in counts},
            int((self.load_E > 0).sum()),
            self.topk_share / self.num_tokens,
            self.entropy / self.num_tokens,
            self.num_shared / self.num_neighbours if self.num_neighbours else None,
        )
