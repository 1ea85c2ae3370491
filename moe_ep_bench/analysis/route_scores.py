"""Figures of what policies have to work with: how scores fall, how sure tokens are, how alike they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.route_load import RouteGroup, RouteRun
from moe_ep_bench.analysis.route_parts import (
    MAX_PANELS,
    UNIFORM,
    figure_rows,
    footer,
    grid,
    heading,
    largest,
    layer_ticks,
    not_drawn,
    workload_name,
)
from moe_ep_bench.analysis.style import INK, MUTED, NOISE_FILL, Drawing, looks_of, panel_title, sheet
from moe_ep_bench.workload.formatting import tokens_words

_BANDS = ("early", "middle", "final")
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
    every = largest(run)
    parts = [(group, *part) for group in every for part in _bands(group)][: MAX_PANELS * len(_BANDS)]
    groups = list(dict.fromkeys(group for group, _, _ in parts))
    columns = min(len(_BANDS), len(parts))
    modelled = any(group.facts.workload.tail_model for group in groups)
    assumed = " Behind the top-k the recording holds no scores: what is drawn there is the tail model."
    figure = sheet(
        "Gate score by place in a token's order",
        heading(groups, "A panel for each workload, or for each third of its layers")
        + "Scores sum to 1 over all experts; least and greatest over all tokens and batches."
        + (assumed if modelled else ""),
        footer(groups, *not_drawn("Workloads", len(every) - len(groups)), looks_past=modelled),
        [
            ("mean over tokens", Line2D([], [], color=INK, linewidth=2)),
            ("least to greatest", Patch(facecolor="#B9D8EC")),
            ("the model's top-k ends", Line2D([], [], **UNIFORM)),
            *([("assumed (tail model)", Patch(facecolor=NOISE_FILL))] if modelled else []),
        ],
        width=10.5 if columns > 1 else 6.5,
        body=2.9 * -(-len(parts) // columns),
    )
    panels = grid(figure, len(parts), columns, sharey=True)
    rows = []
    for axes, (group, band, layers) in zip(panels.flat, parts, strict=False):
        panel_title(axes, _decay_title(group, band, layers, groups), 3 if columns > 1 else 5)
        of = _decay(group, band, layers)
        _draw_decay(axes, group, of)
        rows.append((group, of))
    for axes in panels[:, 0]:
        axes.set_ylabel("score (share of mass)")
    return Drawing(figure, figure_rows(rows))


def _bands(group: RouteGroup) -> list[tuple[str, Sequence[int | None]]]:
    """The thirds of a group's depth; all of it where it has fewer layers than thirds."""
    if len(group.layers) < len(_BANDS):
        return [("", group.layers)]
    parts = np.array_split(np.arange(len(group.layers)), len(_BANDS))
    return [(band, [group.layers[place] for place in part]) for band, part in zip(_BANDS, parts, strict=True)]


def _decay_title(group: RouteGroup, band: str, layers: Sequence[int | None], groups: Sequence[RouteGroup]) -> str:
    first, last = layers[0], layers[-1]
    if first is None:
        return workload_name(group, groups)
    where = (f"{band}: " if band else "") + (f"layer {first}" if first == last else f"layers {first} to {last}")
    return where if len(groups) == 1 else f"{where}; {workload_name(group, groups)}"


def _decay(group: RouteGroup, band: str, layers: Sequence[int | None]) -> pd.DataFrame:
    """Scores by place, over layers, batches and tokens."""
    scores = group.scores[group.scores["layer"].isin(["-" if layer is None else str(layer) for layer in layers])]
    rows = scores.groupby("position").agg(
        score_mean=("mean_score", "mean"), score_least=("min_score", "min"), score_greatest=("max_score", "max")
    )
    is_assumed = bool(group.facts.workload.tail_model) & (rows.index > group.facts.top_k)
    about = {"first_layer": layers[0], "last_layer": layers[-1], "band": band or None, "place": rows.index}
    return pd.DataFrame({**about, **rows, "is_tail_model": is_assumed}, index=rows.index)


def _draw_decay(axes: Axes, group: RouteGroup, rows: pd.DataFrame) -> None:
    num_experts, top_k = group.facts.num_experts, group.facts.top_k
    drawn = rows.filter(like="score_").clip(lower=_LEAST_SCORE)
    if group.facts.workload.tail_model:
        axes.axvspan(top_k + 0.5, num_experts + 0.5, color=NOISE_FILL, linewidth=0, zorder=0)
    axes.fill_between(rows["place"], drawn["score_least"], drawn["score_greatest"], color="#B9D8EC", linewidth=0)
    axes.plot(rows["place"], drawn["score_mean"], color=INK, linewidth=2)
    axes.axvline(top_k + 0.5, **UNIFORM)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda score, _: f"{score:g}".replace("e-0", "e-"))
    axes.set_xlim(0.5, num_experts + 0.5)
    axes.set_xlabel("place (1 = best expert)")


