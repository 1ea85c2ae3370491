"""Comparisons that differ in one key of a config's ``sweep``: what the key is called, and its values in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moe_ep_bench.analysis.load import Comparison
from moe_ep_bench.analysis.speedups import ComparisonResult

EP_SIZE = "layer.ep_size"

_WORDS = {
    "workload.peak_load": "peak load of the busiest expert",
    "workload.skew": "skew",
    "workload.tokens_per_rank": "tokens per rank",
    "workload.num_tokens": "tokens of a batch",
    "workload.sequence_length": "sequence length",
    "workload.topk_share": "score mass of the top-k",
    "workload.layer": "layer",
    "workload.tail": "tail model",
    "workload.padding_per_rank": "padding tokens per rank",
    "workload.mask_padding": "padding masked from policies",
    "workload.placement": "placement of popular experts",
    EP_SIZE: "experts per rank",
    "layer.dtype": "number format",
    "layer.dispatcher": "dispatcher",
    "layer.expert_tensor_parallel": "slices of an expert",
    "layer.cuda_graph": "CUDA graphs",
    "model.preset": "model",
    "model.scale": "share of the true sizes",
    "model.tensor_parallel": "tensor-parallel ranks",
    "emulate.links": "links",
    "emulate.bandwidth_scale": "link bandwidth, x the links file's",
    "emulate.device": "device",
    "emulate.replication": "replication of experts",
}
# Keys whose value a comparison's title says already.
_IN_TITLES = ("workload.peak_load", "workload.skew", "workload.layer", "workload.tail", "model.preset")
# What the absence of a value means.
_ABSENT = {"workload.peak_load": "unskewed", "workload.skew": "none"}

Value = float | str


@dataclass(frozen=True, eq=False)
class Sweep:
    """Comparisons at all values of one key, ascending (words by alphabet), with all other swept keys alike.

    Attributes:
        others: the other swept keys in words, each with its value; empty where one key is swept.
        values: of ``layer.ep_size`` the experts per rank; numbers, or words where not all are numbers.
    """

    key: str
    others: str
    values: tuple[Value, ...]
    comparisons: tuple[ComparisonResult, ...]

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(value, float) for value in self.values)

    @property
    def labels(self) -> list[str]:
        return [value_words(value) for value in self.values]


def sweeps_along(key: str, comparisons: Iterable[ComparisonResult]) -> list[Sweep]:
    """All sweeps along a key that have at least two values; of equal values the first comparison stands."""
    found: dict[tuple, dict[Value, ComparisonResult]] = {}
    for result in in_order(comparisons):
        if key in result.comparison.point:
            values = found.setdefault(tuple(_others(key, result.comparison)), {})
            values.setdefault(value_of(key, result.comparison), result)
    sweeps = []
    for others, by_value in found.items():
        if len(by_value) < 2:
            continue
        words = ", ".join(f"{key_words(name)} {value_words(value)}" for name, value in others)
        if not all(isinstance(value, float) for value in by_value):
            by_value = {value_words(value): result for value, result in by_value.items()}
        sweeps.append(Sweep(key, words, tuple(by_value), tuple(by_value.values())))
    return sweeps


def swept_keys(comparisons: Iterable[ComparisonResult]) -> list[str]:
    """Keys with at least two values: numbers before words, those with most values first, then by alphabet."""
    facts = [result.comparison for result in comparisons]
    values = {
        key: {value_of(key, fact) for fact in facts if key in fact.point}
        for key in sorted({key for fact in facts for key in fact.point})
    }

    def rank(key: str) -> tuple:
        return (not all(isinstance(value, float) for value in values[key]), -len(values[key]))

    return sorted((key for key, found in values.items() if len(found) > 1), key=rank)


def in_order(comparisons: Iterable[ComparisonResult]) -> list[ComparisonResult]:
    """By the values of their swept keys; those without any stay as they are."""
    return sorted(comparisons, key=lambda result: [_sortable(value) for _, value in _point(result.comparison)])


def point_words(facts: Comparison) -> str:
    """Where in the sweep a comparison stands, as far as its title does not say it."""
    said = (f"{key_words(key)} {value_words(value)}" for key, value in _point(facts) if key not in _IN_TITLES)
    return ", ".join(said)


def key_words(key: str) -> str:
    """A swept key for people; keys without words of their own stay what users type."""
    return _WORDS.get(key, key)


def value_words(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else value


def value_of(key: str, facts: Comparison) -> Value:
    """A comparison's value of a swept key; of ``layer.ep_size`` the experts per rank, which it decides."""
    if key == EP_SIZE:
        return facts.num_experts / facts.num_ranks
    value = facts.point[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return _ABSENT.get(key, "none") if value is None else _said(value)


def _others(key: str, facts: Comparison) -> Iterable[tuple[str, Value]]:
    return ((name, value) for name, value in _point(facts) if name != key)


def _point(facts: Comparison) -> list[tuple[str, Value]]:
    return [(key, value_of(key, facts)) for key in sorted(facts.point)]


def _sortable(value: Value) -> tuple:
    return (isinstance(value, str), value)


def _said(value: Any) -> str:
    """A value that is no number, in a few words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return " ".join(f"{key}={_said(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(_said, value)) or "none"
    return str(value)
