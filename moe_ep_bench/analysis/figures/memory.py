"""What balancing buys with memory, and dropping with score mass: both against native, on one workload.

Left, replicas: speedup over the spare slots of a rank, evenly shared or split by a linear program. Right, policies over
the score mass that they lose. Panels of a row share their axis. Balancing ends at perfect balance; dropping goes on,
because it also saves work. Below, the fullest rank in place of speed, with the bound that no placement of so many slots
and no split goes below (``placement.least_fullest``).
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from moe_ep_bench.analysis.fidelity import source_loads
from moe_ep_bench.analysis.figures.panels import (
    COST,
    SPEEDUP,
    SPEEDUP_LABEL,
    case_rows,
    csv,
    draw_references,
    drawn_part,
    footer,
    limits,
    reference_legend,
    run_looks,
    sheet_of_panels,
    speedup_limits,
)
from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.style import CEILING_LINE, GAMMA, INK, MUTED, Drawing, Looks
from moe_ep_bench.placement import least_fullest

_LOAD_LABEL = "fullest rank (mean of native = 1)"
_BOUND = {"color": MUTED, "linestyle": (0, (1, 1.5)), "linewidth": 1.6}
_REPLICAS = [
    {"color": "#CC79A7", "linestyle": line, "marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.6}
    for line, marker in (((0, (3, 2)), "s"), ("-", "D"), ("-.", "X"), ((0, (1, 1)), "P"))
]
_NATIVE = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none", "markeredgewidth": 0}


def memory_figure(run: Run) -> Drawing | None:
    """Speedup and fullest rank over spare slots and over lost mass; None without both replicas and a policy."""
    rows = memory_rows(run)
    timed = rows[rows["speedup"].notna()].groupby("comparison_id")["role"].agg(set)
    both = [name for name, roles in timed.items() if {"policy", "replication"} <= roles]
    rows = rows[rows["comparison_id"].isin(both)]
    if rows.empty:
        return None
    drawn, notes = drawn_part(run, rows)
    ways, looks = list(drawn["way"].dropna().unique()), run_looks(run)
    families = set(drawn["family"].dropna())
    legend = [("native", Line2D([], [], **_NATIVE))]
    legend += [(way, Line2D([], [], **_REPLICAS[place % 4])) for place, way in enumerate(ways)]
    legend += [(look.label, Line2D([], [], **look.marks)) for key, look in looks.items() if key in families]
    legend += [*reference_legend(drawn, native=False), ("bound with so many slots", Line2D([], [], **_BOUND))]
    subtitle = (
        "Replicas cost memory and lose nothing; policies lose score mass and cost no memory. Up to perfect balance "
        f"both help; past it only work that is not done. Numbers: {GAMMA}, or GiB more of a rank's memory, all layers."
    )
    header = "What memory buys, and what score mass buys", subtitle, footer(run, drawn, notes), legend
    groups = [own for _, own in drawn.groupby("comparison_id", sort=False)]
    below = "the same: how full the fullest rank is"
    titles = [title for own in groups for title in (own["comparison"].iloc[0], below)]
    figure, axes = sheet_of_panels(header, titles, (1, 1), 3.4, beside=True, most=1)
    for place, own in enumerate(groups):
        _draw(axes[2 * place], own, ways, looks, "speedup")
        _draw(axes[2 * place + 1], own, ways, looks, "fullest_rank")
    shown = (*SPEEDUP, "verdict", *COST, "fullest_rank", "spare_per_rank", "more_gib_per_rank", "bound_of_fullest_rank")
    return Drawing(figure, csv(rows, *shown))


def memory_rows(run: Run) -> pd.DataFrame:
    """``case_rows`` with what replicas cost, which way they balance (``way``), and the bound for so many slots."""
    rows = case_rows(run)
    params = rows["policy_params"].fillna("{}").map(json.loads)
    spare = params.map(lambda one: one.get("spare_per_rank")).astype(float)
    way = pd.Series([label.partition(",")[0] for label in rows["policy"]], rows.index, object).where(spare.notna())
    extra = {case.case_id: case.extra_bytes_per_rank for case in run.cases}
    native = {case.comparison_id: case for case in run.cases if case.role == "baseline" and case.is_ok}
    bounds = [
        _bound(run, native[name], int(slots)) if name in native and not np.isnan(slots) else np.nan
        for name, slots in zip(rows["comparison_id"], spare, strict=True)
    ]
    return rows.assign(
        spare_per_rank=spare,
        way=way,
        more_gib_per_rank=rows["case_id"].map(extra).astype(float) / 2**30,
        bound_of_fullest_rank=bounds,
        fullest_rank=rows["fullest_rank"].astype(float),
        lost_percent=100 - rows["retained_mass_percent"],
    )


def _bound(run: Run, native: Case, spare: int) -> float:
    """The least that the fullest rank may hold over the mean, mean over batches."""
    facts = run.comparisons[native.comparison_id]
    load_BE = source_loads(native.routing, "load_E")[1].sum(axis=1)
    sizes = {"num_slots": facts.num_experts + spare * facts.num_ranks, "num_ranks": facts.num_ranks}
    return float(np.mean([least_fullest(load_E, **sizes) * facts.num_ranks / load_E.sum() for load_E in load_BE]))


def _draw(pair: list[Axes], rows: pd.DataFrame, ways: list[str], looks: Looks, column: str) -> None:
    """Replicas in the first panel, policies in the second."""
    memory, mass = pair
    native = rows.loc[rows["role"] == "baseline", column].iloc[0] if column != "speedup" else 1.0
    for place, way in enumerate(ways):
        own = rows[(rows["way"] == way) & rows[column].notna()].sort_values("spare_per_rank")
        memory.plot([0, *own["spare_per_rank"]], [native, *own[column]], **_REPLICAS[place % 4], zorder=3)
        if place == 0 and column == "speedup":
            for x, y, gib in own[["spare_per_rank", column, "more_gib_per_rank"]].itertuples(index=False):
                _write(memory, f"{gib:.2g}", x, y)
    for key, look in looks.items():
        own = rows[(rows["family"] == key) & rows[column].notna()].sort_values("lost_percent")
        mass.plot(own["lost_percent"], own[column], **look.marks, zorder=3)
        for x, y, factor in own[["lost_percent", column, "capacity_factor"]].dropna().itertuples(index=False):
            _write(mass, f"{factor:g}", x, y)
    if column == "speedup":
        for axes in pair:
            draw_references(axes, rows)
        ends = speedup_limits(rows[rows["role"].isin(["policy", "replication", "ceiling"])])
    else:
        bound = rows.dropna(subset=["spare_per_rank"]).drop_duplicates("spare_per_rank").sort_values("spare_per_rank")
        memory.plot(bound["spare_per_rank"], bound["bound_of_fullest_rank"], **_BOUND, zorder=2)
        for axes in pair:
            axes.axhline(1, **CEILING_LINE, zorder=1)
        judged = rows[rows["role"].isin(["policy", "replication", "baseline"])]
        ends = limits([1.0, *judged[column].dropna()], least=0.1)
    for axes in pair:
        axes.plot(0, native, **_NATIVE, zorder=3.5)
        axes.set_ylim(ends)
    memory.set_ylabel(SPEEDUP_LABEL if column == "speedup" else _LOAD_LABEL)
    memory.set_xlabel("spare slots per rank")
    memory.xaxis.set_major_locator(MaxNLocator(integer=True))
    mass.set_xlabel("score mass lost (% of top-k's)")


def _write(axes: Axes, text: str, x: float, y: float) -> None:
    """A number beside a mark."""
    about = {"textcoords": "offset points", "fontsize": "small", "color": MUTED, "zorder": 4}
    axes.annotate(text, (x, y), (5, 4), **about).set_in_layout(False)
