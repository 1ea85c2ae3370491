"""What speed costs: speedup against retained score mass, and against the dropped share, of all policies at once.

A case is on the *front* when no other of its comparison is at least as fast and at least as faithful, and better in
one of the two. Native (speedup 1, all mass, nothing dropped) competes, so what is slower than native is on the front
only where it keeps more than native's mass. Who chooses a policy chooses on the front; by how much its points differ
from native at all is for the noise floor to say, and points within it are hollow. The front connects medians and knows
nothing of their intervals: of two points whose intervals overlap neither beats the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.figures.panels import (
    SPEEDUP_LABEL,
    draw_references,
    in_panels,
    lay_out,
    reference_legend,
    warnings_of,
)
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import COST, SPEEDUP, as_csv, cases
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import GAMMA, INK, MUTED, Drawing, Look, Looks, is_narrow, sheet
from moe_ep_bench.analysis.words import footer_lines, interval_words

_FRONT = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1))}
_NATIVE = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none", "markeredgewidth": 0}
# Column: its label, native's value, and which sign makes more of it better.
_COSTS = {
    "retained_mass_percent": ("retained score mass (% of top-k's)", 100.0, 1),
    "dropped_percent": ("dropped (% of top-k pairs)", 0.0, -1),
}
_ON_FRONT = {"retained_mass_percent": "on_front_of_retained_mass", "dropped_percent": "on_front_of_dropped_share"}
# Of top-k pairs: a policy that drops more computes nothing that a speedup could be of.
_DROPS_ALL = 95.0


def pareto_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Speedup against what it costs; None where no policy has a speedup."""
    rows = cases(run, comparisons)
    is_policy = (rows["role"] == "policy") & rows["speedup"].notna() & rows["retained_mass_percent"].notna()
    rows = rows[is_policy | rows["result"].isna()]
    rows = rows[rows["place"].isin(rows.loc[rows["role"] == "policy", "place"])].copy()
    if rows.empty:
        return None
    rows["is_away"] = rows.groupby("place")["dropped_percent"].transform(_off_scale)
    for cost, (_, native, sign) in _COSTS.items():
        on_front = [
            kept
            for _, own in rows[rows["role"] == "policy"].groupby("place")
            for kept in own.index[_front(own["speedup"], sign * own[cost], sign * native)]
        ]
        rows[_ON_FRONT[cost]] = pd.Series(rows.index.isin(on_front), rows.index, object).where(rows["role"] == "policy")
    panels = in_panels([comparisons[place] for place in rows["place"].unique()])
    drawn = rows[rows["place"].isin([comparisons.index(one) for one in panels.shown])]
    policies = drawn[drawn["role"] == "policy"]
    facts = [comparison.comparison for comparison in panels.shown]
    is_beside = panels.num_columns == 1 and not is_narrow()
    first, second = ("left", "right") if is_beside else ("above", "below")
    figure = sheet(
        "What speed costs",
        f"Speedup of the layer over native against retained score mass ({first}) and dropped top-k pairs ({second}). "
        + interval_words(list(policies["is_interval"]), "Lines")
        + (f" Numbers: capacity factor {GAMMA}." if policies["capacity_factor"].notna().any() else "")
        + " Front: no other policy is as fast and as faithful. Hollow: no difference from native beyond the noise "
        "floor, or too few batches to say."
        + (
            f" At the right edge, off the scale: what drops more than {_DROPS_ALL:.0f} % of the pairs."
            if drawn["is_away"].any()
            else ""
        ),
        footer_lines(run, facts, [*warnings_of(facts), *panels.note]),
        _legend(drawn, looks),
        width=panels.width,
        body=len(panels.rows) * (4.0 if is_beside else 6.6),
    )
    for row in lay_out(figure, panels, (1, 1)):
        for place in row:
            own = rows[rows["place"] == comparisons.index(place.comparison)]
            for axes, cost in zip(place.axes, _COSTS, strict=True):
                _draw(axes, own, cost, looks)
            place.label_outer(has_one_x=False)
    return Drawing(figure, as_csv(rows, *SPEEDUP, "verdict", *COST, *_ON_FRONT.values()))


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


