"""The tables of results: a view is columns of a frame, which of its rows, and in which order.

``show`` and the page print views; a view is added by a row of ``VIEWS``, a column by a row of ``columns.COLUMNS``.
Every view is made of a store, whatever kinds of results it holds: where it has no rows there is no table.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.advice import read_advices
from moe_ep_bench.analysis.answer_costs import orderings_met, tasks, texts
from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, differs_from_topk, ranks
from moe_ep_bench.analysis.columns import (
    COSTS,
    LOST,
    NONE,
    Column,
    Row,
    Table,
    column_of,
    lost_shown,
    missing,
    number,
    percentage,
    short_labels,
    text,
)
from moe_ep_bench.analysis.notes import (
    ANSWERS,
    ORDERINGS,
    chance_words,
    entropy_words,
    leaves_idle,
    notes,
    task_lines,
)
from moe_ep_bench.analysis.reduce import OF_LAYER, OF_PASS
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.config.conditions import matching
from moe_ep_bench.facts.words import Line, scale_words, title_words
from moe_ep_bench.schema import REHEARSAL
from moe_ep_bench.timing.statistics import BELOW_MODEL

_REASON_WIDTH, _LABEL_WIDTH = 90, 28
MAX_RANKS = 64
# Conditions of the comparisons that a view is of.
_TIMED, _ROUTED = "mode in ('run', 'emulated')", "mode == 'route'"
_LAYER, _MODEL = f"scope == 'layer' and {_TIMED}", f"scope == 'model' and {_TIMED}"


def _conditions(rows: pd.DataFrame) -> str:
    """How, on what and in which form a comparison came about."""
    facts = rows.iloc[0]
    if facts["mode"] == "route":
        return f"{facts['how']}, {facts['num_batches']:.0f} batch{'es' if facts['num_batches'] > 1 else ''}"
    if facts["mode"] == "serve":
        return f"{facts['how']}, {facts['ran_on']}"
    layer_only = facts["scope"] == "layer" and facts["num_replicas"] > 1
    replicas = f" x {facts['num_replicas']:.0f} replicas" if layer_only else ""
    on = ", ".join(filter(None, (facts["ran_on"], facts["links_words"])))
    return f"{facts['how']}, {on}, EP {facts['num_ranks']}{replicas}, {facts['dtype']}, {scale_words(facts['scale'])}"


def _notes(store: Store, rows: pd.DataFrame) -> list[Line]:
    """All notes of a comparison."""
    return notes(store, *rows[COMPARISON].iloc[0])


@dataclass(frozen=True)
class View:
    """A table of each group of a frame's rows.

    Attributes:
        columns: names, of ``COLUMNS`` or the frame, or columns of its own; those without a value in any row are left
            out.
        frame: of a store; its groups ``by``, mostly comparisons, are a table each.
        where: a condition (``conditions``): which rows of the frame it is of; empty = all.
        rows: the rows that it shows, of a store and a group's.
        headers: other headers than ``COLUMNS`` has, by name.
        alike: columns that are left out where all rows have one value.
        title: words behind the comparison's own title, empty = how it came about; or of a store and a group's rows the
            title.
        notes: below the table; or of a store and a group's rows.
        label_width: characters of labels, which lose words (``columns.short_labels``); None = they are whole.
        short: columns of the table at the end of a run, between the policy and its costs.
    """

    columns: Sequence[str | Column]
    frame: Callable[[Store], pd.DataFrame] = cases
    by: Sequence[str] = tuple(COMPARISON)
    where: str = ""
    rows: Callable[[Store, pd.DataFrame], pd.DataFrame] = lambda _, rows: rows
    headers: dict[str, str] = field(default_factory=dict)
    alike: Sequence[str] = ()
    title: str | Callable[[Store, pd.DataFrame], str] = ""
    notes: Sequence[str] | Callable[[Store, pd.DataFrame], Sequence[str | Line]] = _notes
    label_width: float | None = None
    short: Sequence[str] = ()


def by_rank(store: Store, rows: pd.DataFrame, most: int = MAX_RANKS) -> pd.DataFrame:
    """A row per rank, of native and of ``advise``'s pick, or else the policy that gains most, of one comparison.

    Columns: of the case; ``rank``; ``hostname``; ``<group>_ms`` of its phases, median over breakdown iterations,
    waiting less what its probes cost when nobody waits. Of more than ``most`` ranks those that work longest under
    native.
    """
    native, names = rows[(rows["role"] == "baseline") & (rows["status"] == "ok")], [*OF_LAYER]
    picked, one = rows[rows["case_id"].isin(_picks(store))], store.by_id[tuple(rows[COMPARISON].iloc[0])]
    chosen = pd.concat([native, picked if len(picked) else fastest(rows)])
    shown = chosen.drop(columns=["rank", *names], errors="ignore").merge(ranks(store), on=CASE)
    if native.empty or shown.empty:
        return rows[:0]
    work_ms = shown[names].sum(axis=1) - shown["waiting_ms"]
    longest = shown["rank"].loc[work_ms[shown["role"] == "baseline"].nlargest(most).index]
    machines = next((launch.machines for launch in one.conditions.values()), [])
    hosts = {number: hostname for number, (hostname, _) in enumerate(machines)}
    return shown[shown["rank"].isin(longest)].assign(hostname=lambda rows: rows["rank"].map(hosts))


def _with_total(_: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with ``phases_ms``, the sum of a layer's groups of phases, or of the parts of a pass."""
    layer_ms, pass_ms = (rows.reindex(columns=list(names)).sum(axis=1, min_count=1) for names in (OF_LAYER, OF_PASS))
    return rows.assign(phases_ms=layer_ms.mask(rows["scope"] == "model", pass_ms))


