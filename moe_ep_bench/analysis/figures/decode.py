"""The figures of decode: ``activated``, time over activated experts, and ``graphs``, eager beside CUDA graphs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from moe_ep_bench.analysis.activated import Steps, decode_steps, layer_words
from moe_ep_bench.analysis.figures.panels import (
    COST,
    SPEEDUP,
    case_rows,
    csv,
    draw_along,
    footer,
    name_values,
    run_looks,
    sheet_of_panels,
)
from moe_ep_bench.analysis.graphs import EAGER, GRAPH_KEY, REPLAYED, Pair, graph_pairs
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import INK, MUTED, NOISE_FILL, Drawing, Legend, Look, Looks
from moe_ep_bench.analysis.sweep import key_words, value_of, value_words
from moe_ep_bench.analysis.words import MAX_HOST_BOUND

_LINE, _BOUND = {"color": INK, "linewidth": 1.2}, {"color": MUTED, "linewidth": 1.2, "linestyle": "--"}
_NATIVE = Look("native", INK, "*", "-", "")
# Times further apart than this get a logarithmic axis.
_LINEAR_RANGE = 20


def activated_figure(run: Run) -> Drawing | None:
    """Time over activated experts: points, the fitted line, and the bound."""
    pools = decode_steps(run)
    if not pools:
        return None
    looks = {"native": _NATIVE, **run_looks(run)}
    rows = pd.concat([_points(run, steps) for steps in pools], ignore_index=True)
    families = set(rows["family"])
    lines = [("fitted line", Line2D([], [], **_LINE))]
    if any(steps.bound_us is not None for steps in pools):
        lines.append(("bound: weights read at this device's speed", Line2D([], [], **_BOUND)))
    header = (
        "A decode step takes as long as the experts that it activates",
        "Phase `experts` of the slowest rank, median over iterations of a batch, over the activated experts of the "
        "rank that activates most; a point is a batch under a case.",
        footer(run, rows),
        [*((k.label, Line2D([], [], **_dots(k))) for family, k in looks.items() if family in families), *lines],
    )
    figure, axes = sheet_of_panels(header, [steps.title for steps in pools], (1,), 4.2)
    for (one,), steps in zip(axes, pools, strict=True):
        for family, own in steps.points.fillna({"family": "native"}).groupby("family"):
            one.plot(own["activated"], own["time_us"], **_dots(looks[str(family)]), alpha=0.6)
        ends = np.array([0, steps.points["activated"].max() * 1.05])
        if steps.line is not None:
            line = steps.line
            one.plot(ends, line.intercept_us + line.slope_us * ends, **_LINE)
            words = f"{line.intercept_us:.0f} us + {line.slope_us:.2f} us an expert, R2 {line.r2:.3f}"
            one.text(0.03, 0.96, words, transform=one.transAxes, va="top", fontsize="small")
        if steps.bound_us is not None:
            one.plot(ends, steps.bound_us * ends, **_BOUND)
        one.set(xlim=(0, ends[1]), xlabel="activated experts (fullest rank)", ylabel="experts (us)")
        one.set_ylim(0)
    identity = ["comparison", "model", "num_ranks", "num_tokens", "policy"]
    numbers = rows.columns.drop([*identity, "family", "comparison_id", "case_id", "batch"])
    return Drawing(figure, rows[[*identity, *numbers]])


def _points(run: Run, steps: Steps) -> pd.DataFrame:
    """A row per point, then one for the fitted line and one for the bound."""
    names = {"label": "policy", "activated": "activated_experts", "pairs": "num_pairs"}
    lines = [{"policy": "fitted line", "intercept_us": steps.line.intercept_us}] if steps.line is not None else []
    if steps.line is not None:
        lines[0]["slope_us_per_expert"] = steps.line.slope_us
    if steps.bound_us is not None:
        lines.append({"policy": "bound", "intercept_us": 0.0, "slope_us_per_expert": steps.bound_us})
    points = pd.concat([steps.points.rename(columns=names), pd.DataFrame(lines)], ignore_index=True)
    of_run = case_rows(run).set_index("comparison_id").loc[steps.points["comparison_id"].iloc[0]]
    about = {name: of_run[name].iloc[0] for name in ("model", "num_ranks", "origin", "workload")}
    about |= {"comparison": steps.title, "family": points["family"].fillna("native")}
    points = points.assign(**about).astype({"num_tokens": "Int64"})
    return points.fillna({"comparison_id": points["comparison_id"].iloc[0]})


def _dots(look: Look) -> dict:
    marker = "o" if look is _NATIVE else look.marker
    return {"color": look.colour, "marker": marker, "linestyle": "", "markersize": 5}


# ---- graphs --------------------------------------------------------------------------------------------------------


def graphs_figure(run: Run) -> Drawing | None:
    """Time over the tokens of a step, run eagerly and replayed; below it what policies gain over native in both."""
    pairs = graph_pairs(analyse(run))
    if not pairs:
        return None
    rows, looks = _paired_rows(run, pairs), {"native": _NATIVE, **run_looks(run)}
    unit = "one MoE layer" if run.scope == "layer" else "a decode step"
    header = (
        f"What a policy gains when the {run.scope} is replayed from CUDA graphs",
        f"Slowest rank's time of {unit}, and below it native over policy, medians with their spread, of each policy at "
        "its smallest capacity factor; the two ways were timed one after the other.",
        footer(run, rows, _bound_words(pairs)),
        _legend(rows, looks),
    )
    panels = list(rows.groupby("panel", sort=False))
    figure, axes = sheet_of_panels(header, [title for title, _ in panels], (3, 2.4), 5.4)
    for (above, below), (_, own) in zip(axes, panels, strict=True):
        _draw_ways(above, below, own, looks)
        above.set_ylabel(f"{run.scope} time (us)")
    time = f"{run.scope}_time_us"
    return Drawing(figure, csv(rows.rename(columns={"layer_time_us": time}), "way", time, *SPEEDUP, *COST))


def _paired_rows(run: Run, pairs: list[Pair]) -> pd.DataFrame:
    """Native and each policy at its smallest factor, pair by pair, eager first; and noise floors."""
    rows, parts = case_rows(run), []
    for pair in pairs:
        both = [case.label for case in pair.cases]
        for way, comparison in ((EAGER, pair.eager), (REPLAYED, pair.replayed)):
            own = rows[rows["comparison_id"] == comparison.results[0].case.comparison_id]
            shown = own["role"].isin(["baseline", "policy"]) & own["policy"].isin(both)
            parts.append(own[shown | own["is_floor"]].assign(way=way, panel=_panel_words(pair)))
    rows = pd.concat(parts, ignore_index=True)
    policies = rows[rows["role"] == "policy"].sort_values("capacity_factor", kind="stable", na_position="first")
    rows = rows[(rows["role"] != "policy") | rows["policy"].isin(policies.drop_duplicates("family")["policy"])]
    return rows.assign(family=rows["family"].mask(rows["role"] == "baseline", "native"), value=rows["num_tokens"])


def _panel_words(pair: Pair) -> str:
    """Which layer, and of a sweep all but the tokens of a step: what a panel's pairs have in common."""
    facts = pair.eager.comparison
    said = (GRAPH_KEY, "model.preset", "workload.num_tokens", "workload.tokens_per_rank")
    others = [f"{key_words(key)} {value_words(value_of(key, facts))}" for key in sorted(facts.point) if key not in said]
    built = "" if facts.whole is None else f", {facts.whole.num_layers} layers"
    layer = f"{facts.model}{built}, EP {facts.num_ranks}, {facts.dtype}, {layer_words(facts)}"
    return ", ".join([layer, *others]) + f"; the graphs hold {pair.held}"


