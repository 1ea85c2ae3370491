"""Where the time of one case goes.

*Layer time.* Ranks meet in every layer, so the slowest one's time is the layer's: the maximum over
ranks of ``total``, per iteration, from plain iterations (nothing is read inside them). Median, p90
and p99 are over these.

*Phases.* They come from breakdown iterations, which hold extra clock readings and barriers. The
slowest rank waits for nobody; the others wait for it. So a mean over ranks shows what the ranks
lose to waiting, and the slowest rank shows what they wait *for*. What the probes cost and what no
phase covers are reported beside, for a breakdown is worth no more than these two allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from moe_ep_bench.analysis.load import Case
from moe_ep_bench.schema import LAYER_PHASES, PHASES, TOTAL, UNACCOUNTED, phase_groups

# Groups of a layer's phases, and what no phase covers.
MODEL_GROUPS = phase_groups("model")
GROUPS = {**phase_groups("layer"), UNACCOUNTED: (UNACCOUNTED,)}

_ITERATION = ["launch", "batch", "iteration"]

# A host that is still issuing work when this much of the time is over has kept the device waiting.
_HOST_BOUND = 0.95


@dataclass(frozen=True)
class Breakdown:
    """What the breakdown iterations of a case say.

    Attributes:
        group_ms: time of each of ``GROUPS``, mean over ranks, then median over iterations.
        slowest_phase: the phase that takes longest (median over iterations) on the rank that is
            slowest in each iteration; ``waiting (dispatch)`` and the like when it is a wait.
        unaccounted_share: time that no phase covers, over total, on the slowest rank: sum over sum
            within a batch, then the median over batches.
        policy_share: likewise of the phase ``policy``: what choosing experts costs.
        layer_ms: median layer time of these iterations, probes included.
    """

    group_ms: dict[str, float]
    slowest_phase: str
    unaccounted_share: float
    policy_share: float
    layer_ms: float


def layer_time_us(case: Case) -> pd.Series:
    """Time of the slowest rank in each plain iteration, indexed by (launch, batch, iteration)."""
    rows = case.timings[(case.timings["kind"] == "plain") & (case.timings["phase"] == TOTAL)]
    return rows.groupby(_ITERATION)["time_us"].max()


def host_time_us(case: Case) -> pd.Series:
    """Time for which the slowest rank's host issued a plain iteration, indexed by (launch, batch, iteration)."""
    return _slowest_rank(case).set_index(_ITERATION)["host_us"]


def host_bound_share(case: Case) -> float:
    """Share of plain iterations in which the slowest rank's host issued work until the end: no queue, no device limit.

    Meaningful on a GPU only, where the host runs ahead of the device.
    """
    slowest = _slowest_rank(case)
    return float((slowest["host_us"] >= _HOST_BOUND * slowest["time_us"]).mean())


def _slowest_rank(case: Case) -> pd.DataFrame:
    """Of each plain iteration the total of the rank that took longest."""
    rows = case.timings[(case.timings["kind"] == "plain") & (case.timings["phase"] == TOTAL)]
    return rows.loc[rows.groupby(_ITERATION)["time_us"].idxmax()]


def break_down(case: Case) -> Breakdown | None:
    """Reduce the breakdown iterations of a case; None when it has none."""
    rows = case.timings[case.timings["kind"] == "breakdown"]
    if rows.empty:
        return None
    # One row per (launch, batch, iteration, rank), a column per phase; a phase that did not occur took no time.
    times_us = rows.pivot(index=[*_ITERATION, "rank"], columns="phase", values="time_us").fillna(0.0)
    times_us = times_us.reindex(columns=[*LAYER_PHASES, UNACCOUNTED, TOTAL], fill_value=0.0)
    slowest_us = times_us.loc[times_us.groupby(level=_ITERATION)[TOTAL].idxmax()]
    per_batch_us = slowest_us.groupby(level="batch").sum()
    mean_us = times_us.groupby(level=_ITERATION).mean()
    return Breakdown(
        group_ms={name: float(mean_us[list(phases)].sum(axis=1).median()) / 1e3 for name, phases in GROUPS.items()},
        slowest_phase=phase_words(str(slowest_us[list(LAYER_PHASES)].median().idxmax())),
        unaccounted_share=float((per_batch_us[UNACCOUNTED] / per_batch_us[TOTAL]).median()),
        policy_share=float((per_batch_us["policy"] / per_batch_us[TOTAL]).median()),
        layer_ms=float(slowest_us[TOTAL].median()) / 1e3,
    )


def phase_words(phase: str) -> str:
    """Name a phase for a reader: waiting is not the phase that it stands before."""
    meets = PHASES[phase].meets if phase in PHASES else None
    return phase if meets is None else f"waiting ({meets})"
