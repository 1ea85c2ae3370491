"""The rows that figures show: the frame of cases as panels have it, and what single figures make of it.

Each function takes a store, gives tidy rows with a mark in each, or None where there is nothing to show, and keeps the
frame's column names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, comparisons, conditions, frontiers, routing, samples
from moe_ep_bench.analysis.marks import front, full_colour
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import GAMMA
from moe_ep_bench.analysis.sweeps import along, key_words, scalings, swept_keys, value_words
from moe_ep_bench.analysis.timeline import DEFAULT, Choice, timeline_rows
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.cost_model.tables import MEASURED_ELSEWHERE
from moe_ep_bench.schema import PHASES, UNACCOUNTED, phase_groups

COST = ["dropped_share", "retained_mass"]
# Columns that figures read whether a directory has them or not.
_NUMBERS = [
    *("speedup_median", "speedup_low", "speedup_high", "floor_low", "floor_high", "median_ms", "breakdown_layer_ms"),
    *(*COST, "fullest_rank", "below_frontier", "moe_ms", "all_layers_ms_extrapolated", "waiting_ms"),
]
_OTHERS = [
    "scale",
    "dtype",
    "ran_on",
    "links_words",
    "oversubscribed",
    "world_size",
    "num_replicas",
    "speedup_is_interval",
]
_OTHERS += [
    "verdict",
    "of_layers",
    "num_layers",
    "most_by_amdahl",
    "by_amdahl",
    "speedup_extrapolated",
    "moe_speedup_median",
]
_DROPS_ALL = 0.95  # of top-k pairs: a policy that drops more computes nothing that a speedup could be of
_LEAST_IDLE = 0.05  # of the experts of the fullest rank: a step that activates more is no decode step
# What a layer, and a pass of a whole model, consists of, in the order in which bars stack it.
GROUPS = [*phase_groups("layer"), UNACCOUNTED]
PARTS = [
    "attention",
    "rest",
    "policy",
    "gate",
    "shared",
    *(group for group in GROUPS if group not in ("gate", "shared")),
]


@lru_cache(maxsize=2)
def case_rows(store: Store) -> pd.DataFrame:
    """``cases`` as figures show them.

    More columns: ``facet`` and ``title``, of the panel; ``line``, what a line joins: a policy but for its capacity
    factor, a way of replication but for its spare slots; ``name``, of one case; ``step``, a capacity factor, or spare
    slots in words; ``at``, the step, else the line; ``facts``. The ceiling, whose scores are not the model's, has no
    costs.
    """
    rows = cases(store).merge(comparisons(store)[[*COMPARISON, "facts"]], on=COMPARISON)
    is_replica, is_ceiling = rows["role"] == "replication", rows["role"] == "ceiling"
    spare = rows["policy_params"].map(lambda params: json.loads(params or "{}").get("spare_per_rank"))
    line = (
        rows["family_label"].astype(object).where(~is_replica, rows["label"].str.partition(",")[0]).where(~is_ceiling)
    )
    step = rows["capacity_factor"].astype(object).mask(is_replica, spare.map("{:.0f} spare".format, "ignore"))
    factors = rows["capacity_factor"].astype(float)
    factor = factors.map(lambda g: "" if np.isnan(g) else f", {GAMMA} {g:g}").astype("str")
    in_several = rows.groupby("title")["directory"].transform("nunique") > 1
    absent = dict.fromkeys(name for name in (*_NUMBERS, *_OTHERS) if name not in rows)
    rows = rows.assign(**dict.fromkeys(absent)).astype(dict.fromkeys(_NUMBERS, float)).copy()  # of one piece again
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


def smallest_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each line in a facet the smallest capacity factor, or fewest spare slots: in reading order they ascend."""
    return rows[~rows.duplicated(["facet", "line"]) | rows["line"].isna()]


def speedup_rows(store: Store) -> pd.DataFrame:
    """Cases with a speedup, of comparisons in which a policy or replication has one."""
    rows = layer_rows(store).query("role in ('policy', 'replication', 'ceiling') and speedup_median.notna()")
    return rows[rows["facet"].isin(rows.loc[rows["role"] != "ceiling", "facet"])]


# ---- phases --------------------------------------------------------------------------------------------------------


