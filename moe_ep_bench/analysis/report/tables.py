"""The tables of a run: every case with its speedup and what it costs, where its time goes, and who the ranks were."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.activated import activated_by_case
from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.report.answer import short_words
from moe_ep_bench.analysis.report.parts import Cell, Column, Table, number_cell, text_cell
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.words import NONE, milliseconds
from moe_ep_bench.schema import TOTAL
from moe_ep_bench.timing.statistics import Estimate

# Of more ranks the slowest are shown: a page of a thousand rows a comparison is read by nobody.
MAX_RANKS = 64

ROLE_VERDICTS = {"baseline": "baseline", "noise": "noise floor", "ceiling": "ceiling"}
_WHOLE = 1.0005  # above it a table shows more than 100.0 %
_ADDS = "More than 100 % of the score mass is kept where a policy gives tokens experts beyond their top-k."
_WAITS = GROUPS["waiting"]


def overview(run: Run, comparisons: Sequence[ComparisonResult], anchors: Sequence[str]) -> Table:
    """A row per comparison, each linked to its section."""
    columns = (
        Column("comparison"),
        Column("answer", about="within the bounds of the answer above"),
        Column("case", about="the one to use, or the fastest where native is kept"),
        Column("speedup", True),
        Column("95 % interval", True, "smallest to largest pair in round brackets, where there is no interval"),
        Column("dropped %", True),
        Column("mass kept %", True),
        Column("balance", True, "speedup of native on perfectly balanced scores: the ceiling of balancing"),
        Column("not measured", True, "cases that failed or were skipped"),
    )
    rows = []
    for one, anchor in zip(comparisons, anchors, strict=True):
        words, result = short_words(one)
        chosen = result is not None and words == result.case.label
        ceiling = one.of_role("ceiling")
        rows.append(
            (
                Cell(one.comparison.title, target=anchor),
                Cell("use", mark="faster") if chosen else Cell(words),
                text_cell(None if result is None else result.case.label),
                *speedup_cells(None if result is None else result.speedup),
                *(fidelity_cells(result) if result is not None else (Cell(NONE),) * 3)[:2],
                number_cell(ceiling.speedup.median if ceiling and ceiling.speedup else None, "{:.3f}"),
                number_cell(sum(not each.case.is_ok for each in one.results), "{:.0f}"),
            )
        )
    return Table("All comparisons", columns, rows)


def cases_table(comparison: ComparisonResult) -> Table:
    """What each case gains and costs; one that was not measured says why."""
    activated = activated_by_case(comparison)
    columns = [
        Column("case"),
        Column("speedup", True, "slowest rank's layer time, native over case: median of pairs"),
        Column("95 % interval", True, "smallest to largest pair in round brackets, where there is no interval"),
        Column("verdict", about="the interval against the noise floor"),
        Column("dropped %", True, "of top-k pairs"),
        Column("mass kept %", True, "score mass of what is computed over that of the top-k"),
        Column("p50 ms", True, "layer time: of the slowest rank in each iteration without probes"),
        Column("p90 ms", True),
        Column("p99 ms", True),
        Column("output error", True, "relative to native; weights are random"),
        Column("fullest expert", True, "pairs over the mean of the model's own routing"),
        Column("fullest rank", True, "likewise"),
    ]
    if activated:
        columns.append(Column("activated", True, "experts with a token, on the rank with most of them"))
    columns.append(Column("slowest phase", about="the longest phase of the slowest rank"))
    rows = []
    for result in comparison.results:
        case, layer = result.case, result.layer
        verdict = ROLE_VERDICTS.get(case.role, result.verdict)
        mark = verdict if verdict in ("faster", "slower") else ""
        if not case.is_ok:
            verdict, mark = f"{case.status}: {case.reason or 'no reason was recorded'}", "lost"
        times = (None,) * 3 if layer is None else (layer.median_ms, layer.p90_ms, layer.p99_ms)
        speedup = (Cell("1", 1.0), Cell(NONE)) if case.role == "baseline" else speedup_cells(result.speedup)
        dropped, kept, error = fidelity_cells(result)
        loads = (
            (None, None) if result.fidelity is None else (result.fidelity.fullest_expert, result.fidelity.fullest_rank)
        )
        rows.append(
            (
                Cell(case.label),
                *speedup,
                Cell(verdict, mark=mark),
                dropped,
                kept,
                *(Cell(NONE) if time_ms is None else Cell(milliseconds(time_ms), time_ms) for time_ms in times),
                error,
                *(number_cell(load, "{:.2f}") for load in loads),
                *([number_cell(activated.get(case.case_id), "{:.1f}")] if activated else []),
                text_cell(None if result.breakdown is None else result.breakdown.slowest_phase),
            )
        )
    adds = any(result.fidelity is not None and result.fidelity.retained_mass > _WHOLE for result in comparison.policies)
    return Table("Cases", columns, rows, _ADDS if adds else "")


def phases_table(comparison: ComparisonResult) -> Table | None:
    """Where each case's time goes; None without breakdown iterations."""
    broken = [(result, result.breakdown) for result in comparison.results if result.breakdown is not None]
    groups = [group for group in GROUPS if any(one.group_ms[group] > 0 for _, one in broken)]
    if not groups:
        return None
    columns = (
        Column("case"),
        Column("layer ms", True, "of the slowest rank, probes included"),
        *(Column(f"{group} ms", True, " + ".join(GROUPS[group])) for group in groups),
        Column("unaccounted %", True, "of the slowest rank's time, what no phase covers"),
        Column("choosing %", True, "of the slowest rank's time, the phase policy"),
        Column("probes %", True, "median with probes over median without, less 1"),
    )
    rows = []
    for result, one in broken:
        overhead = result.probe_overhead
        shares = (one.unaccounted_share, one.policy_share, overhead)
        rows.append(
            (
                Cell(result.case.label),
                Cell(milliseconds(one.layer_ms), one.layer_ms),
                *(Cell(milliseconds(one.group_ms[group]), one.group_ms[group]) for group in groups),
                *(number_cell(None if share is None else 100 * share, "{:.1f}") for share in shares),
            )
        )
    note = "Mean over ranks, so that waiting shows; median over iterations with probes. Phases exclude each other."
    return Table("Phases", columns, rows, note)


