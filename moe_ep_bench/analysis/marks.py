"""The marks that figures are made of: lines, points, bars, a heat map, a forest, stairs; references; facets.

A mark is made by naming columns and draws the rows of one facet into one panel: ``Marks.draw(axes, rows, looks)``. Rows
have the columns of ``figures.case_rows``: ``line`` says which rows one line joins, ``name`` what a case is called.
Artists carry the labels from which ``style.dress`` makes the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    EXTRAPOLATED_LOOK,
    GAMMA,
    GREY,
    HOW,
    INK,
    MUTED,
    NATIVE_LINE,
    NOISE_FILL,
    Look,
    Sheet,
    frame,
    is_narrow,
    labels_of,
    phase_look,
)

SPEEDUP = ("speedup_low", "speedup_high")
# Column: its label in a panel, the factor on its values, native's value, and the least range that an axis has, so that
# noise is not blown up to fill a panel.
AXES: dict[str, tuple[str, float, float | None, float]] = {
    "speedup_median": ("speedup (native = 1)", 1, 1.0, 0.1),
    "dropped_share": ("dropped (%)", 100, 0.0, 5),
    "retained_mass": ("score mass kept (%)", 100, 100.0, 5),
    "median_ms": ("layer time (ms)", 1, None, 0),
}
_MANY = 10  # values of an axis; more have no tick each
_WIDTHS = {1: 8.5, 2: 10.0, 3: 11.0, 4: 11.5}  # inches of a sheet with so many panels side by side


@dataclass(frozen=True)
class Marks:
    """What is drawn in one panel of a facet.

    Attributes:
        draw: (panel, rows of the facet, how each line looks).
        ratio: of the panel's height to that of the others in its facet, or of its width where they stand side by side.
        shares_x: it has the axis of the panel below it, which names the values.
        needs: a query that some row of the sheet must satisfy, else the panel is left out; empty = none.
    """

    draw: Callable[[Axes, pd.DataFrame, Mapping[str, Look]], None]
    ratio: float = 1.0
    shares_x: bool = False
    needs: str = ""


# ---- facets --------------------------------------------------------------------------------------------------------


def facets(
    rows: pd.DataFrame,
    marks: Sequence[Marks],
    looks: Mapping[str, Look],
    height: float,
    *,
    beside: bool = False,
    most: int = 2,
) -> tuple[Sheet, float]:
    """Draw every mark for every ``facet`` of the rows; its origin frames a panel, ``heading`` or ``title`` names it.

    Args:
        height: inches of a facet.
        beside: a facet's panels stand side by side, else one under another.
        most: facets side by side.

    Returns:
        The sheet, and the inches of its body.
    """
    groups = [own for _, own in rows.groupby("facet", sort=False)]
    marks = [mark for mark in marks if not mark.needs or len(rows.query(mark.needs, engine="python"))]
    ratios, per_group = [mark.ratio for mark in marks], len(marks)
    columns = 1 if is_narrow() else min(most, len(groups))
    if is_narrow() and beside:
        height, beside = 0.8 * height * per_group, False
    num_rows = -(-len(groups) // columns)
    figure = Sheet(_WIDTHS[min(4, columns * (per_group if beside else 1))])
    if beside:
        grid = figure.add_gridspec(num_rows, columns * per_group, width_ratios=ratios * columns)
    else:
        grid = figure.add_gridspec(num_rows * per_group, columns, height_ratios=ratios * num_rows)
    for at, own in enumerate(groups):
        row, column = divmod(at, columns)
        places = [(row, column * per_group + n) if beside else (row * per_group + n, column) for n in range(per_group)]
        panels = [figure.add_subplot(grid[place]) for place in places]
        panels[0].set_title(own["heading" if "heading" in own else "title"].iloc[0])
        figure.titles.append((panels[0], panels[-1] if beside else panels[0]))
        for axes, mark in zip(panels, marks, strict=True):
            mark.draw(axes, own, looks)
            if axes is not panels[-1] and mark.shares_x and not beside:
                axes.tick_params(labelbottom=False)
                axes.set_xlabel("")
            if axes is not panels[0] and beside and not is_narrow():
                axes.tick_params(labelleft=not mark.shares_x)
            origins = {origin for origin in own["origin"].dropna() if origin in HOW}
            frame(axes, origins.pop() if len(origins) == 1 else None)
    return figure, num_rows * height


# ---- axes and references -------------------------------------------------------------------------------------------


def limits(values: Iterable[float], least: float) -> tuple[float, float]:
    """Limits about finite values, at least ``least`` apart; 0 = a tenth of them."""
    known = np.array(list(values), dtype=float)
    low, high = np.nanmin(known), np.nanmax(known)
    least = least or 0.1 * abs(high) or 1.0
    missing, pad = max(0.0, least - (high - low)) / 2, 0.07 * max(high - low, least)
    return low - missing - pad, high + missing + pad


def axis_of(column: str) -> tuple[str, float, float | None, float]:
    """A column as an axis (``AXES``); of one that is not listed its name in words."""
    return AXES.get(column, (column.replace("_", " "), 1, None, 0))


def references(axes: Axes, rows: pd.DataFrame, *, upright: bool = False, along: pd.Series | None = None) -> None:
    """Native at 1, the noise floor and perfect balance of one comparison, or of several at places ``along`` the axis.

    Args:
        upright: speedup runs along the bottom.
    """
    span, line = (axes.axvspan, axes.axvline) if upright else (axes.axhspan, axes.axhline)
    line(1, label="native", zorder=1, **NATIVE_LINE)
    has_floor = rows["floor_low"] < rows["floor_high"]  # a model repeats itself exactly, and has none
    if along is not None:
        floors = (
            rows[has_floor].groupby(along)[["floor_low", "floor_high"]].agg({"floor_low": "min", "floor_high": "max"})
        )
        if len(floors):
            ends = floors["floor_low"], floors["floor_high"]
            axes.fill_between(floors.index, *ends, color=NOISE_FILL, linewidth=0, zorder=0.5, label="noise floor")
        balanced = rows[rows["role"] == "ceiling"].groupby(along)["speedup_median"].mean()
        if len(balanced):
            axes.plot(balanced.index, balanced, label="perfect balance", zorder=1, **CEILING_LINE)
        return
    for low, high in rows.loc[has_floor, ["floor_low", "floor_high"]].drop_duplicates().itertuples(index=False):
        span(low, high, color=NOISE_FILL, linewidth=0, zorder=0.5, label="noise floor")
    for ceiling in rows.loc[rows["role"] == "ceiling", "speedup_median"].dropna():
        line(ceiling, label="perfect balance", zorder=1, **CEILING_LINE)


def name_rows(axes: Axes, labels: Sequence[str], inches: float = 2.4) -> None:
    """One row per label, the first at the top."""
    axes.set_yticks(range(len(labels)), labels_of(axes.figure, labels, inches))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


# ---- lines ---------------------------------------------------------------------------------------------------------


def lines(x: str, y: str, *, words: str = "", as_words: bool = False, ratio: float = 1.0, only: str = "") -> Marks:
    """A line for each ``line``, with whiskers where ``y`` is a speedup; lines stand a little beside each other.

    Args:
        words: what the axis of ``x`` is called, or the column that holds it; empty = after ``x``.
        as_words: values at even distances, names before numbers. Where there are names alone the axis stands upright,
            for names are read best in rows.
        only: a query for the rows that have lines; what speedups are held against is drawn of all.
    """
    label, factor, native, least = axis_of(y)
    is_speedup = y == "speedup_median"

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        own = rows.query(only) if only else rows
        own = own[own[x].notna() & own[y].notna() & own["line"].isin(list(looks)) & (own["role"] != "ceiling")]
        place_of, is_log = _places(rows[x].dropna(), as_words=as_words)
        upright = as_words and all(isinstance(value, str) for value in place_of)
        own = own.assign(place=own[x].map(place_of), value=factor * own[y].astype(float))
        own = own.sort_values("place", kind="stable")
        own["place"] += 0 if upright else _aside(own, list(looks), as_words=as_words)
        for line, look in looks.items():
            if (part := own[own["line"] == line]).empty:
                continue
            look = look | ({"linestyle": "none"} if upright else {})
            named = {} if upright else {"label": part["legend"].iloc[0]}
            axes.plot(*_turned(part["place"], part["value"], upright), zorder=3, **named, **look)
            if is_speedup:
                _draw_whiskers(axes, part, look["color"], upright=upright)
        ends = [*own["value"], *([] if native is None else [native])]
        if is_speedup:
            ends += [*own[list(SPEEDUP)].to_numpy(dtype=float).ravel(), *rows[["floor_low", "floor_high"]].stack()]
            ends += [*rows.loc[rows["role"] == "ceiling", y].dropna()]
            along = rows[x].map(place_of) if not as_words and len(place_of) > 1 else None
            references(axes, rows, upright=upright, along=along)
        elif native is not None:
            (axes.axvline if upright else axes.axhline)(native, zorder=1, **NATIVE_LINE)
        elif len(beside := rows.loc[(rows["role"] == "baseline") & rows[x].isna(), y].dropna()):
            axes.axhline(factor * beside.mean(), zorder=1, label="native", **NATIVE_LINE)
            ends.append(factor * beside.mean())
        _name_values(axes, place_of, is_log=is_log, upright=upright, as_words=as_words)
        _scale(axes, ends, least, is_time=y.endswith(("_ms", "_us")), upright=upright)
        (axes.set_xlabel if upright else axes.set_ylabel)(label)
        if not upright:
            axes.set_xlabel(rows[words].iloc[0] if words in rows else words or axis_of(x)[0])

    return Marks(draw, ratio, shares_x=True)


def _scale(axes: Axes, ends: list[float], least: float, *, is_time: bool, upright: bool) -> None:
    """Limits of the values' axis; of times from zero, or logarithmic where they span enough."""
    low, high = limits(ends, least)
    if is_time and np.nanmin(ends) > 0 and np.nanmax(ends) >= 8 * np.nanmin(ends):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g}"))
        return
    (axes.set_xlim if upright else axes.set_ylim)(0.0 if is_time else low, high)


