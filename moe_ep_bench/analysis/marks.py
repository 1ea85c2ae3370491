"""The marks that figures are made of: series of points and bars; and the facets that hold them.

A mark is made by naming columns (``Series("capacity_factor", "speedup_median")``) and draws the rows of one facet into
one panel. What a column is called on an axis, its unit, native's value and its least range stand in its row of
``columns.COLUMNS``; a column's ``_low`` and ``_high`` are whiskers. Rows have ``line``, which a mark's colour and
legend go by. Artists carry the labels from which ``style.dress`` makes the legend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from moe_ep_bench.analysis.columns import Column, column_of, milliseconds
from moe_ep_bench.analysis.style import (
    BALANCED_LINE,
    INK,
    MUTED,
    NATIVE_LINE,
    NOISE_FILL,
    Look,
    folded,
    frame,
    phase_look,
    rcParams,
    sheet,
)
from moe_ep_bench.config.conditions import holds, matching
from moe_ep_bench.facts import ORIGINS

_MANY = 10  # values of an axis; more have no tick each
_WIDTHS = {1: 8.5, 2: 10.0, 3: 11.0, 4: 11.5}  # inches of a sheet with so many panels side by side
_TITLE_LINE = 0.17  # inches
NAMES = 2.4  # inches for names beside a panel
_ROW = 0.3  # inches of a row, at least
_MARKER = 6.5 / 72  # inches between two markers, at most
_LEAST_ROOM = 0.5  # by which whiskers of speedups may reach beyond all points before they are cut


@dataclass(frozen=True, kw_only=True)
class Panel(ABC):
    """One panel of a facet.

    Attributes:
        height: inches, or from the rows of the sheet.
        width: of the panel to that of the others in its facet, where they stand side by side.
        shares: whether it has an axis in common with its facet's other panels, so that one of them names the values.
        where: a condition (``conditions``): rows of the facet that the panel draws; without any it is left out;
            empty = all.
    """

    height: float | Callable[[pd.DataFrame], float] = 3.3
    width: float = 1.0
    shares: bool = True
    where: str = ""

    @abstractmethod
    def draw(self, axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look], facet: pd.DataFrame) -> None:
        """Draw rows, those whose line has a look, at the places of their facet, which its panels have in common."""

    def inches(self, rows: pd.DataFrame) -> float:
        return self.height(rows) if callable(self.height) else self.height

    def rows(self, facet: pd.DataFrame) -> pd.DataFrame:
        return matching(facet, self.where)


def panels_of(panels: Iterable[Panel], rows: pd.DataFrame) -> list[Panel]:
    """Those for which there are rows."""
    return [panel for panel in panels if len(panel.rows(rows))]


class Cell(NamedTuple):
    """A panel of a facet in its place.

    Attributes:
        facet: its rows.
        band: the row of facets that it is in.
        place: row and column of the sheet's grid.
        height: inches. ``share``: of its facet's inches across.
        is_first: of its facet's panels.
        hidden: the side, ``left`` or ``bottom``, whose values another panel of the facet names.
    """

    facet: pd.DataFrame
    panel: Panel
    band: int
    place: tuple[int, int]
    height: float
    share: float
    is_first: bool
    hidden: str | None


def facets(
    rows: pd.DataFrame,
    panels: Sequence[Panel],
    looks: Mapping[str, Look],
    *,
    beside: bool = False,
    most: int = 2,
    titled: bool = True,
) -> tuple[Figure, float]:
    """Draw every panel for every ``facet`` of the rows; its origin frames a panel, ``heading`` or ``title`` names it.

    Args:
        beside: a facet's panels stand side by side, else one under another.
        most: facets side by side.
        titled: each facet has its heading.

    Returns:
        The sheet, and the inches of its body.
    """
    groups = [group for _, group in rows.groupby("facet", sort=False) if panels_of(panels, group)]
    across = min(most, len(groups))
    cells, heights = _laid_out(groups, panels, across, beside=beside)
    widths = [panel.width for panel in panels] if beside else [1.0]
    figure = sheet(_WIDTHS[min(4, across * len(widths))])
    grid = figure.add_gridspec(len(heights), across * len(widths), height_ratios=heights, width_ratios=widths * across)
    inches = figure.get_figwidth() / across - 0.3
    drawn = [(cell, _draw_cell(figure.add_subplot(grid[cell.place]), cell, looks, inches)) for cell in cells]
    names = [0.0] * len(heights)
    for cell, axes in drawn:
        if cell.hidden != "bottom":
            names[cell.place[0]] = max(names[cell.place[0]], _inches_of_names(axes))
    more_lines = _give_titles(drawn, inches) if titled else 0
    _give_equal_limits(figure)
    return figure, sum(heights) + sum(names) + _TITLE_LINE * more_lines


def _laid_out(
    groups: Sequence[pd.DataFrame], panels: Sequence[Panel], across: int, *, beside: bool
) -> tuple[list[Cell], list[float]]:
    """The cells of all facets, ``across`` side by side, and the inches of each row of the grid."""
    cells: list[Cell] = []
    heights: list[float] = []
    width = sum(panel.width for panel in panels)
    for band, begin in enumerate(range(0, len(groups), across)):
        rows = pd.concat(groups[begin : begin + across])
        of_band = {panel: panel.inches(rows) for panel in panels_of(panels, rows)}
        for column, group in enumerate(groups[begin : begin + across]):
            own = panels_of(panels, group)
            for panel in own:
                down, right = (0, list(panels).index(panel)) if beside else (list(of_band).index(panel), 0)
                place = (len(heights) + down, column * (len(panels) if beside else 1) + right)
                share = panel.width / width if beside else 1.0
                is_named = not panel.shares or panel is own[0 if beside else -1]
                hidden = None if is_named else "left" if beside else "bottom"
                cells.append(Cell(group, panel, band, place, of_band[panel], share, panel is own[0], hidden))
        heights += [max(of_band.values())] if beside else of_band.values()
    return cells, heights


def _draw_cell(axes: Axes, cell: Cell, looks: Mapping[str, Look], inches: float) -> Axes:
    """Draw a panel whose facet has so many inches across, with the names that it has room for."""
    cell.panel.draw(axes, cell.panel.rows(cell.facet), looks, cell.facet)
    points = rcParams["axes.labelsize"]
    axes.set_xlabel(folded(axes.get_xlabel(), cell.share * (inches - 0.5), points) if cell.hidden != "bottom" else "")
    axes.set_ylabel(folded(axes.get_ylabel(), max(0.8, cell.height - 0.7), points))
    if cell.hidden == "left":
        axes.tick_params(labelleft=False)
    elif cell.hidden == "bottom":
        axes.tick_params(labelbottom=False)
    origins = {origin for origin in cell.facet["origin"].dropna() if origin in ORIGINS}
    frame(axes, next(iter(origins)) if len(origins) == 1 else None)
    return axes


def _give_titles(drawn: Sequence[tuple[Cell, Axes]], inches: float) -> int:
    """Name each facet above its first panel; lines that titles take beyond one in each row of facets."""
    lines: dict[int, int] = {}
    for cell, axes in drawn:
        if cell.is_first:
            of_column = [other for beside_it, other in drawn if beside_it.place[1] == cell.place[1]]
            room = inches - 0.2 - max(map(_inches_left_of, of_column))
            # Bold letters are wider. The layout takes a title to stand where its middle is: above its own panel.
            heading = cell.facet["heading" if "heading" in cell.facet else "title"].iloc[0]
            title = folded(heading, room / 1.15 * min(1.0, 2 * cell.share), rcParams["axes.titlesize"])
            axes.set_title(title)
            lines[cell.band] = max(lines.get(cell.band, 1), title.count("\n") + 1)
    return sum(lines.values()) - len(lines)


def _inches_left_of(axes: Axes) -> float:
    """What stands to the left of a panel: its values or names, and tilted names below it."""
    tight = axes.get_tightbbox()
    assert tight is not None  # of axes that are seen
    return max(0.0, axes.bbox.x0 - tight.x0) / axes.figure.dpi


def _inches_of_names(axes: Axes) -> float:
    """How much higher than a line of text the names below a panel are."""
    heights = [label.get_window_extent().height for label in axes.get_xticklabels()]
    return max(0.0, max(heights, default=0) / axes.figure.dpi - _TITLE_LINE)


def _give_equal_limits(figure: Figure) -> None:
    """Panels of one quantity over another have one axis of values, so that they can be compared."""
    alike: dict[tuple[str, str, str], list[Axes]] = {}
    for axes in figure.axes:
        quantity, over = (label.replace("\n", " ") for label in (axes.get_ylabel(), axes.get_xlabel()))
        alike.setdefault((quantity, over, axes.get_yscale()), []).append(axes)
    for (quantity, _, _), panels in alike.items():
        if quantity:  # not of rows with names
            ends = [end for axes in panels for end in axes.get_ylim()]
            for axes in panels:
                axes.set_ylim(min(ends), max(ends))


# ---- axes ------------------------------------------------------------------------------------------------------------


def are_names(values: pd.Series) -> bool:
    """Whether there are values, and names alone: they are read best in rows."""
    known = values.dropna()
    return len(known) > 0 and all(isinstance(value, str) for value in known)


def places_of(values: Iterable[Any]) -> dict[Any, int]:
    """Where each value stands on an axis of names: words in their order, then numbers ascending."""
    different = list(dict.fromkeys(values))
    numbers = sorted(value for value in different if not isinstance(value, str))
    return {value: at for at, value in enumerate([*(value for value in different if value not in numbers), *numbers])}


def _row_name(name: str) -> str:
    return folded(name, NAMES, rcParams["ytick.labelsize"])


def inches_of_rows(rows: pd.DataFrame, column: str, *, least: float = _ROW) -> float:
    """Inches of rows that are named by a column, of the facet that has most, so high that no name meets another."""
    names = rows[column].dropna().unique()
    lines = max((_row_name(name).count("\n") + 1 for name in names if isinstance(name, str)), default=1)
    return int(rows.groupby("facet")[column].nunique().max()) * max(least, 0.09 + 0.155 * lines)


def name_rows(axes: Axes, names: Iterable[str]) -> None:
    """One row per name, the first at the top."""
    labels = [_row_name(name) for name in names]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _name_columns(axes: Axes, values: Iterable[Any]) -> None:
    """One column per value; words that have no room are tilted, and stand upright where columns are narrow."""
    labels, size = [value if isinstance(value, str) else f"{value:,g}" for value in values], rcParams["xtick.labelsize"]
    room = axes.bbox.width / axes.figure.dpi / len(labels)
    names = [folded(label, 0.9 * room, size) for label in labels]
    ticks = axes.set_xticks(range(len(labels)), names)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    widths = [tick.label1.get_window_extent().width / axes.figure.dpi for tick in ticks]
    fits = [width < 0.9 * room and name.count("\n") < 3 for width, name in zip(widths, names, strict=True)]
    pairs = zip(labels, names, fits, strict=True)
    names = [name if fit else folded(label, NAMES, size) for label, name, fit in pairs]
    lines = 1 + max((name.count("\n") for name, fit in zip(names, fits, strict=True) if not fit), default=0)
    is_narrow = 1.25 * size / 72 * lines + 0.1 > 0.5 * room
    turned = {"rotation": 90, "va": "center"} if is_narrow else {"rotation": 30, "va": "top"}
    for tick, fit in zip(axes.set_xticks(range(len(labels)), names), fits, strict=True):
        if not fit:
            tick.label1.set(ha="right", rotation_mode="anchor", **turned)
    axes.grid(False, axis="x")


def _number_columns(axes: Axes, values: np.ndarray, *, may_be_log: bool) -> None:
    """An axis of numbers along which points stand: logarithmic where they span, ticks at them where few and apart.

    Whole numbers, such as of ranks, have no ticks between them.
    """
    values = np.unique(values)
    is_log = may_be_log and values[0] > 0 and values[-1] >= 4 * values[0]
    if is_log:
        axes.set_xscale("log", base=2)
    gaps = np.diff(np.log(values) if is_log else values)
    are_apart = len(values) == 1 or gaps.min() > 0.04 * gaps.sum()
    if len(values) <= _MANY and are_apart and np.allclose(values, values.round(2), rtol=0, atol=1e-9):
        axes.set_xticks(values, [f"{value:,g}" for value in values])
    elif is_log:
        axes.xaxis.set_major_formatter("{x:,g}")
    else:
        _whole_ticks(axes.xaxis, values)
    axes.set_xticks([], minor=True)


def _whole_ticks(axis: Axis, values: np.ndarray) -> None:
    """No ticks between whole numbers."""
    if np.array_equal(values, values.round()):
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def _limit_values(axes: Axes, column: Column, values: np.ndarray, *, upright: bool) -> None:
    """Limits of an axis of values: the column's, or its least range at least, and nothing below a share of nothing.

    Times begin where points do, unless zero is near, and span at least a tenth of the largest; over a logarithmic axis
    they are logarithmic too.
    """
    axis, limit = (axes.xaxis, axes.set_xlim) if upright else (axes.yaxis, axes.set_ylim)
    is_time, known = column.unit in ("ms", "us"), values[~np.isnan(values)]
    if is_time and axes.get_xscale() == "log" and known.min() > 0:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,g}")
        return
    if column.ends:
        low, high = column.ends
        limit(column.scale * (low - 0.05 * (high - low)), column.scale * (high + 0.05 * (high - low)))
        return
    low, high = axis.get_view_interval()
    least = 0.1 * known.max(initial=0) if is_time else column.scale * column.least
    pad = max(0.0, least - (high - low)) / 2
    if is_time and known.min(initial=np.inf) < 0.25 * known.max(initial=0):
        limit(0.0, high + pad)
    elif column.native == 0:
        limit(low - 0.2 * pad, high + 1.8 * pad)
    else:
        limit(max(0.0, low - pad) if column.native == 1 else low - pad, high + pad)
    _whole_ticks(axis, known)


# ---- series ----------------------------------------------------------------------------------------------------------

_HOLLOW = {"markerfacecolor": "none", "markersize": 8, "markeredgewidth": 1.4}
_STAR = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none", "markeredgewidth": 0, "zorder": 2.95}


@dataclass(frozen=True)
class Series(Panel):
    """Points of each ``line``, joined or not, with what a speedup is held against: native, noise floor, balance.

    Attributes:
        x, y: columns.
        names: values of ``x`` stand at even distances, names before numbers, and points of several lines at the same
            one a little beside each other. Where there are names alone the axis stands upright. Of values that are
            words it is so unasked.
        joined: a condition: points that are joined; empty = all, None = none.
        hollow: a condition for points that are drawn hollow, and what that means, for the legend.
        xlabel, ylabel: what the axis is called, or the column that says it; empty = as ``COLUMNS`` has it.
        reverse: more of ``x`` stands to the left, which the axis says.
        more: what else is drawn.
    """

    x: str
    y: str
    names: bool = False
    joined: str | None = ""
    hollow: tuple[str, str] | None = None
    xlabel: str = ""
    ylabel: str = ""
    reverse: bool = False
    more: Callable[[Axes, pd.DataFrame], None] | None = None

    def draw(self, axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look], facet: pd.DataFrame) -> None:
        across, up = column_of(self.x), column_of(self.y)
        shown = rows[rows[self.x].notna() & rows[self.y].notna() & rows["line"].isin(list(looks))]
        by_name = self.names or not pd.api.types.is_numeric_dtype(shown[self.x].infer_objects())
        upright = by_name and are_names(facet[self.x])
        places = places_of(facet[self.x].dropna()) if by_name else None
        points = self._points(shown, places, upright=upright)
        native = None
        if not (by_name or across.native is None or up.native is None):
            native = (across.scale * across.native, up.scale * up.native)
        if not by_name and len(points):
            along = np.array([*points["place"], *(native or ())[:1]])
            _number_columns(axes, along, may_be_log=self.joined == "")
        room = _ROW if upright else axes.bbox.width / axes.figure.dpi / len(places or "1")
        aside = _aside(points, list(looks), room) if by_name else {}
        for line, look in looks.items():
            if len(part := points[points["line"] == line]):
                _draw_line(axes, part, look, aside.get(line, 0.0), upright=upright)
        self._name_hollow(axes, points)
        _make_room(axes, points, up, upright=upright)
        _draw_references(axes, rows, self.x, up, floors_along=None if by_name else across.scale, upright=upright)
        if native is not None:
            axes.plot(*native, label="native", **_STAR)
        if self.more is not None:
            self.more(axes, rows)
        if places is not None:
            (name_rows if upright else _name_columns)(axes, places)
        _limit_values(axes, up, points[["value", "low", "high"]].to_numpy(), upright=upright)
        if self.reverse:
            axes.invert_xaxis()
        self._name_axes(axes, rows, upright=upright)

    def _points(self, shown: pd.DataFrame, places: Mapping[Any, int] | None, *, upright: bool) -> pd.DataFrame:
        """A row per point: ``place`` along the axis, ``value`` with its ends, and how it is drawn."""
        across, up = column_of(self.x), column_of(self.y)
        ends = [f"{self.y.removesuffix('_median')}_{end}" for end in ("low", "high")]
        values = up.scale * shown.reindex(columns=[self.y, *ends]).astype(float)
        is_joined = not upright and self.joined is not None
        return (
            values.set_axis(["value", "low", "high"], axis=1)
            .assign(
                line=shown["line"],
                legend=shown["legend"],
                place=across.scale * shown[self.x].astype(float) if places is None else shown[self.x].map(places),
                is_hollow=holds(shown, self.hollow[0]) if self.hollow else False,
                is_joined=holds(shown, self.joined) if is_joined and self.joined else is_joined,
                is_named=shown["line"] == shown[self.x] if upright else False,  # beside the axis
            )
            .sort_values("place", kind="stable")
        )

    def _name_hollow(self, axes: Axes, points: pd.DataFrame) -> None:
        """Say in the legend what hollow points are."""
        if self.hollow and self.hollow[1] and points["is_hollow"].any():
            look = {**_HOLLOW, "linestyle": "none", "marker": "o", "markeredgecolor": MUTED}
            axes.plot([], [], label=self.hollow[1], **look)

    def _name_axes(self, axes: Axes, rows: pd.DataFrame, *, upright: bool) -> None:
        """Label the axes; names need no label."""
        across, up = (
            (rows[label].iloc[0] if label in rows else label) or column_of(name).axis
            for label, name in ((self.xlabel, self.x), (self.ylabel, self.y))
        )
        across += ", axis reversed" if self.reverse else ""
        axes.set(**({"xlabel": up} if upright else {"xlabel": across, "ylabel": up}))


def _make_room(axes: Axes, points: pd.DataFrame, up: Column, *, upright: bool) -> None:
    """Show all points and whiskers, which stand aside, so that the axes do not see where they end.

    Whiskers that reach further beyond points and native than these are apart are cut: points would be flat lines.
    """
    if up.native == 1:
        low, high = np.nanmin([*points["value"], 1.0]), np.nanmax([*points["value"], 1.0])
        room = max(_LEAST_ROOM, high - low)
        points = points.assign(low=points["low"].clip(low - room), high=points["high"].clip(upper=high + room))
    for end in ("value", "low", "high"):
        known = points[["place", end]].dropna().to_numpy()
        axes.update_datalim(known[:, ::-1] if upright else known)
    axes.margins(0.08)


def cuts_whiskers(figure: Figure) -> bool:
    """Whether a panel's axis ends within a whisker."""
    for axes in figure.axes:
        for error in (one for one in axes.containers if isinstance(one, ErrorbarContainer)):
            for lines in error[2]:
                ends = np.array(lines.get_segments()).reshape(-1, 2, 2)
                along = int(ends[:, 0, 0].tolist() == ends[:, 1, 0].tolist())  # else they lie
                low, high = sorted(axes.get_ylim() if along else axes.get_xlim())
                if (ends[:, :, along] < low).any() or (ends[:, :, along] > high).any():
                    return True
    return False


