"""Compare emulated ranks with real ones: how far may the speedups of ``emulate`` be trusted?

Both runs are of one config, on the same batches with the same routing; only the emulated one sets the ranks' runs side
by side itself and models what moves between them. Its speedups are *equivalent* to the real ones, *different* or
neither by ``statistics.equivalence``: the ratio of both is taken batch by batch, as ``compare`` takes a change from job
to job. An error that all cases share cancels in a speedup, so times and phases stand beside each other as well. Of
whole models the speedup of the MoE layers alone is judged too, for a pass dilutes their error.

Two laws of the literature are tried on each run's rows: that latency is linear in the largest load (arXiv 2503.05066,
Eq. 4), and that throughput is bounded by it (arXiv 2510.03293, Section 3.1: tokens per second ~ 1 / largest load).
Where ranks wait and where they transfer is decided by moments, so the sum of both is given apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.frames import speedups
from moe_ep_bench.analysis.load import Case, Comparison, ResultsError, Run, is_whole, load_run
from moe_ep_bench.analysis.parts import read_jobs, read_table
from moe_ep_bench.analysis.render import Row
from moe_ep_bench.analysis.timing import GROUPS, MODEL_GROUPS, layer_time_us
from moe_ep_bench.analysis.whole import moe_time_us
from moe_ep_bench.analysis.words import OVERSUBSCRIBED
from moe_ep_bench.results import ALONE_SCHEMA, ValidationDirectory
from moe_ep_bench.schema import LAYER_PHASES, MODEL_PHASES, MOE_REST, UNACCOUNTED
from moe_ep_bench.timing.linear import linear_fit
from moe_ep_bench.timing.statistics import Estimate, equivalence, estimate_change, paired_ratios

# What names a case in both runs; ids differ, for they say how it was measured.
_KEY = ["role", "policy", "policy_params"]
# Of ``frames.speedups``.
_COLUMNS = (
    "^(comparison_id|case_id|title|label|role|policy|policy_params|status|reason|median_ms|floor_.*|(moe_)?speedup_.*"
    "|dropped_share|retained_mass)$"
)
_RUNS = ("real", "emulated")
_ESTIMATE = ("median", "low", "high", "is_interval")


@dataclass(frozen=True, eq=False)
class Validation:
    """All comparisons of a directory that ``validate`` wrote; in every frame ``comparison_id`` is the real run's.

    Attributes:
        cases: a row per case: ``comparison`` (its title), ``label``, ``role``, ``unmeasured`` (why there is nothing to
            compare); ``real_*`` and ``emulated_*``, the columns of ``frames.speedups``; ``speedup_ratio_*``, emulated
            over real speedup with its interval, and ``verdict`` (equivalent, different, inconclusive; none of native,
            whose speedup is no claim); of whole models the same with ``moe_`` before it, for claims.
        phases: a row per case x time of ``TIMES`` or ``PASS_TIMES``: ``real_ms``, ``emulated_ms``.
        errors: see ``phase_errors``; ``laws``: see ``law_rows``, by ``run``; ``alone``: see ``beside_alone``.
        unsound: by comparison, why its runs may not be compared at all; empty where they may.
        links: where the links are from, in words.
        margin: by which equivalent speedups differ at most.
    """

    files: ValidationDirectory
    real: Run
    emulated: Run
    cases: pd.DataFrame
    phases: pd.DataFrame
    errors: pd.DataFrame
    laws: pd.DataFrame
    alone: pd.DataFrame
    unsound: dict[str, list[str]]
    links: str
    margin: float

    @property
    def claims(self) -> pd.DataFrame:
        """Cases whose speedup is a claim: policies, and the ceiling."""
        return self.cases[self.cases["verdict"].notna()]

    @property
    def timed(self) -> str:
        """What was timed, in a word."""
        return "pass" if self.real.scope == "model" else "layer"


def is_validation(directory: Path) -> bool:
    """Whether ``validate`` wrote this directory."""
    return ValidationDirectory(directory).pairs.is_file()


def load_validation(directory: Path) -> Validation:
    """Read both runs and set them against each other.

    Raises:
        ResultsError: one line: a file is missing or cannot be trusted, or one run has a case that the other lacks.
    """
    files = ValidationDirectory(directory)
    try:
        pairs, links, margin = files.read_pairs()
    except ValueError as error:
        raise ResultsError(str(error)) from None
    real, emulated = runs = [load_run(one, whole=is_whole(files.real)) for one in (files.real, files.emulated)]
    for run, ids in zip(runs, zip(*pairs, strict=True), strict=True):
        unknown = [one for one in ids if one not in run.comparisons]
        if unknown:
            raise ResultsError(f"{run.directory}: holds no comparison {unknown[0]}, which {files.pairs} names")
    rows = _side_by_side(real, emulated, pairs)
    by_id = {case.case_id: case for run in runs for case in run.cases}
    alone = read_table(files.experts_alone, ALONE_SCHEMA).to_pandas() if files.experts_alone.is_file() else None
    times = PASS_TIMES if real.scope == "model" else TIMES
    phases, errors, laws, beside, unsound = [], [], [], [], {}
    for name, own in rows.groupby("comparison_id", sort=False):
        measured = own[own["unmeasured"].isna()]
        of_runs = {run: [by_id[case_id] for case_id in measured[f"{run}_case_id"]] for run in _RUNS}
        both = list(zip(*of_runs.values(), strict=True))
        unsound[name] = _unsound(real, emulated, name, both)
        errors.append(phase_errors(both).assign(comparison_id=name))
        if not both:
            continue
        about = measured[["comparison_id", "comparison", "label", "role"]].to_dict("records")
        for row, pair in zip(about, both, strict=True):
            real_ms, emulated_ms = (case.breakdown.mean_ms(times) for case in pair)
            phases += [
                row | {"time": one, "real_ms": ms, "emulated_ms": emulated_ms[one]} for one, ms in real_ms.items()
            ]
        for run in ("emulated", "real"):
            found = law_rows(of_runs[run], real.comparisons[name])
            laws += [{"comparison_id": name, "run": "measured" if run == "real" else run, **law} for law in found]
        if alone is not None:
            beside.append(beside_alone(of_runs["emulated"], alone).assign(comparison_id=name))
    judged = _judged(rows, runs, {name for name, reasons in unsound.items() if reasons}, margin)
    return Validation(
        *(files, real, emulated, judged, pd.DataFrame(phases), pd.concat(errors), pd.DataFrame(laws)),
        *(pd.concat(beside) if beside else pd.DataFrame(), unsound, links, margin),
    )


def _side_by_side(real: Run, emulated: Run, pairs: list[tuple[str, str]]) -> pd.DataFrame:
    """A row per case of both runs, in the real one's reading order."""
    frames = [
        speedups(run)
        .filter(regex=_COLUMNS)
        .rename(columns=lambda key, name=name: key if key in _KEY else f"{name}_{key}")
        for name, run in zip(_RUNS, (real, emulated), strict=True)
    ]
    beside = pd.DataFrame(pairs, columns=["real_comparison_id", "emulated_comparison_id"])
    rows = beside.merge(frames[0]).merge(frames[1], "left", [*_KEY, "emulated_comparison_id"])
    lost = rows[rows["emulated_case_id"].isna()]
    if len(lost):
        raise ResultsError(f"the emulated run has no case {lost['real_label'].iloc[0]}, which the real one has")
    named = {"real_title": "comparison", "real_comparison_id": "comparison_id", "real_label": "label"}
    unmeasured = pd.Series([_unmeasured(row) for row in rows.to_dict("records")], dtype=object)
    return rows.rename(columns=named).assign(unmeasured=unmeasured)


