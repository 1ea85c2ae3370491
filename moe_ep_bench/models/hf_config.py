"""Read a model's shape from a Hugging Face config.json, without the transformers package.

Families name the same facts by their own keys: ``_FAMILIES`` has a row for each ``model_type``. A missing size is an
error. A default holds only where the family's own configuration class has one that older files rely on. What no spec
can express (another activation, dense layers in between) is refused, not guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_REQUIRED: Any = object()


def read_hf_config(path: Path) -> dict[str, Any]:
    """Read a config.json, or a folder that holds one, into the fields of a ``ModelSpec``.

    The name comes from the file's ``_name_or_path`` or its architecture, the source from its content: copies of one
    file give the same fields wherever they lie.

    Raises:
        ValueError: one line that names the file, the key, the value and what is allowed.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: cannot read a model's config.json: {error.strerror}") from None
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected keys with values, got {type(values).__name__}")
    family = _Config(file, values, _Family()).choice("model_type", tuple(_FAMILIES))
    if family == "deepseek" and values.get("kv_lora_rank") is not None:
        family = "deepseek_v2"  # which was first published under this model_type
    source = f"config.json by path, sha256 {hashlib.sha256(content).hexdigest()}"
    return {"name": _name(values), "source": source, **_fields(file, values, _FAMILIES[family])}


def _name(values: Mapping[str, Any]) -> str:
    """Last part of the file's own name for the model, else its architecture: nothing of where the file lies."""
    parts = re.findall(r"[\w.-]+", str(values.get("_name_or_path") or ""))
    if parts and parts[-1].strip("."):
        return parts[-1]
    architectures = values.get("architectures")
    named = isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    return architectures[0] if named else values["model_type"]


@dataclass(frozen=True)
class _Family:
    """How the files of one ``model_type`` state a model.

    Attributes:
        keys: the family's own for a usual key; of several the first that is stated counts.
        stated: usual keys without a default in this family.
        filled: values that old files leave to the code beside them.
        only: values that a spec can express, by key; the first is the default.
        switches: flags of attention: key, default, and the fields that it sets.
        attention: fields of attention that hold for the whole family; None = latent attention.
        facts: fields of the spec that hold for the whole family.
        more: reads what only this family states.
    """

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stated: tuple[str, ...] = ()
    filled: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _SILU)
    switches: tuple[tuple[str, bool, Mapping[str, str]], ...] = ()
    attention: Mapping[str, Any] | None = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[_Config], dict[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class _Config:
    """The values of one file, by the family's usual keys; each error names the file's own. null = not stated."""

    file: Path
    values: Mapping[str, Any]
    family: _Family

    def size(self, key: str, default: Any = _REQUIRED, least: int = 1) -> Any:
        return self._get(key, default, lambda v: type(v) is int and v >= least, f"a whole number from {least}")

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: type(v) in (int, float) and 0 < v < float("inf"), "a number above 0")

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: type(v) is bool, "true or false")

    def choice(self, key: str, allowed: tuple[Any, ...], default: Any = _REQUIRED) -> Any:
        words = ("one of " if len(allowed) > 1 else "") + ", ".join(json.dumps(a) for a in allowed)
        return self._get(key, default, lambda v: any(type(v) is type(a) and v == a for a in allowed), words)

    def own(self, key: str) -> str:
        """The file's key for a usual one."""
        names = self.family.keys.get(key, (key,))
        return next((name for name in names if self.values.get(name) is not None), names[-1])

    def _get(self, key: str, default: Any, fits: Callable[[Any], bool], allowed: str) -> Any:
        name = self.own(key)
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED or key in self.family.stated:
                raise ValueError(f"{self.file}: {name}: missing; expected {allowed}")
            return default
        if not fits(value):
            raise ValueError(f"{self.file}: {name}: expected {allowed}, got {value!r}")
        return value


