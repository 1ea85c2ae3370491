"""The figures of times and routing, each a row of ``FIGURES``, beside what single figures make of the frame.

A function of rows takes a store and gives tidy rows with a mark in each, none where there is nothing to show. A figure
is added by a row; ``lines.Lines`` is a figure of any column against any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from moe_ep_bench.analysis.cases import CASE, COMPARISON, comparisons, conditions, routing, timings
from moe_ep_bench.analysis.drawing import COST, Figure, case_rows, layer_rows
from moe_ep_bench.analysis.marks import (
    FULL_COLOUR,
    SPEEDUP,
    are_names,
    axis_of,
    bars,
    front,
    heat,
    on_front,
    series,
    stairs,
    with_native,
)
from moe_ep_bench.analysis.origins import phase_origin
from moe_ep_bench.analysis.reduce import GROUPS, PASS_PARTS
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import GAMMA, INK, MUTED, Look
from moe_ep_bench.analysis.sweeps import along, key_words, swept_keys, value_words
from moe_ep_bench.analysis.timeline import mark_critical, timeline_rows
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.schema import PHASES, UNACCOUNTED

FIGURES: dict[str, Figure] = {}
_ENDS = ("speedup_median", *SPEEDUP, "speedup_is_interval")
_SPEEDUP = (*_ENDS, "floor_low", "floor_high")


def _most_of(rows: pd.DataFrame, column: str) -> int:
    """Of the facet that has most."""
    return int(rows.groupby("facet")[column].nunique().max())


def smallest_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each line in a facet the smallest capacity factor, or fewest spare slots: in reading order they ascend."""
    return rows[~rows.duplicated(["facet", "line"]) | rows["line"].isna()]


# ---- speedups and drops over the capacity factor ---------------------------------------------------------------------


def _over_steps(y: str, height: float, **more: object) -> object:
    """A column over capacity factors; of policies without one it is as high as their names need."""

    def inches(rows: pd.DataFrame) -> float:
        return 0.3 * max(3, _most_of(rows, "at")) + 1.1 if are_names(rows["at"]) else height

    words = f"capacity factor {GAMMA} (of policies that have one)"
    return series("at", y, names=True, xlabel=words, height=inches, **more)


def _is_upright(rows: pd.DataFrame) -> bool:
    return are_names(rows["at"])


FIGURES["speedup"] = Figure(
    "Layer speedup over native Megatron-Core",
    [_over_steps("speedup_median", 3.3, whiskers=SPEEDUP, width=2.0), _over_steps("dropped_share", 1.4)],
    "Slowest rank's time of one MoE layer, native over policy, median; below it the top-k pairs that are dropped. "
    "{intervals}",
    where="role in ('policy', 'replication', 'ceiling') and speedup_median.notna()",
    needs="role != 'ceiling'",
    columns=(*_SPEEDUP, *COST),
    beside=_is_upright,
)
FIGURES["dropped"] = Figure(
    "What the policies cost: dropped pairs and score mass kept",
    [_over_steps("dropped_share", 2.3), _over_steps("retained_mass", 2.3)],
    "Top-k pairs that are not computed, and the score mass of what is computed over that of the model's own top-k; "
    "all ranks' tokens together, mean over batches.",
    where="role == 'policy' and status == 'ok' and dropped_share.notna()",
    columns=COST,
    beside=_is_upright,
    timed=False,
)

# ---- phases ----------------------------------------------------------------------------------------------------------


def in_parts(store: Store, rows: pd.DataFrame, columns: Mapping[str, str], part: str) -> pd.DataFrame:
    """A row per case and part (also ``piece``), laid end to end (``begin_ms``, ``time_ms``), and its origin."""
    kept = [name for name in rows if name not in (*columns, "time_ms")]
    parts = rows.melt(kept, list(columns), part, "time_ms", ignore_index=False).sort_index(kind="stable")
    times_ms = parts["time_ms"].fillna(0).astype(float)
    parts["begin_ms"] = times_ms.groupby(level=0).cumsum() - times_ms
    parts[part] = parts["piece"] = parts[part].map(columns)
    return with_origin(store, parts, part)


