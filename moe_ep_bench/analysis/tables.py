"""The tables of results: a view is columns of a frame, which of its rows, and in which order.

``show`` and the page print views; a view is added by a row of ``VIEWS``, a column by a row of ``columns.COLUMNS``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, conditions, kind_of, samples
from moe_ep_bench.analysis.columns import COLUMNS, Column, columns, short_labels
from moe_ep_bench.analysis.notes import leaves_idle, notes
from moe_ep_bench.analysis.origins import scale_words
from moe_ep_bench.analysis.reduce import GROUPS, PASS_PARTS, probe_floor_us
from moe_ep_bench.analysis.render import Table
from moe_ep_bench.analysis.store import ITERATION, Store
from moe_ep_bench.schema import TOTAL
from moe_ep_bench.timing.statistics import BELOW_MODEL

_REASON_WIDTH = 90
# Of more ranks those that are slowest under native are shown.
MAX_RANKS = 64
_COST = ("dropped_share", "retained_mass")
_OF_MACHINES = ("hostname", "memory_gib", "matmul_tflops", "sm_clock_mhz")


@dataclass(frozen=True)
class View:
    """A table of one comparison.

    Attributes:
        of: the comparisons that have it: layer, model, route.
        columns: names, of ``COLUMNS`` or the frame; those without a value in any row are left out.
        headers: other headers than ``COLUMNS`` has, by name.
        where: a query of the frame; empty = all rows.
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


def native_and_fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of one comparison native and the policy that gains most; empty without native."""
    native = rows[(rows["role"] == "baseline") & (rows["status"] == "ok")]
    return pd.concat([native, fastest(rows)]).drop_duplicates(CASE) if len(native) else native


def rank_times(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per case of ``rows`` and rank: ``<group>_ms`` of its phases, median over breakdown iterations.

    Waiting is less what its probes cost when nobody waits, as in ``reduce.breakdown``.
    """
    floors = [(*key, probe_floor_us(one.facts, one.conditions.values())) for key, one in store.by_id.items()]
    times = samples(store, rows).query("kind == 'breakdown'")
    times = times.merge(pd.DataFrame(floors, columns=[*COMPARISON, "floor_us"]), on=COMPARISON)
    less_us = (times["time_us"] - times["floor_us"]).clip(lower=0)
    group_of = {phase: f"{group}_ms" for group, phases in GROUPS.items() for phase in phases}
    times = times.assign(
        time_us=times["time_us"].mask(times["phase"].isin(GROUPS["waiting"]), less_us),
        group=times["phase"].map(group_of),
    )
    sums_us = times.groupby([*CASE, *ITERATION, "rank", "group"])["time_us"].sum().unstack(fill_value=0.0)
    sums_us = sums_us.reindex(columns=[f"{group}_ms" for group in GROUPS], fill_value=0.0)
    return (sums_us.groupby([*CASE, "rank"]).median() / 1e3).reset_index()


