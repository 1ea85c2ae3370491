"""Claims about importing recordings: nothing of the source is lost, nothing wrong gets in, nothing is half written.

Sources are made here, small and of the published form; none is copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.cli import main
from moe_ep_bench.workload import RecordedWorkload
from moe_ep_bench.workload.importers import READERS, TAKES, ImportOptions, import_trace, sources
from moe_ep_bench.workload.importers.sglang import CONVERT
from moe_ep_bench.workload.importers.writer import TraceWriter
from moe_ep_bench.workload.trace import open_trace

few_examples = settings(max_examples=15)

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def read_back(path):
    """Ids and scores of all layers [L, T, K], and sequence ids and positions [T]."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return tensors["expert_ids"], tensors["scores"], tensors["sequence_id"], tensors["position"]


def refusal(kind, source, out, **options):
    """The one line with which an import is refused, after which nothing is left where the trace would be."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        import_trace(kind, source, out, ImportOptions(**options))
    assert not out.exists()
    assert not out.parent.exists() or list(out.parent.iterdir()) == []
    return str(error.value)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "made.safetensors"


def assert_rows_match(made, ids_TK, scores_TK):
    """The trace's rows are the source's, best first; equal scores keep the source's order."""
    made_ids_TK, made_scores_TK = made
    order_TK = np.array([sorted(range(len(row)), key=lambda k: -row[k]) for row in scores_TK.tolist()])
    np.testing.assert_array_equal(made_ids_TK, np.take_along_axis(ids_TK, order_TK, 1))
    np.testing.assert_array_equal(made_scores_TK, np.take_along_axis(scores_TK, order_TK, 1).astype(np.float16))


# ESFT


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


def esft_file(root, layer=7, domain="intent"):
    return root / "results" / "expert_scores" / domain / f"expert_weights_{layer}.txt"


def test_esft_keeps_every_token_but_the_first_of_each_text(tmp_path, out):
    rows = esft(tmp_path / "esft")
    summary = import_trace("esft", tmp_path / "esft", out, ImportOptions(domain="law"))
    ids, scores, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 4 + [2] * 2  # the text of one token vanishes
    assert position_T.tolist() == [1, 2, 3, 4, 1, 2]
    for layer in range(1, 27):
        ids_TK, weights_TK = (np.concatenate([text[part][1:] for text in rows["law", layer]]) for part in (0, 1))
        assert_rows_match((ids[layer - 1], scores[layer - 1]), ids_TK, weights_TK)
    assert (summary.num_layers, summary.num_tokens, summary.num_sequences, summary.left_out) == (26, 6, 2, 3)
    assert (summary.num_experts, summary.top_k, summary.num_source_files) == (64, 6, 26)
    metadata = open_trace(out).metadata
    assert metadata["domain"] == "law"
    assert metadata["source_layers"] == ",".join(map(str, range(1, 27)))
    assert metadata["note"] == "first token of each sequence left out"
    assert "6 tokens in 2 sequences; 36 pairs in every layer" in summary.text()


def test_esft_domains_follow_each_other_as_other_texts(tmp_path, out):
    rows = esft(tmp_path / "esft", lengths=(2, 3))
    import_trace("esft", tmp_path / "esft" / "results" / "expert_scores", out)
    ids, _, sequence_id_T, _ = read_back(out)
    assert open_trace(out).metadata["domain"] == "intent+law"
    assert sequence_id_T.tolist() == [0, 1, 1, 2, 3, 3]
    assert set(ids[4, 0]) == set(rows["intent", 5][0][0][1])
    assert set(ids[4, 5]) == set(rows["law", 5][1][0][2])


def test_one_domains_directory_can_be_named(tmp_path, out):
    esft(tmp_path / "esft")
    summary = import_trace("esft", tmp_path / "esft" / "results" / "expert_scores" / "law", out)
    assert summary.domain == "law"


ESFT_DAMAGE = {
    "a weight more": (
        lambda text: text.replace("\t\t", "\t\t0.1\t", 1),
        "1: expected 6 ids and weights per token, got 30 and 31",
    ),
    "no weights": (lambda text: text.replace("\t\t", "\t", 1), "1: expected ids, two tabs, weights; got 1 part(s)"),
    "a word": (lambda text: "eight" + text[text.index("\t") :], "1: expected expert ids between tabs ("),
    "an id like a number": (lambda text: "8.5" + text[text.index("\t") :], "1: expected expert ids between tabs ("),
    "nothing": (lambda text: text + "\n", "4: expected ids, two tabs, weights; got 1 part(s)"),
    "half a line": (lambda text: text[:-30], "3: expected 6 ids and weights per token, got 18 and"),
    "one text less": (
        lambda text: text[: text[:-1].rindex("\n") + 1],
        ": expected 3 texts, as many as the first layer",
    ),
    "one text more": (
        lambda text: text + text[: text.index("\n") + 1],
        "4: expected no such line, as the first layer has, got 5 tokens",
    ),
    "other text": (
        lambda text: "".join(text.splitlines(keepends=True)[i] for i in (0, 2, 1)),
        "2: expected 1 tokens, as the first layer has, got 3 tokens",
    ),
}


@pytest.mark.parametrize("name", ESFT_DAMAGE)
def test_damaged_esft_is_refused_with_file_and_line(tmp_path, out, name):
    esft(tmp_path / "esft")
    damage, message = ESFT_DAMAGE[name]
    path = esft_file(tmp_path / "esft")
    path.write_text(damage(path.read_text()))
    text = refusal("esft", tmp_path / "esft", out)
    assert text.startswith(f"{path}:")
    assert message in text


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (0, 64, "expert_ids: expected 0 to 63, got 64"),
        (0, -1, "expert_ids: expected 0 to 63, got -1"),
        (0, "again", "expert_ids: expected distinct experts, got ["),
        (1, np.nan, "scores: expected finite, non-negative values, got ["),
        (1, np.inf, "scores: expected finite, non-negative values, got ["),
        (1, -0.1, "scores: expected finite, non-negative values, got ["),
        (1, 0.99, "scores: expected the sum of part of a softmax (at most 1), got 1."),
    ],
)
def test_esft_routing_that_no_router_makes_is_refused(tmp_path, out, part, value, message):
    texts = esft(tmp_path / "esft")["intent", 7]
    texts[2][part][1, 3] = texts[2][0][1, 0] if value == "again" else value
    path = esft_file(tmp_path / "esft")
    path.write_text("".join(esft_line(*text) for text in texts))
    assert refusal("esft", tmp_path / "esft", out).startswith(f"{path}:3: token 1: {message}")


def test_esft_without_a_layer_or_a_domain_is_refused(tmp_path, out):
    esft(tmp_path / "esft")
    assert "domain: expected one of intent, law; got 'maths'" in refusal("esft", tmp_path / "esft", out, domain="maths")
    path = esft_file(tmp_path / "esft", 26, "law")
    path.unlink()
    assert refusal("esft", tmp_path / "esft", out) == f"{path}: no such file, but expected layers 1 to 26"
    (tmp_path / "empty").mkdir()
    assert "expected results/expert_scores/<domain>/" in refusal("esft", tmp_path / "empty", out)


