"""A model's shape from a Hugging Face config.json, without the transformers package.

Each family of models names the same facts by its own keys; ``_READERS`` has one short reader per
``model_type``. A size that the file does not state is an error; a default is taken only where the
family's own configuration class has one that older files rely on. What no spec can express (another
activation, dense layers in between) is refused, not guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REQUIRED: Any = object()


def read_hf_config(path: Path) -> dict[str, Any]:
    """Read a config.json, or a folder that holds one, into the fields of a ``ModelSpec``.

    The name comes from the file's ``_name_or_path`` or its architecture, the source from the file's
    content: two copies of one file give the same fields wherever they lie.

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
    config = _Config(file, values)
    reader = _READERS[config.choice("model_type", tuple(_READERS))]
    digest = hashlib.sha256(content).hexdigest()
    return {"name": _name(values), "source": f"config.json by path, sha256 {digest}", **reader(config)}


def _name(values: dict[str, Any]) -> str:
    """Last part of the file's own name for the model, else its architecture: nothing of where the file lies."""
    parts = re.findall(r"[\w.-]+", str(values.get("_name_or_path") or ""))
    if parts and parts[-1].strip("."):
        return parts[-1]
    architectures = values.get("architectures")
    named = isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    return architectures[0] if named else values["model_type"]


class _Config:
    """The values of one file; every question names its key in the error. null counts as not stated."""

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values

    def size(self, key: str, default: Any = _REQUIRED, least: int = 1) -> Any:
        return self._get(key, default, lambda v: type(v) is int and v >= least, f"a whole number from {least}")

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: type(v) in (int, float) and 0 < v < float("inf"), "a number above 0")

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: type(v) is bool, "true or false")

    def choice(self, key: str, allowed: tuple[Any, ...], default: Any = _REQUIRED) -> Any:
        return self._get(
            key,
            default,
            lambda v: any(type(v) is type(a) and v == a for a in allowed),
            ("one of " if len(allowed) > 1 else "") + ", ".join(json.dumps(a) for a in allowed),
        )

    def _get(self, key: str, default: Any, fits: Callable[[Any], bool], allowed: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.file}: {key}: missing; expected {allowed}")
            return default
        if not fits(value):
            raise ValueError(f"{self.file}: {key}: expected {allowed}, got {value!r}")
        return value


