"""Importing recordings: nothing of the source is lost, nothing wrong gets in, nothing is half written.

Sources are made here, small and of the published form; none is copied.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from test_recorded import tokens_of

from moe_ep_bench.cli import main
from moe_ep_bench.workload.importers import IMPORTERS, import_trace
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.trace import open_trace

TOY = Path(__file__).parent / "data" / "toy-model.yaml"  # four layers, the first dense; 16 experts, top-3
OPTIONS = {
    "esft": {"domain": "law"},
    "flame-moe": {"preset": str(TOY), "phase": "training"},
    "megatron": {"preset": str(TOY), "phase": "prefill"},
    "sglang": {"preset": str(TOY)},
    "vllm": {"preset": str(TOY)},
}
every_kind = pytest.mark.parametrize("kind", IMPORTERS)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "made.safetensors"


def toy(tmp_path, **changes):
    """A preset like ``TOY`` but for ``changes``."""
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(TOY.read_text()) | changes))
    return {"preset": str(path)}


def imported(kind, source, out, **options):
    import_trace(kind, source, out, **{**OPTIONS[kind], **options})
    return open_trace(out)


def read_back(path):
    """Ids and scores of all layers [L, T, K], and sequence ids and positions [T]."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return tensors["expert_ids"], tensors["scores"], tensors["sequence_id"], tensors["position"]


def refusal(kind, source, out, options=None):
    """The one line with which an import is refused, after which nothing is left where the trace would be."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        import_trace(kind, source, out, **(OPTIONS[kind] if options is None else options))
    assert not out.exists()
    assert not out.parent.exists() or list(out.parent.iterdir()) == []
    return str(error.value)


def assert_rows_match(made, ids_TK, scores_TK):
    """The trace's rows are the source's, best first; equal scores keep the source's order."""
    made_ids_TK, made_scores_TK = made
    order_TK = np.array([sorted(range(len(row)), key=lambda k: -row[k]) for row in scores_TK.tolist()])
    np.testing.assert_array_equal(made_ids_TK, np.take_along_axis(ids_TK, order_TK, 1))
    np.testing.assert_array_equal(made_scores_TK, np.take_along_axis(scores_TK, order_TK, 1).astype(np.float16))


# ---- sources ---------------------------------------------------------------------------------------------------------


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
        (directory / "trace.json").write_text("{}")
        for layer in range(1, 27):
            rows[domain, layer] = [esft_rows(random, length) for length in lengths]
            (directory / f"expert_weights_{layer}.txt").write_text(
                "".join(esft_line(*row) for row in rows[domain, layer])
            )
    return rows


def megatron(directory, passes=(6, 4), layers=(1, 3), num_experts=16, top_k=3, rank=0):
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
            record |= {"logit_offset": len(sidecar), "logit_bytes": len(data), "logit_shape": [num_tokens, num_experts]}
            sidecar += data
            records.append({**record, "top_indices": ids_TK.tolist()})
            if layer == layers[-1]:  # what multi-token prediction does, and a pass without tokens, are no layer's
                records += [records[-1] | {"block": "mtp"}, records[-1] | {"num_tokens": 0, "top_indices": []}]
            rows[step, layer] = ids_TK.numpy(), values_TE.double().numpy()
    path = directory / f"router_trace_rank{rank}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / f"logits_rank{rank}.bin").write_bytes(sidecar)
    return rows


PROMPTS = (4, 3, 2)


def vllm_ids():
    """Three requests; two tokens of the second were not recorded."""
    made = [routing(length, 4, 16, 3, seed=request).astype(np.int16) for request, length in enumerate((6, 6, 2))]
    made[1][:2] = -1
    return made


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


def routing(num_tokens, num_layers, num_experts, top_k, seed=0):
    """Random routing of all layers but the first, as a server returns it: int32 [T, L, K]."""
    random = np.random.default_rng(seed)
    ids_TLK = np.argsort(random.random((num_tokens, num_layers, num_experts)), axis=2)[..., :top_k].astype(np.int32)
    ids_TLK[:, 0] = 0
    return ids_TLK


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return base64.b64encode(buffer.getvalue()).decode()


def raw(array):
    return base64.b64encode(array.tobytes()).decode()


