"""Read a run directory and refuse what cannot be trusted.

Every figure and table rests on these files, so they are checked here, once: a part that is
missing, damaged or of another run is an error that names it, never a gap in a plot.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from moe_ep_bench.machine import MachineState
from moe_ep_bench.records import (
    CASE_SCHEMA,
    PHASES,
    ROUTING_SCHEMA,
    SCHEMA_VERSION,
    STATUSES,
    TOTAL,
    UNACCOUNTED,
    RunDirectory,
    completed,
)

Role = Literal["baseline", "noise", "ceiling", "policy", "replication"]
# Roles that several cases of a comparison may hold.
_SHARED_ROLES = ("policy", "replication")

_KINDS = ("plain", "breakdown")
_ITERATION = ["launch", "batch", "iteration", "kind"]
# What a measured routing row must hold: the columns that fidelity is computed from. The two ratios of masses are
# exempt: a rank without valid tokens has none.
_ROUTING_NEEDS = ["rank", "batch", "num_tokens", "load_E", "load_R", "num_topk_pairs", "num_dropped_pairs"]


class ResultsError(ValueError):
    """A run directory that cannot be read; the message is one line for the user."""


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Padding(_Described):
    """See ``scopes.padding.describe_padding``."""

    per_rank: int
    of: tuple[int, int]
    masked: bool


class Workload(_Described):
    kind: Literal["synthetic", "recorded"]
    description: str
    tail_model: str | None
    recording: dict[str, Any] | None = None
    padding: Padding | None = None  # results of older versions do not say, and had none


class Part(_Described):
    """A part of the layer: what the config asked for, what ran, and why where that was left open."""

    requested: str
    ran: str
    why: str = ""

    @property
    def is_unfused_permutation(self) -> bool:
        """Whether a permutation took longer here than a paper's would."""
        return self.ran not in ("fused", "none")


class Comparison(_Described):
    """Conditions that all its cases share; cases of one comparison may be paired."""

    title: str
    model: str
    scale: float  # 1.0 = the model's true sizes
    num_experts: int
    top_k: int
    hidden_size: int
    ffn_hidden_size: int
    num_ranks: int  # expert-parallel size
    num_replicas: int
    world_size: int
    num_tokens: int  # of all ranks
    num_batches: int
    dtype: str
    backend: Literal["nccl", "gloo"]
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"  # the only one in results of older versions
    cuda_graph: str | None = None  # what of the layer graphs hold and replay; None = run eagerly, as older versions did
    experts: Part
    permute: Part
    kernel: Part | None = None  # of routing; results of older versions do not say
    flush_l2: bool
    oversubscribed: bool  # more ranks than cores
    random_weights: bool
    departures: list[str]  # where the layer is simpler than the model
    links: str | None = None  # the model of what moved between ranks, where nothing did
    device: str | None = None  # the model of the device, where nothing was run
    placement: str = "contiguous"  # of experts on ranks, where they are emulated
    point: dict[str, Any] = {}  # of the config's sweep: dotted keys with their values
    workload: Workload


class WarmUp(_Described):
    """See ``measure.protocol.WarmUp``."""

    rounds: int
    change: float | None
    settled: bool


class Ceilings(_Described):
    """See ``measure.ceilings.Ceilings``."""

    matmul_size: int
    matmul_tflops: float
    copy_gbps: float
    read_gbps: float | None = None  # results of older versions do not say


class RankConditions(_Described):
    hostname: str
    machine: dict[str, Any]  # see machine.MachineState
    ceilings: Ceilings
    peak_memory_bytes: int | None


class Conditions(_Described):
    """Under which conditions one launch of a comparison was timed; ranks in order."""

    run_id: str
    warm_up: WarmUp
    ranks: list[RankConditions]

    @property
    def machines(self) -> list[tuple[str, MachineState]]:
        return [(rank.hostname, MachineState.from_dict(rank.machine)) for rank in self.ranks]


