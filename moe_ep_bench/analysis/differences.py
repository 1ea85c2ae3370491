"""List the conditions that differ between two runs.

Another GPU, driver or package takes away the verdicts on times and speedups, unless the user names it as changed on
purpose. Another clock takes the verdicts on times only, for a speedup is paired inside its run. Other code and another
host are listed and take nothing: code is what ``compare`` mostly compares.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.load import Part, Run
from moe_ep_bench.analysis.parts import read_jobs
from moe_ep_bench.errors import UserError

# Of run.json's ``environment``: what decides times.
_ENVIRONMENT = (
    *("device_name", "driver", "cpu_name", "num_cores", "threads_per_rank", "python", "torch", "cuda", "nccl"),
    *("triton", "megatron_core", "transformer_engine", "apex", "deep_ep", "variables"),
)
# Of run.json's ``comparisons``: what the same config may have become on another machine.
_PARTS = ("backend", "experts", "permute", "kernel", "cuda_graph", "oversubscribed", "links", "device", "placement")
_INFORMATIVE = ("hostname", "code", "git_commit")
CHANGEABLE = (*_ENVIRONMENT, *_PARTS, "clocks")

# Measured conditions: how far they may differ, and their form. A GPU's clock moves in steps of 15 MHz, under 1 %; the
# matmul and the copy beside a run are taken a few times only, too rough to take a verdict away.
_MEASURED = {
    "clocks": (0.02, "SM clock {:,.0f} MHz (median)"),
    "matmul beside the run": (0.05, "{:.3g} TFLOP/s"),
    "copy beside the run": (0.05, "{:.3g} GB/s"),
}
# Which verdicts a condition takes away: of times and speedups, of times only, or none.
_WEIGHTS = {**dict.fromkeys(CHANGEABLE, "all"), "clocks": "times"}


def check_intended(keys: Iterable[str]) -> None:
    """Raise ValueError for a key that is no condition."""
    for key in keys:
        if key not in CHANGEABLE:
            raise UserError(f"--changed: expected some of {', '.join(CHANGEABLE)}; got {key!r}")


def differences(base: Run, new: Run, comparison_id: str, intended: Collection[str] = ()) -> pd.DataFrame:
    """The conditions of a comparison that differ; what a run did not record differs from nothing.

    Returns:
        key, base, new (texts), takes_verdicts_on (all, times or none), intended (changed on purpose: of no weight).
    """
    recorded = [_conditions(run, comparison_id) for run in (base, new)]
    rows = []
    for key in (*_ENVIRONMENT, *_PARTS, *_MEASURED, *_INFORMATIVE):
        old, now = (conditions.get(key) for conditions in recorded)
        if old is None or now is None:
            continue
        is_same = old == now
        if key in _MEASURED:
            allowed, form = _MEASURED[key]
            is_same = abs(now - old) <= allowed * abs(old)
            old, now = form.format(old), form.format(now)
        if not is_same:
            rows.append((key, old, now, _WEIGHTS.get(key, "none"), key in intended))
    return pd.DataFrame(rows, columns=["key", "base", "new", "takes_verdicts_on", "intended"])


def _conditions(run: Run, comparison_id: str) -> dict[str, Any]:
    """The conditions that a run recorded: texts, and numbers of ``_MEASURED``."""
    runs = read_jobs(run.directory).runs
    ids = {run_id for case in run.cases if case.comparison_id == comparison_id for run_id in case.run_ids.values()}
    jobs = [runs[run_id] for run_id in sorted(ids & runs.keys())]
    hashes = [{key: one for key, one in job.hashes.items() if key == "code"} for job in jobs]
    environments = [job.environment | code for job, code in zip(jobs, hashes, strict=True)]
    found: dict[str, Any] = {}
    for key in (*_ENVIRONMENT, *_INFORMATIVE):
        texts = {_text(one[key]) for one in environments if key in one}
        if texts:
            found[key] = " and ".join(sorted(texts))
    facts = run.comparisons[comparison_id]
    for key in _PARTS:
        value = getattr(facts, key)
        found[key] = value.ran.partition(" (")[0] if isinstance(value, Part) else _text(value)
    if facts.kernel is None:  # not recorded
        del found["kernel"]
    launches = list(run.conditions.get(comparison_id, {}).values())
    clocks = [state.sm_clock_mhz[1] for one in launches for _, state in one.machines if state.sm_clock_mhz]
    if clocks:
        found["clocks"] = float(np.median(clocks))
    ceilings = [rank.ceilings for one in launches for rank in one.ranks]
    if ceilings:
        found["matmul beside the run"] = min(one.matmul_tflops for one in ceilings)
        found["copy beside the run"] = min(one.copy_gbps for one in ceilings)
    return found


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return " ".join(f"{key}={one}" for key, one in sorted(value.items())) or "none"
    return value if isinstance(value, str) else json.dumps(value)
