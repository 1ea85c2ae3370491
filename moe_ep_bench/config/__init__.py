"""The keys of a config, as frozen, validated experiments; ``config.files`` reads them. Unknown keys are errors.

Each point of ``sweep`` is one experiment, which is run as one *comparison*: all policies and the baselines,
interleaved on the same batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, PrivateAttr, field_validator, model_validator

from moe_ep_bench.balancers import MOVING, OVER_REPLICAS, SOLVE_US, Balanced
from moe_ep_bench.config.conditions import parsed
from moe_ep_bench.cost_model.devices import Dtype, SentDtype
from moe_ep_bench.errors import UserError, check_known, naming
from moe_ep_bench.facts.words import label_words
from moe_ep_bench.models import ModelSpec, load_hf_model
from moe_ep_bench.papers.claims import Claim
from moe_ep_bench.placement import Windows, default_ep_size
from moe_ep_bench.policies import Policy
from moe_ep_bench.policies.contract import Setting
from moe_ep_bench.presets import (
    MOST,
    MOST_RUNS,
    MOST_SEED,
    PolicyEntry,
    Strict,
    expand_policies,
    unknown_key,
    validated,
)
from moe_ep_bench.workload.batch import spread_tokens
from moe_ep_bench.workload.targets import PATTERNS, TARGETS, Skew, layer_loads, load_skew

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
    """Model of data/models/; or a shape: num_experts, top_k, hidden_size, ffn_hidden_size, ..."""
    hf_config: Annotated[Path | None, NAME] = None
    """Hugging Face config.json, or its folder."""
    scale: float = Field(default=1.0, gt=0, le=1)
    """Factor on the hidden sizes."""
    tensor_parallel: int = Field(default=1, ge=1, le=MOST)
    """Ranks that share every expert; one shard runs, without all-reduce. So Megatron-LM 1877, a rank without
    tokens, is tested without it."""

    @field_validator("preset")
    @classmethod
    def _of_id(cls, preset: str | None) -> str | None:
        """A model's Hugging Face id stands for its preset."""
        return preset and (ModelSpec.preset_of(preset) or preset)

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        known = [*type(self).model_fields, *ModelSpec.model_fields]
        if unknown := [key for key in self.model_extra or () if key not in known]:
            raise UserError(unknown_key(unknown[0], known), unknown[0])
        if sum(map(bool, (self.preset, self.hf_config, self.model_extra))) != 1:
            raise UserError("give either preset or hf_config, or the shape: num_experts, top_k, ...")
        self.spec()  # Raises where there is no such model, and lists what there is.
        return self

    def spec(self) -> ModelSpec:
        if self.hf_config is not None:
            whole = load_hf_model(self.hf_config)
        elif self.preset is not None:
            with naming(keys=["preset"]):
                whole = ModelSpec.named(self.preset)
        else:
            shape = self.model_extra or {}
            name = f"{shape.get('num_experts')} experts, top-{shape.get('top_k')}"
            whole = validated(
                ModelSpec,
                {"name": name, "source": "shape given in the config", "num_layers": 1, "normalize": True, **shape},
            )
        return whole.sharded(self.tensor_parallel).scaled(self.scale)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers that route, ascending; () = not known: a shape by hand whose number of layers is not given."""
        if self.model_extra and "num_layers" not in self.model_extra:
            return ()
        return self.spec().moe_layers


class _Workload(Strict):
    tokens_per_rank: int | None = Field(default=None, ge=1, le=MOST)
    """Tokens of a rank, on average."""
    num_tokens: int | None = Field(default=None, ge=1, le=MOST)
    """Tokens of all ranks; this or tokens_per_rank."""
    tokens_of_ranks: tuple[Annotated[int, Field(ge=0, le=MOST)], ...] | Annotated[float, Field(ge=1)] | None = None
    """Tokens of each rank, in place of both; or beside one, the fullest rank's tokens over the mean."""
    num_batches: int = Field(default=10, ge=1, le=MOST_RUNS)
    """Batches; intervals need ten."""
    history: int | None = Field(default=None, ge=0, le=MOST_RUNS)
    """Batches ahead of the first, which plans know and nobody serves; null = as many as plans need."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of the batches."""
    padding_per_rank: int = Field(default=0, ge=0, le=MOST)
    """Padding tokens of a rank, which ``native`` alone computes."""
    image_share: float | None = Field(default=None, ge=0, le=1)
    """Share of image tokens, for policies with a ``modality``."""

    @model_validator(mode="after")
    def _check(self) -> _Workload:
        if [self.tokens_per_rank, self.num_tokens, self._listed].count(None) != 2:
            raise UserError("give either tokens_per_rank or num_tokens, or tokens_of_ranks as a list")
        if self._listed is not None and not any(self._listed):
            raise UserError("expected some tokens, got none on any rank", "tokens_of_ranks")
        if sum(self._listed or ()) > MOST:
            raise UserError(f"expected at most {MOST:,} tokens in all", "tokens_of_ranks")
        return self

    @property
    def _listed(self) -> tuple[int, ...] | None:
        return self.tokens_of_ranks if isinstance(self.tokens_of_ranks, tuple) else None

    def dealt_tokens(self, world_size: int) -> NDArray[np.int64] | None:
        """Tokens of every rank, int64 [R]; None = as even as sequences allow.

        Raises:
            ValueError: there are as many ranks, or none could have so many tokens.
        """
        asked = self.tokens_of_ranks
        if asked is None:
            return None
        with naming(keys=["workload.tokens_of_ranks"]):
            if not isinstance(asked, tuple):
                return spread_tokens(self.total_tokens(world_size), world_size, asked, self.seed)
            if len(asked) != world_size:
                raise UserError(f"expected a number for each of the {world_size} ranks, got {len(asked)} of them")
        return np.array(asked, dtype=np.int64)

    def total_tokens(self, world_size: int) -> int:
        if self._listed is not None:
            return sum(self._listed)
        return self.num_tokens if self.num_tokens is not None else (self.tokens_per_rank or 0) * world_size


