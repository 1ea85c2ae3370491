"""What stands beside the speedups of emulated and real ranks: times phase by phase, and times over loads.

Two laws of the literature are tried on each run's rows: that latency is linear in the largest load (arXiv 2503.05066,
Eq. 4), and that throughput is bounded by it (arXiv 2510.03293, Section 3.1: tokens per second ~ 1 / largest load).
Where ranks wait and where they transfer is decided by moments, so the sum of both is given apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.load import Case, Comparison
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


def phase_errors(pairs: list[tuple[Case, Case]]) -> pd.DataFrame:
    """Emulated over real time of each phase, minus 1: the median over all cases, (real, emulated) pairs.

    Waiting is left out: it is made of others' disturbances.

    Returns:
        phase, ``typical`` (of each rank's median time, mean over ranks) and ``quiet`` (of their ``QUIET`` quantile).
    """
    errors = []
    for pair in pairs:
        if all(case.is_ok for case in pair):
            real_us, emulated_us = (_phase_quantiles_us(case) for case in pair)
            errors.append(emulated_us.reindex(real_us.index, fill_value=0.0) / real_us[real_us > 0] - 1)
    if not errors:
        return pd.DataFrame(columns=["phase", "typical", "quiet"])
    medians = pd.concat(errors).groupby(level=["phase", "quantile"]).median().unstack("quantile")
    phases = [one for one in (*MODEL_PHASES, *LAYER_PHASES) if one in medians.index and one not in GROUPS["waiting"]]
    found = medians.loc[phases].reindex(columns=[0.5, QUIET]).set_axis(["typical", "quiet"], axis=1)
    return found.dropna(subset="quiet").rename_axis("phase").reset_index()


def _phase_quantiles_us(case: Case) -> pd.Series:
    """Quantiles of each rank's time over batches and iterations, mean over ranks, by (phase, quantile)."""
    rows = case.timings[case.timings["kind"] == "breakdown"]
    of_ranks = rows.groupby(["phase", "rank"])["time_us"].quantile([0.5, QUIET])
    return of_ranks.rename_axis(["phase", "rank", "quantile"]).groupby(level=["phase", "quantile"]).mean()


def load_laws(cases: list[Case], num_tokens: int) -> LoadLaws:
    """Fit times to loads over all measured cases together: what one run's policies do to the loads spreads them.

    Args:
        num_tokens: of a batch, on all ranks.
    """
    measured = [case for case in cases if case.is_ok]
    if not measured:
        return LoadLaws(None, None, None)
    of_ranks = pd.concat([_beside(received_rows(case), _experts_us(case)) for case in measured])
    of_batches = pd.concat(
        [_beside(_fullest_rows(case), layer_time_us(case).groupby("batch").median()) for case in measured]
    )
    some = of_batches[of_batches["rows"] > 0]  # a policy may drop everything: there is no 1 / 0
    throughput = _line(1 / some["rows"], num_tokens / some["time_us"] * 1e6)
    return LoadLaws(
        experts=_line(of_ranks["rows"], of_ranks["time_us"]),
        layer=_line(of_batches["rows"], of_batches["time_us"]),
        throughput_r2=throughput and throughput.r2,
    )


def _beside(rows: pd.Series, time_us: pd.Series) -> pd.DataFrame:
    return pd.concat([rows.rename("rows"), time_us.rename("time_us")], axis=1, join="inner")


def _line(x: pd.Series, y: pd.Series) -> LinearFit | None:
    return linear_fit(x.to_numpy(), y.to_numpy()) if x.nunique() > 2 else None


def law_rows(pairs: list[tuple[Case, Case]], facts: Comparison) -> pd.DataFrame:
    """``load_laws`` of both runs, a row each: run, law, and the line (us, us a row, its interval, R2, points)."""
    if facts.whole is None:
        names = ("expert phase of a rank, over its rows", "layer time, over the largest load")
    else:
        names = ("expert phases of a rank, over its rows", "the pass, over its layers' largest loads")
    rows = []
    for run, cases in (("emulated", [two for _, two in pairs]), ("measured", [one for one, _ in pairs])):
        laws = load_laws(cases, facts.num_tokens)
        for law, fit in zip(names, (laws.experts, laws.layer), strict=True):
            if fit is not None:
                rows.append({"run": run, "law": law, **asdict(fit)})
        if laws.throughput_r2 is not None:
            law = "tokens per second, over 1 / largest load"
            rows.append({"run": run, "law": law, "r2": laws.throughput_r2})
    columns = ["run", "law", *(field.name for field in fields(LinearFit))]
    return pd.DataFrame(rows, columns=columns).astype({"num_points": "Int64"})


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


def beside_alone(cases: list[Case], alone: pd.DataFrame) -> pd.DataFrame:
    """The expert phase inside the layer beside the experts alone, one row per case and rank that was timed alone.

    Returns:
        label, rank, rows (mean over batches), layer_ms, alone_ms (medians over batches) and ratio (median over
        batches of the phase over the experts alone on the same rows).
    """
    columns = ["label", "rank", "rows", "layer_ms", "alone_ms", "ratio"]
    found = [pd.DataFrame(columns=columns)]
    for case in cases:
        mine = alone[alone["case_id"] == case.case_id]
        if mine.empty or not case.is_ok:
            continue
        apart = mine.groupby(["batch", "rank"]).agg(rows=("num_rows", "first"), alone_ms=("time_us", "median"))
        both = apart.join(_experts_us(case).rename("layer_ms"), how="inner")
        both[["alone_ms", "layer_ms"]] /= 1e3
        both["ratio"] = both["layer_ms"] / both["alone_ms"]
        of_ranks = both.groupby("rank").agg(
            {"rows": "mean", "layer_ms": "median", "alone_ms": "median", "ratio": "median"}
        )
        found.append(of_ranks.reset_index().assign(label=case.label)[columns])
    return pd.concat(found[1:] or found, ignore_index=True)
