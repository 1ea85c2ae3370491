"""The figures, each a row of a table, and the rows that single figures make of the frame.

All kinds of results have their figures in one table: where a store has no such rows a figure is not drawn. A function
of rows takes a store and gives tidy rows with a mark in each, none where there is nothing to show. A figure is added by
a row; ``drawing.lines`` is a figure of any column against any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from moe_ep_bench.analysis.answer_costs import half_interval, texts
from moe_ep_bench.analysis.cases import CASE, COMPARISON, comparisons, routing
from moe_ep_bench.analysis.columns import COSTS, cost_words, ends
from moe_ep_bench.analysis.drawing import SERVED_ENDS, Figure
from moe_ep_bench.analysis.marks import Bars, Panel, Series, are_names, inches_of_rows, places_of
from moe_ep_bench.analysis.notes import MOST_DROPPED
from moe_ep_bench.analysis.paper_claims import METRICS, measured
from moe_ep_bench.analysis.reduce import OF_LAYER, OF_PASS
from moe_ep_bench.analysis.store import Store, with_draws_apart
from moe_ep_bench.analysis.style import GAMMA, INK, MUTED, NOISE_FILL
from moe_ep_bench.analysis.tables import by_rank
from moe_ep_bench.config.conditions import matching
from moe_ep_bench.facts import TimedFacts
from moe_ep_bench.facts.words import Parts, basis_words, traffic_parts
from moe_ep_bench.papers.claims import NUMBERS, SHARES

_SPEEDUP = (*ends("speedup"), "speedup_is_interval", "is_one_draw", "floor_low", "floor_high")


# ---- speedups and drops over the capacity factor ---------------------------------------------------------------------


def _over_steps(y: str, height: float, **more: Any) -> Panel:
    """A column over capacity factors; of policies without one it is as high as their names need."""

    def inches(rows: pd.DataFrame) -> float:
        return max(0.9, inches_of_rows(rows, "at")) + 1.1 if are_names(rows["at"]) else height

    words = f"capacity factor {GAMMA} (of policies that have one)"
    return Series("at", y, names=True, xlabel=words, height=inches, **more)


def _is_upright(rows: pd.DataFrame) -> bool:
    return are_names(rows["at"])


# ---- phases ----------------------------------------------------------------------------------------------------------

_MOST_RANKS = 12


def _stacked(store: Store, rows: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """A row per bar and part of it (``phases``), of columns in milliseconds, laid end to end.

    ``part_origin`` says how a part came about: measured, measured elsewhere or modelled.
    """
    rows = rows.reset_index(drop=True)
    parts = rows[list(columns)].rename(columns=columns).melt(None, None, "phases", "time_ms", ignore_index=False)
    parts = rows.drop(columns=list(columns)).join(parts.dropna(subset="time_ms"), how="inner")
    parts["begin_ms"] = parts["time_ms"].groupby(level=0).cumsum() - parts["time_ms"]
    parts = parts[parts.groupby("phases")["time_ms"].transform("max") > 0]
    keys = parts[[*COMPARISON, "phases"]].itertuples(index=False, name=None)
    named = [(store.by_id[directory, name], part) for directory, name, part in keys]
    return parts.assign(part_origin=[one.facts.phase_origin(one.run.mode, part) for one, part in named])


def _cost_words(rows: pd.DataFrame) -> pd.Series:
    """Dropped, rerouted and kept shares of each case, in words."""
    lost = pd.Series([cost_words(row) for row in rows.to_dict("records")], rows.index, dtype=object)
    return lost + (100 * rows["retained_mass"]).map(", {:.1f} % kept".format)


def phase_rows(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per case and group of phases, or part of a pass; mean over ranks.

    A bar's name says what the case costs, so that a short bar is not read as a gift.
    """
    has_cost = (rows["role"] == "policy") & rows[["missing_share", "retained_mass"]].notna().all(axis=1)
    is_model = rows["scope"] == "model"
    rows = rows.assign(
        bar=rows["name"].where(~has_cost, rows["name"] + "\n" + _cost_words(rows)),
        axis_words=np.where(is_model, "time of a pass (ms)", "time of one layer (ms)"),
        **{name: rows[name].mask(is_model) for name in OF_LAYER},  # a pass has more parts
    )
    return _stacked(store, rows, OF_LAYER | OF_PASS)