def response(ids_TLK, form=npy, num_prompt=1):
    """What vLLM's server returns of a request."""
    return {"choices": [{"routed_experts": form(ids_TLK)}], "usage": {"prompt_tokens": num_prompt}}


def sglang_response(ids_TLK, num_prompt=1):
    return {"meta_info": {"routed_experts": raw(ids_TLK), "prompt_tokens": num_prompt}}


def written(path, *responses):
    path.write_text("".join(json.dumps(response) + "\n" for response in responses))
    return path


def prepared(kind, root):
    """A sound source of each kind."""
    root.mkdir(parents=True, exist_ok=True)
    if kind == "esft":
        esft(root)
        return root
    if kind == "megatron":
        megatron(root)
        return root / "router_trace_rank0.jsonl"
    if kind == "flame-moe":
        np.savez(root / "d.npz", **flame_moe_arrays())
        return root / "d.npz"
    made = [response(ids, num_prompt=number) for ids, number in zip(vllm_ids(), PROMPTS, strict=True)]
    if kind == "sglang":
        made = [sglang_response(routing(5, 4, 16, 3, seed)) for seed in (0, 1)]
    return written(root / "r.jsonl", *made)


# ---- what is imported ------------------------------------------------------------------------------------------------


def test_flame_moe_keeps_probabilities_as_shares_of_the_whole_mass(tmp_path, out):
    made = flame_moe_arrays()
    np.savez(tmp_path / "f.npz", **made)
    assert not imported("flame-moe", tmp_path / "f.npz", out).scores_are_normalised
    ids, scores, sequence_id_T, _ = read_back(out)
    assert sequence_id_T.tolist() == [0] * 5 + [1] * 3
    for index, layer in enumerate((2, 3)):
        both = [np.concatenate([made[f"{number}.{layer}.{name}"] for number in (0, 1)]) for name in ("ids", "probs")]
        assert_rows_match((ids[index], scores[index]), *both)


def test_esft_keeps_every_token_but_the_first_of_each_text(tmp_path, out):
    rows = esft(tmp_path)
    trace = imported("esft", tmp_path, out, domain="law")
    ids, scores, sequence_id_T, position_T = read_back(out)
    assert sequence_id_T.tolist() == [0] * 4 + [2] * 2  # the text of one token vanishes
    assert position_T.tolist() == [1, 2, 3, 4, 1, 2]
    for layer in range(1, 27):
        ids_TK, weights_TK = (np.concatenate([text[part][1:] for text in rows["law", layer]]) for part in (0, 1))
        assert_rows_match((ids[layer - 1], scores[layer - 1]), ids_TK, weights_TK)
    assert trace.metadata["note"] == "3 tokens at the beginning of a text left out"
    assert (trace.metadata["domain"], trace.metadata["source_files"]) == ("law", "26")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_megatrons_logits_become_shares_of_the_score_mass(tmp_path, out, phase):
    rows = megatron(tmp_path)
    model = toy(tmp_path, score_function="sigmoid")["preset"]
    source = tmp_path / "router_trace_rank0.jsonl"
    facts = imported("megatron", source, out, preset=model, phase=phase).metadata
    ids, scores, sequence_id_T, position_T = read_back(out)
    places = [*range(10)], [0] * 10  # in decode a token is a sequence
    expected = ([0] * 6 + [1] * 4, [*range(6), *range(4)]) if phase == "prefill" else places
    assert (sequence_id_T.tolist(), position_T.tolist()) == expected
    for index, layer in enumerate((1, 3)):
        ids_TK, logits_TE = (np.concatenate([rows[step, layer][part] for step in (0, 1)]) for part in (0, 1))
        odds_TE = 1 / (1 + np.exp(-logits_TE))
        expected_TK = np.take_along_axis(odds_TE / odds_TE.sum(axis=1, keepdims=True), ids_TK, 1)
        order_TK = np.argsort(-expected_TK, axis=1, kind="stable")
        np.testing.assert_array_equal(ids[index], np.take_along_axis(ids_TK, order_TK, 1))
        np.testing.assert_allclose(scores[index], np.take_along_axis(expected_TK, order_TK, 1), rtol=1e-3)
    assert (facts["source_files"], facts["source_layers"]) == ("2", "1,3")


