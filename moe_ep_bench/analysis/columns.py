"""Each column of the frames once: its name in CSV, its header, unit and form; and tables of them, rendered.

Tables, the page and figures take headers and units from ``COLUMNS``; a column without a row here is shown as it is. A
column is added by a row. A ``Table`` is a frame, the columns that people read, a title and notes. Every command prints
its results through ``render``: for a terminal, as Markdown and LaTeX; as CSV and JSON with all columns, unrounded. So a
number is alike wherever it is read; the page's template takes a ``Table`` as it is.
"""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pandas as pd

from moe_ep_bench.facts.words import SHORTER, Line, label_parts, label_words
from moe_ep_bench.schema import LAYER_PHASES, PHASES, UNACCOUNTED

NONE = "-"
# What ``topk`` has that native, Megatron-Core's own, has not.
SAME_KERNELS = "which runs the same kernels"
Row = dict[Any, Any]  # a record of a frame, by column


@dataclass(frozen=True)
class Column:
    """A column as people read it.

    Attributes:
        name: in the frame and in CSV.
        form: of a number, after ``scale``; None = words, which stand left.
        better: which direction is; none of what is neither.
        native: the value of the model's own routing, which axes mark.
        least: the least range of an axis, so that noise is not blown up to fill a panel.
        ends: of an axis, whatever is drawn.
        cell: what a row's cell says where it takes more than this column; None = the value in its form.
    """

    name: str
    header: str
    unit: str = ""
    form: str | Callable[[float], str] | None = "{:.3f}"
    scale: float = 1.0
    better: Literal["higher", "lower"] | None = None
    cell: Callable[[Row], str] | None = None
    native: float | None = None
    least: float = 0.0
    ends: tuple[float, float] | None = None

    @property
    def axis(self) -> str:
        """The header with its unit, or with native's value, as an axis has it."""
        beside = self.unit or ("" if self.native is None else f"native = {self.native:g}")
        return f"{self.header} ({beside})" if beside else self.header

    @property
    def title(self) -> str:
        """The header with its unit, as tables have it."""
        return f"{self.header} {self.unit}".strip()

    @property
    def is_words(self) -> bool:
        return self.form is None or self.cell is not None

    def shown(self, row: Row) -> str:
        """A row's cell."""
        if self.cell is not None:
            return self.cell(row)
        value: Any = row.get(self.name)
        if missing(value):
            return NONE
        if self.form is None:
            return str(value)
        form = self.form.format if isinstance(self.form, str) else self.form
        return form(value * self.scale if self.scale != 1 else value)


