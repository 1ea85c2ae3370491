"""What a run directory says of itself: run.json's comparisons and cases, and the conditions of each launch.

These are the words in which everything else is told, so they are validated before a single row is read. What cannot be
trusted raises ``ResultsError`` by way of ``Tried``, which either lets it pass or collects it as a line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from moe_ep_bench.analysis.parts import ResultsError, check_version, one_line
from moe_ep_bench.machine.monitor import MachineState
from moe_ep_bench.results import RunDirectory

Role = Literal["baseline", "noise", "ceiling", "policy", "replication"]
# Roles that several cases of a comparison may hold.
_SHARED_ROLES = ("policy", "replication")

_Read = TypeVar("_Read")


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Padding(_Described):
    """See ``bench.words.describe_padding``."""

    per_rank: int
    of: tuple[int, int]
    masked: bool


class Workload(_Described):
    kind: Literal["synthetic", "recorded"]
    description: str
    tail_model: str | None
    recording: dict[str, Any] | None = None
    skew: dict[str, Any] | None = None  # that was named: ``workload.skews.Skew``
    targets: dict[str, Any] = {}  # of a synthetic workload
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


class Whole(_Described):
    """Of a comparison of whole models: see ``bench.subjects``."""

    num_layers: int  # that were built
    of_layers: int  # that the model has
    moe_layers: list[int]  # of those that were built
    of_moe_layers: int
    context_length: int  # tokens in the cache of each request that decodes; 0 = prefill
    attention: str
    peak_loads: list[float]  # fullest expert over mean, of each MoE layer's scores
    shared_by_chance: list[float] = []  # experts that neighbours share, of layers where that is more than was asked for


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
    expert_tensor_parallel: int = 1  # ranks that an expert is cut among; older versions knew whole ones alone
    num_replicas: int
    world_size: int
    num_tokens: int  # of all ranks
    num_batches: int
    dtype: str
    backend: Literal["nccl", "gloo"]
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"  # the only one in results of older versions
    cuda_graph: str | None = None  # what graphs hold and replay; None = run eagerly, as older versions did
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
    whole: Whole | None = None  # None = one layer was timed

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


class WarmUp(_Described):
    """See ``timing.protocol.WarmUp``."""

    rounds: int
    change: float | None
    settled: bool


class Ceilings(_Described):
    """See ``timing.ceilings.Ceilings``."""

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
    attention: list[str] = []  # torch's kernels for it; of whole models, and results of older versions do not say
    warm_up: WarmUp
    ranks: list[RankConditions]

    @property
    def machines(self) -> list[tuple[str, MachineState]]:
        return [(rank.hostname, MachineState.from_dict(rank.machine)) for rank in self.ranks]


class CaseDescription(_Described):
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


class RunDescription(_Described):
    run_id: str
    mode: Literal["run", "emulated", "route"]
    scope: Literal["layer", "model"] = "layer"
    environment: _Environment
    comparisons: dict[str, Comparison]
    cases: dict[str, CaseDescription]


class MissingPartError(ResultsError):
    """A part that is not there."""


class Tried:
    """Calls what reads; an error passes through, or becomes a line where lines are collected."""

    def __init__(self, lines: list[str] | None) -> None:
        self._lines = lines
        self._missing: list[str] = []

    def __call__(self, read: Callable[..., _Read], *arguments: Any) -> _Read | None:
        try:
            return read(*arguments)
        except ResultsError as error:
            self.error(error)
            return None

    def error(self, error: ResultsError) -> None:
        if self._lines is None:
            raise error
        (self._missing if isinstance(error, MissingPartError) else self._lines).append(str(error))

    def say_missing(self, files: RunDirectory) -> None:
        """One line for all parts that an unfinished run lacks."""
        if len(self._missing) > 1:
            words = f"{files.root}: {len(self._missing)} cases have no part, the first {self._missing[0]}"
            self._missing = [words]
        if self._lines is not None:
            self._lines += self._missing


def read_run_json(path: Path) -> dict[str, Any]:
    """What run.json says, if it is there and of this program's schema.

    Raises:
        ResultsError: it is missing, damaged or of another version.
    """
    if path.parent.is_file():
        raise ResultsError(f"{path.parent}: is a file; expected a directory that `moe-ep-bench` has written")
    if not path.parent.is_dir():
        raise ResultsError(f"{path.parent}: no such directory")
    if not path.is_file():
        raise ResultsError(f"{path}: missing; a results directory is one that `moe-ep-bench` has written")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: damaged, not JSON: {one_line(error)}") from error
    check_version(path, content.get("schema_version") if isinstance(content, dict) else None)
    return content


def read_description(path: Path, tried: Tried) -> RunDescription:
    content = read_run_json(path)
    description = _validated(path, content, tried)
    for comparison_id, error in _role_errors(path, description):
        tried.error(error)
        description = _without_comparison(description, comparison_id)
    return description


def _validated(path: Path, content: dict[str, Any], tried: Tried) -> RunDescription:
    """What run.json says; comparisons and cases that say it otherwise are errors, or are left out."""
    while True:
        try:
            return RunDescription.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            wrong = ResultsError(f"{path}: {key}: {first['msg']}")
            entry = first["loc"][:2]
            if len(entry) < 2 or entry[0] not in ("comparisons", "cases"):
                raise wrong from error
            tried.error(wrong)
            kept = {name: value for name, value in content[entry[0]].items() if name != entry[1]}
            content = {**content, entry[0]: kept}
            if entry[0] == "comparisons":
                cases = content.get("cases") or {}
                of_it = [
                    k for k, case in cases.items() if isinstance(case, dict) and case.get("comparison_id") == entry[1]
                ]
                content = {**content, "cases": {k: case for k, case in cases.items() if k not in of_it}}


def _role_errors(path: Path, description: RunDescription) -> list[tuple[str, ResultsError]]:
    """Comparisons in which two cases hold a role that one may hold, and those that are not there but have cases.

    Speedups need to know *the* baseline, so a role is held by one case at most, but for ``_SHARED_ROLES``.
    """
    errors, holders = {}, Counter()
    for case_id, case in description.cases.items():
        if case.comparison_id not in description.comparisons:
            message = f"{path}: cases.{case_id}.comparison_id: no comparison {case.comparison_id!r}"
            errors.setdefault(case.comparison_id, ResultsError(message))
        holders[case.comparison_id, case.role] += 1
    for (comparison_id, role), number in holders.items():
        if role not in _SHARED_ROLES and number > 1:
            message = f"{path}: comparisons.{comparison_id}: expected one {role} case, got {number}"
            errors.setdefault(comparison_id, ResultsError(message))
    return list(errors.items())


def _without_comparison(description: RunDescription, comparison_id: str) -> RunDescription:
    comparisons = {k: facts for k, facts in description.comparisons.items() if k != comparison_id}
    cases = {k: case for k, case in description.cases.items() if case.comparison_id != comparison_id}
    return description.model_copy(update={"comparisons": comparisons, "cases": cases})
