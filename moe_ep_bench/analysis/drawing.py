"""A figure as data, the frame that it shows, and ``draw``, which draws any of them.

A figure shows rows of the frame of cases: a panel, or a group of panels, for each ``facet``, and beside the picture
these rows as CSV, under the frame's own names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Sheet

from moe_ep_bench.analysis.cases import COMPARISON, FACTOR, cases
from moe_ep_bench.analysis.columns import COLUMNS, COSTS, SERVED, ends, labels
from moe_ep_bench.analysis.marks import Panel, cuts_whiskers, facets, panels_of
from moe_ep_bench.analysis.notes import NOT_FUSED, ONE_DRAW, OVERSUBSCRIBED, PROBES_COST, interval_words
from moe_ep_bench.analysis.served import QUANTITIES
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import GAMMA, dress, looks_of, ordered_looks
from moe_ep_bench.config.conditions import columns_of, holds, matching
from moe_ep_bench.errors import naming
from moe_ep_bench.facts import ORIGINS
from moe_ep_bench.facts.words import Parts, how_parts, links_parts, ran_on_parts, said_once, scale_words, workload_parts
from moe_ep_bench.policies import FIELDS

ABOUT = ("title", "model", "num_ranks", "num_tokens", "label", "role", "capacity_factor")
_MOST_LINES = 10
_MOST_NAMED = 12  # of what is left out
# By so much a breakdown iteration may be longer than a plain one before a figure of phases says so.
_MUCH_OVERHEAD = 0.03
_ENDS = (*ends("speedup", "moe_speedup"), "floor_low", "floor_high")
SERVED_ENDS = ends(*(f"{name}_speedup" for name in QUANTITIES))
SERVED_ENDS += ends(*(f"{name}_floor" for name in QUANTITIES), of=("low", "high"))


@lru_cache(maxsize=2)
def case_rows(store: Store) -> pd.DataFrame:
    """``cases`` as figures show them, with all columns of ``COLUMNS``, whether a directory has them or not.

    More columns: ``facet`` and ``title``, of the panel; ``line``, what a line joins: a policy but for its capacity
    factor, a way of replication but for its spare slots; ``name``, of one case; ``step``, a capacity factor, or spare
    slots in words; ``at``, the step, else the line; ``kind``, the label without settings, whose look it has; ``facts``.
    The balanced case, whose scores are not the model's, has no costs.
    """
    rows = cases(store)
    is_replica, is_balanced = rows["role"] == "replication", rows["role"] == "balanced"
    spare = rows["policy_params"].map(lambda params: json.loads(params).get("spare_per_rank"), "ignore")
    line = labels(rows, without=[FACTOR, "spare_per_rank"]).where(is_replica | (rows["role"] == "policy"), None)
    step = rows["capacity_factor"].astype(object).mask(is_replica, spare.map("{:.0f} spare".format, "ignore"))
    factor = rows["capacity_factor"].map(lambda g: "" if np.isnan(g) else f", {GAMMA} {g:g}").astype("str")
    in_several = rows.groupby("title")["directory"].transform("nunique") > 1
    known = {name: column for name, column in COLUMNS.items() if name in rows or name not in SERVED}
    numbers = [*(name for name, column in known.items() if not column.is_words), *_ENDS]
    numbers += [name for name in SERVED_ENDS if name in rows]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *known, *numbers, "speedup_is_interval"])))
    rows = rows.astype({name: float for name in numbers if rows[name].dtype.kind != "i"}).copy()  # of one piece again
    rows[[*COSTS]] = rows[[*COSTS]].mask(is_balanced)
    return rows.assign(
        facet=rows["directory"] + "/" + rows["comparison_id"],
        title=rows["title"].mask(in_several, rows["title"] + ", from " + rows["directory"]),
        line=line,
        kind=labels(rows.assign(settings=pd.Series([()] * len(rows), rows.index, dtype=object))),
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
        about: the footer; empty = how, on what, which model and which workload.
        most: facets side by side.
        limit: facets on a sheet. Where there are more, those drawn are evenly spaced from first to last.
        ordered: lines are of ordered things, not of policies.
        of: the kind of numbers, which decides on the warnings below: those of phases name probes too.
        workload: of facts what the footer says of their workload.
        whiskers: the quantity whose ends are whiskers; empty = none is said to have any.
    """

    title: str
    panels: Sequence[Panel]
    how: str = ""
    frame: Callable[[Any], pd.DataFrame] = case_rows
    rows: Callable[[Any, pd.DataFrame], pd.DataFrame] = lambda _, rows: rows
    where: str = ""
    needs: str = ""
    columns: Sequence[str] = ()
    about: str = ""
    beside: bool | Callable[[pd.DataFrame], bool] = False
    most: int = 2
    limit: int = 4
    ordered: bool = False
    of: Literal["routing", "times", "phases"] = "times"
    workload: Callable[[Any], Parts] = workload_parts
    whiskers: str = ""


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure with its title and subtitle, all words round it, and its numbers: tidy rows, one per mark."""

    figure: Sheet
    rows: pd.DataFrame
    title: str
    how: str
    words: Sequence[str] = ()


def draw(
    figure: Figure, store: Any, where: str | None = None, *, limited: bool = True, bare: bool = False
) -> Drawing | None:
    """Draw a figure of a store; None where no row fits.

    Args:
        where: a user's condition on columns: what is drawn, beside the native of its comparisons; None = all.
        limited: at most ``_MOST_LINES`` lines, and facets to the figure's limit, are drawn.
        bare: the sheet has no title, tags, subtitle and footer, nor a single facet its heading.

    Raises:
        UserError: the condition cannot be read, or names no column.
    """
    rows, others = figure.frame(store), case_rows(store)
    # A policy has its look in every figure of a store: also where others are not drawn.
    policies, more = _kinds(others), {} if figure.frame is case_rows else _kinds(rows)
    if where is not None and len(rows):
        rows = _asked(rows, where, is_all=figure.frame is case_rows or others.empty)
    rows = matching(figure.rows(store, rows) if len(rows) else rows, figure.where)
    if figure.needs and len(rows):
        rows = rows[rows["facet"].isin(matching(rows, figure.needs)["facet"])]
    if rows.empty:
        return None
    names, drawn, notes = list(rows["facet"].unique()), rows, []
    if limited and len(names) > figure.limit:
        kept = {names[int(place)] for place in np.linspace(len(names) - 1, 0, figure.limit).round()}
        drawn = rows[rows["facet"].isin(kept)]
        titles = rows[~rows["facet"].isin(kept)].drop_duplicates("facet")["title"]
        notes.append(f"of {len(names)} panels {figure.limit} are drawn, without {_left_out(titles)}")
    drawn, own = _with_legend(drawn), list(rows["line"].dropna().unique())
    looks = ordered_looks(own) if figure.ordered else looks_of(policies, more | _kinds(rows))
    if limited and (more := _in_turn(drawn)[_MOST_LINES:]):
        notes.append(f"{len(more)} of {drawn['line'].nunique()} lines are not drawn: {_left_out(more)}")
        drawn = drawn[~drawn["line"].isin(more)]
    notes += [*drawn["note"].dropna().unique()] if "note" in drawn else []
    beside = figure.beside(drawn) if callable(figure.beside) else figure.beside
    titled = not bare or drawn["facet"].nunique() > 1
    panels = panels_of(figure.panels, drawn)
    sheet, body = facets(drawn, panels, looks, beside=beside, most=figure.most, titled=titled)
    is_interval, is_one_draw = _whiskers(drawn, figure.whiskers)
    intervals = interval_words(is_interval, is_one_draw) if is_interval else ""
    how = figure.how.format_map(drawn.iloc[0].to_dict() | {"intervals": intervals})
    named = "{intervals}" in figure.how
    if named and any(map(all, zip(is_interval, is_one_draw, strict=True))):
        notes.append(ONE_DRAW)
    tags = [word for word in (*ORIGINS, "recorded", "synthetic") if word in {*drawn["origin"], *drawn["workload"]}]
    if cuts_whiskers(sheet):
        notes.append("some whiskers are cut by the axis (the CSV has their ends)")
    footer = _footer(drawn, notes, figure)
    dress(sheet, *(("", "", (), ()) if bare else (figure.title, how, footer, tags)), body=body)
    headings = drawn.drop_duplicates("facet")["heading" if "heading" in drawn else "title"]
    words = [f"{figure.title}.", f"{'; '.join(headings)}.", *filter(None, [how, "" if named else intervals, *footer])]
    columns = dict.fromkeys([*ABOUT, *figure.columns, "origin", "workload"])
    return Drawing(sheet, rows[[name for name in columns if name in rows]], figure.title, how, words)


def _left_out(names: Iterable[str]) -> str:
    """The end of a note: what was left out, and how to have it."""
    names = list(names)
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return f"{'; '.join([*names[:_MOST_NAMED], *more])} (plot --all draws them; the CSV has all)"


def _asked(rows: pd.DataFrame, where: str, *, is_all: bool) -> pd.DataFrame:
    """Rows that a user asks for, and native of their comparisons.

    Args:
        is_all: no other rows can have been meant; else those that lack a column are not asked for.
    """
    wide = with_fields(rows)
    known = [*public_columns(wide), *FIELDS]
    if not is_all and not set(columns_of(where)) <= set(known):
        return rows[:0]
    with naming("--where"):
        is_asked = holds(wide, where, known)
    if "role" not in rows:
        return rows[is_asked]
    of = next(name for name in ("facet", "comparison_id") if name in rows)
    return rows[is_asked | ((rows["role"] == "baseline") & rows[of].isin(rows.loc[is_asked, of]))]


def _kinds(rows: pd.DataFrame) -> dict[str, str]:
    """Lines with the kind whose look they have: a policy without its settings, else the line itself."""
    if "line" not in rows:
        return {}
    rows = rows[rows["line"].notna()].drop_duplicates("line")
    return dict(zip(rows["line"], rows["kind" if "kind" in rows else "line"], strict=True))


def _in_turn(rows: pd.DataFrame) -> list[str]:
    """Lines: the first of each policy, then the second of each, and so on; its fastest comes first where one gains."""
    named = rows[rows["line"].notna()]
    first = named.drop_duplicates("line").set_index("line")
    if "policy" not in first:
        return list(first.index)
    if "verdict" in named:
        gains = named["speedup_median"].astype(float).where(named["verdict"] == "faster", 0.0)
        best = gains.groupby(named["line"]).max().reindex(first.index)
        first = first.loc[best.sort_values(ascending=False, kind="stable").index]
    turn = first.groupby("policy", sort=False).cumcount().reindex(named["line"].unique())
    return list(turn.sort_values(kind="stable").index)


def _with_legend(rows: pd.DataFrame) -> pd.DataFrame:
    """Names of lines in the legend, with the capacity factor of a line that has one alone."""
    if "name" not in rows or "legend" in rows:
        return rows.assign(legend=rows["line"])
    number = rows.groupby("line")["name"].transform("nunique")
    return rows.copy().assign(legend=rows["name"].where((number == 1) & (rows["role"] == "policy"), rows["line"]))


def _whiskers(rows: pd.DataFrame, of: str) -> tuple[list[bool], list[bool]]:
    """Of each whiskers of a quantity whether they are an interval, and whether of one draw of which no title speaks."""
    names = ends(of, of=("low", "high", "is_interval"))
    if not set(names) <= set(rows):
        return [], []
    judged = rows[rows["role"].isin(["policy", "replication"])].dropna(subset=names)
    titled = "heading" not in rows
    pairs = zip(judged["is_one_draw"], judged["facts"], strict=True)
    of_one = [bool(is_one) and not (titled and facts.workload.is_one_draw) for is_one, facts in pairs]
    return [bool(value) for value in judged[names[-1]]], of_one


def _footer(rows: pd.DataFrame, notes: Sequence[str], figure: Figure) -> list[str]:
    """A line on the numbers' conditions, and one of notes: warnings first."""
    words = "; ".join(note.removesuffix(".") for note in [*_warnings(rows, figure.of), *notes])
    return [figure.about or _conditions(rows, figure), *([f"Note: {words}."] if words else [])]


