"""What speed costs: speedup against retained score mass, and against the dropped share, of all policies at once.

A case is on the *front* when no other of its comparison is at least as fast and at least as faithful, and better in
one of the two. Native (speedup 1, all mass, nothing dropped) competes, so what is slower than native is on the front
only where it keeps more than native's mass. Who chooses a policy chooses on the front; by how much its points differ
from native at all is for the noise floor to say, and points within it are hollow. The front connects medians and knows
nothing of their intervals: of two points whose intervals overlap neither beats the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.figures.panels import in_panels, label_outer, lay_out
from moe_ep_bench.analysis.labels import PointLabel, label_points
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.marks import cost_values, floor_row, mark, speedup_values, table
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import GAMMA, INK, MUTED, NOISE_FILL, Drawing, Legend, Look, sheet
from moe_ep_bench.analysis.words import OVERSUBSCRIBED, footer_lines, interval_words

_FRONT = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1, 1))}
_NATIVE = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none", "markeredgewidth": 0}

# Of top-k pairs: a policy that drops more computes nothing that a speedup could be of.
_DROPS_ALL = 0.95
_AT_THE_EDGE = (
    f" At the right edge, off the scale: what drops more than {100 * _DROPS_ALL:.0f} % of the pairs, with its numbers."
)


@dataclass(frozen=True)
class _Cost:
    """The quantity along the bottom, in percent; ``name`` is ``Fidelity``'s."""

    name: str
    label: str
    native: float
    more_is_better: bool

    def of(self, result: CaseResult) -> float:
        assert result.fidelity is not None
        return 100 * getattr(result.fidelity, self.name)


_COSTS = (
    _Cost("retained_mass", "retained score mass (% of top-k's)", 100.0, True),
    _Cost("dropped_share", "dropped (% of top-k pairs)", 0.0, False),
)


def pareto_figure(run: Run, comparisons: list[ComparisonResult], looks: dict[str, Look]) -> Drawing | None:
    """Speedup against what it costs; None where no policy has a speedup."""
    panels = [(comparison, _measured(comparison)) for comparison in comparisons]
    panels = [(comparison, policies) for comparison, policies in panels if policies]
    if not panels:
        return None
    policies_of = {id(comparison): policies for comparison, policies in panels}
    laid = in_panels([comparison for comparison, _ in panels])
    shown = [(comparison, policies_of[id(comparison)]) for comparison in laid.shown]
    facts = [comparison.comparison for comparison, _ in shown]
    is_side_by_side = laid.num_columns == 1
    where = ("left", "right") if is_side_by_side else ("above", "below")
    figure = sheet(
        "What speed costs",
        f"Speedup of the layer over native against retained score mass ({where[0]}) and dropped top-k pairs "
        f"({where[1]}). "
        + interval_words([r.speedup.is_interval for _, policies in shown for r in policies if r.speedup], "Lines")
        + (f" Numbers: capacity factor {GAMMA}." if _has_factors(shown) else "")
        + " Front: no other policy is as fast and as faithful. Hollow: no difference from native beyond the noise "
        "floor, or too few batches to say."
        + (_AT_THE_EDGE if any(_off_scale(policies) for _, policies in shown) else ""),
        footer_lines(
            run, facts, [*([OVERSUBSCRIBED] if any(fact.oversubscribed for fact in facts) else []), *laid.note]
        ),
        _legend(shown, looks),
        width=laid.width,
        body=len(laid.rows) * (4.0 if is_side_by_side else 6.6),
    )
    for row in lay_out(figure, laid, (1, 1), (1, 1)):
        for place in row:
            policies = policies_of[id(place.comparison)]
            for axes, cost in zip(place.axes, _COSTS, strict=True):
                _draw(axes, place.comparison, policies, cost, looks)
                label_points(axes, _labels(axes, policies, cost, looks), _front_line(policies, cost))
            label_outer(place, has_one_x=False)
    rows = [row for comparison, policies in panels for row in _rows(run, comparison, policies)]
    return Drawing(figure, table(rows))


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of (speed, faithfulness) no other beats: places, slowest first; of equal points all.

    A point is beaten by one that is at least as good in both and better in one.
    """
    order = sorted(range(len(points)), key=lambda place: (-points[place][0], -points[place][1]))
    kept: list[int] = []
    best, best_at = -np.inf, np.inf  # the greatest faithfulness so far, and the greatest speed that has it
    for place in order:
        speed, faithfulness = points[place]
        if faithfulness > best or (faithfulness == best and speed == best_at):
            kept.append(place)
            best, best_at = faithfulness, speed
    return kept[::-1]


def _measured(comparison: ComparisonResult) -> list[CaseResult]:
    """Policies with a speedup and its price. Top-k is native once more, and no policy to choose."""
    return [r for r in comparison.policies if r.speedup and r.fidelity and not np.isnan(r.fidelity.retained_mass)]


def _front_of(policies: list[CaseResult], cost: _Cost) -> tuple[list[CaseResult], bool]:
    """Policies on the front by ascending speed, and whether native is on it too."""
    sign = 1 if cost.more_is_better else -1
    points = [(r.speedup.median, sign * cost.of(r)) for r in policies if r.speedup] + [(1.0, sign * cost.native)]
    kept = front(points)
    return [policies[place] for place in kept if place < len(policies)], len(policies) in kept


def _front_line(policies: list[CaseResult], cost: _Cost) -> list[tuple[float, float]]:
    """The front's points from slow to fast, native among them where it is on it."""
    members, has_native = _front_of(policies, cost)
    line = [(cost.of(r), r.speedup.median) for r in members if r.speedup] + [(cost.native, 1.0)] * has_native
    return sorted(line, key=lambda point: point[1])


