"""What ``moe-ep-bench validate`` prints, its two tables as CSV, and its figure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.origins import Footer, Origin
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
from moe_ep_bench.analysis.validation import MAX_BAND, CaseCheck, ComparisonCheck, MoeCheck, Validation
from moe_ep_bench.analysis.validation_times import QUIET
from moe_ep_bench.analysis.words import (
    NONE,
    aligned,
    estimate_words,
    footer_lines,
    hardware_words,
    milliseconds,
    percent,
    scale_words,
)
from moe_ep_bench.files import atomic_path

# The times that are printed, a whole model's pass before its MoE layers; all that there are stand in the CSV.
PRINTED = (
    "attention",
    "dense, norms and ends",
    "MoE layers",
    "shared",
    "gate and policy",
    "permute and metadata",
    "comm",
    "experts",
    "waiting",
    "waiting and comm",
    "unaccounted",
)
_BARS = {
    "attention": "attention",
    "dense, norms and ends": "rest",
    "shared": "shared",
    "gate and policy": "gate",
    "permute and metadata": "permute",
    "comm": "comm",
    "experts": "experts",
    "waiting": "waiting",
    "unaccounted": "unaccounted",
}
assert set(_BARS.values()) == {"attention", "rest", *GROUPS}

_VERDICT_LOOKS = {
    "agrees": {"color": "#009E73", "marker": "o"},
    "differs": {"color": "#D55E00", "marker": "X"},
    "cannot say": {"color": MUTED, "marker": "D"},
}
_REAL_LOOK = {"color": INK, "marker": "|", "markersize": 13, "markeredgewidth": 1.8, "linestyle": "none"}


def validation_text(validation: Validation) -> str:
    """Tables and notes of every comparison; the last line says how many speedups agree."""
    blocks = [_block(validation, check) for check in validation.comparisons]
    return "\n\n".join([*blocks, verdict_line(validation)])


def verdict_line(validation: Validation) -> str:
    """``k of n speedups agree within the real run's noise; largest difference x %``."""
    claims = [case for check in validation.comparisons for case in check.claims]
    agreeing = sum(case.agreement == "agrees" for case in claims)
    undecided = sum(case.agreement == "cannot say" for case in claims)
    differences = [abs(case.difference) for case in claims if case.difference is not None]
    largest = f"; largest difference {100 * max(differences):.1f} %" if differences else ""
    line = f"{agreeing} of {len(claims)} speedups agree within the real run's noise{_silent(undecided)}{largest}"
    return line + _moe_verdict([one for check in validation.comparisons for one in check.moe])


def _moe_verdict(checks: Sequence[MoeCheck]) -> str:
    if not checks:
        return ""
    differences = [abs(one.difference) for one in checks if one.difference is not None]
    largest = f", largest {100 * max(differences):.1f} %" if differences else ""
    agreeing, undecided = (sum(one.agreement == word for one in checks) for word in ("agrees", "cannot say"))
    return f"; of MoE layers alone {agreeing} of {len(checks)}{_silent(undecided)}{largest}"


def _silent(undecided: int) -> str:
    return f" ({undecided} cannot be judged)" if undecided else ""


def _block(validation: Validation, check: ComparisonCheck) -> str:
    facts = check.real.comparison
    heading = (
        f"{facts.title}: emulated on one device, held against {hardware_words(validation.real, facts)}, "
        f"{facts.dtype}, {scale_words(facts.scale)}"
    )
    parts = [
        [heading],
        _speedup_table(check),
        _moe_table(check),
        _phase_table(check),
        _error_table(check),
        _alone_table(check),
    ]
    parts.append(_law_lines(check))
    return "\n\n".join("\n".join(lines) for lines in [*parts, _note_lines(validation, check)] if lines)


def _speedup_table(check: ComparisonCheck) -> list[str]:
    header = ["policy", "measured ms", "emulated ms", "ratio", "measured speedup", "allowed", "emulated speedup"]
    header += ["difference", "verdict", "dropped %", "mass kept %"]
    rows = [[case.label, case.unmeasured] if case.unmeasured else _speedup_cells(case) for case in check.cases]
    return aligned([header, *rows], left=(0, 4, 6, 8))


def _speedup_cells(case: CaseCheck) -> list[str]:
    assert case.real.layer is not None
    assert case.emulated.layer is not None
    real_ms, emulated_ms = case.real.layer.median_ms, case.emulated.layer.median_ms
    references = {"baseline": "baseline", "noise": "noise floor"}
    return [
        case.label,
        milliseconds(real_ms),
        milliseconds(emulated_ms),
        f"{emulated_ms / real_ms:.3f}",
        *(
            [NONE, NONE, NONE]
            if case.real.case.role == "baseline"
            else [
                estimate_words(case.real.speedup),
                _band_words(case.band),
                estimate_words(case.emulated.speedup),
            ]
        ),
        _difference_words(case.difference),
        case.agreement or references[case.real.case.role],
        *_fidelity_cells(case),
    ]


