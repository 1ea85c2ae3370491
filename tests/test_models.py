"""Model shapes: presets against the published config.json and parameter counts; reading one by path; wrong inputs.

The parameter counts are an independent check of every size: they come from the published
checkpoints and reports, and no wrong size of a preset would give them.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refusal

from moe_ep_bench.bench.description import served
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.facts.words import fit_words
from moe_ep_bench.models import ModelSpec, load_hf_model, load_model
from moe_ep_bench.models.hf_config import spec_of
from moe_ep_bench.models.memory import Fit, Served

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_act": "silu",
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "attention_bias": False, "ep_size": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu",
    "attention_bias": False, "head_dim": 128, "num_key_value_heads": 4, "vocab_size": 151936,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
# What the models' own config.json files say, as far as it bears on a spec; of others aiconfigurator ships them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "olmoe-1b-7b": {
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_act": "silu", "attention_bias": False,
        "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "tie_word_embeddings": False, "vocab_size": 50304,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_act": "silu",
        "num_hidden_layers": 27, "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 102400,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
    },
    "deepseek-moe-16b": {
        "model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "hidden_act": "silu",
        "attention_bias": False, "num_hidden_layers": 28, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 102400,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "scoring_func": "softmax", "norm_topk_prob": False, "tie_word_embeddings": False,
    },
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24,
        "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1,
        "tie_word_embeddings": False, "vocab_size": 151936,
    },
    "deepseek-v3": DEEPSEEK_V3,
    "qwen3-30b-a3b": QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "molmoe-1b": {
        "model_type": "molmoe", "architectures": ["MOLMoEForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 1024, "embedding_size": 50304, "vocab_size": 50304, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": False, "tie_word_embeddings": False,
    },
}  # fmt: skip
DEEPSEEK_V2 = PUBLISHED["deepseek-v2-lite"] | {
    "num_hidden_layers": 60, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 160,
    "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
}  # fmt: skip

# Elements of the published checkpoints' weights (DeepSeek-V3's without the multi-token prediction layer), billions that
# a token activates as the reports and model cards say it, and whether they count the embedding table.
CHECKPOINTS = {
    "olmoe-1b-7b": (6_919_161_856, 1.3, True),
    "mixtral-8x7b": (46_702_792_704, 12.9, True),
    "deepseek-v2-lite": (15_706_484_224, 2.4, False),
    "deepseek-moe-16b": (16_375_728_128, 2.8, True),
    "deepseek-v3": (671_026_419_200, 37, False),
    "deepseek-r1": (671_026_419_200, 37, False),
    "kimi-k2": (1_026_408_232_448, 32, False),  # the hub lists 1026.5 billion with 62 million block scales of fp8
    "kimi-k2.5": (1_026_408_232_448, 32, False),  # the language model, which is Kimi-K2's
    "qwen1.5-moe-a2.7b": (14_315_784_192, 2.7, True),
    "qwen3-30b-a3b": (30_532_122_624, 3.3, True),
    "qwen3-235b-a22b": (235_093_634_560, 22, True),
    "gpt-oss-120b": (116_829_156_672, 5.1, False),
    "gpt-oss-20b": (20_914_757_184, 3.6, False),
}
# Of later presets: billions of parameters, and of those that a token activates, as reports and model cards round them.
LATER_PRESETS = {
    "deepseek-v3.2": (671, 37),
    "deepseek-v4-flash": (284, 13),
    "deepseek-v4-pro": (1600, 49),  # 1.6 trillion
    "glm-5": (744, 40),
    "llama-4-maverick": (400, 17),
    "minimax-m2.5": (230, 10),
    "nemotron-3-super": (120, 12),
    "qwen3.5-397b-a17b": (397, 17),
}

# Files with experts that the package ships, where it is installed.
AICONFIGURATOR = importlib.util.find_spec("aiconfigurator_core")
PUBLIC_FILES = [
    path
    for path in sorted(Path(AICONFIGURATOR.origin or "").parent.rglob("*_config.json") if AICONFIGURATOR else ())
    if not path.name.endswith("_hf_quant_config.json") and re.search("expert|moe", path.read_text(), re.IGNORECASE)
]


def written(folder: Path, values: Any, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def facts(spec: ModelSpec) -> dict[str, Any]:
    return spec.model_dump(exclude={"name", "source"})


def num_parameters(model: ModelSpec) -> int | None:
    """Weights of the whole language model; None where a preset states too little."""
    others = model.other_parameters()
    return others and others + model.num_moe_layers * model.num_experts * model.expert_parameters


def changed(name: str, **values: Any) -> dict[str, Any]:
    return PUBLISHED[name] | values


# Presets


def test_every_preset_is_checked_here() -> None:
    assert set(ModelSpec.names()) == {*CHECKPOINTS, *LATER_PRESETS, "molmoe-1b"}  # which sees, too


@pytest.mark.parametrize("name", ModelSpec.names())
def test_a_published_config_json_gives_the_preset(tmp_path: Path, name: str) -> None:
    preset = load_model(name)
    if name in PUBLISHED:
        assert facts(load_model(str(written(tmp_path, PUBLISHED[name])))) == facts(preset)
        return
    pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core is not installed: the extra `tables`")
    stem = preset.source.partition(" ")[0].replace("/", "--")  # its id on Hugging Face
    [file] = (path for path in PUBLIC_FILES if path.name == f"{stem}_config.json")
    assert facts(load_hf_model(file)) == facts(preset)


@pytest.mark.parametrize("name", LATER_PRESETS)
def test_experts_that_idle_are_what_a_token_does_not_activate(name: str) -> None:
    """Which holds of a model whose attention no spec can express, too."""
    model, (billions, active) = load_model(name), LATER_PRESETS[name]
    idle = (model.num_experts - model.top_k) * model.num_moe_layers * model.expert_parameters
    assert idle / 1e9 == pytest.approx(billions - active, rel=0.02)
    if total := num_parameters(model):
        assert total / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_preset_has_and_activates_the_published_parameters(name: str) -> None:
    """A token is multiplied by its top-k experts, and by no embedding table, which is only looked up."""
    model, (parameters, billions, counts_embedding) = load_model(name), CHECKPOINTS[name]
    assert num_parameters(model) == parameters
    idle = (model.num_experts - model.top_k) * model.num_moe_layers * model.expert_parameters
    embedding = (counts_embedding - (not model.tied_embeddings)) * model.vocab_size * model.hidden_size
    assert (parameters - idle + embedding) / 1e9 == pytest.approx(billions, rel=0.025)


# What a rank holds


def held(model: ModelSpec, ep_size: int, tokens: int, context: int = 0, load: float | None = None) -> dict:
    """What each rank holds of a model in bf16, whose batch is ``tokens`` of each rank, three of each request."""
    rank = Served(model, "bfloat16", 2, 2, lambda num_ranks: tokens * num_ranks, 3, context, lambda _: load)
    return rank.footprint(ep_size, ep_size)


def test_each_rank_of_deepseek_v3_holds_these_bytes() -> None:
    """58 layers of 256 experts of 3 x 7168 x 2048 weights, and all else on every rank; two bytes each."""
    model = load_model("deepseek-v3")
    bytes_of = held(model, 8, 4096, context=9, load=1.5)
    assert bytes_of["expert_bytes"] == 58 * 32 * 3 * 7168 * 2048 * 2 == 163_477_192_704
    assert bytes_of["other_weight_bytes"] == 2 * (num_parameters(model) - 58 * 256 * 3 * 7168 * 2048)
    cached = 4096 + 1366 * 9  # the batch, and what came before of each request, the last of which has fewer in it
    assert bytes_of["cache_bytes"] == cached * 61 * (512 + 64) * 2, "the latent, not the keys and values made from it"
    assert bytes_of["row_bytes"] == 4096 * 8 * 1.5 * (4 * 7168 + 3 * 2048) * 2
    most = held(model, 8, 4096, load=99)
    assert most["row_bytes"] == 8 * 4096 * 8 * (4 * 7168 + 3 * 2048) * 2, "a rank has no more than all pairs"
    assert held(load_model("qwen3-235b-a22b"), 16, 1)["cache_bytes"] == 94 * 2 * 4 * 128 * 2


def test_a_rank_holds_a_byte_for_a_weight_of_each_linear_layer_that_an_fp8_checkpoint_quantises() -> None:
    """Of DeepSeek-V3: all but embedding, output, gates, norms and selection biases, counted one by one."""
    model, plain = load_model("deepseek-v3"), load_model("qwen3-235b-a22b")
    projections = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    linear = 61 * projections + 3 * 3 * 7168 * 18432 + 58 * 3 * 7168 * 2048
    assert model.linear_parameters() == linear
    assert model.linear_parameters(4) == 4 * projections + 3 * 3 * 7168 * 18432 + 3 * 7168 * 2048
    whole = Served(model, "fp8", 2, 1, lambda num_ranks: num_ranks, 3, 0, lambda _: 1, 1.0)
    bfloat16 = whole._replace(linear_value_bytes=None)
    saved = bfloat16.footprint(8, 8)["other_weight_bytes"] - whole.footprint(8, 8)["other_weight_bytes"]
    assert saved == linear
    assert (model.quantized, plain.quantized) == ("all_linear", "experts")


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, "all_linear"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["gate", "lm_head", "model.layers.0.mlp.gate"]},
            "all_linear",
        ),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]}, "experts"),
        ({"quant_method": "fp8", "modules_to_not_convert": 5}, "all_linear"),
        ({"quant_method": "mxfp4"}, "experts"),
        (None, "experts"),
        ("fp8", "experts"),
    ],
)
def test_a_config_json_says_what_its_checkpoint_quantises(tmp_path: Path, quantization: Any, expected: str) -> None:
    values = changed("deepseek-v3", quantization_config=quantization)
    assert load_model(str(written(tmp_path, values))).quantized == expected


def deployment(folder: Path, model: dict[str, Any], device_bytes: float = 80e9, **keys: Any) -> Fit:
    raw = {
        "model": model,
        "workload": {"kind": "synthetic", "num_tokens": 32768},
        "policies": [{"name": "topk"}],
        "whole": {"context_length": 0},
        **keys,
    }
    raw["layer"] = {"dtype": "bfloat16", **raw["layer"]}
    (experiment,) = load_experiments(written(folder, json.dumps(raw), "config.yaml"), on_cpu=False)
    return served(experiment).fit(experiment.layer.ep_size, "h100-sxm", device_bytes)


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({}, "bfloat16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "w4a16_mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4_wo"),
        ({"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}}}, "int4_wo"),
        ({"config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4, "group_size": 16}}}}, "nvfp4"),
        ({"quant_method": "bitsandbytes", "config_groups": {"group_0": 3}}, "bfloat16"),
        ({"config_groups": [], "quant_algo": 4}, "bfloat16"),
    ],
)
def test_a_checkpoints_dtype_is_read_from_its_quantization_config(stated: dict[str, Any], dtype: str) -> None:
    values = {**DEEPSEEK_V3, "quantization_config": stated}
    assert spec_of(values, "here").checkpoint_dtype == dtype
    assert spec_of({**values, "quantization_config": None}, "here").checkpoint_dtype == "bfloat16"
    nested = {"model_type": "kimi_k25", "text_config": DEEPSEEK_V3 | {"quantization_config": stated}}
    assert spec_of(nested, "here").checkpoint_dtype == dtype


@pytest.mark.parametrize(
    ("workload", "ep_size", "load"),
    [
        ({"skew": "single_domain"}, 32, 1 + 5.1 / 8**0.5),  # whose peak load is 6.1
        ({"peak_load": 6.1}, 32, 1 + 5.1 / 8**0.5),
        ({"peak_load": 6.1}, 256, 6.1),
        ({"peak_load": 6.1, "rank_load": 1.5}, 32, 1.5),
        ({"skew": "power_law_1.2"}, 32, 2.0),
        ({"peak_load": 6.1}, 1, 1.0),
        ({"peak_load": 1}, 32, 1.0),
        ({"batch_peak_load": 1}, 32, 1.0),
    ],
)
def test_rows_are_of_the_load_that_the_workload_states_in_whatever_words(
    workload: dict[str, Any], ep_size: int, load: float, tmp_path: Path
) -> None:
    traffic = {"kind": "synthetic", "num_tokens": 256 * 64, **workload}
    fit = deployment(tmp_path, {"preset": "deepseek-v3"}, workload=traffic, layer={"ep_size": ep_size})
    sent = 256 * 64 // ep_size * 8
    assert fit.row_bytes == int(sent * min(load, ep_size)) * (4 * 7168 + 3 * 2048) * 2


def test_what_does_not_fit_is_said_with_the_smallest_ep_size_that_does(tmp_path: Path) -> None:
    fit = deployment(tmp_path, {"preset": "deepseek-v3"}, layer={"ep_size": 8})
    assert not fit.holds()
    assert fit_words(fit).startswith(
        "does not fit: 203 GB on each of 8 ranks in bfloat16 (experts 163, other weights 3"
    )
    assert fit_words(fit).endswith("h100-sxm has 80 GB; the smallest EP size at which it fits is 32")
    at_32 = deployment(tmp_path, {"preset": "deepseek-v3"}, layer={"ep_size": 32})
    assert (at_32.holds(), fit_words(at_32)) == (True, "")
    assert not at_32.holds(80e9 - at_32.num_bytes + 1)
    one_each = deployment(tmp_path, {"preset": "deepseek-v3"}, layer={"ep_size": 256})
    small = deployment(tmp_path, {"preset": "deepseek-v3"}, one_each.num_bytes, layer={"ep_size": 128})
    assert (small.holds(), small.fitting_ep_size) == (False, 256)
    # A cache of 2,000,000 tokens a rank fits nowhere; more ranks share the requests.
    step = {
        "workload": {"kind": "synthetic", "num_tokens": 64, "sequence_length": 1},
        "whole": {"context_length": 2_000_000},
    }
    long = deployment(tmp_path, {"preset": "qwen3-235b-a22b"}, layer={"ep_size": 32}, **step)
    assert long.cache_bytes == 2 * 2_000_001 * 94 * 2 * 4 * 128 * 2
    assert fit_words(long).endswith("it fits at no EP size")


# What specs say


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, []) for name in ("olmoe-1b-7b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b", "molmoe-1b")),
        ("gpt-oss-20b", ["experts' biases", "clamped SwiGLU", "router's bias"]),
        ("qwen1.5-moe-a2.7b", ["shared experts' gate"]),
        ("deepseek-v3", ["selection bias is zero"]),
        ("llama-4-maverick", ["scale what they take"]),
    ],
)
def test_what_the_layer_leaves_out_is_said(name: str, words: list[str]) -> None:
    departures = load_model(name).departures
    assert len(departures) == len(words)
    assert all(word in sentence for word, sentence in zip(words, departures, strict=True))


def test_scaling_shrinks_widths_and_keeps_routing() -> None:
    model = load_model("deepseek-v3")
    small = model.scaled(1 / 8)
    shrunk = {"hidden_size": 896, "ffn_hidden_size": 256, "shared_ffn_hidden_size": 256, "dense_ffn_hidden_size": 2304}
    assert facts(small) == facts(model) | shrunk | {"scale": 1 / 8}


def test_a_tensor_parallel_shard_is_a_slice_of_every_expert_and_says_so() -> None:
    model = load_model("deepseek-v3")
    shard = model.sharded(8)
    sizes = {"ffn_hidden_size": 256, "shared_ffn_hidden_size": 256, "tensor_parallel": 8}
    assert facts(shard) == facts(model) | sizes
    assert (shard.name, num_parameters(shard)) == ("DeepSeek-V3, 1 of 8 TP ranks", None)
    assert shard.departures[0].startswith("One of 8 tensor-parallel ranks")
    assert shard.departures[1:] == model.departures
    assert (model.sharded(1), shard.scaled(1 / 2).ffn_hidden_size) == (model, 128)
    with pytest.raises(ValueError, match="tensor_parallel: expected a divisor of ffn_hidden_size=1536, got 7"):
        load_model("qwen3-235b-a22b").sharded(7)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"top_k": 9}, "top_k: expected at most num_experts=8, got 9"),
        ({"first_dense_layers": 2}, "below num_layers=2, got []"),
        (
            {"num_groups": 3, "top_groups": 1, "group_score_experts": 1},
            "a divisor of num_experts=8 as num_groups; got 3, 1, 1",
        ),
        ({"num_groups": 8, "top_groups": 1, "group_score_experts": 1}, "with room for top_k=2 in groups of 1, and"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(values: dict[str, int], words: str) -> None:
    shape = {"num_layers": 2, "hidden_size": 64, "num_experts": 8, "top_k": 2, "ffn_hidden_size": 32}
    with pytest.raises(ValueError, match=re.escape(words)):
        ModelSpec(name="made-up", source="test", normalize=True, **(shape | values))


# Wrong inputs


def without(name: str, key: str) -> dict[str, Any]:
    return {k: v for k, v in PUBLISHED[name].items() if k != key}


V4 = {
    "model_type": "deepseek_v4", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
NEMOTRON = V4 | {"model_type": "nemotron_h", "moe_shared_expert_intermediate_size": 16, "n_group": 1}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (without("olmoe-1b-7b", "hidden_size"), "hidden_size: missing"),
        (changed("olmoe-1b-7b", model_type="new"), "model_type 'new': no family that is known here; the way on"),
        (
            {"model_type": "llama", "hidden_size": 64},
            "model_type 'llama': dense: it has no experts",
        ),
        (changed("olmoe-1b-7b", hidden_size="2048"), "hidden_size: expected a whole number from 1, got '2048'"),
        (
            changed("olmoe-1b-7b", num_experts_per_tok=65),
            "num_experts_per_tok: expected at most the 64 experts, got 65",
        ),
        (changed("qwen3-30b-a3b", decoder_sparse_step=0), "decoder_sparse_step: expected a whole number from 1, got 0"),
        (changed("deepseek-v3", moe_layer_freq=True), "moe_layer_freq: expected 1 or a list, got true"),
        (changed("deepseek-v3", mlp_layer_types=["moe"] * 61), "mlp_layer_types: expected dense and sparse layers"),
        (changed("deepseek-v3", moe_layer_freq=[0, 0, 0, 1]), "expected the kinds of 61 layers, got 4"),
        ({"model_type": "gemma4_text", "num_experts": None}, "enable_moe_block: false, or missing, or without num_exp"),
        ({"model_type": "step3p5", "moe_layers_enum": "1;3"}, "moe_layers_enum: expected numbers of layers, got '1;3'"),
        (NEMOTRON | {"hybrid_override_pattern": "M*"}, "model_type 'nemotron_h': dense: no block of it has experts"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*"}, "nemotron_h': dense: no block of it has"),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, "model_type 'dbrx': no family that is known"),
        (V4 | {"mlp_layer_types": ["hash_moe", "moe"]}, "mlp_layer_types: expected moe, got 'hash_moe'"),
        (changed("deepseek-v3", topk_method="greedy"), "topk_method: expected noaux_tc, got 'greedy'"),
        ("{not json", "expected JSON, got"),
    ],
)
def test_a_wrong_config_json_is_one_line_with_file_and_key(tmp_path: Path, values: Any, words: str) -> None:
    path = written(tmp_path, values)
    text = refusal(load_model, str(path))
    assert text.startswith(f"{path}: ")
    assert words in text


def test_only_the_files_own_keys_count(tmp_path: Path) -> None:
    """Not names of a spec's fields; and a dense width that no layer has may be 0."""
    plain = load_hf_model(written(tmp_path, changed("qwen3-30b-a3b", intermediate_size=0)))
    assert (plain.first_dense_layers, plain.dense_ffn_hidden_size) == (0, 0)
    values = changed("olmoe-1b-7b", first_dense_layers=2, normalize=True)
    spec = load_hf_model(written(tmp_path, values))
    assert (spec.first_dense_layers, spec.normalize) == (0, False)


