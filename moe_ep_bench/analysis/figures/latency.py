"""How times are distributed on every rank, native beside a policy: of the whole layer, and of its work alone.

A layer's time on a rank (plain iterations) hides who is to blame, because all ranks end about when the slowest does;
its work, the time without what it waited (breakdown iterations), does not. Bars run from the 10th to the 90th
percentile, a tick marks the median, a dot the 99th percentile. Of many ranks, which then stand sorted by native work,
bars join to bands.

Shapes: R = ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.choice import Choice, choose
from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.marks import mark, table
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import INK, MUTED, NATIVE_FILL, Drawing, Look, case_name, looks_of, panel_title, sheet
from moe_ep_bench.analysis.words import OVERSUBSCRIBED, footer_lines, percent
from moe_ep_bench.schema import TOTAL, WAITING_PHASES

_ITERATION = ["launch", "batch", "iteration"]
_LEVELS = (0.1, 0.5, 0.9, 0.99)
# Above this bars of ranks join.
_MAX_BARS = 24
_LEAST_WIDTH = 6
_FEW = 100  # samples below which a 99th percentile is little more than the largest


@dataclass(frozen=True, eq=False)
class Quantity:
    """One panel: what is distributed, and for each of two cases its percentiles by rank, in us: [R, levels]."""

    name: str
    label: str
    kind: str
    native: pd.DataFrame
    policy: pd.DataFrame
    num_samples: int


def latency_figure(
    run: Run, comparisons: list[ComparisonResult], looks: dict[str, Look], choice: Choice | None = None
) -> Drawing | None:
    """Distributions of layer time and work by rank; None where no policy stands beside native on several ranks.

    Raises:
        ValueError: the choice names a case that there is none of.
    """
    several = [one for one in comparisons if one.comparison.num_together > 1]
    chosen = choose(several, choice or Choice(), lambda case: len(layer_by_rank_us(case)) > 0)
    if chosen is None:
        return None
    facts = chosen.comparison.comparison
    native, policy = chosen.native, chosen.policy
    look = looks.get(policy.family) or next(iter(looks_of({policy.family: policy.case.label}).values()))
    quantities = _quantities(native.case, policy.case)
    order = quantities[-1].native[0.5].sort_values(ascending=False, kind="stable").index
    is_modelled = facts.device is not None
    is_many = len(order) > _MAX_BARS
    if not is_many:
        order = order.sort_values()
    cost = ""
    if policy.fidelity is not None and policy.case.role == "policy":
        dropped, kept = percent(policy.fidelity.dropped_share), percent(policy.fidelity.retained_mass)
        cost = f" ({dropped} % dropped, {kept} % mass kept)"
    figure = sheet(
        f"Latency on every rank: native and {case_name(policy, looks)}",
        f"{facts.title}; {chosen.why}{cost}. {'Bands' if is_many else 'Bars'}: 10th to 90th percentile; "
        f"{'lines' if is_many else 'ticks'}: median; dots: 99th. Work: time without waiting"
        + (", by the model." if is_modelled else ", from breakdown iterations.")
        + (" Ranks are sorted by native work." if is_many else ""),
        footer_lines(run, [facts], _warnings(facts.oversubscribed, quantities)),
        _legend(look, case_name(policy, looks), is_many=is_many),
        width=9.5,
        body=2.7 * len(quantities),
    )
    panels = figure.subplots(len(quantities), 1, sharex=True, squeeze=False)[:, 0]
    for axes, quantity in zip(panels, quantities, strict=True):
        samples = "modelled batches" if is_modelled else f"{quantity.kind} iterations"
        panel_title(axes, f"{quantity.name} ({quantity.num_samples:,} {samples} a rank)", 8.0)
        _draw(axes, quantity, order, look, is_many=is_many, is_modelled=is_modelled)
        axes.set_ylabel(quantity.label)
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    if is_many:
        panels[-1].set_xlabel("ranks, sorted by native work")
    else:
        panels[-1].set_xticks(range(len(order)), [str(rank) for rank in order])
        panels[-1].set_xlabel("rank")
    rows = [
        mark(run, chosen.comparison, result, rank=int(rank), quantity=quantity.name, **_percentiles(of_rank, quantity))
        for quantity in quantities
        for result, of_case in ((native, quantity.native), (policy, quantity.policy))
        for rank, of_rank in of_case.sort_index().iterrows()
    ]
    return Drawing(figure, table(rows))


def layer_by_rank_us(case: Case) -> pd.Series:
    """Every rank's own time of every plain iteration, by rank; samples in no order."""
    rows = case.timings
    rows = rows[(rows["kind"] == "plain") & (rows["phase"] == TOTAL)]
    return rows.set_index("rank")["time_us"]


