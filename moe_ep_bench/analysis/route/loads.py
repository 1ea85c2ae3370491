"""Figures of load: where it lies, how far the fullest expert or GPU is from the mean, what a capacity drops."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from moe_ep_bench.analysis.route.load import RouteRun, short
from moe_ep_bench.analysis.route.parts import (
    BALANCE,
    HEAT,
    MAX_PANELS,
    MEAN,
    NATIVE,
    drawing,
    few,
    footer,
    largest,
    layer_legend,
    layer_ticks,
    line_legend,
    not_drawn,
    ordered_line,
    page,
    split,
    swept,
    thin_line,
    ticks,
    without,
)
from moe_ep_bench.analysis.style import GAMMA, INK, MUTED, Drawing, is_narrow, looks_of, panel_title, sheet
from moe_ep_bench.metrics import imbalance

_TEXT = {"facecolor": "#0072B2"}
_IMAGES = {"facecolor": "#E69F00", "hatch": "////", "edgecolor": "white"}
_P95 = {"linestyle": "none", "linewidth": 0.9, "marker": "_", "markersize": 11, "markeredgewidth": 1.4}


def heatmap_figure(run: RouteRun) -> Drawing | None:
    """Load by layer and expert, of native and of LASER at several c."""
    cases = largest(run.cases)
    cases = cases[cases["num_layers"] > 1]
    if cases.empty:
        return None
    pools = split(swept(cases, "c", "laser", least=1), "group", "line")
    first = (pools[0] if pools else cases).iloc[0]
    own = cases[(cases["group"] == first["group"]) & (cases["label"] == "native")].assign(name="native")
    if pools:
        wider = pools[0][pools[0]["value"] > first["top_k"]]
        wider = wider.iloc[few(range(len(wider)), 3)]
        own = pd.concat([own, wider.assign(name="LASER, c = " + wider["value"].astype(str))])
    layers = run.layers.loc[run.layers["group"] == first["group"], "layer"].unique()
    load_VLE = [run.loads(first["group"], label, "load_over_mean_E").mean(axis=1) for label in own["label"]]
    header = (
        "Load of every expert in every layer",
        f"{first['comparison']}. (Token, expert) pairs over the mean T K / E, mean over batches; one colour scale. "
        "Above a panel: the fullest expert of each batch and layer, mean over batches and layers.",
        footer(own, looks_past=len(own) > 1),
    )
    titles = [f"{case.name}: {case.fullest_expert:.2f}" for case in own.itertuples()]
    figure, panels = _heat_sheet(
        header, titles, load_VLE, "load (1 = mean)", max(2.2, 0.1 * len(layers) + 0.9), aspect="auto"
    )
    for axes in panels.flat[: len(own)]:
        layer_ticks(axes, layers, axis="y")
        axes.set_xticks(ticks(load_VLE[0].shape[1], 17))
        axes.label_outer()
    for axes in panels[-1]:
        axes.set_xlabel("expert")
    rows = own.assign(layer=[list(layers)] * len(own), load_over_mean=[list(load_LE) for load_LE in load_VLE])
    return drawing(figure, _by_expert(rows.explode(["layer", "load_over_mean"])), "layer", "expert", "load_over_mean")


def _heat_sheet(
    header: tuple, titles: list[str], values_V: list[np.ndarray], label: str, height: float, aspect: str = "equal"
) -> tuple[Figure, np.ndarray]:
    """A sheet with a panel for each matrix, all on one scale of colours; ``height`` is a row's, in inches."""
    columns = 1 if is_narrow() else min(2, len(titles))
    num_rows = -(-len(titles) // columns)
    figure = sheet(*header, [], width=10.5 if len(titles) > 1 else 6.5, body=num_rows * height)
    panels = figure.subplots(num_rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat[len(titles) :]:
        axes.set_visible(False)
    colours = Normalize(0, max(np.max(values_V), 1e-9))
    for axes, title, values in zip(panels.flat, titles, values_V, strict=False):
        image = axes.imshow(values, aspect=aspect, cmap=HEAT, norm=colours, interpolation="nearest")
        panel_title(axes, title, 4)
        axes.grid(False)
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.01)
    bar.set_label(label)
    bar.outline.set_visible(False)
    return figure, panels


def traffic_figure(run: RouteRun) -> Drawing | None:
    """Bytes that every rank sends to every rank's experts in a layer, of native and a few policies."""
    cases = largest(run.cases)
    cases = cases[(cases["num_ranks"] > 1) & cases["bytes_per_pair"].notna()]
    if cases.empty:
        return None
    own = split(cases, "group")[0]
    names = own["label"].unique()[1:]
    own = own[own["label"].isin(["native", *few(names, 3)])]
    first, size = own.iloc[0], own["num_ranks"].iloc[0]
    pairs_VRR = [
        run.loads(first["group"], label, "pairs_RR").mean(axis=(0, 1)).reshape(size, size) for label in own["label"]
    ]
    header = (
        "Bytes from every rank to every rank's experts",
        f"{first['comparison']}. A layer's dispatch, mean of batches and layers: {first['bytes_per_pair']:,.0f} bytes "
        "for every (token, expert) pair; the diagonal stays on its rank. Combine sends as much back.",
        footer(own, not_drawn(len(names) - len(own) + 1, "policies"), looks_past=own["looks_past_top_k"].any()),
    )
    megabytes = [pairs_RR * (first["bytes_per_pair"] / 1e6) for pairs_RR in pairs_VRR]
    figure, panels = _heat_sheet(header, [short(label) for label in own["label"]], megabytes, "MB", 3.2)
    for axes in panels.flat[: len(own)]:
        axes.set_xticks(ticks(size, 9))
        axes.set_yticks(ticks(size, 9))
        axes.set_ylabel("from rank")
        axes.label_outer()
    for axes in panels[-1]:
        axes.set_xlabel("to the experts of rank")
    source, target = np.divmod(np.arange(size * size), size)
    rows = own.take(np.repeat(np.arange(len(own)), size * size)).assign(
        from_rank=np.tile(source, len(own)),
        to_rank=np.tile(target, len(own)),
        pairs=np.concatenate(pairs_VRR, axis=None),
    )
    rows["bytes"] = rows["pairs"] * rows["bytes_per_pair"]
    return drawing(figure, rows, "from_rank", "to_rank", "pairs", "bytes")


def _by_expert(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per expert, of rows with an array of loads."""
    experts = [range(len(load_E)) for load_E in rows["load_over_mean"]]
    return rows.assign(expert=experts).explode(["expert", "load_over_mean"]).astype({"load_over_mean": float})


def violation_figure(run: RouteRun) -> Drawing | None:
    """Imbalance of experts, less 1, by layer: native and a few policies."""
    layers = largest(run.layers).assign(max_violation=lambda rows: rows["expert_imbalance"] - 1)
    layers = layers[layers["num_layers"] > 1]
    if layers.empty:
        return None
    names = split(layers, "group")[0]["label"].unique()[1:]
    labels = few(names)
    looks = looks_of({label: short(label) for label in labels})
    figure, panels = page(
        "Max violation by layer",
        "Max violation: pairs of the fullest expert over the mean of the computed pairs, less 1, of each batch, all "
        "ranks together; mean over batches.",
        split(layers[layers["label"].isin(["native", *labels])], "group"),
        {"native": NATIVE, **{look.label: look.marks for look in looks.values()}},
        height=3.0,
        notes=not_drawn(len(names) - len(labels), "policies"),
        looks_past=layers.loc[layers["label"].isin(labels), "looks_past_top_k"].any(),
    )
    for axes, part in panels:
        if len(panels) > 1:
            panel_title(axes, part["comparison"].iloc[0], 9)
        for label, line in part.groupby("label", sort=False):
            style = {"zorder": 3, **NATIVE} if label == "native" else looks[label].marks
            axes.plot(range(len(line)), line["max_violation"], **style)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("max violation")
        layer_ticks(axes, part["layer"].unique(), 26)
    return drawing(figure, pd.concat([part for _, part in panels]), "layer", "max_violation")


def imbalance_figure(run: RouteRun) -> Drawing | None:
    """LASER's imbalance factor against c: median and 95th percentile over batches, per expert and per GPU."""
    cases = largest(run.cases)
    pools = swept(cases, "c", "laser").rename(columns={"value": "c"})
    if pools.empty:
        return None
    bounds = cases[cases["label"].isin(["native", "load_only"]) & cases["group"].isin(pools["group"])]
    cases = pd.concat([bounds, pools])
    factors = []
    for fullest, name in (("expert", "load_E"), ("GPU", "load_R")):
        factors_VB = [imbalance(run.loads(case.group, case.label, name)).mean(axis=0) for case in cases.itertuples()]
        median, p95 = np.transpose([np.percentile(factors_B, [50, 95]) for factors_B in factors_VB])
        factors.append(cases.assign(fullest=fullest, imbalance_factor_median=median, imbalance_factor_p95=p95))
    rows = pd.concat(factors)
    looks = looks_of({line: short(line) for line in pools["line"].unique()})
    styles = {"native": NATIVE, "load_only": BALANCE}
    facts = cases.iloc[0]
    figure, panels = page(
        "Imbalance factor against c",
        "The fullest over the mean of the computed pairs, of each layer and batch, mean over layers; "
        f"median and 95th percentile "
        f"over {facts['num_batches']} batches.",
        split(rows, "group"),
        {
            "native": NATIVE,
            **({"load_only (balance bound)": BALANCE} if "load_only" in set(bounds["label"]) else {}),
            **{look.label: look.marks for look in looks.values()},
            "median": {"color": MUTED, "linewidth": 2.0, "marker": "o", "markersize": 4.5},
            "95th percentile": {"color": MUTED, **_P95},
        },
        of_each=2,
        height=3.3,
    )
    for axes_of, part in panels:
        for axes, of in zip(axes_of, split(part, "fullest"), strict=True):
            facts = of.iloc[0]
            placed = f" ({facts['num_ranks']} GPUs)" if facts["fullest"] == "GPU" else ""
            traffic = f"; {facts['traffic']}" if len(panels) > 1 else ""
            panel_title(axes, f"fullest {facts['fullest']}{placed}{traffic}", 4.2)
            for name, wide in (("imbalance_factor_median", {"linewidth": 2.0}), ("imbalance_factor_p95", _P95)):
                for bound in of[of["line"].isna()].to_dict("records"):
                    axes.axhline(bound[name], **{**styles[bound["label"]], "linewidth": wide["linewidth"]})
                for line, values in of.dropna(subset="line").groupby("line", sort=False):
                    edge = {"markeredgecolor": looks[line].colour} if wide is _P95 else {}
                    axes.plot(values["c"], values[name], **{**looks[line].marks, **wide, **edge})
            axes.set_xticks(split(of.dropna(subset="line"), "line")[0]["c"])
            axes.set_xlabel("c (experts a token may choose from)")
            axes.set_ylabel("imbalance factor")
            axes.set_ylim(bottom=0.95)
    shown = pd.concat([part for _, part in panels])
    return drawing(figure, shown, "c", "line", "fullest", "imbalance_factor_median", "imbalance_factor_p95")


def dropped_figure(run: RouteRun) -> Drawing | None:
    """Dropped share of the top-k pairs against the capacity factor, a line per layer."""
    layers = largest(run.layers).assign(dropped_percent=lambda rows: 100 * rows["dropped_share"])
    rows = swept(layers, "capacity_factor", "token_drop", "expanded_drop")
    # A line of one value in several layers is none.
    rows = rows[rows.groupby(["group", "line"])["value"].transform("nunique") > 1]
    if rows.empty:
        return None
    parts = split(rows, "group", "line")
    names = max((part["layer"].unique() for part in parts), key=len)
    figure, panels = page(
        f"Dropped share against the capacity factor {GAMMA}",
        "Top-k pairs that are not computed, all ranks together; mean over batches.",
        parts,
        {
            **(layer_legend(names) if len(names) > 1 else {}),
            "mean over layers" if len(names) > 1 else "one layer": MEAN,
        },
        each="workload and policy",
        columns=3,
        width=max(3.6 * min(3, len(parts)) + 0.4, 6.5),
        height=2.9,
        looks_past=rows["line"].str.startswith("expanded").any(),
        sharey=True,
    )
    for axes, part in panels:
        facts = part.iloc[0]
        one = rows["group"].nunique() == 1
        panel_title(axes, facts["line"] if one else f"{facts['model']}: {facts['line']}, {facts['traffic']}", 3.2)
        share_GL = part.pivot(index="value", columns="layer_number", values="dropped_percent")
        for place, layer in enumerate(share_GL) if share_GL.shape[1] > 1 else ():
            axes.plot(share_GL[layer], **thin_line(place, share_GL.shape[1]))
        axes.plot(share_GL.mean(axis=1), zorder=3, **MEAN)
        axes.set_xlabel(f"capacity factor {GAMMA}")
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("dropped (% of top-k pairs)")
    axes.set_ylim(bottom=0)  # of all panels; before the last is drawn it would fix their top too
    return drawing(figure, pd.concat([part for _, part in panels]), "layer", "dropped_percent")


def expanded_figure(run: RouteRun) -> Drawing | None:
    """Normalised load under Expanded Drop for several numbers of candidates m."""
    cases = largest(run.cases)
    found = split(swept(cases, "num_candidates", "expanded_drop"), "group", "line")
    if not found:
        return None
    native = cases[cases["label"] == "native"]
    parts = []
    for line in found:
        rows = pd.concat([native[native["group"] == line["group"].iloc[0]], line])
        # Sorted in every batch and layer before they are averaged.
        falling_VE = [
            -np.sort(-run.loads(case.group, case.label, "load_over_mean_E")).mean(axis=1).mean(axis=0)
            for case in rows.itertuples()
        ]
        parts.append(
            rows.assign(
                computed_percent_of_topk_pairs=100 * rows["experts_per_token"] / rows["top_k"],
                retained_mass_percent=100 * rows["retained_mass"],
                load_over_mean=falling_VE,
            )
        )
    in_percent = {
        "computed_percent_of_topk_pairs": ("computed pairs", ordered_line(0, 2, color="#0072B2")),
        "retained_mass_percent": ("score mass", ordered_line(1, 2, color="#CC79A7")),
    }
    values = found[0]["value"].astype(int)
    figure, panels = page(
        "Load under Expanded Drop against the number of candidates m",
        "Pairs over the model's mean T K / E. Left: experts of each batch and layer by falling load, then means. "
        "Right: means over batches and layers.",
        parts,
        {
            "native": NATIVE,
            **{f"m = {m}": ordered_line(at, len(values), marker="none") for at, m in enumerate(values)},
            **{f"right: {name}": line for name, line in in_percent.values()},
        },
        each="workload and policy",
        of_each=2,
        height=3.4,
        width_ratios=[1.5, 1],
    )
    for (by_expert, by_m), part in panels:
        line = part["line"].iloc[-1]
        first, cases = part.iloc[0], part.iloc[1:]
        panel_title(by_expert, line, 5.5)
        experts = range(1, first["num_experts"] + 1)
        for place, load_E in enumerate(cases["load_over_mean"]):
            by_expert.plot(experts, load_E, **ordered_line(place, len(cases), marker="none"))
        by_expert.plot(experts, first["load_over_mean"], **NATIVE)
        by_expert.axhline(1, **BALANCE)
        by_expert.set_xlabel("experts, the fullest first")
        by_expert.set_ylabel("load (1 = mean)")
        by_expert.set_ylim(bottom=0)
        panel_title(by_m, "computed pairs, and mass kept", 3.5)
        for name, (_, style) in in_percent.items():
            by_m.plot(cases["value"], cases[name], **style)
        by_m.set_xticks(cases["value"])
        by_m.set_xlabel("candidates m, " + ("anywhere" if "scope=global" in line else "on the token's own rank"))
        by_m.set_ylabel("% of the top-k's")
    rows = _by_expert(pd.concat([part for _, part in panels]))
    rows = rows.assign(place=rows["expert"] + 1).rename(columns={"value": "num_candidates"})
    return drawing(figure, rows, "num_candidates", "place", "load_over_mean", *in_percent)


def modality_figure(run: RouteRun) -> Drawing | None:
    """Text and image tokens per expert where a capacity prefers one or the other."""
    batches = largest(run.batches).dropna(subset="image_load_E")
    favours = batches["params"].str.get("modality").fillna("uniform") != "uniform"
    if not favours.any():
        return None
    group = batches.loc[favours, "group"].iloc[0]
    own = batches[batches["group"] == group]
    favouring = own.loc[favours[own.index], "label"].unique()
    alike = without(favouring[0], "modality")
    shown = ["native", *([alike] if (own["label"] == alike).any() else []), *favouring][:MAX_PANELS]
    native = run.layers[(run.layers["group"] == group) & (run.layers["label"] == "native")]
    layer = native.loc[native["expert_imbalance"].idxmax(), "layer"]
    own = own[own["layer"] == layer]
    order_E = np.argsort(-np.sum(own.loc[own["label"] == "native", "load_E"].to_list(), axis=0), kind="stable")
    parts = []
    for label in shown:
        rows = own[own["label"] == label]
        # Over the mean of the model's load, whatever the policy computes.
        scale_B = (rows["num_experts"] / rows["num_topk_pairs"]).to_numpy()[:, None]
        image_E = (np.stack(rows["image_load_E"].to_list()) * scale_B).mean(axis=0)[order_E]
        all_E = np.stack(rows["load_over_mean_E"].to_list()).mean(axis=0)[order_E]
        of_expert = {"text_load_over_mean": all_E - image_E, "image_load_over_mean": image_E, "expert": order_E}
        parts.append(rows.iloc[[0] * len(order_E)].assign(**of_expert))
    loads = ["text_load_over_mean", "image_load_over_mean"]
    # A load of 1 is as high in every panel.
    tops = [max(1.25, 1.1 * part[loads].sum(axis=1).max()) for part in parts]
    first = own.iloc[0]
    figure = sheet(
        "Text and image tokens per expert under modality priorities",
        f"{first['comparison']}; layer {layer}, the one with the fullest expert. Pairs over the model's mean "
        "T K / E, mean over batches; experts in the order of their load under native. image_first drops images before "
        "any text, text_first text before any image.",
        footer(
            own,
            [
                f"Assumed: the first {first['image_share']:.0%} of every sequence's tokens stand for an image. Their "
                "scores are those of text, so the figure shows what priorities do, not how images are routed."
            ],
            looks_past=False,
        ),
        line_legend({"text": Patch(**_TEXT), "image (assumed)": Patch(**_IMAGES)}),
        width=10.5,
        body=0.6 * len(parts) + 0.8 * sum(tops),
    )
    panels = figure.subplots(len(parts), 1, squeeze=False, sharex=True, height_ratios=tops)[:, 0]
    edges = np.arange(len(order_E) + 1) + 0.5
    for axes, part, top in zip(panels, parts, tops, strict=True):
        text_E, image_E = part["text_load_over_mean"], part["image_load_over_mean"]
        axes.stairs(text_E, edges, fill=True, color=_TEXT["facecolor"])
        axes.stairs(text_E + image_E, edges, baseline=text_E, fill=True, linewidth=0, **_IMAGES)
        share = image_E.sum() / max(image_E.sum() + text_E.sum(), 1e-12)
        panel_title(axes, f"{part['label'].iloc[0]}: images hold {share:.0%} of the computed pairs", 9)
        axes.axhline(1, **{**BALANCE, "color": INK})
        axes.set_ylabel("load (1 = mean)")
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, top)
        axes.yaxis.set_major_locator(MultipleLocator(0.5 if top < 2 else 1))
        axes.grid(False, axis="x")
    panels[-1].set_xlabel("experts, the fullest under native first")
    return drawing(figure, pd.concat(parts), "layer", "expert", *loads)
