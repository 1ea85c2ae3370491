"""Papers' numbers beside ours as text, as CSV and as a figure: the primary traffic first, the others as a range."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.claims import NOT_IN_CSV, Claims, native_share, number_words
from moe_ep_bench.analysis.render import NONE, Row, Table, milliseconds, missing, number, percentage, render, text
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import (
    DEFAULT_FORMATS,
    INK,
    MUTED,
    NOISE_FILL,
    house_style,
    panel_title,
    save,
    settle_layout,
    sheet,
    wrap,
)
from moe_ep_bench.analysis.whole import extrapolated_words, shared_words
from moe_ep_bench.analysis.words import Footer, hardware_words, mode_words, modelled_line, origins_of, scale_words
from moe_ep_bench.files import atomic_path, refuse_links_out
from moe_ep_bench.papers.claims import NATIVE_METRICS, OWN_METRICS, PHASE_METRICS, PLACEMENTS

METRIC_WORDS = {
    "speedup": "speedup",
    "dropped_fraction": "dropped share",
    "retained_mass": "mass kept",
    "gate_time": "relative time of gate and policy",
    "permute_time": "relative time of permutation",
    "comm_time": "relative time of communication",
    "experts_time": "relative time of experts",
    "layer_time": "relative time of the layer",
    "activated_experts": "relative number of activated experts",
    "moe_speedup": "speedup of all MoE layers in a pass",
    "step_time": "relative time of a decode step",
    "tokens_per_s": "relative tokens per second",
    "imbalance_cut": "fullest expert, native over policy",
    "native_layer_us": "native's layer (us)",
    "native_activated_experts": "native's activated experts",
}
_COLUMNS = (
    "ours: under the primary traffic, mean over draws; range: under all traffics; dropped: share of the top-k pairs, "
    "in %; the largest disagreement comes first"
)
_NEEDED_SKEW = (
    "needed: the mildest skew at which a layer, modelled on devices/{device} with {tokens:,} tokens a rank and one "
    "batch, gives the paper's number: load of the busiest expert and of the fullest rank, over the mean; scattered: "
    "experts lie as drawn; adjacent: the busiest lie side by side, on one rank"
)
_NEEDED_SPEEDUP = (
    "MoE speedup needed: by Amdahl's law, f / (1 / n - (1 - f)) with the MoE layers' share f of native's pass under "
    "the primary traffic and the paper's n"
)
_BOUNDS = (
    "with E experts, one to a rank, a share d dropped at a capacity factor g bounds the busiest expert at g + d E "
    "times the mean, and the layer's gain at that over g, if ranks' tokens are alike and time grows with the largest "
    "load"
)
_LOOKS = (
    {"color": "#009E73", "marker": "o"},
    {"color": "#0072B2", "marker": "s"},
    {"color": "#D55E00", "marker": "^"},
    {"color": "#CC79A7", "marker": "D"},
    {"color": "#E69F00", "marker": "v"},
)
_PAPER_LOOK = {"color": INK, "marker": "|", "markersize": 15, "markeredgewidth": 2.4, "linestyle": "none"}


def write_claims(claims: Claims) -> list[Path]:
    """Write ``claims.txt``, ``claims.csv`` and the figure; return their paths."""
    refuse_links_out(claims.directory, claims.directory / "figures")
    written = {"claims.txt": claims_text(claims) + "\n"}
    if len(claims.measured):
        written["claims.csv"] = render([Table(claims.measured.drop(columns=[*NOT_IN_CSV]), ())], "csv")
    paths = [claims.directory / name for name in written]
    for path, content in zip(paths, written.values(), strict=True):
        with atomic_path(path) as temporary:
            temporary.write_text(content)
    with house_style():
        figure = claims_figure(claims)
        if figure is not None:
            settle_layout(figure)
            for file_format in DEFAULT_FORMATS:
                paths.append(claims.directory / "figures" / f"claims.{file_format}")
                save(figure, paths[-1], file_format)
    return paths


def claims_text(claims: Claims) -> str:
    """The claims, errors by metric, what shares of dropped pairs bound, what the traffics are, and reasons."""
    rows = _rows(claims)
    tables = [_claims_table(claims, rows), _errors_table(rows), _bounds_table(claims), _traffic_table(claims)]
    shown = render([*(one for one in tables if one is not None), *_phase_tables(claims), _reasons(rows)], "text")
    return "\n\n".join([*filter(None, [modelled_line(claims.run)]), shown])


def how_words(claims: Claims) -> str:
    """How ours came about, by which device and links, and how many layers of how many."""
    facts = [one.comparison for one in claims.comparisons.values()]
    parts = [[mode_words(claims.run, one) for one in facts]]
    if claims.run.mode == "run":
        parts.append([hardware_words(claims.run, one) for one in facts])
        parts.append([f"{one.experts.ran} experts, {one.dispatcher}" for one in facts])
        parts.append(["replayed from CUDA graphs" if one.cuda_graph else "run eagerly" for one in facts])
    else:
        parts.append([one.device or f"{claims.run.device_name} in place of {one.world_size} ranks" for one in facts])
        parts.append([one.links or NONE for one in facts])
    cut = [one.comparison.comparison.whole for one in claims.wholes.values() if one.is_cut]
    parts.append([f"the first {one.num_layers} of {one.of_layers} layers" for one in cut if one])
    return "; ".join(" / ".join(dict.fromkeys(values)) for values in parts if values)


def _rows(claims: Claims) -> pd.DataFrame:
    """A row per number of a paper: ours under the primary traffic, and the ends of ours under all."""
    by_number = claims.frame.groupby("number")["ours"]
    frame = claims.frame.assign(least=by_number.transform("min"), most=by_number.transform("max"))
    frame = frame[frame["primary"]].copy()
    size = (frame["difference"] / frame[["paper_low", "paper_high"]].mean(axis=1)).abs()
    frame["claim"] += frame["metric"].map(lambda name: "" if name == "speedup" else f": {METRIC_WORDS[name]}")
    return frame.iloc[size.fillna(-1).argsort(kind="stable")[::-1]]


def _claims_table(claims: Claims, rows: pd.DataFrame) -> Table:
    columns = [number("number", " ", "{}"), text("claim"), text("case", "policy"), number("paper", form="{}")]
    records = rows.to_dict("records")
    words = {"ours_words": "ours", "difference_words": "ours - paper", "range_words": "range"}
    made = {
        "ours_words": [_shown(row, "ours") + _all_layers_words(row) for row in records],
        "difference_words": [_difference(row) for row in records],
        "range_words": [
            NONE if row["least"] == row["most"] else f"{_shown(row, 'least')} to {_shown(row, 'most')}"
            for row in records
        ],
        **{one: [_skew_words(row, one) for row in records] for one in PLACEMENTS},
        "speedup_needed": [_speedup_needed(row["moe_speedup_needed"]) for row in records],
    }
    columns += [number(name, header, "{}") for name, header in words.items()]
    columns += [text("traffic", "primary traffic"), percentage("dropped_share", "dropped")]
    extrapolated = filter(None, map(extrapolated_words, claims.wholes.values()))
    notes = [_COLUMNS, *dict.fromkeys(f"[all: ...] {words}" for words in extrapolated), *_reasons_of_traffic(rows)]
    if claims.solved_tokens is not None:
        columns += [number(one, f"needed, {one}", "{}") for one in PLACEMENTS]
        notes.append(_NEEDED_SKEW.format(device=claims.solved_on, tokens=claims.solved_tokens))
    if claims.is_whole:
        columns.append(number("speedup_needed", "MoE speedup needed", "{}"))
        notes.append(_NEEDED_SPEEDUP)
    ours = "whole models here, from end to end" if claims.is_whole else "one layer here"
    return Table(rows.assign(**made), columns, f"Papers' numbers beside {ours}: {how_words(claims)}", notes)


def _reasons_of_traffic(rows: pd.DataFrame) -> list[str]:
    known = rows[rows["primary_because"].notna()].drop_duplicates(["traffic", "primary_because"])
    return [f"{row.traffic} is primary: {row.primary_because}" for row in known.itertuples()]


def _shown(row: Row, column: str) -> str:
    return "not measured" if missing(row[column]) else number_words(row["metric"], row[column])


def _all_layers_words(row: Row) -> str:
    found = row["ours_extrapolated_to_all_layers"]
    return "" if missing(found) else f" [all: {found:.2f}]"


def _difference(row: Row) -> str:
    """Signed, in the number's unit; of a range whether it holds."""
    if missing(row["difference"]):
        return NONE
    if row["paper_low"] != row["paper_high"]:
        return "holds" if row["difference"] == 0 else "does not hold"
    factor = 100 if row["metric"] in OWN_METRICS else 1
    digits = 1 if row["metric"] in (*OWN_METRICS, *NATIVE_METRICS) else 2
    return f"{factor * row['difference']:+.{digits}f}"


