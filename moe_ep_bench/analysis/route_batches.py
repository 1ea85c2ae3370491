"""Figures of the work of a decoding step: how many experts a batch reads, and what reading fewer costs in mass."""

from __future__ import annotations

import itertools

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.marks import table
from moe_ep_bench.analysis.route_load import RoutedCase, RouteGroup, RouteRun, short
from moe_ep_bench.analysis.route_parts import (
    HEAT,
    MAX_PANELS,
    MEAN,
    NATIVE,
    UNIFORM,
    by_field,
    families,
    few,
    footer,
    heading,
    mean_over,
    nearest_to_papers,
    not_drawn,
    ordered_line,
    route_mark,
    size_ticks,
)
from moe_ep_bench.analysis.style import INK, Drawing, looks_of, panel_title, sheet
from moe_ep_bench.metrics import uniform_activated_experts
from moe_ep_bench.policies import POLICIES

_MAX_SIZES = 6
# k0 and a budget -> the value of a field -> the case on every layer.
_Grid = dict[tuple[int, int], dict[float, list[RoutedCase]]]


def activated_figure(run: RouteRun) -> Drawing | None:
    """Activated experts against the size of the batch, beside independent, uniform choices."""
    every = [groups for groups in families(run).values() if len(groups) > 2]
    found = every[:MAX_PANELS]
    if not found:
        return None
    labels = few([label for label in found[0][0].labels if label != "native"], _MAX_SIZES)
    looks = looks_of({label: short(label) for label in labels})
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    all_groups = [groups[-1] for groups in found]
    figure = sheet(
        "Activated experts against the size of the batch",
        "Experts with at least one token, mean over batches and layers. Uniform: N (1 - (1 - K / N)^B), what "
        "independent, uniform choices of K among N experts would activate.",
        footer(all_groups, *not_drawn("Workloads", len(every) - len(found))),
        [
            ("native", Line2D([], [], **MEAN)),
            ("uniform", Line2D([], [], **UNIFORM)),
            *((look.label, Line2D([], [], **_marks(look))) for look in looks.values()),
        ],
        width=8.5 if columns == 1 else 10.5,
        body=3.6 * rows,
    )
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, groups in zip(panels.flat, found, strict=False):
        facts = groups[0].facts
        sizes = [group.facts.num_tokens for group in groups]
        panel_title(axes, _words(groups[0]), 4.5 if columns == 2 else 7.5)
        curve = np.geomspace(sizes[0], sizes[-1], 100)
        axes.plot(curve, [uniform_activated_experts(facts.num_experts, facts.top_k, size) for size in curve], **UNIFORM)
        for label, look in looks.items():
            if all(label in group.labels for group in groups):
                axes.plot(sizes, [mean_over(group.cases(label), "activated") for group in groups], **_marks(look))
        axes.plot(sizes, [mean_over(group.cases("native"), "activated") for group in groups], zorder=3, **MEAN)
        size_ticks(axes, sizes)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"activated experts (of {facts.num_experts})")
    for axes in list(panels.flat)[len(found) :]:
        axes.set_visible(False)
    marks = []
    for groups in found:
        of_all = [label for label in looks if all(label in group.labels for group in groups)]
        for label in ("native", *of_all):
            marks += [_saved(group, group.cases(label), with_mass=False) for group in groups]
    return Drawing(figure, table(marks))


def _saved(group: RouteGroup, cases: list[RoutedCase], *, with_mass: bool = True, **values: object) -> dict:
    """What a case reads, beside independent, uniform choices, and what it keeps."""
    facts = group.facts
    activated = {
        "activated_experts": mean_over(cases, "activated"),
        "uniform_activated_experts": uniform_activated_experts(facts.num_experts, facts.top_k, facts.num_tokens),
    }
    mass = {"retained_mass_percent": 100 * mean_over(cases, "retained_mass")} if with_mass else {}
    return route_mark(group, cases, **values, **activated, **mass)


