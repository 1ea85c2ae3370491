"""Show one results directory: as text, as a page, or in a format that other programs read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ep_bench.analysis import frames
from moe_ep_bench.analysis.choice import TYPICAL, IterationChoice
from moe_ep_bench.analysis.draws import over_draws
from moe_ep_bench.analysis.load import Case, ResultsError, Run, is_quality, is_route, load_times
from moe_ep_bench.analysis.render import PROGRAMS, Table, render, terminal_width
from moe_ep_bench.analysis.tables import run_tables, run_text
from moe_ep_bench.analysis.trace_export import perfetto_trace
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path, check_folder
from moe_ep_bench.results import ValidationDirectory
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
        raise UserError(f"--format: expected one of {', '.join(FORMATS)}; got {to!r}")
    for option, given, formats in (
        ("case", cases, ("md", "latex", "csv", "json", "perfetto")),
        ("iteration", iterations, ("perfetto",)),
        ("samples", samples, ("csv", "json")),
    ):
        if given and to not in formats:
            raise UserError(f"--{option}: goes with --format {', '.join(formats)}; got --format {to}")
    if to == "html":
        from moe_ep_bench.analysis.report.page import write_report

        page, passed_over = write_report(directory, out)
        for line in passed_over:
            print(f"moe-ep-bench: {line}", file=sys.stderr)
        print(os.path.relpath(page))
        return CASES_FAILED if passed_over else OK
    choices = [IterationChoice.parse(text, several=True) for text in iterations] or [TYPICAL]
    if out is not None and out.is_dir():
        raise UserError(f"--out {out}: is a directory; expected a file to write")
    if out is not None:
        check_folder(out.parent, "--out: folder")
    if to == "text":
        text = f"{text_of(directory)}\n"
    elif to == "perfetto" or cases or samples or not (is_route(directory) or is_quality(directory)):
        text = _of_run(load_times(directory), to, cases, choices, samples)
    else:
        text = route_text(directory, to) if is_route(directory) else quality_text(directory, to)
    if out is None:
        sys.stdout.write(text)
    else:
        with atomic_path(out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return OK


def text_of(directory: Path) -> str:
    """The tables of any results directory."""
    if ValidationDirectory(directory).pairs.is_file():
        from moe_ep_bench.analysis.validate import load_validation, validation_text

        return validation_text(load_validation(directory))
    if is_route(directory):
        return route_text(directory)
    if is_quality(directory):
        return quality_text(directory)
    return run_text(over_draws(load_times(directory))[0], terminal_width())


def route_text(directory: Path, to: str = "text") -> str:
    """Tables of what ``route`` wrote, in a format of ``render``."""
    from moe_ep_bench.analysis.route.load import load_route  # it imports torch
    from moe_ep_bench.analysis.route.tables import route_tables

    return render(route_tables(load_route(directory)), to, width=terminal_width())


def quality_text(directory: Path, to: str = "text") -> str:
    """Tables of what ``quality`` wrote, in a format of ``render``."""
    from moe_ep_bench.analysis.quality import quality_tables, read_quality

    return render(quality_tables(read_quality(directory)), to, width=terminal_width())


def _of_run(run: Run, to: str, names: Sequence[str], choices: Sequence[IterationChoice], samples: bool) -> str:
    """A run's results, samples or trace in one of ``FORMATS`` but text and html."""
    if to != "perfetto" and not samples:  # which are of one draw each
        run = over_draws(run)[0]
    frame = frames.speedups(run)
    by_id = {case.case_id: case for case in run.cases}
    chosen = _find_cases(run, [by_id[case_id] for case_id in frame["case_id"]], names)
    if to == "perfetto":
        return perfetto_trace(run, [case for case in chosen if case.is_ok], choices)
    if samples:
        return render([Table(frames.samples(run, chosen), ())], to)
    if to in PROGRAMS:
        return render([Table(frame[frame["case_id"].isin([case.case_id for case in chosen])], ())], to)
    return render(run_tables(run, chosen), to)


def _find_cases(run: Run, cases: Sequence[Case], wanted: Sequence[str]) -> list[Case]:
    """Of ``cases`` those whose id, label or policy was named, in the order of naming; all where none was."""
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