def _moe_table(check: ComparisonCheck) -> list[str]:
    if not check.moe:
        return []
    header = ["policy", "measured speedup", "allowed", "emulated speedup", "difference", "verdict"]
    rows = [
        [
            one.label,
            estimate_words(one.real),
            _band_words(one.band),
            estimate_words(one.emulated),
            _difference_words(one.difference),
            one.agreement,
        ]
        for one in check.moe
    ]
    return [
        "MoE layers alone, the slowest rank of breakdown iterations: a pass dilutes what is wrong with them",
        *aligned([header, *rows], left=(0, 1, 3, 5)),
    ]


def _band_words(band: tuple[float, float] | None) -> str:
    return NONE if band is None else f"{band[0]:.3f} to {band[1]:.3f}"


def _difference_words(difference: float | None) -> str:
    return NONE if difference is None else f"{100 * difference:+.1f} %"


def _fidelity_cells(case: CaseCheck) -> list[str]:
    """Dropped share and mass kept; the ceiling's scores are not the model's, so it has none."""
    fidelity = case.real.fidelity
    if fidelity is None or case.real.case.role == "ceiling":
        return [NONE, NONE]
    return [percent(fidelity.dropped_share), percent(fidelity.retained_mass)]


def _phase_table(check: ComparisonCheck) -> list[str]:
    cases = [case for case in check.cases if case.real_ms and case.emulated_ms]
    shown = [name for name in PRINTED if any(case.real_ms.get(name) or case.emulated_ms.get(name) for case in cases)]
    if not shown:
        return []
    rows = [[case.label, *(_phase_cell(case.emulated_ms[t], case.real_ms[t]) for t in shown)] for case in cases]
    return [
        "Milliseconds by phase, emulated / measured (error): mean over ranks, median over breakdown iterations",
        *aligned([["policy", *shown], *rows], left=(0,)),
    ]


def _phase_cell(emulated_ms: float, real_ms: float) -> str:
    error = f" ({100 * (emulated_ms / real_ms - 1):+.0f} %)" if real_ms > 0 else ""
    return f"{emulated_ms:.2f} / {real_ms:.2f}{error}"


def _error_table(check: ComparisonCheck) -> list[str]:
    if not check.phase_errors:
        return []
    rows = [
        ["median time", *(f"{100 * error.typical:+.0f} %" for error in check.phase_errors)],
        [f"{100 * QUIET:.0f} % quantile", *(f"{100 * error.quiet:+.0f} %" for error in check.phase_errors)],
    ]
    return [
        "Error of a rank's phase, median over cases: emulation's own in quiet iterations, the rest is disturbance",
        *aligned([["of its", *(error.phase for error in check.phase_errors)], *rows], left=(0,)),
    ]


def _alone_table(check: ComparisonCheck) -> list[str]:
    if check.alone.empty:
        return []
    rows = [
        [one.label, str(one.rank), f"{one.rows:,.0f}", f"{one.layer_ms:.2f}", f"{one.alone_ms:.2f}", f"{one.ratio:.3f}"]
        for one in check.alone.itertuples()
    ]
    return [
        "The emulated expert phase, and the experts alone on the same rows outside of the layer (medians over batches)",
        *aligned([["policy", "rank", "rows", "in the layer ms", "alone ms", "ratio"], *rows], left=(0,)),
    ]


def _law_lines(check: ComparisonCheck) -> list[str]:
    rows = []
    if check.timed == "layer":
        words = ("expert phase of a rank, over its rows", "layer time, over the largest load")
    else:
        words = ("expert phases of a rank, over its rows", "the pass, over its layers' largest loads")
    for what, laws in (("emulated", check.emulated_laws), ("measured", check.real_laws)):
        for law, fit in zip(words, (laws.experts, laws.layer), strict=True):
            if fit is not None:
                # Microseconds a row are milliseconds a thousand rows.
                slope = f"{fit.slope_us:.3f} [{fit.slope_low_us:.3f}, {fit.slope_high_us:.3f}]"
                rows.append([what, law, f"{fit.intercept_us / 1e3:.3f}", slope, f"{fit.r2:.4f}", str(fit.num_points)])
        if laws.throughput_r2 is not None:
            law = "tokens per second, over 1 / largest load"
            rows.append([what, law, NONE, NONE, f"{laws.throughput_r2:.4f}", NONE])
    if not rows:
        return []
    return [
        "Times and loads, all cases together: least squares, slopes with their 95 % interval",
        *aligned([["run", "law", "ms at no load", "ms per 1,000 rows", "R2", "points"], *rows], left=(0, 1, 3)),
    ]