def _draw(
    axes: Axes, comparison: ComparisonResult, policies: list[CaseResult], cost: _Cost, looks: dict[str, Look]
) -> None:
    floor = comparison.drawn_floor
    if floor is not None:
        axes.axhspan(floor.low, floor.high, color=NOISE_FILL, linewidth=0, zorder=0.5)
    axes.axhline(1, color=INK, linewidth=0.8, zorder=1)
    away = _off_scale(policies)
    for result in policies:
        if result not in away:
            _draw_point(axes, result, cost.of(result), looks[result.family])
    axes.plot(cost.native, 1, zorder=2.2, **_NATIVE)
    axes.set_xlabel(cost.label)
    axes.set_ylabel("speedup (native = 1)")
    axes.margins(x=0.08, y=0.08)
    if cost.more_is_better:
        axes.invert_xaxis()  # what costs more stands to the right in both panels
    left, right = axes.get_xlim()
    # Room for the words of what stands at the edge, where no other mark is.
    axes.set(xlim=(left, right + (0.38 * (right - left) if away else 0.0)), ylim=axes.get_ylim())
    line = _front_line(policies, cost)
    if len(line) > 1:
        # What may cost at most so much has the speedup of the front's last point before it.
        axes.step(*zip(*line, strict=True), where="post", zorder=2, **_FRONT)
    for result in away:
        x, y = _edge_place(axes, result)
        axes.plot(x, y, zorder=3.2, clip_on=False, **_mark(looks[result.family], hollow=not _is_effect(result)))


def _draw_point(axes: Axes, result: CaseResult, x: float, look: Look) -> None:
    assert result.speedup is not None
    axes.vlines(x, result.speedup.low, result.speedup.high, color=look.colour, linewidth=1.2, zorder=2.5)
    axes.plot(x, result.speedup.median, zorder=3, **_mark(look, hollow=not _is_effect(result)))


def _off_scale(policies: list[CaseResult]) -> list[CaseResult]:
    """Those that drop as good as everything, where others do not: what they gain is no speed of a layer."""
    away = [result for result in policies if result.fidelity and result.fidelity.dropped_share > _DROPS_ALL]
    return away if len(away) < len(policies) else []


def _edge_place(axes: Axes, result: CaseResult) -> tuple[float, float]:
    """The place in the panel that is nearest to a point off its scale: at its right edge."""
    assert result.speedup is not None
    low, high = axes.get_ylim()
    pad = 0.09 * (high - low)
    return axes.get_xlim()[1], min(max(result.speedup.median, low + pad), high - pad)


def _has_factors(panels: list[tuple[ComparisonResult, list[CaseResult]]]) -> bool:
    return any(result.capacity_factor is not None for _, policies in panels for result in policies)


def _labels(axes: Axes, policies: list[CaseResult], cost: _Cost, looks: dict[str, Look]) -> list[PointLabel]:
    """Points of one policy are told apart by their capacity factor; what stands at the edge has its numbers."""
    labels = [PointLabel("", cost.native, 1.0, 1.0, 1.0, INK)]
    away = _off_scale(policies)
    for result in sorted(policies, key=lambda one: one not in away):  # those at the edge choose their place first
        assert result.speedup is not None
        colour = looks[result.family].colour
        if result in away:
            x, y = _edge_place(axes, result)
            text = f"speedup {result.speedup.median:.2f}\nat {cost.of(result):.0f} %"
            labels.append(PointLabel(text, x, y, y, y, colour))
        else:
            text = "" if result.capacity_factor is None else f"{result.capacity_factor:g}"
            ends = result.speedup.median, result.speedup.low, result.speedup.high
            labels.append(PointLabel(text, cost.of(result), *ends, colour))
    return labels


def _is_effect(result: CaseResult) -> bool:
    return result.verdict in ("faster", "slower")


def _mark(look: Look, *, hollow: bool) -> dict:
    return {
        "linestyle": "none",
        "marker": look.marker,
        "markersize": 8 if hollow else 7,
        "markerfacecolor": "none" if hollow else look.colour,
        "markeredgecolor": look.colour if hollow else "white",
        "markeredgewidth": 1.4 if hollow else 0.6,
    }


def _legend(panels: list[tuple[ComparisonResult, list[CaseResult]]], looks: dict[str, Look]) -> Legend:
    shown = [result for _, policies in panels for result in policies]
    legend: list[tuple[str, Line2D | Patch]] = [("native", Line2D([], [], **_NATIVE))]
    for family, look in looks.items():
        if any(result.family == family for result in shown):
            legend.append((look.label, Line2D([], [], **_mark(look, hollow=False))))
    if not all(_is_effect(result) for result in shown):
        legend.append(
            ("no difference, or cannot say", Line2D([], [], **_mark(Look("", MUTED, "o", "-", ""), hollow=True)))
        )
    legend.append(("front", Line2D([], [], **_FRONT)))
    if any(comparison.drawn_floor for comparison, _ in panels):
        legend.append(("noise floor", Patch(facecolor=NOISE_FILL)))
    return legend


def _rows(run: Run, comparison: ComparisonResult, policies: list[CaseResult]) -> Iterator[dict]:
    on_front = {cost.name: {r.case.case_id for r in _front_of(policies, cost)[0]} for cost in _COSTS}
    for result in policies:
        yield mark(
            run,
            comparison,
            result,
            **speedup_values(result.speedup),
            verdict=result.verdict,
            **cost_values(result),
            **{f"on_front_of_{name}": result.case.case_id in members for name, members in on_front.items()},
        )
    yield from floor_row(run, comparison)
