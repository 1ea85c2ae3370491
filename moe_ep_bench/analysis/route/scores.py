"""Figures of what policies have to work with: how scores fall, how sure tokens are, how alike they are."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from moe_ep_bench.analysis.route.load import RouteRun
from moe_ep_bench.analysis.route.parts import UNIFORM, drawing, footer, largest, layer_ticks, line_legend, page, split
from moe_ep_bench.analysis.style import INK, MUTED, NOISE_FILL, Drawing, looks_of, panel_title, sheet
from moe_ep_bench.workload.formatting import tokens_words

_BANDS = ("early", "middle", "final")
_SPREAD_FILL = "#B9D8EC"
_LINES = {
    "topk_share": ("top-k share", {"color": "#0072B2", "marker": "o", "markersize": 4.5}),
    "entropy": ("entropy", {"color": "#D55E00", "marker": "s", "markersize": 4.5, "linestyle": "--"}),
}
_REGIMES = {"single_head": "#0072B2", "smooth": "#B9D8EC", "plateau": "#E69F00"}
_KINDS = {
    "neighbours": "neighbours in a sequence",
    "same_sequence": "same sequence",
    "same_domain": "same domain, other sequence",
    "cross_domain": "another domain",
}
# Scores below are drawn at this floor: what float32 leaves of them says nothing.
_LEAST_SCORE = 1e-7


def decay_figure(run: RouteRun) -> Drawing | None:
    """Gate score by its place in a token's order, by third of the depth: mean, least and greatest."""
    parts = []
    for curves in split(largest(run.scores), "group"):
        layers = curves["layer"].unique()
        bands = dict(zip(_BANDS, np.array_split(layers, 3), strict=True)) if len(layers) >= 3 else {None: layers}
        parts += [_decay(curves[curves["layer"].isin(own)], band) for band, own in bands.items()]
    rows = pd.concat(parts)
    modelled = rows["tail_model"].notna().any()
    assumed = " Behind the top-k the recording holds no scores: what is drawn there is the tail model."
    figure, panels = page(
        "Gate score by place in a token's order",
        "Scores sum to 1 over all experts; least and greatest over all tokens and batches."
        + (assumed if modelled else ""),
        parts,
        {
            "mean over tokens": {"color": INK, "linewidth": 2},
            "least to greatest": Patch(facecolor=_SPREAD_FILL),
            "the model's top-k ends": UNIFORM,
            **({"assumed (tail model)": Patch(facecolor=NOISE_FILL)} if modelled else {}),
        },
        each="workload, or each third of its layers",
        columns=3,
        width=10.5 if len(parts) > 1 else 6.5,
        height=2.9,
        looks_past=modelled,
        sharey=True,
    )
    for axes, part in panels:
        first = part.iloc[0]
        layer = f"layers {first['first_layer']} to {first['last_layer']}"
        layer = f"layer {first['first_layer']}" if first["first_layer"] == first["last_layer"] else layer
        words = [f"{first['band']}: {layer}" if first["band"] else layer] if first["first_layer"] != "-" else []
        words += [first["traffic"]] if rows["group"].nunique() > 1 or not words else []
        panel_title(axes, "; ".join(words), 3 if len(parts) > 1 else 5)
        _draw_decay(axes, part)
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("score (share of mass)")
    shown = pd.concat([part for _, part in panels]).replace({"first_layer": {"-": None}, "last_layer": {"-": None}})
    columns = ["first_layer", "last_layer", "band", "place", "score_mean", "score_least", "score_greatest"]
    return drawing(figure, shown, *columns, "is_tail_model")


def _decay(curves: pd.DataFrame, band: str | None) -> pd.DataFrame:
    """Scores by place, over the layers and batches of some curves."""
    by_place = curves.groupby("position")
    return by_place.first().assign(
        place=lambda rows: rows.index,
        first_layer=curves["layer"].iloc[0],
        last_layer=curves["layer"].iloc[-1],
        band=band,
        score_mean=by_place["mean_score"].mean(),
        score_least=by_place["min_score"].min(),
        score_greatest=by_place["max_score"].max(),
        is_tail_model=lambda rows: rows["tail_model"].notna() & (rows["place"] > rows["top_k"]),
    )


def _draw_decay(axes: Axes, part: pd.DataFrame) -> None:
    num_experts, top_k = part[["num_experts", "top_k"]].iloc[0]
    drawn = part.filter(like="score_").clip(lower=_LEAST_SCORE)
    if part["is_tail_model"].any():
        axes.axvspan(top_k + 0.5, num_experts + 0.5, color=NOISE_FILL, linewidth=0, zorder=0)
    axes.fill_between(part["place"], drawn["score_least"], drawn["score_greatest"], color=_SPREAD_FILL, linewidth=0)
    axes.plot(part["place"], drawn["score_mean"], color=INK, linewidth=2)
    axes.axvline(top_k + 0.5, **UNIFORM)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda score, _: f"{score:g}".replace("e-0", "e-"))
    axes.set_xlim(0.5, num_experts + 0.5)
    axes.set_xlabel("place (1 = best expert)")


