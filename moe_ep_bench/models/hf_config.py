"""Read a model's shape from a Hugging Face config.json, without the transformers package.

``families.yaml`` says for each ``model_type`` by which keys its files state what a ``ModelSpec`` needs. One function
reads them all; the few families that compute something have a short one that comes before it. null stands for a key
that is missing. A missing size is an error. What no spec can express is refused, not guessed; attention that none can
express is None, and a whole model is refused then.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from moe_ep_bench.errors import UserError, brief, naming
from moe_ep_bench.files import is_whole_number, parse_json
from moe_ep_bench.models.spec import ModelSpec
from moe_ep_bench.presets import validated

BY_HAND = (
    "; the way on is a config with the shape by hand: "
    "model: {num_experts: ..., top_k: ..., hidden_size: ..., ffn_hidden_size: ...}"
)

# Fields of ``families.yaml`` that are sizes from 0 on, and those that are none; all others are sizes from 1 on.
_COUNTS = ("dense_ffn_hidden_size", "first_dense", "num_shared", "num_hash_layers")
_NO_SIZES = (
    *("routed_scale", "tied_embeddings", "normalize", "all_bias", "qkv_bias", "has_qk_norm"),
    *("hidden_act", "topk_method", "dense_layers", "routed_layers", "layer_kinds", "swiglu_limits"),
)
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Files of models that see, hear and read hold the language model's keys below one of these.
_NESTED = ("thinker_config", "text_config", "llm_config")


@dataclass(frozen=True)
class _Family:
    """A row of ``families.yaml``, with what it takes from others.

    Attributes:
        keys: by field, the keys that state it, and what a missing one means.
    """

    keys: Mapping[str, tuple[tuple[str, ...], Any]]
    expects: Mapping[str, Any]
    facts: Mapping[str, Any]
    attention: str
    nulls: tuple[str, ...]


@cache
def families() -> dict[str, _Family]:
    """All that are known, by their ``model_type``."""
    rows = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
    return {name: _family(name, rows) for name in rows if not name.startswith("_")}


def _family(name: str, rows: Mapping[str, Mapping[str, Any]]) -> _Family:
    keys: dict[str, tuple[tuple[str, ...], Any]] = {}
    values: dict[str, Any] = {"expects": {}, "facts": {}, "attention": "heads", "nulls": ()}

    def apply(row: Mapping[str, Any]) -> None:
        parents = row.get("like", [])
        for parent in parents if isinstance(parents, list) else [parents]:
            apply(rows[parent])
        for field, stated in row.get("keys", {}).items():
            text, default = stated if isinstance(stated, list) else (stated, keys[field][1])
            keys[field] = tuple(filter(None, text.split("|"))), default
        values["expects"] = values["expects"] | row.get("expects", {})
        values["facts"] = values["facts"] | row.get("facts", {})
        values.update({key: row[key] for key in ("attention", "nulls") if key in row})

    apply(rows[name])
    return _Family(keys, **values)


# ---- reading ---------------------------------------------------------------------------------------------------------


def load_hf_model(path: Path) -> ModelSpec:
    """Read a config.json, or a folder that holds one.

    The name comes from the file's ``_name_or_path`` or its architecture, the source from its content: copies of one
    file give the same fields wherever they lie.

    Raises:
        UserError: one line that names the file, the key, the value and what is allowed, and ends with the way on.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        hint = "" if file.suffix == ".json" else "; files are read from this machine, nothing is fetched from a hub"
        raise UserError(f"{file}: cannot read a model's config.json: {error.strerror}{hint}") from None
    values = parse_json(content, file)
    if not isinstance(values, dict):
        raise UserError(f"{file}: expected keys with values, got {type(values).__name__}")
    with naming("", BY_HAND):
        return spec_of(values, str(file), f"config.json by path, sha256 {hashlib.sha256(content).hexdigest()}")


