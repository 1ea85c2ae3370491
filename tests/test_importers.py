"""Claims about importing recordings: nothing of the source is lost, nothing wrong gets in, nothing is half written.

Sources are made here, small and of the published form; none is copied.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import shlex
import sys
import zipfile

import numpy as np
import pytest
import torch
from test_recorded import real

from moe_ep_bench.cli import main
from moe_ep_bench.workload import RecordedWorkload
from moe_ep_bench.workload.importers import IMPORTERS, ImportOptions, import_trace, sources
from moe_ep_bench.workload.importers.sglang import CONVERT
from moe_ep_bench.workload.importers.writer import TraceWriter
from moe_ep_bench.workload.trace import open_trace

MEGATRON = {"model": "toy", "phase": "prefill", "score_function": "softmax"}
FLAME = {"model": "toy", "num_experts": 16, "phase": "training"}
SGLANG = {"model": "toy", "assume_equal_scores": True}
VLLM = {"model": "toy", "num_experts": 16, "assume_equal_scores": True}

every_kind = pytest.mark.parametrize("kind", IMPORTERS)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "made.safetensors"


def imported(kind, source, out, **options):
    return import_trace(kind, source, out, ImportOptions(**options))


def read_back(path):
    """Ids and scores of all layers [L, T, K], and sequence ids and positions [T]."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return tensors["expert_ids"], tensors["scores"], tensors["sequence_id"], tensors["position"]


def refusal(kind, source, out, **options):
    """The one line with which an import is refused, after which nothing is left where the trace would be."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        imported(kind, source, out, **options)
    assert not out.exists()
    assert not out.parent.exists() or list(out.parent.iterdir()) == []
    return str(error.value)


def assert_rows_match(made, ids_TK, scores_TK):
    """The trace's rows are the source's, best first; equal scores keep the source's order."""
    made_ids_TK, made_scores_TK = made
    order_TK = np.array([sorted(range(len(row)), key=lambda k: -row[k]) for row in scores_TK.tolist()])
    np.testing.assert_array_equal(made_ids_TK, np.take_along_axis(ids_TK, order_TK, 1))
    np.testing.assert_array_equal(made_scores_TK, np.take_along_axis(scores_TK, order_TK, 1).astype(np.float16))


# Sources


def esft_rows(random, num_tokens):
    """Six distinct experts of 64 per token, in no order, with four-decimal shares that may tie."""
    ids_TK = np.argsort(random.random((num_tokens, 64)), axis=1)[:, :6]
    weights_TK = np.round(random.random((num_tokens, 6)) / 8, 4)
    return ids_TK, weights_TK


def esft_line(ids_TK, weights_TK):
    return "\t".join(map(str, ids_TK.ravel())) + "\t\t" + "\t".join(map(repr, weights_TK.ravel().tolist())) + "\n"


def esft(root, lengths=(5, 1, 3), domains=("intent", "law")):
    """A checkout; returns rows by domain and layer: one list of (ids, weights) per text."""
    random, rows = np.random.default_rng(3), {}
    for domain in domains:
        directory = root / "results" / "expert_scores" / domain
        directory.mkdir(parents=True)
        (directory / "summary.json").write_text("{}")
        for layer in range(1, 27):
            rows[domain, layer] = [esft_rows(random, length) for length in lengths]
            (directory / f"expert_weights_{layer}.txt").write_text(
                "".join(esft_line(*row) for row in rows[domain, layer])
            )
    return rows


def megatron(directory, passes=(6, 4), layers=(1, 3), num_experts=16, top_k=3, logits=True, rank=0):
    """A tracer's files; returns ids and logits by (pass, layer)."""
    random, rows = np.random.default_rng(7), {}
    directory.mkdir(parents=True, exist_ok=True)
    sidecar, records = b"", []
    for step, num_tokens in enumerate(passes):
        for layer in layers:
            values_TE = torch.from_numpy(random.normal(size=(num_tokens, num_experts)) * 2).bfloat16()
            ids_TK = values_TE.float().topk(top_k, dim=1).indices.sort(dim=1).values  # the tracer's order
            data = values_TE.view(torch.int16).numpy().tobytes()
            record = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
            record |= {"num_tokens": num_tokens, "topk": top_k}
            if logits:
                record |= {
                    "logit_offset": len(sidecar),
                    "logit_bytes": len(data),
                    "logit_shape": [num_tokens, num_experts],
                }
                sidecar += data
            records.append({**record, "top_indices": ids_TK.tolist()})
            rows[step, layer] = ids_TK.numpy(), values_TE.double().numpy()
    path = directory / f"router_trace_rank{rank}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    if logits:
        (directory / f"logits_rank{rank}.bin").write_bytes(sidecar)
    return rows


