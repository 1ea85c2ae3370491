"""The tables of layers and of whole models: which columns of ``frames.speedups`` people read, and what stands below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from moe_ep_bench.analysis.activated import decode_steps, decode_words
from moe_ep_bench.analysis.frames import speedups
from moe_ep_bench.analysis.graphs import graph_pairs, graph_table
from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.notes import notes_of, warnings_of
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
from moe_ep_bench.analysis.speedups import ComparisonResult, analyse
from moe_ep_bench.analysis.whole import WholeComparison, analyse_whole, layers_ms, whole_notes
from moe_ep_bench.analysis.words import count_words, hardware_words, mode_words, scale_words

_REASON_WIDTH = 90
_ROUNDING = 1e-6  # shares are sums of float32
# What a speedup is, how certain it is, and what is extrapolated: even a caption says it.
_CAPTION = ("speedup:", "end to end:", "noise floor:", "extrapolated:")


def _kept(column: Column) -> Column:
    """What a policy keeps; nothing of the ceiling, whose scores are not the model's."""
    return replace(column, cell=lambda row: NONE if row["role"] == "ceiling" else column.cell(row))


_COST = (_kept(percentage("dropped_share", "dropped %")), _kept(percentage("retained_mass", "mass kept %")))
_LAYER = (
    text("label", "policy"),
    number("median_ms", "layer ms", milliseconds),
    number("p90_ms", "p90", milliseconds),
    number("p99_ms", "p99", milliseconds),
    interval("speedup", "speedup", one="baseline"),
    interval("over_topk", "over topk"),
    text("verdict"),
    *_COST,
    _kept(number("output_error", "output error", "{:.2g}")),
)
_ACTIVATED = number("activated_fullest_rank", "activated", "{:.1f}")
_SLOWEST = text("breakdown_slowest_phase", "slowest phase")
_RATES = (
    text("label", "policy"),
    number("crossing_pair_bytes", "crossing MB", lambda size: f"{size / 1e6:.2f}"),
    number("crossing_copy_bytes", "deduplicated", lambda size: f"{size / 1e6:.2f}"),
    number("dispatch_gbps", "dispatch GB/s", "{:.3g}"),
    number("dispatch_bus_gbps", "bus", "{:.3g}"),
    number("combine_gbps", "combine GB/s", "{:.3g}"),
    number("combine_bus_gbps", "bus", "{:.3g}"),
    number("experts_tflops", "expert TFLOP/s", "{:.3g}"),
    percentage("experts_of_matmul", "of matmul %"),
    percentage("experts_of_copy", "of copy %"),
)
_MODEL = (
    text("label", "policy"),
    number("median_ms", "pass ms", milliseconds),
    number("p90_ms", "p90", milliseconds),
    interval("speedup", "end to end", one="baseline"),
    interval("over_topk", "over topk"),
    text("verdict"),
    number("moe_ms", "MoE ms", milliseconds),
    percentage("moe_share", "MoE share %"),
    interval("moe_speedup", "MoE speedup", one="baseline"),
    number("by_amdahl", "by Amdahl"),
    number("policy_ms", "policy ms", milliseconds),
    number("tokens_per_s", "tokens/s", "{:,.0f}"),
    number("tokens_per_s_per_rank", "per rank", "{:,.0f}"),
    *_COST,
)
_CUT = (
    number("all_layers_ms_extrapolated", "all layers ms, extrapolated", milliseconds),
    number("speedup_extrapolated", "end to end, extrapolated"),
)


