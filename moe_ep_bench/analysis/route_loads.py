"""Figures of load: where it lies, how far the fullest expert or GPU is from the mean, what a capacity drops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from moe_ep_bench.analysis.route_load import RouteGroup, RouteRun, short
from moe_ep_bench.analysis.route_parts import (
    BALANCE,
    HEAT,
    MAX_PANELS,
    MEAN,
    NATIVE,
    by_field,
    few,
    figure_rows,
    footer,
    grid,
    heading,
    largest,
    layer_legend,
    layer_ticks,
    lines_of,
    look_line,
    not_drawn,
    ordered_line,
    thin_line,
    ticks,
    without,
)
from moe_ep_bench.analysis.style import GAMMA, INK, MUTED, Drawing, looks_of, panel_title, sheet
from moe_ep_bench.metrics import imbalance_factor

_TEXT_FILL, _IMAGE_FILL = "#0072B2", "#E69F00"
_IMAGES = {"facecolor": _IMAGE_FILL, "hatch": "////", "edgecolor": "white"}
_P95 = {"linewidth": 0.9, "marker": "_", "markersize": 11, "markeredgewidth": 1.4}


def heatmap_figure(run: RouteRun) -> Drawing | None:
    """Load by layer and expert, of native and of LASER at several c."""
    groups = [group for group in largest(run) if len(group.layers) > 1]
    if not groups:
        return None
    pools = lines_of(groups, "c", "laser", least=1)
    group = pools[0][0] if pools else groups[0]
    shown = {"native": "native"}
    for _, _, cases in pools[:1]:
        wider = cases.loc[cases["value"] > group.facts.top_k, "value"]
        shown |= {f"LASER, c = {c}": label for label, c in few(list(wider.items()), 3)}
    load_VLE = {name: group.loads(label, "load_over_mean_E").mean(axis=1) for name, label in shown.items()}
    columns = min(2, len(shown))
    figure = sheet(
        "Load of every expert in every layer",
        f"{group.title}. (Token, expert) pairs over the mean T K / E, mean over batches; one colour scale. Above a "
        "panel: the fullest expert of each batch and layer, mean over batches and layers.",
        footer([group], looks_past=len(shown) > 1),
        [],
        width=10.5 if columns == 2 else 6.5,
        body=-(-len(shown) // columns) * max(2.2, 0.1 * len(group.layers) + 0.9),
    )
    panels = grid(figure, len(shown), columns, sharex=True, sharey=True)
    colours = Normalize(0, max(load_LE.max() for load_LE in load_VLE.values()))
    image = None
    for axes, (name, load_LE) in zip(panels.flat, load_VLE.items(), strict=False):
        image = axes.imshow(load_LE, aspect="auto", cmap=HEAT, norm=colours, interpolation="nearest")
        panel_title(axes, f"{name}: {group.cases.loc[shown[name], 'expert_imbalance']:.2f}", 4)
        axes.grid(False)
        layer_ticks(axes, group.layer_names, axis="y")
        axes.set_xticks(ticks(load_LE.shape[1], 17))
        axes.label_outer()
    for axes in panels[-1]:
        axes.set_xlabel("expert")
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.01)
    bar.set_label("load (1 = mean)")
    bar.outline.set_visible(False)
    experts = range(group.facts.num_experts)
    rows = [
        pd.DataFrame({"label": shown[name], "layer": layer, "expert": experts, "load_over_mean": load_E})
        for name, load_LE in load_VLE.items()
        for layer, load_E in zip(group.layer_names, load_LE, strict=True)
    ]
    return Drawing(figure, figure_rows([(group, pd.concat(rows, ignore_index=True))]))


def violation_figure(run: RouteRun) -> Drawing | None:
    """Max violation by layer, of native and some policies."""
    every = [group for group in largest(run) if len(group.layers) > 1]
    groups = every[:MAX_PANELS]
    if not groups:
        return None
    labels = few(groups[0].cases.index[1:])
    looks = looks_of({label: short(label) for label in labels})
    rows = {
        group: group.of(["native", *labels])
        .assign(max_violation=lambda rows: rows["expert_imbalance"] - 1)
        .filter(["label", "layer", "max_violation"])
        for group in groups
    }
    figure = sheet(
        "Max violation by layer",
        heading(groups, "A panel for each workload") + "Max violation: pairs of the fullest "
        "expert over the mean expert's, less 1, of each batch, all ranks together; mean over batches.",
        footer(
            groups,
            *not_drawn("Policies", len(groups[0].cases) - 1 - len(labels)),
            *not_drawn("Workloads", len(every) - len(groups)),
            looks_past=groups[0].cases.loc[labels, "looks_past_top_k"].any(),
        ),
        [
            ("native", Line2D([], [], **NATIVE)),
            *((look.label, Line2D([], [], **look_line(look, 1.4, 4.5))) for look in looks.values()),
        ],
        width=10.5,
        body=3.0 * len(groups),
    )
    panels = grid(figure, len(groups), 1)[:, 0]
    for axes, (group, of_group) in zip(panels, rows.items(), strict=True):
        if len(groups) > 1:
            panel_title(axes, group.title, 9)
        for label, line in of_group.groupby("label", sort=False):
            style = {"zorder": 3, **NATIVE} if label == "native" else look_line(looks[label], 1.4, 4.5)
            axes.plot(range(len(line)), line["max_violation"], **style)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("max violation")
        layer_ticks(axes, group.layer_names, 26)
    return Drawing(figure, figure_rows(rows.items()))


def imbalance_figure(run: RouteRun) -> Drawing | None:
    """LASER's imbalance factor against c: median and 95th percentile over batches, per expert and per GPU."""
    every = [(group, cases) for group in largest(run) if len(cases := by_field(group, "c", "laser"))]
    if not every:
        return None
    rows = {group: _factors(group, cases) for group, cases in every[:MAX_PANELS]}
    groups = list(rows)
    looks = looks_of({line: short(line) for _, cases in every[: len(rows)] for line in cases["line"].unique()})
    facts = groups[0].facts
    weights = "alike" if facts.layer_weights is None else "by route.layer_weights"
    bounded = any("load_only" in group.cases.index for group in groups)
    figure = sheet(
        "Imbalance factor against c",
        heading(groups, "A row for each workload")
        + f"The fullest over the mean, of each layer and batch; layers weighted {weights}; median and 95th percentile "
        + f"over {facts.num_batches} batches.",
        footer(groups, *not_drawn("Workloads", len(every) - len(groups))),
        [
            ("native", Line2D([], [], **NATIVE)),
            *([("load_only (balance bound)", Line2D([], [], **BALANCE))] if bounded else []),
            *((look.label, Line2D([], [], **look_line(look, 1.4, 4.5))) for look in looks.values()),
            ("median", Line2D([], [], color=MUTED, linewidth=2.0, marker="o", markersize=4.5)),
            ("95th percentile", Line2D([], [], color=MUTED, **_P95)),
        ],
        width=10.5,
        body=3.3 * len(groups),
    )
    panels = grid(figure, 2 * len(groups), 2)
    for panels_of, (group, factors) in zip(panels, rows.items(), strict=True):
        placed = f"{group.facts.num_ranks} GPUs, {group.facts.placement.name} placement"
        for axes, of, title in zip(panels_of, ("expert", "GPU"), ("expert", f"GPU ({placed})"), strict=True):
            panel_title(axes, f"fullest {title}" + ("" if len(groups) == 1 else f"; {group.facts.traffic}"), 4.2)
            of_fullest = factors[factors["fullest"] == of]
            for name, wide in (("imbalance_factor_median", {"linewidth": 2.0}), ("imbalance_factor_p95", _P95)):
                for label, style in (("native", NATIVE), ("load_only", BALANCE)):
                    for factor in of_fullest.loc[of_fullest["label"] == label, name]:
                        axes.axhline(factor, **{**style, "linewidth": wide["linewidth"]})
                for line, values in of_fullest.groupby("line", sort=False):
                    look = looks[line]
                    edge = {"markeredgecolor": look.colour} if wide is _P95 else {}
                    axes.plot(values["c"], values[name], **{**look_line(look, 1.4, 4.5), **wide, **edge})
            axes.set_xticks(of_fullest.loc[of_fullest["line"] == of_fullest["line"].dropna().iloc[0], "c"])
            axes.set_xlabel("c (experts a token may choose from)")
            axes.set_ylabel("imbalance factor")
            axes.set_ylim(bottom=0.95)
    return Drawing(figure, figure_rows(rows.items()))