def sglang(num_physical=20, num_logical=16, top_k=3, layers=(1, 2, 3)):
    """A dump as SGLang's recorder holds it in memory: two prompts with filling, then two decode passes."""
    random = np.random.default_rng(11)
    to_logical = np.stack([random.permutation(np.arange(num_physical) % num_logical) for _ in range(4)])
    records = []
    for lengths, positions, valid in (
        ([4, 3], [0, 1, 2, 3, 8, 9, 10, 0], 7),
        (None, [4, 11], 2),
        (None, [], 0),
        (None, [5, 12, 0], 2),
    ):
        ids = np.full((4, len(positions), 8), -1, np.int32)
        for layer in layers:
            for token in range(valid):
                logical = random.permutation(num_logical)[:top_k]
                ids[layer, token, :top_k] = [random.choice(np.flatnonzero(to_logical[layer] == e)) for e in logical]
        record = {"rank": 0, "input_ids": [7] * len(positions), "misc_objects": []}
        record |= {"positions": positions, "extend_seq_lens": lengths, "topk_ids_of_layer": torch.from_numpy(ids)}
        records.append(record)
    return {"records": records, "last_physical_to_logical_map": torch.from_numpy(to_logical)}


def sglang_arrays(dump):
    arrays = {"last_physical_to_logical_map": dump["last_physical_to_logical_map"].numpy()}
    for index, record in enumerate(dump["records"]):
        for key in ("topk_ids_of_layer", "positions", "extend_seq_lens"):
            if record[key] is not None:
                arrays[f"{index}.{key}"] = np.asarray(record[key])
    return arrays


def vllm_arrays(dense=1):
    """Three requests, four layers of which ``dense`` never route; the second's prompt came from a cache in part."""
    random, arrays = np.random.default_rng(13), {}
    for request, (prompt, generated) in enumerate(((4, 2), (3, 3), (0, 1))):
        for name, num_tokens in (("prompt_routed_experts", prompt), ("routed_experts", generated)):
            ids = np.argsort(random.random((num_tokens, 4, 16)), axis=2)[..., :3].astype(np.int16)
            ids[:, :dense] = 0
            arrays[f"{request}.{name}"] = ids
    arrays["1.prompt_routed_experts"][:2] = -1
    return arrays


def flame_moe_arrays(passes=(5, 3), layers=(2, 3), top_k=3):
    """Two passes of two layers; probabilities in no order, as ``topk(sorted=False)`` leaves them."""
    random, arrays = np.random.default_rng(5), {}
    for number, num_tokens in enumerate(passes):
        for layer in layers:
            odds_TE = np.exp(random.normal(size=(num_tokens, 16)))
            ids_TK = np.argsort(-odds_TE, axis=1)[:, :top_k][:, ::-1]
            probs_TK = np.take_along_axis(odds_TE / odds_TE.sum(axis=1, keepdims=True), ids_TK, axis=1)
            arrays[f"{number}.{layer}.ids"] = ids_TK
            arrays[f"{number}.{layer}.probs"] = probs_TK.astype(np.float32)
    return arrays


def test_flame_moe_keeps_probabilities_as_shares_of_the_whole_mass(tmp_path, out):
    arrays = flame_moe_arrays()
    np.savez(tmp_path / "f.npz", **arrays)
    trace = imported("flame-moe", tmp_path / "f.npz", out, **FLAME).trace
    assert (trace.num_layers, trace.num_tokens, trace.num_sequences, trace.top_k) == (2, 8, 2, 3)
    assert not trace.scores_are_normalised
    ids, scores, sequence_id_T, _ = read_back(out)
    assert sequence_id_T.tolist() == [0] * 5 + [1] * 3
    for index, layer in enumerate((2, 3)):
        both = [np.concatenate([arrays[f"{number}.{layer}.{name}"] for number in (0, 1)]) for name in ("ids", "probs")]
        assert_rows_match((ids[index], scores[index]), *both)


def as_lines(arrays):
    return "".join(
        json.dumps(
            {
                "id": str(request),
                "prompt_routed_experts": arrays[f"{request}.prompt_routed_experts"].tolist() or None,
                "choices": [{"text": "", "routed_experts": arrays[f"{request}.routed_experts"].tolist()}],
            }
        )
        + "\n"
        for request in range(3)
    )


OPTIONS = {"esft": {}, "flame-moe": FLAME, "megatron": MEGATRON, "sglang": SGLANG, "vllm": VLLM}