@lru_cache(maxsize=2)
def _picks(store: Store) -> list[str]:
    """Ids of the cases that ``advise`` picked; none of a damaged answer, which the page names."""
    advised = read_advices([directory.folder for directory in store.directories], [])
    picks = [one.pick for advice in advised for answer in advice.answers for one in (answer, *answer.variants)]
    return [pick.case_id for pick in picks if pick is not None]


# ---- answers ---------------------------------------------------------------------------------------------------------


def _with_error(name: str, error: str, header: str, form: str, scale: float = 1.0) -> Column:
    """A number and behind it its error, where there is one: ``+0.30 +-0.02``."""

    def cell(row: Row) -> str:
        if missing(row[name]):
            return NONE
        shown = form.format(scale * row[name])
        return shown if missing(row[error]) else f"{shown} +-{form.replace('+', '').format(scale * row[error])}"

    return Column(name, header, cell=cell)


def _text_title(store: Store, rows: pd.DataFrame) -> str:
    return ANSWERS.format(rows["title"].iloc[0], _facts_of(store, rows).num_ranks)


def _facts_of(store: Store, rows: pd.DataFrame) -> Any:
    return store.by_id[tuple(rows[COMPARISON].iloc[0])].facts


# ---- the views -------------------------------------------------------------------------------------------------------

