"""What figures share: which comparisons stand where, the noise floor, whiskers, limits and legends.

A sheet that gives every comparison a row of its own is soon pages high. Up to ``MOST_COLUMNS`` comparisons stand side
by side instead, each a column of panels. Of a sweep over numbers with more points than that some are shown, evenly
spaced from the first to the last: the figures ``map`` and ``sweep`` hold all of them, and so does the CSV beside every
figure. What is no such sweep is shown whole, in as many rows as it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.load import Comparison
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    NATIVE_LINE,
    NOISE_FILL,
    Legend,
    Looks,
    Sheet,
    case_name,
    fit_label,
    is_narrow,
    num_columns,
    panel_title,
    row_title,
)
from moe_ep_bench.analysis.sweep import key_words, sweeps_along, swept_keys
from moe_ep_bench.analysis.words import NOT_FUSED, OVERSUBSCRIBED, percent

MOST_COLUMNS = 4
SPEEDUP_LABEL = "speedup (native = 1)"
_WIDTHS = {1: 10.0, 2: 10.0, 3: 12.0, 4: 14.0}  # inches of a sheet with so many columns


# ---- where comparisons stand ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Panels:
    """Rows of comparisons; ``note`` says which points of sweeps are not drawn."""

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


def in_panels(comparisons: Sequence[ComparisonResult], most: int = MOST_COLUMNS) -> Panels:
    """Put comparisons into rows of at most ``most``; at least one must be given."""
    rows, others, notes = [], list(comparisons), {}
    keys = swept_keys(comparisons)
    for sweep in sweeps_along(keys[0], comparisons) if keys else ():
        if sweep.is_numeric:
            number = len(sweep.comparisons)
            places = np.linspace(0, number - 1, min(MOST_COLUMNS, number))
            rows.append([sweep.comparisons[round(place)] for place in places])
            others = [one for one in others if one not in sweep.comparisons]
            if number > MOST_COLUMNS:
                words = f"of {number} values of {key_words(sweep.key)} {MOST_COLUMNS} are drawn"
                notes[f"{words}; the CSV beside the figure has all."] = None
    if others:
        num_rows = -(-len(others) // MOST_COLUMNS)
        rows += [list(part) for part in np.array_split(np.array(others, dtype=object), num_rows)]
    rows = [row[at : at + most] for row in rows for at in range(0, len(row), most)]
    return Panels(rows, list(notes))


@dataclass(frozen=True, eq=False)
class Place:
    """The panels of one comparison, a panel per quantity; of each whether it is leftmost of its kind."""

    comparison: ComparisonResult
    axes: list[Axes]
    is_first: list[bool]

    def label_outer(self, *, has_one_x: bool) -> None:
        """Leave what panels under or beside each other share to the outer ones.

        Args:
            has_one_x: whether the quantities of a comparison have the same quantity along the bottom.
        """
        if is_narrow() or len(set(self.is_first)) > 1:
            return
        for axes in () if self.is_first[0] else self.axes:
            axes.set_ylabel("")
        for axes in self.axes[:-1] if has_one_x else ():
            axes.set_xlabel("")


def lay_out(figure: Sheet, panels: Panels, ratios: Sequence[float], title_width: float = 9.0) -> list[list[Place]]:
    """Make the panels, titled: row by row a place per comparison.

    A comparison that has a row of its own has its quantities side by side, else one under another.

    Args:
        ratios: of the quantities' widths side by side; of their heights one under another, in the same order.
        title_width: inches for a title where quantities stand side by side.
    """
    number, columns = len(ratios), panels.num_columns
    if is_narrow():
        grid = figure.add_gridspec(number * len(panels.shown), 1)
        cells = iter(range(number * len(panels.shown)))
        of_row = [[[grid[next(cells), 0] for _ in ratios] for _ in row] for row in panels.rows]
    elif columns == 1:
        grid = figure.add_gridspec(len(panels.rows), number, width_ratios=ratios)
        of_row = [[[grid[at, n] for n in range(number)]] for at in range(len(panels.rows))]
    else:
        grid = figure.add_gridspec(number * len(panels.rows), columns, height_ratios=[*ratios] * len(panels.rows))
        of_row = [
            [[grid[number * at + n, column] for n in range(number)] for column in range(len(row))]
            for at, row in enumerate(panels.rows)
        ]
    rows = []
    for members, cells_of_row in zip(panels.rows, of_row, strict=True):
        places = []
        for column, (comparison, of_place) in enumerate(zip(members, cells_of_row, strict=True)):
            axes = [figure.add_subplot(cell) for cell in of_place]
            title = comparison.comparison.title
            if columns == 1:
                row_title(axes[0], axes[1:], title, title_width)
            else:
                panel_title(axes[0], title, panels.width / columns - 0.75)
            is_first = [is_narrow() or (n == 0 if columns == 1 else column == 0) for n in range(number)]
            places.append(Place(comparison, axes, is_first))
        rows.append(places)
    return rows


def pairs_of_axes(figure: Sheet, titles: Sequence[str], ratios: Sequence[float]) -> Iterator[tuple[Axes, Axes]]:
    """For each title a panel and, below it, another that shares its bottom axis."""
    columns = num_columns(len(titles))
    rows = -(-len(titles) // columns)
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[*ratios] * rows)
    for number, title in enumerate(titles):
        row, column = divmod(number, columns)
        above = figure.add_subplot(grid[2 * row, column])
        below = figure.add_subplot(grid[2 * row + 1, column], sharex=above)
        panel_title(above, title, figure.get_figwidth() / columns - 1.6)
        above.tick_params(labelbottom=False)
        yield above, below


def num_rows(num_panels: int) -> int:
    return -(-num_panels // num_columns(num_panels))


# ---- what is drawn in them -----------------------------------------------------------------------------------------


def draw_references(axes: Axes, rows: pd.DataFrame, *, upright: bool = False) -> None:
    """Native at 1, the noise floor about it, and the speedup on balanced scores.

    Args:
        rows: of ``marks.cases``, one comparison's.
        upright: speedup runs along the bottom.
    """
    span, line = (axes.axvspan, axes.axvline) if upright else (axes.axhspan, axes.axhline)
    for _, floor in drawn_floors(rows).iterrows():
        span(floor["speedup_low"], floor["speedup_high"], color=NOISE_FILL, linewidth=0, zorder=0.5)
    line(1, **NATIVE_LINE)
    for ceiling in rows.loc[rows["role"] == "ceiling", "speedup"].dropna():
        line(ceiling, **CEILING_LINE, zorder=1)


def drawn_floors(rows: pd.DataFrame) -> pd.DataFrame:
    """Noise floors that have a width; a model repeats itself exactly, and has none to draw."""
    return rows[rows["result"].isna() & (rows["speedup_low"] < rows["speedup_high"])]


def reference_legend(rows: pd.DataFrame, *, native: bool = True) -> Legend:
    """What ``draw_references`` draws."""
    legend: list = [("native", Line2D([], [], **NATIVE_LINE))] if native else []
    if len(drawn_floors(rows)):
        legend.append(("noise floor", Patch(facecolor=NOISE_FILL)))
    if (rows["speedup"].notna() & (rows["role"] == "ceiling")).any():
        legend.append(("perfect balance", Line2D([], [], **CEILING_LINE)))
    return legend


def family_legend(families: Iterable[str], looks: Looks) -> Legend:
    shown = set(families)
    return [(look.label, Line2D([], [], **look.marks)) for family, look in looks.items() if family in shown]


def limits(values: Iterable[float], least: float) -> tuple[float, float]:
    """Limits about finite values, at least ``least`` apart, so that noise is not blown up to fill a panel."""
    finite = [value for value in values if np.isfinite(value)]
    low, high = min(finite), max(finite)
    missing = max(0.0, least - (high - low)) / 2
    pad = 0.07 * max(high - low, least)
    return low - missing - pad, high + missing + pad


def speedup_limits(rows: pd.DataFrame) -> tuple[float, float]:
    """Limits about all speedups, their spreads, the noise floor and native."""
    return limits([1.0, *rows[["speedup", "speedup_low", "speedup_high"]].to_numpy().ravel()], least=0.1)


def one_scale(panels: Sequence[Axes], axis: str) -> None:
    """Give panels the widest limits of any of them, so that they can be read across."""
    lows, highs = zip(*(sorted(getattr(axes, f"get_{axis}lim")()) for axes in panels), strict=True)
    for axes in panels:
        getattr(axes, f"set_{axis}lim")(min(lows), max(highs))


def name_rows(axes: Axes, labels: Sequence[str], *, is_named: bool = True) -> None:
    """One row per label, the first at the top; names only where no panel beside it has them."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelleft=is_named or is_narrow())
    axes.grid(False, axis="y")


