"""Read a model's shape from a Hugging Face config.json, without the transformers package.

A class for each ``model_type`` says by which keys its files state the fields of a ``ModelSpec``: an alias is the file's
key, null stands for a key that is missing. A missing size is an error. A default is that of the family's own
configuration class in transformers. What no spec can express is refused, not guessed, with a shape by hand to go on
from; attention that none can express is None, and a whole model is refused then. What neither file nor code says is
named (``ModelSpec.assumed``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from moe_ep_bench.errors import UserError, brief, saying
from moe_ep_bench.files import parse_json, read_bytes
from moe_ep_bench.presets import Strict, validated

MOST_CONFIG_BYTES = 2**24  # Those of quantised checkpoints list every layer that is not.
# Fields of a shape by hand, and the keys that mostly state them in files that are not understood.
_USUAL: dict[str, tuple[str, ...]] = {
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts"),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "num_layers": ("num_hidden_layers",),
    "shared_ffn_hidden_size": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "score_function": ("scoring_func",),
    "normalize": ("norm_topk_prob", "moe_renormalize"),
    "routed_scale": ("routed_scaling_factor",),
}
_NEEDED = ("num_experts", "top_k", "hidden_size", "ffn_hidden_size")


class _Family(Strict):
    """What files of most families state."""

    model_config = ConfigDict(extra="ignore", strict=True)

    FACTS: ClassVar[Mapping[str, Any]] = {}
    """Fields of the spec that hold for the whole family."""
    ATTENTION: ClassVar[Mapping[str, Any]] = {}
    """Fields of attention likewise."""
    BIASES: ClassVar[tuple[str, ...]] = ("attention_bias",)
    """Flags of attention that the family's code knows."""
    NULLS: ClassVar[tuple[str, ...]] = ()
    """Keys whose null is a value of its own, not a missing key."""

    num_layers: PositiveInt = Field(alias="num_hidden_layers")
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    tied_embeddings: bool = Field(False, alias="tie_word_embeddings")
    dense_ffn_hidden_size: NonNegativeInt | None = Field(None, alias="intermediate_size")
    num_experts: PositiveInt
    top_k: PositiveInt = Field(alias="num_experts_per_tok")
    ffn_hidden_size: PositiveInt = Field(alias="moe_intermediate_size")
    normalize: bool = Field(alias="norm_topk_prob")
    num_heads: PositiveInt = Field(alias="num_attention_heads")
    num_kv_heads: PositiveInt | None = Field(None, alias="num_key_value_heads")
    head_dim: PositiveInt | None = None
    attention_bias: bool = False
    qkv_bias: bool = False
    hidden_act: str = "silu"

    @model_validator(mode="after")
    def _check(self) -> _Family:
        if self.top_k > self.num_experts:
            key = type(self).model_fields["top_k"].alias or "num_experts_per_tok"
            raise UserError(f"{key}: expected at most the {self.num_experts} experts, got {self.top_k}")
        if self._has_dense_layers and not self.dense_ffn_hidden_size:
            key = type(self).model_fields["dense_ffn_hidden_size"].alias
            got = "missing" if self.dense_ffn_hidden_size is None else "0"
            raise UserError(f"{key}: {got}; expected a whole number from 1")
        return self

    @property
    def routed_layers(self) -> list[int]:
        """Numbers of the layers that have experts, ascending."""
        return list(range(self.num_layers))

    @property
    def _has_dense_layers(self) -> bool:
        return len(self.routed_layers) < self.num_layers

    def spec(self) -> dict[str, Any]:
        """Fields of a ``ModelSpec``, and keys that are none."""
        unused = set() if self._has_dense_layers else {"dense_ffn_hidden_size"}
        first = self.routed_layers[0] if self.routed_layers else self.num_layers
        leading = self.routed_layers == list(range(first, self.num_layers))
        return {
            **self.model_dump(exclude=unused),
            "first_dense_layers": first if leading else 0,
            "listed_moe_layers": None if leading else tuple(self.routed_layers),
            "activation": "swiglu" if self.hidden_act in ("silu", "swiglu") else "other_gated",
            "attention": self.attention(),
            **self.FACTS,
        }

    def attention(self) -> dict[str, Any] | None:
        """Fields of the spec's attention; None where no spec can express it."""
        biases = [name for name in self.BIASES if getattr(self, name)]
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_heads,
            "bias": "all" if "attention_bias" in biases else "qkv" if biases else "none",
            **self.ATTENTION,
        }


