"""Batches of tokens with their router scores: what every source of them has in common, and how ranks share them.

A workload makes *global* batches and does not know how many ranks there are, so that one workload gives the same bytes
to 1, 4 or 64 of them. Ranks get whole sequences: single tokens would average the ranks' traffic and erase the
differences that dispatch and combine have to bear.

Any rows of a batch can be made alone, so a workload need not hold a batch to give a rank its tokens. A thousand ranks
of 16,384 tokens and 1,024 experts have 64 GiB of scores together, one of them 64 MiB. Which sequences are a rank's
depends on their lengths only (``deal_pieces``), and a row's scores on the random numbers at its place.

Shapes: T = tokens of all ranks together, E = experts, K = top_k, R = ranks, S = sequences of a batch, P = pieces of
sequences.
"""

from __future__ import annotations

import functools
import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.workload.scores import Run, Stream, generator, runs_of

_Made = TypeVar("_Made")
# Ranks ask batch after batch; a plan looks at a few that went before.
_MOST_KEPT = 8


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
        """
        if num_padding == 0 or self.num_tokens == 0:
            return self
        assert num_padding < self.num_tokens
        return replace(self, valid_T=torch.arange(self.num_tokens) < self.num_tokens - num_padding)


class Workload(ABC):
    """A source of ``num_batches`` batches that are the same bytes whenever and wherever they are made.

    Those from ``-num_history`` to -1 came ahead of the first: plans may know them, and nobody is served.

    A subclass makes scores and describes them. What it keeps between batches changes none. Sequences are numbered from
    0 in the order of their rows. The config's schema has checked each field by itself; a workload checks what depends
    on several, or on its files.
    """

    num_tokens: int
    num_batches: int
    num_experts: int
    top_k: int
    seed: int
    topk_share: float | None
    num_groups: int | None = None
    top_groups: int | None = None
    num_history: int = 0

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
        """Return JSON-ready facts of the batches, by field of ``facts.Workload``; makes none.

        ``targets`` are what was asked for; native's routing says what came of it.
        """

    def matched_loads(self, index: int) -> NDArray[np.float64] | None:
        """Loads over the mean that a batch is matched to, float64 [E], and nothing is drawn for; None = to none."""
        return None

    def loads_without_scores(self, index: int) -> NDArray[np.int64] | None:
        """Pairs of each expert in a batch under the model's own top-k, int64 [E]; None = scores must be made."""
        return None

    @functools.cached_property
    def selection(self) -> RoutingContext:
        """The model's own top-k."""
        return RoutingContext(top_k=self.top_k, num_groups=self.num_groups, top_groups=self.top_groups)

    def batch(self, index: int) -> TokenBatch:
        """Return batch ``index``, ``-num_history`` to ``num_batches - 1``."""
        return self.rank_batch(index, 0, 1)

    def solve(self, index: int) -> None:
        """Work out what all rows of batch ``index`` share, ahead of making it.

        Raises:
            ValueError: the batch cannot meet its targets.
        """
        next(self.make_scores(index, [Run(0, 1)]))

    def rank_batch(
        self, index: int, rank: int, num_ranks: int, tokens_R: NDArray[np.int64] | None = None
    ) -> TokenBatch:
        """Make one rank's tokens of batch ``index`` and no others.

        Args:
            tokens_R: how many each rank gets (``deal_pieces``).

        Raises:
            IndexError: no such batch.
        """
        start_S, start_P, rank_P = self._dealt(index, num_ranks, tokens_R)
        pieces = np.flatnonzero(rank_P == rank)
        sequence_P = np.searchsorted(start_S, start_P[pieces], side="right") - 1
        sequence_id_T = np.repeat(sequence_P, np.diff(start_P)[pieces])
        scores_TE = np.empty((len(sequence_id_T), self.num_experts), dtype=np.float32)
        first = 0
        for rows_TE in self.make_scores(index, runs_of(pieces, start_P)):
            scores_TE[first : first + len(rows_TE)] = rows_TE
            first += len(rows_TE)
        return TokenBatch(torch.from_numpy(scores_TE), torch.from_numpy(sequence_id_T))

    def tokens_of_ranks(
        self, index: int, num_ranks: int, tokens_R: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Count the tokens that each rank gets of batch ``index``: int64 [R]."""
        _, start_P, rank_P = self._dealt(index, num_ranks, tokens_R)
        return np.bincount(rank_P, np.diff(start_P), minlength=num_ranks).astype(np.int64)

    def _dealt(
        self, index: int, num_ranks: int, tokens_R: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Starts of sequences, int64 [S + 1], and of their pieces, int64 [P + 1]; the rank of each piece, int64 [P]."""
        if not -self.num_history <= index < self.num_batches:
            raise IndexError(f"batch: expected {-self.num_history} to {self.num_batches - 1}, got {index}")

        def dealt() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
            length_S = self.sequence_lengths(index)
            return np.concatenate([[0], length_S.cumsum()]), *deal_pieces(length_S, num_ranks, tokens_R)

        return self._once(("deal", index, num_ranks, None if tokens_R is None else tokens_R.tobytes()), dealt)

    def _once(self, key: tuple[object, ...], made: Callable[[], _Made]) -> _Made:
        """What every rank asks of a batch, made for the first; a few batches' are kept at a time."""
        found = self._kept.get(key)
        if found is None:
            found = made()
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found

    @functools.cached_property
    def _kept(self) -> dict[tuple[object, ...], Any]:
        return {}

    def _check_topk_share(self) -> None:
        least = self.top_k / self.num_experts
        if self.topk_share is not None and not least < self.topk_share < 1:
            raise UserError(
                f"expected a number between {least:g} (top_k / experts) and 1, got {self.topk_share:g}", "topk_share"
            )


# ---- dealing ---------------------------------------------------------------------------------------------------------


def deal_pieces(
    length_S: NDArray[np.int64], num_ranks: int, tokens_R: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Share a batch among ranks by whole sequences, as evenly in tokens as these allow.

    Sequences are cut only where a rank would be empty (``pieces_of``); then each rank gets one piece. Where ranks are
    to have so many tokens, they get them one after another in the order of the batch, and cut sequences where they end.

    Args:
        length_S: tokens of each sequence.
        tokens_R: int64 [R], which sum to the batch; None = as even as can be.

    Returns:
        Where each piece starts and the last one ends, int64 [P + 1]; whose it is, int64 [P].
    """
    if tokens_R is not None:
        start_P = np.union1d(np.append(0, length_S.cumsum()), np.append(0, tokens_R.cumsum()))
        return start_P, np.searchsorted(tokens_R.cumsum(), start_P[:-1], side="right")
    start_P = pieces_of(length_S, num_ranks)
    return start_P, deal_sequences(np.diff(start_P), num_ranks)


def spread_tokens(num_tokens: int, num_ranks: int, fullest: float, seed: int) -> NDArray[np.int64]:
    """Give ranks unequal numbers of tokens, as data-parallel attention has them: int64 [R].

    The fullest has ``fullest`` times the mean. The numbers fall by the same factor from each rank to the next, in an
    order of ranks that is drawn.

    Raises:
        ValueError: no rank can have so many.
    """
    if not 1 <= fullest <= num_ranks:
        raise UserError(f"expected 1 to {num_ranks}, the number of ranks, got {fullest:g}")
    most, rank_R = round(fullest * num_tokens / num_ranks), np.arange(num_ranks)

    def shares(factor: float) -> NDArray[np.float64]:
        return factor**rank_R / (factor**rank_R).sum()

    low, high = 0.0, 1.0  # the first has all, or they are equal
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if shares(middle)[0] * num_ranks > fullest else (low, middle)
    wanted_R = shares(high)[1:] / max(shares(high)[1:].sum(), 1e-300) * (num_tokens - most)
    tokens_R = np.concatenate([[most], np.diff(np.append(0, wanted_R.cumsum().round()))]).astype(np.int64)
    return generator(seed, Stream.RANKS).permutation(tokens_R)


def pieces_of(length_S: NDArray[np.int64], num_wanted: int) -> NDArray[np.int64]:
    """Cut the longest sequences into even parts until there are ``num_wanted`` pieces, or single tokens.

    Returns:
        Where each piece starts, and the last one ends: int64 [P + 1]. With sequences enough, these are the pieces.
    """
    parts_S = np.ones(len(length_S), dtype=np.int64)
    while parts_S.sum() < num_wanted and (part_S := length_S / parts_S).max() > 1:
        parts_S[part_S.argmax()] += 1
    first_P = (length_S.cumsum() - length_S).repeat(parts_S)
    number_P = np.arange(len(first_P)) - (parts_S.cumsum() - parts_S).repeat(parts_S)
    inside_P = length_S.repeat(parts_S) * number_P // parts_S.repeat(parts_S)
    return np.append(first_P + inside_P, length_S.sum())


def deal_sequences(length_S: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Which rank gets each sequence, whole: int64 [S].

    Each sequence in turn goes to the rank with the fewest tokens so far, the lowest such rank on ties. So the fullest
    rank leads the emptiest by at most one longest sequence.

    Args:
        length_S: tokens of each.
    """
    if (length_S[:-1] == length_S[:1]).all():
        return np.arange(len(length_S)) % num_ranks  # what the rule comes to
    fill_and_rank = [(0, rank) for rank in range(num_ranks)]  # already a heap
    rank_S = np.empty(len(length_S), dtype=np.int64)
    for sequence, length in enumerate(length_S.tolist()):
        fill, rank = fill_and_rank[0]
        heapq.heapreplace(fill_and_rank, (fill + length, rank))
        rank_S[sequence] = rank
    return rank_S


# ---- scores and marks of a batch -------------------------------------------------------------------------------------


def balanced_scores(
    scores_TE: Tensor,
    top_k: int,
    num_groups: int | None = None,
    top_groups: int | None = None,
    *,
    first: int = 0,
    row_T: Tensor | None = None,
) -> Tensor:
    """Permute each token's scores so that top-k loads differ by at most one pair between experts.

    A token's values stay the same, so its weights do too; only which expert holds which value changes: token t's K best
    go to places t*K, t*K + 1, ... modulo E of its round's order (``dealing_orders``), where t counts from ``first``. A
    round is the fewest tokens that give all experts as many pairs.

    Args:
        scores_TE: float32 [T, E].
        num_groups, top_groups: of the model's routing.
        first: how many tokens other ranks deal before these; else all ranks would begin with the same experts.
        row_T: int64 [T], each token's number t, where these do not follow each other.

    Returns:
        float32 [T, E].
    """
    from moe_ep_bench.kernels.counting import deal  # Planning does without numba.

    num_tokens, num_experts = scores_TE.shape
    ascending_TE = np.sort(scores_TE.cpu().numpy(), axis=1)  # several times as fast as torch's
    row_T = torch.arange(first, first + num_tokens) if row_T is None else row_T
    order_OE = dealing_orders(num_experts, top_k, num_groups, top_groups)
    of_round = math.lcm(num_experts, top_k) // top_k
    return torch.from_numpy(deal(ascending_TE, order_OE, row_T.numpy(), top_k, of_round)).to(scores_TE.device)


# So many drawn orders: with one, tokens would only ever take the same E / K sets of experts.
_NUM_ORDERS = 64


@functools.cache
def dealing_orders(
    num_experts: int, top_k: int, num_groups: int | None = None, top_groups: int | None = None
) -> NDArray[np.int64]:
    """Experts in drawn orders, in which K that follow each other share ranks as a token's own do: int64 [O, E].

    Neighbours would share a rank, and a transport that sends a token once to a rank would hardly send anything. With
    groups each K experts lie in ``top_groups`` of them, so that the model's rule chooses them; where the numbers do not
    divide each other so, experts stand in order, O = 1.
    """
    generator = np.random.default_rng(0)
    if num_groups is None or top_groups is None:
        return np.stack([generator.permutation(num_experts) for _ in range(_NUM_ORDERS)])
    size, of_group = num_experts // num_groups, top_k // top_groups
    num_blocks = num_experts // top_k
    if top_k % top_groups or num_experts % top_k or size % of_group or num_blocks * top_groups % num_groups:
        return np.arange(num_experts)[None]
    turn_BG = np.arange(num_blocks)[:, None] * top_groups + np.arange(top_groups)
    visit_BG = turn_BG // num_groups
    place_BNG = visit_BG[:, None] * of_group + np.arange(of_group)[None, :, None]
    orders = []
    for _ in range(_NUM_ORDERS):
        group_BG = generator.permutation(num_groups)[turn_BG % num_groups]
        drawn_GN = np.stack([generator.permutation(size) for _ in range(num_groups)])
        group_BNG = np.broadcast_to(group_BG[:, None], place_BNG.shape)
        orders.append((group_BNG * size + drawn_GN[group_BNG, place_BNG]).reshape(-1))
    return np.stack(orders)


def image_tokens(sequence_id_T: Tensor, share: float) -> Tensor:
    """Mark a share of each sequence's tokens as an image's: int64 [T], 1 = image, 0 = text.

    They are the first ones, rounded to whole tokens: vision-language models put an image before the question about it.
    The scores of these tokens are those of text.
    """
    _, sequence_T, length_S = torch.unique_consecutive(sequence_id_T, return_inverse=True, return_counts=True)
    place_T = torch.arange(len(sequence_id_T), device=length_S.device) - (length_S.cumsum(0) - length_S)[sequence_T]
    return (place_T < (share * length_S).round()[sequence_T]).long()
