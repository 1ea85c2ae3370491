"""The marks that figures are made of: series of points, bars, stairs, a heat map; and the facets that hold them.

A mark is made by naming columns (``series("capacity_factor", "speedup_median")``) and draws the rows of one facet into
one panel. What a column is called on an axis, its unit, native's value and its least range stand in its row of
``columns.COLUMNS``. Rows have ``line``, which a mark's colour and legend go by. Artists carry the labels from which
``style.dress`` makes the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, withStroke
from matplotlib.transforms import ScaledTranslation

from moe_ep_bench.analysis.columns import COLUMNS, Column
from moe_ep_bench.analysis.origins import ORIGINS
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    FONT_SIZES,
    GAMMA,
    GREY,
    INK,
    MUTED,
    NATIVE_LINE,
    NOISE_FILL,
    Look,
    folded,
    frame,
    height_of,
    is_narrow,
    phase_look,
    rcParams,
    sheet,
    width_of,
)

Draw = Callable[[Axes, pd.DataFrame, Mapping[str, Look]], None]

SPEEDUP = ("speedup_low", "speedup_high")
_MANY = 10  # values of an axis; more have no tick each
_WIDTHS = {1: 8.5, 2: 10.0, 3: 11.0, 4: 11.5}  # inches of a sheet with so many panels side by side
NAMES = 2.4  # inches for names beside a panel


@dataclass(frozen=True)
class Panel:
    """One panel of a facet.

    Attributes:
        draw: (panel, rows of the facet, how each line looks).
        height: inches, or from the rows of the sheet.
        width: of the panel to that of the others in its facet, where they stand side by side.
        shares: whether it has an axis in common with its facet's other panels, so that one of them names the values.
        needs: a query that some row of the sheet must satisfy, else the panel is left out; empty = none.
    """

    draw: Draw
    height: float | Callable[[pd.DataFrame], float] = 3.3
    width: float = 1.0
    shares: bool = False
    needs: str = ""

    def inches(self, rows: pd.DataFrame) -> float:
        return self.height(rows) if callable(self.height) else self.height


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
    groups = [own for _, own in rows.groupby("facet", sort=False)]
    panels = [panel for panel in panels if not panel.needs or len(rows.query(panel.needs, engine="python"))]
    stand_beside = beside and not is_narrow()
    across, number = 1 if is_narrow() else min(most, len(groups)), len(panels)
    bands = [pd.concat(groups[at : at + across]) for at in range(0, len(groups), across)]
    heights = [[panel.inches(band) for panel in panels] for band in bands]
    widths = [1.0]
    if stand_beside:
        heights, widths = [[max(band)] for band in heights], [panel.width for panel in panels]
    shares, widths = [width / sum(widths) for width in widths], widths * across
    figure = sheet(_WIDTHS[min(4, len(widths))])
    ratios = [inches for band in heights for inches in band]
    grid = figure.add_gridspec(len(ratios), len(widths), height_ratios=ratios, width_ratios=widths)
    wide = figure.get_figwidth() / across - 0.3  # inches of a facet
    small, most_high = rcParams["axes.labelsize"], 0.5 * rcParams["figure.figsize"][1]
    shrunk = min(1.0, most_high / sum(ratios)) if most_high else 1.0
    titles = [0.0] * len(bands)
    for at, own in enumerate(groups):
        row, column = divmod(at, across)
        origins = {origin for origin in own["origin"].dropna() if origin in ORIGINS}
        for place, panel in enumerate(panels):
            where = (row, column * number + place) if stand_beside else (row * number + place, column)
            axes = figure.add_subplot(grid[where])
            if place == 0:
                axes.set_title(own["heading" if "heading" in own else "title"].iloc[0])
            panel.draw(axes, own, looks)
            if place == 0:
                # Bold letters are wider. The layout takes a title to stand where its middle is: above its own panel.
                room = (wide - _left_of(axes)) / 1.15 * min(1.0, 2 * shares[0])
                title = folded(axes.get_title(loc="left"), room, rcParams["axes.titlesize"])
                axes.set_title(title)
                titles[row] = max(titles[row], height_of(title, FONT_SIZES["axes.titlesize"]))
            across_at, down_at = (place, 0) if stand_beside else (0, place)
            axes.set_xlabel(folded(axes.get_xlabel(), shares[across_at] * (wide - 0.5), small))
            axes.set_ylabel(folded(axes.get_ylabel(), max(0.8, shrunk * heights[row][down_at] - 0.7), small))
            if panel.shares and not beside and place < number - 1:
                axes.tick_params(labelbottom=False)
                axes.set_xlabel("")
            if panel.shares and stand_beside and place > 0:
                axes.tick_params(labelleft=False)
            frame(axes, next(iter(origins)) if len(origins) == 1 else None)
    return figure, sum(ratios) + sum(titles) - len(bands) * height_of("", FONT_SIZES["axes.titlesize"])


def _left_of(axes: Axes) -> float:
    """Inches for the names, or numbers, to the left of a panel."""
    lines = [line for label in axes.get_yticklabels() for line in label.get_text().split("\n")]
    return 0.5 + width_of(max(map(len, lines), default=0), rcParams["ytick.labelsize"])


# ---- axes ------------------------------------------------------------------------------------------------------------


def axis_of(name: str) -> Column:
    """The column by which an axis goes; one without a row in ``COLUMNS`` is called by its name in words."""
    return COLUMNS.get(name) or Column(name, name.replace("_", " "))


def places_of(values: Iterable[Any]) -> dict[Any, int]:
    """Where each value stands on an axis of names: words in their order, then numbers ascending."""
    different = list(dict.fromkeys(values))
    numbers = sorted(value for value in different if not isinstance(value, str))
    return {value: at for at, value in enumerate([*(value for value in different if value not in numbers), *numbers])}


def are_names(values: pd.Series) -> bool:
    """Whether there are names alone: they are read best in rows."""
    return bool(values.dropna().map(lambda value: isinstance(value, str)).all())


def name_rows(axes: Axes, names: Iterable[str]) -> None:
    """One row per name, the first at the top."""
    width = min(NAMES, 0.36 * axes.figure.get_figwidth())
    labels = [folded(name, width, rcParams["ytick.labelsize"]) for name in names]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _name_columns(axes: Axes, values: Iterable[Any]) -> None:
    """One column per value; longer words are tilted."""
    labels = [value if isinstance(value, str) else f"{value:,g}" for value in values]
    axes.set_xticks(range(len(labels)), [folded(label, 1.3, rcParams["xtick.labelsize"]) for label in labels])
    axes.set_xlim(-0.5, len(labels) - 0.5)
    for tick, label in zip(axes.get_xticklabels(), labels, strict=True):
        if len(label) > 7 and not label[0].isdigit():
            tick.set(rotation=30, ha="right", rotation_mode="anchor")
    axes.grid(False, axis="x")


def _limit_places(axes: Axes, values: np.ndarray, *, may_be_log: bool) -> None:
    """Limits of an axis of numbers along which values stand, some room at both ends; logarithmic where they span."""
    ends = np.array([values.min(), values.max()])
    is_log = may_be_log and ends[0] > 0 and ends[1] >= 4 * ends[0]
    ends = np.log2(ends) if is_log else ends
    pad = 0.08 * (ends[1] - ends[0]) or 0.5
    axes.set_xscale("log" if is_log else "linear", **({"base": 2} if is_log else {}))
    ends += [-pad, pad]
    axes.set_xlim(2**ends if is_log else ends)


def _tick_values(axis: Axis, values: np.ndarray) -> None:
    """A tick at each value of an axis, where they are few, round and apart."""
    values = np.unique(values)
    places = np.log(values) if axis.get_scale() == "log" else values
    are_apart = len(values) < 2 or np.diff(places).min() > 0.04 * (places[-1] - places[0])
    if len(values) <= _MANY and are_apart and np.allclose(values, values.round(2), rtol=0, atol=1e-9):
        axis.set_ticks(values, [f"{value:,g}" for value in values])
    elif axis.get_scale() == "log":
        axis.set_major_formatter("{x:,g}")
    axis.set_ticks([], minor=True)


def _limit_values(axes: Axes, column: Column, values: np.ndarray, *, upright: bool) -> None:
    """Limits of an axis of values: at least the column's least range; of times from zero, or logarithmic."""
    values = values[np.isfinite(values)]
    axis, limit = (axes.xaxis, axes.set_xlim) if upright else (axes.yaxis, axes.set_ylim)
    is_time = column.unit in ("ms", "us")
    if is_time and len(values) and values.min() > 0 and values.max() >= 8 * values.min():
        (axes.set_xscale if upright else axes.set_yscale)("log", base=2)
        axis.set_major_formatter("{x:,.3g}")
        return
    low, high = axis.get_view_interval()
    pad = max(0.0, column.scale * column.least - (high - low)) / 2
    limit(0.0 if is_time else low - pad, high + pad)