def prepared(kind, root):
    """A sound source of each kind, and its options."""
    root.mkdir(parents=True, exist_ok=True)
    folders = {"esft": esft, "megatron": megatron}
    if kind in folders:
        folders[kind](root)
        return root, OPTIONS[kind]
    arrays = {"flame-moe": flame_moe_arrays, "sglang": lambda: sglang_arrays(sglang()), "vllm": vllm_arrays}
    np.savez(root / "d.npz", **arrays[kind]())
    return root / "d.npz", OPTIONS[kind]


# What is imported


def test_esft_keeps_every_token_but_the_first_of_each_text(tmp_path, out):
    rows = esft(tmp_path)
    summary = imported("esft", tmp_path, out, domain="law")
    ids, scores, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 4 + [2] * 2  # the text of one token vanishes
    assert position_T.tolist() == [1, 2, 3, 4, 1, 2]
    for layer in range(1, 27):
        ids_TK, weights_TK = (np.concatenate([text[part][1:] for text in rows["law", layer]]) for part in (0, 1))
        assert_rows_match((ids[layer - 1], scores[layer - 1]), ids_TK, weights_TK)
    assert (summary.left_out, summary.trace.num_layers, summary.trace.num_sequences) == (3, 26, 2)
    assert (summary.trace.num_experts, summary.trace.top_k) == (64, 6)
    metadata = open_trace(out).metadata
    assert (metadata["domain"], metadata["source_files"]) == ("law", "26")
    assert metadata["source_layers"] == ",".join(map(str, range(1, 27)))
    assert metadata["note"] == "first token of each sequence left out"
    assert "6 tokens in 2 sequences; 36 pairs in every layer" in summary.text()


def test_a_real_recording_survives_a_round_through_the_form_it_was_published_in(tmp_path, out):
    trace = open_trace(real("deepseek-v2-lite-intent"))
    directory = tmp_path / "intent"
    directory.mkdir()
    first, start_S = (np.arange(6)[None], np.full((1, 6), 0.1)), trace.start_S[:9]
    for layer in range(26):
        layer_TK = trace.read_layer(layer)
        with (directory / f"expert_weights_{layer + 1}.txt").open("w") as file:
            for start, end in itertools.pairwise(start_S):
                rows = (np.concatenate([a, b[start:end]]) for a, b in zip(first, layer_TK, strict=True))
                file.write(esft_line(*rows))
    imported("esft", tmp_path, out)
    for ours, theirs in zip(read_back(out), read_back(trace.path), strict=True):
        recorded = np.s_[:, : start_S[-1]] if theirs.ndim == 3 else np.s_[: start_S[-1]]
        np.testing.assert_array_equal(ours, theirs[recorded])


@pytest.mark.parametrize(
    ("function", "odds"), [("softmax", np.exp), ("sigmoid", lambda logits_TE: 1 / (1 + np.exp(-logits_TE)))]
)
def test_megatrons_logits_become_shares_of_the_score_mass(tmp_path, out, function, odds):
    rows = megatron(tmp_path)
    facts = imported("megatron", tmp_path, out, **{**MEGATRON, "score_function": function}).trace.metadata
    ids, scores, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 6 + [1] * 4
    assert position_T.tolist() == [*range(6), *range(4)]
    for index, layer in enumerate((1, 3)):
        ids_TK, logits_TE = (np.concatenate([rows[step, layer][part] for step in (0, 1)]) for part in (0, 1))
        odds_TE = odds(logits_TE)
        expected_TK = np.take_along_axis(odds_TE / odds_TE.sum(axis=1, keepdims=True), ids_TK, 1)
        order_TK = np.argsort(-expected_TK, axis=1, kind="stable")
        np.testing.assert_array_equal(ids[index], np.take_along_axis(ids_TK, order_TK, 1))
        np.testing.assert_allclose(scores[index], np.take_along_axis(expected_TK, order_TK, 1), rtol=1e-3)
    assert (facts["source_files"], facts["source_layers"]) == ("2", "1,3")
    assert function in facts["score"]
    assert "others than the largest" not in facts["note"]


def test_interleaved_sequences_are_told_apart(tmp_path, out):
    rows = megatron(tmp_path / "trace", passes=(6,))
    imported("megatron", tmp_path / "trace", out, **MEGATRON, micro_batch_size=2)
    ids, _, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert position_T.tolist() == [0, 1, 2, 0, 1, 2]
    for token, recorded in enumerate((0, 2, 4, 1, 3, 5)):  # [place, batch] flattened
        assert set(ids[1, token]) == set(rows[0, 3][0][recorded])
    text = refusal("megatron", tmp_path / "trace", tmp_path / "o" / "x", **MEGATRON, micro_batch_size=4)
    assert "num_tokens: expected a multiple of micro_batch_size (4), got 6" in text


