"""What speed costs: ``pareto``, of all policies at once, and ``memory``, beside replicas of experts.

*Pareto.* Speedup against retained score mass, and against the dropped share. A case is on the *front* when no other of
its comparison is at least as fast and at least as faithful, and better in one of the two. Native (speedup 1, all mass,
nothing dropped) competes, so what is slower than native is on the front only where it keeps more than native's mass.
The front connects medians and knows nothing of their intervals: of two points whose intervals overlap neither beats the
other. Where ranks are emulated a third panel leaves time aside: how much less the fullest rank computes, over the mass
kept, below the frontier of dropping (``policies.frontier``).

*Memory.* What balancing buys with memory, and dropping with score mass. Left, replicas: speedup over the spare slots of
a rank, evenly shared or split by a linear program. Right, policies over the score mass that they lose. Panels of a row
share their axis. Balancing ends at perfect balance; dropping goes on, because it also saves work. Below, the fullest
rank in place of speed, with the bound that no placement of so many slots and no split goes below
(``placement.least_fullest``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
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
    of_policies,
    reference_legend,
    run_looks,
    sheet_of_panels,
    speedup_limits,
)
from moe_ep_bench.analysis.load import CASE, Case, Run
from moe_ep_bench.analysis.style import CEILING_LINE, GAMMA, INK, MUTED, Drawing, Look, Looks
from moe_ep_bench.analysis.words import interval_words
from moe_ep_bench.placement import least_fullest
from moe_ep_bench.policies.frontier import joint

# ---- pareto ---------------------------------------------------------------------------------------------------------

_FRONT = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1))}
_NATIVE = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none", "markeredgewidth": 0}
# Column: its label, native's value, which sign makes more of it better, and the column that tells the front.
_COSTS = {
    "retained_mass_percent": ("score mass kept (% of top-k's)", 100.0, 1, "on_front_of_retained_mass"),
    "dropped_percent": ("dropped (% of top-k pairs)", 0.0, -1, "on_front_of_dropped_share"),
}
_FRONTIER = {"color": INK, "linewidth": 1.4}
# Of top-k pairs: a policy that drops more computes nothing that a speedup could be of.
_DROPS_ALL = 95.0


def pareto_figure(run: Run) -> Drawing | None:
    """Speedup against what it costs; None where no policy has a speedup."""
    rows, looks = case_rows(run), run_looks(run)
    policies = of_policies(rows)
    policies = policies[policies["speedup"].notna() & policies["retained_mass_percent"].notna()]
    if policies.empty:
        return None
    for cost, (_, native, sign, on_front) in _COSTS.items():
        kept = [
            own.index[place]
            for _, own in policies.groupby("comparison_id")
            for place in front([*zip(own["speedup"], sign * own[cost], strict=True), (1.0, sign * native)])
            if place < len(own)
        ]
        policies = policies.assign(**{on_front: policies.index.isin(kept)})
    frontiers = _frontiers(run)
    policies = _with_relief(policies, run, frontiers)
    floors = rows[rows["is_floor"] & rows["comparison_id"].isin(policies["comparison_id"])]
    rows = pd.concat([policies, floors]).sort_index()
    drawn, notes = drawn_part(run, rows)
    policies = drawn[drawn["role"] == "policy"]
    away = policies.groupby("comparison_id")["dropped_percent"].transform(_off_scale)
    if away.any():
        notes.append(f"at the right edge, off the scale: what drops more than {_DROPS_ALL:.0f} % of the pairs")
    factors = f" Numbers: {GAMMA}." if policies["capacity_factor"].notna().any() else ""
    lines = interval_words(list(policies["speedup_is_interval"]), "Lines")
    subtitle = f"Speedup over native against what a policy keeps and drops. {lines}{factors}"
    has_frontier = bool(frontiers) and policies["relief"].notna().any()
    legend = _legend(drawn, looks)
    if has_frontier:
        legend.append(("frontier: none that only drops is above; rerouting may be", Line2D([], [], **_FRONTIER)))
    header = "What speed costs", subtitle, footer(run, drawn, notes), legend
    groups = list(drawn.groupby("comparison_id", sort=False))
    titles = [own["comparison"].iloc[0] for _, own in groups]
    figure, axes = sheet_of_panels(
        header, titles, (1,) * (2 + has_frontier), 4.0 if len(groups) == 1 else 5.2, beside=len(groups) == 1, most=4
    )
    for group, (comparison_id, own) in zip(axes, groups, strict=True):
        if has_frontier:
            _draw_relief(group[2], own[(own["role"] == "policy") & ~away.reindex(own.index, fill_value=False)], looks)
            _draw_frontier(group[2], frontiers.get(str(comparison_id)))
        for one, cost in zip(group[:2], _COSTS, strict=True):
            _draw(one, own, away.reindex(own.index, fill_value=False).astype(bool), cost, looks)
            one.set_ylabel(SPEEDUP_LABEL if len(groups) > 1 or one is group[0] else "")
    columns = [*SPEEDUP, "verdict", *COST, *(cost[3] for cost in _COSTS.values())]
    return Drawing(figure, csv(rows, *columns, *(["relief", "kept_percent"] if has_frontier else [])))


def _frontiers(run: Run) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By comparison: how much less the fullest rank computes than native's, and the mass in % that is kept at most."""
    found = {}
    for case in run.cases:
        if case.role == "baseline" and case.frontier is not None:
            curves = zip(case.frontier["curve_load"], case.frontier["curve_kept"], strict=True)
            load_N, kept_N = (one.numpy() for one in joint([(list(load), list(kept)) for load, kept in curves]))
            reached = load_N > 0
            found[case.comparison_id] = (load_N[-1] / load_N[reached], 100 * kept_N[reached])
    return found