def in_parts(rows: pd.DataFrame, columns: Mapping[str, str], part: str) -> pd.DataFrame:
    """A row per case and part, with its ``time_ms`` and how that came about (``part_origin``)."""
    kept = [name for name in rows if name not in (*columns, "time_ms")]
    melted = rows.melt(kept, list(columns), part, "time_ms", ignore_index=False).sort_index(kind="stable")
    melted[part] = melted[part].map(columns)
    return with_origin(melted, part)


def with_origin(rows: pd.DataFrame, group: str) -> pd.DataFrame:
    """How each row's group of phases came about: measured, measured elsewhere or modelled.

    Of a device that is not here all is modelled but what a table holds; of emulated ranks what moves between them.
    """
    origins = []
    for of, facts, mode in rows[[group, "facts", "mode"]].itertuples(index=False):
        words = facts.get({"comm": "links", "experts": "device"}.get(of, "")) or ""
        modelled = facts.get("device") is not None or (mode == "emulated" and of == "comm")
        is_elsewhere = f"{MEASURED_ELSEWHERE} (" in words
        origins.append(MEASURED_ELSEWHERE if is_elsewhere else "modelled" if modelled else "measured")
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
    parts = in_parts(named_bars(rows), {f"{group}_ms": group for group in GROUPS}, "phases")
    return parts[parts.groupby("phases")["time_ms"].transform("max") > 0]


def chosen_timeline(store: Store, choice: Choice = DEFAULT) -> pd.DataFrame | None:
    """A row per rank and phase of two cases (``timeline``)."""
    rows = timeline_rows(store, layer_rows(store), choice)
    if rows is None:
        return None
    groups = rows["phase"].map({name: phase.group for name, phase in PHASES.items()}).fillna(UNACCOUNTED)
    return with_origin(rows.assign(group=groups, longest_us=rows["end_us"].max()), "group")


# ---- loads, decode steps -------------------------------------------------------------------------------------------


def load_rows(store: Store) -> pd.DataFrame:
    """A row per case and expert, or rank (``of``, ``number``): ``load_over_mean``, mean over batches and layers."""
    rows = smallest_steps(
        layer_rows(store).query("status == 'ok' and role in ('baseline', 'policy') and policy != 'topk'")
    )
    both = set.intersection(*(set(rows.loc[rows["role"] == role, "facet"]) for role in ("policy", "baseline")))
    rows = rows[rows["facet"].isin(both)].set_index(CASE, drop=False)
    lists = routing(store).merge(rows[CASE].reset_index(drop=True), on=CASE)
    parts = []
    for of, column in (("expert", "load_E"), ("rank", "load_R")):
        loads = {
            key: (np.stack(own[column].to_list()) / own[["num_topk_pairs"]].to_numpy()).mean(axis=0)
            for key, own in lists.groupby(CASE)
        }
        loads = pd.Series([loads[key] * len(loads[key]) for key in rows.index], rows.index, dtype=object)
        part = rows.assign(of=of, load_over_mean=loads).explode("load_over_mean")
        parts.append(part.assign(number=part.groupby(level=CASE).cumcount().to_numpy()))
    return pd.concat(parts, ignore_index=True)


def activated_rows(store: Store) -> pd.DataFrame | None:
    """A row per case and batch of decode steps: activated experts of the fullest rank, and its experts' time.

    Comparisons of one layer on one machine are pooled, so that a sweep over the tokens of a step lies on one line. Each
    pool ends with a row for the fitted line and one for the bound: an expert's weights at the speed at which this
    device reads. None where every batch activates all experts, or nothing was timed by phase.
    """
    rows = layer_rows(store).query("status == 'ok' and role in ('baseline', 'policy')")
    rows = rows[
        rows["facts"].map(lambda f: "experts" in f and not f.get("device") and f.get("placement") == "contiguous")
    ]
    if rows.empty:
        return None
    facts = rows["facts"].map(lambda f: json.dumps([*(f[name] for name in _LAYER), f["experts"]["ran"]]))
    rows = rows.assign(facet=rows["directory"] + facts, line=rows["line"].fillna("native"))
    steps = routing(store)[[*CASE, "batch", "load_E", "activated_fullest_rank"]].merge(
        rows, on=CASE, suffixes=("", "_mean")
    )
    held = steps["num_experts"] // steps["num_ranks"]
    idle = (steps["activated_fullest_rank"] <= (1 - _LEAST_IDLE) * held).groupby(steps["facet"]).transform("any")
    steps = steps[idle]
    times = samples(store, rows[rows["facet"].isin(steps["facet"])]) if len(steps) else steps
    times = times[(times["kind"] == "breakdown") & (times["phase"] == "experts")] if len(times) else times
    if times.empty:
        return None
    slowest = times.groupby([*CASE, "batch", "launch", "iteration"])["time_us"].max()
    slowest = slowest.groupby([*CASE, "batch"]).median().reset_index()
    steps = steps.merge(slowest, on=[*CASE, "batch"])
    steps["num_pairs"] = [_pairs(load, size) for load, size in zip(steps["load_E"], steps["num_ranks"], strict=True)]
    found = []
    for _, pool in steps.groupby("facet", sort=False):
        ends = dict.fromkeys(f"{end:,}" for end in (pool["num_tokens"].min(), pool["num_tokens"].max()))
        first = pool.iloc[0]
        title = f"{first['model']}, EP {first['num_ranks']}, {' to '.join(ends)} tokens a step, "
        pool = pool.assign(title=f"{title}{first['facts']['experts']['ran']} experts")
        found += [pool, *_fits(store, pool)]
    return pd.concat(found, ignore_index=True)


