"""What makes tokens differ: Gumbel noise on the logits, independent or alike between neighbours.

Taking the top-k of logits with Gumbel noise draws K experts without replacement, with the odds
that popularity gives them (the Gumbel-top-k trick: Kool et al. 2019, arXiv 1903.06059). Neighbouring
tokens of a real text share experts; here their noise is correlated: a Gaussian autoregressive
process along each sequence, mapped to Gumbel values (a Gaussian copula), so that each token alone is
distributed as before and only its likeness to the one before it changes.

A sequence is whatever ``sequence_id_T`` says: a text at prefill, or the consecutive tokens of one
speculative request.

Any rows of a batch can be made alone. An independent row takes as many words of the stream as it has
experts. Normal values are drawn by rejection and take one word or more, so correlated sequences begin at words that
are known only once all before them were drawn; that is done once, and their places are kept.

Shapes: T = tokens of a batch, E = experts, S = its sequences, N = pairs of neighbours that are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.randomness import (
    Run,
    Stream,
    draw_rows,
    generator,
    in_chunks,
    joined,
    rows_at_once,
    seek,
    tell,
)
from moe_ep_bench.workload.skew import TopK

_NUM_PAIRS = 4096
_BISECTIONS = 12
# Noise that is kept: of so many batches, and values of each at most (64 MiB).
_NUM_HELD, _MOST_HELD = 4, 2**23


@dataclass(frozen=True, eq=False)
class Noise:
    """Gumbel noise of one batch, independent from token to token."""

    seed: int
    batch: int
    num_tokens: int
    num_experts: int

    def _generator(self) -> np.random.Generator:
        return generator(self.seed, Stream.NOISE, self.batch)

    def chunks(self, runs: Iterable[Run]) -> Iterator[NDArray[np.float64]]:
        """Noise of some rows, in chunks: float64 [up to ``rows_at_once``, E].

        Args:
            runs: ascending.
        """
        random = self._generator()
        for _, noise_TE in draw_rows(random, runs, self.num_experts, random.gumbel):
            yield noise_TE


@dataclass(frozen=True, eq=False)
class HeldNoise(Noise):
    """Noise of the last few batches, kept: workloads of one seed differ in what is added to it."""

    def chunks(self, runs: Iterable[Run]) -> Iterator[NDArray[np.float64]]:
        if self.num_tokens * self.num_experts > _MOST_HELD:
            yield from super().chunks(runs)
            return
        noise_TE = _whole_noise(self.seed, self.batch, self.num_tokens, self.num_experts)
        for chunk in in_chunks(runs, rows_at_once(self.num_experts)):
            yield joined([noise_TE[first:end] for first, end in chunk])


@lru_cache(_NUM_HELD)
def _whole_noise(*fields: int) -> NDArray[np.float64]:
    noise = Noise(*fields)
    noise_TE = np.concatenate(list(noise.chunks([Run(0, noise.num_tokens)])))
    noise_TE.setflags(write=False)
    return noise_TE


@dataclass(frozen=True, eq=False)
class CorrelatedNoise(Noise):
    """Noise whose underlying normals correlate by ``correlation`` between neighbours in a sequence."""

    sequence_length: int
    correlation: float

    def chunks(self, runs: Iterable[Run]) -> Iterator[NDArray[np.float64]]:
        random, row = self._generator(), 0
        carried_1E = np.empty((1, self.num_experts))
        for chunk in in_chunks(runs, rows_at_once(self.num_experts)):
            parts = []
            for first, end in chunk:
                if first != row:
                    start = first - first % self.sequence_length
                    seek(random, int(self._words[start // self.sequence_length]))
                    # Of a sequence that is cut, the tokens ahead of this part.
                    for ahead in in_chunks([Run(start, first)], rows_at_once(self.num_experts)):
                        normal_TE = random.standard_normal((ahead[0].num_rows, self.num_experts))
                        carried_1E = self._correlate(normal_TE, ahead[0].first, carried_1E)
                normal_TE = random.standard_normal((end - first, self.num_experts))
                carried_1E = self._correlate(normal_TE, first, carried_1E)
                parts.append(_gumbel(normal_TE))
                row = end
            yield joined(parts)

    def _correlate(
        self, normal_TE: NDArray[np.float64], row: int, carried_1E: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Make independent normals correlated, in place.

        Args:
            normal_TE: of the rows from ``row`` on.
            carried_1E: correlation times the row before; without effect where a sequence starts.

        Returns:
            What the rows that follow carry on.
        """
        from scipy.signal import lfilter  # Imports for a second, and few workloads need it.

        start = 0
        while start < len(normal_TE):
            into_sequence = (row + start) % self.sequence_length
            end = min(start + self.sequence_length - into_sequence, len(normal_TE))
            if into_sequence == 0:
                carried_1E = np.zeros_like(carried_1E)
            # The first token is as it is, the others x_t = c x_{t-1} + sqrt(1 - c^2) e_t: all are standard normal.
            normal_TE[start + (into_sequence == 0) : end] *= np.sqrt(1 - self.correlation**2)
            normal_TE[start:end], carried_1E = lfilter(
                [1.0], [1.0, -self.correlation], normal_TE[start:end], axis=0, zi=carried_1E
            )
            start = end
        return carried_1E

    @cached_property
    def _words(self) -> NDArray[np.int64]:
        """From which word of the stream each sequence is drawn: int64 [S]."""
        random = self._generator()
        scratch_TE = np.empty((rows_at_once(self.num_experts), self.num_experts))
        words_S = np.empty(-(-self.num_tokens // self.sequence_length), dtype=np.int64)
        for sequence, first in enumerate(range(0, self.num_tokens, self.sequence_length)):
            words_S[sequence] = tell(random)
            missing = min(self.sequence_length, self.num_tokens - first)
            while missing:
                drawn = scratch_TE[:missing]
                random.standard_normal(out=drawn)
                missing -= len(drawn)
        return words_S


def solve_correlation(
    seed: int, bias_E: NDArray[np.float64], top_k: TopK, overlap: float, *, or_chance: bool = False
) -> float:
    """Find the correlation at which neighbouring tokens share ``overlap`` of the experts they go to.

    Args:
        or_chance: 0, independent tokens, where these already share more.

    Raises:
        ValueError: out of reach; the message gives the range, from independent tokens to equal ones.
    """
    random = generator(seed, Stream.PAIRS)
    first_NE, fresh_NE = (random.normal(size=(_NUM_PAIRS, len(bias_E))) for _ in range(2))
    chosen_NE = top_k.chosen(_gumbel(first_NE) + bias_E)

    def shared(correlation: float) -> float:
        second_NE = correlation * first_NE + np.sqrt(1 - correlation**2) * fresh_NE
        return float((chosen_NE & top_k.chosen(_gumbel(second_NE) + bias_E)).sum() / _NUM_PAIRS)

    least = shared(0.0)
    if or_chance and overlap < least:
        return 0.0
    if not least <= overlap < top_k.top_k:
        raise UserError(
            f"neighbour_overlap: expected {np.ceil(least * 100) / 100:g} (what tokens share by chance under this skew) "
            f"to below {top_k.top_k}, got {overlap:g}"
        )
    return _bisect(shared, overlap)


def _bisect(function: Callable[[float], float], target: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


def _gumbel(normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Gumbel value at the same quantile."""
    from scipy.special import log_ndtr  # Planning does without.

    gumbel = log_ndtr(normal)
    for function in (np.negative, np.log, np.negative):
        function(gumbel, out=gumbel)
    return gumbel
