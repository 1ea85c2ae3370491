"""The tables of results: a view is columns of a frame, which of its rows, and in which order.

``show`` and the page print views; a view is added by a row of ``VIEWS``, a column by a row of ``columns.COLUMNS``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, conditions, layers, routing
from moe_ep_bench.analysis.columns import COLUMNS, Column, Row, columns, fitting_labels, interval, times
from moe_ep_bench.analysis.notes import WARNING, leaves_idle, notes
from moe_ep_bench.analysis.origins import scale_words
from moe_ep_bench.analysis.reduce import GROUPS, PASS_PARTS
from moe_ep_bench.analysis.render import Table
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.schema import TOTAL
from moe_ep_bench.timing.statistics import BELOW_MODEL

_REASON_WIDTH = 90
# What a speedup is, how certain it is, and what is extrapolated: even a caption says it.
_CAPTION = ("speedup:", "end to end:", "noise floor:", "extrapolated:")
# Of more ranks those that are slowest under native are shown; so many policies' layers, one by one.
MAX_RANKS = 64
_MOST_POLICIES = 4


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
    headers: dict[str, str] | None = None
    where: str = ""
    title: str = ""
    rows: Callable[[Store, pd.DataFrame], pd.DataFrame] = lambda _, rows: rows
    notes: Sequence[str] | None = ()


def _by_layer(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """Every layer's parts under native, and its MoE layer under the policies that gain most; empty without native's."""
    frame = layers(store, rows)
    labels = rows[(rows["role"] == "baseline") & (rows["status"] == "ok")]["label"]
    if frame.empty or labels.empty or labels.iloc[0] not in set(frame["label"]):
        return pd.DataFrame()
    gaining = rows[rows["role"].isin(["policy", "replication"]) & (rows["policy"] != "topk")]
    gaining = gaining.dropna(subset=["speedup_median"]).sort_values("speedup_median", ascending=False)
    shown = [labels.iloc[0], *gaining["label"].head(_MOST_POLICIES)]
    moe = frame.pivot(index="layer", columns="label", values="moe").reindex(columns=shown).add_prefix("MoE, ")
    native = frame[frame["label"] == labels.iloc[0]].set_index("layer")
    return native[[part for part in ("attention", "dense") if part in native]].join(moe).reset_index()


def _by_rank(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """What each rank had to do and how long it took, under native and the fastest policy; empty without native.

    ``median_ms`` is a rank's own time, ``slowest_share`` how often it is the slowest, of plain iterations;
    ``waiting_ms`` the median of breakdowns; ``load_over_mean`` its pairs over the model's own mean rank.
    """
    native = rows[(rows["role"] == "baseline") & (rows["status"] == "ok")]
    if native.empty:
        return pd.DataFrame()
    shown, parts = pd.concat([native, fastest(rows)]).drop_duplicates(CASE), []
    comparison = store.by_id[tuple(native[COMPARISON].iloc[0])]
    loads, by_id = routing(store), {case.case_id: case for case in comparison.cases}
    for about in shown.to_dict("records"):
        case, own = by_id[about["case_id"]], loads[loads[CASE].eq([about[name] for name in CASE]).all(axis=1)]
        total_IR = case.plain.of(TOTAL)
        load_R = np.mean(np.stack(own["load_R"].to_list()) / own[["num_topk_pairs"]].to_numpy(), axis=0)
        rank_R = np.arange(total_IR.shape[1])
        part = {"label": about["label"], "rank": rank_R, "median_ms": np.median(total_IR, axis=0) / 1e3}
        part["slowest_share"] = np.bincount(total_IR.argmax(axis=1), minlength=len(rank_R)) / len(total_IR)
        if len(case.breakdown.index):
            part["waiting_ms"] = np.median(case.breakdown.of(*GROUPS["waiting"]), axis=0) / 1e3
        part["load_over_mean"] = (load_R * len(load_R))[rank_R % len(load_R)]
        parts.append(pd.DataFrame(part))
    found = pd.concat(parts, ignore_index=True)
    known = conditions(store)
    known = known.merge(shown[COMPARISON].drop_duplicates(), on=COMPARISON) if len(known) else known
    if len(known):
        known = known[known["launch"] == known["launch"].min()].set_index("rank")
        # One device in place of all ranks has one set of conditions.
        at = found["rank"].where(found["rank"].isin(known.index), 0)
        known = known.assign(memory_gib=known["peak_memory_bytes"].astype(float) / 2**30)
        for name in ("hostname", "memory_gib", "matmul_tflops", "sm_clock_mhz"):
            found[name] = known[name].reindex(at).to_numpy()
    most = found[found["label"] == native["label"].iloc[0]].nlargest(MAX_RANKS, "median_ms")["rank"]
    return found[found["rank"].isin(most)].sort_values("rank", kind="stable")


_COST = ("dropped_share", "retained_mass")
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
            *("all_layers_ms_extrapolated", "speedup_extrapolated"),
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
                "expert_imbalance",
                "rank_imbalance",
                *_COST,
                "below_frontier",
            ),
            *("below_frontier_experts", "experts_per_token", "activated_experts", "activated_fullest_rank"),
            *("extra_gib_per_rank", "moved_gib"),
        ),
        notes=None,
    ),
    "rates": View(
        "layer",
        (
            *("label", "crossing_pair_bytes", "crossing_copy_bytes", "dispatch_gbps", "dispatch_bus_gbps"),
            *("combine_gbps", "combine_bus_gbps", "experts_tflops", "experts_of_matmul", "experts_of_copy"),
        ),
        where="crossing_pair_bytes.notna()",
        title="rates in breakdown iterations",
        notes=("bandwidths by nccl-tests' formulas; experts over a square matmul and a copy of the same run",),
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
        (
            *("label", "rank", "hostname", "median_ms", "slowest_share", "waiting_ms", "load_over_mean", "memory_gib"),
            *("matmul_tflops", "sm_clock_mhz"),
        ),
        {"median_ms": "p50"},
        title="ranks",
        rows=_by_rank,
        notes=(
            "p50, slowest in: a rank's own time, and how often it is the slowest, in iterations without probes",
            "waiting: for slower ranks, in iterations with probes; load: pairs over the model's own mean rank",
            f"of more than {MAX_RANKS} ranks the slowest",
        ),
    ),
    "layers": View(
        "model",
        (),
        title="by layer",
        rows=_by_layer,
        notes=(f"mean over ranks, median over breakdown iterations; of policies the {_MOST_POLICIES} that gain most",),
    ),
}
MAIN = ("layer", "model", "route")


def kind_of(rows: pd.DataFrame) -> str:
    """``layer``, ``model`` or ``route``, of rows of one comparison."""
    facts = rows.iloc[0]
    return "route" if facts["mode"] == "route" else facts["scope"]


def tables(
    store: Store,
    views: Sequence[str] = MAIN,
    wanted: pd.DataFrame | None = None,
    names: Sequence[str] | None = None,
) -> list[Table]:
    """Views of every comparison.

    Args:
        wanted: rows of ``cases``; None = all.
        names: of columns, in place of the view's own.

    Raises:
        UserError: a column is unknown; the line lists those that there are.
    """
    frame = cases(store) if wanted is None else wanted
    found = []
    for _, rows in frame.groupby(COMPARISON, sort=False):
        for name in views:
            if kind_of(rows) in VIEWS[name].of.split():
                table = table_of(store, VIEWS[name], rows, names)
                found += [table] if len(table.columns) > 1 else []
    return found


def table_of(store: Store, view: View, rows: pd.DataFrame, names: Sequence[str] | None = None) -> Table:
    """A view of one comparison; without columns where it has no rows."""
    frame = view.rows(store, rows)
    if view.where and len(frame):
        frame = frame.query(view.where, engine="python") if set(_needed(view)) <= set(frame) else frame.iloc[:0]
    if frame.empty:
        return Table(frame, ())
    chosen = columns(names, frame) if names else _columns_of(view, frame)
    facts, has_status = rows.iloc[0], "status" in frame
    instead = "instead" if has_status else None
    if has_status:
        frame = frame.assign(instead=pd.Series(list(map(_reason, frame.to_dict("records"))), frame.index, dtype=object))
    lines = view.notes if view.notes is not None else notes(store, facts["directory"], facts["comparison_id"])
    title = f"{facts['title']}: {view.title}" if view.title else _title(facts)
    return Table(frame, chosen, title, lines, instead, [line for line in lines if line.startswith(_CAPTION)])


def _needed(view: View) -> list[str]:
    return [name for name in (*view.columns, "status") if name in view.where]


def _columns_of(view: View, frame: pd.DataFrame) -> list[Column]:
    """The view's columns that say something."""
    if not view.columns:
        return [Column("layer", "layer", form="{:.0f}"), *(times(name, name) for name in frame.columns[1:])]
    names = [name for name in view.columns if name in frame and frame[name].notna().any()]
    is_idle = "activated_fullest_rank" in frame and "role" in frame and leaves_idle(frame)
    if "activated_fullest_rank" in names and not is_idle:
        names = [name for name in names if name not in ("activated_fullest_rank", "below_frontier_experts")]
    headers = view.headers or {}
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


