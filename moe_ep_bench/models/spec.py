"""Model shapes: what decides how a model's MoE layers behave under expert parallelism.

A preset is a YAML file in data/models/, each figure with its source. A Hugging Face config.json serves as well
(``hf_config``). ``scaled`` shrinks the hidden sizes, so that CPU ranks can run a layer; experts, top-k and routing
stay, and results say that it was scaled. ``sharded`` takes one tensor-parallel rank's slice of each expert's FFN, and
the name says so.

A spec states the model as it is. Where the benchmark's layer is simpler, its ``departures`` say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, PositiveFloat, model_validator

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.presets import MOST, MOST_RUNS, Preset, Strict

# Kernels want hidden sizes that are multiples of this.
_SIZE_MULTIPLE = 16
_FFN_SIZES = ("ffn_hidden_size", "shared_ffn_hidden_size")
# Of layers and experts, each of which is planned; of all others, from 1 or from 0 on.
Number = Annotated[int, Field(ge=1, le=MOST_RUNS)]
Size = Annotated[int, Field(ge=1, le=MOST)]
SizeOrNone = Annotated[int, Field(ge=0, le=MOST)]

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""The function from a router's logits to its scores; the last is the root of their softplus."""


CheckpointDtype = Literal["bfloat16", "fp8", "fp8_block", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "nvfp4"]


class Form(NamedTuple):
    """Work of attention on a token in one layer; widths are of all heads together."""

    queries: int
    keys: int
    values: int
    output: int
    normed: int
    """Numbers that attention's own norms read."""
    rotated: int
    """Numbers that rotary positions change."""
    projections: list[tuple[int, int, int]]
    """What each takes and gives, and how many there are of it: one, or one a head."""


class Attention(Strict):
    """Multi-head or grouped-query attention."""

    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
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

    def form(self, hidden_size: int, *, decodes: bool = False) -> Form:
        """The same for a prompt and for a decode step."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = [(hidden_size, queries + 2 * keys, 1), (queries, hidden_size, 1)]
        normed = 0 if self.qk_norm == "none" else queries + keys
        return Form(queries, keys, keys, queries, normed, queries + keys, projections)

    def num_parameters(self, hidden_size: int) -> int:
        form = self.form(hidden_size)
        to_heads = form.queries + form.keys + form.values
        biases = {"none": 0, "qkv": to_heads, "all": to_heads + hidden_size}[self.bias]
        norms = 2 * self.head_dim if self.qk_norm == "head" else form.normed
        return _weights(form) + biases + norms + self.num_heads * self.sinks


class LatentAttention(Strict):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    num_heads: Size
    kv_lora_rank: Size
    """Width of the latent that keys and values are made from, and that is cached."""
    q_lora_rank: Size | None = None
    """Width of the latent that queries are made from; null = queries come from the hidden state."""
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size

    @property
    def cached_values(self) -> int:
        """Numbers that an engine caches of a token in one layer: the latent, and the key's rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def form(self, hidden_size: int, *, decodes: bool = False) -> Form:
        """Of a prompt, or of a decode step, which is *absorbed*.

        A step's queries and outputs stay in the latent, which stands for keys and values alike. What makes keys and
        values of it is multiplied into queries and outputs instead (section 2.1.2): no cached token is expanded.
        """
        heads, latent, rope = self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim
        queries, values = heads * (self.qk_nope_head_dim + rope), heads * self.v_head_dim
        normed = (self.q_lora_rank or 0) + latent
        to_queries = [(hidden_size, queries, 1)]
        if self.q_lora_rank is not None:
            to_queries = [(hidden_size, self.q_lora_rank, 1), (self.q_lora_rank, queries, 1)]
        before, after = [*to_queries, (hidden_size, latent + rope, 1)], (values, hidden_size, 1)
        if decodes:
            of_heads = [(self.qk_nope_head_dim, latent, heads), (latent, self.v_head_dim, heads)]
            widths = heads * self.cached_values, self.cached_values, 0, heads * latent
            return Form(*widths, normed, (heads + 1) * rope, [*before, *of_heads, after])
        expand = (latent, heads * self.qk_nope_head_dim + values, 1)
        return Form(queries, queries, values, values, normed, 2 * queries, [*before, expand, after])

    def num_parameters(self, hidden_size: int) -> int:
        form = self.form(hidden_size)
        return _weights(form) + form.normed