def _by_rank(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """How long each rank took under native and the fastest policy, and where it ran.

    ``median_ms`` is a rank's own time, ``slowest_share`` how often it is the slowest, of plain iterations;
    ``waiting_ms`` the median of breakdowns.
    """
    chosen = native_and_fastest(rows)
    times = samples(store, chosen).query(f"kind == 'plain' and phase == '{TOTAL}'")
    is_slowest = times.groupby(["case_id", *ITERATION])["time_us"].rank(method="first", ascending=False) == 1
    by_rank = times.assign(is_slowest=is_slowest).groupby([*CASE, "label", "rank"], sort=False)
    shown = by_rank.agg(median_ms=("time_us", "median"), slowest_share=("is_slowest", "mean")).reset_index()
    shown["median_ms"] /= 1e3
    shown = shown.merge(rank_times(store, chosen).reindex(columns=[*CASE, "rank", "waiting_ms"]), how="left")
    machines = conditions(store).merge(rows[COMPARISON].head(1)).drop_duplicates("rank").set_index("rank")
    machines = machines.reindex(columns=["peak_memory_bytes", *_OF_MACHINES])
    machines["memory_gib"] = machines["peak_memory_bytes"].astype(float) / 2**30
    shown = chosen[["label"]].merge(shown, on="label").join(machines[[*_OF_MACHINES]], on="rank")
    slowest = shown[shown["label"].isin(chosen["label"].head(1))].nlargest(MAX_RANKS, "median_ms")["rank"]
    return shown[shown["rank"].isin(slowest)].sort_values("rank", kind="stable")


VIEWS = {
    "layer": View(
        "layer",
        (
            *("label", "median_ms", "speedup_median", "verdict", *_COST, "p90_ms", "p99_ms", "pass_ms"),
            *("tokens_per_s_per_rank", "over_topk_median", "below_frontier", "below_frontier_experts", "output_error"),
            *("extra_gib_per_rank", "moved_gib", "activated_fullest_rank", "breakdown_slowest_phase"),
        ),
        notes=None,
    ),
    "model": View(
        "model",
        (
            *("label", "median_ms", "speedup_median", "verdict", *_COST, "p90_ms", "over_topk_median", "moe_ms"),
            *("moe_share", "moe_speedup_median", "by_amdahl", "policy_ms", "tokens_per_s", "tokens_per_s_per_rank"),
        ),
        {"median_ms": "pass", "speedup_median": "end to end"},
        notes=None,
    ),
    "route": View(
        "route",
        (
            *("label", "fullest_expert", "fullest_rank", "expert_imbalance", "rank_imbalance", *_COST),
            *("below_frontier", "below_frontier_experts", "experts_per_token", "activated_experts"),
            *("activated_fullest_rank", "extra_gib_per_rank", "moved_gib"),
        ),
        notes=None,
    ),
    "phases": View(
        "layer model",
        (
            *("label", "fullest_expert", "fullest_rank", "breakdown_layer_ms", *(f"{group}_ms" for group in GROUPS)),
            *(f"mean_rank_{part}_ms" for part in PASS_PARTS),
            *("breakdown_unaccounted_share", "breakdown_policy_share", "probe_overhead"),
        ),
        where="status == 'ok'",
        title="loads and phases",
        notes=(
            "fullest expert, fullest rank: pairs over native's mean",
            "times: mean over ranks, so that waiting shows; median over iterations with probes; phases do not overlap",
            "unaccounted, choosing: shares of the slowest rank's time; probes: what they add to the median",
        ),
    ),
    "ranks": View(
        "layer model",
        ("label", "rank", "median_ms", "slowest_share", "waiting_ms", *_OF_MACHINES),
        {"median_ms": "p50"},
        title="ranks under native and the fastest policy",
        rows=_by_rank,
        notes=(
            "p50, slowest in: a rank's own time, and how often it is the slowest, in iterations without probes",
            f"waiting: for slower ranks, in iterations with probes; of more than {MAX_RANKS} ranks the slowest",
        ),
    ),
}
MAIN = ("layer", "model", "route")


def tables(store: Store, views: Sequence[str] = MAIN, names: Sequence[str] = ()) -> list[Table]:
    """Views of every comparison.

    Args:
        names: of columns, in place of the view's own.

    Raises:
        UserError: a column is unknown; the line lists those that there are.
    """
    shown = [
        table_of(store, VIEWS[name], rows, names)
        for _, rows in cases(store).groupby(COMPARISON, sort=False)
        for name in views
        if kind_of(rows) in VIEWS[name].of.split()
    ]
    return [table for table in shown if len(table.columns) > 1]


def table_of(store: Store, view: View, rows: pd.DataFrame, names: Sequence[str] = ()) -> Table:
    """A view of one comparison; without columns where it has no rows."""
    frame = view.rows(store, rows)
    if view.where:
        frame = frame.reindex(columns=list(dict.fromkeys([*frame, *view.columns])))
        frame = frame.query(view.where, engine="python")
    if frame.empty:
        return Table(frame, ())
    facts = rows.iloc[0]
    lines = view.notes if view.notes is not None else notes(store, facts["directory"], facts["comparison_id"])
    return Table(
        frame.assign(instead=_reasons(frame)) if "status" in frame else frame,
        columns(names, frame) if names else _columns_of(view, frame),
        f"{facts['title']}: {view.title}" if view.title else _title(facts),
        lines,
        "instead" if "status" in frame else None,
    )


def _columns_of(view: View, frame: pd.DataFrame) -> list[Column]:
    """The view's columns that say something."""
    names = [name for name in view.columns if name in frame and frame[name].notna().any()]
    if "activated_fullest_rank" in names and not leaves_idle(frame):
        names = [name for name in names if name not in ("activated_fullest_rank", "below_frontier_experts")]
    return _headed(names, view.headers)


def _headed(names: Sequence[str], headers: dict[str, str]) -> list[Column]:
    return [replace(COLUMNS[name], header=headers.get(name, COLUMNS[name].header)) for name in names]


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
    words = rows["status"] + ": " + rows["reason"].fillna("no reason was recorded").astype(str)
    short = words.map(lambda line: textwrap.shorten(line, _REASON_WIDTH, placeholder=" ..."))
    return short.astype(object).where(rows["status"] != "ok", None)


def short_table(rows: pd.DataFrame) -> Table:
    """What the end of a run prints of a comparison: six columns that fit 100 characters."""
    kind = kind_of(rows)
    load = "activated_experts" if leaves_idle(rows) else "rank_imbalance"
    numbers = (
        ("fullest_expert", "fullest_rank", load) if kind == "route" else ("median_ms", "speedup_median", "verdict")
    )
    headers = {**VIEWS[kind].headers, "retained_mass": "kept"}
    short = short_labels(rows["label"])
    rows = rows.assign(
        instead=_reasons(rows),
        # What tells cases apart mostly stands at the end.
        label=short.where(short.str.len() <= 28, short.str[:11] + " ... " + short.str[-12:]),
        verdict=rows["verdict"].replace(BELOW_MODEL, "below the model"),
    )
    return Table(rows, _headed(("label", *numbers, *_COST), headers), rows["title"].iloc[0], (), "instead")


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
