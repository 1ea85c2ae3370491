"""The figures along the axis of policies: ``speedup`` and ``dropped``.

Capacity factors stand at even distances along the bottom, a line per policy family, and before them each policy that
has none, by its name. Where no policy has one the axis stands upright: names are read best in rows.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from moe_ep_bench.analysis.figures.panels import (
    COST,
    SPEEDUP,
    SPEEDUP_LABEL,
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
    speedup_limits,
)
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.style import GAMMA, NATIVE_LINE, Drawing, Look, Looks, fit_label
from moe_ep_bench.analysis.words import interval_words

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
