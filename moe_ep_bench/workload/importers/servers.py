"""Recordings of servers, which hold expert ids alone: SGLang's and vLLM's.

Shapes: T = tokens of a pass or request, L = layers of the model, K = top_k.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import parse_json
from moe_ep_bench.workload.arrays import Npz, array_of_text, base64_bytes, lines, opened_npz
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.writer import PADDING, TraceWriter

ROUTED = "routed_experts"
# What fills buffers where nothing was recorded, beside ids below 0: zeros, a type's largest value, -1 as uint8.
_FILLS = (0, 255, 2**15 - 1, 2**16 - 1, 2**31 - 1)
# Reasons why a token is left out.
UNKNOWN, OTHER_PHASE, UNUSED = "that were not recorded", "of another phase", "that only fill up a batch"


class Completion(NamedTuple):
    """What a server returned of one request's tokens, from the prompt's first one on.

    Attributes:
        ids_TLK: experts, -1 where nothing was recorded.
        num_prompt: tokens of the prompt; None = nothing says.
    """

    where: str
    ids_TLK: NDArray[np.integer]
    num_prompt: int | None


def _add_completions(completions: Iterator[Completion], options: ImportOptions, writer: TraceWriter) -> None:
    """Add completions' tokens, or those of one phase."""
    phase = options.phase
    writer.metadata["phase"] = phase or "prefill and decode"
    for sequence, (where, ids_TLK, num_prompt) in enumerate(completions):
        if num_prompt is None and phase:
            raise UserError(
                f"phase: {where}: nothing says which tokens are the prompt's; expected none, or prompt_token_ids in "
                "responses (requests with return_token_ids), prompt_tokens, or prompt_length in npz"
            )
        if num_prompt is not None and len(ids_TLK) < num_prompt:
            raise UserError(f"{where}: expected all {num_prompt} tokens of the prompt, got {len(ids_TLK)} recorded")
        kept = {"prefill": slice(num_prompt), "decode": slice(num_prompt, None), None: slice(None)}[phase]
        position_T = np.arange(len(ids_TLK))[kept]
        writer.left_out[OTHER_PHASE] += len(ids_TLK) - len(position_T)
        _add(ids_TLK[kept], sequence, position_T, where, options, writer)


def _add(
    ids_TLN: NDArray[np.integer],
    sequence: NDArray[np.int64] | int,
    position_T: NDArray[np.integer],
    where: str,
    options: ImportOptions,
    writer: TraceWriter,
    logical_LP: NDArray[np.integer] | None = None,
) -> None:
    """Add what was recorded of a pass, in arrays of one size whose rest programs fill up.

    Experts below 0 say that nothing was recorded: of a token, or a place beyond the model's top-k. A layer with no
    other ids than 0 does not route: nobody wrote to its buffer. No router gives a token one expert twice, so that a
    token with one of ``_FILLS`` in all its places is padding. With K = 1 neither can be told from the ids.

    Args:
        logical_LP: the expert behind each physical one; None = ids are experts.

    Raises:
        ValueError: a token was recorded in part, or the model has other layers.
    """
    if not (ids_TLN >= 0).any():
        writer.left_out[UNKNOWN] += len(ids_TLN)
        return
    spec, top_k = options.spec, int((ids_TLN >= 0).any(axis=(0, 1)).sum())
    if spec is None and top_k == 1:
        raise UserError(f"preset: needed, because {where} has top-1: a dense layer's zeros look like expert 0")
    if spec is not None and (ids_TLN.shape[1], top_k) != (spec.num_layers, spec.top_k):
        expected = f"{spec.num_layers} layers and top-{spec.top_k} as the model has"
        raise UserError(f"{where}: expected {expected}, got {ids_TLN.shape[1]} and top-{top_k}")
    layers = [*spec.moe_layers] if spec is not None else np.flatnonzero((ids_TLN > 0).any(axis=(0, 2))).tolist()
    routed_TM, fill_T1 = ids_TLN[:, layers].reshape(len(ids_TLN), -1), ids_TLN[:, layers[-1] if layers else 0, :1]
    is_chosen_TM, is_place_M = routed_TM >= 0, np.tile(np.arange(ids_TLN.shape[2]) < top_k, len(layers))
    is_fill_T = (routed_TM[:, is_place_M] == fill_T1).all(axis=1) & np.isin(fill_T1[:, 0], _FILLS)
    is_padding_T = is_fill_T & (top_k > 1)
    known_T = is_chosen_TM.any(axis=1) & ~is_padding_T
    wrong_T = known_T & (is_chosen_TM != is_place_M).any(axis=1)
    if wrong_T.any():
        token = int(wrong_T.argmax())
        expected = f"{top_k} experts in each of the layers {brief(layers)}, or -1 in all"
        raise UserError(f"{where}: token {token}: expected {expected}; got {brief(ids_TLN[token].tolist())}")
    writer.left_out[PADDING] += int(is_padding_T.sum())
    writer.left_out[UNKNOWN] += int((~known_T & ~is_padding_T).sum())
    if known_T.any() and not writer.num_experts:
        num_experts = options.num_experts or 1 + int(ids_TLN.max() if logical_LP is None else logical_LP.max())
        writer.describe(num_experts=num_experts, top_k=top_k, where=where)
    for layer in layers if known_T.any() else ():
        ids_TK, place = ids_TLN[known_T, layer, :top_k], f"{where}: layer {layer}"
        if logical_LP is not None:
            if ids_TK.max() >= logical_LP.shape[1]:
                raise UserError(f"{place}: expected physical experts below {logical_LP.shape[1]}, got {ids_TK.max()}")
            ids_TK = logical_LP[layer][ids_TK]
        writer.add(layer, ids_TK, None, place, np.flatnonzero(known_T))
    sequence_T = np.broadcast_to(sequence, position_T.shape)
    writer.add_tokens(sequence_T[known_T], position_T[known_T], where)