def test_the_real_esft_recording_has_the_form_that_an_import_makes(tmp_path, out):
    real = TRACES / "deepseek-v2-lite-intent.safetensors"
    if not real.is_file():
        assert "MOE_EP_BENCH_REQUIRE_TRACES" not in os.environ, f"{real} is missing"
        pytest.skip("no recorded traces in ../shared/traces")
    esft(tmp_path / "esft")
    import_trace("esft", tmp_path / "esft", out, ImportOptions(domain="intent"))
    made, real = open_trace(out), open_trace(real)
    assert {name: made.metadata[name] for name in real.metadata} == dict(real.metadata)
    assert made.num_layers == real.num_layers
    assert read_back(out)[3][0] == read_back(real.path)[3][0] == 1


def test_a_real_recording_survives_a_round_through_the_form_it_was_published_in(tmp_path, out):
    real = TRACES / "deepseek-v2-lite-intent.safetensors"
    if not real.is_file():
        assert "MOE_EP_BENCH_REQUIRE_TRACES" not in os.environ, f"{real} is missing"
        pytest.skip("no recorded traces in ../shared/traces")
    trace = open_trace(real)
    directory = tmp_path / "esft" / "results" / "expert_scores" / "intent"
    directory.mkdir(parents=True)
    for layer in range(26):
        ids_TK, scores_TK = trace.read_layer(layer)
        with (directory / f"expert_weights_{layer + 1}.txt").open("w") as file:
            for start, end in zip(trace.start_S, trace.start_S[1:], strict=False):
                first = np.arange(6)[None], np.full((1, 6), 0.1)
                file.write(
                    esft_line(
                        *(np.concatenate([a, b[start:end]]) for a, b in zip(first, (ids_TK, scores_TK), strict=True))
                    )
                )
    import_trace("esft", tmp_path / "esft", out)
    for ours, theirs in zip(read_back(out), read_back(real), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# GPT-OSS


def gpt_oss(
    root, answers=(("gpqa/Genetics/True_False", 50, 4), ("mmlu/law/True_True", 9, 3), ("mmlu/law/False_False", 0, 0))
):
    """A checkout; returns by document the ids and probabilities [layers, tokens, 4]."""
    random, rows = np.random.default_rng(5), {}
    for name, first, num_tokens in answers:
        ids = np.argsort(random.random((24, num_tokens, 32)), axis=2)[..., :4]
        probs = random.random((24, num_tokens, 4)) + 0.1
        probs = np.sort(probs / probs.sum(axis=2, keepdims=True), axis=2)[..., ::-1]
        probs = torch.from_numpy(probs.copy()).bfloat16().double().numpy()
        path = root / "data" / f"{name}_examples.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(gpt_oss_document(ids, probs, first)))
        path.with_name(path.name.replace("_examples", "")).write_text('{"sample_count": 1}')
        rows[name] = ids, probs
    return rows


def gpt_oss_document(ids, probs, first):
    return {
        "original_prompt": "?",
        "router_data": [
            {
                f"token_{first + token}": {
                    f"layer_{layer}": {
                        "selected_experts": ids[layer, token].tolist(),
                        "selected_probs": probs[layer, token].tolist(),
                    }
                    for layer in range(24)
                }
            }
            for token in range(ids.shape[1])
        ],
    }


def test_gpt_oss_keeps_every_generated_token(tmp_path, out):
    rows = gpt_oss(tmp_path / "gpt-oss")
    summary = import_trace("gpt-oss", tmp_path / "gpt-oss", out)
    ids, scores, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 4 + [2] * 3
    assert position_T.tolist() == [50, 51, 52, 53, 9, 10, 11]
    for layer in range(24):
        ids_TK, probs_TK = (
            np.concatenate([rows[name][part][layer] for name in ("gpqa/Genetics/True_False", "mmlu/law/True_True")])
            for part in (0, 1)
        )
        assert_rows_match((ids[layer], scores[layer]), ids_TK, probs_TK)
    assert (summary.num_tokens, summary.num_source_files, summary.phase, summary.domain) == (7, 3, "decode", "mixed")
    assert "1 answers without recorded tokens" in open_trace(out).metadata["note"]
    assert open_trace(out).scores_are_normalised


def test_gpt_oss_can_be_imported_by_part(tmp_path, out):
    gpt_oss(tmp_path / "gpt-oss")
    assert import_trace("gpt-oss", tmp_path / "gpt-oss", out, ImportOptions(domain="mmlu/law")).num_tokens == 3
    out.unlink()
    text = refusal("gpt-oss", tmp_path / "gpt-oss", out, domain="mm")
    assert text.endswith("domain: expected one of gpqa, mmlu; got 'mm'")


def test_the_real_gpt_oss_recording_has_the_form_that_an_import_makes(tmp_path, out):
    real = TRACES / "gpt-oss-20b-mixed.safetensors"
    if not real.is_file():
        assert "MOE_EP_BENCH_REQUIRE_TRACES" not in os.environ, f"{real} is missing"
        pytest.skip("no recorded traces in ../shared/traces")
    gpt_oss(tmp_path / "gpt-oss")
    import_trace("gpt-oss", tmp_path / "gpt-oss", out)
    made, real = open_trace(out), open_trace(real)
    assert {name: made.metadata[name] for name in real.metadata} == dict(real.metadata)
    assert (made.num_layers, made.num_experts) == (real.num_layers, real.num_experts)


def _token(document, index=1):
    return next(iter(document["router_data"][index].values()))


GPT_OSS_DAMAGE = {
    "no list": (
        lambda d: d.update(router_data={"token_1": 1}),
        "router_data: expected a list of tokens, got {'token_1'",
    ),
    "no token": (lambda d: d["router_data"].append({"word_3": {}}), "router_data: entry 4: expected one token_<place>"),
    "two tokens": (
        lambda d: d["router_data"][0].update(token_1={}),
        "router_data: entry 0: expected one token_<place>",
    ),
    "no layer": (lambda d: _token(d).pop("layer_3"), "token_51: expected layer_0 to layer_23, got one too many or few"),
    "another layer": (
        lambda d: _token(d).update(layer_24={}),
        "token_51: expected layer_0 to layer_23, got one too many or few: ['layer_24']",
    ),
    "out of order": (
        lambda d: d["router_data"].reverse(),
        "token_52: expected places in ascending order, got others",
    ),
    "five experts": (
        lambda d: _token(d)["layer_3"]["selected_experts"].append(7),
        "token_51: layer_3: selected_experts: expected 4 numbers, got [",
    ),
    "no probabilities": (
        lambda d: _token(d)["layer_3"].pop("selected_probs"),
        "token_51: layer_3: selected_probs: expected 4 numbers, got None",
    ),
    "words": (
        lambda d: _token(d)["layer_3"].update(selected_experts=["a", "b", "c", "d"]),
        "layer_3: selected_experts: expected whole numbers of shape nx4, got [",
    ),
    "out of range": (
        lambda d: _token(d)["layer_3"].update(selected_experts=[1, 2, 3, 32]),
        "layer_3: token 51: expert_ids: expected 0 to 31, got 32",
    ),
    "twice": (
        lambda d: _token(d)["layer_3"].update(selected_experts=[1, 2, 3, 1]),
        "layer_3: token 51: expert_ids: expected distinct experts, got [1, 2, 3, 1]",
    ),
    "negative": (
        lambda d: _token(d)["layer_3"].update(selected_probs=[0.9, 0.1, 0.1, -0.1]),
        "layer_3: token 51: scores: expected finite, non-negative values, got [0.9, 0.1, 0.1, -0.1]",
    ),
    "not a softmax": (
        lambda d: _token(d)["layer_3"].update(selected_probs=[0.4, 0.2, 0.1, 0.1]),
        "layer_3: token 51: scores: expected the sum of a softmax over the top-k (1), got 0.8",
    ),
}


@pytest.mark.parametrize("name", GPT_OSS_DAMAGE)
def test_damaged_gpt_oss_is_refused_with_file_and_place(tmp_path, out, name):
    gpt_oss(tmp_path / "gpt-oss")
    damage, message = GPT_OSS_DAMAGE[name]
    path = tmp_path / "gpt-oss" / "data" / "gpqa" / "Genetics" / "True_False_examples.json"
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    assert refusal("gpt-oss", tmp_path / "gpt-oss", out).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"router_data": [', "Expecting value"),
        ("[" * 100_000, "recursion"),
        ('{"router_data": [NaN]}', "NaN is no JSON number"),
        ('{"router_data": [-Infinity]}', "-Infinity is no JSON number"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path, out, text, reason):
    gpt_oss(tmp_path / "gpt-oss")
    path = tmp_path / "gpt-oss" / "data" / "mmlu" / "law" / "True_True_examples.json"
    path.write_text(text)
    message = refusal("gpt-oss", tmp_path / "gpt-oss", out)
    assert message.startswith(f"{path}: expected JSON, got ")
    assert reason in message


# Megatron-Core

MEGATRON = {"model": "toy", "phase": "prefill", "score_function": "softmax"}


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


def softmax_shares(ids_TK, logits_TE):
    odds_TE = np.exp(logits_TE)
    return np.take_along_axis(odds_TE / odds_TE.sum(axis=1, keepdims=True), ids_TK, 1)


def sigmoid_shares(ids_TK, logits_TE):
    odds_TE = 1 / (1 + np.exp(-logits_TE))
    return np.take_along_axis(odds_TE / odds_TE.sum(axis=1, keepdims=True), ids_TK, 1)


@pytest.mark.parametrize(("function", "shares"), [("softmax", softmax_shares), ("sigmoid", sigmoid_shares)])
def test_megatrons_logits_become_shares_of_the_score_mass(tmp_path, out, function, shares):
    rows = megatron(tmp_path / "trace")
    summary = import_trace(
        "megatron", tmp_path / "trace", out, ImportOptions(**{**MEGATRON, "score_function": function})
    )
    ids, scores, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 6 + [1] * 4
    assert position_T.tolist() == [*range(6), *range(4)]
    for index, layer in enumerate((1, 3)):
        ids_TK, logits_TE = (np.concatenate([rows[step, layer][part] for step in (0, 1)]) for part in (0, 1))
        expected_TK = shares(ids_TK, logits_TE)
        order_TK = np.argsort(-expected_TK, axis=1, kind="stable")
        np.testing.assert_array_equal(ids[index], np.take_along_axis(ids_TK, order_TK, 1))
        np.testing.assert_allclose(scores[index], np.take_along_axis(expected_TK, order_TK, 1), rtol=1e-3)
    assert summary.num_source_files == 2
    assert function in summary.score
    assert open_trace(out).metadata["source_layers"] == "1,3"
    assert "others than the largest" not in summary.note


def test_a_selection_that_a_bias_bent_is_counted(tmp_path, out):
    megatron(tmp_path / "trace")
    path = tmp_path / "trace" / "router_trace_rank0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    chosen = records[0]["top_indices"][2]
    records[0]["top_indices"][2] = sorted([*chosen[:2], next(e for e in range(16) if e not in chosen)])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "in 1 rows of all layers others than" in import_trace("megatron", path, out, ImportOptions(**MEGATRON)).note


def test_interleaved_sequences_are_told_apart(tmp_path, out):
    rows = megatron(tmp_path / "trace", passes=(6,))
    import_trace("megatron", tmp_path / "trace", out, ImportOptions(**MEGATRON, micro_batch_size=2))
    ids, _, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert position_T.tolist() == [0, 1, 2, 0, 1, 2]
    for token, recorded in enumerate((0, 2, 4, 1, 3, 5)):  # [place, batch] flattened
        assert set(ids[1, token]) == set(rows[0, 3][0][recorded])
    text = refusal("megatron", tmp_path / "trace", tmp_path / "o" / "x", **MEGATRON, micro_batch_size=4)
    assert "num_tokens: expected a multiple of micro_batch_size (4), got 6" in text


def test_in_decode_every_token_stands_alone(tmp_path, out):
    megatron(tmp_path / "trace")
    summary = import_trace("megatron", tmp_path / "trace", out, ImportOptions(**{**MEGATRON, "phase": "decode"}))
    assert summary.num_sequences == summary.num_tokens == 10


def test_megatrons_passes_of_one_step_follow_each_other(tmp_path, out):
    rows = megatron(tmp_path / "trace", passes=(3, 5))
    path = tmp_path / "trace" / "router_trace_rank0.jsonl"
    path.write_text(path.read_text().replace('"step": 1', '"step": 0'))  # two microbatches of a training step
    import_trace("megatron", path, out, ImportOptions(**{**MEGATRON, "phase": "training"}))
    ids, _, sequence_id_T, _ = read_back(out)
    assert sequence_id_T.tolist() == [0] * 3 + [1] * 5
    assert set(ids[0, 4]) == set(rows[1, 1][0][1])


def test_megatron_without_logits_needs_consent(tmp_path, out):
    megatron(tmp_path / "trace", logits=False)
    options = {"model": "toy", "phase": "prefill", "num_experts": 16}
    text = refusal("megatron", tmp_path / "trace", out, **options)
    assert "jsonl:1: no scores, only expert ids: record with --moe-routing-trace-capture-logits" in text
    assert "num_experts: needed" in refusal(
        "megatron", tmp_path / "trace", out, model="toy", phase="prefill", assume_equal_scores=True
    )
    import_trace("megatron", tmp_path / "trace", out, ImportOptions(**options, assume_equal_scores=True))
    assert open_trace(out).scores_are_assumed
    assert (read_back(out)[1] == np.float16(1 / 3)).all()


def test_other_blocks_and_passes_without_tokens_are_passed_over(tmp_path, out):
    megatron(tmp_path / "trace", passes=(2, 0, 3))
    path = tmp_path / "trace" / "router_trace_rank0.jsonl"
    mtp = {"step": 0, "stage": "pre_dispatch", "block": "mtp", "mtp_idx": 0, "layer": 1, "rank": 0}
    path.write_text(json.dumps(mtp) + "\n" + path.read_text())
    summary = import_trace("megatron", tmp_path / "trace", out, ImportOptions(**MEGATRON))
    assert summary.num_tokens == 5
    assert "1 records of multi-token prediction left out" in summary.note


def _change(line, **values):
    return lambda records: records[line].update(values)


MEGATRON_DAMAGE = {
    "no object": (lambda r: r.__setitem__(1, [1, 2]), ":2: expected an object, got [1, 2]"),
    "other block": (_change(1, block="encoder"), ":2: expected block decoder or mtp and stage pre_dispatch"),
    "other stage": (_change(1, stage="post"), ":2: expected block decoder or mtp and stage pre_dispatch"),
    "no count": (lambda r: r[1].pop("num_tokens"), ":2: num_tokens: expected a whole number from 0, got None"),
    "count": (_change(1, num_tokens=7), ":2: top_indices: expected whole numbers of shape 7x3, got [["),
    "true": (_change(1, layer=True), ":2: layer: expected a whole number from 0, got True"),
    "other K": (_change(1, topk=2, top_indices=[[1, 2]] * 6), ":2: expected topk 3 with logits, as in the first"),
    "ragged": (_change(1, top_indices=[[1, 2, 3]] * 5 + [[1]]), ":2: top_indices: expected lists of equal length"),
    "fractions": (_change(1, top_indices=[[1, 2, 3.5]] * 6), ":2: top_indices: expected whole numbers of shape 6x3"),
    "out of range": (
        _change(1, top_indices=[[1, 2, 3]] * 5 + [[1, 2, 16]]),
        ":2: layer 3: expert_ids: expected 0 to 15, got 16",
    ),
    "repeated": (
        _change(1, top_indices=[[1, 2, 3]] * 5 + [[1, 2, 1]]),
        ":2: layer 3: token 5: expert_ids: expected distinct experts, got [",
    ),
    "shape of logits": (_change(1, logit_shape=[5, 16]), ":2: logit_shape: expected 6 tokens in 192 bytes of bfloat16"),
    "no shape": (_change(1, logit_shape=[6]), ":2: logit_shape: expected whole numbers of shape 2, got [6]"),
    "other experts": (
        _change(1, logit_shape=[6, 8], logit_bytes=96),
        ":2: logit_shape: expected 16 experts, got 8",
    ),
    "beyond the sidecar": (
        _change(3, logit_offset=10**6),
        ":4: logits_rank0.bin: expected at least 1000128 bytes, got",
    ),
    "no logits once": (lambda r: r[3].pop("logit_offset"), ":4: expected topk 3 with logits, as in the first record"),
    "a layer less": (lambda r: r.pop(), ": step 1: layer 3: expected the layers of the first step, got one less"),
    "a layer more": (_change(3, layer=4), ": step 1: layer 3: expected the layers of the first step, got one less"),
    "a pass less": (
        _change(2, step=0),
        ": step 0: layer 3: expected passes of [6, 4] tokens like layer 1, got [6]",
    ),
    "unequal layers": (
        _change(3, num_tokens=2, top_indices=[[1, 2, 3]] * 2, logit_shape=[2, 16], logit_bytes=64),
        ": step 1: layer 3: expected passes of [4] tokens like layer 1, got [2]",
    ),
}


@pytest.mark.parametrize("name", MEGATRON_DAMAGE)
def test_a_damaged_megatron_trace_is_refused_with_file_and_line(tmp_path, out, name):
    megatron(tmp_path / "trace")
    damage, message = MEGATRON_DAMAGE[name]
    path = tmp_path / "trace" / "router_trace_rank0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    damage(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert refusal("megatron", tmp_path / "trace", out, **MEGATRON).startswith(f"{path}{message}")


def test_a_megatron_trace_that_was_cut_is_refused(tmp_path, out):
    megatron(tmp_path / "trace")
    path = tmp_path / "trace" / "router_trace_rank0.jsonl"
    path.write_text(path.read_text()[:-9])
    assert refusal("megatron", tmp_path / "trace", out, **MEGATRON).startswith(f"{path}:4: expected JSON, got ")
    path.write_text("")
    assert "expected records of block decoder, got none" in refusal("megatron", tmp_path / "trace", out, **MEGATRON)


@pytest.mark.parametrize("value", [0x7FC0, 0x7F80, 0xFF80])  # NaN and both infinities in bfloat16
def test_megatrons_logits_must_be_finite(tmp_path, out, value):
    megatron(tmp_path / "trace")
    sidecar = tmp_path / "trace" / "logits_rank0.bin"
    data = np.frombuffer(sidecar.read_bytes(), "<u2").copy()
    data[6 * 16 + 2 * 16 + 5] = value  # second record, third token
    sidecar.write_bytes(data.tobytes())
    text = refusal("megatron", tmp_path / "trace", out, **MEGATRON)
    assert "rank0.jsonl:2: logits_rank0.bin: token 2: expected finite logits" in text


def test_one_rank_is_imported_at_a_time(tmp_path, out):
    megatron(tmp_path / "trace")
    megatron(tmp_path / "trace", rank=12)
    text = refusal("megatron", tmp_path / "trace", out, **MEGATRON)
    assert "got router_trace_rank0.jsonl, router_trace_rank12.jsonl: name one file" in text
    import_trace("megatron", tmp_path / "trace" / "router_trace_rank12.jsonl", out, ImportOptions(**MEGATRON))


@pytest.mark.seam
@pytest.mark.parametrize("logits", [True, False])
def test_what_megatrons_own_tracer_writes_is_read(tmp_path, out, logits, monkeypatch):
    router_trace = pytest.importorskip(
        "megatron.core.transformer.moe.router_trace", reason="0.16.1 has no router tracer"
    )
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
    assert import_trace("megatron", tmp_path / "trace", out, ImportOptions(**options)).num_tokens == 8
    ids = read_back(out)[0]
    for layer in (1, 2):
        ids_TK = np.concatenate([expected[step, layer] for step in (0, 1)])
        np.testing.assert_array_equal(
            ids[layer - 1] if logits else np.sort(ids[layer - 1]), ids_TK if logits else np.sort(ids_TK)
        )


# SGLang

SGLANG = {"model": "toy", "assume_equal_scores": True}


def sglang(directory, num_physical=20, num_logical=16, top_k=3, layers=(1, 2, 3)):
    """A dump as SGLang's recorder holds it in memory: two prompts with filling, then two decode passes."""
    random = np.random.default_rng(11)
    directory.mkdir(parents=True, exist_ok=True)
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
        records.append(
            {
                "forward_pass_id": len(records),
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": [7] * len(positions),
                "positions": positions,
                "extend_seq_lens": lengths,
                "forward_mode": 1 if lengths else 2,
                "topk_ids_of_layer": torch.from_numpy(ids),
                "misc_objects": [],
                "global_physical_count": torch.zeros(4, num_physical, dtype=torch.int32),
            }
        )
    return {"records": records, "last_physical_to_logical_map": torch.from_numpy(to_logical)}


def sglang_arrays(dump):
    arrays = {"last_physical_to_logical_map": dump["last_physical_to_logical_map"].numpy()}
    for index, record in enumerate(dump["records"]):
        for key in ("topk_ids_of_layer", "positions", "extend_seq_lens"):
            if record[key] is not None:
                arrays[f"{index}.{key}"] = np.asarray(record[key])
    return arrays


def test_sglangs_dump_goes_through_the_command_that_converts_it(tmp_path, out):
    dump = sglang(tmp_path)
    torch.save(dump, tmp_path / "dump.pt")
    text = refusal("sglang", tmp_path / "dump.pt", out, **SGLANG)
    assert text.endswith(f"a pickle, which is not read; convert it where SGLang runs: {CONVERT}")
    python, *rest = CONVERT.split(" ", 1)
    assert python == "python"
    subprocess.run(f"{sys.executable} {rest[0]}", shell=True, check=True, cwd=tmp_path, timeout=600)
    summary = import_trace("sglang", tmp_path / "dump.npz", out, ImportOptions(**SGLANG))
    ids, scores, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5]
    assert position_T.tolist() == [0, 1, 2, 3, 8, 9, 10, 4, 11, 5, 12]
    to_logical = dump["last_physical_to_logical_map"].numpy()
    for index, layer in enumerate((1, 2, 3)):
        recorded = np.concatenate([record["topk_ids_of_layer"][layer].numpy() for record in dump["records"]])
        physical_TK = recorded[recorded[:, 0] >= 0, :3]
        np.testing.assert_array_equal(ids[index], to_logical[layer][physical_TK])
    assert (scores == np.float16(1 / 3)).all()
    assert (summary.num_experts, summary.top_k, summary.left_out) == (16, 3, 2)
    assert summary.phase == "prefill and decode"
    metadata = open_trace(out).metadata
    assert metadata["source_layers"] == "1,2,3"
    assert metadata["score"].startswith("assumed")


def test_ids_without_scores_need_consent_and_say_so_in_results(tmp_path, out):
    arrays = sglang_arrays(sglang(tmp_path))
    np.savez(tmp_path / "dump.npz", **arrays)
    text = refusal("sglang", tmp_path / "dump.npz", out, model="toy")
    assert "no scores, only expert ids: set assume_equal_scores" in text
    import_trace("sglang", tmp_path / "dump.npz", out, ImportOptions(**SGLANG))
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


def test_counts_are_no_routing(tmp_path, out):
    np.savez(tmp_path / "stat.npz", logical_count=np.ones((3, 2, 16), np.int32), rank=np.int64(0))
    text = refusal("sglang", tmp_path / "stat.npz", out, **SGLANG)
    assert "logical_count: counts of tokens per expert" in text
    assert "--expert-distribution-recorder-mode per_token" in text


def _ids(index, where, value):
    return lambda arrays: arrays[f"{index}.topk_ids_of_layer"].__setitem__(where, value)


SGLANG_DAMAGE = {
    "no map": (lambda a: a.pop("last_physical_to_logical_map"), "missing array: last_physical_to_logical_map"),
    "no positions": (lambda a: a.pop("1.positions"), "missing array: 1.positions"),
    "no ids": (lambda a: a.pop("1.topk_ids_of_layer"), "missing array: 1.topk_ids_of_layer"),
    "no pass": (
        lambda a: [a.pop(name) for name in list(a) if name[0].isdigit()],
        "expected at least one pass (0.topk_ids_of_layer), got none",
    ),
    "strange name": (lambda a: a.update(extra=np.zeros(1, int)), "expected last_physical_to_logical_map and <pass>."),
    "map": (
        lambda a: a["last_physical_to_logical_map"].__setitem__((0, 0), -1),
        "last_physical_to_logical_map: expected experts from 0, got -1",
    ),
    "layers of map": (
        lambda a: a.update(last_physical_to_logical_map=np.zeros((3, 20), int)),
        "last_physical_to_logical_map: expected 4 layers and 1 to 65536 experts, got shape (3, 20)",
    ),
    "too many experts": (
        lambda a: a["last_physical_to_logical_map"].__setitem__((0, 0), 256),
        "num_experts: expected 4 (more than top_k) to 256 (ids are one byte), got 257",
    ),
    "physical expert": (
        _ids(0, (2, 3, 1), 20),
        "0.topk_ids_of_layer: layer 2: expected physical experts 0 to 19, got 20",
    ),
    "an expert less": (
        _ids(0, (2, 3, 1), -1),
        "0.topk_ids_of_layer: layer 2: token 3: expected 3 experts and then -1, got [",
    ),
    "a token less": (
        _ids(0, (2, 3), -1),
        "0.topk_ids_of_layer: layer 2: token 3: expected 3 experts and then -1, got [-1",
    ),
    "a token more": (
        _ids(3, (2, 2), [1, 2, 3, -1, -1, -1, -1, -1]),
        "3.topk_ids_of_layer: layer 2: token 2: expected -1 as in the first layer, got [1, 2, 3",
    ),
    "experts for filling": (
        _ids(0, (slice(1, 4), 7), [1, 2, 3, -1, -1, -1, -1, -1]),
        "0.topk_ids_of_layer: layer 1: token 7: expected -1 beyond extend_seq_lens, got experts",
    ),
    "lengths": (
        lambda a: a.update({"0.extend_seq_lens": np.array([6, 3])}),
        "0.extend_seq_lens: expected lengths of 8 tokens in all, got array([6, 3])",
    ),
    "tokens": (
        lambda a: a.update({"1.positions": np.array([1, 2, 3])}),
        "1.topk_ids_of_layer: expected 4 layers of 3 tokens, got shape (4, 2, 8)",
    ),
    "position": (
        lambda a: a["0.positions"].__setitem__(1, -5),
        "0.topk_ids_of_layer: layer 1: position: expected 0 to",
    ),
    "position twice": (
        lambda a: a["0.positions"].__setitem__(1, 0),
        "position: token 1: expected more than 0, the one before it in its sequence, got 0",
    ),
    "floats": (
        lambda a: a.update({"0.positions": np.zeros(8)}),
        "0.positions: expected whole numbers, got dtype float64",
    ),
    "objects": (
        lambda a: a.update({"0.positions": np.array([None] * 8)}),
        "0.positions: expected whole numbers, got dtype object",
    ),
    "Fortran order": (
        lambda a: a.update({"0.topk_ids_of_layer": np.asfortranarray(a["0.topk_ids_of_layer"])}),
        "0.topk_ids_of_layer: expected C order, got Fortran order",
    ),
    "a layer more in a later pass": (
        lambda a: a["1.topk_ids_of_layer"].__setitem__(0, a["1.topk_ids_of_layer"][1]),
        "layer 0: expected 11 tokens, as many as the sequences have, got 2",
    ),
}


@pytest.mark.parametrize("name", SGLANG_DAMAGE)
def test_a_damaged_sglang_dump_is_refused_with_file_and_array(tmp_path, out, name):
    arrays = sglang_arrays(sglang(tmp_path))
    damage, message = SGLANG_DAMAGE[name]
    damage(arrays)
    path = tmp_path / "dump.npz"
    np.savez(path, **arrays)
    text = refusal("sglang", path, out, **SGLANG)
    # What only the finished file shows is said of the file that was being made.
    assert text.startswith((f"{path}: ", str(out.parent)))
    assert message in text


# vLLM

VLLM = {"model": "toy", "num_experts": 16, "assume_equal_scores": True}


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


@pytest.mark.parametrize("form", ["npz", "jsonl"])
def test_vllms_routed_experts_are_kept_with_their_places(tmp_path, out, form):
    arrays = vllm_arrays()
    path = tmp_path / f"routing.{form}"
    np.savez(path, **arrays) if form == "npz" else path.write_text(as_lines(arrays))
    summary = import_trace("vllm", path, out, ImportOptions(**VLLM))
    ids, _, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 6 + [1] * 4 + [2]
    assert position_T.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 0]
    recorded = np.concatenate(
        [arrays[f"{r}.{n}"] for r in range(3) for n in ("prompt_routed_experts", "routed_experts")]
    )
    recorded = recorded[(recorded >= 0).all(axis=(1, 2))]
    np.testing.assert_array_equal(ids, recorded[:, 1:].transpose(1, 0, 2))
    assert (summary.left_out, summary.num_layers) == (2, 3)
    assert "1 layers that route nothing left out" in summary.note
    assert open_trace(out).metadata["source_layers"] == "1,2,3"


