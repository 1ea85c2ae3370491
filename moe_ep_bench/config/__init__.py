"""The keys of a config, as frozen, validated experiments; ``config.files`` reads them. Unknown keys are errors.

Each point of ``sweep`` is one experiment, which is run as one *comparison*: all policies and the baselines,
interleaved on the same batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, PlainSerializer, PrivateAttr, model_validator

from moe_ep_bench.balancers import MOVING, OVER_REPLICAS, SOLVE_US, Balanced
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.models import ModelSpec, load_hf_model
from moe_ep_bench.papers.claims import Claim
from moe_ep_bench.placement import default_ep_size
from moe_ep_bench.policies import Policy
from moe_ep_bench.presets import PolicyEntry, Strict, expand_policies, unknown_key, validated
from moe_ep_bench.workload.targets import PATTERNS, SKEWS, TARGETS, Skew, layer_loads, load_skew, read_counts

# ``run.json`` has only the last part of a path.
NAME = PlainSerializer(lambda path: path and path.name, when_used="json")
NAME_OF_FILE = PlainSerializer(lambda text: Path(text).name if str(text).endswith(".yaml") else text, when_used="json")


class SweepPoint(Strict):
    """A config file at one point of its ``sweep``."""

    BESIDE: ClassVar[tuple[str, ...]] = ("sweep",)
    """Keys of the file that are read before its values: they are no fields."""
    # Not a key: set where the sweep is expanded.
    _point: tuple[tuple[str, Any], ...] = PrivateAttr(())

    @property
    def point(self) -> tuple[tuple[str, Any], ...]:
        """This experiment's place in the file's ``sweep``: dotted keys with their values, in the file's order."""
        return self._point


class ModelConfig(Strict):
    """A preset, a Hugging Face config.json, or a shape by hand: the keys of ``ModelSpec``."""

    model_config = ConfigDict(extra="allow")

    preset: str | None = None
    """Model of data/models/; or a shape by hand: num_experts, top_k, hidden_size, ffn_hidden_size, other keys."""
    hf_config: Annotated[Path | None, NAME] = None
    """Hugging Face config.json, or its folder, in place of a preset."""
    scale: float = Field(1.0, gt=0, le=1)
    """Factor on the hidden sizes."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share every expert. One shard runs, without the all-reduce."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        known = [*type(self).model_fields, *ModelSpec.model_fields]
        if unknown := [key for key in self.model_extra or () if key not in known]:
            raise UserError(f"{unknown[0]}: {unknown_key(unknown[0], known)}")
        if sum(map(bool, (self.preset, self.hf_config, self.model_extra))) != 1:
            raise UserError("give either preset or hf_config, or the shape: num_experts, top_k, ...")
        self.spec()  # Raises where there is no such model, and lists what there is.
        return self

    def spec(self) -> ModelSpec:
        if self.hf_config is not None:
            whole = load_hf_model(self.hf_config)
        elif self.preset is not None:
            with naming("preset"):
                whole = ModelSpec.named(self.preset)
        else:
            shape = self.model_extra or {}
            name = f"{shape.get('num_experts')} experts, top-{shape.get('top_k')}"
            whole = validated(
                ModelSpec,
                {"name": name, "source": "shape given in the config", "num_layers": 1, "normalize": True, **shape},
            )
        return whole.sharded(self.tensor_parallel).scaled(self.scale)


class _Workload(Strict):
    tokens_per_rank: int | None = Field(None, ge=1)
    """Tokens of a rank's batch, on average; this or num_tokens."""
    num_tokens: int | None = Field(None, ge=1)
    """Tokens of a batch over all ranks; this or tokens_per_rank."""
    num_batches: int = Field(10, ge=1)
    """Batches, the same for any number of ranks; intervals need ten."""
    seed: int = Field(0, ge=0)
    """Seed of the batches."""
    padding_per_rank: int = Field(0, ge=0)
    """Padding tokens that end every rank's batch; ``native`` alone computes them."""
    image_share: float | None = Field(None, ge=0, le=1)
    """Share of image tokens, first in every sequence, for policies with a ``modality``."""

    @model_validator(mode="after")
    def _check(self) -> _Workload:
        if (self.tokens_per_rank is None) == (self.num_tokens is None):
            raise UserError("give either tokens_per_rank or num_tokens")
        return self

    def total_tokens(self, world_size: int) -> int:
        return self.num_tokens if self.num_tokens is not None else (self.tokens_per_rank or 0) * world_size