def _numbered(npz: Npz, kinds: tuple[str, ...], beside: str = "", hint: str = "") -> list[int]:
    """The numbers of arrays that are named ``<number>.<kind>``, ascending.

    Raises:
        ValueError: there are other names, or none.
    """
    names = [name for name in npz.names if name != beside]
    forms = [re.fullmatch(rf"(\d{{1,9}})\.({'|'.join(kinds)})", name) for name in names]
    if None in forms or not forms:
        got = brief(names[forms.index(None)]) if forms else "none"
        raise UserError(f"{npz.path}: expected arrays named 0.{' and 0.'.join(kinds)}, got {got}{hint}")
    return sorted({int(form[1]) for form in forms if form})


def _responses(path: Path, writer: TraceWriter) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a server's responses, one a line, each with its place; the writer's notes name lines that hold none.

    Raises:
        ValueError: there is no response, or lines of a stream, which carries no routing.
    """
    problems, num_found = [], 0
    for where, line in lines(path):
        if line.startswith(b"data:"):
            raise UserError(f"{where}: a stream, which carries no routing; expected requests without stream")
        try:
            response = parse_json(line, where) if line.strip() else None
        except UserError as error:
            problems.append(str(error))
            continue
        if isinstance(response, dict) and not (response.get("error") or response.get("object") == "error"):
            num_found += 1
            yield where, response
        elif line.strip():
            problems.append(f"{where}: expected a response, an object, got {brief(response)}")
    if not num_found:
        raise UserError(problems[0] if problems else f"{path}: expected a response in each line, got none")
    if problems:
        writer.notes.append(f"{len(problems):,} lines without a response left out, the first {problems[0]}")


def _count(record: Any, name: str) -> int | None:
    """A number of tokens in an object; None where there is none."""
    value = record.get(name) if isinstance(record, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


# ---- SGLang ----------------------------------------------------------------------------------------------------------

CONVERT = (
    "python -c \"import sys, numpy, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "numpy.savez(sys.argv[2], last_physical_to_logical_map=d['last_physical_to_logical_map'], "
    "**{f'{i}.{k}': r[k] for i, r in enumerate(d['records']) "
    "for k in ('topk_ids_of_layer', 'positions', 'extend_seq_lens') if r.get(k) is not None})\" dump.pt dump.npz"
)

MAP = "last_physical_to_logical_map"
IDS, POSITIONS, LENGTHS = "topk_ids_of_layer", "positions", "extend_seq_lens"


def read_sglang(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one rank's dump of SGLang's expert distribution recorder, mode ``per_token``, as npz; or responses.

    SGLang dumps with ``torch.save``, which is a pickle. Where SGLang runs, and trusts its own file, ``CONVERT``, typed
    there, converts it. A dump has, for every forward pass of one rank, ``topk_ids_of_layer`` [layers, tokens, 8] (-1:
    no such token, no such layer, or a model with fewer than 8), ``positions`` and, of prefill passes,
    ``extend_seq_lens``; and once ``last_physical_to_logical_map`` [layers, physical experts]. Ids are physical:
    replicas of an expert have ids of their own, which the map undoes (if experts were rebalanced while SGLang recorded,
    the last map is wrong for the passes before). Modes ``stat``, ``stat_approx`` and ``per_pass`` count tokens per
    expert; counts are not routing.

    A prefill pass holds as many sequences as ``extend_seq_lens`` says. Requests are not named, so the pieces of a
    prompt that was prefilled in chunks, and the tokens of a decode pass, each stand alone.

    Responses of ``/generate`` (``--enable-return-routed-experts``, and ``return_routed_experts`` in a request) stand
    one a line, each with ``routed_experts`` in its ``meta_info``: base64 of int32 [tokens, layers, K], all layers of
    the model, of the prompt and of what was generated but its last token. Only a preset says how many layers.
    ``prompt_tokens`` beside it tells the phases.
    """
    if source.suffix in (".jsonl", ".json"):
        return _add_completions(_sglang_completions(source, options, writer), options, writer)
    with opened_npz(source, CONVERT) as npz:
        hint = "; counts of tokens are not who chose whom: --expert-distribution-recorder-mode per_token records that"
        passes = _numbered(npz, (IDS, POSITIONS, LENGTHS), MAP, hint)
        logical_LP = npz.array(MAP, (None, None))
        if not logical_LP.size or logical_LP.min() < 0:
            raise UserError(f"{npz.where(MAP)}: expected layers of experts from 0, got {brief(logical_LP)}")
        phases, num_sequences = set(), 0
        for index in passes:
            where, is_prefill = npz.where(f"{index}.{IDS}"), f"{index}.{LENGTHS}" in npz.names
            phase = "prefill" if is_prefill else "decode"
            if options.phase not in (None, phase):
                continue
            phases.add(phase)
            position_T = npz.array(f"{index}.{POSITIONS}", (None,))
            # What is beyond the last sequence fills up the batch.
            length_S = npz.array(f"{index}.{LENGTHS}", (None,)) if is_prefill else np.ones(len(position_T), int)
            num_tokens = int(length_S.sum())
            if length_S.min(initial=0) < 0 or num_tokens > len(position_T):
                expected = f"lengths of {len(position_T)} tokens in all"
                raise UserError(f"{npz.where(f'{index}.{LENGTHS}')}: expected {expected}, got {brief(length_S)}")
            ids_LTN = npz.array(f"{index}.{IDS}", (len(logical_LP), len(position_T), None))
            writer.left_out[UNUSED] += len(position_T) - num_tokens
            sequence_T = num_sequences + np.repeat(np.arange(len(length_S)), length_S)
            ids_TLN, position_T = ids_LTN.transpose(1, 0, 2)[:num_tokens], position_T[:num_tokens]
            _add(ids_TLN, sequence_T, position_T, where, options, writer, logical_LP)
            num_sequences += len(length_S)
    writer.metadata["phase"] = " and ".join(sorted(phases, reverse=True))
    writer.notes.append("a sequence is a prompt or a chunk of one" if "prefill" in phases else "a token is a sequence")