def test_what_no_spec_can_express_says_how_to_write_it_by_hand(tmp_path: Path) -> None:
    path = written(tmp_path, {"model_type": "outer", "text_config": {"model_type": "new_moe"}})
    told = refusal(load_model, str(path))
    assert "model_type 'new_moe': no family that is known here; the way on is" in told
    sizes = {"num_experts": 64, "top_k": 6, "hidden_size": 48, "ffn_hidden_size": 16}
    block = told.partition("shape by hand: model: ")[2]
    assert list(yaml.safe_load(block)) == list(sizes)
    config = {"model": sizes, "workload": {"kind": "synthetic", "num_tokens": 64}, "policies": [{"name": "topk"}]}
    (experiment,) = load_experiments(written(tmp_path, json.dumps(config), "config.yaml"), on_cpu=True)
    assert experiment.model.spec().num_experts == 64


@pytest.mark.skipif(not PUBLIC_FILES, reason="aiconfigurator-core is not installed")
def test_config_files_that_people_serve_are_understood_or_refused_with_the_way_on() -> None:
    """Of those that have experts, all are understood; a Gemma has none."""
    refused = []
    for path in PUBLIC_FILES:
        try:
            load_hf_model(path)
        except ValueError as error:
            refused.append(str(error))
    assert [told for told in refused if "this model has no experts; the way on" not in told] == []
    assert len(refused) <= 0.03 * len(PUBLIC_FILES)


