"""Recordings of training frameworks, which hold scores: ESFT's, FLAME-MoE's and Megatron-Core's.

Shapes: T = tokens of a pass, E = experts, K = top_k.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.workload.arrays import REAL, checked, json_objects, lines, npz_array, opened_npz, whole_number
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.trace import score_words
from moe_ep_bench.workload.writer import TraceWriter

# ---- ESFT ------------------------------------------------------------------------------------------------------------

# scripts/get_expert_scores.py of the repository names the first two; the model's first of 27 layers is dense.
ESFT_EXPERTS, ESFT_TOP_K = 64, 6
ESFT_LAYERS = range(1, 27)


def read_esft(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one domain of deepseek-ai/ESFT (MIT) or, without ``domain``, all one after the other.

    ``results/expert_scores/<domain>/expert_weights_<layer>.txt`` hold what the vanilla DeepSeek-V2-Lite router chose
    for samples of training sets (intent, law, summary, translation). One file per MoE layer, one line per text:

        id TAB id ... TAB TAB weight TAB weight ...

    with 6 ids and 6 weights per token, tokens in the order of the text, the six in no order. Weights are the softmax
    over all 64 experts, rounded to four decimals, not renormalised. A text's first token begins every text alike and is
    left out, as it would be counted once per text: it is routed the same each time, unlike all others.

    Args:
        source: the checkout, its ``results/expert_scores``, or the directory of one domain.
    """
    root, name = source / "results" / "expert_scores", f"expert_weights_{ESFT_LAYERS[0]}.txt"
    root = root if root.is_dir() else source
    folders = [root] if (root / name).is_file() else sorted(path.parent for path in root.glob(f"*/{name}"))
    domains = {path.resolve().name: path for path in folders}
    if not domains:
        raise UserError(f"{source}: expected results/expert_scores/<domain>/{name}, got none")
    if options.domain not in ("unstated", *domains):
        raise UserError(f"{source}: domain: expected one of {', '.join(domains)}; got {options.domain!r}")
    chosen = domains if options.domain == "unstated" else {options.domain: domains[options.domain]}
    about = {"model": "deepseek-v2-lite", "score": "softmax, not renormalised", "phase": "prefill", "licence": "MIT"}
    about |= {"domain": "+".join(chosen), "where": str(source)}
    writer.describe(num_experts=ESFT_EXPERTS, top_k=ESFT_TOP_K, **about)
    num_sequences = 0
    for folder in chosen.values():
        paths = [folder / f"expert_weights_{layer}.txt" for layer in ESFT_LAYERS]
        for texts in itertools.zip_longest(*map(lines, paths)):
            num_tokens = 0
            for layer, path, text in zip(ESFT_LAYERS, paths, texts, strict=True):
                if text is None:
                    raise UserError(f"{path}: expected as many texts as the other layers have")
                ids_TK, weights_TK = _esft_text(*text)
                num_tokens = len(ids_TK)
                writer.add(layer, ids_TK[1:], weights_TK[1:], text[0], range(1, num_tokens))
            writer.add_tokens(num_sequences, np.arange(1, num_tokens), str(folder))
            num_sequences += 1
        writer.sources += paths
    writer.left_out["at the beginning of a text"] = num_sequences


