"""The tables of layers and of whole models: which columns of ``frames.speedups`` people read, and what stands below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from moe_ep_bench.analysis.activated import decode_steps, decode_words
from moe_ep_bench.analysis.frames import speedups
from moe_ep_bench.analysis.load import Case, Run
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
from moe_ep_bench.analysis.words import (
    count_words,
    hardware_words,
    mode_words,
    modelled_line,
    notes_of,
    scale_words,
    warnings_of,
)

_REASON_WIDTH = 90
_ROUNDING = 1e-6  # shares are sums of float32
# What a speedup is, how certain it is, and what is extrapolated: even a caption says it.
_CAPTION = ("speedup:", "end to end:", "noise floor:", "extrapolated:")


def _kept(column: Column) -> Column:
    """What a policy keeps; nothing of the ceiling, whose scores are not the model's."""
    return replace(column, cell=lambda row: NONE if row["role"] == "ceiling" else column.cell(row))


_COST = (_kept(percentage("dropped_share", "dropped %")), _kept(percentage("retained_mass", "mass kept %")))


def _points(share: float) -> str:
    """A difference of shares in percent, without the minus of a rounded zero."""
    return f"{round(100 * share, 2) + 0.0:.2f}"


# Beside the mass kept: how much more of it dropping alone could keep. The second is of decode steps.
BELOW_FRONTIER = (
    number("below_frontier", "below frontier %", _points),
    number("below_frontier_experts", "of experts %", _points),
)
_POLICY = text("label", "policy")
_TAIL = (number("p90_ms", "p90", milliseconds), number("p99_ms", "p99", milliseconds))
_OVER_TOPK = (interval("over_topk", "over topk"), text("verdict"))
# Of a modelled layer, what it comes to in its model.
PASS = number("pass_ms", "pass ms", milliseconds), number("tokens_per_s_per_rank", "tokens/s/GPU", "{:,.0f}")
STEP = replace(PASS[0], header="step ms"), PASS[1]
_LAYER = (
    _POLICY,
    number("median_ms", "layer ms", milliseconds),
    *_TAIL,
    *PASS,
    interval("speedup", "speedup", one="baseline"),
    *_OVER_TOPK,
    *_COST,
    *map(_kept, BELOW_FRONTIER),
    _kept(number("output_error", "output error", "{:.2g}")),
    number("activated_fullest_rank", "activated", "{:.1f}"),
    text("breakdown_slowest_phase", "slowest phase"),
)
_RATES = (
    _POLICY,
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
    _POLICY,
    number("median_ms", "pass ms", milliseconds),
    _TAIL[0],
    interval("speedup", "end to end", one="baseline"),
    *_OVER_TOPK,
    number("moe_ms", "MoE ms", milliseconds),
    percentage("moe_share", "MoE share %"),
    interval("moe_speedup", "MoE speedup", one="baseline"),
    number("by_amdahl", "by Amdahl"),
    number("policy_ms", "policy ms", milliseconds),
    number("tokens_per_s", "tokens/s", "{:,.0f}"),
    number("tokens_per_s_per_rank", "per rank", "{:,.0f}"),
    *_COST,
    number("all_layers_ms_extrapolated", "all layers ms, extrapolated", milliseconds),
    number("speedup_extrapolated", "end to end, extrapolated"),
)
# Columns that stand there only where they hold something.
_OF_SOME = (
    "over topk",
    "activated",
    *(column.header for column in (*BELOW_FRONTIER, *PASS, *STEP)),
    "all layers ms, extrapolated",
    "end to end, extrapolated",
)