@pytest.mark.parametrize(
    ("phase", "tokens", "positions"), [("prefill", 5, [0, 1, 2, 3, 2]), ("decode", 6, [4, 5, 3, 4, 5, 0])]
)
def test_prompts_and_generated_tokens_can_be_had_alone(tmp_path, out, phase, tokens, positions):
    np.savez(tmp_path / "routing.npz", **vllm_arrays())
    summary = import_trace("vllm", tmp_path / "routing.npz", out, ImportOptions(**VLLM, phase=phase))
    assert (summary.num_tokens, summary.left_out, summary.phase) == (tokens, 13 - tokens, phase)
    assert read_back(out)[3].tolist() == positions


def test_completions_share_their_prompt(tmp_path, out):
    arrays = vllm_arrays()
    response = {
        "prompt_routed_experts": arrays["0.prompt_routed_experts"].tolist(),
        "choices": [{"routed_experts": arrays[f"{r}.routed_experts"].tolist()} for r in (0, 1)],
    }
    (tmp_path / "r.jsonl").write_text(json.dumps(response) + "\n")
    import_trace("vllm", tmp_path / "r.jsonl", out, ImportOptions(**VLLM))
    _, _, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 6 + [1] * 3
    assert position_T.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]


@few_examples
@given(st.integers(1, 9))
def test_a_request_may_be_read_in_any_number_of_pieces(tmp_path_factory, rows):
    from moe_ep_bench.workload.importers import vllm

    directory = tmp_path_factory.mktemp("vllm")
    np.savez(directory / "routing.npz", **vllm_arrays())
    import_trace("vllm", directory / "routing.npz", directory / "whole", ImportOptions(**VLLM))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "ROWS_AT_ONCE", rows)
        import_trace("vllm", directory / "routing.npz", directory / "pieces", ImportOptions(**VLLM))
    assert (directory / "whole").read_bytes() == (directory / "pieces").read_bytes()


