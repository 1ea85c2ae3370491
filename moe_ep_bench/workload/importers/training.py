"""Recordings of training frameworks, which hold scores: ESFT's, FLAME-MoE's and Megatron-Core's.

Shapes: T = tokens of a pass, E = experts, K = top_k.
"""

from __future__ import annotations

import itertools
import math
import re
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.models.scores import scores_from_logits
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.workload.importers.reading import ImportOptions, checked, json_objects, lines, whole_number
from moe_ep_bench.workload.trace import score_words
from moe_ep_bench.workload.writer import TraceWriter

# ---- ESFT ------------------------------------------------------------------------------------------------------------

# scripts/get_expert_scores.py of the repository names the first two; the model's first of 27 layers is dense.
ESFT_EXPERTS, ESFT_TOP_K = 64, 6
ESFT_LAYERS = range(1, 27)


def read_esft(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one domain of a checkout of deepseek-ai/ESFT (MIT).

    ``results/expert_scores/<domain>/expert_weights_<layer>.txt`` hold what the vanilla DeepSeek-V2-Lite router chose
    for samples of training sets (intent, law, summary, translation). One file per MoE layer, one line per text:

        id TAB id ... TAB TAB weight TAB weight ...

    with 6 ids and 6 weights per token, tokens in the order of the text, the six in no order. Weights are the softmax
    over all 64 experts, rounded to four decimals, not renormalised. A text's first token begins every text alike and is
    left out, as it would be counted once per text: it is routed the same each time, unlike all others.
    """
    root = source / "results" / "expert_scores"
    paths = [root / options.domain / f"expert_weights_{layer}.txt" for layer in ESFT_LAYERS]
    if not paths[0].is_file():
        domains = sorted(path.parent.name for path in root.glob(f"*/{paths[0].name}"))
        if not domains:
            raise UserError(f"{source}: holds no recordings of ESFT; expected {root}/DOMAIN/{paths[0].name}")
        raise UserError(f"{root}: domain: expected one of {', '.join(domains)}; got {options.domain!r}")
    about = {"model": "deepseek-v2-lite", "score": "softmax, not renormalised", "phase": "prefill", "licence": "MIT"}
    writer.describe(num_experts=ESFT_EXPERTS, top_k=ESFT_TOP_K, where=str(source), **about)
    writer.sources = paths
    for sequence, texts in enumerate(itertools.zip_longest(*map(lines, paths))):
        num_tokens = 0
        for layer, path, text in zip(ESFT_LAYERS, paths, texts, strict=True):
            if text is None:
                raise UserError(f"{path}: expected as many texts as the other layers have")
            ids_TK, weights_TK = _esft_text(*text)
            num_tokens = len(ids_TK)
            writer.add(layer, ids_TK[1:], weights_TK[1:], text[0], range(1, num_tokens))
        writer.add_tokens(sequence, np.arange(1, num_tokens), str(source))
        writer.left_out["at the beginning of a text"] += 1


def _esft_text(where: str, text: bytes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids, _, weights = text.partition(b"\t\t")
    try:
        ids_N, weights_N = np.array(ids.split(b"\t")).astype(np.int64), np.array(weights.split(b"\t")).astype(float)
        assert ids_N.size == weights_N.size
        return ids_N.reshape(-1, ESFT_TOP_K), weights_N.reshape(-1, ESFT_TOP_K)
    except (ValueError, OverflowError, AssertionError):
        expected = f"{ESFT_TOP_K} ids of every token, two tabs, and as many weights, with tabs between"
        raise UserError(f"{where}: expected {expected}; got {brief(text)}") from None


# ---- FLAME-MoE -------------------------------------------------------------------------------------------------------

FLAME_CONVERT = (
    'python -c "import sys, pathlib, numpy, torch; a = {}; '
    "[a.update({f'{i}.{d.name}.ids': x[1].numpy(), f'{i}.{d.name}.probs': x[0].float().numpy()}) "
    "for d in pathlib.Path(sys.argv[1]).iterdir() for i, f in enumerate(sorted(d.glob('*.pt'))) "
    "for x in [torch.load(f, map_location='cpu', weights_only=True)]]; "
    'numpy.savez(sys.argv[2], **a)" actives/STEP step.npz'
)
FLAME_FORM = re.compile(r"(\d{1,9})\.(\d{1,9})\.(ids|probs)")


def read_flame_moe(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one checkpoint step of cmu-flame/FLAME-MoE's captured routing (scripts/empirical_analysis), as npz.

    A capture has a file per forward pass and layer, ``actives/<checkpoint step>/<layer>/<pass>.pt``: the pair
    (probabilities, expert ids), both [tokens, K]. They are pickles; ``FLAME_CONVERT``, typed where they are trusted,
    makes arrays ``<pass>.<layer>.ids`` and ``.probs``, passes numbered in the order of their names. The models route by
    a softmax over all experts that is not renormalised (``--moe-router-pre-softmax``), so that probabilities are shares
    of a token's whole mass. What tokens are of one text is not captured: a pass is a sequence.
    """
    model = options.describe(writer, "softmax, not renormalised")
    if not zipfile.is_zipfile(source):
        raise UserError(f"{source}: expected an npz file; pickles are converted where they were made: {FLAME_CONVERT}")
    with np.load(source, allow_pickle=False) as npz:
        forms = [FLAME_FORM.fullmatch(name) for name in npz.files]
        if None in forms:
            got = brief(npz.files[forms.index(None)])
            raise UserError(f"{source}: expected <pass>.<layer>.ids and .probs, got {got}")
        places = sorted({(int(form[1]), int(form[2])) for form in forms if form})
        for sequence, (number, layers) in enumerate(itertools.groupby(places, key=lambda place: place[0])):
            num_tokens = 0
            for _, layer in layers:
                where = f"{source}: {number}.{layer}"
                try:
                    ids, probs = (npz[f"{number}.{layer}.{name}"] for name in ("ids", "probs"))
                except (KeyError, ValueError, zipfile.BadZipFile) as error:
                    raise UserError(f"{where}: {brief(str(error), quoted=False)}") from None
                ids_TK = checked(ids, f"{where}.ids", (None, model.top_k))
                probs_TK = checked(probs, f"{where}.probs", ids_TK.shape, "iuf").astype(np.float64)
                writer.add(layer, ids_TK, probs_TK, where)
                num_tokens = len(ids_TK)
            writer.add_tokens(sequence, np.arange(num_tokens), f"{source}: {number}")
    writer.notes.append("a pass is a sequence: texts were not captured")


# ---- Megatron-Core ---------------------------------------------------------------------------------------------------


def read_megatron(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one rank's file of Megatron-Core 0.19's router tracer, and its logits sidecar.

    ``--moe-routing-trace-path`` with ``--moe-routing-trace-capture-logits`` makes Megatron-Core
    (``moe/router_trace.py`` there; 0.16.1 has no tracer) write one JSON object per forward pass and MoE layer of one
    rank into ``router_trace_rank<rank>.jsonl``:

        {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
         "num_tokens": 128, "topk": 8, "top_indices": [[ids], ...], "logit_offset": 0, "logit_shape": [128, 64], ...}

    Ids come in ascending order of experts, not of scores. Logits stand in ``logits_rank<rank>.bin`` beside it,
    bfloat16, before any score function: from these each token's shares of the whole score mass are made. What the
    tracer does not say, and what follows:

    * Texts. A forward pass is taken as one sequence (record with a micro batch of one); in ``phase`` decode every token
      stands alone.
    * Which tokens and layers a rank has. Ranks of one tensor-parallel group see the same tokens, and pipeline stages
      number their own layers, so one import takes one rank's file.
    * Activation recomputation calls routers twice; such passes are in the file twice and cannot be told apart.

    Blocks but the decoder, as multi-token-prediction heads, are passed over.
    """
    sidecar = source.with_name(source.name.replace("router_trace", "logits")).with_suffix(".bin")
    writer.sources = [source, sidecar]
    model = options.describe(writer, "")
    writer.metadata["score"] = f"{score_words(model.score_function)}, from bfloat16 logits"
    lengths: dict[int, list[int]] = {}  # by layer, of sequences
    for where, record in json_objects(source):
        layer, num_tokens = whole_number(record, "layer", where), whole_number(record, "num_tokens", where)
        if record.get("block") != "decoder" or not num_tokens:
            continue
        ids_TK = checked(record.get("top_indices"), f"{where}: top_indices", (num_tokens, model.top_k))
        shares_TE = _megatron_shares(record, where, num_tokens, sidecar, model)
        # What is out of range the writer refuses.
        shares_TK = np.take_along_axis(shares_TE, ids_TK.clip(0, model.num_experts - 1), axis=1)
        writer.add(layer, ids_TK, shares_TK, f"{where}: layer {layer}")
        lengths.setdefault(layer, []).extend([1] * num_tokens if options.phase == "decode" else [num_tokens])
    if lengths:
        length_S = np.array(next(iter(lengths.values())))  # the other layers have the same tokens
        position_T = np.concatenate([np.arange(length) for length in length_S])
        writer.add_tokens(np.arange(len(length_S)).repeat(length_S), position_T, str(source))
    what = "a token is a sequence" if options.phase == "decode" else "a sequence is a forward pass"
    writer.notes.append(f"{what}; multi-token prediction is left out")


def _megatron_shares(record: dict, where: str, num_tokens: int, sidecar: Path, model: ModelSpec) -> NDArray[np.float32]:
    """Shares of the score mass from a record's logits: [T, E]."""
    if "logit_offset" not in record:
        raise UserError(f"{where}: expected logits (--moe-routing-trace-capture-logits), got none")
    shape, offset = (num_tokens, model.num_experts), whole_number(record, "logit_offset", where)
    if record.get("logit_shape") != [*shape]:
        raise UserError(f"{where}: logit_shape: expected {[*shape]}, got {brief(record.get('logit_shape'))}")
    bits_N = np.fromfile(sidecar, "<i2", math.prod(shape), offset=offset)
    if bits_N.size < math.prod(shape):
        raise UserError(f"{where}: {sidecar.name}: expected {num_tokens} tokens from byte {offset} on, got fewer")
    logits_TE = torch.from_numpy(bits_N.reshape(shape)).view(torch.bfloat16)
    scores_TE = scores_from_logits(logits_TE, model.score_function)
    return (scores_TE / scores_TE.sum(dim=1, keepdim=True)).numpy()
