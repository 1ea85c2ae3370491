"""Model shapes: what decides how a model's MoE layers behave under expert parallelism.

A preset is a YAML file in data/models/, each figure with its source. A Hugging Face config.json serves as well
(``hf_config``). ``scaled`` shrinks the hidden sizes, so that CPU ranks can run a layer; experts, top-k and routing
stay, and results say that it was scaled. ``sharded`` takes one tensor-parallel rank's slice of each expert's FFN, and
the name says so.

A spec states the model as it is. Where the benchmark's layer is simpler, its ``departures`` say so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from moe_ep_bench.errors import UserError, saying
from moe_ep_bench.presets import Preset, Strict

# Kernels want hidden sizes that are multiples of this.
_SIZE_MULTIPLE = 16
_FFN_SIZES = ("ffn_hidden_size", "shared_ffn_hidden_size")


ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""What makes a router's scores of its logits; the last is the root of their softplus."""


class Widths(NamedTuple):
    """Numbers of a token in attention, of all heads together."""

    queries: int
    keys: int
    values: int
    output: int
    normed: int
    """Those that attention's own norms read."""


class Attention(Strict):
    """Multi-head or grouped-query attention."""

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    bias: Literal["none", "qkv", "all"] = "none"
    """Which projections have a bias: none, those of queries, keys and values, or the output's too."""
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    """Queries and keys are normalised: not, each head alone, or all heads together."""
    sinks: bool = False
    """Each head has a learned logit that takes weight from the tokens'."""

    @property
    def cached_values(self) -> int:
        """Numbers that an engine caches of a token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def widths(self) -> Widths:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return Widths(queries, keys, keys, queries, normed=0 if self.qk_norm == "none" else queries + keys)

    def projections(self, hidden_size: int) -> list[tuple[int, int]]:
        """What each projection takes and gives."""
        queries, keys, values, output, _ = self.widths
        return [(hidden_size, queries + keys + values), (output, hidden_size)]

    def num_parameters(self, hidden_size: int) -> int:
        queries, keys, values, _, normed = self.widths
        to_heads = queries + keys + values
        biases = {"none": 0, "qkv": to_heads, "all": to_heads + hidden_size}[self.bias]
        norms = 2 * self.head_dim if self.qk_norm == "head" else normed
        return _weights(self.projections(hidden_size)) + biases + norms + self.num_heads * self.sinks


class LatentAttention(Strict):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    num_heads: PositiveInt
    kv_lora_rank: PositiveInt
    """Width of the latent that keys and values are made from, and that is cached."""
    q_lora_rank: PositiveInt | None = None
    """Width of the latent that queries are made from; null = queries come from the hidden state."""
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt

    @property
    def cached_values(self) -> int:
        """Numbers that an engine caches of a token in one layer: the latent, and the key's rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def widths(self) -> Widths:
        queries, values = (
            self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim),
            self.num_heads * self.v_head_dim,
        )
        return Widths(queries, queries, values, values, normed=(self.q_lora_rank or 0) + self.kv_lora_rank)

    def projections(self, hidden_size: int) -> list[tuple[int, int]]:
        """What each projection takes and gives."""
        queries, _, values, output, _ = self.widths
        compressed, latent = self.q_lora_rank, self.kv_lora_rank
        return [
            *([(hidden_size, queries)] if compressed is None else [(hidden_size, compressed), (compressed, queries)]),
            (hidden_size, latent + self.qk_rope_head_dim),
            (latent, self.num_heads * self.qk_nope_head_dim + values),
            (output, hidden_size),
        ]

    @property
    def absorbed(self) -> Widths:
        """Widths where a step's queries and outputs stay in the latent, which stands for keys and values alike.

        What makes keys and values of the latent is multiplied into queries and outputs instead (the same, section
        2.1.2), so that no cached token is expanded.
        """
        cached = self.cached_values
        of_queries, of_output = self.num_heads * cached, self.num_heads * self.kv_lora_rank
        return Widths(of_queries, cached, 0, of_output, normed=self.widths.normed)

    def absorbed_projections(self, hidden_size: int) -> list[tuple[int, int, int]]:
        """What each projection of such a step takes and gives, and how many there are of it: one, or one a head."""
        *before, (latent, _), last = self.projections(hidden_size)
        heads = [(self.qk_nope_head_dim, latent, self.num_heads), (latent, self.v_head_dim, self.num_heads)]
        return [*((*sizes, 1) for sizes in before), *heads, (*last, 1)]

    def num_parameters(self, hidden_size: int) -> int:
        return _weights(self.projections(hidden_size)) + self.widths.normed


