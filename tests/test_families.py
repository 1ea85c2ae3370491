"""Claims about families of models: a config.json means what transformers builds from it, or is refused in a line."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_ep_bench.models import ModelSpec, load_hf_model
from moe_ep_bench.policies import RoutingContext, make_policy

# Sizes by the names that families have for them; a class takes those that it has.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 64,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "dense_intermediate_size": 24,
    "share_expert_dim": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
# Megatron-Core scores a group by as many of its experts as a token has in each: two in DeepSeek-V3, one in V2.
V3 = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
FLAT = {**V3, "n_group": 1, "topk_group": 1}
QWEN = {"num_experts": 16, "num_experts_per_tok": 3}
LINEAR = {
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_expert_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
# The model_type of a language model's config, the class of its router, and values that are its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "axk1": ("AXK1TopkRouter", {**V3, **LATENT}),
    "bailing_hybrid": ("BailingHybridTopkRouter", LINEAR),
    "deepseek_ocr2_text": (
        "DeepseekOcr2TextTopkRouter",
        {
            **V3,
            "num_experts_per_tok": 2,
            "topk_method": "group_limited_greedy",
            "mlp_layer_types": ["dense", *["sparse"] * 3],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        {**V3, **LATENT, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    ),
    "deepseek_v3": ("DeepseekV3TopkRouter", {**V3, **LATENT, "first_k_dense_replace": 1}),
    "deepseek_v32": ("DeepseekV32TopkRouter", {**V3, **LATENT, "first_k_dense_replace": 1}),
    "dots1": ("Dots1TopkRouter", {**FLAT, "n_shared_experts": 1, "norm_topk_prob": True, "first_k_dense_replace": 1}),
    "exaone_moe": ("ExaoneMoeTopkRouter", {**QWEN, "routed_scaling_factor": 2.5}),
    "flex_olmo": ("FlexOlmoTopKRouter", {**QWEN, "norm_topk_prob": True}),
    "gemma4_text": ("Gemma4TextRouter", {"num_experts": 16, "top_k_experts": 3, "enable_moe_block": True}),
    "glm4_moe": ("Glm4MoeTopkRouter", FLAT),
    "glm4_moe_lite": ("Glm4MoeLiteTopkRouter", {**FLAT, **LATENT}),
    "glm4v_moe_text": ("Glm4vMoeTextTopkRouter", FLAT),
    "glm5_next_text": ("Glm5NextTextTopkRouter", {**FLAT, **LATENT, "qk_rope_head_dim": 0, "num_key_value_heads": 4}),
    "glm_moe_dsa": ("GlmMoeDsaTopkRouter", {**FLAT, **LATENT}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Gate", {"num_experts": 16, "moe_topk": 3, "head_dim": 8}),
    "hy_v4": ("HYV4TopkRouter", {**FLAT, **LATENT}),
    "kimi_linear": ("KimiLinearTopkRouter", LINEAR),
    "mellum": ("MellumTopKRouter", {"num_local_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "mimo_v2_flash": ("MiMoV2FlashTopkRouter", {**FLAT, "routed_scaling_factor": 1.5}),
    "minimax": ("MiniMaxTopKRouter", {"num_local_experts": 16, "num_experts_per_tok": 3}),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLTopKRouter",
        {"num_local_experts": 16, "num_experts_per_tok": 3, "moe_layer_freq": [0, 1, 0, 1]},
    ),
    "mixtral": ("MixtralTopKRouter", {"num_local_experts": 16, "num_experts_per_tok": 3}),
    "nemotron_h": (
        "NemotronHTopkRouter",
        {**V3, "moe_latent_size": 8, "hybrid_override_pattern": "ME*E-"},
    ),
    "olmoe": ("OlmoeTopKRouter", {**QWEN, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeTopKRouter", {**QWEN, "norm_topk_prob": True}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTopKRouter", QWEN),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {**QWEN, "norm_topk_prob": True}),
    "qwen3_next": ("Qwen3NextTopKRouter", {**QWEN, "norm_topk_prob": True}),
    "qwen3_omni_moe_text": ("Qwen3OmniMoeThinkerTextTopKRouter", {**QWEN, "norm_topk_prob": True}),
    "qwen3_vl_moe_text": ("Qwen3VLMoeTextTopKRouter", {"num_local_experts": 16, "num_experts_per_tok": 3}),
    "step3p5": (
        "Step3p7TopKRouter",
        {"n_routed_experts": 16, "num_experts_per_tok": 3, "moe_router_scaling_factor": 3.0, "moe_layers_enum": "1,3"},
    ),
    "qwen4_exp_text": ("Qwen4ExpTextTopKRouter", {**QWEN, "layer_types": ["linear_attention"] * 4}),
    "solar_open": ("SolarOpenTopkRouter", {**FLAT, "n_shared_experts": 1}),
}


def config_of(family: str) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    return kind(**{**sizes, **FAMILIES[family][1]})


def read(folder: Path, values: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(values))
    return load_hf_model(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_routed_as_the_familys_own_router_routes_them(family: str, tmp_path: Path) -> None:
    config, generator = config_of(family), torch.Generator().manual_seed(0)
    spec = read(tmp_path, config.to_dict())
    module = importlib.import_module(CONFIG_MAPPING[family].__module__.replace("configuration_", "modeling_"))
    router = getattr(module, FAMILIES[family][0])(config).float()
    with torch.no_grad():
        (weight_ED,) = (weight for weight in router.parameters() if weight.dim() == 2)
        weight_ED.copy_(torch.randn(weight_ED.shape, generator=generator) / 4)
        has_bias = hasattr(router, "e_score_correction_bias")
        if has_bias:
            router.e_score_correction_bias.copy_(torch.rand(spec.num_experts, generator=generator) / 4)
        tokens_TD = torch.randn(40, spec.hidden_size, generator=generator)
        first_TE, weights_TK, experts_TK = router(tokens_TD)
        # Gemma's router begins with a norm, and returns scores first.
        logits_TE = first_TE.log() if family == "gemma4_text" else tokens_TD @ weight_ED.T
    theirs_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, weights_TK.float())
    if not hasattr(router, "routed_scaling_factor"):  # Then the block multiplies the experts' sum, if any does.
        keys = "moe_router_scaling_factor", "routed_scaling_factor"
        theirs_TE *= next((getattr(config, key) for key in keys if hasattr(config, key)), 1.0)
    assert spec.selection_bias == has_bias
    if kinds := getattr(config, "mlp_layer_types", None) or getattr(config, "layers_block_type", None):
        assert list(spec.moe_layers) == [layer for layer, kind in enumerate(kinds) if kind in ("sparse", "moe")]
    context = RoutingContext(
        top_k=spec.top_k,
        normalize=spec.normalize,
        scale=spec.routed_scale,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        bias_E=router.e_score_correction_bias if has_bias else None,
    )
    scores_TE = logits_TE.sigmoid() if spec.score_function == "sigmoid" else logits_TE.softmax(dim=1)
    ours = make_policy({"name": "topk"}).route(scores_TE, context)
    torch.testing.assert_close(ours.weights_TE, theirs_TE, rtol=1e-5, atol=1e-6)


def variants(stated: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The file without each key, with null, and with another value."""
    for key, value in stated.items():
        yield f"without {key}", {name: other for name, other in stated.items() if name != key}
        yield f"{key}: null", {**stated, key: None}
        if isinstance(value, int | float):
            yield f"another {key}", {**stated, key: not value if isinstance(value, bool) else 2 * value}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_missing_or_changed_means_what_it_means_to_the_familys_class(family: str, tmp_path: Path) -> None:
    stated, kind = config_of(family).to_dict(), CONFIG_MAPPING[family]
    spec, num_held = read(tmp_path, stated), 0
    for how, values in variants(stated):
        if family == "qwen3_vl_moe_text" and "tie_word_embeddings" in how:
            continue  # said beside the language model, where false is the default
        try:
            ours = read(tmp_path, values)
        except ValueError:  # which wrong inputs ask to be one line
            continue
        if ours.model_copy(update={"source": spec.source}) == spec and not how.startswith("another"):
            continue  # the key says nothing of the layer
        try:
            completed = kind(**values).to_dict()
        except (StrictDataclassClassValidationError, StrictDataclassFieldValidationError):
            continue  # transformers refuses what is read here: a null as a missing key
        theirs = read(tmp_path, completed)
        assert ours.model_copy(update={"source": theirs.source}) == theirs, how
        num_held += 1
    assert num_held > 5


@pytest.mark.slow
def test_every_class_of_transformers_with_experts_is_understood_or_refused_with_the_way_on(tmp_path: Path) -> None:
    understood, refused = [], []
    for family, kind in CONFIG_MAPPING.items():
        with warnings.catch_warnings(action="ignore"):
            try:
                stated = json.dumps(kind().to_dict(), default=str)
            except Exception:  # Some have no defaults.
                continue
        if not re.search("num_experts|n_routed_experts|num_local_experts|moe_", stated):
            continue
        (tmp_path / "config.json").write_text(stated)
        try:
            load_hf_model(tmp_path)
            understood.append(family)
        except ValueError as error:
            refused.append(str(error))
    assert len(understood) >= 44
    way_on = re.compile("[^\n]*; the way on is a config[^\n]*")
    assert [told for told in refused if not way_on.fullmatch(told)] == []
