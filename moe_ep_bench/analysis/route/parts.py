"""What the figures of routing share: which cases they show, lines and ticks, and a sheet with a panel per part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.style import INK, MARKERS, MUTED, Drawing, is_narrow, sheet
from moe_ep_bench.analysis.words import MODE_WORDS, Footer, Origin

# From no load (white) to the most.
HEAT = LinearSegmentedColormap.from_list("heat", ["#FFFFFF", "#B9D8EC", "#56B4E9", "#0072B2", "#00334F"])
# Ordered things: layers from first to last, a field from its least value to its greatest.
ORDERED = LinearSegmentedColormap.from_list("ordered", ["#56B4E9", "#009E73", "#E69F00", "#D55E00"])
NATIVE = {"color": INK, "linewidth": 1.6, "linestyle": (0, (5, 2))}
MEAN = {"color": INK, "linewidth": 2, "marker": "o", "markeredgecolor": "white", "markeredgewidth": 0.6}
BALANCE = {"color": MUTED, "linewidth": 1, "linestyle": (0, (2, 2))}
UNIFORM = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.5}
STAR = {"color": INK, "marker": "*", "markersize": 11, "linestyle": "none"}

MAX_PANELS = 4
MAX_LINES = 6  # of policies in a panel
# The decoding batch of the papers.
_PAPERS_BATCH = 16


# ---- which rows ----------------------------------------------------------------------------------------------------


def largest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each family the group with the largest batches."""
    return _of_each_family(rows, -rows["num_tokens"])


