"""Render tables for a terminal, Markdown, LaTeX and HTML; as CSV and JSON with all columns, unrounded.

A ``Table`` is a frame, the columns that people read, a title and notes. Every command prints its results through
``render``, so that a number stands alike wherever it is read.
"""

from __future__ import annotations

import html
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.columns import NONE, Column, Row, missing

PEOPLE = ("text", "md", "latex", "html")
PROGRAMS = ("csv", "json")
# Of ``render(..., "json")``: raised when a column changes its name or meaning, not when one is added.
JSON_VERSION = 2

_GAP = "  "
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
        instead: the name of a column whose text, where it is not empty, takes the place of a row's numbers.
        notes: lines that are needed to read the numbers.
        caption: those of them that a caption has room for (LaTeX).
    """

    frame: pd.DataFrame
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    instead: str | None = None
    caption: Sequence[str] = ()

    @property
    def rows(self) -> list[Row]:
        return self.frame.to_dict("records")

    @property
    def cells(self) -> list[list[str]]:
        """The cells of all rows; of a row without numbers the first and the text that takes their place."""
        return [
            [column.shown(row) for column in self.columns]
            if self.instead is None or missing(row[self.instead])
            else [self.columns[0].shown(row), row[self.instead]]
            for row in self.rows
        ]


def render(tables: Sequence[Table], to: str, *, width: int | None = None) -> str:
    """Render tables in one of ``PEOPLE`` or ``PROGRAMS``.

    Args:
        width: of a terminal, in characters; columns of text for which it has no room are named below. None = all stand.
    """
    if to in PROGRAMS:
        frames = [table.frame for table in tables if len(table.frame)]
        frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        if to == "csv":
            return frame.to_csv(index=False, lineterminator="\n")
        rows = [{name: _plain(value) for name, value in row.items()} for row in frame.to_dict("records")]
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        return f'{{"version": {JSON_VERSION}, "rows": [\n{lines}\n]}}\n'
    if to == "text":
        return "\n\n".join(_text(table, width) for table in tables)
    block = {"md": _markdown, "latex": _latex, "html": _html}[to]
    head = "% \\usepackage{booktabs}\n" if to == "latex" else ""
    return head + "\n\n".join(block(table) for table in tables) + "\n"


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None where the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, list | dict):
        return value
    if missing(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- for a terminal --------------------------------------------------------------------------------------------------


def wrapped(line: str, width: int | None, indent: str = "") -> str:
    """A line in as many as a terminal needs; the first begins with ``indent``, the others deeper."""
    if width is None:
        return f"{indent}{line}"
    return textwrap.fill(line, max(width, 40), initial_indent=indent, subsequent_indent=f"{indent}  ")


def _text(table: Table, width: int | None) -> str:
    lines, left_out = _aligned(table, width) if table.columns else ([], [])
    notes = [wrapped(note, width, "  ") for note in table.notes]
    if left_out:
        notes.append(wrapped(f"no room for: {', '.join(left_out)} (--columns, or --format csv)", width, "  "))
    title = table.title and wrapped(table.title, width)
    return "\n\n".join(part for part in (title, "\n".join(lines), "\n".join(notes)) if part)


def _aligned(table: Table, width: int | None) -> tuple[list[str], list[str]]:
    """Lines of a table, and the titles of columns for which a terminal has no room: the last ones."""
    columns, rows = table.columns, [[column.title for column in table.columns], *table.cells]
    full = [row for row in rows if len(row) == len(columns)]
    sizes = [max(len(row[place]) for row in full) for place in range(len(columns))]
    sizes[0] = max(len(row[0]) for row in rows)
    places = list(range(len(columns)))
    while width is not None and len(places) > 2 and sum(sizes[p] + len(_GAP) for p in places) - len(_GAP) > width:
        places.pop()
    lines = []
    for row in (rows[0], ["-" * size for size in sizes], *rows[1:]):
        if len(row) == len(columns):
            cells = [row[p].ljust(sizes[p]) if columns[p].is_words else row[p].rjust(sizes[p]) for p in places]
            lines.append(_GAP.join(cells).rstrip())
        else:
            lines.append(f"{row[0]:<{sizes[0]}}{_GAP}{row[1]}")
    return lines, [columns[place].title for place in range(len(places), len(columns))]


# ---- for documents ---------------------------------------------------------------------------------------------------


def escape_latex(text: str) -> str:
    """A text that LaTeX prints as it is."""
    return text.translate(_LATEX)


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is, in one line."""
    return " ".join(text.translate(_MARKDOWN).split())


def _grid(table: Table, escape: Callable[[str], str]) -> list[list[str]]:
    """The header and all rows, escaped, as many cells in each."""
    rows = [[column.title for column in table.columns], *table.cells]
    return [[escape(cell) for cell in row] + [""] * (len(table.columns) - len(row)) for row in rows]


def _latex(table: Table) -> str:
    """One ``table`` with booktabs rules; its title and the shortest notes are the caption."""
    header, *rows = [" & ".join(row) + r" \\" for row in _grid(table, escape_latex)]
    caption = escape_latex(" ".join(f"{part.rstrip('.')}." for part in (table.title, *table.caption) if part))
    columns = "".join("l" if column.is_words else "r" for column in table.columns)
    lines = [r"\begin{table}[tbp]", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{columns}}}"]
    lines += [r"\toprule", header, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def _markdown(table: Table) -> str:
    """One table in GitHub's dialect, under its title and above its notes."""
    header, *rows = _grid(table, escape_markdown)
    rule = ["---" if column.is_words else "---:" for column in table.columns]
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)] if table.columns else []
    notes = "\n".join(f"- {escape_markdown(note)}" for note in table.notes)
    return "\n\n".join(part for part in (escape_markdown(table.title), "\n".join(lines), notes) if part)


def _html(table: Table) -> str:
    """One ``table`` in a box that scrolls; the numbers behind its cells are ``data-value``, by which a page sorts."""
    kinds = ["" if column.is_words else " class=number" for column in table.columns]
    head = "".join(f"<th{kind}>{html.escape(c.title)}</th>" for kind, c in zip(kinds, table.columns, strict=True))
    body = []
    for row, cells in zip(table.rows, table.cells, strict=True):
        if len(cells) < len(table.columns):
            label, reason = map(html.escape, cells)
            body.append(f"<tr><td>{label}</td><td colspan={len(table.columns) - 1}>{reason}</td></tr>")
            continue
        values = [
            "" if cell == NONE else _data_value(row.get(c.name)) for cell, c in zip(cells, table.columns, strict=True)
        ]
        tags = (
            f"<td{kind}{value}>{html.escape(cell)}</td>" for kind, value, cell in zip(kinds, values, cells, strict=True)
        )
        body.append(f"<tr>{''.join(tags)}</tr>")
    lines = [f"<h3>{html.escape(table.title)}</h3>"] if table.title else []
    if table.columns:
        lines += [f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>", *body, "</tbody></table></div>"]
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return "\n".join([*lines, *([f"<ul>{notes}</ul>"] if notes else [])])


def _data_value(value: Any) -> str:
    """The number behind a cell, where there is one."""
    return f' data-value="{float(value)}"' if isinstance(value, Real) and not missing(value) else ""
