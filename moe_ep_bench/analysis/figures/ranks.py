"""One case on every rank, beside native: ``timeline``, during one layer, and ``latency``, over all iterations.

*Timeline.* A lane per rank; its phases are bars in the order in which the layer passes them, drawn from the durations
that one breakdown iteration measured, so that a lane is as long as its rank's time. Waiting is hatched. The *critical
rank* is the one for which the others wait: of the expert-parallel group with the slowest rank, the rank that itself
waits least (of equals the one that works longest). Both panels show the same batch on the same axis of time. The
iteration shown is typical, not chosen by eye: the one of the policy whose layer time is closest to the median of its
breakdown iterations, and of native, in the same launch and batch, likewise. Of more ranks than there is room for, those
are shown that stand evenly spaced from the most to the least native work, and both critical ranks.

*Latency.* A layer's time on a rank (plain iterations) hides who is to blame, because all ranks end about when the
slowest does; its work, the time without what it waited (breakdown iterations), does not. Bars run from the 10th to the
90th percentile, a tick marks the median, a dot the 99th percentile. Many ranks stand sorted by native work.

Shapes: R = ranks of the group shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from moe_ep_bench.analysis.choice import ITERATION, TYPICAL, Choice, IterationChoice, choose
from moe_ep_bench.analysis.figures.panels import (
    case_rows,
    cost_words,
    csv,
    footer,
    name_rows,
    run_looks,
    sheet_of_panels,
)
from moe_ep_bench.analysis.figures.policies import phase_legend
from moe_ep_bench.analysis.load import Case, Comparison, Run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import INK, MUTED, Drawing, looks_of, phase_look
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.words import PARTLY_ELSEWHERE, milliseconds, percent, phase_origin
from moe_ep_bench.errors import UserError
from moe_ep_bench.schema import LAYER_PHASES, TOTAL, UNACCOUNTED, WAITING_PHASES

# ---- timeline -------------------------------------------------------------------------------------------------------

_GROUP_OF = {phase: group for group, phases in GROUPS.items() for phase in phases}
_MAX_LANES, _SHOWN_LANES = 24, 16
_END_LINE = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (4, 2))}
_BOX = {"marker": "s", "markerfacecolor": "none", "markersize": 9, "markeredgewidth": 1.8, "linestyle": "none"}


@dataclass(frozen=True, eq=False)
class Iteration:
    """One breakdown iteration of one case.

    Attributes:
        key: launch, batch and iteration.
        times_us: a row per rank of the group shown, a column per phase, ``unaccounted`` and ``total``; [R, phases].
        critical: the rank for which the others wait.
        median_us: of the case's layer times in breakdown iterations.
    """

    key: tuple[int, int, int]
    times_us: pd.DataFrame
    critical: int
    median_us: float

    @property
    def layer_us(self) -> float:
        return float(self.times_us[TOTAL].max())

    @property
    def waits_us(self) -> pd.Series:
        """By rank."""
        return self.times_us[list(WAITING_PHASES)].sum(axis=1)


def timeline_figure(run: Run, choice: Choice | None = None) -> Drawing | None:
    """One layer on every rank, before and after a policy; None where nothing was timed by phase on several ranks."""
    choice = choice or Choice()
    chosen = choose([one for one in analyse(run) if one.comparison.num_together > 1], choice, _has_phases)
    if chosen is None:
        return None
    facts = chosen.comparison.comparison
    after = typical_iteration(chosen.policy.case, facts, choice.iteration)
    before = typical_iteration(chosen.native.case, facts, among=after.key[:2])
    sides = {chosen.native.case.case_id: before, chosen.policy.case.case_id: after}
    ranks = _lanes(before, after)
    marks = pd.concat(_marks(shown, ranks).assign(case_id=case_id) for case_id, shown in sides.items())
    comparison_id = chosen.native.case.comparison_id
    cases = case_rows(run)
    cases = cases[cases["comparison_id"] == comparison_id]
    rows = marks.merge(cases, on="case_id", sort=False)
    cases = cases.set_index("case_id")
    groups = [group for group in GROUPS if group in set(rows["phase"].map(_GROUP_OF))]
    fewer = f" {len(ranks)} of {len(before.times_us)} ranks." if len(ranks) < len(before.times_us) else ""
    if facts.num_replicas > 1:
        fewer += f" Of {facts.num_replicas} replicas the one with the slowest rank."
    launch, batch, _ = after.key
    header = (
        f"Who waits for whom: native and {cases.at[chosen.policy.case.case_id, 'name']}",
        f"{facts.title}; {chosen.why}; launch {launch}, batch {batch}; phases are laid end to end, and the critical "
        f"rank is the one that waits least.{fewer}",
        footer(run, rows),
        [
            *phase_legend(run, [comparison_id], groups),
            ("critical rank", Line2D([], [], color=INK, **_BOX)),
            ("end of the slowest rank", Line2D([], [], **_END_LINE)),
        ],
    )
    titles = [_title(cases.loc[case_id], shown) for case_id, shown in sides.items()]
    lane = 0.3 if len(ranks) <= 8 else 0.2
    figure, axes = sheet_of_panels(header, titles, (1,), len(ranks) * lane + 0.75, most=1)
    how = {group: phase_origin(run, facts, group) for group in GROUPS}
    for (one,), (case_id, shown) in zip(axes, sides.items(), strict=True):
        _draw_lanes(one, shown, rows[rows["case_id"] == case_id], ranks, how)
        one.set_xlim(0, 1.02 * max(before.layer_us, after.layer_us) / 1e3)
        one.tick_params(labelbottom=one is axes[-1][0])
        if len(ranks) > 8:
            one.tick_params(axis="y", labelsize="x-small")
    axes[-1][0].set_xlabel("time since the layer began (ms)")
    where = ("launch", "batch", "iteration", "rank", "is_critical", "phase", "begin_us", "time_us")
    return Drawing(figure, csv(rows, *where))


def typical_iteration(
    case: Case,
    facts: Comparison,
    choice: IterationChoice = TYPICAL,
    *,
    among: tuple[int, int] | None = None,
) -> Iteration:
    """The breakdown iteration that is chosen; by default the one whose layer time is closest to the median of all.

    Args:
        among: of this launch and batch the one that is closest to the median of all, whatever is chosen.
    """
    rows = case.timings[(case.timings["kind"] == "breakdown")]
    layer_us = rows[rows["phase"] == TOTAL].groupby(ITERATION)["time_us"].max().sort_index()
    median_us = float(layer_us.median())
    if among is None:
        (key,) = choice.of(layer_us, case.label)
    else:
        here_us = layer_us[(layer_us.index.droplevel("iteration") == among)]
        if here_us.empty:
            raise UserError(f"--iteration: {case.label} has no breakdown iteration in launch, batch {among}")
        key = (here_us - median_us).abs().idxmin()
    here = rows[(rows[ITERATION] == list(key)).all(axis=1)]
    times_us = here.pivot(index="rank", columns="phase", values="time_us").fillna(0.0).sort_index()
    times_us = times_us.reindex(columns=[*LAYER_PHASES, UNACCOUNTED, TOTAL], fill_value=0.0)
    group = int(times_us[TOTAL].idxmax()) // facts.num_together
    times_us = times_us[times_us.index // facts.num_together == group]
    return Iteration(tuple(map(int, key)), times_us, critical_rank(times_us), median_us)


def critical_rank(times_us: pd.DataFrame) -> int:
    """The rank that waits least; of equals the one that takes longest, then the lower."""
    waits_us = times_us[list(WAITING_PHASES)].sum(axis=1)
    return min((int(rank) for rank in times_us.index), key=lambda r: (waits_us[r], -times_us.loc[r, TOTAL], r))


def _has_phases(case: Case) -> bool:
    rows = case.timings
    return bool(((rows["kind"] == "breakdown") & rows["phase"].isin(WAITING_PHASES)).any())


def _lanes(before: Iteration, after: Iteration) -> list[int]:
    """The ranks to show, in order of rank; or of many those evenly spaced by native work, most work first."""
    ranks = [int(rank) for rank in before.times_us.index]
    if len(ranks) <= _MAX_LANES:
        return ranks
    by_work = (before.times_us[TOTAL] - before.waits_us).sort_values(ascending=False, kind="stable").index.to_numpy()
    places = set(np.linspace(0, len(by_work) - 1, _SHOWN_LANES).round().astype(int).tolist())
    places |= {place for place, rank in enumerate(by_work) if rank in (before.critical, after.critical)}
    return [int(by_work[place]) for place in sorted(places)]


def _title(case: pd.Series, shown: Iteration) -> str:
    layer_ms, median_ms = (milliseconds(time_us / 1e3, 3) for time_us in (shown.layer_us, shown.median_us))
    # As if each rank held its device until the slowest is done.
    waiting = float(shown.waits_us.sum() / (shown.layer_us * len(shown.times_us)))
    words = [f"{case['name']}: layer {layer_ms} ms (median {median_ms})"]
    words += [] if np.isnan(case["speedup"]) else [f"speedup {case['speedup']:.3f}"]
    words += [f"{case['dropped_percent']:.1f} % dropped"] if case["role"] == "policy" else []
    return ", ".join([*words, f"{percent(waiting)} % waiting"])


def _marks(shown: Iteration, ranks: list[int]) -> pd.DataFrame:
    """A row per bar: a phase of a rank that took time."""
    times_us = shown.times_us.loc[ranks, [*LAYER_PHASES, UNACCOUNTED]]
    begins_us = times_us.cumsum(axis=1) - times_us
    rows = pd.DataFrame({"time_us": times_us.stack(), "begin_us": begins_us.stack()}).reset_index()
    where = dict(zip(ITERATION, shown.key, strict=True))
    return rows[rows["time_us"] > 0].assign(**where, is_critical=rows["rank"] == shown.critical)


def _draw_lanes(axes: Axes, shown: Iteration, bars: pd.DataFrame, ranks: list[int], how: dict[str, str]) -> None:
    for phase, of_phase in bars.groupby("phase"):
        group = _GROUP_OF[str(phase)]
        places = [ranks.index(rank) for rank in of_phase["rank"]]
        look = phase_look(group, how[group])
        begins_ms = of_phase["begin_us"] / 1e3
        axes.barh(places, of_phase["time_us"] / 1e3, left=begins_ms, height=0.8, linewidth=0.4, **look)
    critical = ranks.index(shown.critical)
    end_ms = bars.loc[bars["is_critical"], "time_us"].sum() / 1e3
    box = Rectangle((0, critical - 0.47), end_ms, 0.94, fill=False, edgecolor=INK, linewidth=1.8, zorder=4)
    box.set_clip_on(False)
    axes.add_patch(box)
    axes.axvline(shown.layer_us / 1e3, zorder=3, **_END_LINE)
    name_rows(axes, [f"critical: rank {rank}" if rank == shown.critical else f"rank {rank}" for rank in ranks])
    axes.get_yticklabels()[critical].set_fontweight("bold")


# ---- latency --------------------------------------------------------------------------------------------------------

_LEVELS = {"p10_us": 0.1, "p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99}
_MANY = 24  # ranks, which are then sorted
_FEW = 100  # samples below which a 99th percentile is little more than the largest


def latency_figure(run: Run, choice: Choice | None = None) -> Drawing | None:
    """Distributions of layer time and work by rank; None where no policy stands beside native on several ranks."""
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
    here = case_rows(run)
    here = here[here["comparison_id"] == cases[0].comparison_id]
    rows = pd.concat(percentiles, ignore_index=True).merge(here, on="case_id")
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
    is_modelled = policy["origin"] in ("modelled", PARTLY_ELSEWHERE)
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
            _draw_percentiles(one, own.set_index("rank").loc[order, list(_LEVELS)] / 1e3, side, dots, bar)
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


def _draw_percentiles(axes: Axes, times_ms: pd.DataFrame, side: int, dots: dict, colour: str) -> None:
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
