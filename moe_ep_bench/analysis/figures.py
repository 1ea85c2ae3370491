"""The figures, each a row of ``FIGURES``: title, marks, filter, columns; ``draw`` draws any of them.

A figure shows rows of one frame (``figure_rows``): a panel, or a group of panels, for each ``facet``, and beside the
picture these rows as CSV, under the frame's own names. A figure is added by a row. ``Lines`` is a figure of any column
against any other, as a config's ``figures:`` or ``plot --x --y`` asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis import figure_rows as frame
from moe_ep_bench.analysis.marks import (
    Marks,
    bars,
    extrapolated,
    facets,
    forest,
    heat,
    lines,
    points,
    relief,
    scatter,
    stairs,
)
from moe_ep_bench.analysis.notes import NOT_FUSED, OVERSUBSCRIBED, interval_words
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import GAMMA, HOW, INK, MUTED, Look, Sheet, dress, looks_of, ordered_looks
from moe_ep_bench.analysis.sweeps import value_words
from moe_ep_bench.analysis.timeline import lanes
from moe_ep_bench.errors import UserError, did_you_mean
from moe_ep_bench.files import atomic_path
from moe_ep_bench.policies import fields_by_policy

ABOUT = ("title", "model", "num_ranks", "num_tokens", "label", "role", "capacity_factor")
SPEEDUP = ("speedup_median", "speedup_low", "speedup_high", "speedup_is_interval", "floor_low", "floor_high")
COST = ("dropped_share", "retained_mass")
FACTOR = f"capacity factor {GAMMA} (of policies that have one)"
_MOST_LINES = 10


@dataclass(frozen=True)
class Figure:
    """A figure as data.

    Attributes:
        rows: of a store the frame. Its columns ``facet`` and ``title`` say where a row is drawn, ``line`` as what.
        marks: one panel each, from top to bottom or, where ``beside``, from left to right.
        how: the subtitle; ``{intervals}`` becomes what whiskers are, and names in braces the first row's columns.
        where: a pandas query: rows that are drawn and stand in the CSV.
        needs: a query that some row must satisfy.
        columns: of the CSV, between ``ABOUT`` and the origin.
        height: inches of a facet; of what is drawn.
        most: facets side by side; ``limit``: on a sheet, evenly spaced from first to last, where there are more.
        looks: of the lines' names; ``timed``: whether what weakens times is said below.
    """

    title: str
    rows: Callable[..., pd.DataFrame | None]
    marks: Sequence[Marks]
    how: str = ""
    where: str = ""
    needs: str = ""
    columns: Sequence[str] = ()
    height: float | Callable[[pd.DataFrame], float] = 4.6
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


# ---- the figures ---------------------------------------------------------------------------------------------------


def _is_upright(rows: pd.DataFrame) -> bool:
    """Whether there are names alone: they are read best in rows."""
    return bool(rows["at"].dropna().map(lambda at: isinstance(at, str)).all())


def _height_of_names(rows: pd.DataFrame) -> float:
    return 0.3 * max(3, rows["at"].nunique()) + 1.1 if _is_upright(rows) else 4.6


def _most_of(rows: pd.DataFrame, column: str) -> int:
    """Of the facet that has most."""
    return int(rows.groupby("facet")[column].nunique().max())


def _height_of_bars(rows: pd.DataFrame) -> float:
    lines_of = rows["bar"].dropna().str.count("\n").max() + 1
    return 0.85 + (0.12 + 0.17 * lines_of) * _most_of(rows, "bar")


def _is_alone(rows: pd.DataFrame) -> bool:
    return rows["facet"].nunique() == 1


_OVER_STEPS = partial(lines, "at", words=FACTOR, as_words=True)
_PASS = {"color": MUTED, "marker": "o", "markersize": 4.5, "linewidth": 1.0}
_AMDAHL = {"color": INK, "marker": "|", "markersize": 13, "markeredgewidth": 1.8, "linestyle": "none"}
_SWEPT = ("panel", "swept_key", "swept_value", "other_keys", *SPEEDUP[:4], "verdict", "status", *COST)

FIGURES = {
    "speedup": Figure(
        "Layer speedup over native Megatron-Core",
        frame.speedup_rows,
        [_OVER_STEPS("speedup_median", ratio=3.2), _OVER_STEPS("dropped_share", ratio=1.3)],
        how=(
            "Slowest rank's time of one MoE layer, native over policy, median; below it the top-k pairs that "
            "are dropped. {intervals}"
        ),
        columns=(*SPEEDUP, *COST),
        height=_height_of_names,
        beside=_is_upright,
        most=4,
    ),
    "phases": Figure(
        "Where a layer's time goes",
        frame.phase_rows,
        [bars("phases", "time of one layer (ms)")],
        how=(
            "Time by phase, mean over ranks, median over iterations; waiting is for the slowest rank, where ranks meet."
        ),
        columns=("phases", "time_ms", *COST),
        height=_height_of_bars,
    ),
    "load": Figure(
        "Load of experts and ranks, before and after",
        frame.load_rows,
        [stairs("expert", 2.0), stairs("rank")],
        how=(
            "(token, expert) pairs over the mean of the model's own routing, mean over batches, in each case "
            "the fullest first; "
            "of each policy the smallest capacity factor."
        ),
        columns=("of", "number", "load_over_mean"),
        height=lambda rows: 3.7 if _is_alone(rows) else 2.7 if (rows["num_ranks"] == 1).all() else 4.2,
        beside=_is_alone,
        timed=False,
    ),
    "dropped": Figure(
        "What the policies cost: dropped pairs and score mass kept",
        frame.layer_rows,
        [_OVER_STEPS("dropped_share"), _OVER_STEPS("retained_mass")],
        how=(
            "Top-k pairs that are not computed, and the score mass of what is computed over that of the "
            "model's own top-k; all "
            "ranks' tokens together, mean over batches."
        ),
        where="role == 'policy' and status == 'ok' and dropped_share.notna()",
        columns=COST,
        height=_height_of_names,
        beside=_is_upright,
        most=4,
        timed=False,
    ),
    "map": Figure(
        "Where a policy pays: layer speedup over native Megatron-Core",
        frame.swept_rows,
        [heat()],
        how=(
            f"In the cells the speedup and the share of top-k pairs that is dropped, by capacity factor "
            f"{GAMMA}; above them what has none."
        ),
        columns=_SWEPT,
        height=lambda rows: (_most_of(rows, "step") + 0.3) * 0.48 + 1.1 + 0.4 * (rows["title"].str.len().max() // 60),
        limit=8,
    ),
    "sweep": Figure(
        "Layer speedup along the sweep",
        frame.swept_rows,
        [
            lines("value", "speedup_median", words="swept_key_words", ratio=3.2),
            lines("value", "dropped_share", words="swept_key_words", ratio=1.2, only="role == 'policy'"),
        ],
        how=(
            "Slowest rank's time of one MoE layer, native over policy, median with its spread; below it the "
            "top-k pairs that are dropped."
        ),
        columns=_SWEPT,
        limit=8,
        looks=ordered_looks,
    ),
    "activated": Figure(
        "A decode step takes as long as the experts that it activates",
        frame.activated_rows,
        [scatter("activated_fullest_rank", "time_us", "activated experts (fullest rank)", "experts (us)")],
        how=(
            "Phase `experts` of the slowest rank, median over iterations of a batch, over the activated "
            "experts of the rank that "
            "activates most; a point is a batch under a case."
        ),
        columns=("activated_fullest_rank", "num_pairs", "time_us", "intercept_us", "slope_us_per_expert"),
        height=4.2,
    ),
    "timeline": Figure(
        "Who waits for whom",
        frame.chosen_timeline,
        [lanes()],
        how="{subtitle}",
        columns=("launch", "batch", "iteration", "rank", "is_critical", "phase", "begin_us", "time_us"),
        height=lambda rows: rows["rank"].nunique() * (0.3 if rows["rank"].nunique() <= 8 else 0.2) + 0.9,
        most=1,
    ),
    "pareto": Figure(
        "What speed costs",
        frame.pareto_rows,
        [
            points("retained_mass", "on_front_of_retained_mass", sign=1, label="score mass kept (% of top-k's)"),
            points("dropped_share", "on_front_of_dropped_share", sign=-1, label="dropped (% of top-k pairs)"),
            relief(),
        ],
        how=(
            f"Speedup over native against what a policy keeps and drops. {{intervals}} Numbers: {GAMMA}, or "
            f"spare slots of replication."
        ),
        columns=(
            *SPEEDUP,
            "verdict",
            *COST,
            "on_front_of_retained_mass",
            "on_front_of_dropped_share",
            "relief",
            "kept_share",
        ),
        height=lambda rows: 4.0 if _is_alone(rows) else 5.2,
        beside=_is_alone,
        most=4,
    ),
    "scaling": Figure(
        "How speedup and layer time scale",
        frame.scaling_rows,
        [
            lines("value", "speedup_median", words="quantity", ratio=1.5, only="role != 'baseline'"),
            lines("value", "median_ms", words="quantity"),
        ],
        how=(
            "A line connects comparisons that differ in nothing but the axis; layer time is the slowest "
            "rank's median; of each line "
            "the smallest capacity factor, or fewest spare slots. {intervals}"
        ),
        columns=("quantity", "value", "median_ms", *SPEEDUP),
        height=4.4,
        limit=6,
    ),
    "whole": Figure(
        "What faster MoE layers come to in a whole model",
        frame.whole_rows,
        [
            forest([("end to end", -0.15, None), ("MoE layers alone", 0.17, _PASS), ("by Amdahl", -0.15, _AMDAHL)]),
            bars("part", "time of a pass (ms)", ratio=1.4),
            extrapolated(),
        ],
        how=(
            "Left: speedup of a pass from end to end, of its MoE layers alone, and where Amdahl's law puts "
            "the pass; right: a pass in "
            "parts, mean over ranks. {intervals}"
        ),
        columns=("shows", "part", "time_ms", *SPEEDUP, *COST),
        height=lambda rows: 0.9 + (0.46 if "\n" in "".join(rows["bar"].dropna()) else 0.3) * _most_of(rows, "bar"),
        beside=True,
        most=1,
        limit=2,
    ),
}
_COSTS = scatter(
    "value",
    "cross_entropy_added",
    "quantity",
    "cross-entropy added, nats",
    spread="cross_entropy_added_half",
    join="on_line",
)
_OF_COSTS = (
    "phase",
    "checkpoints",
    "policy",
    "policy_params",
    "activated_experts",
    "fullest_rank",
    "cross_entropy_added",
)
_QUALITY = partial(
    Figure,
    marks=[_COSTS],
    how=(
        "Cross-entropy added to the unpatched model's on the same sequences, nats per token. Whiskers: 95 % "
        "interval, Student's t "
        "over checkpoints where there are several, else over batches."
    ),
    columns=(*_OF_COSTS, "cross_entropy_added_half", "quantity", "value", "on_line"),
    height=3.3,
)
# Of a directory of ``quality``, whose routing is that of virtual ranks.
QUALITY_FIGURES = {
    "quality_capacity": _QUALITY("What a capacity costs the answers", frame.quality_capacity_rows),
    "quality_fronts": _QUALITY("What answers cost over what it buys", frame.quality_front_rows),
}


@dataclass(frozen=True)
class Lines:
    """Any column against any other, as ``plot --x --y`` or a config's ``figures:`` asks for it.

    Attributes:
        x, y: columns of cases, or of batches and layers, of which means are drawn; parameters of policies are columns.
        by: the column whose values are lines; None = the policy but for ``x``.
        facet: the column whose values are panels; None = comparisons, or models where ``x`` tells comparisons apart.
        where: a pandas query.
    """

    x: str
    y: str
    by: str | None = None
    facet: str | None = None
    where: str | None = None

    @property
    def name(self) -> str:
        """Of its files."""
        return "-".join(
            [f"{self.y}-over-{self.x}", *(part for part in (self.by and f"by-{self.by}", self.facet) if part)]
        )

    def figure(self) -> Figure:
        """A row as those of ``FIGURES``."""
        words = [column.replace("_", " ") for column in (self.y, self.x)]
        how = f"A line for each {(self.by or 'policy').replace('_', ' ')}, means where several rows stand at one place."
        columns = [name for name in (self.x, self.y, self.by, self.facet) if name]
        return Figure(
            f"{words[0][:1].upper()}{words[0][1:]} over {words[1]}",
            self.rows,
            [lines(self.x, self.y)],
            how=how,
            columns=columns,
            height=3.8,
            limit=6,
            looks=partial(looks_of) if self.by in (None, "policy", "label", "family") else ordered_looks,
        )

    def rows(self, store: Store) -> pd.DataFrame:
        """A row per panel, line and place; none where no policy that ran has a field asked for.

        Raises:
            UserError: a column is unknown, or the query cannot be read.
        """
        asked = {name: getattr(self, name) for name in ("x", "y", "by", "facet") if getattr(self, name)}
        rows, known = frame.wide_rows(store, list(asked.values()))
        absent = [column for column in asked.values() if column not in rows]
        if absent and all(any(column in names for names in fields_by_policy().values()) for column in absent):
            return rows.iloc[:0]  # no policy that has such a field ran
        for name, column in asked.items():
            if column not in rows:
                raise UserError(
                    f"--{name}: expected a column, one of {', '.join(known)}; got {column!r}"
                    f"{did_you_mean(column, known)}"
                )
        if not pd.api.types.is_numeric_dtype(rows[self.y]):
            raise UserError(f"--y: expected a column of numbers; {self.y} has words")
        try:
            rows = rows.query(self.where, engine="python") if self.where else rows
        except Exception as error:
            raise UserError(
                f"--where: cannot be read as a condition on columns ({error}); got {self.where!r}"
            ) from None
        rows = rows[rows["role"].isin(["baseline", "policy", "replication"]) & rows[self.y].notna()]
        tells_apart = rows.groupby("facet")[self.x].nunique().max() == 1
        if self.facet is not None:
            words = rows[self.facet].map(value_words)
            rows = rows.assign(facet=words, heading=f"{self.facet.replace('_', ' ')} " + words)
        elif tells_apart:
            rows = rows.assign(facet=rows["model"], heading=rows["model"])
        label = rows["label"].str.replace(rf" {re.escape(self.x)}=\S+", "", regex=True)
        line = label.where(rows["role"] != "baseline", "native") if self.by is None else rows[self.by].map(value_words)
        rows = rows.assign(line=line, legend=line)
        means = rows.groupby(["facet", "line", self.x], sort=False, dropna=False)[self.y].transform("mean")
        return rows.assign(**{self.y: means}).drop_duplicates(["facet", "line", self.x])


# ---- drawing -------------------------------------------------------------------------------------------------------


def draw(figure: Figure, store: Any, **options: Any) -> Drawing | None:
    """Draw a figure of a store; None where no row fits. ``options`` go to the figure's ``rows``."""
    rows = figure.rows(store, **options)
    if rows is None or rows.empty:
        return None
    rows = rows.query(figure.where, engine="python") if figure.where else rows
    if rows.empty or (figure.needs and rows.query(figure.needs, engine="python").empty):
        return None
    drawn, notes = _few(rows, figure.limit)
    drawn = _with_legend(drawn)
    everywhere = frame.case_rows(store)["line"] if figure.looks is looks_of and isinstance(store, Store) else []
    names = [name for name in ["native", *everywhere, *rows["line"]] if isinstance(name, str)]
    looks = figure.looks(names if figure.looks is looks_of else list(rows["line"].dropna().unique()))
    more = [line for line in drawn["line"].dropna().unique()][_MOST_LINES:]
    if more:
        notes.append(f"not drawn, but in the CSV: {', '.join(more)}")
        drawn = drawn[~drawn["line"].isin(more)]
    notes += [*drawn["note"].dropna().unique()] if "note" in drawn else []
    beside = figure.beside(drawn) if callable(figure.beside) else figure.beside
    height = figure.height(drawn) if callable(figure.height) else figure.height
    most = min(2, figure.most) if beside else figure.most
    sheet, body = facets(drawn, figure.marks, looks, height, beside=beside, most=most)
    how = drawn.iloc[0].to_dict() | {"intervals": _intervals(drawn)}
    tags = [word for word in (*HOW, "recorded", "synthetic") if word in {*drawn["origin"], *drawn["workload"]}]
    dress(sheet, figure.title, figure.how.format_map(how), footer(drawn, notes, timed=figure.timed), tags, body=body)
    columns = dict.fromkeys([*ABOUT, *figure.columns, "origin", "workload"])
    return Drawing(sheet, rows[[name for name in columns if name in rows]])


