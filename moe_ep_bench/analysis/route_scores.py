"""Figures of what policies have to work with: how scores fall, how sure tokens are, how alike they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.marks import table
from moe_ep_bench.analysis.route_load import RoutedLayer, RouteGroup, RouteRun
from moe_ep_bench.analysis.route_parts import (
    MAX_PANELS,
    UNIFORM,
    footer,
    heading,
    largest,
    layer_ticks,
    not_drawn,
    route_mark,
    workload_mark,
    workload_name,
)
from moe_ep_bench.analysis.style import INK, MUTED, NOISE_FILL, Drawing, looks_of, panel_title, sheet
from moe_ep_bench.workload.formatting import tokens_words

_BANDS = ("early", "middle", "final")
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
    figure = sheet(
        "Gate score by place in a token's order",
        heading(groups, "A panel for each workload, or for each third of its layers")
        + "Scores sum to 1 over all experts; least and greatest over all tokens and batches."
        + (
            " Behind the top-k the recording holds no scores: what is drawn there is the tail model."
            if modelled
            else ""
        ),
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
    panels = figure.subplots(-(-len(parts) // columns), columns, squeeze=False, sharey=True)
    for axes, (group, band, layers) in zip(panels.flat, parts, strict=False):
        panel_title(axes, _decay_title(group, band, layers, groups), 3 if columns > 1 else 5)
        _draw_decay(axes, layers)
    for axes in list(panels.flat)[len(parts) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("score (share of mass)")
    marks = []
    for group, band, layers in parts:
        where = {"first_layer": layers[0].facts.layer, "last_layer": layers[-1].facts.layer, "band": band or None}
        for place, (mean, least, most) in enumerate(zip(*_decay(layers), strict=True), start=1):
            scores = {"score_mean": mean, "score_least": least, "score_greatest": most}
            assumed = bool(modelled and place > group.facts.top_k and group.facts.workload.tail_model)
            marks.append(workload_mark(group, **where, place=place, **scores, is_tail_model=assumed))
    return Drawing(figure, table(marks))


def _bands(group: RouteGroup) -> list[tuple[str, Sequence[RoutedLayer]]]:
    """The thirds of a group's depth; all of it where it has fewer layers than thirds."""
    if len(group.layers) < len(_BANDS):
        return [("", group.layers)]
    parts = np.array_split(np.arange(len(group.layers)), len(_BANDS))
    return [(band, [group.layers[place] for place in part]) for band, part in zip(_BANDS, parts, strict=True)]


def _decay_title(group: RouteGroup, band: str, layers: Sequence[RoutedLayer], groups: Sequence[RouteGroup]) -> str:
    first, last = layers[0].facts.layer, layers[-1].facts.layer
    if first is None:
        return workload_name(group, groups)
    where = (f"{band}: " if band else "") + (f"layer {first}" if first == last else f"layers {first} to {last}")
    return where if len(groups) == 1 else f"{where}; {workload_name(group, groups)}"


def _draw_decay(axes, layers) -> None:
    facts = layers[0].facts
    places = np.arange(1, facts.num_experts + 1)
    mean_E, least_E, most_E = _decay(layers)
    if facts.workload.tail_model:
        axes.axvspan(facts.top_k + 0.5, facts.num_experts + 0.5, color=NOISE_FILL, linewidth=0, zorder=0)
    axes.fill_between(
        places, np.maximum(least_E, _LEAST_SCORE), np.maximum(most_E, _LEAST_SCORE), color="#B9D8EC", linewidth=0
    )
    axes.plot(places, np.maximum(mean_E, _LEAST_SCORE), color=INK, linewidth=2)
    axes.axvline(facts.top_k + 0.5, **UNIFORM)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda score, _: f"{score:g}".replace("e-0", "e-"))
    axes.set_xlim(0.5, facts.num_experts + 0.5)
    axes.set_xlabel("place (1 = best expert)")


