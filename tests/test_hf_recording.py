"""Recording a model's routers: what was chosen, all scores, after a kill, and what reads it."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_weights
from safetensors.torch import save_file as save_weights
from trace_files import tokens_of

from moe_ep_bench.cli import main
from moe_ep_bench.errors import USER_ERROR
from moe_ep_bench.models import shares
from moe_ep_bench.policies import make_policy
from moe_ep_bench.quality.checkpoint import Checkpoint
from moe_ep_bench.quality.recording import record
from moe_ep_bench.quality.routed import RouterCall, routed
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.trace import TraceWriter, open_trace

LENGTH, NUM = 16, 12
OPTIONS = {"sequence_length": LENGTH, "num_sequences": NUM}


@pytest.fixture(scope="module")
def text(tiny_olmoe: Path) -> Path:
    return tiny_olmoe / "words.txt"


@pytest.fixture(scope="module")
def olmoe(tiny_olmoe: Path) -> Path:
    return tiny_olmoe / "tiny-olmoe"


@pytest.fixture(scope="module")
def recording(olmoe: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recordings") / "olmoe.safetensors"
    record(olmoe, text, out=out, **OPTIONS)
    return out


@functools.cache
def in_the_model(folder: Path, text: Path, policy: Any = None) -> list[RouterCall]:
    """What the routers do with the whole text at once."""
    checkpoint = Checkpoint.open(folder)
    model = checkpoint.load("auto", torch.device("cpu"))
    seen: list[RouterCall] = []
    with torch.inference_mode(), routed(model, policy, observe=seen.append):
        model(checkpoint.sequences(text, LENGTH, NUM), use_cache=False)
    return seen


def test_every_layers_choice_and_all_scores_are_recorded(recording: Path, olmoe: Path, text: Path) -> None:
    trace = open_trace(recording)
    assert (trace.num_layers, trace.num_tokens, trace.num_experts, trace.top_k) == (2, NUM * LENGTH, 8, 3)
    assert trace.start_S.tolist() == list(range(0, NUM * LENGTH + 1, LENGTH))
    assert trace.has_full_scores
    for layer, seen in enumerate(in_the_model(olmoe, text)):
        ids_TK, scores_TK = trace.read_layer(layer)
        chosen_TE = np.zeros(seen.own_TE.shape, dtype=bool)
        np.put_along_axis(chosen_TE, ids_TK.astype(np.int64), True, axis=1)
        assert np.array_equal(chosen_TE, seen.own_TE.numpy())
        full_TE = trace.read_full_scores(layer)
        np.testing.assert_allclose(full_TE, seen.scores_TE, rtol=1e-4)  # another number of rows, another order of sums
        np.testing.assert_allclose(np.take_along_axis(full_TE, ids_TK.astype(int), 1), scores_TK, rtol=1e-3)


def test_a_replayed_recording_is_routed_as_the_model_routes(recording: Path, olmoe: Path, text: Path) -> None:
    """No tail model: also a policy that looks past the top-k does to the recording what it does in the model."""
    policy = make_policy({"name": "expanded_drop", "capacity_factor": 1.2})
    first = in_the_model(olmoe, text, policy)[0]
    assert first.routing is not None
    workload = RecordedWorkload([open_trace(recording)], 0, 8, 3, NUM * LENGTH, 1, "recorded", seed=0)
    batch = workload.batch(0)
    assert np.array_equal(batch.scores_TE, open_trace(recording).read_full_scores(0)[tokens_of(workload, 0)])
    replayed = policy.route(batch.scores_TE, first.context)
    assert torch.equal(replayed.map_TE.sum(0), first.routing.map_TE.sum(0))
    assert workload.describe()["tail_model"] is None


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_choices_by_more_than_scores_stay_the_recorded_ones(family: str, text: Path, tmp_path: Path) -> None:
    """DeepSeek-V3 chooses by a bias and groups: what it passed over is capped below what it took."""
    folder = hf_models.checkpoint(tmp_path / "model", family)
    record(folder, text, out=tmp_path / "out.safetensors", **OPTIONS)
    trace = open_trace(tmp_path / "out.safetensors")
    workload = RecordedWorkload([trace], 0, 8, trace.top_k, NUM * LENGTH, 1, "recorded", seed=0)
    loads = workload.batch(0).scores_TE.topk(trace.top_k, dim=1).indices.flatten().bincount(minlength=8)
    assert loads.tolist() == in_the_model(folder, text)[0].own_TE.sum(0).tolist()


def test_a_recording_that_is_cut_short_leaves_nothing_and_is_made_again(
    recording: Path, olmoe: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "olmoe.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(TraceWriter, "add_tokens", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            record(olmoe, text, out=out, **OPTIONS)
    assert list(tmp_path.iterdir()) == []
    record(olmoe, text, out=out, **OPTIONS)
    assert out.read_bytes() == recording.read_bytes()


def test_shares_of_a_softmax_are_recorded_to_the_bit_and_of_a_sigmoid_sum_to_1(olmoe: Path, text: Path) -> None:
    seen = in_the_model(olmoe, text)[0]
    assert torch.equal(shares(seen.scores_TE), seen.scores_TE)
    torch.testing.assert_close(shares(seen.scores_TE * 3), seen.scores_TE)


def test_text_is_cut_into_sequences_across_lines_and_pieces(
    olmoe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.txt"
    content = "".join(f"{number} " * (number % 9) + "\n" for number in range(60))
    file.write_text(content)
    checkpoint = Checkpoint.open(olmoe)
    monkeypatch.setattr("moe_ep_bench.quality.checkpoint._CHARACTERS_AT_ONCE", 50)
    rows = checkpoint.sequences(file, 7, None)
    assert len(rows) == len(content) // 7
    assert checkpoint.tokenizer.decode(rows.flatten()) == content[: rows.numel()]


# --- Mistakes ------------------------------------------------------------------------------------


BROKEN = {
    "no folder": "none: expected a checkpoint's folder, got none",
    "no config": "got one without config.json",
    "dense": "expected routers of classes ...TopKRouter",
    "no weights": "expected weights in *.safetensors, got none",
    "no tokenizer": "expected a tokenizer beside the model",
    "a weight is missing": "expected all weights of OlmoeForCausalLM; missing: lm_head.weight",
    "damaged": "cannot load the model",
    "pickled weights": "expected weights in *.safetensors, got none",
    "its own code": "needs its own code, which is not run",
}


def broken(how: str, olmoe: Path, folder: Path) -> Path:
    """A checkpoint with one thing wrong, in an empty folder."""
    if how == "no folder":
        return folder / "none"
    if how == "dense":
        hf_models.save(hf_models.dense(), folder)
    elif how != "no config":
        left_out = {"no weights": ".safetensors", "no tokenizer": "token"}.get(how, "nothing")
        for path in olmoe.iterdir():
            if left_out not in path.name:
                (folder / path.name).write_bytes(path.read_bytes())
    if how == "a weight is missing":
        weights = load_weights(folder / "model.safetensors")
        del weights["lm_head.weight"]
        save_weights(weights, folder / "model.safetensors", {"format": "pt"})
    elif how == "damaged":
        (folder / "model.safetensors").write_bytes(b"not weights")
    elif how == "pickled weights":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif how == "its own code":
        classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes}))
        (folder / "code.py").write_text("raise SystemExit('it ran')\n")
    return folder


@pytest.mark.parametrize("how", BROKEN)
def test_a_checkpoint_that_is_none_is_one_line_and_leaves_nothing(
    how: str, olmoe: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    asked = ["--text", str(text), "--out", str(tmp_path / "x.safetensors"), "--sequence-length", "16"]
    assert main(["trace", "record", str(broken(how, olmoe, folder)), *asked]) == USER_ERROR
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("moe-ep-bench: ")
    assert BROKEN[how] in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_without_transformers_a_line_says_what_to_install(
    olmoe: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    arguments = ["trace", "record", str(olmoe), "--text", str(text), "--out", str(tmp_path / "x")]
    assert main(arguments) == USER_ERROR
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "pip install 'moe-ep-bench[models]'" in said


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], {"out": Path("recordings/olmoe-words.safetensors"), "similarity": None, "sequence_length": 512}),
        (["--similarity", "s", "--num-sequences", "3"], {"out": None, "similarity": Path("s"), "num_sequences": 3}),
        (["--similarity", "s", "--out", "o", "--sequence-length", "9"], {"out": Path("o"), "sequence_length": 9}),
    ],
)
def test_the_command_records_what_is_asked_and_prints_it(more, expected, monkeypatch, capsys) -> None:
    asked: list[Any] = []

    def recorded(model: Path, text: Path, **how: Any) -> str:
        asked.extend((model, text, how))
        return "what it holds"

    monkeypatch.setattr("moe_ep_bench.quality.recording.record", recorded)
    assert main(["trace", "record", "checkpoints/olmoe", "--text", "texts/words.txt", *more]) == 0
    assert asked[:2] == [Path("checkpoints/olmoe"), Path("texts/words.txt")]
    assert asked[2] == {**asked[2], **expected}
    assert capsys.readouterr().out == "what it holds\n"