def rank_rows(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per rank and group of phases, under native and the pick, or the policy that gains most (``by_rank``)."""
    rows = matching(rows, "scope == 'layer' and num_ranks > 1 and waiting_ms != null")
    if rows.empty:
        return rows
    of_each = [by_rank(store, of_one, _MOST_RANKS) for _, of_one in rows.groupby(COMPARISON, sort=False)]
    rows = pd.concat(of_each, ignore_index=True)
    note = (
        "of " + rows["num_ranks"].astype("str") + f" ranks the {_MOST_RANKS} are drawn that work longest under native"
    )
    heading = rows["title"] + "; " + rows["name"] + ": " + _cost_words(rows)
    rows = rows.assign(
        heading=heading.where(rows["role"] != "baseline")
        .groupby(rows["facet"])
        .transform("first")
        .fillna(rows["title"]),
        bar=rows["name"] + ", rank " + rows["rank"].astype("str"),
        axis_words="time of one layer (ms)",
        note=note.where(rows["num_ranks"] > _MOST_RANKS),
    )
    return _stacked(store, rows, OF_LAYER)


# ---- loads -----------------------------------------------------------------------------------------------------------


def load_rows(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per case and ``place`` in the falling order of experts, or ranks (``of``): ``load_over_mean``.

    Each batch and layer is put in order by itself, for its fullest expert is not that of another; then the mean over
    them. A policy is shown at its smallest capacity factor.
    """
    wanted = (
        "status == 'ok' and role in ('baseline', 'policy') and policy != 'topk' and mode not in ('quality', 'serve')"
    )
    rows = matching(rows, wanted)
    if rows.empty:
        return rows
    rows = rows[~rows.duplicated(["facet", "line"]) | rows["line"].isna()]  # in reading order factors ascend
    both = set.intersection(*(set(rows.loc[rows["role"] == role, "facet"]) for role in ("policy", "baseline")))
    rows = rows[rows["facet"].isin(both)].drop(columns="load_over_mean")
    batches = routing(store).merge(rows[CASE], on=CASE)
    parts = []
    for of, column in (("expert", "load_E"), ("rank", "load_R")):
        sizes = batches[column].map(len)
        falling = batches[column].map(lambda loads: sorted(loads, reverse=True), "ignore")
        places = sizes.map(lambda size: range(1, size + 1))
        loads = batches.assign(of=of, load=falling, place=places).explode(["load", "place"])
        loads["load_over_mean"] = loads["load"].astype(float) * sizes / loads["num_topk_pairs"]
        parts.append(loads.groupby([*CASE, "of", "place"], sort=False)["load_over_mean"].mean().reset_index())
    of_factors = "; of each policy the smallest capacity factor" if rows["capacity_factor"].notna().any() else ""
    rows = rows.assign(line=rows["line"].fillna("native"), of_factors=of_factors).merge(pd.concat(parts), on=CASE)
    return rows.astype({"place": int})


def batch_rows(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per batch of native and of every plan in time: ``rank_imbalance``, mean over layers."""
    rows = matching(rows, "status == 'ok' and (role == 'baseline' or rearrange_ms != null)")
    rows = rows[rows["facet"].isin(rows.loc[rows["rearrange_ms"].notna(), "facet"])]
    if rows.empty:
        return rows
    # Batches of several layers or draws are numbered on.
    times = rows["facts"].map(lambda facts: getattr(facts, "draws", 1) * getattr(facts, "layers", 1), "ignore")
    rows = rows.assign(line=rows["name"], of_one=rows["num_batches"] // times).drop(columns="rank_imbalance")
    batches = routing(store)[[*CASE, "batch", "rank_imbalance"]].merge(rows, on=CASE)
    batches = batches.assign(batch=batches["batch"] % batches["of_one"])
    mean = batches.groupby([*CASE, "batch"], sort=False)["rank_imbalance"].mean().reset_index()
    return rows.merge(mean, on=CASE)


def _loads(of: str, width: float) -> Panel:
    look = {"joined": "line != null", "xlabel": f"{of}s, the fullest first", "width": width, "shares": False}
    return Series("place", "load_over_mean", where=f"of == '{of}' and (num_ranks > 1 or of == 'expert')", **look)


# ---- costs -----------------------------------------------------------------------------------------------------------


def pareto_rows(store: Store, everyone: pd.DataFrame) -> pd.DataFrame:
    """Policies and replication with a speedup, and where they stand below the frontier.

    ``relief``: native's fullest rank over the policy's; ``kept_share``: of all score mass; ``curve``: of the frontier.
    """
    wanted = "role in ('policy', 'replication') and speedup_median != null and retained_mass != null"
    rows = matching(everyone, wanted)
    if rows.empty:
        return rows
    natives = everyone[(everyone["role"] == "baseline") & (everyone["status"] == "ok")].drop_duplicates("facet")
    rows = rows[~(rows["dropped_share"] > MOST_DROPPED)]
    relief = rows["facet"].map(natives.set_index("facet")["fullest_rank"]) / rows["fullest_rank"]
    batches = routing(store)
    most = batches.groupby(CASE)["kept_by_load"].mean().reindex(pd.MultiIndex.from_frame(rows[CASE]))
    kept_share = most.to_numpy().astype(float) - rows["below_frontier"]
    return rows.assign(
        kept_share=kept_share,
        relief=relief.where(kept_share.notna() & (rows["role"] == "policy")),
        curve=rows["facet"].map(_curves(batches)),
    )


def _curves(batches: pd.DataFrame) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By facet: how much less the fullest rank computes than native's, and the share of mass that is kept at most."""
    from moe_ep_bench.workload.frontier import joint  # it imports torch

    natives, curves = batches[(batches["role"] == "baseline") & batches["curve_load"].notna()], {}
    for (directory, comparison_id), rows in natives.groupby(COMPARISON):
        pairs = zip(rows["curve_load"], rows["curve_kept"], strict=True)
        load_N, kept_N = (values.numpy() for values in joint([(list(load), list(kept)) for load, kept in pairs]))
        curves[f"{directory}/{comparison_id}"] = load_N[-1] / load_N[load_N > 0], kept_N[load_N > 0]
    return curves


def _draw_frontier(axes: Axes, rows: pd.DataFrame) -> None:
    """The most mass that dropping alone can keep (``curve``), within the limits of the points."""
    limits = {"xlim": axes.get_xlim(), "ylim": axes.get_ylim()}
    for relief_N, kept_N in rows["curve"].dropna().head(1):
        words = "frontier: none that only drops is above; rerouting may be"
        axes.plot(100 * kept_N, relief_N, color=INK, linestyle=":", linewidth=1.4, zorder=2, label=words)
    axes.set(**limits)


_COSTS = partial(Series, height=lambda rows: 4.0 if rows["facet"].nunique() == 1 else 3.2, shares=False)
_OF_SPEED = partial(
    _COSTS,
    y="speedup_median",
    hollow=("verdict not in ('faster', 'slower')", "neither faster nor slower for sure"),
    joined="capacity_factor != null",
)

# Rerouted pairs where there are any, and missing ones where these are not told from dropped ones.
_LOST = (
    _over_steps("dropped_share", 1.4, where="dropped_share != null"),
    _over_steps("rerouted_share", 1.4, where="rerouted_share > 0"),
    _over_steps("missing_share", 1.4, where="dropped_share == null and missing_share != null"),
)

# ---- what answers cost -----------------------------------------------------------------------------------------------


def answer_rows(_: Store, costs: pd.DataFrame) -> pd.DataFrame:
    """Cases over what a step or a batch waits for: activated experts in decode, in prefill pairs of the fullest rank.

    Of cases that all checkpoints of a group have the means over them and the interval over them; of one its own.
    ``on_line`` are the cases of a policy that none of its others beats in both (arXiv 2511.02237, Figures 2, 3 and 8).
    """
    costs = matching(costs, "role != 'baseline' and policy != 'topk'")
    case = ["directory", "group", "label", "stage"]
    by_case = costs.groupby(case, sort=False)
    rows = by_case[["comparison", "checkpoints", "policy", "policy_params", "cross_entropy_added_half"]].first()
    added = by_case[["activated_experts", "fullest_rank", "cross_entropy_added"]].mean()
    over_them = by_case["cross_entropy_added"].agg(half_interval)
    half = rows["cross_entropy_added_half"].where(rows["checkpoints"] == 1, over_them)
    rows = rows.join(added)[by_case.size() == rows["checkpoints"]].reset_index()
    half = half.reindex(pd.MultiIndex.from_frame(rows[case])).to_numpy()
    whiskers = "Whiskers: 95 % interval, Student's t over checkpoints where there are several, else over batches."
    in_decode = rows["stage"] == "decode"
    of_step, of_rank = "activated experts of a step, mean over layers", "pairs of the fullest rank over native's mean"
    rows = rows.assign(
        facet=rows["directory"] + "/" + rows["group"].astype(str) + rows["stage"],
        title=rows["stage"] + ": " + rows["comparison"],
        line=rows["policy"],
        quantity=in_decode.map({True: of_step, False: of_rank}),
        value=rows["activated_experts"].where(in_decode, rows["fullest_rank"]),
        cross_entropy_added_half=half,
        cross_entropy_added_low=rows["cross_entropy_added"] - half,
        cross_entropy_added_high=rows["cross_entropy_added"] + half,
        whiskers=f" {whiskers}" if np.isfinite(half).any() else "",
        workload=None,
        origin=None,
        role="policy",
    ).sort_values(["facet", "value", "cross_entropy_added"])
    added = rows.groupby(["facet", "line"])["cross_entropy_added"]
    return rows.assign(on_line=added.transform(lambda cost: cost < cost.cummin().shift(fill_value=np.inf)))


# ---- papers' numbers and ours -------------------------------------------------------------------------------------

_OF_COMPARISON = [
    *("model", "num_ranks", "num_tokens", "origin", "workload", "oversubscribed", "run", "facts"),
]
_VALUES = ["ours", "ours_low", "ours_high", "paper_low", "paper_high"]


def claim_rows(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per claim, policy and traffic that was measured, a facet for each metric; shares in percent."""
    rows = rows.drop(columns="note")  # which is the claim's, not the figure's
    rows = rows.merge(comparisons(with_draws_apart(store))[[*COMPARISON, *_OF_COMPARISON]], on=COMPARISON)
    is_share = rows["metric"].isin(SHARES)
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
    )


def _calibrated_parts(facts: TimedFacts) -> Parts:
    """What a workload was calibrated to; of others what they are."""
    workload = facts.workload
    calibrated = traffic_parts(workload) if workload.skew is None else (basis_words(workload.skew),)
    return (f"{workload.kind} traffic", *calibrated)


def _draw_papers(axes: Axes, rows: pd.DataFrame) -> None:
    """A paper's number as a stroke, a range of one as a bar, to the edge of the panel where it has no end."""
    places, rows = places_of(rows["names"]), rows.drop_duplicates("names").set_index("names")
    paper = rows[["paper_low", "paper_high"]].dropna(how="all")
    low, high = np.nanmin([axes.get_xlim()[0], *paper.min()]), np.nanmax([axes.get_xlim()[1], *paper.max()])
    low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
    paper = paper.fillna({"paper_low": low, "paper_high": high})
    look = {"color": NOISE_FILL, "edgecolor": INK, "linewidth": 2, "zorder": 2, "label": "paper"}
    axes.barh(paper.index.map(places), paper["paper_high"] - paper["paper_low"], 0.5, paper["paper_low"], **look)
    if rows["metric"].iloc[0] not in (*SHARES, *NUMBERS):
        axes.axvline(1, color=MUTED, linewidth=1, zorder=1)
    axes.set_xlim(low, high)


# ---- the figures -----------------------------------------------------------------------------------------------------

FIGURES: dict[str, Figure] = {
    "speedup": Figure(
        "Speedup over native Megatron-Core",
        [
            _over_steps("speedup_median", 3.3, width=2.0),
            _over_steps("moe_speedup_median", 2.0, width=2.0, where="moe_speedup_median != null"),
            *_LOST,
        ],
        "Slowest rank's time of one MoE layer, or of a whole model's pass, native over policy, median; then the top-k "
        "pairs that nobody computes, or another expert in their place. {intervals}",
        where="role in ('policy', 'replication', 'balanced') and speedup_median != null and mode != 'serve'",
        needs="role != 'balanced'",
        columns=(*_SPEEDUP, *ends("moe_speedup"), *COSTS),
        whiskers="speedup",
        beside=_is_upright,
    ),
    "dropped": Figure(
        "Cost of policies: dropped pairs and score mass kept",
        [*_LOST, _over_steps("retained_mass", 2.3)],
        "Top-k pairs that nobody computes, or another expert in their place, and the score mass of what is computed "
        "over that of the model's own top-k; all ranks' tokens together, mean over batches.",
        where="role == 'policy' and status == 'ok' and missing_share != null",
        columns=COSTS,
        beside=_is_upright,
        of="routing",
    ),
    "phases": Figure(
        "Where the time goes",
        [Bars()],
        "Time by phase, mean over ranks, median over iterations; waiting is for the slowest rank, where ranks meet. "
        "Beside a bar: the sum.",
        rows=phase_rows,
        columns=("phases", "time_ms", *COSTS),
        of="phases",
    ),
    "ranks": Figure(
        "Who waits for whom",
        [Bars()],
        "Time of each rank by phase, median over iterations, under native and advise's pick, or else the policy that "
        "gains most; the others wait for the rank that waits least.",
        rows=rank_rows,
        columns=("rank", "phases", "time_ms", *COSTS),
        of="phases",
    ),
    "load": Figure(
        "Load of experts and ranks, before and after",
        [_loads("expert", 2.0), _loads("rank", 1.0)],
        "(token, expert) pairs over the mean of the model's own routing: fullest first in every batch and layer, then "
        "the mean{of_factors}.",
        rows=load_rows,
        columns=("of", "place", "load_over_mean"),
        beside=True,
        of="routing",
    ),
    "batches": Figure(
        "Fullest rank from batch to batch",
        [Series("batch", "rank_imbalance", joined="line != null", xlabel="batch, in their order", shares=False)],
        "Pairs of the fullest rank over the mean, mean over layers. Plans know batches ahead of those that they serve.",
        rows=batch_rows,
        columns=("batch", "rank_imbalance", "speedup_median", "rearrange_ms", "rearranged_gib"),
        of="routing",
    ),
    "pareto": Figure(
        "Cost of speed",
        [
            _OF_SPEED("retained_mass", reverse=True),
            _OF_SPEED("dropped_share", where="dropped_share != null"),
            _COSTS("kept_share", "relief", joined=None, reverse=True, more=_draw_frontier, where="relief != null"),
        ],
        "Speedup over native against what a policy keeps and drops. {intervals} A line joins a policy's capacity "
        "factors. Policies that drop more than 95 % are left out.",
        rows=pareto_rows,
        columns=(*_SPEEDUP, "verdict", *COSTS, "relief", "kept_share"),
        whiskers="speedup",
        beside=True,
    ),
    "served": Figure(
        "Servers under policies, beside the server without the plugin",
        [
            _over_steps("speedup_median", 2.4),
            _over_steps("ttft_speedup_median", 2.0),
            _over_steps("tpot_speedup_median", 2.0, where="tpot_speedup_median != null"),
            _over_steps("throughput_speedup_median", 2.0),
            _over_steps("equal_share", 1.8, where="equal_share != null"),
        ],
        "Native's time over the policy's, of a whole request, to its first token, of each further token, and of a "
        "round per token; median of pairs. Then the share of answers that are native's. {intervals}",
        where="role == 'policy' and mode == 'serve' and speedup_median != null",
        columns=(
            *(*_SPEEDUP, *SERVED_ENDS),
            *("verdict", "median_ms", "ttft_ms", "tpot_ms", "tokens_per_s", "equal_share", "first_difference"),
        ),
        whiskers="speedup",
        beside=_is_upright,
    ),
    "quality": Figure(
        "Cost of a policy's gain in answers",
        [Series("value", "cross_entropy_added", joined="on_line", xlabel="quantity")],
        "Cross-entropy added to the unpatched model's on the same sequences, nats per token. A line joins what no "
        "other setting of the policy beats in both; each is a row of the CSV.{whiskers}",
        frame=texts,
        rows=answer_rows,
        about="Costs are of this model on this text. Routing is that of virtual ranks; nothing was timed.",
        columns=(
            *("stage", "checkpoints", "policy", "policy_params", "activated_experts", "fullest_rank"),
            *("cross_entropy_added", "cross_entropy_added_half", "quantity", "value", "on_line"),
        ),
    ),
    "claims": Figure(
        "Papers' numbers and ours",
        [
            Series(
                "names",
                "ours",
                names=True,
                hollow=("not primary", ""),
                ylabel="quantity",
                more=_draw_papers,
                height=lambda rows: 0.75 + inches_of_rows(rows, "names", least=0.5),
            )
        ],
        "Ours: {ours_are}; filled: the primary traffic. Whiskers: least and largest draw, or 95 % intervals, or "
        "smallest and largest pair below ten batches.{missing_marks}",
        frame=measured,
        rows=claim_rows,
        columns=("metric", "claim", "case", "traffic", "primary", *_VALUES),
        most=1,
        limit=99,
        of="routing",
        workload=_calibrated_parts,
    ),
}