def with_origin(store: Store, rows: pd.DataFrame, group: str) -> pd.DataFrame:
    """How each row's group of phases came about (``part_origin``): measured, measured elsewhere or modelled."""
    origins = []
    for directory, comparison_id, of in rows[[*COMPARISON, group]].itertuples(index=False):
        comparison = store.by_id[directory, comparison_id]
        origins.append(phase_origin(comparison.run, comparison.facts, of))
    return rows.assign(part_origin=origins).copy()  # of one piece again


def named_bars(rows: pd.DataFrame, *, with_cost: bool = True) -> pd.DataFrame:
    """Name each case's bar (``bar``) and what it costs, so that a short bar is not read as a gift."""
    shares = [(100 * rows[cost]).map("{:.1f} %".format) for cost in COST]
    cost = "\n" + shares[0] + " dropped, " + shares[1] + " kept"
    has_cost = (rows["role"] == "policy") & rows[COST].notna().all(axis=1) & with_cost
    return rows.assign(bar=rows["name"].where(~has_cost, rows["name"] + cost))


def phase_rows(store: Store) -> pd.DataFrame:
    """A row per case and group of phases (``phases``), mean over ranks."""
    rows = layer_rows(store)
    rows = rows[rows["breakdown_layer_ms"].notna()]
    if rows.empty:
        return rows
    parts = in_parts(store, named_bars(rows), {f"{group}_ms": group for group in GROUPS}, "phases")
    return parts[parts.groupby("phases")["time_ms"].transform("max") > 0]


def _height_of_bars(rows: pd.DataFrame) -> float:
    lines = rows["bar"].dropna().str.count("\n").max() + 1
    return 0.85 + (0.12 + 0.17 * lines) * _most_of(rows, "bar")


FIGURES["phases"] = Figure(
    "Where a layer's time goes",
    [bars("phases", "time of one layer (ms)", height=_height_of_bars)],
    "Time by phase, mean over ranks, median over iterations; waiting is for the slowest rank, where ranks meet.",
    phase_rows,
    columns=("phases", "time_ms", *COST),
)


def lane_rows(store: Store, case: str | None = None) -> pd.DataFrame:
    """A row per rank and phase of two cases (``timeline``), each rank a bar."""
    rows = timeline_rows(store, layer_rows(store), case)
    if rows.empty:
        return rows
    groups = rows["phase"].map({name: phase.group for name, phase in PHASES.items()}).fillna(UNACCOUNTED)
    lane = "rank " + rows["rank"].astype("str")
    rows = rows.assign(
        group=pd.Categorical(groups, list(GROUPS)),
        bar=lane.mask(rows["is_critical"], "critical: " + lane),
        begin_ms=rows["begin_us"] / 1e3,
        time_ms=rows["time_us"] / 1e3,
        longest_ms=rows["end_us"].max() / 1e3,
    )
    return with_origin(store, rows, "group")


FIGURES["timeline"] = Figure(
    "Who waits for whom",
    [
        bars(
            "group",
            "time since the layer began (ms)",
            room=0,
            more=[mark_critical],
            height=lambda rows: rows["rank"].nunique() * (0.3 if rows["rank"].nunique() <= 8 else 0.2) + 0.9,
        )
    ],
    "{subtitle}",
    lane_rows,
    columns=("launch", "batch", "iteration", "rank", "is_critical", "phase", "begin_us", "time_us"),
    most=1,
)

# ---- loads -----------------------------------------------------------------------------------------------------------


