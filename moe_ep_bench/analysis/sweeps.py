"""Comparisons along a key of a config's ``sweep``: all other swept keys are alike."""

from __future__ import annotations

import json
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
_COLUMNS = [*COMPARISON, "swept_key", "swept_value", "at", "other_keys"]


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


def swept(comparisons: pd.DataFrame) -> pd.DataFrame:
    """Every comparison that stands along the first swept key with at least one other; of equal values the first.

    The first key is one of numbers, before those of words, with most values, of equals by alphabet.

    Columns: ``COMPARISON``; ``swept_key``; ``swept_value``, a number (of ``layer.ep_size`` the experts per rank), or
    words where not all are numbers; ``at``, its place, numbers ascending; ``other_keys``, the other swept keys with
    their values, and the directory where there are several.
    """
    values = pd.DataFrame(
        [
            {key: _value(key, value, row) for key, value in sorted(json.loads(row["point"]).items())}
            for row in comparisons.to_dict("records")
        ],
        comparisons.index,
        dtype=object,
    )
    keys = {key: set(column.dropna()) for key, column in values.items() if column.dropna().nunique() > 1}
    if not keys:
        return pd.DataFrame(columns=_COLUMNS)
    key = min(keys, key=lambda key: (not all(isinstance(value, float) for value in keys[key]), -len(keys[key]), key))
    words = pd.DataFrame({other: f"{key_words(other)} " + values[other].map(value_words) for other in values})
    if comparisons["directory"].nunique() > 1:
        words["directory"] = "from " + comparisons["directory"]
    others = [", ".join(row) for row in words.drop(columns=key).fillna("").itertuples(index=False)]
    rows = comparisons.assign(swept_key=key, swept_value=values[key], other_keys=others)[values[key].notna()]
    parts = []
    for _, part in rows.groupby("other_keys", sort=False):
        if not all(isinstance(value, float) for value in part["swept_value"]):
            part = part.assign(swept_value=part["swept_value"].map(value_words))
        part = part.drop_duplicates("swept_value").sort_values("swept_value", kind="stable")
        parts += [part.assign(at=range(len(part)))] if len(part) > 1 else []
    return pd.concat(parts, ignore_index=True)[_COLUMNS] if parts else pd.DataFrame(columns=_COLUMNS)


def _value(key: str, value: Any, comparison: dict[str, Any]) -> float | str:
    if key == EP_SIZE:
        return comparison["num_experts"] / comparison["num_ranks"]
    if value is None:
        return "no skew" if key == "workload.peak_load" else "none"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else value_words(value)
