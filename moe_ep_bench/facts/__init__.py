"""The facts that run.json and the conditions beside it hold: types for those who write them and those who read them.

``bench.description`` validates what it writes against these models, ``analysis.store`` what it reads. Keys that are not
named here are kept as they stand. No fact is a sentence: ``facts.words`` composes these, when they are printed.

Shapes: R = expert-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    field_serializer,
    field_validator,
)

from moe_ep_bench.machine.monitor import MachineState
from moe_ep_bench.models.memory import Fit
from moe_ep_bench.policies.contract import Setting, params_of
from moe_ep_bench.runtime.sharing import Sharing
from moe_ep_bench.schema import REHEARSAL, Mode

MEASURED_ELSEWHERE = "measured elsewhere"
Basis = Literal["measured", "measured elsewhere", "published", "assumed"]
"""Evidence for a figure: measured by ``calibrate`` or outside this program, measured elsewhere (a row of somebody's
table), published by others (the file says by whom), or assumed."""
PARTLY_ELSEWHERE = "partly measured elsewhere"
# How the times of a comparison came about: the values of the column ``origin``.
ORIGINS = ("measured", "emulated", PARTLY_ELSEWHERE, "modelled", "rehearsed", "routed")
# Origins of times for which nothing ran on a device.
NOT_EXECUTED = (PARTLY_ELSEWHERE, "modelled")

Role = Literal["baseline", "noise", "balanced", "policy", "replication"]
Count = Annotated[int, Field(ge=1)]


class JsonRecord(BaseModel):
    """An object of a JSON file: typed, finite, and free to say more."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, defer_build=True)


# ---- traffic ---------------------------------------------------------------------------------------------------------


class Source(JsonRecord):
    """A recording, as its file says."""

    num_tokens: Count  # that were recorded
    domain: str = ""
    stage: str = ""  # prefill or decode
    source: str = ""
    licence: str = ""


class Recording(JsonRecord):
    model: str
    sources: list[Source] = []  # each gives a batch as many tokens


class SkewLayers(JsonRecord):
    """How far the layers differ that a named skew stands for (``workload.targets.Layers``)."""

    num_layers: Count
    relief: tuple[PositiveFloat, PositiveFloat, PositiveFloat]  # least, median and greatest


class SkewFacts(JsonRecord):
    """A skew that a config names (``workload.targets.Skew``)."""

    name: str
    of: str | None = None  # whose, where that is not this model
    basis: str  # of its targets: recorded, published, assumed
    source: str
    num_tokens: Count | None = None  # over which loads were measured; None = unknown
    layers: SkewLayers | None = None


class Targets(JsonRecord):
    """What a synthetic workload was solved to; what was left to chance is absent."""

    pattern: str | None = None
    motion: dict[str, float] | None = None  # by kind, the batches of a turn, between bursts, or of a half-life
    peak_load: float | None = None  # of the traffic, in the long run
    batch_peak_load: float | None = None  # of each batch
    topk_share: float | None = None
    neighbour_overlap: float | None = None
    rank_load: dict[str, float] | None = None  # of the fullest rank, by the number of ranks
    cuts: dict[str, list[float | None]] | None = None  # by capacity factor: dropped share, fullest rank left
    expert_loads: list[float] | None = None


class PeakLoads(JsonRecord):
    """Load of the busiest expert over the mean: the traffic's, and that of native's batches, which adds chance.

    Attributes:
        traffic: in the long run, as it was asked for; None = without a skew.
        batches: native's fullest expert, mean over batches.
    """

    traffic: float | None
    batches: float

    @staticmethod
    def of(workload: Workload, batches: float) -> PeakLoads | None:
        """Those of drawn traffic; None where batches have no other peak than was asked for."""
        targets = workload.targets
        if workload.kind != "synthetic" or workload.is_balanced or {"pattern", "batch_peak_load"} & targets.keys():
            return None
        loads = targets.get("expert_loads")
        traffic = targets.get("peak_load") if loads is None else max(loads) * len(loads) / sum(loads)
        return None if math.isnan(batches) else PeakLoads(traffic=traffic, batches=batches)

    def have_chance(self) -> bool:
        """Whether chance raises batches' peak loads: by a tenth, or without a skew to two."""
        return self.batches >= (2 if self.traffic is None else 1.1 * self.traffic)


