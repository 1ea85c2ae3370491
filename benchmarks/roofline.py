"""Fit the figures of a device file to measured times of experts, and print them as the file has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.links import Curve

KNOTS = (1, 8, 32, 128, 512, 2048, 8192)


def fit_roofline(
    device: Device, predict: Callable[[Device], NDArray[np.float64]], measured: ArrayLike, weights: ArrayLike = 1.0
) -> Device:
    """Overhead, share of the memory bandwidth and shares of the arithmetic: least squares of log ratios, robust.

    Args:
        predict: times of the measured points by a device.
        weights: of each point's error.
    """

    def made(figures: np.ndarray) -> Device:
        shares = Curve.of(KNOTS, np.exp(figures[2:]))
        update = {"overhead_us": float(np.exp(figures[0])), "memory_efficiency": float(np.exp(figures[1]))}
        return device.model_copy(update={**update, "arithmetic_efficiency": shares})

    def errors(figures: np.ndarray) -> np.ndarray:
        return np.asarray(weights) * np.log(predict(made(figures)) / np.asarray(measured))

    # At one row memory alone binds: a share of the arithmetic well above stands there.
    start = np.log([30, 0.8, 0.02, 0.04, 0.12, 0.4, 0.55, 0.6, 0.6])
    low, high = np.log([1, 0.3, 0.01, *[0.001] * 6]), np.log([500, 0.95, 0.03, *[0.95] * 6])
    return made(least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.1).x)


def as_yaml(device: Device) -> Iterator[str]:
    yield f"overhead_us: {device.overhead_us:.3g}\nmemory_efficiency: {device.memory_efficiency:.3g}"
    yield "arithmetic_efficiency:"
    yield from (f"  - [{knot:g}, {share:.3g}]" for knot, share in device.arithmetic_efficiency.root)
