"""Recordings that hold expert ids alone: SGLang's and vLLM's.

Shapes: T = tokens of a pass or piece, L = layers of the model, K = top_k.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.workload.importers.arrays import (
    Npz,
    checked,
    from_base64,
    json_lines,
    opened_npz,
    routed_part,
)
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.importers.writer import TraceWriter

BOTH_PHASES = "prefill and decode"
ROUTED = "routed_experts"


def _add(
    ids_TLN: NDArray[np.integer],
    sequence_T: NDArray[np.int64],
    position_T: NDArray[np.integer],
    where: str,
    writer: TraceWriter,
    num_experts: int,
    logical_LP: NDArray[np.integer] | None = None,
) -> NDArray[np.bool_]:
    """Add what was recorded of a pass, and return which tokens that is.

    Args:
        logical_LP: the expert behind each physical one; None = ids are experts.
    """
    known_T, layers = routed_part(ids_TLN, where)
    writer.left_out += int((~known_T).sum())
    if known_T.any() and not writer.num_experts:
        top_k = next(iter(layers.values())).shape[1]
        writer.describe(num_experts=num_experts, top_k=top_k, where=where)
    for layer, ids_TK in layers.items():
        place = f"{where}: layer {layer}"
        if logical_LP is not None:
            if ids_TK.max() >= logical_LP.shape[1]:
                expected = f"physical experts 0 to {logical_LP.shape[1] - 1}"
                raise UserError(f"{place}: expected {expected}, got {ids_TK.max()}")
            ids_TK = logical_LP[layer][ids_TK]
        writer.add(layer, ids_TK, None, place, np.flatnonzero(known_T))
    writer.add_tokens(sequence_T[known_T], position_T[known_T], where)
    return known_T


def _numbered(names: list[str], kinds: tuple[str, ...], path: Path, hint: str = "") -> list[int]:
    """The numbers of arrays that are named ``<number>.<kind>``, ascending.

    Raises:
        ValueError: there are other names, or none.
    """
    forms = {name: re.fullmatch(rf"(\d{{1,9}})\.({'|'.join(kinds)})", name) for name in names}
    others = [name for name, form in forms.items() if form is None]
    if others or not forms:
        got = brief(others[0]) if others else "none"
        raise UserError(f"{path}: expected arrays named 0.{' and 0.'.join(kinds)}, got {got}{hint}")
    return sorted({int(form[1]) for form in forms.values() if form})


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

    Responses (``--enable-return-routed-experts``, and ``return_routed_experts`` in a request) stand one a line of a
    .jsonl file, each with ``routed_experts`` in its ``meta_info`` (or ``sglext``): base64 of int32 [tokens, layers, K],
    all layers of the model, of the prompt and of what was generated but its last token. Only a preset says how many
    layers.
    """
    if source.suffix in (".jsonl", ".json"):
        return _read_responses(source, options, writer)
    with opened_npz(source, CONVERT, options.max_bytes) as npz:
        hint = "; counts of tokens are not who chose whom: --expert-distribution-recorder-mode per_token records that"
        passes = _numbered([name for name in npz.names if name != MAP], (IDS, POSITIONS, LENGTHS), source, hint)
        logical_LP = npz.array(MAP, (None, None))
        if not logical_LP.size or logical_LP.min() < 0:
            raise UserError(f"{npz.where(MAP)}: expected layers of experts from 0, got {brief(logical_LP)}")
        num_experts = options.num_experts or int(logical_LP.max()) + 1
        phases = {"prefill" if f"{index}.{LENGTHS}" in npz.names else "decode" for index in passes}
        writer.metadata["phase"] = " and ".join(sorted(phases, reverse=True))
        num_sequences = 0
        for index in passes:
            sequence_T, position_T, lengths = _sglang_tokens(npz, index)
            ids_LTN = npz.array(f"{index}.{IDS}", (len(logical_LP), len(position_T), None))
            where = npz.where(f"{index}.{IDS}")
            tokens = num_sequences + sequence_T, position_T
            known_T = _add(ids_LTN.transpose(1, 0, 2), *tokens, where, writer, num_experts, logical_LP)
            if (stray_T := known_T & (sequence_T == lengths)).any():
                raise UserError(f"{where}: token {stray_T.argmax()}: expected -1 beyond {LENGTHS}, got experts")
            num_sequences += lengths
    writer.notes.append("a sequence is a prompt or a chunk of one" if "prefill" in phases else "a token is a sequence")
    if writer.left_out:
        writer.notes.append("tokens that only fill up a batch left out")


def _sglang_tokens(npz: Npz, index: int) -> tuple[NDArray[np.int64], NDArray[np.integer], int]:
    """Of one pass: the sequence and the position of each token, and how many sequences there are."""
    position_T = npz.array(f"{index}.{POSITIONS}", (None,))
    name = f"{index}.{LENGTHS}"
    if name not in npz.names:
        return np.arange(len(position_T)), position_T, len(position_T)
    lengths = npz.array(name, (None,))
    if (lengths < 0).any() or lengths.sum() > len(position_T):
        raise UserError(f"{npz.where(name)}: expected lengths of {len(position_T)} tokens in all, got {brief(lengths)}")
    # What is beyond the last sequence fills up the batch; it has no experts.
    padding = len(position_T) - int(lengths.sum())
    return np.repeat(np.arange(len(lengths) + 1), [*lengths, padding]), position_T, len(lengths)


