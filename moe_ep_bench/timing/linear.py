"""Is a layer's time a straight line over its largest load?

Capacity-aware inference rests on that: an MoE layer is done when its fullest expert is, so its latency grows in
proportion to the largest load (arXiv 2503.05066, Eq. 4). LASER states it as throughput, which falls with the largest
load (arXiv 2510.03293, section 3.1): with the tokens of a batch given, throughput is tokens over time, and a time of
intercept + slope x load makes it a falling curve of the load. Ordinary least squares says what the slope is and how
sure that is, R2 how much of the times' variation the line explains.

Points of one batch, under several policies or on several ranks, share its length and its disturbances. Taken as
independent they would make intervals too narrow. So points may be named by their *cluster*: residuals are then summed
by cluster before they are squared (Liang & Zeger, Biometrika 73, 1986, with the correction G / (G - 1) x
(N - 1) / (N - V) of Cameron & Miller, J. Human Resources 50, 2015), under Student's t with G - V degrees of freedom.

Shapes: N = measured points, V = values that are fitted, G = clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit  # Student's quantile; scipy.stats imports slowly

from moe_ep_bench.errors import UserError

LEVEL = 0.95


@dataclass(frozen=True)
class CostFit:
    """time = intercept + per_expert x activated experts + per_pair x pairs (OEA, arXiv 2511.02237, section 2: b and a).

    Attributes:
        intervals_us: 95 % intervals of the three, as ``LinearFit`` has them.
        r2: share of the times' variation that it explains; NaN where they do not vary.
        num_points: N.
    """

    intercept_us: float
    per_expert_us: float
    per_pair_us: float
    intervals_us: tuple[tuple[float, float], ...]
    r2: float
    num_points: int


@dataclass(frozen=True)
class LinearFit:
    """time = intercept + slope x load.

    Attributes:
        intercept_us: time at no load; intercept_low_us and intercept_high_us are its interval.
        slope_us: microseconds for one more of whatever the load counts.
        slope_low_us, slope_high_us: the slope's 95 % interval, by Student's t. Infinite where there are no more
            clusters than values. Without clusters points are taken as independent, and as alike in their scatter.
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


def cost_fit(
    activated_N: ArrayLike, pairs_N: ArrayLike, times_us_N: ArrayLike, *, cluster_N: ArrayLike | None = None
) -> CostFit:
    """Fit times to activated experts and pairs by ordinary least squares; ``cluster_N`` as in ``linear_fit``.

    Raises:
        ValueError: fewer than four points, numbers that are not finite, columns of different lengths, or activated
            experts and pairs of which one follows from the other.
    """
    what = "activated experts and pairs"
    values, intervals, r2 = _least_squares([activated_N, pairs_N], times_us_N, what, cluster_N)
    return CostFit(*values, tuple(intervals), r2, len(np.asarray(times_us_N)))


def linear_fit(loads_N: ArrayLike, times_us_N: ArrayLike, *, cluster_N: ArrayLike | None = None) -> LinearFit:
    """Fit times to loads by ordinary least squares.

    Args:
        loads_N: the largest load of each point, in any unit.
        times_us_N: what it took.
        cluster_N: which points are not independent of each other, by equal words or numbers; None = all are.

    Raises:
        ValueError: fewer than three points, loads that are all the same, numbers that are not finite, or not as many
            times as loads.
    """
    (intercept_us, slope_us), (of_intercept, of_slope), r2 = _least_squares([loads_N], times_us_N, "loads", cluster_N)
    return LinearFit(intercept_us, slope_us, *of_slope, *of_intercept, r2, len(np.asarray(times_us_N)))


def _least_squares(
    columns: Sequence[ArrayLike], times_us_N: ArrayLike, what: str, cluster_N: ArrayLike | None
) -> tuple[list[float], list[tuple[float, float]], float]:
    """Values of an intercept and of each column, their 95 % intervals, and R2.

    Raises:
        ValueError: see ``cost_fit``; ``what`` names the columns.
    """
    arrays = [np.asarray(one, dtype=np.float64) for one in (*columns, times_us_N)]
    if arrays[-1].ndim != 1 or len({one.shape for one in arrays}) > 1:
        shapes = ", ".join(str(one.shape) for one in arrays)
        each = "load" if len(columns) == 1 else f"point of {what}"
        raise UserError(f"fit: expected a time for each {each}, got shapes {shapes}")
    *known, times_N = arrays
    num_points, fewest = len(times_N), len(arrays) + 1
    if num_points < fewest:
        raise UserError(f"fit: expected at least {fewest} points, got {num_points}")
    if not all(np.isfinite(one).all() for one in arrays):
        raise UserError(f"fit: expected finite {what} and times, got others")
    columns_NV = np.stack([np.ones_like(times_N), *known], axis=1)
    scale_V = np.abs(columns_NV).max(axis=0)
    scaled_NV = columns_NV / np.where(scale_V > 0, scale_V, 1)
    solution_V, _, rank, _ = np.linalg.lstsq(scaled_NV, times_N, rcond=1e-9)
    if rank < columns_NV.shape[1]:
        if len(known) == 1:
            raise UserError(f"fit: expected loads that differ, got {known[0][0]:g} at all {num_points} points")
        raise UserError(f"fit: expected {what} that vary on their own, got one that follows")
    residual_N, from_mean_N = times_N - scaled_NV @ solution_V, times_N - times_N.mean()
    residual, variation = float(residual_N @ residual_N), float(from_mean_N @ from_mean_N)
    freedom = num_points - len(arrays)
    # Of the columns' triangular factor, whose inverse is as sure as they are independent.
    inverse_VV = np.linalg.inv(np.linalg.qr(scaled_NV, mode="r"))
    deviations_V = math.sqrt(residual / freedom) * np.linalg.norm(inverse_VV, axis=1) / scale_V
    if cluster_N is not None:
        cluster_N = np.unique(np.asarray(cluster_N), return_inverse=True)[1]
        num_clusters = int(cluster_N.max()) + 1
        sums_GV = np.zeros((num_clusters, len(arrays)))
        np.add.at(sums_GV, cluster_N, scaled_NV * residual_N[:, None])
        correction = num_clusters / max(num_clusters - 1, 1) * (num_points - 1) / freedom
        freedom = num_clusters - len(arrays)
        deviations_V = np.sqrt(correction) * np.linalg.norm(sums_GV @ inverse_VV @ inverse_VV.T, axis=0) / scale_V
    values_V = solution_V / scale_V
    # With no more clusters than values their sums are all but 0, and say nothing.
    is_known = freedom > 0
    margins_V = (
        float(stdtrit(freedom, (1 + LEVEL) / 2)) * deviations_V if is_known else np.full_like(values_V, math.inf)
    )
    r2 = 1 - residual / variation if np.any(times_N != times_N[0]) else math.nan
    ends = zip((values_V - margins_V).tolist(), (values_V + margins_V).tolist(), strict=True)
    return values_V.tolist(), list(ends), r2