def _places(values: pd.Series, *, as_words: bool) -> tuple[dict[Any, float], bool]:
    """Where each value stands along an axis, in order, and whether that is its logarithm to the base of 2."""
    words = [value for value in dict.fromkeys(values) if isinstance(value, str)]
    numbers = sorted({value for value in values if not isinstance(value, str)})
    if as_words or words:
        return {value: float(place) for place, value in enumerate([*words, *numbers])}, False
    is_log = bool(numbers) and numbers[0] > 0 and numbers[-1] / numbers[0] >= 4
    return {number: float(np.log2(number)) if is_log else float(number) for number in numbers}, is_log


def _aside(rows: pd.DataFrame, order: list[str], *, as_words: bool) -> pd.Series:
    """How far each row stands from its place, so that no line hides another: an even spread at each place."""
    rank = rows["line"].map({line: n for n, line in enumerate(order)}).groupby(rows["place"]).rank(method="dense")
    number = rank.groupby(rows["place"]).transform("max")
    span = rows["place"].max() - rows["place"].min()
    step = np.minimum(0.09, 0.7 / number) if as_words or not span else 0.011 * span
    return (rank - (number + 1) / 2) * step


def _turned(at: Any, values: Any, upright: bool) -> tuple[Any, Any]:
    return (values, at) if upright else (at, values)


