"""What ``moe-ep-bench validate`` prints, its two tables as CSV, and its figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.origins import Footer, Origin
from moe_ep_bench.analysis.render import (
    NONE,
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
from moe_ep_bench.analysis.validation import MAX_BAND, Validation
from moe_ep_bench.analysis.validation_times import QUIET
from moe_ep_bench.analysis.words import footer_lines, hardware_words, percent, scale_words
from moe_ep_bench.files import atomic_path

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

_VERDICT_LOOKS = {
    "agrees": {"color": "#009E73", "marker": "o"},
    "differs": {"color": "#D55E00", "marker": "X"},
    "inconclusive": {"color": MUTED, "marker": "D"},
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
    for end, short in (("_speedup_median", "_speedup"), ("_speedup_low", "_low"), ("_speedup_high", "_high")):
        name = name.removesuffix(end) + short if name.endswith(end) else name
    return name


def validation_text(validation: Validation) -> str:
    """Tables and notes of every comparison; the last line says how many speedups agree."""
    return f"{render(validation_tables(validation), 'text')}\n\n{verdict_line(validation)}"


def validation_tables(validation: Validation) -> list[Table]:
    """Of every comparison: its cases, the errors of phases, the experts alone and the laws."""
    return [table for name in validation.unsound for table in _tables(validation, name)]


def verdict_line(validation: Validation) -> str:
    """``k of n speedups agree within the real run's noise; largest difference x %``."""
    claims = validation.claims
    line = f"{_agreeing(claims, '')} speedups agree within the real run's noise"
    line += _undecided(claims, "") + _largest(claims, "", "; largest difference")
    if "moe_verdict" in claims:
        line += f"; of MoE layers alone {_agreeing(claims, 'moe_')}{_undecided(claims, 'moe_')}"
        line += _largest(claims, "moe_", ", largest")
    return line


def _agreeing(claims: pd.DataFrame, name: str) -> str:
    return f"{(claims[f'{name}verdict'] == 'agrees').sum()} of {len(claims)}"


def _undecided(claims: pd.DataFrame, name: str) -> str:
    undecided = (claims[f"{name}verdict"] == "inconclusive").sum()
    return f" ({undecided} cannot be judged)" if undecided else ""


def _largest(claims: pd.DataFrame, name: str, words: str) -> str:
    largest = claims[f"{name}difference"].abs().max()
    return "" if np.isnan(largest) else f"{words} {100 * largest:.1f} %"


def _speedup_columns(name: str = "") -> list[Column]:
    """What is measured, what of it is allowed, what is emulated, and the verdict."""

    def allowed(row: Row) -> str:
        low, high = row[f"{name}allowed_low"], row[f"{name}allowed_high"]
        return NONE if missing(low) else f"{low:.3f} to {high:.3f}"

    return [
        interval(f"real_{name}speedup", "measured speedup"),
        Column("allowed", allowed),
        interval(f"emulated_{name}speedup", "emulated speedup"),
        number(f"{name}difference", "difference", lambda share: f"{100 * share:+.1f} %"),
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
    number("num_points", "points", "{}"),
)