def _aside(points: pd.DataFrame, lines: Sequence[str], room: float) -> dict[str, float]:
    """Inches by which each line stands beside its places, so that none hides another that has a place in common.

    Args:
        room: inches between two places.
    """
    groups: list[set[str]] = []  # of lines that meet, or meet the same others
    for _, of_place in points.groupby("place")["line"]:
        met = [group for group in groups if not group.isdisjoint(of_place)]
        groups = [group for group in groups if group not in met] + [set(of_place).union(*met)]
    aside = {}
    for group in groups:
        step = min(_MARKER, 0.8 * room / len(group))
        order = [line for line in lines if line in group]
        aside |= {line: (number - (len(order) - 1) / 2) * step for number, line in enumerate(order)}
    return aside


def _draw_line(axes: Axes, points: pd.DataFrame, look: Look, aside: float, *, upright: bool) -> None:
    """A line's path, its whiskers and its points, and its entry in the legend where no axis names it."""
    offset = ScaledTranslation(*((0, -aside) if upright else (aside, 0)), axes.figure.dpi_scale_trans)
    where = {"transform": axes.transData + offset, "zorder": 3}
    dots = {**look, "linestyle": "none", "markevery": max(1, len(points) // (2 * _MANY))}
    across, up = ("value", "place") if upright else ("place", "value")
    path, spread = points[points["is_joined"]], points.dropna(subset=["low", "high"])
    path = path[: len(path) * (len(path) > 1)]  # a single point is no line
    axes.plot(path[across], path[up], **{**look, "marker": "None"}, **where)
    middle = spread.assign(value=(spread["high"] + spread["low"]) / 2)  # the median need not be
    error = {"xerr" if upright else "yerr": (spread["high"] - spread["low"]) / 2, "fmt": "none"}
    caps = {"elinewidth": 1.4, "capsize": 3, "capthick": 1.4, "ecolor": look["color"]}
    axes.errorbar(middle[across], middle[up], **error, **caps, **where)
    sure, unsure = points[~points["is_hollow"]], points[points["is_hollow"]]
    axes.plot(sure[across], sure[up], **dots, **where)
    axes.plot(unsure[across], unsure[up], **{**dots, **_HOLLOW, "markeredgecolor": look["color"]}, **where)
    if not points["is_named"].all():
        axes.plot([], [], label=points["legend"].iloc[0], **(look if len(path) else dots))


def _draw_references(
    axes: Axes, rows: pd.DataFrame, x: str, up: Column, *, floors_along: float | None, upright: bool
) -> None:
    """Native, and of speedups the noise floor and perfect balance of one comparison.

    Args:
        floors_along: several comparisons' floors are drawn along ``x`` in this unit; None = one upon another.
    """
    span, line = (axes.axvspan, axes.axvline) if upright else (axes.axhspan, axes.axhline)
    alone = rows.loc[(rows["role"] == "baseline") & rows[x].isna(), up.name].dropna()
    native = alone.mean() if up.native is None else up.native
    if not np.isnan(native):
        line(up.scale * native, label="native", zorder=1, **NATIVE_LINE)
    if not up.name.endswith("speedup_median"):
        return
    of = up.name.removesuffix("speedup_median")
    fill = {"color": NOISE_FILL, "linewidth": 0, "zorder": 0.5, "label": "noise floor"}
    floors = rows.reindex(columns=[x, f"{of}floor_low", f"{of}floor_high"]).set_axis([x, "low", "high"], axis=1)
    floors = floors[floors["low"] < floors["high"]]  # a model repeats itself exactly, and has none
    ends = floors[["low", "high"]].drop_duplicates()
    if len(ends) > 1 and floors_along is not None:
        along = floors.groupby(floors[x] * floors_along).agg({"low": "min", "high": "max"})
        axes.fill_between(along.index, along["low"], along["high"], **fill)
    else:
        for low, high in ends.itertuples(index=False):
            span(low, high, **fill)
    if of:  # balance has its own line in the panel of the whole time
        return
    for balanced in rows.loc[(rows["role"] == "balanced") & rows["line"].isna(), up.name].dropna():
        line(balanced, label="perfect balance", zorder=1, **BALANCED_LINE)


# ---- bars ------------------------------------------------------------------------------------------------------------


def _inches_of_bars(rows: pd.DataFrame) -> float:
    return 0.85 + inches_of_rows(rows, "bar")


@dataclass(frozen=True)
class Bars(Panel):
    """A row of bars for each ``bar``: a piece of ``time_ms`` from ``begin_ms`` for each of ``phases``.

    ``part_origin`` says how a piece came about, ``axis_words`` what the axis is called.
    """

    height: float | Callable[[pd.DataFrame], float] = field(default=_inches_of_bars, kw_only=True)
    shares: bool = field(default=False, kw_only=True)

    def draw(self, axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look], facet: pd.DataFrame) -> None:
        places, shown = places_of(rows["bar"]), rows[rows["time_ms"] > 0]
        for (group, how), pieces in shown.groupby(["phases", "part_origin"], sort=False):
            words = group if how == "measured" else f"{group} ({how})"
            where = {"left": pieces["begin_ms"], "height": 0.7, "linewidth": 0.6, "label": words}
            axes.barh(pieces["bar"].map(places), pieces["time_ms"], **where, **phase_look(str(group), str(how)))
        ends = (shown["begin_ms"] + shown["time_ms"]).groupby(shown["bar"]).max()
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": "small"}
        for bar, end in ends.items():
            axes.annotate(milliseconds(end), (end, places[bar]), (4, 0), **beside)
        axes.set_xlim(0, 1.25 * ends.max())
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(rows["axis_words"].iloc[0])
        name_rows(axes, places)