_LAYER = (
    "model",
    "scale",
    "hidden_size",
    "ffn_hidden_size",
    "num_ranks",
    "dtype",
    "dispatcher",
    "cuda_graph",
    "flush_l2",
)


def _pairs(load_E: list[int], num_ranks: int) -> int:
    """Pairs of the rank that activates most experts."""
    load_RL = np.reshape(load_E, (num_ranks, -1))
    return int(load_RL[(load_RL > 0).sum(axis=1).argmax()].sum())


def _fits(store: Store, pool: pd.DataFrame) -> list[pd.DataFrame]:
    """The fitted line and the bound, a row each."""
    about = {
        name: pool[name].iloc[0]
        for name in (*COMPARISON, "facet", "title", "model", "num_ranks", "origin", "workload", "facts")
    }
    rows, x, y = [], pool["activated_fullest_rank"].astype(float), pool["time_us"]
    if x.nunique() > 2:
        slope, intercept = np.polyfit(x, y, 1)
        r2 = np.corrcoef(x, y)[0, 1] ** 2
        words = f"{intercept:.0f} us + {slope:.2f} us an expert, R2 {r2:.3f}"
        rows.append({"label": "fitted line", "intercept_us": intercept, "slope_us_per_expert": slope, "words": words})
    machine = conditions(store)
    machine = machine.merge(pool[COMPARISON].drop_duplicates(), on=COMPARISON) if len(machine) else machine
    if len(machine) and machine["read_gbps"].notna().all():
        facts = about["facts"]
        weights = 3 * facts["hidden_size"] * facts["ffn_hidden_size"] * VALUE_BYTES[facts["dtype"]]
        slope = weights / float(machine["read_gbps"].median()) / 1e3
        rows.append({"label": "bound", "intercept_us": 0.0, "slope_us_per_expert": slope})
    return [pd.DataFrame([{**about, **row, "line": row["label"]}]) for row in rows]


# ---- sweeps --------------------------------------------------------------------------------------------------------