class SyntheticConfig(_Workload):
    kind: Literal["synthetic"] = "synthetic"
    """Scores are drawn, to meet the targets below."""
    skew: str | None = None
    """Calibrated targets (data/skews/: mixed, single_domain, worst_layer, or a domain), or another
    benchmark's pattern."""
    skew_from: Annotated[Path | None, NAME] = None
    """Counts of experts (JSON, CSV, npz) replacing ``skew``."""
    layer: int | None = Field(default=None, ge=0, le=MOST)
    """The model's layer, which ``skew_from`` counts; ``all``: a comparison each."""
    balanced: bool = False
    """Every expert gets as many pairs of each batch, in few sets of experts."""
    peak_load: float | None = Field(default=None, ge=1)
    """Load of the fullest expert over the mean, in the long run."""
    batch_peak_load: float | None = Field(default=None, ge=1)
    """The same of each batch."""
    sequence_length: int = Field(default=128, ge=1, le=MOST)
    """1 = decode; 1 + L = with L draft tokens."""
    rank_load: float | None = Field(default=None, ge=1)
    """Load of the fullest rank over the mean; null = by chance."""
    topk_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the score mass in the top-k."""
    neighbour_overlap: float | None = Field(default=None, gt=0)
    """Experts shared by adjacent tokens of a sequence."""
    motion: Literal["hotspot", "burst", "drift"] | None = None
    """Popularity changes experts over batches."""
    motion_batches: float | None = Field(default=None, gt=0, le=MOST)
    """Batches of a turn, between bursts, or of a half-life."""

    @property
    def is_balanced(self) -> bool:
        """Every expert gets as many pairs of each batch."""
        return self.balanced or self.batch_peak_load == 1

    @property
    def is_step(self) -> bool:
        """A batch is one token of each request that decodes."""
        return self.sequence_length == 1

    @property
    def request_tokens(self) -> int | None:
        """Tokens of a request in a batch; None = whole sequences, as recorded."""
        return self.sequence_length

    @model_validator(mode="after")
    def _check_pattern(self) -> SyntheticConfig:
        if self.skew is not None and self.skew_from is not None:
            raise UserError("expected one of the two, got both", "skew", "skew_from")
        if (self.layer is None) != (self.skew_from is None):
            raise UserError("expected both or none, as the counts of a layer are taken; got one", "skew_from", "layer")
        if None not in (self.peak_load, self.batch_peak_load):
            raise UserError("expected one of the two, got both", "peak_load", "batch_peak_load")
        if (self.motion is None) != (self.motion_batches is None):
            raise UserError("expected both or none, got one", "motion", "motion_batches")
        if self.balanced:
            loads = {"peak_load", "batch_peak_load", "rank_load"}
            beside = {"skew", "skew_from", *loads, "neighbour_overlap"} & self.model_fields_set
            if beside:
                raise UserError(f"prescribes all loads; expected no {', '.join(sorted(beside))}", "balanced")
        if self.skew in PATTERNS:
            beside = self.model_fields_set - {*_Workload.model_fields, "kind", "skew", "sequence_length"}
            if beside:
                raise UserError(f"{self.skew} prescribes all loads; expected no {', '.join(sorted(beside))}", "skew")
        return self

    def targets(self, model: ModelConfig, ep_size: int | None = None) -> dict[str, Any]:
        """All targets of a ``SyntheticWorkload``, those of ``skew`` included.

        Args:
            model: whose skew, and whose layers are counted.
            ep_size: EP ranks, None = the skew's own. On another number of them than that experts stand at random.

        Raises:
            ValueError: there is no such skew of the model, or no counts of the layer.
        """
        given = self.model_dump(include=set(TARGETS), exclude_unset=True)
        if given.get("rank_load"):
            given["rank_load"] = {"ep_size": ep_size, "load": self.rank_load} if ep_size and ep_size > 1 else None
        targets: dict[str, Any] = dict.fromkeys(TARGETS)
        if self.skew is not None and self.skew not in PATTERNS:
            targets |= self.calibration(model.preset).targets()
            if self.sequence_length == 1:
                targets["neighbour_overlap"] = None  # No token has neighbours.
        targets |= given
        # What is given beside a skew wins: a skew's cuts are of its own peak load, and of its own fullest rank.
        if self.batch_peak_load is not None:
            targets["peak_load"] = None
        if "peak_load" in given or self.batch_peak_load is not None:
            targets.pop("cuts", None)
        if targets["peak_load"] is None and targets["batch_peak_load"] is None and "rank_load" not in given:
            targets["rank_load"] = None  # No expert is busier than another.
        if self.peak_load == 1:
            targets |= {"peak_load": None, "rank_load": targets["rank_load"] if "rank_load" in given else None}
        if self.is_balanced:
            targets |= {"peak_load": 1.0, "batch_peak_load": None, "rank_load": None, "neighbour_overlap": None}
            if ep_size is not None and ep_size > 1:
                targets["rank_load"] = {"ep_size": ep_size, "load": 1.0}
        if self.skew_from is not None and self.layer is not None:
            targets["expert_loads"] = tuple(layer_loads(self.skew_from, self.layer, model.moe_layers))
        if ep_size is not None and targets["rank_load"] is not None and targets["rank_load"]["ep_size"] != ep_size:
            targets["rank_load"] = None
        if "cuts" in targets and (targets["rank_load"] is None or "rank_load" in given):
            targets["cuts"] = tuple({**cut, "rank_load": None} for cut in targets["cuts"])
        return targets

    def calibration(self, preset: str | None) -> Skew:
        """What ``skew``, which is no pattern, was calibrated to; ValueError where the model has no such skew."""
        assert self.skew is not None
        if preset is None:
            raise UserError(
                f"expected none for a model that is no preset; give peak_load and the like, got {self.skew}", "skew"
            )
        with naming(keys=["skew"]):
            return load_skew(preset, self.skew)


class RecordedConfig(_Workload):
    kind: Literal["recorded"] = "recorded"
    """Scores are replayed from recordings."""
    trace: tuple[Annotated[Path, NAME], ...] = Field(min_length=1)
    """Recordings (moe-trace-v1), mixed evenly."""
    layer: int = Field(ge=0, le=MOST)
    """Recorded row; ``all``: a comparison each."""
    order: Literal["arrival", "shuffled"] = "arrival"
    """Requests as they came, none twice; ``shuffled``: drawn, again where a recording is short."""
    mix: Literal["even", "sequence"] = "even"
    """Several recordings side by side, or one after another."""
    arrangement: Literal["sequences", "decode"] = "sequences"
    """Whole sequences, or steps of requests side by side."""
    tokens_per_request: int = Field(default=1, ge=1, le=MOST)
    """Tokens of a request in a decode step; 1 + L = with L draft tokens."""
    tail: Literal["popularity", "uniform", "recorded"]
    """Assumed scores of experts that are not recorded; ``recorded``: the file has all."""
    topk_share: float | None = Field(default=None, gt=0, le=1)
    """Assumed mass of the top-k, where scores are normalised over it."""

    @property
    def is_step(self) -> bool:
        """A batch is a step of requests that decode."""
        return self.arrangement == "decode"

    @property
    def request_tokens(self) -> int | None:
        """Tokens of a request in a batch; None = whole sequences, as recorded."""
        return self.tokens_per_request if self.is_step else None

    @model_validator(mode="after")
    def _check_mix(self) -> RecordedConfig:
        if self.mix == "sequence" and self.order == "shuffled":
            raise UserError("sequence keeps the order of recordings; expected order: arrival, got shuffled", "mix")
        return self


class LayerConfig(Strict):
    dtype: Dtype | None = None
    """Null = the checkpoint's if modelled, else bfloat16. Layers run in float32, bfloat16, ``fp8_block`` (``te``,
    Hopper)."""
    dispatch_dtype: SentDtype | None = None
    """Dtype of rows that ``emulate`` dispatches; null = layer.dtype."""
    ep_size: int | None = Field(default=None, ge=1, le=MOST)
    """Expert-parallel ranks; null = all."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of weights and of random policies."""
    experts: Literal["auto", "sequential", "grouped", "decode", "te"] = "auto"
    """``sequential`` (Megatron-Core's), ``grouped`` GEMMs, ``decode`` (few tokens) or ``te`` (Transformer Engine's)."""
    permute: Literal["auto", "unfused", "fused"] = "auto"
    """By index, or ``fused`` by Transformer Engine; auto = as the experts or the device have it."""
    cuda_graph: bool = False
    """Replay the layer, or a model's decode step; needs ``decode`` experts and a GPU."""

    @property
    def planned_dtype(self) -> Dtype:
        """``dtype`` of a point that is planned, which has one (``bench.plan``)."""
        assert self.dtype is not None
        return self.dtype


