"""Router scores with a chosen skew.

A token's logits are Gumbel noise plus ``strength`` times the popularity of each expert. Taking
the top-k of logits with Gumbel noise draws K experts without replacement, with odds
exp(strength * popularity) (the Gumbel-top-k trick: Kool et al. 2019, arXiv:1903.06059), so strength 0 is
an unbiased router and a large strength sends every token to the same K experts. Popularity is
drawn once per workload, normal and in no order: hot experts are scattered over the ranks and stay
hot from batch to batch.

What users think in is not strength but *peak load*, the busiest expert's load over the mean. So
each batch is solved for the strength that gives the peak load asked for.

Tokens are independent of each other given popularity: within a sequence there is no correlation
and ranks differ by chance only.

Shapes: T = tokens of all ranks, E = experts, K = top_k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.workload.batch import TokenBatch, Workload
from moe_ep_bench.workload.randomness import Stream, generator, separate_ties

# A batch's peak load is met to within this share of the target, or to one token.
TOLERANCE = 0.01
# Rows are worked on a few at a time: beside the noise no second array of T x E float64 is made.
ROWS_AT_ONCE = 4096
# A row of logits that spans more is squeezed to this, which keeps its order: exp(-80) / E is a
# normal float32, where exp(-100) would be one of many zeros.
MAX_LOGIT_SPAN = 80.0


@dataclass(frozen=True, eq=False)
class SyntheticWorkload(Workload):
    """Batches of independent tokens whose busiest expert gets ``peak_load`` times the mean load.

    Attributes:
        num_experts, top_k: of the model (E, K).
        num_tokens: tokens in a batch, all ranks together.
        num_batches: how many batches there are.
        sequence_length: tokens per sequence; the last one of a batch may be shorter.
        peak_load: target for every batch, up to E / K; None leaves the router unskewed.
        seed: at least 0.

    Raises:
        ValueError: a field out of range. Noise alone already skews a batch a little; a ``peak_load`` below
            that is found when a batch is made, and the message gives the range that can be met.
    """

    num_experts: int
    top_k: int
    num_tokens: int
    num_batches: int
    sequence_length: int
    peak_load: float | None
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_tokens", "num_batches", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k: expected 1 to {self.num_experts} (the experts), got {self.top_k}")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")
        if self.peak_load is not None and not 1 <= self.peak_load <= self.num_experts / self.top_k:
            raise ValueError(
                f"peak_load: expected 1 to {self.num_experts / self.top_k:g} (experts / top_k), got {self.peak_load:g}"
            )

    @cached_property
    def popularity(self) -> NDArray[np.float64]:
        return generator(self.seed, Stream.POPULARITY).normal(size=self.num_experts)

    def make_batch(self, index: int) -> TokenBatch:
        noise_TE = generator(self.seed, Stream.NOISE, index).gumbel(size=(self.num_tokens, self.num_experts))
        strength = 0.0
        if self.peak_load is not None:
            strength = solve_strength(noise_TE, self.popularity, self.top_k, self.peak_load)
        scores_TE = np.empty(noise_TE.shape, dtype=np.float32)
        for rows, logits_TE in _logits(noise_TE, strength * self.popularity):
            scores_TE[rows] = softmax(logits_TE)
        sequence_id_T = torch.arange(self.num_tokens) // self.sequence_length
        return TokenBatch(torch.from_numpy(scores_TE), sequence_id_T)

    def describe(self) -> dict[str, object]:
        achieved = self.achieved()
        skew = "no skew asked for" if self.peak_load is None else f"peak load {self.peak_load:g}"
        return {
            "kind": "synthetic",
            "description": (
                f"synthetic softmax scores, {skew} (achieved {achieved['peak_load']:.3g}), {self.num_experts} experts, "
                f"top-{self.top_k}, {self.num_batches} x {self.num_tokens} tokens in sequences of "
                f"{self.sequence_length}, seed {self.seed}"
            ),
            "tail_model": None,
            "targets": {"peak_load": self.peak_load},
            "achieved": achieved,
            "recording": None,
        }


def solve_strength(
    noise_TE: NDArray[np.float64], popularity_E: NDArray[np.float64], top_k: int, peak_load: float
) -> float:
    """Find how strongly popularity must weigh for the busiest expert to get ``peak_load`` times the mean load.

    Turning the strength up swaps one token's choice at a time, so the busiest expert's load moves
    in steps of one token and bisection between a strength that gives too little and one that gives too much
    ends within a token of the target (it stops within ``TOLERANCE``).

    Raises:
        ValueError: noise alone gives more than ``peak_load``; the message gives the range.
    """
    num_tokens, num_experts = noise_TE.shape
    mean_load = num_tokens * top_k / num_experts
    target = peak_load * mean_load
    tolerance = max(TOLERANCE * target, 1.0)

    def excess(strength: float) -> float:
        return _busiest(noise_TE, strength * popularity_E, top_k) - target

    at_zero = excess(0.0)
    if at_zero > tolerance:
        least = math.ceil((at_zero + target) / mean_load * 1000) / 1000
        raise ValueError(
            f"peak_load: expected {least:g} to {num_experts / top_k:g} (what noise alone gives with {num_tokens} "
            f"tokens, to experts / top_k), got {peak_load:g}"
        )
    if at_zero >= -tolerance:
        return 0.0
    low, high = 0.0, 0.5
    # Ends: with strength enough the most popular expert is every token's.
    while (surplus := excess(high)) < -tolerance:
        low, high = high, 2 * high
    strength = high
    while abs(surplus) > tolerance:
        low, high = (strength, high) if surplus < 0 else (low, strength)
        strength = (low + high) / 2
        assert low < strength < high, "the load jumped by more than the tolerance"
        surplus = excess(strength)
    return strength


def softmax(logits_TE: NDArray[np.float64]) -> NDArray[np.float32]:
    """Softmax over experts in float32, without ties or zeros: a row's scores sort exactly as its logits."""
    top_T1 = logits_TE.max(axis=1, keepdims=True)
    span_T1 = top_T1 - logits_TE.min(axis=1, keepdims=True)
    odds_TE = np.exp((logits_TE - top_T1) * np.minimum(1.0, MAX_LOGIT_SPAN / np.maximum(span_T1, MAX_LOGIT_SPAN)))
    scores_TE = (odds_TE / odds_TE.sum(axis=1, keepdims=True)).astype(np.float32)
    separate_ties(scores_TE, logits_TE)
    return scores_TE


def _busiest(noise_TE: NDArray[np.float64], bias_E: NDArray[np.float64], top_k: int) -> int:
    """Load of the busiest expert under top-k of noise + bias. (The K-th best value is cheaper than the K best.)"""
    load_E = np.zeros(noise_TE.shape[1], dtype=np.int64)
    for _, logits_TE in _logits(noise_TE, bias_E):
        kth = noise_TE.shape[1] - top_k
        load_E += np.count_nonzero(logits_TE >= np.partition(logits_TE, kth, axis=1)[:, kth, None], axis=0)
    return int(load_E.max())


def _logits(noise_TE: NDArray[np.float64], bias_E: NDArray[np.float64]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    for start in range(0, noise_TE.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        yield rows, noise_TE[rows] + bias_E