def swept_rows(store: Store) -> pd.DataFrame | None:
    """Lines with several capacity factors along the first of the swept keys; None where there are none.

    A facet for each policy but for its capacity factor (``panel``) and the other swept keys. ``step`` is a capacity
    factor, or what has none (perfect balance, replication) by its name; ``line`` the same in words. Columns of
    ``sweeps.along``. Cases that failed have a ``status`` but no numbers.
    """
    rows, table = layer_rows(store), comparisons(store)
    if not (keys := swept_keys(table)):
        return None
    rows = rows.drop(columns=["swept_value", "at"]).merge(along(keys[0], table), on=COMPARISON)
    rows = rows[(rows["status"] == "ok") & rows["role"].isin(["replication", "ceiling"]) | (rows["role"] == "policy")]
    rows["verdict"] = rows["verdict"].where(rows["speedup_median"].notna())
    panels = []
    timed = rows[rows["speedup_median"].notna() & rows["capacity_factor"].notna()]
    for (others, line), own in timed.groupby(["other_keys", "line"], sort=False):
        if own["capacity_factor"].nunique() > 1:
            here = rows[(rows["other_keys"] == others) & ((rows["line"] == line) | (rows["role"] != "policy"))]
            step = here["capacity_factor"].astype(object).mask(here["role"] == "ceiling", "perfect balance")
            step = step.mask(here["role"] == "replication", here["label"])
            heading = line + (f", {others}" if others else "")
            panel = here.assign(step=step, panel=own["family"].iloc[0], facet=f"{line}/{others}", heading=heading)
            panels.append(panel[panel["step"].isin([*own["capacity_factor"], *step[here["role"] != "policy"]])])
    if not panels:
        return None
    rows = pd.concat(panels, ignore_index=True)
    are_numbers = rows["swept_value"].map(lambda value: isinstance(value, float)).all()
    return rows.assign(
        other_keys=rows["other_keys"].replace("", None),
        swept_words=rows["swept_value"].map(value_words),
        swept_key_words=key_words(keys[0]),
        value=rows["swept_value"] if are_numbers else rows["swept_value"].map(value_words),
        limit=full_colour(rows["speedup_median"]),
        line=rows["step"].map(lambda step: f"{GAMMA} = {step:g}" if isinstance(step, float) else step),
    )


def scaling_rows(store: Store) -> pd.DataFrame | None:
    """Native, and each line's smallest step, of every set of comparisons that differ in one ``quantity``."""
    rows = layer_rows(store).query("status == 'ok' and median_ms.notna()")
    native = rows[rows["role"] == "baseline"]
    table = comparisons(store).merge(native[COMPARISON], on=COMPARISON)
    sets = scalings(table) if len(table) else table
    if sets.empty:
        return None
    is_line = rows["role"].isin(["policy", "replication"]) & rows["speedup_median"].notna()
    rows = smallest_steps(rows[is_line | (rows["role"] == "baseline")])
    rows = rows.merge(sets, on=COMPARISON)
    order = sets.groupby(["quantity", "held"], sort=False).ngroup()
    rows = rows.merge(
        sets.assign(order=order)[[*COMPARISON, "quantity", "held", "order"]], on=[*COMPARISON, "quantity", "held"]
    )
    rows = rows.sort_values(["order", "value"], kind="stable")
    line = rows["line"].mask(rows["role"] == "baseline", "native")
    return rows.assign(facet=rows["quantity"] + "/" + rows["held"], heading=rows["held"], line=line)


# ---- costs ---------------------------------------------------------------------------------------------------------


def pareto_rows(store: Store) -> pd.DataFrame:
    """Policies and replication with a speedup, whether each is on a front, and where it stands below the frontier.

    A case is on the *front* when no other of its comparison is at least as fast and at least as faithful, and better in
    one of the two. Native competes. Fronts are of policies that drop or reroute; replication pays with memory.
    """
    rows = speedup_rows(store).query("role != 'ceiling' and retained_mass.notna()").copy()
    if rows.empty:
        return rows
    for column, cost, sign in (
        ("on_front_of_retained_mass", "retained_mass", 1),
        ("on_front_of_dropped_share", "dropped_share", -1),
    ):
        rows[column] = False
        for _, own in rows[rows["role"] == "policy"].groupby("facet"):
            native = 1.0, 1.0 if sign > 0 else 0.0
            kept = front([*zip(own["speedup_median"], sign * own[cost], strict=True), native])
            rows.loc[own.index[[place for place in kept if place < len(own)]], column] = True
    away = rows["dropped_share"] > _DROPS_ALL
    rows["off_scale"] = away & ~away.groupby(rows["facet"]).transform("all")
    note = f"at the right edge, off the scale: what drops more than {100 * _DROPS_ALL:.0f} % of the pairs"
    rows["note"] = pd.Series(note, rows.index, dtype=object).where(rows["off_scale"])
    most = frontiers(store)
    everyone = layer_rows(store)
    native = everyone[(everyone["role"] == "baseline") & (everyone["status"] == "ok")].set_index("facet")[
        "fullest_rank"
    ]
    rows["relief"] = rows["facet"].map(native[~native.index.duplicated()]) / rows["fullest_rank"]
    kept = most.groupby(CASE)["kept_by_load"].mean() if len(most) else pd.Series(dtype=float)
    keys = pd.MultiIndex.from_frame(rows[CASE])
    rows["kept_share"] = (kept.reindex(keys).to_numpy() if len(kept) else np.nan) - rows["below_frontier"]
    rows["relief"] = rows["relief"].where(rows["kept_share"].notna() & (rows["role"] == "policy"))
    rows["curve"] = rows["facet"].map(_curves(store, most)) if len(most) else None
    return rows


