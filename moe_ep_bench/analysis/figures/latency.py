"""How times are distributed on every rank, native beside a policy: of the whole layer, and of its work alone.

A layer's time on a rank (plain iterations) hides who is to blame, because all ranks end about when the slowest does;
its work, the time without what it waited (breakdown iterations), does not. Bars run from the 10th to the 90th
percentile, a tick marks the median, a dot the 99th percentile. Of many ranks, which then stand sorted by native work,
bars join to bands.

Shapes: R = ranks.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.choice import ITERATION, Choice, choose
from moe_ep_bench.analysis.figures.panels import cost_words, warnings_of
from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.marks import mark, table
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import (
    INK,
    MUTED,
    NATIVE_FILL,
    Drawing,
    Look,
    Looks,
    case_name,
    looks_of,
    panel_title,
    sheet,
)
from moe_ep_bench.analysis.words import footer_lines
from moe_ep_bench.schema import TOTAL, WAITING_PHASES

_LEVELS = {"p10_us": 0.1, "p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99}
# Above this bars of ranks join.
_MAX_BARS = 24
_LEAST_WIDTH = 6
_FEW = 100  # samples below which a 99th percentile is little more than the largest
_NATIVE_BAR = {"facecolor": NATIVE_FILL, "edgecolor": MUTED}


def latency_figure(
    run: Run, comparisons: list[ComparisonResult], looks: Looks, choice: Choice | None = None
) -> Drawing | None:
    """Distributions of layer time and work by rank; None where no policy stands beside native on several ranks.

    Raises:
        ValueError: the choice names a case that there is none of.
    """
    several = [one for one in comparisons if one.comparison.num_together > 1]
    chosen = choose(several, choice or Choice(), lambda case: len(layer_by_rank_us(case)) > 0)
    if chosen is None:
        return None
    facts, native, policy = chosen.comparison.comparison, chosen.native, chosen.policy
    rows = table(
        mark(run, chosen.comparison, result, rank=int(rank), quantity=quantity, **percentiles)
        for quantity, of_cases in _percentiles(native.case, policy.case).items()
        for result, by_rank in zip((native, policy), of_cases, strict=True)
        for rank, percentiles in by_rank.to_dict("index").items()
    )
    quantities = list(rows["quantity"].unique())
    look = looks.get(policy.family) or next(iter(looks_of({policy.family: policy.case.label}).values()))
    name, is_modelled = case_name(policy, looks), facts.device is not None
    last = rows[(rows["quantity"] == quantities[-1]) & (rows["role"] == "baseline")]
    is_many = len(last) > _MAX_BARS
    order = last.sort_values("p50_us", ascending=False, kind="stable")["rank"] if is_many else last["rank"]
    warnings = warnings_of([facts])
    if rows["num_samples"].min() < _FEW:
        warnings.append(f"of fewer than {_FEW} iterations a rank the 99th percentile is hardly more than the largest")
    cost = f" ({cost_words(policy)})" if policy.fidelity is not None and policy.case.role == "policy" else ""
    figure = sheet(
        f"Latency on every rank: native and {name}",
        f"{facts.title}; {chosen.why}{cost}. {'Bands' if is_many else 'Bars'}: 10th to 90th percentile; "
        f"{'lines' if is_many else 'ticks'}: median; dots: 99th. Work: time without waiting"
        + (", by the model." if is_modelled else ", from breakdown iterations.")
        + (" Ranks are sorted by native work." if is_many else ""),
        footer_lines(run, [facts], warnings),
        _legend(look, name, is_many=is_many),
        width=9.5,
        body=2.7 * len(quantities),
    )
    panels = figure.subplots(len(quantities), 1, sharex=True, squeeze=False)[:, 0]
    for axes, quantity in zip(panels, quantities, strict=True):
        own = rows[rows["quantity"] == quantity]
        kind = (
            "modelled batches" if is_modelled else f"{'plain' if quantity == 'layer time' else 'breakdown'} iterations"
        )
        panel_title(axes, f"{quantity} ({own['num_samples'].iloc[0]:,} {kind} a rank)", 8.0)
        for side, result in enumerate((native, policy)):
            of_case = own[own["policy"] == result.case.label].set_index("rank").loc[order, list(_LEVELS)] / 1e3
            (_draw_bands if is_many else _draw_bars)(axes, of_case, look if side else None, is_modelled=is_modelled)
        _limit(axes, len(order), is_many=is_many)
        axes.set_ylabel(f"{quantity} (ms)")
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    if not is_many:
        panels[-1].set_xticks(range(len(order)), [str(rank) for rank in order])
    panels[-1].set_xlabel("ranks, sorted by native work" if is_many else "rank")
    return Drawing(figure, rows)


def layer_by_rank_us(case: Case) -> pd.Series:
    """Every rank's own time of every plain iteration, by rank; samples in no order."""
    rows = case.timings
    rows = rows[(rows["kind"] == "plain") & (rows["phase"] == TOTAL)]
    return rows.set_index("rank")["time_us"]


