"""Render tables for a terminal, Markdown and LaTeX; as CSV and JSON with all columns, unrounded.

A ``Table`` is a frame, the columns that people read, a title and notes. Every command prints its results through
``render``, so that a number stands alike wherever it is read; the page's template takes a ``Table`` as it is.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from moe_ep_bench.analysis.columns import Column, Row, missing

PROGRAMS = ("csv", "json")
# Of ``render(..., "json")``: raised when a column changes its name or meaning, not when one is added.
JSON_VERSION = 3

_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\|*_`<>[]#~$"})


@dataclass(frozen=True, eq=False)
class Table:
    """A frame with what people read of it.

    Attributes:
        instead: the name of a column whose text, where it is not empty, makes a row a line below the table.
        notes: lines that are needed to read the numbers; in LaTeX they are comments.
    """

    frame: pd.DataFrame
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    instead: str | None = None

    @property
    def rows(self) -> list[Row]:
        """The rows that have numbers."""
        return [row for row in self.frame.to_dict("records") if self.instead is None or missing(row[self.instead])]

    @property
    def cells(self) -> list[list[str]]:
        return [[column.shown(row) for column in self.columns] for row in self.rows]

    @property
    def lost(self) -> list[str]:
        """Rows without numbers, a line each that says why."""
        rows = [] if self.instead is None else self.frame[self.frame[self.instead].notna()].to_dict("records")
        return [f"{self.columns[0].shown(row)}: {row[self.instead]}" for row in rows]


def render(tables: Sequence[Table], to: str, *, width: int | None = None) -> str:
    """Render tables as ``text``, ``md`` or ``latex``, or for ``PROGRAMS``.

    Args:
        width: of a terminal, in characters; columns of text for which it has no room are named below. None = all stand.
    """
    if to in PROGRAMS:
        frames = [table.frame for table in tables if len(table.frame)]
        frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        if to == "csv":
            return frame.to_csv(index=False, lineterminator="\n")
        rows = frame.to_json(orient="records", double_precision=15)
        return f'{{"version": {JSON_VERSION}, "rows": {rows}}}\n'
    if to == "text":
        return "\n\n".join(_text(table, width) for table in tables)
    if to == "md":
        return "\n\n".join(map(_markdown, tables)) + "\n"
    return "% \\usepackage{booktabs}\n" + "\n\n".join(map(_latex, tables)) + "\n"


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None where the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(line: str, width: int | None, indent: str = "") -> str:
    """A line in as many as a terminal needs; the first begins with ``indent``, the others deeper."""
    if width is None:
        return f"{indent}{line}"
    return textwrap.fill(line, max(width, 40), initial_indent=indent, subsequent_indent=f"{indent}  ")


def _text(table: Table, width: int | None) -> str:
    """An aligned table; the last columns, for which a terminal has no room, are named among the lines below it."""
    columns, lines = list(table.columns), [*table.lost, *table.notes]
    cells = [[column.title for column in columns], *table.cells]
    sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
    number = len(columns)
    while width is not None and number > 2 and sum(sizes[:number]) + 2 * (number - 1) > width:
        number -= 1
    if left_out := [column.title for column in columns[number:]]:
        lines.append(f"no room for: {', '.join(left_out)} (--format csv)")
    rows = []
    for row in (cells[0], ["-" * size for size in sizes], *cells[1:]) if columns else ():
        aligned = [
            cell.ljust(size) if column.is_words else cell.rjust(size)
            for cell, size, column in zip(row[:number], sizes[:number], columns[:number], strict=True)
        ]
        rows.append("  ".join(aligned).rstrip())
    title = table.title and wrapped(table.title, width)
    below = "\n".join(wrapped(line, width, "  ") for line in lines)
    return "\n\n".join(part for part in (title, "\n".join(rows), below) if part)


def escape_latex(text: str) -> str:
    """A text that LaTeX prints as it is."""
    return text.translate(_LATEX)


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is, in one line."""
    return " ".join(text.translate(_MARKDOWN).split())


def _latex(table: Table) -> str:
    """One ``table`` with booktabs rules; its title is the caption, its notes are comments below."""
    rows = [[column.title for column in table.columns], *table.cells]
    header, *body = [" & ".join(map(escape_latex, row)) + r" \\" for row in rows]
    columns = "".join("l" if column.is_words else "r" for column in table.columns)
    lines = [r"\begin{table}[tbp]", r"\centering", rf"\caption{{{escape_latex(table.title)}}}"]
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule", *body, r"\bottomrule"]
    notes = ["% " + " ".join(line.split()) for line in (*table.lost, *table.notes)]
    return "\n".join([*lines, r"\end{tabular}", r"\end{table}", *notes, ""])


def _markdown(table: Table) -> str:
    """One table in GitHub's dialect, under its title and above its notes."""
    header, *body = [[column.title for column in table.columns], *table.cells]
    rule = ["---" if column.is_words else "---:" for column in table.columns]
    rows = [map(escape_markdown, header), rule, *(map(escape_markdown, row) for row in body)]
    lines = [f"| {' | '.join(row)} |" for row in rows] if table.columns else []
    notes = "\n".join(f"- {escape_markdown(line)}" for line in (*table.lost, *table.notes))
    return "\n\n".join(part for part in (escape_markdown(table.title), "\n".join(lines), notes) if part)
