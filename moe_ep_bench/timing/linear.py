"""Is a layer's time a straight line over its largest load?

Capacity-aware inference rests on that: an MoE layer is done when its fullest expert is, so its latency grows in
proportion to the largest load (arXiv 2503.05066, Eq. 4). LASER states it as throughput, which falls with the largest
load (arXiv 2510.03293, section 3.1): with the tokens of a batch given, throughput is tokens over time, and a time of
intercept + slope x load makes it a falling curve of the load. Ordinary least squares says what the slope is and how
sure that is, R2 how much of the times' variation the line explains.

Shapes: N = measured points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit  # Student's quantile; scipy.stats imports slowly

from moe_ep_bench.errors import UserError

LEVEL = 0.95
_MIN_POINTS = 3


@dataclass(frozen=True)
class CostFit:
    """time = intercept + per_expert x activated experts + per_pair x pairs (OEA, arXiv 2511.02237, section 2: b and a).

    Attributes:
        intervals_us: 95 % intervals of the three, as ``LinearFit`` has them, with N - 3 degrees of freedom.
        r2: share of the times' variation that it explains; NaN where they do not vary.
        num_points: N.
    """

    intercept_us: float
    per_expert_us: float
    per_pair_us: float
    intervals_us: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    r2: float
    num_points: int


def cost_fit(activated_N: ArrayLike, pairs_N: ArrayLike, times_us_N: ArrayLike) -> CostFit:
    """Fit times to activated experts and pairs by ordinary least squares.

    Raises:
        ValueError: fewer than four points, numbers that are not finite, columns of different lengths, or activated
            experts and pairs of which one follows from the other.
    """
    activated_N, pairs_N, times_N = (np.asarray(one, dtype=np.float64) for one in (activated_N, pairs_N, times_us_N))
    if times_N.ndim != 1 or not activated_N.shape == pairs_N.shape == times_N.shape:
        shapes = f"{activated_N.shape}, {pairs_N.shape}, {times_N.shape}"
        raise UserError(f"fit: expected activated experts, pairs and a time for each point, got shapes {shapes}")
    if len(times_N) <= _MIN_POINTS:
        raise UserError(f"fit: expected at least {_MIN_POINTS + 1} points, got {len(times_N)}")
    if not np.all(np.isfinite(activated_N) & np.isfinite(pairs_N) & np.isfinite(times_N)):
        raise UserError("fit: expected finite activated experts, pairs and times, got others")
    columns = np.stack([np.ones_like(times_N), activated_N, pairs_N], axis=1)
    scale = np.abs(columns).max(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(columns / np.where(scale > 0, scale, 1), times_N, rcond=1e-9)
    if rank < columns.shape[1]:
        raise UserError("fit: expected activated experts and pairs that vary on their own, got one that follows")
    values = solution / scale
    residual_N, from_mean_N = times_N - columns @ values, times_N - times_N.mean()
    residual, variation = float(residual_N @ residual_N), float(from_mean_N @ from_mean_N)
    freedom = len(times_N) - columns.shape[1]
    # Of the columns' triangular factor, whose inverse is as sure as they are independent.
    inverse = np.linalg.inv(np.linalg.qr(columns / scale, mode="r"))
    deviations = math.sqrt(residual / freedom) * np.linalg.norm(inverse, axis=1) / scale
    margins = float(stdtrit(freedom, (1 + LEVEL) / 2)) * deviations
    (low, high) = (values - margins).tolist(), (values + margins).tolist()
    return CostFit(
        *values.tolist(),
        intervals_us=((low[0], high[0]), (low[1], high[1]), (low[2], high[2])),
        r2=1 - residual / variation if np.any(times_N != times_N[0]) else math.nan,
        num_points=len(times_N),
    )


@dataclass(frozen=True)
class LinearFit:
    """time = intercept + slope x load.

    Attributes:
        intercept_us: time at no load; intercept_low_us and intercept_high_us are its interval.
        slope_us: microseconds for one more of whatever the load counts.
        slope_low_us, slope_high_us: the slope's 95 % interval, by Student's t with N - 2 degrees of freedom. It takes
            the points as independent and their scatter as the same at every load.
        r2: share of the times' variation that the line explains; NaN where they do not vary.
        num_points: N.
    """

    intercept_us: float
    slope_us: float
    slope_low_us: float
    slope_high_us: float
    intercept_low_us: float
    intercept_high_us: float
    r2: float
    num_points: int


def linear_fit(loads_N: ArrayLike, times_us_N: ArrayLike) -> LinearFit:
    """Fit times to loads by ordinary least squares.

    Args:
        loads_N: the largest load of each point, in any unit.
        times_us_N: what it took.

    Raises:
        ValueError: fewer than three points, loads that are all the same, numbers that are not finite, or not as many
            times as loads.
    """
    loads_N, times_N = np.asarray(loads_N, dtype=np.float64), np.asarray(times_us_N, dtype=np.float64)
    if loads_N.ndim != 1 or loads_N.shape != times_N.shape:
        raise UserError(f"fit: expected a time for each load, got shapes {loads_N.shape}, {times_N.shape}")
    num_points = len(loads_N)
    if num_points < _MIN_POINTS:
        raise UserError(f"fit: expected at least {_MIN_POINTS} points, got {num_points}")
    if not np.all(np.isfinite(loads_N) & np.isfinite(times_N)):
        raise UserError("fit: expected finite loads and times, got others")
    if np.all(loads_N == loads_N[0]):
        raise UserError(f"fit: expected loads that differ, got {loads_N[0]:g} at all {num_points} points")
    from_mean_N, times_from_mean_N = loads_N - loads_N.mean(), times_N - times_N.mean()
    spread = float(from_mean_N @ from_mean_N)
    slope_us = float(from_mean_N @ times_from_mean_N) / spread
    residual_N = times_from_mean_N - slope_us * from_mean_N
    residual, variation = float(residual_N @ residual_N), float(times_from_mean_N @ times_from_mean_N)
    freedom = num_points - 2
    margin_us = float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(residual / freedom / spread)
    # The mean time is as sure as N points make it, and the way from the mean load to none as the slope is.
    at_none_us = margin_us * math.sqrt(spread / num_points + float(loads_N.mean()) ** 2)
    intercept_us = float(times_N.mean() - slope_us * loads_N.mean())
    return LinearFit(
        intercept_us=intercept_us,
        slope_us=slope_us,
        slope_low_us=slope_us - margin_us,
        slope_high_us=slope_us + margin_us,
        intercept_low_us=intercept_us - at_none_us,
        intercept_high_us=intercept_us + at_none_us,
        r2=1 - residual / variation if np.any(times_N != times_N[0]) else math.nan,
        num_points=num_points,
    )
