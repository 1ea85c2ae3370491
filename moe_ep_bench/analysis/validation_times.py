"""What stands beside the speedups of emulated and real ranks: times phase by phase, and times over loads.

Two laws of the literature are tried on each run's rows: that latency is linear in the largest load (arXiv 2503.05066,
Eq. 4), and that throughput is bounded by it (arXiv 2510.03293, Section 3.1: tokens per second ~ 1 / largest load).
Where ranks wait and where they transfer is decided by moments, so the sum of both is given apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.load import Case
from moe_ep_bench.analysis.timing import GROUPS, MODEL_GROUPS, layer_time_us
from moe_ep_bench.schema import LAYER_PHASES, MODEL_PHASES, MOE_REST, UNACCOUNTED
from moe_ep_bench.timing.linear import LinearFit, linear_fit

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

_ITERATION = ["launch", "batch", "iteration"]


@dataclass(frozen=True)
class LoadLaws:
    """How times follow loads in one run; None where loads do not vary.

    Of a whole model's pass rows are summed over its MoE layers: a rank's own, and each layer's fullest rank's.

    Attributes:
        experts: a rank's expert phase (us) over the rows that it received.
        layer: time (us) of the layer or the pass over the fullest rank's rows.
        throughput_r2: R2 of a line through tokens per second over 1 / the fullest rank's rows.
    """

    experts: LinearFit | None
    layer: LinearFit | None
    throughput_r2: float | None


@dataclass(frozen=True)
class PhaseError:
    """Emulated over real time of one phase, minus 1: the median over cases.

    Attributes:
        typical: of each rank's median time.
        quiet: of each rank's ``QUIET`` quantile.
    """

    phase: str
    typical: float
    quiet: float


def phase_times_ms(case: Case, times: Mapping[str, Sequence[str]] = TIMES) -> dict[str, float]:
    """Sums of phases of a case's breakdown iterations: mean over ranks, then median over iterations.

    Args:
        times: ``TIMES``, or ``PASS_TIMES`` of a whole model.

    Returns:
        By name; empty without breakdown iterations.
    """
    rows = case.timings[case.timings["kind"] == "breakdown"]
    if rows.empty:
        return {}
    # A phase that did not occur on a rank took no time there.
    summed_us = rows.pivot_table(index=_ITERATION, columns="phase", values="time_us", aggfunc="sum", fill_value=0.0)
    mean_us = summed_us / rows["rank"].nunique()
    return {
        name: float(mean_us.reindex(columns=list(phases), fill_value=0.0).sum(axis=1).median()) / 1e3
        for name, phases in times.items()
    }


def phase_errors(pairs: list[tuple[Case, Case]]) -> list[PhaseError]:
    """Errors of each phase over all cases, (real, emulated) pairs, once typical and once undisturbed.

    A phase's time is taken of each rank, as a quantile over batches and iterations, then averaged over ranks. Waiting
    is left out: it is made of others' disturbances.
    """
    measured = [pair for pair in pairs if all(case.is_ok for case in pair)]
    found = []
    for phase in (phase for phase in (*MODEL_PHASES, *LAYER_PHASES) if phase not in GROUPS["waiting"]):
        errors = {
            quantile: [
                emulated_us / real_us - 1
                for real_us, emulated_us in (
                    (_phase_quantile_us(real, phase, quantile), _phase_quantile_us(emulated, phase, quantile))
                    for real, emulated in measured
                )
                if real_us > 0
            ]
            for quantile in (0.5, QUIET)
        }
        if errors[QUIET]:
            found.append(PhaseError(phase, float(np.median(errors[0.5])), float(np.median(errors[QUIET]))))
    return found


def _phase_quantile_us(case: Case, phase: str, quantile: float) -> float:
    """Mean over ranks of the quantile of their times; 0 where the phase did not occur."""
    rows = case.timings[(case.timings["kind"] == "breakdown") & (case.timings["phase"] == phase)]
    return 0.0 if rows.empty else float(rows.groupby("rank")["time_us"].quantile(quantile).mean())


def load_laws(cases: list[Case], num_tokens: int) -> LoadLaws:
    """Fit times to loads over all measured cases together: what one run's policies do to the loads spreads them.

    Args:
        num_tokens: of a batch, on all ranks.
    """
    measured = [case for case in cases if case.is_ok]
    rows, experts_us, fullest, layer_us = [], [], [], []
    for case in measured:
        received = received_rows(case)
        phase_us = _experts_us(case).reindex(received.index)
        rows.append(received[phase_us.notna()])
        experts_us.append(phase_us.dropna())
        time_us = layer_time_us(case).groupby("batch").median()
        layer_us.append(time_us)
        fullest.append(_fullest_rows(case).reindex(time_us.index))
    rows_N, experts_us_N, fullest_N, layer_us_N = map(_joined, (rows, experts_us, fullest, layer_us))
    some_N = fullest_N > 0  # a policy may drop everything: there is no 1 / 0
    throughput = _line(1 / fullest_N[some_N], num_tokens / layer_us_N[some_N] * 1e6)
    return LoadLaws(
        experts=_line(rows_N, experts_us_N),
        layer=_line(fullest_N, layer_us_N),
        throughput_r2=throughput and throughput.r2,
    )


def received_rows(case: Case) -> pd.Series:
    """(token, expert) pairs that each rank's experts compute, from all ranks' tokens, by (batch, rank).

    Of a whole model those of all its MoE layers.
    """
    return _rows_by_layer(case).groupby(["batch", "rank"]).sum()


def _fullest_rows(case: Case) -> pd.Series:
    """Pairs of the fullest rank, by batch; of a whole model each layer's fullest rank, summed over layers."""
    return _rows_by_layer(case).groupby(["batch", "layer"]).max().groupby("batch").sum()