def test_what_short_files_of_deepseek_v4_leave_out_is_named(tmp_path: Path) -> None:
    short = {"model_type": "deepseek_ref", "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    short |= {"vocab_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1}
    short |= {"num_experts_per_tok": 2, "num_hash_layers": 1, "scoring_func": "sqrtsoftplus"}
    model = load_hf_model(written(tmp_path, short))
    assert (model.score_function, model.num_hash_layers, model.normalize) == ("sqrtsoftplus", 1, True)
    assert model.departures[-1] == "Assumed, for the model's file does not say it: routed_scale 1.5."
    assert load_hf_model(written(tmp_path, {**short, "routed_scaling_factor": 2.5})).assumed == ()


def test_routed_experts_may_have_a_width_of_their_own() -> None:
    """Their rows and weights shrink; the router, the shared experts and what the layer takes do not."""
    wide = load_model("deepseek-v3")
    narrow = wide.model_copy(update={"latent_size": wide.hidden_size // 4})
    assert 4 * narrow.expert_parameters == wide.expert_parameters
    latent = 2 * wide.hidden_size * wide.hidden_size // 4
    assert narrow.other_parameters(4) - wide.other_parameters(4) == latent
    assert narrow.scaled(1 / 4).latent_size == wide.hidden_size // 16
    assert narrow.expert_shape == (wide.hidden_size // 4, wide.ffn_hidden_size, wide.num_experts, wide.top_k)
    assert any("width of 1792" in sentence for sentence in narrow.departures)
    of_wide, of_narrow = (held(model, 8, 64) for model in (wide, narrow))
    assert of_narrow["expert_bytes"] * 4 == of_wide["expert_bytes"]
    assert of_wide["row_bytes"] - of_narrow["row_bytes"] == 64 * 8 * 2 * 3 * wide.hidden_size * 2


_GQA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "hidden_size": 48}
MOLMO = {
    "model_type": "molmo", "n_layers": 2, "d_model": 64, "embedding_size": 99, "weight_tying": False, "n_heads": 4,
    "moe_num_experts": 8, "moe_top_k": 2, "mlp_ratio": 2, "include_bias": True, "attention_layer_norm": True,
}  # fmt: skip
STEP = _GQA | {
    "model_type": "step3p5", "num_hidden_layers": 4, "intermediate_size": 24, "moe_intermediate_size": 16,
    "moe_num_experts": 8, "moe_top_k": 2, "share_expert_dim": 32, "moe_layers_enum": "3, 1, 4",
}  # fmt: skip
HUNYUAN = _GQA | {
    "model_type": "hunyuan_v1_moe", "num_hidden_layers": 2, "intermediate_size": 24, "num_experts": [8, 8],
    "moe_topk": [2, 2],
}  # fmt: skip
V2_BY_ITS_FIRST_NAME = DEEPSEEK_V2 | {"model_type": "deepseek"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (MOLMO, {"ffn_hidden_size": 64, "vocab_size": 99, "attention.bias": "all", "attention.qk_norm": "all_heads"}),
        (MOLMO | {"mlp_hidden_size": 96, "attention_layer_norm": False},
         {"ffn_hidden_size": 48, "attention.qk_norm": "none"}),
        (STEP, {"activation": "swiglu", "listed_moe_layers": [1, 3], "shared_ffn_hidden_size": 32, "routed_scale": 1}),
        (STEP | {"swiglu_limits": [None, 7.0]}, {"activation": "clamped_swiglu"}),
        (STEP | {"moe_layers_enum": None}, {"first_dense_layers": 3, "listed_moe_layers": None}),
        (HUNYUAN, {"num_experts": 8, "top_k": 2, "shared_ffn_hidden_size": 24}),
        (V4 | {"num_hash_layers": 9}, {"num_hash_layers": 2, "routed_scale": 1.5, "shared_ffn_hidden_size": 16}),
        (V2_BY_ITS_FIRST_NAME, {"attention.kv_lora_rank": 512, "normalize": False, "shared_ffn_hidden_size": 2 * 1536}),
        (NEMOTRON | {"hybrid_override_pattern": "MEM*E"}, {"listed_moe_layers": [1, 4], "dense_ffn_hidden_size": 0}),
    ],
)  # fmt: skip
def test_what_few_families_state_otherwise(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = json.loads(load_hf_model(written(tmp_path, values)).model_dump_json())
    spec |= {f"attention.{key}": value for key, value in (spec["attention"] or {}).items()}
    assert {key: spec[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"decoder_sparse_step": 2}, [*range(1, 48, 2)]),
        ({"mlp_only_layers": [0, 1]}, [*range(2, 48)]),
        ({"mlp_only_layers": [3]}, [0, 1, 2, *range(4, 48)]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [*range(5, 48, 3)]),
    ],
)
def test_dense_layers_lie_where_a_qwen_file_says(tmp_path: Path, values: dict[str, Any], layers: list[int]) -> None:
    model = load_hf_model(written(tmp_path, changed("qwen3-30b-a3b", **values)))
    assert list(model.moe_layers) == layers
    assert model.dense_ffn_hidden_size == 6144
