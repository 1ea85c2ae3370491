"""The numbers behind a figure: a table with a row for each mark, written beside the pictures as CSV.

Whoever redraws a figure, or doubts it, needs what it shows and nothing of how it is drawn. So each row names the
comparison, the policy and the capacity factor, gives the mark's numbers with their units in the columns' names, and
says where they come from: ``origin`` how times came about (measured, emulated, modelled; routed where nothing was
timed), ``workload`` whether router scores were recorded or synthetic. Equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.load import Comparison, Run
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.files import atomic_path
from moe_ep_bench.timing.statistics import Estimate

SPEEDUP = ("speedup", "speedup_low", "speedup_high", "speedup_spread")
COST = ("dropped_percent", "retained_mass_percent")
_CASE = ("comparison", "model", "num_ranks", "num_tokens", "policy", "role", "capacity_factor")
_LAST = ("origin", "workload")
# More digits than any of these numbers has, fewer than those in which two machines' sums differ.
_DIGITS = "%.9g"


def origin(run: Run, facts: Comparison) -> str:
    """How a comparison's times came about: measured, emulated or modelled; routed where there are none."""
    if facts.device is not None:
        return "modelled"
    return {"run": "measured", "emulated": "emulated", "route": "routed"}[run.mode]


def cases(run: Run, comparisons: Sequence[ComparisonResult], *, failed: bool = False) -> pd.DataFrame:
    """A row per measured case, in reading order; after those of a comparison its noise floor, of role ``noise``.

    Columns: those of the CSV (what the case is, ``SPEEDUP``, ``COST``, ``verdict``, ``status``, ``layer_time_us``,
    where the numbers come from), and for drawing: ``place`` (of its comparison), ``family``, ``is_interval``,
    ``result``. Rows of noise floors have neither a status, a family nor a result.

    Args:
        failed: also a row, without numbers, per case that was not measured.
    """
    rows = []
    for place, comparison in enumerate(comparisons):
        for result in comparison.results:
            if result.case.is_ok or failed:
                values = {**speedup_values(result.speedup), **cost_values(result)}
                values |= {"verdict": result.verdict, "status": result.case.status, "result": result}
                values |= {"layer_time_us": None if result.layer is None else 1e3 * result.layer.median_ms}
                values |= {"is_interval": result.speedup is not None and result.speedup.is_interval}
                rows.append(mark(run, comparison, result, **values, place=place, family=result.family))
        rows += floor_row(run, comparison, place=place)
    about = ("verdict", "status", "layer_time_us", *_LAST, "place", "family", "is_interval", "result")
    numbers = dict.fromkeys(("capacity_factor", *SPEEDUP[:3], *COST, "layer_time_us"), float)
    return pd.DataFrame(rows, columns=[*_CASE, *SPEEDUP, *COST, *about]).astype(numbers)


def as_csv(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Of ``cases`` the columns that a figure shows."""
    return rows[[*_CASE, *columns, *_LAST]]


def mark(run: Run, comparison: ComparisonResult, result: CaseResult, /, **values: Any) -> dict[str, Any]:
    """A row for a mark of one case; ``values`` in the order of the columns."""
    values = {"capacity_factor": result.capacity_factor} | values
    return reference(run, comparison, result.case.label, result.case.role, **values)


def reference(run: Run, comparison: ComparisonResult, name: str, role: str, **values: Any) -> dict[str, Any]:
    """A row for a mark that is no single case's: the noise floor, a fitted line."""
    facts = comparison.comparison
    row = {
        "comparison": facts.title,
        "model": facts.model,
        "num_ranks": facts.num_ranks,
        "num_tokens": facts.num_tokens,
    }
    row |= {"policy": name, "role": role, "capacity_factor": None, **values}
    return row | {"origin": origin(run, facts), "workload": facts.workload.kind}


def speedup_values(speedup: Estimate | None) -> dict[str, Any]:
    """A speedup's columns; ``speedup_spread`` says what low and high are."""
    if speedup is None:
        return dict.fromkeys(SPEEDUP)
    spread = "95 % interval" if speedup.is_interval else "smallest and largest pair"
    return dict(zip(SPEEDUP, (speedup.median, speedup.low, speedup.high, spread), strict=True))


def cost_values(result: CaseResult) -> dict[str, Any]:
    """What a case's speed is paid with; nothing for the ceiling, whose scores are not the model's."""
    known = result.fidelity if result.case.role != "ceiling" else None
    shares = (None, None) if known is None else (100 * known.dropped_share, 100 * known.retained_mass)
    return dict(zip(COST, shares, strict=True))


def floor_row(run: Run, comparison: ComparisonResult, **values: Any) -> list[dict[str, Any]]:
    """The row of the noise floor, where there is one."""
    floor = comparison.floor
    if floor is None:
        return []
    values |= {"speedup_low": floor.low, "speedup_high": floor.high, "speedup_spread": "noise floor"}
    return [reference(run, comparison, "native again", "noise", **values)]


def table(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows as a table: columns in the order in which they first appear, where the numbers come from last."""
    frame = pd.DataFrame(list(rows))
    return frame[[*frame.columns.difference(_LAST, sort=False), *(name for name in _LAST if name in frame)]]


def write_rows(rows: pd.DataFrame, path: Path) -> None:
    """Write a figure's numbers as CSV; the file appears whole or not at all."""
    with atomic_path(path) as temporary:
        rows.to_csv(temporary, index=False, float_format=_DIGITS, lineterminator="\n")