def missing(value: Any) -> bool:
    """Whether a frame's value is none."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def milliseconds(value: float, digits: int = 4) -> str:
    """A time with as many digits as count, whatever its size."""
    decimals = digits - 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(decimals, 0), 4)}f}"


def without_minus_zero(value: float) -> str:
    """A difference with two decimals."""
    return f"{round(value, 2) + 0.0:.2f}"


def text(name: str, header: str | None = None) -> Column:
    """The column ``name`` as it is."""
    return Column(name, header or name, form=None)


def number(name: str, header: str | None = None, form: str | Callable[[Any], str] = "{:.3f}") -> Column:
    """The column ``name``, each number in a form."""
    return Column(name, header or name, form=form)


def percentage(name: str, header: str, form: str | Callable[[float], str] = "{:.1f}", **more: Any) -> Column:
    """A share in percent."""
    return Column(name, header, "%", form, 100, **more)


def ends(*names: str, of: Sequence[str] = ("median", "low", "high")) -> tuple[str, ...]:
    """Columns of the ends of intervals: ``<name>_<end>``."""
    return tuple(f"{name}_{end}" for name in names for end in of)


def plain(value: float) -> str:
    """A number of a column without a form: whole, or with four digits."""
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


def times(name: str, header: str) -> Column:
    """A time in milliseconds."""
    return Column(name, header, "ms", milliseconds, better="lower")


def interval(
    name: str,
    header: str,
    *,
    of_baseline: str | None = None,
    middle: str = "median",
    form: Callable[[float], str] = "{:.3f}".format,
    **more: Any,
) -> Column:
    """``1.23 [1.20, 1.26]`` of ``NAME_median``, ``_low`` and ``_high``; ``(1.10..1.31)`` where it is no interval.

    Where one draw of a synthetic traffic is behind an interval, it says so: others may lie outside.

    Args:
        of_baseline: the baseline's cell, against which all are set.
        middle: what the column between the ends is called.
    """

    def cell(row: Row) -> str:
        if of_baseline is not None and row.get("role") == "baseline":
            return of_baseline
        if missing(row.get(f"{name}_{middle}")):
            return NONE
        value, low, high = (form(row[f"{name}_{end}"]) for end in (middle, "low", "high"))
        if not row[f"{name}_is_interval"]:
            return f"{value} ({low}..{high})"
        return f"{value} [{low}, {high}]{' one draw' if row.get('is_one_draw') else ''}"

    return Column(f"{name}_{middle}", header, better="higher", cell=cell, **more)


# ---- labels ----------------------------------------------------------------------------------------------------------


def labels(rows: pd.DataFrame, form: Callable[..., Any] = label_words, **how: Collection[str]) -> pd.Series:
    """The label of each case, or its words (``words.label_parts``), of ``policy``, ``settings`` and ``role``."""
    return pd.Series([form(*case, **how) for case in _named(rows)], rows.index, dtype=object)


def _named(rows: pd.DataFrame) -> Iterator[tuple[str, Any, str]]:
    """What names a case: policy, settings and role."""
    return zip(rows["policy"], rows["settings"], rows["role"], strict=True)


def short_labels(rows: pd.DataFrame, width: float = math.inf) -> pd.Series:
    """``token_drop 1.0 per device`` of ``token_drop capacity_factor=1.0 granularity=device``, for all cases of a table.

    What distinguishes two of them stays.

    Args:
        width: characters; labels that are longer lose words that all of the same policy share.
    """
    full, parts = labels(rows), labels(rows, label_parts)
    short: pd.Series = pd.Series([frozenset()] * len(rows), rows.index, dtype=object)
    for step in SHORTER:
        more = short.map(step.union)
        shorter = pd.Series(
            [label_parts(*case, short=keys) for case, keys in zip(_named(rows), more, strict=True)], rows.index
        )
        is_clear = _is_clear(full, shorter.map(" ".join))
        parts, short = shorter.where(is_clear, parts), more.where(is_clear, short)
    if width < math.inf:
        shared = {first: set.intersection(*map(set, of)) for first, of in parts.groupby(parts.str[0])}
        cut = parts.map(lambda words: _cut(words, shared[words[0]], width), "ignore")
        parts = cut.where(_is_clear(full, cut.map(" ".join)), parts)
    return parts.map(" ".join)


def _is_clear(full: pd.Series, short: pd.Series) -> pd.Series:
    """Whether a short label stands for one label alone."""
    return full.groupby(short).transform("nunique") == 1


def _cut(words: Sequence[str], shared: Collection[str], width: float) -> list[str]:
    """The words of a label without shared ones, from its end on, until it is no longer than so many characters."""
    kept, cut = list(words), list(words)
    for place in range(len(words) - 1, 0, -1):
        if len(" ".join(cut)) > width and words[place] in shared:
            kept[place] = "..."
            cut = [word for word, before in zip(kept, ["", *kept], strict=False) if word != "..." or before != "..."]
    return cut


# Missing are both, dropped and rerouted, which some results do not tell apart.
_COSTS = (
    percentage("dropped_share", "dropped", better="lower", native=0.0, least=0.05),
    percentage("rerouted_share", "rerouted", better="lower", native=0.0, least=0.05),
    percentage("missing_share", "missing", better="lower", native=0.0, least=0.05),
    percentage("retained_mass", "mass kept", better="higher", native=1.0, least=0.05),
)
COSTS = tuple(column.name for column in _COSTS)
LOST = COSTS[:-1]


def lost_shown(rows: pd.DataFrame, suffix: str = "") -> list[str]:
    """Those of ``LOST`` that say something of rows, whose names end in a suffix."""
    dropped, rerouted, lacking = (rows[name + suffix].astype(float) for name in LOST)
    says = (dropped.notna(), rerouted > 0, lacking.where(dropped.isna()) > 0)
    return [name for name, is_said in zip(LOST, says, strict=True) if is_said.any()]


def lost_columns(rows: pd.DataFrame, suffix: str = "") -> list[Column]:
    """The columns of ``lost_shown``."""
    return [replace(COLUMNS[name], name=name + suffix) for name in lost_shown(rows, suffix)]


def cost_words(row: Row, of: str = "") -> str:
    """``3.1 % dropped, 5.0 % rerouted``, of a case whose missing pairs are known; ``of``: words behind the first %."""
    if missing(row["dropped_share"]):
        return f"{100 * row['missing_share']:.1f} %{of} dropped or rerouted"
    rerouted = f", {100 * row['rerouted_share']:.1f} % rerouted" if row["rerouted_share"] > 0 else ""
    return f"{100 * row['dropped_share']:.1f} %{of} dropped{rerouted}"


_PARTS = [*dict.fromkeys([*(phase.group for phase in PHASES.values()), UNACCOUNTED])]

# Of servers; frames of other results lack them.
_SERVED = (
    times("ttft_ms", "TTFT"),
    times("ttft_p99_ms", "TTFT p99"),
    interval("ttft_speedup", "TTFT speedup", of_baseline="1", native=1.0, least=0.1),
    text("ttft_verdict", "TTFT verdict"),
    times("tpot_ms", "TPOT"),
    times("tpot_p99_ms", "TPOT p99"),
    interval("tpot_speedup", "TPOT speedup", of_baseline="1", native=1.0, least=0.1),
    text("tpot_verdict", "TPOT verdict"),
    interval("throughput_speedup", "throughput", of_baseline="1", native=1.0, least=0.1),
    text("throughput_verdict", "throughput verdict"),
    percentage("equal_share", "equal", better="higher", ends=(0.0, 1.0)),
    Column("first_difference", "first difference", "token", "{:.0f}", better="higher"),
    Column("logprob_difference", "log-probability difference", "nats", "{:.2g}", better="lower"),
    percentage("alone_equal_share", "equal alone", better="higher"),
    Column("alone_first_difference", "first difference alone", "token", "{:.0f}", better="higher"),
    Column("alone_logprob_difference", "log-probability difference alone", "nats", "{:.2g}", better="lower"),
)
SERVED = tuple(column.name for column in _SERVED)

COLUMNS = {
    column.name: column
    for column in (
        # Identity of a case.
        text("title", "comparison"),
        text("label", "policy"),
        text("policy", "policy's name"),
        text("verdict"),
        Column("capacity_factor", "capacity factor", form="{:g}"),
        Column("num_ranks", "EP size", "ranks", "{:,.0f}"),
        Column("num_tokens", "batch", "tokens", "{:,.0f}"),
        Column("peak_load", "peak load", "x mean", "{:g}"),
        # Times.
        times("median_ms", "layer"),
        times("slowest_group_ms", "slowest EP group"),
        times("p90_ms", "p90"),
        times("p99_ms", "p99"),
        times("pass_ms", "pass"),
        interval("speedup", "speedup", of_baseline="1", native=1.0, least=0.1),
        interval("over_topk", "over topk"),
        Column("tokens_per_s", "tokens/s", form="{:,.0f}", better="higher"),
        Column("tokens_per_s_per_rank", "tokens/s/GPU", form="{:,.0f}", better="higher"),
        # Costs of a speedup.
        *_COSTS,
        percentage("below_frontier", "below frontier", without_minus_zero, better="lower"),
        percentage("below_frontier_experts", "below expert frontier", without_minus_zero, better="lower"),
        Column("output_error", "output error", form="{:.2g}", better="lower"),
        number("num_iterations", "iterations", "{:.0f}"),
        number("num_phases", "phases", "{:.0f}"),
        Column("reference_error", "error", "against the reference", "{:.2g}", better="lower"),
        number("peak_memory_gib", "peak memory", "{:.2g} GiB"),
        text("lost_attempts", "attempts lost before"),
        Column("extra_gib_per_rank", "more memory", "GiB a rank", "{:.3g}", better="lower"),
        Column("moved_gib", "weights moved", "GiB a batch", "{:.3g}", better="lower"),
        Column("rearrange_ms", "new plan", "ms", "{:.3g}", better="lower"),
        Column("rearranged_gib", "weights of a new plan", "GiB", "{:.3g}", better="lower"),
        percentage("kept_share", "mass kept", better="higher", native=1.0),
        Column("cross_entropy_added", "cross-entropy added", "nats", better="lower"),
        # Loads.
        Column("fullest_expert", "fullest expert", form="{:.2f}", better="lower"),
        Column("fullest_rank", "fullest rank", form="{:.2f}", better="lower"),
        Column("fullest_tokens", "fullest rank's tokens", form="{:.2f}"),
        Column("slowest_group_fullest_expert", "of the fullest EP group", form="{:.2f}", better="lower"),
        Column("slowest_group_fullest_rank", "of the fullest EP group", form="{:.2f}", better="lower"),
        Column("relief", "fullest rank, native / policy", form="{:.2f}", better="higher", native=1.0),
        Column("expert_imbalance", "expert imbalance", form="{:.2f}", better="lower"),
        Column("rank_imbalance", "rank imbalance", form="{:.2f}", better="lower"),
        Column("experts_per_token", "experts/token", form="{:.2f}"),
        Column("activated_experts", "activated", form="{:.1f}", better="lower"),
        Column("activated_fullest_rank", "activated on a rank", form="{:.1f}", better="lower"),
        Column("sent_pairs", "pairs sent", form="{:.2f}", better="lower"),
        Column("sent_copies", "rank copies", form="{:.2f}", better="lower"),
        Column("sent_node_copies", "node copies", form="{:.2f}", better="lower"),
        # Where time goes.
        text("breakdown_slowest_phase", "slowest phase"),
        times("breakdown_layer_ms", "slowest rank, probed"),
        times("phases_ms", "all phases"),
        *(times(f"{part}_ms", part) for part in _PARTS),
        *(Column(f"{phase}_us", phase.replace("_", " "), "us", "{:.1f}", better="lower") for phase in LAYER_PHASES),
        percentage("breakdown_unaccounted_share", "unaccounted"),
        percentage("breakdown_policy_share", "policy share"),
        percentage("probe_overhead", "probe overhead"),
        *_SERVED,
        # Whole models.
        times("moe_ms", "MoE"),
        percentage("moe_share", "MoE share"),
        interval("moe_speedup", "MoE speedup", of_baseline="1"),
        Column("by_amdahl", "by Amdahl", better="higher"),
        Column("most_by_amdahl", "Amdahl limit"),
        times("policy_ms", "policy"),
        *(times(f"mean_rank_{part}_ms", part) for part in (*_PARTS, "policy")),
        # Ranks.
        Column("rank", "rank", form="{:.0f}"),
        text("hostname", "host"),
        Column("load_over_mean", "load", "x mean", "{:.2f}"),
    )
}


def column_of(name: str, values: pd.Series | None = None) -> Column:
    """The column of a name; one without a row in ``COLUMNS`` is called by its name in words.

    Args:
        values: of the frame, which say whether such a column has numbers; None = it has.
    """
    if name in COLUMNS:
        return COLUMNS[name]
    has_numbers = values is None or (pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values))
    return Column(name, name.replace("_", " "), form=plain if has_numbers else None)


# ---- tables ----------------------------------------------------------------------------------------------------------

PROGRAMS = ("csv", "json")
# Of ``render(..., "json")``: raised when a column changes its name or meaning, not when one is added.
JSON_VERSION = 4

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
        title: what the numbers are of; LaTeX's caption.
        notes: lines that are needed to read the numbers.
        instead: the name of a column whose text, where it is not empty, makes a row a line below the table.
        about: how, and on what, they came about: behind the title, in LaTeX the first of the notes.
    """

    frame: pd.DataFrame
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str | Line] = ()
    instead: str | None = None
    about: str = ""

    @property
    def heading(self) -> str:
        return ": ".join(filter(None, (self.title, self.about)))

    @cached_property
    def rows(self) -> list[Row]:
        """The rows that have numbers."""
        frame = self.frame if self.instead is None else self.frame[self.frame[self.instead].isna()]
        return frame.to_dict("records")

    @cached_property
    def cells(self) -> list[list[str]]:
        return [[column.shown(row) for column in self.columns] for row in self.rows]

    @property
    def lines(self) -> list[str]:
        """What stands below: rows without numbers, then notes."""
        return [*self.lost, *map(str, self.notes)]

    @property
    def lost(self) -> list[str]:
        """Rows without numbers, a line each that says why; a row is named by its first cell and its label."""
        lost = self.frame[:0] if self.instead is None else self.frame[self.frame[self.instead].notna()]
        rows = lost.to_dict("records") if len(lost) else []
        names = [dict.fromkeys([self.columns[0].shown(row), row.get("label", NONE)]) for row in rows]
        return [
            f"{', '.join(name for name in of_row if name != NONE)}: {row[self.instead]}"
            for of_row, row in zip(names, rows, strict=True)
        ]


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
    columns, lines = list(table.columns), table.lines
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
    title = table.heading and wrapped(table.heading, width)
    below = "\n".join(wrapped(line, width, "  ") for line in lines)
    return "\n\n".join(part for part in (title, "\n".join(rows), below) if part)