def _with_relief(policies: pd.DataFrame, run: Run, frontiers: Mapping[str, Any]) -> pd.DataFrame:
    """Each policy's place in the panel of the frontier: the fullest rank native's over its own, and the mass kept."""
    native_rows = case_rows(run).query("role == 'baseline' and status == 'ok'")
    full = dict(zip(native_rows["comparison_id"], native_rows["fullest_rank"], strict=True))
    places = []
    for row in policies.to_dict("records"):
        key = row["comparison_id"], row["case_id"]
        frontier, native = run.by_key[key].frontier, full.get(row["comparison_id"])
        known = frontier is not None and native and row["comparison_id"] in frontiers and row["fullest_rank"]
        kept = float(frontier["kept_by_load"].mean()) - row["below_frontier"] if known else np.nan
        places.append((native / row["fullest_rank"] if known else np.nan, 100 * kept))
    relief, kept = zip(*places, strict=True)
    return policies.assign(relief=relief, kept_percent=kept)


def _draw_relief(axes: Axes, policies: pd.DataFrame, looks: Looks) -> None:
    """Points of the panel that leaves time aside."""
    for _, point in policies[policies["relief"].notna()].iterrows():
        look = looks[point["family"]]
        axes.plot(point["kept_percent"], point["relief"], zorder=3, **_mark(look, "faster"))
        if not np.isnan(point["capacity_factor"]):
            place = (point["kept_percent"], point["relief"])
            _write(axes, f"{point['capacity_factor']:g}", place, (6, 3), look.colour)
    axes.plot(100, 1, zorder=2.95, **_NATIVE)
    axes.set(xlabel="score mass kept (% of top-k's)", ylabel="fullest rank, native / policy")
    axes.margins(x=0.08, y=0.12)


