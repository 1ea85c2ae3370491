"""The figures, each a row of a table, beside what single figures make of the frame.

A function of rows takes a store and gives tidy rows with a mark in each, none where there is nothing to show. A figure
is added by a row; ``drawing.lines`` is a figure of any column against any other.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from moe_ep_bench.analysis.cases import CASE, COMPARISON, comparisons, routing
from moe_ep_bench.analysis.drawing import COST, Figure, case_rows
from moe_ep_bench.analysis.marks import FULL_COLOUR, NAMES, are_names, axis_of, bars, heat, places_of, series
from moe_ep_bench.analysis.origins import phase_origin
from moe_ep_bench.analysis.papers import METRICS, Claims, basis_words
from moe_ep_bench.analysis.quality import Quality, half_interval, text_costs
from moe_ep_bench.analysis.reduce import GROUPS, PASS_PARTS
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import GAMMA, INK, MUTED, NOISE_FILL, folded, rcParams
from moe_ep_bench.analysis.sweeps import key_words, swept, value_words
from moe_ep_bench.analysis.timeline import mark_critical, timeline_rows
from moe_ep_bench.papers.claims import NATIVE_METRICS, OWN_METRICS

_SPEEDUP = (*(f"speedup_{end}" for end in ("median", "low", "high", "is_interval")), "floor_low", "floor_high")


def _most_of(rows: pd.DataFrame, column: str) -> int:
    """Of the facet that has most."""
    return int(rows.groupby("facet")[column].nunique().max())


# ---- speedups and drops over the capacity factor ---------------------------------------------------------------------


def _over_steps(y: str, height: float, **more: object) -> object:
    """A column over capacity factors; of policies without one it is as high as their names need."""

    def inches(rows: pd.DataFrame) -> float:
        return 0.3 * max(3, _most_of(rows, "at")) + 1.1 if are_names(rows["at"]) else height

    words = f"capacity factor {GAMMA} (of policies that have one)"
    return series("at", y, names=True, xlabel=words, height=inches, **more)


def _is_upright(rows: pd.DataFrame) -> bool:
    return are_names(rows["at"])


# ---- phases ----------------------------------------------------------------------------------------------------------


def with_origin(store: Store, rows: pd.DataFrame, group: str) -> pd.DataFrame:
    """How each row's group of phases came about (``part_origin``): measured, measured elsewhere or modelled."""
    of = {(one.directory, one.comparison_id): (one.run, one.facts) for one in store.comparisons}
    keys = rows[[*COMPARISON, group]].itertuples(index=False, name=None)
    return rows.assign(part_origin=[phase_origin(*of[directory, name], part) for directory, name, part in keys])


def phase_rows(store: Store) -> pd.DataFrame:
    """A row per case and group of phases, or part of a pass (``phases``), laid end to end; mean over ranks.

    A bar's name says what the case costs, so that a short bar is not read as a gift.
    """
    rows = case_rows(store)
    shares = [(100 * rows[cost]).map("{:.1f} %".format) for cost in COST]
    words = "\n" + shares[0] + " dropped, " + shares[1] + " kept"
    has_cost = (rows["role"] == "policy") & rows[COST].notna().all(axis=1)
    rows = rows.assign(bar=rows["name"].where(~has_cost, rows["name"] + words))
    is_model, of_layer = rows["scope"] == "model", {f"{group}_ms": group for group in GROUPS}
    rows[[*of_layer]] = rows[[*of_layer]].mask(is_model)  # a pass has more parts
    columns = of_layer | {f"mean_rank_{part}_ms": part for part in PASS_PARTS}
    rows["axis_words"] = np.where(is_model, "time of a pass (ms)", "time of one layer (ms)")
    kept = [name for name in rows if name not in columns]
    shown = rows.melt(kept, list(columns), "phases", "time_ms", ignore_index=False).dropna(subset="time_ms")
    shown = shown.sort_index(kind="stable").replace({"phases": columns})
    shown["begin_ms"] = shown["time_ms"].groupby(level=0).cumsum() - shown["time_ms"]
    return with_origin(store, shown[shown.groupby("phases")["time_ms"].transform("max") > 0], "phases")


