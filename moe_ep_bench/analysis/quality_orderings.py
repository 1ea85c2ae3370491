"""Which of the papers' orderings hold on this model and text?

Papers compare policies by accuracy on their own models; what may carry over to another model is who comes before whom.
Each ordering names two kinds of cases and what must agree between them. They are compared sequence by sequence (loads
batch by batch): the mean difference with Student's 95 % interval says that the ordering *holds*, *does not hold*, or
that these sequences *cannot say*. Nothing is said below ten of them.

A cost is the cross-entropy that a case adds to the unpatched model's. Where two policies cannot be made to drop
alike, it is divided by the share of top-k pairs that the case drops, and cases that drop nearly as much are compared;
where they activate other numbers of experts, the cost at as many is read off between two cases.

Comparisons that differ in the checkpoint alone, seeds of one training say, are put together: beside each one's verdict
stands that over checkpoints, by Student's t over their mean differences.
"""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from moe_ep_bench.analysis.quality_report import (
    WIDTH,
    JudgedCase,
    JudgedComparison,
    half_interval,
    quality_table,
    short_label,
)

_LEAST = 10
"""Sequences or batches below which nothing is said."""
_OF_A_CHECKPOINT = {"name", "model", "title", "order"}
_PHASES = ("prefill", "decode")


def _is_set(value: Any) -> bool:
    return value is not None


def _below_one(value: float) -> bool:
    return value < 1


@dataclass(frozen=True)
class Ordering:
    """A claim: cases of one kind cost less than cases of another.

    Attributes:
        better, worse: policy and fields of either kind; a field's value, or what says whether a value is meant. Fields
            that both policies have and that neither names must be equal, and so must the phase.
        at_equal: what else is made equal. ``dropped``: costs are per share of dropped pairs, no field has to agree,
            and of the better kind the case counts that drops most nearly what the worse one does, where that is
            between half and twice as much. ``activated``: the better kind's cost at the worse case's activated experts,
            on the line between its cases of other k0.
        share: of the worse kind's cost, with which the better kind's is compared.
        of: what is compared: costs, or the fullest expert's pairs over the mean.
    """

    words: str
    source: str
    better: dict[str, Any]
    worse: dict[str, Any]
    at_equal: Literal["fields", "dropped", "activated"] = "fields"
    share: float = 1.0
    of: Literal["cost", "peak_load"] = "cost"

    @property
    def unit(self) -> str:
        if self.of == "peak_load":
            return "fullest expert over the mean"
        return "nats per token and share of pairs dropped" if self.at_equal == "dropped" else "nats per token"


