"""The marks that figures are made of: series of points and bars; and the facets that hold them.

A mark is made by naming columns (``series("capacity_factor", "speedup_median")``) and draws the rows of one facet into
one panel. What a column is called on an axis, its unit, native's value and its least range stand in its row of
``columns.COLUMNS``; a column's ``_low`` and ``_high`` are whiskers. Rows have ``line``, which a mark's colour and
legend go by. Artists carry the labels from which ``style.dress`` makes the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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

Draw = Callable[[Axes, pd.DataFrame, Mapping[str, Look]], None]

_MANY = 10  # values of an axis; more have no tick each
_WIDTHS = {1: 8.5, 2: 10.0, 3: 11.0, 4: 11.5}  # inches of a sheet with so many panels side by side
_TITLE_LINE = 0.17  # inches
NAMES = 2.4  # inches for names beside a panel


@dataclass(frozen=True)
class Panel:
    """One panel of a facet.

    Attributes:
        draw: (panel, rows of the facet, how each line looks).
        height: inches, or from the rows of the sheet.
        width: of the panel to that of the others in its facet, where they stand side by side.
        shares: whether it has an axis in common with its facet's other panels, so that one of them names the values.
        where: a condition (``conditions``): rows of the facet that the panel draws; without any it is left out;
            empty = all.
    """

    draw: Draw
    height: float | Callable[[pd.DataFrame], float] = 3.3
    width: float = 1.0
    shares: bool = False
    where: str = ""

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
        height: inches.
        is_first, is_last: of its facet's panels.
    """

    facet: pd.DataFrame
    panel: Panel
    band: int
    place: tuple[int, int]
    height: float
    is_first: bool
    is_last: bool


def facets(
    rows: pd.DataFrame, panels: Sequence[Panel], looks: Mapping[str, Look], *, beside: bool = False, most: int = 2
) -> tuple[Figure, float]:
    """Draw every panel for every ``facet`` of the rows; its origin frames a panel, ``heading`` or ``title`` names it.

    Args:
        beside: a facet's panels stand side by side, else one under another.
        most: facets side by side.

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
    title_lines = [1] * (cells[-1].band + 1)
    for cell in cells:
        axes = figure.add_subplot(grid[cell.place])
        share = widths[cell.place[1] % len(widths)] / sum(widths)
        cell.panel.draw(axes, cell.panel.rows(cell.facet), looks)
        if cell.is_first:
            title_lines[cell.band] = max(title_lines[cell.band], _give_title(axes, cell.facet, inches, share))
        points = rcParams["axes.labelsize"]
        axes.set_xlabel(folded(axes.get_xlabel(), share * (inches - 0.5), points))
        axes.set_ylabel(folded(axes.get_ylabel(), max(0.8, cell.height - 0.7), points))
        if cell.panel.shares and not beside and not cell.is_last:
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")
        if cell.panel.shares and beside and not cell.is_first:
            axes.tick_params(labelleft=False)
        origins = {origin for origin in cell.facet["origin"].dropna() if origin in ORIGINS}
        frame(axes, next(iter(origins)) if len(origins) == 1 else None)
    _give_equal_limits(figure)
    return figure, sum(heights) + _TITLE_LINE * (sum(title_lines) - len(title_lines))


def _laid_out(
    groups: Sequence[pd.DataFrame], panels: Sequence[Panel], across: int, *, beside: bool
) -> tuple[list[Cell], list[float]]:
    """The cells of all facets, ``across`` side by side, and the inches of each row of the grid."""
    cells: list[Cell] = []
    heights: list[float] = []
    for band, begin in enumerate(range(0, len(groups), across)):
        rows = pd.concat(groups[begin : begin + across])
        of_band = {panel: panel.inches(rows) for panel in panels_of(panels, rows)}
        for column, group in enumerate(groups[begin : begin + across]):
            own = panels_of(panels, group)
            for panel in own:
                if beside:
                    place = (len(heights), column * len(panels) + list(panels).index(panel))
                else:
                    place = (len(heights) + list(of_band).index(panel), column)
                cells.append(Cell(group, panel, band, place, of_band[panel], panel is own[0], panel is own[-1]))
        heights += [max(of_band.values())] if beside else of_band.values()
    return cells, heights


def _give_title(axes: Axes, facet: pd.DataFrame, inches: float, share: float) -> int:
    """Name a facet above its first panel, which has this share of its inches; the title's lines."""
    # Bold letters are wider. The layout takes a title to stand where its middle is: above its own panel.
    labels = axes.yaxis.get_tightbbox()
    room = inches - 0.2 - (0 if labels is None else (axes.bbox.x0 - labels.x0) / axes.figure.dpi)
    heading = facet["heading" if "heading" in facet else "title"].iloc[0]
    title = folded(heading, room / 1.15 * min(1.0, 2 * share), rcParams["axes.titlesize"])
    axes.set_title(title)
    return title.count("\n") + 1


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