def _curves(store: Store, most: pd.DataFrame) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By facet: how much less the fullest rank computes than native's, and the share of mass that is kept at most."""
    from moe_ep_bench.workload.frontier import joint  # it imports torch

    native = cases(store).query("role == 'baseline' and status == 'ok'")[CASE]
    found = {}
    for (directory, comparison_id), own in most.merge(native, on=CASE).groupby(COMPARISON):
        curves = [(list(load), list(kept)) for load, kept in zip(own["curve_load"], own["curve_kept"], strict=True)]
        load_N, kept_N = (values.numpy() for values in joint(curves))
        found[f"{directory}/{comparison_id}"] = load_N[-1] / load_N[load_N > 0], kept_N[load_N > 0]
    return found


# ---- whole models --------------------------------------------------------------------------------------------------


def whole_rows(store: Store) -> pd.DataFrame | None:
    """A row per mark (``shows``): speedups of a pass, of its MoE layers and by Amdahl; its parts; extrapolations."""
    rows = case_rows(store).query("scope == 'model' and role != 'noise' and moe_ms.notna()")
    having = rows.loc[(rows["role"] == "policy") & rows["speedup_median"].notna(), "facet"]
    rows = rows[rows["facet"].isin(having)]
    if rows.empty:
        return None
    rows = named_bars(rows, with_cost=rows["facet"].nunique() == 1)
    ends = ["speedup_median", "speedup_low", "speedup_high"]
    blank = rows.assign(**dict.fromkeys([*ends, "speedup_is_interval"], np.nan))
    of_layers = rows.assign(**{end: rows[f"moe_{end}"].astype(float) for end in ends}, time_ms=rows["moe_ms"])
    of_layers["speedup_is_interval"] = rows["moe_speedup_is_interval"]
    bounds = blank.assign(**dict.fromkeys(COST, np.nan))[rows["most_by_amdahl"].notna()].drop_duplicates("facet")
    others = rows["role"] != "baseline"
    most = rows["most_by_amdahl"].map(
        "however fast its MoE layers, no pass gains more than {:.3f} (Amdahl)".format, "ignore"
    )
    built = "{:.0f} of {:.0f} layers were built and timed; hatched: extrapolated from the mean MoE layer"
    built = [built.format(*pair) for pair in rows[["num_layers", "of_layers"]].itertuples(index=False)]
    all_layers = {"time_ms": rows["all_layers_ms_extrapolated"], "speedup_median": rows["speedup_extrapolated"]}
    parts = [
        in_parts(blank.assign(shows="part"), {f"mean_rank_{part}_ms": part for part in PARTS}, "part"),
        rows.assign(note=most)[rows["speedup_median"].notna()].assign(shows="end to end"),
        of_layers[others & rows["moe_speedup_median"].notna()].assign(shows="MoE layers alone"),
        blank.assign(speedup_median=rows["by_amdahl"].astype(float), shows="by Amdahl", origin="computed")[
            others & rows["by_amdahl"].notna()
        ],
        blank.assign(**all_layers, note=built, shows="all layers", origin="extrapolated")[
            rows["all_layers_ms_extrapolated"].notna()
        ],
        bounds.assign(
            speedup_median=bounds["most_by_amdahl"].astype(float),
            shows="most by Amdahl",
            role="bound",
            origin="computed",
            label="any policy",
            bar=None,
        ),
    ]
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


# ---- what answers cost ---------------------------------------------------------------------------------------------


def _costs(quality: Any) -> pd.DataFrame:
    """Cases that all checkpoints of a group have: means over them and the interval over them; of one its own."""
    from moe_ep_bench.analysis.quality import half_interval, text_costs

    costs = text_costs(quality).query("role != 'baseline'")
    by_case = costs.groupby(["group", "label", "phase"], sort=False)
    rows = by_case[["comparison", "checkpoints", "policy", "policy_params", "cross_entropy_added_half"]].first()
    rows = rows.join(by_case[["activated_experts", "fullest_rank", "cross_entropy_added"]].mean())
    over_them = by_case["cross_entropy_added"].agg(half_interval)
    rows["cross_entropy_added_half"] = rows["cross_entropy_added_half"].where(rows["checkpoints"] == 1, over_them)
    rows = rows[by_case.size() == rows["checkpoints"]].reset_index().rename(columns={"comparison": "title"})
    step = rows["policy_params"].map(json.loads).str.get("capacity_factor").astype(float)
    family = rows["label"].str.replace(r" capacity_factor=\S+", "", regex=True)
    return rows.assign(capacity_factor=step, line=family, facet=rows["group"], how=None, workload=None, origin=None)