def scores_figure(run: RouteRun) -> Drawing | None:
    """Top-k share, entropy and regimes of the tokens by layer, a row for each workload, prefill beside decode."""
    layers = largest(run.layers)
    layers = layers[(layers["label"] == "native") & (layers["num_layers"] > 1)]
    if layers.empty:
        return None
    in_percent = {f"{name}_percent_of_tokens": colour for name, colour in _REGIMES.items()}
    shares = 100 * layers[[f"regime_{name}" for name in _REGIMES]].set_axis(list(in_percent), axis=1)
    layers = layers.assign(**shares, is_decode=layers["phase"] != "prefill")
    modelled = layers["tail_model"].notna().any()
    figure, panels = page(
        "How sure tokens are of their experts, by layer",
        "Top-k share: of a token's score mass. Entropy: of its scores, over log E. Single-head: the best holds half "
        "of the top-k mass or more; plateau: the last of the top-k reaches 0.8 of the best; smooth: the rest.",
        split(layers.sort_values(["model", "is_decode"], kind="stable"), "group"),
        {
            **dict(_LINES.values()),
            **{name.replace("_", "-"): Patch(facecolor=colour) for name, colour in _REGIMES.items()},
        },
        of_each=2,
        height=2.8,
        notes=["The entropy rests on the tail model."] if modelled else [],
        looks_past=modelled,
    )
    for (lines, bars), part in panels:
        name_of = f": {part['traffic'].iloc[0]}" if len(panels) > 1 else ""
        places = range(len(part))
        panel_title(lines, f"share and entropy{name_of}", 4.2)
        for name, (_, line) in _LINES.items():
            lines.plot(places, part[name], **line)
        lines.set_ylim(0, 1.02)
        lines.set_ylabel("top-k share, entropy (0 to 1)")
        panel_title(bars, f"regimes{name_of}", 4.2)
        tops = part[list(in_percent)].cumsum(axis=1)
        for name, colour in in_percent.items():
            bottom = tops[name] - part[name]
            bars.bar(places, part[name], 0.85, bottom, color=colour, edgecolor="white", linewidth=0.4)
        bars.set_ylim(0, 100)
        bars.set_ylabel("tokens (%)")
        bars.grid(False, axis="x")
        for axes in (lines, bars):
            layer_ticks(axes, part["layer"].tolist())
    return drawing(figure, pd.concat([part for _, part in panels]), "layer", *_LINES, *in_percent)


def overlap_figure(run: RouteRun) -> Drawing | None:
    """Experts that two tokens share, by what the tokens have to do with each other."""
    pairs = largest(run.overlap)
    keys = ["group", "kind", "layer"]
    totals = pairs.assign(total=pairs["shared_experts"] * pairs["num_pairs"]).groupby(keys, sort=False)
    rows = totals.first().reset_index()
    mean = totals["total"].sum() / totals["num_pairs"].sum()
    rows = rows.assign(tokens=rows["kind"].map(_KINDS), shared_experts=mean.to_numpy())
    rows = rows[rows.groupby("group")["kind"].transform("nunique") > 1]
    if rows.empty:
        return None
    rows["tokens"] = pd.Categorical(
        rows["tokens"], [kind for kind in _KINDS.values() if (rows["tokens"] == kind).any()]
    )
    sizes = rows["num_tokens"].map(tokens_words)
    rows["name"] = rows["model"] + ", " + rows["traffic"] + ", " + sizes
    looks = looks_of({group: name for group, name in zip(rows["group"], rows["name"], strict=True)})
    legend = {look.label: Patch(facecolor=look.colour) for look in looks.values() if len(looks) > 1}
    about = rows["comparison"].iloc[0] if len(looks) == 1 else "A colour for each workload"
    figure = sheet(
        "Experts that two tokens share",
        f"{about}. Experts in both tokens' top-k, mean over all such pairs of a batch; bars: mean over layers; dots: "
        "layers, from the first to the last.",
        footer(rows, looks_past=False),
        line_legend({**legend, "independent, uniform choices (K K / E)": UNIFORM}),
        width=8.5,
        body=3.4,
    )
    axes = figure.subplots()
    width = 0.8 / len(looks)
    for place, (group, look) in enumerate(looks.items()):
        for at, (_, part) in enumerate(rows[rows["group"] == group].groupby("tokens", observed=False)):
            if part.empty:
                continue
            x, shared = at - 0.4 + width * (place + 0.5), part["shared_experts"]
            axes.bar(x, shared.mean(), 0.92 * width, color=look.colour, alpha=0.85)
            if len(shared) > 1:
                spread = np.linspace(-0.3, 0.3, len(shared)) * width
                axes.plot(x + spread, shared, linestyle="none", marker=".", markersize=3.5, color=MUTED)
            top = (x, shared.max())
            axes.annotate(f"{shared.mean():.2f}", top, (0, 4), textcoords="offset points", ha="center", fontsize=8.5)
    top_k, num_experts = rows[["top_k", "num_experts"]].iloc[0]
    axes.axhline(top_k**2 / num_experts, **UNIFORM)
    axes.set_xticks(range(rows["tokens"].cat.categories.size), rows["tokens"].cat.categories)
    axes.set_ylabel(f"shared experts (of {top_k})")
    axes.grid(False, axis="x")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    return drawing(figure, rows.sort_values(["order", "tokens"], kind="stable"), "tokens", "layer", "shared_experts")
