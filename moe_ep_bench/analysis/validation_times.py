"""What stands beside the speedups of emulated and real ranks: times phase by phase, and times over loads.

Two laws of the literature are tried on each run's rows: that latency is linear in the largest load (arXiv 2503.05066,
Eq. 4), and that throughput is bounded by it (arXiv 2510.03293, Section 3.1: tokens per second ~ 1 / largest load).
Where ranks wait and where they transfer is decided by moments, so the sum of both is given apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.load import Case, Comparison
from moe_ep_bench.analysis.timing import GROUPS, MODEL_GROUPS, layer_time_us
from moe_ep_bench.schema import LAYER_PHASES, MODEL_PHASES, MOE_REST, UNACCOUNTED
from moe_ep_bench.timing.linear import linear_fit

_SUMS = {
    "gate and policy": GROUPS["gate"],
    "permute and metadata": GROUPS["permute"],
    "comm": GROUPS["comm"],
    "waiting": GROUPS["waiting"],
    "waiting and comm": (*GROUPS["waiting"], *GROUPS["comm"]),
}
# What is reported of a layer's time: every phase alone, and sums of some.
TIMES = {**{phase: (phase,) for phase in (*LAYER_PHASES, UNACCOUNTED)}, **_SUMS}
# Of a whole model's pass, its MoE layers together.
PASS_TIMES = {
    **{phase: (phase,) for phase in (*MODEL_PHASES, *LAYER_PHASES)},
    UNACCOUNTED: (MOE_REST, UNACCOUNTED),
    **_SUMS,
    "dense, norms and ends": MODEL_GROUPS["rest"],
    "MoE layers": (*LAYER_PHASES, MOE_REST),
}
# Of a phase's times those below this quantile met no disturbance; where they agree, it is noise that differs elsewhere.
QUIET = 0.2


def _breakdown(case: Case) -> pd.DataFrame:
    return case.timings[case.timings["kind"] == "breakdown"]


def phase_times_ms(case: Case, times: Mapping[str, Sequence[str]] = TIMES) -> dict[str, float]:
    """Sums of phases of a case's breakdown iterations: mean over ranks, then median over iterations.

    Args:
        times: ``TIMES``, or ``PASS_TIMES`` of a whole model.

    Returns:
        By name; empty without breakdown iterations.
    """
    rows = _breakdown(case)
    if rows.empty:
        return {}
    # A phase that did not occur on a rank took no time there.
    iteration = ["launch", "batch", "iteration"]
    summed_us = rows.pivot_table(index=iteration, columns="phase", values="time_us", aggfunc="sum", fill_value=0.0)
    mean_us = summed_us / rows["rank"].nunique()
    return {
        name: float(mean_us.reindex(columns=list(phases), fill_value=0.0).sum(axis=1).median()) / 1e3
        for name, phases in times.items()
    }


def phase_errors(pairs: Sequence[tuple[Case, Case]]) -> pd.DataFrame:
    """Emulated over real time of each phase, minus 1: the median over all measured (real, emulated) pairs.

    Waiting is left out: it is made of others' disturbances.

    Returns:
        phase, ``typical`` (of each rank's median time, mean over ranks) and ``quiet`` (of their ``QUIET`` quantile).
    """
    errors = []
    for pair in pairs:
        real_us, emulated_us = (
            _breakdown(case)
            .groupby(["phase", "rank"])["time_us"]
            .quantile([0.5, QUIET])
            .rename_axis(["phase", "rank", "quantile"])
            .groupby(["phase", "quantile"])
            .mean()
            for case in pair
        )
        errors.append(emulated_us.reindex(real_us.index, fill_value=0.0) / real_us[real_us > 0] - 1)
    if not errors:
        return pd.DataFrame(columns=["phase", "typical", "quiet"])
    medians = pd.concat(errors).groupby(["phase", "quantile"]).median().unstack("quantile")
    phases = [one for one in (*MODEL_PHASES, *LAYER_PHASES) if one in medians.index and one not in GROUPS["waiting"]]
    found = medians.loc[phases].reindex(columns=[0.5, QUIET]).set_axis(["typical", "quiet"], axis=1)
    return found.dropna(subset="quiet").rename_axis("phase").reset_index()


def law_rows(cases: Sequence[Case], facts: Comparison) -> Iterator[dict[str, Any]]:
    """Lines of times over loads, through all measured cases: what one run's policies do to the loads spreads them.

    Of a whole model's pass rows are summed over its MoE layers: a rank's own, and each layer's fullest rank's.

    Yields:
        law, and the line (``LinearFit``: us, us a row); of throughput ``r2`` alone. Nothing where loads do not vary.
    """
    received = {case.case_id: _rows_of_layers(case) for case in cases}
    own = pd.concat({name: rows.groupby("batch").sum().stack() for name, rows in received.items()})
    fullest = pd.concat({name: rows.max(axis=1).groupby("batch").sum() for name, rows in received.items()})
    experts_us = pd.concat({case.case_id: _experts_us(case) for case in cases})
    total_us = pd.concat({case.case_id: layer_time_us(case).groupby("batch").median() for case in cases})
    some = fullest[fullest > 0]  # A policy may drop everything: there is no 1 / 0.
    names = ("expert phase of a rank, over its rows", "layer time, over the largest load")
    if facts.whole is not None:
        names = ("expert phases of a rank, over its rows", "the pass, over its layers' largest loads")
    laws = (
        (names[0], own, experts_us),
        (names[1], fullest, total_us),
        ("tokens per second, over 1 / largest load", 1 / some, facts.num_tokens / total_us * 1e6),
    )
    for law, loads, values in laws:
        x, y = loads.align(values, join="inner")
        if x.nunique() > 2:
            line = asdict(linear_fit(x.to_numpy(), y.to_numpy()))
            yield {"law": law, **(line if values is not laws[2][2] else {"r2": line["r2"]})}


def _rows_of_layers(case: Case) -> pd.DataFrame:
    """(token, expert) pairs that each rank's experts compute, from all ranks' tokens: by (batch, layer), [rank]."""
    routing = case.routing if "layer" in case.routing else case.routing.assign(layer=0)
    loads = routing.groupby(["batch", "layer"])["load_R"].agg(lambda loads: np.sum(np.stack(loads.to_list()), axis=0))
    return pd.DataFrame(np.stack(loads.to_list()), loads.index).rename_axis(columns="rank").astype(float)


def _experts_us(case: Case) -> pd.Series:
    """The expert phase by (batch, rank): median over iterations."""
    rows = _breakdown(case)
    return rows[rows["phase"] == "experts"].groupby(["batch", "rank"])["time_us"].median()


def beside_alone(cases: Sequence[Case], alone: pd.DataFrame) -> pd.DataFrame:
    """The expert phase inside the layer beside the experts alone, one row per case and rank that was timed alone.

    Returns:
        label, rank, rows (mean over batches), layer_ms, alone_ms (medians over batches) and ratio (median over
        batches of the phase over the experts alone on the same rows).
    """
    apart = alone.groupby(["case_id", "batch", "rank"]).agg(rows=("num_rows", "first"), alone_ms=("time_us", "median"))
    inside = pd.concat({case.case_id: _experts_us(case) for case in cases}, names=["case_id"]).rename("layer_ms")
    both = apart.join(inside, how="inner").assign(ratio=lambda rows: rows["layer_ms"] / rows["alone_ms"])
    both[["alone_ms", "layer_ms"]] /= 1e3
    how = {"rows": "mean", "layer_ms": "median", "alone_ms": "median", "ratio": "median"}
    labels = {case.case_id: case.label for case in cases}
    found = both.groupby(["case_id", "rank"], sort=False).agg(how).reset_index()
    return found.assign(label=found["case_id"].map(labels)).drop(columns="case_id")
