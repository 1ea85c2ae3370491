"""What the report of a directory of whole models says: the pass from end to end, beside its MoE layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from moe_ep_bench.analysis.figures import WHOLE_FIGURES
from moe_ep_bench.analysis.load import Run, load_run
from moe_ep_bench.analysis.report.answer import answer_of, answer_of_all, speed_and_cost
from moe_ep_bench.analysis.report.captions import subtitle_of, title_of
from moe_ep_bench.analysis.report.parts import Cell, Column, Picture, Report, Section, Table, Warned, number_cell
from moe_ep_bench.analysis.report.provenance import (
    config_files,
    environment_tables,
    fact_tables,
    read_provenance,
    reproduction,
)
from moe_ep_bench.analysis.report.said import drawn, left_out, subtitle, weaknesses
from moe_ep_bench.analysis.report.tables import ROLE_VERDICTS, fidelity_cells, speedup_cells
from moe_ep_bench.analysis.speedups import CaseResult
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.whole import (
    WholeComparison,
    WholeResult,
    analyse_whole,
    extrapolated_words,
    layers_ms,
    whole_notes,
)
from moe_ep_bench.analysis.words import estimate_words, milliseconds


def whole_report_of(directory: Path, passed_over: list[str]) -> Report:
    """Everything that the report of a directory of whole models says.

    Args:
        passed_over: gets a line for each thing that cannot be trusted and is left out.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    run = load_run(directory, passed_over, whole=True)
    found = analyse_whole(run)
    comparisons = [one.comparison for one in found]
    facts = read_provenance(run.directory, max(one.comparison.world_size for one in comparisons))
    told, several = _told(found), len(found) > 1
    models = ", ".join(dict.fromkeys(one.comparison.model for one in comparisons))
    anchors = [f"comparison-{number}" for number in range(1, len(found) + 1)]
    return Report(
        title=f"{len(found)} comparisons of whole models: {models}" if several else comparisons[0].comparison.title,
        subtitle=subtitle(facts),
        answer=answer_of_all(run, comparisons, told),
        overview=_overview(found, anchors) if several else None,
        pictures=_pictures(run, found),
        sections=[
            Section(
                anchor,
                one.comparison.comparison.title,
                answer_of(run, one.comparison, told) if several else None,
                [_cases(one), *_by_layer(run, one)],
                whole_notes(one),
            )
            for one, anchor in zip(found, anchors, strict=True)
        ],
        facts=fact_tables(facts),
        environment=environment_tables(facts, run),
        configs=config_files(facts),
        warnings=[*left_out(passed_over), *_cut(found), *weaknesses(run, comparisons)],
        steps=reproduction(facts),
    )


def _told(found: Sequence[WholeComparison]) -> Callable[[CaseResult], str]:
    """Words for a case of any comparison: its pass, its MoE layers alone, and what it drops."""
    of_case = {id(each.result): each for one in found for each in one.results}

    def told(result: CaseResult) -> str:
        speedup = of_case[id(result)].moe_speedup
        layers = "" if speedup is None else f" (its MoE layers alone {estimate_words(speedup)})"
        return speed_and_cost(result, f"as fast as native from end to end{layers}")

    return told


def _pictures(run: Run, found: Sequence[WholeComparison]) -> list[Picture]:
    pictures = []
    with house_style():
        for name, draw in WHOLE_FIGURES.items():
            drawing = draw(run)
            if drawing is not None:
                figure = drawn(drawing)
                caption = _caption(found) if name == "whole" else ""
                pictures.append(Picture(name, title_of(figure), caption or subtitle_of(figure), figure))
    return pictures


def _caption(found: Sequence[WholeComparison]) -> str:
    """Of the policy that gains most from end to end: the pass, its MoE layers, and what bounds both."""
    policies = [
        (one, each)
        for one in found
        for each in one.results
        if each.result.case.role == "policy" and each.result.case.policy != "topk" and each.result.speedup
    ]
    if not policies:
        return ""
    one, best = max(policies, key=lambda pair: pair[1].result.speedup.median if pair[1].result.speedup else 0.0)
    words = f"Fastest from end to end is {best.result.case.label}, {estimate_words(best.result.speedup)}"
    if best.moe_speedup is not None:
        words += f"; its MoE layers alone run {estimate_words(best.moe_speedup)} times as fast"
    if best.expected is not None:
        words += f", which by Amdahl's law makes the pass {best.expected:.3f} times as fast"
    if one.most is not None and one.results[0].moe_share is not None:
        share = 100 * one.results[0].moe_share
        words += f". MoE layers are {share:.1f} % of native's pass, so that no policy can exceed {one.most:.3f}"
    where = f" ({one.comparison.comparison.title})" if len(found) > 1 else ""
    return f"{words}{where}."


