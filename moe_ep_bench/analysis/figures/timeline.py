"""The straggler timeline: what every rank does during one layer, native above, a policy below.

A lane per rank; its phases are bars in the order in which the layer passes them, drawn from the durations that one
breakdown iteration measured, so that a lane is as long as its rank's time. Waiting is hatched. The *critical rank* is
the one for which the others wait: of the expert-parallel group with the slowest rank, the rank that itself waits
least (of equals the one that works longest). Both panels show the same batch on the same axis of time.

The iteration shown is typical, not chosen by eye: the one of the policy whose layer time is closest to the median of
its breakdown iterations, and of native, in the same launch and batch, likewise. Of more ranks than there is room for,
those are shown that stand evenly spaced from the most to the least native work, and both critical ranks.

Shapes: R = ranks of the group shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from moe_ep_bench.analysis.choice import ITERATION, TYPICAL, Choice, Chosen, IterationChoice, choose
from moe_ep_bench.analysis.figures.bars import phase_legend
from moe_ep_bench.analysis.figures.panels import name_rows, warnings_of
from moe_ep_bench.analysis.load import Case, Comparison, Run
from moe_ep_bench.analysis.marks import mark, table
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import INK, MUTED, Drawing, Looks, case_name, panel_title, phase_look, sheet
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.words import estimate_words, footer_lines, is_modelled_phase, milliseconds, percent
from moe_ep_bench.schema import LAYER_PHASES, TOTAL, UNACCOUNTED, WAITING_PHASES

_GROUP_OF = {phase: group for group, phases in GROUPS.items() for phase in phases}
_MAX_LANES, _SHOWN_LANES = 24, 16
_END_LINE = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (4, 2))}
_BOX = {"marker": "s", "markerfacecolor": "none", "markersize": 9, "markeredgewidth": 1.8, "linestyle": "none"}


@dataclass(frozen=True, eq=False)
class Iteration:
    """One breakdown iteration of one case.

    Attributes:
        times_us: a row per rank of the group shown, a column per phase, ``unaccounted`` and ``total``; [R, phases].
        critical: the rank for which the others wait.
        median_us: of the case's layer times in breakdown iterations.
    """

    launch: int
    batch: int
    iteration: int
    times_us: pd.DataFrame
    critical: int
    median_us: float

    @property
    def layer_us(self) -> float:
        return float(self.times_us[TOTAL].max())

    @property
    def work_us(self) -> pd.Series:
        """By rank: its time without what it waited."""
        return self.times_us[TOTAL] - self.times_us[list(WAITING_PHASES)].sum(axis=1)

    @property
    def waiting_share(self) -> float:
        """Of the time of all ranks, as if each held its device until the slowest is done."""
        return float(self.times_us[list(WAITING_PHASES)].to_numpy().sum() / (self.layer_us * len(self.times_us)))


def timeline_figure(
    run: Run, comparisons: list[ComparisonResult], looks: Looks, choice: Choice | None = None
) -> Drawing | None:
    """One layer on every rank, before and after a policy; None where nothing was timed by phase on several ranks.

    Raises:
        ValueError: the choice names a case or an iteration that there is none of.
    """
    choice = choice or Choice()
    chosen = choose([c for c in comparisons if c.comparison.num_together > 1], choice, _has_phases)
    if chosen is None:
        return None
    facts = chosen.comparison.comparison
    after = typical_iteration(chosen.policy.case, facts, choice.iteration)
    before = typical_iteration(chosen.native.case, facts, among=(after.launch, after.batch))
    sides = ((before, chosen.native), (after, chosen.policy))
    ranks = _lanes(before, after)
    rows = [_rows(run, chosen.comparison, result, shown, ranks) for shown, result in sides]
    times_us = pd.concat([before.times_us, after.times_us])
    groups = [group for group, phases in GROUPS.items() if times_us[list(phases)].to_numpy().any()]
    lane = 0.3 if len(ranks) <= 8 else 0.21 if len(ranks) <= _SHOWN_LANES + 2 else 0.17
    figure = sheet(
        f"Who waits for whom: native and {case_name(chosen.policy, looks)}",
        _subtitle(chosen, before, after, ranks, facts, choice.iteration),
        footer_lines(run, [facts], warnings_of([facts], phases=True)),
        [
            *phase_legend(run, [facts], groups),
            ("critical rank", Line2D([], [], color=INK, **_BOX)),
            ("end of the slowest rank", Line2D([], [], **_END_LINE)),
        ],
        width=9.5,
        body=2 * (len(ranks) * lane + 0.75) + 0.2,
    )
    panels = figure.subplots(2, 1, sharex=True)
    modelled = {group: is_modelled_phase(run, facts, group) for group in GROUPS}
    for axes, (shown, result), bars in zip(panels, sides, rows, strict=True):
        _draw(axes, shown, pd.DataFrame(bars), ranks, modelled)
        panel_title(axes, _panel_words(result, shown, case_name(result, looks)), 8.0)
    panels[0].tick_params(labelbottom=False)
    panels[0].set_xlim(0, 1.02 * max(before.layer_us, after.layer_us) / 1e3)
    panels[1].set_xlabel("time since the layer began (ms)")
    return Drawing(figure, table(rows[0] + rows[1]))


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

    Raises:
        ValueError: there is none such.
    """
    rows = case.timings[(case.timings["kind"] == "breakdown")]
    layer_us = rows[rows["phase"] == TOTAL].groupby(ITERATION)["time_us"].max().sort_index()
    median_us = float(layer_us.median())
    if among is None:
        ((launch, batch, iteration),) = choice.of(layer_us, case.label)
    else:
        here_us = layer_us[(layer_us.index.droplevel("iteration") == among)]
        if here_us.empty:
            raise ValueError(f"--iteration: {case.label} has no breakdown iteration in launch, batch {among}")
        launch, batch, iteration = (here_us - median_us).abs().idxmin()
    here = rows[(rows["launch"] == launch) & (rows["batch"] == batch) & (rows["iteration"] == iteration)]
    times_us = here.pivot(index="rank", columns="phase", values="time_us").fillna(0.0).sort_index()
    times_us = times_us.reindex(columns=[*LAYER_PHASES, UNACCOUNTED, TOTAL], fill_value=0.0)
    group = int(times_us[TOTAL].idxmax()) // facts.num_together
    times_us = times_us[times_us.index // facts.num_together == group]
    return Iteration(int(launch), int(batch), int(iteration), times_us, critical_rank(times_us), median_us)


def critical_rank(times_us: pd.DataFrame) -> int:
    """The rank that waits least; of equals the one that takes longest, then the lower.

    Args:
        times_us: a row per rank, a column per phase, and ``total``.
    """
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
    by_work = before.work_us.sort_values(ascending=False, kind="stable").index.to_numpy()
    places = set(np.linspace(0, len(by_work) - 1, _SHOWN_LANES).round().astype(int).tolist())
    places |= {place for place, rank in enumerate(by_work) if rank in (before.critical, after.critical)}
    return [int(by_work[place]) for place in sorted(places)]


def _subtitle(
    chosen: Chosen, before: Iteration, after: Iteration, ranks: list[int], facts: Comparison, choice: IterationChoice
) -> str:
    what = "One modelled batch" if facts.device is not None else "One breakdown iteration"
    closest = "the one whose layer time is closest to the policy's median"
    why = "as chosen" if choice.key else {"median": closest}.get(choice.text, f"its {choice.text}")
    words = (
        f"{facts.title}; {chosen.why}. {what} of the policy (launch {after.launch}, batch {after.batch}), {why}; "
        "native is of the same batch. Starts are reconstructed from durations: ranks begin together, phases follow one "
        "another. Critical: the rank that waits least, so the one that the others wait for."
    )
    num_ranks = len(before.times_us)
    if len(ranks) < num_ranks:
        words += f" {len(ranks)} of {num_ranks} ranks, from the most (top) to the least native work."
    if facts.num_replicas > 1:
        words += f" Of {facts.num_replicas} replicas the one with the slowest rank."
    return words


def _panel_words(result: CaseResult, shown: Iteration, name: str) -> str:
    layer_ms, median_ms = (milliseconds(time_us / 1e3, 3) for time_us in (shown.layer_us, shown.median_us))
    words = [f"{name}: layer {layer_ms} ms (median {median_ms})"]
    words += [] if result.speedup is None else [f"speedup {estimate_words(result.speedup)}"]
    if result.fidelity is not None and result.case.role == "policy":
        words.append(f"{percent(result.fidelity.dropped_share)} % dropped")
    return ", ".join([*words, f"{percent(shown.waiting_share)} % of the ranks' time is waiting"])


def _rows(
    run: Run, comparison: ComparisonResult, result: CaseResult, shown: Iteration, ranks: list[int]
) -> list[dict[str, Any]]:
    """A row per bar: a phase of a rank that took time."""
    phases = [*LAYER_PHASES, UNACCOUNTED]
    times_us = shown.times_us.loc[ranks, phases]
    begins_us = times_us.cumsum(axis=1) - times_us
    where = {"launch": shown.launch, "batch": shown.batch, "iteration": shown.iteration}
    return [
        mark(run, comparison, result, **where, rank=rank, is_critical=rank == shown.critical, phase=phase)
        | {"begin_us": float(begins_us.at[rank, phase]), "time_us": float(times_us.at[rank, phase])}
        for rank in ranks
        for phase in phases
        if times_us.at[rank, phase] > 0
    ]


def _draw(axes: Axes, shown: Iteration, bars: pd.DataFrame, ranks: list[int], modelled: dict[str, bool]) -> None:
    for phase, of_phase in bars.groupby("phase"):
        group = _GROUP_OF[str(phase)]
        places = [ranks.index(rank) for rank in of_phase["rank"]]
        left = of_phase["begin_us"] / 1e3
        look = phase_look(group, modelled=modelled[group])
        axes.barh(places, of_phase["time_us"] / 1e3, left=left, height=0.8, linewidth=0.4, **look)
    critical = ranks.index(shown.critical)
    end_ms = bars.loc[bars["is_critical"], "time_us"].sum() / 1e3
    box = Rectangle((0, critical - 0.47), end_ms, 0.94, fill=False, edgecolor=INK, linewidth=1.8, zorder=4)
    box.set_clip_on(False)
    axes.add_patch(box)
    axes.axvline(shown.layer_us / 1e3, zorder=3, **_END_LINE)
    name_rows(axes, [f"critical: rank {rank}" if rank == shown.critical else f"rank {rank}" for rank in ranks])
    axes.get_yticklabels()[critical].set_fontweight("bold")