# ---- series ----------------------------------------------------------------------------------------------------------

_HOLLOW = {"markerfacecolor": "none", "markersize": 8, "markeredgewidth": 1.4}
_STAR = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none", "markeredgewidth": 0, "zorder": 2.95}


def series(
    x: str,
    y: str,
    *,
    names: bool = False,
    joined: bool | str = True,
    whiskers: tuple[str, str] | None = None,
    hollow: tuple[str, str] | None = None,
    only: str = "",
    xlabel: str = "",
    ylabel: str = "",
    reverse: bool = False,
    more: Sequence[Draw] = (),
    **size: Any,
) -> Panel:
    """Points of each ``line``, joined or not, with what a speedup is held against: native, noise floor, balance.

    Args:
        names: values of ``x`` stand at even distances, names before numbers. Where there are names alone the axis
            stands upright. Of values that are words it is so unasked.
        joined: whether points are joined; or the column of those that are. Points that lie at the same ``x`` then
            stand a little beside each other, as they do at names.
        whiskers: the columns of their ends.
        hollow: a query for points that are drawn hollow, and what that means, for the legend.
        only: a query for the rows that have points; what speedups are held against is drawn of all.
        xlabel, ylabel: what the axis is called, or the column that says it; empty = as ``COLUMNS`` has it.
        reverse: more of ``x`` stands to the left.
        more: what else is drawn.
        size: attributes of ``Panel``.
    """
    across, up = axis_of(x), axis_of(y)

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        own = rows.query(only, engine="python") if only else rows
        own = own[own[x].notna() & own[y].notna() & own["line"].isin(list(looks))]
        by_name = bool(names or own[x].map(lambda value: isinstance(value, str)).any())
        upright = by_name and are_names(own[x])
        places = places_of(rows[x].dropna())
        low, high = (
            up.scale * own[end].astype(float).mask(own["role"] == "ceiling") if whiskers else np.nan
            for end in whiskers or SPEEDUP
        )
        points = pd.DataFrame(
            {
                **{name: own[name] for name in ("line", "legend")},
                "place": own[x].map(places) if by_name else across.scale * own[x].astype(float),
                "value": up.scale * own[y].astype(float),
                "low": low,
                "high": high,
                "is_hollow": own.eval(hollow[0], engine="python") if hollow else False,
                "is_joined": own[joined].astype(bool) if isinstance(joined, str) else joined and not upright,
                "is_named": own["line"] == own[x] if upright else False,  # beside the axis
            }
        ).sort_values("place", kind="stable")
        if not by_name and len(points):
            native = [] if up.native is None or across.native is None else [across.scale * across.native]
            _limit_places(axes, np.array([*points["place"], *native]), may_be_log=joined is True)
        aside = _aside(points, list(looks)) if by_name or joined is True else {}
        for line, look in looks.items():
            if len(part := points[points["line"] == line]):
                _draw_line(axes, part, look, aside.get(line, 0.0), upright=upright)
        if hollow and hollow[1] and points["is_hollow"].any():
            look = {**_HOLLOW, "linestyle": "none", "marker": "o", "markeredgecolor": MUTED}
            axes.plot([], [], label=hollow[1], **look)
        for end in ("value", "low", "high"):  # which stand aside, so that the axes do not see where they end
            known = points[["place", end]].dropna().to_numpy()
            axes.update_datalim(known[:, ::-1] if upright else known)
        axes.margins(0.08)
        _draw_references(axes, rows, x, across, up, by_name=by_name, upright=upright)
        for also in more:
            also(axes, rows, looks)
        if upright:
            name_rows(axes, places)
        elif by_name:
            _name_columns(axes, places)
        elif len(points):
            _tick_values(axes.xaxis, points["place"].to_numpy())
        _limit_values(axes, up, points[["value", "low", "high"]].to_numpy(dtype=float), upright=upright)
        if reverse:
            axes.invert_xaxis()
        words = [rows[label].iloc[0] if label in rows else label for label in (xlabel, ylabel)]
        axes.set(xlabel=words[0] or across.axis, ylabel=words[1] or up.axis)
        if upright:
            axes.set(xlabel=words[1] or up.axis, ylabel="")

    return Panel(draw, **{"shares": True, **size})