def _overview(found: Sequence[WholeComparison], anchors: Sequence[str]) -> Table:
    columns = (
        Column("comparison"),
        Column("native pass ms", True),
        Column("MoE share %", True, "of native's pass, on the slowest rank, waiting included"),
        Column("at most", True, "what no policy exceeds, by Amdahl's law"),
        Column("fastest policy"),
        Column("end to end", True),
        Column("MoE speedup", True, "of the MoE layers alone"),
    )
    rows = []
    for one, anchor in zip(found, anchors, strict=True):
        native = next((each for each in one.results if each.result.case.role == "baseline"), None)
        policies = [each for each in one.results if each.result.case.role == "policy" and each.result.speedup]
        best = max(policies, key=lambda each: each.result.speedup.median, default=None)
        rows.append(
            (
                Cell(one.comparison.comparison.title, target=anchor),
                _time_cell(None if native is None or native.result.layer is None else native.result.layer.median_ms),
                number_cell(None if native is None or native.moe_share is None else 100 * native.moe_share, "{:.1f}"),
                number_cell(one.most, "{:.3f}"),
                Cell("-" if best is None else best.result.case.label),
                speedup_cells(None if best is None else best.result.speedup)[0],
                speedup_cells(None if best is None else best.moe_speedup)[0],
            )
        )
    return Table("All comparisons", columns, rows)


def _cases(one: WholeComparison) -> Table:
    """What the summary prints of every case, with numbers to sort by."""
    facts = one.comparison.comparison
    assert facts.whole is not None
    is_cut = facts.whole.num_layers < facts.whole.of_layers
    columns = [
        Column("case"),
        Column("end to end", True, "slowest rank's pass, native over case: median of pairs"),
        Column("95 % interval", True, "smallest to largest pair in round brackets, where there is no interval"),
        Column("verdict", about="the interval against the noise floor"),
        Column("MoE speedup", True, "of the MoE layers alone, in breakdown iterations"),
        Column("MoE interval", True, "likewise"),
        Column("by Amdahl", True, "of the pass, by the layers' speedup and their share of native's pass"),
        Column("dropped %", True, "of top-k pairs"),
        Column("mass kept %", True, "score mass of what is computed over that of the top-k"),
        Column("pass ms", True, "of the slowest rank in each iteration without probes, median"),
        Column("p90 ms", True),
        Column("MoE ms", True, "of all MoE layers, on the slowest rank, waiting included"),
        Column("MoE share %", True, "of the pass, likewise"),
        Column("policy ms", True, "choosing experts, in all layers"),
        Column("tokens/s", True, "of all ranks"),
        Column("per rank", True),
    ]
    if is_cut:
        about = f"to all {facts.whole.of_layers} layers; no measurement"
        columns += [Column("all layers ms, extrapolated", True, about), Column("end to end, extrapolated", True, about)]
    rows = [_row(each, facts.world_size, is_cut) for each in one.results]
    return Table("Cases", columns, rows)


def _row(each: WholeResult, world_size: int, is_cut: bool) -> tuple[Cell, ...]:
    result, case = each.result, each.result.case
    is_native = case.role == "baseline"
    verdict = ROLE_VERDICTS.get(case.role, result.verdict)
    mark = verdict if verdict in ("faster", "slower") else ""
    if not case.is_ok:
        verdict, mark = f"{case.status}: {case.reason or 'no reason was recorded'}", "lost"
    one = (Cell("1", 1.0), Cell("-"))
    dropped, kept, _ = fidelity_cells(result)
    rate = each.tokens_per_s
    cells = (
        Cell(case.label),
        *(one if is_native else speedup_cells(result.speedup)),
        Cell(verdict, mark=mark),
        *(one if is_native and each.moe_share is not None else speedup_cells(each.moe_speedup)),
        number_cell(None if is_native else each.expected, "{:.3f}"),
        dropped,
        kept,
        _time_cell(None if result.layer is None else result.layer.median_ms),
        _time_cell(None if result.layer is None else result.layer.p90_ms),
        _time_cell(each.moe_ms),
        number_cell(None if each.moe_share is None else 100 * each.moe_share, "{:.1f}"),
        _time_cell(each.policy_ms),
        number_cell(rate, "{:,.0f}"),
        number_cell(None if rate is None else rate / world_size, "{:,.0f}"),
    )
    if not is_cut:
        return cells
    return (*cells, _time_cell(each.all_layers_ms), number_cell(each.all_layers_speedup, "{:.3f}"))


def _by_layer(run: Run, one: WholeComparison) -> list[Table]:
    times = layers_ms(one)
    if times is None:
        return []
    names = [f"{kind} ms" for kind in times.parts] + [f"MoE ms, {label}" for label in times.moe]
    columns = [Column("layer", True), *(Column(name, True) for name in names)]
    all_ms = pd.concat([times.parts, times.moe], axis=1)
    rows = [
        [Cell(str(layer), float(layer)), *(_time_cell(value) for value in values)]
        for layer, values in zip(all_ms.index, all_ms.to_numpy(), strict=True)
    ]
    shown = times.shown_words
    return [
        Table("By layer", columns, rows, f"{shown[0].upper()}{shown[1:]}; attention and dense layers under native.")
    ]


def _time_cell(time_ms: float | None) -> Cell:
    return Cell("-") if time_ms is None or pd.isna(time_ms) else Cell(milliseconds(time_ms), time_ms)


def _cut(found: Sequence[WholeComparison]) -> list[Warned]:
    """What was not built; first among the warnings, for every number of the pass is of fewer layers."""
    said: dict[str, list[str]] = {}
    for one in found:
        words = extrapolated_words(one)
        if words:
            said.setdefault(f"{words[:1].upper()}{words[1:]}.", []).append(one.comparison.comparison.title)
    return [Warned(text, "" if len(where) == len(found) else "; ".join(where)) for text, where in said.items()]