def _kinds(layers: object) -> object:
    """The kinds of all layers, "dense" or "sparse", or 0 and 1, as zeros and ones; None where one number is for all."""
    if isinstance(layers, int) and layers == 1:
        return None
    if not isinstance(layers, list):
        raise UserError(f"expected 1 or a list, got {brief(layers)}")
    if not all(kind in ("dense", "sparse", 0, 1) for kind in layers):
        raise UserError(f"expected dense and sparse layers, got {brief(layers)}")
    return [int(kind in ("sparse", 1)) for kind in layers]


class _NoAttention:
    """Attention that no spec can express: linear, indexed or windowed layers, or values of another width than keys."""

    def attention(self) -> None:
        return None


class _Layered(_Family):
    """Families whose first layers are dense; later files list the kind of each layer."""

    first_dense_layers: NonNegativeInt | None = Field(None, alias="first_k_dense_replace")
    layer_kinds: Annotated[list[int] | None, BeforeValidator(_kinds)] = Field(
        None, validation_alias=AliasChoices("mlp_layer_types", "moe_layer_freq")
    )

    @model_validator(mode="after")
    def _check_kinds(self) -> _Layered:
        kinds, first = self.layer_kinds, self.first_dense_layers
        if kinds is None and first is None:
            raise UserError("first_k_dense_replace: missing")
        if kinds is not None and len(kinds) < self.num_layers:
            raise UserError(f"mlp_layer_types: expected the kinds of {self.num_layers} layers, got {len(kinds)}")
        if "first_dense_layers" in self.model_fields_set and self.routed_layers != [*range(first, self.num_layers)]:
            expected = f"expected {first} dense layers, as first_k_dense_replace says"
            raise UserError(f"mlp_layer_types: {expected}, then sparse ones; got {brief(kinds)}")
        return self

    @property
    def routed_layers(self) -> list[int]:
        if self.layer_kinds is None:
            return list(range(self.first_dense_layers or 0, self.num_layers))
        return [layer for layer in range(self.num_layers) if self.layer_kinds[layer : layer + 1] == [1]]


class _Deepseek(_Layered):
    num_experts: PositiveInt = Field(alias="n_routed_experts")
    n_shared_experts: int = Field(0, ge=0)
    num_groups: PositiveInt = Field(1, alias="n_group")
    top_groups: PositiveInt | None = Field(None, alias="topk_group")
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"
    routed_scale: PositiveFloat = Field(1.0, alias="routed_scaling_factor")

    def spec(self) -> dict[str, Any]:
        spec = {**super().spec(), "shared_ffn_hidden_size": self.n_shared_experts * self.ffn_hidden_size}
        # A group's score is the sum of so many of its best experts'.
        spec["group_score_experts"] = {"greedy": None, "group_limited_greedy": 1, "noaux_tc": 2}[self.topk_method]
        if spec["group_score_experts"] is None or self.num_groups == 1:
            spec |= {"num_groups": None, "top_groups": None, "group_score_experts": None}
        return spec


