"""The figures along the axis of policies: ``speedup`` and ``dropped``.

Capacity factors stand at even distances along the bottom, one line per policy family (a policy with all its parameters
but the factor), and before them each policy that has no factor, by its name. Where no policy has one, names are read
best in rows: the axis then stands upright, the first policy at its top.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from moe_ep_bench.analysis.figures.panels import (
    SPEEDUP_LABEL,
    draw_references,
    drawn_floors,
    family_legend,
    in_panels,
    lay_out,
    limits,
    name_rows,
    num_rows,
    one_scale,
    pairs_of_axes,
    reference_legend,
    speedup_limits,
    warnings_of,
)
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import COST, SPEEDUP, as_csv, cases
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import (
    GAMMA,
    MUTED,
    NATIVE_LINE,
    Drawing,
    Looks,
    fit_label,
    is_narrow,
    num_columns,
    row_title,
    sheet,
    text_width,
)
from moe_ep_bench.analysis.words import footer_lines, interval_words, pairs_words

_NAME_INCHES, _TURNED_INCHES = 1.9, 1.5
_LABELS = {
    "dropped_percent": "dropped (% of top-k pairs)",
    "retained_mass_percent": "retained score mass (% of top-k's)",
}


@dataclass(frozen=True)
class _PolicyAxis:
    """Where policies stand: families without a capacity factor in reading order, then factors, ascending."""

    families: list[str]
    factors: list[float]
    looks: Looks

    @classmethod
    def of(cls, rows: pd.DataFrame, looks: Looks) -> _PolicyAxis:
        """The axis of the policies among the rows."""
        policies = rows[rows["role"] == "policy"]
        without = set(policies.loc[policies["capacity_factor"].isna(), "family"])
        factors = sorted(policies["capacity_factor"].dropna().unique())
        return cls([family for family in looks if family in without], factors, looks)

    @property
    def is_upright(self) -> bool:
        return not self.factors

    @property
    def height(self) -> float:
        """Inches that an upright axis needs, with what stands below it and its title."""
        return 0.3 * max(3, len(self.families)) + 0.75

    def draw(self, axes: Axes, rows: pd.DataFrame, value: str) -> None:
        """Draw a mark per policy, its spread as whiskers if it is a speedup; lines join the factors of a family."""
        policies = rows[rows["role"] == "policy"]
        places = self._places(policies)
        for family, look in self.looks.items():
            own = policies[policies["family"] == family]
            at, values = places[own.index], own[value]
            line = {"linestyle": "none"} if self.is_upright else {}
            axes.plot(*((values, at) if self.is_upright else (at, values)), zorder=3, **(look.marks | line))
            if value != "speedup" or own.empty:
                continue
            low, high = own["speedup_low"], own["speedup_high"]
            whisker = {"color": look.colour, "zorder": 3.5}
            (axes.hlines if self.is_upright else axes.vlines)(at, low, high, linewidth=1.4, **whisker)
            cap = {"linestyle": "none", "markersize": 9, "markeredgewidth": 1.4, **whisker}
            for ends in (low, high):
                axes.plot(
                    *((ends, at) if self.is_upright else (at, ends)), marker="|" if self.is_upright else "_", **cap
                )

    def _places(self, policies: pd.DataFrame) -> pd.Series:
        """By row; at one factor families stand side by side, so that none hides another."""
        places = policies["family"].map({family: float(at) for at, family in enumerate(self.families)})
        order = {family: at for at, family in enumerate(self.looks)}
        for at, factor in enumerate(self.factors, len(self.families)):
            beside = policies.loc[policies["capacity_factor"] == factor, "family"].map(order).rank(method="first") - 1
            step = min(0.09, 0.7 / max(1, len(beside)))
            places[beside.index] = at + (beside - (len(beside) - 1) / 2) * step
        return places

    def label(self, axes: Axes, inches: float, *, is_named: bool = True) -> None:
        """Set ticks and limits of a panel that is ``inches`` wide on the page."""
        names = [self.looks[family].label for family in self.families]
        if self.is_upright:
            name_rows(axes, [fit_label(name, _NAME_INCHES) for name in names], is_named=is_named)
            return
        number = len(names) + len(self.factors)
        room = (2.4 if is_narrow() else inches) / number - 0.08
        is_turned = any(text_width(word, 9) > room for name in names for word in name.split())
        names = [fit_label(name, _TURNED_INCHES if is_turned else room) for name in names]
        axes.set_xticks(range(number), [*names, *(f"{factor:g}" for factor in self.factors)])
        for label in axes.get_xticklabels()[: len(names)] if is_turned else ():
            label.set(rotation=30, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.5, number - 0.5)
        axes.set_xlabel(f"capacity factor {GAMMA}" + (" (of policies that have one)" if names else ""))
        axes.grid(False, axis="x")

    def set_value(self, axes: Axes, label: str, ends: tuple[float, float]) -> None:
        """Label and limit the axis across."""
        (axes.set_xlabel if self.is_upright else axes.set_ylabel)(label)
        (axes.set_xlim if self.is_upright else axes.set_ylim)(*ends)


def speedup_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Layer speedup by policy, against noise floor and ceiling; with it what the same cases drop."""
    rows = cases(run, comparisons)
    rows = rows[rows["role"].isin(["policy", "ceiling"]) & rows["speedup"].notna() | rows["result"].isna()]
    rows = rows[rows["place"].isin(rows.loc[rows["role"] == "policy", "place"])]
    if rows.empty:
        return None
    groups = [(comparisons[place].comparison, own) for place, own in rows.groupby("place")]
    facts = [one for one, _ in groups]
    policies = rows[rows["role"] == "policy"]
    axis = _PolicyAxis.of(rows, looks)
    columns = num_columns(len(groups))
    figure = sheet(
        "Layer speedup over native Megatron-Core",
        f"Slowest rank's time of one MoE layer, native over policy: {pairs_words(facts)}. "
        + interval_words(list(policies["is_interval"]))
        + (" Noise floor: native run twice." if len(drawn_floors(rows)) else "")
        + (" Perfect balance: native on balanced scores." if (rows["role"] == "ceiling").any() else "")
        + " Dropped: top-k pairs not computed.",
        footer_lines(run, facts, warnings_of(facts)),
        [*([] if axis.is_upright else family_legend(policies["family"], looks)), *reference_legend(rows)],
        width=8.5 if len(groups) == 1 else 13.5 if axis.is_upright else 12.5,
        body=num_rows(len(groups)) * (axis.height + 0.3 if axis.is_upright else 4.6),
    )
    inches = 6.6 if columns == 1 else 4.7
    titles = [one.title for one in facts]
    if axis.is_upright:
        across = 1 if is_narrow() else 2  # beside each other: speedup, dropped
        grid = figure.subplots(
            -(-len(groups) * 2 // (across * columns)),
            across * columns,
            squeeze=False,
            width_ratios=[3.2, 1.3] * columns if across == 2 else None,
        )
        flat = list(grid.flat)
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        for above, below in pairs[len(groups) :]:
            above.remove()
            below.remove()
        for (above, below), title in zip(pairs, titles, strict=False):
            row_title(above, [below], title, inches)
    else:
        pairs = list(pairs_of_axes(figure, titles, (3.2, 1.2)))
    for (above, below), (_, own) in zip(pairs, groups, strict=False):
        for axes, value in ((above, "speedup"), (below, "dropped_percent")):
            axis.label(axes, inches, is_named=axes is above)
            axis.draw(axes, own, value)
        draw_references(above, own, upright=axis.is_upright)
        axis.set_value(above, SPEEDUP_LABEL, speedup_limits(own))
        axis.set_value(below, "dropped (%)", limits([0, *own["dropped_percent"]], least=5))
        if not axis.is_upright:
            above.set_xlabel("")
            _name_references(above, own)
    return Drawing(figure, as_csv(rows, *SPEEDUP, *COST))


def _name_references(axes: Axes, rows: pd.DataFrame) -> None:
    """Label native and the ceiling beside the panel, clear of the data and of each other."""
    low, high = axes.get_ylim()
    labels = {"native": 1.0}
    for ceiling in rows.loc[rows["role"] == "ceiling", "speedup"]:
        labels[f"balance\n{ceiling:.2f}"] = ceiling
    places = [(height - low) / (high - low) for height in labels.values()]
    if len(places) == 2:  # labels that would touch move apart
        push = max(0.0, 0.1 - abs(places[1] - places[0])) / 2
        up = 1 if places[1] > places[0] else -1
        places = [places[0] - up * push, places[1] + up * push]
    for place, text in zip(places, labels, strict=True):
        beside = {"xycoords": "axes fraction", "va": "center", "annotation_clip": False}
        axes.annotate(text, (1.012, place), fontsize="small", color=MUTED, **beside)


def dropped_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """What the policies cost: dropped share and retained mass."""
    having = [comparison for comparison in comparisons if comparison.policies]
    if not having:
        return None
    rows = cases(run, having)
    rows = rows[rows["role"] == "policy"]
    panels = in_panels(having)
    drawn = rows[rows["place"].isin([having.index(one) for one in panels.shown])]
    axis = _PolicyAxis.of(drawn, looks)
    height = axis.height if axis.is_upright else 2.9
    figure = sheet(
        "What the policies cost: dropped pairs and retained score mass",
        "All ranks' tokens together, mean over batches. Dropped: top-k pairs that are not computed. "
        "Retained: score mass of what is computed over that of the model's own top-k.",
        footer_lines(run, [comparison.comparison for comparison in panels.shown], panels.note),
        () if axis.is_upright else family_legend(drawn["family"], looks),
        width=panels.width,
        body=len(panels.rows) * (height + 0.5 if panels.num_columns == 1 else 2 * height + 0.4),
    )
    places = [place for row in lay_out(figure, panels, (1, 1)) for place in row]
    for place in places:
        own = rows[rows["place"] == having.index(place.comparison)]
        for axes, is_first, (value, label), native in zip(
            place.axes, place.is_first, _LABELS.items(), (0.0, 100.0), strict=True
        ):
            axis.label(axes, panels.width / max(2, panels.num_columns) - 0.7, is_named=is_first)
            axis.draw(axes, own, value)
            axis.set_value(axes, label, limits([native, *own[value]], least=5))
        (place.axes[1].axvline if axis.is_upright else place.axes[1].axhline)(100, **NATIVE_LINE)
        place.label_outer(has_one_x=not axis.is_upright)
    for of_quantity in zip(*(place.axes for place in places), strict=True):
        one_scale(of_quantity, "x" if axis.is_upright else "y")
    return Drawing(figure, as_csv(rows, *COST))
