"""What may be concluded from paired timings.

Baseline and case run back to back on the same batch, so the sample of a speedup is the *paired
ratio* baseline / case of one (launch, batch, iteration): what the machine does to both cancels.
The point estimate is the median of these ratios. A *launch* is one repetition of the whole job;
all launches use the same batches, and iterations lie inside a (launch, batch) cell.

The interval has two parts, because samples repeat at several levels and only repetition at a level
shows how much that level matters (Kalibera & Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013). Batches are many enough to be resampled; launches are two or three, whose resampling
hardly leaves their range, so they get Student's t instead. With fewer than ``MIN_BATCHES`` batches
an interval would promise more than the data hold: then only the smallest and the largest ratio are given.

What two runs of the *same* case differ by is the noise floor. A speedup counts only beyond it.

Two *jobs* that timed the same cases share no moment: iteration 3 of one has nothing to do with iteration 3 of the
other. What they do share is the batches, for equal case ids mean equal workloads. So the sample of a change is one
ratio per batch, the new job's median over the old one's, in which the batch's own length cancels. What slows or speeds
a whole job (the node, its temperature, where memory came to lie) is the same in all its batches; only other launches
show it. With several, their scatter is added by Student's t for two samples (the deviations of both jobs pooled,
L_old + L_new - 2 degrees of freedom). With one launch on either side the interval speaks of these two launches only.

Shapes: B = batches, L = launches, I = iterations of a cell (the most, where cells differ), S = resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri, stdtrit  # Phi, its inverse, Student's quantile; scipy.stats imports slowly

MIN_BATCHES = 10
LEVEL = 0.95
NUM_RESAMPLES = 2000
# Bounds memory: this many drawn samples are held at a time.
_DRAWS_AT_ONCE = 2**21

# A model of a device has no noise, but errors of this size at least.
LEAST_MODELLED = 0.02
BELOW_MODEL = "below what the model can tell"

Verdict = Literal["faster", "slower", "no difference", "below what the model can tell", "inconclusive"]


@dataclass(frozen=True)
class Estimate:
    """A median and how sure it is.

    Attributes:
        median: the point estimate.
        low, high: the 95 % interval of the median; the smallest and largest sample where
            ``is_interval`` is False.
        is_interval: False when there were fewer than ``MIN_BATCHES`` batches.
        num_batches: batches behind the estimate.
        num_launches: launches behind it; the interval of a single one speaks of that launch only.
    """

    median: float
    low: float
    high: float
    is_interval: bool
    num_batches: int
    num_launches: int


@dataclass(frozen=True)
class NoiseFloor:
    """Speedups from ``low`` to ``high`` (= 1 / low) cannot be told from no change."""

    low: float
    high: float


def paired_ratios(baseline: pd.Series, case: pd.Series) -> pd.Series:
    """Return baseline / case for every (launch, batch, iteration) that both have.

    Times are indexed by (launch, batch, iteration), and ratios likewise; above 1 the case was faster.
    """
    first, second = baseline.align(case, join="inner")
    return (first / second).sort_index()


def estimate_median(samples: pd.Series) -> Estimate | None:
    """Return the median of positive samples indexed by (launch, batch, iteration), with its interval.

    In logs, each side of the interval is the quadrature sum of the bootstrap over batches
    (``bootstrap_median_interval``) and of Student's t on the launches' own medians: widths add as standard errors do
    (Howe, "Approximate confidence limits on the mean of X + Y", JASA 69, 1974). Where several levels matter, noise is
    counted in both parts and the interval is wider than need be, never narrower. A single launch has no second part.
    None without samples.
    """
    if samples.empty:
        return None
    median = float(samples.median())
    num_batches, num_launches = (samples.index.get_level_values(name).nunique() for name in ("batch", "launch"))
    if num_batches < MIN_BATCHES:
        return Estimate(median, float(samples.min()), float(samples.max()), False, num_batches, num_launches)
    low, high = bootstrap_median_interval(samples)
    return Estimate(median, *_widened(median, low, high, _launch_half_width(samples)), True, num_batches, num_launches)


def _widened(median: float, low: float, high: float, half: float) -> tuple[float, float]:
    """The ends of an interval with ``half`` a width more, in logs and in quadrature."""
    down, up = (math.hypot(math.log(end / median), half) for end in (low, high))
    return median * math.exp(-down), median * math.exp(up)


def bootstrap_median_interval(
    samples: pd.Series, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % interval of the median over batches and iterations, for the launches at hand.

    Hierarchical bootstrap: batches are drawn first, then iterations inside each cell of a drawn batch,
    which brings its cells of all launches. Few batches resample too narrowly, so the quantiles taken
    are the expanded ones of Hesterberg ("What Teachers Should Know About the Bootstrap", Am. Stat. 69,
    2015), under which the interval of a mean would be Student's t with B - 1 degrees of freedom.

    Args:
        samples: values indexed by (launch, batch, iteration); cells may be uneven or missing.
        seed: equal seeds give equal intervals.
    """
    values_BLI, counts_BL = _cells(samples)
    generator = np.random.default_rng(seed)
    step = max(1, _DRAWS_AT_ONCE // values_BLI.size)
    medians_S = np.concatenate(
        [
            _resampled_medians(values_BLI, counts_BL, min(step, num_resamples - start), generator)
            for start in range(0, num_resamples, step)
        ]
    )
    num_batches = len(counts_BL)
    tail = ndtr(-math.sqrt(num_batches / (num_batches - 1)) * _student_t(num_batches))
    low, high = np.quantile(medians_S, [tail, 1 - tail])
    return float(low), float(high)


def _cells(samples: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Return values [B, L, I], those of a cell first and then NaN, and how many each cell holds, [B, L]."""
    places = [
        np.unique(samples.index.get_level_values(name), return_inverse=True)[1]
        for name in ("batch", "launch", "iteration")
    ]
    values_BLI = np.full([place.max() + 1 for place in places], np.nan)
    values_BLI[tuple(places)] = samples
    values_BLI.sort(axis=-1)
    return values_BLI, np.count_nonzero(~np.isnan(values_BLI), axis=-1)


def _resampled_medians(
    values_BLI: np.ndarray, counts_BL: np.ndarray, num_resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """Draw B batches, then as many iterations as each of their cells holds, and take the median: shape [S]."""
    num_batches, num_launches, most = values_BLI.shape
    batch_SB11 = generator.integers(num_batches, size=(num_resamples, num_batches, 1, 1))
    launch_L1 = np.arange(num_launches)[:, None]
    counts_SBL1 = counts_BL[batch_SB11, launch_L1]
    shape = (num_resamples, num_batches, num_launches, most)
    # Scaled uniforms, as integers() with a bound per cell takes several times as long.
    iteration_SBLI = (generator.random(shape, dtype=np.float32) * counts_SBL1).astype(np.intp)
    drawn_SBLI = values_BLI[batch_SB11, launch_L1, iteration_SBLI]
    drawn_SBLI[np.arange(most) >= counts_SBL1] = np.nan  # sorts behind all that count
    sorted_SN = np.sort(drawn_SBLI.reshape(num_resamples, -1), axis=1)
    length_S = counts_SBL1.sum(axis=(1, 2, 3))
    row_S = np.arange(num_resamples)
    return (sorted_SN[row_S, (length_S - 1) // 2] + sorted_SN[row_S, length_S // 2]) / 2


def _launch_half_width(samples: pd.Series) -> float:
    """Return half the width, in logs, of Student's interval of the launches' medians; 0 for one launch."""
    log_medians_L = np.log(samples.groupby(level="launch").median())
    num_launches = len(log_medians_L)
    if num_launches == 1:
        return 0.0
    return _student_t(num_launches) * log_medians_L.std(ddof=1) / math.sqrt(num_launches)


def _student_t(count: int) -> float:
    """Return the quantile of a two-sided interval from ``count`` values."""
    return float(stdtrit(count - 1, (1 + LEVEL) / 2))


def noise_floor(same_again: Estimate) -> NoiseFloor:
    """Widen the interval of a native-against-native speedup until it is symmetric about 1.

    Symmetric as a ratio: what slows one of two equal runs by a tenth might as well have slowed the
    other. The floor shares its baseline samples with the speedups on purpose: were the baseline's own
    run off, every speedup would be off by as much, and only a floor against that same baseline shows it.
    """
    ends = (same_again.low, 1 / same_again.low, same_again.high, 1 / same_again.high)
    return NoiseFloor(min(ends), max(ends))


def judge(
    speedup: Estimate | None, floor: NoiseFloor | None, *, is_modelled: bool = False, is_oversubscribed: bool = False
) -> Verdict:
    """Say what a speedup shows; the one rule for every table, figure, page, answer and comparison.

    ``faster`` or ``slower`` when the whole interval lies beyond the noise floor (which holds 1),
    ``no difference`` when it lies within, ``inconclusive`` when it does neither, and wherever there
    is no interval or no floor to hold it against.

    Args:
        is_modelled: times of a modelled device: what differs by less than ``LEAST_MODELLED`` is ``BELOW_MODEL``.
        is_oversubscribed: ranks shared cores, by time slices: nothing can be said.
    """
    if speedup is None or floor is None or not speedup.is_interval or is_oversubscribed:
        return "inconclusive"
    if is_modelled and abs(math.log(speedup.median)) < math.log1p(LEAST_MODELLED):
        return BELOW_MODEL
    if speedup.low > floor.high:
        return "faster"
    if speedup.high < floor.low:
        return "slower"
    if floor.low <= speedup.low and speedup.high <= floor.high:
        return "no difference"
    return "inconclusive"


def equivalence(ratio: Estimate | None, margin: float) -> Literal["equivalent", "different", "inconclusive"]:
    """Say whether a ratio is 1 but for a margin: two one-sided tests (Schuirmann, J. Pharmacokin. Biopharm. 15, 1987).

    ``equivalent`` when the whole 95 % interval lies within [1 / (1 + margin), 1 + margin], which is both tests at
    2.5 %; ``different`` when all of it lies outside; else, and without an interval, ``inconclusive``. So data that say
    little are never taken for agreement.
    """
    if ratio is None or not ratio.is_interval:
        return "inconclusive"
    if 1 / (1 + margin) <= ratio.low and ratio.high <= 1 + margin:
        return "equivalent"
    return "different" if ratio.low > 1 + margin or ratio.high < 1 / (1 + margin) else "inconclusive"


def minimum_detectable_effect(
    speedup: Estimate, floor: NoiseFloor, power: float = 0.8, *, is_modelled: bool = False
) -> float | None:
    """Return the smallest true speedup that ``judge`` would call ``faster`` with that power.

    With the estimate normal in logs, the low end of its interval passes the floor with probability ``power`` when the
    truth lies half a width plus z_power standard errors beyond it. The standard error is the half width over Student's
    quantile for B - 1 degrees of freedom, which the expanded bootstrap amounts to; with several launches it is an upper
    bound. Of a modelled device the median has to reach ``LEAST_MODELLED`` as well. Of ``speedup`` only the width of its
    interval counts; None without one.
    """
    if not speedup.is_interval:
        return None
    half_width = math.log(speedup.high / speedup.low) / 2
    standard_error = half_width / _student_t(speedup.num_batches)
    least = max(math.log(floor.high) + half_width, math.log1p(LEAST_MODELLED) if is_modelled else 0.0)
    return math.exp(least + float(ndtri(power)) * standard_error)


def drift(times: pd.Series) -> float:
    """Return how much slower (+) or faster (-) a launch of one case ended than it began, as a ratio minus 1.

    The last third of its iterations, in order of time, is held against the first third, by medians of times relative to
    their cell, so that batches do not count. Of several launches, the one that drifted furthest counts. 0 with fewer
    than three iterations.
    """
    changes = []
    for _, relative in _relative_to_cell(times).groupby(level="launch"):
        iterations = relative.index.get_level_values("iteration")
        ordered = np.unique(iterations)
        third = len(ordered) // 3
        if third:
            first, last = (relative[iterations.isin(part)].median() for part in (ordered[:third], ordered[-third:]))
            changes.append(float(last / first - 1))
    return max(changes, key=abs, default=0.0)


def _relative_to_cell(times: pd.Series) -> pd.Series:
    return times / times.groupby(level=["launch", "batch"]).transform("median")


# ---- two jobs ----------------------------------------------------------------------------------------------------


def estimate_change(old: pd.Series, new: pd.Series) -> Estimate | None:
    """Return new / old, batch by batch, with its interval.

    Args:
        old, new: positive values of one case in two jobs, indexed by (launch, batch, iteration).

    Returns:
        A ratio above 1 where values grew; None where the jobs share no batch or a batch's median is not above 0.
    """
    ratios = _of_batches(new) / _of_batches(old)
    ratios = ratios[ratios.notna()]
    if ratios.empty or not (np.isfinite(ratios) & (ratios > 0)).all():
        return None
    index = pd.MultiIndex.from_product([[0], ratios.index, [0]], names=["launch", "batch", "iteration"])
    estimate = estimate_median(pd.Series(ratios.to_numpy(), index))
    assert estimate is not None
    counts = [values.index.get_level_values("launch").nunique() for values in (old, new)]
    if not estimate.is_interval or max(counts) == 1:
        return replace(estimate, num_launches=min(counts))
    half = _jobs_half_width(_launch_deviations(old), _launch_deviations(new))
    low, high = _widened(estimate.median, estimate.low, estimate.high, half)
    return replace(estimate, low=low, high=high, num_launches=min(counts))


def joint_floor(old: NoiseFloor, new: NoiseFloor) -> NoiseFloor:
    """The floor of a change: either job's noise is in it, and independent widths add in quadrature, in logs."""
    half = math.hypot(math.log(old.high), math.log(new.high))
    return NoiseFloor(math.exp(-half), math.exp(half))


def _of_batches(values: pd.Series) -> pd.Series:
    return values.groupby(level="batch").median()


def _launch_deviations(values: pd.Series) -> np.ndarray:
    """Logs of how far each launch lies from the others of its job, batches of unequal length put on one scale: [L]."""
    cells = values.groupby(level=["launch", "batch"]).median()
    relative = (cells / cells.groupby(level="batch").transform("median")).transform(np.log)
    medians_L = relative.groupby(level="launch").median().to_numpy()
    return medians_L - medians_L.mean()


def _jobs_half_width(old_L: np.ndarray, new_L: np.ndarray) -> float:
    """Half the width, in logs, of Student's interval of two samples' difference; one at least has two launches."""
    degrees = len(old_L) + len(new_L) - 2
    pooled = math.sqrt((np.square(old_L).sum() + np.square(new_L).sum()) / degrees)
    return float(stdtrit(degrees, (1 + LEVEL) / 2)) * pooled * math.sqrt(1 / len(old_L) + 1 / len(new_L))