class CountedLayers(JsonRecord):
    """Which of the model's layers a file counts (``workload.skew_from``).

    Attributes:
        used: layers that have counts.
        dense, missing: those that have none, for the model does not route them, or for no known reason.
    """

    file: str
    used: Count
    dense: list[int] = []
    missing: list[int] = []


class Counted(CountedLayers):
    """One of these layers, whose experts' loads a comparison has."""

    layer: NonNegativeInt


class Workload(JsonRecord):
    """The batches of a comparison: where tokens and scores come from.

    Attributes:
        num_batches: of one seed and one layer; ``num_tokens`` of a batch.
        sequence_length: of a synthetic workload.
        tokens_per_request: of a step of decode that is replayed; None = whole sequences.
        stage: of a recording.
        order: in which recorded requests come.
        num_history: batches ahead of these, which plans know.
        tail_model: how scores beyond a recorded top-k are filled in; None = nothing is.
        peak_load, batch_peak_load: as it was asked for, beside a skew or alone.
        is_one_draw: which experts share a rank was left to chance, and decides the load of ranks.
        model_layers: what the model calls a recording's ``layer``, or ``layers``, where it has other numbers.
        seeds, layers: where comparisons were joined, those of all.
        description: a sentence in place of the facts.
    """

    kind: Literal["synthetic", "recorded"]
    tail_model: str | None
    num_batches: Count | None = None
    num_tokens: Count | None = None
    sequence_length: Count | None = None
    tokens_per_request: Count | None = None
    stage: Literal["prefill", "decode"] | None = None
    order: Literal["arrival", "shuffled"] | None = None
    num_history: NonNegativeInt = 0
    layer: NonNegativeInt | None = None
    peak_load: float | None = None
    batch_peak_load: float | None = None
    is_balanced: bool = False
    is_one_draw: bool = False
    counted: Counted | None = None
    seeds: list[int] = []
    layers: list[int] = []
    model_layers: list[NonNegativeInt] = []
    description: str | None = None
    recording: Recording | None = None
    skew: SkewFacts | None = None
    scores_assumed: bool = False  # of a recording, equal over the top-k, for it has none
    targets: dict[str, Any] = Field(default={})  # of a synthetic workload (``Targets``)
    seed: int | None = None  # of the batches
    padding: dict[str, Any] | None = None  # tokens of it a rank; the fewest and the most that a rank has

    @field_validator("targets")
    @classmethod
    def _check(cls, targets: dict[str, Any]) -> dict[str, Any]:
        """Typed, and none beside those that are there."""
        return Targets.model_validate(targets).model_dump(exclude_unset=True)


class Component(JsonRecord):
    """A component of the layer: what the config asked for, what ran, and why where that was left open."""

    requested: str
    ran: str
    why: str = ""


# ---- devices and links that are not here -----------------------------------------------------------------------------


class Rows(JsonRecord):
    """A table of rows that others measured (``cost_model.tables``)."""

    package: str
    package_version: str
    system: str
    framework: str
    version: str  # of the framework
    file: str  # in the package


# Who measured: a table, or a user's own words.
MeasuredBy = Rows | str


class ExchangeFacts(JsonRecord):
    """Rows of dispatch and combine that others measured (``cost_model.exchanges``)."""

    name: str
    measured_by: MeasuredBy
    copies: Literal["rank", "node", "pair"]  # what a token has a copy for
    num_nodes: Count
    num_experts: Count  # of the rows
    top_k: Count  # of the rows
    sms: list[int] = []  # fewest and most of the rows; none = not stated
    hidden_size: Count  # of the rows
    sent_as: str | None = None  # what tokens of the rows are dispatched as; None = as the framework has it
    dispatch_scale: PositiveFloat = 1.0  # bytes of a token that is sent over those of the row's
    combine_scale: PositiveFloat = 1.0  # likewise of what comes back


