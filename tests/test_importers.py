"""Importing recordings: nothing of the source is lost, nothing wrong gets in, nothing is half written.

Sources are made here, small and of the published form; none is copied.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from refusals import refusal
from safetensors.numpy import load_file
from trace_files import tokens_of

from moe_ep_bench.cli import main
from moe_ep_bench.workload.importers import IMPORTERS, import_trace
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.trace import open_trace

TOY = Path(__file__).parent / "data" / "toy-model.yaml"  # four layers, the first dense; 16 experts, top-3
OPTIONS = {
    "esft": {"domain": "law"},
    "flame-moe": {"preset": str(TOY), "stage": "training"},
    "megatron": {"preset": str(TOY), "stage": "prefill"},
    "sglang": {"preset": str(TOY)},
    "vllm": {"preset": str(TOY)},
}


class Made(NamedTuple):
    """A source, and what a recording of it holds: ids and scores by layer, in the source's order."""

    source: Path
    ids: dict[int, np.ndarray]
    scores: dict[int, np.ndarray] | None
    sequence_T: list[int]
    position_T: list[int]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "made.safetensors"


def toy(folder, **changes):
    """A preset like ``TOY`` but for ``changes``."""
    path = folder / "changed.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(TOY.read_text()) | changes))
    return {"preset": str(path)}


def places(*lengths, first=0):
    """Sequences and positions of texts of these lengths."""
    return (
        [text for text, length in enumerate(lengths) for _ in range(first, length)],
        [position for length in lengths for position in range(first, length)],
    )


# ---- sources ---------------------------------------------------------------------------------------------------------


def esft(root, lengths=(5, 1, 3)):
    """A checkout of two domains: six experts of 64 per token, in no order, with four-decimal shares that may tie."""
    random, ids, scores = np.random.default_rng(3), {}, {}
    for domain in ("intent", "law"):
        (root / "results/expert_scores" / domain).mkdir(parents=True)
        for layer in range(1, 27):
            texts = [
                (np.argsort(random.random((n, 64)), axis=1)[:, :6], np.round(random.random((n, 6)) / 8, 4))
                for n in lengths
            ]
            rows = (
                "\t".join(map(str, i.ravel())) + "\t\t" + "\t".join(map(repr, s.ravel().tolist())) for i, s in texts
            )
            (root / f"results/expert_scores/{domain}/expert_weights_{layer}.txt").write_text("\n".join(rows) + "\n")
            ids[layer], scores[layer] = (np.concatenate([text[part][1:] for text in texts]) for part in (0, 1))
    return Made(root, ids, scores, *places(*lengths, first=1))


def flame_moe(root, lengths=(5, 3)):
    """Two passes of two layers; probabilities in no order, as ``topk(sorted=False)`` leaves them."""
    random, arrays, ids, scores = np.random.default_rng(5), {}, {}, {}
    for layer in (2, 3):
        for number, num_tokens in enumerate(lengths):
            odds_TE = np.exp(random.normal(size=(num_tokens, 16)))
            arrays[f"{number}.{layer}.ids"] = np.argsort(-odds_TE, axis=1)[:, :3][:, ::-1]
            shares_TE = (odds_TE / odds_TE.sum(axis=1, keepdims=True)).astype(np.float32)
            arrays[f"{number}.{layer}.probs"] = np.take_along_axis(shares_TE, arrays[f"{number}.{layer}.ids"], axis=1)
        ids[layer], scores[layer] = (
            np.concatenate([arrays[f"{number}.{layer}.{name}"] for number in (0, 1)]) for name in ("ids", "probs")
        )
    np.savez(root / "d.npz", **arrays)
    return Made(root / "d.npz", ids, scores, *places(*lengths))