def _decay(layers: Sequence[RoutedLayer]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores by place, over layers, batches and tokens: mean, least and greatest, each [E]."""
    by_layer = [layer.scores.groupby("position") for layer in layers]
    mean_E = np.mean([scores["mean_score"].mean() for scores in by_layer], axis=0)
    least_E = np.min([scores["min_score"].min() for scores in by_layer], axis=0)
    most_E = np.max([scores["max_score"].max() for scores in by_layer], axis=0)
    return mean_E, least_E, most_E


def scores_figure(run: RouteRun) -> Drawing | None:
    """Top-k share, entropy and regimes of the tokens by layer, a row for each workload, prefill beside decode."""
    groups = sorted(largest(run), key=lambda group: (group.facts.model, group.facts.phase != "prefill"))
    every = [group for group in groups if len(group.layers) > 1]
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
            ("top-k share", Line2D([], [], color="#0072B2", marker="o", markersize=4.5)),
            ("entropy", Line2D([], [], color="#D55E00", marker="s", markersize=4.5, linestyle="--")),
            *((name.replace("_", "-"), Patch(facecolor=colour)) for name, colour in _REGIMES.items()),
        ],
        width=10.5,
        body=2.8 * len(groups),
    )
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for (lines, bars), group in zip(panels, groups, strict=True):
        counts = [layer.native.counts_B.mean() for layer in group.layers]
        places = np.arange(len(counts))
        of = f": {workload_name(group, groups)}" if len(groups) > 1 else ""
        panel_title(lines, f"share and entropy{of}", 4.2)
        lines.plot(places, [count["topk_share"] for count in counts], color="#0072B2", marker="o", markersize=4.5)
        lines.plot(
            places, [count["entropy"] for count in counts], color="#D55E00", marker="s", markersize=4.5, linestyle="--"
        )
        lines.set_ylim(0, 1.02)
        layer_ticks(lines, group)
        lines.set_ylabel("top-k share, entropy (0 to 1)")
        panel_title(bars, f"regimes{of}", 4.2)
        bottom = np.zeros(len(counts))
        for name, colour in _REGIMES.items():
            share = 100 * np.array([count[f"regime_{name}"] for count in counts])
            bars.bar(places, share, 0.85, bottom, color=colour, edgecolor="white", linewidth=0.4)
            bottom += share
        bars.set_ylim(0, 100)
        layer_ticks(bars, group)
        bars.set_ylabel("tokens (%)")
        bars.grid(False, axis="x")
    marks = []
    for group in groups:
        for layer, native in zip(group.layer_names, group.cases("native"), strict=True):
            count = native.counts_B.mean()
            regimes = {f"{name}_percent_of_tokens": 100 * count[f"regime_{name}"] for name in _REGIMES}
            shares = {"topk_share": count["topk_share"], "entropy": count["entropy"]}
            marks.append(route_mark(group, native, layer=layer, **shares, **regimes))
    return Drawing(figure, table(marks))


def overlap_figure(run: RouteRun) -> Drawing | None:
    """Experts that two tokens share, by what the tokens have to do with each other."""
    found = [(group, shared) for group in largest(run) if len(shared := _shared_experts(group)) > 1]
    if not found:
        return None
    kinds = [kind for kind in _KINDS if any(kind in shared for _, shared in found)]
    looks = looks_of({str(place): _short(group) for place, (group, _) in enumerate(found)})
    figure = sheet(
        "Experts that two tokens share",
        heading([group for group, _ in found], "A colour for each workload")
        + "Experts in both tokens' top-k, mean over all such pairs of a batch; bars: mean over layers; dots: "
        "layers, from the first to the last.",
        footer([group for group, _ in found], looks_past=False),
        [
            *((look.label, Patch(facecolor=look.colour)) for look in looks.values() if len(found) > 1),
            ("independent, uniform choices (K K / E)", Line2D([], [], **UNIFORM)),
        ],
        width=8.5,
        body=3.4,
    )
    axes = figure.subplots()
    width = 0.8 / len(found)
    for place, ((_, shared), look) in enumerate(zip(found, looks.values(), strict=True)):
        for column, kind in enumerate(kinds):
            if kind not in shared:
                continue
            x = column - 0.4 + width * (place + 0.5)
            axes.bar(x, shared[kind].mean(), 0.92 * width, color=look.colour, alpha=0.85)
            if len(shared[kind]) > 1:
                spread = np.linspace(-0.3, 0.3, len(shared[kind])) * width
                axes.plot(x + spread, shared[kind], linestyle="none", marker=".", markersize=3.5, color=MUTED)
            axes.annotate(
                f"{shared[kind].mean():.2f}",
                (x, max(shared[kind])),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
    facts = found[0][0].facts
    axes.axhline(facts.top_k**2 / facts.num_experts, **UNIFORM)
    axes.set_xticks(range(len(kinds)), [_KINDS[kind] for kind in kinds])
    axes.set_ylabel(f"shared experts (of {facts.top_k})")
    axes.grid(False, axis="x")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    marks = [
        workload_mark(group, tokens=_KINDS[kind], layer=layer, shared_experts=value)
        for group, shared in found
        for kind in kinds
        if kind in shared
        for layer, value in zip(_overlap_layers(group, kind), shared[kind], strict=True)
    ]
    return Drawing(figure, table(marks))


def _overlap_layers(group: RouteGroup, kind: str) -> list[str]:
    """The layers that have pairs of a kind."""
    named = zip(group.layer_names, group.layers, strict=True)
    return [name for name, layer in named if (layer.overlap["kind"] == kind).any()]


def _short(group: RouteGroup) -> str:
    return f"{group.facts.model}, {group.facts.traffic}, {tokens_words(group.facts.num_tokens)}"


def _shared_experts(group: RouteGroup) -> dict[str, np.ndarray]:
    """By kind of pair: experts shared in every layer, mean over all pairs of all batches."""
    found: dict[str, list[float]] = {}
    for layer in group.layers:
        for kind, rows in layer.overlap.groupby("kind"):
            mean = float((rows["shared_experts"] * rows["num_pairs"]).sum() / rows["num_pairs"].sum())
            found.setdefault(str(kind), []).append(mean)
    return {kind: np.array(values) for kind, values in found.items()}