def _reason(row: Row) -> str | None:
    """Why a case was not measured; None where it was."""
    if row["status"] == "ok":
        return None
    reason = textwrap.shorten(row["reason"] or "no reason was recorded", _REASON_WIDTH, placeholder=" ...")
    return f"{row['status']}: {reason}"


def short_table(rows: pd.DataFrame) -> Table:
    """What the end of a run prints of a comparison: six columns that fit 100 characters."""
    load = "activated_experts" if leaves_idle(rows) else "rank_imbalance"
    of_route = ("fullest_expert", "fullest_rank", load, *_COST)
    names = of_route if kind_of(rows) == "route" else ("median_ms", "speedup_median", "verdict", *_COST)
    headers = {"retained_mass": "kept", **(VIEWS["model"].headers or {} if kind_of(rows) == "model" else {})}
    cells = {
        "speedup_median": interval("speedup", "speedup", of_baseline="1", digits=2).cell,
        "verdict": lambda row: "below the model" if row["verdict"] == BELOW_MODEL else COLUMNS["verdict"].shown(row),
    }
    shown = [
        replace(COLUMNS[name], header=headers.get(name, COLUMNS[name].header), cell=cells.get(name, COLUMNS[name].cell))
        for name in ("label", *names)
    ]
    instead = pd.Series(list(map(_reason, rows.to_dict("records"))), rows.index, dtype=object)
    rows = rows.assign(instead=instead, label=fitting_labels(rows["label"], 33))
    return Table(rows, shown, rows["title"].iloc[0], (), "instead")


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each comparison the policy with the largest speedup; ``topk`` has native's routing."""
    policies = frame[(frame["role"] == "policy") & (frame["policy"] != "topk") & frame["speedup_median"].notna()]
    return policies.loc[policies.groupby(COMPARISON)["speedup_median"].idxmax()]