@pytest.mark.seam
@pytest.mark.parametrize("logits", [True, False])
def test_what_megatrons_own_tracer_writes_is_read(tmp_path, out, logits, monkeypatch):
    if importlib.metadata.version("megatron-core").startswith("0.16"):  # asked first: its import takes seconds
        pytest.skip("0.16.1 has no router tracer")
    from megatron.core.transformer.moe import router_trace

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tracer = router_trace.RouterTracer(str(tmp_path / "trace"), max_steps=9, rank=0, capture_logits=logits)
    generator = torch.Generator().manual_seed(0)

    class Router:
        topk = 2

        def gating(self, hidden):
            return hidden

    expected = {}
    for step, num_tokens in enumerate((5, 3)):
        for layer in (1, 2):
            hidden_TE = torch.randn(num_tokens, 8, generator=generator).bfloat16()
            ids_TK = hidden_TE.topk(2, dim=1).indices
            map_TE = torch.zeros(num_tokens, 8, dtype=torch.bool).scatter(1, ids_TK, True)
            hook = tracer.make_hook(f"decoder.layers.{layer}.mlp.router")
            hook(Router(), (hidden_TE[:, None],), (map_TE.float(), map_TE))
            expected[step, layer] = ids_TK.numpy()
    tracer.flush()
    options = {"model": "toy", "phase": "prefill"}
    options |= {"score_function": "softmax"} if logits else {"num_experts": 8, "assume_equal_scores": True}
    assert imported("megatron", tmp_path / "trace", out, **options).trace.num_tokens == 8
    ids = read_back(out)[0]
    for layer in (1, 2):
        ids_TK = np.concatenate([expected[step, layer] for step in (0, 1)])
        np.testing.assert_array_equal(
            ids[layer - 1] if logits else np.sort(ids[layer - 1]), ids_TK if logits else np.sort(ids_TK)
        )


def test_sglangs_dump_goes_through_the_command_that_converts_it(tmp_path, out, monkeypatch):
    dump = sglang()
    torch.save(dump, tmp_path / "dump.pt")
    text = refusal("sglang", tmp_path / "dump.pt", out, **SGLANG)
    assert text.endswith(f"a pickle, which is not read; convert it where SGLang runs: {CONVERT}")
    python, option, code, *arguments = shlex.split(CONVERT)
    assert (python, option, arguments) == ("python", "-c", ["dump.pt", "dump.npz"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    exec(code, {})
    summary = imported("sglang", tmp_path / "dump.npz", out, **SGLANG)
    ids, scores, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5]
    assert position_T.tolist() == [0, 1, 2, 3, 8, 9, 10, 4, 11, 5, 12]
    to_logical = dump["last_physical_to_logical_map"].numpy()
    for index, layer in enumerate((1, 2, 3)):
        recorded = np.concatenate([record["topk_ids_of_layer"][layer].numpy() for record in dump["records"]])
        physical_TK = recorded[recorded[:, 0] >= 0, :3]
        np.testing.assert_array_equal(ids[index], to_logical[layer][physical_TK])
    assert (scores == np.float16(1 / 3)).all()
    assert (summary.trace.num_experts, summary.trace.top_k, summary.left_out) == (16, 3, 2)
    facts = summary.trace.metadata
    assert (facts["phase"], facts["source_layers"]) == ("prefill and decode", "1,2,3")
    assert facts["score"].startswith("assumed")


def test_ids_without_scores_need_consent_and_say_so_in_results(tmp_path, out):
    source, _ = prepared("sglang", tmp_path / "source")
    assert "no scores, only expert ids: set assume_equal_scores" in refusal("sglang", source, out, model="toy")
    imported("sglang", source, out, **SGLANG)
    fields = {
        "layer": 0,
        "num_experts": 16,
        "top_k": 3,
        "num_tokens": 9,
        "num_batches": 1,
        "tail": "uniform",
        "seed": 0,
    }
    with pytest.raises(ValueError, match="topk_share: needed"):
        RecordedWorkload(out, **fields)
    assert RecordedWorkload(out, **fields, topk_share=0.6).describe()["recording"]["score"].startswith("assumed equal")


@pytest.mark.parametrize("form", ["npz", "jsonl"])
def test_vllms_routed_experts_are_kept_with_their_places(tmp_path, out, form):
    arrays = vllm_arrays()
    path = tmp_path / f"routing.{form}"
    np.savez(path, **arrays) if form == "npz" else path.write_text(as_lines(arrays))
    summary = imported("vllm", path, out, **VLLM)
    ids, _, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 6 + [1] * 4 + [2]
    assert position_T.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 0]
    names = ("prompt_routed_experts", "routed_experts")
    recorded = np.concatenate([arrays[f"{request}.{name}"] for request in range(3) for name in names])
    recorded = recorded[(recorded >= 0).all(axis=(1, 2))]
    np.testing.assert_array_equal(ids, recorded[:, 1:].transpose(1, 0, 2))
    assert (summary.left_out, summary.trace.metadata["source_layers"]) == (2, "1,2,3")
    assert "1 layers that route nothing left out" in summary.trace.metadata["note"]