class SyntheticConfig(_Workload):
    kind: Literal["synthetic"] = "synthetic"
    """Scores are drawn, to meet the targets below."""
    skew: Literal[(*SKEWS, *PATTERNS)] | None = None
    """Targets calibrated to the model (data/skews/), where keys beside it win; or another benchmark's pattern."""
    skew_from: Annotated[Path | None, NAME] = None
    """Counts of experts in place of ``skew``: SGLang's ``logical_count`` or [layers][experts], as JSON."""
    layer: int | None = Field(None, ge=0)
    """Layer of ``skew_from`` whose loads experts get, or ``all``: a comparison each."""
    peak_load: float | None = Field(None, ge=1)
    """Load of the fullest expert over the mean; null = no skew."""
    sequence_length: int = Field(128, ge=1)
    """1 = decode; 1 + L = speculative decoding with L draft tokens."""
    rank_load: float | None = Field(None, ge=1)
    """Load of the fullest rank over the mean; null = experts stand at random."""
    topk_share: float | None = Field(None, gt=0, lt=1)
    """Share of the score mass in the top-k."""
    neighbour_overlap: float | None = Field(None, gt=0)
    """Experts shared by adjacent tokens of a sequence."""

    @property
    def is_step(self) -> bool:
        """A batch is one token of each request that decodes."""
        return self.sequence_length == 1

    @property
    def request_tokens(self) -> int | None:
        """Tokens of a request in a batch; None = whole sequences, as recorded."""
        return self.sequence_length

    @property
    def is_unskewed(self) -> bool:
        """No key says how busy experts are."""
        return self.skew is None and self.skew_from is None and self.peak_load is None

    @model_validator(mode="after")
    def _check_pattern(self) -> SyntheticConfig:
        if self.skew is not None and self.skew_from is not None:
            raise UserError("skew, skew_from: expected one of the two, got both")
        if (self.layer is None) != (self.skew_from is None):
            raise UserError("skew_from, layer: expected both or none, as the counts of a layer are taken; got one")
        if self.skew in PATTERNS:
            beside = self.model_fields_set - {*_Workload.model_fields, "kind", "skew", "sequence_length"}
            if beside:
                raise UserError(f"skew: {self.skew} prescribes all loads; expected no {', '.join(sorted(beside))}")
        return self

    def targets(self, preset: str | None, ep_size: int | None = None) -> dict[str, Any]:
        """All targets of a ``SyntheticWorkload``, those of ``skew`` included.

        Args:
            ep_size: EP ranks, None = the skew's own. On another number of them than that experts stand at random.

        Raises:
            ValueError: there is no such skew of the model.
        """
        targets = self.model_dump(include=set(TARGETS))
        several = ep_size is not None and ep_size > 1
        targets["rank_load"] = {"ep_size": ep_size, "load": self.rank_load} if self.rank_load and several else None
        if self.skew_from is not None and self.layer is not None:
            targets["expert_loads"] = tuple(layer_loads(self.skew_from, self.layer))
        if self.skew is not None and self.skew not in PATTERNS:
            calibrated = self.calibration(preset).targets()
            targets |= {key: value for key, value in calibrated.items() if key not in self.model_fields_set}
            if self.sequence_length == 1 and "neighbour_overlap" not in self.model_fields_set:
                targets["neighbour_overlap"] = None  # no token has neighbours
        if ep_size is not None and targets["rank_load"] is not None and targets["rank_load"]["ep_size"] != ep_size:
            targets["rank_load"] = None
        return targets

    def calibration(self, preset: str | None) -> Skew:
        """What ``skew``, which is no pattern, was calibrated to; ValueError where the model has no such skew."""
        assert self.skew is not None
        if preset is None:
            raise UserError(
                f"skew: expected none for a model that is no preset; give peak_load and the like, got {self.skew}"
            )
        with naming("skew"):
            return load_skew(preset, self.skew)


