"""A figure as data, the frame that it shows, ``draw``, which draws any of them, and figures of any column over another.

A figure shows rows of the frame of cases: a panel, or a group of panels, for each ``facet``, and beside the picture
these rows as CSV, under the frame's own names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Sheet

from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, routing, timings
from moe_ep_bench.analysis.columns import COLUMNS, COSTS
from moe_ep_bench.analysis.marks import Panel, axis_of, facets, panels_of, series
from moe_ep_bench.analysis.notes import NOT_FUSED, OVERSUBSCRIBED, PROBES_COST, interval_words
from moe_ep_bench.analysis.reduce import GROUPS
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import GAMMA, dress, looks_of, ordered_looks
from moe_ep_bench.config.conditions import columns_of, holds, matching
from moe_ep_bench.errors import UserError, brief, did_you_mean, naming
from moe_ep_bench.facts import ORIGINS
from moe_ep_bench.facts.words import said_once, scale_words
from moe_ep_bench.policies import FIELDS

ABOUT = ("title", "model", "num_ranks", "num_tokens", "label", "role", "capacity_factor")
_MOST_LINES = 10
# By so much a breakdown iteration may be longer than a plain one before a figure of phases says so.
_MUCH_OVERHEAD = 0.03
_ENDS = [f"{name}_{end}" for name in ("speedup", "moe_speedup") for end in ("median", "low", "high")]
_ENDS += ["floor_low", "floor_high"]


@lru_cache(maxsize=2)
def case_rows(store: Store) -> pd.DataFrame:
    """``cases`` as figures show them, with all columns of ``COLUMNS``, whether a directory has them or not.

    More columns: ``facet`` and ``title``, of the panel; ``line``, what a line joins: a policy but for its capacity
    factor, a way of replication but for its spare slots; ``name``, of one case; ``step``, a capacity factor, or spare
    slots in words; ``at``, the step, else the line; ``facts``. The balanced case, whose scores are not the model's,
    has no costs.
    """
    rows = cases(store)
    is_replica, is_balanced = rows["role"] == "replication", rows["role"] == "balanced"
    spare = rows["policy_params"].map(lambda params: json.loads(params or "{}").get("spare_per_rank"))
    way = rows["label"].str.replace(r", \d+ spare per rank", "", regex=True)
    line = rows["family_label"].astype(object).where(~is_replica, way).where(~is_balanced)
    step = rows["capacity_factor"].astype(object).mask(is_replica, spare.map("{:.0f} spare".format, "ignore"))
    factor = rows["capacity_factor"].map(lambda g: "" if np.isnan(g) else f", {GAMMA} {g:g}").astype("str")
    in_several = rows.groupby("title")["directory"].transform("nunique") > 1
    numbers = [*(name for name, column in COLUMNS.items() if not column.is_words), *_ENDS]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *COLUMNS, *numbers, "speedup_is_interval"])))
    rows = rows.astype({name: float for name in numbers if rows[name].dtype.kind != "i"}).copy()  # of one piece again
    rows[[*COSTS]] = rows[[*COSTS]].mask(is_balanced)
    return rows.assign(
        facet=rows["directory"] + "/" + rows["comparison_id"],
        title=rows["title"].mask(in_several, rows["title"] + ", from " + rows["directory"]),
        line=line,
        name=(line.astype("str") + factor).where((rows["role"] == "policy") & line.notna(), rows["label"]),
        step=step,
        at=step.where(step.notna(), line),
    ).copy()


@dataclass(frozen=True)
class Figure:
    """A figure as data.

    Attributes:
        panels: of each facet, from top to bottom or, where ``beside``, from left to right.
        how: the subtitle; ``{intervals}`` becomes what whiskers are, and names in braces the first row's columns.
        frame: of a store the frame that it is made of, of which a user may choose rows.
        rows: of a store and these rows those that it shows. Their columns ``facet`` and ``title`` say where a row is
            drawn, ``line`` as what.
        where: a condition (``conditions``): rows that are drawn and stand in the CSV.
        needs: a condition that some row of a facet must satisfy.
        columns: of the CSV, between ``ABOUT`` and the origin.
        most: facets side by side.
        limit: facets on a sheet. Where there are more, those drawn are evenly spaced from first to last.
        ordered: lines are of ordered things, not of policies.
        of: what is shown, and so which warnings stand below: of times all, of phases those of probes too.
    """

    title: str
    panels: Sequence[Panel]
    how: str = ""
    frame: Callable[[Any], pd.DataFrame] = case_rows
    rows: Callable[[Any, pd.DataFrame], pd.DataFrame] = lambda _, rows: rows
    where: str = ""
    needs: str = ""
    columns: Sequence[str] = ()
    beside: bool | Callable[[pd.DataFrame], bool] = False
    most: int = 2
    limit: int = 4
    ordered: bool = False
    of: Literal["routing", "times", "phases"] = "times"


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure with its title and subtitle, and the numbers that it shows: tidy rows, one per mark."""

    figure: Sheet
    rows: pd.DataFrame
    title: str
    how: str


