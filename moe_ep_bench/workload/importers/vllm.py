"""vLLM's returned routed experts (``enable_return_routed_experts``), saved as npz or JSON lines.

As documented with 0.21, vLLM returns with every request ``prompt_routed_experts`` [prompt tokens,
layers, K] and with every completion ``routed_experts`` [generated tokens, layers, K]; earlier
releases put both into the latter. From Python they are arrays:

    numpy.savez("routing.npz", **{f"{i}.{name}": array for i, output in enumerate(outputs) for name, array in
        (("prompt_routed_experts", getattr(output, "prompt_routed_experts", None)),
         ("routed_experts", output.outputs[0].routed_experts)) if array is not None})

From the server, one response a line; there each is a list, or the base64 text of an array in npy form. Tokens whose
routing came from a cached prefix are -1 and are left out; layers that route nothing are all 0 in older releases, and
are left out. There are ids only, no scores.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import parse_json
from moe_ep_bench.workload.importers.sources import (
    ImportOptions,
    from_base64,
    integers,
    lines,
    opened_npz,
    routing_layers,
)
from moe_ep_bench.workload.importers.writer import TraceWriter

PROMPT, GENERATED = "prompt_routed_experts", "routed_experts"


class Piece(NamedTuple):
    """Some tokens of a sequence, one after the other."""

    where: str
    sequence: int
    is_prompt: bool
    position: int
    """Of the first of them."""
    ids_TLK: NDArray[np.integer]


def read(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import all requests or, with ``phase`` prefill or decode, their prompts or what was generated.

    Args:
        source: the npz or JSONL file.
    """
    if options.phase == "training":
        raise UserError("phase: expected prefill, decode, or prefill and decode; got 'training'")
    shape: tuple[int, ...] = ()
    layers: list[int] | None = None
    for piece in _from_npz(source) if source.suffix == ".npz" else _from_lines(source):
        if options.phase in ("prefill", "decode") and piece.is_prompt != (options.phase == "prefill"):
            writer.left_out += len(piece.ids_TLK)
            continue
        if not shape:
            shape = piece.ids_TLK.shape[1:]
            options.check_top_k(shape[1], piece.where)
            writer.describe(
                num_experts=options.num_experts,
                top_k=shape[1],
                where=piece.where,
                phase=options.phase or "prefill and decode",
            )
        elif piece.ids_TLK.shape[1:] != shape:
            raise UserError(f"{piece.where}: expected layers and top-k {shape}, got {piece.ids_TLK.shape[1:]}")
        layers = _add(piece, layers, writer)
    if writer.left_out:
        writer.notes.append("tokens of the other phase, or whose routing was not recorded, left out")
    if layers and len(layers) < shape[0]:
        writer.notes.append(f"{shape[0] - len(layers)} layers that route nothing left out")


def _add(piece: Piece, layers: list[int] | None, writer: TraceWriter) -> list[int] | None:
    """Add a piece; return the layers that route, which the first recorded tokens tell."""
    unknown_TLK = piece.ids_TLK == -1
    known_T = ~unknown_TLK.any(axis=(1, 2))
    half_T = ~known_T & ~(unknown_TLK | (piece.ids_TLK == 0)).all(axis=(1, 2))
    if half_T.any():
        token = piece.position + int(half_T.argmax())
        raise UserError(f"{piece.where}: token {token}: expected -1 for all experts of a token or for none, got some")
    writer.left_out += int((~known_T).sum())
    ids_TLK = piece.ids_TLK[known_T]
    if not len(ids_TLK):
        return layers
    if layers is None:
        layers = routing_layers(ids_TLK)
    position_T = piece.position + np.flatnonzero(known_T)
    writer.add_tokens(piece.sequence, position_T, piece.where)
    for layer in range(ids_TLK.shape[1]):
        where = f"{piece.where}: layer {layer}"
        if layer in layers:
            writer.add(layer, ids_TLK[:, layer], None, where, position_T)
        elif ids_TLK[:, layer].any():
            raise UserError(f"{where}: expected 0 only, as for the first tokens, got others")
    return layers


def _from_npz(path: Path) -> Iterator[Piece]:
    form = re.compile(rf"(\d{{1,9}})\.({PROMPT}|{GENERATED})")
    with opened_npz(path) as npz:
        requests: dict[int, list[str]] = {}
        for name in npz.names:
            match = form.fullmatch(name)
            if not match:
                raise UserError(f"{path}: expected names like 0.{PROMPT} and 0.{GENERATED}, got {brief(name)}")
            requests.setdefault(int(match[1]), []).append(match[2])
        for sequence, request in enumerate(sorted(requests)):
            position = 0
            for kind in sorted(requests[request]):  # the prompt's name comes first
                name = f"{request}.{kind}"
                ids_TLK = npz.array(name, 3)
                yield Piece(npz.where(name), sequence, kind == PROMPT, position, ids_TLK)
                position += len(ids_TLK)


def _ids(value: object, where: str) -> NDArray[np.integer]:
    """Expert ids [T, L, K] of lists, or of base64 text of an npy file."""
    if not isinstance(value, str):
        return integers(value, where, (None, None, None))
    content = from_base64(value, where)
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise UserError(f"{where}: expected an npy array in base64 ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.dtype.kind not in "iu":
        got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise UserError(f"{where}: expected whole numbers of 3 dimensions, got {got}")
    return array


def _from_lines(path: Path) -> Iterator[Piece]:
    sequence = 0
    for where, line in lines(path):
        response = parse_json(line, where)
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
            raise UserError(f"{where}: choices: expected a list of completions, got {brief(choices)}")
        prompt = response.get(PROMPT)
        length = 0
        if prompt is not None:
            ids_TLK = _ids(prompt, f"{where}: {PROMPT}")
            length = len(ids_TLK)
            yield Piece(f"{where}: {PROMPT}", sequence, True, 0, ids_TLK)
        for index, choice in enumerate(choices):
            place = f"{where}: choices: {index}: {GENERATED}"
            if choice.get(GENERATED) is None:
                raise UserError(f"{place}: expected lists of experts, got none")
            ids_TLK = _ids(choice[GENERATED], place)
            yield Piece(place, sequence, False, length, ids_TLK)
            sequence += 1