def budgets_figure(run: RouteRun) -> Drawing | None:
    """XShare's grids: activated experts by k0 and budget, by k0 and request budget; the two rules side by side."""
    found = []
    for group in nearest_to_papers(run):
        batch = _grid(group, "budget", scope="batch")
        request = _grid(group, "request_budget", scope="request")
        if len(batch) > 1 and any(len(values) > 1 for values in batch.values()):
            found.append((group, batch, request))
    left_out = len(found) - MAX_PANELS
    found = found[:MAX_PANELS]
    if not found:
        return None
    with_requests = any(request for _, _, request in found)
    with_both = any(budget for _, _, request in found for _, budget in request)
    columns = 3 if with_requests else 2
    figure = sheet(
        "XShare's budgets: activated experts and mass kept",
        heading([group for group, _, _ in found], "A row for each workload")
        + "In the cells: activated experts, mean over batches and layers; native activates "
        + f"{_native_words([group for group, _, _ in found])}."
        + (" A budget behind k0 is the batch's, on top of the requests'." if with_both else ""),
        footer([group for group, _, _ in found], *not_drawn("Workloads", left_out)),
        [
            ("batch rule: budget", Line2D([], [], color="#0072B2", marker="o", linewidth=1.2)),
            *(
                [("request rule: request_budget", Line2D([], [], color="#D55E00", marker="s", linewidth=1.2))]
                if with_requests
                else []
            ),
            ("native", Line2D([], [], color=INK, marker="*", markersize=11, linestyle="none")),
        ],
        width=11.5,
        body=3.3 * len(found),
    )
    panels = figure.subplots(len(found), columns, squeeze=False)
    for row, (group, batch, request) in zip(panels, found, strict=True):
        most = mean_over(group.cases("native"), "activated")
        of = f"; {group.facts.traffic}" if len(found) > 1 else ""
        _draw_grid(row[0], batch, "budget", f"batch rule{of}", most)
        if with_requests:
            if request:
                _draw_grid(row[1], request, "request_budget", f"request rule{of}", most)
            else:
                row[1].set_visible(False)
        axes = row[-1]
        panel_title(axes, "mass kept against activated experts", 3.5)
        for grid, colour, marker in ((batch, "#0072B2", "o"), (request, "#D55E00", "s")):
            for (k0, _), values in ((key, values) for key, values in grid.items() if not key[1]):
                points = [(mean_over(c, "activated"), 100 * mean_over(c, "retained_mass")) for c in values.values()]
                points = [point for point in points if point[0] > 0]
                if not points:
                    continue
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4.5, linewidth=1.0)
                below = (3, -9) if grid is batch else (-4, 7)
                side = "left" if grid is batch else "right"
                axes.annotate(
                    f"k0={k0}", points[0], below, textcoords="offset points", fontsize=7.5, color=colour, ha=side
                )
        axes.plot(most, 100, color=INK, marker="*", markersize=11, linestyle="none", zorder=3)
        axes.margins(x=0.12, y=0.12)
        axes.set_xlabel("activated experts")
        axes.set_ylabel("mass kept (% of the top-k's)")
    marks = []
    for group, batch, request in found:
        marks.append(_saved(group, group.cases("native")))
        for field, grid in (("budget", batch), ("request_budget", request)):
            for (k0, besides), values in grid.items():
                for value, cases in values.items():
                    budgets = {"budget": value} if field == "budget" else {"budget": besides, field: value}
                    marks.append(_saved(group, cases, rule=field, k0=k0, **budgets))
    return Drawing(figure, table(marks))


def _grid(group: RouteGroup, field: str, **wanted: str) -> _Grid:
    """k0 and the budget of the batch besides the field -> the field's value -> the case on every layer."""
    grid: _Grid = {}
    for values in by_field(group, field, ["xshare"], **wanted).values():
        for value, cases in values.items():
            params = cases[0].params
            besides = 0 if field == "budget" else params.get("budget") or 0
            grid.setdefault((params["k0"], besides), {})[value] = cases
    return dict(sorted(grid.items()))


def _draw_grid(axes, grid: _Grid, field: str, title: str, most: float) -> None:
    panel_title(axes, title, 3.2)
    columns = sorted({value for values in grid.values() for value in values})
    cells = np.full((len(grid), len(columns)), np.nan)
    for place, values in enumerate(grid.values()):
        for value, cases in values.items():
            cells[place, columns.index(value)] = mean_over(cases, "activated")
    axes.imshow(cells, aspect="auto", cmap=HEAT, norm=Normalize(0, 1.6 * most))
    for (place, column), value in np.ndenumerate(cells):
        if not np.isnan(value):
            colour = "white" if value > 0.85 * most else INK
            axes.text(column, place, f"{value:.1f}", ha="center", va="center", fontsize=8.5, color=colour)
    axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    has_budgets = any(budget for _, budget in grid)
    axes.set_yticks(range(len(grid)), [f"{k0}, {budget}" if has_budgets else str(k0) for k0, budget in grid])
    axes.set_xlabel(field)
    axes.set_ylabel("k0, budget" if has_budgets else "k0")
    axes.grid(False)


def _native_words(groups: list[RouteGroup]) -> str:
    return " / ".join(f"{mean_over(group.cases('native'), 'activated'):.1f}" for group in groups)


