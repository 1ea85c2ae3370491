"""How times are distributed on every rank, native beside a policy: of the whole layer, and of its work alone.

A layer's time on a rank (plain iterations) hides who is to blame, because all ranks end about when the slowest does;
its work, the time without what it waited (breakdown iterations), does not. Bars run from the 10th to the 90th
percentile, a tick marks the median, a dot the 99th percentile. Many ranks stand sorted by native work.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.choice import ITERATION, Choice, choose
from moe_ep_bench.analysis.figures.panels import case_rows, cost_words, csv, footer, run_looks, sheet_of_panels
from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import INK, MUTED, Drawing, looks_of
from moe_ep_bench.schema import TOTAL, WAITING_PHASES

_LEVELS = {"p10_us": 0.1, "p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99}
_MANY = 24  # ranks, which are then sorted
_FEW = 100  # samples below which a 99th percentile is little more than the largest


def latency_figure(run: Run, choice: Choice | None = None) -> Drawing | None:
    """Distributions of layer time and work by rank; None where no policy stands beside native on several ranks.

    Raises:
        ValueError: the choice names a case that there is none of.
    """
    several = [one for one in analyse(run) if one.comparison.num_together > 1]
    chosen = choose(several, choice or Choice(), lambda case: len(layer_by_rank_us(case)) > 0)
    if chosen is None:
        return None
    cases, looks = [chosen.native.case, chosen.policy.case], run_looks(run)
    samples = {"layer time": layer_by_rank_us, "work": work_by_rank_us}
    found = {name: [of(case) for case in cases] for name, of in samples.items()}
    percentiles = [
        _percentiles(times_us, min(one.groupby(level="rank").size().min() for one in both)).assign(
            case_id=case.case_id, quantity=name
        )
        for name, both in found.items()
        if all(len(times_us) for times_us in both)
        for case, times_us in zip(cases, both, strict=True)
    ]
    rows = pd.concat(percentiles, ignore_index=True).merge(case_rows(run), on="case_id")
    policy = rows[rows["case_id"] == cases[1].case_id].iloc[0]
    quantities = list(rows["quantity"].unique())
    work = rows[(rows["quantity"] == quantities[-1]) & (rows["case_id"] == cases[0].case_id)]
    is_many = len(work) > _MANY
    order = work.sort_values("p50_us", ascending=False, kind="stable")["rank"] if is_many else work["rank"]
    look = looks.get(policy["family"]) or looks_of({policy["policy"]: policy["policy"]})[policy["policy"]]
    few = [f"of fewer than {_FEW} iterations a rank the 99th percentile is hardly more than the largest"]
    marks = [("native", {"color": INK, "marker": "o"}, MUTED), (policy["name"], look.marks, look.colour)]
    cost = cost_words(policy) if policy["role"] == "policy" else ""
    header = (
        f"Latency on every rank: native and {policy['name']}",
        f"{chosen.why.capitalize()}{f' ({cost})' if cost else ''}; bars: 10th to 90th percentile, ticks: median, dots: "
        f"99th; work: time without waiting{'; ranks sorted by native work' if is_many else ''}.",
        footer(run, rows, few if rows["num_samples"].min() < _FEW else []),
        [
            (name, (Line2D([], [], color=bar, linewidth=5, alpha=0.5), Line2D([], [], **_dots(dots))))
            for name, dots, bar in marks
        ],
    )
    is_modelled = policy["origin"] == "modelled"
    titles = []
    for quantity in quantities:
        kind = "plain" if quantity == "layer time" else "breakdown"
        number = rows.loc[rows["quantity"] == quantity, "num_samples"].iloc[0]
        titles.append(f"{quantity}: {number:,} {'modelled batches' if is_modelled else f'{kind} iterations'} a rank")
    titles[0] = f"{policy['comparison']}; {titles[0]}"
    figure, axes = sheet_of_panels(header, titles, (1,), 2.6, most=1)
    for (one,), quantity in zip(axes, quantities, strict=True):
        for side, (case, (_, dots, bar)) in enumerate(zip(cases, marks, strict=True)):
            own = rows[(rows["quantity"] == quantity) & (rows["case_id"] == case.case_id)]
            _draw(one, own.set_index("rank").loc[order, list(_LEVELS)] / 1e3, side, dots, bar)
        one.set_ylabel(f"{quantity} (ms)")
        one.set_xticks(range(len(order)), [str(rank) for rank in order])
        one.tick_params(axis="x", labelbottom=not is_many, length=0)
        half = max(len(order), 6 if len(order) > 2 else 3) / 2  # bars of two ranks are no wider than those of six
        one.set_xlim((len(order) - 1) / 2 - half, (len(order) - 1) / 2 + half)
        one.margins(y=0.07)
        if one.get_ylim()[0] < 0.35 * one.get_ylim()[1]:
            one.set_ylim(bottom=0)
        one.grid(False, axis="x")
    axes[-1][0].set_xlabel("ranks, sorted by native work" if is_many else "rank")
    return Drawing(figure, csv(rows, "rank", "quantity", *_LEVELS, "num_samples"))


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


def _percentiles(times_us: pd.Series, num_samples: int) -> pd.DataFrame:
    """A row per rank."""
    levels = times_us.groupby(level="rank").quantile(list(_LEVELS.values())).unstack()
    return levels.set_axis(list(_LEVELS), axis=1).assign(num_samples=num_samples).reset_index()


def _draw(axes: Axes, times_ms: pd.DataFrame, side: int, dots: dict, colour: str) -> None:
    """Percentiles by rank, native left of the policy."""
    at = np.arange(len(times_ms)) + (0.18 if side else -0.18)
    width = np.clip(90 / len(times_ms), 1.5, 16)  # points
    bar = {"color": colour, "alpha": 0.5, "capstyle": "butt"}
    axes.vlines(at, times_ms["p10_us"], times_ms["p90_us"], linewidth=width, zorder=2, **bar)
    axes.plot(at, times_ms["p50_us"], linestyle="none", marker="_", color=colour, markersize=width + 4, zorder=3)
    axes.plot(at, times_ms["p99_us"], zorder=3, **_dots(dots) | {"markersize": 5 if len(times_ms) <= _MANY else 3})


def _dots(marks: dict) -> dict:
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    return {**marks, "linestyle": "none", "markersize": 5, **edge}