class ExpertFacts(JsonRecord):
    """Rows of experts that others measured (``cost_model.expert_rows``)."""

    name: str
    measured_by: MeasuredBy
    dtype: str
    hidden_size: Count
    ffn_hidden_size: Count
    num_experts: Count
    top_k: Count
    ep_size: Count
    num_rows: Count
    fewest_tokens: PositiveFloat  # of all ranks, in the first row and in the last
    most_tokens: PositiveFloat


class LinkFacts(JsonRecord):
    """One link of a rank (``cost_model.links.Link``)."""

    latency_us: NonNegativeFloat
    latency_basis: Basis
    bandwidth_gbps: PositiveFloat
    efficiency: PositiveFloat
    efficiency_basis: Basis
    duplex: Literal["full", "half"] = "full"
    num_sizes: int | None = None  # that a curve was measured at; None = latency and bandwidth stand alone


class LinksFacts(JsonRecord):
    """The model of what moves between ranks (``cost_model.links.Links``)."""

    name: str
    is_built_in: bool  # a file of this package, whose links are of GPUs
    bandwidth_scale: PositiveFloat = 1.0
    ranks_per_node: Count
    intra: LinkFacts | None
    inter: LinkFacts | None
    measured_by: MeasuredBy | None = None  # of all collectives; None = the basis of each figure says more


class DeviceFacts(JsonRecord):
    """The model of a device that is not here (``cost_model.devices.Device``)."""

    name: str
    bf16_tflops: PositiveFloat
    most_efficiency: PositiveFloat
    arithmetic_basis: Basis
    memory_tbps: PositiveFloat
    memory_efficiency: PositiveFloat
    memory_basis: Basis
    memory_gb: PositiveFloat
    overhead_us: NonNegativeFloat
    overhead_basis: Basis
    speeds: dict[str, PositiveFloat] = {}
    speeds_basis: Basis | None = None
    experts_as: Literal["grouped", "te"]
    gate_tflops: PositiveFloat | None = None
    gate_basis: Basis | None = None
    routing_native_us: NonNegativeFloat
    routing_native_ps: PositiveFloat
    routing_native_basis: Basis
    routing_policy_us: NonNegativeFloat
    routing_policy_ps: PositiveFloat
    routing_policy_basis: Basis
    slow_policies: list[str] = []  # whose kernels take longer than Token Drop's
    permute: Literal["unfused", "fused"]
    permute_efficiency: PositiveFloat
    permute_basis: Basis
    attention_efficiency: PositiveFloat | None = None  # of prompts; None = not stated
    attention_basis: Basis | None = None


# ---- a comparison ----------------------------------------------------------------------------------------------------


class ModelExtent(JsonRecord):
    """How much of a whole model was built."""

    num_layers: Count  # that were built
    of_layers: Count  # that the model has
    context_length: NonNegativeInt = 0  # tokens in the cache of requests that decode; 0 = prompts


class Rest(JsonRecord):
    """What a modelled layer comes to in a pass of its whole model (``bench.description.rest_of``)."""

    us_per_moe_layer: NonNegativeFloat  # of all that no MoE layer takes
    num_moe_layers: Count
    context_length: NonNegativeInt = 0  # tokens in the cache of requests that decode; 0 = prompts
    prompt_lengths: tuple[Count, Count] | None = None  # tokens of the shortest and the longest; None = not stated

    def pass_ms(self, layer_ms: float) -> float:
        """The pass as if every MoE layer took what this one does."""
        return self.num_moe_layers * (layer_ms + self.us_per_moe_layer / 1e3)


class Subject(JsonRecord):
    """What a comparison measures: a model's layers, on ranks, under a workload. Its title names this.

    Attributes:
        scale: 1.0 = the model's true sizes; None where nothing is computed.
        num_ranks: R, of an EP group; ``world_size`` of all groups.
        num_tokens: of all ranks; ``rank_tokens`` of a rank, the fewest and the most in any batch.
        whole: None = one layer.
        cuda_graph: what graphs hold and replay; None = run eagerly.
        title, sizes: sentences in place of the facts.
    """

    model: str
    scale: PositiveFloat | None = None
    num_experts: Count
    top_k: Count
    num_ranks: Count
    world_size: Count | None = None
    num_tokens: Count
    rank_tokens: tuple[int, int] | None = None
    workload: Workload
    whole: ModelExtent | None = None
    cuda_graph: Literal["layer", "model"] | None = None
    title: str | None = None
    sizes: str | None = None