def load_rows(store: Store) -> pd.DataFrame:
    """A row per case and expert, or rank (``of``, ``number``): ``load_over_mean``, mean over batches and layers."""
    rows = layer_rows(store).query("status == 'ok' and role in ('baseline', 'policy') and policy != 'topk'")
    rows = smallest_steps(rows)
    both = set.intersection(*(set(rows.loc[rows["role"] == role, "facet"]) for role in ("policy", "baseline")))
    rows = rows[rows["facet"].isin(both)].drop(columns="load_over_mean")
    batches = routing(store).merge(rows[CASE], on=CASE)
    parts = []
    for of, column in (("expert", "load_E"), ("rank", "load_R")):
        sizes = batches[column].map(len)
        loads = batches.assign(of=of, load=batches[column], number=sizes.map(range)).explode(["load", "number"])
        loads["load_over_mean"] = loads["load"].astype(float) * sizes / loads["num_topk_pairs"]
        parts.append(loads.groupby([*CASE, "of", "number"], sort=False)["load_over_mean"].mean().reset_index())
    return rows.merge(pd.concat(parts), on=CASE)


FIGURES["load"] = Figure(
    "Load of experts and ranks, before and after",
    [stairs("expert", width=2.0), stairs("rank")],
    "(token, expert) pairs over the mean of the model's own routing, mean over batches, in each case the fullest "
    "first; of each policy the smallest capacity factor.",
    load_rows,
    columns=("of", "number", "load_over_mean"),
    beside=True,
    timed=False,
)

# ---- sweeps ----------------------------------------------------------------------------------------------------------


def swept_rows(store: Store) -> pd.DataFrame:
    """Lines with several capacity factors along the first of the swept keys; none where there are none.

    A facet for each policy but for its capacity factor (``panel``) and the other swept keys. ``step`` is a capacity
    factor, or what has none (perfect balance, replication) by its name. Columns of ``sweeps.along``. Cases that failed
    have a ``status`` but no numbers.
    """
    rows, table = layer_rows(store), comparisons(store)
    if not (keys := swept_keys(table)):
        return rows[:0]
    rows = rows.drop(columns=["swept_value", "at"]).merge(along(keys[0], table), on=COMPARISON)
    is_reference = rows["role"].isin(["replication", "ceiling"])
    rows = rows[(rows["status"] == "ok") & is_reference | (rows["role"] == "policy")]
    step = rows["capacity_factor"].astype(object).mask(rows["role"] == "ceiling", "perfect balance")
    step = step.mask(rows["role"] == "replication", rows["label"])
    rows = rows.assign(step=step, verdict=rows["verdict"].where(rows["speedup_median"].notna()))
    panels = []
    timed = rows[rows["speedup_median"].notna() & rows["capacity_factor"].notna()]
    for (others, line), own in timed.groupby(["other_keys", "line"], sort=False):
        if own["capacity_factor"].nunique() > 1:
            is_of_line = (rows["line"] == line) & rows["step"].isin(own["capacity_factor"])
            here = rows[(rows["other_keys"] == others) & (is_of_line | (rows["role"] != "policy"))]
            heading = line + (f", {others}" if others else "")
            panels.append(here.assign(panel=own["family"].iloc[0], facet=f"{line}/{others}", heading=heading))
    if not panels:
        return rows[:0]
    rows = pd.concat(panels, ignore_index=True)
    return rows.assign(
        other_keys=rows["other_keys"].replace("", None),
        swept_words=rows["swept_value"].map(value_words),
        swept_key_words=key_words(keys[0]),
        limit=max(rows["speedup_median"].map(np.log).abs().max(), np.log(FULL_COLOUR)),
    )