def _few(rows: pd.DataFrame, limit: int) -> tuple[pd.DataFrame, list[str]]:
    """At most so many facets, evenly spaced, and a note on the others."""
    names = list(rows["facet"].unique())
    if len(names) <= limit:
        return rows, []
    kept = {names[int(place)] for place in np.linspace(0, len(names) - 1, limit).round()}
    return rows[rows["facet"].isin(kept)], [f"of {len(names)} comparisons {limit} are drawn; the CSV has all"]


def _with_legend(rows: pd.DataFrame) -> pd.DataFrame:
    """What each line is called: with its capacity factor where it is drawn at one alone."""
    if "name" not in rows or "legend" in rows:
        return rows.assign(legend=rows["line"])
    number = rows.groupby("line")["name"].transform("nunique")
    return rows.copy().assign(legend=rows["name"].where((number == 1) & (rows["role"] == "policy"), rows["line"]))


def _intervals(rows: pd.DataFrame) -> str:
    if "speedup_is_interval" not in rows:
        return ""
    known = rows.loc[
        rows["speedup_median"].notna() & rows["role"].isin(["policy", "replication"]), "speedup_is_interval"
    ]
    return interval_words([value is True or value == 1 for value in known.dropna()])


def footer(rows: pd.DataFrame, notes: Sequence[str] = (), *, timed: bool = True) -> list[str]:
    """Two lines: how, on what, which model and which workload; then what weakens it."""
    if "facts" not in rows:  # of answers
        return ["Costs are of this model on this text. Routing is that of virtual ranks; nothing was timed."]
    first = rows.drop_duplicates("facet")
    scale = first["scale"].map(
        lambda scale: (
            "" if pd.isna(scale) else ", true sizes" if scale == 1 else f", sizes x {scale:g} of the true ones"
        )
    )
    dtype = first["dtype"].map(lambda dtype: f", {dtype}", "ignore").fillna("")
    weights = first["facts"].map(lambda facts: "random weights" if facts.get("random_weights") else None)
    parts = [
        first["how"],
        first["ran_on"],
        first["links_words"],
        first["model"] + scale + dtype,
        weights,
        first["workload_words"],
    ]
    said = [
        _said_once(
            part.dropna().map(lambda words: str(words).partition(": ")[0] if "modelled by" in str(words) else words)
        )
        for part in parts
    ]
    warnings = [OVERSUBSCRIBED] if timed and (first["oversubscribed"] == True).any() else []  # noqa: E712
    is_unfused = first["facts"].map(lambda facts: _is_unfused(facts.get("permute") or {}))
    warnings += [NOT_FUSED] if timed and "part_origin" in rows and is_unfused.any() else []
    words = "; ".join(note.removesuffix(".") for note in [*warnings, *notes])
    return [" | ".join(filter(None, said)), *([f"Note: {words}."] if words else [])]


def _is_unfused(permute: Mapping[str, Any]) -> bool:
    return permute.get("ran") not in (None, "fused")


def _said_once(values: pd.Series) -> str:
    """What comparisons share is said once; of more than two different values the first and the last."""
    different = list(dict.fromkeys(values))
    if len(different) > 2:
        different[1:-1] = [f"{len(different) - 2} more"]
    return " / ".join(different)
