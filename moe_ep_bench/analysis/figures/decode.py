"""The figures of decode: ``activated``, time over activated experts, and ``graphs``, eager beside CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from moe_ep_bench.analysis.activated import Steps, decode_steps, layer_words
from moe_ep_bench.analysis.figures.panels import SPEEDUP_LABEL, num_rows, pairs_of_axes, warnings_of
from moe_ep_bench.analysis.graphs import EAGER, GRAPH_KEY, NOT_INTERLEAVED, REPLAYED, Pair, graph_pairs
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import COST, SPEEDUP, as_csv, cases, origin, table
from moe_ep_bench.analysis.notes import MAX_HOST_BOUND
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import (
    INK,
    MUTED,
    NATIVE_LINE,
    NOISE_FILL,
    Drawing,
    Legend,
    Look,
    Looks,
    case_name,
    num_columns,
    panel_title,
    sheet,
)
from moe_ep_bench.analysis.sweep import key_words, value_of, value_words
from moe_ep_bench.analysis.words import footer_lines

# ---- activated -----------------------------------------------------------------------------------------------------

_LINE, _BOUND = {"color": INK, "linewidth": 1.2}, {"color": MUTED, "linewidth": 1.2, "linestyle": "--"}


def activated_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Time over activated experts: points, the fitted line, and the bound."""
    pools = decode_steps(run, comparisons)
    if not pools:
        return None
    rows = pd.concat([_points(run, steps) for steps in pools], ignore_index=True)
    facts = [one for steps in pools for one in steps.comparisons]
    families = {family for steps in pools for family in steps.points["family"] if family is not None}
    legend: list = [("native", _dots(None))]
    legend += [(look.label, _dots(look)) for family, look in looks.items() if family in families]
    legend += [("fitted line", Line2D([], [], **_LINE))]
    if any(steps.bound_us is not None for steps in pools):
        legend += [("bound: weights read at this device's speed", Line2D([], [], **_BOUND))]
    columns = num_columns(len(pools))
    figure = sheet(
        "A decode step takes as long as the experts that it activates",
        "Phase `experts` of the slowest rank, median over iterations of a batch, over the activated experts of the "
        "rank that activates most. A point is a batch under a case.",
        footer_lines(run, facts, warnings_of(facts)),
        legend,
        width=8.5 if columns == 1 else 12.5,
        body=4.4 * num_rows(len(pools)),
    )
    grid = figure.add_gridspec(num_rows(len(pools)), columns)
    for index, steps in enumerate(pools):
        axes = figure.add_subplot(grid[divmod(index, columns)])
        panel_title(axes, steps.title, 6.3 if columns == 1 else 4.6)
        _draw_points(axes, steps, looks)
    return Drawing(figure, rows)


def _points(run: Run, steps: Steps) -> pd.DataFrame:
    """A row per point, then one for the fitted line and one for the bound."""
    facts = steps.comparisons[0]
    about = {"comparison": steps.title, "model": facts.model, "num_ranks": facts.num_ranks}
    names = {"label": "policy", "activated": "activated_experts", "pairs": "num_pairs"}
    columns = ["num_tokens", "policy", "activated_experts", "num_pairs", "time_us"]
    rows = [*steps.points.rename(columns=names)[columns].to_dict("records")]
    if steps.line is not None:
        line = {"intercept_us": steps.line.intercept_us, "slope_us_per_expert": steps.line.slope_us}
        rows.append({"policy": "fitted line", **line})
    if steps.bound_us is not None:
        rows.append({"policy": "bound", "intercept_us": 0.0, "slope_us_per_expert": steps.bound_us})
    origins = {"origin": origin(run, facts), "workload": facts.workload.kind}
    return table({**about, **row, **origins} for row in rows).astype({"num_tokens": "Int64"})


def _draw_points(axes: Axes, steps: Steps, looks: Looks) -> None:
    for family, own in steps.points.groupby("family", dropna=False):
        dots = _dots(looks.get(str(family)))
        look = {"linestyle": "", "marker": dots.get_marker(), "color": dots.get_color(), "markersize": 4, "alpha": 0.6}
        axes.plot(own["activated"], own["time_us"], **look)
    ends = np.array([0, steps.points["activated"].max() * 1.05])
    if steps.line is not None:
        axes.plot(ends, steps.line.intercept_us + steps.line.slope_us * ends, **_LINE)
        words = f"{steps.line.intercept_us:.0f} us + {steps.line.slope_us:.2f} us an expert, R2 {steps.line.r2:.3f}"
        axes.text(0.03, 0.96, words, transform=axes.transAxes, va="top", fontsize="small")
    if steps.bound_us is not None:
        axes.plot(ends, steps.bound_us * ends, **_BOUND)
    axes.set_xlim(0, ends[1])
    axes.set_ylim(0, None)
    axes.set_xlabel("activated experts (fullest rank)")
    axes.set_ylabel("experts (us)")