def _tables(validation: Validation, name: str) -> Iterator[Table]:
    """What is printed of one comparison."""

    def own(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["comparison_id"] == name] if len(frame) else frame

    facts, cases = validation.real.comparisons[name], own(validation.cases)
    title = (
        f"{facts.title}: emulated on one device, held against {hardware_words(validation.real, facts)}, "
        f"{facts.dtype}, {scale_words(facts.scale)}"
    )
    is_kept = cases["role"] != "ceiling"
    shown = cases.assign(
        ratio=cases["emulated_median_ms"] / cases["real_median_ms"],
        verdict=cases["verdict"].fillna(cases["role"].map({"baseline": "baseline", "noise": "noise floor"})),
        dropped=cases["real_dropped_share"].where(is_kept),
        kept=cases["real_retained_mass"].where(is_kept),
    )
    yield Table(shown, _CASES, title, _notes(validation, name, cases), "unmeasured")
    if "moe_verdict" in cases:
        title = "MoE layers alone, the slowest rank of breakdown iterations: a pass dilutes what is wrong with them"
        yield Table(own(validation.claims), (_POLICY, *_speedup_columns("moe_")), title)
    phases = own(validation.phases)
    if len(phases):
        has_time = (phases["real_ms"] > 0) | (phases["emulated_ms"] > 0)
        present = [time for time in _PRINTED if time in set(phases["time"][has_time])]
        cells = phases.assign(cell=[_phase_cell(row) for row in phases.to_dict("records")])
        by_label = cells.pivot(index="label", columns="time", values="cell").loc[list(dict.fromkeys(phases["label"]))]
        title = "Milliseconds by phase, emulated / measured (error): mean over ranks, median over breakdown iterations"
        yield Table(by_label.reset_index(), (_POLICY, *(number(time, form="{}") for time in present)), title)
    errors = own(validation.errors)
    if len(errors):
        turned = errors.set_index("phase")[["typical", "quiet"]].T
        frame = turned.assign(of=["median time", f"{100 * QUIET:.0f} % quantile"])
        columns = [number(phase, form=lambda error: f"{100 * error:+.0f} %") for phase in errors["phase"]]
        title = (
            "Error of a rank's phase, median over cases: emulation's own in quiet iterations, the rest is disturbance"
        )
        yield Table(frame, (text("of", "of its"), *columns), title)
    alone = own(validation.alone)
    if len(alone):
        title = "The emulated expert phase, and the experts alone on the same rows outside of it; medians over batches"
        yield Table(alone, _ALONE, title)
    laws = own(validation.laws)
    if len(laws):
        slopes = {"slope_us": "slope_median", "slope_low_us": "slope_low", "slope_high_us": "slope_high"}
        title = "Times and loads, all cases together: least squares, slopes with their 95 % interval"
        yield Table(laws.rename(columns=slopes).assign(slope_is_interval=True), _LAWS, title)


def _phase_cell(row: Row) -> str:
    error = f" ({100 * (row['emulated_ms'] / row['real_ms'] - 1):+.0f} %)" if row["real_ms"] > 0 else ""
    return f"{row['emulated_ms']:.2f} / {row['real_ms']:.2f}{error}"


def _notes(validation: Validation, name: str, cases: pd.DataFrame) -> list[str]:
    threads, first = validation.threads, cases.iloc[0]
    notes = [
        f"links: {validation.links}",
        "waiting and comm: their sum does not depend on when exactly ranks meet; each alone does",
    ]
    if threads[0] == threads[1]:
        notes.append(f"compute threads: {threads[0]} of each real rank, and as many of the emulated one")
    for floor, words in (
        (
            "real_floor",
            "allowed: the measured 95 % interval times the measured noise floor, {}; the verdict is inconclusive where "
            f"its ends are further apart than a factor of {MAX_BAND:g} and the emulated speedup lies between them",
        ),
        ("moe_floor", "of MoE layers alone the measured noise floor is {}"),
        ("emulated_floor", "noise floor of the emulated run: {}; the verdict does not use it"),
    ):
        low, high = (first.get(f"{floor}_{end}") for end in ("low", "high"))
        if not missing(low):
            notes.append(words.format(f"{low:.3f} to {high:.3f}"))
    return notes + [f"warning: not comparable: {line}" for line in validation.unsound[name]]


