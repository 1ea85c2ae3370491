"""Recordings of servers, which hold expert ids alone: SGLang's and vLLM's.

Shapes: T = tokens of a request, L = layers of the model, K = top_k.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import is_whole_number, parse_json
from moe_ep_bench.workload.arrays import array_of_text, base64_bytes, lines, npz_array, opened_npz
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.writer import PADDING, TraceWriter

ROUTED, LENGTH = "routed_experts", "prompt_length"
# What fills buffers where nothing was recorded, beside ids below 0: zeros, a type's largest value, -1 as uint8.
_FILLS = (0, 255, 2**15 - 1, 2**16 - 1, 2**31 - 1)


class Completion(NamedTuple):
    """What a server returned of one request's tokens, from the prompt's first one on.

    Attributes:
        ids_TLK: experts of all layers of the model; those of layers without experts mean nothing.
        num_prompt: tokens of the prompt; None = nothing says.
    """

    where: str
    ids_TLK: NDArray[np.integer]
    num_prompt: int | None


def read_sglang(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import SGLang's responses with routed experts, one a line.

    ``/generate`` (``--enable-return-routed-experts``, and ``return_routed_experts`` in a request) returns
    ``routed_experts`` in ``meta_info``: base64 of int32 [tokens, layers, K], of the prompt and of what was generated
    but its last token. ``prompt_tokens`` beside it tells the phases.
    """
    if source.suffix in (".npz", ".pt"):
        raise UserError(f"{source}: expected responses of a server with --enable-return-routed-experts, one a line")
    _add_all(_sglang_responses(source, options, writer), options, writer)


def _sglang_responses(source: Path, options: ImportOptions, writer: TraceWriter) -> Iterator[Completion]:
    num_layers, top_k = options.spec.num_layers, options.spec.top_k
    for line, response in _responses(source, writer):
        where, facts = f"{line}: {ROUTED}", response.get("meta_info")
        content = base64_bytes(facts.get(ROUTED) if isinstance(facts, dict) else None, where)
        row_bytes = 4 * num_layers * top_k
        if not content or len(content) % row_bytes:
            expected = f"rows of {num_layers} layers x top-{top_k} as int32 ({row_bytes} bytes)"
            raise UserError(f"{where}: expected {expected}, got {len(content)} bytes")
        ids_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, num_layers, top_k)
        yield Completion(where, ids_TLK, _count(facts, "prompt_tokens"))


