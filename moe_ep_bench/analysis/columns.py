"""Each column of the frames once: its name in CSV, its header, unit and form, and which direction is better.

Tables, the page and figures take headers and units from ``COLUMNS``; what stands in no row here is shown as it is. A
column is added by a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from moe_ep_bench.schema import LAYER_PHASES, PHASES, UNACCOUNTED

NONE = "-"
Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column as people read it.

    Attributes:
        name: in the frame and in CSV.
        form: of a number, after ``scale``; None = words, which stand left.
        better: which direction is; none of what is neither.
        native: the value of the model's own routing, which axes mark.
        least: the least range of an axis, so that noise is not blown up to fill a panel.
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
        value = row.get(self.name)
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
        return f"{value} [{low}, {high}]" if row[f"{name}_is_interval"] else f"{value} ({low}..{high})"

    return Column(f"{name}_{middle}", header, better="higher", cell=cell, **more)


# Names of fields in the labels of cases, for tables that have to fit.
_SHORTER = {
    r"capacity_factor=": "",
    r"(granularity|scope)=": "per ",
    r"(metric|modality)=": "",
    r"(request|rank)_budget": "budget",
    r" similarity=\S+": "",
    r" spare per rank": " spare",
    r" us to solve\)": " us)",
    r" \([^ ]+ us\)": "",
}


def short_labels(labels: pd.Series) -> pd.Series:
    """``token_drop 1.0 per device`` of ``token_drop capacity_factor=1.0 granularity=device``, for all cases of a table.

    What tells two of them apart stays.
    """
    short = labels
    for pattern, by in _SHORTER.items():
        shorter = short.str.replace(pattern, by, regex=True)
        short = shorter.where(labels.groupby(shorter).transform("nunique") == 1, short)
    return short


def cut_labels(labels: pd.Series, width: int) -> pd.Series:
    """Labels without words that all labels of a policy share, where they are longer than so many characters."""
    words = labels.str.split()
    shared = {first: set.intersection(*map(set, of)) - {first} for first, of in words.groupby(words.str[0])}
    cut = {}
    for label, kept in zip(labels, words, strict=True):
        kept, short = list(kept), label
        for place in range(len(kept) - 1, 0, -1):
            if len(short) > width and kept[place] in shared[kept[0]]:
                kept[place] = "..."
                short = re.sub(r"( \.\.\.)+", " ...", " ".join(kept))
        cut[label] = short
    short = labels.map(cut)
    return short.where(labels.groupby(short).transform("nunique") == 1, labels)


_PARTS = [*dict.fromkeys([*(phase.group for phase in PHASES.values()), UNACCOUNTED])]

COLUMNS = {
    column.name: column
    for column in (
        # What a case is.
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
        times("p90_ms", "p90"),
        times("p99_ms", "p99"),
        times("pass_ms", "pass"),
        interval("speedup", "speedup", of_baseline="1", native=1.0, least=0.1),
        interval("over_topk", "over topk"),
        Column("tokens_per_s", "tokens/s", form="{:,.0f}", better="higher"),
        Column("tokens_per_s_per_rank", "tokens/s/GPU", form="{:,.0f}", better="higher"),
        # What a speedup costs.
        percentage("dropped_share", "dropped", better="lower", native=0.0, least=0.05),
        percentage("retained_mass", "mass kept", better="higher", native=1.0, least=0.05),
        percentage("below_frontier", "below frontier", without_minus_zero, better="lower"),
        percentage("below_frontier_experts", "of experts", without_minus_zero, better="lower"),
        Column("output_error", "output error", form="{:.2g}", better="lower"),
        Column("extra_gib_per_rank", "more memory", "GiB a rank", "{:.3g}", better="lower"),
        Column("moved_gib", "weights moved", "GiB a batch", "{:.3g}", better="lower"),
        percentage("kept_share", "mass kept", better="higher", native=1.0),
        Column("cross_entropy_added", "cross-entropy added", "nats", better="lower"),
        # Loads.
        Column("fullest_expert", "fullest expert", form="{:.2f}", better="lower"),
        Column("fullest_rank", "fullest rank", form="{:.2f}", better="lower"),
        Column("relief", "fullest rank, native / policy", form="{:.2f}", better="higher", native=1.0),
        Column("expert_imbalance", "expert imbalance", form="{:.2f}", better="lower"),
        Column("rank_imbalance", "rank imbalance", form="{:.2f}", better="lower"),
        Column("experts_per_token", "experts/token", form="{:.2f}"),
        Column("activated_experts", "activated", form="{:.1f}", better="lower"),
        Column("activated_fullest_rank", "activated on a rank", form="{:.1f}", better="lower"),
        # Where time goes.
        text("breakdown_slowest_phase", "slowest phase"),
        times("breakdown_layer_ms", "layer, probed"),
        *(times(f"{part}_ms", part) for part in _PARTS),
        *(Column(f"{phase}_us", phase.replace("_", " "), "us", "{:.1f}", better="lower") for phase in LAYER_PHASES),
        percentage("breakdown_unaccounted_share", "unaccounted"),
        percentage("breakdown_policy_share", "choosing"),
        percentage("probe_overhead", "probes"),
        # Whole models.
        times("moe_ms", "MoE"),
        percentage("moe_share", "MoE share"),
        interval("moe_speedup", "MoE speedup", of_baseline="1"),
        Column("by_amdahl", "by Amdahl", better="higher"),
        Column("most_by_amdahl", "at most, by Amdahl"),
        times("policy_ms", "policy"),
        *(times(f"mean_rank_{part}_ms", part) for part in (*_PARTS, "policy")),
        # Ranks.
        Column("rank", "rank", form="{:.0f}"),
        text("hostname", "host"),
        Column("load_over_mean", "load", "x mean", "{:.2f}"),
    )
}
