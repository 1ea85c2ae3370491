"""How speedup and layer time scale: over EP size, tokens per rank, and whatever else of numbers a config sweeps.

Whether a policy pays on eight ranks says little of 64. Comparisons come from a sweep or from several directories, one
per size of job. A line connects only comparisons that differ in nothing but the quantity along the bottom. EP size is
the exception that has to choose: with it either the tokens of a rank stay (weak scaling) or the tokens of all ranks
(strong scaling), and each has a panel of its own. Of a policy with several capacity factors the smallest is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.marks import mark, speedup_values, table
from moe_ep_bench.analysis.origins import frame, mark_look
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.analysis.style import INK, NOISE_FILL, Drawing, Legend, Look, case_name, panel_title, sheet
from moe_ep_bench.analysis.sweep import EP_SIZE, key_words, value_of, value_words
from moe_ep_bench.analysis.words import OVERSUBSCRIBED, footer_lines, interval_words, milliseconds, origin_word
from moe_ep_bench.workload.formatting import tokens_words

_TOKEN_KEYS = ("workload.num_tokens", "workload.tokens_per_rank")
_SIZES = (EP_SIZE, *_TOKEN_KEYS)
# What follows from the sizes, or only names them.
_FOLLOWS = {
    *("title", "num_ranks", "num_replicas", "world_size", "num_tokens", "oversubscribed", "point", "workload"),
    *("links", "device", "experts", "permute", "kernel"),
}
_MAX_PANELS, _MAX_FAMILIES = 6, 7
_DODGE = 0.075  # inches between policies at one value


@dataclass(frozen=True, eq=False)
class Scaling:
    """Comparisons along one quantity, all else equal.

    Attributes:
        quantity: what the axis is labelled with; ``held`` what is the same, in words.
        points: value and comparison, by ascending value; at least two values.
    """

    quantity: str
    held: str
    points: list[tuple[float, ComparisonResult]]

    @property
    def values(self) -> list[float]:
        return [value for value, _ in self.points]


def scaling_figure(run: Run, comparisons: list[ComparisonResult], looks: dict[str, Look]) -> Drawing | None:
    """Speedup and, below it, layer time along what varies; None where nothing does."""
    found = scalings(run, comparisons)
    if not found:
        return None
    shown = found[:_MAX_PANELS]
    families = [
        family for family in looks if any(_case(one, family) for scaling in shown for _, one in scaling.points)
    ][:_MAX_FAMILIES]
    facts = list(dict.fromkeys(id(one.comparison) for scaling in shown for _, one in scaling.points))
    by_id = {id(one.comparison): one.comparison for one in comparisons}
    warnings = [OVERSUBSCRIBED] if any(by_id[key].oversubscribed for key in facts) else []
    if len(found) > len(shown):
        warnings.append(f"{len(found) - len(shown)} more combinations are not drawn.")
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure = sheet(
        "How speedup and layer time scale",
        "Speedup over native; below it the slowest rank's time of one layer, median. "
        + interval_words(_are_intervals(shown, families), "Upright lines")
        + " A line connects comparisons that differ in nothing but the axis. Of each policy the smallest capacity "
        "factor.",
        footer_lines(run, [by_id[key] for key in facts], warnings),
        _legend(run, shown, families, looks),
        width=8.5 if columns == 1 else 12.5,
        body=4.8 * rows,
    )
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[1.5, 1] * rows)
    marks: list[dict] = []
    for number, scaling in enumerate(shown):
        row, column = divmod(number, columns)
        above = figure.add_subplot(grid[2 * row, column])
        below = figure.add_subplot(grid[2 * row + 1, column], sharex=above)
        panel_title(above, scaling.held, 6.6 if columns == 1 else 4.9)
        _draw(run, above, below, scaling, families, looks)
        marks += _rows(run, scaling, families)
    return Drawing(figure, table(marks))


def scalings(run: Run, comparisons: Sequence[ComparisonResult]) -> list[Scaling]:
    """Every set of comparisons that differ in one quantity, in the order EP size, tokens, swept numbers."""
    measured = [one for one in comparisons if one.of_role("baseline") is not None]
    swept = dict.fromkeys(key for one in measured for key in one.comparison.point if key not in _SIZES)
    found = [
        *_along("EP size (ranks), tokens per rank held", measured, _ep_size, _tokens_per_rank),
        *_along("EP size (ranks), tokens of all ranks held", measured, _ep_size, lambda facts: facts.num_tokens),
        *_along("tokens per rank", measured, _tokens_per_rank, lambda facts: (facts.num_ranks, facts.world_size)),
    ]
    for key in swept:
        having = [one for one in measured if key in one.comparison.point]
        if all(isinstance(value_of(key, one.comparison), float) for one in having):
            found += _along(
                key_words(key),
                having,
                lambda facts, key=key: value_of(key, facts),
                lambda facts: (facts.num_ranks, facts.world_size, facts.num_tokens),
                swept=key,
            )
    return found


def _along(
    quantity: str, comparisons: Sequence[ComparisonResult], value, held, swept: str | None = None
) -> list[Scaling]:
    groups: dict[str, list[tuple[float, ComparisonResult]]] = {}
    for one in comparisons:
        key = json.dumps([held(one.comparison), _identity(one.comparison, swept)], sort_keys=True, default=str)
        members = groups.setdefault(key, [])
        if value(one.comparison) not in [known for known, _ in members]:  # of equal ones the first stands
            members.append((float(value(one.comparison)), one))
    return [
        Scaling(quantity, _held_words(members[0][1].comparison, quantity, swept), sorted(members, key=lambda m: m[0]))
        for members in groups.values()
        if len(members) > 1
    ]


def _identity(facts: Comparison, swept: str | None) -> list:
    """All that must be the same, but for sizes, and the quantity that varies."""
    same = {name: value for name, value in facts.model_dump(mode="json").items() if name not in _FOLLOWS}
    point = {key: value for key, value in facts.point.items() if key not in _SIZES and key != swept}
    parts = [part.ran for part in (facts.experts, facts.permute)]
    origin = [words and words.split(":")[0] for words in (facts.links, facts.device)]
    # Of what is swept the title's words differ; otherwise they name the traffic, which must not.
    title = [] if swept is not None else [_traffic(facts)]
    return [same, point, parts, origin, facts.workload.kind, facts.workload.padding and 1, title]


def _traffic(facts: Comparison) -> str:
    """A comparison's title without its sizes; results of older versions say "1 tokens"."""
    return re.sub(r", EP \d+|, [\d,]+ tokens?\b", "", facts.title)