def megatron(root, lengths=(6, 4), layers=(1, 3), function="softmax", is_decode=False):
    """A tracer's files, ids in the order of experts; multi-token prediction and an empty pass are no layer's."""
    random, sidecar, told = np.random.default_rng(7), b"", []
    ids, scores = ({layer: [] for layer in layers} for _ in range(2))
    for step, num_tokens in enumerate(lengths):
        for layer in layers:
            logits_TE = torch.from_numpy(random.normal(size=(num_tokens, 16)) * 2).bfloat16()
            ids_TK = logits_TE.float().topk(3, dim=1).indices.sort(dim=1).values
            line = {"step": step, "block": "decoder", "layer": layer, "num_tokens": num_tokens}
            told.append(line | {"logit_offset": len(sidecar), "logit_shape": [num_tokens, 16]})
            told[-1]["top_indices"] = ids_TK.tolist()
            sidecar += logits_TE.view(torch.int16).numpy().tobytes()
            odds_TE = logits_TE.double().sigmoid() if function == "sigmoid" else logits_TE.double().exp()
            ids[layer].append(ids_TK.numpy())
            scores[layer].append((odds_TE / odds_TE.sum(dim=1, keepdim=True)).gather(1, ids_TK).numpy())
        told += [told[-1] | {"block": "mtp"}, told[-1] | {"num_tokens": 0, "top_indices": []}]
    source = written(root / "router_trace_rank0.jsonl", *told)
    (root / "logits_rank0.bin").write_bytes(sidecar)
    ids, scores = ({layer: np.concatenate(rows) for layer, rows in of.items()} for of in (ids, scores))
    sequence_T, position_T = ([*range(10)], [0] * 10) if is_decode else places(*lengths)
    return Made(source, ids, scores, sequence_T, position_T)


def routing(num_tokens, num_layers=4, num_experts=16, top_k=3, seed=0):
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


def vllm_response(ids_TLK, num_prompt=1, form=npy):
    return {"choices": [{"routed_experts": form(ids_TLK)}], "usage": {"prompt_tokens": num_prompt}}


def sglang_response(ids_TLK, num_prompt=1, form=raw):
    return {"meta_info": {"routed_experts": form(ids_TLK), "prompt_tokens": num_prompt}}


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return path


PROMPTS = (4, 3, 2)


def server(root, response=vllm_response, form=npy, stage="", made=None, layers=(1, 2, 3)):
    """Three requests, of which those of vLLM hold two tokens that were not recorded."""
    if made is None:
        made = [routing(length, seed=request).astype(np.int16) for request, length in enumerate((6, 6, 2))]
        made = [ids.astype(np.int32) for ids in made] if response is sglang_response else made
        made[1][:2] = -1
    source = written(root / "r.jsonl", *(response(ids, n, form) for ids, n in zip(made, PROMPTS, strict=False)))
    sequence_T, position_T = map(np.array, places(*map(len, made)))
    is_prompt_T = position_T < np.array(PROMPTS)[sequence_T]
    kept_T = np.array([ids.ndim == 2 and (ids >= 0).all() for ids in np.concatenate(made)])
    kept_T &= {"prefill": is_prompt_T, "decode": ~is_prompt_T}.get(stage, True)
    ids = {layer: np.concatenate(made)[kept_T, layer] for layer in layers}
    return Made(source, ids, None, sequence_T[kept_T].tolist(), position_T[kept_T].tolist())


def of_model(root, **changes):
    """Responses of another model, whose options are those of ``toy(root, **changes)``."""
    model = {"num_experts": 16, "top_k": 3, "first_dense_layers": 1, **changes}
    toy(root, **changes)
    ids_TLK = routing(5, num_experts=model["num_experts"], top_k=model["top_k"])
    ids_TLK[:, 0] = 0 if model["first_dense_layers"] else ids_TLK[:, 1]
    ids_TLK[2] = 0 if model["top_k"] == 1 else ids_TLK[2]  # of a top-1 model no padding
    return server(root, made=[ids_TLK], layers=range(model["first_dense_layers"], 4))


SOUND = {"esft": esft, "flame-moe": flame_moe, "megatron": megatron, "vllm": server}
SOUND["sglang"] = lambda root: server(root, sglang_response, raw)

# ---- what is imported: the format, its source, the options, and facts of the recording -------------------------------