def _draw_frontier(axes: Axes, frontier: tuple[np.ndarray, np.ndarray] | None) -> None:
    """The frontier, as far as the points reach."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    if frontier is not None:
        axes.plot(frontier[1], frontier[0], zorder=2, **_FRONTIER)
    axes.set(xlim=(right, left), ylim=(low, high))  # what costs more stands to the right


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of (speed, faithfulness) no other beats: places, slowest first; of equal points all.

    A point is beaten by one that is at least as good in both and better in one.
    """
    order = sorted(range(len(points)), key=lambda place: (-points[place][0], -points[place][1]))
    kept: list[int] = []
    best, best_at = -np.inf, np.inf  # the greatest faithfulness so far, and the greatest speed that has it
    for place in order:
        speed, faithfulness = points[place]
        if faithfulness > best or (faithfulness == best and speed == best_at):
            kept.append(place)
            best, best_at = faithfulness, speed
    return kept[::-1]


def _off_scale(dropped_percent: pd.Series) -> pd.Series:
    """Those that drop as good as everything, where others do not: what they gain is no speed of a layer."""
    away = dropped_percent > _DROPS_ALL
    return away & (not away.all())


def _draw(axes: Axes, rows: pd.DataFrame, away: pd.Series, cost: str, looks: Looks) -> None:
    label, native, sign, on_front = _COSTS[cost]
    draw_references(axes, rows)
    policies = rows[(rows["role"] == "policy") & ~away]
    for _, point in policies.iterrows():
        look = looks[point["family"]]
        axes.vlines(point[cost], *point[["speedup_low", "speedup_high"]], color=look.colour, linewidth=1.2, zorder=2.5)
        axes.plot(point[cost], point["speedup"], zorder=3, **_mark(look, point["verdict"]))
        if not np.isnan(point["capacity_factor"]):
            _write(axes, f"{point['capacity_factor']:g}", (point[cost], point["speedup"]), (6, 3), look.colour)
    axes.plot(native, 1, zorder=2.95, **_NATIVE)
    axes.set_xlabel(label)
    axes.margins(x=0.15, y=0.1)
    if sign > 0:
        axes.invert_xaxis()  # what costs more stands to the right in both panels
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    # Room for the words of what stands at the edge, where no other mark is.
    right += 0.38 * (right - left) if away.any() else 0.0
    axes.set(xlim=(left, right), ylim=(low, high))
    chosen = policies[policies[on_front].astype(bool)]
    line = list(zip(chosen[cost], chosen["speedup"], strict=True))
    if len(front([*((y, sign * x) for x, y in line), (1.0, sign * native)])) > len(line):
        line.append((native, 1.0))
    if len(line) > 1:
        # What may cost at most so much has the speedup of the front's last point before it.
        axes.step(*zip(*sorted(line, key=lambda point: point[1]), strict=True), where="post", zorder=2, **_FRONT)
    pad = 0.09 * (high - low)
    for _, point in rows[away].iterrows():
        look, y = looks[point["family"]], min(max(point["speedup"], low + pad), high - pad)
        axes.plot(right, y, zorder=3.2, clip_on=False, **_mark(look, point["verdict"]))
        text = f"speedup {point['speedup']:.2f}\nat {point[cost]:.0f} %"
        _write(axes, text, (right, y), (-7, 0), look.colour, ha="right", va="center")


def _write(axes: Axes, text: str, point: tuple, offset: tuple, colour: str, **place: str) -> None:
    """A word beside a mark, legible where a line runs through it, and never over another mark."""
    halo = [withStroke(linewidth=2.5, foreground="white")]
    about = {"textcoords": "offset points", "fontsize": "small", "color": colour, "zorder": 2.9, "path_effects": halo}
    axes.annotate(text, point, offset, **about, **place).set_in_layout(False)


def _mark(look: Look, verdict: str) -> dict[str, Any]:
    """Hollow where there is no difference from native, or too few batches to say."""
    hollow = verdict not in ("faster", "slower")
    return {
        "linestyle": "none",
        "marker": look.marker,
        "markersize": 8 if hollow else 7,
        "markerfacecolor": "none" if hollow else look.colour,
        "markeredgecolor": look.colour if hollow else "white",
        "markeredgewidth": 1.4 if hollow else 0.6,
    }


