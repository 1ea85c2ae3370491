"""Routing as servers return it with a response: base64 of npy (vLLM) or of int32 (SGLang); hostile text is one line."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_ep_bench import cli
from moe_ep_bench.workload.importers import ImportOptions, import_trace

PRESET = ImportOptions(preset="deepseek-v2-lite", assume_equal_scores=True)


def routing(num_tokens: int, num_layers: int, num_experts: int, top_k: int, seed: int = 0) -> NDArray[np.int32]:
    random = np.random.default_rng(seed)
    ids_TLK = np.argsort(random.random((num_tokens, num_layers, num_experts)), axis=2)[..., :top_k].astype(np.int32)
    ids_TLK[:, 0] = 0
    return ids_TLK


def npy(array: NDArray[Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return base64.b64encode(buffer.getvalue()).decode()


def raw(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def written(path: Path, *responses: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in responses))
    return path


def test_vllms_base64_arrays_are_its_lists(tmp_path: Path) -> None:
    prompt, generated = routing(5, 4, 512, 3), routing(2, 4, 512, 3, seed=1)
    options = ImportOptions(model="wide", num_experts=512, assume_equal_scores=True)
    found = []
    for name, form in (("lists", lambda array: array.tolist()), ("base64", npy)):
        response = {"prompt_routed_experts": form(prompt), "choices": [{"routed_experts": form(generated)}]}
        trace = import_trace("vllm", written(tmp_path / f"{name}.jsonl", response), tmp_path / name, options).trace
        found.append([trace.read_layer(layer)[0] for layer in range(trace.num_layers)])
    assert np.array_equal(found[0], found[1])
    ids_LTK = np.concatenate([prompt, generated]).transpose(1, 0, 2)[1:]
    assert np.array_equal(np.sort(found[0], axis=2), np.sort(ids_LTK, axis=2))
    assert found[0][0].dtype == np.uint16  # a byte names 256
    assert ids_LTK.max() > 255


def test_sglangs_responses_are_read_with_the_models_layers(tmp_path: Path) -> None:
    first, second = routing(6, 27, 64, 6), routing(3, 27, 64, 6, seed=1)
    source = written(
        tmp_path / "responses.jsonl",
        {"text": "x", "meta_info": {"routed_experts": raw(first)}},
        [{"sglext": {"routed_experts": raw(second)}}],
    )
    summary = import_trace("sglang", source, tmp_path / "out", PRESET)
    trace = summary.trace
    assert (trace.num_layers, trace.num_tokens, trace.num_sequences, trace.top_k) == (26, 9, 2, 6)
    assert trace.metadata["source_layers"].startswith("1,2,")
    assert trace.scores_are_assumed
    ids_TLK = np.concatenate([first, second])
    for layer in range(26):
        assert np.array_equal(np.sort(trace.read_layer(layer)[0]), np.sort(ids_TLK[:, layer + 1]))


# Experts that there are none of, but in the dense layer.
HIGH_L1 = 60 * (np.arange(27) > 0)[:, None].astype(np.int32)
HOSTILE = {
    "no text": ("sglang", {}, "routed_experts: expected base64 text, got {}"),
    "no base64": ("sglang", "!!!", "routed_experts: expected base64, got '!!!'"),
    "another length": (
        "sglang",
        raw(np.zeros(5, np.int32)),
        "expected rows of 27 layers x top-6 as int32 (648 bytes), got 20 bytes",
    ),
    "no such expert": ("sglang", raw(routing(2, 27, 64, 6) + HIGH_L1), "expert_ids: expected 0 to 63, got "),
    "a pickle": (
        "vllm",
        npy(np.array([[[{}]]], dtype=object)),
        "choices: 0: routed_experts: expected an npy array in base64 (",
    ),
    "floats": (
        "vllm",
        npy(np.zeros((1, 2, 3))),
        "expected whole numbers of 3 dimensions, got float64 of shape (1, 2, 3)",
    ),
    "flat": ("vllm", npy(np.zeros(6, np.int32)), "expected whole numbers of 3 dimensions, got int32 of shape (6,)"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_responses_are_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, text, message = HOSTILE[name]
    held = {"routed_experts": text}
    source = written(tmp_path / "responses.jsonl", {"choices": [held]} if kind == "vllm" else {"meta_info": held})
    options = ["--preset", "deepseek-v2-lite", "--assume-equal-scores"]
    assert cli.main(["trace", "import", kind, str(source), str(tmp_path / "out"), *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"moe-ep-bench: {source}:1: ")
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_an_import_needs_is_asked_for_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "responses.jsonl", {})
    assert cli.main(["trace", "import", "sglang", str(source), str(tmp_path / "out")]) == 2
    assert "model, assume_equal_scores: needed, because sglang recordings" in capsys.readouterr().err
    options = ["--model", "x", "--num-experts", "64", "--assume-equal-scores"]
    assert cli.main(["trace", "import", "sglang", str(source), str(tmp_path / "out"), *options]) == 2
    assert "preset: needed, because responses.jsonl holds flat arrays" in capsys.readouterr().err
