"""SERE by hand; the similarity that it reads: how it is measured, written and refused; every command on it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import yaml
from policy_cases import selected, similarity_file
from results_builder import label_in
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_ep_bench import cli
from moe_ep_bench.errors import OK, USER_ERROR
from moe_ep_bench.facts import CaseFacts
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.quality.checkpoint import find_moe_layers
from moe_ep_bench.quality.recording import inner_products, similarities

FACTS = {"format": "moe-similarity-v1", "model": "made up"}


def written(path: Path, similarity_LEE: Any, **facts: str) -> str:
    save_file({"similarity": torch.as_tensor(similarity_LEE)}, path, metadata={**FACTS, **facts})
    return str(path)


# ---- The rule, by hand -----------------------------------------------------------------------------------------------

# Token 0 prefers 0 1 2, token 1 prefers 3 2 1: with k0 = 1 experts 0 and 3 are primary, 1 and 2 secondary.
SCORES = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 0.2, 0.3, 0.5]])
ALIKE = torch.tensor([[1.0, 0.9, 0.1, 0.2], [0.9, 1.0, 0.8, 0.3], [0.1, 0.8, 1.0, 0.1], [0.2, 0.3, 0.1, 1.0]])


@pytest.mark.parametrize(
    ("threshold", "experts", "weights"),
    [
        # 1 goes to 0 (0.9); 2 is as much like 0 as like 3 (0.1), and goes to the lower one.
        (0.0, [[0], [0, 3]], [[1.0, 0, 0, 0], [0.5, 0, 0, 0.5]]),
        (0.1, [[0], [0, 3]], [[1.0, 0, 0, 0], [0.5, 0, 0, 0.5]]),
        (0.5, [[0, 2], [0, 2, 3]], [[0.8, 0, 0.2, 0], [0.2, 0, 0.3, 0.5]]),
        (0.95, [[0, 1, 2], [1, 2, 3]], [[0.5, 0.3, 0.2, 0], [0, 0.2, 0.3, 0.5]]),
    ],
)
def test_a_secondary_expert_gives_way_as_a_whole_and_its_weights_move_with_it(
    threshold: float, experts: list[list[int]], weights: list[list[float]], tmp_path: Path
) -> None:
    path = written(tmp_path / "a.safetensors", ALIKE[None])
    policy = make_policy({"name": "sere", "k0": 1, "threshold": threshold, "similarity": path})
    routing = policy.route(SCORES, RoutingContext(top_k=3))
    assert selected(routing) == experts
    torch.testing.assert_close(routing.weights_TE, torch.tensor(weights))
    normalised = policy.route(2 * SCORES, RoutingContext(top_k=3, normalize=True, scale=2.5))
    torch.testing.assert_close(normalised.weights_TE, 2.5 * torch.tensor(weights))


def test_every_layer_has_a_matrix_of_its_own_unless_one_is_chosen_for_all(tmp_path: Path) -> None:
    other = ALIKE.flip(0).flip(1)  # 2 is most like 3, and 1 as much like 0
    spec = {"name": "sere", "k0": 1, "similarity": written(tmp_path / "a.safetensors", torch.stack([ALIKE, other]))}
    assert make_policy(spec).layered == {"similarity": 2}

    def at(layer_fraction: float, **fields: Any) -> list[list[int]]:
        context = RoutingContext(top_k=3, layer_fraction=layer_fraction)
        return selected(make_policy({**spec, **fields}).route(SCORES, context))

    assert at(0.0) == [[0], [0, 3]]
    assert at(0.5) == [[0, 3], [0, 3]]
    assert at(0.0, layer=1) == at(0.3, layer=1) == at(0.5)
    assert make_policy({**spec, "layer": 1}).layered == {}
    with pytest.raises(ValueError, match=r"^similarity: expected values for all MoE layers of the model, .*; got 2$"):
        at(0.3)
    with pytest.raises(ValueError, match=r"^layer: expected 0 to 1, layers of .*; got 2$"):
        at(0.0, layer=2)


# ---- Files that are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file; moe-ep-bench trace record CHECKPOINT --text FILE --similarity FILE writes one"),
        (b"words", "not readable .*; moe-ep-bench trace record"),
        ({"similarity": torch.eye(8)[None], "format": "other"}, "expected format moe-similarity-v1, got 'other'"),
        ({"other": torch.eye(8)[None]}, "not readable .*; moe-ep-bench trace record"),
        ({"similarity": torch.eye(4)[None]}, "expected a file of 8 experts, as the model has, got 4 in a.safetensors"),
    ],
)
def test_what_holds_no_similarity_is_refused_in_a_line(content: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        facts = {**FACTS, "format": content.pop("format", FACTS["format"])}
        save_file(content, path, metadata=facts)
    policy = make_policy({"name": "sere", "k0": 1, "similarity": str(path)})
    with pytest.raises(ValueError, match=rf"^similarity: [^\n]*{expected}[^\n]*$"):
        policy.route(torch.rand(4, 8), RoutingContext(top_k=2))


# ---- Measuring -------------------------------------------------------------------------------------------------------


def by_definition(outputs: list[Tensor]) -> Tensor:
    """One less the Frobenius norm of each pair's difference over the largest, pair by pair."""
    distances = [[float((a.double() - b.double()).norm()) for b in outputs] for a in outputs]
    return 1 - torch.tensor(distances, dtype=torch.float64) / max(map(max, distances))


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_similarity_is_one_less_the_share_of_the_largest_distance(family: str) -> None:
    model, ids_BS = hf_models.tiny(family), hf_models.tokens(3, 16)
    seen: dict[str, list[Tensor]] = {}
    with torch.inference_mode(), inner_products(model) as grams:
        hooks = [
            layer.experts.register_forward_pre_hook(lambda _, args, name=layer.name: seen.update({name: [*args]}))
            for layer in find_moe_layers(model)
        ]
        expected = model(ids_BS).logits
        for hook in hooks:
            hook.remove()
    assert torch.equal(model(ids_BS).logits, expected), "nothing is changed, and nothing left behind"
    assert len(grams) == len(seen)
    for layer, gram_EE in grams.items():
        hidden_TD = seen[layer.name][0]
        ones_T1 = torch.ones(len(hidden_TD), 1)
        outputs = [
            layer.experts.forward(hidden_TD, torch.full([len(hidden_TD), 1], expert), ones_T1)
            for expert in range(layer.num_experts)
        ]
        alike_EE = similarities(gram_EE)
        torch.testing.assert_close(alike_EE.double(), by_definition(outputs), rtol=0, atol=1e-6)
        assert torch.equal(alike_EE.diagonal(), torch.ones(layer.num_experts))
    assert torch.equal(similarities(torch.ones(3, 3, dtype=torch.float64)), torch.ones(3, 3)), "all the same"


# ---- By the commands -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_olmoe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, its routing and how alike a checkpoint's experts are, as one command leaves them."""
    folder = tmp_path_factory.mktemp("sere")
    (folder / "text.txt").write_bytes((tiny_olmoe / "words.txt").read_bytes())
    source = [str(tiny_olmoe / "tiny-olmoe"), "--text", str(folder / "text.txt"), "--sequence-length", "16"]
    made = ["--similarity", str(folder / "alike.safetensors"), "--out", str(folder / "trace.safetensors")]
    assert cli.main(["trace", "record", *source, *made, "--num-sequences", "24"]) == OK
    return folder


def test_a_file_says_what_it_is_of(folder: Path) -> None:
    path = folder / "alike.safetensors"
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    assert facts | FACTS == {**facts, **FACTS}
    assert (facts["tokens"], facts["layers"], facts["text"]) == ("384", "0,1", "text.txt")
    assert facts["text_sha256"] == hashlib.sha256((folder / "text.txt").read_bytes()).hexdigest()
    assert load_file(path)["similarity"].shape == (2, 8, 8)


def config(folder: Path, name: str, **sections: Any) -> Path:
    shape = {"num_experts": 8, "top_k": 3, "hidden_size": 32, "ffn_hidden_size": 16, "num_layers": 2}
    values = {
        "model": {**shape, "normalize": False},
        "workload": {"kind": "synthetic", "num_tokens": 32, "num_batches": 2, "sequence_length": 1, "peak_load": 2.0},
        "layer": {"ep_size": 2, "dtype": "float32"},
        "measure": {"iterations": 1, "breakdown_iterations": 0, "warmup": 1},
        "emulate": {"device": "h100-sxm", "links": "h100-nvlink4"},
        "policies": [{"name": "sere", "k0": 1, "similarity": "alike.safetensors", "layer": 1}],
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


RECORDED = {
    "workload": {"kind": "recorded", "trace": "trace.safetensors", "layer": "all", "tail": "recorded", "num_tokens": 32}
}


def sere_cases(out: Path) -> dict[str, dict[str, Any]]:
    known = json.loads((out / "run.json").read_text())["cases"]
    return {key: case for key, case in known.items() if case["policy"] == "sere"}


def test_route_and_emulate_take_it_and_another_file_makes_another_case(folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "configs"
    here.mkdir()
    for name in ("alike", "trace"):
        (here / f"{name}.safetensors").write_bytes((folder / f"{name}.safetensors").read_bytes())
    plain = config(here, "plain")
    for command in ("route", "emulate"):
        assert cli.main([command, str(plain), "--out", str(tmp_path / command)]) == OK
        facts = json.loads((tmp_path / command / "run.json").read_text())
        assert str(here) not in json.dumps([facts["config"], facts["cases"]])
        (case,) = sere_cases(tmp_path / command).values()
        assert label_in(case) == "sere k0=1 similarity=alike layer=1"
        assert CaseFacts(**case).policy_params == {
            "k0": 1,
            "similarity": "alike.safetensors",
            "threshold": 0.0,
            "layer": 1,
        }
        assert case["policy_code"] == hashlib.sha256((here / "alike.safetensors").read_bytes()).hexdigest()
    before = set(sere_cases(tmp_path / "route"))
    written(here / "alike.safetensors", torch.eye(8).expand(2, 8, 8).contiguous())
    assert cli.main(["route", str(plain), "--out", str(tmp_path / "route")]) == OK
    assert not before & set(sere_cases(tmp_path / "route"))


def test_layers_of_a_recording_have_their_own_matrix_and_synthetic_scores_need_a_chosen_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def routed(similarity: str, **sections: Any) -> tuple[int, str]:
        own = {"name": "sere", "k0": 1, "similarity": similarity}
        path = config(folder, "asked", policies=[own], **sections)
        return cli.main(["route", str(path), "--out", str(tmp_path / "out")]), capsys.readouterr().err

    assert routed("alike.safetensors", **RECORDED)[0] == OK
    assert len(sere_cases(tmp_path / "out")) == 2
    single = "policies: sere.similarity: expected one value, for synthetic scores are of no layer"
    for similarity, sections, told in (
        ("alike.safetensors", {}, f"{single} (scope: model has all; layer chooses one), got values for 2"),
        (similarity_file(8, 3), RECORDED, "sere.similarity: expected values for the 2 MoE layers, got values for 3"),
        (similarity_file(16), {}, "policies.0.similarity: expected a file of 8 experts, as the model has, got 16"),
    ):
        status, said = routed(similarity, **sections)
        assert status == USER_ERROR
        assert told in said.splitlines()[-1]


@pytest.mark.parametrize(("model", "is_other"), [("allenai/OLMoE-1B-7B-0924", False), ("Mixtral-8x7B", True)])
def test_experts_of_another_model_are_said_where_the_run_ends(
    model: str, is_other: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "alike.safetensors", ALIKE.repeat(16, 16)[None], model=model)
    olmoe = {"preset": "olmoe-1b-7b", "scale": 1 / 32}
    own = [{"name": "sere", "k0": k0, "threshold": 0.3, "similarity": "alike.safetensors"} for k0 in (1, 2)]
    path = config(tmp_path, "asked", policies=own, model=olmoe)
    assert cli.main(["route", str(path), "--out", str(tmp_path / "out")]) == OK
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("warning: data: sere uses data of Mixtral-8x7B, not of OLMoE-1B-7B") == is_other