def _ep_size(facts: Comparison) -> int:
    return facts.num_ranks


def _tokens_per_rank(facts: Comparison) -> float:
    return facts.num_tokens / facts.world_size


def _held_words(facts: Comparison, quantity: str, swept: str | None) -> str:
    words = [facts.model if swept is not None else _traffic(facts)]
    if not quantity.startswith("EP size"):
        words.append(f"EP {facts.num_ranks}")
    if quantity.endswith("tokens of all ranks held") or swept is not None:
        words.append(tokens_words(facts.num_tokens))
    elif quantity.startswith("EP size"):
        words.append(f"{_tokens_per_rank(facts):,.0f} tokens per rank")
    others = [key for key in facts.point if key not in _SIZES and key != swept]
    words += [f"{key_words(key)} {value_words(value_of(key, facts))}" for key in others]
    return ", ".join(words)


def _case(comparison: ComparisonResult, family: str) -> CaseResult | None:
    """The policy with its smallest capacity factor; policies stand in reading order, so factors ascend."""
    return next((r for r in comparison.policies if r.family == family and r.speedup is not None), None)


def _are_intervals(shown: list[Scaling], families: list[str]) -> list[bool]:
    cases = [_case(one, family) for scaling in shown for _, one in scaling.points for family in families]
    return [case.speedup.is_interval for case in cases if case is not None and case.speedup is not None]


def _how(run: Run, scaling: Scaling) -> str:
    """Where the numbers of a panel come from; comparisons of several origins are in no panel together."""
    return origin_word(run, scaling.points[0][1].comparison)