def draw(figure: Figure, store: Any, where: str | None = None) -> Drawing | None:
    """Draw a figure of a store; None where no row fits.

    Args:
        where: a user's condition on columns: what is drawn, beside the native of its comparisons; None = all.

    Raises:
        UserError: the condition cannot be read, or names no column.
    """
    rows = figure.frame(store)
    if where is not None and len(rows):
        rows = _asked(rows, where)
    rows = matching(figure.rows(store, rows) if len(rows) else rows, figure.where)
    if figure.needs and len(rows):
        rows = rows[rows["facet"].isin(matching(rows, figure.needs)["facet"])]
    if rows.empty:
        return None
    names, drawn, notes = list(rows["facet"].unique()), rows, []
    if len(names) > figure.limit:
        kept = {names[int(place)] for place in np.linspace(len(names) - 1, 0, figure.limit).round()}
        drawn = rows[rows["facet"].isin(kept)]
        notes.append(f"of {len(names)} panels {figure.limit} are drawn; the CSV has all")
    drawn, own = _with_legend(drawn), list(rows["line"].dropna().unique())
    # A policy has its look in every figure of a store: also where others are not drawn.
    of_store = case_rows(store)["line"].dropna() if isinstance(store, Store) else own
    looks = ordered_looks(own) if figure.ordered else looks_of(of_store, own)
    if more := _in_turn(drawn)[_MOST_LINES:]:
        notes.append(f"{len(more)} of {drawn['line'].nunique()} lines are not drawn; the CSV has all")
        drawn = drawn[~drawn["line"].isin(more)]
    notes += [*drawn["note"].dropna().unique()] if "note" in drawn else []
    beside = figure.beside(drawn) if callable(figure.beside) else figure.beside
    sheet, body = facets(drawn, panels_of(figure.panels, drawn), looks, beside=beside, most=figure.most)
    how = figure.how.format_map(drawn.iloc[0].to_dict() | {"intervals": _intervals(drawn)})
    tags = [word for word in (*ORIGINS, "recorded", "synthetic") if word in {*drawn["origin"], *drawn["workload"]}]
    dress(sheet, figure.title, how, _footer(drawn, notes, figure.of), tags, body=body)
    columns = dict.fromkeys([*ABOUT, *figure.columns, "origin", "workload"])
    return Drawing(sheet, rows[[name for name in columns if name in rows]], figure.title, how)


def _asked(rows: pd.DataFrame, where: str) -> pd.DataFrame:
    """Rows that a user asks for, and native of their comparisons."""
    wide = _with_fields(rows)
    with naming("--where"):
        is_asked = holds(wide, where, [*_public(wide), *FIELDS])
    of = next(name for name in ("facet", "comparison_id") if name in rows)
    return rows[is_asked | ((rows["role"] == "baseline") & rows[of].isin(rows.loc[is_asked, of]))]


def _in_turn(rows: pd.DataFrame) -> list[str]:
    """Lines: the first of each policy, then the second of each, and so on."""
    first = rows[rows["line"].notna()].drop_duplicates("line")
    turn = first.groupby("policy", sort=False).cumcount() if "policy" in first else pd.Series(0, first.index)
    return first["line"].iloc[np.argsort(turn.to_numpy(), kind="stable")].to_list()


def _with_legend(rows: pd.DataFrame) -> pd.DataFrame:
    """What each line is called: with its capacity factor where it is drawn at one alone."""
    if "name" not in rows or "legend" in rows:
        return rows.assign(legend=rows["line"])
    number = rows.groupby("line")["name"].transform("nunique")
    return rows.copy().assign(legend=rows["name"].where((number == 1) & (rows["role"] == "policy"), rows["line"]))


def _intervals(rows: pd.DataFrame) -> str:
    if "speedup_is_interval" not in rows:
        return ""
    judged = rows[rows["speedup_median"].notna() & rows["role"].isin(["policy", "replication"])]
    return interval_words([value is True or value == 1 for value in judged["speedup_is_interval"].dropna()])