def _legend(rows: pd.DataFrame, looks: Looks) -> list:
    shown = rows[rows["role"] == "policy"]
    families = set(shown["family"])
    legend: list = [("native", Line2D([], [], **_NATIVE))]
    legend += [(look.label, Line2D([], [], **_mark(look, "faster"))) for key, look in looks.items() if key in families]
    if not shown["verdict"].isin(["faster", "slower"]).all():
        unsure = Line2D([], [], **_mark(Look("", MUTED, "o", "-", ""), "no difference"))
        legend.append(("neither faster nor slower for sure", unsure))
    return [*legend, ("front", Line2D([], [], **_FRONT)), *reference_legend(rows, native=False)]


# ---- memory ---------------------------------------------------------------------------------------------------------

_LOAD_LABEL = "fullest rank (mean of native = 1)"
_BOUND = {"color": MUTED, "linestyle": (0, (1, 1.5)), "linewidth": 1.6}
_REPLICAS = [
    {"color": "#CC79A7", "linestyle": line, "marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.6}
    for line, marker in (((0, (3, 2)), "s"), ("-", "D"), ("-.", "X"), ((0, (1, 1)), "P"))
]


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
        _draw_memory(axes[2 * place], own, ways, looks, "speedup")
        _draw_memory(axes[2 * place + 1], own, ways, looks, "fullest_rank")
    shown = (*SPEEDUP, "verdict", *COST, "fullest_rank", "spare_per_rank", "more_gib_per_rank", "bound_of_fullest_rank")
    return Drawing(figure, csv(rows, *shown))


def memory_rows(run: Run) -> pd.DataFrame:
    """``case_rows`` with what replicas cost, which way they balance (``way``), and the bound for so many slots."""
    rows = case_rows(run)
    params = rows["policy_params"].fillna("{}").map(json.loads)
    spare = params.map(lambda one: one.get("spare_per_rank")).astype(float)
    way = pd.Series([label.partition(",")[0] for label in rows["policy"]], rows.index, object).where(spare.notna())
    extra = {key: case.extra_bytes_per_rank for key, case in run.by_key.items()}
    native = {case.comparison_id: case for case in run.cases if case.role == "baseline" and case.is_ok}
    bounds = [
        _bound(run, native[name], int(slots)) if name in native and not np.isnan(slots) else np.nan
        for name, slots in zip(rows["comparison_id"], spare, strict=True)
    ]
    return rows.assign(
        spare_per_rank=spare,
        way=way,
        more_gib_per_rank=rows[CASE].apply(tuple, axis=1).map(extra).astype(float) / 2**30,
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


def _draw_memory(pair: list[Axes], rows: pd.DataFrame, ways: list[str], looks: Looks, column: str) -> None:
    """Replicas in the first panel, policies in the second."""
    memory, mass = pair
    native = rows.loc[rows["role"] == "baseline", column].iloc[0] if column != "speedup" else 1.0
    for place, way in enumerate(ways):
        own = rows[(rows["way"] == way) & rows[column].notna()].sort_values("spare_per_rank")
        memory.plot([0, *own["spare_per_rank"]], [native, *own[column]], **_REPLICAS[place % 4], zorder=3)
        if place == 0 and column == "speedup":
            for x, y, gib in own[["spare_per_rank", column, "more_gib_per_rank"]].itertuples(index=False):
                _write(memory, f"{gib:.2g}", (x, y), (0, -7), MUTED, ha="center", va="top")
    for key, look in looks.items():
        own = rows[(rows["family"] == key) & rows[column].notna()].sort_values("lost_percent")
        mass.plot(own["lost_percent"], own[column], **look.marks, zorder=3)
        for x, y, factor in own[["lost_percent", column, "capacity_factor"]].dropna().itertuples(index=False):
            place = {"ha": "center", "va": "top"} if column == "speedup" else {}
            _write(mass, f"{factor:g}", (x, y), (0, -7) if place else (5, 4), MUTED, **place)
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