class _DeepseekOcr2(_Deepseek):
    """The language model of DeepSeek-OCR 2: weights are never normalised, heads share the hidden size evenly."""

    first_dense_layers: NonNegativeInt | None = Field(0, alias="first_k_dense_replace")
    n_shared_experts: int = Field(2, ge=0)
    normalize: Literal[False] = Field(False, alias="norm_topk_prob")

    def attention(self) -> dict[str, Any]:
        return {**super().attention(), "head_dim": self.hidden_size // self.num_heads}


class _DeepseekV2(_Deepseek):
    """Weights are never normalised, though files have the key."""

    NULLS: ClassVar = ("q_lora_rank",)
    n_shared_experts: int = Field(2, ge=0)
    normalize: Literal[False] = Field(False, alias="norm_topk_prob")
    q_lora_rank: PositiveInt | None = 1536
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt

    def attention(self) -> dict[str, Any]:
        sizes = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
        return self.model_dump(include={"num_heads", *sizes})


class _V3Routing(_Deepseek):
    """DeepSeek-V3's routing: a sigmoid, a selection bias, and groups by the sum of their two best."""

    FACTS: ClassVar = {"score_function": "sigmoid", "selection_bias": True}
    n_shared_experts: int = Field(1, ge=0)
    num_groups: PositiveInt = Field(1, alias="n_group")
    top_groups: PositiveInt = Field(1, alias="topk_group")
    normalize: bool = Field(True, alias="norm_topk_prob")
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    routed_scale: PositiveFloat = Field(alias="routed_scaling_factor")


class _DeepseekV3(_V3Routing, _DeepseekV2):
    num_groups: PositiveInt = Field(8, alias="n_group")
    top_groups: PositiveInt = Field(4, alias="topk_group")


class _Glm4Lite(_V3Routing, _DeepseekV2):
    """DeepSeek-V3 without groups."""

    q_lora_rank: PositiveInt | None = 768


class _V3Indexed(_NoAttention, _V3Routing):
    """DeepSeek-V3's routing without groups, beside sparse, linear or windowed attention: GLM-5, MiMo-V2, Hunyuan-V4."""

    head_dim: NonNegativeInt | None = None


class _DeepseekV32(_V3Indexed):
    num_groups: PositiveInt = Field(8, alias="n_group")
    top_groups: PositiveInt = Field(4, alias="topk_group")


class _DeepseekV4(_V3Indexed):
    """DeepSeek-V4: the root of a softplus, and weights always normalised; the first layers choose by token id.

    Its experts and its shared one are a clamped SwiGLU.
    """

    FACTS: ClassVar = {
        "score_function": "sqrtsoftplus",
        "selection_bias": True,
        "normalize": True,
        "activation": "clamped_swiglu",
    }
    first_dense_layers: Literal[0] = 0
    layer_kinds: None = None
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    routed_scale: PositiveFloat = Field(1.5, alias="routed_scaling_factor")
    hidden_act: Literal["silu"] = "silu"
    mlp_bias: Literal[False] = False
    num_hash_layers: NonNegativeInt = 3
    mlp_layer_types: list[Literal["hash_moe", "moe"]] | None = None

    @model_validator(mode="after")
    def _check_hash_layers(self) -> _DeepseekV4:
        kinds = self.mlp_layer_types
        if kinds is not None and (len(kinds) != self.num_layers or kinds != sorted(kinds)):
            expected = f"expected the kinds of {self.num_layers} layers, hash_moe before moe"
            raise UserError(f"mlp_layer_types: {expected}; got {brief(kinds)}")
        return self

    def spec(self) -> dict[str, Any]:
        kinds, stated = self.mlp_layer_types, self.num_hash_layers
        by_id = min(self.num_layers, stated if kinds is None else kinds.count("hash_moe"))
        return {**super().spec(), "num_hash_layers": by_id}


class _DeepseekRef(_DeepseekV4):
    """DeepSeek-V4 in files of few keys, which no class of transformers reads."""

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "assumed": () if "routed_scale" in self.model_fields_set else ("routed_scale",)}


class _MimoV2(_V3Indexed):
    n_shared_experts: Literal[0] = 0
    routed_scale: PositiveFloat = Field(1.0, alias="routed_scaling_factor")


class _ExaoneMoe(_V3Indexed):
    num_experts: PositiveInt
    n_shared_experts: int = Field(1, ge=0, alias="num_shared_experts")


class _KimiLinear(_V3Indexed):
    """Kimi Linear, Kimi-K3, whose routed experts work at a width of their own, and with groups Bailing's hybrids."""

    num_experts: PositiveInt
    top_k: PositiveInt = Field(validation_alias=AliasChoices("num_experts_per_token", "num_experts_per_tok"))
    n_shared_experts: int = Field(1, ge=0, alias="num_shared_experts")
    num_groups: PositiveInt = Field(1, validation_alias=AliasChoices("num_expert_group", "n_group"))
    normalize: bool = Field(True, validation_alias=AliasChoices("moe_renormalize", "norm_topk_prob"))
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    latent_size: PositiveInt | None = Field(None, alias="routed_expert_hidden_size")


class _BailingHybrid(_KimiLinear):
    num_groups: PositiveInt = Field(8, validation_alias=AliasChoices("num_expert_group", "n_group"))
    top_groups: PositiveInt = Field(4, alias="topk_group")


