"""Figures of the work of a decoding step: how many experts a batch reads, and what reading fewer costs in mass."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from moe_ep_bench.analysis.route.load import RouteRun, short
from moe_ep_bench.analysis.route.parts import (
    HEAT,
    MAX_PANELS,
    MEAN,
    NATIVE,
    STAR,
    UNIFORM,
    drawing,
    few,
    nearest_to_papers,
    ordered_line,
    page,
    split,
    swept,
)
from moe_ep_bench.analysis.style import INK, Drawing, looks_of, panel_title
from moe_ep_bench.metrics import uniform_activated_experts
from moe_ep_bench.policies import POLICIES

_MASS = "mass kept (% of the top-k's)"
_SAVED = ("activated_experts", "uniform_activated_experts", "retained_mass_percent")
_RULES = {"budget": ("batch", "#0072B2", "o"), "request_budget": ("request", "#D55E00", "s")}


def _saved(cases: pd.DataFrame) -> pd.DataFrame:
    """Cases with ``_SAVED``: what they read, beside independent, uniform choices, and what they keep."""
    uniform = uniform_activated_experts(cases["num_experts"], cases["top_k"], cases["num_tokens"])
    mass = 100 * cases["retained_mass"]
    return cases.assign(**dict(zip(_SAVED, (cases["activated"], uniform, mass), strict=True)))


def activated_figure(run: RouteRun) -> Drawing | None:
    """Activated experts against the size of the batch, beside independent, uniform choices."""
    cases = _saved(run.cases)
    num_sizes = cases.groupby("family")["group"].transform("nunique")
    in_all = cases.groupby(["family", "label"])["group"].transform("size") == num_sizes
    cases = cases[(num_sizes > 2) & in_all]
    if cases.empty:
        return None
    labels = few(split(cases, "family")[0]["label"].unique()[1:])
    cases = cases[cases["label"].isin(["native", *labels])]
    families = [family.sort_values("num_tokens", kind="stable") for family in split(cases, "family")]
    looks = looks_of({label: short(label) for label in labels})
    figure, panels = page(
        "Activated experts against the size of the batch",
        "Experts with at least one token, mean over batches and layers. Uniform: N (1 - (1 - K / N)^B), what "
        "independent, uniform choices of K among N experts would activate.",
        families,
        {"native": MEAN, "uniform": UNIFORM, **{look.label: look.marks for look in looks.values()}},
        columns=2,
        width=8.5 if len(families) == 1 else 10.5,
        height=3.6,
    )
    for axes, family in panels:
        facts = family.iloc[0]
        sizes = family["num_tokens"].unique()
        panel_title(axes, f"{facts['model']}, {facts['traffic']}", 4.5 if len(panels) > 1 else 7.5)
        curve = np.geomspace(sizes[0], sizes[-1], 100)
        axes.plot(curve, uniform_activated_experts(facts["num_experts"], facts["top_k"], curve), **UNIFORM)
        for label, line in family.groupby("label", sort=False):
            style = {"zorder": 3, **MEAN} if label == "native" else looks[label].marks
            axes.plot(line["num_tokens"], line["activated_experts"], **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
        axes.minorticks_off()
        axes.set_xlabel("batch (tokens)")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"activated experts (of {facts['num_experts']})")
    return drawing(figure, pd.concat([family for _, family in panels]), *_SAVED)


def mass_figure(run: RouteRun) -> Drawing | None:
    """Score mass kept against activated experts, of the policies that read fewer."""
    cases = _saved(nearest_to_papers(run.cases))
    lines = []
    for name, policy in POLICIES.items():
        if field := policy.fewer_experts_by:
            line = swept(cases, field, name, **({"scope": "batch"} if name == "xshare" else {}))
            lines.append(line.assign(line=line["line"].replace(name, f"{name} by {field}")))
    found = pd.concat(lines)
    found = found[found.groupby("group")["line"].transform("nunique") > 1]
    if found.empty:
        return None
    native = cases[(cases["label"] == "native") & cases["group"].isin(found["group"])]
    looks = looks_of({line: line for line in found["line"].unique()})
    parts = split(pd.concat([native, found]), "group")
    figure, panels = page(
        "Score mass kept against activated experts",
        "Mass: of the selected experts over the top-k's. Points: values of the field that is named; means over "
        "batches and layers.",
        parts,
        {"native": STAR, **{look.label: look.marks for look in looks.values()}},
        columns=2,
        width=8 if len(parts) == 1 else 11,
        height=3.9,
    )
    for axes, part in panels:
        if len(panels) > 1:
            panel_title(axes, part["comparison"].iloc[0], 4.5)
        for line, points in part.dropna(subset="line").groupby("line", sort=False):
            points = points.sort_values(["activated_experts", "retained_mass_percent"])
            axes.plot(points["activated_experts"], points["retained_mass_percent"], **looks[line].marks)
        axes.plot(part["activated_experts"].iloc[0], 100, zorder=3, **STAR)
        axes.set_xlabel(f"activated experts (of {part['num_experts'].iloc[0]})")
        axes.set_ylabel(_MASS)
        axes.set_xlim(left=0)
    return drawing(figure, pd.concat([part for _, part in panels]), "line", "value", *_SAVED)


def budgets_figure(run: RouteRun) -> Drawing | None:
    """XShare's grids: activated experts by k0 and budget, by k0 and request budget; the two rules side by side."""
    cases = _saved(nearest_to_papers(run.cases))
    rules = []
    for field, (scope, *_) in _RULES.items():
        own = swept(cases, field, "xshare", least=1, scope=scope)
        budget = own["params"].str.get("budget").fillna(0) if field == "request_budget" else 0
        own = own.assign(rule=field, k0=own["params"].str.get("k0"), besides=budget, budget=budget)
        rules.append(own.assign(**{field: own["value"]}).sort_values(["k0", "besides", "value"], kind="stable"))
    values_of = rules[0].groupby(["group", "k0"])["value"].agg("size").groupby("group")
    is_grid = (values_of.size() > 1) & (values_of.max() > 1)
    found = [group for group in cases["group"].unique() if is_grid.get(group, False)]
    if not found:
        return None
    native = cases[cases["label"] == "native"]
    rows = pd.concat([native, *rules])
    rows = rows[rows["group"].isin(found)]
    with_requests = (rows["rule"] == "request_budget").any()
    with_both = (rows["besides"] > 0).any()
    activated = " / ".join(f"{most:.1f}" for most in native[native["group"].isin(found[:MAX_PANELS])]["activated"])
    styles = {field: {"color": look[1], "marker": look[2], "linewidth": 1.2} for field, look in _RULES.items()}
    shown = list(_RULES)[: 1 + with_requests]
    figure, panels = page(
        "XShare's budgets: activated experts and mass kept",
        f"In the cells: activated experts, mean over batches and layers; native activates {activated}."
        + (" A budget behind k0 is the batch's, on top of the requests'." if with_both else ""),
        split(rows, "group"),
        {**{f"{_RULES[field][0]} rule: {field}": styles[field] for field in shown}, "native": STAR},
        of_each=2 + with_requests,
        width=11.5,
        height=3.3,
    )
    for (*grids, axes), part in panels:
        most = part["activated"].iloc[0]
        panel_title(axes, "mass kept against activated experts", 3.5)
        for cells, field in zip(grids, shown, strict=True):
            own = part[part["rule"] == field]
            cells.set_visible(len(own) > 0)
            of = f"; {part['traffic'].iloc[0]}" if len(panels) > 1 else ""
            if len(own):
                _draw_budgets(cells, own, field, f"{_RULES[field][0]} rule{of}", most)
            for k0, line in own[(own["besides"] == 0) & (own["activated"] > 0)].groupby("k0"):
                axes.plot(line["activated"], line["retained_mass_percent"], **styles[field], markersize=4.5)
                first = line.iloc[0]
                below, side = ((3, -9), "left") if field == "budget" else ((-4, 7), "right")
                at = (first["activated"], first["retained_mass_percent"])
                look = {"fontsize": 7.5, "color": styles[field]["color"], "ha": side}
                axes.annotate(f"k0={k0:.0f}", at, below, textcoords="offset points", **look)
        axes.plot(most, 100, zorder=3, **STAR)
        axes.margins(x=0.12, y=0.12)
        axes.set_xlabel("activated experts")
        axes.set_ylabel(_MASS)
    return drawing(figure, pd.concat([part for _, part in panels]), "rule", "k0", *shown, *_SAVED)


