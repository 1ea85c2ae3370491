"""Convert other programs' recordings to ``moe-trace-v1``.

An importer is a row of ``IMPORTERS`` and a function ``read(source, model, options, writer)`` that hands the writer
blocks of (layer, experts, scores), and then their tokens. The writer checks every block, and the file appears under its
name only when it is whole; its metadata has the hash of the source. Pickles are never read. Every error is a ValueError
of one line that names the file and the place in it.

Shapes: T = tokens of a request or pass, L = layers of the model, E = experts, K = top_k.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Base64Bytes, BaseModel, Field, NonNegativeInt, ValidationError

from moe_ep_bench.errors import UserError, brief, naming, problem_error
from moe_ep_bench.models import ModelSpec, load_model, scores_from_logits, shares
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.workload.trace import TraceWriter, score_words, written_trace


@dataclass(frozen=True)
class ImportOptions:
    """Facts about a recording, as options of ``trace import`` give them, because its file does not.

    Attributes:
        preset: the model: a preset's name, its config.json, or a YAML file of the form of a preset.
        stage: prefill, decode or training.
        domain: part of a published recording; of others, what the texts are about.
    """

    preset: str = ""
    stage: str = ""
    domain: str = "unstated"
    licence: str = "unstated"


_Record = TypeVar("_Record", bound=BaseModel)


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a file's lines without their ends, each with its place (``file:line``)."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield f"{path}:{number}", line.rstrip(b"\r\n")


def records(path: Path, kind: type[_Record]) -> Iterator[tuple[str, _Record]]:
    """Yield the JSON of every line but empty ones, each with its place. Raises ValueError: a line is no ``kind``."""
    for where, line in lines(path):
        if line.strip():
            try:
                yield where, kind.model_validate_json(line)
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]
                raise problem_error(problem, ".".join(map(str, problem["loc"])), where) from None


def checked(value: Any, where: str, shape: tuple[int | None, ...], kinds: str = "iu") -> NDArray[Any]:
    """Hold an array, or nested lists, against what a format expects.

    Args:
        shape: lengths by dimension, of which None takes any.
        kinds: of numpy's types; whole numbers, or with ``f`` real ones too.

    Raises:
        ValueError: another shape, or other things than numbers.
    """
    with naming(where):
        array = np.asarray(value)
        fits = len(shape) == array.ndim and all(
            length in (None, got) for length, got in zip(shape, array.shape, strict=True)
        )
        if not fits or array.dtype.kind not in kinds:
            wanted = "x".join("n" if length is None else str(length) for length in shape)
            words = "numbers" if "f" in kinds else "whole numbers"
            raise UserError(f"expected {words} of shape {wanted}, got {array.dtype} of shape {array.shape}")
    return array


# ---- servers: expert ids alone, in responses, one a line -------------------------------------------------------------

# The meaning of their scores; every result made from them states it.
ASSUMED = "assumed equal over the top-k: the source holds expert ids only"


class _Usage(BaseModel):
    prompt_tokens: NonNegativeInt


class _MetaInfo(_Usage):
    routed_experts: Base64Bytes
    request_received_ts: float | None = None


class _SglangResponse(BaseModel):
    meta_info: _MetaInfo


def read_sglang(source: Path, model: ModelSpec, options: ImportOptions, writer: TraceWriter) -> None:
    """Import SGLang's responses with routed experts.

    ``/generate`` (``--enable-return-routed-experts``, and ``return_routed_experts`` in a request) returns
    ``routed_experts`` in ``meta_info``: base64 of int32 [tokens, layers, K], of the prompt and of what was generated
    but its last token. ``prompt_tokens`` beside it tells the stages, ``request_received_ts`` when the request came.
    """
    row_bytes = 4 * model.num_layers * model.top_k
    for sequence, (where, response) in enumerate(records(source, _SglangResponse)):
        content, place = response.meta_info.routed_experts, f"{where}: routed_experts"
        if not content or len(content) % row_bytes:
            expected = f"rows of {model.num_layers} layers x top-{model.top_k} as int32 ({row_bytes} bytes)"
            raise UserError(f"{place}: expected {expected}, got {len(content)} bytes")
        ids_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, model.num_layers, model.top_k)
        _add_request(writer, sequence, ids_TLK, response.meta_info.prompt_tokens, place, options.stage, model)
        writer.add_arrival(sequence, response.meta_info.request_received_ts)


class _Completion(BaseModel):
    routed_experts: Base64Bytes | list[list[list[int]]]


class _VllmResponse(BaseModel):
    choices: list[_Completion] = Field(min_length=1, max_length=1)
    usage: _Usage
    created: float | None = None


def read_vllm(source: Path, model: ModelSpec, options: ImportOptions, writer: TraceWriter) -> None:
    """Import vLLM's responses with routed experts.

    vLLM (``enable_return_routed_experts``) returns ``routed_experts`` [tokens, layers, K] with every completion, of
    which a response has one (n = 1): of its prompt and of what was generated but its last token, as the base64 text of
    an array in npy form. Lists serve too, as Python has them:

        {"choices": [{"routed_experts": output.outputs[0].routed_experts.tolist()}],
         "usage": {"prompt_tokens": len(output.prompt_token_ids)}}

    Ids are uint8 for up to 256 experts. Tokens whose routing was not recorded are -1 (255). ``created`` is the second
    in which the request came.
    """
    for sequence, (where, response) in enumerate(records(source, _VllmResponse)):
        ids, place = response.choices[0].routed_experts, f"{where}: routed_experts"
        if isinstance(ids, bytes):
            try:
                ids = np.lib.format.read_array(io.BytesIO(ids), allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise UserError(f"{place}: expected an array in npy form ({brief(str(error), quoted=False)})") from None
        _add_request(writer, sequence, ids, response.usage.prompt_tokens, place, options.stage, model)
        writer.add_arrival(sequence, response.created)


def _add_request(
    writer: TraceWriter, sequence: int, ids: Any, num_prompt: int, where: str, stage: str, model: ModelSpec
) -> None:
    """Add a request's tokens, or those of one stage.

    Ids below 0 say that nothing was recorded of a token; so does one number in all places (zeros, or -1 as uint8), as
    no router gives a token one expert twice. With K = 1 that cannot be told.

    Args:
        ids: [T, L, K].
        num_prompt: tokens of the prompt.

    Raises:
        ValueError: the model has other layers, or tokens of the prompt are missing.
    """
    ids_TLK = checked(ids, where, (None, model.num_layers, model.top_k))
    num_tokens = len(ids_TLK)
    if num_tokens < num_prompt:
        raise UserError(f"{where}: expected all {num_prompt} tokens of the prompt, got {num_tokens} recorded")
    position_T, ids_TM = np.arange(num_tokens), ids_TLK[:, model.moe_layers].reshape(num_tokens, -1)
    is_prompt_T = position_T < num_prompt
    is_asked_T = {"prefill": is_prompt_T, "decode": ~is_prompt_T}.get(stage, np.ones_like(is_prompt_T))
    is_empty_T = (ids_TM < 0).all(axis=1)
    if model.top_k > 1:
        is_empty_T |= (ids_TM == ids_TM[:, :1]).all(axis=1)
    writer.left_out["of another stage"] += int((~is_asked_T).sum())
    writer.left_out["that were not recorded"] += int((is_asked_T & is_empty_T).sum())
    kept_T = is_asked_T & ~is_empty_T
    for layer in model.moe_layers:
        writer.add(layer, ids_TLK[kept_T, layer], None, f"{where}: layer {layer}", position_T[kept_T])
    writer.add_tokens(sequence, position_T[kept_T], where)


# ---- ESFT ------------------------------------------------------------------------------------------------------------


def read_esft(source: Path, model: ModelSpec, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one domain of a checkout of deepseek-ai/ESFT (MIT).

    ``results/expert_scores/<domain>/expert_weights_<layer>.txt`` hold what the vanilla DeepSeek-V2-Lite router chose
    for samples of training sets (intent, law, summary, translation). One file per MoE layer, one line per text:

        id TAB id ... TAB TAB weight TAB weight ...

    with 6 ids and 6 weights per token, tokens in the order of the text, the six in no order. Weights are the softmax
    over all 64 experts, rounded to four decimals, not renormalised. A text's first token begins every text alike and is
    left out, as it would be counted once per text: it is routed the same each time, unlike all others.
    """
    root = source / "results" / "expert_scores"
    paths = [root / options.domain / f"expert_weights_{layer}.txt" for layer in model.moe_layers]
    if not paths[0].is_file():
        domains = sorted(path.parent.name for path in root.glob(f"*/{paths[0].name}"))
        if not domains:
            raise UserError(f"{source}: holds no recordings of ESFT; expected {root}/DOMAIN/{paths[0].name}")
        raise UserError(f"{root}: domain: expected one of {', '.join(domains)}; got {options.domain!r}")
    writer.metadata |= {"model": "deepseek-v2-lite", "phase": "prefill", "licence": "MIT"}
    writer.sources = paths
    for sequence, texts in enumerate(itertools.zip_longest(*map(lines, paths))):
        num_tokens = 0
        for layer, path, text in zip(model.moe_layers, paths, texts, strict=True):
            if text is None:
                raise UserError(f"{path}: expected as many texts as the other layers have")
            where, words = text
            ids_TK, weights_TK = _esft_text(where, words, model.top_k)
            num_tokens = len(ids_TK)
            writer.add(layer, ids_TK[1:], weights_TK[1:], where, range(1, num_tokens))
        writer.add_tokens(sequence, np.arange(1, num_tokens), str(source))
        writer.left_out["at the beginning of a text"] += 1