class RecordedConfig(_Workload):
    kind: Literal["recorded"] = "recorded"
    """Scores are replayed from recordings."""
    trace: tuple[Annotated[Path, NAME], ...] = Field(min_length=1)
    """Path of a recording (moe-trace-v1), or a list of several that are mixed evenly."""
    layer: int = Field(ge=0)
    """Recorded layer; ``all``: a comparison each."""
    arrangement: Literal["sequences", "decode"] = "sequences"
    """Whole sequences (prefill), or the next step of requests that decode side by side."""
    tokens_per_request: int = Field(1, ge=1)
    """Of a decode step; 1 + L = speculative decoding with L draft tokens."""
    tail: Literal["popularity", "uniform", "recorded"]
    """Assumed scores of experts that the recording does not name; ``recorded``: it names all."""
    topk_share: float | None = Field(None, gt=0, le=1)
    """Assumed score mass of the top-k, where recorded scores are normalised over it."""

    is_unskewed: ClassVar[bool] = False

    @property
    def is_step(self) -> bool:
        """A batch is a step of requests that decode."""
        return self.arrangement == "decode"

    @property
    def request_tokens(self) -> int | None:
        """Tokens of a request in a batch; None = whole sequences, as recorded."""
        return self.tokens_per_request if self.is_step else None

    @property
    def tail_words(self) -> str:
        return "all scores recorded" if self.tail == "recorded" else f"{self.tail} tail"


class LayerConfig(Strict):
    dtype: Literal[(*PRECISIONS,)] = "bfloat16"
    """Type of weights and activations; below 16 bits of experts alone, by a table in ``emulate.device``."""
    ep_size: int | None = Field(None, ge=1)
    """Expert-parallel ranks; null = all. Others are data-parallel replicas."""
    seed: int = Field(0, ge=0)
    """Seed of weights and of random policies."""
    experts: Literal["auto", "sequential", "grouped", "decode", "te"] = "auto"
    """``sequential`` (Megatron-Core's, one by one), ``te`` (Transformer Engine), ``grouped`` (grouped GEMMs),
    ``decode`` (for few tokens, all of which every rank gets)."""
    cuda_graph: bool = False
    """Replay the layer, or a model's decode step, from CUDA graphs; needs ``decode`` experts and a GPU."""

    @property
    def gathers(self) -> bool:
        """Every rank gets all ranks' tokens."""
        return self.experts == "decode" or self.cuda_graph


class WholeConfig(Strict):
    """Size and context of a whole model, for ``scope: model``. Of a layer ``emulate`` reads the context, for memory."""

    num_layers: int | None = Field(None, ge=1)
    """Layers built, from the first on, dense ones included; null = all."""
    context_length: int = Field(0, ge=0)
    """Tokens of each request in the KV cache, where a batch is one decode step; 0 = prefill."""


class MeasureConfig(Strict):
    iterations: int = Field(5, ge=1)
    """Plain iterations per batch and case."""
    breakdown_iterations: int = Field(2, ge=0, le=1000)
    """Iterations per batch and case with all phases timed."""
    warmup: int = Field(5, ge=0)
    """Most untimed rounds; they end where a round takes as long as the one before. ``emulate`` takes one."""
    launches: int = Field(1, ge=1)
    """Runs of the whole process, on the same batches."""
    flush_l2: bool = False
    """Overwrite the last-level cache before every timed iteration."""
    timeout_s: float = Field(300, gt=0, le=1e9)
    """Time limit of every iteration and every rendezvous."""

    @model_validator(mode="after")
    def _check(self) -> MeasureConfig:
        if self.breakdown_iterations > self.iterations:
            got = self.breakdown_iterations
            raise UserError(f"breakdown_iterations: expected at most iterations={self.iterations}, got {got}")
        return self

    @property
    def fewest_rounds(self) -> int:
        """Rounds of a batch in one launch, untimed ones included: what virtual ranks take, and real ones at least."""
        return 1 + min(self.warmup, 1) + self.iterations

    @property
    def definition(self) -> dict[str, Any]:
        """What decides the samples, where it differs from the defaults."""
        return self.model_dump(mode="json", exclude={"timeout_s", "launches"}, exclude_defaults=True)


SolveTime = Annotated[float, Field(ge=0, le=1_000_000)]  # a batch takes less than a second
_LABELS = {
    "eplb": "EPLB",
    "variance": "variance plan",
    "static": "",
    "lp": " + LP",
    "activated": " + fewest activated",
    "llep": "LLEP",
    "ultra": "UltraEP",
    "waterfill": "shared experts by water-filling",
}


class Lossless(Strict):
    """What spreads a batch over ranks and loses nothing (``balancers``): a case of ``emulate`` beside the policies."""

    @property
    def solving_us(self) -> float | None:
        """Of a batch on every rank; None where nothing is solved."""
        return self.solve_us

    @property
    def title(self) -> str:
        return _LABELS[self.name]

    @property
    def label(self) -> str:
        """As tables and claims name it."""
        solving = "" if self.solving_us is None else f" ({self.solving_us:g} us to solve)"
        return f"{self.title}{solving}, {self.spare_per_rank} spare per rank"

    def params(self) -> dict[str, Any]:
        """What makes a case of it, JSON-ready."""
        always = {"spare_per_rank": self.spare_per_rank or None, "solve_us": self.solving_us}
        changed = self.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        return changed | {key: value for key, value in always.items() if value is not None}

    def balance(self, slot_expert_P: NDArray[np.int64], counts_RE: NDArray[np.int64]) -> Balanced:
        """A batch over the slots of all ranks; here routed experts stay where they are."""
        return OVER_REPLICAS["static"](slot_expert_P, counts_RE)