def _draw_whiskers(axes: Axes, rows: pd.DataFrame, colour: str, *, upright: bool) -> None:
    span = axes.hlines if upright else axes.vlines
    span(rows["place"], *(rows[end] for end in SPEEDUP), color=colour, linewidth=1.4, zorder=3.5)
    cap = {"linestyle": "none", "marker": "|" if upright else "_", "markersize": 8, "markeredgewidth": 1.4}
    for end in SPEEDUP:
        axes.plot(*_turned(rows["place"], rows[end], upright), color=colour, zorder=3.5, **cap)


def _name_values(axes: Axes, place_of: Mapping[Any, float], *, is_log: bool, upright: bool, as_words: bool) -> None:
    """Tick an axis at its values, or evenly where they are many."""
    labels = [value if isinstance(value, str) else f"{value:,g}" for value in place_of]
    if upright:
        name_rows(axes, labels, 1.9)
        return
    has_words = any(isinstance(value, str) for value in place_of)
    ends = min(place_of.values()), max(place_of.values())
    pad = 0.5 if as_words or has_words else 0.08 * (ends[1] - ends[0]) or 0.5
    axes.set_xlim(ends[0] - pad, ends[1] + pad)
    axes.grid(False, axis="x")
    places = sorted(place_of.values())
    are_apart = len(places) < 2 or min(np.diff(places)) > 0.04 * (places[-1] - places[0])
    if has_words or (len(labels) <= _MANY and are_apart):
        axes.set_xticks(list(place_of.values()), labels_of(axes.figure, labels, 1.3))
        for tick in axes.get_xticklabels():
            if len(tick.get_text()) > 7 and not tick.get_text()[0].isdigit():
                tick.set(rotation=30, ha="right", rotation_mode="anchor")
    elif is_log:
        axes.xaxis.set_major_locator(MaxNLocator(_MANY, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{2**place:,g}"))


# ---- points --------------------------------------------------------------------------------------------------------

_FRONT = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1))}
_STAR = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none", "markeredgewidth": 0}
_SURE = ("faster", "slower")