class _NemotronH(_NoAttention, _V3Routing):
    """Nemotron-H: every layer is attention, Mamba, a dense FFN or a mixture of experts; no FFN has a gate."""

    FACTS: ClassVar = {**_V3Routing.FACTS, "activation": "plain"}
    blocks: Annotated[list[str], BeforeValidator(list)] = Field(
        validation_alias=AliasChoices("layers_block_type", "layer_types", "hybrid_override_pattern")
    )
    first_dense_layers: Literal[0] = 0
    shared_ffn_hidden_size: PositiveInt = Field(alias="moe_shared_expert_intermediate_size")
    latent_size: PositiveInt | None = Field(None, alias="moe_latent_size")
    routed_scale: PositiveFloat = Field(1.0, alias="routed_scaling_factor")

    @model_validator(mode="before")
    @classmethod
    def _count_layers(cls, stated: dict[str, Any]) -> dict[str, Any]:
        """Files and code count blocks, whatever num_hidden_layers says."""
        keys = cls.model_fields["blocks"].validation_alias.choices
        blocks = next((stated[key] for key in keys if isinstance(stated.get(key), list | str)), None)
        return stated if blocks is None else {**stated, "num_hidden_layers": len(blocks)}

    @property
    def routed_layers(self) -> list[int]:
        return [layer for layer, kind in enumerate(self.blocks) if kind in ("moe", "E")]

    @property
    def _has_dense_layers(self) -> bool:
        return not {"mlp", "-"}.isdisjoint(self.blocks)

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "shared_ffn_hidden_size": self.shared_ffn_hidden_size}


class _Glm4(_V3Routing):
    """GLM-4.5: DeepSeek-V3's routing, grouped-query attention whose output projection never has a bias."""

    num_kv_heads: PositiveInt = Field(8, alias="num_key_value_heads")
    routed_scale: PositiveFloat = Field(1.0, alias="routed_scaling_factor")
    use_qk_norm: bool = False

    def attention(self) -> dict[str, Any]:
        qk_norm = "head" if self.use_qk_norm else "none"
        return {**super().attention(), "bias": "qkv" if self.attention_bias else "none", "qk_norm": qk_norm}


class _Glm4v(_Glm4):
    attention_bias: bool = True


class _SolarOpen(_Glm4):
    head_dim: PositiveInt = 128
    first_dense_layers: NonNegativeInt | None = Field(0, alias="first_k_dense_replace")


class _Dots1(_V3Routing):
    ATTENTION: ClassVar = {"qk_norm": "head"}
    NULLS: ClassVar = ("num_key_value_heads",)
    num_kv_heads: PositiveInt = Field(32, alias="num_key_value_heads")
    first_dense_layers: NonNegativeInt | None = Field(0, alias="first_k_dense_replace")
    n_shared_experts: int = Field(0, ge=0)
    normalize: bool = Field(False, alias="norm_topk_prob")
    routed_scale: PositiveFloat = Field(1.0, alias="routed_scaling_factor")


class _Mixtral(_Family):
    BIASES: ClassVar = ()
    num_kv_heads: PositiveInt = Field(8, alias="num_key_value_heads")
    num_experts: PositiveInt = Field(alias="num_local_experts")
    ffn_hidden_size: PositiveInt = Field(alias="intermediate_size")
    normalize: Literal[True] = Field(True, alias="norm_topk_prob")  # a softmax of the top-k


def _same_of_all(stated: object) -> object:
    """One number for all layers, where a file lists it for each."""
    return stated[0] if isinstance(stated, list) and stated and stated.count(stated[0]) == len(stated) else stated


class _HunyuanV1(_Mixtral):
    """Hunyuan-A13B: Mixtral's routing, and a shared expert as wide as a routed one."""

    ATTENTION: ClassVar = {"qk_norm": "head"}
    BIASES: ClassVar = ("attention_bias",)
    num_kv_heads: PositiveInt | None = Field(None, alias="num_key_value_heads")
    num_experts: Annotated[PositiveInt, BeforeValidator(_same_of_all)]
    top_k: Annotated[PositiveInt, BeforeValidator(_same_of_all)] = Field(alias="moe_topk")
    shared_ffn_hidden_size: PositiveInt = Field(alias="intermediate_size")


class _MinimaxM2(_Mixtral):
    """MiniMax-M2: a sigmoid with a selection bias; weights are normalised over the top-k."""

    FACTS: ClassVar = {"score_function": "sigmoid", "selection_bias": True}
    ATTENTION: ClassVar = {"qk_norm": "all_heads"}
    scoring_func: Literal["sigmoid"] = "sigmoid"
    use_routing_bias: Literal[True] = True
    use_qk_norm: Literal[True] = True
    shared_intermediate_size: Literal[0] = 0


