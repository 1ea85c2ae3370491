"""The figures of a quality directory: what answers cost, over what the cost buys. ``QUALITY_FIGURES`` is the table.

- ``quality_capacity``: cross-entropy added over the capacity factor (arXiv 2503.05066, Figure 12, has accuracy there).
- ``quality_fronts``: cross-entropy added over what a step or a batch waits for: activated experts in decode, whose
  weights it reads (arXiv 2511.02237, Figures 2, 3 and 8), and in prefill the pairs of the fullest rank. A line joins
  the cases of a policy that none of its others beats in both: its Pareto front.

One panel for each comparison (point of a sweep), and phase; comparisons that differ in the checkpoint alone are one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.figures import draw_named
from moe_ep_bench.analysis.quality import Quality, half_interval, text_costs
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    GAMMA,
    Drawing,
    looks_of,
    panel_title,
    sheet,
)
from moe_ep_bench.timing.statistics import MIN_BATCHES

# Inches.
_WIDTH, _NARROW, _BODY, _COLUMNS = 10.0, 6.5, 3.3, 2


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


QUALITY_FIGURES: dict[str, Callable[[Quality], Drawing | None]] = {
    "quality_capacity": capacity_figure,
    "quality_fronts": fronts_figure,
}
draw_quality_figures = partial(draw_named, QUALITY_FIGURES)