class ComparisonFacts(Subject):
    """Conditions that all cases of a comparison share; its cases may be paired."""

    fullest_tokens: PositiveFloat | None = None  # of the rank with most over the mean, where ranks were given theirs
    num_batches: Count
    sample_tokens: Count | None = None  # of a batch that were routed, each in place of as many; None = all
    sample_ranks: Count | None = None  # whose tokens these are; None = all
    kernel: Component | None = None  # of routing
    load_overlap: float | None = None  # what neighbouring batches share of their loads, where popularity moves
    routing_checksum: str | None = None  # of Megatron-LM's workloads, at this EP size
    order: int = 0  # in the config


class RoutedFacts(ComparisonFacts):
    """One layer of ``route``, where nothing is timed. Layers of a ``group`` are routed alike."""

    group: str
    layer: NonNegativeInt | None


class TimedFacts(ComparisonFacts):
    """A comparison of ``run`` or ``emulate``."""

    scale: PositiveFloat = Field()  # 1.0 = the model's true sizes
    num_replicas: Count
    world_size: Count = Field()
    dtype: str
    backend: Literal["nccl", "gloo", "staged"]
    sharing: Sharing | None = None  # by what ranks shared a device, and nothing was timed; None = each had its own
    experts: Component
    permute: Component
    oversubscribed: bool  # more ranks than cores
    random_weights: bool
    departures: list[str]  # where the layer is simpler than the model
    links: LinksFacts | None = None  # the model of what moved between ranks, where nothing did
    exchange: ExchangeFacts | None = None  # in place of all-to-alls
    copies: Literal["pair", "rank"] = "pair"  # what modelled links carry a token once for
    expert_rows: ExpertFacts | None = None  # in place of a roofline
    dispatch_dtype: str | None = None  # what rows are sent to experts as; None = not said
    overlap: Literal["none", "shared", "two_batch"] = "none"  # of an exchange and computation, where it is modelled
    device: DeviceFacts | None = None  # the model of the device, where nothing was run
    placement: str = "contiguous"  # of experts on ranks, where they are emulated
    rest: Rest | None = None  # of a pass, where a layer alone was modelled; None = not stated
    fit: Fit | None = None  # what a rank of a deployment holds; None where it was not estimated
    point: dict[str, Any] = Field(default={})  # of the config's sweep: dotted keys with their values
    draws: Count = 1  # of its traffic, where several were joined (``analysis.store``)
    layers: Count = 1  # of a recording, likewise

    @property
    def is_elsewhere(self) -> bool:
        """Whether others measured the experts or the links of a device that is not here."""
        return self.device is not None and (self.expert_rows is not None or self._links_are_elsewhere)

    @property
    def mixes_machines(self) -> bool:
        """Whether a CPU's experts stand behind links of GPUs."""
        return self.device is None and self.backend == "gloo" and self.links is not None and self.links.is_built_in

    @property
    def _links_are_elsewhere(self) -> bool:
        return self.exchange is not None or (self.links is not None and self.links.measured_by is not None)

    def phase_origin(self, mode: str, group: str) -> str:
        """How a group of phases came about: measured, measured elsewhere or modelled.

        For a device that is not here all is modelled but what a table holds; for emulated ranks, what moves between
        them.
        """
        if (group == "comm" and self._links_are_elsewhere) or (group == "experts" and self.expert_rows is not None):
            return MEASURED_ELSEWHERE
        modelled = self.device is not None or (mode == "emulated" and group == "comm")
        return "modelled" if modelled else "measured"


class JudgedFacts(JsonRecord):
    """A comparison of ``quality``: a text or a task of the lm-evaluation-harness."""

    title: str | None = None  # in place of the facts
    model: str
    order: int = 0
    num_experts: Count
    top_k: Count | None = None
    num_layers: Count | None = None  # with experts
    num_ranks: Count  # virtual ones
    arrangement: str | None = None
    dtype: str | None = None
    seed: int | None = None
    batch_size: Count
    text: str | None = None
    num_sequences: Count | None = None  # of the text
    sequence_length: Count | None = None
    task: str | None = None
    num_fewshot: NonNegativeInt | None = None  # None = the task's own
    limit: int | float | None = None  # of questions


