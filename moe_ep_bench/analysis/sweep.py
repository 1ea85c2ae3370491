"""Comparisons that differ in one key of a config's ``sweep``: in which order, and what the key is called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moe_ep_bench.analysis.load import Comparison
from moe_ep_bench.analysis.speedups import ComparisonResult

EP_SIZE = "layer.ep_size"

# Keys whose last word does not say what they are.
_WORDS = {
    "workload.peak_load": "peak load of the busiest expert",
    "workload.num_tokens": "tokens of a batch",
    "workload.topk_share": "score mass of the top-k",
    "workload.tail": "tail model",
    EP_SIZE: "experts per rank",
    "layer.expert_tensor_parallel": "slices of an expert",
    "model.preset": "model",
    "model.scale": "share of the true sizes",
    "emulate.bandwidth_scale": "link bandwidth, x the links file's",
    "emulate.replication": "replication of experts",
}

Value = float | str


@dataclass(frozen=True, eq=False)
class Sweep:
    """Comparisons at all values of one key, ascending (words by alphabet), with all other swept keys alike.

    Attributes:
        others: the other swept keys in words, each with its value, and the directory where the same point stands in
            several; empty where one key of one directory is swept.
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
    found: dict[str, dict[Value, ComparisonResult]] = {}
    for result in in_order(comparisons):
        point = _point(result.comparison)
        if key in point:
            value = point.pop(key)
            others = [f"{key_words(name)} {value_words(other)}" for name, other in point.items()]
            others += [f"from {result.comparison.directory}"] if result.comparison.directory else []
            found.setdefault(", ".join(others), {}).setdefault(value, result)
    sweeps = []
    for others, by_value in found.items():
        if not all(isinstance(value, float) for value in by_value):
            by_value = {value_words(value): result for value, result in by_value.items()}
        if len(by_value) > 1:
            sweeps.append(Sweep(key, others, tuple(by_value), tuple(by_value.values())))
    return sweeps


def swept_keys(comparisons: Iterable[ComparisonResult]) -> list[str]:
    """Keys with at least two values: numbers before words, those with most values first, then by alphabet."""
    values: dict[str, set[Value]] = {}
    for result in comparisons:
        for key, value in _point(result.comparison).items():
            values.setdefault(key, set()).add(value)
    swept = [key for key in sorted(values) if len(values[key]) > 1]
    return sorted(swept, key=lambda key: (any(isinstance(one, str) for one in values[key]), -len(values[key])))


def in_order(comparisons: Iterable[ComparisonResult]) -> list[ComparisonResult]:
    """By the values of their swept keys; those without any stay as they are."""

    def place(result: ComparisonResult) -> list[tuple[bool, Value]]:
        return [(isinstance(value, str), value) for value in _point(result.comparison).values()]

    return sorted(comparisons, key=place)


def _point(facts: Comparison) -> dict[str, Value]:
    return {key: value_of(key, facts) for key in sorted(facts.point)}


def key_words(key: str) -> str:
    """A swept key for people."""
    return _WORDS.get(key) or key.rpartition(".")[2].replace("_", " ")


def value_words(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else value


def value_of(key: str, facts: Comparison) -> Value:
    """A comparison's value of a swept key; of ``layer.ep_size`` the experts per rank, which it decides."""
    if key == EP_SIZE:
        return facts.num_experts / facts.num_ranks
    value = facts.point[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if value is None:
        return "unskewed" if key == "workload.peak_load" else "none"
    return _said(value)


def _said(value: Any) -> str:
    """A value that is no number, in a few words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return " ".join(f"{key}={_said(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(_said, value)) or "none"
    return str(value)
