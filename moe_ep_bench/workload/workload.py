"""What every source of batches has in common.

Any rows of a batch can be made alone, so a workload need not hold a batch to give a rank its tokens. A thousand ranks
of 16,384 tokens and 1,024 experts have 64 GiB of scores together, one of them 64 MiB. Which sequences are a rank's
depends on their lengths only (``batch.deal_pieces``), and a row's scores on the random numbers at its place.

Shapes: T = tokens, E = experts, R = ranks, S = sequences of a batch, P = pieces of sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.workload.batch import TokenBatch, deal_pieces
from moe_ep_bench.workload.randomness import Run, runs_of


class Workload(ABC):
    """A source of ``num_batches`` batches that are the same bytes whenever and wherever they are made.

    A subclass makes scores and describes them. What it keeps between batches changes none, and it knows nothing of
    ranks. Sequences are numbered from 0 in the order of their rows. The config's schema has checked each field by
    itself; a workload checks what depends on several, or on its files.
    """

    num_tokens: int
    num_batches: int
    num_experts: int
    top_k: int
    seed: int
    topk_share: float | None
    num_groups: int | None = None
    top_groups: int | None = None

    @abstractmethod
    def sequence_lengths(self, index: int) -> NDArray[np.int64]:
        """Tokens of each sequence of batch ``index``: int64 [S], all above 0."""

    @abstractmethod
    def make_scores(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float32]]:
        """Make some rows of batch ``index``, in order: pieces of the scores, float32 [some rows, E].

        Args:
            runs: ascending.
        """

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Say in JSON-ready words and numbers what the batches are; makes none.

        Keys: ``kind`` (synthetic or recorded), ``description`` (one line for readers),
        ``tail_model`` (how scores below a recorded top-k were filled in, else None), ``targets``
        (what was asked for; native's routing says what came of it), ``recording`` (provenance, else None).
        """

    @cached_property
    def selection(self) -> RoutingContext:
        """The model's own top-k."""
        return RoutingContext(top_k=self.top_k, num_groups=self.num_groups, top_groups=self.top_groups)

    # ---- batches and ranks' shares of them ---------------------------------------------------------------------------

    def batch(self, index: int) -> TokenBatch:
        """Return batch ``index``, 0 to ``num_batches - 1``."""
        start_S = self._starts(index)
        sequences = np.arange(len(start_S) - 1)
        return self._tokens(index, sequences, start_S, sequences)

    def rank_batches(self, index: int, num_ranks: int) -> Iterator[TokenBatch]:
        """Yield each rank's tokens of batch ``index``, rank by rank: those that ``deal`` gives it of ``batch(index)``.

        One rank's tokens are held at a time.

        Raises:
            IndexError: no such batch.
            ValueError: see ``deal``.
        """
        dealt = self._dealt(index, num_ranks)
        return (self._of_rank(index, rank, *dealt) for rank in range(num_ranks))

    def rank_batch(self, index: int, rank: int, num_ranks: int) -> TokenBatch:
        """Make one rank's tokens of batch ``index`` and no others; see ``rank_batches``."""
        return self._of_rank(index, rank, *self._dealt(index, num_ranks))

    def tokens_of_ranks(self, index: int, num_ranks: int) -> NDArray[np.int64]:
        """Count the tokens that each rank gets of batch ``index``: int64 [R]; arguments as of ``rank_batches``."""
        start_P, _, rank_P = self._dealt(index, num_ranks)
        return np.bincount(rank_P, np.diff(start_P), minlength=num_ranks).astype(np.int64)

    def _dealt(self, index: int, num_ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Where pieces of sequences start, int64 [P + 1]; of which sequence each is, and whose, int64 [P]."""
        start_S = self._starts(index)
        start_P, rank_P = deal_pieces(np.diff(start_S), num_ranks)
        return start_P, np.searchsorted(start_S, start_P[:-1], side="right") - 1, rank_P

    def _of_rank(
        self,
        index: int,
        rank: int,
        start_P: NDArray[np.int64],
        sequence_P: NDArray[np.int64],
        rank_P: NDArray[np.int64],
    ) -> TokenBatch:
        return self._tokens(index, np.flatnonzero(rank_P == rank), start_P, sequence_P)

    def _starts(self, index: int) -> NDArray[np.int64]:
        """Where each sequence starts, and where the last one ends: int64 [S + 1]."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch: expected 0 to {self.num_batches - 1}, got {index}")
        return np.concatenate([[0], self.sequence_lengths(index).cumsum()])

    def _tokens(
        self, index: int, pieces: NDArray[np.int64], start_P: NDArray[np.int64], sequence_P: NDArray[np.int64]
    ) -> TokenBatch:
        """The tokens of some pieces of sequences, which are given ascending."""
        sequence_id_T = np.repeat(sequence_P[pieces], np.diff(start_P)[pieces])
        scores_TE = np.empty((len(sequence_id_T), self.num_experts), dtype=np.float32)
        first = 0
        for piece_TE in self.make_scores(index, runs_of(pieces, start_P)):
            scores_TE[first : first + len(piece_TE)] = piece_TE
            first += len(piece_TE)
        return TokenBatch(torch.from_numpy(scores_TE), torch.from_numpy(sequence_id_T))

    def _check_topk_share(self) -> None:
        least = self.top_k / self.num_experts
        if self.topk_share is not None and not least < self.topk_share < 1:
            raise UserError(
                f"topk_share: expected a number between {least:g} (top_k / experts) and 1, got {self.topk_share:g}"
            )

    # ---- targets -----------------------------------------------------------------------------------------------------

    def solve(self, index: int) -> None:  # noqa: B027
        """Solve for the targets of batch ``index`` ahead of making it; a subclass that has targets does so.

        Raises:
            ValueError: the batch cannot meet them.
        """

    def solved(self) -> dict[str, Any]:
        """What was solved for so far, for equal workloads elsewhere; empty without targets."""
        return {}

    def take_solved(self, solved: Mapping[str, Any]) -> None:
        """Take over what an equal workload has ``solved`` for."""
        assert not solved, "a subclass that solves for something takes it over"