def _unmeasured(row: Row) -> str | None:
    for run in _RUNS:
        if row[f"{run}_status"] != "ok":
            return f"{run}: {row[f'{run}_status']}: {row[f'{run}_reason'] or 'no reason was recorded'}"
    return None


def _judged(rows: pd.DataFrame, runs: list[Run], unsound: set[str], margin: float) -> pd.DataFrame:
    """The rows with the ratio of both speedups and verdicts; nothing is said of ``unsound`` comparisons."""
    times: dict[str, Callable[[Case], pd.Series]] = {"": layer_time_us}
    if "real_moe_speedup_median" in rows:
        times["moe_"] = moe_time_us
    is_claim = rows["role"].isin(["policy", "ceiling"])
    for name, time_us in times.items():
        ratios = [
            _ratio(row, runs, time_us) if claim else None
            for row, claim in zip(rows.to_dict("records"), is_claim, strict=True)
        ]
        verdicts = [
            equivalence(None if comparison_id in unsound else ratio, margin) if claim else None
            for ratio, comparison_id, claim in zip(ratios, rows["comparison_id"], is_claim, strict=True)
        ]
        found = pd.DataFrame(
            {f"{name}speedup_ratio_{end}": [getattr(ratio, end, None) for ratio in ratios] for end in _ESTIMATE},
            rows.index,
        )
        rows = rows.join(found.astype(dict.fromkeys(found.columns[:3], float)))
        rows[f"{name}verdict"] = pd.Series(verdicts, rows.index, dtype=object)
        if name:  # of policies and the ceiling alone
            rows = rows.assign(**rows.filter(like="_moe_speedup_").where(is_claim))
    return rows