def _esft_text(where: str, text: bytes, top_k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids, _, weights = text.partition(b"\t\t")
    try:
        ids_N, weights_N = np.array(ids.split(b"\t")).astype(np.int64), np.array(weights.split(b"\t")).astype(float)
        return ids_N.reshape(-1, top_k), weights_N.reshape(len(ids_N) // top_k, top_k)
    except (ValueError, OverflowError):
        expected = f"{top_k} ids of every token, two tabs, and as many weights, with tabs between"
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


def read_flame_moe(source: Path, model: ModelSpec, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one checkpoint step of cmu-flame/FLAME-MoE's captured routing (scripts/empirical_analysis), as npz.

    A capture has a file per forward pass and layer, ``actives/<checkpoint step>/<layer>/<pass>.pt``: the pair
    (probabilities, expert ids), both [tokens, K]. They are pickles; ``FLAME_CONVERT``, typed where they are trusted,
    makes arrays ``<pass>.<layer>.ids`` and ``.probs``, passes numbered in the order of their names. The models route by
    a softmax over all experts that is not renormalised (``--moe-router-pre-softmax``), so that probabilities are shares
    of a token's whole mass. What tokens are of one text is not captured: a pass is a sequence.
    """
    if not zipfile.is_zipfile(source):
        raise UserError(f"{source}: expected an npz file; pickles are converted where they were made: {FLAME_CONVERT}")
    with np.load(source, allow_pickle=False) as npz:
        forms = [FLAME_FORM.fullmatch(name) for name in npz.files]
        if None in forms:
            got = brief(npz.files[forms.index(None)])
            raise UserError(f"{source}: expected <pass>.<layer>.ids and .probs, got {got}")
        places = sorted({(int(form[1]), int(form[2])) for form in forms if form})
        for sequence, (number, layers) in enumerate(itertools.groupby(places, key=lambda place: place[0])):
            ids_TK = np.zeros((0, model.top_k))
            for _, layer in layers:
                where = f"{source}: {number}.{layer}"
                try:
                    ids, probs = (npz[f"{number}.{layer}.{name}"] for name in ("ids", "probs"))
                except (KeyError, ValueError, zipfile.BadZipFile) as error:
                    raise UserError(f"{where}: {brief(str(error), quoted=False)}") from None
                ids_TK = checked(ids, f"{where}.ids", (None, model.top_k))
                writer.add(layer, ids_TK, checked(probs, f"{where}.probs", ids_TK.shape, "iuf").astype(float), where)
            writer.add_tokens(sequence, np.arange(len(ids_TK)), f"{source}: {number}")
    writer.notes.append("a pass is a sequence: texts were not captured")


# ---- Megatron-Core ---------------------------------------------------------------------------------------------------


class _Pass(BaseModel):
    """A line of the tracer: one forward pass through one router."""

    block: str
    layer: NonNegativeInt
    num_tokens: NonNegativeInt
    top_indices: list[list[int]]
    logit_offset: NonNegativeInt | None = None  # in bytes; None: logits were not captured
    logit_shape: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)


def read_megatron(source: Path, model: ModelSpec, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one rank's file of Megatron-Core 0.19's router tracer, and its logits sidecar.

    ``--moe-routing-trace-path`` with ``--moe-routing-trace-capture-logits`` makes Megatron-Core
    (``moe/router_trace.py`` there; 0.16.1 has no tracer) write one JSON object per forward pass and MoE layer of one
    rank into ``router_trace_rank<rank>.jsonl``:

        {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
         "num_tokens": 128, "topk": 8, "top_indices": [[ids], ...], "logit_offset": 0, "logit_shape": [128, 64], ...}

    Ids come in ascending order of experts, not of scores. Logits stand in ``logits_rank<rank>.bin`` beside it,
    bfloat16, before any score function: from these each token's shares of the whole score mass are made. What the
    tracer does not say, and what follows:

    * Texts. A forward pass is taken as one sequence (record with a micro batch of one); in ``stage`` decode every token
      stands alone.
    * Which tokens and layers a rank has. Ranks of one tensor-parallel group see the same tokens, and pipeline stages
      number their own layers, so one import takes one rank's file.
    * Activation recomputation calls routers twice; such passes are in the file twice and cannot be told apart.

    Blocks but the decoder, as multi-token-prediction heads, are passed over.
    """
    sidecar = source.with_name(source.name.replace("router_trace", "logits")).with_suffix(".bin")
    writer.sources = [source, sidecar]
    writer.metadata["score"] = f"{score_words(model.score_function)}, from bfloat16 logits"
    lengths: dict[int, list[int]] = {}  # by layer, of sequences
    for where, read in records(source, _Pass):
        if read.block != "decoder" or not read.num_tokens:
            continue
        ids_TK = checked(read.top_indices, f"{where}: top_indices", (read.num_tokens, model.top_k))
        shares_TE = _megatron_shares(read, where, sidecar, model)
        # The writer refuses ids that are out of range.
        shares_TK = np.take_along_axis(shares_TE, ids_TK.clip(0, model.num_experts - 1), axis=1)
        writer.add(read.layer, ids_TK, shares_TK, f"{where}: layer {read.layer}")
        length_S = [1] * read.num_tokens if options.stage == "decode" else [read.num_tokens]
        lengths.setdefault(read.layer, []).extend(length_S)
    if lengths:
        length_S = np.array(next(iter(lengths.values())))  # the other layers have the same tokens
        position_T = np.concatenate([np.arange(length) for length in length_S])
        writer.add_tokens(np.arange(len(length_S)).repeat(length_S), position_T, str(source))
    what = "a token is a sequence" if options.stage == "decode" else "a sequence is a forward pass"
    writer.notes.append(f"{what}; multi-token prediction is left out")


def _megatron_shares(read: _Pass, where: str, sidecar: Path, model: ModelSpec) -> NDArray[np.float32]:
    """Shares of the score mass from a pass's logits: [T, E]."""
    shape = (read.num_tokens, model.num_experts)
    if read.logit_offset is None:
        raise UserError(f"{where}: logit_offset: expected logits (--moe-routing-trace-capture-logits), got none")
    if read.logit_shape != shape:
        raise UserError(f"{where}: logit_shape: expected {[*shape]}, got {[*read.logit_shape]}")
    bits_N = np.fromfile(sidecar, "<i2", math.prod(shape), offset=read.logit_offset)
    if bits_N.size < math.prod(shape):
        expected = f"{read.num_tokens} tokens from byte {read.logit_offset} on"
        raise UserError(f"{where}: {sidecar.name}: expected {expected}, got fewer")
    logits_TE = torch.from_numpy(bits_N.reshape(shape)).view(torch.bfloat16)
    return shares(scores_from_logits(logits_TE, model.score_function)).numpy()


# ---- importing -------------------------------------------------------------------------------------------------------


class Importer(NamedTuple):
    """How one kind of source is imported.

    Attributes:
        read: hands the writer what the source holds; its docstring describes the format.
        recorder: who made the source: the trace's ``source``.
        score: what its scores are.
        needs: options that must be given.
        preset: the model of all sources; empty = the option's.
    """

    read: Callable[[Path, ModelSpec, ImportOptions, TraceWriter], None]
    recorder: str
    score: str
    needs: tuple[str, ...]
    preset: str = ""


SHARES = "softmax, not renormalised"
IMPORTERS = {
    "esft": Importer(
        read_esft, "deepseek-ai/ESFT results/expert_scores", SHARES, ("domain",), preset="deepseek-v2-lite"
    ),
    "flame-moe": Importer(read_flame_moe, "cmu-flame/FLAME-MoE captured routing", SHARES, ("preset", "stage")),
    "megatron": Importer(read_megatron, "Megatron-Core router trace", "", ("preset", "stage")),
    "sglang": Importer(read_sglang, "SGLang routed experts", ASSUMED, ("preset",)),
    "vllm": Importer(read_vllm, "vLLM routed experts", ASSUMED, ("preset",)),
}
STAGES = ("prefill", "decode", "training")


def import_trace(kind: str, source: Path, out: Path, **options: str) -> None:
    """Write the recording at ``source`` as the ``moe-trace-v1`` file ``out``.

    Args:
        kind: one of ``IMPORTERS``.
        out: must not exist yet; parent directories are made.
        options: fields of ``ImportOptions``.

    Raises:
        ValueError: an unknown kind, an option that is missing, a source that is missing, damaged or not
            what a router makes; one line that names the file, the place in it, the value and what is allowed.
    """
    if kind not in IMPORTERS:
        raise UserError(f"expected one of {', '.join(IMPORTERS)}; got {kind!r}", "kind")
    importer = IMPORTERS[kind]
    if missing := [name for name in importer.needs if not options.get(name)]:
        raise UserError(f"{', '.join(missing)}: needed, because {kind} recordings do not say it")
    about = ImportOptions(**options)
    if about.stage not in ("", *STAGES):
        raise UserError(f"expected one of {', '.join(STAGES)}; got {about.stage!r}", "stage")
    if not source.exists():
        raise UserError(f"{source}: no such file or directory")
    if out.exists():
        raise UserError(f"{out}: expected a name that is free, but there is such a file already")
    preset = importer.preset or about.preset
    with naming("preset"):
        model = ModelSpec.load(preset) if preset.endswith(".yaml") else load_model(preset)
    try:
        with written_trace(out, source) as writer:
            writer.describe(
                num_experts=model.num_experts,
                top_k=model.top_k,
                where=f"preset {preset}",
                model=model.name,
                score=importer.score,
                phase=about.stage or "prefill and decode",
                domain=about.domain,
                source=importer.recorder,
                licence=about.licence,
            )
            importer.read(source, model, about, writer)
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from None
