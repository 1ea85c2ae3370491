"""Figures of the work of a decoding step: how many experts a batch reads, and what reading fewer costs in mass."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.route_load import RouteGroup, RouteRun, short
from moe_ep_bench.analysis.route_parts import (
    HEAT,
    MAX_PANELS,
    MEAN,
    NATIVE,
    STAR,
    UNIFORM,
    by_field,
    families,
    few,
    figure_rows,
    footer,
    grid,
    heading,
    lines_of,
    look_line,
    nearest_to_papers,
    not_drawn,
    ordered_line,
    size_ticks,
)
from moe_ep_bench.analysis.style import INK, Drawing, looks_of, panel_title, sheet
from moe_ep_bench.metrics import uniform_activated_experts
from moe_ep_bench.policies import POLICIES

_MASS = "mass kept (% of the top-k's)"


def _saved(group: RouteGroup, cases: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """What cases read, beside independent, uniform choices, and what they keep; before these some of their columns."""
    facts = group.facts
    saved = {
        "activated_experts": cases["activated"],
        "uniform_activated_experts": uniform_activated_experts(facts.num_experts, facts.top_k, facts.num_tokens),
        "retained_mass_percent": 100 * cases["retained_mass"],
    }
    return cases.assign(**saved).reset_index()[["label", *columns, *saved]]


def activated_figure(run: RouteRun) -> Drawing | None:
    """Activated experts against the size of the batch, beside independent, uniform choices."""
    every = [groups for groups in families(run) if len(groups) > 2]
    found = every[:MAX_PANELS]
    if not found:
        return None
    labels = few(found[0][0].cases.index[1:])
    looks = looks_of({label: short(label) for label in labels})
    columns = min(2, len(found))
    figure = sheet(
        "Activated experts against the size of the batch",
        "Experts with at least one token, mean over batches and layers. Uniform: N (1 - (1 - K / N)^B), what "
        "independent, uniform choices of K among N experts would activate.",
        footer([groups[-1] for groups in found], *not_drawn("Workloads", len(every) - len(found))),
        [
            ("native", Line2D([], [], **MEAN)),
            ("uniform", Line2D([], [], **UNIFORM)),
            *((look.label, Line2D([], [], **look_line(look))) for look in looks.values()),
        ],
        width=8.5 if columns == 1 else 10.5,
        body=3.6 * -(-len(found) // columns),
    )
    rows = []
    for axes, groups in zip(grid(figure, len(found), columns).flat, found, strict=False):
        facts = groups[0].facts
        sizes = [group.facts.num_tokens for group in groups]
        panel_title(axes, f"{facts.model}, {facts.traffic}", 4.5 if columns == 2 else 7.5)
        curve = np.geomspace(sizes[0], sizes[-1], 100)
        axes.plot(curve, [uniform_activated_experts(facts.num_experts, facts.top_k, size) for size in curve], **UNIFORM)
        for label in ("native", *labels):
            if all(label in group.cases.index for group in groups):
                of = [_saved(group, group.cases.loc[[label]]) for group in groups]
                style = {"zorder": 3, **MEAN} if label == "native" else look_line(looks[label])
                axes.plot(sizes, pd.concat(of)["activated_experts"], **style)
                rows += zip(groups, of, strict=True)
        size_ticks(axes, sizes)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"activated experts (of {facts.num_experts})")
    return Drawing(figure, figure_rows(rows))


def budgets_figure(run: RouteRun) -> Drawing | None:
    """XShare's grids: activated experts by k0 and budget, by k0 and request budget; the two rules side by side."""
    every = []
    for group in nearest_to_papers(run):
        batch = _budgets(group, "budget", "batch")
        sizes = batch.groupby(["k0", "besides"]).size()
        if len(sizes) > 1 and sizes.max() > 1:
            every.append((group, batch, _budgets(group, "request_budget", "request")))
    found = every[:MAX_PANELS]
    if not found:
        return None
    groups = [group for group, _, _ in found]
    with_requests = any(len(request) for _, _, request in found)
    with_both = any((request["besides"] > 0).any() for _, _, request in found)
    native_words = " / ".join(f"{group.cases.loc['native', 'activated']:.1f}" for group in groups)
    rules = [("batch rule", "budget", "#0072B2", "o"), ("request rule", "request_budget", "#D55E00", "s")]
    figure = sheet(
        "XShare's budgets: activated experts and mass kept",
        heading(groups, "A row for each workload")
        + f"In the cells: activated experts, mean over batches and layers; native activates {native_words}."
        + (" A budget behind k0 is the batch's, on top of the requests'." if with_both else ""),
        footer(groups, *not_drawn("Workloads", len(every) - len(found))),
        [
            *(
                (f"{rule}: {field}", Line2D([], [], color=colour, marker=marker, linewidth=1.2))
                for rule, field, colour, marker in rules[: 1 + with_requests]
            ),
            ("native", Line2D([], [], **STAR)),
        ],
        width=11.5,
        body=3.3 * len(found),
    )
    panels = grid(figure, len(found) * (2 + with_requests), 2 + with_requests)
    rows = []
    for panels_of, (group, *budgets) in zip(panels, found, strict=True):
        most = group.cases.loc["native", "activated"]
        rows.append((group, _saved(group, group.cases.loc[["native"]])))
        of = f"; {group.facts.traffic}" if len(found) > 1 else ""
        axes = panels_of[-1]
        panel_title(axes, "mass kept against activated experts", 3.5)
        for cells, (rule, field, colour, marker), cases in zip(panels_of, rules, budgets, strict=False):
            if cells is not axes:
                cells.set_visible(len(cases) > 0)
            if cases.empty:
                continue
            _draw_budgets(cells, cases, field, f"{rule}{of}", most)
            for k0, line in cases[(cases["besides"] == 0) & (cases["activated"] > 0)].groupby("k0"):
                x, y = line["activated"].to_numpy(), 100 * line["retained_mass"].to_numpy()
                axes.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.0)
                below, side = ((3, -9), "left") if field == "budget" else ((-4, 7), "right")
                axes.annotate(
                    f"k0={k0}", (x[0], y[0]), below, textcoords="offset points", fontsize=7.5, color=colour, ha=side
                )
            cases = cases.assign(**{"rule": field, "budget": cases["besides"], field: cases["value"]})
            rows.append((group, _saved(group, cases, "rule", "k0", *dict.fromkeys(("budget", field)))))
        axes.plot(most, 100, zorder=3, **STAR)
        axes.margins(x=0.12, y=0.12)
        axes.set_xlabel("activated experts")
        axes.set_ylabel(_MASS)
    return Drawing(figure, figure_rows(rows))