class _MinimaxM3(_NoAttention, _Layered):
    """MiniMax-M3: M2's routing, a scale, and one shared expert; every FFN is a clamped SwiGLU."""

    FACTS: ClassVar = {**_MinimaxM2.FACTS, "activation": "clamped_swiglu"}
    first_dense_layers: NonNegativeInt | None = Field(0, alias="first_k_dense_replace")
    num_experts: PositiveInt = Field(alias="num_local_experts")
    ffn_hidden_size: PositiveInt = Field(alias="intermediate_size")
    dense_ffn_hidden_size: NonNegativeInt | None = Field(None, alias="dense_intermediate_size")
    shared_ffn_hidden_size: PositiveInt = Field(alias="shared_intermediate_size")
    normalize: Literal[True] = Field(True, alias="norm_topk_prob")
    routed_scale: PositiveFloat = Field(2.0, alias="routed_scaling_factor")
    scoring_func: Literal["sigmoid"] = "sigmoid"
    use_routing_bias: Literal[True] = True


def _layer_numbers(stated: object) -> object:
    """A list of layers, or one in a string, as older files have it."""
    return [int(number) for number in stated.split(",") if number.strip()] if isinstance(stated, str) else stated


class _Step3p7(_NoAttention, _Layered):
    """Step-3.7: MiniMax-M2's routing and a scale; some layers clamp their SwiGLU."""

    FACTS: ClassVar = _MinimaxM2.FACTS
    first_dense_layers: NonNegativeInt | None = Field(3, alias="first_k_dense_replace")
    moe_layers_enum: Annotated[list[int] | None, BeforeValidator(_layer_numbers)] = None
    num_experts: PositiveInt = Field(
        validation_alias=AliasChoices("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts")
    )
    top_k: PositiveInt = Field(validation_alias=AliasChoices("num_experts_per_tok", "moe_top_k"))
    shared_ffn_hidden_size: PositiveInt = Field(validation_alias=AliasChoices("share_expert_dim", "share_expert_dims"))
    normalize: Literal[True] = Field(True, alias="norm_expert_weight")
    routed_scale: PositiveFloat = Field(1.0, alias="moe_router_scaling_factor")
    scoring_func: Literal["sigmoid"] = Field(
        "sigmoid", validation_alias=AliasChoices("moe_router_activation", "scoring_func")
    )
    use_moe_router_bias: Literal[True] = True
    swiglu_limits: list[float | None] = Field(default_factory=list)

    @property
    def routed_layers(self) -> list[int]:
        if self.layer_kinds is None and self.moe_layers_enum is not None:
            return sorted({*self.moe_layers_enum} & {*range(self.num_layers)})
        return super().routed_layers

    def spec(self) -> dict[str, Any]:
        clamped = {"activation": "clamped_swiglu"} if any(self.swiglu_limits) else {}
        return {**super().spec(), **clamped}


class _Gemma4(_NoAttention, _Family):
    """Gemma 4: experts stand beside the dense FFN of each layer, which is added to theirs as a shared expert is."""

    FACTS: ClassVar = {"normalize": True, "router_scales": True}
    tied_embeddings: bool = Field(True, alias="tie_word_embeddings")
    top_k: PositiveInt = Field(alias="top_k_experts")
    shared_ffn_hidden_size: PositiveInt = Field(alias="intermediate_size")
    normalize: Literal[True] = Field(True, alias="norm_topk_prob")
    hidden_act: str = Field("gelu_pytorch_tanh", alias="hidden_activation")
    enable_moe_block: bool = False
    use_double_wide_mlp: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _has_experts(cls, stated: dict[str, Any]) -> dict[str, Any]:
        if not stated.get("enable_moe_block") or "num_experts" not in stated:
            raise UserError("enable_moe_block: false, or missing, or without num_experts: this model has no experts")
        return stated