_CAPACITY, _OEA, _LASER, _XSHARE = ("arXiv 2503.05066", "arXiv 2511.02237", "arXiv 2510.03293", "arXiv 2602.07265")
_TOKEN_DROP = {"name": "token_drop", "metric": "score", "granularity": "expert"}
_EXPANDED = {"name": "expanded_drop", "metric": "score", "num_candidates": None, "max_experts_per_token": None}
_PLAIN_OEA = {"name": "oea", "p": 1.0, "k_max": None, "max_rank": None}
ORDERINGS: tuple[Ordering, ...] = (
    *(
        Ordering(
            f"dropping by score costs less than by {metric.replace('_', ' ')}",
            _CAPACITY,
            {"name": "token_drop", "metric": "score"},
            {"name": "token_drop", "metric": metric},
        )
        for metric in ("order", "reverse_order", "random")
    ),
    Ordering(
        "Expanded Drop costs less than Token Drop at the same capacity factor",
        _CAPACITY,
        _EXPANDED,
        {"name": "token_drop", "metric": "score"},
    ),
    Ordering(
        "Expanded Drop with all local candidates costs less than with fewer",
        f"{_CAPACITY}, Table 11's m",
        _EXPANDED,
        {**_EXPANDED, "num_candidates": _is_set},
    ),
    Ordering(
        "Expanded Drop costs less than with a limit on a token's experts",
        f"{_CAPACITY}, Table 11's max-k",
        _EXPANDED,
        {**_EXPANDED, "max_experts_per_token": _is_set},
    ),
    Ordering(
        "a device's capacity at factor 1 costs less than an expert's at 1.5",
        _CAPACITY,
        {"name": "token_drop", "granularity": "device", "capacity_factor": 1.0},
        {"name": "token_drop", "granularity": "expert", "capacity_factor": 1.5},
    ),
    Ordering(
        "Token Drop costs less than Expert Drop, per pair that is dropped",
        _CAPACITY,
        _TOKEN_DROP,
        {"name": "expert_drop"},
        at_equal="dropped",
    ),
    Ordering(
        "OEA costs less than pruning to the same k0, which activates the same experts for the same inputs",
        _OEA,
        _PLAIN_OEA,
        {"name": "pruned", "p": 1.0},
    ),
    Ordering(
        "OEA with p = 1 costs less than with p < 1 at as many activated experts",
        _OEA,
        _PLAIN_OEA,
        {**_PLAIN_OEA, "p": _below_one},
        at_equal="activated",
    ),
    Ordering(
        "OEA that fills up to k_max = K costs less than with a smaller k_max",
        _OEA,
        _PLAIN_OEA,
        {**_PLAIN_OEA, "k_max": _is_set},
    ),
    Ordering(
        "OEA over all ranks of a token's list costs less than with max_rank below E",
        _OEA,
        _PLAIN_OEA,
        {**_PLAIN_OEA, "max_rank": _is_set},
    ),
    Ordering(
        "LASER evens the loads: its fullest expert has less than the model's own",
        _LASER,
        {"name": "laser"},
        {"name": "native"},
        of="peak_load",
    ),
    Ordering("LASER costs less than balancing loads alone", _LASER, {"name": "laser"}, {"name": "load_only"}),
    Ordering(
        "LASER stays near the model's own: less than a tenth (ours) of what balancing loads alone costs",
        _LASER,
        {"name": "laser"},
        {"name": "load_only"},
        share=0.1,
    ),
    Ordering(
        "balancing loads alone is bad: Token Drop at factor 1, which bounds loads too, costs less",
        f"{_LASER}; Token Drop is our measure",
        {**_TOKEN_DROP, "capacity_factor": 1.0},
        {"name": "load_only"},
    ),
    Ordering(
        "XShare with every token's best expert costs less than without, at the same budget",
        _XSHARE,
        {"name": "xshare", "k0": 1},
        {"name": "xshare", "k0": 0},
    ),
    *(
        Ordering(
            f"{policy}: {better.replace('_', ' ')} costs text less than {worse.replace('_', ' ')}, synthetic images",
            f"{_CAPACITY}, Table 4",
            {"name": name, "modality": better},
            {"name": name, "modality": worse},
        )
        for name, policy in (("token_drop", "Token Drop"), ("expanded_drop", "Expanded Drop"))
        for better, worse in (("image_first", "uniform"), ("uniform", "text_first"))
    ),
)


@dataclass(frozen=True)
class Found:
    """One pair of cases that an ordering is about, by their short labels.

    Attributes:
        more: what the worse one has more on average, in the ordering's unit.
        half: half the mean's 95 % interval, over sequences, batches or checkpoints.
    """

    ordering: Ordering
    better: str
    worse: str
    more: float
    half: float

    @property
    def verdict(self) -> str:
        if self.more - self.half > 0:
            return "holds"
        return "does not hold" if self.more + self.half < 0 else "cannot say"


class Several(NamedTuple):
    """The same pair on several checkpoints: each one's, and the mean of all, its interval over checkpoints."""

    overall: Found
    each: dict[str, Found]

    @property
    def shown(self) -> Found:
        """That over checkpoints where there are several, else the one's own."""
        return self.overall if len(self.each) > 1 else next(iter(self.each.values()))