def _bound_words(pairs: list[Pair]) -> list[str]:
    """How many cases were launch-bound."""
    warnings = []
    on_gpu = [case for pair in pairs if pair.eager.comparison.backend == "nccl" for case in pair.cases]
    for way, results in ((EAGER, [case.eager for case in on_gpu]), (REPLAYED, [case.replayed for case in on_gpu])):
        bound = sum((result.host_bound_share or 0) > MAX_HOST_BOUND for result in results)
        if bound:
            of_all = f"{way}, {bound} of {len(results)} cases are launch-bound"
            warnings.append(f"{of_all}: their time is the host's, not the device's")
    return warnings


def _legend(rows: pd.DataFrame, looks: Looks) -> Legend:
    legend: list = []
    for family, own in rows.groupby("family", sort=False):
        name, look = own["name"].iloc[0], looks[str(family)]
        if look is not _NATIVE:
            ranges = ([f"{end:.1f}" for end in (own[cost].min(), own[cost].max())] for cost in COST)
            dropped, kept = (" to ".join(dict.fromkeys(ends)) for ends in ranges)
            name += f": dropped {dropped} %, kept {kept} %"
        legend.append((name, Line2D([], [], **_marks(look, hollow=False))))
    either = Look("", MUTED, "o", "-", "")
    legend += [(EAGER, Line2D([], [], **_marks(either, hollow=True)))]
    legend += [(REPLAYED, Line2D([], [], **_marks(either, hollow=False)))]
    return [*legend, *([("noise floor", Patch(facecolor=NOISE_FILL))] if rows["is_floor"].any() else [])]


def _marks(look: Look, *, hollow: bool) -> dict:
    """Run eagerly: hollow and dashed; replayed: filled and solid."""
    return {
        "color": look.colour,
        "linestyle": (0, (4, 2)) if hollow else "-",
        "linewidth": 1.0 if hollow else 1.6,
        "marker": look.marker,
        "markersize": 9 if look.marker == "*" else 6,  # a star of the same size looks smaller
        "markerfacecolor": "white" if hollow else look.colour,
        "markeredgecolor": look.colour if hollow else "white",
        "markeredgewidth": 1.2 if hollow else 0.6,
    }


def _draw_ways(above: Axes, below: Axes, rows: pd.DataFrame, looks: Looks) -> None:
    """Both ways of every case over the tokens of a step."""
    having = set(rows["family"])
    for way in (EAGER, REPLAYED):
        own = rows[(rows["way"] == way) | rows["is_floor"]]
        marks = {key: _marks(look, hollow=way == EAGER) for key, look in looks.items() if key in having}
        draw_along(above, own, marks, "family", "layer_time_us")
        draw_along(below, own, marks, "family")
    tokens = sorted(rows["num_tokens"].unique())
    name_values(above, below, tokens, [f"{one:,}" for one in tokens], "tokens of a step")
    times_us = rows["layer_time_us"]
    if times_us.max() > _LINEAR_RANGE * times_us.min():
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_major_formatter(lambda time_us, _: f"{time_us:,.0f}")
        above.yaxis.set_minor_locator(NullLocator())
    else:
        above.set_ylim(0, 1.06 * times_us.max())