def _weights(form: Form) -> int:
    return sum(takes * gives * number for takes, gives, number in form.projections)


class ModelSpec(Preset):
    """One MoE layer's shape, and the model in which such layers stand."""

    FOLDER = "models"

    if TYPE_CHECKING:  # Models that are frozen have it; a checker does not see that they are.

        def __hash__(self) -> int: ...

    @classmethod
    def preset_of(cls, name: str) -> str | None:
        """The preset of this name, or of this Hugging Face id, with which its source begins; None where there is none.

        Case does not count: ``Qwen/Qwen3-235B-A22B`` is ``qwen3-235b-a22b``.
        """
        if name in cls.names():
            return name
        ids = {cls.named(preset).source.split()[0].casefold(): preset for preset in cls.names()} if "/" in name else {}
        return ids.get(name.casefold())

    name: str
    source: str
    num_layers: Number
    first_dense_layers: SizeOrNone = 0
    """Layers at the bottom with a dense FFN; all others are MoE layers, unless these are listed."""
    listed_moe_layers: tuple[SizeOrNone, ...] | None = None
    """MoE layers, ascending, where others lie in between; null = all above ``first_dense_layers``."""
    dense_ffn_hidden_size: SizeOrNone = 0
    """Width of the dense layers' gated FFN; 0 = not stated, or no such layer."""
    hidden_size: Size
    vocab_size: Size | None = None
    tied_embeddings: bool = False
    """The output layer shares the embedding's weights."""
    attention: Attention | LatentAttention | None = None

    num_experts: Number
    top_k: Size
    ffn_hidden_size: Size
    """Width of one routed expert's FFN."""
    activation: Literal["swiglu", "clamped_swiglu", "other_gated", "plain"] = "swiglu"
    """``plain`` experts, shared ones too, have no gate: two matrices in place of three."""
    latent_size: Size | None = None
    """Width of what routed experts take and give, between two projections of the layer; null = ``hidden_size``."""
    expert_bias: bool = False
    """The experts' linear layers have biases."""
    shared_ffn_hidden_size: SizeOrNone = 0
    """Width of all shared experts together; 0 = none."""
    shared_expert_gate: bool = False
    """The shared experts' output is multiplied by the sigmoid of one learned projection."""

    score_function: ScoreFunction = "softmax"
    num_hash_layers: SizeOrNone = 0
    """The first so many MoE layers look a token's experts up by its id; scores only weigh them."""
    router_bias: bool = False
    """The router's linear layer has a bias: part of the logits, and so of the weights."""
    router_scales: bool = False
    """The router has a norm of its own, and a learned scale per expert multiplies the weights."""
    selection_bias: bool = False
    """A learned bias per expert is added to the scores for selecting, never to the weights."""
    num_groups: int | None = Field(default=None, ge=2)
    top_groups: Size | None = None
    """The top-k looks only into the ``top_groups`` best of ``num_groups`` equal groups of experts; null = no groups."""
    group_score_experts: Size | None = None
    """A group's score is the sum of this many of its best experts' scores."""
    normalize: bool
    """Weights of the selected experts are divided by their sum (norm_topk_prob)."""
    scales_inputs: bool = False
    """Combine weights multiply what an expert takes, not what it gives."""
    routed_scale: PositiveFloat = 1.0
    """Factor on the combine weights (routed_scaling_factor)."""
    quantized: Literal["experts", "all_linear"] = "experts"
    """What the checkpoint has in fp8 where it is in fp8: routed experts, or attention's projections, dense and shared
    FFNs too. Embedding, output, gate, norms and core attention are never; 4-bit checkpoints have experts alone."""
    checkpoint_dtype: CheckpointDtype = "bfloat16"
    """Of the published weights of experts, in the words of ``layer.dtype``."""
    scale: float = Field(default=1.0, gt=0, le=1)
    """Hidden sizes as a share of the true ones."""
    tensor_parallel: Size = 1
    """Of so many tensor-parallel ranks this is one: its FFN sizes are the shard's."""
    assumed: tuple[str, ...] = ()
    """Fields whose values neither the model's file nor its code says."""

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.top_k > self.num_experts:
            raise UserError(f"expected at most num_experts={self.num_experts}, got {self.top_k}", "top_k")
        layers = self.moe_layers
        if not layers or layers[-1] >= self.num_layers or list(layers) != sorted({*layers}):
            raise UserError(
                f"expected MoE layers, ascending, below num_layers={self.num_layers}, got {list(layers)}",
                "first_dense_layers",
                "listed_moe_layers",
            )
        groups, top, scored = self.num_groups, self.top_groups, self.group_score_experts
        if (groups, top, scored) == (None, None, None):
            return self
        if groups is None or top is None or scored is None or self.num_experts % groups:
            raise UserError(
                f"expected all or none, and a divisor of "
                f"num_experts={self.num_experts} as num_groups; got {groups}, {top}, {scored}",
                "num_groups",
                "top_groups",
                "group_score_experts",
            )
        size = self.num_experts // groups
        if top > groups or top * size < self.top_k or scored > size:
            raise UserError(
                f"expected at most num_groups={groups}, with room for "
                f"top_k={self.top_k} in groups of {size}, and at most as many; got {top}, {scored}",
                "top_groups",
                "group_score_experts",
            )
        return self

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
    def expert_shape(self) -> tuple[int, int, int, int]:
        """Hidden size, FFN size and number of routed experts, and top-k: what tables of measured layers go by."""
        return self.expert_hidden_size, self.ffn_hidden_size, self.num_experts, self.top_k

    @property
    def expert_matrices(self) -> int:
        """Matrices of an expert."""
        return 2 if self.activation == "plain" else 3

    @property
    def departures(self) -> tuple[str, ...]:
        """Simplifications of the benchmark's layer: short sentences, shown with results."""
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

    def linear_parameters(self, num_layers: int | None = None) -> int:
        """Weights of attention's projections, dense and shared FFNs of the first ``num_layers`` (None = all)."""
        num_layers = self.num_layers if num_layers is None else num_layers
        num_moe = sum(layer < num_layers for layer in self.moe_layers)
        attention = 0 if self.attention is None else _weights(self.attention.form(self.hidden_size))
        shared = self.expert_matrices * self.hidden_size * self.shared_ffn_hidden_size
        dense = 3 * self.hidden_size * self.dense_ffn_hidden_size
        return num_layers * attention + num_moe * shared + (num_layers - num_moe) * dense

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
                raise UserError(f"expected a divisor of {key}={size}, got {tensor_parallel}", "tensor_parallel")
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