class ServedFacts(JsonRecord):
    """A comparison of ``serve``: servers that were asked the same.

    Attributes:
        num_batches: rounds of ``requests``, in each start of the servers.
        prompts: their file; None = random words, ``num_words`` of each.
        concurrency: requests in flight; None = ``rate`` a second.
        served: ``serve.model``, whole.
        url: of a server that was running; None = each case had its own.
        task: names of tasks that the harness asked; ``limit``, of questions of each.
    """

    title: str | None = None  # in place of the facts
    model: str
    order: int = 0
    num_batches: Count
    num_starts: Count
    served: str | None = None
    requests: Count
    alone: NonNegativeInt = 0
    concurrency: Count | None = None
    rate: PositiveFloat | None = None
    servers: Literal["together", "in_turn"]
    url: str | None = None
    prompts: str | None = None
    num_words: Count
    max_tokens: Count
    ignore_eos: bool = False
    cache_salt: bool = False
    task: str | None = None
    limit: int | None = None
    num_ranks: Count = 1


class CaseFacts(JsonRecord):
    """What a case is (``words.label_words`` names it).

    Attributes:
        policy: the name of the policy, or of what balances without loss.
        settings: in the order in which its label names them.
    """

    comparison_id: str
    policy: str
    settings: list[Setting]
    role: Role
    looks_past_top_k: bool
    by_torch: bool = False  # a policy without a compiled form on GPUs
    extra_bytes_per_rank: float | None = None  # beyond native's, for replicas of experts
    spare_by_layer: list[int] | None = None  # slots of a rank, of a budget for all layers of a recording
    spare_layers: list[NonNegativeInt] = []  # what the model calls these layers, where it has other numbers
    order: int = 0  # in the config
    stage: str | None = None  # of ``quality``: in which it is judged
    policy_code: str | None = None  # hash of a user's policy, or of the data that a policy reads
    data_model: str | None = None  # whose data that is

    @field_serializer("settings")
    def _true_flags(self, settings: list[Setting]) -> list[dict[str, Any]]:
        """Each setting's key and value, and those of its flags that are true."""
        return [
            {name: value for name, value in asdict(one).items() if value is not False or name == "value"}
            for one in settings
        ]

    @property
    def policy_params(self) -> dict[str, Any]:
        """The settings as one dict, without the policy's name."""
        return params_of(self.settings)


# ---- a question ------------------------------------------------------------------------------------------------------

Need = Literal["decode", "prefill", "scores", "requests", "ranks"]


class AskedLayers(JsonRecord):
    """Layers that ``advise`` asks in place of all that are recorded or counted, each for equally many.

    Attributes:
        asked: which.
        num_layers: all of them.
        fullest_rank: by EP size native's fullest rank over the mean: the least, median and greatest of all layers.
    """

    asked: list[NonNegativeInt]
    num_layers: Count
    fullest_rank: dict[int, tuple[PositiveFloat, PositiveFloat, PositiveFloat]]


class MissingRows(JsonRecord):
    """What tables have no rows of (``words.missing_words`` says it).

    Attributes:
        kind: the package is not installed, it does not know a part of a table's name, or that table has no rows of a
            layer's experts or exchange.
        name: of the package, the part or the table.
        part: what the part is.
        known: parts that there are; of the package the extra that installs it.
        shape: hidden size, expert FFN size, experts and top-k of the layer.
    """

    kind: Literal["package", "part", "experts", "exchange"]
    name: str
    part: str = ""
    known: tuple[str, ...] = ()
    shape: tuple[int, int, int, int] | None = None
    ep_size: int | None = None
    dtype: str | None = None
    stage: str | None = None


