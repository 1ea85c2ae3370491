"""What the figures of a route directory share: which groups and cases they show, lines, ticks and footers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.style import INK, MUTED, Look
from moe_ep_bench.analysis.words import MODE_WORDS, Footer, Origin

if TYPE_CHECKING:  # It imports torch, which the figures of recordings do without.
    from moe_ep_bench.analysis.route_load import RouteGroup, RouteRun

# From no load (white) to the most.
HEAT = LinearSegmentedColormap.from_list("heat", ["#FFFFFF", "#B9D8EC", "#56B4E9", "#0072B2", "#00334F"])
# Ordered things: layers from first to last, a field from its least value to its greatest.
ORDERED = LinearSegmentedColormap.from_list("ordered", ["#56B4E9", "#009E73", "#E69F00", "#D55E00"])
NATIVE = {"color": INK, "linewidth": 1.6, "linestyle": (0, (5, 2))}
MEAN = {"color": INK, "linewidth": 2, "marker": "o", "markeredgecolor": "white", "markeredgewidth": 0.6}
BALANCE = {"color": MUTED, "linewidth": 1, "linestyle": (0, (2, 2))}
UNIFORM = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.5}
STAR = {"color": INK, "marker": "*", "markersize": 11, "linestyle": "none"}

MAX_PANELS = 4
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
# Of the seven colours the last is black, and native's.
_MAX_LINES = 6
_MAX_DESCRIPTIONS = 2
# The decoding batch of the papers.
_PAPERS_BATCH = 16


def largest(run: RouteRun) -> list[RouteGroup]:
    """One group of each family, that with the largest batches."""
    return _one_of_each(run, lambda group: -group.facts.num_tokens)


def nearest_to_papers(run: RouteRun) -> list[RouteGroup]:
    """One group of each family, that whose batch comes nearest to the papers' 16 tokens."""
    return _one_of_each(run, lambda group: abs(group.facts.num_tokens - _PAPERS_BATCH))


def _one_of_each(run: RouteRun, key: Callable[[RouteGroup], int]) -> list[RouteGroup]:
    return [min(groups, key=key) for groups in families(run)]


def families(run: RouteRun) -> list[list[RouteGroup]]:
    """Groups that differ in the size of their batches only, the smallest batch first."""
    found: dict[str, list[RouteGroup]] = {}
    for group in run.groups:
        found.setdefault(group.facts.family, []).append(group)
    return [sorted(groups, key=lambda group: group.facts.num_tokens) for groups in found.values()]


def by_field(group: RouteGroup, field: str, *policies: str, least: int = 2, **wanted: Any) -> pd.DataFrame:
    """Cases of some policies that differ in one field only.

    Args:
        least: as many values a line must have.
        wanted: what other fields must be; a case in which ``field`` is null has no place.

    Returns:
        Rows of ``group.cases`` with ``line``, the label without the field, and ``value``, the field's: line by line,
        values ascending.
    """
    fits = [
        policy in policies and params.get(field) is not None and wanted.items() <= params.items()
        for policy, params in zip(group.cases["policy"], group.cases["params"], strict=True)
    ]
    cases = group.cases[fits]
    lines = [without(label, field) for label in cases.index]
    cases = cases.assign(line=lines, value=[params[field] for params in cases["params"]]).sort_values("value")
    by_line = [cases[cases["line"] == line] for line in dict.fromkeys(lines) if lines.count(line) >= least]
    return pd.concat(by_line) if by_line else cases.iloc[:0]


def lines_of(
    groups: Iterable[RouteGroup], field: str, *policies: str, **wanted: Any
) -> list[tuple[RouteGroup, str, pd.DataFrame]]:
    """(group, line, cases) for every line of ``by_field``."""
    return [
        (group, str(line), cases)
        for group in groups
        for line, cases in by_field(group, field, *policies, **wanted).groupby("line", sort=False)
    ]


def without(label: str, field: str) -> str:
    """A case's label without one of its fields."""
    return re.sub(rf" {field}=\S+", "", label)


def figure_rows(parts: Iterable[tuple[RouteGroup, pd.DataFrame]]) -> pd.DataFrame:
    """The frame of a figure: what each group's rows are of, then their numbers, then where these come from.

    Of rows with a ``label`` it also says the policy and its capacity factor.
    """
    frames = []
    for group, rows in parts:
        facts = group.facts
        about: dict[str, Any] = {
            "comparison": group.title,
            "model": facts.model,
            "num_ranks": facts.num_ranks,
            "num_tokens": facts.num_tokens,
        }
        if "label" in rows:
            params = rows["label"].map(group.cases["params"])
            about |= {"policy": rows["label"], "capacity_factor": params.map(lambda of: of.get("capacity_factor"))}
        numbers = {name: rows[name] for name in rows if name != "label"}
        # Nothing was timed (``marks``).
        come_from = {"origin": "routed", "workload": facts.workload.kind}
        frames.append(pd.DataFrame({**about, **numbers, **come_from}, index=rows.index))
    return pd.concat(frames, ignore_index=True)


def few(labels: Sequence[Any], most: int = _MAX_LINES) -> list[Any]:
    """At most so many labels, evenly spaced in their order."""
    if len(labels) <= most:
        return list(labels)
    return [labels[place] for place in np.unique(np.linspace(0, len(labels) - 1, most).round().astype(int))]


def grid(figure: Figure, number: int, columns: int, **options: Any) -> np.ndarray:
    """Panels in rows of ``columns``, of which those beyond ``number`` are not shown: [rows, columns]."""
    panels = figure.subplots(-(-number // columns), columns, squeeze=False, **options)
    for axes in panels.flat[number:]:
        axes.set_visible(False)
    return panels


def ordered_line(place: int, number: int, **changes: Any) -> dict:
    """The line of one of several ordered things."""
    return {
        "color": ORDERED(place / max(1, number - 1)),
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 4.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
        "linewidth": 1.4,
        **changes,
    }


def look_line(look: Look, width: float = 1.3, size: float = 5) -> dict:
    """The line of a policy."""
    return {
        "color": look.colour,
        "linestyle": look.line,
        "linewidth": width,
        "marker": look.marker,
        "markersize": size,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }


def thin_line(place: int, number: int) -> dict:
    return {"color": ORDERED(place / max(1, number - 1)), "linewidth": 0.9, "alpha": 0.8}


def layer_legend(names: Sequence[str]) -> list[tuple[str, Line2D]]:
    """How thin lines run from the first layer to the last."""
    last = [(f"to layer {names[-1]}", Line2D([], [], **thin_line(1, 2)))] if len(names) > 1 else []
    return [(f"layer {names[0]}", Line2D([], [], **thin_line(0, 2))), *last]


def ticks(length: int, most: int) -> np.ndarray:
    """At most ``most`` evenly spaced indices of ``length``, from 0, a round step apart."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, length) if length <= step * most)
    return np.arange(0, length, step)


def layer_ticks(axes: Axes, names: Sequence[str], most: int = 9, axis: str = "x") -> None:
    places = ticks(len(names), most)
    labels = [names[place] for place in places]
    axes.set(**{f"{axis}ticks": places, f"{axis}ticklabels": labels, f"{axis}label": "layer"})


def size_ticks(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch (tokens)")


def footer(groups: Sequence[RouteGroup], *notes: str, looks_past: bool = True) -> Footer:
    """What stands under a figure: how the numbers came about, which workload, and what weakens them."""
    workloads = [group.facts.workload for group in groups]
    described = list(dict.fromkeys(_description(group) for group in groups))
    shown = described[: _MAX_DESCRIPTIONS if len(described) <= _MAX_DESCRIPTIONS else 1]
    others = [f"and others ({len(described) - len(shown)})"] if len(described) > len(shown) else []
    lines = [" | ".join([MODE_WORDS["route"], *shown, *others])]
    tails = dict.fromkeys(workload.tail_model for workload in workloads if workload.tail_model)
    if looks_past and tails:
        lines.append(f"Scores below the recorded top-k are assumed: {' / '.join(tails)} tail model.")
    return Footer([*lines, *notes], [Origin("routed", workload.kind) for workload in workloads])


def not_drawn(what: str, number: int) -> list[str]:
    """The footer's word on what the rows hold and the figure has no room for."""
    return [f"{what} in the rows that are not drawn: {number}."] if number > 0 else []


def _description(group: RouteGroup) -> str:
    """The workload's own words, of all layers together."""
    words, names = group.facts.workload.description, group.layer_names
    if len(names) == 1:
        return words
    return re.sub(r"layer \d+", f"{len(names)} layers from {names[0]} to {names[-1]}", words, count=1)


def heading(groups: Sequence[RouteGroup], otherwise: str) -> str:
    """What a figure shows, as its subtitle begins: the one group, or how several are told apart."""
    return f"{groups[0].title if len(groups) == 1 else otherwise}. "


def workload_name(group: RouteGroup, groups: Sequence[RouteGroup]) -> str:
    """What tells a group from the others of a figure: its traffic, and its model where they have several."""
    models = {one.facts.model for one in groups}
    return group.facts.traffic if len(models) == 1 else f"{group.facts.model}, {group.facts.traffic}"