def points(cost: str, on_front: str, *, sign: int, label: str, ratio: float = 1.0) -> Marks:
    """Speedup over what it costs, native as a star, the front as steps; hollow where a speedup is not significant.

    Rows that are ``off_scale`` stand at the right edge, with their numbers in words.

    Args:
        cost: a share, drawn in percent; what costs more stands to the right.
        on_front: the column that tells which rows no other beats.
        sign: 1 where more of ``cost`` is better.
    """
    native = 100.0 if sign > 0 else 0.0

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        own = rows[rows["line"].isin(list(looks)) & rows["speedup_median"].notna()].assign(cost=100 * rows[cost])
        axes.plot(native, 1, zorder=2.95, label="native", **_STAR)
        here, away = own[~own["off_scale"]], own[own["off_scale"]]
        for row in here.to_dict("records"):
            axes.vlines(
                row["cost"],
                *(row[end] for end in SPEEDUP),
                color=looks[row["line"]]["color"],
                linewidth=1.2,
                zorder=2.5,
            )
            _draw_point(
                axes, row, (row["cost"], row["speedup_median"]), looks[row["line"]], is_sure=row["verdict"] in _SURE
            )
        references(axes, rows)
        axes.set(xlabel=label, ylabel=axis_of("speedup_median")[0])
        axes.margins(x=0.15, y=0.1)
        if sign > 0:
            axes.invert_xaxis()
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        right += 0.38 * (right - left) if len(away) else 0.0  # room for words
        axes.set(xlim=(left, right), ylim=(low, high))
        line = sorted([*here.loc[here[on_front], ["speedup_median", "cost"]].itertuples(index=False, name=None)])
        if len(front([*((speed, sign * x) for speed, x in line), (1.0, sign * native)])) > len(line):
            line = sorted([*line, (1.0, native)])
        if len(line) > 1:  # What may cost at most so much has the speedup of the front's last point before it.
            axes.step(
                [x for _, x in line], [speed for speed, _ in line], where="post", zorder=2, label="front", **_FRONT
            )
        pad = 0.09 * (high - low)
        for row in away.to_dict("records"):
            look, y = looks[row["line"]], min(max(row["speedup_median"], low + pad), high - pad)
            _draw_point(axes, {**row, "step": None}, (right, y), look, is_sure=row["verdict"] in _SURE, clip_on=False)
            text = f"speedup {row['speedup_median']:.2f}\nat {row['cost']:.0f} %"
            _write(axes, text, (right, y), (-7, 0), look["color"], ha="right", va="center")

    return Marks(draw, ratio)


def front(values: Sequence[tuple[float, float]]) -> list[int]:
    """Which of (speed, faithfulness) no other beats: places, slowest first; of equal points all.

    A point is beaten by one that is at least as good in both and better in one.
    """
    order = sorted(range(len(values)), key=lambda place: (-values[place][0], -values[place][1]))
    kept: list[int] = []
    best, best_at = -np.inf, np.inf  # the greatest faithfulness so far, and the greatest speed that has it
    for place in order:
        speed, faithfulness = values[place]
        if faithfulness > best or (faithfulness == best and speed == best_at):
            kept.append(place)
            best, best_at = faithfulness, speed
    return kept[::-1]