class _CaseDescription(_Described):
    comparison_id: str
    policy: str
    policy_params: dict[str, Any]
    label: str
    role: Role
    looks_past_top_k: bool
    extra_bytes_per_rank: float | None = None


class _Environment(_Described):
    device_name: str
    num_devices: int
    torch: str | None = None
    megatron_core: str | None = None
    nccl: str | None = None
    driver: str | None = None


class _RunDescription(_Described):
    run_id: str
    mode: Literal["run", "emulated", "route"]
    environment: _Environment
    comparisons: dict[str, Comparison]
    cases: dict[str, _CaseDescription]


@dataclass(frozen=True, eq=False)
class Case:
    """One policy on one workload.

    Attributes:
        status: one of ``STATUSES``; ``reason`` says why when it is not ok. A case that failed in one launch failed.
        run_ids: the job that wrote each launch.
        timings: launch, rank, batch, iteration, kind, phase, time_us, host_us; no rows unless ok.
        routing: one row per rank x batch, as in ``ROUTING_SCHEMA``; no rows unless ok.
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

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, eq=False)
class Run:
    """Everything a run directory holds."""

    directory: Path
    run_id: str
    mode: str
    device_name: str
    num_devices: int
    comparisons: dict[str, Comparison]
    cases: tuple[Case, ...]
    conditions: dict[str, dict[int, Conditions]]  # by comparison and launch
    torch: str | None = None  # versions; None where they were not recorded
    megatron_core: str | None = None
    nccl: str | None = None
    driver: str | None = None  # of the GPUs; likewise


def load_run(directory: Path | str) -> Run:
    """Read and check a run directory.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    files = RunDirectory(Path(directory))
    description = _read_description(files.run_json)
    _check_known_parts(files, description)
    cases = tuple(_read_case(files, case_id, description) for case_id in description.cases)
    _check_launches(files, cases)
    conditions = _read_conditions(files, cases, description.comparisons)
    if not any(case.is_ok for case in cases):
        counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(c.status for c in cases).items()))
        first = f"; {cases[0].label}: {_one_line(cases[0].reason)}" if cases else ""
        raise ResultsError(f"{files.root}: no case was measured ({counts or 'run.json lists none'}){first}")
    return Run(
        directory=files.root,
        run_id=description.run_id,
        mode=description.mode,
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


def _place_in_sweep(comparison: Comparison) -> list[tuple[bool, Any]]:
    """Sorts comparisons by the values of their swept keys, numbers before words; without a sweep all are alike."""
    values = [comparison.point[key] for key in sorted(comparison.point)]
    return [(False, value) if isinstance(value, int | float) else (True, json.dumps(value)) for value in values]


def _read_description(path: Path) -> _RunDescription:
    if not path.parent.is_dir():
        raise ResultsError(f"{path.parent}: no such directory")
    if not path.is_file():
        raise ResultsError(f"{path}: missing; a run directory is one that `moe-ep-bench run` has written")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: damaged, not JSON: {_one_line(error)}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ResultsError(f"{path}: schema_version: expected a whole number, got {version!r}")
    if version != SCHEMA_VERSION:
        hint = "; it is newer than this program, which needs updating" if version > SCHEMA_VERSION else ""
        raise ResultsError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {version}{hint}")
    try:
        description = _RunDescription.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ResultsError(f"{path}: {key}: {first['msg']}") from error
    _check_roles(path, description)
    return description


def _check_roles(path: Path, description: _RunDescription) -> None:
    """Speedups need to know *the* baseline, so a role is held by one case at most, but for ``_SHARED_ROLES``."""
    holders = Counter()
    for case_id, case in description.cases.items():
        if case.comparison_id not in description.comparisons:
            raise ResultsError(f"{path}: cases.{case_id}.comparison_id: no comparison {case.comparison_id!r}")
        holders[case.comparison_id, case.role] += 1
    for (comparison_id, role), number in holders.items():
        if role not in _SHARED_ROLES and number > 1:
            raise ResultsError(f"{path}: comparisons.{comparison_id}: expected one {role} case, got {number}")


def _check_known_parts(files: RunDirectory, description: _RunDescription) -> None:
    for folder in (files.case_path("any").parent, files.routing_path("any").parent):
        for path in sorted(folder.glob("*.parquet")):
            if path.stem not in description.cases:
                raise ResultsError(f"{path}: foreign, run.json lists no case {path.stem!r}")


def _read_case(files: RunDirectory, case_id: str, description: _RunDescription) -> Case:
    case = description.cases[case_id]
    comparison = description.comparisons[case.comparison_id]
    path = files.case_path(case_id)
    rows = _read_part(path, CASE_SCHEMA, case_id, description)
    launches = rows.drop_duplicates("launch").set_index("launch")
    status, reason = _outcome(launches)
    if status == "ok":
        _check_timings(path, rows, comparison)
        routing_path = files.routing_path(case_id)
        routing = _read_part(routing_path, ROUTING_SCHEMA, case_id, description)
        _check_routing(routing_path, routing, comparison)
    else:
        rows, routing = rows.iloc[:0], pd.DataFrame(columns=ROUTING_SCHEMA.names)
    return Case(
        case_id=case_id,
        comparison_id=case.comparison_id,
        policy=case.policy,
        policy_params={key: value for key, value in case.policy_params.items() if key != "name"},
        label=case.label,
        role=case.role,
        looks_past_top_k=case.looks_past_top_k,
        status=status,
        reason=reason,
        run_ids=launches["run_id"].to_dict(),
        timings=rows[["rank", *_ITERATION, "phase", "time_us", "host_us"]],
        routing=routing,
        extra_bytes_per_rank=case.extra_bytes_per_rank,
    )


def _outcome(launches: pd.DataFrame) -> tuple[str, str | None]:
    """Status and reason of a case from those of its launches: the first that is not ok decides."""
    for launch, row in launches.sort_index().iterrows():
        if row["status"] != "ok":
            reason = "no reason was recorded" if pd.isna(row["reason"]) else str(row["reason"])
            return row["status"], f"launch {launch + 1}: {reason}" if len(launches) > 1 else reason
    return "ok", None


def _check_launches(files: RunDirectory, cases: tuple[Case, ...]) -> None:
    """Pairs ran back to back: in each launch, measured cases of a comparison are of one job, not of two repetitions."""
    first: dict[tuple[str, int], tuple[Case, str]] = {}
    for case in cases:
        for launch, run_id in case.run_ids.items() if case.is_ok else ():
            other, other_id = first.setdefault((case.comparison_id, launch), (case, run_id))
            if run_id != other_id:
                raise ResultsError(
                    f"{files.case_path(case.case_id)}: of another job than {files.case_path(other.case_id).name}, "
                    f"so their iterations are no pairs ({run_id}, {other_id}): run the comparison again"
                )


def _read_conditions(
    files: RunDirectory, cases: tuple[Case, ...], comparisons: Mapping[str, Comparison]
) -> dict[str, dict[int, Conditions]]:
    """The conditions of every launch that was timed. What a model of a device says has none."""
    found: dict[str, dict[int, Conditions]] = {}
    for case in cases:
        timed = case.is_ok and comparisons[case.comparison_id].device is None
        for launch, run_id in case.run_ids.items() if timed else ():
            if launch in found.setdefault(case.comparison_id, {}):
                continue
            path = files.conditions_path(case.comparison_id, launch)
            try:
                conditions = Conditions.model_validate_json(path.read_text(encoding="utf-8"))
                _ = conditions.machines
            except OSError:
                raise ResultsError(f"{path}: missing; it says under which conditions the cases were timed") from None
            except (ValidationError, TypeError, KeyError) as error:
                raise ResultsError(f"{path}: damaged: {_one_line(error)[:200]}") from None
            if conditions.run_id != run_id:
                raise ResultsError(f"{path}: of another job than the cases ({conditions.run_id}, {run_id})")
            found[case.comparison_id][launch] = conditions
    return found


def _read_part(path: Path, schema: pa.Schema, case_id: str, description: _RunDescription) -> pd.DataFrame:
    case = description.cases[case_id]
    if not path.is_file():
        raise ResultsError(f"{path}: missing; the run did not finish ({case.label}): start it again to go on")
    try:
        with pq.ParquetFile(path) as file:
            table = completed(file.read(), schema)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {_one_line(error)}") from error
    for field in schema:
        if field.name not in table.schema.names or table.schema.field(field.name).type != field.type:
            raise ResultsError(f"{path}: foreign, expected a column {field.name} of type {field.type}")
    rows = table.to_pandas()
    if rows.empty:
        raise ResultsError(f"{path}: damaged, it has no rows")
    identity = {"case_id": case_id, "comparison_id": case.comparison_id, "mode": description.mode}
    for column, expected in identity.items():
        others = rows.loc[rows[column] != expected, column]
        if not others.empty:
            raise ResultsError(f"{path}: foreign, {column}: expected {expected!r}, got {others.iloc[0]!r}")
    groups = rows.groupby("launch") if "launch" in rows else [(0, rows)]
    for _, launch in groups:
        statuses = list(launch["status"].unique())
        if len(statuses) != 1 or statuses[0] not in STATUSES:
            raise ResultsError(f"{path}: status: expected one of {', '.join(STATUSES)} in all rows, got {statuses}")
    return rows


def _check_timings(path: Path, rows: pd.DataFrame, comparison: Comparison) -> None:
    phases = (*PHASES, TOTAL, UNACCOUNTED)
    for column, allowed in (("kind", _KINDS), ("phase", phases)):
        strange = rows.loc[~rows[column].isin(allowed), column]
        if not strange.empty:
            raise ResultsError(f"{path}: {column}: expected one of {', '.join(allowed)}; got {strange.iloc[0]!r}")
    if rows[["rank", *_ITERATION, "time_us"]].isna().to_numpy().any():
        raise ResultsError(f"{path}: damaged, a measured row lacks its rank, batch, iteration or time_us")
    if rows.duplicated(["rank", *_ITERATION, "phase"]).any():
        raise ResultsError(f"{path}: damaged, one rank, iteration and phase stands there twice")
    totals = rows[rows["phase"] == TOTAL]
    if not (totals["time_us"] > 0).all():
        raise ResultsError(f"{path}: damaged, a total is not above 0")
    # The slowest rank can be named only when all ranks are there.
    num_ranks = rows.groupby(_ITERATION)["rank"].nunique()
    num_totals = totals.groupby(_ITERATION)["rank"].nunique().reindex(num_ranks.index, fill_value=0)
    if (num_totals != comparison.world_size).any():
        launch, batch, iteration, kind = num_totals.index[num_totals != comparison.world_size][0]
        found = num_totals.loc[(launch, batch, iteration, kind)]
        raise ResultsError(
            f"{path}: launch {launch}, batch {batch}, {kind} iteration {iteration}: "
            f"expected totals of {comparison.world_size} ranks, got {found}"
        )


def _check_routing(path: Path, rows: pd.DataFrame, comparison: Comparison) -> None:
    for column in _ROUTING_NEEDS:
        if rows[column].isna().any():
            raise ResultsError(f"{path}: damaged, a measured row lacks its {column}")
    for column, expected in (("load_E", comparison.num_experts), ("load_R", comparison.num_ranks)):
        lengths = rows[column].map(len)
        if (lengths != expected).any():
            raise ResultsError(
                f"{path}: {column}: expected {expected} entries, got {lengths[lengths != expected].iloc[0]}"
            )
    num_ranks = rows.groupby("batch")["rank"].nunique()
    if (num_ranks != comparison.world_size).any() or rows.duplicated(["rank", "batch"]).any():
        raise ResultsError(f"{path}: expected one row for each of {comparison.world_size} ranks in every batch")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
