"""Read a run directory: what ``run.json`` and the conditions say, then every case's samples and routing.

Every figure and table rests on these files, so they are checked here and in ``parts``, once: what is missing, damaged
or of another run is an error that names it, never a gap that nobody sees. Who would rather see the rest of a directory
gives a list for these lines (``load_run(directory, passed_over)``): what cannot be trusted is then left out and named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pandas as pd
import pyarrow as pa
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    field_validator,
    model_validator,
)

from moe_ep_bench.analysis.parts import (
    SAMPLE,
    Described,
    Iterations,
    ResultsError,
    Tried,
    check_routing,
    described,
    iterations_of,
    launches_of,
    over_layers,
    read_document,
    read_frontier,
    read_part,
    read_run_json,
    timings_of,
)
from moe_ep_bench.cost_model.transport import DispatchType, Transport
from moe_ep_bench.errors import UserError, brief, printable
from moe_ep_bench.machine.monitor import MachineState
from moe_ep_bench.models.memory import Fit
from moe_ep_bench.results import RunDirectory, ValidationDirectory
from moe_ep_bench.schema import LAYER_PHASES, METRICS, PHASES, ROUTING_SCHEMA, SAMPLES_SCHEMA

Role = Literal["baseline", "noise", "ceiling", "policy", "replication"]
# What a case is found by. An id alone may stand for two cases: of directories that recorded one comparison differently.
CASE = ["comparison_id", "case_id"]
# Roles that several cases of a comparison may hold; speedups need to know *the* baseline.
_SHARED_ROLES = ("policy", "replication")

# Columns of ``ROUTING_SCHEMA`` that are read: a case has its words already, and images are ``route``'s alone.
_ROUTED = [
    field.name
    for field in ROUTING_SCHEMA
    if field.type != pa.string() and not (field.name in METRICS and METRICS[field.name].of == "images")
]
_OF_LAYERS = "holds no times of whole models (scope: model)"
_OF_MODELS = "holds times of whole models, which this does not read (docs/model.md says what does); expected layers'"


# ---- what run.json and conditions say --------------------------------------------------------------------------------


Count = Annotated[int, Field(ge=1, le=2**40)]


class Source(Described):
    passes_per_batch: NonNegativeFloat  # how often a batch uses the recording


class Recording(Described, extra="allow"):  # the rest is compared as it stands
    model: str
    arrangement: Literal["sequences", "decode"]
    sources: list[Source]


class Workload(Described):
    kind: Literal["synthetic", "recorded"]
    description: str
    tail_model: str | None
    recording: Recording | None = None
    skew: dict[str, Any] | None = None  # that was named: ``workload.skews.Skew``
    targets: dict[str, Any] = Field({})  # of a synthetic workload
    seed: int | None = None  # of the batches
    padding: dict[str, Any] | None = None  # see ``bench.words.describe_padding``


class Part(Described):
    """A part of the layer: what the config asked for, what ran, and why where that was left open."""

    requested: str
    ran: str
    why: str = ""

    @property
    def is_unfused_permutation(self) -> bool:
        """Whether a permutation took longer here than a paper's would."""
        return self.ran not in ("fused", "none")


class Whole(Described):  # ``bench.subjects``
    num_layers: Count  # that were built
    of_layers: Count  # that the model has
    moe_layers: list[NonNegativeInt] = Field(min_length=1)  # of those that were built
    of_moe_layers: Count
    context_length: NonNegativeInt  # tokens in the cache of each request that decodes; 0 = prefill
    attention: str
    peak_loads: list[float]  # fullest expert over mean, of each MoE layer's scores
    # Experts that neighbours share, of layers where that is more than was asked for.
    shared_by_chance: list[float] = Field([])


class Rest(Described):
    """What a modelled layer comes to in a pass of its whole model (``bench.rest``)."""

    us_per_moe_layer: NonNegativeFloat  # of all that no MoE layer takes
    num_moe_layers: Count
    context_length: NonNegativeInt  # 0 = prefill
    attention: str

    def pass_ms(self, layer_ms: float) -> float:
        """As if every MoE layer took what this one does."""
        return self.num_moe_layers * (layer_ms + self.us_per_moe_layer / 1e3)