def _draw_budgets(axes: Axes, cases: pd.DataFrame, field: str, title: str, most: float) -> None:
    panel_title(axes, title, 3.2)
    cells = cases.pivot_table(index=["k0", "besides"], columns="value", values="activated")
    axes.imshow(cells, aspect="auto", cmap=HEAT, norm=Normalize(0, 1.6 * most))
    for (place, column), value in np.ndenumerate(cells):
        if not np.isnan(value):
            colour = "white" if value > 0.85 * most else INK
            axes.text(column, place, f"{value:.1f}", ha="center", va="center", fontsize=8.5, color=colour)
    axes.set_xticks(range(cells.shape[1]), [f"{value:g}" for value in cells.columns])
    has_budgets = (cases["besides"] > 0).any()
    rows = [f"{k0:.0f}, {budget:.0f}" if has_budgets else f"{k0:.0f}" for k0, budget in cells.index]
    axes.set_yticks(range(len(cells)), rows)
    axes.set_xlabel(field)
    axes.set_ylabel("k0, budget" if has_budgets else "k0")
    axes.grid(False)


def ranks_figure(run: RouteRun) -> Drawing | None:
    """Activated experts on the fullest GPU under XShare's rank scope, and what it keeps."""
    cases = run.cases.assign(
        family_order=run.cases.groupby("family", sort=False).ngroup(),
        activated_experts_fullest_gpu=run.cases["fullest_activated"],
        activated_experts_mean_gpu=run.cases["activated"] / run.cases["num_ranks"],
        retained_mass_percent=100 * run.cases["retained_mass"],
    ).sort_values(["family_order", "num_tokens"], kind="stable")
    found = split(swept(cases, "rank_budget", "xshare", scope="rank"), "group", "line")
    if not found:
        return None
    native = cases[cases["label"] == "native"]
    parts = [pd.concat([native[native["group"] == part["group"].iloc[0]], part]) for part in found]
    names = {
        "activated_experts_fullest_gpu": ("fullest GPU", NATIVE, ordered_line(0, 2, color="#0072B2")),
        "activated_experts_mean_gpu": ("mean GPU", UNIFORM, ordered_line(1, 2, color="#009E73")),
    }
    figure, panels = page(
        "Activated experts on the fullest GPU under XShare's rank scope",
        "Of every batch and layer the GPU with most activated experts; means over batches and layers. The budget is "
        "tested between rounds and what tokens bring along (k0) counts, so that a GPU may stand above it.",
        parts,
        dict(chain(((n, line) for n, _, line in names.values()), ((f"native: {n}", o) for n, o, _ in names.values()))),
        each="workload and rule",
        columns=2,
        width=11.2 if len(parts) > 1 else 8,
        height=3.4,
    )
    for axes, part in panels:
        points = part.iloc[1:]
        panel_title(axes, f"{points['comparison'].iloc[0]}; {points['line'].iloc[0]}", 4.5)
        for name, (_, of_native, style) in names.items():
            axes.axhline(part[name].iloc[0], zorder=1, **of_native)
            axes.plot(points["value"], points[name], **style)
        for point in points.to_dict("records"):
            look = {"ha": "center", "fontsize": 8, "zorder": 1.5}
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            at = (point["value"], point["activated_experts_fullest_gpu"])
            words = f"{point['retained_mass_percent']:.0f} %"
            axes.annotate(words, at, (0, 6), textcoords="offset points", bbox=box, **look)
        axes.set_xticks(points["value"])
        axes.set_xlabel("rank_budget (experts per GPU); at the points: mass kept")
        axes.set_ylabel("activated experts on a GPU")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    shown = pd.concat([part for _, part in panels]).rename(columns={"value": "rank_budget"})
    return drawing(figure, shown, "rank_budget", *names, "retained_mass_percent")