def _aside(points: pd.DataFrame, lines: Sequence[str]) -> dict[str, float]:
    """Inches by which each line stands beside its places, so that none hides another that has a place in common."""
    shared = set(points.loc[points.duplicated("place", keep=False), "line"])
    order = [line for line in lines if line in shared]
    step = min(5.0, 26 / max(1, len(order))) * rcParams["font.size"] / 10 / 72
    return {line: (number - (len(order) - 1) / 2) * step for number, line in enumerate(order)}


def _draw_line(axes: Axes, points: pd.DataFrame, look: Look, aside: float, *, upright: bool) -> None:
    """A line's path, its whiskers and its points, and its entry in the legend where no axis names it."""
    offset = ScaledTranslation(*((0, -aside) if upright else (aside, 0)), axes.figure.dpi_scale_trans)
    where, dots = {"transform": axes.transData + offset, "zorder": 3}, {**look, "linestyle": "none"}
    across, up = ("value", "place") if upright else ("place", "value")
    path, spread = points[points["is_joined"]], points.dropna(subset=["low", "high"])
    axes.plot(path[across], path[up], **{**look, "marker": "None"}, **where)
    error = {"xerr" if upright else "yerr": (spread["high"] - spread["low"]) / 2, "fmt": "none"}
    middle = spread.assign(value=(spread["high"] + spread["low"]) / 2)  # the median need not be
    caps = {"elinewidth": 1.4, "capsize": 3, "capthick": 1.4, "ecolor": look["color"]}
    axes.errorbar(middle[across], middle[up], **error, **caps, **where)
    sure, unsure = points[~points["is_hollow"]], points[points["is_hollow"]]
    axes.plot(sure[across], sure[up], **dots, **where)
    axes.plot(unsure[across], unsure[up], **{**dots, **_HOLLOW, "markeredgecolor": look["color"]}, **where)
    if not points["is_named"].all():
        axes.plot([], [], label=points["legend"].iloc[0], **(look if points["is_joined"].any() else dots))