class Comparison(Described):
    """Conditions that all its cases share; cases of one comparison may be paired."""

    title: str
    sizes: str | None = None  # EP ranks, tokens of all of them and of each, in words
    model: str
    scale: PositiveFloat  # 1.0 = the model's true sizes
    num_experts: Count
    top_k: Count
    hidden_size: Count
    ffn_hidden_size: Count
    num_ranks: Count  # expert-parallel size
    expert_tensor_parallel: Count = 1  # ranks that an expert is cut among
    num_replicas: Count
    world_size: Count
    num_tokens: Count  # of all ranks
    num_batches: Count
    dtype: str
    backend: Literal["nccl", "gloo"]
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    num_pieces: Count = 1  # in which a rank's tokens go through the layer (measure.microbatch_tokens)
    cuda_graph: str | None = None  # what graphs hold and replay; None = run eagerly
    shared_expert_overlap: bool = False  # in plain iterations, not in breakdowns
    experts: Part
    permute: Part
    kernel: Part | None = None  # of routing
    flush_l2: bool
    oversubscribed: bool  # more ranks than cores
    random_weights: bool
    departures: list[str]  # where the layer is simpler than the model
    links: str | None = None  # the model of what moved between ranks, where nothing did
    device: str | None = None  # the model of the device, where nothing was run
    placement: str = "contiguous"  # of experts on ranks, where they are emulated
    transport: Transport = "pairs"  # what crossed these links
    dispatch_dtype: DispatchType | None = None  # of dispatched rows; None = ``dtype``
    rest: Rest | None = None  # of a pass, where a layer alone was modelled; None = not stated
    fit: Fit | None = None  # what a rank of a deployment holds; None where it was not estimated
    point: dict[str, Any] = Field({})  # of the config's sweep: dotted keys with their values
    draws: Count = 1  # of its traffic, where several were joined (``draws``)
    directory: str | None = None  # by which it is told apart from its like of other directories (``gather.pool``)
    workload: Workload
    whole: Whole | None = None  # None = one layer was timed

    @model_validator(mode="after")
    def _ranks_add_up(self) -> Self:
        if self.world_size != self.num_together * self.num_replicas or self.num_experts % self.num_ranks:
            raise UserError(
                "expected as many ranks as replicas have together, and as many experts on each, got "
                f"world_size {self.world_size}, num_ranks {self.num_ranks}, num_experts {self.num_experts}"
            )
        return self

    @property
    def slice_size(self) -> int:
        """Of an expert's FFN, on one rank."""
        return self.ffn_hidden_size // self.expert_tensor_parallel

    @property
    def num_together(self) -> int:
        """Ranks whose tokens meet in the same experts; they are neighbours."""
        return self.num_ranks * self.expert_tensor_parallel

    @property
    def ranks_words(self) -> str:
        """How the experts are shared out."""
        cut = f" x TP {self.expert_tensor_parallel}" if self.expert_tensor_parallel > 1 else ""
        return f"EP {self.num_ranks}{cut}"

    def expert_rank(self, rank: int) -> int:
        """The expert-parallel rank that one of all ranks is; those that hold slices of the same experts are one."""
        return rank // self.expert_tensor_parallel % self.num_ranks


class WarmUp(Described):  # ``timing.protocol.WarmUp``
    rounds: int
    change: float | None
    settled: bool


class Ceilings(Described):  # ``timing.ceilings.Ceilings``
    matmul_size: int
    matmul_tflops: PositiveFloat
    copy_gbps: PositiveFloat
    read_gbps: PositiveFloat | None = None


def _has_cores(machine: MachineState) -> MachineState:
    if machine.num_cores < 1:
        raise ValueError(f"num_cores: expected at least 1, got {machine.num_cores}")
    return machine


class RankConditions(Described):
    hostname: str
    machine: Annotated[MachineState, AfterValidator(_has_cores)]
    ceilings: Ceilings
    peak_memory_bytes: int | None
    allocating_iterations: dict[str, int] = Field({})  # timed ones that asked the driver for memory, by case
    probe_floor_us: float | None = None  # what a waiting probe costs when nobody waits; None = ranks wait for nobody


class Conditions(Described):
    """Under which conditions one launch of a comparison was timed; ranks in order."""

    run_id: str
    attention: list[str] = Field([])  # torch's kernels for it; of whole models
    waits: dict[str, dict[str, int]] = Field({})  # of the host for the device, beyond native's: by case and line
    warm_up: WarmUp
    ranks: list[RankConditions]

    @property
    def machines(self) -> list[tuple[str, MachineState]]:
        return [(rank.hostname, rank.machine) for rank in self.ranks]


class CaseFacts(Described):
    comparison_id: str
    policy: str
    policy_params: dict[str, Any]
    label: str
    role: Role
    looks_past_top_k: bool
    extra_bytes_per_rank: float | None = None

    @field_validator("policy_params")
    @classmethod
    def _factor_is_a_number(cls, value: dict[str, Any]) -> dict[str, Any]:
        factor = value.get("capacity_factor")
        if isinstance(factor, bool) or not isinstance(factor, int | float | None):
            raise UserError(f"capacity_factor: expected a number or null, got {brief(factor)}")
        return value