def escape_latex(text: str) -> str:
    """A text that LaTeX prints as it is."""
    return text.translate(_LATEX)


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is, in one line."""
    return " ".join(text.translate(_MARKDOWN).split())


def _latex(table: Table) -> str:
    """One ``table`` with booktabs rules: its title is the caption, a sentence; all else are notes below it."""
    rows = [[column.title for column in table.columns], *table.cells]
    header, *body = [" & ".join(map(escape_latex, row)) + r" \\" for row in rows]
    columns = "".join("l" if column.is_words else "r" for column in table.columns)
    lines = [r"\begin{table}[tbp]", r"\centering"]
    lines += [rf"\caption{{{escape_latex(table.title.rstrip('.'))}.}}"] * bool(table.title)
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule", *body, r"\bottomrule"]
    lines += [r"\end{tabular}"]
    if notes := [" ".join(line.split()) for line in (table.about, *table.lines) if line]:
        names = {label.split()[0] for label in table.frame.get("label", ()) if label}
        notes = [f"{escape_latex(_capitalised(line, names).rstrip('.'))}." for line in notes]
        lines += ["", r"\smallskip", r"\begin{minipage}{\linewidth}", r"\footnotesize", "\n\n".join(notes)]
        lines += [r"\end{minipage}"]
    return "\n".join([*lines, r"\end{table}", ""])


def _capitalised(line: str, names: Collection[str]) -> str:
    """A line as a sentence begins, unless it begins with the name of a policy."""
    first = line.partition(" ")[0].rstrip(":,")
    return line if first in names else f"{line[:1].upper()}{line[1:]}"


def _markdown(table: Table) -> str:
    """One table in GitHub's dialect, under its title and above its notes."""
    header, *body = [[column.title for column in table.columns], *table.cells]
    rule = ["---" if column.is_words else "---:" for column in table.columns]
    rows = [map(escape_markdown, header), rule, *(map(escape_markdown, row) for row in body)]
    lines = [f"| {' | '.join(row)} |" for row in rows] if table.columns else []
    notes = "\n".join(f"- {escape_markdown(line)}" for line in table.lines)
    return "\n\n".join(part for part in (escape_markdown(table.heading), "\n".join(lines), notes) if part)