def _speedup_needed(needed: float) -> str:
    return NONE if missing(needed) else "not reachable" if math.isinf(needed) else f"{needed:.2f}"


def _skew_words(row: Row, placement: str) -> str:
    found, value, *peaks = (
        row[f"needed_{placement}_{name}"] for name in ("found", "value", "fullest_expert", "fullest_rank")
    )
    if missing(found):
        return NONE
    if found:
        return f"peak {peaks[0]:.2f}, rank {peaks[1]:.2f}"
    bound = "at most" if value < row["paper_low"] else "at least"
    return f"not reachable: {bound} {number_words(row['metric'], value)}"


def _errors_table(rows: pd.DataFrame) -> Table | None:
    """How far ours lie from papers' single numbers, and to which side, by metric."""
    of_numbers = rows[(rows["paper_low"] == rows["paper_high"]) & rows["difference"].notna()]
    if of_numbers.empty:
        return None
    by_metric = of_numbers.assign(absolute=of_numbers["difference"].abs()).groupby("metric", sort=False)
    frame = by_metric.agg(count=("difference", "size"), error=("absolute", "mean"), bias=("difference", "mean"))
    frame = frame.reset_index().assign(words=lambda one: one["metric"].map(METRIC_WORDS))
    columns = [text("words", "metric"), number("count", "numbers", "{}"), number("error", "mean absolute error")]
    return Table(frame, [*columns, number("bias", "mean error", "{:+.3f}")], "How far ours is from single numbers")


