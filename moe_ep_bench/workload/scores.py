"""Random numbers by their place in a batch, rows in chunks, and the scores of synthetic traffic that they make.

Every (seed, purpose, batch) has one key of numpy's counter-based Philox generator, and every row of a batch its own
place on the counter. So any rank makes any rows, and neither the number of ranks nor torch or its devices have a say.
Scores are computed in float64 and rounded to float32 last. That hides last-place differences between math libraries;
where one shows after all, or a numpy release changes a distribution, the frozen numbers of the tests tell.

Rows are asked for as *runs* of adjacent ones and made in *chunks*: arrays of half a MiB, which may hold several short
runs or a piece of a long one. So a batch may be larger than memory.

A token's logits are noise plus the experts' log odds. Taking the top-k of logits with Gumbel noise draws K experts
without replacement, with these odds (Gumbel-top-k: Kool et al. 2019, arXiv 1903.06059).

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench import metrics
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.lazy import torch

# Scores in a chunk: half a MiB of float64, which caches hold and which is not returned to the system every time
# (at 2 MiB, page faults make solving for targets half as slow again).
_CHUNK_SCORES = 2**16
# A row of logits that spans more is squeezed to this, which keeps its order: exp(-80) / E is a normal float32, where
# exp(-100) would be one of many zeros.
MAX_LOGIT_SPAN = 80.0
# Of batches up to so many scores the chunks of noise are kept, twice as many in all: ranks whose tokens lie scattered
# share chunks, and so do traffics that are compared. Of a larger batch, what is asked for is drawn.
_KEPT_SCORES = 2**23

Chunks = Sequence[NDArray[np.float64]]
"""Noise of rows in order, float64 [some rows, E] each."""


# ---- random numbers and rows -----------------------------------------------------------------------------------------


class Stream(IntEnum):
    """Purposes of random numbers. The values are part of what makes the bytes: append, never renumber."""

    POPULARITY = 0
    NOISE = 1
    SEQUENCES = 2
    TAIL = 3
    HOT_RANK = 5
    PLACES = 6
    REFERENCE = 7
    MOTION = 8
    RANKS = 9
    MATCHED = 10


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
    return _seeds(seed, stream, batch).generate_state(2, np.uint64).astype(np.uint64)


def _seeds(seed: int, stream: Stream, batch: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(stream, batch_seed(batch)))


def batch_seed(batch: int) -> int:
    """A seed of a batch: its number, but for those ahead of the first, which are negative."""
    return batch % 2**32


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
    ascending_TE = np.sort(scores_TE, axis=1)
    tied_T = (ascending_TE[:, 1:] == ascending_TE[:, :-1]).any(axis=1)
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


# ---- synthetic scores ------------------------------------------------------------------------------------------------


def gumbel_noise(
    seed: int,
    batch: int,
    runs: Sequence[Run],
    num_experts: int,
    *,
    sequence_length: int = 1,
    copying: float = 0.0,
    stream: Stream = Stream.NOISE,
) -> Iterator[NDArray[np.float64]]:
    """Make Gumbel noise of some rows, in chunks: float64 [up to ``rows_at_once``, E].

    Args:
        runs: ascending.
        stream: of batches; or of the reference draw, whose only batch is 0.
        copying: the probability with which a row copies a number of the row before it in its sequence.
    """
    key, before_row, before_E = (seed, stream, batch), -1, np.empty(num_experts)
    at_once = rows_at_once(num_experts)
    if not copying and runs and runs[-1].end * num_experts <= _KEPT_SCORES:
        yield from (_kept_rows(key, row_numbers(chunk), num_experts) for chunk in in_chunks(runs, at_once))
        return
    for chunk in in_chunks(runs, at_once):
        parts = []
        for run in chunk:
            ahead = run.first % sequence_length if copying and run.first - 1 != before_row else 0
            for (missing,) in in_chunks([Run(run.first - ahead, run.first)], at_once):  # of a sequence that is cut
                before_E = _noise_rows(key, missing, before_E, sequence_length, copying)[-1]
            parts.append(_noise_rows(key, run, before_E, sequence_length, copying))
            before_row, before_E = run.end - 1, parts[-1][-1]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def _noise_rows(
    key: tuple[int, Stream, int], run: Run, before_E: NDArray[np.float64], sequence_length: int, copying: float
) -> NDArray[np.float64]:
    """Make noise of which each row copies some from the row before it, and the first of a sequence nothing."""
    uniform_TE = uniform_rows(*key, run.first, run.end, len(before_E))
    if not copying:
        return _gumbel(uniform_TE)
    starts = range(-run.first % sequence_length, run.num_rows, sequence_length)
    start_SE, is_copied_TE = _gumbel(uniform_TE[starts]), uniform_TE < copying
    # The rest of a uniform number above ``copying`` is uniform again.
    uniform_TE -= copying
    uniform_TE /= 1 - copying
    noise_TE = _gumbel(uniform_TE)
    is_copied_TE[starts], noise_TE[starts] = False, start_SE
    from moe_ep_bench.kernels.counting import copy_down  # Planning does without numba.

    copy_down(noise_TE, is_copied_TE, before_E)
    return noise_TE


def _kept_rows(key: tuple[int, Stream, int], row_T: NDArray[np.int64], num_experts: int) -> NDArray[np.float64]:
    """Some rows of noise, ascending, of which none copies another."""
    at_once = rows_at_once(num_experts)
    chunks, starts = np.unique(row_T // at_once, return_index=True)
    rows = np.split(row_T % at_once, starts[1:])
    noise = [
        _kept_chunk(*key, chunk, at_once, num_experts)[rows] for chunk, rows in zip(chunks.tolist(), rows, strict=True)
    ]
    return noise[0] if len(noise) == 1 else np.concatenate(noise)


@lru_cache(maxsize=2 * _KEPT_SCORES // _CHUNK_SCORES)
def _kept_chunk(
    seed: int, stream: Stream, batch: int, chunk: int, num_rows: int, num_experts: int
) -> NDArray[np.float64]:
    """A whole chunk, to be read only."""
    return _gumbel(uniform_rows(seed, stream, batch, chunk * num_rows, (chunk + 1) * num_rows, num_experts))


def _gumbel(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn uniform numbers into Gumbel noise, in place; those up to 0 become the least noise there is."""
    np.maximum(uniform, 2.0**-60, out=uniform)
    for function in (np.log, np.negative, np.log, np.negative):
        function(uniform, out=uniform)
    return uniform