def _conditions(rows: pd.DataFrame, figure: Figure) -> str:
    """How, on what, which model and which workload: what panels share is there once."""
    first = rows.drop_duplicates([name for name in ("facet", *COMPARISON) if name in rows])
    of = list(zip(first["run"], first["facts"], strict=True))
    about = (
        [how_parts(*one) for one in of],
        [ran_on_parts(run.environment, facts, in_short=True) for run, facts in of],
        *([parts(facts) for _, facts in of] for parts in (links_parts, _model_parts, _weight_parts, figure.workload)),
    )
    return " | ".join(filter(None, map(said_once, about)))


def _model_parts(facts: Any) -> Parts:
    scale, dtype = (getattr(facts, name, None) for name in ("scale", "dtype"))
    return (facts.model, *filter(None, (scale and scale_words(scale), dtype)))


def _weight_parts(facts: Any) -> Parts:
    return ("random weights",) if getattr(facts, "random_weights", False) else ()


def _warnings(rows: pd.DataFrame, of: str) -> list[str]:
    """Warnings about numbers of a kind (``Figure.of``)."""
    overhead = rows["probe_overhead"].max() if of == "phases" and "probe_overhead" in rows else np.nan
    known = {
        OVERSUBSCRIBED: of != "routing" and rows.get("oversubscribed", pd.Series(dtype=object)).eq(True).any(),
        NOT_FUSED: "part_origin" in rows and any(facts.permute.ran != "fused" for facts in rows["facts"]),
        PROBES_COST.format(100 * overhead): overhead > _MUCH_OVERHEAD,
    }
    return [words for words, holds in known.items() if holds]


