"""Which rows of a batch are made, and how few at a time: what lets a batch be larger than memory.

Every row of a batch can be made alone, because its random numbers have a known place in the batch's stream
(``randomness.seek``). Rows are asked for as *runs* of adjacent ones and made in *chunks*: arrays of half a
MiB, which may hold several short runs or a piece of a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.workload.randomness import seek

# Scores in a chunk: half a MiB of float64, which caches hold and which is not returned to the system every time
# (at 2 MiB, page faults make solving for targets half as slow again).
_CHUNK_SCORES = 2**16


class Run(NamedTuple):
    """The rows ``first`` to ``end - 1`` of a batch."""

    first: int
    end: int

    @property
    def num_rows(self) -> int:
        return self.end - self.first


def rows_at_once(num_experts: int) -> int:
    """Rows of a chunk."""
    return max(1, _CHUNK_SCORES // num_experts)


def runs_of(sequences: NDArray[np.int64], start_S: NDArray[np.int64]) -> list[Run]:
    """The rows of some sequences; those of adjacent sequences are one run.

    Args:
        sequences: ascending numbers of sequences.
        start_S: int64 [S + 1], where each of the batch's sequences starts, and where the last one ends.
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
    """The rows of a chunk, one by one."""
    return np.concatenate([np.arange(first, end) for first, end in chunk])


def draw_rows(
    random: np.random.Generator, runs: Iterable[Run], num_experts: int, draw: Callable[..., NDArray[np.float64]]
) -> Iterator[tuple[list[Run], NDArray[np.float64]]]:
    """Draw random rows in chunks: which they are, and float64 [up to ``rows_at_once``, E].

    A rejected word moves what is drawn with it on by one: ``gumbel`` rejects one in 2^53, ``random`` none.

    Args:
        random: at the beginning of its stream.
        draw: its method, of those that take one word for a number.
    """
    row = 0
    for chunk in in_chunks(runs, rows_at_once(num_experts)):
        parts = []
        for first, end in chunk:
            if first != row:
                seek(random, first * num_experts)
            parts.append(draw(size=(end - first, num_experts)))
            row = end
        yield chunk, joined(parts)


def joined(parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """All rows in one array; of one part no copy is made."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