def _sglang_completions(source: Path, options: ImportOptions, writer: TraceWriter) -> Iterator[Completion]:
    if (spec := options.spec) is None:
        raise UserError(f"preset: needed, because {source.name} holds flat arrays and no number of layers and top-k")
    row_bytes = 4 * spec.num_layers * spec.top_k
    for line, response in _responses(source, writer):
        where, facts = f"{line}: {ROUTED}", response.get("meta_info")
        content = base64_bytes(facts.get(ROUTED) if isinstance(facts, dict) else None, where)
        if not content or len(content) % row_bytes:
            expected = f"rows of {spec.num_layers} layers x top-{spec.top_k} as int32 ({row_bytes} bytes)"
            raise UserError(f"{where}: expected {expected}, got {len(content)} bytes")
        ids_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, spec.num_layers, spec.top_k)
        yield Completion(where, ids_TLK, _count(facts, "prompt_tokens"))


# ---- vLLM ------------------------------------------------------------------------------------------------------------

LENGTH = "prompt_length"


def read_vllm(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import vLLM's returned routed experts.

    vLLM (``enable_return_routed_experts``) returns ``routed_experts`` [tokens, layers, K] with every completion: of its
    prompt and of what was generated but its last token. From the server, one response with one completion a line, as
    lists or as the base64 text of an array in npy form; there ``prompt_token_ids`` (a request's ``return_token_ids``)
    or ``usage.prompt_tokens`` says how long the prompt is. From Python they are arrays:

        numpy.savez("routing.npz", **{f"{i}.{name}": value for i, output in enumerate(outputs) for name, value in
            (("routed_experts", output.outputs[0].routed_experts), ("prompt_length", len(output.prompt_token_ids)))})

    Ids are uint8 for up to 256 experts. Tokens whose routing was not recorded are -1 (255) and are left out; layers
    that route nothing are all 0 in older releases, and are left out.
    """
    read = _vllm_npz if source.suffix == ".npz" else _vllm_responses
    _add_completions(read(source, writer), options, writer)


def _vllm_npz(source: Path, _: TraceWriter) -> Iterator[Completion]:
    with opened_npz(source, "numpy.savez, as the importer's docstring has it") as npz:
        for request in _numbered(npz, (ROUTED, LENGTH)):
            name, length = f"{request}.{ROUTED}", f"{request}.{LENGTH}"
            num_prompt = int(npz.array(length, ())) if length in npz.names else None
            yield Completion(npz.where(name), npz.array(name, (None, None, None)), num_prompt)


def _vllm_responses(source: Path, writer: TraceWriter) -> Iterator[Completion]:
    for line, response in _responses(source, writer):
        where, choices = f"{line}: choices", response.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise UserError(f"{where}: expected one completion a response (a request's n = 1), got {brief(choices)}")
        prompt = choices[0].get("prompt_token_ids") or response.get("prompt_token_ids")
        num_prompt = len(prompt) if isinstance(prompt, list) else _count(response.get("usage"), "prompt_tokens")
        ids_TLK = array_of_text(choices[0].get(ROUTED), f"{where}: 0: {ROUTED}", (None, None, None))
        yield Completion(f"{where}: 0: {ROUTED}", ids_TLK, num_prompt)