def quality_capacity_rows(quality: Any) -> pd.DataFrame:
    """Cases of policies with several capacity factors (arXiv 2503.05066, Figure 12, has accuracy there)."""
    rows = _costs(quality).dropna(subset="capacity_factor")
    rows = rows[rows.groupby(["facet", "line"])["capacity_factor"].transform("size") > 1]
    return rows.assign(quantity=f"capacity factor {GAMMA}", value=rows["capacity_factor"], on_line=True)


def quality_front_rows(quality: Any) -> pd.DataFrame:
    """Cases over what a step or a batch waits for: activated experts in decode, in prefill pairs of the fullest rank.

    ``on_line`` are the cases of a policy that none of its others beats in both (arXiv 2511.02237, Figures 2, 3 and 8).
    """
    rows = _costs(quality).query("policy != 'topk'").sort_values(["facet", "phase"], kind="stable")
    in_decode = rows["phase"] == "decode"
    words = {
        True: "activated experts of a step, mean over layers",
        False: "pairs of the fullest rank over native's mean",
    }
    rows = rows.assign(
        facet=rows["facet"].astype(str) + rows["phase"],
        title=rows["phase"] + ": " + rows["title"],
        line=rows["policy"],
        quantity=in_decode.map(words),
        value=rows["activated_experts"].where(in_decode, rows["fullest_rank"]),
    )
    ascending = rows.sort_values(["value", "cross_entropy_added"]).groupby(["facet", "line"])["cross_entropy_added"]
    best_before = ascending.transform(lambda cost: cost.cummin().shift(fill_value=np.inf))
    return rows.assign(on_line=rows["cross_entropy_added"] < best_before.reindex(rows.index))


# ---- any column against any other ------------------------------------------------------------------------------------

_PERCENTILE = re.compile(r"(?P<column>\w+)_p(?P<percent>\d\d?)$")


def wide_rows(store: Store, columns: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The frame that has some columns: cases, or where a column is of batches and layers alone, of these.

    Parameters of policies (``c``, ``k0``, ``budget``, ...) and swept keys by their last words are columns too. So is
    ``COLUMN_p95`` of a column of batches: a percentile over batches, of means over layers.

    Returns:
        The rows, and the names of all columns that can be asked for.
    """
    rows = layer_rows(store) if (case_rows(store)["scope"] == "layer").any() else case_rows(store)
    for column in ("policy_params", "point"):
        known = pd.DataFrame(rows[column].map(lambda text: json.loads(text or "{}")).to_list(), rows.index)
        known = known.rename(columns=lambda name: name.rpartition(".")[2])
        rows = rows.join(known[[name for name in known if name not in rows]])
    batches = routing(store)
    of_batches = [name for name in batches if name not in CASE and batches[name].map(np.isscalar).all()]
    percentiles = {name: found for name in columns if name not in rows and (found := _PERCENTILE.match(name))}
    for name, found in percentiles.items():
        if found["column"] in of_batches:
            by_batch = batches.groupby([*CASE, "batch"])[found["column"]].mean()
            quantile = by_batch.groupby(CASE).quantile(int(found["percent"]) / 100).rename(name)
            rows = rows.merge(quantile, left_on=CASE, right_index=True, how="left")
    if any(name in of_batches and name not in rows for name in columns):
        rows = rows.drop(columns=[name for name in of_batches if name in rows])
        rows = rows.merge(batches[[*CASE, *of_batches]], on=CASE)
    known = [name for name in rows if name not in _HIDDEN and rows[name].notna().any()]
    return rows, sorted({*known, *of_batches})


_HIDDEN = {
    "facts",
    "policy_params",
    "point",
    "reason",
    "step",
    "at",
    "facet",
    "how",
    "ran_on",
    "links_words",
    "workload_words",
}
