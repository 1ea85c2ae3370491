"""The figures of ``quality``, which are of answers, and of ``papers``, which set ours beside published numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from moe_ep_bench.analysis.cases import comparisons
from moe_ep_bench.analysis.drawing import Figure
from moe_ep_bench.analysis.marks import NAMES, places_of, series
from moe_ep_bench.analysis.papers import METRICS, Claims, basis_words
from moe_ep_bench.analysis.quality import Quality, half_interval, text_costs
from moe_ep_bench.analysis.style import GAMMA, INK, MUTED, NOISE_FILL, Look, folded, rcParams
from moe_ep_bench.papers.claims import NATIVE_METRICS, OWN_METRICS

# ---- what answers cost -----------------------------------------------------------------------------------------------


def _costs(quality: Quality) -> pd.DataFrame:
    """Cases that all checkpoints of a group have: means over them and the interval over them; of one its own."""
    costs = text_costs(quality).query("role != 'baseline'")
    by_case = costs.groupby(["group", "label", "phase"], sort=False)
    rows = by_case[["comparison", "checkpoints", "policy", "policy_params", "cross_entropy_added_half"]].first()
    rows = rows.join(by_case[["activated_experts", "fullest_rank", "cross_entropy_added"]].mean())
    over_them = by_case["cross_entropy_added"].agg(half_interval)
    half = rows["cross_entropy_added_half"].where(rows["checkpoints"] == 1, over_them)
    rows = rows.assign(
        cross_entropy_added_half=half,
        low=rows["cross_entropy_added"] - half,
        high=rows["cross_entropy_added"] + half,
    )
    rows = rows[by_case.size() == rows["checkpoints"]].reset_index().rename(columns={"comparison": "title"})
    step = rows["policy_params"].map(json.loads).str.get("capacity_factor").astype(float)
    family = rows["label"].str.replace(r" capacity_factor=\S+", "", regex=True)
    return rows.assign(
        capacity_factor=step, line=family, facet=rows["group"], role="policy", workload=None, origin=None
    )


def capacity_rows(quality: Quality) -> pd.DataFrame:
    """Cases of policies with several capacity factors (arXiv 2503.05066, Figure 12, has accuracy there)."""
    rows = _costs(quality).dropna(subset="capacity_factor")
    rows = rows[rows.groupby(["facet", "line"])["capacity_factor"].transform("size") > 1]
    return rows.assign(quantity=f"capacity factor {GAMMA}", value=rows["capacity_factor"], on_line=True)


def front_rows(quality: Quality) -> pd.DataFrame:
    """Cases over what a step or a batch waits for: activated experts in decode, in prefill pairs of the fullest rank.

    ``on_line`` are the cases of a policy that none of its others beats in both (arXiv 2511.02237, Figures 2, 3 and 8).
    """
    rows = _costs(quality).query("policy != 'topk'").sort_values(["facet", "phase"], kind="stable")
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
    panels=[series("value", "cross_entropy_added", joined="on_line", whiskers=("low", "high"), xlabel="quantity")],
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
_ABOUT = [
    *("model", "scale", "dtype", "num_ranks", "num_tokens", "origin", "how", "ran_on", "links_words", "workload"),
    *("oversubscribed", "facts"),
]
_VALUES = ["ours", "ours_low", "ours_high", "paper_low", "paper_high"]


def claim_rows(claims: Claims) -> pd.DataFrame:
    """A row per claim, policy and traffic that was measured, a facet for each metric; shares in percent."""
    rows = claims.measured.drop(columns="note")  # which is the claim's, not the figure's
    if rows.empty:
        return rows
    rows = rows.merge(comparisons(claims.store)[["comparison_id", *_ABOUT]], on="comparison_id")
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


def _draw_papers(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """A paper's number as a stroke, a range of one as a bar to the edge of the panel where it has no end."""
    del looks
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
            whiskers=("ours_low", "ours_high"),
            hollow=("not primary", ""),
            ylabel="quantity",
            more=[_draw_papers],
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