def ranks_table(comparison: ComparisonResult, subject: CaseResult | None) -> Table | None:
    """What each rank had to do and how long it took, under native and under one policy; None without native."""
    native = comparison.of_role("baseline")
    if native is None or native.case.timings.empty:
        return None
    shown = [("native", native)] + ([(subject.case.label, subject)] if subject is not None else [])
    columns = [Column("rank"), Column("host")]
    for name, _ in shown:
        columns += [
            Column(f"{name}: p50 ms", True, "this rank's own time of a layer, iterations without probes"),
            Column("slowest in %", True, "of these iterations"),
            Column("waiting ms", True, "for slower ranks, iterations with probes"),
            Column("load", True, "pairs over the mean rank's under the model's own routing"),
        ]
    columns += [Column("memory GiB", True, "the most that it held"), Column("matmul TFLOP/s", True, "a square one")]
    of_ranks = comparison.conditions[0].ranks if comparison.conditions else []
    numbers = [_rank_numbers(result) for _, result in shown]
    facts, world_size = comparison.comparison, comparison.comparison.world_size
    order = sorted(range(world_size), key=lambda rank: -numbers[0]["time_ms"].get(rank, 0.0))[:MAX_RANKS]
    rows = []
    for rank in sorted(order):
        # One device in place of all ranks has one set of conditions.
        its = of_ranks[rank if len(of_ranks) == world_size else 0] if of_ranks else None
        cells = [Cell(f"{rank}", float(rank)), text_cell(its and its.hostname)]
        for (_, result), of_rank in zip(shown, numbers, strict=True):
            load = None if result.fidelity is None else float(result.fidelity.rank_load[facts.expert_rank(rank)])
            time_ms = of_rank["time_ms"].get(rank)
            cells += [
                Cell(NONE) if time_ms is None else Cell(milliseconds(time_ms), time_ms),
                number_cell(of_rank["slowest_percent"].get(rank), "{:.0f}"),
                number_cell(of_rank["waiting_ms"].get(rank), "{:.3g}"),
                number_cell(load, "{:.2f}"),
            ]
        peak = its.peak_memory_bytes if its else None
        cells += [
            number_cell(None if peak is None else peak / 2**30, "{:.2f}"),
            number_cell(its.ceilings.matmul_tflops if its else None),
        ]
        rows.append(tuple(cells))
    hidden = world_size - len(rows)
    note = f"The {len(rows)} slowest of {world_size} ranks under native." if hidden else ""
    return Table("Ranks", columns, rows, note)


def _rank_numbers(result: CaseResult) -> dict[str, dict[int, float]]:
    """By rank: median time without probes, how often it was the slowest, median waiting with probes."""
    return {
        "time_ms": (_plain_totals(result.case).groupby("rank")["time_us"].median() / 1e3).to_dict(),
        "slowest_percent": _slowest_percent(result.case),
        "waiting_ms": _waiting_ms(result.case),
    }


def _plain_totals(case: Case) -> pd.DataFrame:
    return case.timings[(case.timings["kind"] == "plain") & (case.timings["phase"] == TOTAL)]


def _slowest_percent(case: Case) -> dict[int, float]:
    totals = _plain_totals(case)
    if totals.empty:
        return {}
    table = totals.pivot(index=["launch", "batch", "iteration"], columns="rank", values="time_us")
    ranks = table.columns.to_numpy()[np.argmax(table.to_numpy(), axis=1)]
    return {int(rank): 100 * float((ranks == rank).mean()) for rank in table.columns}


def _waiting_ms(case: Case) -> dict[int, float]:
    rows = case.timings[case.timings["kind"] == "breakdown"]
    if rows.empty:
        return {}
    iterations = ["rank", "launch", "batch", "iteration"]
    waited = rows["time_us"].where(rows["phase"].isin(_WAITS), 0.0)
    return (waited.groupby([rows[name] for name in iterations]).sum().groupby("rank").median() / 1e3).to_dict()


def speedup_cells(speedup: Estimate | None) -> tuple[Cell, Cell]:
    """A speedup and its spread; dashes where there is none."""
    if speedup is None:
        return Cell(NONE), Cell(NONE)
    low, high = f"{speedup.low:.3f}", f"{speedup.high:.3f}"
    spread = f"[{low}, {high}]" if speedup.is_interval else f"({low}..{high})"
    return Cell(f"{speedup.median:.3f}", speedup.median), Cell(spread, speedup.low)


def fidelity_cells(result: CaseResult) -> tuple[Cell, Cell, Cell]:
    """Dropped share, mass kept, output error. The ceiling's scores are not the model's: they say nothing of it."""
    fidelity = result.fidelity
    if fidelity is None or result.case.role == "ceiling":
        return (Cell(NONE),) * 3
    error = fidelity.output_error
    return (
        number_cell(100 * fidelity.dropped_share, "{:.1f}"),
        number_cell(100 * fidelity.retained_mass, "{:.1f}"),
        Cell(NONE) if math.isnan(error) else number_cell(error, "{:.2g}"),
    )
