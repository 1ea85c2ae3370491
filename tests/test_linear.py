"""Straight lines by hand and beside scipy's."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moe_ep_bench.timing.linear import cost_fit, linear_fit


def test_the_interval_by_hand() -> None:
    # Slope 1, residuals 1, -2, 1, loads -1, 0, 1 from their mean: standard error sqrt(6 / 1 / 2).
    # t with one degree of freedom is 12.7062 at 97.5 %.
    fit = linear_fit([0, 1, 2], [1.0, -1.0, 3.0])
    assert (fit.intercept_us, fit.slope_us) == pytest.approx((0, 1))
    assert fit.slope_high_us - 1 == pytest.approx(12.7062 * math.sqrt(3), rel=1e-5)
    assert 1 - fit.slope_low_us == pytest.approx(12.7062 * math.sqrt(3), rel=1e-5)
    assert fit.r2 == pytest.approx(1 - 6 / 8)


@settings(max_examples=15)
@given(
    num_points=st.integers(3, 40),
    seed=st.integers(0, 1000),
    slope=st.floats(-5, 5),
    scale=st.sampled_from([1.0, 1e3, 1e6]),
    noise=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_scipy_finds_the_same(num_points: int, seed: int, slope: float, scale: float, noise: float) -> None:
    random = np.random.default_rng(seed)
    loads = scale * (1 + random.random(num_points))
    times = 50 + slope * loads + noise * random.standard_normal(num_points)
    fit, oracle = linear_fit(loads, times), stats.linregress(loads, times)
    margin = stats.t.ppf(0.975, num_points - 2) * oracle.stderr
    # Lengths that cancel in the sums are as large as slope x scale.
    error = 1e-9 * (abs(slope) + (noise + 1) / scale)
    assert fit.slope_us == pytest.approx(oracle.slope, rel=1e-9, abs=error)
    assert fit.intercept_us == pytest.approx(oracle.intercept, rel=1e-7, abs=1e-9 * (abs(slope) * scale + noise))
    assert fit.r2 == pytest.approx(oracle.rvalue**2, abs=1e-9)
    if oracle.rvalue**2 < 1 - 1e-9:
        assert fit.slope_high_us - fit.slope_us == pytest.approx(margin, rel=1e-4)
        assert fit.slope_us - fit.slope_low_us == pytest.approx(margin, rel=1e-4)
        at_none = stats.t.ppf(0.975, num_points - 2) * oracle.intercept_stderr
        assert fit.intercept_high_us - fit.intercept_us == pytest.approx(at_none, rel=1e-4)
        assert fit.intercept_us - fit.intercept_low_us == pytest.approx(at_none, rel=1e-4)


@pytest.mark.parametrize(
    ("fit", "points", "words"),
    [
        (linear_fit, ([1, 2], [1, 2]), "at least 3 points, got 2"),
        (linear_fit, ([4, 4, 4], [1, 2, 3]), "expected loads that differ, got 4 at all 3 points"),
        (linear_fit, ([1, 2, 3], [1, 2]), r"a time for each load, got shapes \(3,\), \(2,\)"),
        (linear_fit, ([1, 2, math.nan], [1, 2, 3]), "finite"),
        (cost_fit, ([1, 2, 3], [1, 5, 2], [1, 2, 3]), "at least 4 points"),
        (cost_fit, ([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 5]), "one that follows"),
        (cost_fit, ([1, 2, 3, math.nan], [2, 4, 6, 7], [1, 2, 3, 5]), "finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(fit: Callable, points: tuple[list, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(*points)


def test_the_plane_is_numpy_s_least_squares() -> None:
    random = np.random.default_rng(2)
    activated, pairs = random.integers(1, 128, 60), random.integers(8, 4096, 60)
    times = 20 + 3 * activated + 0.1 * pairs + random.standard_normal(60)
    fit = cost_fit(activated, pairs, times)
    oracle, *_ = np.linalg.lstsq(np.stack([np.ones(60), activated, pairs], axis=1), times, rcond=None)
    assert (fit.intercept_us, fit.per_expert_us, fit.per_pair_us) == pytest.approx(tuple(oracle), rel=1e-6)
    assert 0.99 < fit.r2 < 1


def test_the_planes_intervals_hold_as_often_as_they_say() -> None:
    random = np.random.default_rng(4)
    truth, held = np.array([37, 3.5, 0.02]), np.zeros(3)
    for _ in range(500):
        activated, pairs = random.integers(1, 128, 10), random.integers(8, 512, 10)
        times = truth[0] + truth[1] * activated + truth[2] * pairs + random.standard_normal(10)
        low, high = np.array(cost_fit(activated, pairs, times).intervals_us).T
        held += (low <= truth) & (truth <= high)
    # A standard deviation is sqrt(0.95 x 0.05 / 500) = 1 %.
    np.testing.assert_allclose(held / 500, 0.95, atol=0.03)


def test_points_of_one_batch_count_as_one_where_they_share_its_error() -> None:
    random = np.random.default_rng(5)
    batch = np.repeat(np.arange(12), 5)
    held = {"batches": 0, "points": 0}
    for _ in range(300):
        pairs, error = random.integers(8, 512, 12)[batch], 5 * random.standard_normal(12)[batch]
        activated = random.integers(1, 128, 60)
        times = 37 + 3.5 * activated + 0.02 * pairs + error + random.standard_normal(60)
        for name, cluster in (("batches", batch), ("points", None)):
            low, high = cost_fit(activated, pairs, times, cluster_N=cluster).intervals_us[2]
            held[name] += low <= 0.02 <= high
    assert held["batches"] / 300 >= 0.9
    assert held["points"] / 300 <= 0.75  # what they would promise as independent ones


def test_no_more_batches_than_values_give_no_interval() -> None:
    fit = linear_fit([1, 2, 1, 2], [1.0, 2.1, 1.1, 2.0], cluster_N=[0, 0, 1, 1])
    assert (fit.slope_low_us, fit.slope_high_us) == (-math.inf, math.inf)