def work_by_rank_us(case: Case) -> pd.Series:
    """Every rank's time of every breakdown iteration without what it waited, by rank; empty without breakdowns."""
    rows = case.timings[case.timings["kind"] == "breakdown"]
    keys = ["rank", *_ITERATION]
    totals = rows[rows["phase"] == TOTAL].set_index(keys)["time_us"]
    waits = rows[rows["phase"].isin(WAITING_PHASES)].groupby(keys)["time_us"].sum()
    return (totals - waits.reindex(totals.index, fill_value=0.0)).droplevel(_ITERATION)


def _quantities(native: Case, policy: Case) -> list[Quantity]:
    found = []
    for name, label, kind, samples in (
        ("layer time", "layer time (ms)", "plain", layer_by_rank_us),
        ("work", "work (ms)", "breakdown", work_by_rank_us),
    ):
        both = [samples(case) for case in (native, policy)]
        if all(len(of_case) for of_case in both):
            of_native, of_policy = (one.groupby(level="rank").quantile(list(_LEVELS)).unstack() for one in both)
            number = min(int(one.groupby(level="rank").size().min()) for one in both)
            found.append(Quantity(name, label, kind, of_native, of_policy, number))
    return found


def _percentiles(of_rank: pd.Series, quantity: Quantity) -> dict:
    named = {f"p{100 * level:.0f}_us": float(of_rank[level]) for level in _LEVELS}
    return {**named, "num_samples": quantity.num_samples}


def _warnings(oversubscribed: bool, quantities: list[Quantity]) -> list[str]:
    warnings = [OVERSUBSCRIBED] if oversubscribed else []
    if min(quantity.num_samples for quantity in quantities) < _FEW:
        warnings.append(f"of fewer than {_FEW} iterations a rank the 99th percentile is hardly more than the largest")
    return warnings


def _draw(axes: Axes, quantity: Quantity, order: pd.Index, look: Look, *, is_many: bool, is_modelled: bool) -> None:
    places = np.arange(len(order))
    for side, (percentiles, of_policy) in enumerate(((quantity.native, False), (quantity.policy, True))):
        low, middle, high, highest = (percentiles.loc[order, level].to_numpy() / 1e3 for level in _LEVELS)
        colour = look.colour if of_policy else INK
        dots = _dots(look.marker if of_policy else "o", colour)
        if is_many:
            band = {"color": look.colour, "alpha": 0.35} if of_policy else {"color": NATIVE_FILL}
            axes.fill_between(places, low, high, step="mid", linewidth=0, zorder=1.5 + side, **band)
            line = look.line if of_policy and look.line != "-" else "--" if of_policy else "-"
            axes.plot(
                places, middle, color=colour, linewidth=1.5, linestyle=line, drawstyle="steps-mid", zorder=3 + side
            )
            axes.plot(places, highest, zorder=3 + side, **{**dots, "markersize": 2.5, "markeredgewidth": 0})
            continue
        at = places + (0.18 if of_policy else -0.18)
        face = {"facecolor": look.colour, "hatch": "////", "edgecolor": "white"} if of_policy else _NATIVE_BAR
        axes.bar(at, high - low, 0.28, low, linewidth=0.5, zorder=2, **face)
        # A model's batches are so alike that a bar can be thinner than its tick.
        tick = look.colour if of_policy and is_modelled else INK
        axes.hlines(middle, at - 0.17, at + 0.17, color=tick, linewidth=1.8, zorder=3)
        axes.plot(at, highest, zorder=3, **dots)
    axes.use_sticky_edges = False
    axes.margins(x=0.02, y=0.07)
    low, high = axes.get_ylim()
    if low < 0.35 * high:
        axes.set_ylim(bottom=0)
    if len(order) <= 2:
        axes.set_xlim(-0.7, len(order) - 0.3)
    elif not is_many:  # bars of three ranks are no wider than those of six
        middle, half = (len(order) - 1) / 2, max(len(order), _LEAST_WIDTH) / 2
        axes.set_xlim(middle - half, middle + half)
    axes.grid(False, axis="x")


_NATIVE_BAR = {"facecolor": NATIVE_FILL, "edgecolor": MUTED}


def _dots(marker: str, colour: str) -> dict:
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    return {"linestyle": "none", "marker": marker, "color": colour, "markersize": 5, **edge}


def _legend(look: Look, name: str, *, is_many: bool) -> list:
    native_dot, policy_dot = (Line2D([], [], **_dots(*one)) for one in (("o", INK), (look.marker, look.colour)))
    if is_many:
        faces = Patch(facecolor=NATIVE_FILL), Patch(facecolor=look.colour, alpha=0.35)
    else:
        faces = Patch(**_NATIVE_BAR), Patch(facecolor=look.colour, hatch="////", edgecolor="white")
    return [("native", (faces[0], native_dot)), (name, (faces[1], policy_dot))]
