"""A figure as data, the frame that it shows, and ``draw``, which draws any of them.

A figure shows rows of the frame of cases: a panel, or a group of panels, for each ``facet``, and beside the picture
these rows as CSV, under the frame's own names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Sheet

from moe_ep_bench.analysis.cases import COMPARISON, cases, comparisons
from moe_ep_bench.analysis.columns import COLUMNS
from moe_ep_bench.analysis.marks import Panel, facets
from moe_ep_bench.analysis.notes import NOT_FUSED, OVERSUBSCRIBED, interval_words
from moe_ep_bench.analysis.origins import ORIGINS
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import GAMMA, Look, dress, is_slide, looks_of
from moe_ep_bench.files import atomic_path

ABOUT = ("title", "model", "num_ranks", "num_tokens", "label", "role", "capacity_factor")
COST = ["dropped_share", "retained_mass"]
_MOST_LINES, _ON_SLIDE = 10, 6
_ENDS = [f"{name}_{end}" for name in ("speedup", "moe_speedup") for end in ("median", "low", "high")]
_ENDS += ["floor_low", "floor_high"]
_IS_INTERVAL = ("speedup_is_interval", "moe_speedup_is_interval")


@lru_cache(maxsize=2)
def case_rows(store: Store) -> pd.DataFrame:
    """``cases`` as figures show them, with all columns of ``COLUMNS``, whether a directory has them or not.

    More columns: ``facet`` and ``title``, of the panel; ``line``, what a line joins: a policy but for its capacity
    factor, a way of replication but for its spare slots; ``name``, of one case; ``step``, a capacity factor, or spare
    slots in words; ``at``, the step, else the line; ``facts``. The ceiling, whose scores are not the model's, has no
    costs.
    """
    rows = cases(store).merge(comparisons(store)[[*COMPARISON, "facts"]], on=COMPARISON)
    is_replica, is_ceiling = rows["role"] == "replication", rows["role"] == "ceiling"
    spare = rows["policy_params"].map(lambda params: json.loads(params or "{}").get("spare_per_rank"))
    line = (
        rows["family_label"]
        .astype(object)
        .where(~is_replica, rows["label"].str.replace(r", \d+ spare per rank", "", regex=True))
    )
    line = line.where(~is_ceiling)
    step = rows["capacity_factor"].astype(object).mask(is_replica, spare.map("{:.0f} spare".format, "ignore"))
    factor = rows["capacity_factor"].map(lambda g: "" if np.isnan(g) else f", {GAMMA} {g:g}").astype("str")
    in_several = rows.groupby("title")["directory"].transform("nunique") > 1
    numbers = [name for name, column in COLUMNS.items() if not column.is_words]
    numbers += [*_ENDS, "num_layers", "of_layers"]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *COLUMNS, *numbers, *_IS_INTERVAL])))
    rows = rows.astype({name: float for name in numbers if rows[name].dtype.kind != "i"}).copy()  # of one piece again
    rows[COST] = rows[COST].mask(is_ceiling)
    return rows.assign(
        facet=rows["directory"] + "/" + rows["comparison_id"],
        title=rows["title"].mask(in_several, rows["title"] + ", from " + rows["directory"]),
        line=line,
        name=(line.astype("str") + factor).where((rows["role"] == "policy") & line.notna(), rows["label"]),
        step=step,
        at=step.where(step.notna(), line),
    )


def layer_rows(store: Store) -> pd.DataFrame:
    """``case_rows`` of lone layers, and of routing."""
    return case_rows(store).query("scope == 'layer'")


@dataclass(frozen=True)
class Figure:
    """A figure as data.

    Attributes:
        panels: of each facet, from top to bottom or, where ``beside``, from left to right.
        how: the subtitle; ``{intervals}`` becomes what whiskers are, and names in braces the first row's columns.
        rows: of a store the frame. Its columns ``facet`` and ``title`` say where a row is drawn, ``line`` as what.
        where: a pandas query: rows that are drawn and stand in the CSV.
        needs: a query that some row of a facet must satisfy.
        columns: of the CSV, between ``ABOUT`` and the origin.
        most: facets side by side; ``limit``: on a sheet, evenly spaced from first to last, where there are more.
        looks: of the lines' names; ``timed``: whether what weakens times is said below.
    """

    title: str
    panels: Sequence[Panel]
    how: str = ""
    rows: Callable[..., pd.DataFrame] = layer_rows
    where: str = ""
    needs: str = ""
    columns: Sequence[str] = ()
    beside: bool | Callable[[pd.DataFrame], bool] = False
    most: int = 2
    limit: int = 4
    looks: Callable[[Sequence[str]], dict[str, Look]] = looks_of
    timed: bool = True


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, and the numbers that it shows: tidy rows, one per mark, units in the columns' names."""

    figure: Sheet
    rows: pd.DataFrame

    def write_rows(self, path: Path) -> None:
        """Write the numbers as CSV; the file appears whole or not at all. Equal numbers give equal bytes.

        Nine digits: more than any of them has, fewer than those in which two machines' sums differ.
        """
        with atomic_path(path) as temporary:
            self.rows.infer_objects().to_csv(temporary, index=False, float_format="%.9g", lineterminator="\n")