class _Environment(Described):
    device_name: str
    torch: str | None = None
    megatron_core: str | None = None
    nccl: str | None = None
    driver: str | None = None


class _RunFacts(Described):
    """run.json, whose comparisons and cases are validated one by one."""

    run_id: str
    mode: Literal["run", "emulated", "route"]
    scope: Literal["layer", "model"] = "layer"
    environment: _Environment
    comparisons: dict[str, Any]
    cases: dict[str, Any]


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """One policy on one workload.

    Attributes:
        status: one of ``STATUSES``; ``reason`` says why when it is not ok. A case that failed in one launch failed.
        run_ids: the job that wrote each launch.
        timings: launch, rank, batch, iteration, kind, phase, time_us, host_us; no rows unless ok. Of a whole model
            each phase is the sum over its layers.
        routing: numbers of ``ROUTING_SCHEMA``, a row per rank x batch, of a whole model x ``layer``; no rows unless ok.
        layers: of a whole model, the phases of every layer in breakdown iterations; None of a layer alone.
        frontier: one row per batch and layer, as in ``FRONTIER_SCHEMA``; None where it was not computed.
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
    frontier: pd.DataFrame | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @cached_property
    def plain(self) -> Iterations:
        """Plain iterations, of which only the totals are timed."""
        return iterations_of(self.timings, "plain")

    @cached_property
    def breakdown(self) -> Iterations:
        return iterations_of(self.timings, "breakdown")


@dataclass(frozen=True, eq=False)
class Run:
    """Everything a run directory holds."""

    directory: Path
    run_id: str
    mode: str
    scope: str  # what was timed: a layer, or a whole model
    comparisons: dict[str, Comparison]
    cases: tuple[Case, ...]
    conditions: dict[str, dict[int, Conditions]]  # by comparison and launch
    device_name: str
    torch: str | None = None  # versions; None where they were not recorded
    megatron_core: str | None = None
    nccl: str | None = None
    driver: str | None = None  # of the GPUs; likewise
    named: str | None = None  # what figures call it where it stands beside others (``gather``)

    @cached_property
    def by_key(self) -> dict[tuple[str, str], Case]:
        """Every case by ``CASE``."""
        return {(case.comparison_id, case.case_id): case for case in self.cases}


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
    files, tried = RunDirectory(Path(directory)), Tried(passed_over)
    facts = described(_RunFacts, files.run_json, "", read_run_json(files.run_json))
    if (facts.scope == "model") != whole:
        raise ResultsError(f"{files.root}: {_OF_LAYERS if whole else _OF_MODELS}")
    comparisons, listed = _described(files.run_json, facts, tried)
    for path in sorted(
        path for table in ("samples", "routing") for path in files.path(table, "").parent.glob("*.parquet")
    ):
        if path.stem not in facts.cases:
            tried.error(ResultsError(f"{path}: foreign, run.json lists no case {path.stem!r}"))
    read = (
        tried(_read_case, files, case_id, case, comparisons[case.comparison_id], facts.mode)
        for case_id, case in _with_parts(files, listed, tried).items()
    )
    modelled = [key for key, one in comparisons.items() if one.device is not None]
    cases, jobs = _of_one_job(files, [case for case in read if case is not None], tried, modelled)
    # What a model of a device says has no conditions.
    conditions: dict[str, dict[int, Conditions]] = {
        comparison_id: {} for comparison_id, _ in jobs if comparisons[comparison_id].device is None
    }
    for (comparison_id, launch), run_id in jobs.items():
        if comparison_id in conditions:
            num_ranks = {len(one.ranks) for one in conditions[comparison_id].values()}
            found = tried(_read_conditions, files, comparison_id, launch, run_id, num_ranks)
            conditions[comparison_id] |= {} if found is None else {launch: found}
    if not any(case.is_ok for case in cases):
        counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(c.status for c in cases).items()))
        first = f"; {cases[0].label}: {printable(str(cases[0].reason))}" if cases else ""
        nothing = "none can be read" if passed_over else "run.json lists none"
        raise ResultsError(f"{files.root}: no case was measured ({counts or nothing}){first}")
    if passed_over is not None:
        passed_over += _without_baseline(files.run_json, comparisons, cases)
    return Run(
        directory=files.root,
        run_id=facts.run_id,
        mode=facts.mode,
        scope=facts.scope,
        comparisons=dict(sorted(comparisons.items(), key=lambda item: _place_in_sweep(item[1]))),
        cases=tuple(cases),
        conditions=conditions,
        **dict(facts.environment),
    )


def _described(path: Path, facts: _RunFacts, tried: Tried) -> tuple[dict[str, Comparison], dict[str, CaseFacts]]:
    """The comparisons and cases of run.json that can be trusted; with a comparison go its cases."""
    read = {
        key: tried(described, Comparison, path, f"comparisons.{key}", one) for key, one in facts.comparisons.items()
    }
    comparisons = {key: one for key, one in read.items() if one is not None}
    read = {key: tried(described, CaseFacts, path, f"cases.{key}", one) for key, one in facts.cases.items()}
    cases = {key: one for key, one in read.items() if one is not None}
    for key, case in cases.items():
        if case.comparison_id not in facts.comparisons:
            tried.error(ResultsError(f"{path}: cases.{key}.comparison_id: no comparison {case.comparison_id!r}"))
    for (key, role), number in Counter((case.comparison_id, case.role) for case in cases.values()).items():
        if role not in _SHARED_ROLES and number > 1 and comparisons.pop(key, None) is not None:
            tried.error(ResultsError(f"{path}: comparisons.{key}: expected one {role} case, got {number}"))
    return comparisons, {key: case for key, case in cases.items() if case.comparison_id in comparisons}


def _with_parts(files: RunDirectory, cases: dict[str, CaseFacts], tried: Tried) -> dict[str, CaseFacts]:
    """The cases that have their parts; one line for all others, which an unfinished run leaves."""
    paths = {key: tried(files.path, "samples", key) for key in cases}
    cases = {key: case for key, case in cases.items() if paths[key] is not None}
    missing = [key for key in cases if not files.path("samples", key).is_file()]
    if missing:
        path, label = files.path("samples", missing[0]), cases[missing[0]].label
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        tried.error(ResultsError(f"{path}: missing; the run did not finish ({label}{more}): start it again to go on"))
    return {key: case for key, case in cases.items() if key not in missing}


def _read_case(files: RunDirectory, case_id: str, case: CaseFacts, comparison: Comparison, mode: str) -> Case:
    identity = {"case_id": case_id, "comparison_id": case.comparison_id, "mode": mode}
    path, routing_path = files.path("samples", case_id), files.path("routing", case_id)
    part = read_part(path, SAMPLES_SCHEMA, identity, ["run_id", "status", "reason", *SAMPLE])
    launches, is_whole, layers = launches_of(path, part), comparison.whole is not None, None
    status, reason = "ok", None
    for launch in [launch for launch, row in launches.items() if row["status"] != "ok"][:1]:
        status, said = launches[launch]["status"], launches[launch]["reason"] or "no reason was recorded"
        reason = f"launch {launch + 1}: {said}" if len(launches) > 1 else said
    if status == "ok":
        samples = timings_of(path, part, comparison.world_size, tuple(PHASES) if is_whole else LAYER_PHASES)
        if is_whole:
            layers = samples[(samples["kind"] == "breakdown") & samples["phase"].isin(PHASES)]
        if not routing_path.is_file():
            raise ResultsError(
                f"{routing_path}: missing; the run did not finish ({case.label}): start it again to go on"
            )
        columns = [name for name in _ROUTED if is_whole or name != "layer"]
        routing = read_part(routing_path, ROUTING_SCHEMA, identity, columns).select(columns).to_pandas()
        sizes = {"num_experts": comparison.num_experts, "num_ranks": comparison.num_ranks}
        check_routing(routing_path, routing, world_size=comparison.world_size, **sizes)
        if lacking := sorted(set(part["batch"].to_pylist()) - {None, *routing["batch"]}):
            raise ResultsError(f"{routing_path}: batch: expected rows of every timed batch, got none of {lacking[0]}")
    else:
        samples = part.select(SAMPLE).slice(0, 0).to_pandas()
        routing = pd.DataFrame(columns=_ROUTED)
    params = {key: value for key, value in case.policy_params.items() if key != "name"}
    return Case(
        case_id=case_id,
        **{**dict(case), "policy_params": params},
        status=status,
        reason=reason,
        run_ids={launch: row["run_id"] for launch, row in launches.items()},
        timings=over_layers(samples),
        routing=routing,
        layers=layers,
        frontier=read_frontier(files, case_id, routing) if status == "ok" else None,
    )


def _of_one_job(
    files: RunDirectory, cases: list[Case], tried: Tried, modelled: Collection[str]
) -> tuple[list[Case], dict[tuple[str, int], str]]:
    """Pairs ran back to back: in each launch, measured cases of a comparison are of one job, not of two repetitions.

    What is modelled (ids of comparisons) gives the same whenever it is asked.

    Of two jobs the baseline's stands, for nothing is said without it; where it is not there, the first case's.

    Returns:
        The cases that stand, and the job of every comparison and launch that was measured.
    """
    first: dict[tuple[str, int], Case] = {}
    strangers = set()
    for case in sorted((case for case in cases if case.is_ok), key=lambda case: case.role != "baseline"):
        others = {launch: first.setdefault((case.comparison_id, launch), case) for launch in case.run_ids}
        for launch, other in others.items() if case.comparison_id not in modelled else ():
            if other.run_ids[launch] != case.run_ids[launch] and case.case_id not in strangers:
                strangers.add(case.case_id)
                path, other_path = (files.path("samples", one.case_id) for one in (case, other))
                tried.error(
                    ResultsError(
                        f"{path}: of another job than {other_path.name}, so their iterations are no pairs "
                        f"({case.run_ids[launch]}, {other.run_ids[launch]}): run the comparison again"
                    )
                )
    jobs = {(comparison_id, launch): case.run_ids[launch] for (comparison_id, launch), case in first.items()}
    return [case for case in cases if case.case_id not in strangers], jobs


def _read_conditions(
    files: RunDirectory, comparison_id: str, launch: int, run_id: str, num_ranks: Collection[int]
) -> Conditions:
    """Of one launch; ``num_ranks`` is what other launches of the comparison had, if there are any."""
    path = files.conditions_path(comparison_id, launch)
    if not path.is_file():
        raise ResultsError(f"{path}: missing; it says under which conditions the cases were timed")
    conditions = described(Conditions, path, "", read_document(path))
    if conditions.run_id != run_id:
        raise ResultsError(f"{path}: of another job than the cases ({conditions.run_id}, {run_id})")
    if not conditions.ranks or (num_ranks and len(conditions.ranks) not in num_ranks):
        raise ResultsError(f"{path}: ranks: expected as many as in other launches, got {len(conditions.ranks)}")
    return conditions


def _without_baseline(path: Path, comparisons: dict[str, Comparison], cases: list[Case]) -> list[str]:
    """Which comparisons can have no speedups."""
    roles = {key: [case.role for case in cases if case.is_ok and case.comparison_id == key] for key in comparisons}
    return [
        f"{path}: comparisons.{key} ({comparisons[key].title}): native, its baseline, is not there as measured, so "
        f"its {len(measured)} cases have no speedups"
        for key, measured in roles.items()
        if measured and "baseline" not in measured
    ]


def _place_in_sweep(comparison: Comparison) -> list[tuple[bool, Any]]:
    """Sorts comparisons by the values of their swept keys, numbers before words; without a sweep all are alike."""
    values = [comparison.point[key] for key in sorted(comparison.point)]
    return [(False, value) if isinstance(value, int | float) else (True, json.dumps(value)) for value in values]


# ---- what a directory holds ------------------------------------------------------------------------------------------


def is_route(directory: Path | str) -> bool:
    """Whether ``run.json`` there says that it is routing only, and no samples of time lie beside it."""
    timed = RunDirectory(Path(directory)).path("samples", "any").parent
    return _said(directory, "mode") == "route" and not timed.exists()


def is_quality(directory: Path | str) -> bool:
    """Whether ``quality`` wrote a directory."""
    return _said(directory, "mode") == "quality"


def is_whole(directory: Path | str) -> bool:
    """Whether a directory holds times of whole models."""
    return _said(directory, "scope") == "model"


def _said(directory: Path | str, key: str) -> Any:
    """What ``run.json`` says under a key; None where there is none that can be read."""
    try:
        return read_document(RunDirectory(Path(directory)).run_json).get(key)
    except (ValueError, AttributeError):
        return None


def load_times(directory: Path | str) -> Run:
    """A run of layers, or of whole models, whichever a directory holds.

    Raises:
        ResultsError: it cannot be read or trusted, or is not one run's times.
    """
    check_timed(directory)
    return load_run(directory, whole=is_whole(directory))


def check_timed(directory: Path | str) -> None:
    """Raise ResultsError where a directory is not one run's times: it holds none, or two runs (``validate``)."""
    if ValidationDirectory(Path(directory)).pairs.is_file():
        raise ResultsError(f"{directory}: holds two runs side by side: name {directory}/real or {directory}/emulated")
    for is_other, what in ((is_route, "routing"), (is_quality, "what policies do to a model's answers,")):
        if is_other(directory):
            raise ResultsError(f"{directory}: holds {what} without times; expected what `run` or `emulate` wrote")