CHANGED = {"preset": "CHANGED"}
SIGMOID = "sigmoid over its sum, from bfloat16 logits"
FIRST = "3 tokens at the beginning of a text left out"
UNKNOWN = "2 tokens that were not recorded left out"
IMPORTED = {
    "esft": ("esft", esft, {}, {"domain": "law", "source_files": "26", "note": FIRST}),
    "flame-moe": ("flame-moe", flame_moe, {}, {"score": "softmax, not renormalised", "source_layers": "2,3"}),
    "megatron": ("megatron", megatron, {}, {"source_files": "2", "source_layers": "1,3"}),
    "megatron, decode": (
        "megatron",
        lambda root: toy(root, score_function="sigmoid") and megatron(root, function="sigmoid", is_decode=True),
        {**CHANGED, "stage": "decode"},
        {"score": SIGMOID, "phase": "decode"},
    ),
    "sglang": ("sglang", SOUND["sglang"], {}, {"source_layers": "1,2,3", "note": UNKNOWN}),
    "vllm": ("vllm", server, {}, {"phase": "prefill and decode", "note": UNKNOWN}),
    "vllm, lists": ("vllm", lambda root: server(root, form=np.ndarray.tolist), {}, {"note": UNKNOWN}),
    "vllm, prompts": ("vllm", lambda root: server(root, stage="prefill"), {"stage": "prefill"}, {"phase": "prefill"}),
    "vllm, steps": ("vllm", lambda root: server(root, stage="decode"), {"stage": "decode"}, {"phase": "decode"}),
    "512 experts": ("vllm", lambda root: of_model(root, num_experts=512), CHANGED, {"num_experts": "512"}),
    "top-1": ("vllm", lambda root: of_model(root, top_k=1), CHANGED, {"note": "nothing"}),
    "no dense layer": (
        "vllm",
        lambda root: of_model(root, first_dense_layers=0),
        CHANGED,
        {"source_layers": "0,1,2,3"},
    ),
}


@pytest.mark.parametrize("name", IMPORTED)
def test_a_source_becomes_this_recording_and_is_replayed_and_the_same_again(tmp_path, out, name):
    """Rows are the source's, best first; equal scores keep its order."""
    kind, make, asked, facts = IMPORTED[name]
    made = make(tmp_path)
    options = {**OPTIONS[kind], **asked}
    options = {key: str(tmp_path / "changed.yaml") if value == "CHANGED" else value for key, value in options.items()}
    import_trace(kind, made.source, out, **options)
    trace, tensors = open_trace(out), load_file(out)
    assert facts.items() <= trace.metadata.items()
    assert trace.metadata["source_layers"] == ",".join(map(str, made.ids))
    assert (tensors["sequence_id"].tolist(), tensors["position"].tolist()) == (made.sequence_T, made.position_T)
    for place, (layer, ids_TK) in enumerate(made.ids.items()):
        scores_TK = np.full(ids_TK.shape, 1 / trace.top_k) if made.scores is None else made.scores[layer]
        order_TK = np.array([sorted(range(len(row)), key=lambda k: -row[k]) for row in scores_TK.tolist()])
        np.testing.assert_array_equal(tensors["expert_ids"][place], np.take_along_axis(ids_TK, order_TK, 1))
        sorted_TK = np.take_along_axis(scores_TK, order_TK, 1)
        np.testing.assert_allclose(tensors["scores"][place], sorted_TK, rtol=1e-3, atol=1e-7)
    assert tensors["expert_ids"].dtype == (np.uint16 if trace.num_experts > 256 else np.uint8)
    assert int.from_bytes(out.read_bytes()[:8], "little") % 8 == 0, "tensors begin at whole words"
    with pytest.raises(ValueError, match="expected a name that is free"):
        import_trace(kind, made.source, out, **options)
    import_trace(kind, made.source, out.with_name("again"), **options)
    assert out.with_name("again").read_bytes() == out.read_bytes()
    if trace.top_k > 1:
        sizes = {"num_experts": trace.num_experts, "top_k": trace.top_k, "num_tokens": 12, "num_batches": 1}
        share = 0.6 if trace.scores_are_normalised else None
        workload = RecordedWorkload([trace], 1, **sizes, tail="uniform", seed=0, topk_share=share, order="shuffled")
        best = workload.batch(0).scores_TE.topk(trace.top_k, dim=1).indices
        np.testing.assert_array_equal(best.numpy(), trace.read_layer(1)[0][tokens_of(workload, 0)])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers_times_of_requests_are_kept_and_order_them(tmp_path, out, kind):
    times = [12.0, 10.0, 11.0]
    source = SOUND[kind](tmp_path).source
    responses = [json.loads(line) for line in source.read_text().splitlines() if line]
    for seconds, response in zip(times, responses, strict=True):
        if kind == "vllm":
            response["created"] = int(seconds)
        else:
            response["meta_info"]["request_received_ts"] = seconds
    import_trace(kind, written(source, *responses), out, **OPTIONS[kind])
    trace, tensors = open_trace(out), load_file(out)
    assert trace.arrival_S.tolist() == sorted(times)
    assert tensors["sequence_id"][trace.start_S[:-1]].tolist() == [1, 2, 0]


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
    options = {**OPTIONS["megatron"], **toy(tmp_path, num_experts=8, top_k=2)}
    import_trace("megatron", tmp_path / "trace" / "router_trace_rank0.jsonl", out, **options)
    ids = load_file(out)["expert_ids"]
    for layer in (1, 2):
        np.testing.assert_array_equal(ids[layer - 1], np.concatenate([expected[step, layer] for step in (0, 1)]))