VIEWS = {
    "layer": View(
        (
            *("label", "median_ms", "speedup_median", "over_topk_median", "verdict", *COSTS, "slowest_group_ms"),
            *("p90_ms", "p99_ms", "pass_ms", "tokens_per_s_per_rank", "below_frontier", "below_frontier_experts"),
            *("output_error", "extra_gib_per_rank", "moved_gib", "rearrange_ms", "rearranged_gib"),
            *("activated_fullest_rank", "breakdown_slowest_phase"),
        ),
        where=_LAYER,
        short=("median_ms", "speedup_median", "over_topk_median", "verdict"),
    ),
    "model": View(
        (
            *("label", "median_ms", "speedup_median", "over_topk_median", "verdict", *COSTS, "slowest_group_ms"),
            *("p90_ms", "moe_ms", "moe_share", "moe_speedup_median", "by_amdahl", "policy_ms"),
            *("tokens_per_s", "tokens_per_s_per_rank"),
        ),
        where=_MODEL,
        headers={"median_ms": "pass", "speedup_median": "end to end"},
        short=("median_ms", "speedup_median", "over_topk_median", "verdict"),
    ),
    "route": View(
        (
            *(
                "label",
                "fullest_expert",
                "fullest_rank",
                "fullest_tokens",
                "expert_imbalance",
                "rank_imbalance",
                *COSTS,
            ),
            *("below_frontier", "below_frontier_experts", "experts_per_token", "activated_experts"),
            *("activated_fullest_rank", "extra_gib_per_rank", "moved_gib", "rearranged_gib"),
        ),
        where=_ROUTED,
        short=("fullest_expert", "fullest_rank", "activated_experts", "rank_imbalance"),
    ),
    REHEARSAL: View(
        (
            *("label", "num_iterations", "num_phases", "reference_error", "peak_memory_gib", "lost_attempts"),
            *("fullest_rank", *COSTS, "activated_experts"),
        ),
        where=f"mode == '{REHEARSAL}'",
        short=("num_iterations", "num_phases", "peak_memory_gib", "fullest_rank"),
    ),
    "served": View(
        (
            *("label", "median_ms", "speedup_median", "verdict", "tokens_per_s", "throughput_speedup_median"),
            *("throughput_verdict", "ttft_ms", "ttft_speedup_median", "ttft_verdict"),
            *("tpot_ms", "tpot_speedup_median", "tpot_verdict", "p99_ms", "ttft_p99_ms", "tpot_p99_ms"),
            *("equal_share", "first_difference", "logprob_difference"),
            *("alone_equal_share", "alone_first_difference", "alone_logprob_difference"),
        ),
        where="mode == 'serve'",
        headers={"median_ms": "request"},
        short=("median_ms", "speedup_median", "verdict", "ttft_ms", "tpot_ms", "tokens_per_s", "equal_share"),
    ),
    "texts": View(
        (
            *("label", text("stage"), number("perplexity", "ppl", "{:.2f}")),
            _with_error("cross_entropy_added", "cross_entropy_added_half", "cross-entropy + nats", "{:+.4f}"),
            number("kl", "KL nats", "{:.4f}"),
            percentage("agreement", "top-1 agree"),
            *LOST,
            percentage("retained_mass_topk", "mass kept"),
            *("experts_per_token", "activated_experts", "fullest_rank"),
        ),
        frame=texts,
        label_width=math.inf,
        title=_text_title,
        notes=lambda _, rows: [entropy_words(rows["num_batches"].min())],
    ),
    "claims": View(
        (
            *(text("claim"), text("better", "A"), text("worse", "B")),
            _with_error("worse_costs_more", "half_width", "B costs more", "{:+.4f}"),
            text("verdict"),
            Column("agree", "checkpoints", cell=lambda row: f"{row['agree']} of {row['checkpoints']}"),
        ),
        frame=orderings_met,
        by=("directory", "group"),
        title=lambda _, rows: f"Papers' claims on {rows['comparison'].iloc[0]}",
        notes=lambda _, rows: [ORDERINGS, *chance_words(len(rows))],
    ),
    "tasks": View(
        (
            *("label", text("task")),
            Column(
                "metric",
                "metric",
                cell=lambda row: row["metric"] + ("" if row["filter"] == "none" else f" ({row['filter']})"),
            ),
            *(number("num_fewshot", "shots", "{}"), number("num_samples", "questions", "{:,}")),
            _with_error("value", "stderr", "score %", "{:.1f}", 100),
            _with_error("added", "added_stderr", "over unpatched", "{:+.1f}", 100),
            *LOST,
            percentage("retained_mass_topk", "mass kept"),
        ),
        frame=tasks,
        label_width=math.inf,
        alike=("task",),
        title=lambda store, rows: title_words(_facts_of(store, rows)),
        notes=lambda store, rows: task_lines(_facts_of(store, rows)),
    ),
    "phases": View(
        (
            *("label", "fullest_expert", "fullest_rank", "fullest_tokens", "slowest_group_fullest_rank"),
            *("breakdown_layer_ms", "phases_ms", *OF_LAYER, *OF_PASS),
            *("breakdown_unaccounted_share", "breakdown_policy_share", "probe_overhead"),
        ),
        where=f"status == 'ok' and {_TIMED}",
        rows=_with_total,
        title="loads and phases",
        notes=(
            "fullest expert, fullest rank: pairs over native's mean",
            "times: mean over ranks, so that waiting shows, then median over probed iterations; exchanges without what "
            "overlap hides; all phases: their sum, the number beside a bar of the figure phases",
            "unaccounted, policy share: shares of the slowest rank's time; probe overhead: added to the median",
        ),
    ),
    "ranks": View(
        ("label", "rank", *OF_LAYER, "hostname"),
        where=_TIMED,
        title="ranks under native and the pick, or the fastest policy",
        rows=by_rank,
        notes=(
            f"a rank's own time by phase, median over iterations with probes; of more than {MAX_RANKS} ranks those "
            "that work longest under native",
        ),
    ),
    "sent": View(
        ("label", "sent_pairs", "sent_copies", "sent_node_copies", "fullest_rank", *COSTS),
        where=f"status == 'ok' and ({_TIMED} or {_ROUTED})",
        title="copies that a token sends",
        notes=(
            "pairs sent, rank copies, node copies: of a token, to other ranks or nodes, as NCCL's all-to-all, DeepEP "
            "inside a node and DeepEP between nodes send it",
        ),
    ),
}
# Columns that are no values of a cell.
_HIDDEN = ["run", "facts", "settings"]
MAIN = ("layer", "model", REHEARSAL, "route", "served", "texts", "claims", "tasks")


