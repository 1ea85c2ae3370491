"""Measured times over sizes, interpolated.

Shapes: N = measured points.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field, PositiveFloat, RootModel, model_validator

from moe_ep_bench.errors import UserError


class Curve(RootModel[Annotated[tuple[tuple[PositiveFloat, PositiveFloat], ...], Field(min_length=1)]]):
    """Measured (size, microseconds) with rising sizes: bytes, tokens or pairs."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="after")
    def _check(self) -> Curve:
        for before, after in pairwise(self.root):
            if after[0] <= before[0]:
                raise UserError(f"expected rising sizes, got {list(after)} after {list(before)}")
        return self

    @staticmethod
    def of(sizes_N: ArrayLike, times_us_N: ArrayLike) -> Curve:
        return Curve(tuple(zip(np.asarray(sizes_N).tolist(), np.asarray(times_us_N).tolist(), strict=True)))

    @cached_property
    def _logs(self) -> NDArray[np.float64]:
        """Logarithms of sizes and times, [2, N]."""
        return np.log(np.asarray(self.root, dtype=np.float64).T)

    @cached_property
    def growth(self) -> float:
        """Microseconds for each unit of size between the last two points; 0 where time falls, and of one point."""
        if len(self.root) == 1:
            return 0.0
        (size, time_us), (larger, longer_us) = self.root[-2:]
        return max((longer_us - time_us) / (larger - size), 0.0)

    def at(self, sizes: ArrayLike, growth: float | None = None) -> NDArray[np.float64]:
        """Microseconds, linear over the logarithms of size and time; below the first point what that takes.

        Beyond the last point time grows by ``growth`` for each unit of size; None = as between the last two.
        """
        sizes = np.asarray(sizes, dtype=np.float64)
        inside = np.exp(np.interp(np.log(np.maximum(sizes, np.finfo(np.float64).tiny)), *self._logs))
        return inside + np.maximum(sizes - self.root[-1][0], 0) * (self.growth if growth is None else growth)