FIGURES["map"] = Figure(
    "Where a policy pays: layer speedup over native Megatron-Core",
    [heat(height=lambda rows: _most_of(rows, "step") * 0.5 + 1.1 + 0.4 * (rows["heading"].str.len().max() // 60))],
    f"In the cells the speedup and the share of top-k pairs that is dropped, by capacity factor {GAMMA}; above them "
    "what has none.",
    swept_rows,
    columns=("panel", "swept_key", "swept_value", "other_keys", *_ENDS, "verdict", "status", *COST),
    limit=8,
)


# ---- decode steps ----------------------------------------------------------------------------------------------------

_OF_TOKENS = {
    *("title", "sizes", "num_tokens", "oversubscribed", "point", "workload", "experts", "permute", "kernel", "fit"),
}
_LEAST_IDLE = 0.05  # of the experts of the fullest rank: a step that activates more is no decode step
_FITS = {
    "fitted line": {"color": INK, "linewidth": 1.2},
    "bound": {"color": MUTED, "linewidth": 1.2, "linestyle": "--"},
}


def activated_rows(store: Store) -> pd.DataFrame:
    """A row per case and batch of decode steps: activated experts of the fullest rank, and its experts' time.

    Comparisons that differ in nothing but the tokens of a step are pooled, so that they lie on one line. Each pool ends
    with a row for the fitted line and one for the bound: an expert's weights at the speed at which this device reads.
    None where every batch activates all experts, or nothing was timed by phase.
    """
    rows = layer_rows(store).query("status == 'ok' and role in ('baseline', 'policy')")
    facts = rows["facts"]
    rows = rows[facts.map(lambda f: "experts" in f and not f.get("device") and f.get("placement") == "contiguous")]
    if rows.empty:
        return rows
    pools = [_pool(row) for row in rows.to_dict("records")]
    rows = rows.assign(facet=pools, line=rows["line"].fillna("native"))
    batches = routing(store)[[*CASE, "batch", "load_E", "activated_fullest_rank"]]
    steps = batches.merge(rows.drop(columns="activated_fullest_rank"), on=CASE)
    is_idle = steps["activated_fullest_rank"] <= (1 - _LEAST_IDLE) * (steps["num_experts"] // steps["num_ranks"])
    steps = steps[is_idle.groupby(steps["facet"]).transform("any")]
    times = timings(store)  # of the slowest rank, where a layer was timed by phase
    times = times[times["quantity"] == "experts"].groupby([*CASE, "batch"])["time_us"].median().reset_index()
    steps = steps.merge(times, on=[*CASE, "batch"])
    if steps.empty:
        return steps
    steps["num_pairs"] = [_pairs(load, size) for load, size in zip(steps["load_E"], steps["num_ranks"], strict=True)]
    found = []
    for _, pool in steps.groupby("facet", sort=False):
        first, ends = pool.iloc[0], dict.fromkeys(f"{pool['num_tokens'].agg(end):,}" for end in ("min", "max"))
        title = f"{first['model']}, EP {first['num_ranks']}, {' to '.join(ends)} tokens a step, "
        pool = pool.assign(title=f"{title}{first['facts']['experts']['ran']} experts")
        found += [pool, *_fits(store, pool)]
    return pd.concat(found, ignore_index=True)


def _pool(row: Mapping[str, Any]) -> str:
    """What comparisons have alike that differ in nothing but the tokens of a step, and what follows from them."""
    facts, point = row["facts"], json.loads(row["point"])
    same = {name: value for name, value in facts.items() if name not in _OF_TOKENS}
    others = {key: value for key, value in point.items() if not key.startswith("workload.")}
    return json.dumps([row["directory"], row["workload"], same, others, facts["experts"]["ran"]], sort_keys=True)


def _pairs(load_E: list[int], num_ranks: int) -> int:
    """Pairs of the rank that activates most experts."""
    load_RL = np.reshape(load_E, (num_ranks, -1))
    return int(load_RL[(load_RL > 0).sum(axis=1).argmax()].sum())


def _fits(store: Store, pool: pd.DataFrame) -> list[pd.DataFrame]:
    """The fitted line and the bound, a row each."""
    about = pool.iloc[:1][[*COMPARISON, "facet", "title", "model", "num_ranks", "origin", "workload", "facts"]]
    found, x, y = [], pool["activated_fullest_rank"].astype(float), pool["time_us"]
    if x.nunique() > 2:
        slope, intercept = np.polyfit(x, y, 1)
        words = f"{intercept:.0f} us + {slope:.2f} us an expert, R2 {np.corrcoef(x, y)[0, 1] ** 2:.3f}"
        found.append(about.assign(label="fitted line", intercept_us=intercept, slope_us_per_expert=slope, words=words))
    machine = conditions(store).merge(pool[COMPARISON].drop_duplicates(), on=COMPARISON)
    if len(machine) and machine["read_gbps"].notna().all():
        facts = about["facts"].iloc[0]
        weights = 3 * facts["hidden_size"] * facts["ffn_hidden_size"] * VALUE_BYTES[facts["dtype"]]
        slope = weights / float(machine["read_gbps"].median()) / 1e3
        found.append(about.assign(label="bound", intercept_us=0.0, slope_us_per_expert=slope, words=None))
    return found


def _draw_fits(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """Straight lines from the intercept at no activated expert."""
    del looks
    for fit in rows[rows["label"].isin(list(_FITS))].to_dict("records"):
        look = _FITS[fit["label"]]
        axes.axline((0, fit["intercept_us"]), slope=fit["slope_us_per_expert"], label=fit["label"], **look)
        axes.text(0.03, 0.96, fit["words"] or "", transform=axes.transAxes, va="top", fontsize="small")
    axes.set_xlim(0)


FIGURES["activated"] = Figure(
    "A decode step takes as long as its activated experts",
    [
        series(
            "activated_fullest_rank",
            "time_us",
            joined=False,
            xlabel="activated experts (fullest rank)",
            ylabel="experts (us)",
            more=[_draw_fits],
            height=4.2,
        )
    ],
    "Phase `experts` of the slowest rank, median over iterations of a batch, over the activated experts of the rank "
    "that activates most; a point is a batch under a case.",
    activated_rows,
    columns=("activated_fullest_rank", "num_pairs", "time_us", "intercept_us", "slope_us_per_expert"),
)

# ---- costs -----------------------------------------------------------------------------------------------------------

_DROPS_ALL = 0.95  # of top-k pairs: a policy that drops more computes nothing that a speedup could be of
_FRONTS = {"on_front_of_retained_mass": "retained_mass", "on_front_of_dropped_share": "dropped_share"}


def pareto_rows(store: Store) -> pd.DataFrame:
    """Policies and replication with a speedup, whether each is on a front, and where it stands below the frontier.

    A case is on the *front* when no other of its comparison is at least as fast and at least as faithful, and better in
    one of the two. Native competes. Fronts are of policies that drop or reroute; replication pays with memory. What
    drops all is ``off_scale``, and stands in the note.
    """
    everyone = layer_rows(store)
    rows = everyone.query("role in ('policy', 'replication') and speedup_median.notna() and retained_mass.notna()")
    if rows.empty:
        return rows
    rows = rows.assign(**dict.fromkeys(_FRONTS, False))
    for column, cost in _FRONTS.items():
        for _, own in rows[rows["role"] == "policy"].groupby("facet"):
            rows.loc[own.index, column] = on_front(with_native(own, axis_of(cost)))[own.index]
    drops_all = rows["dropped_share"] > _DROPS_ALL
    drops_all &= ~drops_all.groupby(rows["facet"]).transform("all")
    speeds, shares = rows["speedup_median"].map("{:.2f}".format), rows["dropped_share"].map("{:.0%}".format)
    note = "off the scale: " + rows["name"] + ", speedup " + speeds + " at " + shares + " dropped"
    natives = everyone[(everyone["role"] == "baseline") & (everyone["status"] == "ok")].drop_duplicates("facet")
    relief = rows["facet"].map(natives.set_index("facet")["fullest_rank"]) / rows["fullest_rank"]
    most = routing(store)
    keys = pd.MultiIndex.from_frame(rows[CASE])
    kept = most.groupby(CASE)["kept_by_load"].mean().reindex(keys).to_numpy().astype(float)
    kept_share = kept - rows["below_frontier"]
    return rows.assign(
        off_scale=drops_all,
        note=note.where(drops_all),
        kept_share=kept_share,
        relief=relief.where(kept_share.notna() & (rows["role"] == "policy")),
        curve=rows["facet"].map(_curves(most)),
    )


def _curves(most: pd.DataFrame) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By facet: how much less the fullest rank computes than native's, and the share of mass that is kept at most."""
    from moe_ep_bench.workload.frontier import joint  # it imports torch

    found = {}
    natives = most[(most["role"] == "baseline") & most["curve_load"].notna()]
    for (directory, comparison_id), own in natives.groupby(COMPARISON):
        curves = [(list(load), list(kept)) for load, kept in zip(own["curve_load"], own["curve_kept"], strict=True)]
        load_N, kept_N = (values.numpy() for values in joint(curves))
        found[f"{directory}/{comparison_id}"] = load_N[-1] / load_N[load_N > 0], kept_N[load_N > 0]
    return found


def _draw_frontier(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """The most mass that dropping alone can keep (``curve``), within the limits of the points."""
    del looks
    limits = axes.get_xlim(), axes.get_ylim()
    for relief_N, kept_N in rows["curve"].dropna().head(1):
        words = "frontier: none that only drops is above; rerouting may be"
        axes.plot(100 * kept_N, relief_N, color=INK, linewidth=1.4, zorder=2, label=words)
    axes.set(xlim=limits[0], ylim=limits[1])


def _height_of_costs(rows: pd.DataFrame) -> float:
    return 4.0 if rows["facet"].nunique() == 1 else 3.2


_UNSURE = ("verdict not in ('faster', 'slower')", "neither faster nor slower for sure")
_COSTS = partial(series, only="not off_scale", height=_height_of_costs, shares=False)
_SPEED = partial(_COSTS, y="speedup_median", whiskers=SPEEDUP, hollow=_UNSURE)
FIGURES["pareto"] = Figure(
    "What speed costs",
    [
        _SPEED(cost, joined="is_joined", reverse=cost == "retained_mass", more=[front(cost, column)])
        for column, cost in _FRONTS.items()
    ]
    + [_COSTS("kept_share", "relief", joined=False, reverse=True, more=[_draw_frontier], needs="relief.notna()")],
    "Speedup over native against what a policy keeps and drops. {intervals} A line joins a policy's capacity factors.",
    lambda store: pareto_rows(store).assign(is_joined=lambda rows: rows["capacity_factor"].notna()),
    columns=(*_SPEEDUP, "verdict", *COST, *_FRONTS, "relief", "kept_share"),
    beside=True,
)


def paid_rows(store: Store) -> pd.DataFrame:
    """``pareto_rows`` of comparisons where something balances without loss, with what each is paid with, or is free."""
    rows = pareto_rows(store)
    if rows.empty:
        return rows
    rows = rows[rows.groupby("facet")["role"].transform(lambda roles: "replication" in set(roles))]
    spent = {"lost_mass": (1 - rows["retained_mass"]).clip(lower=0)}
    spent |= {name: rows[name].fillna(0) for name in ("extra_gib_per_rank", "moved_gib")}
    is_free = ~pd.concat(spent, axis=1).gt(0).any(axis=1)
    return rows.assign(**spent, is_free=is_free, is_joined=rows["role"] == "policy")


FIGURES["paid"] = Figure(
    "What speed is paid with",
    [
        _SPEED(paid, joined="is_joined", only=f"not off_scale and ({paid} > 0{free})", needs=f"{paid} > 0")
        for paid, free in (("lost_mass", " or is_free"), ("extra_gib_per_rank", ""), ("moved_gib", ""))
    ],
    "Speedup over native against what it is paid with: score mass, memory of replicas in all layers, weights that move "
    "in a batch. What pays with none of these stands at no mass. {intervals}",
    paid_rows,
    columns=(*_SPEEDUP, "verdict", "lost_mass", "extra_gib_per_rank", "moved_gib"),
    beside=True,
)

# ---- whole models ----------------------------------------------------------------------------------------------------

_ESTIMATES = {
    "end to end": {"color": INK, "marker": "s", "markersize": 5},
    "MoE layers alone": {"color": "#0072B2", "marker": "o", "markersize": 5},
    "by Amdahl": {"color": "#D55E00", "marker": "|", "markersize": 10, "markeredgewidth": 1.8},
}


def whole_rows(store: Store) -> pd.DataFrame:
    """A row per mark (``shows``): speedups of a pass, of its MoE layers and by Amdahl; its parts; extrapolations."""
    rows = case_rows(store).query("scope == 'model' and role != 'noise' and moe_ms.notna()")
    having = rows.loc[(rows["role"] == "policy") & rows["speedup_median"].notna(), "facet"]
    rows = rows[rows["facet"].isin(having)]
    if rows.empty:
        return rows
    rows = named_bars(rows, with_cost=rows["facet"].nunique() == 1)
    most = rows.groupby("facet")["most_by_amdahl"].transform("first")
    bound = most.map(lambda most: "" if np.isnan(most) else f"; no pass gains more than {most:.3f} (Amdahl)")
    rows = rows.assign(heading=rows["title"] + bound)
    ends = ["speedup_median", *SPEEDUP]
    blank = rows.assign(**dict.fromkeys([*ends, "speedup_is_interval"], np.nan))
    of_layers = {"time_ms": rows["moe_ms"], **{end: rows[f"moe_{end}"] for end in (*ends, "speedup_is_interval")}}
    built = "{:.0f} of {:.0f} layers were built and timed; hatched: extrapolated from the mean MoE layer"
    all_layers = {
        "time_ms": rows["all_layers_ms_extrapolated"],
        "speedup_median": rows["speedup_extrapolated"],
        "gain": rows["speedup_extrapolated"].where(rows["role"] != "baseline"),
        "begin_ms": 0.0,
        "piece": "extrapolated",
        "part_origin": "measured",
        "layers_words": rows["of_layers"].map("all {:.0f} layers, extrapolated (ms)".format),
        "note": [built.format(*pair) for pair in rows[["num_layers", "of_layers"]].itertuples(index=False)],
        "origin": "extrapolated",
    }
    bounds = blank.assign(speedup_median=most, role="bound", origin="computed", label="any policy", bar=None)
    bounds = bounds.assign(**dict.fromkeys(COST, np.nan)).drop_duplicates("facet")
    others = rows["role"] != "baseline"
    parts = {
        "part": in_parts(store, blank, {f"mean_rank_{part}_ms": part for part in PASS_PARTS}, "part"),
        "end to end": rows[rows["speedup_median"].notna()],
        "MoE layers alone": rows.assign(**of_layers)[others & rows["moe_speedup_median"].notna()],
        "by Amdahl": blank.assign(speedup_median=rows["by_amdahl"], origin="computed")[
            others & rows["by_amdahl"].notna()
        ],
        "all layers": blank.assign(**all_layers)[rows["all_layers_ms_extrapolated"].notna()],
        "most by Amdahl": bounds[bounds["speedup_median"].notna()],
    }
    found = [part.assign(shows=shows, line=shows, legend=shows) for shows, part in parts.items() if len(part)]
    return pd.concat(found, ignore_index=True)


def _height_of_whole(rows: pd.DataFrame) -> float:
    return 0.9 + (0.46 if rows["bar"].str.contains("\n").any() else 0.3) * _most_of(rows, "bar")


FIGURES["whole"] = Figure(
    "What faster MoE layers come to in a whole model",
    [
        series("bar", "speedup_median", names=True, whiskers=SPEEDUP, height=_height_of_whole),
        bars("piece", "time of a pass (ms)", only="shows == 'part'", width=1.4),
        bars("piece", "layers_words", only="shows == 'all layers'", room=2.0, width=1.1, needs="shows == 'all layers'"),
    ],
    "Left: speedup of a pass from end to end, of its MoE layers alone, and where Amdahl's law puts the pass; right: a "
    "pass in parts, mean over ranks. {intervals}",
    whole_rows,
    columns=("shows", "part", "time_ms", *_SPEEDUP, *COST),
    beside=True,
    most=1,
    limit=2,
    looks=lambda names: _ESTIMATES,
)