class _Llama4(_Family):
    """Llama 4: experts in every layer (Scout) or in every second (Maverick), whose weights scale what experts take."""

    FACTS: ClassVar = {"score_function": "sigmoid", "scales_inputs": True}
    num_experts: PositiveInt = Field(alias="num_local_experts")
    ffn_hidden_size: PositiveInt = Field(alias="intermediate_size")
    dense_ffn_hidden_size: NonNegativeInt | None = Field(None, alias="intermediate_size_mlp")
    normalize: Literal[False] = Field(False, alias="norm_topk_prob")
    interleave_moe_layer_step: PositiveInt = 1
    moe_layers: list[int] | None = None

    @property
    def routed_layers(self) -> list[int]:
        step = self.interleave_moe_layer_step
        return self.moe_layers or list(range(step - 1, self.num_layers, step))

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "shared_ffn_hidden_size": self.ffn_hidden_size}  # one, as wide as a routed one


class _Minimax(_NoAttention, _Mixtral):
    """MiniMax-01: Mixtral's routing; most layers have linear attention."""


class _GptOss(_Mixtral):
    FACTS: ClassVar = {"activation": "clamped_swiglu", "expert_bias": True, "router_bias": True}
    ATTENTION: ClassVar = {"sinks": True}
    BIASES: ClassVar = ("attention_bias",)
    head_dim: PositiveInt  # not a share of the hidden size here
    attention_bias: bool = True


class _Olmoe(_Family):
    ATTENTION: ClassVar = {"qk_norm": "all_heads"}
    ffn_hidden_size: PositiveInt = Field(alias="intermediate_size")


class _Molmoe(_Olmoe):
    """MolmoE's first published files, which leave the rest to the code beside them."""

    BIASES: ClassVar = ("qkv_bias",)
    vocab_size: PositiveInt = Field(validation_alias=AliasChoices("embedding_size", "vocab_size"))
    num_experts: PositiveInt = 64
    top_k: PositiveInt = Field(8, alias="num_experts_per_tok")
    normalize: Literal[False] = Field(False, alias="norm_topk_prob")