def nearest_to_papers(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each family the group whose batch comes nearest to the papers' 16 tokens."""
    return _of_each_family(rows, (rows["num_tokens"] - _PAPERS_BATCH).abs())


def _of_each_family(rows: pd.DataFrame, distance: pd.Series) -> pd.DataFrame:
    nearest = rows.assign(distance=distance).sort_values("distance", kind="stable").groupby("family")["group"].first()
    return rows[rows["group"].isin(nearest)]


def split(rows: pd.DataFrame, *keys: str) -> list[pd.DataFrame]:
    """The rows of every value of some columns, in the order in which these come."""
    return [part for _, part in rows.groupby(list(keys), sort=False, dropna=False)]


def swept(cases: pd.DataFrame, field: str, *policies: str, least: int = 2, **wanted: Any) -> pd.DataFrame:
    """Cases of some policies that differ in one field only, values ascending.

    Args:
        least: as many values a line must have.
        wanted: what other fields must be; a case in which ``field`` is null has no place.

    Returns:
        Their rows with ``line``, the label without the field, and ``value``, the field's.
    """
    fits = [
        policy in policies and params.get(field) is not None and wanted.items() <= params.items()
        for policy, params in zip(cases["policy"], cases["params"], strict=True)
    ]
    cases = cases[fits]
    cases = cases.assign(line=[without(label, field) for label in cases["label"]], value=cases["params"].str.get(field))
    cases = cases[cases.groupby(["group", "line"])["line"].transform("size") >= least]
    # Lines stay in the order of the config.
    order = cases.groupby(["group", "line"], sort=False).ngroup()
    return cases.assign(order=order).sort_values(["order", "value"], kind="stable")


def without(label: str, field: str) -> str:
    """A case's label without one of its fields."""
    return re.sub(rf" {field}=\S+", "", label)


def few(labels: Sequence[Any], most: int = MAX_LINES) -> list[Any]:
    """At most so many labels, evenly spaced in their order."""
    places = np.linspace(0, len(labels) - 1, min(most, len(labels))).round().astype(int)
    return [labels[place] for place in places]


def drawing(figure: Figure, rows: pd.DataFrame, *columns: str) -> Drawing:
    """A figure with its numbers: what each row is of, some columns, and where they come from.

    ``policy`` is the case's label, as in all figures.
    """
    about = rows[["comparison", "model", "num_ranks", "num_tokens"]]
    if "label" in rows:
        gamma = rows["params"].str.get("capacity_factor")
        about = about.assign(policy=rows["label"], capacity_factor=gamma)
    # Nothing was timed (``marks``).
    numbers = rows[list(columns)].assign(origin="routed", workload=rows["workload"])
    return Drawing(figure, pd.concat([about, numbers], axis=1).reset_index(drop=True))


# ---- the sheet -----------------------------------------------------------------------------------------------------

Panels = list[tuple[Any, pd.DataFrame]]


def page(
    title: str,
    how: str,
    parts: Sequence[pd.DataFrame],
    legend: Mapping[str, Artist | Mapping[str, Any]],
    *,
    height: float,
    columns: int = 1,
    of_each: int = 1,
    width: float = 10.5,
    each: str = "workload",
    notes: Iterable[str] = (),
    looks_past: bool = True,
    **options: Any,
) -> tuple[Figure, Panels]:
    """Make a sheet with panels for the first parts of the rows; a footer says how the others are passed over.

    Args:
        how: how to read it, below the title.
        parts: the rows that each panel, or row of panels, shows.
        legend: artists, or how a line is drawn, by label.
        height, width: inches, of a row and of the sheet.
        columns: parts that may stand side by side.
        of_each: panels of each part, which then has a row of its own.
        each: what a part is of, where there are several.
        looks_past: whether scores below the recorded top-k matter here.
        options: of ``Figure.subplots``.

    Returns:
        The figure, and of each part that is shown its panel (or the array of its panels) with its rows.
    """
    shown = parts[: MAX_PANELS * columns if columns > 2 else MAX_PANELS]
    rows = pd.concat(shown)
    columns = 1 if is_narrow() else of_each if of_each > 1 else min(columns, len(shown))
    number = len(shown) * of_each
    one = rows["group"].nunique() == 1
    about = rows["comparison"].iloc[0] if one else f"A {'row' if of_each > 1 else 'panel'} for each {each}"
    figure = sheet(
        title,
        f"{about}. {how}",
        footer(rows, [*notes, *not_drawn(len(parts) - len(shown), "panels")], looks_past=looks_past),
        line_legend(legend),
        width=width,
        body=height * -(-number // columns),
    )
    panels = figure.subplots(-(-number // columns), columns, squeeze=False, **options)
    for axes in panels.flat[number:]:
        axes.set_visible(False)
    of_parts = panels.flat[:number].reshape(-1, of_each)
    return figure, [(axes if of_each > 1 else axes[0], part) for axes, part in zip(of_parts, shown, strict=True)]


def footer(rows: pd.DataFrame, notes: Iterable[str] = (), *, looks_past: bool = True) -> Footer:
    """Two lines: how the numbers came about and on which workloads; what weakens them."""
    first, *others = rows["description"].unique()
    workloads = [first, *([f"and others ({len(others)})"] if others else [])]
    tails = " / ".join(rows["tail_model"].dropna().unique()) if looks_past else ""
    notes = [*([f"Scores below the recorded top-k are assumed: {tails} tail model."] if tails else []), *notes]
    lines = [" | ".join([MODE_WORDS["route"], *workloads]), " ".join(notes)]
    return Footer([line for line in lines if line], [Origin("routed", kind) for kind in rows["workload"].unique()])


def not_drawn(number: int, what: str) -> list[str]:
    """The footer's word on what the rows hold and the figure has no room for."""
    return [f"Not drawn, though in the rows: {number} more {what}."] if number else []


# ---- lines and ticks -----------------------------------------------------------------------------------------------


def line_legend(legend: Mapping[str, Artist | Mapping[str, Any]]) -> list[tuple[str, Artist]]:
    """Labels with what is drawn beside them; a mapping is how a line is drawn."""
    return [(label, how if isinstance(how, Artist) else Line2D([], [], **how)) for label, how in legend.items()]


def ordered_line(place: int, number: int, **changes: Any) -> dict[str, Any]:
    """The line of one of several ordered things."""
    marks = {"marker": MARKERS[place % len(MARKERS)], "markersize": 4.5, "markeredgecolor": "white"}
    look = {"color": ORDERED(place / max(1, number - 1)), "linewidth": 1.4, "markeredgewidth": 0.5}
    return {**look, **marks, **changes}


def thin_line(place: int, number: int) -> dict[str, Any]:
    """The line of one of many layers."""
    return {"color": ORDERED(place / max(1, number - 1)), "linewidth": 0.9, "alpha": 0.8}


def layer_legend(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How thin lines run from the first layer to the last."""
    last = {f"to layer {names[-1]}": thin_line(1, 2)} if len(names) > 1 else {}
    return {f"layer {names[0]}": thin_line(0, 2), **last}


def ticks(length: int, most: int) -> np.ndarray:
    """At most ``most`` evenly spaced indices of ``length``, from 0, a round step apart."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, length) if length <= step * most)
    return np.arange(0, length, step)


def layer_ticks(axes: Axes, names: Sequence[str], most: int = 9, axis: str = "x") -> None:
    places = ticks(len(names), most)
    labels = [names[place] for place in places]
    axes.set(**{f"{axis}ticks": places, f"{axis}ticklabels": labels, f"{axis}label": "layer"})
