"""Reading ``moe-trace-v1``: what is refused, how little of a file is held, and what ``trace info`` says."""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recorded import EXPERTS, trace_parts, write
from trace_files import write_trace

from moe_ep_bench.cli import main
from moe_ep_bench.workload.trace import open_trace

few_examples = settings(max_examples=25)

LAYERS, TOKENS, K = 3, 40, 4
LENGTHS = [9, 1, 20, 10]


parts = partial(trace_parts, lengths=LENGTHS, layers=LAYERS, top_k=K)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "toy.safetensors", *parts())


def read_all(path):
    trace = open_trace(path)
    for layer in range(trace.num_layers):
        trace.read_layer(layer)
    return trace


def refusal(path):
    """The message with which a file is refused: one line that begins with the file."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        read_all(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


# ---- what is read ----------------------------------------------------------------------------------------------------


@few_examples
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_sequences_are_found_whatever_gaps_they_have(tmp_path_factory, lengths):
    tensors, metadata = parts(lengths=lengths, layers=1)
    path = tmp_path_factory.mktemp("gaps") / "toy.safetensors"
    starts = [0, *np.cumsum(lengths)]
    trace = read_all(write(path, tensors, metadata))
    assert trace.start_S.tolist() == starts
    tensors["position"][1:] += 1  # a gap behind the first token, where its sequence goes on
    trace = read_all(write(path, tensors, metadata))
    assert trace.start_S.tolist() == starts


@pytest.mark.parametrize(("full", "extent"), [(False, ""), (True, "; of all experts")])
def test_info_states_the_facts_of_a_file(full, extent, tmp_path, capsys):
    path = write_trace(tmp_path / "toy.safetensors", length_S=(5, 1, 7), domain="poems", full=full)
    assert main(["trace", "info", str(path)]) == 0
    assert dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()) == {
        "file": "toy.safetensors",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "routing": "2 MoE layers, 8 experts, top-3",
        "tokens": "13 in 3 sequences of 1 to 7 (median 5)",
        "scores": f"softmax, not renormalised{extent}",
        "model": "tiny",
        "phase": "prefill",
        "domain": "poems",
        "source": "a test",
        "licence": "MIT",
    }


# ---- what is refused -------------------------------------------------------------------------------------------------


def given_(part, name, value):
    def change(tensors, metadata):
        {"tensors": tensors, "metadata": metadata}[part].update({name: value})

    return change


def poke(name, where, value):
    return lambda tensors, metadata: tensors[name].__setitem__(where, value)


def drop(name):
    return lambda tensors, metadata: (tensors.pop(name, None), metadata.pop(name, None))


def without_tokens(tensors, _):
    for name, tensor in tensors.items():
        tensors[name] = tensor[..., :0, :] if tensor.ndim == 3 else tensor[:0]


# What the error names behind the file, and the change.
WRONG = {
    "id out of range": ("layer 1: token 7: expert_ids: ", poke("expert_ids", (1, 7, 2), 16)),
    "repeated expert": ("layer 2: token 39: expert_ids: ", poke("expert_ids", (2, 39), [3, 5, 3, 1])),
    "NaN": ("layer 0: token 7: scores: ", poke("scores", (0, 7), [0.5, np.nan, 0.1, 0.1])),
    "not sorted": ("layer 1: token 0: scores: ", poke("scores", (1, 0), [0.125, 0.25, 0.125, 0.125])),
    "sum over 1": ("layer 1: token 0: scores: ", poke("scores", (1, 0), [0.5, 0.5, 0.25, 0.25])),
    "sum not 1": ("layer 0: token 0: scores: ", given_("metadata", "score", "softmax over the top-k")),
    "nothing": ("expert_ids: ", without_tokens),
    "fewer tokens": ("position: ", given_("tensors", "position", np.arange(TOKENS - 1, dtype=np.int32))),
    "flat ids": ("expert_ids: ", given_("tensors", "expert_ids", np.zeros((LAYERS, K), np.uint8))),
    "scattered sequence": ("sequence_id: ", poke("sequence_id", 39, 0)),
    "position comes back": ("position: token 12: ", poke("position", 12, 1)),
    "as many experts as a token takes": ("num_experts: expected 5", given_("metadata", "num_experts", "4")),
    "too many experts": ("num_experts: ", given_("metadata", "num_experts", "1025")),
    "other format": ("format: ", given_("metadata", "format", "v9")),
    "no tensor": ("missing tensors: position", drop("position")),
    "no metadata": ("missing metadata: licence", drop("licence")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_recording_is_refused_in_one_line(tmp_path, name):
    begin, change = WRONG[name]
    tensors, metadata = parts()
    change(tensors, metadata)
    path = write(tmp_path / "wrong.safetensors", tensors, metadata)
    assert refusal(path).startswith(begin)


def test_full_scores_that_no_router_gives_and_layers_beyond_the_last_are_refused(tmp_path):
    tensors, metadata = parts()
    tensors["full_scores"] = np.full((LAYERS, TOKENS, EXPERTS), 1 / EXPERTS, np.float32)
    tensors["full_scores"][1, 7, :2] = [-0.1, 0.1 + 2 / EXPERTS]
    trace = open_trace(write(tmp_path / "wrong.safetensors", tensors, metadata))
    assert trace.read_full_scores(0).shape == (TOKENS, EXPERTS)
    with pytest.raises(ValueError, match="layer 1: token 7: full_scores: expected non-negative values"):
        trace.read_full_scores(1)
    with pytest.raises(ValueError, match=f"layer: expected 0 to {LAYERS - 1}, got {LAYERS}"):
        trace.read_layer(LAYERS)


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_truncated_file_is_refused(path, left):
    path.write_bytes(path.read_bytes()[:left])
    assert refusal(path).startswith("not a whole, readable safetensors file (")
