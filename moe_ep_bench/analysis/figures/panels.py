"""Which comparisons a sheet of small panels shows, and where each stands.

A sheet that gives every comparison a row of its own is soon pages high. Up to ``MOST_COLUMNS`` comparisons stand side
by side instead, each a column of panels. Of a sweep over numbers with more points than that some are shown, evenly
spaced from the first to the last: the figures ``map`` and ``sweep`` hold all of them, and so does the CSV beside every
figure. What is no such sweep is shown whole, in as many rows as it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from moe_ep_bench.analysis.sizes import current_size
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import Sheet, panel_title, row_title
from moe_ep_bench.analysis.sweep import key_words, sweeps_along, swept_keys

MOST_COLUMNS = 4
# Inches: of a sheet with so many columns.
_WIDTHS = {1: 10.0, 2: 10.0, 3: 12.0, 4: 14.0}


@dataclass(frozen=True, eq=False)
class Panels:
    """Rows of comparisons.

    Attributes:
        note: which points of sweeps are not drawn, for the footer; none where all are.
    """

    rows: list[list[ComparisonResult]]
    note: list[str]

    @property
    def shown(self) -> list[ComparisonResult]:
        return [comparison for row in self.rows for comparison in row]

    @property
    def num_columns(self) -> int:
        return max(len(row) for row in self.rows)

    @property
    def width(self) -> float:
        """Inches of the sheet on the page."""
        return _WIDTHS[self.num_columns]

    @property
    def title_width(self) -> float:
        """Inches that a title above one column may take."""
        return self.width / self.num_columns - 0.75

    def of_columns(self, most: int) -> Panels:
        """The same in shorter rows."""
        parts = [row[start : start + most] for row in self.rows for start in range(0, len(row), most)]
        return Panels(parts, self.note)


def in_panels(comparisons: Sequence[ComparisonResult]) -> Panels:
    """Put comparisons into rows; at least one must be given."""
    rows, others = [], list(comparisons)
    note = []
    keys = swept_keys(comparisons)
    for sweep in sweeps_along(keys[0], comparisons) if keys else ():
        if sweep.is_numeric:
            rows.append(_evenly(sweep.comparisons))
            others = [one for one in others if one not in sweep.comparisons]
            if len(sweep.comparisons) > MOST_COLUMNS:
                note.append(f"of {len(sweep.comparisons)} values of {key_words(sweep.key)} {MOST_COLUMNS} are drawn")
    num_rows = -(-len(others) // MOST_COLUMNS)
    rows += [list(part) for part in np.array_split(np.array(others, dtype=object), num_rows)] if others else []
    return Panels(rows, [f"{words}; the CSV beside the figure has all." for words in dict.fromkeys(note)])


def _evenly(comparisons: Sequence[ComparisonResult]) -> list[ComparisonResult]:
    number = min(MOST_COLUMNS, len(comparisons))
    return [comparisons[round(place)] for place in np.linspace(0, len(comparisons) - 1, number)]


@dataclass(frozen=True, eq=False)
class Place:
    """The panels of one comparison, a panel per quantity.

    Attributes:
        is_first: of each panel whether it is the first of those that share its upright axis.
    """

    comparison: ComparisonResult
    axes: list[Axes]
    is_first: list[bool]


def lay_out(
    figure: Sheet, panels: Panels, heights: Sequence[float], widths: Sequence[float], title_width: float = 9.0
) -> list[list[Place]]:
    """Make the panels, titled: row by row a place per comparison.

    Args:
        heights: of each quantity's panel, where quantities stand one under another; relative.
        widths: of the same, where one comparison a row lets them stand side by side.
        title_width: inches for a title in that case.
    """
    number, is_side_by_side = len(heights), panels.num_columns == 1
    if is_side_by_side:
        grid = figure.add_gridspec(len(panels.rows), number, width_ratios=widths)
    else:
        height_ratios = [*heights] * len(panels.rows)
        grid = figure.add_gridspec(number * len(panels.rows), panels.num_columns, height_ratios=height_ratios)
    rows = []
    for row, members in enumerate(panels.rows):
        places = []
        for column, comparison in enumerate(members):
            at = [(row, n) if is_side_by_side else (number * row + n, column) for n in range(number)]
            axes = [figure.add_subplot(grid[one]) for one in at]
            title = comparison.comparison.title
            if is_side_by_side:
                row_title(axes[0], axes[1:], title, title_width)
            else:
                panel_title(axes[0], title, panels.title_width)
            is_first = [n == 0 if is_side_by_side else column == 0 for n in range(number)]
            places.append(Place(comparison, axes, is_first))
        rows.append(places)
    return rows


def label_outer(place: Place, *, has_one_x: bool) -> None:
    """Leave what panels under or beside each other share to the outer ones, unless all are to stand in one column.

    Args:
        has_one_x: whether the quantities of a comparison have the same quantity along the bottom.
    """
    are_under_each_other = len(set(place.is_first)) == 1
    if current_size().is_stacked or not are_under_each_other:
        return
    for number, axes in enumerate(place.axes):
        if not place.is_first[number]:
            axes.set_ylabel("")
        if has_one_x and number < len(place.axes) - 1:
            axes.set_xlabel("")


def one_scale(panels: Sequence[Axes], axis: str) -> None:
    """Give panels the widest limits of any of them, so that they can be read across."""
    limits = [getattr(axes, f"get_{axis}lim")() for axes in panels]
    low, high = min(min(pair) for pair in limits), max(max(pair) for pair in limits)
    for axes in panels:
        getattr(axes, f"set_{axis}lim")(low, high)