VLLM_DAMAGE = {
    "strange name": (
        lambda a: a.update(arr_0=np.zeros((1, 4, 3), int)),
        "expected <request>.prompt_routed_experts and",
    ),
    "dimensions": (
        lambda a: a.update({"1.routed_experts": np.zeros((4, 3), int)}),
        "1.routed_experts: expected 3 dimensions, got shape (4, 3)",
    ),
    "other K": (
        lambda a: a.update({"1.routed_experts": a["1.routed_experts"][:, :, :2].copy()}),
        "1.routed_experts: expected layers and top-k (4, 3), got (4, 2)",
    ),
    "part of a token": (
        lambda a: a["1.routed_experts"].__setitem__((2, 3), -1),
        "1.routed_experts: token 5: expected -1 for all experts of a token or for none, got some",
    ),
    "an idle layer awakes": (
        lambda a: a["1.routed_experts"].__setitem__((2, 0), [1, 2, 3]),
        "1.routed_experts: layer 0: expected 0 only, as for the first tokens, got others",
    ),
    "a layer falls idle": (
        lambda a: a["1.routed_experts"].__setitem__((2, 3), 0),
        "1.routed_experts: layer 3: token 5: expert_ids: expected distinct experts, got [0, 0, 0]",
    ),
    "out of range": (
        lambda a: a["1.routed_experts"].__setitem__((2, 3, 1), 16),
        "1.routed_experts: layer 3: token 5: expert_ids: expected 0 to 15, got 16",
    ),
}


