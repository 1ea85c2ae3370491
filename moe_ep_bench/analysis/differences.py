"""Under which conditions two runs were measured, and where these differ.

A time that changed was changed by something. If the GPU, its driver or a package is another one, nothing that is
compared says which of them it was, so such a difference takes the verdicts away, unless the user names it as what
was changed on purpose: then it is what is being compared. The clock of the GPUs takes away the verdicts on times
only, because a speedup is paired inside its run. Other code and another host are said and take nothing away: two
versions of the code are what a comparison is mostly for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moe_ep_bench.analysis.load import Comparison, Conditions, Part, Run
from moe_ep_bench.analysis.words import part_words
from moe_ep_bench.results import RunDirectory

Weight = Literal["all", "times", "none"]

# Of run.json's ``environment``: what decides times.
_ENVIRONMENT = (
    "device_name",
    "driver",
    "cpu_name",
    "num_cores",
    "threads_per_rank",
    "python",
    "torch",
    "cuda",
    "nccl",
    "triton",
    "megatron_core",
    "transformer_engine",
    "apex",
    "deep_ep",
    "variables",
)
# Of run.json's ``comparisons``: what the same config may have become on another machine.
_PARTS = ("backend", "experts", "permute", "kernel", "cuda_graph", "oversubscribed", "links", "device", "placement")
_CLOCKS = "clocks"
CHANGEABLE = (*_ENVIRONMENT, *_PARTS, _CLOCKS)

# A GPU's clock moves in steps of 15 MHz, under 1 %; what is beyond this is another clock.
_MAX_CLOCK_CHANGE = 0.02
# The matmul and the copy beside a run are taken a few times only.
_MAX_CEILING_CHANGE = 0.05


@dataclass(frozen=True)
class Difference:
    """One condition that was not the same.

    Attributes:
        weight: which verdicts it takes away: of times and speedups, of times only, or none.
        intended: named by the user as changed on purpose, and so of no weight.
    """

    key: str
    base: str
    new: str
    weight: Weight
    intended: bool = False

    @property
    def counts_for_times(self) -> bool:
        return self.weight != "none" and not self.intended

    @property
    def counts_for_speedups(self) -> bool:
        return self.weight == "all" and not self.intended

    def words(self) -> str:
        return f"{self.key}: {self.base} in BASE, {self.new} in NEW"


def check_intended(keys: Iterable[str]) -> None:
    """Raise ValueError for a key that is no condition."""
    for key in keys:
        if key not in CHANGEABLE:
            raise ValueError(f"--changed: expected some of {', '.join(CHANGEABLE)}; got {key!r}")


def differences(base: Run, new: Run, comparison_id: str, intended: Collection[str] = ()) -> list[Difference]:
    """All conditions of a comparison that differ between two runs; what a run did not record differs from nothing."""
    environments = [_environments(run, comparison_id) for run in (base, new)]
    facts = [run.comparisons[comparison_id] for run in (base, new)]
    conditions = [list(run.conditions.get(comparison_id, {}).values()) for run in (base, new)]
    found = [
        *_of_values(_ENVIRONMENT, *(_values(of_run, _ENVIRONMENT) for of_run in environments), "all"),
        *_of_values(_PARTS, *(_part_values(of_run) for of_run in facts), "all"),
        *_clocks(*conditions),
        *_ceilings(*conditions),
        *_of_values(("hostname",), *(_values(of_run, ("hostname",)) for of_run in environments), "none"),
        *_of_values(
            ("code", "git_commit"), *(_values(of_run, ("code", "git_commit")) for of_run in environments), "none"
        ),
    ]
    return [
        Difference(one.key, one.base, one.new, one.weight, one.key in intended and one.weight != "none")
        for one in found
    ]


def _environments(run: Run, comparison_id: str) -> list[dict[str, Any]]:
    """What every job whose rows are compared wrote down of where it ran, and of its code."""
    described = json.loads(RunDirectory(run.directory).run_json.read_text(encoding="utf-8")).get("runs") or {}
    ids = {run_id for case in run.cases if case.comparison_id == comparison_id for run_id in case.run_ids.values()}
    known = [described[run_id] for run_id in sorted(ids) if run_id in described]
    return [
        {**(job.get("environment") or {}), **{k: v for k, v in (job.get("hashes") or {}).items() if k == "code"}}
        for job in known
    ]


def _values(environments: Sequence[dict[str, Any]], keys: Iterable[str]) -> dict[str, list[str]]:
    """Of each key that was recorded the different values, as text."""
    found = {}
    for key in keys:
        texts = {_text(job[key]) for job in environments if key in job}
        if texts:
            found[key] = sorted(texts)
    return found


def _part_values(facts: Comparison) -> dict[str, list[str]]:
    values = {key: getattr(facts, key) for key in _PARTS}
    if values["kernel"] is None:  # older versions did not say
        del values["kernel"]
    return {
        key: [part_words(value).partition(" (")[0] if isinstance(value, Part) else _text(value)]
        for key, value in values.items()
    }


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return " ".join(f"{key}={one}" for key, one in sorted(value.items())) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _of_values(
    keys: Iterable[str], base: dict[str, list[str]], new: dict[str, list[str]], weight: Weight
) -> list[Difference]:
    return [
        Difference(key, " and ".join(base[key]), " and ".join(new[key]), weight)
        for key in keys
        if key in base and key in new and base[key] != new[key]
    ]


def _clocks(base: Sequence[Conditions], new: Sequence[Conditions]) -> list[Difference]:
    medians = []
    for launches in (base, new):
        clocks = [state.sm_clock_mhz[1] for one in launches for _, state in one.machines if state.sm_clock_mhz]
        medians.append(float(np.median(clocks)) if clocks else None)
    if None in medians or abs(medians[1] / medians[0] - 1) <= _MAX_CLOCK_CHANGE:
        return []
    words = [f"SM clock {median:,.0f} MHz (median)" for median in medians]
    return [Difference(_CLOCKS, *words, "times")]


def _ceilings(base: Sequence[Conditions], new: Sequence[Conditions]) -> list[Difference]:
    """The slowest rank's matmul and copy: a hint at what the machine did, too rough to take a verdict away."""
    found = []
    for name, unit in (("matmul_tflops", "TFLOP/s"), ("copy_gbps", "GB/s")):
        rates = []
        for launches in (base, new):
            of_ranks = [getattr(rank.ceilings, name) for one in launches for rank in one.ranks]
            rates.append(min(of_ranks) if of_ranks else None)
        if None not in rates and abs(rates[1] / rates[0] - 1) > _MAX_CEILING_CHANGE:
            what = name.partition("_")[0]
            found.append(Difference(f"{what} beside the run", *(f"{rate:.3g} {unit}" for rate in rates), "none"))
    return found