def _budgets(group: RouteGroup, field: str, scope: str) -> pd.DataFrame:
    """XShare's cases by k0, the batch's budget ``besides`` the field, and the field's ``value``."""
    cases = by_field(group, field, "xshare", least=1, scope=scope)
    k0 = [params["k0"] for params in cases["params"]]
    besides = [0 if field == "budget" else params.get("budget") or 0 for params in cases["params"]]
    return cases.assign(k0=k0, besides=besides).sort_values(["k0", "besides", "value"])


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
    axes.set_yticks(range(len(cells)), [f"{k0}, {budget}" if has_budgets else str(k0) for k0, budget in cells.index])
    axes.set_xlabel(field)
    axes.set_ylabel("k0, budget" if has_budgets else "k0")
    axes.grid(False)


def mass_figure(run: RouteRun) -> Drawing | None:
    """Score mass kept against activated experts, of the policies that read fewer."""
    savers = {name: policy.fewer_experts_by for name, policy in POLICIES.items() if policy.fewer_experts_by}
    every = []
    for group in nearest_to_papers(run):
        lines = []
        for policy, field in savers.items():
            cases = by_field(group, field, policy, **({"scope": "batch"} if policy == "xshare" else {}))
            lines.append(cases.assign(line=cases["line"].replace(policy, f"{policy} by {field}")))
        cases = pd.concat([cases for cases in lines if len(cases)] or lines[:1])
        if cases["line"].nunique() > 1:
            every.append((group, cases))
    found = every[:MAX_PANELS]
    if not found:
        return None
    groups = [group for group, _ in found]
    looks = looks_of({line: line for _, cases in found for line in cases["line"].unique()})
    columns = min(2, len(found))
    figure = sheet(
        "Score mass kept against activated experts",
        heading(groups, "A panel for each workload")
        + "Mass: of the selected experts over the top-k's. Points: values of the field that is named; means over "
        "batches and layers.",
        footer(groups, *not_drawn("Workloads", len(every) - len(found))),
        [
            ("native", Line2D([], [], **STAR)),
            *((look.label, Line2D([], [], **look_line(look))) for look in looks.values()),
        ],
        width=8 if columns == 1 else 11,
        body=3.9 * -(-len(found) // columns),
    )
    rows = []
    for axes, (group, cases) in zip(grid(figure, len(found), columns).flat, found, strict=False):
        if len(found) > 1:
            panel_title(axes, group.title, 4.5)
        native = _saved(group, group.cases.loc[["native"]])
        saved = _saved(group, cases, "line", "value")
        for line, points in saved.groupby("line", sort=False):
            points = points.sort_values(["activated_experts", "retained_mass_percent"])
            axes.plot(points["activated_experts"], points["retained_mass_percent"], **look_line(looks[line]))
        axes.plot(native["activated_experts"], 100, zorder=3, **STAR)
        axes.set_xlabel(f"activated experts (of {group.facts.num_experts})")
        axes.set_ylabel(_MASS)
        axes.set_xlim(left=0)
        rows += [(group, native), (group, saved)]
    return Drawing(figure, figure_rows(rows))


def ranks_figure(run: RouteRun) -> Drawing | None:
    """Activated experts on the fullest GPU under XShare's rank scope, and what it keeps."""
    every = lines_of(itertools.chain.from_iterable(families(run)), "rank_budget", "xshare", scope="rank")
    found = every[:MAX_PANELS]
    if not found:
        return None
    names = {
        "activated_experts_fullest_gpu": ("fullest GPU", NATIVE, ordered_line(0, 2, color="#0072B2")),
        "activated_experts_mean_gpu": ("mean GPU", UNIFORM, ordered_line(1, 2, color="#009E73")),
    }
    figure = sheet(
        "Activated experts on the fullest GPU under XShare's rank scope",
        "Of every batch and layer the GPU with most activated experts; means over batches and layers. The budget is "
        "tested between rounds and what tokens bring along (k0) counts, so that a GPU may stand above it.",
        footer([group for group, _, _ in found], *not_drawn("Workloads and rules", len(every) - len(found))),
        [
            *((name, Line2D([], [], **line)) for name, _, line in names.values()),
            *((f"native: {name}", Line2D([], [], **line)) for name, line, _ in names.values()),
        ],
        width=max(5.4 * min(2, len(found)) + 0.4, 8.0),
        body=3.4 * -(-len(found) // 2),
    )
    rows = []
    for axes, (group, line, cases) in zip(grid(figure, len(found), min(2, len(found))).flat, found, strict=False):
        panel_title(axes, f"{group.title}; {line}", 4.5)
        shown = pd.concat([group.cases.loc[["native"]], cases])
        of = shown.assign(
            rank_budget=shown["value"],
            activated_experts_fullest_gpu=shown["fullest_activated"],
            activated_experts_mean_gpu=shown["activated"] / group.facts.num_ranks,
            retained_mass_percent=100 * shown["retained_mass"],
        )
        of = of.reset_index()[["label", "rank_budget", *names, "retained_mass_percent"]]
        native, points = of.iloc[0], of.iloc[1:]
        for name, (_, of_native, style) in names.items():
            axes.axhline(native[name], zorder=1, **of_native)
            axes.plot(cases["value"], points[name], **style)
        for point in points.to_dict("records"):
            axes.annotate(
                f"{point['retained_mass_percent']:.0f} %",
                (point["rank_budget"], point["activated_experts_fullest_gpu"]),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
                zorder=1.5,
            )
        axes.set_xticks(cases["value"])
        axes.set_xlabel("rank_budget (experts per GPU); at the points: mass kept")
        axes.set_ylabel("activated experts on a GPU")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        rows.append((group, of))
    return Drawing(figure, figure_rows(rows))