def work_by_rank_us(case: Case) -> pd.Series:
    """Every rank's time of every breakdown iteration without what it waited, by rank; empty without breakdowns."""
    rows = case.timings[case.timings["kind"] == "breakdown"]
    keys = ["rank", *ITERATION]
    totals = rows[rows["phase"] == TOTAL].set_index(keys)["time_us"]
    waits = rows[rows["phase"].isin(WAITING_PHASES)].groupby(keys)["time_us"].sum()
    return (totals - waits.reindex(totals.index, fill_value=0.0)).droplevel(ITERATION)


def _percentiles(native: Case, policy: Case) -> dict[str, list[pd.DataFrame]]:
    """By quantity, for each of two cases: a row per rank with ``_LEVELS`` and the least number of samples."""
    found = {}
    for name, samples in (("layer time", layer_by_rank_us), ("work", work_by_rank_us)):
        both = [samples(case).groupby(level="rank") for case in (native, policy)]
        if all(len(of_case) for of_case in both):
            number = min(int(of_case.size().min()) for of_case in both)
            found[name] = [
                of_case.quantile(list(_LEVELS.values()))
                .unstack()
                .set_axis(list(_LEVELS), axis=1)
                .assign(num_samples=number)
                for of_case in both
            ]
    return found


def _draw_bands(axes: Axes, times_ms: pd.DataFrame, look: Look | None, *, is_modelled: bool) -> None:
    """Percentiles of many ranks; ``look``: None for native."""
    places, zorder = np.arange(len(times_ms)), 3 + (look is not None)
    band = {"color": NATIVE_FILL} if look is None else {"color": look.colour, "alpha": 0.35}
    low, high = times_ms["p10_us"], times_ms["p90_us"]
    axes.fill_between(places, low, high, step="mid", linewidth=0, zorder=zorder - 1.5, **band)
    colour = INK if look is None else look.colour
    line = "-" if look is None else look.line if look.line != "-" else "--"
    steps = {"linestyle": line, "drawstyle": "steps-mid", "linewidth": 1.5}
    axes.plot(places, times_ms["p50_us"], color=colour, zorder=zorder, **steps)
    axes.plot(places, times_ms["p99_us"], zorder=zorder, **(_dots(look) | {"markersize": 2.5, "markeredgewidth": 0}))


def _draw_bars(axes: Axes, times_ms: pd.DataFrame, look: Look | None, *, is_modelled: bool) -> None:
    """Percentiles of few ranks, native left of the policy."""
    at = np.arange(len(times_ms)) + (-0.18 if look is None else 0.18)
    low, high = times_ms["p10_us"], times_ms["p90_us"]
    axes.bar(at, high - low, 0.28, low, linewidth=0.5, zorder=2, **_bar(look))
    # A model's batches are so alike that a bar can be thinner than its tick.
    tick = look.colour if look is not None and is_modelled else INK
    axes.hlines(times_ms["p50_us"], at - 0.17, at + 0.17, color=tick, linewidth=1.8, zorder=3)
    axes.plot(at, times_ms["p99_us"], zorder=3, **_dots(look))


def _limit(axes: Axes, num_ranks: int, *, is_many: bool) -> None:
    axes.use_sticky_edges = False
    axes.margins(x=0.02, y=0.07)
    low, high = axes.get_ylim()
    if low < 0.35 * high:
        axes.set_ylim(bottom=0)
    if not is_many:  # bars of three ranks are no wider than those of six
        middle, half = (num_ranks - 1) / 2, max(num_ranks, _LEAST_WIDTH if num_ranks > 2 else 2.4) / 2
        axes.set_xlim(middle - half, middle + half)
    axes.grid(False, axis="x")


def _bar(look: Look | None) -> dict:
    return _NATIVE_BAR if look is None else {"facecolor": look.colour, "hatch": "////", "edgecolor": "white"}


def _dots(look: Look | None) -> dict:
    marker, colour = ("o", INK) if look is None else (look.marker, look.colour)
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    return {"linestyle": "none", "marker": marker, "color": colour, "markersize": 5, **edge}


def _legend(look: Look, name: str, *, is_many: bool) -> list:
    bands = Patch(facecolor=NATIVE_FILL), Patch(facecolor=look.colour, alpha=0.35)
    faces = bands if is_many else (Patch(**_bar(None)), Patch(**_bar(look)))
    dots = [Line2D([], [], **_dots(one)) for one in (None, look)]
    return [("native", (faces[0], dots[0])), (name, (faces[1], dots[1]))]
