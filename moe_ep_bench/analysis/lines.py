"""Figures of any column of the frame over any other, as ``plot --x --y`` and a config's ``figures:`` ask for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import CASE, batch_phases, routing
from moe_ep_bench.analysis.columns import column_of, ends, labels
from moe_ep_bench.analysis.drawing import ADDED, HIDDEN, Figure, public_columns, value_words, with_fields
from moe_ep_bench.analysis.marks import Series
from moe_ep_bench.analysis.reduce import GROUPS
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.config.conditions import columns_of, holds
from moe_ep_bench.errors import UserError, brief, did_you_mean, naming
from moe_ep_bench.policies import FIELDS

_OF_POLICIES = ("policy", "label", "family")
_PERCENTILE = re.compile(r"(?P<column>\w+)_p(?P<percent>\d\d?)$")


def lines(
    x: str, y: str, by: str | None = None, facet: str | None = None, where: str | None = None, *, of: str = "--"
) -> dict[str, Figure]:
    """The figure of a column over another, by its name, as a config's ``figures:`` or ``plot --x --y`` asks for it.

    Args:
        x, y: columns of cases, or of batches and layers, of which means are drawn; parameters of policies are columns.
        by: the column whose values are lines; None = the policy but for ``x``.
        facet: the column whose values are panels; None = comparisons, or models where ``x`` tells comparisons apart.
        where: a condition on columns (``conditions``).
        of: words before a key in an error's line.
    """
    asked = {name: column for name, column in {"x": x, "y": y, "by": by, "facet": facet}.items() if column}
    title = f"{column_of(y).header} over {column_of(x).header}"
    figure = Figure(
        title[:1].upper() + title[1:],
        [Series(x, y)],
        "A line for each {of_lines}. Several batches, layers or comparisons at one place are their mean.",
        rows=partial(_line_rows, asked=asked, where=where, of=of),
        columns=[*asked.values(), *_of_whiskers(y)],
        limit=6,
        ordered=by not in (None, *_OF_POLICIES),
        of="phases" if any(map(_is_probed, (x, y))) else "times",
        whiskers=y.removesuffix("_median"),
    )
    return {"-".join(filter(None, [f"{y}-over-{x}", by and f"by-{by}", facet])): figure}


def _of_whiskers(y: str) -> list[str]:
    """Columns that say where a column's whiskers end and what they are; none of most columns."""
    of_ends = ends(y.removesuffix("_median"), of=("low", "high", "is_interval"))
    return [*of_ends, "is_one_draw"] if y.endswith("_median") else []


def _is_probed(column: str) -> bool:
    """Whether a column is of breakdown iterations."""
    is_of_probes = column.endswith("_us") or column.startswith(("breakdown_", "mean_rank_"))
    return is_of_probes or column.removesuffix("_ms") in GROUPS


# ---- rows ------------------------------------------------------------------------------------------------------------


def _line_rows(store: Store, rows: pd.DataFrame, asked: Mapping[str, str], where: str | None, of: str) -> pd.DataFrame:
    """A row per panel, line and place; none where no policy that ran has a field asked for.

    Raises:
        UserError: a column is unknown, or the condition cannot be read.
    """
    x, y = asked["x"], asked["y"]
    rows, known = wide_rows(store, rows, [*asked.values(), *(columns_of(where) if where else ())])
    if not _are_there(rows, known, asked, of):
        return rows.iloc[:0]
    if where:
        with naming(f"{of}where"):
            rows = rows[holds(rows, where, [*public_columns(rows), *FIELDS])]
    rows = rows[rows["role"].isin(["baseline", "policy", "replication"]) & rows[y].notna()].copy()  # of one piece
    if rows[x].isna().all():
        return rows.iloc[:0]
    return _means(_in_lines(_in_facets(rows, x, asked.get("facet")), x, asked.get("by")), x, y)


def _are_there(rows: pd.DataFrame, known: Sequence[str], asked: Mapping[str, str], of: str) -> bool:
    """Whether rows have all columns; not where no policy that ran has such a field.

    Raises:
        UserError: a column is unknown, or ``y`` is no number.
    """
    absent = {name: column for name, column in asked.items() if column not in public_columns(rows)}
    if absent and set(absent.values()) <= FIELDS:
        return False
    for name, column in absent.items():
        listed = f"expected a column, one of {', '.join(known)}"
        raise UserError(f"{of}{name}: {listed}; got {brief(column)}{did_you_mean(column, known)}")
    if not pd.api.types.is_numeric_dtype(values := rows[asked["y"]]):
        has = "words" if values.notna().any() else "none"
        raise UserError(f"{of}y: expected a column of numbers; {asked['y']} has {has}")
    return True