def _height_of_bars(rows: pd.DataFrame) -> float:
    lines = rows["bar"].dropna().str.count("\n").max() + 1
    return 0.85 + (0.12 + 0.17 * lines) * _most_of(rows, "bar")


def lane_rows(store: Store, case: str | None = None) -> pd.DataFrame:
    """A row per rank and phase of two cases (``timeline``), each rank a bar."""
    rows = timeline_rows(store, case)
    return rows if rows.empty else with_origin(store, rows, "group")


# ---- loads -----------------------------------------------------------------------------------------------------------


def load_rows(store: Store) -> pd.DataFrame:
    """A row per case and expert, or rank (``of``, ``number``): ``load_over_mean``, mean over batches and layers.

    Of each policy the smallest capacity factor; ``place``, its place in the falling order of its case.
    """
    rows = case_rows(store).query("status == 'ok' and role in ('baseline', 'policy') and policy != 'topk'")
    rows = rows[~rows.duplicated(["facet", "line"]) | rows["line"].isna()]  # in reading order factors ascend
    both = set.intersection(*(set(rows.loc[rows["role"] == role, "facet"]) for role in ("policy", "baseline")))
    rows = rows[rows["facet"].isin(both)].drop(columns="load_over_mean")
    batches = routing(store).merge(rows[CASE], on=CASE)
    parts = []
    for of, column in (("expert", "load_E"), ("rank", "load_R")):
        sizes = batches[column].map(len)
        loads = batches.assign(of=of, load=batches[column], number=sizes.map(range)).explode(["load", "number"])
        loads["load_over_mean"] = loads["load"].astype(float) * sizes / loads["num_topk_pairs"]
        parts.append(loads.groupby([*CASE, "of", "number"], sort=False)["load_over_mean"].mean().reset_index())
    rows = rows.assign(line=rows["line"].fillna("native")).merge(pd.concat(parts), on=CASE)
    place = rows.groupby([*CASE, "of"])["load_over_mean"].rank(method="first", ascending=False)
    return rows.assign(place=place)


def _loads(of: str, width: float) -> object:
    look = {"joined": "line.notna()", "xlabel": f"{of}s, the fullest first", "width": width, "shares": False}
    needs = f"of == '{of}' and (num_ranks > 1 or of == 'expert')"
    return series("place", "load_over_mean", needs=needs, only=f"of == '{of}'", **look)


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def swept_rows(store: Store) -> pd.DataFrame:
    """Lines with several capacity factors along the first of the swept keys; none where there are none.

    A facet for each policy but for its capacity factor (``panel``) and the other swept keys. ``step`` is a capacity
    factor, or what has none (perfect balance, replication) by its name. Columns of ``sweeps.swept``. Cases that failed
    have a ``status`` but no numbers.
    """
    rows, points = case_rows(store), swept(comparisons(store))
    rows = rows.drop(columns="at").merge(points, on=COMPARISON)
    is_reference = rows["role"].isin(["replication", "ceiling"])
    rows = rows[(rows["status"] == "ok") & is_reference | (rows["role"] == "policy")]
    step = rows["capacity_factor"].astype(object).mask(rows["role"] == "ceiling", "perfect balance")
    step = step.mask(rows["role"] == "replication", rows["label"])
    rows = rows.assign(step=step, verdict=rows["verdict"].where(rows["speedup_median"].notna()))
    panels = []
    timed = rows[rows["speedup_median"].notna() & rows["capacity_factor"].notna()]
    for (others, line), group in timed.groupby(["other_keys", "line"], sort=False):
        if group["capacity_factor"].nunique() > 1:
            is_of_line = (rows["line"] == line) & rows["step"].isin(group["capacity_factor"])
            here = rows[(rows["other_keys"] == others) & (is_of_line | (rows["role"] != "policy"))]
            is_faster = group["speedup_median"] > 1
            all_alike = "faster than native in every cell" if is_faster.all() else "nowhere faster than native"
            heading = line + (f", {others}" if others else "") + (f": {all_alike}" if is_faster.nunique() == 1 else "")
            panels.append(here.assign(panel=group["family"].iloc[0], facet=f"{line}/{others}", heading=heading))
    if not panels:
        return rows[:0]
    rows = pd.concat(panels, ignore_index=True)
    return rows.assign(
        other_keys=rows["other_keys"].replace("", None),
        swept_words=rows["swept_value"].map(value_words),
        swept_key_words=key_words(rows["swept_key"].iloc[0]),
        limit=max(rows["speedup_median"].map(np.log).abs().max(), np.log(FULL_COLOUR)),
    )