@pytest.mark.parametrize("fill", [0, 255, -1])
def test_tokens_that_were_not_recorded_are_left_out_by_name(tmp_path, out, fill):
    """At 256 experts a wrapped -1 looks like expert 255; no router gives a token one expert twice."""
    ids_TLK = routing(20, num_experts=256)
    ids_TLK[:5, 1:] = fill
    source = written(tmp_path / "r.jsonl", vllm_response(ids_TLK), vllm_response(ids_TLK))
    import_trace("vllm", source, out, **toy(tmp_path, num_experts=256))
    assert open_trace(out).num_tokens == 30
    assert open_trace(out).metadata["note"] == "10 tokens that were not recorded left out"


# ---- what is refused: the format, the place that the error names behind the file, and the damage ---------------------


def line(number, **values):
    """Other values in a line of JSON; None removes the key."""

    def change(lines):
        lines[number] = {key: value for key, value in {**lines[number], **values}.items() if value is not None}

    return change


def array(name, change):
    """Another array in an npz file; None removes it."""

    def of(arrays):
        value = arrays.pop(name)
        if change is not None:
            arrays[name] = change(value)

    return of


def poked(value):
    """Routing with another expert in one place."""
    ids_TLK = routing(3)
    ids_TLK[1, 3, 2] = value
    return ids_TLK


# fmt: off
BROKEN: list[tuple[str, str, Any]] = [
    ("flame-moe", ": 0.2: ", array("0.2.probs", None)),
    ("flame-moe", ": 0.2: token 0: scores: ", array("0.2.probs", lambda probs: probs + 0.9)),
    ("flame-moe", ": 0.2: Object arrays cannot be loaded", array("0.2.ids", lambda _: np.array([[{}]], dtype=object))),
    ("flame-moe", ": 1.2.ids: expected whole numbers of shape nx3", array("1.2.ids", lambda ids: ids[:, :2])),
    ("flame-moe", ": 1: layer 3: ", lambda arrays: [arrays.pop(f"1.3.{name}") for name in ("ids", "probs")]),
    ("flame-moe", ": expected <pass>.<layer>.ids", lambda arrays: arrays.update(other=np.zeros(1))),
    ("esft", ":1: ", lambda text: text.replace("\t\t", "\t\t0.1\t", 1)),
    ("esft", ": expected as many texts", lambda text: text.rpartition("\n")[0].rpartition("\n")[0] + "\n"),
    ("esft", ":3: token 2: scores: ", lambda text: text.rpartition("\t")[0] + "\tnan\n"),
    ("megatron", ":2: top_indices: ", line(1, num_tokens=7)),
    ("megatron", ":2: logit_offset: ", line(1, logit_offset=None)),
    ("megatron", ":2: logit_shape: ", line(1, logit_shape=[5, 16])),
    ("megatron", ":2: logits_rank0.bin: ", line(1, logit_offset=640 - 6 * 32 + 2)),
    ("megatron", ": layer 3: ", lambda lines: lines.pop(5)),
    ("megatron", ":2: layer 3: token 0: expert_ids: ", line(1, top_indices=[[0, 1, 99]] * 6)),
    ("sglang", ":1: ", lambda lines: lines.__setitem__(0, None)),
    ("sglang", ":1: routed_experts: ", line(0, meta_info={"prompt_tokens": 1, "routed_experts": "!!!"})),
    ("sglang", ":1: routed_experts: ", line(0, **sglang_response(np.zeros(13, np.int32)))),
    ("vllm", ":1: routed_experts: expected an array in npy form", line(0, **vllm_response(np.zeros(3), form=raw))),
    ("vllm", ":1: routed_experts: expected an array in npy form", line(0, **vllm_response(np.array([[[{}]]])))),
    ("vllm", ":1: routed_experts: expected whole numbers of shape nx4x3", line(0, **vllm_response(routing(2, 5)))),
    ("vllm", ":1: choices: ", lambda lines: lines[0]["choices"].append(lines[1]["choices"][0])),
    ("vllm", ":1: choices: ", line(0, choices=None, error={"message": "too long"})),
    ("vllm", ":1: usage: ", line(0, usage=None)),
    ("vllm", ":2: routed_experts: expected all 7 tokens", line(1, usage={"prompt_tokens": 7})),
    ("vllm", ":1: routed_experts: layer 3: token 1: expert_ids: ", line(0, **vllm_response(poked(16)))),
    ("vllm", ":1: routed_experts: layer 3: token 1: expert_ids: ", line(0, **vllm_response(poked(-1)))),
    ("vllm", "", lambda lines: lines.__setitem__(slice(None), [vllm_response(np.full((4, 4, 3), -1))])),
]
# fmt: on