class WholeConfig(Strict):
    """Size and context of a whole model, for ``scope: model``. Of a layer ``emulate`` reads the context, for memory."""

    num_layers: int | None = Field(default=None, ge=1, le=MOST)
    """Layers built, dense ones included; null = all."""
    context_length: int = Field(default=0, ge=0, le=MOST)
    """Tokens of each request in the KV cache; 0 = prefill."""


class MeasureConfig(Strict):
    iterations: int = Field(default=5, ge=1, le=MOST_RUNS)
    """Plain iterations of a batch."""
    breakdown_iterations: int = Field(default=2, ge=0, le=MOST_RUNS)
    """Iterations of a batch with all phases timed."""
    warmup: int = Field(default=5, ge=0, le=MOST_RUNS)
    """Most untimed rounds; ``emulate`` runs one."""
    launches: int = Field(default=1, ge=1, le=MOST_RUNS)
    """Runs of the whole process."""
    flush_l2: bool = False
    """Overwrite the last-level cache before an iteration."""
    hold_us: float = Field(default=2000, ge=0, le=1e6)
    """Hold of a GPU before an iteration, us."""
    timeout_s: float = Field(default=300, gt=0, le=1e9)
    """Limit of an iteration and a rendezvous."""

    @model_validator(mode="after")
    def _check(self) -> MeasureConfig:
        if self.breakdown_iterations > self.iterations:
            got = self.breakdown_iterations
            raise UserError(f"expected at most iterations={self.iterations}, got {got}", "breakdown_iterations")
        return self

    @property
    def fewest_rounds(self) -> int:
        """Rounds of a batch in one launch, untimed ones included: what virtual ranks take, and real ones at least."""
        return 1 + min(self.warmup, 1) + self.iterations

    @property
    def definition(self) -> dict[str, Any]:
        """What decides the samples, where it differs from the defaults."""
        return self.model_dump(mode="json", exclude={"timeout_s", "launches"}, exclude_defaults=True)