@pytest.mark.parametrize("name", VLLM_DAMAGE)
def test_damaged_vllm_arrays_are_refused_with_file_and_array(tmp_path, out, name):
    arrays = vllm_arrays()
    damage, message = VLLM_DAMAGE[name]
    damage(arrays)
    path = tmp_path / "routing.npz"
    np.savez(path, **arrays)
    assert refusal("vllm", path, out, **VLLM).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "choices: expected a list of completions, got None"),
        ('{"choices": []}', "choices: expected a list of completions, got []"),
        ('{"choices": [{"text": ""}]}', "choices: 0: routed_experts: expected lists of experts, got none"),
        ('{"choices": [{"routed_experts": [[[1, 2], [3]]]}]}', "choices: 0: routed_experts: expected lists of equal"),
        ('{"choices": [{"routed_experts": [[1, 2]]}]}', "choices: 0: routed_experts: expected whole numbers of shape"),
        ('{"choices": [{"routed_experts": "AAEC"}]}', "choices: 0: routed_experts: expected whole numbers of shape"),
        ("{", "expected JSON, got '{'"),
    ],
)
def test_damaged_vllm_lines_are_refused_with_file_and_line(tmp_path, out, line, message):
    path = tmp_path / "routing.jsonl"
    path.write_text(as_lines(vllm_arrays()) + line + "\n")
    assert refusal("vllm", path, out, **VLLM).startswith(f"{path}:4: {message}")


