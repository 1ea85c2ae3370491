"""Show one results directory: as text, as a page, or in a format that other programs read."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from moe_ep_bench.analysis.choice import TYPICAL, IterationChoice
from moe_ep_bench.analysis.load import (
    Case,
    ResultsError,
    Run,
    check_timed,
    is_quality,
    is_route,
    is_whole,
    load_run,
)
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.summary import summary_table
from moe_ep_bench.analysis.table_export import LAYERS, results_csv, samples_csv
from moe_ep_bench.analysis.trace_export import perfetto_trace
from moe_ep_bench.analysis.whole import analyse_whole, load_whole, whole_table
from moe_ep_bench.analysis.whole_export import whole_csv, whole_layout, whole_samples_csv
from moe_ep_bench.bench.validation_directory import ValidationDirectory
from moe_ep_bench.files import atomic_path, check_folder
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK

FORMATS = ("text", "md", "latex", "csv", "json", "html", "perfetto")


def show(
    directory: Path,
    to: str,
    out: Path | None = None,
    *,
    cases: Sequence[str] = (),
    iterations: Sequence[str] = (),
    samples: bool = False,
) -> int:
    """Write what ``directory`` holds to ``out``, or to standard output (a page: to ``DIR/report.html``).

    Args:
        to: one of ``FORMATS``.
        cases: ids, labels or policy names; the default is all.
        iterations: of a trace, see ``choice.IterationChoice``; the default is the median one of each case.
        samples: every sample in place of the results.

    Returns:
        The exit status: ``CASES_FAILED`` where a page lacks what cannot be trusted.

    Raises:
        ValueError: what was asked for is not there, or does not go together; one line.
    """
    if to not in FORMATS:
        raise ValueError(f"--format: expected one of {', '.join(FORMATS)}; got {to!r}")
    for option, given, formats in (
        ("case", cases, ("md", "latex", "csv", "json", "perfetto")),
        ("iteration", iterations, ("perfetto",)),
        ("samples", samples, ("csv", "json")),
    ):
        if given and to not in formats:
            raise ValueError(f"--{option}: goes with --format {', '.join(formats)}; got --format {to}")
    if to == "html":
        from moe_ep_bench.analysis.report.page import write_report

        page, passed_over = write_report(directory, out)
        for line in passed_over:
            print(f"moe-ep-bench: {line}", file=sys.stderr)
        print(os.path.relpath(page))
        return CASES_FAILED if passed_over else OK
    choices = [IterationChoice.parse(text, several=True) for text in iterations] or [TYPICAL]
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out}: is a directory; expected a file to write")
    if out is not None:
        check_folder(out.parent, "--out: folder")
    if to == "text":
        text = f"{text_of(directory)}\n"
    else:
        check_timed(directory)
        export = _of_models if is_whole(directory) else _of_layers
        text = export(directory, "csv" if to == "json" else to, cases, choices, samples)
    if to == "json":
        rows = pd.read_csv(io.StringIO(text)).to_json(orient="records", lines=True, double_precision=15)
        text = "[\n" + ",\n".join(rows.splitlines()) + "\n]\n"
    if out is None:
        sys.stdout.write(text)
        return OK
    with atomic_path(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return OK


def text_of(directory: Path) -> str:
    """The table of any results directory."""
    if ValidationDirectory(directory).pairs.is_file():
        from moe_ep_bench.analysis.validation import load_validation
        from moe_ep_bench.analysis.validation_report import validation_text

        return validation_text(load_validation(directory))
    if is_route(directory):
        from moe_ep_bench.analysis.route_load import load_route
        from moe_ep_bench.analysis.route_report import route_table

        return route_table(load_route(directory))
    if is_quality(directory):
        from moe_ep_bench.analysis.quality_show import quality_summary

        return quality_summary(directory)
    return whole_table(load_whole(directory)) if is_whole(directory) else summary_table(load_run(directory))


def _of_layers(
    directory: Path, to: str, names: Sequence[str], choices: Sequence[IterationChoice], samples: bool
) -> str:
    run = load_run(directory)
    comparisons = analyse(run)
    chosen = find_cases(run, [result.case for one in comparisons for result in one.results], names)
    if to == "perfetto":
        return perfetto_trace(run, [case for case in chosen if case.is_ok], choices)
    if to == "csv":
        return samples_csv(run, chosen) if samples else results_csv(run, comparisons, chosen)
    return (LAYERS.latex if to == "latex" else LAYERS.markdown)(run, comparisons, chosen)


def _of_models(
    directory: Path, to: str, names: Sequence[str], choices: Sequence[IterationChoice], samples: bool
) -> str:
    whole = load_whole(directory)
    comparisons = analyse_whole(whole)
    chosen = find_cases(whole.run, [each.result.case for one in comparisons for each in one.results], names)
    if to == "perfetto":
        return perfetto_trace(whole.run, [case for case in chosen if case.is_ok], choices, whole.layers)
    if to == "csv":
        return whole_samples_csv(whole, chosen) if samples else whole_csv(whole.run, comparisons, chosen)
    layout = whole_layout(comparisons)
    return (layout.latex if to == "latex" else layout.markdown)(
        whole.run, [one.comparison for one in comparisons], chosen
    )


def find_cases(run: Run, cases: Sequence[Case], wanted: Sequence[str]) -> list[Case]:
    """Of ``cases`` those whose id, label or policy was named, in the order of naming; all where none was.

    Raises:
        ResultsError: a name fits no case, or only cases that were not measured.
    """
    if not wanted:
        return list(cases)
    found: dict[str, Case] = {}
    for name in wanted:
        fits = [case for case in cases if name in (case.case_id, case.label, case.policy)]
        if not fits:
            labels = ", ".join(dict.fromkeys(case.label for case in cases))
            raise ResultsError(f"{run.directory}: --case {name}: expected a case's id, label or policy of: {labels}")
        found.update((case.case_id, case) for case in fits)
    if not any(case.is_ok for case in found.values()):
        first = next(iter(found.values()))
        raise ResultsError(f"{run.directory}: --case {', '.join(wanted)}: was not measured ({first.status})")
    return list(found.values())