# ---- costs -----------------------------------------------------------------------------------------------------------

_DROPS_ALL = 0.95  # of top-k pairs: a policy that drops more computes nothing that a speedup could be of
_FRONTS = {"on_front_of_retained_mass": "retained_mass", "on_front_of_dropped_share": "dropped_share"}


def on_front(points: np.ndarray) -> np.ndarray:
    """Whether no other of ``[points, columns]`` is at least as much in every column, and more in one."""
    beats = (points[:, None] >= points).all(axis=2) & (points[:, None] > points).any(axis=2)
    return ~beats.any(axis=0)


def pareto_rows(store: Store) -> pd.DataFrame:
    """Policies and replication with a speedup, whether each is on a front, and where it stands below the frontier.

    A case is on the *front* when no other of its comparison is at least as fast and at least as faithful, and better in
    one of the two. Native competes. Fronts are of policies that drop or reroute; replication pays with memory. What
    drops all is ``off_scale``, and stands in the note.
    """
    everyone = case_rows(store)
    rows = everyone.query("role in ('policy', 'replication') and speedup_median.notna() and retained_mass.notna()")
    if rows.empty:
        return rows
    rows = rows.assign(**dict.fromkeys(_FRONTS, False))
    for column, cost in _FRONTS.items():
        sign = 1 if axis_of(cost).better == "higher" else -1
        for _, group in rows[rows["role"] == "policy"].groupby("facet"):
            points = np.column_stack([group["speedup_median"], sign * group[cost]])
            rows.loc[group.index, column] = on_front(np.vstack([points, [1.0, sign * axis_of(cost).native]]))[:-1]
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

    natives, curves = most[(most["role"] == "baseline") & most["curve_load"].notna()], {}
    for (directory, comparison_id), rows in natives.groupby(COMPARISON):
        pairs = zip(rows["curve_load"], rows["curve_kept"], strict=True)
        load_N, kept_N = (values.numpy() for values in joint([(list(load), list(kept)) for load, kept in pairs]))
        curves[f"{directory}/{comparison_id}"] = load_N[-1] / load_N[load_N > 0], kept_N[load_N > 0]
    return curves


def _draw_front(axes: Axes, rows: pd.DataFrame, cost: str, flag: str) -> None:
    """Steps through the policies that no other beats: what may cost at most so much has the last point's speedup."""
    points = rows[rows[flag] & ~rows["off_scale"]].sort_values("speedup_median")
    if len(points) > 1:
        look = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1)), "zorder": 2, "label": "front"}
        axes.step(axis_of(cost).scale * points[cost], points["speedup_median"], where="post", **look)


def _draw_frontier(axes: Axes, rows: pd.DataFrame) -> None:
    """The most mass that dropping alone can keep (``curve``), within the limits of the points."""
    limits = {"xlim": axes.get_xlim(), "ylim": axes.get_ylim()}
    for relief_N, kept_N in rows["curve"].dropna().head(1):
        words = "frontier: none that only drops is above; rerouting may be"
        axes.plot(100 * kept_N, relief_N, color=INK, linewidth=1.4, zorder=2, label=words)
    axes.set(**limits)