def test_nothing_but_unknown_routing_is_refused(tmp_path, out):
    np.savez(tmp_path / "r.npz", **{"0.routed_experts": np.full((3, 4, 2), -1)})
    text = refusal("vllm", tmp_path / "r.npz", out, **VLLM)
    assert text.endswith("expected at least one token, got none (3 left out)")


# Archives


def test_an_array_that_claims_to_be_huge_is_refused_before_it_is_held(tmp_path, out):
    path = tmp_path / "r.npz"
    np.savez(path, **{"0.routed_experts": np.zeros((3, 4, 2), np.int64)})
    with zipfile.ZipFile(path) as archive:
        data = archive.read("0.routed_experts.npy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "0.routed_experts.npy", data.replace(b"(3, 4, 2), }" + b" " * 17, b"(1099511627776, 4, 2), }     ")
        )
    text = refusal("vllm", path, out, **VLLM)
    assert (
        "expected 70368744177792 bytes for shape (1099511627776, 4, 2) of int64" in text
        or "bytes for shape (10995" in text
    )


@pytest.mark.parametrize(
    "damage", ["no archive", "truncated", "damaged data", "damaged packing", "pickle inside", "no array inside"]
)
def test_a_damaged_archive_is_refused(tmp_path, out, damage):
    path = tmp_path / "r.npz"
    np.savez(path, **vllm_arrays())
    whole = path.read_bytes()
    if damage == "no archive":
        path.write_bytes(b"PK but not a zip")
    elif damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "damaged packing":
        np.savez_compressed(path, **vllm_arrays())
        import_trace("vllm", path, tmp_path / "sound", ImportOptions(**VLLM))
        whole = path.read_bytes()
        # A member's data follow its name and an extra field, whose lengths stand at 26 and 28; no block is of type 3.
        place = 30 + int.from_bytes(whole[26:28], "little") + int.from_bytes(whole[28:30], "little")
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    elif damage == "damaged data":
        place = whole.index(b"\x93NUMPY") + 150
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    else:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("data.pkl" if damage == "pickle inside" else "0.routed_experts", b"\x80\x04.")
    assert refusal("vllm", path, out, **VLLM).startswith(f"{path}: ")