# Damage


def damaged(kind, root, damage):
    """A source, one file of which was changed by ``damage``: that file."""
    source, _ = prepared(kind, root)
    if source.suffix == ".npz":
        with np.load(source) as file:
            arrays = dict(file)
        damage(arrays)
        np.savez(source, **arrays)
        return source
    path = (
        source
        / {
            "esft": "results/expert_scores/intent/expert_weights_7.txt",
            "megatron": "router_trace_rank0.jsonl",
        }[kind]
    )
    text = path.read_text()
    if kind == "esft":
        text = damage(text)
    else:
        records = [json.loads(line) for line in text.splitlines()]
        damage(records)
        text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(text)
    return path


def entry(line, column, value):
    """Another id (columns 0 to 5) or weight (6 to 11) in the second token of an ESFT line."""

    def change(text):
        lines = [row.split("\t\t") for row in text.splitlines()]
        halves = [half.split("\t") for half in lines[line]]
        halves[column >= 6][6 + column % 6] = value
        lines[line] = ["\t".join(half) for half in halves]
        return "".join("\t\t".join(row) + "\n" for row in lines)

    return change


def record(line, **values):
    """Other values in a line of Megatron's; None removes the key."""

    def change(records):
        records[line] = {key: value for key, value in {**records[line], **values}.items() if value is not None}

    return change


def item(name, where, value):
    return lambda arrays: arrays[name].__setitem__(where, value)


def array(name, value):
    return lambda arrays: arrays.update({name: value}) if value is not None else arrays.pop(name)


NO_EXPERTS = [-1] * 5
MAP, IDS = "last_physical_to_logical_map", "topk_ids_of_layer"
DAMAGE = {
    "flame-moe": {
        " expected <pass>.<layer>.ids and .probs, got 'x'": array("x", np.zeros(3)),
        " missing array: 0.2.probs": array("0.2.probs", None),
        " 0.2: expected ids and probs of one shape, with": array("0.2.probs", np.zeros((2, 2))),
        " 0.2: token 0: scores: expected the sum of part of a softmax": item("0.2.probs", 0, 0.9),
        " 0.2.ids: ": array("0.2.ids", np.array([[{}]], dtype=object)),
    },
    "esft": {
        "1: expected 6 ids and weights per token, got 30 and 31": lambda text: text.replace("\t\t", "\t\t0.1\t", 1),
        "1: expected expert ids between tabs (": lambda text: "8.5" + text[text.index("\t") :],
        "4: expected ids, two tabs, weights; got 1 part(s)": lambda text: text + "\n",
        ": expected 3 texts, as many as the first layer has, got 2": lambda text: text[: text[:-1].rindex("\n") + 1],
        "2: expected 1 tokens, as the first layer has, got 3": lambda text: "".join(
            text.splitlines(keepends=True)[i] for i in (0, 2, 1)
        ),
        "3: token 1: scores: expected finite, non-negative values, got [": entry(2, 9, "nan"),
        "3: token 1: scores: expected the sum of part of a softmax (at most 1), got 1.": entry(2, 9, "0.99"),
    },
    "megatron": {
        ":2: expected block decoder or mtp and stage pre_dispatch": record(1, block="encoder"),
        ":2: num_tokens: expected a whole number from 0, got None": record(1, num_tokens=None),
        ":2: top_indices: expected whole numbers of shape 7x3, got [[": record(1, num_tokens=7),
        ":2: expected topk 3 with logits, as in the first": record(1, topk=2, top_indices=[[1, 2]] * 6),
        ":2: top_indices: expected whole numbers of shape 6x3": record(1, top_indices=[[1, 2, 3.5]] * 6),
        ":2: layer 3: token 0: expert_ids: expected distinct experts": record(1, top_indices=[[1, 2, 1]] * 6),
        ":2: logit_shape: expected 6 tokens in 192 bytes of bfloat16": record(1, logit_shape=[5, 16]),
        ":4: logits_rank0.bin: expected at least 1000128 bytes, got": record(3, logit_offset=10**6),
        ": step 1: layer 3: expected the layers of the first step, got one less": lambda records: records.pop(),
        ": step 1: layer 3: expected passes of [4] tokens like layer 1, got [2]": record(
            3, num_tokens=2, top_indices=[[1, 2, 3]] * 2, logit_shape=[2, 16], logit_bytes=64
        ),
    },
    "sglang": {
        f" missing array: {MAP}": array(MAP, None),
        f" expected at least one pass (0.{IDS}), got none": lambda arrays: [
            arrays.pop(name) for name in list(arrays) if name[0].isdigit()
        ],
        f" 0.{IDS}: expected 3 layers of 8 tokens, got shape (4, 8, 8)": array(MAP, np.zeros((3, 20), int)),
        f" 0.{IDS}: layer 2: expected physical experts 0 to 19, got 20": item(f"0.{IDS}", (2, 3, 1), 20),
        f" 0.{IDS}: layer 2: token 3: expected 3 experts and then -1, got [": item(f"0.{IDS}", (2, 3, 1), -1),
        f" 0.{IDS}: layer 1: token 7: expected -1 beyond extend_seq_lens, got experts": item(
            f"0.{IDS}", (slice(1, 4), 7), [1, 2, 3, *NO_EXPERTS]
        ),
        " 0.extend_seq_lens: expected lengths of 8 tokens in all": array("0.extend_seq_lens", np.array([6, 3])),
        f" 0.{IDS}: layer 1: position: expected 0 to": item("0.positions", 1, -5),
        "layer 0: expected 11 tokens, as many as the sequences have, got 2": lambda arrays: arrays[
            f"1.{IDS}"
        ].__setitem__(0, arrays[f"1.{IDS}"][1]),
    },
    "vllm": {
        " expected names like 0.prompt_routed_experts and": array("arr_0", np.zeros((1, 4, 3), int)),
        " 1.routed_experts: expected 3 dimensions, got shape (4, 3)": array("1.routed_experts", np.zeros((4, 3), int)),
        " 1.routed_experts: token 5: expected -1 for all": item("1.routed_experts", (2, 3), -1),
        " 1.routed_experts: layer 0: expected 0 only": item("1.routed_experts", (2, 0), [1, 2, 3]),
        " 1.routed_experts: layer 3: token 5: expert_ids: expected distinct": item("1.routed_experts", (2, 3), 0),
    },
}