def scores_figure(run: RouteRun) -> Drawing | None:
    """Top-k share, entropy and regimes of the tokens by layer, a row for each workload, prefill beside decode."""
    every = [group for group in largest(run) if len(group.layers) > 1]
    every.sort(key=lambda group: (group.facts.model, group.facts.phase != "prefill"))
    groups = every[:MAX_PANELS]
    if not groups:
        return None
    modelled = any(group.facts.workload.tail_model for group in groups)
    figure = sheet(
        "How sure tokens are of their experts, by layer",
        heading(groups, "A row for each workload") + "Top-k share: of a token's score mass. "
        "Entropy: of its scores, over log E. Single-head: the best holds half of the top-k mass or more; plateau: the "
        "last of the top-k reaches 0.8 of the best; smooth: the rest.",
        footer(
            groups,
            *(["The entropy rests on the tail model."] if modelled else []),
            *not_drawn("Workloads", len(every) - len(groups)),
            looks_past=modelled,
        ),
        [
            *((words, Line2D([], [], **line)) for words, line in _LINES.values()),
            *((name.replace("_", "-"), Patch(facecolor=colour)) for name, colour in _REGIMES.items()),
        ],
        width=10.5,
        body=2.8 * len(groups),
    )
    rows = []
    for (lines, bars), group in zip(grid(figure, 2 * len(groups), 2), groups, strict=True):
        of = group.of(["native"])
        of = of.assign(**{f"{name}_percent_of_tokens": 100 * of[f"regime_{name}"] for name in _REGIMES})
        name_of = f": {workload_name(group, groups)}" if len(groups) > 1 else ""
        panel_title(lines, f"share and entropy{name_of}", 4.2)
        for name, (_, line) in _LINES.items():
            lines.plot(of.index, of[name], **line)
        lines.set_ylim(0, 1.02)
        lines.set_ylabel("top-k share, entropy (0 to 1)")
        panel_title(bars, f"regimes{name_of}", 4.2)
        bottom = np.zeros(len(of))
        for name, colour in _REGIMES.items():
            share = of[f"{name}_percent_of_tokens"]
            bars.bar(of.index, share, 0.85, bottom, color=colour, edgecolor="white", linewidth=0.4)
            bottom += share
        bars.set_ylim(0, 100)
        bars.set_ylabel("tokens (%)")
        bars.grid(False, axis="x")
        for axes in (lines, bars):
            layer_ticks(axes, group.layer_names)
        rows.append((group, of[["label", "layer", *_LINES, *(f"{name}_percent_of_tokens" for name in _REGIMES)]]))
    return Drawing(figure, figure_rows(rows))


def overlap_figure(run: RouteRun) -> Drawing | None:
    """Experts that two tokens share, by what the tokens have to do with each other."""
    found = [(group, rows) for group in largest(run) if (rows := _shared_experts(group))["tokens"].nunique() > 1]
    if not found:
        return None
    groups = [group for group, _ in found]
    kinds = [kind for kind in _KINDS.values() if any(kind in set(rows["tokens"]) for _, rows in found)]
    looks = looks_of({str(place): _short(group) for place, group in enumerate(groups)})
    figure = sheet(
        "Experts that two tokens share",
        heading(groups, "A colour for each workload")
        + "Experts in both tokens' top-k, mean over all such pairs of a batch; bars: mean over layers; dots: "
        "layers, from the first to the last.",
        footer(groups, looks_past=False),
        [
            *((look.label, Patch(facecolor=look.colour)) for look in looks.values() if len(found) > 1),
            ("independent, uniform choices (K K / E)", Line2D([], [], **UNIFORM)),
        ],
        width=8.5,
        body=3.4,
    )
    axes = figure.subplots()
    width = 0.8 / len(found)
    for place, ((_, rows), look) in enumerate(zip(found, looks.values(), strict=True)):
        for kind, shared in rows.groupby("tokens", sort=False)["shared_experts"]:
            x = kinds.index(kind) - 0.4 + width * (place + 0.5)
            axes.bar(x, shared.mean(), 0.92 * width, color=look.colour, alpha=0.85)
            if len(shared) > 1:
                spread = np.linspace(-0.3, 0.3, len(shared)) * width
                axes.plot(x + spread, shared, linestyle="none", marker=".", markersize=3.5, color=MUTED)
            top = (x, shared.max())
            axes.annotate(f"{shared.mean():.2f}", top, (0, 4), textcoords="offset points", ha="center", fontsize=8.5)
    facts = groups[0].facts
    axes.axhline(facts.top_k**2 / facts.num_experts, **UNIFORM)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel(f"shared experts (of {facts.top_k})")
    axes.grid(False, axis="x")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    return Drawing(figure, figure_rows(found))


def _short(group: RouteGroup) -> str:
    return f"{group.facts.model}, {group.facts.traffic}, {tokens_words(group.facts.num_tokens)}"


def _shared_experts(group: RouteGroup) -> pd.DataFrame:
    """Experts shared by kind of pair and layer, mean over all pairs of all batches."""
    pairs = group.overlap[["kind", "layer", "num_pairs"]].assign(
        shared_experts=group.overlap["shared_experts"] * group.overlap["num_pairs"]
    )
    sums = pairs.groupby(["kind", "layer"], sort=False).sum().reset_index()
    rows = pd.concat([sums[sums["kind"] == kind] for kind in _KINDS], ignore_index=True)
    shared = (rows["shared_experts"] / rows["num_pairs"]).astype(float)
    return pd.DataFrame({"tokens": rows["kind"].map(_KINDS), "layer": rows["layer"], "shared_experts": shared})
