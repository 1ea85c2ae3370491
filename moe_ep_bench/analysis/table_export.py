"""Results as tables for a paper (LaTeX, Markdown) and as tidy CSV for one's own analysis.

The tables for people hold what ``show`` prints, and no speed without its fidelity; the noise floor stands in the
caption. CSV is one row per case of every comparison with unrounded numbers, or every single sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.load import Case, Run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.words import NONE, estimate_words, hardware_words, milliseconds, mode_words, percent
from moe_ep_bench.timing.statistics import MIN_BATCHES

_HEADER = ("policy", "p50 ms", "p90 ms", "p99 ms", "speedup", "verdict", "dropped %", "mass kept %")
Comparisons = Sequence[ComparisonResult]  # of one run, as ``speedups.analyse`` gives them
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\|*_`<>[]#~$"})


def escape_latex(text: str) -> str:
    return text.translate(_LATEX)


def escape_markdown(text: str) -> str:
    return " ".join(text.translate(_MARKDOWN).split())


@dataclass(frozen=True)
class Layout:
    """How the results of one scope stand in a table.

    Attributes:
        header: names of columns.
        words: of these columns, by place, those that hold words; numbers stand to the right.
        cells: a case's row.
        caption: what stands beside a comparison's table.
    """

    header: Sequence[str]
    words: Collection[int]
    cells: Callable[[CaseResult], Sequence[str]]
    caption: Callable[[Run, ComparisonResult], str]

    def latex(self, run: Run, comparisons: Comparisons, cases: Sequence[Case]) -> str:
        """One ``table`` with booktabs rules per comparison; the document needs \\usepackage{booktabs}."""
        tables = []
        for comparison, results in chosen_of(comparisons, cases):
            rows = [[escape_latex(cell) for cell in self.cells(result)] for result in results]
            frame = pd.DataFrame(rows, columns=[escape_latex(name) for name in self.header])
            tables.append(
                frame.style.hide(axis="index").to_latex(
                    hrules=True,
                    column_format="".join("l" if column in self.words else "r" for column in range(len(self.header))),
                    position="tbp",
                    position_float="centering",
                    caption=escape_latex(self.caption(run, comparison)),
                )
            )
        return "% \\usepackage{booktabs}\n" + "\n".join(tables)

    def markdown(self, run: Run, comparisons: Comparisons, cases: Sequence[Case]) -> str:
        """One table per comparison, in GitHub's dialect, under its caption."""
        rule = ["---" if column in self.words else "---:" for column in range(len(self.header))]
        tables = []
        for comparison, results in chosen_of(comparisons, cases):
            cells = [self.header, *(self.cells(result) for result in results)]
            rows = [[escape_markdown(cell) for cell in row] for row in cells]
            lines = [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]
            tables.append("\n".join([escape_markdown(self.caption(run, comparison)), "", *lines]))
        return "\n\n".join(tables) + "\n"


def chosen_of(comparisons: Comparisons, cases: Sequence[Case]) -> list[tuple[ComparisonResult, list[CaseResult]]]:
    """Comparisons that hold a chosen case, with the results of these in reading order."""
    wanted = {case.case_id for case in cases}
    found = [(one, [result for result in one.results if result.case.case_id in wanted]) for one in comparisons]
    return [(comparison, results) for comparison, results in found if results]


def _cells(result: CaseResult) -> list[str]:
    case, layer, fidelity = result.case, result.layer, result.fidelity
    if layer is None:
        return [case.label, *(NONE,) * 4, case.status, NONE, NONE]
    # The ceiling's scores are not the model's, so keeping them whole says nothing about the model.
    kept = (NONE, NONE)
    if fidelity is not None and case.role != "ceiling":
        kept = percent(fidelity.dropped_share), percent(fidelity.retained_mass)
    speedup = "1" if case.role == "baseline" else estimate_words(result.speedup)
    times = map(milliseconds, (layer.median_ms, layer.p90_ms, layer.p99_ms))
    return [case.label, *times, speedup, verdict_words(result), *kept]


def verdict_words(result: CaseResult) -> str:
    """The verdict on a case, or what it is for."""
    return {"baseline": "baseline", "noise": "noise floor"}.get(result.case.role, result.verdict)


def _caption(run: Run, comparison: ComparisonResult) -> str:
    spread = spread_words(comparison)
    return f"{how_words(run, comparison)}. Layer time of the slowest rank; speedup over native, {spread}."


def how_words(run: Run, comparison: ComparisonResult) -> str:
    """What was measured, and on what."""
    facts = comparison.comparison
    return f"{facts.title}: {mode_words(run, facts)}, {hardware_words(run, facts)}, {facts.dtype}"


