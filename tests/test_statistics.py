"""Claims about paired speedups, held against distributions whose answer is known."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.timing import statistics
from moe_ep_bench.timing.statistics import (
    BELOW_MODEL,
    MIN_BATCHES,
    Estimate,
    NoiseFloor,
    bootstrap_median_interval,
    drift,
    estimate_median,
    judge,
    minimum_detectable_effect,
    noise_floor,
    paired_ratios,
)


def samples(*launches_BI) -> pd.Series:
    """Values indexed by (launch, batch, iteration), from a list of batches for each launch."""
    return pd.Series(
        {
            (launch, batch, i): float(value)
            for launch, values_BI in enumerate(launches_BI)
            for batch, values in enumerate(values_BI)
            for i, value in enumerate(values)
        }
    ).rename_axis(["launch", "batch", "iteration"])


def times(
    generator, median=1.0, *, launches=1, batches=10, iterations=3, launch_effect=0.0, batch_effect=0.0, sigma=0.0,
    disturbed=0.0, uneven=False,
) -> pd.Series:  # fmt: skip
    """Log-normal times of one case; uneven: batches of very unequal length, the same for all cases; some disturbed."""
    launch_L11 = generator.normal(0, launch_effect, (launches, 1, 1))
    batch_B1 = generator.normal(0, batch_effect, (batches, 1))
    noise_LBI = generator.normal(0, sigma, (launches, batches, iterations))
    length_B1 = np.geomspace(1, 3 if uneven else 1, batches)[:, None]
    is_longer_LBI = generator.random(noise_LBI.shape) < disturbed
    longer_LBI = np.where(is_longer_LBI, generator.uniform(1.5, 4, noise_LBI.shape), 1.0)
    values_LBI = median * length_B1 * np.exp(launch_L11 + batch_B1 + noise_LBI) * longer_LBI
    index = pd.MultiIndex.from_product(map(range, values_LBI.shape), names=["launch", "batch", "iteration"])
    return pd.Series(values_LBI.ravel(), index)


def slow_interval(values: pd.Series, num_resamples: int) -> tuple[float, float]:
    """The same bootstrap, spelled out: draw batches, draw iterations in each of their cells, take the median of all."""
    generator = np.random.default_rng(99)
    batches = [[list(cell) for _, cell in batch.groupby(level="launch")] for _, batch in values.groupby(level="batch")]
    medians = []
    for _ in range(num_resamples):
        drawn = []
        for _ in batches:
            for cell in batches[generator.integers(len(batches))]:
                drawn += [cell[generator.integers(len(cell))] for _ in cell]
        medians.append(np.median(drawn))
    # Eleven batches: Phi(-sqrt(11 / 10) * 2.228), with t = 2.228 for 10 degrees of freedom from a table.
    return tuple(np.quantile(medians, [0.00972, 1 - 0.00972]))


@pytest.fixture
def fewer_resamples(monkeypatch):
    """Simulations need many intervals, each of which may be a little rougher."""
    rough = functools.partial(bootstrap_median_interval, num_resamples=400)
    monkeypatch.setattr(statistics, "bootstrap_median_interval", rough)


def test_ratios_pair_by_launch_batch_and_iteration_not_by_position():
    baseline = samples([[10, 20], [30]], [[40, 50], [60]])
    case = samples([[5, 5], [5]], [[8, 5], [6]]).iloc[[3, 0, 5, 2, 1, 4]]
    assert paired_ratios(baseline, case).to_dict() == {
        (0, 0, 0): 2.0,
        (0, 0, 1): 4.0,
        (0, 1, 0): 6.0,
        (1, 0, 0): 5.0,
        (1, 0, 1): 10.0,
        (1, 1, 0): 10.0,
    }


def test_samples_without_a_partner_are_left_out():
    ratios = paired_ratios(samples([[10, 20], [30, 40]], [[50]]), samples([[5]]))
    assert ratios.to_dict() == {(0, 0, 0): 2.0}
    for level in ("launch", "batch", "iteration"):
        elsewhere = samples([[5]]).rename({0: 7}, level=level)
        assert estimate_median(paired_ratios(samples([[10]]), elsewhere)) is None


# The upper end is a claim too: an interval that always covers says too little. It may cover always only where
# noise of iterations, which reappears in the scatter of batches and of launches, is counted at every level.
@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(
    ("design", "most"),
    [
        pytest.param({"batches": 10, "iterations": 4, "batch_effect": 0.1, "sigma": 0.05}, 0.995, id="10 batches"),
        pytest.param(
            {"launches": 3, "batches": 10, "iterations": 3, "launch_effect": 0.05, "batch_effect": 0.01, "sigma": 0.02},
            0.995,
            id="3 launches, launches dominate",
        ),
        pytest.param(
            {"launches": 3, "batches": 10, "iterations": 3, "batch_effect": 0, "sigma": 0.05},
            1.0,
            id="3 launches, only iterations vary",
        ),
    ],
)
def test_interval_covers_the_true_median_as_often_as_it_says(design, most):
    generator = np.random.default_rng(7)
    estimates = [estimate_median(times(generator, 1.2, **design)) for _ in range(200)]
    coverage = np.mean([estimate.low <= 1.2 <= estimate.high for estimate in estimates])
    assert 0.92 <= coverage <= most  # 200 repetitions scatter by 0.015


def test_several_launches_widen_the_interval_by_as_much_as_they_differ():
    alike = [[[1.0, 1.1, 1.2]] * MIN_BATCHES] * 3
    together = estimate_median(samples(*alike))
    assert (together.low, together.high) == pytest.approx(bootstrap_median_interval(samples(*alike)))
    launches = [[[math.exp(shift)]] * MIN_BATCHES for shift in (-0.1, 0.0, 0.1)]
    launches[0] = [[5.0], *launches[0][1:]]  # One disturbed batch moves no median.
    apart = estimate_median(samples(*launches))
    # All batches are equal, and the bootstrap keeps every launch: only t = 4.303 for 2 degrees of freedom is left.
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert (math.log(apart.low), math.log(apart.high)) == pytest.approx((-half, half), rel=1e-4)


def test_too_few_batches_give_the_range_and_no_interval_however_many_launches():
    few = [[1.0, 2.0, 4.0]] * (MIN_BATCHES - 1)
    assert estimate_median(samples(few)) == Estimate(2.0, 1.0, 4.0, False, MIN_BATCHES - 1, 1)
    assert estimate_median(samples(few, few)) == Estimate(2.0, 1.0, 4.0, False, MIN_BATCHES - 1, 2)
    assert estimate_median(samples([*few, [2.0]], few)).is_interval


def test_vectorised_bootstrap_equals_the_slow_one_where_cells_are_uneven_or_missing():
    generator = np.random.default_rng(11)
    first, second = (
        [generator.lognormal(batch / 20, 0.1, 1 + (batch + launch) % 4) for batch in range(11)] for launch in range(2)
    )
    uneven = samples(first, [[], *second[1:]]).drop((0, 3, 0))
    vectorised = bootstrap_median_interval(uneven, num_resamples=20000)
    assert vectorised == pytest.approx(slow_interval(uneven, 4000), abs=0.015)


def test_order_of_samples_and_names_of_launches_do_not_count():
    drawn = times(np.random.default_rng(1), iterations=5, launches=2, batch_effect=0.1, sigma=0.1)
    shuffled = drawn.sample(frac=1, random_state=0).rename({0: 3, 1: 8}, level="launch")
    shuffled = shuffled.reorder_levels(["iteration", "batch", "launch"])
    assert estimate_median(shuffled) == estimate_median(drawn)


@given(st.floats(0.5, 2.0), st.floats(0.5, 2.0))
@settings(max_examples=50)
def test_noise_floor_is_symmetric_and_holds_the_interval_and_one(one, other):
    low, high = sorted((one, other))
    floor = noise_floor(Estimate(low, low, high, True, 10, 1))
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
        (1.03, 1.2, "inconclusive"),  # partly inside the floor
        (0.9, 1.2, "inconclusive"),
        (0.8, 0.96, "inconclusive"),
    ],
)
def test_verdict_holds_the_interval_against_the_floor(low, high, verdict):
    assert judge(Estimate((low + high) / 2, low, high, True, 10, 1), NoiseFloor(1 / 1.05, 1.05)) == verdict


@pytest.mark.parametrize(
    ("speedup", "verdict"),
    [(0.97, "slower"), (0.985, BELOW_MODEL), (1.0, BELOW_MODEL), (1.0199, BELOW_MODEL), (1.0201, "faster")],
)
def test_a_model_cannot_tell_2_percent_and_ranks_that_share_cores_tell_nothing(speedup, verdict):
    exact = Estimate(speedup, speedup, speedup, True, 10, 1)
    assert judge(exact, NoiseFloor(1, 1), is_modelled=True) == verdict
    assert judge(exact, NoiseFloor(1, 1), is_oversubscribed=True) == "inconclusive"
    assert judge(dataclasses.replace(exact, is_interval=False), NoiseFloor(1, 1), is_modelled=True) == "inconclusive"
    assert minimum_detectable_effect(exact, NoiseFloor(1, 1), is_modelled=True) == pytest.approx(1.02)


def test_without_interval_floor_or_pairs_there_is_no_verdict_and_no_effect_is_called_detectable():
    clear = Estimate(2.0, 1.9, 2.1, True, 10, 1)
    floor = NoiseFloor(1 / 1.01, 1.01)
    assert judge(clear, floor) == "faster"
    for speedup, noise in itertools.product((clear, None, Estimate(2.0, 1.9, 2.1, False, 9, 1)), (floor, None)):
        if (speedup, noise) != (clear, floor):
            assert judge(speedup, noise) == "inconclusive"
    assert minimum_detectable_effect(Estimate(1.0, 0.9, 1.1, False, 9, 3), floor) is None


@pytest.mark.usefixtures("fewer_resamples")
def test_quickstart_never_takes_a_loss_for_a_gain_and_finds_what_is_large():
    generator = np.random.default_rng(23)
    sides = {0.7: "slower", 0.9: "slower", 1.0: "neither", 1.1: "faster", 1.3: "faster"}
    verdicts = {effect: [] for effect in sides}
    for _ in range(60):
        native, again = (times(generator, uneven=True, sigma=0.05, disturbed=0.02) for _ in range(2))
        floor = noise_floor(estimate_median(paired_ratios(native, again)))
        for effect in sides:
            case = times(generator, uneven=True, sigma=0.05, disturbed=0.02, batch_effect=0.02) / effect
            verdicts[effect].append(judge(estimate_median(paired_ratios(native, case)), floor))
    wrong = sum(v in {"faster", "slower"} - {side} for effect, side in sides.items() for v in verdicts[effect])
    assert wrong <= 0.01 * 5 * 60
    for effect in (0.7, 1.3):
        assert verdicts[effect].count(sides[effect]) > 0.9 * 60
    assert "slower" not in verdicts[1.3]
    assert "faster" not in verdicts[0.7]
    assert verdicts[1.0].count("no difference") > 0  # and not only for want of data


def scaled(estimate: Estimate, factor: float) -> Estimate:
    ends = {name: getattr(estimate, name) * factor for name in ("median", "low", "high")}
    return dataclasses.replace(estimate, **ends)


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(
    "design",
    [
        pytest.param({"sigma": 0.05, "batch_effect": 0.02}, id="quickstart"),
        pytest.param({"sigma": 0.02, "launch_effect": 0.05, "launches": 3}, id="3 launches, launches dominate"),
    ],
)
def test_minimum_detectable_effect_is_detected_as_often_as_its_power_says(design):
    generator = np.random.default_rng(29)
    unchanged = {key: value for key, value in design.items() if not key.endswith("_effect")}

    pairs = []
    for _ in range(100):
        native, again, case = (times(generator, uneven=True, **d) for d in (unchanged, unchanged, design))
        floor = noise_floor(estimate_median(paired_ratios(native, again)))
        pairs.append((estimate_median(paired_ratios(native, case)), floor))
    effect = np.median([minimum_detectable_effect(speedup, floor) for speedup, floor in pairs])
    faster = np.mean([judge(scaled(speedup, effect), floor) == "faster" for speedup, floor in pairs])
    assert effect > 1
    assert 0.65 <= faster <= 0.95


def trend(*per_iteration, batches=(1.0, 10.0, 5.0)) -> list[list[float]]:
    """A launch whose batches differ in length and follow the same course."""
    return [[length * value for value in per_iteration] for length in batches]


def test_drift_is_the_last_third_over_the_first():
    assert drift(samples(trend(1, 1, 1, 1.1, 1.1, 1.1))) == pytest.approx(0.1)
    assert drift(samples(trend(1, 1, 1, 0.9, 0.9, 0.9))) == pytest.approx(-0.1)
    assert drift(samples(trend(1.0, 1.0, 9.0, 9.0, 9.0, 1.2, 1.2))) == pytest.approx(0.2)  # the middle does not count
    assert drift(samples(trend(1, 1, 5, 1, 1, 1, 1.2, 1.2, 1.2))) == pytest.approx(0.2)  # nor does one outlier
    assert drift(samples([[1.0] * 4, [10.0] * 12])) == 0.0  # late iterations are of long batches only


def test_launch_that_drifted_furthest_counts_and_launches_that_differ_do_not():
    assert drift(samples(trend(1, 1, 1.05), trend(3, 3, 2.4), trend(2, 2, 2.1))) == pytest.approx(-0.2)
    assert drift(samples(trend(1, 1, 1), trend(2, 2, 2))) == 0.0
