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
from moe_ep_bench.analysis.notes import WARNING, warnings
from moe_ep_bench.analysis.store import kind_of
from moe_ep_bench.analysis.tables import MAIN, VIEWS, count_words, short_table, tables
from moe_ep_bench.errors import CASES_FAILED, OK, UserError, check_known
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
) -> int:
    """Write what directories hold to ``out``, or to standard output (a page: to ``DIR/report.html``).

    Args:
        to: one of ``FORMATS``.
        views: of ``tables.VIEWS``; the default is the main one of each comparison.

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
    if to == "html":
        from moe_ep_bench.analysis.page import write_report

        page, passed_over = write_report(directories, out)
        print(os.path.relpath(page))
        return _left_out(passed_over)
    if out is not None and out.is_dir():
        raise UserError(f"--out {out}: is a directory; expected a file to write")
    if out is not None:
        check_folder(out.parent, "--out: folder")
    passed_over: list[str] = []
    others = {path: kind for path in directories if (kind := kind_of(path)) in ("quality", "validation")}
    for directory, kind in others.items():
        if len(directories) > 1:
            raise UserError(f"{directory}: holds {kind}; expected such a directory by itself")
        if views:
            raise UserError(f"--view: expected none of {directory}, which holds {kind}")
    text = _text_of_other(directories[0], to) if others else _of_store(directories, to, views, passed_over)
    if out is None:
        sys.stdout.write(text)
    else:
        write_text(out, text)
    return _left_out(passed_over)


def _left_out(lines: Sequence[str]) -> int:
    """Name what is left out; the exit status."""
    for line in lines:
        print(f"moe-ep-bench: {line}", file=sys.stderr)
    return CASES_FAILED if lines else OK


def _text_of_other(directory: Path, to: str) -> str:
    """What ``validate`` or ``quality`` wrote."""
    if kind_of(directory) == "quality":
        return quality_text(directory, to) + "\n" * (to == "text")
    from moe_ep_bench.analysis.validate import load_validation, validation_text

    if to != "text":
        raise UserError(f"--format: expected text of a validation, or {directory}/real or /emulated; got {to}")
    return f"{validation_text(load_validation(directory))}\n"


def quality_text(directory: Path, to: str = "text") -> str:
    """Tables of what ``quality`` wrote, in a format of ``render``."""
    from moe_ep_bench.analysis.quality import quality_tables, read_quality

    return render(quality_tables(read_quality(directory)), to, width=terminal_width())


def _of_store(directories: Sequence[Path], to: str, views: Sequence[str], passed_over: list[str]) -> str:
    store = load(list(directories), passed_over)
    frame = cases(store)
    if to in PROGRAMS:
        return render([Table(frame.drop(columns="facts"), ())], to)
    listed = tables(store, views or MAIN)
    for name in (name for name in views if not tables(store, [name])):
        print(f"moe-ep-bench: --view {name}: the run has no such numbers", file=sys.stderr)
    if to != "text":
        return render(listed, to)
    width = terminal_width()
    line = modelled_line(one.facts for one in store.comparisons)
    body = "\n\n".join(filter(None, [line, render(listed, to, width=width), count_words(frame)]))
    others = [name for name in VIEWS if name not in MAIN and tables(store, [name])] if not views else []
    return "\n\n".join(filter(None, [body, f"more: --view {', '.join(others)}" if others else ""])) + "\n"


def end_of_run(directory: Path) -> str:
    """What ends ``run``, ``emulate`` and ``route``: the table of policies, three warnings at most, where all lies."""
    store = load(directory)
    frame = cases(store)
    listed = [short_table(store, rows) for _, rows in frame.groupby(COMPARISON, sort=False)]
    line = wrapped(modelled_line(one.facts for one in store.comparisons), _SHORT_WIDTH, "")
    blocks = [line, render(listed, "text", width=_SHORT_WIDTH)]
    notes = [wrapped(WARNING + line, _SHORT_WIDTH, "  ") for line in warnings(store)[:3]]
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
            tables.append(Table(rows, [text(column) for column in rows], title, notes))
    return render(tables, "text")


def _listed(number: papers.Number, signs: dict[str, str]) -> dict[str, str]:
    """A row of ``list_papers``."""
    where = (f"{value}" if key == "what" else f"{key} {value}" for key, value in number.where.items())
    printed = f"{signs.get(number.bound, '')}{number.printed}"
    printed += "" if number.stderr is None else f" ± {number.stderr:.2f}"
    printed += " (read off)" if number.read_off else ""
    return {"model": number.model, "where": ", ".join(where), "number": printed, "unit": number.unit}
