"""Comparisons that differ in one quantity: the keys of a config's ``sweep``, EP sizes, tokens.

Frames here have a row per comparison and quantity, and join on ``COMPARISON``. *Along* a swept key stand comparisons
with all other swept keys alike. *Scaling* holds more: a line connects only comparisons that differ in nothing but the
quantity. EP size is the exception that has to choose: with it either the tokens of a rank stay (weak scaling) or the
tokens of all ranks (strong scaling), and each is a set of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.cases import COMPARISON
from moe_ep_bench.workload.formatting import tokens_words

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
_SIZES = (EP_SIZE, "workload.num_tokens", "workload.tokens_per_rank")
# Facts that follow from the sizes, or only name them.
_FOLLOWS = {
    *("title", "sizes", "num_ranks", "num_replicas", "world_size", "num_tokens", "oversubscribed", "point", "workload"),
    *("links", "device", "experts", "permute", "kernel", "fit"),
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
        return "unskewed" if key == "workload.peak_load" else "none"
    return value_words(value)


def _points_words(row: Row, left_out: Iterable[str]) -> list[str]:
    keys = [key for key in sorted(json.loads(row["point"])) if key not in left_out]
    return [f"{key_words(key)} {value_words(value_of(key, row))}" for key in keys]


def _sets(rows: Iterable[Row], value: Callable[[Row], Value], same: Callable[[Row], Any]) -> list[pd.DataFrame]:
    """Comparisons in which ``same`` is the same: each ``value`` once, ascending, where there are at least two.

    Values are words where not all are numbers. Of equal values the first comparison stands.
    """
    known = [{**row, "value": value(row), "same": json.dumps(same(row), sort_keys=True, default=str)} for row in rows]
    found = []
    for _, part in pd.DataFrame(known).groupby("same", sort=False) if known else ():
        if not all(isinstance(one, float) for one in part["value"]):
            part = part.assign(value=part["value"].map(value_words))
        part = part.drop_duplicates("value")
        found += [part.sort_values("value", kind="stable")] if len(part) > 1 else []
    return found


# ---- along a swept key -----------------------------------------------------------------------------------------------


def swept_keys(comparisons: pd.DataFrame) -> list[str]:
    """Keys with at least two values: numbers before words, those with most values first, then by alphabet."""
    values: dict[str, set[Value]] = {}
    for row in comparisons.to_dict("records"):
        for key in json.loads(row["point"]):
            values.setdefault(key, set()).add(value_of(key, row))
    swept = [key for key in sorted(values) if len(values[key]) > 1]
    return sorted(swept, key=lambda key: (any(isinstance(one, str) for one in values[key]), -len(values[key])))


def along(key: str, comparisons: pd.DataFrame) -> pd.DataFrame:
    """Every comparison that stands along a swept key with at least one other.

    Columns: ``COMPARISON``; ``swept_key``; ``swept_value``, a number, or words where not all are numbers; ``at``, its
    place, numbers ascending; ``other_keys``, the other swept keys with their values, and the directory where there are
    several.
    """
    several = comparisons["directory"].nunique() > 1
    having = [row for row in comparisons.to_dict("records") if key in json.loads(row["point"])]

    def others(row: Row) -> str:
        return ", ".join([*_points_words(row, [key]), *([f"from {row['directory']}"] if several else [])])

    parts = [
        part.assign(swept_key=key, swept_value=part["value"], at=range(len(part)), other_keys=others(part.iloc[0]))
        for part in _sets(having, lambda row: value_of(key, row), others)
    ]
    columns = [*COMPARISON, "swept_key", "swept_value", "at", "other_keys"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


# ---- scaling ---------------------------------------------------------------------------------------------------------


def scalings(comparisons: pd.DataFrame) -> pd.DataFrame:
    """Every set of comparisons that differ in one quantity, in the order EP size, tokens, swept numbers.

    Columns: ``COMPARISON``; ``quantity``, what varies, and ``held``, what stays, in words; ``value``.
    """
    rows = comparisons.to_dict("records")
    by_rank, by_all = "EP size (ranks), tokens per rank held", "EP size (ranks), tokens of all ranks held"
    sets = [
        *_scaled(by_rank, rows, lambda row: row["num_ranks"], _tokens_per_rank),
        *_scaled(by_all, rows, lambda row: row["num_ranks"], lambda row: row["num_tokens"]),
        *_scaled("tokens per rank", rows, _tokens_per_rank, lambda row: (row["num_ranks"], row["world_size"])),
    ]
    for key in dict.fromkeys(key for row in rows for key in json.loads(row["point"])):
        having = [row for row in rows if key in json.loads(row["point"])]
        if key not in _SIZES and all(isinstance(value_of(key, row), float) for row in having):
            sizes = lambda row: (row["num_ranks"], row["world_size"], row["num_tokens"])  # noqa: E731
            sets += _scaled(key_words(key), having, lambda row, key=key: value_of(key, row), sizes, swept=key)
    columns = [*COMPARISON, "quantity", "held", "value"]
    return pd.concat(sets, ignore_index=True)[columns] if sets else pd.DataFrame(columns=columns)


def _scaled(
    quantity: str, rows: list[Row], value: Callable[[Row], float], held: Callable[[Row], Any], swept: str | None = None
) -> list[pd.DataFrame]:
    sets = _sets(rows, lambda row: float(value(row)), lambda row: [held(row), identity(row, swept)])
    return [part.assign(quantity=quantity, held=_held_words(part.iloc[0].to_dict(), quantity, swept)) for part in sets]


def identity(row: Row, swept: str | None = None) -> list[Any]:
    """All that must be the same, but for sizes, and the quantity that varies."""
    facts, point = row["facts"], json.loads(row["point"])
    same = {name: value for name, value in facts.items() if name not in _FOLLOWS}
    others = {key: value for key, value in point.items() if key not in _SIZES and key != swept}
    ran = [(facts.get(name) or {}).get("ran") for name in ("experts", "permute")]
    origin = [words and words.split(":")[0] for words in (facts.get("links"), facts.get("device"))]
    padding = (facts.get("workload") or {}).get("padding") and 1
    # Of what is swept the title's words differ; otherwise they name the traffic, which must not.
    title = [] if swept is not None else [_traffic(row)]
    return [same, others, ran, origin, row["workload"], padding, title, row["directory"]]


def _traffic(row: Row) -> str:
    """A comparison's title without its sizes; results of older versions say "1 tokens"."""
    return re.sub(r", EP \d+|, [\d,]+ tokens?\b( \([^)]* a rank[^)]*\))?", "", row["title"])


def _tokens_per_rank(row: Row) -> float:
    return row["num_tokens"] / row["world_size"]


def _held_words(row: Row, quantity: str, swept: str | None) -> str:
    words = [row["model"] if swept is not None else _traffic(row)]
    if not quantity.startswith("EP size"):
        words.append(f"EP {row['num_ranks']}")
    if quantity.endswith("tokens of all ranks held") or swept is not None:
        words.append(tokens_words(row["num_tokens"]))
    elif quantity.startswith("EP size"):
        words.append(f"{_tokens_per_rank(row):,.0f} tokens per rank")
    return ", ".join([*words, *_points_words(row, (*_SIZES, swept))])
