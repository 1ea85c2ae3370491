"""One results directory in formats that other programs read: which cases, which format, where to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ep_bench.analysis.choice import TYPICAL, IterationChoice
from moe_ep_bench.analysis.load import Case, ResultsError, Run, check_timed, is_whole, load_run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.table_export import LAYERS, results_csv, samples_csv
from moe_ep_bench.analysis.trace_export import perfetto_trace
from moe_ep_bench.analysis.whole import analyse_whole, load_whole
from moe_ep_bench.analysis.whole_export import whole_csv, whole_layout, whole_samples_csv
from moe_ep_bench.records import atomic_path, check_folder

FORMATS = ("perfetto", "latex", "markdown", "csv")


def export(
    directory: Path,
    to: str,
    out: Path | None = None,
    *,
    cases: Sequence[str] = (),
    iterations: Sequence[str] = (),
    samples: bool = False,
) -> None:
    """Write what ``directory`` holds to ``out``, or to standard output.

    Args:
        to: one of ``FORMATS``.
        cases: ids, labels or policy names; the default is all.
        iterations: of a trace, see ``choice.IterationChoice``; the default is the median one of each case.
        samples: CSV of every sample in place of the results.

    Raises:
        ValueError: what was asked for is not there, or does not go together; one line.
    """
    if to not in FORMATS:
        raise ValueError(f"--to: expected one of {', '.join(FORMATS)}; got {to!r}")
    if iterations and to != "perfetto":
        raise ValueError(f"--iteration: goes with --to perfetto, got --to {to}")
    if samples and to != "csv":
        raise ValueError(f"--samples: goes with --to csv, got --to {to}")
    choices = [IterationChoice.parse(text, several=True) for text in iterations] or [TYPICAL]
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out}: is a directory; expected a file to write")
    if out is not None:
        check_folder(out.parent, "--out: folder")
    check_timed(directory)
    text = (_of_models if is_whole(directory) else _of_layers)(directory, to, cases, choices, samples)
    if out is None:
        sys.stdout.write(text)
        return
    with atomic_path(out) as temporary:
        temporary.write_text(text, encoding="utf-8")


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