def draw(figure: Figure, store: Any, **options: Any) -> Drawing | None:
    """Draw a figure of a store; None where no row fits. ``options`` go to the figure's ``rows``."""
    rows = figure.rows(store, **options)
    if figure.where and len(rows):
        rows = rows.query(figure.where, engine="python")
    if figure.needs and len(rows):
        rows = rows[rows["facet"].isin(rows.query(figure.needs, engine="python")["facet"])]
    if rows.empty:
        return None
    # A slide has room for four panels, and its reader for few lines.
    most_facets = min(figure.limit, max(1, 4 // len(figure.panels))) if is_slide() else figure.limit
    drawn, notes = _few(rows, most_facets)
    drawn = _with_legend(drawn)
    # A policy has its look in every figure of a store: also where others are not drawn.
    everywhere = case_rows(store)["line"] if figure.looks is looks_of and isinstance(store, Store) else []
    looks = figure.looks([name for name in [*everywhere, *rows["line"]] if isinstance(name, str)])
    if more := _other_lines(drawn):
        notes.append(f"not drawn, but in the CSV: {', '.join(more)}")
        drawn = drawn[~drawn["line"].isin(more)]
    notes += [*drawn["note"].dropna().unique()] if "note" in drawn else []
    beside = figure.beside(drawn) if callable(figure.beside) else figure.beside
    sheet, body = facets(drawn, figure.panels, looks, beside=beside, most=figure.most)
    how = drawn.iloc[0].to_dict() | {"intervals": _intervals(drawn)}
    tags = [word for word in (*ORIGINS, "recorded", "synthetic") if word in {*drawn["origin"], *drawn["workload"]}]
    dress(sheet, figure.title, figure.how.format_map(how), _footer(drawn, notes, timed=figure.timed), tags, body=body)
    columns = dict.fromkeys([*ABOUT, *figure.columns, "origin", "workload"])
    return Drawing(sheet, rows[[name for name in columns if name in rows]])


def _few(rows: pd.DataFrame, limit: int) -> tuple[pd.DataFrame, list[str]]:
    """At most so many facets, evenly spaced, and a note on the others."""
    names = list(rows["facet"].unique())
    if len(names) <= limit:
        return rows, []
    kept = {names[int(place)] for place in np.linspace(len(names) - 1, 0, limit).round()}
    return rows[rows["facet"].isin(kept)], [f"of {len(names)} comparisons {limit} are drawn; the CSV has all"]


def _other_lines(rows: pd.DataFrame) -> list[str]:
    """Lines for which there is no room: the last ones; on a slide those of policies that gain least."""
    lines = list(rows["line"].dropna().unique())
    if is_slide() and "speedup_median" in rows and rows["speedup_median"].notna().any():
        gains = rows.groupby("line")["speedup_median"].max().reindex(lines)
        return [line for line in lines if line not in set(gains.fillna(np.inf).nlargest(_ON_SLIDE).index)]
    return lines[_MOST_LINES:]


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


def _footer(rows: pd.DataFrame, notes: Sequence[str], *, timed: bool) -> list[str]:
    """How, on what, which model and which workload; then what weakens it."""
    if "facts" not in rows:  # of answers
        return ["Costs are of this model on this text. Routing is that of virtual ranks; nothing was timed."]
    first = rows.drop_duplicates([name for name in ("facet", *COMPARISON) if name in rows])
    scale = first["scale"].map(
        lambda scale: (
            "" if pd.isna(scale) else ", true sizes" if scale == 1 else f", sizes x {scale:g} of the true ones"
        )
    )
    dtype = first["dtype"].map(lambda dtype: f", {dtype}", "ignore").fillna("")
    weights = first["facts"].map(lambda facts: "random weights" if facts.get("random_weights") else None)
    about = (first["how"], first["ran_on"], first["links_words"], first["model"] + scale + dtype, weights)
    said = [_said_once(words) for words in (*about, first["workload_words"])]
    warnings = [OVERSUBSCRIBED] if timed and first["oversubscribed"].eq(True).any() else []
    permutes = {(facts.get("permute") or {}).get("ran", "fused") for facts in first["facts"]}
    warnings += [NOT_FUSED] if timed and "part_origin" in rows and permutes != {"fused"} else []
    words = "; ".join(note.removesuffix(".") for note in [*warnings, *notes])
    return [" | ".join(filter(None, said)), *([f"Note: {words}."] if words else [])]


def _said_once(values: pd.Series) -> str:
    """What comparisons share is said once; of more than two different values the first and the last."""
    words = (str(value).partition(": ")[0] if "modelled by" in str(value) else value for value in values.dropna())
    different = list(dict.fromkeys(words))
    if len(different) > 2:
        different[1:-1] = [f"{len(different) - 2} more"]
    return " / ".join(different)