def _bounds_table(claims: Claims) -> Table | None:
    """What published shares of dropped pairs bound, beside the speedups that are claimed for the same policy."""
    rows = claims.measured
    frame = rows[rows["peak_at_most"].notna()].drop_duplicates("number")
    if frame.empty:
        return None
    numbers = rows[(rows["metric"] == "speedup") & (rows["paper_low"] == rows["paper_high"])]
    claimed = [
        sorted(set(numbers[(numbers["policy"] == policy) & (numbers["comparison_id"] == name)]["paper_low"]))
        for policy, name in zip(frame["policy"], frame["comparison_id"], strict=True)
    ]
    frame = frame.assign(claimed=[" / ".join(f"{value:.2f}" for value in values) or None for values in claimed])
    columns = (
        number("number", " ", "{}"),
        text("policy"),
        number("paper", "dropped", "{}"),
        number("peak_at_most", "busiest expert at most", "{:.2f}"),
        number("gain_at_most", "gain at most", "{:.2f}"),
        number("claimed", "gain claimed", "{}"),
    )
    return Table(frame, columns, "What the published shares of dropped pairs bound", [_BOUNDS])


def _traffic_table(claims: Claims) -> Table:
    """Loads under each traffic, what balance alone gains, and of whole models what no policy exceeds."""
    rows, chances = [], []
    for name, one in claims.comparisons.items():
        native, ceiling, whole = one.of_role("baseline"), one.of_role("ceiling"), claims.wholes.get(name)
        row = {
            column: getattr(native and native.fidelity, column, None) for column in ("fullest_expert", "fullest_rank")
        }
        row |= {"title": one.comparison.title, "gain": getattr(ceiling and ceiling.speedup, "median", None)}
        rows.append(row | {"basis": basis_words(one)})
        if whole is not None:
            rows[-1] |= {"share": native_share(whole), "most": whole.most}
            assert one.comparison.whole is not None
            chances += [
                f"{one.comparison.title}: {words}" for words in shared_words(one.comparison.whole.shared_by_chance)
            ]
    columns = [
        text("title", "model and traffic" if claims.is_whole else "layer and traffic"),
        number("fullest_expert", "fullest expert", "{:.2f}"),
        number("fullest_rank", "fullest rank", "{:.2f}"),
        number("gain", "balance alone gains", "{:.2f}"),
        *([percentage("share", "MoE share %"), number("most", "at most", "{:.2f}")] if claims.is_whole else []),
        text("basis", "what the traffic is"),
    ]
    return Table(pd.DataFrame(rows), columns if rows else (), notes=chances)


