"""Read a run directory and refuse what cannot be trusted.

Every figure and table rests on these files, so they are checked here and in ``parts``, once: what is missing, damaged
or of another run is an error that names it, never a gap that nobody sees. Who would rather see the rest of a directory
gives a list for these lines (``load_run(directory, passed_over)``): what cannot be trusted is then left out and named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from moe_ep_bench.analysis.described import (
    CaseDescription,
    Comparison,
    Conditions,
    MissingPartError,
    Role,
    RunDescription,
    Tried,
    read_description,
)
from moe_ep_bench.analysis.described import Part as Part  # these two are a comparison's
from moe_ep_bench.analysis.described import Workload as Workload
from moe_ep_bench.analysis.parts import (
    SAMPLE,
    ResultsError,
    check_routing,
    launches_of,
    one_line,
    over_layers,
    read_part,
    timings_of,
)
from moe_ep_bench.bench.validation_directory import ValidationDirectory
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import LAYER_PHASES, METRICS, PHASES, ROUTING_SCHEMA, SAMPLES_SCHEMA

_OF_IMAGES = [name for name, metric in METRICS.items() if metric.of == "images"]  # ``route``'s alone
_OF_LAYERS = "holds no times of whole models (scope: model)"
_OF_MODELS = "holds times of whole models, which this does not read (docs/model.md says what does); expected layers'"


@dataclass(frozen=True, eq=False)
class Case:
    """One policy on one workload.

    Attributes:
        status: one of ``STATUSES``; ``reason`` says why when it is not ok. A case that failed in one launch failed.
        run_ids: the job that wrote each launch.
        timings: launch, rank, batch, iteration, kind, phase, time_us, host_us; no rows unless ok. Of a whole model
            each phase is the sum over its layers.
        routing: one row per rank x batch, of a whole model x ``layer``, as in ``ROUTING_SCHEMA``; no rows unless ok.
        layers: of a whole model, the phases of every layer in breakdown iterations; None of a layer alone.
        extra_bytes_per_rank: memory that a rank needs beyond native's, for replicas of experts; None without any.
    """

    case_id: str
    comparison_id: str
    policy: str
    policy_params: dict[str, Any]
    label: str
    role: Role
    looks_past_top_k: bool
    status: str
    reason: str | None
    run_ids: dict[int, str]
    timings: pd.DataFrame
    routing: pd.DataFrame
    extra_bytes_per_rank: float | None = None
    layers: pd.DataFrame | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, eq=False)
class Run:
    """Everything a run directory holds."""

    directory: Path
    run_id: str
    mode: str
    scope: str  # what was timed: a layer, or a whole model
    device_name: str
    num_devices: int
    comparisons: dict[str, Comparison]
    cases: tuple[Case, ...]
    conditions: dict[str, dict[int, Conditions]]  # by comparison and launch
    torch: str | None = None  # versions; None where they were not recorded
    megatron_core: str | None = None
    nccl: str | None = None
    driver: str | None = None  # of the GPUs; likewise
    named: str | None = None  # what figures call it where it stands beside others (``gather``)


def load_run(directory: Path | str, passed_over: list[str] | None = None, *, whole: bool = False) -> Run:
    """Read and check a run directory.

    A directory holds times of layers or of whole models, and who reads it says which: no table mixes them.

    Args:
        passed_over: where it is given, cases, comparisons and conditions that cannot be trusted are left out, and a
            line that names the file and what is wrong with it is added here for each. None = the first such is raised.
        whole: whether it is to hold times of whole models.

    Raises:
        ResultsError: one line that names the file and what is wrong with it; with ``passed_over`` only where nothing
            is left.
    """
    files = RunDirectory(Path(directory))
    tried = Tried(passed_over)
    description = read_description(files.run_json, tried)
    if (description.scope == "model") != whole:
        raise ResultsError(f"{files.root}: {_OF_LAYERS if whole else _OF_MODELS}")
    _check_known_parts(files, description, tried)
    read = (tried(_read_case, files, case_id, description) for case_id in description.cases)
    cases = _of_one_job(files, tuple(case for case in read if case is not None), tried)
    conditions = _read_conditions(files, cases, description.comparisons, tried)
    tried.say_missing(files)
    if not any(case.is_ok for case in cases):
        counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(c.status for c in cases).items()))
        first = f"; {cases[0].label}: {one_line(cases[0].reason)}" if cases else ""
        nothing = "none can be read" if passed_over else "run.json lists none"
        raise ResultsError(f"{files.root}: no case was measured ({counts or nothing}){first}")
    run = Run(
        directory=files.root,
        run_id=description.run_id,
        mode=description.mode,
        scope=description.scope,
        device_name=description.environment.device_name,
        num_devices=description.environment.num_devices,
        comparisons=dict(sorted(description.comparisons.items(), key=lambda item: _place_in_sweep(item[1]))),
        cases=cases,
        conditions=conditions,
        torch=description.environment.torch,
        megatron_core=description.environment.megatron_core,
        nccl=description.environment.nccl,
        driver=description.environment.driver,
    )
    if passed_over is not None:
        passed_over += _without_baseline(files.run_json, run)
    return run


def is_route(directory: Path | str) -> bool:
    """Whether ``run.json`` there says that it is routing only, and no samples of time lie beside it."""
    return (
        _said(directory, "mode") == "route" and not RunDirectory(Path(directory)).path("samples", "any").parent.exists()
    )


def is_quality(directory: Path | str) -> bool:
    """Whether ``quality`` wrote a directory."""
    return _said(directory, "mode") == "quality"


def is_whole(directory: Path | str) -> bool:
    """Whether a directory holds times of whole models."""
    return _said(directory, "scope") == "model"


def _said(directory: Path | str, key: str) -> Any:
    """What ``run.json`` says under a key; None where there is none that can be read."""
    try:
        return json.loads(RunDirectory(Path(directory)).run_json.read_text()).get(key)
    except (OSError, ValueError, AttributeError):
        return None


_UNTIMED = (
    (is_route, "routing"),
    (is_quality, "what policies do to a model's answers,"),
)


def check_timed(directory: Path | str) -> None:
    """Raise ResultsError where a directory is not one run's times: it holds none, or two runs (``validate``)."""
    if ValidationDirectory(Path(directory)).pairs.is_file():
        raise ResultsError(f"{directory}: holds two runs side by side: name {directory}/real or {directory}/emulated")
    for is_other, what in _UNTIMED:
        if is_other(directory):
            raise ResultsError(f"{directory}: holds {what} without times; expected what `run` or `emulate` wrote")


