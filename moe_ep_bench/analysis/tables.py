"""The tables of results: a view is columns of a frame, which of its rows, and in which order.

``show`` and the page print views; a view is added by a row of ``VIEWS``, a column by a row of ``columns.COLUMNS``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, differs_from_topk, kind_of, ranks
from moe_ep_bench.analysis.columns import COLUMNS, COSTS, LOST, Column, Table, cut_labels, lost_shown, short_labels
from moe_ep_bench.analysis.notes import leaves_idle, notes
from moe_ep_bench.analysis.reduce import GROUPS, PASS_PARTS
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.config.conditions import matching
from moe_ep_bench.facts.words import scale_words
from moe_ep_bench.timing.statistics import BELOW_MODEL

_REASON_WIDTH, _LABEL_WIDTH = 90, 28
MAX_RANKS = 64


@dataclass(frozen=True)
class View:
    """A table of one comparison.

    Attributes:
        of: the comparisons that have it: layer, model, route.
        columns: names, of ``COLUMNS`` or the frame; those without a value in any row are left out.
        headers: other headers than ``COLUMNS`` has, by name.
        where: a condition (``conditions``); empty = all rows.
        rows: the frame, of a store and the comparison's rows of ``cases``.
        notes: below the table; None = all notes of the comparison.
    """

    of: str
    columns: Sequence[str]
    headers: dict[str, str] = field(default_factory=dict)
    where: str = ""
    title: str = ""
    rows: Callable[[Store, pd.DataFrame], pd.DataFrame] = lambda _, rows: rows
    notes: Sequence[str] | None = ()


def by_rank(store: Store, rows: pd.DataFrame, most: int = MAX_RANKS) -> pd.DataFrame:
    """Of one comparison native and the policy that gains most, a row per rank.

    Columns: of the case; ``rank``; ``hostname``; ``<group>_ms`` of its phases, median over breakdown iterations,
    waiting less what its probes cost when nobody waits. Of more than ``most`` ranks those that work longest under
    native.
    """
    native, names = rows[(rows["role"] == "baseline") & (rows["status"] == "ok")], [f"{group}_ms" for group in GROUPS]
    chosen, one = pd.concat([native, fastest(rows)]), store.by_id[tuple(rows[COMPARISON].iloc[0])]
    shown = chosen.drop(columns=["rank", *names], errors="ignore").merge(ranks(store), on=CASE)
    if native.empty or shown.empty:
        return rows[:0]
    work_ms = shown[names].sum(axis=1) - shown["waiting_ms"]
    longest = shown["rank"].loc[work_ms[shown["role"] == "baseline"].nlargest(most).index]
    machines = next((launch.machines for launch in one.conditions.values()), [])
    hosts = {number: hostname for number, (hostname, _) in enumerate(machines)}
    return shown[shown["rank"].isin(longest)].assign(hostname=lambda rows: rows["rank"].map(hosts))


VIEWS = {
    "layer": View(
        "layer",
        (
            *("label", "median_ms", "speedup_median", "over_topk_median", "verdict", *COSTS, "slowest_group_ms"),
            *("p90_ms", "p99_ms", "pass_ms", "tokens_per_s_per_rank", "below_frontier", "below_frontier_experts"),
            *("output_error", "extra_gib_per_rank", "moved_gib", "activated_fullest_rank", "breakdown_slowest_phase"),
        ),
        notes=None,
    ),
    "model": View(
        "model",
        (
            *("label", "median_ms", "speedup_median", "over_topk_median", "verdict", *COSTS, "slowest_group_ms"),
            *("p90_ms", "moe_ms", "moe_share", "moe_speedup_median", "by_amdahl", "policy_ms"),
            *("tokens_per_s", "tokens_per_s_per_rank"),
        ),
        {"median_ms": "pass", "speedup_median": "end to end"},
        notes=None,
    ),
    "route": View(
        "route",
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
            *("activated_fullest_rank", "extra_gib_per_rank", "moved_gib"),
        ),
        notes=None,
    ),
    "phases": View(
        "layer model",
        (
            *("label", "fullest_expert", "fullest_rank", "fullest_tokens", "slowest_group_fullest_rank"),
            "breakdown_layer_ms",
            *(f"{group}_ms" for group in GROUPS),
            *(f"mean_rank_{part}_ms" for part in PASS_PARTS),
            *("breakdown_unaccounted_share", "breakdown_policy_share", "probe_overhead"),
        ),
        where="status == 'ok'",
        title="loads and phases",
        notes=(
            "fullest expert, fullest rank: pairs over native's mean",
            "times: mean over ranks, so that waiting shows; median with probes; of exchanges what nothing hides",
            "unaccounted, policy share: shares of the slowest rank's time; probe overhead: added to the median",
        ),
    ),
    "ranks": View(
        "layer model",
        ("label", "rank", *(f"{group}_ms" for group in GROUPS), "hostname"),
        title="ranks under native and the fastest policy",
        rows=by_rank,
        notes=(
            f"a rank's own time by phase, median over iterations with probes; of more than {MAX_RANKS} ranks those "
            "that work longest under native",
        ),
    ),
    "sent": View(
        "route layer model",
        ("label", "sent_pairs", "sent_copies", "sent_node_copies", "fullest_rank", *COSTS),
        where="status == 'ok'",
        title="what a token sends",
        notes=(
            "pairs sent, rank copies, node copies: of a token, to other ranks or nodes, as NCCL's all-to-all, DeepEP "
            "inside a node and DeepEP between nodes send it",
        ),
    ),
}
MAIN = ("layer", "model", "route")


def tables(store: Store, views: Sequence[str] = MAIN) -> list[Table]:
    """Views of every comparison."""
    shown = [
        table_of(store, VIEWS[name], rows)
        for _, rows in cases(store).groupby(COMPARISON, sort=False)
        for name in views
        if kind_of(rows) in VIEWS[name].of.split()
    ]
    return [table for table in shown if len(table.columns) > 1]


def table_of(store: Store, view: View, rows: pd.DataFrame) -> Table:
    """A view of one comparison; without columns where it has no rows."""
    frame = view.rows(store, rows)
    if view.where:
        frame = frame.reindex(columns=list(dict.fromkeys([*frame, *view.columns])))
        frame = matching(frame, view.where)
    if frame.empty:
        return Table(frame, ())
    facts = rows.iloc[0]
    lines = view.notes if view.notes is not None else notes(store, facts["directory"], facts["comparison_id"])
    return Table(
        frame.assign(instead=_reasons(frame)) if "status" in frame else frame,
        _columns_of(view, frame),
        f"{facts['title']}: {view.title}" if view.title else _title(facts),
        lines,
        "instead" if "status" in frame else None,
    )


def _columns_of(view: View, frame: pd.DataFrame) -> list[Column]:
    """The view's columns that say something."""
    names = [name for name in view.columns if name in frame and frame[name].notna().any()]
    if "missing_share" in names:
        names = [name for name in names if name not in LOST or name in lost_shown(frame)]
    if "activated_fullest_rank" in names and not leaves_idle(frame):
        names = [name for name in names if name not in ("activated_fullest_rank", "below_frontier_experts")]
    return [replace(COLUMNS[name], header=view.headers.get(name, COLUMNS[name].header)) for name in names]