@pytest.mark.parametrize(("kind", "message"), [(kind, message) for kind in DAMAGE for message in DAMAGE[kind]])
def test_a_damaged_source_is_refused_with_file_and_place(tmp_path, out, kind, message):
    path = damaged(kind, tmp_path / "source", DAMAGE[kind][message])
    source = path if path.suffix == ".npz" else tmp_path / "source"
    text = refusal(kind, source, out, **OPTIONS[kind])
    # What only the finished file shows is said of the file that was being made.
    if kind == "sglang":
        assert text.startswith((f"{path}:", str(out.parent)))
        assert message in text
    else:
        assert text.startswith(tuple(f"{path}{between}{message}" for between in ("", ":", ": ")))


def test_parts_that_are_missing_are_refused(tmp_path, out):
    source, _ = prepared("esft", tmp_path / "esft")
    assert "domain: expected one of intent, law; got 'maths'" in refusal("esft", source, out, domain="maths")
    path = source / "results" / "expert_scores" / "law" / "expert_weights_26.txt"
    path.unlink()
    assert refusal("esft", source, out) == f"{path}: no such file, but expected layers 1 to 26"
    (tmp_path / "empty").mkdir()
    assert "expected results/expert_scores/<domain>/" in refusal("esft", tmp_path / "empty", out)
    np.savez(tmp_path / "r.npz", **{"0.routed_experts": np.full((3, 4, 2), -1)})
    text = refusal("vllm", tmp_path / "r.npz", out, **VLLM)
    assert text.endswith("expected at least one token, got none (3 left out)")


def test_what_is_no_json_is_refused(tmp_path, out):
    path = tmp_path / "r.jsonl"
    path.write_text("[" * 100_000)
    assert refusal("vllm", path, out, **VLLM).startswith(f"{path}:1: expected JSON, got ")


@pytest.mark.parametrize("value", [0x7FC0, 0xFF80])  # NaN and an infinity in bfloat16
def test_megatrons_logits_must_be_finite(tmp_path, out, value):
    megatron(tmp_path / "trace")
    sidecar = tmp_path / "trace" / "logits_rank0.bin"
    data = np.frombuffer(sidecar.read_bytes(), "<u2").copy()
    data[6 * 16 + 2 * 16 + 5] = value  # second record, third token
    sidecar.write_bytes(data.tobytes())
    text = refusal("megatron", tmp_path / "trace", out, **MEGATRON)
    assert "rank0.jsonl:2: logits_rank0.bin: token 2: expected finite logits" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "choices: expected a list of completions, got None"),
        ('{"choices": [{"text": ""}]}', "choices: 0: routed_experts: expected lists of experts, got none"),
        ('{"choices": [{"routed_experts": [[[1, 2], [3]]]}]}', "choices: 0: routed_experts: expected lists of equal"),
        ("{", "expected JSON, got '{'"),
    ],
)
def test_damaged_vllm_lines_are_refused_with_file_and_line(tmp_path, out, line, message):
    path = tmp_path / "routing.jsonl"
    path.write_text(as_lines(vllm_arrays()) + line + "\n")
    assert refusal("vllm", path, out, **VLLM).startswith(f"{path}:4: {message}")