class ReplicationConfig(Lossless):
    """Replicas of busy experts that are placed ahead (``placement``), and who chooses among them (``balancers``)."""

    spare_per_rank: int = Field(ge=1)
    """Experts that every rank holds beyond its share, in every layer."""
    plan: Literal["eplb", "variance"] = "eplb"
    """Planned for the mean load, as DeepSeek's EPLB, or its spread over batches too, as FlashLB."""
    balancer: Literal["static", "lp", "activated"] = "static"
    """Replicas share evenly; or every batch is solved, for the fullest rank's load or its activated experts."""
    solve_us: SolveTime | None = None
    """Time in which every rank solves a batch, assumed; null = 100, static none."""

    @property
    def name(self) -> str:
        return self.plan

    @property
    def solving_us(self) -> float | None:
        return SOLVE_US if self.solve_us is None and self.balancer != "static" else self.solve_us

    @property
    def title(self) -> str:
        return f"{_LABELS[self.plan]}{_LABELS[self.balancer]}"

    def balance(self, slot_expert_P: NDArray[np.int64], counts_RE: NDArray[np.int64]) -> Balanced:
        return OVER_REPLICAS[self.balancer](slot_expert_P, counts_RE)


class RebalanceConfig(Lossless):
    """Weights of experts that move in every batch (``balancers``)."""

    name: Literal["llep", "ultra"]
    """``llep`` (least-loaded expert parallelism) or ``ultra`` (after UltraEP)."""
    spare_per_rank: int = Field(2, ge=1)
    """Free slots of every rank, which all layers share."""
    least_pairs: int = Field(1024, ge=1)
    """Fewest pairs for which an expert's weights move, unless they are the last."""
    solve_us: SolveTime = SOLVE_US
    """Time in which every rank plans a batch, assumed."""

    @property
    def label(self) -> str:
        changed = self.model_dump(include={"least_pairs"}, exclude_defaults=True)
        return ", ".join([super().label, *(f"{key}={value}" for key, value in changed.items())])

    def balance(self, slot_expert_P: NDArray[np.int64], counts_RE: NDArray[np.int64]) -> Balanced:
        return MOVING[self.name](slot_expert_P, counts_RE, least_pairs=self.least_pairs)


class WaterfillConfig(Lossless):
    """Tokens of shared experts that go to the ranks with fewest pairs (``balancers.water_fill``)."""

    name: Literal["waterfill"]
    """``waterfill``: of models with shared experts, where times are modelled."""
    solve_us: SolveTime = 0
    """Time in which every rank plans a batch, assumed."""

    spare_per_rank: ClassVar[int] = 0

    @property
    def label(self) -> str:
        return self.title + (f" ({self.solve_us:g} us to solve)" if self.solve_us else "")


class FigureConfig(Strict):
    """A figure of any columns; ``plot DIR --x COLUMN --y COLUMN`` lists them."""

    x: str
    """Column along the bottom: of cases, batches or layers, or a policy's parameter."""
    y: str
    """Column upright, means of rows at one place; ``COLUMN_p95``: a percentile over batches."""
    by: str | None = None
    """Column whose values are lines; null = policies, without ``x``."""
    facet: str | None = None
    """Column whose values are panels; null = comparisons."""
    where: str | None = None
    """Condition on columns, as pandas' ``query`` reads it."""


# ``emulate.device``: this machine's own.
MEASURED = "measured"


class EmulateConfig(Strict):
    """Settings of ``emulate``."""

    links: Annotated[str | None, NAME_OF_FILE] = None
    """Links between virtual ranks: a name of data/links/, a file by ``calibrate``, or ``table:SYSTEM/nccl/VERSION``."""
    bandwidth_scale: float = Field(1.0, ge=1e-6, le=1e6)
    """Factor on the bandwidth of all links."""
    device: Annotated[str, NAME_OF_FILE] = MEASURED
    """``measured``: this device runs every rank's layer. Else nothing runs: a name of data/devices/, a path of such a
    file, or measured elsewhere ``table:SYSTEM/FRAMEWORK/VERSION``."""
    replication: tuple[ReplicationConfig, ...] = ()
    """Replicas of busy experts, beside the policies, on modelled devices."""
    rebalance: tuple[Annotated[RebalanceConfig | WaterfillConfig, Field(discriminator="name")], ...] = ()
    """Likewise: weights, or tokens of shared experts, that move in every batch."""


