"""How speedup and layer time scale: over EP size, tokens per rank, and whatever else of numbers a config sweeps.

Whether a policy pays on eight ranks says little of 64. Comparisons come from a sweep or from several directories, one
per size of job. A line connects only comparisons that differ in nothing but the quantity along the bottom. EP size is
the exception that has to choose: with it either the tokens of a rank stay (weak scaling) or the tokens of all ranks
(strong scaling), and each has a panel of its own. Of a policy with several capacity factors the smallest is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from moe_ep_bench.analysis.figures.panels import (
    SPEEDUP_LABEL,
    drawn_floors,
    num_rows,
    pairs_of_axes,
    reference_legend,
    speedup_limits,
    warnings_of,
)
from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.marks import SPEEDUP, as_csv, cases
from moe_ep_bench.analysis.speedups import ComparisonResult
from moe_ep_bench.analysis.style import (
    INK,
    NATIVE_LINE,
    NOISE_FILL,
    Drawing,
    Legend,
    Looks,
    case_name,
    frame,
    mark_look,
    sheet,
)
from moe_ep_bench.analysis.sweep import EP_SIZE, key_words, value_of, value_words
from moe_ep_bench.analysis.words import footer_lines, interval_words, milliseconds
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


def scaling_figure(run: Run, comparisons: list[ComparisonResult], looks: Looks) -> Drawing | None:
    """Speedup and, below it, layer time along what varies; None where nothing does."""
    found = scalings(run, comparisons)
    if not found:
        return None
    shown = found[:_MAX_PANELS]
    panels = [_rows(run, scaling) for scaling in shown]
    rows = pd.concat(panels, ignore_index=True)
    policies = rows[rows["role"] == "policy"]
    having = set(policies["family"])
    families = [family for family in looks if family in having][:_MAX_FAMILIES]
    facts = list({id(one.comparison): one.comparison for scaling in shown for _, one in scaling.points}.values())
    more = len(found) - len(shown)
    figure = sheet(
        "How speedup and layer time scale",
        "Speedup over native; below it the slowest rank's time of one layer, median. "
        + interval_words(list(policies.loc[policies["family"].isin(families), "is_interval"]), "Upright lines")
        + " A line connects comparisons that differ in nothing but the axis. Of each policy the smallest capacity "
        "factor.",
        footer_lines(
            run, facts, [*warnings_of(facts), *([f"{more} more combinations are not drawn."] if more else [])]
        ),
        _legend(rows, families, looks),
        width=8.5 if len(shown) == 1 else 12.5,
        body=4.8 * num_rows(len(shown)),
    )
    axes = pairs_of_axes(figure, [scaling.held for scaling in shown], (1.5, 1))
    for (above, below), scaling, own in zip(axes, shown, panels, strict=True):
        _draw(above, below, scaling, own, families, looks)
    drawn = rows[(rows["role"] == "baseline") | rows["family"].isin(families)]
    drawn = drawn[drawn["layer_time_us"].notna()]
    return Drawing(figure, as_csv(drawn, "quantity", "value", "layer_time_us", *SPEEDUP))


def _rows(run: Run, scaling: Scaling) -> pd.DataFrame:
    """Of ``marks.cases`` native, each policy with a speedup at its smallest factor, and the noise floors."""
    rows = cases(run, [one for _, one in scaling.points])
    is_policy = (rows["role"] == "policy") & rows["speedup"].notna()
    rows = rows[(rows["role"] == "baseline") | is_policy | rows["result"].isna()]
    # In reading order, so that factors ascend; noise floors have no family.
    rows = rows[~rows.duplicated(["place", "family"]) | rows["result"].isna()]
    return rows.assign(quantity=scaling.quantity, value=rows["place"].map(dict(enumerate(scaling.values))))


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


def _draw(above: Axes, below: Axes, scaling: Scaling, rows: pd.DataFrame, families: list[str], looks: Looks) -> None:
    values, how = scaling.values, rows["origin"].iloc[0]
    floors = drawn_floors(rows)
    above.fill_between(
        floors["value"], floors["speedup_low"], floors["speedup_high"], color=NOISE_FILL, linewidth=0, zorder=0.5
    )
    above.axhline(1, **NATIVE_LINE)
    native = rows[rows["role"] == "baseline"]
    native_ms = native["layer_time_us"] / 1e3
    below.plot(native["value"], native_ms, **_line(INK, "*", how, markersize=10))
    for number, family in enumerate(families):
        own = rows[(rows["role"] == "policy") & (rows["family"] == family)]
        look = _line(looks[family].colour, looks[family].marker, how)
        # Beside each other: intervals at one value would lie on one another.
        aside = ScaledTranslation(_DODGE * (number - (len(families) - 1) / 2), 0, above.figure.dpi_scale_trans)
        beside = {"transform": above.transData + aside, "zorder": 3}
        if len(own):
            above.plot(own["value"], own["speedup"], **beside, **look)
            ends = own["speedup_low"], own["speedup_high"]
            above.vlines(own["value"], *ends, color=looks[family].colour, linewidth=1.4, **beside)
            below.plot(own["value"], own["layer_time_us"] / 1e3, zorder=3, **look)
    for axes in (above, below):
        frame(axes, how)
        axes.grid(False, axis="x")
    if values[0] > 0 and values[-1] / values[0] >= 4:
        above.set_xscale("log", base=2)
    above.set_xticks(values, [f"{value:,g}" for value in values])
    above.minorticks_off()
    above.margins(x=0.08)
    above.set_ylim(speedup_limits(rows[rows["family"].isin(families) | rows["result"].isna()]))
    above.set_ylabel(SPEEDUP_LABEL)
    below.margins(y=0.08)
    if native_ms.min() > 0 and native_ms.max() / native_ms.min() >= 8:
        below.set_yscale("log", base=2)
        below.yaxis.set_major_formatter(lambda ms, _: milliseconds(ms, 2) if ms < 10 else f"{ms:,.0f}")
        below.minorticks_off()
    else:
        below.set_ylim(0, 1.08 * below.dataLim.y1)
    below.set_ylabel("layer time (ms)")
    below.set_xlabel(scaling.quantity)


def _line(colour: str, marker: str, how: str, markersize: float = 6) -> dict:
    return {"color": colour, "marker": marker, "markersize": markersize, **mark_look(how, colour)}


def _legend(rows: pd.DataFrame, families: list[str], looks: Looks) -> Legend:
    """Marks as the panels draw them; where panels differ in origin, as the first of them does."""
    legend: list = [("native", Line2D([], [], **_line(INK, "*", rows["origin"].iloc[0], 10)))]
    for family in families:
        own = rows[(rows["role"] == "policy") & (rows["family"] == family)]
        # The capacity factor is named where all panels show the same one.
        names = {case_name(result, looks) for result in own["result"]}
        look = _line(looks[family].colour, looks[family].marker, own["origin"].iloc[0])
        legend.append((names.pop() if len(names) == 1 else looks[family].label, Line2D([], [], **look)))
    return [*legend, *reference_legend(rows, native=False)]