def _keys_of(values: Mapping[str, Any]) -> Iterator[str]:
    """Keys of a config and of the parts inside it, however deep."""
    parts = [values]
    for part in parts:  # which grows
        yield from map(str, part)
        parts += [value for value in part.values() if isinstance(value, Mapping)]


def spec_of(values: Mapping[str, Any], where: str, source: str | None = None) -> ModelSpec:
    """The model that a config's values state; ``source``: None = ``where``.

    Raises:
        UserError: as ``load_hf_model``, without the way on.
    """
    whole, values = values, _language_model(values)
    name = values.get("model_type")
    name = name.removesuffix("_text") if isinstance(name, str) else name
    if not isinstance(name, str) or name not in families():
        if isinstance(name, str) and not any("expert" in key or "moe" in key for key in (name, *_keys_of(values))):
            raise UserError(f"{where}: model_type {brief(name)}: dense: it has no experts, so nothing is routed")
        raise UserError(f"{where}: model_type {brief(name)}: no family that is known here")
    if name == "deepseek" and values.get("kv_lora_rank") is not None:
        name = "deepseek_v2"  # which was first published under this model_type
    family = families()[name]
    stated = {key: value for key, value in values.items() if value is not None or key in family.nulls}
    with naming(where):
        fields = _spec_fields(family, stated | _PREPARE.get(name, dict)(stated))
    if name == "deepseek_ref" and "routed_scaling_factor" not in stated:
        fields["assumed"] = ("routed_scale",)
    named = {"name": _name(stated), "source": where if source is None else source}
    named["checkpoint_dtype"] = _checkpoint_dtype({**whole, **values})
    known = {key: value for key, value in fields.items() if key in ModelSpec.model_fields}
    return validated(ModelSpec, {**named, **known}, Path(where))


