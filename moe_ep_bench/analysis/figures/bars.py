"""The figures of bars and steps: ``phases``, where a layer's time goes, and ``load``, who has how much to do."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from moe_ep_bench.analysis.figures.panels import (
    COST,
    bar_label,
    case_rows,
    csv,
    drawn_part,
    family_legend,
    footer,
    name_rows,
    of_policies,
    run_looks,
    sheet_of_panels,
    smallest_factors,
    write_ends,
)
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import INK, MUTED, NATIVE_FILL, Drawing, Legend, Looks, phase_look
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.words import is_modelled_phase, milliseconds

_MAX_POLICIES = 6  # more in one picture of loads make a tangle
_NATIVE = {"facecolor": NATIVE_FILL, "edgecolor": MUTED, "linewidth": 0.6}


def phases_figure(run: Run) -> Drawing | None:
    """Where the time goes: a stacked bar per case, mean over ranks, so that waiting shows."""
    rows = case_rows(run)
    rows = rows[rows["breakdown_layer_ms"].notna()]
    if rows.empty:
        return None
    marks = in_parts(rows, {f"{group}_ms": group for group in GROUPS}, "phases")
    marks = marks[marks.groupby("phases")["time_ms"].transform("max") > 0]
    drawn, notes = drawn_part(run, rows)
    groups = list(marks.loc[marks["comparison_id"].isin(drawn["comparison_id"]), "phases"].unique())
    panels = list(drawn.groupby("comparison_id", sort=False))
    lines = max(bar_label(row).count("\n") + 1 for _, row in drawn.iterrows())
    header = (
        "Where a layer's time goes",
        "Time by phase, mean over ranks, median over iterations; waiting is for the slowest rank, where ranks meet.",
        footer(run, marks, notes),
        phase_legend(run, [str(one) for one, _ in panels], groups),
    )
    height = 0.85 + (0.12 + 0.16 * lines) * max(len(own) for _, own in panels)
    titles = [own["comparison"].iloc[0] for _, own in panels]
    figure, axes = sheet_of_panels(header, titles, (1,), height, left=2.9)
    for (one,), (comparison_id, own) in zip(axes, panels, strict=True):
        stacked_bars(one, run, marks[marks["comparison_id"] == comparison_id], own, "phases", "one layer")
        name_rows(one, [bar_label(row) for _, row in own.iterrows()])
    return Drawing(figure, csv(marks, "phases", "time_ms", *COST))


def in_parts(rows: pd.DataFrame, columns: dict[str, str], name: str) -> pd.DataFrame:
    """A row per case and part, with its ``time_ms``."""
    marks = rows.drop(columns="time_ms", errors="ignore").melt(
        [column for column in rows if column not in columns], list(columns), name, "time_ms", ignore_index=False
    )
    return marks.assign(**{name: marks[name].map(columns)}).sort_index(kind="stable")


def stacked_bars(axes: Axes, run: Run, marks: pd.DataFrame, cases: pd.DataFrame, name: str, unit: str) -> None:
    """A bar per case of one comparison and in it a piece per part; parts that were modelled look so."""
    facts = run.comparisons[cases["comparison_id"].iloc[0]]
    places, ends = np.arange(len(cases)), np.zeros(len(cases))
    for part, own in marks.groupby(name, sort=False):
        times = own.set_index("case_id")["time_ms"].loc[cases["case_id"]].to_numpy(dtype=float)
        look = phase_look(str(part), modelled=is_modelled_phase(run, facts, str(part)))
        axes.barh(places, times, left=ends, height=0.66, linewidth=0.6, **look)
        ends += times
    write_ends(axes, ends, [milliseconds(end, 3) for end in ends])
    axes.set_xlim(0, 1.17 * ends.max())
    axes.set_xlabel(f"time of {unit} (ms)")


def phase_legend(run: Run, comparison_ids: list[str], groups: list[str]) -> Legend:
    """Groups of phases; those that were timed in some comparisons and modelled in others stand twice."""
    facts = [run.comparisons[one] for one in comparison_ids]
    return [
        (f"{group} (modelled)" if modelled else group, Patch(**phase_look(group, modelled=modelled)))
        for group in groups
        for modelled in sorted({is_modelled_phase(run, fact, group) for fact in facts})
    ]


def load_figure(run: Run) -> Drawing | None:
    """Load of experts and, of several, of ranks, before and after; each policy at its smallest capacity factor."""
    rows, looks = case_rows(run), run_looks(run)
    policies = smallest_factors(of_policies(rows))
    policies = policies[policies["policy_name"] != "topk"]  # its loads are native's
    native = rows[(rows["role"] == "baseline") & (rows["status"] == "ok")]
    both = set(policies["comparison_id"]) & set(native["comparison_id"])
    rows = pd.concat([native, policies]).sort_index()
    rows = rows[rows["comparison_id"].isin(both)]
    if rows.empty:
        return None
    loads = {result.case.case_id: result.fidelity for one in analyse(run) for result in one.results}
    quantities = ("expert", "rank")
    marks = pd.concat(
        rows.assign(of=what, load_over_mean=[getattr(loads[one], f"{what}_load") for one in rows["case_id"]])
        for what in quantities
    ).explode("load_over_mean")
    marks = marks.assign(number=marks.groupby(["of", "case_id"]).cumcount())
    drawn, notes = drawn_part(run, rows)
    families = list(drawn.loc[drawn["role"] == "policy", "family"].unique())
    if len(families) > _MAX_POLICIES:
        left_out = ", ".join(looks[family].label for family in families[_MAX_POLICIES:])
        notes.append(f"not drawn, but in the CSV: {left_out}")
        drawn = drawn[~drawn["family"].isin(families[_MAX_POLICIES:])]
    if (drawn["num_ranks"] == 1).all():
        quantities = ("expert",)
    header = (
        f"Load of {' and '.join(f'{what}s' for what in quantities)}, before and after",
        "(token, expert) pairs over the mean of the model's own routing, mean over batches, in each case the fullest "
        "first; of each policy the smallest capacity factor.",
        footer(run, drawn, notes, timed=False),
        [("native (before)", Patch(**_NATIVE)), *family_legend(drawn[drawn["role"] == "policy"], looks)],
    )
    groups = list(drawn.groupby("comparison_id", sort=False))
    titles = [own["comparison"].iloc[0] for _, own in groups]
    is_alone = len(groups) == 1
    figure, axes = sheet_of_panels(
        header,
        titles,
        (2, 1)[: len(quantities)] if is_alone else (1.4, 1)[: len(quantities)],
        3.7 if is_alone else 2.3 * len(quantities) + 0.4,
        beside=is_alone,
        most=4 if len(quantities) > 1 else 2,
    )
    for group, (_, own) in zip(axes, groups, strict=True):
        for one, what in zip(group, quantities, strict=True):
            _draw_loads(one, what, marks[marks["case_id"].isin(own["case_id"]) & (marks["of"] == what)], looks)
    return Drawing(figure, csv(marks, "of", "number", "load_over_mean"))


def _draw_loads(axes: Axes, what: str, marks: pd.DataFrame, looks: Looks) -> None:
    """Each case's own loads in descending order: one falling line a case, whatever it moved where."""
    cases = list(marks.groupby("case_id", sort=False))
    for index, (_, own) in enumerate(cases):
        load = np.sort(own["load_over_mean"].to_numpy(dtype=float))[::-1]
        edges = np.arange(len(load) + 1) + 0.5
        if own["role"].iloc[0] == "baseline":
            axes.stairs(load, edges, fill=True, **_NATIVE)
            continue
        look = looks[own["family"].iloc[0]]
        axes.stairs(load, edges, baseline=None, color=look.colour, linestyle=look.line, linewidth=1.6, zorder=2.5)
        # Markers of different policies stand at different places: equal loads must not hide each other.
        every = max(len(cases) - 1, len(load) // 5)
        marked = np.arange((index - 1) * every // len(cases), len(load), every)
        marked = marked[load[marked] > 0]
        axes.plot(marked + 1, load[marked], zorder=2.6, **(look.marks | {"linestyle": "none"}))
    axes.axhline(1, color=INK, linewidth=0.9, linestyle=":", zorder=2)
    axes.set_xlim(0.5, len(load) + 0.5)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(f"{what}s, the fullest first")
    axes.set_ylabel("load over mean")
    axes.grid(False, axis="x")
