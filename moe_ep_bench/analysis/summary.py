"""The results as plain text: one table per comparison, and what has to be known to read it.

A row never shows a speed without its fidelity. What weakens a number (noise, probes, time that no
phase covers, shared cores, a modelled workload) stands under the table that it weakens.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping

from moe_ep_bench.analysis.activated import Steps, activated_by_case, decode_steps, decode_words
from moe_ep_bench.analysis.graphs import graph_pairs, graph_words
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.notes import notes_of, warnings_of
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult, analyse
from moe_ep_bench.analysis.tables import aligned
from moe_ep_bench.analysis.words import (
    NONE,
    count_words,
    estimate_words,
    hardware_words,
    milliseconds,
    mode_words,
    percent,
    scale_words,
)

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
# Stands before the slowest phase where steps leave experts idle.
_ACTIVATED = "activated"
_RATES_HEADER = (
    "policy",
    "crossing MB",
    "deduplicated",
    "dispatch GB/s",
    "bus",
    "combine GB/s",
    "bus",
    "expert TFLOP/s",
    "of matmul %",
    "of copy %",
)
_LEFT = ("policy", "speedup", "verdict", "slowest phase")
_REASON_WIDTH = 90


def summary_table(run: Run) -> str:
    """Render every comparison of a run as a table with its notes and warnings."""
    comparisons = analyse(run)
    blocks = [_block(run, comparison) for comparison in comparisons]
    blocks += [_decode_block(steps) for steps in decode_steps(run, comparisons)]
    blocks += ["\n".join(graph_words(pair)) for pair in graph_pairs(comparisons)]
    return "\n\n".join([*blocks, count_words(run)])


def _decode_block(steps: Steps) -> str:
    """What a step takes by the experts that it activates."""
    return "\n".join([f"{steps.title}: time and activated experts", *(f"  {line}" for line in decode_words(steps))])


def _block(run: Run, comparison: ComparisonResult) -> str:
    facts = comparison.comparison
    replicas = f" x {facts.num_replicas} replicas" if facts.num_replicas > 1 else ""
    title = (
        f"{facts.title}: {mode_words(run, facts)}, {hardware_words(run, facts)}, {facts.ranks_words}{replicas}, "
        f"{facts.dtype}, {scale_words(facts.scale)}"
    )
    activated = activated_by_case(comparison)
    header = (*_HEADER[:-1], _ACTIVATED, _HEADER[-1]) if activated else _HEADER
    tables = [aligned(header, [_cells(result, activated) for result in comparison.results], _LEFT)]
    rated = [result for result in comparison.results if result.rates is not None]
    if rated:
        tables.append(
            [_ceilings_words(comparison), *aligned(_RATES_HEADER, [_rate_cells(result) for result in rated], _LEFT)]
        )
    notes = [f"  {line}" for line in notes_of(comparison)]
    if activated:
        held = facts.num_experts // facts.num_ranks
        notes.append(
            f"  activated: experts with a token on the rank that has most of them, of {held}; mean over batches"
        )
    warnings = [f"  warning: {line}" for line in warnings_of(comparison, run)]
    return "\n".join([title, *(line for table in tables for line in ("", *table)), "", *notes, *warnings])


def _ceilings_words(comparison: ComparisonResult) -> str:
    """What the rates are held against, as measured beside the run."""
    ceilings = [rank.ceilings for launch in comparison.conditions for rank in launch.ranks]
    tflops, gbps = min(c.matmul_tflops for c in ceilings), min(c.copy_gbps for c in ceilings)
    size = ceilings[0].matmul_size
    return (
        f"Rates in breakdown iterations (slowest rank's matmul {size}^3: {tflops:.3g} TFLOP/s, copy: {gbps:.4g} GB/s)"
    )


def _rate_cells(result: CaseResult) -> tuple[str, ...]:
    rates = result.rates
    assert rates is not None
    links = (rates.dispatch_gbps, rates.dispatch_bus_gbps, rates.combine_gbps, rates.combine_bus_gbps)
    return (
        result.case.label,
        f"{rates.crossing_pair_bytes / 1e6:.2f}",
        f"{rates.crossing_copy_bytes / 1e6:.2f}",
        *(NONE if gbps is None else f"{gbps:.3g}" for gbps in links),
        f"{rates.experts_tflops:.3g}",
        percent(rates.experts_of_matmul),
        percent(rates.experts_of_copy),
    )


def _cells(result: CaseResult, activated: Mapping[str, float]) -> tuple[str, ...]:
    """A case's row; ``activated`` by case id, empty where the table has no such column."""
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
    count = activated.get(case.case_id)
    counted = () if not activated else (NONE,) if count is None else (f"{count:.1f}",)
    slowest = NONE if breakdown is None else breakdown.slowest_phase
    return (case.label, *times, speedup, verdict, *kept, *counted, slowest)


def _error(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.2g}"
