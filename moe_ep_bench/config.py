"""From a YAML file to a frozen, validated experiment.

Unknown keys are errors, and every error is one line: file, key, what was found, what is allowed.
An experiment is a list of *comparisons* (one per point of ``sweep``); in each, all policies and
the baselines run interleaved on the same batches.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from moe_ep_bench.claims import Claim
from moe_ep_bench.models import ModelSpec, load_hf_model, load_preset
from moe_ep_bench.placement import PLACEMENTS, Placement, make_placement
from moe_ep_bench.policies import Policy, make_policy
from moe_ep_bench.skews import RankLoad, load_skew
from moe_ep_bench.workload import TAILS, open_trace

_Schema = TypeVar("_Schema", bound=BaseModel)


class ConfigError(ValueError):
    """A mistake in what the user wrote; its text is the one line to show."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Strict):
    preset: str | None = None
    """A file of configs/models/, without its ending."""
    hf_config: Path | None = None
    """A Hugging Face config.json, or its folder, in place of a preset; relative to the config's own folder."""
    scale: float = Field(1.0, gt=0, le=1)
    """Hidden sizes as a share of the true ones."""
    tensor_parallel: int = Field(1, ge=1)
    """One rank's shard of so many tensor-parallel ones: its share of every expert; the all-reduce is not in it."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if (self.preset is None) == (self.hf_config is None):
            raise ValueError("give either preset or hf_config")
        self.spec()  # Raises where there is no such model, and lists what there is.
        return self

    def spec(self) -> ModelSpec:
        if self.hf_config is not None:
            whole = load_hf_model(self.hf_config)
        else:
            assert self.preset is not None
            try:
                whole = load_preset(self.preset)
            except ValueError as problem:
                raise ValueError(f"preset: {problem}") from None
        return whole.sharded(self.tensor_parallel).scaled(self.scale)


class _Workload(_Strict):
    tokens_per_rank: int | None = Field(None, ge=1)
    num_tokens: int | None = Field(None, ge=1)
    """Tokens of a batch on all ranks together; give this or tokens_per_rank."""
    num_batches: int = Field(10, ge=1)
    seed: int = Field(0, ge=0)
    rank_shares: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(None, min_length=1)
    """Tokens of the ranks in relation to each other, repeated as often as there are ranks; 0 = none."""
    padding_per_rank: int = Field(0, ge=0)
    """Of every rank's tokens the last so many are padding, as in a decode batch that is padded to a graph's size."""
    mask_padding: bool = True
    """Policies are told which tokens are padding, and let them select nothing; ``native`` is never told."""

    @model_validator(mode="after")
    def _check(self) -> _Workload:
        if (self.tokens_per_rank is None) == (self.num_tokens is None):
            raise ValueError("give either tokens_per_rank or num_tokens")
        return self

    def total_tokens(self, world_size: int) -> int:
        return self.num_tokens if self.num_tokens is not None else (self.tokens_per_rank or 0) * world_size


class SyntheticConfig(_Workload):
    kind: Literal["synthetic"] = "synthetic"
    skew: Literal["mixed", "single_domain", "worst_layer"] | None = None
    """Targets calibrated to the model (configs/skews/); what is given beside it wins, null included."""
    peak_load: float | None = Field(None, ge=1)
    """Fullest expert over the mean; null = unskewed."""
    sequence_length: int = Field(128, ge=1)
    """1 = decode, 1 + L = speculative requests with L draft tokens."""
    family: Literal["lognormal", "zipf", "dirichlet", "uniform"] = "lognormal"
    """How popularity falls from expert to expert."""
    placement: Literal["scattered", "spread", "adjacent"] = "scattered"
    """Where popular experts lie: as drawn, spread over the ranks, or side by side."""
    rank_load: RankLoad | None = None
    """Fullest rank over the mean, for one number of ranks."""
    topk_share: float | None = Field(None, gt=0, lt=1)
    """Share of the score mass that the top-k hold."""
    entropy: float | None = Field(None, gt=0, lt=1)
    """Of a token's scores, over the logarithm of the experts' number."""
    neighbour_overlap: float | None = Field(None, gt=0)
    """How many experts adjacent tokens of a sequence share."""
    drift: float = Field(0.0, ge=0, le=1)
    """How much of the popularity is new in each batch."""
    burst_every: int | None = Field(None, ge=2)
    burst_peak_load: float | None = Field(None, ge=1)
    """Every so many batches one has this peak load."""

    def targets(self, preset: str | None) -> dict[str, Any]:
        """All targets, those of ``skew`` included.

        Raises:
            ValueError: there is no such skew of the model.
        """
        own = self.model_dump(include=set(_TARGETS))
        if self.skew is None:
            return own
        if preset is None:
            raise ValueError(
                f"skew: expected none for a model by hf_config; give peak_load and the like, got {self.skew}"
            )
        try:
            calibrated = load_skew(preset, self.skew).targets()
        except ValueError as error:
            raise ValueError(f"skew: {error}") from None
        # A way of placing experts, or a skew that moves, leaves no room for a load of one rank.
        if self.placement != "scattered" or self.drift or self.burst_every or self.family == "uniform":
            calibrated.pop("rank_load", None)
        if self.sequence_length == 1:
            calibrated.pop("neighbour_overlap", None)
        if self.entropy is not None:
            calibrated.pop("topk_share", None)
        return {**own, **{key: value for key, value in calibrated.items() if key not in self.model_fields_set}}


# Keys of a synthetic workload that it is solved for, as SyntheticWorkload calls them.
_TARGETS = (
    "peak_load", "family", "placement", "rank_load", "topk_share", "entropy", "neighbour_overlap", "drift",
    "burst_every", "burst_peak_load",
)  # fmt: skip


class RecordingConfig(_Strict):
    trace: Path
    """A moe-trace-v1 file; a relative path is read from the config's own folder."""
    share: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Of all tokens, in relation to the shares of the other recordings."""


class RecordedConfig(_Workload):
    kind: Literal["recorded"] = "recorded"
    trace: tuple[RecordingConfig, ...] = Field(min_length=1)
    """A recording's path, or several recordings with their shares."""
    layer: int = Field(ge=0)
    """One recorded layer; in a config also a list of them or ``all``, which makes a comparison for each."""
    arrangement: Literal["sequences", "decode"] = "sequences"
    """Whole sequences (prefill), or in every batch the next step of requests that decode side by side."""
    tokens_per_request: int = Field(1, ge=1)
    """In a decoding step; 1 + L = speculative requests with L draft tokens."""
    tail: Literal["popularity", "uniform", "both", "recorded"]
    """What is assumed of the experts that the recording does not name; ``both`` makes a comparison for each, and
    ``recorded`` assumes nothing where the recording has the scores of all experts."""
    topk_share: float | None = Field(None, gt=0, le=1)
    """Assumed mass of the top-k where the recording's scores are normalised over it."""

    @property
    def tail_words(self) -> str:
        return "all scores recorded" if self.tail == "recorded" else f"{self.tail} tail"

    @field_validator("trace", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return [{"trace": value}] if isinstance(value, str | Path) else value


class LayerConfig(_Strict):
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    ep_size: int | None = Field(None, ge=1)
    """Expert-parallel ranks; null = all ranks. The rest are data-parallel replicas."""
    expert_tensor_parallel: int = Field(1, ge=1)
    """Ranks among which every expert is cut, beside ``ep_size`` (layer.tensor_group); 1 = experts are whole."""
    seed: int = Field(0, ge=0)
    experts: Literal["auto", "sequential", "grouped", "decode", "te"] = "auto"
    """What computes the experts (layer.parts)."""
    permute: Literal["auto", "megatron", "indexed", "fused"] = "auto"
    """What permutes tokens around the all-to-all (layer.parts)."""
    kernel: Literal["auto", "torch", "triton", "numba"] = "auto"
    """What routes by a policy (kernels.twins)."""
    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts' ranks (layer.parts)."""
    cuda_graph: bool = False
    """Replay the layer from CUDA graphs, as far as it waits for no host (layer.graphs); needs allgather and a GPU."""


class WholeConfig(_Strict):
    """What only ``scope: model`` reads: how much of a model is built, and what is before its tokens."""

    num_layers: int | None = Field(None, ge=1)
    """The first so many layers, dense ones included; null = all. Times of all are then extrapolated, and say so."""
    context_length: int = Field(0, ge=0)
    """Tokens of each request in the KV cache: a batch is one decode step then. 0 = prefill: sequences are prompts."""


class MeasureConfig(_Strict):
    iterations: int = Field(5, ge=1)
    """Plain iterations per batch and case."""
    breakdown_iterations: int = Field(2, ge=0, le=1000)
    """Iterations per batch and case with all phases timed."""
    warmup: int = Field(1, ge=0)
    """Fewest untimed rounds over all batches and cases, after the first, which every shape gets anyhow."""
    max_warmup: int = Field(5, ge=0)
    """Warm-up goes on until a round takes as long as the one before it, up to this many rounds."""
    launches: int = Field(1, ge=1)
    """Repetitions of the whole process, on the same batches; the report uses all."""
    flush_l2: bool = False
    """Overwrite the last-level cache before every timed iteration."""
    timeout_s: float = Field(300, gt=0)
    """No iteration and no rendezvous may last longer."""

    @model_validator(mode="after")
    def _check(self) -> MeasureConfig:
        if self.breakdown_iterations > self.iterations:
            raise ValueError(f"breakdown_iterations: expected at most iterations={self.iterations}")
        if self.max_warmup < self.warmup:
            raise ValueError(f"max_warmup: expected at least warmup={self.warmup}, got {self.max_warmup}")
        return self


class RouteConfig(_Strict):
    """What ``route`` reads, and of it ``emulate`` the placement; ``run`` times experts that are placed contiguously."""

    placement: Literal["contiguous", "strided"] | Path | tuple[tuple[float, ...], ...] = "contiguous"
    """Which ranks hold which experts, for the load of ranks: a word, a matrix [ranks][experts] of shares, or a JSON
    file with one, relative to the config's own folder."""
    layer_weights: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] | None = Field(None, min_length=1)
    """What each layer counts in the imbalance factor, in the order of the layers; null = alike."""
    image_share: float | None = Field(None, ge=0, le=1)
    """Assumed share of image tokens, the first ones of every sequence; null = no token has a modality."""

    def make_placement(self, num_experts: int, num_ranks: int) -> Placement:
        """Place the experts; ValueError where the placement does not fit."""
        try:
            return make_placement(self.placement, num_experts, num_ranks)
        except ValueError as error:
            raise ValueError(f"route.placement: {error}") from None