def tables(store: Store, views: Sequence[str] = MAIN, asked: Sequence[str] = ()) -> list[Table]:
    """Views of a store: of each frame all views of a comparison, then of the next.

    Args:
        asked: names of columns, of ``public_names``, in place of the views' own.
    """
    made = []
    for frame_of, by in dict.fromkeys((VIEWS[name].frame, tuple(VIEWS[name].by)) for name in views):
        own = [VIEWS[name] for name in views if VIEWS[name].frame is frame_of]
        frame = frame_of(store)
        for _, rows in frame.groupby(list(by), sort=False) if len(frame) else ():
            made += [table_of(store, view, rows, asked) for view in own]
    return [table for table in made if len(table.columns) > (not asked)]


def public_names(store: Store, views: Sequence[str] = MAIN) -> list[str]:
    """The columns of those views that a store has: what they show, and all others of their frames."""
    frames = {name: frame for name in views if len(frame := VIEWS[name].frame(store))}
    shown = [column if isinstance(column, str) else column.name for name in frames for column in VIEWS[name].columns]
    others = [name for frame in frames.values() for name in frame]
    return [str(name) for name in dict.fromkeys([*shown, *others]) if name not in _HIDDEN]


def frames(store: Store) -> list[pd.DataFrame]:
    """All rows that the main views are of, with all columns: what programs read."""
    of_frame: dict[Callable[[Store], pd.DataFrame], list[str]] = {}
    for name in MAIN:
        of_frame.setdefault(VIEWS[name].frame, []).append(VIEWS[name].where)
    found = [
        matching(frame_of(store), " or ".join(f"({where})" for where in filter(None, conditions)))
        for frame_of, conditions in of_frame.items()
    ]
    return [rows.drop(columns=_HIDDEN, errors="ignore") for rows in found]