def overview(store: Store) -> Table:
    """A row per comparison: its fastest policy, or native alone."""
    frame = cases(store)
    by_role = {role: frame[frame["role"] == role].set_index(COMPARISON) for role in ("baseline", "ceiling")}
    unmeasured = (frame["status"] != "ok").groupby([frame[name] for name in COMPARISON], sort=False).sum()
    rows = fastest(frame).set_index(COMPARISON).reindex(unmeasured.index)
    rows = rows.assign(
        title=frame.groupby(COMPARISON)["title"].first(),
        native_ms=by_role["baseline"]["median_ms"],
        balanced=by_role["ceiling"]["speedup_median"],
        unmeasured=unmeasured[unmeasured > 0],
    ).dropna(axis=1, how="all")
    wanted: tuple[Any, ...] = (
        COLUMNS["title"],
        times("native_ms", "native"),
        replace(COLUMNS["label"], header="fastest policy"),
        *(COLUMNS[name] for name in ("speedup_median", "verdict", *_COST)),
        Column("balanced", "native, if balanced"),
        COLUMNS["most_by_amdahl"],
        Column("unmeasured", "not measured", form="{:.0f}"),
    )
    title = "All comparisons; the fastest of many policies is in part the luckiest"
    return Table(rows.reset_index(), [column for column in wanted if column.name in rows], title)


def count_words(frame: pd.DataFrame) -> str:
    """How many cases have results, and what became of the others."""
    counts = frame["status"].value_counts().sort_index()
    lost = ", ".join(f"{number} {status}" for status, number in counts.items() if status != "ok")
    number = counts.get("ok", 0)
    return f"{len(frame)} cases: {number} ok, {len(frame) - number} not" + (f" ({lost})" if lost else "")


def warnings_of(listed: Sequence[Table]) -> list[str]:
    """Each warning of tables once, with the comparisons that it is of where it is not of all."""
    names = {table.title.partition(": ")[0] for table in listed if table.notes}
    found: dict[str, dict[str, None]] = {}
    for table in listed:
        for note in table.notes:
            if note.startswith(WARNING):
                found.setdefault(note.removeprefix(WARNING), {})[table.title.partition(": ")[0]] = None
    return [line if len(of) == len(names) else f"{line} ({'; '.join(of)})" for line, of in found.items()]