def _draw_references(
    axes: Axes, rows: pd.DataFrame, x: str, across: Column, up: Column, *, by_name: bool, upright: bool
) -> None:
    """Native, and of speedups the noise floor and perfect balance of one comparison, or of several along the axis."""
    span, line = (axes.axvspan, axes.axvline) if upright else (axes.axhspan, axes.axhline)
    if up.native is not None:
        line(up.scale * up.native, label="native", zorder=1, **NATIVE_LINE)
        if across.native is not None and not by_name:
            axes.plot(across.scale * across.native, up.scale * up.native, label="native", **_STAR)
    elif len(alone := rows.loc[(rows["role"] == "baseline") & rows[x].isna(), up.name].dropna()):
        line(up.scale * alone.mean(), label="native", zorder=1, **NATIVE_LINE)
    if up.name != "speedup_median":
        return
    fill = {"color": NOISE_FILL, "linewidth": 0, "zorder": 0.5, "label": "noise floor"}
    floors = rows[rows["floor_low"] < rows["floor_high"]]  # a model repeats itself exactly, and has none
    ends = floors[["floor_low", "floor_high"]].drop_duplicates()
    if len(ends) > 1 and not by_name:
        along = floors.groupby(floors[x] * across.scale).agg({"floor_low": "min", "floor_high": "max"})
        axes.fill_between(along.index, along["floor_low"], along["floor_high"], **fill)
    else:
        for low, high in ends.itertuples(index=False):
            span(low, high, **fill)
    for ceiling in rows.loc[(rows["role"] == "ceiling") & rows["line"].isna(), up.name].dropna():
        line(ceiling, label="perfect balance", zorder=1, **CEILING_LINE)


