"""The results as plain text: one table per comparison, and what has to be known to read it.

A row never shows a speed without its fidelity. What weakens a number (noise, probes, time that no
phase covers, shared cores, a modelled workload) stands under the table that it weakens.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable

from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.words import (
    MODE_WORDS,
    NONE,
    NOT_FUSED,
    OVERSUBSCRIBED,
    count_words,
    hardware_words,
    milliseconds,
    percent,
    scale_words,
    workload_words,
)
from moe_ep_bench.measure.statistics import MIN_BATCHES, Estimate

# Aims of the timing protocol: above these a breakdown is told apart from what it breaks down.
MAX_UNACCOUNTED = 0.01
MAX_PROBE_OVERHEAD = 0.01

_HEADER = (
    "policy",
    "layer ms",
    "p90",
    "p99",
    "speedup",
    "verdict",
    "dropped %",
    "mass kept %",
    "output error",
    "slowest phase",
)
_LEFT = ("policy", "speedup", "verdict", "slowest phase")
_GAP = "  "
_REASON_WIDTH = 90


def summary_table(run: Run) -> str:
    """Render every comparison of a run as a table with its notes and warnings."""
    blocks = [_block(run, comparison) for comparison in analyse(run)]
    return "\n\n".join([*blocks, count_words(run)])


def _block(run: Run, comparison: ComparisonResult) -> str:
    facts = comparison.comparison
    replicas = f" x {facts.num_replicas} replicas" if facts.num_replicas > 1 else ""
    title = (
        f"{facts.title}: {MODE_WORDS[run.mode]}, {hardware_words(run, facts)}, EP {facts.num_ranks}{replicas}, "
        f"{facts.dtype}, {scale_words(facts.scale)}"
    )
    notes = [f"  {line}" for line in _notes(comparison)]
    warnings = [f"  warning: {line}" for line in warnings_of(comparison)]
    return "\n".join([title, "", *_table(comparison.results), "", *notes, *warnings])


def _table(results: Iterable[CaseResult]) -> list[str]:
    """Align measured cases in columns; a case that was not measured has its status and reason there instead."""
    rows = [_HEADER, *(_cells(result) for result in results)]
    full = [row for row in rows if len(row) == len(_HEADER)]
    widths = [max(len(row[column]) for row in full) for column in range(len(_HEADER))]
    widths[0] = max(len(row[0]) for row in rows)
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(_HEADER, row, widths, strict=False)
        ]
        lines.append(_GAP.join(cells).rstrip())
    lines.insert(1, _GAP.join("-" * width for width in widths))
    return lines


def _cells(result: CaseResult) -> tuple[str, ...]:
    case = result.case
    if not case.is_ok:
        reason = textwrap.shorten(case.reason or "no reason was recorded", _REASON_WIDTH, placeholder=" ...")
        return (case.label, f"{case.status}: {reason}")
    layer, fidelity, breakdown = result.layer, result.fidelity, result.breakdown
    times = (NONE,) * 3 if layer is None else tuple(map(milliseconds, (layer.median_ms, layer.p90_ms, layer.p99_ms)))
    # The ceiling's scores are not the model's, so keeping them whole says nothing about the model.
    if fidelity is None or case.role == "ceiling":
        kept = (NONE,) * 3
    else:
        kept = (percent(fidelity.dropped_share), percent(fidelity.retained_mass), _error(fidelity.output_error))
    speedup = "1" if case.role == "baseline" else estimate_words(result.speedup)
    role_verdicts = {"baseline": "baseline", "noise": "noise floor"}
    verdict = role_verdicts.get(case.role, result.verdict)
    return (case.label, *times, speedup, verdict, *kept, NONE if breakdown is None else breakdown.slowest_phase)


def estimate_words(estimate: Estimate | None) -> str:
    """``1.23 [1.20, 1.26]``, or ``1.23 (1.10..1.31)`` where there is no interval."""
    if estimate is None:
        return NONE
    low, median, high = (f"{value:.3f}" for value in (estimate.low, estimate.median, estimate.high))
    return f"{median} [{low}, {high}]" if estimate.is_interval else f"{median} ({low}..{high})"


def _notes(comparison: ComparisonResult) -> list[str]:
    facts, results = comparison.comparison, comparison.results
    notes = [workload_words(facts)]
    baseline = comparison.of_role("baseline")
    if baseline is not None and baseline.fidelity is not None:
        load = baseline.fidelity
        notes.append(
            f"imbalance under {baseline.case.label}: fullest expert {load.fullest_expert:.2f} x mean, "
            f"fullest rank {load.fullest_rank:.2f} x mean"
        )
    notes.append("speedup: slowest rank's layer time, native over case, median of pairs " + _spread_words(comparison))
    if comparison.floor is not None:
        low, high = comparison.floor.low, comparison.floor.high
        notes.append(f"noise floor: {low:.3f} to {high:.3f}, by which native run twice differs from itself")
    if comparison.of_role("ceiling") is not None:
        notes.append("ceiling: native on perfectly balanced scores; what balance alone could buy, no policy")
    notes += _worst("unaccounted time", {r: r.breakdown.unaccounted_share for r in results if r.breakdown})
    notes += _worst("probe overhead", {r: r.probe_overhead for r in results if r.probe_overhead is not None})
    if facts.random_weights and any(r.fidelity and not math.isnan(r.fidelity.output_error) for r in results):
        notes.append("output error: relative to native, with random weights; it is no measure of a model's accuracy")
    return notes


def _spread_words(comparison: ComparisonResult) -> str:
    if comparison.comparison.num_batches >= MIN_BATCHES:
        return "[95 % interval, bootstrapped over batches, then iterations]"
    return f"(min..max: fewer than {MIN_BATCHES} batches give no interval, and so no verdict)"


def _worst(what: str, values: dict[CaseResult, float]) -> list[str]:
    if not values:
        return []
    worst = max(values, key=lambda result: values[result])
    return [f"{what}: at worst {percent(values[worst])} % ({worst.case.label})"]


def warnings_of(comparison: ComparisonResult) -> list[str]:
    """What forbids or weakens a reading of these results, one line each."""
    facts, results = comparison.comparison, comparison.results
    warnings = []
    if comparison.of_role("baseline") is None:
        warnings.append("the baseline was not measured, so there are no speedups")
    elif comparison.floor is None:
        warnings.append("native was not measured a second time, so there is no noise floor and no verdict")
    again = comparison.of_role("noise")
    if again is not None and again.speedup is not None and again.speedup.is_interval:
        low, high = again.speedup.low, again.speedup.high
        if low > 1 or high < 1:
            warnings.append("native differs from itself: something drifts with the order of cases; the floor covers it")
    if facts.oversubscribed:
        warnings.append(OVERSUBSCRIBED)
    if any(result.breakdown and result.breakdown.unaccounted_share > MAX_UNACCOUNTED for result in results):
        warnings.append(f"phases leave more than {percent(MAX_UNACCOUNTED)} % of the time unaccounted for")
    if any(result.probe_overhead is not None and result.probe_overhead > MAX_PROBE_OVERHEAD for result in results):
        if facts.backend == "nccl":
            warnings.append(
                f"probes cost more than {percent(MAX_PROBE_OVERHEAD)} %: phase times are too long by about that"
            )
        else:
            warnings.append(
                "probes are not free on CPU ranks (gloo): read phase times as shares; speedups come from "
                "iterations without probes"
            )
    if not facts.permute_fused:
        warnings.append(NOT_FUSED)
    if facts.workload.kind == "recorded" and facts.workload.tail_model:
        warnings.append(
            f"scores beyond the recorded top-k are not recorded but modelled ({facts.workload.tail_model}): "
            "policies that look beyond the top-k depend on it"
        )
    return warnings


def _error(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.2g}"