SolveTime = Annotated[float, Field(ge=0)]


class Lossless(Strict):
    """What spreads a batch over ranks and loses nothing (``balancers``): a case of ``emulate`` beside the policies."""

    if TYPE_CHECKING:  # Each kind has its own, in the order of its keys.
        name: ClassVar[str]
        spare_per_rank: ClassVar[int | None]
        solve_us: ClassVar[float | None]

    @property
    def solving_us(self) -> float | None:
        """Of a batch on every rank; None where nothing is solved."""
        return self.solve_us

    def settings(self) -> list[Setting]:
        """What makes a case of it: all that differs from the defaults, the spare slots and the time to solve."""
        always = {"spare_per_rank": self.spare_per_rank or None, "solve_us": self.solving_us}
        changed = self.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        stated = changed | {key: value for key, value in always.items() if value is not None}
        return [Setting(key, value, is_default=key not in changed) for key, value in stated.items()]

    @property
    def keeps_places(self) -> bool:
        """Whether weights that move stay where they went, for the batches after it."""
        return False

    def of_sample(self, stands_for: int) -> Lossless:
        """The same for counts of a sample, each of whose pairs stands for so many."""
        return self

    def balance(
        self,
        slot_expert_P: NDArray[np.int64],
        counts_RE: NDArray[np.int64],
        ranks_per_node: int,
        exchange_pairs: int | None = None,
    ) -> Balanced:
        """A batch over the slots of all ranks; here routed experts stay where they are.

        Args:
            exchange_pairs: that a rank computes while two ranks of a node exchange an expert; None = not known.
        """
        return OVER_REPLICAS["static"](slot_expert_P, counts_RE)


