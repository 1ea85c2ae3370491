"""Claims about paired speedups, held against distributions whose answer is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.measure import statistics
from moe_ep_bench.measure.statistics import (
    MIN_BATCHES,
    Estimate,
    NoiseFloor,
    bootstrap_median_interval,
    estimate_median,
    judge,
    noise_floor,
    paired_ratios,
)


def samples(values_BI) -> pd.Series:
    """Values indexed by (batch, iteration), from a list of batches."""
    return pd.Series(
        {(batch, i): float(value) for batch, values in enumerate(values_BI) for i, value in enumerate(values)}
    ).rename_axis(["batch", "iteration"])


def lognormal(generator, median, *, batches, iterations, batch_sigma, sigma) -> pd.Series:
    batch_B1 = generator.normal(0, batch_sigma, (batches, 1))
    return samples(median * np.exp(batch_B1 + generator.normal(0, sigma, (batches, iterations))))


def slow_interval(values: pd.Series, num_resamples: int) -> tuple[float, float]:
    """The same bootstrap, spelled out: draw batches, draw iterations of each, take the median of all."""
    generator = np.random.default_rng(99)
    groups = [list(group) for _, group in values.groupby(level="batch")]
    medians = []
    for _ in range(num_resamples):
        drawn = []
        for _ in groups:
            group = groups[generator.integers(len(groups))]
            drawn += [group[generator.integers(len(group))] for _ in group]
        medians.append(np.median(drawn))
    return tuple(np.quantile(medians, [0.025, 0.975]))


def test_ratios_pair_by_batch_and_iteration_not_by_position():
    baseline = samples([[10, 20], [30, 40]])
    case = samples([[5, 5], [5, 8]]).iloc[[3, 0, 2, 1]]
    assert paired_ratios(baseline, case).to_dict() == {(0, 0): 2.0, (0, 1): 4.0, (1, 0): 6.0, (1, 1): 5.0}


def test_iterations_without_a_partner_are_left_out():
    ratios = paired_ratios(samples([[10, 20], [30, 40]]), samples([[5]]))
    assert ratios.to_dict() == {(0, 0): 2.0}
    assert estimate_median(paired_ratios(samples([[10]]), samples([[5]]).rename({0: 7}, level="batch"))) is None


def test_median_of_a_lognormal_is_found():
    drawn = lognormal(np.random.default_rng(3), 1.4, batches=40, iterations=50, batch_sigma=0.05, sigma=0.1)
    estimate = estimate_median(drawn)
    assert estimate.median == pytest.approx(1.4, rel=0.03)
    assert estimate.low < 1.4 < estimate.high
    assert 0.01 < estimate.high - estimate.low < 0.1


def test_interval_covers_the_true_median_as_often_as_it_says():
    generator = np.random.default_rng(7)
    repetitions, covered = 200, 0
    for _ in range(repetitions):
        drawn = lognormal(generator, 1.2, batches=20, iterations=4, batch_sigma=0.1, sigma=0.05)
        low, high = bootstrap_median_interval(drawn, num_resamples=200)
        covered += low <= 1.2 <= high
    # 95 % in the limit of many batches; 200 repetitions scatter by 1.5 %, and both ends are claims.
    assert 0.88 <= covered / repetitions <= 0.99


def test_interval_is_as_wide_as_batches_differ_not_as_iterations_do():
    generator = np.random.default_rng(5)
    apart = lognormal(generator, 1.0, batches=12, iterations=100, batch_sigma=0.2, sigma=0.01)
    low, high = bootstrap_median_interval(apart)
    flat = samples([[value] for value in apart])  # as if each iteration were a batch of its own
    flat_low, flat_high = bootstrap_median_interval(flat, num_resamples=200)
    assert high - low > 2 * (flat_high - flat_low)


def test_identical_samples_give_an_interval_of_no_width():
    assert estimate_median(samples([[1.25] * 3] * MIN_BATCHES)) == Estimate(1.25, 1.25, 1.25, True, MIN_BATCHES)


def test_too_few_batches_give_the_range_and_no_interval():
    few = [[1.0, 2.0, 4.0]] * (MIN_BATCHES - 1)
    assert estimate_median(samples(few)) == Estimate(2.0, 1.0, 4.0, False, MIN_BATCHES - 1)
    assert estimate_median(samples([*few, [2.0]])).is_interval


def test_vectorised_bootstrap_equals_the_slow_one_where_batches_are_uneven():
    generator = np.random.default_rng(11)
    uneven = samples([generator.lognormal(batch / 20, 0.1, 1 + batch % 4) for batch in range(11)])
    assert bootstrap_median_interval(uneven, num_resamples=4000) == pytest.approx(slow_interval(uneven, 2000), abs=0.02)


def test_equal_seeds_give_equal_intervals():
    drawn = lognormal(np.random.default_rng(1), 1.0, batches=10, iterations=5, batch_sigma=0.1, sigma=0.1)
    assert bootstrap_median_interval(drawn) == bootstrap_median_interval(drawn.copy())
    assert bootstrap_median_interval(drawn) != bootstrap_median_interval(drawn, seed=1)


def test_all_resamples_are_drawn_when_memory_holds_few_at_a_time(monkeypatch):
    drawn = lognormal(np.random.default_rng(1), 1.0, batches=10, iterations=5, batch_sigma=0.1, sigma=0.1)
    whole = bootstrap_median_interval(drawn)
    sizes = []
    inner = statistics._resampled_medians
    monkeypatch.setattr(statistics, "_DRAWS_AT_ONCE", 50 * 300)
    monkeypatch.setattr(statistics, "_resampled_medians", lambda *a: sizes.append(a[2]) or inner(*a))
    assert bootstrap_median_interval(drawn) == pytest.approx(whole, abs=0.02)
    assert sizes == [300] * 6 + [200]


@given(st.floats(0.5, 2.0), st.floats(0.5, 2.0))
@settings(max_examples=50, deadline=None)
def test_noise_floor_is_symmetric_and_holds_the_interval_and_one(one, other):
    low, high = sorted((one, other))
    floor = noise_floor(Estimate(low, low, high, True, 10))
    assert floor.low <= low <= high <= floor.high
    assert floor.low <= 1 <= floor.high
    assert floor.low * floor.high == pytest.approx(1)
    assert min(abs(math.log(floor.high / end)) for end in (low, high, 1 / low, 1 / high)) < 1e-9  # no wider than needed


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.1, 1.2, "faster"),
        (0.8, 0.9, "slower"),
        (0.97, 1.03, "no difference"),
        (1.01, 1.03, "no difference"),  # beyond 1, but not beyond the noise
        (1.03, 1.2, "cannot say"),  # partly inside the floor
        (0.9, 1.2, "cannot say"),
        (0.8, 0.96, "cannot say"),
    ],
)
def test_verdict_holds_the_interval_against_the_floor(low, high, verdict):
    assert judge(Estimate((low + high) / 2, low, high, True, 10), NoiseFloor(1 / 1.05, 1.05)) == verdict


def test_without_interval_floor_or_pairs_there_is_no_verdict():
    clear = Estimate(2.0, 1.9, 2.1, True, 10)
    floor = NoiseFloor(1 / 1.01, 1.01)
    assert judge(clear, floor) == "faster"
    for speedup, noise in itertools.product((clear, None, Estimate(2.0, 1.9, 2.1, False, 9)), (floor, None)):
        if (speedup, noise) != (clear, floor):
            assert judge(speedup, noise) == "cannot say"