def validation_figure(validation: Validation) -> Figure | None:
    """Speedups side by side with what the real run allows, and phases as pairs of bars; None without any speedup."""
    claims = validation.claims
    shown = [
        name for name, rows in claims.groupby("comparison_id", sort=False) if rows["real_speedup_median"].notna().any()
    ]
    if not shown:
        return None
    claims = claims[claims["comparison_id"].isin(shown)]
    facts = [validation.real.comparisons[name] for name in shown]
    phases = validation.phases
    if len(phases):
        phases = phases[phases["comparison_id"].isin(shown)]
        groups = [name for name in _BARS if (phases["real_ms"][phases["time"] == name] > 0).any()]
    else:
        groups = []
    # Measured cases; native stands once, for its repetition is the noise floor.
    cases = validation.cases[validation.cases["unmeasured"].isna() & (validation.cases["role"] != "noise")]
    drawn = {name: cases[cases["comparison_id"] == name].to_dict("records") for name in shown}
    heights = [1.0 + 0.68 * len(rows) for rows in drawn.values()]
    verdicts = [verdict for verdict in _VERDICT_LOOKS if verdict in set(claims["verdict"])]
    figure = sheet(
        "Emulated ranks held against real ones",
        f"Left: speedup of the {validation.timed} over native; measured with its 95 % interval, the grey band widens "
        "it by the measured noise floor. Right: mean over ranks, median over breakdown iterations; of each pair the "
        "upper bar is measured, the lower one emulated.",
        Footer(
            [*footer_lines(validation.real, facts), f"Emulated with links: {validation.links}"],
            [Origin(how, fact.workload.kind) for how in ("measured", "emulated") for fact in facts],
        ),
        [
            ("measured", Line2D([], [], **_REAL_LOOK)),
            *([("allowed", Patch(facecolor=NOISE_FILL))] if claims["allowed_low"].notna().any() else []),
            *((f"emulated: {verdict}", Line2D([], [], **_marks(verdict))) for verdict in verdicts),
            *((name, Patch(**PHASE_LOOKS[_BARS[name]])) for name in groups),
        ],
        width=13,
        body=sum(heights),
    )
    grid = figure.add_gridspec(len(shown), 2, height_ratios=heights, width_ratios=[1, 1.15])
    for place, (name, rows) in enumerate(drawn.items()):
        speedups, times = (figure.add_subplot(grid[place, column]) for column in (0, 1))
        panel_title(speedups, validation.real.comparisons[name].title, 5.0)
        _speedup_dots(speedups, rows)
        of_cases = [phases[(phases["comparison_id"] == name) & (phases["label"] == row["label"])] for row in rows]
        _phase_pairs(times, [one.set_index("time") for one in of_cases] if len(phases) else [], groups)
        _name_rows(times, [""] * len(rows))
        times.set_xlabel(f"time of one {validation.timed} (ms)")
    return figure


def _speedup_dots(axes: Axes, rows: Sequence[Row]) -> None:
    axes.use_sticky_edges = False  # a band that ends at the panel's rim would look cut off
    axes.axvline(1, color=INK, linewidth=1, zorder=1)
    for place, row in enumerate(rows):
        real, emulated = row["real_speedup_median"], row["emulated_speedup_median"]
        if missing(row["verdict"]) or missing(real) or missing(emulated):
            continue
        low, high = row["allowed_low"], row["allowed_high"]
        if not missing(low):
            axes.barh(place, high - low, left=low, height=0.5, color=NOISE_FILL, linewidth=0, zorder=1.5)
        axes.hlines(place, row["real_speedup_low"], row["real_speedup_high"], color=INK, linewidth=1.4, zorder=2)
        axes.plot([real], [place], zorder=2.5, **_REAL_LOOK)
        axes.plot([emulated], [place], zorder=3, **_marks(row["verdict"]))
    axes.set_xlabel("speedup (native = 1)")
    _name_rows(axes, [_row_name(row) for row in rows])


def _row_name(row: Row) -> str:
    name = wrap(row["label"], 2.2, 9)
    if row["role"] != "policy":
        return name
    return f"{name}\n{percent(row['real_dropped_share'])} % dropped, {percent(row['real_retained_mass'])} % mass kept"


def _phase_pairs(axes: Axes, cases: Sequence[pd.DataFrame], groups: Sequence[str]) -> None:
    """Of each case two stacked bars."""
    most = 0.0
    for place, times in enumerate(cases):
        for offset, run in ((-0.19, "real_ms"), (0.19, "emulated_ms")):
            if times.empty:
                continue
            end = 0.0
            for name in groups:
                look = PHASE_LOOKS[_BARS[name]]
                axes.barh(place + offset, times.at[name, run], left=end, height=0.34, linewidth=0.6, **look)
                end += times.at[name, run]
            label = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5}
            axes.annotate(milliseconds(end, 3), (end, place + offset), **label)
            most = max(most, end)
    axes.set_xlim(0, 1.1 * most if most else 1)


def _name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(np.arange(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _marks(verdict: str) -> dict[str, Any]:
    return {**_VERDICT_LOOKS[verdict], "linestyle": "none", "markersize": 7, "markeredgecolor": "white"}