def _dots(look: Look | None) -> Line2D:
    colour, marker = (INK, "o") if look is None else (look.colour, look.marker)
    return Line2D([], [], color=colour, marker=marker, linestyle="", markersize=5)


# ---- graphs --------------------------------------------------------------------------------------------------------

_TOKEN_KEYS = ("workload.num_tokens", "workload.tokens_per_rank")
_NATIVE = Look("native", INK, "*", "-", "")
# Times further apart than this get a logarithmic axis.
_LINEAR_RANGE = 20


def graphs_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Time over the tokens of a step, run eagerly and replayed; below it what policies gain over native in both."""
    pairs = graph_pairs(comparisons)
    if not pairs:
        return None
    rows = _cases_of(run, pairs)
    panels: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        panels.setdefault(_panel_words(pair), []).append(number)
    facts = [one.comparison for pair in pairs for one in (pair.eager, pair.replayed)]
    labels = {case.label for pair in pairs for case in pair.cases if case.eager.case.role == "policy"}
    smallest = "Of each policy the smallest capacity factor. " if len(labels) > rows["family"].nunique() - 1 else ""
    time_words = "one MoE layer" if run.scope == "layer" else "a decode step"
    figure = sheet(
        f"What a policy gains when the {run.scope} is replayed from CUDA graphs",
        f"Slowest rank's time of {time_words}, median; below it native over policy, median of paired iterations, with "
        "the 95 % interval (smallest and largest pair where batches are too few). Noise floor: native run twice, the "
        f"wider of both ways. {smallest}Dropped: top-k pairs not computed. Kept: score mass over that of the model's "
        f"own top-k. The two ways were {NOT_INTERLEAVED}.",
        footer_lines(run, facts, [*warnings_of(facts), *_bound_words(pairs)]),
        _legend(rows, looks),
        width=10.5 if len(panels) == 1 else 14.0,
        body=6.0 * num_rows(len(panels)),
    )
    axes = pairs_of_axes(figure, list(panels), (3, 2.4))
    for (above, below), numbers in zip(axes, panels.values(), strict=True):
        _draw_pairs(above, below, rows[rows["pair"].isin(numbers)], looks)
        above.set_ylabel(f"{run.scope} time (us)")
    time = f"{run.scope}_time_us"
    return Drawing(figure, as_csv(rows.rename(columns={"layer_time_us": time}), "way", time, *SPEEDUP, *COST))


def _cases_of(run: Run, pairs: Sequence[Pair]) -> pd.DataFrame:
    """Of ``marks.cases`` native and each policy at its smallest factor, pair by pair, eager first; and noise floors."""
    parts = []
    for number, pair in enumerate(pairs):
        both = {case.label for case in pair.cases}
        for way, comparison in ((EAGER, pair.eager), (REPLAYED, pair.replayed)):
            rows = cases(run, [comparison])
            own = rows["role"].isin(["baseline", "policy"]) & rows["policy"].isin(both)
            parts.append(rows[own | rows["result"].isna()].assign(pair=number, way=way))
    rows = pd.concat(parts, ignore_index=True)
    policies = rows[rows["role"] == "policy"].sort_values("capacity_factor", kind="stable", na_position="first")
    chosen = policies.drop_duplicates("family")["policy"]
    return rows[(rows["role"] != "policy") | rows["policy"].isin(chosen)]


def _panel_words(pair: Pair) -> str:
    """Which layer, and of a sweep all but the tokens of a step: what a panel's pairs have in common."""
    facts = pair.eager.comparison
    said = (GRAPH_KEY, "model.preset", *_TOKEN_KEYS)
    others = [f"{key_words(key)} {value_words(value_of(key, facts))}" for key in sorted(facts.point) if key not in said]
    built = "" if facts.whole is None else f", {facts.whole.num_layers} layers"
    layer = f"{facts.model}{built}, EP {facts.num_ranks}, {facts.dtype}, {layer_words(facts)}"
    return ", ".join([layer, *others]) + f"; the graphs hold {pair.held}"


def _bound_words(pairs: Sequence[Pair]) -> list[str]:
    """How many cases were launch-bound."""
    warnings = []
    on_gpu = [case for pair in pairs if pair.eager.comparison.backend == "nccl" for case in pair.cases]
    for words, results in ((EAGER, [c.eager for c in on_gpu]), (REPLAYED, [c.replayed for c in on_gpu])):
        bound = sum((result.host_bound_share or 0) > MAX_HOST_BOUND for result in results)
        if bound:
            cases_words = f"{words}, {bound} of {len(results)} cases are launch-bound"
            warnings.append(f"{cases_words}: their time is the host's, not the device's")
    return warnings


