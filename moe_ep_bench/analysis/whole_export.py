"""Whole models as tables for a paper and as tidy CSV: the columns of their summary, and all numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.table_export import (
    Layout,
    chosen_of,
    described_row,
    how_words,
    joined_samples,
    spread_words,
    steadiness_row,
)
from moe_ep_bench.analysis.whole import (
    LEFT,
    PASS_PARTS,
    WholeComparison,
    WholeResult,
    WholeRun,
    extrapolated_words,
    whole_cells,
    whole_header,
)
from moe_ep_bench.analysis.words import NONE
from moe_ep_bench.timing.statistics import Estimate


def whole_layout(comparisons: Sequence[WholeComparison]) -> Layout:
    """The summary's table; with the extrapolated columns where a comparison of the run has them."""
    by_case = {each.result.case.case_id: (one, each) for one in comparisons for each in one.results}
    is_cut = any(one.is_cut for one in comparisons)
    header = whole_header(is_cut)

    def cells(result: CaseResult) -> Sequence[str]:
        one, each = by_case[result.case.case_id]
        found = whole_cells(each, one.comparison.comparison.world_size, is_cut)
        if len(found) == len(header):
            return found
        return [found[0], *(result.case.status if name == "verdict" else NONE for name in header[1:])]

    def caption(run: Run, comparison: ComparisonResult) -> str:
        (one,) = (one for one in comparisons if one.comparison is comparison)
        return _caption(run, one)

    return Layout(header, [header.index(name) for name in LEFT], cells, caption)


def _caption(run: Run, one: WholeComparison) -> str:
    sentences = [
        how_words(run, one.comparison),
        f"A pass of the slowest rank; end to end: native over case, {spread_words(one.comparison)}",
    ]
    if one.most is not None:
        most = f"by Amdahl's law no policy exceeds {one.most:.3f} end to end"
        sentences.append(f"MoE share and speedup of breakdown iterations; {most}")
    cut = extrapolated_words(one)
    return ". ".join([*sentences, *([cut[0].upper() + cut[1:]] if cut else [])]) + "."


def whole_csv(run: Run, comparisons: Sequence[WholeComparison], cases: Sequence[Case]) -> str:
    """One row per case: what it is, and all that was found of it; empty where there is nothing."""
    by_case = {each.result.case.case_id: (one, each) for one in comparisons for each in one.results}
    of_cases = chosen_of([one.comparison for one in comparisons], cases)
    rows = [_row(run, *by_case[result.case.case_id]) for _, results in of_cases for result in results]
    frame = pd.DataFrame(rows).astype({"speedup_num_launches": "Int64"})
    return frame.to_csv(index=False, lineterminator="\n")


def _row(run: Run, one: WholeComparison, each: WholeResult) -> dict[str, Any]:
    """A case's row: ``median_ms`` is a pass, ``speedup`` is from end to end."""
    whole, parts_ms = one.comparison.comparison.whole, each.parts_ms or {}
    assert whole is not None
    row = described_row(run, one.comparison, each.result)
    row |= {name: getattr(whole, name) for name in ("num_layers", "of_layers", "context_length")}
    row |= {"moe_ms": each.moe_ms, "moe_share": each.moe_share}
    row |= {f"moe_speedup_{name}": value for name, value in _estimate(each.moe_speedup).items()}
    row |= {"by_amdahl": each.expected, "most_by_amdahl": one.most}
    row |= {"policy_ms": each.policy_ms, "tokens_per_s": each.tokens_per_s}
    row |= {f"mean_rank_{part}_ms": parts_ms.get(part) for part in PASS_PARTS}
    row |= {"all_layers_ms_extrapolated": each.all_layers_ms, "speedup_extrapolated": each.all_layers_speedup}
    return row | steadiness_row(each.result)


def _estimate(estimate: Estimate | None) -> dict[str, Any]:
    return {name: getattr(estimate, name, None) for name in ("median", "low", "high", "is_interval")}


def whole_samples_csv(whole: WholeRun, cases: Sequence[Case]) -> str:
    """Every sample: the phases of every layer (``layer`` is empty outside of all), and what is of the pass itself."""
    return joined_samples(whole.run, [(case, _samples(whole, case)) for case in cases if case.is_ok], more=("layer",))


def _samples(whole: WholeRun, case: Case) -> pd.DataFrame:
    """A case's samples; sums over layers, which ``timings`` holds, give way to the layers' own."""
    layers = whole.layers.get(case.case_id)
    if layers is None:
        return case.timings.assign(layer=pd.NA)
    of_pass = case.timings[~case.timings["phase"].isin(set(layers["phase"]))].assign(layer=pd.NA)
    of_layers = layers[list(of_pass.columns)]
    return pd.concat([of_pass.astype({"layer": "Int32"}), of_layers.astype({"layer": "Int32"})], ignore_index=True)
