"""Comparisons along a key of a config's ``sweep``: all other swept keys are alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.cases import COMPARISON

EP_SIZE = "layer.ep_size"
# Keys whose last word does not say what they are.
_WORDS = {
    "workload.peak_load": "peak load of the busiest expert",
    "workload.num_tokens": "tokens of a batch",
    "workload.topk_share": "score mass of the top-k",
    "workload.tail": "tail model",
    EP_SIZE: "experts per rank",
    "model.preset": "model",
    "model.scale": "share of the true sizes",
    "emulate.bandwidth_scale": "link bandwidth, x the links file's",
    "emulate.replication": "replication of experts",
}
Row = Mapping[str, Any]
Value = float | str


def key_words(key: str) -> str:
    """A swept key for people."""
    return _WORDS.get(key) or key.rpartition(".")[2].replace("_", " ")


def value_words(value: Any) -> str:
    """A swept value for people."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return " ".join(f"{key}={value_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(value_words, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def value_of(key: str, comparison: Row) -> Value:
    """A comparison's value of a swept key, a number or words; of ``layer.ep_size`` the experts per rank."""
    if key == EP_SIZE:
        return comparison["num_experts"] / comparison["num_ranks"]
    value = json.loads(comparison["point"])[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if value is None:
        return "no skew" if key == "workload.peak_load" else "none"
    return value_words(value)


def swept_keys(comparisons: pd.DataFrame) -> list[str]:
    """Keys with at least two values: numbers before words, those with most values first, then by alphabet."""
    values: dict[str, set[Value]] = {}
    for row in comparisons.to_dict("records"):
        for key in json.loads(row["point"]):
            values.setdefault(key, set()).add(value_of(key, row))
    swept = [key for key in sorted(values) if len(values[key]) > 1]
    return sorted(swept, key=lambda key: (any(isinstance(one, str) for one in values[key]), -len(values[key])))


def along(key: str, comparisons: pd.DataFrame) -> pd.DataFrame:
    """Every comparison that stands along a swept key with at least one other; of equal values the first.

    Columns: ``COMPARISON``; ``swept_key``; ``swept_value``, a number, or words where not all are numbers; ``at``, its
    place, numbers ascending; ``other_keys``, the other swept keys with their values, and the directory where there are
    several.
    """
    several, rows = comparisons["directory"].nunique() > 1, []
    for row in comparisons.to_dict("records"):
        if key in (point := json.loads(row["point"])):
            words = [
                f"{key_words(other)} {value_words(value_of(other, row))}" for other in sorted(point) if other != key
            ]
            others = ", ".join([*words, *([f"from {row['directory']}"] if several else [])])
            rows.append({**row, "swept_key": key, "swept_value": value_of(key, row), "other_keys": others})
    parts = []
    for _, part in pd.DataFrame(rows).groupby("other_keys", sort=False) if rows else ():
        if not all(isinstance(value, float) for value in part["swept_value"]):
            part = part.assign(swept_value=part["swept_value"].map(value_words))
        part = part.drop_duplicates("swept_value").sort_values("swept_value", kind="stable")
        parts += [part.assign(at=range(len(part)))] if len(part) > 1 else []
    columns = [*COMPARISON, "swept_key", "swept_value", "at", "other_keys"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)