def _spec_fields(family: _Family, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ``ModelSpec``, and others; a UserError names the key, without the file."""
    for key, allowed in family.expects.items():
        choices = allowed if isinstance(allowed, list) else [allowed]
        given = stated[key] if isinstance(stated.get(key), list) else [stated.get(key, choices[0])]
        if wrong := [value for value in given if json.dumps(value) not in map(json.dumps, choices)]:
            listed = " or ".join(json.dumps(choice).strip('"') for choice in choices)
            raise UserError(f"expected {listed}, got {brief(wrong[0])}", key)
    read = {field: _read(field, family, stated) for field in family.keys if field not in family.facts}
    values = SimpleNamespace(**read, **family.facts)
    if values.top_k > values.num_experts:
        key = next((key for key in family.keys["top_k"][0] if key in stated), "top_k")
        raise UserError(f"expected at most the {values.num_experts} experts, got {values.top_k}", key)
    layers = _routed_layers(values, stated)
    first, dense_key = layers[0] if layers else values.num_layers, family.keys["dense_ffn_hidden_size"][0][0]
    has_dense = len(layers) < values.num_layers and stated.get(dense_key, 0) is not None
    if has_dense and not values.dense_ffn_hidden_size:
        got = "0" if dense_key in stated else "missing"
        raise UserError(f"{dense_key}: {got}; expected a whole number from 1")
    is_leading = layers == [*range(first, values.num_layers)]
    activation = "swiglu" if values.hidden_act in ("silu", "swiglu") else "other_gated"
    # A group's score is the sum of so many of its best experts'.
    scored = {"group_limited_greedy": 1, "noaux_tc": 2}.get(values.topk_method) if values.num_groups > 1 else None
    return {
        **vars(values),
        "dense_ffn_hidden_size": values.dense_ffn_hidden_size if has_dense else 0,
        "first_dense_layers": first if is_leading else 0,
        "listed_moe_layers": None if is_leading else tuple(layers),
        "shared_ffn_hidden_size": values.shared_ffn_hidden_size or values.num_shared * values.ffn_hidden_size,
        "activation": "clamped_swiglu" if any(values.swiglu_limits or ()) else activation,
        "quantized": _quantized(stated),
        "num_hash_layers": min(values.num_hash_layers, values.num_layers),
        "attention": _attention(family.attention, values),
        "num_groups": values.num_groups if scored else None,
        "top_groups": values.top_groups if scored else None,
        "group_score_experts": scored,
        **family.facts,
    }


def _read(field: str, family: _Family, stated: Mapping[str, Any]) -> Any:
    """A field's value by the first of its keys that is there, checked; or what a missing one means."""
    keys, default = family.keys[field]
    key = next((key for key in keys if key in stated), None)
    if key is None:
        if default == "needed":
            raise UserError(f"{keys[0]}: missing")
        return default
    if stated[key] is None:  # A value of its own, or it would not be here.
        return None
    value, least = stated[key], int(field not in _COUNTS)
    if field not in _NO_SIZES and not is_whole_number(value, least):
        raise UserError(f"expected a whole number from {least}, got {brief(value)}", key)
    return value


def _routed_layers(values: SimpleNamespace, stated: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers that have experts, ascending."""
    num_layers, first, kinds = values.num_layers, values.first_dense, values.layer_kinds
    if type(kinds) is int and kinds == 1:
        kinds = None  # one number for all
    if kinds is not None:
        key = "mlp_layer_types" if "mlp_layer_types" in stated else "moe_layer_freq"
        if not isinstance(kinds, list):
            raise UserError(f"expected 1 or a list, got {brief(kinds)}", key)
        if not all(kind in ("dense", "sparse", 0, 1) for kind in kinds):
            raise UserError(f"expected dense and sparse layers, got {brief(kinds)}", key)
        if len(kinds) < num_layers:
            raise UserError(f"expected the kinds of {num_layers} layers, got {len(kinds)}", key)
        return [layer for layer in range(num_layers) if kinds[layer] in ("sparse", 1)]
    if values.routed_layers is not None:
        return sorted(values.routed_layers)
    if first is None:
        raise UserError("missing", "first_k_dense_replace")
    step, dense = values.layer_step, values.dense_layers
    return [layer for layer in range(first, num_layers) if (layer + 1) % step == 0 and layer not in dense]


def _attention(kind: str, values: SimpleNamespace) -> dict[str, Any] | None:
    """Fields of the spec's attention."""
    if kind == "none":
        return None
    if kind == "latent":
        return {name: getattr(values, name) for name in ("num_heads", *_LATENT_SIZES)}
    return {
        "num_heads": values.num_heads,
        "num_kv_heads": values.num_kv_heads or values.num_heads,
        "head_dim": values.head_dim or values.hidden_size // values.num_heads,
        "bias": "all" if values.all_bias else "qkv" if values.qkv_bias else "none",
        "qk_norm": values.qk_norm if values.has_qk_norm else "none",
        "sinks": values.sinks,
    }


def _quantized(stated: Mapping[str, Any]) -> str:
    """fp8 checkpoints quantise all linear layers, but for those whose modules they name; others their experts."""
    how = stated.get("quantization_config")
    if not isinstance(how, dict) or how.get("quant_method") != "fp8":
        return "experts"
    kept = how.get("modules_to_not_convert") or how.get("ignored_layers")
    kept = kept if isinstance(kept, list) else []
    keeps_attention = any(str(name).endswith(("attn", "attention", "o_proj")) for name in kept)
    return "experts" if keeps_attention else "all_linear"


def _by_blocks(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Nemotron-H: every block is attention, Mamba, a dense FFN or a mixture of experts; blocks are what counts."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    blocks = next((stated[key] for key in keys if isinstance(stated.get(key), list | str)), [])
    routed = [layer for layer, kind in enumerate(blocks) if kind in ("moe", "E")]
    if blocks and not routed:
        raise UserError("model_type 'nemotron_h': dense: no block of it has experts, so nothing is routed")
    no_dense = {} if any(kind in ("mlp", "-") for kind in blocks) else {"intermediate_size": None}
    return {"num_hidden_layers": len(blocks), "moe_layers": routed, **no_dense}


def _same_of_all(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Hunyuan: one number for all layers, where a file lists it for each."""
    lists = {key: stated[key] for key in ("num_experts", "moe_topk") if isinstance(stated.get(key), list)}
    return {key: values[0] for key, values in lists.items() if values and values.count(values[0]) == len(values)}


def _split_layers(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Step-3.5: a list of layers in a text; layers beyond the model's are those of multi-token prediction."""
    listed = stated.get("moe_layers_enum")
    if not isinstance(listed, str):
        return {}
    if not re.fullmatch(r"[\d, ]*", listed):
        raise UserError(f"expected numbers of layers, got {brief(listed)}", "moe_layers_enum")
    layers = [int(number) for number in listed.split(",") if number.strip()]
    most = stated.get("num_hidden_layers")
    return {"moe_layers_enum": [layer for layer in layers if not is_whole_number(most, 1) or layer < most]}


def _check_experts(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 4: some have none."""
    if stated.get("enable_moe_block") is not True or "num_experts" not in stated:
        raise UserError("false, or missing, or without num_experts: this model has no experts", "enable_moe_block")
    return {}


def _halve_width(stated: Mapping[str, Any]) -> dict[str, Any]:
    """OLMo's keys state the width of gate and up projection together, or its ratio to the hidden size."""
    if (width := stated.get("mlp_hidden_size")) is None:
        ratio, hidden = stated.get("mlp_ratio"), stated.get("d_model")
        if not is_whole_number(ratio, 1):
            raise UserError(f"{'missing; ' * (ratio is None)}expected a whole number from 1", "mlp_ratio")
        width = ratio * hidden if is_whole_number(hidden, 1) else 2
    return {"mlp_hidden_size": width // 2 if is_whole_number(width, 1) else width}


_PREPARE: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gemma4": _check_experts,
    "hunyuan_v1_moe": _same_of_all,
    "molmo": _halve_width,
    "nemotron_h": _by_blocks,
    "step3p5": _split_layers,
    "step3p7": _split_layers,
}
"""By family, keys that it computes of those that a file states."""


def _language_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the language model, where they are nested; with those names of the whole that count."""
    inner = next((values[key] for key in _NESTED if isinstance(values.get(key), dict)), None)
    if inner is None:
        return values
    above = {key: values[key] for key in ("_name_or_path", "architectures", "tie_word_embeddings") if key in values}
    kind = {} if values.get("model_type") is None else {"model_type": values["model_type"]}
    return _language_model({**kind, **inner, **above})


def _checkpoint_dtype(values: Mapping[str, Any]) -> str:
    """``ModelSpec.checkpoint_dtype`` by ``quantization_config``; bfloat16 where that is missing or not known here."""
    asked = values.get("quantization_config")
    if not isinstance(asked, dict):
        return "bfloat16"
    method, algorithm = asked.get("quant_method"), str(asked.get("quant_algo")).upper()
    if method == "fp8":
        if values.get("expert_dtype") == "fp4":
            return "w4a8_mxfp4_mxfp8"
        return "fp8_block" if asked.get("weight_block_size") == [128, 128] else "fp8"
    groups = asked.get("config_groups")
    groups = [one for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    weights = groups[0].get("weights") if groups else None
    kind = [weights.get(key) for key in ("type", "num_bits", "group_size")] if isinstance(weights, dict) else []
    known = {
        "w4a16_mxfp4": method == "mxfp4" or kind == ["float", 4, 32],
        "nvfp4": algorithm == "NVFP4" or kind == ["float", 4, 16],
        "fp8": algorithm == "FP8" or kind[:2] == ["float", 8],
        "int4_wo": kind[:2] == ["int", 4] or (method in ("gptq", "awq") and asked.get("bits") == 4),
    }
    return next((dtype for dtype, holds in known.items() if holds), "bfloat16")


def _name(stated: Mapping[str, Any]) -> str:
    """Last part of the file's own name for the model, else its architecture: nothing of where the file lies."""
    own = str(stated.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return own or [*(stated.get("architectures") or ()), stated["model_type"]][0]