def _without_baseline(run_json: Path, run: Run) -> list[str]:
    """Which comparisons can have no speedups."""
    lines = []
    for comparison_id, facts in run.comparisons.items():
        measured = [case for case in run.cases if case.comparison_id == comparison_id and case.is_ok]
        if measured and not any(case.role == "baseline" for case in measured):
            lines.append(
                f"{run_json}: comparisons.{comparison_id} ({facts.title}): native, its baseline, is not there as "
                f"measured, so its {len(measured)} cases have no speedups"
            )
    return lines


def _place_in_sweep(comparison: Comparison) -> list[tuple[bool, Any]]:
    """Sorts comparisons by the values of their swept keys, numbers before words; without a sweep all are alike."""
    values = [comparison.point[key] for key in sorted(comparison.point)]
    return [(False, value) if isinstance(value, int | float) else (True, json.dumps(value)) for value in values]


def _check_known_parts(files: RunDirectory, description: RunDescription, tried: Tried) -> None:
    listed = json.loads(files.run_json.read_text(encoding="utf-8")).get("cases", {})  # those left out too
    for folder in (files.path("samples", "any").parent, files.path("routing", "any").parent):
        for path in sorted(folder.glob("*.parquet")):
            if path.stem not in description.cases and path.stem not in listed:
                tried.error(ResultsError(f"{path}: foreign, run.json lists no case {path.stem!r}"))