def run_tables(run: Run, cases: Sequence[Case] | None = None) -> list[Table]:
    """The main table of every comparison, or the rows of some cases, with what has to be known to read it."""
    frame = speedups(run)
    if cases is not None:
        frame = frame[frame["case_id"].isin([case.case_id for case in cases])]
    found: list[ComparisonResult | WholeComparison] = [*(analyse_whole(run) if run.scope == "model" else analyse(run))]
    tables = []
    for one in found:
        comparison = one.comparison if isinstance(one, WholeComparison) else one
        rows = frame[frame["case_id"].isin([result.case.case_id for result in comparison.results])]
        if rows.empty:
            continue
        facts = comparison.comparison
        columns, notes = (_MODEL, whole_notes(one)) if isinstance(one, WholeComparison) else (_LAYER, notes_of(one))
        if facts.rest is not None and facts.rest.context_length:
            columns = [STEP[0] if column is PASS[0] else column for column in columns]
        columns = [c for c in columns if c.header not in _OF_SOME or rows[c.source].notna().any()]
        if rows["activated_fullest_rank"].isna().all():
            columns = [column for column in columns if column.header != BELOW_FRONTIER[1].header]
        if facts.whole is None and rows["activated_fullest_rank"].notna().any():
            held = facts.num_experts // facts.num_ranks
            notes.append(
                f"activated: experts with a token on the rank that has most of them, of {held}; mean over batches"
            )
        if (rows.loc[rows["role"] != "ceiling", "retained_mass"] > 1 + _ROUNDING).any():
            notes.append("mass kept above 100 %: the policy adds experts to the top-k")
        warnings = [f"warning: {line}" for line in warnings_of(comparison, run)]
        instead = pd.Series([_reason(row) for row in rows.to_dict("records")], index=rows.index, dtype=object)
        replicas = f" x {facts.num_replicas} replicas" if facts.num_replicas > 1 and facts.whole is None else ""
        how = f"{mode_words(run, facts)}, {hardware_words(run, facts)}, {facts.ranks_words}{replicas}"
        title = f"{facts.title}: {how}, {facts.dtype}, {scale_words(facts.scale)}"
        caption = [note for note in notes if note.startswith(_CAPTION)]
        tables.append(Table(rows.assign(instead=instead), columns, title, [*notes, *warnings], "instead", caption))
    return tables


def run_text(run: Run, width: int | None = None) -> str:
    """All of a run for a terminal: its tables, and how many cases were measured."""
    line, tables = modelled_line(run), render([*run_tables(run), *more_tables(run)], "text", width=width)
    return "\n\n".join(["\n".join(filter(None, [line, tables])), count_words(run)])


def more_tables(run: Run) -> list[Table]:
    """What stands below the main tables: rates, layers one by one, and fits."""
    if run.scope == "model":
        models = analyse_whole(run)
        comparisons = [one.comparison for one in models]
        found = [_layers_table(one) for one in models]
    else:
        comparisons = analyse(run)
        found = [_rates_table(run, one) for one in comparisons]
        found += [
            Table(pd.DataFrame(), (), f"{steps.title}: time and activated experts", decode_words(steps))
            for steps in decode_steps(run, comparisons)
        ]
    return [table for table in found if table is not None]


def _reason(row: Row) -> str | None:
    """Why a case was not measured; None where it was."""
    if row["status"] == "ok" and not missing(row["median_ms"]):
        return None
    reason = textwrap.shorten(row["reason"] or "no reason was recorded", _REASON_WIDTH, placeholder=" ...")
    return f"{row['status']}: {reason}"


def _rates_table(run: Run, comparison: ComparisonResult) -> Table | None:
    """What links and experts achieved, beside what was measured of the machine; None without rates."""
    rated = [result.case.case_id for result in comparison.results if result.rates is not None]
    if not rated:
        return None
    ceilings = [rank.ceilings for launch in comparison.conditions for rank in launch.ranks]
    tflops, gbps = min(c.matmul_tflops for c in ceilings), min(c.copy_gbps for c in ceilings)
    measured = f"slowest rank's matmul {ceilings[0].matmul_size}^3: {tflops:.3g} TFLOP/s, copy: {gbps:.4g} GB/s"
    frame = speedups(run)
    title = f"{comparison.comparison.title}: rates in breakdown iterations ({measured})"
    return Table(frame[frame["case_id"].isin(rated)], _RATES, title)


def _layers_table(one: WholeComparison) -> Table | None:
    """Every layer of a whole model: its parts under native, its MoE layer under the policies that gain most."""
    times = layers_ms(one)
    if times is None:
        return None
    frame = pd.concat([times.parts, times.moe.add_prefix("MoE, ")], axis=1).rename_axis("layer").reset_index()
    columns = [text("layer"), *(number(name, form=milliseconds) for name in frame.columns[1:])]
    return Table(frame, columns, f"By layer, ms ({times.shown_words})")