def _esft_text(where: str, text: bytes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    halves = text.split(b"\t\t")
    if len(halves) != 2:
        raise UserError(f"{where}: expected ids, two tabs, weights; got {len(halves)} part(s)")
    try:
        ids, weights = np.array(halves[0].split(b"\t")).astype(np.int64), np.array(halves[1].split(b"\t")).astype(float)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{where}: expected numbers between tabs ({brief(str(error))})") from None
    if ids.size != weights.size or ids.size % ESFT_TOP_K:
        raise UserError(f"{where}: expected {ESFT_TOP_K} ids and weights per token, got {ids.size} and {weights.size}")
    return ids.reshape(-1, ESFT_TOP_K), weights.reshape(-1, ESFT_TOP_K)


# ---- FLAME-MoE -------------------------------------------------------------------------------------------------------

FLAME_CONVERT = (
    'python -c "import sys, pathlib, numpy, torch; a = {}; '
    "[a.update({f'{i}.{d.name}.ids': x[1].numpy(), f'{i}.{d.name}.probs': x[0].float().numpy()}) "
    "for d in pathlib.Path(sys.argv[1]).iterdir() for i, f in enumerate(sorted(d.glob('*.pt'))) "
    "for x in [torch.load(f, map_location='cpu', weights_only=True)] "
    "for x in [x if isinstance(x, (tuple, list)) else x.topk(int((x[0] > 0).sum()))]]; "
    'numpy.savez(sys.argv[2], **a)" actives/STEP step.npz'
)
FLAME_FORM = re.compile(r"(\d{1,9})\.(\d{1,9})\.(ids|probs)")


def read_flame_moe(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one checkpoint step of cmu-flame/FLAME-MoE's captured routing (scripts/empirical_analysis), as npz.

    A capture has a file per forward pass and layer, ``actives/<checkpoint step>/<layer>/<pass>.pt``: of newer ones the
    pair (probabilities, expert ids), both [tokens, K]; of older ones the router's probabilities [tokens, E], 0 outside
    of the top-k. They are pickles; ``FLAME_CONVERT``, typed where they are trusted, makes arrays ``<pass>.<layer>.ids``
    and ``.probs``, passes numbered in the order of their names. The models route by a softmax over all experts that is
    not renormalised (``--moe-router-pre-softmax``), so that probabilities are shares of a token's whole mass. What
    tokens are of one text is not captured: a pass is a sequence.
    """
    with opened_npz(source, FLAME_CONVERT) as npz:
        forms = [FLAME_FORM.fullmatch(name) for name in npz.files]
        if None in forms:
            got = brief(npz.files[forms.index(None)])
            raise UserError(f"{source}: expected <pass>.<layer>.ids and .probs, got {got}")
        places = sorted({(int(form[1]), int(form[2])) for form in forms if form})
        for sequence, (number, layers) in enumerate(itertools.groupby(places, key=lambda place: place[0])):
            num_tokens = 0
            for _, layer in layers:
                where = f"{source}: {(name := f'{number}.{layer}')}"
                ids_TK = npz_array(npz, source, f"{name}.ids", (None, None))
                probs_TK = npz_array(npz, source, f"{name}.probs", ids_TK.shape, REAL).astype(np.float64)
                if not writer.num_experts:
                    sizes = {"num_experts": options.num_experts, "top_k": ids_TK.shape[1]}
                    writer.describe(**sizes, where=where, score="softmax, not renormalised")
                writer.add(layer, ids_TK, probs_TK, where)
                num_tokens = len(ids_TK)
            writer.add_tokens(sequence, np.arange(num_tokens), f"{source}: {number}")
    writer.notes.append("a pass is a sequence: texts were not captured")


# ---- Megatron-Core ---------------------------------------------------------------------------------------------------

_MEGATRON_FILE = re.compile(r"router_trace_rank(\d+)\.jsonl")


class _Record(NamedTuple):
    """One line: what a router did in one forward pass."""

    where: str
    step: int
    layer: int
    ids_TK: NDArray[np.integer]
    offset: int
    """Of its logits in the sidecar."""
    logit_shape: list[int]


def read_megatron(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one rank's file of Megatron-Core 0.19's router tracer, and its logits sidecar.

    ``--moe-routing-trace-path`` with ``--moe-routing-trace-capture-logits`` makes Megatron-Core
    (``moe/router_trace.py`` there; 0.16.1 has no tracer) write one JSON object per forward pass and MoE layer of one
    rank:

        {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
         "num_tokens": 128, "topk": 8, "top_indices": [[ids], ...], "logit_offset": 0, "logit_shape": [128, 64], ...}

    Ids come in ascending order of experts, not of scores. Logits stand in ``logits_rank<rank>.bin`` beside it,
    bfloat16, before any score function: from these each token's shares of the whole score mass are made. What the
    tracer does not say, and what follows:

    * Texts. A forward pass is taken as one sequence; as ``micro_batch_size`` of them where these are interleaved
      ([sequence place, batch] flattened); in ``phase`` decode every token stands alone.
    * Which tokens and layers a rank has. Ranks of one tensor-parallel group see the same tokens, and pipeline stages
      number their own layers, so one import takes one rank's file.
    * Activation recomputation calls routers twice; such passes are in the file twice and cannot be told apart.

    Multi-token-prediction heads (``block`` mtp) are passed over.

    Args:
        source: the JSONL file, or a directory with one.
    """
    files = [source] if source.is_file() else sorted(source.iterdir())
    files = [path for path in files if _MEGATRON_FILE.fullmatch(path.name)]
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        expected = "expected one router_trace_rank<rank>.jsonl"
        raise UserError(f"{source}: {expected}, got {names}: name one file, as ranks may hold the same tokens")
    path, spec = files[0], options.spec
    sidecar = path.with_name(path.name.replace("router_trace", "logits").replace(".jsonl", ".bin"))
    writer.sources = [path, sidecar]
    score = f"{score_words(spec.score_function)}, from bfloat16 logits"
    writer.describe(num_experts=spec.num_experts, top_k=spec.top_k, where=f"preset {options.preset}", score=score)
    num_sequences = 0
    for step, records in itertools.groupby(_megatron_records(path), key=lambda record: record.step):
        first_layer, sequences, positions = None, [], []
        for record in records:
            where, num_tokens = record.where, len(record.ids_TK)
            number = num_tokens if options.phase == "decode" else options.micro_batch_size
            if num_tokens % number:
                expected = f"a multiple of micro_batch_size ({number})"
                raise UserError(f"{where}: num_tokens: expected {expected}, got {num_tokens}")
            # Interleaved sequences come one after the other.
            order_T = np.arange(num_tokens).reshape(-1, number).T.ravel()
            ids_TK, scores_TE = record.ids_TK[order_T], _megatron_scores(record, sidecar, spec)[order_T]
            # What is out of range the writer refuses.
            scores_TK = np.take_along_axis(scores_TE, ids_TK.clip(0, spec.num_experts - 1), axis=1)
            writer.add(record.layer, ids_TK, scores_TK, f"{where}: layer {record.layer}", order_T)
            first_layer = record.layer if first_layer is None else first_layer
            if record.layer == first_layer:  # the other layers have the same tokens
                sequences.append(num_sequences + np.repeat(np.arange(number), num_tokens // number))
                positions.append(np.tile(np.arange(num_tokens // number), number))
                num_sequences += number
        writer.add_tokens(np.concatenate(sequences), np.concatenate(positions), f"{path}: step {step}")
    what = "a token is a sequence" if options.phase == "decode" else "a sequence is a forward pass or part of one"
    writer.notes.append(f"{what}; multi-token prediction is left out")


def _megatron_records(path: Path) -> Iterator[_Record]:
    """Yield what routers of the decoder did with tokens, each line checked."""
    for where, record in json_objects(path):
        block, stage = record.get("block"), record.get("stage")
        if block not in ("decoder", "mtp") or stage != "pre_dispatch":
            expected = "block decoder or mtp and stage pre_dispatch"
            raise UserError(f"{where}: expected {expected}, got {brief(block)} and {brief(stage)}")
        step, layer, num_tokens = (whole_number(record, name, where) for name in ("step", "layer", "num_tokens"))
        if block == "decoder" and num_tokens:
            shape = num_tokens, whole_number(record, "topk", where, 1)
            ids_TK = checked(record.get("top_indices"), f"{where}: top_indices", shape)
            if "logit_offset" not in record:
                raise UserError(f"{where}: expected logits (--moe-routing-trace-capture-logits), got none")
            logit_shape = checked(record.get("logit_shape"), f"{where}: logit_shape", (2,)).tolist()
            yield _Record(where, step, layer, ids_TK, whole_number(record, "logit_offset", where), logit_shape)


def _megatron_scores(record: _Record, sidecar: Path, spec: ModelSpec) -> NDArray[np.float32]:
    """Shares of a record's score mass: [T, E]."""
    shape = len(record.ids_TK), spec.num_experts
    if record.logit_shape != [*shape]:
        raise UserError(f"{record.where}: logit_shape: expected {[*shape]}, got {record.logit_shape}")
    end = record.offset + 2 * math.prod(shape)
    size = sidecar.stat().st_size if sidecar.is_file() else 0
    if size < end:
        raise UserError(f"{record.where}: {sidecar.name}: expected at least {end} bytes, got {size}")
    logits_TE = (np.memmap(sidecar, np.dtype("<u2"), "r", record.offset, shape).astype(np.uint32) << 16).view(
        np.float32
    )
    match spec.score_function:
        case "softmax":
            return softmax(logits_TE, axis=1)
        case "sigmoid":
            scores_TE = expit(logits_TE)
        case _:
            scores_TE = np.sqrt(np.logaddexp(0, logits_TE))
    return scores_TE / scores_TE.sum(axis=1, keepdims=True)
