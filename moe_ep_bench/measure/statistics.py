"""What may be concluded from paired timings.

Baseline and case run back to back on the same batch, so the sample of a speedup is the *paired
ratio* baseline / case of one (batch, iteration): what the machine does to both cancels. The point
estimate is the median of these ratios. Iterations of one batch resemble each other more than
iterations of different batches do, so the interval is bootstrapped in the same two steps in which
the samples arose: batches are drawn first, then iterations inside each drawn batch. With fewer
than ``MIN_BATCHES`` batches such an interval would promise more than the data hold: then only the
smallest and the largest ratio are given.

What two runs of the *same* case differ by is the noise floor. A speedup counts only beyond it.

Shapes: B = batches, I = iterations of a batch (the most, where batches differ), S = resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

MIN_BATCHES = 10
NUM_RESAMPLES = 2000
# Bounds memory: this many drawn samples are held at a time.
_DRAWS_AT_ONCE = 2**21

Verdict = Literal["faster", "slower", "no difference", "cannot say"]


@dataclass(frozen=True)
class Estimate:
    """A median and how sure it is.

    Attributes:
        median: the point estimate.
        low, high: the 95 % interval of the median; the smallest and largest sample where
            ``is_interval`` is False.
        is_interval: False when there were fewer than ``MIN_BATCHES`` batches.
        num_batches: batches behind the estimate.
    """

    median: float
    low: float
    high: float
    is_interval: bool
    num_batches: int


@dataclass(frozen=True)
class NoiseFloor:
    """Speedups from ``low`` to ``high`` (= 1 / low) cannot be told from no change."""

    low: float
    high: float


def paired_ratios(baseline: pd.Series, case: pd.Series) -> pd.Series:
    """Return baseline / case for every (batch, iteration) that both have.

    Args:
        baseline, case: times, indexed by (batch, iteration).

    Returns:
        Ratios above 1 where the case was faster, indexed by (batch, iteration); empty when
        nothing pairs.
    """
    first, second = baseline.align(case, join="inner")
    return (first / second).sort_index()


def bootstrap_median_interval(
    samples: pd.Series, *, level: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile interval of the median under a hierarchical bootstrap.

    Args:
        samples: values indexed by (batch, iteration); batches may hold unequal numbers.
        level: share of resampled medians that the interval covers.
        seed: equal seeds give equal intervals.
    """
    groups = [group.to_numpy() for _, group in samples.groupby(level="batch")]
    counts_B = np.array([len(group) for group in groups])
    values_BI = np.full((len(groups), counts_B.max()), np.inf)
    for row, group in zip(values_BI, groups, strict=True):
        row[: len(group)] = group

    generator = np.random.default_rng(seed)
    step = max(1, _DRAWS_AT_ONCE // values_BI.size)
    medians_S = np.concatenate(
        [
            _resampled_medians(values_BI, counts_B, min(step, num_resamples - start), generator)
            for start in range(0, num_resamples, step)
        ]
    )
    low, high = np.quantile(medians_S, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _resampled_medians(
    values_BI: np.ndarray, counts_B: np.ndarray, num_resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """Draw B batches, then as many iterations as each holds, and take the median: shape [S]."""
    num_batches, most = values_BI.shape
    batch_SB1 = generator.integers(num_batches, size=(num_resamples, num_batches, 1))
    counts_SB1 = counts_B[batch_SB1]
    iteration_SBI = generator.integers(counts_SB1, size=(num_resamples, num_batches, most))
    drawn_SBI = values_BI[batch_SB1, iteration_SBI]
    drawn_SBI[np.arange(most) >= counts_SB1] = np.inf  # sorts behind all that count
    sorted_SN = np.sort(drawn_SBI.reshape(num_resamples, -1), axis=1)
    length_S = counts_SB1.sum(axis=(1, 2))
    row_S = np.arange(num_resamples)
    return (sorted_SN[row_S, (length_S - 1) // 2] + sorted_SN[row_S, length_S // 2]) / 2


def estimate_median(samples: pd.Series) -> Estimate | None:
    """Return the median of samples indexed by (batch, iteration), with its interval; None when empty."""
    if samples.empty:
        return None
    num_batches = samples.index.get_level_values("batch").nunique()
    is_interval = num_batches >= MIN_BATCHES
    low, high = bootstrap_median_interval(samples) if is_interval else (float(samples.min()), float(samples.max()))
    return Estimate(float(samples.median()), low, high, is_interval, num_batches)


def noise_floor(same_again: Estimate) -> NoiseFloor:
    """Widen the interval of a native-against-native speedup until it is symmetric about 1.

    Symmetric as a ratio: what slows one of two equal runs by a tenth might as well have slowed the other.
    """
    ends = (same_again.low, 1 / same_again.low, same_again.high, 1 / same_again.high)
    return NoiseFloor(min(ends), max(ends))


def judge(speedup: Estimate | None, floor: NoiseFloor | None) -> Verdict:
    """Say what a speedup shows.

    ``faster`` or ``slower`` when the whole interval lies beyond the noise floor (which holds 1),
    ``no difference`` when it lies within, ``cannot say`` when it does neither, and wherever there
    is no interval or no floor to hold it against.
    """
    if speedup is None or floor is None or not speedup.is_interval:
        return "cannot say"
    if speedup.low > floor.high:
        return "faster"
    if speedup.high < floor.low:
        return "slower"
    if floor.low <= speedup.low and speedup.high <= floor.high:
        return "no difference"
    return "cannot say"