def name_rows(axes: Axes, names: Iterable[str]) -> None:
    """One row per name, the first at the top."""
    width = min(NAMES, 0.36 * axes.figure.get_figwidth())
    labels = [folded(name, width, rcParams["ytick.labelsize"]) for name in names]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _name_columns(axes: Axes, values: Iterable[Any]) -> None:
    """One column per value; words for which it has no room are tilted."""
    labels = [value if isinstance(value, str) else f"{value:,g}" for value in values]
    axes.set_xticks(range(len(labels)), [folded(label, 1.3, rcParams["xtick.labelsize"]) for label in labels])
    axes.set_xlim(-0.5, len(labels) - 0.5)
    for tick in axes.get_xticklabels():
        if tick.get_window_extent().width > 0.9 * axes.bbox.width / len(labels):
            tick.set(rotation=30, ha="right", rotation_mode="anchor")
    axes.grid(False, axis="x")


def _number_columns(axes: Axes, values: np.ndarray, *, may_be_log: bool) -> None:
    """An axis of numbers along which points stand: logarithmic where they span, ticks at them where few and apart."""
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
    axes.set_xticks([], minor=True)


def _limit_values(axes: Axes, column: Column, values: np.ndarray, *, upright: bool) -> None:
    """Limits of an axis of values: at least the column's least range; of times from zero, or as the other axis log."""
    axis, limit = (axes.xaxis, axes.set_xlim) if upright else (axes.yaxis, axes.set_ylim)
    is_time = column.unit in ("ms", "us")
    if is_time and axes.get_xscale() == "log" and np.nanmin(values) > 0:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,g}")
        return
    low, high = axis.get_view_interval()
    pad = max(0.0, column.scale * column.least - (high - low)) / 2
    limit(0.0 if is_time else low - pad, high + pad)


# ---- series ----------------------------------------------------------------------------------------------------------

_HOLLOW = {"markerfacecolor": "none", "markersize": 8, "markeredgewidth": 1.4}
_STAR = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none", "markeredgewidth": 0, "zorder": 2.95}