def find_orderings(comparison: JudgedComparison) -> list[Found]:
    """Every pair of a comparison's cases that an ordering is about, of at least ten sequences (batches for loads)."""
    return [found for ordering in ORDERINGS for found in _pairs(comparison, ordering)]


def find_over_checkpoints(comparisons: Sequence[JudgedComparison]) -> list[Several]:
    """The pairs that all of several checkpoints' comparisons have.

    A pair is known by its worse case and, unless the better one is chosen by what it drops or activates, by that too.
    """
    names = [comparison.facts["model"] for comparison in comparisons]
    of_each = {
        # Folders of one name may stand in different places.
        name if names.count(name) == 1 else f"{name}, number {number}": {
            _key(found): found for found in find_orderings(comparison)
        }
        for number, (name, comparison) in enumerate(zip(names, comparisons, strict=True), 1)
    }
    first, *others = of_each.values()
    several = []
    for key in (key for key in first if all(key in other for other in others)):
        each = {name: found[key] for name, found in of_each.items()}
        labels = dict.fromkeys(found.better for found in each.values())
        differences = np.array([found.more for found in each.values()])
        overall = Found(
            first[key].ordering,
            " or ".join(labels),
            first[key].worse,
            float(differences.mean()),
            half_interval(differences),
        )
        several.append(Several(overall, each))
    return several


def quality_text(comparisons: Sequence[JudgedComparison]) -> str:
    """What ``quality`` and ``show`` print: tables, and the orderings below those that differ in the checkpoint."""
    parts = []
    for alike in by_checkpoint(comparisons):
        parts += [quality_table([comparison]) for comparison in alike]
        parts.append(orderings_text(alike))
    return "\n\n".join(part for part in parts if part)


def by_checkpoint(comparisons: Iterable[JudgedComparison]) -> list[list[JudgedComparison]]:
    """Comparisons that differ in their checkpoints alone, together."""
    groups: dict[str, list[JudgedComparison]] = {}
    for comparison in comparisons:
        facts = {key: value for key, value in comparison.facts.items() if key not in _OF_A_CHECKPOINT}
        groups.setdefault(json.dumps(facts, sort_keys=True), []).append(comparison)
    return list(groups.values())


def title_of(alike: Sequence[JudgedComparison]) -> str:
    """A comparison's title; of those that differ in the checkpoint alone one, which counts them."""
    facts = alike[0].facts
    if len(alike) == 1:
        return str(facts["title"])
    return str(facts["title"]).replace(str(facts["model"]), f"{len(alike)} checkpoints", 1)


def orderings_text(comparisons: Sequence[JudgedComparison]) -> str:
    """A few lines for comparisons that differ in the checkpoint alone; empty where no ordering can be looked at."""
    found = find_over_checkpoints(comparisons)
    if not found:
        return ""
    lines = ["The papers' orderings: does the first cost less than the second (what the second costs more)?"]
    if len(comparisons) > 1:
        number = len(comparisons)
        note = (
            f"First over {number} checkpoints, Student's t over their means (with {number} an interval is "
            f"{stats.t.ppf(0.975, number - 1) / math.sqrt(number):.1f} standard deviations to either side), then each "
            "one's, Student's t over its sequences"
        )
        lines += textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ")
    for ordering, pairs in itertools.groupby(found, lambda one: one.overall.ordering):
        heading = f"{ordering.words} ({ordering.source}), {ordering.unit}"
        lines += textwrap.wrap(heading, WIDTH, initial_indent="  ", subsequent_indent="    ")
        for pair in pairs:
            shown, each = pair.shown, pair.each
            first, rest = f"    {_said(shown)}  {shown.better},", f" {shown.worse}"
            indent = " " * (len(first) - len(f"{shown.better},"))
            lines += [first + rest] if len(first + rest) <= WIDTH else [first, indent + shown.worse]
            if len(each) > 1:
                lines += [f"        {_said(one)}  {name}" for name, one in each.items()]
    return "\n".join(lines)