def softmax(logits_TE: NDArray[np.float64]) -> NDArray[np.float32]:
    """Softmax over experts in float32, without ties or zeros: a row's scores sort exactly as its logits."""
    odds_TE = logits_TE - logits_TE.max(axis=1, keepdims=True)
    if -odds_TE.min(initial=0.0) > MAX_LOGIT_SPAN:
        odds_TE *= np.minimum(1.0, MAX_LOGIT_SPAN / np.maximum(-odds_TE.min(axis=1, keepdims=True), MAX_LOGIT_SPAN))
    np.exp(odds_TE, out=odds_TE)
    odds_TE /= odds_TE.sum(axis=1, keepdims=True)
    scores_TE = odds_TE.astype(np.float32)
    separate_ties(scores_TE, logits_TE)
    return scores_TE


def chosen_experts(
    logits_TE: NDArray[np.float64], selection: RoutingContext, sharpness: float = 1.0
) -> NDArray[np.bool_]:
    """Mark the model's own top-k where scores are the softmax of ``sharpness * logits``: bool [T, E].

    Rows without ties are assumed. Sharpness matters only where groups of experts are compared by their scores.
    """
    if selection.num_groups is None:
        place = logits_TE.shape[1] - selection.top_k
        return logits_TE >= np.partition(logits_TE, place, axis=1)[:, place, None]
    odds_TE = (sharpness * (logits_TE - logits_TE.max(axis=1, keepdims=True))).astype(np.float32)
    return metrics.chosen_experts(torch.from_numpy(np.exp(odds_TE, out=odds_TE)), selection).numpy()


def expert_loads(
    noise: Chunks, bias_E: NDArray[np.float64], selection: RoutingContext, sharpness: float = 1.0
) -> NDArray[np.int64]:
    """Count the tokens of every expert under the model's own top-k of noise + bias, on all cores: int64 [E]."""
    groups = selection.num_groups or 1, selection.top_groups or 1

    def loads(noise_TE: NDArray[np.float64]) -> NDArray[np.int64]:
        from moe_ep_bench.kernels.counting import top_k_loads  # Planning does without numba.

        return top_k_loads(np.ascontiguousarray(noise_TE), bias_E, selection.top_k, *groups, float(sharpness))

    num_threads = min(len(os.sched_getaffinity(0)), len(noise))
    if num_threads < 2:
        return np.sum(list(map(loads, noise)), axis=0)
    with ThreadPoolExecutor(num_threads) as pool:
        return np.sum(list(pool.map(loads, noise)), axis=0)