@dataclass(frozen=True)
class Series:
    """Points of each ``line``, joined or not, with what a speedup is held against: native, noise floor, balance.

    Attributes:
        x, y: columns.
        names: values of ``x`` stand at even distances, names before numbers, and points of several lines at the same
            one a little beside each other. Where there are names alone the axis stands upright. Of values that are
            words it is so unasked.
        joined: a condition: points that are joined; empty = all, None = none.
        hollow: a condition for points that are drawn hollow, and what that means, for the legend.
        xlabel, ylabel: what the axis is called, or the column that says it; empty = as ``COLUMNS`` has it.
        reverse: more of ``x`` stands to the left.
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

    def draw(self, axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        """Draw rows into a panel, those whose line has a look as points."""
        across, up = column_of(self.x), column_of(self.y)
        shown = rows[rows[self.x].notna() & rows[self.y].notna() & rows["line"].isin(list(looks))]
        by_name = self.names or not pd.api.types.is_numeric_dtype(shown[self.x].infer_objects())
        upright = by_name and are_names(rows[self.x])
        places = places_of(rows[self.x].dropna()) if by_name else None
        points = self._points(shown, places, upright=upright)
        native = None
        if not (by_name or across.native is None or up.native is None):
            native = (across.scale * across.native, up.scale * up.native)
        if not by_name and len(points):
            along = np.array([*points["place"], *(native or ())[:1]])
            _number_columns(axes, along, may_be_log=self.joined == "")
        aside = _aside(points, list(looks)) if by_name else {}
        for line, look in looks.items():
            if len(part := points[points["line"] == line]):
                _draw_line(axes, part, look, aside.get(line, 0.0), upright=upright)
        self._name_hollow(axes, points)
        _make_room(axes, points, upright=upright)
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
        axes.set(**({"xlabel": up} if upright else {"xlabel": across, "ylabel": up}))


def series(x: str, y: str, **options: Any) -> Panel:
    """A panel of a ``Series``; options are its attributes, and those of ``Panel``."""
    of_series = {name: options.pop(name) for name in list(options) if name in Series.__dataclass_fields__}
    return Panel(Series(x, y, **of_series).draw, **{"shares": True, **options})


def _make_room(axes: Axes, points: pd.DataFrame, *, upright: bool) -> None:
    """Show all points and whiskers, which stand aside, so that the axes do not see where they end."""
    for end in ("value", "low", "high"):
        known = points[["place", end]].dropna().to_numpy()
        axes.update_datalim(known[:, ::-1] if upright else known)
    axes.margins(0.08)


def _aside(points: pd.DataFrame, lines: Sequence[str]) -> dict[str, float]:
    """Inches by which each line stands beside its places, so that none hides another that has a place in common."""
    shared = set(points.loc[points.duplicated("place", keep=False), "line"])
    order = [line for line in lines if line in shared]
    step = min(5.0, 26 / max(1, len(order))) * rcParams["font.size"] / 10 / 72
    return {line: (number - (len(order) - 1) / 2) * step for number, line in enumerate(order)}


def _draw_line(axes: Axes, points: pd.DataFrame, look: Look, aside: float, *, upright: bool) -> None:
    """A line's path, its whiskers and its points, and its entry in the legend where no axis names it."""
    offset = ScaledTranslation(*((0, -aside) if upright else (aside, 0)), axes.figure.dpi_scale_trans)
    where = {"transform": axes.transData + offset, "zorder": 3}
    dots = {**look, "linestyle": "none", "markevery": max(1, len(points) // (2 * _MANY))}
    across, up = ("value", "place") if upright else ("place", "value")
    path, spread = points[points["is_joined"]], points.dropna(subset=["low", "high"])
    axes.plot(path[across], path[up], **{**look, "marker": "None"}, **where)
    middle = spread.assign(value=(spread["high"] + spread["low"]) / 2)  # the median need not be
    error = {"xerr" if upright else "yerr": (spread["high"] - spread["low"]) / 2, "fmt": "none"}
    caps = {"elinewidth": 1.4, "capsize": 3, "capthick": 1.4, "ecolor": look["color"]}
    axes.errorbar(middle[across], middle[up], **error, **caps, **where)
    sure, unsure = points[~points["is_hollow"]], points[points["is_hollow"]]
    axes.plot(sure[across], sure[up], **dots, **where)
    axes.plot(unsure[across], unsure[up], **{**dots, **_HOLLOW, "markeredgecolor": look["color"]}, **where)
    if not points["is_named"].all():
        axes.plot([], [], label=points["legend"].iloc[0], **(look if points["is_joined"].any() else dots))


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
    if up.name != "speedup_median":
        return
    fill = {"color": NOISE_FILL, "linewidth": 0, "zorder": 0.5, "label": "noise floor"}
    floors = rows[rows["floor_low"] < rows["floor_high"]]  # a model repeats itself exactly, and has none
    ends = floors[["floor_low", "floor_high"]].drop_duplicates()
    if len(ends) > 1 and floors_along is not None:
        along = floors.groupby(floors[x] * floors_along).agg({"floor_low": "min", "floor_high": "max"})
        axes.fill_between(along.index, along["floor_low"], along["floor_high"], **fill)
    else:
        for low, high in ends.itertuples(index=False):
            span(low, high, **fill)
    for balanced in rows.loc[(rows["role"] == "balanced") & rows["line"].isna(), up.name].dropna():
        line(balanced, label="perfect balance", zorder=1, **BALANCED_LINE)


# ---- bars ------------------------------------------------------------------------------------------------------------


def bars(**size: Any) -> Panel:
    """A row of bars for each ``bar``: a piece of ``time_ms`` from ``begin_ms`` for each of ``phases``.

    ``part_origin`` says how a piece came about, ``axis_words`` what the axis is called.

    Args:
        size: attributes of ``Panel``.
    """

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        places, shown = places_of(rows["bar"]), rows[rows["time_ms"] > 0]
        for (group, how), pieces in shown.groupby(["phases", "part_origin"], sort=False):
            words = group if how == "measured" else f"{group} ({how})"
            where = {"left": pieces["begin_ms"], "height": 0.7, "linewidth": 0.6, "label": words}
            axes.barh(pieces["bar"].map(places), pieces["time_ms"], **where, **phase_look(group, how))
        ends = (shown["begin_ms"] + shown["time_ms"]).groupby(shown["bar"]).max()
        beside = {"textcoords": "offset points", "va": "center", "fontsize": "small"}
        for bar, end in ends.items():
            axes.annotate(milliseconds(end), (end, places[bar]), (4, 0), **beside)
        axes.set_xlim(0, 1.17 * ends.max())
        axes.set_xlabel(rows["axis_words"].iloc[0])
        name_rows(axes, places)

    return Panel(draw, **size)