# ---- scores ----------------------------------------------------------------------------------------------------------


def scores_from_logits(logits_TE: Tensor, score_function: ScoreFunction) -> Tensor:
    """The model's score function: float32 [T, E], softmax over the experts or of each expert alone."""
    if score_function == "softmax":
        return torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    if score_function == "sigmoid":
        return torch.sigmoid(logits_TE.float())
    return torch.nn.functional.softplus(logits_TE.float()).sqrt()


def shares(scores_TE: Tensor) -> Tensor:
    """Every expert's share of a token's score mass: float32 [T, E]. A softmax stays as it is, to the bit."""
    sum_T1 = scores_TE.double().sum(dim=1, keepdim=True)
    if bool(((sum_T1 - 1).abs() < 1e-4).all()):
        return scores_TE
    return (scores_TE / sum_T1).float()


def logits_from_scores(scores_TE: Tensor, score_function: ScoreFunction) -> Tensor:
    """Logits that the score function turns back into these scores (softmax: rows that sum to 1)."""
    smallest = torch.finfo(torch.float32).tiny
    if score_function == "softmax":
        return scores_TE.clamp_min(smallest).log()
    if score_function == "sigmoid":
        return torch.logit(scores_TE.clamp_min(smallest))
    # The square of a score below 1e-19 has no logit whose softplus is above 0.
    return scores_TE.double().square().clamp_min(smallest).expm1().log().float()