def _ratio(row: Row, runs: list[Run], time_us: Callable[[Case], pd.Series]) -> Estimate | None:
    """Emulated over real speedup of one case; None where either has none."""
    speedups_of = []
    for name, run in zip(_RUNS, runs, strict=True):
        comparison_id = row["comparison_id" if name == "real" else f"{name}_comparison_id"]
        native = next((c for c in run.cases if (c.comparison_id, c.role) == (comparison_id, "baseline")), None)
        case = run.by_key[comparison_id, row[f"{name}_case_id"]]
        if native is None or not native.is_ok or not case.is_ok:
            return None
        speedups_of.append(paired_ratios(time_us(native), time_us(case)))
    return None if any(one.empty for one in speedups_of) else estimate_change(*speedups_of)


def _unsound(real: Run, emulated: Run, comparison_id: str, pairs: list[tuple[Case, Case]]) -> list[str]:
    reasons = [OVERSUBSCRIBED] if real.comparisons[comparison_id].oversubscribed else []
    threads = [_threads(run) for run in (real, emulated)]
    if threads[0] != threads[1]:
        reasons.append(f"each real rank computed with {threads[0]} thread(s), the emulated one with {threads[1]}")
    other = [one.label for one, two in pairs if not _loads(one).equals(_loads(two))]
    if other:
        reasons.append(f"routing is not the same in both runs: {', '.join(other)}")
    return reasons


def _loads(case: Case) -> pd.Series:
    """How many pairs every rank sent every expert, of every batch and layer."""
    keys = [key for key in ("batch", "layer", "rank") if key in case.routing]
    return case.routing.set_index(keys)["load_E"].sort_index().map(tuple)


def _threads(run: Run) -> int:
    """Compute threads of a rank of the latest job."""
    found = read_jobs(run.directory).environment.get("threads_per_rank")
    if not isinstance(found, int):
        raise ResultsError(f"{run.directory / 'run.json'}: environment.threads_per_rank: expected a whole number")
    return found


# ---- times and loads ------------------------------------------------------------------------------------------------

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
            batch_N = x.index.get_level_values("batch")  # under every case the same
            line = asdict(linear_fit(x.to_numpy(), y.to_numpy(), cluster_N=batch_N))
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