def _fields(file: Path, values: Mapping[str, Any], family: _Family) -> dict[str, Any]:
    """The fields of a ``ModelSpec``, without its name and source."""
    config = _Config(file, {**family.filled, **values}, family)
    for key, allowed in family.only.items():
        config.choice(key, allowed, allowed[0])
    num_experts, top_k = config.size("num_experts"), config.size("num_experts_per_tok")
    if top_k > num_experts:
        key = config.own("num_experts_per_tok")
        raise ValueError(f"{file}: {key}: expected at most the {num_experts} experts, got {top_k}")
    found = {
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "vocab_size": config.size("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "num_experts": num_experts,
        "top_k": top_k,
        "attention": _attention(config),
        **family.facts,
        **family.more(config),
    }
    if "ffn_hidden_size" not in found:
        found["ffn_hidden_size"] = config.size("moe_intermediate_size")
    if "normalize" not in found:
        found["normalize"] = config.flag("norm_topk_prob")
    return found


def _attention(config: _Config) -> dict[str, Any]:
    family, num_heads = config.family, config.size("num_attention_heads")
    if family.attention is None:
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latents = {"q_lora_rank": config.size("q_lora_rank", None), **{key: config.size(key) for key in sizes}}
        return {"num_heads": num_heads, **latents}
    found = {
        "num_heads": num_heads,
        "num_kv_heads": config.size("num_key_value_heads", num_heads),
        "head_dim": config.size("head_dim", config.size("hidden_size") // num_heads),
        **family.attention,
    }
    for key, default, fields in family.switches:
        if config.flag(key, default):
            found |= fields
    return found


def _qwen(config: _Config) -> dict[str, Any]:
    """Dense layers, which must be the first ones."""
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ValueError(f"{config.file}: mlp_only_layers: expected [0, 1, ...], the first layers, got {dense!r}")
    return _dense(config, len(dense))


def _qwen2(config: _Config) -> dict[str, Any]:
    return {**_qwen(config), "shared_ffn_hidden_size": config.size("shared_expert_intermediate_size")}


def _dense(config: _Config, num_layers: int) -> dict[str, Any]:
    if num_layers == 0:
        return {}
    return {"first_dense_layers": num_layers, "dense_ffn_hidden_size": config.size("intermediate_size")}


def _deepseek(config: _Config) -> dict[str, Any]:
    """Dense layers, shared experts and groups."""
    methods = config.family.only["topk_method"]
    # A group's score is the sum of so many of its best experts'.
    score_experts = {"greedy": None, "group_limited_greedy": 1, "noaux_tc": 2}[
        config.choice("topk_method", methods, methods[0])
    ]
    groups = {}
    if score_experts and config.size("n_group", 1) > 1:
        groups = {"num_groups": config.size("n_group"), "top_groups": config.size("topk_group")}
        groups["group_score_experts"] = score_experts
    return {
        **_dense(config, config.size("first_k_dense_replace", least=0)),
        **groups,
        "shared_ffn_hidden_size": config.size("n_shared_experts", 0, least=0) * config.size("moe_intermediate_size"),
        "routed_scale": config.number("routed_scaling_factor", 1.0),
    }


def _molmo(config: _Config) -> dict[str, Any]:
    """The FFN's width: that of gate and up projection together."""
    width = config.size("mlp_hidden_size", None) or config.size("mlp_ratio") * config.size("hidden_size")
    return {"ffn_hidden_size": width // 2}


_SILU = {"hidden_act": ("silu",)}
_BIAS, _QKV_BIAS = ("attention_bias", False, {"bias": "all"}), ("qkv_bias", False, {"bias": "qkv"})
_QWEN_LAYERS = {**_SILU, "decoder_sparse_step": (1,)}
_DEEPSEEK_LAYERS = {**_SILU, "moe_layer_freq": (1,)}
_FFN = {"moe_intermediate_size": ("intermediate_size",)}
_LOCAL_EXPERTS = {"num_experts": ("num_local_experts",), **_FFN}
_VOCABULARY = {"vocab_size": ("embedding_size", "vocab_size")}
_SOFTMAX_OF_TOP_K = {"normalize": True}

_DEEPSEEK = _Family(
    keys={"num_experts": ("n_routed_experts",)},
    only={**_DEEPSEEK_LAYERS, "scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy")},
    switches=(_BIAS,),
    more=_deepseek,
)
_FAMILIES = {
    "deepseek": _DEEPSEEK,
    "deepseek_v2": replace(_DEEPSEEK, attention=None),
    "deepseek_v3": replace(
        _DEEPSEEK,
        stated=("routed_scaling_factor",),
        only={**_DEEPSEEK_LAYERS, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        attention=None,
        facts={"score_function": "sigmoid", "selection_bias": True},
    ),
    "gpt_oss": _Family(
        keys=_LOCAL_EXPERTS,
        stated=("head_dim",),  # not a share of the hidden size here
        switches=(("attention_bias", True, {"bias": "all"}),),
        attention={"sinks": True},
        facts={**_SOFTMAX_OF_TOP_K, "activation": "clamped_swiglu", "expert_bias": True, "router_bias": True},
    ),
    "mixtral": _Family(keys=_LOCAL_EXPERTS, facts=_SOFTMAX_OF_TOP_K),
    # The language model of a Molmo with experts, by OLMo's keys.
    "molmo": _Family(
        keys={
            "num_hidden_layers": ("n_layers",), "hidden_size": ("d_model",), "tie_word_embeddings": ("weight_tying",),
            "num_experts": ("moe_num_experts",), "num_experts_per_tok": ("moe_top_k",),
            "num_attention_heads": ("n_heads",), "num_key_value_heads": ("n_kv_heads",), **_VOCABULARY,
        },
        stated=("tie_word_embeddings",),
        only={
            "block_type": ("moe",), "activation_type": ("swiglu",), "moe_shared_expert": (False,),
            "moe_interleave": (False,),
        },
        switches=(
            _QKV_BIAS, ("include_bias", False, {"bias": "all"}),
            ("attention_layer_norm", False, {"qk_norm": "all_heads"}),
        ),
        facts={"normalize": False},
        more=_molmo,
    ),
    # MolmoE's first published files.
    "molmoe": _Family(
        keys={**_VOCABULARY, **_FFN},
        filled={"num_experts": 64, "num_experts_per_tok": 8},
        switches=(_QKV_BIAS,),
        attention={"qk_norm": "all_heads"},
        facts={"normalize": False},
    ),
    "olmoe": _Family(keys=_FFN, switches=(_BIAS,), attention={"qk_norm": "all_heads"}),
    "qwen2_moe": _Family(
        only=_QWEN_LAYERS,
        switches=(("qkv_bias", True, {"bias": "qkv"}),),
        facts={"shared_expert_gate": True},
        more=_qwen2,
    ),
    "qwen3_moe": _Family(
        keys={"num_experts": ("num_local_experts", "num_experts")},  # the first in files of later transformers
        only=_QWEN_LAYERS,
        switches=(_BIAS,),
        attention={"qk_norm": "head"},
        more=_qwen,
    ),
}  # fmt: skip