def basis_words(one: ComparisonResult) -> str:
    """What a workload was calibrated to, without its other words."""
    return one.comparison.workload.description.split("; synthetic", 1)[0].removeprefix("synthetic, ")


def _phase_tables(claims: Claims) -> list[Table]:
    """Milliseconds by group of phases, for comparisons that a claim on phases is about."""
    of_phases = claims.measured[claims.measured["metric"].isin(PHASE_METRICS)]
    groups, tables = (*PHASE_METRICS.values(), "waiting"), []
    for name in dict.fromkeys(of_phases["comparison_id"]):
        one = claims.comparisons[name]
        rows = [
            {"policy": r.case.label, **r.breakdown.group_ms, "layer": r.layer.median_ms}
            for r in one.results
            if r.case.role in ("baseline", "policy") and r.breakdown and r.layer
        ]
        phases = [number(phase, form=lambda time_ms: milliseconds(time_ms, 3)) for phase in groups]
        columns = (text("policy"), *phases, number("layer", form=milliseconds))
        title = f"{one.comparison.title}: milliseconds, mean over ranks; layer: the slowest rank"
        tables.append(Table(pd.DataFrame(rows), columns, title))
    return tables


def _reasons(rows: pd.DataFrame) -> Table:
    """Each reason once, with the numbers of its claims."""
    by_reason = rows.sort_values("number").groupby("note", sort=False)["number"]
    lines = [f"{', '.join(map(str, numbers))}: {reason}" for reason, numbers in by_reason]
    return Table(pd.DataFrame(), (), "Why they differ, and what was inferred", lines)