class ReplicationConfig(_Strict):
    """Replicas of busy experts as DeepSeek's EPLB places them (``replication``)."""

    spare_per_rank: int = Field(ge=1)
    """Experts that every rank holds beyond its share."""
    num_nodes: int = Field(1, ge=1)
    """Nodes whose ranks are neighbours; read by the hierarchical policy."""
    policy: Literal["auto", "hierarchical", "global"] = "auto"


# ``emulate.device``: the one that is here.
MEASURED = "measured"


class EmulateConfig(_Strict):
    """What only ``emulate`` reads."""

    links: str | None = None
    """How virtual ranks are linked: a file of configs/links/ without its ending, or a path that ``calibrate`` wrote."""
    bandwidth_scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor on the bandwidth of all links."""
    device: str = MEASURED
    """``measured``: this device runs every virtual rank's layer. Else nothing is run: a file of configs/devices/
    without its ending, or the path of such a file, says what the layer's phases would take."""
    replication: tuple[ReplicationConfig, ...] = ()
    """Expert replication beside the policies: the alternative that needs spare memory, and drops nothing."""
    chunk_tokens: int | None = Field(None, ge=1)
    """Most tokens of a rank whose rows are permuted and computed at once; null = as many as memory holds."""


class Experiment(_Strict):
    """What a config file says. ``policies`` and ``sweep`` are expanded by the properties below."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    scope: Literal["layer", "model"] = "layer"
    """What ``run`` times: one MoE layer, or a whole model with its attention and every MoE layer."""
    model: ModelConfig
    workload: Annotated[SyntheticConfig | RecordedConfig, Field(discriminator="kind")]
    layer: LayerConfig = LayerConfig()
    policies: tuple[dict[str, Any], ...] = Field(min_length=1)
    """Policies by name and fields; a list in place of a value means one policy for each."""
    whole: WholeConfig = WholeConfig()
    measure: MeasureConfig = MeasureConfig()
    route: RouteConfig = RouteConfig()
    emulate: EmulateConfig = EmulateConfig()
    claims: tuple[Claim, ...] = ()
    """What only ``reproduce`` reads: published numbers of these policies. They decide nothing that is measured."""
    claims_device: str | None = None
    """On which ``reproduce`` looks for the skew that a claim needs: a modelled one; null = ``emulate.device``."""
    # Not a key: ``load_experiments`` sets it.
    _point: tuple[tuple[str, Any], ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        unused = self.whole.model_dump(exclude_defaults=True)
        if self.scope == "layer" and unused:
            raise ValueError(f"whole.{next(iter(unused))}: expected with scope: model alone; one layer is timed")
        self.make_policies()
        for number, claim in enumerate(self.claims):
            self.claimed_policies(number)
            try:
                claim.check_scope(self.scope, decodes=self.whole.context_length > 0)
            except ValueError as problem:
                raise ValueError(f"claims.{number}.{problem}") from None
        return self

    @property
    def point(self) -> tuple[tuple[str, Any], ...]:
        """Where in its file's ``sweep`` this experiment stands: dotted keys with their values, in the file's order."""
        return self._point

    def make_policies(self) -> list[Policy]:
        """All policies, lists expanded, in the order of the file; repeated ones once."""
        return expand_policies(self.policies)

    def claimed_policies(self, number: int) -> list[tuple[Policy | None, Policy | None]]:
        """The policies that a claim is about, lists expanded, each with the one in native's place; None is native.

        Raises:
            ValueError: one of them is none of the config's.
        """
        claim, known = self.claims[number], self.make_policies()
        if claim.policy is None:
            return [(None, None)]
        found: dict[str, list[Policy]] = {}
        for key, entry in (("policy", claim.policy), ("versus", claim.versus)):
            where = f"claims.{number}.{key}"
            try:
                found[key] = [] if entry is None else list(_expand_policy(entry))
            except ValueError as problem:
                raise ValueError(f"{where}: {problem}") from None
            for policy in found[key]:
                if policy not in known:
                    labels = ", ".join(one.label for one in known)
                    raise ValueError(f"{where}: expected one of the config's policies ({labels}); got {policy.label}")
        if len(found["versus"]) > 1:
            raise ValueError(f"claims.{number}.versus: expected one policy, got {len(found['versus'])}")
        versus = found["versus"][0] if found["versus"] else None
        return [(policy, versus) for policy in found["policy"]]


def expand_policies(entries: Iterable[Mapping[str, Any]]) -> list[Policy]:
    """All policies of a config's list, lists as values expanded, in its order; repeated ones once.

    Raises:
        ValueError: naming the entry, its field and what is allowed.
    """
    found: list[Policy] = []
    for number, entry in enumerate(entries):
        try:
            found += _expand_policy(entry)
        except ValueError as problem:
            raise ValueError(f"policies.{number}: {problem}") from None
    return list(dict.fromkeys(found))


def _expand_policy(entry: Mapping[str, Any]) -> Iterable[Policy]:
    choices = [value if isinstance(value, list) else [value] for value in entry.values()]
    for values in itertools.product(*choices):
        yield make_policy(dict(zip(entry, values, strict=True)))


def load_experiments(path: Path, overrides: Iterable[str] = (), *, on_cpu: bool) -> list[Experiment]:
    """Read a config file and return one experiment per point of its ``sweep``.

    Args:
        overrides: ``key=value`` with a dotted key and a YAML value; they win over the file. A key that is swept has
            that one value then; ``sweep.key=[values]`` sweeps it.
        on_cpu: apply the file's ``on_cpu`` section where ranks run on the CPU: dotted keys with values, as overrides.

    Raises:
        ConfigError: one line naming file, key, value and what is allowed.
    """
    raw = _read(path)
    cpu_values = raw.pop("on_cpu", None) or {}
    sweep = raw.pop("sweep", None) or {}
    for section, name in ((cpu_values, "on_cpu"), (sweep, "sweep")):
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name}: expected dotted keys with values, got {section!r}")
    for section, key in _PATHS:
        _anchor(raw, section, key, path.parent)
        if isinstance(sweep.get(f"{section}.{key}"), list):
            sweep[f"{section}.{key}"] = [_anchored(value, key, path.parent) for value in sweep[f"{section}.{key}"]]
    if isinstance(raw.get("claims_device"), str):
        raw["claims_device"] = _anchored(raw["claims_device"], "device", path.parent)
    for key, value in cpu_values.items():
        if on_cpu:
            _override(raw, sweep, str(key), value, f"{path}: on_cpu.{key}")
    _override_all(raw, sweep, overrides)
    if "scope" in sweep:
        raise ConfigError(f"{path}: sweep.scope: expected one value, as scope outside of sweep: {_ONE_DIRECTORY}")
    workload = raw.get("workload")
    if isinstance(workload, dict):
        if workload.get("tail") == "both":
            sweep["workload.tail"] = list(TAILS)
        if raw.get("scope") == "model":
            _take_all_layers(path, workload, sweep)
        layers = _layers(path, workload, sweep)
        if layers is not None:
            sweep["workload.layer"] = layers
    return [_validated(path, raw, point) for point in _points(path, sweep)]


def load_points(
    path: Path, overrides: Iterable[str], schema: type[_Schema], sections: Mapping[str, type[BaseModel]]
) -> list[_Schema]:
    """``load_experiments`` for configs of another schema, which has neither ``on_cpu`` nor files named in it to anchor.

    Args:
        sections: the schema's keys that have keys of their own, for hints where one is mistyped.

    Raises:
        ConfigError: one line naming file, key, value and what is allowed.
    """
    raw = _read(path)
    sweep = raw.pop("sweep", None) or {}
    if not isinstance(sweep, dict):
        raise ConfigError(f"{path}: sweep: expected dotted keys with values, got {sweep!r}")
    _override_all(raw, sweep, overrides)
    found = []
    for point in _points(path, sweep):
        values = _copy(raw)
        for key, value in point:
            _put(values, key, value, f"{path}: sweep")
        try:
            found.append(schema.model_validate(values))
        except ValidationError as error:

            def known(parents: list[str], _: tuple[int | str, ...]) -> list[str]:
                names = [parent for parent in parents if not parent.isdigit()]
                return list((sections[names[-1]] if names else schema).model_fields)

            raise ConfigError(f"{path}: {_first_error(error, known)}") from None
    return found


def _override_all(raw: dict[str, Any], sweep: dict[str, Any], overrides: Iterable[str]) -> None:
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override}: expected key=value")
        _override(raw, sweep, key, _parse_value(override, text), f"--set {override}")


def _points(path: Path, sweep: Mapping[str, Any]) -> Iterable[tuple[tuple[str, Any], ...]]:
    points = []
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: sweep.{key}: expected a list of values, got {values!r}")
        if key in _DECIDES_NOTHING and len(values) > 1:
            raise ConfigError(
                f"{path}: sweep.{key}: its {len(values)} values would be measured as one and the same comparison: "
                f"{_DECIDES_NOTHING[key]}"
            )
        points.append([(key, value) for value in values])
    return itertools.product(*points)


_ONE_DIRECTORY = "times of layers and of whole models stand in directories of their own"

# Keys that enter no comparison's id, in no scope: points that differ in them alone would overwrite each other.
_ONE_VALUE = "expected one value, as {} outside of sweep"
_DECIDES_NOTHING = {
    "policies": "expected all of them in policies, where they run on the same batches; a list as a field's value "
    "means one policy each",
    "measure.launches": "expected one number in measure.launches, which repeats every comparison that often",
    **{
        key: _ONE_VALUE.format(key)
        for key in ("name", "measure.timeout_s", "route.layer_weights", "claims", "claims_device")
    },
}


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which PyYAML takes the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands here twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config: {error.strerror}") from None
    try:
        raw = yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:  # PyYAML's own for a day that is none.
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys with values, got {type(raw).__name__}")
    return raw


def _parse_value(override: str, text: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"--set {override}: the value is not valid YAML") from None


# Keys whose values name files.
_PATHS = (
    ("workload", "trace"),
    ("model", "hf_config"),
    ("route", "placement"),
    ("emulate", "links"),
    ("emulate", "device"),
)

# Of these, what names a file of this repository where it has no ending.
_NAMED = ("links", "device")


def _anchor(raw: dict[str, Any], section: str, key: str, folder: Path) -> None:
    """Read a file's path from the config's own folder, where it is relative."""
    values = raw.get(section)
    if isinstance(values, dict) and key in values:
        values[key] = _anchored(values[key], key, folder)


def _anchored(value: Any, key: str, folder: Path) -> Any:
    """A path, or what names paths: several, or mappings that have one under the same key."""
    if isinstance(value, str):
        is_name = value in PLACEMENTS if key == "placement" else key in _NAMED and not value.endswith(".yaml")
        return value if is_name else str(folder / value)
    if isinstance(value, list):
        return [_anchored(entry, key, folder) for entry in value]
    if isinstance(value, dict) and isinstance(value.get(key), str):
        return {**value, key: str(folder / value[key])}
    return value


def _take_all_layers(path: Path, workload: dict[str, Any], sweep: Mapping[str, Any]) -> None:
    """A whole model takes a recording layer by layer, from the first on: it is one comparison."""
    if workload.get("kind") != "recorded":
        return
    for key, layer in (
        ("workload.layer", workload.get("layer", "all")),
        ("sweep.workload.layer", sweep.get("workload.layer", "all")),
    ):
        if layer != "all":
            raise ConfigError(
                f"{path}: {key}: expected all, for with scope model every MoE layer takes its own recorded one; "
                f"got {layer!r}"
            )
    workload["layer"] = 0


def _layers(path: Path, workload: Mapping[str, Any], sweep: Mapping[str, Any]) -> list[Any] | None:
    """The layers of a recording that a config asks for, where it asks for several."""
    wanted = workload.get("layer")
    if isinstance(wanted, list):
        if not wanted:
            raise ConfigError(f"{path}: workload.layer: expected a layer, several or all, got []")
        return list(dict.fromkeys(wanted))
    if wanted != "all":
        return None
    # Recordings that are mixed or compared have the same layers, or their workload says that they do not.
    first = sweep.get("workload.trace", [workload.get("trace")])
    while isinstance(first, list | dict) and first:
        first = first[0] if isinstance(first, list) else first.get("trace")
    if not isinstance(first, str):
        raise ConfigError(f"{path}: workload.layer: all needs a recording in workload.trace, got {first!r}")
    try:
        return list(range(open_trace(first).num_layers))
    except ValueError as error:
        raise ConfigError(f"{path}: workload: {error}") from None


def _override(raw: dict[str, Any], sweep: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Put a value in place of what the file says; a swept key has that one value then."""
    if key == "sweep":
        raise ConfigError(f"{where}: expected sweep.KEY=[values], or KEY=value for one value alone")
    if key.startswith("sweep."):
        sweep[key.removeprefix("sweep.")] = value
        return
    _put(raw, key, value, where)
    sweep.pop(key, None)