def relief() -> Marks:
    """How much less the fullest rank computes, over the mass kept, below the frontier of dropping (``curve``)."""

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        own = rows[rows["line"].isin(list(looks)) & rows["relief"].notna() & ~rows["off_scale"]]
        for row in own.to_dict("records"):
            _draw_point(axes, row, (100 * row["kept_share"], row["relief"]), looks[row["line"]], is_sure=True)
        axes.plot(100, 1, zorder=2.95, **_STAR)
        axes.set(xlabel="score mass kept (% of top-k's)", ylabel="fullest rank, native / policy")
        axes.margins(x=0.08, y=0.12)
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for relief_N, kept_N in rows["curve"].dropna().head(1):
            words = "frontier: none that only drops is above; rerouting may be"
            axes.plot(100 * kept_N, relief_N, color=INK, linewidth=1.4, zorder=2, label=words)
        axes.set(xlim=(right, left), ylim=(low, high))

    return Marks(draw, needs="relief.notna()")


def _draw_point(axes: Axes, row: Mapping[str, Any], place: tuple, look: Look, *, is_sure: bool, **changes: Any) -> None:
    filled = {"color": look["color"], "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.6}
    hollow = {"markerfacecolor": "none", "markeredgecolor": look["color"], "markersize": 8, "markeredgewidth": 1.4}
    marker = {"marker": look["marker"], "linestyle": "none", "zorder": 3}
    axes.plot(*place, **marker, **(filled if is_sure else hollow), **changes)
    axes.plot([], [], label=row["line"], **marker, **filled)
    if not is_sure:
        unsure = {**hollow, "markeredgecolor": MUTED, "marker": "o", "linestyle": "none"}
        axes.plot([], [], label="neither faster nor slower for sure", **unsure)
    if row["step"] is not None and row["step"] == row["step"]:
        word = row["step"] if isinstance(row["step"], str) else f"{row['step']:g}"
        _write(axes, word.removesuffix(" spare"), place, (6, 3), look["color"])


def _write(axes: Axes, text: str, place: tuple, offset: tuple, colour: str, **sides: str) -> None:
    """A word beside a mark, legible where a line runs through it; the sheet finds room for one without ``sides``."""
    about = {"textcoords": "offset points", "fontsize": "small", "color": colour, "zorder": 2.9}
    halo = [withStroke(linewidth=2.5, foreground="white")]
    word = axes.annotate(text, place, offset, path_effects=halo, **about, **sides)
    word.set_in_layout(False)
    if not sides and isinstance(axes.figure, Sheet):
        axes.figure.words.append(word)


# ---- bars, stairs --------------------------------------------------------------------------------------------------


def bars(part: str, xlabel: str, *, ratio: float = 1.0) -> Marks:
    """A bar per case (``name``), a piece of ``time_ms`` for each ``part``; ``part_origin`` says how it came about."""

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        del looks
        names = list(rows["bar"].dropna().unique())
        ends = np.zeros(len(names))
        for (group, how), own in rows[rows["time_ms"].notna()].groupby([part, "part_origin"], sort=False):
            times = own.set_index("bar")["time_ms"].reindex(names).fillna(0).to_numpy(dtype=float)
            if not times.any():
                continue
            look = {"linewidth": 0.6, "height": 0.66, **phase_look(str(group), str(how))}
            label = str(group) if how == "measured" else f"{group} ({how})"
            axes.barh(np.arange(len(names)), times, left=ends, label=label, **look)
            ends += times
        write_ends(axes, ends, [milliseconds(end) for end in ends])
        axes.set_xlim(0, 1.17 * ends.max())
        axes.set_xlabel(xlabel)
        name_rows(axes, names)

    return Marks(draw, ratio, shares_x=True)


def write_ends(axes: Axes, ends: Iterable[float], texts: Iterable[str]) -> None:
    """Write beside the ends of bars."""
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axes.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize="small")


def milliseconds(value: float, digits: int = 3) -> str:
    """A time with so many significant digits, and no exponent: ``0.994``, ``93.6``, ``102``."""
    return f"{value:.{max(0, digits - 1 - int(np.floor(np.log10(value))))}f}" if value > 0 else "0"