def _read_responses(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    if options.num_layers is None or options.top_k is None or options.num_experts is None:
        raise UserError(f"preset: needed, because {source.name} holds flat arrays and no number of layers and top-k")
    shape = options.num_layers, options.top_k
    writer.metadata["phase"] = BOTH_PHASES
    sequences = itertools.count()
    for line, responses in json_lines(source):
        for response in responses if isinstance(responses, list) else [responses]:
            fields = response if isinstance(response, dict) else {}
            told = fields.get("meta_info") or fields.get("sglext")
            where = f"{line}: {ROUTED}"
            content = from_base64(told.get(ROUTED) if isinstance(told, dict) else None, where, options.max_bytes)
            row_bytes = 4 * shape[0] * shape[1]
            if not content or len(content) % row_bytes:
                expected = f"rows of {shape[0]} layers x top-{shape[1]} as int32 ({row_bytes} bytes)"
                raise UserError(f"{where}: expected {expected}, got {len(content)} bytes")
            ids_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, *shape)
            sequence_T = np.full(len(ids_TLK), next(sequences))
            _add(ids_TLK, sequence_T, np.arange(len(ids_TLK)), where, writer, options.num_experts)


# ---- vLLM ------------------------------------------------------------------------------------------------------------

PROMPT = f"prompt_{ROUTED}"


def read_vllm(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import vLLM's returned routed experts; with ``phase`` prefill or decode, prompts or what was generated alone.

    As documented with 0.21 (``enable_return_routed_experts``), vLLM returns with every request
    ``prompt_routed_experts`` [prompt tokens, layers, K] and with every completion ``routed_experts`` [generated tokens,
    layers, K]; earlier releases put both into the latter. From Python they are arrays:

        numpy.savez("routing.npz", **{f"{i}.{name}": array for i, output in enumerate(outputs) for name, array in
            (("prompt_routed_experts", getattr(output, "prompt_routed_experts", None)),
             ("routed_experts", output.outputs[0].routed_experts)) if array is not None})

    From the server, one response a line; there each is a list, or the base64 text of an array in npy form. Tokens whose
    routing came from a cached prefix are -1 and are left out; layers that route nothing are all 0 in older releases,
    and are left out.
    """
    if options.phase == "training":
        raise UserError("phase: expected prefill, decode, or prefill and decode; got 'training'")
    writer.metadata["phase"] = options.phase or BOTH_PHASES
    pieces = _vllm_npz if source.suffix == ".npz" else _vllm_lines
    for where, sequence, is_prompt, first, ids_TLK in pieces(source, options.max_bytes):
        if options.phase in ("prefill", "decode") and is_prompt != (options.phase == "prefill"):
            writer.left_out += len(ids_TLK)
            continue
        sequence_T, position_T = np.full(len(ids_TLK), sequence), first + np.arange(len(ids_TLK))
        _add(ids_TLK, sequence_T, position_T, where, writer, options.num_experts)
    if writer.left_out:
        writer.notes.append("tokens of the other phase, or whose routing was not recorded, left out")


_Piece = tuple[str, int, bool, int, NDArray[np.integer]]
"""Of tokens of a sequence: file and place, the sequence, whether they are its prompt, first position, ids [T, L, K]."""


def _vllm_npz(path: Path, max_bytes: int) -> Iterator[_Piece]:
    with opened_npz(path, "numpy.savez, as the importer's docstring has it", max_bytes) as npz:
        for sequence, request in enumerate(_numbered(npz.names, (PROMPT, ROUTED), path)):
            position = 0
            for kind in (PROMPT, ROUTED):
                if (name := f"{request}.{kind}") in npz.names:
                    ids_TLK = npz.array(name, (None, None, None))
                    yield npz.where(name), sequence, kind == PROMPT, position, ids_TLK
                    position += len(ids_TLK)


def _vllm_lines(path: Path, max_bytes: int) -> Iterator[_Piece]:
    sequences = itertools.count()
    for where, response in json_lines(path):
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
            raise UserError(f"{where}: choices: expected a list of completions, got {brief(choices)}")
        prompt_TLK = None
        if response.get(PROMPT) is not None:
            prompt_TLK = _vllm_ids(response[PROMPT], f"{where}: {PROMPT}", max_bytes)
        for index, choice in enumerate(choices):
            sequence, length = next(sequences), 0 if prompt_TLK is None else len(prompt_TLK)
            if prompt_TLK is not None and not index:
                yield f"{where}: {PROMPT}", sequence, True, 0, prompt_TLK
            place = f"{where}: choices: {index}: {ROUTED}"
            if choice.get(ROUTED) is None:
                raise UserError(f"{place}: expected lists of experts, got none")
            yield place, sequence, False, length, _vllm_ids(choice[ROUTED], place, max_bytes)


def _vllm_ids(value: Any, where: str, max_bytes: int) -> NDArray[np.integer]:
    """Expert ids [T, L, K] of lists, or of base64 text of an npy file."""
    if isinstance(value, str):
        content = io.BytesIO(from_base64(value, where, max_bytes))
        try:
            value = np.load(content, allow_pickle=False)
        except Exception as error:  # numpy's parser of headers raises whatever it meets
            words = brief(str(error), 100, quoted=False)
            raise UserError(f"{where}: expected an npy array in base64 ({words})") from None
        if not isinstance(value, np.ndarray):
            raise UserError(f"{where}: expected an npy array in base64 (an archive)")
    return checked(value, where, (None, None, None))