def claims_figure(claims: Claims) -> Figure | None:
    """The paper's number as a mark and ours by traffic, a panel for each metric; None where nothing was measured."""
    rows = claims.measured
    if rows.empty:
        return None
    unstated = rows[["paper_low", "paper_high"]].isna().all(axis=1)
    panels = [(METRIC_WORDS[name], panel) for name, panel in rows.groupby("metric", sort=False)]
    looks = dict(zip(dict.fromkeys(claims.frame["traffic"]), itertools.cycle(_LOOKS), strict=False))
    legend = [
        *([("paper", Line2D([], [], **_PAPER_LOOK))] if (rows["paper_low"] == rows["paper_high"]).any() else []),
        *([("paper: a range", Patch(facecolor=NOISE_FILL))] if _is_range(rows).any() else []),
        *((f"ours, {name.replace('_', ' ')}", Line2D([], [], **_style(look, True))) for name, look in looks.items()),
    ]
    facts = [one.comparison for one in claims.comparisons.values()]
    models = dict.fromkeys(f"{one.model}, {scale_words(one.scale)}, {one.dtype}" for one in facts)
    traffic = dict.fromkeys(basis_words(one) for one in claims.comparisons.values())
    heights = [_row_height(panel) * panel["number"].nunique() for _, panel in panels]
    figure = sheet(
        "Papers' numbers beside ours",
        f"Ours: {'whole models, a pass from end to end' if claims.is_whole else 'one layer'}; filled: the primary "
        "traffic. Whiskers: least and largest draw, or 95 % intervals, or smallest and largest pair below ten batches."
        + (" Rows without a mark: the paper states no number." if unstated.any() else ""),
        Footer(
            [how_words(claims), f"{' / '.join(models)} | {facts[0].workload.kind} traffic, {'; '.join(traffic)}"],
            origins_of(claims.run, facts),
        ),
        legend,
        width=11,
        body=sum(heights) + 0.75 * len(heights),  # titles and axes
    )
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for place, (title, panel) in enumerate(panels):
        axes = figure.add_subplot(grid[place, 0])
        panel_title(axes, title, 7.0)
        _draw(axes, panel, looks)
    return figure


def _draw(axes: Axes, panel: pd.DataFrame, looks: dict[str, dict[str, Any]]) -> None:
    metric = panel["metric"].iloc[0]
    factor = 100 if metric in OWN_METRICS else 1
    if metric not in (*OWN_METRICS, *NATIVE_METRICS):
        axes.axvline(1, color=MUTED, linewidth=1, zorder=1)
    of_claims = [(place, rows) for place, (_, rows) in enumerate(panel.groupby("number"))]
    for place, rows in of_claims:
        first = rows.iloc[0]
        if first["paper_low"] == first["paper_high"]:
            axes.plot([factor * first["paper_low"]], [place], zorder=2, **_PAPER_LOOK)
        step = min(0.2, 0.6 / len(rows))
        for at, ours in enumerate(rows.to_dict("records")):
            y = place + (at - (len(rows) - 1) / 2) * step
            look = looks[ours["traffic"]]
            ends = factor * ours["ours_low"], factor * ours["ours_high"]
            axes.hlines(y, *ends, color=look["color"], linewidth=1.4, zorder=3)
            axes.plot([factor * ours["ours"]], [y], zorder=4, **_style(look, ours["primary"]))
    low, high = axes.get_xlim()
    for place, rows in of_claims:
        if _is_range(rows).any():
            begin, end = (factor * rows[name].iloc[0] for name in ("paper_low", "paper_high"))
            begin, end = low if missing(begin) else begin, high if missing(end) else end
            axes.barh(place, end - begin, 0.7, begin, color=NOISE_FILL, zorder=0.5)
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(of_claims)), [_name(rows) for _, rows in of_claims])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(of_claims) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"{METRIC_WORDS[metric]}{' (%)' if factor == 100 else ''}")


def _name(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    return f"{wrap(first['claim'], 4.0, 8)}\n{wrap(first['case'], 4.0, 8)}"


def _row_height(panel: pd.DataFrame) -> float:
    """Inches, enough for the longest name."""
    most_lines = max(_name(rows).count("\n") + 1 for _, rows in panel.groupby("number"))
    return max(0.52, 0.15 * most_lines + 0.12)


def _is_range(rows: pd.DataFrame) -> pd.Series:
    has_paper = rows["paper_low"].notna() | rows["paper_high"].notna()
    return has_paper & (rows["paper_low"] != rows["paper_high"])


def _style(look: dict[str, Any], filled: bool) -> dict[str, Any]:
    faces = {} if filled else {"markerfacecolor": "white"}
    edge = "white" if filled else look["color"]
    return {**look, "linestyle": "none", "markersize": 5.5, "markeredgecolor": edge, "markeredgewidth": 0.8, **faces}