def _note_lines(validation: Validation, check: ComparisonCheck) -> list[str]:
    threads = check.threads
    notes = [
        f"links: {validation.links}",
        "waiting and comm: their sum does not depend on when exactly ranks meet; each alone does",
    ]
    if threads[0] == threads[1]:
        notes.append(f"compute threads: {threads[0]} of each real rank, and as many of the emulated one")
    if check.real.floor is not None:
        low, high = check.real.floor.low, check.real.floor.high
        notes.append(
            f"allowed: the measured 95 % interval times the measured noise floor, {low:.3f} to {high:.3f}; the verdict "
            f"is cannot say where its ends are further apart than a factor of {MAX_BAND:g} and the emulated speedup "
            "lies between them"
        )
    if check.moe_floor is not None:
        low, high = check.moe_floor.low, check.moe_floor.high
        notes.append(f"of MoE layers alone the measured noise floor is {low:.3f} to {high:.3f}")
    if check.emulated.floor is not None:
        low, high = check.emulated.floor.low, check.emulated.floor.high
        notes.append(f"noise floor of the emulated run: {low:.3f} to {high:.3f}; the verdict does not use it")
    return [f"  {line}" for line in notes] + [f"  warning: not comparable: {line}" for line in check.unsound]


def write_report(validation: Validation) -> list[Path]:
    """Write ``validation.txt``, the two CSV files and the figure; return their paths."""
    files = validation.files
    with atomic_path(files.text) as temporary:
        temporary.write_text(validation_text(validation) + "\n")
    tables = {
        files.cases_table: [_case_row(check, case) for check, case in _all(validation)],
        files.phases_table: [row for check, case in _all(validation) for row in _phase_rows(check, case)],
    }
    for path, rows in tables.items():
        if rows:
            _write_csv(path, rows)
    drawn = []
    with house_style():
        figure = validation_figure(validation)
        for file_format in DEFAULT_FORMATS if figure is not None else ():
            assert figure is not None
            path = files.figures / f"validation.{file_format}"
            save(figure, path, file_format)
            drawn.append(path)
    return [files.text, *(path for path, rows in tables.items() if rows), *drawn]


def _all(validation: Validation) -> list[tuple[ComparisonCheck, CaseCheck]]:
    return [(check, case) for check in validation.comparisons for case in check.cases]


def _case_row(check: ComparisonCheck, case: CaseCheck) -> dict[str, Any]:
    row: dict[str, Any] = {
        "comparison": check.real.comparison.title,
        "policy": case.label,
        "role": case.real.case.role,
        "unmeasured": case.unmeasured or None,
    }
    for what, result in (("real", case.real), ("emulated", case.emulated)):
        row[f"{what}_{check.timed}_ms"] = result.layer and result.layer.median_ms
        speedup = result.speedup
        row[f"{what}_speedup"] = speedup and speedup.median
        row[f"{what}_low"] = speedup and speedup.low
        row[f"{what}_high"] = speedup and speedup.high
    return {
        **row,
        "is_interval": case.real.speedup and case.real.speedup.is_interval,
        "allowed_low": case.band and case.band[0],
        "allowed_high": case.band and case.band[1],
        "difference": case.difference,
        "verdict": case.agreement,
        "dropped_share": case.real.fidelity and case.real.fidelity.dropped_share,
        "retained_mass": case.real.fidelity and case.real.fidelity.retained_mass,
        **(_moe_columns(check, case) if check.timed == "pass" else {}),
    }


def _moe_columns(check: ComparisonCheck, case: CaseCheck) -> dict[str, Any]:
    one = next((moe for moe in check.moe if moe.label == case.label), None)
    row: dict[str, Any] = {}
    for what, speedup in (("real", one and one.real), ("emulated", one and one.emulated)):
        row[f"{what}_moe_speedup"] = speedup and speedup.median
        row[f"{what}_moe_low"] = speedup and speedup.low
        row[f"{what}_moe_high"] = speedup and speedup.high
    return {
        **row,
        "moe_allowed_low": one and one.band and one.band[0],
        "moe_allowed_high": one and one.band and one.band[1],
        "moe_verdict": one and one.agreement,
    }