def mass_figure(run: RouteRun) -> Drawing | None:
    """Score mass kept against activated experts, of the policies that read fewer."""
    found = []
    for group in nearest_to_papers(run):
        series = {}
        savers = {name: policy.fewer_experts_by for name, policy in POLICIES.items() if policy.fewer_experts_by}
        for policy, field in savers.items():
            wanted = {"scope": "batch"} if policy == "xshare" else {}
            for label, values in by_field(group, field, [policy], **wanted).items():
                if len(values) > 1:
                    series[label if label != policy else f"{policy} by {field}"] = values
        if len(series) > 1:
            found.append((group, series))
    left_out = len(found) - MAX_PANELS
    found = found[:MAX_PANELS]
    if not found:
        return None
    looks = looks_of({label: label for _, series in found for label in series})
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure = sheet(
        "Score mass kept against activated experts",
        heading([group for group, _ in found], "A panel for each workload")
        + "Mass: of the selected experts over the top-k's. Points: values of the field that is named; means over "
        "batches and layers.",
        footer([group for group, _ in found], *not_drawn("Workloads", left_out)),
        [
            ("native", Line2D([], [], color=INK, marker="*", markersize=11, linestyle="none")),
            *((look.label, Line2D([], [], **_marks(look))) for look in looks.values()),
        ],
        width=8 if columns == 1 else 11,
        body=3.9 * rows,
    )
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, (group, series) in zip(panels.flat, found, strict=False):
        if len(found) > 1:
            panel_title(axes, group.title, 4.5)
        for label, values in series.items():
            points = sorted((mean_over(c, "activated"), 100 * mean_over(c, "retained_mass")) for c in values.values())
            axes.plot(*zip(*points, strict=True), **_marks(looks[label]))
        native = mean_over(group.cases("native"), "activated")
        axes.plot(native, 100, color=INK, marker="*", markersize=11, linestyle="none", zorder=3)
        axes.set_xlabel(f"activated experts (of {group.facts.num_experts})")
        axes.set_ylabel("mass kept (% of the top-k's)")
        axes.set_xlim(left=0)
    for axes in list(panels.flat)[len(found) :]:
        axes.set_visible(False)
    marks = []
    for group, series in found:
        marks.append(_saved(group, group.cases("native")))
        for label, values in series.items():
            marks += [_saved(group, cases, line=label, value=value) for value, cases in values.items()]
    return Drawing(figure, table(marks))


def ranks_figure(run: RouteRun) -> Drawing | None:
    """Activated experts on the fullest GPU under XShare's rank scope, and what it keeps."""
    found = []
    for group in itertools.chain.from_iterable(families(run).values()):
        for label, values in by_field(group, "rank_budget", ["xshare"], scope="rank").items():
            if len(values) > 1:
                found.append((group, label, values))
    left_out = len(found) - MAX_PANELS
    found = found[:MAX_PANELS]
    if not found:
        return None
    figure = sheet(
        "Activated experts on the fullest GPU under XShare's rank scope",
        "Of every batch and layer the GPU with most activated experts; means over batches and layers. The budget is "
        "tested between rounds and what tokens bring along (k0) counts, so that a GPU may stand above it.",
        footer([group for group, _, _ in found], *not_drawn("Workloads and rules", left_out)),
        [
            ("fullest GPU", Line2D([], [], **ordered_line(0, 2, color="#0072B2"))),
            ("mean GPU", Line2D([], [], **ordered_line(1, 2, color="#009E73"))),
            ("native: fullest GPU", Line2D([], [], **NATIVE)),
            ("native: mean GPU", Line2D([], [], **UNIFORM)),
        ],
        width=max(5.4 * min(2, len(found)) + 0.4, 8.0),
        body=3.4 * -(-len(found) // 2),
    )
    panels = figure.subplots(-(-len(found) // 2), min(2, len(found)), squeeze=False)
    for axes, (group, label, values) in zip(panels.flat, found, strict=False):
        panel_title(axes, f"{group.title}; {label}", 4.5)
        native = group.cases("native")
        num_ranks = group.facts.num_ranks
        axes.axhline(mean_over(native, "fullest_activated"), zorder=1, **NATIVE)
        axes.axhline(mean_over(native, "activated") / num_ranks, zorder=1, **UNIFORM)
        fullest = [mean_over(cases, "fullest_activated") for cases in values.values()]
        axes.plot(list(values), fullest, **ordered_line(0, 2, color="#0072B2"))
        mean = [mean_over(cases, "activated") / num_ranks for cases in values.values()]
        axes.plot(list(values), mean, **ordered_line(1, 2, color="#009E73"))
        for budget, top, cases in zip(values, fullest, values.values(), strict=True):
            axes.annotate(
                f"{100 * mean_over(cases, 'retained_mass'):.0f} %",
                (budget, top),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
                zorder=1.5,
            )
        axes.set_xticks(list(values))
        axes.set_xlabel("rank_budget (experts per GPU); at the points: mass kept")
        axes.set_ylabel("activated experts on a GPU")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    for axes in list(panels.flat)[len(found) :]:
        axes.set_visible(False)
    marks = []
    for group, _, values in found:
        for budget, cases in ((None, group.cases("native")), *values.items()):
            activated = {
                "activated_experts_fullest_gpu": mean_over(cases, "fullest_activated"),
                "activated_experts_mean_gpu": mean_over(cases, "activated") / group.facts.num_ranks,
                "retained_mass_percent": 100 * mean_over(cases, "retained_mass"),
            }
            marks.append(route_mark(group, cases, rank_budget=budget, **activated))
    return Drawing(figure, table(marks))


def _words(group: RouteGroup) -> str:
    return f"{group.facts.model}, {group.facts.traffic}"


def _marks(look) -> dict:
    return {
        "color": look.colour,
        "linestyle": look.line,
        "linewidth": 1.3,
        "marker": look.marker,
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }
