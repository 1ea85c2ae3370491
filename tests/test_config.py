"""From YAML to experiments: named skews, models by config.json, paths; mistakes are in test_run.py too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from test_workload import digest_of, top_k_load

from moe_ep_bench.bench.plan import make_point, plan_experiments
from moe_ep_bench.bench.point import RANKS, Point, is_drawn
from moe_ep_bench.config import ModelConfig, SyntheticConfig
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.facts.words import describe_workload
from moe_ep_bench.workload.targets import SKEWS, load_skew


def experiment(folder: Path, *, model: dict | None = None, workload: dict | None = None, layer: dict | None = None):
    config = {
        "name": "x",
        "model": model or {"preset": "deepseek-v2-lite", "scale": 0.03125},
        "workload": {"kind": "synthetic", "num_tokens": 1024, "num_batches": 1, **(workload or {})},
        "layer": layer or {},
        "policies": [{"name": "topk"}],
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return load_experiments(path, on_cpu=True)[0]


def comparison(folder: Path, world_size: int = 1, **sections: dict) -> Point:
    return make_point(experiment(folder, **sections), RANKS, world_size, on_cpu=True)


@pytest.mark.parametrize("skew", SKEWS)
def test_a_named_skew_says_what_it_was_calibrated_to(skew: str, tmp_path: Path) -> None:
    sections = {"model": {"preset": "qwen3-30b-a3b", "scale": 0.03125}, "workload": {"skew": skew, "num_tokens": 512}}
    subject = comparison(tmp_path, 8, **sections).subject
    described, words = subject.workload, describe_workload(subject)
    assert words.startswith(f"synthetic, calibrated to {skew} (")
    assert described.kind == "synthetic"
    assert ("tokens: 1,044,480)" if skew == "mixed" else "tokens: 208,896)") in words
    own = described.skew.model_dump()
    assert own["peak_load"] == load_skew("qwen3-30b-a3b", skew).peak_load
    if own["basis"] == "assumed":
        assert "recorded from" not in words


def test_a_title_names_whose_skew_it_is_where_it_is_another_models(tmp_path: Path) -> None:
    own = comparison(tmp_path, workload={"skew": "single_domain"})
    assert own.title.endswith(", single domain")


@pytest.mark.parametrize("ep_size", [2, 4, 8, 16])
def test_a_skews_rank_load_holds_at_its_ep_size_and_experts_stand_at_random_at_others(
    ep_size: int, tmp_path: Path
) -> None:
    found = skewed(tmp_path, ep_size, seed=0)
    described = found.subject.workload
    load_R = top_k_load(found.workload.batch(0).scores_TE, found.model.top_k).view(ep_size, -1).sum(dim=1)
    is_its_own = ep_size == 8
    assert ("rank_load" in described.targets) == is_its_own
    assert ("experts placed at random, one draw" in found.title) != is_its_own
    assert f"EP {ep_size}, 2,048 tokens ({2048 // ep_size:,} a rank), single domain skew of OLMoE-1B-7B" in found.title
    if ep_size == 16:  # Sorted by load within the ranks of EP 8, every second rank would be above the next.
        assert not bool((load_R[::2] > load_R[1::2]).all())
        others = [skewed(tmp_path, 16, seed) for seed in (1, 2)]
        loads = [load_R, *(top_k_load(one.workload.batch(0).scores_TE, 8).view(16, -1).sum(dim=1) for one in others)]
        assert len({int(load_R.max()) for load_R in loads}) == 3, "draws differ"


def skewed(folder: Path, ep_size: int, seed: int) -> Point:
    """Of a model of which nothing was recorded."""
    workload = {"skew": "single_domain", "num_tokens": 2048, "seed": seed}
    return comparison(folder, ep_size, model={"preset": "qwen3-235b-a22b", "scale": 0.03125}, workload=workload)


MODEL = ModelConfig(preset="deepseek-v2-lite")


def test_what_is_given_beside_a_skew_wins(tmp_path: Path) -> None:
    def targets(**workload: object) -> dict:
        config = experiment(tmp_path, workload={"skew": "single_domain", **workload}).workload
        assert isinstance(config, SyntheticConfig)
        assert workload.get("rank_load") is None or config.targets(MODEL, 1)["rank_load"] is None
        return config.targets(MODEL, 2 if workload.get("rank_load") else None)

    assert targets()["peak_load"] == 3.587
    assert targets()["rank_load"] == {"ep_size": 8, "load": 1.606}
    assert targets(peak_load=3.0)["peak_load"] == 3.0
    assert targets(peak_load=None)["peak_load"] is None
    assert targets(peak_load=None)["rank_load"] is None, "no expert is busier than another"
    assert targets(rank_load=None)["rank_load"] is None
    of_batches = targets(batch_peak_load=3.0)
    assert [of_batches[name] for name in ("peak_load", "batch_peak_load")] == [None, 3.0]
    assert "cuts" not in of_batches
    # Cuts are of the skew's own peak load, and what they leave on the fullest rank of its own rank load.
    assert [cut["rank_load"] for cut in targets()["cuts"]] == [0.9123, 1.225]
    assert "cuts" not in targets(peak_load=3.0)
    assert [cut["rank_load"] for cut in targets(rank_load=1.2)["cuts"]] == [None, None]
    assert targets(rank_load=1.2)["rank_load"] == {"ep_size": 2, "load": 1.2}
    assert targets(sequence_length=1)["neighbour_overlap"] is None
    assert targets()["topk_share"] == 0.4159
    # A skew's numbers are part of what is measured.
    named = comparison(tmp_path, workload={"skew": "mixed"})
    assert named.definition["workload"]["peak_load"] == 2.983
    assert named.comparison_id != comparison(tmp_path, workload={"skew": "mixed", "peak_load": 4.0}).comparison_id


def test_balanced_is_a_peak_load_of_one_in_every_batch(tmp_path: Path) -> None:
    model = {"preset": "deepseek-v3", "scale": 0.03125}
    named = {"balanced": True}, {"batch_peak_load": 1.0}
    ways = [comparison(tmp_path, 8, model=model, workload=one) for one in named]
    assert ways[0].comparison_id == ways[1].comparison_id
    assert ways[0].title.endswith(", balanced loads")
    assert not is_drawn(ways[0].experiment, 8)
    assert ways[0].subject.workload.targets == {"peak_load": 1.0, "rank_load": {"8": 1.0}}
    # In the long run it is equal popularity. Dealt loads come in few sets of experts, which replicas would join.
    even, none = (comparison(tmp_path, 8, model=model, workload=one) for one in ({"peak_load": 1.0}, {}))
    assert torch.equal(even.workload.batch(0).scores_TE, none.workload.batch(0).scores_TE)
    assert is_drawn(even.experiment, 8)


HF = {
    "model_type": "olmoe", "num_hidden_layers": 16, "hidden_size": 256, "num_experts": 64, "num_experts_per_tok": 8,
    "intermediate_size": 128, "norm_topk_prob": False, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 50304, "hidden_act": "silu", "tie_word_embeddings": False, "clip_qkv": None,
}  # fmt: skip


def test_a_model_by_its_config_json_is_found_beside_the_config_and_leaves_no_path(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.json").write_text(json.dumps(HF))
    for name in ("models", "models/config.json"):
        found = experiment(tmp_path, model={"hf_config": name})
        assert found.model.spec().num_experts == 64
        assert found.model.spec().hidden_size == 256
        assert str(tmp_path) not in found.model_dump_json()


def test_a_sweep_is_set_key_by_key_and_one_value_ends_it(tmp_path: Path) -> None:
    experiment(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text() + "sweep: {workload.seed: [1, 2, 3]}\n")
    assert len(load_experiments(path, ["sweep.workload.seed=[4, 5]"], on_cpu=False)) == 2
    assert len(load_experiments(path, ["workload.seed=7"], on_cpu=False)) == 1
    assert len(load_experiments(path, ["sweep.layer.seed=[1, 2]"], on_cpu=False)) == 6


def test_what_holds_on_a_cpu_wins_over_a_sweep(tmp_path: Path) -> None:
    experiment(tmp_path)
    path = tmp_path / "config.yaml"
    text = path.read_text() + "sweep: {layer.seed: [1, 2, 3], workload.seed: [1, 2]}\n"
    path.write_text(text + "on_cpu: {layer.seed: 7, sweep.workload.seed: [4, 5, 6]}\n")
    found = load_experiments(path, on_cpu=True)
    assert [(one.layer.seed, one.workload.seed) for one in found] == [(7, 4), (7, 5), (7, 6)]
    assert len(load_experiments(path, on_cpu=False)) == 6


def test_a_files_paths_are_read_from_its_folder_and_an_overrides_from_the_working_directory(tmp_path: Path) -> None:
    experiment(tmp_path)
    path = tmp_path / "config.yaml"
    text = path.read_text()

    def devices(added: str, *overrides: str) -> list[str]:
        path.write_text(text + added)
        return [one.emulate.device for one in load_experiments(path, overrides, on_cpu=True)]

    assert devices("emulate: {device: a.yaml}\n") == [str(tmp_path / "a.yaml")]
    assert devices("sweep: {emulate.device: [a.yaml, h20]}\n") == [str(tmp_path / "a.yaml"), "h20"]
    assert devices("on_cpu: {emulate.device: a.yaml}\n") == [str(tmp_path / "a.yaml")]
    assert devices("on_cpu: {sweep.emulate.device: [a.yaml]}\n") == [str(tmp_path / "a.yaml")]
    assert devices("", "emulate.device=a.yaml") == [str(Path.cwd() / "a.yaml")]


def test_padding_makes_another_case_and_is_named(tmp_path: Path) -> None:
    def planned(**workload: object) -> Point:
        return comparison(tmp_path, 2, workload={"num_tokens": 64, "sequence_length": 1, **workload})

    plain, masked = planned(), planned(padding_per_rank=3)
    assert planned(padding_per_rank=0).comparison_id == plain.comparison_id
    assert plain.cases[2].case_id != masked.cases[2].case_id
    assert digest_of(masked.workload) == digest_of(plain.workload)
    assert plain.subject.workload.padding is None
    assert masked.title.endswith(", no skew, 3 padding a rank")
    uneven = planned(padding_per_rank=3, num_tokens=63).subject.workload
    assert uneven.padding == {"per_rank": 3, "of": [31, 32]}


def test_a_rank_keeps_a_valid_token_or_has_none_at_all(tmp_path: Path) -> None:
    def planned(padding: int, num_tokens: int) -> None:
        workload = {"num_tokens": num_tokens, "num_batches": 3, "sequence_length": 1, "padding_per_rank": padding}
        plan_experiments(tmp_path, [experiment(tmp_path, workload=workload)], RANKS, 4, on_cpu=True)

    planned(15, 64)
    planned(0, 3)  # rank 3 has no tokens