# ---- columns that a user can ask for ---------------------------------------------------------------------------------

# Columns that are of the figures alone, or too long for an axis: nobody can ask for one.
HIDDEN = {
    *("run", "facts", "settings", "policy_params", "point", "reason", "step", "at", "facet", "how"),
    *("ran_on", "ran_on_short", "links_words", "links_short", "workload_words", "curve_load", "curve_kept"),
}
# Columns that drawing adds: no parameter of a policy and no swept key takes their places.
ADDED = {"line", "kind", "name", "legend", "heading", "variant", "note", "bar", "quantity"}


def value_words(value: Any) -> str:
    """A column's value for people."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return " ".join(f"{key}={value_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(value_words, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def public_columns(rows: pd.DataFrame) -> list[str]:
    """The columns that can be asked for."""
    return [str(name) for name in rows if name not in HIDDEN]


def with_fields(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with parameters of policies, and swept keys by their last words, as columns that an axis can show."""

    def flat(value: Any) -> Any:
        return value_words(value) if isinstance(value, dict | list) else value

    for column in ("policy_params", "point"):
        if column in rows:
            fields = pd.DataFrame([json.loads(text or "{}") for text in rows[column]], rows.index)
            fields = fields.rename(columns=lambda name: name.rpartition(".")[2])
            free = [str(name) for name in fields if name not in rows or rows[name].isna().all()]
            more = [name for name in free if name.isidentifier() and name not in HIDDEN | ADDED]
            rows = rows.drop(columns=more, errors="ignore").join(fields[more].map(flat))
    return rows
