"""What ``moe-ep-bench validate`` prints, its two tables as CSV, and its figure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.render import (
    Column,
    Row,
    Table,
    interval,
    milliseconds,
    missing,
    number,
    percentage,
    render,
    text,
)
from moe_ep_bench.analysis.style import (
    DEFAULT_FORMATS,
    INK,
    MUTED,
    NOISE_FILL,
    PHASE_LOOKS,
    house_style,
    panel_title,
    save,
    sheet,
    wrap,
)
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.validation import QUIET, Validation
from moe_ep_bench.analysis.words import Footer, Origin, footer_lines, hardware_words, percent, scale_words
from moe_ep_bench.files import atomic_path, refuse_links_out

# The times that are printed, a whole model's pass before its MoE layers; and the look of their bars.
_PRINTED = {
    "attention": "attention",
    "dense, norms and ends": "rest",
    "MoE layers": None,
    "shared": "shared",
    "gate and policy": "gate",
    "permute and metadata": "permute",
    "comm": "comm",
    "experts": "experts",
    "waiting": "waiting",
    "waiting and comm": None,
    "unaccounted": "unaccounted",
}
_BARS = {time: look for time, look in _PRINTED.items() if look is not None}
assert set(_BARS.values()) == {"attention", "rest", *GROUPS}

_MARK = {"linestyle": "none", "markersize": 7, "markeredgecolor": "white"}
_VERDICT_LOOKS: dict[str, dict[str, Any]] = {
    "equivalent": {"color": "#009E73", "marker": "o", **_MARK},
    "different": {"color": "#D55E00", "marker": "X", **_MARK},
    "inconclusive": {"color": MUTED, "marker": "D", **_MARK},
}
_REAL_LOOK = {"color": INK, "marker": "|", "markersize": 13, "markeredgewidth": 1.8, "linestyle": "none"}

# Columns whose name in the CSV files is another than in ``Validation.cases``; ``_csv_name`` has the rule for others.
_CSV_NAMES = {
    "label": "policy",
    "real_speedup_is_interval": "is_interval",
    "real_dropped_share": "dropped_share",
    "real_retained_mass": "retained_mass",
}


def write_report(validation: Validation) -> list[Path]:
    """Write ``validation.txt``, the two CSV files and the figure; return their paths."""
    files = validation.files
    refuse_links_out(files.root, files.figures)
    cases = validation.cases.drop(columns="policy").rename(columns=lambda name: _csv_name(name, validation.timed))
    written = {files.text: f"{validation_text(validation)}\n", files.cases_table: render([Table(cases, ())], "csv")}
    if len(validation.phases):
        phases = validation.phases.rename(columns=_CSV_NAMES)
        written[files.phases_table] = render([Table(phases, ())], "csv")
    for path, content in written.items():
        with atomic_path(path) as temporary:
            temporary.write_text(content)
    drawn = []
    with house_style():
        figure = validation_figure(validation)
        for file_format in DEFAULT_FORMATS if figure is not None else ():
            assert figure is not None
            drawn.append(files.figures / f"validation.{file_format}")
            save(figure, drawn[-1], file_format)
    return [*written, *drawn]


def _csv_name(name: str, timed: str) -> str:
    """``real_low`` of ``real_speedup_low``, ``real_layer_ms`` of ``real_median_ms``."""
    name = _CSV_NAMES.get(name, name).replace("_median_ms", f"_{timed}_ms")
    return re.sub("_speedup_(median|low|high)$", lambda end: {"median": "_speedup"}.get(end[1], f"_{end[1]}"), name)


def validation_text(validation: Validation) -> str:
    """Tables and notes of every comparison; the last line says how many speedups are equivalent."""
    return f"{render(validation_tables(validation), 'text')}\n\n{verdict_line(validation)}"


def validation_tables(validation: Validation) -> list[Table]:
    """Of every comparison: its cases, the errors of phases, the experts alone and the laws."""
    return [table for name in validation.unsound for table in _tables(validation, name)]


def verdict_line(validation: Validation) -> str:
    """``k of n speedups are equivalent within m %; largest difference x %``; of MoE layers alone the same."""
    claims, parts = validation.claims, []
    for name, words, of_largest in (
        ("", f"speedups are equivalent within {100 * validation.margin:g} %", "; largest difference"),
        ("moe_", "of MoE layers alone", ", largest"),
    ):
        if f"{name}verdict" in claims:
            counts = claims[f"{name}verdict"].value_counts()
            agreeing = f"{counts.get('equivalent', 0)} of {len(claims)}"
            line = f"{words} {agreeing}" if name else f"{agreeing} {words}"
            others = [f"{counts[verdict]} {verdict}" for verdict in ("different", "inconclusive") if verdict in counts]
            line += f" ({', '.join(others)})" if others else ""
            largest = (claims[f"{name}speedup_ratio_median"] - 1).abs().max()
            parts.append(line + ("" if np.isnan(largest) else f"{of_largest} {100 * largest:.1f} %"))
    return "; ".join(parts)


def _speedup_columns(name: str = "") -> list[Column]:
    """What is measured, what is emulated, their ratio, and the verdict."""
    return [
        interval(f"real_{name}speedup", "measured speedup"),
        interval(f"emulated_{name}speedup", "emulated speedup"),
        interval(f"{name}speedup_ratio", "emulated / measured"),
        text(f"{name}verdict", "verdict"),
    ]


_POLICY = text("label", "policy")
_CASES = (
    _POLICY,
    number("real_median_ms", "measured ms", milliseconds),
    number("emulated_median_ms", "emulated ms", milliseconds),
    number("ratio"),
    *_speedup_columns(),
    percentage("dropped", "dropped %"),
    percentage("kept", "mass kept %"),
)
_ALONE = (
    _POLICY,
    number("rank", form="{}"),
    number("rows", form="{:,.0f}"),
    number("layer_ms", "in the layer ms", "{:.2f}"),
    number("alone_ms", "alone ms", "{:.2f}"),
    number("ratio"),
)
_LAWS = (
    text("run"),
    text("law"),
    number("intercept_us", "ms at no load", lambda time_us: f"{time_us / 1e3:.3f}"),
    interval("slope", "ms per 1,000 rows"),  # microseconds a row
    number("r2", "R2", "{:.4f}"),
    number("num_points", "points", "{:.0f}"),
)
_SLOPES = {"slope_us": "slope_median", "slope_low_us": "slope_low", "slope_high_us": "slope_high"}


def _tables(validation: Validation, name: str) -> Iterator[Table]:
    """What is printed of one comparison."""

    def own(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["comparison_id"] == name] if len(frame) else frame

    facts, cases = validation.real.comparisons[name], own(validation.cases)
    is_kept = cases["role"] != "ceiling"
    shown = cases.assign(
        ratio=cases["emulated_median_ms"] / cases["real_median_ms"],
        verdict=cases["verdict"].fillna(cases["role"].map({"baseline": "baseline", "noise": "noise floor"})),
        dropped=cases["real_dropped_share"].where(is_kept),
        kept=cases["real_retained_mass"].where(is_kept),
    )
    title = (
        f"{facts.title}: emulated on one device, held against {hardware_words(validation.real, facts)}, "
        f"{facts.dtype}, {scale_words(facts.scale)}"
    )
    yield Table(shown, _CASES, title, list(_notes(validation, name, cases)), "unmeasured")
    if "moe_verdict" in cases:
        title = "MoE layers alone, the slowest rank of breakdown iterations: a pass dilutes what is wrong with them"
        yield Table(own(validation.claims), (_POLICY, *_speedup_columns("moe_")), title)
    phases = own(validation.phases)
    if len(phases):
        has_time = (phases["real_ms"] > 0) | (phases["emulated_ms"] > 0)
        present = [time for time in _PRINTED if time in set(phases["time"][has_time])]
        cells = phases.assign(cell=[_phase_cell(row) for row in phases.to_dict("records")])
        by_label = cells.pivot(index="label", columns="time", values="cell").loc[phases["label"].unique()].reset_index()
        title = "Milliseconds by phase, emulated / measured (error): mean over ranks, median over breakdown iterations"
        yield Table(by_label, (_POLICY, *(number(time, form="{}") for time in present)), title)
    errors = own(validation.errors)
    if len(errors):
        turned = errors.set_index("phase")[["typical", "quiet"]].T.assign(of=["median time", f"{QUIET:.0%} quantile"])
        columns = [number(phase, form=lambda error: f"{100 * error:+.0f} %") for phase in errors["phase"]]
        title = "Error of a rank's phase, median over cases: its own in quiet iterations, the rest is disturbance"
        yield Table(turned, (text("of", "of its"), *columns), title)
    alone = own(validation.alone)
    if len(alone):
        title = "The emulated expert phase, and the experts alone on the same rows outside of it; medians over batches"
        yield Table(alone, _ALONE, title)
    laws = own(validation.laws)
    if len(laws):
        title = "Times and loads, all cases together: least squares, slopes with their 95 % interval"
        yield Table(laws.rename(columns=_SLOPES).assign(slope_is_interval=True), _LAWS, title)


def _phase_cell(row: Row) -> str:
    error = f" ({100 * (row['emulated_ms'] / row['real_ms'] - 1):+.0f} %)" if row["real_ms"] > 0 else ""
    return f"{row['emulated_ms']:.2f} / {row['real_ms']:.2f}{error}"


def _notes(validation: Validation, name: str, cases: pd.DataFrame) -> Iterator[str]:
    yield f"links: {validation.links}"
    yield "waiting and comm: their sum does not depend on when exactly ranks meet; each alone does"
    yield (
        "equivalent: the whole 95 % interval of emulated over measured speedup lies within "
        f"{100 * validation.margin:g} % (two one-sided tests at 2.5 %); different: all of it lies outside; the ratio "
        "is taken batch by batch"
    )
    first, floors = cases.iloc[0], []
    for floor, words in (("real_floor", "measured"), ("emulated_floor", "emulated")):
        low, high = (first.get(f"{floor}_{end}") for end in ("low", "high"))
        floors += [] if missing(low) else [f"{words} {low:.3f} to {high:.3f}"]
    if floors:
        yield f"noise floor: {', '.join(floors)}"
    yield from (f"warning: not comparable: {line}" for line in validation.unsound[name])


def validation_figure(validation: Validation) -> Figure | None:
    """Speedups side by side with the margin about the real ones, and phases as pairs of bars; None without any."""
    claims = validation.claims[validation.claims["real_speedup_median"].notna()]
    shown = list(claims["comparison_id"].unique())
    if not shown:
        return None
    facts, phases = [validation.real.comparisons[name] for name in shown], validation.phases
    groups = []
    if len(phases):
        phases = phases[phases["comparison_id"].isin(shown)]
        groups = [name for name in _BARS if (phases["real_ms"][phases["time"] == name] > 0).any()]
    # Measured cases; native stands once, for its repetition is the noise floor.
    cases = validation.cases[validation.cases["unmeasured"].isna() & (validation.cases["role"] != "noise")]
    drawn = {name: cases[cases["comparison_id"] == name].to_dict("records") for name in shown}
    heights = [1.0 + 0.68 * len(rows) for rows in drawn.values()]
    verdicts = [verdict for verdict in _VERDICT_LOOKS if verdict in set(claims["verdict"])]
    figure = sheet(
        "Emulated ranks held against real ones",
        f"Left: speedup of the {validation.timed} over native, 95 % intervals, the emulated one's of its ratio to the "
        f"measured one; grey: within {100 * validation.margin:g} % of that. Right: mean over ranks; of each pair "
        "the upper bar is measured, the lower one emulated.",
        Footer(
            [*footer_lines(validation.real, facts), f"Emulated with links: {validation.links}"],
            [Origin(how, fact.workload.kind) for how in ("measured", "emulated") for fact in facts],
        ),
        [
            ("measured", Line2D([], [], **_REAL_LOOK)),
            ("margin", Patch(facecolor=NOISE_FILL)),
            *((f"emulated: {verdict}", Line2D([], [], **_VERDICT_LOOKS[verdict])) for verdict in verdicts),
            *((name, Patch(**PHASE_LOOKS[_BARS[name]])) for name in groups),
        ],
        width=13,
        body=sum(heights),
    )
    grid = figure.add_gridspec(len(shown), 2, height_ratios=heights, width_ratios=[1, 1.15])
    for place, (name, rows) in enumerate(drawn.items()):
        speedups, times = (figure.add_subplot(grid[place, column]) for column in (0, 1))
        panel_title(speedups, validation.real.comparisons[name].title, 5.0)
        _speedup_dots(speedups, rows, validation.margin)
        if len(phases):
            _phase_pairs(times, phases[phases["comparison_id"] == name], rows, groups)
        for axes, labels in ((speedups, [_row_name(row) for row in rows]), (times, [""] * len(rows))):
            axes.set_yticks(np.arange(len(rows)), labels)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
            axes.grid(False, axis="y")
        speedups.set_xlabel("speedup (native = 1)")
        times.set_xlabel(f"time of one {validation.timed} (ms)")
    return figure


def _speedup_dots(axes: Axes, rows: Sequence[Row], margin: float) -> None:
    axes.use_sticky_edges = False  # a band that ends at the panel's rim would look cut off
    axes.axvline(1, color=INK, linewidth=1, zorder=1)
    for place, row in enumerate(rows):
        real, emulated = row["real_speedup_median"], row["emulated_speedup_median"]
        if missing(row["verdict"]) or missing(real) or missing(emulated):
            continue
        low, high = real / (1 + margin), real * (1 + margin)
        axes.barh(place, high - low, left=low, height=0.6, color=NOISE_FILL, linewidth=0, zorder=1.5)
        above, below, look = place - 0.13, place + 0.13, _VERDICT_LOOKS[row["verdict"]]
        axes.hlines(above, row["real_speedup_low"], row["real_speedup_high"], color=INK, linewidth=1.4, zorder=2)
        axes.plot([real], [above], zorder=2.5, **_REAL_LOOK)
        ends = [emulated * row[f"speedup_ratio_{end}"] / row["speedup_ratio_median"] for end in ("low", "high")]
        axes.hlines(below, *ends, color=look["color"], linewidth=1.4, zorder=2.8)
        axes.plot([emulated], [below], zorder=3, **look)


def _row_name(row: Row) -> str:
    name = wrap(row["label"], 2.2, 9)
    if row["role"] != "policy":
        return name
    return f"{name}\n{percent(row['real_dropped_share'])} % dropped, {percent(row['real_retained_mass'])} % mass kept"


def _phase_pairs(axes: Axes, phases: pd.DataFrame, rows: Sequence[Row], groups: Sequence[str]) -> None:
    """Of each case two stacked bars."""
    times = phases.set_index(["label", "time"])
    for place, row in enumerate(rows):
        for offset, run in ((-0.19, "real_ms"), (0.19, "emulated_ms")):
            end = 0.0
            for name in groups if row["label"] in times.index else ():
                width = times.at[(row["label"], name), run]
                look = PHASE_LOOKS[_BARS[name]]
                axes.barh(place + offset, width, left=end, height=0.34, linewidth=0.6, **look)
                end += width
            label = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5}
            axes.annotate(milliseconds(end, 3), (end, place + offset), **label)
    axes.set_xlim(0, 1.1 * axes.dataLim.xmax)
