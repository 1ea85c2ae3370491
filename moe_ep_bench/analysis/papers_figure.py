"""The figure of ``papers``: a paper's number as a mark and ours by traffic, a panel for each metric."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_ep_bench.analysis.cases import comparisons
from moe_ep_bench.analysis.columns import missing
from moe_ep_bench.analysis.origins import scale_words
from moe_ep_bench.analysis.papers import METRICS, Claims, basis_words, how_words
from moe_ep_bench.analysis.style import (
    DEFAULT_FORMATS,
    HOW,
    INK,
    MUTED,
    NOISE_FILL,
    Sheet,
    dress,
    house_style,
    save,
    settle,
    wrapped,
)
from moe_ep_bench.files import refuse_links_out
from moe_ep_bench.papers.claims import NATIVE_METRICS, OWN_METRICS

_LOOKS = (
    {"color": "#009E73", "marker": "o"},
    {"color": "#0072B2", "marker": "s"},
    {"color": "#D55E00", "marker": "^"},
    {"color": "#CC79A7", "marker": "D"},
    {"color": "#E69F00", "marker": "v"},
)
_PAPER_LOOK = {"color": INK, "marker": "|", "markersize": 15, "markeredgewidth": 2.4, "linestyle": "none"}


def draw_claims(claims: Claims) -> list[Path]:
    """Draw ``figures/claims`` of a directory; the files, none where nothing was measured."""
    refuse_links_out(claims.directory, claims.directory / "figures")
    paths = []
    with house_style():
        figure = claims_figure(claims)
        if figure is not None:
            settle(figure)
            for file_format in DEFAULT_FORMATS:
                paths.append(claims.directory / "figures" / f"claims.{file_format}")
                save(figure, paths[-1], file_format)
    return paths


def claims_figure(claims: Claims) -> Figure | None:
    """None where nothing was measured."""
    rows = claims.measured
    if rows.empty:
        return None
    unstated = rows[["paper_low", "paper_high"]].isna().all(axis=1)
    panels = [(METRICS[name], panel) for name, panel in rows.groupby("metric", sort=False)]
    looks = dict(zip(dict.fromkeys(claims.frame["traffic"]), itertools.cycle(_LOOKS), strict=False))
    about = comparisons(claims.store)
    about = about[about["comparison_id"].isin(rows["comparison_id"])]
    models = dict.fromkeys(f"{one.model}, {scale_words(one.scale)}, {one.dtype}" for one in about.itertuples())
    ours = "whole models, a pass from end to end" if (rows["ours_of"] != "layer").any() else "one layer"
    figure = Sheet(11)
    heights = [_row_height(figure, panel) * panel["number"].nunique() for _, panel in panels]
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for place, (title, panel) in enumerate(panels):
        axes = figure.add_subplot(grid[place, 0])
        axes.set_title(title)
        _draw(axes, panel, looks)
    figure.axes[0].plot([], [], label="paper", **_PAPER_LOOK)
    if _is_range(rows).any():
        figure.axes[0].fill_between([], [], color=NOISE_FILL, label="paper: a range")
    for name, look in looks.items():
        figure.axes[0].plot([], [], label=f"ours, {name.replace('_', ' ')}", **_style(look, True))
    kinds = f"{' / '.join(models)} | {about['workload'].iloc[0]} traffic, "
    dress(
        figure,
        "Papers' numbers beside ours",
        f"Ours: {ours}; filled: the primary traffic. Whiskers: least and largest draw, or 95 % intervals, or smallest "
        "and largest pair below ten batches."
        + (" Rows without a mark: no number is stated." if unstated.any() else ""),
        [how_words(claims), kinds + "; ".join(dict.fromkeys(about["facts"].map(basis_words)))],
        [word for word in (*HOW, "recorded", "synthetic") if word in {*about["origin"], *about["workload"]}],
        body=sum(heights) + 0.75 * len(heights),  # titles and axes
    )
    return figure


def _draw(axes: Axes, panel: pd.DataFrame, looks: dict[str, dict[str, Any]]) -> None:
    metric = panel["metric"].iloc[0]
    factor = 100 if metric in OWN_METRICS else 1
    if metric not in (*OWN_METRICS, *NATIVE_METRICS):
        axes.axvline(1, color=MUTED, linewidth=1, zorder=1)
    of_claims = [(place, rows) for place, (_, rows) in enumerate(panel.groupby("number"))]
    for place, rows in of_claims:
        first = rows.iloc[0]
        if first["paper_low"] == first["paper_high"]:
            axes.plot([factor * first["paper_low"]], [place], zorder=2, **_PAPER_LOOK)
        step = min(0.2, 0.6 / len(rows))
        for at, ours in enumerate(rows.to_dict("records")):
            y = place + (at - (len(rows) - 1) / 2) * step
            look = looks[ours["traffic"]]
            ends = factor * ours["ours_low"], factor * ours["ours_high"]
            axes.hlines(y, *ends, color=look["color"], linewidth=1.4, zorder=3)
            axes.plot([factor * ours["ours"]], [y], zorder=4, **_style(look, ours["primary"]))
    low, high = axes.get_xlim()
    for place, rows in of_claims:
        if _is_range(rows).any():
            begin, end = (factor * rows[name].iloc[0] for name in ("paper_low", "paper_high"))
            begin, end = low if missing(begin) else begin, high if missing(end) else end
            axes.barh(place, end - begin, 0.7, begin, color=NOISE_FILL, zorder=0.5)
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(of_claims)), [_name(axes.figure, rows) for _, rows in of_claims])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(of_claims) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"{METRICS[metric]}{' (%)' if factor == 100 else ''}")


def _name(figure: Figure, rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    return "\n".join(wrapped(figure, first[words], 4.0, 8) for words in ("claim", "case"))


def _row_height(figure: Figure, panel: pd.DataFrame) -> float:
    """Inches, enough for the longest name."""
    most_lines = max(_name(figure, rows).count("\n") + 1 for _, rows in panel.groupby("number"))
    return max(0.52, 0.15 * most_lines + 0.12)


def _is_range(rows: pd.DataFrame) -> pd.Series:
    has_paper = rows["paper_low"].notna() | rows["paper_high"].notna()
    return has_paper & (rows["paper_low"] != rows["paper_high"])


def _style(look: dict[str, Any], filled: bool) -> dict[str, Any]:
    faces = {} if filled else {"markerfacecolor": "white"}
    edge = "white" if filled else look["color"]
    return {**look, "linestyle": "none", "markersize": 5.5, "markeredgecolor": edge, "markeredgewidth": 0.8, **faces}