@pytest.mark.seam
def test_what_megatrons_own_tracer_writes_is_read(tmp_path, out, monkeypatch):
    if importlib.metadata.version("megatron-core").startswith("0.16"):  # asked first: its import takes seconds
        pytest.skip("0.16.1 has no router tracer")
    from megatron.core.transformer.moe import router_trace

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tracer = router_trace.RouterTracer(str(tmp_path / "trace"), max_steps=9, rank=0, capture_logits=True)
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
    model = toy(tmp_path, num_experts=8, top_k=2)["preset"]
    assert imported("megatron", tmp_path / "trace" / "router_trace_rank0.jsonl", out, preset=model).num_tokens == 8
    ids = read_back(out)[0]
    for layer in (1, 2):
        np.testing.assert_array_equal(ids[layer - 1], np.concatenate([expected[step, layer] for step in (0, 1)]))


@pytest.mark.parametrize("form", [np.ndarray.tolist, npy])
def test_vllms_routed_experts_are_kept_with_their_places_and_phases(tmp_path, out, form):
    made = vllm_ids()
    path = written(tmp_path / "r.jsonl", *map(response, made, [form] * 3, PROMPTS))
    recorded, sequence_T = np.concatenate(made), np.array([0] * 6 + [1] * 6 + [2] * 2)
    position_T = np.array([*range(6), *range(6), *range(2)])
    is_known_T = (recorded >= 0).all(axis=(1, 2))
    is_prompt_T = position_T < np.array(PROMPTS)[sequence_T]
    for phase, kept_T in (("", is_known_T), ("prefill", is_known_T & is_prompt_T), ("decode", ~is_prompt_T)):
        name = out.with_name(f"{phase}.safetensors")
        facts = imported("vllm", path, name, phase=phase).metadata
        ids, _, sequence_id_T, made_position_T = read_back(name)
        assert sequence_id_T.tolist() == sequence_T[kept_T].tolist()
        assert made_position_T.tolist() == position_T[kept_T].tolist()
        np.testing.assert_array_equal(ids, recorded[kept_T][:, 1:].transpose(1, 0, 2))
        assert facts["source_layers"] == "1,2,3"
        assert facts["phase"] == (phase or "prefill and decode")
        assert ("2 tokens that were not recorded left out" in facts["note"]) == (phase != "decode")


@pytest.mark.parametrize("changes", [{"num_experts": 512}, {"top_k": 1}, {"first_dense_layers": 0}])
def test_any_models_routing_is_kept_layer_by_layer(tmp_path, out, changes):
    """Also where a byte names no expert, and where a dense layer's zeros look like expert 0 of a top-1 model."""
    model = {"num_experts": 16, "top_k": 3, "first_dense_layers": 1, **changes}
    ids_TLK = routing(5, 4, model["num_experts"], model["top_k"])
    dense = model["first_dense_layers"]
    ids_TLK[:, 0] = ids_TLK[:, 1] if not dense else 0
    ids_TLK[2] = 0 if model["top_k"] == 1 else ids_TLK[2]  # of a top-1 model no padding
    trace = imported("vllm", written(tmp_path / "r.jsonl", response(ids_TLK)), out, **toy(tmp_path, **changes))
    ids = read_back(out)[0]
    assert ids.dtype == (np.uint16 if model["num_experts"] > 256 else np.uint8)
    assert trace.metadata["source_layers"] == ",".join(map(str, range(dense, 4)))
    np.testing.assert_array_equal(ids, ids_TLK.transpose(1, 0, 2)[dense:])


def test_sglangs_responses_are_read_with_the_models_layers(tmp_path, out):
    recorded = routing(6, 27, 64, 6), routing(3, 27, 64, 6, seed=1)
    source = written(tmp_path / "responses.jsonl", *(sglang_response(ids, 2) for ids in recorded))
    trace = imported("sglang", source, out, preset="deepseek-v2-lite")
    assert (trace.num_layers, trace.num_tokens, len(trace.start_S) - 1, trace.top_k) == (26, 9, 2, 6)
    np.testing.assert_array_equal(read_back(out)[0], np.concatenate(recorded).transpose(1, 0, 2)[1:])
    imported("sglang", source, out.with_name("decode"), preset="deepseek-v2-lite", phase="decode")
    assert read_back(out.with_name("decode"))[3].tolist() == [2, 3, 4, 5, 2]


# ---- damage ----------------------------------------------------------------------------------------------------------


def damaged(kind, root, damage):
    """A source, one file of which was changed by ``damage``, and that file."""
    source = prepared(kind, root)
    if source.suffix == ".npz":
        with np.load(source) as file:
            made = dict(file)
        damage(made)
        np.savez(source, **made)
        return source, source
    path = source / "results/expert_scores/law/expert_weights_7.txt" if kind == "esft" else source
    if kind == "esft":
        path.write_text(damage(path.read_text()))
    else:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        damage(records)
        written(path, *records)
    return source, path


def record(line, **values):
    """Other values in a line of Megatron's; None removes the key."""

    def change(records):
        records[line] = {key: value for key, value in {**records[line], **values}.items() if value is not None}

    return change


def item(name, where, value):
    return lambda made: made[name].__setitem__(where, value)


def array(name, value):
    return lambda made: made.update({name: value}) if value is not None else made.pop(name)


def poked(value):
    """Routing with another expert in one place."""
    ids_TLK = routing(3, 4, 16, 3)
    ids_TLK[1, 3, 2] = value
    return ids_TLK


ROUTED = "routed_experts"
# fmt: off
# What is wrong: the place that the error names behind the file, and the change.
DAMAGE = {
    "flame-moe": {
        "no probabilities": (": 0.2: ", array("0.2.probs", None)),
        "more than all mass": ("0.2: token 0: scores: ", item("0.2.probs", 0, 0.9)),
        "objects": ("0.2: Object arrays cannot be loaded", array("0.2.ids", np.array([[{}]], dtype=object))),
        "another top-k": ("1.2.ids: expected whole numbers of shape nx3", lambda made: made.update(
            {f"1.2.{name}": made[f"1.2.{name}"][:, :2] for name in ("ids", "probs")})),
        "a layer less": ("1: layer 3: ", lambda made: [made.pop(f"1.3.{name}") for name in ("ids", "probs")]),
    },
    "esft": {
        "a weight too many": (":1: ", lambda text: text.replace("\t\t", "\t\t0.1\t", 1)),
        "a text less": (": expected as many texts", lambda text: text.rpartition("\n")[0].rpartition("\n")[0] + "\n"),
        "NaN": (":3: token 2: scores: ", lambda text: text.rpartition("\t")[0] + "\tnan\n"),
    },
    "megatron": {
        "more tokens": (":2: top_indices: ", record(1, num_tokens=7)),
        "no logits": (":2: expected logits", record(1, logit_offset=None)),
        "another shape": (":2: logit_shape: ", record(1, logit_shape=[5, 16])),
        "beyond the sidecar": (":2: logits_rank0.bin: ", record(1, logit_offset=640 - 6 * 32 + 2)),
        "a layer less": (": layer 3: ", lambda records: records.pop(5)),
    },
    "sglang": {
        "null": (":1: ", lambda lines: lines.__setitem__(slice(None), [None, None])),
        "no base64": (":1: ", lambda lines: lines[0]["meta_info"].update(routed_experts="!!!")),
        "half a row": (":1: ", lambda lines: lines[0]["meta_info"].update(routed_experts=raw(np.zeros(13, np.int32)))),
    },
    "vllm": {
        "no npy": (f":1: {ROUTED}: expected an array in npy form", record(0, **response(np.zeros(3), raw))),
        "objects": (f":1: {ROUTED}: expected an array in npy form", record(0, **response(np.array([[[{}]]]), npy))),
        "several completions": (":1: choices: ", lambda lines: lines[0]["choices"].append({})),
        "nobody says the prompt": (":1: usage: prompt_tokens: ", record(0, usage=None)),
        "a prompt cut": (f":2: {ROUTED}: expected all 7 tokens", record(1, usage={"prompt_tokens": 7})),
        "no such expert": (f":1: {ROUTED}: layer 3: token 1: expert_ids: ", record(0, **response(poked(16)))),
        "half a token": (f":1: {ROUTED}: layer 3: token 1: expert_ids: ", record(0, **response(poked(-1)))),
        "nothing recorded": ("", lambda lines: lines.__setitem__(slice(None), [response(np.full((4, 4, 3), -1))])),
    },
}
# fmt: on


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in DAMAGE for name in DAMAGE[kind]])
def test_a_damaged_source_is_refused_with_file_and_place(tmp_path, out, kind, name):
    place, damage = DAMAGE[kind][name]
    source, path = damaged(kind, tmp_path / "source", damage)
    text = refusal(kind, source, out)
    assert text.startswith(str(path))
    assert place in text.removeprefix(str(path))