_UNSURE = ("verdict not in ('faster', 'slower')", "neither faster nor slower for sure")
_COSTS = partial(
    series,
    only="not off_scale",
    height=lambda rows: 4.0 if rows["facet"].nunique() == 1 else 3.2,
    shares=False,
)

# ---- the figures of times and routing --------------------------------------------------------------------------------

FIGURES: dict[str, Figure] = {
    "speedup": Figure(
        "Speedup over native Megatron-Core",
        [
            _over_steps("speedup_median", 3.3, width=2.0),
            _over_steps("moe_speedup_median", 2.0, width=2.0, needs="moe_speedup_median.notna()"),
            _over_steps("dropped_share", 1.4),
        ],
        "Slowest rank's time of one MoE layer, or of a whole model's pass, native over policy, median; then the top-k "
        "pairs that are dropped. {intervals}",
        where="role in ('policy', 'replication', 'ceiling') and speedup_median.notna()",
        needs="role != 'ceiling'",
        columns=(*_SPEEDUP, *(f"moe_speedup_{end}" for end in ("median", "low", "high")), *COST),
        beside=_is_upright,
    ),
    "dropped": Figure(
        "What the policies cost: dropped pairs and score mass kept",
        [_over_steps("dropped_share", 2.3), _over_steps("retained_mass", 2.3)],
        "Top-k pairs that are not computed, and the score mass of what is computed over that of the model's own top-k; "
        "all ranks' tokens together, mean over batches.",
        where="role == 'policy' and status == 'ok' and dropped_share.notna()",
        columns=COST,
        beside=_is_upright,
        timed=False,
    ),
    "phases": Figure(
        "Where the time goes",
        [bars("phases", "axis_words", height=_height_of_bars)],
        "Time by phase, mean over ranks, median over iterations; waiting is for the slowest rank, where ranks meet.",
        phase_rows,
        columns=("phases", "time_ms", *COST),
    ),
    "timeline": Figure(
        "Who waits for whom",
        [
            bars(
                "group",
                "time since the layer began (ms)",
                longest="longest_ms",
                more=mark_critical,
                height=lambda rows: rows["rank"].nunique() * (0.3 if rows["rank"].nunique() <= 8 else 0.2) + 0.9,
            )
        ],
        "{subtitle}",
        lane_rows,
        columns=("launch", "batch", "iteration", "rank", "is_critical", "phase", "begin_us", "time_us"),
        most=1,
    ),
    "load": Figure(
        "Load of experts and ranks, before and after",
        [_loads("expert", 2.0), _loads("rank", 1.0)],
        "(token, expert) pairs over the mean of the model's own routing, mean over batches, in each case the fullest "
        "first; of each policy the smallest capacity factor.",
        load_rows,
        columns=("of", "number", "load_over_mean"),
        beside=True,
        timed=False,
    ),
    "map": Figure(
        "Where a policy pays: speedup over native Megatron-Core",
        [heat(height=lambda rows: _most_of(rows, "step") * 0.5 + 1.1 + 0.4 * (rows["heading"].str.len().max() // 60))],
        f"In the cells the speedup and the share of top-k pairs that is dropped, by capacity factor {GAMMA}; above "
        "them what has none.",
        swept_rows,
        columns=("panel", "swept_key", "swept_value", "other_keys", *_SPEEDUP[:4], "verdict", "status", *COST),
        limit=8,
    ),
    "pareto": Figure(
        "What speed costs",
        [
            _COSTS(
                cost,
                "speedup_median",
                hollow=_UNSURE,
                joined="capacity_factor.notna()",
                reverse=cost == "retained_mass",
                more=partial(_draw_front, cost=cost, flag=flag),
            )
            for flag, cost in _FRONTS.items()
        ]
        + [_COSTS("kept_share", "relief", joined="False", reverse=True, more=_draw_frontier, needs="relief.notna()")],
        "Speedup over native against what a policy keeps and drops. {intervals} A line joins a policy's capacity "
        "factors.",
        pareto_rows,
        columns=(*_SPEEDUP, "verdict", *COST, *_FRONTS, "relief", "kept_share"),
        beside=True,
    ),
}

# ---- what answers cost -----------------------------------------------------------------------------------------------


def _answers(quality: Quality) -> pd.DataFrame:
    """Cases that all checkpoints of a group have: means over them and the interval over them; of one its own."""
    costs = text_costs(quality).query("role != 'baseline'")
    by_case = costs.groupby(["group", "label", "phase"], sort=False)
    rows = by_case[["comparison", "checkpoints", "policy", "policy_params", "cross_entropy_added_half"]].first()
    added = by_case[["activated_experts", "fullest_rank", "cross_entropy_added"]].mean()
    over_them = by_case["cross_entropy_added"].agg(half_interval)
    half = rows["cross_entropy_added_half"].where(rows["checkpoints"] == 1, over_them)
    rows = rows.join(added).assign(
        cross_entropy_added_half=half,
        cross_entropy_added_low=added["cross_entropy_added"] - half,
        cross_entropy_added_high=added["cross_entropy_added"] + half,
    )
    rows = rows[by_case.size() == rows["checkpoints"]].reset_index().rename(columns={"comparison": "title"})
    step = rows["policy_params"].map(json.loads).str.get("capacity_factor").astype(float)
    family = rows["label"].str.replace(r" capacity_factor=\S+", "", regex=True)
    return rows.assign(
        capacity_factor=step, line=family, facet=rows["group"], role="policy", workload=None, origin=None
    )


def capacity_rows(quality: Quality) -> pd.DataFrame:
    """Cases of policies with several capacity factors (arXiv 2503.05066, Figure 12, has accuracy there)."""
    rows = _answers(quality).dropna(subset="capacity_factor")
    rows = rows[rows.groupby(["facet", "line"])["capacity_factor"].transform("size") > 1]
    return rows.assign(quantity=f"capacity factor {GAMMA}", value=rows["capacity_factor"], on_line=True)


def front_rows(quality: Quality) -> pd.DataFrame:
    """Cases over what a step or a batch waits for: activated experts in decode, in prefill pairs of the fullest rank.

    ``on_line`` are the cases of a policy that none of its others beats in both (arXiv 2511.02237, Figures 2, 3 and 8).
    """
    rows = _answers(quality).query("policy != 'topk'").sort_values(["facet", "phase"], kind="stable")
    in_decode = rows["phase"] == "decode"
    of_step, of_rank = "activated experts of a step, mean over layers", "pairs of the fullest rank over native's mean"
    rows = rows.assign(
        facet=rows["facet"].astype(str) + rows["phase"],
        title=rows["phase"] + ": " + rows["title"],
        line=rows["policy"],
        quantity=in_decode.map({True: of_step, False: of_rank}),
        value=rows["activated_experts"].where(in_decode, rows["fullest_rank"]),
    )
    ascending = rows.sort_values(["value", "cross_entropy_added"]).groupby(["facet", "line"])["cross_entropy_added"]
    best_before = ascending.transform(lambda cost: cost.cummin().shift(fill_value=np.inf))
    return rows.assign(on_line=rows["cross_entropy_added"] < best_before.reindex(rows.index))


_ANSWERS = partial(
    Figure,
    panels=[series("value", "cross_entropy_added", joined="on_line", xlabel="quantity")],
    how="Cross-entropy added to the unpatched model's on the same sequences, nats per token. Whiskers: 95 % interval, "
    "Student's t over checkpoints where there are several, else over batches.",
    columns=(
        *("phase", "checkpoints", "policy", "policy_params", "activated_experts", "fullest_rank"),
        *("cross_entropy_added", "cross_entropy_added_half", "quantity", "value", "on_line"),
    ),
)
# Of a directory of ``quality``, whose routing is that of virtual ranks.
QUALITY_FIGURES = {
    "quality_capacity": _ANSWERS("What a capacity costs the answers", rows=capacity_rows),
    "quality_fronts": _ANSWERS("What answers cost over what it buys", rows=front_rows),
}

# ---- papers' numbers beside ours -------------------------------------------------------------------------------------

_PAPER = {"color": INK, "marker": "|", "markersize": 15, "markeredgewidth": 2.4, "linestyle": "none"}
_OF_COMPARISON = [
    *("model", "scale", "dtype", "num_ranks", "num_tokens", "origin", "how", "ran_on", "links_words", "workload"),
    *("oversubscribed", "facts"),
]
_VALUES = ["ours", "ours_low", "ours_high", "paper_low", "paper_high"]


def claim_rows(claims: Claims) -> pd.DataFrame:
    """A row per claim, policy and traffic that was measured, a facet for each metric; shares in percent."""
    rows = claims.measured.drop(columns="note")  # which is the claim's, not the figure's
    if rows.empty:
        return rows
    rows = rows.merge(comparisons(claims.store)[["comparison_id", *_OF_COMPARISON]], on="comparison_id")
    is_share = rows["metric"].isin(OWN_METRICS)
    name = rows["metric"].map(METRICS)
    unstated = rows[["paper_low", "paper_high"]].isna().all(axis=1).any()
    return rows.assign(
        **{value: rows[value].where(~is_share, 100 * rows[value]) for value in _VALUES},
        facet=rows["metric"],
        title=name,
        quantity=name + is_share.map({True: " (%)", False: ""}),
        line="ours, " + rows["traffic"].str.replace("_", " "),
        names=rows["claim"] + "\n" + rows["case"],
        role="policy",
        ours_are="whole models, a pass from end to end" if (rows["ours_of"] != "layer").any() else "one layer",
        missing_marks=" Rows without a mark: no number is stated." if unstated else "",
        workload_words=rows["workload"] + " traffic, " + rows["facts"].map(basis_words),
    )


def _draw_papers(axes: Axes, rows: pd.DataFrame) -> None:
    """A paper's number as a stroke, a range of one as a bar to the edge of the panel where it has no end."""
    place_of, rows = places_of(rows["names"]), rows.drop_duplicates("names").set_index("names")
    paper = rows[["paper_low", "paper_high"]].dropna(how="all")
    is_single = paper["paper_low"] == paper["paper_high"]
    for name, number in paper.loc[is_single, "paper_low"].items():
        axes.plot([number], [place_of[name]], zorder=2, label="paper", **_PAPER)
    low, high = axes.get_xlim()
    for name, begin, end in paper[~is_single].fillna({"paper_low": low, "paper_high": high}).itertuples():
        look = {"color": NOISE_FILL, "zorder": 0.5, "label": "paper: a range"}
        axes.barh(place_of[name], end - begin, 0.7, begin, **look)
    if rows["metric"].iloc[0] not in (*OWN_METRICS, *NATIVE_METRICS):
        axes.axvline(1, color=MUTED, linewidth=1, zorder=1)
    axes.set_xlim(low, high)


def _height_of_claims(rows: pd.DataFrame) -> float:
    lines = max(folded(name, NAMES, rcParams["ytick.labelsize"]).count("\n") + 1 for name in rows["names"])
    return 0.75 + max(0.5, 0.16 * lines + 0.14) * rows["names"].nunique()


CLAIMS_FIGURE = Figure(
    "Papers' numbers beside ours",
    [
        series(
            "names",
            "ours",
            names=True,
            hollow=("not primary", ""),
            ylabel="quantity",
            more=_draw_papers,
            height=_height_of_claims,
        )
    ],
    "Ours: {ours_are}; filled: the primary traffic. Whiskers: least and largest draw, or 95 % intervals, or smallest "
    "and largest pair below ten batches.{missing_marks}",
    claim_rows,
    columns=("metric", "claim", "case", "traffic", "primary", *_VALUES),
    most=1,
    limit=99,
    timed=False,
)