def _read_case(files: RunDirectory, case_id: str, description: RunDescription) -> Case:
    case = description.cases[case_id]
    comparison = description.comparisons[case.comparison_id]
    identity = {"case_id": case_id, "comparison_id": case.comparison_id, "mode": description.mode}
    path, routing_path = files.path("samples", case_id), files.path("routing", case_id)
    part = read_part(_there(path, case), SAMPLES_SCHEMA, identity, ["run_id", "status", "reason", *SAMPLE])
    launches = launches_of(part)
    status, reason = _outcome(launches)
    layers = None
    if status == "ok":
        is_whole = comparison.whole is not None
        samples = timings_of(path, part, comparison.world_size, tuple(PHASES) if is_whole else LAYER_PHASES)
        if is_whole:
            layers = samples[(samples["kind"] == "breakdown") & samples["phase"].isin(PHASES)]
        routing = read_part(_there(routing_path, case), ROUTING_SCHEMA, identity).to_pandas()
        routing = routing.drop(columns=_OF_IMAGES if is_whole else [*_OF_IMAGES, "layer"])
        sizes = {"num_experts": comparison.num_experts, "num_ranks": comparison.num_ranks}
        for _, rows in routing.groupby("layer") if is_whole else [(None, routing)]:
            check_routing(routing_path, rows, world_size=comparison.world_size, **sizes)
    else:
        samples = part.select(SAMPLE).slice(0, 0).to_pandas()
        routing = pd.DataFrame(columns=ROUTING_SCHEMA.names)
    params = {key: value for key, value in case.policy_params.items() if key != "name"}
    return Case(
        case_id=case_id,
        **{**dict(case), "policy_params": params},
        status=status,
        reason=reason,
        run_ids=launches["run_id"].to_dict(),
        timings=over_layers(samples),
        routing=routing,
        layers=layers,
    )


def _there(path: Path, case: CaseDescription) -> Path:
    if not path.is_file():
        raise MissingPartError(f"{path}: missing; the run did not finish ({case.label}): start it again to go on")
    return path


def _outcome(launches: pd.DataFrame) -> tuple[str, str | None]:
    """Status and reason of a case from those of its launches: the first that is not ok decides."""
    for launch, row in launches.sort_index().iterrows():
        if row["status"] != "ok":
            reason = "no reason was recorded" if pd.isna(row["reason"]) else str(row["reason"])
            return row["status"], f"launch {launch + 1}: {reason}" if len(launches) > 1 else reason
    return "ok", None


def _of_one_job(files: RunDirectory, cases: tuple[Case, ...], tried: Tried) -> tuple[Case, ...]:
    """Pairs ran back to back: in each launch, measured cases of a comparison are of one job, not of two repetitions.

    Of two jobs the baseline's stands, for nothing is said without it; where it is not there, the first case's.
    """
    first: dict[tuple[str, int], tuple[Case, str]] = {}
    strangers: set[str] = set()
    for case in sorted(cases, key=lambda case: case.role != "baseline"):
        for launch, run_id in case.run_ids.items() if case.is_ok else ():
            other, other_id = first.setdefault((case.comparison_id, launch), (case, run_id))
            if run_id != other_id and case.case_id not in strangers:
                strangers.add(case.case_id)
                path, other_path = (files.path("samples", one.case_id) for one in (case, other))
                tried.error(
                    ResultsError(
                        f"{path}: of another job than {other_path.name}, so their iterations are no pairs "
                        f"({run_id}, {other_id}): run the comparison again"
                    )
                )
    return tuple(case for case in cases if case.case_id not in strangers)


def _read_conditions(
    files: RunDirectory, cases: tuple[Case, ...], comparisons: Mapping[str, Comparison], tried: Tried
) -> dict[str, dict[int, Conditions]]:
    """The conditions of every launch that was timed. What a model of a device says has none."""
    jobs: dict[tuple[str, int], str] = {}
    for case in cases:
        if case.is_ok and comparisons[case.comparison_id].device is None:
            for launch, run_id in case.run_ids.items():
                jobs.setdefault((case.comparison_id, launch), run_id)
    found: dict[str, dict[int, Conditions]] = {comparison_id: {} for comparison_id, _ in jobs}
    for (comparison_id, launch), run_id in jobs.items():
        conditions = tried(_read_launch_conditions, files.conditions_path(comparison_id, launch), run_id)
        if conditions is not None:
            found[comparison_id][launch] = conditions
    return found


def _read_launch_conditions(path: Path, run_id: str) -> Conditions:
    try:
        conditions = Conditions.model_validate_json(path.read_text(encoding="utf-8"))
        _ = conditions.machines
    except OSError:
        raise ResultsError(f"{path}: missing; it says under which conditions the cases were timed") from None
    except (ValidationError, TypeError, KeyError) as error:
        raise ResultsError(f"{path}: damaged: {one_line(error)[:200]}") from None
    if conditions.run_id != run_id:
        raise ResultsError(f"{path}: of another job than the cases ({conditions.run_id}, {run_id})")
    return conditions