def _title(facts: pd.Series) -> str:
    """A comparison with how, on what and in which form it came about."""
    if facts["mode"] == "route":
        batches = f"{facts['num_batches']} batch{'es' if facts['num_batches'] > 1 else ''}"
        return f"{facts['title']}: {facts['how']}, {batches}"
    layer_only = facts["scope"] == "layer" and facts["num_replicas"] > 1
    replicas = f" x {facts['num_replicas']:.0f} replicas" if layer_only else ""
    on = ", ".join(filter(None, (facts["ran_on"], facts["links_words"])))
    how = f"{facts['how']}, {on}, EP {facts['num_ranks']}{replicas}"
    return f"{facts['title']}: {how}, {facts['dtype']}, {scale_words(facts['scale'])}"


def _reasons(rows: pd.DataFrame) -> pd.Series:
    """Why each case was not measured; None where it was."""
    lost = rows[rows["status"] != "ok"]
    words = (lost["status"] + ": " + lost["reason"].astype(str)).astype(object)
    return words.map(lambda line: textwrap.shorten(line, _REASON_WIDTH, placeholder=" ...")).reindex(rows.index)


def short_table(store: Store, rows: pd.DataFrame) -> Table:
    """What the end of a run prints of a comparison: columns that fit 100 characters.

    Where the speedup over ``topk`` is another than the one over native both stand there, without intervals.
    """
    kind = kind_of(rows)
    load = "activated_experts" if leaves_idle(rows) else "rank_imbalance"
    both = ("speedup_median", "over_topk_median") if kind != "route" and differs_from_topk(rows).any() else ()
    times = ("median_ms", *(both or ("speedup_median",)), "verdict")
    numbers = ("fullest_expert", "fullest_rank", load) if kind == "route" else times
    rows = rows.assign(
        label=cut_labels(short_labels(rows["label"]), _LABEL_WIDTH - len(both)),
        verdict=rows["verdict"].replace(BELOW_MODEL, "below the model"),
    )
    headers = {**VIEWS[kind].headers, "retained_mass": "kept"}
    if len(lost_shown(rows)) > 1:
        headers |= {"dropped_share": "drop", "rerouted_share": "reroute"}
    view = replace(VIEWS[kind], columns=("label", *numbers, *COSTS), headers=headers, notes=())
    table = table_of(store, view, rows)
    columns = [replace(column, cell=None) if column.name in both else column for column in table.columns]
    return replace(table, columns=columns, title=rows["title"].iloc[0])


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each comparison the policy with the largest speedup; ``topk`` has native's routing, and is none."""
    policies = frame[(frame["role"] == "policy") & (frame["policy"] != "topk") & frame["speedup_median"].notna()]
    return policies.loc[policies.groupby(COMPARISON, sort=False)["speedup_median"].idxmax()]


def count_words(frame: pd.DataFrame) -> str:
    """How many cases have results, and what became of the others."""
    counts = frame["status"].value_counts().sort_index()
    lost = ", ".join(f"{number} {status}" for status, number in counts.items() if status != "ok")
    number = counts.get("ok", 0)
    return f"{len(frame)} cases: {number} ok, {len(frame) - number} not" + (f" ({lost})" if lost else "")