def test_an_array_of_objects_is_never_unpickled(tmp_path, out):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.savez(tmp_path / "r.npz", **{"0.routed_experts": np.array([[[Trap()]]], dtype=object)})
    assert "expected whole numbers, got dtype object" in refusal("vllm", tmp_path / "r.npz", out, **VLLM)
    assert not (tmp_path / "sprung").exists()


def test_a_line_without_end_is_refused(tmp_path, out, monkeypatch):
    monkeypatch.setattr(sources, "MAX_PIECE_BYTES", 100)
    path = tmp_path / "r.jsonl"
    path.write_text(as_lines(vllm_arrays()))
    assert refusal("vllm", path, out, **VLLM) == f"{path}:1: expected a line of at most 100 bytes, got a longer one"
    gpt_oss(tmp_path / "gpt-oss")
    assert "expected at most 100 bytes, got " in refusal("gpt-oss", tmp_path / "gpt-oss", out)


# What all have in common


def prepared(kind, root):
    """A sound source of each kind, and its options."""
    root.mkdir(parents=True, exist_ok=True)
    if kind == "esft":
        esft(root)
        return root, {}
    if kind == "gpt-oss":
        gpt_oss(root)
        return root, {}
    if kind == "megatron":
        megatron(root)
        return root, MEGATRON
    if kind == "sglang":
        np.savez(root / "d.npz", **sglang_arrays(sglang(root)))
        return root / "d.npz", SGLANG
    np.savez(root / "r.npz", **vllm_arrays())
    return root / "r.npz", VLLM


every_kind = pytest.mark.parametrize("kind", READERS)


@every_kind
def test_pairs_of_every_expert_are_conserved(tmp_path, out, kind, monkeypatch):
    seen = {}

    def spy(writer, layer, ids_TK, *rest):
        load_E = np.bincount(np.asarray(ids_TK).ravel(), minlength=256)
        seen[layer] = seen.get(layer, 0) + load_E
        return add(writer, layer, ids_TK, *rest)

    add = TraceWriter.add
    monkeypatch.setattr(TraceWriter, "add", spy)
    source, options = prepared(kind, tmp_path / "source")
    summary = import_trace(kind, source, out, ImportOptions(**options))
    ids = read_back(out)[0]
    for index, layer in enumerate(sorted(seen)):
        np.testing.assert_array_equal(np.bincount(ids[index].ravel(), minlength=256), seen[layer])
        assert seen[layer].sum() == summary.num_tokens * summary.top_k


@every_kind
def test_a_writer_that_loses_or_changes_pairs_is_found_out(tmp_path, out, kind, monkeypatch):
    source, options = prepared(kind, tmp_path / "source")
    spool = TraceWriter._spool

    def changing(writer, name, values):
        if name.startswith("expert_ids") and values.size:
            values = values.copy()
            values[0, 0] = next(e for e in range(writer.num_experts) if e not in values[0])
        spool(writer, name, values)

    monkeypatch.setattr(TraceWriter, "_spool", changing)
    with pytest.raises(RuntimeError, match="was written with other experts than it was read with"):
        import_trace(kind, source, out, ImportOptions(**options))
    assert list(out.parent.iterdir()) == []


@every_kind
def test_the_same_source_gives_the_same_bytes_and_another_hash_when_it_changes(tmp_path, out, kind):
    source, options = prepared(kind, tmp_path / "source")
    first = import_trace(kind, source, out, ImportOptions(**options))
    again = import_trace(kind, source, out.with_name("again"), ImportOptions(**options))
    assert out.read_bytes() == again.path.read_bytes()
    assert open_trace(out).metadata["source_sha256"] == first.source_sha256 == again.source_sha256
    changed = (
        source
        if source.is_file()
        else sorted(p for p in source.rglob("*") if p.suffix in (".txt", ".jsonl") or "_ex" in p.name)[-1]
    )
    if kind in ("gpt-oss", "megatron"):
        changed.write_text(changed.read_text().replace("}\n", " }\n") + (" " if kind == "gpt-oss" else ""))
    elif kind == "esft":
        changed.write_text(changed.read_text().replace("\n", "\r\n"))
    else:
        with zipfile.ZipFile(changed, "a") as archive:
            archive.comment = b"changed"
    other = import_trace(kind, source, out.with_name("other"), ImportOptions(**options))
    assert other.source_sha256 != first.source_sha256


def test_the_hash_is_the_files_own_or_that_of_a_listing(tmp_path, out):
    source, options = prepared("vllm", tmp_path / "vllm")
    summary = import_trace("vllm", source, out, ImportOptions(**options))
    assert summary.source_sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    megatron(tmp_path / "megatron")
    listing = "".join(
        f"{hashlib.sha256((tmp_path / 'megatron' / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("router_trace_rank0.jsonl", "logits_rank0.bin")
    )
    summary = import_trace("megatron", tmp_path / "megatron", out.with_name("m"), ImportOptions(**MEGATRON))
    assert summary.source_sha256 == hashlib.sha256(listing.encode()).hexdigest()


@every_kind
def test_a_failure_at_the_end_leaves_nothing_behind(tmp_path, out, kind, monkeypatch):
    source, options = prepared(kind, tmp_path / "source")

    def full(*_):
        raise OSError(28, "No space left on device", "spool")

    monkeypatch.setattr(TraceWriter, "_string_together", full)
    assert refusal(kind, source, out, **options) == "spool: No space left on device"


@every_kind
def test_an_existing_file_is_not_touched(tmp_path, kind):
    source, options = prepared(kind, tmp_path / "source")
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ValueError, match="there: expected a name that is free, but there is such a file already"):
        import_trace(kind, source, tmp_path / "there", ImportOptions(**options))
    assert (tmp_path / "there").read_text() == "mine"