@pytest.mark.parametrize("fill", [0, 255, -1])
def test_tokens_that_were_not_recorded_and_responses_with_an_error_are_left_out_by_name(tmp_path, out, fill):
    """At 256 experts a wrapped -1 looks like expert 255; no router gives a token one expert twice."""
    ids_TLK = routing(20, 4, 256, 3)
    ids_TLK[:5, 1:] = fill
    source = written(tmp_path / "r.jsonl", response(ids_TLK), {"error": {"message": "too long"}}, response(ids_TLK))
    trace = imported("vllm", source, out, **toy(tmp_path, num_experts=256))
    assert trace.num_tokens == 30
    assert trace.metadata["note"] == "1 responses with an error left out; 10 tokens that were not recorded left out"


# ---- what all have in common -----------------------------------------------------------------------------------------


@every_kind
def test_an_import_is_replayed_and_is_the_same_again_and_a_changed_source_has_another_hash(tmp_path, out, kind):
    source = prepared(kind, tmp_path / "source")
    trace = imported(kind, source, out)
    sizes = {"num_experts": trace.num_experts, "top_k": trace.top_k, "num_tokens": 12, "num_batches": 1}
    share = 0.6 if trace.scores_are_normalised else None
    workload = RecordedWorkload([trace], 1, **sizes, tail="uniform", seed=0, topk_share=share)
    best = workload.batch(0).scores_TE.topk(trace.top_k, dim=1).indices
    np.testing.assert_array_equal(best.numpy(), trace.read_layer(1)[0][tokens_of(workload, 0)])
    assert int.from_bytes(out.read_bytes()[:8], "little") % 8 == 0, "tensors begin at whole words"
    again = imported(kind, source, out.with_name("again"))
    assert again.path.read_bytes() == out.read_bytes()
    path = source / "results/expert_scores/law/expert_weights_1.txt" if kind == "esft" else source
    if path.suffix == ".npz":
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = b"changed"
    else:
        path.write_text(path.read_text().replace("\n", "\r\n"))
    changed = imported(kind, source, out.with_name("changed"))
    assert changed.metadata["source_sha256"] != trace.metadata["source_sha256"]


WRONG = {
    "kind": ("esft", {}, "kind: "),
    "no model": ("vllm", {}, "preset: needed"),
    "nothing": ("megatron", {}, "preset, phase: needed"),
    "too many experts": ("vllm", {"preset": "CHANGED"}, "preset CHANGED: num_experts: expected 4 "),
    "no such file": ("megatron", {"preset": "x.yaml", "phase": "prefill"}, "preset: x.yaml: "),
    "no such phase": ("vllm", {**OPTIONS["vllm"], "phase": "later"}, "phase: "),
    "no such domain": ("esft", {"domain": "maths"}, "SOURCE/results/expert_scores: domain: expected one of intent"),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_suit_are_refused(tmp_path, out, name):
    kind, options, begin = WRONG[name]
    source, changed = prepared(kind, tmp_path / "source"), toy(tmp_path, num_experts=2048)["preset"]
    options = {key: changed if value == "CHANGED" else value for key, value in options.items()}
    text = refusal("tensorrt" if name == "kind" else kind, source, out, options)
    assert text.startswith(begin.replace("SOURCE", str(source)).replace("CHANGED", changed))


@every_kind
def test_the_command_refuses_another_source_in_one_line(tmp_path, out, kind, capsys):
    source = tmp_path / "other"
    arguments = [word for name, value in OPTIONS[kind].items() for word in (f"--{name.replace('_', '-')}", str(value))]
    for _ in ("no such file", "another"):
        assert main(["trace", "import", kind, str(source), str(out), *arguments]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n"), out.exists()) == ("", 1, False)
        assert said.err.startswith(f"moe-ep-bench: {source}")
        assert "allow_pickle" not in said.err
        source.write_text("no recording\n")