def _rows_by_layer(case: Case) -> pd.Series:
    """Pairs by (batch, layer, rank); what was timed alone is layer 0."""
    routing = case.routing if "layer" in case.routing else case.routing.assign(layer=0)
    received = {
        (batch, layer, rank): load
        for (batch, layer), rows in routing.groupby(["batch", "layer"])
        for rank, load in enumerate(np.sum(np.stack(rows["load_R"].to_list()), axis=0))
    }
    index = pd.MultiIndex.from_tuples(list(received), names=["batch", "layer", "rank"])
    return pd.Series(list(received.values()), index=index, dtype="float64")


def _experts_us(case: Case) -> pd.Series:
    """The expert phase by (batch, rank): median over iterations."""
    rows = case.timings[(case.timings["kind"] == "breakdown") & (case.timings["phase"] == "experts")]
    return rows.groupby(["batch", "rank"])["time_us"].median()


def _joined(parts: list[pd.Series]) -> np.ndarray:
    return np.concatenate([part.to_numpy(dtype=np.float64) for part in parts]) if parts else np.empty(0)


def _line(x_N: np.ndarray, y_N: np.ndarray) -> LinearFit | None:
    return linear_fit(x_N, y_N) if len(np.unique(x_N)) > 2 else None


def beside_alone(cases: list[Case], alone: pd.DataFrame) -> pd.DataFrame:
    """The expert phase inside the layer beside the experts alone, one row per case and rank that was timed alone.

    Returns:
        label, rank, rows (mean over batches), layer_ms, alone_ms (medians over batches) and ratio (median over
        batches of the phase over the experts alone on the same rows).
    """
    found = []
    for case in cases:
        mine = alone[alone["case_id"] == case.case_id]
        if mine.empty or not case.is_ok:
            continue
        apart = mine.groupby(["batch", "rank"]).agg(rows=("num_rows", "first"), alone_us=("time_us", "median"))
        both = apart.join(_experts_us(case).rename("layer_us"), how="inner")
        for rank, one in both.groupby("rank"):
            found.append(
                {
                    "label": case.label,
                    "rank": rank,
                    "rows": float(one["rows"].mean()),
                    "layer_ms": float(one["layer_us"].median()) / 1e3,
                    "alone_ms": float(one["alone_us"].median()) / 1e3,
                    "ratio": float((one["layer_us"] / one["alone_us"]).median()),
                }
            )
    return pd.DataFrame(found, columns=["label", "rank", "rows", "layer_ms", "alone_ms", "ratio"])
