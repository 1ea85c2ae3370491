"""How speedup and layer time scale: over EP size, tokens per rank, and whatever else of numbers a config sweeps.

A line connects only comparisons that differ in nothing but the quantity along the bottom. EP size is the exception
that has to choose: with it either the tokens of a rank stay (weak scaling) or the tokens of all ranks (strong scaling),
and each has a panel of its own. Of a policy with several capacity factors the smallest is shown.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from moe_ep_bench.analysis.figures.panels import (
    SPEEDUP,
    case_rows,
    csv,
    draw_along,
    family_legend,
    footer,
    name_values,
    of_policies,
    reference_legend,
    run_looks,
    sheet_of_panels,
    smallest_factors,
)
from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.style import INK, Drawing, Looks, frame, mark_look
from moe_ep_bench.analysis.sweep import EP_SIZE, key_words, value_of, value_words
from moe_ep_bench.analysis.words import interval_words, milliseconds
from moe_ep_bench.workload.formatting import tokens_words

_SIZES = (EP_SIZE, "workload.num_tokens", "workload.tokens_per_rank")
# What follows from the sizes, or only names them.
_FOLLOWS = {
    *("title", "num_ranks", "num_replicas", "world_size", "num_tokens", "oversubscribed", "point", "workload"),
    *("links", "device", "experts", "permute", "kernel"),
}
_MAX_PANELS, _MAX_FAMILIES = 6, 7


@dataclass(frozen=True)
class Scaling:
    """Comparisons along one quantity, all else equal.

    Attributes:
        quantity: what the axis is labelled with; ``held`` what is the same, in words.
        points: value and comparison id, by ascending value; at least two values.
    """

    quantity: str
    held: str
    points: list[tuple[float, str]]


def scaling_figure(run: Run) -> Drawing | None:
    """Speedup and, below it, layer time along what varies; None where nothing does."""
    found = scalings(run)
    if not found:
        return None
    rows, looks = case_rows(run), run_looks(run)
    is_policy = (rows["role"] == "policy") & rows["speedup"].notna()
    is_native = (rows["role"] == "baseline") & (rows["status"] == "ok")
    rows = smallest_factors(rows[is_policy | is_native | rows["is_floor"]])
    panels = [
        rows.merge(pd.DataFrame(one.points, columns=["value", "comparison_id"])).assign(quantity=one.quantity)
        for one in found[:_MAX_PANELS]
    ]
    rows = pd.concat(panels, ignore_index=True)
    families = [family for family in looks if family in set(rows["family"])][:_MAX_FAMILIES]
    rows = rows[(rows["role"] != "policy") | rows["family"].isin(families)]
    more = len(found) - len(panels)
    how = rows["origin"].iloc[0]
    header = (
        "How speedup and layer time scale",
        "A line connects comparisons that differ in nothing but the axis; layer time is the slowest rank's median; of "
        f"each policy the smallest capacity factor. {interval_words(list(of_policies(rows)['speedup_is_interval']))}",
        footer(run, rows, [f"{more} more combinations are not drawn"] if more else []),
        [
            ("native", Line2D([], [], **_native_look(how))),
            *family_legend(of_policies(rows), looks),
            *reference_legend(rows, native=False),
        ],
    )
    figure, axes = sheet_of_panels(header, [one.held for one in found[:_MAX_PANELS]], (1.5, 1), 4.4)
    for (above, below), own in zip(axes, panels, strict=True):
        _draw(above, below, own[(own["role"] != "policy") | own["family"].isin(families)], looks)
    return Drawing(figure, csv(rows[rows["layer_time_us"].notna()], "quantity", "value", "layer_time_us", *SPEEDUP))


def scalings(run: Run) -> list[Scaling]:
    """Every set of comparisons that differ in one quantity, in the order EP size, tokens, swept numbers."""
    native = {case.comparison_id for case in run.cases if case.role == "baseline" and case.is_ok}
    measured = {one: facts for one, facts in run.comparisons.items() if one in native}
    found = [
        *_along("EP size (ranks), tokens per rank held", measured, _ep_size, _tokens_per_rank),
        *_along("EP size (ranks), tokens of all ranks held", measured, _ep_size, lambda facts: facts.num_tokens),
        *_along("tokens per rank", measured, _tokens_per_rank, lambda facts: (facts.num_ranks, facts.world_size)),
    ]
    for key in dict.fromkeys(chain.from_iterable(facts.point for facts in measured.values())):
        having = {one: facts for one, facts in measured.items() if key in facts.point}
        value = partial(value_of, key)
        if key not in _SIZES and all(isinstance(value(facts), float) for facts in having.values()):
            found += _along(
                key_words(key),
                having,
                value,
                lambda facts: (facts.num_ranks, facts.world_size, facts.num_tokens),
                swept=key,
            )
    return found


def _along(quantity: str, comparisons: dict[str, Comparison], value, held, swept: str | None = None) -> list[Scaling]:
    groups: dict[str, dict[float, str]] = {}
    for one, facts in comparisons.items():
        key = json.dumps([held(facts), _identity(facts, swept)], sort_keys=True, default=str)
        groups.setdefault(key, {}).setdefault(float(value(facts)), one)  # of equal values the first stands
    return [
        Scaling(quantity, _held_words(comparisons[min(points.items())[1]], quantity, swept), sorted(points.items()))
        for points in groups.values()
        if len(points) > 1
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
    return re.sub(r", EP \d+|, [\d,]+ tokens?\b( \([^)]* a rank[^)]*\))?", "", facts.title)


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


def _draw(above: Axes, below: Axes, rows: pd.DataFrame, looks: Looks) -> None:
    rows = rows.sort_values("value", kind="stable")
    native, how, having = rows[rows["role"] == "baseline"], rows["origin"].iloc[0], set(rows["family"])
    native_ms = native["layer_time_us"] / 1e3
    marks = {key: {**look.marks, **mark_look(how, look.colour)} for key, look in looks.items() if key in having}
    draw_along(above, rows, marks, "family")
    below.plot(native["value"], native_ms, **_native_look(how))
    for family, look in marks.items():
        own = rows[rows["family"] == family]
        below.plot(own["value"], own["layer_time_us"] / 1e3, zorder=3, **look)
    for axes in (above, below):
        frame(axes, how)
    values = list(native["value"])
    name_values(above, below, values, [f"{value:,g}" for value in values], rows["quantity"].iloc[0])
    if native_ms.min() > 0 and native_ms.max() / native_ms.min() >= 8:
        below.set_yscale("log", base=2)
        below.yaxis.set_major_formatter(lambda ms, _: milliseconds(ms, 2) if ms < 10 else f"{ms:,.0f}")
        below.minorticks_off()
    else:
        below.set_ylim(0, 1.08 * below.dataLim.y1)
    below.set_ylabel("layer time (ms)")


def _native_look(how: str) -> dict:
    return {"color": INK, "marker": "*", "markersize": 10, **mark_look(how, INK)}