def front(cost: str, flag: str) -> Draw:
    """Steps through the points that no other beats (``flag``), and through native where none beats it."""
    column = axis_of(cost)

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        del looks
        shown = rows[rows[flag].astype(bool) & ~rows["off_scale"]]
        points = with_native(shown, column)
        points = points[on_front(points)].sort_values("speed")
        if len(points) > 1:  # What may cost at most so much has the speedup of the front's last point before it.
            look = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1)), "zorder": 2, "label": "front"}
            axes.step(column.scale * points["kept"].abs(), points["speed"], where="post", **look)

    return draw


def with_native(rows: pd.DataFrame, cost: Column) -> pd.DataFrame:
    """Speedups and what is kept, less costs count for more; native stands last."""
    sign = 1 if cost.better == "higher" else -1
    points = pd.DataFrame({"speed": rows["speedup_median"], "kept": sign * rows[cost.name]})
    return pd.concat([points, pd.DataFrame({"speed": 1.0, "kept": sign * cost.native}, index=["native"])])


def on_front(points: pd.DataFrame) -> pd.Series:
    """Whether no other point beats one: is at least as much in both columns, and more in one; equal points alike."""
    first, second = points.columns
    ranked = points.sort_values([first, second], ascending=False)
    is_most = ranked[second] > ranked[second].astype(float).cummax().shift(fill_value=-np.inf)
    return is_most.groupby([ranked[first], ranked[second]]).transform("any").reindex(points.index)


# ---- bars, stairs ----------------------------------------------------------------------------------------------------


def bars(part: str, label: str, *, only: str = "", room: float = 1.17, more: Sequence[Draw] = (), **size: Any) -> Panel:
    """A row of bars for each ``bar``: a piece of ``time_ms`` from ``begin_ms`` for each ``part``.

    ``part_origin`` says how a piece came about. ``gain`` of a row, where there is one, stands beside its end.

    Args:
        label: of the axis, or the column that says it.
        room: width of the panel over that of the longest row; 0 = the longest row of the sheet (``longest_ms``), and
            nothing stands beside the ends.
        size: attributes of ``Panel``.
    """

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        places = places_of(rows["bar"].dropna())
        own = rows.query(only, engine="python") if only else rows
        own = own[own["time_ms"] > 0]
        in_order = {"sort": own[part].dtype == "category", "observed": True}
        for (group, how), pieces in own.groupby([part, "part_origin"], **in_order):
            words = str(group) if how == "measured" else f"{group} ({how})"
            where = {"left": pieces["begin_ms"], "height": 0.7, "linewidth": 0.6, "label": words}
            axes.barh(pieces["bar"].map(places), pieces["time_ms"], **where, **phase_look(str(group), str(how)))
        ends = own.assign(end=own["begin_ms"] + own["time_ms"]).groupby("bar").max(numeric_only=True)
        for bar, row in ends.iterrows() if room else ():
            words = milliseconds(row["end"]) + (f" ({row['gain']:.2f} x)" if row.get("gain", np.nan) > 0 else "")
            beside = {"textcoords": "offset points", "va": "center", "fontsize": "small"}
            axes.annotate(words, (row["end"], places[bar]), (4, 0), **beside)
        axes.set_xlim(0, room * ends["end"].max() if room else 1.02 * rows["longest_ms"].iloc[0])
        axes.set_xlabel(own[label].iloc[0] if label in own else label)
        name_rows(axes, places)
        for also in more:
            also(axes, rows, looks)

    return Panel(draw, shares=True, **size)