def test_an_array_that_claims_to_be_huge_is_refused_before_it_is_held(tmp_path, out):
    path = tmp_path / "r.npz"
    np.savez(path, **{"0.routed_experts": np.zeros((3, 4, 2), np.int64)})
    with zipfile.ZipFile(path) as archive:
        data = archive.read("0.routed_experts.npy")
    for rows in (b"1099511627776", b"1048576      "):
        with zipfile.ZipFile(path, "w") as archive:
            claim = b"(" + rows.strip() + b", 4, 2), }" + b" " * (5 + rows.count(b" "))
            archive.writestr("0.routed_experts.npy", data.replace(b"(3, 4, 2), }" + b" " * 17, claim))
        assert refusal("vllm", path, out, **VLLM).startswith(f"{path}: 0.routed_experts: ")
    with pytest.raises(ValueError, match=r"0.routed_experts.npy: expected at most 100 bytes \(--max-bytes\), got "):
        import_trace("vllm", path, out, ImportOptions(**VLLM), max_bytes=100)


@pytest.mark.parametrize("damage", ["truncated", "damaged data", "damaged packing", "pickle inside"])
def test_a_damaged_archive_is_refused(tmp_path, out, damage):
    path = tmp_path / "r.npz"
    np.savez(path, **vllm_arrays())
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "damaged packing":
        np.savez_compressed(path, **vllm_arrays())
        imported("vllm", path, tmp_path / "sound", **VLLM)
        whole = path.read_bytes()
        # A member's data follow its name and an extra field, whose lengths stand at 26 and 28; no block is of type 3.
        place = 30 + int.from_bytes(whole[26:28], "little") + int.from_bytes(whole[28:30], "little")
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    elif damage == "damaged data":
        place = whole.index(b"\x93NUMPY") + 150
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    else:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("data.pkl", b"\x80\x04.")
    assert refusal("vllm", path, out, **VLLM).startswith(f"{path}: ")


def test_a_line_without_end_is_refused(tmp_path, out, monkeypatch):
    monkeypatch.setattr(sources, "MAX_PIECE_BYTES", 100)
    path = tmp_path / "r.jsonl"
    path.write_text(as_lines(vllm_arrays()))
    assert refusal("vllm", path, out, **VLLM) == f"{path}:1: expected a line of at most 100 bytes, got a longer one"


# What all have in common


@every_kind
def test_pairs_of_every_expert_are_conserved_and_replayed_and_a_changed_source_has_another_hash(
    tmp_path, out, kind, monkeypatch
):
    seen, add = {}, TraceWriter.add

    def spy(writer, layer, ids_TK, *rest):
        seen[layer] = seen.get(layer, 0) + np.bincount(np.asarray(ids_TK).ravel(), minlength=256)
        return add(writer, layer, ids_TK, *rest)

    source, options = prepared(kind, tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "add", spy)
        trace = imported(kind, source, out, **options).trace
    ids = read_back(out)[0]
    for index, layer in enumerate(sorted(seen)):
        np.testing.assert_array_equal(np.bincount(ids[index].ravel(), minlength=256), seen[layer])
        assert seen[layer].sum() == trace.num_tokens * trace.top_k
    sizes = {"num_experts": trace.num_experts, "top_k": trace.top_k, "num_tokens": 12, "num_batches": 1}
    share = 0.6 if trace.scores_are_normalised else None
    workload = RecordedWorkload(out, 1, **sizes, tail="uniform", seed=0, topk_share=share)
    best = workload.batch(0).scores_TE.topk(trace.top_k, dim=1).indices
    np.testing.assert_array_equal(best.numpy(), trace.read_layer(1)[0][workload.draw(0)])
    again = imported(kind, source, out.with_name("again"), **options).trace
    assert again.path.read_bytes() == out.read_bytes()
    files = [source] if source.is_file() else source.rglob("*")
    path = sorted(p for p in files if p.suffix in (".txt", ".jsonl", ".npz") or "_ex" in p.name)[-1]
    if path.suffix == ".npz":
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = b"changed"
    else:
        path.write_text(path.read_text().replace("\n", "\r\n"))
    changed = imported(kind, source, out.with_name("changed"), **options).trace
    assert changed.metadata["source_sha256"] != trace.metadata["source_sha256"]


