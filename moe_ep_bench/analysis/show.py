"""Show results directories, as text, as a page or in a format that other programs read; and papers' numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from moe_ep_bench import papers
from moe_ep_bench.analysis.cases import COMPARISON, cases, load
from moe_ep_bench.analysis.columns import PROGRAMS, Table, render, terminal_width, text, wrapped
from moe_ep_bench.analysis.notes import warnings
from moe_ep_bench.analysis.store import Store, is_validation
from moe_ep_bench.analysis.tables import MAIN, VIEWS, count_words, frames, public_names, short_table, tables
from moe_ep_bench.errors import CASES_FAILED, OK, UserError, brief, check_known, did_you_mean
from moe_ep_bench.facts.words import modelled_line
from moe_ep_bench.files import check_folder, write_text

FORMATS = ("text", "md", "latex", "csv", "json", "html")
# The end of a run fits terminals of this width.
_SHORT_WIDTH = 100


def show(
    directories: Sequence[Path],
    to: str,
    out: Path | None = None,
    *,
    views: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> int:
    """Write what directories hold to ``out``, or to standard output (a page: to ``DIR/report.html``).

    Args:
        to: one of ``FORMATS``.
        views: of ``tables.VIEWS``; the default are the main ones.
        columns: by their names in CSV, in place of all, or of the views' own; their order is kept.

    Returns:
        The exit status: ``CASES_FAILED`` where something is left out, because it cannot be trusted or was not measured
        yet; standard error names it.

    Raises:
        UserError: what was asked for is not there, or does not go together; one line.
    """
    check_known("--format", [to], FORMATS)
    check_known("--view", views, VIEWS)
    if views and to not in FORMATS[:3]:
        raise UserError(f"--view: goes with --format {', '.join(FORMATS[:3])}; got --format {to}")
    if columns and to not in FORMATS[:-1]:
        raise UserError(f"--columns: goes with --format {', '.join(FORMATS[:-1])}; got --format {to}")
    if to == "html":
        from moe_ep_bench.analysis.page import write_report

        page, passed_over = write_report(directories, out)
        print(os.path.relpath(page))
        return _left_out(passed_over)
    if out is not None and out.is_dir():
        raise UserError(f"--out {out}: is a directory; expected a file to write")
    if out is not None:
        check_folder(out.parent, "--out: folder")
    for directory in filter(is_validation, directories):
        if len(directories) > 1:
            raise UserError(f"{directory}: holds validation; expected such a directory by itself")
        if views or columns or to != "text":
            raise UserError(f"{directory}: holds validation, shown as text alone; name {directory}/real or /emulated")
    passed_over: list[str] = []
    if is_validation(directories[0]):
        from moe_ep_bench.analysis.compare import change_text, compare_ranks

        shown = f"{change_text(compare_ranks(directories[0]))}\n"
    else:
        shown = shown_text(load(list(directories), passed_over), to, views, columns)
    if out is None:
        sys.stdout.write(shown)
    else:
        write_text(out, shown)
    return _left_out(passed_over)


def _left_out(lines: Sequence[str]) -> int:
    """Name what is left out; the exit status."""
    for line in lines:
        print(f"moe-ep-bench: {line}", file=sys.stderr)
    return CASES_FAILED if lines else OK


def shown_text(store: Store, to: str = "text", views: Sequence[str] = (), columns: Sequence[str] = ()) -> str:
    """Tables of a store in one of ``FORMATS`` but a page; a view that it lacks is named.

    Raises:
        UserError: a column is unknown.
    """
    if to in PROGRAMS:
        of_programs = frames(store)
        _check_columns(columns, list(dict.fromkeys(str(name) for rows in of_programs for name in rows)))
        return render([Table(rows.reindex(columns=list(columns or rows)), ()) for rows in of_programs], to)
    _check_columns(columns, public_names(store, views or MAIN))
    listed = tables(store, views or MAIN, columns)
    for name in (name for name in views if not tables(store, [name])):
        print(f"moe-ep-bench: --view {name}: the run has no such numbers", file=sys.stderr)
    if to != "text":
        return render(listed, to)
    line = modelled_line(one.facts for one in store.comparisons)
    body = [line, render(listed, to, width=terminal_width()), count_words(cases(store))]
    others = [name for name in VIEWS if name not in MAIN and tables(store, [name])] if not (views or columns) else []
    more = f"more: --view {', '.join(others)}" if others else ""
    return "\n\n".join(filter(None, [*body, more])) + "\n"


def _check_columns(asked: Sequence[str], known: Sequence[str]) -> None:
    """Raise a UserError at the first column that is none of the known."""
    for name in asked:
        if name not in known:
            got = f"got {brief(name)}{did_you_mean(name, known)}"
            raise UserError(f"--columns: {got}; expected some of {', '.join(known)}")


def end_of_run(directory: Path) -> str:
    """The end of ``run``, ``emulate`` and ``route``: the table of policies, at most three warnings, where all lies."""
    store = load(directory)
    frame = cases(store)
    listed = [short_table(store, rows) for _, rows in frame.groupby(COMPARISON, sort=False)]
    line = wrapped(modelled_line(one.facts for one in store.comparisons), _SHORT_WIDTH, "")
    blocks = [line, render(listed, "text", width=_SHORT_WIDTH)]
    notes = [wrapped(str(line), _SHORT_WIDTH, "  ") for line in warnings(store)[:3]]
    where = f"{count_words(frame)}; in {directory}\nmore: moe-ep-bench show {directory}; moe-ep-bench plot {directory}"
    return "\n\n".join(filter(None, [*blocks, "\n".join(notes), where]))


def list_papers(name: str | None) -> str:
    """A table for each item of a paper, or of all; numbers as printed, with the sign of a bound and standard errors."""
    signs, tables = {bound: sign for sign, bound in papers.BOUNDS.items()}, []
    for paper in map(papers.load, [name] if name else papers.names()):
        notes = [paper.version, *([paper.note] if paper.note else [])]
        tables.append(Table(pd.DataFrame(), (), f"arXiv {paper.paper}: {paper.title}", notes))
        for item in paper.items:
            rows = pd.DataFrame([_listed(number, signs) for number in item.numbers(paper)])
            notes = [item.note] if item.note else []
            if (left_out := paper.why_uncompared(item.item, item.kind)) is not None:
                notes.append(f"not compared: {left_out.why}{f' ({left_out.by})' if left_out.by else ''}")
            title = f"{item.item}: {item.what} ({item.kind}, {item.metric})"
            tables.append(Table(rows, [text(str(column)) for column in rows], title, notes))
    return render(tables, "text")


def _listed(number: papers.Number, signs: dict[str, str]) -> dict[str, str | None]:
    """A row of ``list_papers``."""
    where = (f"{value}" if key == "what" else f"{key} {value}" for key, value in number.where.items())
    printed = f"{signs.get(number.bound or '', '')}{number.printed}"
    printed += "" if number.stderr is None else f" ± {number.stderr:.2f}"
    printed += " (read off)" if number.read_off else ""
    return {"model": number.model, "where": ", ".join(where), "number": printed, "unit": number.unit}
