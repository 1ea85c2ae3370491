"""The figures of a quality directory: what answers cost, over what the cost buys. ``QUALITY_FIGURES`` is the table.

- ``quality_capacity``: cross-entropy added over the capacity factor (arXiv 2503.05066, Figure 12, has accuracy there).
- ``quality_fronts``: cross-entropy added over what a step or a batch waits for: activated experts in decode, whose
  weights it reads (arXiv 2511.02237, Figures 2, 3 and 8), and in prefill the pairs of the fullest rank. A line joins
  the cases of a policy that none of its others beats in both: its Pareto front.
- ``quality_orderings``: which of the papers' orderings hold, a row for each pair of cases. Costs differ a thousandfold
  between orderings, and so do their intervals. What one pair's second case costs more than its first is therefore
  drawn in halves of its own 95 % interval: beyond 1 the ordering holds, beyond -1 it does not, and between them nobody
  can say. The numbers themselves stand beside the rows.

One panel for each comparison (point of a sweep), and phase; comparisons that differ in the checkpoint alone are one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from moe_ep_bench.analysis.figures import draw_named
from moe_ep_bench.analysis.quality_frames import Quality, half_interval, text_costs
from moe_ep_bench.analysis.quality_orderings import PEAK_LOAD, PER_SHARE, orderings
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    FONT_SIZES,
    GAMMA,
    MUTED,
    NOISE_FILL,
    RULE,
    Drawing,
    fit_label,
    is_narrow,
    looks_of,
    panel_title,
    sheet,
    wrap,
)
from moe_ep_bench.timing.statistics import MIN_BATCHES

# Inches.
_WIDTH, _NARROW, _BODY, _COLUMNS = 10.0, 6.5, 3.3, 2
_ROWS_WIDTH, _ROW, _LINE, _EXTRA = 11.0, 0.24, 0.16, 0.9
_LABEL, _STACKED_LABEL = 4.8, 1.1
_POINTS = float(FONT_SIZES["ytick.labelsize"])
_VERDICTS: dict[str, dict[str, Any]] = {
    "holds": {"color": "#009E73", "marker": "o"},
    "does not hold": {"color": "#D55E00", "marker": "X"},
    "inconclusive": {"color": MUTED, "marker": "o", "markerfacecolor": "white"},
}
_OF_ONE = {"color": "#B0B0B0", "marker": "|", "markersize": 7, "linestyle": "none"}
_FAR = 100.0
_TICKS = (-30, -10, -3, -1, 0, 1, 3, 10, 30, 100)


def capacity_figure(quality: Quality) -> Drawing | None:
    """None where no policy has two capacity factors."""
    rows = _over_checkpoints(quality)
    gamma = rows["policy_params"].map(json.loads).str.get("capacity_factor").astype(float)
    family = rows["case"].str.replace(r" capacity_factor=\S+", "", regex=True)
    rows = rows.assign(policy=family, quantity=f"capacity factor {GAMMA}", value=gamma, on_line=True)
    rows = rows.dropna(subset="value")
    return _costs_figure(
        "What a capacity costs the answers", rows[rows.groupby(["group", "policy"])["value"].transform("size") > 1]
    )


def fronts_figure(quality: Quality) -> Drawing | None:
    """None where there is no policy."""
    rows = _over_checkpoints(quality)
    rows = rows[rows["policy"] != "topk"].sort_values(["group", "phase"], kind="stable")
    in_decode = rows["phase"] == "decode"
    rows = rows.assign(
        comparison=rows["phase"] + ": " + rows["comparison"],
        quantity=np.where(
            in_decode,
            "activated experts of a step, mean over layers",
            "pairs of the fullest rank over native's mean",
        ),
        value=rows["activated_experts"].where(in_decode, rows["fullest_rank"]),
    )
    for _, points in rows.groupby(["group", "phase", "policy"]):
        rows.loc[points.index, "on_line"] = is_on_front(points)
    return _costs_figure("What answers cost over what it buys", rows)


def is_on_front(points: pd.DataFrame) -> pd.Series:
    """Of each point whether no other beats it in both: less cost at no greater value."""
    ascending = points.sort_values(["value", "cross_entropy_added_nats"])["cross_entropy_added_nats"]
    return (ascending < ascending.cummin().shift(fill_value=np.inf)).reindex(points.index)


def _over_checkpoints(quality: Quality) -> pd.DataFrame:
    """Cases that all checkpoints of a group have: means over them and the interval over them; of one its own."""
    costs = text_costs(quality).rename(columns={"label": "case", "cross_entropy_added_half": "half_width_nats"})
    costs = costs.rename(columns={"cross_entropy_added": "cross_entropy_added_nats"})
    by_case = costs[costs["role"] != "baseline"].groupby(["group", "case", "phase"], sort=False)
    found = by_case[["comparison", "checkpoints", "policy", "policy_params", "half_width_nats"]].first()
    found = found.join(by_case[["activated_experts", "fullest_rank", "cross_entropy_added_nats"]].mean())
    over_them = by_case["cross_entropy_added_nats"].agg(half_interval)
    found["half_width_nats"] = found["half_width_nats"].where(found["checkpoints"] == 1, over_them)
    return found[by_case.size() == found["checkpoints"]].reset_index()


def _costs_figure(title: str, rows: pd.DataFrame) -> Drawing | None:
    if rows.empty:
        return None
    panels = list(rows.groupby(["group", "quantity"], sort=False))
    looks = looks_of({family: family for family in rows["policy"]})
    legend = [
        (look.label, Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.line))
        for look in looks.values()
    ]
    columns = min(_COLUMNS, len(panels))
    width = _WIDTH if columns > 1 else _NARROW
    num_rows = -(-len(panels) // columns)
    over = "checkpoints where there are several, else over batches" if (rows["checkpoints"] > 1).any() else "batches"
    whiskers = f"whiskers: 95 % interval, Student's t over {over}."
    if not np.isfinite(rows["half_width_nats"]).any():
        whiskers = f"no intervals: fewer than {MIN_BATCHES} batches."
    figure = sheet(
        title,
        "Cross-entropy added to the unpatched model's on the same sequences, nats per token"
        + ("; the mean over checkpoints" if (rows["checkpoints"] > 1).any() else ""),
        [f"Costs are of this model on this text; {whiskers} Routing is that of virtual ranks; nothing was timed."],
        legend,
        width=width,
        body=_BODY * num_rows,
    )
    grid = figure.subplots(num_rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (_, panel) in zip(grid.flat, panels, strict=False):
        axes.axhline(0, **CEILING_LINE)
        for family, points in panel.groupby("policy", sort=False):
            look = looks[family]
            at = points["value"], points["cross_entropy_added_nats"], points["half_width_nats"]
            axes.errorbar(*at, color=look.colour, marker=look.marker, linestyle="none", capsize=2)
            line = points[points["on_line"]].sort_values("value")
            axes.plot(line["value"], line["cross_entropy_added_nats"], color=look.colour, linestyle=look.line)
        axes.set_xlabel(panel["quantity"].iloc[0])
        axes.set_ylabel("cross-entropy added, nats")
        panel_title(axes, panel["comparison"].iloc[0], width / columns - 0.8)
    return Drawing(figure, rows.drop(columns="group"))


def orderings_figure(quality: Quality) -> Drawing | None:
    """None where no ordering can be looked at."""
    rows = orderings(quality)
    if rows.empty:
        return None
    rows["in_halves"] = in_halves(rows)
    overall = rows[rows["is_overall"]]
    labels = _labels(overall)
    legend: list[tuple[str, Any]] = [
        (verdict, Line2D([], [], linestyle="none", **look))
        for verdict, look in _VERDICTS.items()
        if (overall["verdict"] == verdict).any()
    ]
    legend += [("each checkpoint", Line2D([], [], **_OF_ONE))] if len(overall) < len(rows) else []
    legend.append(("too close to say", Patch(facecolor=NOISE_FILL)))
    panels = [panel for _, panel in rows.groupby("group", sort=False)]
    by_panel = labels.str.count("\n").groupby(overall["group"], sort=False)
    heights = ((_ROW + _LINE * by_panel.max()) * by_panel.size() + _EXTRA).tolist()
    figure = sheet(
        "Which of the papers' orderings hold",
        "What the second of a row costs more than the first, in halves of its 95 % interval"
        + ("" if is_narrow() else "; on the right in nats per token, or in what the row speaks of"),
        [
            "Intervals: Student's t over checkpoints where there are several, else over batches, whose sequences were "
            "routed together. Costs are of this model on this text; routing is that of virtual ranks, and nothing was "
            "timed. A to B: read off between these two, at as many activated experts as the second has. The orderings "
            "in full and their sources stand in the table beside this figure."
        ],
        legend,
        width=_ROWS_WIDTH,
        body=sum(heights),
    )
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, panel in zip(grid.flat, panels, strict=True):
        _orderings_panel(axes, panel, labels)
        panel_title(axes, panel["comparison"].iloc[0], 0.6 * _ROWS_WIDTH)
    return Drawing(figure, rows.drop(columns="group"))


def in_halves(rows: pd.DataFrame) -> pd.Series:
    """Differences over half the interval that their pair's row over all checkpoints has, at most ``_FAR``.

    0 where two cases never differ.
    """
    half = rows["half_width"].where(rows["is_overall"]).ffill()
    more = rows["worse_costs_more"]
    return (more / half).where(more != 0, 0.0).clip(-_FAR, _FAR)


def _orderings_panel(axes: Axes, panel: pd.DataFrame, labels: pd.Series) -> None:
    axes.axvspan(-1, 1, color=NOISE_FILL, linewidth=0, zorder=0)
    axes.axvline(0, color=MUTED, linewidth=1.0)
    overall = panel[panel["is_overall"]].join(labels.rename("label")).reset_index(drop=True)
    each = panel[~panel["is_overall"]].assign(place=panel["is_overall"].cumsum() - 1)
    for place, ones in each.groupby("place"):
        if overall["half_width"][place] > 0:
            axes.plot(ones["in_halves"], ones["place"], **_OF_ONE)
    for place, row in overall.iterrows():
        axes.plot(row["in_halves"], place, linestyle="none", **_VERDICTS[row["verdict"]])
        if place and row["ordering"] != overall["ordering"][place - 1]:
            axes.axhline(place - 0.5, color=RULE, linewidth=0.9)
        if not is_narrow():
            number = f"{row['worse_costs_more']:+.4f} \N{PLUS-MINUS SIGN} {row['half_width']:.4f}"
            number = number.replace("-", "\N{MINUS SIGN}")
            axes.text(1.01, place, number, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=MUTED)
    axes.set_yticks(range(len(overall)), overall["label"])
    axes.set_ylim(len(overall) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xscale("symlog", linthresh=1, linscale=0.8)
    low, high = axes.get_xlim()
    low, high = axes.set_xlim(min(low, -1.5), max(1.1 * high, 1.5))
    axes.set_xticks([tick for tick in _TICKS if low <= tick <= high])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(fit_label("what the second costs more, in halves of its 95 % interval", 6.0))


def _labels(rows: pd.DataFrame) -> pd.Series:
    """A pair in a few words: ``per pair dropped: A < B``."""
    kind = rows["unit"].map({PEAK_LOAD: "fullest expert: ", PER_SHARE: "per pair dropped: "}).fillna("")
    share = rows["share"].map(lambda share: "" if share == 1 else f"{share:g} of ")
    text = (kind + rows["better"] + " < " + share + rows["worse"]).str.replace("capacity_factor=", f"{GAMMA} ")
    room = (_STACKED_LABEL, 6.5) if is_narrow() else (_LABEL, _POINTS)
    return text.map(lambda label: wrap(label, *room))


QUALITY_FIGURES: dict[str, Callable[[Quality], Drawing | None]] = {
    "quality_orderings": orderings_figure,
    "quality_capacity": capacity_figure,
    "quality_fronts": fronts_figure,
}
draw_quality_figures = partial(draw_named, QUALITY_FIGURES)