def _draw(run: Run, above: Axes, below: Axes, scaling: Scaling, families: list[str], looks: dict[str, Look]) -> None:
    values = scaling.values
    floors = [(value, one.drawn_floor) for value, one in scaling.points if one.drawn_floor is not None]
    if floors:
        x, low, high = zip(*((value, floor.low, floor.high) for value, floor in floors), strict=True)
        above.fill_between(x, low, high, color=NOISE_FILL, linewidth=0, zorder=0.5)
    above.axhline(1, color=INK, linewidth=1.2, zorder=1)
    heights = [1.0, *(end for _, floor in floors for end in (floor.low, floor.high))]
    natives = [(value, one.of_role("baseline")) for value, one in scaling.points]
    how = _how(run, scaling)
    native_ms = [(value, result.layer.median_ms) for value, result in natives if result and result.layer]
    below.plot(*zip(*native_ms, strict=True), **_line(INK, "*", how, markersize=10))
    for number, family in enumerate(families):
        cases = [(value, _case(one, family)) for value, one in scaling.points]
        known = [(value, result) for value, result in cases if result is not None and result.speedup and result.layer]
        if not known:
            continue
        look = _line(looks[family].colour, looks[family].marker, how)
        x = [value for value, _ in known]
        # Beside each other: intervals at one value would lie on one another.
        aside = ScaledTranslation(_DODGE * (number - (len(families) - 1) / 2), 0, above.figure.dpi_scale_trans)
        beside = {"transform": above.transData + aside}
        above.plot(x, [result.speedup.median for _, result in known], zorder=3, **beside, **look)
        low, high = zip(*((result.speedup.low, result.speedup.high) for _, result in known), strict=True)
        above.vlines(x, low, high, color=looks[family].colour, linewidth=1.4, zorder=2.5, **beside)
        heights += [*low, *high]
        below.plot(x, [result.layer.median_ms for _, result in known], zorder=3, **look)
    for axes in (above, below):
        frame(axes, how)
        axes.grid(False, axis="x")
    if values[0] > 0 and values[-1] / values[0] >= 4:
        above.set_xscale("log", base=2)
    above.set_xticks(values, [f"{value:,g}" for value in values])
    above.minorticks_off()
    above.margins(x=0.08)
    pad = 0.08 * max(max(heights) - min(heights), 0.1)
    above.set_ylim(min(heights) - pad, max(heights) + pad)
    below.margins(y=0.08)
    above.tick_params(labelbottom=False)
    above.set_ylabel("speedup (native = 1)")
    times_ms = [time_ms for _, time_ms in native_ms]
    if min(times_ms) > 0 and max(times_ms) / min(times_ms) >= 8:
        below.set_yscale("log", base=2)
        below.yaxis.set_major_formatter(
            lambda time_ms, _: milliseconds(time_ms, 2) if time_ms < 10 else f"{time_ms:,.0f}"
        )
        below.minorticks_off()
    else:
        below.set_ylim(0, 1.08 * below.dataLim.y1)
    below.set_ylabel("layer time (ms)")
    below.set_xlabel(scaling.quantity)


def _line(colour: str, marker: str, how: str, markersize: float = 6) -> dict:
    return {"color": colour, "marker": marker, "markersize": markersize, **mark_look(how, colour)}


def _legend(run: Run, shown: list[Scaling], families: list[str], looks: dict[str, Look]) -> Legend:
    """Marks as the panels draw them; where panels differ in origin, as the first of them does."""
    native = _line(INK, "*", _how(run, shown[0]), 10)
    legend: list[tuple[str, Line2D | Patch]] = [("native", Line2D([], [], **native))]
    for family in families:
        first = next(scaling for scaling in shown if any(_case(one, family) for _, one in scaling.points))
        look = _line(looks[family].colour, looks[family].marker, _how(run, first))
        legend.append((_name(shown, family, looks), Line2D([], [], **look)))
    if any(one.drawn_floor for scaling in shown for _, one in scaling.points):
        legend.append(("noise floor", Patch(facecolor=NOISE_FILL)))
    return legend


def _name(shown: list[Scaling], family: str, looks: dict[str, Look]) -> str:
    """The family's name, with the capacity factor where all panels show the same one."""
    cases = [_case(one, family) for scaling in shown for _, one in scaling.points]
    names = {case_name(case, looks) for case in cases if case is not None}
    return names.pop() if len(names) == 1 else looks[family].label


def _rows(run: Run, scaling: Scaling, families: list[str]) -> Iterator[dict]:
    for value, one in scaling.points:
        for result in (one.of_role("baseline"), *(_case(one, family) for family in families)):
            if result is not None and result.layer is not None:
                values = {"quantity": scaling.quantity, "value": value, "layer_time_us": 1e3 * result.layer.median_ms}
                yield mark(run, one, result, **values, **speedup_values(result.speedup))