def _front(speedups: pd.Series, faithfulness: pd.Series, of_native: float) -> list[int]:
    """Which policies are on the front that native competes for."""
    kept = front([*zip(speedups, faithfulness, strict=True), (1.0, of_native)])
    return [place for place in kept if place < len(speedups)]


def _off_scale(dropped_percent: pd.Series) -> pd.Series:
    """Those that drop as good as everything, where others do not: what they gain is no speed of a layer."""
    away = dropped_percent > _DROPS_ALL
    return away & (away.sum() < dropped_percent.notna().sum())


def _draw(axes: Axes, rows: pd.DataFrame, cost: str, looks: Looks) -> None:
    label, native, sign = _COSTS[cost]
    draw_references(axes, rows)
    policies = rows[rows["role"] == "policy"]
    for point in policies[~policies["is_away"]].itertuples():
        look, at = looks[point.family], getattr(point, cost)
        axes.vlines(at, point.speedup_low, point.speedup_high, color=look.colour, linewidth=1.2, zorder=2.5)
        axes.plot(at, point.speedup, zorder=3, **_mark(look, hollow=not _is_effect(point.verdict)))
        if not np.isnan(point.capacity_factor):
            _write(axes, f"{point.capacity_factor:g}", (at, point.speedup), (6, 3), look.colour)
    axes.plot(native, 1, zorder=2.2, **_NATIVE)
    axes.set_xlabel(label)
    axes.set_ylabel(SPEEDUP_LABEL)
    axes.margins(x=0.08, y=0.08)
    if sign > 0:
        axes.invert_xaxis()  # what costs more stands to the right in both panels
    away = policies[policies["is_away"]]
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    # Room for the words of what stands at the edge, where no other mark is.
    right += (0.38 * (right - left)) if len(away) else 0.0
    axes.set(xlim=(left, right), ylim=(low, high))
    on_front = policies[policies[_ON_FRONT[cost]].astype(bool)]
    line = list(zip(on_front[cost], on_front["speedup"], strict=True))
    if len(front([*((y, sign * x) for x, y in line), (1.0, sign * native)])) > len(line):
        line.append((native, 1.0))
    if len(line) > 1:
        # What may cost at most so much has the speedup of the front's last point before it.
        axes.step(*zip(*sorted(line, key=lambda point: point[1]), strict=True), where="post", zorder=2, **_FRONT)
    pad = 0.09 * (high - low)
    for point in away.sort_values("speedup", ascending=False).itertuples():
        look, y = looks[point.family], min(max(point.speedup, low + pad), high - pad)
        axes.plot(right, y, zorder=3.2, clip_on=False, **_mark(look, hollow=not _is_effect(point.verdict)))
        text = f"speedup {point.speedup:.2f}\nat {getattr(point, cost):.0f} %"
        _write(axes, text, (right, y), (-7, 0), look.colour, ha="right", va="center")


def _write(
    axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], colour: str, **place
) -> None:
    """A word beside a mark."""
    about = {"xytext": offset, "textcoords": "offset points", "fontsize": "small", "color": colour, "zorder": 4}
    axes.annotate(text, point, **about, **place).set_in_layout(False)


def _is_effect(verdict: str) -> bool:
    return verdict in ("faster", "slower")


def _mark(look: Look, *, hollow: bool) -> dict:
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
    legend += [
        (look.label, Line2D([], [], **_mark(look, hollow=False)))
        for family, look in looks.items()
        if family in families
    ]
    if not shown["verdict"].map(_is_effect).all():
        unsure = Line2D([], [], **_mark(Look("", MUTED, "o", "-", ""), hollow=True))
        legend.append(("no difference, or inconclusive", unsure))
    return [*legend, ("front", Line2D([], [], **_FRONT)), *reference_legend(rows, native=False)]