def _common(config: _Config, experts_key: str, ffn_key: str) -> dict[str, Any]:
    config.choice("hidden_act", ("silu",), "silu")
    num_experts = config.size(experts_key)
    return {
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "vocab_size": config.size("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "num_experts": num_experts,
        "top_k": _top_k(config, "num_experts_per_tok", num_experts),
        "ffn_hidden_size": config.size(ffn_key),
    }


def _top_k(config: _Config, key: str, num_experts: int) -> int:
    top_k = config.size(key)
    if top_k > num_experts:
        raise ValueError(f"{config.file}: {key}: expected at most the {num_experts} experts, got {top_k}")
    return top_k


def _attention(config: _Config, bias: str = "none", qk_norm: str = "none") -> dict[str, Any]:
    num_heads = config.size("num_attention_heads")
    return {
        "num_heads": num_heads,
        "num_kv_heads": config.size("num_key_value_heads", num_heads),
        "head_dim": config.size("head_dim", config.size("hidden_size") // num_heads),
        "bias": bias,
        "qk_norm": qk_norm,
    }


def _bias(config: _Config, key: str, default: bool, kind: str = "all") -> str:
    return kind if config.flag(key, default) else "none"


def _first_layers(config: _Config) -> dict[str, int]:
    """Qwen's dense layers, which must be the first ones; every other layer is an MoE layer."""
    config.choice("decoder_sparse_step", (1,), 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ValueError(f"{config.file}: mlp_only_layers: expected [0, 1, ...], the first layers, got {dense!r}")
    if not dense:
        return {}
    return {"first_dense_layers": len(dense), "dense_ffn_hidden_size": config.size("intermediate_size")}


def _olmoe(config: _Config) -> dict[str, Any]:
    return {
        **_common(config, "num_experts", "intermediate_size"),
        "normalize": config.flag("norm_topk_prob"),
        "attention": _attention(config, bias=_bias(config, "attention_bias", False), qk_norm="all_heads"),
    }


def _mixtral(config: _Config) -> dict[str, Any]:
    return {
        **_common(config, "num_local_experts", "intermediate_size"),
        "normalize": True,  # softmax over the selected logits
        "attention": _attention(config),
    }


def _qwen2_moe(config: _Config) -> dict[str, Any]:
    return {
        **_common(config, "num_experts", "moe_intermediate_size"),
        **_first_layers(config),
        "shared_ffn_hidden_size": config.size("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
        "normalize": config.flag("norm_topk_prob"),
        "attention": _attention(config, bias=_bias(config, "qkv_bias", True, kind="qkv")),
    }


def _qwen3_moe(config: _Config) -> dict[str, Any]:
    renamed = "num_local_experts" in config.values  # by later releases of transformers, where they save the file
    return {
        **_common(config, "num_local_experts" if renamed else "num_experts", "moe_intermediate_size"),
        **_first_layers(config),
        "normalize": config.flag("norm_topk_prob"),
        "attention": _attention(config, bias=_bias(config, "attention_bias", False), qk_norm="head"),
    }


def _gpt_oss(config: _Config) -> dict[str, Any]:
    config.size("head_dim")  # not a share of the hidden size here, so it has to be stated
    return {
        **_common(config, "num_local_experts", "intermediate_size"),
        "activation": "clamped_swiglu",
        "expert_bias": True,
        "router_bias": True,
        "normalize": True,  # softmax over the selected logits
        "attention": {**_attention(config, bias=_bias(config, "attention_bias", True)), "sinks": True},
    }


def _deepseek(config: _Config) -> dict[str, Any]:
    config.choice("scoring_func", ("softmax",), "softmax")
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    return {
        **_deepseek_layers(config),
        **(_groups(config, score_experts=1) if method == "group_limited_greedy" else {}),
        "routed_scale": config.number("routed_scaling_factor", 1.0),
    }


def _deepseek_v3(config: _Config) -> dict[str, Any]:
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    return {
        **_deepseek_layers(config),
        **_groups(config, score_experts=2),
        "score_function": "sigmoid",
        "selection_bias": True,
        "routed_scale": config.number("routed_scaling_factor"),
    }


def _deepseek_layers(config: _Config) -> dict[str, Any]:
    """What all versions of DeepSeek share; latent attention came with the second."""
    config.choice("moe_layer_freq", (1,), 1)
    fields = _common(config, "n_routed_experts", "moe_intermediate_size")
    first_dense = config.size("first_k_dense_replace", least=0)
    if first_dense:
        fields |= {"first_dense_layers": first_dense, "dense_ffn_hidden_size": config.size("intermediate_size")}
    latent = config.values.get("model_type") != "deepseek" or config.size("kv_lora_rank", None) is not None
    return {
        **fields,
        "shared_ffn_hidden_size": config.size("n_shared_experts", 0, least=0) * fields["ffn_hidden_size"],
        "normalize": config.flag("norm_topk_prob"),
        "attention": _latent_attention(config)
        if latent
        else _attention(config, bias=_bias(config, "attention_bias", False)),
    }


def _latent_attention(config: _Config) -> dict[str, Any]:
    return {
        "num_heads": config.size("num_attention_heads"),
        "q_lora_rank": config.size("q_lora_rank", None),
        **{key: config.size(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    }


def _groups(config: _Config, score_experts: int) -> dict[str, int]:
    groups = config.size("n_group", 1)
    if groups == 1:
        return {}
    return {
        "num_groups": groups,
        "top_groups": config.size("topk_group"),
        "group_score_experts": score_experts,
    }


def _molmoe(config: _Config) -> dict[str, Any]:
    """MolmoE's first published files, which leave the experts to the code beside them: 64, of which 8 are chosen."""
    experts = {"num_experts": 64, "num_experts_per_tok": 8}
    filled = _Config(config.file, {**experts, **config.values})
    return {
        **_common(filled, "num_experts", "intermediate_size"),
        "vocab_size": config.size("embedding_size", None) or config.size("vocab_size"),
        "normalize": False,
        "attention": _attention(config, bias=_bias(config, "qkv_bias", False, kind="qkv"), qk_norm="all_heads"),
    }


def _molmo(config: _Config) -> dict[str, Any]:
    """The language model of a Molmo with experts, by OLMo's keys."""
    config.choice("block_type", ("moe",), "moe")
    config.choice("activation_type", ("swiglu",), "swiglu")
    config.choice("moe_shared_expert", (False,), False)
    config.choice("moe_interleave", (False,), False)
    hidden, num_heads, num_experts = config.size("d_model"), config.size("n_heads"), config.size("moe_num_experts")
    # Gate and up projection together, of which one half gates the other.
    gated_width = config.size("mlp_hidden_size", None) or config.size("mlp_ratio") * hidden
    biased = "all" if config.flag("include_bias", False) else _bias(config, "qkv_bias", False, kind="qkv")
    return {
        "num_layers": config.size("n_layers"),
        "hidden_size": hidden,
        "vocab_size": config.size("embedding_size", None) or config.size("vocab_size"),
        "tied_embeddings": config.flag("weight_tying"),
        "num_experts": num_experts,
        "top_k": _top_k(config, "moe_top_k", num_experts),
        "ffn_hidden_size": gated_width // 2,
        "normalize": False,
        "attention": {
            "num_heads": num_heads,
            "num_kv_heads": config.size("n_kv_heads", num_heads),
            "head_dim": config.size("head_dim", hidden // num_heads),
            "bias": biased,
            "qk_norm": "all_heads" if config.flag("attention_layer_norm", False) else "none",
        },
    }


_READERS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "molmo": _molmo,
    "molmoe": _molmoe,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