def _in_facets(rows: pd.DataFrame, x: str, facet: str | None) -> pd.DataFrame:
    """Rows with their panel: a value of ``facet``; else comparisons, or models where ``x`` tells comparisons apart."""
    if facet is not None:
        words = rows[facet].map(value_words)
        return rows.assign(facet=words, heading=f"{facet.replace('_', ' ')} " + words)
    if rows.groupby("facet")[x].nunique().max() == 1:
        return rows.assign(facet=rows["model"], heading=rows["model"])
    return rows


def _in_lines(rows: pd.DataFrame, x: str, by: str | None) -> pd.DataFrame:
    """Rows with their line: the policy without ``x``, or a value of ``by``.

    Where a value would join several policies each has a line of its own; without a value a row goes by its policy.
    """
    label = labels(rows, without=[x]).where(rows["role"] != "baseline", "native")
    rows = rows.assign(of_lines=(by or "policy").replace("_", " "), variant=label)
    if by is None:
        return rows.assign(line=label, legend=label)
    value = rows[by].map(value_words).where(rows[by].notna(), label)
    is_named = rows["settings"].map(
        lambda settings: any(one.key == by and not one.is_default for one in settings), "ignore"
    )
    named = label.where((by in _OF_POLICIES) | is_named | (value == label), value + ", " + label)
    line = value.mask(_has_variants(rows.assign(line=value), x), named)
    kind = rows["kind"] if by in _OF_POLICIES else value.where(rows[by].notna(), rows["kind"])
    return rows.assign(line=line, legend=line, kind=kind)


def _means(rows: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """One row per place on a line: the mean of those that stand there, which has no whiskers."""
    place = ["facet", "line", "variant", x]
    in_place = rows.groupby(place, sort=False, dropna=False)
    is_alone = in_place[y].transform("size") == 1
    alone = {name: rows[name].where(is_alone) for name in _of_whiskers(y) if name in rows}
    return rows.assign(**{y: in_place[y].transform("mean")}, **alone).drop_duplicates(place)


def _has_variants(rows: pd.DataFrame, x: str) -> pd.Series:
    """Whether a row's line would join several policies, or variants of one, of which each is a line along ``x``.

    Where each stands at one place alone, as along a number that was measured, they are points of one line.
    """
    lines = rows.groupby(["facet", "line"], sort=False)
    places = rows.groupby(["facet", "line", "variant"], sort=False)[x].transform("nunique")
    most = places.groupby([rows["facet"], rows["line"]]).transform("max")
    return (lines["variant"].transform("nunique") > 1) & ((most > 1) | (lines[x].transform("nunique") == 1))


def wide_rows(store: Store, rows: pd.DataFrame, columns: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The frame that has some columns: cases, or where a column is of batches and layers alone, of these.

    Parameters of policies (``c``, ``k0``, ``budget``, ...) and swept keys by their last words are columns too. So is
    ``COLUMN_p95`` of a column of batches: a percentile over batches, of means over layers. A phase's ``PHASE_us`` is of
    batches: the median over breakdown iterations, on the rank that spends most in it.

    Args:
        rows: of ``case_rows``.

    Returns:
        The rows, and the names of all columns that can be asked for and hold values.
    """
    rows = with_fields(rows[rows["scope"] == "layer"] if (rows["scope"] == "layer").any() else rows)
    batches = routing(store)
    if any(name.endswith("_us") for name in columns):
        batches = batches.merge(batch_phases(store), on=[*CASE, "batch"], how="left")
    of_batches = [str(name) for name in batches if name not in CASE and batches[name].map(np.isscalar).all()]
    for name in columns:
        match = _PERCENTILE.match(name)
        if name not in rows and match and match["column"] in of_batches:
            means = batches.groupby([*CASE, "batch"])[match["column"]].mean()  # over layers
            rows = rows.merge(means.groupby(CASE).quantile(int(match["percent"]) / 100).rename(name), "left", CASE)
    known = [str(name) for name in rows if rows[name].notna().any()]
    if any(name in of_batches and name not in known for name in columns):
        rows = rows.drop(columns=[name for name in of_batches if name in rows])
        rows = rows.merge(batches[[*CASE, *of_batches]], on=CASE)
    return rows, sorted({*known, *of_batches} - HIDDEN - ADDED)