def refused(kind, source, out, options):
    """The one line with which an import is refused, after which nothing is left where the trace would be."""
    text = refusal(import_trace, kind, source, out, **options)
    assert not out.parent.exists() or list(out.parent.iterdir()) == []
    return text


@pytest.mark.parametrize("number", range(len(BROKEN)), ids=lambda number: "".join(BROKEN[number][:2]))
def test_a_damaged_source_is_refused_with_file_and_place(tmp_path, out, number):
    kind, place, damage = BROKEN[number]
    source = SOUND[kind](tmp_path).source
    path = source / "results/expert_scores/law/expert_weights_7.txt" if kind == "esft" else source
    if kind == "flame-moe":
        arrays = dict(np.load(source))
        damage(arrays)
        np.savez(source, **arrays)
    elif kind == "esft":
        path.write_text(damage(path.read_text()))
    else:
        lines = [json.loads(text) for text in path.read_text().split("\n") if text]
        damage(lines)
        written(path, *lines)
    assert refused(kind, source, out, OPTIONS[kind]).startswith(f"{path}{place}")


WRONG = [
    ("tensorrt", {}, "kind: "),
    ("vllm", {}, "preset: needed"),
    ("megatron", {}, "preset, stage: needed"),
    ("vllm", CHANGED, "preset CHANGED: num_experts: expected 4 "),
    ("megatron", {"preset": "x.yaml", "stage": "prefill"}, "preset: x.yaml: "),
    ("vllm", {**OPTIONS["vllm"], "stage": "later"}, "stage: "),
    ("esft", {"domain": "maths"}, "SOURCE/results/expert_scores: domain: expected one of intent"),
]


@pytest.mark.parametrize(("kind", "options", "begin"), WRONG)
def test_options_that_do_not_suit_are_refused(tmp_path, out, kind, options, begin):
    source = SOUND.get(kind, server)(tmp_path).source
    changed = toy(tmp_path, num_experts=2048)["preset"]
    options = {key: changed if value == "CHANGED" else value for key, value in options.items()}
    text = refused(kind, source, out, options)
    assert text.startswith(begin.replace("SOURCE", str(source)).replace("CHANGED", changed))


class Touch:
    """Unpickled, it makes the file ``canary``."""

    def __reduce__(self):
        return Path.touch, (Path("canary"),)


@pytest.mark.parametrize("kind", IMPORTERS)
def test_the_command_refuses_another_source_in_one_line_and_unpickles_nothing(tmp_path, out, kind, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "other.npz"
    arguments = [word for name, value in OPTIONS[kind].items() for word in (f"--{name}", value)]
    for content in (b"no recording\n", pickle.dumps(Touch()), b""):
        assert main(["trace", "import", kind, str(source), str(out), *arguments]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n"), out.exists()) == ("", 1, False)
        assert said.err.startswith(f"moe-ep-bench: {source}")
        assert "allow_pickle" not in said.err
        source.write_bytes(content)
    assert main(["trace", "info", str(source)]) == 2
    assert not (tmp_path / "canary").exists()
