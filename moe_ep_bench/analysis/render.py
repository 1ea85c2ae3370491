"""Render frames as tables: for a terminal, Markdown, LaTeX and HTML; as CSV and JSON with all columns, unrounded.

A ``Table`` is a frame, the columns that people read, a title and notes. Every command prints its results through
``render``, so that a number stands alike wherever it is read.
"""

from __future__ import annotations

import html
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import pandas as pd

PEOPLE = ("text", "md", "latex", "html")
PROGRAMS = ("csv", "json")
# Of ``render(..., "json")``: raised when a column changes its name or meaning, not when one is added.
JSON_VERSION = 1
NONE = "-"

Row = dict[str, Any]
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


@dataclass(frozen=True)
class Column:
    """A column that people read.

    Attributes:
        cell: what a row's cell says.
        is_words: whether it stands left.
        source: the frame's column behind it, by whose numbers a page sorts.
    """

    header: str
    cell: Callable[[Row], str]
    is_words: bool = False
    source: str | None = None


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


def missing(value: Any) -> bool:
    """Whether a frame's value is none."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def text(name: str, header: str | None = None) -> Column:
    """The column ``name`` as it is."""
    return Column(
        header or name, lambda row: NONE if missing(row[name]) else str(row[name]), is_words=True, source=name
    )


def number(name: str, header: str | None = None, form: str | Callable[[Any], str] = "{:.3f}") -> Column:
    """The column ``name``, each number in a form."""
    shown = form.format if isinstance(form, str) else form
    return Column(header or name, lambda row: NONE if missing(row[name]) else shown(row[name]), source=name)


def percentage(name: str, header: str) -> Column:
    """A share as a percentage with one decimal; the header has the sign."""
    return number(name, header, lambda share: f"{100 * share:.1f}")


def milliseconds(value: float, digits: int = 4) -> str:
    """A time with as many digits as count, whatever its size."""
    decimals = digits - 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(decimals, 0), 4)}f}"


def interval(name: str, header: str, *, one: str | None = None) -> Column:
    """``1.23 [1.20, 1.26]`` of ``NAME_median``, ``_low`` and ``_high``; ``(1.10..1.31)`` where it is no interval.

    Args:
        one: a role whose cell is 1, for all is set against it.
    """

    def cell(row: Row) -> str:
        if one is not None and row["role"] == one:
            return "1"
        if missing(row[f"{name}_median"]):
            return NONE
        median, low, high = (f"{row[f'{name}_{end}']:.3f}" for end in ("median", "low", "high"))
        return f"{median} [{low}, {high}]" if row[f"{name}_is_interval"] else f"{median} ({low}..{high})"

    return Column(header, cell, is_words=True, source=f"{name}_median")


def render(tables: Sequence[Table], to: str, *, width: int | None = None) -> str:
    """Render tables in one of ``PEOPLE`` or ``PROGRAMS``.

    Args:
        width: of a terminal, in characters; wider tables of text go on below. None = as wide as they are.
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
    if not isinstance(value, list | dict) and missing(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cells(table: Table) -> list[list[str]]:
    """The cells of all rows; of a row without numbers the first and the text that takes their place."""
    return [
        [column.cell(row) for column in table.columns]
        if table.instead is None or missing(row[table.instead])
        else [table.columns[0].cell(row), row[table.instead]]
        for row in table.rows
    ]


def _text(table: Table, width: int | None) -> str:
    notes = "\n".join(f"  {note}" for note in table.notes)
    parts = [table.title, "\n".join(_aligned(table, width)) if table.columns else "", notes]
    return "\n\n".join(part for part in parts if part)


def _aligned(table: Table, width: int | None) -> list[str]:
    """Lines of a table; columns for which a terminal has no room follow below, each time beside the first."""
    rows = [[column.header for column in table.columns], *_cells(table)]
    sizes = [max(len(row[place]) for row in rows if len(row) == len(rows[0])) for place in range(len(rows[0]))]
    sizes[0] = max(len(row[0]) for row in rows)
    blocks: list[list[int]] = [[0]]
    for place, size in enumerate(sizes[1:], 1):
        taken = sum(sizes[other] + len(_GAP) for other in blocks[-1])
        if width is not None and len(blocks[-1]) > 1 and taken + size > width:
            blocks.append([0])
        blocks[-1].append(place)
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines else []
        for row in (rows[0], ["-" * size for size in sizes], *rows[1:]):
            if len(row) == len(sizes):
                cells = [row[p].ljust(sizes[p]) if table.columns[p].is_words else row[p].rjust(sizes[p]) for p in block]
                lines.append(_GAP.join(cells).rstrip())
            elif block is blocks[0]:
                lines.append(f"{row[0]:<{sizes[0]}}{_GAP}{row[1]}")
    return lines


def escape_latex(text: str) -> str:
    """A text that LaTeX prints as it is."""
    return text.translate(_LATEX)


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is, in one line."""
    return " ".join(text.translate(_MARKDOWN).split())


def _grid(table: Table, escape: Callable[[str], str]) -> list[list[str]]:
    """The header and all rows, escaped, as many cells in each."""
    rows = [[column.header for column in table.columns], *_cells(table)]
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
    head = "".join(f"<th{kind}>{html.escape(c.header)}</th>" for kind, c in zip(kinds, table.columns, strict=True))
    body = []
    for row, cells in zip(table.rows, _cells(table), strict=True):
        if len(cells) < len(table.columns):
            label, reason = map(html.escape, cells)
            body.append(f"<tr><td>{label}</td><td colspan={len(table.columns) - 1}>{reason}</td></tr>")
            continue
        values = [
            "" if cell == NONE else _data_value(row.get(c.source)) for cell, c in zip(cells, table.columns, strict=True)
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