Rule = Policy | Lossless
"""What a case does in place of native: a policy, or what loses nothing."""


class Experiment(SweepPoint):
    """A config file of every command but ``quality``, at one point of its ``sweep``."""

    BESIDE = ("sweep", "on_cpu")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name that results carry; without it, the file's."""
    scope: Literal["layer", "model"] = "layer"
    """One MoE layer, or a whole model."""
    model: ModelConfig
    workload: Annotated[SyntheticConfig | RecordedConfig, Field(discriminator="kind")]
    """Router scores, synthetic or recorded."""
    layer: LayerConfig = LayerConfig()
    policies: tuple[PolicyEntry, ...] = Field(min_length=1)
    """Policies by name and fields; a list as value makes one policy each. A number may differ by MoE layer:
    ``{"0-5": 1.0, "6-25": 1.5}``."""
    whole: WholeConfig = WholeConfig()
    measure: MeasureConfig = MeasureConfig()
    emulate: EmulateConfig = EmulateConfig()
    claims: tuple[Claim, ...] = ()
    """Published numbers of these policies, for ``papers``."""
    figures: tuple[FigureConfig, ...] = ()
    """Figures that ``plot`` draws beside its own."""

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        if self.scope == "layer" and self.whole.num_layers is not None:
            raise UserError("whole.num_layers: expected with scope: model alone; one layer is timed")
        if isinstance(self.workload, SyntheticConfig) and self.workload.skew_from is not None:
            self._check_counts(self.workload, self.workload.skew_from)
        model, classes = self.model.spec(), dict[str, type[Policy]]()
        for number, entry in enumerate(self.policies):
            for policy in expand_policies([entry]):
                if classes.setdefault(policy.name, type(policy)) is not type(policy):
                    raise UserError(f"policies.{number}.name: expected one policy of the name {policy.name}, got two")
                with naming(f"policies.{number}", joint="."):
                    policy.check_model(model.num_experts, model.top_k)
        for number in range(len(self.claims)):
            self.claimed_policies(number)
        return self

    @property
    def virtual_ranks(self) -> int:
        """EP ranks where none are real."""
        return self.layer.ep_size or default_ep_size(self.model.spec().num_experts)

    def _check_counts(self, workload: SyntheticConfig, counted: Path) -> None:
        """Refuse counts of other experts, and loads that no top-k gives: one rank's counts have such."""
        model, num_counted = self.model.spec(), read_counts(counted).shape[1]
        where = f"workload.skew_from: {counted}"
        if num_counted != model.num_experts:
            raise UserError(f"{where}: expected counts of {model.num_experts} experts, got {num_counted}")
        with naming("workload"):
            load_E = layer_loads(counted, workload.layer)
        peak = len(load_E) * max(load_E) / sum(load_E)
        if peak > (most := model.num_experts / model.top_k):
            raise UserError(f"{where}: expected a peak load up to {most:g} (experts / top_k), got {peak:.4g}")

    def make_policies(self) -> list[Policy]:
        """All policies, lists expanded, in the order of the file; repeated ones once."""
        return expand_policies(self.policies)

    def claimed_policies(self, number: int) -> list[tuple[Rule | None, Rule | None]]:
        """The claim's policies, or what else loses nothing, lists expanded, each with its baseline; None is native.

        Raises:
            ValueError: one of them is not in the config.
        """
        rules = (*self.make_policies(), *self.emulate.replication, *self.emulate.rebalance)
        known = {rule.label: rule for rule in rules}

        def named(key: str, entry: dict[str, Any] | str | None) -> list[Rule | None]:
            if entry is None:
                return [None]
            with naming(f"claims.{number}.{key}"):
                labels = [entry] if isinstance(entry, str) else [rule.label for rule in expand_policies([entry])]
                for label in labels:
                    if label not in known:
                        raise UserError(f"expected one of {'; '.join(known)}; got {label}")
            return [known[label] for label in labels]

        claim = self.claims[number]
        versus = named("versus", claim.versus)
        if len(versus) > 1:
            raise UserError(f"claims.{number}.versus: expected one policy, got {len(versus)}")
        return [(rule, versus[0]) for rule in named("policy", claim.policy)]