def write_ends(axes: Axes, ends: Iterable[float], words: Iterable[str]) -> None:
    """Write beside the ends of bars."""
    for place, (end, text) in enumerate(zip(ends, words, strict=True)):
        offset: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (end, place), fontsize="small", **offset)


def name_label(result: CaseResult, looks: Looks) -> str:
    """The case's name alone, in lines that fit beside a bar."""
    return fit_label(case_name(result, looks), 2.4)


def bar_label(result: CaseResult, looks: Looks) -> str:
    """Name the case and what it costs, so that a short bar is not read as a gift."""
    name = name_label(result, looks)
    if result.case.role != "policy" or result.fidelity is None:
        return name
    return f"{name}\n{fit_label(cost_words(result), 2.4)}"


def cost_words(result: CaseResult) -> str:
    """``5.0 % dropped, 97.3 % mass kept``."""
    assert result.fidelity is not None
    return f"{percent(result.fidelity.dropped_share)} % dropped, {percent(result.fidelity.retained_mass)} % mass kept"


def warnings_of(facts: Iterable[Comparison], *, phases: bool = False) -> list[str]:
    """What weakens timed numbers."""
    facts = list(facts)
    warnings = [OVERSUBSCRIBED] if any(one.oversubscribed for one in facts) else []
    return warnings + ([NOT_FUSED] if phases and any(one.permute.is_unfused_permutation for one in facts) else [])