@every_kind
def test_what_was_imported_can_be_replayed(tmp_path, out, kind):
    source, options = prepared(kind, tmp_path / "source")
    summary = import_trace(kind, source, out, ImportOptions(**options))
    share = 0.6 if open_trace(out).scores_are_normalised else None
    workload = RecordedWorkload(
        out,
        1,
        summary.num_experts,
        summary.top_k,
        num_tokens=12,
        num_batches=1,
        tail="uniform",
        seed=0,
        topk_share=share,
    )
    token_T, _ = workload.draw(0)
    best = workload.batch(0).scores_TE.topk(summary.top_k, dim=1).indices
    np.testing.assert_array_equal(best.numpy(), open_trace(out).read_layer(1)[0][token_T])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("tensorrt", {}, "kind: expected one of esft, gpt-oss, megatron, sglang, vllm; got 'tensorrt'"),
        ("esft", {"phase": "decode"}, "phase: not for esft recordings, which take domain; got 'decode'"),
        (
            "esft",
            {"assume_equal_scores": True},
            "assume_equal_scores: not for esft recordings, which take domain; got True",
        ),
        ("vllm", {"micro_batch_size": 2}, "micro_batch_size: not for vllm recordings, which take preset, model,"),
        ("vllm", {"num_experts": 8}, "model: needed, because the recording does not name its model (or preset)"),
        ("vllm", {"model": "toy"}, "num_experts: needed, because the recording does not say it (or preset)"),
        ("vllm", {"preset": "olmoe"}, "preset: expected one of deepseek-"),
        (
            "vllm",
            {"preset": "olmoe-1b-7b", "num_experts": 64},
            "num_experts: expected none beside preset, which says it",
        ),
        (
            "vllm",
            {**VLLM, "phase": "training"},
            "phase: expected prefill, decode, or prefill and decode; got 'training'",
        ),
        ("megatron", {"model": "toy"}, "phase: needed, because the trace does not say what its forward passes were"),
    ],
)
def test_options_that_do_not_suit_are_refused(tmp_path, out, kind, options, message):
    source, _ = prepared(kind if kind in READERS else "vllm", tmp_path / "source")
    assert refusal(kind, source, out, **options).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phase": "training and decode"}, "phase: expected one of prefill, decode, prefill and decode, training; got"),
        ({"score_function": "relu"}, "score_function: expected softmax or sigmoid, got 'relu'"),
        ({"num_experts": 257}, "num_experts: expected 2 to 256, got 257"),
        ({"num_experts": 1}, "num_experts: expected 2 to 256, got 1"),
        ({"micro_batch_size": 0}, "micro_batch_size: expected at least 1, got 0"),
        ({"model": "a\nb"}, r"model: expected words on one line, got 'a\\nb'"),
        ({"licence": " "}, "licence: expected words on one line, got ' '"),
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
    summary = import_trace("vllm", source, out, options)
    assert (summary.model, summary.num_experts, summary.top_k) == ("OLMoE-1B-7B", 64, 8)


def test_all_256_experts_of_a_layer_have_a_place(tmp_path, out):
    ids = np.arange(256, dtype=np.int16).reshape(32, 1, 8)
    np.savez(tmp_path / "r.npz", **{"0.routed_experts": ids})
    import_trace("vllm", tmp_path / "r.npz", out, ImportOptions(**{**VLLM, "num_experts": 256}))
    np.testing.assert_array_equal(read_back(out)[0][0], ids[:, 0])


def test_a_source_that_is_not_there_is_refused(tmp_path, out):
    assert refusal("esft", tmp_path / "no", out) == f"{tmp_path / 'no'}: no such file or directory"


def test_every_option_suits_some_kind():
    from dataclasses import fields

    taken = {name for names in TAKES.values() for name in names}
    assert taken == {field.name for field in fields(ImportOptions)} - {"top_k"}  # which only a preset gives
    assert TAKES.keys() == READERS.keys()


# The command


def command_line(kind, source, out, options):
    """The arguments of ``moe-ep-bench`` that say what these options do."""
    arguments = ["trace", "import", kind, str(source), str(out)]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return arguments


@every_kind
def test_the_command_makes_the_trace_that_its_options_ask_for(tmp_path, out, kind, capsys):
    source, options = prepared(kind, tmp_path / "source")
    expected = import_trace(kind, source, out.with_name("expected"), ImportOptions(**options))
    assert main(command_line(kind, source, out, options)) == 0
    said = capsys.readouterr()
    assert out.read_bytes() == expected.path.read_bytes()
    assert said.out == expected.text().replace(str(expected.path), str(out)) + "\n"
    assert said.err == ""


def test_the_command_hands_on_every_option(tmp_path, out, monkeypatch):
    given = {
        "model": "toy",
        "num_experts": 16,
        "domain": "law",
        "phase": "decode",
        "licence": "MIT",
        "score_function": "sigmoid",
        "micro_batch_size": 2,
        "assume_equal_scores": True,
    }
    asked = []

    def note(kind, source, out, options):
        asked.append((kind, source, out, options))
        return SimpleNamespace(text=lambda: "made")

    monkeypatch.setattr("moe_ep_bench.workload.importers.import_trace", note)
    assert main(command_line("megatron", tmp_path, out, given)) == 0
    assert main(command_line("vllm", tmp_path, out, {"preset": "olmoe-1b-7b"})) == 0
    assert asked == [
        ("megatron", tmp_path, out, ImportOptions(**given)),
        ("vllm", tmp_path, out, ImportOptions(preset="olmoe-1b-7b")),
    ]


def run_command(*arguments):
    command = [sys.executable, "-m", "moe_ep_bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_the_command_imports_as_a_process_of_its_own(tmp_path, out):
    source, options = prepared("esft", tmp_path / "source")
    options = {**options, "domain": "law"}
    done = run_command(*command_line("esft", source, out, options))
    assert (done.returncode, done.stderr) == (0, "")
    assert "in 2 sequences" in done.stdout
    assert open_trace(out).metadata["domain"] == "law"
    again = run_command(*command_line("esft", source, out, options))
    words = f"{out}: expected a name that is free, but there is such a file already"
    assert (again.returncode, again.stdout, again.stderr) == (2, "", f"moe-ep-bench: {words}\n")


def refused_by_command(capsys, kind, source, out, options):
    """The one line with which the command refuses, ending with 2 and leaving nothing."""
    assert main(command_line(kind, source, out, options)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert not out.exists()
    line, rest = said.err.split("\n", 1)
    assert rest == ""
    return line


@every_kind
def test_the_command_refuses_a_source_that_is_not_there(tmp_path, out, kind, capsys):
    _, options = prepared(kind, tmp_path / "source")
    nowhere = tmp_path / "nowhere"
    line = refused_by_command(capsys, kind, nowhere, out, options)
    assert line == f"moe-ep-bench: {nowhere}: no such file or directory"


@every_kind
def test_the_command_refuses_a_source_of_another_form(tmp_path, out, kind, capsys):
    _, options = prepared(kind, tmp_path / "source")
    other = tmp_path / "other"
    other.write_text("no recording\n")
    assert str(other) in refused_by_command(capsys, kind, other, out, options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("tensorrt", {}, "kind: expected one of esft, gpt-oss, megatron, sglang, vllm; got 'tensorrt'"),
        ("esft", {"phase": "decode"}, "phase: not for esft recordings, which take domain; got 'decode'"),
        ("vllm", {"model": "toy"}, "num_experts: needed, because the recording does not say it (or preset)"),
        ("vllm", {**VLLM, "num_experts": 1}, "num_experts: expected 2 to 256, got 1"),
    ],
)
def test_the_command_refuses_options_that_do_not_suit(tmp_path, out, kind, options, message, capsys):
    source, _ = prepared(kind if kind in READERS else "vllm", tmp_path / "source")
    assert refused_by_command(capsys, kind, source, out, options) == f"moe-ep-bench: {message}"