def read_vllm(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import vLLM's returned routed experts.

    vLLM (``enable_return_routed_experts``) returns ``routed_experts`` [tokens, layers, K] with every completion: of its
    prompt and of what was generated but its last token. From the server, one response with one completion a line, as
    lists or as the base64 text of an array in npy form; there ``prompt_token_ids`` (a request's ``return_token_ids``)
    or ``usage.prompt_tokens`` says how long the prompt is. From Python they are arrays:

        numpy.savez("routing.npz", **{f"{i}.{name}": value for i, output in enumerate(outputs) for name, value in
            (("routed_experts", output.outputs[0].routed_experts), ("prompt_length", len(output.prompt_token_ids)))})

    Ids are uint8 for up to 256 experts. Tokens whose routing was not recorded are -1 (255) and are left out.
    """
    read = _vllm_npz if source.suffix == ".npz" else _vllm_responses
    _add_all(read(source, writer), options, writer)


def _vllm_npz(source: Path, _: TraceWriter) -> Iterator[Completion]:
    with opened_npz(source, "numpy.savez, as the importer's docstring has it") as npz:
        forms = [re.fullmatch(rf"(\d{{1,9}})\.({ROUTED}|{LENGTH})", name) for name in npz.files]
        if None in forms:
            expected = f"arrays named 0.{ROUTED} and 0.{LENGTH}"
            raise UserError(f"{source}: expected {expected}, got {brief(npz.files[forms.index(None)])}")
        for request in sorted({int(form[1]) for form in forms if form}):
            name, length = f"{request}.{ROUTED}", f"{request}.{LENGTH}"
            num_prompt = int(npz_array(npz, source, length, ())) if length in npz.files else None
            yield Completion(f"{source}: {name}", npz_array(npz, source, name, (None, None, None)), num_prompt)


def _vllm_responses(source: Path, writer: TraceWriter) -> Iterator[Completion]:
    for line, response in _responses(source, writer):
        where, choices = f"{line}: choices", response.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise UserError(f"{where}: expected one completion a response (a request's n = 1), got {brief(choices)}")
        prompt = choices[0].get("prompt_token_ids") or response.get("prompt_token_ids")
        num_prompt = len(prompt) if isinstance(prompt, list) else _count(response.get("usage"), "prompt_tokens")
        ids_TLK = array_of_text(choices[0].get(ROUTED), f"{where}: 0: {ROUTED}", (None, None, None))
        yield Completion(f"{where}: 0: {ROUTED}", ids_TLK, num_prompt)


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
    return value if is_whole_number(value) else None


def _add_all(completions: Iterator[Completion], options: ImportOptions, writer: TraceWriter) -> None:
    """Add completions' tokens, or those of one phase.

    Experts below 0 say that nothing was recorded of a token. No router gives a token one expert twice, so that a token
    with one of ``_FILLS`` in all its places is padding; with K = 1 that cannot be told.

    Raises:
        ValueError: nothing tells the phase, a token was recorded in part, or the model has other layers.
    """
    spec, phase = options.spec, options.phase
    writer.describe(num_experts=spec.num_experts, top_k=spec.top_k, where=f"preset {options.preset}")
    writer.metadata["phase"] = phase or "prefill and decode"
    for sequence, (where, ids_TLK, num_prompt) in enumerate(completions):
        if ids_TLK.shape[1:] != (spec.num_layers, spec.top_k):
            expected = f"{spec.num_layers} layers and top-{spec.top_k} as {spec.name} has"
            raise UserError(f"{where}: expected {expected}, got shape {ids_TLK.shape}")
        if num_prompt is None and phase:
            raise UserError(
                f"phase: {where}: nothing says which tokens are the prompt's; expected none, or prompt_token_ids in "
                "responses (requests with return_token_ids), prompt_tokens, or prompt_length in npz"
            )
        if num_prompt is not None and len(ids_TLK) < num_prompt:
            raise UserError(f"{where}: expected all {num_prompt} tokens of the prompt, got {len(ids_TLK)} recorded")
        position_T, ids_TM = np.arange(len(ids_TLK)), ids_TLK[:, spec.moe_layers].reshape(len(ids_TLK), -1)
        is_prompt_T = position_T < (num_prompt or 0)
        is_other_T = {"prefill": ~is_prompt_T, "decode": is_prompt_T}.get(phase, np.zeros_like(is_prompt_T))
        is_unknown_T = ~is_other_T & (ids_TM < 0).all(axis=1)
        is_fill_T = (ids_TM == ids_TM[:, :1]).all(axis=1) & np.isin(ids_TM[:, 0], _FILLS)
        is_padding_T = ~is_other_T & is_fill_T & (spec.top_k > 1)
        kept_T = ~(is_other_T | is_unknown_T | is_padding_T)
        partly_T = kept_T & (ids_TM < 0).any(axis=1)
        if partly_T.any():
            token = int(partly_T.argmax())
            expected = f"{spec.top_k} experts in each MoE layer, or -1 in all"
            raise UserError(f"{where}: token {token}: expected {expected}; got {brief(ids_TLK[token].tolist())}")
        reasons = ("of another phase", is_other_T), ("that were not recorded", is_unknown_T), (PADDING, is_padding_T)
        for what, is_out_T in reasons:
            writer.left_out[what] += int(is_out_T.sum())
        names = position_T[kept_T]
        for layer in spec.moe_layers if kept_T.any() else ():
            writer.add(layer, ids_TLK[kept_T, layer], None, f"{where}: layer {layer}", names)
        writer.add_tokens(sequence, position_T[kept_T], where)