def _phase_rows(check: ComparisonCheck, case: CaseCheck) -> list[dict[str, Any]]:
    if not (case.real_ms and case.emulated_ms):
        return []
    return [
        {
            "comparison": check.real.comparison.title,
            "policy": case.label,
            "role": case.real.case.role,
            "time": name,
            "real_ms": case.real_ms[name],
            "emulated_ms": case.emulated_ms[name],
        }
        for name in case.real_ms
    ]


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with atomic_path(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def validation_figure(validation: Validation) -> Figure | None:
    """Speedups side by side with what the real run allows, and phases as pairs of bars; None without any speedup."""
    checks = [check for check in validation.comparisons if any(case.real.speedup for case in check.claims)]
    if not checks:
        return None
    facts = [check.real.comparison for check in checks]
    verdicts = [
        verdict for verdict in _VERDICT_LOOKS if any(c.agreement == verdict for ch in checks for c in ch.claims)
    ]
    any_band = any(case.band is not None for check in checks for case in check.claims)
    groups = [name for name in _BARS if any(case.real_ms.get(name) for check in checks for case in check.cases)]
    heights = [1.0 + 0.68 * len(_drawn(check)) for check in checks]
    figure = sheet(
        "Emulated ranks held against real ones",
        f"Left: speedup of the {checks[0].timed} over native; measured with its 95 % interval, the grey band widens "
        "it by the measured noise floor. Right: mean over ranks, median over breakdown iterations; of each pair the "
        "upper bar is measured, the lower one emulated.",
        Footer(
            [*footer_lines(validation.real, facts), f"Emulated with links: {validation.links}"],
            [Origin(how, fact.workload.kind) for how in ("measured", "emulated") for fact in facts],
        ),
        [
            ("measured", Line2D([], [], **_REAL_LOOK)),
            *([("allowed", Patch(facecolor=NOISE_FILL))] if any_band else []),
            *((f"emulated: {verdict}", Line2D([], [], **_marks(verdict))) for verdict in verdicts),
            *((name, Patch(**PHASE_LOOKS[_BARS[name]])) for name in groups),
        ],
        width=13,
        body=sum(heights),
    )
    grid = figure.add_gridspec(len(checks), 2, height_ratios=heights, width_ratios=[1, 1.15])
    for row, check in enumerate(checks):
        speedups, phases = (figure.add_subplot(grid[row, column]) for column in (0, 1))
        panel_title(speedups, check.real.comparison.title, 5.0)
        cases = _drawn(check)
        _speedup_dots(speedups, cases)
        _phase_pairs(phases, cases, groups)
        phases.set_xlabel(f"time of one {check.timed} (ms)")
    return figure


def _drawn(check: ComparisonCheck) -> list[CaseCheck]:
    """Measured cases; native stands once, for its repetition is the noise floor."""
    return [case for case in check.cases if not case.unmeasured and case.real.case.role != "noise"]


def _speedup_dots(axes: Axes, cases: list[CaseCheck]) -> None:
    axes.use_sticky_edges = False  # a band that ends at the panel's rim would look cut off
    axes.axvline(1, color=INK, linewidth=1, zorder=1)
    for place, case in enumerate(cases):
        real, emulated = case.real.speedup, case.emulated.speedup
        if case.agreement is None or real is None or emulated is None:
            continue
        if case.band is not None:
            low, high = case.band
            axes.barh(place, high - low, left=low, height=0.5, color=NOISE_FILL, linewidth=0, zorder=1.5)
        axes.hlines(place, real.low, real.high, color=INK, linewidth=1.4, zorder=2)
        axes.plot([real.median], [place], zorder=2.5, **_REAL_LOOK)
        axes.plot([emulated.median], [place], zorder=3, **_marks(case.agreement))
    axes.set_xlabel("speedup (native = 1)")
    _name_rows(axes, [_row_name(case) for case in cases])


def _row_name(case: CaseCheck) -> str:
    name = wrap(case.label, 2.2, 9)
    if case.real.case.role != "policy":
        return name
    dropped, kept = _fidelity_cells(case)
    return f"{name}\n{dropped} % dropped, {kept} % mass kept"


def _phase_pairs(axes: Axes, cases: list[CaseCheck], groups: Sequence[str]) -> None:
    most = 0.0
    for place, case in enumerate(cases):
        for offset, times_ms in ((-0.19, case.real_ms), (0.19, case.emulated_ms)):
            end = 0.0
            for name in groups if times_ms else ():
                look = PHASE_LOOKS[_BARS[name]]
                axes.barh(place + offset, times_ms[name], left=end, height=0.34, linewidth=0.6, **look)
                end += times_ms[name]
            if times_ms:
                axes.annotate(
                    milliseconds(end, 3),
                    (end, place + offset),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7.5,
                )
            most = max(most, end)
    axes.set_xlim(0, 1.1 * most if most else 1)
    _name_rows(axes, [""] * len(cases))


def _name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(np.arange(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _marks(verdict: str) -> dict[str, Any]:
    return {**_VERDICT_LOOKS[verdict], "linestyle": "none", "markersize": 7, "markeredgecolor": "white"}