def _weights(projections: list[tuple[int, int]]) -> int:
    return sum(takes * gives for takes, gives in projections)


class ModelSpec(Preset):
    """One MoE layer's shape, and the model in which such layers stand."""

    FOLDER = "models"

    name: str
    source: str
    num_layers: PositiveInt
    first_dense_layers: NonNegativeInt = 0
    """Layers at the bottom with a dense FFN; all others are MoE layers, unless these are listed."""
    listed_moe_layers: tuple[NonNegativeInt, ...] | None = None
    """MoE layers, ascending, where others lie in between; null = all above ``first_dense_layers``."""
    dense_ffn_hidden_size: NonNegativeInt = 0
    """Width of the dense layers' gated FFN; 0 = not stated, or no such layer."""
    hidden_size: PositiveInt
    vocab_size: PositiveInt | None = None
    tied_embeddings: bool = False
    """The output layer shares the embedding's weights."""
    attention: Attention | LatentAttention | None = None

    num_experts: PositiveInt
    top_k: PositiveInt
    ffn_hidden_size: PositiveInt
    """Width of one routed expert's FFN."""
    activation: Literal["swiglu", "clamped_swiglu", "other_gated", "plain"] = "swiglu"
    """``plain`` experts, shared ones too, have no gate: two matrices in place of three."""
    latent_size: PositiveInt | None = None
    """Width of what routed experts take and give, between two projections of the layer; null = ``hidden_size``."""
    expert_bias: bool = False
    """The experts' linear layers have biases."""
    shared_ffn_hidden_size: NonNegativeInt = 0
    """Width of all shared experts together; 0 = none."""
    shared_expert_gate: bool = False
    """The shared experts' output is multiplied by the sigmoid of one learned projection."""

    score_function: ScoreFunction = "softmax"
    num_hash_layers: NonNegativeInt = 0
    """The first so many MoE layers look a token's experts up by its id; scores only weigh them."""
    router_bias: bool = False
    """The router's linear layer has a bias: part of the logits, and so of the weights."""
    router_scales: bool = False
    """The router has a norm of its own, and a learned scale per expert multiplies the weights."""
    selection_bias: bool = False
    """A learned bias per expert is added to the scores for selecting, never to the weights."""
    num_groups: int | None = Field(None, ge=2)
    top_groups: PositiveInt | None = None
    """The top-k looks only into the ``top_groups`` best of ``num_groups`` equal groups of experts; null = no groups."""
    group_score_experts: PositiveInt | None = None
    """A group's score is the sum of this many of its best experts' scores."""
    normalize: bool
    """Weights of the selected experts are divided by their sum (norm_topk_prob)."""
    scales_inputs: bool = False
    """Combine weights multiply what an expert takes, not what it gives."""
    routed_scale: PositiveFloat = 1.0
    """Factor on the combine weights (routed_scaling_factor)."""
    scale: float = Field(1.0, gt=0, le=1)
    """Hidden sizes as a share of the true ones."""
    tensor_parallel: PositiveInt = 1
    """Of so many tensor-parallel ranks this is one: its FFN sizes are the shard's."""
    assumed: tuple[str, ...] = ()
    """Fields whose values neither the model's file nor its code says."""

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.top_k > self.num_experts:
            raise UserError(f"top_k: expected at most num_experts={self.num_experts}, got {self.top_k}")
        if self.first_dense_layers >= self.num_layers:
            raise UserError(
                f"first_dense_layers: expected fewer than num_layers={self.num_layers}, got {self.first_dense_layers}"
            )
        listed = self.listed_moe_layers
        if listed is not None and (self.first_dense_layers or not listed or list(listed) != sorted({*listed})):
            raise UserError(f"listed_moe_layers: expected numbers, ascending, without first_dense_layers; got {listed}")
        if listed and listed[-1] >= self.num_layers:
            raise UserError(f"listed_moe_layers: expected 0 to {self.num_layers - 1}, got {listed[-1]}")
        self._check_groups()
        return self

    def _check_groups(self) -> None:
        groups, top, scored = self.num_groups, self.top_groups, self.group_score_experts
        if groups is None or top is None or scored is None:
            if (groups, top, scored) != (None, None, None):
                raise UserError(
                    "expected all of num_groups, top_groups, group_score_experts or none,"
                    f" got {groups}, {top}, {scored}"
                )
            return
        size = self.num_experts // groups
        if self.num_experts % groups:
            raise UserError(f"num_groups: expected a divisor of num_experts={self.num_experts}, got {groups}")
        if top > groups or top * size < self.top_k:
            raise UserError(
                f"top_groups: expected at most num_groups={groups}, with room for top_k={self.top_k}"
                f" in groups of {size}, got {top}"
            )
        if scored > size:
            raise UserError(f"group_score_experts: expected at most the {size} experts of a group, got {scored}")

    @property
    def hub_id(self) -> str:
        """A preset's model on Hugging Face, as ``source`` begins."""
        return self.source.partition(" ")[0]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that route, ascending; all others have a dense FFN."""
        return self.listed_moe_layers or tuple(range(self.first_dense_layers, self.num_layers))

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def expert_hidden_size(self) -> int:
        """Width of the rows that travel to routed experts and back."""
        return self.latent_size or self.hidden_size

    @property
    def expert_matrices(self) -> int:
        """Matrices of an expert."""
        return 2 if self.activation == "plain" else 3

    @property
    def departures(self) -> tuple[str, ...]:
        """Where the benchmark's layer is simpler than the model: short sentences, to be shown with results."""
        sums = self.top_k // self.top_groups if self.top_groups else None
        sentences = {
            f"One of {self.tensor_parallel} tensor-parallel ranks, with its slice of every expert; the all-reduce"
            " of their outputs is not in it.": self.tensor_parallel > 1,
            "The experts' biases are left out.": self.expert_bias,
            "The clamped SwiGLU is computed as plain SwiGLU.": self.activation == "clamped_swiglu",
            "The experts' gated activation is computed as SwiGLU.": self.activation == "other_gated",
            f"The projections into the routed experts' width of {self.latent_size} and out of it are left"
            " out.": self.latent_size is not None,
            "The router's bias is left out.": self.router_bias,
            "The router's norm and its learned scale of each expert are left out.": self.router_scales,
            "The weights scale what experts give, the model's scale what they take.": self.scales_inputs,
            "The shared experts' gate is left out.": self.shared_expert_gate,
            f"The first {self.num_hash_layers} MoE layers choose experts by token id; here all choose by"
            " score.": self.num_hash_layers > 0,
            "The selection bias is zero: its trained values are part of the weights.": self.selection_bias,
            f"A group's score sums its best {sums} experts, as Megatron-Core has it,"
            f" where the model's sums {self.group_score_experts}.": sums != self.group_score_experts,
            "Assumed, for the model's file does not say it: "
            + ", ".join(f"{field} {getattr(self, field)}" for field in self.assumed)
            + ".": self.assumed,
        }
        return tuple(sentence for sentence, holds in sentences.items() if holds)

    @property
    def expert_parameters(self) -> int:
        """Weights of one routed expert: its matrices, and biases where the model has them."""
        biases = (self.expert_matrices - 1) * self.ffn_hidden_size + self.expert_hidden_size
        return self.expert_matrices * self.expert_hidden_size * self.ffn_hidden_size + biases * self.expert_bias

    @property
    def latent_parameters(self) -> int:
        """Weights of a layer's projections into and out of ``latent_size``."""
        return 2 * self.hidden_size * (self.latent_size or 0)

    def other_parameters(self, num_layers: int | None = None) -> int | None:
        """Weights of all but routed experts: of the first ``num_layers`` (None = all), embeddings and output.

        None for a shard, or where attention, vocabulary or dense FFN is not stated.
        """
        dense_known = self.dense_ffn_hidden_size > 0 or self.num_moe_layers == self.num_layers
        if self.attention is None or self.vocab_size is None or not dense_known or self.tensor_parallel > 1:
            return None
        hidden, num_layers = self.hidden_size, num_layers or self.num_layers
        router = self.num_experts * (hidden + self.router_bias + self.selection_bias)
        shared = self.expert_matrices * hidden * self.shared_ffn_hidden_size + hidden * self.shared_expert_gate
        shared += self.latent_parameters
        block = self.attention.num_parameters(hidden) + 2 * hidden  # two norms
        num_moe = sum(layer < num_layers for layer in self.moe_layers)
        ffn = num_moe * (router + shared) + (num_layers - num_moe) * 3 * hidden * self.dense_ffn_hidden_size
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * hidden
        return embeddings + num_layers * block + ffn + hidden

    @property
    def num_parameters(self) -> int | None:
        """Weights of the whole language model; None where ``other_parameters`` is."""
        others = self.other_parameters()
        return others and others + self.num_moe_layers * self.num_experts * self.expert_parameters

    def sharded(self, tensor_parallel: int) -> ModelSpec:
        """Return one rank's shard of so many: the FFN of routed and shared experts is cut.

        Raises:
            ValueError: their sizes cannot be divided so.
        """
        if tensor_parallel == 1:
            return self
        sizes = {key: getattr(self, key) for key in _FFN_SIZES}
        for key, size in sizes.items():
            if size % tensor_parallel:
                raise UserError(f"tensor_parallel: expected a divisor of {key}={size}, got {tensor_parallel}")
        shards = {key: size // tensor_parallel for key, size in sizes.items()}
        name = f"{self.name}, 1 of {tensor_parallel} TP ranks"
        return self.model_copy(update={**shards, "name": name, "tensor_parallel": tensor_parallel})

    def scaled(self, scale: float) -> ModelSpec:
        """Return this model with its hidden sizes multiplied by ``scale`` (rounded to multiples of 16).

        Attention keeps its heads and latent sizes: only what enters and leaves it shrinks.
        """
        if scale == 1.0:
            return self
        sizes = {
            key: max(_SIZE_MULTIPLE, round(getattr(self, key) * scale / _SIZE_MULTIPLE) * _SIZE_MULTIPLE)
            for key in ("hidden_size", "latent_size", *_FFN_SIZES, "dense_ffn_hidden_size")
            if getattr(self, key)
        }
        return self.model_copy(update={**sizes, "scale": scale})


def preset_of(name: str) -> str | None:
    """The preset that a user means: its name, or the id on Hugging Face of the config.json that it was copied from.

    Capital letters do not count. None where it is neither.
    """
    wanted, names = name.lower(), ModelSpec.names()
    if wanted in names or "/" not in wanted:
        return wanted if wanted in names else None
    return next((known for known in names if ModelSpec.named(known).hub_id.lower() == wanted), None)


def load_model(name_or_path: str) -> ModelSpec:
    """Load a preset (``preset_of``), or a Hugging Face config.json by path: a file that ends in .json, or its folder.

    Raises:
        ValueError: see ``ModelSpec.named`` and ``load_hf_model``.
    """
    path, preset = Path(name_or_path), preset_of(name_or_path)
    if preset is None and (path.suffix == ".json" or path.exists()):
        return load_hf_model(path)
    with naming_hub(name_or_path):
        return ModelSpec.named(preset or name_or_path, "a path of a config.json or ")


def naming_hub(name: str) -> contextlib.AbstractContextManager[None]:
    """Say in a ValueError about ``name`` what to do, where it is an id of a model on a hub."""
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    hint = f"; nothing is fetched from a hub: hf download {name} config.json gets the file, whose path serves as model"
    return saying(hint) if is_id else contextlib.nullcontext()


def load_hf_model(path: Path) -> ModelSpec:
    """Load a model from a Hugging Face config.json, or from a folder that holds one.

    Raises:
        ValueError: one line that names the file, the key, the value and what is allowed.
    """
    from moe_ep_bench.models import hf_config  # Which builds a class for each family: reading results waits for none.

    return hf_config.read_hf_config(path, ModelSpec)


def spec_of(values: Mapping[str, Any], where: str) -> ModelSpec:
    """The same of a config's values."""
    from moe_ep_bench.models import hf_config

    return hf_config.spec_of(values, ModelSpec, Path(where), source=where)
