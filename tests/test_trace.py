"""Reading ``moe-trace-v1``: what is refused, and what ``trace info`` says."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from trace_files import trace_parts, write_parts, write_trace

from moe_ep_bench.cli import main
from moe_ep_bench.workload.trace import TraceWriter, open_trace, trace_info

LAYERS, TOKENS, EXPERTS, K = 3, 40, 16, 4
parts = partial(trace_parts, length_S=[9, 1, 20, 10], num_layers=LAYERS, num_experts=EXPERTS, top_k=K, full=True)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_sequences_are_found_whatever_gaps_they_have(tmp_path_factory, lengths):
    tensors, metadata = parts(length_S=lengths)
    path = tmp_path_factory.mktemp("gaps") / "toy.safetensors"
    for _ in range(2):
        assert open_trace(write_parts(path, tensors, metadata)).start_S.tolist() == [0, *np.cumsum(lengths)]
        tensors["position"][1:] += 1  # a gap behind the first token, where its sequence goes on


@pytest.mark.parametrize(("full", "extent"), [(False, ""), (True, "; of all experts")])
def test_info_states_the_facts_of_a_file(full, extent, tmp_path, capsys):
    path = write_trace(tmp_path / "toy.safetensors", domain="poems", full=full)
    assert main(["trace", "info", str(path)]) == 0
    assert dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()) == {
        "file": "toy.safetensors",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "routing": "2 MoE layers, 8 experts, top-3",
        "tokens": "13 in 3 sequences of 1 to 7 (median 5)",
        "scores": f"softmax, not renormalised{extent}",
        "model": "tiny",
        "stage": "prefill",
        "domain": "poems",
        "source": "a test",
        "licence": "MIT",
    }


# ---- what is refused -------------------------------------------------------------------------------------------------


def put(name, value):
    """Another tensor, or metadata; None removes it."""

    def change(tensors, metadata):
        of = tensors if name in tensors else metadata
        of.pop(name) if value is None else of.update({name: value})

    return change


def poke(name, where, value):
    return lambda tensors, _: tensors[name].__setitem__(where, value)


def with_arrivals(seconds_S):
    return lambda tensors, _: tensors.__setitem__("arrival_s", np.array(seconds_S, dtype=np.float64))


def without_tokens(tensors, _):
    for name, tensor in tensors.items():
        tensors[name] = tensor[:, :0] if tensor.ndim == 3 else tensor[:0]


# What the error names behind the file, and the change.
BROKEN = {
    "layer 1: token 7: expert_ids: ": poke("expert_ids", (1, 7, 2), 16),
    "layer 2: token 39: expert_ids: ": poke("expert_ids", (2, 39), [3, 5, 3, 1]),
    "layer 0: token 7: scores: expected finite": poke("scores", (0, 7), [0.5, np.nan, 0.1, 0.1]),
    "layer 1: token 0: scores: expected desc": poke("scores", (1, 0), [0.125, 0.25, 0.125, 0.125]),
    "layer 1: token 0: scores: expected the sum": poke("scores", (1, 0), [0.5, 0.5, 0.25, 0.25]),
    "layer 0: token 0: scores: expected the sum": put("score", "softmax over the top-k"),
    "layer 1: token 7: full_scores: ": poke("full_scores", (1, 7, slice(2)), [-0.1, 0.5]),
    "expert_ids: expected U8 or U16 of shape LTK = (3, 0, 4), none of them 0": without_tokens,
    "position: expected I32": put("position", np.arange(TOKENS - 1, dtype=np.int32)),
    "expert_ids: expected U8 or U16": put("expert_ids", np.zeros((LAYERS, K), np.uint8)),
    "sequence_id: ": poke("sequence_id", 39, 7),
    "position: token 12: ": poke("position", 12, 1),
    "num_experts: expected 5": put("num_experts", "4"),
    "num_experts: expected 5 (more than top_k) to 1024": put("num_experts", "1025"),
    "num_experts, top_k: expected numbers": put("top_k", "four"),
    "format: ": put("format", "v9"),
    "arrival_s: expected F64 of shape S = (4,)": with_arrivals([0, 1, 2]),
    "arrival_s: expected finite seconds": with_arrivals([0, 1, np.nan, 2]),
    "missing tensors: position": put("position", None),
    "missing metadata: licence": put("licence", None),
}


def read_all(path):
    trace = open_trace(path)
    for layer in range(trace.num_layers):
        trace.read_layer(layer)
        trace.read_full_scores(layer)


@pytest.mark.parametrize("begin", BROKEN)
def test_a_broken_recording_is_refused_in_one_line(tmp_path, begin):
    tensors, metadata = parts()
    BROKEN[begin](tensors, metadata)
    path = write_parts(tmp_path / "wrong.safetensors", tensors, metadata)
    assert refusal(read_all, path).startswith(f"{path}: {begin}")


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_truncated_file_and_a_layer_beyond_the_last_are_refused(tmp_path, left):
    path = write_parts(tmp_path / "toy.safetensors", *parts())
    with pytest.raises(ValueError, match=f"layer: expected a row of the recording, 0 to {LAYERS - 1}, got {LAYERS}"):
        open_trace(path).read_layer(LAYERS)
    path.write_bytes(path.read_bytes()[:left])
    assert refusal(read_all, path).startswith(f"{path}: not a whole, readable safetensors file (")


@pytest.mark.parametrize(("num_experts", "kept_as"), [(256, ("U8", "<u1")), (257, ("U16", "<u2"))])
def test_ids_take_a_byte_up_to_256_experts(num_experts: int, kept_as: tuple[str, str], tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.describe(num_experts=num_experts, top_k=2, where="-")
    assert writer._type_of("expert_ids") == kept_as


def test_texts_stand_in_the_order_of_their_times_where_these_are_known(tmp_path: Path) -> None:
    for times in ((3.5, 0.25, 1.0), (3.5, None, 1.0), (1.0, 1.0, 0.5)):
        writer = TraceWriter(tmp_path)
        writer.describe(
            num_experts=8, top_k=2, where="-", **dict.fromkeys(("model", "phase", "domain", "source", "licence"), "-"),
            score="softmax, not renormalised",
        )  # fmt: skip
        for sequence, seconds in enumerate(times):
            writer.add(0, np.array([[sequence, 7]] * (sequence + 1)), None, "-")
            writer.add_tokens(sequence, np.arange(sequence + 1), "-")
            writer.add_arrival(sequence, seconds)
        writer.write(tmp_path / "made.safetensors")
        trace = open_trace(tmp_path / "made.safetensors")
        order = [0, 1, 2] if None in times else sorted(range(3), key=times.__getitem__)
        assert np.diff(trace.start_S).tolist() == [sequence + 1 for sequence in order]
        assert trace.read_layer(0)[0][trace.start_S[:-1]].min(axis=1).tolist() == order
        known = None if None in times else [times[sequence] for sequence in order]
        assert known == (None if trace.arrival_S is None else trace.arrival_S.tolist())
        assert ("arrivals over 3.2 s" in " ".join(trace_info(trace.path).split())) == (times == (3.5, 0.25, 1.0))


# ---- a folder of parts -----------------------------------------------------------------------------------------------


def cut(folder: Path, *at: int, times: bool = True) -> tuple[Path, Path]:
    """A recording as one file, and in parts that hold its tokens in another order of sequences."""
    tensors, facts = trace_parts(full=True)
    length, first = len(tensors["position"]), tensors["sequence_id"]
    came = {sequence: float(place) for place, sequence in enumerate(np.unique(first).tolist())}
    whole = {**tensors, "arrival_s": np.array(list(came.values()))} if times else tensors
    parts = folder / "prefill.safetensors"
    parts.mkdir()
    for number, (begin, end) in enumerate(zip((0, *at), (*at, length), strict=True)):
        kept = np.arange(begin, end)
        kept = kept[np.argsort(-first[kept], kind="stable")]
        part = {name: values[:, kept] if values.ndim > 1 else values[kept] for name, values in tensors.items()}
        if times:
            sequences = part["sequence_id"]
            part["arrival_s"] = np.array([came[one] for one in dict.fromkeys(sequences.tolist())])
        write_parts(parts / f"{number:05d}.safetensors", part, {**facts, "note": f"note {number}"})
    return write_parts(folder / "whole.safetensors", whole, facts), parts


@pytest.mark.parametrize("at", [(), (5,), (1, 3, 8, 12)])
@pytest.mark.parametrize("times", [True, False])
def test_parts_are_one_recording(at: tuple[int, ...], times: bool, tmp_path: Path) -> None:
    whole, parts = map(open_trace, cut(tmp_path, *at, times=times))
    if at:
        np.testing.assert_array_equal(parts.start_S, whole.start_S)
        np.testing.assert_array_equal(parts.arrival_S, whole.arrival_S)
        for layer in range(2):
            for got, expected in zip(parts.read_layer(layer), whole.read_layer(layer), strict=True):
                np.testing.assert_array_equal(got, expected)
            np.testing.assert_array_equal(parts.read_full_scores(layer), whole.read_full_scores(layer))
    assert parts.num_tokens == whole.num_tokens
    assert parts.metadata["note"] == f"note {len(at)}", "the last part's"
    told = trace_info(parts.path)
    assert f"parts    {len(at) + 1}\n" in told
    assert f"sha256   {hashlib.sha256(b''.join(part.read_bytes() for part in parts.parts)).hexdigest()}" in told


def test_parts_that_are_no_recording_are_refused_in_one_line(tmp_path: Path) -> None:
    _, parts = cut(tmp_path, 5, 8)
    assert f"give one of its recordings {parts.name}" in refusal(open_trace, tmp_path)
    last = parts / "00002.safetensors"
    write_trace(last, full=True, model="another")
    assert f"{last}: model: expected 'tiny' as 00000.safetensors has, got 'another'" in refusal(open_trace, parts)
    write_trace(last, full=False)
    assert f"{last}: expected the tensors and layers that 00000.safetensors has" in refusal(open_trace, parts)
    write_trace(last, full=True)  # with tokens that other parts hold
    assert "expected" in refusal(open_trace, parts)
    (parts / "00001.safetensors").unlink()
    assert "expected parts without a gap, 00001.safetensors is missing" in refusal(open_trace, parts)