def table_of(store: Store, view: View, rows: pd.DataFrame, asked: Sequence[str] = ()) -> Table:
    """A view of one group of rows, or the columns ``asked`` for; without columns where it has none."""
    named = [column for column in view.columns if isinstance(column, str)]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *named])))
    rows = matching(rows, view.where)
    frame = view.rows(store, rows) if len(rows) else rows
    if frame.empty:
        return Table(frame, ())
    if callable(view.title):
        title, about = view.title(store, rows), ""
    else:
        title = ": ".join(filter(None, (rows["title"].iloc[0], view.title)))
        about = "" if view.title else _conditions(rows)
    lines = view.notes(store, rows) if callable(view.notes) else view.notes
    instead = "instead" if "status" in frame else None
    if view.label_width is not None:
        frame = frame.assign(label=short_labels(frame, view.label_width))
    frame = frame.copy().assign(instead=_reasons(frame)) if instead else frame  # of one piece
    return Table(frame, _columns_of(view, frame, asked), title, lines, instead, about)


def _columns_of(view: View, frame: pd.DataFrame, asked: Sequence[str]) -> list[Column]:
    """The view's columns that say something, or those ``asked`` for; none of these where no row has a value of any."""
    own = {column.name: column for column in view.columns if isinstance(column, Column)}
    names = asked or [column if isinstance(column, str) else column.name for column in view.columns]
    said = {name for name in names if name in frame and frame[name].notna().any()}
    if asked:
        names = asked if said else ()
    else:
        silent = {name for name in view.alike if frame[name].nunique(dropna=False) == 1}
        if "missing_share" in said:
            silent |= set(LOST) - set(lost_shown(frame))
        if "activated_fullest_rank" in said and not leaves_idle(frame):
            silent |= {"activated_fullest_rank", "below_frontier_experts"}
        names = [name for name in names if name in said - silent]
    columns = [own.get(name) or column_of(name, frame.get(name)) for name in names]
    return [replace(column, header=view.headers.get(column.name, column.header)) for column in columns]


def _reasons(rows: pd.DataFrame) -> pd.Series:
    """Why each case was not measured; None where it was."""
    lost = rows[rows["status"] != "ok"]
    words = [
        textwrap.shorten(f"{status}: {reason}", _REASON_WIDTH, placeholder=" ...")
        for status, reason in zip(lost["status"], lost["reason"], strict=True)
    ]
    return pd.Series(words, lost.index, dtype=object).reindex(rows.index)


def short_table(store: Store, rows: pd.DataFrame) -> Table:
    """The table of a comparison at the end of a run: columns that fit 100 characters.

    Where the speedup over ``topk`` is another than the one over native both are there, without intervals.
    """
    main = next(VIEWS[name] for name in MAIN if VIEWS[name].frame is cases and len(matching(rows, VIEWS[name].where)))
    idle, over_topk = leaves_idle(rows), differs_from_topk(rows).any()
    left_out = {"rank_imbalance" if idle else "activated_experts", *([] if over_topk else ["over_topk_median"])}
    rows = rows.assign(verdict=rows["verdict"].replace(BELOW_MODEL, "below the model"))
    headers = {**main.headers, "retained_mass": "kept"}
    if len(lost_shown(rows)) > 1:
        headers |= {"dropped_share": "drop", "rerouted_share": "reroute"}
    numbers = [name for name in main.short if name not in left_out]
    width = _LABEL_WIDTH - 2 * over_topk
    view = replace(main, columns=("label", *numbers, *COSTS), headers=headers, notes=(), label_width=width)
    table = table_of(store, view, rows)
    alone = {"speedup_median", "over_topk_median"} if over_topk else ()
    columns = [replace(column, cell=None) if column.name in alone else column for column in table.columns]
    return replace(table, columns=columns, about="")


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """The policy with the largest speedup in each comparison; ``topk`` has native's routing, and is none."""
    policies = frame[(frame["role"] == "policy") & (frame["policy"] != "topk") & frame["speedup_median"].notna()]
    return policies.loc[policies.groupby(COMPARISON, sort=False)["speedup_median"].idxmax()]


def count_words(frame: pd.DataFrame) -> str:
    """How many cases have results, and what became of the others."""
    counts = frame["status"].value_counts().sort_index()
    lost = ", ".join(f"{number} {status}" for status, number in counts.items() if status != "ok")
    number = counts.get("ok", 0)
    return f"{len(frame)} cases: {number} ok, {len(frame) - number} not" + (f" ({lost})" if lost else "")