def milliseconds(value: float, digits: int = 3) -> str:
    """A time with so many significant digits, and no exponent: ``0.994``, ``93.6``, ``102``."""
    return f"{value:.{max(0, digits - 1 - int(np.floor(np.log10(value))))}f}" if value > 0 else "0"


def stairs(of: str, **size: Any) -> Panel:
    """Loads of experts or ranks (``of``) in falling order: a step line a case, native filled behind them."""
    column = axis_of("load_over_mean")

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        own = rows[(rows["of"] == of) & (rows["line"].isin(list(looks)) | (rows["role"] == "baseline"))]
        number = own["case_id"].nunique()
        for index, (_, case) in enumerate(own.groupby("case_id", sort=False)):
            load = np.sort(case["load_over_mean"].to_numpy(dtype=float))[::-1]
            if case["role"].iloc[0] == "baseline":
                look = {"facecolor": GREY, "edgecolor": MUTED, "linewidth": 0.6}
                axes.stairs(load, np.arange(len(load) + 1) + 0.5, fill=True, label="native (before)", **look)
                continue
            # Markers of different policies stand at different places: equal loads must not hide each other.
            every = max(number - 1, len(load) // 5)
            marked = {"markevery": ((index - 1) * every // number, every), "label": case["legend"].iloc[0]}
            edges = [0.5, *range(1, len(load) + 1), len(load) + 0.5]  # to the ends of the outer steps
            look = looks[case["line"].iloc[0]]
            axes.plot(edges, [load[0], *load, load[-1]], drawstyle="steps-mid", zorder=2.5, **marked, **look)
        axes.axhline(1, color=INK, linewidth=0.9, linestyle=":", zorder=2)
        axes.set(xlim=(0.5, len(load) + 0.5), xlabel=f"{of}s, the fullest first", ylabel=column.axis)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(False, axis="x")

    return Panel(draw, needs=f"of == '{of}' and (num_ranks > 1 or of == 'expert')", **size)


# ---- heat ----------------------------------------------------------------------------------------------------------

_SPEEDS = LinearSegmentedColormap.from_list("speeds", ["#D55E00", "#FFFFFF", "#0072B2"])  # slower, native, faster
FULL_COLOUR = 1.3  # at this speedup, or at the farthest of the sheet where that is farther
_HATCHES = {
    "no difference": ("////", "inside the noise floor"),
    "below what the model can tell": ("////", "below what the model can tell"),
    "inconclusive": ("..", "inconclusive"),
}
_NOWHERE = (-9, -9)  # of what stands in the legend alone


def heat(**size: Any) -> Panel:
    """Speedup in a cell for each swept value (``at``) and ``step``, a capacity factor or a reference; break-even line.

    Below the speedup stands the share of pairs that is dropped; a hatch says what the verdict was.
    """

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        del looks
        factors = sorted(step for step in rows["step"].unique() if isinstance(step, float))
        named = sorted({step for step in rows["step"] if isinstance(step, str)}, key=lambda step: step[0] != "p")
        steps, values = [*factors, *named], rows.sort_values("at").drop_duplicates("at")["swept_words"]
        grid = rows.pivot_table(index="step", columns="at", values="speedup_median", dropna=False, sort=False)
        speeds_SV = grid.reindex(index=steps, columns=range(len(values))).to_numpy(dtype=float)
        limit = rows["limit"].iloc[0]
        axes.set_facecolor("#F3F3F3")
        cells = np.arange(len(values)), np.arange(len(steps)), np.log(speeds_SV)
        axes.pcolormesh(*cells, cmap=_SPEEDS, vmin=-limit, vmax=limit, edgecolors="white", linewidth=1)
        for cell in rows.itertuples():
            _draw_cell(axes, cell, (cell.at, steps.index(cell.step)), limit)
        axes.axhline(len(factors) - 0.5, color="white", linewidth=8, zorder=3)
        speeds_GV = speeds_SV[: len(factors)]
        _draw_break_even(axes, speeds_GV)
        known = speeds_GV[~np.isnan(speeds_GV)] > 1
        everywhere = "faster than native in every cell" if known.all() else "nowhere faster than native"
        axes.set_title(axes.get_title(loc="left") + (f": {everywhere}" if known.all() or not known.any() else ""))
        names = [f"{step:g}" if isinstance(step, float) else step for step in steps]
        points = rcParams["ytick.labelsize"]
        axes.set_yticks(cells[1], [folded(name, 1.2, points) for name in names])
        axes.set_xticks(cells[0], [folded(value, 1.1, points) for value in values])
        axes.set(xlabel=rows["swept_key_words"].iloc[0], ylabel=f"capacity factor {GAMMA}")
        axes.set(xlim=(-0.5, len(values) - 0.5), ylim=(-0.5, len(steps) - 0.5))
        axes.yaxis.label.set_y(len(factors) / len(steps) / 2)
        axes.grid(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for label, look in (("faster", {"facecolor": _SPEEDS(0.85)}), ("slower", {"facecolor": _SPEEDS(0.15)})):
            axes.add_patch(Rectangle(_NOWHERE, 0, 0, label=label, **look))
        axes.plot([], [], color=INK, linewidth=2.2, label="break-even: speedup 1")
        for verdict, (hatch, words) in _HATCHES.items():
            if (rows["verdict"] == verdict).any():
                look = {"facecolor": "white", "edgecolor": "#8A8A8A", "hatch": 2 * hatch, "linewidth": 0.5}
                axes.add_patch(Rectangle(_NOWHERE, 0, 0, label=words, **look))

    return Panel(draw, **size)


def _draw_cell(axes: Axes, cell: Any, place: tuple[float, float], limit: float) -> None:
    """A cell's speedup, what it is paid with, and whether it is sure."""
    x, y = place
    if np.isnan(cell.speedup_median):
        text = "-" if cell.status == "ok" else cell.status
        axes.text(x, y, text, ha="center", va="center", fontsize="small", color=MUTED)
        return
    share = np.log(cell.speedup_median) / limit
    hatch, _ = _HATCHES.get(cell.verdict, ("", ""))
    if hatch:
        look = {"fill": False, "hatch": hatch, "edgecolor": "#B5B5B5", "linewidth": 0}
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
    halo = [withStroke(linewidth=3, foreground=_SPEEDS(0.5 + share / 2)), Normal()] if hatch else []
    text = {"ha": "center", "color": "white" if abs(share) > 0.8 else INK, "path_effects": halo, "zorder": 4}
    has_cost = not np.isnan(cell.dropped_share)
    axes.text(x, y + 0.02 * has_cost, f"{cell.speedup_median:.2f}", va="bottom" if has_cost else "center", **text)
    if has_cost:
        axes.text(x, y - 0.08, f"{100 * cell.dropped_share:.1f} %", va="top", fontsize="x-small", **text)


def _draw_break_even(axes: Axes, speeds_GV: np.ndarray) -> None:
    """A line along the edges between cells that pay and cells that do not, above all that stands in cells."""
    for (row, column), speed in np.ndenumerate(speeds_GV):
        for above, right in ((1, 0), (0, 1)):
            if row + above < speeds_GV.shape[0] and column + right < speeds_GV.shape[1]:
                other = speeds_GV[row + above, column + right]
                if not np.isnan(speed + other) and (speed > 1) != (other > 1):
                    edge = [column + right - 0.5, column + 0.5], [row + above - 0.5, row + 0.5]
                    for zorder, colour, width in ((4.5, "white", 4.4), (5, INK, 2.4)):
                        axes.plot(*edge, color=colour, linewidth=width, solid_capstyle="projecting", zorder=zorder)