def test_a_writer_that_loses_or_changes_pairs_is_found_out(tmp_path, out, monkeypatch):
    source, options = prepared("vllm", tmp_path / "source")
    spool = TraceWriter._spool

    def changing(writer, name, values):
        if name.startswith("expert_ids") and values.size:
            values = values.copy()
            values[0, 0] = next(e for e in range(writer.num_experts) if e not in values[0])
        spool(writer, name, values)

    monkeypatch.setattr(TraceWriter, "_spool", changing)
    with pytest.raises(RuntimeError, match="was written with other experts than it was read with"):
        imported("vllm", source, out, **options)
    assert list(out.parent.iterdir()) == []


def test_a_failure_at_the_end_leaves_nothing_behind(tmp_path, out, monkeypatch):
    source, options = prepared("vllm", tmp_path / "source")

    def full(*_):
        raise OSError(28, "No space left on device", "spool")

    monkeypatch.setattr(TraceWriter, "_string_together", full)
    assert refusal("vllm", source, out, **options) == "spool: No space left on device"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("tensorrt", {}, "kind: expected one of esft, flame-moe, megatron, sglang, vllm; got 'tensorrt'"),
        ("esft", {"phase": "decode"}, "phase: not for esft recordings, which take domain; got 'decode'"),
        ("vllm", {"num_experts": 8, "assume_equal_scores": True}, "model: needed, because vllm recordings do not say"),
        ("vllm", {}, "model, num_experts, assume_equal_scores: needed, because vllm recordings do not say it, and"),
        ("vllm", {"preset": "olmoe"}, "preset: expected a path of a config.json or one of deepseek-"),
        (
            "vllm",
            {"preset": "olmoe-1b-7b", "num_experts": 64},
            "num_experts: expected none beside preset, which says it",
        ),
    ],
)
def test_options_that_do_not_suit_are_refused(tmp_path, out, kind, options, message):
    source, _ = prepared(kind if kind in IMPORTERS else "vllm", tmp_path / "source")
    assert refusal(kind, source, out, **options).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phase": "training and decode"}, "phase: expected one of prefill, decode, prefill and decode, training; got"),
        ({"score_function": "relu"}, "score_function: expected softmax or sigmoid, got 'relu'"),
        ({"num_experts": 1025}, "num_experts: expected 2 to 1024, got 1025"),
        ({"micro_batch_size": 0}, "micro_batch_size: expected at least 1, got 0"),
        ({"model": "a\nb"}, r"model: expected words on one line, got 'a\\nb'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ImportOptions(**options)


def test_a_preset_gives_the_models_facts_and_the_recording_must_agree(tmp_path, out):
    source, _ = prepared("vllm", tmp_path / "source")
    options = ImportOptions(preset="olmoe-1b-7b", assume_equal_scores=True)
    with pytest.raises(ValueError, match=r"0\.prompt_routed_experts: top_k: the model has 8, the recording 3"):
        import_trace("vllm", source, out, options)
    random = np.random.default_rng(0)
    np.savez(source, **{"0.routed_experts": np.argsort(random.random((5, 16, 64)), axis=2)[..., :8]})
    trace = import_trace("vllm", source, out, options).trace
    assert (trace.metadata["model"], trace.num_experts, trace.top_k) == ("OLMoE-1B-7B", 64, 8)


# The command


def command_line(kind, source, out, options):
    """The arguments of ``moe-ep-bench`` that say what these options do."""
    arguments = ["trace", "import", kind, str(source), str(out)]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return arguments


def test_the_command_makes_the_trace_that_its_options_ask_for(tmp_path, out, capsys):
    source, options = prepared("megatron", tmp_path / "source")
    expected = imported("megatron", source, out.with_name("expected"), **options)
    path = expected.trace.path
    assert main(command_line("megatron", source, out, options)) == 0
    said = capsys.readouterr()
    assert out.read_bytes() == path.read_bytes()
    assert said.out == expected.text().replace(str(path), str(out)) + "\n"
    assert said.err == ""


@every_kind
def test_the_command_refuses_another_source_in_one_line(tmp_path, out, kind, capsys):
    source = tmp_path / "other"
    for said_of_it in (" no such file or directory", ""):
        assert main(command_line(kind, source, out, OPTIONS[kind])) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n"), out.exists()) == ("", 1, False)
        assert said.err.startswith(f"moe-ep-bench: {source}:{said_of_it}")
        source.write_text("no recording\n")
