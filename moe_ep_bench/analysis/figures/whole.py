"""The figure ``whole``: what faster MoE layers come to in a whole model, and what a pass consists of.

Per comparison two panels, in each of them a row per case. On the left two speedups, that of the pass and that of its
MoE layers alone, and a stroke where Amdahl's law puts the pass. On the right a pass in parts. Where only the first
layers were built a third panel extrapolates to all of them: hatched, for nothing of it was timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.figures.panels import (
    COST,
    OF_COMPARISON,
    SPEEDUP,
    SPEEDUP_LABEL,
    bar_label,
    case_rows,
    csv,
    draw_references,
    drawn_part,
    footer,
    limits,
    name_rows,
    reference_legend,
    run_looks,
    sheet_of_panels,
    write_ends,
)
from moe_ep_bench.analysis.figures.policies import in_parts, phase_legend, stacked_bars
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.style import CEILING_LINE, EXTRAPOLATED_LOOK, INK, MUTED, Drawing, Legend, Looks
from moe_ep_bench.analysis.whole import PASS_PARTS
from moe_ep_bench.analysis.words import interval_words, milliseconds

_PASS, _LAYERS = -0.15, 0.17  # where they stand in a row, from its middle
_LAYERS_LOOK = {"color": MUTED, "marker": "o", "markersize": 4.5, "linewidth": 1.0}
_CEILING_LOOK = {"color": INK, "marker": "d", "markeredgecolor": "white", "linewidth": 1.4}
_AMDAHL_LOOK = {"color": INK, "marker": "|", "markersize": 13, "markeredgewidth": 1.8, "linestyle": "none"}
# The most that any policy could gain is drawn unless it would take more of the panel than all marks.
_MOST_STRETCH = 2.0


def whole_figure(run: Run) -> Drawing | None:
    """Speedup from end to end beside that of the MoE layers, and the parts of a pass; None without both."""
    rows = case_rows(run)
    cases = rows[(rows["role"] != "noise") & rows[f"mean_rank_{next(iter(PASS_PARTS))}_ms"].notna()]
    having = cases.loc[(cases["role"] == "policy") & cases["speedup"].notna(), "comparison_id"]
    rows, cases = (part[part["comparison_id"].isin(having)] for part in (rows, cases))
    if cases.empty:
        return None
    marks = _marks(rows, cases)
    drawn, notes = drawn_part(run, cases)
    ids = list(drawn["comparison_id"].unique())
    if len(ids) > 2:  # more do not fit on a screen
        notes = [f"of {cases['comparison_id'].nunique()} comparisons the first and the last are drawn; the CSV has all"]
        drawn = drawn[drawn["comparison_id"].isin([ids[0], ids[-1]])]
    groups = list(drawn.groupby("comparison_id", sort=False))
    is_cut = bool(drawn["all_layers_ms_extrapolated"].notna().any())
    most = drawn.drop_duplicates("comparison_id")["most_by_amdahl"].dropna()
    if len(most):
        listed = ", ".join(f"{value:.3f}" for value in most)
        notes.append(f"however fast its MoE layers, no pass gains more than {listed} (Amdahl)")
    if is_cut:
        built = (drawn["num_layers"].map("{:.0f}".format) + " of " + drawn["of_layers"].map("{:.0f}".format)).unique()
        notes.append(f"{', '.join(built)} layers were built and timed; hatched: extrapolated from the mean MoE layer")
    is_interval = list(drawn.loc[drawn["speedup"].notna(), "speedup_is_interval"])
    header = (
        "What faster MoE layers come to in a whole model",
        "Left: speedup of a pass from end to end, of its MoE layers alone, and where Amdahl's law puts the pass; "
        f"right: a pass in parts, mean over ranks. {interval_words(is_interval)}",
        footer(run, marks[marks["comparison_id"].isin(drawn["comparison_id"])], notes),
        _legend(run, marks[marks["comparison_id"].isin(drawn["comparison_id"])], is_cut=is_cut),
    )
    height = 0.9 + (0.46 if len(groups) == 1 else 0.26) * max(len(own) for _, own in groups)
    titles = [own["comparison"].iloc[0] for _, own in groups]
    ratios = (1.0, 1.2, 1.1) if is_cut else (1.0, 1.4)
    figure, axes = sheet_of_panels(header, titles, ratios, height, beside=True, most=1, left=2.8)
    for (speedups, parts, *others), (comparison_id, own) in zip(axes, groups, strict=True):
        here = marks[marks["comparison_id"] == comparison_id]
        stacked_bars(parts, run, here[here["shows"] == "part"], own, "part", "a pass")
        labels = list(own["name"]) if len(groups) > 1 else [bar_label(row) for _, row in own.iterrows()]
        _draw_speedups(speedups, here, own, run_looks(run))
        for other in others:
            _draw_extrapolated(other, own)
        for one in (speedups, parts, *others):
            name_rows(one, labels, is_named=one is speedups)
    return Drawing(figure, csv(marks, "shows", "part", "time_ms", *SPEEDUP, *COST))


def _marks(rows: pd.DataFrame, cases: pd.DataFrame) -> pd.DataFrame:
    """A row per mark; ``shows`` says of what, and ``origin`` where it was computed or extrapolated."""
    blank = cases.assign(**dict.fromkeys(SPEEDUP, np.nan))
    others = cases["role"] != "baseline"
    layers = others & cases["moe_speedup_median"].notna()
    ends = {name: cases[f"moe_speedup_{end}"] for name, end in zip(SPEEDUP[:3], ("median", "low", "high"), strict=True)}
    spread = np.where(cases["moe_speedup_is_interval"] == True, "95 % interval", "smallest and largest pair")  # noqa: E712
    by_law, all_layers = others & cases["by_amdahl"].notna(), cases["all_layers_ms_extrapolated"].notna()
    bounds = cases[cases["most_by_amdahl"].notna()].drop_duplicates("comparison_id")
    extrapolated = {"time_ms": cases["all_layers_ms_extrapolated"], "speedup": cases["speedup_extrapolated"]}
    bound = {"speedup": bounds["most_by_amdahl"], "policy": "any policy", "role": "bound", "origin": "computed"}
    marks = [
        cases[cases["speedup"].notna()].assign(shows="end to end"),
        cases.assign(**ends, speedup_spread=spread, time_ms=cases["moe_ms"], shows="MoE layers")[layers],
        blank.assign(speedup=cases["by_amdahl"], shows="by Amdahl", origin="computed")[by_law],
        in_parts(blank.assign(shows="part"), {f"mean_rank_{part}_ms": part for part in PASS_PARTS}, "part"),
        blank.assign(**extrapolated, shows="all layers", origin="extrapolated")[all_layers],
        bounds[OF_COMPARISON].assign(**bound, shows="most by Amdahl"),
        rows[rows["is_floor"]].assign(shows="end to end"),
    ]
    return pd.concat([own for own in marks if len(own)], ignore_index=True).assign(
        is_floor=lambda all_rows: all_rows["is_floor"].fillna(False).astype(bool)
    )


def _legend(run: Run, marks: pd.DataFrame, *, is_cut: bool) -> Legend:
    legend: list = [
        ("end to end", Line2D([], [], color=INK, marker="s", linewidth=1.4)),
        ("MoE layers alone", Line2D([], [], **_LAYERS_LOOK)),
        ("by Amdahl", Line2D([], [], **_AMDAHL_LOOK)),
    ]
    if any(_most_drawn(own) is not None for _, own in marks.groupby("comparison_id")):
        legend.append(("most possible", Line2D([], [], **CEILING_LINE)))
    legend += reference_legend(marks[marks["is_floor"]], native=False)
    legend += phase_legend(
        run, list(marks["comparison_id"].unique()), list(marks.loc[marks["time_ms"] > 0, "part"].dropna().unique())
    )
    return [*legend, *([("extrapolated", Patch(**EXTRAPOLATED_LOOK))] if is_cut else [])]


def _draw_speedups(axes: Axes, marks: pd.DataFrame, cases: pd.DataFrame, looks: Looks) -> None:
    draw_references(axes, marks[marks["is_floor"]], upright=True)
    most = _most_drawn(marks)
    if most is not None:
        axes.axvline(most, zorder=1, **CEILING_LINE)
    own = marks.set_index(["shows", "case_id"])  # of one comparison
    for place, (_, case) in enumerate(cases.iterrows()):
        look = looks[case["family"]].marks | {"linewidth": 1.4} if case["family"] in looks else _CEILING_LOOK
        found = {what: own.loc[what, case["case_id"]] for what in _SPEEDUPS if (what, case["case_id"]) in own.index}
        if {"end to end", "MoE layers"} <= set(found):
            # What the rest of the model takes of the layers' gain.
            both = [found[what]["speedup"] for what in ("end to end", "MoE layers")]
            axes.plot(both, [place + _PASS, place + _LAYERS], color="#BBBBBB", linewidth=0.8, zorder=2)
        for what, at, how, cap in (("end to end", _PASS, look, 8), ("MoE layers", _LAYERS, _LAYERS_LOOK, 5)):
            if what in found:
                _draw_estimate(axes, found[what], place + at, how, cap=cap)
        if "by Amdahl" in found:
            axes.plot([found["by Amdahl"]["speedup"]], [place + _PASS], zorder=4, **_AMDAHL_LOOK)
    axes.set_xlim(*limits([1.0, most or 1.0, *_ends(marks)], least=0.1))
    axes.set_xlabel(SPEEDUP_LABEL)


_SPEEDUPS = ("end to end", "MoE layers", "by Amdahl")


def _draw_estimate(axes: Axes, row: pd.Series, at: float, look: dict[str, Any], *, cap: float) -> None:
    """A mark with its whisker."""
    caps = {"marker": "|", "markersize": cap, "markeredgewidth": look["linewidth"]}
    ends = [row["speedup_low"], row["speedup_high"]]
    axes.plot(ends, [at, at], color=look["color"], linewidth=look["linewidth"], zorder=3, **caps)
    axes.plot([row["speedup"]], [at], zorder=3.5, **{**look, "linestyle": "none"})


def _ends(marks: pd.DataFrame) -> np.ndarray:
    """Of all marks of speedups."""
    return marks.loc[marks["shows"].isin(_SPEEDUPS), SPEEDUP[:3]].to_numpy(dtype=float).ravel()


def _most_drawn(marks: pd.DataFrame) -> float | None:
    """What no policy can exceed, where there is room for it."""
    low, high = min(1.0, np.nanmin(_ends(marks))), max(1.0, np.nanmax(_ends(marks)))
    most = marks.loc[marks["role"] == "bound", "speedup"]
    return float(most.iloc[0]) if len(most) and most.iloc[0] - low <= _MOST_STRETCH * (high - low) else None


def _draw_extrapolated(axes: Axes, cases: pd.DataFrame) -> None:
    times_ms = cases["all_layers_ms_extrapolated"].astype(float)
    gains = cases["speedup_extrapolated"].where(cases["role"] != "baseline").map(" ({:.2f} x)".format, "ignore")
    ends = times_ms.map(lambda time_ms: milliseconds(time_ms, 3), "ignore").fillna("") + gains.fillna("")
    axes.barh(np.arange(len(cases)), times_ms.fillna(0), height=0.62, linewidth=0.6, **EXTRAPOLATED_LOOK)
    write_ends(axes, times_ms.fillna(0), ends)
    axes.set_xlim(0, 2.0 * times_ms.max())
    axes.set_xlabel(f"all {cases['of_layers'].iloc[0]:.0f} layers, extrapolated (ms)")
