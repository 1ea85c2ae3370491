"""Which recorded tokens make up a batch.

* *Sequences* (prefill): whole recorded sequences, one after the other, until the batch has its tokens; the last
  one is cut to fit. Batches are independent of each other, except that together they keep to the shares.
* *Decode*: a batch is one step of B requests that are served side by side, and the next batch is the next step.
  A slot replays a recorded sequence, s tokens a step (s = 1, or more with speculative decoding); when fewer than
  s are left it goes on with another sequence. Which experts a token chooses depends only on the tokens
  before it, so a text recorded in prefill may be replayed as decoding.

Sequences are drawn without putting back: every one of a recording comes once before any comes again.

Where several recordings are mixed, two rules keep the tokens of each to its share:

* sequences: the next one is taken from the recording that is *furthest behind*, the one of least tokens / share,
  counting this batch and those before it (the first named on ties); a count for each batch by itself would favour
  long sequences, since the last is cut. With L the longest sequence of a recording,
  after M tokens a recording of share p is then at most (1 - p) * L above p * M tokens, and at most p times the sum
  of the others' L below. The order in a batch is shuffled, or sequences of equal length would take turns in step
  with the ranks that they are dealt to;
* decode: the B slots are apportioned by largest remainder (Hamilton's method), and a slot stays with its
  recording. So every step has the same shares, less than one request from those asked for.

Shapes: B = requests of a decoding step, N = steps, S = sequences of a recording.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.workload.randomness import Run


class Pool(NamedTuple):
    """The sequences of one recording, and the share of all tokens that are to come from it.

    Sequence s holds the tokens ``start_S[s]`` to ``end_S[s] - 1``; both int64.
    """

    start_S: NDArray[np.int64]
    end_S: NDArray[np.int64]
    share: float


def draw_sequences(pools: Sequence[Pool], num_tokens: int, randoms: Iterable[np.random.Generator]) -> list[list[Run]]:
    """Draw runs of recorded tokens, whole sequences, for one batch of ``num_tokens`` from each of ``randoms``.

    Batch n depends on the first n of ``randoms``.
    """
    taken = [0] * len(pools)
    batches = []
    for random in randoms:
        queues = [_whole(random, pool) for pool in pools]
        pieces: list[Run] = []
        missing = num_tokens
        while missing:
            behind = min(range(len(pools)), key=lambda index: taken[index] / pools[index].share)
            first, end = next(queues[behind])
            pieces.append(Run(first, min(end, first + missing)))
            taken[behind] += pieces[-1].end - first
            missing -= pieces[-1].end - first
        if len(pools) > 1:
            pieces = [pieces[place] for place in random.permutation(len(pieces))]
        batches.append(pieces)
    return batches


def draw_steps(
    pools: Sequence[Pool],
    num_requests: Sequence[int],
    tokens_per_request: int,
    num_steps: int,
    random: np.random.Generator,
) -> NDArray[np.int64]:
    """Let requests decode side by side: the first of the consecutive tokens of every slot in every step.

    The clock starts in the middle of things. A slot's first sequence is drawn with odds of its length, and a
    place in it uniformly, which is how a server in steady state is met; sequences that follow are drawn evenly and
    played from their beginning. A step does not depend on how many come after it.

    Args:
        pools: every sequence holds ``tokens_per_request`` tokens or more.
        num_requests: slots of each pool (see ``apportion``). Which slots these are is drawn.

    Returns:
        int64 [N, B].
    """
    first_NB = np.empty((num_steps, sum(num_requests)), dtype=np.int64)
    pool_B = random.permutation(np.repeat(np.arange(len(pools)), num_requests))
    # A stream for each recording: how often one is drawn from is no concern of the others.
    for index, (pool, stream) in enumerate(zip(pools, random.spawn(len(pools)), strict=True)):
        free = [(0, slot) for slot in np.flatnonzero(pool_B == index).tolist()]  # from which step; already a heap
        pieces = chain(islice(_openings(stream, pool, tokens_per_request), len(free)), _whole(stream, pool))
        while free and free[0][0] < num_steps:
            step, slot = free[0]
            first, end = next(pieces)
            taken_N = np.arange(first, end - tokens_per_request + 1, tokens_per_request)
            first_NB[step : step + taken_N.size, slot] = taken_N[: num_steps - step]
            heapq.heapreplace(free, (step + taken_N.size, slot))
    return first_NB


def apportion(shares: Sequence[float], num_requests: int) -> list[int]:
    """Whole requests by largest remainder; the first named on ties. ``shares`` sum to 1."""
    quotas = [share * num_requests for share in shares]
    seats = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda index: seats[index] - quotas[index])
    for index in by_remainder[: num_requests - sum(seats)]:
        seats[index] += 1
    return seats


def _whole(random: np.random.Generator, pool: Pool) -> Iterator[Run]:
    """All sequences in a random order, then all in a fresh one, and so on; nothing is drawn before it is asked for."""
    while True:
        for sequence in random.permutation(pool.start_S.size).tolist():
            yield Run(int(pool.start_S[sequence]), int(pool.end_S[sequence]))


def _openings(random: np.random.Generator, pool: Pool, tokens_per_request: int) -> Iterator[Run]:
    """Rests of sequences, from a random place on; long sequences tend to come early, each once before any again."""
    places_S = pool.end_S - pool.start_S - tokens_per_request + 1
    while True:
        # The first of exponentials with rates w is number s with odds w_s (Efraimidis and Spirakis 2006).
        for sequence in np.argsort(random.exponential(size=places_S.size) / places_S).tolist():
            place = random.integers(places_S[sequence])
            yield Run(int(pool.start_S[sequence] + place), int(pool.end_S[sequence]))