def _legend(rows: pd.DataFrame, looks: Looks) -> Legend:
    legend: list = [("native", Line2D([], [], **_marks(_NATIVE, hollow=False)))]
    for family, look in looks.items():
        own = rows[(rows["role"] == "policy") & (rows["family"] == family)]
        if len(own):
            dropped, kept = (_range_words(own[name]) for name in COST)
            words = f"{case_name(own['result'].iloc[0], looks)}: dropped {dropped} %, kept {kept} %"
            legend.append((words, Line2D([], [], **_marks(look, hollow=False))))
    either = Look("", MUTED, "o", "-", "")
    legend += [(EAGER, Line2D([], [], **_marks(either, hollow=True)))]
    legend += [(REPLAYED, Line2D([], [], **_marks(either, hollow=False)))]
    return [*legend, *([("noise floor", Patch(facecolor=NOISE_FILL))] if rows["result"].isna().any() else [])]


def _range_words(percents: pd.Series) -> str:
    """From the least to the most."""
    return " to ".join(dict.fromkeys(f"{end:.1f}" for end in (percents.min(), percents.max())))


def _marks(look: Look, *, hollow: bool) -> dict:
    """Run eagerly: hollow and dashed; replayed: filled and solid."""
    return {
        "color": look.colour,
        "linestyle": (0, (4, 2)) if hollow else "-",
        "linewidth": 1.0 if hollow else 1.6,
        "zorder": 2.8 if hollow else 3,
        "marker": look.marker,
        "markersize": 9 if look.marker == "*" else 6,  # a star of the same size looks smaller
        "markerfacecolor": "white" if hollow else look.colour,
        "markeredgecolor": look.colour if hollow else "white",
        "markeredgewidth": 1.2 if hollow else 0.6,
    }


def _draw_pairs(above: Axes, below: Axes, rows: pd.DataFrame, looks: Looks) -> None:
    """Steps of as many tokens stand side by side, so that no case hides another."""
    rows = rows.sort_values("num_tokens", kind="stable").assign(tick=np.log2(rows["num_tokens"]))
    shown = rows[rows["result"].notna()]
    tokens = shown["num_tokens"].unique()
    ticks = np.log2(tokens)
    is_one = len(ticks) == 1
    room = 1.0 if is_one else float(np.diff(ticks).min())
    having = set(shown.loc[shown["role"] == "policy", "family"])
    policies = [family for family in looks if family in having]
    is_native = shown["role"] == "baseline"
    series = [
        (_NATIVE, shown[is_native]),
        *((looks[one], shown[(shown["family"] == one) & ~is_native]) for one in policies),
    ]
    step = room * (min(0.25, 0.8 / len(series)) if is_one else min(0.09, 0.55 / len(series)))
    for number, (look, own) in enumerate(series):
        own = own.assign(at=own["tick"] + (number - (len(series) - 1) / 2) * step)
        for way in (EAGER, REPLAYED):
            of_way, marks = own[own["way"] == way], _marks(look, hollow=way == EAGER)
            above.plot(of_way["at"], of_way["layer_time_us"], **marks)
            known = of_way[of_way["speedup"].notna()]
            if look is not _NATIVE and len(known):
                below.plot(known["at"], known["speedup"], **marks)
                ends = known["speedup_low"], known["speedup_high"]
                below.vlines(known["at"], *ends, color=look.colour, linewidth=1.0, zorder=2.5)
        if is_one:  # no line leads the eye along the axis: one leads it from the one way to the other
            ends = own.groupby("at")["layer_time_us"].agg(["min", "max"])
            above.vlines(ends.index, ends["min"], ends["max"], color=look.colour, linewidth=0.9, zorder=2)
    # Within these a speedup is none.
    floors = (
        rows[rows["result"].isna()].groupby("pair").agg({"tick": "first", "speedup_low": "min", "speedup_high": "max"})
    )
    heights = floors["speedup_high"] - floors["speedup_low"]
    band = {"color": NOISE_FILL, "linewidth": 0, "zorder": 0.5}
    below.bar(floors["tick"], heights, room * 0.8, bottom=floors["speedup_low"], **band)
    below.use_sticky_edges = False
    below.axhline(1, **NATIVE_LINE)
    times_us = shown["layer_time_us"]
    if times_us.max() > _LINEAR_RANGE * times_us.min():
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_major_formatter(lambda time_us, _: f"{time_us:,.0f}")
        above.yaxis.set_minor_locator(NullLocator())
    else:
        above.set_ylim(0, 1.06 * times_us.max())
    below.set_ylabel(SPEEDUP_LABEL)
    below.set_xlabel("tokens of a step")
    below.set_xticks(ticks, [f"{of_step:,}" for of_step in tokens])
    below.set_xlim(ticks[0] - 0.5 * room, ticks[-1] + 0.5 * room)
    for axes in (above, below):
        axes.grid(False, axis="x")