def _factors(group: RouteGroup, cases: pd.DataFrame) -> pd.DataFrame:
    """Median and 95th percentile over batches, of the cases and of what they lie between."""
    bounds: list[tuple[str, Any, Any]] = [
        (label, None, None) for label in ("native", "load_only") if label in group.cases.index
    ]
    shown = [*bounds, *zip(cases.index, cases["value"], cases["line"], strict=True)]
    rows = []
    for label, c, line in shown:
        for fullest, name in (("expert", "load_E"), ("GPU", "load_R")):
            factors_B = imbalance_factor(group.loads(label, name), group.facts.layer_weights)
            median, p95 = np.percentile(factors_B, [50, 95])
            rows.append([label, c, line, fullest, median, p95])
    columns = ["label", "c", "line", "fullest", "imbalance_factor_median", "imbalance_factor_p95"]
    return pd.DataFrame(rows, columns=columns)


def dropped_figure(run: RouteRun) -> Drawing | None:
    """Dropped share of the top-k pairs against the capacity factor, a line per layer."""
    every = lines_of(largest(run), "capacity_factor", "token_drop", "expanded_drop")
    found = every[: 3 * MAX_PANELS]
    if not found:
        return None
    columns = min(3, len(found))
    groups = list(dict.fromkeys(group for group, _, _ in found))
    layered = any(len(group.layers) > 1 for group in groups)
    names = max((group.layer_names for group in groups), key=len)
    figure = sheet(
        f"Dropped share against the capacity factor {GAMMA}",
        heading(groups, "A panel for each workload and policy")
        + "Top-k pairs that are not computed, all ranks together; mean over batches.",
        footer(
            groups,
            *not_drawn("Workloads and policies", len(every) - len(found)),
            looks_past=any(line.startswith("expanded") for _, line, _ in found),
        ),
        [
            *(layer_legend(names) if len(names) > 1 else []),
            ("mean over layers" if layered else "one layer", Line2D([], [], **MEAN)),
        ],
        width=max(3.6 * columns + 0.4, 6.5),
        body=2.9 * -(-len(found) // columns),
    )
    panels = grid(figure, len(found), columns, sharey=True)
    rows = []
    for axes, (group, line, cases) in zip(panels.flat, found, strict=False):
        panel_title(axes, line if len(groups) == 1 else f"{group.facts.model}: {line}, {group.facts.traffic}", 3.2)
        of_layers = group.of(cases.index).assign(dropped_percent=lambda rows: 100 * rows["dropped_share"])
        share_GL = of_layers["dropped_percent"].to_numpy().reshape(len(cases), -1)
        for place, share_G in enumerate(share_GL.T) if share_GL.shape[1] > 1 else ():
            axes.plot(cases["value"], share_G, **thin_line(place, share_GL.shape[1]))
        axes.plot(cases["value"], share_GL.mean(axis=1), zorder=3, **MEAN)
        axes.set_xlabel(f"capacity factor {GAMMA}")
        rows.append((group, of_layers[["label", "layer", "dropped_percent"]]))
    panels[0, 0].set_ylim(bottom=0)  # Of all panels; before the last is drawn it would fix their top too.
    for axes in panels[:, 0]:
        axes.set_ylabel("dropped (% of top-k pairs)")
    return Drawing(figure, figure_rows(rows))


def expanded_figure(run: RouteRun) -> Drawing | None:
    """Normalised load under Expanded Drop for several numbers of candidates m."""
    every = lines_of(largest(run), "num_candidates", "expanded_drop")
    found = every[:MAX_PANELS]
    if not found:
        return None
    groups = [group for group, _, _ in found]
    in_percent = {
        "computed_percent_of_topk_pairs": ("computed pairs", ordered_line(0, 2, color="#0072B2")),
        "retained_mass_percent": ("score mass", ordered_line(1, 2, color="#CC79A7")),
    }
    first = found[0][2]["value"]
    figure = sheet(
        "Load under Expanded Drop against the number of candidates m",
        heading(groups, "A row for each workload and policy")
        + "Pairs over the model's mean T K / E. Left: experts of each batch and layer by falling load, then means. "
        "Right: means over batches and layers.",
        footer(groups, *not_drawn("Workloads and policies", len(every) - len(found))),
        [
            ("native", Line2D([], [], **NATIVE)),
            *(
                (f"m = {m}", Line2D([], [], **ordered_line(place, len(first), marker="none")))
                for place, m in enumerate(first)
            ),
            *((f"right: {name}", Line2D([], [], **line)) for name, line in in_percent.values()),
        ],
        width=10.5,
        body=3.4 * len(found),
    )
    panels = grid(figure, 2 * len(found), 2, width_ratios=[1.5, 1])
    rows = []
    for (by_expert, by_m), (group, line, cases) in zip(panels, found, strict=True):
        shown = pd.concat([group.cases.loc[["native"]], cases])
        shown = shown.assign(
            computed_percent_of_topk_pairs=100 * shown["experts_per_token"] / group.facts.top_k,
            retained_mass_percent=100 * shown["retained_mass"],
        )
        # Sorted in every batch and layer before they are averaged.
        falling_VE = [
            -np.sort(-group.loads(label, "load_over_mean_E")).mean(axis=1).mean(axis=0) for label in shown.index
        ]
        panel_title(by_expert, line, 5.5)
        experts = range(1, group.facts.num_experts + 1)
        for place, load_E in enumerate(falling_VE[1:]):
            by_expert.plot(experts, load_E, **ordered_line(place, len(cases), marker="none"))
        by_expert.plot(experts, falling_VE[0], **NATIVE)
        by_expert.axhline(1, **BALANCE)
        by_expert.set_xlabel("experts, the fullest first")
        by_expert.set_ylabel("load (1 = mean)")
        by_expert.set_ylim(bottom=0)
        panel_title(by_m, "computed pairs, and mass kept", 3.5)
        for name, (_, style) in in_percent.items():
            by_m.plot(cases["value"], shown.loc[cases.index, name], **style)
        by_m.set_xticks(cases["value"])
        by_m.set_xlabel("candidates m, " + ("anywhere" if "scope=global" in line else "on the token's own rank"))
        by_m.set_ylabel("% of the top-k's")
        of_cases = shown.reset_index().rename(columns={"value": "num_candidates"}).assign(load_over_mean=falling_VE)
        of_cases = of_cases[["label", "num_candidates", "load_over_mean", *in_percent]].explode("load_over_mean")
        of_cases.insert(2, "place", of_cases.groupby("label").cumcount() + 1)
        rows.append((group, of_cases.astype({"load_over_mean": float})))
    return Drawing(figure, figure_rows(rows))


def modality_figure(run: RouteRun) -> Drawing | None:
    """Text and image tokens per expert where a capacity prefers one or the other."""
    for group in largest(run):
        favours = group.cases["params"].map(lambda params: params.get("modality", "uniform") != "uniform")
        favouring = group.cases.index[favours]
        if len(favouring) and "image_load_E" in group.batches:
            break
    else:
        return None
    alike = without(favouring[0], "modality")
    shown = ["native", *([alike] if alike in group.cases.index else []), *favouring][:MAX_PANELS]
    place = int(np.argmax(group.of(["native"])["expert_imbalance"]))
    layer = group.layers[place]
    order_E = np.argsort(-group.loads("native", "load_E")[place].sum(axis=0), kind="stable")
    rows = {}
    for label in shown:
        # The mean of the model's load, whatever the policy computes.
        pairs_LB = group.loads(label, "load_over_mean_E")
        image_BE = group.loads(label, "image_load_E")[place]
        topk_B = group.batches.loc[group.batches["label"] == label, "num_topk_pairs"].to_numpy()
        topk_B = topk_B.reshape(len(group.layers), -1)[place]
        image_E = (image_BE * group.facts.num_experts / topk_B[:, None]).mean(axis=0)[order_E]
        all_E = pairs_LB[place].mean(axis=0)[order_E]
        of_expert = {"text_load_over_mean": all_E - image_E, "image_load_over_mean": image_E}
        rows[label] = pd.DataFrame({"label": label, "layer": layer, "expert": order_E, **of_expert})
    # A load of 1 is as high in every panel.
    loads = ["text_load_over_mean", "image_load_over_mean"]
    tops = [max(1.25, 1.1 * of[loads].sum(axis=1).max()) for of in rows.values()]
    figure = sheet(
        "Text and image tokens per expert under modality priorities",
        f"{group.title}; layer {layer}, the one with the fullest expert. Pairs over the model's mean "
        "T K / E, mean over batches; experts in the order of their load under native. image_first drops images before "
        "any text, text_first text before any image.",
        footer(
            [group],
            f"Assumed: the first {group.facts.image_share:.0%} of every sequence's tokens stand for an image. Their "
            "scores are those of text, so the figure shows what priorities do, not how images are routed.",
            looks_past=False,
        ),
        [("text", Patch(facecolor=_TEXT_FILL)), ("image (assumed)", Patch(**_IMAGES))],
        width=10.5,
        body=0.6 * len(shown) + 0.8 * sum(tops),
    )
    panels = figure.subplots(len(shown), 1, squeeze=False, sharex=True, height_ratios=tops)[:, 0]
    edges = np.arange(len(order_E) + 1) + 0.5
    for axes, (label, of), top in zip(panels, rows.items(), tops, strict=True):
        text_E, image_E = of["text_load_over_mean"], of["image_load_over_mean"]
        axes.stairs(text_E, edges, fill=True, color=_TEXT_FILL)
        axes.stairs(text_E + image_E, edges, baseline=text_E, fill=True, linewidth=0, **_IMAGES)
        share = image_E.sum() / max(image_E.sum() + text_E.sum(), 1e-12)
        panel_title(axes, f"{label}: images hold {share:.0%} of the computed pairs", 9)
        axes.axhline(1, **{**BALANCE, "color": INK})
        axes.set_ylabel("load (1 = mean)")
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, top)
        axes.yaxis.set_major_locator(MultipleLocator(0.5 if top < 2 else 1))
        axes.grid(False, axis="x")
    panels[-1].set_xlabel("experts, the fullest under native first")
    return Drawing(figure, figure_rows([(group, pd.concat(rows.values(), ignore_index=True))]))
