"""The figures over policies: ``speedup`` and ``dropped``, ``phases`` and ``load``.

``speedup`` and ``dropped`` have capacity factors at even distances along the bottom, a line per policy family, and
before them each policy that has none, by its name. Where no policy has one the axis stands upright: names are read best
in rows. ``phases`` shows where a layer's time goes, ``load`` who has how much to do.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from moe_ep_bench.analysis.figures.panels import (
    COST,
    SPEEDUP,
    SPEEDUP_LABEL,
    bar_label,
    case_rows,
    csv,
    draw_references,
    drawn_part,
    family_legend,
    footer,
    limits,
    name_rows,
    of_policies,
    reference_legend,
    run_looks,
    sheet_of_panels,
    smallest_factors,
    speedup_limits,
    write_ends,
)
from moe_ep_bench.analysis.load import CASE, Run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import (
    GAMMA,
    INK,
    MUTED,
    NATIVE_FILL,
    NATIVE_LINE,
    Drawing,
    Legend,
    Look,
    Looks,
    fit_label,
    phase_look,
)
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.words import interval_words, milliseconds, phase_origin

# ---- speedup, dropped -----------------------------------------------------------------------------------------------

# Column: its label, and native's value.
_QUANTITIES = {
    "speedup": (SPEEDUP_LABEL, 1.0),
    "dropped_percent": ("dropped (%)", 0.0),
    "retained_mass_percent": ("score mass kept (%)", 100.0),
}


def speedup_figure(run: Run) -> Drawing | None:
    """Layer speedup by policy, against noise floor and ceiling; with it what the same cases drop."""
    rows = case_rows(run)
    rows = rows[(rows["role"].isin(["policy", "ceiling"]) & rows["speedup"].notna()) | rows["is_floor"]]
    rows = rows[rows["comparison_id"].isin(of_policies(rows)["comparison_id"])]
    if rows.empty:
        return None
    drawn, notes = drawn_part(run, rows)
    subtitle = (
        "Slowest rank's time of one MoE layer, native over policy, median; below it the top-k pairs that the policy "
        f"drops. {interval_words(list(of_policies(drawn)['speedup_is_interval']))}"
    )
    header = "Layer speedup over native Megatron-Core", subtitle, footer(run, drawn, notes)
    figure = _draw(drawn, header, ("speedup", "dropped_percent"), (3.2, 1.2), run_looks(run))
    return Drawing(figure, csv(rows, *SPEEDUP, *COST))


def dropped_figure(run: Run) -> Drawing | None:
    """What the policies cost: dropped share and retained mass."""
    rows = of_policies(case_rows(run))
    if rows.empty:
        return None
    drawn, notes = drawn_part(run, rows)
    subtitle = (
        "Top-k pairs that are not computed, and the score mass of what is computed over that of the model's own top-k; "
        "all ranks' tokens together, mean over batches."
    )
    header = "What the policies cost: dropped pairs and score mass kept", subtitle
    figure = _draw(drawn, (*header, footer(run, drawn, notes, timed=False)), tuple(COST), (1, 1), run_looks(run))
    return Drawing(figure, csv(rows, *COST))


def _draw(rows: pd.DataFrame, header: tuple, quantities: tuple[str, ...], ratios: tuple[float, ...], looks: Looks):
    policies = rows[rows["role"] == "policy"]
    families = [family for family in looks if family in set(policies.loc[policies["capacity_factor"].isna(), "family"])]
    factors = sorted(policies["capacity_factor"].dropna().unique())
    upright = not factors
    legend = [] if upright else family_legend(policies, looks)
    legend += reference_legend(rows) if "speedup" in quantities else []
    groups = list(rows.groupby("comparison_id", sort=False))
    figure, panels = sheet_of_panels(
        (*header, legend),
        [own["comparison"].iloc[0] for _, own in groups],
        (3.2, 1.6) if upright and "speedup" in quantities else ratios,
        0.3 * max(3, len(families)) + 1.1 if upright else 4.6,
        beside=upright,
        left=2.4 if upright else 1.15,
        most=2 if upright else 4,
    )
    for group, (_, own) in zip(panels, groups, strict=True):
        for axes, quantity in zip(group, quantities, strict=True):
            _draw_quantity(axes, own, quantity, families, factors, looks)
            label, native = _QUANTITIES[quantity]
            ends = speedup_limits(own) if quantity == "speedup" else limits([native, *rows[quantity]], least=5)
            (axes.set_xlabel if upright else axes.set_ylabel)(label)
            (axes.set_xlim if upright else axes.set_ylim)(*ends)
            if quantity == "speedup":
                draw_references(axes, own, upright=upright)
            else:
                (axes.axvline if upright else axes.axhline)(native, **NATIVE_LINE)
            names = [looks[family].label for family in families]
            if upright:
                name_rows(axes, [fit_label(name, 1.9) for name in names], is_named=axes is group[0])
                continue
            axes.set_xticks(range(len(names) + len(factors)), [*names, *(f"{factor:g}" for factor in factors)])
            for tick in axes.get_xticklabels()[: len(names)] if max(map(len, names), default=0) > 5 else ():
                tick.set(rotation=30, ha="right", rotation_mode="anchor")
            axes.set_xlim(-0.5, len(names) + len(factors) - 0.5)
            axes.grid(False, axis="x")
            axes.tick_params(labelbottom=axes is group[-1])
        if not upright:
            group[-1].set_xlabel(f"capacity factor {GAMMA}" + (" (of policies that have one)" if families else ""))
    return figure


def _draw_quantity(
    axes: Axes, rows: pd.DataFrame, quantity: str, families: list[str], factors: list[float], looks: Looks
) -> None:
    """A mark per policy, its spread as whiskers if it is a speedup; lines join the factors of a family."""
    policies = rows[rows["role"] == "policy"]
    places = policies["family"].map({family: float(at) for at, family in enumerate(families)})
    for at, factor in enumerate(factors, len(families)):
        # Families stand side by side at one factor, so that none hides another.
        beside = policies.loc[policies["capacity_factor"] == factor, "family"].map({f: n for n, f in enumerate(looks)})
        step = min(0.09, 0.7 / max(1, len(beside)))
        places[beside.index] = at + (beside.rank(method="first") - (len(beside) + 1) / 2) * step
    for family, own in policies.groupby("family", sort=False):
        whiskers = own[["speedup_low", "speedup_high"]] if quantity == "speedup" else None
        _draw_marks(axes, places[own.index], own[quantity], whiskers, looks[str(family)], upright=not factors)


def _draw_marks(
    axes: Axes, at: pd.Series, values: pd.Series, whiskers: pd.DataFrame | None, look: Look, *, upright: bool
) -> None:
    line = {**look.marks, "linestyle": "none"} if upright else look.marks
    axes.plot(*((values, at) if upright else (at, values)), zorder=3, **line)
    if whiskers is None:
        return
    low, high = whiskers["speedup_low"], whiskers["speedup_high"]
    (axes.hlines if upright else axes.vlines)(at, low, high, color=look.colour, linewidth=1.4, zorder=3.5)
    cap = {"linestyle": "none", "marker": "|" if upright else "_", "markersize": 9, "markeredgewidth": 1.4}
    for ends in (low, high):
        axes.plot(*((ends, at) if upright else (at, ends)), color=look.colour, zorder=3.5, **cap)


# ---- phases, load ---------------------------------------------------------------------------------------------------

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
        look = phase_look(str(part), phase_origin(run, facts, str(part)))
        axes.barh(places, times, left=ends, height=0.66, linewidth=0.6, **look)
        ends += times
    write_ends(axes, ends, [milliseconds(end, 3) for end in ends])
    axes.set_xlim(0, 1.17 * ends.max())
    axes.set_xlabel(f"time of {unit} (ms)")


def phase_legend(run: Run, comparison_ids: list[str], groups: list[str]) -> Legend:
    """Groups of phases; those that came about differently in some comparisons stand more than once."""
    facts = [run.comparisons[one] for one in comparison_ids]
    return [
        (group if how == "measured" else f"{group} ({how})", Patch(**phase_look(group, how)))
        for group in groups
        for how in sorted({phase_origin(run, fact, group) for fact in facts})
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
    loads = {(r.case.comparison_id, r.case.case_id): r.fidelity for one in analyse(run) for r in one.results}
    quantities, keys = ("expert", "rank"), list(rows[CASE].itertuples(index=False, name=None))
    marks = pd.concat(
        rows.assign(of=what, load_over_mean=[getattr(loads[key], f"{what}_load") for key in keys])
        for what in quantities
    ).explode("load_over_mean")
    marks = marks.assign(number=marks.groupby(["of", *CASE]).cumcount())
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
    for group, (comparison_id, own) in zip(axes, groups, strict=True):
        here = marks[(marks["comparison_id"] == comparison_id) & marks["case_id"].isin(own["case_id"])]
        for one, what in zip(group, quantities, strict=True):
            _draw_loads(one, what, here[here["of"] == what], looks)
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
