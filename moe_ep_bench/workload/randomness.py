"""Random numbers by their place in a batch, rows in chunks, and scores without ties.

Every (seed, purpose, batch) has one key of numpy's counter-based Philox generator, and every row of a batch its own
place on the counter. So any rank makes any rows, and neither the number of ranks nor torch or its devices have a say.
Scores are computed in float64 and rounded to float32 last. That hides last-place differences between math libraries;
where one shows after all, or a numpy release changes a distribution, the frozen numbers of the tests tell.

Rows are asked for as *runs* of adjacent ones and made in *chunks*: arrays of half a MiB, which may hold several short
runs or a piece of a long one. So a batch may be larger than memory.

Shapes: T = tokens, E = experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Scores in a chunk: half a MiB of float64, which caches hold and which is not returned to the system every time
# (at 2 MiB, page faults make solving for targets half as slow again).
_CHUNK_SCORES = 2**16


class Stream(IntEnum):
    """Purposes of random numbers. The values are part of what makes the bytes: append, never renumber."""

    POPULARITY = 0
    NOISE = 1
    SEQUENCES = 2
    TAIL = 3
    HOT_RANK = 5


def generator(seed: int, stream: Stream, batch: int = 0) -> np.random.Generator:
    """Return the generator of one purpose in one batch; ``seed`` is at least 0."""
    return np.random.Generator(np.random.Philox(_seeds(seed, stream, batch)))


def uniform_rows(seed: int, stream: Stream, batch: int, first: int, end: int, num_experts: int) -> NDArray[np.float64]:
    """Draw the rows ``first`` to ``end - 1`` of a batch, uniform from 0 to below 1: float64 [end - first, E]."""
    word = first * num_experts
    philox = np.random.Philox(key=_key(seed, stream, batch), counter=word // 4)  # four words for each count
    if word % 4:
        philox.random_raw(word % 4)
    return np.random.Generator(philox).random((end - first, num_experts))


@lru_cache(maxsize=256)
def _key(seed: int, stream: Stream, batch: int) -> NDArray[np.uint64]:
    return _seeds(seed, stream, batch).generate_state(2, np.uint64)


def _seeds(seed: int, stream: Stream, batch: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(stream, batch))


class Run(NamedTuple):
    """The rows ``first`` to ``end - 1`` of a batch, or the tokens of a recording."""

    first: int
    end: int

    @property
    def num_rows(self) -> int:
        return self.end - self.first


def rows_at_once(num_experts: int) -> int:
    """Rows of a chunk."""
    return max(1, _CHUNK_SCORES // num_experts)


def runs_of(sequences: NDArray[np.int64], start_S: NDArray[np.int64]) -> list[Run]:
    """The rows of some sequences, or pieces of them; those of adjacent ones are one run.

    Args:
        sequences: their numbers, ascending.
        start_S: int64 [S + 1], where each of the batch's starts, and where the last one ends.
    """
    is_last = np.diff(sequences, append=-1) != 1
    is_first = np.diff(sequences, prepend=-2) != 1
    first, end = start_S[sequences[is_first]], start_S[sequences[is_last] + 1]
    return list(map(Run, first.tolist(), end.tolist()))


def in_chunks(runs: Iterable[Run], num_rows: int) -> Iterator[list[Run]]:
    """Cut runs, and put them together, into chunks of ``num_rows`` rows in their order; the last may have fewer."""
    chunk: list[Run] = []
    missing = num_rows
    for first, end in runs:
        while first < end:
            piece = Run(first, min(end, first + missing))
            chunk.append(piece)
            first, missing = piece.end, missing - piece.num_rows
            if not missing:
                yield chunk
                chunk, missing = [], num_rows
    if chunk:
        yield chunk


def row_numbers(chunk: Iterable[Run]) -> NDArray[np.int64]:
    """Number every row of a chunk."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, end) for first, end in chunk)])


def separate_ties(scores_TE: NDArray[np.float32], order_TE: NDArray[np.float64]) -> None:
    """Move equal scores of a row apart, in place, by as few units in the last place as it takes.

    Which of two equal scores ``torch.topk`` prefers is not defined, so a tie would leave the
    routing to chance. Ties are not rare: the float32 roundings of 64 continuous scores meet in
    about one row in 20,000, and float16 recordings in one row in 30.

    Args:
        scores_TE: positive float32 scores.
        order_TE: distinct values that sort every row as its scores do, and tell its ties apart.
    """
    tied_T = (np.diff(np.sort(scores_TE, axis=1), axis=1) == 0).any(axis=1)
    if not tied_T.any():
        return
    rank_TE = np.argsort(order_TE[tied_T], axis=1)
    rows_TE = scores_TE[tied_T]
    # Positive floats sort as their bits do, and the next float is the next integer: of the
    # ascending bits b, the least strictly ascending ones above them are max(b_i, previous + 1).
    step_E = np.arange(scores_TE.shape[1], dtype=np.int32)
    bits_TE = np.take_along_axis(rows_TE, rank_TE, axis=1).view(np.int32)
    bits_TE = np.maximum.accumulate(bits_TE - step_E, axis=1) + step_E
    np.put_along_axis(rows_TE, rank_TE, bits_TE.view(np.float32), axis=1)
    scores_TE[tied_T] = rows_TE