def _footer(rows: pd.DataFrame, notes: Sequence[str], of: str) -> list[str]:
    """How, on what, which model and which workload; then what weakens it."""
    if "facts" not in rows:  # of answers
        return ["Costs are of this model on this text. Routing is that of virtual ranks; nothing was timed."]
    first = rows.drop_duplicates([name for name in ("facet", *COMPARISON) if name in rows])
    scale = first["scale"].astype(object).map(lambda scale: f", {scale_words(scale)}", "ignore").fillna("")
    dtype = first["dtype"].map(", {}".format, "ignore").fillna("")
    weights = first["facts"].map(lambda facts: "random weights" if facts.get("random_weights") else None)
    about = (first["how"], first["ran_on_short"], first["links_short"], first["model"] + scale + dtype, weights)
    said = [said_once(words) for words in (*about, first["workload_words"])]
    warnings = [OVERSUBSCRIBED] if of != "routing" and first["oversubscribed"].eq(True).any() else []
    if of == "phases":
        permutes = {(facts.get("permute") or {}).get("ran", "fused") for facts in first["facts"]}
        warnings += [NOT_FUSED] if "part_origin" in rows and permutes != {"fused"} else []
        most = rows["probe_overhead"].max() if "probe_overhead" in rows else 0.0
        warnings += [PROBES_COST.format(100 * most)] if most > _MUCH_OVERHEAD else []
    words = "; ".join(note.removesuffix(".") for note in [*warnings, *notes])
    return [" | ".join(filter(None, said)), *([f"Note: {words}."] if words else [])]


# ---- any column against any other ------------------------------------------------------------------------------------

_OF_POLICIES = ("policy", "label", "family")
_PERCENTILE = re.compile(r"(?P<column>\w+)_p(?P<percent>\d\d?)$")
# Columns that are of the figures alone, or too long for an axis: nobody can ask for one.
_HIDDEN = {
    *("facts", "policy_params", "point", "reason", "step", "at", "facet", "how"),
    *("ran_on", "ran_on_short", "links_words", "links_short", "workload_words", "curve_load", "curve_kept"),
}
# Columns that drawing adds: no parameter of a policy and no swept key takes their places.
_ADDED = {"line", "name", "legend", "heading", "variant", "note", "bar", "quantity"}


def lines(
    x: str, y: str, by: str | None = None, facet: str | None = None, where: str | None = None, *, of: str = "--"
) -> dict[str, Figure]:
    """The figure of a column over another, by its name, as a config's ``figures:`` or ``plot --x --y`` asks for it.

    Args:
        x, y: columns of cases, or of batches and layers, of which means are drawn; parameters of policies are columns.
        by: the column whose values are lines; None = the policy but for ``x``.
        facet: the column whose values are panels; None = comparisons, or models where ``x`` tells comparisons apart.
        where: a condition on columns (``conditions``).
        of: what stands before a key in an error's line.
    """
    asked = {name: column for name, column in {"x": x, "y": y, "by": by, "facet": facet}.items() if column}
    title = f"{axis_of(y).header} over {axis_of(x).header}"
    figure = Figure(
        title[:1].upper() + title[1:],
        [series(x, y)],
        "A line for each {of_lines}. Where several batches, layers or comparisons stand at one place, their mean.",
        rows=partial(_line_rows, asked=asked, where=where, of=of),
        columns=list(asked.values()),
        limit=6,
        ordered=by not in (None, *_OF_POLICIES),
        of="phases" if any(map(_is_probed, (x, y))) else "times",
    )
    return {"-".join(filter(None, [f"{y}-over-{x}", by and f"by-{by}", facet])): figure}


def _is_probed(column: str) -> bool:
    """Whether a column is of breakdown iterations."""
    is_of_probes = column.endswith("_us") or column.startswith(("breakdown_", "mean_rank_"))
    return is_of_probes or column.removesuffix("_ms") in GROUPS