def _put(raw: dict[str, Any], dotted: str, value: Any, where: str) -> None:
    *parents, last = str(dotted).split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: {dotted}: {parent} has no keys of its own")
    raw[last] = value


def _validated(path: Path, raw: Mapping[str, Any], point: Iterable[tuple[str, Any]]) -> Experiment:
    values, point = _copy(raw), tuple(point)
    for key, value in point:
        _put(values, key, value, f"{path}: sweep")
    try:
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_error(error)}") from None
    experiment._point = point
    return experiment


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value


def _first_error(error: ValidationError, known_keys: Callable[..., list[str]] | None = None) -> str:
    """The first problem, as ``key: problem, got value``."""
    problem = error.errors(include_url=False)[0]
    keys = [str(part) for part in problem["loc"] if part not in ("synthetic", "recorded")]
    key = ".".join(keys) or "config"
    if problem["type"] == "extra_forbidden":
        known = (known_keys or _known_keys)(keys[:-1], problem["loc"])
        close = difflib.get_close_matches(keys[-1], known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"{key}: no such key; expected one of {', '.join(known)}{hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{key}: missing"
    if problem["type"] == "value_error":
        return f"{key}: {message}" if keys else message
    return f"{key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _known_keys(parents: list[str], location: tuple[int | str, ...]) -> list[str]:
    parents = [parent for parent in parents if not parent.isdigit()]
    if not parents:
        return [*Experiment.model_fields, "sweep", "on_cpu"]
    sections: dict[str, type[BaseModel]] = {
        "model": ModelConfig,
        "workload": RecordedConfig if "recorded" in location else SyntheticConfig,
        "layer": LayerConfig,
        "whole": WholeConfig,
        "measure": MeasureConfig,
        "route": RouteConfig,
        "emulate": EmulateConfig,
        "rank_load": RankLoad,
        "trace": RecordingConfig,
        "claims": Claim,
    }
    return list(sections[parents[-1]].model_fields)