def run_tables(run: Run, cases: Sequence[Case] | None = None) -> list[Table]:
    """The main table of every comparison, with what has to be known to read it.

    Args:
        cases: which rows; the default is all.
    """
    frame = speedups(run)
    if cases is not None:
        frame = frame[frame["case_id"].isin([case.case_id for case in cases])]
    comparisons: list[ComparisonResult | WholeComparison]
    comparisons = [*(analyse_whole(run) if run.scope == "model" else analyse(run))]
    tables = []
    for one in comparisons:
        comparison = one.comparison if isinstance(one, WholeComparison) else one
        rows = frame[frame["comparison_id"] == comparison.results[0].case.comparison_id]
        if rows.empty:
            continue
        if isinstance(one, WholeComparison):
            columns = [*_MODEL, *(_CUT if one.is_cut else ())]
            notes = whole_notes(one)
        else:
            columns = [*_LAYER, *([_ACTIVATED] if rows["activated_fullest_rank"].notna().any() else []), _SLOWEST]
            notes = [*notes_of(one), *_activated_notes(one, rows)]
        if (rows.loc[rows["role"] != "ceiling", "retained_mass"] > 1 + _ROUNDING).any():
            notes.append("mass kept above 100 %: the policy adds experts to the top-k")
        if not rows["over_topk_median"].notna().any():
            columns = [column for column in columns if column.header != "over topk"]
        warnings = [f"warning: {line}" for line in warnings_of(comparison, run)]
        instead = [_reason(row) for row in rows.to_dict("records")]
        rows = rows.assign(instead=pd.Series(instead, index=rows.index, dtype=object))
        caption = [note for note in notes if note.startswith(_CAPTION)]
        tables.append(Table(rows, columns, _title(run, comparison), [*notes, *warnings], "instead", caption))
    return tables


def run_text(run: Run, width: int | None = None) -> str:
    """All of a run for a terminal: its tables, and how many cases were measured."""
    return "\n\n".join([render([*run_tables(run), *more_tables(run)], "text", width=width), count_words(run)])


def more_tables(run: Run) -> list[Table]:
    """What stands below the main tables: rates, layers one by one, fits, and replayed graphs beside eager runs."""
    if run.scope == "model":
        models = analyse_whole(run)
        comparisons = [one.comparison for one in models]
        found = [layers for one in models if (layers := _layers_table(one)) is not None]
    else:
        comparisons = analyse(run)
        found = [rates for one in comparisons if (rates := _rates_table(run, one)) is not None]
        found += [
            Table(pd.DataFrame(), (), f"{steps.title}: time and activated experts", decode_words(steps))
            for steps in decode_steps(run, comparisons)
        ]
    return [*found, *(graph_table(pair) for pair in graph_pairs(comparisons))]


def _title(run: Run, comparison: ComparisonResult) -> str:
    facts = comparison.comparison
    replicas = f" x {facts.num_replicas} replicas" if facts.num_replicas > 1 and facts.whole is None else ""
    how = f"{mode_words(run, facts)}, {hardware_words(run, facts)}"
    return f"{facts.title}: {how}, {facts.ranks_words}{replicas}, {facts.dtype}, {scale_words(facts.scale)}"


def _reason(row: Row) -> str | None:
    """Why a case was not measured; None where it was."""
    if row["status"] == "ok" and not missing(row["median_ms"]):
        return None
    reason = textwrap.shorten(row["reason"] or "no reason was recorded", _REASON_WIDTH, placeholder=" ...")
    return f"{row['status']}: {reason}"


def _activated_notes(comparison: ComparisonResult, rows: pd.DataFrame) -> list[str]:
    if not rows["activated_fullest_rank"].notna().any():
        return []
    held = comparison.comparison.num_experts // comparison.comparison.num_ranks
    return [f"activated: experts with a token on the rank that has most of them, of {held}; mean over batches"]


def _rates_table(run: Run, comparison: ComparisonResult) -> Table | None:
    """What links and experts achieved, beside what was measured of the machine; None without rates."""
    rated = [result.case.case_id for result in comparison.results if result.rates is not None]
    if not rated:
        return None
    ceilings = [rank.ceilings for launch in comparison.conditions for rank in launch.ranks]
    tflops, gbps = min(c.matmul_tflops for c in ceilings), min(c.copy_gbps for c in ceilings)
    measured = f"slowest rank's matmul {ceilings[0].matmul_size}^3: {tflops:.3g} TFLOP/s, copy: {gbps:.4g} GB/s"
    rows = speedups(run).set_index("case_id").loc[rated].reset_index()
    return Table(rows, _RATES, f"{comparison.comparison.title}: rates in breakdown iterations ({measured})")


def _layers_table(one: WholeComparison) -> Table | None:
    """Every layer of a whole model: its parts under native, its MoE layer under the policies that gain most."""
    times = layers_ms(one)
    if times is None:
        return None
    frame = pd.concat([times.parts, times.moe.add_prefix("MoE, ")], axis=1).rename_axis("layer").reset_index()
    columns = [text("layer"), *(number(name, form=milliseconds) for name in frame.columns[1:])]
    return Table(frame, columns, f"By layer, ms ({times.shown_words})")