def spread_words(comparison: ComparisonResult) -> str:
    """What stands beside a speedup, and the noise floor."""
    floor = comparison.floor
    noise = "no noise floor was measured" if floor is None else f"noise floor {floor.low:.3f} to {floor.high:.3f}"
    is_interval = comparison.comparison.num_batches >= MIN_BATCHES
    spread = "[95 % interval]" if is_interval else f"(min..max: fewer than {MIN_BATCHES} batches)"
    return f"median of pairs {spread}; {noise}"


LAYERS = Layout(_HEADER, (0, 4, 5), _cells, _caption)


def results_csv(run: Run, comparisons: Comparisons, cases: Sequence[Case]) -> str:
    """One row per case: what it is, and all that was found of it; empty where there is nothing."""
    rows = [_result_row(run, one, result) for one, results in chosen_of(comparisons, cases) for result in results]
    frame = pd.DataFrame(rows).astype({"speedup_num_launches": "Int64"})
    return frame.to_csv(index=False, lineterminator="\n")


def _result_row(run: Run, comparison: ComparisonResult, result: CaseResult) -> dict[str, Any]:
    breakdown, row = result.breakdown, described_row(run, comparison, result)
    of_breakdown = ("slowest_phase", "unaccounted_share", "policy_share", "layer_ms")
    row |= {f"breakdown_{name}": getattr(breakdown, name, None) for name in of_breakdown}
    groups = {} if breakdown is None else breakdown.group_ms
    row |= {f"{name}_ms": time_ms for name, time_ms in groups.items()}
    of_rates = ("crossing_pair_bytes", "crossing_copy_bytes", "dispatch_gbps", "combine_gbps", "experts_tflops")
    row |= {name: getattr(result.rates, name, None) for name in of_rates}
    return row | steadiness_row(result)


def described_row(run: Run, comparison: ComparisonResult, result: CaseResult) -> dict[str, Any]:
    """What a case is, its time, its speedup and what it drops and keeps."""
    case, facts = result.case, comparison.comparison
    row: dict[str, Any] = {
        "comparison_id": case.comparison_id,
        "case_id": case.case_id,
        "mode": "modelled" if facts.device is not None else run.mode,
        "scope": run.scope,
        "title": facts.title,
        "model": facts.model,
        "scale": facts.scale,
        "device": run.device_name,
        "num_ranks": facts.num_ranks,
        "num_tokens": facts.num_tokens,
        "num_batches": facts.num_batches,
        "dtype": facts.dtype,
        "point": _json(facts.point),
        "policy": case.policy,
        "policy_params": _json(case.policy_params),
        "label": case.label,
        "role": case.role,
        "status": case.status,
        "reason": case.reason,
    }
    row |= {name: getattr(result.layer, name, None) for name in ("median_ms", "p90_ms", "p99_ms")}
    of_speedup = ("median", "low", "high", "is_interval", "num_launches")
    row |= {f"speedup_{name}": getattr(result.speedup, name, None) for name in of_speedup}
    row |= {f"floor_{end}": getattr(comparison.floor, end, None) for end in ("low", "high")}
    row |= {"verdict": verdict_words(result) if case.is_ok else None, "detectable": result.detectable}
    of_fidelity = ("dropped_share", "retained_mass", "output_error", "fullest_expert", "fullest_rank")
    return row | {name: getattr(result.fidelity, name, None) for name in of_fidelity}


def steadiness_row(result: CaseResult) -> dict[str, Any]:
    """How steady a case's times were."""
    return {
        "probe_overhead": result.probe_overhead,
        "host_bound_share": result.host_bound_share,
        "drift": result.drift,
        "outlier_share": getattr(result.outliers, "share", None),
    }


def samples_csv(run: Run, cases: Sequence[Case]) -> str:
    """Every sample: one row per case, launch, rank, batch, iteration, kind and phase."""
    return joined_samples(run, [(case, case.timings) for case in cases if case.is_ok])


def joined_samples(run: Run, samples: Sequence[tuple[Case, pd.DataFrame]], *, more: Sequence[str] = ()) -> str:
    """Samples of cases as CSV, each row with what case it is of; ``more`` columns sort them beside the usual ones."""
    frames = []
    for case, rows in samples:
        frame = rows.copy()
        about = {"comparison_id": case.comparison_id, "case_id": case.case_id, "role": case.role}
        about |= {"policy": case.policy, "policy_params": _json(case.policy_params), "label": case.label}
        about |= {"mode": "modelled" if run.comparisons[case.comparison_id].device is not None else run.mode}
        for place, (name, value) in enumerate(about.items()):
            frame.insert(place, name, value)
        frames.append(frame.sort_values(["launch", "batch", "iteration", "kind", "rank", *more, "phase"]))
    return pd.concat(frames).to_csv(index=False, lineterminator="\n")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