def stairs(of: str, ratio: float = 1.0) -> Marks:
    """Loads of experts or ranks (``of``) in falling order: a step line a case, native filled behind them."""
    native = {"facecolor": GREY, "edgecolor": MUTED, "linewidth": 0.6}

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        own = rows[(rows["of"] == of) & (rows["line"].isin(list(looks)) | (rows["role"] == "baseline"))]
        cases = list(own.groupby("case_id", sort=False))
        for index, (_, case) in enumerate(cases):
            load = np.sort(case["load_over_mean"].to_numpy(dtype=float))[::-1]
            edges = np.arange(len(load) + 1) + 0.5
            if case["role"].iloc[0] == "baseline":
                axes.stairs(load, edges, fill=True, label="native (before)", **native)
                continue
            look = looks[case["line"].iloc[0]]
            axes.stairs(
                load, edges, baseline=None, color=look["color"], linestyle=look["linestyle"], linewidth=1.6, zorder=2.5
            )
            # Markers of different policies stand at different places: equal loads must not hide each other.
            every = max(len(cases) - 1, len(load) // 5)
            marked = np.arange((index - 1) * every // len(cases), len(load), every)
            marked = marked[load[marked] > 0]
            axes.plot(marked + 1, load[marked], zorder=2.6, **(look | {"linestyle": "none"}))
            axes.plot([], [], label=case["legend"].iloc[0], **look)
        axes.axhline(1, color=INK, linewidth=0.9, linestyle=":", zorder=2)
        axes.set(xlim=(0.5, len(load) + 0.5), xlabel=f"{of}s, the fullest first", ylabel="load over mean")
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(False, axis="x")

    return Marks(draw, ratio, needs=f"of == '{of}' and (num_ranks > 1 or of == 'expert')")


# ---- forest --------------------------------------------------------------------------------------------------------


def forest(estimates: Sequence[tuple[str, float, Mapping[str, Any] | None]], ratio: float = 1.0) -> Marks:
    """Estimates of each case in a row, with their spread; native at 1, and what no policy can exceed.

    Args:
        estimates: what the rows of an estimate ``shows``, its distance from the middle of the row, and its look; None =
            its line's.
    """

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        names = list(rows["bar"].dropna().unique())
        at = rows["bar"].map({name: place for place, name in enumerate(names)})
        most = rows.loc[rows["role"] == "bound", "speedup_median"]
        shown = rows[rows["shows"].isin([what for what, *_ in estimates]) & rows["speedup_median"].notna()]
        ends = shown[["speedup_median", *SPEEDUP]].to_numpy(dtype=float).ravel()
        low, high = min(1.0, np.nanmin(ends)), max(1.0, np.nanmax(ends))
        joined = [shown[shown["shows"] == what].set_index("bar")["speedup_median"] for what, *_ in estimates[:2]]
        for name in joined[0].index.intersection(joined[1].index):  # What the rest of the model takes of the gain.
            places = [names.index(name) + offset for _, offset, _ in estimates[:2]]
            axes.plot([part[name] for part in joined], places, color="#BBBBBB", linewidth=0.8, zorder=2)
        for what, offset, given in estimates:
            for row in shown[shown["shows"] == what].assign(at=at + offset).to_dict("records"):
                look = given or {**looks.get(row["line"], _BALANCED), "linewidth": 1.4}
                if not np.isnan(row["speedup_low"]):
                    cap = {"marker": "|", "markersize": 7, "markeredgewidth": look["linewidth"]}
                    spread = {"color": look["color"], "linewidth": look["linewidth"], "zorder": 3}
                    axes.plot([row[end] for end in SPEEDUP], [row["at"]] * 2, **spread, **cap)
                axes.plot(row["speedup_median"], row["at"], zorder=3.5, **{**look, "linestyle": "none"})
            axes.plot([], [], label=what, **(given or {"color": INK, "marker": "s", "linewidth": 1.4}))
        if len(most) and most.iloc[0] - low <= 2 * (high - low):  # unless it takes more of the panel than all marks
            axes.axvline(most.iloc[0], zorder=1, label="most possible", **CEILING_LINE)
            high = max(high, most.iloc[0])
        references(axes, rows[rows["role"] != "ceiling"], upright=True)
        axes.set(xlim=limits([low, high], 0.1), xlabel=axis_of("speedup_median")[0])
        name_rows(axes, names)

    return Marks(draw, ratio, shares_x=True)


_BALANCED = {"color": INK, "marker": "d", "markeredgecolor": "white"}


def extrapolated() -> Marks:
    """A hatched bar per case: what all layers of a model would take, where only some were built."""

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        del looks
        names = list(rows["bar"].dropna().unique())
        own = rows[rows["shows"] == "all layers"].set_index("bar").reindex(names)
        times_ms, gains = own["time_ms"].astype(float), own["speedup_median"].where(own["role"] != "baseline")
        texts = times_ms.map(milliseconds, "ignore").fillna("") + gains.map(" ({:.2f} x)".format, "ignore").fillna("")
        look = {"height": 0.62, "linewidth": 0.6, "label": "extrapolated", **EXTRAPOLATED_LOOK}
        axes.barh(np.arange(len(names)), times_ms.fillna(0), **look)
        write_ends(axes, times_ms.fillna(0), texts)
        axes.set(
            xlim=(0, 2.0 * times_ms.max()), xlabel=f"all {rows['of_layers'].iloc[0]:.0f} layers, extrapolated (ms)"
        )
        name_rows(axes, names)

    return Marks(draw, 1.1, shares_x=True, needs="all_layers_ms_extrapolated.notna()")


# ---- scatter -------------------------------------------------------------------------------------------------------

_FITS = {
    "fitted line": {"color": INK, "linewidth": 1.2},
    "bound": {"color": MUTED, "linewidth": 1.2, "linestyle": "--"},
}


def scatter(x: str, y: str, xlabel: str = "", ylabel: str = "", *, spread: str = "", join: str = "") -> Marks:
    """A point per row, with half a whisker's length in ``spread``; rows that are to ``join`` lie on a line.

    ``xlabel`` may be the column that holds it. Rows with a slope are straight lines (``intercept_us``).
    """

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        own = rows[rows[x].notna() & rows[y].notna() & rows["line"].isin(list(looks))]
        for line, look in looks.items():
            if (part := own[own["line"] == line]).empty:
                continue
            dots = {"linestyle": "none"} if join else {"linestyle": "none", "markeredgewidth": 0, "alpha": 0.7}
            axes.plot(part[x], part[y], **{**look, **dots}, label=None if join else line)
            if spread:
                error = {"ecolor": look["color"], "capsize": 2, "linestyle": "none"}
                axes.errorbar(part[x], part[y], part[spread], **error)
            if join:
                on_line = part[part[join].astype(bool)].sort_values(x)
                axes.plot(on_line[x], on_line[y], label=line, **look)
        if "slope_us_per_expert" in rows:
            axes.set(xlim=(0, 1.05 * own[x].max()))
            for fit in rows[rows["slope_us_per_expert"].notna()].to_dict("records"):
                ends = np.array(axes.get_xlim())
                axes.plot(
                    ends,
                    fit["intercept_us"] + fit["slope_us_per_expert"] * ends,
                    label=fit["line"],
                    **_FITS[fit["line"]],
                )
                if isinstance(fit.get("words"), str):
                    axes.text(0.03, 0.96, fit["words"], transform=axes.transAxes, va="top", fontsize="small")
            axes.set_ylim(0)
        axes.set_xlabel(rows[xlabel].iloc[0] if xlabel in rows else xlabel or axis_of(x)[0])
        axes.set_ylabel(ylabel or axis_of(y)[0])

    return Marks(draw)


# ---- heat ----------------------------------------------------------------------------------------------------------

_SPEEDS = LinearSegmentedColormap.from_list("speeds", ["#D55E00", "#FFFFFF", "#0072B2"])  # slower, native, faster
_FULL_COLOUR = 1.3  # at this speedup, or at the farthest of the sheet where that is farther
_HATCHES = {
    "no difference": ("////", "inside the noise floor"),
    "below what the model can tell": ("////", "below what the model can tell"),
    "inconclusive": ("..", "inconclusive"),
}
_NOWHERE = (-9, -9)  # of what stands in the legend alone
_GAP = 0.3  # between capacity factors and references, in cells


def heat() -> Marks:
    """Speedup in a cell for each swept value (``at``) and ``step``, a capacity factor or a reference; break-even line.

    Below the speedup stands the share of pairs that is dropped; a hatch says what the verdict was.
    """

    def draw(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
        del looks
        factors = sorted(step for step in rows["step"].unique() if isinstance(step, float))
        named = sorted(
            (step for step in rows["step"].unique() if isinstance(step, str)),
            key=lambda step: step != "perfect balance",
        )
        heights = {step: at + (_GAP if at >= len(factors) else 0) for at, step in enumerate([*factors, *named])}
        values = rows.sort_values("at").drop_duplicates("at")["swept_words"]
        limit = rows["limit"].iloc[0]
        for height in heights.values():
            for place in range(len(values)):
                axes.add_patch(Rectangle((place - 0.5, height - 0.5), 1, 1, facecolor="#F3F3F3", edgecolor="white"))
        for cell in rows.itertuples():
            _draw_cell(axes, cell, heights[cell.step], limit)
        grid = rows[rows["step"].isin(factors)].pivot_table(
            index="step", columns="at", values="speedup_median", dropna=False
        )
        speedups_GV = grid.reindex(index=factors, columns=range(len(values))).to_numpy(dtype=float)
        _draw_break_even(axes, speedups_GV)
        known = speedups_GV[~np.isnan(speedups_GV)]
        everywhere = "" if (known > 1).any() else ": nowhere faster than native"
        everywhere = ": faster than native in every cell" if (known > 1).all() else everywhere
        axes.set_title(axes.get_title(loc="left") + everywhere)
        names = [f"{step:g}" if isinstance(step, float) else step for step in heights]
        axes.set_yticks(list(heights.values()), labels_of(axes.figure, names, 1.2))
        axes.set_xticks(range(len(values)), labels_of(axes.figure, list(values), 1.1))
        axes.set_xlabel(rows["swept_key_words"].iloc[0])
        axes.set_ylabel(f"capacity factor {GAMMA}", y=len(factors) / (len(heights) + _GAP) / 2)
        axes.set(xlim=(-0.5, len(values) - 0.5), ylim=(-0.5, max(heights.values()) + 0.5))
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

    return Marks(draw)


def full_colour(speedups: pd.Series) -> float:
    """The logarithm of the speedup, or of its inverse, at which colours of a sheet are full."""
    return max(speedups.map(np.log).abs().max(), np.log(_FULL_COLOUR))


def _draw_cell(axes: Axes, cell: Any, height: float, limit: float) -> None:
    """A cell's speedup as colour and number, and what it is paid with."""
    if np.isnan(cell.speedup_median):
        text = "-" if cell.status == "ok" else cell.status
        axes.text(cell.at, height, text, ha="center", va="center", fontsize="small", color=MUTED)
        return
    corner = (cell.at - 0.5, height - 0.5)
    colour = _SPEEDS(0.5 + np.log(cell.speedup_median) / limit / 2)
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
    is_dark = np.dot(colour[:3], (0.2126, 0.7152, 0.0722)) < 0.5
    hatch, _ = _HATCHES.get(cell.verdict, ("", ""))
    if hatch:
        pale = "#DDDDDD" if is_dark else "#B5B5B5"
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, hatch=hatch, edgecolor=pale, linewidth=0))
    halo = [withStroke(linewidth=3, foreground=colour), Normal()] if hatch else []  # clear of the hatch
    text = {"ha": "center", "color": "white" if is_dark else INK, "path_effects": halo, "zorder": 4}
    has_cost = not np.isnan(cell.dropped_share)
    axes.text(
        cell.at, height + 0.02 * has_cost, f"{cell.speedup_median:.2f}", va="bottom" if has_cost else "center", **text
    )
    if has_cost:
        axes.text(cell.at, height - 0.08, f"{100 * cell.dropped_share:.1f} %", va="top", fontsize="x-small", **text)


def _draw_break_even(axes: Axes, speedups_GV: np.ndarray) -> None:
    """A line along the edges between cells that pay and cells that do not, above all that stands in cells."""
    for (row, column), speedup in np.ndenumerate(speedups_GV):
        for above, right in ((1, 0), (0, 1)):
            if row + above < speedups_GV.shape[0] and column + right < speedups_GV.shape[1]:
                other = speedups_GV[row + above, column + right]
                if not np.isnan(speedup + other) and (speedup > 1) != (other > 1):
                    edge = [column + right - 0.5, column + 0.5], [row + above - 0.5, row + 0.5]
                    for zorder, colour, width in ((4.5, "white", 4.4), (5, INK, 2.4)):
                        axes.plot(*edge, color=colour, linewidth=width, solid_capstyle="projecting", zorder=zorder)
    axes.set_autoscale_on(False)