class Assumption(JsonRecord):
    """What ``advise`` assumes or leaves out (``words.assumption_words`` says it).

    Attributes:
        names: what is modelled, candidates that are left out, or whose recorded
            traffics stand in.
        peak_loads: of balanced, typical and hard traffic, where none was given.
        counted: layers of the file that counts experts.
        layers: those that stand for all.
        num_batches: that plans and those whom they serve need, and that a recording has by arrival; of a draw or layer
            that were asked for, and that are taken in place of them.
        need: what the candidates lack here.
        missing: rows that what is modelled would have come from.
    """

    kind: Literal[
        "no_skew",
        "traffics",
        "counted_layers",
        "asked_layers",
        "topk_share",
        "decode_as_prompts",
        "tokens_are_requests",
        "modelled",
        "left_out",
        "shuffled",
        "batches",
    ]
    names: list[str] = []
    peak_loads: tuple[float, ...] = ()
    counted: CountedLayers | None = None
    layers: AskedLayers | None = None
    num_batches: tuple[int, int] | None = None
    topk_share: float | None = None
    scores_are_assumed: bool = False
    need: Need | None = None
    missing: MissingRows | None = None


def has_assumed_traffic(assumptions: Iterable[Assumption]) -> bool:
    """Whether no traffic was given, so that an answer is a line for each of several."""
    return any(one.kind == "traffics" for one in assumptions)


# ---- conditions ------------------------------------------------------------------------------------------------------


class WarmUp(JsonRecord):
    change: float | None  # of the last round against the one before it
    settled: bool


class Ceilings(JsonRecord):
    """What a rank's device reached beside the run (``timing.device``)."""

    matmul_tflops: PositiveFloat


class RankConditions(JsonRecord):
    hostname: str
    machine: MachineState
    ceilings: Ceilings
    peak_memory_bytes: int | None
    probe_floor_us: float | None = None  # what a waiting probe costs when nobody waits; None = ranks wait for nobody


class Conditions(JsonRecord):
    """Under which conditions one launch of a comparison was timed; ranks in order."""

    run_id: str
    warm_up: WarmUp
    unclocked: dict[str, list[str]] = {}  # by case id, where rank 0's host waits for its GPU and no clock sees it
    ranks: Annotated[list[RankConditions], Field(min_length=1)]

    @property
    def machines(self) -> Sequence[tuple[str, MachineState]]:
        return [(rank.hostname, rank.machine) for rank in self.ranks]


# ---- run.json --------------------------------------------------------------------------------------------------------


class Environment(JsonRecord):
    device_name: str = "unknown device"
    torch: str | None = None
    megatron_core: str | None = None
    nccl: str | None = None
    driver: str | None = None


class Job(JsonRecord):
    """Where the rows of one job come from."""

    created: str | None = None
    config: list[dict[str, Any]] | dict[str, Any] | None = None  # resolved
    config_text: str | None = None  # the file, word for word
    command: str | None = None  # the command line, likewise
    environment: dict[str, Any] = Field(default={})
    hashes: dict[str, Any] = Field(default={})


class RunFacts(JsonRecord):
    """run.json; comparisons and cases are validated one by one, so that one damaged entry costs no other."""

    run_id: str
    mode: Mode
    scope: Literal["layer", "model"] = "layer"
    environment: Environment
    comparisons: dict[str, Any]
    cases: dict[str, Any]
    runs: dict[str, Job] = Field(default={})


class Pairs(JsonRecord):
    """validation.json: which comparison of the real run is which of the emulated one, by id."""

    pairs: Annotated[list[tuple[str, str]], Field(min_length=1)]
    links: LinksFacts  # of the emulated run
    exchange: ExchangeFacts | None = None
    margin: Annotated[float, Field(ge=0, le=1)] = 0.03  # by how much speedups may differ and be equivalent


# ---- origins ---------------------------------------------------------------------------------------------------------


def origin_of(run: RunFacts, facts: ComparisonFacts | JudgedFacts | ServedFacts) -> str | None:
    """One of ``ORIGINS``; routed or rehearsed where there are no times, None of answers."""
    if isinstance(facts, TimedFacts) and facts.device is not None:
        return PARTLY_ELSEWHERE if facts.is_elsewhere else "modelled"
    return {
        "run": "measured",
        "serve": "measured",
        "emulated": "emulated",
        "route": "routed",
        REHEARSAL: "rehearsed",
    }.get(run.mode)
