"""The axis along which policies stand: capacity factors, and by their names those that have none.

Factors stand at even distances along the bottom, one line per policy family, and before them each policy that has no
factor, by its name. Where no policy has one there are no lines to draw: names are read best in rows, so the axis then
stands upright, the first policy at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from moe_ep_bench.analysis.sizes import text_width, wrap
from moe_ep_bench.analysis.speedups import CaseResult
from moe_ep_bench.analysis.style import GAMMA, Look

_LABEL = f"capacity factor {GAMMA}"
_NAME_POINTS, _NAME_INCHES, _TURNED_INCHES = 8.5, 1.9, 1.5
_ROW_INCHES, _BELOW_INCHES = 0.3, 0.75

Looks = dict[str, Look]


@dataclass(frozen=True)
class PolicyAxis:
    """Where policies stand.

    Attributes:
        families: of those without a capacity factor the families, in reading order.
        factors: capacity factors, ascending.
    """

    families: tuple[str, ...]
    factors: tuple[float, ...]

    @classmethod
    def of(cls, results: Sequence[CaseResult], looks: Looks) -> PolicyAxis:
        without = {result.family for result in results if result.capacity_factor is None}
        factors = {result.capacity_factor for result in results if result.capacity_factor is not None}
        return cls(tuple(family for family in looks if family in without), tuple(sorted(factors)))

    @property
    def is_upright(self) -> bool:
        """Whether policies stand in rows, by their names alone."""
        return not self.factors

    @property
    def height(self) -> float:
        """Inches that an upright axis needs, with what stands below it and its title."""
        return _ROW_INCHES * max(3, len(self.families)) + _BELOW_INCHES

    def draw(
        self,
        axes: Axes,
        results: Sequence[CaseResult],
        looks: Looks,
        value: Callable[[CaseResult], float],
        spread: Callable[[CaseResult], tuple[float, float]] | None = None,
    ) -> None:
        """Draw a mark per case, with its spread as whiskers; lines join the factors of a family."""
        places = self._places(results, looks)
        for family, look in looks.items():
            members = [result for result in results if result.family == family]
            if not members:
                continue
            at = np.array([places[family, result.capacity_factor] for result in members])
            values = np.array([value(result) for result in members])
            low, high = np.array([spread(result) for result in members]).T if spread is not None else (None, None)
            self._draw_family(axes, at, values, look, low, high)

    def _draw_family(self, axes: Axes, at, values, look: Look, low, high) -> None:
        points = (values, at) if self.is_upright else (at, values)
        axes.plot(*points, zorder=3, **{**marks(look), **({"linestyle": "none"} if self.is_upright else {})})
        if low is None:
            return
        whisker = {"color": look.colour, "linewidth": 1.4, "zorder": 3.5}
        cap = {"color": look.colour, "linestyle": "none", "markersize": 9, "markeredgewidth": 1.4, "zorder": 3.5}
        (axes.hlines if self.is_upright else axes.vlines)(at, low, high, **whisker)
        for ends in (low, high):
            axes.plot(*((ends, at) if self.is_upright else (at, ends)), marker="|" if self.is_upright else "_", **cap)

    def _places(self, results: Sequence[CaseResult], looks: Looks) -> dict[tuple[str, float | None], float]:
        """Of each family and factor; at one factor families stand side by side, so that none hides another."""
        places: dict[tuple[str, float | None], float] = {(f, None): at for at, f in enumerate(self.families)}
        for at, factor in enumerate(self.factors, len(self.families)):
            beside = [f for f in looks if any((r.family, r.capacity_factor) == (f, factor) for r in results)]
            step = min(0.09, 0.7 / max(1, len(beside)))
            places |= {(f, factor): at + (i - (len(beside) - 1) / 2) * step for i, f in enumerate(beside)}
        return places

    def label(self, axes: Axes, looks: Looks, inches: float, *, is_named: bool = True) -> None:
        """Set ticks and limits of a panel that is ``inches`` wide on the page.

        Args:
            is_named: False where the panel beside it has the names.
        """
        names = [looks[family].label for family in self.families]
        if self.is_upright:
            axes.set_yticks(range(len(names)), [wrap(name, _NAME_INCHES, _NAME_POINTS) for name in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0, labelleft=is_named)
            axes.grid(False, axis="y")
            return
        number = len(names) + len(self.factors)
        room = inches / number - 0.08
        is_turned = any(text_width(word, _NAME_POINTS) > room for name in names for word in name.split())
        names = [wrap(name, _TURNED_INCHES if is_turned else room, _NAME_POINTS) for name in names]
        axes.set_xticks(range(number), [*names, *(f"{factor:g}" for factor in self.factors)])
        for label in axes.get_xticklabels()[: len(names)]:
            label.set_fontsize(_NAME_POINTS)
            if is_turned:
                label.set(rotation=30, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.5, number - 0.5)
        axes.set_xlabel(f"{_LABEL} (of policies that have one)" if names else _LABEL)
        axes.grid(False, axis="x")


def marks(look: Look) -> dict:
    """How a family's line and marks are drawn."""
    return {
        "color": look.colour,
        "linestyle": look.line,
        "marker": look.marker,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }
