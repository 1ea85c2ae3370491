"""The figures along the axis of policies (``policy_axis``): ``speedup`` and ``dropped``.

One line per policy family (a policy with all its parameters but the capacity factor) over capacity factors, and a
mark beside its name for each policy without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.figures.panels import in_panels, label_outer, lay_out, one_scale
from moe_ep_bench.analysis.figures.policy_axis import PolicyAxis, marks
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import cost_values, floor_row, mark, speedup_values, table
from moe_ep_bench.analysis.sizes import current_size
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import (
    CEILING_LINE,
    INK,
    MUTED,
    NOISE_FILL,
    Drawing,
    Look,
    panel_title,
    row_title,
    sheet,
)
from moe_ep_bench.analysis.words import OVERSUBSCRIBED, footer_lines, interval_words, pairs_words

_SPEEDUP = "speedup (native = 1)"

Looks = dict[str, Look]


def speedup_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Layer speedup by policy, against noise floor and ceiling; with it what the same cases drop."""
    panels = [(c, [r for r in c.policies if r.speedup]) for c in comparisons]
    panels = [(comparison, policies) for comparison, policies in panels if policies]
    if not panels:
        return None
    facts = [comparison.comparison for comparison, _ in panels]
    axis = PolicyAxis.of([result for _, policies in panels for result in policies], looks)
    columns = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // columns)
    figure = sheet(
        "Layer speedup over native Megatron-Core",
        f"Slowest rank's time of one MoE layer, native over policy: {pairs_words(facts)}. "
        + interval_words([r.speedup.is_interval for _, policies in panels for r in policies if r.speedup])
        + (" Noise floor: native run twice." if any(comparison.drawn_floor for comparison, _ in panels) else "")
        + (" Perfect balance: native on balanced scores." if any(_ceiling(one) for one, _ in panels) else "")
        + " Dropped: top-k pairs not computed.",
        footer_lines(run, facts, [OVERSUBSCRIBED] if any(fact.oversubscribed for fact in facts) else []),
        [
            *(() if axis.is_upright else _family_legend(panels, looks)),
            *_reference_legend([comparison for comparison, _ in panels]),
        ],
        width=8.5 if columns == 1 else 13.5 if axis.is_upright else 12.5,
        body=rows * (axis.height + 0.3 if axis.is_upright else 4.6),
    )
    inches = 6.6 if columns == 1 else 4.7
    for place, above, below in _pairs_of_axes(figure, rows, columns, len(panels), is_upright=axis.is_upright):
        comparison, policies = panels[place]
        if axis.is_upright:
            row_title(above, [below], comparison.comparison.title, inches)
        else:
            panel_title(above, comparison.comparison.title, inches - 0.2)
        for axes in (above, below):
            axis.label(axes, looks, inches, is_named=axes is above or current_size().is_stacked)
        axis.draw(above, policies, looks, lambda r: r.speedup.median, lambda r: (r.speedup.low, r.speedup.high))
        axis.draw(below, policies, looks, _dropped)
        if axis.is_upright:
            _reference_lines_upright(above, comparison, policies)
            above.set_xlabel(_SPEEDUP)
            below.set_xlabel("dropped (%)")
            below.set_xlim(*_limits([0, *map(_dropped, policies)], least=5))
        else:
            _reference_lines(above, comparison, policies)
            above.set_ylabel(_SPEEDUP)
            above.set_xlabel("")
            above.tick_params(labelbottom=False)
            below.set_ylabel("dropped (%)")
            below.set_ylim(*_limits([0, *map(_dropped, policies)], least=5))
    rows_of_marks: list[dict] = []
    for comparison, policies in panels:
        ceiling = comparison.of_role("ceiling")
        shown = [*policies, *([ceiling] if ceiling is not None and ceiling.speedup else [])]
        rows_of_marks += [mark(run, comparison, r, **speedup_values(r.speedup), **cost_values(r)) for r in shown]
        rows_of_marks += floor_row(run, comparison)
    return Drawing(figure, table(rows_of_marks))


def _pairs_of_axes(
    figure: Figure, rows: int, columns: int, number: int, *, is_upright: bool
) -> Iterator[tuple[int, Axes, Axes]]:
    """For each comparison two panels that share the axis of policies: one above the other, or side by side."""
    if not is_upright:
        grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3.2, 1.2] * rows)
    else:
        grid = figure.add_gridspec(rows, 2 * columns, width_ratios=[3.2, 1.3] * columns)
    for place in range(number):
        row, column = divmod(place, columns)
        if not is_upright:
            above = figure.add_subplot(grid[2 * row, column])
            yield place, above, figure.add_subplot(grid[2 * row + 1, column], sharex=above)
        else:
            left = figure.add_subplot(grid[row, 2 * column])
            yield place, left, figure.add_subplot(grid[row, 2 * column + 1], sharey=left)


def dropped_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """What the policies cost: dropped share and retained mass."""
    having = [comparison for comparison in comparisons if comparison.policies]
    if not having:
        return None
    panels = in_panels(having)
    shown = [(comparison, comparison.policies) for comparison in panels.shown]
    axis = PolicyAxis.of([result for _, policies in shown for result in policies], looks)
    height = axis.height if axis.is_upright else 2.9
    figure = sheet(
        "What the policies cost: dropped pairs and retained score mass",
        "All ranks' tokens together, mean over batches. Dropped: top-k pairs that are not computed. "
        "Retained: score mass of what is computed over that of the model's own top-k.",
        footer_lines(run, [comparison.comparison for comparison in panels.shown], panels.note),
        () if axis.is_upright else _family_legend(shown, looks),
        width=panels.width,
        body=len(panels.rows) * (height + 0.5 if panels.num_columns == 1 else 2 * height + 0.4),
    )
    rows = lay_out(figure, panels, (1, 1), (1, 1))
    places = [place for row in rows for place in row]
    for place in places:
        for axes, is_first in zip(place.axes, place.is_first, strict=True):
            axis.label(
                axes,
                looks,
                panels.width / max(2, panels.num_columns) - 0.7,
                is_named=is_first or current_size().is_stacked,
            )
        _draw_costs(*place.axes, place.comparison.policies, looks, axis)
        label_outer(place, has_one_x=not axis.is_upright)
    for of_quantity in zip(*(place.axes for place in places), strict=True):
        one_scale(of_quantity, "x" if axis.is_upright else "y")
    marked = [mark(run, comparison, r, **cost_values(r)) for comparison in having for r in comparison.policies]
    return Drawing(figure, table(marked))


def _draw_costs(dropped: Axes, retained: Axes, policies: list[CaseResult], looks: Looks, axis: PolicyAxis) -> None:
    axis.draw(dropped, policies, looks, _dropped)
    axis.draw(retained, policies, looks, _retained)
    (retained.axvline if axis.is_upright else retained.axhline)(100, color=INK, linewidth=1.2, zorder=1)
    words = "dropped (% of top-k pairs)", "retained score mass (% of top-k's)"
    for axes, label, of, native in zip((dropped, retained), words, (_dropped, _retained), (0.0, 100.0), strict=True):
        limits = _limits([native, *map(of, policies)], least=5)
        if axis.is_upright:
            axes.set_xlabel(label)
            axes.set_xlim(*limits)
        else:
            axes.set_ylabel(label)
            axes.set_ylim(*limits)


def _dropped(result: CaseResult) -> float:
    assert result.fidelity is not None
    return 100 * result.fidelity.dropped_share


def _retained(result: CaseResult) -> float:
    assert result.fidelity is not None
    return 100 * result.fidelity.retained_mass


def _reference_lines_upright(axes: Axes, comparison: ComparisonResult, policies: list[CaseResult]) -> None:
    """The same where speedup runs along the bottom; what the lines are the legend says."""
    axes.axvline(1, color=INK, linewidth=1.2, zorder=1)
    floor, ceiling = comparison.drawn_floor, _ceiling(comparison)
    if floor is not None:
        axes.axvspan(floor.low, floor.high, color=NOISE_FILL, linewidth=0, zorder=0.5)
    if ceiling is not None:
        axes.axvline(ceiling, zorder=1, **CEILING_LINE)
    axes.set_xlim(*_limits(_heights(comparison, policies), least=0.1))


def _heights(comparison: ComparisonResult, policies: list[CaseResult]) -> list[float]:
    """Every speedup that a panel must have room for."""
    floor, ceiling = comparison.drawn_floor, _ceiling(comparison)
    return [
        1.0,
        *(end for r in policies if r.speedup for end in (r.speedup.low, r.speedup.high)),
        *((floor.low, floor.high) if floor is not None else ()),
        *((ceiling,) if ceiling is not None else ()),
    ]


def _reference_lines(axes: Axes, comparison: ComparisonResult, policies: list[CaseResult]) -> None:
    """Native at 1 with the noise floor about it, and the ceiling, labelled beside the panel, clear of the data."""
    labels = [(1.0, "native")]
    axes.axhline(1, color=INK, linewidth=1.2, zorder=1)
    floor = comparison.drawn_floor
    if floor is not None:
        axes.axhspan(floor.low, floor.high, color=NOISE_FILL, linewidth=0, zorder=0.5)
    ceiling = _ceiling(comparison)
    if ceiling is not None:
        axes.axhline(ceiling, zorder=1, **CEILING_LINE)
        labels.append((ceiling, f"balance\n{ceiling:.2f}"))
    low, high = _limits(_heights(comparison, policies), least=0.1)
    axes.set_ylim(low, high)
    places = [(height - low) / (high - low) for height, _ in labels]
    if len(labels) == 2:  # labels that would touch move apart
        push = max(0.0, 0.1 - abs(places[1] - places[0])) / 2
        up = 1 if places[1] > places[0] else -1
        places = [places[0] - up * push, places[1] + up * push]
    for place, (_, text) in zip(places, labels, strict=True):
        axes.annotate(
            text,
            (1.012, place),
            xycoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=MUTED,
            annotation_clip=False,
        )


def _ceiling(comparison: ComparisonResult) -> float | None:
    result = comparison.of_role("ceiling")
    return result.speedup.median if result and result.speedup else None


def _family_legend(panels: list[tuple[ComparisonResult, list[CaseResult]]], looks: Looks) -> list[tuple[str, Artist]]:
    drawn = {result.family for _, policies in panels for result in policies}
    return [(look.label, Line2D([], [], **marks(look))) for family, look in looks.items() if family in drawn]


def _reference_legend(comparisons: list[ComparisonResult]) -> list[tuple[str, Artist]]:
    legend: list[tuple[str, Artist]] = [("native", Line2D([], [], color=INK, linewidth=1.2))]
    if any(comparison.drawn_floor for comparison in comparisons):
        legend.append(("noise floor", Patch(facecolor=NOISE_FILL)))
    if any(_ceiling(comparison) for comparison in comparisons):
        legend.append(("perfect balance", Line2D([], [], **CEILING_LINE)))
    return legend


def _limits(values: Iterable[float], least: float) -> tuple[float, float]:
    """Limits about finite values, at least ``least`` apart, so that noise is not blown up to fill a panel."""
    finite = [value for value in values if np.isfinite(value)]
    low, high = min(finite), max(finite)
    missing = max(0.0, least - (high - low)) / 2
    pad = 0.07 * max(high - low, least)
    return low - missing - pad, high + missing + pad