def _said(found: Found) -> str:
    return f"{found.verdict:13}  {found.more:+.4f} +-{found.half:.4f}"


def _key(found: Found) -> tuple[str, str, str]:
    return found.ordering.words, found.better if found.ordering.at_equal == "fields" else "", found.worse


Blend = list[tuple[JudgedCase, float]]
"""Cases with their weights: one case, or a place on the line between two."""


def _pairs(comparison: JudgedComparison, ordering: Ordering) -> Iterator[Found]:
    native = comparison.native
    for worse in (*(replace(native, phase=phase) for phase in _PHASES), *comparison.cases):
        if not _suits(worse, ordering.worse):
            continue
        better = [case for case in comparison.cases if _suits(case, ordering.better) and _agree(case, worse, ordering)]
        for blend in _AT_EQUAL[ordering.at_equal](better, worse):
            of_better = sum(weight * _values(case, native, ordering) for case, weight in blend)
            difference = (ordering.share * _values(worse, native, ordering) - of_better).dropna().to_numpy()
            if len(difference) >= _LEAST:
                label = " to ".join(short_label(case.label) for case, _ in blend)
                more, half = float(np.mean(difference)), half_interval(difference)
                yield Found(ordering, label, short_label(worse.label), more, half)


def _each(better: list[JudgedCase], worse: JudgedCase) -> list[Blend]:
    return [[(case, 1.0)] for case in better]


def _nearest_dropped(better: list[JudgedCase], worse: JudgedCase) -> list[Blend]:
    dropped = worse.mean("dropped_fraction")
    if not dropped:
        return []
    found = [case for case in better if dropped / 2 <= case.mean("dropped_fraction") <= 2 * dropped]
    found = sorted(found, key=lambda case: abs(case.mean("dropped_fraction") - dropped))
    return [[(case, 1.0)] for case in found[:1]]


def _same_activated(better: list[JudgedCase], worse: JudgedCase) -> list[Blend]:
    if len(better) < 2:
        return []
    wanted = worse.mean("activated_experts")
    ascending = sorted(better, key=lambda case: case.mean("activated_experts"))
    for fewer, more in itertools.pairwise(ascending):
        low, high = fewer.mean("activated_experts"), more.mean("activated_experts")
        if low <= wanted < high:
            share = (wanted - low) / (high - low)
            return [[(fewer, 1 - share), (more, share)]]
    return []


_AT_EQUAL: dict[str, Callable[[list[JudgedCase], JudgedCase], list[Blend]]] = {
    "fields": _each,
    "dropped": _nearest_dropped,
    "activated": _same_activated,
}


def _suits(case: JudgedCase, wanted: dict[str, Any]) -> bool:
    fields = {"name": case.policy, **case.params}
    return all(
        key in fields and (value(fields[key]) if callable(value) else fields[key] == value)
        for key, value in wanted.items()
    )


def _agree(better: JudgedCase, worse: JudgedCase, ordering: Ordering) -> bool:
    """Fields that both have, and that are not what the ordering is about, are equal; so is the phase."""
    if better.phase != worse.phase:
        return False
    if ordering.at_equal == "dropped":
        return True
    about = (ordering.better.keys() | ordering.worse.keys()) | ({"k0"} if ordering.at_equal == "activated" else set())
    shared = (better.params.keys() & worse.params.keys()) - about
    return all(better.params[key] == worse.params[key] for key in shared)


def _values(case: JudgedCase, native: JudgedCase, ordering: Ordering) -> pd.Series:
    """Costs by sequence, or loads by batch."""
    if ordering.of == "peak_load":
        return case.routing[case.routing["phase"] == case.phase].groupby("batch")["peak_load"].mean()
    of_case, of_native = (one.answers.set_index("sequence")["cross_entropy"] for one in (case, native))
    return (of_case - of_native) / (case.mean("dropped_fraction") if ordering.at_equal == "dropped" else 1.0)
