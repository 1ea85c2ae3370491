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

_LAST = ("origin", "workload")
# More digits than any of these numbers has, fewer than those in which two machines' sums differ.
_DIGITS = "%.9g"


def origin(run: Run, facts: Comparison) -> str:
    """How a comparison's times came about: measured, emulated or modelled; routed where there are none."""
    if facts.device is not None:
        return "modelled"
    return {"run": "measured", "emulated": "emulated", "route": "routed"}[run.mode]


def mark(run: Run, comparison: ComparisonResult, result: CaseResult, **values: Any) -> dict[str, Any]:
    """A row for a mark of one case; ``values`` in the order of the columns."""
    return {
        **_of_comparison(comparison),
        "policy": result.case.label,
        "role": result.case.role,
        "capacity_factor": result.capacity_factor,
        **values,
        **origins(run, comparison),
    }


def reference(run: Run, comparison: ComparisonResult, name: str, role: str, **values: Any) -> dict[str, Any]:
    """A row for a mark that is no single case's: the noise floor, a fitted line."""
    named = {"policy": name, "role": role, "capacity_factor": None}
    return {**_of_comparison(comparison), **named, **values, **origins(run, comparison)}


def _of_comparison(comparison: ComparisonResult) -> dict[str, Any]:
    facts = comparison.comparison
    return {
        "comparison": facts.title,
        "model": facts.model,
        "num_ranks": facts.num_ranks,
        "num_tokens": facts.num_tokens,
    }


def origins(run: Run, comparison: ComparisonResult) -> dict[str, str]:
    facts = comparison.comparison
    return {"origin": origin(run, facts), "workload": facts.workload.kind}


def speedup_values(speedup: Estimate | None) -> dict[str, Any]:
    """A speedup's columns; ``speedup_spread`` says what low and high are."""
    if speedup is None:
        return dict.fromkeys(("speedup", "speedup_low", "speedup_high", "speedup_spread"))
    spread = "95 % interval" if speedup.is_interval else "smallest and largest pair"
    return {
        "speedup": speedup.median,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "speedup_spread": spread,
    }


def cost_values(result: CaseResult) -> dict[str, Any]:
    """What a case's speed is paid with; nothing for the ceiling, whose scores are not the model's."""
    known = result.fidelity if result.case.role != "ceiling" else None
    return {
        "dropped_percent": None if known is None else 100 * known.dropped_share,
        "retained_mass_percent": None if known is None else 100 * known.retained_mass,
    }


def floor_row(run: Run, comparison: ComparisonResult, **values: Any) -> list[dict[str, Any]]:
    """The row of the noise floor, where there is one."""
    floor = comparison.floor
    if floor is None:
        return []
    ends = {"speedup_low": floor.low, "speedup_high": floor.high, "speedup_spread": "noise floor"}
    return [reference(run, comparison, "native again", "noise", **values, **ends)]


def table(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows as a table: columns in the order in which they first appear, where the numbers come from last."""
    collected: Sequence[Mapping[str, Any]] = list(rows)
    columns = dict.fromkeys(name for row in collected for name in row)
    ordered = [*(name for name in columns if name not in _LAST), *(name for name in _LAST if name in columns)]
    return pd.DataFrame(collected, columns=ordered)


def write_rows(rows: pd.DataFrame, path: Path) -> None:
    """Write a figure's numbers as CSV; the file appears whole or not at all."""
    with atomic_path(path) as temporary:
        rows.to_csv(temporary, index=False, float_format=_DIGITS, lineterminator="\n")