class _Molmo(_Family):
    """The language model of a Molmo with experts, by OLMo's keys."""

    BIASES: ClassVar = ("attention_bias", "qkv_bias")
    num_layers: PositiveInt = Field(alias="n_layers")
    hidden_size: PositiveInt = Field(alias="d_model")
    vocab_size: PositiveInt = Field(validation_alias=AliasChoices("embedding_size", "vocab_size"))
    tied_embeddings: bool = Field(alias="weight_tying")
    num_experts: PositiveInt = Field(alias="moe_num_experts")
    top_k: PositiveInt = Field(alias="moe_top_k")
    ffn_hidden_size: PositiveInt | None = Field(None, alias="mlp_hidden_size")  # gate and up projection together
    mlp_ratio: PositiveInt | None = None
    normalize: Literal[False] = Field(False, alias="norm_topk_prob")
    num_heads: PositiveInt = Field(alias="n_heads")
    num_kv_heads: PositiveInt | None = Field(None, alias="n_kv_heads")
    attention_bias: bool = Field(False, alias="include_bias")
    attention_layer_norm: bool = False
    hidden_act: Literal["swiglu"] = Field("swiglu", alias="activation_type")
    block_type: Literal["moe"] = "moe"
    moe_shared_expert: Literal[False] = False
    moe_interleave: Literal[False] = False

    @model_validator(mode="after")
    def _check_width(self) -> _Molmo:
        if self.ffn_hidden_size is None and self.mlp_ratio is None:
            raise UserError("mlp_ratio: missing; expected a whole number from 1")
        return self

    def spec(self) -> dict[str, Any]:
        width = self.ffn_hidden_size or self.mlp_ratio * self.hidden_size
        return {**super().spec(), "ffn_hidden_size": width // 2}

    def attention(self) -> dict[str, Any]:
        return {**super().attention(), "qk_norm": "all_heads" if self.attention_layer_norm else "none"}


class _Qwen3(_Family):
    ATTENTION: ClassVar = {"qk_norm": "head"}
    num_kv_heads: PositiveInt = Field(4, alias="num_key_value_heads")
    dense_layers: list[int] = Field(default_factory=list, alias="mlp_only_layers")
    # The first in files of later transformers.
    num_experts: PositiveInt = Field(validation_alias=AliasChoices("num_local_experts", "num_experts"))
    decoder_sparse_step: PositiveInt = 1

    @property
    def routed_layers(self) -> list[int]:
        step = self.decoder_sparse_step
        return [layer for layer in range(step - 1, self.num_layers, step) if layer not in self.dense_layers]


class _Qwen3Vl(_Qwen3):
    """Weights are normalised, whatever the file says."""

    FACTS: ClassVar = {"normalize": True}
    num_kv_heads: PositiveInt = Field(16, alias="num_key_value_heads")
    normalize: bool = Field(True, alias="norm_topk_prob")


class _Mellum(_Qwen3, _Layered):
    """Qwen3's routing; later files list the kind of each layer, none of which may be windowed."""

    routed_layers = _Layered.routed_layers

    first_dense_layers: Literal[0] = 0
    head_dim: PositiveInt = 128
    layer_types: list[Literal["full_attention"]] = Field(default_factory=list)


class _Qwen2(_Qwen3):
    FACTS: ClassVar = {"shared_expert_gate": True}
    ATTENTION: ClassVar = {}
    BIASES: ClassVar = ("qkv_bias",)
    num_kv_heads: PositiveInt = Field(16, alias="num_key_value_heads")
    num_experts: PositiveInt
    shared_ffn_hidden_size: PositiveInt = Field(alias="shared_expert_intermediate_size")
    qkv_bias: bool = True


class _Qwen3Next(_NoAttention, _Qwen3):
    """Most layers have linear attention."""

    FACTS: ClassVar = {"shared_expert_gate": True}
    num_experts: PositiveInt
    shared_ffn_hidden_size: PositiveInt = Field(alias="shared_expert_intermediate_size")


class _Qwen35(_Qwen3Next):
    """Qwen3.5: Qwen3-Next's layers; all have experts and weights are normalised, whatever the file says."""

    FACTS: ClassVar = {"shared_expert_gate": True, "normalize": True}
    normalize: bool = Field(True, alias="norm_topk_prob")

    @property
    def routed_layers(self) -> list[int]:
        return list(range(self.num_layers))


class _Qwen4(_Qwen35):
    """Qwen4's experiments: Qwen3.5's layers, whose weights the file says to normalise, or not."""

    FACTS: ClassVar = _Qwen3Next.FACTS


# Files of models that see, hear and read hold the language model's keys below one of these.
_NESTED = ("thinker_config", "text_config", "llm_config")

_FAMILIES: dict[str, type[_Family]] = {
    "deepseek": _Deepseek,
    "deepseek_v2": _DeepseekV2,
    "deepseek_v3": _DeepseekV3,
    "axk1": _DeepseekV3,
    "bailing_hybrid": _BailingHybrid,
    "deepseek_ocr2": _DeepseekOcr2,
    "deepseek_ref": _DeepseekRef,
    "deepseek_v32": _DeepseekV32,
    "deepseek_v4": _DeepseekV4,
    "dots1": _Dots1,
    "exaone_moe": _ExaoneMoe,
    "flex_olmo": _Olmoe,
    "gemma4": _Gemma4,
    "glm4_moe": _Glm4,
    "glm4_moe_lite": _Glm4Lite,
    "glm4v_moe": _Glm4v,
    "glm5_next": _V3Indexed,
    "glm_moe_dsa": _V3Indexed,
    "gpt_oss": _GptOss,
    "hunyuan_v1_moe": _HunyuanV1,
    "hy_v4": _V3Indexed,
    "kimi_k2": _DeepseekV3,
    "kimi_linear": _KimiLinear,
    "llama4": _Llama4,
    "mellum": _Mellum,
    "mimo_v2_flash": _MimoV2,
    "minimax": _Minimax,
    "minimax_m2": _MinimaxM2,
    "minimax_m3": _MinimaxM3,
    "minimax_m3_vl": _MinimaxM3,
    "mixtral": _Mixtral,
    "molmo": _Molmo,
    "molmoe": _Molmoe,
    "nemotron_h": _NemotronH,
    "olmoe": _Olmoe,
    "qwen2_moe": _Qwen2,
    "qwen3_5_moe": _Qwen35,
    "qwen3_moe": _Qwen3,
    "qwen3_next": _Qwen3Next,
    "qwen3_omni_moe": _Qwen3,
    "qwen3_vl_moe": _Qwen3Vl,
    "qwen4_exp": _Qwen4,
    "solar_open": _SolarOpen,
    "step3p5": _Step3p7,  # the language model of step3p7
    "step3p7": _Step3p7,
}
_EXPECTED_EXPERTS = "expected a mixture of experts"

_Spec = TypeVar("_Spec", bound=Strict)


def read_hf_config(path: Path, kind: type[_Spec]) -> _Spec:
    """Read a config.json, or a folder that holds one, as a ``ModelSpec``, which is ``kind``.

    The name comes from the file's ``_name_or_path`` or its architecture, the source from its content: copies of one
    file give the same fields wherever they lie.

    Raises:
        ValueError: one line that names the file, the key, the value and what is allowed, and ends with the way on.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = read_bytes(file, MOST_CONFIG_BYTES)
    except OSError as error:
        hint = "" if file.suffix == ".json" else "; files are read from this machine, nothing is fetched from a hub"
        raise UserError(f"{file}: cannot read a model's config.json: {error.strerror}{hint}") from None
    values = parse_json(content, file, infinities=True)
    if not isinstance(values, dict):
        raise UserError(f"{file}: expected keys with values, got {type(values).__name__}")
    with saying(_by_hand(_language_model(values))):
        return spec_of(values, kind, file, f"config.json by path, sha256 {hashlib.sha256(content).hexdigest()}")


def spec_of(values: Mapping[str, Any], kind: type[_Spec], where: Path, source: str) -> _Spec:
    """A config's values as a ``ModelSpec``, which is ``kind``; ValueError as ``read_hf_config``, without the way on."""
    values = _language_model(values)
    family = values.get("model_type")
    family = family.removesuffix("_text") if isinstance(family, str) else family
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UserError(f"{where}: model_type {brief(family)}: no family that is known here")
    if family == "deepseek" and values.get("kv_lora_rank") is not None:
        family = "deepseek_v2"  # which was first published under this model_type
    nulls = _FAMILIES[family].NULLS
    stated = {key: value for key, value in values.items() if value is not None or key in nulls}
    fields = validated(_FAMILIES[family], stated, where).spec()
    known = {key: fields[key] for key in kind.model_fields if key in fields}
    return validated(kind, {"name": _name(stated), "source": source, **known}, where)


def _language_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the language model, where they are nested; with those names of the whole that count."""
    inner = next((values[key] for key in _NESTED if isinstance(values.get(key), dict)), None)
    if inner is None:
        return values
    above = {key: values[key] for key in ("_name_or_path", "architectures", "tie_word_embeddings") if key in values}
    kind = {} if values.get("model_type") is None else {"model_type": values["model_type"]}
    return _language_model({**kind, **inner, **above})


def _by_hand(values: Mapping[str, Any]) -> str:
    """The way on from a file that is refused: its shape by hand, with what its keys seem to say, guesses marked."""
    shape = {
        field: next((values[key] for key in keys if values.get(key) is not None), None)
        for field, keys in _USUAL.items()
    }
    if shape["num_experts"] is None:
        return f"; {_EXPECTED_EXPERTS}, and no key states how many there are ({', '.join(_USUAL['num_experts'])})"
    guesses: dict[str, Any] = {"score_function": "softmax", "normalize": True}
    if shape["score_function"] not in (None, "softmax", "sigmoid", "sqrtsoftplus"):  # Each expert is scored by itself.
        guesses["score_function"], shape["score_function"] = "sigmoid", None
    count, width, first = values.get("n_shared_experts"), shape["ffn_hidden_size"], values.get("first_k_dense_replace")
    if shape["shared_ffn_hidden_size"] is None and _is_size(count) and _is_size(width):
        guesses["shared_ffn_hidden_size"] = count * width
    if _is_size(first) and _is_size(shape["num_layers"]) and shape["num_layers"] > first:
        shape["num_layers"] -= first  # MoE layers alone
    guesses = {field: guess for field, guess in guesses.items() if shape[field] is None}
    shape |= guesses
    wanted = {field: value for field, value in shape.items() if value is not None or field in _NEEDED}
    stated = ", ".join(f"{field}: {'...' if value is None else json.dumps(value)}" for field, value in wanted.items())
    marks = f" (guessed: {', '.join(guesses)})" if guesses else ""
    return f"; the way on is a config with the shape by hand: model: {{{stated.replace(chr(34), '')}}}{marks}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _name(stated: Mapping[str, Any]) -> str:
    """Last part of the file's own name for the model, else its architecture: nothing of where the file lies."""
    parts = re.findall(r"[\w.-]+", str(stated.get("_name_or_path") or ""))
    if parts and parts[-1].strip("."):
        return parts[-1]
    architectures = stated.get("architectures")
    named = isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    return architectures[0] if named else stated["model_type"]