def _line_rows(store: Store, rows: pd.DataFrame, asked: Mapping[str, str], where: str | None, of: str) -> pd.DataFrame:
    """A row per panel, line and place; none where no policy that ran has a field asked for.

    Raises:
        UserError: a column is unknown, or the condition cannot be read.
    """
    x, y, by, facet = (asked.get(name) for name in ("x", "y", "by", "facet"))
    named = [*asked.values(), *(columns_of(where) if where else ())]
    rows, known = wide_rows(store, rows, named)
    public = _public(rows)
    absent = {name: column for name, column in asked.items() if column not in public}
    if absent and set(absent.values()) <= FIELDS:
        return rows.iloc[:0]  # no policy that has such a field ran
    for name, column in absent.items():
        listed = f"expected a column, one of {', '.join(known)}"
        raise UserError(f"{of}{name}: {listed}; got {brief(column)}{did_you_mean(column, known)}")
    if not pd.api.types.is_numeric_dtype(rows[y]):
        raise UserError(f"{of}y: expected a column of numbers; {y} has {'words' if rows[y].notna().any() else 'none'}")
    if where:
        with naming(f"{of}where"):
            rows = rows[holds(rows, where, [*public, *FIELDS])]
    rows = rows[rows["role"].isin(["baseline", "policy", "replication"]) & rows[y].notna()].copy()  # of one piece
    if rows[x].isna().all():
        return rows.iloc[:0]
    rows = rows.assign(of_lines=(by or "policy").replace("_", " "))
    if facet is not None:
        words = rows[facet].map(value_words)
        rows = rows.assign(facet=words, heading=f"{facet.replace('_', ' ')} " + words)
    elif rows.groupby("facet")[x].nunique().max() == 1:
        rows = rows.assign(facet=rows["model"], heading=rows["model"])
    label = (
        rows["label"].str.replace(rf" {re.escape(x)}=\S+", "", regex=True).where(rows["role"] != "baseline", "native")
    )
    line = label
    if by is not None:  # What has no value goes by its own name.
        value = rows[by].map(value_words).where(rows[by].notna(), label)
        rows = rows.assign(line=value, variant=label)
        is_named = pd.Series(by in _OF_POLICIES, rows.index) | label.str.contains(f" {by}=", regex=False)
        named = label.where(is_named | (value == label), value + ", " + label)
        line = value.mask(_has_variants(rows, x), named)
    rows = rows.assign(line=line, legend=line, variant=label)
    place = ["facet", "line", "variant", x]
    in_place = rows.groupby(place, sort=False, dropna=False)
    ends = [name for name in (f"{y.removesuffix('_median')}_low", f"{y.removesuffix('_median')}_high") if name in rows]
    alone = {name: rows[name].where(in_place[y].transform("size") == 1) for name in ends}  # a mean has no whiskers
    return rows.assign(**{y: in_place[y].transform("mean")}, **alone).drop_duplicates(place)


def _has_variants(rows: pd.DataFrame, x: str) -> pd.Series:
    """Whether a row's line would join several policies, or variants of one, of which each is a line along ``x``.

    Where each stands at one place alone, as along a number that was measured, they are points of one line.
    """
    lines = rows.groupby(["facet", "line"], sort=False)
    places = rows.groupby(["facet", "line", "variant"], sort=False)[x].transform("nunique")
    most = places.groupby([rows["facet"], rows["line"]]).transform("max")
    return (lines["variant"].transform("nunique") > 1) & ((most > 1) | (lines[x].transform("nunique") == 1))


def value_words(value: Any) -> str:
    """A column's value for people."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return " ".join(f"{key}={value_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(value_words, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _public(rows: pd.DataFrame) -> list[str]:
    """The columns that can be asked for."""
    return [name for name in rows if name not in _HIDDEN]


def _with_fields(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with parameters of policies, and swept keys by their last words, as columns."""
    for column in ("policy_params", "point"):
        if column in rows:
            fields = pd.DataFrame(rows[column].map(lambda text: json.loads(text or "{}")).to_list(), rows.index)
            fields = fields.rename(columns=lambda name: name.rpartition(".")[2])
            free = [name for name in fields if name not in rows or rows[name].isna().all()]
            more = [name for name in free if name.isidentifier() and name not in _HIDDEN | _ADDED]
            rows = rows.drop(columns=more, errors="ignore").join(fields[more].map(_flat))
    return rows


def _flat(value: Any) -> Any:
    """A value that can stand on an axis."""
    return value_words(value) if isinstance(value, dict | list) else value


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
    rows = rows[rows["scope"] == "layer"] if (rows["scope"] == "layer").any() else rows
    rows = _with_fields(rows)
    batches = routing(store)
    if any(name.endswith("_us") for name in columns):
        times = timings(store).pivot_table("time_us", [*CASE, "batch"], "quantity", "median").add_suffix("_us")
        batches = batches.merge(times, on=[*CASE, "batch"], how="left")
    of_batches = [name for name in batches if name not in CASE and batches[name].map(np.isscalar).all()]
    for name in columns:
        match = _PERCENTILE.match(name)
        if name not in rows and match and match["column"] in of_batches:
            by_batch = batches.groupby([*CASE, "batch"])[match["column"]].mean()
            quantile = by_batch.groupby(CASE).quantile(int(match["percent"]) / 100).rename(name)
            rows = rows.merge(quantile, left_on=CASE, right_index=True, how="left")
    known = [name for name in rows if rows[name].notna().any()]
    if any(name in of_batches and name not in known for name in columns):
        rows = rows.drop(columns=[name for name in of_batches if name in rows])
        rows = rows.merge(batches[[*CASE, *of_batches]], on=CASE)
    return rows, sorted({*known, *of_batches} - _HIDDEN - _ADDED)
