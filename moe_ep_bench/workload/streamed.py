"""Workloads that make any rows of a batch alone, and so need not hold a batch to give a rank its tokens.

A thousand ranks of 16,384 tokens and 1,024 experts have 64 GiB of scores together, one of them 64 MiB. Which
sequences are a rank's depends on their lengths only (``batch.deal_sequences``), and a row's scores on
the random numbers at its own place in the batch's stream. So a rank's rows are made when it is their turn, and
all that is held of the rest is a few numbers for each sequence.

Shapes: T = tokens, E = experts, R = ranks, S = sequences of a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.workload.batch import TokenBatch, Workload, deal_sequences
from moe_ep_bench.workload.rows import Run, runs_of


class StreamedWorkload(Workload):
    """A workload whose sequences are numbered from 0 in the order of their rows, and whose rows can be made alone."""

    @abstractmethod
    def sequence_lengths(self, index: int) -> NDArray[np.int64]:
        """Tokens of each sequence of batch ``index``: int64 [S], all above 0."""

    @abstractmethod
    def make_scores(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float32]]:
        """Make some rows of batch ``index``, in order: pieces of the scores, float32 [some rows, E].

        Args:
            runs: ascending; each starts where a sequence does.
        """

    def tokens_of_ranks(self, index: int, num_ranks: int, shares: Sequence[float] | None = None) -> NDArray[np.int64]:
        self._check_index(index)
        length_S = self.sequence_lengths(index)
        tokens_R = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(tokens_R, deal_sequences(length_S, num_ranks, shares), length_S)
        return tokens_R

    def make_batch(self, index: int) -> TokenBatch:
        start_S = self._starts(index)
        return self._tokens(index, np.arange(len(start_S) - 1), start_S)

    def make_rank_batches(self, index: int, num_ranks: int, shares: Sequence[float] | None) -> Iterator[TokenBatch]:
        start_S = self._starts(index)
        rank_S = deal_sequences(np.diff(start_S), num_ranks, shares)
        by_rank_S = np.argsort(rank_S, kind="stable")
        end_R = np.bincount(rank_S, minlength=num_ranks).cumsum()
        for sequences in np.split(by_rank_S, end_R[:-1]):
            yield self._tokens(index, sequences, start_S)

    def make_blocks(self, index: int) -> Iterator[TokenBatch]:
        start_S = self._starts(index)
        first = 0
        for scores_TE in self.make_scores(index, [Run(0, int(start_S[-1]))]):
            row_T = np.arange(first, first + len(scores_TE))
            sequence_id_T = np.searchsorted(start_S, row_T, side="right") - 1
            yield TokenBatch(torch.from_numpy(scores_TE), torch.from_numpy(sequence_id_T))
            first += len(scores_TE)

    def _starts(self, index: int) -> NDArray[np.int64]:
        """Where each sequence starts, and where the last one ends: int64 [S + 1]."""
        return np.concatenate([[0], self.sequence_lengths(index).cumsum()])

    def _tokens(self, index: int, sequences: NDArray[np.int64], start_S: NDArray[np.int64]) -> TokenBatch:
        """The tokens of some sequences, which are given ascending."""
        sequence_id_T = np.repeat(sequences, np.diff(start_S)[sequences])
        scores_TE = np.empty((len(sequence_id_T), self.num_experts), dtype=np.float32)
        first = 0
        for piece_TE in self.make_scores(index, runs_of(sequences, start_S)):
            scores_TE[first : first + len(piece_TE)] = piece_TE
            first += len(piece_TE)
        return TokenBatch(torch.from_numpy(scores_TE), torch.from_numpy(sequence_id_T))