class ReplicationConfig(Lossless):
    """Replicas of busy experts that are placed ahead (``placement``), and who chooses among them (``balancers``)."""

    spare_per_rank: int | None = Field(default=None, ge=1, le=MOST)
    """Experts of a rank beyond its share; this or spare_budget."""
    spare_budget: float | None = Field(default=None, gt=0, le=MOST)
    """Mean over a recording's layers; those whose planned fullest rank falls most get them."""
    plan: Literal["eplb", "variance"] = "eplb"
    """Plans for mean loads, or also for their variance over batches (FlashLB)."""
    balancer: Literal["static", "lp", "activated"] = "static"
    """``static`` shares evenly, ``lp`` minimises the fullest rank's load, ``activated`` its activated experts."""
    solve_us: SolveTime | None = None
    """Assumed time to solve a batch; null = 100, static none."""
    window: int | None = Field(default=None, ge=1, le=MOST_RUNS)
    """Batches that a plan knows; null = by arrival or with ``every`` num_batches, else all but the served one."""
    lag: int = Field(default=1, ge=1, le=MOST_RUNS)
    """Batches from the last that a plan knows to the first that it serves."""
    every: int | None = Field(default=None, ge=1, le=MOST_RUNS)
    """Batches between plans; null = one plan for all."""
    rearrange: Literal["stall", "beside"] = "stall"
    """Weights of a new plan move while all ranks wait, or beside exchanges, a layer a batch."""
    plan_ms: Annotated[float, Field(ge=0)] | None = None
    """Time to plan a layer; null = measured on this CPU. Of a stall only: else it is hidden."""

    @model_validator(mode="after")
    def _check(self) -> ReplicationConfig:
        if (self.spare_per_rank is None) == (self.spare_budget is None):
            raise UserError("give either spare_per_rank or spare_budget")
        return self

    @property
    def name(self) -> str:
        return self.plan

    @property
    def solving_us(self) -> float | None:
        return SOLVE_US if self.solve_us is None and self.balancer != "static" else self.solve_us

    def balance(self, slot_expert_P: NDArray[np.int64], counts_RE: NDArray[np.int64], *_: int | None) -> Balanced:
        return OVER_REPLICAS[self.balancer](slot_expert_P, counts_RE)


class RebalanceConfig(Lossless):
    """Weights of experts that move in every batch (``balancers``)."""

    name: Literal["llep", "ultra", "moonep", "epic"]
    """After LLEP (least-loaded expert parallelism), UltraEP, MoonEP or EPIC."""
    spare_per_rank: int = Field(default=2, ge=1, le=MOST)
    """Free slots of a rank, for all layers."""
    least_pairs: int = Field(default=1024, ge=1, le=MOST)
    """Fewest pairs for which weights move; of epic, if not given, those computed during an exchange."""
    solve_us: SolveTime = SOLVE_US
    """Assumed time to plan a batch."""

    @model_validator(mode="after")
    def _check(self) -> RebalanceConfig:
        if self.name == "moonep" and "least_pairs" in self.model_fields_set:
            raise UserError("expected none with moonep, which always balances all ranks", "least_pairs")
        return self

    @property
    def keeps_places(self) -> bool:
        return self.name == "epic"

    def of_sample(self, stands_for: int) -> RebalanceConfig:
        if self.keeps_places and "least_pairs" not in self.model_fields_set:  # It goes by what is computed meanwhile.
            return self
        return self.model_copy(update={"least_pairs": max(1, self.least_pairs // stands_for)})

    def balance(
        self,
        slot_expert_P: NDArray[np.int64],
        counts_RE: NDArray[np.int64],
        ranks_per_node: int,
        exchange_pairs: int | None = None,
    ) -> Balanced:
        by_cost = self.name == "epic" and "least_pairs" not in self.model_fields_set and exchange_pairs is not None
        options = {"least_pairs": exchange_pairs if by_cost else self.least_pairs, "ranks_per_node": ranks_per_node}
        return MOVING[self.name](slot_expert_P, counts_RE, **options)


class WaterfillConfig(Lossless):
    """Tokens of shared experts that go to the ranks with fewest pairs (``balancers.water_fill``)."""

    name: Literal["waterfill"]
    """Tokens of shared experts go to the ranks with fewest pairs."""
    spare_per_rank: ClassVar[int] = 0
    solve_us: ClassVar[float] = 0


def _condition(text: str | None) -> str | None:
    """A condition that can be read."""
    if text is not None:
        parsed(text)
    return text


class FigureConfig(Strict):
    """A figure of any columns; ``plot DIR --x COLUMN --y COLUMN`` lists them."""

    x: str
    """Column of the x axis."""
    y: str
    """Column of the y axis, or its percentile over batches, ``COLUMN_p95``."""
    by: str | None = None
    """Column of lines; null = policies."""
    facet: str | None = None
    """Column of panels; null = comparisons."""
    where: Annotated[str | None, AfterValidator(_condition)] = None
    """Condition on columns (docs/figures.md)."""


# ``emulate.device``: this machine's own.
MEASURED = "measured"
# ``emulate.overlap`` of an exchange and computation.
NO_OVERLAP, TWO_BATCH = "none", "two_batch"


class EmulateConfig(Strict):
    """Settings of ``emulate``."""

    links: Annotated[str | None, NAME_OF_FILE] = None
    """Name of data/links/, a file by ``calibrate``, ``table:SYSTEM/nccl/VERSION``, or an exchange that was measured,
    ``table:SYSTEM/FRAMEWORK/VERSION/BACKEND``."""
    exchange_sms: int | None = Field(default=None, ge=1)
    """Multiprocessors that a measured exchange uses; null = the fastest row."""
    copies: Literal["pair", "rank"] = "pair"
    """Modelled links carry a token once per ``pair`` (NCCL), or once per ``rank`` and node (DeepEP)."""
    overlap: Literal["none", "shared", "two_batch"] = NO_OVERLAP
    """Computed during dispatch: ``shared`` experts, or with ``two_batch`` also the other half batch."""
    bandwidth_scale: float = Field(default=1.0, gt=0)
    """Factor on all bandwidths."""
    device: Annotated[str, NAME_OF_FILE] = MEASURED
    """``measured``: this device. Modelled: a name of data/devices/, such a file, or
    ``table:SYSTEM/FRAMEWORK/VERSION[/KERNELS]``."""
    sample_tokens: int | None = Field(default=None, ge=1)
    """Tokens routed for all of a batch; a divisor; null = all."""
    sample_ranks: int | None = Field(default=None, ge=1)
    """Ranks that have them; a divisor; null = all."""
    replication: tuple[ReplicationConfig, ...] = ()
    """Replicas of busy experts, on modelled devices."""
    rebalance: tuple[Annotated[RebalanceConfig | WaterfillConfig, Field(discriminator="name")], ...] = ()
    """Weights or tokens that move in every batch, on modelled devices."""


Rule = Policy | Lossless


def label_of(rule: Rule) -> str:
    """A rule as tables and claims name it."""
    return label_words(rule.name, rule.settings(), "replication" if isinstance(rule, Lossless) else "policy")


"""What a case does in place of native: a policy, or what loses nothing."""


class Experiment(SweepPoint):
    """A config file of every command but ``quality``, at one point of its ``sweep``."""

    BESIDE = ("sweep", "on_cpu")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the results; without it, the file's."""
    scope: Literal["layer", "model"] = "layer"
    """One MoE layer, or a whole model."""
    model: ModelConfig
    workload: Annotated[SyntheticConfig | RecordedConfig, Field(discriminator="kind")]
    """Router scores, synthetic or recorded."""
    layer: LayerConfig = LayerConfig()
    policies: tuple[PolicyEntry, ...] = Field(min_length=1)
    """Names and fields; a list as value makes a policy each, ``{"0-5": 1.0, "6-25": 1.5}`` differs by MoE layer."""
    whole: WholeConfig = WholeConfig()
    measure: MeasureConfig = MeasureConfig()
    emulate: EmulateConfig = EmulateConfig()
    claims: tuple[Claim, ...] = ()
    """Published numbers, for ``papers``."""
    figures: tuple[FigureConfig, ...] = ()
    """Figures that ``plot`` draws beside its own."""

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        measure, num_batches = self.measure, self.workload.num_batches
        of_batch = measure.iterations + measure.breakdown_iterations
        if num_batches * of_batch > MOST_RUNS * 2**8:
            runs = f"{num_batches} batches of {of_batch} iterations"
            most = MOST_RUNS * 2**8
            raise UserError(f"expected at most {most} iterations in all, got {runs}", "workload.num_batches")
        if self.scope == "layer" and self.whole.num_layers is not None:
            raise UserError("expected with scope: model alone; one layer is timed", "whole.num_layers")
        model = self.model.spec()
        for number, entry in enumerate(self.policies):
            for policy in expand_policies([entry]):
                with naming(section=f"policies.{number}"):
                    policy.check_model(model.num_experts, model.top_k)
        for number in range(len(self.claims)):
            self.claimed_policies(number)
        self._check_windows()
        if isinstance(self.workload, SyntheticConfig) and self.workload.skew not in (None, *PATTERNS):
            with naming(section="workload"):
                self.workload.calibration(self.model.preset)
        return self

    def _check_windows(self) -> None:
        """Windows of batches that have no time, or more of them than there are."""
        workload = self.workload
        shuffled = isinstance(workload, RecordedConfig) and workload.order == "shuffled"
        for number, one in enumerate(self.emulate.replication):
            asked = sorted({"window", "every", "lag", "rearrange", "plan_ms"} & one.model_fields_set)
            if shuffled and asked:
                expected = "none with workload.order: shuffled, whose batches do not follow each other"
                raise UserError(f"expected {expected}", f"emulate.replication.{number}.{asked[0]}")
            if asked and self.windows(one).window is None:
                raise UserError("expected window or every to be set too", f"emulate.replication.{number}.{asked[0]}")
            if one.spare_budget is not None and (shuffled or not isinstance(workload, RecordedConfig)):
                expected = "a recording, by arrival: the window of the first plan says which layers gain"
                raise UserError(f"expected {expected}", f"emulate.replication.{number}.spare_budget")
            if (needed := self.windows(one).num_history) > self.num_history:
                raise UserError(
                    f"expected at least {needed}, which emulate.replication.{number} knows, got {workload.history}",
                    "workload.history",
                )
        if shuffled and workload.history:
            raise UserError(f"expected none with order: shuffled, got {workload.history}", "workload.history")

    @property
    def virtual_ranks(self) -> int:
        """EP ranks where none are real."""
        return self.layer.ep_size or default_ep_size(self.model.spec().num_experts)

    @property
    def decodes(self) -> bool:
        """Whether a batch is a step of decode."""
        return bool(self.whole.context_length) or self.workload.is_step

    def windows(self, replication: ReplicationConfig) -> Windows:
        """Which batches plans know: those before where batches follow each other in time, else all others."""
        by_arrival = isinstance(self.workload, RecordedConfig) and self.workload.order == "arrival"
        num_batches, window = self.workload.num_batches, replication.window
        if window is None and (by_arrival or replication.every is not None):
            window = num_batches
        ahead = self.workload.history or 0 if window is None else 0
        return Windows(num_batches, window, replication.lag, replication.every, ahead)

    @property
    def num_history(self) -> int:
        """Batches ahead of the first: as the workload has it, else as many as plans need."""
        if self.workload.history is not None:
            return self.workload.history
        return max((self.windows(one).num_history for one in self.emulate.replication), default=0)

    def make_policies(self) -> list[Policy]:
        """All policies, lists expanded, in the order of the file; repeated ones once."""
        return expand_policies(self.policies)

    def claimed_policies(self, number: int) -> list[tuple[Rule | None, Rule | None]]:
        """The claim's policies, or what else loses nothing, lists expanded, each with its baseline; None is native.

        Raises:
            ValueError: one of them is not in the config.
        """
        rules = (*self.make_policies(), *self.emulate.replication, *self.emulate.rebalance)
        known = {label_of(rule): rule for rule in rules}

        def named(key: str) -> list[Rule | None]:
            entry, where = getattr(self.claims[number], key), f"claims.{number}.{key}"
            if entry is None:
                return [None]
            with naming(section=where):
                labels = [entry] if isinstance(entry, str) else [label_of(rule) for rule in expand_policies([entry])]
            check_known(where, labels, known)
            return [known[label] for label in labels]

        versus, *more = named("versus")
        if more:
            raise UserError(f"expected one policy, got {1 + len(more)}", f"claims.{number}.versus")
        return [(rule, versus) for rule in named("policy")]
